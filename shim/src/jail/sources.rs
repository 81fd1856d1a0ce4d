//! What the view shows of the host, opened before the way to it is given up.
//!
//! A privileged caller's sources are copied and mapped while it is still privileged: the run's own user could not
//! even walk to them. Everybody else's are copied as the owner of the new namespaces. Either way the view is later
//! made of descriptors only, so that nothing on the host can be swapped for something else meanwhile.

use super::step::{At, Failure};
use crate::{
    protocol::{Access, Bytes, Mount, Plan},
    sys,
};
use std::{
    ffi::CString,
    fs, io,
    os::{
        fd::{AsFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::Path,
};

/// The copied mounts, by the place of their [`Mount`] in the plan.
pub struct Sources {
    opened: Vec<Source>,
    complete: bool,
}

/// One mount's share of the host.
pub enum Source {
    /// It needs none, or it is optional and missing.
    None,
    /// The tree it shows.
    Tree(OwnedFd),
    /// The tree below an overlay, or why it cannot be shown so, and the folder that holds its own layer and scratch
    /// directory.
    Layers { lower: Result<OwnedFd, Failure>, own: OwnedFd },
}

/// Opens all sources if the caller is privileged, none otherwise.
pub fn open_as_caller(plan: &Plan, holder: Option<Holder>) -> Result<Sources, Failure> {
    match plan.ids.owner {
        None => {
            holder.map(Holder::end).transpose()?;
            Ok(Sources { opened: Vec::new(), complete: false })
        }
        Some(owner) => {
            let holder = holder.map_or_else(Holder::start, Ok)?;
            let namespace = holder.mapped(owner, (plan.ids.host_uid, plan.ids.host_gid));
            holder.end()?;
            Ok(Sources { opened: open_all(plan, Some(&namespace?))?, complete: true })
        }
    }
}

impl Sources {
    /// Opens what is not open yet: for an ordinary caller, all.
    pub fn open_the_rest(self, plan: &Plan) -> Result<Sources, Failure> {
        if self.complete {
            return Ok(self);
        }
        Ok(Sources { opened: open_all(plan, None)?, complete: true })
    }

    /// The sources in the plan's order.
    pub fn into_ordered(self) -> impl Iterator<Item = Source> {
        self.opened.into_iter()
    }
}

fn open_all(plan: &Plan, mapping: Option<&OwnedFd>) -> Result<Vec<Source>, Failure> {
    plan.mounts.iter().map(|mount| open(mount, mapping)).collect()
}

fn open(mount: &Mount, mapping: Option<&OwnedFd>) -> Result<Source, Failure> {
    const QUIET: u64 = sys::MOUNT_ATTR_NOSUID | sys::MOUNT_ATTR_NODEV;
    match mount {
        Mount::Bind { source, access, optional, .. } => {
            let attributes = match access {
                Access::ReadOnly => QUIET | sys::MOUNT_ATTR_RDONLY,
                Access::ReadWrite => QUIET,
            };
            tree(source, attributes, None, *optional)
        }
        Mount::View { source, optional, .. } => tree(source, QUIET | sys::MOUNT_ATTR_RDONLY, mapping, *optional),
        Mount::Overlay { lower, upper, .. } => {
            let own = upper.to_path().parent().map(Path::to_path_buf).unwrap_or_default();
            let lower = tree(lower, QUIET | sys::MOUNT_ATTR_RDONLY, mapping, false);
            // The run's own layer belongs to the run's user already, so it needs no map.
            let own = tree(&Bytes::from(own), QUIET, None, false)?;
            match (lower, own) {
                (Ok(Source::Tree(lower)), Source::Tree(own)) => Ok(Source::Layers { lower: Ok(lower), own }),
                (Err(failure), Source::Tree(own)) => Ok(Source::Layers { lower: Err(failure), own }),
                _ => Ok(Source::None),
            }
        }
        Mount::Proc { .. }
        | Mount::Dev { .. }
        | Mount::Tmpfs { .. }
        | Mount::Dir { .. }
        | Mount::File { .. }
        | Mount::Symlink { .. }
        | Mount::Mask { .. } => Ok(Source::None),
    }
}

fn tree(source: &Bytes, attributes: u64, mapping: Option<&OwnedFd>, optional: bool) -> Result<Source, Failure> {
    let path = source.to_path();
    let c_path = CString::new(path.as_os_str().as_bytes()).map_err(io::Error::from).at("open_tree", path.display())?;
    let current = nix::fcntl::AT_FDCWD;
    // With what is mounted below it: an unprivileged copy without would uncover what a mount hides, so the kernel
    // refuses it (mount_namespaces(7), "Restrictions on mount namespaces").
    let copied = match sys::open_tree(current, &c_path, sys::AT_RECURSIVE) {
        Err(error) if optional && error.raw_os_error() == Some(libc::ENOENT) => return Ok(Source::None),
        other => other.at("open_tree", path.display())?,
    };
    sys::mount_setattr(copied.as_fd(), true, attributes, None).at("mount_setattr", path.display())?;
    let Some(namespace) = mapping else { return Ok(Source::Tree(copied)) };
    let mapped = match sys::mount_setattr(copied.as_fd(), true, 0, Some(namespace.as_fd())) {
        // Something mounted below it cannot be mapped: show the tree without what is mounted below.
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
            let alone = sys::open_tree(current, &c_path, 0).at("open_tree", path.display())?;
            sys::mount_setattr(alone.as_fd(), false, attributes, None).at("mount_setattr", path.display())?;
            sys::mount_setattr(alone.as_fd(), false, 0, Some(namespace.as_fd())).map(|()| alone)
        }
        other => other.map(|()| copied),
    };
    let mapped = mapped.at("mount_setattr(MOUNT_ATTR_IDMAP)", path.display()).map_err(|failure| {
        failure.remedy(
            "this file system cannot show its files under another user id; start the run as the folder's owner \
             instead of root",
        )
    })?;
    Ok(Source::Tree(mapped))
}

/// A process in a user namespace of its own, which maps nobody yet. It lives until the map is open.
pub struct Holder {
    process: nix::unistd::Pid,
    /// One byte, once the namespace is there: 1, or 0 when it could not be made.
    ready: OwnedFd,
    /// The process ends when this closes.
    finish: OwnedFd,
}

impl Holder {
    /// For a caller who is going to need one, while there is no plan yet: making a process and a namespace takes about
    /// as long as the supervisor's making the plan.
    pub fn start_early() -> Result<Option<Holder>, Failure> {
        match nix::unistd::Uid::effective().is_root() {
            true => Holder::start().map(Some),
            false => Ok(None),
        }
    }

    fn start() -> Result<Holder, Failure> {
        let flags = nix::fcntl::OFlag::O_CLOEXEC;
        let (ready, tell_ready) = nix::unistd::pipe2(flags).at("pipe2", "id map")?;
        let (finish, tell_finish) = nix::unistd::pipe2(flags).at("pipe2", "id map")?;
        let Some(process) = sys::fork().at("fork", "id map")? else {
            drop((ready, tell_finish));
            let made = nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWUSER).is_ok();
            let _ = nix::unistd::write(&tell_ready, &[u8::from(made)]);
            let _ = nix::unistd::read(&finish, &mut [0]);
            super::exit(0)
        };
        Ok(Holder { process, ready, finish: tell_finish })
    }

    /// The descriptors that must stay open as long as this is needed.
    pub fn descriptors(&self) -> [std::os::fd::BorrowedFd<'_>; 2] {
        [self.ready.as_fd(), self.finish.as_fd()]
    }

    /// The namespace, which says from now on: what belongs to `owner` on disk is shown as belonging to `host`.
    fn mapped(&self, owner: (u32, u32), host: (u32, u32)) -> Result<OwnedFd, Failure> {
        let mut made = [0];
        nix::unistd::read(&self.ready, &mut made).at("read", "id map")?;
        if made != [1] {
            return Err(io::Error::from_raw_os_error(libc::EPERM)).at("unshare", "user namespace for the id map");
        }
        let write = |file: &str, text: String| {
            let path = format!("/proc/{}/{file}", self.process);
            fs::write(&path, &text).at("write", format_args!("{path}: {text}"))
        };
        write("uid_map", format!("{} {} 1", owner.0, host.0))?;
        write("gid_map", format!("{} {} 1", owner.1, host.1))?;
        let path = format!("/proc/{}/ns/user", self.process);
        fs::File::open(&path).map(OwnedFd::from).at("open", path)
    }

    /// Ends it. Nobody waits here for the kernel to take it down: whoever waits for pid 1 reaps this one too.
    fn end(self) -> Result<(), Failure> {
        nix::sys::signal::kill(self.process, nix::sys::signal::Signal::SIGKILL).at("kill", "id map")
    }
}

/// Reaps the process that held an id map, if there was one, after it was ended.
pub fn reap_holder() -> Result<(), Failure> {
    match nix::sys::wait::waitpid(None, None) {
        Ok(_) | Err(nix::errno::Errno::ECHILD) => Ok(()),
        Err(errno) => Err(errno).at("waitpid", "id map"),
    }
}
