//! The layers that a process takes on itself: no capability, no new privilege, resource limits, Landlock, seccomp.

use super::step::{At, Failure};
use crate::{
    protocol::{Access, Enforcement, Filter, Mount, Plan},
    sys,
};
use caps::CapSet;
use landlock::{
    Access as _, AccessFs, BitFlags, CompatLevel, Compatible, PathBeneath, PathFd, Ruleset, RulesetAttr,
    RulesetCreatedAttr, RulesetStatus, Scope, ABI,
};
use std::{io, os::fd::OwnedFd, os::unix::ffi::OsStrExt};

/// The newest Landlock interface whose rights this program knows how to hand out (landlock(7)).
const LANDLOCK: ABI = ABI::V6;

/// Refuses a plan that leaves a layer out, unless this is a build for tests.
pub fn check_switches(plan: &Plan) -> Result<(), Failure> {
    if plan.without.is_empty() || cfg!(feature = "test-switches") {
        return Ok(());
    }
    Err(io::Error::from_raw_os_error(libc::EPERM)).at("leave out", format_args!("{:?}", plan.without)).map_err(
        |failure: Failure| failure.remedy("only a shim built with the feature `test-switches` leaves layers out"),
    )
}

/// Empties all five capability sets (capabilities(7)).
pub fn drop_capabilities() -> Result<(), Failure> {
    let said = |error: caps::errors::CapsError| io::Error::other(error.to_string());
    // The bounding set first: shrinking it needs a capability. Behind bubblewrap it is empty already.
    for capability in caps::read(None, CapSet::Bounding).map_err(said).at("prctl(PR_CAPBSET_READ)", "all")? {
        caps::drop(None, CapSet::Bounding, capability).map_err(said).at("prctl(PR_CAPBSET_DROP)", capability)?;
    }
    for (set, name) in [
        (CapSet::Ambient, "ambient"),
        (CapSet::Inheritable, "inheritable"),
        (CapSet::Effective, "effective"),
        (CapSet::Permitted, "permitted"),
    ] {
        caps::clear(None, set).map_err(said).at("capset", name)?;
    }
    // Ask the kernel whether it took.
    for (set, name) in
        [(CapSet::Permitted, "permitted"), (CapSet::Effective, "effective"), (CapSet::Bounding, "bounding")]
    {
        let left = caps::read(None, set).map_err(said).at("capget", name)?;
        if !left.is_empty() {
            return Err(io::Error::from_raw_os_error(libc::EPERM)).at("capset", format_args!("{name}: {left:?} left"));
        }
    }
    Ok(())
}

/// No execution gives a privilege any more.
pub fn no_new_privileges() -> Result<(), Failure> {
    nix::sys::prctl::set_no_new_privs().at("prctl(PR_SET_NO_NEW_PRIVS)", "1")
}

/// Keeps others of the same user out of this process's memory and descriptors (proc(5), ptrace(2)).
pub fn not_dumpable() -> Result<(), Failure> {
    nix::sys::prctl::set_dumpable(false).at("prctl(PR_SET_DUMPABLE)", "0")
}

/// The plan's resource limits.
pub fn limit_resources(plan: &Plan) -> Result<(), Failure> {
    for (number, soft, hard) in &plan.rlimits {
        let limit = libc::rlimit { rlim_cur: *soft, rlim_max: *hard };
        #[allow(unsafe_code)]
        // SAFETY: the structure lives through the call, which only reads it.
        let result = unsafe { libc::setrlimit(*number as _, &limit) };
        nix::errno::Errno::result(result).at("setrlimit", format_args!("limit {number} to {soft}/{hard}"))?;
    }
    Ok(())
}

/// Landlock over the same mounts as the view: what is writable there is writable here, and nothing else.
///
/// Gives what is missing, in words, when the kernel's Landlock is older than ours or absent.
pub fn restrict_files(plan: &Plan) -> Result<Option<String>, Failure> {
    let said = |error: landlock::RulesetError| io::Error::other(error.to_string());
    let all = AccessFs::from_all(LANDLOCK);
    let read = AccessFs::from_read(LANDLOCK);
    let device = AccessFs::ReadFile | AccessFs::ReadDir | AccessFs::WriteFile | AccessFs::IoctlDev;
    let mut ruleset = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(all)
        .and_then(|ruleset| ruleset.scope(Scope::from_all(LANDLOCK)))
        .and_then(|ruleset| ruleset.create())
        .map_err(said)
        .at("landlock_create_ruleset", "the view")?;
    // Listing the private root, whose only content is what the plan put there.
    // /etc holds only files of the plan's own making and read-only mounts of the host's.
    let mut grants: Vec<(std::path::PathBuf, BitFlags<AccessFs>)> =
        vec![("/".into(), AccessFs::ReadDir.into()), ("/etc".into(), read)];
    for mount in &plan.mounts {
        let (target, access) = match mount {
            Mount::Bind { target, access: Access::ReadOnly, .. } | Mount::View { target, .. } => (target, read),
            Mount::Bind { target, access: Access::ReadWrite, .. } => (target, all),
            Mount::Overlay { target, .. } | Mount::Tmpfs { target, .. } => (target, all),
            Mount::Proc { target } => (target, AccessFs::ReadFile | AccessFs::ReadDir | AccessFs::WriteFile),
            Mount::Dev { target, .. } => {
                for part in ["shm", "mqueue"] {
                    grants.push((target.to_path().join(part), all));
                }
                (target, device)
            }
            Mount::File { target, .. } => (target, read),
            Mount::Dir { target, .. } => (target, AccessFs::ReadDir.into()),
            Mount::Symlink { .. } | Mount::Mask { .. } => continue,
        };
        grants.push((target.to_path(), access));
    }
    for (place, (path, access)) in grants.iter().enumerate() {
        // A rule holds for all that lies below (landlock(7)), so one that says no more is left out.
        let said_above = |(above, (other, more)): (usize, &(std::path::PathBuf, BitFlags<AccessFs>))| {
            above != place && lies_below(path, other) && (path != other || above < place) && more.contains(*access)
        };
        if grants.iter().enumerate().any(said_above) {
            continue;
        }
        let (path, access) = (path, *access);
        // An optional mount whose source is missing on the host has no target either.
        let Ok(opened) = PathFd::new(path) else { continue };
        let access = if path.is_dir() { access } else { access & AccessFs::from_file(LANDLOCK) };
        ruleset =
            ruleset.add_rule(PathBeneath::new(opened, access)).map_err(said).at("landlock_add_rule", path.display())?;
    }
    let status = ruleset.restrict_self().map_err(said).at("landlock_restrict_self", "the program")?;
    match (status.ruleset, plan.enforcement) {
        (RulesetStatus::FullyEnforced, _) => Ok(None),
        (RulesetStatus::PartiallyEnforced, _) => Ok(Some(
            "the kernel's Landlock is older than version 6: some of its rights or scopes are not enforced".to_owned(),
        )),
        (RulesetStatus::NotEnforced, Enforcement::BestEffort) => {
            Ok(Some("the kernel has no Landlock: the view is enforced by mounts alone".to_owned()))
        }
        (RulesetStatus::NotEnforced, Enforcement::Strict) => Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP))
            .at("landlock_restrict_self", "the program")
            .map_err(|failure: Failure| {
                failure.remedy(
                    "the kernel was built or started without Landlock (add `landlock` to the `lsm=` boot \
                         parameter), or run with `--best-effort`",
                )
            }),
    }
}

/// Whether a path is another one or lies below it. By the letters: two spellings of one place are told apart, which
/// costs one rule more.
fn lies_below(path: &std::path::Path, other: &std::path::Path) -> bool {
    let (path, other) = (path.as_os_str().as_bytes(), other.as_os_str().as_bytes());
    match path.strip_prefix(other) {
        Some(rest) => rest.is_empty() || rest.starts_with(b"/") || other == b"/",
        None => false,
    }
}

/// Installs the filters in their order; gives the listener of the one that has one.
pub fn filter_system_calls(filters: &[Filter]) -> Result<Option<OwnedFd>, Failure> {
    let mut listener = None;
    for filter in filters {
        let instructions: Vec<libc::sock_filter> = filter.instructions.iter().map(|raw| unpack(*raw)).collect();
        if !filter.listener {
            sys::seccomp_filter(&instructions, 0).at("seccomp", "a filter")?;
            continue;
        }
        let flags = libc::SECCOMP_FILTER_FLAG_NEW_LISTENER;
        let opened = match sys::seccomp_filter(&instructions, flags | sys::SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV) {
            // Linux before 5.19 does not know the flag.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => sys::seccomp_filter(&instructions, flags),
            other => other,
        };
        listener = opened.at("seccomp", "the listening filter")?;
    }
    Ok(listener)
}

/// A `struct sock_filter` out of its 64 bits: code, jump if true, jump if false, operand (linux/filter.h).
fn unpack(raw: u64) -> libc::sock_filter {
    let [code_low, code_high, jt, jf, k @ ..] = raw.to_le_bytes();
    libc::sock_filter { code: u16::from_le_bytes([code_low, code_high]), jt, jf, k: u32::from_le_bytes(k) }
}
