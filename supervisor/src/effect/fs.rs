//! Files of the workspace.
//!
//! A content never travels in an effect: its digest and size do, and the bytes stay where the door found them
//! (the run's own layer, or the request's body).

use super::{Class, Declaration, Digest, Idempotency, Kind};
use serde::{Deserialize, Serialize};

/// Reads a file whole or a range of it.
pub const READ: Declaration = Declaration {
    kind: Kind::FsRead,
    name: "fs/read",
    classes: &[Class::Read],
    idempotency: Idempotency::Idempotent,
    resource: "a workspace path",
    summary: "Read a file of the workspace.",
    at_api_door: true,
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
