//! How many receipts a second the ledger takes: `cargo run --release --example receipts -- FOLDER`.
//!
//! Prints one JSON object a line. The folder gets a ledger, and its disk decides the second number.

mod common;

use common::{allowed, draft, record};
use std::{path::Path, process::ExitCode, thread, time::Instant};
use tollgate::ledger::{Ledger, Result};

/// Receipts of one measurement.
const COUNT: u64 = 100_000;
/// Receipts that a door hands over together, as at the end of a run with many changes.
const TOGETHER: u64 = 500;
/// Effects that wait at once for their receipt.
const WAITING: u64 = 64;
/// Receipts of the second measurement: each of them waits for the disk.
const WAITED: u64 = 12_800;

fn main() -> ExitCode {
    let Some(folder) = std::env::args_os().nth(1) else {
        eprintln!("error: no folder\nhint: receipts FOLDER");
        return ExitCode::from(2);
    };
    match measure(Path::new(&folder)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn measure(folder: &Path) -> Result<()> {
    let ledger = Ledger::open(folder)?;
    let run = ledger.new_run_id();
    ledger.insert_run(&record(&run))?;

    let began = Instant::now();
    for first in (0..COUNT).step_by(TOGETHER as usize) {
        ledger
            .append_many((first..first + TOGETHER).map(|number| draft(&ledger, &run, number, &allowed())).collect())?;
    }
    // The last one waits until all of them are on the disk.
    ledger.append_durable(draft(&ledger, &run, COUNT, &allowed()))?;
    report("receipts of a batch, on the disk at its end", COUNT + 1, began, "≥ 50,000");

    let began = Instant::now();
    thread::scope(|scope| {
        let writers: Vec<_> = (0..WAITING)
            .map(|writer| {
                let (ledger, run) = (&ledger, &run);
                scope.spawn(move || -> Result<()> {
                    for number in 0..WAITED / WAITING {
                        ledger.append_durable(draft(ledger, run, writer << 32 | number, &allowed()))?;
                    }
                    Ok(())
                })
            })
            .collect();
        writers.into_iter().try_for_each(|writer| writer.join().expect("a writer that fails returns an error"))
    })?;
    report("receipts of 64 at once, each waiting until it is on the disk", WAITED, began, "");

    let verified = ledger.verify_run(&run).expect("what was just written is whole");
    assert_eq!(verified.count, COUNT + 1 + WAITED, "every receipt is there");
    Ok(())
}

fn report(work: &str, count: u64, began: Instant, target: &str) {
    let per_second = count as f64 / began.elapsed().as_secs_f64();
    println!("{}", serde_json::json!({ "work": work, "per_second": per_second, "count": count, "target": target }));
}
