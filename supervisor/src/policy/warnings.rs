//! What a policy says and probably does not mean. Not faults: each can be meant.

use super::{Policy, WorkspaceAccess};
use crate::{
    chain::admission::Ruling,
    effect::{fs, Digest, Door, Effect, Kind, Request, Resource, Subject},
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
    if policy.jail.enforcement == Enforcement::BestEffort {
        warnings.push("enforce is \"best-effort\": a layer that the machine lacks is left out".into());
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
