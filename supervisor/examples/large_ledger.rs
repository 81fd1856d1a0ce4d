//! How fast one run's receipts are found in a large ledger: `cargo run --release --example large_ledger -- FOLDER`.
//!
//! Makes a ledger of ten million receipts in the folder (about five gigabytes), or of as many as a second argument
//! says, and asks it as `tollgate receipts RUN` does. Prints one JSON object a line. The run that is asked for was
//! written through the ledger and verifies; the others are copies of one run's rows under other numbers.

mod common;

use common::{allowed, draft, record};
use std::{
    error::Error,
    path::Path,
    process::ExitCode,
    time::{Duration, Instant},
};
use tollgate::{
    chain::{Answer, Decision},
    effect::{Class, Kind, RunId},
    ledger::{
        record::{RunRecord, RunState},
        Denied, Ledger, ReceiptQuery, RunQuery, Timestamp, Which,
    },
};

/// Receipts of the ledger, unless told otherwise.
const RECEIPTS: u64 = 10_000_000;
/// Receipts of each run but the one that is asked for.
const EACH: u64 = 10_000;
/// Receipts of that one.
const ASKED: u64 = 1_000;
/// How often each question is asked.
const TIMES: usize = 51;

fn main() -> ExitCode {
    let mut arguments = std::env::args_os().skip(1);
    let Some(folder) = arguments.next() else {
        eprintln!("error: no folder\nhint: large_ledger FOLDER [RECEIPTS]");
        return ExitCode::from(2);
    };
    let receipts = arguments.next().and_then(|text| text.to_str()?.parse().ok()).unwrap_or(RECEIPTS);
    match measure(Path::new(&folder), receipts) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn measure(folder: &Path, receipts: u64) -> Result<(), Box<dyn Error>> {
    let ledger = Ledger::open(folder)?;
    let began = Instant::now();
    let copies = receipts.div_ceil(EACH).max(2);
    let original = filled(&ledger, EACH)?;
    copy(folder, &original, copies / 2)?;
    let asked = filled(&ledger, ASKED)?;
    copy(folder, &original, copies - copies / 2)?;
    let made = began.elapsed().as_secs_f64();
    let bytes = std::fs::metadata(folder.join("ledger.db"))?.len();
    let all = ledger.runs(RunQuery { all: Which::All, limit: None, since: None })?;
    let count: u64 = all.iter().map(|run| run.effects.count).sum();
    println!("{}", serde_json::json!({ "receipts": count, "runs": all.len(), "bytes": bytes, "seconds": made }));
    ledger.verify_run(&asked)?;

    let of_run = || ReceiptQuery { run: Some(asked.clone()), ..ReceiptQuery::default() };
    let sample = ledger.receipts(&of_run())?.next().ok_or("the run has receipts")??;
    let questions = [
        ("all of a run", of_run()),
        ("the newest 100", ReceiptQuery { newest: Some(100), ..of_run() }),
        ("what was refused", ReceiptQuery { denied_only: Denied::Only, ..of_run() }),
        ("what failed", ReceiptQuery { decision: Some(Decision::Failed), ..of_run() }),
        ("one kind", ReceiptQuery { kind: Some(Kind::FsWrite), ..of_run() }),
        ("a family", ReceiptQuery { family: Some("fs".into()), newest: Some(100), ..of_run() }),
        ("a class", ReceiptQuery { class: Some(Class::Egress), ..of_run() }),
        ("below a folder", ReceiptQuery { resource_prefix: Some("src/module3".into()), ..of_run() }),
        ("by a handler", ReceiptQuery { decided_by: Some("admission".into()), ..of_run() }),
        ("of a user", ReceiptQuery { subject_uid: Some(0), ..of_run() }),
        ("since a time", ReceiptQuery { since: Some(Timestamp(i64::MAX)), ..of_run() }),
        ("a digest", ReceiptQuery { digest: Some(sample.request_digest), ..of_run() }),
        (
            "what was refused, of all runs, the newest 100",
            ReceiptQuery { denied_only: Denied::Only, newest: Some(100), ..ReceiptQuery::default() },
        ),
    ];
    for (work, query) in questions {
        let mut found = 0;
        let mut times: Vec<Duration> = Vec::with_capacity(TIMES);
        for _ in 0..TIMES {
            // As a command does: its own handle, its own connection, nothing in its cache.
            let ledger = Ledger::open_read_only(folder)?;
            let began = Instant::now();
            found = ledger.receipts(&query)?.collect::<Result<Vec<_>, _>>()?.len();
            times.push(began.elapsed());
        }
        times.sort_unstable();
        let ms = |time: Duration| time.as_secs_f64() * 1000.0;
        let (median, worst) = (ms(times[TIMES / 2]), ms(times[TIMES - 1]));
        let line = serde_json::json!({
            "work": work, "found": found, "median_ms": median, "worst_ms": worst, "target": "≤ 10 ms",
        });
        println!("{line}");
    }
    Ok(())
}

/// A run with so many receipts, one in twenty of them a refusal, sealed.
fn filled(ledger: &Ledger, count: u64) -> Result<RunId, Box<dyn Error>> {
    let run = ledger.new_run_id();
    let record = record(&run);
    ledger.insert_run(&record)?;
    let refused = Answer::refused("admission", "a rule denies it", "take it out of the rule")
        .by_rule("policies/default.toml (built in):12 deny fs/read on \"**/.env\"");
    let drafts = (0..count).map(|number| match number % 20 {
        0 => draft(ledger, &run, number, &refused),
        _ => draft(ledger, &run, number, &allowed()),
    });
    ledger.append_many(drafts.collect())?;
    ledger.end_run(&RunRecord { state: RunState::Ended, ..record }, Vec::new())?;
    Ok(run)
}

/// Copies a run's rows under new numbers, past the ledger: what is asked is how fast others are found among them.
fn copy(folder: &Path, original: &RunId, times: u64) -> Result<(), Box<dyn Error>> {
    let database = rusqlite::Connection::open(folder.join("ledger.db"))?;
    database.execute_batch("PRAGMA synchronous = OFF; CREATE TEMP TABLE copied AS SELECT * FROM receipts LIMIT 0")?;
    database.execute(
        "INSERT INTO copied SELECT receipts.* FROM receipts JOIN runs ON runs.n = receipts.id >> 32 WHERE runs.id = ?1",
        [&original.0],
    )?;
    for number in 0..times {
        let transaction = database.unchecked_transaction()?;
        let id = format!("{:06}{}", number, &original.0[6..]).chars().rev().collect::<String>();
        database.execute(
            "INSERT INTO runs (id, state, started_us, record) SELECT ?1 || (SELECT max(n) FROM runs), state, started_us, record FROM runs WHERE id = ?2",
            [&id, &original.0],
        )?;
        let n = database.last_insert_rowid();
        database.execute(
            "INSERT INTO chains SELECT ?1, count, refused, once, last_us, head FROM chains \
             WHERE run = (SELECT n FROM runs WHERE id = ?2)",
            rusqlite::params![n, original.0],
        )?;
        database.execute("UPDATE copied SET id = ?1 << 32 | (id & 4294967295)", [n])?;
        database.execute("INSERT INTO receipts SELECT * FROM copied", [])?;
        transaction.commit()?;
    }
    Ok(())
}
