//! The store, seen from outside and, where someone changes it behind its back, from inside.

mod schema;
mod trust;

use super::{
    record::{ChangesState, EffectCounts, RunRecord, RunState, Usage},
    *,
};
use crate::{
    chain::{Answer, Decision},
    effect::{self, Class, Digest, Effect, Kind, Resource, RoomId, Subject},
};
use proptest::prelude::*;
use std::{
    fs,
    future::Future as _,
    os::unix::fs::PermissionsExt as _,
    sync::atomic::{AtomicU64, Ordering},
};

/// A clock that stands still but for one microsecond a look.
pub(crate) struct Still(AtomicU64);

impl Still {
    pub(crate) fn new() -> Arc<Still> {
        Arc::new(Still(AtomicU64::new(0)))
    }
}

impl Clock for Still {
    fn now(&self) -> Timestamp {
        Timestamp(1_796_076_511_000_000 + self.monotonic_us() as i64)
    }

    fn monotonic_us(&self) -> u64 {
        self.0.fetch_add(1, Ordering::Relaxed)
    }

    fn random(&self) -> u64 {
        self.monotonic_us()
    }
}

/// A ledger in a folder of its own, with one run.
pub(crate) struct Fixture {
    pub(crate) ledger: Ledger,
    pub(crate) run: RunId,
    pub(crate) state: PathBuf,
    _folder: tempfile::TempDir,
}

impl Fixture {
    pub(crate) fn new() -> Fixture {
        let folder = tempfile::tempdir().unwrap();
        let state = folder.path().join("state");
        let ledger = Ledger::open_with(&state, Still::new()).unwrap();
        let run = RunId("0123456789ab".into());
        ledger.insert_run(&record(&run)).unwrap();
        Fixture { ledger, run, state, _folder: folder }
    }

    /// One more run in the same ledger.
    pub(crate) fn another_run(&self) -> RunId {
        let run = RunId("0123456789ac".into());
        self.ledger.insert_run(&record(&run)).unwrap();
        run
    }

    /// A draft of a read of this path.
    fn read(&self, path: &str) -> Draft {
        draft(&self.run, path, Decision::Allowed)
    }

    /// What somebody with a database tool does.
    fn meddle(&self, sql: &str) {
        rusqlite::Connection::open(self.state.join("ledger.db")).unwrap().execute_batch(sql).unwrap();
    }

    fn all(&self, query: ReceiptQuery) -> Vec<Receipt> {
        self.ledger.receipts(&query).unwrap().collect::<Result<_>>().unwrap()
    }
}

pub(crate) fn record(id: &RunId) -> RunRecord {
    RunRecord {
        id: id.clone(),
        room: None,
        policy: "base".into(),
        policy_digest: Digest::of(b"policy").to_string(),
        command: vec!["true".into()],
        workspace: "/home/someone/project".into(),
        subject: Subject { uid: 1000, run: Some(id.clone()), agent: None },
        state: RunState::Running,
        outcome: None,
        started_at: "2026-11-30T22:08:31.000000Z".into(),
        ended_at: None,
        usage: Usage::default(),
        effects: EffectCounts::default(),
        degraded: Vec::new(),
        environment: Vec::new(),
        supervisor_pid: 1,
        supervisor_started: 1,
        changes: ChangesState::None,
        chain: Vec::new(),
        mode: Default::default(),
        resumes: None,
        recipe: None,
        answered: Default::default(),
    }
}

fn draft(run: &RunId, path: &str, decision: Decision) -> Draft {
    let mut effect = effect::tests::sample(Kind::FsRead);
    effect.resource = Resource::Workspace { path: path.to_owned() };
    let answer = Answer { decision, ..Answer::refused("admission", "because", "do") };
    Draft::of(run, &effect, &answer, Timestamp(1_796_076_511_000_000))
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().permissions().mode() & 0o7777
}

#[test]
fn receipts_are_numbered_chained_and_read_back_as_they_were_given() {
    let fixture = Fixture::new();
    let first = fixture.ledger.append(fixture.read("a")).unwrap();
    let second = fixture.ledger.append_durable(fixture.read("b").repeated(7)).unwrap();
    assert_eq!((first.seq, first.id.0.as_str(), first.prev), (1, "0123456789ab.1", Digest([0; 32])));
    assert_eq!((second.seq, second.prev, second.times), (2, first.hash, 7));
    let many = fixture.ledger.append_many(vec![fixture.read("c"), fixture.read("d")]).unwrap();
    let stored = fixture.all(ReceiptQuery::default());
    assert_eq!(stored, [vec![first, second], many].concat());
    assert_eq!(fixture.ledger.verify_run(&fixture.run).unwrap().count, 4);
}

/// Whoever changes one of these breaks every ledger that exists.
#[test]
fn the_hash_of_one_receipt_of_each_kind_is_this() {
    let run = RunId("0123456789ab".into());
    let (mut prev, mut hashes) = (Digest([0; 32]), Vec::new());
    for (index, effect) in effect::tests::one_of_each().iter().enumerate() {
        let draft =
            Draft::of(&run, effect, &Answer::done(serde_json::Value::Null, 5), Timestamp(1_796_076_511_000_042))
                .timed(Timing { queued_us: 1, decided_us: 2, executed_us: 3 });
        let receipt = draft.at(index as u64 + 1, prev);
        prev = receipt.hash;
        hashes.push(format!("{} {}", receipt.kind, receipt.hash));
    }
    assert_eq!(hashes, GOLDEN_HASHES);
}

const GOLDEN_HASHES: &[&str] = &[
    "fs/read f184f89acd44954e03f20fff87aaec1a3032017e2bdb44ab2251ea8e37304ba2",
    "fs/list 50e564a7d3f564661b903830bb03fe5b49eff0c870ab06ea3aaf4aef63ddd2de",
    "fs/write eb0ca48fd32ce03a485476f8e77040d151b5d41c1b10dfc1104251bd17849655",
    "fs/delete d58859c39f22ae1a6b68632727cc784897a7dcfd1ddd32195132b285f5523e10",
    "fs/move bfdb604b66230e2c01982b24abf804d7a26895559c9e9b2aa2ef05c01c9ea29d",
    "run/start e88b7f23df9b885b794ad1ba6c1059920f0b4d41b17c67bb3422c4148579157e",
    "run/cancel bfcaadd61ce654085f54e3426ef48258945df495a1337d9074aa45801ed9587e",
    "eval/run fb03905b3c6ad7271f9aae9f08809be5abfbdcfe3bb533cd432a39a076ea38c0",
    "net/connect d347bb0eb7d8b85ac567af723950b31c5e598b2e3c8ee3e9cbd92f681917c287",
    "process/exec 612b04c57567bf8517e2e26b203704f24ce52ca928fcdf1a08a6e22fed65734d",
    "process/syscall ea7ff067fa1553f1dcba14d02c538155cf1f971470be7d73d3d806ad320a1169",
    "api/request decdf45b6a170b1a0575018f817a79f331bfa1501a73d8fb4dfe1930ea47c5ea",
    "net/resolve 6895ae9964c79a2eb036164cea8fca0807f53777df13ebe91113192254c9a620",
    "http/request ee6743d15848e73be4099f7d6770d1c4e776ddb468b3fa1f93e2f37cbe013f37",
    "net/accept 66a769a269c230d54fa7e2e815b4697723b211183f6ca148deb8e169c9f3a35a",
];

/// A rule in about half of them.
fn some_rule(reason: &str) -> Option<String> {
    reason.len().is_multiple_of(2).then(|| format!("test.toml:3 {reason}"))
}

fn any_draft() -> impl Strategy<Value = Draft> {
    let text = || ".{0,8}|\\PC{0,8}";
    let numbers = (any::<u64>(), any::<u64>(), 0u64..3, any::<i64>());
    let optional = (prop::option::of(text()), prop::option::of(text()), prop::option::of(text()));
    (effect::tests::any_effect(), text(), text(), numbers, optional, any::<bool>()).prop_map(
        |(effect, reason, path, (bytes, queued_us, times, started), (room, agent, result), injected)| {
            let effect = Effect {
                room: room.map(RoomId),
                resource: Resource::Workspace { path },
                subject: Subject { agent, ..effect.subject.clone() },
                ..effect
            };
            let digest = result.map(|text| Digest::of(text.as_bytes()));
            let rule = some_rule(&reason);
            let answer = Answer { injected, bytes, digest, rule, ..Answer::refused("quota", reason.clone(), reason) };
            Draft::of(&RunId("0123456789ab".into()), &effect, &answer, Timestamp(started))
                .repeated(times)
                .timed(Timing { queued_us, ..Timing::default() })
        },
    )
}

proptest! {
    #[test]
    fn the_fast_hash_is_the_one_of_the_reference(draft in any_draft(), seq in 1u64..) {
        let receipt = draft.at(seq, Digest::of(b"before"));
        let mut json = serde_json::to_value(&receipt).unwrap();
        json.as_object_mut().unwrap().remove("hash");
        let domain = if receipt.rule.is_none() { "tollgate.receipt.v1\0" } else { "tollgate.receipt.v2\0" };
        if receipt.rule.is_none() {
            json.as_object_mut().unwrap().remove("rule");
        }
        let bytes = [domain.as_bytes().to_vec(), effect::canonical_json(&json)].concat();
        prop_assert_eq!(receipt.hash, Digest::of(&bytes));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn any_receipt_is_read_back_as_it_was_given(drafts in prop::collection::vec(any_draft(), 1..8)) {
        let fixture = Fixture::new();
        let given = fixture.ledger.append_many(drafts).unwrap();
        prop_assert_eq!(fixture.all(ReceiptQuery::default()), given);
        prop_assert!(fixture.ledger.verify_run(&fixture.run).is_ok());
    }
}

#[test]
fn a_receipt_of_a_run_that_is_not_there_is_refused_and_spares_the_others() {
    let fixture = Fixture::new();
    let stranger = Draft { run: RunId("zzzzzzzzzzzz".into()), ..fixture.read("a") };
    assert!(matches!(fixture.ledger.append(stranger.clone()), Err(Error::NotFound(_))));
    let mixed = fixture.ledger.append_many(vec![fixture.read("a"), stranger]);
    assert!(matches!(mixed, Err(Error::NotFound(_))));
    assert_eq!(fixture.ledger.append(fixture.read("b")).unwrap().seq, 1);
}

#[test]
fn several_threads_and_processes_share_one_chain() {
    let fixture = Fixture::new();
    // Another handle has its own connections, as another process does.
    let other = Ledger::open(&fixture.state).unwrap();
    std::thread::scope(|scope| {
        for ledger in [&fixture.ledger, &other, &fixture.ledger, &other] {
            scope.spawn(|| {
                for number in 0..50 {
                    ledger.append(fixture.read(&number.to_string())).unwrap();
                }
            });
        }
    });
    assert_eq!(fixture.ledger.verify_run(&fixture.run).unwrap().count, 200);
    assert_eq!(other.run(&fixture.run.0).unwrap().effects.count, 200);
}

/// The other half of the test below, in its own process: it appends and dies without a word.
#[test]
fn dies_after_it_appended() {
    let Some(state) = std::env::var_os("TOLLGATE_TEST_DIES_IN") else { return };
    let ledger = Ledger::open(Path::new(&state)).unwrap();
    let run = RunId("0123456789ab".into());
    for number in 0..20 {
        ledger.append(draft(&run, &number.to_string(), Decision::Allowed)).unwrap();
    }
    let intent = ledger.intend(&run, &effect::tests::sample(Kind::RunStart), Timestamp(0)).unwrap();
    std::mem::forget(intent);
    nix::sys::signal::raise(nix::sys::signal::Signal::SIGKILL).unwrap();
}

#[test]
fn what_was_acknowledged_outlives_a_killed_process() {
    let fixture = Fixture::new();
    let status = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "ledger::tests::dies_after_it_appended"])
        .env("TOLLGATE_TEST_DIES_IN", &fixture.state)
        .stdout(std::process::Stdio::null())
        .status()
        .unwrap();
    assert_eq!(std::os::unix::process::ExitStatusExt::signal(&status), Some(9));
    assert_eq!(fixture.ledger.verify_run(&fixture.run).unwrap().count, 20);
    let open = fixture.ledger.in_doubt(Some(&fixture.run)).unwrap();
    assert_eq!(open.iter().map(|intent| intent.draft.kind).collect::<Vec<_>>(), [Kind::RunStart]);
    let recorded = fixture.ledger.record_in_doubt(&fixture.run).unwrap();
    assert_eq!((recorded[0].decision, recorded[0].seq), (Decision::InDoubt, 21));
    assert!(fixture.ledger.verify_run(&fixture.run).is_ok());
}

#[test]
fn each_way_of_meddling_is_found_where_it_was_done() {
    let at = |n: u64| format!("id = (1 << 32 | {n})");
    let table: Vec<(&str, String, u64, Fault)> = vec![
        ("edit", format!("UPDATE receipts SET reason = 'fine' WHERE {}", at(3)), 3, Fault::Changed),
        ("edit a number", format!("UPDATE receipts SET bytes = bytes + 1 WHERE {}", at(5)), 5, Fault::Changed),
        ("edit a class", format!("UPDATE receipts SET classes = 2 WHERE {}", at(2)), 2, Fault::Changed),
        ("unknown word", format!("UPDATE receipts SET decision = 'fine' WHERE {}", at(2)), 2, Fault::Unreadable),
        ("delete the first", format!("DELETE FROM receipts WHERE {}", at(1)), 1, Fault::Missing),
        ("delete one inside", format!("DELETE FROM receipts WHERE {}", at(3)), 3, Fault::Missing),
        ("delete the tail", "DELETE FROM receipts WHERE id >= (1 << 32 | 4)".to_owned(), 4, Fault::Missing),
        (
            "delete the tail and tell the run's row",
            "DELETE FROM receipts WHERE id >= (1 << 32 | 4); \
             UPDATE chains SET count = 3, head = (SELECT hash FROM receipts WHERE id = (1 << 32 | 3))"
                .to_owned(),
            4,
            Fault::Missing,
        ),
        ("delete all", "DELETE FROM receipts".to_owned(), 1, Fault::Missing),
        (
            "swap two",
            format!(
                "UPDATE receipts SET id = 7 WHERE {a}; UPDATE receipts SET {a} WHERE {b}; UPDATE receipts SET {b} WHERE id = 7",
                a = at(2),
                b = at(3)
            ),
            2,
            Fault::Unlinked,
        ),
        (
            "add one",
            "CREATE TEMP TABLE t AS SELECT * FROM receipts WHERE id = (1 << 32 | 5); \
             UPDATE t SET id = id + 1; INSERT INTO receipts SELECT * FROM t"
                .to_owned(),
            6,
            Fault::Added,
        ),
        ("forge the head", "UPDATE chains SET head = zeroblob(32)".to_owned(), 5, Fault::Replaced),
        ("relink", format!("UPDATE receipts SET prev = zeroblob(32) WHERE {}", at(4)), 4, Fault::Unlinked),
    ];
    for (way, sql, seq, fault) in table {
        let fixture = Fixture::new();
        for number in 0..5 {
            fixture.ledger.append(fixture.read(&number.to_string())).unwrap();
        }
        fixture.ledger.seal_run(&fixture.run).unwrap();
        assert_eq!(fixture.ledger.verify_run(&fixture.run).unwrap().sealed.map(|head| head.count), Some(5));
        fixture.meddle(&sql);
        match fixture.ledger.verify_run(&fixture.run) {
            Err(Broken::Receipt { seq: found, fault: what, .. }) => assert_eq!((found, what), (seq, fault), "{way}"),
            other => panic!("{way}: {other:?}"),
        }
    }
}

#[test]
fn a_chain_written_anew_does_not_fit_the_sealed_head() {
    let fixture = Fixture::new();
    fixture.ledger.append(fixture.read("secret")).unwrap();
    fixture.ledger.append(fixture.read("b")).unwrap();
    fixture.ledger.seal_run(&fixture.run).unwrap();
    fixture.meddle("DELETE FROM receipts; UPDATE chains SET count = 0, head = zeroblob(32)");
    fixture.ledger.append(fixture.read("harmless")).unwrap();
    fixture.ledger.append(fixture.read("b")).unwrap();
    let broken = fixture.ledger.verify_run(&fixture.run).unwrap_err();
    assert!(matches!(broken, Broken::Receipt { seq: 2, fault: Fault::Replaced, .. }), "{broken}");
    assert!(fixture.ledger.verify_heads().is_err());
}

#[test]
fn counts_that_were_changed_are_found() {
    let fixture = Fixture::new();
    fixture.ledger.append(draft(&fixture.run, "a", Decision::Refused)).unwrap();
    fixture.meddle("UPDATE chains SET refused = 0");
    let broken = fixture.ledger.verify_run(&fixture.run).unwrap_err();
    assert!(matches!(broken, Broken::Counts { what: "refused", says: 0, found: 1, .. }), "{broken}");
}

#[test]
fn the_hosts_chain_holds_every_sealed_run_and_shows_what_is_done_to_it() {
    let fixture = Fixture::new();
    let mut runs = vec![fixture.run.clone()];
    for _ in 0..2 {
        let run = fixture.ledger.new_run_id();
        fixture.ledger.insert_run(&record(&run)).unwrap();
        runs.push(run);
    }
    for (index, run) in runs.iter().enumerate() {
        for _ in 0..index {
            fixture.ledger.append(draft(run, "a", Decision::Allowed)).unwrap();
        }
        let head = fixture.ledger.seal_run(run).unwrap();
        assert_eq!((head.n, head.count), (index as u64 + 1, index as u64));
    }
    // A run goes on after it was sealed, and is sealed again.
    fixture.ledger.append(draft(&runs[1], "b", Decision::Allowed)).unwrap();
    assert_eq!(fixture.ledger.seal_run(&runs[1]).unwrap().count, 2);
    assert_eq!(fixture.ledger.verify_heads().unwrap(), 4);
    for (sql, n, fault) in [
        ("UPDATE heads SET count = 9 WHERE n = 2", 2, Fault::Changed),
        ("UPDATE heads SET prev = zeroblob(32) WHERE n = 3", 3, Fault::Unlinked),
        ("DELETE FROM heads WHERE n = 1", 1, Fault::Missing),
    ] {
        fixture.meddle(&format!("CREATE TABLE kept AS SELECT * FROM heads; {sql}"));
        match fixture.ledger.verify_heads() {
            Err(Broken::Head { n: found, fault: what }) => assert_eq!((found, what), (n, fault)),
            other => panic!("{sql}: {other:?}"),
        }
        fixture.meddle("DELETE FROM heads; INSERT INTO heads SELECT * FROM kept; DROP TABLE kept");
    }
    fixture
        .meddle("PRAGMA foreign_keys = off; DELETE FROM receipts WHERE id > (3 << 32); DELETE FROM runs WHERE n = 3");
    assert!(matches!(fixture.ledger.verify_heads(), Err(Broken::RunMissing { n: 3, .. })));
}

#[test]
fn an_intent_is_listed_until_it_is_completed() {
    let fixture = Fixture::new();
    let effect = effect::tests::sample(Kind::RunStart);
    let intent = fixture.ledger.intend(&fixture.run, &effect, Timestamp(5)).unwrap();
    let open = fixture.ledger.in_doubt(None).unwrap();
    assert_eq!((open.len(), open[0].n, open[0].draft.kind), (1, intent.n(), Kind::RunStart));
    assert_eq!(open[0].draft.decision, Decision::InDoubt);
    let done = Answer::done(serde_json::Value::Null, 0);
    let receipt = intent.complete(Draft::of(&fixture.run, &effect, &done, Timestamp(5))).unwrap();
    assert_eq!(receipt.decision, Decision::Allowed);
    assert_eq!(fixture.ledger.in_doubt(None).unwrap(), []);
    assert_eq!(fixture.ledger.run(&fixture.run.0).unwrap().effects, EffectCounts { count: 1, refused: 0, once: 1 });
}

#[test]
fn an_abandoned_intent_is_one_refusal() {
    let fixture = Fixture::new();
    let effect = effect::tests::sample(Kind::RunStart);
    let intent = fixture.ledger.intend(&fixture.run, &effect, Timestamp(5)).unwrap();
    let receipt = intent.abandon("the jail could not be built").unwrap();
    assert_eq!((receipt.decision, receipt.reason.as_str()), (Decision::Refused, "the jail could not be built"));
    assert_eq!(fixture.ledger.in_doubt(None).unwrap(), []);
    assert_eq!(fixture.all(ReceiptQuery::default()).len(), 1);
}

#[test]
fn a_dropped_intent_is_in_doubt_until_a_person_settles_it() {
    let fixture = Fixture::new();
    drop(fixture.ledger.intend(&fixture.run, &effect::tests::sample(Kind::RunStart), Timestamp(5)).unwrap());
    let n = fixture.ledger.in_doubt(None).unwrap()[0].n;
    assert!(matches!(fixture.ledger.settle(n), Err(Error::NoIntent(_))), "not before it has its receipt");
    assert_eq!(fixture.ledger.seal_run(&fixture.run).unwrap().count, 1);
    assert_eq!(fixture.ledger.seal_run(&fixture.run).unwrap().count, 1, "it has one receipt, not one a seal");
    let open = fixture.ledger.in_doubt(Some(&fixture.run)).unwrap();
    assert_eq!((open.len(), open[0].receipt), (1, Some(1)));
    fixture.ledger.settle(n).unwrap();
    assert_eq!(fixture.ledger.in_doubt(None).unwrap(), []);
    assert_eq!(fixture.all(ReceiptQuery::default())[0].decision, Decision::InDoubt);
}

#[test]
fn each_condition_of_a_query_selects() {
    let fixture = Fixture::new();
    let other = fixture.ledger.new_run_id();
    fixture.ledger.insert_run(&record(&other)).unwrap();
    let mut drafts: Vec<Draft> = Vec::new();
    for (index, effect) in effect::tests::one_of_each().into_iter().enumerate() {
        let answer = match index % 3 {
            0 => Answer::refused("quota", "", ""),
            _ => Answer { digest: Some(Digest::of(&[index as u8])), ..Answer::done(serde_json::Value::Null, 0) },
        };
        let run = if index % 2 == 0 { &fixture.run } else { &other };
        let mut draft = Draft::of(run, &effect, &answer, Timestamp(1000 + index as i64));
        draft.subject.uid = index as u32 % 4;
        draft.subject.run = (index % 3 == 1).then(|| RunId("asker0000000".into()));
        draft.room = (index % 5 == 0).then(|| RoomId("den".into()));
        drafts.push(draft);
    }
    fixture.ledger.append_many(drafts).unwrap();
    let all = fixture.all(ReceiptQuery::default());
    assert_eq!(all.len(), effect::VOCABULARY.len());
    let some = all[4].clone();
    let some_digest = some.request_digest;
    type Holds = Box<dyn Fn(&Receipt) -> bool>;
    let us = |receipt: &Receipt| receipt.started_at.parse::<Timestamp>().unwrap();
    let any = ReceiptQuery::default;
    let table: Vec<(ReceiptQuery, Holds)> = vec![
        (ReceiptQuery { run: Some(other.clone()), ..any() }, Box::new(move |r| r.run == other)),
        (ReceiptQuery { room: Some(RoomId("den".into())), ..any() }, Box::new(|r| r.room.is_some())),
        (ReceiptQuery { kind: Some(Kind::FsMove), ..any() }, Box::new(|r| r.kind == Kind::FsMove)),
        (ReceiptQuery { class: Some(Class::Write), ..any() }, Box::new(|r| r.classes.contains(&Class::Write))),
        (
            ReceiptQuery { resource_prefix: Some("src/".into()), ..any() },
            Box::new(|r| r.resource.to_string().starts_with("src/")),
        ),
        (ReceiptQuery { family: Some("fs".into()), ..any() }, Box::new(|r| r.kind.name().starts_with("fs/"))),
        (ReceiptQuery { digest: Some(some_digest), ..any() }, Box::new(move |r| r.request_digest == some_digest)),
        (
            ReceiptQuery { digest: Some(Digest::of(&[2])), ..any() },
            Box::new(|r| r.result_digest == Some(Digest::of(&[2]))),
        ),
        (
            ReceiptQuery { subject_run: Some(RunId("asker0000000".into())), ..any() },
            Box::new(|r| r.subject.run == Some(RunId("asker0000000".into()))),
        ),
        (ReceiptQuery { decision: Some(Decision::Allowed), ..any() }, Box::new(|r| r.decision == Decision::Allowed)),
        (ReceiptQuery { decided_by: Some("quota".into()), ..any() }, Box::new(|r| r.decided_by == "quota")),
        (ReceiptQuery { subject_uid: Some(3), ..any() }, Box::new(|r| r.subject.uid == 3)),
        (ReceiptQuery { since: Some(Timestamp(1005)), ..any() }, Box::new(move |r| us(r) >= Timestamp(1005))),
        (ReceiptQuery { until: Some(Timestamp(1005)), ..any() }, Box::new(move |r| us(r) < Timestamp(1005))),
        (
            ReceiptQuery { request_digest: Some(some.request_digest), ..any() },
            Box::new(move |r| r.request_digest == some.request_digest),
        ),
        (
            ReceiptQuery { result_digest: Some(Digest::of(&[1])), ..any() },
            Box::new(|r| r.result_digest == Some(Digest::of(&[1]))),
        ),
        (ReceiptQuery { denied_only: Denied::Only, ..any() }, Box::new(|r| r.decision == Decision::Refused)),
    ];
    for (query, holds) in table {
        let expected: Vec<Receipt> = all.iter().filter(|receipt| holds(receipt)).cloned().collect();
        assert!(!expected.is_empty() && expected.len() < all.len(), "{query:?} would show nothing");
        assert_eq!(fixture.all(query.clone()), expected, "{query:?}");
        let limited = ReceiptQuery { limit: Some(1), ..query.clone() };
        assert_eq!(fixture.all(limited), expected[..1]);
        let newest = |count: usize| fixture.all(ReceiptQuery { newest: Some(count as u64), ..query.clone() });
        assert_eq!(newest(0), []);
        assert_eq!(newest(2), expected[expected.len().saturating_sub(2)..]);
        assert_eq!(newest(expected.len() + 1), expected);
        // Of one run, nothing is looked at but that run's receipts.
        let of_run = ReceiptQuery { run: Some(fixture.run.clone()), ..query };
        for step in fixture.ledger.receipts(&of_run).unwrap().plans() {
            assert!(!step.contains("SCAN"), "{of_run:?}: {step}");
            let bounded = step.contains(">? AND ") && step.contains("<?)");
            assert!(bounded || !step.contains("receipts"), "{of_run:?}: {step}");
        }
    }
    let both = ReceiptQuery { since: Some(Timestamp(1003)), class: Some(Class::Write), ..any() };
    assert_eq!(fixture.all(both).len(), 2);
    assert_eq!(fixture.all(ReceiptQuery { since: Some(Timestamp(5000)), ..any() }), []);
    let never = ReceiptQuery { decision: Some(Decision::Allowed), denied_only: Denied::Only, ..any() };
    assert_eq!(fixture.all(never), []);
}

#[test]
fn a_place_is_compared_component_by_component() {
    let fixture = Fixture::new();
    let workspace = |path: &str| fixture.read(path);
    let host = |path: &str| Draft { resource: Resource::Host { path: path.into() }, ..fixture.read("") };
    let address = Draft { resource: Resource::Address { to: "api.test:443".into() }, ..fixture.read("") };
    let drafts = ["src", "src/a", "src2", "a/src", "", "src\0x"].map(workspace).into_iter();
    let drafts = drafts.chain(["/etc", "/etc/passwd", "/etcetera"].map(host)).chain([address]);
    fixture.ledger.append_many(drafts.collect()).unwrap();
    let under = |prefix: &str| -> Vec<String> {
        let query = ReceiptQuery { resource_prefix: Some(prefix.into()), ..ReceiptQuery::default() };
        fixture.all(query).iter().map(|receipt| receipt.resource.to_string()).collect()
    };
    for src in ["src", "src/", "./src"] {
        assert_eq!(under(src), ["src", "src/a"], "{src}");
    }
    assert_eq!(under("."), ["src", "src/a", "src2", "a/src", ".", "src\0x"]);
    assert_eq!(under("/etc"), ["/etc", "/etc/passwd"]);
    assert_eq!(under("/"), ["/etc", "/etc/passwd", "/etcetera"]);
    assert_eq!(under("api.test"), ["api.test:443"]);
    assert_eq!(under("%"), Vec::<String>::new());
}

#[test]
fn a_long_chain_is_read_in_pages_and_from_any_place() {
    let fixture = Fixture::new();
    fixture.ledger.append_many((0..700).map(|number| fixture.read(&number.to_string())).collect()).unwrap();
    let query = ReceiptQuery {
        run: Some(fixture.run.clone()),
        after_seq: Some(150),
        limit: Some(513),
        ..ReceiptQuery::default()
    };
    let seqs: Vec<u64> = fixture.all(query).iter().map(|receipt| receipt.seq).collect();
    assert_eq!(seqs, (151..=663).collect::<Vec<_>>());
    assert_eq!(fixture.all(ReceiptQuery { limit: Some(0), ..ReceiptQuery::default() }), []);
    let missing = ReceiptQuery { run: Some(RunId("zzzzzzzzzzzz".into())), ..ReceiptQuery::default() };
    assert!(matches!(fixture.ledger.receipts(&missing), Err(Error::NotFound(_))));
}

#[test]
fn a_run_is_found_by_a_prefix_that_only_it_has_and_as_the_latest() {
    let fixture = Fixture::new();
    for id in ["ab0000000000", "ab1000000000", "b00000000000"] {
        fixture.ledger.insert_run(&record(&RunId(id.into()))).unwrap();
    }
    let found = |prefix: &str| fixture.ledger.run(prefix).map(|run| run.id.0);
    assert_eq!(found("ab0").unwrap(), "ab0000000000");
    assert_eq!(found("0123456789ab").unwrap(), "0123456789ab");
    assert_eq!(found("latest").unwrap(), "b00000000000");
    for nothing in ["x", "", "%", "ab00000000000", "a~"] {
        assert!(matches!(found(nothing), Err(Error::NotFound(_))), "{nothing}");
    }
    match found("ab") {
        Err(Error::Ambiguous { candidates, .. }) => assert_eq!(candidates, ["ab0000000000", "ab1000000000"]),
        other => panic!("{other:?}"),
    }
    assert!(matches!(fixture.ledger.insert_run(&record(&RunId("b00000000000".into()))), Err(Error::RunExists(_))));
}

#[test]
fn changing_a_runs_record_leaves_its_counts() {
    let fixture = Fixture::new();
    fixture.ledger.append(draft(&fixture.run, "a", Decision::Refused)).unwrap();
    let ended = RunRecord {
        state: RunState::Ended,
        ended_at: Some("2026-11-30T22:09:00.000000Z".into()),
        ..record(&fixture.run)
    };
    fixture.ledger.update_run(&ended).unwrap();
    let effects = EffectCounts { count: 1, refused: 1, once: 0 };
    assert_eq!(fixture.ledger.run("latest").unwrap(), RunRecord { effects, ..ended.clone() });
    let live = RunQuery { all: Which::Live, limit: None, since: None };
    assert_eq!(fixture.ledger.runs(live).unwrap(), []);
    assert_eq!(fixture.ledger.runs(RunQuery { all: Which::All, ..live }).unwrap().len(), 1);
    let later = RunQuery { all: Which::All, since: Some(Timestamp(i64::MAX)), ..live };
    assert_eq!(fixture.ledger.runs(later).unwrap(), []);
    let stranger = RunRecord { id: RunId("zzzzzzzzzzzz".into()), ..ended };
    assert!(matches!(fixture.ledger.update_run(&stranger), Err(Error::NotFound(_))));
}

proptest! {
    #[test]
    fn ids_sort_by_time(a in 0i64..9_000_000_000_000_000, b in 0i64..9_000_000_000_000_000, chance in any::<u64>()) {
        let (one, other) = (runs::run_id(Timestamp(a), chance), runs::run_id(Timestamp(b), !chance));
        prop_assert!(one.0.len() == 12 && one.0.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit()));
        if a / 10_000 != b / 10_000 {
            prop_assert_eq!(one.cmp(&other), a.cmp(&b));
        }
        prop_assert!(!"latest".starts_with(&one.0[..2]));
    }
}

#[test]
fn blobs_are_stored_once_and_checked_when_read() {
    let fixture = Fixture::new();
    let digest = fixture.ledger.put_blob(b"content").unwrap();
    assert_eq!(fixture.ledger.put_blob(b"content").unwrap(), digest);
    assert_eq!(fixture.ledger.blob(&digest).unwrap(), b"content");
    let path = fixture.ledger.blob_path(&digest);
    assert_eq!((mode(&path), mode(path.parent().unwrap())), (0o600, 0o700));
    assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1, "no temporary file is left");
    fs::write(&path, b"changed").unwrap();
    assert!(matches!(fixture.ledger.blob(&digest), Err(Error::BlobDamaged { .. })));
    fs::write(&path, b"").unwrap();
    assert!(matches!(fixture.ledger.blob(&digest), Err(Error::BlobDamaged { .. })), "cut short is not empty");
    fixture.ledger.put_blob(b"content").unwrap();
    assert_eq!(fixture.ledger.blob(&digest).unwrap(), b"content");
    fs::remove_file(&path).unwrap();
    assert!(matches!(fixture.ledger.blob(&digest), Err(Error::BlobMissing(missing)) if missing == digest));
}

#[test]
fn everything_is_private_to_the_user() {
    let fixture = Fixture::new();
    fixture.ledger.append(fixture.read("a")).unwrap();
    assert_eq!(mode(&fixture.state), 0o700);
    for entry in fs::read_dir(&fixture.state).unwrap() {
        let path = entry.unwrap().path();
        if path.is_file() {
            assert_eq!(mode(&path), 0o600, "{}", path.display());
        }
    }
    assert!(fixture.state.join("ledger.db-wal").exists());
    assert_eq!(fixture.ledger.run_dir(&fixture.run), fixture.state.join("runs/0123456789ab"));
}

#[test]
fn a_directory_that_others_can_enter_is_closed_if_it_is_ours_and_refused_if_not() {
    let folder = tempfile::tempdir().unwrap();
    let state = folder.path().join("open");
    fs::create_dir(&state).unwrap();
    fs::set_permissions(&state, fs::Permissions::from_mode(0o755)).unwrap();
    fs::write(state.join("letter"), "dear").unwrap();
    assert!(matches!(Ledger::open(&state), Err(Error::StateIsOpen { mode: 0o755, .. })));
    assert_eq!(mode(&state), 0o755);
    assert!(!state.join("ledger.db").exists());
    fs::remove_file(state.join("letter")).unwrap();
    Ledger::open(&state).unwrap().writable().unwrap();
    assert_eq!(mode(&state), 0o700);
}

#[test]
fn a_newer_ledger_is_refused_and_left_alone() {
    let fixture = Fixture::new();
    fixture.meddle("PRAGMA user_version = 9999");
    for opened in [
        Ledger::open(&fixture.state).and_then(|ledger| ledger.writable()),
        Ledger::open_read_only(&fixture.state).map(drop),
    ] {
        let error = opened.unwrap_err();
        assert!(matches!(error, Error::Newer { found: 9999, .. }), "{error}");
        assert!(error.to_string().contains("newer Tollgate"), "{error}");
    }
}

#[test]
fn reading_only_makes_nothing_and_changes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    assert!(matches!(Ledger::open_read_only(folder.path()), Err(Error::Absent { .. })));
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    fs::write(folder.path().join("ledger.db"), b"").unwrap();
    assert!(matches!(Ledger::open_read_only(folder.path()), Err(Error::Absent { .. })), "an empty file is none");
    let fixture = Fixture::new();
    fixture.ledger.append(fixture.read("a")).unwrap();
    let reader = Ledger::open_read_only(&fixture.state).unwrap();
    assert_eq!(reader.run("latest").unwrap().effects.count, 1);
    assert!(matches!(reader.append(fixture.read("b")), Err(Error::NotWritable { .. })));
    assert_eq!(reader.verify_run(&fixture.run).unwrap().count, 1);
}

#[test]
fn a_file_that_is_no_database_is_called_damaged() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("ledger.db"), vec![b'x'; 8192]).unwrap();
    let error = Ledger::open(folder.path()).unwrap().writable().unwrap_err();
    assert!(matches!(error, Error::Damaged { .. }), "{error}");
}

#[test]
fn many_first_runs_at_once_make_one_ledger() {
    let folder = tempfile::tempdir().unwrap();
    let state = folder.path().join("deep/state");
    std::thread::scope(|scope| {
        for number in 0..6 {
            let state = &state;
            scope.spawn(move || {
                let ledger = Ledger::open(state).unwrap();
                let run = RunId(format!("{number:012}"));
                ledger.insert_run(&record(&run)).unwrap();
                ledger.append(draft(&run, "a", Decision::Allowed)).unwrap();
            });
        }
    });
    let reader = Ledger::open_read_only(&state).unwrap();
    let all = reader.runs(RunQuery { all: Which::All, limit: None, since: None }).unwrap();
    assert_eq!(all.iter().filter(|run| run.effects.count == 1).count(), 6);
}

#[test]
fn a_writer_that_panicked_refuses_what_is_new() {
    let fixture = Fixture::new();
    let lost = fixture.ledger.call(Durability::Process, |_| -> Result<()> { panic!("on purpose") });
    assert!(matches!(lost, Err(Error::WriterGone(_))));
    while fixture.ledger.writable().is_ok() {
        std::thread::yield_now();
    }
    assert!(matches!(fixture.ledger.append(fixture.read("a")), Err(Error::WriterGone(_))));
    assert_eq!(Ledger::open(&fixture.state).unwrap().append(fixture.read("a")).unwrap().seq, 1);
}

#[test]
fn dropping_the_last_handle_finishes_what_was_asked() {
    let fixture = Fixture::new();
    let other = Ledger::open(&fixture.state).unwrap();
    for number in 0..500 {
        other.append_unattended(fixture.read(&number.to_string()));
    }
    drop(other);
    assert_eq!(fixture.ledger.verify_run(&fixture.run).unwrap().count, 500);
}

#[test]
fn a_full_disk_is_a_typed_error_that_names_the_file() {
    let fixture = Fixture::new();
    fixture.ledger.append(fixture.read("a")).unwrap();
    fixture
        .ledger
        .call(Durability::Process, |batch| {
            batch.connection().pragma_update(None, "max_page_count", 1).map_err(batch.failed("shrink"))
        })
        .unwrap();
    let long = Draft { reason: "x".repeat(1 << 20), ..fixture.read("b") };
    let error = fixture.ledger.append(long).unwrap_err();
    assert!(matches!(error, Error::DiskFull { .. }), "{error}");
    assert!(error.to_string().contains("ledger.db; free some space"), "{error}");
    assert_eq!(fixture.ledger.verify_run(&fixture.run).unwrap().count, 1);
}

/// The other half of the test below, on a disk of its own of three mebibytes.
#[test]
fn fills_its_disk() {
    let Some(folder) = std::env::var_os("TOLLGATE_TEST_FILLS").map(PathBuf::from) else { return };
    let state = folder.join("state");
    let ledger = Ledger::open(&state).unwrap();
    let run = RunId("0123456789ab".into());
    ledger.insert_run(&record(&run)).unwrap();
    ledger.writable().unwrap();
    let fill = || {
        use std::io::Write as _;
        let mut file = fs::OpenOptions::new().append(true).create(true).open(folder.join("filler")).unwrap();
        while file.write(&[0; 4096]).is_ok_and(|written| written > 0) {}
    };
    fill();
    // The log may have a little room left that was taken before.
    let mut begun = 0;
    while ledger.writable().is_ok() {
        ledger.append(draft(&run, "a", Decision::Allowed)).unwrap();
        begun += 1;
    }
    assert!(begun > 0 && begun < 5000, "{begun}");
    assert!(matches!(ledger.writable(), Err(Error::DiskFull { .. })));
    assert!(!state.join("reserve").exists());
    ledger.append(draft(&run, "begun before", Decision::Allowed)).expect("what was begun has its receipt");
    fill();
    assert!(matches!(
        ledger.append(Draft { reason: "x".repeat(1 << 20), ..draft(&run, "b", Decision::Allowed) }),
        Err(Error::DiskFull { .. })
    ));
    assert_eq!(ledger.verify_run(&run).unwrap().count, begun + 1);
    fs::remove_file(folder.join("filler")).unwrap();
    ledger.writable().unwrap();
    assert!(state.join("reserve").exists());
    ledger.append(draft(&run, "after", Decision::Allowed)).unwrap();
    assert_eq!(ledger.verify_run(&run).unwrap().count, begun + 2);
    println!("filled and freed");
}

#[test]
fn on_a_full_disk_what_was_begun_has_its_receipt_and_nothing_new_begins() {
    let folder = tempfile::tempdir().unwrap();
    let output = std::process::Command::new("unshare")
        .args(["--user", "--map-root-user", "--mount", "sh", "-c"])
        .arg("mount -t tmpfs -o size=3m,mode=0700 none \"$TOLLGATE_TEST_FILLS\" && exec \"$0\" --exact ledger::tests::fills_its_disk --nocapture")
        .arg(std::env::current_exe().unwrap())
        .env("TOLLGATE_TEST_FILLS", folder.path())
        .output()
        .expect("unshare(1), which the jail's tests need as well");
    let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("filled and freed"), "{text}");
}

#[test]
fn an_intent_that_nobody_waited_for_is_taken_back() {
    let fixture = Fixture::new();
    let effect = effect::tests::sample(Kind::RunStart);
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    for _ in 0..20 {
        runtime.block_on(async {
            let mut intend = std::pin::pin!(fixture.ledger.intend_async(&fixture.run, &effect, Timestamp(0)));
            // Once, so that it is asked for, and then never again.
            std::future::poll_fn(|context| {
                let _ = intend.as_mut().poll(context);
                std::task::Poll::Ready(())
            })
            .await;
        });
    }
    // Two rounds through the writer: the first may find an intent, the taking back is queued behind it.
    fixture.ledger.append(fixture.read("a")).unwrap();
    fixture.ledger.append(fixture.read("b")).unwrap();
    assert_eq!(fixture.ledger.in_doubt(None).unwrap(), []);
}

#[test]
fn a_long_log_is_copied_into_the_database_when_nobody_waits() {
    let fixture = Fixture::new();
    let drafts = (0..2_000).map(|number| fixture.read(&format!("file{number}"))).collect();
    fixture.ledger.append_many(drafts).unwrap();
    let log = || -> (i64, i64) {
        let connection = rusqlite::Connection::open(fixture.state.join("ledger.db")).unwrap();
        let row = |row: &rusqlite::Row<'_>| Ok((row.get(1)?, row.get(2)?));
        connection.query_row("PRAGMA wal_checkpoint(NOOP)", [], row).unwrap()
    };
    let (pages, copied) = log();
    assert!(pages > 128 && pages < 512 && copied < pages, "{copied} of {pages} pages");
    // One that waits for the disk: then copying is cheap.
    let intent = fixture.ledger.intend(&fixture.run, &effect::tests::sample(Kind::RunStart), Timestamp(0)).unwrap();
    let until = std::time::Instant::now() + std::time::Duration::from_secs(20);
    while log().1 < pages && std::time::Instant::now() < until {
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    let (pages, copied) = log();
    assert_eq!(copied, pages);
    intent.abandon("it was not to happen").unwrap();
    assert!(fixture.ledger.verify_run(&fixture.run).is_ok());
}

#[test]
fn that_a_run_is_not_over_is_known_from_the_opening() {
    let fixture = Fixture::new();
    assert!(!fixture.ledger.had_live_runs().unwrap(), "it was empty then");
    assert!(Ledger::open(&fixture.state).unwrap().had_live_runs().unwrap());
    assert!(Ledger::open_read_only(&fixture.state).unwrap().had_live_runs().unwrap());
    fixture.ledger.end_run(&RunRecord { state: RunState::Ended, ..record(&fixture.run) }, Vec::new()).unwrap();
    assert!(!Ledger::open(&fixture.state).unwrap().had_live_runs().unwrap());
    assert!(!Ledger::open_read_only(&fixture.state).unwrap().had_live_runs().unwrap());
}
