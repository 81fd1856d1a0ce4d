//! Contents by their digest: `blobs/ab/cdef…`.

use super::{store::io, Error, Ledger, Result};
use crate::effect::Digest;
use std::{
    fs,
    io::{ErrorKind, Write as _},
    os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
    sync::Arc,
};

impl Ledger {
    /// Stores these bytes and gives their digest. The same bytes are stored once.
    ///
    /// # Errors
    ///
    /// When they could not be written; then nothing is there under their digest.
    pub fn put_blob(&self, bytes: &[u8]) -> Result<Digest> {
        let digest = Digest::of(bytes);
        let path = self.blob_path(&digest);
        // A file cut short by a loss of power has another length, and is written again.
        if fs::metadata(&path).is_ok_and(|found| found.len() == bytes.len() as u64) {
            return Ok(digest);
        }
        let folder = path.parent().unwrap_or(&path);
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(folder)
            .map_err(|source| io("make the blobs' directory", folder, source))?;
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let next = NEXT.fetch_add(1, Ordering::Relaxed);
        let temporary = folder.join(format!("new-{}-{next}-{:x}", std::process::id(), self.clock().random()));
        let written = write(&temporary, bytes)
            .and_then(|()| fs::rename(&temporary, &path).map_err(|source| full_or("store", &path, source)));
        if written.is_err() {
            // What cannot be removed either is swept by its name, `new-…`; the first error is the one to tell.
            let _ = fs::remove_file(&temporary);
        }
        written.map(|()| digest)
    }

    /// The bytes with this digest, checked against it.
    ///
    /// # Errors
    ///
    /// [`Error::BlobMissing`] and [`Error::BlobDamaged`]; never other or fewer bytes.
    pub fn blob(&self, digest: &Digest) -> Result<Vec<u8>> {
        let path = self.blob_path(digest);
        let bytes = match fs::read(&path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == ErrorKind::NotFound => return Err(Error::BlobMissing(*digest)),
            Err(source) => return Err(io("read", &path, source)),
        };
        if Digest::of(&bytes) == *digest {
            Ok(bytes)
        } else {
            Err(Error::BlobDamaged { digest: *digest, path })
        }
    }

    /// The digests of every blob that is stored, in their order.
    ///
    /// # Errors
    ///
    /// When the store cannot be listed.
    pub fn blobs(&self) -> Result<Vec<Digest>> {
        let store = self.state().join("blobs");
        let names = |folder: &Path| -> Result<Vec<std::ffi::OsString>> {
            let listed = match fs::read_dir(folder) {
                Ok(entries) => entries.map(|entry| entry.map(|entry| entry.file_name())).collect(),
                Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => Ok(Vec::new()),
                Err(error) => Err(error),
            };
            listed.map_err(|source| io("list", folder, source))
        };
        let mut found = Vec::new();
        for folder in names(&store)? {
            for name in names(&store.join(&folder))? {
                // Anything else, such as what a killed process was writing, is no blob.
                let digest = folder.to_str().zip(name.to_str()).map(|(folder, name)| format!("{folder}{name}"));
                found.extend(digest.and_then(|digest| digest.parse::<Digest>().ok()));
            }
        }
        found.sort_unstable();
        Ok(found)
    }

    /// Where the blob with this digest lies, or would lie.
    pub fn blob_path(&self, digest: &Digest) -> PathBuf {
        let name = digest.to_string();
        let (folder, rest) = name.split_at(2);
        self.state().join("blobs").join(folder).join(rest)
    }
}

fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    let mut file = fs::OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)
        .map_err(|source| full_or("make", path, source))?;
    file.write_all(bytes).map_err(|source| full_or("write", path, source))
}

fn full_or(doing: &'static str, path: &Path, source: std::io::Error) -> Error {
    match source.kind() {
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => {
            Error::BlobDiskFull { path: path.to_owned(), source: Arc::new(source) }
        }
        _ => io(doing, path, source),
    }
}
