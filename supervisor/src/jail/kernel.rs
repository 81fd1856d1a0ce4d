//! Kernel calls that no crate here offers. One call a function, errno to `io::Error`, nothing decided.
#![allow(unsafe_code)]

use nix::unistd::Pid;
use std::{
    io,
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
};

fn checked(result: libc::c_long) -> io::Result<libc::c_long> {
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(result)
    }
}

/// Wraps a descriptor that a call has just returned.
fn owned(result: libc::c_long) -> io::Result<OwnedFd> {
    let number = checked(result)?;
    let number = i32::try_from(number).map_err(io::Error::other)?;
    // SAFETY: the kernel has just returned this descriptor to the caller, so nobody else owns or closes it.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

/// pidfd_open(2): a handle that stays this process, whatever its number becomes.
pub fn pidfd_open(pid: Pid) -> io::Result<OwnedFd> {
    // SAFETY: the call takes two integers and touches no memory of ours.
    owned(unsafe { libc::syscall(libc::SYS_pidfd_open, pid.as_raw(), 0) })
}

/// pidfd_send_signal(2) with SIGKILL.
pub fn pidfd_kill(process: &OwnedFd) -> io::Result<()> {
    let no_info = std::ptr::null::<libc::siginfo_t>();
    // SAFETY: the descriptor is open as long as `process` is borrowed; a null siginfo is allowed and read by nobody.
    checked(unsafe { libc::syscall(libc::SYS_pidfd_send_signal, process.as_raw_fd(), libc::SIGKILL, no_info, 0) })?;
    Ok(())
}

/// landlock_create_ruleset(2) with `LANDLOCK_CREATE_RULESET_VERSION`: the ABI's version.
pub fn landlock_abi() -> io::Result<i64> {
    // LANDLOCK_CREATE_RULESET_VERSION of linux/landlock.h.
    const VERSION: libc::c_uint = 1;
    let no_attributes = std::ptr::null::<libc::c_void>();
    // SAFETY: with this flag the kernel demands a null pointer and size 0, reads no memory and makes no descriptor.
    checked(unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, no_attributes, 0_usize, VERSION) })
}

/// seccomp(2): installs a filter that allows everything and has a listener, after giving up new privileges.
pub fn seccomp_listener() -> io::Result<OwnedFd> {
    let mut allow =
        libc::sock_filter { code: (libc::BPF_RET | libc::BPF_K) as u16, jt: 0, jf: 0, k: libc::SECCOMP_RET_ALLOW };
    let program = libc::sock_fprog { len: 1, filter: &mut allow };
    // SAFETY: prctl with this option takes integers only.
    checked(unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) }.into())?;
    // SAFETY: the kernel copies the program during the call; `program` and the one instruction it points to live on
    // this frame until the call has returned.
    owned(unsafe {
        libc::syscall(
            libc::SYS_seccomp,
            libc::SECCOMP_SET_MODE_FILTER,
            libc::SECCOMP_FILTER_FLAG_NEW_LISTENER,
            &program as *const libc::sock_fprog,
        )
    })
}

/// open_tree(2) with `OPEN_TREE_CLONE`, then mount_setattr(2) with `MOUNT_ATTR_IDMAP`: maps a detached copy of a
/// directory's mount through a user namespace.
pub fn idmapped_clone(directory: &std::ffi::CStr, user_namespace: &OwnedFd) -> io::Result<OwnedFd> {
    let flags = libc::OPEN_TREE_CLONE | libc::OPEN_TREE_CLOEXEC;
    // SAFETY: the path is a terminated string that lives through the call.
    let tree = owned(unsafe { libc::syscall(libc::SYS_open_tree, libc::AT_FDCWD, directory.as_ptr(), flags) })?;
    let attributes = libc::mount_attr {
        attr_set: libc::MOUNT_ATTR_IDMAP,
        attr_clr: 0,
        propagation: 0,
        userns_fd: user_namespace.as_raw_fd() as u64,
    };
    // SAFETY: the empty path and the attributes live through the call, and the size given is the attributes' own.
    checked(unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            tree.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            &attributes as *const libc::mount_attr,
            std::mem::size_of::<libc::mount_attr>(),
        )
    })?;
    Ok(tree)
}
