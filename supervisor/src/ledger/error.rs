//! What can go wrong with the ledger.

use crate::effect::Digest;
use std::{path::PathBuf, sync::Arc};

/// What the ledger could not do. Cloned to every caller whose work was in a batch that failed.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Error {
    /// Neither `$TOLLGATE_STATE`, `$XDG_STATE_HOME`, `$HOME` nor the password file names a place for the state.
    #[error("no place for the ledger: this user has no home directory; set TOLLGATE_STATE to a directory of your own")]
    NoHome,
    /// A variable that names the state directory holds a relative path.
    #[error("{variable} is `{path}`, which is not absolute; give the state directory's whole path", path = .path.display())]
    RelativeState {
        /// The environment variable.
        variable: &'static str,
        /// Its value.
        path: PathBuf,
    },
    /// The state directory exists, is not the ledger's, and others can enter it.
    #[error("{path} has mode {mode:04o}, so other users can enter it, and it holds files that are not Tollgate's; `chmod 700` it, or name another directory with TOLLGATE_STATE", path = .path.display())]
    StateIsOpen {
        /// The directory.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
    /// The state directory belongs to somebody else.
    #[error("{path} belongs to user {owner}, not to you; name a directory of your own with TOLLGATE_STATE", path = .path.display())]
    StateOfAnother {
        /// The directory.
        path: PathBuf,
        /// Its owner's user id.
        owner: u32,
    },
    /// A file or directory of the state could not be made, read or written.
    #[error("cannot {doing} {path}", path = .path.display())]
    Io {
        /// The operation, as a verb.
        doing: &'static str,
        /// The object.
        path: PathBuf,
        /// The kernel's answer.
        #[source]
        source: Arc<std::io::Error>,
    },
    /// There is no ledger here, and it was opened for reading only.
    #[error("there is no ledger at {path}; the first `tollgate run` makes it", path = .path.display())]
    Absent {
        /// The database file.
        path: PathBuf,
    },
    /// A newer program wrote the database.
    #[error("{path} was written by a newer Tollgate (form {found}; this one knows up to {known}); use that one, or another state directory", path = .path.display())]
    Newer {
        /// The database file.
        path: PathBuf,
        /// Its `user_version`.
        found: u32,
        /// The newest form known here.
        known: u32,
    },
    /// An older program wrote the database, and a reader may not bring it up to date.
    #[error("{path} has the older form {found}; any `tollgate run` by its owner brings it to form {known}", path = .path.display())]
    Older {
        /// The database file.
        path: PathBuf,
        /// Its `user_version`.
        found: u32,
        /// The form that readers need.
        known: u32,
    },
    /// The disk or the quota is full.
    #[error("the disk is full, so no receipt can be written to {path}; free some space there and try again", path = .path.display())]
    DiskFull {
        /// The database file.
        path: PathBuf,
        /// SQLite's answer.
        #[source]
        source: Arc<rusqlite::Error>,
    },
    /// The state may not be written, or was opened for reading only.
    #[error("{path} cannot be written; check its owner, its mode (0600 in a directory of 0700) and that its file system is not read-only", path = .path.display())]
    NotWritable {
        /// The database file.
        path: PathBuf,
        /// SQLite's answer.
        #[source]
        source: Option<Arc<rusqlite::Error>>,
    },
    /// Another process held the write lock for all of the time that we wait.
    #[error("{path} was locked by another process for more than {waited_s} s; see which with `fuser {path}`", path = .path.display())]
    Busy {
        /// The database file.
        path: PathBuf,
        /// How long we waited, in seconds.
        waited_s: u64,
        /// SQLite's answer.
        #[source]
        source: Arc<rusqlite::Error>,
    },
    /// The database is damaged.
    #[error("{path} is damaged; keep a copy of its whole directory, and move that away to start a new ledger", path = .path.display())]
    Damaged {
        /// The database file.
        path: PathBuf,
        /// SQLite's answer.
        #[source]
        source: Arc<rusqlite::Error>,
    },
    /// A row holds what no version of this program writes.
    #[error("{what} holds `{found}`, which this version does not know; a newer Tollgate or another hand wrote it")]
    Unreadable {
        /// The row, by its id.
        what: String,
        /// What it holds.
        found: String,
    },
    /// Another failure of the database.
    #[error("cannot {doing} in {path}", path = .path.display())]
    Storage {
        /// The operation, as a verb and its object.
        doing: &'static str,
        /// The database file.
        path: PathBuf,
        /// SQLite's answer.
        #[source]
        source: Arc<rusqlite::Error>,
    },
    /// No run has this id, or one that begins so.
    #[error("no run `{0}`; `tollgate ps --all` lists them")]
    NotFound(String),
    /// Several runs' ids begin so.
    #[error("`{prefix}` could be {}; write more of the id", .candidates.join(", "))]
    Ambiguous {
        /// What was given.
        prefix: String,
        /// Some of the ids that begin so, at most five.
        candidates: Vec<String>,
    },
    /// A run with this id exists.
    #[error("run `{0}` exists; take a new id and try again")]
    RunExists(String),
    /// A run's chain is as long as it can be.
    #[error("run `{0}` has 2^32-1 receipts, the most that a chain holds; start another run")]
    ChainFull(String),
    /// A receipt of a run's spool cannot be taken over before those in front of it.
    #[error("receipts of run `{0}` wait in its spool for one that could not be written; the next effect or the run's end tries again")]
    SpoolBehind(String),
    /// An intent that is not open.
    #[error("no open intent {0}; `in_doubt` lists those that are")]
    NoIntent(i64),
    /// No saved rule that holds has this number.
    #[error("no approval rule {0} holds; `tollgate approvals rules` lists those that do")]
    NoApprovalRule(i64),
    /// No quota has this id.
    #[error("no quota `{0}`; `tollgate quota list` lists them, `tollgate quota set` makes one")]
    NoQuota(String),
    /// No blob with this digest is stored.
    #[error("blob {0} is not in the ledger's store; it was pruned or lost")]
    BlobMissing(Digest),
    /// A blob's bytes are not those that its name promises.
    #[error("blob {digest} at {path} holds other bytes than its name says; it is damaged or was changed", path = .path.display())]
    BlobDamaged {
        /// The digest asked for.
        digest: Digest,
        /// The file.
        path: PathBuf,
    },
    /// The disk or the quota is full, for a blob or for the space that is held back for receipts.
    #[error("the disk is full, so {path} cannot be written; free some space there and try again", path = .path.display())]
    BlobDiskFull {
        /// The file.
        path: PathBuf,
        /// The kernel's answer.
        #[source]
        source: Arc<std::io::Error>,
    },
    /// The host's key cannot be used.
    #[error("{path} holds no key: {reason}; nothing can be signed without it; put the right one back, or move it away and keep its public half for what it has signed", path = .path.display())]
    KeyUnreadable {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// The ledger does not hold the head that its mark names.
    #[error("the ledger does not hold head {n}, which {path} names: the end of it is gone, or it is another ledger; `tollgate verify --all` says more", path = .path.display())]
    BehindMark {
        /// The mark.
        path: PathBuf,
        /// The head.
        n: u64,
    },
    /// A run whose receipts must stay.
    #[error("run {run} is not pruned: {why}")]
    NotPrunable {
        /// The run.
        run: String,
        /// Why.
        why: &'static str,
    },
    /// The writer thread is gone.
    #[error("the ledger's writer has stopped: {0}; please report this")]
    WriterGone(String),
}

/// The ledger's results.
pub type Result<T> = std::result::Result<T, Error>;
