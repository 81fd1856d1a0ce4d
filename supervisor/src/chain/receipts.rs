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
    effect::{Door, Effect, Idempotency, RunId},
    ledger::{Clock, Draft, Error, Intent, Ledger, Timestamp, Timing},
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
            if let Err(error) = self.ledger.writable() {
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
            let inner = Next { rest: next.rest, world: &edge, waited: Some(&waited) };
            let answer = inner.run(effect).await;

            let (queued_us, executed_us) = (waited.load(Ordering::Relaxed), edge.executed.load(Ordering::Relaxed));
            let total = clock.monotonic_us().saturating_sub(began);
            let decided_us = total.saturating_sub(queued_us).saturating_sub(executed_us);
            let draft =
                Draft::of(&self.run, effect, &answer, started).timed(Timing { queued_us, decided_us, executed_us });
            // From here on the receipt is in the writer's queue, whether or not anybody waits for it.
            unfinished.edge = None;
            let written = match edge.take() {
                Reached::Intended(intent) => intent.complete_async(draft).await,
                Reached::No | Reached::Yes => self.ledger.append_async(draft).await,
            };
            match written {
                Ok(_) => answer,
                Err(error) => unrecorded(answer, &error),
            }
        })
    }
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
    Intended(Intent),
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
            // What the jail's layers refused has not happened and will not.
            let once = match effect.kind.declaration().idempotency {
                Idempotency::Once => effect.door != Door::Jail,
                Idempotency::Idempotent | Idempotency::Compensable => false,
            };
            let reached = if once {
                match self.ledger.intend_async(self.run, effect, self.started).await {
                    Ok(intent) => Reached::Intended(intent),
                    Err(error) => return refusal(&error),
                }
            } else {
                Reached::Yes
            };
            self.put(reached);
            let intended = self.clock.monotonic_us();
            self.waited.fetch_add(intended.saturating_sub(began), Ordering::Relaxed);
            let answer = self.world.execute(effect).await;
            self.executed.fetch_add(self.clock.monotonic_us().saturating_sub(intended), Ordering::Relaxed);
            answer
        })
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
