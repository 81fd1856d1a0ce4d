//! Taking up an interrupted run: its layer as it stands, its effects that must not be repeated as they were answered.
//!
//! The program starts again from its beginning, with its files as the interruption left them. A resumed run is a new
//! run with a record of its own that names the one it takes over. The layer changes hands by one rename, after the
//! new run's folder says whose it is; so whenever a resume is cut short, one of the two has the layer, whole, and can
//! be resumed.

use crate::{
    chain::resume::Resumed,
    effect::{Door, Kind, RunId},
    jail::spec::Store,
    ledger::{
        self,
        record::{ChangesState, OutcomeType, RunRecord, RunState},
        Ledger, OnceResult, OpenIntent, RunQuery, Which,
    },
    room::{
        batch, layer,
        place::{OpenPlace, Place, View},
        tree,
    },
};
use std::{
    collections::BTreeMap,
    ffi::OsStr,
    fs, io,
    os::fd::AsFd,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

/// How long processes of the interrupted run may take to be gone: the kernel kills them with their pid 1.
const GONE: Duration = Duration::from_secs(5);

/// The interrupted run that a new one takes over.
pub struct Resumption {
    /// The run.
    pub run: RunId,
    /// Its folder.
    pub folder: PathBuf,
    /// When it started to see its workspace, in nanoseconds since the epoch; none if it left nothing, and the new run
    /// sees the workspace afresh.
    pub since_ns: Option<i64>,
    /// Whether it worked on a copy, so that the new run does too.
    pub copied: Copied,
    /// Answers what must not be repeated.
    pub known: Arc<Resumed>,
}

/// How the interrupted run saw its workspace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Copied {
    /// As a copy.
    Yes,
    /// Through an overlay, or not at all.
    No,
}

/// Why a run cannot be resumed.
#[derive(Debug, thiserror::Error)]
pub enum ResumeError {
    /// It did not end by an interruption.
    #[error("run {run} was not interrupted: {how}")]
    NotInterrupted {
        /// The run.
        run: String,
        /// How it stands.
        how: String,
    },
    /// Another run has its layer.
    #[error("run {run} was taken over by run {by}, which was interrupted in its turn; resume that one")]
    TakenOver {
        /// The run.
        run: String,
        /// The other.
        by: String,
    },
    /// The run that it was to take over still has the layer.
    #[error("run {run} was interrupted before it took over run {from}; resume that one")]
    NotTakenOver {
        /// The run.
        run: String,
        /// The other.
        from: String,
    },
    /// Some of its changes are decided about.
    #[error("some changes of run {run} were applied or discarded already, so its program cannot find them as it left them; apply or discard the rest")]
    Decided {
        /// The run.
        run: String,
    },
    /// Effects that must not be repeated may or may not have happened.
    #[error("nobody knows whether these effects of run {run} happened: {list}; look, then name each with `--redo ID` (do it when it is asked for again) or `--skip ID` (answer as if it were done)")]
    InDoubt {
        /// The run.
        run: String,
        /// Each with its receipt, kind, object and time.
        list: String,
    },
    /// A decision about an effect that is not in doubt.
    #[error("run {run} has no effect in doubt with the receipt `{id}`")]
    NotInDoubt {
        /// The run.
        run: String,
        /// As given.
        id: String,
    },
    /// The run's folder cannot be read.
    #[error("cannot read what run {run} left: {source}")]
    Folder {
        /// The run.
        run: String,
        /// The system's reason.
        #[source]
        source: io::Error,
    },
    /// The ledger.
    #[error(transparent)]
    Ledger(#[from] ledger::Error),
}

/// What a person decided about effects in doubt, by the ids of their receipts or their places in the run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Decisions {
    /// To be done when they are asked for again.
    pub redo: Vec<String>,
    /// To be answered as if they were done.
    pub skip: Vec<String>,
}

impl Resumption {
    /// Checks that a run can be resumed, and settles what was in doubt. Its layer stays where it is.
    ///
    /// # Errors
    /// [`ResumeError`].
    pub fn prepare(ledger: &Ledger, record: &RunRecord, decisions: &Decisions) -> Result<Resumption, ResumeError> {
        let run = record.id.0.clone();
        let interrupted = record.outcome.as_ref().is_some_and(|outcome| {
            // One that took over a layer and then could not start has it still.
            outcome.kind == OutcomeType::Interrupted
                || (outcome.kind == OutcomeType::CouldNotStart && record.resumes.is_some())
        });
        if record.state != RunState::Ended || !interrupted {
            let how = match &record.outcome {
                Some(outcome) => crate::jail::outcome::summary(outcome),
                None => "it is not over".to_owned(),
            };
            return Err(ResumeError::NotInterrupted { run, how });
        }
        let folder = ledger.run_dir(&record.id);
        if let Some(by) = taken_over_by(ledger, &record.id)? {
            if record.changes == ChangesState::Resumed || !folder.join(layer::UPPER).exists() {
                return Err(ResumeError::TakenOver { run, by: by.0 });
            }
        }
        if let Some(from) = &record.resumes {
            let parent = ledger.run(&from.0)?;
            if parent.changes == ChangesState::Pending && ledger.run_dir(from).join(layer::UPPER).exists() {
                return Err(ResumeError::NotTakenOver { run, from: from.0.clone() });
            }
        }
        let place = open(&folder, &run)?;
        if let Some(place) = &place {
            let decided = batch::pending(&place.run_dir).map_err(|error| unreadable(&run, io::Error::other(error)))?;
            match record.changes {
                ChangesState::None | ChangesState::Pending if decided.is_none() => {}
                ChangesState::Applied => {
                    let how = "its program had ended, and its changes are in the workspace".to_owned();
                    return Err(ResumeError::NotInterrupted { run, how });
                }
                _ => return Err(ResumeError::Decided { run }),
            }
        }
        settle(ledger, record, decisions)?;
        let mut results = Vec::new();
        let mut runs = Vec::new();
        let mut next = Some(record.clone());
        while let Some(record) = next {
            runs.push(record.id.clone());
            // The oldest first.
            let mut these = ledger.once_results(&record.id)?;
            these.append(&mut results);
            results = these;
            next = record.resumes.as_ref().map(|run| ledger.run(&run.0)).transpose()?;
        }
        let left = record.changes == ChangesState::Pending;
        Ok(Resumption {
            run: record.id.clone(),
            folder,
            copied: match place.as_ref().map(|place| place.place.view) {
                Some(View::Mirror) if left => Copied::Yes,
                Some(View::Mirror | View::Overlay) | None => Copied::No,
            },
            since_ns: place.filter(|_| left).map(|place| place.place.since_ns),
            known: Arc::new(Resumed::new(runs, results)),
        })
    }

    /// Moves the layer into the new run's folder, which must say where its changes are already. With an owner, what is
    /// in the layer is given to them first.
    ///
    /// # Errors
    /// In words: what is in the way. The interrupted run then still has its layer.
    pub fn take_over(&self, folder: &Path, store: Store, owner: Option<(u32, u32)>) -> Result<(), String> {
        wait_until_gone(&self.run)?;
        let failed = |what: &str, error: io::Error| format!("cannot take over run {}: {what}: {error}", self.run);
        let name = match store {
            Store::Overlay => layer::UPPER,
            Store::Mirror => layer::MIRROR,
            Store::ReadOnly | Store::Hidden => return Ok(()),
        };
        let old = tree::open_root(&self.folder).map_err(|error| failed("its folder", error))?;
        let new = tree::open_root(folder).map_err(|error| failed("the new folder", error))?;
        if tree::look(old.as_fd(), Path::new(name)).map_err(|error| failed("its layer", error))?.is_none() {
            return match self.since_ns {
                None => Ok(()),
                Some(_) => Err(format!("cannot take over run {}: it has no layer any more", self.run)),
            };
        }
        if let Some((uid, gid)) = owner {
            give(old.as_fd(), Path::new(name), uid, gid).map_err(|error| failed("its layer's owner", error))?;
        }
        for file in [batch::TOUCHED, crate::room::mirror::MANIFEST] {
            if let Some(text) = tree::read_ours(old.as_fd(), file).map_err(|error| failed(file, error))? {
                tree::write_durably(new.as_fd(), file, &text).map_err(|error| failed(file, error))?;
            }
        }
        // Over the empty one that the new run made: rename(2) replaces an empty directory.
        rustix::fs::renameat(&old, name, &new, name).map_err(|error| failed("its layer", error.into()))?;
        for folder in [&old, &new] {
            let parent = Path::new(name).parent().unwrap_or(Path::new(""));
            let held = tree::open_listing(folder.as_fd(), parent).map_err(|error| failed("its layer", error))?;
            rustix::fs::fsync(held).map_err(|error| failed("its layer", error.into()))?;
        }
        Ok(())
    }
}

fn unreadable(run: &str, source: io::Error) -> ResumeError {
    ResumeError::Folder { run: run.to_owned(), source }
}

fn open(folder: &Path, run: &str) -> Result<Option<OpenPlace>, ResumeError> {
    if !Place::is_in(folder) {
        // It could not write its workspace, or never came so far.
        return Ok(None);
    }
    Place::open(folder).map(Some).map_err(|error| unreadable(run, io::Error::other(error)))
}

/// The newest run that names this one as the one it resumes and has anything to show for it.
fn taken_over_by(ledger: &Ledger, run: &RunId) -> ledger::Result<Option<RunId>> {
    let all = ledger.runs(RunQuery { all: Which::All, limit: None, since: None })?;
    Ok(all.into_iter().find(|other| other.resumes.as_ref() == Some(run)).map(|other| other.id))
}

/// Applies the decisions about what is in doubt; what is not decided about is listed, and nothing is settled.
fn settle(ledger: &Ledger, record: &RunRecord, decisions: &Decisions) -> Result<(), ResumeError> {
    let run = record.id.0.clone();
    let all = ledger.in_doubt(Some(&record.id))?;
    // That the run itself was started is not the question: it is started now.
    let (own, open): (Vec<OpenIntent>, Vec<OpenIntent>) =
        all.into_iter().partition(|intent| intent.draft.kind == Kind::RunStart && intent.draft.door == Door::Control);
    let by_id: BTreeMap<String, &OpenIntent> =
        open.iter().filter_map(|intent| Some((intent.receipt?.to_string(), intent))).collect();
    let short = |id: &String| id.strip_prefix(&format!("{run}.")).unwrap_or(id).to_owned();
    for id in decisions.redo.iter().chain(&decisions.skip) {
        if !by_id.contains_key(&short(id)) {
            return Err(ResumeError::NotInDoubt { run, id: id.clone() });
        }
    }
    let skipped: Vec<String> = decisions.skip.iter().map(short).collect();
    let redone: Vec<String> = decisions.redo.iter().map(short).collect();
    let undecided: Vec<String> = by_id
        .iter()
        .filter(|(id, _)| !skipped.contains(id) && !redone.contains(id))
        .map(|(id, intent)| {
            let draft = &intent.draft;
            format!("{run}.{id} {} of `{}` at {}", draft.kind, draft.resource, draft.started)
        })
        .collect();
    if !undecided.is_empty() {
        return Err(ResumeError::InDoubt { run, list: undecided.join(", ") });
    }
    for intent in own {
        ledger.settle(intent.n)?;
    }
    for (id, intent) in by_id {
        match skipped.contains(&id) {
            true => {
                let result = OnceResult {
                    value: crate::chain::preflight::implied_by(&intent.draft.resource),
                    body: matches!(intent.draft.resource, crate::effect::Resource::Url { .. })
                        .then(|| hex::encode(b"{}")),
                    ..OnceResult::default()
                };
                ledger.settle_as_done(intent.n, &record.id, intent.draft.request_digest, &result)?;
            }
            false => ledger.settle(intent.n)?,
        }
    }
    Ok(())
}

/// Waits until no process of the interrupted run's jail is left. They are known by the run's socket, which is mounted
/// in their view; the kernel kills them when their pid 1 dies, a moment after their supervisor.
fn wait_until_gone(run: &RunId) -> Result<(), String> {
    let until = Instant::now() + GONE;
    let mark = format!("/{run}/door/");
    while let Some(pid) = lingering(&mark) {
        if Instant::now() > until {
            return Err(format!("process {pid} of run {run} is still there; end it, then resume the run"));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

fn lingering(mark: &str) -> Option<u32> {
    let mut pids = fs::read_dir("/proc").ok()?.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.find(|pid: &u32| fs::read_to_string(format!("/proc/{pid}/mountinfo")).is_ok_and(|text| text.contains(mark)))
}

/// Gives a directory and all in it to this user, following no link.
fn give(root: std::os::fd::BorrowedFd<'_>, top: &Path, uid: u32, gid: u32) -> io::Result<()> {
    let mut pending = vec![top.to_path_buf()];
    let (parent, name) = tree::parent_of(root, top)?;
    tree::set_owner_at(parent.as_fd(), name, uid, gid)?;
    while let Some(directory) = pending.pop() {
        let listing = tree::open_listing(root, &directory)?;
        for name in tree::names(listing.as_fd())? {
            let name: &OsStr = &name;
            let Some(stat) = tree::look_at(listing.as_fd(), name)? else { continue };
            if tree::kind_of(&stat) == rustix::fs::FileType::Directory {
                pending.push(directory.join(name));
            }
            if (stat.st_uid, stat.st_gid) != (uid, gid) {
                tree::set_owner_at(listing.as_fd(), name, uid, gid)?;
                // chown(2) takes the set-id bits from a file; a layer's directories may have theirs.
                if tree::kind_of(&stat) == rustix::fs::FileType::Directory && tree::permissions(&stat) & 0o6000 != 0 {
                    tree::set_mode(tree::open_at(listing.as_fd(), name)?.as_fd(), tree::permissions(&stat))?;
                }
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        doors::control::tests::record,
        effect::{tests::sample, Effect},
        ledger::{record::Outcome, Timestamp},
        room::testing::Fixture,
    };

    fn interrupted(id: &str) -> RunRecord {
        let outcome =
            Outcome { kind: OutcomeType::Interrupted, code: None, signal: None, limit: None, used: None, detail: None };
        let changes = ChangesState::Pending;
        RunRecord { state: RunState::Ended, outcome: Some(outcome), changes, ..record(id, 0) }
    }

    /// A ledger whose run `aaaaaaaaaaa1` was interrupted, with the fixture's directory as its own.
    fn ledger(fixture: &Fixture) -> (tempfile::TempDir, Ledger) {
        let root = tempfile::tempdir().unwrap();
        let ledger = Ledger::open(&root.path().join("state")).unwrap();
        let run = interrupted("aaaaaaaaaaa1");
        ledger.insert_run(&run).unwrap();
        let own = ledger.run_dir(&run.id);
        fs::create_dir_all(own.parent().unwrap()).unwrap();
        std::os::unix::fs::symlink(fixture.run_path(), &own).unwrap();
        Place::create(&fixture.run_dir, &run.id, &fixture.workspace_path(), 7, None, View::Overlay).unwrap();
        (root, ledger)
    }

    fn prepare(ledger: &Ledger, run: &str, decisions: &Decisions) -> Result<Resumption, ResumeError> {
        Resumption::prepare(ledger, &ledger.run(run).unwrap(), decisions)
    }

    fn asked() -> Effect {
        Effect { door: Door::Api, ..sample(Kind::RunStart) }
    }

    #[test]
    fn what_is_in_doubt_is_listed_and_nothing_starts_until_each_is_decided() {
        let fixture = Fixture::new();
        let (_root, ledger) = ledger(&fixture);
        let run = RunId("aaaaaaaaaaa1".into());
        // The run's own start is no question; what its program asked for is.
        for effect in [Effect { door: Door::Control, ..sample(Kind::RunStart) }, asked(), asked()] {
            drop(ledger.intend(&run, &effect, Timestamp(5)).unwrap());
        }
        ledger.seal_run(&run).unwrap();
        let error = prepare(&ledger, &run.0, &Decisions::default()).err().unwrap().to_string();
        assert!(error.contains("aaaaaaaaaaa1.2 run/start of") && error.contains("aaaaaaaaaaa1.3"), "{error}");
        assert!(!error.contains("aaaaaaaaaaa1.1 "), "{error}");
        let one = Decisions { redo: vec!["aaaaaaaaaaa1.2".into()], skip: Vec::new() };
        assert!(matches!(prepare(&ledger, &run.0, &one), Err(ResumeError::InDoubt { .. })));
        assert_eq!(ledger.in_doubt(Some(&run)).unwrap().len(), 3, "nothing is settled by halves");
        let wrong = Decisions { redo: vec!["9".into()], skip: Vec::new() };
        assert!(matches!(prepare(&ledger, &run.0, &wrong), Err(ResumeError::NotInDoubt { .. })));
        let both = Decisions { redo: vec!["2".into()], skip: vec!["aaaaaaaaaaa1.3".into()] };
        prepare(&ledger, &run.0, &both).unwrap();
        assert_eq!(ledger.in_doubt(Some(&run)).unwrap(), []);
        // What was skipped counts as done from now on, what is to be redone does not.
        let results = ledger.once_results(&run).unwrap();
        assert_eq!(results.iter().map(|(digest, _)| *digest).collect::<Vec<_>>(), [asked().digest()]);
        prepare(&ledger, &run.0, &Decisions::default()).unwrap();
    }

    #[test]
    fn a_layer_changes_hands_once_and_whoever_has_it_is_the_one_to_resume() {
        // On one file system with the ledger's, as runs' folders are.
        let fixture = Fixture::on(tempfile::tempdir().unwrap());
        let (_root, ledger) = ledger(&fixture);
        fs::write(fixture.upper_path().join("made"), "made").unwrap();
        let resumption = prepare(&ledger, "aaaaaaaaaaa1", &Decisions::default()).unwrap();
        assert_eq!((resumption.since_ns, resumption.copied), (Some(7), Copied::No));
        // A resume that was cut short before it had the layer.
        let resumes = Some(RunId("aaaaaaaaaaa1".into()));
        let changes = ChangesState::None;
        ledger.insert_run(&RunRecord { resumes, changes, ..interrupted("bbbbbbbbbbb1") }).unwrap();
        let folder = ledger.run_dir(&RunId("bbbbbbbbbbb1".into()));
        fs::create_dir_all(folder.join("layer/upper")).unwrap();
        assert!(matches!(
            prepare(&ledger, "bbbbbbbbbbb1", &Decisions::default()),
            Err(ResumeError::NotTakenOver { .. })
        ));
        prepare(&ledger, "aaaaaaaaaaa1", &Decisions::default()).unwrap();
        // And one that had it, and did not live to say so.
        let owner = nix::unistd::geteuid().is_root().then_some((1_000, 1_000));
        resumption.take_over(&folder, Store::Overlay, owner).unwrap();
        assert_eq!(fs::read(folder.join("layer/upper/made")).unwrap(), b"made");
        assert!(matches!(
            prepare(&ledger, "aaaaaaaaaaa1", &Decisions::default()),
            Err(ResumeError::TakenOver { by, .. }) if by == "bbbbbbbbbbb1"
        ));
        prepare(&ledger, "bbbbbbbbbbb1", &Decisions::default()).unwrap();
        assert!(resumption.take_over(&folder, Store::Overlay, None).is_err(), "there is nothing left to take");
        assert_eq!(fs::read(folder.join("layer/upper/made")).unwrap(), b"made");
    }

    #[test]
    fn a_run_that_ended_by_itself_or_is_decided_about_is_not_resumed() {
        let fixture = Fixture::new();
        let (_root, ledger) = ledger(&fixture);
        let mut run = ledger.run("aaaaaaaaaaa1").unwrap();
        let mut exited = run.clone();
        exited.outcome.as_mut().unwrap().kind = OutcomeType::Exited;
        ledger.update_run(&exited).unwrap();
        assert!(matches!(
            prepare(&ledger, "aaaaaaaaaaa1", &Decisions::default()),
            Err(ResumeError::NotInterrupted { .. })
        ));
        run.changes = ChangesState::Discarded;
        ledger.update_run(&run).unwrap();
        assert!(matches!(prepare(&ledger, "aaaaaaaaaaa1", &Decisions::default()), Err(ResumeError::Decided { .. })));
    }
}
