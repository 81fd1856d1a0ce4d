//! What a refusal says: which effect, by which rule or policy, and what to change.

use super::{urls::UrlPattern, Home, Layer, Origin, COMMAND_LINE, NAME};
use crate::{
    chain::Answer,
    effect::{http, net, path::shell_word, Door, Effect, Request, Resource},
};

/// A rule says `deny`.
pub(super) fn denied(effect: &Effect, origin: &Origin) -> Answer {
    let hint = match origin.file == COMMAND_LINE {
        true => format!("no other rule can allow it: leave `{}` out", origin.text),
        false => format!("no other rule can allow it: take it out of the rule at {}:{}", origin.file, origin.line),
    };
    Answer::refused(NAME, format!("{}: refused by the rule {origin}", named(effect)), hint)
}

/// No rule can ever admit it.
pub(super) fn never(effect: &Effect, origin: &Origin) -> Answer {
    let hint = match &effect.resource {
        _ if effect.door == Door::Network => "use the host's name, or its address in the usual form",
        Resource::Host { .. } => "start the run in a folder that holds what it needs, or show the path with `--view`",
        Resource::Workspace { .. } | Resource::Run { .. } | Resource::Url { .. } => {
            "report this as a bug of Tollgate's"
        }
        Resource::Address { .. } => "allow the host by its name, with `--allow HOST` or `--allow HOST:PORT`",
        Resource::Syscall { .. } => "the list of system calls is in docs/policy.md, with a reason for each",
    };
    Answer::refused(NAME, format!("{}: {}", named(effect), origin.text), hint)
}

/// No rule of a layer matches it.
pub(super) fn unmatched(effect: &Effect, layer: &Layer, path: Option<&str>) -> Answer {
    let object = path.map_or_else(|| named(effect), |path| format!("{} {path}", effect.kind));
    let rule = match path {
        // The root is matched by `**` alone; no narrower pattern exists.
        Some("") => format!("[[allow]] effect = [\"{}\"], path = [\"**\"]", effect.kind),
        Some(path) => {
            format!("[[allow]] effect = [\"{}\"], path = [\"{}\"]", effect.kind, toml_escape(&exact_pattern(path)))
        }
        None => match &effect.request {
            Request::Http(request) => rule_of_request(request),
            Request::Net(net::Request::Connect { host, port, .. }) => format!(
                "[[allow]] effect = [\"net/connect\", \"http/request\"], host = [\"{}\"], port = [{port}]",
                toml_escape(host)
            ),
            Request::Net(net::Request::Accept { port, .. }) => {
                format!("[[allow]] effect = [\"net/accept\"], port = [{port}]")
            }
            Request::Net(net::Request::Resolve { name, .. }) => {
                format!("[[allow]] effect = [\"http/request\"], host = [\"{}\"]", toml_escape(name))
            }
            Request::Fs(_) | Request::Run(_) | Request::Jail(_) | Request::Api(_) | Request::Program(_) => {
                format!("[[allow]] effect = [\"{}\"]", effect.kind)
            }
        },
    };
    let in_file = match layer.home {
        Home::File => format!("add to {}: {rule}", layer.policy),
        Home::Builtin => {
            format!("write a policy with extends = [\"{}\"] and {rule}, and name it with --policy", layer.policy)
        }
    };
    let hint = match flags(effect) {
        Some(flags) => format!("start the run with {flags}; or {in_file}"),
        None => in_file,
    };
    Answer::refused(NAME, format!("{object}: no rule of the policy {} allows it", layer.policy), hint)
}

/// The kind and the object as a sentence names them; of a request the method too.
pub(super) fn named(effect: &Effect) -> String {
    match &effect.request {
        Request::Http(request) => match &request.operation {
            Some(operation) => format!("{} {} {} ({operation})", effect.kind, request.method, effect.resource),
            None => format!("{} {} {}", effect.kind, request.method, effect.resource),
        },
        Request::Fs(_)
        | Request::Run(_)
        | Request::Jail(_)
        | Request::Api(_)
        | Request::Program(_)
        | Request::Net(_) => format!("{} {}", effect.kind, effect.resource),
    }
}

/// The options of `tollgate run` that would allow an effect of the network.
fn flags(effect: &Effect) -> Option<String> {
    let flag = |value: &str| format!("`--allow {}`", shell_word(value));
    Some(match &effect.request {
        Request::Http(request) => {
            let host = net::bracketed(&request.host);
            let whole = match request.port == request.scheme.default_port() {
                true => flag(&host),
                false => flag(&format!("{host}:{}", request.port)),
            };
            match UrlPattern::exactly(request) {
                Some(url) => format!("{whole}, or for this alone {}", flag(&format!("{} {url}", request.method))),
                None => whole,
            }
        }
        Request::Net(net::Request::Connect { host, port, .. }) => flag(&format!("{}:{port}", net::bracketed(host))),
        Request::Net(net::Request::Accept { port, inside, .. }) => format!("`--publish {port}:{inside}`"),
        Request::Net(net::Request::Resolve { name, .. }) => flag(name),
        Request::Fs(_) | Request::Run(_) | Request::Jail(_) | Request::Api(_) | Request::Program(_) => return None,
    })
}

fn rule_of_request(request: &http::Request) -> String {
    let method = toml_escape(&request.method);
    let url = UrlPattern::exactly(request).unwrap_or_else(|| format!("{}/**", request.origin()));
    format!("[[allow]] effect = [\"http/request\"], method = [\"{method}\"], url = [\"{}\"]", toml_escape(&url))
}

/// A pattern that matches this path and no other. `globset::escape` leaves backslashes, which patterns read as escapes.
pub(super) fn exact_pattern(path: &str) -> String {
    globset::escape(&path.replace('\\', "\\\\"))
}

/// The inside of a TOML string.
fn toml_escape(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"")
}
