//! What `diff`, `apply` and `discard` share: the run, its place, and the record of what became of its changes.

use super::{apply, diff, discard, output::Failure, standing};
use crate::{
    chain::{
        admission::Admission,
        quota::Meters,
        stack::{Element, Stack, Wiring},
    },
    effect::Subject,
    jail::outcome,
    ledger::{
        record::{ChangesState, RunRecord, RunState},
        Ledger,
    },
    room::place::{OpenPlace, Place},
};
use std::{io::Write, path::Path, process::ExitCode};

/// `tollgate diff`.
pub fn diff(args: &diff::Diff, state: &Path, out: &mut dyn Write) -> Result<ExitCode, Failure> {
    let (_, _, place) = open(state, &args.run)?;
    diff::diff(args, &place, out).map_err(|error| failure(&error))?;
    Ok(ExitCode::SUCCESS)
}

/// `tollgate apply`: an operator's own word, so everything is admitted; receipts are written all the same.
pub fn apply(
    args: &apply::Apply,
    state: &Path,
    out: &mut dyn Write,
    talk: &mut dyn Write,
) -> Result<ExitCode, Failure> {
    let (ledger, record, place) = open(state, &args.run)?;
    over(&record)?;
    let subject = Subject { uid: nix::unistd::geteuid().as_raw(), run: None, agent: None };
    let wiring = Wiring { ledger: &ledger, run: &record.id, meters: &Meters::default() };
    let chain = Stack(vec![Element::Admission(Admission::everything())]).build(&wiring);
    let chain = chain.map_err(|error| failure(&error))?;
    let args = apply::Apply { run: record.id.0.clone(), ..args.clone() };
    let applied = standing::block_on(apply::apply(&args, &place, &chain, subject, None, out, talk))?;
    let report = applied.map_err(|error| failure(&error))?;
    close(&ledger, record, report.state)?;
    match report.failure.is_some() || !report.held.is_empty() {
        true => Ok(ExitCode::from(outcome::ExitCode::NotDone.number())),
        false => Ok(ExitCode::SUCCESS),
    }
}

/// `tollgate discard`.
pub fn discard(args: &discard::Discard, state: &Path, talk: &mut dyn Write) -> Result<ExitCode, Failure> {
    let (ledger, record, place) = open(state, &args.run)?;
    over(&record)?;
    discard::discard(args, &place, talk).map_err(|error| failure(&error))?;
    close(&ledger, record, ChangesState::Discarded)?;
    Ok(ExitCode::SUCCESS)
}

fn open(state: &Path, run: &str) -> Result<(Ledger, RunRecord, OpenPlace), Failure> {
    let (_, record) = standing::find(state, run)?;
    let ledger = Ledger::open(state).map_err(|error| failure(&error))?;
    let place = Place::open(&ledger.run_dir(&record.id)).map_err(|error| failure(&error))?;
    Ok((ledger, record, place))
}

fn over(record: &RunRecord) -> Result<(), Failure> {
    match record.state {
        RunState::Ended => Ok(()),
        RunState::Starting | RunState::Running | RunState::Applying => Err(Failure::new(
            format!("run {} is not over", record.id),
            format!("wait for it, or end it with `tollgate kill {}`", record.id),
        )),
    }
}

fn close(ledger: &Ledger, record: RunRecord, changes: ChangesState) -> Result<(), Failure> {
    let id = record.id.clone();
    // A batch with nothing in it leaves the changes where they were.
    let changes = if changes == ChangesState::None { record.changes } else { changes };
    ledger.update_run(&RunRecord { changes, ..record }).map_err(|error| failure(&error))?;
    ledger.seal_run(&id).map_err(|error| failure(&error))?;
    Ok(())
}

fn failure(error: &(dyn std::error::Error + 'static)) -> Failure {
    let failure = Failure::new(error.to_string(), "");
    match error.source() {
        Some(cause) => failure.because(cause),
        None => failure,
    }
}
