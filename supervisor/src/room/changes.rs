//! What a run changed, read from its own layer.
//!
//! The cost follows the changed entries, never the tree: only what lies in the upper layer, and what a deletion or a
//! replacement of a directory covers, is looked at. The format is overlayfs's, mounted with `userxattr`
//! (Documentation/filesystems/overlayfs.rst): a whiteout is a character device 0:0, or an empty file with
//! `user.overlay.whiteout` in a directory whose `user.overlay.opaque` is `x`; an opaque directory (`y`) hides what
//! the lower one holds; `user.overlay.origin` marks what was copied up.

use super::{path::spelled, tree};
use crate::effect::Digest;
use rustix::fs::{FileType, Stat};
use serde::{Deserialize, Serialize};
use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    ffi::{OsStr, OsString},
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
};

/// The most entries that one scan lists; a run that changes more is refused rather than let fill our memory.
pub const MAX_ENTRIES: usize = 2_000_000;

/// What a node is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum NodeType {
    /// A regular file.
    File,
    /// A directory.
    Directory,
    /// A symbolic link.
    Link,
    /// A FIFO, socket or device. Never shipped.
    Special,
}

/// A node in a few words.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Summary {
    /// What it is.
    #[serde(rename = "type")]
    pub kind: NodeType,
    /// Its permission bits, as they are or are to be shipped.
    pub mode: u32,
    /// Its length in bytes; of a link, the target's.
    pub size: u64,
    /// Its modification time in nanoseconds since the epoch.
    pub mtime_ns: i64,
    /// SHA-256 of a regular file's content, where it was needed.
    pub digest: Option<Digest>,
    /// A link's target, spelled as paths are.
    pub target: Option<String>,
    /// Its inode number.
    pub inode: u64,
    /// Its inode's change time in nanoseconds since the epoch.
    pub ctime_ns: i64,
    /// How many names it has.
    pub links: u64,
}

impl Summary {
    /// From a stat; digest and target are for the caller to add.
    #[allow(clippy::unnecessary_cast, reason = "the fields' types differ between architectures")]
    pub fn of(stat: &Stat) -> Summary {
        Summary {
            kind: match tree::kind_of(stat) {
                FileType::RegularFile => NodeType::File,
                FileType::Directory => NodeType::Directory,
                FileType::Symlink => NodeType::Link,
                _ => NodeType::Special,
            },
            mode: tree::permissions(stat),
            size: u64::try_from(stat.st_size).unwrap_or(0),
            mtime_ns: tree::mtime_ns(stat),
            digest: None,
            target: None,
            inode: stat.st_ino as u64,
            ctime_ns: tree::ctime_ns(stat),
            links: stat.st_nlink as u64,
        }
    }
}

/// How a path changed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "change")]
pub enum ChangeKind {
    /// Nothing was there.
    Created,
    /// Something else was there: other content, target or type.
    Modified,
    /// It is gone.
    Deleted,
    /// The same content with other permission bits, modification time or extended attributes.
    Attributes,
    /// It is what was at `from`, untouched.
    Moved {
        /// Where it was.
        #[serde(with = "spelled")]
        from: PathBuf,
    },
}

/// One change.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Change {
    /// The path, relative to the workspace.
    #[serde(with = "spelled")]
    pub path: PathBuf,
    /// How it changed.
    #[serde(flatten)]
    pub kind: ChangeKind,
    /// What the workspace holds there (for a move, at the place it came from).
    pub before: Option<Summary>,
    /// What it is to become.
    pub after: Option<Summary>,
    /// Changes with one group are one deed (a directory deleted, moved or replaced): all of them or none.
    pub group: Option<u32>,
    /// Whether the run saw something in the workspace that is not there any more.
    pub vanished: bool,
}

/// Something the program made that never leaves the run's layer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Skipped {
    /// The path.
    #[serde(with = "spelled")]
    pub path: PathBuf,
    /// Why, in a few words.
    pub reason: String,
}

/// Everything a run changed, in the order of the paths, parents before what they hold.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChangeSet {
    /// The changes.
    pub changes: Vec<Change>,
    /// What is not shipped.
    pub skipped: Vec<Skipped>,
}

/// A scan that could not be finished.
#[derive(Debug, thiserror::Error)]
pub enum ScanError {
    /// A call on a file failed.
    #[error("cannot read what the run changed at `{path}`: {source}")]
    Read {
        /// Where.
        path: String,
        /// The kernel's word.
        #[source]
        source: io::Error,
    },
    /// More entries than we list.
    #[error(
        "the run changed more than {MAX_ENTRIES} files; discard it, or let it write fewer (for example into /tmp)"
    )]
    TooMany,
}

/// Names the path of an I/O error.
pub(super) fn at(path: &Path) -> impl FnOnce(io::Error) -> ScanError + '_ {
    move |source| ScanError::Read { path: super::path::printable(path), source }
}

/// Reads what an overlay's upper layer changes against the lower one.
///
/// The lower directory is the workspace on the host, which others may change meanwhile; [`super::batch`] checks
/// again what is read here.
///
/// # Errors
/// [`ScanError`] naming the path.
pub fn scan(upper: &OwnedFd, lower: &OwnedFd) -> Result<ChangeSet, ScanError> {
    let mut scan = Scan::new(upper.as_fd(), lower.as_fd());
    scan.run()?;
    Ok(scan.finish()?.0)
}

/// A directory of the upper layer still to be read.
struct Task {
    path: PathBuf,
    /// Whether the lower directory is hidden, by this directory's mark or an ancestor's.
    opaque: bool,
    /// Whether the workspace has a directory here.
    lower: bool,
    /// Whether the directory has the set-group-id bit that new ones inherit.
    setgid: bool,
}

/// Collects changes; the mirror's scan uses it too.
pub(super) struct Scan<'a> {
    upper: BorrowedFd<'a>,
    lower: BorrowedFd<'a>,
    changes: Vec<Change>,
    skipped: Vec<Skipped>,
    /// Files that say they were copied up from a path where nothing is now: moved, or deleted by somebody else.
    origins: BTreeSet<PathBuf>,
    groups: u32,
    entries: usize,
}

/// Something of the run's that is no directory, and what the workspace has at its path.
pub(super) struct Leaf<'l> {
    /// The path.
    pub(super) path: PathBuf,
    /// The run's directory that holds it.
    pub(super) upper: &'l OwnedFd,
    /// Its name there.
    pub(super) name: &'l OsStr,
    /// What it is.
    pub(super) stat: &'l Stat,
    /// The workspace's directory, if it has one there.
    pub(super) lower: Option<&'l OwnedFd>,
    /// What that holds at the name.
    pub(super) below: Option<&'l Stat>,
}

/// What overlayfs says of a node in its private attributes.
#[derive(Default)]
pub(super) struct Marks {
    pub(super) opaque: Option<Vec<u8>>,
    copied_up: bool,
}

impl<'a> Scan<'a> {
    pub(super) fn new(upper: BorrowedFd<'a>, lower: BorrowedFd<'a>) -> Scan<'a> {
        Scan { upper, lower, changes: Vec::new(), skipped: Vec::new(), origins: BTreeSet::new(), groups: 0, entries: 0 }
    }

    fn run(&mut self) -> Result<(), ScanError> {
        let root = rustix::fs::fstat(self.lower).map_err(|error| at(Path::new(""))(error.into()))?;
        let setgid = tree::permissions(&root) & 0o2000 != 0;
        let mut tasks = vec![Task { path: PathBuf::new(), opaque: false, lower: true, setgid }];
        while let Some(task) = tasks.pop() {
            self.directory(&task, &mut tasks)?;
        }
        Ok(())
    }

    fn directory(&mut self, task: &Task, tasks: &mut Vec<Task>) -> Result<(), ScanError> {
        let upper = tree::open_listing(self.upper, &task.path).map_err(at(&task.path))?;
        let lower = match task.lower {
            true => Some(tree::open_directory_forced(self.lower, &task.path).map_err(at(&task.path))?),
            false => None,
        };
        let handle = tree::open_at(upper.as_fd(), OsStr::new(".")).map_err(at(&task.path))?;
        let xattr_whiteouts = marks(handle.as_fd()).map_err(at(&task.path))?.opaque.as_deref() == Some(b"x");
        let mut seen = BTreeSet::new();
        for name in tree::names(upper.as_fd()).map_err(at(&task.path))? {
            let path = task.path.join(&name);
            self.count()?;
            let Some(stat) = tree::look_at(upper.as_fd(), &name).map_err(at(&path))? else { continue };
            let below = match &lower {
                Some(lower) => tree::look_at(lower.as_fd(), &name).map_err(at(&path))?,
                None => None,
            };
            let whiteout = is_device_whiteout(&stat)
                || (xattr_whiteouts && is_xattr_whiteout(upper.as_fd(), &name, &stat).map_err(at(&path))?);
            if whiteout {
                match below {
                    Some(below) if !task.opaque => self.deleted(path, &below)?,
                    // The directory's own mark hides the lower one already; listed below as not seen.
                    Some(_) => continue,
                    // Somebody else deleted it too, or first. In a hidden or new directory it hides nothing.
                    None if task.lower && !task.opaque => self.changes.push(vanished_deletion(path)),
                    None => {}
                }
                seen.insert(name);
                continue;
            }
            seen.insert(name.clone());
            match tree::kind_of(&stat) {
                FileType::Directory => {
                    let next = self.subdirectory(task, path, &upper, &name, &stat, below.as_ref())?;
                    tasks.push(next);
                }
                _ => self.leaf(Leaf {
                    path,
                    upper: &upper,
                    name: &name,
                    stat: &stat,
                    lower: lower.as_ref(),
                    below: below.as_ref(),
                })?,
            }
        }
        if task.opaque && task.lower {
            let listing = tree::open_listing(self.lower, &task.path).map_err(at(&task.path))?;
            for name in tree::names(listing.as_fd()).map_err(at(&task.path))? {
                if !seen.contains(&name) {
                    let path = task.path.join(&name);
                    if let Some(below) = tree::look_at(listing.as_fd(), &name).map_err(at(&path))? {
                        self.deleted(path, &below)?;
                    }
                }
            }
        }
        Ok(())
    }

    fn subdirectory(
        &mut self,
        task: &Task,
        path: PathBuf,
        upper: &OwnedFd,
        name: &OsStr,
        stat: &Stat,
        below: Option<&Stat>,
    ) -> Result<Task, ScanError> {
        let handle = tree::open_at(upper.as_fd(), name).map_err(at(&path))?;
        let marks = marks(handle.as_fd()).map_err(at(&path))?;
        let opaque = task.opaque || marks.opaque.as_deref() == Some(b"y");
        let merged = below.is_some_and(|below| tree::kind_of(below) == FileType::Directory);
        let mut after = Summary::of(stat);
        // A program cannot add set-id bits; a directory keeps what it had, or takes its parent's group bit.
        let allowed = match below {
            Some(below) if merged => tree::permissions(below) & 0o6000,
            Some(_) | None if task.setgid => 0o2000,
            Some(_) | None => 0,
        };
        after.mode &= !0o6000 | allowed;
        let setgid = after.mode & 0o2000 != 0;
        match below {
            Some(below) if merged => {
                let attributes = after.mode != tree::permissions(below) || {
                    let beneath = tree::open_directory_forced(self.lower, &path).map_err(at(&path))?;
                    tree::user_xattrs(beneath.as_fd()).map_err(at(&path))?
                        != tree::user_xattrs(handle.as_fd()).map_err(at(&path))?
                };
                if attributes {
                    self.push(path.clone(), ChangeKind::Attributes, Some(Summary::of(below)), Some(after));
                }
            }
            Some(below) => {
                let before = self.lower_summary(&path, below)?;
                self.push(path.clone(), ChangeKind::Modified, Some(before), Some(after));
            }
            None => {
                self.push(path.clone(), ChangeKind::Created, None, Some(after));
                // A directory cannot be renamed in such an overlay, so one that was copied up was here.
                if marks.copied_up && task.lower && !opaque {
                    self.vanish_last();
                }
            }
        }
        Ok(Task { path, opaque, lower: merged, setgid })
    }

    fn file(&mut self, leaf: Leaf<'_>) -> Result<(), ScanError> {
        let Leaf { path, upper, name, stat, lower, below } = leaf;
        let mut after = Summary::of(stat);
        let kept = below
            .filter(|below| tree::kind_of(below) == FileType::RegularFile)
            .map_or(0, |below| tree::permissions(below) & 0o6000);
        after.mode &= !0o6000 | kept;
        let handle = tree::open_at(upper.as_fd(), name).map_err(at(&path))?;
        match (lower, below) {
            (Some(lower), Some(below)) if tree::kind_of(below) == FileType::RegularFile => {
                let mut before = Summary::of(below);
                let mut content = tree::open_file_at(upper.as_fd(), name).map_err(at(&path))?;
                let mut beneath = tree::open_file_at(lower.as_fd(), name).map_err(at(&path))?;
                if after.size != before.size || !tree::same_content(&content, &beneath).map_err(at(&path))? {
                    after.digest = Some(tree::digest(rewound(&mut content).map_err(at(&path))?).map_err(at(&path))?.0);
                    before.digest = Some(tree::digest(rewound(&mut beneath).map_err(at(&path))?).map_err(at(&path))?.0);
                    self.push(path, ChangeKind::Modified, Some(before), Some(after));
                } else if after.mode != before.mode
                    || after.mtime_ns != before.mtime_ns
                    || tree::user_xattrs(handle.as_fd()).map_err(at(&path))?
                        != tree::user_xattrs(beneath.as_fd()).map_err(at(&path))?
                {
                    self.push(path, ChangeKind::Attributes, Some(before), Some(after));
                }
            }
            (_, below) => {
                let mut content = tree::open_file_at(upper.as_fd(), name).map_err(at(&path))?;
                after.digest = Some(tree::digest(&mut content).map_err(at(&path))?.0);
                let copied_up =
                    lower.is_some() && below.is_none() && marks(handle.as_fd()).map_err(at(&path))?.copied_up;
                if copied_up {
                    self.origins.insert(path.clone());
                }
                self.placed(path, below, after)?;
            }
        }
        Ok(())
    }

    fn link(&mut self, leaf: Leaf<'_>) -> Result<(), ScanError> {
        let Leaf { path, upper, name, stat, lower, below } = leaf;
        let mut after = Summary::of(stat);
        let target = tree::link_target(upper.as_fd(), name).map_err(at(&path))?;
        after.target = Some(super::path::spell(&target));
        if let (Some(lower), Some(below)) = (lower, below) {
            if tree::kind_of(below) == FileType::Symlink
                && tree::link_target(lower.as_fd(), name).map_err(at(&path))? == target
            {
                return Ok(());
            }
        }
        self.placed(path, below, after)
    }

    /// A file or link where the workspace has nothing, or something of another kind.
    fn placed(&mut self, path: PathBuf, below: Option<&Stat>, after: Summary) -> Result<(), ScanError> {
        match below {
            None => self.push(path, ChangeKind::Created, None, Some(after)),
            Some(below) if tree::kind_of(below) == FileType::Directory => {
                let group = self.group();
                let before = Summary::of(below);
                self.push_in(path.clone(), ChangeKind::Modified, Some(before), Some(after), Some(group));
                self.subtree(&path, group)?;
            }
            Some(below) => {
                let before = self.lower_summary(&path, below)?;
                self.push(path, ChangeKind::Modified, Some(before), Some(after));
            }
        }
        Ok(())
    }

    /// A path that the workspace has and the run's view has not.
    pub(super) fn deleted(&mut self, path: PathBuf, below: &Stat) -> Result<(), ScanError> {
        let before = self.lower_summary(&path, below)?;
        if before.kind == NodeType::Directory {
            let group = self.group();
            self.push_in(path.clone(), ChangeKind::Deleted, Some(before), None, Some(group));
            self.subtree(&path, group)
        } else {
            self.push(path, ChangeKind::Deleted, Some(before), None);
            Ok(())
        }
    }

    /// Lists everything below a lower directory as deleted, so that each path can be decided.
    fn subtree(&mut self, top: &Path, group: u32) -> Result<(), ScanError> {
        let mut pending = vec![top.to_path_buf()];
        while let Some(directory) = pending.pop() {
            let listing = tree::open_listing(self.lower, &directory).map_err(at(&directory))?;
            for name in tree::names(listing.as_fd()).map_err(at(&directory))? {
                self.count()?;
                let path = directory.join(&name);
                let Some(stat) = tree::look_at(listing.as_fd(), &name).map_err(at(&path))? else { continue };
                let mut before = Summary::of(&stat);
                if before.kind == NodeType::Link {
                    let target = tree::link_target(listing.as_fd(), &name).map_err(at(&path))?;
                    before.target = Some(super::path::spell(&target));
                }
                if before.kind == NodeType::Directory {
                    pending.push(path.clone());
                }
                self.push_in(path, ChangeKind::Deleted, Some(before), None, Some(group));
            }
        }
        Ok(())
    }

    fn lower_summary(&self, path: &Path, stat: &Stat) -> Result<Summary, ScanError> {
        let mut summary = Summary::of(stat);
        if summary.kind == NodeType::Link {
            let (parent, name) = tree::parent_of(self.lower, path).map_err(at(path))?;
            let target = tree::link_target(parent.as_fd(), name).map_err(at(path))?;
            summary.target = Some(super::path::spell(&target));
        }
        Ok(summary)
    }

    pub(super) fn push(&mut self, path: PathBuf, kind: ChangeKind, before: Option<Summary>, after: Option<Summary>) {
        self.push_in(path, kind, before, after, None);
    }

    fn push_in(
        &mut self,
        path: PathBuf,
        kind: ChangeKind,
        before: Option<Summary>,
        after: Option<Summary>,
        group: Option<u32>,
    ) {
        self.changes.push(Change { path, kind, before, after, group, vanished: false });
    }

    /// Marks the change just pushed.
    fn vanish_last(&mut self) {
        if let Some(change) = self.changes.last_mut() {
            change.vanished = true;
        }
    }

    fn group(&mut self) -> u32 {
        self.groups += 1;
        self.groups
    }

    pub(super) fn count(&mut self) -> Result<(), ScanError> {
        self.entries += 1;
        if self.entries > MAX_ENTRIES {
            return Err(ScanError::TooMany);
        }
        Ok(())
    }

    /// Finds the moves, judges what vanished, and orders the changes.
    pub(super) fn finish(mut self) -> Result<(ChangeSet, u32), ScanError> {
        self.pair_files()?;
        self.pair_directories()?;
        self.judge_origins();
        self.changes
            .sort_by(|left, right| (&left.path, left.before.is_some()).cmp(&(&right.path, right.before.is_some())));
        self.skipped.sort_by(|left, right| left.path.cmp(&right.path));
        Ok((ChangeSet { changes: self.changes, skipped: self.skipped }, self.groups))
    }

    /// A file deleted here and an equal one created there, mode and time included, was moved.
    fn pair_files(&mut self) -> Result<(), ScanError> {
        let mut sources: HashMap<(u64, i64, u32), Vec<usize>> = HashMap::new();
        for (index, change) in self.changes.iter().enumerate().rev() {
            if let (ChangeKind::Deleted, None, Some(before)) = (&change.kind, change.group, &change.before) {
                if before.kind == NodeType::File && !change.vanished {
                    sources.entry((before.size, before.mtime_ns, before.mode)).or_default().push(index);
                }
            }
        }
        if sources.is_empty() {
            return Ok(());
        }
        let mut gone = BTreeSet::new();
        for index in 0..self.changes.len() {
            let change = &self.changes[index];
            let Some(after) = &change.after else { continue };
            if change.kind != ChangeKind::Created || after.kind != NodeType::File || after.links > 1 {
                continue;
            }
            let Some(candidates) = sources.get_mut(&(after.size, after.mtime_ns, after.mode)) else { continue };
            let mut found = None;
            for (place, &candidate) in candidates.iter().enumerate().rev() {
                let from = self.changes[candidate].path.clone();
                // The move keeps the workspace's own inode; another name elsewhere must not get its attributes.
                if self.equal_files(&from, &change.path, after.digest)? {
                    found = Some((place, candidate, from));
                    break;
                }
            }
            if let Some((place, candidate, from)) = found {
                candidates.remove(place);
                gone.insert(candidate);
                let before = self.changes[candidate].before.take();
                let change = &mut self.changes[index];
                change.before = before;
                if let (Some(before), Some(after)) = (&mut change.before, &change.after) {
                    before.digest = after.digest;
                }
                change.kind = ChangeKind::Moved { from };
                self.origins.remove(&change.path.clone());
            }
        }
        self.drop_indices(&gone);
        Ok(())
    }

    /// Whether a lower file and an upper one have equal content and user attributes.
    fn equal_files(&self, lower: &Path, upper: &Path, digest: Option<Digest>) -> Result<bool, ScanError> {
        let mut beneath = match tree::open_file(self.lower, lower) {
            Ok(file) => file,
            Err(error) if tree::absent(&error) => return Ok(false),
            Err(error) => return Err(at(lower)(error)),
        };
        if Some(tree::digest(&mut beneath).map_err(at(lower))?.0) != digest {
            return Ok(false);
        }
        let (parent, name) = tree::parent_of(self.upper, upper).map_err(at(upper))?;
        let above = tree::open_at(parent.as_fd(), name).map_err(at(upper))?;
        Ok(tree::user_xattrs(beneath.as_fd()).map_err(at(lower))?
            == tree::user_xattrs(above.as_fd()).map_err(at(upper))?)
    }

    /// A directory deleted here and a new one there with equal files throughout was moved.
    fn pair_directories(&mut self) -> Result<(), ScanError> {
        let mut deleted: BTreeMap<u32, Vec<usize>> = BTreeMap::new();
        for (index, change) in self.changes.iter().enumerate() {
            if let (ChangeKind::Deleted, Some(group)) = (&change.kind, change.group) {
                deleted.entry(group).or_default().push(index);
            }
        }
        // A group whose top was replaced by a file is no move.
        deleted.retain(|group, _| {
            !self.changes.iter().any(|change| change.group == Some(*group) && change.kind == ChangeKind::Modified)
        });
        if deleted.is_empty() {
            return Ok(());
        }
        let by_path: BTreeMap<PathBuf, usize> = self
            .changes
            .iter()
            .enumerate()
            .filter(|(_, change)| change.kind == ChangeKind::Created && change.group.is_none())
            .map(|(index, change)| (change.path.clone(), index))
            .collect();
        let tops: Vec<(PathBuf, usize)> = by_path
            .iter()
            .filter(|(path, index)| {
                self.changes[**index].after.as_ref().is_some_and(|after| after.kind == NodeType::Directory)
                    && !path.parent().is_some_and(|parent| by_path.contains_key(parent))
            })
            .map(|(path, index)| (path.clone(), *index))
            .collect();
        let mut gone = BTreeSet::new();
        for (top, _) in tops {
            // Everything created below it; the paths of one subtree are neighbours in the order of paths.
            let members: Vec<(&PathBuf, usize)> = by_path
                .range(top.clone()..)
                .take_while(|(path, _)| path.starts_with(&top))
                .map(|(path, index)| (path, *index))
                .collect();
            if self.skipped.iter().any(|skipped| skipped.path.starts_with(&top)) {
                continue;
            }
            let mut found = None;
            for (group, sources) in &deleted {
                if sources.len() == members.len() && self.equal_trees(sources, &members)? {
                    found = Some(*group);
                    break;
                }
            }
            let Some(group) = found else { continue };
            let sources = deleted.remove(&group).unwrap_or_default();
            let Some(from_top) = self.shortest(&sources) else { continue };
            let pairs: Vec<(usize, PathBuf)> =
                members.iter().map(|(path, index)| (*index, rebased(path, &top, &from_top))).collect();
            let mut before: HashMap<PathBuf, Summary> = HashMap::new();
            for index in &sources {
                if let Some(summary) = self.changes[*index].before.take() {
                    before.insert(self.changes[*index].path.clone(), summary);
                }
            }
            for (index, from) in pairs {
                let change = &mut self.changes[index];
                change.before = before.remove(&from);
                change.group = Some(group);
                self.origins.remove(&change.path);
                change.kind = ChangeKind::Moved { from };
            }
            gone.extend(sources);
        }
        self.drop_indices(&gone);
        Ok(())
    }

    /// Whether a deleted tree and a created one have the same paths, kinds, modes and contents.
    fn equal_trees(&self, sources: &[usize], members: &[(&PathBuf, usize)]) -> Result<bool, ScanError> {
        let Some(from_top) = self.shortest(sources) else { return Ok(false) };
        let Some((top, _)) = members.first() else { return Ok(false) };
        let old: HashMap<&Path, &Change> =
            sources.iter().map(|index| (self.changes[*index].path.as_path(), &self.changes[*index])).collect();
        let mut to_compare = Vec::new();
        for (path, index) in members {
            let from = rebased(path, top, &from_top);
            let (Some(before), Some(after)) =
                (old.get(from.as_path()).and_then(|change| change.before.as_ref()), &self.changes[*index].after)
            else {
                return Ok(false);
            };
            if before.kind != after.kind || after.links > 1 && after.kind == NodeType::File {
                return Ok(false);
            }
            match before.kind {
                NodeType::Directory if before.mode == after.mode => {}
                NodeType::Link if before.target == after.target => {}
                NodeType::File
                    if (before.mode, before.size, before.mtime_ns) == (after.mode, after.size, after.mtime_ns) =>
                {
                    to_compare.push((from, path.to_path_buf(), after.digest));
                }
                NodeType::Directory | NodeType::Link | NodeType::File | NodeType::Special => return Ok(false),
            }
        }
        for (from, path, digest) in to_compare {
            if !self.equal_files(&from, &path, digest)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn shortest(&self, indices: &[usize]) -> Option<PathBuf> {
        indices.iter().map(|index| &self.changes[*index].path).min().cloned()
    }

    /// A copied-up file at a path where the workspace has nothing was moved there and then edited, or somebody else
    /// deleted it under the run. With a user's mount the mark does not say where it came from, so it is explained
    /// only while there are files that the run itself removed or replaced.
    fn judge_origins(&mut self) {
        let mut explanations = self
            .changes
            .iter()
            .filter(|change| {
                matches!(change.kind, ChangeKind::Deleted | ChangeKind::Modified)
                    && change.before.as_ref().is_some_and(|before| before.kind == NodeType::File)
            })
            .count();
        let mut explained: BTreeSet<u64> = BTreeSet::new();
        // Another name of a copied-up inode whose own path is still there is explained by it.
        let inodes: BTreeSet<u64> = self
            .changes
            .iter()
            .filter(|change| change.before.is_some())
            .filter_map(|change| change.after.as_ref().map(|after| after.inode))
            .collect();
        for change in &mut self.changes {
            if !self.origins.contains(&change.path) || change.kind != ChangeKind::Created {
                continue;
            }
            let Some(after) = &change.after else { continue };
            if inodes.contains(&after.inode) || explained.contains(&after.inode) || after.links > 1 {
                continue;
            }
            if explanations > 0 {
                explanations -= 1;
                explained.insert(after.inode);
            } else {
                change.vanished = true;
            }
        }
    }

    fn drop_indices(&mut self, gone: &BTreeSet<usize>) {
        let mut index = 0;
        self.changes.retain(|_| {
            index += 1;
            !gone.contains(&(index - 1))
        });
    }

    /// Compares what is no directory with what the workspace has there; the mirror's scan asks too.
    pub(super) fn leaf(&mut self, leaf: Leaf<'_>) -> Result<(), ScanError> {
        match tree::kind_of(leaf.stat) {
            FileType::RegularFile => self.file(leaf),
            FileType::Symlink => self.link(leaf),
            other => {
                self.skipped.push(Skipped { path: leaf.path, reason: special_reason(other) });
                Ok(())
            }
        }
    }

    /// Marks the last change as seen by the run and gone since.
    pub(super) fn note_vanished(&mut self, path: PathBuf) {
        self.changes.push(vanished_deletion(path));
    }

    /// Whether anything was said of this path, for the mirror's check of vanished files.
    pub(super) fn mark_vanished(&mut self, path: &Path) {
        if let Some(change) = self.changes.iter_mut().rev().find(|change| change.path == path) {
            change.vanished = true;
        }
    }
}

fn vanished_deletion(path: PathBuf) -> Change {
    Change { path, kind: ChangeKind::Deleted, before: None, after: None, group: None, vanished: true }
}

fn rebased(path: &Path, top: &Path, onto: &Path) -> PathBuf {
    match path.strip_prefix(top) {
        Ok(rest) if rest.as_os_str().is_empty() => onto.to_path_buf(),
        Ok(rest) => onto.join(rest),
        Err(_) => path.to_path_buf(),
    }
}

fn rewound(file: &mut std::fs::File) -> io::Result<&mut std::fs::File> {
    io::Seek::rewind(file)?;
    Ok(file)
}

pub(super) fn is_device_whiteout(stat: &Stat) -> bool {
    tree::kind_of(stat) == FileType::CharacterDevice && stat.st_rdev == 0
}

pub(super) fn is_xattr_whiteout(directory: BorrowedFd<'_>, name: &OsStr, stat: &Stat) -> io::Result<bool> {
    if tree::kind_of(stat) != FileType::RegularFile || stat.st_size != 0 {
        return Ok(false);
    }
    let handle = tree::open_at(directory, name)?;
    Ok(tree::xattr(handle.as_fd(), OsStr::new("user.overlay.whiteout"))?.is_some())
}

pub(super) fn marks(handle: BorrowedFd<'_>) -> io::Result<Marks> {
    let names: Vec<OsString> = tree::xattr_names(handle)?;
    let mut marks = Marks::default();
    for name in names {
        if name == "user.overlay.opaque" {
            marks.opaque = tree::xattr(handle, &name)?;
        } else if name == "user.overlay.origin" {
            marks.copied_up = true;
        }
    }
    Ok(marks)
}

fn special_reason(kind: FileType) -> String {
    match kind {
        FileType::Fifo => "a FIFO lives only as long as its run",
        FileType::Socket => "a socket lives only as long as its run",
        FileType::CharacterDevice | FileType::BlockDevice => "device nodes are never shipped",
        FileType::RegularFile | FileType::Directory | FileType::Symlink | FileType::Unknown => "not a file",
    }
    .to_owned()
}

#[cfg(test)]
mod tests {
    use super::super::{
        batch,
        testing::{tree_state, Fixture, Inodes},
    };
    use super::*;
    use std::{
        ffi::OsStr, os::unix::ffi::OsStrExt, os::unix::fs::symlink, os::unix::fs::PermissionsExt, process::Command,
    };

    fn kinds(fixture: &Fixture) -> Vec<(String, ChangeKind)> {
        scan(&fixture.upper, &fixture.workspace)
            .unwrap()
            .changes
            .into_iter()
            .map(|change| (change.path.display().to_string(), change.kind))
            .collect()
    }

    #[test]
    fn an_identical_copy_up_is_no_change() {
        let fixture = Fixture::new();
        std::fs::create_dir(fixture.workspace_path().join("d")).unwrap();
        std::fs::write(fixture.workspace_path().join("d/f"), "f").unwrap();
        let fixture = fixture.started();
        std::fs::create_dir(fixture.upper_path().join("d")).unwrap();
        fixture.copy_up("d/f", "d/f");
        assert_eq!(kinds(&fixture), []);
    }

    #[test]
    fn an_opaque_directory_deletes_what_it_hides_and_nothing_else() {
        let fixture = Fixture::new();
        std::fs::create_dir_all(fixture.workspace_path().join("d/sub")).unwrap();
        for name in ["d/kept", "d/gone", "d/sub/deep", "d/sub/kept"] {
            std::fs::write(fixture.workspace_path().join(name), name).unwrap();
        }
        let fixture = fixture.started();
        std::fs::create_dir_all(fixture.upper_path().join("d/sub")).unwrap();
        fixture.opaque("d");
        fixture.copy_up("d/kept", "d/kept");
        fixture.copy_up("d/sub/kept", "d/sub/kept");
        std::fs::write(fixture.upper_path().join("d/new"), "new").unwrap();
        let path = |text: &str| text.to_owned();
        assert_eq!(
            kinds(&fixture),
            [
                (path("d/gone"), ChangeKind::Deleted),
                (path("d/new"), ChangeKind::Created),
                (path("d/sub/deep"), ChangeKind::Deleted)
            ]
        );
    }

    #[test]
    fn a_whiteout_as_an_attribute_is_a_deletion() {
        let fixture = Fixture::new();
        std::fs::create_dir(fixture.workspace_path().join("d")).unwrap();
        std::fs::write(fixture.workspace_path().join("d/f"), "f").unwrap();
        let fixture = fixture.started();
        std::fs::create_dir(fixture.upper_path().join("d")).unwrap();
        std::fs::write(fixture.upper_path().join("d/f"), "").unwrap();
        let set = |path: &str, name: &str, value: &[u8]| {
            let file = std::fs::File::open(fixture.upper_path().join(path)).unwrap();
            tree::set_xattr(file.as_fd(), OsStr::new(name), value).unwrap();
        };
        set("d", "user.overlay.opaque", b"x");
        set("d/f", "user.overlay.whiteout", b"y");
        assert_eq!(kinds(&fixture), [("d/f".to_owned(), ChangeKind::Deleted)]);
    }

    #[test]
    fn a_file_that_the_host_deleted_under_the_run_is_marked() {
        let fixture = Fixture::new();
        std::fs::write(fixture.workspace_path().join("f"), "f").unwrap();
        let fixture = fixture.started();
        let copy = fixture.copy_up("f", "f");
        std::fs::write(copy, "edited").unwrap();
        std::fs::remove_file(fixture.workspace_path().join("f")).unwrap();
        let set = scan(&fixture.upper, &fixture.workspace).unwrap();
        assert!(set.changes[0].vanished, "{set:?}");
    }

    #[test]
    fn sockets_and_fifos_are_named_and_not_shipped() {
        let fixture = Fixture::new().started();
        nix::unistd::mkfifo(&fixture.upper_path().join("p"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        let _socket = std::os::unix::net::UnixListener::bind(fixture.upper_path().join("s")).unwrap();
        let set = scan(&fixture.upper, &fixture.workspace).unwrap();
        assert!(set.changes.is_empty());
        assert_eq!(
            set.skipped.iter().map(|skipped| skipped.path.display().to_string()).collect::<Vec<_>>(),
            ["p", "s"]
        );
    }

    /// The kernel's own overlay, in a user namespace as a jail makes it, and the round trip of everything odd.
    ///
    /// Needs unshare(1) and unprivileged user namespaces; where they are missing the test says so and does nothing,
    /// unless TOLLGATE_TEST_OVERLAY=must.
    #[test]
    fn a_real_overlays_changes_make_the_workspace_what_the_program_saw() {
        let fixture = Fixture::new();
        let root = fixture.workspace_path();
        for name in ["a", "b", "c", "k", "linked"] {
            std::fs::write(root.join(name), name).unwrap();
        }
        std::fs::create_dir_all(root.join("d/e")).unwrap();
        std::fs::write(root.join("d/e/x"), "x").unwrap();
        std::fs::create_dir(root.join("q")).unwrap();
        std::fs::write(root.join("q/1"), "1").unwrap();
        std::fs::write(root.join("q/2"), "2").unwrap();
        symlink("a", root.join("l")).unwrap();
        std::fs::create_dir(root.join("shut")).unwrap();
        std::fs::write(root.join("shut/in"), "in").unwrap();
        std::fs::set_permissions(root.join("shut"), std::fs::Permissions::from_mode(0o555)).unwrap();
        let odd = OsStr::from_bytes(b"-odd\n\xff\\ name");
        std::fs::write(root.join(odd), "odd").unwrap();
        let fixture = fixture.started();
        let run = fixture.run_path();
        std::fs::create_dir_all(run.join("layer/work")).unwrap();
        std::fs::create_dir_all(run.join("merged")).unwrap();
        std::fs::create_dir_all(run.join("seen")).unwrap();
        let script = r#"
            set -e
            mount -t overlay overlay -o "lowerdir=$1/workspace,upperdir=$1/run/layer/upper,workdir=$1/run/layer/work,userxattr" "$1/run/merged"
            cd "$1/run/merged"
            echo more >> a; mv b moved; rm c; mkdir c; echo in > c/in; chmod 600 k
            cp -a d d2; rm -r d; rm -r q; mkdir q; echo two > q/2
            mkdir -p new/empty; echo n > new/n; chmod 555 new/empty new
            mv l l2; ln a hard; ln -s /nowhere dangling
            chmod 755 shut; echo out > shut/out; chmod 555 shut
            mv -- "$(printf '%b' '-odd\n\0377\\ name')" "$(printf '%b' 'odder\t\0376')"
            truncate -s 64M sparse; echo end >> sparse
            name=$(printf 'n%.0s' $(seq 255)); echo long > "$name"
            rm linked; mkdir linked; mkdir linked/deep
            mkfifo fifo; : > private; chmod 000 private; mkdir hidden; echo h > hidden/h; chmod 000 hidden
            cp -a --no-preserve=links . ../seen/ 2>/dev/null || cp -a . ../seen/ || true
        "#;
        let mut command = Command::new("unshare");
        command.args(["--user", "--map-root-user", "--mount", "sh", "-c", script, "sh"]).arg(run.parent().unwrap());
        let output = command.output();
        let ran = output.as_ref().is_ok_and(|output| output.status.success());
        if !ran {
            let must = std::env::var("TOLLGATE_TEST_OVERLAY").is_ok_and(|word| word == "must");
            assert!(!must, "an overlay in a user namespace has to work here: {output:?}");
            eprintln!("skipped: no overlay in a user namespace here: {output:?}");
            return;
        }
        let set = scan(&fixture.upper, &fixture.workspace).unwrap();
        assert!(set.changes.iter().all(|change| !change.vanished), "{set:#?}");
        batch::apply(&fixture.batch(), &set.changes, &[]).unwrap();
        std::fs::remove_file(run.join("seen/fifo")).unwrap();
        let state = tree_state(&root, Inodes::Ignored);
        let seen = tree_state(&run.join("seen"), Inodes::Ignored);
        for (path, what) in &seen {
            assert_eq!(
                state.get(path).map(|text| &text[..text.len().min(200)]),
                Some(&what[..what.len().min(200)]),
                "{path:?}"
            );
        }
        assert_eq!(
            state.len(),
            seen.len(),
            "{:?}",
            state.keys().filter(|path| !seen.contains_key(*path)).collect::<Vec<_>>()
        );
        assert_eq!(
            scan(&fixture.upper, &fixture.workspace)
                .unwrap()
                .changes
                .iter()
                .filter(|change| change.kind != ChangeKind::Deleted)
                .count(),
            0
        );
        // The before-images and layers have directories without rights; leave nothing for the next test to trip over.
        batch::discard(&fixture.run_dir).unwrap();
    }
}
