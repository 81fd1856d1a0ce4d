//! The one thread that writes.
//!
//! It owns the only connection that writes, takes whatever work is queued, does it in one transaction and answers
//! everybody once that transaction is committed. Work that must not be lost with the machine makes its batch wait for
//! the disk; the rest is in the write-ahead log, which outlives the process.

use super::{
    draft::Draft,
    key::HostKey,
    mark::{self, Checkpoint},
    record::{EffectCounts, Receipt},
    reserve::Reserve,
    row,
    runs::Head,
    store::{self, storage},
    Error, Result,
};
use crate::{
    chain::Decision,
    crash::{self, Point},
    effect::{Digest, Idempotency, RunId},
};
use rusqlite::{params, Connection, OptionalExtension as _, TransactionBehavior};
use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    sync::{
        mpsc::{self, Receiver, Sender},
        Arc, Mutex, OnceLock,
    },
    thread::JoinHandle,
    time::Duration,
};

/// How much work one transaction takes at most, so that the first in it does not wait for ever.
const BATCH: usize = 4096;

/// How long work that nobody waits for is left to gather: at one commit for all of it, and one wakening of the thread, an
/// effect costs its asker neither.
const COMPANY: Duration = Duration::from_millis(5);

/// What a piece of work survives once it is acknowledged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Durability {
    /// The end of every process: it is in the kernel's hands.
    Process,
    /// The loss of power: it is on the disk.
    Power,
}

/// A piece of work. It may be done again when its batch failed, so it keeps what it needs.
///
/// An error other than the database's own must come before its first change: the rest of the batch goes on.
pub(super) type Work<T> = Box<dyn FnMut(&mut Batch<'_>) -> Result<T> + Send>;

trait Job: Send {
    fn durability(&self) -> Durability;
    /// Whether somebody waits for it.
    fn is_urgent(&self) -> bool {
        true
    }
    /// Does the work; an error is the database's, and fails the batch.
    fn apply(&mut self, batch: &mut Batch<'_>) -> Result<()>;
    fn acknowledge(self: Box<Self>, committed: Result<()>);
}

struct Task<T, R: FnOnce(Result<T>)> {
    durability: Durability,
    work: Work<T>,
    result: Option<Result<T>>,
    reply: R,
}

impl<T: Send, R: FnOnce(Result<T>) + Send> Job for Task<T, R> {
    fn durability(&self) -> Durability {
        self.durability
    }

    fn apply(&mut self, batch: &mut Batch<'_>) -> Result<()> {
        match (self.work)(batch) {
            Err(error) if is_storage(&error) => Err(error),
            result => {
                self.result = Some(result);
                Ok(())
            }
        }
    }

    fn acknowledge(self: Box<Self>, committed: Result<()>) {
        let Task { result, reply, .. } = *self;
        let undone = || Err(Error::WriterGone("work was left undone".to_owned()));
        reply(committed.and_then(|()| result.unwrap_or_else(undone)));
    }
}

/// Whether an error is the database's own, which no other work of the batch can escape.
fn is_storage(error: &Error) -> bool {
    matches!(
        error,
        Error::DiskFull { .. }
            | Error::NotWritable { .. }
            | Error::Busy { .. }
            | Error::Damaged { .. }
            | Error::Storage { .. }
    )
}

/// What the database held when it was opened.
#[derive(Clone, Copy, Debug)]
struct Opened {
    /// Whether a run in it was not over.
    live_runs: bool,
}

/// Comes alone into the queue to say that there is work that can wait.
struct Nudge;

impl Job for Nudge {
    fn durability(&self) -> Durability {
        Durability::Process
    }

    fn is_urgent(&self) -> bool {
        false
    }

    fn apply(&mut self, _: &mut Batch<'_>) -> Result<()> {
        Ok(())
    }

    fn acknowledge(self: Box<Self>, _: Result<()>) {}
}

/// Work that can wait for company, in its order.
type Soon = Arc<Mutex<Vec<Box<dyn Job>>>>;

fn take(soon: &Soon) -> Vec<Box<dyn Job>> {
    std::mem::take(&mut *soon.lock().unwrap_or_else(std::sync::PoisonError::into_inner))
}

/// The handle on the thread.
pub(super) struct Writer {
    queue: Mutex<Option<Sender<Box<dyn Job>>>>,
    soon: Soon,
    thread: Mutex<Option<JoinHandle<()>>>,
    opened: Arc<OnceLock<Result<Opened>>>,
    reserve: Arc<Reserve>,
}

impl Writer {
    /// Starts the thread, which opens the database by itself.
    pub(super) fn start(database: PathBuf) -> Result<Writer> {
        let (queue, jobs) = mpsc::channel();
        let (opened, reserve) = (Arc::new(OnceLock::new()), Arc::new(Reserve::beside(&database)));
        let (tell, released) = (opened.clone(), reserve.clone());
        let soon = Soon::default();
        let waiting = soon.clone();
        let thread = std::thread::Builder::new()
            .name("ledger".to_owned())
            .spawn(move || run(&database, &jobs, &waiting, &tell, &released))
            .map_err(|error| Error::WriterGone(format!("it could not start: {error}")))?;
        Ok(Writer { queue: Mutex::new(Some(queue)), soon, thread: Mutex::new(Some(thread)), opened, reserve })
    }

    /// Waits until the database is open and in its newest form.
    pub(super) fn opened(&self) -> Result<()> {
        self.opened.wait().clone().map(drop)
    }

    /// As [`Writer::opened`], and whether any run was not over then.
    pub(super) fn opened_on_live_runs(&self) -> Result<bool> {
        self.opened.wait().clone().map(|opened| opened.live_runs)
    }

    /// As [`Writer::opened`], and whether something new may begin.
    pub(super) fn ready(&self) -> Result<()> {
        self.opened()?;
        let thread = self.thread.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if thread.as_ref().is_none_or(JoinHandle::is_finished) {
            return Err(Error::WriterGone("it panicked".to_owned()));
        }
        drop(thread);
        self.reserve.check()
    }

    /// Queues work; `reply` is called on the writer's thread once it is committed, or has failed.
    pub(super) fn submit<T: Send + 'static>(
        &self,
        durability: Durability,
        work: Work<T>,
        reply: impl FnOnce(Result<T>) + Send + 'static,
    ) {
        let task = Box::new(Task { durability, work, result: None, reply });
        let queue = self.queue.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let refused: Box<dyn Job> = match queue.as_ref() {
            Some(queue) => match queue.send(task) {
                Ok(()) => return,
                Err(mpsc::SendError(job)) => job,
            },
            None => task,
        };
        drop(queue);
        refused.acknowledge(Err(Error::WriterGone("the ledger is closed".to_owned())));
    }

    /// Queues work that is safe elsewhere and that nobody waits for: it is done with the next that somebody waits for, or
    /// after [`COMPANY`], in the order in which it came. `reply` is as in [`Writer::submit`].
    pub(super) fn submit_soon<T: Send + 'static>(&self, work: Work<T>, reply: impl FnOnce(Result<T>) + Send + 'static) {
        let task = Box::new(Task { durability: Durability::Process, work, result: None, reply });
        let mut soon = self.soon.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let first = soon.is_empty();
        soon.push(task);
        drop(soon);
        if !first {
            // Whoever came first has said so; the thread takes all of them.
            return;
        }
        let queue = self.queue.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if queue.as_ref().is_none_or(|queue| queue.send(Box::new(Nudge)).is_err()) {
            drop(queue);
            for job in take(&self.soon) {
                job.acknowledge(Err(Error::WriterGone("the ledger is closed".to_owned())));
            }
        }
    }

    /// Queues work and waits for it.
    pub(super) fn call<T: Send + 'static>(&self, durability: Durability, work: Work<T>) -> Result<T> {
        let (reply, answer) = mpsc::sync_channel(1);
        self.submit(durability, work, move |result| {
            // Nobody listening is no failure: the work is done.
            let _ = reply.send(result);
        });
        answer.recv().unwrap_or_else(|_| Err(Error::WriterGone("it dropped the work".to_owned())))
    }

    /// Queues work and waits for it without holding the thread.
    pub(super) async fn call_async<T: Send + 'static>(&self, durability: Durability, work: Work<T>) -> Result<T> {
        let (reply, answer) = tokio::sync::oneshot::channel();
        self.submit(durability, work, move |result| {
            let _ = reply.send(result);
        });
        answer.await.unwrap_or_else(|_| Err(Error::WriterGone("it dropped the work".to_owned())))
    }
}

impl Drop for Writer {
    /// Finishes what is queued.
    fn drop(&mut self) {
        drop(self.queue.lock().unwrap_or_else(std::sync::PoisonError::into_inner).take());
        let thread = self.thread.lock().unwrap_or_else(std::sync::PoisonError::into_inner).take();
        // The last handle can go on the writer's own thread, inside a reply.
        if let Some(thread) = thread.filter(|thread| thread.thread().id() != std::thread::current().id()) {
            if thread.join().is_err() {
                tracing::error!("the ledger's writer panicked; please report this");
            }
        }
    }
}

fn run(
    database: &Path,
    jobs: &Receiver<Box<dyn Job>>,
    soon: &Soon,
    opened: &OnceLock<Result<Opened>>,
    reserve: &Reserve,
) {
    // Without the key no run could be sealed, so none begins.
    let open = || -> Result<_> {
        let connection = store::open_writer(database)?;
        let key = HostKey::open(database.parent().unwrap_or(Path::new("")))?;
        let live_runs = store::has_live_runs(&connection)
            .map_err(|error| storage("look for runs that are not over", database, error))?;
        Ok((connection, key, Opened { live_runs }))
    };
    let (mut connection, key) = match open() {
        Ok((connection, key, found)) => {
            let _ = opened.set(Ok(found));
            (connection, key)
        }
        Err(error) => {
            let _ = opened.set(Err(error.clone()));
            while let Ok(job) = jobs.recv() {
                for job in take(soon).into_iter().chain([job]) {
                    job.acknowledge(Err(error.clone()));
                }
            }
            return;
        }
    };
    reserve.begin();
    let mut writing = Writing { database, key, synced: Durability::Process, durable: None };
    let mut next = jobs.recv().ok();
    while let Some(first) = next {
        let mut urgent = vec![first];
        if !urgent[0].is_urgent() {
            // Also when everybody who could ask is gone meanwhile: what is there is still to be done.
            urgent.extend(jobs.recv_timeout(COMPANY));
        }
        urgent.extend(std::iter::from_fn(|| jobs.try_recv().ok()).take(BATCH - 1));
        // What came before the first of those that are waited for comes before it here too.
        let mut batch = take(soon);
        batch.append(&mut urgent);
        let mut committed = writing.transact(&mut connection, &mut batch);
        if let Err(error @ Error::DiskFull { .. }) = &committed {
            if reserve.release(error) {
                committed = writing.transact(&mut connection, &mut batch);
            }
        }
        for job in batch {
            job.acknowledge(committed.clone());
        }
        next = jobs.try_recv().ok().or_else(|| {
            writing.rest(&connection);
            jobs.recv().ok()
        });
    }
}

/// What the writer knows from one transaction to the next.
struct Writing<'a> {
    database: &'a Path,
    key: HostKey,
    /// What the connection is set to.
    synced: Durability,
    /// The newest head that is on the disk for certain.
    durable: Option<Checkpoint>,
}

impl Writing<'_> {
    /// Nobody waits: the time to copy a long log into the database, if that is cheap now.
    ///
    /// It is when the log is on the disk already, which it is after a batch that waited for that. A run has one such
    /// batch, whose effect then takes longer than the copying.
    fn rest(&self, connection: &Connection) {
        if self.synced == Durability::Power {
            if let Err(error) = store::copy_log(connection) {
                // The commit that finds it too long tries again, and says why it cannot.
                tracing::debug!(%error, "the log is not copied");
            }
        }
    }

    fn transact(&mut self, connection: &mut Connection, jobs: &mut [Box<dyn Job>]) -> Result<()> {
        let database = self.database;
        let failed = |error| storage("commit receipts", database, error);
        let wanted = jobs.iter().map(|job| job.durability()).max().unwrap_or(Durability::Process);
        if self.synced != wanted {
            // In WAL mode FULL adds one fsync of the log a commit, which covers every commit before it as well, other
            // processes' too: the log is one file.
            let mode = match wanted {
                Durability::Process => "NORMAL",
                Durability::Power => "FULL",
            };
            connection.pragma_update(None, "synchronous", mode).map_err(failed)?;
            self.synced = wanted;
        }
        let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate).map_err(failed)?;
        let mut batch =
            Batch { connection: &transaction, database, key: &self.key, chains: HashMap::new(), sealed: None };
        for job in jobs {
            job.apply(&mut batch)?;
        }
        let durable = match wanted {
            Durability::Power => last_head(&transaction).map_err(failed)?,
            Durability::Process => None,
        };
        let sealed = batch.finish()?;
        crash::reach(Point::LedgerCommits);
        transaction.commit().map_err(failed)?;
        crash::reach(Point::LedgerCommitted);
        self.durable = durable.or(self.durable.take());
        if let Some(latest) = sealed {
            let holds = |wanted: &Checkpoint| holds(connection, wanted).map_err(failed);
            if let Err(error) = mark::note(database, latest, self.durable.clone(), holds) {
                // The receipts are written; that the mark is not is found by whoever verifies.
                tracing::error!(%error, "the ledger's mark is not written");
            }
        }
        Ok(())
    }
}

/// The newest head of the host's chain.
fn last_head(connection: &Connection) -> rusqlite::Result<Option<Checkpoint>> {
    let mut statement =
        connection.prepare_cached(&format!("SELECT {} FROM heads ORDER BY n DESC LIMIT 1", Head::COLUMNS))?;
    Ok(statement.query_row([], Head::read).optional()?.as_ref().map(Checkpoint::of))
}

/// Whether the host's chain has this head at its place.
pub(super) fn holds(connection: &Connection, wanted: &Checkpoint) -> rusqlite::Result<bool> {
    let mut statement = connection.prepare_cached("SELECT hash = ?2 FROM heads WHERE n = ?1")?;
    Ok(statement.query_row(params![wanted.n as i64, wanted.hash.0], |row| row.get(0)).optional()?.unwrap_or(false))
}

/// One transaction.
pub(super) struct Batch<'a> {
    connection: &'a Connection,
    database: &'a Path,
    key: &'a HostKey,
    chains: HashMap<String, Chain>,
    sealed: Option<Checkpoint>,
}

/// Where a run's chain stands, within a transaction.
pub(super) struct Chain {
    /// The run's number.
    pub(super) run: i64,
    /// Its receipts.
    pub(super) count: u64,
    /// The last one's hash.
    pub(super) head: Digest,
    refused: u64,
    once: u64,
    /// The last receipt that was taken over from its spool.
    pub(super) spooled: u64,
    last_us: i64,
    changed: bool,
}

impl Chain {
    /// Its receipts, counted.
    pub(super) fn counts(&self) -> EffectCounts {
        EffectCounts { count: self.count, refused: self.refused, once: self.once }
    }
}

impl<'a> Batch<'a> {
    /// The connection, inside the transaction.
    pub(super) fn connection(&self) -> &'a Connection {
        self.connection
    }

    /// The host's key.
    pub(super) fn key(&self) -> &'a HostKey {
        self.key
    }

    /// Remembers the newest head, for the mark.
    pub(super) fn sealed(&mut self, head: &Head) {
        self.sealed = Some(Checkpoint::of(head));
    }

    /// SQLite's error with its operation.
    pub(super) fn failed(&self, doing: &'static str) -> impl Fn(rusqlite::Error) -> Error + 'a {
        let database = self.database;
        move |error| storage(doing, database, error)
    }

    /// Where a run's chain stands.
    pub(super) fn chain(&mut self, run: &RunId) -> Result<&mut Chain> {
        if !self.chains.contains_key(&run.0) {
            let found = self
                .connection
                .prepare_cached(
                    "SELECT chains.run, count, refused, once, last_us, head, spooled FROM chains \
                     JOIN runs ON runs.n = chains.run WHERE runs.id = ?1",
                )
                .and_then(|mut statement| {
                    statement
                        .query_row([&run.0], |row| {
                            Ok(Chain {
                                run: row.get(0)?,
                                count: row.get::<_, i64>(1)? as u64,
                                refused: row.get::<_, i64>(2)? as u64,
                                once: row.get::<_, i64>(3)? as u64,
                                last_us: row.get(4)?,
                                head: Digest(row.get(5)?),
                                spooled: row.get::<_, i64>(6)? as u64,
                                changed: false,
                            })
                        })
                        .optional()
                })
                .map_err(self.failed("find a run's chain"))?;
            let chain = found.ok_or_else(|| Error::NotFound(run.0.clone()))?;
            self.chains.insert(run.0.clone(), chain);
        }
        self.chains.get_mut(&run.0).ok_or_else(|| Error::NotFound(run.0.clone()))
    }

    /// Appends receipts in this order. Nothing is written unless every run exists and has room.
    pub(super) fn append(&mut self, drafts: &[Draft]) -> Result<Vec<Receipt>> {
        for draft in drafts {
            // The bound for all of them together is checked against each run: a little early, never late.
            if self.chain(&draft.run)?.count + drafts.len() as u64 > row::CHAIN_MAX {
                return Err(Error::ChainFull(draft.run.0.clone()));
            }
        }
        let connection = self.connection;
        let database = self.database;
        let failed = move |error| storage("append a receipt", database, error);
        let mut statement = connection.prepare_cached(row::INSERT).map_err(failed)?;
        let mut receipts = Vec::with_capacity(drafts.len());
        for draft in drafts {
            let chain = self.chain(&draft.run)?;
            let receipt = draft.at(chain.count + 1, chain.head);
            row::insert(&mut statement, chain.run, &receipt, draft.started).map_err(failed)?;
            chain.count += 1;
            chain.refused += u64::from(receipt.decision == Decision::Refused);
            chain.once += u64::from(receipt.idempotency == Idempotency::Once);
            chain.last_us = chain.last_us.max(draft.started.0);
            chain.head = receipt.hash;
            chain.changed = true;
            receipts.push(receipt);
        }
        Ok(receipts)
    }

    /// Writes back where the chains stand, and gives the newest head that was added.
    fn finish(self) -> Result<Option<Checkpoint>> {
        let failed = |error| storage("note a chain's head", self.database, error);
        for chain in self.chains.values().filter(|chain| chain.changed) {
            self.connection
                .prepare_cached(
                    "UPDATE chains SET count = ?2, refused = ?3, once = ?4, last_us = ?5, head = ?6, spooled = ?7 \
                     WHERE run = ?1",
                )
                .and_then(|mut statement| {
                    statement.execute(params![
                        chain.run,
                        chain.count as i64,
                        chain.refused as i64,
                        chain.once as i64,
                        chain.last_us,
                        chain.head.0,
                        chain.spooled as i64
                    ])
                })
                .map_err(failed)?;
        }
        Ok(self.sealed)
    }
}
