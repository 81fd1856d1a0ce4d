//! Files by directory handle: the only way the room and the file world touch a workspace.
//!
//! Every function starts from an open directory and resolves beneath it without following a symbolic link, so no
//! name that a program planted can lead outside. Nothing here decides anything, and nothing recurses: a tree may be
//! deeper than any stack or PATH_MAX.

use crate::effect::Digest;
use rustix::fs::{
    self as kernel, AtFlags, FileType, Gid, Mode, OFlags, RenameFlags, ResolveFlags, Stat, Timestamps, Uid,
};
use std::{
    ffi::{OsStr, OsString},
    fs::File,
    io::{self, Read, Write},
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
        unix::ffi::{OsStrExt, OsStringExt},
    },
    path::{Path, PathBuf},
};

/// How much of a path goes to the kernel in one call; PATH_MAX is 4096 with its zero byte (linux/limits.h).
const PATH_CHUNK: usize = 3500;

/// How often a resolution that raced with a rename is tried again (openat2(2), EAGAIN).
const RESOLVE_ATTEMPTS: usize = 16;

/// No step of the resolution follows a link or leaves the directory's own mount.
fn strict() -> ResolveFlags {
    ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS | ResolveFlags::NO_XDEV
}

/// Opens one thing beneath a directory, as [`strict`] resolves.
fn open_strict(directory: BorrowedFd<'_>, path: &Path, flags: OFlags) -> io::Result<OwnedFd> {
    let mut attempts = 0;
    loop {
        match kernel::openat2(directory, path, flags | OFlags::CLOEXEC, Mode::empty(), strict()) {
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) if attempts < RESOLVE_ATTEMPTS => attempts += 1,
            other => return Ok(other?),
        }
    }
}

/// Opens the directory at `path` beneath `root`, however long the path is.
///
/// The empty path is the root. With [`OFlags::PATH`] the handle serves for `*at` calls only; with
/// [`OFlags::RDONLY`] it can be listed.
///
/// # Errors
/// ELOOP or ENOTDIR when a component is a link or no directory, EXDEV at a mount, else what openat2(2) says.
pub fn open_directory(root: BorrowedFd<'_>, path: &Path, flags: OFlags) -> io::Result<OwnedFd> {
    let bytes = path.as_os_str().as_bytes();
    if bytes.is_empty() {
        return open_strict(root, Path::new("."), flags | OFlags::DIRECTORY);
    }
    if bytes.len() <= PATH_CHUNK {
        return open_strict(root, path, flags | OFlags::DIRECTORY | OFlags::NOFOLLOW);
    }
    let mut at: Option<OwnedFd> = None;
    let mut rest = bytes;
    while rest.len() > PATH_CHUNK {
        // A name is at most 255 bytes, so a slash is found well before the front of the chunk.
        let cut = rest[..PATH_CHUNK].iter().rposition(|byte| *byte == b'/').unwrap_or(PATH_CHUNK);
        let from = at.as_ref().map_or(root, OwnedFd::as_fd);
        let part = Path::new(OsStr::from_bytes(&rest[..cut]));
        at = Some(open_strict(from, part, OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW)?);
        rest = rest.get(cut + 1..).unwrap_or_default();
    }
    let from = at.as_ref().map_or(root, OwnedFd::as_fd);
    open_strict(from, Path::new(OsStr::from_bytes(rest)), flags | OFlags::DIRECTORY | OFlags::NOFOLLOW)
}

/// A directory for listing, even one whose owner took its own rights away; see [`with_rights`].
pub fn open_listing(root: BorrowedFd<'_>, path: &Path) -> io::Result<OwnedFd> {
    match open_directory(root, path, OFlags::RDONLY) {
        Err(error) if denied(&error) => {
            let handle = open_directory_forced(root, path)?;
            with_rights(handle.as_fd(), 0o700, || {
                open_strict(handle.as_fd(), Path::new("."), OFlags::RDONLY | OFlags::DIRECTORY)
            })
        }
        other => other,
    }
}

/// As [`open_directory`] with [`OFlags::PATH`], passing directories whose owner took its own rights away.
pub fn open_directory_forced(root: BorrowedFd<'_>, path: &Path) -> io::Result<OwnedFd> {
    match open_directory(root, path, OFlags::PATH) {
        Err(error) if denied(&error) => {}
        other => return other,
    }
    let mut at = open_strict(root, Path::new("."), OFlags::PATH | OFlags::DIRECTORY)?;
    for name in path.iter() {
        let step = |from: BorrowedFd<'_>| {
            open_strict(from, Path::new(name), OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW)
        };
        at = match step(at.as_fd()) {
            Err(error) if denied(&error) => with_rights(at.as_fd(), 0o700, || step(at.as_fd()))?,
            other => other?,
        };
    }
    Ok(at)
}

/// Runs `action` while the owner has these rights on the object, and puts the mode back after.
///
/// A program may take the rights on its own files away from itself (mode 0000) and still own them; we act as the same
/// owner. The mode is changed through the handle, so no other object can be meant.
pub fn with_rights<T>(handle: BorrowedFd<'_>, rights: u32, action: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    let mode = permissions(&kernel::fstat(handle)?);
    if mode & rights == rights {
        return action();
    }
    set_mode(handle, mode | rights)?;
    let result = action();
    let restored = set_mode(handle, mode);
    let value = result?;
    restored?;
    Ok(value)
}

/// Whether an error says that rights are missing.
pub fn denied(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::PermissionDenied
}

/// Whether an error says that nothing is there.
pub fn absent(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound
}

/// The directory that holds `path`, and the final name.
///
/// # Errors
/// EINVAL for the root, which has no name.
pub fn parent_of<'p>(root: BorrowedFd<'_>, path: &'p Path) -> io::Result<(OwnedFd, &'p OsStr)> {
    let name = path.file_name().ok_or_else(|| io::Error::from(rustix::io::Errno::INVAL))?;
    let parent = path.parent().unwrap_or(Path::new(""));
    Ok((open_directory_forced(root, parent)?, name))
}

/// What is at a path, the link itself where it is one; none where nothing is, also where a parent is missing or is
/// no directory.
pub fn look(root: BorrowedFd<'_>, path: &Path) -> io::Result<Option<Stat>> {
    let (parent, name) = match parent_of(root, path) {
        Ok(found) => found,
        Err(error) if absent(&error) || matches!(error.raw_os_error(), Some(libc::ENOTDIR | libc::ELOOP)) => {
            return Ok(None)
        }
        Err(error) => return Err(error),
    };
    look_at(parent.as_fd(), name)
}

/// As [`look`], in an open directory.
pub fn look_at(directory: BorrowedFd<'_>, name: &OsStr) -> io::Result<Option<Stat>> {
    let stat = || kernel::statat(directory, name, AtFlags::SYMLINK_NOFOLLOW).map_err(io::Error::from);
    let found = match stat() {
        // Entering a directory to look needs its x bit.
        Err(error) if denied(&error) => with_rights(directory, 0o700, stat),
        other => other,
    };
    match found {
        Ok(stat) => Ok(Some(stat)),
        Err(error) if absent(&error) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Opens a regular file for reading without following a link and without waiting for a FIFO's other end.
///
/// # Errors
/// EINVAL when it is no regular file.
pub fn open_file_at(directory: BorrowedFd<'_>, name: &OsStr) -> io::Result<File> {
    let open = |flags: OFlags| {
        open_strict(directory, Path::new(name), flags | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY)
    };
    let file = match open(OFlags::RDONLY) {
        Err(error) if denied(&error) => {
            let handle = open_at(directory, name)?;
            if kind_of(&kernel::fstat(&handle)?) != FileType::RegularFile {
                return Err(error);
            }
            with_rights(directory, 0o700, || with_rights(handle.as_fd(), 0o400, || open(OFlags::RDONLY)))?
        }
        other => other?,
    };
    if kind_of(&kernel::fstat(&file)?) != FileType::RegularFile {
        return Err(rustix::io::Errno::INVAL.into());
    }
    Ok(File::from(file))
}

/// A handle of whatever is at a name, the link itself where it is one. Opens nothing: no device or FIFO notices.
pub fn open_at(directory: BorrowedFd<'_>, name: &OsStr) -> io::Result<OwnedFd> {
    let open = || open_strict(directory, Path::new(name), OFlags::PATH | OFlags::NOFOLLOW);
    match open() {
        Err(error) if denied(&error) => with_rights(directory, 0o700, open),
        other => other,
    }
}

/// A regular file beneath `root`; see [`open_file_at`].
pub fn open_file(root: BorrowedFd<'_>, path: &Path) -> io::Result<File> {
    let (parent, name) = parent_of(root, path)?;
    open_file_at(parent.as_fd(), name)
}

/// The names in a directory, sorted by their bytes.
pub fn names(directory: BorrowedFd<'_>) -> io::Result<Vec<OsString>> {
    // It is opened once more to be read, which takes rights that its owner may have taken away since.
    let open = || kernel::Dir::read_from(directory).map_err(io::Error::from);
    let opened = match open() {
        Err(error) if denied(&error) => with_rights(directory, 0o700, open)?,
        other => other?,
    };
    let mut names = Vec::new();
    for entry in opened {
        let name = entry?.file_name().to_bytes().to_vec();
        if name != b"." && name != b".." {
            names.push(OsString::from_vec(name));
        }
    }
    names.sort_unstable();
    Ok(names)
}

/// The type of a file.
pub fn kind_of(stat: &Stat) -> FileType {
    FileType::from_raw_mode(stat.st_mode)
}

/// The twelve permission bits.
pub fn permissions(stat: &Stat) -> u32 {
    stat.st_mode & 0o7777
}

/// Seconds and nanoseconds as nanoseconds since the epoch, saturating far beyond any real time.
fn nanoseconds(seconds: i64, rest: i64) -> i64 {
    seconds.saturating_mul(1_000_000_000).saturating_add(rest)
}

/// Time of the last change of content.
#[allow(clippy::unnecessary_cast, reason = "the fields' types differ between architectures")]
pub fn mtime_ns(stat: &Stat) -> i64 {
    nanoseconds(stat.st_mtime as i64, stat.st_mtime_nsec as i64)
}

/// Time of the last change of the inode, which no program can set.
#[allow(clippy::unnecessary_cast, reason = "the fields' types differ between architectures")]
pub fn ctime_ns(stat: &Stat) -> i64 {
    nanoseconds(stat.st_ctime as i64, stat.st_ctime_nsec as i64)
}

/// The path of an open handle in proc(5): the way to call by path on an `O_PATH` handle.
fn proc_path(handle: BorrowedFd<'_>) -> String {
    format!("/proc/self/fd/{}", handle.as_raw_fd())
}

/// Sets permission bits through a handle, an `O_PATH` one too. Never call it with a link's handle.
pub fn set_mode(handle: BorrowedFd<'_>, mode: u32) -> io::Result<()> {
    Ok(kernel::chmod(proc_path(handle), Mode::from_raw_mode(mode))?)
}

/// Sets the modification time and leaves the access time.
pub fn set_mtime_at(directory: BorrowedFd<'_>, name: &OsStr, mtime_ns: i64) -> io::Result<()> {
    let times = Timestamps {
        last_access: kernel::Timespec { tv_sec: 0, tv_nsec: kernel::UTIME_OMIT as _ },
        last_modification: kernel::Timespec {
            tv_sec: mtime_ns.div_euclid(1_000_000_000),
            tv_nsec: mtime_ns.rem_euclid(1_000_000_000) as _,
        },
    };
    Ok(kernel::utimensat(directory, name, &times, AtFlags::SYMLINK_NOFOLLOW)?)
}

/// Changes the owner of whatever is at a name, the link itself where it is one.
pub fn set_owner_at(directory: BorrowedFd<'_>, name: &OsStr, uid: u32, gid: u32) -> io::Result<()> {
    Ok(kernel::chownat(directory, name, Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid)), AtFlags::SYMLINK_NOFOLLOW)?)
}

/// The extended attributes of a file or directory that belong to the user: `user.*` without overlayfs's own.
///
/// Sorted by name. Links and special files have none. A file system without them has none.
pub fn user_xattrs(handle: BorrowedFd<'_>) -> io::Result<Vec<(OsString, Vec<u8>)>> {
    let mut found = Vec::new();
    for name in xattr_names(handle)? {
        if name.as_bytes().starts_with(b"user.") && !name.as_bytes().starts_with(b"user.overlay.") {
            if let Some(value) = xattr(handle, name.as_os_str())? {
                found.push((name, value));
            }
        }
    }
    found.sort_unstable();
    Ok(found)
}

/// Every extended attribute's name.
pub fn xattr_names(handle: BorrowedFd<'_>) -> io::Result<Vec<OsString>> {
    // The list of one file is at most 64 KiB (XATTR_LIST_MAX, linux/limits.h); the first try is on the stack.
    let mut small = [0_u8; 512];
    let list = match kernel::listxattr(proc_path(handle), &mut small[..]) {
        Ok(length) => small[..length].to_vec(),
        Err(rustix::io::Errno::RANGE) => {
            let mut large = vec![0; 65_536];
            let length = kernel::listxattr(proc_path(handle), &mut large[..])?;
            large.truncate(length);
            large
        }
        Err(rustix::io::Errno::OPNOTSUPP) => Vec::new(),
        Err(error) => return Err(error.into()),
    };
    Ok(list
        .split(|byte| *byte == 0)
        .filter(|name| !name.is_empty())
        .map(|name| OsString::from_vec(name.to_vec()))
        .collect())
}

/// One extended attribute; none where it is not set or the object cannot have one.
pub fn xattr(handle: BorrowedFd<'_>, name: &OsStr) -> io::Result<Option<Vec<u8>>> {
    let read = || {
        let mut small = [0_u8; 256];
        match kernel::getxattr(proc_path(handle), name, &mut small[..]) {
            Ok(length) => Ok(Some(small[..length].to_vec())),
            Err(rustix::io::Errno::RANGE) => {
                // A value is at most 64 KiB (XATTR_SIZE_MAX, linux/limits.h).
                let mut large = vec![0; 65_536];
                let length = kernel::getxattr(proc_path(handle), name, &mut large[..])?;
                large.truncate(length);
                Ok(Some(large))
            }
            Err(rustix::io::Errno::NODATA | rustix::io::Errno::OPNOTSUPP) => Ok(None),
            Err(error) => Err(io::Error::from(error)),
        }
    };
    match read() {
        Err(error) if denied(&error) => with_rights(handle, 0o400, read),
        other => other,
    }
}

/// Makes the user's extended attributes of a file or directory be exactly these.
///
/// A file system without them is asked only when there are some to set.
pub fn set_user_xattrs(handle: BorrowedFd<'_>, wanted: &[(OsString, Vec<u8>)]) -> io::Result<()> {
    let present = user_xattrs(handle)?;
    if present == wanted {
        return Ok(());
    }
    let change = || {
        for (name, _) in present.iter().filter(|(name, _)| !wanted.iter().any(|(wanted, _)| wanted == name)) {
            kernel::removexattr(proc_path(handle), name.as_os_str())?;
        }
        for (name, value) in wanted {
            kernel::setxattr(proc_path(handle), name.as_os_str(), value, kernel::XattrFlags::empty())?;
        }
        Ok(())
    };
    with_rights(handle, 0o600, change)
}

/// Sets one extended attribute through a handle.
pub fn set_xattr(handle: BorrowedFd<'_>, name: &OsStr, value: &[u8]) -> io::Result<()> {
    Ok(kernel::setxattr(proc_path(handle), name, value, kernel::XattrFlags::empty())?)
}

/// Removes one extended attribute through a handle; one that is not set is no error.
pub fn remove_xattr(handle: BorrowedFd<'_>, name: &OsStr) -> io::Result<()> {
    let call = || match kernel::removexattr(proc_path(handle), name) {
        Ok(()) | Err(rustix::io::Errno::NODATA) => Ok(()),
        Err(error) => Err(io::Error::from(error)),
    };
    match call() {
        Err(error) if denied(&error) => with_rights(handle, 0o200, call),
        other => other,
    }
}

/// Gives a file a second name, also where its owner has shut the directory of the first.
pub fn link(from: BorrowedFd<'_>, old: &OsStr, to: BorrowedFd<'_>, new: &OsStr) -> io::Result<()> {
    let call = || Ok(kernel::linkat(from, old, to, new, AtFlags::empty())?);
    match call() {
        Err(error) if denied(&error) => with_rights(from, 0o700, call),
        other => other,
    }
}

/// A link's target.
pub fn link_target(directory: BorrowedFd<'_>, name: &OsStr) -> io::Result<PathBuf> {
    let read = || Ok(kernel::readlinkat(directory, name, Vec::new())?);
    let target = match read() {
        Err(error) if denied(&error) => with_rights(directory, 0o700, read)?,
        other => other?,
    };
    Ok(PathBuf::from(OsString::from_vec(target.into_bytes())))
}

/// SHA-256 of a whole file, and how many bytes it has.
pub fn digest(file: &mut File) -> io::Result<(Digest, u64)> {
    use sha2::Digest as _;
    let mut hash = sha2::Sha256::new();
    let mut buffer = vec![0; 64 * 1024];
    let mut total = 0;
    loop {
        match file.read(&mut buffer) {
            Ok(0) => return Ok((Digest(hash.finalize().into()), total)),
            Ok(length) => {
                hash.update(&buffer[..length]);
                total += length as u64;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

/// Whether two files hold the same bytes. Regions that are holes in both are not read.
pub fn same_content(left: &File, right: &File) -> io::Result<bool> {
    let length = left.metadata()?.len();
    if length != right.metadata()?.len() {
        return Ok(false);
    }
    let (mut here, mut there) = (vec![0; 64 * 1024], vec![0; 64 * 1024]);
    let mut offset = 0;
    while offset < length {
        let next = next_data(left, offset, length)?.min(next_data(right, offset, length)?);
        offset = next;
        if offset >= length {
            break;
        }
        use std::os::unix::fs::FileExt;
        let want = here.len().min(usize::try_from(length - offset).unwrap_or(usize::MAX));
        let got = read_at_most(|buffer, done| left.read_at(buffer, offset + done), &mut here[..want])?;
        let other = read_at_most(|buffer, done| right.read_at(buffer, offset + done), &mut there[..want])?;
        if got != other || here[..got] != there[..other] {
            return Ok(false);
        }
        if got == 0 {
            break;
        }
        offset += got as u64;
    }
    Ok(true)
}

fn read_at_most(mut read: impl FnMut(&mut [u8], u64) -> io::Result<usize>, buffer: &mut [u8]) -> io::Result<usize> {
    let mut done = 0;
    while done < buffer.len() {
        match read(&mut buffer[done..], done as u64) {
            Ok(0) => break,
            Ok(length) => done += length,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(done)
}

/// Where the next data begins at or after `offset`; `length` where the rest is a hole.
fn next_data(file: &File, offset: u64, length: u64) -> io::Result<u64> {
    match kernel::seek(file, kernel::SeekFrom::Data(offset)) {
        Ok(at) => Ok(at.min(length)),
        Err(rustix::io::Errno::NXIO) => Ok(length),
        // A file system without holes says EINVAL: all of it is data.
        Err(rustix::io::Errno::INVAL | rustix::io::Errno::OPNOTSUPP) => Ok(offset),
        Err(error) => Err(error.into()),
    }
}

/// Copies a whole file's content: shared blocks where the file system can, else data only, with holes kept.
pub fn copy_content(from: &File, to: &File) -> io::Result<u64> {
    if kernel::ioctl_ficlone(to, from).is_ok() {
        return Ok(to.metadata()?.len());
    }
    let length = from.metadata()?.len();
    let mut offset = 0;
    while offset < length {
        let start = next_data(from, offset, length)?;
        if start >= length {
            break;
        }
        let end = match kernel::seek(from, kernel::SeekFrom::Hole(start)) {
            Ok(at) => at.clamp(start, length),
            Err(_) => length,
        };
        copy_range(from, to, start, if end == start { length } else { end })?;
        offset = if end == start { length } else { end };
    }
    to.set_len(length)?;
    Ok(length)
}

fn copy_range(from: &File, to: &File, start: u64, end: u64) -> io::Result<()> {
    let (mut read_at, mut write_at) = (start, start);
    while read_at < end {
        let want = usize::try_from(end - read_at).unwrap_or(usize::MAX).min(1 << 30);
        match kernel::copy_file_range(from, Some(&mut read_at), to, Some(&mut write_at), want) {
            Ok(0) => return Ok(()),
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            // Across file systems, or where the call is missing: by hand. ENOSPC and EIO are real.
            Err(
                rustix::io::Errno::XDEV
                | rustix::io::Errno::INVAL
                | rustix::io::Errno::OPNOTSUPP
                | rustix::io::Errno::NOSYS
                | rustix::io::Errno::PERM
                | rustix::io::Errno::BADF,
            ) => return copy_by_hand(from, to, read_at, end),
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

fn copy_by_hand(from: &File, to: &File, mut offset: u64, end: u64) -> io::Result<()> {
    use std::os::unix::fs::FileExt;
    let mut buffer = vec![0; 128 * 1024];
    while offset < end {
        let want = buffer.len().min(usize::try_from(end - offset).unwrap_or(usize::MAX));
        let length = read_at_most(|part, done| from.read_at(part, offset + done), &mut buffer[..want])?;
        if length == 0 {
            return Ok(());
        }
        to.write_all_at(&buffer[..length], offset)?;
        offset += length as u64;
    }
    Ok(())
}

/// Makes a new regular file that only its owner may open.
pub fn create_file_at(directory: BorrowedFd<'_>, name: &OsStr) -> io::Result<File> {
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(File::from(kernel::openat(directory, name, flags, Mode::from_raw_mode(0o600))?))
}

/// Opens a directory of ours, making it with mode 0700 where it is missing.
pub fn ensure_directory_at(directory: BorrowedFd<'_>, name: &OsStr) -> io::Result<OwnedFd> {
    match kernel::mkdirat(directory, name, Mode::from_raw_mode(0o700)) {
        Ok(()) | Err(rustix::io::Errno::EXIST) => {}
        Err(error) => return Err(error.into()),
    }
    open_strict(directory, Path::new(name), OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW)
}

/// Opens a directory by an absolute path of ours, which may be reached through links.
pub fn open_root(path: &Path) -> io::Result<OwnedFd> {
    Ok(kernel::open(path, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?)
}

/// Renames, lending the owner's rights on the two directories and on a moved directory where they are missing.
///
/// Moving a directory to another parent rewrites its `..`, so the kernel asks for write permission on it too
/// (`vfs_rename` in fs/namei.c).
pub fn rename(
    from: BorrowedFd<'_>,
    name: &OsStr,
    to: BorrowedFd<'_>,
    new_name: &OsStr,
    flags: RenameFlags,
) -> io::Result<()> {
    let call = || match kernel::renameat_with(from, name, to, new_name, flags) {
        // A file system without renameat2's flags (renameat2(2), EINVAL): look, then rename. Nobody but us makes
        // names in the directories that this is used between, except in the workspace itself, where the window is
        // that of any program on such a file system.
        Err(rustix::io::Errno::INVAL) if flags == RenameFlags::NOREPLACE => {
            if look_at(to, new_name)?.is_some() {
                return Err(rustix::io::Errno::EXIST.into());
            }
            Ok(kernel::renameat(from, name, to, new_name)?)
        }
        other => Ok(other?),
    };
    match call() {
        Err(error) if denied(&error) => {}
        other => return other,
    }
    let lend = |directory: BorrowedFd<'_>, name: &OsStr| -> io::Result<Option<OwnedFd>> {
        match look_at(directory, name)? {
            Some(stat) if kind_of(&stat) == FileType::Directory => Ok(Some(open_at(directory, name)?)),
            Some(_) | None => Ok(None),
        }
    };
    let moved = lend(from, name)?;
    let swapped = if flags.contains(RenameFlags::EXCHANGE) { lend(to, new_name)? } else { None };
    with_rights(from, 0o700, || {
        with_rights(to, 0o700, || match (&moved, &swapped) {
            (Some(moved), Some(swapped)) => {
                with_rights(moved.as_fd(), 0o700, || with_rights(swapped.as_fd(), 0o700, call))
            }
            (Some(one), None) | (None, Some(one)) => with_rights(one.as_fd(), 0o700, call),
            (None, None) => call(),
        })
    })
}

/// Removes whatever is at a name, a directory with all below it. Nothing there is no error.
///
/// Directories within are first moved up beside the one being emptied, so that depth costs neither stack nor path
/// length. The caller owns the directory: nobody else makes names in it meanwhile.
pub fn remove(directory: BorrowedFd<'_>, name: &OsStr) -> io::Result<()> {
    let mut pending = vec![name.to_os_string()];
    let mut hoisted: u64 = 0;
    while let Some(current) = pending.pop() {
        let Some(stat) = look_at(directory, &current)? else { continue };
        if kind_of(&stat) != FileType::Directory {
            unlink(directory, &current, AtFlags::empty())?;
            continue;
        }
        let handle = open_at(directory, &current)?;
        // It is about to go: rights need not be put back.
        if permissions(&stat) & 0o700 != 0o700 {
            set_mode(handle.as_fd(), 0o700)?;
        }
        let listing = open_strict(handle.as_fd(), Path::new("."), OFlags::RDONLY | OFlags::DIRECTORY)?;
        for child in names(listing.as_fd())? {
            match kernel::unlinkat(&listing, &child, AtFlags::empty()) {
                Ok(()) => continue,
                Err(rustix::io::Errno::ISDIR | rustix::io::Errno::PERM) => {}
                Err(error) => return Err(error.into()),
            }
            match kernel::unlinkat(&listing, &child, AtFlags::REMOVEDIR) {
                Ok(()) => continue,
                Err(rustix::io::Errno::NOTEMPTY | rustix::io::Errno::ACCESS | rustix::io::Errno::EXIST) => {}
                Err(error) => return Err(error.into()),
            }
            let up = loop {
                hoisted += 1;
                let up = OsString::from(format!(".tollgate-remove-{hoisted}"));
                if look_at(directory, &up)?.is_none() {
                    break up;
                }
            };
            rename(listing.as_fd(), &child, directory, &up, RenameFlags::NOREPLACE)?;
            pending.push(up);
        }
        unlink(directory, &current, AtFlags::REMOVEDIR)?;
    }
    Ok(())
}

/// Removes a directory if nothing is in it; one with something, and nothing at all, is no error.
pub fn remove_empty(directory: BorrowedFd<'_>, name: &OsStr) -> io::Result<()> {
    match unlink(directory, name, AtFlags::REMOVEDIR) {
        Err(error) if absent(&error) || matches!(error.raw_os_error(), Some(libc::ENOTEMPTY | libc::EEXIST)) => Ok(()),
        other => other,
    }
}

fn unlink(directory: BorrowedFd<'_>, name: &OsStr, flags: AtFlags) -> io::Result<()> {
    let call = || Ok(kernel::unlinkat(directory, name, flags)?);
    match call() {
        Err(error) if denied(&error) => with_rights(directory, 0o700, call),
        other => other,
    }
}

/// Whether a rename between two directories can work: same device and same mount (rename(2), EXDEV).
pub fn rename_works(left: BorrowedFd<'_>, right: BorrowedFd<'_>) -> io::Result<bool> {
    use rustix::fs::StatxFlags;
    let mount = |directory: BorrowedFd<'_>| kernel::statx(directory, "", AtFlags::EMPTY_PATH, StatxFlags::MNT_ID);
    let (here, there) = (mount(left)?, mount(right)?);
    // Before Linux 5.8 the mount id is not told, and then we do not guess.
    let told = here.stx_mask & there.stx_mask & StatxFlags::MNT_ID.bits() != 0;
    let same_device = here.stx_dev_major == there.stx_dev_major && here.stx_dev_minor == there.stx_dev_minor;
    Ok(told && same_device && here.stx_mnt_id == there.stx_mnt_id)
}

/// Writes a file of ours durably: a temporary beside it, fsync, rename, fsync of the directory.
pub fn write_durably(directory: BorrowedFd<'_>, name: &str, content: &[u8]) -> io::Result<()> {
    write_beside(directory, name, content, |file| file.sync_all())?;
    Ok(kernel::fsync(directory)?)
}

/// Writes a file of ours whole or not at all, as far as a process can be killed; a loss of power may undo it.
pub fn write_whole(directory: BorrowedFd<'_>, name: &str, content: &[u8]) -> io::Result<()> {
    write_beside(directory, name, content, |_| Ok(()))
}

fn write_beside(
    directory: BorrowedFd<'_>,
    name: &str,
    content: &[u8],
    before_rename: impl FnOnce(&File) -> io::Result<()>,
) -> io::Result<()> {
    let temporary = format!("{name}.new");
    before_rename(&write_anew(directory, &temporary, content)?)?;
    Ok(kernel::renameat(directory, &temporary, directory, name)?)
}

/// Writes a file of ours in the place of any that is there, neither whole nor synced; gives it, to be synced.
pub fn write_anew(directory: BorrowedFd<'_>, name: &str, content: &[u8]) -> io::Result<File> {
    match kernel::unlinkat(directory, name, AtFlags::empty()) {
        Ok(()) | Err(rustix::io::Errno::NOENT) => {}
        Err(error) => return Err(error.into()),
    }
    let mut file = create_file_at(directory, OsStr::new(name))?;
    file.write_all(content)?;
    Ok(file)
}

/// Reads a file of ours whole; none where it is not there.
pub fn read_ours(directory: BorrowedFd<'_>, name: &str) -> io::Result<Option<Vec<u8>>> {
    match open_file_at(directory, OsStr::new(name)) {
        Ok(mut file) => {
            let mut content = Vec::new();
            file.read_to_end(&mut content)?;
            Ok(Some(content))
        }
        Err(error) if absent(&error) => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{symlink, MetadataExt, PermissionsExt};

    #[test]
    fn a_link_on_the_way_is_not_followed() {
        let folder = tempfile::tempdir().unwrap();
        let outside = tempfile::tempdir().unwrap();
        std::fs::write(outside.path().join("s"), "secret").unwrap();
        symlink(outside.path(), folder.path().join("d")).unwrap();
        let root = open_root(folder.path()).unwrap();
        assert!(open_file(root.as_fd(), Path::new("d/s")).is_err());
        assert!(look(root.as_fd(), Path::new("d/s")).unwrap().is_none());
        assert_eq!(kind_of(&look(root.as_fd(), Path::new("d")).unwrap().unwrap()), FileType::Symlink);
    }

    #[test]
    fn a_tree_deeper_than_any_path_is_opened_and_removed() {
        let folder = tempfile::tempdir().unwrap();
        let root = open_root(folder.path()).unwrap();
        let name = "n".repeat(100);
        let mut at = root.try_clone().unwrap();
        let mut path = PathBuf::new();
        for _ in 0..120 {
            at = ensure_directory_at(at.as_fd(), OsStr::new(&name)).unwrap();
            path.push(&name);
        }
        create_file_at(at.as_fd(), OsStr::new("leaf")).unwrap();
        assert!(look(root.as_fd(), &path.join("leaf")).unwrap().is_some());
        remove(root.as_fd(), OsStr::new(&name)).unwrap();
        assert!(names(root.as_fd()).unwrap().is_empty());
    }

    #[test]
    fn a_copy_keeps_its_holes() {
        let folder = tempfile::tempdir().unwrap();
        let root = open_root(folder.path()).unwrap();
        let from = create_file_at(root.as_fd(), OsStr::new("from")).unwrap();
        use std::os::unix::fs::FileExt;
        from.set_len(1 << 32).unwrap();
        from.write_all_at(b"middle", 1 << 20).unwrap();
        let to = create_file_at(root.as_fd(), OsStr::new("to")).unwrap();
        copy_content(&from, &to).unwrap();
        assert_eq!(to.metadata().unwrap().len(), 1 << 32);
        assert!(to.metadata().unwrap().blocks() * 512 < 1 << 20);
        assert!(same_content(&from, &to).unwrap());
        to.write_all_at(b"M", 1 << 20).unwrap();
        assert!(!same_content(&from, &to).unwrap());
    }

    #[test]
    fn a_fifo_is_no_file_to_read_and_nobody_waits_for_it() {
        let folder = tempfile::tempdir().unwrap();
        let root = open_root(folder.path()).unwrap();
        nix::unistd::mkfifo(&folder.path().join("f"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert_eq!(open_file(root.as_fd(), Path::new("f")).unwrap_err().raw_os_error(), Some(libc::EINVAL));
    }

    #[test]
    fn lent_rights_are_taken_back() {
        let folder = tempfile::tempdir().unwrap();
        let root = open_root(folder.path()).unwrap();
        std::fs::create_dir(folder.path().join("d")).unwrap();
        std::fs::set_permissions(folder.path().join("d"), std::fs::Permissions::from_mode(0o500)).unwrap();
        let handle = open_at(root.as_fd(), OsStr::new("d")).unwrap();
        with_rights(handle.as_fd(), 0o700, || {
            assert_eq!(permissions(&kernel::fstat(&handle)?), 0o700);
            Ok(())
        })
        .unwrap();
        assert_eq!(permissions(&kernel::fstat(&handle).unwrap()), 0o500);
    }
}
