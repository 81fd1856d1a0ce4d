//! Receipts as rows, and rows as receipts.

use super::{record::Receipt, time::Timestamp, Error, Result};
use crate::{
    chain::Decision,
    effect::{Class, Digest, Door, Idempotency, Kind, ReceiptId, Resource, RoomId, RunId, Subject},
};
use rusqlite::{params, CachedStatement, Row};
use serde::{de::value::StrDeserializer, Deserialize};

/// The most receipts of one run: its place takes the lower half of the row's id.
pub(super) const CHAIN_MAX: u64 = u32::MAX as u64;

/// The row's id of a receipt.
pub(super) fn id(run: i64, seq: u64) -> i64 {
    (run << 32) | (seq & CHAIN_MAX) as i64
}

/// The place in the run of a row.
pub(super) fn seq(id: i64) -> u64 {
    id as u64 & CHAIN_MAX
}

pub(super) const INSERT: &str = "INSERT INTO receipts (id, room, kind, classes, resource_type, resource, uid, \
     subject_run, agent, door, decision, decided_by, reason, hint, idempotency, injected, started_us, queued_us, \
     decided_us, executed_us, bytes, times, request_digest, result_digest, prev, hash, rule) \
     VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15, ?16, ?17, ?18, ?19, ?20, ?21, ?22, \
     ?23, ?24, ?25, ?26, ?27)";

/// The columns that [`read`] wants, with `receipts` and `runs` in the query.
pub(super) const COLUMNS: &str = "receipts.id, runs.id, room, kind, classes, resource_type, resource, uid, \
     subject_run, agent, door, decision, decided_by, reason, hint, idempotency, injected, receipts.started_us, \
     queued_us, decided_us, executed_us, bytes, times, request_digest, result_digest, prev, hash, \
     rule";

/// Inserts a receipt with [`INSERT`]. Its numbers fit, as [`super::draft::Draft`] holds them to 2^63-1.
pub(super) fn insert(
    statement: &mut CachedStatement<'_>,
    run: i64,
    receipt: &Receipt,
    started: Timestamp,
) -> rusqlite::Result<()> {
    statement.execute(params![
        id(run, receipt.seq),
        receipt.room.as_ref().map(|room| &room.0),
        receipt.kind.name(),
        mask(&receipt.classes),
        resource_type(&receipt.resource),
        resource_text(&receipt.resource),
        receipt.subject.uid,
        receipt.subject.run.as_ref().map(|run| &run.0),
        receipt.subject.agent,
        door(receipt.door),
        decision(receipt.decision),
        receipt.decided_by,
        receipt.reason,
        receipt.hint,
        idempotency(receipt.idempotency),
        receipt.injected,
        started.0,
        receipt.queued_us as i64,
        receipt.decided_us as i64,
        receipt.executed_us as i64,
        receipt.bytes as i64,
        receipt.times as i64,
        receipt.request_digest.0,
        receipt.result_digest.map(|digest| digest.0),
        receipt.prev.0,
        receipt.hash.0,
        receipt.rule,
    ])?;
    Ok(())
}

/// A row of [`COLUMNS`] as a receipt: the outer error is SQLite's, the inner one what the row holds.
pub(super) fn read(row: &Row<'_>) -> rusqlite::Result<Result<Receipt>> {
    let seq = seq(row.get(0)?);
    let run: String = row.get(1)?;
    let what = || format!("receipt {run}.{seq}");
    macro_rules! known {
        ($text:expr) => {
            match $text {
                Ok(value) => value,
                Err(found) => return Ok(Err(Error::Unreadable { what: what(), found })),
            }
        };
    }
    let kind: String = row.get(3)?;
    let unsigned = |column: usize| -> rusqlite::Result<std::result::Result<u64, String>> {
        let number: i64 = row.get(column)?;
        Ok(u64::try_from(number).map_err(|_| number.to_string()))
    };
    let started = Timestamp(row.get(17)?);
    Ok(Ok(Receipt {
        id: ReceiptId(format!("{run}.{seq}")),
        seq,
        room: row.get::<_, Option<String>>(2)?.map(RoomId),
        kind: known!(kind.parse::<Kind>().map_err(|_| kind.clone())),
        classes: known!(classes(row.get(4)?)),
        resource: known!(resource(&row.get::<_, String>(5)?, row.get(6)?)),
        subject: Subject { uid: row.get(7)?, run: row.get::<_, Option<String>>(8)?.map(RunId), agent: row.get(9)? },
        door: known!(word(row.get_ref(10)?.as_str()?)),
        decision: known!(word(row.get_ref(11)?.as_str()?)),
        decided_by: row.get(12)?,
        reason: row.get(13)?,
        hint: row.get(14)?,
        rule: row.get(27)?,
        idempotency: known!(word(row.get_ref(15)?.as_str()?)),
        injected: row.get(16)?,
        started_at: started.to_string(),
        queued_us: known!(unsigned(18)?),
        decided_us: known!(unsigned(19)?),
        executed_us: known!(unsigned(20)?),
        bytes: known!(unsigned(21)?),
        times: known!(unsigned(22)?),
        request_digest: Digest(row.get(23)?),
        result_digest: row.get::<_, Option<[u8; 32]>>(24)?.map(Digest),
        prev: Digest(row.get(25)?),
        hash: Digest(row.get(26)?),
        run: RunId(run),
    }))
}

/// Every class, each at the index of its bit.
const CLASSES: [Class; 9] = [
    Class::Read,
    Class::Write,
    Class::Network,
    Class::Egress,
    Class::Spend,
    Class::Process,
    Class::Lifecycle,
    Class::Schedule,
    Class::Global,
];

pub(super) fn mask(classes: &[Class]) -> i64 {
    classes.iter().fold(0, |mask, class| mask | 1 << (*class as i64))
}

fn classes(mask: i64) -> std::result::Result<Vec<Class>, String> {
    if mask >> CLASSES.len() != 0 {
        return Err(format!("classes {mask:#x}"));
    }
    Ok(CLASSES.into_iter().filter(|class| mask & 1 << (*class as i64) != 0).collect())
}

pub(super) fn resource_type(resource: &Resource) -> &'static str {
    match resource {
        Resource::Workspace { .. } => "workspace",
        Resource::Host { .. } => "host",
        Resource::Run { .. } => "run",
        Resource::Address { .. } => "address",
        Resource::Syscall { .. } => "syscall",
        Resource::Url { .. } => "url",
    }
}

fn resource_text(resource: &Resource) -> &str {
    match resource {
        Resource::Workspace { path } | Resource::Host { path } => path,
        Resource::Run { id } => id,
        Resource::Address { to } => to,
        Resource::Syscall { name } => name,
        Resource::Url { url } => url,
    }
}

fn resource(kind: &str, text: String) -> std::result::Result<Resource, String> {
    match kind {
        "workspace" => Ok(Resource::Workspace { path: text }),
        "host" => Ok(Resource::Host { path: text }),
        "run" => Ok(Resource::Run { id: text }),
        "address" => Ok(Resource::Address { to: text }),
        "syscall" => Ok(Resource::Syscall { name: text }),
        "url" => Ok(Resource::Url { url: text }),
        other => Err(format!("resource type {other}")),
    }
}

pub(super) fn decision(decision: Decision) -> &'static str {
    match decision {
        Decision::Allowed => "allowed",
        Decision::Refused => "refused",
        Decision::Answered => "answered",
        Decision::Planned => "planned",
        Decision::Failed => "failed",
        Decision::InDoubt => "in-doubt",
    }
}

fn door(door: Door) -> &'static str {
    match door {
        Door::Api => "api",
        Door::Workspace => "workspace",
        Door::Jail => "jail",
        Door::Control => "control",
        Door::Program => "program",
        Door::Network => "network",
    }
}

fn idempotency(idempotency: Idempotency) -> &'static str {
    match idempotency {
        Idempotency::Idempotent => "idempotent",
        Idempotency::Compensable => "compensable",
        Idempotency::Once => "once",
    }
}

/// Reads one of the closed words back; the error is the word.
fn word<'de, T: Deserialize<'de>>(text: &'de str) -> std::result::Result<T, String> {
    T::deserialize(StrDeserializer::<serde::de::value::Error>::new(text)).map_err(|_| text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_of_the_store_are_those_of_the_json_contract() {
        let json = |value: serde_json::Value| value.as_str().expect("a word").to_owned();
        for value in [
            Decision::Allowed,
            Decision::Refused,
            Decision::Answered,
            Decision::Planned,
            Decision::Failed,
            Decision::InDoubt,
        ] {
            assert_eq!(decision(value), json(serde_json::to_value(value).unwrap()));
            assert_eq!(word::<Decision>(decision(value)), Ok(value));
        }
        for value in Door::ALL {
            assert_eq!(door(value), json(serde_json::to_value(value).unwrap()));
            assert_eq!(word::<Door>(door(value)), Ok(value));
        }
        for value in [Idempotency::Idempotent, Idempotency::Compensable, Idempotency::Once] {
            assert_eq!(idempotency(value), json(serde_json::to_value(value).unwrap()));
            assert_eq!(word::<Idempotency>(idempotency(value)), Ok(value));
        }
        assert_eq!(word::<Decision>("perhaps"), Err("perhaps".to_owned()));
    }

    #[test]
    fn each_class_has_the_bit_of_its_index() {
        for (index, class) in CLASSES.into_iter().enumerate() {
            assert_eq!(mask(&[class]), 1 << index);
            assert_eq!(classes(1 << index), Ok(vec![class]));
        }
        assert!(classes(1 << 9).is_err());
        assert!(classes(-1).is_err());
    }
}
