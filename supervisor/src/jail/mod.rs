//! From a policy to a running shim: plan, launch, limits, outcome.

pub mod launch;
pub mod profile;
pub mod seccomp;
pub mod spec;
pub mod streams;
