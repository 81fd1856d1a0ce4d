//! The ledger from outside: explained, filtered, verified far from home, exported, pruned, and when its disk is full,
//! read-only or damaged.

use nix::sys::signal::Signal;
use serde_json::Value;
use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};
use tollgate_tests::{every_identity, Finished, World};

fn id(world: &World) -> String {
    world.last_run()["id"].as_str().expect("an id").to_owned()
}

fn tollgate(world: &World, arguments: &[&str]) -> Finished {
    world.tollgate(arguments).finish()
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

/// A copy of the database with its log, elsewhere, owned by whoever runs the suite.
fn carried_away(world: &World) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    for name in ["ledger.db", "ledger.db-wal"] {
        fs::copy(world.state.join(name), folder.path().join(name)).expect("copies");
    }
    let copy = folder.path().join("copy.sqlite");
    let whole = rusqlite::Connection::open(folder.path().join("ledger.db")).expect("opens");
    whole.execute("VACUUM INTO ?1", [copy.to_str().expect("text")]).expect("copies");
    drop(whole);
    // The world's own user is to read it.
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).expect("our own folder");
    fs::set_permissions(&copy, fs::Permissions::from_mode(0o644)).expect("our own file");
    (folder, copy)
}

fn meddle(database: &Path, sql: &str) {
    rusqlite::Connection::open(database).expect("opens").execute_batch(sql).expect("changes");
}

#[test]
fn a_refusal_is_explained_with_the_rule_its_line_and_its_way() {
    every_identity(|world| {
        let policy = world.home.join("mine.toml");
        let rules = "description = \"Mine.\"\nextends = [\"default\"]\n\n[[deny]]\neffect = [\"fs/write\"]\n\
                     path = [\n    \"**/*.lock\",\n]\n";
        fs::write(&policy, rules).expect("writes");
        world.own(&policy);
        let policy = policy.to_str().expect("text");
        let run = world.run(["--policy", policy, "--", "sh", "-c", "echo 1 > a.lock; echo 2 > b; cat /etc/shadow"]);
        run.finish();
        let denied = world.receipts(&["--denied", "--by", "admission", "--resource", "a.lock"]);
        assert_eq!(denied.len(), 1, "{denied:#?}");
        let rule = text(&denied[0]["rule"]);
        assert!(rule.contains("mine.toml:7 ") && rule.contains("**/*.lock"), "{rule}");
        let receipt = text(&denied[0]["id"]);
        let said = tollgate(world, &["explain", receipt]).expect_status(0);
        for part in
            ["passed       receipts → admission\n", "decided      refused by admission\n", "mine.toml:7", "change  "]
        {
            assert!(said.out().contains(part), "{part}: {said}");
        }
        let way = |flags: &[&str]| -> Vec<String> {
            let receipt = world.receipts(flags).pop().expect("a receipt");
            let value = tollgate(world, &["explain", "--json", text(&receipt["id"])]).json_lines().remove(0);
            value["trail"].as_array().expect("a trail").iter().map(|step| text(&step["name"]).to_owned()).collect()
        };
        let chain: Vec<String> =
            world.last_run()["chain"].as_array().expect("a chain").iter().map(|name| text(name).to_owned()).collect();
        assert_eq!((&*chain[0], &*chain[chain.len() - 1]), ("receipts", "world"), "{chain:?}");
        assert_eq!(way(&["--kind", "fs/write", "--decision", "allowed", "--resource", "b"]), chain);
        assert_eq!(way(&["--resource", "/etc/shadow"]), ["view"], "a layer of the jail decides alone");
        let run = tollgate(world, &["explain", "latest"]);
        for part in
            ["refused by admission: fs/write a.lock", "refused by view: fs/read /etc/shadow", "mine.toml:7", "chain  "]
        {
            assert!(run.out().contains(part), "{part}: {run}");
        }
        assert_eq!(tollgate(world, &["explain", "latest.999"]).status, 1);
    });
}

#[test]
fn a_copy_verifies_elsewhere_and_what_is_done_to_it_is_located() {
    every_identity(|world| {
        for script in ["echo 1 > a", "echo 2 > b", "cat /etc/shadow"] {
            world.run_script(script).finish();
        }
        let last = id(world);
        let key = tollgate(world, &["verify", "--public-key"]).expect_status(0);
        let key = key.out().trim().to_owned();
        let checkpoint = world.temp.join("checkpoint");
        fs::write(&checkpoint, tollgate(world, &["verify", "--checkpoint"]).out()).expect("writes");
        world.own(&checkpoint);
        let checkpoint = checkpoint.to_str().expect("text");
        let all = tollgate(world, &["verify", "--all"]);
        assert!(all.status == 0 && all.out().starts_with("all holds: 3 runs (0 not sealed)"), "{all}");
        let private = world.state.join("host.key");
        assert_eq!(fs::metadata(&private).expect("there").permissions().mode() & 0o7777, 0o600);

        let verify = |copy: &Path| {
            let copy = copy.to_str().expect("text");
            // A host that has no ledger of its own.
            tollgate(
                world,
                &["--state", "/nonexistent", "verify", "--ledger", copy, "--key", &key, "--expect", checkpoint],
            )
        };
        let (_folder, copy) = carried_away(world);
        let found = verify(&copy);
        assert!(found.status == 0 && found.out().contains(&format!("signed with {key}")), "{found}");
        let run = "(SELECT n FROM runs ORDER BY n DESC LIMIT 1)";
        let table = [
            (
                "edit",
                format!("UPDATE receipts SET resource = '/etc/issue' WHERE id = ({run} << 32 | 2)"),
                "receipt 2: it was changed",
            ),
            ("delete", format!("DELETE FROM receipts WHERE id = ({run} << 32 | 2)"), "it is missing"),
            (
                "record",
                format!("UPDATE runs SET record = json_set(record, '$.policy', 'x') WHERE n = {run}"),
                "the record of run",
            ),
            (
                "the whole last run",
                format!(
                    "DELETE FROM heads WHERE n = 3; DELETE FROM receipts WHERE id > {run} << 32; \
                     DELETE FROM chains WHERE run = {run}; DELETE FROM runs WHERE n = {run}"
                ),
                "ends at head 2, and the checkpoint names head 3",
            ),
        ];
        for (way, sql, said) in table {
            let (_folder, copy) = carried_away(world);
            meddle(&copy, &format!("PRAGMA foreign_keys = off; {sql}"));
            let found = verify(&copy);
            assert!(found.status == 1 && found.out().contains(said), "{way}: {found}");
            assert!(way.starts_with("the whole") || found.out().contains(&last), "{way}: {found}");
        }
        let stranger = "1".repeat(64);
        let copy = copy.to_str().expect("text");
        let other = tollgate(world, &["verify", "--ledger", copy, "--key", &stranger]);
        assert!(other.status == 1 && other.out().contains("signed with another key"), "{other}");
        assert_eq!(tollgate(world, &["verify", "--all", "--key", "nonsense"]).status, 2);
        assert_eq!(tollgate(world, &["verify"]).status, 2);
    });
}

#[test]
fn an_export_verifies_anywhere() {
    every_identity(|world| {
        world.run_script("echo 1 > a; echo 2 > b").finish();
        let file = world.temp.join("run.jsonl");
        let path = file.to_str().expect("text");
        tollgate(world, &["export", "latest", "--output", path]).expect_status(0);
        let key = tollgate(world, &["verify", "--public-key"]).out().trim().to_owned();
        let check = || tollgate(world, &["--state", "/nonexistent", "verify", "--export", path, "--key", &key]);
        let found = check();
        assert!(found.status == 0 && found.out().contains(&id(world)), "{found}");
        let exported = fs::read_to_string(&file).expect("reads");
        fs::write(&file, exported.replacen("\"allowed\"", "\"refused\"", 1)).expect("writes");
        let found = check();
        assert!(found.status == 1 && found.out().contains("it was changed after it was written"), "{found}");
    });
}

#[test]
fn pruning_takes_the_oldest_and_neither_the_pending_nor_the_running() {
    every_identity(|world| {
        // Output is logged, so each run takes about a megabyte.
        let noisy = "head -c 1000000 /dev/zero | tr '\\0' x; echo 1 > made";
        let mut ids = Vec::new();
        for _ in 0..3 {
            world.run_script(noisy).finish();
            ids.push(id(world));
        }
        world.run(["--no-apply", "--", "sh", "-c", &format!("{noisy}2")]).finish();
        let pending = id(world);
        let live = world.run_script("sleep 30").start();
        let deadline = Instant::now() + Duration::from_secs(20);
        while world.last_run()["state"] != "running" {
            assert!(Instant::now() < deadline, "the last run does not start");
            std::thread::sleep(Duration::from_millis(20));
        }
        let running = id(world);
        let prune = |flags: &[&str]| tollgate(world, &[&["prune", "--keep-bytes", "2500KB", "--json"], flags].concat());
        let foretold = prune(&["--dry-run"]).json_lines();
        let done = prune(&[]).expect_status(0);
        let names = |lines: &[Value], action: &str| -> Vec<String> {
            let some = lines.iter().filter(|line| line["action"] == action);
            some.filter_map(|line| Some(line["run"].as_str()?.to_owned())).collect()
        };
        let pruned = names(&done.json_lines(), "pruned");
        assert_eq!(pruned, names(&foretold, "would-prune"), "{done}");
        assert!(!pruned.is_empty() && ids.starts_with(&pruned), "{done}");
        assert!(!pruned.contains(&pending) && !pruned.contains(&running), "{done}");
        let everything = tollgate(world, &["prune", "--keep-bytes", "1B"]);
        for kept in [&pending, &running] {
            assert!(everything.out().contains(&format!("kept {kept}: ")), "{everything}");
        }
        let verified = tollgate(world, &["verify", "--all"]);
        assert!(verified.status == 0 && verified.out().contains("cut on "), "{verified}");
        let explained = tollgate(world, &["explain", &format!("{}.1", ids[0])]);
        assert!(explained.status == 1 && explained.err().contains("was pruned on"), "{explained}");
        tollgate(world, &["apply", &pending]).expect_status(0);
        tollgate(world, &["kill", &running]).expect_status(0);
        live.wait();
        let verified = tollgate(world, &["verify", "--all"]);
        assert_eq!(verified.status, 0, "{verified}");
    });
}

#[test]
fn after_a_killed_supervisor_everything_verifies() {
    every_identity(|world| {
        let mut live = world.run_script("echo 1 > a; sleep 30").start();
        let deadline = Instant::now() + Duration::from_secs(20);
        while world.runs().last().is_none_or(|run| run["state"] != "running") {
            assert!(live.is_running() && Instant::now() < deadline, "the run does not start");
            std::thread::sleep(Duration::from_millis(20));
        }
        let unsealed = tollgate(world, &["verify", "latest"]);
        assert!(unsealed.status == 0 && unsealed.out().contains("not sealed while the run goes on"), "{unsealed}");
        live.signal(Signal::SIGKILL);
        live.wait();
        // Whoever looks first closes the run, in one step with its seal.
        tollgate(world, &["ps", "--all"]).expect_status(0);
        let verified = tollgate(world, &["verify", "--all"]);
        assert!(verified.status == 0 && verified.out().contains("(0 not sealed)"), "{verified}");
        let explained = tollgate(world, &["explain", "latest"]);
        assert!(explained.out().contains("ended        interrupted"), "{explained}");
    });
}

#[test]
fn a_ledger_that_was_changed_is_read_with_a_warning() {
    every_identity(|world| {
        world.run_script("echo 1 > a").finish();
        world.run_script("echo 2 > a").finish();
        assert!(!tollgate(world, &["receipts"]).err().contains("warning"));
        meddle(&world.state.join("ledger.db"), "DELETE FROM heads WHERE n = 2");
        for name in ["ledger.db-wal", "ledger.db-shm"].map(|name| world.state.join(name)) {
            if name.exists() {
                world.own(&name);
            }
        }
        for command in [&["receipts"][..], &["ps", "--all"], &["inspect", "latest"], &["explain", "latest"]] {
            let said = tollgate(world, command);
            assert_eq!(said.status, 0, "{said}");
            assert!(
                said.err().contains("warning: the ledger does not verify: the host's chain ends at head 1"),
                "{said}"
            );
            assert!(!said.out().is_empty());
        }
        let verified = tollgate(world, &["verify", "--all"]);
        assert!(verified.status == 1 && verified.out().contains("BROKEN heads"), "{verified}");
    });
}

#[test]
fn what_cannot_be_recorded_does_not_run() {
    every_identity(|world| {
        world.run_script("true").finish().expect_status(0);
        let refused = |said: &str| {
            let run = world.run_script("echo happened > proof").finish();
            assert_eq!(run.status, 125, "{run}");
            assert!(run.err().contains(said), "{said}: {run}");
            assert!(!world.workspace.join("proof").exists());
        };
        let database = world.state.join("ledger.db");
        let kept = fs::read(&database).expect("reads");
        let log = fs::read(world.state.join("ledger.db-wal")).expect("reads");
        for name in ["ledger.db-wal", "ledger.db-shm"] {
            fs::remove_file(world.state.join(name)).expect("removes");
        }
        fs::write(&database, vec![b'x'; kept.len()]).expect("writes");
        refused("is damaged; keep a copy");
        fs::write(&database, &kept).expect("writes");
        fs::write(world.state.join("ledger.db-wal"), log).expect("writes");
        world.own(&world.state.join("ledger.db-wal"));
        world.run_script("true").finish().expect_status(0);

        let key = world.state.join("host.key");
        let good = fs::read(&key).expect("reads");
        fs::write(&key, "garbage").expect("writes");
        refused("holds no key");
        fs::write(&key, good).expect("writes");
        world.run_script("true").finish().expect_status(0);
        assert_eq!(tollgate(world, &["verify", "--all"]).status, 0);
    });
}

/// Needs a file system of its own, which only root may mount.
#[test]
fn a_full_or_read_only_state_directory_refuses_and_says_what_to_do() {
    use nix::mount::{mount, umount, MsFlags};
    if !nix::unistd::geteuid().is_root() {
        eprintln!("skipped: only root may mount a small file system");
        return;
    }
    every_identity(|world| {
        let none = None::<&str>;
        let size = Some("size=2m,mode=0700");
        if let Err(error) = mount(Some("none"), &world.state, Some("tmpfs"), MsFlags::empty(), size) {
            eprintln!("skipped: this machine's root may not mount: {error}");
            return;
        }
        struct Mounted<'a>(&'a Path);
        impl Drop for Mounted<'_> {
            fn drop(&mut self) {
                let _ = umount(self.0);
            }
        }
        let _mounted = Mounted(&world.state);
        world.own(&world.state);
        world.run_script("true").finish().expect_status(0);
        let filler = world.state.join("filler");
        let mut file = fs::File::create(&filler).expect("makes");
        while std::io::Write::write(&mut file, &[0; 4096]).is_ok_and(|written| written > 0) {}
        let mut refused = 0;
        // What was held back serves the first ones; then nothing new begins.
        for number in 0..200 {
            let run = world.run_script(&format!("echo {number} > proof")).finish();
            if run.status == 125 {
                assert!(run.err().contains("full") || run.err().contains("No space left"), "{run}");
                assert_ne!(
                    fs::read_to_string(world.workspace.join("proof")).unwrap_or_default(),
                    format!("{number}\n")
                );
                refused += 1;
                if refused == 2 {
                    break;
                }
            }
        }
        assert_eq!(refused, 2, "a full disk refuses");
        drop(file);
        fs::remove_file(&filler).expect("removes");
        world.run_script("true").finish().expect_status(0);
        let verified = tollgate(world, &["verify", "--all"]);
        assert_eq!(verified.status, 0, "{verified}");

        // This mount only: others of the same file system may live on in jails of tests beside this one.
        let flags = MsFlags::MS_REMOUNT | MsFlags::MS_BIND | MsFlags::MS_RDONLY;
        mount(none, &world.state, none, flags, none).expect("remounts");
        let run = world.run_script("echo happened > proof").finish();
        assert_eq!(run.status, 125, "{run}");
        assert!(run.err().to_lowercase().contains("read-only"), "{run}");
        let listed = tollgate(world, &["receipts"]);
        assert_eq!(listed.status, 0, "what only reads goes on: {listed}");
    });
}
