//! The kernel calls that no crate of ours wraps, one a function; nothing is decided here.
#![allow(unsafe_code)]

use std::{
    ffi::CStr,
    io,
    os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd},
};

fn check(result: libc::c_long) -> io::Result<libc::c_long> {
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(result)
    }
}

fn owned(result: libc::c_long) -> io::Result<OwnedFd> {
    let fd = check(result)?;
    // SAFETY: the kernel has just returned this descriptor to us, so nobody else owns or closes it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as RawFd) })
}

/// fsopen(2): a context for a new file system.
pub fn fsopen(name: &CStr) -> io::Result<OwnedFd> {
    // SAFETY: the name is a NUL-terminated string that outlives the call; the kernel only reads it.
    owned(unsafe { libc::syscall(libc::SYS_fsopen, name.as_ptr(), FSOPEN_CLOEXEC) })
}

/// fsconfig(2) with `FSCONFIG_SET_STRING`.
pub fn fsconfig_string(context: &OwnedFd, key: &CStr, value: &CStr) -> io::Result<()> {
    // SAFETY: both strings are NUL-terminated and outlive the call; the kernel copies them.
    check(unsafe {
        libc::syscall(libc::SYS_fsconfig, context.as_raw_fd(), FSCONFIG_SET_STRING, key.as_ptr(), value.as_ptr(), 0)
    })
    .map(drop)
}

/// fsconfig(2) with `FSCONFIG_SET_FLAG`.
pub fn fsconfig_flag(context: &OwnedFd, key: &CStr) -> io::Result<()> {
    let none = std::ptr::null::<libc::c_char>();
    // SAFETY: the key is a NUL-terminated string; the kernel wants no value for a flag.
    check(unsafe { libc::syscall(libc::SYS_fsconfig, context.as_raw_fd(), FSCONFIG_SET_FLAG, key.as_ptr(), none, 0) })
        .map(drop)
}

/// fsconfig(2) with `FSCONFIG_CMD_CREATE`, then fsmount(2): a mount that is nowhere yet.
pub fn fsmount(context: &OwnedFd, attributes: u64) -> io::Result<OwnedFd> {
    let none = std::ptr::null::<libc::c_char>();
    // SAFETY: `FSCONFIG_CMD_CREATE` takes neither key nor value.
    check(unsafe { libc::syscall(libc::SYS_fsconfig, context.as_raw_fd(), FSCONFIG_CMD_CREATE, none, none, 0) })?;
    // SAFETY: no memory is passed; the arguments are a descriptor and flags.
    owned(unsafe { libc::syscall(libc::SYS_fsmount, context.as_raw_fd(), FSMOUNT_CLOEXEC, attributes as libc::c_uint) })
}

/// The kernel's own words about why a file-system context failed, newest last.
pub fn fscontext_messages(context: &OwnedFd) -> String {
    let mut messages = Vec::new();
    let mut buffer = [0_u8; 512];
    while let Ok(length @ 1..) = nix::unistd::read(context, &mut buffer) {
        messages.push(String::from_utf8_lossy(&buffer[..length]).trim().to_owned());
        if messages.len() == 8 {
            break;
        }
    }
    messages.join("; ")
}

/// open_tree(2): a copy of the mount at this path, with what is mounted below it if asked.
pub fn open_tree(at: BorrowedFd, path: &CStr, flags: u32) -> io::Result<OwnedFd> {
    // SAFETY: the path is a NUL-terminated string that outlives the call.
    owned(unsafe {
        libc::syscall(libc::SYS_open_tree, at.as_raw_fd(), path.as_ptr(), flags | OPEN_TREE_CLOEXEC | OPEN_TREE_CLONE)
    })
}

/// move_mount(2): attaches a mount that is nowhere yet at a directory or file.
pub fn move_mount(mount: &OwnedFd, target: BorrowedFd) -> io::Result<()> {
    let flags = MOVE_MOUNT_F_EMPTY_PATH | MOVE_MOUNT_T_EMPTY_PATH;
    // SAFETY: both paths are the empty C string, which the flags say to expect.
    check(unsafe {
        libc::syscall(
            libc::SYS_move_mount,
            mount.as_raw_fd(),
            c"".as_ptr(),
            target.as_raw_fd(),
            c"".as_ptr(),
            flags as libc::c_uint,
        )
    })
    .map(drop)
}

/// mount_setattr(2) on a mount given by descriptor, which also becomes private: a copy is a peer of what it was copied
/// from, and peers pass on to each other what is mounted below them (mount_namespaces(7), "Shared subtrees").
pub fn mount_setattr(
    mount: BorrowedFd,
    recursive: bool,
    set: u64,
    user_namespace: Option<BorrowedFd>,
) -> io::Result<()> {
    let attributes = MountAttr {
        set: set | if user_namespace.is_some() { MOUNT_ATTR_IDMAP } else { 0 },
        clear: 0,
        propagation: libc::MS_PRIVATE,
        user_namespace: user_namespace.map_or(0, |fd| fd.as_raw_fd() as u64),
    };
    let flags = libc::AT_EMPTY_PATH | if recursive { AT_RECURSIVE as i32 } else { 0 };
    // SAFETY: the structure is laid out as in linux/mount.h, lives through the call, and its size is passed with it.
    check(unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            mount.as_raw_fd(),
            c"".as_ptr(),
            flags,
            &attributes as *const MountAttr,
            std::mem::size_of::<MountAttr>(),
        )
    })
    .map(drop)
}

/// `struct mount_attr`, linux/mount.h.
#[repr(C)]
struct MountAttr {
    set: u64,
    clear: u64,
    propagation: u64,
    user_namespace: u64,
}

/// close_range(2): closes every descriptor from `first` up to and including `last`.
pub fn close_range(first: u32, last: u32) -> io::Result<()> {
    // SAFETY: the caller holds no owner for these descriptors that would be used or closed again afterwards; the
    // shim is single-threaded, so none appears meanwhile.
    check(unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) }).map(drop)
}

/// fork(2). The shim has one thread, so the child may go on with ordinary code.
pub fn fork() -> io::Result<Option<nix::unistd::Pid>> {
    // SAFETY: the shim never starts a thread, so no lock of the C library or of ours is held by another thread here.
    match unsafe { nix::unistd::fork() }? {
        nix::unistd::ForkResult::Parent { child } => Ok(Some(child)),
        nix::unistd::ForkResult::Child => Ok(None),
    }
}

/// Makes a descriptor number that we were started with into one that we own.
pub fn adopt(fd: RawFd) -> OwnedFd {
    // SAFETY: called once, at start, for the documented descriptor that the supervisor passed to us alone.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

/// Puts every signal back to its default action. Rust's start-up ignores SIGPIPE, and posix_spawn(3) leaves the two
/// signals that the C library keeps for itself ignored; both are inherited by execution.
pub fn default_actions() {
    /// `struct sigaction` as the kernel has it: handler, flags, restorer, mask (rt_sigaction(2)). All zero is `SIG_DFL`.
    const DEFAULT: [u64; 4] = [0; 4];
    // The kernel has 64 signals on every architecture that we know (signal(7)).
    for signal in 1..=64 {
        let none = std::ptr::null_mut::<libc::c_void>();
        // SAFETY: the structure is at least as long as the kernel's and only read; a mask of 8 bytes is what it wants.
        // SIGKILL and SIGSTOP say no, and are at their default anyway.
        let _ = unsafe { libc::syscall(libc::SYS_rt_sigaction, signal, DEFAULT.as_ptr(), none, 8_usize) };
    }
}

/// seccomp(2) with `SECCOMP_SET_MODE_FILTER`; gives the listener's descriptor when the flags ask for one.
pub fn seccomp_filter(instructions: &[libc::sock_filter], flags: libc::c_ulong) -> io::Result<Option<OwnedFd>> {
    let program = libc::sock_fprog {
        len: u16::try_from(instructions.len()).map_err(|_| io::Error::from_raw_os_error(libc::E2BIG))?,
        filter: instructions.as_ptr().cast_mut(),
    };
    // SAFETY: the program points at `instructions`, which lives through the call; the kernel copies and checks it.
    let result = check(unsafe {
        libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, flags, &program as *const libc::sock_fprog)
    })?;
    if flags & libc::SECCOMP_FILTER_FLAG_NEW_LISTENER == 0 {
        return Ok(None);
    }
    // SAFETY: with `NEW_LISTENER` the kernel returns a new descriptor, which only we know.
    Ok(Some(unsafe { OwnedFd::from_raw_fd(result as RawFd) }))
}

/// `SECCOMP_IOCTL_NOTIF_RECV`: the next system call that waits for an answer; none if its caller went away.
pub fn notification_receive(listener: BorrowedFd) -> io::Result<Option<libc::seccomp_notif>> {
    // SAFETY: all-zero is a valid value of this plain structure, and the kernel insists on it.
    let mut notification: libc::seccomp_notif = unsafe { std::mem::zeroed() };
    // SAFETY: the structure is the kernel's own, lives through the call and is exclusively ours.
    let result = unsafe { libc::ioctl(listener.as_raw_fd(), SECCOMP_IOCTL_NOTIF_RECV, &mut notification) };
    match check(result.into()) {
        Ok(_) => Ok(Some(notification)),
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::EINTR)) => Ok(None),
        Err(error) => Err(error),
    }
}

/// What to do with a waiting system call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reply {
    /// Let the kernel run it, as it stands in the caller's memory then.
    Continue,
    /// Give the caller this value.
    Return(i64),
    /// Give the caller this error number.
    Fail(i32),
}

/// `SECCOMP_IOCTL_NOTIF_SEND`. A caller that has gone away meanwhile is no error.
pub fn notification_reply(listener: BorrowedFd, id: u64, reply: Reply) -> io::Result<()> {
    let (val, error, flags) = match reply {
        Reply::Continue => (0, 0, libc::SECCOMP_USER_NOTIF_FLAG_CONTINUE as u32),
        Reply::Return(value) => (value, 0, 0),
        Reply::Fail(errno) => (0, -errno, 0),
    };
    let response = libc::seccomp_notif_resp { id, val, error, flags };
    // SAFETY: the structure is the kernel's own and lives through the call.
    let result = unsafe { libc::ioctl(listener.as_raw_fd(), SECCOMP_IOCTL_NOTIF_SEND, &response) };
    match check(result.into()) {
        Err(error) if error.raw_os_error() != Some(libc::ENOENT) => Err(error),
        _ => Ok(()),
    }
}

/// `SECCOMP_IOCTL_NOTIF_ID_VALID`: whether the system call still waits, so that its process id still means it.
pub fn notification_waits(listener: BorrowedFd, id: u64) -> bool {
    // SAFETY: the id is a plain number that lives through the call.
    unsafe { libc::ioctl(listener.as_raw_fd(), SECCOMP_IOCTL_NOTIF_ID_VALID, &id) == 0 }
}

/// `SECCOMP_IOCTL_NOTIF_SET_FLAGS` with `SECCOMP_USER_NOTIF_FD_SYNC_WAKE_UP` (Linux 6.6): caller and answerer take
/// turns on one processor. An older kernel says no, and nothing but speed is lost.
pub fn notification_wake_in_turn(listener: BorrowedFd) {
    // SAFETY: the ioctl takes its flags by value.
    let _ =
        unsafe { libc::ioctl(listener.as_raw_fd(), SECCOMP_IOCTL_NOTIF_SET_FLAGS, SECCOMP_USER_NOTIF_FD_SYNC_WAKE_UP) };
}

/// Sets the interface flags of the namespace's loopback so that it is up (netdevice(7)).
pub fn loopback_up(socket: &OwnedFd) -> io::Result<()> {
    // SAFETY: all-zero is a valid value of this plain structure.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    request.ifr_name[0] = b'l' as libc::c_char;
    request.ifr_name[1] = b'o' as libc::c_char;
    request.ifr_ifru.ifru_flags = (libc::IFF_UP | libc::IFF_RUNNING) as libc::c_short;
    // SAFETY: the structure is the kernel's own and lives through the call.
    check(unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS, &request) }.into()).map(drop)
}

/// Unlocks a terminal's other end and opens it (ioctl_tty(2), `TIOCSPTLCK` and `TIOCGPTPEER`).
pub fn terminal_peer(master: &OwnedFd) -> io::Result<OwnedFd> {
    let unlock: libc::c_int = 0;
    // SAFETY: the number lives through the call.
    check(unsafe { libc::ioctl(master.as_raw_fd(), libc::TIOCSPTLCK, &unlock) }.into())?;
    let flags = libc::O_RDWR | libc::O_NOCTTY | libc::O_CLOEXEC;
    // SAFETY: the ioctl takes its flags by value and returns a new descriptor.
    owned(unsafe { libc::ioctl(master.as_raw_fd(), libc::TIOCGPTPEER, flags) }.into())
}

/// `TIOCSWINSZ`: the terminal's size.
pub fn terminal_resize(terminal: BorrowedFd, rows: u16, columns: u16) -> io::Result<()> {
    let size = libc::winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
    // SAFETY: the structure lives through the call.
    check(unsafe { libc::ioctl(terminal.as_raw_fd(), libc::TIOCSWINSZ, &size) }.into()).map(drop)
}

/// `TIOCSCTTY`: makes the terminal the session's own.
pub fn terminal_take(terminal: BorrowedFd) -> io::Result<()> {
    // SAFETY: the ioctl takes a number by value.
    check(unsafe { libc::ioctl(terminal.as_raw_fd(), libc::TIOCSCTTY, 0) }.into()).map(drop)
}

// linux/mount.h.
const FSOPEN_CLOEXEC: u32 = 1;
const FSCONFIG_SET_FLAG: u32 = 0;
const FSCONFIG_SET_STRING: u32 = 1;
const FSCONFIG_CMD_CREATE: u32 = 6;
const FSMOUNT_CLOEXEC: u32 = 1;
const OPEN_TREE_CLONE: u32 = 1;
const OPEN_TREE_CLOEXEC: u32 = libc::O_CLOEXEC as u32;
const MOVE_MOUNT_F_EMPTY_PATH: u32 = 0x4;
const MOVE_MOUNT_T_EMPTY_PATH: u32 = 0x40;
const MOUNT_ATTR_IDMAP: u64 = 0x0010_0000;
/// Read-only.
pub const MOUNT_ATTR_RDONLY: u64 = 0x1;
/// Set-user-id bits do nothing.
pub const MOUNT_ATTR_NOSUID: u64 = 0x2;
/// Device nodes do not open.
pub const MOUNT_ATTR_NODEV: u64 = 0x4;
/// Nothing executes.
pub const MOUNT_ATTR_NOEXEC: u64 = 0x8;
/// open_tree(2), mount_setattr(2): with everything mounted below.
pub const AT_RECURSIVE: u32 = 0x8000;

// linux/seccomp.h: _IOWR('!', 0, 80), _IOWR('!', 1, 24), _IOW('!', 2, 8), _IOW('!', 4, 8).
const SECCOMP_IOCTL_NOTIF_RECV: libc::Ioctl = 0xc050_2100;
const SECCOMP_IOCTL_NOTIF_SEND: libc::Ioctl = 0xc018_2101;
const SECCOMP_IOCTL_NOTIF_ID_VALID: libc::Ioctl = 0x4008_2102;
const SECCOMP_IOCTL_NOTIF_SET_FLAGS: libc::Ioctl = 0x4008_2104;
const SECCOMP_USER_NOTIF_FD_SYNC_WAKE_UP: libc::c_ulong = 1;
/// linux/seccomp.h, since Linux 5.19: a waiting call is interrupted by a deadly signal only.
pub const SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV: libc::c_ulong = 1 << 5;

const _: () = {
    assert!(std::mem::size_of::<libc::seccomp_notif>() == 80);
    assert!(std::mem::size_of::<libc::seccomp_notif_resp>() == 24);
};
