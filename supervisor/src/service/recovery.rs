//! Runs whose supervisor died: their workspace made whole, their record closed, their leftovers removed.
//!
//! A supervisor that is killed leaves its run's record as it was, and perhaps half a batch in the workspace. Whoever
//! looks next finishes the work: the command line at each of its starts, a service at its own. What is looked at are
//! the runs that are not over, so the cost is theirs, and nothing when there are none. Nothing is ever applied here
//! that was not committed, and no pending change is thrown away.

use super::block::block_on_io;
use crate::{
    chain::Decision,
    doors::{
        control::{self, ClientError},
        workspace,
    },
    effect::{Door, Effect, Kind, Resource, RunId, Subject},
    jail::cgroup::{self, CgroupEnvironment},
    ledger::{
        self,
        quota::BatchFate,
        record::{ChangesState, Outcome, OutcomeType, RunRecord, RunState},
        Draft, Ledger, ReceiptQuery, RunQuery, Which,
    },
    room::{
        batch::{self, ApplyError},
        place::{OpenPlace, Place, PlaceError},
        tree,
    },
};
use rustix::fs::{FlockOperation, OFlags};
use std::{
    collections::HashMap,
    ffi::OsStr,
    fmt, fs, io,
    os::fd::{AsFd, OwnedFd},
    path::Path,
    time::Duration,
};

/// A run that was found without its supervisor, and closed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recovered {
    /// The run.
    pub run: RunId,
    /// What was found of its batch.
    pub what: What,
    /// Where its changes stand now.
    pub changes: ChangesState,
}

/// What was found of an interrupted run's batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum What {
    /// No batch was under way.
    NoBatch,
    /// The batch was not committed: the workspace is as before it.
    RolledBack,
    /// The batch was committed: the workspace is as after it.
    RolledForward,
    /// The batch could be neither finished nor undone; its journal and before-images are kept, and `tollgate apply`
    /// tries again.
    Stuck {
        /// What is in the way.
        reason: String,
    },
}

impl fmt::Display for What {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            What::NoBatch => f.write_str("no change was being applied"),
            What::RolledBack => f.write_str("the batch under way was rolled back, the workspace is as before it"),
            What::RolledForward => f.write_str("the batch under way was finished, its changes are in the workspace"),
            What::Stuck { reason } => write!(f, "its batch can be neither finished nor undone: {reason}"),
        }
    }
}

/// One sentence for a note on standard error.
impl fmt::Display for Recovered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "run {} was interrupted: {}", self.run, self.what)?;
        match self.changes {
            ChangesState::Pending | ChangesState::Partial => {
                write!(f, "; changes are pending (`tollgate diff {0}`, then `tollgate apply {0}`)", self.run)
            }
            ChangesState::None
            | ChangesState::Applied
            | ChangesState::Discarded
            | ChangesState::Undone
            | ChangesState::PartlyUndone
            | ChangesState::Resumed => Ok(()),
        }
    }
}

/// Closes every run whose supervisor is gone, and says what was found.
///
/// What cannot be recovered now, because another process is at it or the ledger cannot be written, is left for the
/// next time and said in the log.
pub fn recover(ledger: &Ledger) -> Vec<Recovered> {
    let live = match ledger.runs(RunQuery { all: Which::Live, limit: None, since: None }) {
        Ok(live) => live,
        Err(error) => {
            tracing::warn!(%error, "cannot look for interrupted runs");
            return Vec::new();
        }
    };
    let mut found = Vec::new();
    for record in live {
        match recover_run(ledger, &record) {
            Ok(recovered) => found.extend(recovered),
            Err(error) => tracing::warn!(run = %record.id, %error, "cannot close an interrupted run"),
        }
    }
    found
}

/// Closes this run if its supervisor is gone; none if it is not, or if another process is recovering it.
///
/// # Errors
/// The ledger's. The run then stays as it is; what was done to its workspace is not undone, and doing it again changes
/// nothing.
pub fn recover_run(ledger: &Ledger, record: &RunRecord) -> ledger::Result<Option<Recovered>> {
    if record.state == RunState::Ended || supervised(record, &ledger.run_dir(&record.id)) {
        return Ok(None);
    }
    let ledger = match ledger.writable() {
        Err(ledger::Error::NotWritable { .. }) => Ledger::open(ledger.state())?,
        Ok(()) | Err(_) => ledger.clone(),
    };
    let run_dir = ledger.run_dir(&record.id);
    let folder = tree::open_root(&run_dir).ok();
    // Held until the folder closes at the end.
    if folder.as_ref().is_some_and(|folder| {
        rustix::fs::flock(folder, FlockOperation::NonBlockingLockExclusive) == Err(rustix::io::Errno::AGAIN)
    }) {
        return Ok(None);
    }
    // It may have ended properly, or been closed by another, between our reading and our looking.
    let record = ledger.run(&record.id.0)?;
    if record.state == RunState::Ended {
        return Ok(None);
    }
    // First, so that what the program asked for comes before what became of it.
    ledger.take_over_spool(&record.id)?;
    let Some((what, changes)) = settle_workspace(&ledger, &record, &run_dir)? else { return Ok(None) };
    if let Some(folder) = &folder {
        let keep =
            matches!(what, What::Stuck { .. }) || matches!(changes, ChangesState::Pending | ChangesState::Partial);
        if let Err(error) = remove_leftovers(folder, if keep { Layer::Kept } else { Layer::Removed }) {
            tracing::warn!(run = %record.id, %error, "cannot remove what an interrupted run left");
        }
    }
    let id = record.id.clone();
    let fate = if matches!(what, What::Stuck { .. }) { BatchFate::Unknown } else { BatchFate::Told };
    ledger.close_reservations(&id, fate)?;
    let closed = interrupted(record, ledger.clock().now().to_string(), &what);
    // In one: a run that is over and has no seal is what a ledger with a cut end looks like.
    ledger.end_run(&RunRecord { changes, ..closed }, Vec::new())?;
    cgroup::sweep(&CgroupEnvironment::detect(), |run| *run == id);
    Ok(Some(Recovered { run: id, what, changes }))
}

/// The start time of a process, in clock ticks after boot (field 22 of /proc/PID/stat, proc_pid_stat(5)); none where
/// there is no such process or it is a zombie.
pub fn process_started(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The command's name stands in parentheses and may hold anything, parentheses too.
    let mut fields = stat[stat.rfind(')')? + 1..].split_ascii_whitespace();
    if matches!(fields.next()?, "Z" | "X") {
        return None;
    }
    fields.nth(18)?.parse().ok()
}

/// Whether the run's supervisor is there. In doubt it is: a socket that cannot be asked for another reason than that
/// nobody listens says nothing.
///
/// The socket is asked only where the process id says nothing, for a supervisor in another pid namespace.
pub fn supervised(record: &RunRecord, run_dir: &Path) -> bool {
    if process_started(record.supervisor_pid) == Some(record.supervisor_started) {
        return true;
    }
    let Ok(answer) = block_on_io(control::ask(run_dir, "/v1/run", None)) else { return true };
    match answer {
        Err(ClientError::Unreachable(cause)) => {
            !matches!(cause.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused)
        }
        Ok(_) | Err(_) => true,
    }
}

/// The record of a run whose supervisor is gone. What it says of how the program ended stays, where it says so: then
/// only the applying was interrupted.
pub fn interrupted(record: RunRecord, now: String, what: &What) -> RunRecord {
    let outcome = Outcome {
        kind: OutcomeType::Interrupted,
        code: None,
        signal: None,
        limit: None,
        used: None,
        detail: Some(format!("its supervisor, process {}, is gone; {what}", record.supervisor_pid)),
    };
    RunRecord {
        state: RunState::Ended,
        outcome: Some(record.outcome.unwrap_or(outcome)),
        ended_at: Some(record.ended_at.unwrap_or(now)),
        ..record
    }
}

/// Finishes or undoes the batch and says where the changes stand; none when another batch holds the workspace.
fn settle_workspace(
    ledger: &Ledger,
    record: &RunRecord,
    run_dir: &Path,
) -> ledger::Result<Option<(What, ChangesState)>> {
    let stuck = |error: &PlaceError| {
        // Whatever there is, is kept.
        Ok(Some((What::Stuck { reason: error.to_string() }, ChangesState::Pending)))
    };
    if !Place::is_in(run_dir) {
        // Its workspace could not be written, or it never came so far.
        return Ok(Some((What::NoBatch, record.changes)));
    }
    let place = match Place::open(run_dir) {
        Ok(place) => place,
        Err(error) => return stuck(&error),
    };
    let what = match place.recover_within(Duration::ZERO) {
        Ok(batch::Recovered::Nothing) => What::NoBatch,
        Ok(batch::Recovered::RolledBack) => What::RolledBack,
        Ok(batch::Recovered::RolledForward) => What::RolledForward,
        Err(PlaceError::Batch(ApplyError::Busy)) => return Ok(None),
        Err(error) => return stuck(&error),
    };
    complete_receipts(ledger, record, &place)?;
    match place.standing() {
        Ok(changes) => Ok(Some((what, changes))),
        Err(error) => stuck(&error),
    }
}

/// Writes the receipts of changes that are in the workspace and have none: their supervisor died between the two.
fn complete_receipts(ledger: &Ledger, record: &RunRecord, place: &OpenPlace) -> ledger::Result<()> {
    let manifests = match batch::manifests(&place.run_dir) {
        Ok(manifests) => manifests,
        Err(error) => {
            tracing::warn!(run = %record.id, %error, "cannot see which changes lack their receipts");
            return Ok(());
        }
    };
    if manifests.is_empty() {
        return Ok(());
    }
    let query =
        ReceiptQuery { run: Some(record.id.clone()), decision: Some(Decision::Allowed), ..ReceiptQuery::default() };
    // The last that says so, because a path may be applied, taken back and applied again.
    let mut told: HashMap<(Kind, Resource), u64> = HashMap::new();
    for receipt in ledger.receipts(&query)? {
        let receipt = receipt?;
        if matches!(receipt.door, Door::Workspace | Door::Control) {
            told.insert((receipt.kind, receipt.resource), receipt.seq);
        }
    }
    let now = ledger.clock().now();
    let mut drafts = Vec::new();
    for (_, manifest) in &manifests {
        for change in &manifest.changes {
            let effect = workspace::effect_of(change, &record.subject, record.room.as_ref(), place.place.since_ns);
            let said = told.insert((effect.kind, effect.resource.clone()), u64::MAX).unwrap_or(0);
            if said <= manifest.after_seq {
                // A reversal is the operator's, who is the one user that this state directory has.
                let effect = match manifest.after_seq {
                    0 => effect,
                    _ => Effect {
                        door: Door::Control,
                        subject: Subject { run: None, ..effect.subject.clone() },
                        ..effect
                    },
                };
                let draft = Draft::of(&record.id, &effect, &workspace::done(change), now);
                drafts.push(Draft { reason: LATE.to_owned(), ..draft });
            }
        }
    }
    if !drafts.is_empty() {
        ledger.append_many(drafts)?;
    }
    Ok(())
}

/// What a receipt says that could be written only after a crash.
const LATE: &str = "applied by a batch that its supervisor did not live to record; written down at recovery";

/// Whether a run's layer goes with the rest.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Layer {
    Kept,
    Removed,
}

/// Removes what a run that is over needs no more. Logs and before-images stay.
pub(super) fn remove_leftovers(folder: &OwnedFd, layer: Layer) -> io::Result<()> {
    let mut names = vec![control::SOCKET, "door", "contents"];
    match layer {
        Layer::Removed => names.push("layer"),
        Layer::Kept => match tree::open_directory(folder.as_fd(), Path::new("layer"), OFlags::RDONLY) {
            Ok(layer) => tree::remove(layer.as_fd(), OsStr::new("work"))?,
            Err(error) if tree::absent(&error) => {}
            Err(error) => return Err(error),
        },
    }
    names.iter().try_for_each(|name| tree::remove(folder.as_fd(), OsStr::new(name)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        doors::control::tests::record,
        room::{
            batch::Stop,
            changes::scan,
            place::View,
            testing::{tree_state, Fixture, Inodes},
        },
    };

    /// A ledger whose one run has the fixture's directory as its own, and a supervisor that never was.
    fn dead(fixture: &Fixture, state: RunState) -> (tempfile::TempDir, Ledger, RunId) {
        let root = tempfile::tempdir().unwrap();
        let ledger = Ledger::open(&root.path().join("state")).unwrap();
        let mut run = record(&fixture.run.0, 0);
        run.state = state;
        run.supervisor_pid = u32::MAX;
        ledger.insert_run(&run).unwrap();
        let own = ledger.run_dir(&run.id);
        fs::create_dir_all(own.parent().unwrap()).unwrap();
        std::os::unix::fs::symlink(fixture.run_path(), &own).unwrap();
        Place::create(&fixture.run_dir, &run.id, &fixture.workspace_path(), fixture.since_ns, None, View::Overlay)
            .unwrap();
        (root, ledger, run.id)
    }

    fn changed() -> Fixture {
        let fixture = Fixture::new();
        fs::write(fixture.workspace_path().join("edited"), "old").unwrap();
        let fixture = fixture.started();
        fs::write(fixture.upper_path().join("edited"), "new").unwrap();
        fs::write(fixture.upper_path().join("made"), "made").unwrap();
        for name in ["door", "contents", "layer/work"] {
            fs::create_dir_all(fixture.run_path().join(name)).unwrap();
        }
        fixture
    }

    #[test]
    fn a_batch_that_died_at_any_point_is_finished_or_undone_and_each_change_has_its_receipt() {
        let mut seen = std::collections::HashSet::new();
        for at in 0.. {
            let fixture = changed();
            let before = tree_state(&fixture.workspace_path(), Inodes::Compared);
            let (_root, ledger, id) = dead(&fixture, RunState::Applying);
            let mut batch = fixture.batch();
            batch.stop = Some((at, Stop::Die));
            let changes = scan(&fixture.upper, &fixture.workspace).unwrap().changes;
            let over = batch::apply(&batch, &changes, &[]).is_ok();
            let recovered = recover(&ledger);
            assert_eq!(recovered.len(), 1, "point {at}");
            let closed = ledger.run(&id.0).unwrap();
            assert_eq!(closed.outcome.unwrap().kind, OutcomeType::Interrupted);
            assert_eq!(closed.changes, recovered[0].changes);
            ledger.verify_run(&id).unwrap();
            let receipts =
                ledger.receipts(&ReceiptQuery { run: Some(id.clone()), ..Default::default() }).unwrap().count();
            match recovered[0].changes {
                ChangesState::Pending => {
                    assert_eq!(tree_state(&fixture.workspace_path(), Inodes::Compared), before, "point {at}");
                    assert_eq!(receipts, 0);
                    assert!(fixture.upper_path().join("made").exists());
                }
                ChangesState::Applied => {
                    assert_eq!(fs::read(fixture.workspace_path().join("edited")).unwrap(), b"new");
                    assert_eq!(fs::read(fixture.workspace_path().join("made")).unwrap(), b"made");
                    assert_eq!(receipts, 2);
                    assert!(!fixture.run_path().join("layer").exists());
                }
                other => panic!("point {at}: {other:?}"),
            }
            assert!(!fixture.run_path().join("door").exists() && !fixture.run_path().join("layer/work").exists());
            seen.insert(recovered[0].what.to_string());
            assert_eq!(recover(&ledger), []);
            if over {
                break;
            }
        }
        assert_eq!(seen.len(), 3, "{seen:?}");
    }

    #[test]
    fn a_run_that_changed_nothing_leaves_nothing() {
        let fixture = Fixture::new().started();
        fs::create_dir_all(fixture.run_path().join("door")).unwrap();
        let (_root, ledger, id) = dead(&fixture, RunState::Running);
        let expected = Recovered { run: id.clone(), what: What::NoBatch, changes: ChangesState::None };
        assert_eq!(recover(&ledger), [expected]);
        assert!(!fixture.run_path().join("layer").exists() && !fixture.run_path().join("door").exists());
        assert_eq!(ledger.verify_heads().unwrap(), 1);
    }

    #[test]
    fn a_workspace_that_moved_away_keeps_everything_and_says_so() {
        let fixture = changed();
        let (_root, ledger, _) = dead(&fixture, RunState::Applying);
        fs::rename(fixture.workspace_path(), fixture.workspace_path().with_extension("away")).unwrap();
        let recovered = recover(&ledger);
        assert!(
            matches!(&recovered[0].what, What::Stuck { reason } if reason.contains("move it back")),
            "{recovered:?}"
        );
        assert_eq!(recovered[0].changes, ChangesState::Pending);
        assert!(fixture.upper_path().join("made").exists());
    }

    #[test]
    fn a_run_with_its_supervisor_is_left_alone() {
        let fixture = changed();
        let (_root, ledger, id) = dead(&fixture, RunState::Running);
        let mut run = ledger.run(&id.0).unwrap();
        run.supervisor_pid = std::process::id();
        run.supervisor_started = process_started(run.supervisor_pid).unwrap();
        ledger.update_run(&run).unwrap();
        assert_eq!(recover(&ledger), []);
        assert_eq!(ledger.run(&id.0).unwrap().state, RunState::Running);
    }

    #[test]
    fn how_the_program_ended_stays_when_only_an_apply_was_interrupted() {
        let fixture = changed();
        let (_root, ledger, id) = dead(&fixture, RunState::Applying);
        let mut run = ledger.run(&id.0).unwrap();
        let outcome =
            Outcome { kind: OutcomeType::Exited, code: Some(3), signal: None, limit: None, used: None, detail: None };
        run.outcome = Some(outcome.clone());
        ledger.update_run(&run).unwrap();
        assert_eq!(recover(&ledger).len(), 1);
        assert_eq!(ledger.run(&id.0).unwrap().outcome, Some(outcome));
    }

    #[test]
    fn a_ledger_opened_for_reading_is_written_all_the_same() {
        let fixture = changed();
        let (_root, ledger, id) = dead(&fixture, RunState::Running);
        let reader = Ledger::open_read_only(ledger.state()).unwrap();
        assert_eq!(recover(&reader).len(), 1);
        assert_eq!(ledger.run(&id.0).unwrap().state, RunState::Ended);
    }
}
