//! Asking for receipts.

use super::{record::Receipt, row, time::Timestamp, Error, Ledger, Result};
use crate::{
    chain::Decision,
    effect::{Class, Digest, Kind, RoomId, RunId},
};
use rusqlite::{params_from_iter, types::Value, OptionalExtension as _};
use std::collections::VecDeque;

/// Which receipts. A field that is none or empty asks nothing; all that ask must hold.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReceiptQuery {
    /// Of this run.
    pub run: Option<RunId>,
    /// Of this room.
    pub room: Option<RoomId>,
    /// Of this kind.
    pub kind: Option<Kind>,
    /// Of this family: `fs` for every kind `fs/…`.
    pub family: Option<String>,
    /// Touching this class.
    pub class: Option<Class>,
    /// Whose object lies there: a path itself or one below it, component by component; any other object begins so.
    pub resource_prefix: Option<String>,
    /// With this decision.
    pub decision: Option<Decision>,
    /// Decided by this handler.
    pub decided_by: Option<String>,
    /// Asked for by this user.
    pub subject_uid: Option<u32>,
    /// Asked for by this run.
    pub subject_run: Option<RunId>,
    /// Started then or later.
    pub since: Option<Timestamp>,
    /// Started before then.
    pub until: Option<Timestamp>,
    /// Of an equal request.
    pub request_digest: Option<Digest>,
    /// With an equal result.
    pub result_digest: Option<Digest>,
    /// Of an equal request or with an equal result.
    pub digest: Option<Digest>,
    /// Only refusals, or all.
    pub denied_only: Denied,
    /// After this place in the run's chain. Means something only with `run`.
    pub after_seq: Option<u64>,
    /// At most this many, the first.
    pub limit: Option<u64>,
    /// At most this many, the last; in the order of all the same.
    pub newest: Option<u64>,
}

/// Whether only refusals are asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Denied {
    /// Every decision.
    #[default]
    All,
    /// Refusals only.
    Only,
}

/// How many receipts are held in memory at once.
const PAGE: u64 = 256;

/// Receipts in the order of their runs and their chains, read as they are asked for.
///
/// Each page is a transaction of its own, so a slow reader keeps nobody waiting; what is appended meanwhile to the
/// end may or may not be seen.
pub struct Receipts {
    ledger: Ledger,
    conditions: String,
    values: Vec<Value>,
    after: i64,
    left: u64,
    page: VecDeque<(i64, Result<Receipt>)>,
    exhausted: bool,
}

impl Ledger {
    /// The receipts that a query asks for.
    ///
    /// # Errors
    ///
    /// [`Error::NotFound`] when the query names a run that is not there. Each item can be an error of its own; after
    /// one of the database's the iterator ends.
    pub fn receipts(&self, query: &ReceiptQuery) -> Result<Receipts> {
        let text = |text: &str| Value::Text(text.to_owned());
        let mut after = -1;
        let mut asked: Vec<(&str, Value)> = Vec::new();
        if let Some(run) = &query.run {
            let n = self.run_number(run)?;
            after = row::id(n, query.after_seq.unwrap_or(0).min(row::CHAIN_MAX));
            asked.push(("receipts.id <= ?", Value::Integer(row::id(n, row::CHAIN_MAX))));
        }
        if let Some(room) = &query.room {
            asked.push(("room = ?", text(&room.0)));
        }
        if let Some(kind) = query.kind {
            asked.push(("kind = ?", text(kind.name())));
        }
        if let Some(class) = query.class {
            asked.push(("classes & ? <> 0", Value::Integer(row::mask(&[class]))));
        }
        if let Some(family) = &query.family {
            // `0` is the character after the slash.
            asked.push(("kind >= ? || '/'", text(family)));
            asked.push(("kind < ? || '0'", text(family)));
        }
        if let Some(prefix) = &query.resource_prefix {
            let path = match prefix.trim_end_matches('/') {
                "" if prefix.starts_with('/') => "/",
                "." => "",
                path => path.strip_prefix("./").unwrap_or(path),
            };
            // The workspace's root and the host's hold all paths of their own.
            match path {
                "" => asked.push(("resource_type = ?", text("workspace"))),
                "/" => asked.push(("resource_type = ?", text("host"))),
                // Compared as bytes: a text would end at its first zero.
                path => asked.push((
                    "CASE WHEN resource_type NOT IN ('workspace', 'host') \
                     THEN substr(CAST(resource AS BLOB), 1, length(?1)) = ? \
                     ELSE CAST(resource AS BLOB) = ?1 \
                     OR substr(CAST(resource AS BLOB), 1, length(?1) + 1) = CAST(?1 || x'2f' AS BLOB) END",
                    Value::Blob(path.as_bytes().to_owned()),
                )),
            }
        }
        if let Some(handler) = &query.decided_by {
            asked.push(("decided_by = ?", text(handler)));
        }
        if let Some(uid) = query.subject_uid {
            asked.push(("uid = ?", Value::Integer(uid.into())));
        }
        if let Some(run) = &query.subject_run {
            asked.push(("subject_run = ?", text(&run.0)));
        }
        if let Some(digest) = query.digest {
            asked.push(("(request_digest = ?1 OR result_digest = ?)", Value::Blob(digest.0.to_vec())));
        }
        if let Some(since) = query.since {
            asked.push(("receipts.started_us >= ?", Value::Integer(since.0)));
            if query.run.is_none() {
                // Runs that ended before it are skipped whole.
                asked.push((
                    "receipts.id >= (SELECT coalesce(min(run) << 32, 9223372036854775807) FROM chains WHERE last_us >= ?)",
                    Value::Integer(since.0),
                ));
            }
        }
        if let Some(until) = query.until {
            asked.push(("receipts.started_us < ?", Value::Integer(until.0)));
        }
        if let Some(digest) = query.request_digest {
            asked.push(("request_digest = ?", Value::Blob(digest.0.to_vec())));
        }
        if let Some(digest) = query.result_digest {
            asked.push(("result_digest = ?", Value::Blob(digest.0.to_vec())));
        }
        let mut conditions = String::new();
        let mut values = Vec::new();
        for (index, (condition, value)) in asked.into_iter().enumerate() {
            let place = format!("?{}", index + 1);
            conditions.push_str(" AND ");
            conditions.push_str(&condition.replace("?1", "?").replace('?', &place));
            values.push(value);
        }
        // Written out and not bound, so that the index of refusals can serve it.
        let refused = (query.denied_only == Denied::Only).then_some(Decision::Refused);
        for decision in query.decision.into_iter().chain(refused) {
            conditions.push_str(&format!(" AND decision = '{}'", row::decision(decision)));
        }
        let mut left = query.limit.unwrap_or(u64::MAX);
        if let Some(newest) = query.newest {
            left = left.min(newest);
            if let Some(first) = self.first_of_newest(&conditions, &values, after, newest)? {
                after = first - 1;
            }
        }
        Ok(Receipts { ledger: self.clone(), conditions, values, after, left, page: VecDeque::new(), exhausted: false })
    }

    /// The row from which on as many receipts as are wanted meet the conditions; none where fewer do.
    fn first_of_newest(&self, conditions: &str, values: &[Value], after: i64, newest: u64) -> Result<Option<i64>> {
        let Some(skipped) = newest.checked_sub(1) else { return Ok(None) };
        let sql = newest_sql(conditions, values.len());
        let bound = [Value::Integer(after), Value::Integer(i64::try_from(skipped).unwrap_or(i64::MAX))];
        self.read("read receipts", |connection| {
            let mut statement = connection.prepare_cached(&sql)?;
            let first = statement.query_row(params_from_iter(values.iter().chain(&bound)), |row| row.get(0)).optional();
            first.map(Ok)
        })
    }

    /// A run's number, from its whole id.
    pub(super) fn run_number(&self, run: &RunId) -> Result<i64> {
        self.read("find a run", |connection| {
            let mut statement = connection.prepare_cached("SELECT n FROM runs WHERE id = ?1")?;
            let n = statement.query_row([&run.0], |row| row.get(0)).optional()?;
            Ok(n.ok_or_else(|| Error::NotFound(run.0.clone())))
        })
    }
}

fn page_sql(conditions: &str, values: usize) -> String {
    format!(
        "SELECT {} FROM receipts JOIN runs ON runs.n = receipts.id >> 32 WHERE receipts.id > ?{after}{conditions} \
         ORDER BY receipts.id LIMIT ?{limit}",
        row::COLUMNS,
        after = values + 1,
        limit = values + 2,
    )
}

fn newest_sql(conditions: &str, values: usize) -> String {
    format!(
        "SELECT receipts.id FROM receipts WHERE receipts.id > ?{after}{conditions} \
         ORDER BY receipts.id DESC LIMIT 1 OFFSET ?{skipped}",
        after = values + 1,
        skipped = values + 2,
    )
}

impl Receipts {
    /// How SQLite goes about it, a line a step.
    #[cfg(test)]
    pub(super) fn plans(&self) -> Vec<String> {
        [page_sql(&self.conditions, self.values.len()), newest_sql(&self.conditions, self.values.len())]
            .iter()
            .flat_map(|sql| {
                let bound = [Value::Integer(0), Value::Integer(1)];
                let plan = self.ledger.read("explain", |connection| {
                    let mut statement = connection.prepare(&format!("EXPLAIN QUERY PLAN {sql}"))?;
                    let steps = statement
                        .query_map(params_from_iter(self.values.iter().chain(&bound)), |row| row.get::<_, String>(3))?
                        .collect::<rusqlite::Result<Vec<_>>>()?;
                    Ok(Ok(steps))
                });
                plan.expect("explains")
            })
            .collect()
    }

    fn fill(&mut self) -> Result<()> {
        let wanted = PAGE.min(self.left);
        let sql = page_sql(&self.conditions, self.values.len());
        let bound = [Value::Integer(self.after), Value::Integer(wanted as i64)];
        let page = self.ledger.read("read receipts", |connection| {
            let mut statement = connection.prepare_cached(&sql)?;
            let page = statement
                .query_map(params_from_iter(self.values.iter().chain(&bound)), |row| {
                    Ok((row.get::<_, i64>(0)?, row::read(row)?))
                })?
                .collect::<rusqlite::Result<VecDeque<_>>>()?;
            Ok(Ok(page))
        })?;
        self.exhausted = (page.len() as u64) < wanted;
        self.left -= page.len() as u64;
        if let Some((last, _)) = page.back() {
            self.after = *last;
        }
        self.page = page;
        Ok(())
    }
}

impl Iterator for Receipts {
    type Item = Result<Receipt>;

    fn next(&mut self) -> Option<Result<Receipt>> {
        if self.page.is_empty() && !self.exhausted && self.left > 0 {
            if let Err(error) = self.fill() {
                self.exhausted = true;
                return Some(Err(error));
            }
        }
        self.page.pop_front().map(|(_, receipt)| receipt)
    }
}
