//! A copy of the workspace, where the kernel refuses an overlay.
//!
//! The run works in `<run>/layer/mirror`; `<run>/mirror.json` says what each path was when it was copied. Blocks are shared
//! where the file system can. The size is bounded: a copy that would fill the disk is refused before it begins.
//! Reading the changes back costs one stat a file and no read of what the run did not touch.

use super::{
    changes::{at, ChangeKind, ChangeSet, Leaf, NodeType, Scan, ScanError, Summary},
    path::{printable, spelled},
    tree,
};
use rustix::fs::{self as kernel, AtFlags, FileType, Mode, Stat};
use serde::{Deserialize, Serialize};
use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    ffi::OsStr,
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
};

/// How large a workspace is copied unless the caller says otherwise: 4 GiB on disk, a copy of a few seconds.
pub const DEFAULT_MAX_BYTES: u64 = 4 << 30;

pub(crate) const MANIFEST: &str = "mirror.json";

/// The copy, in the folder of the run's layer.
const NAME: &str = "mirror";

/// Why there is no mirror.
#[derive(Debug, thiserror::Error)]
pub enum MirrorError {
    /// The workspace is larger than the bound.
    #[error("the workspace takes more than {max_bytes} bytes on disk, too much to copy for a run without an overlay; name a smaller folder with --workspace, or put the state directory (TOLLGATE_STATE) on a file system with user extended attributes so that an overlay works")]
    TooLarge {
        /// The bound.
        max_bytes: u64,
    },
    /// A call on a file failed.
    #[error("cannot copy `{path}` of the workspace: {source}")]
    Copy {
        /// The path.
        path: String,
        /// The kernel's word.
        #[source]
        source: io::Error,
    },
    /// One of our own files could not be written or read.
    #[error("cannot {deed} of the mirror: {source}")]
    Ours {
        /// What was tried.
        deed: &'static str,
        /// The kernel's word.
        #[source]
        source: io::Error,
    },
}

/// What a path was when it was copied.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Entry {
    #[serde(with = "spelled")]
    path: PathBuf,
    /// The workspace's node.
    before: Summary,
    /// The copy's inode and change time: equal later means untouched.
    inode: u64,
    ctime_ns: i64,
}

/// Copies the workspace to `<run>/layer/mirror` and gives a handle of it.
///
/// With an owner, the copies belong to that user and group: the jail's on the host. FIFOs, sockets, devices and what
/// other mounts hold are left out.
///
/// # Errors
/// [`MirrorError`]; what was copied so far is removed.
pub fn create(
    workspace: &OwnedFd,
    run_dir: &OwnedFd,
    max_bytes: u64,
    owner: Option<(u32, u32)>,
) -> Result<OwnedFd, MirrorError> {
    let layer = tree::open_directory(run_dir.as_fd(), Path::new("layer"), kernel::OFlags::RDONLY);
    let layer = layer.map_err(|source| MirrorError::Ours { deed: "open the folder", source })?;
    let clear = || tree::remove(layer.as_fd(), OsStr::new(NAME));
    clear().map_err(|source| MirrorError::Ours { deed: "remove an old copy", source })?;
    let nodes = measure(workspace.as_fd(), max_bytes)?;
    copy(workspace, run_dir, &layer, &nodes, owner).inspect_err(|_| {
        let _ = clear();
    })
}

/// Lists the workspace and adds up what it takes, before a byte is copied.
fn measure(workspace: BorrowedFd<'_>, max_bytes: u64) -> Result<Vec<(PathBuf, Stat)>, MirrorError> {
    let mut nodes = Vec::new();
    let mut total: u64 = 0;
    let mut pending = vec![PathBuf::new()];
    while let Some(directory) = pending.pop() {
        let failed = |source| MirrorError::Copy { path: printable(&directory), source };
        let listing = match tree::open_listing(workspace, &directory) {
            Ok(listing) => listing,
            // Another mount, shown empty.
            Err(error) if error.raw_os_error() == Some(libc::EXDEV) => continue,
            Err(error) => return Err(failed(error)),
        };
        for name in tree::names(listing.as_fd()).map_err(failed)? {
            let path = directory.join(&name);
            if directory.as_os_str().is_empty() && name.as_encoded_bytes().starts_with(b".tollgate-") {
                continue;
            }
            let Some(stat) = tree::look_at(listing.as_fd(), &name).map_err(failed)? else { continue };
            match tree::kind_of(&stat) {
                FileType::Directory => pending.push(path.clone()),
                FileType::RegularFile => {
                    #[allow(clippy::unnecessary_cast, reason = "the field's type differs between architectures")]
                    let stored = (stat.st_blocks as u64).saturating_mul(512);
                    total = total.saturating_add(stored);
                }
                FileType::Symlink => {}
                _ => continue,
            }
            if total > max_bytes {
                return Err(MirrorError::TooLarge { max_bytes });
            }
            nodes.push((path, stat));
        }
    }
    nodes.sort_by(|left, right| left.0.cmp(&right.0));
    Ok(nodes)
}

fn copy(
    workspace: &OwnedFd,
    run_dir: &OwnedFd,
    layer: &OwnedFd,
    nodes: &[(PathBuf, Stat)],
    owner: Option<(u32, u32)>,
) -> Result<OwnedFd, MirrorError> {
    let ours = |deed| move |source| MirrorError::Ours { deed, source };
    let mirror = tree::ensure_directory_at(layer.as_fd(), OsStr::new(NAME)).map_err(ours("make the directory"))?;
    let mut links: HashMap<u64, PathBuf> = HashMap::new();
    for (path, stat) in nodes {
        let failed = |source| MirrorError::Copy { path: printable(path), source };
        copy_node(workspace, &mirror, path, &Summary::of(stat), &mut links).map_err(failed)?;
        if let Some((uid, gid)) = owner {
            let (parent, name) = tree::parent_of(mirror.as_fd(), path).map_err(failed)?;
            tree::set_owner_at(parent.as_fd(), name, uid, gid).map_err(failed)?;
        }
    }
    // Modes and times last, deepest first: a directory without its owner's rights takes no entries.
    for (path, stat) in nodes.iter().rev() {
        let failed = |source| MirrorError::Copy { path: printable(path), source };
        let node = Summary::of(stat);
        let (parent, name) = tree::parent_of(mirror.as_fd(), path).map_err(failed)?;
        if node.kind != NodeType::Link {
            tree::set_mode(tree::open_at(parent.as_fd(), name).map_err(failed)?.as_fd(), node.mode).map_err(failed)?;
        }
        tree::set_mtime_at(parent.as_fd(), name, node.mtime_ns).map_err(failed)?;
    }
    let root = kernel::fstat(workspace).map_err(|error| ours("read the mode")(error.into()))?;
    tree::set_mode(mirror.as_fd(), tree::permissions(&root) | 0o700).map_err(ours("set the mode"))?;
    if let Some((uid, gid)) = owner {
        tree::set_owner_at(layer.as_fd(), OsStr::new(NAME), uid, gid).map_err(ours("set the owner"))?;
    }
    let mut manifest = Vec::with_capacity(nodes.len());
    for (path, stat) in nodes {
        let failed = |source| MirrorError::Copy { path: printable(path), source };
        let copied = tree::look(mirror.as_fd(), path).map_err(failed)?;
        let copied = copied.as_ref().map(Summary::of).ok_or_else(|| failed(io::ErrorKind::NotFound.into()))?;
        let mut before = Summary::of(stat);
        before.target = link_text(&mirror, path, &before).map_err(failed)?;
        manifest.push(Entry { path: path.clone(), before, inode: copied.inode, ctime_ns: copied.ctime_ns });
    }
    let text = serde_json::to_vec(&manifest).map_err(|error| ours("write the manifest")(io::Error::other(error)))?;
    tree::write_durably(run_dir.as_fd(), MANIFEST, &text).map_err(ours("write the manifest"))?;
    Ok(mirror)
}

fn link_text(root: &OwnedFd, path: &Path, node: &Summary) -> io::Result<Option<String>> {
    if node.kind != NodeType::Link {
        return Ok(None);
    }
    let (parent, name) = tree::parent_of(root.as_fd(), path)?;
    Ok(Some(super::path::spell(&tree::link_target(parent.as_fd(), name)?)))
}

fn copy_node(
    workspace: &OwnedFd,
    mirror: &OwnedFd,
    path: &Path,
    node: &Summary,
    links: &mut HashMap<u64, PathBuf>,
) -> io::Result<()> {
    let (from, name) = tree::parent_of(workspace.as_fd(), path)?;
    let (to, _) = tree::parent_of(mirror.as_fd(), path)?;
    match node.kind {
        NodeType::Directory => {
            kernel::mkdirat(&to, name, Mode::from_raw_mode(0o700))?;
            let handle = tree::open_at(to.as_fd(), name)?;
            match tree::open_directory_forced(workspace.as_fd(), path) {
                Ok(original) => tree::set_user_xattrs(handle.as_fd(), &tree::user_xattrs(original.as_fd())?)?,
                Err(error) if error.raw_os_error() == Some(libc::EXDEV) => {}
                Err(error) => return Err(error),
            }
        }
        NodeType::Link => kernel::symlinkat(tree::link_target(from.as_fd(), name)?, &to, name)?,
        NodeType::File => {
            if node.links > 1 {
                if let Some(first) = links.get(&node.inode) {
                    let (first_parent, first_name) = tree::parent_of(mirror.as_fd(), first)?;
                    return Ok(kernel::linkat(&first_parent, first_name, &to, name, AtFlags::empty())?);
                }
                links.insert(node.inode, path.to_path_buf());
            }
            let content = tree::open_file_at(from.as_fd(), name)?;
            let copy = tree::create_file_at(to.as_fd(), name)?;
            tree::copy_content(&content, &copy)?;
            tree::set_user_xattrs(copy.as_fd(), &tree::user_xattrs(content.as_fd())?)?;
        }
        NodeType::Special => {}
    }
    Ok(())
}

/// Reads what a run changed in its mirror, as [`super::changes::scan`] reads an overlay's upper layer.
///
/// # Errors
/// [`ScanError`] naming the path.
pub fn scan(run_dir: &OwnedFd, mirror: &OwnedFd, workspace: &OwnedFd) -> Result<ChangeSet, ScanError> {
    let manifest_path = Path::new(MANIFEST);
    let text = tree::read_ours(run_dir.as_fd(), MANIFEST)
        .and_then(|text| text.ok_or_else(|| io::ErrorKind::NotFound.into()))
        .map_err(at(manifest_path))?;
    let entries: Vec<Entry> = serde_json::from_slice(&text)
        .map_err(|error| at(manifest_path)(io::Error::new(io::ErrorKind::InvalidData, error)))?;
    let known: BTreeMap<&Path, &Entry> = entries.iter().map(|entry| (entry.path.as_path(), entry)).collect();
    let mut scan = Scan::new(mirror.as_fd(), workspace.as_fd());
    let mut seen: BTreeSet<PathBuf> = BTreeSet::new();
    let mut directories: BTreeSet<PathBuf> = BTreeSet::from([PathBuf::new()]);
    let mut pending = vec![PathBuf::new()];
    while let Some(directory) = pending.pop() {
        let listing = tree::open_listing(mirror.as_fd(), &directory).map_err(at(&directory))?;
        let beneath = match tree::open_directory_forced(workspace.as_fd(), &directory) {
            Ok(beneath) => Some(beneath),
            Err(error) if tree::absent(&error) => None,
            Err(error) if matches!(error.raw_os_error(), Some(libc::ENOTDIR | libc::ELOOP | libc::EXDEV)) => None,
            Err(error) => return Err(at(&directory)(error)),
        };
        for name in tree::names(listing.as_fd()).map_err(at(&directory))? {
            let path = directory.join(&name);
            scan.count()?;
            let Some(stat) = tree::look_at(listing.as_fd(), &name).map_err(at(&path))? else { continue };
            let node = Summary::of(&stat);
            let entry = known.get(path.as_path()).copied();
            seen.insert(path.clone());
            let below = match &beneath {
                Some(beneath) => tree::look_at(beneath.as_fd(), &name).map_err(at(&path))?,
                None => None,
            };
            if node.kind == NodeType::Directory {
                scan_directory(&mut scan, &path, &node, entry, below.as_ref(), mirror, workspace)?;
                directories.insert(path.clone());
                pending.push(path);
                continue;
            }
            if entry.is_some_and(|entry| (entry.inode, entry.ctime_ns) == (node.inode, node.ctime_ns)) {
                continue;
            }
            scan.leaf(Leaf {
                path: path.clone(),
                upper: &listing,
                name: &name,
                stat: &stat,
                lower: beneath.as_ref(),
                below: below.as_ref(),
            })?;
            if entry.is_some() && below.is_none() {
                scan.mark_vanished(&path);
            }
        }
    }
    for entry in &entries {
        let parent = entry.path.parent().unwrap_or(Path::new(""));
        // What lay below a directory that is gone goes with it.
        if seen.contains(&entry.path) || !directories.contains(parent) {
            continue;
        }
        match tree::look(workspace.as_fd(), &entry.path).map_err(at(&entry.path))? {
            Some(below) => scan.deleted(entry.path.clone(), &below)?,
            None => scan.note_vanished(entry.path.clone()),
        }
    }
    Ok(scan.finish()?.0)
}

fn scan_directory(
    scan: &mut Scan<'_>,
    path: &Path,
    node: &Summary,
    entry: Option<&Entry>,
    below: Option<&Stat>,
    mirror: &OwnedFd,
    workspace: &OwnedFd,
) -> Result<(), ScanError> {
    let mut after = node.clone();
    let kept =
        entry.filter(|entry| entry.before.kind == NodeType::Directory).map_or(0, |entry| entry.before.mode & 0o6000);
    after.mode &= !0o6000 | kept;
    match (entry, below.map(Summary::of)) {
        (Some(entry), Some(before))
            if entry.before.kind == NodeType::Directory && before.kind == NodeType::Directory =>
        {
            let xattrs = |root: &OwnedFd| -> Result<_, ScanError> {
                let handle = tree::open_directory_forced(root.as_fd(), path).map_err(at(path))?;
                tree::user_xattrs(handle.as_fd()).map_err(at(path))
            };
            if after.mode != entry.before.mode || xattrs(mirror)? != xattrs(workspace)? {
                scan.push(path.to_path_buf(), ChangeKind::Attributes, Some(before), Some(after));
            }
        }
        // Gone or something else on the host: what the run changed below it has lost its directory, and says so.
        (Some(entry), _) if entry.before.kind == NodeType::Directory => {}
        (_, Some(before)) if before.kind != NodeType::Directory => {
            scan.push(path.to_path_buf(), ChangeKind::Modified, Some(before), Some(after));
        }
        (Some(_), None) => {
            scan.push(path.to_path_buf(), ChangeKind::Created, None, Some(after));
            scan.mark_vanished(path);
        }
        (_, _) => scan.push(path.to_path_buf(), ChangeKind::Created, None, Some(after)),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::{
        batch::{apply, ApplyError},
        testing::{tree_state, Fixture, Inodes},
    };
    use super::*;
    use std::os::unix::fs::{symlink, PermissionsExt};

    fn filled() -> (Fixture, OwnedFd, PathBuf) {
        let fixture = Fixture::new();
        let root = fixture.workspace_path();
        std::fs::create_dir_all(root.join("d/e")).unwrap();
        std::fs::write(root.join("d/e/f"), "f").unwrap();
        std::fs::write(root.join("a"), "a").unwrap();
        std::fs::write(root.join("b"), "to move").unwrap();
        std::fs::write(root.join("c"), "c").unwrap();
        symlink("nowhere", root.join("l")).unwrap();
        let fixture = fixture.started();
        let mirror = create(&fixture.workspace, &fixture.run_dir, DEFAULT_MAX_BYTES, None).unwrap();
        let path = fixture.run_path().join("layer/mirror");
        (fixture, mirror, path)
    }

    #[test]
    fn an_untouched_mirror_has_no_changes() {
        let (fixture, mirror, _) = filled();
        assert_eq!(scan(&fixture.run_dir, &mirror, &fixture.workspace).unwrap(), ChangeSet::default());
    }

    #[test]
    fn a_mirrors_changes_make_the_workspace_equal_to_it() {
        let (fixture, mirror, path) = filled();
        std::fs::write(path.join("a"), "A").unwrap();
        std::fs::rename(path.join("b"), path.join("d/b2")).unwrap();
        std::fs::remove_file(path.join("c")).unwrap();
        std::fs::create_dir(path.join("c")).unwrap();
        std::fs::write(path.join("c/new"), "new").unwrap();
        std::fs::remove_dir_all(path.join("d/e")).unwrap();
        std::fs::remove_file(path.join("l")).unwrap();
        symlink("elsewhere", path.join("l")).unwrap();
        std::fs::set_permissions(path.join("d"), std::fs::Permissions::from_mode(0o700)).unwrap();
        let set = scan(&fixture.run_dir, &mirror, &fixture.workspace).unwrap();
        assert!(
            set.changes.iter().any(|change| change.kind == ChangeKind::Moved { from: PathBuf::from("b") }),
            "{set:?}"
        );
        let mut batch = fixture.batch();
        batch.source = &mirror;
        apply(&batch, &set.changes, &[]).unwrap();
        assert_eq!(tree_state(&fixture.workspace_path(), Inodes::Ignored), tree_state(&path, Inodes::Ignored));
    }

    #[test]
    fn a_file_that_the_host_deleted_meanwhile_is_a_conflict() {
        let (fixture, mirror, path) = filled();
        std::fs::write(path.join("a"), "A").unwrap();
        std::fs::remove_file(fixture.workspace_path().join("a")).unwrap();
        let set = scan(&fixture.run_dir, &mirror, &fixture.workspace).unwrap();
        let mut batch = fixture.batch();
        batch.source = &mirror;
        assert!(matches!(apply(&batch, &set.changes, &[]), Err(ApplyError::Conflict { .. })));
        assert!(!fixture.workspace_path().join("a").exists());
    }

    #[test]
    fn a_workspace_over_the_bound_is_refused_before_anything_is_copied() {
        let fixture = Fixture::new();
        std::fs::write(fixture.workspace_path().join("big"), vec![1; 1 << 20]).unwrap();
        assert!(matches!(
            create(&fixture.workspace, &fixture.run_dir, 1 << 16, None),
            Err(MirrorError::TooLarge { .. })
        ));
        assert!(!fixture.run_path().join("layer/mirror").exists());
    }
}
