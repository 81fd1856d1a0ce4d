//! One run: from a request to an outcome.
//!
//! The order is the promise. The run is in the ledger before anything is built; that it starts is an intent on disk
//! before its first instruction, once the jail stands; whatever ends it, its jail is gone before its
//! changes are looked at, and its record is closed last.

use super::{denials, files::LateFiles, recovery};
use crate::{
    chain::{
        admission::Admission,
        quota::Meters,
        stack::{Element, Stack, Wiring},
        Answer, BoxFuture, Chain, World,
    },
    doors::{
        self, api, control,
        workspace::{Commit, CommitReport, Word},
    },
    effect::{self, Door, Effect, Kind, Request, Resource, RunId, Subject},
    jail::{
        cgroup::CgroupEnvironment,
        enforcer::{Enforcer, Exceeded},
        launch::{self, Shim},
        outcome::{self, Backstops, Ended, Facts, NotStarted},
        probe, profile,
        seccomp::{self, WatchLevel},
        spec::{self, Bind, Caller, Inputs, Presence, Privilege, Store},
        streams::{self, OutputMeter, RawTerminal},
    },
    ledger::{
        record::{ChangesState, EffectCounts, Outcome, OutcomeType, RunRecord, RunState, Usage},
        Draft, Ledger, Timestamp,
    },
    policy::{self, search, Policy, WorkspaceAccess},
    room::{
        batch, mirror,
        place::{Place, View},
        tree,
    },
    world::fs::{Identity, WorkspaceFiles},
};
use nix::{
    sys::{
        signal::{SigSet, Signal},
        signalfd::{SfdFlags, SignalFd},
    },
    unistd::Pid,
};
use std::{
    ffi::OsString,
    fs::{DirBuilder, File},
    io,
    os::{
        fd::{AsFd, OwnedFd},
        unix::fs::{DirBuilderExt, OpenOptionsExt},
    },
    path::{Path, PathBuf},
    sync::{mpsc, Arc, Mutex, PoisonError},
    thread,
    time::Duration,
};
use tollgate_shim::protocol::{FromShim, Launcher, Layer, Mount, Terminal, ToShim};

/// The steps whose failure lies in how the machine is set up.
const EXPLAINED_STEPS: [&str; 8] =
    ["user namespace", "namespaces", "id maps", "loopback", "view", "views", "landlock", "seccomp"];
/// So many refusals by the jail's layers have a receipt of their own in one run; a program that makes more must not
/// fill the disk with them, and a note says how many there were.
const MAX_DENIALS: u64 = 10_000;
/// How long the pumps may take to deliver what a killed program printed.
const KILLED_OUTPUT_GRACE: Duration = Duration::from_secs(1);
/// How long a killed jail may take to be gone before it is killed once more.
const KILL_AGAIN: Duration = Duration::from_millis(100);

/// What is to be run.
pub struct RunRequest {
    /// The argument vector.
    pub command: Vec<OsString>,
    /// What it may do and use.
    pub policy: Policy,
    /// The folder of the run.
    pub workspace: PathBuf,
    /// Where in it the program starts.
    pub directory: PathBuf,
    /// The caller's own environment, of which the policy lets some through.
    pub environment: Vec<(OsString, OsString)>,
    /// Who asks.
    pub caller: Caller,
    /// What becomes of the changes when the program ends.
    pub apply: Apply,
    /// Whether the workspace is shown through an overlay or as a copy.
    pub copy: Copy,
    /// Layers to leave out, in test builds.
    pub without: Vec<Layer>,
}

/// What becomes of a run's changes when its program ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Apply {
    /// They pass the chain and are applied as one batch, if the program ended by itself. What a limit or an operator
    /// cut short is half done, and waits for somebody's word.
    WhenItEnds,
    /// They are kept, for `tollgate apply` or `tollgate discard`.
    OnRequest,
}

/// How a writable workspace is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Copy {
    /// Through an overlay.
    Overlay,
    /// As a copy.
    Mirror,
}

/// The caller's streams.
pub struct Streams {
    /// Standard input, output and error.
    pub streams: [OwnedFd; 3],
    /// Which of them the program sees as its terminal.
    pub on_terminal: [bool; 3],
}

/// What came of a run.
pub struct RunReport {
    /// The run as the ledger has it.
    pub record: RunRecord,
    /// The exit status to give on.
    pub exit_status: u8,
    /// What happened within the limits that the outcome does not show.
    pub notes: Vec<String>,
    /// What the jail or the chain refused: kind, object and what to change, in order, the first of each.
    pub refusals: Vec<Refusal>,
    /// What became of the workspace's changes, in words.
    pub changes: CommitReport,
}

/// Something that was refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The kind.
    pub kind: Kind,
    /// The object.
    pub object: String,
    /// By which handler or layer.
    pub by: String,
    /// Why.
    pub reason: String,
    /// What to change.
    pub hint: String,
}

/// Why a run is not even in the ledger.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The ledger cannot take it.
    #[error("the run is refused, because it could not be recorded: {0}")]
    Ledger(#[from] crate::ledger::Error),
    /// The run's own folder cannot be made.
    #[error("the run's folder {path}: {source}")]
    Folder {
        /// Which.
        path: PathBuf,
        /// The system's reason.
        #[source]
        source: io::Error,
    },
    /// A resource of this process.
    #[error("{what}: {source}")]
    Own {
        /// What.
        what: &'static str,
        /// The system's reason.
        #[source]
        source: io::Error,
    },
}

/// Blocks, in this thread and all that it will start, the signals that a run handles or passes on. Call it before
/// any thread exists.
pub fn take_signals() -> io::Result<()> {
    // A child starts with no signal blocked again: the standard library resets the mask.
    handled().thread_block().map_err(io::Error::from)
}

fn handled() -> SigSet {
    let mut set = SigSet::empty();
    for signal in PASSED_ON.into_iter().chain([Signal::SIGWINCH]) {
        set.add(signal);
    }
    set
}

/// What is passed on to the program.
const PASSED_ON: [Signal; 7] = [
    Signal::SIGHUP,
    Signal::SIGINT,
    Signal::SIGQUIT,
    Signal::SIGTERM,
    Signal::SIGUSR1,
    Signal::SIGUSR2,
    Signal::SIGCONT,
];

/// Runs one program to its end.
///
/// # Errors
/// Only what keeps the run out of the ledger; everything later is the outcome in the report.
pub fn run(ledger: &Ledger, request: RunRequest, streams: Streams) -> Result<RunReport, RunError> {
    let started = ledger.clock().now();
    let id = ledger.new_run_id();
    let folder = Folder::create(ledger, &id, &request)?;
    let subject = Subject { uid: request.caller.uid, run: Some(id.clone()), agent: None };
    let record = new_record(&id, &request, &subject, started);
    ledger.insert_run(&record)?;
    let live = Arc::new(Live::new(record, ledger.clone(), folder.path.clone()));
    let since_ns = now_coarse_ns();
    let mut run = Run { ledger, id, subject, folder, live, request, refusals: Vec::new(), denials: 0, since_ns };
    let (facts, finished) = run.execute(streams)?;
    run.close(facts, finished)
}

/// The clock that file systems stamp inodes with (`CLOCK_REALTIME_COARSE`, clock_gettime(2)).
fn now_coarse_ns() -> i64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::RealtimeCoarse);
    now.tv_sec * 1_000_000_000 + now.tv_nsec
}

/// A run's own folder in the state directory.
struct Folder {
    path: PathBuf,
}

impl Folder {
    fn create(ledger: &Ledger, id: &RunId, request: &RunRequest) -> Result<Folder, RunError> {
        let path = ledger.run_dir(id);
        let make = |path: &Path, mode: u32| {
            let made = DirBuilder::new().recursive(true).mode(mode).create(path);
            made.map_err(|source| RunError::Folder { path: path.to_owned(), source })
        };
        make(&path, 0o700)?;
        // The jail's own user must be able to walk through this one; nobody else gets past the folder above.
        make(&path.join("layer"), 0o711)?;
        make(&path.join("layer/upper"), 0o755)?;
        make(&path.join("layer/work"), 0o755)?;
        make(&path.join("door"), 0o711)?;
        // The overlay's root shows the layer's own mode and owner, so they are the workspace's.
        if let Ok(found) = std::fs::metadata(&request.workspace) {
            let _ = std::fs::set_permissions(path.join("layer/upper"), found.permissions());
        }
        if request.caller.privilege == Privilege::Root {
            let own = Some(spec::run_uid(id));
            for part in ["layer/upper", "layer/work"] {
                let part = path.join(part);
                std::os::unix::fs::chown(&part, own, own).map_err(|source| RunError::Folder { path: part, source })?;
            }
        }
        Ok(Folder { path })
    }

    fn log(&self, name: &str) -> Option<File> {
        File::options().create(true).append(true).mode(0o600).open(self.path.join(name)).ok()
    }

    /// Whether there is anything that could be applied. A mirror shows that only when it is compared.
    fn has_changes(&self, store: Store) -> bool {
        let upper = self.path.join("layer/upper");
        store == Store::Mirror || std::fs::read_dir(upper).map_or(true, |mut entries| entries.next().is_some())
    }

    /// Removes what a run that is over needs no more. Logs and before-images stay.
    fn tidy(&self, keep_layer: bool) {
        let _ = std::fs::remove_file(self.path.join("control.sock"));
        remove_tree(&self.path.join("door"));
        remove_tree(&self.path.join("contents"));
        remove_tree(&self.path.join("layer/work"));
        if !keep_layer {
            remove_tree(&self.path.join("layer"));
            remove_tree(&self.path.join("mirror"));
        }
    }
}

/// Removes a tree whatever its directories' modes: overlayfs leaves one that nobody may enter, and so may a program.
fn remove_tree(path: &Path) {
    if std::fs::remove_dir_all(path).is_ok() {
        return;
    }
    let mut pending = vec![path.to_owned()];
    while let Some(directory) = pending.pop() {
        use std::os::unix::fs::PermissionsExt;
        let _ = std::fs::set_permissions(&directory, std::fs::Permissions::from_mode(0o700));
        let Ok(entries) = std::fs::read_dir(&directory) else { continue };
        pending
            .extend(entries.flatten().filter(|one| one.file_type().is_ok_and(|kind| kind.is_dir())).map(|e| e.path()));
    }
    let _ = std::fs::remove_dir_all(path);
}

fn new_record(id: &RunId, request: &RunRequest, subject: &Subject, started: Timestamp) -> RunRecord {
    RunRecord {
        id: id.clone(),
        room: None,
        policy: request.policy.name.clone(),
        policy_digest: request.policy.digest.to_string(),
        command: request.command.iter().map(|word| word.to_string_lossy().into_owned()).collect(),
        workspace: request.workspace.to_string_lossy().into_owned(),
        subject: subject.clone(),
        state: RunState::Starting,
        outcome: None,
        started_at: started.to_string(),
        ended_at: None,
        usage: Usage::default(),
        effects: EffectCounts::default(),
        degraded: Vec::new(),
        environment: Vec::new(),
        supervisor_pid: std::process::id(),
        supervisor_started: recovery::process_started(std::process::id()).unwrap_or_default(),
        changes: ChangesState::None,
    }
}

/// What others may see of a run, and do to it, while it goes on.
pub struct Live {
    record: Mutex<RunRecord>,
    ledger: Ledger,
    folder: PathBuf,
    events: Mutex<Option<mpsc::Sender<Event>>>,
    meter: Mutex<Option<Box<dyn Fn() -> Usage + Send>>>,
}

impl Live {
    fn new(record: RunRecord, ledger: Ledger, folder: PathBuf) -> Live {
        Live { record: Mutex::new(record), ledger, folder, events: Mutex::new(None), meter: Mutex::default() }
    }

    /// What the run has used until now.
    pub fn usage(&self) -> Usage {
        let meter = self.meter.lock().unwrap_or_else(PoisonError::into_inner);
        meter.as_ref().map(|meter| meter()).unwrap_or_default()
    }

    fn change(&self, change: impl FnOnce(&mut RunRecord)) -> RunRecord {
        let mut record = self.record.lock().unwrap_or_else(PoisonError::into_inner);
        change(&mut record);
        record.clone()
    }

    fn send(&self, event: Event) -> io::Result<()> {
        let events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        let sent = events.as_ref().map(|events| events.send(event).is_ok());
        match sent {
            Some(true) => Ok(()),
            _ => Err(io::Error::new(io::ErrorKind::NotConnected, "the run is over")),
        }
    }
}

impl control::Controlled for Live {
    fn record(&self) -> RunRecord {
        self.change(|_| {})
    }

    fn kill(&self, signal: Signal) -> io::Result<()> {
        self.send(Event::Kill(signal))
    }

    fn receipts(&self, after: u64, limit: u64) -> io::Result<Vec<crate::ledger::record::Receipt>> {
        let query = crate::ledger::ReceiptQuery {
            run: Some(self.record().id),
            after_seq: Some(after),
            limit: Some(limit),
            ..Default::default()
        };
        let found = self.ledger.receipts(&query).map_err(io::Error::other)?;
        found.collect::<Result<_, _>>().map_err(io::Error::other)
    }

    fn log(&self, stream: control::Stream, offset: u64, limit: u64) -> io::Result<Vec<u8>> {
        use std::os::unix::fs::FileExt;
        let file = File::open(self.folder.join(stream.file()))?;
        let mut bytes = vec![0; usize::try_from(limit).unwrap_or(usize::MAX).min(1 << 20)];
        let read = file.read_at(&mut bytes, offset)?;
        bytes.truncate(read);
        Ok(bytes)
    }
}

/// What the main thread of a run waits for.
enum Event {
    /// The shim said something.
    Shim(FromShim, Vec<OwnedFd>),
    /// The jail's pid 1 is gone.
    JailGone,
    /// A signal to this process.
    Signal(Signal),
    /// Somebody ends the run.
    Kill(Signal),
    /// More was printed than allowed.
    TooMuchOutput,
}

struct Run<'a> {
    ledger: &'a Ledger,
    id: RunId,
    subject: Subject,
    folder: Folder,
    live: Arc<Live>,
    request: RunRequest,
    refusals: Vec<Refusal>,
    denials: u64,
    since_ns: i64,
}

/// What is left when the program is over.
struct Finished {
    usage: Usage,
    notes: Vec<String>,
    chain: Option<Arc<Chain>>,
    store: Store,
}

impl Finished {
    fn nothing() -> Finished {
        Finished { usage: Usage::default(), notes: Vec::new(), chain: None, store: Store::ReadOnly }
    }
}

impl Run<'_> {
    /// Everything up to the end of the program and its jail.
    fn execute(&mut self, streams: Streams) -> Result<(Facts, Finished), RunError> {
        let refused = |reason: String| Ok((Facts::NotStarted(NotStarted::Refused(reason)), Finished::nothing()));
        if let Err(reason) = self.check() {
            return refused(reason);
        }
        let limits = &self.request.policy.limits;
        let enforcement = self.request.policy.jail.enforcement;
        let mut enforcer = match Enforcer::prepare(&self.id, limits, enforcement, &CgroupEnvironment::detect()) {
            Ok(enforcer) => enforcer,
            Err(limit) => return Ok((Facts::NotStarted(NotStarted::Limit(limit)), Finished::nothing())),
        };
        let store = self.store();
        if let Err(reason) = self.prepare_store(store) {
            return refused(reason);
        }
        enforcer.measure_layer(self.folder.path.join("layer/upper"));
        let terminal = terminal_of(&streams);
        let plan = match self.plan(&enforcer, store, terminal) {
            Ok(plan) => plan,
            Err(reason) => return refused(reason),
        };
        let plan_by_bwrap = plan.launcher != Launcher::Native;
        let mut passed: Vec<String> =
            plan.env.iter().map(|(name, _)| name.to_os().to_string_lossy().into_owned()).collect();
        passed.sort();
        self.live.change(|record| record.environment = passed);

        let meters = Meters::default();
        let mut elements = vec![Element::Admission(self.request.policy.admission.clone())];
        elements.extend(self.guard_of_policies().map(Element::Admission));
        if let Some(limit_bytes) = limits.write_bytes.value() {
            elements.push(Element::Quota { id: self.id.0.clone(), limit_bytes });
        }
        let wiring = Wiring { ledger: self.ledger, run: &self.id, meters: &meters };
        let chain = match Stack(elements).build(&wiring) {
            Ok(chain) => Arc::new(chain),
            Err(error) => return refused(error.to_string()),
        };
        let (events, happened) = mpsc::channel();
        *self.live.events.lock().unwrap_or_else(PoisonError::into_inner) = Some(events.clone());

        let doors = self.open_doors(&chain, &plan).map_err(own("the run's sockets"))?;
        let pipes = streams::pipes(streams.on_terminal).map_err(own("pipes"))?;
        let shim_file = match launch::find_shim() {
            Ok(file) => file,
            Err(error) => return refused(error.to_string()),
        };
        let mut shim = match enforcer.spawn_inside(|| launch::spawn(&shim_file)) {
            Ok(shim) => shim,
            Err(error) => return refused(format!("{}: {error}", shim_file.display())),
        };
        let outer = Pid::from_raw(shim.child.id() as i32);
        if let Err(limit) = enforcer.admit(outer) {
            shim.close();
            let _ = shim.child.wait();
            return Ok((Facts::NotStarted(NotStarted::Limit(limit)), Finished::nothing()));
        }
        {
            let [input, output, error] = &pipes.far;
            shim.begin(&plan, [input.as_fd(), output.as_fd(), error.as_fd()]).map_err(own("the shim"))?;
        }
        drop(pipes.far);
        listen(&shim, events.clone()).map_err(own("a thread"))?;
        pass_signals_on(events.clone()).map_err(own("a thread"))?;

        let meter = OutputMeter::new(limits.output_bytes.value());
        let [input, output, error] = streams.streams;
        let mut progress = Progress {
            meter: meter.clone(),
            events: events.clone(),
            pumps: Vec::new(),
            caller: [Some(input), Some(output), Some(error)],
            on_terminal: streams.on_terminal,
            raw: None,
            master: None,
            ended: Ended::Unknown,
            failed: None,
            killed: None,
            asked: None,
            output_exceeded: false,
            executed: false,
        };
        progress.start_pipes(pipes.input, pipes.outputs, &self.folder);
        let context = denials::Context {
            workspace: self.request.workspace.clone(),
            read_only: store == Store::ReadOnly,
            subject: self.subject.clone(),
            room: None,
        };
        self.live.change(|record| record.degraded = enforcer.degraded());
        for event in &happened {
            match event {
                Event::JailGone => break,
                event => self.handle(event, &mut progress, &shim, &mut enforcer, outer, &doors, &context),
            }
        }
        // The program is over. Nothing of the jail may be left before anything else happens.
        reap(&mut shim, &enforcer);
        if !progress.executed && progress.failed.is_none() {
            let said = shim.complaint().unwrap_or_else(|| "it did not say why".to_owned());
            let who = if plan_by_bwrap { "bubblewrap" } else { "the shim" };
            progress.failed = Some(NotStarted::Refused(format!(
                "{who} ended before the jail was built: {said}; `tollgate doctor` tries each step by itself"
            )));
        }
        enforcer.finish();
        let exceeded = self.exceeded(&enforcer, &progress, &meter);
        progress.finish(exceeded.is_some() || progress.killed.is_some());
        *self.live.events.lock().unwrap_or_else(PoisonError::into_inner) = None;
        doors.close();

        let mut usage = enforcer.usage();
        usage.output_bytes = meter.printed();
        let mut notes = enforcer.notes();
        if self.denials > MAX_DENIALS {
            notes.push(format!(
                "the jail refused {} things; only the first {MAX_DENIALS} have a receipt each",
                self.denials
            ));
        }
        let memory_kill = enforcer.memory_kill();
        let limits = &self.request.policy.limits;
        let backstops = Backstops {
            cpu: limits.cpu.value().map(|limit| (usage.cpu_us, limit.as_micros() as u64)),
            write: limits.write_bytes.value().map(|limit| (usage.write_bytes, limit)),
        };
        let facts = match progress.failed.take() {
            Some(failed) => Facts::NotStarted(failed),
            None => Facts::Ended {
                ended: progress.ended,
                exceeded,
                memory_kill,
                backstops,
                killed: progress.killed.map(|signal| signal as i32),
                not_applied: None,
            },
        };
        Ok((facts, Finished { usage, notes, chain: Some(chain), store }))
    }

    /// What can be refused before anything is built.
    fn check(&self) -> Result<(), String> {
        let first = self.request.command.first().ok_or("there is no command; write it after `--`")?;
        let commands = &self.request.policy.jail.commands;
        if !commands.admit(first) {
            let policy::Commands::List(names) = commands else { return Ok(()) };
            return Err(format!(
                "the policy `{}` starts only {}, not `{}`; choose another policy, or add it to `[jail] commands`",
                self.request.policy.name,
                names.join(", "),
                first.to_string_lossy()
            ));
        }
        let state = self.ledger.state().canonicalize().unwrap_or_else(|_| self.ledger.state().to_owned());
        if self.request.workspace.starts_with(&state) {
            return Err(format!("{} is Tollgate's own: no run may see it", self.request.workspace.display()));
        }
        let views = self.request.policy.jail.views.iter().filter_map(|view| view.path.canonicalize().ok());
        for view in views {
            // Files are made in these: a read-only view over them would leave no room.
            if ["/etc", "/run", "/home", "/var", "/tmp"].iter().any(|made| view == Path::new(made)) {
                return Err(format!(
                    "{} is made for each run and cannot be shown whole; name the files or folders in it that the \
                     program needs, each with a `--view`",
                    view.display()
                ));
            }
            if view.starts_with(&state) || state.starts_with(&view) {
                return Err(format!(
                    "{} holds or is Tollgate's own {}: no run may see it; name a narrower `--view`",
                    view.display(),
                    state.display()
                ));
            }
        }
        spec::check_workspace(&self.request.workspace).map_err(|error| error.to_string())
    }

    /// A policy that lies in the workspace is not the program's to change for its next run: a person must agree.
    fn guard_of_policies(&self) -> Option<Admission> {
        let inside = self.request.policy.sources.iter().filter_map(|source| {
            let path = source.canonicalize().ok()?;
            effect::path::workspace_path(path.strip_prefix(&self.request.workspace).ok()?).ok()
        });
        let paths: Vec<String> = inside.collect();
        (!paths.is_empty()).then(|| Admission::asking_about(&paths))
    }

    fn store(&self) -> Store {
        match (self.request.policy.jail.workspace, self.request.copy) {
            (WorkspaceAccess::ReadWrite, Copy::Overlay) => Store::Overlay,
            (WorkspaceAccess::ReadWrite, Copy::Mirror) => Store::Mirror,
            (WorkspaceAccess::ReadOnly, _) => Store::ReadOnly,
            (WorkspaceAccess::Hidden, _) => Store::Hidden,
        }
    }

    /// The host user that owns what the jail writes, where that is not the caller.
    fn own_ids(&self) -> Option<(u32, u32)> {
        let own = spec::run_uid(&self.id);
        (self.request.caller.privilege == Privilege::Root).then_some((own, own))
    }

    /// A copy takes time and space before the program starts; an overlay takes neither.
    fn prepare_store(&self, store: Store) -> Result<(), String> {
        let view = match store {
            Store::Overlay => View::Overlay,
            Store::Mirror => View::Mirror,
            Store::ReadOnly | Store::Hidden => return Ok(()),
        };
        let open = |path: &Path| tree::open_root(path).map_err(|error| format!("{}: {error}", path.display()));
        let folder = open(&self.folder.path)?;
        let shift = self.own_ids().map(|own| batch::IdShift { from: own, to: self.owner() });
        Place::create(&folder, &self.id, &self.request.workspace, self.since_ns, shift, view)
            .map_err(|error| error.to_string())?;
        if view == View::Mirror {
            let workspace = open(&self.request.workspace)?;
            mirror::create(&workspace, &folder, mirror::DEFAULT_MAX_BYTES, self.own_ids())
                .map_err(|error| error.to_string())?;
        }
        Ok(())
    }

    /// Whose the workspace is on the host.
    fn owner(&self) -> (u32, u32) {
        use std::os::unix::fs::MetadataExt;
        std::fs::metadata(&self.request.workspace).map(|found| (found.uid(), found.gid())).unwrap_or((0, 0))
    }

    fn plan(
        &self,
        enforcer: &Enforcer,
        store: Store,
        terminal: Option<Terminal>,
    ) -> Result<tollgate_shim::protocol::Plan, String> {
        let policy = &self.request.policy;
        let variable = |wanted: &str| {
            let found = self.request.environment.iter().find(|(name, _)| name == wanted);
            found.map(|(_, value)| value.clone()).unwrap_or_default()
        };
        let list = search::seccomp_list(&policy.jail.seccomp)
            .ok_or_else(|| format!("there is no list of system calls named `{}`", policy.jail.seccomp))?;
        let compiled = seccomp::compile(list, WatchLevel::Everything).map_err(|error| error.to_string())?;
        let profile = profile::text(policy.jail.profile.as_str()).map_err(|error| error.to_string())?;
        let path = variable("PATH");
        let launcher = match policy.jail.launcher {
            policy::Launcher::Native => Launcher::Native,
            policy::Launcher::Bwrap => Launcher::Bwrap {
                program: launch::find_bwrap(&path)
                    .ok_or("`bwrap` is not on the PATH; install bubblewrap, or use `--launcher native`")?
                    .into(),
            },
        };
        let rule = &policy.jail.environment;
        let mut environment: Vec<(OsString, OsString)> = self
            .request
            .environment
            .iter()
            .filter(|(name, _)| name.to_str().is_some_and(|name| rule.passes(name)))
            .cloned()
            .collect();
        for (name, value) in &rule.fixed {
            environment.retain(|(known, _)| known.to_str() != Some(name));
            environment.push((name.into(), value.into()));
        }
        let inputs = Inputs {
            run: self.id.clone(),
            profile,
            views: policy
                .jail
                .views
                .iter()
                .map(|view| Bind {
                    source: view.path.clone(),
                    target: view.path.clone(),
                    access: tollgate_shim::protocol::Access::ReadOnly,
                    presence: match view.presence {
                        policy::Presence::Required => Presence::Required,
                        policy::Presence::Optional => Presence::Optional,
                    },
                })
                .collect(),
            workspace: self.request.workspace.clone(),
            store,
            hidden: hidden(policy, &self.request.workspace)?,
            directory: self.request.directory.clone(),
            command: self.request.command.clone(),
            environment,
            path,
            run_dir: self.folder.path.clone(),
            state_dir: self.ledger.state().to_owned(),
            shim: launch::find_shim().map_err(|error| error.to_string())?,
            caller: self.request.caller.clone(),
            rlimits: enforcer.rlimits(),
            terminal,
            filters: compiled.filters,
            observed: compiled.observed,
            enforcement: policy.jail.enforcement,
            launcher,
            without: self.request.without.clone(),
        };
        spec::plan(inputs).map_err(|error| error.to_string())
    }

    fn open_doors(&self, chain: &Arc<Chain>, plan: &tollgate_shim::protocol::Plan) -> io::Result<Doors> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let entered = runtime.enter();
        let broker = doors::http::bind(&self.folder.path.join("door"), "broker.sock", 0o600)?;
        if self.request.caller.privilege == Privilege::Root {
            let own = Some(plan.ids.host_uid);
            std::os::unix::fs::chown(self.folder.path.join("door/broker.sock"), own, own)?;
        }
        let control = control::bind(&self.folder.path)?;
        drop(entered);
        let insight = super::insight::RunInsight::new(&self.id, &self.request.policy, chain, plan, self.live.clone());
        let files = LateFiles::default();
        let contents = doors::content::Contents::open(self.folder.path.join("contents"))?;
        let context = Arc::new(api::ApiContext {
            chain: chain.clone(),
            world: self.world(&files),
            subject: self.subject.clone(),
            room: None,
            place: doors::request::Place {
                run: self.id.clone(),
                workspace: std::os::unix::ffi::OsStrExt::as_bytes(self.request.workspace.as_os_str()).to_vec(),
            },
            contents: contents.clone(),
            insight: Arc::new(insight),
            refusals: Arc::new(api::LedgerRefusals::new(self.ledger.clone(), self.id.clone())),
        });
        let (close, closed) = tokio::sync::watch::channel(false);
        let (for_api, for_control) = (closed.clone(), closed);
        let live: Arc<dyn control::Controlled> = self.live.clone();
        let thread = thread::Builder::new().name("doors".to_owned()).spawn(move || {
            runtime.block_on(async move {
                let until = |mut closed: tokio::sync::watch::Receiver<bool>| async move {
                    // The sender going away means the same.
                    let _ = closed.wait_for(|closed| *closed).await;
                };
                tokio::join!(
                    api::serve(broker, context, until(for_api)),
                    control::serve(control, live, until(for_control))
                );
            });
        })?;
        let hidden = plan.mounts.iter().filter_map(|mount| match mount {
            Mount::Mask { target, .. } => {
                target.to_path().strip_prefix(&self.request.workspace).ok().map(Path::to_owned)
            }
            _ => None,
        });
        Ok(Doors { close, thread, files, contents, hidden: hidden.collect() })
    }

    fn world(&self, files: &LateFiles) -> Arc<dyn World> {
        let live = self.live.clone();
        let cancel = move || control::Controlled::kill(&*live, Signal::SIGKILL);
        Arc::new(crate::world::runs::OwnRun::new(self.id.clone(), Arc::new(files.clone()), cancel))
    }

    /// Hands the finished view to the API door's world.
    fn view_stands(&self, view: OwnedFd, doors: &Doors) {
        let identity = self.own_ids().map(|(uid, gid)| Identity { uid, gid });
        doors.files.arrive(WorkspaceFiles::new(view, doors.contents.clone(), identity), doors.hidden.clone());
    }

    #[allow(clippy::too_many_arguments)]
    fn handle(
        &mut self,
        event: Event,
        progress: &mut Progress,
        shim: &Shim,
        enforcer: &mut Enforcer,
        outer: Pid,
        doors: &Doors,
        context: &denials::Context,
    ) {
        match event {
            Event::Shim(FromShim::Built { terminal, .. }, attached) => {
                let mut attached = attached.into_iter();
                if let Some(workspace) = attached.next() {
                    self.view_stands(workspace, doors);
                }
                if let (true, Some(master)) = (terminal, attached.next()) {
                    if let Err(error) = progress.start_terminal(master, &self.folder) {
                        progress.failed = Some(NotStarted::Refused(format!("the caller's terminal: {error}")));
                        return enforcer.kill();
                    }
                }
                self.start(progress, shim, enforcer, outer);
            }
            Event::Shim(FromShim::Started { .. }, _) => {
                let record = self.live.change(|record| record.state = RunState::Running);
                // The record is for others to see; the program does not wait for it.
                self.ledger.update_run_unattended(&record);
            }
            Event::Shim(FromShim::Degraded { layer, reason }, _) => {
                self.live.change(|record| record.degraded.push(format!("{layer}: {reason}")));
            }
            Event::Shim(FromShim::StepFailed(mut failed), _) => {
                if failed.remedy.is_empty() && failed.errno != libc::ENOENT {
                    failed.remedy = match failed.step.as_str() {
                        "plan" => {
                            "`tollgate` and `tollgate-shim` are of different versions: install both together".into()
                        }
                        step if EXPLAINED_STEPS.contains(&step) => probe::explain(step, failed.errno),
                        _ => String::new(),
                    };
                }
                progress.failed = Some(NotStarted::Step(failed));
            }
            Event::Shim(FromShim::ExecFailed { errno, path }, _) => {
                self.explain_missing(errno);
                let path = denials::spelled(&path.to_path());
                progress.failed = Some(NotStarted::Exec { errno, path });
            }
            Event::Shim(FromShim::Denied(denied), _) => self.record_denied(&denied, context),
            Event::Shim(FromShim::Stopped { .. }, _) => progress.stop_with_the_program(shim),
            Event::Shim(FromShim::Exited { code, signal }, _) => {
                progress.ended = match (code, signal) {
                    (Some(code), _) => Ended::Exited(code),
                    (None, Some(signal)) => Ended::Signaled(signal),
                    (None, None) => Ended::Unknown,
                };
                progress.killed = progress.killed.or(progress.asked.filter(|asked| signal == Some(*asked as i32)));
            }
            Event::Signal(Signal::SIGWINCH) => progress.resize(),
            Event::Signal(signal) => {
                let _ = shim.tell(&ToShim::Signal { number: signal as i32 });
            }
            Event::Kill(signal) => self.kill(signal, progress, shim, enforcer),
            Event::TooMuchOutput => {
                progress.output_exceeded = true;
                enforcer.kill();
            }
            Event::JailGone => {}
        }
    }

    /// The one moment at which something untrusted begins to run: an effect like any other.
    fn start(&mut self, progress: &mut Progress, shim: &Shim, enforcer: &mut Enforcer, outer: Pid) {
        let effect = Effect {
            kind: Kind::RunStart,
            resource: Resource::Run { id: self.id.0.clone() },
            subject: Subject { run: None, ..self.subject.clone() },
            room: None,
            door: Door::Control,
            request: Request::Run(effect::run::Request::Start {
                command: self.request.command.iter().map(|word| word.to_string_lossy().into_owned()).collect(),
                policy: self.request.policy.name.clone(),
                policy_digest: self.request.policy.digest.to_string(),
                directory: self.request.directory.to_string_lossy().into_owned(),
                environment: self.live.change(|_| {}).environment,
            }),
        };
        let started = Mutex::new(Some(Starting { shim, enforcer, outer }));
        let world = StartWorld { starting: &started };
        let wiring = Wiring { ledger: self.ledger, run: &self.id, meters: &Meters::default() };
        // The caller starts it, not the program: a policy's rules on `run/start` are about runs that a run starts, and
        // what this one may start with is its `commands`.
        let chain = Stack(vec![Element::Admission(Admission::everything())]).build(&wiring);
        let answer = match chain {
            Ok(chain) => block_on(chain.perform(&effect, &world)),
            Err(error) => Answer::refused("admission", error.to_string(), ""),
        };
        if answer.is_success() {
            progress.executed = true;
            return;
        }
        let reason = match answer.hint.is_empty() {
            true => answer.reason.clone(),
            false => format!("{}; {}", answer.reason, answer.hint),
        };
        progress.failed = Some(NotStarted::Refused(format!("{}: {reason}", answer.decided_by)));
        self.remember(&effect, &answer);
        shim.close();
    }

    fn kill(&mut self, signal: Signal, progress: &mut Progress, shim: &Shim, enforcer: &Enforcer) {
        let effect = Effect {
            kind: Kind::RunCancel,
            resource: Resource::Run { id: self.id.0.clone() },
            subject: Subject { run: None, ..self.subject.clone() },
            room: None,
            door: Door::Control,
            request: Request::Run(effect::run::Request::Cancel { run: self.id.0.clone() }),
        };
        let draft = Draft::now(&self.id, &effect, &Answer::done(serde_json::Value::Null, 0), &**self.ledger.clock());
        if let Err(error) = self.ledger.append(draft) {
            // Ending a run is never refused: a full disk must not keep anything alive.
            tracing::error!(%error, "the kill has no receipt");
        }
        progress.asked = Some(signal);
        if signal == Signal::SIGKILL {
            progress.killed = Some(signal);
            enforcer.kill();
            shim.close();
        } else {
            let _ = shim.tell(&ToShim::Signal { number: signal as i32 });
        }
    }

    fn record_denied(&mut self, denied: &tollgate_shim::protocol::Denied, context: &denials::Context) {
        let Some((effect, answer)) = denials::judge(denied, context) else { return };
        self.denials += 1;
        if self.denials > MAX_DENIALS {
            return;
        }
        let draft = Draft::now(&self.id, &effect, &answer, &**self.ledger.clock()).repeated(denied.times);
        if let Err(error) = self.ledger.append(draft) {
            tracing::error!(%error, "a refusal has no receipt");
        }
        self.remember(&effect, &answer);
    }

    fn remember(&mut self, effect: &Effect, answer: &Answer) {
        const MOST: usize = 100;
        let refusal = Refusal {
            kind: effect.kind,
            object: effect.resource.to_string(),
            by: answer.decided_by.to_owned(),
            reason: answer.reason.clone(),
            hint: answer.hint.clone(),
        };
        if self.refusals.len() < MOST && !self.refusals.contains(&refusal) {
            self.refusals.push(refusal);
        }
    }

    /// A program that the caller's own PATH leads to and the view does not show: says which view it needs.
    fn explain_missing(&mut self, errno: i32) {
        let Some(program) = self.request.command.first() else { return };
        let path = self.request.environment.iter().find(|(name, _)| name == "PATH").map(|(_, value)| value);
        let Some(found) = denials::on_host(program, path, &self.request.workspace) else { return };
        if errno != libc::ENOENT {
            return;
        }
        let needs: Vec<String> = denials::views_for_program(&found)
            .iter()
            .map(|view| format!("--view {}", denials::spelled(view)))
            .collect();
        if needs.is_empty() {
            return;
        }
        let refusal = Refusal {
            kind: Kind::ProcessExec,
            object: denials::spelled(&found),
            by: "view".to_owned(),
            reason: "the program, or what interprets it, is outside what the run's view shows".to_owned(),
            hint: format!("show it, read-only, with `{}`", needs.join(" ")),
        };
        if !self.refusals.iter().any(|known| known.object == refusal.object) {
            self.refusals.insert(0, refusal);
        }
    }

    fn exceeded(&self, enforcer: &Enforcer, progress: &Progress, meter: &OutputMeter) -> Option<Exceeded> {
        let output = progress.output_exceeded.then(|| Exceeded {
            kind: OutcomeType::OutputExceeded,
            used: meter.printed(),
            limit: self.request.policy.limits.output_bytes.value().unwrap_or(u64::MAX),
        });
        output.or_else(|| enforcer.exceeded())
    }

    /// Applies what was changed, closes the record and tidies up.
    fn close(mut self, facts: Facts, finished: Finished) -> Result<RunReport, RunError> {
        let Finished { usage, notes, chain, store } = finished;
        let ran = matches!(facts, Facts::Ended { .. });
        let mut facts = facts;
        let mut changes = nothing_changed();
        if let (true, Some(chain), Store::Overlay | Store::Mirror) = (ran, &chain, store) {
            // Before the first byte of the workspace changes: a crash from here on is one in the middle of applying.
            let record = self.live.change(|record| record.state = RunState::Applying);
            if self.folder.has_changes(store) {
                self.ledger.update_run(&record)?;
            }
            let cut_short =
                matches!(facts, Facts::Ended { exceeded: Some(_), .. } | Facts::Ended { killed: Some(_), .. });
            match self.apply(chain, if cut_short { Apply::OnRequest } else { self.request.apply }) {
                Ok(report) => changes = report,
                Err(reason) => {
                    changes.state = ChangesState::Pending;
                    changes.failure = Some(reason);
                }
            }
            if let (Facts::Ended { not_applied, .. }, Some(reason)) = (&mut facts, &changes.failure) {
                *not_applied = Some(reason.clone());
            }
        }
        for held in &changes.held {
            let refusal = Refusal {
                kind: Kind::FsWrite,
                object: denials::spelled(&held.path),
                by: "admission".to_owned(),
                reason: held.reason.clone(),
                hint: held.hint.clone(),
            };
            self.refusals.push(refusal);
        }
        let outcome = outcome::decide(&facts);
        let last = if ran { vec![self.record_of_use(&usage)] } else { Vec::new() };
        let exit_status = exit_status(&facts, &outcome);
        let ended = self.ledger.clock().now();
        let record = self.live.change(|record| {
            record.state = RunState::Ended;
            record.ended_at = Some(ended.to_string());
            record.outcome = Some(outcome);
            record.usage = usage;
            record.changes = changes.state;
        });
        let record = self.ledger.end_run(&record, last)?;
        let keep_layer = matches!(record.changes, ChangesState::Pending | ChangesState::Partial);
        self.folder.tidy(keep_layer);
        Ok(RunReport { record, exit_status, notes, refusals: self.refusals, changes })
    }

    /// What the run changed, through the chain and into the folder; or kept for later.
    fn apply(&self, chain: &Chain, when: Apply) -> Result<CommitReport, String> {
        let place = Place::open(&self.folder.path).map_err(|error| error.to_string())?;
        let set = place.changes().map_err(|error| error.to_string())?;
        if when == Apply::OnRequest {
            let state = if set.changes.is_empty() { ChangesState::None } else { ChangesState::Pending };
            return Ok(CommitReport { skipped: set.skipped, state, ..nothing_changed() });
        }
        let commit = Commit {
            subject: self.subject.clone(),
            room: None,
            run: self.id.clone(),
            run_dir: place.run_dir.clone(),
            workspace: place.workspace.clone(),
            source: place.source.clone().unwrap_or_else(|| place.workspace.clone()),
            since_ns: place.place.since_ns,
            shift: place.place.shift,
            word: Word::Policy,
            select: None,
        };
        Ok(block_on(doors::workspace::commit(chain, commit, set)))
    }

    /// What the evaluation used: recorded, not charged.
    fn record_of_use(&self, usage: &Usage) -> Draft {
        let label = self.request.command.first().map(|word| word.to_string_lossy().into_owned()).unwrap_or_default();
        let effect = Effect {
            kind: Kind::EvalRun,
            resource: Resource::Run { id: self.id.0.clone() },
            subject: self.subject.clone(),
            room: None,
            door: Door::Control,
            request: Request::Run(effect::run::Request::Eval { label, cpu_us: usage.cpu_us, wall_us: usage.wall_us }),
        };
        Draft::now(&self.id, &effect, &Answer::done(serde_json::Value::Null, 0), &**self.ledger.clock())
    }
}

/// The status of a run whose program never ran is the shell's own for that; all others follow from the outcome.
fn exit_status(facts: &Facts, outcome: &Outcome) -> u8 {
    match facts {
        Facts::NotStarted(NotStarted::Exec { errno, .. }) => match *errno {
            libc::ENOENT | libc::ENOTDIR => outcome::ExitCode::NotFound.number(),
            _ => outcome::ExitCode::NotExecutable.number(),
        },
        Facts::NotStarted(NotStarted::Step(_) | NotStarted::Limit(_) | NotStarted::Refused(_))
        | Facts::Ended { .. }
        | Facts::Interrupted => outcome::exit_status(outcome),
    }
}

fn nothing_changed() -> CommitReport {
    CommitReport {
        applied: 0,
        held: Vec::new(),
        conflicts: Vec::new(),
        skipped: Vec::new(),
        state: ChangesState::None,
        failure: None,
    }
}

/// What of the workspace a policy hides: every path that is there now and that one of its patterns matches. What the
/// program makes itself later holds nothing that it does not know.
fn hidden(policy: &Policy, workspace: &Path) -> Result<Vec<PathBuf>, String> {
    const MOST: usize = 1_000;
    if policy.jail.hide.is_empty() {
        return Ok(Vec::new());
    }
    let mut patterns = globset::GlobSetBuilder::new();
    for text in &policy.jail.hide {
        let glob = globset::GlobBuilder::new(text).literal_separator(true).build();
        patterns.add(glob.map_err(|error| format!("the policy `{}` hides `{text}`: {error}", policy.name))?);
    }
    let patterns = patterns.build().map_err(|error| format!("the policy `{}`: {error}", policy.name))?;
    let mut found = Vec::new();
    let mut pending = vec![PathBuf::new()];
    while let Some(directory) = pending.pop() {
        let here = workspace.join(&directory);
        let entries = match std::fs::read_dir(&here) {
            Ok(entries) => entries,
            // The program cannot look into it either.
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => continue,
            Err(error) => return Err(format!("{}: {error}", here.display())),
        };
        for entry in entries {
            let entry = entry.map_err(|error| format!("{}: {error}", here.display()))?;
            let path = directory.join(entry.file_name());
            let kind = entry.file_type().map_err(|error| format!("{}: {error}", entry.path().display()))?;
            if patterns.is_match(&path) {
                found.push(path);
            } else if kind.is_dir() {
                pending.push(path);
            }
            if found.len() > MOST {
                return Err(format!(
                    "the policy `{}` hides more than {MOST} paths of this workspace; hide the folders that hold them",
                    policy.name
                ));
            }
        }
    }
    Ok(found)
}

fn block_on<T>(future: impl std::future::Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime without any driver");
    runtime.block_on(future)
}

fn own(what: &'static str) -> impl Fn(io::Error) -> RunError {
    move |source| RunError::Own { what, source }
}

/// The run's sockets and the thread that serves them.
struct Doors {
    close: tokio::sync::watch::Sender<bool>,
    thread: thread::JoinHandle<()>,
    files: LateFiles,
    contents: Arc<doors::content::Contents>,
    hidden: Vec<PathBuf>,
}

impl Doors {
    fn close(self) {
        let _ = self.close.send(true);
        // A panic there has been reported already; the run goes on to its end.
        let _ = self.thread.join();
    }
}

/// The world of `run/start`: lets the built jail execute its program.
struct StartWorld<'a> {
    starting: &'a Mutex<Option<Starting<'a>>>,
}

struct Starting<'a> {
    shim: &'a Shim,
    enforcer: &'a mut Enforcer,
    outer: Pid,
}

impl World for StartWorld<'_> {
    fn execute<'a>(&'a self, effect: &'a Effect) -> BoxFuture<'a, Answer> {
        Box::pin(async move {
            let starting = self.starting.lock().unwrap_or_else(PoisonError::into_inner).take();
            let (Some(Starting { shim, enforcer, outer }), Kind::RunStart) = (starting, effect.kind) else {
                return Answer::failed("the run was started already", "report this: it is a bug of Tollgate's");
            };
            if let Err(error) = enforcer.start_watch(outer) {
                return Answer::failed(format!("nobody could watch the run's limits: {error}"), "free some threads");
            }
            match shim.tell(&ToShim::Execute) {
                Ok(()) => Answer::done(serde_json::Value::Null, 0),
                Err(error) => Answer::failed(format!("the jail is gone: {error}"), ""),
            }
        })
    }
}

/// What the run's main thread keeps while the program runs.
struct Progress {
    meter: OutputMeter,
    events: mpsc::Sender<Event>,
    pumps: Vec<thread::JoinHandle<()>>,
    caller: [Option<OwnedFd>; 3],
    on_terminal: [bool; 3],
    raw: Option<RawTerminal>,
    master: Option<OwnedFd>,
    ended: Ended,
    failed: Option<NotStarted>,
    killed: Option<Signal>,
    /// The last signal that somebody sent with `tollgate kill`. What the program makes of it is its own affair, unless
    /// it ends by it.
    asked: Option<Signal>,
    output_exceeded: bool,
    executed: bool,
}

impl Progress {
    fn over(&self) -> impl FnOnce() + Send + 'static {
        let events = self.events.clone();
        move || {
            let _ = events.send(Event::TooMuchOutput);
        }
    }

    fn start_pipes(&mut self, input: Option<OwnedFd>, outputs: [Option<OwnedFd>; 2], folder: &Folder) {
        if let (Some(to), Some(from)) = (input, self.caller[0].take_if(|_| !self.on_terminal[0])) {
            streams::pump_input(from, to);
        }
        for (index, (from, log)) in outputs.into_iter().zip(["stdout.log", "stderr.log"]).enumerate() {
            let Some(from) = from else { continue };
            let to = self.caller[index + 1].take();
            let pump = streams::pump_output(from, to, folder.log(log), self.meter.clone(), self.over());
            self.pumps.push(pump);
        }
    }

    /// Couples the caller's terminal to the program's.
    fn start_terminal(&mut self, master: OwnedFd, folder: &Folder) -> io::Result<()> {
        if let (true, Some(terminal)) = (self.on_terminal[0], &self.caller[0]) {
            let raw = RawTerminal::take(terminal.as_fd())?;
            nix::sys::termios::tcsetattr(&master, nix::sys::termios::SetArg::TCSANOW, raw.before())?;
            self.raw = Some(raw);
            let from = terminal.try_clone()?;
            streams::pump_input(from, master.try_clone()?);
        }
        let shown = (1..3).find(|index| self.on_terminal[*index]);
        let to = match shown {
            Some(index) => self.caller[index].take(),
            // Only input is the terminal: what it echoes goes where its keys come from.
            None => self.caller[0].as_ref().map(OwnedFd::try_clone).transpose()?,
        };
        let log = folder.log("terminal.log");
        self.pumps.push(streams::pump_output(master.try_clone()?, to, log, self.meter.clone(), self.over()));
        self.master = Some(master);
        self.resize();
        Ok(())
    }

    fn resize(&self) {
        let Some(master) = &self.master else { return };
        if let Some((rows, columns)) =
            streams::size_of_any(&[io::stdin().as_fd(), io::stdout().as_fd(), io::stderr().as_fd()])
        {
            streams::resize(master.as_fd(), rows, columns);
        }
    }

    /// The program stopped itself: so do we, with the terminal as it was, until somebody continues us.
    fn stop_with_the_program(&self, shim: &Shim) {
        let Some(raw) = &self.raw else { return };
        raw.suspend();
        // The whole group, as the terminal would: a shell waits for all of its job.
        let _ = nix::sys::signal::killpg(nix::unistd::getpgrp(), Signal::SIGSTOP);
        if let Err(error) = raw.resume() {
            tracing::warn!(%error, "the terminal could not be taken again");
        }
        self.resize();
        let _ = shim.tell(&ToShim::Continue);
    }

    /// Delivers what is still in the pipes.
    fn finish(&mut self, cut_short: bool) {
        let deadline = std::time::Instant::now() + KILLED_OUTPUT_GRACE;
        for pump in self.pumps.drain(..) {
            while cut_short && !pump.is_finished() && std::time::Instant::now() < deadline {
                thread::sleep(Duration::from_millis(2));
            }
            if !cut_short || pump.is_finished() {
                let _ = pump.join();
            }
        }
        self.raw = None;
    }
}

/// Waits until the outer process, and with it the whole jail, is gone.
fn reap(shim: &mut Shim, enforcer: &Enforcer) {
    shim.close();
    loop {
        match shim.child.try_wait() {
            Ok(Some(_)) | Err(_) => return,
            Ok(None) => {}
        }
        // Usually the kernel is done within a millisecond or two.
        let waited = wait_briefly(shim, KILL_AGAIN);
        if !waited {
            enforcer.kill();
            let _ = shim.child.kill();
        }
    }
}

/// Whether the child ended within this time, by its process descriptor (pidfd_open(2)).
fn wait_briefly(shim: &mut Shim, time: Duration) -> bool {
    let deadline = std::time::Instant::now() + time;
    while std::time::Instant::now() < deadline {
        if matches!(shim.child.try_wait(), Ok(Some(_)) | Err(_)) {
            return true;
        }
        thread::sleep(Duration::from_micros(200));
    }
    false
}

fn listen(shim: &Shim, events: mpsc::Sender<Event>) -> io::Result<()> {
    let listener = shim.listener()?;
    thread::Builder::new().name("shim".to_owned()).stack_size(256 * 1024).spawn(move || loop {
        let event = match listener.hear() {
            Ok(Some((message, attached))) => Event::Shim(message, attached),
            Ok(None) | Err(_) => Event::JailGone,
        };
        let last = matches!(event, Event::JailGone);
        if events.send(event).is_err() || last {
            return;
        }
    })?;
    Ok(())
}

fn pass_signals_on(events: mpsc::Sender<Event>) -> io::Result<()> {
    let signals = SignalFd::with_flags(&handled(), SfdFlags::SFD_CLOEXEC)?;
    thread::Builder::new().name("signals".to_owned()).stack_size(64 * 1024).spawn(move || {
        while let Ok(Some(info)) = signals.read_signal() {
            let Ok(signal) = Signal::try_from(info.ssi_signo as i32) else { continue };
            if events.send(Event::Signal(signal)).is_err() {
                return;
            }
        }
    })?;
    Ok(())
}

fn terminal_of(streams: &Streams) -> Option<Terminal> {
    streams.on_terminal.contains(&true).then(|| {
        let all: Vec<_> = streams.streams.iter().map(AsFd::as_fd).collect();
        let (rows, columns) = streams::size_of_any(&all).unwrap_or((24, 80));
        Terminal { on: streams.on_terminal, rows, columns }
    })
}

/// Opens a duplicate of one of this process's own streams.
pub fn own_stream(stream: impl AsFd) -> io::Result<OwnedFd> {
    stream.as_fd().try_clone_to_owned()
}
