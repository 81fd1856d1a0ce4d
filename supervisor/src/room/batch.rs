//! Applies a list of changes to a workspace: all of them or none.
//!
//! Everything that takes space or time is staged first, on the workspace's file system; then a journal says what will
//! be done; then come renames only, each checked against what the run saw and each with its inverse. What is replaced
//! or deleted is kept as a before-image. [`recover`] finishes or undoes what a crash left: a batch without its commit
//! mark is rolled back, one with it is rolled forward.
//!
//! Files in a run's directory:
//!
//! - `stage/`: what is about to be placed; during the batch also what was taken out. It becomes `before/<n>/`, so the
//!   manifest and what will be `pending.json` are written into it and are on disk with all else that is staged. Where
//!   the run's directory lies on another file system or mount than the workspace, the stage is `.tollgate-<run>` in
//!   the workspace's root instead, and both are written when the batch is done.
//! - `journal.new`, then `journal`, then `journal.committed`: a [`Journal`].
//! - `before/<n>/`: the before-images of the n-th batch, one slot a name, with `manifest.json`: a [`Manifest`].
//! - `touched.json`: inodes whose change time we moved ourselves, by a batch that was rolled back.
//! - `pending.json`: the paths of the run's changes that no batch applied yet; without the file, all of them.

use super::{
    changes::{Change, ChangeKind, ChangeSet, NodeType, Summary},
    durable, layer,
    path::{printable, spelled},
    tree,
};
use crate::{
    crash::{self, Point},
    effect::RunId,
};
use rustix::fs::{self as kernel, AtFlags, FileType, FlockOperation, Mode, RenameFlags};
use serde::{Deserialize, Serialize};
use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    ffi::{OsStr, OsString},
    io,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::ffi::{OsStrExt, OsStringExt},
    },
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

/// How long a batch waits for another one in the same workspace.
const LOCK_WAIT: Duration = Duration::from_secs(30);

/// How many bytes of before-images are copied into the run's directory where they cannot be moved.
const COPIED_BEFORE_BYTES: u64 = 1 << 30;

const JOURNAL_NEW: &str = "journal.new";
const JOURNAL: &str = "journal";
const COMMITTED: &str = "journal.committed";
const PENDING: &str = "pending.json";
pub(crate) const TOUCHED: &str = "touched.json";
const MANIFEST: &str = "manifest.json";

/// The ids that a jail's files carry on the host, and those that they get in the workspace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct IdShift {
    /// The jail's user and group on the host.
    pub from: (u32, u32),
    /// The workspace owner's.
    pub to: (u32, u32),
}

/// Where a batch works.
pub struct Batch<'a> {
    /// The run, for the names of our files.
    pub run: &'a RunId,
    /// The run's own directory.
    pub run_dir: &'a OwnedFd,
    /// The workspace's root.
    pub workspace: &'a OwnedFd,
    /// The run's layer, or its mirror: where new contents are.
    pub source: &'a OwnedFd,
    /// When the run started, in nanoseconds since the epoch: what changed in the workspace after is somebody else's.
    pub since_ns: i64,
    /// How ids are put back, for a jail that ran under other ids than the workspace's owner.
    pub shift: Option<IdShift>,
    /// Stops a batch in the middle, for tests of what a crash or an error leaves.
    #[cfg(test)]
    pub(crate) stop: Option<(usize, Stop)>,
}

/// How a test stops a batch.
#[cfg(test)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stop {
    /// As if a call had failed.
    Fail,
    /// As if the process had been killed.
    Die,
}

/// A path that somebody else changed meanwhile.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Conflict {
    /// The path.
    #[serde(with = "spelled")]
    pub path: PathBuf,
    /// What happened to it.
    pub reason: String,
}

/// Why a batch was not applied. In every case but [`ApplyError::RollBack`] the workspace is as it was.
#[derive(Debug, thiserror::Error)]
pub enum ApplyError {
    /// Somebody else changed these paths after the run started.
    #[error("{}; nothing was applied, the run's changes are kept", conflict_sentence(.conflicts))]
    Conflict {
        /// Every path in the way.
        conflicts: Vec<Conflict>,
    },
    /// A new content could not be put beside the workspace: ENOSPC, most likely.
    #[error("cannot stage `{path}`: {source}; nothing was applied, the run's changes are kept")]
    Stage {
        /// The path whose content it was.
        path: String,
        /// The kernel's word.
        #[source]
        source: io::Error,
    },
    /// A rename failed, and everything before it was undone.
    #[error("cannot change `{path}`: {source}{}; everything was put back, the run's changes are kept", puzzling(.source))]
    Step {
        /// The path.
        path: String,
        /// The kernel's word.
        #[source]
        source: io::Error,
    },
    /// A batch failed and its undoing did too: the journal and the before-images are kept.
    #[error("cannot put `{path}` back after a failed batch: {source}; the old content is kept in the run's `stage` directory, run `tollgate apply` again to retry")]
    RollBack {
        /// The path.
        path: String,
        /// The kernel's word.
        #[source]
        source: io::Error,
    },
    /// One of our own files could not be read or written.
    #[error("cannot {deed} in the run's directory: {source}")]
    Ours {
        /// What was tried.
        deed: &'static str,
        /// The kernel's word.
        #[source]
        source: io::Error,
    },
    /// Another batch holds the workspace.
    #[error("another run's changes are being applied to this workspace; try again")]
    Busy,
}

/// What a person has to know who meets an error that says nothing of its cause.
fn puzzling(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        // overlayfs.rst, "renaming directories".
        Some(libc::EXDEV) => {
            " (the workspace lies on an overlay, as a container's own files do, where a folder of a layer below can be \
             neither moved nor removed in one step; put the workspace on a volume)"
        }
        Some(_) | None => "",
    }
}

fn conflict_sentence(conflicts: &[Conflict]) -> String {
    let named: Vec<String> =
        conflicts.iter().map(|conflict| format!("`{}` {}", printable(&conflict.path), conflict.reason)).collect();
    named.join("; ")
}

/// What a batch did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Applied {
    /// How many changes.
    pub changes: usize,
    /// Where the before-images are, below the run's directory; none when there was nothing to do.
    pub before: Option<PathBuf>,
}

/// What [`recover`] found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recovered {
    /// No batch was in progress.
    Nothing,
    /// A batch was under way, not committed: the workspace is as before it, the changes are pending.
    RolledBack,
    /// A batch was committed: its cleaning up is finished, the workspace is as after it.
    RolledForward,
}

/// What a batch will do, on disk before it does it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Journal {
    /// 1.
    pub version: u32,
    /// The run.
    pub run: RunId,
    /// The staging directory's name in the workspace, or none for `stage` in the run's directory.
    pub staged_in_workspace: Option<String>,
    /// The batch's number, from 1.
    pub number: u32,
    /// The operations in their order.
    pub operations: Vec<Operation>,
    /// Directories without all of their owner's rights, which are lent while names in them change.
    pub modes: Vec<PathMode>,
    /// What the manifest is to say.
    pub changes: Vec<Change>,
    /// Which slot holds which path's before-image.
    pub slots: Vec<SlotPath>,
    /// The paths that stay pending after this batch.
    pub remaining: Vec<String>,
    /// The paths whose new inode is the layer's own and still has overlayfs's marks: they go when the batch is done.
    #[serde(default)]
    pub marked: Vec<String>,
    /// Whether the batch applies a run's changes or takes them back.
    #[serde(default)]
    pub kind: BatchKind,
    /// New directories that somebody else had made already: the batch did not make them.
    #[serde(default)]
    pub existed: Vec<String>,
    /// What this batch reverts of earlier ones, whose before-images it puts back.
    #[serde(default)]
    pub consumed: Vec<Consumed>,
    /// How many receipts the run had when the batch began: its own come after them.
    #[serde(default)]
    pub after_seq: u64,
}

/// Which way a batch goes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum BatchKind {
    /// From what was before the run to what the run made: an apply, or the redo of an undo.
    #[default]
    Apply,
    /// Back to what was before the run.
    Undo,
}

impl BatchKind {
    /// The kind of a batch that reverts one of this kind.
    #[must_use]
    pub fn reverse(self) -> BatchKind {
        match self {
            BatchKind::Apply => BatchKind::Undo,
            BatchKind::Undo => BatchKind::Apply,
        }
    }
}

/// What a batch reverts of an earlier one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Consumed {
    /// The earlier batch's number.
    pub number: u32,
    /// The paths of its changes that are reverted.
    pub paths: Vec<String>,
}

/// A batch that takes earlier ones back: [`super::undo`] makes it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Reversal {
    /// What is to change, in the order of the paths, parents before what they hold.
    pub changes: Vec<Change>,
    /// Where the before-image of each path is, or of the directory that holds it: the batch and its slot.
    pub images: BTreeMap<PathBuf, (u32, u32)>,
    /// What is changed in place, by path: as it is, and as it is to be.
    pub attributes: BTreeMap<PathBuf, (Attributes, Attributes)>,
    /// Which way the new batch goes.
    pub kind: BatchKind,
    /// What of earlier batches it reverts.
    pub consumed: Vec<Consumed>,
    /// How many receipts the run has.
    pub after_seq: u64,
}

impl Reversal {
    /// Where the before-image of a path lies, below the run's directory.
    pub fn image(&self, path: &Path) -> Option<PathBuf> {
        path.ancestors().find_map(|top| {
            let (number, slot) = self.images.get(top)?;
            let at = Path::new("before").join(number.to_string()).join(slot.to_string());
            Some(join(&at, path.strip_prefix(top).ok()?))
        })
    }
}

/// A directory's path and mode.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PathMode {
    /// The path in the workspace.
    #[serde(with = "spelled")]
    pub path: PathBuf,
    /// Its permission bits.
    pub mode: u32,
}

/// A slot and the path whose before-image it holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SlotPath {
    /// The slot's name.
    pub slot: u32,
    /// The path in the workspace.
    #[serde(with = "spelled")]
    pub path: PathBuf,
}

/// `before/<n>/manifest.json`: enough to undo a batch.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// 1.
    pub version: u32,
    /// Every change that was applied, with what was there and what is there now.
    pub changes: Vec<Change>,
    /// The before-images that are kept, beside the manifest.
    pub slots: Vec<SlotPath>,
    /// Paths whose before-image was too large to copy; empty wherever it could be moved.
    pub dropped: Vec<String>,
    /// The attributes that were changed in place.
    pub attributes: Vec<Operation>,
    /// Whether the batch applied the changes or took them back.
    #[serde(default)]
    pub kind: BatchKind,
    /// New directories that were there already.
    #[serde(default)]
    pub existed: Vec<String>,
    /// How many receipts the run had when the batch began.
    #[serde(default)]
    pub after_seq: u64,
}

/// One step that a single call does, with what is needed to tell whether it was done and to undo it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "do")]
pub enum Operation {
    /// From the stage to a free path.
    Place {
        /// The slot's name.
        slot: u32,
        /// The path.
        #[serde(with = "spelled")]
        path: PathBuf,
        /// The staged node's inode.
        inode: u64,
    },
    /// A staged node and what is at the path change places.
    Exchange {
        /// The slot's name.
        slot: u32,
        /// The path.
        #[serde(with = "spelled")]
        path: PathBuf,
        /// The staged node's inode.
        inode: u64,
        /// The replaced node's inode.
        old: u64,
    },
    /// Out of the workspace into the stage.
    Retire {
        /// The slot's name.
        slot: u32,
        /// The path.
        #[serde(with = "spelled")]
        path: PathBuf,
        /// The node's inode.
        inode: u64,
    },
    /// Within the workspace.
    Rename {
        /// From here.
        #[serde(with = "spelled")]
        from: PathBuf,
        /// To a free path.
        #[serde(with = "spelled")]
        path: PathBuf,
        /// The node's inode.
        inode: u64,
    },
    /// Permission bits, time and extended attributes, in place.
    Attributes {
        /// The path.
        #[serde(with = "spelled")]
        path: PathBuf,
        /// The node's inode.
        inode: u64,
        /// As they are.
        before: Attributes,
        /// As they are to be.
        after: Attributes,
    },
}

impl Operation {
    fn path(&self) -> &Path {
        match self {
            Operation::Place { path, .. }
            | Operation::Exchange { path, .. }
            | Operation::Retire { path, .. }
            | Operation::Rename { path, .. }
            | Operation::Attributes { path, .. } => path,
        }
    }
}

/// What of a node can change without its content.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attributes {
    /// Permission bits.
    pub mode: u32,
    /// Modification time; none leaves it, as for directories, whose time follows from their entries.
    pub mtime_ns: Option<i64>,
    /// `user.*` names and values, hexadecimal.
    pub xattrs: Vec<(String, String)>,
}

/// Applies these changes, which are a subset of one scan's; `remaining` are the paths that stay pending. Of no changes
/// nothing is written.
///
/// While something stays pending, what was applied leaves the run's layer; see [`layer`].
///
/// # Errors
/// [`ApplyError`]. Except for [`ApplyError::RollBack`] the workspace is exactly as before, inode by inode.
pub fn apply(batch: &Batch<'_>, changes: &[Change], remaining: &[PathBuf]) -> Result<Applied, ApplyError> {
    place(batch, changes, remaining, None)
}

/// Puts back what earlier batches of the run replaced, moved or removed, as one batch of its own: it can be reverted
/// in its turn. `remaining` are the paths that stay pending in the run's layer.
///
/// # Errors
/// As [`apply`].
pub fn revert(batch: &Batch<'_>, reversal: &Reversal, remaining: &[PathBuf]) -> Result<Applied, ApplyError> {
    place(batch, &reversal.changes, remaining, Some(reversal))
}

fn place(
    batch: &Batch<'_>,
    changes: &[Change],
    remaining: &[PathBuf],
    reversal: Option<&Reversal>,
) -> Result<Applied, ApplyError> {
    if changes.is_empty() {
        return Ok(Applied::default());
    }
    let _lock = lock(batch.workspace, LOCK_WAIT)?;
    let conflicts = conflicts(batch, changes)?;
    if !conflicts.is_empty() {
        return Err(ApplyError::Conflict { conflicts });
    }
    let stage = Stage::open(batch)?;
    let prepared = Prepared::new(batch, &stage, changes, remaining, reversal);
    let result = prepared.and_then(|prepared| prepared.carry_out());
    match result {
        Ok(applied) => Ok(applied),
        Err(Ended::Died) => Err(ApplyError::Busy),
        Err(Ended::Error(error)) => {
            // The journal of a batch whose undoing failed still needs the stage.
            if !matches!(error, ApplyError::RollBack { .. }) {
                stage.remove(batch.run_dir, batch.workspace)?;
            }
            Err(error)
        }
    }
}

/// How a batch ended early.
enum Ended {
    Error(ApplyError),
    /// A test's stand-in for a killed process: nothing after it may run.
    #[cfg_attr(not(test), allow(dead_code, reason = "only a test's batch dies"))]
    Died,
}

impl From<ApplyError> for Ended {
    fn from(error: ApplyError) -> Ended {
        Ended::Error(error)
    }
}

/// Finishes or undoes what a crash left of a batch. Doing it again changes nothing.
///
/// A batch without its commit mark is rolled back: its staged contents may be incomplete on disk, its before-images
/// are whole. One with the mark is rolled forward.
///
/// # Errors
/// [`ApplyError::RollBack`] where something is in the way of a before-image; the journal stays.
pub fn recover(run_dir: &OwnedFd, workspace: &OwnedFd) -> Result<Recovered, ApplyError> {
    recover_within(run_dir, workspace, LOCK_WAIT)
}

/// As [`recover`], waiting at most so long for another batch in the same workspace.
///
/// # Errors
/// As [`recover`], and [`ApplyError::Busy`] when the other batch took longer.
pub fn recover_within(run_dir: &OwnedFd, workspace: &OwnedFd, wait: Duration) -> Result<Recovered, ApplyError> {
    if let Some(journal) = read_journal(run_dir, COMMITTED)? {
        let _lock = lock(workspace, wait)?;
        clean_up(&journal, run_dir, workspace)?;
        return Ok(Recovered::RolledForward);
    }
    if let Some(journal) = read_journal(run_dir, JOURNAL)? {
        let _lock = lock(workspace, wait)?;
        roll_back(&journal, run_dir, workspace)?;
        return Ok(Recovered::RolledBack);
    }
    // A crash while staging leaves a stage without a journal; the workspace was not touched.
    tree::remove(run_dir.as_fd(), OsStr::new(JOURNAL_NEW)).map_err(ours("remove the journal"))?;
    tree::remove(run_dir.as_fd(), OsStr::new("stage")).map_err(ours("remove the stage"))?;
    if let Some(name) = tree::read_ours(run_dir.as_fd(), "stage.name").map_err(ours("read the stage's name"))? {
        if let Some(name) = stage_name(&name) {
            tree::remove(workspace.as_fd(), OsStr::new(&name)).map_err(ours("remove the stage"))?;
        }
        tree::remove(run_dir.as_fd(), OsStr::new("stage.name")).map_err(ours("remove the stage's name"))?;
    }
    Ok(Recovered::Nothing)
}

/// The paths that no batch applied yet, or none where no batch was applied at all.
///
/// # Errors
/// [`ApplyError::Ours`] when the file is there and cannot be read.
pub fn pending(run_dir: &OwnedFd) -> Result<Option<BTreeSet<PathBuf>>, ApplyError> {
    let Some(bytes) = tree::read_ours(run_dir.as_fd(), PENDING).map_err(ours("read the pending paths"))? else {
        return Ok(None);
    };
    let texts: Vec<String> = parse(&bytes, "read the pending paths")?;
    let mut paths = BTreeSet::new();
    for text in texts {
        let path = super::path::unspell(&text)
            .map_err(|error| ours("read the pending paths")(io::Error::new(io::ErrorKind::InvalidData, error)))?;
        paths.insert(path);
    }
    Ok(Some(paths))
}

/// Keeps of a scan what no batch applied yet.
///
/// After a batch the workspace holds the applied changes and perhaps later ones of its user, which a fresh scan would
/// take for changes of the run.
///
/// # Errors
/// As [`pending`].
pub fn keep_pending(run_dir: &OwnedFd, mut set: ChangeSet) -> Result<ChangeSet, ApplyError> {
    if let Some(pending) = pending(run_dir)? {
        set.changes.retain(|change| pending.contains(&change.path));
        set.skipped.retain(|skipped| pending.contains(&skipped.path));
    }
    Ok(set)
}

/// Throws a run's unapplied changes away: its layers, stage and mirror. Before-images stay.
///
/// # Errors
/// [`ApplyError::Ours`].
pub fn discard(run_dir: &OwnedFd) -> Result<(), ApplyError> {
    remove_layer(run_dir)?;
    write_pending(run_dir, &[])
}

/// Removes a run's layer and stage or mirror, when all that it changed was applied. Before-images stay.
///
/// # Errors
/// [`ApplyError::Ours`].
pub fn remove_layer(run_dir: &OwnedFd) -> Result<(), ApplyError> {
    let remove = |name| tree::remove(run_dir.as_fd(), OsStr::new(name)).map_err(ours("remove the run's layer"));
    ["layer", "stage"].into_iter().try_for_each(remove)
}

/// The manifests of the batches that a run applied, oldest first, with their directories' names.
///
/// # Errors
/// [`ApplyError::Ours`].
pub fn manifests(run_dir: &OwnedFd) -> Result<Vec<(PathBuf, Manifest)>, ApplyError> {
    let mut found = Vec::new();
    let before = match tree::open_directory(run_dir.as_fd(), Path::new("before"), kernel::OFlags::RDONLY) {
        Ok(before) => before,
        Err(error) if tree::absent(&error) => return Ok(found),
        Err(error) => return Err(ours("list the before-images")(error)),
    };
    let mut numbers: Vec<u32> = tree::names(before.as_fd())
        .map_err(ours("list the before-images"))?
        .iter()
        .filter_map(|name| name.to_str()?.parse().ok())
        .collect();
    numbers.sort_unstable();
    for number in numbers {
        let path = Path::new("before").join(number.to_string());
        let directory = tree::open_directory(run_dir.as_fd(), &path, kernel::OFlags::RDONLY)
            .map_err(ours("open a before-image"))?;
        if let Some(bytes) =
            tree::read_ours(directory.as_fd(), MANIFEST).map_err(ours("read a before-image's manifest"))?
        {
            found.push((path, parse(&bytes, "read a before-image's manifest")?));
        }
    }
    Ok(found)
}

fn ours(deed: &'static str) -> impl FnOnce(io::Error) -> ApplyError {
    move |source| ApplyError::Ours { deed, source }
}

fn parse<T: for<'de> Deserialize<'de>>(bytes: &[u8], deed: &'static str) -> Result<T, ApplyError> {
    serde_json::from_slice(bytes).map_err(|error| ours(deed)(io::Error::new(io::ErrorKind::InvalidData, error)))
}

fn written<T: Serialize>(value: &T, deed: &'static str) -> Result<Vec<u8>, ApplyError> {
    serde_json::to_vec(value).map_err(|error| ours(deed)(io::Error::new(io::ErrorKind::InvalidData, error)))
}

/// Names and values, hexadecimal, as [`Attributes::xattrs`] holds them.
pub(super) fn spelled_xattrs(xattrs: &[(OsString, Vec<u8>)]) -> Vec<(String, String)> {
    xattrs.iter().map(|(name, value)| (hex::encode(name.as_bytes()), hex::encode(value))).collect()
}

fn spelled_paths(paths: &[PathBuf]) -> Vec<String> {
    paths.iter().map(|path| super::path::spell(path)).collect()
}

fn write_pending(run_dir: &OwnedFd, remaining: &[String]) -> Result<(), ApplyError> {
    let deed = "write the pending paths";
    tree::write_durably(run_dir.as_fd(), PENDING, &written(&remaining, deed)?).map_err(ours(deed))
}

fn read_journal(run_dir: &OwnedFd, name: &str) -> Result<Option<Journal>, ApplyError> {
    match tree::read_ours(run_dir.as_fd(), name).map_err(ours("read the journal"))? {
        Some(bytes) => Ok(Some(parse(&bytes, "read the journal")?)),
        None => Ok(None),
    }
}

/// Takes the workspace for one batch: flock(2) on its root, released when the handle closes.
fn lock(workspace: &OwnedFd, wait: Duration) -> Result<OwnedFd, ApplyError> {
    let handle = tree::open_directory(workspace.as_fd(), Path::new(""), kernel::OFlags::RDONLY)
        .map_err(ours("open the workspace"))?;
    let until = Instant::now() + wait;
    loop {
        match kernel::flock(&handle, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(handle),
            // A file system without locks: the checks by inode still stand.
            Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::NOSYS | rustix::io::Errno::INVAL) => {
                return Ok(handle)
            }
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) if Instant::now() < until => {
                std::thread::sleep(Duration::from_millis(20));
            }
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => return Err(ApplyError::Busy),
            Err(error) => return Err(ours("lock the workspace")(error.into())),
        }
    }
}

/// Every change whose place in the workspace is not as the run saw it.
///
/// # Errors
/// [`ApplyError::Step`] when the workspace cannot be read.
pub fn conflicts(batch: &Batch<'_>, changes: &[Change]) -> Result<Vec<Conflict>, ApplyError> {
    let mut found = Vec::new();
    let mut here = Parents::new(batch.workspace.as_fd());
    let touched = touched(batch.run_dir)?;
    let new_directories: BTreeSet<&Path> = changes
        .iter()
        .filter(|change| change.after.as_ref().is_some_and(|after| after.kind == NodeType::Directory))
        .map(|change| change.path.as_path())
        .collect();
    let moved_from: BTreeSet<&Path> = changes
        .iter()
        .filter_map(|change| match &change.kind {
            ChangeKind::Moved { from } => Some(from.as_path()),
            ChangeKind::Created | ChangeKind::Modified | ChangeKind::Deleted | ChangeKind::Attributes => None,
        })
        .collect();
    for change in changes {
        let step = |source| ApplyError::Step { path: printable(&change.path), source };
        let mut say = |path: &Path, reason: &str| {
            found.push(Conflict { path: path.to_path_buf(), reason: reason.to_owned() });
        };
        if change.vanished {
            say(&change.path, "was deleted meanwhile");
            continue;
        }
        if let Some(before) = &change.before {
            let at = match &change.kind {
                ChangeKind::Moved { from } => from,
                ChangeKind::Created | ChangeKind::Modified | ChangeKind::Deleted | ChangeKind::Attributes => {
                    &change.path
                }
            };
            match here.look(at).map_err(step)? {
                None => say(at, "was deleted meanwhile"),
                Some(stat) => {
                    let now = Summary::of(&stat);
                    if now.kind != before.kind {
                        say(at, "became something else meanwhile");
                    } else if now.kind != NodeType::Directory
                        && (now.inode != before.inode
                            || now.ctime_ns != before.ctime_ns
                            || (now.ctime_ns > batch.since_ns && touched.get(&now.inode) != Some(&now.ctime_ns)))
                    {
                        say(at, "was changed meanwhile");
                    }
                }
            }
        }
        if matches!(change.kind, ChangeKind::Created | ChangeKind::Moved { .. }) {
            match here.look(&change.path).map_err(step)? {
                Some(stat) => {
                    let both = tree::kind_of(&stat) == FileType::Directory
                        && change.kind == ChangeKind::Created
                        && new_directories.contains(change.path.as_path());
                    if !both && !moved_from.contains(change.path.as_path()) {
                        say(&change.path, "was created meanwhile");
                    }
                }
                None => {
                    let parent = change.path.parent().unwrap_or(Path::new(""));
                    if !new_directories.contains(parent)
                        && tree::open_directory_forced(batch.workspace.as_fd(), parent).is_err()
                    {
                        say(&change.path, "has lost its directory meanwhile");
                    }
                }
            }
        }
    }
    Ok(found)
}

/// Keeps the last directory open: changes come in the order of their paths.
struct Parents<'a> {
    root: BorrowedFd<'a>,
    last: Option<(PathBuf, Option<OwnedFd>)>,
}

impl<'a> Parents<'a> {
    fn new(root: BorrowedFd<'a>) -> Parents<'a> {
        Parents { root, last: None }
    }

    fn parent<'p>(&mut self, path: &'p Path) -> io::Result<(BorrowedFd<'_>, &'p OsStr)> {
        let name = path.file_name().ok_or_else(|| io::Error::from(rustix::io::Errno::INVAL))?;
        let parent = path.parent().unwrap_or(Path::new(""));
        if !matches!(&self.last, Some((last, Some(_))) if last == parent) {
            let handle = tree::open_directory_forced(self.root, parent)?;
            self.last = Some((parent.to_path_buf(), Some(handle)));
        }
        match &self.last {
            Some((_, Some(handle))) => Ok((handle.as_fd(), name)),
            Some((_, None)) | None => Err(rustix::io::Errno::NOENT.into()),
        }
    }

    fn look(&mut self, path: &Path) -> io::Result<Option<rustix::fs::Stat>> {
        match self.parent(path) {
            Ok((directory, name)) => tree::look_at(directory, name),
            Err(error) if tree::absent(&error) || matches!(error.raw_os_error(), Some(libc::ENOTDIR | libc::ELOOP)) => {
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }
}

/// Where new contents wait, on the workspace's file system.
struct Stage {
    directory: OwnedFd,
    /// Its name in the workspace, or none for `stage` in the run's directory.
    in_workspace: Option<String>,
}

/// The staging directory's name where it must lie in the workspace.
fn workspace_stage_name(run: &RunId) -> String {
    format!(".tollgate-{run}")
}

/// Reads a name of [`workspace_stage_name`] back, and nothing else.
fn stage_name(bytes: &[u8]) -> Option<String> {
    let name = std::str::from_utf8(bytes).ok()?;
    (name.starts_with(".tollgate-") && !name.contains('/')).then(|| name.to_owned())
}

impl Stage {
    fn open(batch: &Batch<'_>) -> Result<Stage, ApplyError> {
        let here =
            tree::rename_works(batch.run_dir.as_fd(), batch.workspace.as_fd()).map_err(ours("compare mounts"))?;
        let (parent, name, in_workspace) = if here {
            (batch.run_dir, "stage".to_owned(), None)
        } else {
            let name = workspace_stage_name(batch.run);
            // Known before it exists, so that a crash in between leaves nothing that nobody finds.
            tree::write_durably(batch.run_dir.as_fd(), "stage.name", name.as_bytes())
                .map_err(ours("write the stage's name"))?;
            (batch.workspace, name.clone(), Some(name))
        };
        tree::remove(parent.as_fd(), OsStr::new(&name)).map_err(ours("clear an old stage"))?;
        let directory = tree::ensure_directory_at(parent.as_fd(), OsStr::new(&name)).map_err(ours("make the stage"))?;
        Ok(Stage { directory, in_workspace })
    }

    fn remove(&self, run_dir: &OwnedFd, workspace: &OwnedFd) -> Result<(), ApplyError> {
        remove_stage(self.in_workspace.as_deref(), run_dir, workspace)
    }
}

fn remove_stage(in_workspace: Option<&str>, run_dir: &OwnedFd, workspace: &OwnedFd) -> Result<(), ApplyError> {
    match in_workspace {
        Some(name) => {
            tree::remove(workspace.as_fd(), OsStr::new(name)).map_err(ours("remove the stage"))?;
            tree::remove(run_dir.as_fd(), OsStr::new("stage.name")).map_err(ours("remove the stage's name"))
        }
        None => tree::remove(run_dir.as_fd(), OsStr::new("stage")).map_err(ours("remove the stage")),
    }
}

/// A batch whose contents are staged and whose journal is made, not yet begun.
struct Prepared<'a> {
    batch: &'a Batch<'a>,
    stage: &'a Stage,
    reversal: Option<&'a Reversal>,
    journal: Journal,
    /// What lies below each directory that is moved or taken out as a whole, as the run's scan saw it.
    members: HashMap<PathBuf, BTreeMap<PathBuf, Summary>>,
    before: HashMap<PathBuf, Summary>,
    /// What is staged, by its path in the stage; none when there is too much of it to be synced one by one.
    staged: Option<Vec<(PathBuf, NodeType)>>,
    steps: std::cell::Cell<usize>,
}

impl<'a> Prepared<'a> {
    fn new(
        batch: &'a Batch<'a>,
        stage: &'a Stage,
        changes: &[Change],
        remaining: &[PathBuf],
        reversal: Option<&'a Reversal>,
    ) -> Result<Prepared<'a>, Ended> {
        let mut prepared = Prepared {
            batch,
            stage,
            reversal,
            journal: Journal {
                version: 1,
                run: batch.run.clone(),
                staged_in_workspace: stage.in_workspace.clone(),
                number: next_number(batch.run_dir)?,
                operations: Vec::new(),
                modes: Vec::new(),
                changes: changes.to_vec(),
                slots: Vec::new(),
                remaining: spelled_paths(remaining),
                marked: Vec::new(),
                kind: reversal.map_or(BatchKind::Apply, |reversal| reversal.kind),
                existed: Vec::new(),
                consumed: reversal.map_or_else(Vec::new, |reversal| reversal.consumed.clone()),
                after_seq: reversal.map_or(0, |reversal| reversal.after_seq),
            },
            members: members(changes),
            before: HashMap::new(),
            staged: None,
            steps: std::cell::Cell::new(0),
        };
        prepared.step()?;
        prepared.plan(changes)?;
        prepared.note_modes(changes)?;
        Ok(prepared)
    }

    /// Stages what is placed or exchanged, and lists the operations: first what is put, then what moves, then what
    /// goes, and attributes last, when every path is where it will be. A batch that goes back does it the other way
    /// round, because what is possible in one order is possible backwards in the reverse.
    fn plan(&mut self, changes: &[Change]) -> Result<(), Ended> {
        let mut stager = Stager::new(self.batch, self.stage, self.reversal);
        let mut moves = Vec::new();
        let mut retired = Vec::new();
        let mut attributes = Vec::new();
        let mut slot: u32 = 0;
        // The new tree that the changes after it may belong to: its top and slot.
        let mut tree_top: Option<(PathBuf, u32)> = None;
        let mut group_tops: BTreeMap<u32, PathBuf> = BTreeMap::new();
        for change in changes {
            self.step()?;
            let failed = |source| Ended::Error(ApplyError::Stage { path: printable(&change.path), source });
            if let Some(before) = &change.before {
                let at = match &change.kind {
                    ChangeKind::Moved { from } => from.clone(),
                    ChangeKind::Created | ChangeKind::Modified | ChangeKind::Deleted | ChangeKind::Attributes => {
                        change.path.clone()
                    }
                };
                self.before.insert(at, before.clone());
            }
            let inner_of_group = change.group.is_some_and(|group| {
                let top = group_tops.entry(group).or_insert_with(|| change.path.clone());
                *top != change.path
            });
            match &change.kind {
                ChangeKind::Created | ChangeKind::Modified => {
                    if let Some((top, slot)) = &tree_top {
                        if let Ok(rest) = change.path.strip_prefix(top) {
                            stager.stage(change, &Path::new(&slot.to_string()).join(rest)).map_err(failed)?;
                            continue;
                        }
                    }
                    let exists = change.kind == ChangeKind::Created
                        && tree::look(self.batch.workspace.as_fd(), &change.path).map_err(failed)?.is_some();
                    if exists {
                        // Somebody made the same directory; what lies below is placed in it one by one.
                        self.journal.existed.push(super::path::spell(&change.path));
                        continue;
                    }
                    slot += 1;
                    let inode = stager.stage(change, Path::new(&slot.to_string())).map_err(failed)?;
                    if change.after.as_ref().is_some_and(|after| after.kind == NodeType::Directory) {
                        tree_top = Some((change.path.clone(), slot));
                    }
                    self.journal.operations.push(match &change.before {
                        Some(before) => {
                            self.journal.slots.push(SlotPath { slot, path: change.path.clone() });
                            Operation::Exchange { slot, path: change.path.clone(), inode, old: before.inode }
                        }
                        None => Operation::Place { slot, path: change.path.clone(), inode },
                    });
                }
                ChangeKind::Deleted if inner_of_group => {}
                ChangeKind::Deleted => {
                    let Some(before) = &change.before else { continue };
                    slot += 1;
                    self.journal.slots.push(SlotPath { slot, path: change.path.clone() });
                    retired.push(Operation::Retire { slot, path: change.path.clone(), inode: before.inode });
                }
                ChangeKind::Moved { .. } if inner_of_group => {}
                ChangeKind::Moved { from } => {
                    let Some(before) = &change.before else { continue };
                    moves.push(Operation::Rename {
                        from: from.clone(),
                        path: change.path.clone(),
                        inode: before.inode,
                    });
                }
                ChangeKind::Attributes => {
                    let Some(before) = &change.before else { continue };
                    if let Some((as_is, as_wanted)) =
                        self.reversal.and_then(|reversal| reversal.attributes.get(&change.path))
                    {
                        attributes.push(Operation::Attributes {
                            path: change.path.clone(),
                            inode: before.inode,
                            before: as_is.clone(),
                            after: as_wanted.clone(),
                        });
                    } else if before.kind == NodeType::File && before.links > 1 {
                        // Another name of the inode may lie outside the workspace: it must keep what it has.
                        slot += 1;
                        let inode = stager.stage(change, Path::new(&slot.to_string())).map_err(failed)?;
                        self.journal.slots.push(SlotPath { slot, path: change.path.clone() });
                        let old = before.inode;
                        self.journal.operations.push(Operation::Exchange {
                            slot,
                            path: change.path.clone(),
                            inode,
                            old,
                        });
                    } else {
                        attributes.push(self.attributes(change, before).map_err(failed)?);
                    }
                }
            }
        }
        (self.staged, self.journal.marked) = stager.finish()?;
        let put = std::mem::take(&mut self.journal.operations);
        self.journal.operations = match self.journal.kind {
            BatchKind::Apply => put.into_iter().chain(moves).chain(retired).chain(attributes).collect(),
            BatchKind::Undo => {
                let (placed, exchanged): (Vec<Operation>, Vec<Operation>) =
                    put.into_iter().partition(|operation| matches!(operation, Operation::Place { .. }));
                let back = moves.into_iter().rev();
                attributes.into_iter().chain(placed).chain(back).chain(exchanged).chain(retired).collect()
            }
        };
        Ok(())
    }

    fn attributes(&self, change: &Change, before: &Summary) -> io::Result<Operation> {
        let read = |root: &OwnedFd| -> io::Result<Vec<(String, String)>> {
            let (parent, name) = tree::parent_of(root.as_fd(), &change.path)?;
            let handle = tree::open_at(parent.as_fd(), name)?;
            Ok(spelled_xattrs(&tree::user_xattrs(handle.as_fd())?))
        };
        let after = change.after.as_ref().ok_or_else(|| io::Error::from(rustix::io::Errno::INVAL))?;
        let time = |summary: &Summary| (summary.kind != NodeType::Directory).then_some(summary.mtime_ns);
        Ok(Operation::Attributes {
            path: change.path.clone(),
            inode: before.inode,
            before: Attributes { mode: before.mode, mtime_ns: time(before), xattrs: read(self.batch.workspace)? },
            after: Attributes { mode: after.mode, mtime_ns: time(after), xattrs: read(self.batch.source)? },
        })
    }

    /// Notes the directories whose rights will be lent, so that a crash in between can put them back.
    fn note_modes(&mut self, changes: &[Change]) -> Result<(), Ended> {
        let mut paths: BTreeSet<&Path> = BTreeSet::new();
        for change in changes {
            let from = match &change.kind {
                ChangeKind::Moved { from } => Some(from.as_path()),
                ChangeKind::Created | ChangeKind::Modified | ChangeKind::Deleted | ChangeKind::Attributes => None,
            };
            for end in [Some(change.path.as_path()), from].into_iter().flatten() {
                // An ancestor that is in the set has its own ancestors there.
                for path in end.ancestors().filter(|path| !path.as_os_str().is_empty()) {
                    if !paths.insert(path) {
                        break;
                    }
                }
            }
        }
        let mut here = Parents::new(self.batch.workspace.as_fd());
        for path in paths {
            let step = |source| Ended::Error(ApplyError::Step { path: printable(path), source });
            let Some(stat) = here.look(path).map_err(step)? else { continue };
            let mode = tree::permissions(&stat);
            if tree::kind_of(&stat) == FileType::Directory && mode & 0o700 != 0o700 {
                self.journal.modes.push(PathMode { path: path.to_path_buf(), mode });
            }
        }
        Ok(())
    }

    /// Writes the journal, does the operations, commits and cleans up.
    fn carry_out(self) -> Result<Applied, Ended> {
        self.make_durable()?;
        self.step()?;
        self.begin().map_err(ours("write the journal"))?;
        for operation in &self.journal.operations {
            let done = self.step().and_then(|()| self.perform(operation));
            match done {
                Ok(()) => {}
                Err(Ended::Died) => return Err(Ended::Died),
                Err(Ended::Error(error)) => {
                    roll_back(&self.journal, self.batch.run_dir, self.batch.workspace)?;
                    return Err(error.into());
                }
            }
        }
        let committed = self.step().and_then(|()| self.commit());
        match committed {
            Ok(()) => {}
            Err(Ended::Died) => return Err(Ended::Died),
            Err(Ended::Error(error)) => {
                roll_back(&self.journal, self.batch.run_dir, self.batch.workspace)?;
                return Err(error.into());
            }
        }
        // Past this point the batch has happened: a failure to clean up is for recover, not for the caller.
        if let Err(Ended::Died) = self.step() {
            return Err(Ended::Died);
        }
        if let Err(error) = clean_up(&self.journal, self.batch.run_dir, self.batch.workspace) {
            tracing::warn!(%error, "a batch was applied and its cleaning up failed; it is tried again later");
        }
        let before = Path::new("before").join(self.journal.number.to_string());
        Ok(Applied { changes: self.journal.changes.len(), before: Some(before) })
    }

    /// Waits until everything that the operations will need is on disk: what is staged, the journal under the name
    /// that means nothing yet, and what will be said about the batch when it is done.
    fn make_durable(&self) -> Result<(), ApplyError> {
        let deed = "write the journal";
        let (stage, run_dir) = (self.stage.directory.as_fd(), self.batch.run_dir.as_fd());
        let file = |directory: BorrowedFd<'_>, name: &str, text: &[u8]| -> Result<OwnedFd, ApplyError> {
            Ok(tree::write_anew(directory, name, text).map_err(ours(deed))?.into())
        };
        let mut handles = vec![file(run_dir, JOURNAL_NEW, &written(&self.journal, deed)?)?];
        if self.stage.in_workspace.is_none() {
            handles.push(file(stage, MANIFEST, &written(&manifest_of(&self.journal), deed)?)?);
            handles.push(file(stage, PENDING, &written(&self.journal.remaining, deed)?)?);
        }
        let deed = "sync the stage";
        for (path, kind) in self.staged.iter().flatten() {
            let opened = match kind {
                NodeType::Directory => tree::open_listing(stage, path),
                NodeType::File => tree::open_file(stage, path).map(OwnedFd::from),
                // In their directory's own bytes.
                NodeType::Link | NodeType::Special => continue,
            };
            handles.push(opened.map_err(ours(deed))?);
        }
        if self.staged.is_none() {
            // The journal may lie on another file system than the stage.
            durable::everything(stage).map_err(ours(deed))?;
        }
        handles.push(self.stage.directory.try_clone().map_err(ours(deed))?);
        durable::each(&handles).map_err(ours(deed))
    }

    /// The journal gets its name: from here on a crash is undone by it.
    fn begin(&self) -> io::Result<()> {
        let run_dir = self.batch.run_dir.as_fd();
        kernel::renameat(run_dir, JOURNAL_NEW, run_dir, JOURNAL)?;
        Ok(kernel::fsync(run_dir)?)
    }

    fn commit(&self) -> Result<(), Ended> {
        let deed = "commit the journal";
        match self.touched_in_workspace() {
            Some(handles) => durable::each(&handles),
            None => durable::everything(self.batch.workspace.as_fd()),
        }
        .map_err(ours(deed))?;
        let run_dir = self.batch.run_dir.as_fd();
        kernel::renameat(run_dir, JOURNAL, run_dir, COMMITTED).map_err(|error| ours(deed)(error.into()))?;
        kernel::fsync(run_dir).map_err(|error| ours(deed)(error.into()))?;
        Ok(())
    }

    /// Everything whose sync puts the operations on disk; none where there is too much of it, or where one of the
    /// directories has moved on with the batch.
    fn touched_in_workspace(&self) -> Option<Vec<OwnedFd>> {
        let parent = |path: &Path| path.parent().unwrap_or(Path::new("")).to_path_buf();
        let mut directories = BTreeSet::new();
        let mut nodes = Vec::new();
        for operation in &self.journal.operations {
            match operation {
                Operation::Place { path, .. } | Operation::Exchange { path, .. } | Operation::Retire { path, .. } => {
                    directories.insert(parent(path));
                }
                Operation::Rename { from, path, .. } => {
                    directories.insert(parent(from));
                    directories.insert(parent(path));
                }
                Operation::Attributes { path, .. } => nodes.push(path),
            }
            if directories.len() + nodes.len() > durable::FEW {
                return None;
            }
        }
        let workspace = self.batch.workspace.as_fd();
        let mut handles = vec![self.stage.directory.try_clone().ok()?];
        for path in directories {
            handles.push(tree::open_listing(workspace, &path).ok()?);
        }
        for path in nodes {
            let opened = tree::open_file(workspace, path).map(OwnedFd::from);
            handles.push(opened.or_else(|_| tree::open_listing(workspace, path)).ok()?);
        }
        Some(handles)
    }

    fn perform(&self, operation: &Operation) -> Result<(), Ended> {
        let path = operation.path();
        let failed = |source: io::Error| {
            let conflict = |reason: &str| ApplyError::Conflict {
                conflicts: vec![Conflict { path: path.to_path_buf(), reason: reason.to_owned() }],
            };
            Ended::Error(match source.raw_os_error() {
                Some(libc::EEXIST) => conflict("was created meanwhile"),
                Some(libc::ENOENT) => conflict("was deleted meanwhile"),
                Some(libc::ELOOP | libc::ENOTDIR) => conflict("became something else meanwhile"),
                _ => ApplyError::Step { path: printable(path), source },
            })
        };
        let changed = || {
            Ended::Error(ApplyError::Conflict {
                conflicts: vec![Conflict { path: path.to_path_buf(), reason: "was changed meanwhile".to_owned() }],
            })
        };
        let stage = self.stage.directory.as_fd();
        let workspace = self.batch.workspace.as_fd();
        match operation {
            Operation::Place { slot, path, .. } => {
                let (parent, name) = tree::parent_of(workspace, path).map_err(failed)?;
                tree::rename(stage, slot_name(*slot).as_os_str(), parent.as_fd(), name, RenameFlags::NOREPLACE)
                    .map_err(failed)
            }
            Operation::Exchange { slot, path, .. } => {
                let (parent, name) = tree::parent_of(workspace, path).map_err(failed)?;
                let slot = slot_name(*slot);
                match tree::rename(stage, &slot, parent.as_fd(), name, RenameFlags::EXCHANGE) {
                    // A file system that cannot exchange: out first, then in.
                    Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                        let old = old_name(&slot);
                        tree::rename(parent.as_fd(), name, stage, &old, RenameFlags::NOREPLACE).map_err(failed)?;
                        tree::rename(stage, &slot, parent.as_fd(), name, RenameFlags::NOREPLACE).map_err(failed)?;
                        tree::rename(stage, &old, stage, &slot, RenameFlags::NOREPLACE).map_err(failed)?;
                    }
                    other => other.map_err(failed)?,
                }
                if self.is_as_seen(stage, Path::new(&slot), path).map_err(failed)? {
                    Ok(())
                } else {
                    Err(changed())
                }
            }
            Operation::Retire { slot, path, .. } => {
                let (parent, name) = tree::parent_of(workspace, path).map_err(failed)?;
                let slot = slot_name(*slot);
                tree::rename(parent.as_fd(), name, stage, &slot, RenameFlags::NOREPLACE).map_err(failed)?;
                if self.is_as_seen(stage, Path::new(&slot), path).map_err(failed)? {
                    Ok(())
                } else {
                    Err(changed())
                }
            }
            Operation::Rename { from, path, .. } => {
                let (from_parent, from_name) = tree::parent_of(workspace, from).map_err(failed)?;
                let (parent, name) = tree::parent_of(workspace, path).map_err(failed)?;
                tree::rename(from_parent.as_fd(), from_name, parent.as_fd(), name, RenameFlags::NOREPLACE)
                    .map_err(failed)?;
                if self.is_as_seen(workspace, path, from).map_err(failed)? {
                    return Ok(());
                }
                // It is somebody else's newer file, which the journal's inode does not name: back with it here.
                tree::rename(parent.as_fd(), name, from_parent.as_fd(), from_name, RenameFlags::NOREPLACE)
                    .map_err(|source| ApplyError::RollBack { path: printable(from), source })?;
                Err(changed())
            }
            Operation::Attributes { path, inode, after, .. } => {
                set_attributes(workspace, path, *inode, after).map_err(failed)
            }
        }
    }

    /// Whether what was just renamed is what the run saw at `origin`: closes the window between check and rename.
    fn is_as_seen(&self, root: BorrowedFd<'_>, now_at: &Path, origin: &Path) -> io::Result<bool> {
        let Some(before) = self.before.get(origin) else { return Ok(true) };
        let Some(stat) = tree::look(root, now_at)? else { return Ok(false) };
        if !same_node(before, &Summary::of(&stat)) {
            return Ok(false);
        }
        if before.kind != NodeType::Directory {
            return Ok(true);
        }
        let nothing = BTreeMap::new();
        let expected = self.members.get(origin).unwrap_or(&nothing);
        let mut count = 0;
        let mut pending = vec![PathBuf::new()];
        while let Some(directory) = pending.pop() {
            let listing = tree::open_listing(root, &join(now_at, &directory))?;
            for name in tree::names(listing.as_fd())? {
                let path = directory.join(&name);
                let Some(stat) = tree::look_at(listing.as_fd(), &name)? else { return Ok(false) };
                let now = Summary::of(&stat);
                match expected.get(&path) {
                    Some(before) if same_node(before, &now) => count += 1,
                    Some(_) | None => return Ok(false),
                }
                if now.kind == NodeType::Directory {
                    pending.push(path);
                }
            }
        }
        Ok(count == expected.len())
    }

    /// A point at which a test may stop the batch.
    fn step(&self) -> Result<(), Ended> {
        let step = self.steps.get();
        self.steps.set(step + 1);
        crash::reach(Point::BatchStep);
        #[cfg(test)]
        match self.batch.stop {
            Some((at, Stop::Die)) if at == step => return Err(Ended::Died),
            Some((at, Stop::Fail)) if at == step => {
                let source = io::Error::from(rustix::io::Errno::IO);
                return Err(ApplyError::Step { path: "injected".to_owned(), source }.into());
            }
            Some(_) | None => {}
        }
        Ok(())
    }
}

fn join(root: &Path, rest: &Path) -> PathBuf {
    if rest.as_os_str().is_empty() {
        root.to_path_buf()
    } else {
        root.join(rest)
    }
}

/// The same inode with the same content, as far as a stat can tell; a rename changes the inode's change time.
fn same_node(before: &Summary, now: &Summary) -> bool {
    before.kind == now.kind
        && before.inode == now.inode
        && (before.kind == NodeType::Directory || (before.size, before.mtime_ns) == (now.size, now.mtime_ns))
}

fn slot_name(slot: u32) -> OsString {
    slot.to_string().into()
}

fn old_name(slot: &OsStr) -> OsString {
    let mut name = slot.to_os_string();
    name.push(".old");
    name
}

/// What each directory that goes or moves as a whole holds, by its top's old path.
fn members(changes: &[Change]) -> HashMap<PathBuf, BTreeMap<PathBuf, Summary>> {
    let mut tops: HashMap<u32, PathBuf> = HashMap::new();
    let mut found: HashMap<PathBuf, BTreeMap<PathBuf, Summary>> = HashMap::new();
    for change in changes {
        let (Some(group), Some(before)) = (change.group, &change.before) else { continue };
        let at = match &change.kind {
            ChangeKind::Moved { from } => from,
            ChangeKind::Created | ChangeKind::Modified | ChangeKind::Deleted | ChangeKind::Attributes => &change.path,
        };
        let top = tops.entry(group).or_insert_with(|| at.clone());
        if let Ok(rest) = at.strip_prefix(&*top) {
            if !rest.as_os_str().is_empty() {
                found.entry(top.clone()).or_default().insert(rest.to_path_buf(), before.clone());
            }
        }
    }
    found
}

fn next_number(run_dir: &OwnedFd) -> Result<u32, ApplyError> {
    let before = tree::ensure_directory_at(run_dir.as_fd(), OsStr::new("before")).map_err(ours("make `before`"))?;
    let last = tree::names(before.as_fd())
        .map_err(ours("list the before-images"))?
        .iter()
        .filter_map(|name| name.to_str()?.parse::<u32>().ok())
        .max();
    Ok(last.unwrap_or(0).saturating_add(1))
}

/// Copies or links nodes of the run's layer into the stage.
struct Stager<'a> {
    batch: &'a Batch<'a>,
    stage: &'a Stage,
    reversal: Option<&'a Reversal>,
    /// Where contents are: the run's layer, or its directory with the before-images.
    root: BorrowedFd<'a>,
    source: Parents<'a>,
    staged: Parents<'a>,
    here: Parents<'a>,
    /// The group that each directory gives to what is made in it, where it does.
    groups: HashMap<PathBuf, Option<u32>>,
    /// What was staged, while it is little enough to be synced one by one.
    nodes: Option<Vec<(PathBuf, NodeType)>>,
    /// Directories in the order they were made; their attributes are set last, deepest first.
    directories: Vec<StagedDirectory>,
    /// The first staged name of an inode with several names.
    links: HashMap<u64, PathBuf>,
    /// See [`Journal::marked`].
    marked: Vec<String>,
}

impl<'a> Stager<'a> {
    fn new(batch: &'a Batch<'a>, stage: &'a Stage, reversal: Option<&'a Reversal>) -> Stager<'a> {
        let root = if reversal.is_some() { batch.run_dir.as_fd() } else { batch.source.as_fd() };
        Stager {
            batch,
            stage,
            reversal,
            root,
            source: Parents::new(root),
            staged: Parents::new(stage.directory.as_fd()),
            here: Parents::new(batch.workspace.as_fd()),
            groups: HashMap::new(),
            nodes: Some(Vec::new()),
            directories: Vec::new(),
            links: HashMap::new(),
            marked: Vec::new(),
        }
    }

    /// Makes what a change says its path is to become, in the stage; gives its inode.
    fn stage(&mut self, change: &Change, at: &Path) -> io::Result<u64> {
        let after = change.after.as_ref().ok_or_else(|| io::Error::from(rustix::io::Errno::INVAL))?;
        if let Some(nodes) = self.nodes.as_mut() {
            nodes.push((at.to_path_buf(), after.kind));
        }
        self.nodes.take_if(|nodes| nodes.len() > durable::FEW);
        if let Some(reversal) = self.reversal {
            let image = reversal.image(&change.path).ok_or(rustix::io::Errno::NOENT)?;
            return self.stage_image(change, after.kind, &image, at);
        }
        let owner = self.owner(change)?;
        let (source, source_name) = self.source.parent(&change.path)?;
        let (staged, name) = self.staged.parent(at)?;
        match after.kind {
            NodeType::Directory => {
                kernel::mkdirat(staged, name, Mode::from_raw_mode(0o700))?;
                let from = change.path.clone();
                self.directories.push(StagedDirectory { at: at.to_path_buf(), from, change: change.clone(), owner });
            }
            NodeType::Link => {
                let target = tree::link_target(source, source_name)?;
                kernel::symlinkat(&target, staged, name)?;
                let made = owner.give(self.batch, staged, name)?;
                tree::set_mtime_at(staged, name, after.mtime_ns)?;
                return Ok(Summary::of(&made).inode);
            }
            NodeType::File => {
                if after.links > 1 && change.kind != ChangeKind::Attributes {
                    if let Some(first) = self.links.get(&after.inode) {
                        let (first_parent, first_name) = tree::parent_of(self.stage.directory.as_fd(), first)?;
                        kernel::linkat(first_parent, first_name, staged, name, AtFlags::empty())?;
                        return inode_at(staged, name);
                    }
                    self.links.insert(after.inode, at.to_path_buf());
                }
                let handle = tree::open_at(source, source_name)?;
                if self.stage.in_workspace.is_none() && after.links == 1 {
                    // The bytes need not be copied: the run's layer loses its name for them when the batch is done.
                    // Until then the inode keeps the layer's marks, which a batch that is rolled back needs again.
                    if has_private_marks(handle.as_fd())? {
                        self.marked.push(super::path::spell(&change.path));
                    }
                    tree::link(source, source_name, staged, name)?;
                } else {
                    let from = tree::open_file_at(source, source_name)?;
                    let to = tree::create_file_at(staged, name)?;
                    tree::copy_content(&from, &to)?;
                    tree::set_user_xattrs(to.as_fd(), &tree::user_xattrs(handle.as_fd())?)?;
                }
                let made = owner.give(self.batch, staged, name)?;
                let keeps_list = change.before.as_ref().is_some_and(|before| before.kind == NodeType::File);
                if keeps_list || tree::permissions(&made) != after.mode {
                    let new = tree::open_at(staged, name)?;
                    keep_access_lists(self.batch, new.as_fd(), change)?;
                    tree::set_mode(new.as_fd(), after.mode)?;
                }
                if tree::mtime_ns(&made) != after.mtime_ns {
                    tree::set_mtime_at(staged, name, after.mtime_ns)?;
                }
                return Ok(Summary::of(&made).inode);
            }
            NodeType::Special => return Err(rustix::io::Errno::OPNOTSUPP.into()),
        }
        inode_at(staged, name)
    }

    /// Puts a before-image into the stage: the very inode under a second name, with all that belongs to it, where the
    /// file system gives one; else a copy. The image's own name goes when the batch is done.
    fn stage_image(&mut self, change: &Change, kind: NodeType, image: &Path, at: &Path) -> io::Result<u64> {
        let (source, source_name) = self.source.parent(image)?;
        let (staged, name) = self.staged.parent(at)?;
        let stat = tree::look_at(source, source_name)?.ok_or(rustix::io::Errno::NOENT)?;
        if Summary::of(&stat).kind != kind {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "the before-image is not what the manifest says"));
        }
        let owner = Owner { uid: Some(stat.st_uid), gid: Some(stat.st_gid) };
        if kind == NodeType::Directory {
            kernel::mkdirat(staged, name, Mode::from_raw_mode(0o700))?;
            let (at, from) = (at.to_path_buf(), image.to_path_buf());
            self.directories.push(StagedDirectory { at, from, change: change.clone(), owner });
            return inode_at(staged, name);
        }
        let link = || Ok(kernel::linkat(source, source_name, staged, name, AtFlags::empty())?);
        match tree::with_rights(source, 0o100, link) {
            Ok(()) => return inode_at(staged, name),
            // Another file system, one without links, an inode with as many as it may have, or another user's.
            Err(error)
                if matches!(
                    error.raw_os_error(),
                    Some(libc::EXDEV | libc::EPERM | libc::EMLINK | libc::EOPNOTSUPP | libc::EACCES)
                ) => {}
            Err(error) => return Err(error),
        }
        match kind {
            NodeType::Link => {
                kernel::symlinkat(tree::link_target(source, source_name)?, staged, name)?;
                owner.give(self.batch, staged, name)?;
            }
            NodeType::File => {
                let inode = Summary::of(&stat).inode;
                if let Some(first) = self.links.get(&inode).filter(|_| stat.st_nlink > 1) {
                    let (first_parent, first_name) = tree::parent_of(self.stage.directory.as_fd(), first)?;
                    kernel::linkat(first_parent, first_name, staged, name, AtFlags::empty())?;
                    return inode_at(staged, name);
                }
                self.links.insert(inode, at.to_path_buf());
                let from = tree::open_file_at(source, source_name)?;
                let to = tree::create_file_at(staged, name)?;
                tree::copy_content(&from, &to)?;
                tree::set_user_xattrs(to.as_fd(), &tree::user_xattrs(from.as_fd())?)?;
                owner.give(self.batch, staged, name)?;
                copy_access_lists(from.as_fd(), to.as_fd())?;
                tree::set_mode(to.as_fd(), tree::permissions(&stat))?;
            }
            NodeType::Directory | NodeType::Special => return Err(rustix::io::Errno::OPNOTSUPP.into()),
        }
        tree::set_mtime_at(staged, name, tree::mtime_ns(&stat))?;
        inode_at(staged, name)
    }

    /// Sets the attributes of the staged directories, deepest first, when nothing is put into them any more. Gives what
    /// is to be synced, or none for everything, and the marked paths.
    #[allow(clippy::type_complexity)]
    fn finish(self) -> Result<(Option<Vec<(PathBuf, NodeType)>>, Vec<String>), ApplyError> {
        for StagedDirectory { at, from, change, owner } in self.directories.iter().rev() {
            let failed = |source| ApplyError::Stage { path: printable(&change.path), source };
            let Some(after) = &change.after else { continue };
            let (staged, name) = tree::parent_of(self.stage.directory.as_fd(), at).map_err(failed)?;
            let handle = tree::open_at(staged.as_fd(), name).map_err(failed)?;
            let (source, source_name) = tree::parent_of(self.root, from).map_err(failed)?;
            let original = tree::open_at(source.as_fd(), source_name).map_err(failed)?;
            let xattrs = tree::user_xattrs(original.as_fd()).map_err(failed)?;
            tree::set_user_xattrs(handle.as_fd(), &xattrs).map_err(failed)?;
            owner.give(self.batch, staged.as_fd(), name).map_err(failed)?;
            if self.reversal.is_some() {
                copy_access_lists(original.as_fd(), handle.as_fd()).map_err(failed)?;
            }
            tree::set_mode(handle.as_fd(), after.mode).map_err(failed)?;
            tree::set_mtime_at(staged.as_fd(), name, after.mtime_ns).map_err(failed)?;
        }
        Ok((self.nodes, self.marked))
    }

    /// Who is to own what a change makes: a replaced node's owner, else the workspace's, with the group that the
    /// directory gives.
    fn owner(&mut self, change: &Change) -> io::Result<Owner> {
        if change.before.is_some() {
            if let Some(old) = self.here.look(&change.path)? {
                self.note_group(change, Some(old.st_gid));
                return Ok(Owner { uid: Some(old.st_uid), gid: Some(old.st_gid) });
            }
        }
        let parent = change.path.parent().unwrap_or(Path::new(""));
        let group = match self.groups.get(parent) {
            Some(group) => *group,
            None => {
                let directory = tree::open_directory_forced(self.batch.workspace.as_fd(), parent);
                let stat = directory.ok().map(kernel::fstat).transpose()?;
                let group = stat.filter(|stat| tree::permissions(stat) & 0o2000 != 0).map(|stat| stat.st_gid);
                self.groups.insert(parent.to_path_buf(), group);
                group
            }
        };
        self.note_group(change, group);
        let shift = self.batch.shift.map(|shift| shift.to);
        Ok(Owner { uid: shift.map(|(uid, _)| uid), gid: group.or(shift.map(|(_, gid)| gid)) })
    }

    /// A new directory gives on the group that it got, if it has the bit for it (inode(7)).
    fn note_group(&mut self, change: &Change, group: Option<u32>) {
        let Some(after) = change.after.as_ref().filter(|after| after.kind == NodeType::Directory) else { return };
        self.groups.insert(change.path.clone(), group.filter(|_| after.mode & 0o2000 != 0));
    }
}

/// A directory in the stage whose attributes are still to be set.
struct StagedDirectory {
    at: PathBuf,
    /// Where its like is, below the stager's root.
    from: PathBuf,
    change: Change,
    owner: Owner,
}

/// The owner that a staged node is to have; none leaves what it has.
#[derive(Clone, Copy)]
struct Owner {
    uid: Option<u32>,
    gid: Option<u32>,
}

impl Owner {
    /// Makes it so, and says how the node stands.
    fn give(self, batch: &Batch<'_>, staged: BorrowedFd<'_>, name: &OsStr) -> io::Result<kernel::Stat> {
        let look = || tree::look_at(staged, name)?.ok_or_else(|| io::Error::from(rustix::io::Errno::NOENT));
        let now = look()?;
        let (uid, gid) = (self.uid.unwrap_or(now.st_uid), self.gid.unwrap_or(now.st_gid));
        if (uid, gid) == (now.st_uid, now.st_gid) {
            return Ok(now);
        }
        match tree::set_owner_at(staged, name, uid, gid) {
            // An ordinary user cannot give files away, only to a group of theirs: as with any editor that saves by
            // rename, the file becomes the user's own.
            Err(error) if error.raw_os_error() == Some(libc::EPERM) && batch.shift.is_none() => {
                match tree::set_owner_at(staged, name, now.st_uid, gid) {
                    Err(error) if error.raw_os_error() == Some(libc::EPERM) => {}
                    other => other?,
                }
            }
            other => other?,
        }
        look()
    }
}

/// A replaced file's access list stays what its owner made it (acl(5)); the run's copy of it is not looked at.
fn keep_access_lists(batch: &Batch<'_>, new: BorrowedFd<'_>, change: &Change) -> io::Result<()> {
    if change.before.as_ref().is_none_or(|before| before.kind != NodeType::File) {
        return Ok(());
    }
    let (parent, old_name) = tree::parent_of(batch.workspace.as_fd(), &change.path)?;
    let old = tree::open_at(parent.as_fd(), old_name)?;
    let list = OsStr::new("system.posix_acl_access");
    if tree::xattr_names(old.as_fd())?.iter().any(|name| name == list) {
        if let Some(value) = tree::xattr(old.as_fd(), list)? {
            tree::set_xattr(new, list, &value)?;
        }
    }
    Ok(())
}

/// Gives a copy the access lists of its original (acl(5)).
fn copy_access_lists(original: BorrowedFd<'_>, copy: BorrowedFd<'_>) -> io::Result<()> {
    for name in tree::xattr_names(original)? {
        if name.as_bytes().starts_with(b"system.posix_acl_") {
            if let Some(value) = tree::xattr(original, &name)? {
                tree::set_xattr(copy, &name, &value)?;
            }
        }
    }
    Ok(())
}

fn inode_at(directory: BorrowedFd<'_>, name: &OsStr) -> io::Result<u64> {
    let stat = tree::look_at(directory, name)?.ok_or_else(|| io::Error::from(rustix::io::Errno::NOENT))?;
    Ok(Summary::of(&stat).inode)
}

fn has_private_marks(handle: BorrowedFd<'_>) -> io::Result<bool> {
    Ok(tree::xattr_names(handle)?.iter().any(|name| is_private_mark(name)))
}

/// What overlayfs mounted with `userxattr` writes into its layers (overlayfs.rst, "User xattr").
fn is_private_mark(name: &OsStr) -> bool {
    name.as_bytes().starts_with(b"user.overlay.")
}

/// Sets attributes in place, if the path still is this inode.
fn set_attributes(root: BorrowedFd<'_>, path: &Path, inode: u64, wanted: &Attributes) -> io::Result<()> {
    let (parent, name) = tree::parent_of(root, path)?;
    let handle = tree::open_at(parent.as_fd(), name)?;
    let stat = kernel::fstat(&handle)?;
    if Summary::of(&stat).inode != inode || tree::kind_of(&stat) == FileType::Symlink {
        return Err(rustix::io::Errno::NOENT.into());
    }
    let mut xattrs = Vec::new();
    for (name, value) in &wanted.xattrs {
        let decode = |text: &str| hex::decode(text).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error));
        xattrs.push((OsString::from_vec(decode(name)?), decode(value)?));
    }
    tree::set_user_xattrs(handle.as_fd(), &xattrs)?;
    tree::set_mode(handle.as_fd(), wanted.mode)?;
    match wanted.mtime_ns {
        Some(mtime_ns) => {
            tree::with_rights(parent.as_fd(), 0o100, || tree::set_mtime_at(parent.as_fd(), name, mtime_ns))
        }
        None => Ok(()),
    }
}

/// Undoes what of a journal was done, last first. Each operation tells by its inodes whether it was done.
fn roll_back(journal: &Journal, run_dir: &OwnedFd, workspace: &OwnedFd) -> Result<(), ApplyError> {
    let stage = match &journal.staged_in_workspace {
        Some(name) => tree::ensure_directory_at(workspace.as_fd(), OsStr::new(name)),
        None => tree::ensure_directory_at(run_dir.as_fd(), OsStr::new("stage")),
    }
    .map_err(ours("open the stage"))?;
    for operation in journal.operations.iter().rev() {
        let failed = |source| ApplyError::RollBack { path: printable(operation.path()), source };
        undo(operation, stage.as_fd(), workspace.as_fd()).map_err(failed)?;
    }
    restore_modes(&journal.modes, workspace)?;
    note_touched(journal, run_dir, workspace)?;
    kernel::syncfs(workspace).map_err(|error| ours("sync the workspace")(error.into()))?;
    remove_stage(journal.staged_in_workspace.as_deref(), run_dir, workspace)?;
    tree::remove(run_dir.as_fd(), OsStr::new(JOURNAL)).map_err(ours("remove the journal"))
}

/// Change times that we moved ourselves, by inode. A rename or a restored mode moves them, and no call sets them back.
fn touched(run_dir: &OwnedFd) -> Result<BTreeMap<u64, i64>, ApplyError> {
    let deed = "read the touched inodes";
    match tree::read_ours(run_dir.as_fd(), TOUCHED).map_err(ours(deed))? {
        Some(bytes) => parse(&bytes, deed),
        None => Ok(BTreeMap::new()),
    }
}

/// Remembers what the rolled back batch touched, so that it can be applied again: only inodes that still are as the
/// run saw them in all but the change time.
fn note_touched(journal: &Journal, run_dir: &OwnedFd, workspace: &OwnedFd) -> Result<(), ApplyError> {
    let mut known = touched(run_dir)?;
    let befores: HashMap<&Path, &Summary> = journal
        .changes
        .iter()
        .filter_map(|change| {
            let at = match &change.kind {
                ChangeKind::Moved { from } => from,
                ChangeKind::Created | ChangeKind::Modified | ChangeKind::Deleted | ChangeKind::Attributes => {
                    &change.path
                }
            };
            Some((at.as_path(), change.before.as_ref()?))
        })
        .collect();
    let mut here = Parents::new(workspace.as_fd());
    for operation in &journal.operations {
        let at = match operation {
            Operation::Place { .. } => continue,
            Operation::Rename { from, .. } => from,
            Operation::Exchange { path, .. } | Operation::Retire { path, .. } | Operation::Attributes { path, .. } => {
                path
            }
        };
        let Some(before) = befores.get(at.as_path()) else { continue };
        let failed = |source| ApplyError::RollBack { path: printable(at), source };
        let Some(stat) = here.look(at).map_err(failed)? else { continue };
        let now = Summary::of(&stat);
        if same_node(before, &now) && before.mode == now.mode {
            known.insert(now.inode, now.ctime_ns);
        }
    }
    let deed = "write the touched inodes";
    tree::write_durably(run_dir.as_fd(), TOUCHED, &written(&known, deed)?).map_err(ours(deed))
}

fn restore_modes(modes: &[PathMode], workspace: &OwnedFd) -> Result<(), ApplyError> {
    for PathMode { path, mode } in modes {
        let restore = || -> io::Result<()> {
            let Some(stat) = tree::look(workspace.as_fd(), path)? else { return Ok(()) };
            if tree::kind_of(&stat) == FileType::Directory && tree::permissions(&stat) != *mode {
                tree::set_mode(tree::open_directory_forced(workspace.as_fd(), path)?.as_fd(), *mode)?;
            }
            Ok(())
        };
        restore().map_err(|source| ApplyError::RollBack { path: printable(path), source })?;
    }
    Ok(())
}

fn undo(operation: &Operation, stage: BorrowedFd<'_>, workspace: BorrowedFd<'_>) -> io::Result<()> {
    let inode_of = |root: BorrowedFd<'_>, path: &Path| -> io::Result<Option<u64>> {
        Ok(tree::look(root, path)?.map(|stat| Summary::of(&stat).inode))
    };
    match operation {
        Operation::Place { slot, path, inode } => {
            if inode_of(workspace, path)? == Some(*inode) {
                let (parent, name) = tree::parent_of(workspace, path)?;
                tree::rename(parent.as_fd(), name, stage, &slot_name(*slot), RenameFlags::NOREPLACE)?;
            }
        }
        Operation::Exchange { slot, path, inode, old } => {
            let slot = slot_name(*slot);
            let aside = old_name(&slot);
            let held_aside = inode_of(stage, Path::new(&aside))? == Some(*old);
            if inode_of(workspace, path)? == Some(*inode) {
                let (parent, name) = tree::parent_of(workspace, path)?;
                if held_aside {
                    tree::rename(parent.as_fd(), name, stage, &slot, RenameFlags::NOREPLACE)?;
                    tree::rename(stage, &aside, parent.as_fd(), name, RenameFlags::NOREPLACE)?;
                } else {
                    match tree::rename(stage, &slot, parent.as_fd(), name, RenameFlags::EXCHANGE) {
                        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                            tree::rename(stage, &slot, stage, &aside, RenameFlags::NOREPLACE)?;
                            tree::rename(parent.as_fd(), name, stage, &slot, RenameFlags::NOREPLACE)?;
                            tree::rename(stage, &aside, parent.as_fd(), name, RenameFlags::NOREPLACE)?;
                        }
                        other => other?,
                    }
                }
            } else if held_aside {
                let (parent, name) = tree::parent_of(workspace, path)?;
                tree::rename(stage, &aside, parent.as_fd(), name, RenameFlags::NOREPLACE)?;
            }
        }
        Operation::Retire { slot, path, inode: _ } => {
            let slot = slot_name(*slot);
            // Whatever was taken out goes back, also when it turned out to be somebody else's newer file.
            if tree::look_at(stage, &slot)?.is_some() {
                let (parent, name) = tree::parent_of(workspace, path)?;
                tree::rename(stage, &slot, parent.as_fd(), name, RenameFlags::NOREPLACE)?;
            }
        }
        Operation::Rename { from, path, inode } => {
            if inode_of(workspace, path)? == Some(*inode) {
                let (parent, name) = tree::parent_of(workspace, path)?;
                let (from_parent, from_name) = tree::parent_of(workspace, from)?;
                tree::rename(parent.as_fd(), name, from_parent.as_fd(), from_name, RenameFlags::NOREPLACE)?;
            }
        }
        Operation::Attributes { path, inode, before, .. } => {
            if inode_of(workspace, path)? == Some(*inode) {
                set_attributes(workspace, path, *inode, before)?;
            }
        }
    }
    Ok(())
}

/// Keeps the before-images, says what stays pending, removes the stage and the journal. Idempotent.
fn clean_up(journal: &Journal, run_dir: &OwnedFd, workspace: &OwnedFd) -> Result<(), ApplyError> {
    if !journal.modes.is_empty() {
        restore_modes(&untouched_modes(journal), workspace)?;
        durable::everything(workspace.as_fd()).map_err(ours("sync the workspace"))?;
    }
    unmark(&journal.marked, workspace).map_err(ours("remove the layer's marks"))?;
    let before = tree::ensure_directory_at(run_dir.as_fd(), OsStr::new("before")).map_err(ours("make `before`"))?;
    let number = journal.number.to_string();
    let mut dropped = Vec::new();
    match &journal.staged_in_workspace {
        None => match tree::rename(
            run_dir.as_fd(),
            OsStr::new("stage"),
            before.as_fd(),
            OsStr::new(&number),
            RenameFlags::NOREPLACE,
        ) {
            Ok(()) => {}
            // Done before the crash.
            Err(error) if tree::absent(&error) || error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(ours("keep the before-images")(error)),
        },
        Some(name) => {
            let kept = tree::ensure_directory_at(before.as_fd(), OsStr::new(&number)).map_err(ours("make `before`"))?;
            match tree::open_directory(workspace.as_fd(), Path::new(name), kernel::OFlags::RDONLY) {
                Ok(stage) => {
                    let mut budget = COPIED_BEFORE_BYTES;
                    for SlotPath { slot, path } in &journal.slots {
                        let slot = slot_name(*slot);
                        tree::remove(kept.as_fd(), &slot).map_err(ours("keep a before-image"))?;
                        if copy_tree(stage.as_fd(), kept.as_fd(), &slot, &mut budget).is_err() {
                            // Too large, or no space: the batch stands, and the manifest says what is missing.
                            tree::remove(kept.as_fd(), &slot).map_err(ours("keep a before-image"))?;
                            dropped.push(super::path::spell(path));
                        }
                    }
                }
                Err(error) if tree::absent(&error) => {}
                Err(error) => return Err(ours("open the stage")(error)),
            }
        }
    }
    let kept = tree::ensure_directory_at(before.as_fd(), OsStr::new(&number)).map_err(ours("make `before`"))?;
    if tree::look_at(kept.as_fd(), OsStr::new(MANIFEST)).map_err(ours("look for the manifest"))?.is_none() {
        let mut manifest = manifest_of(journal);
        manifest.slots.retain(|slot| !dropped.contains(&super::path::spell(&slot.path)));
        manifest.dropped = dropped;
        let text = written(&manifest, "write the manifest")?;
        tree::write_durably(kept.as_fd(), MANIFEST, &text).map_err(ours("write the manifest"))?;
    }
    match (&journal.staged_in_workspace, kernel::renameat(&kept, PENDING, run_dir, PENDING)) {
        (None, Ok(()) | Err(rustix::io::Errno::NOENT)) => {}
        (None, Err(error)) => return Err(ours("write the pending paths")(error.into())),
        (Some(_), _) => write_pending(run_dir, &journal.remaining)?,
    }
    for consumed in &journal.consumed {
        forget(consumed, before.as_fd())?;
    }
    // What a reversal changes never was in the layer.
    if !journal.remaining.is_empty() && journal.consumed.is_empty() {
        layer::take_out(&journal.changes, run_dir).map_err(ours("take what was applied out of the layer"))?;
    }
    remove_stage(journal.staged_in_workspace.as_deref(), run_dir, workspace)?;
    let deed = "keep the before-images";
    let own = run_dir.try_clone().map_err(ours(deed))?;
    durable::each(&[before, own]).map_err(ours(deed))?;
    tree::remove(run_dir.as_fd(), OsStr::new(COMMITTED)).map_err(ours("remove the journal"))
}

/// Takes out of an earlier batch what is reverted now: its before-images are in the workspace again, under a name that
/// the user may write through.
fn forget(consumed: &Consumed, before: BorrowedFd<'_>) -> Result<(), ApplyError> {
    let name = OsString::from(consumed.number.to_string());
    let deed = "forget a before-image";
    let directory = match tree::open_directory(before, Path::new(&name), kernel::OFlags::RDONLY) {
        Ok(directory) => directory,
        // Done before the crash.
        Err(error) if tree::absent(&error) => return Ok(()),
        Err(error) => return Err(ours(deed)(error)),
    };
    let Some(bytes) = tree::read_ours(directory.as_fd(), MANIFEST).map_err(ours(deed))? else {
        // Half removed before the crash.
        return tree::remove(before, &name).map_err(ours(deed));
    };
    let mut manifest: Manifest = parse(&bytes, "read a before-image's manifest")?;
    let gone: BTreeSet<&String> = consumed.paths.iter().collect();
    let stays = |path: &Path| !gone.contains(&super::path::spell(path));
    for slot in manifest.slots.iter().filter(|slot| !stays(&slot.path)) {
        tree::remove(directory.as_fd(), &slot_name(slot.slot)).map_err(ours(deed))?;
    }
    manifest.slots.retain(|slot| stays(&slot.path));
    manifest.changes.retain(|change| stays(&change.path));
    manifest.attributes.retain(|operation| stays(operation.path()));
    if manifest.changes.is_empty() {
        return tree::remove(before, &name).map_err(ours(deed));
    }
    tree::write_durably(directory.as_fd(), MANIFEST, &written(&manifest, deed)?).map_err(ours(deed))
}

/// Removes overlayfs's marks from files that came from the run's layer. What is gone meanwhile is passed over.
fn unmark(marked: &[String], workspace: &OwnedFd) -> io::Result<()> {
    let mut here = Parents::new(workspace.as_fd());
    for text in marked {
        let path = super::path::unspell(text).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
        if !here.look(&path)?.is_some_and(|stat| tree::kind_of(&stat) == FileType::RegularFile) {
            continue;
        }
        let (parent, name) = here.parent(&path)?;
        let handle = tree::open_at(parent, name)?;
        for mark in tree::xattr_names(handle.as_fd())? {
            if is_private_mark(&mark) {
                tree::remove_xattr(handle.as_fd(), &mark)?;
            }
        }
    }
    Ok(())
}

/// What a batch's manifest says while every before-image is kept.
fn manifest_of(journal: &Journal) -> Manifest {
    let in_place = |operation: &&Operation| matches!(operation, Operation::Attributes { .. });
    Manifest {
        version: 1,
        changes: journal.changes.clone(),
        slots: journal.slots.clone(),
        dropped: Vec::new(),
        attributes: journal.operations.iter().filter(in_place).cloned().collect(),
        kind: journal.kind,
        existed: journal.existed.clone(),
        after_seq: journal.after_seq,
    }
}

/// The lent rights of directories whose mode the batch itself did not set.
fn untouched_modes(journal: &Journal) -> Vec<PathMode> {
    let set: BTreeSet<&Path> = journal
        .operations
        .iter()
        .filter(|operation| !matches!(operation, Operation::Rename { .. } | Operation::Retire { .. }))
        .map(Operation::path)
        .collect();
    let untouched = |mode: &&PathMode| !mode.path.ancestors().any(|ancestor| set.contains(ancestor));
    journal.modes.iter().filter(untouched).cloned().collect()
}

/// Copies one node with all below it, within a budget of bytes.
fn copy_tree(from: BorrowedFd<'_>, to: BorrowedFd<'_>, top: &OsStr, budget: &mut u64) -> io::Result<()> {
    let mut pending = vec![PathBuf::from(top)];
    let mut directories = Vec::new();
    while let Some(path) = pending.pop() {
        let (source, name) = tree::parent_of(from, &path)?;
        let (target, _) = tree::parent_of(to, &path)?;
        let Some(stat) = tree::look_at(source.as_fd(), name)? else { continue };
        let node = Summary::of(&stat);
        match node.kind {
            NodeType::Directory => {
                kernel::mkdirat(&target, name, Mode::from_raw_mode(0o700))?;
                let listing = tree::open_listing(from, &path)?;
                for child in tree::names(listing.as_fd())? {
                    pending.push(path.join(child));
                }
                keep_owner(target.as_fd(), name, &stat)?;
                directories.push((path, node));
            }
            NodeType::Link => {
                kernel::symlinkat(tree::link_target(source.as_fd(), name)?, &target, name)?;
                keep_owner(target.as_fd(), name, &stat)?;
                tree::set_mtime_at(target.as_fd(), name, node.mtime_ns)?;
            }
            NodeType::File => {
                #[allow(clippy::unnecessary_cast, reason = "the field's type differs between architectures")]
                let stored = (stat.st_blocks as u64).saturating_mul(512);
                *budget = budget.checked_sub(stored).ok_or_else(|| io::Error::from(rustix::io::Errno::FBIG))?;
                let content = tree::open_file_at(source.as_fd(), name)?;
                let copy = tree::create_file_at(target.as_fd(), name)?;
                tree::copy_content(&content, &copy)?;
                tree::set_user_xattrs(copy.as_fd(), &tree::user_xattrs(content.as_fd())?)?;
                keep_owner(target.as_fd(), name, &stat)?;
                copy_access_lists(content.as_fd(), copy.as_fd())?;
                tree::set_mode(copy.as_fd(), node.mode)?;
                tree::set_mtime_at(target.as_fd(), name, node.mtime_ns)?;
            }
            NodeType::Special => {}
        }
    }
    for (path, node) in directories.iter().rev() {
        let (target, name) = tree::parent_of(to, path)?;
        tree::set_mode(tree::open_at(target.as_fd(), name)?.as_fd(), node.mode)?;
        tree::set_mtime_at(target.as_fd(), name, node.mtime_ns)?;
    }
    Ok(())
}

/// Gives a copied before-image its original's owner, for whoever may give files away.
fn keep_owner(directory: BorrowedFd<'_>, name: &OsStr, original: &kernel::Stat) -> io::Result<()> {
    match tree::set_owner_at(directory, name, original.st_uid, original.st_gid) {
        Err(error) if error.raw_os_error() == Some(libc::EPERM) => Ok(()),
        other => other,
    }
}

/// How much the before-images of a run take, in bytes on the disk; those that the workspace shares count too.
///
/// # Errors
/// [`ApplyError::Ours`].
pub fn images_bytes(run_dir: &OwnedFd) -> Result<u64, ApplyError> {
    let deed = "measure the before-images";
    let mut total: u64 = 0;
    let mut pending = vec![PathBuf::from("before")];
    while let Some(directory) = pending.pop() {
        let listing = match tree::open_listing(run_dir.as_fd(), &directory) {
            Ok(listing) => listing,
            Err(error) if tree::absent(&error) => continue,
            Err(error) => return Err(ours(deed)(error)),
        };
        for name in tree::names(listing.as_fd()).map_err(ours(deed))? {
            let Some(stat) = tree::look_at(listing.as_fd(), &name).map_err(ours(deed))? else { continue };
            if tree::kind_of(&stat) == FileType::Directory {
                pending.push(directory.join(&name));
            }
            #[allow(clippy::unnecessary_cast, reason = "the field's type differs between architectures")]
            let stored = (stat.st_blocks as u64).saturating_mul(512);
            total = total.saturating_add(stored);
        }
    }
    Ok(total)
}

/// Removes a run's before-images and keeps what says which changes they belonged to: what it applied can no longer be
/// undone, nor what was undone be redone.
///
/// # Errors
/// [`ApplyError::Ours`].
pub fn forget_images(run_dir: &OwnedFd) -> Result<(), ApplyError> {
    let deed = "remove the before-images";
    for (path, mut manifest) in manifests(run_dir)? {
        let directory = tree::open_directory(run_dir.as_fd(), &path, kernel::OFlags::RDONLY)
            .map_err(ours("open a before-image"))?;
        manifest.dropped.extend(manifest.slots.iter().map(|slot| super::path::spell(&slot.path)));
        let slots = std::mem::take(&mut manifest.slots);
        tree::write_durably(directory.as_fd(), MANIFEST, &written(&manifest, deed)?).map_err(ours(deed))?;
        for slot in slots {
            tree::remove(directory.as_fd(), &slot_name(slot.slot)).map_err(ours(deed))?;
        }
    }
    Ok(())
}

/// Takes these paths off the list of what is pending, of a run whose pending changes these are.
///
/// # Errors
/// [`ApplyError::Ours`].
pub fn discard_paths(run_dir: &OwnedFd, remaining: &[PathBuf]) -> Result<(), ApplyError> {
    write_pending(run_dir, &spelled_paths(remaining))
}

#[cfg(test)]
mod tests {
    use super::super::changes::scan;
    use super::super::testing::{mixed, tree_state, Fixture};
    use super::*;
    use std::os::unix::fs::{symlink, MetadataExt, PermissionsExt};

    fn changes_of(fixture: &Fixture) -> Vec<Change> {
        scan(&fixture.upper, &fixture.workspace).unwrap().changes
    }

    #[test]
    fn a_mixed_batch_makes_the_workspace_what_the_run_saw() {
        let fixture = mixed();
        let quiet = std::fs::metadata(fixture.workspace_path().join("quiet/keep")).unwrap();
        let moved = std::fs::metadata(fixture.workspace_path().join("moved")).unwrap().ino();
        let changes = changes_of(&fixture);
        assert!(changes.iter().any(|change| change.path == Path::new("place")
            && change.kind == ChangeKind::Moved { from: PathBuf::from("moved") }));
        assert!(changes.iter().any(|change| change.path == Path::new("rack")
            && change.kind == ChangeKind::Moved { from: PathBuf::from("shelf") }));
        let applied = apply(&fixture.batch(), &changes, &[]).unwrap();
        let root = fixture.workspace_path();
        assert_eq!(std::fs::read(root.join("edited")).unwrap(), b"new");
        assert!(!root.join("gone").exists() && !root.join("removed").exists() && !root.join("moved").exists());
        assert_eq!(std::fs::metadata(root.join("place")).unwrap().ino(), moved);
        assert_eq!(std::fs::metadata(root.join("mode")).unwrap().permissions().mode() & 0o7777, 0o600);
        assert_eq!(std::fs::read(root.join("to-file")).unwrap(), b"now a file");
        assert_eq!(std::fs::read(root.join("to-dir/f")).unwrap(), b"f");
        assert_eq!(std::fs::read(root.join("rack/book")).unwrap(), b"b");
        assert_eq!(std::fs::read_link(root.join("new/link")).unwrap(), Path::new("../elsewhere"));
        assert_eq!(std::fs::metadata(root.join("new")).unwrap().permissions().mode() & 0o7777, 0o555);
        let after = std::fs::metadata(root.join("quiet/keep")).unwrap();
        assert_eq!(
            (after.ino(), after.mtime_nsec(), after.ctime_nsec()),
            (quiet.ino(), quiet.mtime_nsec(), quiet.ctime_nsec())
        );
        let (path, manifest) = manifests(&fixture.run_dir).unwrap().remove(0);
        assert_eq!(Some(path.clone()), applied.before);
        let slot = manifest.slots.iter().find(|slot| slot.path == Path::new("edited")).unwrap();
        let kept = fixture.run_path().join(path).join(slot.slot.to_string());
        assert_eq!(std::fs::read(kept).unwrap(), b"old");
        assert_eq!(recover(&fixture.run_dir, &fixture.workspace).unwrap(), Recovered::Nothing);
        assert!(keep_pending(&fixture.run_dir, scan(&fixture.upper, &fixture.workspace).unwrap())
            .unwrap()
            .changes
            .is_empty());
    }

    #[test]
    fn a_crash_at_any_point_leaves_the_workspace_whole() {
        let after = {
            let fixture = mixed();
            apply(&fixture.batch(), &changes_of(&fixture), &[]).unwrap();
            tree_state(&fixture.workspace_path(), super::super::testing::Inodes::Ignored)
        };
        let mut rolled = (0, 0);
        for at in 0.. {
            let fixture = mixed();
            let exact = tree_state(&fixture.workspace_path(), super::super::testing::Inodes::Compared);
            let changes = changes_of(&fixture);
            let mut batch = fixture.batch();
            batch.stop = Some((at, Stop::Die));
            if apply(&batch, &changes, &[]).is_ok() {
                assert!(at > changes.len(), "every operation has a point");
                break;
            }
            let recovered = recover(&fixture.run_dir, &fixture.workspace).unwrap();
            if recovered == Recovered::RolledForward {
                rolled.1 += 1;
                assert_eq!(
                    tree_state(&fixture.workspace_path(), super::super::testing::Inodes::Ignored),
                    after,
                    "point {at}"
                );
            } else {
                rolled.0 += 1;
                assert_eq!(
                    tree_state(&fixture.workspace_path(), super::super::testing::Inodes::Compared),
                    exact,
                    "point {at}"
                );
                apply(&fixture.batch(), &changes_of(&fixture), &[]).expect("a rolled back batch can be applied again");
                assert_eq!(
                    tree_state(&fixture.workspace_path(), super::super::testing::Inodes::Ignored),
                    after,
                    "point {at}"
                );
            }
            assert_eq!(recover(&fixture.run_dir, &fixture.workspace).unwrap(), Recovered::Nothing);
        }
        assert!(rolled.0 > 10 && rolled.1 > 0, "{rolled:?}");
    }

    #[test]
    fn an_error_at_any_point_puts_everything_back() {
        for at in 0.. {
            let fixture = mixed();
            let exact = tree_state(&fixture.workspace_path(), super::super::testing::Inodes::Compared);
            let changes = changes_of(&fixture);
            let mut batch = fixture.batch();
            batch.stop = Some((at, Stop::Fail));
            match apply(&batch, &changes, &[]) {
                Ok(_) => break,
                Err(ApplyError::Step { .. }) => {}
                Err(other) => panic!("point {at}: {other}"),
            }
            assert_eq!(
                tree_state(&fixture.workspace_path(), super::super::testing::Inodes::Compared),
                exact,
                "point {at}"
            );
            assert_eq!(recover(&fixture.run_dir, &fixture.workspace).unwrap(), Recovered::Nothing);
            apply(&fixture.batch(), &changes_of(&fixture), &[]).expect("the changes stay pending and can be applied");
        }
    }

    #[test]
    fn whatever_another_writer_changed_fails_the_batch_and_is_named() {
        type Deed = fn(&Path);
        let deeds: [(&str, Deed); 7] = [
            ("edited", |root| std::fs::write(root.join("edited"), "host").unwrap()),
            ("edited", |root| std::fs::remove_file(root.join("edited")).unwrap()),
            ("removed", |root| std::fs::write(root.join("removed"), "host").unwrap()),
            ("gone/deep/x", |root| std::fs::write(root.join("gone/deep/x"), "host").unwrap()),
            ("gone", |root| std::fs::write(root.join("gone/host"), "host").unwrap()),
            ("place", |root| std::fs::write(root.join("place"), "host").unwrap()),
            ("moved", |root| std::fs::write(root.join("moved"), "host").unwrap()),
        ];
        for (name, deed) in deeds {
            let fixture = mixed();
            let changes = changes_of(&fixture);
            deed(&fixture.workspace_path());
            let state = tree_state(&fixture.workspace_path(), super::super::testing::Inodes::Compared);
            match apply(&fixture.batch(), &changes, &[]) {
                Err(ApplyError::Conflict { conflicts }) => {
                    assert!(conflicts.iter().any(|conflict| conflict.path == Path::new(name)), "{name}: {conflicts:?}");
                }
                other => panic!("{name}: {other:?}"),
            }
            assert_eq!(tree_state(&fixture.workspace_path(), super::super::testing::Inodes::Compared), state, "{name}");
        }
    }

    #[test]
    fn a_directory_swapped_for_a_link_is_a_conflict_and_nothing_leaves() {
        let fixture = Fixture::new();
        let outside = tempfile::tempdir().unwrap();
        std::fs::create_dir(fixture.workspace_path().join("d")).unwrap();
        let fixture = fixture.started();
        std::fs::create_dir(fixture.upper_path().join("d")).unwrap();
        std::fs::write(fixture.upper_path().join("d/f"), "f").unwrap();
        let changes = changes_of(&fixture);
        std::fs::remove_dir(fixture.workspace_path().join("d")).unwrap();
        symlink(outside.path(), fixture.workspace_path().join("d")).unwrap();
        assert!(matches!(apply(&fixture.batch(), &changes, &[]), Err(ApplyError::Conflict { .. })));
        assert_eq!(std::fs::read_dir(outside.path()).unwrap().count(), 0);
    }

    #[test]
    fn set_id_bits_are_not_shipped_and_a_sparse_file_stays_sparse() {
        let fixture = Fixture::new();
        std::fs::write(fixture.workspace_path().join("sparse"), "").unwrap();
        let fixture = fixture.started();
        let tool = fixture.upper_path().join("tool");
        std::fs::write(&tool, "#!").unwrap();
        std::fs::set_permissions(&tool, std::fs::Permissions::from_mode(0o6755)).unwrap();
        let sparse = fixture.copy_up("sparse", "sparse");
        std::fs::File::options().write(true).open(&sparse).unwrap().set_len(100 << 20).unwrap();
        apply(&fixture.batch(), &changes_of(&fixture), &[]).unwrap();
        let mode = std::fs::metadata(fixture.workspace_path().join("tool")).unwrap().permissions().mode();
        assert_eq!(mode & 0o7777, 0o755);
        let shipped = std::fs::metadata(fixture.workspace_path().join("sparse")).unwrap();
        assert_eq!(shipped.len(), 100 << 20);
        assert!(shipped.blocks() < 100);
        let handle = tree::open_file(fixture.workspace.as_fd(), Path::new("sparse")).unwrap();
        assert!(!has_private_marks(handle.as_fd()).unwrap());
    }

    #[test]
    fn what_is_made_below_a_set_group_id_directory_gets_its_group_at_every_depth() {
        if !nix::unistd::geteuid().is_root() {
            eprintln!("skipped: only the superuser has a second group to give for certain");
            return;
        }
        const GROUP: u32 = 54_321;
        let fixture = Fixture::new();
        let shared = fixture.workspace_path().join("shared");
        std::fs::create_dir(&shared).unwrap();
        std::os::unix::fs::chown(&shared, None, Some(GROUP)).unwrap();
        std::fs::set_permissions(&shared, std::fs::Permissions::from_mode(0o2775)).unwrap();
        let fixture = fixture.started();
        let upper = fixture.upper_path();
        for (path, mode) in [("shared", 0o2775), ("shared/new", 0o2755), ("shared/plain", 0o755), ("other", 0o755)] {
            std::fs::create_dir(upper.join(path)).unwrap();
            std::fs::write(upper.join(path).join("f"), "f").unwrap();
            std::fs::set_permissions(upper.join(path), std::fs::Permissions::from_mode(mode)).unwrap();
        }
        apply(&fixture.batch(), &changes_of(&fixture), &[]).unwrap();
        let own = std::fs::metadata(fixture.workspace_path()).unwrap().gid();
        for (path, group) in [
            ("shared/f", GROUP),
            ("shared/new", GROUP),
            ("shared/new/f", GROUP),
            ("shared/plain", GROUP),
            // The program took the bit away from this one.
            ("shared/plain/f", own),
            ("other/f", own),
        ] {
            assert_eq!(std::fs::metadata(fixture.workspace_path().join(path)).unwrap().gid(), group, "{path}");
        }
        let mode = std::fs::metadata(fixture.workspace_path().join("shared/new")).unwrap().permissions().mode();
        assert_eq!(mode & 0o7777, 0o2755);
    }

    #[test]
    fn a_batch_of_nothing_writes_nothing() {
        let fixture = Fixture::new().started();
        assert_eq!(apply(&fixture.batch(), &[], &[PathBuf::from("x")]).unwrap(), Applied::default());
        assert_eq!(std::fs::read_dir(fixture.run_path()).unwrap().count(), 1, "the layer alone");
    }

    /// How long batches take on a real disk; run by hand: `cargo test --release -- --ignored --nocapture batches_take`.
    #[test]
    #[ignore = "a measurement; its numbers are for a quiet machine"]
    fn batches_take_milliseconds_for_few_files_and_seconds_for_many() {
        for count in [0_usize, 1, 2, 10, 100, 200, 1_000, 20_000] {
            let mut times: Vec<Duration> = (0..if count > 1_000 { 3 } else { 9 })
                .map(|_| {
                    let fixture =
                        Fixture::on(tempfile::tempdir_in(concat!(env!("CARGO_MANIFEST_DIR"), "/../target")).unwrap())
                            .started();
                    for file in 0..count {
                        let directory = fixture.upper_path().join((file / 1_000).to_string());
                        std::fs::create_dir_all(&directory).unwrap();
                        std::fs::write(directory.join(file.to_string()), "small").unwrap();
                    }
                    let started = Instant::now();
                    apply(&fixture.batch(), &changes_of(&fixture), &[]).unwrap();
                    started.elapsed()
                })
                .collect();
            times.sort();
            eprintln!("{count} files: least {:?}, median {:?}", times[0], times[times.len() / 2]);
        }
    }

    #[test]
    fn a_changed_file_is_placed_without_a_copy_and_its_marks_go_only_with_the_commit() {
        let fixture = Fixture::new();
        std::fs::write(fixture.workspace_path().join("f"), "old").unwrap();
        let fixture = fixture.started();
        let copy = fixture.copy_up("f", "f");
        std::fs::write(&copy, "new").unwrap();
        let inode = std::fs::metadata(&copy).unwrap().ino();
        let marked =
            |root: &OwnedFd| has_private_marks(tree::open_file(root.as_fd(), Path::new("f")).unwrap().as_fd()).unwrap();
        for at in 0..50 {
            let mut batch = fixture.batch();
            batch.stop = Some((at, Stop::Fail));
            // Read anew: what a batch that was rolled back touched has another change time.
            match apply(&batch, &changes_of(&fixture), &[]) {
                Ok(_) => break,
                Err(ApplyError::Step { .. }) => assert!(marked(&fixture.upper), "point {at}"),
                Err(other) => panic!("point {at}: {other}"),
            }
        }
        assert_eq!(std::fs::metadata(fixture.workspace_path().join("f")).unwrap().ino(), inode);
        assert!(!marked(&fixture.workspace));
    }

    #[test]
    fn names_of_one_inode_stay_names_of_one_inode() {
        let fixture = Fixture::new().started();
        std::fs::write(fixture.upper_path().join("a"), "a").unwrap();
        std::fs::create_dir(fixture.upper_path().join("d")).unwrap();
        std::fs::hard_link(fixture.upper_path().join("a"), fixture.upper_path().join("d/b")).unwrap();
        apply(&fixture.batch(), &changes_of(&fixture), &[]).unwrap();
        let root = fixture.workspace_path();
        assert_eq!(
            std::fs::metadata(root.join("a")).unwrap().ino(),
            std::fs::metadata(root.join("d/b")).unwrap().ino()
        );
        assert_eq!(std::fs::metadata(root.join("a")).unwrap().nlink(), 2);
    }

    #[test]
    fn a_change_of_mode_does_not_reach_another_name_outside() {
        let fixture = Fixture::new();
        let outside = tempfile::tempdir_in(fixture.run_path()).unwrap();
        std::fs::write(outside.path().join("shared"), "s").unwrap();
        std::fs::set_permissions(outside.path().join("shared"), std::fs::Permissions::from_mode(0o644)).unwrap();
        std::fs::hard_link(outside.path().join("shared"), fixture.workspace_path().join("shared")).unwrap();
        let fixture = fixture.started();
        let copy = fixture.copy_up("shared", "shared");
        std::fs::set_permissions(copy, std::fs::Permissions::from_mode(0o777)).unwrap();
        apply(&fixture.batch(), &changes_of(&fixture), &[]).unwrap();
        let mode = |path: PathBuf| std::fs::metadata(path).unwrap().permissions().mode() & 0o7777;
        assert_eq!(mode(outside.path().join("shared")), 0o644);
        assert_eq!(mode(fixture.workspace_path().join("shared")), 0o777);
    }

    #[test]
    fn only_what_was_asked_for_lands_and_the_rest_stays_pending() {
        let fixture = mixed();
        let (chosen, rest): (Vec<Change>, Vec<Change>) =
            changes_of(&fixture).into_iter().partition(|change| change.path == Path::new("edited"));
        let remaining: Vec<PathBuf> = rest.iter().map(|change| change.path.clone()).collect();
        apply(&fixture.batch(), &chosen, &remaining).unwrap();
        assert!(fixture.workspace_path().join("removed").exists());
        // The user goes on working on what was applied; that is no change of the run.
        std::fs::write(fixture.workspace_path().join("edited"), "user").unwrap();
        let pending = keep_pending(&fixture.run_dir, scan(&fixture.upper, &fixture.workspace).unwrap()).unwrap();
        assert_eq!(pending.changes.len(), rest.len());
        apply(&fixture.batch(), &pending.changes, &[]).unwrap();
        assert_eq!(std::fs::read(fixture.workspace_path().join("edited")).unwrap(), b"user");
        assert!(!fixture.workspace_path().join("removed").exists());
        assert_eq!(manifests(&fixture.run_dir).unwrap().len(), 2);
    }

    #[test]
    fn twenty_thousand_files_take_seconds() {
        let fixture = Fixture::new();
        for folder in 0..20 {
            std::fs::create_dir(fixture.workspace_path().join(folder.to_string())).unwrap();
        }
        let fixture = fixture.started();
        for folder in 0..20 {
            let directory = fixture.upper_path().join(folder.to_string());
            std::fs::create_dir(&directory).unwrap();
            for file in 0..1000 {
                std::fs::write(directory.join(file.to_string()), "small").unwrap();
            }
        }
        let started = Instant::now();
        let changes = changes_of(&fixture);
        let scanned = started.elapsed();
        apply(&fixture.batch(), &changes, &[]).unwrap();
        eprintln!("scan {scanned:?}, all {:?}", started.elapsed());
        assert_eq!(std::fs::read_dir(fixture.workspace_path().join("19")).unwrap().count(), 1000);
        assert!(started.elapsed() < Duration::from_secs(30), "{:?}", started.elapsed());
    }
}
