//! Who starts a run, as the kernel tells.

use crate::jail::spec::{Caller, Privilege};
use nix::unistd::{Uid, User};

/// The caller of this process.
pub fn current() -> Caller {
    let (uid, gid) = (nix::unistd::geteuid().as_raw(), nix::unistd::getegid().as_raw());
    let map = std::fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
    let name = User::from_uid(Uid::from_raw(uid)).ok().flatten().map(|user| user.name).unwrap_or_default();
    let privilege = match uid == 0 && is_initial(&map) {
        true => Privilege::Root,
        false => Privilege::Ordinary,
    };
    Caller { uid, gid, name, privilege }
}

/// Whether this is the host's own user namespace: the only one that maps every id to itself (user_namespaces(7)).
fn is_initial(uid_map: &str) -> bool {
    uid_map.split_whitespace().eq(["0", "0", "4294967295"])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_hosts_own_namespace_is_initial() {
        assert!(is_initial("         0          0 4294967295\n"));
        assert!(!is_initial("         0       1000          1\n"));
        assert!(!is_initial("         0          0          1\n"));
        assert!(!is_initial(""));
    }
}
