//! From a policy to a running shim: what encloses a run, what bounds it and how it ended.

pub mod certificates;
pub mod cgroup;
pub mod enforcer;
pub mod kernel;
pub mod launch;
pub mod outcome;
pub mod probe;
pub mod profile;
pub mod seccomp;
pub mod spec;
pub mod streams;
pub mod truststore;
pub mod watch;
pub mod worktree;
