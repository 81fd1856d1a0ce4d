//! Where a run stands, also when its supervisor can no longer say so.
//!
//! A supervisor that is killed leaves its run's record as it was. Whoever looks next finds that out and lets
//! [`crate::service::recovery`] close the run.

use super::output::Failure;
use crate::{
    doors::control,
    effect::RunId,
    ledger::{
        record::{OutcomeType, RunRecord, RunState},
        Ledger,
    },
    service::{
        block::block_on_io,
        recovery::{self, What},
    },
};
use std::{future::Future, path::Path};

pub use recovery::process_started;

/// Runs something asynchronous to its end.
///
/// # Errors
/// When the machine gives no event loop.
pub fn block_on<T>(work: impl Future<Output = T>) -> Result<T, Failure> {
    block_on_io(work).map_err(|cause| Failure::new("cannot set up an event loop", "").because(&cause))
}

/// The run as it really stands: a live one without a supervisor is recovered, and the ledger is told.
///
/// # Errors
/// Only those of reading the ledger. Where it cannot be written (another user's), the run is shown as interrupted
/// all the same.
pub fn settle(ledger: &Ledger, record: RunRecord) -> Result<RunRecord, Failure> {
    if record.state == RunState::Ended || recovery::supervised(&record, &ledger.run_dir(&record.id)) {
        return Ok(record);
    }
    if let Err(cause) = recovery::recover_run(ledger, &record) {
        tracing::warn!(run = %record.id, %cause, "cannot write down that the run is interrupted");
    }
    let record = ledger.run(&record.id.0)?;
    if record.state == RunState::Ended {
        return Ok(record);
    }
    Ok(recovery::interrupted(record, ledger.clock().now().to_string(), &What::NoBatch))
}

/// Opens the ledger for reading; none where there is none yet.
///
/// # Errors
/// As [`Ledger::open_read_only`], but for [`crate::ledger::Error::Absent`].
pub fn ledger(state: &Path) -> Result<Option<Ledger>, Failure> {
    match Ledger::open_read_only(state) {
        Ok(ledger) => {
            super::verify::warn(&ledger, None);
            Ok(Some(ledger))
        }
        Err(crate::ledger::Error::Absent { .. }) => Ok(None),
        Err(cause) => Err(cause.into()),
    }
}

/// The run that the user means, and the ledger that holds it.
///
/// # Errors
/// When there is none, or more than one.
pub fn find(state: &Path, run: &str) -> Result<(Ledger, RunRecord), Failure> {
    let ledger = ledger(state)?.ok_or_else(|| no_run(run))?;
    let record = ledger.run(run)?;
    let record = settle(&ledger, record)?;
    Ok((ledger, record))
}

/// The record of a run that goes on, with what it has used until now; its supervisor is asked. Where that gives no
/// answer, as that of another user's run, the record is as the ledger has it.
pub fn with_live_usage(ledger: &Ledger, record: RunRecord) -> RunRecord {
    if record.state == RunState::Ended {
        return record;
    }
    let answer = block_on(control::ask(&ledger.run_dir(&record.id), "/v1/run", None));
    let Ok(Ok(answer)) = answer else { return record };
    match serde_json::from_slice::<RunRecord>(&answer) {
        Ok(live) => RunRecord { usage: live.usage, ..record },
        Err(cause) => {
            tracing::warn!(run = %record.id, %cause, "the run's supervisor gave no record");
            record
        }
    }
}

fn no_run(run: &str) -> Failure {
    Failure::new(format!("there is no run `{run}`"), "`tollgate ps --all` lists the runs")
}

/// How a run stands, in a word or two.
pub fn word(record: &RunRecord) -> String {
    let with = |text: &str, number: Option<i32>| match number {
        Some(number) => format!("{text} {number}"),
        None => text.to_owned(),
    };
    match (record.state, &record.outcome) {
        (RunState::Starting, _) => "starting".to_owned(),
        (RunState::Running, _) => "running".to_owned(),
        (RunState::Applying, _) => "applying".to_owned(),
        (RunState::Ended, None) => "ended".to_owned(),
        (RunState::Ended, Some(outcome)) => match outcome.kind {
            OutcomeType::Exited => with("exited", outcome.code),
            OutcomeType::Signaled => with("signaled", outcome.signal),
            OutcomeType::Killed => with("killed", outcome.signal),
            OutcomeType::WallExceeded => "wall-exceeded".to_owned(),
            OutcomeType::CpuExceeded => "cpu-exceeded".to_owned(),
            OutcomeType::MemoryExceeded => "memory-exceeded".to_owned(),
            OutcomeType::PidsExceeded => "pids-exceeded".to_owned(),
            OutcomeType::WriteExceeded => "write-exceeded".to_owned(),
            OutcomeType::OutputExceeded => "output-exceeded".to_owned(),
            OutcomeType::CouldNotStart => "could-not-start".to_owned(),
            OutcomeType::CouldNotApply => "could-not-apply".to_owned(),
            OutcomeType::Interrupted => "interrupted".to_owned(),
        },
    }
}

/// Waits until the run is over, looking every few milliseconds, for this long at most.
///
/// # Errors
/// Those of reading the ledger.
pub fn wait(ledger: &Ledger, run: &RunId, limit: std::time::Duration) -> Result<RunRecord, Failure> {
    let until = std::time::Instant::now() + limit;
    loop {
        let record = ledger.run(&run.0)?;
        let record = settle(ledger, record)?;
        if record.state == RunState::Ended || std::time::Instant::now() >= until {
            return Ok(record);
        }
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
}
