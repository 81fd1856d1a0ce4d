//! Measuring a run without a control group: its process tree from `/proc`, and its layer of the workspace from disk.
//!
//! Both are samples: what happens between two of them is bounded by what the tree can do in that time, and whoever
//! uses them says so. Nothing here kills or decides.

use nix::{
    dir::Dir,
    errno::Errno,
    fcntl::{openat2, AtFlags, OFlag, OpenHow, ResolveFlag},
    sys::stat::{fstat, fstatat, FileStat, Mode},
    unistd::Pid,
};
use std::{
    collections::{HashMap, HashSet},
    ffi::{CString, OsString},
    fs,
    os::{fd::AsFd, unix::ffi::OsStringExt},
    path::{Path, PathBuf},
};

/// From this share of the limit on, in percent, memory is measured exactly instead of by the cheap upper bound.
const EXACT_FROM_PERCENT: u64 = 75;

/// How deeply directories may be nested in a run's layer. Real trees stay under 64; a deeper one than this is taken for
/// an attempt to hide.
pub const DEPTH_MAX: usize = 3_200;

/// Every so many levels a descriptor is held open while a layer is measured, and what lies between is found by its path
/// from there: so many names of 255 bytes fit a path (PATH_MAX, limits.h), and a tree of the greatest depth takes a
/// fifth of the descriptors that a process usually has.
const ANCHOR_EVERY: usize = 15;

/// One look at a process tree.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sample {
    /// Memory in bytes, shared pages counted once: the sum of proportional set sizes where the resident sum is near
    /// the limit, the resident sum, which is never less, otherwise.
    pub memory: u64,
    /// Processor time in microseconds, ended children included. Never decreases from one sample to the next.
    pub cpu_us: u64,
    /// Processes and threads.
    pub tasks: u64,
}

/// Watches one process and everything that descends from it.
///
/// Orphans of a jail become children of its pid 1, which descends from the root, so nobody leaves the tree.
#[derive(Debug)]
pub struct TreeWatch {
    root: Pid,
    page_bytes: u64,
    tick_us: u64,
    /// Processor ticks of each live process when last seen, by pid and start time.
    seen: HashMap<(i32, u64), u64>,
    /// Ticks of processes that have vanished, as last seen.
    vanished: u64,
    cpu_us: u64,
}

/// What `/proc/PID/stat` says (proc_pid_stat(5)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stat {
    parent: i32,
    own_ticks: u64,
    children_ticks: u64,
    threads: u64,
    started: u64,
    resident_pages: u64,
}

impl TreeWatch {
    /// A watch over `root` and its descendants.
    pub fn new(root: Pid) -> TreeWatch {
        use nix::unistd::{sysconf, SysconfVar};
        let setting = |which, usual: i64| {
            sysconf(which).ok().flatten().and_then(|value| u64::try_from(value).ok()).unwrap_or(usual.unsigned_abs())
        };
        TreeWatch {
            root,
            page_bytes: setting(SysconfVar::PAGE_SIZE, 4096),
            tick_us: 1_000_000 / setting(SysconfVar::CLK_TCK, 100).max(1),
            seen: HashMap::new(),
            vanished: 0,
            cpu_us: 0,
        }
    }

    /// Looks once. `memory_limit` decides how exactly memory is measured.
    pub fn sample(&mut self, memory_limit: Option<u64>) -> Sample {
        let tree = descendants(self.root);
        let mut sample = Sample::default();
        let mut seen = HashMap::with_capacity(tree.len());
        let mut own = 0_u64;
        let mut with_children = 0_u64;
        for (pid, stat) in &tree {
            sample.tasks += stat.threads;
            sample.memory = sample.memory.saturating_add(stat.resident_pages.saturating_mul(self.page_bytes));
            own = own.saturating_add(stat.own_ticks);
            with_children = with_children.saturating_add(stat.own_ticks).saturating_add(stat.children_ticks);
            seen.insert((*pid, stat.started), stat.own_ticks);
        }
        for (process, ticks) in &self.seen {
            if !seen.contains_key(process) {
                self.vanished = self.vanished.saturating_add(*ticks);
            }
        }
        self.seen = seen;
        // Ended children are in their parent's sum when the parent waited for them, and only in what we saw of them
        // when it did not; each way misses some, neither counts anything twice, so the larger is right.
        let ticks = with_children.max(own.saturating_add(self.vanished));
        self.cpu_us = self.cpu_us.max(ticks.saturating_mul(self.tick_us));
        sample.cpu_us = self.cpu_us;
        let near = memory_limit.is_some_and(|limit| sample.memory > limit / 100 * EXACT_FROM_PERCENT);
        if near {
            let exact = |pid: i32, stat: &Stat| {
                proportional_bytes(pid).unwrap_or(stat.resident_pages.saturating_mul(self.page_bytes))
            };
            sample.memory = tree.iter().map(|(pid, stat)| exact(*pid, stat)).fold(0, u64::saturating_add);
        }
        sample
    }

    /// The tree's processes now, the root first.
    pub fn members(&self) -> Vec<Pid> {
        descendants(self.root).into_iter().map(|(pid, _)| Pid::from_raw(pid)).collect()
    }
}

/// The root and its descendants, parents before children.
///
/// The kernel's own lists of children are used where it has them (`CONFIG_PROC_CHILDREN`); otherwise one pass over
/// `/proc` finds each process's parent.
fn descendants(root: Pid) -> Vec<(i32, Stat)> {
    let Some(stat) = read_stat(root.as_raw()) else { return Vec::new() };
    let mut found = vec![(root.as_raw(), stat)];
    let listed = Path::new(&format!("/proc/{root}/task/{root}/children")).exists();
    if listed {
        let mut next = 0;
        let mut known: HashSet<i32> = HashSet::from([root.as_raw()]);
        while let Some((pid, _)) = found.get(next).copied() {
            next += 1;
            for child in children_of(pid) {
                if known.insert(child) {
                    found.extend(read_stat(child).map(|stat| (child, stat)));
                }
            }
        }
        return found;
    }
    let mut by_parent: HashMap<i32, Vec<(i32, Stat)>> = HashMap::new();
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<i32>().ok()) else { continue };
        if let Some(stat) = read_stat(pid) {
            by_parent.entry(stat.parent).or_default().push((pid, stat));
        }
    }
    let mut next = 0;
    while let Some((pid, _)) = found.get(next).copied() {
        next += 1;
        // Removing makes this end even if pids were reused into a circle during the pass.
        found.extend(by_parent.remove(&pid).unwrap_or_default());
    }
    found
}

fn children_of(pid: i32) -> Vec<i32> {
    let mut children = Vec::new();
    for thread in fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten() {
        let text = fs::read_to_string(thread.path().join("children")).unwrap_or_default();
        children.extend(text.split_whitespace().filter_map(|word| word.parse::<i32>().ok()));
    }
    children
}

fn read_stat(pid: i32) -> Option<Stat> {
    // The command name may hold any byte.
    let bytes = fs::read(format!("/proc/{pid}/stat")).ok()?;
    parse_stat(&String::from_utf8_lossy(&bytes))
}

fn parse_stat(text: &str) -> Option<Stat> {
    // The name is in parentheses and may hold some; the last one closes it. Field 3 follows.
    let rest = text.get(text.rfind(')')? + 1..)?;
    let fields: Vec<&str> = rest.split_ascii_whitespace().collect();
    let field = |number: usize| fields.get(number - 3).copied();
    let count = |number: usize| field(number)?.parse::<i64>().ok().map(|value| value.max(0).unsigned_abs());
    let zombie = matches!(field(3)?, "Z" | "X");
    Some(Stat {
        parent: field(4)?.parse().ok()?,
        own_ticks: count(14)? + count(15)?,
        children_ticks: count(16)? + count(17)?,
        threads: count(20)?,
        started: field(22)?.parse().ok()?,
        // A zombie's memory is gone, whatever the field says.
        resident_pages: if zombie { 0 } else { count(24)? },
    })
}

/// The process's proportional set size and swapped pages in bytes (proc_pid_smaps_rollup(5)).
fn proportional_bytes(pid: i32) -> Option<u64> {
    let text = match fs::read_to_string(format!("/proc/{pid}/smaps_rollup")) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => return None,
        // It has ended since it was listed, and holds nothing any more; what it shared is counted with the others.
        Err(_) => return Some(0),
    };
    let kilobytes = |key: &str| {
        text.lines().find_map(|line| line.strip_prefix(key)?.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok())
    };
    Some((kilobytes("Pss:")? + kilobytes("SwapPss:").unwrap_or(0)).saturating_mul(1024))
}

/// How much a directory tree holds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Held {
    /// Bytes on disk, as the file system has allocated them.
    pub bytes: u64,
    /// Directories that could not be listed because the program took away its own right to, and are not counted.
    pub hidden: u64,
    /// Whether the tree is nested more deeply than is measured, which callers treat as over any limit.
    pub too_deep: bool,
}

/// Measures how many bytes a run's own layer holds. A layer that does not exist yet holds nothing.
///
/// Links are never followed: the layer is written by the program, which may replace a directory by a link at any
/// moment. Files with several names count once.
pub fn held_by(layer: &Path) -> Held {
    let mut held = Held::default();
    let mut linked: HashSet<(u64, u64)> = HashSet::new();
    let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    let Ok(top) = Dir::open(layer, flags, Mode::empty()) else { return held };
    if let Ok(stat) = fstat(top.as_fd()) {
        held.bytes = allocated(&stat);
    }
    let how = OpenHow::new().flags(flags).resolve(ResolveFlag::RESOLVE_BENEATH | ResolveFlag::RESOLVE_NO_SYMLINKS);
    let (top, below) = read_level(top, &mut held, &mut linked);
    let mut anchors = vec![top];
    let mut levels = vec![Level { name: OsString::new(), below }];
    while let Some(level) = levels.last_mut() {
        let Some(name) = level.below.pop() else {
            levels.pop();
            anchors.truncate(levels.len().div_ceil(ANCHOR_EVERY));
            continue;
        };
        let Some(anchor) = anchors.last() else { return held };
        let between = levels.iter().skip((anchors.len() - 1) * ANCHOR_EVERY + 1).map(|level| &level.name);
        let path: PathBuf = between.chain([&name]).collect();
        let opened = openat2(anchor.as_fd(), &path, how).and_then(Dir::from_fd);
        match opened {
            Ok(_) if levels.len() >= DEPTH_MAX => held.too_deep = true,
            Ok(opened) => {
                let (directory, below) = read_level(opened, &mut held, &mut linked);
                if levels.len().is_multiple_of(ANCHOR_EVERY) {
                    anchors.push(directory);
                }
                levels.push(Level { name, below });
            }
            Err(Errno::EACCES | Errno::EPERM) => held.hidden += 1,
            // Gone, or no longer a directory.
            Err(_) => {}
        }
    }
    held
}

/// A directory that is being measured.
struct Level {
    name: OsString,
    /// The directories in it that are still to be measured.
    below: Vec<OsString>,
}

/// Counts what lies directly in a directory, and names the directories in it.
fn read_level(mut directory: Dir, held: &mut Held, linked: &mut HashSet<(u64, u64)>) -> (Dir, Vec<OsString>) {
    let names: Vec<CString> = directory
        .iter()
        // A directory that changes while it is read may end early; the next measurement sees the rest.
        .map_while(Result::ok)
        .map(|entry| entry.file_name().to_owned())
        .filter(|name| !matches!(name.to_bytes(), b"." | b".."))
        .collect();
    let mut below = Vec::new();
    for name in names {
        let Ok(stat) = fstatat(directory.as_fd(), name.as_c_str(), AtFlags::AT_SYMLINK_NOFOLLOW) else { continue };
        let is_directory = stat.st_mode & libc::S_IFMT == libc::S_IFDIR;
        if !is_directory && stat.st_nlink > 1 && !linked.insert((stat.st_dev, stat.st_ino)) {
            continue;
        }
        held.bytes = held.bytes.saturating_add(allocated(&stat));
        if is_directory {
            below.push(OsString::from_vec(name.into_bytes()));
        }
    }
    (directory, below)
}

/// `st_blocks` counts units of 512 bytes, whatever the block size (stat(2)).
fn allocated(stat: &FileStat) -> u64 {
    u64::try_from(stat.st_blocks).unwrap_or(0).saturating_mul(512)
}

/// The processes among these that are pid 1 of a pid namespace of their own, found by their `NSpid` line.
///
/// Killing one makes the kernel kill the whole namespace, with no race against forks (pid_namespaces(7)).
pub fn namespace_inits(members: &[Pid]) -> Vec<Pid> {
    members.iter().copied().filter(|pid| is_namespace_init(*pid)).collect()
}

fn is_namespace_init(pid: Pid) -> bool {
    let status = fs::read(format!("/proc/{pid}/status")).unwrap_or_default();
    let status = String::from_utf8_lossy(&status);
    let Some(line) = status.lines().find_map(|line| line.strip_prefix("NSpid:")) else { return false };
    let numbers: Vec<&str> = line.split_whitespace().collect();
    numbers.len() > 1 && numbers.last() == Some(&"1")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{
        io::Write,
        os::unix::fs::{symlink, PermissionsExt},
        process::{Command, Stdio},
        thread,
        time::{Duration, Instant},
    };

    #[test]
    fn a_stat_line_is_read_whatever_the_command_is_called() {
        let line = "7 (a) R (b) S 3 7 7 0 -1 4194560 1 2 0 0 11 12 13 14 20 0 5 0 99 1000 250 18446744073709551615";
        let expected =
            Stat { parent: 3, own_ticks: 23, children_ticks: 27, threads: 5, started: 99, resident_pages: 250 };
        assert_eq!(parse_stat(line), Some(expected));
        assert_eq!(parse_stat("7 (a S 3"), None);
        assert_eq!(parse_stat(""), None);
    }

    #[test]
    fn a_sample_covers_children_and_their_time() {
        // Each step of the program waits for a line, so that a loaded machine changes how long this takes and nothing else.
        let mut child = Command::new("sh")
            .args(["-c", "(while :; do :; done) & busy=$!; read go; kill -9 $busy; wait; read stop"])
            .stdin(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("started");
        let mut go = child.stdin.take().expect("piped above");
        let mut tree = TreeWatch::new(Pid::from_raw(i32::try_from(child.id()).expect("a pid")));
        let until = |tree: &mut TreeWatch, holds: fn(&Sample) -> bool| {
            let deadline = Instant::now() + Duration::from_secs(60);
            loop {
                let sample = tree.sample(None);
                if holds(&sample) || Instant::now() > deadline {
                    return sample;
                }
                thread::sleep(Duration::from_millis(10));
            }
        };
        let early = until(&mut tree, |sample| sample.tasks == 2 && sample.cpu_us >= 100_000);
        go.write_all(b"\n").expect("the program reads");
        let late = until(&mut tree, |sample| sample.tasks == 1);
        for pid in tree.members() {
            nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL).expect("killed");
        }
        child.wait().expect("waited");
        assert!(early.tasks == 2 && early.cpu_us >= 100_000 && early.memory > 0, "{early:?}");
        assert!(late.tasks == 1 && late.cpu_us >= early.cpu_us, "{late:?}");
        assert_eq!(tree.sample(None), Sample { cpu_us: tree.cpu_us, ..Sample::default() });
    }

    #[test]
    fn a_layer_is_measured_without_following_links_and_counts_names_of_one_file_once() {
        let outside = tempfile::tempdir().expect("a folder");
        fs::write(outside.path().join("big"), vec![1; 4 << 20]).expect("written");
        let layer = tempfile::tempdir().expect("a folder");
        fs::create_dir_all(layer.path().join("a/b")).expect("made");
        fs::write(layer.path().join("a/b/file"), vec![1; 1 << 20]).expect("written");
        fs::hard_link(layer.path().join("a/b/file"), layer.path().join("again")).expect("linked");
        symlink(outside.path(), layer.path().join("a/out")).expect("linked");
        let held = held_by(layer.path());
        assert!((1 << 20..(1 << 20) + (64 << 10)).contains(&held.bytes), "{held:?}");
        assert_eq!((held.hidden, held.too_deep), (0, false));
    }

    #[test]
    fn a_layer_that_does_not_exist_holds_nothing() {
        assert_eq!(held_by(Path::new("/nonexistent/layer")), Held::default());
    }

    #[test]
    fn a_sparse_file_counts_as_what_it_takes_on_disk() {
        let layer = tempfile::tempdir().expect("a folder");
        fs::File::create(layer.path().join("sparse")).and_then(|file| file.set_len(1 << 40)).expect("made");
        assert!(held_by(layer.path()).bytes < 1 << 20);
    }

    #[test]
    fn nesting_beyond_any_real_tree_is_reported() {
        let layer = tempfile::tempdir().expect("a folder");
        nest(layer.path(), DEPTH_MAX + 5);
        assert!(held_by(layer.path()).too_deep);
        remove(layer);
    }

    #[test]
    fn what_lies_deep_is_measured_and_what_lies_beside_it_once() {
        let layer = tempfile::tempdir().expect("a folder");
        for depth in [1, ANCHOR_EVERY - 1, ANCHOR_EVERY, 2 * ANCHOR_EVERY + 1, 300] {
            let one = layer.path().join(format!("of-{depth}"));
            fs::create_dir(&one).expect("made");
            nest(&one, depth);
            let deepest = one.join(vec!["d"; depth].join("/"));
            fs::write(deepest.join("file"), vec![1; 1 << 20]).expect("written");
            fs::create_dir(deepest.join("more")).expect("made");
            fs::write(one.join("d/beside"), vec![1; 1 << 20]).expect("written");
        }
        let held = held_by(layer.path());
        assert!(!held.too_deep && held.hidden == 0);
        let files = 10 << 20;
        assert!((files..files + (4 << 20)).contains(&held.bytes), "{held:?}");
    }

    /// Makes so many directories, each in the one before; their path may be longer than any call takes.
    fn nest(top: &Path, depth: usize) {
        let flags = OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
        let mut here = nix::fcntl::open(top, flags, Mode::empty()).expect("opened");
        for _ in 0..depth {
            nix::sys::stat::mkdirat(&here, "d", Mode::S_IRWXU).expect("made");
            here = nix::fcntl::openat(&here, "d", flags, Mode::empty()).expect("opened");
        }
    }

    /// The standard library would hold every level open.
    fn remove(layer: tempfile::TempDir) {
        let removed = Command::new("rm").arg("-rf").arg(layer.keep()).status();
        assert!(removed.expect("coreutils has `rm`").success());
    }

    #[test]
    fn what_the_program_hid_from_itself_is_reported() {
        if nix::unistd::geteuid().is_root() {
            // Nothing is hidden from root; the same call as an ordinary user is what matters.
            return;
        }
        let layer = tempfile::tempdir().expect("a folder");
        let hidden = layer.path().join("hidden");
        fs::create_dir(&hidden).expect("made");
        fs::set_permissions(&hidden, fs::Permissions::from_mode(0o300)).expect("changed");
        assert_eq!(held_by(layer.path()).hidden, 1);
    }
}
