//! What the filter sends to pid 1: calls outside the list, which are refused, and calls worth a look, which go on.
//!
//! A look decides nothing: the kernel runs the call as it stands, and mounts, Landlock and permissions decide. Its
//! only purpose is that what they refuse can be told to somebody. It may miss (a path changed behind its back), and
//! it never lets anything through that would not go through without it.
//!
//! Where the plan wants it, calls of some sorts wait for the supervisor's answer first: an error number, or that the
//! kernel goes on. That, too, is what a program sees and no wall, for the same reason. Calls that wait do not hold up
//! others.

use super::{
    rename,
    resolve::{self, is, Last, Reached},
};
use crate::{
    protocol::{Access, Asked, Asking, Bytes, Denied, Ids, Mount, Plan, Wanted, Way, NAME_SERVER},
    sys::{self, Reply},
};
use nix::{
    errno::Errno,
    sys::{
        stat::{lstat, FileStat},
        uio::{process_vm_readv, RemoteIoVec},
    },
    unistd::Pid,
};
use std::{
    collections::HashMap,
    ffi::OsString,
    io,
    net::{IpAddr, SocketAddr},
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::ffi::{OsStrExt, OsStringExt},
    },
    path::{Path, PathBuf},
};

/// So many different refusals of one kind are remembered, to be told once. Past that, those of the kind are forgotten
/// and may be told again: whoever tries many names can make no later refusal go unsaid.
const MAX_TOLD: usize = 2_000;
/// The id that stands for every one that a user namespace does not have (proc(5), `/proc/sys/kernel/overflowuid`).
const NOBODY: u32 = 65_534;
/// One more than the newest call number the list was written against; above it, ENOSYS lets programs fall back.
const FIRST_UNKNOWN_CALL: i64 = 470;

/// The listener's end of the filter.
pub struct Observer {
    listener: OwnedFd,
    /// Devices of the private root and of the private file systems: what is missing there may be hidden, not absent.
    private: Vec<u64>,
    /// The workspace's device, whose directories may need help to be renamed.
    workspace_device: Option<u64>,
    /// The workspace, if it is an overlay, with the ids of the jail's own user in it.
    overlay: Option<(PathBuf, Ids)>,
    /// Views from which every read succeeds that the host's permissions allow.
    readable: Vec<PathBuf>,
    told: HashMap<Wanted, Told>,
    /// Which connections lead out of the jail.
    reach: Reach,
    /// The workspace's path, and what of it is asked about.
    workspace: PathBuf,
    asking: Vec<Asking>,
    /// Calls that wait for the supervisor's answer. Each holds up a thread of the program, so there are no more than
    /// the run may have.
    waiting: HashMap<u64, Waiting>,
}

/// Which connections lead out of the jail, so that they are no refusals.
enum Reach {
    /// None: there is no network.
    Nowhere,
    /// All of TCP. Datagrams are told when one was dropped: to connect a socket for them sends nothing, and programs do
    /// it only to learn which address they have (getaddrinfo(3) does).
    Everywhere,
    /// Those to these ports.
    Ports(Vec<u16>),
}

/// A call that waits for the supervisor's answer, with what is left to do if the kernel goes on with it.
struct Waiting {
    number: i64,
    caller: Caller,
    looks: Vec<(Look, Option<PathBuf>)>,
    rename: Option<rename::Request>,
}

/// What was told of one kind, by call number and object, with the times it happened since.
type Told = HashMap<(i64, Vec<u8>), (Denied, u64)>;

/// What came of one call.
#[derive(Default)]
pub struct Served {
    /// Refusals to tell.
    pub denied: Vec<Denied>,
    /// A directory's rename that still waits for its answer.
    pub rename: Option<rename::Request>,
    /// A call that waits for the supervisor's.
    pub asked: Option<Asked>,
}

impl Observer {
    /// Takes the listener.
    pub fn new(listener: OwnedFd, plan: &Plan, way: Option<Way>) -> Observer {
        sys::notification_wake_in_turn(listener.as_fd());
        let overlay = plan.mounts.iter().any(|mount| matches!(mount, Mount::Overlay { .. }));
        let readable = plan.mounts.iter().filter_map(|mount| match mount {
            Mount::Bind { target, access: Access::ReadOnly, .. } => Some(target.to_path()),
            _ => None,
        });
        let private = plan.mounts.iter().filter_map(|mount| match mount {
            Mount::Tmpfs { target, .. } => Some(target.to_path()),
            _ => None,
        });
        let private = private.chain([PathBuf::from("/")]);
        Observer {
            listener,
            private: private.filter_map(|path| lstat(&path).ok()).map(|stat| stat.st_dev).collect(),
            workspace_device: overlay.then(|| lstat(&plan.workspace.to_path()).ok().map(|stat| stat.st_dev)).flatten(),
            overlay: overlay.then(|| (plan.workspace.to_path(), plan.ids)),
            readable: readable.collect(),
            told: HashMap::new(),
            reach: match (way, &plan.network) {
                (Some(Way::Redirect), _) => Reach::Everywhere,
                (Some(Way::Ports), Some(network)) => {
                    Reach::Ports(network.ports.iter().chain(&network.host_ports).copied().collect())
                }
                (Some(Way::Ports), None) | (None, _) => Reach::Nowhere,
            },
            workspace: plan.workspace.to_path(),
            asking: plan.watch.asked.clone(),
            waiting: HashMap::new(),
        }
    }

    /// The descriptor to poll.
    pub fn listener(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }

    /// Answers one waiting call.
    ///
    /// # Errors
    /// When the listener is of no more use.
    pub fn serve_one(&mut self, plan: &Plan) -> io::Result<Served> {
        let Some(call) = sys::notification_receive(self.listener.as_fd())? else { return Ok(Served::default()) };
        let number = i64::from(call.data.nr);
        let caller = Caller { pid: call.pid, id: call.id };
        if !plan.watch.observed.contains(&number) {
            let errno = if number >= FIRST_UNKNOWN_CALL { libc::ENOSYS } else { plan.watch.refused_with };
            let denied = self.refusal(&caller, number, Wanted::Syscall, OsString::new(), errno);
            sys::notification_reply(self.listener.as_fd(), call.id, Reply::Fail(errno))?;
            return Ok(Served { denied: denied.into_iter().collect(), ..Served::default() });
        }
        if number == libc::SYS_connect {
            let address = caller.read(call.data.args[1], (call.data.args[2] as usize).min(128));
            // Whether a local socket has its other end in the jail, only the kernel can tell.
            let network = address.as_deref().is_some_and(|address| {
                let family = address.first_chunk().map(|bytes| i32::from(u16::from_ne_bytes(*bytes)));
                matches!(family, Some(libc::AF_INET | libc::AF_INET6))
            });
            let waits = network && self.asking.contains(&Asking::Connect);
            if !waits {
                sys::notification_reply(self.listener.as_fd(), call.id, Reply::Continue)?;
            }
            let leads = address.and_then(|address| self.judge_address(&caller, &address));
            return match (leads, waits) {
                (Some((object, errno)), true) => {
                    let asked = Asked { refused_with: Some(errno), ..caller.asked(number, Asking::Connect, object) };
                    self.waiting.insert(call.id, Waiting { number, caller, looks: Vec::new(), rename: None });
                    Ok(Served { asked: Some(asked), ..Served::default() })
                }
                (None, true) => {
                    sys::notification_reply(self.listener.as_fd(), call.id, Reply::Continue)?;
                    Ok(Served::default())
                }
                (leads, false) => {
                    let denied =
                        leads.and_then(|(object, errno)| self.refusal(&caller, number, Wanted::Connect, object, errno));
                    Ok(Served { denied: denied.into_iter().collect(), ..Served::default() })
                }
            };
        }
        let looks = looks_of(number, &call.data.args, &caller);
        let looks: Vec<(Look, Option<PathBuf>)> = looks
            .into_iter()
            .map(|look| {
                let path = caller.path(&look);
                (look, path)
            })
            .collect();
        let rename = self.directory_rename(&call, &caller, &looks);
        if !self.asking.is_empty() {
            if let Some(asked) = self.question(&caller, number, &call.data.args, &looks) {
                self.waiting.insert(call.id, Waiting { number, caller, looks, rename });
                return Ok(Served { asked: Some(asked), ..Served::default() });
            }
        }
        self.go_on(number, &caller, looks, rename)
    }

    /// The supervisor's answer to a call that waits.
    ///
    /// # Errors
    /// When the listener is of no more use.
    pub fn answer(&mut self, id: u64, errno: Option<i32>) -> io::Result<Served> {
        let Some(Waiting { number, caller, looks, rename }) = self.waiting.remove(&id) else {
            return Ok(Served::default());
        };
        // Whoever waited may be gone, and its process id somebody else's.
        if !sys::notification_waits(self.listener.as_fd(), id) {
            return Ok(Served::default());
        }
        match errno {
            Some(errno) => {
                sys::notification_reply(self.listener.as_fd(), id, Reply::Fail(errno))?;
                Ok(Served::default())
            }
            None => self.go_on(number, &caller, looks, rename),
        }
    }

    /// Lets the kernel run the call, and looks at what came of it.
    fn go_on(
        &mut self,
        number: i64,
        caller: &Caller,
        looks: Vec<(Look, Option<PathBuf>)>,
        rename: Option<rename::Request>,
    ) -> io::Result<Served> {
        if rename.is_some() {
            return Ok(Served { rename, ..Served::default() });
        }
        // The answer first: the look goes on while the program does.
        sys::notification_reply(self.listener.as_fd(), caller.id, Reply::Continue)?;
        let mut denied = Vec::new();
        for (look, path) in looks {
            let Some(path) = path else { continue };
            if let Some((object, errno)) = self.judge_path(&look, &path) {
                denied.extend(self.refusal(caller, number, look.wanted, object.into(), errno));
            }
        }
        Ok(Served { denied, ..Served::default() })
    }

    /// What to ask about a call: nothing where it is of a sort that nobody asked for, acts on nothing of the
    /// workspace, or cannot succeed as far as a look shows.
    fn question(
        &self,
        caller: &Caller,
        number: i64,
        args: &[u64; 6],
        looks: &[(Look, Option<PathBuf>)],
    ) -> Option<Asked> {
        let ((look, path), rest) = looks.split_first()?;
        let path = path.as_ref()?;
        if path.starts_with("/proc") || self.judge_path(look, path).is_some() {
            return None;
        }
        let reached = resolve::walk(path, look.last);
        let handle_only = open_flags(number, args, caller).is_some_and(|flags| flags & libc::O_PATH as u64 != 0);
        let wanted = match (&reached, look.wanted) {
            (Reached::There { stat, .. }, Wanted::Execute) if is(stat, libc::S_IFREG) => Asking::Execute,
            (Reached::There { stat, .. }, Wanted::Read) if is(stat, libc::S_IFDIR) && !handle_only => Asking::List,
            // A handle by which nothing is read.
            (Reached::There { .. }, Wanted::Read) if handle_only => return None,
            (Reached::There { .. }, Wanted::Read) => Asking::Read,
            (Reached::There { .. }, Wanted::Delete) if !rest.is_empty() => Asking::Move,
            (Reached::There { stat, .. }, Wanted::Delete) => {
                (is(stat, libc::S_IFDIR) == removes_directory(number, args)).then_some(Asking::Delete)?
            }
            (Reached::There { stat, .. }, Wanted::Write) if !look.creates_only => {
                let flags = open_flags(number, args, caller);
                let exclusive = libc::O_CREAT as u64 | libc::O_EXCL as u64;
                let fails = flags.is_some_and(|flags| {
                    flags & exclusive == exclusive
                        || (is(stat, libc::S_IFDIR) && flags & libc::O_TMPFILE as u64 != libc::O_TMPFILE as u64)
                });
                (!fails).then_some(Asking::Write)?
            }
            (Reached::Missing { path, .. }, Wanted::Write) => {
                let makes = look.creates_only
                    || open_flags(number, args, caller).is_some_and(|flags| flags & libc::O_CREAT as u64 != 0);
                let place = path.parent().is_some_and(|parent| lstat(parent).is_ok_and(|at| is(&at, libc::S_IFDIR)));
                (makes && place).then_some(Asking::Write)?
            }
            _ => return None,
        };
        let inside = |reached: Reached| match reached {
            Reached::There { path, .. } | Reached::Missing { path, .. } => Some(path),
            Reached::Failed => None,
        };
        let object = inside(reached)?;
        if !self.asking.contains(&wanted) || (wanted != Asking::Execute && !object.starts_with(&self.workspace)) {
            return None;
        }
        let to = match rest.first() {
            Some((look, path)) => {
                let path = inside(resolve::walk(path.as_ref()?, look.last))?;
                // Any other place is on another file system, so the kernel says EXDEV.
                Some(path.starts_with(&self.workspace).then_some(path)?)
            }
            None => None,
        };
        Some(Asked { to: to.map(Bytes::from), ..caller.asked(number, wanted, object.into()) })
    }

    /// Every refusal that happened more than once, with the times not told yet.
    pub fn repeated(&mut self) -> Vec<Denied> {
        let told = std::mem::take(&mut self.told).into_values().flatten();
        let again = told.filter(|(_, (_, more))| *more > 0);
        again.map(|(_, (denied, more))| Denied { times: more, ..denied }).collect()
    }

    /// What to tell of a datagram that was dropped, or of those for which the kernel had no more room to say where
    /// they were to go. Who sent it is not known.
    pub fn refused_datagram(&mut self, to: Option<SocketAddr>) -> Option<Denied> {
        let nobody = Caller { pid: 0, id: 0 };
        let object = to.map_or_else(|| "udp".to_owned(), |to| to.to_string());
        self.refusal(&nobody, libc::SYS_sendto, Wanted::Connect, object.into(), libc::EPERM)
    }

    /// What to tell of a refusal: nothing if the same was told before.
    fn refusal(
        &mut self,
        caller: &Caller,
        syscall: i64,
        access: Wanted,
        object: OsString,
        errno: i32,
    ) -> Option<Denied> {
        let told = self.told.entry(access).or_default();
        let key = (if access == Wanted::Syscall { syscall } else { 0 }, object.as_bytes().to_vec());
        if let Some((_, more)) = told.get_mut(&key) {
            *more += 1;
            return None;
        }
        if told.len() >= MAX_TOLD {
            told.clear();
        }
        let denied =
            Denied { syscall, access, object: object.into(), errno, pid: caller.pid, comm: caller.comm(), times: 1 };
        told.insert(key, (denied.clone(), 0));
        Some(denied)
    }

    /// The object and the error number, if the view is what refuses this.
    fn judge_path(&self, look: &Look, path: &Path) -> Option<(PathBuf, i32)> {
        if path.starts_with("/proc") || path.starts_with("/dev") {
            return None;
        }
        if matches!(look.wanted, Wanted::Read | Wanted::Execute)
            && self.readable.iter().any(|view| path.starts_with(view))
            && !path.components().any(|part| part == std::path::Component::ParentDir)
        {
            return None;
        }
        match resolve::look(path, look.last) {
            Ok(found) if found.is_mask() => Some((real(path, look.last), libc::EACCES)),
            Ok(found) if found.read_only && look.changes() && !look.creates_only => {
                Some((real(path, look.last), libc::EROFS))
            }
            Ok(found) if look.changes() && !look.creates_only && self.is_in_foreign(path, &found.stat) => {
                Some((real(path, look.last), libc::EOVERFLOW))
            }
            Ok(found) if look.wanted == Wanted::Execute && is(&found.stat, libc::S_IFREG) => self.judge_script(path),
            Ok(_) => None,
            Err(Errno::ENOENT | Errno::ENOTDIR) => self.judge_missing(look, path),
            Err(Errno::EACCES) => None,
            Err(_) => None,
        }
    }

    fn judge_missing(&self, look: &Look, path: &Path) -> Option<(PathBuf, i32)> {
        let Reached::Missing { path: real, above } = resolve::walk(path, look.last) else { return None };
        if self.private.contains(&above.st_dev) {
            // In a writable directory of the jail's own it succeeded, and what it made may be gone again already.
            let own = look.changes() && real.parent().is_some_and(is_writable);
            return (!own).then_some((real, libc::ENOENT));
        }
        // Nothing there to read or delete: the same without a jail. To make something there is another matter.
        let parent = real.parent()?;
        let makes = look.changes() && look.wanted != Wanted::Delete;
        if makes && resolve::look(parent, Last::Followed).is_ok_and(|found| self.is_foreign(parent, &found.stat)) {
            return Some((real, libc::EOVERFLOW));
        }
        let read_only = makes && resolve::look(parent, Last::Followed).is_ok_and(|found| found.read_only);
        read_only.then_some((real, libc::EROFS))
    }

    /// Whether the overlay cannot copy this into the run's layer because of whom it belongs to. The kernel refuses it to
    /// make a file of an id that the user namespace does not have (EOVERFLOW), and shows every such id as the same.
    fn is_foreign(&self, path: &Path, stat: &FileStat) -> bool {
        let Some((workspace, ids)) = &self.overlay else { return false };
        let foreign = |found: u32, own: u32| found == NOBODY && own != NOBODY;
        path != workspace
            && path.starts_with(workspace)
            && (foreign(stat.st_uid, ids.jail_uid) || foreign(stat.st_gid, ids.jail_gid))
    }

    /// As [`Observer::is_foreign`], also for the folder that it is in, which is copied first.
    fn is_in_foreign(&self, path: &Path, stat: &FileStat) -> bool {
        let above = || path.parent().and_then(|parent| Some((parent, lstat(parent).ok()?)));
        self.is_foreign(path, stat) || above().is_some_and(|(parent, stat)| self.is_foreign(parent, &stat))
    }

    /// A script that is there and whose interpreter is not.
    fn judge_script(&self, path: &Path) -> Option<(PathBuf, i32)> {
        use std::io::Read;
        let mut start = [0_u8; 256];
        let length = std::fs::File::open(path).ok()?.read(&mut start).ok()?;
        let line = start[..length].strip_prefix(b"#!")?.split(|byte| *byte == b'\n').next()?;
        let interpreter = line.split(|byte| byte.is_ascii_whitespace()).find(|word| !word.is_empty())?;
        let look = Look::read(0, 0, Wanted::Execute);
        let interpreter = Path::new(std::ffi::OsStr::from_bytes(interpreter));
        match resolve::look(interpreter, Last::Followed) {
            Err(Errno::ENOENT) if interpreter.is_absolute() => self.judge_missing(&look, interpreter),
            _ => None,
        }
    }

    /// Where a connection would lead and the error that it will have; none if it stays in the jail.
    fn judge_address(&self, caller: &Caller, address: &[u8]) -> Option<(OsString, i32)> {
        let family = i32::from(u16::from_ne_bytes([*address.first()?, *address.get(1)?]));
        Some(match family {
            libc::AF_INET => {
                let port = u16::from_be_bytes([*address.get(2)?, *address.get(3)?]);
                let ip = std::net::Ipv4Addr::from(<[u8; 4]>::try_from(address.get(4..8)?).ok()?);
                self.outside(ip.is_loopback() || ip.is_unspecified(), ip.into(), port)?
            }
            libc::AF_INET6 => {
                let port = u16::from_be_bytes([*address.get(2)?, *address.get(3)?]);
                let ip = std::net::Ipv6Addr::from(<[u8; 16]>::try_from(address.get(8..24)?).ok()?);
                let near = ip.is_loopback()
                    || ip.is_unspecified()
                    || ip.to_ipv4_mapped().is_some_and(|mapped| mapped.is_loopback());
                self.outside(near, ip.into(), port)?
            }
            libc::AF_UNIX => match address.get(2)? {
                0 => {
                    let name = address.get(3..)?;
                    (OsString::from_vec([b"@", name].concat()), libc::ECONNREFUSED)
                }
                _ => {
                    let name = address[2..].split(|byte| *byte == 0).next()?;
                    let path = caller.absolute(libc::AT_FDCWD, PathBuf::from(OsString::from_vec(name.to_vec())))?;
                    return self.judge_socket(&path);
                }
            },
            _ => return None,
        })
    }

    /// An address outside the jail that cannot be reached, as text with the error number, or a name lookup that has
    /// nobody to answer it; none for the jail's own and for what leads out.
    fn outside(&self, near: bool, ip: IpAddr, port: u16) -> Option<(OsString, i32)> {
        let address = || SocketAddr::new(ip, port).to_string().into();
        match (near, port, &self.reach) {
            (true, 53, Reach::Nowhere) => Some(("dns".into(), libc::ENETUNREACH)),
            (true, _, _) | (false, 0, _) | (false, _, Reach::Everywhere) => None,
            (false, _, Reach::Nowhere) => Some((address(), libc::ENETUNREACH)),
            (false, port, Reach::Ports(ports)) => {
                (!ports.contains(&port) && ip != NAME_SERVER).then(|| (address(), libc::ECONNREFUSED))
            }
        }
    }

    /// A socket's path: one that is hidden, or one whose other end is not in the jail. Whether the host has a socket
    /// there, only the supervisor can tell.
    fn judge_socket(&self, path: &Path) -> Option<(OsString, i32)> {
        match resolve::walk(path, Last::Followed) {
            Reached::Missing { path, above } if self.private.contains(&above.st_dev) => {
                Some((path.into(), libc::ENOENT))
            }
            Reached::There { path, stat } if is(&stat, libc::S_IFSOCK) => Some((path.into(), libc::ECONNREFUSED)),
            _ => None,
        }
    }

    fn directory_rename(
        &self,
        call: &libc::seccomp_notif,
        caller: &Caller,
        looks: &[(Look, Option<PathBuf>)],
    ) -> Option<rename::Request> {
        let flags = rename::flags_of(i64::from(call.data.nr), &call.data.args)?;
        let [(_, Some(from)), (_, Some(to))] = looks else { return None };
        let stat = lstat(from).ok()?;
        let ours = is(&stat, libc::S_IFDIR) && Some(stat.st_dev) == self.workspace_device;
        // The paths were read from memory that another thread may have changed since; both answers are then as good
        // as a rename that came a moment earlier. The process must still be the one that asked.
        (ours && sys::notification_waits(self.listener.as_fd(), caller.id)).then(|| rename::Request {
            id: call.id,
            from: from.clone(),
            to: to.clone(),
            flags,
        })
    }
}

fn is_writable(directory: &Path) -> bool {
    resolve::look(directory, Last::Followed).is_ok_and(|found| !found.read_only)
}

fn real(path: &Path, last: Last) -> PathBuf {
    match resolve::walk(path, last) {
        Reached::There { path, .. } | Reached::Missing { path, .. } => path,
        Reached::Failed => path.to_owned(),
    }
}

/// The process that waits.
struct Caller {
    pid: u32,
    id: u64,
}

impl Caller {
    fn pid(&self) -> Pid {
        Pid::from_raw(self.pid as i32)
    }

    fn asked(&self, syscall: i64, wanted: Asking, object: OsString) -> Asked {
        let (id, pid, comm) = (self.id, self.pid, self.comm());
        Asked { id, syscall, wanted, object: object.into(), to: None, refused_with: None, pid, comm }
    }

    fn comm(&self) -> Bytes {
        let comm = std::fs::read(format!("/proc/{}/comm", self.pid)).unwrap_or_default();
        let comm = comm.strip_suffix(b"\n").unwrap_or(&comm).to_vec();
        OsString::from_vec(comm).into()
    }

    /// So many bytes of the caller's memory.
    fn read(&self, address: u64, length: usize) -> Option<Vec<u8>> {
        let mut bytes = vec![0; length];
        let remote = [RemoteIoVec { base: address as usize, len: length }];
        let read = process_vm_readv(self.pid(), &mut [io::IoSliceMut::new(&mut bytes)], &remote).ok()?;
        bytes.truncate(read);
        Some(bytes)
    }

    /// A NUL-terminated string of at most PATH_MAX bytes, read without crossing into a page that may not be there.
    fn read_string(&self, address: u64) -> Option<Vec<u8>> {
        const PAGE: u64 = 4096;
        let mut string = Vec::new();
        let mut address = address;
        while string.len() < libc::PATH_MAX as usize {
            let chunk = self.read(address, (PAGE - address % PAGE) as usize)?;
            if let Some(end) = chunk.iter().position(|byte| *byte == 0) {
                string.extend_from_slice(&chunk[..end]);
                return Some(string);
            }
            address += chunk.len() as u64;
            string.extend(chunk);
        }
        None
    }

    /// The absolute path that a look is about.
    fn path(&self, look: &Look) -> Option<PathBuf> {
        let name = self.read_string(look.address)?;
        if name.is_empty() {
            return None;
        }
        self.absolute(look.directory, PathBuf::from(OsString::from_vec(name)))
    }

    fn absolute(&self, directory: i32, name: PathBuf) -> Option<PathBuf> {
        if name.is_absolute() {
            return Some(name);
        }
        let link = match directory {
            libc::AT_FDCWD => format!("/proc/{}/cwd", self.pid),
            fd => format!("/proc/{}/fd/{fd}", self.pid),
        };
        let base = PathBuf::from(nix::fcntl::readlink(link.as_str()).ok()?);
        base.is_absolute().then(|| base.join(name))
    }
}

/// One path of a call, and what the call wants with it.
struct Look {
    directory: i32,
    address: u64,
    wanted: Wanted,
    last: Last,
    /// Fails if the path is there already, so only a missing one can be refused by the view.
    creates_only: bool,
}

impl Look {
    fn new(directory: i32, address: u64, wanted: Wanted, last: Last) -> Look {
        Look { directory, address, wanted, last, creates_only: false }
    }

    fn read(directory: i32, address: u64, wanted: Wanted) -> Look {
        Look::new(directory, address, wanted, Last::Followed)
    }

    fn creating(directory: i32, address: u64) -> Look {
        Look { creates_only: true, ..Look::new(directory, address, Wanted::Write, Last::Kept) }
    }

    fn changes(&self) -> bool {
        matches!(self.wanted, Wanted::Write | Wanted::Delete)
    }
}

/// The flags of a call that opens a file.
fn open_flags(number: i64, args: &[u64; 6], caller: &Caller) -> Option<u64> {
    match number {
        libc::SYS_openat => Some(args[2]),
        libc::SYS_openat2 => {
            let flags = caller.read(args[2], 8).and_then(|bytes| <[u8; 8]>::try_from(bytes).ok());
            flags.map(u64::from_ne_bytes)
        }
        #[cfg(target_arch = "x86_64")]
        libc::SYS_open => Some(args[1]),
        // open(2): creat() is open() with these.
        #[cfg(target_arch = "x86_64")]
        libc::SYS_creat => Some((libc::O_CREAT | libc::O_WRONLY | libc::O_TRUNC) as u64),
        _ => None,
    }
}

/// Whether a call that deletes is about directories, rather than about everything else.
fn removes_directory(number: i64, args: &[u64; 6]) -> bool {
    match number {
        libc::SYS_unlinkat => args[2] & libc::AT_REMOVEDIR as u64 != 0,
        #[cfg(target_arch = "x86_64")]
        libc::SYS_rmdir => true,
        _ => false,
    }
}

/// What to look at, by call number.
fn looks_of(number: i64, args: &[u64; 6], caller: &Caller) -> Vec<Look> {
    let cwd = libc::AT_FDCWD;
    let fd = |index: usize| args[index] as u32 as i32;
    let opened = |directory, address, flags: u64| {
        let writes = flags & (libc::O_ACCMODE | libc::O_CREAT | libc::O_TRUNC) as u64 != 0;
        let wanted = if writes { Wanted::Write } else { Wanted::Read };
        let kept = flags & (libc::O_NOFOLLOW as u64) != 0;
        vec![Look::new(directory, address, wanted, if kept { Last::Kept } else { Last::Followed })]
    };
    let write = |directory, address, last| vec![Look::new(directory, address, Wanted::Write, last)];
    let delete = |directory, address| Look::new(directory, address, Wanted::Delete, Last::Kept);
    let followed = |flags: u64| {
        if flags & libc::AT_SYMLINK_NOFOLLOW as u64 != 0 {
            Last::Kept
        } else {
            Last::Followed
        }
    };
    match number {
        libc::SYS_openat => opened(fd(0), args[1], args[2]),
        libc::SYS_openat2 => opened(fd(0), args[1], open_flags(number, args, caller).unwrap_or_default()),
        libc::SYS_truncate => write(cwd, args[0], Last::Followed),
        libc::SYS_mkdirat | libc::SYS_mknodat => vec![Look::creating(fd(0), args[1])],
        libc::SYS_symlinkat => vec![Look::creating(fd(1), args[2])],
        libc::SYS_linkat => vec![Look::creating(fd(2), args[3])],
        libc::SYS_unlinkat => vec![delete(fd(0), args[1])],
        libc::SYS_renameat2 => {
            vec![delete(fd(0), args[1]), Look::new(fd(2), args[3], Wanted::Write, Last::Kept)]
        }
        libc::SYS_fchmodat => write(fd(0), args[1], Last::Followed),
        // fchmodat2(2), Linux 6.6; the same number on every architecture.
        452 => write(fd(0), args[1], followed(args[3])),
        libc::SYS_fchownat => write(fd(0), args[1], followed(args[4])),
        libc::SYS_utimensat => write(fd(0), args[1], followed(args[3])),
        libc::SYS_setxattr | libc::SYS_removexattr => write(cwd, args[0], Last::Followed),
        libc::SYS_lsetxattr | libc::SYS_lremovexattr => write(cwd, args[0], Last::Kept),
        libc::SYS_execve => vec![Look::read(cwd, args[0], Wanted::Execute)],
        libc::SYS_execveat => vec![Look::read(fd(0), args[1], Wanted::Execute)],
        _ => old_looks_of(number, args),
    }
}

/// The calls that newer architectures no longer have.
#[cfg(target_arch = "x86_64")]
fn old_looks_of(number: i64, args: &[u64; 6]) -> Vec<Look> {
    let cwd = libc::AT_FDCWD;
    let write = |last| vec![Look::new(cwd, args[0], Wanted::Write, last)];
    match number {
        libc::SYS_open => {
            let writes = args[1] & (libc::O_ACCMODE | libc::O_CREAT | libc::O_TRUNC) as u64 != 0;
            vec![Look::read(cwd, args[0], if writes { Wanted::Write } else { Wanted::Read })]
        }
        libc::SYS_creat => write(Last::Followed),
        libc::SYS_mkdir | libc::SYS_mknod => vec![Look::creating(cwd, args[0])],
        libc::SYS_symlink | libc::SYS_link => vec![Look::creating(cwd, args[1])],
        libc::SYS_rmdir | libc::SYS_unlink => vec![Look::new(cwd, args[0], Wanted::Delete, Last::Kept)],
        libc::SYS_rename => vec![
            Look::new(cwd, args[0], Wanted::Delete, Last::Kept),
            Look::new(cwd, args[1], Wanted::Write, Last::Kept),
        ],
        libc::SYS_renameat => {
            let fd = |index: usize| args[index] as u32 as i32;
            vec![
                Look::new(fd(0), args[1], Wanted::Delete, Last::Kept),
                Look::new(fd(2), args[3], Wanted::Write, Last::Kept),
            ]
        }
        libc::SYS_chmod | libc::SYS_chown => write(Last::Followed),
        libc::SYS_lchown => write(Last::Kept),
        _ => Vec::new(),
    }
}

/// See the other one.
#[cfg(not(target_arch = "x86_64"))]
fn old_looks_of(number: i64, args: &[u64; 6]) -> Vec<Look> {
    match number {
        libc::SYS_renameat => {
            let fd = |index: usize| args[index] as u32 as i32;
            vec![
                Look::new(fd(0), args[1], Wanted::Delete, Last::Kept),
                Look::new(fd(2), args[3], Wanted::Write, Last::Kept),
            ]
        }
        _ => Vec::new(),
    }
}
