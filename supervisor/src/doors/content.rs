//! Where the bytes of API writes wait for the world.
//!
//! An effect holds a content's digest, never its bytes ([`crate::effect::fs`]). The API door streams a body into a
//! file without a name, outside every jail, and the world reads it by the SHA-256 of what was received. It is there
//! for as long as a [`Held`] of it is; after a crash nothing is left. Reading opens nothing: a world that acts with
//! the program's ids could not open a file of the supervisor's.

use crate::effect::Digest;
use sha2::Digest as _;
use std::{
    collections::HashMap,
    fs::{self, File},
    io,
    os::unix::fs::{DirBuilderExt as _, FileExt as _, OpenOptionsExt as _},
    path::PathBuf,
    sync::{
        atomic::{AtomicU64, Ordering},
        Arc, Mutex, MutexGuard, PoisonError,
    },
};
use tokio::io::AsyncWriteExt as _;

/// The contents that wait.
#[derive(Debug)]
pub struct Contents {
    directory: PathBuf,
    held: Mutex<HashMap<Digest, Waiting>>,
    next: AtomicU64,
}

impl crate::world::fs::ContentStore for Contents {
    fn open(&self, digest: &Digest) -> io::Result<Box<dyn io::Read + Send>> {
        Ok(Box::new(self.reader(digest)?))
    }
}

#[derive(Debug)]
struct Waiting {
    file: Arc<File>,
    holders: usize,
}

impl Contents {
    /// Keeps contents on the file system of this directory, which the first content makes (mode 0700) if it is missing:
    /// most runs have none, and making and removing a directory costs every start.
    pub fn open(directory: impl Into<PathBuf>) -> Arc<Contents> {
        Arc::new(Contents { directory: directory.into(), held: Mutex::default(), next: AtomicU64::new(0) })
    }

    /// Reads the content with this digest from its start.
    ///
    /// # Errors
    /// `NotFound` when nobody holds it.
    pub fn reader(&self, digest: &Digest) -> io::Result<Reader> {
        let waiting = self.waiting();
        let file = waiting.get(digest).map(|waiting| Arc::clone(&waiting.file));
        Ok(Reader { file: file.ok_or(io::ErrorKind::NotFound)?, offset: 0 })
    }

    /// Begins a content whose bytes are still to come.
    ///
    /// # Errors
    /// As mkdir(2), open(2) and unlink(2).
    pub async fn begin(self: &Arc<Self>) -> io::Result<Arriving> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let path = self.directory.join(format!("arriving-{}-{number}", std::process::id()));
        let mut options = fs::OpenOptions::new();
        options.read(true).write(true).create_new(true).mode(0o600);
        let file = match tokio::fs::OpenOptions::from(options.clone()).open(&path).await {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                // Not its parents: a run that is over and whose folder is gone must not get a new one.
                match fs::DirBuilder::new().mode(0o700).create(&self.directory) {
                    Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
                    Ok(()) | Err(_) => {}
                }
                tokio::fs::OpenOptions::from(options).open(&path).await?
            }
            other => other?,
        };
        // O_TMPFILE would do both at once, but not on every file system (open(2)).
        fs::remove_file(&path)?;
        Ok(Arriving { contents: Arc::clone(self), file, hasher: sha2::Sha256::new(), bytes: 0 })
    }

    /// Keeps bytes that are already here.
    ///
    /// # Errors
    /// As open(2) and write(2).
    pub async fn keep(self: &Arc<Self>, bytes: &[u8]) -> io::Result<Held> {
        let mut arriving = self.begin().await?;
        arriving.write(bytes).await?;
        arriving.finish().await
    }

    // A holder that panicked left a count that is true nonetheless: every change of it is one statement.
    fn waiting(&self) -> MutexGuard<'_, HashMap<Digest, Waiting>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Reads a content, each reader at its own place.
#[derive(Debug)]
pub struct Reader {
    file: Arc<File>,
    offset: u64,
}

impl io::Read for Reader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let length = self.file.read_at(buffer, self.offset)?;
        self.offset += length as u64;
        Ok(length)
    }
}

/// A content on its way in. Dropped before it is finished, it leaves nothing.
#[derive(Debug)]
pub struct Arriving {
    contents: Arc<Contents>,
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

    /// Makes the content known by its digest.
    ///
    /// # Errors
    /// As write(2).
    pub async fn finish(mut self) -> io::Result<Held> {
        self.file.flush().await?;
        let digest = Digest(self.hasher.finalize().into());
        let file = self.file.into_std().await;
        self.contents
            .waiting()
            .entry(digest)
            .or_insert_with(|| Waiting { file: Arc::new(file), holders: 0 })
            .holders += 1;
        Ok(Held { contents: self.contents, digest, bytes: self.bytes })
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
        let mut waiting = self.contents.waiting();
        if let Some(content) = waiting.get_mut(&self.digest) {
            content.holders -= 1;
            if content.holders == 0 {
                waiting.remove(&self.digest);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read as _;

    fn read(contents: &Contents, digest: &Digest) -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        contents.reader(digest)?.read_to_end(&mut bytes)?;
        Ok(bytes)
    }

    #[tokio::test]
    async fn a_content_is_there_while_anyone_holds_it_and_gone_after() {
        let root = tempfile::tempdir().expect("a temporary directory");
        let contents = Contents::open(root.path().join("contents"));
        let first = contents.keep(b"same").await.expect("keeps");
        let second = contents.keep(b"same").await.expect("keeps");
        let digest = first.digest();
        assert_eq!((digest, first.bytes()), (Digest::of(b"same"), 4));
        drop(first);
        for _ in 0..2 {
            assert_eq!(read(&contents, &digest).expect("is there"), b"same", "each reader begins at the start");
        }
        drop(second);
        assert_eq!(read(&contents, &digest).expect_err("is gone").kind(), io::ErrorKind::NotFound);
    }

    #[tokio::test]
    async fn the_first_content_makes_the_directory_for_its_owner_alone() {
        use std::os::unix::fs::PermissionsExt as _;
        let root = tempfile::tempdir().expect("a temporary directory");
        let directory = root.path().join("contents");
        let contents = Contents::open(&directory);
        assert!(!directory.exists());
        let (first, second) = tokio::join!(contents.keep(b"one"), contents.keep(b"two"));
        assert_eq!((first.expect("keeps").bytes(), second.expect("keeps").bytes()), (3, 3));
        assert_eq!(fs::metadata(&directory).expect("is there").permissions().mode() & 0o7777, 0o700);
    }

    #[tokio::test]
    async fn a_content_makes_no_folder_for_a_run_that_has_none() {
        let root = tempfile::tempdir().expect("a temporary directory");
        let contents = Contents::open(root.path().join("run/contents"));
        let Err(error) = contents.keep(b"late").await else { panic!("has nowhere to go") };
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
        assert!(!root.path().join("run").exists());
    }

    #[tokio::test]
    async fn a_content_on_its_way_has_no_name_that_a_crash_could_leave() {
        let root = tempfile::tempdir().expect("a temporary directory");
        let contents = Contents::open(root.path());
        let mut arriving = contents.begin().await.expect("begins");
        arriving.write(b"half").await.expect("writes");
        assert_eq!(fs::read_dir(root.path()).expect("is there").count(), 0);
        drop(arriving);
        assert_eq!(read(&contents, &Digest::of(b"half")).expect_err("never came").kind(), io::ErrorKind::NotFound);
    }
}
