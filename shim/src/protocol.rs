//! What supervisor and shim say to each other.
//!
//! The supervisor starts the shim with a `SOCK_SEQPACKET` Unix socket as its standard input. It sends one [`Plan`] as a sealed memory file attached to a [`ToShim::Begin`] message; after that, each side sends
//! JSON messages, one a packet. When the supervisor's end closes, for whatever reason, pid 1 of the jail exits and
//! the kernel ends every process of the jail with it.

use serde::{Deserialize, Serialize};
use std::{
    ffi::OsString,
    net::{IpAddr, Ipv4Addr},
    os::unix::ffi::OsStringExt,
    path::PathBuf,
};

/// The descriptor on which a shim that bubblewrap executes finds its control socket.
pub const CONTROL_FD: i32 = 3;

/// The longest message either side sends, in bytes. A longer one is a bug of ours and is refused.
pub const MAX_MESSAGE: usize = 64 * 1024;

/// Where a jail with a network asks for names, on port 53: the first address of the range that is set aside for
/// measurements (RFC 2544, RFC 6890), which no host of the outside has.
pub const NAME_SERVER: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 1);

/// Bytes that are usually text: a path, an argument, a variable. JSON holds them as a string where they are UTF-8
/// and as hexadecimal digits where they are not, so no name is ever changed on the way. A list of numbers would take ten
/// times as long to read, and some files of a view are long.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Bytes {
    /// UTF-8.
    Text(String),
    /// Anything else.
    Raw {
        /// The bytes.
        #[serde(with = "hex::serde")]
        hex: Vec<u8>,
    },
}

impl Bytes {
    /// The bytes as an operating-system string.
    pub fn to_os(&self) -> OsString {
        match self {
            Bytes::Text(text) => OsString::from(text),
            Bytes::Raw { hex } => OsString::from_vec(hex.clone()),
        }
    }

    /// The bytes as a path.
    pub fn to_path(&self) -> PathBuf {
        PathBuf::from(self.to_os())
    }
}

impl<T: Into<OsString>> From<T> for Bytes {
    fn from(value: T) -> Bytes {
        let raw: OsString = value.into();
        match raw.into_string() {
            Ok(text) => Bytes::Text(text),
            Err(raw) => Bytes::Raw { hex: raw.into_vec() },
        }
    }
}

impl std::fmt::Debug for Bytes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}", self.to_os())
    }
}

/// The jail, as data: what is to be built, in order. Printed by `tollgate inspect`, tested as an ordinary user.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    /// The run's id, which is also the jail's host name.
    pub run: String,
    /// Who the program is, outside and inside.
    pub ids: Ids,
    /// The view, in the order in which it is mounted.
    pub mounts: Vec<Mount>,
    /// The environment, whole: nothing is inherited.
    pub env: Vec<(Bytes, Bytes)>,
    /// The working directory, inside.
    pub cwd: Bytes,
    /// The argument vector. The first is looked up on the jail's own `PATH` unless it holds a slash.
    pub command: Vec<Bytes>,
    /// Resource limits, each `RLIMIT_` number with its soft and hard value (setrlimit(2)).
    pub rlimits: Vec<(u32, u64, u64)>,
    /// Whether the program gets a terminal of its own, and on which of its first three descriptors.
    pub terminal: Option<Terminal>,
    /// The seccomp filters, in the order in which they are installed.
    pub filters: Vec<Filter>,
    /// What happens to each watched system call.
    pub watch: Watch,
    /// Whether a layer that the kernel lacks may be left out.
    pub enforcement: Enforcement,
    /// Who makes namespaces and mounts.
    pub launcher: Launcher,
    /// The workspace's path inside, whose directory is handed to the supervisor.
    pub workspace: Bytes,
    /// The network that leads to the supervisor; none is a loopback and nothing else.
    #[serde(default)]
    pub network: Option<Network>,
    /// Layers to leave out. Only test builds of the shim obey it; others refuse a plan that names one.
    pub without: Vec<Layer>,
}

/// A network whose every connection and name lookup reaches the supervisor.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Network {
    /// Ports of the loopback whose connections reach the supervisor instead of the jail's own servers.
    pub host_ports: Vec<u16>,
    /// Ports that are listened on where connections cannot be redirected: those that the policy names.
    pub ports: Vec<u16>,
}

/// How the connections of a jail with a network are taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Way {
    /// All of them, by a redirection of nf_tables. Where one was going is asked of its socket (`SO_ORIGINAL_DST`).
    Redirect,
    /// Those to the ports that the plan names, each by a listener of its own. Where one was going is its own address
    /// (getsockname(2)). Connections to other ports are refused by the kernel (ECONNREFUSED), and no datagram is told.
    Ports,
}

/// Who makes namespaces and mounts. Everything after them is the same.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "launcher")]
pub enum Launcher {
    /// The shim itself.
    Native,
    /// Bubblewrap, this program, from the same mounts.
    Bwrap {
        /// The program's path on the host.
        program: Bytes,
    },
}

/// A layer of the jail, for tests that take one out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Layer {
    /// Landlock.
    Landlock,
    /// The seccomp filters.
    Seccomp,
    /// Emptied capability sets.
    Capabilities,
    /// The private root.
    Mounts,
    /// The process-id namespace.
    Pid,
    /// The network namespace.
    Network,
    /// The IPC namespace.
    Ipc,
    /// Closing every descriptor but the documented ones.
    Descriptors,
    /// The environment list.
    Environment,
    /// The terminal of its own.
    Terminal,
    /// Resource limits.
    Rlimits,
    /// The redirection of connections, as on a kernel without nf_tables.
    Redirect,
}

/// Who the program is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ids {
    /// The user and group on the host that the jail runs as. Never 0.
    pub host_uid: u32,
    /// See `host_uid`.
    pub host_gid: u32,
    /// What the program sees as its own user id.
    pub jail_uid: u32,
    /// What the program sees as its own group id.
    pub jail_gid: u32,
    /// For a privileged caller: the ids on the host whose files the program is to see as its own. The views are then
    /// mapped (mount_setattr(2), `MOUNT_ATTR_IDMAP`) and the shim changes its own ids before anything else.
    pub owner: Option<(u32, u32)>,
}

/// One step of building the view. Paths inside are absolute; sources are paths on the host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "mount")]
pub enum Mount {
    /// A host path, shown as it is (`--ro-bind`, `--bind`). With `optional`, a missing source is no error.
    Bind {
        /// The path on the host.
        source: Bytes,
        /// The absolute path in the view.
        target: Bytes,
        /// Whether the program may write there.
        access: Access,
        /// Whether a missing source is left out instead of an error.
        optional: bool,
    },
    /// A host directory shown read-only through an overlay, so that its sockets and pipes lead nowhere.
    View {
        /// The path on the host.
        source: Bytes,
        /// The absolute path in the view.
        target: Bytes,
        /// Whether a missing source is left out instead of an error.
        optional: bool,
    },
    /// A host directory whose changes go to `upper`. `work` is overlayfs's scratch directory beside it.
    Overlay {
        /// The host directory that is shown.
        lower: Bytes,
        /// The host directory that takes the changes.
        upper: Bytes,
        /// Overlayfs's scratch directory, on the file system of `upper`.
        work: Bytes,
        /// The absolute path in the view.
        target: Bytes,
    },
    /// A fresh /proc.
    Proc {
        /// The absolute path in the view.
        target: Bytes,
    },
    /// A minimal /dev: null, zero, full, random, urandom, tty, a devpts and a shm of its own.
    Dev {
        /// The absolute path in the view.
        target: Bytes,
        /// The most that /dev/shm holds, in bytes.
        shm_bytes: u64,
    },
    /// A private, bounded, empty file system.
    Tmpfs {
        /// The absolute path in the view.
        target: Bytes,
        /// The most that it holds, in bytes.
        bytes: u64,
        /// Its permission bits.
        mode: u32,
    },
    /// A directory of the private root.
    Dir {
        /// The absolute path in the view.
        target: Bytes,
        /// Its permission bits.
        mode: u32,
    },
    /// A file of the private root with this content.
    File {
        /// The absolute path in the view.
        target: Bytes,
        /// Its content.
        content: Bytes,
        /// Its permission bits.
        mode: u32,
    },
    /// A symbolic link of the private root.
    Symlink {
        /// The absolute path in the view.
        target: Bytes,
        /// What the link says, as it is.
        to: Bytes,
    },
    /// An empty, unreadable stand-in over something that exists.
    Mask {
        /// The absolute path in the view.
        target: Bytes,
        /// What is there.
        over: Masked,
    },
}

/// What a mask lies over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Masked {
    /// A directory.
    Directory,
    /// Anything else.
    File,
}

/// Whether a view can be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Access {
    /// Read-only.
    ReadOnly,
    /// Writable.
    ReadWrite,
}

/// A terminal for the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Terminal {
    /// Which of descriptors 0, 1 and 2 are the terminal; the others are pipes.
    pub on: [bool; 3],
    /// Rows and columns at the start.
    pub rows: u16,
    /// See `rows`.
    pub columns: u16,
}

/// A compiled seccomp filter.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Filter {
    /// The instructions, each a `struct sock_filter` as a little-endian 64-bit number (linux/filter.h).
    pub instructions: Vec<u64>,
    /// Whether the filter sends what it does not allow to the shim (`SECCOMP_FILTER_FLAG_NEW_LISTENER`). One at most.
    pub listener: bool,
}

/// What the shim does with the system calls that the listening filter sends it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Watch {
    /// Numbers of calls that are let through after a look at their path or address.
    pub observed: Vec<i64>,
    /// Every other call is answered with this error number, ENOSYS for a call that an old kernel lacks.
    pub refused_with: i32,
    /// What the supervisor is asked about before the kernel goes on with it; empty for nothing, which costs nothing.
    #[serde(default)]
    pub asked: Vec<Asking>,
}

/// What a call that waits for the supervisor's answer would do. Files are those of the workspace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Asking {
    /// Open a file for reading.
    Read,
    /// Open a directory.
    List,
    /// Open a file for writing, make something, or change attributes.
    Write,
    /// Delete.
    Delete,
    /// Rename.
    Move,
    /// Execute a file, of the workspace or not.
    Execute,
    /// Connect to something outside the jail.
    Connect,
}

/// A call that waits for the supervisor's answer.
///
/// It is asked about only when a look at it says that the kernel would do it. The look can be deceived by another
/// thread of the program, so the answer is what the program sees, and never a wall.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Asked {
    /// By which the answer finds it.
    pub id: u64,
    /// The system call's number.
    pub syscall: i64,
    /// What it would do.
    pub wanted: Asking,
    /// The path, absolute inside the jail and without links; the address for a socket.
    pub object: Bytes,
    /// The path that a rename leads to.
    pub to: Option<Bytes>,
    /// For a connection: the error number that it is going to have.
    pub refused_with: Option<i32>,
    /// The process inside the jail.
    pub pid: u32,
    /// Its command name.
    pub comm: Bytes,
}

/// Whether a layer may be missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Enforcement {
    /// Every layer or no run.
    Strict,
    /// What the kernel has; what it lacks is said in every receipt of the run.
    BestEffort,
}

/// From supervisor to shim.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "to")]
pub enum ToShim {
    /// Build the jail. Attached: the plan's memory file, then the program's three standard descriptors (those that
    /// are the terminal are /dev/null here).
    Begin,
    /// The workspace's copy is in `mirror` beside the upper layer: show that.
    Copied,
    /// Execute the program: the view stands, and that it starts is on disk.
    Execute,
    /// Send this signal to the program's process group.
    Signal {
        /// Its number.
        number: i32,
    },
    /// The terminal is in the foreground again: continue the stopped program.
    Continue,
    /// Connect to a port of the jail's loopback, for somebody outside: answered by [`FromShim::Dialled`].
    Dial {
        /// Which connection.
        id: u64,
        /// The address, one of the loopback's.
        address: IpAddr,
        /// The port.
        port: u16,
    },
    /// What a waiting call gets.
    Answer {
        /// Which call.
        id: u64,
        /// This error number; none lets the kernel go on with the call as it stands.
        errno: Option<i32>,
    },
}

/// From shim to supervisor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "from")]
pub enum FromShim {
    /// A step failed; nothing was executed.
    StepFailed(StepFailed),
    /// A layer is missing and the plan says best effort.
    Degraded {
        /// The layer's name.
        layer: String,
        /// Why it is missing.
        reason: String,
    },
    /// The kernel refuses an overlay over the workspace, and a copy is wanted instead: answered by [`ToShim::Copied`].
    OverlayRefused {
        /// The object, the call and the error.
        reason: String,
    },
    /// The network stands, which comes before the view does. Attached: the TCP listeners, of which [`Way::Redirect`]
    /// has one, then the UDP socket that names are asked of.
    Network {
        /// How connections are taken.
        way: Way,
        /// Whether datagrams that were dropped are told ([`FromShim::Denied`]).
        told: bool,
    },
    /// The view stands. Attached: the workspace's directory as the program sees it (`O_PATH`), then the terminal's
    /// master end if there is one.
    Built {
        /// Whether the workspace's directory is attached.
        workspace: bool,
        /// Whether the terminal's master end is attached.
        terminal: bool,
    },
    /// The program was executed; its id inside the jail.
    Started {
        /// Its process id inside the jail.
        pid: u32,
    },
    /// The program could not be executed: 126 or 127 follows from the error number.
    ExecFailed {
        /// The error number of execve(2).
        errno: i32,
        /// The path that was to be executed.
        path: Bytes,
    },
    /// One of the jail's layers refused something.
    Denied(Denied),
    /// A call waits for an answer. Others go on meanwhile.
    Asked(Asked),
    /// The connection that [`ToShim::Dial`] asked for. Attached: its socket, which connects and does not block, unless
    /// that failed at once.
    Dialled {
        /// Which connection.
        id: u64,
        /// The error number of connect(2), if it failed.
        errno: Option<i32>,
    },
    /// The program stopped (terminal job control).
    Stopped {
        /// Number of the signal that stopped it.
        signal: i32,
    },
    /// The program ended.
    Exited {
        /// Its exit status, if it exited.
        code: Option<i32>,
        /// Number of the signal that ended it, if one did.
        signal: Option<i32>,
    },
}

/// Why a jail could not be built.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("step \"{step}\": {object}: {call}: {}", std::io::Error::from_raw_os_error(*.errno))]
pub struct StepFailed {
    /// The step's name.
    pub step: String,
    /// What it was about: a path, an id, a limit.
    pub object: String,
    /// The kernel call.
    pub call: String,
    /// Its error number.
    pub errno: i32,
    /// What to do about it; may be empty.
    pub remedy: String,
}

/// Something a layer of the jail refused.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Denied {
    /// The system call's number.
    pub syscall: i64,
    /// What it wanted.
    pub access: Wanted,
    /// The path, absolute inside the jail with its links resolved as far as they exist; the address for a socket;
    /// empty for a system call outside the list.
    pub object: Bytes,
    /// The error number the program got.
    pub errno: i32,
    /// The process inside the jail.
    pub pid: u32,
    /// Its command name.
    pub comm: Bytes,
    /// How often, since the last report of the same.
    pub times: u64,
}

/// What a refused call wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Wanted {
    /// To read a path.
    Read,
    /// To change a path.
    Write,
    /// To delete a path.
    Delete,
    /// To execute a path.
    Execute,
    /// To connect a socket.
    Connect,
    /// A system call outside the list.
    Syscall,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_arrive_as_they_were_sent_text_or_not() {
        for raw in [&b"/plain"[..], b"", b"/not \xff text", b"{\"hex\":\"00\"}"] {
            let sent = Bytes::from(OsString::from_vec(raw.to_vec()));
            let received: Bytes = serde_json::from_slice(&serde_json::to_vec(&sent).unwrap()).unwrap();
            assert_eq!(received.to_os(), OsString::from_vec(raw.to_vec()));
        }
    }
}
