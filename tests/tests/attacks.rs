//! Attacks on the jail, each over every launcher and as every user, judged from outside.

use nix::sys::signal::Signal;
use serde_json::{json, Value};
use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::Path,
    process::Command,
    time::{Duration, Instant},
};
use tollgate_tests::{
    attempts, every_identity, every_way,
    observe::{self, wait_until},
    world::SENTINEL,
    Finished, Identity, Listener, World,
};

/// Seccomp's answer, or the kernel's own where a capability or a namespace already says no.
const FORBIDDEN: &[&str] = &["EPERM", "ENOSYS"];
/// A process that the jail's own process namespace does not have.
const NO_PROCESS: &[&str] = &["ESRCH", "EPERM", "ENOSYS"];
/// A path that is not in the view, or that the view's owner may not open. Landlock says EACCES.
const NOT_THERE: &[&str] = &["ENOENT", "EACCES", "EPERM", "ENOTDIR"];
/// A path of the view that cannot be changed.
const READ_ONLY: &[&str] = &["EROFS", "EACCES", "EPERM", "ENOENT"];
/// A socket that leads nowhere.
const NO_SOCKET: &[&str] = &["ENOENT", "ECONNREFUSED", "EACCES", "EPERM", "EPROTOTYPE"];
/// A network that is not there.
const NO_NETWORK: &[&str] = &["ENETUNREACH", "ECONNREFUSED", "EHOSTUNREACH", "EACCES", "EPERM", "EADDRNOTAVAIL"];
/// A socket family that the list does not have, or that this kernel lacks.
const NO_FAMILY: &[&str] =
    &["EPERM", "EACCES", "EAFNOSUPPORT", "EPROTONOSUPPORT", "ESOCKTNOSUPPORT", "EPROTOTYPE", "ENOSYS"];
/// An IPC object that the jail's own namespace does not have.
const NO_OBJECT: &[&str] = &["ENOENT", "EPERM", "ENOSYS", "EACCES"];

const ESCAPES: &[(&str, &[&str])] = &[
    // Other processes.
    ("ptrace-host", NO_PROCESS),
    ("ptrace-init", &["EPERM", "EACCES", "ENOSYS"]),
    ("vm-read-host", NO_PROCESS),
    ("vm-read-init", &["EPERM", "EACCES", "ENOSYS"]),
    ("mem-of-host", NOT_THERE),
    ("mem-of-init", &["EACCES", "EPERM", "EROFS"]),
    ("environ-of-init", &["EACCES", "EPERM"]),
    ("descriptors-of-init", &["EACCES", "EPERM"]),
    ("memory-map-of-init", &["EACCES", "EPERM"]),
    ("outside-through-proc-root", &["EPERM"]),
    ("outside-through-proc-cwd", &["EPERM"]),
    ("pidfd-getfd-of-init", &["EPERM", "EACCES", "ENOSYS"]),
    ("signal-host", &["ESRCH", "EPERM"]),
    ("kcmp-with-init", &["EPERM", "EACCES", "ENOSYS"]),
    ("prlimit-of-init", &["EPERM", "EACCES", "ENOSYS"]),
    ("pidfd-of-host", &["ESRCH", "EPERM", "EINVAL", "ENOSYS"]),
    ("migrate-pages-of-init", FORBIDDEN),
    // The kernel's settings.
    ("write-core-pattern", READ_ONLY),
    ("write-modprobe-path", READ_ONLY),
    ("write-hostname-setting", READ_ONLY),
    ("write-last-pid", READ_ONLY),
    ("write-ip-forward", READ_ONLY),
    ("write-port-range", READ_ONLY),
    ("write-user-namespaces-setting", READ_ONLY),
    ("write-shmmax", READ_ONLY),
    ("write-drop-caches", READ_ONLY),
    ("write-sysrq", READ_ONLY),
    ("write-binfmt", READ_ONLY),
    ("write-setgroups-file", READ_ONLY),
    ("write-uevent-helper", READ_ONLY),
    ("write-oom-of-init", READ_ONLY),
    ("widen-uid-map", READ_ONLY),
    ("evade-oom-killer", &["EACCES", "EPERM", "EROFS"]),
    ("read-kcore", NOT_THERE),
    ("read-kmsg", NOT_THERE),
    ("read-dev-mem", NOT_THERE),
    ("read-dev-kmsg", NOT_THERE),
    ("read-dev-disk", NOT_THERE),
    ("read-dev-fuse", NOT_THERE),
    ("read-dev-kvm", NOT_THERE),
    ("read-dev-tun", NOT_THERE),
    ("read-dev-vsock", NOT_THERE),
    ("read-dev-userfaultfd", NOT_THERE),
    ("read-dev-loop", NOT_THERE),
    ("read-dev-console", NOT_THERE),
    ("read-dev-tty1", NOT_THERE),
    ("read-dev-uinput", NOT_THERE),
    ("read-shadow", NOT_THERE),
    ("read-gshadow", NOT_THERE),
    ("read-sudoers", NOT_THERE),
    ("read-machine-id", NOT_THERE),
    ("read-outside-file", NOT_THERE),
    ("read-caller-home", NOT_THERE),
    ("read-root-home", NOT_THERE),
    ("read-ledger", NOT_THERE),
    ("read-boot", NOT_THERE),
    ("read-tracing", NOT_THERE),
    ("read-debugfs", NOT_THERE),
    ("read-cgroup-root", NOT_THERE),
    ("read-cgroup-pids", NOT_THERE),
    // Mounts and namespaces.
    ("mount-tmpfs", FORBIDDEN),
    ("mount-proc", FORBIDDEN),
    ("mount-sysfs", FORBIDDEN),
    ("mount-overlay", FORBIDDEN),
    ("mount-bind", FORBIDDEN),
    ("remount-root-writable", FORBIDDEN),
    ("remount-usr-writable", FORBIDDEN),
    ("unmount-proc", FORBIDDEN),
    ("unmount-tmp", FORBIDDEN),
    ("unmount-workspace", FORBIDDEN),
    ("open-tree-clone", FORBIDDEN),
    ("move-mount", FORBIDDEN),
    ("fsopen", FORBIDDEN),
    ("fspick", FORBIDDEN),
    ("mount-setattr", FORBIDDEN),
    ("pivot-root", FORBIDDEN),
    ("chroot", FORBIDDEN),
    ("open-by-handle", FORBIDDEN),
    ("open-by-own-handle", &["EPERM", "ENOSYS", "EOPNOTSUPP"]),
    ("unshare-user", FORBIDDEN),
    ("unshare-mnt", FORBIDDEN),
    ("unshare-pid", FORBIDDEN),
    ("unshare-net", FORBIDDEN),
    ("unshare-ipc", FORBIDDEN),
    ("unshare-uts", FORBIDDEN),
    ("unshare-cgroup", FORBIDDEN),
    ("unshare-time", FORBIDDEN),
    ("clone-user", FORBIDDEN),
    ("clone-mnt", FORBIDDEN),
    ("clone-pid", FORBIDDEN),
    ("clone-net", FORBIDDEN),
    ("clone-ipc", FORBIDDEN),
    ("clone-uts", FORBIDDEN),
    ("clone-cgroup", FORBIDDEN),
    // Its flags lie in memory, where no filter can look: the whole call is answered ENOSYS and glibc falls back.
    ("clone3-user", &["ENOSYS"]),
    ("clone3-mnt", &["ENOSYS"]),
    ("clone3-pid", &["ENOSYS"]),
    ("clone3-net", &["ENOSYS"]),
    ("clone3-ipc", &["ENOSYS"]),
    ("clone3-uts", &["ENOSYS"]),
    ("clone3-cgroup", &["ENOSYS"]),
    ("clone3-time", &["ENOSYS"]),
    ("setns-init-user", &["EPERM", "EACCES", "ENOSYS"]),
    ("setns-init-mnt", &["EPERM", "EACCES", "ENOSYS"]),
    ("setns-init-pid", &["EPERM", "EACCES", "ENOSYS"]),
    ("setns-init-net", &["EPERM", "EACCES", "ENOSYS"]),
    ("setns-init-ipc", &["EPERM", "EACCES", "ENOSYS"]),
    ("setns-init-uts", &["EPERM", "EACCES", "ENOSYS"]),
    ("setns-init-cgroup", &["EPERM", "EACCES", "ENOSYS"]),
    ("setns-init-time", &["EPERM", "EACCES", "ENOSYS"]),
    ("setns-own-user", FORBIDDEN),
    ("setns-pidfd", FORBIDDEN),
    // Credentials. An id without a mapping is EINVAL.
    ("setuid-0", &["EINVAL", "EPERM"]),
    ("setgid-0", &["EINVAL", "EPERM"]),
    ("setresuid-0", &["EINVAL", "EPERM"]),
    ("setfsuid-0", &["EPERM"]),
    ("setgroups", &["EPERM", "EINVAL"]),
    ("capset-all", FORBIDDEN),
    ("ambient-capability", FORBIDDEN),
    ("clear-no-new-privs", &["EINVAL", "EPERM"]),
    ("keep-capabilities-locked", FORBIDDEN),
    ("give-file-away", &["EPERM", "EINVAL"]),
    // What no program here needs.
    ("add-key", FORBIDDEN),
    ("request-key", FORBIDDEN),
    ("keyctl", FORBIDDEN),
    ("bpf", FORBIDDEN),
    ("perf-event-open", FORBIDDEN),
    ("userfaultfd", FORBIDDEN),
    ("io-uring-setup", FORBIDDEN),
    ("io-uring-enter", FORBIDDEN),
    ("io-uring-register", FORBIDDEN),
    ("kexec-load", FORBIDDEN),
    ("kexec-file-load", FORBIDDEN),
    ("init-module", FORBIDDEN),
    ("finit-module", FORBIDDEN),
    ("delete-module", FORBIDDEN),
    ("reboot", FORBIDDEN),
    ("swapon", FORBIDDEN),
    ("acct", FORBIDDEN),
    ("quotactl", FORBIDDEN),
    ("syslog", FORBIDDEN),
    ("iopl", FORBIDDEN),
    ("ioperm", FORBIDDEN),
    ("set-hostname", FORBIDDEN),
    ("set-domainname", FORBIDDEN),
    ("clock-settime", FORBIDDEN),
    ("settimeofday", FORBIDDEN),
    ("clock-adjtime", FORBIDDEN),
    ("fanotify-init", FORBIDDEN),
    ("lookup-dcookie", FORBIDDEN),
    ("modify-ldt", FORBIDDEN),
    ("vhangup", FORBIDDEN),
    ("real-time-scheduling", FORBIDDEN),
    ("raise-priority", &["EACCES", "EPERM"]),
    ("raise-hard-limit", FORBIDDEN),
    ("second-listener", &["EPERM", "EBUSY", "EINVAL", "ENOSYS", "EACCES"]),
    ("seccomp-off", &["EINVAL", "EPERM", "EFAULT"]),
    // Devices.
    ("mknod-char-in-workspace", FORBIDDEN),
    ("mknod-block-in-workspace", FORBIDDEN),
    ("mknod-char-in-tmp", FORBIDDEN),
    ("mknod-block-in-tmp", FORBIDDEN),
    ("mknod-char-in-shm", FORBIDDEN),
    ("mknod-block-in-shm", FORBIDDEN),
    ("mknod-char-in-home", FORBIDDEN),
    ("mknod-block-in-home", FORBIDDEN),
    ("mknod-in-dev", &["EPERM", "EROFS", "EACCES", "ENOSYS"]),
    ("file-in-dev", READ_ONLY),
    // Sockets.
    ("socket-raw-ip", NO_FAMILY),
    ("socket-raw-ip6", NO_FAMILY),
    ("socket-ping", NO_FAMILY),
    ("socket-packet", NO_FAMILY),
    ("socket-packet-dgram", NO_FAMILY),
    ("socket-vsock", NO_FAMILY),
    ("socket-alg", NO_FAMILY),
    ("socket-netlink-netfilter", NO_FAMILY),
    ("socket-netlink-audit", NO_FAMILY),
    ("socket-netlink-uevent", NO_FAMILY),
    ("socket-netlink-generic", NO_FAMILY),
    ("socket-netlink-diag", NO_FAMILY),
    ("socket-netlink-xfrm", NO_FAMILY),
    ("socket-netlink-crypto", NO_FAMILY),
    ("socket-bluetooth", NO_FAMILY),
    ("socket-key", NO_FAMILY),
    ("socket-xdp", NO_FAMILY),
    ("socket-tipc", NO_FAMILY),
    ("socket-can", NO_FAMILY),
    ("socket-rds", NO_FAMILY),
    ("socket-ax25", NO_FAMILY),
    ("socket-appletalk", NO_FAMILY),
    ("socket-x25", NO_FAMILY),
    ("socket-llc", NO_FAMILY),
    ("socket-qrtr", NO_FAMILY),
    ("socket-smc", NO_FAMILY),
    ("socket-sctp", NO_FAMILY),
    ("connect-abstract", NO_SOCKET),
    ("connect-path-0", NO_SOCKET),
    ("connect-dgram-path-0", NO_SOCKET),
    ("connect-path-1", NO_SOCKET),
    ("connect-dgram-path-1", NO_SOCKET),
    ("connect-path-2", NO_SOCKET),
    ("connect-dgram-path-2", NO_SOCKET),
    ("connect-through-link", NO_SOCKET),
    ("connect-tcp-loopback", NO_NETWORK),
    ("connect-tcp-mapped", NO_NETWORK),
    ("connect-tcp-any", NO_NETWORK),
    ("connect-tcp-outside", NO_NETWORK),
    ("connect-tcp-metadata", NO_NETWORK),
    ("connect-tcp6-outside", NO_NETWORK),
    ("send-udp-loopback", &["EPERM", "ECONNREFUSED", "EACCES", "ENETUNREACH"]),
    ("send-udp-outside", NO_NETWORK),
    // A resolver's failure: its number is not the kernel's (EAI_AGAIN, EAI_NONAME).
    ("resolve-outside", &["-3", "-2", "-5"]),
    ("link-down", FORBIDDEN),
    ("netlink-add-address", FORBIDDEN),
    // Other processes' objects.
    ("sysv-shm-of-host", NO_OBJECT),
    ("sysv-sem-of-host", NO_OBJECT),
    ("sysv-msg-of-host", NO_OBJECT),
    ("sysv-list-shm", NO_OBJECT),
    ("sysv-list-sem", NO_OBJECT),
    ("sysv-list-msg", NO_OBJECT),
    ("posix-shm-of-host", NO_OBJECT),
    ("posix-queue-of-host", NO_OBJECT),
    ("host-tmp-file", NOT_THERE),
    // Files.
    ("plant-in-etc", READ_ONLY),
    ("plant-in-usr", READ_ONLY),
    ("plant-in-usr-bin", READ_ONLY),
    ("plant-in-root", READ_ONLY),
    ("plant-in-proc", READ_ONLY),
    ("plant-in-run", READ_ONLY),
    ("plant-in-run-ours", READ_ONLY),
    ("plant-in-client", &["EROFS", "EACCES", "EPERM", "ENOENT", "ETXTBSY"]),
    ("plant-in-out", READ_ONLY),
    ("plant-in-caller-home", READ_ONLY),
    ("plant-in-passwd", READ_ONLY),
    ("plant-in-resolver", READ_ONLY),
    ("plant-in-etc-hosts", READ_ONLY),
    ("rename-workspace", &["EBUSY", "EROFS", "EACCES", "EPERM", "EXDEV"]),
    ("chmod-usr", READ_ONLY),
    ("chmod-root", READ_ONLY),
    ("unlink-socket-of-ours", &["EROFS", "EACCES", "EPERM", "ENOENT", "EBUSY"]),
    ("link-outside-file", &["EXDEV", "EPERM", "EACCES", "EROFS"]),
    ("dot-dot-sentinel", NOT_THERE),
    ("link-to-outside", NOT_THERE),
    ("proc-fd-magic", NOT_THERE),
    ("set-immutable", &["EPERM", "EOPNOTSUPP", "ENOTTY", "EACCES", "ENOSYS"]),
    ("trusted-attribute", &["EPERM", "EOPNOTSUPP", "ENOSYS"]),
    ("overlay-attribute", &["EPERM", "EOPNOTSUPP", "ENOSYS"]),
    ("security-capability", &["EPERM", "EOPNOTSUPP", "ENOSYS"]),
];

/// A host program with everything to steal: a process, IPC objects, files.
struct Prey {
    process: std::process::Child,
    key: i32,
    name: String,
    tmp_file: std::path::PathBuf,
}

impl Prey {
    fn new(world: &World) -> Prey {
        let unique = world.base().file_name().expect("a named folder").to_string_lossy().into_owned();
        let mut process = world.command("sleep").arg("120").into_command();
        let process = process.env("PREY", SENTINEL).spawn().expect("coreutils has `sleep`");
        let key = 0x7467_0000 | (process.id() as i32 & 0xffff);
        let made = Command::new("python3")
            .env_clear()
            .args(["-c", IPC_OBJECTS, &key.to_string()])
            .status()
            .expect("the suite needs python3");
        assert!(made.success(), "the host's IPC objects could not be made");
        fs::write(format!("/dev/shm/{unique}"), SENTINEL).expect("anyone may write there");
        fs::set_permissions(format!("/dev/shm/{unique}"), fs::Permissions::from_mode(0o666)).expect("our own file");
        let tmp_file = std::env::temp_dir().join(format!("{unique}.tmp"));
        fs::write(&tmp_file, SENTINEL).expect("anyone may write there");
        fs::set_permissions(&tmp_file, fs::Permissions::from_mode(0o666)).expect("our own file");
        Prey { process, key, name: unique, tmp_file }
    }
}

/// Makes (or, with a second argument, removes) one object of each System V kind, open to everybody.
const IPC_OBJECTS: &str = r#"
import ctypes, sys
c = ctypes.CDLL(None); key = int(sys.argv[1])
shm, sem, msg = c.shmget(key, 4096, 0o1666), c.semget(key, 1, 0o1666), c.msgget(key, 0o1666)
if len(sys.argv) > 2:
    c.shmctl(shm, 0, None); c.semctl(sem, 0, 0); c.msgctl(msg, 0, None)
sys.exit(0 if min(shm, sem, msg) >= 0 else 1)
"#;

impl Drop for Prey {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        let _ = Command::new("python3").args(["-c", IPC_OBJECTS, &self.key.to_string(), "remove"]).status();
        let _ = fs::remove_file(format!("/dev/shm/{}", self.name));
        let _ = fs::remove_file(&self.tmp_file);
    }
}

#[test]
fn no_kernel_interface_leads_out_of_the_jail() {
    every_way(|world| {
        let mut prey = Prey::new(world);
        world.python("probe.py");
        let probe = world.python("escape.py");
        let sockets = [world.base().join("host.sock"), world.runtime.join("bus"), world.workspace.join("service.sock")];
        let listeners: Vec<Listener> = sockets.iter().map(|path| Listener::at_path(path)).collect();
        let abstract_name = format!("tg-probe-{}", prey.name);
        let named = Listener::at_name(&abstract_name);
        let (tcp, tcp_port) = Listener::at_port();
        let (udp, udp_port) = Listener::at_udp_port();
        let given = json!({
            "out": world.out, "host_pid": prey.process.id(), "sentinel": SENTINEL, "home": world.home,
            "state": world.state, "foreign_uid": 12_345, "abstract": abstract_name, "sockets": sockets,
            "tcp_port": tcp_port, "udp_port": udp_port, "host_addresses": [], "sysv_key": prey.key,
            "shm_name": prey.name, "queue_name": prey.name, "tmp_file": prey.tmp_file,
        });
        let outside = observe::Snapshot::of(Path::new("/usr/local/bin"));
        let output = world.run(["--", "/usr/bin/python3", &probe, &given.to_string()]).finish();
        let found = attempts(&output);

        // Two attempts may succeed without harm: what they plant is judged by what comes of it.
        let harmless = ["plant-in-var-tmp", "user-overlay-redirect", "user-overlay-opaque"];
        found.but(&harmless).all_refused(ESCAPES);
        assert_eq!(output.status, 0, "{output}");
        for (listener, path) in listeners.iter().zip(&sockets) {
            assert_eq!(listener.accepted(), 0, "somebody connected to {}", path.display());
        }
        assert_eq!(named.accepted(), 0, "somebody connected to @{abstract_name}");
        assert_eq!(tcp.accepted(), 0, "somebody connected to the host's loopback");
        assert_eq!(udp.accepted(), 0, "a datagram reached the host's loopback");
        assert!(prey.process.try_wait().expect("our child").is_none(), "the host's process was killed");
        world.assert_outside_intact();
        outside.assert_same(&observe::Snapshot::of(Path::new("/usr/local/bin")));
        assert!(!Path::new("/var/tmp/planted").exists(), "a file landed in the host's /var/tmp");
    });
}

#[test]
fn an_overlay_attribute_set_inside_does_not_open_the_outside() {
    // With `userxattr` an upper layer's own attributes steer overlayfs: a redirect would show another folder.
    every_way(|world| {
        world.write("d/kept", "kept");
        let script = format!(
            "mkdir fresh; for n in overlay.redirect overlay.opaque overlay.metacopy; do for p in d fresh; do \
             python3 -c 'import os,sys; os.setxattr(sys.argv[1], \"user.\"+sys.argv[2], sys.argv[3].encode())' $p $n {out} \
             2>/dev/null; done; done; cat d/s fresh/s; ls d fresh; true",
            out = world.out.display()
        );
        let output = world.run_script(&script).finish();
        assert!(!output.out().contains(SENTINEL), "{output}");
        assert_eq!(world.read("d/kept"), "kept");
        world.assert_outside_intact();
    });
}

#[test]
fn programs_that_need_no_escape_still_work() {
    every_way(|world| {
        world.python("probe.py");
        let probe = world.python("inside.py");
        let output = world.run(["--", "/usr/bin/python3", &probe]).finish();
        attempts(&output).all_succeeded();
        // A socket is not a thing that can be shipped.
        assert!(!world.workspace.join("l.sock").exists());
    });
}

#[test]
fn the_jailed_program_is_nobody_and_sees_only_its_own() {
    every_way(|world| {
        world.python("probe.py");
        let probe = world.python("facts.py");
        let output = world.run(["--", "/usr/bin/python3", &probe]).env("LEAK", SENTINEL).finish().expect_status(0);
        let facts = attempts(&output);
        let fact = |name: &str| facts.one(name)["value"].clone();

        let status = fact("status");
        for set in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
            assert_eq!(status[set], "0000000000000000", "{set} is not empty: {status}");
        }
        assert_eq!(status["NoNewPrivs"], "1");
        assert_eq!(status["Seccomp"], "2");
        let ids = fact("ids");
        assert_ne!(ids["uid"][0], 0, "the program thinks that it is root: {ids}");

        let descriptors = fact("descriptors");
        let numbers: Vec<&String> = descriptors.as_object().expect("an object").keys().collect();
        assert_eq!(numbers, ["0", "1", "2"], "the program holds other descriptors: {descriptors}");

        let processes = fact("processes");
        assert!(
            processes.as_array().expect("a list").len() <= 3,
            "it sees processes that are not its own: {processes}"
        );
        assert!(!fact("environment").to_string().contains(SENTINEL), "an unlisted variable passed");
        assert_eq!(fact("network"), json!(["lo"]));
        // /proc/self/limits: soft and hard.
        assert_eq!(fact("core"), json!(["0", "0"]), "a core dump could reach a host's handler");

        const DEVICES: &[&str] = &[
            "core", "fd", "full", "null", "ptmx", "pts", "random", "shm", "stderr", "stdin", "stdout", "tty",
            "urandom", "zero", "mqueue", "console",
        ];
        for device in fact("devices").as_array().expect("a list") {
            assert!(DEVICES.contains(&device.as_str().expect("a name")), "/dev/{device} is in the jail");
        }
        check_mounts(world, &fact("mounts"));

        let home = fact("environment")["HOME"].as_str().expect("HOME is set").to_owned();
        let allowed = [world.workspace.to_str().expect("UTF-8"), "/tmp", "/dev/shm", "/dev/mqueue", "/var/tmp", &home];
        let base = world.base().to_string_lossy().into_owned();
        for place in fact("writable").as_array().expect("a list") {
            let place = place.as_str().expect("a path");
            let fine = allowed.iter().any(|root| place == *root || place.starts_with(&format!("{root}/")));
            assert!(fine || place == base, "{place} is writable");
        }
        assert!(fact("folders-seen").as_u64().expect("a number") > 20);
    });
}

/// systemd makes all of the host's mounts shared. A copy in the jail that stayed a peer would pass on to the host what is
/// mounted below it.
#[test]
fn on_a_host_whose_mounts_are_shared_no_mount_of_the_jail_is_their_peer() {
    every_way(|world| {
        // Another user has the mounts copied into a namespace of their own, and then made private there.
        let make = match world.way.identity {
            Identity::Root => "unshare -m --propagation unchanged",
            Identity::Ordinary => "unshare -Urm --propagation unchanged",
        };
        let script = format!(
            "{make} sh -c 'mount --make-rshared / && grep -q shared: /proc/self/mountinfo && echo shared; exec \"$@\"' sh \
             $TG -q -- sh -c 'grep shared: /proc/self/mountinfo; echo \"status $?\"'"
        );
        let output = world.shell(&script).finish().expect_status(0);
        assert_eq!(output.out(), "shared\nstatus 1\n", "{output}");
    });
}

/// Every mount of the jail: where it may be, and that it cannot be used to gain anything.
fn check_mounts(world: &World, mounts: &Value) {
    let workspace = world.workspace.to_str().expect("UTF-8");
    for mount in mounts.as_array().expect("a list") {
        let target = mount["target"].as_str().expect("a path");
        let has = |option: &str| mount["options"].as_array().expect("a list").iter().any(|found| found == option);
        if mount["type"] == "mqueue" || mount["type"] == "autofs" {
            // The one holds message queues, which can be neither executed nor devices; the other nothing at all, and lies
            // under what is mounted on it, where bubblewrap shows the host's /proc/sys.
            continue;
        }
        assert!(has("nosuid"), "{target} honours set-user-id bits: {mount}");
        assert!(has("nodev") || target.starts_with("/dev/"), "{target} honours device files: {mount}");
        let peers = mount["optional"].as_array().expect("a list");
        assert!(
            peers.iter().all(|field| !field.as_str().expect("text").starts_with("shared:")),
            "{target} would pass mounts on to the host: {mount}"
        );
        let writable = target == workspace
            || ["/tmp", "/var/tmp", "/dev/shm"].contains(&target)
            || target.starts_with("/home/")
            || target.starts_with("/dev/")
            || target == "/run/tollgate/broker.sock"
            || mount["type"] == "proc";
        assert!(has("ro") || writable, "{target} is writable: {mount}");
        let source = mount.to_string();
        for hidden in [&world.out, &world.home] {
            assert!(!source.contains(&*hidden.to_string_lossy()), "the jail shows {}: {mount}", hidden.display());
        }
    }
}

#[test]
fn host_root_never_runs_a_jailed_program() {
    every_way(|world| {
        let marker = format!("{}.sleeper", world.base().display());
        let running = world.run(["--", "sh", "-c", "sleep 30; :", &marker]).start();
        let jailed =
            || observe::processes_naming(&marker).into_iter().filter(|process| process.command.starts_with("sh -c"));
        wait_until("the program runs", Duration::from_secs(10), || jailed().next().is_some());
        for process in jailed() {
            for field in ["Uid", "Gid"] {
                let ids = process.field(field).expect("a status file has it");
                assert!(ids.split_whitespace().all(|id| id != "0"), "host root runs {process:?}");
            }
            assert_eq!(process.field("NoNewPrivs"), Some("1"));
            assert_eq!(process.field("Seccomp"), Some("2"));
            assert_eq!(process.field("CapBnd"), Some("0000000000000000"));
            let map = fs::read_to_string(format!("/proc/{}/uid_map", process.pid)).expect("we may look");
            for line in map.lines() {
                let numbers: Vec<u64> = line.split_whitespace().map(|word| word.parse().expect("a number")).collect();
                assert!(numbers[1] != 0, "an id of the jail is host root: {line}");
            }
            for kind in ["mnt", "pid", "net", "ipc", "uts", "user", "cgroup"] {
                let of = |pid: &str| fs::read_link(format!("/proc/{pid}/ns/{kind}")).expect("we may look");
                assert_ne!(of(&process.pid.to_string()), of("self"), "the {kind} namespace is the host's");
            }
        }
        running.signal(Signal::SIGTERM);
        running.wait();
        world.assert_nothing_left(Duration::from_secs(2));
    });
}

#[test]
fn every_system_call_number_is_answered_and_none_kills() {
    every_way(|world| {
        let probe = world.compiled("syscalls.c");
        let output = world.run(["--", &probe]).timeout(Duration::from_secs(90)).finish();
        let answers = attempts(&output);
        assert_eq!(output.status, 0, "{output}");
        let mut wrong = Vec::new();
        for (name, answer) in answers.iter() {
            let (errno, signal) =
                (answer["errno"].as_i64().expect("a number"), answer["signal"].as_i64().expect("a number"));
            // The filter ends a program that calls by the 32-bit door: no list of that door's numbers is kept.
            if signal != 0 && !(name.starts_with("i386-") && signal == i64::from(libc::SIGSYS)) {
                wrong.push(format!("{name} kills with signal {signal}"));
            }
            // Nothing behind the other two doors may work, whatever the number.
            if (name.starts_with("x32-") || name.starts_with("i386-"))
                && ![i64::from(libc::ENOSYS), i64::from(libc::EPERM)].contains(&errno)
                && signal != i64::from(libc::SIGSYS)
            {
                wrong.push(format!("{name} is let through: {answer}"));
            }
        }
        for (number, name) in FORBIDDEN_CALLS {
            let errno = answers.one(&format!("n{number}"))["errno"].as_i64().expect("a number");
            if ![i64::from(libc::EPERM), i64::from(libc::ENOSYS)].contains(&errno) {
                wrong.push(format!("{name} is let through: errno {errno}"));
            }
        }
        // A number that no kernel has.
        if answers.one("n100000")["errno"] != libc::ENOSYS {
            wrong.push(format!("an unknown call is not ENOSYS: {}", answers.one("n100000")));
        }
        assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    });
}

/// Calls that no jail has, by their x86-64 numbers (asm/unistd_64.h). With senseless arguments a call that is let
/// through answers EFAULT, EINVAL or EBADF, so EPERM and ENOSYS are the filter's.
const FORBIDDEN_CALLS: &[(u32, &str)] = &[
    (155, "pivot_root"),
    (163, "acct"),
    (164, "settimeofday"),
    (165, "mount"),
    (166, "umount2"),
    (167, "swapon"),
    (168, "swapoff"),
    (169, "reboot"),
    (170, "sethostname"),
    (171, "setdomainname"),
    (172, "iopl"),
    (173, "ioperm"),
    (175, "init_module"),
    (176, "delete_module"),
    (179, "quotactl"),
    (180, "nfsservctl"),
    (246, "kexec_load"),
    (248, "add_key"),
    (249, "request_key"),
    (250, "keyctl"),
    (256, "migrate_pages"),
    (272, "unshare"),
    (298, "perf_event_open"),
    (300, "fanotify_init"),
    (303, "name_to_handle_at"),
    (304, "open_by_handle_at"),
    (305, "clock_adjtime"),
    (308, "setns"),
    (310, "process_vm_readv"),
    (311, "process_vm_writev"),
    (312, "kcmp"),
    (313, "finit_module"),
    (320, "kexec_file_load"),
    (321, "bpf"),
    (323, "userfaultfd"),
    (425, "io_uring_setup"),
    (426, "io_uring_enter"),
    (427, "io_uring_register"),
    (428, "open_tree"),
    (429, "move_mount"),
    (430, "fsopen"),
    (431, "fsconfig"),
    (432, "fsmount"),
    (433, "fspick"),
    (435, "clone3"),
    (442, "mount_setattr"),
    (443, "quotactl_fd"),
];

#[test]
fn the_callers_descriptors_do_not_pass() {
    every_way(|world| {
        world.python("probe.py");
        let probe = world.python("facts.py");
        // An open file, a directory of the outside and a socket, at 5 to 20, none marked close-on-exec.
        let holder = "import os,sys,socket\n\
            a=socket.socketpair(); o=sys.argv[1]\n\
            for n in range(5,21): os.dup2(os.open(o if n%2 else o+'/s', os.O_RDONLY) if n%3 else a[0].fileno(), n, True)\n\
            os.execvp(sys.argv[2], sys.argv[2:])";
        let launcher = world.run(["--", "/usr/bin/python3", &probe]).into_command();
        let mut invocation =
            world.command("/usr/bin/python3").arg("-c").arg(holder).arg(&world.out).arg(launcher.get_program());
        for argument in launcher.get_args() {
            invocation = invocation.arg(argument);
        }
        let output = invocation.finish().expect_status(0);
        let descriptors = attempts(&output).one("descriptors")["value"].clone();
        let numbers: Vec<&String> = descriptors.as_object().expect("an object").keys().collect();
        assert_eq!(numbers, ["0", "1", "2"], "{descriptors}");
        assert!(!descriptors.to_string().contains(&*world.out.to_string_lossy()), "{descriptors}");
    });
}

#[test]
fn set_user_id_files_gain_nothing() {
    every_way(|world| {
        fs::copy("/usr/bin/id", world.workspace.join("planted")).expect("coreutils has `id`");
        let root_owned = nix::unistd::geteuid().is_root();
        if root_owned {
            tollgate_tests::world::give(&world.workspace.join("planted"), 0);
        }
        world.mode("planted", 0o6755);
        let output =
            world.run_script("id -u; ./planted -u; cp /usr/bin/id own; chmod 6755 own; ./own -u; true").finish();
        let lines: Vec<String> = output.out().lines().map(str::to_owned).collect();
        assert_eq!(lines.len(), 3, "{output}");
        assert!(lines.iter().all(|line| *line == lines[0] && line != "0"), "{output}");
        // What a run leaves behind must not be a set-user-id program of its caller's either.
        if let Ok(meta) = fs::metadata(world.workspace.join("own")) {
            assert_eq!(meta.permissions().mode() & 0o7000, 0, "a set-user-id file was applied");
        }
    });
}

#[test]
fn setuid_programs_of_the_system_gain_nothing() {
    every_way(|world| {
        for program in ["su", "sudo", "mount", "passwd", "chsh", "newgrp"] {
            if !tollgate_tests::world::on_path(program) {
                continue;
            }
            let output =
                world.run_script(&format!("{program} </dev/null; grep -E '^(Uid|CapEff)' /proc/self/status")).finish();
            assert!(!output.out().contains("Uid:\t0"), "{program}: {output}");
        }
        let output =
            world.run_script("su -c 'id -u' root </dev/null; sudo -n id -u; mount -t tmpfs x /tmp; true").finish();
        assert!(!output.out().lines().any(|line| line == "0"), "{output}");
    });
}

#[test]
fn the_callers_environment_does_not_pass() {
    every_way(|world| {
        const SECRET: &str = "zq9secret";
        let script = "env; for p in self 1 $PPID thread-self; do tr '\\0' '\\n' < /proc/$p/environ; done; \
            grep -al zq9''secret /proc/[0-9]*/environ /proc/[0-9]*/cmdline /proc/self/mountinfo; true";
        let output = world
            .run(["--env", "PLAIN=visible", "--", "sh", "-c", script])
            .env("TOK", SECRET)
            .env("AWS_SECRET_ACCESS_KEY", SECRET)
            .env("LD_PRELOAD", "")
            .finish()
            .expect_status(0);
        assert!(!output.out().contains(SECRET) && !output.err().contains(SECRET), "{output}");
        assert!(output.out().contains("PLAIN=visible"), "{output}");
        assert!(!output.out().contains("/proc/"), "a process of the jail shows the secret: {output}");
        assert!(!output.out().contains("TOLLGATE_STATE"), "our own settings passed: {output}");
        let run = world.last_run();
        let names = run["environment"].as_array().unwrap_or_else(|| panic!("no list of variables in {run}"));
        assert!(names.iter().any(|name| name == "PLAIN"), "{run}");
        assert!(!names.iter().any(|name| name == "TOK"), "{run}");
        assert!(!run.to_string().contains(SECRET));
        // Nor does the ledger hold a value.
        let grep = world.command("grep").arg("-ral").arg(SECRET).arg(&world.state).finish();
        assert_eq!(grep.out(), "", "the state folder holds a secret's value");
    });
}

#[test]
fn a_run_cannot_kill_its_parent() {
    every_way(|world| {
        let output =
            world.run_script("kill -9 1; kill -9 $PPID; kill -STOP 1; kill -TERM 1; sleep 0.2; echo alive").finish();
        assert_eq!((output.status, output.out().trim()), (0, "alive"), "{output}");
        let output = world.run_script("trap '' TERM; sleep 30 & kill -9 -1; sleep 1; echo alive").finish();
        assert_eq!((output.status, output.out().trim()), (0, "alive"), "{output}");
        world.assert_nothing_left(Duration::from_secs(2));
        // The supervisor's group is not the program's: a signal to group 0 or to the session stays inside.
        let output = world.shell("$TG -- sh -c 'kill -9 0'; echo $?; echo survived").finish();
        assert_eq!(output.out().lines().collect::<Vec<_>>(), ["137", "survived"], "{output}");
    });
}

#[test]
fn stopped_children_do_not_outlive_the_wall_limit() {
    every_way(|world| {
        let started = Instant::now();
        let script =
            "for i in 1 2 3; do (trap '' TERM HUP INT; setsid sleep 60) & done; sleep 0.2; kill -STOP -1; sleep 60";
        let output = world.run(["--wall", "1s", "--", "sh", "-c", script]).finish();
        assert_eq!(output.status, 124, "{output}");
        assert!(started.elapsed() < Duration::from_secs(8), "{:?}", started.elapsed());
        let run = world.last_run();
        assert_eq!(run["outcome"]["type"], "wall-exceeded", "{run}");
        world.assert_nothing_left(Duration::from_secs(2));

        // A program that stops itself uses up wall time too.
        let output = world.run(["--wall", "1s", "--", "sh", "-c", "kill -STOP $$; sleep 60"]).finish();
        assert_eq!(output.status, 124, "{output}");
        world.assert_nothing_left(Duration::from_secs(2));
    });
}

#[test]
fn the_processor_limit_counts_the_whole_tree() {
    every_way(|world| {
        let script = "for i in 1 2 3 4; do (timeout 1 sh -c 'while :; do :; done') & done; wait; while :; do sh -c 'i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done'; done";
        let output = world.run(["--cpu", "2s", "--wall", "40s", "--", "sh", "-c", script]).finish();
        assert_eq!(output.status, 152, "{output}");
        assert_eq!(world.last_run()["outcome"]["type"], "cpu-exceeded");
        world.assert_nothing_left(Duration::from_secs(2));
    });
}

#[test]
fn a_flood_of_output_ends_at_its_limit_and_does_not_fill_the_supervisor() {
    every_way(|world| {
        let policy = world.base().join("flood.toml");
        fs::write(
            &policy,
            "description = \"Little output.\"\nextends = [\"default\"]\n[limits]\noutput_bytes = \"200MiB\"\n",
        )
        .expect("our own folder");
        let running = world
            .shell(&format!(
                "exec $TG --policy {} -- yes 0123456789012345678901234567890123456789 | wc -c; exit ${{PIPESTATUS[0]}}",
                policy.display()
            ))
            .start();
        let mut peak = 0;
        let mut watched = running;
        while watched.is_running() {
            for process in world.processes() {
                if process.command.contains("tollgate run") && !process.command.contains("bash") {
                    let resident =
                        process.field("VmHWM").and_then(|text| text.split(' ').next()?.parse().ok()).unwrap_or(0);
                    peak = std::cmp::max::<u64>(peak, resident);
                }
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        let output = watched.wait();
        let passed: u64 = output.out().trim().parse().unwrap_or_else(|_| panic!("{output}"));
        assert!(passed <= 200 * 1024 * 1024, "{passed} bytes passed");
        assert!(passed > 100 * 1024 * 1024, "{passed} bytes passed");
        assert_ne!(output.status, 0, "{output}");
        assert!(peak > 0 && peak < 96 * 1024, "the supervisor grew to {peak} KiB");
        assert_eq!(world.last_run()["outcome"]["type"], "output-exceeded");
    });
}

#[test]
fn a_disk_filler_ends_at_its_limit() {
    every_way(|world| {
        let before = world.snapshot();
        let output = world
            .run([
                "--write-bytes",
                "8M",
                "--",
                "sh",
                "-c",
                "dd if=/dev/zero of=big bs=1M count=4000 2>/dev/null; sleep 5",
            ])
            .finish();
        let run = world.last_run();
        assert_eq!(run["outcome"]["type"], "write-exceeded", "{output} {run}");
        // Documented in the help of `tollgate run`: 153, too much written.
        assert_eq!(output.status, 153, "{output}");
        assert!(output.err().contains("write"), "the message does not say which limit: {output}");
        before.assert_same(&world.snapshot());
        let state = tree_bytes(&world.state);
        assert!(state < 1 << 30, "{state} bytes are left in the state folder");
        // The private folders are bounded too, and memory-backed: they must not reach the host's disk or take it all.
        let output = world
            .run_script("dd if=/dev/zero of=/tmp/big bs=1M count=100000 2>&1 | tail -1; df -k /tmp | tail -1")
            .finish();
        let run = world.last_run();
        assert!(
            output.out().contains("No space")
                || output.status == 137
                || run["outcome"]["type"] != "exited"
                || output.out().contains('%'),
            "{output}"
        );
        world.assert_nothing_left(Duration::from_secs(2));
    });
}

fn tree_bytes(folder: &Path) -> u64 {
    fs::read_dir(folder)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| match entry.file_type() {
            Ok(kind) if kind.is_dir() => tree_bytes(&entry.path()),
            _ => entry.metadata().map(|meta| meta.len()).unwrap_or(0),
        })
        .sum()
}

#[test]
fn links_are_never_followed_out_of_the_workspace() {
    every_way(|world| {
        std::os::unix::fs::symlink(&world.out, world.workspace.join("l")).expect("a new name");
        std::os::unix::fs::symlink(world.out.join("s"), world.workspace.join("f")).expect("a new name");
        for link in ["l", "f"] {
            world.own(&world.workspace.join(link));
        }
        let output = world
            .run_script("cat f l/s; echo x >> f; echo y > l/new; mv f g; ln l/s h; tar -chf - l/ | wc -c; ln -s /etc/shadow made; true")
            .finish();
        assert!(!output.out().contains(SENTINEL), "{output}");
        world.assert_outside_intact();
        // Links are shipped as links: `f` moved to `g`, `made` was made, neither looked through.
        assert!(fs::read_link(world.workspace.join("f")).is_err());
        assert_eq!(fs::read_link(world.workspace.join("g")).expect("moved"), world.out.join("s"));
        assert_eq!(fs::read_link(world.workspace.join("made")).expect("made"), Path::new("/etc/shadow"));
        let denied = world.receipts(&["--denied"]);
        let resolved = world.out.join("s").to_string_lossy().into_owned();
        assert!(
            denied.iter().any(|receipt| receipt["resource"]["path"] == resolved.as_str()),
            "no denied receipt names the resolved path {resolved}: {denied:#?}"
        );
    });
}

#[test]
fn a_race_of_links_against_apply_reaches_nothing_outside() {
    every_identity(|world| {
        // Inside: `d` changes between a folder and a link outwards while files are written below it.
        world.write(
            "race.py",
            format!(
                "import os, threading, time\nend = time.time() + 2\n\
                 def swap():\n    while time.time() < end:\n        try:\n            os.mkdir('d2'); os.rename('d2', 'd')\n        except OSError: pass\n        \
                 try:\n            os.symlink({out:?}, 'x'); os.rename('d', 'old'); os.rename('x', 'd'); os.unlink('d'); os.rmdir('old')\n        except OSError:\n            os.system('rm -rf d old x d2')\n\
                 t = threading.Thread(target=swap); t.start()\nn = 0\n\
                 while time.time() < end:\n    try:\n        open('d/f', 'w').write('z'); n += 1\n    except OSError: pass\nt.join()\n\
                 os.system('rm -rf d'); os.symlink({out:?}, 'd')\n",
                out = world.out.to_str().expect("UTF-8")
            ),
        );
        world.run(["--", "/usr/bin/python3", "race.py"]).finish();
        world.assert_outside_intact();

        // Outside: somebody swaps the folder for a link while the run's changes are applied.
        for round in 0..10 {
            let _ = fs::remove_file(world.workspace.join("t"));
            let _ = fs::remove_dir_all(world.workspace.join("t"));
            world.write("t/keep", "keep");
            let workspace = world.workspace.clone();
            let out = world.out.clone();
            let stop = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
            let stopped = std::sync::Arc::clone(&stop);
            let swapper = std::thread::spawn(move || {
                while !stopped.load(std::sync::atomic::Ordering::Relaxed) {
                    let (real, aside) = (workspace.join("t"), workspace.join(".aside"));
                    if fs::rename(&real, &aside).is_ok() {
                        let _ = std::os::unix::fs::symlink(&out, &real);
                        std::thread::yield_now();
                        let _ = fs::remove_file(&real);
                        let _ = fs::rename(&aside, &real);
                    }
                }
            });
            let script = format!("for i in $(seq 40); do echo {round} > t/f$i; done; rm -f t/keep t/s");
            world.run_script(&script).finish();
            stop.store(true, std::sync::atomic::Ordering::Relaxed);
            swapper.join().expect("the swapper does not panic");
            world.assert_outside_intact();
        }
    });
}

#[test]
fn limits_on_processes_hold_a_fork_bomb() {
    every_way(|world| {
        world.write("fb.py", FORK_BOMB);
        let bomb = |flags: &[&str]| {
            let mut arguments = flags.to_vec();
            arguments.extend(["--", "/usr/bin/python3", "fb.py"]);
            world.run(arguments)
        };
        let judge = |output: Finished, most: u64| {
            let out = output.out();
            let count: u64 =
                out.split_whitespace().next().and_then(|word| word.parse().ok()).unwrap_or_else(|| panic!("{output}"));
            assert!(out.contains("Resource temporarily unavailable"), "{output}");
            assert!(count > most / 4 && count < most, "{count} of {most}: {output}");
        };
        // Two at once: each has a budget of its own.
        let (first, second) = (bomb(&["--pids", "64"]).start(), bomb(&["--pids", "64"]).start());
        judge(first.wait(), 64);
        judge(second.wait(), 64);
        world.assert_nothing_left(Duration::from_secs(3));
        // A bomb that never stops does not outlive its wall limit.
        let output =
            world.run(["--pids", "64", "--wall", "2s", "--", "sh", "-c", "b() { b | b & b; }; b; sleep 60"]).finish();
        assert!(output.status != 0 && output.elapsed < Duration::from_secs(15), "{output}");
        world.assert_nothing_left(Duration::from_secs(5));
    });
}

/// Case 29's program.
const FORK_BOMB: &str = "import os, time\nn = 0\ntry:\n    while n < 300:\n        if os.fork() == 0: time.sleep(2); os._exit(0)\n        n += 1\n    print(\"no limit\", n)\nexcept OSError as e: print(n, e.strerror)\n";

#[test]
fn a_memory_bomb_is_named_as_such() {
    every_way(|world| {
        const BOMB: &str = "b=bytearray()\nwhile 1: b+=b\"x\"*1000000";
        let output = world.run(["--memory", "64M", "--", "/usr/bin/python3", "-c", BOMB]).finish();
        let run = world.last_run();
        if output.status == 125 {
            // Without control groups of its own a caller's limit on memory cannot be kept: then nothing runs.
            assert!(
                output.err().contains("cannot be enforced") && run["outcome"]["type"] == "could-not-start",
                "{output}"
            );
            assert!(world.way.identity == Identity::Ordinary, "the superuser has control groups: {output}");
            return;
        }
        assert_eq!(output.status, 137, "{output} {run}");
        assert_eq!(run["outcome"]["type"], "memory-exceeded", "{run}");
        assert_eq!(run["outcome"]["limit"], 64 << 20, "{run}");
        assert!(output.err().contains("memory") && output.err().contains("64"), "{output}");
        world.assert_nothing_left(Duration::from_secs(2));

        let output =
            world.run(["--memory", "64M", "--", "sh", "-c", "/usr/bin/python3 -c \"$0\"; echo rc $?", BOMB]).finish();
        assert_eq!((output.out().trim(), output.status), ("rc 137", 0), "{output}");
        let run = world.last_run();
        assert!(
            run["outcome"]["type"] == "exited" && run.to_string().contains("memory"),
            "the run does not tell of the killed child: {run}"
        );
    });
}

#[test]
fn two_runs_do_not_meet() {
    every_identity(|world| {
        // One run leaves everything that two could share; the other looks for it, at the same time.
        let unique = format!("meet{}", std::process::id());
        let keeper = world
            .run_script(&format!(
                "echo {SENTINEL} > /tmp/{unique}; echo {SENTINEL} > /dev/shm/{unique}; echo {SENTINEL} > $HOME/{unique}; \
                 exec /usr/bin/python3 -c 'import socket,ctypes,time,sys\n\
                 s=socket.socket(socket.AF_UNIX); s.bind(\"\\0{unique}\"); s.listen(1); s.settimeout(30)\n\
                 t=socket.socket(); t.bind((\"127.0.0.1\",47123)); t.listen(1)\n\
                 ctypes.CDLL(None).shmget(4711,4096,0o1666)\n\
                 print(\"ready\",flush=True); time.sleep(4); print(\"undisturbed\",flush=True)' {unique}"
            ))
            .start();
        wait_until("the first run is ready", Duration::from_secs(10), || {
            world.processes().iter().any(|process| {
                process.command.contains("python3")
                    && process.command.contains(&unique)
                    && !process.command.contains("tollgate")
            })
        });
        std::thread::sleep(Duration::from_millis(300));
        let seeker = world
            .run_script(&format!(
                "cat /tmp/{unique} /dev/shm/{unique} $HOME/{unique}; \
                 /usr/bin/python3 -c 'import socket,ctypes,os\n\
                 def t(n,f):\n  try: f(); print(\"MET\",n)\n  except OSError: pass\n\
                 t(\"abstract\",lambda: socket.socket(socket.AF_UNIX).connect(\"\\0{unique}\"))\n\
                 t(\"port\",lambda: socket.socket().connect((\"127.0.0.1\",47123)))\n\
                 if ctypes.CDLL(None).shmget(4711,0,0)>=0: print(\"MET shm\")\n\
                 print(len([p for p in os.listdir(\"/proc\") if p.isdigit()]))'; kill -9 -1; true"
            ))
            .finish();
        assert!(!seeker.out().contains("MET") && !seeker.out().contains(SENTINEL), "{seeker}");
        let kept = keeper.wait();
        assert!(kept.out().contains("undisturbed"), "{kept}");
        assert_eq!(kept.status, 0, "{kept}");
    });
}

#[test]
fn another_user_cannot_read_or_end_a_run() {
    every_identity(|world| {
        if world.way.identity == Identity::Root || !nix::unistd::geteuid().is_root() {
            // A third user needs a privileged suite; root may look at everything by right.
            return;
        }
        let running = world.run(["--", "sh", "-c", "echo secret > note; sleep 3; echo whole"]).start();
        wait_until("the program runs", Duration::from_secs(10), || {
            world.processes().iter().any(|process| process.command.starts_with("sh -c"))
        });
        let stranger = tollgate_tests::world::ORDINARY_UID + 1;
        for process in world.processes() {
            let pid = process.pid.to_string();
            for script in [
                format!("kill -9 {pid}"),
                format!("cat /proc/{pid}/environ"),
                format!("ls -R {}", world.state.display()),
            ] {
                let status = Command::new("setpriv")
                    .args([
                        &format!("--reuid={stranger}"),
                        &format!("--regid={stranger}"),
                        "--clear-groups",
                        "sh",
                        "-c",
                        &script,
                    ])
                    .output()
                    .expect("util-linux has `setpriv`");
                assert!(!status.status.success() && status.stdout.is_empty(), "a stranger may: {script}");
            }
        }
        let output = running.wait();
        assert_eq!((output.status, output.out().trim()), (0, "whole"), "{output}");
        let mode = fs::metadata(&world.state).expect("the state folder").permissions().mode() & 0o777;
        assert_eq!(mode, 0o700);
    });
}
