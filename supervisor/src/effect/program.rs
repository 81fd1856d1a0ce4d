//! System calls of the program that wait for an answer before the kernel runs them.
//!
//! A run that injects faults, or keeps receipts of opens, asks about each call that acts on the workspace, executes a
//! file or connects. The answer is an error number, or that the kernel goes on with the call as it stands. It is what
//! the program sees, and never a wall: another thread can change a path between the look and the call
//! (seccomp_unotify(2), "Design goals"), so what a program can reach is decided by mounts, Landlock and the workspace
//! door alone.

use serde::{Deserialize, Serialize};

/// The call. Its object is the effect's resource; no process id is in it, so that equal calls have equal digests.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Request {
    /// The system call's name.
    pub syscall: String,
    /// What a rename's or link's other path is: of the workspace where it lies there, else absolute.
    pub to: Option<String>,
}
