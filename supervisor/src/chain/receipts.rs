//! Receipts: every effect has exactly one, and this handler, the outermost, writes it.
//!
//! Whatever answers further in, the receipt says so and by whom. An effect that must not be repeated becomes an
//! intent on disk at the very edge of the world: later than admission and approval, so that what is refused does not
//! wait for the disk and what is parked is not in doubt; earlier than anything that happens.
//!
//! What it refuses: everything while the ledger cannot be written, before it reaches any other handler, and an effect
//! whose intent cannot be written, before it reaches the world.

use super::{Answer, BoxFuture, Decision, Handler, Next, World};
use crate::{
    crash::{self, Point},
    effect::{Door, Effect, Idempotency, RunId},
    ledger::{Clock, Draft, Error, Intent, Ledger, OnceResult, Timestamp, Timing},
};
use std::{
    error::Error as _,
    sync::{
        atomic::{AtomicU64, Ordering},
        Arc, Mutex, PoisonError,
    },
};

const NAME: &str = "receipts";

/// The handler, for the effects of one run.
pub struct Receipts {
    ledger: Ledger,
    run: RunId,
}

impl Receipts {
    /// Writes into the chain of this run, by the ledger's clock.
    pub fn new(ledger: Ledger, run: RunId) -> Receipts {
        Receipts { ledger, run }
    }
}

impl Handler for Receipts {
    fn name(&self) -> &'static str {
        NAME
    }

    fn handle<'a>(&'a self, effect: &'a Effect, next: Next<'a>) -> BoxFuture<'a, Answer> {
        Box::pin(async move {
            if let Err(error) = self.ledger.writable_for(&self.run).await {
                return refusal(&error);
            }
            let clock = self.ledger.clock().clone();
            let (started, began) = (clock.now(), clock.monotonic_us());
            let waited = AtomicU64::new(0);
            let edge = Edge {
                ledger: &self.ledger,
                run: &self.run,
                clock: &*clock,
                started,
                world: next.world,
                waited: &waited,
                executed: AtomicU64::new(0),
                reached: Mutex::new(Reached::No),
            };
            let mut unfinished = Unfinished { receipts: self, effect, edge: Some(&edge), started };
            let inner = Next { world: &edge, waited: Some(&waited), ..next };
            let answer = inner.run(effect).await;

            let (queued_us, executed_us) = (waited.load(Ordering::Relaxed), edge.executed.load(Ordering::Relaxed));
            let total = clock.monotonic_us().saturating_sub(began);
            let decided_us = total.saturating_sub(queued_us).saturating_sub(executed_us);
            let draft =
                Draft::of(&self.run, effect, &answer, started).timed(Timing { queued_us, decided_us, executed_us });
            // From here on the receipt is in the writer's queue, whether or not anybody waits for it.
            unfinished.edge = None;
            let written = match edge.take() {
                Reached::Intended(intent) => intent.complete_async(draft, kept(effect, &answer)).await.map(|_| ()),
                Reached::No | Reached::Yes => self.ledger.append_soon(draft).await,
            };
            if written.is_ok() {
                crash::reach(Point::ReceiptWritten);
            }
            match written {
                Ok(()) => answer,
                Err(error) => unrecorded(answer, &error),
            }
        })
    }
}

/// What a run that is taken up again is answered with: the result of what the program asked for and was done.
fn kept(effect: &Effect, answer: &Answer) -> Option<OnceResult> {
    let done = answer.decision == Decision::Allowed && !answer.injected;
    (done && matches!(effect.door, Door::Api | Door::Network)).then(|| OnceResult::of(answer))
}

/// The world, with its intent before it and a watch on it.
struct Edge<'a> {
    ledger: &'a Ledger,
    run: &'a RunId,
    clock: &'a dyn Clock,
    started: Timestamp,
    world: &'a dyn World,
    waited: &'a AtomicU64,
    executed: AtomicU64,
    reached: Mutex<Reached>,
}

/// How far an effect came.
enum Reached {
    /// Not to the world.
    No,
    /// To the world, which may repeat it.
    Yes,
    /// To the world, under this intent.
    Intended(Box<Intent>),
}

impl Edge<'_> {
    fn take(&self) -> Reached {
        std::mem::replace(&mut *self.reached.lock().unwrap_or_else(PoisonError::into_inner), Reached::No)
    }

    fn put(&self, reached: Reached) {
        *self.reached.lock().unwrap_or_else(PoisonError::into_inner) = reached;
    }
}

impl World for Edge<'_> {
    fn execute<'a>(&'a self, effect: &'a Effect) -> BoxFuture<'a, Answer> {
        Box::pin(async move {
            let began = self.clock.monotonic_us();
            // What the jail's layers refused has not happened and will not; a system call of the program touches the
            // run's own layer and processes only, which are gone when it is.
            let once = match effect.idempotency() {
                Idempotency::Once => !matches!(effect.door, Door::Jail | Door::Program),
                Idempotency::Idempotent | Idempotency::Compensable => false,
            };
            let reached = if once {
                match self.ledger.intend_async(self.run, effect, self.started).await {
                    Ok(intent) => Reached::Intended(Box::new(intent)),
                    Err(error) => return refusal(&error),
                }
            } else {
                Reached::Yes
            };
            self.put(reached);
            if once {
                crash::reach(Point::IntentWritten);
            }
            let intended = self.clock.monotonic_us();
            self.waited.fetch_add(intended.saturating_sub(began), Ordering::Relaxed);
            let answer = self.world.execute(effect).await;
            if once {
                crash::reach(Point::EffectDone);
            }
            self.executed.fetch_add(self.clock.monotonic_us().saturating_sub(intended), Ordering::Relaxed);
            answer
        })
    }

    fn give<'a>(&'a self, effect: &'a Effect, answer: Answer) -> BoxFuture<'a, Answer> {
        self.world.give(effect, answer)
    }
}

/// Writes the receipt of an effect whose asker went away before there was an answer.
struct Unfinished<'a, 'e> {
    receipts: &'a Receipts,
    effect: &'a Effect,
    edge: Option<&'a Edge<'e>>,
    started: Timestamp,
}

impl Drop for Unfinished<'_, '_> {
    fn drop(&mut self) {
        let Some(edge) = self.edge else { return };
        let answer = match edge.take() {
            // Stays open in the ledger, which gives it its receipt as in doubt when the run is sealed or recovered.
            Reached::Intended(intent) => return drop(intent),
            Reached::Yes => Answer {
                decision: Decision::InDoubt,
                ..Answer::refused(
                    NAME,
                    format!(
                        "whoever asked for {} of `{}` went away while it was done",
                        self.effect.kind, self.effect.resource
                    ),
                    "ask again: it may be repeated",
                )
            },
            Reached::No => Answer::refused(
                NAME,
                format!(
                    "whoever asked for {} of `{}` went away before it was decided",
                    self.effect.kind, self.effect.resource
                ),
                "ask again, and wait for the answer",
            ),
        };
        let draft = Draft::of(&self.receipts.run, self.effect, &answer, self.started);
        self.receipts.ledger.append_unattended(draft);
    }
}

/// The refusal of an effect that would have no receipt.
fn refusal(error: &Error) -> Answer {
    Answer::refused(
        NAME,
        format!("no receipt can be written: {}", spelled(error)),
        "`tollgate doctor` checks the state directory",
    )
}

/// What is told of an effect that has an answer and no receipt: never that all is well.
fn unrecorded(answer: Answer, error: &Error) -> Answer {
    tracing::error!(%error, "an effect has no receipt");
    if !answer.is_success() {
        return answer;
    }
    Answer {
        decision: Decision::Failed,
        ..Answer::refused(
            NAME,
            format!("it was done, and its receipt could not be written: {}", spelled(error)),
            "look at the object before asking again; `tollgate doctor` checks the state directory",
        )
    }
}

/// An error with its causes.
fn spelled(error: &Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(": ");
        text.push_str(&error.to_string());
        cause = error.source();
    }
    text
}

/// So that a chain can be shared between tasks with its handlers.
const _: fn() = || {
    fn shared<T: Send + Sync>() {}
    shared::<Arc<Receipts>>();
};

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        chain::testing::{ask, wait, FakeWorld, Judge, WorldOf},
        effect::{tests::sample, Kind, VOCABULARY},
        ledger::{record::Receipt, tests::Fixture, ReceiptQuery},
    };
    use serde_json::Value;
    use std::time::Duration;

    fn receipts(fixture: &Fixture) -> Vec<Receipt> {
        fixture.ledger.receipts(&ReceiptQuery::default()).unwrap().collect::<Result<_, _>>().unwrap()
    }

    fn handler(fixture: &Fixture) -> Arc<dyn Handler> {
        Arc::new(Receipts::new(fixture.ledger.clone(), fixture.run.clone()))
    }

    #[test]
    fn every_answer_has_one_receipt_that_names_who_gave_it() {
        let answers: [(&'static str, Answer); 5] = [
            ("admission", Answer::refused("admission", "no rule allows it", "add one")),
            ("replay", Answer { decision: Decision::Answered, decided_by: "replay", ..Answer::done(Value::Null, 3) }),
            (
                "preflight",
                Answer { decision: Decision::Planned, decided_by: "preflight", ..Answer::done(Value::Null, 0) },
            ),
            ("faults", Answer { injected: true, decided_by: "faults", ..Answer::failed("timed out", "") }),
            ("approval", Answer { decision: Decision::InDoubt, ..Answer::refused("approval", "", "") }),
        ];
        let fixture = Fixture::new();
        for (name, answer) in &answers {
            let answer = answer.clone();
            let judge = Arc::new(Judge(name, move |_: &Effect| Some(answer.clone())));
            let world = FakeWorld::default();
            wait(ask(vec![handler(&fixture), judge], &sample(Kind::FsWrite), &world));
            assert!(world.done.lock().unwrap().is_empty());
        }
        wait(ask(vec![handler(&fixture)], &sample(Kind::FsWrite), &FakeWorld::default()));
        let stored = receipts(&fixture);
        assert_eq!(stored.len(), answers.len() + 1);
        for (receipt, (name, answer)) in stored.iter().zip(&answers) {
            assert_eq!((receipt.decided_by.as_str(), receipt.decision), (*name, answer.decision));
            assert_eq!((&receipt.reason, &receipt.hint), (&answer.reason, &answer.hint));
            assert_eq!((receipt.injected, receipt.bytes), (answer.injected, answer.bytes));
        }
        assert_eq!(
            (stored[5].decided_by.as_str(), stored[5].decision, stored[5].bytes),
            ("world", Decision::Allowed, 5)
        );
        assert!(fixture.ledger.verify_run(&fixture.run).is_ok());
    }

    #[test]
    fn what_must_not_be_repeated_is_on_disk_while_it_happens_and_closed_after() {
        for row in VOCABULARY {
            let fixture = Fixture::new();
            let ledger = fixture.ledger.clone();
            let world = WorldOf(move |effect: &Effect| {
                let open = ledger.in_doubt(None).unwrap();
                let once = row.idempotency == Idempotency::Once && effect.door != Door::Jail;
                assert_eq!(open.len(), usize::from(once), "{}", row.name);
                Answer::done(Value::Null, 0)
            });
            assert!(wait(ask(vec![handler(&fixture)], &sample(row.kind), &world)).is_success());
            assert_eq!(fixture.ledger.in_doubt(None).unwrap(), []);
            assert_eq!(receipts(&fixture).len(), 1);
        }
    }

    #[test]
    fn what_is_refused_further_in_does_not_wait_for_the_disk() {
        let fixture = Fixture::new();
        let ledger = fixture.ledger.clone();
        let judge = Arc::new(Judge("admission", move |_: &Effect| {
            assert_eq!(ledger.in_doubt(None).unwrap(), []);
            Some(Answer::refused("admission", "no", ""))
        }));
        wait(ask(vec![handler(&fixture), judge], &sample(Kind::RunStart), &FakeWorld::default()));
        assert_eq!(receipts(&fixture)[0].queued_us, 0);
    }

    #[test]
    fn while_the_ledger_cannot_be_written_no_handler_and_no_world_is_asked() {
        let fixture = Fixture::new();
        let ledger = crate::ledger::Ledger::open_read_only(&fixture.state).unwrap();
        let receipts: Arc<dyn Handler> = Arc::new(Receipts::new(ledger, fixture.run.clone()));
        let judge = Arc::new(Judge("admission", |_: &Effect| panic!("asked")));
        let answer = wait(ask(vec![receipts, judge], &sample(Kind::FsWrite), &FakeWorld::default()));
        assert_eq!((answer.decision, answer.decided_by), (Decision::Refused, "receipts"));
        assert!(answer.reason.contains("ledger.db"), "{}", answer.reason);
    }

    #[test]
    fn an_effect_whose_intent_cannot_be_written_does_not_happen() {
        let fixture = Fixture::new();
        let stranger: Arc<dyn Handler> = Arc::new(Receipts::new(fixture.ledger.clone(), RunId("zzzzzzzzzzzz".into())));
        let world = FakeWorld::default();
        let answer = wait(ask(vec![stranger], &sample(Kind::RunStart), &world));
        assert_eq!((answer.decision, answer.decided_by), (Decision::Refused, "receipts"));
        assert!(world.done.lock().unwrap().is_empty());
    }

    #[test]
    fn an_effect_that_was_done_without_a_receipt_is_not_called_done() {
        let fixture = Fixture::new();
        let stranger: Arc<dyn Handler> = Arc::new(Receipts::new(fixture.ledger.clone(), RunId("zzzzzzzzzzzz".into())));
        let answer = wait(ask(vec![stranger], &sample(Kind::FsWrite), &FakeWorld::default()));
        assert_eq!((answer.decision, answer.decided_by), (Decision::Failed, "receipts"));
        assert!(answer.reason.starts_with("it was done, and its receipt could not be written"), "{}", answer.reason);
    }

    #[test]
    fn an_effect_whose_asker_goes_away_has_its_one_receipt() {
        /// Tells that it was reached, and never answers.
        struct Parks(tokio::sync::Notify);
        impl World for Parks {
            fn execute<'a>(&'a self, _: &'a Effect) -> BoxFuture<'a, Answer> {
                self.0.notify_one();
                Box::pin(std::future::pending())
            }
        }
        impl Handler for Parks {
            fn name(&self) -> &'static str {
                "approval"
            }
            fn handle<'a>(&'a self, effect: &'a Effect, _: Next<'a>) -> BoxFuture<'a, Answer> {
                self.execute(effect)
            }
        }
        let fixture = Fixture::new();
        let leave = |kind, before_the_world: Option<Arc<Parks>>| {
            let world = Parks(tokio::sync::Notify::new());
            let mut handlers = vec![handler(&fixture)];
            handlers.extend(before_the_world.clone().map(|parks| parks as Arc<dyn Handler>));
            wait(async {
                let effect = sample(kind);
                tokio::select! {
                    answer = ask(handlers, &effect, &world) => panic!("{answer:?}"),
                    () = before_the_world.as_deref().unwrap_or(&world).0.notified() => {}
                }
            });
        };
        leave(Kind::FsWrite, None);
        leave(Kind::RunStart, Some(Arc::new(Parks(tokio::sync::Notify::new()))));
        leave(Kind::RunStart, None);
        assert_eq!(fixture.ledger.seal_run(&fixture.run).unwrap().count, 3);
        let decisions: Vec<(Kind, Decision)> =
            receipts(&fixture).iter().map(|receipt| (receipt.kind, receipt.decision)).collect();
        assert_eq!(
            decisions,
            [
                (Kind::FsWrite, Decision::InDoubt),
                (Kind::RunStart, Decision::Refused),
                (Kind::RunStart, Decision::InDoubt)
            ]
        );
    }

    #[test]
    fn waiting_deciding_and_executing_are_told_apart() {
        struct Waits;
        impl Handler for Waits {
            fn name(&self) -> &'static str {
                "approval"
            }
            fn handle<'a>(&'a self, effect: &'a Effect, next: Next<'a>) -> BoxFuture<'a, Answer> {
                std::thread::sleep(Duration::from_millis(30));
                next.note_waiting(Duration::from_millis(20));
                next.run(effect)
            }
        }
        let fixture = Fixture::new();
        let ledger = crate::ledger::Ledger::open(&fixture.state).unwrap();
        let handler: Arc<dyn Handler> = Arc::new(Receipts::new(ledger, fixture.run.clone()));
        let world = WorldOf(|_: &Effect| {
            std::thread::sleep(Duration::from_millis(40));
            Answer::done(Value::Null, 0)
        });
        wait(ask(vec![handler, Arc::new(Waits)], &sample(Kind::FsWrite), &world));
        let receipt = &receipts(&fixture)[0];
        assert!(receipt.queued_us >= 20_000 && receipt.queued_us < 30_000, "{receipt:?}");
        assert!(receipt.decided_us >= 10_000, "{receipt:?}");
        assert!(receipt.executed_us >= 40_000, "{receipt:?}");
    }
}
