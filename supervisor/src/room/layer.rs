//! Takes what a batch applied out of the run's layer, while other changes stay pending there.
//!
//! Contents are staged by a second name for the layer's inode, so without this the user's later edits in place would
//! show in the run's layer, and a scan would compare the workspace with itself. Nothing here touches the workspace.
//! All of it can be done again after a crash: what is gone already is passed over.

use super::{
    changes::{is_device_whiteout, is_xattr_whiteout, marks, Change, ChangeKind, NodeType, Summary},
    tree,
};
use rustix::fs::{OFlags, RenameFlags};
use std::{
    collections::HashMap,
    ffi::OsStr,
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
};

const OPAQUE: &str = "user.overlay.opaque";
const TEMPORARY: &str = "detached.new";

/// The layer's directory below a run's own.
pub const UPPER: &str = "layer/upper";

/// The mirror's directory below a run's own: beside an overlay's, whose mount the jail has already when a copy turns out
/// to be needed.
pub const MIRROR: &str = "layer/mirror";

/// Takes these changes, which a batch has just applied, out of the layer or mirror below `run_dir`.
///
/// An overlay's entry goes away, and the workspace's own shows through. Where a directory hides what the workspace
/// holds, and in a mirror, a missing entry would be a deletion: there the entry gets an inode of its own instead.
///
/// # Errors
/// What the calls on the layer give.
pub fn take_out(changes: &[Change], run_dir: &OwnedFd) -> io::Result<()> {
    let open = |name: &str| match tree::open_directory(run_dir.as_fd(), Path::new(name), OFlags::RDONLY) {
        Ok(directory) => Ok(Some(directory)),
        Err(error) if tree::absent(&error) => Ok(None),
        Err(error) => Err(error),
    };
    if let Some(mirror) = open(MIRROR)? {
        return changes.iter().try_for_each(|change| detach(change, mirror.as_fd(), run_dir.as_fd()));
    }
    let Some(upper) = open(UPPER)? else { return Ok(()) };
    let mut layer = Layer { upper: upper.as_fd(), hiding: HashMap::new() };
    for change in changes {
        layer.show_through(change)?;
    }
    // What is in a directory before the directory.
    for change in changes.iter().rev() {
        if let ChangeKind::Moved { from } = &change.kind {
            layer.remove_whiteout(from)?;
        }
        if layer.hides(change.path.parent().unwrap_or(Path::new("")))? {
            detach(change, upper.as_fd(), run_dir.as_fd())?;
        } else {
            layer.remove(change)?;
        }
    }
    Ok(())
}

struct Layer<'a> {
    upper: BorrowedFd<'a>,
    /// Whether each directory, or one above it, hides what the workspace holds there.
    hiding: HashMap<PathBuf, bool>,
}

impl Layer<'_> {
    /// A directory that was new hid nothing, and hides from now on what was placed in it: its mark goes.
    fn show_through(&self, change: &Change) -> io::Result<()> {
        if change.kind != ChangeKind::Created || !is_directory(change) {
            return Ok(());
        }
        match tree::open_directory_forced(self.upper, &change.path) {
            Ok(directory) => match marks(directory.as_fd())?.opaque {
                Some(value) if value == b"y" => tree::remove_xattr(directory.as_fd(), OsStr::new(OPAQUE)),
                Some(_) | None => Ok(()),
            },
            Err(error) if gone(&error) => Ok(()),
            Err(error) => Err(error),
        }
    }

    fn hides(&mut self, directory: &Path) -> io::Result<bool> {
        if let Some(known) = self.hiding.get(directory) {
            return Ok(*known);
        }
        let above = match directory.parent() {
            Some(parent) => self.hides(parent)?,
            None => false,
        };
        let hides = above
            || match tree::open_directory_forced(self.upper, directory) {
                Ok(handle) => marks(handle.as_fd())?.opaque.is_some_and(|value| value == b"y"),
                Err(error) if gone(&error) => false,
                Err(error) => return Err(error),
            };
        self.hiding.insert(directory.to_path_buf(), hides);
        Ok(hides)
    }

    fn remove(&self, change: &Change) -> io::Result<()> {
        let Some(after) = &change.after else { return self.remove_whiteout(&change.path) };
        let Some((parent, name, stat)) = find(self.upper, &change.path)? else { return Ok(()) };
        match after.kind {
            // Others may be pending in it; one that is empty says nothing.
            NodeType::Directory => tree::remove_empty(parent.as_fd(), name),
            // The path's entry may be another change's, which is pending.
            _ if Summary::of(&stat).inode != after.inode => Ok(()),
            NodeType::File | NodeType::Link | NodeType::Special => tree::remove(parent.as_fd(), name),
        }
    }

    fn remove_whiteout(&self, path: &Path) -> io::Result<()> {
        let Some((parent, name, stat)) = find(self.upper, path)? else { return Ok(()) };
        let whiteout = is_device_whiteout(&stat) || is_xattr_whiteout(parent.as_fd(), name, &stat)?;
        if whiteout {
            tree::remove(parent.as_fd(), name)?;
        }
        Ok(())
    }
}

/// Gives a file that shares its inode with the workspace's one of its own.
fn detach(change: &Change, layer: BorrowedFd<'_>, run_dir: BorrowedFd<'_>) -> io::Result<()> {
    let Some(after) = change.after.as_ref().filter(|after| after.kind == NodeType::File) else { return Ok(()) };
    let Some((parent, name, stat)) = find(layer, &change.path)? else { return Ok(()) };
    let now = Summary::of(&stat);
    if now.inode != after.inode || now.links <= after.links {
        return Ok(());
    }
    let content = tree::open_file_at(parent.as_fd(), name)?;
    let temporary = OsStr::new(TEMPORARY);
    tree::remove(run_dir, temporary)?;
    let copy = tree::create_file_at(run_dir, temporary)?;
    tree::copy_content(&content, &copy)?;
    tree::set_user_xattrs(copy.as_fd(), &tree::user_xattrs(content.as_fd())?)?;
    tree::set_owner_at(run_dir, temporary, stat.st_uid, stat.st_gid)?;
    tree::set_mode(copy.as_fd(), now.mode)?;
    tree::set_mtime_at(run_dir, temporary, now.mtime_ns)?;
    tree::rename(run_dir, temporary, parent.as_fd(), name, RenameFlags::empty())
}

fn find<'p>(root: BorrowedFd<'_>, path: &'p Path) -> io::Result<Option<(OwnedFd, &'p OsStr, rustix::fs::Stat)>> {
    let (parent, name) = match tree::parent_of(root, path) {
        Ok(found) => found,
        Err(error) if gone(&error) => return Ok(None),
        Err(error) => return Err(error),
    };
    let stat = tree::look_at(parent.as_fd(), name)?;
    Ok(stat.map(|stat| (parent, name, stat)))
}

fn is_directory(change: &Change) -> bool {
    change.after.as_ref().is_some_and(|after| after.kind == NodeType::Directory)
}

fn gone(error: &io::Error) -> bool {
    tree::absent(error) || matches!(error.raw_os_error(), Some(libc::ENOTDIR | libc::ELOOP))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::room::{
        batch::{self, keep_pending},
        changes::scan,
        mirror,
        testing::Fixture,
    };
    use std::os::unix::fs::MetadataExt;

    fn links(path: &Path) -> u64 {
        std::fs::metadata(path).unwrap().nlink()
    }

    /// Applies all but what is below `held`.
    fn apply_but(fixture: &Fixture, set: Vec<Change>, held: &str) {
        let (rest, chosen): (Vec<Change>, Vec<Change>) =
            set.into_iter().partition(|change| change.path.starts_with(held));
        let remaining: Vec<PathBuf> = rest.iter().map(|change| change.path.clone()).collect();
        batch::apply(&fixture.batch(), &chosen, &remaining).unwrap();
    }

    fn scanned(fixture: &Fixture) -> Vec<Change> {
        scan(&fixture.upper, &fixture.workspace).unwrap().changes
    }

    #[test]
    fn what_was_applied_leaves_the_layer_and_what_is_held_stays() {
        let fixture = Fixture::new();
        for name in ["edited", "removed", "kept"] {
            std::fs::write(fixture.workspace_path().join(name), name).unwrap();
        }
        let fixture = fixture.started();
        let (upper, root) = (fixture.upper_path(), fixture.workspace_path());
        std::fs::write(upper.join("edited"), "new").unwrap();
        fixture.whiteout("removed");
        std::fs::create_dir_all(upper.join("new/inner")).unwrap();
        std::fs::write(upper.join("new/inner/f"), "f").unwrap();
        std::fs::write(upper.join("new/held"), "held").unwrap();
        fixture.opaque("new");
        std::fs::create_dir(upper.join("whole")).unwrap();
        std::fs::write(upper.join("whole/f"), "w").unwrap();
        apply_but(&fixture, scanned(&fixture), "new/held");
        for name in ["edited", "new/inner/f", "whole/f"] {
            assert_eq!(links(&root.join(name)), 1, "{name}");
            assert!(!upper.join(name).exists(), "{name}");
        }
        assert!(!upper.join("whole").exists() && !upper.join("removed").exists());
        // The user goes on in place, and adds beside what is held: neither is the run's.
        std::fs::write(root.join("edited"), "user").unwrap();
        std::fs::write(root.join("new/users"), "user").unwrap();
        let left: Vec<PathBuf> = scanned(&fixture).into_iter().map(|change| change.path).collect();
        assert_eq!(left, [Path::new("new/held")]);
        let rest = keep_pending(&fixture.run_dir, scan(&fixture.upper, &fixture.workspace).unwrap()).unwrap();
        batch::apply(&fixture.batch(), &rest.changes, &[]).unwrap();
        assert_eq!(std::fs::read(root.join("new/held")).unwrap(), b"held");
        assert_eq!(std::fs::read(root.join("new/users")).unwrap(), b"user");
    }

    #[test]
    fn in_a_directory_that_hides_a_file_gets_its_own_inode() {
        let fixture = Fixture::new();
        std::fs::create_dir(fixture.workspace_path().join("d")).unwrap();
        std::fs::write(fixture.workspace_path().join("d/held"), "old").unwrap();
        let fixture = fixture.started();
        let (upper, root) = (fixture.upper_path(), fixture.workspace_path());
        std::fs::create_dir(upper.join("d")).unwrap();
        std::fs::write(upper.join("d/f"), "run").unwrap();
        fixture.opaque("d");
        apply_but(&fixture, scanned(&fixture), "d/held");
        std::fs::write(root.join("d/f"), "user").unwrap();
        assert_eq!(std::fs::read(upper.join("d/f")).unwrap(), b"run");
        assert_eq!((links(&root.join("d/f")), links(&upper.join("d/f"))), (1, 1));
        let rest = keep_pending(&fixture.run_dir, scan(&fixture.upper, &fixture.workspace).unwrap()).unwrap();
        assert_eq!(rest.changes.len(), 1);
        assert_eq!(
            (rest.changes[0].path.as_path(), &rest.changes[0].kind),
            (Path::new("d/held"), &ChangeKind::Deleted)
        );
    }

    #[test]
    fn in_a_mirror_a_file_gets_its_own_inode() {
        let fixture = Fixture::new();
        std::fs::write(fixture.workspace_path().join("held"), "old").unwrap();
        let fixture = fixture.started();
        let copy = mirror::create(&fixture.workspace, &fixture.run_dir, u64::MAX, None).unwrap();
        let at = fixture.run_path().join(MIRROR);
        std::fs::write(at.join("f"), "run").unwrap();
        std::fs::write(at.join("held"), "new").unwrap();
        let set = mirror::scan(&fixture.run_dir, &copy, &fixture.workspace).unwrap();
        let (rest, chosen): (Vec<Change>, Vec<Change>) =
            set.changes.into_iter().partition(|change| change.path == Path::new("held"));
        assert_eq!((rest.len(), chosen.len()), (1, 1));
        let batch = batch::Batch { source: &copy, ..fixture.batch() };
        batch::apply(&batch, &chosen, &[PathBuf::from("held")]).unwrap();
        std::fs::write(fixture.workspace_path().join("f"), "user").unwrap();
        assert_eq!(std::fs::read(at.join("f")).unwrap(), b"run");
        assert_eq!(links(&at.join("f")), 1);
    }
}
