//! Starts the shim and talks to it.

use nix::sys::{
    memfd::{memfd_create, MFdFlags},
    socket::{socketpair, AddressFamily, SockFlag, SockType},
};
use std::{
    fs::File,
    io::{self, Write},
    net::{TcpListener, UdpSocket},
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::process::CommandExt,
    },
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};
use tollgate_shim::{
    channel,
    protocol::{FromShim, Plan, ToShim, Way},
};

/// The environment variable that names the shim's file when it is not beside `tollgate`.
pub const SHIM_VARIABLE: &str = "TOLLGATE_SHIM";

/// A jail's network as its shim made it: the two ways by which the program's traffic reaches the supervisor.
#[derive(Debug)]
pub struct NetworkSockets {
    /// How connections are taken, and so how to learn where one was going.
    pub way: Way,
    /// Whether datagrams that were dropped have a receipt.
    pub told: bool,
    /// Where the program's connections arrive: one with [`Way::Redirect`].
    pub listeners: Vec<TcpListener>,
    /// Where the program's name lookups arrive.
    pub names: UdpSocket,
}

impl NetworkSockets {
    /// From what came attached to [`FromShim::Network`].
    ///
    /// # Errors
    /// When it is not what that message promises: a bug of ours, or another version's shim.
    pub fn adopt(way: Way, told: bool, attached: Vec<OwnedFd>) -> io::Result<NetworkSockets> {
        let mut attached = attached;
        let names = attached.pop().filter(|_| !attached.is_empty());
        let names = names.ok_or_else(|| io::Error::other("the shim sent no sockets with its network"))?;
        let listeners = attached.into_iter().map(TcpListener::from).collect();
        Ok(NetworkSockets { way, told, listeners, names: UdpSocket::from(names) })
    }
}

/// A running shim: its process and the supervisor's end of the control socket.
pub struct Shim {
    /// The outer process, which ends after every process of the jail has.
    pub child: Child,
    control: OwnedFd,
}

/// The shim's file: `$TOLLGATE_SHIM`, else beside this program.
///
/// # Errors
/// When there is no such file, naming it.
pub fn find_shim() -> io::Result<PathBuf> {
    let path = match std::env::var_os(SHIM_VARIABLE) {
        Some(path) => PathBuf::from(path),
        None => std::env::current_exe()?.with_file_name("tollgate-shim"),
    };
    match path.is_file() {
        true => path.canonicalize(),
        false => Err(io::Error::new(
            io::ErrorKind::NotFound,
            format!("{} is missing: it belongs beside `tollgate`, or {SHIM_VARIABLE} names it", path.display()),
        )),
    }
}

/// Bubblewrap's file, from the caller's PATH.
pub fn find_bwrap(path: &std::ffi::OsStr) -> Option<PathBuf> {
    std::env::split_paths(path).map(|directory| directory.join("bwrap")).find(|candidate| candidate.is_file())
}

/// Starts the shim, which waits for [`Shim::begin`].
pub fn spawn(shim: &Path) -> io::Result<Shim> {
    let (control, far) = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC)?;
    let child = Command::new(shim)
        .arg0("tollgate-shim")
        .arg("--outer")
        .env_clear()
        .current_dir("/")
        // The control socket travels as standard input: the one descriptor that a spawn passes on by itself.
        .stdin(Stdio::from(far))
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()?;
    Ok(Shim { child, control })
}

impl Shim {
    /// Hands over the plan and the program's standard streams.
    pub fn begin(&self, plan: &Plan, streams: [BorrowedFd; 3]) -> io::Result<()> {
        let mut file = File::from(memfd_create(c"plan", MFdFlags::MFD_CLOEXEC)?);
        file.write_all(&serde_json::to_vec(plan)?)?;
        let [input, output, error] = streams;
        channel::send(self.control.as_fd(), &ToShim::Begin, &[file.as_fd(), input, output, error])
    }

    /// What the shim, or bubblewrap in its place, wrote to its standard error; the last of it, in one line.
    ///
    /// Call it when the process has ended.
    pub fn complaint(&mut self) -> Option<String> {
        use std::io::Read;
        const MOST: u64 = 4096;
        let mut text = Vec::new();
        self.child.stderr.take()?.take(MOST).read_to_end(&mut text).ok()?;
        let text = String::from_utf8_lossy(&text);
        text.lines().map(str::trim).rfind(|line| !line.is_empty()).map(str::to_owned)
    }

    /// Sends one message.
    pub fn tell(&self, message: &ToShim) -> io::Result<()> {
        channel::send(self.control.as_fd(), message, &[])
    }

    /// Waits for the next message; none when the jail is gone.
    pub fn hear(&self) -> io::Result<Option<(FromShim, Vec<OwnedFd>)>> {
        channel::receive(self.control.as_fd())
    }

    /// A second owner of the control socket, to listen on from another thread.
    pub fn listener(&self) -> io::Result<ShimListener> {
        Ok(ShimListener { control: self.control.try_clone()? })
    }

    /// A second owner of the control socket, to answer on from another thread.
    pub fn speaker(&self) -> io::Result<ShimSpeaker> {
        Ok(ShimSpeaker { control: self.control.try_clone()? })
    }

    /// Closes the supervisor's end: the jail's pid 1 ends, and everything with it.
    pub fn close(&self) {
        use nix::sys::socket::{shutdown, Shutdown};
        use std::os::fd::AsRawFd;
        // A socket that is closed already says so, which is as good.
        let _ = shutdown(self.control.as_raw_fd(), Shutdown::Both);
    }
}

/// The speaking half of a [`Shim`].
pub struct ShimSpeaker {
    control: OwnedFd,
}

impl ShimSpeaker {
    /// As [`Shim::tell`].
    pub fn tell(&self, message: &ToShim) -> io::Result<()> {
        channel::send(self.control.as_fd(), message, &[])
    }
}

/// The listening half of a [`Shim`].
pub struct ShimListener {
    control: OwnedFd,
}

impl ShimListener {
    /// As [`Shim::hear`].
    pub fn hear(&self) -> io::Result<Option<(FromShim, Vec<OwnedFd>)>> {
        channel::receive(self.control.as_fd())
    }
}

impl AsFd for ShimListener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.control.as_fd()
    }
}
