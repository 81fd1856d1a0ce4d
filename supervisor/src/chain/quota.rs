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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        chain::testing::{ask, wait, FakeWorld, Judge, WorldOf},
        effect::{fs, tests::sample, Digest, Kind, Request},
    };
    use serde_json::Value;

    fn write(bytes: u64) -> Effect {
        let node = fs::Node::File { digest: Digest::of(b""), bytes, mode: 0o644 };
        let request = fs::Request::Write { path: "src/main.rs".into(), node, expect: None };
        Effect { request: Request::Fs(request), ..sample(Kind::FsWrite) }
    }

    fn through(quota: &Arc<Quota>, bytes: u64) -> Answer {
        wait(ask(vec![quota.clone()], &write(bytes), &FakeWorld::default()))
    }

    #[test]
    fn the_byte_before_the_limit_is_written_and_the_next_is_refused() {
        let meters = Meters::default();
        let quota = Arc::new(Quota::new("run", 10, &meters));
        assert!(through(&quota, 9).is_success());
        assert!(through(&quota, 1).is_success());
        let answer = through(&quota, 1);
        assert_eq!((answer.decision, answer.decided_by), (Decision::Refused, "quota"));
        assert_eq!(answer.reason, "writing 1 bytes to `src/main.rs` would exceed quota `run`: 10 of 10 bytes are used");
        assert!(answer.hint.ends_with("at least 11"), "{}", answer.hint);
        assert_eq!(meters.used(), [("run".to_owned(), 10)]);
    }

    #[test]
    fn a_refused_write_does_not_reach_the_world() {
        let quota = Arc::new(Quota::new("run", 0, &Meters::default()));
        let world = FakeWorld::default();
        for bytes in [1, u64::MAX] {
            assert!(!wait(ask(vec![quota.clone()], &write(bytes), &world)).is_success());
        }
        assert!(world.done.lock().unwrap().is_empty());
    }

    #[test]
    fn what_writes_no_bytes_is_free_even_when_all_is_used() {
        let quota: Arc<dyn Handler> = Arc::new(Quota::new("run", 0, &Meters::default()));
        for effect in [sample(Kind::FsRead), sample(Kind::FsDelete), sample(Kind::RunStart), write(0)] {
            assert!(wait(ask(vec![quota.clone()], &effect, &FakeWorld::default())).is_success());
        }
    }

    #[test]
    fn what_did_not_happen_is_given_back() {
        let meters = Meters::default();
        let quota: Arc<dyn Handler> = Arc::new(Quota::new("run", 10, &meters));
        let refuse = Arc::new(Judge("guard", |_: &Effect| Some(Answer::refused("guard", "no", ""))));
        wait(ask(vec![quota.clone(), refuse], &write(10), &FakeWorld::default()));
        assert_eq!(meters.meter("run").used_bytes(), 0);
        let partly = WorldOf(|_: &Effect| Answer { bytes: 4, ..Answer::failed("no space left", "") });
        wait(ask(vec![quota.clone()], &write(10), &partly));
        assert_eq!(meters.meter("run").used_bytes(), 4, "a failed write keeps what it wrote");
        let doubt = WorldOf(|_: &Effect| Answer { decision: Decision::InDoubt, ..Answer::done(Value::Null, 0) });
        wait(ask(vec![quota], &write(6), &doubt));
        assert_eq!(meters.meter("run").used_bytes(), 10, "what may have happened is charged");
    }

    #[test]
    fn two_at_once_cannot_overspend() {
        let meters = Meters::default();
        let quota: Arc<dyn Handler> = Arc::new(Quota::new("run", 10, &meters));
        let inner = quota.clone();
        // While the first is in the world, the second is asked.
        let world = WorldOf(move |effect: &Effect| {
            let second = std::thread::scope(|scope| {
                scope.spawn(|| wait(ask(vec![inner.clone()], &write(5), &FakeWorld::default()))).join().unwrap()
            });
            assert_eq!(second.decided_by, "quota");
            Answer::done(Value::Null, effect.bytes())
        });
        assert!(wait(ask(vec![quota], &write(6), &world)).is_success());
        assert_eq!(meters.meter("run").used_bytes(), 6);
    }

    #[test]
    fn many_at_once_spend_exactly_the_limit() {
        let meters = Meters::default();
        let quota: Arc<dyn Handler> = Arc::new(Quota::new("run", 100, &meters));
        let written = AtomicU64::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..50 {
                        if wait(ask(vec![quota.clone()], &write(1), &FakeWorld::default())).is_success() {
                            written.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                });
            }
        });
        assert_eq!((written.into_inner(), meters.meter("run").used_bytes()), (100, 100));
    }

    #[test]
    fn those_who_name_one_id_share_its_meter() {
        let meters = Meters::default();
        let (one, other) = (Arc::new(Quota::new("room", 10, &meters)), Arc::new(Quota::new("room", 10, &meters)));
        let own = Arc::new(Quota::new("fork", 10, &meters));
        assert!(through(&one, 6).is_success());
        assert!(!through(&other, 6).is_success());
        assert!(through(&own, 6).is_success());
    }

    #[test]
    fn a_write_whose_asker_went_away_stays_charged() {
        struct Never;
        impl crate::chain::World for Never {
            fn execute<'a>(&'a self, _: &'a Effect) -> BoxFuture<'a, Answer> {
                Box::pin(std::future::pending())
            }
        }
        let meters = Meters::default();
        let quota: Arc<dyn Handler> = Arc::new(Quota::new("run", 10, &meters));
        wait(async {
            let effect = write(6);
            let asked = ask(vec![quota], &effect, &Never);
            assert!(tokio::time::timeout(std::time::Duration::from_millis(10), asked).await.is_err());
        });
        assert_eq!(meters.meter("run").used_bytes(), 6);
    }
}
