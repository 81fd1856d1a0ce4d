//! The supervisor as a library object: one run from its request to its outcome.
//!
//! `tollgate run` uses it in process; a host service uses the same behind a socket.

pub mod block;
pub mod caller;
pub mod denials;
pub mod files;
pub mod insight;
pub mod meanwhile;
pub mod memory;
pub mod plan;
pub mod prune;
pub mod recovery;
pub mod resume;
pub mod run;
