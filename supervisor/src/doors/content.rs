//! Where the bytes of API writes wait for the world.
//!
//! An effect holds a content's digest, never its bytes ([`crate::effect::fs`]). The API door streams a body into
//! memory, or one longer than [`IN_MEMORY`] into a file without a name, outside every jail, and the world reads it by
//! the SHA-256 of what was received. It is there for as long as a [`Held`] of it is; after a crash nothing is left.
//! Reading opens nothing: a world that acts with the program's ids could not open a file of the supervisor's.

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

/// The most bytes of one content that are kept in memory. As many connections as a door serves hold 8 MiB at most, in
/// what arrives and what waits.
pub const IN_MEMORY: usize = 64 * 1024;

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
    content: Content,
    holders: usize,
}

/// Where a content's bytes are.
#[derive(Clone, Debug)]
enum Content {
    Memory(Arc<Vec<u8>>),
    File(Arc<File>),
}

impl Contents {
    /// Keeps contents on the file system of this directory, which the first long content makes (mode 0700) if it is
    /// missing: most runs have none, and making and removing a directory costs every start.
    pub fn open(directory: impl Into<PathBuf>) -> Arc<Contents> {
        Arc::new(Contents { directory: directory.into(), held: Mutex::default(), next: AtomicU64::new(0) })
    }

    /// Reads the content with this digest from its start.
    ///
    /// # Errors
    /// `NotFound` when nobody holds it.
    pub fn reader(&self, digest: &Digest) -> io::Result<Reader> {
        let waiting = self.waiting();
        let content = waiting.get(digest).map(|waiting| waiting.content.clone());
        Ok(Reader { content: content.ok_or(io::ErrorKind::NotFound)?, offset: 0 })
    }

    /// Begins a content whose bytes are still to come.
    pub fn begin(self: &Arc<Self>) -> Arriving {
        let place = Arrived::Memory(Vec::new());
        Arriving { contents: Arc::clone(self), place, hasher: sha2::Sha256::new(), bytes: 0 }
    }

    /// A file without a name, for a long content.
    async fn file(&self) -> io::Result<tokio::fs::File> {
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
        Ok(file)
    }

    /// Keeps bytes that are already here.
    ///
    /// # Errors
    /// As open(2) and write(2).
    pub async fn keep(self: &Arc<Self>, bytes: &[u8]) -> io::Result<Held> {
        let mut arriving = self.begin();
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
    content: Content,
    offset: u64,
}

impl io::Read for Reader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let length = match &self.content {
            Content::File(file) => file.read_at(buffer, self.offset)?,
            Content::Memory(bytes) => {
                let start = usize::try_from(self.offset).unwrap_or(usize::MAX);
                let mut rest = bytes.get(start..).unwrap_or_default();
                rest.read(buffer)?
            }
        };
        self.offset += length as u64;
        Ok(length)
    }
}

/// A content on its way in. Dropped before it is finished, it leaves nothing.
#[derive(Debug)]
pub struct Arriving {
    contents: Arc<Contents>,
    place: Arrived,
    hasher: sha2::Sha256,
    bytes: u64,
}

/// Where a content's bytes go as they come.
#[derive(Debug)]
enum Arrived {
    Memory(Vec<u8>),
    File(tokio::fs::File),
}

impl Arriving {
    /// Appends a piece.
    ///
    /// # Errors
    /// As mkdir(2), open(2), unlink(2) and write(2).
    pub async fn write(&mut self, piece: &[u8]) -> io::Result<()> {
        self.hasher.update(piece);
        self.bytes += piece.len() as u64;
        match &mut self.place {
            Arrived::File(file) => file.write_all(piece).await,
            Arrived::Memory(bytes) if bytes.len() + piece.len() <= IN_MEMORY => {
                bytes.extend_from_slice(piece);
                Ok(())
            }
            Arrived::Memory(bytes) => {
                let mut file = self.contents.file().await?;
                file.write_all(bytes).await?;
                file.write_all(piece).await?;
                self.place = Arrived::File(file);
                Ok(())
            }
        }
    }

    /// Makes the content known by its digest.
    ///
    /// # Errors
    /// As write(2).
    pub async fn finish(self) -> io::Result<Held> {
        let content = match self.place {
            Arrived::Memory(bytes) => Content::Memory(Arc::new(bytes)),
            Arrived::File(mut file) => {
                file.flush().await?;
                Content::File(Arc::new(file.into_std().await))
            }
        };
        let digest = Digest(self.hasher.finalize().into());
        self.contents.waiting().entry(digest).or_insert_with(|| Waiting { content, holders: 0 }).holders += 1;
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
        for length in [4, IN_MEMORY, IN_MEMORY + 1] {
            let content = vec![b's'; length];
            let first = contents.keep(&content).await.expect("keeps");
            let second = contents.keep(&content).await.expect("keeps");
            let digest = first.digest();
            assert_eq!((digest, first.bytes()), (Digest::of(&content), length as u64));
            drop(first);
            for _ in 0..2 {
                assert_eq!(read(&contents, &digest).expect("is there"), content, "each reader begins at the start");
            }
            drop(second);
            assert_eq!(read(&contents, &digest).expect_err("is gone").kind(), io::ErrorKind::NotFound);
        }
    }

    /// In whatever pieces it comes: what was in memory goes into the file before the rest.
    #[tokio::test]
    async fn a_content_that_grows_out_of_memory_is_whole() {
        let root = tempfile::tempdir().expect("a temporary directory");
        let contents = Contents::open(root.path().join("contents"));
        let content: Vec<u8> = (0..3 * IN_MEMORY).map(|byte| byte as u8).collect();
        let mut arriving = contents.begin();
        for piece in content.chunks(IN_MEMORY / 2 + 7) {
            arriving.write(piece).await.expect("writes");
        }
        let held = arriving.finish().await.expect("finishes");
        assert_eq!(held.digest(), Digest::of(&content));
        assert_eq!(read(&contents, &held.digest()).expect("is there"), content);
    }

    #[tokio::test]
    async fn the_first_long_content_makes_the_directory_for_its_owner_alone() {
        use std::os::unix::fs::PermissionsExt as _;
        let root = tempfile::tempdir().expect("a temporary directory");
        let directory = root.path().join("contents");
        let contents = Contents::open(&directory);
        assert!(!directory.exists());
        contents.keep(b"short").await.expect("keeps");
        assert!(!directory.exists());
        let (one, two) = (vec![b'1'; IN_MEMORY + 1], vec![b'2'; IN_MEMORY + 2]);
        let (first, second) = tokio::join!(contents.keep(&one), contents.keep(&two));
        let lengths = (first.expect("keeps").bytes(), second.expect("keeps").bytes());
        assert_eq!(lengths, (IN_MEMORY as u64 + 1, IN_MEMORY as u64 + 2));
        assert_eq!(fs::metadata(&directory).expect("is there").permissions().mode() & 0o7777, 0o700);
    }

    #[tokio::test]
    async fn a_content_makes_no_folder_for_a_run_that_has_none() {
        let root = tempfile::tempdir().expect("a temporary directory");
        let contents = Contents::open(root.path().join("run/contents"));
        let Err(error) = contents.keep(&vec![b'l'; IN_MEMORY + 1]).await else { panic!("has nowhere to go") };
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
        assert!(!root.path().join("run").exists());
    }

    #[tokio::test]
    async fn a_content_on_its_way_has_no_name_that_a_crash_could_leave() {
        let root = tempfile::tempdir().expect("a temporary directory");
        let contents = Contents::open(root.path());
        let mut arriving = contents.begin();
        let half = vec![b'h'; IN_MEMORY + 1];
        arriving.write(&half).await.expect("writes");
        assert!(matches!(arriving.place, Arrived::File(_)));
        assert_eq!(fs::read_dir(root.path()).expect("is there").count(), 0);
        drop(arriving);
        assert_eq!(read(&contents, &Digest::of(&half)).expect_err("never came").kind(), io::ErrorKind::NotFound);
    }
}
