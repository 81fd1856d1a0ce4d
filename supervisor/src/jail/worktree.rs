//! A workspace that is a linked git worktree: where the part of the repository is that it shares with others.
//!
//! In a linked worktree `.git` is a file that names a folder elsewhere (gitrepository-layout(5)). Whoever may write
//! the workspace may write that file, so it is believed only where the folder that it names says the same: that it is
//! a repository's, and that its worktree of this name is this workspace. All of it must belong to the caller, so that
//! nothing is shown that the caller could not have shown with `--view`. Git itself is not asked, since it would obey
//! what the file leads to.

use super::spec;
use rustix::fs::{open, Mode, OFlags};
use std::{
    ffi::OsStr,
    fs::{self, File, Metadata},
    io::Read,
    os::unix::{ffi::OsStrExt, fs::MetadataExt},
    path::{Path, PathBuf},
};

/// The longest of these files that is read: a path (PATH_MAX, limits.h) and a few words.
const MOST: u64 = 4096 + 64;

/// What a linked worktree's `.git` file leads to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Linked {
    /// The folder that it shares with its repository's other worktrees, canonical.
    Shared(PathBuf),
    /// It leads to something that is not shown.
    Refused {
        /// What the file names.
        named: PathBuf,
        /// Why that is not shown.
        reason: &'static str,
    },
}

/// What this workspace's `.git` file leads to; none where it is no linked worktree.
///
/// `owner` is the user whose files may be shown.
pub fn linked(workspace: &Path, owner: u32) -> Option<Linked> {
    let file = workspace.join(".git");
    let named = named_in(&file, workspace, b"gitdir: ")?;
    match shared(workspace, &named, owner) {
        Ok(None) => None,
        Ok(Some(common)) => Some(Linked::Shared(common)),
        Err(reason) => Some(Linked::Refused { named, reason }),
    }
}

/// The shared folder, if all that is said of it holds; none if the file is a submodule's or the like, which shares
/// nothing.
fn shared(workspace: &Path, named: &Path, owner: u32) -> Result<Option<PathBuf>, &'static str> {
    const NO_REPOSITORY: &str = "it is no part of a git repository";
    let own = named.canonicalize().map_err(|_| "it is not there")?;
    let Some(common) = named_in(&own.join("commondir"), &own, b"") else { return Ok(None) };
    let common = common.canonicalize().map_err(|_| NO_REPOSITORY)?;
    if own.parent() != Some(&common.join("worktrees")) {
        return Err(NO_REPOSITORY);
    }
    let back = named_in(&own.join("gitdir"), &own, b"").ok_or("it does not say which worktree it belongs to")?;
    let file = back.file_name() == Some(OsStr::new(".git"));
    if !file || back.parent().and_then(|parent| parent.canonicalize().ok()).as_deref() != Some(workspace) {
        return Err("it belongs to another worktree");
    }
    let head = fs::symlink_metadata(common.join("HEAD")).map_err(|_| NO_REPOSITORY)?;
    let folders = ["objects", "refs"].iter().all(|name| is_plain(&common.join(name), Metadata::is_dir));
    if !folders || !(head.is_file() || head.is_symlink()) {
        return Err(NO_REPOSITORY);
    }
    let owned = |path: &Path| fs::symlink_metadata(path).is_ok_and(|found| found.uid() == owner);
    let all = [workspace, &workspace.join(".git"), &own, &own.join("gitdir"), &common, &common.join("HEAD")];
    if !all.into_iter().all(owned) {
        return Err("it, or the workspace, does not belong to you");
    }
    if workspace.starts_with(&common) {
        return Err("it holds the workspace, and other worktrees perhaps");
    }
    spec::check_workspace(&common).map_err(|_| "it is a folder of the system")?;
    // In the workspace already.
    Ok((!common.starts_with(workspace)).then_some(common))
}

fn is_plain(path: &Path, wanted: fn(&Metadata) -> bool) -> bool {
    fs::symlink_metadata(path).is_ok_and(|found| wanted(&found))
}

/// The path in a file of one line that begins with these words, relative to `base`; none if it is no such file. No
/// link is followed to it, and a pipe in its place holds nobody up.
fn named_in(file: &Path, base: &Path, words: &[u8]) -> Option<PathBuf> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = File::from(open(file, flags, Mode::empty()).ok()?);
    let found = file.metadata().ok()?;
    if !found.is_file() || found.len() > MOST {
        return None;
    }
    let mut text = Vec::new();
    file.take(MOST).read_to_end(&mut text).ok()?;
    let path = text.strip_prefix(words)?;
    let path = path.strip_suffix(b"\n").unwrap_or(path);
    let path = path.strip_suffix(b"\r").unwrap_or(path);
    let plain = !path.is_empty() && !path.iter().any(|byte| matches!(byte, b'\0' | b'\n'));
    plain.then(|| base.join(OsStr::from_bytes(path)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    struct Repository {
        _folder: tempfile::TempDir,
        common: PathBuf,
        own: PathBuf,
        workspace: PathBuf,
        uid: u32,
    }

    /// As `git worktree add` leaves it.
    fn repository() -> Repository {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().canonicalize().unwrap();
        let (common, workspace) = (root.join("main/.git"), root.join("linked"));
        let own = common.join("worktrees/linked");
        for made in [&common.join("objects"), &common.join("refs"), &own, &workspace] {
            fs::create_dir_all(made).unwrap();
        }
        fs::write(common.join("HEAD"), "ref: refs/heads/main\n").unwrap();
        fs::write(own.join("commondir"), "../..\n").unwrap();
        fs::write(own.join("gitdir"), format!("{}\n", workspace.join(".git").display())).unwrap();
        fs::write(workspace.join(".git"), format!("gitdir: {}\n", own.display())).unwrap();
        let uid = fs::metadata(&workspace).unwrap().uid();
        Repository { _folder: folder, common, own, workspace, uid }
    }

    fn refusal(repository: &Repository) -> Option<&'static str> {
        match linked(&repository.workspace, repository.uid) {
            Some(Linked::Refused { reason, .. }) => Some(reason),
            Some(Linked::Shared(_)) | None => None,
        }
    }

    #[test]
    fn a_linked_worktree_leads_to_what_it_shares_by_absolute_and_relative_paths() {
        let repository = repository();
        let shared = Some(Linked::Shared(repository.common.clone()));
        assert_eq!(linked(&repository.workspace, repository.uid), shared);
        fs::write(repository.workspace.join(".git"), "gitdir: ../main/.git/worktrees/linked\n").unwrap();
        fs::write(repository.own.join("gitdir"), "../../../../linked/.git\n").unwrap();
        assert_eq!(linked(&repository.workspace, repository.uid), shared);
    }

    #[test]
    fn a_plain_repository_and_a_folder_without_one_are_no_linked_worktrees() {
        let repository = repository();
        assert_eq!(linked(repository.common.parent().unwrap(), repository.uid), None);
        fs::remove_file(repository.workspace.join(".git")).unwrap();
        assert_eq!(linked(&repository.workspace, repository.uid), None);
    }

    /// Each row is what somebody who may write only the workspace, or only some folder, can say.
    #[test]
    fn nothing_is_shown_on_the_word_of_the_workspace_alone() {
        type Lie = (&'static str, fn(&Repository));
        let lies: [Lie; 8] = [
            ("a folder of keys", |one| {
                let keys = one.workspace.with_file_name("keys");
                fs::create_dir(&keys).unwrap();
                fs::write(one.workspace.join(".git"), format!("gitdir: {}\n", keys.display())).unwrap();
            }),
            ("another worktree's folder", |one| {
                fs::write(one.own.join("gitdir"), "/elsewhere/.git\n").unwrap();
            }),
            ("a folder that is not below the one it shares", |one| {
                fs::write(one.own.join("commondir"), "../../..\n").unwrap();
            }),
            ("no repository", |one| fs::remove_file(one.common.join("HEAD")).unwrap()),
            ("objects that are a link", |one| {
                fs::remove_dir(one.common.join("objects")).unwrap();
                symlink("/etc", one.common.join("objects")).unwrap();
            }),
            ("no word of the worktree", |one| fs::remove_file(one.own.join("gitdir")).unwrap()),
            ("a link in the file's place", |one| {
                let aside = one.workspace.join("aside");
                fs::rename(one.workspace.join(".git"), &aside).unwrap();
                symlink(&aside, one.workspace.join(".git")).unwrap();
            }),
            ("a line more than one", |one| {
                fs::write(one.workspace.join(".git"), format!("gitdir: {}\nx\n", one.own.display())).unwrap();
            }),
        ];
        for (name, lie) in lies {
            let repository = repository();
            lie(&repository);
            let found = linked(&repository.workspace, repository.uid);
            assert!(!matches!(found, Some(Linked::Shared(_))), "{name}: {found:?}");
        }
    }

    #[test]
    fn what_belongs_to_another_user_is_not_shown() {
        let mut repository = repository();
        repository.uid += 1;
        assert_eq!(refusal(&repository), Some("it, or the workspace, does not belong to you"));
    }

    #[test]
    fn a_pipe_in_the_files_place_holds_nobody_up() {
        let repository = repository();
        let file = repository.workspace.join(".git");
        fs::remove_file(&file).unwrap();
        nix::unistd::mkfifo(&file, nix::sys::stat::Mode::from_bits_truncate(0o600)).unwrap();
        assert_eq!(linked(&repository.workspace, repository.uid), None);
    }
}
