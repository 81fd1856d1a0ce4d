//! What `diff`, `apply` and `discard` share: the run, its place, and the record of what became of its changes.

use super::{apply, diff, discard, output::Failure, standing, undo};
use crate::{
    chain::{
        admission::Admission,
        quota::{Amounts, Meters},
        stack::{Element, Stack, Wiring},
    },
    effect::{RunId, Subject},
    jail::outcome,
    ledger::{
        quota::BatchFate,
        record::{ChangesState, RunMode, RunRecord, RunState},
        Ledger,
    },
    policy::{search::PolicyRef, Policy},
    room::{
        batch,
        place::{OpenPlace, Place, PlaceError},
        tree,
    },
    service::{
        meanwhile::{self, Deferred, Notice, PATIENCE},
        plan::{Plan, Whole},
        run::take_signals,
    },
};
use rustix::fs::FlockOperation;
use std::{io::Write, path::Path, process::ExitCode, sync::Arc};

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
    // Before any thread exists: the ledger's writer is one.
    let deferred = defer_signals()?;
    let (ledger, record, place) = open(state, &args.run)?;
    over(&record)?;
    let subject = Subject { uid: nix::unistd::geteuid().as_raw(), run: None, agent: None };
    let owner = record.subject.uid;
    let wiring = Wiring { ledger: &ledger, run: &record.id, owner, meters: &Meters::default() };
    let search = super::search_path();
    let policy = PolicyRef::parse(&record.policy).and_then(|reference| Policy::load(&reference, &search));
    let policy = policy.map_err(|error| {
        let Failure { message, lines, .. } = Failure::from(&error);
        let what = format!("the policy `{}` of run {} cannot be used any more", record.policy, record.id);
        let lines = [message].into_iter().chain(lines).collect();
        Failure { lines, ..Failure::new(what, format!("mend it, or `tollgate discard {}`", record.id)) }
    })?;
    let mut elements = vec![Element::Admission(policy.admission.approved())];
    // What the run shares with others is charged for what is applied late, too.
    let quotas = ledger.run_quotas(&record.id)?;
    elements.extend(quotas.into_iter().map(|id| Element::SharedQuota { id, limits: Amounts::new() }));
    let chain = Stack(elements).build(&wiring);
    let chain = chain.map_err(|error| failure(&error))?;
    if record.mode == RunMode::Preflight {
        check_plan(&ledger, &record, &place)?;
    }
    let args = apply::Apply { run: record.id.0.clone(), ..args.clone() };
    let report = while_applying(&ledger, &record.id, || {
        let work = apply::apply(&args, &place, &chain, subject, None, out, talk);
        let what = format!("the changes of run {} are being applied", record.id);
        let applied = meanwhile::patiently(PATIENCE, NOTICE, &what, || standing::block_on(work))?;
        let report = applied.map_err(|error| failure(&error))?;
        let state = match report.state {
            // Some of what was applied before may be undone.
            ChangesState::Applied | ChangesState::Partial => place.standing().map_err(|error| failure(&error))?,
            state => state,
        };
        Ok((state, report))
    })?;
    if let Some(signal) = deferred.first() {
        return Ok(ExitCode::from(128 + signal as u8));
    }
    match report.failure.is_some() || !report.held.is_empty() {
        true => Ok(ExitCode::from(outcome::ExitCode::NotDone.number())),
        false => Ok(ExitCode::SUCCESS),
    }
}

/// `tollgate undo`: an operator's own deed on their own files, which no policy of a run binds; receipts are written all
/// the same.
pub fn undo(args: &undo::Undo, state: &Path, out: &mut dyn Write, talk: &mut dyn Write) -> Result<ExitCode, Failure> {
    let deferred = defer_signals()?;
    let (ledger, record, place) = open(state, &args.run)?;
    over(&record)?;
    let subject = Subject { uid: nix::unistd::geteuid().as_raw(), run: None, agent: None };
    let owner = record.subject.uid;
    let wiring = Wiring { ledger: &ledger, run: &record.id, owner, meters: &Meters::default() };
    let chain = Stack(vec![Element::Admission(Admission::everything())]).build(&wiring);
    let chain = chain.map_err(|error| failure(&error))?;
    let args = undo::Undo { run: record.id.0.clone(), ..args.clone() };
    let after_seq = record.effects.count;
    let work = || {
        let undoing = undo::undo(&args, &place, &chain, subject, None, after_seq, out, talk);
        let what = format!("the changes of run {} are being taken back", record.id);
        let undone = meanwhile::patiently(PATIENCE, NOTICE, &what, || standing::block_on(undoing))?;
        undone.map_err(|error| failure(&error))
    };
    let report = match args.dry_run {
        true => work()?,
        false => while_applying(&ledger, &record.id, || {
            let report = work()?;
            Ok((place.standing().map_err(|error| failure(&error))?, report))
        })?,
    };
    if let Some(signal) = deferred.first() {
        return Ok(ExitCode::from(128 + signal as u8));
    }
    if report.failure.is_some() {
        return Ok(ExitCode::from(outcome::ExitCode::NotDone.number()));
    }
    Ok(if report.conflicts.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// What a preflighted run may apply is what it planned, to the byte.
fn check_plan(ledger: &Ledger, record: &RunRecord, place: &OpenPlace) -> Result<(), Failure> {
    let refused = |error: &(dyn std::error::Error + 'static)| Failure {
        status: outcome::ExitCode::NotDone.number(),
        ..failure(error)
    };
    let plan = Plan::of(ledger, &record.id).map_err(|error| refused(&error))?;
    let set = place.changes().map_err(|error| refused(&error))?;
    let untouched = batch::pending(&place.run_dir).map_err(|error| refused(&error))?.is_none();
    let whole = if untouched { Whole::All } else { Whole::Rest };
    plan.check(&set.changes, &record.subject, place.place.since_ns, whole).map_err(|error| refused(&error))
}

/// `tollgate discard`.
pub fn discard(
    args: &discard::Discard,
    state: &Path,
    out: &mut dyn Write,
    talk: &mut dyn Write,
) -> Result<ExitCode, Failure> {
    let (_, record) = standing::find(state, &args.run)?;
    over(&record)?;
    let ledger = Ledger::open(state).map_err(|error| failure(&error))?;
    let run_dir = ledger.run_dir(&record.id);
    let args = discard::Discard { run: record.id.0.clone(), ..args.clone() };
    let (standing, said) = while_applying(&ledger, &record.id, || {
        let (standing, said) = match Place::open(&run_dir) {
            Ok(place) => {
                let said = discard::discard(&args, &place).map_err(|error| failure(&error))?;
                (place.standing().map_err(|error| failure(&error))?, said)
            }
            // The workspace is gone; what the run would have changed in it can go too.
            Err(PlaceError::Elsewhere { .. } | PlaceError::Ours { .. })
                if args.paths.is_empty() && !args.before_images =>
            {
                let folder = tree::open_root(&run_dir).map_err(|error| failure(&error))?;
                batch::discard(&folder).map_err(|error| failure(&error))?;
                (ChangesState::Discarded, discard::everything(&args))
            }
            Err(error) => return Err(failure(&error)),
        };
        Ok((standing, (standing, said)))
    })?;
    discard::say(&args, standing, &said, out, talk).map_err(|error| failure(&error))?;
    Ok(ExitCode::SUCCESS)
}

const NOTICE: Notice = |text| eprintln!("tollgate: {text}");

/// From here on a signal waits for the end of what is being applied.
fn defer_signals() -> Result<Arc<Deferred>, Failure> {
    let deferred = take_signals().and_then(|()| meanwhile::defer_signals(NOTICE));
    deferred.map_err(|cause| Failure::new("cannot take signals", "").because(&cause))
}

/// Deals with the changes of a run that is over, as its supervisor for that time: killed in the middle, the next
/// command finds a run that is applying and has no supervisor, and [`crate::service::recovery`] settles it.
///
/// The work says where the changes stand after it. When it fails, the run's folder says so.
///
/// # Errors
/// The work's own; when another process deals with the same changes; the ledger's.
fn while_applying<T>(
    ledger: &Ledger,
    run: &RunId,
    work: impl FnOnce() -> Result<(ChangesState, T), Failure>,
) -> Result<T, Failure> {
    let run_dir = ledger.run_dir(run);
    let folder = tree::open_root(&run_dir).map_err(|error| failure(&error))?;
    // The lock that recovery takes. It ends with this process, at the latest.
    if rustix::fs::flock(&folder, FlockOperation::NonBlockingLockExclusive) == Err(rustix::io::Errno::AGAIN) {
        return Err(busy(run));
    }
    let record = ledger.run(&run.0).map_err(|error| failure(&error))?;
    over(&record)?;
    let own = std::process::id();
    let applying = RunRecord {
        state: RunState::Applying,
        supervisor_pid: own,
        supervisor_started: standing::process_started(own).unwrap_or_default(),
        ..record.clone()
    };
    ledger.update_run(&applying).map_err(|error| failure(&error))?;
    let done = work();
    let changes = match &done {
        // A batch with nothing in it leaves the changes where they were.
        Ok((ChangesState::None, _)) => record.changes,
        Ok((changes, _)) => *changes,
        Err(_) => Place::open(&run_dir).and_then(|place| place.standing()).unwrap_or(record.changes),
    };
    // What an apply that failed or died has left reserved may have happened.
    let closed = ledger
        .close_reservations(run, BatchFate::Unknown)
        .and_then(|()| ledger.end_run(&RunRecord { changes, ..record }, Vec::new()));
    let (_, done) = done?;
    closed.map_err(|error| failure(&error))?;
    Ok(done)
}

fn open(state: &Path, run: &str) -> Result<(Ledger, RunRecord, OpenPlace), Failure> {
    let (_, record) = standing::find(state, run)?;
    let ledger = Ledger::open(state).map_err(|error| failure(&error))?;
    let place = Place::open(&ledger.run_dir(&record.id)).map_err(|error| failure(&error))?;
    Ok((ledger, record, place))
}

fn over(record: &RunRecord) -> Result<(), Failure> {
    match (record.state, &record.outcome) {
        (RunState::Ended, _) => Ok(()),
        (RunState::Applying, Some(_)) => Err(busy(&record.id)),
        (RunState::Starting | RunState::Running | RunState::Applying, _) => Err(Failure::new(
            format!("run {} is not over", record.id),
            format!("wait for it, or end it with `tollgate kill {}`", record.id),
        )),
    }
}

fn busy(run: &RunId) -> Failure {
    Failure::new(
        format!("another command is applying or discarding the changes of run {run}"),
        format!("wait for it; `tollgate inspect {run}` says where the changes stand"),
    )
}

fn failure(error: &(dyn std::error::Error + 'static)) -> Failure {
    let failure = Failure::new(error.to_string(), "");
    match error.source() {
        Some(cause) => failure.because(cause),
        None => failure,
    }
}
