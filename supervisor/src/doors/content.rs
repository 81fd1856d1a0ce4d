//! Where the bytes of API writes wait for the world.
//!
//! An effect holds a content's digest, never its bytes ([`crate::effect::fs`]). The API door streams a body into a
//! file of one directory, outside every jail, and names it by the SHA-256 of what it received, in hexadecimal; the
//! world opens the file of that name. The file is there for as long as a [`Held`] of it is.

use crate::effect::Digest;
use sha2::Digest as _;
use std::{
    collections::HashMap,
    fs, io,
    os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
    sync::{
        atomic::{AtomicU64, Ordering},
        Arc, Mutex, MutexGuard, PoisonError,
    },
};
use tokio::io::AsyncWriteExt as _;

/// The directory in which contents wait.
#[derive(Debug)]
pub struct Contents {
    directory: PathBuf,
    held: Mutex<HashMap<Digest, usize>>,
    next: AtomicU64,
}

impl Contents {
    /// Opens the directory, making it (mode 0700) if it is missing.
    ///
    /// # Errors
    /// As mkdir(2).
    pub fn open(directory: impl Into<PathBuf>) -> io::Result<Arc<Contents>> {
        let directory = directory.into();
        fs::DirBuilder::new().recursive(true).mode(0o700).create(&directory)?;
        Ok(Arc::new(Contents { directory, held: Mutex::default(), next: AtomicU64::new(0) }))
    }

    /// The directory. A content is the file in it whose name is the digest in hexadecimal.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Where the content with this digest is, while somebody holds it.
    pub fn path(&self, digest: &Digest) -> PathBuf {
        self.directory.join(digest.to_string())
    }

    /// Begins a content whose bytes are still to come.
    ///
    /// # Errors
    /// As open(2).
    pub async fn begin(self: &Arc<Self>) -> io::Result<Arriving> {
        let name = format!("arriving-{}", self.next.fetch_add(1, Ordering::Relaxed));
        let unfinished = Unfinished(self.directory.join(name));
        let mut options = fs::OpenOptions::new();
        options.write(true).create_new(true).mode(0o600);
        let file = tokio::fs::OpenOptions::from(options).open(&unfinished.0).await?;
        Ok(Arriving { contents: Arc::clone(self), unfinished, file, hasher: sha2::Sha256::new(), bytes: 0 })
    }

    /// Keeps bytes that are already here.
    ///
    /// # Errors
    /// As open(2), write(2) and rename(2).
    pub async fn keep(self: &Arc<Self>, bytes: &[u8]) -> io::Result<Held> {
        let mut arriving = self.begin().await?;
        arriving.write(bytes).await?;
        arriving.finish().await
    }

    // A holder that panicked left a count that is true nonetheless: every change of it is one statement.
    fn counts(&self) -> MutexGuard<'_, HashMap<Digest, usize>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A content on its way in. Dropped before it is finished, it leaves nothing.
#[derive(Debug)]
pub struct Arriving {
    contents: Arc<Contents>,
    unfinished: Unfinished,
    file: tokio::fs::File,
    hasher: sha2::Sha256,
    bytes: u64,
}

impl Arriving {
    /// Appends a piece.
    ///
    /// # Errors
    /// As write(2).
    pub async fn write(&mut self, piece: &[u8]) -> io::Result<()> {
        self.hasher.update(piece);
        self.bytes += piece.len() as u64;
        self.file.write_all(piece).await
    }

    /// Names the content by its digest.
    ///
    /// # Errors
    /// As write(2) and rename(2).
    pub async fn finish(mut self) -> io::Result<Held> {
        self.file.flush().await?;
        let digest = Digest(self.hasher.finalize().into());
        let mut counts = self.contents.counts();
        // Equal contents have equal names: replacing one by the other changes nothing for who has it open.
        fs::rename(&self.unfinished.0, self.contents.path(&digest))?;
        *counts.entry(digest).or_insert(0) += 1;
        drop(counts);
        Ok(Held { contents: Arc::clone(&self.contents), digest, bytes: self.bytes })
    }
}

#[derive(Debug)]
struct Unfinished(PathBuf);

impl Drop for Unfinished {
    fn drop(&mut self) {
        // After a rename there is nothing here, which is what is wanted.
        let _ = fs::remove_file(&self.0);
    }
}

/// A content that is there until this is dropped.
#[derive(Debug)]
pub struct Held {
    contents: Arc<Contents>,
    digest: Digest,
    bytes: u64,
}

impl Held {
    /// SHA-256 of the content.
    pub fn digest(&self) -> Digest {
        self.digest
    }

    /// Its length.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let mut counts = self.contents.counts();
        if let Some(count) = counts.get_mut(&self.digest) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&self.digest);
                let _ = fs::remove_file(self.contents.path(&self.digest));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entries(contents: &Contents) -> usize {
        fs::read_dir(contents.directory()).expect("is there").count()
    }

    #[tokio::test]
    async fn a_content_is_there_while_anyone_holds_it_and_gone_after() {
        let root = tempfile::tempdir().expect("a temporary directory");
        let contents = Contents::open(root.path().join("contents")).expect("opens");
        let first = contents.keep(b"same").await.expect("keeps");
        let second = contents.keep(b"same").await.expect("keeps");
        assert_eq!(first.digest(), Digest::of(b"same"));
        assert_eq!(first.bytes(), 4);
        drop(first);
        assert_eq!(fs::read(contents.path(&second.digest())).expect("is there"), b"same");
        drop(second);
        assert_eq!(entries(&contents), 0);
    }

    #[tokio::test]
    async fn a_content_that_never_ends_leaves_nothing() {
        let root = tempfile::tempdir().expect("a temporary directory");
        let contents = Contents::open(root.path()).expect("opens");
        let mut arriving = contents.begin().await.expect("begins");
        arriving.write(b"half").await.expect("writes");
        assert_eq!(entries(&contents), 1);
        drop(arriving);
        assert_eq!(entries(&contents), 0);
    }
}
