//! Checking the chains.

use super::{hash, query::ReceiptQuery, row, runs::Head, time::Timestamp, Error, Ledger, Result};
use crate::{
    chain::Decision,
    effect::{Digest, Idempotency, RunId},
};
use rusqlite::OptionalExtension as _;

/// A run's chain that holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verification {
    /// The run.
    pub run: RunId,
    /// How many receipts were checked: all of them.
    pub count: u64,
    /// The last one's hash; all zero for none.
    pub head: Digest,
    /// The newest entry of the host's chain for this run, which agrees; none while the run goes on.
    pub sealed: Option<Head>,
}

/// What does not hold, and where first.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Broken {
    /// A run's chain breaks.
    #[error("the chain of run {run} is broken at receipt {seq}: {fault}")]
    Receipt {
        /// The run.
        run: RunId,
        /// The first place that does not hold.
        seq: u64,
        /// What is wrong with it.
        fault: Fault,
    },
    /// The host's chain breaks.
    #[error("the host's chain is broken at head {n}: {fault}")]
    Head {
        /// The first place that does not hold.
        n: u64,
        /// What is wrong with it.
        fault: Fault,
    },
    /// The counts that the run shows are not those of its receipts.
    #[error("run {run} says that {says} of its receipts were {what}, and {found} are")]
    Counts {
        /// The run.
        run: RunId,
        /// Which count.
        what: &'static str,
        /// What the run's row says.
        says: u64,
        /// What its receipts say.
        found: u64,
    },
    /// The ledger could not be read.
    #[error(transparent)]
    Ledger(#[from] Error),
}

/// What is wrong with one place of a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// It is not there, and something that knows of it is.
    #[error("it is missing")]
    Missing,
    /// Its hash is not that of what it holds.
    #[error("it was changed after it was written")]
    Changed,
    /// It does not hold the hash of the one before it.
    #[error("it does not follow from the one before it")]
    Unlinked,
    /// The run's row or the host's chain knows another one at this place.
    #[error("it is not the one that was sealed")]
    Replaced,
    /// It lies after the end of the chain.
    #[error("it was added behind the ledger's back")]
    Added,
    /// It holds words that this version does not know.
    #[error("it cannot be read")]
    Unreadable,
}

impl Ledger {
    /// Recomputes the chain of a run, and holds it against what the run's row and the host's chain know of it, so that
    /// a missing tail shows too.
    ///
    /// # Errors
    ///
    /// [`Broken`], with the first place that does not hold.
    pub fn verify_run(&self, run: &RunId) -> std::result::Result<Verification, Broken> {
        // In this order: what is appended and sealed meanwhile makes the chain longer than this, which is no fault.
        let sealed = self.sealed(run)?;
        let stated = self.stated(run)?;
        let broken = |seq, fault| Broken::Receipt { run: run.clone(), seq, fault };
        let (mut count, mut head, mut refused, mut once) = (0, Digest([0; 32]), 0, 0);
        let all = ReceiptQuery { run: Some(run.clone()), limit: Some(stated.count), ..ReceiptQuery::default() };
        for receipt in self.receipts(&all)? {
            let seq = count + 1;
            let receipt = match receipt {
                Ok(receipt) => receipt,
                Err(Error::Unreadable { .. }) => return Err(broken(seq, Fault::Unreadable)),
                Err(error) => return Err(error.into()),
            };
            if receipt.seq != seq {
                return Err(broken(seq, Fault::Missing));
            }
            if receipt.prev != head {
                return Err(broken(seq, Fault::Unlinked));
            }
            if hash::receipt(&receipt) != receipt.hash {
                return Err(broken(seq, Fault::Changed));
            }
            (count, head) = (seq, receipt.hash);
            refused += u64::from(receipt.decision == Decision::Refused);
            once += u64::from(receipt.idempotency == Idempotency::Once);
            if sealed.as_ref().is_some_and(|sealed| sealed.count == count && sealed.head != head) {
                return Err(broken(count, Fault::Replaced));
            }
        }
        let known = sealed.as_ref().map_or(0, |sealed| sealed.count).max(stated.count);
        if count < known {
            return Err(broken(count + 1, Fault::Missing));
        }
        if head != stated.head {
            return Err(broken(count.max(1), Fault::Replaced));
        }
        for (what, says, found) in [("refused", stated.refused, refused), ("once only", stated.once, once)] {
            if says != found {
                return Err(Broken::Counts { run: run.clone(), what, says, found });
            }
        }
        if let Some(seq) = self.added(run, stated.count)? {
            return Err(broken(seq, Fault::Added));
        }
        Ok(Verification { run: run.clone(), count, head, sealed })
    }

    /// Recomputes the host's chain, checks that each run in it still has the receipt that was its head, and gives the
    /// number of heads.
    ///
    /// # Errors
    ///
    /// [`Broken`], with the first place that does not hold.
    pub fn verify_heads(&self) -> std::result::Result<u64, Broken> {
        let (mut n, mut prev) = (0, Digest([0; 32]));
        while let Some((head, stored)) = self.head_after(n)? {
            let broken = |fault| Broken::Head { n: n + 1, fault };
            if head.n != n + 1 {
                return Err(broken(Fault::Missing));
            }
            if head.prev != prev {
                return Err(broken(Fault::Unlinked));
            }
            let hash = hash::head(head.n, &head.run, head.count, &head.head, &head.sealed_at.to_string(), &head.prev);
            if hash != head.hash {
                return Err(broken(Fault::Changed));
            }
            let there = if head.count == 0 { Some(Digest([0; 32])) } else { stored };
            match there {
                Some(there) if there == head.head => {}
                Some(_) => {
                    return Err(Broken::Receipt { run: head.run, seq: head.count, fault: Fault::Replaced });
                }
                None => return Err(Broken::Receipt { run: head.run, seq: head.count, fault: Fault::Missing }),
            }
            (n, prev) = (head.n, head.hash);
        }
        Ok(n)
    }

    /// What the run's row says of its chain.
    fn stated(&self, run: &RunId) -> Result<Stated> {
        self.read("read a run's chain", |connection| {
            let mut statement = connection.prepare_cached(
                "SELECT count, refused, once, head FROM chains JOIN runs ON runs.n = chains.run WHERE runs.id = ?1",
            )?;
            let stated = statement
                .query_row([&run.0], |row| {
                    Ok(Stated {
                        count: row.get::<_, i64>(0)? as u64,
                        refused: row.get::<_, i64>(1)? as u64,
                        once: row.get::<_, i64>(2)? as u64,
                        head: Digest(row.get(3)?),
                    })
                })
                .optional()?;
            Ok(stated.ok_or_else(|| Error::NotFound(run.0.clone())))
        })
    }

    /// The newest entry of the host's chain for a run.
    fn sealed(&self, run: &RunId) -> Result<Option<Head>> {
        self.read("read the host's chain", |connection| {
            let mut statement = connection.prepare_cached(
                "SELECT n, run, count, head, sealed_us, prev, hash FROM heads WHERE run = ?1 ORDER BY n DESC LIMIT 1",
            )?;
            let head = statement.query_row([&run.0], read_head).optional();
            head.map(Ok)
        })
    }

    /// The entry of the host's chain after the n-th, and the hash of the receipt that it names.
    fn head_after(&self, n: u64) -> Result<Option<(Head, Option<Digest>)>> {
        self.read("read the host's chain", |connection| {
            let mut statement = connection.prepare_cached(
                "SELECT heads.n, heads.run, count, heads.head, sealed_us, heads.prev, heads.hash, receipts.hash \
                 FROM heads LEFT JOIN runs ON runs.id = heads.run \
                 LEFT JOIN receipts ON receipts.id = runs.n << 32 | heads.count \
                 WHERE heads.n > ?1 ORDER BY heads.n LIMIT 1",
            )?;
            let head = statement
                .query_row([n as i64], |row| Ok((read_head(row)?, row.get::<_, Option<[u8; 32]>>(7)?.map(Digest))))
                .optional();
            head.map(Ok)
        })
    }

    /// The first receipt past the end that the run's row still says it has, if any.
    fn added(&self, run: &RunId, past: u64) -> Result<Option<u64>> {
        let n = self.run_number(run)?;
        self.read("read a run's chain", |connection| {
            let mut statement = connection.prepare_cached(
                "SELECT min(receipts.id) FROM receipts WHERE receipts.id > ?1 AND receipts.id <= ?2 \
                 AND (SELECT count FROM chains WHERE run = ?3) = ?4",
            )?;
            let found: Option<i64> = statement
                .query_row(rusqlite::params![row::id(n, past), row::id(n, row::CHAIN_MAX), n, past as i64], |row| {
                    row.get(0)
                })?;
            Ok(Ok(found.map(row::seq)))
        })
    }
}

struct Stated {
    count: u64,
    refused: u64,
    once: u64,
    head: Digest,
}

fn read_head(row: &rusqlite::Row<'_>) -> rusqlite::Result<Head> {
    Ok(Head {
        n: row.get::<_, i64>(0)? as u64,
        run: RunId(row.get(1)?),
        count: row.get::<_, i64>(2)? as u64,
        head: Digest(row.get(3)?),
        sealed_at: Timestamp(row.get(4)?),
        prev: Digest(row.get(5)?),
        hash: Digest(row.get(6)?),
    })
}
