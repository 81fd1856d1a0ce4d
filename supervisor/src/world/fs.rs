//! Does the file effects of the API door, on the workspace as the run's program sees it.
//!
//! Every path resolves beneath the workspace's root (`openat2(2)`, RESOLVE_BENEATH and RESOLVE_NO_MAGICLINKS): links
//! within are followed, none leads out, and the last name of what is written or removed is never followed. What is
//! read must be a regular file, so no FIFO or device can hold the supervisor up.

use crate::{
    chain::{Answer, BoxFuture, World},
    effect::{fs, Digest, Effect, Request},
    room::{
        path::{escape_controls, unspell, unspell_any},
        tree,
    },
};
use rustix::{
    fs::{self as kernel, AtFlags, FileType, Mode, OFlags, RenameFlags, ResolveFlags},
    io::Errno,
};
use serde_json::json;
use std::{
    ffi::{OsStr, OsString},
    fs::File,
    io::{self, Read, Write},
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::{ffi::OsStrExt, fs::FileExt},
    },
    path::{Path, PathBuf},
    sync::{
        atomic::{AtomicU64, Ordering},
        Arc, Mutex, MutexGuard, PoisonError, TryLockError,
    },
};

use tollgate_shim::jail::rename::move_piece_by_piece;

/// The most bytes that one `fs/read` answers with.
pub const MAX_READ_BYTES: u64 = 16 << 20;

/// The most entries that one `fs/list` answers with.
pub const MAX_LIST_ENTRIES: usize = 100_000;

/// The most entries that one `fs/delete` removes.
pub const MAX_DELETE_ENTRIES: usize = 1_000_000;

/// What is longer than this is read and written apart from the caller's thread, which others wait for too.
const BRIEF_BYTES: u64 = 64 * 1024;

/// How often a resolution that raced with a rename is tried again (openat2(2), EAGAIN).
const RESOLVE_ATTEMPTS: usize = 64;

/// Where the bytes of an `fs/write` are: an effect holds their digest only.
pub trait ContentStore: Send + Sync {
    /// Opens the content with this digest for reading from its start.
    ///
    /// # Errors
    /// `NotFound` when nobody brought it.
    fn open(&self, digest: &Digest) -> io::Result<Box<dyn Read + Send>>;
}

/// Contents held in memory, by digest; taken out when they are written.
#[derive(Default)]
pub struct MemoryContents {
    held: Mutex<std::collections::HashMap<Digest, Arc<Vec<u8>>>>,
}

impl MemoryContents {
    /// Puts a content in and gives its digest.
    pub fn put(&self, content: Vec<u8>) -> Digest {
        let digest = Digest::of(&content);
        self.held.lock().unwrap_or_else(PoisonError::into_inner).insert(digest, Arc::new(content));
        digest
    }

    /// Drops a content, when its effect has been answered.
    pub fn remove(&self, digest: &Digest) {
        self.held.lock().unwrap_or_else(PoisonError::into_inner).remove(digest);
    }
}

impl ContentStore for MemoryContents {
    fn open(&self, digest: &Digest) -> io::Result<Box<dyn Read + Send>> {
        let content = self.held.lock().unwrap_or_else(PoisonError::into_inner).get(digest).cloned();
        match content {
            Some(content) => Ok(Box::new(io::Cursor::new(Shared(content)))),
            None => Err(io::ErrorKind::NotFound.into()),
        }
    }
}

/// Lets a cursor read a shared content.
struct Shared(Arc<Vec<u8>>);

impl AsRef<[u8]> for Shared {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

/// The user and group that a jail's files carry on the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    /// The user.
    pub uid: u32,
    /// The group.
    pub gid: u32,
}

/// The file effects of one run.
#[derive(Clone)]
pub struct WorkspaceFiles {
    inner: Arc<Inner>,
}

struct Inner {
    root: OwnedFd,
    contents: Arc<dyn ContentStore>,
    identity: Option<Identity>,
    /// One writer at a time, so that what `expect` compared is what is replaced, among all who come by this door.
    writing: Mutex<()>,
    temporaries: AtomicU64,
}

impl WorkspaceFiles {
    /// File effects beneath this directory, which is the merged workspace as the run's program has it mounted.
    ///
    /// With an identity, every call is made as that user (setfsuid(2)), for a jail whose ids are not the supervisor's:
    /// what is made is the program's, and nothing is reached that the program could not reach.
    pub fn new(root: OwnedFd, contents: Arc<dyn ContentStore>, identity: Option<Identity>) -> WorkspaceFiles {
        WorkspaceFiles {
            inner: Arc::new(Inner {
                root,
                contents,
                identity,
                writing: Mutex::new(()),
                temporaries: AtomicU64::new(1),
            }),
        }
    }

    /// Does one file effect, blocking. Any other family fails.
    pub fn perform(&self, effect: &Effect) -> Answer {
        let all = || self.inner.writing.lock().unwrap_or_else(PoisonError::into_inner);
        self.perform_by(effect, u64::MAX, || Some(all())).unwrap_or_else(|| {
            // Only what is too long or has to wait is left undone.
            Answer::failed(format!("{} on `{}` was left undone", effect.kind, effect.resource), "ask again")
        })
    }

    /// Does a file effect that takes no longer than handing it to another thread would; none where it may, and then
    /// nothing was done.
    fn perform_brief(&self, effect: &Effect) -> Option<Answer> {
        let brief = match &effect.request {
            Request::Fs(fs::Request::Read { .. }) => true,
            // A whole file may have to be read to know whether it is what is expected.
            Request::Fs(fs::Request::Write { expect: Some(fs::Expect::File { .. }), .. }) => false,
            Request::Fs(fs::Request::Write { node, .. }) => match node {
                fs::Node::File { bytes, .. } => *bytes <= BRIEF_BYTES,
                fs::Node::Directory { .. } | fs::Node::Link { .. } | fs::Node::Attributes { .. } => true,
            },
            Request::Fs(fs::Request::List { .. } | fs::Request::Delete { .. } | fs::Request::Move { .. })
            | Request::Run(_)
            | Request::Jail(_)
            | Request::Api(_)
            | Request::Program(_)
            | Request::Net(_)
            | Request::Http(_) => false,
        };
        let free = || match self.inner.writing.try_lock() {
            Ok(guard) => Some(guard),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        };
        brief.then(|| self.perform_by(effect, BRIEF_BYTES, free)).flatten()
    }

    /// Does one file effect; none where it reads more than this many bytes, or the writers' turn does not come.
    fn perform_by<'a>(
        &'a self,
        effect: &Effect,
        most: u64,
        turn: impl FnOnce() -> Option<MutexGuard<'a, ()>>,
    ) -> Option<Answer> {
        let _as_program = match self.inner.identity.map(AsProgram::enter).transpose() {
            Ok(guard) => guard,
            Err(error) => {
                let hint = "start the run as its owner";
                return Some(failure(effect.kind.name(), &effect.resource.to_string(), &error, hint));
            }
        };
        let request = match &effect.request {
            Request::Fs(request) => request,
            Request::Run(_)
            | Request::Jail(_)
            | Request::Api(_)
            | Request::Program(_)
            | Request::Net(_)
            | Request::Http(_) => {
                return Some(Answer::failed(
                    format!("{} on `{}` is no file effect", effect.kind, escape_controls(&effect.resource.to_string())),
                    "this is a bug of Tollgate; please report it",
                ))
            }
        };
        // Held to the end of its arm, which is the end of the effect.
        match request {
            fs::Request::Read { path, offset, limit } => self.inner.read_up_to(path, *offset, *limit, most),
            fs::Request::List { path } => Some(self.inner.list(path)),
            fs::Request::Write { path, node, expect } => {
                let _one_writer = turn()?;
                Some(self.inner.write(path, node, expect.as_ref()))
            }
            fs::Request::Delete { path, expect } => {
                let _one_writer = turn()?;
                Some(self.inner.delete(path, expect.as_ref()))
            }
            fs::Request::Move { path, to } => {
                let _one_writer = turn()?;
                Some(self.inner.rename(path, to))
            }
        }
    }
}

impl World for WorkspaceFiles {
    fn execute<'a>(&'a self, effect: &'a Effect) -> BoxFuture<'a, Answer> {
        if let Some(answer) = self.perform_brief(effect) {
            return Box::pin(std::future::ready(answer));
        }
        let (files, copy) = (self.clone(), effect.clone());
        Box::pin(async move {
            let work = tokio::task::spawn_blocking(move || files.perform(&copy));
            work.await
                .unwrap_or_else(|error| Answer::failed(format!("the file effect was stopped: {error}"), "ask again"))
        })
    }
}

/// This thread's file system ids are the program's until this is dropped.
struct AsProgram;

impl AsProgram {
    fn enter(identity: Identity) -> io::Result<AsProgram> {
        use nix::unistd::{setfsgid, setfsuid, Gid, Uid};
        setfsgid(Gid::from_raw(identity.gid));
        setfsuid(Uid::from_raw(identity.uid));
        let guard = AsProgram;
        // The calls say nothing but the id before: an id that cannot be one gives the present id (setfsuid(2)).
        let now = (setfsuid(Uid::from_raw(u32::MAX)).as_raw(), setfsgid(Gid::from_raw(u32::MAX)).as_raw());
        if now != (identity.uid, identity.gid) {
            return Err(Errno::PERM.into());
        }
        Ok(guard)
    }
}

impl Drop for AsProgram {
    fn drop(&mut self) {
        use nix::unistd::{getegid, geteuid, setfsgid, setfsuid};
        setfsuid(geteuid());
        setfsgid(getegid());
    }
}

fn failure(kind: &str, path: &str, error: &io::Error, hint: &str) -> Answer {
    let errno = error.raw_os_error().map_or("EIO", errno_name);
    let object = if path.is_empty() { "." } else { path };
    let mut answer = Answer::failed(format!("{kind} `{}`: {errno}: {error}", escape_controls(object)), hint);
    answer.value = json!({ "error": { "kind": kind, "object": object, "errno": errno } });
    answer
}

fn mismatch(kind: &str, path: &str, reason: &str) -> Answer {
    let mut answer = Answer::failed(
        format!("{kind} `{}`: {reason}; nothing was changed", escape_controls(path)),
        "read it again and decide anew",
    );
    answer.value = json!({ "error": { "kind": kind, "object": path, "errno": "ESTALE", "conflict": true } });
    answer
}

/// The names of the errors that file calls give (errno(3)); any other is told as EIO, and its text says more.
fn errno_name(errno: i32) -> &'static str {
    match errno {
        libc::EPERM => "EPERM",
        libc::ENOENT => "ENOENT",
        libc::EACCES => "EACCES",
        libc::EEXIST => "EEXIST",
        libc::EXDEV => "EXDEV",
        libc::ENOTDIR => "ENOTDIR",
        libc::EISDIR => "EISDIR",
        libc::EINVAL => "EINVAL",
        libc::EMFILE => "EMFILE",
        libc::EFBIG => "EFBIG",
        libc::ENOSPC => "ENOSPC",
        libc::EROFS => "EROFS",
        libc::ENAMETOOLONG => "ENAMETOOLONG",
        libc::ENOTEMPTY => "ENOTEMPTY",
        libc::ELOOP => "ELOOP",
        libc::EDQUOT => "EDQUOT",
        libc::EAGAIN => "EAGAIN",
        libc::EBUSY => "EBUSY",
        libc::EOVERFLOW => "EOVERFLOW",
        libc::EOPNOTSUPP => "EOPNOTSUPP",
        _ => "EIO",
    }
}

const HINT: &str = "look at the path with fs/list; it must lie in the workspace";

impl Inner {
    /// Opens beneath the root; links on the way may lead anywhere beneath it, the last name's only where asked.
    fn open(&self, path: &Path, flags: OFlags) -> io::Result<OwnedFd> {
        let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
        let mut attempts = 0;
        loop {
            match kernel::openat2(&self.root, path, flags | OFlags::CLOEXEC, Mode::empty(), resolve) {
                Err(Errno::AGAIN | Errno::INTR) if attempts < RESOLVE_ATTEMPTS => attempts += 1,
                other => return Ok(other?),
            }
        }
    }

    fn parent<'p>(&self, path: &'p Path) -> io::Result<(OwnedFd, &'p OsStr)> {
        let name = path.file_name().ok_or(Errno::INVAL)?;
        let parent = path.parent().unwrap_or(Path::new(""));
        Ok((self.open(parent, OFlags::PATH | OFlags::DIRECTORY)?, name))
    }

    /// Reads at most so many bytes; none where it would be more.
    fn read_up_to(&self, text: &str, offset: u64, limit: u64, most: u64) -> Option<Answer> {
        let kind = "fs/read";
        let work = || -> io::Result<Option<Answer>> {
            let path = parsed(text)?;
            // A handle first: opening a device or FIFO for reading would already act on it.
            let handle = self.open(&path, OFlags::PATH)?;
            let stat = kernel::fstat(&handle)?;
            match tree::kind_of(&stat) {
                FileType::RegularFile => {}
                FileType::Directory => return Err(Errno::ISDIR.into()),
                _ => return Err(Errno::INVAL.into()),
            }
            let file = File::from(self.open(&path, OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY)?);
            let stat = kernel::fstat(&file)?;
            if tree::kind_of(&stat) != FileType::RegularFile {
                return Err(Errno::INVAL.into());
            }
            let size = u64::try_from(stat.st_size).unwrap_or(0);
            let wanted = limit.min(MAX_READ_BYTES).min(size.saturating_sub(offset));
            if wanted > most {
                return Ok(None);
            }
            let mut body = vec![0; usize::try_from(wanted).map_err(|_| Errno::FBIG)?];
            let mut done = 0;
            while done < body.len() {
                match file.read_at(&mut body[done..], offset.saturating_add(done as u64)) {
                    Ok(0) => break,
                    Ok(length) => done += length,
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Err(error) => return Err(error),
                }
            }
            body.truncate(done);
            let end = offset.saturating_add(done as u64) >= size;
            let mut answer =
                Answer::done(json!({ "size": size, "offset": offset, "bytes": done, "end": end }), done as u64);
            answer.digest = Some(Digest::of(&body));
            answer.body = Some(body);
            Ok(Some(answer))
        };
        work().unwrap_or_else(|error| Some(failure(kind, text, &error, HINT)))
    }

    fn list(&self, text: &str) -> Answer {
        let kind = "fs/list";
        let work = || -> io::Result<Answer> {
            let path = parsed(text)?;
            let directory = self.open(&path, OFlags::RDONLY | OFlags::DIRECTORY)?;
            let mut names = Vec::new();
            let mut truncated = false;
            for entry in kernel::Dir::read_from(&directory)? {
                let entry = entry?;
                let name = entry.file_name().to_bytes();
                if matches!(name, b"." | b"..") {
                    continue;
                }
                if names.len() == MAX_LIST_ENTRIES {
                    truncated = true;
                    break;
                }
                names.push(OsString::from(OsStr::from_bytes(name)));
            }
            names.sort_unstable();
            let mut entries = Vec::with_capacity(names.len());
            for name in names {
                // Gone between listing and looking: as if listed a moment later.
                let Ok(stat) = kernel::statat(&directory, &name, AtFlags::SYMLINK_NOFOLLOW) else { continue };
                let kind = match tree::kind_of(&stat) {
                    FileType::RegularFile => "file",
                    FileType::Directory => "directory",
                    FileType::Symlink => "link",
                    _ => "special",
                };
                entries.push(json!({
                    "name": crate::room::path::spell(Path::new(&name)),
                    "type": kind,
                    "size": stat.st_size,
                    "mode": tree::permissions(&stat),
                    "mtime_ns": tree::mtime_ns(&stat),
                }));
            }
            let value = json!({ "entries": entries, "truncated": truncated });
            let digest = Digest::of(&crate::effect::canonical_json(&value));
            let mut answer = Answer::done(value, 0);
            answer.digest = Some(digest);
            Ok(answer)
        };
        work().unwrap_or_else(|error| failure(kind, text, &error, HINT))
    }

    /// Changes what is at a path, if it is what is expected there. The caller has the writers' turn.
    fn change(
        &self,
        kind: &'static str,
        text: &str,
        expect: Option<&fs::Expect>,
        work: impl FnOnce(&OwnedFd, &OsStr) -> io::Result<Answer>,
    ) -> Answer {
        let checked = || {
            let path = parsed(text)?;
            let (parent, name) = self.parent(&path)?;
            match met(parent.as_fd(), name, expect)? {
                Ok(()) => work(&parent, name),
                Err(reason) => Ok(mismatch(kind, text, reason)),
            }
        };
        checked().unwrap_or_else(|error: io::Error| failure(kind, text, &error, HINT))
    }

    fn write(&self, text: &str, node: &fs::Node, expect: Option<&fs::Expect>) -> Answer {
        self.change("fs/write", text, expect, |parent, name| {
            let flags =
                if matches!(expect, Some(fs::Expect::Absent)) { RenameFlags::NOREPLACE } else { RenameFlags::empty() };
            match node {
                fs::Node::File { digest, bytes, mode } => {
                    let temporary = self.temporary();
                    let placed = self
                        .fill(parent.as_fd(), &temporary, digest, *bytes, *mode)
                        .and_then(|()| put_in_place(parent.as_fd(), &temporary, name, flags));
                    if let Err(error) = placed {
                        let _ = kernel::unlinkat(parent, &temporary, AtFlags::empty());
                        return Err(error);
                    }
                    let mut answer = Answer::done(json!({ "path": text, "bytes": bytes }), *bytes);
                    answer.digest = Some(*digest);
                    Ok(answer)
                }
                fs::Node::Directory { mode } => {
                    match kernel::mkdirat(parent, name, Mode::from_raw_mode(mode & 0o777)) {
                        Ok(()) => {}
                        Err(Errno::EXIST) if expect.is_none() => {
                            let stat = kernel::statat(parent, name, AtFlags::SYMLINK_NOFOLLOW)?;
                            if tree::kind_of(&stat) != FileType::Directory {
                                return Err(Errno::EXIST.into());
                            }
                        }
                        Err(error) => return Err(error.into()),
                    }
                    chmod_at(parent.as_fd(), name, mode & 0o777)?;
                    Ok(Answer::done(json!({ "path": text }), 0))
                }
                fs::Node::Link { target } => {
                    let target = link_text(target)?;
                    let temporary = self.temporary();
                    kernel::symlinkat(&target, parent, &temporary)?;
                    if let Err(error) = kernel::renameat_with(parent, &temporary, parent, name, flags) {
                        let _ = kernel::unlinkat(parent, &temporary, AtFlags::empty());
                        return Err(error.into());
                    }
                    Ok(Answer::done(json!({ "path": text }), 0))
                }
                fs::Node::Attributes { mode } => {
                    chmod_at(parent.as_fd(), name, mode & 0o777)?;
                    Ok(Answer::done(json!({ "path": text }), 0))
                }
            }
        })
    }

    /// Fills a new file beside its destination, checking that the content is what the effect said.
    fn fill(&self, parent: BorrowedFd<'_>, name: &OsStr, digest: &Digest, bytes: u64, mode: u32) -> io::Result<()> {
        use sha2::Digest as _;
        let mut content = self.contents.open(digest)?;
        let mut file = tree::create_file_at(parent, name)?;
        let mut hash = sha2::Sha256::new();
        // One byte more than is wanted shows what is longer.
        let mut buffer = vec![0; bytes.saturating_add(1).min(64 * 1024) as usize];
        let mut total: u64 = 0;
        loop {
            match content.read(&mut buffer) {
                Ok(0) => break,
                Ok(length) => {
                    total += length as u64;
                    if total > bytes {
                        return Err(Errno::FBIG.into());
                    }
                    hash.update(&buffer[..length]);
                    file.write_all(&buffer[..length])?;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        if total != bytes || Digest(hash.finalize().into()) != *digest {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "the content is not what the effect says"));
        }
        Ok(kernel::fchmod(&file, Mode::from_raw_mode(mode & 0o777))?)
    }

    fn temporary(&self) -> OsString {
        let number = self.temporaries.fetch_add(1, Ordering::Relaxed);
        format!(".tollgate-write-{}-{number}", std::process::id()).into()
    }

    fn delete(&self, text: &str, expect: Option<&fs::Expect>) -> Answer {
        self.change("fs/delete", text, expect, |parent, name| {
            let removed = remove_bounded(parent.as_fd(), name)?;
            Ok(Answer::done(json!({ "path": text, "removed": removed }), 0))
        })
    }

    fn rename(&self, text: &str, to_text: &str) -> Answer {
        let kind = "fs/move";
        let work = || -> io::Result<Answer> {
            let (path, to) = (parsed(text)?, parsed(to_text)?);
            let (parent, name) = self.parent(&path)?;
            let (to_parent, to_name) = self.parent(&to)?;
            match kernel::renameat_with(&parent, name, &to_parent, to_name, RenameFlags::NOREPLACE) {
                Err(Errno::XDEV) => move_directory(&parent, name, &to_parent, to_name)?,
                other => other?,
            }
            Ok(Answer::done(json!({ "path": text, "to": to_text }), 0))
        };
        work().unwrap_or_else(|error| {
            let hint = match error.raw_os_error() {
                Some(libc::EXDEV) => "this cannot be moved within the run's view: write it anew and delete the old one",
                Some(libc::EEXIST) => "delete what is at the new path first",
                _ => HINT,
            };
            failure(kind, text, &error, hint)
        })
    }
}

/// Gives a new file its name, whatever has it.
///
/// A rename over a file makes ext4 write the new one out at once (ext4(5), `auto_da_alloc`), which a file in a run's own
/// layer does not need: there is no state of it that should outlive a loss of power. An exchange does not, and is as
/// atomic. It makes an overlay copy up what is there, so it is for what is short.
fn put_in_place(parent: BorrowedFd<'_>, temporary: &OsStr, name: &OsStr, flags: RenameFlags) -> io::Result<()> {
    let short = |stat: kernel::Stat| {
        tree::kind_of(&stat) == FileType::RegularFile
            && u64::try_from(stat.st_size).is_ok_and(|size| size <= BRIEF_BYTES)
    };
    let rename = |flags| kernel::renameat_with(parent, temporary, parent, name, flags);
    let replaced = flags.is_empty() && kernel::statat(parent, name, AtFlags::SYMLINK_NOFOLLOW).is_ok_and(short);
    if !replaced || rename(RenameFlags::EXCHANGE).is_err() {
        return Ok(rename(flags)?);
    }
    kernel::unlinkat(parent, temporary, AtFlags::empty()).or_else(|error| {
        // What was there is no file any more: it stays, and the new one is removed under its own name.
        rename(RenameFlags::EXCHANGE)?;
        Err(error.into())
    })
}

/// Moves a directory that was there before the run: an overlay answers its rename with EXDEV (overlayfs.rst, "Renaming
/// directories"), so it is done piece by piece, as for the run's program.
fn move_directory(parent: &OwnedFd, name: &OsStr, to_parent: &OwnedFd, to_name: &OsStr) -> io::Result<()> {
    let stat = kernel::statat(parent, name, AtFlags::SYMLINK_NOFOLLOW)?;
    if tree::kind_of(&stat) != FileType::Directory {
        return Err(Errno::XDEV.into());
    }
    let text = |name: &OsStr| std::ffi::CString::new(name.as_bytes()).map_err(io::Error::from);
    let flags = nix::fcntl::RenameFlags::RENAME_NOREPLACE;
    move_piece_by_piece(parent, &text(name)?, to_parent, &text(to_name)?, flags).map_err(io::Error::from)
}

fn parsed(text: &str) -> io::Result<PathBuf> {
    unspell(text).map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))
}

/// A link's text, which is any bytes but zero, spelled as paths are.
fn link_text(text: &str) -> io::Result<PathBuf> {
    // Absolute and upward targets are links like any other: nothing of ours follows them.
    match unspell_any(text) {
        Ok(path) if !path.as_os_str().is_empty() => Ok(path),
        Ok(_) | Err(_) => Err(Errno::INVAL.into()),
    }
}

/// Whether what is at a name is what the effect expects; else why not.
fn met(parent: BorrowedFd<'_>, name: &OsStr, expect: Option<&fs::Expect>) -> io::Result<Result<(), &'static str>> {
    let Some(expect) = expect else { return Ok(Ok(())) };
    let stat = match kernel::statat(parent, name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(stat) => Some(stat),
        Err(Errno::NOENT) => None,
        Err(error) => return Err(error.into()),
    };
    Ok(match (expect, stat) {
        (fs::Expect::Absent, None) => Ok(()),
        (fs::Expect::Absent, Some(_)) => Err("something is there already"),
        (fs::Expect::File { .. } | fs::Expect::Unchanged { .. }, None) => Err("it is not there any more"),
        (fs::Expect::File { digest }, Some(stat)) if tree::kind_of(&stat) == FileType::RegularFile => {
            let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
            let mut file = File::from(kernel::openat(parent, name, flags, Mode::empty())?);
            if tree::kind_of(&kernel::fstat(&file)?) == FileType::RegularFile && tree::digest(&mut file)?.0 == *digest {
                Ok(())
            } else {
                Err("its content changed meanwhile")
            }
        }
        (fs::Expect::File { .. }, Some(_)) => Err("it is no regular file any more"),
        (fs::Expect::Unchanged { since_ns }, Some(stat)) if tree::ctime_ns(&stat) <= *since_ns => Ok(()),
        (fs::Expect::Unchanged { .. }, Some(_)) => Err("it changed meanwhile"),
    })
}

fn chmod_at(parent: BorrowedFd<'_>, name: &OsStr, mode: u32) -> io::Result<()> {
    let handle = kernel::openat(parent, name, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?;
    match tree::kind_of(&kernel::fstat(&handle)?) {
        FileType::RegularFile | FileType::Directory => tree::set_mode(handle.as_fd(), mode),
        _ => Err(Errno::OPNOTSUPP.into()),
    }
}

/// Removes a name and all below it without following links, in a tree that a program may change meanwhile.
///
/// A directory is emptied entry by entry through handles that were each opened from the one above without following a
/// link; the way up is remembered by opening again, never by `..`.
fn remove_bounded(parent: BorrowedFd<'_>, name: &OsStr) -> io::Result<usize> {
    let mut removed = 0;
    match kernel::unlinkat(parent, name, AtFlags::empty()) {
        Ok(()) => return Ok(1),
        Err(Errno::ISDIR | Errno::PERM) => {}
        Err(error) => return Err(error.into()),
    }
    let mut seen: usize = 0;
    // Directories from the top down to the one being emptied, relative to `name`.
    let mut way: Vec<PathBuf> = vec![PathBuf::new()];
    while let Some(current) = way.last().cloned() {
        let full = if current.as_os_str().is_empty() { PathBuf::from(name) } else { Path::new(name).join(&current) };
        let directory = match tree::open_directory(parent, &full, OFlags::RDONLY) {
            Ok(directory) => directory,
            Err(error) if tree::absent(&error) && !current.as_os_str().is_empty() => {
                way.pop();
                continue;
            }
            Err(error) => return Err(error),
        };
        let mut deeper = None;
        for child in tree::names(directory.as_fd())? {
            seen += 1;
            if seen > MAX_DELETE_ENTRIES {
                return Err(Errno::FBIG.into());
            }
            match kernel::unlinkat(&directory, &child, AtFlags::empty()) {
                Ok(()) => removed += 1,
                Err(Errno::NOENT) => {}
                Err(Errno::ISDIR | Errno::PERM) => match kernel::unlinkat(&directory, &child, AtFlags::REMOVEDIR) {
                    Ok(()) => removed += 1,
                    Err(Errno::NOENT) => {}
                    Err(Errno::NOTEMPTY | Errno::EXIST) => {
                        deeper = Some(current.join(&child));
                        break;
                    }
                    Err(error) => return Err(error.into()),
                },
                Err(error) => return Err(error.into()),
            }
        }
        if let Some(deeper) = deeper {
            way.push(deeper);
            continue;
        }
        way.pop();
        if current.as_os_str().is_empty() {
            kernel::unlinkat(parent, name, AtFlags::REMOVEDIR)?;
            removed += 1;
        }
    }
    Ok(removed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        chain::Decision,
        effect::{tests::sample, Kind},
    };
    use std::os::unix::fs::symlink;

    struct Place {
        folder: tempfile::TempDir,
        outside: tempfile::TempDir,
        contents: Arc<MemoryContents>,
        files: WorkspaceFiles,
    }

    fn place() -> Place {
        let folder = tempfile::tempdir().unwrap();
        let outside = tempfile::tempdir().unwrap();
        std::fs::write(outside.path().join("s"), "secret").unwrap();
        let contents = Arc::new(MemoryContents::default());
        let files = WorkspaceFiles::new(tree::open_root(folder.path()).unwrap(), contents.clone(), None);
        Place { folder, outside, contents, files }
    }

    impl Place {
        fn write(&self, path: &str, content: &str, expect: Option<fs::Expect>) -> Answer {
            let digest = self.contents.put(content.into());
            let node = fs::Node::File { digest, bytes: content.len() as u64, mode: 0o644 };
            let _turn = self.files.inner.writing.lock().unwrap();
            self.files.inner.write(path, &node, expect.as_ref())
        }
    }

    impl Inner {
        fn read(&self, text: &str, offset: u64, limit: u64) -> Answer {
            self.read_up_to(text, offset, limit, u64::MAX).expect("nothing is too long")
        }
    }

    #[test]
    fn a_file_is_replaced_by_another_one_whatever_its_length() {
        let place = place();
        let long = "l".repeat(BRIEF_BYTES as usize + 1);
        for content in ["short", &long, "short again", ""] {
            let before = std::fs::File::open(place.folder.path().join("f")).ok();
            let held = before.as_ref().map(|file| file.metadata().unwrap().len());
            assert!(place.write("f", content, None).is_success());
            assert_eq!(std::fs::read_to_string(place.folder.path().join("f")).unwrap(), content);
            // Who has the old one open goes on with it.
            assert_eq!(before.map(|file| file.metadata().unwrap().len()), held);
            assert_eq!(std::fs::read_dir(place.folder.path()).unwrap().count(), 1, "no temporary is left");
        }
    }

    #[test]
    fn what_takes_long_or_has_to_wait_is_left_to_another_thread_and_undone_until_then() {
        let place = place();
        let (brief, long) = (vec![b'b'; BRIEF_BYTES as usize], vec![b'l'; BRIEF_BYTES as usize + 1]);
        let effect = |request: fs::Request| Effect { request: Request::Fs(request), ..sample(Kind::FsWrite) };
        let write = |content: &[u8]| {
            let node = fs::Node::File {
                digest: place.contents.put(content.to_vec()),
                bytes: content.len() as u64,
                mode: 0o644,
            };
            effect(fs::Request::Write { path: "f".into(), node, expect: None })
        };
        let read = || effect(fs::Request::Read { path: "f".into(), offset: 0, limit: u64::MAX });
        assert!(place.files.perform_brief(&write(&long)).is_none());
        assert!(!place.folder.path().join("f").exists());
        assert!(place.files.perform_brief(&write(&brief)).expect("is brief").is_success());
        assert_eq!(place.files.perform_brief(&read()).and_then(|answer| answer.body), Some(brief.clone()));
        assert!(place.files.perform(&write(&long)).is_success());
        assert!(place.files.perform_brief(&read()).is_none());
        let turn = place.files.inner.writing.lock().unwrap();
        assert!(place.files.perform_brief(&write(&brief)).is_none());
        drop(turn);
        assert_eq!(std::fs::read(place.folder.path().join("f")).unwrap(), long);
    }

    fn errno(answer: &Answer) -> &str {
        answer.value["error"]["errno"].as_str().unwrap_or("")
    }

    #[test]
    fn what_was_written_is_read_back() {
        let place = place();
        assert!(place.write("a", "hello", None).is_success());
        let answer = place.files.inner.read("a", 1, 3);
        assert_eq!(answer.body.as_deref(), Some(&b"ell"[..]));
        assert_eq!(answer.value["size"], 5);
        assert_eq!(std::fs::read_dir(place.folder.path()).unwrap().count(), 1, "no temporary is left");
    }

    #[test]
    fn no_spelling_of_a_path_leads_outside() {
        let place = place();
        symlink(place.outside.path(), place.folder.path().join("l")).unwrap();
        symlink(place.outside.path().join("s"), place.folder.path().join("f")).unwrap();
        symlink("../../../../../../etc", place.folder.path().join("up")).unwrap();
        symlink("/proc/self/root", place.folder.path().join("magic")).unwrap();
        let outside = place.outside.path().display().to_string();
        for path in
            ["l/s", "f", "up/passwd", "magic/etc/passwd", "../x", "/etc/passwd", &format!("{outside}/s"), "l/../l/s"]
        {
            assert_eq!(place.files.inner.read(path, 0, 100).decision, Decision::Failed, "{path}");
            assert_eq!(place.files.inner.list(path).decision, Decision::Failed, "{path}");
        }
        for path in ["l/new", "up/new", "../new", &format!("{outside}/new")] {
            assert_eq!(place.write(path, "x", None).decision, Decision::Failed, "{path}");
            assert_eq!(place.files.inner.delete(path, None).decision, Decision::Failed, "{path}");
            assert_eq!(place.files.inner.rename("f", path).decision, Decision::Failed, "{path}");
        }
        assert!(place.files.inner.delete("l/s", None).decision == Decision::Failed);
        // Writing at a link replaces the link, not its target.
        assert!(place.write("f", "mine", None).is_success());
        assert_eq!(std::fs::read(place.outside.path().join("s")).unwrap(), b"secret");
        assert!(place.files.inner.delete("l", None).is_success());
        assert_eq!(std::fs::read_dir(place.outside.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_link_within_the_workspace_is_followed() {
        let place = place();
        std::fs::create_dir(place.folder.path().join("d")).unwrap();
        symlink("d", place.folder.path().join("l")).unwrap();
        assert!(place.write("l/x", "x", None).is_success());
        assert_eq!(std::fs::read(place.folder.path().join("d/x")).unwrap(), b"x");
    }

    #[test]
    fn a_fifo_or_device_cannot_be_read() {
        let place = place();
        nix::unistd::mkfifo(&place.folder.path().join("p"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert_eq!(errno(&place.files.inner.read("p", 0, 1)), "EINVAL");
        assert_eq!(errno(&place.files.inner.read("", 0, 1)), "EISDIR");
        assert_eq!(errno(&place.files.inner.read("none", 0, 1)), "ENOENT");
    }

    #[test]
    fn one_of_two_writers_with_the_same_expectation_fails() {
        for _ in 0..50 {
            let place = place();
            place.write("x", "old", None);
            let expect = || Some(fs::Expect::File { digest: Digest::of(b"old") });
            let answers: Vec<Answer> = std::thread::scope(|scope| {
                let hands: Vec<_> = ["left", "right"]
                    .map(|text| scope.spawn(|| place.write("x", text, expect())))
                    .into_iter()
                    .collect();
                hands.into_iter().map(|hand| hand.join().unwrap()).collect()
            });
            assert_eq!(answers.iter().filter(|answer| answer.is_success()).count(), 1);
        }
        let place = place();
        assert!(place.write("n", "1", Some(fs::Expect::Absent)).is_success());
        assert!(!place.write("n", "2", Some(fs::Expect::Absent)).is_success());
        assert_eq!(std::fs::read(place.folder.path().join("n")).unwrap(), b"1");
    }

    #[test]
    fn a_directory_that_cannot_be_renamed_is_moved_piece_by_piece_or_not_at_all() {
        let place = place();
        let root = place.folder.path();
        std::fs::create_dir_all(root.join("d/e")).unwrap();
        std::fs::write(root.join("d/e/f"), "f").unwrap();
        symlink(place.outside.path(), root.join("d/l")).unwrap();
        std::fs::write(root.join("taken"), "t").unwrap();
        std::fs::write(root.join("file"), "f").unwrap();
        let handle = tree::open_root(root).unwrap();
        let moved = |from: &str, to: &str| move_directory(&handle, OsStr::new(from), &handle, OsStr::new(to));
        assert_eq!(moved("d", "taken").unwrap_err().raw_os_error(), Some(libc::EEXIST));
        assert_eq!(moved("file", "new").unwrap_err().raw_os_error(), Some(libc::EXDEV));
        assert!(root.join("d/e/f").exists() && root.join("file").exists());
        moved("d", "new").unwrap();
        assert_eq!(std::fs::read(root.join("new/e/f")).unwrap(), b"f");
        assert!(std::fs::symlink_metadata(root.join("new/l")).unwrap().is_symlink());
        assert!(!root.join("d").exists());
        assert!(place.outside.path().join("s").exists());
    }

    #[test]
    fn a_content_that_is_not_what_the_effect_says_is_not_written() {
        let place = place();
        let digest = place.contents.put(b"four".to_vec());
        let node = fs::Node::File { digest, bytes: 3, mode: 0o644 };
        assert_eq!(errno(&place.files.inner.write("x", &node, None)), "EFBIG");
        let node = fs::Node::File { digest: Digest::of(b"never brought"), bytes: 1, mode: 0o644 };
        assert!(!place.files.inner.write("x", &node, None).is_success());
        assert_eq!(std::fs::read_dir(place.folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn set_id_bits_cannot_be_asked_for() {
        use std::os::unix::fs::PermissionsExt;
        let place = place();
        let digest = place.contents.put(b"x".to_vec());
        place.files.inner.write("x", &fs::Node::File { digest, bytes: 1, mode: 0o6777 }, None);
        let mode = std::fs::metadata(place.folder.path().join("x")).unwrap().permissions().mode();
        assert_eq!(mode & 0o7777, 0o777);
    }

    #[test]
    fn a_deep_tree_is_deleted_and_links_in_it_are_not_followed() {
        let place = place();
        let mut path = place.folder.path().join("d");
        for _ in 0..100 {
            path.push("n");
        }
        std::fs::create_dir_all(&path).unwrap();
        symlink(place.outside.path(), path.join("l")).unwrap();
        std::fs::write(path.join("f"), "").unwrap();
        assert!(place.files.inner.delete("d", None).is_success());
        assert!(!place.folder.path().join("d").exists());
        assert!(place.outside.path().join("s").exists());
    }

    #[test]
    fn a_swapped_directory_lets_no_byte_outside() {
        use std::sync::atomic::AtomicBool;
        let place = place();
        let root = place.folder.path();
        std::fs::create_dir(root.join("d")).unwrap();
        symlink(place.outside.path(), root.join("link")).unwrap();
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let handle = tree::open_root(root).unwrap();
                while !stop.load(Ordering::Relaxed) {
                    let _ = kernel::renameat_with(&handle, "d", &handle, "link", RenameFlags::EXCHANGE);
                }
            });
            let mut written = 0;
            for _ in 0..20_000 {
                written += usize::from(place.write("d/f", "x", None).is_success());
            }
            stop.store(true, Ordering::Relaxed);
            assert!(written > 0, "some writes hit the directory");
        });
        let left: Vec<_> =
            std::fs::read_dir(place.outside.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(left, ["s"]);
        assert_eq!(std::fs::read(place.outside.path().join("s")).unwrap(), b"secret");
    }
}
