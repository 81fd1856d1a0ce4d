//! A file that holds a little of the disk back for receipts.
//!
//! Without it, a disk that fills while an effect is being done leaves that effect without a receipt. With it, such
//! receipts still fit; from then on nothing new is begun until there is space again.

use super::{store::io, Error, Result};
use std::{
    fs,
    io::ErrorKind,
    os::{
        fd::AsFd as _,
        unix::fs::{MetadataExt as _, OpenOptionsExt as _},
    },
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
};

/// How much is held back: some thousand receipts of what was begun before the disk was found full.
const BYTES: i64 = 1 << 20;

/// The file, and whether it was needed.
pub(super) struct Reserve {
    path: PathBuf,
    /// Why nothing new may begin.
    short: Mutex<Option<Error>>,
}

impl Reserve {
    pub(super) fn beside(database: &Path) -> Reserve {
        Reserve { path: database.with_file_name("reserve"), short: Mutex::new(None) }
    }

    /// Holds the space, if it is not held.
    pub(super) fn hold(&self) -> Result<()> {
        if fs::metadata(&self.path).is_ok_and(|found| found.size() >= BYTES as u64) {
            return Ok(());
        }
        let file = fs::OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(&self.path)
            .map_err(|source| io("make", &self.path, source))?;
        nix::fcntl::posix_fallocate(file.as_fd(), 0, BYTES).map_err(|errno| {
            // Half of it would be space taken for nothing; that the disk is full is the error to tell.
            let _ = fs::remove_file(&self.path);
            io("hold space for receipts in", &self.path, errno.into())
        })
    }

    /// Holds the space at the start. On a disk without room for it nothing new may begin: its receipts would not fit
    /// either. Where space cannot be held for another reason, the receipts may still fit.
    pub(super) fn begin(&self) {
        let Err(error) = self.hold() else { return };
        match error {
            Error::Io { source, .. } if matches!(source.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded) => {
                let short = Error::BlobDiskFull { path: self.path.clone(), source };
                *self.short.lock().unwrap_or_else(PoisonError::into_inner) = Some(short);
            }
            error => tracing::warn!(%error, "no space is held back for receipts"),
        }
    }

    /// Gives the space to the receipts that are waiting; says whether there was any to give.
    pub(super) fn release(&self, why: &Error) -> bool {
        *self.short.lock().unwrap_or_else(PoisonError::into_inner) = Some(why.clone());
        fs::remove_file(&self.path).is_ok()
    }

    /// Whether something new may begin: not after the space was needed, until it can be held again.
    pub(super) fn check(&self) -> Result<()> {
        let mut short = self.short.lock().unwrap_or_else(PoisonError::into_inner);
        match short.take() {
            None => Ok(()),
            Some(error) => self.hold().map_err(|_still_full| {
                *short = Some(error.clone());
                error
            }),
        }
    }
}
