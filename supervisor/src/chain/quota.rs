//! Quota: how many bytes may be written, counted over every write.
//!
//! A write reserves its size before it goes on and settles it after, in one atomic step each, so that two at once
//! cannot overspend. What is refused or fails further in gives its reservation back; what is in doubt, or whose asker
//! went away, keeps it. Effects that write no bytes are free.
//!
//! What it refuses: the write that would exceed the limit, which may be 0.

use super::{Answer, BoxFuture, Decision, Handler, Next};
use crate::effect::{Class, Effect};
use std::{
    collections::BTreeMap,
    sync::{
        atomic::{AtomicU64, Ordering},
        Arc, Mutex, PoisonError,
    },
};

const NAME: &str = "quota";

/// The meters of this process, by id. A run that is given another's id shares its meter; one given a new id has its
/// own.
#[derive(Clone, Debug, Default)]
pub struct Meters {
    meters: Arc<Mutex<BTreeMap<String, Arc<Meter>>>>,
}

impl Meters {
    /// The meter with this id, made at its first mention.
    pub fn meter(&self, id: &str) -> Arc<Meter> {
        let mut meters = self.meters.lock().unwrap_or_else(PoisonError::into_inner);
        meters.entry(id.to_owned()).or_default().clone()
    }

    /// Every meter's id and the bytes it has counted.
    pub fn used(&self) -> Vec<(String, u64)> {
        let meters = self.meters.lock().unwrap_or_else(PoisonError::into_inner);
        meters.iter().map(|(id, meter)| (id.clone(), meter.used_bytes())).collect()
    }
}

/// How many bytes were written or are reserved.
#[derive(Debug, Default)]
pub struct Meter {
    used_bytes: AtomicU64,
}

impl Meter {
    /// Bytes written and reserved.
    pub fn used_bytes(&self) -> u64 {
        self.used_bytes.load(Ordering::Relaxed)
    }

    /// Reserves, or says how much is used.
    fn reserve(&self, bytes: u64, limit_bytes: u64) -> Result<(), u64> {
        self.used_bytes
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |used| {
                used.checked_add(bytes).filter(|sum| *sum <= limit_bytes)
            })
            .map(|_| ())
    }

    /// Gives back; only ever what was reserved.
    fn release(&self, bytes: u64) {
        self.used_bytes.fetch_sub(bytes, Ordering::Relaxed);
    }
}

/// The handler: one meter under one limit.
pub struct Quota {
    id: String,
    limit_bytes: u64,
    meter: Arc<Meter>,
}

impl Quota {
    /// Holds the meter with this id to at most this many bytes.
    pub fn new(id: impl Into<String>, limit_bytes: u64, meters: &Meters) -> Quota {
        let id = id.into();
        let meter = meters.meter(&id);
        Quota { id, limit_bytes, meter }
    }
}

impl Handler for Quota {
    fn name(&self) -> &'static str {
        NAME
    }

    fn handle<'a>(&'a self, effect: &'a Effect, next: Next<'a>) -> BoxFuture<'a, Answer> {
        Box::pin(async move {
            let bytes = if effect.classes().contains(&Class::Write) { effect.bytes() } else { 0 };
            if bytes == 0 {
                return next.run(effect).await;
            }
            if let Err(used) = self.meter.reserve(bytes, self.limit_bytes) {
                let limit = self.limit_bytes;
                return Answer::refused(
                    NAME,
                    format!(
                        "writing {bytes} bytes to `{}` would exceed quota `{}`: {used} of {limit} bytes are used",
                        effect.resource, self.id
                    ),
                    format!(
                        "raise the limit with --write-bytes or `write_bytes` in the policy to at least {}",
                        used.saturating_add(bytes)
                    ),
                );
            }
            // If this future is dropped while it waits, the reservation stays: the write may have happened.
            let answer = next.run(effect).await;
            let written = match answer.decision {
                Decision::Allowed | Decision::Answered | Decision::Planned | Decision::InDoubt => bytes,
                Decision::Refused => 0,
                // What a failed write says that it wrote before it failed stays charged.
                Decision::Failed => answer.bytes.min(bytes),
            };
            self.meter.release(bytes - written);
            answer
        })
    }
}
