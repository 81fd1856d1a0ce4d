//! Quota: how much effects may use, counted over all of them.
//!
//! There is a meter a [`Unit`]. An effect reserves what it needs before it goes on and settles it after, in one atomic
//! step each, so that two at once cannot overspend. What is refused or fails further in gives its reservation back;
//! what is in doubt, or whose asker went away, keeps it. What an effect uses none of is free.
//!
//! A run's own quotas are counted in memory. A quota that runs share by its id is kept in the ledger, where one
//! transaction arbitrates between processes, and what a run that died had reserved stays charged until its recovery
//! knows better.
//!
//! What it refuses: the effect that would exceed a limit, which may be 0, and every effect while a shared quota cannot
//! be read.

use super::{Answer, BoxFuture, Decision, Handler, Next};
use crate::{
    effect::{fs, http, net, Class, Door, Effect, Request, RunId},
    ledger::{
        quota::{Asked, Reserved},
        Ledger, Written,
    },
};
use serde::{Deserialize, Serialize};
use std::{
    collections::BTreeMap,
    fmt,
    sync::{
        atomic::{AtomicU64, Ordering},
        Arc, Mutex, PoisonError,
    },
};

const NAME: &str = "quota";

/// What is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Unit {
    /// Bytes of content written.
    WriteBytes,
    /// Effects, whatever they are.
    Effects,
    /// Bytes handed to a party outside.
    EgressBytes,
    /// Money, in the smallest unit that the operator counts in.
    Spend,
}

impl Unit {
    /// Every unit.
    pub const ALL: [Unit; 4] = [Unit::WriteBytes, Unit::Effects, Unit::EgressBytes, Unit::Spend];

    /// The name, as limits and tables have it.
    pub const fn name(self) -> &'static str {
        match self {
            Unit::WriteBytes => "write_bytes",
            Unit::Effects => "effects",
            Unit::EgressBytes => "egress_bytes",
            Unit::Spend => "spend",
        }
    }

    /// The unit with this name.
    pub fn named(name: &str) -> Option<Unit> {
        Unit::ALL.into_iter().find(|unit| unit.name() == name)
    }

    /// Whether this version has effects that use any of it. A limit on what nothing measures would be a promise that
    /// nobody keeps, so it is refused (invariant I7).
    pub const fn is_measured(self) -> bool {
        match self {
            Unit::WriteBytes | Unit::Effects | Unit::EgressBytes => true,
            Unit::Spend => false,
        }
    }

    /// How much of it an effect would use.
    pub fn amount(self, effect: &Effect) -> u64 {
        let bytes_of = |class| if effect.classes().contains(&class) { effect.bytes() } else { 0 };
        match self {
            Unit::WriteBytes => bytes_of(Class::Write),
            Unit::Effects => 1,
            // Nobody can hold what has no end that is known to a limit before it is gone.
            Unit::EgressBytes if is_open_ended(effect) => u64::MAX,
            Unit::EgressBytes => bytes_of(Class::Egress),
            // No kind of this version has a price.
            Unit::Spend => 0,
        }
    }

    /// How much of what was reserved stays used after this answer.
    fn charge(self, reserved: u64, answer: &Answer) -> u64 {
        match (answer.decision, self) {
            (Decision::Refused, _) => 0,
            (Decision::Allowed | Decision::Answered | Decision::Planned | Decision::InDoubt, _) => reserved,
            (Decision::Failed, Unit::Effects | Unit::Spend) => reserved,
            // What a failed write says that it wrote before it failed stays charged.
            (Decision::Failed, Unit::WriteBytes | Unit::EgressBytes) => answer.bytes.min(reserved),
        }
    }

    /// What an effect would do with so much of it, for a sentence.
    fn using(self, amount: u64, effect: &Effect) -> String {
        match self {
            Unit::WriteBytes => format!("writing {amount} bytes to `{}`", effect.resource),
            Unit::Effects => format!("{} of `{}`, one more effect,", effect.kind, effect.resource),
            Unit::EgressBytes => format!("sending {amount} bytes to `{}`", effect.resource),
            Unit::Spend => format!("spending {amount} on `{}`", effect.resource),
        }
    }

    /// Its plural, for a sentence.
    fn plural(self) -> &'static str {
        match self {
            Unit::WriteBytes | Unit::EgressBytes => "bytes",
            Unit::Effects => "effects",
            Unit::Spend => "units of money",
        }
    }

    /// How the limit of a run is raised.
    fn option(self) -> &'static str {
        match self {
            Unit::WriteBytes => "--write-bytes or `write_bytes` in the policy",
            Unit::Effects => "--effects or `effects` in the policy",
            Unit::EgressBytes => "--egress-bytes or `egress_bytes` in the policy",
            Unit::Spend => "`spend` in the policy",
        }
    }
}

/// Whether how much an effect hands out is not known before it has: a connection, or content that streams with no length
/// announced.
fn is_open_ended(effect: &Effect) -> bool {
    match &effect.request {
        Request::Net(net::Request::Connect { .. } | net::Request::Accept { .. }) => true,
        Request::Http(request) => request.body == http::Body::Streamed { announced: None },
        Request::Net(net::Request::Resolve { .. })
        | Request::Fs(_)
        | Request::Run(_)
        | Request::Jail(_)
        | Request::Api(_)
        | Request::Program(_) => false,
    }
}

impl fmt::Display for Unit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Limits by unit.
pub type Amounts = BTreeMap<Unit, u64>;

/// Meters by what they belong to and measure.
type ById = BTreeMap<(String, Unit), Arc<Meter>>;

/// The meters of this process, by id and unit. A chain that is given another's id shares its meters; one given a new id
/// has its own.
#[derive(Clone, Debug, Default)]
pub struct Meters {
    meters: Arc<Mutex<ById>>,
}

impl Meters {
    /// The meter with this id, made at its first mention.
    pub fn meter(&self, id: &str, unit: Unit) -> Arc<Meter> {
        let mut meters = self.meters.lock().unwrap_or_else(PoisonError::into_inner);
        meters.entry((id.to_owned(), unit)).or_default().clone()
    }

    /// Every meter's id and unit, and what it has counted.
    pub fn used(&self) -> Vec<(String, Unit, u64)> {
        let meters = self.meters.lock().unwrap_or_else(PoisonError::into_inner);
        meters.iter().map(|((id, unit), meter)| (id.clone(), *unit, meter.used())).collect()
    }
}

/// How much was used or is reserved.
#[derive(Debug, Default)]
pub struct Meter {
    used: AtomicU64,
}

impl Meter {
    /// What is used and reserved.
    pub fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    /// Reserves, or says how much is used.
    fn reserve(&self, amount: u64, limit: u64) -> Result<(), u64> {
        self.used
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |used| {
                used.checked_add(amount).filter(|sum| *sum <= limit)
            })
            .map(|_| ())
    }

    /// Gives back; only ever what was reserved.
    fn release(&self, amount: u64) {
        self.used.fetch_sub(amount, Ordering::Relaxed);
    }
}

/// What of a run's changes was charged when its program asked for it.
///
/// Each quota has its own: what one was told is charged already, the next was charged too.
struct Charged {
    ledger: Ledger,
    run: RunId,
    /// Read when the first change comes, which is after the last thing that the program asked for.
    written: Mutex<Option<Written>>,
}

impl Charged {
    fn of(ledger: Ledger, run: RunId) -> Charged {
        Charged { ledger, run, written: Mutex::default() }
    }

    /// How many of the bytes that this effect writes were charged already.
    fn bytes_of(&self, effect: &Effect) -> u64 {
        let (Door::Workspace, Request::Fs(fs::Request::Write { path, node, .. })) = (effect.door, &effect.request)
        else {
            return 0;
        };
        let fs::Node::File { digest, bytes, .. } = node else { return 0 };
        let mut written = self.written.lock().unwrap_or_else(PoisonError::into_inner);
        let known = match &mut *written {
            Some(written) => written,
            // Where it cannot be read, bytes are charged twice and never too little.
            none => none.insert(self.ledger.written_at_door(&self.run).unwrap_or_else(|error| {
                tracing::error!(%error, "what was written at the API door is charged again");
                Written::default()
            })),
        };
        known.take(path, digest, *bytes)
    }
}

/// How much of a unit an effect would use that was not charged yet.
fn uncharged(unit: Unit, effect: &Effect, charged: Option<&Charged>) -> u64 {
    let amount = unit.amount(effect);
    match unit {
        Unit::WriteBytes if amount > 0 => amount - charged.map_or(0, |charged| charged.bytes_of(effect)).min(amount),
        Unit::WriteBytes | Unit::Effects | Unit::EgressBytes | Unit::Spend => amount,
    }
}

/// The handler: one meter under one limit, in memory.
pub struct Quota {
    id: String,
    unit: Unit,
    limit: u64,
    meter: Arc<Meter>,
    charged: Option<Charged>,
}

impl Quota {
    /// Holds the meter with this id to at most this much.
    pub fn new(id: impl Into<String>, unit: Unit, limit: u64, meters: &Meters) -> Quota {
        let id = id.into();
        let meter = meters.meter(&id, unit);
        Quota { id, unit, limit, meter, charged: None }
    }

    /// The same, for a run whose changes are charged only as far as they were not when the program asked for them.
    #[must_use]
    pub fn charging_once(self, ledger: Ledger, run: RunId) -> Quota {
        Quota { charged: Some(Charged::of(ledger, run)), ..self }
    }
}

impl Handler for Quota {
    fn name(&self) -> &'static str {
        NAME
    }

    fn handle<'a>(&'a self, effect: &'a Effect, next: Next<'a>) -> BoxFuture<'a, Answer> {
        Box::pin(async move {
            let amount = uncharged(self.unit, effect, self.charged.as_ref());
            if amount == 0 {
                return next.run(effect).await;
            }
            if let Err(used) = self.meter.reserve(amount, self.limit) {
                return exceeded(
                    effect,
                    &self.id,
                    self.unit,
                    Excess { amount, used, limit: self.limit },
                    format!("raise the limit with {} to at least {}", self.unit.option(), used.saturating_add(amount)),
                );
            }
            // If this future is dropped while it waits, the reservation stays: the effect may have happened.
            let answer = next.run(effect).await;
            self.meter.release(amount - self.unit.charge(amount, &answer));
            answer
        })
    }
}

/// How a limit would be exceeded.
struct Excess {
    amount: u64,
    used: u64,
    limit: u64,
}

fn exceeded(effect: &Effect, id: &str, unit: Unit, excess: Excess, hint: String) -> Answer {
    let Excess { amount, used, limit } = excess;
    if unit == Unit::EgressBytes && is_open_ended(effect) {
        return Answer::refused(
            NAME,
            format!(
                "{} of `{}`: how much it sends is not known before it has, and quota `{id}` limits the bytes that are \
                 sent, of which {used} of {limit} are used",
                effect.kind, effect.resource
            ),
            "send content of an announced length by HTTP, or leave the limit out",
        );
    }
    Answer::refused(
        NAME,
        format!(
            "{} would exceed quota `{id}`: {used} of {limit} {} are used",
            unit.using(amount, effect),
            unit.plural()
        ),
        hint,
    )
}

/// The handler of a quota that several runs share, kept in the ledger.
pub struct SharedQuota {
    id: String,
    /// Where they are narrower than the quota's own.
    limits: Amounts,
    charged: Charged,
}

impl SharedQuota {
    /// Charges the effects of this run to the quota with this id, under its limits and these.
    pub fn new(id: impl Into<String>, limits: Amounts, ledger: Ledger, run: RunId) -> SharedQuota {
        SharedQuota { id: id.into(), limits, charged: Charged::of(ledger, run) }
    }
}

impl Handler for SharedQuota {
    fn name(&self) -> &'static str {
        NAME
    }

    fn handle<'a>(&'a self, effect: &'a Effect, next: Next<'a>) -> BoxFuture<'a, Answer> {
        Box::pin(async move {
            let amounts: Amounts = Unit::ALL
                .into_iter()
                .map(|unit| (unit, uncharged(unit, effect, Some(&self.charged))))
                .filter(|(_, amount)| *amount > 0)
                .collect();
            let asked = Asked {
                run: self.charged.run.clone(),
                quota: self.id.clone(),
                amounts,
                limits: self.limits.clone(),
                door: effect.door,
                digest: effect.digest(),
            };
            let began = std::time::Instant::now();
            let reserved = self.charged.ledger.reserve(asked).await;
            next.note_waiting(began.elapsed());
            let reservation = match reserved {
                Ok(Reserved::Held(reservation)) => reservation,
                Ok(Reserved::Exceeds { unit, amount, used, limit }) => {
                    let id = crate::effect::path::shell_word(&self.id);
                    let option = unit.name().replace('_', "-");
                    let hint = format!(
                        "raise it with `tollgate quota set {id} --{option} {}`, or see what uses it with `tollgate \
                         quota show {id}`",
                        used.saturating_add(amount)
                    );
                    return exceeded(effect, &self.id, unit, Excess { amount, used, limit }, hint);
                }
                Err(error) => {
                    return Answer::refused(
                        NAME,
                        format!("quota `{}` cannot be charged for `{}`: {error}", self.id, effect.resource),
                        "`tollgate quota list` shows the quotas, `tollgate doctor` checks the state directory",
                    )
                }
            };
            // If this future is dropped while it waits, the reservation stays until the run is closed.
            let answer = next.run(effect).await;
            // The receipt, which is written next by the same writer, comes after it: no receipt is without its charge.
            reservation.settle(|unit, amount| unit.charge(amount, &answer));
            answer
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        chain::testing::{ask, wait, FakeWorld, Judge, WorldOf},
        chain::Chain,
        effect::{
            fs,
            tests::{at_network, connect, request_of, sample},
            Digest, Door, Kind,
        },
        ledger::{quota::BatchFate, tests::Fixture},
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
        let quota = Arc::new(Quota::new("run", Unit::WriteBytes, 10, &meters));
        assert!(through(&quota, 9).is_success());
        assert!(through(&quota, 1).is_success());
        let answer = through(&quota, 1);
        assert_eq!((answer.decision, answer.decided_by), (Decision::Refused, "quota"));
        assert_eq!(answer.reason, "writing 1 bytes to `src/main.rs` would exceed quota `run`: 10 of 10 bytes are used");
        assert!(answer.hint.ends_with("at least 11"), "{}", answer.hint);
        assert_eq!(meters.used(), [("run".to_owned(), Unit::WriteBytes, 10)]);
    }

    #[test]
    fn a_refused_write_does_not_reach_the_world() {
        let quota = Arc::new(Quota::new("run", Unit::WriteBytes, 0, &Meters::default()));
        let world = FakeWorld::default();
        for bytes in [1, u64::MAX] {
            assert!(!wait(ask(vec![quota.clone()], &write(bytes), &world)).is_success());
        }
        assert!(world.done.lock().unwrap().is_empty());
    }

    #[test]
    fn what_writes_no_bytes_is_free_even_when_all_is_used() {
        let quota: Arc<dyn Handler> = Arc::new(Quota::new("run", Unit::WriteBytes, 0, &Meters::default()));
        for effect in [sample(Kind::FsRead), sample(Kind::FsDelete), sample(Kind::RunStart), write(0)] {
            assert!(wait(ask(vec![quota.clone()], &effect, &FakeWorld::default())).is_success());
        }
    }

    #[test]
    fn what_did_not_happen_is_given_back() {
        let meters = Meters::default();
        let quota: Arc<dyn Handler> = Arc::new(Quota::new("run", Unit::WriteBytes, 10, &meters));
        let refuse = Arc::new(Judge("guard", |_: &Effect| Some(Answer::refused("guard", "no", ""))));
        wait(ask(vec![quota.clone(), refuse], &write(10), &FakeWorld::default()));
        assert_eq!(meters.meter("run", Unit::WriteBytes).used(), 0);
        let partly = WorldOf(|_: &Effect| Answer { bytes: 4, ..Answer::failed("no space left", "") });
        wait(ask(vec![quota.clone()], &write(10), &partly));
        assert_eq!(meters.meter("run", Unit::WriteBytes).used(), 4, "a failed write keeps what it wrote");
        let doubt = WorldOf(|_: &Effect| Answer { decision: Decision::InDoubt, ..Answer::done(Value::Null, 0) });
        wait(ask(vec![quota], &write(6), &doubt));
        assert_eq!(meters.meter("run", Unit::WriteBytes).used(), 10, "what may have happened is charged");
    }

    #[test]
    fn two_at_once_cannot_overspend() {
        let meters = Meters::default();
        let quota: Arc<dyn Handler> = Arc::new(Quota::new("run", Unit::WriteBytes, 10, &meters));
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
        assert_eq!(meters.meter("run", Unit::WriteBytes).used(), 6);
    }

    #[test]
    fn many_at_once_spend_exactly_the_limit() {
        let meters = Meters::default();
        let quota: Arc<dyn Handler> = Arc::new(Quota::new("run", Unit::WriteBytes, 100, &meters));
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
        assert_eq!((written.into_inner(), meters.meter("run", Unit::WriteBytes).used()), (100, 100));
    }

    #[test]
    fn those_who_name_one_id_share_its_meter() {
        let meters = Meters::default();
        let (one, other) = (
            Arc::new(Quota::new("room", Unit::WriteBytes, 10, &meters)),
            Arc::new(Quota::new("room", Unit::WriteBytes, 10, &meters)),
        );
        let own = Arc::new(Quota::new("fork", Unit::WriteBytes, 10, &meters));
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
        let quota: Arc<dyn Handler> = Arc::new(Quota::new("run", Unit::WriteBytes, 10, &meters));
        wait(async {
            let effect = write(6);
            let asked = ask(vec![quota], &effect, &Never);
            assert!(tokio::time::timeout(std::time::Duration::from_millis(10), asked).await.is_err());
        });
        assert_eq!(meters.meter("run", Unit::WriteBytes).used(), 6);
    }

    fn shared(fixture: &Fixture, id: &str, run: &RunId) -> Arc<dyn Handler> {
        Arc::new(SharedQuota::new(id, Amounts::new(), fixture.ledger.clone(), run.clone()))
    }

    fn used(fixture: &Fixture, id: &str, unit: Unit) -> (u64, u64) {
        // A settlement is queued and not waited for; the next word to the same writer comes after it.
        fixture.ledger.set_quota("flush", &Amounts::from([(Unit::Effects, 1)])).unwrap();
        let lines = fixture.ledger.quota(id).unwrap();
        let line = lines.iter().find(|line| line.unit == unit.name()).unwrap();
        (line.used, line.reserved)
    }

    #[test]
    fn every_effect_counts_as_one_and_the_one_over_the_limit_is_refused() {
        let meters = Meters::default();
        let quota: Arc<dyn Handler> = Arc::new(Quota::new("run", Unit::Effects, 2, &meters));
        let read = sample(Kind::FsRead);
        for _ in 0..2 {
            assert!(wait(ask(vec![quota.clone()], &read, &FakeWorld::default())).is_success());
        }
        let answer = wait(ask(vec![quota], &read, &FakeWorld::default()));
        assert_eq!((answer.decision, answer.decided_by), (Decision::Refused, NAME));
        assert!(answer.reason.contains("2 of 2 effects") && answer.hint.contains("--effects"), "{answer:?}");
    }

    #[test]
    fn what_no_effect_uses_is_not_measured() {
        for unit in Unit::ALL {
            let used = crate::effect::VOCABULARY.iter().any(|row| unit.amount(&sample(row.kind)) > 0);
            assert_eq!(used, unit.is_measured(), "{unit}: a unit that effects use must be one that limits can name");
        }
    }

    fn upload(bytes: usize) -> Effect {
        let request = request_of("POST", "https://api.test/", &vec![b'x'; bytes]);
        at_network(Kind::HttpRequest, request.resource(), Request::Http(request))
    }

    #[test]
    fn what_requests_send_is_counted_and_what_has_no_known_end_is_refused_under_a_limit() {
        let meters = Meters::default();
        let quota = || Arc::new(Quota::new("run", Unit::EgressBytes, 10, &meters)) as Arc<dyn Handler>;
        let world = FakeWorld::default();
        let ask_for = |effect: &Effect| wait(ask(vec![quota()], effect, &world));
        assert!(ask_for(&upload(0)).is_success());
        assert!(ask_for(&upload(7)).is_success());
        let answer = ask_for(&upload(4));
        assert_eq!((answer.decision, answer.decided_by), (Decision::Refused, NAME));
        assert!(answer.reason.contains("sending 4 bytes") && answer.hint.contains("--egress-bytes"), "{answer:?}");
        assert!(ask_for(&upload(3)).is_success());
        let mut streamed = upload(0);
        if let Request::Http(request) = &mut streamed.request {
            request.body = http::Body::Streamed { announced: None };
        }
        for effect in [connect("db.test", 5432), streamed] {
            let answer = ask_for(&effect);
            assert_eq!((answer.decision, answer.decided_by), (Decision::Refused, NAME));
            assert!(answer.reason.contains("not known before"), "{answer:?}");
            assert!(wait(ask(Vec::new(), &effect, &world)).is_success());
        }
        assert_eq!(meters.used(), [("run".to_owned(), Unit::EgressBytes, 10)]);
    }

    #[test]
    fn two_runs_on_one_shared_quota_together_cannot_exceed_it_and_another_id_has_its_own() {
        let fixture = Fixture::new();
        let other = fixture.another_run();
        let limits = Amounts::from([(Unit::WriteBytes, 10), (Unit::Effects, 100)]);
        for id in ["team", "fork"] {
            fixture.ledger.set_quota(id, &limits).unwrap();
        }
        let perform = |quota, bytes| wait(ask(vec![quota], &write(bytes), &FakeWorld::default()));
        assert!(perform(shared(&fixture, "team", &fixture.run), 6).is_success());
        let answer = perform(shared(&fixture, "team", &other), 6);
        assert_eq!((answer.decision, answer.decided_by), (Decision::Refused, NAME));
        assert!(answer.hint.contains("tollgate quota set team --write-bytes 12"), "{}", answer.hint);
        assert!(perform(shared(&fixture, "team", &other), 4).is_success());
        assert!(perform(shared(&fixture, "fork", &other), 6).is_success());
        assert_eq!(used(&fixture, "team", Unit::WriteBytes), (10, 0));
        assert_eq!(used(&fixture, "team", Unit::Effects), (2, 0), "what is refused is not counted");
        assert_eq!(used(&fixture, "fork", Unit::WriteBytes), (6, 0));
    }

    #[test]
    fn many_tasks_of_two_processes_worth_of_ledgers_spend_exactly_a_shared_limit() {
        let fixture = Fixture::new();
        let other = fixture.another_run();
        fixture.ledger.set_quota("team", &Amounts::from([(Unit::WriteBytes, 60)])).unwrap();
        // A second handle on the database, as another process has it: only the database stands between them.
        let second = Ledger::open(&fixture.state).unwrap();
        let written = AtomicU64::new(0);
        std::thread::scope(|scope| {
            for (ledger, run) in [(&fixture.ledger, &fixture.run), (&second, &other)] {
                for _ in 0..4 {
                    scope.spawn(|| {
                        let quota: Arc<dyn Handler> =
                            Arc::new(SharedQuota::new("team", Amounts::new(), ledger.clone(), run.clone()));
                        for _ in 0..15 {
                            if wait(ask(vec![quota.clone()], &write(1), &FakeWorld::default())).is_success() {
                                written.fetch_add(1, Ordering::Relaxed);
                            }
                        }
                    });
                }
            }
        });
        drop(second);
        assert_eq!((written.into_inner(), used(&fixture, "team", Unit::WriteBytes)), (60, (60, 0)));
    }

    #[test]
    fn a_quota_that_is_not_there_refuses_everything() {
        let fixture = Fixture::new();
        let answer = wait(ask(vec![shared(&fixture, "gone", &fixture.run)], &write(1), &FakeWorld::default()));
        assert_eq!((answer.decision, answer.decided_by), (Decision::Refused, NAME));
        assert!(answer.reason.contains("no quota `gone`"), "{}", answer.reason);
    }

    #[test]
    fn a_run_narrows_a_shared_quota_for_itself_only() {
        let fixture = Fixture::new();
        fixture.ledger.set_quota("team", &Amounts::from([(Unit::WriteBytes, 10)])).unwrap();
        let narrow = |limit| -> Arc<dyn Handler> {
            let limits = Amounts::from([(Unit::WriteBytes, limit)]);
            Arc::new(SharedQuota::new("team", limits, fixture.ledger.clone(), fixture.run.clone()))
        };
        assert!(!wait(ask(vec![narrow(3)], &write(4), &FakeWorld::default())).is_success());
        assert!(!wait(ask(vec![narrow(100)], &write(11), &FakeWorld::default())).is_success());
        assert!(wait(ask(vec![narrow(4)], &write(4), &FakeWorld::default())).is_success());
    }

    /// A crash at any point: what has its receipt counts, what of a batch has none is given back, and an effect of
    /// which nobody can say whether it happened stays charged.
    #[test]
    fn a_crash_neither_loses_nor_double_counts() {
        let fixture = Fixture::new();
        fixture.ledger.set_quota("team", &Amounts::from([(Unit::WriteBytes, 1_000)])).unwrap();
        let crashed = |door, bytes| {
            let effect = Effect { door, ..write(bytes) };
            let quota = shared(&fixture, "team", &fixture.run);
            wait(async {
                let never = Chain::new(vec![quota]);
                let perform = never.perform(&effect, &Stuck);
                assert!(tokio::time::timeout(std::time::Duration::from_millis(50), perform).await.is_err());
            });
            effect
        };
        let landed = crashed(Door::Workspace, 1);
        crashed(Door::Workspace, 10);
        crashed(Door::Api, 100);
        let draft =
            crate::ledger::Draft::now(&fixture.run, &landed, &Answer::done(Value::Null, 1), &**fixture.ledger.clock());
        fixture.ledger.append(draft).unwrap();
        assert_eq!(used(&fixture, "team", Unit::WriteBytes), (111, 111), "all of it, until somebody knows");
        fixture.ledger.close_reservations(&fixture.run, BatchFate::Told).unwrap();
        assert_eq!(used(&fixture, "team", Unit::WriteBytes), (101, 0));
        fixture.ledger.close_reservations(&fixture.run, BatchFate::Told).unwrap();
        assert_eq!(used(&fixture, "team", Unit::WriteBytes), (101, 0), "a second recovery changes nothing");
        crashed(Door::Workspace, 5);
        fixture.ledger.close_reservations(&fixture.run, BatchFate::Unknown).unwrap();
        assert_eq!(used(&fixture, "team", Unit::WriteBytes), (106, 0));
    }

    /// A world that does not answer.
    struct Stuck;

    impl crate::chain::World for Stuck {
        fn execute<'a>(&'a self, _: &'a Effect) -> BoxFuture<'a, Answer> {
            Box::pin(std::future::pending())
        }
    }
}
