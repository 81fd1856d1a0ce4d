//! What the ledger holds: runs and receipts, as the `--json` contract shows them.

use crate::{
    chain::{replay::ReplayReport, Decision},
    effect::{Class, Digest, Door, Idempotency, Kind, ReceiptId, Resource, RoomId, RunId, Subject},
};
use serde::{Deserialize, Serialize};

/// One jailed execution of one command.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunRecord {
    /// The run's id.
    pub id: RunId,
    /// The room it happened in, if any.
    pub room: Option<RoomId>,
    /// The policy's name or path.
    pub policy: String,
    /// SHA-256 of the composed policy, so that limits and permissions of a run have one source and one hash.
    pub policy_digest: String,
    /// The argument vector; bytes that are not UTF-8 are replaced.
    pub command: Vec<String>,
    /// The workspace's absolute path on the host.
    pub workspace: String,
    /// Who started it.
    pub subject: Subject,
    /// Where it stands.
    pub state: RunState,
    /// How it ended, once it did.
    pub outcome: Option<Outcome>,
    /// RFC 3339 in UTC with microseconds.
    pub started_at: String,
    /// As `started_at`; none while it runs.
    pub ended_at: Option<String>,
    /// What it used.
    pub usage: Usage,
    /// Its receipts, counted.
    pub effects: EffectCounts,
    /// Every layer or limit that the policy wanted and the run went without, in words.
    pub degraded: Vec<String>,
    /// Names of the environment variables that passed into the jail. Never a value.
    pub environment: Vec<String>,
    /// The supervisor's process id on the host, for finding a run whose supervisor died.
    pub supervisor_pid: u32,
    /// The supervisor's start time in clock ticks after boot (field 22 of /proc/PID/stat, proc_pid_stat(5)), so that
    /// a reused process id is not mistaken for it.
    pub supervisor_started: u64,
    /// What became of the workspace's changes.
    pub changes: ChangesState,
    /// The handlers that its effects passed, outermost first, and `world`; empty where the run never had a chain, or
    /// an older version wrote this.
    #[serde(default)]
    pub chain: Vec<String>,
    /// Whether its effects happened or were only planned, and by whose plan.
    #[serde(default)]
    pub mode: RunMode,
    /// The interrupted run that this one took over, if any.
    #[serde(default)]
    pub resumes: Option<RunId>,
    /// How it was asked for, so that it can be asked for again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recipe: Option<Recipe>,
    /// What answered in the world's place.
    #[serde(default, skip_serializing_if = "Answered::is_nothing")]
    pub answered: Answered,
}

/// Whether a run's effects happen.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "type")]
pub enum RunMode {
    /// They happen, as the policy allows.
    #[default]
    Live,
    /// They are planned: written down, and answered without the world.
    Preflight,
    /// They happen if another run planned them.
    Planned {
        /// The run that made the plan.
        plan: RunId,
    },
}

/// What `tollgate run` was told, for `tollgate resume`. Values of variables are never part of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Recipe {
    /// The options, as they were typed, bytes that are not UTF-8 written as in a workspace path.
    pub options: Vec<String>,
    /// The program and its arguments, written so too.
    pub command: Vec<String>,
    /// The folder in which it was typed, written so too.
    pub directory: String,
    /// Names of the variables that were given a value there.
    pub variables: Vec<String>,
}

/// What answered effects of a run in the world's place.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Answered {
    /// How many effects a fault rule made to go wrong; none where there was no rule.
    pub faults_injected: Option<u64>,
    /// The digest of the run's recording; none where it was not recorded.
    pub recording: Option<String>,
    /// What a replay found; none for a run that was none.
    pub replay: Option<ReplayReport>,
}

impl Answered {
    /// Whether nothing did.
    pub fn is_nothing(&self) -> bool {
        *self == Answered::default()
    }
}

/// Where a run stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RunState {
    /// The jail is being built.
    Starting,
    /// The program runs.
    Running,
    /// The program ended; its changes are being applied.
    Applying,
    /// Over.
    Ended,
}

/// What became of what a run changed in its workspace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ChangesState {
    /// Nothing was changed, or nothing could be.
    None,
    /// Held in the run's own layer, not applied: to be applied or discarded.
    Pending,
    /// Some applied; the rest (protected paths) are held.
    Partial,
    /// Applied.
    Applied,
    /// Thrown away.
    Discarded,
    /// Applied, and taken back since; a redo brings them again.
    Undone,
    /// Applied, and some of it taken back since.
    PartlyUndone,
    /// Taken over by the run that resumes this one.
    Resumed,
}

/// How a run ended. `code`, `signal`, `limit` and `used` are present where the type has them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Outcome {
    /// Which way.
    #[serde(rename = "type")]
    pub kind: OutcomeType,
    /// The program's exit code, for `exited`.
    pub code: Option<i32>,
    /// The signal's number, for `signaled` and `killed`.
    pub signal: Option<i32>,
    /// The limit that ended it, in the unit of `used`: microseconds, bytes or processes.
    pub limit: Option<u64>,
    /// How much was used when it ended.
    pub used: Option<u64>,
    /// One sentence: for `could-not-start`, the step, object, errno and remedy.
    pub detail: Option<String>,
}

/// The ways a run ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OutcomeType {
    /// The program exited by itself.
    Exited,
    /// A signal that Tollgate did not send ended it.
    Signaled,
    /// Wall time used up.
    WallExceeded,
    /// Processor time used up.
    CpuExceeded,
    /// Memory used up.
    MemoryExceeded,
    /// The process limit stopped the program for good.
    PidsExceeded,
    /// It wrote more than it may.
    WriteExceeded,
    /// It printed more than it may.
    OutputExceeded,
    /// Somebody killed the run.
    Killed,
    /// The jail could not be built, or the run was refused.
    CouldNotStart,
    /// The program ended, but its changes could not be applied.
    CouldNotApply,
    /// The supervisor died under it.
    Interrupted,
}

/// What a run used.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// Wall time in microseconds, monotonic clock.
    pub wall_us: u64,
    /// Processor time of the whole tree in microseconds.
    pub cpu_us: u64,
    /// The tree's peak memory in bytes.
    pub memory_peak: u64,
    /// The most processes and threads alive at once.
    pub pids_peak: u64,
    /// Bytes written to the workspace, as the run's layer holds them.
    pub write_bytes: u64,
    /// Bytes printed to standard output and standard error.
    pub output_bytes: u64,
}

/// A run's receipts, counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EffectCounts {
    /// All.
    pub count: u64,
    /// Those refused.
    pub refused: u64,
    /// Those that must not be repeated.
    pub once: u64,
}

/// The record of one effect.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Receipt {
    /// The run's id, a dot, and `seq`.
    pub id: ReceiptId,
    /// Its place in the run's chain, from 1.
    pub seq: u64,
    /// The run.
    pub run: RunId,
    /// The room, if any.
    pub room: Option<RoomId>,
    /// The effect's kind.
    pub kind: Kind,
    /// What it touched.
    pub classes: Vec<Class>,
    /// The object.
    pub resource: Resource,
    /// Who asked.
    pub subject: Subject,
    /// The door it came in by.
    pub door: Door,
    /// What was decided.
    pub decision: Decision,
    /// By which handler, or `world`.
    pub decided_by: String,
    /// Why.
    pub reason: String,
    /// What to change.
    pub hint: String,
    /// The rule behind the decision and where it is written; none where no rule had a part in it, or an older version
    /// wrote this.
    #[serde(default)]
    pub rule: Option<String>,
    /// Whether it may be repeated.
    pub idempotency: Idempotency,
    /// Whether a fault handler made the answer up.
    pub injected: bool,
    /// RFC 3339 in UTC with microseconds.
    pub started_at: String,
    /// Microseconds spent waiting before the decision.
    pub queued_us: u64,
    /// Microseconds spent deciding.
    pub decided_us: u64,
    /// Microseconds spent executing.
    pub executed_us: u64,
    /// Bytes read or written.
    pub bytes: u64,
    /// How many equal occurrences this one receipt stands for (denials that repeat are counted, not stored again).
    pub times: u64,
    /// [`crate::effect::Effect::digest`].
    pub request_digest: Digest,
    /// Digest of the result, where there is one.
    pub result_digest: Option<Digest>,
    /// `hash` of the receipt before it in the run; all zero for the first.
    pub prev: Digest,
    /// SHA-256 over this receipt; see the ledger's reference for the bytes.
    pub hash: Digest,
}
