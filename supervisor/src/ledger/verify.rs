//! Checking the chains, against what a verifier knows from elsewhere: the host's public key, and a head that the ledger
//! once had.

use super::{
    hash,
    key::{PublicKey, Purpose},
    mark::{self, Checkpoint},
    query::ReceiptQuery,
    record::RunState,
    row,
    runs::{self, Head},
    time::Timestamp,
    writer, Cut, Error, Ledger, Result,
};
use crate::{
    chain::Decision,
    effect::{Digest, Idempotency, RunId},
};
use rusqlite::OptionalExtension as _;
use std::ops::ControlFlow;

/// What a verifier knows that is not in the ledger.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Trust {
    /// Public keys of the host. Empty: any key that signed is believed, and said.
    pub keys: Vec<PublicKey>,
    /// Whether a ledger without any signature is in order.
    pub signatures: Signatures,
    /// Heads that the ledger must hold.
    pub expect: Vec<Expected>,
}

/// Whether the newest head must be signed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Signatures {
    /// Heads that an older version wrote need none.
    #[default]
    WherePresent,
    /// The newest head must have one.
    Required,
}

/// A head that the ledger must hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Expected {
    /// At this place.
    At(Checkpoint),
    /// Anywhere.
    Hash(Digest),
}

impl Trust {
    /// What one state directory knows of itself: its own key, if it has one.
    ///
    /// # Errors
    ///
    /// When the key cannot be read.
    pub fn of_host(state: &std::path::Path) -> Result<Trust> {
        Ok(Trust { keys: PublicKey::of_host(state)?.into_iter().collect(), ..Trust::default() })
    }

    /// Whether this key may sign.
    fn believes(&self, key: &PublicKey) -> bool {
        self.keys.is_empty() || self.keys.contains(key)
    }

    /// What is wrong with the signature of a head, if anything.
    pub(super) fn fault_of(&self, head: &Head) -> Option<Fault> {
        match (&head.key, &head.signature) {
            (None, None) => None,
            (Some(key), Some(_)) if !self.believes(key) => Some(Fault::OtherKey),
            (Some(key), Some(signature)) if key.verifies(Purpose::Seal, &head.hash, signature) => None,
            (Some(_), Some(_) | None) | (None, Some(_)) => Some(Fault::BadSignature),
        }
    }

    /// What is wrong with a cut, if anything.
    pub(super) fn fault_of_cut(&self, run: &RunId, cut: &Cut) -> Option<Fault> {
        // No ledger can have written it, whoever signed it.
        if cut.count > row::CHAIN_MAX || cut.refused > cut.count || cut.once > cut.count {
            return Some(Fault::Unreadable);
        }
        if !self.believes(&cut.key) {
            return Some(Fault::OtherKey);
        }
        (!cut.is_signed(run)).then_some(Fault::BadSignature)
    }
}

/// A run's chain that holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verification {
    /// The run.
    pub run: RunId,
    /// How many receipts its chain has, those that were cut among them.
    pub count: u64,
    /// The last one's hash; all zero for none.
    pub head: Digest,
    /// The newest entry of the host's chain for this run, which agrees; none while the run goes on.
    pub sealed: Option<Head>,
    /// What was cut of it.
    pub cut: Option<Cut>,
}

/// The host's chain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Host {
    /// How many heads it has.
    pub heads: u64,
    /// The newest one.
    pub newest: Option<Head>,
    /// How many of them are signed.
    pub signed: u64,
    /// What could not be said for certain.
    pub notes: Vec<String>,
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
    /// What a run says of itself is not what was sealed.
    #[error("the record of run {run} was changed after it was sealed: {what}")]
    Record {
        /// The run.
        run: RunId,
        /// Which part of it.
        what: &'static str,
    },
    /// The statement of what was cut of a run does not hold.
    #[error("the cut of run {run} does not hold: {fault}")]
    Cut {
        /// The run.
        run: RunId,
        /// What is wrong with it.
        fault: Fault,
    },
    /// The host's chain knows a run that is not there.
    #[error("run {run} is missing; head {n} of the host's chain sealed it")]
    RunMissing {
        /// The run.
        run: RunId,
        /// The head.
        n: u64,
    },
    /// A run is over and the host's chain does not know it.
    #[error("run {run} is over and no head of the host's chain is its own: the end of that chain is gone, or the run was added")]
    NotSealed {
        /// The run.
        run: RunId,
    },
    /// The host's chain ends before a head that it once had.
    #[error(
        "the host's chain ends at head {found}, and {by} names head {n}: its end is cut off, or this is an older copy"
    )]
    CutOff {
        /// The head that should be there.
        n: u64,
        /// How many there are.
        found: u64,
        /// Who knows of it.
        by: &'static str,
    },
    /// The host's chain has another head where it once had one.
    #[error("head {n} of the host's chain is not the one that {by} names: the chain was written anew from there or before, or it is another host's")]
    OtherHead {
        /// The place.
        n: u64,
        /// Who knows of it.
        by: &'static str,
    },
    /// No head has the hash that is expected.
    #[error(
        "no head of the host's chain has the hash {0}: its end is cut off, or this is an older copy or another host's"
    )]
    NoSuchHead(Digest),
    /// What stands for a head that the ledger once had is itself no signed statement of the host.
    #[error("{by} holds no head that the host signed; it was changed, or is another host's")]
    BadMark {
        /// Which.
        by: &'static str,
    },
    /// A content is not the one that its name promises.
    #[error("blob {digest} holds other bytes than its name says{}", .receipt.as_ref().map(|id| format!("; receipt {id} names it as its result")).unwrap_or_default())]
    Blob {
        /// Its name.
        digest: Digest,
        /// A receipt whose result it is.
        receipt: Option<String>,
    },
    /// The ledger could not be read.
    #[error(transparent)]
    Ledger(#[from] Error),
}

impl Broken {
    /// The run that it is about, where it is about one.
    pub fn run(&self) -> Option<&RunId> {
        match self {
            Broken::Receipt { run, .. }
            | Broken::Counts { run, .. }
            | Broken::Record { run, .. }
            | Broken::Cut { run, .. }
            | Broken::RunMissing { run, .. }
            | Broken::NotSealed { run } => Some(run),
            Broken::Head { .. }
            | Broken::CutOff { .. }
            | Broken::OtherHead { .. }
            | Broken::NoSuchHead(_)
            | Broken::BadMark { .. }
            | Broken::Blob { .. }
            | Broken::Ledger(_) => None,
        }
    }

    /// The place in the chain of its run or of the host.
    pub fn place(&self) -> Option<u64> {
        match self {
            Broken::Receipt { seq: place, .. }
            | Broken::Head { n: place, .. }
            | Broken::RunMissing { n: place, .. }
            | Broken::CutOff { n: place, .. }
            | Broken::OtherHead { n: place, .. } => Some(*place),
            Broken::Counts { .. }
            | Broken::Record { .. }
            | Broken::Cut { .. }
            | Broken::NotSealed { .. }
            | Broken::NoSuchHead(_)
            | Broken::BadMark { .. }
            | Broken::Blob { .. }
            | Broken::Ledger(_) => None,
        }
    }

    /// What family of the ledger's data it is in, in one word.
    pub fn part(&self) -> &'static str {
        match self {
            Broken::Receipt { .. } => "receipts",
            Broken::Head { fault: Fault::Unsigned | Fault::OtherKey | Fault::BadSignature, .. } => "signatures",
            Broken::Head { .. } | Broken::CutOff { .. } | Broken::OtherHead { .. } | Broken::NoSuchHead(_) => "heads",
            Broken::Counts { .. } => "counts",
            Broken::Record { .. } | Broken::RunMissing { .. } | Broken::NotSealed { .. } => "runs",
            Broken::Cut { .. } => "cuts",
            Broken::BadMark { .. } => "mark",
            Broken::Blob { .. } => "blobs",
            Broken::Ledger(_) => "database",
        }
    }
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
    /// It has no signature, and one is wanted.
    #[error("it is not signed")]
    Unsigned,
    /// It is signed by a key that the verifier does not know.
    #[error("it is signed with another key: it is another host's, or the host's key was replaced")]
    OtherKey,
    /// Its signature is not one of its key.
    #[error("its signature does not fit it")]
    BadSignature,
}

/// The mark beside the database, as a message names it.
const MARK: &str = "`heads.mark`";
/// What the verifier brought, as a message names it.
const CHECKPOINT: &str = "the checkpoint";

impl Ledger {
    /// Recomputes the chain of a run, and holds it against what the run's row and the host's chain know of it, so that
    /// a missing tail shows too. Believes any key.
    ///
    /// # Errors
    ///
    /// [`Broken`], with the first place that does not hold.
    pub fn verify_run(&self, run: &RunId) -> std::result::Result<Verification, Broken> {
        self.verify_run_with(run, &Trust::default())
    }

    /// As [`Ledger::verify_run`], believing these keys only.
    ///
    /// # Errors
    ///
    /// As [`Ledger::verify_run`].
    pub fn verify_run_with(&self, run: &RunId, trust: &Trust) -> std::result::Result<Verification, Broken> {
        // In this order: what is appended and sealed meanwhile makes the chain longer than this, which is no fault. A
        // cut that is made meanwhile is looked for again when a receipt is missing.
        let sealed = self.sealed(run, trust)?;
        let stated = self.stated(run)?;
        match self.follow(run, trust, sealed.as_ref(), &stated) {
            Err(Broken::Receipt { fault: Fault::Missing, .. }) => self.follow(run, trust, sealed.as_ref(), &stated),
            other => other,
        }
    }

    fn follow(
        &self,
        run: &RunId,
        trust: &Trust,
        sealed: Option<&Head>,
        stated: &Stated,
    ) -> std::result::Result<Verification, Broken> {
        let broken = |seq, fault| Broken::Receipt { run: run.clone(), seq, fault };
        let cut = self.cut_of(run)?;
        let (mut count, mut head, mut refused, mut once) = (0, Digest([0; 32]), 0, 0);
        if let Some(cut) = &cut {
            if let Some(fault) = trust.fault_of_cut(run, cut) {
                return Err(Broken::Cut { run: run.clone(), fault });
            }
            // A cut is only ever made of what is sealed.
            if sealed
                .is_none_or(|sealed| sealed.count < cut.count || (sealed.count == cut.count && sealed.head != cut.head))
            {
                return Err(Broken::Cut { run: run.clone(), fault: Fault::Replaced });
            }
            (count, head, refused, once) = (cut.count, cut.head, cut.refused, cut.once);
        }
        let limit = Some(stated.count.saturating_sub(count));
        let all = ReceiptQuery { run: Some(run.clone()), after_seq: Some(count), limit, ..ReceiptQuery::default() };
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
            if let Some(digest) = receipt.result_digest {
                if matches!(self.blob(&digest), Err(Error::BlobDamaged { .. })) {
                    return Err(Broken::Blob { digest, receipt: Some(receipt.id.0) });
                }
            }
            (count, head) = (seq, receipt.hash);
            refused += u64::from(receipt.decision == Decision::Refused);
            once += u64::from(receipt.idempotency == Idempotency::Once);
            if sealed.is_some_and(|sealed| sealed.count == count && sealed.head != head) {
                return Err(broken(count, Fault::Replaced));
            }
        }
        let known = sealed.map_or(0, |sealed| sealed.count).max(stated.count);
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
        Ok(Verification { run: run.clone(), count, head, sealed: sealed.cloned(), cut })
    }

    /// Recomputes the host's chain, checks that each run in it still has the receipt that was its head, and gives the
    /// number of heads. Believes any key.
    ///
    /// # Errors
    ///
    /// [`Broken`], with the first place that does not hold.
    pub fn verify_heads(&self) -> std::result::Result<u64, Broken> {
        let mut first = None;
        let host = self.verify_host(&Trust::default(), &mut |broken| {
            first = Some(broken);
            ControlFlow::Break(())
        })?;
        first.map_or(Ok(host.heads), Err)
    }

    /// Checks the host's chain whole: its links, its signatures, that what it sealed is there, and that it holds every
    /// head that the verifier or the mark beside the database knows of. Each fault goes to `report`, which says whether
    /// to go on.
    ///
    /// # Errors
    ///
    /// Those of reading the ledger.
    pub fn verify_host(&self, trust: &Trust, report: &mut dyn FnMut(Broken) -> ControlFlow<()>) -> Result<Host> {
        let mut host = Host { heads: 0, newest: None, signed: 0, notes: Vec::new() };
        // Read first: a head that is added meanwhile makes the chain longer than this, which is no fault.
        let mark = mark::read(self.database());
        let mut prev = Digest([0; 32]);
        while let Some((head, receipt)) = self.head_after(host.heads)? {
            let n = host.heads + 1;
            let mut faults = Vec::new();
            if head.n != n {
                faults.push(Broken::Head { n, fault: Fault::Missing });
            } else if head.prev != prev {
                faults.push(Broken::Head { n, fault: Fault::Unlinked });
            }
            if hash::head(&head) != head.hash {
                faults.push(Broken::Head { n: head.n, fault: Fault::Changed });
            } else if let Some(fault) = trust.fault_of(&head) {
                faults.push(Broken::Head { n: head.n, fault });
            } else if head.signature.is_none() && host.signed > 0 {
                faults.push(Broken::Head { n: head.n, fault: Fault::Unsigned });
            }
            let at = |fault| Broken::Receipt { run: head.run.clone(), seq: head.count, fault };
            match receipt {
                Named::NoRun => faults.push(Broken::RunMissing { run: head.run.clone(), n: head.n }),
                // Before the cut: the host's chain alone knows it.
                Named::Cut => {}
                Named::Receipt(_) if head.count == 0 => {}
                Named::Receipt(Some(hash)) if hash == head.head => {}
                Named::Receipt(Some(_)) => faults.push(at(Fault::Replaced)),
                Named::Receipt(None) => faults.push(at(Fault::Missing)),
            }
            for fault in faults {
                if report(fault).is_break() {
                    return Ok(host);
                }
            }
            host.signed += u64::from(head.signature.is_some());
            (host.heads, prev) = (head.n, head.hash);
            host.newest = Some(head);
        }
        if trust.signatures == Signatures::Required && host.signed == 0 {
            let unsigned = Broken::Head { n: host.heads.max(1), fault: Fault::Unsigned };
            if report(unsigned).is_break() {
                return Ok(host);
            }
        }
        for expected in &trust.expect {
            if let Some(broken) = self.missing_head(expected, trust, host.heads)? {
                if report(broken).is_break() {
                    return Ok(host);
                }
            }
        }
        match mark {
            // A copy has none; a state directory has one from its first seal.
            Ok(None) if host.signed > 0 && self.state().join("host.key").exists() => {
                host.notes.push(format!("there is no {MARK}: it was removed, or an older version sealed the last run"));
            }
            Ok(None) => {}
            Ok(Some(mark)) => {
                if let Some(broken) = self.against_mark(&mark, trust, &mut host)? {
                    let _ = report(broken);
                }
            }
            Err(_unreadable) => {
                let _ = report(Broken::BadMark { by: MARK });
            }
        }
        Ok(host)
    }

    /// A look that costs next to nothing: whether the newest head is signed by the host, and whether the ledger holds
    /// the head that its mark names.
    ///
    /// # Errors
    ///
    /// Those of reading the ledger.
    pub fn glance(&self, trust: &Trust) -> Result<Option<Broken>> {
        let Ok(mark) = mark::read(self.database()) else { return Ok(Some(Broken::BadMark { by: MARK })) };
        let newest = self.newest_head()?;
        if let Some(head) = &newest {
            let fault = if hash::head(head) == head.hash { trust.fault_of(head) } else { Some(Fault::Changed) };
            if let Some(fault) = fault {
                return Ok(Some(Broken::Head { n: head.n, fault }));
            }
        }
        let heads = newest.as_ref().map_or(0, |head| head.n);
        let mut host = Host { heads, newest, signed: 0, notes: Vec::new() };
        match &mark {
            Some(mark) => self.against_mark(mark, trust, &mut host),
            None => Ok(None),
        }
    }

    /// Checks every content that is stored against its name.
    ///
    /// # Errors
    ///
    /// Those of listing them.
    pub fn verify_blobs(&self, report: &mut dyn FnMut(Broken) -> ControlFlow<()>) -> Result<u64> {
        let mut count = 0;
        for digest in self.blobs()? {
            count += 1;
            if matches!(self.blob(&digest), Err(Error::BlobDamaged { .. }))
                && report(Broken::Blob { digest, receipt: None }).is_break()
            {
                break;
            }
        }
        Ok(count)
    }

    /// The newest head of the host's chain.
    ///
    /// # Errors
    ///
    /// The database's.
    pub fn newest_head(&self) -> Result<Option<Head>> {
        self.read("read the host's chain", |connection| {
            let sql = format!("SELECT {} FROM heads ORDER BY n DESC LIMIT 1", Head::COLUMNS);
            let head = connection.prepare_cached(&sql)?.query_row([], Head::read).optional();
            head.map(Ok)
        })
    }

    fn against_mark(&self, mark: &mark::Mark, trust: &Trust, host: &mut Host) -> Result<Option<Broken>> {
        let known = [Some(&mark.latest), mark.durable.as_ref()];
        for checkpoint in known.into_iter().flatten() {
            let believed = checkpoint.key.as_ref().is_none_or(|key| trust.believes(key));
            if !believed || (checkpoint.key.is_some() && !checkpoint.is_signed()) {
                return Ok(Some(Broken::BadMark { by: MARK }));
            }
        }
        if let Some(wanted) = mark.insists_on() {
            if let Some(broken) = self.unlike(wanted, host.heads, MARK)? {
                return Ok(Some(broken));
            }
        }
        if self.unlike(&mark.latest, host.heads, MARK)?.is_some() {
            host.notes.push(format!(
                "{MARK} names head {}, which is not there, and the machine was started anew since: a loss of power can \
                 take the last heads that were not yet on the disk, and so can a person",
                mark.latest.n
            ));
        }
        Ok(None)
    }

    /// What is wrong with a head that the verifier wants to see.
    fn missing_head(&self, expected: &Expected, trust: &Trust, heads: u64) -> Result<Option<Broken>> {
        match expected {
            Expected::Hash(hash) => {
                let found = self.read("read the host's chain", |connection| {
                    let mut statement =
                        connection.prepare_cached("SELECT EXISTS (SELECT 1 FROM heads WHERE hash = ?1)")?;
                    let found = statement.query_row([hash.0], |row| row.get::<_, bool>(0));
                    found.map(Ok)
                })?;
                Ok((!found).then_some(Broken::NoSuchHead(*hash)))
            }
            Expected::At(wanted) => {
                let signed = wanted.is_signed() && wanted.key.as_ref().is_some_and(|key| trust.believes(key));
                if wanted.key.is_some() && !signed {
                    return Ok(Some(Broken::BadMark { by: CHECKPOINT }));
                }
                self.unlike(wanted, heads, CHECKPOINT)
            }
        }
    }

    fn unlike(&self, wanted: &Checkpoint, heads: u64, by: &'static str) -> Result<Option<Broken>> {
        // More may have been sealed since the count was taken, never less.
        let held = self.read("read the host's chain", |connection| writer::holds(connection, wanted).map(Ok))?;
        Ok(match held {
            true => None,
            false if wanted.n > heads => Some(Broken::CutOff { n: wanted.n, found: heads, by }),
            false => Some(Broken::OtherHead { n: wanted.n, by }),
        })
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

    /// The newest entry of the host's chain for a run, checked against the run's record.
    fn sealed(&self, run: &RunId, trust: &Trust) -> std::result::Result<Option<Head>, Broken> {
        let sql = format!(
            "SELECT {}, record.record, record.state, record.started_us FROM runs AS record \
             LEFT JOIN heads ON heads.n = (SELECT max(n) FROM heads WHERE heads.run = record.id) WHERE record.id = ?1",
            Head::COLUMNS
        );
        let found = self.read("read the host's chain", |connection| {
            let mut statement = connection.prepare_cached(&sql)?;
            let found = statement
                .query_row([&run.0], |row| {
                    let head = match row.get::<_, Option<i64>>(0)? {
                        Some(_) => Some(Head::read(row)?),
                        None => None,
                    };
                    Ok((head, row.get::<_, String>(10)?, row.get::<_, String>(11)?, row.get::<_, i64>(12)?))
                })
                .optional()?;
            Ok(found.ok_or_else(|| Error::NotFound(run.0.clone())))
        })?;
        let (head, text, state, started) = found;
        let changed = |what| Broken::Record { run: run.clone(), what };
        let value = runs::value(run, &text).map_err(|_| changed("it cannot be read"))?;
        let says = |field: &str| value.get(field).and_then(|value| value.as_str()).unwrap_or_default().to_owned();
        if says("state") != state {
            return Err(changed("its state"));
        }
        if says("started_at").parse() != Ok(Timestamp(started)) {
            return Err(changed("its start"));
        }
        let Some(head) = head else {
            return match state == runs::state(RunState::Ended) {
                true => Err(Broken::NotSealed { run: run.clone() }),
                false => Ok(None),
            };
        };
        if hash::head(&head) != head.hash {
            return Err(Broken::Head { n: head.n, fault: Fault::Changed });
        }
        if let Some(fault) = trust.fault_of(&head) {
            return Err(Broken::Head { n: head.n, fault });
        }
        if head.record.is_some_and(|digest| digest != hash::run(&value)) {
            return Err(changed("what it says is not what was sealed"));
        }
        Ok(Some(head))
    }

    /// The entry of the host's chain after the n-th, and the receipt that it names.
    fn head_after(&self, n: u64) -> Result<Option<(Head, Named)>> {
        let sql = format!(
            "SELECT {}, runs.n, coalesce(cuts.count, 0), receipts.hash, cuts.head \
             FROM heads LEFT JOIN runs ON runs.id = heads.run LEFT JOIN cuts ON cuts.run = runs.n \
             LEFT JOIN receipts ON receipts.id = runs.n << 32 | heads.count \
             WHERE heads.n > ?1 ORDER BY heads.n LIMIT 1",
            Head::COLUMNS
        );
        self.read("read the host's chain", |connection| {
            let mut statement = connection.prepare_cached(&sql)?;
            let head = statement
                .query_row([n as i64], |row| {
                    let head = Head::read(row)?;
                    let hash = row.get::<_, Option<[u8; 32]>>(12)?.map(Digest);
                    let cut_head = row.get::<_, Option<[u8; 32]>>(13)?.map(Digest);
                    let cut = row.get::<_, i64>(11)? as u64;
                    let named = match row.get::<_, Option<i64>>(10)? {
                        None => Named::NoRun,
                        Some(_) if head.count > 0 && head.count == cut => Named::Receipt(cut_head),
                        Some(_) if head.count < cut => Named::Cut,
                        Some(_) => Named::Receipt(hash),
                    };
                    Ok((head, named))
                })
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

/// What lies where a head points to.
enum Named {
    /// The run is not there.
    NoRun,
    /// It is among what was cut.
    Cut,
    /// The hash of the receipt at this place, if there is one.
    Receipt(Option<Digest>),
}

struct Stated {
    count: u64,
    refused: u64,
    once: u64,
    head: Digest,
}
