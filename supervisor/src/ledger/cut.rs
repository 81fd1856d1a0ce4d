//! Cuts: what was pruned of a run, said and signed, so that what is left still verifies.

use super::{
    hash,
    key::{PublicKey, Purpose, Signature},
    row,
    time::Timestamp,
    writer::{Batch, Durability},
    Error, Ledger, Result,
};
use crate::effect::{Digest, RunId};
use rusqlite::{params, Connection, OptionalExtension as _};
use serde::{Deserialize, Serialize};
use std::collections::HashSet;

/// What is gone of a run: its first `count` receipts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cut {
    /// How many receipts are gone, from the first on.
    pub count: u64,
    /// How many of them were refusals.
    pub refused: u64,
    /// How many of them must not be repeated.
    pub once: u64,
    /// The last one's hash, from which the rest of the chain follows.
    pub head: Digest,
    /// When they went.
    #[serde(with = "super::time::written")]
    pub cut_at: Timestamp,
    /// The key of the host that cut.
    pub key: PublicKey,
    /// Its signature; see [`hash`].
    pub signature: Signature,
}

impl Cut {
    /// Whether its own key signed it for this run.
    pub(super) fn is_signed(&self, run: &RunId) -> bool {
        self.key.verifies(Purpose::Cut, &hash::cut(run, self), &self.signature)
    }
}

/// How many receipts one transaction removes, so that a live run's receipts do not wait long behind it.
const TOGETHER: u64 = 20_000;

impl Ledger {
    /// What was cut of a run, if anything.
    ///
    /// # Errors
    ///
    /// The database's.
    pub fn cut_of(&self, run: &RunId) -> Result<Option<Cut>> {
        self.read("read what was cut", |connection| {
            let n: Option<i64> = connection
                .prepare_cached("SELECT n FROM runs WHERE id = ?1")?
                .query_row([&run.0], |row| row.get(0))
                .optional()?;
            Ok(Ok(match n {
                Some(n) => read(connection, n)?,
                None => None,
            }))
        })
    }

    /// Removes the next receipts of an ended run from the beginning of what is left, some thousands at once, and
    /// leaves the signed cut in the same transaction. Gives how many are left.
    ///
    /// # Errors
    ///
    /// [`Error::NotPrunable`] when the run is not over and sealed, or something of it is in doubt.
    pub(crate) fn cut_some(&self, run: &RunId) -> Result<u64> {
        let (run, now) = (run.clone(), self.clock().now());
        self.call(Durability::Process, move |batch| cut_some(batch, &run, now))
    }

    /// How large the database is, without what is free in it, and how many receipts share it.
    pub(crate) fn footprint(&self) -> Result<Footprint> {
        self.read("measure the database", |connection| {
            connection
                .query_row(
                    "SELECT (SELECT page_count FROM pragma_page_count) - (SELECT freelist_count FROM pragma_freelist_count), \
                     (SELECT page_size FROM pragma_page_size), (SELECT freelist_count FROM pragma_freelist_count), \
                     (SELECT coalesce(sum(count), 0) FROM chains) - (SELECT coalesce(sum(count), 0) FROM cuts)",
                    [],
                    |row| {
                        let [pages, size, free, receipts]: [i64; 4] = [row.get(0)?, row.get(1)?, row.get(2)?, row.get(3)?];
                        Ok(Footprint {
                            used_bytes: (pages.max(0) * size) as u64,
                            free_bytes: (free * size) as u64,
                            receipts: receipts.max(0) as u64,
                        })
                    },
                )
                .map(Ok)
        })
    }

    /// The digests that a run's receipts name as results.
    pub(crate) fn results_of(&self, run: &RunId) -> Result<Vec<Digest>> {
        let n = self.run_number(run)?;
        self.read("read a run's results", |connection| {
            let mut statement = connection.prepare_cached(
                "SELECT DISTINCT result_digest FROM receipts WHERE id > ?1 AND id <= ?2 AND result_digest IS NOT NULL",
            )?;
            let found = statement
                .query_map([row::id(n, 0), row::id(n, row::CHAIN_MAX)], |row| Ok(Digest(row.get(0)?)))?
                .collect::<rusqlite::Result<Vec<_>>>()?;
            Ok(Ok(found))
        })
    }

    /// Which of these contents something still names: a receipt as its result, or a row of any table with a column
    /// `blob`, which is how other parts of the ledger say that they need a content.
    pub(crate) fn still_named(&self, contents: &HashSet<Digest>) -> Result<HashSet<Digest>> {
        if contents.is_empty() {
            return Ok(HashSet::new());
        }
        self.read("look for what names a content", |connection| {
            let mut queries = vec!["SELECT result_digest FROM receipts WHERE result_digest IS NOT NULL".to_owned()];
            let mut tables = connection.prepare(
                "SELECT m.name FROM sqlite_schema AS m JOIN pragma_table_info(m.name) AS c \
                 WHERE m.type = 'table' AND c.name = 'blob'",
            )?;
            for name in tables.query_map([], |row| row.get::<_, String>(0))? {
                queries.push(format!("SELECT blob FROM \"{}\" WHERE blob IS NOT NULL", name?.replace('"', "\"\"")));
            }
            let mut named = HashSet::new();
            for query in queries {
                let mut statement = connection.prepare(&query)?;
                let mut rows = statement.query([])?;
                while let Some(row) = rows.next()? {
                    if let Ok(bytes) = row.get::<_, [u8; 32]>(0) {
                        named.extend(contents.get(&Digest(bytes)).copied());
                    }
                }
            }
            Ok(Ok(named))
        })
    }

    /// Gives the database's free pages back to the disk. Nobody writes meanwhile.
    pub(crate) fn compact(&self) -> Result<()> {
        let connection = super::store::open_writer(self.database())?;
        connection
            .execute_batch("VACUUM; PRAGMA wal_checkpoint(TRUNCATE)")
            .map_err(|error| super::store::storage("compact the database", self.database(), error))
    }
}

/// How large the database is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Footprint {
    /// Bytes that hold something.
    pub(crate) used_bytes: u64,
    /// Bytes that are free for new receipts.
    pub(crate) free_bytes: u64,
    /// Receipts.
    pub(crate) receipts: u64,
}

fn cut_some(batch: &mut Batch<'_>, run: &RunId, now: Timestamp) -> Result<u64> {
    let failed = batch.failed("cut a run's receipts");
    let chain = batch.chain(run)?;
    let (n, total) = (chain.run, chain.count);
    let connection = batch.connection();
    let (state, open, sealed): (String, bool, Option<i64>) = connection
        .query_row(
            "SELECT state, EXISTS (SELECT 1 FROM intents WHERE run = ?1), \
             (SELECT count FROM heads WHERE heads.run = runs.id ORDER BY heads.n DESC LIMIT 1) FROM runs WHERE n = ?1",
            [n],
            |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?)),
        )
        .map_err(&failed)?;
    let kept = |why: &'static str| Error::NotPrunable { run: run.0.clone(), why };
    if state != "ended" {
        return Err(kept("it is not over"));
    }
    if open {
        return Err(kept("something of it is in doubt"));
    }
    if sealed != Some(total as i64) {
        return Err(kept("its chain is not sealed"));
    }
    let before = read(connection, n).map_err(&failed)?;
    let (from, refused, once) = before.map_or((0, 0, 0), |cut| (cut.count, cut.refused, cut.once));
    if from == total {
        return Ok(0);
    }
    let to = total.min(from.saturating_add(TOGETHER));
    let (more_refused, more_once, head): (i64, i64, Option<[u8; 32]>) = connection
        .query_row(
            "SELECT count(*) FILTER (WHERE decision = 'refused'), count(*) FILTER (WHERE idempotency = 'once'), \
             (SELECT hash FROM receipts WHERE id = ?2) FROM receipts WHERE id > ?1 AND id <= ?2",
            [row::id(n, from), row::id(n, to)],
            |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?)),
        )
        .map_err(&failed)?;
    let signer = batch.key();
    let mut cut = Cut {
        count: to,
        refused: refused.saturating_add(more_refused as u64),
        once: once.saturating_add(more_once as u64),
        head: Digest(head.ok_or_else(|| kept("a receipt of it is missing; `tollgate verify` says which"))?),
        cut_at: now,
        key: signer.public(),
        signature: Signature([0; 64]),
    };
    cut.signature = signer.sign(Purpose::Cut, &hash::cut(run, &cut));
    connection
        .execute(
            "INSERT OR REPLACE INTO cuts (run, count, refused, once, head, cut_us, key, signature) \
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)",
            params![
                n,
                cut.count as i64,
                cut.refused as i64,
                cut.once as i64,
                cut.head.0,
                now.0,
                cut.key.0,
                cut.signature.0
            ],
        )
        .map_err(&failed)?;
    connection
        .execute("DELETE FROM receipts WHERE id > ?1 AND id <= ?2", [row::id(n, 0), row::id(n, to)])
        .map_err(&failed)?;
    Ok(total - to)
}

/// What was cut of the run with this number.
pub(super) fn read(connection: &Connection, run: i64) -> rusqlite::Result<Option<Cut>> {
    let mut statement = connection
        .prepare_cached("SELECT count, refused, once, head, cut_us, key, signature FROM cuts WHERE run = ?1")?;
    statement
        .query_row([run], |row| {
            Ok(Cut {
                count: row.get::<_, i64>(0)? as u64,
                refused: row.get::<_, i64>(1)? as u64,
                once: row.get::<_, i64>(2)? as u64,
                head: Digest(row.get(3)?),
                cut_at: Timestamp(row.get(4)?),
                key: PublicKey(row.get(5)?),
                signature: Signature(row.get(6)?),
            })
        })
        .optional()
}
