//! What somebody finds out who has a copy of the ledger and the public key, and what one state directory finds out of
//! itself.

use super::*;
use crate::ledger::{
    mark,
    verify::{Expected, Signatures},
};
use std::ops::ControlFlow;

/// A host with three sealed runs of four receipts and one live run of two.
pub(super) struct Hosted {
    pub(super) fixture: Fixture,
    pub(super) sealed: Vec<RunId>,
    key: PublicKey,
}

pub(super) fn hosted() -> Hosted {
    let fixture = Fixture::new();
    let mut sealed = Vec::new();
    for number in 0..3 {
        let run = RunId(format!("run00000000{number}"));
        let running = record(&run);
        fixture.ledger.insert_run(&running).unwrap();
        for path in ["a", "b", "c"] {
            fixture.ledger.append(ruled(&run, path)).unwrap();
        }
        fixture.ledger.end_run(&ended(running), vec![draft(&run, "last", Decision::Refused)]).unwrap();
        sealed.push(run);
    }
    for path in ["x", "y"] {
        fixture.ledger.append(fixture.read(path)).unwrap();
    }
    let key = PublicKey::of_host(&fixture.state).unwrap().expect("made at the first use");
    Hosted { fixture, sealed, key }
}

fn ended(record: RunRecord) -> RunRecord {
    RunRecord { state: RunState::Ended, ended_at: Some("2026-11-30T22:09:00.000000Z".into()), ..record }
}

fn ruled(run: &RunId, path: &str) -> Draft {
    Draft { rule: Some(format!("test.toml:4 allow fs/read on \"{path}\"")), ..draft(run, path, Decision::Allowed) }
}

impl Hosted {
    /// A copy of the database alone, as somebody would carry it away.
    fn copy(&self) -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let copy = folder.path().join("copied.sqlite");
        let whole = rusqlite::Connection::open(self.fixture.state.join("ledger.db")).unwrap();
        whole.execute("VACUUM INTO ?1", [copy.to_str().unwrap()]).unwrap();
        (folder, copy)
    }

    fn trust(&self) -> Trust {
        Trust { keys: vec![self.key], signatures: Signatures::Required, expect: Vec::new() }
    }
}

/// Everything that is found wrong, as `tollgate verify --all` finds it.
fn faults(ledger: &Ledger, trust: &Trust) -> Vec<Broken> {
    let mut found = Vec::new();
    let mut report = |broken| {
        found.push(broken);
        ControlFlow::Continue(())
    };
    ledger.verify_host(trust, &mut report).unwrap();
    ledger.verify_blobs(&mut report).unwrap();
    let all = ledger.runs(RunQuery { all: Which::All, limit: None, since: None }).unwrap();
    for record in all.iter().rev() {
        match ledger.verify_run_with(&record.id, trust) {
            Ok(_) | Err(Broken::Head { .. }) => {}
            Err(broken) => found.push(broken),
        }
    }
    found
}

fn meddle(database: &Path, sql: &str) {
    rusqlite::Connection::open(database).unwrap().execute_batch(sql).unwrap();
}

#[test]
fn an_untouched_copy_verifies_with_the_public_key_alone_and_nothing_is_made_beside_it() {
    let host = hosted();
    let (folder, copy) = host.copy();
    let ledger = Ledger::open_copy(&copy).unwrap();
    assert!(faults(&ledger, &host.trust()).is_empty(), "{:?}", faults(&ledger, &host.trust()));
    let heads = ledger.verify_host(&host.trust(), &mut |_| ControlFlow::Continue(())).unwrap();
    assert_eq!((heads.heads, heads.signed), (3, 3));
    let live = ledger.verify_run_with(&host.fixture.run, &host.trust()).unwrap();
    assert_eq!((live.count, live.sealed), (2, None), "a live run is unsealed, and no fault");
    let names: Vec<_> = fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names, ["copied.sqlite"]);
}

#[test]
fn each_way_of_meddling_with_a_copy_is_found_and_located() {
    /// The family, the run and the place of the first fault.
    type Told<'a> = (&'a str, Option<&'a str>, Option<u64>);
    let second = Some("run000000001");
    let at = |n: u64| format!("id = (3 << 32 | {n})");
    let table: Vec<(&str, String, Told)> = vec![
        ("edit", format!("UPDATE receipts SET reason = 'fine' WHERE {}", at(2)), ("receipts", second, Some(2))),
        ("edit the rule", format!("UPDATE receipts SET rule = 'fine' WHERE {}", at(2)), ("receipts", second, Some(2))),
        ("take the rule", format!("UPDATE receipts SET rule = NULL WHERE {}", at(2)), ("receipts", second, Some(2))),
        ("give a rule", format!("UPDATE receipts SET rule = 'x' WHERE {}", at(4)), ("receipts", second, Some(4))),
        ("delete one", format!("DELETE FROM receipts WHERE {}", at(2)), ("receipts", second, Some(2))),
        (
            "reorder",
            format!(
                "UPDATE receipts SET id = 7 WHERE {a}; UPDATE receipts SET {a} WHERE {b}; UPDATE receipts SET {b} WHERE id = 7",
                a = at(2),
                b = at(3)
            ),
            ("receipts", second, Some(2)),
        ),
        (
            "cut the tail and tell the run's row",
            "DELETE FROM receipts WHERE id > (3 << 32 | 2) AND id < (4 << 32); \
             UPDATE chains SET count = 2, refused = 0, head = (SELECT hash FROM receipts WHERE id = (3 << 32 | 2)) \
             WHERE run = 3"
                .to_owned(),
            ("receipts", second, Some(4)),
        ),
        ("edit a count", "UPDATE chains SET refused = 0 WHERE run = 3".to_owned(), ("counts", second, None)),
        (
            "edit the record",
            "UPDATE runs SET record = json_set(record, '$.policy', 'strict') WHERE n = 3".to_owned(),
            ("runs", second, None),
        ),
        ("revive a run", "UPDATE runs SET state = 'running' WHERE n = 3".to_owned(), ("runs", second, None)),
        ("move its start", "UPDATE runs SET started_us = 1 WHERE n = 3".to_owned(), ("runs", second, None)),
        (
            "delete a run whole",
            "DELETE FROM receipts WHERE id > (3 << 32) AND id < (4 << 32); DELETE FROM chains WHERE run = 3; \
             DELETE FROM runs WHERE n = 3"
                .to_owned(),
            ("runs", second, Some(2)),
        ),
        ("delete a head", "DELETE FROM heads WHERE n = 2".to_owned(), ("heads", None, Some(2))),
        ("edit a head", "UPDATE heads SET count = 3 WHERE n = 2".to_owned(), ("heads", None, Some(2))),
        (
            "unsign a head",
            "UPDATE heads SET signature = NULL, key = NULL WHERE n = 2".to_owned(),
            ("signatures", None, Some(2)),
        ),
        (
            "unsign all",
            "UPDATE heads SET signature = NULL, key = NULL".to_owned(),
            ("signatures", None, Some(3)),
        ),
        (
            "give one head the signature of another",
            "UPDATE heads SET signature = (SELECT signature FROM heads WHERE n = 1) WHERE n = 3".to_owned(),
            ("signatures", None, Some(3)),
        ),
        ("remove the last head", "DELETE FROM heads WHERE n = 3".to_owned(), ("runs", Some("run000000002"), None)),
        (
            "forge a cut",
            "DELETE FROM receipts WHERE id > (3 << 32) AND id <= (3 << 32 | 4); \
             INSERT INTO cuts SELECT 3, 4, 1, 0, head, 0, key, signature FROM heads WHERE n = 2"
                .to_owned(),
            ("cuts", second, None),
        ),
    ];
    let host = hosted();
    for (way, sql, expected) in table {
        let (_folder, copy) = host.copy();
        meddle(&copy, &format!("PRAGMA foreign_keys = off; {sql}"));
        let found = faults(&Ledger::open_copy(&copy).unwrap(), &host.trust());
        let told: Vec<_> =
            found.iter().map(|broken| (broken.part(), broken.run().map(|run| &*run.0), broken.place())).collect();
        assert!(told.contains(&expected), "{way}: {told:?} {found:?}");
        for broken in &found {
            assert!(
                broken.run().is_none_or(|run| Some(&*run.0) == expected.1 || expected.1.is_none()),
                "{way}: {broken}"
            );
        }
    }
}

#[test]
fn whole_last_runs_that_were_cut_off_a_copy_show_against_a_checkpoint() {
    let host = hosted();
    let checkpoint = Checkpoint::of(&host.fixture.ledger.newest_head().unwrap().unwrap());
    assert!(checkpoint.is_signed());
    let (_folder, copy) = host.copy();
    let expecting = |expected: Expected| Trust { expect: vec![expected], ..host.trust() };
    let at = expecting(Expected::At(checkpoint.clone()));
    let hash = expecting(Expected::Hash(checkpoint.hash));
    for trust in [&at, &hash] {
        assert!(faults(&Ledger::open_copy(&copy).unwrap(), trust).is_empty());
    }
    meddle(
        &copy,
        "PRAGMA foreign_keys = off; DELETE FROM receipts WHERE id > (4 << 32); DELETE FROM chains WHERE run = 4; \
         DELETE FROM runs WHERE n = 4; DELETE FROM heads WHERE n = 3",
    );
    let ledger = Ledger::open_copy(&copy).unwrap();
    assert!(faults(&ledger, &host.trust()).is_empty(), "without a checkpoint nothing knows of the third run");
    assert!(matches!(faults(&ledger, &at)[..], [Broken::CutOff { n: 3, found: 2, .. }]));
    assert!(matches!(faults(&ledger, &hash)[..], [Broken::NoSuchHead(_)]));
    let forged = Checkpoint { n: 2, ..checkpoint };
    assert!(matches!(faults(&ledger, &expecting(Expected::At(forged)))[..], [Broken::OtherHead { n: 2, .. }]));
}

#[test]
fn the_mark_beside_the_database_shows_a_cut_end_and_stays_as_evidence() {
    let host = hosted();
    let own = Trust::of_host(&host.fixture.state).unwrap();
    assert!(faults(&host.fixture.ledger, &own).is_empty());
    assert!(host.fixture.ledger.glance(&own).unwrap().is_none());
    host.fixture.meddle(
        "DELETE FROM receipts WHERE id > (4 << 32); DELETE FROM chains WHERE run = 4; \
         DELETE FROM runs WHERE n = 4; DELETE FROM heads WHERE n = 3",
    );
    let cut_off = |found: &[Broken]| matches!(found, [Broken::CutOff { n: 3, found: 2, .. }]);
    assert!(cut_off(&faults(&host.fixture.ledger, &own)));
    assert!(matches!(host.fixture.ledger.glance(&own).unwrap(), Some(Broken::CutOff { .. })));
    // What is sealed later does not cover it up.
    for (n, run) in ["later0000000", "later0000001"].into_iter().enumerate() {
        let later = RunId(run.into());
        host.fixture.ledger.insert_run(&record(&later)).unwrap();
        assert_eq!(host.fixture.ledger.seal_run(&later).unwrap().n, 3 + n as u64);
        assert!(matches!(faults(&host.fixture.ledger, &own)[..], [Broken::OtherHead { n: 3, .. }]));
    }
    let mark = host.fixture.state.join("heads.mark");
    fs::write(&mark, "garbage").unwrap();
    assert!(matches!(faults(&host.fixture.ledger, &own)[..], [Broken::BadMark { .. }]));
}

#[test]
fn after_a_restart_the_mark_insists_on_what_was_on_the_disk_only() {
    let host = hosted();
    let own = Trust::of_host(&host.fixture.state).unwrap();
    // The first two heads are on the disk for certain, the third is not.
    let path = host.fixture.state.join("heads.mark");
    let mut mark: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    let second = {
        let reader = rusqlite::Connection::open(host.fixture.state.join("ledger.db")).unwrap();
        let sql = format!("SELECT {} FROM heads WHERE n = 2", Head::COLUMNS);
        Checkpoint::of(&reader.query_row(&sql, [], Head::read).unwrap())
    };
    mark["durable"] = serde_json::to_value(second).unwrap();
    mark["boot"] = "another".into();
    fs::write(&path, mark.to_string()).unwrap();
    let lose = |n: u64| host.fixture.meddle(&format!("DELETE FROM heads WHERE n > {n}"));
    host.fixture
        .meddle("UPDATE runs SET state = 'running', record = json_set(record, '$.state', 'running') WHERE n > 1");
    lose(2);
    let mut found = Vec::new();
    let told = host.fixture.ledger.verify_host(&own, &mut |broken| {
        found.push(broken);
        ControlFlow::Continue(())
    });
    assert!(found.is_empty(), "a loss of power is no fault: {found:?}");
    assert_eq!(told.unwrap().notes.len(), 1, "and is said");
    lose(1);
    assert!(matches!(host.fixture.ledger.glance(&own).unwrap(), Some(Broken::CutOff { n: 2, .. })));
}

#[test]
fn the_mark_knows_which_heads_were_on_the_disk() {
    let host = hosted();
    let mark = mark::read(&host.fixture.state.join("ledger.db")).unwrap().unwrap();
    assert_eq!((mark.latest.n, mark.durable), (3, None));
    host.fixture.ledger.append_durable(host.fixture.read("z")).unwrap();
    host.fixture.ledger.seal_run(&host.fixture.run).unwrap();
    let mark = mark::read(&host.fixture.state.join("ledger.db")).unwrap().unwrap();
    assert_eq!((mark.latest.n, mark.durable.map(|head| head.n)), (4, Some(3)));
}

#[test]
fn the_database_of_another_host_is_found() {
    let (host, other) = (hosted(), hosted());
    let (_kept, copy) = other.copy();
    let found = faults(&Ledger::open_copy(&copy).unwrap(), &host.trust());
    assert!(matches!(found[0], Broken::Head { n: 1, fault: Fault::OtherKey }), "{found:?}");
    // Swapped into the state directory: the key is not its own.
    let own = Trust::of_host(&host.fixture.state).unwrap();
    let state = host.fixture.state.clone();
    let Hosted { fixture: Fixture { ledger, _folder, .. }, .. } = host;
    drop(ledger);
    for name in ["ledger.db-wal", "ledger.db-shm"] {
        fs::remove_file(state.join(name)).unwrap();
    }
    fs::copy(&copy, state.join("ledger.db")).unwrap();
    let swapped = Ledger::open_copy(&state.join("ledger.db")).unwrap();
    assert!(matches!(swapped.glance(&own).unwrap(), Some(Broken::Head { n: 3, fault: Fault::OtherKey })));
}

#[test]
fn contents_that_were_swapped_are_found_with_the_receipt_that_names_them() {
    let fixture = Fixture::new();
    let digests = [fixture.ledger.put_blob(b"one").unwrap(), fixture.ledger.put_blob(b"two").unwrap()];
    for digest in digests {
        fixture.ledger.append(Draft { result_digest: Some(digest), ..fixture.read("a") }).unwrap();
    }
    assert!(fixture.ledger.verify_run(&fixture.run).is_ok());
    fs::write(fixture.ledger.blob_path(&digests[1]), "one").unwrap();
    let broken = fixture.ledger.verify_run(&fixture.run).unwrap_err();
    assert_eq!((broken.part(), broken.to_string().contains("receipt 0123456789ab.2")), ("blobs", true), "{broken}");
    let all = faults(&fixture.ledger, &Trust::default());
    assert!(all.iter().any(|broken| matches!(broken, Broken::Blob { digest, .. } if *digest == digests[1])));
}

#[test]
fn a_run_whose_record_changes_later_is_sealed_again() {
    let host = hosted();
    let run = host.fixture.ledger.run(&host.sealed[0].0).unwrap();
    let changed = RunRecord { changes: ChangesState::Discarded, ..run };
    host.fixture.ledger.update_run(&changed).unwrap();
    host.fixture.ledger.update_run(&changed).unwrap();
    let newest = host.fixture.ledger.newest_head().unwrap().unwrap();
    assert_eq!((newest.n, &newest.run), (4, &host.sealed[0]), "once for one change");
    assert!(faults(&host.fixture.ledger, &Trust::of_host(&host.fixture.state).unwrap()).is_empty());
}

/// A ledger as the first form of this program wrote it.
fn old_ledger(state: &Path) -> RunId {
    fs::create_dir(state).unwrap();
    fs::set_permissions(state, fs::Permissions::from_mode(0o700)).unwrap();
    let database = rusqlite::Connection::open(state.join("ledger.db")).unwrap();
    database.pragma_update_and_check(None, "journal_mode", "WAL", |_| Ok(())).unwrap();
    database.execute_batch(include_str!("../migrations/0001.sql")).unwrap();
    database.pragma_update(None, "user_version", 1).unwrap();
    let run = RunId("0123456789ab".into());
    let mut old = serde_json::to_value(ended(record(&run))).unwrap();
    old.as_object_mut().unwrap().remove("chain");
    database
        .execute("INSERT INTO runs VALUES (1, ?1, 'ended', 1796076511000000, ?2)", [&run.0, &old.to_string()])
        .unwrap();
    let mut prev = Digest([0; 32]);
    // The hashes of the first form are held by `the_hash_of_one_receipt_of_each_kind_is_this`.
    for (index, effect) in effect::tests::one_of_each().iter().enumerate() {
        let draft =
            Draft::of(&run, effect, &Answer::done(serde_json::Value::Null, 5), Timestamp(1_796_076_511_000_042))
                .timed(Timing { queued_us: 1, decided_us: 2, executed_us: 3 });
        let receipt = draft.at(index as u64 + 1, prev);
        prev = receipt.hash;
        assert_eq!(format!("{} {}", receipt.kind, receipt.hash), GOLDEN_HASHES[index]);
        let words = |value: serde_json::Value| value.as_str().unwrap().to_owned();
        let (kind, text) = {
            let resource = serde_json::to_value(&receipt.resource).unwrap();
            let fields = resource.as_object().unwrap();
            let text = fields.iter().find(|(name, _)| *name != "type").unwrap().1.clone();
            (words(fields["type"].clone()), words(text))
        };
        let classes = receipt.classes.iter().fold(0_i64, |mask, class| mask | 1 << (*class as i64));
        database
            .execute(
                "INSERT INTO receipts VALUES (?1, NULL, ?2, ?3, ?4, ?5, ?6, ?7, NULL, ?8, 'allowed', 'world', '', '', \
                 ?9, 0, 1796076511000042, 1, 2, 3, 5, 1, ?10, NULL, ?11, ?12)",
                rusqlite::params![
                    1_i64 << 32 | receipt.seq as i64,
                    receipt.kind.name(),
                    classes,
                    kind,
                    text,
                    receipt.subject.uid,
                    receipt.subject.run.as_ref().map(|run| &run.0),
                    words(serde_json::to_value(receipt.door).unwrap()),
                    words(serde_json::to_value(receipt.idempotency).unwrap()),
                    receipt.request_digest.0,
                    receipt.prev.0,
                    receipt.hash.0
                ],
            )
            .unwrap();
    }
    let (count, once) = (
        effect::VOCABULARY.len() as i64,
        effect::VOCABULARY.iter().filter(|row| row.idempotency == effect::Idempotency::Once).count() as i64,
    );
    database
        .execute(
            "INSERT INTO chains VALUES (1, ?1, 0, ?2, 1796076511000042, ?3)",
            rusqlite::params![count, once, prev.0],
        )
        .unwrap();
    // The first form's head, written out: `tollgate.head.v1`, a zero byte, canonical JSON.
    let head = serde_json::json!({
        "count": count, "head": prev, "n": 1, "prev": Digest([0; 32]), "run": run.0,
        "sealed_at": "2026-11-30T22:08:31.000000Z",
    });
    let hash = Digest::of(&[b"tollgate.head.v1\0".to_vec(), effect::canonical_json(&head)].concat());
    database
        .execute(
            "INSERT INTO heads VALUES (1, ?1, ?2, ?3, 1796076511000000, ?4, ?5)",
            rusqlite::params![run.0, count, prev.0, [0_u8; 32], hash.0],
        )
        .unwrap();
    run
}

#[test]
fn a_ledger_of_the_first_form_still_verifies_and_is_signed_from_its_next_seal_on() {
    let folder = tempfile::tempdir().unwrap();
    let state = folder.path().join("state");
    let run = old_ledger(&state);
    assert!(matches!(Ledger::open_read_only(&state), Err(Error::Older { found: 1, .. })));
    let ledger = Ledger::open(&state).unwrap();
    ledger.writable().unwrap();
    let own = Trust::of_host(&state).unwrap();
    assert!(faults(&ledger, &own).is_empty(), "{:?}", faults(&ledger, &own));
    assert_eq!(ledger.verify_run(&run).unwrap().count, effect::VOCABULARY.len() as u64);
    assert_eq!(ledger.run("latest").unwrap().chain, Vec::<String>::new());
    let required = Trust { signatures: Signatures::Required, ..own.clone() };
    assert!(matches!(faults(&ledger, &required)[..], [Broken::Head { fault: Fault::Unsigned, .. }]));
    ledger.append(ruled(&run, "new")).unwrap();
    let sealed = ledger.seal_run(&run).unwrap();
    assert!(sealed.is_signed() && sealed.record.is_some());
    assert!(faults(&ledger, &required).is_empty());
}

#[test]
fn a_rule_is_part_of_the_hash_of_the_second_form() {
    let run = RunId("0123456789ab".into());
    let receipt = ruled(&run, "a").at(1, Digest([0; 32]));
    assert_eq!(receipt.hash.to_string(), RULED_HASH);
    assert_ne!(Draft { rule: None, ..ruled(&run, "a") }.at(1, Digest([0; 32])).hash, receipt.hash);
}

/// Whoever changes this breaks every ledger that exists.
const RULED_HASH: &str = "6e537cd234d8b246828b34485c148a8d74dc6a9bf0e5710b86bc198df8749d21";

#[test]
fn without_a_key_that_can_be_used_nothing_new_begins() {
    let fixture = Fixture::new();
    fixture.ledger.writable().unwrap();
    fs::write(fixture.state.join("host.key"), "garbage").unwrap();
    let error = Ledger::open(&fixture.state).unwrap().writable().unwrap_err();
    assert!(matches!(error, Error::KeyUnreadable { .. }), "{error}");
    assert!(Ledger::open_read_only(&fixture.state).is_ok(), "what only reads goes on");
}

#[test]
fn receipts_keep_their_order_when_the_clock_jumps_back() {
    let fixture = Fixture::new();
    for us in [3_000_000, 2_000_000, 1, 2_500_000] {
        fixture.ledger.append(Draft { started: Timestamp(us), ..fixture.read(&us.to_string()) }).unwrap();
    }
    let all = fixture.all(ReceiptQuery::default());
    assert_eq!(all.iter().map(|receipt| receipt.seq).collect::<Vec<_>>(), [1, 2, 3, 4]);
    assert!(fixture.ledger.verify_run(&fixture.run).is_ok());
    let since = ReceiptQuery { since: Some(Timestamp(2_500_000)), ..ReceiptQuery::default() };
    assert_eq!(fixture.all(since).iter().map(|receipt| receipt.seq).collect::<Vec<_>>(), [1, 4]);
}

#[test]
fn an_exported_run_verifies_by_itself_and_shows_what_is_done_to_it() {
    let host = hosted();
    let export = |run: &RunId| {
        let mut out = Vec::new();
        host.fixture.ledger.export(run, &mut out).unwrap();
        String::from_utf8(out).unwrap()
    };
    let text = export(&host.sealed[1]);
    let check = |text: &str, trust: &Trust| export::verify(text.as_bytes(), trust);
    let found = check(&text, &host.trust()).unwrap();
    assert_eq!((found.count, &found.run), (4, &host.sealed[1]));
    assert!(matches!(found.sealed, export::Sealed::By(head) if head.key == Some(host.key)));
    let live = check(&export(&host.fixture.run), &host.trust()).unwrap();
    assert_eq!((live.count, live.sealed), (2, export::Sealed::NotYet));
    let other = Trust { keys: vec![hosted().key], ..host.trust() };
    assert_eq!(check(&text, &other).unwrap_err().line, 6);

    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.len(), 6);
    let rejoin = |lines: &[&str]| lines.iter().map(|line| format!("{line}\n")).collect::<String>();
    let replaced = |at: usize, from: &str, to: &str| {
        assert!(lines[at].contains(from), "{from} in {}", lines[at]);
        let line = lines[at].replacen(from, to, 1);
        let mut all = lines.clone();
        all[at] = &line;
        rejoin(&all)
    };
    let without = |at: usize| rejoin(&[&lines[..at], &lines[at + 1..]].concat());
    let table: Vec<(&str, String, u64)> = vec![
        ("edit a receipt", replaced(2, "because", "becouse"), 3),
        ("edit its hash", replaced(2, "\"hash\":\"", "\"hash\":\"00"), 3),
        ("add a field", replaced(2, "{", "{\"more\":1,"), 3),
        ("remove a receipt", without(2), 3),
        ("remove the last receipt", without(4), 5),
        ("swap two", rejoin(&[lines[0], lines[2], lines[1], lines[3], lines[4], lines[5]]), 2),
        ("edit the record", replaced(0, "\"policy\":\"base\"", "\"policy\":\"none\""), 6),
        ("edit the counts", replaced(0, "\"refused\":1", "\"refused\":0"), 1),
        ("edit the key", replaced(0, "\"key\":\"", "\"key\":\"0"), 1),
        ("edit the seal", replaced(5, "\"count\":4", "\"count\":5"), 6),
        ("cut the seal", rejoin(&lines[..5]), 6),
        ("cut a line", text[..text.len() - 1].to_owned(), 6),
        ("add a line", rejoin(&[&lines[..], &lines[5..]].concat()), 7),
        ("another form", replaced(0, "export.v1", "export.v9"), 1),
        ("nothing", String::new(), 1),
        ("no JSON", "{\n".to_owned(), 1),
        (
            "call it unsealed after taking the end",
            {
                let head: Receipt = serde_json::from_str(&lines[3].replace(",\"type\":\"receipt\"", "")).unwrap();
                let end = format!("{{\"type\":\"unsealed\",\"receipts\":3,\"head\":\"{}\"}}", head.hash);
                rejoin(&[lines[0], lines[1], lines[2], lines[3], &end])
            },
            5,
        ),
    ];
    for (way, text, line) in table {
        let broken = check(&text, &host.trust()).expect_err(way);
        assert_eq!(broken.line, line, "{way}: {broken}");
    }
}

#[test]
fn a_run_that_is_over_is_sealed_in_the_same_step_however_it_is_told() {
    let fixture = Fixture::new();
    drop(fixture.ledger.intend(&fixture.run, &effect::tests::sample(Kind::RunStart), Timestamp(0)).unwrap());
    fixture.ledger.update_run(&ended(record(&fixture.run))).unwrap();
    let sealed = fixture.ledger.verify_run(&fixture.run).unwrap().sealed.expect("sealed");
    assert_eq!((sealed.n, sealed.count), (1, 1), "what was in doubt has its receipt under the seal");
}

/// A run's record, a head, a cut or a number that no ledger writes is a fault or an error, never a panic.
#[test]
fn nothing_that_a_database_can_hold_makes_a_reader_panic() {
    let host = hosted();
    let run = "(SELECT n FROM runs WHERE id = 'run000000001')";
    host.fixture.ledger.cut_some(&host.sealed[2]).unwrap();
    for sql in [
        format!("UPDATE runs SET record = '[]' WHERE n = {run}"),
        format!("UPDATE runs SET record = 'x' WHERE n = {run}"),
        format!("UPDATE chains SET count = -1 WHERE run = {run}"),
        format!("UPDATE chains SET count = 9223372036854775807 WHERE run = {run}"),
        "UPDATE heads SET n = 9223372036854775807 WHERE n = 3".to_owned(),
        "UPDATE heads SET n = -5 WHERE n = 3".to_owned(),
        "UPDATE heads SET count = -1".to_owned(),
        "UPDATE heads SET sealed_us = -9223372036854775808".to_owned(),
        "UPDATE cuts SET count = -1".to_owned(),
        "UPDATE cuts SET refused = 9223372036854775807, once = -1".to_owned(),
        "UPDATE receipts SET times = -1, bytes = -1".to_owned(),
        "UPDATE receipts SET started_us = 9223372036854775807".to_owned(),
    ] {
        let (_folder, copy) = host.copy();
        meddle(&copy, &format!("PRAGMA foreign_keys = off; {sql}"));
        let ledger = Ledger::open_copy(&copy).unwrap();
        let told = faults_or_error(&ledger, &host.trust());
        assert!(told, "{sql}");
        for run in host.sealed.iter().chain([&host.fixture.run]) {
            let mut out = Vec::new();
            if ledger.export(run, &mut out).is_ok() {
                let _ = export::verify(&out[..], &host.trust());
            }
        }
    }
}

/// Whether something is found wrong.
fn faults_or_error(ledger: &Ledger, trust: &Trust) -> bool {
    let mut found = false;
    let told = ledger.verify_host(trust, &mut |_| {
        found = true;
        ControlFlow::Continue(())
    });
    let runs = ["run000000000", "run000000001", "run000000002", "0123456789ab"];
    found | told.is_err() | runs.iter().any(|run| ledger.verify_run_with(&RunId((*run).into()), trust).is_err())
}

proptest! {
    #[test]
    fn no_bytes_make_the_reader_of_exports_panic(
        place in any::<prop::sample::Index>(),
        bytes in prop::collection::vec(any::<u8>(), 0..24),
        number in prop::option::of(any::<i64>()),
    ) {
        static EXPORT: std::sync::OnceLock<Vec<u8>> = std::sync::OnceLock::new();
        let export = EXPORT.get_or_init(|| {
            let host = hosted();
            host.fixture.ledger.cut_some(&host.sealed[0]).unwrap();
            let mut out = Vec::new();
            host.fixture.ledger.export(&host.sealed[0], &mut out).unwrap();
            host.fixture.ledger.export(&host.sealed[1], &mut out).unwrap();
            out
        });
        let (mut changed, at) = (export.clone(), place.index(export.len()));
        changed.splice(at..(at + bytes.len()).min(export.len()), bytes);
        let _ = export::verify(&changed[..], &Trust::default());
        // A number in place of the one at or after this point.
        if let Some(number) = number {
            let mut text = String::from_utf8(export.clone()).unwrap();
            let from = text[at..].find(|c: char| c.is_ascii_digit()).map_or(at, |more| at + more);
            let length = text[from..].bytes().take_while(u8::is_ascii_digit).count();
            text.replace_range(from..from + length, &number.to_string());
            let _ = export::verify(text.as_bytes(), &Trust::default());
        }
        let _ = serde_json::from_slice::<Checkpoint>(&changed);
    }
}

#[test]
fn a_mark_that_a_crash_left_behind_the_ledger_is_no_fault() {
    let host = hosted();
    let path = host.fixture.state.join("heads.mark");
    let behind = fs::read(&path).unwrap();
    host.fixture.ledger.seal_run(&host.fixture.run).unwrap();
    // Its process died between the commit and the mark; or before it could write the first one.
    let own = Trust::of_host(&host.fixture.state).unwrap();
    for left in [behind, Vec::new(), vec![0; 4096]] {
        fs::write(&path, &left).unwrap();
        assert!(faults(&host.fixture.ledger, &own).is_empty());
    }
    fs::remove_file(&path).unwrap();
    let told = host.fixture.ledger.verify_host(&own, &mut |_| ControlFlow::Continue(())).unwrap();
    assert_eq!(told.notes.len(), 1, "that there is none is said");
    host.fixture.ledger.append(host.fixture.read("more")).unwrap();
    host.fixture.ledger.seal_run(&host.fixture.run).unwrap();
    assert_eq!(mark::read(&host.fixture.state.join("ledger.db")).unwrap().unwrap().latest.n, 5);
    assert!(faults(&host.fixture.ledger, &own).is_empty());
}

#[test]
fn several_that_seal_at_once_and_one_that_verifies_agree_about_the_mark() {
    let fixture = Fixture::new();
    fixture.ledger.writable().unwrap();
    let own = Trust::of_host(&fixture.state).unwrap();
    std::thread::scope(|scope| {
        let sealing: Vec<_> = (0..4)
            .map(|thread| {
                let state = fixture.state.clone();
                scope.spawn(move || {
                    // Another handle has its own connections, as another process does.
                    let ledger = Ledger::open(&state).unwrap();
                    for number in 0..8 {
                        let run = RunId(format!("t{thread}r{number:09}"));
                        ledger.insert_run(&record(&run)).unwrap();
                        ledger.append_durable(draft(&run, "a", Decision::Allowed)).unwrap();
                        ledger.end_run(&ended(record(&run)), Vec::new()).unwrap();
                    }
                })
            })
            .collect();
        while sealing.iter().any(|one| !one.is_finished()) {
            let reader = Ledger::open_read_only(&fixture.state).unwrap();
            let found = faults(&reader, &own);
            assert!(found.is_empty(), "{found:?}");
            let glanced = reader.glance(&own).unwrap();
            assert!(glanced.is_none(), "{glanced:?}");
        }
    });
    let mark = mark::read(&fixture.state.join("ledger.db")).unwrap().unwrap();
    assert_eq!(mark.latest.n, 32);
    // Whoever sealed last waited for the disk in its eighth run, after its seventh was sealed.
    assert!(mark.durable.is_some_and(|head| head.n >= 7), "each run waited for the disk once");
    assert!(faults(&fixture.ledger, &own).is_empty());
}

/// RC1: what a read leaves behind does not depend on what it read.
#[test]
fn ten_thousand_reads_take_a_bounded_number_of_bytes_each() {
    let fixture = Fixture::new();
    let before = fixture.ledger.footprint().unwrap().used_bytes;
    let drafts = (0..10_000).map(|number| ruled(&fixture.run, &format!("src/module/file{number}.rs")));
    fixture.ledger.append_many(drafts.collect()).unwrap();
    let after = fixture.ledger.footprint().unwrap();
    assert_eq!(after.receipts, 10_000);
    let each = (after.used_bytes - before) / 10_000;
    assert!(each < 600, "{each} bytes a read");
    assert_eq!(fixture.ledger.blobs().unwrap(), []);
}
