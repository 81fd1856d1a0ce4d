//! The part of Tollgate inside the jail.
//!
//! The shim builds the jail from within, is its pid 1, and is its command-line client. It is small, static and
//! single-threaded, and knows nothing of the supervisor but the [`protocol`] between them.

pub mod channel;
pub mod client;
pub mod jail;
pub mod protocol;
mod sys;
