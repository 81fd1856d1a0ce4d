//! The view: a private root of what the plan shows, and nothing else.

use super::{
    sources::{Source, Sources},
    step::{At, Failure},
};
use crate::{
    protocol::{Bytes, Mount},
    sys,
};
use nix::{
    fcntl::{open, openat, openat2, AtFlags, OFlag, OpenHow, ResolveFlag},
    mount::{mount, umount2, MntFlags, MsFlags},
    sys::stat::{mkdirat, Mode},
};
use std::{
    cell::RefCell,
    ffi::{CStr, CString, OsStr},
    io,
    os::{
        fd::{AsFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::{Path, PathBuf},
    rc::Rc,
};

/// The private root holds directories, links and small files only.
const ROOT_BYTES: &CStr = c"16m";
/// Where an overlay's layers are attached while the kernel looks them up by name; gone before the program starts.
const STAGE: &str = ".stage";
/// Directories that a private root can be mounted on before it becomes the root.
const BASES: [&str; 4] = ["/tmp", "/run", "/mnt", "/var"];

/// The directory beside an overlay's upper layer that a copy of the workspace is in, where one has to serve instead.
const COPY: &str = "mirror";

/// Has the supervisor copy the workspace, because the kernel refused an overlay over it.
pub type AskForCopy<'a> = &'a dyn Fn(Failure) -> Result<(), Failure>;

/// Builds the view and makes it the root.
pub fn build(mounts: &[Mount], sources: Sources, ask: AskForCopy<'_>) -> Result<(), Failure> {
    // Nothing mounted on the host from now on may appear here.
    mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>)
        .at("mount(MS_PRIVATE)", "/")?;
    let root = Root::create()?;
    for (place, (mount, source)) in mounts.iter().zip(sources.into_ordered()).enumerate() {
        root.add(place, mount, source, ask)?;
    }
    root.enter()
}

/// Mounts what a view for bubblewrap is made of, each at a path of the host's side, and gives those paths.
pub fn stage(mounts: &[Mount], sources: Sources, ask: AskForCopy<'_>) -> Result<Vec<Option<PathBuf>>, Failure> {
    mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>)
        .at("mount(MS_PRIVATE)", "/")?;
    let root = Root::create()?;
    let mut staged = Vec::new();
    for (place, (mount, source)) in mounts.iter().zip(sources.into_ordered()).enumerate() {
        let target = Bytes::from(PathBuf::from(format!("/staged/{place}")));
        let moved = match mount {
            Mount::Bind { source, access, optional, .. } => Some(Mount::Bind {
                source: source.clone(),
                target: target.clone(),
                access: *access,
                optional: *optional,
            }),
            Mount::View { source, optional, .. } => {
                Some(Mount::View { source: source.clone(), target: target.clone(), optional: *optional })
            }
            Mount::Overlay { lower, upper, work, .. } => Some(Mount::Overlay {
                lower: lower.clone(),
                upper: upper.clone(),
                work: work.clone(),
                target: target.clone(),
            }),
            Mount::Proc { .. }
            | Mount::Dev { .. }
            | Mount::Tmpfs { .. }
            | Mount::Dir { .. }
            | Mount::File { .. }
            | Mount::Symlink { .. }
            | Mount::Mask { .. } => None,
        };
        staged.push(match (moved, source) {
            (None, _) | (Some(_), Source::None) => None,
            (Some(moved), source) => {
                root.add(place, &moved, source, ask)?;
                Some(root.base.join(format!("staged/{place}")))
            }
        });
    }
    Ok(staged)
}

/// The workspace's directory as the program will see it.
pub fn open_workspace(workspace: &Bytes) -> Result<OwnedFd, Failure> {
    let path = workspace.to_path();
    open(&path, OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC, Mode::empty()).at("open", path.display())
}

/// The private root while it is being filled, mounted on a directory of the old one.
struct Root {
    base: PathBuf,
    directory: OwnedFd,
    /// The directory that the last file or link was made in: most come one after another in the same.
    last_parent: RefCell<Option<(PathBuf, Rc<OwnedFd>)>>,
}

impl Root {
    fn create() -> Result<Root, Failure> {
        let base = BASES
            .iter()
            .map(PathBuf::from)
            .find(|base| base.is_dir())
            .ok_or_else(|| io::Error::from_raw_os_error(libc::ENOENT))
            .at("open", "/tmp, /run, /mnt or /var, to mount the private root on")?;
        let on = open(&base, OFlag::O_PATH | OFlag::O_CLOEXEC, Mode::empty()).at("open", base.display())?;
        let options = [(c"size", ROOT_BYTES), (c"mode", c"0755")];
        let private = new_file_system(c"tmpfs", &options, &[], sys::MOUNT_ATTR_NOSUID | sys::MOUNT_ATTR_NODEV)?;
        sys::move_mount(&private, on.as_fd()).at("move_mount", base.display())?;
        let directory = open(&base, OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC, Mode::empty())
            .at("open", base.display())?;
        Ok(Root { base, directory, last_parent: RefCell::new(None) })
    }

    fn add(&self, place: usize, mount: &Mount, source: Source, ask: AskForCopy<'_>) -> Result<(), Failure> {
        match (mount, source) {
            (Mount::Bind { target, .. }, Source::Tree(tree)) => self.attach(&tree, target),
            (Mount::Bind { .. } | Mount::View { .. } | Mount::Overlay { .. }, Source::None) => Ok(()),
            (Mount::View { target, source, .. }, Source::Tree(tree)) => {
                if is_directory(&tree)? {
                    // A mount of its own: a plain directory would be removed with the stage, and listing the overlay
                    // then ends at once, because the kernel reads a removed layer as ENOENT.
                    let empty = self.stage(&format!("{place}-empty"), &tmpfs(4096, 0o755)?)?;
                    let lower = self.stage(&format!("{place}"), &tree)?;
                    let layers = format!("{}:{}", lower.display(), empty.display());
                    let overlay = overlay(&[(c"lowerdir", &layers)], sys::MOUNT_ATTR_RDONLY, source)?;
                    self.attach(&overlay, target)
                } else {
                    self.attach(&tree, target)
                }
            }
            (Mount::Overlay { target, lower: shown, upper, work }, Source::Layers { lower, own }) => {
                let own = self.stage(&format!("{place}-own"), &own)?;
                let inside = |path: &Bytes| own.join(path.to_path().file_name().unwrap_or_default());
                let (upper, work) = (inside(upper).display().to_string(), inside(work).display().to_string());
                let layered = lower.and_then(|lower| {
                    let lower = self.stage(&format!("{place}"), &lower)?.display().to_string();
                    overlay(&[(c"lowerdir", &lower), (c"upperdir", &upper), (c"workdir", &work)], 0, shown)
                });
                let tree = match layered {
                    Ok(overlay) => overlay,
                    Err(failure) => {
                        ask(failure)?;
                        let copy = own.join(COPY);
                        let path = CString::new(copy.as_os_str().as_bytes()).map_err(io::Error::from);
                        let path = path.at("open_tree", copy.display())?;
                        sys::open_tree(nix::fcntl::AT_FDCWD, &path, 0).at("open_tree", copy.display())?
                    }
                };
                self.attach(&tree, target)
            }
            (Mount::Proc { target }, _) => self.add_proc(target),
            (Mount::Dev { target, shm_bytes }, _) => self.add_dev(&target.to_path(), *shm_bytes),
            (Mount::Tmpfs { target, bytes, mode }, _) => self.attach(&tmpfs(*bytes, *mode)?, target),
            (Mount::Dir { target, mode }, _) => {
                let directory = self.directory_at(&target.to_path())?;
                change_mode(&directory, *mode, target)
            }
            (Mount::File { target, content, mode }, _) => {
                let file = self.create_file(&target.to_path(), *mode)?;
                let content = content.to_os();
                let mut rest = content.as_bytes();
                while !rest.is_empty() {
                    let written = nix::unistd::write(&file, rest).at("write", target.to_path().display())?;
                    rest = &rest[written..];
                }
                Ok(())
            }
            (Mount::Symlink { target, to }, _) => {
                let path = target.to_path();
                let (parent, name) = self.parent_of(&path)?;
                nix::unistd::symlinkat(to.to_os().as_os_str(), &*parent, name).at("symlinkat", path.display())
            }
            (Mount::Mask { target, .. }, _) => self.mask(&target.to_path()),
            (Mount::Bind { target, .. } | Mount::View { target, .. } | Mount::Overlay { target, .. }, _) => {
                Err(io::Error::from_raw_os_error(libc::EINVAL)).at("move_mount", target.to_path().display())
            }
        }
    }

    /// Attaches a mount at a target of the new root, made if it is missing.
    fn attach(&self, mount: &OwnedFd, target: &Bytes) -> Result<(), Failure> {
        let path = target.to_path();
        // What was known to lie below may lie under this mount now.
        self.last_parent.borrow_mut().take_if(|(known, _)| known.starts_with(&path));
        let on = if is_directory(mount)? { self.directory_at(&path)? } else { self.file_at(&path)? };
        sys::move_mount(mount, on.as_fd()).at("move_mount", path.display())
    }

    fn add_proc(&self, target: &Bytes) -> Result<(), Failure> {
        let quiet = sys::MOUNT_ATTR_NOSUID | sys::MOUNT_ATTR_NODEV | sys::MOUNT_ATTR_NOEXEC;
        let proc = new_file_system(c"proc", &[], &[], quiet).map_err(|failure| {
            failure.remedy(
                "the kernel refuses a fresh /proc while parts of the outer /proc are masked, as container engines do; \
                 start the container with `--security-opt systempaths=unconfined` (Docker, Podman) or \
                 `procMount: Unmasked` (Kubernetes)",
            )
        })?;
        self.attach(&proc, target)?;
        // Nobody in the jail has a privilege over these; the mounts say so once more.
        for part in ["sys", "sysrq-trigger", "irq", "bus", "fs"] {
            let path = target.to_path().join(part);
            let Ok(there) = self.open_at(&path, OFlag::O_PATH) else { continue };
            let copied = sys::open_tree(there.as_fd(), c"", libc::AT_EMPTY_PATH as u32 | sys::AT_RECURSIVE)
                .at("open_tree", path.display())?;
            sys::mount_setattr(copied.as_fd(), true, quiet | sys::MOUNT_ATTR_RDONLY, None)
                .at("mount_setattr", path.display())?;
            sys::move_mount(&copied, there.as_fd()).at("move_mount", path.display())?;
        }
        Ok(())
    }

    fn add_dev(&self, target: &Path, shm_bytes: u64) -> Result<(), Failure> {
        self.attach(&tmpfs(1 << 20, 0o755)?, &Bytes::from(target))?;
        for name in ["null", "zero", "full", "random", "urandom", "tty"] {
            let host = CString::new(format!("/dev/{name}")).expect("a literal without NUL");
            let node = sys::open_tree(nix::fcntl::AT_FDCWD, &host, 0).at("open_tree", host.to_string_lossy())?;
            let quiet = sys::MOUNT_ATTR_NOSUID | sys::MOUNT_ATTR_NOEXEC;
            sys::mount_setattr(node.as_fd(), false, quiet, None).at("mount_setattr", host.to_string_lossy())?;
            self.attach(&node, &Bytes::from(target.join(name)))?;
        }
        // A terminal file system of the jail's own: it can neither see nor reach the host's terminals.
        let options = [(c"ptmxmode", c"0666"), (c"mode", c"0620")];
        let quiet = sys::MOUNT_ATTR_NOSUID | sys::MOUNT_ATTR_NOEXEC;
        let devpts = new_file_system(c"devpts", &options, &[c"newinstance"], quiet)?;
        self.attach(&devpts, &Bytes::from(target.join("pts")))?;
        self.attach(&tmpfs(shm_bytes, 0o1777)?, &Bytes::from(target.join("shm")))?;
        if let Ok(queues) = new_file_system(c"mqueue", &[], &[], quiet | sys::MOUNT_ATTR_NODEV) {
            self.attach(&queues, &Bytes::from(target.join("mqueue")))?;
        }
        let links = [
            ("ptmx", "pts/ptmx"),
            ("fd", "/proc/self/fd"),
            ("stdin", "/proc/self/fd/0"),
            ("stdout", "/proc/self/fd/1"),
            ("stderr", "/proc/self/fd/2"),
        ];
        let directory = self.open_at(target, OFlag::O_PATH | OFlag::O_DIRECTORY)?;
        for (name, to) in links {
            nix::unistd::symlinkat(to, &directory, name).at("symlinkat", target.join(name).display())?;
        }
        // Read-only from here on: what is mounted below stays as writable as it is.
        sys::mount_setattr(directory.as_fd(), false, sys::MOUNT_ATTR_RDONLY, None).at("mount_setattr", target.display())
    }

    fn mask(&self, target: &Path) -> Result<(), Failure> {
        let there = match self.open_at(target, OFlag::O_PATH) {
            Ok(there) => there,
            Err(failure) if failure.errno() == Some(libc::ENOENT) => return Ok(()),
            Err(failure) => return Err(failure),
        };
        let stand_in = if is_directory(&there)? {
            let empty = tmpfs(4096, 0o000)?;
            sys::mount_setattr(empty.as_fd(), false, sys::MOUNT_ATTR_RDONLY, None).at("mount_setattr", "mask")?;
            empty
        } else {
            let name = PathBuf::from(format!("/{STAGE}/mask"));
            let file = self.create_file(&name, 0o000)?;
            let copied = sys::open_tree(file.as_fd(), c"", libc::AT_EMPTY_PATH as u32).at("open_tree", "mask")?;
            sys::mount_setattr(copied.as_fd(), false, sys::MOUNT_ATTR_RDONLY, None).at("mount_setattr", "mask")?;
            copied
        };
        sys::move_mount(&stand_in, there.as_fd()).at("move_mount", target.display())
    }

    /// Attaches a mount below the stage and gives its path on the old root's side.
    fn stage(&self, name: &str, mount: &OwnedFd) -> Result<PathBuf, Failure> {
        let path = self.staged_directory(name)?;
        let on = self.directory_at(&Path::new("/").join(STAGE).join(name))?;
        sys::move_mount(mount, on.as_fd()).at("move_mount", path.display())?;
        Ok(path)
    }

    fn staged_directory(&self, name: &str) -> Result<PathBuf, Failure> {
        self.directory_at(&Path::new("/").join(STAGE).join(name))?;
        Ok(self.base.join(STAGE).join(name))
    }

    /// Makes the filled root the process's root, and lets the old one go.
    fn enter(self) -> Result<(), Failure> {
        self.remove_stage()?;
        nix::unistd::fchdir(&self.directory).at("fchdir", "the private root")?;
        // Both arguments the same: the old root ends up mounted over the new one (pivot_root(2), "pivot_root(".", ".")").
        nix::unistd::pivot_root(".", ".").at("pivot_root", "the private root")?;
        umount2(".", MntFlags::MNT_DETACH).at("umount2", "the old root")?;
        nix::unistd::chdir("/").at("chdir", "/")?;
        let root = open("/", OFlag::O_PATH | OFlag::O_CLOEXEC, Mode::empty()).at("open", "/")?;
        sys::mount_setattr(root.as_fd(), false, sys::MOUNT_ATTR_RDONLY, None).at("mount_setattr", "/")
    }

    fn remove_stage(&self) -> Result<(), Failure> {
        let stage = self.base.join(STAGE);
        let Ok(entries) = std::fs::read_dir(&stage) else { return Ok(()) };
        for entry in entries.flatten() {
            let path = entry.path();
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                // A directory that is no mount is EINVAL, and removed below all the same.
                let _ = umount2(&path, MntFlags::MNT_DETACH);
                std::fs::remove_dir(&path).at("rmdir", path.display())?;
            } else {
                std::fs::remove_file(&path).at("unlink", path.display())?;
            }
        }
        std::fs::remove_dir(&stage).at("rmdir", stage.display())
    }

    /// The directory at this path of the new root; it and its parents are made where missing.
    fn directory_at(&self, path: &Path) -> Result<OwnedFd, Failure> {
        match self.open_at(path, OFlag::O_PATH | OFlag::O_DIRECTORY) {
            Err(failure) if failure.errno() == Some(libc::ENOENT) && path.file_name().is_some() => {}
            other => return other,
        }
        let (parent, name) = self.parent_of(path)?;
        mkdirat(&*parent, name, Mode::from_bits_truncate(0o755)).at("mkdirat", path.display())?;
        self.open_at(path, OFlag::O_PATH | OFlag::O_DIRECTORY)
    }

    /// The file at this path of the new root, made empty where missing.
    fn file_at(&self, path: &Path) -> Result<OwnedFd, Failure> {
        match self.open_at(path, OFlag::O_PATH) {
            Err(failure) if failure.errno() == Some(libc::ENOENT) => self.create_file(path, 0o444),
            other => other,
        }
    }

    fn create_file(&self, path: &Path, mode: u32) -> Result<OwnedFd, Failure> {
        let (parent, name) = self.parent_of(path)?;
        let flags = OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_TRUNC | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        let file = openat(&*parent, name, flags, Mode::from_bits_truncate(0o600)).at("openat", path.display())?;
        nix::sys::stat::fchmod(&file, Mode::from_bits_truncate(mode)).at("fchmod", path.display())?;
        Ok(file)
    }

    fn parent_of<'a>(&self, path: &'a Path) -> Result<(Rc<OwnedFd>, &'a OsStr), Failure> {
        let name = path.file_name().ok_or_else(|| io::Error::from_raw_os_error(libc::EINVAL));
        let name = name.at("openat", path.display())?;
        let parent = path.parent().unwrap_or(Path::new("/"));
        if let Some((known, opened)) = &*self.last_parent.borrow() {
            if known == parent {
                return Ok((opened.clone(), name));
            }
        }
        let opened = Rc::new(self.directory_at(parent)?);
        *self.last_parent.borrow_mut() = Some((parent.to_owned(), opened.clone()));
        Ok((opened, name))
    }

    /// Opens a path as if the new root were the root already: a link in it cannot lead back out.
    fn open_at(&self, path: &Path, flags: OFlag) -> Result<OwnedFd, Failure> {
        let how = OpenHow::new()
            .flags(flags | OFlag::O_CLOEXEC)
            .resolve(ResolveFlag::RESOLVE_IN_ROOT | ResolveFlag::RESOLVE_NO_MAGICLINKS);
        openat2(&self.directory, path, how).at("openat2", path.display())
    }
}

fn overlay(layers: &[(&CStr, &String)], attributes: u64, shown: &Bytes) -> Result<OwnedFd, Failure> {
    let shown = shown.to_path();
    let values: Vec<CString> = layers
        .iter()
        .map(|(_, value)| CString::new(value.as_bytes()).expect("a path of the stage holds no NUL"))
        .collect();
    let options: Vec<(&CStr, &CStr)> = layers.iter().zip(&values).map(|((key, _), value)| (*key, &**value)).collect();
    let mut flags = vec![c"userxattr"];
    if layers.iter().any(|(key, _)| *key == c"upperdir") {
        // The run's layer is scratch until it is applied: nothing in it has to survive a power cut by itself
        // (overlayfs.rst, "Volatile mount").
        flags.push(c"volatile");
    }
    let quiet = attributes | sys::MOUNT_ATTR_NOSUID | sys::MOUNT_ATTR_NODEV;
    new_file_system(c"overlay", &options, &flags, quiet).map_err(|failure| {
        failure.remedy(format!(
            "{} cannot be shown through an overlay (its file system, or that of the state directory, does not support \
             it, or something is mounted below it); use `--mirror`, or set TOLLGATE_STATE to a folder on a local \
             disk",
            shown.display()
        ))
    })
}

fn tmpfs(bytes: u64, mode: u32) -> Result<OwnedFd, Failure> {
    let size = CString::new(bytes.to_string()).expect("digits");
    let mode = CString::new(format!("{mode:o}")).expect("digits");
    new_file_system(
        c"tmpfs",
        &[(c"size", &size), (c"mode", &mode)],
        &[],
        sys::MOUNT_ATTR_NOSUID | sys::MOUNT_ATTR_NODEV,
    )
}

fn new_file_system(
    name: &CStr,
    options: &[(&CStr, &CStr)],
    flags: &[&CStr],
    attributes: u64,
) -> Result<OwnedFd, Failure> {
    let shown = name.to_string_lossy();
    let context = sys::fsopen(name).at("fsopen", &shown)?;
    let said = |call: &'static str, error: io::Error| {
        let messages = sys::fscontext_messages(&context);
        Err::<(), _>(error).at(call, format_args!("{shown} {messages}")).unwrap_err()
    };
    for (key, value) in options {
        sys::fsconfig_string(&context, key, value).map_err(|error| said("fsconfig", error))?;
    }
    for flag in flags {
        sys::fsconfig_flag(&context, flag).map_err(|error| said("fsconfig", error))?;
    }
    sys::fsmount(&context, attributes).map_err(|error| said("fsmount", error))
}

fn is_directory(node: &OwnedFd) -> Result<bool, Failure> {
    let stat = nix::sys::stat::fstatat(node, "", AtFlags::AT_EMPTY_PATH).at("fstatat", "a mount")?;
    Ok(stat.st_mode & libc::S_IFMT == libc::S_IFDIR)
}

fn change_mode(directory: &OwnedFd, mode: u32, shown: &Bytes) -> Result<(), Failure> {
    let path = shown.to_path();
    // fchmod(2) refuses an O_PATH descriptor; `.` below it is the same directory.
    let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
    let readable = openat(directory.as_fd(), ".", flags, Mode::empty()).at("openat", path.display())?;
    nix::sys::stat::fchmod(&readable, Mode::from_bits_truncate(mode)).at("fchmod", path.display())
}
