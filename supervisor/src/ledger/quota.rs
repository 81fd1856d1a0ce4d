//! Quotas that runs share by id: how much, how much is used, and by whom.
//!
//! What is used is what was settled and what is reserved. A reservation is one transaction of the database, which
//! arbitrates between processes. A run that dies leaves its reservations here, charged; closing the run settles them.

use super::{
    writer::{Batch, Durability},
    Error, Ledger, Result,
};
use crate::{
    chain::quota::{Amounts, Unit},
    effect::{Digest, Door, RunId},
};
use rusqlite::{params, OptionalExtension as _};
use serde::Serialize;

/// How one unit of a quota stands.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct QuotaLine {
    /// The quota.
    pub id: String,
    /// The unit.
    pub unit: &'static str,
    /// At most this much.
    pub limit: u64,
    /// What was settled and what is reserved.
    pub used: u64,
    /// Of it, what effects under way, or runs that are not closed, have reserved.
    pub reserved: u64,
    /// What is left.
    pub left: u64,
}

/// What an effect needs.
#[derive(Clone, Debug)]
pub struct Asked {
    /// The run that it is of.
    pub run: RunId,
    /// The quota.
    pub quota: String,
    /// How much of each unit; what the quota has no limit on is not counted.
    pub amounts: Amounts,
    /// Limits that are narrower than the quota's own.
    pub limits: Amounts,
    /// The door that the effect came in by.
    pub door: Door,
    /// The effect's digest.
    pub digest: Digest,
}

/// Whether there was enough.
#[derive(Debug)]
pub enum Reserved {
    /// There was, and it is held.
    Held(Reservation),
    /// There was not, and nothing is held.
    Exceeds {
        /// The unit.
        unit: Unit,
        /// How much was asked for.
        amount: u64,
        /// How much is used.
        used: u64,
        /// The limit that counts.
        limit: u64,
    },
}

/// What an effect under way holds. Dropped without [`Reservation::settle`], it stays charged until its run is closed.
#[must_use = "a reservation stays charged until it is settled"]
#[derive(Debug)]
pub struct Reservation {
    ledger: Ledger,
    rows: Vec<Row>,
}

#[derive(Clone, Copy, Debug)]
struct Row {
    n: i64,
    unit: Unit,
    amount: u64,
}

impl Reservation {
    /// Charges so much of what was reserved and gives the rest back, without waiting; a failure is logged, and leaves
    /// everything charged until the run is closed.
    pub fn settle(self, charge: impl Fn(Unit, u64) -> u64) {
        let charges: Vec<(i64, u64)> =
            self.rows.iter().map(|row| (row.n, charge(row.unit, row.amount).min(row.amount))).collect();
        if charges.is_empty() {
            return;
        }
        let log = |error: Error| tracing::error!(%error, "a reservation stays charged until its run is closed");
        match self.ledger.writer() {
            Ok(writer) => writer.submit(
                Durability::Process,
                Box::new(move |batch| charges.iter().try_for_each(|(n, charged)| settle(batch, *n, *charged))),
                move |result| result.unwrap_or_else(log),
            ),
            Err(error) => log(error),
        }
    }
}

/// What is known of the batch of a run that is closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BatchFate {
    /// Each change that is in the workspace has its receipt, and no other is there.
    Told,
    /// Nobody can say: whatever was reserved stays charged.
    Unknown,
}

impl Ledger {
    /// Sets limits of a quota, and makes it where there is none. Other units of it stay as they are.
    ///
    /// # Errors
    ///
    /// The database's.
    pub fn set_quota(&self, id: &str, limits: &Amounts) -> Result<()> {
        let (id, limits) = (id.to_owned(), limits.clone());
        self.call(Durability::Power, move |batch| {
            for (unit, most) in &limits {
                batch
                    .connection()
                    .execute(
                        "INSERT INTO quotas (id, unit, most, settled) VALUES (?1, ?2, ?3, 0) \
                         ON CONFLICT (id, unit) DO UPDATE SET most = excluded.most",
                        params![id, unit.name(), stored(*most)],
                    )
                    .map_err(batch.failed("set a quota"))?;
            }
            Ok(())
        })
    }

    /// Makes a quota with these limits where there is none with this id. One that is there stays as it is, and no
    /// limits make none.
    ///
    /// # Errors
    ///
    /// The database's.
    pub fn make_quota(&self, id: &str, limits: &Amounts) -> Result<()> {
        let (id, limits) = (id.to_owned(), limits.clone());
        self.call(Durability::Process, move |batch| {
            let there = batch
                .connection()
                .query_row("SELECT 1 FROM quotas WHERE id = ?1 LIMIT 1", [&id], |_| Ok(()))
                .optional()
                .map_err(batch.failed("find a quota"))?;
            for (unit, most) in limits.iter().filter(|_| there.is_none()) {
                batch
                    .connection()
                    .execute(
                        "INSERT INTO quotas (id, unit, most, settled) VALUES (?1, ?2, ?3, 0)",
                        params![id, unit.name(), stored(*most)],
                    )
                    .map_err(batch.failed("make a quota"))?;
            }
            match there.is_some() || !limits.is_empty() {
                true => Ok(()),
                false => Err(Error::NoQuota(id.clone())),
            }
        })
    }

    /// Forgets what was used of a quota, but for what is reserved right now.
    ///
    /// # Errors
    ///
    /// [`Error::NoQuota`] when there is none.
    pub fn reset_quota(&self, id: &str) -> Result<()> {
        let id = id.to_owned();
        self.call(Durability::Power, move |batch| {
            let changed = batch
                .connection()
                .execute("UPDATE quotas SET settled = 0 WHERE id = ?1", [&id])
                .map_err(batch.failed("reset a quota"))?;
            match changed {
                0 => Err(Error::NoQuota(id.clone())),
                _ => Ok(()),
            }
        })
    }

    /// How every quota stands, by id and unit.
    ///
    /// # Errors
    ///
    /// The database's.
    pub fn quotas(&self) -> Result<Vec<QuotaLine>> {
        self.quota_lines("TRUE", "")
    }

    /// How one quota stands.
    ///
    /// # Errors
    ///
    /// [`Error::NoQuota`] when there is none.
    pub fn quota(&self, id: &str) -> Result<Vec<QuotaLine>> {
        let lines = self.quota_lines("quotas.id = ?1", id)?;
        match lines.is_empty() {
            true => Err(Error::NoQuota(id.to_owned())),
            false => Ok(lines),
        }
    }

    fn quota_lines(&self, filter: &str, id: &str) -> Result<Vec<QuotaLine>> {
        let sql = format!(
            "SELECT quotas.id, quotas.unit, most, settled, COALESCE(SUM(amount), 0) FROM quotas \
             LEFT JOIN reservations ON reservations.quota = quotas.id AND reservations.unit = quotas.unit \
             WHERE {filter} AND (?1 = ?1) GROUP BY quotas.id, quotas.unit ORDER BY quotas.id, quotas.unit"
        );
        self.read("read the quotas", |connection| {
            let mut statement = connection.prepare_cached(&sql)?;
            let lines = statement
                .query_map([id], |row| {
                    let (id, unit): (String, String) = (row.get(0)?, row.get(1)?);
                    let [limit, settled, reserved] = [2, 3, 4].map(|column| row.get::<_, i64>(column));
                    let (limit, settled, reserved) = (read(limit?), read(settled?), read(reserved?));
                    let used = settled.saturating_add(reserved);
                    Ok(known(&unit).map(|unit| QuotaLine {
                        id,
                        unit: unit.name(),
                        limit,
                        used,
                        reserved,
                        left: limit.saturating_sub(used),
                    }))
                })?
                .collect::<rusqlite::Result<Result<Vec<_>>>>();
            lines
        })
    }

    /// Charges a run's effects to a quota from now on.
    ///
    /// # Errors
    ///
    /// [`Error::NoQuota`] and [`Error::NotFound`].
    pub fn join_quota(&self, run: &RunId, id: &str) -> Result<()> {
        let (run, id) = (run.clone(), id.to_owned());
        self.call(Durability::Process, move |batch| {
            let number = batch.chain(&run)?.run;
            let there = batch
                .connection()
                .query_row("SELECT 1 FROM quotas WHERE id = ?1 LIMIT 1", [&id], |_| Ok(()))
                .optional()
                .map_err(batch.failed("find a quota"))?;
            there.ok_or_else(|| Error::NoQuota(id.clone()))?;
            batch
                .connection()
                .execute("INSERT OR IGNORE INTO run_quotas (run, quota) VALUES (?1, ?2)", params![number, id])
                .map_err(batch.failed("charge a run to a quota"))?;
            Ok(())
        })
    }

    /// The quotas that a run is charged to.
    ///
    /// # Errors
    ///
    /// The database's.
    pub fn run_quotas(&self, run: &RunId) -> Result<Vec<String>> {
        self.read("find a run's quotas", |connection| {
            let mut statement = connection.prepare_cached(
                "SELECT quota FROM run_quotas JOIN runs ON runs.n = run_quotas.run WHERE runs.id = ?1 ORDER BY quota",
            )?;
            let found = statement.query_map([&run.0], |row| row.get(0))?.collect::<rusqlite::Result<Vec<String>>>();
            found.map(Ok)
        })
    }

    /// The runs that are charged to a quota, the newest first, a hundred at most.
    ///
    /// # Errors
    ///
    /// The database's.
    pub fn quota_runs(&self, id: &str) -> Result<Vec<String>> {
        self.read("find a quota's runs", |connection| {
            let mut statement = connection.prepare_cached(
                "SELECT runs.id FROM run_quotas JOIN runs ON runs.n = run_quotas.run WHERE quota = ?1 \
                 ORDER BY runs.n DESC LIMIT 100",
            )?;
            let found = statement.query_map([id], |row| row.get(0))?.collect::<rusqlite::Result<Vec<String>>>();
            found.map(Ok)
        })
    }

    /// Reserves what an effect needs, all of it or nothing.
    ///
    /// # Errors
    ///
    /// [`Error::NoQuota`], [`Error::NotFound`] and the database's. Then nothing is reserved, and the effect must be
    /// refused.
    pub async fn reserve(&self, asked: Asked) -> Result<Reserved> {
        let work = Box::new(move |batch: &mut Batch<'_>| reserve(batch, &asked));
        let found = self.writer()?.call_async(Durability::Process, work).await?;
        Ok(match found {
            Ok(rows) => Reserved::Held(Reservation { ledger: self.clone(), rows }),
            Err(exceeds) => exceeds,
        })
    }

    /// Settles what a run that is over has still reserved: what has its receipt counts, what of its batch did not
    /// happen is given back, and what is in doubt stays charged.
    ///
    /// # Errors
    ///
    /// [`Error::NotFound`] and the database's.
    pub fn close_reservations(&self, run: &RunId, fate: BatchFate) -> Result<()> {
        let run = run.clone();
        self.call(Durability::Process, move |batch| {
            let number = batch.chain(&run)?.run;
            let open: Vec<(i64, u64, String, [u8; 32])> = batch
                .connection()
                .prepare_cached("SELECT n, amount, door, digest FROM reservations WHERE run = ?1")
                .and_then(|mut statement| {
                    statement
                        .query_map([number], |row| Ok((row.get(0)?, read(row.get(1)?), row.get(2)?, row.get(3)?)))?
                        .collect()
                })
                .map_err(batch.failed("list a run's reservations"))?;
            for (n, amount, door, digest) in open {
                let happened = match (fate, door.as_str()) {
                    (BatchFate::Told, WORKSPACE) => batch
                        .connection()
                        .prepare_cached(
                            "SELECT 1 FROM receipts WHERE id > ?1 << 32 AND id < (?1 + 1) << 32 \
                             AND request_digest = ?2 AND door = ?3 AND decision = 'allowed' LIMIT 1",
                        )
                        .and_then(|mut statement| {
                            statement.query_row(params![number, digest, WORKSPACE], |_| Ok(())).optional()
                        })
                        .map_err(batch.failed("find a reservation's receipt"))?
                        .is_some(),
                    (BatchFate::Told | BatchFate::Unknown, _) => true,
                };
                settle(batch, n, if happened { amount } else { 0 })?;
            }
            Ok(())
        })
    }
}

const WORKSPACE: &str = "workspace";

fn door_word(door: Door) -> &'static str {
    match door {
        Door::Api => "api",
        Door::Workspace => WORKSPACE,
        Door::Jail => "jail",
        Door::Program => "program",
        Door::Network => "network",
        Door::Control => "control",
    }
}

fn reserve(batch: &mut Batch<'_>, asked: &Asked) -> Result<std::result::Result<Vec<Row>, Reserved>> {
    let run = batch.chain(&asked.run)?.run;
    let limits: Vec<(String, u64, u64)> = batch
        .connection()
        .prepare_cached(
            "SELECT unit, most, settled + COALESCE((SELECT SUM(amount) FROM reservations \
             WHERE quota = quotas.id AND reservations.unit = quotas.unit), 0) FROM quotas WHERE id = ?1",
        )
        .and_then(|mut statement| {
            statement
                .query_map([&asked.quota], |row| Ok((row.get(0)?, read(row.get(1)?), read(row.get(2)?))))?
                .collect()
        })
        .map_err(batch.failed("read a quota"))?;
    if limits.is_empty() {
        return Err(Error::NoQuota(asked.quota.clone()));
    }
    let mut needed = Vec::new();
    for (unit, most, used) in limits {
        let unit = known(&unit)?;
        let amount = asked.amounts.get(&unit).copied().unwrap_or(0);
        let limit = asked.limits.get(&unit).map_or(most, |narrower| most.min(*narrower));
        if amount == 0 {
            continue;
        }
        // The first change of the transaction comes after the last of these checks.
        if used.checked_add(amount).is_none_or(|sum| sum > limit) {
            return Ok(Err(Reserved::Exceeds { unit, amount, used, limit }));
        }
        needed.push((unit, amount));
    }
    let mut rows = Vec::new();
    for (unit, amount) in needed {
        let n = batch
            .connection()
            .prepare_cached(
                "INSERT INTO reservations (run, quota, unit, amount, door, digest) VALUES (?1, ?2, ?3, ?4, ?5, ?6)",
            )
            .and_then(|mut statement| {
                statement.insert(params![
                    run,
                    asked.quota,
                    unit.name(),
                    stored(amount),
                    door_word(asked.door),
                    asked.digest.0
                ])
            })
            .map_err(batch.failed("reserve from a quota"))?;
        rows.push(Row { n, unit, amount });
    }
    Ok(Ok(rows))
}

/// Takes a reservation out and adds what of it counts. One that is gone already was settled.
fn settle(batch: &mut Batch<'_>, n: i64, charged: u64) -> Result<()> {
    let failed = batch.failed("settle a reservation");
    let found: Option<(String, String)> = batch
        .connection()
        .prepare_cached("DELETE FROM reservations WHERE n = ?1 RETURNING quota, unit")
        .and_then(|mut statement| statement.query_row([n], |row| Ok((row.get(0)?, row.get(1)?))).optional())
        .map_err(&failed)?;
    let Some((quota, unit)) = found else { return Ok(()) };
    batch
        .connection()
        .prepare_cached(
            "UPDATE quotas SET settled = MIN(settled + ?3, 9223372036854775807) WHERE id = ?1 AND unit = ?2",
        )
        .and_then(|mut statement| statement.execute(params![quota, unit, stored(charged)]))
        .map_err(failed)?;
    Ok(())
}

/// SQLite has no larger integers, and nothing of this size is ever used up.
fn stored(amount: u64) -> i64 {
    i64::try_from(amount).unwrap_or(i64::MAX)
}

fn read(amount: i64) -> u64 {
    u64::try_from(amount).unwrap_or(0)
}

fn known(unit: &str) -> Result<Unit> {
    Unit::named(unit).ok_or_else(|| Error::Unreadable { what: "a quota".to_owned(), found: unit.to_owned() })
}
