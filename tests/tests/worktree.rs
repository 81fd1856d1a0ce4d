//! A linked git worktree as a workspace: what it shares with its repository can be read, and not changed.

use std::{
    fs,
    path::{Path, PathBuf},
};
use tollgate_tests::{every_identity, every_way, World};

/// A repository with one commit beside the workspace, which becomes a linked worktree of it. Gives what is shared.
fn link(world: &World) -> PathBuf {
    let script = "set -e; export GIT_AUTHOR_NAME=a GIT_AUTHOR_EMAIL=a@a GIT_COMMITTER_NAME=a GIT_COMMITTER_EMAIL=a@a
        git init -q -b main \"$HOME/r\"; cd \"$HOME/r\"; echo one > file; git add file; git commit -qm first
        git worktree add -q \"$OLDPWD/t\" -b t; cd \"$OLDPWD\"; mv t/.git t/file .; rmdir t
        echo \"$PWD/.git\" > \"$HOME/r/.git/worktrees/t/gitdir\"";
    world.shell(script).finish().expect_status(0);
    world.home.join("r/.git")
}

/// Every file below, with its content.
fn contents(folder: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let mut found = Vec::new();
    let mut pending = vec![folder.to_owned()];
    while let Some(folder) = pending.pop() {
        for entry in fs::read_dir(&folder).expect("readable").flatten() {
            match entry.file_type().expect("readable").is_dir() {
                true => pending.push(entry.path()),
                false => found.push((entry.path(), fs::read(entry.path()).expect("readable"))),
            }
        }
    }
    found.sort();
    found
}

#[test]
fn git_reads_in_a_linked_worktree_and_a_commit_is_refused_with_what_to_do() {
    every_way(|world| {
        let common = link(world);
        let before = contents(&common);
        let script = "echo two >> file; git log --format=%s; git status --porcelain; git diff --stat | tail -1";
        let run = world.run_script(script).finish().expect_status(0);
        assert_eq!(run.out(), "first\n M file\n 1 file changed, 1 insertion(+)\n", "{run}");
        assert_eq!(world.receipts(&["--denied"]).len(), 0, "looking is no attempt to change: {run}");
        assert_eq!(world.read("file"), "one\ntwo\n");

        let run = world.run_script("git commit -qam second").finish();
        assert_eq!(run.status, 128, "{run}");
        for words in ["linked git worktree", "commit on the host when the run is over"] {
            assert!(run.err().contains(words), "{run}");
        }
        assert_eq!(contents(&common), before);
        world.shell("git -c user.name=a -c user.email=a@a commit -qam second").finish().expect_status(0);
    });
}

#[test]
fn nothing_that_a_linked_worktree_shares_can_be_changed() {
    every_way(|world| {
        let common = link(world);
        let before = contents(&common);
        let script = format!(
            "cd {0}; echo '#!/bin/sh' > hooks/post-checkout; chmod +x hooks/* ; mv hooks hooks2
            git config core.hooksPath /tmp/x; git config --file config core.fsmonitor /tmp/y; echo x >> config
            rm -rf objects; ln -s /tmp/x info/attributes; touch HEAD; (: > worktrees/t/commondir); true",
            common.display()
        );
        world.run_script(&script).finish().expect_status(0);
        assert_eq!(contents(&common), before);
    });
}

#[test]
fn a_git_file_that_points_at_keys_shows_nothing_and_the_run_says_why() {
    every_identity(|world| {
        let keys = world.home.join(".ssh");
        world
            .shell("mkdir ~/.ssh && echo secret > ~/.ssh/id && echo ../.. > ~/.ssh/commondir")
            .finish()
            .expect_status(0);
        world.write(".git", format!("gitdir: {}\n", keys.display()));
        let run = world.run(["--", "cat", &keys.join("id").display().to_string()]).finish();
        assert_ne!(run.status, 0, "{run}");
        assert!(!run.out().contains("secret"), "{run}");
        assert!(run.err().contains("which was not shown to the run"), "{run}");
    });
}
