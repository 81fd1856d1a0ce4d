//! Control groups: where this process may make one, and one group that bounds and measures a run.
//!
//! A run's group is always made below the group that the supervisor itself is in, so that a limit somebody put on the
//! supervisor bounds its runs too; the one exception is a scope that systemd makes on request. Values are written
//! through the `cgroups-rs` controllers, on directories that are found here from `/proc/self/mountinfo`: the crate's
//! own discovery assumes that version 2 lies at `/sys/fs/cgroup`, and on a hybrid host it lies elsewhere. Counters are
//! read here, because the crate's statistics open a dozen files where one is wanted.
//!
//! Nothing here decides whether a missing limit is acceptable; that is [`super::enforcer`]'s.

use super::kernel;
use crate::effect::RunId;
use cgroups_rs::fs::{cpu::CpuController, memory::MemController, pid::PidController, MaxValue};
use nix::unistd::Pid;
use std::{
    collections::BTreeMap,
    fs, io,
    os::unix::process::CommandExt as _,
    path::{Component, Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

/// The scheduler's bandwidth period in microseconds: the kernel's own default (`cpu.max`, admin-guide/cgroup-v2).
const CPU_PERIOD_US: u64 = 100_000;

/// The least quota that the kernel accepts in one period, in microseconds (`min_cfs_quota_period`, kernel/sched).
const CPU_QUOTA_MIN_US: i64 = 1_000;

/// The group into which a supervisor moves itself, because a group with members of its own cannot hand controllers to
/// its children (the "no internal process" rule, admin-guide/cgroup-v2).
const OWN_LEAF: &str = "tollgate-supervisor";

/// The leaf that systemd makes for a service with `DelegateSubgroup=supervisor`, as ours has.
const SERVICE_LEAF: &str = "supervisor";

/// How long an emptied group may stay busy before its removal is given up: the kernel frees members asynchronously.
const REMOVAL_PATIENCE: Duration = Duration::from_secs(5);

/// How long whoever drops a group waits for it itself.
const REMOVAL_AT_ONCE: Duration = Duration::from_millis(200);

/// How long systemd may take to put a process into a scope.
const SCOPE_PATIENCE: Duration = Duration::from_secs(3);

/// What a group can bound or measure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Controller {
    /// Memory and swap.
    Memory,
    /// Processes and threads.
    Pids,
    /// Processor bandwidth.
    Cpu,
    /// Processor time used; of its own in version 1, part of every group in version 2.
    Accounting,
}

impl Controller {
    /// What it bounds or measures, in a sentence.
    pub fn noun(self) -> &'static str {
        match self {
            Controller::Memory => "memory",
            Controller::Pids => "processes",
            Controller::Cpu => "processors",
            Controller::Accounting => "processor time",
        }
    }

    /// Its name in `/proc/self/cgroup` of version 1.
    fn legacy_name(self) -> &'static str {
        match self {
            Controller::Memory => "memory",
            Controller::Pids => "pids",
            Controller::Cpu => "cpu",
            Controller::Accounting => "cpuacct",
        }
    }

    /// Its name in `cgroup.controllers` of version 2, or none where every group has it.
    fn unified_name(self) -> Option<&'static str> {
        match self {
            Controller::Memory => Some("memory"),
            Controller::Pids => Some("pids"),
            Controller::Cpu => Some("cpu"),
            Controller::Accounting => None,
        }
    }
}

/// Every controller.
const CONTROLLERS: [Controller; 4] = [Controller::Memory, Controller::Pids, Controller::Cpu, Controller::Accounting];

/// The two interfaces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Version {
    /// One hierarchy a controller.
    Legacy,
    /// One hierarchy.
    Unified,
}

/// Whose systemd can be asked for a scope.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Manager {
    /// The user's own, at the user bus.
    User,
    /// The host's, for root.
    System,
}

/// Why a group could not be made or used.
#[derive(Debug, thiserror::Error)]
pub enum CgroupError {
    /// mkdir(2), open(2), write(2) or read(2) on the group's files.
    #[error("control group {path}: {call}: {source}", path = .path.display())]
    Io {
        /// The group's directory or one of its files.
        path: PathBuf,
        /// What was tried.
        call: &'static str,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
    /// The kernel refused a limit.
    #[error("control group {path}: setting {what}: {source}", path = .path.display())]
    Limit {
        /// The group's directory.
        path: PathBuf,
        /// The limit.
        what: &'static str,
        /// What the crate reports.
        #[source]
        source: cgroups_rs::fs::error::Error,
    },
    /// systemd did not make the scope.
    #[error("systemd scope {unit}: {why}")]
    Scope {
        /// The unit's name.
        unit: String,
        /// What it said.
        why: String,
    },
    /// There is no place below the supervisor's own group for a group with this controller.
    #[error("no control group below the supervisor's own can be made: {0}")]
    NoPlace(String),
}

fn io_error(path: &Path, call: &'static str) -> impl FnOnce(io::Error) -> CgroupError {
    let path = path.to_owned();
    move |source| CgroupError::Io { path, call, source }
}

/// Where this process stands among control groups. Pure data; [`CgroupEnvironment::detect`] reads it once.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CgroupEnvironment {
    /// Version 1: for each controller, the directory of the group this process is in.
    pub legacy: BTreeMap<Controller, PathBuf>,
    /// Version 2: the mount point, and the directory of the group this process is in.
    pub unified: Option<(PathBuf, PathBuf)>,
    /// The systemd that can be asked for a scope.
    pub systemd: Option<Manager>,
}

impl CgroupEnvironment {
    /// Reads where this process stands. Everything unreadable counts as absent.
    pub fn detect() -> CgroupEnvironment {
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        let membership = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        CgroupEnvironment { systemd: manager(), ..CgroupEnvironment::parse(&mounts, &membership) }
    }

    /// The environment that these two files describe, without a systemd.
    ///
    /// A group whose path does not lie below its mount's root cannot be named from here and counts as absent.
    pub fn parse(mountinfo: &str, membership: &str) -> CgroupEnvironment {
        let mut environment = CgroupEnvironment::default();
        for mount in mountinfo.lines().filter_map(GroupMount::parse) {
            if mount.kind == "cgroup2" {
                // `0::` marks version 2's line (cgroups(7)).
                let Some(path) = own_path(membership, |id, names| id == "0" && names.is_empty()) else { continue };
                if let (None, Some(own)) = (&environment.unified, mount.directory_of(path)) {
                    environment.unified = Some((mount.point.clone(), own));
                }
                continue;
            }
            for controller in CONTROLLERS {
                let name = controller.legacy_name();
                if !mount.options.split(',').any(|option| option == name) {
                    continue;
                }
                let path = own_path(membership, |_, names| names.split(',').any(|one| one == name));
                if let Some(own) = path.and_then(|path| mount.directory_of(path)) {
                    environment.legacy.entry(controller).or_insert(own);
                }
            }
        }
        environment
    }

    /// One line for `doctor`: what is mounted and where we are.
    pub fn describe(&self) -> String {
        let mut parts = Vec::new();
        if let Some((_, own)) = &self.unified {
            let has = fs::read_to_string(own.join("cgroup.controllers")).unwrap_or_default();
            let has = if has.trim().is_empty() { "no controllers".to_owned() } else { has.trim().to_owned() };
            parts.push(format!("version 2 at {} ({has})", own.display()));
        }
        if !self.legacy.is_empty() {
            let names: Vec<_> = self.legacy.keys().map(|one| one.legacy_name()).collect();
            parts.push(format!("version 1 ({})", names.join(" ")));
        }
        match self.systemd {
            Some(Manager::User) => parts.push("the user's systemd".to_owned()),
            Some(Manager::System) => parts.push("systemd".to_owned()),
            None => {}
        }
        if parts.is_empty() {
            "none".to_owned()
        } else {
            parts.join(", ")
        }
    }
}

/// The systemd that answers, judged by its socket; asking it is what proves it.
fn manager() -> Option<Manager> {
    if nix::unistd::geteuid().is_root() {
        // sd_booted(3): the directory exists exactly where systemd is the init.
        return Path::new("/run/systemd/system").is_dir().then_some(Manager::System);
    }
    let runtime = std::env::var_os("XDG_RUNTIME_DIR")?;
    Path::new(&runtime).join("systemd/private").exists().then_some(Manager::User)
}

/// One control-group mount of `/proc/self/mountinfo` (proc_pid_mountinfo(5)).
struct GroupMount {
    root: PathBuf,
    point: PathBuf,
    kind: String,
    options: String,
}

impl GroupMount {
    fn parse(line: &str) -> Option<GroupMount> {
        let (left, right) = line.split_once(" - ")?;
        let mut left = left.split(' ').skip(3);
        let (root, point) = (left.next()?, left.next()?);
        let mut right = right.split(' ');
        let (kind, options) = (right.next()?, right.nth(1)?);
        matches!(kind, "cgroup" | "cgroup2").then(|| GroupMount {
            root: PathBuf::from(unescape(root)),
            point: PathBuf::from(unescape(point)),
            kind: kind.to_owned(),
            options: options.to_owned(),
        })
    }

    /// The directory of a group that `/proc/self/cgroup` names.
    fn directory_of(&self, path: &str) -> Option<PathBuf> {
        let below = Path::new(path).strip_prefix(&self.root).ok()?;
        // A process outside its cgroup namespace's root is shown as `/../x`, which must not be followed.
        below.components().all(|part| matches!(part, Component::Normal(_))).then(|| self.point.join(below))
    }
}

/// Undoes mountinfo's octal escapes for space, tab, newline and backslash.
fn unescape(field: &str) -> String {
    field.replace("\\040", " ").replace("\\011", "\t").replace("\\012", "\n").replace("\\134", "\\")
}

/// The path of the line of `/proc/self/cgroup` that the test picks by id and controllers.
fn own_path(membership: &str, picks: impl Fn(&str, &str) -> bool) -> Option<&str> {
    membership.lines().find_map(|line| {
        let mut fields = line.splitn(3, ':');
        let (id, names, path) = (fields.next()?, fields.next()?, fields.next()?);
        picks(id, names).then_some(path)
    })
}

/// What caps swap in a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SwapCap {
    /// Memory and swap together stay under the limit.
    Included,
    /// The kernel does not account swap by group, and this host has none.
    NoSwap,
    /// The kernel does not account swap by group, and this host has some: what is swapped out is not counted.
    NotCounted,
}

/// One run's group. Removed when dropped.
#[derive(Debug)]
pub struct Group {
    version: Version,
    directories: BTreeMap<Controller, PathBuf>,
    /// What keeps a scope of systemd's from going.
    keeper: Option<Keeper>,
}

/// A process that does nothing in a scope. systemd removes a scope with its last process, and with it what the kernel
/// counted there: how a run ended must be readable after its jail is gone. It ends with this process, whose pipe it
/// reads.
#[derive(Debug)]
struct Keeper(Child);

impl Keeper {
    fn start() -> io::Result<Keeper> {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", "read -r _"]).env_clear().current_dir("/").process_group(0);
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().map(Keeper)
    }

    fn pid(&self) -> Pid {
        Pid::from_raw(self.0.id().cast_signed())
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        // Gone already is as good.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Group {
    /// Makes a group in version 2's hierarchy, below our own group or beside our own leaf of a delegated one.
    ///
    /// # Errors
    /// [`CgroupError::NoPlace`] where the hierarchy is not ours to write or lacks a controller that is wanted.
    pub fn unified(environment: &CgroupEnvironment, run: &RunId, wanted: &[Controller]) -> Result<Group, CgroupError> {
        let no_place = |why: String| CgroupError::NoPlace(why);
        let Some((mount, own)) = &environment.unified else {
            return Err(no_place("version 2 is not mounted".to_owned()));
        };
        let delegated = delegated_ancestor(mount, own);
        let available = fs::read_to_string(delegated.join("cgroup.controllers"))
            .map_err(io_error(&delegated.join("cgroup.controllers"), "read"))?;
        let names: Vec<&str> = wanted.iter().filter_map(|one| one.unified_name()).collect();
        if names.is_empty() && environment.legacy.contains_key(&Controller::Accounting) {
            // Only time is to be counted, and version 1 can do that without the cost of moving a process.
            return Err(no_place("version 1 counts time".to_owned()));
        }
        if let Some(lacking) = names.iter().find(|name| !available.split_whitespace().any(|has| has == **name)) {
            return Err(no_place(format!("{} has no {lacking} controller", delegated.display())));
        }
        hand_down(&delegated, own, &names)?;
        let directory = delegated.join(group_name(run));
        fs::create_dir(&directory).map_err(io_error(&directory, "mkdir(2)"))?;
        let directories = wanted.iter().map(|one| (*one, directory.clone())).collect();
        Ok(Group { version: Version::Unified, directories, keeper: None })
    }

    /// Makes one group in each of version 1's hierarchies that is wanted and ours to write.
    ///
    /// A controller whose hierarchy cannot be written is left out; [`Group::has`] tells.
    ///
    /// # Errors
    /// [`CgroupError::NoPlace`] where none can be written.
    pub fn legacy(environment: &CgroupEnvironment, run: &RunId, wanted: &[Controller]) -> Result<Group, CgroupError> {
        let mut group = Group { version: Version::Legacy, directories: BTreeMap::new(), keeper: None };
        let mut why = "version 1 is not mounted".to_owned();
        for controller in wanted {
            let Some(own) = environment.legacy.get(controller) else { continue };
            let directory = own.join(group_name(run));
            // Two controllers may share one hierarchy (`cpu,cpuacct`), and then share the directory.
            if group.directories.values().any(|made| *made == directory) {
                group.directories.insert(*controller, directory);
                continue;
            }
            match fs::create_dir(&directory) {
                Ok(()) => {
                    group.directories.insert(*controller, directory);
                }
                Err(error) => why = format!("{}: mkdir(2): {error}", directory.display()),
            }
        }
        if group.directories.is_empty() {
            return Err(CgroupError::NoPlace(why));
        }
        Ok(group)
    }

    /// Asks systemd for a transient scope that holds this process and has these limits.
    ///
    /// The request is made with `busctl`, which ships with systemd, and is believed only when the kernel shows the
    /// process in the scope.
    ///
    /// # Errors
    /// [`CgroupError::Scope`] with what systemd or the kernel answered.
    pub fn scope(
        environment: &CgroupEnvironment,
        manager: Manager,
        run: &RunId,
        pid: Pid,
        bounds: &ScopeBounds,
    ) -> Result<Group, CgroupError> {
        let unit = format!("{}.scope", group_name(run));
        let failed = |why: String| CgroupError::Scope { unit: unit.clone(), why };
        let (mount, _) = environment
            .unified
            .as_ref()
            .ok_or_else(|| failed("version 2 is not mounted, so its limits cannot be checked".into()))?;
        let keeper = Keeper::start().map_err(|error| failed(format!("starting /bin/sh: {error}")))?;
        // It counts among the processes, and is none of the run's.
        let bounds = ScopeBounds { pids: bounds.pids.map(|count| count.saturating_add(1)), ..*bounds };
        let ask = |policy| {
            let mut command = Command::new("busctl");
            command.args(scope_request(manager, &unit, [keeper.pid(), pid], &bounds, policy)).stdin(Stdio::null());
            command.output().map_err(|error| failed(format!("starting busctl: {error}")))
        };
        let said = |answer: &std::process::Output| String::from_utf8_lossy(&answer.stderr).trim().to_owned();
        let mut answer = ask(OomPolicy::Continue)?;
        if !answer.status.success() && said(&answer).contains("OOMPolicy") {
            answer = ask(OomPolicy::Unknown)?;
        }
        if !answer.status.success() {
            return Err(failed(said(&answer)));
        }
        let until = Instant::now() + SCOPE_PATIENCE;
        let directory = loop {
            let membership = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
            let path = own_path(&membership, |id, names| id == "0" && names.is_empty()).unwrap_or_default();
            if path.ends_with(&format!("/{unit}")) {
                break mount.join(path.trim_start_matches('/'));
            }
            if Instant::now() > until {
                return Err(failed(format!("process {pid} is not in it after {} s", SCOPE_PATIENCE.as_secs())));
            }
            thread::sleep(Duration::from_millis(2));
        };
        let mut directories = BTreeMap::from([(Controller::Accounting, directory.clone())]);
        for (controller, file) in
            [(Controller::Memory, "memory.max"), (Controller::Pids, "pids.max"), (Controller::Cpu, "cpu.max")]
        {
            // systemd accepts a limit whose controller it does not have; the file shows whether the kernel holds it.
            if fs::read_to_string(directory.join(file)).is_ok_and(|value| !value.starts_with("max")) {
                directories.insert(controller, directory.clone());
            }
        }
        Ok(Group { version: Version::Unified, directories, keeper: Some(keeper) })
    }

    /// A scope around a process that does nothing: what a run would get of systemd, found out by asking for it.
    ///
    /// # Errors
    /// As [`Group::scope`].
    pub fn trial_scope(
        environment: &CgroupEnvironment,
        manager: Manager,
        run: &RunId,
        bounds: &ScopeBounds,
    ) -> Result<Group, CgroupError> {
        let failed = |error: io::Error| CgroupError::Scope { unit: "(none)".to_owned(), why: error.to_string() };
        let program = Keeper::start().map_err(failed)?;
        Group::scope(environment, manager, run, program.pid(), bounds)
    }

    /// Which interface the group has.
    pub fn version(&self) -> Version {
        self.version
    }

    /// Whether the group has this controller.
    pub fn has(&self, controller: Controller) -> bool {
        self.directories.contains_key(&controller)
    }

    /// How the receipt names the mechanism.
    pub fn describe(&self) -> &'static str {
        match (self.version, &self.keeper) {
            (_, Some(_)) => "a systemd scope",
            (Version::Unified, None) => "a control group (version 2)",
            (Version::Legacy, None) => "a control group (version 1)",
        }
    }

    /// Caps memory and swap together. A process of the group that needs more is killed by the kernel, alone: a shell
    /// whose child is killed goes on, so `memory.oom.group` stays off.
    ///
    /// # Errors
    /// [`CgroupError::Limit`] where the kernel refuses the cap itself.
    pub fn limit_memory(&self, bytes: u64) -> Result<SwapCap, CgroupError> {
        let Some(directory) = self.directories.get(&Controller::Memory) else { return Err(lacking("memory")) };
        let unified = self.version == Version::Unified;
        let controller = MemController::new(directory.clone(), directory.clone(), unified);
        let limit = i64::try_from(bytes).unwrap_or(i64::MAX);
        controller.set_limit(limit).map_err(limit_error(directory, "memory"))?;
        // Version 1 counts memory and swap in one number, which must not be below memory's; version 2 counts apart.
        let swap = if unified { 0 } else { limit };
        match controller.set_memswap_limit(swap) {
            Ok(()) => Ok(SwapCap::Included),
            Err(_) if host_has_swap() => Ok(SwapCap::NotCounted),
            Err(_) => Ok(SwapCap::NoSwap),
        }
    }

    /// Caps processes and threads; a fork beyond it fails with EAGAIN.
    ///
    /// # Errors
    /// [`CgroupError::Limit`].
    pub fn limit_pids(&self, count: u64) -> Result<(), CgroupError> {
        let Some(directory) = self.directories.get(&Controller::Pids) else { return Err(lacking("pids")) };
        let controller = PidController::new(directory.clone(), directory.clone(), self.version == Version::Unified);
        let count = MaxValue::Value(i64::try_from(count).unwrap_or(i64::MAX));
        controller.set_pid_max(count).map_err(limit_error(directory, "pids"))
    }

    /// Caps processor bandwidth, in processors' worth of time per second.
    ///
    /// # Errors
    /// [`CgroupError::Limit`].
    pub fn limit_cpus(&self, cpus: f64) -> Result<(), CgroupError> {
        let Some(directory) = self.directories.get(&Controller::Cpu) else { return Err(lacking("cpu")) };
        let controller = CpuController::new(directory.clone(), directory.clone(), self.version == Version::Unified);
        // `as` saturates, so no number can wrap.
        let quota = ((cpus * CPU_PERIOD_US as f64) as i64).max(CPU_QUOTA_MIN_US);
        controller
            .set_cfs_quota_and_period(Some(quota), Some(CPU_PERIOD_US))
            .map_err(limit_error(directory, "processor bandwidth"))
    }

    /// Puts the calling thread into the group, so that what it forks is born there. Version 1 only.
    ///
    /// Writing `0` to `tasks` moves one thread without the lock over all of the host's forks, which costs a grace
    /// period of 5 to 20 ms for `cgroup.procs` ("Optimize single thread migration", Linux 5.4).
    ///
    /// # Errors
    /// [`CgroupError::Io`]; the thread may then be in some of the group's hierarchies and must end without forking.
    pub fn enter_by_thread(&self) -> Result<(), CgroupError> {
        for directory in self.places() {
            let file = directory.join("tasks");
            fs::write(&file, "0").map_err(io_error(&file, "write"))?;
        }
        Ok(())
    }

    /// Puts a process into the group unless it is there, and makes sure that it is.
    ///
    /// # Errors
    /// [`CgroupError::Io`], among others when the process is gone.
    pub fn admit(&self, pid: Pid) -> Result<(), CgroupError> {
        for directory in self.places() {
            let file = directory.join("cgroup.procs");
            if members_of(&directory)?.contains(&pid) {
                continue;
            }
            fs::write(&file, pid.to_string()).map_err(io_error(&file, "write"))?;
            if !members_of(&directory)?.contains(&pid) {
                let gone = io::Error::from_raw_os_error(libc::ESRCH);
                return Err(CgroupError::Io { path: file, call: "write", source: gone });
            }
        }
        Ok(())
    }

    /// The processes in the group now, as this process's namespace numbers them.
    pub fn members(&self) -> Vec<Pid> {
        let listed = self.places().first().and_then(|directory| members_of(directory).ok()).unwrap_or_default();
        listed.into_iter().filter(|pid| !self.spares(*pid)).collect()
    }

    /// Processor time used by everything that ever was in the group, in microseconds.
    pub fn cpu_us(&self) -> Option<u64> {
        let directory = self.directories.get(&Controller::Accounting)?;
        match self.version {
            Version::Unified => keyed(&directory.join("cpu.stat"), "usage_usec"),
            Version::Legacy => number(&directory.join("cpuacct.usage")).map(|nanoseconds| nanoseconds / 1_000),
        }
    }

    /// The most memory, and swap where it is counted, that was charged at once, in bytes.
    pub fn memory_peak(&self) -> Option<u64> {
        let directory = self.directories.get(&Controller::Memory)?;
        let files: &[&str] = match self.version {
            // `memory.peak` is of Linux 5.19; before it the present value is the best there is.
            Version::Unified => &["memory.peak", "memory.current"],
            Version::Legacy => &["memory.memsw.max_usage_in_bytes", "memory.max_usage_in_bytes"],
        };
        files.iter().find_map(|file| number(&directory.join(file)))
    }

    /// How many processes the kernel killed because the group had no memory left.
    pub fn out_of_memory_kills(&self) -> u64 {
        let Some(directory) = self.directories.get(&Controller::Memory) else { return 0 };
        let file = match self.version {
            Version::Unified => "memory.events",
            Version::Legacy => "memory.oom_control",
        };
        keyed(&directory.join(file), "oom_kill").unwrap_or(0)
    }

    /// How often the kernel refused a fork because of the group's limit.
    pub fn refused_forks(&self) -> u64 {
        let Some(directory) = self.directories.get(&Controller::Pids) else { return 0 };
        keyed(&directory.join("pids.events"), "max").unwrap_or(0)
    }

    /// The most processes and threads at once.
    pub fn pids_peak(&self) -> Option<u64> {
        let directory = self.directories.get(&Controller::Pids)?;
        // `pids.peak` is of Linux 6.1.
        let peak = number(&directory.join("pids.peak")).or_else(|| number(&directory.join("pids.current")))?;
        Some(peak.saturating_sub(u64::from(self.keeper.is_some())))
    }

    /// Whether the kernel's out-of-memory report names this group: the path that it prints as `oom_memcg=`.
    pub fn is_named(&self, kernel_path: &str) -> bool {
        let Some(directory) = self.directories.get(&Controller::Memory) else { return false };
        match (directory.file_name(), Path::new(kernel_path).file_name()) {
            (Some(ours), Some(theirs)) => ours == theirs,
            _ => false,
        }
    }

    /// Kills everything in the group, once.
    ///
    /// Version 2 has one write for it, which no fork escapes. Version 1 has not; there the members are killed as they
    /// are listed, and the caller repeats until none is left. Inside a jail one round is enough: pid 1 is among the
    /// members, and the kernel ends a pid namespace with its pid 1. So it is in a scope, whose keeper stays.
    pub fn kill(&self) {
        if self.version == Version::Unified && self.keeper.is_none() {
            if let Some(directory) = self.places().first() {
                if fs::write(directory.join("cgroup.kill"), "1").is_ok() {
                    return;
                }
            }
        }
        for directory in self.places() {
            kill_members(&directory, |pid| self.spares(pid));
        }
    }

    /// Whether a member is none of the run's: while a thread of ours is in the group to start a process there, version 1
    /// lists our own process, and a scope has its keeper.
    fn spares(&self, pid: Pid) -> bool {
        pid == Pid::this() || self.keeper.as_ref().is_some_and(|keeper| keeper.pid() == pid)
    }

    /// The group's distinct directories.
    fn places(&self) -> Vec<PathBuf> {
        let mut places: Vec<PathBuf> = self.directories.values().cloned().collect();
        places.sort();
        places.dedup();
        places
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        if self.keeper.is_some() {
            // systemd removes a scope when its last process is gone, which is the keeper.
            return;
        }
        // Almost always the members are gone and this is one call each. After a kill it takes the kernel some
        // milliseconds, for which a command that is about to exit must wait, or the group outlives it.
        let busy = removed_within(self.places(), REMOVAL_AT_ONCE);
        if busy.is_empty() {
            return;
        }
        // Off the way of whoever waits for the run's end. If no thread can be had, the group stays, empty, and the
        // next sweep removes it.
        let _ = thread::Builder::new()
            .name("group removal".to_owned())
            .stack_size(64 * 1024)
            .spawn(move || removed_within(busy, REMOVAL_PATIENCE));
    }
}

/// Removes these groups as they become empty, and gives those that do not within the time.
fn removed_within(mut places: Vec<PathBuf>, patience: Duration) -> Vec<PathBuf> {
    let until = Instant::now() + patience;
    let mut pause = Duration::from_micros(500);
    loop {
        places.retain(|place| !removed(place));
        if places.is_empty() || Instant::now() >= until {
            return places;
        }
        thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(20));
    }
}

/// Kills the members of a group as they are listed.
fn kill_members(directory: &Path, spares: impl Fn(Pid) -> bool) {
    for pid in members_of(directory).unwrap_or_default() {
        if spares(pid) {
            continue;
        }
        // A pid may be another process by now; the handle cannot, once it is found to be a member.
        let Ok(handle) = kernel::pidfd_open(pid) else { continue };
        if members_of(directory).is_ok_and(|members| members.contains(&pid)) {
            // ESRCH: it died by itself, which is what was wanted.
            let _ = kernel::pidfd_kill(&handle);
        }
    }
}

/// Removes the groups of runs that are over, as a supervisor that died leaves them, with whatever is still in them.
///
/// `is_over` is asked for each run with a group below our own. A group whose members take longer than
/// [`REMOVAL_AT_ONCE`] to end stays for the next sweep.
pub fn sweep(environment: &CgroupEnvironment, is_over: impl Fn(&RunId) -> bool) {
    let mut parents: Vec<PathBuf> = environment.legacy.values().cloned().collect();
    if let Some((mount, own)) = &environment.unified {
        parents.push(delegated_ancestor(mount, own));
    }
    parents.sort();
    parents.dedup();
    let mut left = Vec::new();
    for parent in parents {
        for entry in fs::read_dir(&parent).into_iter().flatten().flatten() {
            let name = entry.file_name();
            let Some(run) = name.to_str().and_then(|name| name.strip_prefix("tollgate-run-")) else { continue };
            let place = entry.path();
            if is_over(&RunId(run.to_owned())) && !removed(&place) {
                kill_members(&place, |pid| pid == Pid::this());
                left.push(place);
            }
        }
    }
    removed_within(left, REMOVAL_AT_ONCE);
}

/// What a scope is to hold its process to.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ScopeBounds {
    /// `MemoryMax=`, in bytes, with `MemorySwapMax=0`.
    pub memory: Option<u64>,
    /// `TasksMax=`.
    pub pids: Option<u64>,
    /// `CPUQuota=`, in processors.
    pub cpus: Option<f64>,
}

/// Whether systemd is told what to do with a scope after an out-of-memory kill.
#[derive(Clone, Copy, PartialEq, Eq)]
enum OomPolicy {
    /// The rest of the scope goes on.
    Continue,
    /// systemd before 253 has no such property for scopes, and lets the rest go on.
    Unknown,
}

/// The arguments of `busctl` for `StartTransientUnit` (org.freedesktop.systemd1(5)).
fn scope_request(manager: Manager, unit: &str, pids: [Pid; 2], bounds: &ScopeBounds, policy: OomPolicy) -> Vec<String> {
    let mut properties: Vec<String> = vec![];
    let mut count = 0_usize;
    let mut add = |words: &[&str]| {
        properties.extend(words.iter().map(|word| (*word).to_owned()));
        count += 1;
    };
    let [one, other] = pids.map(|pid| pid.to_string());
    add(&["PIDs", "au", "2", &one, &other]);
    add(&["Description", "s", "Tollgate run"]);
    add(&["CollectMode", "s", "inactive-or-failed"]);
    add(&["CPUAccounting", "b", "true"]);
    if let Some(bytes) = bounds.memory {
        add(&["MemoryMax", "t", &bytes.to_string()]);
        add(&["MemorySwapMax", "t", "0"]);
        if policy == OomPolicy::Continue {
            // Without this systemd itself would end the whole scope at the first kill.
            add(&["OOMPolicy", "s", "continue"]);
        }
    }
    if let Some(count) = bounds.pids {
        add(&["TasksMax", "t", &count.to_string()]);
    }
    if let Some(cpus) = bounds.cpus {
        add(&["CPUQuotaPerSecUSec", "t", &((cpus * 1e6) as u64).to_string()]);
    }
    let bus = match manager {
        Manager::User => "--user",
        Manager::System => "--system",
    };
    let mut words: Vec<String> = [
        bus,
        "call",
        "org.freedesktop.systemd1",
        "/org/freedesktop/systemd1",
        "org.freedesktop.systemd1.Manager",
        "StartTransientUnit",
        "ssa(sv)a(sa(sv))",
        unit,
        "fail",
        &count.to_string(),
    ]
    .map(str::to_owned)
    .to_vec();
    words.extend(properties);
    words.push("0".to_owned());
    words
}

fn group_name(run: &RunId) -> String {
    // The id is ours, but this becomes a path: only what ids are made of passes.
    let safe: String = run.0.chars().filter(|one| one.is_ascii_alphanumeric() || *one == '-').collect();
    format!("tollgate-run-{safe}")
}

/// The group below which runs get theirs: our own, or its parent where our own is the leaf made for us.
fn delegated_ancestor(mount: &Path, own: &Path) -> PathBuf {
    let leaf = own.file_name().is_some_and(|name| name == OWN_LEAF || name == SERVICE_LEAF);
    match own.parent() {
        Some(parent) if leaf && own != mount => parent.to_owned(),
        _ => own.to_owned(),
    }
}

/// Lets children of `group` have these controllers, moving this process to a leaf of its own first if it is alone.
fn hand_down(group: &Path, own: &Path, names: &[&str]) -> Result<(), CgroupError> {
    let file = group.join("cgroup.subtree_control");
    let handed = fs::read_to_string(&file).map_err(io_error(&file, "read"))?;
    let lacking: Vec<&&str> = names.iter().filter(|name| !handed.split_whitespace().any(|has| has == **name)).collect();
    if lacking.is_empty() {
        return Ok(());
    }
    let line = lacking.iter().map(|name| format!("+{name}")).collect::<Vec<_>>().join(" ");
    match fs::write(&file, &line) {
        Ok(()) => return Ok(()),
        Err(error) if error.raw_os_error() == Some(libc::EBUSY) && group == own => {}
        Err(error) => return Err(io_error(&file, "write")(error)),
    }
    // EBUSY: the group has members. If that is only us, it was delegated to us and we may move.
    if members_of(group)? != [Pid::this()] {
        return Err(CgroupError::NoPlace(format!("{} holds other processes beside ours", group.display())));
    }
    let leaf = group.join(OWN_LEAF);
    match fs::create_dir(&leaf) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        Err(error) => return Err(io_error(&leaf, "mkdir(2)")(error)),
    }
    let procs = leaf.join("cgroup.procs");
    fs::write(&procs, "0").map_err(io_error(&procs, "write"))?;
    fs::write(&file, &line).map_err(io_error(&file, "write"))
}

fn members_of(directory: &Path) -> Result<Vec<Pid>, CgroupError> {
    let file = directory.join("cgroup.procs");
    let text = fs::read_to_string(&file).map_err(io_error(&file, "read"))?;
    Ok(text.lines().filter_map(|line| line.parse().ok()).map(Pid::from_raw).collect())
}

/// Whether the group is gone after trying to remove it.
fn removed(directory: &Path) -> bool {
    match fs::remove_dir(directory) {
        Ok(()) => true,
        Err(error) => error.kind() == io::ErrorKind::NotFound,
    }
}

fn number(file: &Path) -> Option<u64> {
    fs::read_to_string(file).ok()?.trim().parse().ok()
}

/// The value of one line of a flat-keyed file.
fn keyed(file: &Path, key: &str) -> Option<u64> {
    let text = fs::read_to_string(file).ok()?;
    text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(' ')?.trim().parse().ok())
}

fn host_has_swap() -> bool {
    // The first line is the heading.
    fs::read_to_string("/proc/swaps").is_ok_and(|text| text.lines().count() > 1)
}

fn lacking(name: &str) -> CgroupError {
    CgroupError::NoPlace(format!("the group has no {name} controller"))
}

fn limit_error(path: &Path, what: &'static str) -> impl FnOnce(cgroups_rs::fs::error::Error) -> CgroupError {
    let path = path.to_owned();
    move |source| CgroupError::Limit { path, what, source }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HYBRID: &str = "\
30 1 0:25 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
31 1 0:26 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct
32 1 0:27 /docker/abc /sys/fs/cgroup/memory rw shared:5 - cgroup cgroup rw,memory
33 1 0:28 /else /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids
34 1 0:29 / /proc rw - proc proc rw
";
    const OWN: &str =
        "5:pids:/docker/abc\n4:memory:/docker/abc/job\n3:cpu,cpuacct:/user\n1:name=systemd:/x\n0::/user\n";

    #[test]
    fn groups_are_found_below_our_own_and_nowhere_else() {
        let found = CgroupEnvironment::parse(HYBRID, OWN);
        let at = |path: &str| Some(PathBuf::from(path));
        assert_eq!(found.legacy.get(&Controller::Memory).cloned(), at("/sys/fs/cgroup/memory/job"));
        assert_eq!(found.legacy.get(&Controller::Cpu).cloned(), at("/sys/fs/cgroup/cpu,cpuacct/user"));
        assert_eq!(found.legacy.get(&Controller::Accounting), found.legacy.get(&Controller::Cpu));
        assert_eq!(found.legacy.get(&Controller::Pids), None, "our group is not below that mount's root");
        assert_eq!(found.unified, Some(("/sys/fs/cgroup/unified".into(), "/sys/fs/cgroup/unified/user".into())));
    }

    #[test]
    fn a_group_outside_our_namespace_is_not_guessed() {
        let mounts = "30 1 0:25 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n";
        assert_eq!(CgroupEnvironment::parse(mounts, "0::/../other\n").unified, None);
        assert_eq!(CgroupEnvironment::parse("", ""), CgroupEnvironment::default());
        assert_eq!(CgroupEnvironment::parse("a - cgroup2\n - \n", ":\n::::\n"), CgroupEnvironment::default());
    }

    #[test]
    fn a_run_id_cannot_leave_its_directory() {
        assert_eq!(group_name(&RunId("../../x/y".to_owned())), "tollgate-run-xy");
    }

    #[test]
    fn a_leaf_made_for_us_gives_way_to_its_parent() {
        let mount = Path::new("/m");
        assert_eq!(delegated_ancestor(mount, Path::new("/m/s.service/supervisor")), Path::new("/m/s.service"));
        assert_eq!(delegated_ancestor(mount, Path::new("/m/s.service")), Path::new("/m/s.service"));
        assert_eq!(delegated_ancestor(mount, mount), mount);
    }

    #[test]
    fn a_scope_request_counts_its_properties() {
        let bounds = ScopeBounds { memory: Some(64 << 20), pids: Some(66), cpus: Some(1.5) };
        let words = scope_request(Manager::User, "u.scope", [7, 8].map(Pid::from_raw), &bounds, OomPolicy::Continue);
        assert_eq!(words[6..10], ["ssa(sv)a(sa(sv))", "u.scope", "fail", "9"]);
        assert_eq!(words.last().map(String::as_str), Some("0"));
        let has = |wanted: [&str; 3]| words.windows(3).any(|found| found == wanted);
        assert!(has(["MemoryMax", "t", "67108864"]) && has(["MemorySwapMax", "t", "0"]));
        assert!(has(["TasksMax", "t", "66"]) && has(["CPUQuotaPerSecUSec", "t", "1500000"]));
    }

    #[test]
    fn a_systemd_that_does_not_answer_is_an_error_that_names_the_unit() {
        let environment = CgroupEnvironment { unified: Some(("/m".into(), "/m".into())), ..Default::default() };
        let run = RunId("nobus".to_owned());
        let bounds = ScopeBounds::default();
        if Path::new("/run/systemd/system").exists() {
            // There systemd would answer.
            return;
        }
        let error = Group::scope(&environment, Manager::System, &run, Pid::this(), &bounds).expect_err("no systemd");
        assert!(error.to_string().contains("tollgate-run-nobus.scope"), "{error}");
    }
}
