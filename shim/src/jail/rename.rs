//! Renames of directories that existed before the run.
//!
//! An overlay in a user namespace answers them with EXDEV (overlayfs.rst, "Renaming directories": `redirect_dir` is
//! off with `userxattr`). Programs do not expect that inside one folder, so the rename is then done piece by piece:
//! the directory is made anew and what it holds is renamed into it. Everything happens with the program's own user
//! and under its own Landlock rules, so nothing can be moved here that the program could not move itself.

use super::confine;
use crate::{
    protocol::{Layer, Plan},
    sys::Reply,
};
use nix::{
    dir::Dir,
    errno::Errno,
    fcntl::{openat, renameat2, AtFlags, OFlag, RenameFlags, AT_FDCWD},
    sys::stat::{fchmod, fstatat, futimens, mkdirat, Mode},
    unistd::{unlinkat, UnlinkatFlags},
};
use std::{
    ffi::CString,
    os::fd::{AsFd, OwnedFd},
    path::{Path, PathBuf},
};

/// Directories nested deeper than this are left to the program (an EXDEV, as without help).
const MAX_DEPTH: usize = 256;

/// A directory's rename that waits for its answer.
pub struct Request {
    /// The waiting call.
    pub id: u64,
    /// From where, absolute.
    pub from: PathBuf,
    /// To where, absolute.
    pub to: PathBuf,
    /// `RENAME_NOREPLACE` or nothing.
    pub flags: RenameFlags,
}

/// The flags of a rename call; none if the call is no rename, or one that is no business of ours.
pub fn flags_of(number: i64, args: &[u64; 6]) -> Option<RenameFlags> {
    let plain = Some(RenameFlags::empty());
    match number {
        libc::SYS_renameat2 => {
            let flags = RenameFlags::from_bits(args[4] as u32)?;
            (!flags.intersects(RenameFlags::RENAME_EXCHANGE | RenameFlags::RENAME_WHITEOUT)).then_some(flags)
        }
        #[cfg(target_arch = "x86_64")]
        libc::SYS_rename => plain,
        libc::SYS_renameat => plain,
        _ => None,
    }
}

/// Renames as the kernel would, or piece by piece where it will not.
pub fn perform(plan: &Plan, request: &Request) -> Reply {
    if !plan.without.contains(&Layer::Landlock) && confine::restrict_files(plan).is_err() {
        return Reply::Continue;
    }
    let result = match renameat2(AT_FDCWD, &request.from, AT_FDCWD, &request.to, request.flags) {
        Err(Errno::EXDEV) => piece_by_piece(request),
        other => other,
    };
    match result {
        Ok(()) => Reply::Return(0),
        Err(errno) => Reply::Fail(errno as i32),
    }
}

fn piece_by_piece(request: &Request) -> Result<(), Errno> {
    let (from_parent, from_name) = parent_of(&request.from)?;
    let (to_parent, to_name) = parent_of(&request.to)?;
    if request.to.starts_with(&request.from) {
        return Err(Errno::EINVAL);
    }
    move_piece_by_piece(&from_parent, &from_name, &to_parent, &to_name, request.flags)
}

/// Moves a directory that an overlay refuses to rename: makes it anew and renames what it holds into it.
///
/// For an EXDEV that renameat2(2) gave between these same places: the caller has excluded a move into itself, as the
/// kernel does before it says EXDEV. It happens as the calling thread's user. The flags are `RENAME_NOREPLACE` or
/// nothing; without, an empty directory at the new place is replaced.
///
/// # Errors
/// EXDEV where the two parents lie on different file systems or directories are nested too deep, ENOTDIR where it is
/// no directory, else what the calls give; what was moved is then moved back.
pub fn move_piece_by_piece(
    from_parent: &OwnedFd,
    from_name: &CString,
    to_parent: &OwnedFd,
    to_name: &CString,
    flags: RenameFlags,
) -> Result<(), Errno> {
    let device = |directory: &OwnedFd| fstatat(directory, "", AtFlags::AT_EMPTY_PATH).map(|stat| stat.st_dev);
    if device(from_parent)? != device(to_parent)? {
        return Err(Errno::EXDEV);
    }
    match fstatat(to_parent, to_name.as_c_str(), AtFlags::AT_SYMLINK_NOFOLLOW) {
        Err(Errno::ENOENT) => {}
        Err(errno) => return Err(errno),
        Ok(_) if flags.contains(RenameFlags::RENAME_NOREPLACE) => return Err(Errno::EEXIST),
        // An empty directory may be replaced (rename(2)); for anything else this is the right error.
        Ok(_) => unlinkat(to_parent, to_name.as_c_str(), UnlinkatFlags::RemoveDir)?,
    }
    move_directory(from_parent, from_name, to_parent, to_name, 0)
}

fn move_directory(
    from_parent: &OwnedFd,
    from_name: &CString,
    to_parent: &OwnedFd,
    to_name: &CString,
    depth: usize,
) -> Result<(), Errno> {
    if depth > MAX_DEPTH {
        return Err(Errno::EXDEV);
    }
    let from = open_directory(from_parent, from_name)?;
    let stat = fstatat(&from, "", AtFlags::AT_EMPTY_PATH)?;
    mkdirat(to_parent, to_name.as_c_str(), Mode::from_bits_truncate(0o700))?;
    let to = open_directory(to_parent, to_name)?;
    let result = move_entries(&from, &to, depth).and_then(|()| {
        fchmod(&to, Mode::from_bits_truncate(stat.st_mode & 0o7777))?;
        let time = |seconds, nanoseconds| nix::sys::time::TimeSpec::new(seconds, nanoseconds);
        futimens(&to, &time(stat.st_atime, stat.st_atime_nsec), &time(stat.st_mtime, stat.st_mtime_nsec))?;
        unlinkat(from_parent, from_name.as_c_str(), UnlinkatFlags::RemoveDir)
    });
    if result.is_err() {
        // Back, as far as it goes: a rename that fails has changed nothing.
        let _ = move_entries(&to, &from, depth);
        let _ = unlinkat(to_parent, to_name.as_c_str(), UnlinkatFlags::RemoveDir);
    }
    result
}

fn move_entries(from: &OwnedFd, to: &OwnedFd, depth: usize) -> Result<(), Errno> {
    // All names first: a directory that changes while it is read may show a name twice or never.
    let mut listing = Dir::openat(from.as_fd(), ".", OFlag::O_RDONLY | OFlag::O_DIRECTORY, Mode::empty())?;
    let names: Vec<CString> = listing
        .iter()
        .filter_map(Result::ok)
        .map(|entry| entry.file_name().to_owned())
        .filter(|name| !matches!(name.to_bytes(), b"." | b".."))
        .collect();
    for name in names {
        match renameat2(from, name.as_c_str(), to, name.as_c_str(), RenameFlags::RENAME_NOREPLACE) {
            Err(Errno::EXDEV) => move_directory(from, &name, to, &name, depth + 1)?,
            other => other?,
        }
    }
    Ok(())
}

fn open_directory(parent: &OwnedFd, name: &CString) -> Result<OwnedFd, Errno> {
    let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    openat(parent, name.as_c_str(), flags, Mode::empty())
}

fn parent_of(path: &Path) -> Result<(OwnedFd, CString), Errno> {
    use std::os::unix::ffi::OsStrExt;
    let name = path.file_name().ok_or(Errno::EINVAL)?;
    let parent = path.parent().ok_or(Errno::EINVAL)?;
    let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
    let opened = nix::fcntl::open(parent, flags, Mode::empty())?;
    Ok((opened, CString::new(name.as_bytes()).map_err(|_| Errno::EINVAL)?))
}
