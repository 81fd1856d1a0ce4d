//! Intents: what must not happen twice is on the disk before it happens.

use super::{
    draft::Draft,
    once::{self, OnceResult},
    record::Receipt,
    row,
    time::Timestamp,
    writer::{Batch, Durability},
    Error, Ledger, Result,
};
use crate::{
    chain::{Answer, Decision},
    effect::{Effect, RunId},
};
use rusqlite::{params, OptionalExtension as _};

/// An effect that is about to happen, on disk. Open until it is completed or abandoned; what is dropped open stays
/// open in the ledger, as it does when the process dies, and is *in doubt*.
///
/// It can be closed once
///
/// ```
/// # fn once(intent: tollgate::ledger::Intent, draft: tollgate::ledger::Draft) {
/// let _ = intent.complete(draft.clone());
/// # }
/// ```
///
/// and not twice:
///
/// ```compile_fail,E0382
/// # fn twice(intent: tollgate::ledger::Intent, draft: tollgate::ledger::Draft) {
/// let _ = intent.complete(draft.clone());
/// let _ = intent.complete(draft);
/// # }
/// ```
#[must_use = "an intent stays in doubt until it is completed or abandoned"]
#[derive(Debug)]
pub struct Intent {
    ledger: Ledger,
    n: i64,
    draft: Draft,
    open: bool,
}

/// An intent without a completion, as [`Ledger::in_doubt`] lists it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpenIntent {
    /// Its number on this host.
    pub n: i64,
    /// The effect as it was about to happen. Its decision is [`Decision::InDoubt`].
    pub draft: Draft,
    /// The place in the run's chain of the receipt that says it is in doubt, once there is one.
    pub receipt: Option<u64>,
}

/// Why an in-doubt effect is so.
const LOST: &str = "its intent is on disk and its completion is not: it may or may not have happened";

impl Ledger {
    /// Writes down that this effect is about to happen, and returns once that outlives a loss of power.
    ///
    /// # Errors
    ///
    /// When it could not be written; then the effect must not go ahead.
    pub fn intend(&self, run: &RunId, effect: &Effect, started: Timestamp) -> Result<Intent> {
        let draft = intended(run, effect, started);
        let n = self.call(Durability::Power, open(&draft))?;
        Ok(Intent { ledger: self.clone(), n, draft, open: true })
    }

    /// As [`Ledger::intend`], without holding the calling thread.
    ///
    /// # Errors
    ///
    /// As [`Ledger::intend`].
    pub async fn intend_async(&self, run: &RunId, effect: &Effect, started: Timestamp) -> Result<Intent> {
        let draft = intended(run, effect, started);
        let (reply, answer) = tokio::sync::oneshot::channel();
        let ledger = self.clone();
        self.writer()?.submit(Durability::Power, Box::new(open(&draft)), move |result| {
            // Nobody listening: the value comes back and is dropped, which is what it is for.
            let _ = reply.send(result.map(|n| Unclaimed { ledger, n, claimed: false }));
        });
        let unclaimed = answer.await.unwrap_or_else(|_| Err(Error::WriterGone("it dropped the work".to_owned())))?;
        Ok(Intent { ledger: self.clone(), n: unclaimed.claim(), draft, open: true })
    }

    /// Every intent without a completion, the oldest first, of one run or of all. Those of a living run may be
    /// happening now; the others are in doubt.
    ///
    /// # Errors
    ///
    /// The database's.
    pub fn in_doubt(&self, run: Option<&RunId>) -> Result<Vec<OpenIntent>> {
        self.read("list the open intents", |connection| {
            let mut statement = connection.prepare_cached(
                "SELECT intents.n, draft, receipt FROM intents JOIN runs ON runs.n = intents.run \
                 WHERE ?1 IS NULL OR runs.id = ?1 ORDER BY intents.n",
            )?;
            let intents = statement
                .query_map([run.map(|run| &run.0)], |row| {
                    Ok(read(row.get(0)?, row.get_ref(1)?.as_str()?, row.get(2)?))
                })?
                .collect();
            intents
        })
    }

    /// Gives each open intent of a run that has none its receipt, with the decision `in-doubt`. The intents stay
    /// listed until [`Ledger::settle`]. For a run whose supervisor died; [`Ledger::seal_run`] does it too.
    ///
    /// # Errors
    ///
    /// [`Error::NotFound`] when there is no such run.
    pub fn record_in_doubt(&self, run: &RunId) -> Result<Vec<Receipt>> {
        let run = run.clone();
        self.call(Durability::Process, move |batch| record_in_doubt(batch, &run))
    }

    /// Takes an intent off the list of those in doubt, after a person looked. It must have its receipt.
    ///
    /// # Errors
    ///
    /// [`Error::NoIntent`] when it is not open, or has no receipt yet.
    pub fn settle(&self, n: i64) -> Result<()> {
        self.call(Durability::Power, move |batch| take_off(batch, n))
    }
}

pub(super) fn take_off(batch: &mut Batch<'_>, n: i64) -> Result<()> {
    let deleted = batch
        .connection()
        .execute("DELETE FROM intents WHERE n = ?1 AND receipt IS NOT NULL", [n])
        .map_err(batch.failed("settle an intent"))?;
    match deleted {
        0 => Err(Error::NoIntent(n)),
        _ => Ok(()),
    }
}

impl Intent {
    /// The intent's number on this host.
    pub fn n(&self) -> i64 {
        self.n
    }

    /// Closes it with the receipt of what came of it.
    ///
    /// # Errors
    ///
    /// When that could not be written; the intent then stays open in the ledger.
    pub fn complete(mut self, draft: Draft) -> Result<Receipt> {
        let receipt = self.ledger.call(Durability::Process, close(self.n, draft, None))?;
        self.open = false;
        Ok(receipt)
    }

    /// As [`Intent::complete`], without holding the calling thread. With a result, that is kept too, for a run that
    /// takes this one up after an interruption.
    ///
    /// # Errors
    ///
    /// As [`Intent::complete`].
    pub async fn complete_async(mut self, draft: Draft, result: Option<OnceResult>) -> Result<Receipt> {
        let work = Box::new(close(self.n, draft, result));
        let receipt = self.ledger.writer()?.call_async(Durability::Process, work).await?;
        self.open = false;
        Ok(receipt)
    }

    /// Closes it with a refusal: the effect did not happen, for this reason.
    ///
    /// # Errors
    ///
    /// As [`Intent::complete`].
    pub fn abandon(self, reason: impl Into<String>) -> Result<Receipt> {
        let draft = Draft {
            decision: Decision::Refused,
            decided_by: "receipts".to_owned(),
            reason: reason.into(),
            hint: "nothing happened; ask again".to_owned(),
            ..self.draft.clone()
        };
        self.complete(draft)
    }
}

/// An intent on its way from the writer to the one who asked. If they are gone, their effect cannot have happened, and
/// the intent is taken back.
struct Unclaimed {
    ledger: Ledger,
    n: i64,
    claimed: bool,
}

impl Unclaimed {
    fn claim(mut self) -> i64 {
        self.claimed = true;
        self.n
    }
}

impl Drop for Unclaimed {
    fn drop(&mut self) {
        if self.claimed {
            return;
        }
        let n = self.n;
        let take_back = move |batch: &mut Batch<'_>| {
            let deleted = batch.connection().execute("DELETE FROM intents WHERE n = ?1 AND receipt IS NULL", [n]);
            deleted.map(|_| ()).map_err(batch.failed("take an intent back"))
        };
        if let Ok(writer) = self.ledger.writer() {
            writer.submit(Durability::Process, Box::new(take_back), move |result| {
                if let Err(error) = result {
                    tracing::error!(%error, n, "an intent that nobody waited for stays listed as in doubt");
                }
            });
        }
    }
}

impl Drop for Intent {
    fn drop(&mut self) {
        if self.open {
            tracing::warn!(run = %self.draft.run, kind = %self.draft.kind, object = %self.draft.resource,
                "an effect is in doubt: nobody said what came of it");
        }
    }
}

fn intended(run: &RunId, effect: &Effect, started: Timestamp) -> Draft {
    let answer = Answer::done(serde_json::Value::Null, 0);
    Draft::of(run, effect, &answer, started).in_doubt(LOST)
}

fn open(draft: &Draft) -> impl FnMut(&mut Batch<'_>) -> Result<i64> + Send + 'static {
    let run = draft.run.clone();
    let json = serde_json::to_string(draft).expect("a draft holds strings, integers and lists of them");
    move |batch| {
        let run = batch.chain(&run)?.run;
        batch
            .connection()
            .prepare_cached("INSERT INTO intents (run, draft) VALUES (?1, ?2)")
            .and_then(|mut statement| statement.insert(params![run, json]))
            .map_err(batch.failed("write an intent"))
    }
}

/// Appends the receipt and deletes the intent, at once. An intent that meanwhile has a receipt as in doubt gets this
/// one as well, which says more.
fn close(
    n: i64,
    draft: Draft,
    result: Option<OnceResult>,
) -> impl FnMut(&mut Batch<'_>) -> Result<Receipt> + Send + 'static {
    let drafts = [draft];
    let result = result.as_ref().map(once::spelled);
    move |batch| {
        let open = batch
            .connection()
            .prepare_cached("SELECT 1 FROM intents WHERE n = ?1")
            .and_then(|mut statement| statement.query_row([n], |_| Ok(())).optional())
            .map_err(batch.failed("find an intent"))?;
        open.ok_or(Error::NoIntent(n))?;
        let receipts = batch.append(&drafts)?;
        batch
            .connection()
            .prepare_cached("DELETE FROM intents WHERE n = ?1")
            .and_then(|mut statement| statement.execute([n]))
            .map_err(batch.failed("close an intent"))?;
        if let Some(result) = &result {
            once::keep(batch, n, &drafts[0].run, drafts[0].request_digest, result)?;
        }
        super::only(receipts)
    }
}

pub(super) fn record_in_doubt(batch: &mut Batch<'_>, run: &RunId) -> Result<Vec<Receipt>> {
    let number = batch.chain(run)?.run;
    let open: Vec<OpenIntent> = batch
        .connection()
        .prepare_cached("SELECT n, draft, receipt FROM intents WHERE run = ?1 AND receipt IS NULL ORDER BY n")
        .and_then(|mut statement| {
            statement
                .query_map([number], |row| Ok(read(row.get(0)?, row.get_ref(1)?.as_str()?, row.get(2)?)))?
                .collect::<rusqlite::Result<Result<Vec<_>>>>()
        })
        .map_err(batch.failed("list the open intents"))??;
    let drafts: Vec<Draft> = open.iter().map(|intent| intent.draft.clone()).collect();
    let receipts = batch.append(&drafts)?;
    for (intent, receipt) in open.iter().zip(&receipts) {
        batch
            .connection()
            .execute("UPDATE intents SET receipt = ?2 WHERE n = ?1", params![intent.n, row::id(number, receipt.seq)])
            .map_err(batch.failed("mark an intent as in doubt"))?;
    }
    Ok(receipts)
}

fn read(n: i64, draft: &str, receipt: Option<i64>) -> Result<OpenIntent> {
    match serde_json::from_str(draft) {
        Ok(draft) => Ok(OpenIntent { n, draft, receipt: receipt.map(row::seq) }),
        Err(error) => Err(Error::Unreadable { what: format!("intent {n}"), found: error.to_string() }),
    }
}
