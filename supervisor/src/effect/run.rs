//! Runs: starting one, ending one, and what one used.

use super::{Class, Declaration, Door, FaultKind, FaultShape, Idempotency, Kind, Size, StandIn};
use serde::{Deserialize, Serialize};

/// A run itself is started and ended by its caller; what can fail is what the jail asks for at its socket.
const RUN_FAULTS: &[FaultShape] = &[
    FaultShape { kind: FaultKind::Error, doors: &[Door::Api], arrives: &["EAGAIN", "EIO", "ENOMEM"] },
    FaultShape { kind: FaultKind::Timeout, doors: &[Door::Api], arrives: &["ETIMEDOUT"] },
    FaultShape { kind: FaultKind::RateLimit, doors: &[Door::Api], arrives: &["429", "503"] },
];

/// Starts a jailed execution of one command.
pub const START: Declaration = Declaration {
    kind: Kind::RunStart,
    name: "run/start",
    classes: &[Class::Lifecycle, Class::Spend],
    idempotency: Idempotency::Once,
    resource: "the run's id",
    summary: "Start a run.",
    at_api_door: true,
    stand_in: StandIn::Nothing,
    size: Size::Nothing,
    faults: RUN_FAULTS,
};

/// Ends a run at someone's explicit word.
pub const CANCEL: Declaration = Declaration {
    kind: Kind::RunCancel,
    name: "run/cancel",
    classes: &[Class::Lifecycle],
    idempotency: Idempotency::Idempotent,
    resource: "the run's id",
    summary: "End a run.",
    at_api_door: true,
    stand_in: StandIn::World,
    size: Size::Nothing,
    faults: RUN_FAULTS,
};

/// Records what one evaluation of a program used. Recorded, not charged.
pub const EVAL: Declaration = Declaration {
    kind: Kind::EvalRun,
    name: "eval/run",
    classes: &[Class::Read],
    idempotency: Idempotency::Idempotent,
    resource: "the run's id",
    summary: "Record the processor and wall time of one evaluation.",
    at_api_door: true,
    stand_in: StandIn::World,
    size: Size::Nothing,
    faults: RUN_FAULTS,
};

/// The arguments of an effect on runs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "verb")]
pub enum Request {
    /// `run/start`.
    Start {
        /// The argument vector.
        command: Vec<String>,
        /// The policy's name or path.
        policy: String,
        /// SHA-256 of the composed policy.
        policy_digest: String,
        /// The working directory.
        directory: String,
        /// Names of the environment variables that pass into the jail, never values.
        environment: Vec<String>,
    },
    /// `run/cancel`.
    Cancel {
        /// The run's id.
        run: String,
    },
    /// `eval/run`.
    Eval {
        /// What was evaluated.
        label: String,
        /// Processor time in microseconds.
        cpu_us: u64,
        /// Wall time in microseconds.
        wall_us: u64,
    },
}
