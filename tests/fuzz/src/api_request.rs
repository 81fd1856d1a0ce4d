//! Bodies and queries of the API door: whatever a jailed program sends, it is an effect inside the workspace or a
//! typed refusal.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tollgate::{
    doors::request::{self, Ask, Malformed, Place},
    effect::{path::from_workspace_path, Effect, Resource, RunId, Subject},
};

fuzz_target!(|data: &[u8]| {
    let Some((way, data)) = data.split_first() else { return };
    let place = Place { run: RunId("0123456789ab".into()), workspace: b"/home/user/project".to_vec() };
    let asked = match way % 4 {
        0 => request::parse(data, &place),
        1 => request::read(data, u64::from(*way), None, &place),
        2 => request::why(pairs(data), &place),
        _ => {
            let mut words = data.splitn(3, |byte| *byte == b'\n');
            let path = words.next().unwrap_or_default();
            let mut text = || words.next().and_then(|word| std::str::from_utf8(word).ok());
            let (mode, expect) = (text(), text());
            request::write_file(path, (tollgate::effect::Digest::of(data), data.len() as u64), mode, expect, &place)
        }
    };
    match asked {
        Ok(ask) => inside(ask),
        Err(malformed) => said(&malformed),
    }
});

/// What passes names one object, inside the workspace or of the run itself, and has one digest.
fn inside(ask: Ask) {
    match &ask.resource {
        Resource::Workspace { path } => {
            let path = from_workspace_path(path).expect("a resource is written as one");
            assert!(path.components().all(|part| matches!(part, std::path::Component::Normal(_))), "{path:?}");
        }
        // Only ever refused; but never relative, where it could mean something in the workspace.
        Resource::Host { path } => assert!(path.starts_with('/'), "{path:?}"),
        Resource::Run { .. } | Resource::Address { .. } | Resource::Syscall { .. } | Resource::Url { .. } => {}
    }
    assert!(ask.kind.declaration().at_api_door, "{}", ask.kind);
    let subject = Subject { uid: 1000, run: Some(RunId("0123456789ab".into())), agent: None };
    let effect = Effect {
        kind: ask.kind,
        resource: ask.resource,
        subject,
        room: None,
        door: tollgate::effect::Door::Api,
        request: ask.request,
    };
    let text = serde_json::to_vec(&effect).expect("an effect is JSON");
    let again: Effect = serde_json::from_slice(&text).expect("and JSON is an effect");
    assert_eq!((again.digest(), &again), (effect.digest(), &effect));
}

/// A refusal always says something.
fn said(malformed: &Malformed) {
    assert!(!malformed.to_string().is_empty() && !malformed.hint().is_empty() && !malformed.problem().is_empty());
}

fn pairs(data: &[u8]) -> Vec<(String, String)> {
    let text = String::from_utf8_lossy(data);
    let split = text.split('&').filter_map(|pair| pair.split_once('='));
    split.map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
}
