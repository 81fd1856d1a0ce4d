//! A receipt before it has its place in the chain.

use super::{
    record::Receipt,
    time::{Clock, Timestamp},
};
use crate::{
    chain::{Answer, Decision},
    effect::{Class, Digest, Door, Effect, Idempotency, Kind, ReceiptId, Resource, RoomId, RunId, Subject},
};
use serde::{Deserialize, Serialize};

/// Everything of a receipt but its place: the ledger adds `id`, `seq`, `prev` and `hash`. Fields mean what they mean
/// in [`Receipt`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Draft {
    /// The run in whose chain the receipt goes.
    pub run: RunId,
    /// The room, if any.
    pub room: Option<RoomId>,
    /// The effect's kind.
    pub kind: Kind,
    /// What it touched, in any order.
    pub classes: Vec<Class>,
    /// The object.
    pub resource: Resource,
    /// Who asked.
    pub subject: Subject,
    /// The door it came in by.
    pub door: Door,
    /// What was decided.
    pub decision: Decision,
    /// By which handler, or `world`.
    pub decided_by: String,
    /// Why.
    pub reason: String,
    /// What to change.
    pub hint: String,
    /// The rule behind it, and where it is written.
    #[serde(default)]
    pub rule: Option<String>,
    /// Whether it may be repeated.
    pub idempotency: Idempotency,
    /// Whether a fault handler made the answer up.
    pub injected: bool,
    /// When it came in.
    pub started: Timestamp,
    /// How long its parts took.
    pub timing: Timing,
    /// Bytes read or written.
    pub bytes: u64,
    /// How many equal occurrences it stands for, at least 1.
    pub times: u64,
    /// [`Effect::digest`].
    pub request_digest: Digest,
    /// Digest of the result.
    pub result_digest: Option<Digest>,
}

/// How long the parts of an effect took, in microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Timing {
    /// Waiting: for the disk to hold an intent, for a person.
    pub queued_us: u64,
    /// In the chain's handlers.
    pub decided_us: u64,
    /// In the world.
    pub executed_us: u64,
}

impl Draft {
    /// The receipt of this effect with this answer, once, with no time taken.
    pub fn of(run: &RunId, effect: &Effect, answer: &Answer, started: Timestamp) -> Draft {
        Draft {
            run: run.clone(),
            room: effect.room.clone(),
            kind: effect.kind,
            classes: effect.classes().to_vec(),
            resource: effect.resource.clone(),
            subject: effect.subject.clone(),
            door: effect.door,
            decision: answer.decision,
            decided_by: answer.decided_by.to_owned(),
            reason: answer.reason.clone(),
            hint: answer.hint.clone(),
            rule: answer.rule.clone(),
            idempotency: effect.idempotency(),
            injected: answer.injected,
            started,
            timing: Timing::default(),
            bytes: answer.bytes,
            times: 1,
            request_digest: effect.digest(),
            result_digest: answer.digest,
        }
    }

    /// As [`Draft::of`], at this clock's present time.
    pub fn now(run: &RunId, effect: &Effect, answer: &Answer, clock: &dyn Clock) -> Draft {
        Draft::of(run, effect, answer, clock.now())
    }

    /// The same with these durations.
    pub fn timed(mut self, timing: Timing) -> Draft {
        self.timing = timing;
        self
    }

    /// The same, standing for this many equal occurrences.
    pub fn repeated(mut self, times: u64) -> Draft {
        self.times = times;
        self
    }

    /// The same, as it stands when nobody knows whether the effect happened.
    pub(super) fn in_doubt(mut self, reason: &str) -> Draft {
        self.decision = Decision::InDoubt;
        self.decided_by = "receipts".to_owned();
        self.reason = reason.to_owned();
        self.hint = "look at the object, then settle the effect by hand; it is never repeated by itself".to_owned();
        self
    }

    /// The receipt at this place of its run's chain, hashed.
    ///
    /// Numbers are held to what the store can keep, 2^63-1, before they are hashed.
    pub(super) fn at(&self, seq: u64, prev: Digest) -> Receipt {
        let held = |number: u64| number.min(i64::MAX as u64);
        let mut classes = self.classes.clone();
        classes.sort_unstable();
        classes.dedup();
        let mut receipt = Receipt {
            id: ReceiptId(format!("{}.{seq}", self.run)),
            seq,
            run: self.run.clone(),
            room: self.room.clone(),
            kind: self.kind,
            classes,
            resource: self.resource.clone(),
            subject: self.subject.clone(),
            door: self.door,
            decision: self.decision,
            decided_by: self.decided_by.clone(),
            reason: self.reason.clone(),
            hint: self.hint.clone(),
            rule: self.rule.clone(),
            idempotency: self.idempotency,
            injected: self.injected,
            started_at: self.started.to_string(),
            queued_us: held(self.timing.queued_us),
            decided_us: held(self.timing.decided_us),
            executed_us: held(self.timing.executed_us),
            bytes: held(self.bytes),
            times: held(self.times.max(1)),
            request_digest: self.request_digest,
            result_digest: self.result_digest,
            prev,
            hash: Digest([0; 32]),
        };
        receipt.hash = super::hash::receipt(&receipt);
        receipt
    }
}
