//! What the measurements of the ledger share: a run and its receipts.

use tollgate::{
    chain::Answer,
    effect::{fs, Digest, Door, Effect, Kind, Request, Resource, RunId, Subject},
    ledger::{
        record::{Answered, ChangesState, EffectCounts, RunMode, RunRecord, RunState, Usage},
        Draft, Ledger,
    },
};

/// A read of the file with this number, as the chain would write it down.
pub fn draft(ledger: &Ledger, run: &RunId, number: u64, answer: &Answer) -> Draft {
    let path = format!("src/module{}/file{number}.rs", number % 10);
    let effect = Effect {
        kind: Kind::FsRead,
        resource: Resource::Workspace { path: path.clone() },
        subject: Subject { uid: 1000, run: Some(run.clone()), agent: None },
        room: None,
        door: Door::Api,
        request: Request::Fs(fs::Request::Read { path, offset: 0, limit: 4096 }),
    };
    Draft::now(run, &effect, answer, ledger.clock().as_ref())
}

/// What is written down of a read that was allowed.
pub fn allowed() -> Answer {
    Answer::done(serde_json::Value::Null, 4096).by_rule("policies/default.toml (built in):9 allow fs/read on \"**\"")
}

/// A run that goes on.
pub fn record(id: &RunId) -> RunRecord {
    RunRecord {
        id: id.clone(),
        room: None,
        policy: "base".into(),
        policy_digest: Digest::of(b"policy").to_string(),
        command: vec!["true".into()],
        workspace: "/srv/project".into(),
        subject: Subject { uid: 1000, run: Some(id.clone()), agent: None },
        state: RunState::Running,
        outcome: None,
        started_at: "2026-11-30T22:08:31.000000Z".into(),
        ended_at: None,
        usage: Usage::default(),
        effects: EffectCounts::default(),
        degraded: Vec::new(),
        environment: Vec::new(),
        supervisor_pid: std::process::id(),
        supervisor_started: 1,
        changes: ChangesState::None,
        chain: Vec::new(),
        mode: RunMode::Live,
        resumes: None,
        recipe: None,
        answered: Answered::default(),
    }
}
