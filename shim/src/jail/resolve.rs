//! Where a path leads in the view: to something, or past the edge of what the view shows.

use nix::{
    errno::Errno,
    fcntl::{open, readlink, OFlag},
    sys::stat::{fstat, lstat, FileStat, Mode},
};
use std::{
    collections::VecDeque,
    ffi::OsString,
    os::unix::ffi::{OsStrExt, OsStringExt},
    path::{Path, PathBuf},
};

/// As many links as the kernel follows in one path (path_resolution(7)).
const MAX_LINKS: usize = 40;

/// What a path leads to.
pub enum Reached {
    /// Something: its path without links, and what it is.
    There { path: PathBuf, stat: FileStat },
    /// Nothing: the path it would have, without links, and the deepest directory above it that is there.
    Missing { path: PathBuf, above: FileStat },
    /// The walk itself failed: a loop, a file where a directory should be, a directory that may not be searched.
    Failed,
}

/// Whether the last component is followed if it is a link.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Last {
    /// It is.
    Followed,
    /// The link itself is meant.
    Kept,
}

/// Walks an absolute path one component at a time. Slow, and only for paths whose plain opening failed.
pub fn walk(path: &Path, last: Last) -> Reached {
    let Ok(root) = lstat("/") else { return Reached::Failed };
    let mut here = PathBuf::from("/");
    let mut here_stat = root;
    let mut rest: VecDeque<OsString> = names(path.as_os_str().as_bytes());
    let mut links = 0;
    while let Some(name) = rest.pop_front() {
        if name == ".." {
            here.pop();
            let Ok(stat) = lstat(&here) else { return Reached::Failed };
            here_stat = stat;
            continue;
        }
        let next = here.join(&name);
        match lstat(&next) {
            Ok(stat) if is(&stat, libc::S_IFLNK) && (!rest.is_empty() || last == Last::Followed) => {
                links += 1;
                let Ok(target) = readlink(&next) else { return Reached::Failed };
                if links > MAX_LINKS {
                    return Reached::Failed;
                }
                if target.as_bytes().starts_with(b"/") {
                    here = PathBuf::from("/");
                    here_stat = root;
                }
                for name in names(target.as_bytes()).into_iter().rev() {
                    rest.push_front(name);
                }
            }
            Ok(stat) => {
                here = next;
                here_stat = stat;
            }
            Err(Errno::ENOENT) => {
                let mut path = next;
                path.extend(rest.iter().filter(|name| *name != ".."));
                return Reached::Missing { path, above: here_stat };
            }
            Err(_) => return Reached::Failed,
        }
    }
    Reached::There { path: here, stat: here_stat }
}

/// Whether the path can be opened in the view, following links; its mount is read-only or not.
pub fn look(path: &Path, last: Last) -> Result<Found, Errno> {
    let follow = match last {
        Last::Followed => OFlag::empty(),
        Last::Kept => OFlag::O_NOFOLLOW,
    };
    let opened = open(path, OFlag::O_PATH | OFlag::O_CLOEXEC | follow, Mode::empty())?;
    let flags = nix::sys::statvfs::fstatvfs(&opened)?.flags();
    Ok(Found { read_only: flags.contains(nix::sys::statvfs::FsFlags::ST_RDONLY), stat: fstat(&opened)? })
}

/// Something in the view.
pub struct Found {
    /// Whether its mount is read-only.
    pub read_only: bool,
    /// What it is.
    pub stat: FileStat,
}

impl Found {
    /// Whether it is the stand-in for something hidden: on a read-only mount of its own, without any permission.
    pub fn is_mask(&self) -> bool {
        self.read_only && self.stat.st_mode & 0o7777 == 0
    }
}

/// Whether a file is of this type.
pub fn is(stat: &FileStat, kind: libc::mode_t) -> bool {
    stat.st_mode & libc::S_IFMT == kind
}

fn names(path: &[u8]) -> VecDeque<OsString> {
    path.split(|byte| *byte == b'/')
        .filter(|name| !name.is_empty() && *name != b".")
        .map(|name| OsString::from_vec(name.to_vec()))
        .collect()
}
