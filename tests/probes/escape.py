"""Attempts to leave the jail by the kernel's interfaces. Arguments: one JSON object, see `attacks.rs`.

Each attempt is a real attack: reported as `ok` only when the attacker has what it wanted.
System call numbers are those of x86-64 (asm/unistd_64.h).
"""

import ctypes
import fcntl
import json
import os
import resource
import socket
import struct
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from probe import Refused, attempt, attempt_in_child, end, syscall

given = json.loads(sys.argv[1])
OUT = given["out"]
HOST_PID = given["host_pid"]
SENTINEL = given["sentinel"]
WORK = os.getcwd()

NAMESPACES = {
    "user": 0x10000000, "mnt": 0x00020000, "pid": 0x20000000, "net": 0x40000000, "ipc": 0x08000000,
    "uts": 0x04000000, "cgroup": 0x02000000, "time": 0x00000080,
}


def read(path, limit=4096):
    with open(path, "rb", buffering=0) as file:
        return file.read(limit)


def read_sentinel(path):
    content = read(path)
    if SENTINEL.encode() not in content:
        raise Refused("read %r, which is not the sentinel" % content[:40])


def opened_for_writing(path, create=False):
    os.close(os.open(path, os.O_WRONLY | (os.O_CREAT if create else 0), 0o600))


# --- other processes -------------------------------------------------------------------------------------------------

PTRACE_SEIZE = 0x4206
attempt_in_child("ptrace-host", lambda: syscall(101, PTRACE_SEIZE, HOST_PID, 0, 0))
# Seizing does not stop it: an attack that works must not hang the test.
attempt_in_child("ptrace-init", lambda: syscall(101, PTRACE_SEIZE, 1, 0, 0))


def read_memory_of(pid):
    buffer = ctypes.create_string_buffer(16)
    local = struct.pack("QQ", ctypes.addressof(buffer), 16)
    remote = struct.pack("QQ", 0x400000, 16)
    syscall(310, pid, local, 1, remote, 1, 0)


attempt("vm-read-host", lambda: read_memory_of(HOST_PID))
attempt("vm-read-init", lambda: read_memory_of(1))
attempt("mem-of-host", lambda: opened_for_writing("/proc/%d/mem" % HOST_PID))
attempt("mem-of-init", lambda: opened_for_writing("/proc/1/mem"))
attempt("environ-of-init", lambda: read("/proc/1/environ"))
attempt("descriptors-of-init", lambda: os.listdir("/proc/1/fd"))
attempt("memory-map-of-init", lambda: read("/proc/1/maps") or (_ for _ in ()).throw(Refused("empty")))


def sentinel_through(link):
    """Looks for the outside folder through every process's `root` or `cwd`."""
    for name in os.listdir("/proc"):
        if name.isdigit():
            for up in ("", "/.." * 12):
                try:
                    read_sentinel("/proc/%s/%s%s%s/s" % (name, link, up, OUT))
                    return name
                except (OSError, Refused):
                    pass
    raise Refused("no process shows it")


attempt("outside-through-proc-root", lambda: sentinel_through("root"))
attempt("outside-through-proc-cwd", lambda: sentinel_through("cwd"))


def steal_descriptor():
    pidfd = syscall(434, 1, 0)
    for number in range(0, 12):
        try:
            return "took descriptor %d of pid 1: %s" % (number, os.readlink("/proc/self/fd/%d" % syscall(438, pidfd, number, 0)))
        except OSError as failure:
            last = failure
    raise last


attempt("pidfd-getfd-of-init", steal_descriptor)
attempt("signal-host", lambda: os.kill(HOST_PID, 0))
attempt("kcmp-with-init", lambda: syscall(312, os.getpid(), 1, 0, 0, 0))
# Its core limit, which is 0 already: an attack that works must not starve the jail before the other attempts.
attempt("prlimit-of-init", lambda: syscall(302, 1, 4, struct.pack("QQ", 0, 0), 0))
attempt("pidfd-of-host", lambda: syscall(434, HOST_PID, 0))


def migrate_init():
    mask = ctypes.c_ulong(1)
    syscall(256, 1, 64, ctypes.byref(mask), ctypes.byref(mask))


attempt("migrate-pages-of-init", migrate_init)

# --- the kernel's settings -------------------------------------------------------------------------------------------

for name, path in {
    "core-pattern": "/proc/sys/kernel/core_pattern",
    "modprobe-path": "/proc/sys/kernel/modprobe",
    "hostname-setting": "/proc/sys/kernel/hostname",
    "last-pid": "/proc/sys/kernel/ns_last_pid",
    "ip-forward": "/proc/sys/net/ipv4/ip_forward",
    "port-range": "/proc/sys/net/ipv4/ip_local_port_range",
    "user-namespaces-setting": "/proc/sys/user/max_user_namespaces",
    "shmmax": "/proc/sys/kernel/shmmax",
    "drop-caches": "/proc/sys/vm/drop_caches",
    "sysrq": "/proc/sysrq-trigger",
    "binfmt": "/proc/sys/fs/binfmt_misc/register",
    "setgroups-file": "/proc/self/setgroups",
    "uevent-helper": "/sys/kernel/uevent_helper",
    "oom-of-init": "/proc/1/oom_score_adj",
}.items():
    attempt("write-" + name, lambda: opened_for_writing(path))


def write_map():
    descriptor = os.open("/proc/self/uid_map", os.O_WRONLY)
    try:
        os.write(descriptor, b"0 0 1\n")
    finally:
        os.close(descriptor)


attempt("widen-uid-map", write_map)


def lower_oom():
    with open("/proc/self/oom_score_adj") as file:
        now = int(file.read())
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("-1000")
    raise AssertionError("lowered from %d" % now)


def evade_oom():
    try:
        lower_oom()
    except AssertionError as success:
        return str(success)


attempt("evade-oom-killer", evade_oom)
for name, path in {
    "kcore": "/proc/kcore", "kmsg": "/proc/kmsg", "dev-mem": "/dev/mem", "dev-kmsg": "/dev/kmsg", "dev-disk": "/dev/vda",
    "dev-fuse": "/dev/fuse", "dev-kvm": "/dev/kvm", "dev-tun": "/dev/net/tun", "dev-vsock": "/dev/vsock",
    "dev-userfaultfd": "/dev/userfaultfd", "dev-loop": "/dev/loop-control", "dev-console": "/dev/console",
    "dev-tty1": "/dev/tty1", "dev-uinput": "/dev/uinput", "shadow": "/etc/shadow", "gshadow": "/etc/gshadow",
    "sudoers": "/etc/sudoers", "machine-id": "/etc/machine-id", "outside-file": OUT + "/s", "caller-home": given["home"] + "/private",
    "root-home": "/root/.bashrc", "ledger": given["state"], "boot": "/boot", "tracing": "/sys/kernel/tracing/trace",
    "debugfs": "/sys/kernel/debug", "cgroup-root": "/sys/fs/cgroup/cgroup.procs", "cgroup-pids": "/sys/fs/cgroup/pids/tasks",
}.items():
    def get(path=path):
        if os.path.isdir(path):
            found = os.listdir(path)
            if not found:
                raise Refused("an empty folder")
            return found
        if not read(path):
            raise Refused("an empty file")
    attempt("read-" + name, get)

# --- mounts and namespaces -------------------------------------------------------------------------------------------

MS_RDONLY, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 32, 4096, 16384, 1 << 18
os.makedirs("m", exist_ok=True)
attempt("mount-tmpfs", lambda: syscall(165, b"none", b"m", b"tmpfs", 0, 0))
attempt("mount-proc", lambda: syscall(165, b"none", b"m", b"proc", 0, 0))
attempt("mount-sysfs", lambda: syscall(165, b"none", b"m", b"sysfs", 0, 0))
attempt("mount-overlay", lambda: syscall(165, b"none", b"m", b"overlay", 0, b"lowerdir=/,upperdir=m,workdir=m"))
attempt("mount-bind", lambda: syscall(165, b"/", b"m", 0, MS_BIND | MS_REC, 0))
attempt("remount-root-writable", lambda: syscall(165, b"none", b"/", 0, MS_REMOUNT | MS_BIND, 0))
attempt("remount-usr-writable", lambda: syscall(165, b"none", b"/usr", 0, MS_REMOUNT | MS_BIND, 0))
attempt("unmount-proc", lambda: syscall(166, b"/proc", 2))
attempt("unmount-tmp", lambda: syscall(166, b"/tmp", 2))
attempt("unmount-workspace", lambda: syscall(166, WORK.encode(), 2))
attempt("open-tree-clone", lambda: syscall(428, -100, b"/", 1 | 0x8000))
attempt("move-mount", lambda: syscall(429, -100, b"/tmp", -100, b"m", 0))
attempt("fsopen", lambda: syscall(430, b"tmpfs", 0))
attempt("fspick", lambda: syscall(433, -100, b"/tmp", 0))
attempt("mount-setattr", lambda: syscall(442, -100, b"/usr", 0, struct.pack("QQQQ", 0, 1, 0, 0), 32))
attempt("pivot-root", lambda: syscall(155, b".", b"."))
attempt_in_child("chroot", lambda: os.chroot("."))
attempt("open-by-handle", lambda: syscall(304, os.open(".", os.O_RDONLY), struct.pack("Ii", 8, 1) + b"\2\0\0\0\0\0\0\0", 0))


def handle_of_workspace():
    handle = ctypes.create_string_buffer(struct.pack("Ii", 128, 0) + bytes(128))
    mount_id = ctypes.c_int()
    syscall(303, -100, b".", handle, ctypes.byref(mount_id), 0)
    return syscall(304, os.open(".", os.O_RDONLY), handle, os.O_RDONLY)


attempt("open-by-own-handle", handle_of_workspace)

for name, flag in NAMESPACES.items():
    attempt_in_child("unshare-" + name, lambda: syscall(272, flag))
    # The raw call: on success the child returns 0 here too and must go at once.
    def clone(flag=flag):
        child = syscall(56, flag | 17, 0, 0, 0, 0)
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
    if name != "time":  # 0x80 lies in the byte that clone(2) has for the signal
        attempt_in_child("clone-" + name, clone)

    def clone3(flag=flag):
        child = syscall(435, struct.pack("QQQQQQQQ", flag, 0, 0, 0, 17, 0, 0, 0), 64)
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
    attempt_in_child("clone3-" + name, clone3)
    attempt_in_child("setns-init-" + name, lambda: syscall(308, os.open("/proc/1/ns/" + name, os.O_RDONLY), flag))
attempt_in_child("setns-own-user", lambda: syscall(308, os.open("/proc/self/ns/user", os.O_RDONLY), 0))
attempt_in_child("setns-pidfd", lambda: syscall(308, syscall(434, 1, 0), NAMESPACES["mnt"]))

# --- credentials -----------------------------------------------------------------------------------------------------

for name, function in {
    "setuid-0": lambda: syscall(105, 0), "setgid-0": lambda: syscall(106, 0),
    "setresuid-0": lambda: syscall(117, 0, 0, 0), "setfsuid-0": None,
    "setgroups": lambda: syscall(116, 1, struct.pack("I", 0)),
}.items():
    if function is None:
        def function():
            syscall(122, 0)
            if syscall(122, -1) != 0:
                raise Refused("still the same")
    attempt_in_child(name, function)

attempt_in_child("capset-all", lambda: syscall(126, struct.pack("Ii", 0x20080522, 0), struct.pack("IIIIII", *[0xFFFFFFFF] * 6)))
attempt_in_child("ambient-capability", lambda: syscall(157, 47, 2, 21, 0, 0))
attempt_in_child("clear-no-new-privs", lambda: syscall(157, 38, 0, 0, 0, 0))
attempt_in_child("keep-capabilities-locked", lambda: syscall(157, 28, 0x2F, 0, 0, 0))


def chown_to_root():
    open("mine", "w").close()
    os.chown("mine", given["foreign_uid"], given["foreign_uid"])


attempt("give-file-away", chown_to_root)

# --- what no program here needs --------------------------------------------------------------------------------------

attempt("add-key", lambda: syscall(248, b"user", b"tg", b"x", 1, -3))
attempt("request-key", lambda: syscall(249, b"user", b"tg", 0, -3))
attempt("keyctl", lambda: syscall(250, 0, -3, 1))
attempt("bpf", lambda: syscall(321, 0, struct.pack("IIIIII", 1, 4, 4, 1, 0, 0), 24))
attempt("perf-event-open", lambda: syscall(298, struct.pack("IIQ", 1, 112, 0) + bytes(96), 0, -1, -1, 0))
attempt("userfaultfd", lambda: syscall(323, 1))
attempt("io-uring-setup", lambda: syscall(425, 4, ctypes.create_string_buffer(120)))
attempt("io-uring-enter", lambda: syscall(426, 0, 0, 0, 0, 0, 0))
attempt("io-uring-register", lambda: syscall(427, 0, 0, 0, 0))
attempt("kexec-load", lambda: syscall(246, 0, 0, 0, 0))
attempt("kexec-file-load", lambda: syscall(320, -1, -1, 0, 0, 0))
attempt("init-module", lambda: syscall(175, b"", 0, b""))
attempt("finit-module", lambda: syscall(313, 0, b"", 0))
attempt("delete-module", lambda: syscall(176, b"nothing", 0))
attempt("reboot", lambda: syscall(169, 0xFEE1DEAD, 672274793, 0, 0))  # CAD off: harmless if it works
attempt("swapon", lambda: syscall(167, b"/tmp/none", 0))
attempt("acct", lambda: syscall(163, 0))
attempt("quotactl", lambda: syscall(179, 0x800007 << 8, 0, 0, 0))
attempt("syslog", lambda: syscall(103, 10, 0, 0))
attempt("iopl", lambda: syscall(172, 3))
attempt("ioperm", lambda: syscall(173, 0x70, 1, 1))
attempt("set-hostname", lambda: syscall(170, b"owned", 5))
attempt("set-domainname", lambda: syscall(171, b"owned", 5))
attempt("clock-settime", lambda: syscall(227, 0, struct.pack("qq", 1, 0)))
attempt("settimeofday", lambda: syscall(164, struct.pack("qq", 1, 0), 0))
attempt("clock-adjtime", lambda: syscall(305, 0, struct.pack("I", 0x4000) + bytes(300)))
attempt("fanotify-init", lambda: syscall(300, 0, 0))
attempt("lookup-dcookie", lambda: syscall(212, 0, ctypes.create_string_buffer(16), 16))
attempt("modify-ldt", lambda: syscall(154, 1, struct.pack("IIII", 0, 0, 0xFFFFF, 0x51), 16))
attempt("vhangup", lambda: syscall(153))
attempt_in_child("real-time-scheduling", lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)))
attempt_in_child("raise-priority", lambda: os.setpriority(os.PRIO_PROCESS, 0, -20))


def raise_hard_limit():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # The raw call: the module turns a refusal into another exception.
    syscall(160, resource.RLIMIT_NOFILE, struct.pack("QQ", soft, hard + 1))


attempt_in_child("raise-hard-limit", raise_hard_limit)


def listen_to_own_calls():
    """A second listener could answer the first one's questions."""
    code = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0x7FFF0000))  # return SECCOMP_RET_ALLOW
    return syscall(317, 1, 8, struct.pack("HxxxxxxQ", 1, ctypes.addressof(code)))


attempt_in_child("second-listener", listen_to_own_calls)
attempt_in_child("seccomp-off", lambda: syscall(157, 22, 0, 0, 0, 0))

# --- devices ---------------------------------------------------------------------------------------------------------

for place, folder in {"workspace": WORK, "tmp": "/tmp", "shm": "/dev/shm", "home": os.environ["HOME"]}.items():
    attempt("mknod-char-in-" + place, lambda: os.mknod(folder + "/node", 0o20666, os.makedev(1, 5)))
    attempt("mknod-block-in-" + place, lambda: os.mknod(folder + "/disk", 0o60666, os.makedev(254, 0)))
attempt("mknod-in-dev", lambda: os.mknod("/dev/node", 0o20666, os.makedev(1, 5)))
attempt("file-in-dev", lambda: opened_for_writing("/dev/planted", create=True))

# --- sockets ---------------------------------------------------------------------------------------------------------

SOCK_RAW, SOCK_DGRAM, SOCK_STREAM, SOCK_SEQPACKET = 3, 2, 1, 5
for name, family, kind, protocol in [
    ("raw-ip", 2, SOCK_RAW, 1), ("raw-ip6", 10, SOCK_RAW, 58), ("ping", 2, SOCK_DGRAM, 1), ("packet", 17, SOCK_RAW, 768),
    ("packet-dgram", 17, SOCK_DGRAM, 768), ("vsock", 40, SOCK_STREAM, 0), ("alg", 38, SOCK_SEQPACKET, 0),
    ("netlink-netfilter", 16, SOCK_RAW, 12), ("netlink-audit", 16, SOCK_RAW, 9), ("netlink-uevent", 16, SOCK_RAW, 15),
    ("netlink-generic", 16, SOCK_RAW, 16), ("netlink-diag", 16, SOCK_RAW, 4), ("netlink-xfrm", 16, SOCK_RAW, 6),
    ("netlink-crypto", 16, SOCK_RAW, 21), ("bluetooth", 31, SOCK_RAW, 1), ("key", 15, SOCK_RAW, 2), ("xdp", 44, SOCK_RAW, 0),
    ("tipc", 30, SOCK_STREAM, 0), ("can", 29, SOCK_RAW, 1), ("rds", 21, SOCK_SEQPACKET, 0), ("ax25", 3, SOCK_DGRAM, 0),
    ("appletalk", 5, SOCK_DGRAM, 0), ("x25", 9, SOCK_SEQPACKET, 0), ("llc", 26, SOCK_STREAM, 0), ("qrtr", 42, SOCK_DGRAM, 0),
    ("smc", 43, SOCK_STREAM, 0), ("sctp", 2, SOCK_STREAM, 132),
]:
    attempt("socket-" + name, lambda: os.close(syscall(41, family, kind, protocol)))


def stream_to(address, family=socket.AF_UNIX, kind=socket.SOCK_STREAM):
    with socket.socket(family, kind) as plug:
        plug.settimeout(2)
        plug.connect(address)


attempt("connect-abstract", lambda: stream_to("\0" + given["abstract"]))
for index, path in enumerate(given["sockets"]):
    attempt("connect-path-%d" % index, lambda: stream_to(path))
    attempt("connect-dgram-path-%d" % index, lambda: stream_to(path, kind=socket.SOCK_DGRAM))
attempt("connect-through-link", lambda: (os.symlink(given["sockets"][0], "link.sock"), stream_to("link.sock")))
attempt("connect-tcp-loopback", lambda: stream_to(("127.0.0.1", given["tcp_port"]), socket.AF_INET))
attempt("connect-tcp-mapped", lambda: stream_to(("::ffff:127.0.0.1", given["tcp_port"]), socket.AF_INET6))
attempt("connect-tcp-any", lambda: stream_to(("0.0.0.0", given["tcp_port"]), socket.AF_INET))
for index, address in enumerate(given["host_addresses"]):
    attempt("connect-tcp-host-%d" % index, lambda: stream_to((address, given["tcp_port"]), socket.AF_INET))
attempt("connect-tcp-outside", lambda: stream_to(("192.0.2.1", 80), socket.AF_INET))
attempt("connect-tcp-metadata", lambda: stream_to(("169.254.169.254", 80), socket.AF_INET))
attempt("connect-tcp6-outside", lambda: stream_to(("2001:db8::1", 80), socket.AF_INET6))


def datagram(address):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as plug:
        plug.sendto(b"x", address)


# Nothing may arrive at the host's port; whether the jail's own loopback takes the bytes is of no account.
def datagram_to_host():
    datagram(("127.0.0.1", given["udp_port"]))
    raise Refused("went to the jail's own loopback; the host's listener is the judge")


attempt("send-udp-loopback", datagram_to_host)
attempt("send-udp-outside", lambda: datagram(("192.0.2.1", 53)))
attempt("resolve-outside", lambda: socket.getaddrinfo("zq9outside.evil.test", 80))


def bring_up_link():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as plug:
        fcntl.ioctl(plug, 0x8914, struct.pack("16sH14x", b"lo", 0))  # SIOCSIFFLAGS


attempt("link-down", bring_up_link)


def netlink_add_address():
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as plug:
        plug.bind((0, 0))
        body = struct.pack("BBBBI", 2, 8, 0, 0, 1) + struct.pack("HH4B", 8, 2, 10, 9, 8, 7) + struct.pack("HH4B", 8, 1, 10, 9, 8, 7)
        plug.send(struct.pack("IHHII", 16 + len(body), 20, 0x605, 1, 0) + body)  # RTM_NEWADDR, create, ack
        answer = plug.recv(4096)
        code = -struct.unpack_from("i", answer, 16)[0]
        if code:
            raise OSError(code, os.strerror(code))


attempt("netlink-add-address", netlink_add_address)

# --- other processes' objects ----------------------------------------------------------------------------------------

attempt("sysv-shm-of-host", lambda: syscall(29, given["sysv_key"], 0, 0))
attempt("sysv-sem-of-host", lambda: syscall(64, given["sysv_key"], 0, 0))
attempt("sysv-msg-of-host", lambda: syscall(68, given["sysv_key"], 0))
for name in ("shm", "sem", "msg"):
    def listed(name=name):
        lines = read("/proc/sysvipc/" + name).splitlines()
        if len(lines) < 2:
            raise Refused("none is listed")
        return lines[1]
    attempt("sysv-list-" + name, listed)
attempt("posix-shm-of-host", lambda: read("/dev/shm/" + given["shm_name"]))
attempt("posix-queue-of-host", lambda: syscall(240, given["queue_name"].encode(), os.O_RDONLY, 0, 0))
attempt("host-tmp-file", lambda: read(given["tmp_file"]))

# --- files -----------------------------------------------------------------------------------------------------------

for name, path in {
    "etc": "/etc/planted", "usr": "/usr/planted", "usr-bin": "/usr/bin/planted", "root": "/planted", "proc": "/proc/planted",
    "run": "/run/planted", "run-ours": "/run/tollgate/planted", "client": "/run/tollgate/bin/tollgate", "var-tmp": "/var/tmp/planted",
    "out": OUT + "/planted", "caller-home": given["home"] + "/planted", "passwd": "/etc/passwd",
    "resolver": "/etc/resolv.conf", "etc-hosts": "/etc/hosts",
}.items():
    attempt("plant-in-" + name, lambda: opened_for_writing(path, create=True))
attempt("rename-workspace", lambda: os.rename(WORK, WORK + ".away"))
attempt("chmod-usr", lambda: os.chmod("/usr", 0o777))
attempt("chmod-root", lambda: os.chmod("/", 0o777))
attempt("unlink-socket-of-ours", lambda: os.unlink("/run/tollgate/broker.sock"))
attempt("link-outside-file", lambda: os.link("/etc/passwd", "hard"))
attempt("dot-dot-sentinel", lambda: read_sentinel("../out/s"))
attempt("link-to-outside", lambda: (os.symlink(OUT + "/s", "soft"), read_sentinel("soft")))
attempt("proc-fd-magic", lambda: read_sentinel("/proc/self/fd/../../../.." + OUT + "/s"))
attempt("set-immutable", lambda: fcntl.ioctl(os.open("mine", os.O_RDONLY), 0x40086602, struct.pack("l", 0x10)))
attempt("trusted-attribute", lambda: os.setxattr("mine", "trusted.x", b"1"))
attempt("overlay-attribute", lambda: os.setxattr("mine", "trusted.overlay.opaque", b"y"))
attempt("user-overlay-redirect", lambda: os.setxattr(WORK + "/m", "user.overlay.redirect", OUT.encode()))
attempt("user-overlay-opaque", lambda: os.setxattr(WORK + "/m", "user.overlay.opaque", b"y"))
attempt("security-capability", lambda: os.setxattr("mine", "security.capability", struct.pack("<IIIII", 0x2000001, 0x200000, 0, 0, 0)))
end()
