//! What the room's tests share: a workspace and a run's layer as overlayfs would have left it.

use super::{batch::Batch, tree};
use crate::effect::RunId;
use std::{
    collections::BTreeMap,
    ffi::OsStr,
    fs::Permissions,
    os::{
        fd::{AsFd, OwnedFd},
        unix::fs::{MetadataExt, PermissionsExt},
    },
    path::{Path, PathBuf},
};

/// Whether two states must agree on inodes too.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Inodes {
    Compared,
    Ignored,
}

/// A workspace, a run's directory with its layer, and handles of them.
pub(crate) struct Fixture {
    folder: tempfile::TempDir,
    pub(crate) run: RunId,
    pub(crate) run_dir: OwnedFd,
    pub(crate) workspace: OwnedFd,
    pub(crate) upper: OwnedFd,
    pub(crate) since_ns: i64,
}

impl Fixture {
    pub(crate) fn new() -> Fixture {
        // In memory where it can be: a batch syncs its file system, which on a busy disk takes most of a test's time.
        Fixture::on(tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap())
    }

    /// On the file system of this folder.
    pub(crate) fn on(folder: tempfile::TempDir) -> Fixture {
        for name in ["workspace", "run/layer/upper"] {
            std::fs::create_dir_all(folder.path().join(name)).unwrap();
        }
        let open = |name: &str| tree::open_root(&folder.path().join(name)).unwrap();
        Fixture {
            run: RunId("run000000001".to_owned()),
            run_dir: open("run"),
            workspace: open("workspace"),
            upper: open("run/layer/upper"),
            since_ns: 0,
            folder,
        }
    }

    /// The run starts: what the workspace holds now is old. Inode times step with the kernel's tick.
    pub(crate) fn started(mut self) -> Fixture {
        std::thread::sleep(std::time::Duration::from_millis(12));
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
        self.since_ns = i64::try_from(now.as_nanos()).unwrap();
        std::thread::sleep(std::time::Duration::from_millis(12));
        self
    }

    pub(crate) fn workspace_path(&self) -> PathBuf {
        self.folder.path().join("workspace")
    }

    pub(crate) fn run_path(&self) -> PathBuf {
        self.folder.path().join("run")
    }

    pub(crate) fn upper_path(&self) -> PathBuf {
        self.folder.path().join("run/layer/upper")
    }

    pub(crate) fn batch(&self) -> Batch<'_> {
        Batch {
            run: &self.run,
            run_dir: &self.run_dir,
            workspace: &self.workspace,
            source: &self.upper,
            since_ns: self.since_ns,
            shift: None,
            stop: None,
        }
    }

    /// What the overlay leaves where the run removed something.
    pub(crate) fn whiteout(&self, path: &str) {
        use nix::sys::stat::{mknod, Mode, SFlag};
        mknod(&self.upper_path().join(path), SFlag::S_IFCHR, Mode::empty(), 0).unwrap();
    }

    /// What the overlay leaves where the run touched a file, here or after a rename.
    pub(crate) fn copy_up(&self, path: &str, to: &str) -> PathBuf {
        let (from, to) = (self.workspace_path().join(path), self.upper_path().join(to));
        std::fs::copy(&from, &to).unwrap();
        let times = std::fs::FileTimes::new().set_modified(std::fs::metadata(&from).unwrap().modified().unwrap());
        let file = std::fs::File::options().read(true).open(&to).unwrap();
        file.set_times(times).unwrap();
        tree::set_xattr(file.as_fd(), OsStr::new("user.overlay.origin"), b"").unwrap();
        to
    }

    /// Marks a directory of the layer as hiding what the workspace holds there.
    pub(crate) fn opaque(&self, path: &str) {
        let handle = tree::open_root(&self.upper_path().join(path)).unwrap();
        tree::set_xattr(handle.as_fd(), OsStr::new("user.overlay.opaque"), b"y").unwrap();
    }
}

/// Every path below a root with its type, mode, content and, if asked, inode and time.
pub(crate) fn tree_state(root: &Path, inodes: Inodes) -> BTreeMap<PathBuf, String> {
    let mut state = BTreeMap::new();
    let mut pending = vec![root.to_path_buf()];
    while let Some(directory) = pending.pop() {
        for entry in std::fs::read_dir(&directory).unwrap() {
            let path = entry.unwrap().path();
            let data = std::fs::symlink_metadata(&path).unwrap();
            let content = if data.is_file() {
                match std::fs::read(&path) {
                    Ok(content) => format!("{} bytes {}", content.len(), crate::effect::Digest::of(&content)),
                    Err(error) => error.kind().to_string(),
                }
            } else if data.is_symlink() {
                format!("{:?}", std::fs::read_link(&path).unwrap())
            } else {
                // As the owner may always do, so that ordinary users can run the tests too.
                let handle = tree::open_root(path.parent().unwrap()).unwrap();
                if tree::open_listing(handle.as_fd(), Path::new(path.file_name().unwrap())).is_ok()
                    && std::fs::read_dir(&path).is_ok()
                {
                    pending.push(path.clone());
                }
                String::new()
            };
            let exact = match inodes {
                Inodes::Compared if data.is_file() => format!(" {} {}.{}", data.ino(), data.mtime(), data.mtime_nsec()),
                Inodes::Compared => format!(" {}", data.ino()),
                Inodes::Ignored => String::new(),
            };
            let path = path.strip_prefix(root).unwrap().to_path_buf();
            state.insert(path, format!("{:o} {content}{exact}", data.mode()));
        }
    }
    state
}

/// A run that changed a little of everything.
pub(crate) fn mixed() -> Fixture {
    let fixture = Fixture::new();
    let lower = fixture.workspace_path();
    std::fs::create_dir_all(lower.join("gone/deep")).unwrap();
    std::fs::write(lower.join("gone/deep/x"), "x").unwrap();
    std::fs::write(lower.join("edited"), "old").unwrap();
    std::fs::write(lower.join("removed"), "r").unwrap();
    std::fs::write(lower.join("moved"), "content that moves").unwrap();
    std::fs::write(lower.join("mode"), "m").unwrap();
    std::fs::create_dir(lower.join("to-file")).unwrap();
    std::fs::write(lower.join("to-file/inner"), "i").unwrap();
    std::fs::write(lower.join("to-dir"), "t").unwrap();
    std::fs::create_dir(lower.join("shelf")).unwrap();
    std::fs::write(lower.join("shelf/book"), "b").unwrap();
    std::fs::create_dir(lower.join("quiet")).unwrap();
    std::fs::write(lower.join("quiet/keep"), "k").unwrap();
    let fixture = fixture.started();
    let upper = fixture.upper_path();
    fixture.whiteout("gone");
    std::fs::write(upper.join("edited"), "new").unwrap();
    fixture.whiteout("removed");
    fixture.copy_up("moved", "place");
    fixture.whiteout("moved");
    fixture.copy_up("mode", "mode");
    std::fs::set_permissions(upper.join("mode"), Permissions::from_mode(0o600)).unwrap();
    std::fs::write(upper.join("to-file"), "now a file").unwrap();
    std::fs::create_dir(upper.join("to-dir")).unwrap();
    std::fs::write(upper.join("to-dir/f"), "f").unwrap();
    fixture.whiteout("shelf");
    std::fs::create_dir(upper.join("rack")).unwrap();
    fixture.copy_up("shelf/book", "rack/book");
    std::fs::create_dir_all(upper.join("new/empty")).unwrap();
    std::fs::write(upper.join("new/n"), "n").unwrap();
    std::os::unix::fs::symlink("../elsewhere", upper.join("new/link")).unwrap();
    std::fs::set_permissions(upper.join("new/empty"), Permissions::from_mode(0o555)).unwrap();
    std::fs::set_permissions(upper.join("new"), Permissions::from_mode(0o555)).unwrap();
    fixture
}
