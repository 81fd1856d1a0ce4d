//! Runs: their records, their ids and the host's chain of their heads.

use super::{
    draft::Draft,
    hash,
    key::{PublicKey, Purpose, Signature},
    record::{EffectCounts, RunRecord, RunState},
    time::Timestamp,
    writer::{Batch, Durability},
    Error, Ledger, Result,
};
use crate::effect::{Digest, RunId};
use rusqlite::{params, params_from_iter, types::Value, ErrorCode, OptionalExtension as _, Row};
use serde::{Deserialize, Serialize};

/// Which runs to list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Which {
    /// Those that are not over.
    Live,
    /// Every one.
    All,
}

/// What to list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RunQuery {
    /// Which.
    pub all: Which,
    /// At most this many, the newest.
    pub limit: Option<u64>,
    /// Started then or later.
    pub since: Option<Timestamp>,
}

/// An entry of the host's chain: where a run's chain stood when it ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Head {
    /// Its place, from 1.
    pub n: u64,
    /// The run.
    pub run: RunId,
    /// How many receipts its chain had.
    pub count: u64,
    /// The last one's hash; all zero for none.
    pub head: Digest,
    /// The digest of the run's record as it was then; none in heads that an older version wrote.
    pub record: Option<Digest>,
    /// When it was sealed.
    #[serde(with = "super::time::written")]
    pub sealed_at: Timestamp,
    /// `hash` of the head before it; all zero for the first.
    pub prev: Digest,
    /// See [`hash`].
    pub hash: Digest,
    /// The host's public key; none in heads that an older version wrote.
    pub key: Option<PublicKey>,
    /// Its signature over `hash`; none in heads that an older version wrote.
    pub signature: Option<Signature>,
}

impl Head {
    /// The columns that [`Head::read`] wants first, of `heads`.
    pub(super) const COLUMNS: &'static str =
        "heads.n, heads.run, heads.count, heads.head, heads.sealed_us, heads.prev, \
         heads.hash, heads.record, heads.key, heads.signature";

    pub(super) fn read(row: &Row<'_>) -> rusqlite::Result<Head> {
        Ok(Head {
            n: row.get::<_, i64>(0)? as u64,
            run: RunId(row.get(1)?),
            count: row.get::<_, i64>(2)? as u64,
            head: Digest(row.get(3)?),
            sealed_at: Timestamp(row.get(4)?),
            prev: Digest(row.get(5)?),
            hash: Digest(row.get(6)?),
            record: row.get::<_, Option<[u8; 32]>>(7)?.map(Digest),
            key: row.get::<_, Option<[u8; 32]>>(8)?.map(PublicKey),
            signature: row.get::<_, Option<[u8; 64]>>(9)?.map(Signature),
        })
    }

    /// Whether its own key signed it.
    pub fn is_signed(&self) -> bool {
        super::Checkpoint::of(self).is_signed()
    }
}

/// The letters of an id, in order of their codes: Crockford's base 32 in lower case, without i, l, o and u.
const LETTERS: &[u8; 32] = b"0123456789abcdefghjkmnpqrstvwxyz";

/// Forty bits of hundredths of a second since the epoch, which last until 2318, then twenty random bits.
pub(super) fn run_id(now: Timestamp, random: u64) -> RunId {
    let time = (now.0.max(0) as u64 / 10_000) & ((1 << 40) - 1);
    let bits = time << 20 | random & ((1 << 20) - 1);
    RunId((0..12).rev().map(|place| char::from(LETTERS[(bits >> (place * 5)) as usize & 31])).collect())
}

impl Ledger {
    /// A fresh id. Ids sort by the time they were made, to a hundredth of a second; that one is not taken is certain
    /// once [`Ledger::insert_run`] took it.
    pub fn new_run_id(&self) -> RunId {
        run_id(self.clock().now(), self.clock().random())
    }

    /// Adds a run. Its `effects` are not read: the ledger counts.
    ///
    /// # Errors
    ///
    /// [`Error::RunExists`] when the id is taken: make a new one and try again.
    pub fn insert_run(&self, run: &RunRecord) -> Result<()> {
        let (run, started, json) = (run.clone(), started(run)?, json(run));
        self.call(Durability::Process, move |batch| {
            let failed = batch.failed("add a run");
            batch
                .connection()
                .execute(
                    "INSERT INTO runs (id, state, started_us, record) VALUES (?1, ?2, ?3, ?4)",
                    params![run.id.0, state(run.state), started.0, json],
                )
                .map_err(|error| match error.sqlite_error_code() {
                    Some(ErrorCode::ConstraintViolation) => Error::RunExists(run.id.0.clone()),
                    _ => failed(error),
                })?;
            let n = batch.connection().last_insert_rowid();
            batch
                .connection()
                .execute(
                    "INSERT INTO chains (run, count, refused, once, last_us, head) VALUES (?1, 0, 0, 0, ?2, ?3)",
                    params![n, started.0, [0u8; 32]],
                )
                .map_err(batch.failed("add a run"))?;
            Ok(())
        })
    }

    /// Replaces a run's record, but for its `effects`. One that is over, or was sealed before, is sealed with it,
    /// since the seal covers the record.
    ///
    /// # Errors
    ///
    /// [`Error::NotFound`] when there is no such run.
    pub fn update_run(&self, run: &RunRecord) -> Result<()> {
        let (run, started, json, now) = (run.clone(), started(run)?, json(run), self.clock().now());
        self.call(Durability::Process, move |batch| update(batch, &run, started, &json, now))
    }

    /// As [`Ledger::update_run`], without waiting: for what others may see a moment later. A failure is logged.
    pub fn update_run_unattended(&self, run: &RunRecord) {
        let log = |error: Error| tracing::error!(%error, "a run's state is not written");
        let started = match started(run) {
            Ok(started) => started,
            Err(error) => return log(error),
        };
        let (run, json, now) = (run.clone(), json(run), self.clock().now());
        match self.writer() {
            Ok(writer) => writer.submit(
                Durability::Process,
                Box::new(move |batch| update(batch, &run, started, &json, now)),
                move |result| result.unwrap_or_else(log),
            ),
            Err(error) => log(error),
        }
    }

    /// Ends a run, all in one: its last receipts, its record, the seal on its chain. Gives the record with its counts.
    ///
    /// # Errors
    ///
    /// [`Error::NotFound`] when there is no such run.
    pub fn end_run(&self, run: &RunRecord, last: Vec<Draft>) -> Result<RunRecord> {
        let (run, started, json, now) = (run.clone(), started(run)?, json(run), self.clock().now());
        let (spooled, id) = (self.spooled(&run.id)?, run.id.clone());
        let ended = self.call(Durability::Process, move |batch| {
            super::spool::fold(batch, &run.id, &spooled)?;
            batch.append(&last)?;
            replace(batch, &run, started, &json)?;
            super::intent::record_in_doubt(batch, &run.id)?;
            seal(batch, &run.id, now)?;
            // The table has the counts of before this transaction, until it ends.
            let effects = batch.chain(&run.id)?.counts();
            Ok(RunRecord { effects, ..run.clone() })
        })?;
        self.remove_spool(&id);
        Ok(ended)
    }

    /// The run with this id, the only one whose id begins so, or the newest for the word `latest`.
    ///
    /// # Errors
    ///
    /// [`Error::NotFound`] and [`Error::Ambiguous`].
    pub fn run(&self, id: &str) -> Result<RunRecord> {
        if id == "latest" {
            let newest = RunQuery { all: Which::All, limit: Some(1), since: None };
            return self.runs(newest)?.pop().ok_or_else(|| Error::NotFound(id.to_owned()));
        }
        // An id is of letters and digits only, so `~` sorts after all that begin with the prefix.
        if id.is_empty() || !id.bytes().all(|byte| byte.is_ascii_alphanumeric()) {
            return Err(Error::NotFound(id.to_owned()));
        }
        let mut found = self.read("find a run", |connection| {
            let mut statement = connection.prepare_cached(concat!(
                "SELECT runs.id, record, count, refused, once FROM runs JOIN chains ON chains.run = runs.n ",
                "WHERE runs.id >= ?1 AND runs.id < ?1 || '~' ORDER BY runs.id LIMIT 5"
            ))?;
            let runs = statement.query_map([id], read_run)?.collect::<rusqlite::Result<Result<Vec<_>>>>();
            runs
        })?;
        if let Some(exact) = found.iter().position(|run| run.id.0 == id) {
            return Ok(found.swap_remove(exact));
        }
        match found.len() {
            0 => Err(Error::NotFound(id.to_owned())),
            1 => Ok(found.remove(0)),
            _ => Err(Error::Ambiguous {
                prefix: id.to_owned(),
                candidates: found.into_iter().map(|run| run.id.0).collect(),
            }),
        }
    }

    /// Runs, the newest first.
    ///
    /// # Errors
    ///
    /// The database's.
    pub fn runs(&self, query: RunQuery) -> Result<Vec<RunRecord>> {
        let mut sql = "SELECT runs.id, record, count, refused, once FROM runs JOIN chains ON chains.run = runs.n \
                       WHERE TRUE"
            .to_owned();
        let mut values = Vec::new();
        if query.all == Which::Live {
            sql.push_str(" AND state <> 'ended'");
        }
        if let Some(since) = query.since {
            sql.push_str(" AND started_us >= ?");
            values.push(Value::Integer(since.0));
        }
        sql.push_str(" ORDER BY runs.n DESC");
        if let Some(limit) = query.limit {
            sql.push_str(" LIMIT ?");
            values.push(Value::Integer(i64::try_from(limit).unwrap_or(i64::MAX)));
        }
        self.read("list the runs", |connection| {
            let mut statement = connection.prepare_cached(&sql)?;
            let runs = statement.query_map(params_from_iter(values), read_run)?.collect();
            runs
        })
    }

    /// Ends a run's chain: what is still open gets its receipt as in doubt, and the head goes into the host's chain.
    ///
    /// A chain may go on after it and be sealed again: applying or undoing a run's changes later has receipts too.
    ///
    /// # Errors
    ///
    /// [`Error::NotFound`] when there is no such run.
    pub fn seal_run(&self, run: &RunId) -> Result<Head> {
        let (run, now) = (run.clone(), self.clock().now());
        self.call(Durability::Process, move |batch| {
            super::intent::record_in_doubt(batch, &run)?;
            seal(batch, &run, now)
        })
    }
}

/// Puts where a run's chain stands into the host's, signed. Where nothing changed since it was last sealed, that seal
/// is the answer.
fn seal(batch: &mut Batch<'_>, run: &RunId, now: Timestamp) -> Result<Head> {
    let chain = batch.chain(run)?;
    let (number, count, head) = (chain.run, chain.count, chain.head);
    let connection = batch.connection();
    let text: String = connection
        .prepare_cached("SELECT record FROM runs WHERE n = ?1")
        .and_then(|mut statement| statement.query_row([number], |row| row.get(0)))
        .map_err(batch.failed("read a run"))?;
    let record = Some(hash::run(&value(run, &text)?));
    if let Some(last) = last_seal(batch, run)? {
        if (last.count, last.head, last.record) == (count, head, record) && last.signature.is_some() {
            return Ok(last);
        }
    }
    let last = connection
        .query_row("SELECT n, hash FROM heads ORDER BY n DESC LIMIT 1", [], |row| {
            Ok((row.get::<_, i64>(0)? as u64, Digest(row.get(1)?)))
        })
        .optional()
        .map_err(batch.failed("read the host's chain"))?;
    let (before, prev) = last.unwrap_or((0, Digest([0; 32])));
    let key = batch.key();
    let mut sealed = Head {
        n: before + 1,
        run: run.clone(),
        count,
        head,
        record,
        // As it is stored and shown, which the hash covers.
        sealed_at: now,
        prev,
        hash: Digest([0; 32]),
        key: Some(key.public()),
        signature: None,
    };
    sealed.hash = hash::head(&sealed);
    let signature = key.sign(Purpose::Seal, &sealed.hash);
    sealed.signature = Some(signature);
    connection
        .execute(
            "INSERT INTO heads (n, run, count, head, sealed_us, prev, hash, record, key, signature) \
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10)",
            params![
                sealed.n as i64,
                run.0,
                count as i64,
                head.0,
                now.0,
                prev.0,
                sealed.hash.0,
                record.map(|digest| digest.0),
                key.public().0,
                signature.0
            ],
        )
        .map_err(batch.failed("add to the host's chain"))?;
    batch.sealed(&sealed);
    Ok(sealed)
}

/// The newest seal of a run, if it was ever sealed.
fn last_seal(batch: &Batch<'_>, run: &RunId) -> Result<Option<Head>> {
    batch
        .connection()
        .prepare_cached(&format!("SELECT {} FROM heads WHERE run = ?1 ORDER BY n DESC LIMIT 1", Head::COLUMNS))
        .and_then(|mut statement| statement.query_row([&run.0], Head::read).optional())
        .map_err(batch.failed("read the host's chain"))
}

fn update(batch: &mut Batch<'_>, run: &RunRecord, started: Timestamp, json: &str, now: Timestamp) -> Result<()> {
    replace(batch, run, started, json)?;
    // A run that is over without a seal is what a ledger with a cut end looks like.
    if run.state == RunState::Ended {
        super::intent::record_in_doubt(batch, &run.id)?;
    }
    if run.state == RunState::Ended || last_seal(batch, &run.id)?.is_some() {
        seal(batch, &run.id, now)?;
    }
    Ok(())
}

/// A stored record as a value, with whatever fields the version that wrote it knew.
pub(super) fn value(run: &RunId, text: &str) -> Result<serde_json::Value> {
    let unreadable = |found: String| Error::Unreadable { what: format!("run {run}"), found };
    match serde_json::from_str(text) {
        Ok(record @ serde_json::Value::Object(_)) => Ok(record),
        Ok(other) => Err(unreadable(other.to_string())),
        Err(error) => Err(unreadable(error.to_string())),
    }
}

fn replace(batch: &mut Batch<'_>, run: &RunRecord, started: Timestamp, json: &str) -> Result<()> {
    let changed = batch
        .connection()
        .execute(
            "UPDATE runs SET state = ?2, started_us = ?3, record = ?4 WHERE id = ?1",
            params![run.id.0, state(run.state), started.0, json],
        )
        .map_err(batch.failed("change a run"))?;
    match changed {
        0 => Err(Error::NotFound(run.id.0.clone())),
        _ => Ok(()),
    }
}

pub(super) fn state(state: RunState) -> &'static str {
    match state {
        RunState::Starting => "starting",
        RunState::Running => "running",
        RunState::Applying => "applying",
        RunState::Ended => "ended",
    }
}

fn started(run: &RunRecord) -> Result<Timestamp> {
    run.started_at.parse().map_err(|_| Error::Unreadable {
        what: format!("`started_at` of run {}", run.id),
        found: run.started_at.clone(),
    })
}

fn json(run: &RunRecord) -> String {
    serde_json::to_string(run).expect("a run holds strings, integers and lists of them")
}

fn read_run(row: &Row<'_>) -> rusqlite::Result<Result<RunRecord>> {
    let id: String = row.get(0)?;
    let effects = EffectCounts {
        count: row.get::<_, i64>(2)? as u64,
        refused: row.get::<_, i64>(3)? as u64,
        once: row.get::<_, i64>(4)? as u64,
    };
    Ok(match serde_json::from_str::<RunRecord>(row.get_ref(1)?.as_str()?) {
        Ok(record) => Ok(RunRecord { effects, ..record }),
        Err(error) => Err(Error::Unreadable { what: format!("run {id}"), found: error.to_string() }),
    })
}
