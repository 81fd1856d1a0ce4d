//! The ledger: the durable, hash-chained store of receipts.
//!
//! State lies in one directory: `ledger.db` (SQLite with a write-ahead log; several processes share it), `blobs/`
//! (contents by SHA-256) and `runs/ID/` (each run's own files, made by others). The directory has mode 0700, files
//! 0600.
//!
//! Receipts of one run form a chain, each holding the hash of the one before; when a run ends, its chain's head goes
//! into the chain of the host and is signed with the host's key. All of it is specified in [`hash`]. The ledger decides
//! nothing and changes no receipt: its API can append, read, and cut from the beginning of an ended run, which leaves a
//! signed cut.

mod blobs;
pub mod consent;
pub mod cut;
pub mod draft;
mod error;
pub mod export;
pub mod hash;
mod intent;
pub mod key;
pub mod mark;
pub(crate) mod once;
pub mod query;
pub mod quota;
pub mod record;
mod reserve;
mod row;
mod runs;
mod spool;
mod state;
mod store;
pub mod time;
pub mod verify;
mod writer;
mod written;

pub use cut::Cut;
pub use draft::{Draft, Timing};
pub use error::{Error, Result};
pub use intent::{Intent, OpenIntent};
pub use key::{PublicKey, Signature};
pub use mark::Checkpoint;
pub use once::OnceResult;
pub use query::{Denied, ReceiptQuery, Receipts};
pub use runs::{Head, RunQuery, Which};
pub use state::state_dir;
pub use time::{Clock, SystemClock, Timestamp};
pub use verify::{Broken, Fault, Host, Trust, Verification};
pub use writer::Durability;
pub use written::Written;

use crate::effect::RunId;
use record::Receipt;
use rusqlite::Connection;
use std::{
    fmt,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};
use writer::{Batch, Writer};

/// A handle on the store, cheap to clone. The last one dropped waits until what was asked of it is committed.
#[derive(Clone)]
pub struct Ledger {
    shared: Arc<Shared>,
}

struct Shared {
    state: PathBuf,
    database: PathBuf,
    clock: Arc<dyn Clock>,
    /// None when opened for reading only.
    writer: Option<Writer>,
    /// Connections that read, at rest.
    readers: Mutex<Vec<Connection>>,
    open_reader: fn(&Path) -> Result<Connection>,
    /// Where receipts are until the writer has committed them.
    spools: spool::Spools,
}

impl fmt::Debug for Ledger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Ledger").field(&self.shared.state).finish()
    }
}

impl Ledger {
    /// Opens the ledger of this state directory, and makes it where there is none.
    ///
    /// Returns before the database is open: a thread opens it meanwhile, and what it finds comes with the first use.
    ///
    /// # Errors
    ///
    /// When the directory cannot be made, is another user's, or is open to others and holds files that are not ours.
    pub fn open(state: &Path) -> Result<Ledger> {
        Ledger::open_with(state, Arc::new(SystemClock))
    }

    /// As [`Ledger::open`], with this clock.
    ///
    /// # Errors
    ///
    /// As [`Ledger::open`].
    pub fn open_with(state: &Path, clock: Arc<dyn Clock>) -> Result<Ledger> {
        let database = store::prepare(state)?;
        let writer = Some(Writer::start(database.clone())?);
        Ok(Ledger::new(state, database, clock, writer))
    }

    /// Opens the ledger of this state directory for reading. Changes nothing, and makes nothing.
    ///
    /// # Errors
    ///
    /// When there is none, or a newer or older program wrote it.
    pub fn open_read_only(state: &Path) -> Result<Ledger> {
        let database = state.join("ledger.db");
        let reader = store::open_reader(&database)?;
        let ledger = Ledger::new(state, database, Arc::new(SystemClock), None);
        ledger.readers().push(reader);
        Ok(ledger)
    }

    /// Opens a copy of a ledger's database, wherever it lies and whatever it is called. Changes nothing beside it,
    /// unless the copy came with its write-ahead log, which SQLite then indexes.
    ///
    /// # Errors
    ///
    /// As [`Ledger::open_read_only`].
    pub fn open_copy(database: &Path) -> Result<Ledger> {
        let reader = store::open_copy(database)?;
        let state = database.parent().unwrap_or(Path::new(""));
        let mut ledger = Ledger::new(state, database.to_owned(), Arc::new(SystemClock), None);
        if let Some(shared) = Arc::get_mut(&mut ledger.shared) {
            shared.open_reader = store::open_copy;
        }
        ledger.readers().push(reader);
        Ok(ledger)
    }

    fn new(state: &Path, database: PathBuf, clock: Arc<dyn Clock>, writer: Option<Writer>) -> Ledger {
        let (state, readers) = (state.to_owned(), Mutex::default());
        let (open_reader, spools) = (store::open_reader, spool::Spools::default());
        let shared = Shared { state, database, clock, writer, readers, open_reader, spools };
        Ledger { shared: Arc::new(shared) }
    }

    /// The state directory.
    pub fn state(&self) -> &Path {
        &self.shared.state
    }

    /// The database file.
    pub(crate) fn database(&self) -> &Path {
        &self.shared.database
    }

    /// Where a run's own files lie. Nothing is made here.
    pub fn run_dir(&self, run: &RunId) -> PathBuf {
        self.shared.state.join("runs").join(&run.0)
    }

    /// The clock that it was opened with.
    pub fn clock(&self) -> &Arc<dyn Clock> {
        &self.shared.clock
    }

    /// Waits until the ledger is open, and says whether there is room for the receipt of something new.
    ///
    /// # Errors
    ///
    /// Those of opening the database, [`Error::NotWritable`] when it was opened for reading only, and
    /// [`Error::DiskFull`] from the moment that the disk was found full until there is space again.
    pub fn writable(&self) -> Result<()> {
        self.writer()?.ready()
    }

    /// Whether any run was not over when the ledger was opened; for one that was opened for reading only, whether any
    /// is now. Costs nothing where it was opened for writing.
    ///
    /// # Errors
    ///
    /// Those of opening the database.
    pub fn had_live_runs(&self) -> Result<bool> {
        match &self.shared.writer {
            Some(writer) => writer.opened_on_live_runs(),
            None => {
                self.read("look for runs that are not over", |connection| Ok(Ok(store::has_live_runs(connection)?)))
            }
        }
    }

    /// Appends one receipt, and returns once it outlives this process.
    ///
    /// # Errors
    ///
    /// When it could not be written; then it is not in the chain, and the caller should refuse the effect.
    pub fn append(&self, draft: Draft) -> Result<Receipt> {
        self.append_one(draft, Durability::Process)
    }

    /// As [`Ledger::append`], once it outlives a loss of power.
    ///
    /// # Errors
    ///
    /// As [`Ledger::append`].
    pub fn append_durable(&self, draft: Draft) -> Result<Receipt> {
        self.append_one(draft, Durability::Power)
    }

    /// As [`Ledger::append`] for several, in order and all or none.
    ///
    /// # Errors
    ///
    /// As [`Ledger::append`].
    pub fn append_many(&self, drafts: Vec<Draft>) -> Result<Vec<Receipt>> {
        self.call(Durability::Process, move |batch| batch.append(&drafts))
    }

    /// As [`Ledger::append`], without holding the calling thread.
    ///
    /// # Errors
    ///
    /// As [`Ledger::append`].
    pub async fn append_async(&self, draft: Draft) -> Result<Receipt> {
        let drafts = [draft];
        let receipts =
            self.writer()?.call_async(Durability::Process, Box::new(move |batch| batch.append(&drafts))).await?;
        only(receipts)
    }

    /// Appends a receipt without waiting. For when the one who would wait is gone; a failure is logged.
    pub(crate) fn append_unattended(&self, draft: Draft) {
        let draft = match self.spool_unattended(draft) {
            Ok(()) => return,
            Err(draft) => *draft,
        };
        let writer = match self.writer() {
            Ok(writer) => writer,
            Err(error) => return tracing::error!(%error, "a receipt is lost"),
        };
        let drafts = [draft];
        writer.submit(Durability::Process, Box::new(move |batch| batch.append(&drafts)), |result| {
            if let Err(error) = result {
                tracing::error!(%error, "a receipt is lost");
            }
        });
    }

    fn append_one(&self, draft: Draft, durability: Durability) -> Result<Receipt> {
        let drafts = [draft];
        only(self.call(durability, move |batch| batch.append(&drafts))?)
    }

    fn writer(&self) -> Result<&Writer> {
        self.shared
            .writer
            .as_ref()
            .ok_or_else(|| Error::NotWritable { path: self.shared.database.clone(), source: None })
    }

    fn call<T: Send + 'static>(
        &self,
        durability: Durability,
        work: impl FnMut(&mut Batch<'_>) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        self.writer()?.call(durability, Box::new(work))
    }

    fn readers(&self) -> std::sync::MutexGuard<'_, Vec<Connection>> {
        self.shared.readers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads with a connection of its own.
    fn read<T>(&self, doing: &'static str, read: impl FnOnce(&Connection) -> rusqlite::Result<Result<T>>) -> Result<T> {
        if let Some(writer) = &self.shared.writer {
            writer.opened()?;
        }
        let resting = self.readers().pop();
        let connection = match resting {
            Some(connection) => connection,
            None => (self.shared.open_reader)(&self.shared.database)?,
        };
        let result = read(&connection).unwrap_or_else(|error| Err(store::storage(doing, &self.shared.database, error)));
        self.readers().push(connection);
        result
    }
}

/// The one receipt of one draft.
fn only(receipts: Vec<Receipt>) -> Result<Receipt> {
    receipts.into_iter().next().ok_or_else(|| Error::WriterGone("a draft gave no receipt".to_owned()))
}

#[cfg(test)]
pub(crate) mod tests;
