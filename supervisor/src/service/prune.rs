//! Pruning: old runs' receipts, contents and logs go, and what is left still verifies.
//!
//! A run's receipts go some thousands at once, each time with a signed statement of what is gone, so that a crash at
//! any moment leaves a ledger that verifies. Its record and its heads stay. Never pruned is a run that is live, that
//! has something in doubt, or whose changes wait for somebody's word. What `tollgate undo` needs is not counted and
//! does not go with the rest, unless it is asked for by name.

use crate::{
    effect::{Digest, RunId},
    ledger::{
        self,
        record::{ChangesState, RunRecord, RunState},
        Ledger, RunQuery, Timestamp, Which,
    },
    room::tree,
};
use std::{
    collections::HashSet,
    ffi::{OsStr, OsString},
    fs, io,
    os::{fd::AsFd, unix::fs::MetadataExt},
    path::{Path, PathBuf},
};

/// The folder of the before-images. Where there is none, nothing can be undone.
const BEFORE: &str = "before";

/// What to prune.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Runs that ended before this.
    pub ended_before: Option<Timestamp>,
    /// The oldest runs, until what is left takes no more than this.
    pub keep_bytes: Option<u64>,
    /// Whether what undoing needs goes too.
    pub undo: Undo,
}

/// What becomes of the before-images.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Undo {
    /// They stay, and are not counted.
    Kept,
    /// They go with the run.
    Removed,
}

/// What pruning does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Runs to prune, the oldest first.
    pub prune: Vec<Candidate>,
    /// Runs that are old or large enough and stay, and why.
    pub kept: Vec<(RunId, &'static str)>,
    /// What all runs take now.
    pub bytes: u64,
    /// About what is left afterwards.
    pub left_bytes: u64,
}

/// A run to prune.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// The run.
    pub run: RunId,
    /// When it ended.
    pub ended_at: String,
    /// How many receipts go.
    pub receipts: u64,
    /// About how much space they, their contents and the run's folder take.
    pub bytes: u64,
}

/// Why pruning stopped.
#[derive(Debug, thiserror::Error)]
pub enum PruneError {
    /// The ledger's part.
    #[error(transparent)]
    Ledger(#[from] ledger::Error),
    /// A file that could not be removed or looked at.
    #[error("cannot {doing} {path}", path = .path.display())]
    Io {
        /// The operation, as a verb.
        doing: &'static str,
        /// The object.
        path: PathBuf,
        /// The system's reason.
        #[source]
        source: io::Error,
    },
}

/// What came of it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Done {
    /// How many runs were pruned.
    pub runs: u64,
    /// How many receipts went.
    pub receipts: u64,
    /// How many contents went.
    pub blobs: u64,
    /// What was left undone, in words.
    pub notes: Vec<String>,
}

/// Says what pruning would do. Changes nothing.
///
/// # Errors
/// The ledger's, and those of looking at the runs' folders.
pub fn plan(ledger: &Ledger, request: &Request) -> Result<Plan, PruneError> {
    let mut records = ledger.runs(RunQuery { all: Which::All, limit: None, since: None })?;
    // By their end, the newest first: a content belongs to the newest run that names it, since it goes last.
    let ended = |record: &RunRecord| record.ended_at.as_deref().and_then(|text| text.parse::<Timestamp>().ok());
    records.sort_by_key(|record| std::cmp::Reverse((ended(record).unwrap_or(Timestamp(i64::MAX)), record.id.clone())));
    let footprint = ledger.footprint()?;
    let each = footprint.used_bytes.checked_div(footprint.receipts).unwrap_or(0);
    let stored: HashSet<Digest> = ledger.blobs()?.into_iter().collect();
    let mut counted = HashSet::new();
    let mut found = Vec::new();
    for record in records {
        let receipts =
            record.effects.count - ledger.cut_of(&record.id)?.map_or(0, |cut| cut.count).min(record.effects.count);
        let mut bytes = receipts.saturating_mul(each);
        if !stored.is_empty() {
            for digest in ledger.results_of(&record.id)? {
                if stored.contains(&digest) && counted.insert(digest) {
                    bytes += fs::metadata(ledger.blob_path(&digest)).map_or(0, |blob| blob.len());
                }
            }
        }
        let folder = folder_bytes(&ledger.run_dir(&record.id), request.undo)?;
        found.push((record, receipts, bytes + folder));
    }
    let all: u64 = found.iter().map(|(_, _, bytes)| bytes).sum();
    let mut plan = Plan { prune: Vec::new(), kept: Vec::new(), bytes: all, left_bytes: all };
    let doubtful: HashSet<RunId> = ledger.in_doubt(None)?.into_iter().map(|intent| intent.draft.run).collect();
    for (record, receipts, bytes) in found.into_iter().rev() {
        let ended_at = ended(&record);
        let old = request.ended_before.is_some_and(|before| ended_at.is_none_or(|ended| ended < before));
        let too_much = request.keep_bytes.is_some_and(|keep| plan.left_bytes > keep);
        // Nothing is left of it but what always stays.
        if (!old && !too_much) || bytes == 0 {
            continue;
        }
        let kept = match (record.state, record.changes) {
            (RunState::Starting | RunState::Running | RunState::Applying, _) => Some("it is not over"),
            (RunState::Ended, ChangesState::Pending | ChangesState::Partial) => {
                Some("its changes are pending; `tollgate apply` or `tollgate discard` decides")
            }
            (
                RunState::Ended,
                ChangesState::None
                | ChangesState::Applied
                | ChangesState::Discarded
                | ChangesState::Undone
                | ChangesState::PartlyUndone
                | ChangesState::Resumed,
            ) => doubtful.contains(&record.id).then_some("something of it is in doubt"),
        };
        match kept {
            Some(why) => plan.kept.push((record.id, why)),
            None => {
                plan.left_bytes -= bytes;
                let ended_at = record.ended_at.unwrap_or_default();
                plan.prune.push(Candidate { run: record.id, ended_at, receipts, bytes });
            }
        }
    }
    Ok(plan)
}

/// Does what the plan says. `progress` hears of each run before its turn, and of how many receipts are gone.
///
/// # Errors
/// As [`plan`]. What was pruned until then stays so, and pruning again goes on from there.
pub fn prune(
    ledger: &Ledger,
    plan: &Plan,
    undo: Undo,
    progress: &mut dyn FnMut(usize, u64),
) -> Result<Done, PruneError> {
    let mut done = Done::default();
    let stored: HashSet<Digest> = ledger.blobs()?.into_iter().collect();
    let mut contents = HashSet::new();
    for (index, candidate) in plan.prune.iter().enumerate() {
        progress(index, done.receipts);
        if !stored.is_empty() {
            contents.extend(ledger.results_of(&candidate.run)?.into_iter().filter(|digest| stored.contains(digest)));
        }
        let mut left = candidate.receipts;
        while left > 0 {
            match ledger.cut_some(&candidate.run) {
                Ok(now) => {
                    done.receipts += left.saturating_sub(now);
                    left = now;
                    progress(index, done.receipts);
                }
                // It changed since the plan was made: somebody settles or applies it now.
                Err(error @ ledger::Error::NotPrunable { .. }) => {
                    done.notes.push(error.to_string());
                    break;
                }
                Err(error) => return Err(error.into()),
            }
        }
        if left == 0 {
            remove_folder(&ledger.run_dir(&candidate.run), undo)?;
            done.runs += 1;
        }
    }
    let named = ledger.still_named(&contents)?;
    for digest in contents.difference(&named) {
        let path = ledger.blob_path(digest);
        match fs::remove_file(&path) {
            Ok(()) => done.blobs += 1,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(source) => return Err(PruneError::Io { doing: "remove", path, source }),
        }
    }
    give_space_back(ledger, &mut done)?;
    Ok(done)
}

/// Shrinks the database where enough of it is free. Not while a run goes on, which would wait.
fn give_space_back(ledger: &Ledger, done: &mut Done) -> Result<(), PruneError> {
    let footprint = ledger.footprint()?;
    if done.receipts == 0 || footprint.free_bytes < footprint.used_bytes / 4 {
        return Ok(());
    }
    let live = ledger.runs(RunQuery { all: Which::Live, limit: Some(1), since: None })?;
    if !live.is_empty() {
        done.notes.push(
            "a run goes on, so the database keeps its size; its free part is used for new receipts, and the next \
             `tollgate prune` can give it back to the disk"
                .to_owned(),
        );
        return Ok(());
    }
    if let Err(error) = ledger.compact() {
        // What is free is used for new receipts all the same.
        done.notes.push(format!("the database keeps its size: {error}"));
    }
    Ok(())
}

/// What of a run's folder goes.
fn goes(name: &OsStr, undo: Undo) -> bool {
    match undo {
        // Beside the images there are small files that say where they belong and what became of them.
        Undo::Kept => name != BEFORE && name != "stage.name" && Path::new(name).extension() != Some(OsStr::new("json")),
        Undo::Removed => true,
    }
}

/// Where there is nothing to undo, what says where it belongs is of no use.
fn what_stays(names: &[OsString], undo: Undo) -> Undo {
    if names.iter().any(|name| name == BEFORE) {
        undo
    } else {
        Undo::Removed
    }
}

fn names(folder: &Path) -> Result<Vec<OsString>, PruneError> {
    let listed = match fs::read_dir(folder) {
        Ok(entries) => entries.map(|entry| entry.map(|entry| entry.file_name())).collect(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(error),
    };
    listed.map_err(|source| PruneError::Io { doing: "list", path: folder.to_owned(), source })
}

fn folder_bytes(folder: &Path, undo: Undo) -> Result<u64, PruneError> {
    let names = names(folder)?;
    let undo = what_stays(&names, undo);
    Ok(names.iter().filter(|name| goes(name, undo)).map(|name| tree_bytes(&folder.join(name))).sum())
}

/// The space that a tree takes, as far as it can be entered.
fn tree_bytes(path: &Path) -> u64 {
    let mut total = 0;
    let mut pending = vec![path.to_owned()];
    while let Some(path) = pending.pop() {
        let Ok(found) = fs::symlink_metadata(&path) else { continue };
        // stat(2): blocks of 512 bytes.
        total += found.blocks() * 512;
        if found.is_dir() {
            pending.extend(fs::read_dir(&path).into_iter().flatten().flatten().map(|entry| entry.path()));
        }
    }
    total
}

fn remove_folder(folder: &Path, undo: Undo) -> Result<(), PruneError> {
    let all = names(folder)?;
    if all.is_empty() && !folder.exists() {
        return Ok(());
    }
    let failed = |doing, path: &Path| {
        let path = path.to_owned();
        move |source| PruneError::Io { doing, path, source }
    };
    let handle = tree::open_root(folder).map_err(failed("open", folder))?;
    let undo = what_stays(&all, undo);
    for name in all.iter().filter(|name| goes(name, undo)) {
        tree::remove(handle.as_fd(), name).map_err(failed("remove", &folder.join(name)))?;
    }
    if undo == Undo::Removed {
        drop(handle);
        fs::remove_dir(folder).map_err(failed("remove", folder))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        chain::Answer,
        effect::{tests::sample, Kind},
        ledger::{
            tests::{record, Fixture},
            verify::Signatures,
            Draft, Trust,
        },
    };
    use std::ops::ControlFlow;

    const DAY: i64 = 86_400_000_000;

    /// A ledger with runs that ended a day after another, each of 30 receipts, a log of 64 KiB and a content.
    fn runs(count: usize) -> (Fixture, Vec<RunId>) {
        let fixture = Fixture::new();
        let ended = (0..count)
            .map(|number| {
                let run = RunId(format!("old{number:09}"));
                let mut record = record(&run);
                fixture.ledger.insert_run(&record).unwrap();
                let content = fixture.ledger.put_blob(format!("content {number}").as_bytes()).unwrap();
                let shared = fixture.ledger.put_blob(b"shared").unwrap();
                let drafts = (0..30).map(|index| {
                    let answer = Answer::done(serde_json::Value::Null, 1);
                    let draft = Draft::of(&run, &sample(Kind::FsRead), &answer, Timestamp(number as i64 * DAY));
                    Draft { result_digest: [Some(content), Some(shared), None][index % 3], ..draft }
                });
                fixture.ledger.append_many(drafts.collect()).unwrap();
                record.state = RunState::Ended;
                record.ended_at = Some(Timestamp(number as i64 * DAY).to_string());
                fixture.ledger.end_run(&record, Vec::new()).unwrap();
                let folder = fixture.ledger.run_dir(&run);
                fs::create_dir_all(&folder).unwrap();
                fs::write(folder.join("stdout.log"), vec![b'x'; 64 << 10]).unwrap();
                run
            })
            .collect();
        (fixture, ended)
    }

    fn older_than(day: i64) -> Request {
        Request { ended_before: Some(Timestamp(day * DAY)), keep_bytes: None, undo: Undo::Kept }
    }

    fn run_prune(fixture: &Fixture, request: &Request) -> (Plan, Done) {
        let plan = plan(&fixture.ledger, request).unwrap();
        let done = prune(&fixture.ledger, &plan, request.undo, &mut |_, _| {}).unwrap();
        (plan, done)
    }

    fn names(plan: &Plan) -> Vec<&RunId> {
        plan.prune.iter().map(|candidate| &candidate.run).collect()
    }

    fn verifies(fixture: &Fixture) {
        let mut own = Trust::of_host(&fixture.state).unwrap();
        own.signatures = Signatures::Required;
        let mut found = Vec::new();
        let mut report = |broken| {
            found.push(broken);
            ControlFlow::Continue(())
        };
        fixture.ledger.verify_host(&own, &mut report).unwrap();
        fixture.ledger.verify_blobs(&mut report).unwrap();
        assert!(found.is_empty(), "{found:?}");
        for record in fixture.ledger.runs(RunQuery { all: Which::All, limit: None, since: None }).unwrap() {
            fixture.ledger.verify_run_with(&record.id, &own).unwrap_or_else(|broken| panic!("{broken}"));
        }
    }

    #[test]
    fn old_runs_go_and_say_so_and_what_is_left_verifies() {
        let (fixture, runs) = runs(4);
        let (plan, done) = run_prune(&fixture, &older_than(2));
        assert_eq!(names(&plan), [&runs[0], &runs[1]]);
        assert_eq!((done.runs, done.receipts, done.blobs), (2, 60, 2), "the shared content stays");
        verifies(&fixture);
        let cut = fixture.ledger.verify_run(&runs[0]).unwrap().cut.expect("is said");
        assert_eq!(cut.count, 30);
        assert_eq!(fixture.ledger.run(&runs[0].0).unwrap().effects.count, 30, "the record stays");
        assert!(!fixture.ledger.run_dir(&runs[0]).exists());
        assert!(fixture.ledger.run_dir(&runs[2]).join("stdout.log").exists());
        assert_eq!(
            run_prune(&fixture, &older_than(2)),
            (Plan { prune: Vec::new(), ..run_prune(&fixture, &older_than(2)).0 }, Done::default())
        );
        // A run can go on after it was pruned.
        let answer = Answer::done(serde_json::Value::Null, 1);
        let later = Draft::of(&runs[0], &sample(Kind::FsRead), &answer, Timestamp(0));
        assert_eq!(fixture.ledger.append(later).unwrap().seq, 31);
        fixture.ledger.seal_run(&runs[0]).unwrap();
        verifies(&fixture);
    }

    #[test]
    fn the_oldest_go_until_the_rest_is_small_enough() {
        let (fixture, runs) = runs(5);
        let whole = plan(&fixture.ledger, &Request { keep_bytes: Some(u64::MAX), ..older_than(0) }).unwrap();
        assert!(whole.prune.is_empty() && whole.bytes > 5 * (64 << 10));
        let keep_bytes = Some(whole.bytes * 3 / 5);
        let request = Request { ended_before: None, keep_bytes, undo: Undo::Kept };
        let foretold = plan(&fixture.ledger, &request).unwrap();
        let (plan, _) = run_prune(&fixture, &request);
        assert_eq!(plan, foretold, "a dry run tells exactly that");
        assert_eq!(names(&plan)[..2], [&runs[0], &runs[1]]);
        assert!(plan.prune.len() <= 3, "{plan:?}");
        verifies(&fixture);
    }

    #[test]
    fn what_is_live_in_doubt_or_pending_stays_and_is_named() {
        let (fixture, runs) = runs(3);
        let mut pending = fixture.ledger.run(&runs[0].0).unwrap();
        pending.changes = ChangesState::Pending;
        fixture.ledger.update_run(&pending).unwrap();
        drop(fixture.ledger.intend(&runs[1], &sample(Kind::RunStart), Timestamp(0)).unwrap());
        fixture.ledger.seal_run(&runs[1]).unwrap();
        fixture
            .ledger
            .append(Draft {
                run: fixture.run.clone(),
                ..Draft::of(
                    &fixture.run,
                    &sample(Kind::FsRead),
                    &Answer::done(serde_json::Value::Null, 1),
                    Timestamp(0),
                )
            })
            .unwrap();
        let (plan, done) = run_prune(&fixture, &Request { keep_bytes: Some(0), ..older_than(0) });
        assert_eq!(names(&plan), [&runs[2]]);
        let mut kept: Vec<&str> = plan.kept.iter().map(|(run, _)| &*run.0).collect();
        kept.sort_unstable();
        assert_eq!(kept, [&*fixture.run.0, &*runs[0].0, &*runs[1].0]);
        assert_eq!(done.runs, 1);
        assert!(done.notes.iter().all(|note| note.contains("a run goes on")), "{:?}", done.notes);
        for run in [&fixture.run, &runs[0], &runs[1]] {
            assert_eq!(fixture.ledger.cut_of(run).unwrap(), None);
            assert!(matches!(fixture.ledger.cut_some(run), Err(ledger::Error::NotPrunable { .. })) || *run == runs[0]);
        }
        verifies(&fixture);
    }

    #[test]
    fn what_undoing_needs_goes_by_its_own_rule_only() {
        let (fixture, runs) = runs(1);
        let folder = fixture.ledger.run_dir(&runs[0]);
        fs::create_dir_all(folder.join("before/1")).unwrap();
        fs::write(folder.join("before/1/slot"), vec![b'x'; 1 << 20]).unwrap();
        fs::write(folder.join("room.json"), "{}").unwrap();
        let (plan, _) = run_prune(&fixture, &older_than(9));
        assert!(plan.bytes < 1 << 20, "it is not counted: {plan:?}");
        assert!(folder.join("before/1/slot").exists() && folder.join("room.json").exists());
        assert!(!folder.join("stdout.log").exists());
        let (plan, _) = run_prune(&fixture, &Request { undo: Undo::Removed, ..older_than(9) });
        assert_eq!(names(&plan), [&runs[0]]);
        assert!(!folder.exists());
        verifies(&fixture);
    }

    #[test]
    fn after_a_crash_between_any_two_steps_the_ledger_verifies_and_pruning_goes_on() {
        let (fixture, runs) = runs(2);
        let many: Vec<Draft> = (0..45_000)
            .map(|_| {
                Draft::of(&runs[0], &sample(Kind::FsRead), &Answer::done(serde_json::Value::Null, 1), Timestamp(0))
            })
            .collect();
        for some in many.chunks(15_000) {
            fixture.ledger.append_many(some.to_vec()).unwrap();
        }
        fixture.ledger.seal_run(&runs[0]).unwrap();
        // Each of these is what a process that died after so many steps leaves.
        assert_eq!(fixture.ledger.cut_some(&runs[0]).unwrap(), 25_030);
        verifies(&fixture);
        assert_eq!(fixture.ledger.cut_some(&runs[0]).unwrap(), 5_030);
        let (plan, done) = run_prune(&fixture, &older_than(1));
        assert_eq!((plan.prune[0].receipts, done.receipts), (5_030, 5_030));
        verifies(&fixture);
        // The receipts are gone and the folder is not: the next one removes it.
        let left = fixture.ledger.cut_some(&runs[1]).unwrap();
        assert_eq!(left, 0);
        let (_, done) = run_prune(&fixture, &older_than(9));
        assert_eq!((done.runs, fixture.ledger.run_dir(&runs[1]).exists()), (1, false));
    }

    #[test]
    fn the_space_comes_back() {
        let (fixture, runs) = runs(2);
        let mut live = fixture.ledger.run(&fixture.run.0).unwrap();
        live.state = RunState::Ended;
        fixture.ledger.end_run(&live, Vec::new()).unwrap();
        let long = |_| Draft {
            reason: "x".repeat(2_000),
            ..Draft::of(&runs[0], &sample(Kind::FsRead), &Answer::done(serde_json::Value::Null, 1), Timestamp(0))
        };
        fixture.ledger.append_many((0..2_000).map(long).collect()).unwrap();
        fixture.ledger.seal_run(&runs[0]).unwrap();
        let size = || fs::metadata(fixture.state.join("ledger.db")).unwrap().len();
        fixture.ledger.compact().unwrap();
        let before = size();
        assert!(before > 4_000_000, "{before}");
        let (_, done) = run_prune(&fixture, &older_than(1));
        assert!(done.notes.is_empty(), "{:?}", done.notes);
        assert!(size() < before / 4, "{} of {before}", size());
        verifies(&fixture);
    }
}
