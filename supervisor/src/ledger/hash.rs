//! The bytes that the chains hash.
//!
//! A receipt's `hash` is SHA-256 over `tollgate.receipt.v2`, a zero byte, and the receipt as canonical JSON without
//! its `hash`. Its `prev`, the hash of the receipt before it in the run (64 zeros for the first), is a field like any
//! other, so each hash covers all that came before. A receipt whose `rule` is null is hashed in the first form, the
//! only one that older versions wrote: over `tollgate.receipt.v1`, a zero byte, and the receipt without `hash` and
//! without `rule`. So neither form can be read as the other, and taking a rule away changes the hash.
//!
//! A run's record has the digest SHA-256 over `tollgate.run.v1`, a zero byte, and the record as canonical JSON without
//! its `effects`, which are counted from the receipts.
//!
//! A head's `hash` is SHA-256 over `tollgate.head.v2`, a zero byte, and as canonical JSON the object
//! `{"count", "head", "n", "prev", "record", "run", "sealed_at"}`, where `record` is the digest of the run's record.
//! Heads of older versions have none: `tollgate.head.v1` and the object without `record`.
//!
//! What the host signs with Ed25519 (RFC 8032) is, for a head, `tollgate.seal.v1`, a zero byte, the 32 bytes of the
//! public key and the 32 bytes of the head's hash; for a cut, `tollgate.cut.v1`, a zero byte, the key and the SHA-256
//! of the canonical JSON `{"count", "cut_at", "head", "once", "refused", "run"}`.
//!
//! Canonical JSON is UTF-8 without white space; object keys are sorted by their bytes; numbers are integers; in
//! strings only `"`, `\` and the characters below U+0020 are escaped, as `\"`, `\\`, `\b`, `\t`, `\n`, `\f`, `\r`,
//! else as `\u00` and two lower-case hexadecimal digits. Python writes the same bytes with
//! `json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)`.
//!
//! Fields are written here in their sorted order, without a detour over a map: the ledger hashes tens of thousands a
//! second. A property test holds this to [`crate::effect::canonical_json`].

use super::{cut::Cut, record::Receipt, runs::Head};
use crate::{
    chain::Decision,
    effect::{Class, Digest, Door, Idempotency, Kind, ReceiptId, Resource, RoomId, RunId, Subject},
};
use serde::{ser::SerializeStruct as _, Serialize, Serializer};
use sha2::Digest as _;

/// The hash of a receipt; its own `hash` field is not read.
pub fn receipt(receipt: &Receipt) -> Digest {
    let Receipt {
        id,
        seq,
        run,
        room,
        kind,
        classes,
        resource,
        subject,
        door,
        decision,
        decided_by,
        reason,
        hint,
        rule,
        idempotency,
        injected,
        started_at,
        queued_us,
        decided_us,
        executed_us,
        bytes,
        times,
        request_digest,
        result_digest,
        prev,
        hash: _,
    } = receipt;
    let domain: &[u8] = match rule {
        None => b"tollgate.receipt.v1\0",
        Some(_) => b"tollgate.receipt.v2\0",
    };
    digest(
        domain,
        &SortedReceipt {
            bytes: *bytes,
            classes,
            decided_by,
            decided_us: *decided_us,
            decision: *decision,
            door: *door,
            executed_us: *executed_us,
            hint,
            id,
            idempotency: *idempotency,
            injected: *injected,
            kind: *kind,
            prev,
            queued_us: *queued_us,
            reason,
            request_digest,
            resource: SortedResource(resource),
            result_digest,
            room,
            rule: rule.as_deref(),
            run,
            seq: *seq,
            started_at,
            subject: SortedSubject::of(subject),
            times: *times,
        },
    )
}

/// The hash of a head of the host's chain; its own `hash`, key and signature are not read.
pub fn head(head: &Head) -> Digest {
    let Head { n, run, count, head, record, sealed_at, prev, hash: _, key: _, signature: _ } = head;
    let domain: &[u8] = match record {
        None => b"tollgate.head.v1\0",
        Some(_) => b"tollgate.head.v2\0",
    };
    let sealed_at = &sealed_at.to_string();
    digest(domain, &SortedHead { count: *count, head, n: *n, prev, record: record.as_ref(), run, sealed_at })
}

/// The digest of a run's record as it is stored or exported; its `effects` are not read.
pub fn run(record: &serde_json::Value) -> Digest {
    let mut record = record.clone();
    if let Some(fields) = record.as_object_mut() {
        fields.remove("effects");
    }
    // `serde_json`'s map is sorted by key.
    digest(b"tollgate.run.v1\0", &record)
}

/// The digest of a cut, which its signature covers.
pub fn cut(run: &RunId, cut: &Cut) -> Digest {
    let Cut { count, refused, once, head, cut_at, key: _, signature: _ } = cut;
    let cut_at = &cut_at.to_string();
    digest(b"", &SortedCut { count: *count, cut_at, head, once: *once, refused: *refused, run })
}

fn digest(domain: &[u8], value: &impl Serialize) -> Digest {
    let mut bytes = Vec::with_capacity(1024);
    bytes.extend_from_slice(domain);
    serde_json::to_writer(&mut bytes, value).expect("strings and integers serialise into memory");
    Digest(sha2::Sha256::digest(&bytes).into())
}

#[derive(Serialize)]
struct SortedReceipt<'a> {
    bytes: u64,
    classes: &'a [Class],
    decided_by: &'a str,
    decided_us: u64,
    decision: Decision,
    door: Door,
    executed_us: u64,
    hint: &'a str,
    id: &'a ReceiptId,
    idempotency: Idempotency,
    injected: bool,
    kind: Kind,
    prev: &'a Digest,
    queued_us: u64,
    reason: &'a str,
    request_digest: &'a Digest,
    resource: SortedResource<'a>,
    result_digest: &'a Option<Digest>,
    room: &'a Option<RoomId>,
    #[serde(skip_serializing_if = "Option::is_none")]
    rule: Option<&'a str>,
    run: &'a RunId,
    seq: u64,
    started_at: &'a str,
    subject: SortedSubject<'a>,
    times: u64,
}

#[derive(Serialize)]
struct SortedSubject<'a> {
    agent: &'a Option<String>,
    run: &'a Option<RunId>,
    uid: u32,
}

impl<'a> SortedSubject<'a> {
    fn of(subject: &'a Subject) -> SortedSubject<'a> {
        let Subject { uid, run, agent } = subject;
        SortedSubject { agent, run, uid: *uid }
    }
}

struct SortedResource<'a>(&'a Resource);

impl Serialize for SortedResource<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let kind = super::row::resource_type(self.0);
        let (key, value) = match self.0 {
            Resource::Workspace { path } | Resource::Host { path } => ("path", path),
            Resource::Run { id } => ("id", id),
            Resource::Address { to } => ("to", to),
            Resource::Syscall { name } => ("name", name),
            // The one key that sorts after `type`.
            Resource::Url { url } => {
                let mut object = serializer.serialize_struct("Resource", 2)?;
                object.serialize_field("type", kind)?;
                object.serialize_field("url", url)?;
                return object.end();
            }
        };
        let mut object = serializer.serialize_struct("Resource", 2)?;
        object.serialize_field(key, value)?;
        object.serialize_field("type", kind)?;
        object.end()
    }
}

#[derive(Serialize)]
struct SortedHead<'a> {
    count: u64,
    head: &'a Digest,
    n: u64,
    prev: &'a Digest,
    #[serde(skip_serializing_if = "Option::is_none")]
    record: Option<&'a Digest>,
    run: &'a RunId,
    sealed_at: &'a str,
}

#[derive(Serialize)]
struct SortedCut<'a> {
    count: u64,
    cut_at: &'a str,
    head: &'a Digest,
    once: u64,
    refused: u64,
    run: &'a RunId,
}
