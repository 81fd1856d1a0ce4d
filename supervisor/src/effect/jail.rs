//! What the jail's own layers refused and the kernel let us see.
//!
//! An effect of the jail door never reaches the world: by the time one is made, the refusal has happened. They exist
//! so that a refusal by namespace, mount, Landlock or seccomp has a receipt like any other. Executions and connections
//! come by the program's door too, see [`super::program`], where they still wait.

use super::{Class, Declaration, Door, FaultKind, FaultShape, Idempotency, Kind, Size, StandIn};
use serde::{Deserialize, Serialize};

const fn shape(kind: FaultKind, arrives: &'static [&'static str]) -> FaultShape {
    FaultShape { kind, doors: &[Door::Program], arrives }
}

const EXEC_FAULTS: &[FaultShape] = &[
    shape(FaultKind::Error, &["EAGAIN", "EACCES", "EIO", "EMFILE", "ENFILE", "ENOENT", "ENOMEM"]),
    shape(FaultKind::Timeout, &["ETIMEDOUT"]),
];

/// The execution of a file.
pub const PROCESS_EXEC: Declaration = Declaration {
    kind: Kind::ProcessExec,
    name: "process/exec",
    classes: &[Class::Process],
    idempotency: Idempotency::Once,
    resource: "a path",
    summary: "Execute a file.",
    at_api_door: false,
    stand_in: StandIn::World,
    size: Size::Nothing,
    faults: EXEC_FAULTS,
};

/// A system call that is not in the list.
pub const PROCESS_SYSCALL: Declaration = Declaration {
    kind: Kind::ProcessSyscall,
    name: "process/syscall",
    classes: &[Class::Process],
    idempotency: Idempotency::Once,
    resource: "a system call's name",
    summary: "Make a system call outside the list.",
    at_api_door: false,
    stand_in: StandIn::Nothing,
    size: Size::Nothing,
    faults: &[],
};

/// What the jail observed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Request {
    /// The system call.
    pub syscall: String,
    /// The error the program saw, by its name: `ENOENT`, `EROFS`.
    pub errno: String,
    /// The process's command name and its id inside the jail.
    pub process: String,
    /// Its id inside the jail.
    pub pid: u32,
}
