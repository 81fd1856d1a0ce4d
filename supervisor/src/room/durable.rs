//! Makes a batch's work outlive a loss of power, at a cost that follows the batch.
//!
//! One syncfs(2) waits for everything that anybody wrote to the file system, which on a busy one takes a quarter of a
//! second; a call for each file of a large batch takes longer than that. So a small batch syncs what it touched, all
//! at once from a few threads, whose waits the file system's log then joins, and a large one the file system.

use rustix::{fs as kernel, io::Errno};
use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::atomic::{AtomicUsize, Ordering},
    thread,
};

/// The most nodes that are synced one by one. On an ext4 disk a hundred take 40 ms so, and a syncfs(2) of a file
/// system that others write to takes 50 to 250 ms (measured; few of the handles a process may have are used for it).
pub const FEW: usize = 200;

/// How many wait for the disk at once. More threads joined no more commits of ext4's log than this many.
const THREADS: usize = 16;

/// Syncs every one of these (fsync(2)).
///
/// # Errors
/// The first that failed; the others were tried.
pub fn each(handles: &[OwnedFd]) -> io::Result<()> {
    let workers = handles.len().min(THREADS);
    if workers <= 1 {
        return handles.iter().try_for_each(|handle| one(handle.as_fd()));
    }
    let next = AtomicUsize::new(0);
    let work = || {
        let mut result = Ok(());
        while let Some(handle) = handles.get(next.fetch_add(1, Ordering::Relaxed)) {
            result = result.and(one(handle.as_fd()));
        }
        result
    };
    thread::scope(|scope| {
        // Without threads to be had the work is done here alone.
        let helpers: Vec<_> = (1..workers)
            .filter_map(|_| thread::Builder::new().stack_size(64 * 1024).spawn_scoped(scope, work).ok())
            .collect();
        let mut result = work();
        for helper in helpers {
            let joined = helper.join().unwrap_or_else(|_| Err(io::Error::other("a thread that synced files panicked")));
            result = result.and(joined);
        }
        result
    })
}

/// Syncs the whole file system of a handle.
///
/// # Errors
/// syncfs(2)'s.
pub fn everything(handle: BorrowedFd<'_>) -> io::Result<()> {
    Ok(kernel::syncfs(handle)?)
}

fn one(handle: BorrowedFd<'_>) -> io::Result<()> {
    match kernel::fsync(handle) {
        Ok(()) => Ok(()),
        // A file system that syncs no single directory (fsync(2), EINVAL): all of it, then.
        Err(Errno::INVAL | Errno::NOTSUP) => everything(handle),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_handle_is_synced_and_a_bad_one_is_told() {
        let folder = tempfile::tempdir().unwrap();
        let open = |path: &std::path::Path| OwnedFd::from(std::fs::File::open(path).unwrap());
        let mut handles: Vec<OwnedFd> = (0..40)
            .map(|number| {
                let path = folder.path().join(number.to_string());
                std::fs::write(&path, "x").unwrap();
                open(&path)
            })
            .collect();
        handles.push(open(folder.path()));
        each(&handles).unwrap();
        each(&[]).unwrap();
        // A handle that only names a file cannot be synced (open(2), O_PATH).
        let only_a_name = rustix::fs::open(folder.path(), rustix::fs::OFlags::PATH, rustix::fs::Mode::empty()).unwrap();
        handles.insert(20, only_a_name);
        assert_eq!(each(&handles).unwrap_err().raw_os_error(), Some(libc::EBADF));
    }
}
