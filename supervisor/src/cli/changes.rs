//! What `diff`, `apply` and `discard` share: the run, its place, and the record of what became of its changes.

use super::{apply, diff, discard, output::Failure, standing};
use crate::{
    chain::{
        quota::Meters,
        stack::{Element, Stack, Wiring},
    },
    effect::Subject,
    jail::outcome,
    ledger::{
        record::{ChangesState, RunRecord, RunState},
        Ledger,
    },
    policy::{search::PolicyRef, Policy},
    room::{
        batch,
        place::{OpenPlace, Place, PlaceError},
        tree,
    },
};
use std::{io::Write, path::Path, process::ExitCode};

/// `tollgate diff`.
pub fn diff(args: &diff::Diff, state: &Path, out: &mut dyn Write) -> Result<ExitCode, Failure> {
    let (_, _, place) = open(state, &args.run)?;
    diff::diff(args, &place, out).map_err(|error| failure(&error))?;
    Ok(ExitCode::SUCCESS)
}

/// `tollgate apply`: an operator's own word, which gives what the run's policy asks about. What the policy denies stays
/// denied, and receipts are written all the same.
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
    let search = super::search_path();
    let policy = PolicyRef::parse(&record.policy).and_then(|reference| Policy::load(&reference, &search));
    let policy = policy.map_err(|error| {
        Failure::new(
            format!("the policy `{}` of run {} cannot be used any more: {error}", record.policy, record.id),
            format!("mend it, or `tollgate discard {}`", record.id),
        )
    })?;
    let chain = Stack(vec![Element::Admission(policy.admission.approved())]).build(&wiring);
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
    let (_, record) = standing::find(state, &args.run)?;
    over(&record)?;
    let ledger = Ledger::open(state).map_err(|error| failure(&error))?;
    let run_dir = ledger.run_dir(&record.id);
    match Place::open(&run_dir) {
        Ok(place) => discard::discard(args, &place, talk).map_err(|error| failure(&error))?,
        // The workspace is gone; what the run would have changed in it can go too.
        Err(PlaceError::Elsewhere { .. } | PlaceError::Ours { .. }) => {
            let folder = tree::open_root(&run_dir).map_err(|error| failure(&error))?;
            batch::discard(&folder).map_err(|error| failure(&error))?;
        }
        Err(error) => return Err(failure(&error)),
    }
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
