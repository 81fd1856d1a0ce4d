//! The high-water mark: how far the host's chain came, kept outside the database.
//!
//! Signatures show that what is there was written here; they cannot show that something is gone from the end. So the
//! newest head is written down beside the database too, in `heads.mark`, and a person can keep one elsewhere with
//! `tollgate verify --checkpoint`: the ledger must hold that head for ever after.
//!
//! A run's end does not wait for the disk, so a loss of power may take the last heads with it, but not the mark that
//! names them. Therefore the mark also says in which boot of the machine it was written, and which head was on the
//! disk for certain: of another boot only that one is insisted on.

use super::{
    key::{PublicKey, Purpose, Signature},
    runs::Head,
    store::io,
    Error, Result,
};
use crate::effect::Digest;
use rustix::fs::FlockOperation;
use serde::{Deserialize, Serialize};
use std::{
    fs,
    io::{ErrorKind, Read as _},
    os::unix::fs::{FileExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
};

/// A head by its place and hash, with the host's signature: what a later look at the ledger must find.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Checkpoint {
    /// The head's place in the host's chain, from 1.
    pub n: u64,
    /// Its hash, which covers all heads before it.
    pub hash: Digest,
    /// The key that signed it.
    pub key: Option<PublicKey>,
    /// The signature.
    pub signature: Option<Signature>,
}

impl Checkpoint {
    /// The one that this head is.
    pub fn of(head: &Head) -> Checkpoint {
        Checkpoint { n: head.n, hash: head.hash, key: head.key, signature: head.signature }
    }

    /// Whether its own key signed it.
    pub fn is_signed(&self) -> bool {
        match (&self.key, &self.signature) {
            (Some(key), Some(signature)) => key.verifies(Purpose::Seal, &self.hash, signature),
            (Some(_), None) | (None, Some(_)) | (None, None) => false,
        }
    }
}

/// What the file holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Mark {
    /// The newest head.
    pub(super) latest: Checkpoint,
    /// The newest head that was on the disk for certain.
    pub(super) durable: Option<Checkpoint>,
    /// The machine's boot, `/proc/sys/kernel/random/boot_id` (proc_sys_kernel(5)).
    boot: String,
}

impl Mark {
    /// The head that the ledger must hold, whatever happened to the machine.
    pub(super) fn insists_on(&self) -> Option<&Checkpoint> {
        if self.is_of_this_boot() {
            Some(&self.latest)
        } else {
            self.durable.as_ref()
        }
    }

    /// Whether it was written since the machine last started.
    pub(super) fn is_of_this_boot(&self) -> bool {
        self.boot == boot()
    }
}

/// The file's length, always: it is written over in place, within one sector of any disk.
const LENGTH: usize = 4096;

/// The mark beside this database; none where there is none.
pub(super) fn read(database: &Path) -> Result<Option<Mark>> {
    let path = path(database);
    let bytes = fs::File::open(&path).and_then(|file| {
        // Else half of it could be from before a writing that goes on.
        rustix::fs::flock(&file, FlockOperation::LockShared)?;
        let mut bytes = Vec::new();
        file.take(LENGTH as u64 + 1).read_to_end(&mut bytes)?;
        Ok(bytes)
    });
    match bytes {
        Ok(bytes) if is_blank(&bytes) => Ok(None),
        Ok(bytes) => parse(&path, &bytes).map(Some),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(source) => Err(io("read", &path, source)),
    }
}

/// Notes the newest head after it was committed. `holds` says whether the ledger holds a head.
///
/// A mark that the ledger contradicts is left alone: it is the evidence.
pub(super) fn note(
    database: &Path,
    latest: Checkpoint,
    durable: Option<Checkpoint>,
    holds: impl Fn(&Checkpoint) -> Result<bool>,
) -> Result<()> {
    let path = path(database);
    let file = fs::OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(&path)
        .map_err(|source| io("make", &path, source))?;
    // Released when the file is closed.
    rustix::fs::flock(&file, FlockOperation::LockExclusive).map_err(|errno| io("lock", &path, errno.into()))?;
    let mut bytes = vec![0; LENGTH];
    let length = file.read_at(&mut bytes, 0).map_err(|source| io("read", &path, source))?;
    bytes.truncate(length);
    let before = if is_blank(&bytes) { None } else { Some(parse(&path, &bytes)?) };
    if let Some(before) = before {
        if let Some(wanted) = before.insists_on() {
            if !holds(wanted)? {
                return Err(Error::BehindMark { path, n: wanted.n });
            }
        }
        // Another process sealed a later head meanwhile.
        if before.is_of_this_boot() && before.latest.n >= latest.n {
            return Ok(());
        }
    }
    let mark = Mark { latest, durable, boot: boot() };
    let mut text = serde_json::to_vec(&mark).expect("a mark holds numbers and strings");
    text.push(b'\n');
    text.resize(LENGTH, b' ');
    file.write_all_at(&text, 0).map_err(|source| io("write", &path, source))
}

/// Whether the file was just made, or a loss of power left nothing in it.
fn is_blank(bytes: &[u8]) -> bool {
    bytes.iter().all(|byte| *byte == 0)
}

fn path(database: &Path) -> PathBuf {
    database.with_file_name("heads.mark")
}

fn parse(path: &Path, bytes: &[u8]) -> Result<Mark> {
    serde_json::from_slice(bytes)
        .map_err(|error| Error::Unreadable { what: path.display().to_string(), found: error.to_string() })
}

fn boot() -> String {
    fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned()
}
