//! What a policy says and probably does not mean. Not faults: each can be meant.

use super::{Policy, WorkspaceAccess};
use crate::{
    chain::admission::{Kinds, Rule, Ruling, Verdict},
    effect::{fs, net, Digest, Door, Effect, Kind, Request, Resource, Subject},
};
use tollgate_shim::protocol::Enforcement;

/// A file that git runs on the next commit: the plainest of what other programs obey.
const HOOK: &str = ".git/hooks/pre-commit";

/// Warnings about a policy, a sentence each.
pub fn warnings(policy: &Policy) -> Vec<String> {
    let mut warnings = Vec::new();
    let writable = policy.jail.workspace == WorkspaceAccess::ReadWrite;
    if writable && matches!(policy.admission.rule_on(&write(HOOK)), Ruling::Allow { .. }) {
        warnings.push(format!(
            "{HOOK} can be changed without a person's word; extends = [\"base\"] asks before files that other \
             programs obey"
        ));
    }
    if policy.jail.environment.pass.iter().any(|pattern| pattern == "*") {
        warnings.push("env has \"*\", so every token that the caller's environment holds reaches the program".into());
    }
    warnings.extend(about_the_network(policy));
    if policy.jail.enforcement == Enforcement::BestEffort {
        warnings.push("enforce is \"best-effort\": a layer that the machine lacks is left out".into());
    }
    warnings
}

/// What of the network a policy opens wider, or less, than it reads.
fn about_the_network(policy: &Policy) -> Vec<String> {
    let rules = || policy.admission.layers().iter().flat_map(|layer| layer.rules());
    let only = |rule: &Rule, kind: Kind| match &rule.kinds {
        Kinds::Any | Kinds::All => false,
        Kinds::Only(kinds) => kinds.contains(&kind),
    };
    let mut warnings = Vec::new();
    for rule in rules().filter(|rule| rule.verdict == Verdict::Allow) {
        let target = &rule.target;
        if only(rule, Kind::HttpRequest) && target.hosts.is_none() && target.urls.is_none() {
            warnings.push(format!("{}: every host outside can be asked; name hosts with `host` or `url`", rule.origin));
        }
        if only(rule, Kind::NetConnect) && target.hosts.is_none() {
            warnings.push(format!("{}: every host outside can be connected to; name hosts with `host`", rule.origin));
        }
        if only(rule, Kind::NetConnect) && target.ports.is_none() {
            warnings.push(format!(
                "{}: every port can be connected to, and what is no HTTP is a stream of bytes that no other rule looks \
                 into; name ports with `port`",
                rule.origin
            ));
        }
    }
    let named = |kind| rules().any(|rule| rule.verdict != Verdict::Deny && only(rule, kind));
    if named(Kind::NetResolve) && !policy.uses_network() {
        warnings.push("net/resolve alone opens no network: no rule is about http/request or net/connect".to_owned());
    }
    for host in policy.network.private.keys() {
        let request = net::Request::Resolve { name: host.clone(), record: "A".to_owned() };
        let asks = Effect {
            kind: Kind::NetResolve,
            resource: request.resource(),
            door: Door::Network,
            request: Request::Net(request),
            ..write("")
        };
        if !matches!(policy.admission.rule_on(&asks), Ruling::Allow { .. }) {
            warnings.push(format!("[network.private] names {host}, which no rule allows"));
        }
    }
    warnings
}

fn write(path: &str) -> Effect {
    let node = fs::Node::File { digest: Digest([0; 32]), bytes: 0, mode: 0o755 };
    Effect {
        kind: Kind::FsWrite,
        resource: Resource::Workspace { path: path.to_owned() },
        subject: Subject { uid: 0, run: None, agent: None },
        room: None,
        door: Door::Workspace,
        request: Request::Fs(fs::Request::Write { path: path.to_owned(), node, expect: None }),
    }
}
