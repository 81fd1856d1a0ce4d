//! Observers outside the jail: trees, processes, mounts, control groups, listeners.

use std::{
    collections::{hash_map::DefaultHasher, BTreeMap},
    fs,
    hash::Hasher,
    io::Read,
    os::{
        linux::net::SocketAddrExt,
        unix::{
            fs::{MetadataExt, PermissionsExt},
            net::{SocketAddr, UnixListener},
        },
    },
    path::{Path, PathBuf},
    sync::{
        atomic::{AtomicBool, AtomicUsize, Ordering},
        Arc,
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

/// Larger files are compared by size and allocated blocks alone: reading a sparse file of gigabytes proves no more.
const HASHED_UP_TO: u64 = 64 * 1024 * 1024;

/// Everything below a folder: kind, mode, owner, modification time, inode, size, blocks and content.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    entries: BTreeMap<PathBuf, String>,
}

impl Snapshot {
    /// Looks at every entry below `root`, and at `root` itself as `.`.
    pub fn of(root: &Path) -> Snapshot {
        let mut entries = BTreeMap::new();
        collect(root, Path::new("."), &mut entries);
        Snapshot { entries }
    }

    /// The names of entries that differ, appeared or vanished.
    pub fn differences(&self, after: &Snapshot) -> Vec<String> {
        let mut found = Vec::new();
        for (path, entry) in &self.entries {
            match after.entries.get(path) {
                None => found.push(format!("- {}", path.display())),
                Some(other) if other != entry => found.push(format!("~ {}: {entry} -> {other}", path.display())),
                Some(_) => {}
            }
        }
        found.extend(
            after
                .entries
                .keys()
                .filter(|path| !self.entries.contains_key(*path))
                .map(|path| format!("+ {}", path.display())),
        );
        found
    }

    /// Only the paths that differ, appeared or vanished, sorted.
    pub fn changed_paths(&self, after: &Snapshot) -> Vec<String> {
        let mut paths: Vec<String> = self
            .entries
            .iter()
            .filter(|(path, entry)| after.entries.get(*path) != Some(entry))
            .map(|(path, _)| path.display().to_string())
            .chain(
                after
                    .entries
                    .keys()
                    .filter(|path| !self.entries.contains_key(*path))
                    .map(|path| path.display().to_string()),
            )
            .map(|path| path.trim_start_matches("./").to_owned())
            .collect();
        paths.sort();
        paths
    }

    /// Fails unless nothing differs.
    #[track_caller]
    pub fn assert_same(&self, after: &Snapshot) {
        let differences = self.differences(after);
        assert!(differences.is_empty(), "the tree changed:\n{}", differences.join("\n"));
    }
}

fn collect(path: &Path, relative: &Path, into: &mut BTreeMap<PathBuf, String>) {
    let meta = match fs::symlink_metadata(path) {
        Ok(meta) => meta,
        Err(error) => {
            into.insert(relative.to_path_buf(), format!("{error}"));
            return;
        }
    };
    let content = if meta.is_symlink() {
        format!("-> {}", fs::read_link(path).map(|target| target.display().to_string()).unwrap_or_default())
    } else if meta.is_file() && meta.size() <= HASHED_UP_TO {
        format!("{:016x}", hash_file(path))
    } else {
        String::new()
    };
    // A directory's size and blocks are the file system's business.
    let (size, blocks) = if meta.is_dir() { (0, 0) } else { (meta.size(), meta.blocks()) };
    into.insert(
        relative.to_path_buf(),
        format!(
            "mode {:o} owner {}:{} mtime {}.{:09} inode {} size {size} blocks {blocks} {content}",
            meta.mode(),
            meta.uid(),
            meta.gid(),
            meta.mtime(),
            meta.mtime_nsec(),
            meta.ino()
        ),
    );
    if meta.is_dir() {
        if let Ok(children) = fs::read_dir(path) {
            for child in children.flatten() {
                collect(&child.path(), &relative.join(child.file_name()), into);
            }
        }
    }
}

fn hash_file(path: &Path) -> u64 {
    let mut hasher = DefaultHasher::new();
    let Ok(mut file) = fs::File::open(path) else { return 0 };
    let mut buffer = vec![0; 64 * 1024];
    while let Ok(count) = file.read(&mut buffer) {
        if count == 0 {
            break;
        }
        hasher.write(&buffer[..count]);
    }
    hasher.finish()
}

/// Gives the owner back every permission on the folders below, so that they can be removed.
pub fn make_removable(root: &Path) {
    let Ok(meta) = fs::symlink_metadata(root) else { return };
    if !meta.is_dir() {
        return;
    }
    let _ = fs::set_permissions(root, fs::Permissions::from_mode(0o700));
    for child in fs::read_dir(root).into_iter().flatten().flatten() {
        make_removable(&child.path());
    }
}

/// A process on the host.
#[derive(Clone, Debug)]
pub struct Process {
    /// Its id on the host.
    pub pid: i32,
    /// Its command line, words parted by spaces.
    pub command: String,
    /// Its status file, as in proc_pid_status(5).
    pub status: String,
}

impl Process {
    /// A line of its status file, without the name and the white space before it.
    pub fn field(&self, name: &str) -> Option<&str> {
        self.status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim)
    }
}

/// Every process on the host whose command line, environment, working directory or mounts name `text`, but this one.
///
/// The mounts find what runs in a jail and names nothing itself, as the jail's first process.
pub fn processes_naming(text: &str) -> Vec<Process> {
    let own = std::process::id().to_string();
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let Ok(pid) = name.parse::<i32>() else { continue };
        if name == own {
            continue;
        }
        let read = |file: &str| {
            String::from_utf8_lossy(&fs::read(entry.path().join(file)).unwrap_or_default()).replace('\0', " ")
        };
        let command = read("cmdline");
        let cwd = fs::read_link(entry.path().join("cwd")).unwrap_or_default();
        let names = |found: &str| found.contains(text);
        // Only a jail's mounts say whose it is: any other namespace holds a copy of whatever the host had mounted when
        // it was made, the folder of another test among it.
        let mounts = read("mountinfo");
        let jailed = mounts.contains(" /run/tollgate/broker.sock ") && names(&mounts);
        if names(&command) || names(&cwd.to_string_lossy()) || names(&read("environ")) || jailed {
            let status = read("status");
            // A zombie holds nothing any more; it waits for its parent, which may be the test itself.
            if !status.lines().any(|line| line.starts_with("State:") && line.contains('Z')) && !status.is_empty() {
                found.push(Process { pid, command, status });
            }
        }
    }
    found
}

/// The host's mounts, a line each.
pub fn mounts() -> Vec<String> {
    fs::read_to_string("/proc/self/mountinfo").expect("/proc is mounted").lines().map(str::to_owned).collect()
}

/// Folders of control group hierarchies whose path contains `text`.
pub fn control_groups(text: &str) -> Vec<String> {
    fn walk(folder: &Path, text: &str, depth: usize, found: &mut Vec<String>) {
        if depth == 0 {
            return;
        }
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                let path = entry.path();
                if path.to_string_lossy().contains(text) {
                    found.push(path.display().to_string());
                }
                walk(&path, text, depth - 1, found);
            }
        }
    }
    let mut found = Vec::new();
    walk(Path::new("/sys/fs/cgroup"), text, 7, &mut found);
    found
}

/// Waits until something holds, and fails with `what` when it does not in time.
#[track_caller]
pub fn wait_until(what: &str, within: Duration, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + within;
    while !holds() {
        assert!(Instant::now() < deadline, "not within {within:?}: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A Unix socket on the host that counts who connects.
pub struct Listener {
    accepted: Arc<AtomicUsize>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Listener {
    /// Listens on a path, which anyone may connect to.
    pub fn at_path(path: &Path) -> Listener {
        let listener = UnixListener::bind(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        fs::set_permissions(path, fs::Permissions::from_mode(0o777)).expect("our own socket");
        Listener::serve(listener)
    }

    /// Listens on an abstract name.
    pub fn at_name(name: &str) -> Listener {
        let address = SocketAddr::from_abstract_name(name).expect("a short name");
        Listener::serve(UnixListener::bind_addr(&address).unwrap_or_else(|error| panic!("@{name}: {error}")))
    }

    fn serve(listener: UnixListener) -> Listener {
        listener.set_nonblocking(true).expect("our own socket");
        Listener::count(move || listener.accept().is_ok())
    }

    /// Listens on a free loopback TCP port, and returns the port.
    pub fn at_port() -> (Listener, u16) {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("the host has a loopback");
        let port = listener.local_addr().expect("bound").port();
        listener.set_nonblocking(true).expect("our own socket");
        (Listener::count(move || listener.accept().is_ok()), port)
    }

    /// Receives on a free loopback UDP port, and returns the port.
    pub fn at_udp_port() -> (Listener, u16) {
        let socket = std::net::UdpSocket::bind("127.0.0.1:0").expect("the host has a loopback");
        let port = socket.local_addr().expect("bound").port();
        socket.set_nonblocking(true).expect("our own socket");
        (Listener::count(move || socket.recv(&mut [0; 64]).is_ok()), port)
    }

    fn count(mut arrived: impl FnMut() -> bool + Send + 'static) -> Listener {
        let (accepted, stop) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
        let (count, ended) = (Arc::clone(&accepted), Arc::clone(&stop));
        let thread = std::thread::spawn(move || {
            while !ended.load(Ordering::Relaxed) {
                if arrived() {
                    count.fetch_add(1, Ordering::Relaxed);
                } else {
                    std::thread::sleep(Duration::from_millis(2));
                }
            }
        });
        Listener { accepted, stop, thread: Some(thread) }
    }

    /// How many connected so far.
    pub fn accepted(&self) -> usize {
        // One turn of the serving thread, so that a connection made just now is counted.
        std::thread::sleep(Duration::from_millis(20));
        self.accepted.load(Ordering::Relaxed)
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
