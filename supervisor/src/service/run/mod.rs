//! One run: from a request to an outcome.
//!
//! The order is the promise. The run is in the ledger before anything is built; that it starts is an intent on disk
//! before its first instruction, written while the jail is being built; whatever ends it, its jail is gone before its
//! changes are looked at, and its record is closed last.

mod answering;
mod close;
mod elements;
mod execute;
mod folder;
mod live;
mod network;
mod prepare;
mod progress;
mod publish;
mod serving;

pub use answering::{Answering, Mode, Receipts, Source, RECORDING};
pub use live::Live;

use super::{
    meanwhile::{Deferred, Notice},
    recovery,
    resume::Resumption,
};
use crate::{
    chain::{
        approval::{self, Attendance, Desk, Owner},
        preflight::Preflight,
        quota::Amounts,
    },
    crash::{self, Point},
    doors::workspace::CommitReport,
    effect::{Kind, RunId, Subject},
    jail::{
        outcome::{Facts, NotStarted},
        spec::Caller,
        worktree,
    },
    ledger::{
        record::{ChangesState, EffectCounts, Recipe, RunMode, RunRecord, RunState, Usage},
        Ledger, Timestamp,
    },
    policy::{published::Published, Policy},
};
use answering::Handlers;
use execute::{Finished, Run};
use folder::Folder;
use nix::sys::signal::{SigSet, Signal};
use std::{
    ffi::OsString,
    io,
    os::fd::{AsFd, OwnedFd},
    path::PathBuf,
    sync::Arc,
};
use tollgate_shim::protocol::Layer;

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
    /// What answers in the world's place, and what is asked about one by one.
    pub answering: Answering,
    /// Who is asked about what a rule asks about.
    pub asking: Asking,
    /// Ports of the jail that the host may connect to.
    pub published: Vec<Published>,
    /// Quotas that the run shares with others, each with limits that are narrower for this run.
    pub quotas: Vec<(String, Amounts)>,
    /// Layers to leave out, in test builds.
    pub without: Vec<Layer>,
    /// Whether its effects happen.
    pub mode: RunMode,
    /// The interrupted run that it takes over, if any.
    pub resumes: Option<Resumption>,
    /// Answers its effects in the world's place, in a preflight.
    pub preflight: Option<Arc<Preflight>>,
    /// How it was asked for.
    pub recipe: Option<Recipe>,
    /// How the caller is told what takes long.
    pub notice: Notice,
}

/// Who is asked about what a rule asks about.
pub struct Asking {
    /// Whether anybody is there.
    pub attendance: Attendance,
    /// What is called, on the run's own threads, when a question waits. It must not block.
    pub notice: approval::Notice,
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
    /// The signal that came while the changes were applied, and that the exit status says.
    pub signal: Option<Signal>,
    /// What happened within the limits that the outcome does not show.
    pub notes: Vec<String>,
    /// What the jail or the chain refused: kind, object and what to change, in order, the first of each.
    pub refusals: Vec<Refusal>,
    /// What became of the workspace's changes, in words.
    pub changes: CommitReport,
}

impl Refusal {
    /// The host that was refused, with its port where one was named, if it is one of the network.
    pub fn host(&self) -> Option<&str> {
        match self.kind {
            Kind::HttpRequest => {
                let rest = self.object.split_once("://").map_or(&*self.object, |(_, rest)| rest);
                Some(rest.split(['/', '?']).next().unwrap_or(rest))
            }
            Kind::NetConnect if self.by == "network" => None,
            Kind::NetConnect | Kind::NetResolve | Kind::NetAccept => Some(&self.object),
            _ => None,
        }
    }
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

pub(super) fn handled() -> SigSet {
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
    let folder = Folder::of(ledger, &id);
    let subject = Subject { uid: request.caller.uid, run: Some(id.clone()), agent: None };
    let record = new_record(&id, &request, &subject, started);
    for (quota, limits) in &request.quotas {
        ledger.make_quota(quota, limits)?;
    }
    ledger.insert_run(&record)?;
    crash::reach(Point::RunRecorded);
    for (quota, _) in &request.quotas {
        ledger.join_quota(&id, quota)?;
    }
    let owner = Owner { run: id.clone(), uid: subject.uid, workspace: record.workspace.clone() };
    let Asking { attendance, notice } = &request.asking;
    let desk = Arc::new(Desk::new(owner, *attendance, ledger.clone(), notice.clone()));
    let live = Arc::new(Live::new(record, ledger.clone(), folder.path.clone(), desk));
    let since_ns = request.resumes.as_ref().and_then(|resumes| resumes.since_ns).unwrap_or_else(now_coarse_ns);
    let deferred = Deferred::new(request.notice);
    let linked = worktree::linked(&request.workspace, request.caller.uid);
    let answering = request.answering.clone().under(&request.policy);
    let policy = answering.reaching_what_was_recorded(request.policy.clone());
    let request = RunRequest { answering, policy, ..request };
    let mut run = Run {
        ledger,
        id,
        subject,
        folder,
        live,
        request,
        handlers: Handlers::default(),
        refusals: Vec::new(),
        denials: 0,
        since_ns,
        copied: None,
        linked,
        deferred,
    };
    let (facts, finished) = match run.folder.make(&run.id, &run.request) {
        Ok(()) => run.execute(streams)?,
        Err(reason) => (Facts::NotStarted(NotStarted::Refused(reason)), Finished::nothing()),
    };
    run.close(facts, finished)
}

/// The clock that file systems stamp inodes with (`CLOCK_REALTIME_COARSE`, clock_gettime(2)).
fn now_coarse_ns() -> i64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::RealtimeCoarse);
    now.tv_sec * 1_000_000_000 + now.tv_nsec
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
        chain: Vec::new(),
        mode: request.mode.clone(),
        resumes: request.resumes.as_ref().map(|resumes| resumes.run.clone()),
        recipe: request.recipe.clone(),
        answered: Default::default(),
    }
}

/// Opens a duplicate of one of this process's own streams.
pub fn own_stream(stream: impl AsFd) -> io::Result<OwnedFd> {
    stream.as_fd().try_clone_to_owned()
}
