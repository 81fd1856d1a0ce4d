//! Results of effects that must not be repeated: what `tollgate resume` answers them with.

use super::{
    writer::{Batch, Durability},
    Error, Ledger, Result,
};
use crate::{
    chain::Answer,
    effect::{Digest, RunId},
};
use rusqlite::params;
use serde::{Deserialize, Serialize};

/// What came of an effect, as its asker was told.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OnceResult {
    /// The result as data.
    pub value: serde_json::Value,
    /// The result's bytes, hexadecimal, where it is bytes.
    pub body: Option<String>,
    /// Digest of the result.
    pub digest: Option<Digest>,
    /// How many bytes were read or written.
    pub bytes: u64,
}

/// What stands in a result's value, under `body`, where its bytes are not kept.
pub const NOT_KEPT: &str = "not recorded";
/// The longest body that is kept with a result: an answer to a request that changes something is rarely longer than a
/// page, and each waits in the database for a resume that mostly never comes.
const MOST_KEPT: usize = 4 << 20;

impl OnceResult {
    /// Of an answer.
    pub fn of(answer: &Answer) -> OnceResult {
        let (mut value, kept) = (answer.value.clone(), answer.body.as_ref().filter(|body| body.len() <= MOST_KEPT));
        if let (true, Some(value)) = (answer.body.is_some() && kept.is_none(), value.as_object_mut()) {
            value.insert("body".to_owned(), NOT_KEPT.into());
        }
        OnceResult { value, body: kept.map(hex::encode), digest: answer.digest, bytes: answer.bytes }
    }
}

/// Keeps a result under its intent's number, in the transaction that completes the intent.
pub(super) fn keep(batch: &mut Batch<'_>, n: i64, run: &RunId, request: Digest, result: &str) -> Result<()> {
    let run = batch.chain(run)?.run;
    batch
        .connection()
        .prepare_cached("INSERT OR REPLACE INTO once_results (n, run, request_digest, result) VALUES (?1, ?2, ?3, ?4)")
        .and_then(|mut statement| statement.execute(params![n, run, request.0, result]))
        .map(|_| ())
        .map_err(batch.failed("keep a result"))
}

/// A result as it is stored.
pub(super) fn spelled(result: &OnceResult) -> String {
    serde_json::to_string(result).expect("a result holds JSON, strings and integers")
}

impl Ledger {
    /// The results of a run's completed effects that must not be repeated, in the order in which they were begun, each
    /// with the digest of its request.
    ///
    /// # Errors
    ///
    /// The database's, and [`Error::NotFound`] when there is no such run.
    pub fn once_results(&self, run: &RunId) -> Result<Vec<(Digest, OnceResult)>> {
        let number = self.run_number(run)?;
        let rows = self.read("read the results of a run", |connection| {
            let mut statement = connection
                .prepare_cached("SELECT request_digest, result FROM once_results WHERE run = ?1 ORDER BY n")?;
            let rows = statement
                .query_map([number], |row| Ok((Digest(row.get(0)?), row.get::<_, String>(1)?)))?
                .collect::<rusqlite::Result<Vec<_>>>()?;
            Ok(Ok(rows))
        })?;
        let read = |(digest, text): (Digest, String)| match serde_json::from_str(&text) {
            Ok(result) => Ok((digest, result)),
            Err(error) => Err(Error::Unreadable { what: format!("a result of run {run}"), found: error.to_string() }),
        };
        rows.into_iter().map(read).collect()
    }

    /// As [`Ledger::settle`], and from now on the effect counts as done with this result, also when the run is
    /// resumed.
    ///
    /// # Errors
    ///
    /// As [`Ledger::settle`].
    pub fn settle_as_done(&self, n: i64, run: &RunId, request: Digest, result: &OnceResult) -> Result<()> {
        let (run, text) = (run.clone(), spelled(result));
        self.call(Durability::Power, move |batch| {
            super::intent::take_off(batch, n)?;
            keep(batch, n, &run, request, &text)
        })
    }
}
