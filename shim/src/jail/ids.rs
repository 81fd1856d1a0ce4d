//! Who the jail is: the user on the host, the namespaces, the maps between them.

use super::step::{At, Failure};
use crate::{
    protocol::{Ids, Layer},
    sys,
};
use nix::{
    sched::{unshare, CloneFlags},
    sys::socket::{socket, AddressFamily, SockFlag, SockType},
    unistd::{setgroups, setresgid, setresuid, Gid, Uid},
};
use std::{fs, io};

/// A privileged caller becomes the run's own unprivileged user; for anyone else, nothing changes.
pub fn become_host_user(ids: &Ids) -> Result<(), Failure> {
    if ids.host_uid == 0 && !zero_is_somebody_else()? {
        let failure = Err(io::Error::from_raw_os_error(libc::EPERM)).at("setresuid", "host user 0 never runs a jail");
        return failure.map_err(|failure: Failure| {
            failure.remedy(
                "this user namespace maps no user but root of the host, so there is nobody else to run the program as; \
                 start as an ordinary user, or outside this namespace",
            )
        });
    }
    if Uid::current().as_raw() == ids.host_uid {
        return Ok(());
    }
    let (uid, gid) = (Uid::from_raw(ids.host_uid), Gid::from_raw(ids.host_gid));
    setgroups(&[]).at("setgroups", "no groups")?;
    setresgid(gid, gid, gid).at("setresgid", gid)?;
    setresuid(uid, uid, uid).at("setresuid", uid)?;
    // A change of user makes /proc/self belong to root, which would leave the id maps unwritable (proc(5)).
    nix::sys::prctl::set_dumpable(true).at("prctl(PR_SET_DUMPABLE)", uid)
}

/// Whether user 0 of this namespace is another user outside of it, as in a rootless container.
fn zero_is_somebody_else() -> Result<bool, Failure> {
    let map = fs::read_to_string("/proc/self/uid_map").at("read", "/proc/self/uid_map")?;
    let mut first = map.lines().flat_map(|line| {
        let mut fields = line.split_whitespace().filter_map(|field| field.parse::<u64>().ok());
        Some((fields.next()?, fields.next()?))
    });
    Ok(first.any(|(inside, outside)| inside == 0 && outside != 0))
}

/// Ends this process when its parent does.
pub fn die_with_parent() -> Result<(), Failure> {
    nix::sys::prctl::set_pdeathsig(nix::sys::signal::Signal::SIGKILL).at("prctl(PR_SET_PDEATHSIG)", "SIGKILL")
}

/// A user namespace, which owns all the others.
pub fn unshare_user() -> Result<(), Failure> {
    unshare(CloneFlags::CLONE_NEWUSER).at("unshare", "a user namespace")
}

/// New namespaces of every other kind that the plan does not leave out.
pub fn unshare_others(without: &[Layer]) -> Result<(), Failure> {
    let mut flags = CloneFlags::CLONE_NEWNS
        | CloneFlags::CLONE_NEWUTS
        | CloneFlags::CLONE_NEWCGROUP
        | CloneFlags::CLONE_NEWIPC
        | CloneFlags::CLONE_NEWNET
        | CloneFlags::CLONE_NEWPID;
    for (layer, flag) in [
        (Layer::Ipc, CloneFlags::CLONE_NEWIPC),
        (Layer::Network, CloneFlags::CLONE_NEWNET),
        (Layer::Pid, CloneFlags::CLONE_NEWPID),
    ] {
        if without.contains(&layer) {
            flags.remove(flag);
        }
    }
    unshare(flags).at("unshare", "mount, pid, network, IPC, host-name and cgroup namespaces")
}

/// The other namespace that staging a view for bubblewrap needs.
pub fn unshare_for_staging() -> Result<(), Failure> {
    unshare(CloneFlags::CLONE_NEWNS).at("unshare", "a mount namespace")
}

/// A network namespace, for a launcher that would make it where it cannot be set up.
pub fn unshare_network() -> Result<(), Failure> {
    unshare(CloneFlags::CLONE_NEWNET).at("unshare", "a network namespace")
}

/// Maps one user and one group of the host, and no other.
pub fn map_self(host_uid: u32, host_gid: u32, jail_uid: u32, jail_gid: u32) -> Result<(), Failure> {
    let write = |file: &str, text: String| fs::write(file, &text).at("write", format_args!("{file}: {text}"));
    // An unprivileged process may map a group only after giving up setgroups (user_namespaces(7)).
    write("/proc/self/setgroups", "deny".to_owned())?;
    write("/proc/self/uid_map", format!("{jail_uid} {host_uid} 1"))?;
    write("/proc/self/gid_map", format!("{jail_gid} {host_gid} 1"))
}

/// No user namespace below ours: the limit is the namespace's own, and nobody inside keeps the right to raise it.
pub fn forbid_nested_namespaces() -> Result<(), Failure> {
    const FILE: &str = "/proc/sys/user/max_user_namespaces";
    fs::write(FILE, "0").at("write", FILE)
}

/// The loopback interface of the new network namespace.
pub fn raise_loopback() -> Result<(), Failure> {
    let socket = socket(AddressFamily::Inet, SockType::Datagram, SockFlag::SOCK_CLOEXEC, None).at("socket", "lo")?;
    sys::loopback_up(&socket).at("ioctl(SIOCSIFFLAGS)", "lo")
}
