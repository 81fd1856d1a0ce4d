//! One run as JSON Lines, to be read and checked where there is no ledger.
//!
//! The first line is the header: the form's name, the run's record as it is stored with its counts, the handlers that
//! its effects passed, the host's public key, and what was cut. Then each receipt, in order, as `tollgate receipts
//! --json` prints it with `"type": "receipt"`. The last line is the head of the host's chain that seals the run, signed;
//! or says that the run is not sealed. `docs/export.schema.json` describes every line.

use super::{
    hash,
    query::ReceiptQuery,
    record::{EffectCounts, Receipt},
    runs::{self, Head},
    verify::{Fault, Trust},
    Cut, Error, Ledger, PublicKey, Result,
};
use crate::effect::{Digest, RunId};
use rusqlite::OptionalExtension as _;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::io::{BufRead, Write};

/// The form's name. Another first number means that old readers cannot read it.
pub const FORM: &str = "tollgate.export.v1";

/// The longest line that is read: a receipt has a few kilobytes, its texts are bounded by who wrote them.
const LINE_MAX: usize = 16 << 20;

/// The first line.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Header {
    r#type: HeaderType,
    format: String,
    run: Value,
    chain: Vec<String>,
    key: Option<PublicKey>,
    receipts: u64,
    cut: Option<Cut>,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum HeaderType {
    Header,
}

/// The last line.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "type", deny_unknown_fields)]
enum End {
    Seal { seal: Box<Head> },
    Unsealed { receipts: u64, head: Digest },
}

/// Why an export could not be written.
#[derive(Debug, thiserror::Error)]
pub enum ExportError {
    /// The ledger's part.
    #[error(transparent)]
    Ledger(#[from] Error),
    /// The output's.
    #[error("cannot write the export")]
    Write(#[from] std::io::Error),
}

impl Ledger {
    /// Writes one run's export.
    ///
    /// A run that goes on is exported as far as it had come. What was not sealed yet of a run that was sealed before
    /// waits for its next seal, and is left out.
    ///
    /// # Errors
    ///
    /// [`Error::NotFound`] when there is no such run, the database's and those of `out`.
    pub fn export(&self, run: &RunId, out: &mut dyn Write) -> std::result::Result<(), ExportError> {
        let (record, counts, seal, head) = self.exported(run)?;
        let cut = self.cut_of(run)?;
        let count = seal.as_ref().map_or(counts.count, |seal| seal.count);
        let mut record = record;
        let chain = record.get("chain").cloned().map(serde_json::from_value).and_then(std::result::Result::ok);
        record["effects"] = serde_json::json!(counts);
        let key = match &seal {
            Some(seal) => seal.key,
            None => PublicKey::of_host(self.state()).unwrap_or_default(),
        };
        let header = Header {
            r#type: HeaderType::Header,
            format: FORM.to_owned(),
            run: record,
            chain: chain.unwrap_or_default(),
            key,
            receipts: count,
            cut: cut.clone(),
        };
        line(out, &header)?;
        let after = cut.as_ref().map_or(0, |cut| cut.count);
        let query = ReceiptQuery {
            run: Some(run.clone()),
            after_seq: Some(after),
            limit: Some(count.saturating_sub(after)),
            ..ReceiptQuery::default()
        };
        for receipt in self.receipts(&query)? {
            let mut value = serde_json::to_value(receipt?).map_err(std::io::Error::from)?;
            value["type"] = Value::from("receipt");
            line(out, &value)?;
        }
        let end = match seal {
            Some(seal) => End::Seal { seal: Box::new(seal) },
            None => End::Unsealed { receipts: count, head },
        };
        line(out, &end)?;
        Ok(())
    }

    /// A run's record as it is stored, its counts, its newest seal and its chain's head, all of one moment.
    fn exported(&self, run: &RunId) -> Result<(Value, EffectCounts, Option<Head>, Digest)> {
        let sql = format!(
            "SELECT {}, record.record, chains.count, refused, once, chains.head FROM runs AS record \
             JOIN chains ON chains.run = record.n \
             LEFT JOIN heads ON heads.n = (SELECT max(n) FROM heads WHERE heads.run = record.id) WHERE record.id = ?1",
            Head::COLUMNS
        );
        let found = self.read("read a run", |connection| {
            let mut statement = connection.prepare_cached(&sql)?;
            let found = statement
                .query_row([&run.0], |row| {
                    let seal = match row.get::<_, Option<i64>>(0)? {
                        Some(_) => Some(Head::read(row)?),
                        None => None,
                    };
                    let counts = EffectCounts {
                        count: row.get::<_, i64>(11)? as u64,
                        refused: row.get::<_, i64>(12)? as u64,
                        once: row.get::<_, i64>(13)? as u64,
                    };
                    Ok((row.get::<_, String>(10)?, counts, seal, Digest(row.get(14)?)))
                })
                .optional()?;
            Ok(found.ok_or_else(|| Error::NotFound(run.0.clone())))
        })?;
        let (text, counts, seal, head) = found;
        Ok((runs::value(run, &text)?, counts, seal, head))
    }
}

fn line(out: &mut dyn Write, value: &impl Serialize) -> std::io::Result<()> {
    let mut bytes = serde_json::to_vec(value)?;
    bytes.push(b'\n');
    out.write_all(&bytes)
}

/// An export that holds.
#[derive(Clone, Debug, PartialEq)]
pub struct Exported {
    /// The run.
    pub run: RunId,
    /// How many receipts its chain has, those that were cut among them.
    pub count: u64,
    /// The last one's hash.
    pub head: Digest,
    /// What was cut of it.
    pub cut: Option<Cut>,
    /// What vouches for its end.
    pub sealed: Sealed,
}

/// What vouches for an export's end.
#[derive(Clone, Debug, PartialEq)]
pub enum Sealed {
    /// This head of its host's chain.
    By(Box<Head>),
    /// Nothing: the run went on when it was exported.
    NotYet,
}

/// What of an export does not hold, and on which line.
#[derive(Debug, thiserror::Error)]
#[error("line {line}: {why}")]
pub struct ExportBroken {
    /// The line, from 1.
    pub line: u64,
    /// What is wrong there.
    pub why: Wrong,
}

/// What is wrong with a line of an export.
#[derive(Debug, thiserror::Error)]
pub enum Wrong {
    /// It cannot be read.
    #[error("it cannot be read")]
    Read(#[from] std::io::Error),
    /// It is longer than any line of an export.
    #[error("it is longer than any line of an export")]
    TooLong,
    /// It is not what belongs there.
    #[error("it is no {0} of an export of the form {FORM}")]
    NotA(&'static str),
    /// Another form.
    #[error("this is an export of the form `{0}`, and this version knows {FORM}")]
    Form(String),
    /// The receipt at this place does not hold.
    #[error("receipt {0}: {1}")]
    Receipt(u64, Fault),
    /// What was cut does not hold.
    #[error("what was cut: {0}")]
    Cut(Fault),
    /// The seal does not hold.
    #[error("the seal: {0}")]
    Seal(Fault),
    /// The record is not the one that was sealed.
    #[error("the run's record is not the one that was sealed")]
    Record,
    /// The header names another key, count or chain than what follows.
    #[error("the header's {0} is not that of the rest")]
    Header(&'static str),
    /// There is something after the last line, or no last line.
    #[error("the export does not end with its seal: it was cut short, or something was added")]
    End,
}

/// Reads an export and recomputes all of it, without any ledger.
///
/// # Errors
///
/// The first line that does not hold.
pub fn verify(mut reader: impl BufRead, trust: &Trust) -> std::result::Result<Exported, ExportBroken> {
    let mut at = 0;
    let mut next = || -> std::result::Result<Option<(u64, Value)>, ExportBroken> {
        at += 1;
        let wrong = |why| ExportBroken { line: at, why };
        let mut bytes = Vec::new();
        let mut limited = std::io::Read::take(&mut reader, LINE_MAX as u64 + 1);
        limited.read_until(b'\n', &mut bytes).map_err(|error| wrong(error.into()))?;
        if bytes.is_empty() {
            return Ok(None);
        }
        if bytes.len() > LINE_MAX {
            return Err(wrong(Wrong::TooLong));
        }
        // A last line without its end was cut short.
        if bytes.pop() != Some(b'\n') {
            return Err(wrong(Wrong::End));
        }
        serde_json::from_slice(&bytes).map(|value| Some((at, value))).map_err(|_| wrong(Wrong::NotA("line")))
    };
    let wrong = |line, why| ExportBroken { line, why };
    let (_, first) = next()?.ok_or(wrong(1, Wrong::NotA("header")))?;
    if let Some(other) = first.get("format").and_then(Value::as_str).filter(|format| *format != FORM) {
        return Err(wrong(1, Wrong::Form(other.to_owned())));
    }
    let header: Header = serde_json::from_value(first).map_err(|_| wrong(1, Wrong::NotA("header")))?;
    let run = header.run.get("id").and_then(Value::as_str).map(|id| RunId(id.to_owned()));
    let run = run.ok_or(wrong(1, Wrong::NotA("header")))?;
    let counted = |name: &str| header.run["effects"][name].as_u64();
    let (mut count, mut head, mut refused, mut once) = (0, Digest([0; 32]), 0, 0);
    if let Some(cut) = &header.cut {
        if let Some(fault) = trust.fault_of_cut(&run, cut) {
            return Err(wrong(1, Wrong::Cut(fault)));
        }
        (count, head, refused, once) = (cut.count, cut.head, cut.refused, cut.once);
    }
    loop {
        let Some((line, mut value)) = next()? else { return Err(wrong(count + 2, Wrong::End)) };
        if value.get("type") != Some(&Value::from("receipt")) {
            let end: End = serde_json::from_value(value).map_err(|_| wrong(line, Wrong::NotA("last line")))?;
            if header.receipts != count {
                return Err(wrong(line, Wrong::Receipt(count + 1, Fault::Missing)));
            }
            let sealed = match end {
                End::Unsealed { receipts, head: said } if (receipts, said) == (count, head) => Sealed::NotYet,
                End::Unsealed { .. } => return Err(wrong(line, Wrong::Header("count"))),
                End::Seal { seal } => {
                    check_seal(&seal, &header, &run, count, head, trust).map_err(|why| wrong(line, why))?;
                    let counts = [("refused", refused), ("once", once)];
                    // Later receipts, not yet sealed, are counted in the record and are not here.
                    if counted("count") == Some(count)
                        && counts.iter().any(|(name, found)| counted(name) != Some(*found))
                    {
                        return Err(wrong(1, Wrong::Header("counts")));
                    }
                    Sealed::By(seal)
                }
            };
            return match next()? {
                Some((line, _)) => Err(wrong(line, Wrong::End)),
                None => Ok(Exported { run, count, head, cut: header.cut, sealed }),
            };
        }
        if let Some(fields) = value.as_object_mut() {
            fields.remove("type");
        }
        let not_one = || wrong(line, Wrong::NotA("receipt"));
        let receipt: Receipt = serde_json::from_value(value.clone()).map_err(|_| not_one())?;
        // A field that is not hashed has no place here.
        if serde_json::to_value(&receipt).ok() != Some(value) {
            return Err(not_one());
        }
        let seq = count + 1;
        let fault = if receipt.seq != seq || receipt.run != run || receipt.id.0 != format!("{run}.{seq}") {
            Some(Fault::Missing)
        } else if receipt.prev != head {
            Some(Fault::Unlinked)
        } else if hash::receipt(&receipt) != receipt.hash {
            Some(Fault::Changed)
        } else {
            None
        };
        if let Some(fault) = fault {
            return Err(wrong(line, Wrong::Receipt(seq, fault)));
        }
        (count, head) = (seq, receipt.hash);
        refused += u64::from(receipt.decision == crate::chain::Decision::Refused);
        once += u64::from(receipt.idempotency == crate::effect::Idempotency::Once);
    }
}

fn check_seal(
    seal: &Head,
    header: &Header,
    run: &RunId,
    count: u64,
    head: Digest,
    trust: &Trust,
) -> std::result::Result<(), Wrong> {
    if hash::head(seal) != seal.hash {
        return Err(Wrong::Seal(Fault::Changed));
    }
    if let Some(fault) = trust.fault_of(seal) {
        return Err(Wrong::Seal(fault));
    }
    if seal.signature.is_none() && !trust.keys.is_empty() {
        return Err(Wrong::Seal(Fault::Unsigned));
    }
    if (&seal.run, seal.count, seal.head) != (run, count, head) {
        return Err(Wrong::Seal(Fault::Replaced));
    }
    if seal.record.is_some_and(|record| record != hash::run(&header.run)) {
        return Err(Wrong::Record);
    }
    if header.key != seal.key {
        return Err(Wrong::Header("key"));
    }
    let chain = header.run.get("chain").cloned().unwrap_or_else(|| Value::Array(Vec::new()));
    if serde_json::to_value(&header.chain).ok() != Some(chain) {
        return Err(Wrong::Header("chain"));
    }
    Ok(())
}
