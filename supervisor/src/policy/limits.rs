//! What a run may use.

use serde::{Deserialize, Serialize};
use std::time::Duration;

/// Every limit of a run. Each is a value or the explicit word; zero or empty never means unlimited.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Limits {
    /// Time from the program's start, by the monotonic clock.
    pub wall: Limit<Duration>,
    /// Processor time, summed over every process of the tree.
    pub cpu: Limit<Duration>,
    /// Memory of the whole tree in bytes, as the kernel charges it; swap included in the cap.
    pub memory: Limit<u64>,
    /// Processes and threads alive at once.
    pub pids: Limit<u64>,
    /// Processors' worth of time per second: 1.5 is one and a half.
    pub cpus: Limit<f64>,
    /// Bytes that the run's own layer of the workspace may hold.
    pub write_bytes: Limit<u64>,
    /// Effects that pass the chain, whatever they are.
    pub effects: Limit<u64>,
    /// Bytes printed to standard output and standard error together.
    pub output_bytes: Limit<u64>,
    /// Bytes handed to parties outside: bodies of requests, and what connections send.
    pub egress_bytes: Limit<u64>,
}

/// One limit and who asked for it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Limit<T> {
    /// How much.
    pub bound: Bound<T>,
    /// By whom. A limit that a user asked for is enforced by the kernel or the run is refused, unless the policy says
    /// best effort; a built-in default may be watched instead, and the run's `degraded` says so.
    pub asked: Asked,
}

/// How much.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Bound<T> {
    /// At most this.
    At(T),
    /// Written out as `unlimited` by somebody.
    Unlimited,
}

/// Who asked for a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Asked {
    /// A built-in policy's default.
    Builtin,
    /// A policy file of the user's, or the command line.
    User,
}

impl<T: Copy> Limit<T> {
    /// The value, or none for unlimited.
    pub fn value(&self) -> Option<T> {
        match self.bound {
            Bound::At(value) => Some(value),
            Bound::Unlimited => None,
        }
    }
}
