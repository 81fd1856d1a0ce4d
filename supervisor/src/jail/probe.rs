//! What this machine lets a jail do, found by doing it, and why not where it does not.
//!
//! Each probe changes the process that makes it, so [`ask`] has a fresh, single-threaded process make it: this same
//! program as `tollgate doctor --probe NAME`. [`explain`] is the one text for a step that fails; a run that fails
//! and `tollgate doctor` name the same cause with it.

use super::kernel;
use nix::{
    errno::Errno,
    fcntl::{openat2, OFlag, OpenHow, ResolveFlag},
    mount::{mount, umount2, MntFlags, MsFlags},
    sched::{unshare, CloneFlags},
    sys::socket::{recv, send, socket, AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType},
    unistd::{getegid, geteuid, Pid},
};
use serde::{Deserialize, Serialize};
use std::{
    ffi::CString,
    fs,
    io::{BufRead, BufReader, Read},
    os::{fd::AsRawFd, unix::ffi::OsStrExt},
    path::{Path, PathBuf},
    process::{Command, Stdio},
};
use tollgate_shim::{jail, protocol::Way};

macro_rules! probes {
    ($($(#[$doc:meta])* $variant:ident => $name:literal),+ $(,)?) => {
        /// Something to try.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Probe { $($(#[$doc])* $variant),+ }

        impl Probe {
            /// Its name on the command line and in `doctor`'s table.
            pub const fn name(self) -> &'static str {
                match self { $(Probe::$variant => $name),+ }
            }

            /// The probe of this name.
            pub fn named(name: &str) -> Option<Probe> {
                [$(Probe::$variant),+].into_iter().find(|probe| probe.name() == name)
            }
        }
    };
}

probes! {
    /// Making a user namespace and mapping our own ids into it.
    UserNamespace => "user namespace",
    /// Mount, process-id, network, IPC, host-name and cgroup namespaces.
    Namespaces => "namespaces",
    /// Setting up the loopback of a new network namespace.
    Loopback => "loopback",
    /// Taking the connections of a new network namespace.
    NetworkDoor => "network door",
    /// Mounting a fresh /proc.
    Proc => "proc",
    /// The part of `proc` that the new namespace's first process does.
    ProcInside => "proc-inside",
    /// Mounting an overlay on the state directory's file system.
    Overlay => "overlay",
    /// Landlock.
    Landlock => "landlock",
    /// A seccomp filter with a listener.
    Seccomp => "seccomp",
    /// Process handles.
    Pidfd => "pidfd",
    /// Opening beneath a directory.
    Openat2 => "openat2",
    /// Mapping a mount's ids, which only root's runs need.
    IdmappedMounts => "idmapped mounts",
    /// A user namespace that waits, for `idmapped mounts`.
    HoldNamespace => "hold-namespace",
}

/// What came of a probe.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "result")]
pub enum Answer {
    /// It works; a version or such.
    Works {
        /// What is worth knowing; may be empty.
        detail: String,
    },
    /// A kernel call failed.
    Fails {
        /// The call, and on what.
        call: String,
        /// Its error number.
        errno: i32,
    },
}

type Tried<T> = Result<T, Answer>;

fn tried<T>(call: &str, result: Result<T, Errno>) -> Tried<T> {
    result.map_err(|errno| Answer::Fails { call: call.to_owned(), errno: errno as i32 })
}

fn tried_io<T>(call: &str, result: std::io::Result<T>) -> Tried<T> {
    result.map_err(|error| Answer::Fails { call: call.to_owned(), errno: error.raw_os_error().unwrap_or(libc::EIO) })
}

/// Has a fresh process make the probe. `program` is run with `arguments` and the probe's name and `directory`.
pub fn ask(program: &Path, arguments: &[&str], probe: Probe, directory: &Path) -> Answer {
    let mut command = Command::new(program);
    command.args(arguments).arg(probe.name()).arg("--directory").arg(directory);
    let output = command.stdin(Stdio::null()).output();
    let output = match tried_io("starting the probe", output) {
        Ok(output) => output,
        Err(answer) => return answer,
    };
    serde_json::from_slice(&output.stdout).unwrap_or_else(|_| {
        use std::os::unix::process::ExitStatusExt;
        let call = match output.status.signal() {
            Some(signal) => format!("the probe was killed by signal {signal}"),
            None => format!("the probe gave no answer: {}", String::from_utf8_lossy(&output.stderr).trim()),
        };
        Answer::Fails { call, errno: libc::EIO }
    })
}

/// Makes the probe in this process, which must have one thread and must end afterwards.
pub fn perform(probe: Probe, directory: &Path) -> Answer {
    let works = |detail: &str| Answer::Works { detail: detail.to_owned() };
    let result = match probe {
        Probe::UserNamespace => enter_user_namespace(CloneFlags::empty()).map(|()| works("")),
        Probe::Namespaces => namespaces().map(|()| works("mount, pid, net, ipc, uts, cgroup")),
        Probe::Loopback => loopback().map(|()| works("")),
        Probe::NetworkDoor => network_door(),
        Probe::Proc => proc(directory),
        Probe::ProcInside => proc_inside().map(|()| works("fresh mount")),
        Probe::Overlay => overlay(directory).map(|()| works("with userxattr")),
        Probe::Landlock => tried_io("landlock_create_ruleset(2)", kernel::landlock_abi())
            .map(|version| works(&format!("ABI {version}"))),
        Probe::Seccomp => tried_io("seccomp(2), SECCOMP_FILTER_FLAG_NEW_LISTENER", kernel::seccomp_listener())
            .map(|_| works("filter and listener")),
        Probe::Pidfd => tried_io("pidfd_open(2)", kernel::pidfd_open(Pid::this())).map(|_| works("")),
        Probe::Openat2 => {
            let how = OpenHow::new().flags(OFlag::O_PATH | OFlag::O_CLOEXEC).resolve(ResolveFlag::RESOLVE_BENEATH);
            tried_io("open(2) of /", fs::File::open("/"))
                .and_then(|root| tried("openat2(2)", openat2(root, "proc", how)))
                .map(|_| works(""))
        }
        Probe::IdmappedMounts => idmapped(directory).map(|()| works("")),
        Probe::HoldNamespace => hold_namespace().map(|()| works("")),
    };
    result.unwrap_or_else(|answer| answer)
}

/// Makes a user namespace, and others with it, and maps our own ids to root's, which keeps its capabilities through
/// execve(2), as the second half of a probe needs.
fn enter_user_namespace(others: CloneFlags) -> Tried<()> {
    let (uid, gid) = (geteuid(), getegid());
    tried("unshare(2), CLONE_NEWUSER", unshare(CloneFlags::CLONE_NEWUSER))?;
    // user_namespaces(7): without the right to set groups, their map may be written.
    tried_io("write /proc/self/setgroups", fs::write("/proc/self/setgroups", "deny"))?;
    tried_io("write /proc/self/uid_map", fs::write("/proc/self/uid_map", format!("0 {uid} 1")))?;
    tried_io("write /proc/self/gid_map", fs::write("/proc/self/gid_map", format!("0 {gid} 1")))?;
    tried("unshare(2)", unshare(others))
}

fn namespaces() -> Tried<()> {
    enter_user_namespace(CloneFlags::empty())?;
    for (name, flag) in [
        ("unshare(2), CLONE_NEWNS", CloneFlags::CLONE_NEWNS),
        ("unshare(2), CLONE_NEWPID", CloneFlags::CLONE_NEWPID),
        ("unshare(2), CLONE_NEWNET", CloneFlags::CLONE_NEWNET),
        ("unshare(2), CLONE_NEWIPC", CloneFlags::CLONE_NEWIPC),
        ("unshare(2), CLONE_NEWUTS", CloneFlags::CLONE_NEWUTS),
        ("unshare(2), CLONE_NEWCGROUP", CloneFlags::CLONE_NEWCGROUP),
    ] {
        tried(name, unshare(flag))?;
    }
    make_mounts_private()
}

fn make_mounts_private() -> Tried<()> {
    let flags = MsFlags::MS_REC | MsFlags::MS_PRIVATE;
    tried("mount(2) of /, MS_PRIVATE", mount(None::<&str>, "/", None::<&str>, flags, None::<&str>))
}

/// Sets the loopback up with one rtnetlink(7) message, and reads the kernel's acknowledgement.
fn loopback() -> Tried<()> {
    enter_user_namespace(CloneFlags::CLONE_NEWNET)?;
    let netlink = tried(
        "socket(2), AF_NETLINK",
        socket(AddressFamily::Netlink, SockType::Raw, SockFlag::SOCK_CLOEXEC, SockProtocol::NetlinkRoute),
    )?;
    // struct nlmsghdr: length, type, flags, sequence, port; then struct ifinfomsg: family, padding, type, index (the
    // loopback is a new namespace's first device), flags, and the mask of flags to change.
    let mut message = Vec::with_capacity(32);
    message.extend(32_u32.to_ne_bytes());
    message.extend(libc::RTM_NEWLINK.to_ne_bytes());
    message.extend(((libc::NLM_F_REQUEST | libc::NLM_F_ACK) as u16).to_ne_bytes());
    message.extend([0; 8]);
    message.extend([0; 4]);
    message.extend(1_i32.to_ne_bytes());
    message.extend((libc::IFF_UP as u32).to_ne_bytes());
    message.extend((libc::IFF_UP as u32).to_ne_bytes());
    tried("send(2) of RTM_NEWLINK", send(netlink.as_raw_fd(), &message, MsgFlags::empty()))?;
    let mut answer = [0; 4096];
    let length = tried("recv(2) of RTM_NEWLINK", recv(netlink.as_raw_fd(), &mut answer, MsgFlags::empty()))?;
    // struct nlmsgerr follows the header: the error number, negative, or 0.
    let code = answer.get(16..20).filter(|_| length >= 20).and_then(|bytes| bytes.try_into().ok());
    match code.map(i32::from_ne_bytes) {
        Some(0) => Ok(()),
        Some(code) => Err(Answer::Fails { call: "RTM_NEWLINK, lo up".to_owned(), errno: code.saturating_neg() }),
        None => Err(Answer::Fails { call: "RTM_NEWLINK, lo up".to_owned(), errno: libc::EPROTO }),
    }
}

/// What [`Probe::NetworkDoor`] finds where connections cannot be redirected.
pub const NAMED_PORTS: &str = "listeners on named ports";

/// By the shim's own code, in a namespace that is like a jail's.
fn network_door() -> Tried<Answer> {
    enter_user_namespace(CloneFlags::CLONE_NEWNET)?;
    let (way, told) = jail::try_network().map_err(|(call, errno)| Answer::Fails { call, errno })?;
    let detail = match (way, told) {
        (Way::Redirect, true) => "nf_tables redirect",
        (Way::Redirect, false) => "nf_tables redirect; dropped datagrams have no receipt (no nfnetlink_log)",
        (Way::Ports, _) => NAMED_PORTS,
    };
    Ok(Answer::Works { detail: detail.to_owned() })
}

/// A fresh /proc may be mounted only by a process in the new namespace, so a child does it.
fn proc(directory: &Path) -> Tried<Answer> {
    let program = tried_io("readlink(2) of /proc/self/exe", std::env::current_exe())?;
    enter_user_namespace(CloneFlags::CLONE_NEWNS | CloneFlags::CLONE_NEWPID)?;
    make_mounts_private()?;
    let arguments: Vec<String> = std::env::args().skip(1).take_while(|word| word != Probe::Proc.name()).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    Ok(ask(&program, &arguments, Probe::ProcInside, directory))
}

fn proc_inside() -> Tried<()> {
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    tried("mount(2) of proc", mount(Some("proc"), "/proc", Some("proc"), flags, None::<&str>))?;
    tried_io("readlink(2) of /proc/self", fs::read_link("/proc/self")).map(|_| ())
}

fn overlay(directory: &Path) -> Tried<()> {
    let top = directory.join(format!(".tollgate-doctor-{}", std::process::id()));
    enter_user_namespace(CloneFlags::CLONE_NEWNS)?;
    make_mounts_private()?;
    let result = overlay_in(&top);
    // Best effort: what the mount left has our own name and no content.
    let _ = umount2(&top.join("merged"), MntFlags::MNT_DETACH);
    let _ = fs::remove_dir_all(&top);
    result
}

fn overlay_in(top: &Path) -> Tried<()> {
    for name in ["lower", "upper", "work", "merged"] {
        tried_io(&format!("mkdir(2) of {}", top.display()), fs::create_dir_all(top.join(name)))?;
    }
    tried_io("write", fs::write(top.join("lower/file"), "below"))?;
    let shown = top.display();
    let options = format!("lowerdir={shown}/lower,upperdir={shown}/upper,workdir={shown}/work,userxattr");
    let target = top.join("merged");
    let mounted = mount(Some("overlay"), &target, Some("overlay"), MsFlags::empty(), Some(options.as_str()));
    tried("mount(2) of overlay", mounted)?;
    tried_io("writing through the overlay", fs::write(target.join("file"), "above"))?;
    tried_io("deleting through the overlay", fs::remove_file(target.join("file")))
}

fn idmapped(directory: &Path) -> Tried<()> {
    let program = tried_io("readlink(2) of /proc/self/exe", std::env::current_exe())?;
    let words: Vec<String> = std::env::args().skip(1).take_while(|word| word != Probe::IdmappedMounts.name()).collect();
    let mut command = Command::new(program);
    command.args(words).arg(Probe::HoldNamespace.name()).arg("--directory").arg(directory);
    let mut child = tried_io("fork(2)", command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn())?;
    let mut line = String::new();
    if let Some(output) = child.stdout.take() {
        tried_io("read", BufReader::new(output).read_line(&mut line))?;
    }
    let result = if line.trim() == "ready" {
        let namespace = fs::File::open(format!("/proc/{}/ns/user", child.id()));
        let path = CString::new(directory.as_os_str().as_bytes()).unwrap_or_default();
        tried_io("open(2) of a user namespace", namespace).and_then(|namespace| {
            tried_io("mount_setattr(2), MOUNT_ATTR_IDMAP", kernel::idmapped_clone(&path, &namespace.into()))
        })
    } else {
        Err(serde_json::from_str(&line).unwrap_or(Answer::Fails { call: "unshare(2)".to_owned(), errno: libc::EIO }))
    };
    // Closing its input ends it.
    drop(child.stdin.take());
    tried_io("wait(2)", child.wait())?;
    result.map(|_| ())
}

fn hold_namespace() -> Tried<()> {
    enter_user_namespace(CloneFlags::empty())?;
    println!("ready");
    let mut rest = Vec::new();
    tried_io("read", std::io::stdin().read_to_end(&mut rest)).map(|_| ())
}

/// The settings of this machine that make a jail's steps fail.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Knobs {
    /// `/proc/sys/user/max_user_namespaces`.
    pub max_user_namespaces: Option<u64>,
    /// `/proc/sys/kernel/apparmor_restrict_unprivileged_userns`.
    pub apparmor_restricts: Option<u64>,
    /// `/proc/sys/kernel/unprivileged_userns_clone`, of Debian's kernels.
    pub userns_clone: Option<u64>,
    /// Whether a seccomp filter is upon this process, as in a container.
    pub filtered: Option<u64>,
    /// What is mounted over parts of /proc.
    pub proc_masks: Vec<PathBuf>,
}

impl Knobs {
    /// Reads them. What cannot be read is not there.
    pub fn read() -> Knobs {
        let number = |path: &str| fs::read_to_string(path).ok()?.trim().parse().ok();
        let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        Knobs {
            max_user_namespaces: number("/proc/sys/user/max_user_namespaces"),
            apparmor_restricts: number("/proc/sys/kernel/apparmor_restrict_unprivileged_userns"),
            userns_clone: number("/proc/sys/kernel/unprivileged_userns_clone"),
            filtered: status.lines().find_map(|line| line.strip_prefix("Seccomp:")?.trim().parse().ok()),
            proc_masks: mounts
                .lines()
                .filter_map(|line| line.split(' ').nth(4))
                .filter(|point| point.starts_with("/proc/") && *point != "/proc/sys/fs/binfmt_misc")
                .map(PathBuf::from)
                .collect(),
        }
    }
}

/// Why a step of the jail failed here with this error, and the command that fixes it. One paragraph.
pub fn explain(step: &str, errno: i32) -> String {
    explain_with(step, errno, &Knobs::read())
}

/// As [`explain`], with the machine's settings given.
pub fn explain_with(step: &str, errno: i32, knobs: &Knobs) -> String {
    let step = step.to_lowercase();
    let has = |words: &[&str]| words.iter().any(|word| step.contains(word));
    let refused = matches!(errno, libc::EPERM | libc::EACCES);
    if has(&["landlock"]) {
        return "Landlock is not there: it needs Linux 5.13 with CONFIG_SECURITY_LANDLOCK and `landlock` among the \
                kernel's `lsm=` parameters. Add it to the kernel's command line (`cat /sys/kernel/security/lsm` shows \
                the present list) and restart, or accept its absence with `enforce = \"best-effort\"`"
            .to_owned();
    }
    if has(&["seccomp"]) {
        return match errno {
            libc::EBUSY => "this process is already watched by a seccomp listener, as inside another jail, and the \
                            kernel allows only one; run outside it"
                .to_owned(),
            _ => "the kernel lacks seccomp with a listener (Linux 5.0 with CONFIG_SECCOMP_FILTER), or a container's \
                  own seccomp profile forbids it; start the container with `--security-opt seccomp=unconfined` or a \
                  profile that allows `seccomp`"
                .to_owned(),
        };
    }
    if has(&["network door"]) && !refused {
        return "a run with a network needs to redirect its connections: use a kernel with CONFIG_NF_TABLES, \
                CONFIG_NF_TABLES_INET, CONFIG_NFT_NAT and CONFIG_NFT_REDIR; where they are modules that are not loaded \
                by themselves, `sudo modprobe -a nf_tables nft_chain_nat nft_redir`"
            .to_owned();
    }
    if has(&["proc"]) && !has(&["process"]) && refused && !knobs.proc_masks.is_empty() {
        let masks: Vec<_> = knobs.proc_masks.iter().map(|path| path.display().to_string()).collect();
        return format!(
            "a fresh /proc may not be mounted because parts of the present one are masked ({}), as container engines \
             do; unmask only those: `docker run --security-opt systempaths=unconfined`, `podman run --security-opt \
             unmask=ALL`, or `procMount: Unmasked` in a Kubernetes security context. A privileged container is not \
             needed",
            masks.join(", ")
        );
    }
    let mut causes = Vec::new();
    if knobs.max_user_namespaces == Some(0) || errno == libc::ENOSPC {
        let now = knobs.max_user_namespaces.map_or("unknown".to_owned(), |value| value.to_string());
        causes.push(format!(
            "the limit on user namespaces is reached (user.max_user_namespaces is {now}): `sudo sysctl -w \
             user.max_user_namespaces=15000`"
        ));
        if has(&["user namespace"]) {
            causes.push(
                "where the limit is high enough, AppArmor (`sudo sysctl -w \
                 kernel.apparmor_restrict_unprivileged_userns=0`) or a container's seccomp filter (`--security-opt \
                 seccomp=unconfined`)"
                    .to_owned(),
            );
        }
    }
    if errno == libc::EUSERS {
        causes.push("user namespaces are nested too deeply, at most 32: start from outside another jail".to_owned());
    }
    if refused {
        if knobs.apparmor_restricts.is_some_and(|value| value > 0) {
            causes.push(
                "AppArmor restricts what user namespaces may do (kernel.apparmor_restrict_unprivileged_userns is 1): \
                 install the profile that Tollgate brings (`sudo apparmor_parser -r /etc/apparmor.d/tollgate`), or \
                 `sudo sysctl -w kernel.apparmor_restrict_unprivileged_userns=0` for every program"
                    .to_owned(),
            );
        }
        if knobs.userns_clone == Some(0) {
            causes.push(
                "unprivileged user namespaces are switched off: `sudo sysctl -w kernel.unprivileged_userns_clone=1`"
                    .to_owned(),
            );
        }
        if knobs.filtered == Some(2) {
            causes.push(
                "a seccomp filter is upon this process, as in a container: start the container with `--security-opt \
                 seccomp=unconfined` or a profile that allows `unshare`, `clone` and `mount`"
                    .to_owned(),
            );
        }
    }
    if matches!(errno, libc::ENOSYS | libc::EINVAL | libc::ENODEV) {
        causes.push(if has(&["overlay", "workspace"]) {
            "the kernel or this file system cannot do it: an overlay in a user namespace needs Linux 5.11 and a file \
             system with user extended attributes (ext4, xfs, btrfs); put the state there with `TOLLGATE_STATE=DIR`"
                .to_owned()
        } else {
            "the kernel was built without it; use one with CONFIG_USER_NS, CONFIG_PID_NS, CONFIG_NET_NS and \
             CONFIG_OVERLAY_FS, which distributions' kernels have"
                .to_owned()
        });
    }
    if causes.is_empty() {
        return "the usual causes were looked for and not found: the limit on user namespaces \
                (user.max_user_namespaces), AppArmor (kernel.apparmor_restrict_unprivileged_userns), \
                kernel.unprivileged_userns_clone, a container's seccomp filter, or a chroot; `sudo dmesg | tail` may \
                name another security module"
            .to_owned();
    }
    causes.join("; or ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_knob_is_named_with_the_command_that_fixes_it() {
        let none = Knobs { max_user_namespaces: Some(9), ..Knobs::default() };
        let rows: [(&str, i32, Knobs, &[&str]); 8] = [
            (
                "user namespace",
                libc::ENOSPC,
                Knobs { max_user_namespaces: Some(0), ..none.clone() },
                &["sysctl -w user.max_user_namespaces"],
            ),
            (
                "user namespace",
                libc::EPERM,
                Knobs { userns_clone: Some(0), ..none.clone() },
                &["kernel.unprivileged_userns_clone=1"],
            ),
            ("loopback", libc::EPERM, Knobs { apparmor_restricts: Some(1), ..none.clone() }, &["AppArmor"]),
            ("user namespace", libc::EPERM, Knobs { filtered: Some(2), ..none.clone() }, &["seccomp=unconfined"]),
            (
                "proc",
                libc::EPERM,
                Knobs { proc_masks: vec!["/proc/kcore".into()], ..none.clone() },
                &["/proc/kcore", "systempaths=unconfined", "procMount: Unmasked"],
            ),
            ("overlay", libc::EINVAL, none.clone(), &["TOLLGATE_STATE"]),
            ("landlock", libc::EOPNOTSUPP, none.clone(), &["lsm="]),
            ("user namespace", libc::EPERM, none, &["dmesg", "max_user_namespaces", "AppArmor"]),
        ];
        for (step, errno, knobs, wanted) in rows {
            let text = explain_with(step, errno, &knobs);
            for word in wanted {
                assert!(text.contains(word), "{step} {errno}: {text}");
            }
        }
    }

    #[test]
    fn every_probe_is_found_by_its_name() {
        assert_eq!(Probe::named("proc-inside"), Some(Probe::ProcInside));
        assert_eq!(Probe::named("no such"), None);
    }

    #[test]
    fn probes_that_change_nothing_answer_in_this_process() {
        for probe in [Probe::Pidfd, Probe::Openat2] {
            assert!(matches!(perform(probe, Path::new("/")), Answer::Works { .. }), "{}", probe.name());
        }
    }

    #[test]
    fn a_program_that_gives_no_answer_is_a_failure() {
        let answer = ask(Path::new("/bin/false"), &[], Probe::Pidfd, Path::new("/"));
        assert!(matches!(answer, Answer::Fails { errno: libc::EIO, .. }), "{answer:?}");
    }
}
