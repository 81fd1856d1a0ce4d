//! The closed vocabulary of effects, as pure data.
//!
//! An effect is what code asks of the world. Each kind is declared once, in its family's file, with its classes,
//! resource form, idempotency and canonical request; [`VOCABULARY`] is the one table that the schema, the reference,
//! the command line's completion and the OpenAPI document are made from. Nothing here decides or does anything.

pub mod api;
pub mod base64;
pub mod fs;
pub mod http;
pub mod jail;
pub mod net;
pub mod path;
pub mod program;
mod reference;
pub mod run;

pub use reference::{reference_markdown, schema};

use serde::{Deserialize, Serialize};
use std::fmt;

/// What an effect touches. A kind has at least one class; a request may add classes, never remove one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Class {
    /// Observes, and changes nothing an observer could see but a receipt.
    Read,
    /// Changes the room or the host.
    Write,
    /// Sends a packet out of the jail.
    Network,
    /// Hands data to a party outside.
    Egress,
    /// Costs money or budget.
    Spend,
    /// Starts or steers a process.
    Process,
    /// Creates or ends runs, rooms or agents.
    Lifecycle,
    /// Causes a later effect.
    Schedule,
    /// Touches state shared beyond the room.
    Global,
}

/// Whether an effect may be done twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Idempotency {
    /// Twice leaves the world as once does: reads, writes of given content.
    Idempotent,
    /// Has a known inverse: a move.
    Compensable,
    /// Never again without confirmation. Its intent is on disk before it happens.
    Once,
}

/// One row of the vocabulary.
#[derive(Clone, Copy, Debug)]
pub struct Declaration {
    /// The kind that this row declares.
    pub kind: Kind,
    /// Its name on every wire and in every file, `family/verb`.
    pub name: &'static str,
    /// What it touches.
    pub classes: &'static [Class],
    /// Whether it may be repeated.
    pub idempotency: Idempotency,
    /// How its resource is written, in words, for the reference.
    pub resource: &'static str,
    /// One sentence for the reference and the OpenAPI document.
    pub summary: &'static str,
    /// Whether the jail may ask for it at the API door. Others are only ever made by the supervisor's own doors.
    pub at_api_door: bool,
    /// What answers in the world's place while nothing is to happen.
    pub stand_in: StandIn,
    /// What a quota of bytes counts of it.
    pub size: Size,
    /// The faults that it can show, and how each arrives; empty for what cannot fail in the world.
    pub faults: &'static [FaultShape],
}

/// What answers an effect of a kind while nothing is to happen: how a preflight goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum StandIn {
    /// The world itself: it touches nothing outside the run.
    World,
    /// Success, with the result that the request itself implies.
    Done,
    /// Nothing can: the effect is refused.
    Nothing,
}

/// What a quota of bytes counts of an effect of a kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Size {
    /// Nothing: it writes no bytes.
    Nothing,
    /// The length of the content that it writes or sends.
    Content,
}

/// A way for an effect to go wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FaultKind {
    /// It fails with an error number.
    Error,
    /// Nothing comes back until a time limit, then it fails.
    Timeout,
    /// It is told to come back later.
    RateLimit,
    /// The result is shorter than it should be, and says so.
    Truncated,
    /// A byte of the result is another.
    Corrupted,
    /// The result breaks off before its announced length.
    Cut,
}

impl FaultKind {
    /// Every one, in the order of the reference.
    pub const ALL: [FaultKind; 6] = [
        FaultKind::Error,
        FaultKind::Timeout,
        FaultKind::RateLimit,
        FaultKind::Truncated,
        FaultKind::Corrupted,
        FaultKind::Cut,
    ];

    /// Its name in rules and in the reference.
    pub const fn name(self) -> &'static str {
        match self {
            FaultKind::Error => "error",
            FaultKind::Timeout => "timeout",
            FaultKind::RateLimit => "rate-limit",
            FaultKind::Truncated => "truncated",
            FaultKind::Corrupted => "corrupted",
            FaultKind::Cut => "cut",
        }
    }
}

/// The error number of this name, among those that faults arrive as.
pub fn errno(name: &str) -> Option<i32> {
    Some(match name {
        "EPERM" => libc::EPERM,
        "ENOENT" => libc::ENOENT,
        "EIO" => libc::EIO,
        "EAGAIN" => libc::EAGAIN,
        "ENOMEM" => libc::ENOMEM,
        "EACCES" => libc::EACCES,
        "EBUSY" => libc::EBUSY,
        "ENFILE" => libc::ENFILE,
        "EMFILE" => libc::EMFILE,
        "ENOSPC" => libc::ENOSPC,
        "EROFS" => libc::EROFS,
        "ECONNRESET" => libc::ECONNRESET,
        "ETIMEDOUT" => libc::ETIMEDOUT,
        "ECONNREFUSED" => libc::ECONNREFUSED,
        "EHOSTUNREACH" => libc::EHOSTUNREACH,
        "ENETUNREACH" => libc::ENETUNREACH,
        "ESTALE" => libc::ESTALE,
        "EDQUOT" => libc::EDQUOT,
        _ => return None,
    })
}

/// A fault that effects of a kind can show.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FaultShape {
    /// Which.
    pub kind: FaultKind,
    /// The doors by which it can arrive.
    pub doors: &'static [Door],
    /// What the asker may see, the natural one first: names of error numbers, or statuses.
    pub arrives: &'static [&'static str],
}

macro_rules! kinds {
    ($($variant:ident => $row:path),+ $(,)?) => {
        /// A kind of effect. Closed: policies and clients refer to kinds, they cannot add one.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum Kind { $(#[doc = concat!("See [`", stringify!($row), "`].")] $variant),+ }

        /// Every kind, in the order of the reference.
        pub const VOCABULARY: &[Declaration] = &[$($row),+];

        impl Kind {
            /// The kind's one row in the vocabulary.
            pub const fn declaration(self) -> &'static Declaration {
                match self { $(Kind::$variant => &$row),+ }
            }
        }
    };
}

kinds! {
    FsRead => fs::READ,
    FsList => fs::LIST,
    FsWrite => fs::WRITE,
    FsDelete => fs::DELETE,
    FsMove => fs::MOVE,
    RunStart => run::START,
    RunCancel => run::CANCEL,
    EvalRun => run::EVAL,
    NetConnect => net::CONNECT,
    ProcessExec => jail::PROCESS_EXEC,
    ProcessSyscall => jail::PROCESS_SYSCALL,
    ApiRequest => api::REQUEST,
    NetResolve => net::RESOLVE,
    HttpRequest => http::REQUEST,
    NetAccept => net::ACCEPT,
}

/// A name that is in no row of the vocabulary.
#[derive(Debug, thiserror::Error)]
#[error("unknown effect kind `{0}`; `tollgate policy list --kinds` prints the vocabulary")]
pub struct UnknownKind(pub String);

impl Kind {
    /// The kind's name, `family/verb`.
    pub const fn name(self) -> &'static str {
        self.declaration().name
    }

    /// What effects of this kind touch.
    pub const fn classes(self) -> &'static [Class] {
        self.declaration().classes
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl std::str::FromStr for Kind {
    type Err = UnknownKind;

    fn from_str(name: &str) -> Result<Self, UnknownKind> {
        VOCABULARY.iter().find(|row| row.name == name).map(|row| row.kind).ok_or_else(|| UnknownKind(name.to_owned()))
    }
}

impl Serialize for Kind {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

impl<'de> Deserialize<'de> for Kind {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

macro_rules! ids {
    ($($(#[$doc:meta])* $name:ident),+ $(,)?) => {$(
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub String);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
    )+};
}

ids! {
    /// A run's name: 12 lower-case letters and digits, unique on the host, sortable by start.
    RunId,
    /// A receipt's name: the run's id, a dot, and the receipt's place in the run, from 1.
    ReceiptId,
    /// A room's name.
    RoomId,
}

/// Who acts. Made by the runtime from what the kernel vouches for, never from a request (invariant I2).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Subject {
    /// The user on the host who started the run.
    pub uid: u32,
    /// The run that acts, or none for an operator at the control door.
    pub run: Option<RunId>,
    /// The agent's name, where an agent has one.
    pub agent: Option<String>,
}

/// The door an effect came in by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Door {
    /// The run's own socket.
    Api,
    /// What the run changed in its workspace.
    Workspace,
    /// What the jail's own layers refused and the kernel let us see.
    Jail,
    /// The control socket or the command line.
    Control,
    /// A system call of the program that waits for an answer before the kernel runs it.
    Program,
    /// A connection, a request or a question about a name that leaves the jail.
    Network,
}

impl Door {
    /// Every door.
    pub const ALL: [Door; 6] = [Door::Api, Door::Workspace, Door::Jail, Door::Control, Door::Program, Door::Network];

    /// Its name, as receipts have it.
    pub const fn name(self) -> &'static str {
        match self {
            Door::Api => "api",
            Door::Workspace => "workspace",
            Door::Jail => "jail",
            Door::Control => "control",
            Door::Program => "program",
            Door::Network => "network",
        }
    }
}

/// What an effect acts on. Two spellings of one object give one resource.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "type")]
pub enum Resource {
    /// A path of the workspace, relative to its root, without `.` or `..`; `""` is the root itself.
    /// Bytes that are not UTF-8 are written `\xNN`, and a backslash `\\`.
    /// [`path::workspace_path`] writes it so.
    Workspace {
        /// The path.
        path: String,
    },
    /// An absolute path of the host, outside the workspace. Only ever refused.
    Host {
        /// The path, its bytes written as those of a workspace path.
        path: String,
    },
    /// A run.
    Run {
        /// Its id.
        id: String,
    },
    /// A host and port as the program gave it, or a socket's path.
    Address {
        /// The address.
        to: String,
    },
    /// A system call.
    Syscall {
        /// Its name.
        name: String,
    },
    /// Something that a server has.
    Url {
        /// Scheme, host in lower case, port unless it is the scheme's own, path and query as they were sent.
        url: String,
    },
}

impl fmt::Display for Resource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Resource::Workspace { path } if path.is_empty() => f.write_str("."),
            Resource::Workspace { path } | Resource::Host { path } => f.write_str(path),
            Resource::Run { id } => f.write_str(id),
            Resource::Address { to } => f.write_str(to),
            Resource::Syscall { name } => f.write_str(name),
            Resource::Url { url } => f.write_str(url),
        }
    }
}

/// The arguments of an effect, typed by family. Serialised canonically by [`Effect::digest`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "family", content = "args")]
pub enum Request {
    /// Files of the workspace.
    Fs(fs::Request),
    /// Runs.
    Run(run::Request),
    /// What the jail saw refused.
    Jail(jail::Request),
    /// What the API door refused.
    Api(api::Request),
    /// A system call that waits.
    Program(program::Request),
    /// Connections and names outside.
    Net(net::Request),
    /// Requests to servers outside.
    Http(http::Request),
}

/// What code asks of the world.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Effect {
    /// Which kind.
    pub kind: Kind,
    /// The object.
    pub resource: Resource,
    /// Who asks.
    pub subject: Subject,
    /// Where the code runs, if in a room.
    pub room: Option<RoomId>,
    /// How it came in.
    pub door: Door,
    /// The arguments.
    pub request: Request,
}

impl Effect {
    /// What the effect touches.
    pub fn classes(&self) -> &'static [Class] {
        self.kind.classes()
    }

    /// Whether this effect may be done twice: what its kind declares, or what its method says.
    pub fn idempotency(&self) -> Idempotency {
        match &self.request {
            Request::Http(request) => http::idempotency_of(&request.method),
            Request::Fs(_)
            | Request::Run(_)
            | Request::Jail(_)
            | Request::Api(_)
            | Request::Program(_)
            | Request::Net(_) => self.kind.declaration().idempotency,
        }
    }

    /// How many bytes the effect would write or hand out, for the quota; 0 for what does neither.
    pub fn bytes(&self) -> u64 {
        match &self.request {
            Request::Fs(request) => request.bytes(),
            Request::Http(request) => request.body.bytes(),
            Request::Run(_) | Request::Jail(_) | Request::Api(_) | Request::Program(_) | Request::Net(_) => 0,
        }
    }

    /// SHA-256 over the canonical request: equal requests hash equal on any machine, in any run.
    ///
    /// The hashed bytes are, in this order: `tollgate.effect.v1`, a zero byte, the kind's name, a zero byte, the
    /// resource as canonical JSON, a zero byte, the request as canonical JSON. Canonical JSON has its object keys
    /// sorted by their bytes, no white space and integers only. Subject, room and door are not part of it.
    pub fn digest(&self) -> Digest {
        let mut bytes = b"tollgate.effect.v1\0".to_vec();
        bytes.extend_from_slice(self.kind.name().as_bytes());
        bytes.push(0);
        bytes.extend_from_slice(&canonical_json(&self.resource));
        bytes.push(0);
        bytes.extend_from_slice(&canonical_json(&self.request));
        Digest::of(&bytes)
    }
}

/// Serialises a value with sorted keys and no white space.
///
/// `serde_json`'s own map is sorted by key (its `preserve_order` feature is off), so passing through its value type
/// sorts every object.
pub fn canonical_json(value: &impl Serialize) -> Vec<u8> {
    let value = serde_json::to_value(value).expect("effect types hold only strings, integers and lists of them");
    serde_json::to_vec(&value).expect("a JSON value serialises")
}

/// A SHA-256 digest, written as 64 hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Digest(pub [u8; 32]);

impl Digest {
    /// The digest of these bytes.
    pub fn of(bytes: &[u8]) -> Digest {
        use sha2::Digest as _;
        Digest(sha2::Sha256::digest(bytes).into())
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex::encode(self.0))
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl std::str::FromStr for Digest {
    type Err = hex::FromHexError;

    fn from_str(text: &str) -> Result<Self, hex::FromHexError> {
        let mut bytes = [0; 32];
        hex::decode_to_slice(text, &mut bytes)?;
        Ok(Digest(bytes))
    }
}

impl Serialize for Digest {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Digest {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
pub(crate) mod tests;
