//! Works out how what a run applied is taken back, from the before-images that its batches kept.
//!
//! Pure reading: the workspace is compared with what the batch left there, and every path that is not so any more is a
//! [`Conflict`], left as it is. What remains is a [`Reversal`] for [`super::batch::revert`], which does it as one batch
//! with a journal and before-images of its own; so an undo can be undone, and a crash leaves before or after. The cost
//! follows what the run changed, never the tree.

use super::{
    batch::{self, ApplyError, Attributes, BatchKind, Conflict, Consumed, Manifest, Operation, Reversal},
    changes::{Change, ChangeKind, NodeType, Summary},
    path::{printable, spell, unspell},
    tree,
};
use crate::effect::Digest;
use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    os::fd::{AsFd, OwnedFd},
    path::{Path, PathBuf},
};

/// What to do about a path that somebody changed since.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnChange {
    /// It stays as it is.
    Leave,
    /// It is put back all the same; what it holds now is kept as a before-image, so that a redo brings it again.
    Overwrite,
}

/// What is to be taken back.
pub struct Wanted<'a> {
    /// The kind of the batches that are reverted: applies for an undo, undos for a redo.
    pub kind: BatchKind,
    /// Whether a path is meant; none for all.
    pub select: Option<&'a dyn Fn(&Path) -> bool>,
    /// About conflicts.
    pub on_change: OnChange,
    /// How many receipts the run has.
    pub after_seq: u64,
}

/// How a reversal would go.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// What is to be done.
    pub reversal: Reversal,
    /// Paths that stay as they are, and why.
    pub conflicts: Vec<Conflict>,
    /// Paths that are already as they would become.
    pub already: Vec<PathBuf>,
    /// The paths of the run's changes that stay pending in its layer after the batch.
    pub remaining: Vec<PathBuf>,
    /// How many changes of earlier batches were looked at.
    pub considered: usize,
}

/// One change of an earlier batch.
struct Item {
    number: u32,
    change: Change,
    /// How its attributes were changed in place.
    in_place: Option<(Attributes, Attributes)>,
}

impl Item {
    /// Items with one key are one deed.
    fn group(&self) -> Option<(u32, u32)> {
        self.change.group.map(|group| (self.number, group))
    }

    /// Where the change's result is in the workspace.
    fn path(&self) -> &Path {
        &self.change.path
    }
}

/// Plans to take back what the wanted batches did.
///
/// # Errors
/// [`ApplyError`] when the run's own files or the workspace cannot be read.
pub fn plan(run_dir: &OwnedFd, workspace: &OwnedFd, wanted: &Wanted<'_>) -> Result<Plan, ApplyError> {
    let mut images = BTreeMap::new();
    let mut dropped: Vec<PathBuf> = Vec::new();
    let mut items = Vec::new();
    for (directory, manifest) in batch::manifests(run_dir)? {
        if manifest.kind != wanted.kind {
            continue;
        }
        let number = directory.file_name().and_then(|name| name.to_str()?.parse().ok()).unwrap_or(0);
        images.extend(manifest.slots.iter().map(|slot| (slot.path.clone(), (number, slot.slot))));
        dropped.extend(manifest.dropped.iter().filter_map(|text| unspell(text).ok()));
        items.extend(items_of(number, manifest));
    }
    items.sort_by(|left, right| left.path().cmp(right.path()));
    if let Some(select) = wanted.select {
        let named = |item: &Item| match &item.change.kind {
            ChangeKind::Moved { from } => select(item.path()) || select(from),
            ChangeKind::Created | ChangeKind::Modified | ChangeKind::Deleted | ChangeKind::Attributes => {
                select(item.path())
            }
        };
        let groups: BTreeSet<(u32, u32)> = items.iter().filter(|item| named(item)).filter_map(Item::group).collect();
        items.retain(|item| named(item) || item.group().is_some_and(|group| groups.contains(&group)));
    }
    let planner = Planner {
        run_dir,
        workspace,
        dropped,
        on_change: wanted.on_change,
        plan: Plan {
            reversal: Reversal {
                images,
                kind: wanted.kind.reverse(),
                after_seq: wanted.after_seq,
                ..Reversal::default()
            },
            conflicts: Vec::new(),
            already: Vec::new(),
            remaining: Vec::new(),
            considered: items.len(),
        },
        groups: 0,
        removed: BTreeMap::new(),
        left: BTreeSet::new(),
    };
    planner.run(&items)
}

fn items_of(number: u32, manifest: Manifest) -> impl Iterator<Item = Item> {
    let mut in_place: BTreeMap<PathBuf, (Attributes, Attributes)> = manifest
        .attributes
        .into_iter()
        .filter_map(|operation| match operation {
            Operation::Attributes { path, before, after, .. } => Some((path, (before, after))),
            Operation::Place { .. }
            | Operation::Exchange { .. }
            | Operation::Retire { .. }
            | Operation::Rename { .. } => None,
        })
        .collect();
    let existed: BTreeSet<String> = manifest.existed.into_iter().collect();
    manifest.changes.into_iter().filter(move |change| !existed.contains(&spell(&change.path))).map(move |change| Item {
        number,
        in_place: in_place.remove(&change.path),
        change,
    })
}

struct Planner<'a> {
    run_dir: &'a OwnedFd,
    workspace: &'a OwnedFd,
    dropped: Vec<PathBuf>,
    on_change: OnChange,
    plan: Plan,
    groups: u32,
    /// What will be gone from where it is: nodes that are removed, with what they are now, and those moved away.
    removed: BTreeMap<PathBuf, Option<Summary>>,
    /// Items that are not reverted, by path.
    left: BTreeSet<PathBuf>,
}

/// The clock that file systems stamp inodes with (`CLOCK_REALTIME_COARSE`, clock_gettime(2)).
pub fn now_ns() -> i64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::RealtimeCoarse);
    now.tv_sec * 1_000_000_000 + now.tv_nsec
}

const CHANGED: &str = "was changed since";
const GONE: &str = "was deleted since";
const TAKEN: &str = "is there again since";

impl Planner<'_> {
    fn run(mut self, items: &[Item]) -> Result<Plan, ApplyError> {
        self.moves(items)?;
        for item in items {
            match &item.change.kind {
                ChangeKind::Created | ChangeKind::Modified if !is_directory(&item.change.after) => self.leaf(item)?,
                ChangeKind::Attributes => self.attributes(item)?,
                ChangeKind::Created | ChangeKind::Modified | ChangeKind::Deleted | ChangeKind::Moved { .. } => {}
            }
        }
        self.made_directories(items)?;
        self.restored(items)?;
        let Planner { mut plan, left, workspace, run_dir, .. } = self;
        plan.reversal.changes.sort_by(|one, other| one.path.cmp(&other.path));
        lost_directories(&mut plan, workspace)?;
        let put_back: BTreeSet<&Path> = plan.reversal.changes.iter().flat_map(ends_of).collect();
        let mut consumed: BTreeMap<u32, Vec<String>> = BTreeMap::new();
        for item in items {
            let at = match &item.change.kind {
                ChangeKind::Moved { from } => from.as_path(),
                ChangeKind::Created | ChangeKind::Modified | ChangeKind::Deleted | ChangeKind::Attributes => {
                    item.path()
                }
            };
            let done = put_back.contains(at) || plan.already.iter().any(|path| path == item.path());
            if done && !left.contains(item.path()) {
                consumed.entry(item.number).or_default().push(spell(item.path()));
            }
        }
        plan.reversal.consumed = consumed.into_iter().map(|(number, paths)| Consumed { number, paths }).collect();
        plan.remaining = remaining(run_dir, &plan.reversal.changes)?;
        plan.conflicts.sort_by(|one, other| one.path.cmp(&other.path));
        plan.conflicts.dedup_by(|one, other| one.path == other.path);
        plan.already.sort();
        Ok(plan)
    }

    fn conflict(&mut self, item: &Item, reason: impl Into<String>) {
        self.left.insert(item.path().to_path_buf());
        self.plan.conflicts.push(Conflict { path: item.path().to_path_buf(), reason: reason.into() });
    }

    fn look(&self, path: &Path) -> Result<Option<Summary>, ApplyError> {
        Ok(tree::look(self.workspace.as_fd(), path).map_err(step(path))?.as_ref().map(Summary::of))
    }

    /// What is at a path now, with its content's digest or its target.
    fn known(&self, path: &Path) -> Result<Option<Summary>, ApplyError> {
        let Some(mut now) = self.look(path)? else { return Ok(None) };
        describe(self.workspace, path, &mut now).map_err(step(path))?;
        Ok(Some(now))
    }

    /// What was at a path before, as its before-image holds it; none where the image is not kept.
    fn image(&self, item: &Item, path: &Path) -> Result<Option<Summary>, ApplyError> {
        let (Some(before), Some(at)) = (&item.change.before, self.plan.reversal.image(path)) else { return Ok(None) };
        let Some(stat) = tree::look(self.run_dir.as_fd(), &at).map_err(step(path))? else { return Ok(None) };
        let mut image = Summary::of(&stat);
        if image.kind != before.kind {
            return Ok(None);
        }
        describe(self.run_dir, &at, &mut image).map_err(step(path))?;
        Ok(Some(Summary { mode: before.mode, mtime_ns: before.mtime_ns, ..image }))
    }

    fn no_image(&self, path: &Path) -> &'static str {
        match self.dropped.iter().any(|dropped| path.starts_with(dropped)) {
            true => "cannot be put back: its old content is not kept (too large to copy, or removed since)",
            false => "cannot be put back: its old content is missing from the run's before-images",
        }
    }

    fn push(
        &mut self,
        path: &Path,
        kind: ChangeKind,
        before: Option<Summary>,
        after: Option<Summary>,
        group: Option<u32>,
    ) {
        self.plan.reversal.changes.push(Change {
            path: path.to_path_buf(),
            kind,
            before,
            after,
            group,
            vanished: false,
        });
    }

    fn new_group(&mut self) -> u32 {
        self.groups += 1;
        self.groups
    }

    /// Moves go back where what was moved is as it was, and the old place is free; a directory whole or not at all.
    fn moves(&mut self, items: &[Item]) -> Result<(), ApplyError> {
        let mut groups: BTreeMap<Option<(u32, u32)>, Vec<&Item>> = BTreeMap::new();
        let mut singles = Vec::new();
        for item in items.iter().filter(|item| matches!(item.change.kind, ChangeKind::Moved { .. })) {
            match item.group() {
                Some(group) => groups.entry(Some(group)).or_default().push(item),
                None => singles.push(vec![item]),
            }
        }
        for members in groups.into_values().chain(singles) {
            let Some(top) = members.first() else { continue };
            let mut found: Vec<Change> = Vec::new();
            let mut obstacle: Option<(&Item, &str)> = None;
            let group = (members.len() > 1 || is_directory(&top.change.before)).then(|| self.new_group());
            let expected: BTreeSet<&Path> = members.iter().map(|item| item.path()).collect();
            for item in &members {
                let (ChangeKind::Moved { from }, Some(before)) = (&item.change.kind, &item.change.before) else {
                    continue;
                };
                let now = match self.look(item.path())? {
                    None => {
                        obstacle = Some((item, GONE));
                        break;
                    }
                    Some(now) => now,
                };
                let same = now.kind == before.kind
                    && now.inode == before.inode
                    && now.mode == before.mode
                    && (now.kind == NodeType::Directory || (now.size, now.mtime_ns) == (before.size, before.mtime_ns));
                if !same {
                    obstacle = Some((item, CHANGED));
                    break;
                }
                if now.kind == NodeType::Directory && !self.holds_only(item.path(), &expected)? {
                    obstacle = Some((item, "holds something new since"));
                    break;
                }
                let after = Summary { digest: before.digest, target: before.target.clone(), ..before.clone() };
                found.push(Change {
                    path: from.clone(),
                    kind: ChangeKind::Moved { from: item.path().to_path_buf() },
                    before: Some(Summary { digest: before.digest, target: before.target.clone(), ..now }),
                    after: Some(after),
                    group,
                    vanished: false,
                });
            }
            if let (None, ChangeKind::Moved { from }) = (obstacle, &top.change.kind) {
                if self.look(from)?.is_some() {
                    obstacle = Some((top, "cannot go back: its old place is taken since"));
                }
            }
            match obstacle {
                Some((item, reason)) => {
                    self.left.extend(members.iter().map(|item| item.path().to_path_buf()));
                    self.conflict(item, reason);
                }
                None => {
                    self.removed.extend(members.iter().map(|item| (item.path().to_path_buf(), None)));
                    self.plan.reversal.changes.extend(found);
                }
            }
        }
        Ok(())
    }

    fn holds_only(&self, directory: &Path, expected: &BTreeSet<&Path>) -> Result<bool, ApplyError> {
        let listing = tree::open_listing(self.workspace.as_fd(), directory).map_err(step(directory))?;
        let names = tree::names(listing.as_fd()).map_err(step(directory))?;
        Ok(names.iter().all(|name| expected.contains(directory.join(name).as_path())))
    }

    /// A file or link that the run made or changed.
    fn leaf(&mut self, item: &Item) -> Result<(), ApplyError> {
        let path = item.path();
        let now = self.known(path)?;
        let is_as_left = match (&now, &item.change.after) {
            (Some(now), Some(after)) => same(now, after),
            (None, _) | (_, None) => false,
        };
        let Some(before) = &item.change.before else {
            match now {
                None => self.plan.already.push(path.to_path_buf()),
                Some(now) if is_as_left || (self.on_change == OnChange::Overwrite && is_leaf(&now)) => {
                    self.removed.insert(path.to_path_buf(), Some(now));
                }
                Some(_) => self.conflict(item, CHANGED),
            }
            return Ok(());
        };
        if before.kind == NodeType::Directory {
            // With what the directory held: see `restored`.
            return Ok(());
        }
        let Some(image) = self.image(item, path)? else {
            let reason = self.no_image(path);
            self.conflict(item, reason);
            return Ok(());
        };
        match now {
            Some(now) if same(&now, &image) && now.mtime_ns == image.mtime_ns => {
                self.plan.already.push(path.to_path_buf());
            }
            Some(now) if is_as_left || (self.on_change == OnChange::Overwrite && is_leaf(&now)) => {
                self.push(path, ChangeKind::Modified, Some(now), Some(image), None);
            }
            Some(_) => self.conflict(item, CHANGED),
            None if self.on_change == OnChange::Overwrite => {
                self.push(path, ChangeKind::Created, None, Some(image), None);
            }
            None => self.conflict(item, GONE),
        }
        Ok(())
    }

    fn attributes(&mut self, item: &Item) -> Result<(), ApplyError> {
        let Some((old, new)) = &item.in_place else {
            // One of several names of an inode got an inode of its own, as if its content had changed.
            return self.leaf(item);
        };
        let path = item.path();
        let Some(now) = self.look(path)? else {
            self.conflict(item, GONE);
            return Ok(());
        };
        let xattrs = xattrs_of(self.workspace, path).map_err(step(path))?;
        let is = Attributes { mode: now.mode, mtime_ns: old.mtime_ns.map(|_| now.mtime_ns), xattrs };
        let node = item.change.before.as_ref().map(|before| (before.kind, before.inode));
        if is == *old {
            self.plan.already.push(path.to_path_buf());
        } else if node != Some((now.kind, now.inode)) || (is != *new && self.on_change == OnChange::Leave) {
            self.conflict(item, CHANGED);
        } else {
            let mut after = item.change.before.clone();
            if let Some(after) = &mut after {
                after.inode = now.inode;
            }
            self.plan.reversal.attributes.insert(path.to_path_buf(), (is, old.clone()));
            self.push(path, ChangeKind::Attributes, Some(now), after, None);
        }
        Ok(())
    }

    /// Directories that the run made go where nothing is left in them, deepest first; the rest stay and are named.
    fn made_directories(&mut self, items: &[Item]) -> Result<(), ApplyError> {
        let made = |item: &&Item| {
            matches!(item.change.kind, ChangeKind::Created | ChangeKind::Modified) && is_directory(&item.change.after)
        };
        let mut gone: BTreeSet<PathBuf> = BTreeSet::new();
        for item in items.iter().rev().filter(made) {
            let path = item.path();
            let Some(now) = self.look(path)? else {
                match item.change.before {
                    None => self.plan.already.push(path.to_path_buf()),
                    Some(_) => self.conflict(item, GONE),
                }
                continue;
            };
            let mode = item.change.after.as_ref().map(|after| after.mode);
            if now.kind != NodeType::Directory || mode != Some(now.mode) {
                self.conflict(item, CHANGED);
                continue;
            }
            let listing = tree::open_listing(self.workspace.as_fd(), path).map_err(step(path))?;
            let names = tree::names(listing.as_fd()).map_err(step(path))?;
            match names.iter().map(|name| path.join(name)).find(|inside| !self.removed.contains_key(inside)) {
                Some(stays) => {
                    self.conflict(item, format!("stays: it holds `{}`", printable(&stays)));
                }
                None if item.change.before.is_some() => {
                    let Some(image) = self.image(item, path)? else {
                        let reason = self.no_image(path);
                        self.conflict(item, reason);
                        continue;
                    };
                    let group = self.new_group();
                    self.push(path, ChangeKind::Modified, Some(now), Some(image), Some(group));
                    self.take_below(path, group);
                    gone.insert(path.to_path_buf());
                }
                None => {
                    self.removed.insert(path.to_path_buf(), Some(now));
                }
            }
        }
        // What is not below a directory that goes whole goes by itself.
        while let Some((path, summary)) = self.removed.pop_first() {
            let Some(summary) = summary else { continue };
            let group = (summary.kind == NodeType::Directory).then(|| self.new_group());
            self.push(&path, ChangeKind::Deleted, Some(summary), None, group);
            if let Some(group) = group {
                self.take_below(&path, group);
            }
        }
        Ok(())
    }

    /// Everything that is removed below a directory goes with it.
    fn take_below(&mut self, top: &Path, group: u32) {
        let below: Vec<PathBuf> = self
            .removed
            .range(top.to_path_buf()..)
            .map(|(path, _)| path)
            .take_while(|path| path.starts_with(top))
            .cloned()
            .collect();
        for path in below {
            if let Some(Some(summary)) = self.removed.remove(&path) {
                self.push(&path, ChangeKind::Deleted, Some(summary), None, Some(group));
            }
        }
    }

    /// What the run deleted, and directories that it replaced by something else, come back.
    fn restored(&mut self, items: &[Item]) -> Result<(), ApplyError> {
        let mut refused: BTreeSet<(u32, u32)> = BTreeSet::new();
        let mut satisfied: BTreeSet<(u32, u32)> = BTreeSet::new();
        for item in items {
            let path = item.path();
            if item.group().is_some_and(|group| refused.contains(&group)) {
                self.left.insert(path.to_path_buf());
                continue;
            }
            let top_of_replaced = item.change.kind == ChangeKind::Modified
                && is_directory(&item.change.before)
                && !is_directory(&item.change.after);
            if item.change.kind != ChangeKind::Deleted && !top_of_replaced {
                continue;
            }
            let inner = item.group().is_some_and(|group| satisfied.contains(&group));
            let obstacle = if inner {
                None
            } else if top_of_replaced {
                match (self.known(path)?, &item.change.after) {
                    (Some(now), Some(after)) if same(&now, after) => None,
                    (Some(now), _) if self.on_change == OnChange::Overwrite && is_leaf(&now) => None,
                    (Some(_), _) => Some(CHANGED),
                    (None, _) => Some(GONE),
                }
            } else {
                self.look(path)?.map(|_| TAKEN)
            };
            let image = self.image(item, path)?;
            let obstacle = match (&image, obstacle) {
                (None, None) => Some(self.no_image(path)),
                (_, obstacle) => obstacle,
            };
            if let (Some(now), Some(image), false) = (self.known(path)?, &image, top_of_replaced) {
                if item.group().is_none() && same(&now, image) && now.mtime_ns == image.mtime_ns {
                    self.plan.already.push(path.to_path_buf());
                    continue;
                }
                if self.on_change == OnChange::Overwrite && item.group().is_none() && is_leaf(&now) {
                    self.push(path, ChangeKind::Modified, Some(now), Some(image.clone()), None);
                    continue;
                }
            }
            if let Some(reason) = obstacle {
                self.conflict(item, reason);
                if let Some(group) = item.group() {
                    refused.insert(group);
                    // Members that were taken for good already go with the rest.
                    self.drop_group(items, group);
                }
                continue;
            }
            satisfied.extend(item.group());
            let (kind, before) = match top_of_replaced {
                true => (ChangeKind::Modified, self.look(path)?),
                false => (ChangeKind::Created, None),
            };
            self.push(path, kind, before, image, None);
        }
        Ok(())
    }

    fn drop_group(&mut self, items: &[Item], group: (u32, u32)) {
        let members: BTreeSet<&Path> =
            items.iter().filter(|item| item.group() == Some(group)).map(Item::path).collect();
        self.plan.reversal.changes.retain(|change| !members.contains(change.path.as_path()));
        self.left.extend(members.into_iter().map(Path::to_path_buf));
    }
}

/// Holds back what would be put into a directory that is not there, and names it.
fn lost_directories(plan: &mut Plan, workspace: &OwnedFd) -> Result<(), ApplyError> {
    let mut made: BTreeSet<PathBuf> = BTreeSet::new();
    let mut kept = Vec::with_capacity(plan.reversal.changes.len());
    for change in std::mem::take(&mut plan.reversal.changes) {
        let parent = change.path.parent().unwrap_or(Path::new(""));
        let is_put = matches!(change.kind, ChangeKind::Created | ChangeKind::Moved { .. });
        // What moves with its directory is not looked at twice.
        let lost = is_put
            && !made.contains(parent)
            && !parent.as_os_str().is_empty()
            && !tree::look(workspace.as_fd(), parent)
                .map_err(step(parent))?
                .is_some_and(|stat| Summary::of(&stat).kind == NodeType::Directory);
        if lost {
            plan.conflicts.push(Conflict {
                path: change.path.clone(),
                reason: format!("cannot be put back: its directory `{}` is gone", printable(parent)),
            });
            continue;
        }
        if is_directory(&change.after) {
            made.insert(change.path.clone());
        }
        kept.push(change);
    }
    plan.reversal.changes = kept;
    Ok(())
}

/// What stays pending when this is reverted: what was, and new directories that a pending change is in.
fn remaining(run_dir: &OwnedFd, changes: &[Change]) -> Result<Vec<PathBuf>, ApplyError> {
    let Some(mut pending) = batch::pending(run_dir)? else { return Ok(Vec::new()) };
    let again: Vec<PathBuf> = changes
        .iter()
        .filter(|change| change.kind == ChangeKind::Deleted && is_directory(&change.before))
        .map(|change| change.path.clone())
        .filter(|path| pending.range(path.clone()..).next().is_some_and(|below| below.starts_with(path)))
        .collect();
    pending.extend(again);
    Ok(pending.into_iter().collect())
}

fn ends_of(change: &Change) -> impl Iterator<Item = &Path> {
    let from = match &change.kind {
        ChangeKind::Moved { from } => Some(from.as_path()),
        ChangeKind::Created | ChangeKind::Modified | ChangeKind::Deleted | ChangeKind::Attributes => None,
    };
    [Some(change.path.as_path()), from].into_iter().flatten()
}

fn is_directory(summary: &Option<Summary>) -> bool {
    summary.as_ref().is_some_and(|summary| summary.kind == NodeType::Directory)
}

fn is_leaf(summary: &Summary) -> bool {
    matches!(summary.kind, NodeType::File | NodeType::Link)
}

/// The same kind, content and permission bits. A time by itself is no change that somebody could lose.
fn same(now: &Summary, known: &Summary) -> bool {
    now.kind == known.kind
        && match now.kind {
            NodeType::File => {
                // Whose content was not read when only its attributes changed: then the time has to tell.
                let content = match known.digest {
                    Some(_) => now.digest == known.digest,
                    None => now.mtime_ns == known.mtime_ns,
                };
                content && (now.mode, now.size) == (known.mode, known.size)
            }
            NodeType::Link => now.target == known.target,
            NodeType::Directory => now.mode == known.mode,
            NodeType::Special => now.inode == known.inode,
        }
}

/// Adds what only the object itself says: a file's digest, a link's target.
fn describe(root: &OwnedFd, path: &Path, node: &mut Summary) -> io::Result<()> {
    match node.kind {
        NodeType::File => node.digest = Some(digest_of(root, path)?),
        NodeType::Link => {
            let (parent, name) = tree::parent_of(root.as_fd(), path)?;
            node.target = Some(spell(&tree::link_target(parent.as_fd(), name)?));
        }
        NodeType::Directory | NodeType::Special => {}
    }
    Ok(())
}

fn digest_of(root: &OwnedFd, path: &Path) -> io::Result<Digest> {
    Ok(tree::digest(&mut tree::open_file(root.as_fd(), path)?)?.0)
}

fn xattrs_of(root: &OwnedFd, path: &Path) -> io::Result<Vec<(String, String)>> {
    let (parent, name) = tree::parent_of(root.as_fd(), path)?;
    let handle = tree::open_at(parent.as_fd(), name)?;
    Ok(batch::spelled_xattrs(&tree::user_xattrs(handle.as_fd())?))
}

fn step(path: &Path) -> impl FnOnce(io::Error) -> ApplyError + '_ {
    move |source| ApplyError::Step { path: printable(path), source }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::room::{
        batch::{apply, recover, revert, Recovered, Stop},
        changes::scan,
        testing::{mixed, tree_state, Fixture, Inodes},
    };
    use std::os::unix::fs::{MetadataExt, PermissionsExt};

    fn wanted(kind: BatchKind) -> Wanted<'static> {
        Wanted { kind, select: None, on_change: OnChange::Leave, after_seq: 0 }
    }

    fn planned(fixture: &Fixture, wanted: &Wanted<'_>) -> Plan {
        plan(&fixture.run_dir, &fixture.workspace, wanted).unwrap()
    }

    fn reverted(fixture: &Fixture, wanted: &Wanted<'_>) -> Plan {
        let plan = planned(fixture, wanted);
        let batch = batch::Batch { since_ns: i64::MAX, ..fixture.batch() };
        revert(&batch, &plan.reversal, &plan.remaining).unwrap();
        plan
    }

    fn applied(fixture: &Fixture) {
        let changes = scan(&fixture.upper, &fixture.workspace).unwrap().changes;
        apply(&fixture.batch(), &changes, &[]).unwrap();
    }

    fn state(fixture: &Fixture) -> BTreeMap<PathBuf, String> {
        tree_state(&fixture.workspace_path(), Inodes::Ignored)
    }

    /// Files with their inodes and times; directories that were removed come back as others.
    fn files(fixture: &Fixture) -> BTreeMap<PathBuf, String> {
        let exact = tree_state(&fixture.workspace_path(), Inodes::Compared);
        exact.into_iter().filter(|(path, _)| !fixture.workspace_path().join(path).is_dir()).collect()
    }

    fn conflicts(plan: &Plan) -> Vec<(String, String)> {
        plan.conflicts.iter().map(|conflict| (spell(&conflict.path), conflict.reason.clone())).collect()
    }

    #[test]
    fn an_undo_brings_back_what_was_there_and_a_redo_what_the_run_made() {
        let fixture = mixed();
        let (before, exact) = (state(&fixture), files(&fixture));
        applied(&fixture);
        let after = state(&fixture);
        for round in 0..3 {
            let plan = reverted(&fixture, &wanted(BatchKind::Apply));
            assert_eq!(conflicts(&plan), [], "round {round}");
            assert_eq!(state(&fixture), before, "round {round}");
            assert_eq!(files(&fixture), exact, "round {round}: each file is the very one that was there");
            assert!(planned(&fixture, &wanted(BatchKind::Apply)).reversal.changes.is_empty());
            reverted(&fixture, &wanted(BatchKind::Undo));
            assert_eq!(state(&fixture), after, "round {round}");
        }
    }

    #[test]
    fn a_crash_at_any_point_of_an_undo_or_a_redo_leaves_before_or_after() {
        for kind in [BatchKind::Apply, BatchKind::Undo] {
            let mut rolled = (0, 0);
            for at in 0.. {
                let fixture = mixed();
                let original = state(&fixture);
                applied(&fixture);
                let made = state(&fixture);
                let (from, to) = match kind {
                    BatchKind::Apply => (made, original),
                    BatchKind::Undo => {
                        reverted(&fixture, &wanted(BatchKind::Apply));
                        (original, made)
                    }
                };
                let plan = planned(&fixture, &wanted(kind));
                let mut batch = batch::Batch { since_ns: i64::MAX, ..fixture.batch() };
                batch.stop = Some((at, Stop::Die));
                let over = revert(&batch, &plan.reversal, &plan.remaining).is_ok();
                match recover(&fixture.run_dir, &fixture.workspace).unwrap() {
                    Recovered::RolledForward => {
                        rolled.1 += 1;
                        assert_eq!(state(&fixture), to, "{kind:?}, point {at}");
                    }
                    Recovered::RolledBack | Recovered::Nothing if !over => {
                        rolled.0 += 1;
                        assert_eq!(state(&fixture), from, "{kind:?}, point {at}");
                        let again = reverted(&fixture, &wanted(kind));
                        assert_eq!(conflicts(&again), [], "{kind:?}, point {at}");
                        assert_eq!(state(&fixture), to, "{kind:?}, point {at}");
                    }
                    Recovered::RolledBack | Recovered::Nothing => {}
                }
                reverted(&fixture, &wanted(kind.reverse()));
                assert_eq!(state(&fixture), from, "{kind:?}, point {at}: and back");
                if over {
                    break;
                }
            }
            assert!(rolled.0 > 10 && rolled.1 > 0, "{kind:?}: {rolled:?}");
        }
    }

    #[test]
    fn what_somebody_changed_since_is_named_and_left() {
        let fixture = mixed();
        applied(&fixture);
        let root = fixture.workspace_path();
        std::fs::write(root.join("edited"), "the user's").unwrap();
        std::fs::write(root.join("removed"), "again").unwrap();
        std::fs::write(root.join("to-dir/users"), "u").unwrap();
        std::fs::set_permissions(root.join("mode"), std::fs::Permissions::from_mode(0o640)).unwrap();
        std::fs::write(root.join("rack/more"), "m").unwrap();
        let left =
            ["edited", "removed", "to-dir/users", "rack/more"].map(|name| std::fs::read(root.join(name)).unwrap());
        let plan = reverted(&fixture, &wanted(BatchKind::Apply));
        let named: Vec<String> = conflicts(&plan).into_iter().map(|(path, _)| path).collect();
        assert_eq!(named, ["edited", "mode", "rack", "removed", "to-dir"]);
        let now =
            ["edited", "removed", "to-dir/users", "rack/more"].map(|name| std::fs::read(root.join(name)).unwrap());
        assert_eq!(now, left);
        assert_eq!(std::fs::read(root.join("gone/deep/x")).unwrap(), b"x");
        assert_eq!(std::fs::read(root.join("to-file/inner")).unwrap(), b"i");
        assert_eq!(std::fs::read(root.join("moved")).unwrap(), b"content that moves");
        assert!(!root.join("new").exists() && !root.join("place").exists());
    }

    #[test]
    fn what_was_changed_since_is_overwritten_only_when_asked_and_a_redo_brings_it_again() {
        let fixture = mixed();
        applied(&fixture);
        let root = fixture.workspace_path();
        std::fs::write(root.join("edited"), "the user's").unwrap();
        let overwrite = Wanted { on_change: OnChange::Overwrite, ..wanted(BatchKind::Apply) };
        assert_eq!(conflicts(&reverted(&fixture, &overwrite)), []);
        assert_eq!(std::fs::read(root.join("edited")).unwrap(), b"old");
        reverted(&fixture, &wanted(BatchKind::Undo));
        assert_eq!(std::fs::read(root.join("edited")).unwrap(), b"the user's");
    }

    #[test]
    fn chosen_paths_come_back_alone_and_then_the_rest() {
        let fixture = mixed();
        let before = state(&fixture);
        applied(&fixture);
        let after = state(&fixture);
        let select = |path: &Path| path == Path::new("edited") || path.starts_with("gone");
        let some = Wanted { select: Some(&select), ..wanted(BatchKind::Apply) };
        reverted(&fixture, &some);
        let changed: Vec<PathBuf> = after
            .iter()
            .filter(|(path, text)| state(&fixture).get(*path) != Some(text))
            .map(|(path, _)| path.clone())
            .collect();
        assert_eq!(changed, [Path::new("edited")]);
        assert!(fixture.workspace_path().join("gone/deep/x").exists());
        reverted(&fixture, &wanted(BatchKind::Apply));
        assert_eq!(state(&fixture), before);
        reverted(&fixture, &wanted(BatchKind::Undo));
        assert_eq!(state(&fixture), after);
    }

    #[test]
    fn a_new_directory_with_something_pending_stays_a_pending_one_when_it_is_undone() {
        let fixture = Fixture::new().started();
        std::fs::create_dir(fixture.upper_path().join("d")).unwrap();
        std::fs::write(fixture.upper_path().join("d/a"), "a").unwrap();
        std::fs::write(fixture.upper_path().join("d/b"), "b").unwrap();
        let changes = scan(&fixture.upper, &fixture.workspace).unwrap().changes;
        let (held, chosen): (Vec<Change>, Vec<Change>) =
            changes.into_iter().partition(|change| change.path == Path::new("d/b"));
        assert_eq!(held.len(), 1);
        apply(&fixture.batch(), &chosen, &[PathBuf::from("d/b")]).unwrap();
        reverted(&fixture, &wanted(BatchKind::Apply));
        assert!(!fixture.workspace_path().join("d").exists());
        let rest = batch::keep_pending(&fixture.run_dir, scan(&fixture.upper, &fixture.workspace).unwrap()).unwrap();
        apply(&fixture.batch(), &rest.changes, &[]).unwrap();
        assert_eq!(std::fs::read(fixture.workspace_path().join("d/b")).unwrap(), b"b");
        assert!(!fixture.workspace_path().join("d/a").exists());
    }

    #[test]
    fn names_of_one_inode_stay_names_of_one_inode() {
        let fixture = Fixture::new();
        let root = fixture.workspace_path();
        std::fs::write(root.join("one"), "shared").unwrap();
        std::fs::hard_link(root.join("one"), root.join("two")).unwrap();
        let inode = std::fs::metadata(root.join("two")).unwrap().ino();
        let fixture = fixture.started();
        fixture.whiteout("one");
        applied(&fixture);
        reverted(&fixture, &wanted(BatchKind::Apply));
        assert_eq!(std::fs::metadata(root.join("one")).unwrap().ino(), inode);
        assert_eq!(std::fs::metadata(root.join("one")).unwrap().nlink(), 2);
    }

    #[test]
    fn where_before_images_are_copies_they_come_back_with_all_that_belongs_to_them() {
        use std::os::unix::fs::MetadataExt as _;
        let elsewhere = tempfile::tempdir().unwrap();
        let mut fixture = mixed();
        if std::fs::metadata(elsewhere.path()).unwrap().dev()
            == std::fs::metadata(fixture.workspace_path()).unwrap().dev()
        {
            eprintln!("skipped: this machine has one file system for temporary files");
            return;
        }
        fixture.run_dir = tree::open_root(elsewhere.path()).unwrap();
        let before = state(&fixture);
        let times = |fixture: &Fixture| -> BTreeMap<PathBuf, i64> {
            let names = ["edited", "removed", "moved", "mode", "to-dir", "gone/deep/x", "to-file/inner"];
            names
                .map(|name| (name.into(), std::fs::metadata(fixture.workspace_path().join(name)).unwrap().mtime_nsec()))
                .into()
        };
        let old_times = times(&fixture);
        applied(&fixture);
        let after = state(&fixture);
        for _ in 0..2 {
            assert_eq!(conflicts(&reverted(&fixture, &wanted(BatchKind::Apply))), []);
            assert_eq!(state(&fixture), before);
            assert_eq!(times(&fixture), old_times);
            reverted(&fixture, &wanted(BatchKind::Undo));
            assert_eq!(state(&fixture), after);
        }
    }

    /// What a program may do to its files, by numbers that choose the names.
    #[derive(Clone, Debug)]
    enum Deed {
        Write(u8, u8),
        Remove(u8),
        Rename(u8, u8),
        Mode(u8, u16),
        Folder(u8),
        Link(u8, u8),
    }

    const NAMES: [&str; 8] = ["a", "b", "d", "d/x", "d/y", "d/e", "d/e/z", "f"];

    fn act(root: &Path, deed: &Deed) {
        let at = |number: &u8| root.join(NAMES[usize::from(*number) % NAMES.len()]);
        // What cannot be done is left out, as a program would go on.
        let _ = match deed {
            Deed::Write(name, content) => std::fs::write(at(name), [*content; 3]),
            Deed::Remove(name) => std::fs::remove_dir_all(at(name)).or_else(|_| std::fs::remove_file(at(name))),
            Deed::Rename(from, to) => std::fs::rename(at(from), at(to)),
            Deed::Mode(name, mode) if at(name).is_file() => {
                std::fs::set_permissions(at(name), std::fs::Permissions::from_mode(0o600 | u32::from(*mode & 0o177)))
            }
            Deed::Mode(..) => Ok(()),
            Deed::Folder(name) => std::fs::create_dir(at(name)),
            Deed::Link(name, target) => std::os::unix::fs::symlink(NAMES[usize::from(*target) % 8], at(name)),
        };
    }

    fn deeds() -> impl proptest::strategy::Strategy<Value = Vec<Deed>> {
        use proptest::prelude::*;
        let deed = prop_oneof![
            4 => (any::<u8>(), any::<u8>()).prop_map(|(name, content)| Deed::Write(name, content)),
            2 => any::<u8>().prop_map(Deed::Remove),
            2 => (any::<u8>(), any::<u8>()).prop_map(|(from, to)| Deed::Rename(from, to)),
            1 => (any::<u8>(), any::<u16>()).prop_map(|(name, mode)| Deed::Mode(name, mode)),
            3 => any::<u8>().prop_map(Deed::Folder),
            1 => (any::<u8>(), any::<u8>()).prop_map(|(name, target)| Deed::Link(name, target)),
        ];
        proptest::collection::vec(deed, 1..14)
    }

    proptest::proptest! {
        #![proptest_config(proptest::prelude::ProptestConfig::with_cases(
            std::env::var("PROPTEST_CASES").ok().and_then(|text| text.parse().ok()).unwrap_or(48)
        ))]
        #[test]
        fn to_undo_what_was_applied_is_to_have_done_nothing(before in deeds(), run in deeds()) {
            use crate::room::{layer, mirror};
            let fixture = Fixture::new();
            before.iter().for_each(|deed| act(&fixture.workspace_path(), deed));
            let fixture = fixture.started();
            let original = state(&fixture);
            let copy = mirror::create(&fixture.workspace, &fixture.run_dir, u64::MAX, None).unwrap();
            run.iter().for_each(|deed| act(&fixture.run_path().join(layer::MIRROR), deed));
            let changes = mirror::scan(&fixture.run_dir, &copy, &fixture.workspace).unwrap().changes;
            apply(&batch::Batch { source: &copy, ..fixture.batch() }, &changes, &[]).unwrap();
            let made = state(&fixture);
            for _ in 0..2 {
                let plan = reverted(&fixture, &wanted(BatchKind::Apply));
                proptest::prop_assert_eq!(conflicts(&plan), []);
                proptest::prop_assert_eq!(state(&fixture), original.clone());
                reverted(&fixture, &wanted(BatchKind::Undo));
                proptest::prop_assert_eq!(state(&fixture), made.clone());
            }
        }
    }

    #[test]
    fn without_its_before_images_a_run_cannot_be_undone_and_says_so() {
        let fixture = mixed();
        applied(&fixture);
        let after = state(&fixture);
        assert!(batch::images_bytes(&fixture.run_dir).unwrap() > 0);
        batch::forget_images(&fixture.run_dir).unwrap();
        let plan = planned(&fixture, &wanted(BatchKind::Apply));
        let edited = conflicts(&plan).into_iter().find(|(path, _)| path == "edited").unwrap();
        assert!(edited.1.contains("not kept"), "{edited:?}");
        assert_eq!(state(&fixture), after);
    }
}
