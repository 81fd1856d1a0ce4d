//! Applying in part, undoing and redoing, as a user sees it.

use nix::sys::signal::Signal;
use serde_json::Value;
use std::{
    collections::BTreeMap,
    fs,
    os::unix::fs::{MetadataExt, PermissionsExt},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};
use tollgate_tests::{every_identity, Finished, World};

fn last(world: &World) -> String {
    world.last_run()["id"].as_str().expect("a run has an id").to_owned()
}

fn run(world: &World, script: &str) -> String {
    world.run_script(script).finish().expect_status(0);
    last(world)
}

fn kept(world: &World, script: &str) -> String {
    world.run(["--no-apply", "--", "sh", "-c", script]).finish().expect_status(0);
    last(world)
}

fn undo(world: &World, run: &str, flags: &[&str]) -> Finished {
    world.tollgate(["undo", run].into_iter().chain(flags.iter().copied())).finish()
}

fn changes(world: &World, run: &str) -> String {
    let record = world.tollgate(["inspect", run, "--json"]).finish().expect_status(0).json_lines().remove(0);
    record["changes"].as_str().expect("a word").to_owned()
}

/// Every file with its content, mode, inode and time, and every directory with its mode.
fn exact(root: &Path) -> BTreeMap<PathBuf, String> {
    let mut found = BTreeMap::new();
    let mut pending = vec![root.to_path_buf()];
    while let Some(folder) = pending.pop() {
        for entry in fs::read_dir(&folder).expect("readable").flatten() {
            let (path, data) = (entry.path(), entry.metadata().expect("is there"));
            let text = if data.is_dir() {
                pending.push(path.clone());
                format!("{:o}", data.mode())
            } else if data.is_symlink() {
                format!("{:?}", fs::read_link(&path).expect("a link"))
            } else {
                let content = fs::read(&path).expect("readable");
                format!("{:o} {} {}.{} {content:?}", data.mode(), data.ino(), data.mtime(), data.mtime_nsec())
            };
            found.insert(path, text);
        }
    }
    found
}

#[test]
fn an_undo_takes_back_what_the_run_did_and_nothing_else() {
    every_identity(|world| {
        for (name, text) in
            [("a", "1"), ("c", "keep me"), ("k", "k"), (".gitignore", "build/\n# edited\n"), ("build/x", "x")]
        {
            world.write(name, text);
        }
        world.write("big.dat", vec![7; 1 << 20]);
        world.write("excluded/deep/file", "untouched");
        let before = exact(&world.workspace);
        let id = run(world, "echo 2 > a; echo n > b; rm c; chmod 600 k");
        world.write("a", "the user's");
        let tried = undo(world, &id, &["--dry-run"]).expect_status(1);
        let lines: Vec<String> =
            tried.out().lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
        assert_eq!(lines, ["remove b", "restore c", "attributes k", "conflict a: was changed since"], "{tried}");
        let done = undo(world, &id, &[]).expect_status(1);
        assert!(done.err().contains("left: a: was changed since"), "{done}");
        let mut after = exact(&world.workspace);
        let a = world.workspace.join("a");
        assert!(after.remove(&a).expect("is there").contains(&format!("{:?}", b"the user's")), "{done}");
        let mut expected = before;
        expected.remove(&a);
        assert_eq!(after, expected);
        // What the user made of `a` goes only when asked, and can be had again.
        undo(world, &id, &["--overwrite", "a"]).expect_status(0);
        assert_eq!(world.read("a"), "1");
        undo(world, &id, &["--redo", "a"]).expect_status(0);
        assert_eq!(world.read("a"), "the user's");
    });
}

#[test]
fn every_kind_of_change_comes_back_and_goes_again() {
    every_identity(|world| {
        for name in ["edit", "gone", "moved", "mode", "to-dir", "d/one", "d/two/three", "to-file/inner", "shelf/book"] {
            world.write(name, format!("content of {name}"));
        }
        std::os::unix::fs::symlink("edit", world.workspace.join("link")).expect("a link");
        world.own(&world.workspace.join("link"));
        fs::hard_link(world.workspace.join("edit"), world.workspace.join("edit2")).expect("a second name");
        world.mode("gone", 0o640);
        let before = exact(&world.workspace);
        let script = "echo new > edit; rm gone; mv moved elsewhere; chmod 755 mode; rm to-dir; mkdir to-dir; \
            echo x > to-dir/x; rm -r d; rm -r to-file; echo f > to-file; mv shelf rack; ln -sfn gone link; \
            mkdir -p new/er; echo n > new/er/n; ln -s n new/er/l; chmod 500 new/er";
        let id = run(world, script);
        assert_eq!(changes(world, &id), "applied");
        let made = exact(&world.workspace);
        for _ in 0..2 {
            undo(world, &id, &[]).expect_status(0);
            assert_eq!(exact(&world.workspace), before);
            assert_eq!(changes(world, &id), "undone");
            undo(world, &id, &["--redo"]).expect_status(0);
            let again = exact(&world.workspace);
            assert_eq!(again.keys().collect::<Vec<_>>(), made.keys().collect::<Vec<_>>());
            assert_eq!(again, made);
            assert_eq!(changes(world, &id), "applied");
        }
        world.tollgate(["verify", &id]).finish().expect_status(0);
        let moves = world.receipts_of(&id, &["--kind", "fs/move"]);
        let back = |receipt: &&Value| receipt["door"] == "control" && receipt["resource"]["path"] == "elsewhere";
        assert_eq!(moves.iter().filter(back).count(), 2, "the inverse of a move is a move with a receipt: {moves:?}");
        fs::set_permissions(world.workspace.join("new/er"), fs::Permissions::from_mode(0o700)).expect("our own");
    });
}

#[test]
fn chosen_paths_land_or_go_and_the_rest_stays_pending() {
    every_identity(|world| {
        for name in ["one", "two", "src/three.rs", "src/four.txt"] {
            world.write(name, "old");
        }
        let id = kept(world, "for f in one two src/three.rs src/four.txt; do echo new > $f; done");
        let shown = world.tollgate(["diff", &id, "src/*.rs", "--json"]).finish().expect_status(0);
        assert!(shown.out().contains("src/three.rs") && !shown.out().contains("four"), "{shown}");
        world.tollgate(["diff", &id, "none"]).finish().expect_status(1);
        world.tollgate(["apply", &id, "one"]).finish().expect_status(0);
        assert_eq!((world.read("one"), world.read("two")), ("new\n".into(), "old".into()));
        assert_eq!(changes(world, &id), "partial");
        world.tollgate(["discard", &id, "two"]).finish().expect_status(0);
        let refused = world.tollgate(["apply", &id, "two"]).finish();
        assert!(refused.status != 0 && refused.err().contains("no pending change at `two`"), "{refused}");
        world.tollgate(["apply", &id, "src/*.rs"]).finish().expect_status(0);
        world.tollgate(["apply", &id]).finish().expect_status(0);
        let all = ["one", "two", "src/three.rs", "src/four.txt"].map(|name| world.read(name));
        assert_eq!(all, ["new\n", "old", "new\n", "new\n"]);
        assert_eq!(changes(world, &id), "applied");
        world.tollgate(["apply", &id]).finish().expect_status(0);
        undo(world, &id, &["src"]).expect_status(0);
        assert_eq!((world.read("src/three.rs"), world.read("one")), ("old".into(), "new\n".into()));
        assert_eq!(changes(world, &id), "partly-undone");
        undo(world, &id, &[]).expect_status(0);
        assert_eq!((world.read("one"), changes(world, &id)), ("old".into(), "undone".into()));
        undo(world, &id, &[]).expect_status(1);
    });
}

#[test]
fn a_batch_that_does_not_fit_changes_nothing_and_stays_pending() {
    every_identity(|world| {
        // A small file system of the test's own namespace; who may not make one skips aloud.
        let script = "mount -t tmpfs -o size=1m,mode=777 none \"$PWD\" && cd \"$PWD\" && echo old > old && \
            $TG -- sh -c 'rm old; head -c 1024 /dev/zero > ok; head -c 4194304 /dev/zero > big'; echo status $?; ls; \
            tollgate ps --all --json";
        let output = world.shell(&format!("exec unshare -m sh -c {}", quoted(script))).finish();
        if output.err().contains("unshare") {
            eprintln!("skipped for {:?}: {output}", world.way.identity);
            return;
        }
        let out = output.out();
        assert!(out.contains("status 125"), "{output}");
        assert!(output.err().contains("`big`"), "{output}");
        assert!(output.err().contains("No space") || output.err().contains("ENOSPC"), "{output}");
        assert!(out.lines().any(|line| line == "old") && !out.lines().any(|line| line == "ok"), "{output}");
        assert!(out.contains("\"changes\":\"pending\""), "{output}");
    });
}

fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', "'\\''"))
}

#[test]
fn what_the_host_edited_meanwhile_is_a_conflict_and_nothing_is_half_done() {
    every_identity(|world| {
        world.write("x", "old");
        world.write("y", "old");
        let started = world.run_script("echo run > x; echo run > y; touch /tmp/ready; sleep 1").start();
        std::thread::sleep(Duration::from_millis(600));
        world.write("x", "the user's");
        let finished = started.wait();
        assert_eq!(finished.status, 125, "{finished}");
        assert!(finished.err().contains("`x`"), "{finished}");
        assert_eq!((world.read("x"), world.read("y")), ("the user's".into(), "old".into()));
        let id = last(world);
        world.tollgate(["apply", &id, "y"]).finish().expect_status(0);
        assert_eq!((world.read("x"), world.read("y")), ("the user's".into(), "run\n".into()));
    });
}

#[test]
fn a_killed_undo_leaves_the_workspace_before_or_after_it() {
    every_identity(|world| {
        const FILES: usize = 400;
        for number in 0..FILES {
            world.write(&format!("d{}/f{number}", number % 7), "old");
        }
        let id = run(world, "for f in d*/f*; do echo new > $f; done; mkdir made; echo m > made/m");
        let began = Instant::now();
        undo(world, &id, &[]).expect_status(0);
        let whole = began.elapsed();
        undo(world, &id, &["--redo"]).expect_status(0);
        let mut new = true;
        let mut killed = 0;
        for round in 0..8 {
            let flags: &[&str] = if new { &[] } else { &["--redo"] };
            let started = world.tollgate(["undo", &id].into_iter().chain(flags.iter().copied())).start();
            std::thread::sleep(whole * (round + 1) / 9);
            let mut started = started;
            if started.is_running() {
                started.signal(Signal::SIGKILL);
                killed += 1;
            }
            started.wait();
            // Whoever looks next makes it whole.
            let found = changes(world, &id);
            let texts: std::collections::BTreeSet<String> =
                (0..FILES).map(|number| world.read(&format!("d{}/f{number}", number % 7))).collect();
            let expected = if found == "applied" { "new\n" } else { "old" };
            assert_eq!(texts.into_iter().collect::<Vec<_>>(), [expected], "round {round}: {found}");
            assert_eq!(world.workspace.join("made/m").exists(), found == "applied");
            world.tollgate(["verify", &id]).finish().expect_status(0);
            new = found == "applied";
        }
        assert!(killed > 0, "none was killed in time");
        let receipts = world.receipts_of(&id, &["--kind", "fs/write"]);
        assert!(receipts.len() >= FILES, "{}", receipts.len());
    });
}

#[test]
fn before_images_can_be_given_up_and_undo_says_so() {
    every_identity(|world| {
        world.write("a", "1");
        let id = run(world, "echo 2 > a");
        world.tollgate(["discard", &id, "--before-images"]).finish().expect_status(0);
        assert_eq!(world.read("a"), "2\n");
        let refused = undo(world, &id, &["--all-or-nothing"]).expect_status(125);
        assert!(refused.err().contains("old content is not kept"), "{refused}");
    });
}
