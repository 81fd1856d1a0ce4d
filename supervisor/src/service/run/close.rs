//! After the program: its changes applied, its record closed, its folder tidied.
use super::super::{
    block::block_on,
    denials,
    meanwhile::{self, PATIENCE},
    plan::Plan,
    recovery::Layer,
};
use crate::{
    chain::{preflight::Preflight, Answer, Chain},
    crash::{self, Point},
    doors::{
        self,
        workspace::{Commit, CommitReport, Word},
    },
    effect::{self, Door, Effect, Kind, Request, Resource},
    jail::{
        outcome::{self, Facts, NotStarted},
        spec::Store,
    },
    ledger::{
        quota::BatchFate,
        record::{Answered, ChangesState, Outcome, RunState, Usage},
        Draft,
    },
    room::{place::Place, tree},
};
use std::io;

use super::{
    execute::{Finished, Run},
    Apply, Refusal, RunError, RunReport,
};

impl Run<'_> {
    /// Applies what was changed, closes the record and tidies up.
    pub(super) fn close(mut self, facts: Facts, finished: Finished) -> Result<RunReport, RunError> {
        let Finished { usage, notes, chain, store } = finished;
        let ran = matches!(facts, Facts::Ended { .. });
        let mut facts = facts;
        let mut changes = nothing_changed();
        if let (true, Some(chain), Store::Overlay | Store::Mirror) = (ran, &chain, store) {
            // Before the first byte of the workspace changes: a crash from here on is one in the middle of applying.
            let record = self.live.change(|record| record.state = RunState::Applying);
            let changed = self.folder.has_changes(store);
            if changed {
                self.ledger.update_run(&record)?;
            }
            crash::reach(Point::ApplyingMarked);
            let cut_short =
                matches!(facts, Facts::Ended { exceeded: Some(_), .. } | Facts::Ended { killed: Some(_), .. });
            let when = if cut_short { Apply::OnRequest } else { self.request.apply };
            let what = "its program is over; its changes are being applied";
            let applied = match &self.request.preflight {
                Some(preflight) => self.planned(chain, preflight),
                // Nothing to be patient about.
                None if !changed => self.apply(chain, when),
                None => meanwhile::patiently(PATIENCE, self.request.notice, what, || self.apply(chain, when)),
            };
            match applied {
                Ok(report) => changes = report,
                Err(reason) => {
                    changes.state = ChangesState::Pending;
                    changes.failure = Some(reason);
                }
            }
            if self.handlers.replays() && changes.state != ChangesState::None {
                // Compared by the chain, and never applied: nothing waits for anybody's word.
                changes.held.clear();
                changes.state = ChangesState::Discarded;
            }
            if let (Facts::Ended { not_applied, .. }, Some(reason)) = (&mut facts, &changes.failure) {
                *not_applied = Some(reason.clone());
            }
        }
        // What was taken over is not this run's to lose because its program could not start.
        if !ran && self.request.resumes.is_some() && self.folder.holds_a_layer() {
            changes.state = ChangesState::Pending;
        }
        // A workspace that cannot be written has no changes, and the rest of the plan all the same.
        if let (true, Some(preflight), Store::ReadOnly | Store::Hidden) = (ran, &self.request.preflight, store) {
            if let Err(reason) = self.keep_plan(preflight) {
                changes.failure = Some(reason);
            }
        }
        for held in &changes.held {
            let refusal = Refusal {
                kind: Kind::FsWrite,
                object: denials::spelled(&held.path),
                by: held.decided_by.clone(),
                reason: held.reason.clone(),
                hint: held.hint.clone(),
            };
            self.refusals.push(refusal);
        }
        if !self.request.quotas.is_empty() {
            // Whatever is still reserved is of calls that were dropped half done: it stays charged.
            self.ledger.close_reservations(&self.id, BatchFate::Told)?;
        }
        crash::reach(Point::Applied);
        let outcome = outcome::decide(&facts);
        let last = if ran { vec![self.record_of_use(&usage)] } else { Vec::new() };
        let exit_status = exit_status(&facts, &outcome);
        let found = self.handlers.finish(&self.folder.path, exit_status);
        let diverged = found.replay.as_ref().is_some_and(|report| !report.is_same() && report.substituted.is_none());
        let exit_status = if diverged { outcome::ExitCode::NotDone.number() } else { exit_status };
        let notes: Vec<String> =
            notes.into_iter().chain(self.handlers.notes.iter().cloned()).chain(found.notes).collect();
        let ended = self.ledger.clock().now();
        let record = self.live.change(|record| {
            record.state = RunState::Ended;
            record.ended_at = Some(ended.to_string());
            record.outcome = Some(outcome);
            record.usage = usage;
            record.changes = changes.state;
            record.answered = Answered {
                faults_injected: found.injected,
                recording: found.recording.map(|digest| digest.to_string()),
                replay: found.replay,
            };
        });
        let record = self.ledger.end_run(&record, last)?;
        crash::reach(Point::RunEnded);
        // Now that every receipt is in the ledger, and none on its way.
        if self.request.policy.uses_network() {
            if let Err(error) = self.remember_refused_hosts() {
                tracing::warn!(%error, "the summary does not name the hosts that were refused");
            }
        }
        let kept = matches!(record.changes, ChangesState::Pending | ChangesState::Partial);
        self.folder.tidy(if kept { Layer::Kept } else { Layer::Removed });
        let signal = self.deferred.first();
        // As if it had come a moment later, when nobody would have kept it.
        let exit_status = signal.map_or(exit_status, |signal| 128 + signal as u8);
        Ok(RunReport { record, exit_status, signal, notes, refusals: self.refusals, changes })
    }

    /// What the run changed, through the chain and into the folder; or kept for later.
    pub(super) fn apply(&self, chain: &Chain, when: Apply) -> Result<CommitReport, String> {
        let place = Place::open(&self.folder.path).map_err(|error| error.to_string())?;
        let set = place.changes().map_err(|error| error.to_string())?;
        if when == Apply::OnRequest {
            let state = if set.changes.is_empty() { ChangesState::None } else { ChangesState::Pending };
            return Ok(CommitReport { skipped: set.skipped, state, ..nothing_changed() });
        }
        let commit = Commit {
            subject: self.subject.clone(),
            room: None,
            run: self.id.clone(),
            run_dir: place.run_dir.clone(),
            workspace: place.workspace.clone(),
            source: place.source.clone().unwrap_or_else(|| place.workspace.clone()),
            since_ns: place.place.since_ns,
            shift: place.place.shift,
            word: Word::Policy,
            select: None,
        };
        Ok(block_on(doors::workspace::commit(chain, commit, set)))
    }

    /// The run's changes as planned effects, and the plan kept; nothing is applied.
    fn planned(&self, chain: &Chain, preflight: &Preflight) -> Result<CommitReport, String> {
        let place = Place::open(&self.folder.path).map_err(|error| error.to_string())?;
        let set = place.changes().map_err(|error| error.to_string())?;
        block_on(doors::workspace::plan(chain, &set.changes, &self.subject, place.place.since_ns));
        self.keep_plan(preflight)?;
        let state = if set.changes.is_empty() { ChangesState::None } else { ChangesState::Pending };
        Ok(CommitReport { skipped: set.skipped, state, ..nothing_changed() })
    }

    fn keep_plan(&self, preflight: &Preflight) -> Result<(), String> {
        let (effects, unlisted) = preflight.plan();
        let plan = Plan::new(&self.id, &self.request.policy, effects, unlisted);
        let folder = tree::open_root(&self.folder.path);
        folder
            .and_then(|folder| plan.write(&folder))
            .map_err(|error| format!("the plan cannot be kept in {}: {error}", self.folder.path.display()))
    }

    /// What the evaluation used: recorded, not charged.
    pub(super) fn record_of_use(&self, usage: &Usage) -> Draft {
        let label = self.request.command.first().map(|word| word.to_string_lossy().into_owned()).unwrap_or_default();
        let effect = Effect {
            kind: Kind::EvalRun,
            resource: Resource::Run { id: self.id.0.clone() },
            subject: self.subject.clone(),
            room: None,
            door: Door::Control,
            request: Request::Run(effect::run::Request::Eval { label, cpu_us: usage.cpu_us, wall_us: usage.wall_us }),
        };
        Draft::now(&self.id, &effect, &Answer::done(serde_json::Value::Null, 0), &**self.ledger.clock())
    }
}

/// The status of a run whose program never ran is the shell's own for that; all others follow from the outcome.
pub(super) fn exit_status(facts: &Facts, outcome: &Outcome) -> u8 {
    match facts {
        Facts::NotStarted(NotStarted::Exec { errno, .. }) => match *errno {
            libc::ENOENT | libc::ENOTDIR => outcome::ExitCode::NotFound.number(),
            _ => outcome::ExitCode::NotExecutable.number(),
        },
        Facts::NotStarted(NotStarted::Step(_) | NotStarted::Limit(_) | NotStarted::Refused(_))
        | Facts::Ended { .. }
        | Facts::Interrupted => outcome::exit_status(outcome),
    }
}

pub(super) fn nothing_changed() -> CommitReport {
    CommitReport {
        applied: 0,
        held: Vec::new(),
        conflicts: Vec::new(),
        skipped: Vec::new(),
        state: ChangesState::None,
        failure: None,
    }
}

pub(super) fn own(what: &'static str) -> impl Fn(io::Error) -> RunError {
    move |source| RunError::Own { what, source }
}
