//! Policies: from a TOML file to a typed value in which nonsense cannot be written.
//!
//! Two stages. [`file`] reads what is written and points at what is wrong with it; [`compose`] joins a file with those
//! that it extends into a [`Policy`], and only a `Policy` travels. A file that cannot be read, or has a single fault,
//! gives no policy at all: nothing here falls back to a wider one.

pub mod compose;
pub mod fault;
pub mod file;
pub mod limits;
pub mod network;
pub mod overrides;
pub mod propose;
pub mod published;
pub mod quantity;
pub mod search;
pub mod secret;
pub mod warnings;

pub use fault::{Fault, PolicyError};
pub use network::{Cidr, Network};
pub use overrides::Overrides;
pub use search::{PolicyRef, SearchPath};

use crate::{
    chain::{admission::Admission, faults::FaultRule},
    effect::Digest,
};
use std::{collections::BTreeMap, path::PathBuf};
use tollgate_shim::protocol::Enforcement;

/// What one run may do and use.
#[derive(Clone, Debug)]
pub struct Policy {
    /// The name or path that it was asked for by.
    pub name: String,
    /// SHA-256 of the composed policy; see [`compose`] for the bytes.
    pub digest: Digest,
    /// One sentence for people.
    pub description: String,
    /// How the jail is built.
    pub jail: JailPolicy,
    /// What the run may use.
    pub limits: limits::Limits,
    /// How long a question to a person waits, where a file says so.
    pub approval_timeout: Option<std::time::Duration>,
    /// Which effects it may have.
    pub admission: Admission,
    /// What it says about the network beside its rules.
    pub network: network::Network,
    /// What answers in the world's place.
    pub handlers: Handlers,
    /// The files that it was composed from, outermost first; a built-in one is `policies/NAME.toml`.
    pub sources: Vec<PathBuf>,
}

/// What answers in the world's place, outermost first: a recording, then the faults.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Handlers {
    /// Whether the run is recorded.
    pub record: bool,
    /// What goes wrong.
    pub faults: Vec<FaultRule>,
}

/// How the jail of a run is built.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JailPolicy {
    /// The bubblewrap profile that makes the view.
    pub profile: ProfileName,
    /// What carries the profile out.
    pub launcher: Launcher,
    /// The name of the list of system calls; [`search::seccomp_list`] has its text.
    pub seccomp: String,
    /// Whether a layer that the machine lacks may be left out.
    pub enforcement: Enforcement,
    /// What the run may start with.
    pub commands: Commands,
    /// Host paths that the jail sees, read-only, beside the profile's own.
    pub views: Vec<View>,
    /// Which variables reach the program.
    pub environment: EnvironmentRule,
    /// How the workspace is shown.
    pub workspace: WorkspaceAccess,
    /// Workspace paths that the jail does not see: patterns, of the `[[deny]]` rules on `fs/read`.
    pub hide: Vec<String>,
}

/// The name of a profile in `bwrap-profiles/`: lower-case letters, digits and hyphens.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ProfileName(String);

impl ProfileName {
    /// Checks a name.
    pub fn new(name: &str) -> Option<ProfileName> {
        is_plain_name(name).then(|| ProfileName(name.to_owned()))
    }

    /// The name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// Whether a name can be part of a file name without leading anywhere else.
fn is_plain_name(name: &str) -> bool {
    !name.is_empty()
        && name.len() <= 64
        && !name.starts_with('-')
        && name.bytes().all(|byte| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'-'))
}

/// What carries a profile out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Launcher {
    /// The shim itself.
    Native,
    /// `bwrap`.
    Bwrap,
}

/// What a run may start with: the base name of the first argument.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Commands {
    /// Anything; a file writes it out as `any`.
    Any,
    /// One of these base names.
    List(Vec<String>),
}

impl Commands {
    /// Whether a run may start with this first argument.
    ///
    /// The last component is compared, so `/usr/bin/python3` counts as `python3`. This names what a run is for; it is
    /// no fence, since a program that may be started can start others.
    pub fn admit(&self, program: &std::ffi::OsStr) -> bool {
        match self {
            Commands::Any => true,
            Commands::List(names) => {
                let name = std::path::Path::new(program).file_name();
                name.is_some_and(|name| names.iter().any(|allowed| name == allowed.as_str()))
            }
        }
    }
}

/// A host path that the jail sees, read-only, under its own name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct View {
    /// Absolute, without `.` or `..`.
    pub path: PathBuf,
    /// What it means when the path is missing.
    pub presence: Presence,
}

/// What a missing path means.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Presence {
    /// The run does not start.
    Required,
    /// The view is left out.
    Optional,
}

/// Which variables reach the program. Nothing else does: what is not named is not inherited.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct EnvironmentRule {
    /// Names passed through when they are set; a name that ends in `*` stands for all that start so.
    pub pass: Vec<String>,
    /// Variables with a value of the policy's own. They win over one that is passed through.
    pub fixed: BTreeMap<String, String>,
}

impl EnvironmentRule {
    /// Whether a variable of this name is passed through.
    pub fn passes(&self, name: &str) -> bool {
        self.pass.iter().any(|pattern| match pattern.strip_suffix('*') {
            Some(start) => name.starts_with(start),
            None => name == pattern,
        })
    }
}

/// How the workspace is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorkspaceAccess {
    /// Read and written; what was written becomes effects when the run ends.
    ReadWrite,
    /// Read only.
    ReadOnly,
    /// Not at all: an empty directory stands in its place. For policies that do not allow `fs/read`.
    Hidden,
}

#[cfg(test)]
mod tests;
