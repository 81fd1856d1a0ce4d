//! Holds one run to its limits.
//!
//! [`Enforcer::prepare`] finds, for each limit, the strongest mechanism that this machine gives, in this order: a
//! control group of version 2 below our own, groups of version 1 below our own, a scope from systemd, and watching.
//! The kernel's mechanisms cap; watching measures every so often and kills. A limit that a user asked for and that
//! only watching could hold is refused, unless the policy says best effort; what is watched is said in
//! [`Enforcer::degraded`]. `docs/limits.md` has the table.
//!
//! Time and bytes written are measured by the supervisor everywhere, with a stated overshoot, and count as enforced.
//! Bytes printed are counted by whoever pumps the streams.

use super::{
    cgroup::{CgroupEnvironment, Controller, Group, Manager, ScopeBounds, SwapCap},
    kernel, watch,
};
use crate::{
    effect::RunId,
    ledger::record::{OutcomeType, Usage},
    policy::limits::{Asked, Limit, Limits},
};
use nix::{
    sys::resource::{getrlimit, Resource},
    unistd::Pid,
};
use std::{
    io,
    path::PathBuf,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};
use tollgate_shim::protocol::Enforcement;

/// The usual time between two measurements.
pub const INTERVAL: Duration = Duration::from_millis(50);

/// The least time between two measurements, near a limit.
const INTERVAL_MIN: Duration = Duration::from_millis(10);

/// The most time between two measurements where nothing can be exceeded sooner.
const INTERVAL_MAX: Duration = Duration::from_secs(1);

/// The least time between two measurements of the run's layer on disk.
const LAYER_INTERVAL_MIN: Duration = Duration::from_millis(100);

/// The most time between two looks at the process tree, however long one takes: the overshoot that is promised where
/// memory or processes are watched on a busy host.
const TREE_INTERVAL_MAX: Duration = Duration::from_millis(200);

/// A measurement may take at most one part in this many of the time, so that a large tree is measured less often.
const MEASURING_SHARE: u32 = 20;

/// What the jail itself needs beside the program, in processes: the shim outside and pid 1. Counted by the kernel
/// like any other, so the cap is this much above what the program may have.
const SHIM_PROCESSES: u64 = 2;

/// The share of [`SHIM_PROCESSES`] that `RLIMIT_NPROC` is sure to count: pid 1. The outer process may stay outside
/// the jail's user namespace, and a program must not profit from that.
const SHIM_PROCESSES_INSIDE: u64 = 1;

/// The soft limit of open files: what Linux gives by default, which programs that use select(2) rely on.
const OPEN_FILES_SOFT: u64 = 1024;

/// The hard limit of open files: systemd's default (`DefaultLimitNOFILE=`, systemd-system.conf(5)).
const OPEN_FILES_HARD: u64 = 524_288;

/// Memory that a process may lock: the kernel's default (`MLOCK_LIMIT`, linux/resource.h, since 5.16).
const LOCKED_BYTES: u64 = 8 * 1024 * 1024;

/// Since this kernel `RLIMIT_NPROC` counts by user namespace ("Reimplement RLIMIT_NPROC on top of ucounts"); before
/// it, all of the user's processes on the host count, so two runs would share one budget.
const PROCESSES_BY_NAMESPACE_SINCE: (u32, u32) = (5, 14);

/// A limit that cannot be held here.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the limit `{limit}` cannot be enforced on this machine: {why}")]
pub struct LimitRefused {
    /// The limit, by its name in a policy.
    pub limit: &'static str,
    /// What is missing.
    pub why: String,
    /// How to get it, or how to run without it.
    pub remedy: String,
}

/// A limit that ended a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exceeded {
    /// Which, as the outcome's type.
    pub kind: OutcomeType,
    /// How much was used when it ended, in the limit's unit: microseconds, bytes or processes; or
    /// [`Exceeded::UNMEASURABLE`].
    pub used: u64,
    /// The limit.
    pub limit: u64,
}

impl Exceeded {
    /// Used as much as cannot be told, which is over any limit.
    pub const UNMEASURABLE: u64 = u64::MAX;
}

/// How one limit is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Held {
    /// Nobody asked for it.
    Unlimited,
    /// The kernel caps it for the whole tree.
    ByKernel,
    /// The supervisor measures and kills.
    ByWatching,
    /// Not at all, and `degraded` says so.
    Not,
}

/// How each limit is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Mechanisms {
    memory: Held,
    pids: Held,
    cpus: Held,
}

/// Holds one run to its limits, from before its first process to after its last.
///
/// Dropping it stops the watch and removes the run's groups; it does not kill.
#[derive(Debug)]
pub struct Enforcer {
    run: RunId,
    limits: Limits,
    enforcement: Enforcement,
    environment: CgroupEnvironment,
    mechanisms: Mechanisms,
    group: Option<Arc<Group>>,
    /// The scope to be asked for once there is a process to put into it.
    scope: Option<Manager>,
    layer: Option<Layer>,
    degraded: Vec<String>,
    watching: Option<Watching>,
}

/// The run's own layer of the workspace.
#[derive(Clone, Debug)]
struct Layer {
    path: PathBuf,
    /// What it held before the program began, which the program did not write.
    before: u64,
}

impl Layer {
    fn held(&self) -> watch::Held {
        let held = watch::held_by(&self.path);
        watch::Held { bytes: held.bytes.saturating_sub(self.before), ..held }
    }
}

/// What a run uses while it goes on. `output_bytes` is not known here.
#[derive(Clone, Debug)]
pub struct Gauge {
    started: Instant,
    shared: Arc<Shared>,
    group: Option<Arc<Group>>,
}

impl Gauge {
    /// As of now; what nobody counts all the time was measured at most a second ago.
    pub fn usage(&self) -> Usage {
        let mut usage = self.shared.lock().usage.clone();
        usage.wall_us = micros(self.started.elapsed());
        if let Some(group) = &self.group {
            read_group(group, &mut usage);
        }
        usage
    }
}

#[derive(Debug)]
struct Watching {
    root: Pid,
    started: Instant,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    wake: Condvar,
}

#[derive(Clone, Debug, Default)]
struct State {
    exceeded: Option<Exceeded>,
    usage: Usage,
    notes: Vec<String>,
    ending: Ending,
}

/// Whether the watch goes on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Ending {
    /// It does.
    #[default]
    Not,
    /// Its owner is done.
    Now,
}

impl Shared {
    /// The state. A panic of another holder leaves plain numbers, which stay usable.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Enforcer {
    /// Finds a mechanism for each limit and makes the run's groups.
    ///
    /// # Errors
    /// [`LimitRefused`] for a limit that a user asked for and nothing here can cap, unless `enforcement` is best
    /// effort.
    pub fn prepare(
        run: &RunId,
        limits: &Limits,
        enforcement: Enforcement,
        environment: &CgroupEnvironment,
    ) -> Result<Enforcer, LimitRefused> {
        let mut enforcer = Enforcer {
            run: run.clone(),
            limits: limits.clone(),
            enforcement,
            environment: environment.clone(),
            mechanisms: Mechanisms { memory: Held::Unlimited, pids: Held::Unlimited, cpus: Held::Unlimited },
            group: None,
            scope: None,
            layer: None,
            degraded: Vec::new(),
            watching: None,
        };
        let wanted = enforcer.wanted();
        let group = Group::unified(environment, run, &wanted).or_else(|unified| {
            Group::legacy(environment, run, &wanted).map_err(|legacy| format!("{unified}; {legacy}"))
        });
        match (group, environment.systemd) {
            (Ok(group), _) => enforcer.hold_by(group)?,
            // Whether systemd grants it shows when there is a process; until then nothing is promised.
            (Err(_), Some(manager)) => enforcer.scope = Some(manager),
            (Err(why), None) => enforcer.hold_without_group(&why)?,
        }
        Ok(enforcer)
    }

    /// Names the directory that holds the run's own layer of the workspace, for `write_bytes`. Call it before
    /// [`Enforcer::start_watch`].
    pub fn measure_layer(&mut self, layer: PathBuf) {
        self.layer = Some(Layer { path: layer, before: 0 });
    }

    /// As [`Enforcer::measure_layer`], for a copy of the workspace: what it holds by now is not the program's, so only
    /// its growth counts.
    pub fn measure_copy(&mut self, copy: PathBuf) {
        let before = watch::held_by(&copy).bytes;
        self.layer = Some(Layer { path: copy, before });
    }

    /// Calls `spawn` on a thread of its own, so that the process it starts is born inside the run's groups where that
    /// can be had, which saves the 5 to 20 ms that moving a process costs. [`Enforcer::admit`] must follow either way.
    ///
    /// The thread ends as soon as `spawn` has returned: the process must not ask to be killed when its parent thread
    /// ends (`PR_SET_PDEATHSIG`).
    ///
    /// # Errors
    /// That the thread could not be made. What `spawn` returns, or that the thread could not enter, is the thread's.
    pub fn spawn_inside<T: Send + 'static>(
        &self,
        spawn: impl FnOnce() -> io::Result<T> + Send + 'static,
    ) -> io::Result<JoinHandle<io::Result<T>>> {
        let group = self.group.clone().filter(|group| group.version() == super::cgroup::Version::Legacy);
        thread::Builder::new().name("spawn".to_owned()).stack_size(256 * 1024).spawn(move || {
            if let Some(group) = &group {
                group.enter_by_thread().map_err(io::Error::other)?;
            }
            spawn()
        })
    }

    /// Puts the shim into the run's groups, or has systemd make a scope around it. Its limits hold from here on.
    ///
    /// # Errors
    /// [`LimitRefused`] as for [`Enforcer::prepare`]; the shim must then not be told to begin.
    pub fn admit(&mut self, pid: Pid) -> Result<(), LimitRefused> {
        if let Some(manager) = self.scope.take() {
            let bounds = ScopeBounds {
                memory: self.limits.memory.value(),
                pids: self.limits.pids.value().map(|count| count.saturating_add(SHIM_PROCESSES)),
                cpus: self.limits.cpus.value(),
            };
            return match Group::scope(&self.environment, manager, &self.run, pid, &bounds) {
                Ok(group) => self.hold_by(group),
                Err(why) => self.hold_without_group(&why.to_string()),
            };
        }
        let Some(group) = &self.group else { return Ok(()) };
        match group.admit(pid) {
            Ok(()) => Ok(()),
            Err(why) => {
                let why = why.to_string();
                self.group = None;
                self.hold_without_group(&why)
            }
        }
    }

    /// The limits that each process inherits, for the jail's plan: `RLIMIT_` number, soft and hard value
    /// (setrlimit(2)). Never `RLIMIT_AS`: address space is not memory, and runtimes reserve terabytes of it.
    ///
    /// No hard value is above our own, which an unprivileged shim could not set.
    pub fn rlimits(&self) -> Vec<(u32, u64, u64)> {
        let mut table = vec![
            // A core file would be written outside the jail's view by the host's handler.
            (Resource::RLIMIT_CORE, 0, 0),
            (Resource::RLIMIT_NOFILE, OPEN_FILES_SOFT, OPEN_FILES_HARD),
            (Resource::RLIMIT_MEMLOCK, LOCKED_BYTES, LOCKED_BYTES),
            // Real-time scheduling could starve the supervisor.
            (Resource::RLIMIT_RTPRIO, 0, 0),
            (Resource::RLIMIT_NICE, 0, 0),
        ];
        if let Some(bytes) = self.limits.write_bytes.value() {
            table.push((Resource::RLIMIT_FSIZE, bytes, bytes));
        }
        if let Some(cpu) = self.limits.cpu.value() {
            // By process and in whole seconds, so only a backstop for a supervisor that cannot run; rounded up and a
            // second more, so that the supervisor, which sees the tree, is first to act.
            let soft = cpu.as_secs().saturating_add(u64::from(cpu.subsec_nanos() > 0)).saturating_add(1);
            table.push((Resource::RLIMIT_CPU, soft, soft.saturating_add(1)));
        }
        if let (Some(count), true) = (self.limits.pids.value(), processes_count_by_namespace()) {
            let count = count.saturating_add(SHIM_PROCESSES_INSIDE);
            table.push((Resource::RLIMIT_NPROC, count, count));
        }
        table
            .into_iter()
            .map(|(resource, soft, hard)| {
                let own = getrlimit(resource).map_or(u64::MAX, |(_, hard)| hard);
                (resource as u32, soft.min(own), hard.min(own))
            })
            .collect()
    }

    /// Starts to measure and to hold the limits that are measured; wall time counts from here.
    ///
    /// `root` is the process from which everything in the jail descends. A thread measures, and kills by itself, so
    /// that a limit holds even while the caller is busy.
    ///
    /// # Errors
    /// That no thread can be had. The run must then be ended: nobody watches it.
    pub fn start_watch(&mut self, root: Pid) -> io::Result<()> {
        let shared = Arc::new(Shared::default());
        let started = Instant::now();
        let watcher = Watcher {
            root,
            started,
            limits: self.limits.clone(),
            mechanisms: self.mechanisms,
            group: self.group.clone(),
            layer: self.layer.clone(),
            tree: watch::TreeWatch::new(root),
            layer_due: started,
            parallel: thread::available_parallelism().map_or(1, |count| u32::try_from(count.get()).unwrap_or(u32::MAX)),
        };
        let for_thread = Arc::clone(&shared);
        let thread = thread::Builder::new()
            .name("limits".to_owned())
            .stack_size(256 * 1024)
            .spawn(move || watcher.run(&for_thread))?;
        self.watching = Some(Watching { root, started, shared, thread: Some(thread) });
        Ok(())
    }

    /// When wall time will be used up, if it is limited and the watch has started.
    pub fn deadline(&self) -> Option<Instant> {
        self.watching.as_ref()?.started.checked_add(self.limits.wall.value()?)
    }

    /// The limit for which the watch killed the run, if it did. What the kernel killed for is found by
    /// [`Enforcer::memory_kill`].
    pub fn exceeded(&self) -> Option<Exceeded> {
        self.watching.as_ref().and_then(|watching| watching.shared.lock().exceeded)
    }

    /// What memory limit it was, if the kernel killed at least one process of the run for it.
    pub fn memory_kill(&self) -> Option<Exceeded> {
        let group = self.group.as_deref()?;
        let limit = self.limits.memory.value()?;
        (group.out_of_memory_kills() > 0).then(|| Exceeded {
            kind: OutcomeType::MemoryExceeded,
            used: group.memory_peak().unwrap_or(limit),
            limit,
        })
    }

    /// What the run has used until now; final once its last process has ended. `output_bytes` is not known here.
    pub fn usage(&self) -> Usage {
        let mut usage = match &self.watching {
            Some(watching) => {
                let mut usage = watching.shared.lock().usage.clone();
                if watching.thread.is_none() {
                    return usage;
                }
                usage.wall_us = micros(watching.started.elapsed());
                usage
            }
            None => Usage::default(),
        };
        if let Some(group) = &self.group {
            read_group(group, &mut usage);
        }
        usage
    }

    /// Something that says what the run uses while it goes on, from another thread; none before the watch starts.
    ///
    /// It holds the run's groups: let it go before the enforcer.
    pub fn gauge(&self) -> Option<Gauge> {
        let watching = self.watching.as_ref()?;
        Some(Gauge { started: watching.started, shared: Arc::clone(&watching.shared), group: self.group.clone() })
    }

    /// What of the run's limits is weaker than asked, in words for its receipts.
    pub fn degraded(&self) -> Vec<String> {
        self.degraded.clone()
    }

    /// What happened within the limits that the outcome does not show: a child killed for memory, forks refused.
    pub fn notes(&self) -> Vec<String> {
        let mut notes = match &self.watching {
            Some(watching) => watching.shared.lock().notes.clone(),
            None => Vec::new(),
        };
        let Some(group) = &self.group else { return notes };
        let kills = group.out_of_memory_kills();
        if kills > 0 {
            let victims = victims(group);
            let who = if victims.is_empty() { String::new() } else { format!(" ({})", victims.join(", ")) };
            let plural = if kills == 1 { "process" } else { "processes" };
            notes.push(format!(
                "the kernel killed {kills} {plural} for memory{who}: limit {}, peak {}",
                super::outcome::bytes(self.limits.memory.value().unwrap_or(0)),
                super::outcome::bytes(group.memory_peak().unwrap_or(0)),
            ));
        }
        let refused = group.refused_forks();
        if refused > 0 {
            notes.push(format!(
                "the kernel refused {refused} forks beyond {} processes and threads",
                self.limits.pids.value().unwrap_or(0)
            ));
        }
        notes
    }

    /// Ends the watch once the program has ended, so that applying its changes does not count as its time. From here
    /// on [`Enforcer::exceeded`] and [`Enforcer::usage`] stay as they are.
    ///
    /// The layer is measured a last time: a program that wrote too much and ended between two measurements has still
    /// exceeded its limit.
    pub fn finish(&mut self) {
        let usage = self.usage();
        let Some(watching) = &mut self.watching else { return };
        let Some(thread) = watching.thread.take() else { return };
        watching.shared.lock().ending = Ending::Now;
        watching.shared.wake.notify_all();
        // A panic there has been reported already, and there is nothing left to watch.
        let _ = thread.join();
        let mut state = watching.shared.lock();
        let measured = state.usage.write_bytes;
        state.usage = Usage { write_bytes: measured, ..usage };
        let Some(layer) = &self.layer else { return };
        let held = layer.held();
        state.usage.write_bytes = held.bytes;
        let used = if held.too_deep { Exceeded::UNMEASURABLE } else { held.bytes };
        if let (None, Some(limit)) = (state.exceeded, self.limits.write_bytes.value()) {
            if used > limit {
                state.exceeded = Some(Exceeded { kind: OutcomeType::WriteExceeded, used, limit });
            }
        }
    }

    /// Kills everything in the run, the shim included. Returns at once; call it again until the shim is reaped if
    /// something may be forking.
    pub fn kill(&self) {
        kill_run(self.group.as_deref(), self.watching.as_ref().map(|watching| watching.root));
    }

    /// Stops the watch and removes the run's groups. Dropping does the same.
    pub fn close(self) {}

    /// The controllers that these limits need; accounting always, for the receipt.
    fn wanted(&self) -> Vec<Controller> {
        let mut wanted = Vec::new();
        wanted.extend(self.limits.memory.value().map(|_| Controller::Memory));
        wanted.extend(self.limits.pids.value().map(|_| Controller::Pids));
        wanted.extend(self.limits.cpus.value().map(|_| Controller::Cpu));
        wanted.push(Controller::Accounting);
        wanted
    }

    /// Sets the group's limits, and falls back for those that it cannot hold.
    fn hold_by(&mut self, group: Group) -> Result<(), LimitRefused> {
        self.degraded.clear();
        let memory = self.limits.memory.value().map(|bytes| group.limit_memory(bytes));
        let pids = self.limits.pids.value().map(|count| group.limit_pids(count.saturating_add(SHIM_PROCESSES)));
        let cpus = self.limits.cpus.value().map(|cpus| group.limit_cpus(cpus));
        match memory {
            None => self.mechanisms.memory = Held::Unlimited,
            Some(Ok(swap)) => {
                self.mechanisms.memory = Held::ByKernel;
                if swap == SwapCap::NotCounted {
                    self.without_swap_cap()?;
                }
            }
            Some(Err(why)) => self.watch_memory(&why.to_string())?,
        }
        match pids {
            None => self.mechanisms.pids = Held::Unlimited,
            Some(Ok(())) => self.mechanisms.pids = Held::ByKernel,
            Some(Err(why)) => self.count_processes_otherwise(&why.to_string())?,
        }
        match cpus {
            None => self.mechanisms.cpus = Held::Unlimited,
            Some(Ok(())) => self.mechanisms.cpus = Held::ByKernel,
            Some(Err(why)) => self.without_cpus(&why.to_string())?,
        }
        self.group = Some(Arc::new(group));
        Ok(())
    }

    fn hold_without_group(&mut self, why: &str) -> Result<(), LimitRefused> {
        self.degraded.clear();
        if self.limits.memory.value().is_some() {
            self.watch_memory(why)?;
        }
        if self.limits.pids.value().is_some() {
            self.count_processes_otherwise(why)?;
        }
        if self.limits.cpus.value().is_some() {
            self.without_cpus(why)?;
        }
        Ok(())
    }

    fn watch_memory(&mut self, why: &str) -> Result<(), LimitRefused> {
        self.may_weaken("memory", &self.limits.memory, why)?;
        self.mechanisms.memory = Held::ByWatching;
        self.degraded.push(format!(
            "memory is watched every {} ms, up to {} ms on a busy host, not capped by the kernel: a run may exceed it by \
             what it can allocate in that time, and files in its private /tmp and /dev/shm are bounded apart ({why})",
            INTERVAL.as_millis(),
            TREE_INTERVAL_MAX.as_millis()
        ));
        Ok(())
    }

    /// `RLIMIT_NPROC` inside the jail's own user namespace caps the tree as well as a group does, so it is no
    /// weakening; only an older kernel leaves nothing but watching.
    fn count_processes_otherwise(&mut self, why: &str) -> Result<(), LimitRefused> {
        if processes_count_by_namespace() {
            self.mechanisms.pids = Held::ByKernel;
            return Ok(());
        }
        self.may_weaken("pids", &self.limits.pids, why)?;
        self.mechanisms.pids = Held::ByWatching;
        self.degraded.push(format!(
            "processes are watched every {} ms, up to {} ms on a busy host, not capped by the kernel ({why})",
            INTERVAL.as_millis(),
            TREE_INTERVAL_MAX.as_millis()
        ));
        Ok(())
    }

    fn without_cpus(&mut self, why: &str) -> Result<(), LimitRefused> {
        self.may_weaken("cpus", &self.limits.cpus, why)?;
        self.mechanisms.cpus = Held::Not;
        self.degraded.push(format!("processor bandwidth is not limited ({why})"));
        Ok(())
    }

    fn without_swap_cap(&mut self) -> Result<(), LimitRefused> {
        let why = "this kernel does not account swap by control group, and the host has swap";
        self.may_weaken("memory", &self.limits.memory, why)?;
        self.degraded.push(format!("memory that is swapped out is not counted ({why})"));
        Ok(())
    }

    /// Whether a limit may be held by less than the kernel.
    fn may_weaken<T>(&self, limit: &'static str, asked: &Limit<T>, why: &str) -> Result<(), LimitRefused> {
        match (asked.asked, self.enforcement) {
            (Asked::Builtin, _) | (Asked::User, Enforcement::BestEffort) => Ok(()),
            (Asked::User, Enforcement::Strict) => {
                Err(LimitRefused { limit, why: why.to_owned(), remedy: remedy(limit, self.environment.systemd) })
            }
        }
    }
}

impl Drop for Enforcer {
    fn drop(&mut self) {
        self.finish();
    }
}

fn remedy(limit: &str, systemd: Option<Manager>) -> String {
    let delegate = match systemd {
        Some(_) => {
            "have root delegate the controllers: put `[Service]` and `Delegate=cpu memory pids` into \
             /etc/systemd/system/user@.service.d/delegate.conf, run `systemctl daemon-reload`, and log in again"
        }
        None => {
            "run where control groups can be made: as a service with `Delegate=yes`, under \
             `systemd-run --user --scope -p Delegate=yes`, or as root"
        }
    };
    format!("{delegate}; or leave out `{limit}`; or run with `--best-effort`, in a policy `enforce = \"best-effort\"` under `[jail]`, which every receipt then repeats")
}

/// Whether `RLIMIT_NPROC` counts the processes of one user namespace.
fn processes_count_by_namespace() -> bool {
    nix::sys::utsname::uname()
        .ok()
        .and_then(|name| release(&name.release().to_string_lossy()))
        .is_some_and(|release| release >= PROCESSES_BY_NAMESPACE_SINCE)
}

fn release(text: &str) -> Option<(u32, u32)> {
    let mut numbers = text.split(|one: char| !one.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

/// What the watch's thread holds.
struct Watcher {
    root: Pid,
    started: Instant,
    limits: Limits,
    mechanisms: Mechanisms,
    group: Option<Arc<Group>>,
    layer: Option<Layer>,
    tree: watch::TreeWatch,
    layer_due: Instant,
    parallel: u32,
}

impl Watcher {
    fn run(mut self, shared: &Shared) {
        let mut state = shared.lock();
        while state.ending == Ending::Not {
            let mut next = state.clone();
            drop(state);
            let pause = match next.exceeded {
                None => self.measure(&mut next),
                // Until the owner is done: something may have been forked past the last round.
                Some(_) => INTERVAL,
            };
            if next.exceeded.is_some() {
                // The outcome is written down before the kill, so that whoever sees the death finds its reason.
                shared.lock().exceeded = next.exceeded;
                kill_run(self.group.as_deref(), Some(self.root));
            }
            state = shared.lock();
            let ending = state.ending;
            *state = State { ending, ..next };
            if state.ending == Ending::Not {
                let waited = shared.wake.wait_timeout(state, pause);
                state = waited.unwrap_or_else(PoisonError::into_inner).0;
            }
        }
    }

    /// Measures once and returns how long the next measurement may wait.
    fn measure(&mut self, state: &mut State) -> Duration {
        let now = Instant::now();
        state.usage.wall_us = micros(now.duration_since(self.started));
        let mut pause = INTERVAL_MAX;

        let over = |kind, used: u64, limit: u64| (used > limit).then_some(Exceeded { kind, used, limit });
        let mut found = None;
        if let Some(wall) = self.limits.wall.value() {
            let used = now.duration_since(self.started);
            if used >= wall {
                found = Some(Exceeded { kind: OutcomeType::WallExceeded, used: micros(used), limit: micros(wall) });
            }
            pause = pause.min(wall.saturating_sub(used));
        }

        let group_counts_time = self.group.as_ref().is_some_and(|group| group.has(Controller::Accounting));
        if let Some(group) = &self.group {
            read_group(group, &mut state.usage);
        }
        let needs_tree = !group_counts_time
            || self.mechanisms.memory == Held::ByWatching
            || self.mechanisms.pids == Held::ByWatching;
        if needs_tree {
            let sample = self.tree.sample(self.limits.memory.value());
            if !group_counts_time {
                state.usage.cpu_us = state.usage.cpu_us.max(sample.cpu_us);
            }
            if self.group.as_ref().is_none_or(|group| !group.has(Controller::Memory)) {
                state.usage.memory_peak = state.usage.memory_peak.max(sample.memory);
            }
            if self.group.as_ref().is_none_or(|group| !group.has(Controller::Pids)) {
                state.usage.pids_peak = state.usage.pids_peak.max(sample.tasks);
            }
            if let (Held::ByWatching, Some(limit)) = (self.mechanisms.memory, self.limits.memory.value()) {
                found = found.or(over(OutcomeType::MemoryExceeded, sample.memory, limit));
            }
            if let (Held::ByWatching, Some(limit)) = (self.mechanisms.pids, self.limits.pids.value()) {
                let used = sample.tasks.saturating_sub(SHIM_PROCESSES);
                found = found.or(over(OutcomeType::PidsExceeded, used, limit));
            }
            pause = pause.min((now.elapsed() * MEASURING_SHARE).clamp(INTERVAL, TREE_INTERVAL_MAX));
        }
        if let Some(limit) = self.limits.cpu.value() {
            let (used, limit) = (state.usage.cpu_us, micros(limit));
            if used >= limit {
                found = found.or(Some(Exceeded { kind: OutcomeType::CpuExceeded, used, limit }));
            }
            // With every processor busy the rest lasts at least this long.
            let rest = Duration::from_micros(limit.saturating_sub(used)) / self.parallel.max(1);
            pause = pause.min(rest.max(INTERVAL_MIN));
        }
        if let (Some(limit), Some(layer)) = (self.limits.write_bytes.value(), &self.layer) {
            if now >= self.layer_due {
                let begun = Instant::now();
                let held = layer.held();
                self.layer_due = Instant::now() + LAYER_INTERVAL_MIN.max(begun.elapsed() * MEASURING_SHARE);
                state.usage.write_bytes = held.bytes;
                let used = if held.too_deep { Exceeded::UNMEASURABLE } else { held.bytes };
                found = found.or(over(OutcomeType::WriteExceeded, used, limit));
                if held.hidden > 0 {
                    note(state, "directories that the program made unreadable were not measured".to_owned());
                }
            }
            pause = pause.min(self.layer_due.saturating_duration_since(Instant::now()));
        }
        state.exceeded = found;
        pause
    }
}

/// Writes a note down once.
fn note(state: &mut State, text: String) {
    if !state.notes.contains(&text) {
        state.notes.push(text);
    }
}

/// Takes what the group counts into the usage, never downwards.
fn read_group(group: &Group, usage: &mut Usage) {
    usage.cpu_us = usage.cpu_us.max(group.cpu_us().unwrap_or(0));
    usage.memory_peak = usage.memory_peak.max(group.memory_peak().unwrap_or(0));
    usage.pids_peak = usage.pids_peak.max(group.pids_peak().unwrap_or(0));
}

/// Kills everything in the run, once.
fn kill_run(group: Option<&Group>, root: Option<Pid>) {
    if let Some(group) = group {
        group.kill();
    }
    // The tree as well: what is killed twice is as dead, and nothing that is not in the group may live on.
    let Some(root) = root else { return };
    // First a handle on each member, which stays that process whatever becomes of its number; then a second look, so
    // that only handles of members are used; then all are killed, the root last, since the tree is found from it.
    let handles: Vec<_> = watch::TreeWatch::new(root)
        .members()
        .into_iter()
        .filter_map(|pid| kernel::pidfd_open(pid).ok().map(|handle| (pid, handle)))
        .collect();
    let mut members = watch::TreeWatch::new(root).members();
    // Pid 1 of the jail first: the kernel ends its namespace with it, forks in flight included.
    let inits = watch::namespace_inits(&members);
    members.retain(|pid| !inits.contains(pid));
    members.reverse();
    for pid in inits.into_iter().chain(members) {
        if let Some((_, handle)) = handles.iter().find(|(member, _)| *member == pid) {
            // ESRCH: it died by itself, which is what was wanted.
            let _ = kernel::pidfd_kill(handle);
        }
    }
}

/// The names and numbers of the processes that the kernel killed in this group, where its log can be read.
fn victims(group: &Group) -> Vec<String> {
    use std::{io::Read, os::unix::fs::OpenOptionsExt};
    // At most what the kernel keeps by default for a large host (CONFIG_LOG_BUF_SHIFT up to 18) and some.
    const RECORDS_MAX: usize = 65_536;
    let log = std::fs::OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK | libc::O_CLOEXEC).open("/dev/kmsg");
    let Ok(mut log) = log else { return Vec::new() };
    let mut found = Vec::new();
    // One read gives one record, of at most 8 KiB (dev-kmsg, Documentation/ABI/testing).
    let mut record = [0; 8192];
    for _ in 0..RECORDS_MAX {
        match log.read(&mut record) {
            Ok(0) => break,
            Ok(length) => found.extend(victim(&String::from_utf8_lossy(&record[..length]), group)),
            // EPIPE: records were overwritten while we read; the next read goes on behind them.
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {}
            Err(_) => break,
        }
    }
    found
}

/// The process that one record of the kernel's log says was killed in this group.
fn victim(record: &str, group: &Group) -> Option<String> {
    let (memcg, task, pid) = parse_oom(record)?;
    group.is_named(memcg).then(|| format!("{task}, pid {pid} on the host"))
}

/// The group, command name and pid of an `oom-kill:` record (`dump_oom_summary`, mm/oom_kill.c).
fn parse_oom(record: &str) -> Option<(&str, &str, u32)> {
    let fields = record.split_once("oom-kill:")?.1.lines().next()?;
    let (_, rest) = fields.split_once(",oom_memcg=")?;
    let (memcg, rest) = rest.split_once(",task_memcg=")?;
    let (_, rest) = rest.split_once(",task=")?;
    // The program chooses its name; the last `,pid=` is the kernel's.
    let (task, rest) = rest.rsplit_once(",pid=")?;
    let (pid, _) = rest.split_once(',')?;
    Some((memcg, task, pid.parse().ok()?))
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::limits::Bound;
    use std::{
        os::unix::process::{CommandExt, ExitStatusExt},
        process::{Child, Command, ExitStatus, Stdio},
        sync::atomic::{AtomicU32, Ordering},
    };

    fn no_limit<T>() -> Limit<T> {
        Limit { bound: Bound::Unlimited, asked: Asked::Builtin }
    }

    fn asked<T>(value: T) -> Limit<T> {
        Limit { bound: Bound::At(value), asked: Asked::User }
    }

    fn built_in<T>(value: T) -> Limit<T> {
        Limit { bound: Bound::At(value), asked: Asked::Builtin }
    }

    fn unlimited() -> Limits {
        Limits {
            wall: no_limit(),
            cpu: no_limit(),
            memory: no_limit(),
            pids: no_limit(),
            cpus: no_limit(),
            write_bytes: no_limit(),
            egress_bytes: no_limit(),
            effects: no_limit(),
            output_bytes: no_limit(),
        }
    }

    fn new_run() -> RunId {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        RunId(format!("test{}x{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed)))
    }

    /// The machine's groups, or none where the machine says that it has none (`TOLLGATE_TEST_WITHOUT=cgroup`) or the
    /// tests run as an ordinary user.
    fn groups() -> Option<CgroupEnvironment> {
        let told = std::env::var("TOLLGATE_TEST_WITHOUT").is_ok_and(|what| what.split(',').any(|one| one == "cgroup"));
        (!told && nix::unistd::geteuid().is_root()).then(CgroupEnvironment::detect)
    }

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        // As the shim does, nothing begins before it is told to.
        let script = format!("read begin; {script}");
        command.args(["-c", &script]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        command
    }

    /// Runs a command under an enforcer as the launcher does, and gives both when it has ended.
    fn run(limits: &Limits, environment: &CgroupEnvironment, layer: Option<PathBuf>, command: Command) -> Ran {
        run_with(limits, Enforcement::Strict, environment, layer, command)
    }

    fn begin(child: &mut Child) {
        use std::io::Write;
        child.stdin.take().expect("piped").write_all(b"\n").expect("it waits");
    }

    struct Ran {
        enforcer: Enforcer,
        status: ExitStatus,
        output: String,
        took: Duration,
    }

    fn run_with(
        limits: &Limits,
        enforcement: Enforcement,
        environment: &CgroupEnvironment,
        layer: Option<PathBuf>,
        mut command: Command,
    ) -> Ran {
        let mut enforcer = Enforcer::prepare(&new_run(), limits, enforcement, environment).expect("prepared");
        layer.into_iter().for_each(|layer| enforcer.measure_layer(layer));
        let mut child: Child =
            enforcer.spawn_inside(move || command.spawn()).expect("a thread").join().expect("ended").expect("spawned");
        let pid = Pid::from_raw(i32::try_from(child.id()).expect("a pid"));
        let started = Instant::now();
        enforcer.admit(pid).expect("admitted");
        enforcer.start_watch(pid).expect("watched");
        begin(&mut child);
        let output = child.wait_with_output().expect("waited");
        let took = started.elapsed();
        enforcer.finish();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        Ran { enforcer, status: output.status, output: text, took }
    }

    const HOG: &str = r#"python3 -c 'b=bytearray()
while 1: b+=b"x"*1000000'"#;

    #[test]
    fn wall_time_ends_a_run_that_ignores_signals() {
        let limits = Limits { wall: asked(Duration::from_millis(200)), ..unlimited() };
        let ran = run(
            &limits,
            &CgroupEnvironment::default(),
            None,
            shell("trap '' TERM INT XCPU; while :; do sleep 9; done"),
        );
        let exceeded = ran.enforcer.exceeded().expect("exceeded");
        assert_eq!((exceeded.kind, exceeded.limit), (OutcomeType::WallExceeded, 200_000));
        assert!(exceeded.used >= 200_000 && ran.took < Duration::from_secs(2), "{exceeded:?} {:?}", ran.took);
        assert_eq!(ran.status.signal(), Some(libc::SIGKILL));
    }

    #[test]
    fn a_stopped_process_is_ended_too() {
        let limits = Limits { wall: asked(Duration::from_millis(200)), ..unlimited() };
        let ran = run(&limits, &CgroupEnvironment::default(), None, shell("kill -STOP $$"));
        assert_eq!(ran.enforcer.exceeded().map(|one| one.kind), Some(OutcomeType::WallExceeded));
    }

    #[test]
    fn time_spent_after_the_program_ended_is_not_its_own() {
        let limits = Limits { wall: asked(Duration::from_millis(300)), ..unlimited() };
        let ran = run(&limits, &CgroupEnvironment::default(), None, shell("exit 3"));
        let usage = ran.enforcer.usage();
        thread::sleep(Duration::from_millis(400));
        assert_eq!(ran.enforcer.exceeded(), None);
        assert_eq!(ran.enforcer.usage(), usage);
        assert_eq!(ran.status.code(), Some(3));
    }

    #[test]
    fn processor_time_is_summed_over_the_tree_even_when_the_signal_is_caught() {
        let limits = Limits { cpu: asked(Duration::from_millis(400)), ..unlimited() };
        let script = "trap 'echo caught' XCPU; (while :; do :; done) & (while :; do :; done) & wait";
        for environment in [Some(CgroupEnvironment::default()), groups()].into_iter().flatten() {
            let ran = run(&limits, &environment, None, shell(script));
            let exceeded = ran.enforcer.exceeded().expect("exceeded");
            assert_eq!((exceeded.kind, exceeded.limit), (OutcomeType::CpuExceeded, 400_000));
            assert!((400_000..800_000).contains(&exceeded.used), "{exceeded:?}");
        }
    }

    #[test]
    fn the_kernel_kills_for_memory_and_the_peak_is_known() {
        let Some(environment) = groups() else { return };
        let limits = Limits { memory: asked(64 << 20), ..unlimited() };
        let ran = run(&limits, &environment, None, shell(&format!("exec {HOG}")));
        assert_eq!(ran.status.signal(), Some(libc::SIGKILL));
        let kill = ran.enforcer.memory_kill().expect("a kill");
        assert_eq!((kill.kind, kill.limit), (OutcomeType::MemoryExceeded, 64 << 20));
        assert!(kill.used > 60 << 20 && kill.used <= 64 << 20, "{kill:?}");
        assert!(ran.enforcer.degraded().is_empty(), "{:?}", ran.enforcer.degraded());
    }

    #[test]
    fn a_shell_outlives_its_child_killed_for_memory_and_a_note_says_so() {
        let Some(environment) = groups() else { return };
        let limits = Limits { memory: asked(64 << 20), ..unlimited() };
        let ran = run(&limits, &environment, None, shell(&format!("{HOG}; echo rc $?")));
        assert_eq!((ran.output.trim(), ran.status.code()), ("rc 137", Some(0)));
        let notes = ran.enforcer.notes().join("\n");
        assert!(notes.contains("killed 1 process for memory") && notes.contains("64 MiB"), "{notes}");
        if std::fs::File::open("/dev/kmsg").is_ok() {
            assert!(notes.contains("(python3, pid "), "{notes}");
        }
    }

    #[test]
    fn groups_are_gone_when_the_enforcer_is() {
        let Some(environment) = groups() else { return };
        let limits = Limits { memory: asked(64 << 20), pids: asked(64), cpus: asked(1.0), ..unlimited() };
        let ran = run(&limits, &environment, None, shell("true"));
        let name = format!("tollgate-run-{}", ran.enforcer.run);
        let places: Vec<PathBuf> = environment.legacy.values().map(|own| own.join(&name)).collect();
        let unified = environment.unified.as_ref().map(|(_, own)| own.join(&name));
        assert!(places.iter().chain(&unified).any(|place| place.exists()), "no group was made");
        ran.enforcer.close();
        let until = Instant::now() + Duration::from_secs(6);
        while places.iter().chain(&unified).any(|place| place.exists()) {
            assert!(Instant::now() < until, "a group is left");
            thread::sleep(Duration::from_millis(10));
        }
    }

    #[test]
    fn a_sweep_removes_only_the_groups_of_runs_that_are_over() {
        let Some(environment) = groups() else { return };
        let [over, alive] = [new_run(), new_run()];
        let wanted = [Controller::Pids];
        let make =
            |run| Group::unified(&environment, run, &wanted).or_else(|_| Group::legacy(&environment, run, &wanted));
        let kept = make(&alive).expect("made");
        // As a supervisor that was killed leaves it.
        std::mem::forget(make(&over).expect("made"));
        super::super::cgroup::sweep(&environment, |run| *run == over);
        assert!(kept.limit_pids(5).is_ok(), "a living run's group was removed");
        drop(make(&over).expect("the old one is gone, or the name would be taken"));
    }

    #[test]
    fn a_fork_bomb_stops_at_the_groups_limit_and_refused_forks_are_noted() {
        let Some(environment) = groups() else { return };
        let limits = Limits { pids: asked(32), ..unlimited() };
        let ran = run(&limits, &environment, None, shell(FORKS));
        assert!(ran.output.contains("Resource temporarily unavailable"), "{}", ran.output);
        let made: u64 = ran.output.split_whitespace().next().and_then(|word| word.parse().ok()).expect("a number");
        assert!((16..=34).contains(&made), "{made}");
        let notes = ran.enforcer.notes().join("\n");
        assert!(notes.contains("refused 1 forks"), "{notes}");
        assert!(ran.enforcer.usage().pids_peak <= 34);
    }

    const FORKS: &str = r#"python3 -c 'import os, time
n = 0
try:
    while n < 100:
        if os.fork() == 0: time.sleep(0.5); os._exit(0)
        n += 1
    print(n, "no limit")
except OSError as e: print(n, e.strerror)'"#;

    #[test]
    fn the_process_limit_of_a_user_namespace_is_not_shared_by_two_runs() {
        let limits = Limits { pids: asked(32), ..unlimited() };
        let enforcer = Enforcer::prepare(&new_run(), &limits, Enforcement::Strict, &CgroupEnvironment::default())
            .expect("RLIMIT_NPROC is as good as a group");
        let number = enforcer.rlimits().into_iter().find(|row| row.0 == libc::RLIMIT_NPROC).expect("in the plan").1;
        assert_eq!(number, 33);
        let start = || {
            let mut command = Command::new("unshare");
            let limit = format!("--nproc={number}:{number}");
            command.args(["-Ur", "prlimit", &limit, "sh", "-c", FORKS]);
            command.env("PATH", "/usr/bin:/bin").stdout(Stdio::piped());
            if nix::unistd::geteuid().is_root() {
                // The kernel exempts the host's uid 0, which no jail runs as.
                command.uid(65_534).gid(65_534);
            }
            command.spawn().expect("started")
        };
        let both = [start(), start()];
        for child in both {
            let output = child.wait_with_output().expect("waited");
            let text = String::from_utf8_lossy(&output.stdout).into_owned();
            let made: u64 = text.split_whitespace().next().and_then(|word| word.parse().ok()).expect("a number");
            assert!(text.contains("Resource temporarily unavailable") && (28..=33).contains(&made), "{text}");
        }
    }

    #[test]
    fn processor_bandwidth_is_capped() {
        let Some(environment) = groups() else { return };
        let limits = Limits { cpus: asked(0.5), wall: asked(Duration::from_secs(2)), ..unlimited() };
        let ran = run(&limits, &environment, None, shell("(while :; do :; done) & while :; do :; done"));
        let cpu = ran.enforcer.usage().cpu_us;
        assert!(cpu < 1_300_000, "{cpu} µs in two seconds");
    }

    #[test]
    fn what_a_user_asked_for_is_refused_where_nothing_can_cap_it() {
        let nowhere = CgroupEnvironment::default();
        let prepare = |limits: Limits, enforcement| Enforcer::prepare(&new_run(), &limits, enforcement, &nowhere);
        let memory = Limits { memory: asked(64 << 20), ..unlimited() };
        let refused = prepare(memory.clone(), Enforcement::Strict).expect_err("refused");
        assert_eq!(refused.limit, "memory");
        assert!(refused.remedy.contains("Delegate"), "{refused:?}");
        let cpus = Limits { cpus: asked(1.0), ..unlimited() };
        assert_eq!(prepare(cpus, Enforcement::Strict).expect_err("refused").limit, "cpus");
        let weaker = prepare(memory, Enforcement::BestEffort).expect("best effort");
        assert!(weaker.degraded()[0].contains("watched"), "{:?}", weaker.degraded());
        let default = Limits { memory: built_in(64 << 20), cpus: built_in(1.0), ..unlimited() };
        assert_eq!(prepare(default, Enforcement::Strict).expect("a default may be watched").degraded().len(), 2);
        let others = Limits {
            wall: asked(Duration::from_secs(1)),
            cpu: asked(Duration::from_secs(1)),
            pids: asked(16),
            write_bytes: asked(1),
            output_bytes: asked(1),
            ..unlimited()
        };
        assert!(prepare(others, Enforcement::Strict).expect("enforced without groups").degraded().is_empty());
    }

    #[test]
    fn watched_memory_ends_the_run_that_exceeds_it() {
        let limits = Limits { memory: built_in(96 << 20), ..unlimited() };
        let script = r#"python3 -c 'import time
b=[]
while 1: b.append(b"x"*4000000); time.sleep(0.02)'; echo survived"#;
        let ran = run(&limits, &CgroupEnvironment::default(), None, shell(script));
        let exceeded = ran.enforcer.exceeded().expect("exceeded");
        assert_eq!((exceeded.kind, exceeded.limit), (OutcomeType::MemoryExceeded, 96 << 20));
        assert!(exceeded.used > 96 << 20 && exceeded.used < 192 << 20, "{exceeded:?}");
        assert!(!ran.output.contains("survived"));
    }

    #[test]
    fn pages_shared_by_many_processes_count_once_when_watched() {
        // 60 MB shared by four processes are 240 MB of resident sets.
        let limits = Limits { memory: built_in(120 << 20), ..unlimited() };
        let script = r#"python3 -c 'import os, time, gc
b=b"x"*60000000
gc.freeze()
for i in range(3):
    if os.fork() == 0: time.sleep(0.6); os._exit(0)
time.sleep(0.6)'"#;
        let ran = run(&limits, &CgroupEnvironment::default(), None, shell(script));
        assert_eq!((ran.enforcer.exceeded(), ran.status.code()), (None, Some(0)));
    }

    #[test]
    fn writing_more_than_allowed_ends_the_run() {
        let folder = tempfile::tempdir().expect("a folder");
        let limits = Limits { write_bytes: asked(2 << 20), ..unlimited() };
        let mut command =
            shell("for i in 1 2 3 4 5 6 7 8; do head -c 1000000 /dev/zero > f$i; sleep 0.1; done; sleep 9");
        command.current_dir(folder.path());
        let layer = Some(folder.path().to_owned());
        let ran = run(&limits, &CgroupEnvironment::default(), layer, command);
        assert_eq!(ran.enforcer.exceeded().map(|one| one.kind), Some(OutcomeType::WriteExceeded));
        assert!(ran.took < Duration::from_secs(5), "{:?}", ran.took);
    }

    #[test]
    fn a_program_that_ends_before_it_is_measured_has_still_exceeded() {
        let folder = tempfile::tempdir().expect("a folder");
        let limits = Limits { write_bytes: asked(100_000), ..unlimited() };
        let mut command = shell("head -c 1000000 /dev/zero > f");
        command.current_dir(folder.path());
        let ran = run(&limits, &CgroupEnvironment::default(), Some(folder.path().to_owned()), command);
        let exceeded = ran.enforcer.exceeded().expect("exceeded");
        assert_eq!((exceeded.kind, exceeded.limit), (OutcomeType::WriteExceeded, 100_000));
        assert_eq!(ran.enforcer.usage().write_bytes, exceeded.used);
    }

    #[test]
    fn kill_ends_what_has_left_its_session() {
        // Without version 1's hierarchies the group is one of version 2, which is killed by one write.
        let unified = groups().filter(|found| found.unified.is_some());
        let unified = unified.map(|found| CgroupEnvironment { legacy: Default::default(), ..found });
        let environments = [Some(CgroupEnvironment::default()), groups(), unified];
        for environment in environments.into_iter().flatten() {
            let mut enforcer =
                Enforcer::prepare(&new_run(), &unlimited(), Enforcement::Strict, &environment).expect("prepared");
            let mut command = shell("setsid sleep 60 & echo $!; wait");
            let mut child = enforcer
                .spawn_inside(move || command.spawn())
                .expect("a thread")
                .join()
                .expect("ended")
                .expect("spawned");
            let root = Pid::from_raw(i32::try_from(child.id()).expect("a pid"));
            enforcer.admit(root).expect("admitted");
            enforcer.start_watch(root).expect("watched");
            begin(&mut child);
            let mut line = String::new();
            let mut output = io::BufReader::new(child.stdout.take().expect("piped"));
            io::BufRead::read_line(&mut output, &mut line).expect("a line");
            thread::sleep(Duration::from_millis(50));
            enforcer.kill();
            assert_eq!(child.wait().expect("waited").signal(), Some(libc::SIGKILL));
            let sleeper = format!("/proc/{}/stat", line.trim());
            let until = Instant::now() + Duration::from_secs(2);
            while std::fs::read_to_string(&sleeper).is_ok_and(|stat| !stat.contains(") Z")) {
                assert!(Instant::now() < until, "the sleeper lives");
                thread::sleep(Duration::from_millis(5));
            }
        }
    }

    #[test]
    fn no_resource_limit_is_above_our_own_and_address_space_is_never_limited() {
        let limits = Limits { cpu: asked(Duration::from_millis(1500)), write_bytes: asked(7), ..unlimited() };
        let enforcer = Enforcer::prepare(&new_run(), &limits, Enforcement::Strict, &CgroupEnvironment::default())
            .expect("prepared");
        let rows = enforcer.rlimits();
        assert!(rows.contains(&(libc::RLIMIT_CPU, 3, 4)), "{rows:?}");
        assert!(rows.contains(&(libc::RLIMIT_FSIZE, 7, 7)));
        assert!(rows.contains(&(libc::RLIMIT_CORE, 0, 0)));
        assert!(rows.iter().all(|row| row.0 != libc::RLIMIT_AS && row.1 <= row.2));
    }

    #[test]
    fn the_victim_is_read_from_the_kernels_record_whatever_it_calls_itself() {
        let record = "6,1,2,-;oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0,\
                      oom_memcg=/a/tollgate-run-x,task_memcg=/a/tollgate-run-x,task=py,pid=1,uid=0,pid=42,uid=1000";
        assert_eq!(parse_oom(record), Some(("/a/tollgate-run-x", "py,pid=1,uid=0", 42)));
        assert_eq!(parse_oom("6,1,2,-;something else"), None);
    }

    #[test]
    fn kernel_releases_are_compared_as_numbers() {
        assert_eq!(release("6.18.44-x"), Some((6, 18)));
        assert_eq!(release("5.4.0"), Some((5, 4)));
        assert!(release("5.4.0") < Some(PROCESSES_BY_NAMESPACE_SINCE));
        assert_eq!(release("nonsense"), None);
    }
}
