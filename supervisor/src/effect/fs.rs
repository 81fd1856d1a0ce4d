//! Files of the workspace.
//!
//! A content never travels in an effect: its digest and size do, and the bytes stay where the door found them
//! (the run's own layer, or the request's body).

use super::{Class, Declaration, Digest, Door, FaultKind, FaultShape, Idempotency, Kind, Size, StandIn};
use serde::{Deserialize, Serialize};

/// Where the asker waits for the answer: at the run's socket, or in a system call.
const ASKED: &[Door] = &[Door::Api, Door::Program];
/// Where an answer has a body, headers and a connection.
const HTTP: &[Door] = &[Door::Api];
/// Also the change itself, when it leaves the run's layer; nobody waits for that one but the run's end.
const CHANGES: &[Door] = &[Door::Api, Door::Program, Door::Workspace];

const fn timeout(doors: &'static [Door]) -> FaultShape {
    FaultShape { kind: FaultKind::Timeout, doors, arrives: &["ETIMEDOUT"] }
}

/// The API door's own protocol is HTTP, so whatever is asked for there can be told to come back later.
const RATE_LIMIT: FaultShape = FaultShape { kind: FaultKind::RateLimit, doors: HTTP, arrives: &["429", "503"] };

const fn errors(doors: &'static [Door], arrives: &'static [&'static str]) -> FaultShape {
    FaultShape { kind: FaultKind::Error, doors, arrives }
}

const fn of_body(kind: FaultKind, arrives: &'static [&'static str]) -> FaultShape {
    FaultShape { kind, doors: HTTP, arrives }
}

const READ_FAULTS: &[FaultShape] = &[
    errors(ASKED, &["EIO", "EACCES", "EMFILE", "ENFILE", "ENOENT", "ENOMEM", "ESTALE", "ETIMEDOUT"]),
    timeout(ASKED),
    RATE_LIMIT,
    of_body(FaultKind::Truncated, &["a shorter body"]),
    of_body(FaultKind::Corrupted, &["a body with one byte changed"]),
    of_body(FaultKind::Cut, &["a body that breaks off"]),
];
const LIST_FAULTS: &[FaultShape] = &[
    errors(ASKED, &["EIO", "EACCES", "EMFILE", "ENFILE", "ENOENT", "ENOMEM", "ESTALE", "ETIMEDOUT"]),
    timeout(ASKED),
    RATE_LIMIT,
];
const WRITE_FAULTS: &[FaultShape] = &[
    errors(
        CHANGES,
        &["EIO", "EACCES", "EDQUOT", "EMFILE", "ENFILE", "ENOMEM", "ENOSPC", "EROFS", "ESTALE", "ETIMEDOUT"],
    ),
    timeout(ASKED),
    RATE_LIMIT,
];
const DELETE_FAULTS: &[FaultShape] = &[
    errors(CHANGES, &["EIO", "EACCES", "EBUSY", "EDQUOT", "ENOENT", "ENOSPC", "EPERM", "EROFS", "ESTALE", "ETIMEDOUT"]),
    timeout(ASKED),
    RATE_LIMIT,
];

/// Reads a file whole or a range of it.
pub const READ: Declaration = Declaration {
    kind: Kind::FsRead,
    name: "fs/read",
    classes: &[Class::Read],
    idempotency: Idempotency::Idempotent,
    resource: "a workspace path",
    summary: "Read a file of the workspace.",
    at_api_door: true,
    stand_in: StandIn::World,
    size: Size::Nothing,
    faults: READ_FAULTS,
};

/// Lists a directory.
pub const LIST: Declaration = Declaration {
    kind: Kind::FsList,
    name: "fs/list",
    classes: &[Class::Read],
    idempotency: Idempotency::Idempotent,
    resource: "a workspace path",
    summary: "List a directory of the workspace.",
    at_api_door: true,
    stand_in: StandIn::World,
    size: Size::Nothing,
    faults: LIST_FAULTS,
};

/// Makes a path be a file, link or directory with this content and these attributes.
pub const WRITE: Declaration = Declaration {
    kind: Kind::FsWrite,
    name: "fs/write",
    classes: &[Class::Write],
    idempotency: Idempotency::Idempotent,
    resource: "a workspace path",
    summary: "Create or replace a file, link or directory of the workspace, or change its attributes.",
    at_api_door: true,
    stand_in: StandIn::Done,
    size: Size::Content,
    faults: WRITE_FAULTS,
};

/// Removes a path, a directory with all below it.
pub const DELETE: Declaration = Declaration {
    kind: Kind::FsDelete,
    name: "fs/delete",
    classes: &[Class::Write],
    idempotency: Idempotency::Idempotent,
    resource: "a workspace path",
    summary: "Delete a file or directory of the workspace.",
    at_api_door: true,
    stand_in: StandIn::Done,
    size: Size::Nothing,
    faults: DELETE_FAULTS,
};

/// Renames a path; its inverse is the move back.
pub const MOVE: Declaration = Declaration {
    kind: Kind::FsMove,
    name: "fs/move",
    classes: &[Class::Write],
    idempotency: Idempotency::Compensable,
    resource: "the workspace path moved from",
    summary: "Move a file or directory within the workspace.",
    at_api_door: true,
    stand_in: StandIn::Done,
    size: Size::Nothing,
    faults: DELETE_FAULTS,
};

/// The arguments of a file effect. Paths are as in [`super::Resource::Workspace`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "verb")]
pub enum Request {
    /// `fs/read`.
    Read {
        /// The file.
        path: String,
        /// The first byte wanted.
        offset: u64,
        /// At most this many bytes.
        limit: u64,
    },
    /// `fs/list`.
    List {
        /// The directory.
        path: String,
    },
    /// `fs/write`.
    Write {
        /// The object.
        path: String,
        /// What it is to become.
        node: Node,
        /// What it must be before, if that matters.
        expect: Option<Expect>,
    },
    /// `fs/delete`.
    Delete {
        /// The object.
        path: String,
        /// What it must be before, if that matters.
        expect: Option<Expect>,
    },
    /// `fs/move`.
    Move {
        /// The object.
        path: String,
        /// Where it goes.
        to: String,
    },
}

/// What a path is to become.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "type")]
pub enum Node {
    /// A regular file.
    File {
        /// SHA-256 of the content.
        digest: Digest,
        /// Its length in bytes.
        bytes: u64,
        /// Permission bits, at most 0o777 for a new file.
        mode: u32,
    },
    /// A directory.
    Directory {
        /// Permission bits.
        mode: u32,
    },
    /// A symbolic link, which is never followed.
    Link {
        /// Its text, with bytes written as in a path.
        target: String,
    },
    /// Only the permission bits, times or extended attributes of what is there change.
    Attributes {
        /// Permission bits.
        mode: u32,
    },
}

/// What a path must be for the effect to go ahead: compare-and-write.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "is")]
pub enum Expect {
    /// Nothing is there.
    Absent,
    /// A regular file with this content.
    File {
        /// SHA-256 of the content.
        digest: Digest,
    },
    /// Not changed since then.
    Unchanged {
        /// The inode's change time, in nanoseconds since the epoch.
        since_ns: i64,
    },
}

impl Request {
    /// How many bytes of content the request writes.
    pub fn bytes(&self) -> u64 {
        match self {
            Request::Write { node: Node::File { bytes, .. }, .. } => *bytes,
            Request::Write { .. }
            | Request::Read { .. }
            | Request::List { .. }
            | Request::Delete { .. }
            | Request::Move { .. } => 0,
        }
    }
}
