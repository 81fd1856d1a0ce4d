//! Rules about URLs against requests, both from anywhere: what a pattern allows, the same pattern denies; what is named
//! exactly is matched; and another host never is. The first line is a pattern, the second a method and the third a URL;
//! the rest is the content.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tollgate::{
    chain::admission::{
        Admission, Home, Kinds, Layer, Listed, Origin, Paths, Rule, Ruling, Target, UrlPattern, Verdict,
    },
    doors::network::operation,
    effect::{http, Door, Effect, Kind, Request, RunId, Subject},
};

fuzz_target!(|data: &[u8]| {
    let mut parts = data.splitn(4, |byte| *byte == b'\n');
    let mut text = || parts.next().and_then(|part| std::str::from_utf8(part).ok());
    let (Some(pattern), Some(method), Some(url)) = (text(), text(), text()) else { return };
    let body = parts.next().unwrap_or_default();
    let Ok(request) = http::Request::parse(method, url) else { return };
    let query = request.path.split_once('?').map(|(_, query)| query);
    let _ = operation::of_target(&request.method, request.path_alone(), query);
    for kind in ["application/json", "application/graphql"] {
        let strongest = operation::of_graphql(query, kind, Some(body));
        // What the content alone does, no target makes less.
        assert!(strongest.is_some() || operation::of_body(kind, body).is_none());
    }

    if let Some(exact) = UrlPattern::exactly(&request) {
        if let Ok(exact) = UrlPattern::parse(&exact) {
            assert_eq!(decide(&exact, Verdict::Deny, &request), Decision::Denied, "{exact:?} {request:?}");
            let elsewhere = http::Request { host: format!("other-{}", request.host), ..request.clone() };
            assert_ne!(decide(&exact, Verdict::Allow, &elsewhere), Decision::Allowed, "{exact:?} {elsewhere:?}");
        }
    }
    let Ok(pattern) = UrlPattern::parse(pattern) else { return };
    let allowed = decide(&pattern, Verdict::Allow, &request) == Decision::Allowed;
    let denied = decide(&pattern, Verdict::Deny, &request) == Decision::Denied;
    assert!(!allowed || denied, "{pattern:?} allows what it does not deny: {request:?}");
});

#[derive(Debug, PartialEq, Eq)]
enum Decision {
    Allowed,
    Denied,
    Unmatched,
}

fn decide(pattern: &UrlPattern, verdict: Verdict, request: &http::Request) -> Decision {
    let target = Target { urls: Some(Listed::new(vec![pattern.clone()])), ..Target::default() };
    let origin = Origin { file: "here".into(), line: 1, text: String::new() };
    let rule = Rule { verdict, kinds: Kinds::Only(vec![Kind::HttpRequest]), paths: Paths::Any, target, origin };
    let admission = Admission::of(Layer::new("here", Home::File, vec![rule]));
    let effect = Effect {
        kind: Kind::HttpRequest,
        resource: request.resource(),
        subject: Subject { uid: 1000, run: Some(RunId("0123456789ab".into())), agent: None },
        room: None,
        door: Door::Network,
        request: Request::Http(request.clone()),
    };
    match admission.rule_on(&effect) {
        Ruling::Allow { .. } => Decision::Allowed,
        Ruling::Deny { origin } if origin.file == "here" => Decision::Denied,
        // What is no request of the network at all is refused before any rule.
        Ruling::Deny { .. } if verdict == Verdict::Deny => Decision::Denied,
        Ruling::Deny { .. } | Ruling::Ask { .. } | Ruling::Unmatched => Decision::Unmatched,
    }
}
