//! Undo and redo: what a run applied, taken back as effects of the operator's.
//!
//! Each change is one effect at the control door with one receipt: the inverse of a move is a move, of a new file a
//! deletion. They pass the chain together and are done as one batch, all or none; if somebody on the chain refuses
//! one, nothing is done. The operator acts on their own files, so the run's policy, which is about the program, does
//! not bind them.

use super::workspace::{done, effect_of, BatchWorld, Word};
use crate::{
    chain::{Answer, Chain, Decision},
    effect::{Door, Effect, RoomId, RunId, Subject},
    room::{
        batch::{self, ApplyError, Batch, Conflict},
        changes::Change,
        path::printable,
        undo::Plan,
    },
};
use std::{os::fd::OwnedFd, sync::Arc};

/// Everything that taking changes back needs.
#[derive(Clone)]
pub struct Revert {
    /// Who acts.
    pub subject: Subject,
    /// The room, if the run is in one.
    pub room: Option<RoomId>,
    /// The run whose changes they are.
    pub run: RunId,
    /// The run's own directory.
    pub run_dir: Arc<OwnedFd>,
    /// The workspace's root.
    pub workspace: Arc<OwnedFd>,
    /// When the plan was made, in nanoseconds since the epoch: what changed in the workspace after is somebody else's.
    pub since_ns: i64,
}

/// What came of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RevertReport {
    /// How many changes were done.
    pub done: usize,
    /// Why none was, in one sentence with its object.
    pub failure: Option<String>,
    /// Paths that somebody changed between the plan and the batch.
    pub conflicts: Vec<Conflict>,
}

/// Passes a plan's changes through the chain and does them together.
pub async fn revert(chain: &Chain, revert: &Revert, plan: &Plan) -> RevertReport {
    let changes = &plan.reversal.changes;
    let effects: Vec<Effect> = changes.iter().map(|change| effect_at_control(change, revert)).collect();
    let world = BatchWorld::new(&effects, changes, Word::Operator);
    let ask = |index: usize| {
        let (world, effect) = (&world, &effects[index]);
        async move {
            let answer = chain.perform(effect, world).await;
            world.settled(index);
            answer
        }
    };
    let asking = futures_util::future::join_all((0..effects.len()).map(ask));
    let doing = async {
        world.all_settled().await;
        let senders = world.take();
        let outcome = match senders.iter().all(Option::is_some) {
            true => Some(run_batch(revert, plan).await),
            false => None,
        };
        for (sender, change) in senders.into_iter().zip(changes) {
            let Some(sender) = sender else { continue };
            let answer = match &outcome {
                None => Answer::refused("workspace", "something that goes with it was refused", "see what, and why"),
                Some(Ok(())) => done(change),
                Some(Err(error)) => Answer::failed(
                    format!("`{}` was not put back: {error}", printable(&change.path)),
                    "see what would be done with `--dry-run`, and try again",
                ),
            };
            // A handler further out may have stopped waiting; its receipt says what it decided.
            let _ = sender.send(answer);
        }
        outcome
    };
    let (answers, outcome) = tokio::join!(asking, doing);
    let (failure, conflicts) = match outcome {
        Some(Ok(())) => return RevertReport { done: changes.len(), failure: None, conflicts: Vec::new() },
        Some(Err(error)) => {
            let failure = error.to_string();
            match error {
                ApplyError::Conflict { conflicts } => (failure, conflicts),
                ApplyError::Stage { .. }
                | ApplyError::Step { .. }
                | ApplyError::RollBack { .. }
                | ApplyError::Ours { .. }
                | ApplyError::Busy => (failure, Vec::new()),
            }
        }
        None => {
            // The one that the others went with.
            let refused =
                answers.iter().find(|answer| answer.decision == Decision::Refused && answer.decided_by != "workspace");
            let reason = refused.map(|answer| format!("{}: {}", answer.decided_by, answer.reason));
            (reason.unwrap_or_else(|| "an effect was refused".to_owned()), Vec::new())
        }
    };
    RevertReport { done: 0, failure: Some(failure), conflicts }
}

/// What a change that takes another back asks of the world.
pub(crate) fn effect_at_control(change: &Change, revert: &Revert) -> Effect {
    let effect = effect_of(change, &revert.subject, revert.room.as_ref(), revert.since_ns);
    Effect { door: Door::Control, ..effect }
}

async fn run_batch(revert: &Revert, plan: &Plan) -> Result<(), ApplyError> {
    if plan.reversal.changes.is_empty() {
        return Ok(());
    }
    let (revert, plan) = (revert.clone(), plan.clone());
    let work = tokio::task::spawn_blocking(move || {
        let batch = Batch {
            run: &revert.run,
            run_dir: &revert.run_dir,
            workspace: &revert.workspace,
            source: &revert.run_dir,
            since_ns: revert.since_ns,
            // Before-images carry the owners that they are to have.
            shift: None,
            #[cfg(test)]
            stop: None,
        };
        batch::revert(&batch, &plan.reversal, &plan.remaining).map(|_| ())
    });
    work.await.unwrap_or_else(|error| {
        // The thread was stopped or panicked: the journal says what to do at the next start.
        Err(ApplyError::Ours { deed: "finish the batch", source: std::io::Error::other(error) })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        chain::{BoxFuture, Handler, Next},
        effect::Kind,
        room::{
            batch::BatchKind,
            changes::scan,
            testing::{mixed, tree_state, Fixture, Inodes},
            undo::{self, OnChange, Wanted},
        },
    };
    use std::sync::Mutex;

    /// Refuses one kind, and remembers every answer that passes.
    struct Guard(Option<Kind>, Mutex<Vec<(Kind, Door, Decision)>>);

    impl Handler for Guard {
        fn name(&self) -> &'static str {
            "guard"
        }

        fn handle<'a>(&'a self, effect: &'a Effect, next: Next<'a>) -> BoxFuture<'a, Answer> {
            Box::pin(async move {
                let answer = match Some(effect.kind) == self.0 {
                    true => Answer::refused("guard", "not this", ""),
                    false => next.run(effect).await,
                };
                self.1.lock().unwrap().push((effect.kind, effect.door, answer.decision));
                answer
            })
        }
    }

    fn undone(fixture: &Fixture, guard: &Arc<Guard>) -> RevertReport {
        let wanted = Wanted { kind: BatchKind::Apply, select: None, on_change: OnChange::Leave, after_seq: 0 };
        let plan = undo::plan(&fixture.run_dir, &fixture.workspace, &wanted).unwrap();
        let it = Revert {
            subject: Subject { uid: 1000, run: None, agent: None },
            room: None,
            run: fixture.run.clone(),
            run_dir: Arc::new(fixture.run_dir.try_clone().unwrap()),
            workspace: Arc::new(fixture.workspace.try_clone().unwrap()),
            since_ns: i64::MAX,
        };
        let chain = Chain::new(vec![Arc::clone(guard) as _]);
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(revert(&chain, &it, &plan))
    }

    fn applied() -> (Fixture, std::collections::BTreeMap<std::path::PathBuf, String>) {
        let fixture = mixed();
        let before = tree_state(&fixture.workspace_path(), Inodes::Ignored);
        let changes = scan(&fixture.upper, &fixture.workspace).unwrap().changes;
        batch::apply(&fixture.batch(), &changes, &[]).unwrap();
        (fixture, before)
    }

    #[test]
    fn every_inverse_has_one_receipt_and_the_inverse_of_a_move_is_a_move() {
        let (fixture, before) = applied();
        let guard = Arc::new(Guard(None, Mutex::default()));
        let report = undone(&fixture, &guard);
        assert_eq!(report.failure, None);
        assert_eq!(tree_state(&fixture.workspace_path(), Inodes::Ignored), before);
        let receipts = guard.1.lock().unwrap();
        assert_eq!(receipts.len(), report.done);
        assert!(receipts.iter().all(|(_, door, decision)| (*door, *decision) == (Door::Control, Decision::Allowed)));
        for kind in [Kind::FsMove, Kind::FsDelete, Kind::FsWrite] {
            assert!(receipts.iter().any(|(found, _, _)| *found == kind), "{kind}");
        }
    }

    #[test]
    fn if_one_is_refused_none_is_done() {
        let (fixture, _) = applied();
        let after = tree_state(&fixture.workspace_path(), Inodes::Compared);
        let guard = Arc::new(Guard(Some(Kind::FsMove), Mutex::default()));
        let report = undone(&fixture, &guard);
        assert_eq!((report.done, report.failure.as_deref()), (0, Some("guard: not this")));
        assert_eq!(tree_state(&fixture.workspace_path(), Inodes::Compared), after);
        assert!(guard.1.lock().unwrap().iter().all(|(_, _, decision)| *decision == Decision::Refused));
    }
}
