//! A run whose supervisor was killed at any instant is resumed, and ends as one that nobody disturbed.

use nix::sys::signal::Signal;
use serde_json::Value;
use std::{
    collections::{hash_map::RandomState, BTreeMap},
    fs,
    hash::{BuildHasher, Hasher},
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};
use tollgate_tests::{every_identity, switches, Finished, World};

/// Programs that can be started again from their beginning, each with pauses so that there is an instant to hit.
const CORPUS: [(&str, &str); 5] = [
    ("writes", "for i in 1 2 3 4 5 6 7 8; do echo $i > f$i; sleep 0.02; done; echo done > end"),
    (
        "replaces",
        "for i in 1 2 3 4 5 6; do echo $i > new.$i; mv new.$i out.$i; sleep 0.02; done; rm -f seed; mkdir -p d/e; \
         echo x > d/e/f; chmod 700 d",
    ),
    (
        "builds",
        "for s in src/*; do o=obj/$(basename $s).o; if ! [ -e $o ]; then mkdir -p obj; cat $s > $o.part; sleep 0.02; \
         mv $o.part $o; fi; done; cat obj/*.o > program",
    ),
    (
        "python",
        "python3 -c \"import os, time\nfor i in range(8):\n    os.makedirs(f'p/{i}', exist_ok=True)\n    \
         open(f'p/{i}/t', 'w').write('x' * (i * 1000))\n    time.sleep(0.02)\nif os.path.exists('seed'): os.rename('seed', 'grown')\n\"",
    ),
    ("asks", "for i in 1 2 3 4 5; do /run/tollgate/bin/tollgate effect fs/write path=asked$i content=$(echo $i | base64); sleep 0.01; done; cp asked5 copy"),
];

fn prepare(world: &World) {
    for entry in fs::read_dir(&world.workspace).expect("ours").flatten() {
        let path = entry.path();
        if path.is_dir() {
            fs::remove_dir_all(path).expect("ours");
        } else {
            fs::remove_file(path).expect("ours");
        }
    }
    world.write("seed", "seed");
    for name in ["a", "b", "c", "d"] {
        world.write(&format!("src/{name}"), format!("source {name}\n"));
    }
}

/// Names, modes and contents; times and inodes differ between two runs of anything.
fn tree(root: &Path) -> BTreeMap<PathBuf, String> {
    let mut found = BTreeMap::new();
    let mut pending = vec![root.to_path_buf()];
    while let Some(folder) = pending.pop() {
        for entry in fs::read_dir(&folder).expect("readable").flatten() {
            let (path, data) = (entry.path(), entry.metadata().expect("is there"));
            let content = if data.is_dir() {
                pending.push(path.clone());
                String::new()
            } else {
                String::from_utf8_lossy(&fs::read(&path).expect("readable")).into_owned()
            };
            found.insert(path, format!("{:o} {}:{} {content}", data.mode(), data.uid(), data.gid()));
        }
    }
    found
}

fn inspect(world: &World, run: &str) -> Value {
    world.tollgate(["inspect", run, "--json"]).finish().expect_status(0).json_lines().remove(0)
}

fn last(world: &World) -> String {
    world.last_run()["id"].as_str().expect("a run has an id").to_owned()
}

fn resume(world: &World, run: &str) -> Finished {
    world.tollgate(["resume", run]).finish()
}

/// A number between 0 and 1.
fn random() -> f64 {
    RandomState::new().build_hasher().finish() as f64 / u64::MAX as f64
}

/// Kills this after a random part of the time, and says whether that was in time.
fn killed(invocation: tollgate_tests::Invocation, whole: Duration) -> bool {
    let mut started = invocation.start();
    std::thread::sleep(whole.mul_f64(random()));
    let alive = started.is_running();
    if alive {
        started.signal(Signal::SIGKILL);
    }
    started.wait();
    alive
}

#[test]
fn killed_at_any_instant_and_resumed_it_ends_as_if_nobody_had_disturbed_it() {
    let rounds: usize = std::env::var("TOLLGATE_CRASH_ROUNDS").ok().map_or(3, |text| text.parse().expect("a number"));
    every_identity(|world| {
        let mut resumed = 0;
        for (name, script) in CORPUS {
            prepare(world);
            let began = Instant::now();
            world.run_script(script).finish().expect_status(0);
            let whole = began.elapsed();
            let expected = tree(&world.workspace);
            for round in 0..rounds {
                prepare(world);
                let (before, known) = (tree(&world.workspace), last(world));
                if !killed(world.run_script(script), whole) {
                    assert_eq!(tree(&world.workspace), expected, "{name}, round {round}");
                    continue;
                }
                // The resume is killed too, now and then.
                let mut run = last(world);
                if run == known {
                    // Not even in the ledger.
                    assert_eq!(tree(&world.workspace), before, "{name}, round {round}");
                    continue;
                }
                if round % 2 == 1 && inspect(world, &run)["outcome"]["type"] == "interrupted" {
                    killed(world.tollgate(["resume", &run]), whole);
                    run = last(world);
                }
                let mut record = inspect(world, &run);
                if record["outcome"]["type"] == "interrupted" && record["changes"] != "applied" {
                    let mut finished = resume(world, &run);
                    if finished.status == 125 && finished.err().contains("resume that one") {
                        let of = record["resumes"].as_str().expect("it resumes another").to_owned();
                        finished = resume(world, &of);
                    }
                    assert_eq!(finished.status, 0, "{name}, round {round}: {finished}\n{record}");
                    record = inspect(world, &last(world));
                    assert!(record["resumes"].is_string(), "{record}");
                    resumed += 1;
                }
                assert_eq!(tree(&world.workspace), expected, "{name}, round {round}: {record}");
                world.tollgate(["verify", &last(world)]).finish().expect_status(0);
            }
        }
        assert!(resumed > 0, "nothing was killed in time");
        eprintln!("{:?}: {resumed} runs resumed", world.way.identity);
        world.assert_nothing_left(Duration::from_secs(5));
    });
}

/// Starts a run that writes `one` and waits, kills its supervisor there, and gives its id.
fn interrupted(world: &World, flags: &[&str], script: &str) -> String {
    let arguments = flags.iter().copied().chain(["--", "sh", "-c", script]);
    let started = world.run(arguments).start();
    let until = Instant::now() + Duration::from_secs(20);
    loop {
        let run = world.runs().pop();
        let upper = run.as_ref().and_then(|run| run["id"].as_str()).map(|id| world.state.join("runs").join(id));
        let there =
            |folder: PathBuf| folder.join("layer/upper/one").exists() || folder.join("layer/mirror/one").exists();
        if upper.is_some_and(there) {
            break;
        }
        assert!(Instant::now() < until, "the program never began");
        std::thread::sleep(Duration::from_millis(10));
    }
    started.signal(Signal::SIGKILL);
    started.wait();
    last(world)
}

const WAITS: &str = "[ -e one ] && { cat one > two; exit 7; }; echo first > one; sleep 30";

#[test]
fn the_program_finds_its_files_as_it_left_them_and_its_status_is_passed_on() {
    every_identity(|world| {
        for flags in [&[][..], &["--mirror"]] {
            prepare(world);
            let id = interrupted(world, flags, WAITS);
            assert!(!world.workspace.join("one").exists());
            let finished = resume(world, &id);
            assert_eq!(finished.status, 7, "{finished}");
            assert_eq!((world.read("one"), world.read("two")), ("first\n".into(), "first\n".into()));
            let record = inspect(world, &last(world));
            assert_eq!(record["resumes"], id.as_str(), "{record}");
            assert_eq!(inspect(world, &id)["changes"], "resumed");
            let (uid, gid) = world.ids();
            let data = fs::metadata(world.workspace.join("one")).expect("is there");
            assert_eq!((data.uid(), data.gid()), (uid, gid));
            let again = resume(world, &id);
            assert!(again.status == 125 && again.err().contains("was taken over by"), "{again}");
            let over = resume(world, &last(world));
            assert!(over.status == 125 && over.err().contains("was not interrupted"), "{over}");
            world.tollgate(["undo", "latest"]).finish().expect_status(0);
            assert!(!world.workspace.join("one").exists());
        }
    });
}

#[test]
fn what_the_user_changed_meanwhile_is_a_conflict_of_the_resumed_run() {
    every_identity(|world| {
        prepare(world);
        let script = "[ -e one ] && { echo run > seed; exit 0; }; echo first > one; echo x >> seed; sleep 30";
        let id = interrupted(world, &[], script);
        // Give the program time for its second write.
        world.write("seed", "the user's");
        let finished = resume(world, &id);
        assert_eq!(finished.status, 125, "{finished}");
        assert!(finished.err().contains("seed"), "{finished}");
        assert_eq!(world.read("seed"), "the user's");
    });
}

#[test]
fn a_policy_that_changed_a_value_that_is_not_kept_and_decided_changes_are_refused() {
    every_identity(|world| {
        prepare(world);
        let policy = world.home.join("p.toml");
        let text = "extends = [\"default\"]\n";
        fs::write(&policy, text).expect("writable");
        world.own(&policy);
        let name = policy.display().to_string();
        let id = interrupted(world, &["--policy", &name], WAITS);
        fs::write(&policy, format!("{text}[[deny]]\neffect = [\"fs/write\"]\npath = [\"x\"]\n")).expect("writable");
        let refused = resume(world, &id).expect_status(125);
        assert!(refused.err().contains("is not what it was"), "{refused}");
        fs::write(&policy, text).expect("writable");
        assert_eq!(resume(world, &id).status, 7);

        prepare(world);
        let id = interrupted(world, &["--env", "SECRET=hush"], WAITS);
        let ledger = fs::read(world.state.join("ledger.db")).expect("readable");
        let log = fs::read(world.state.join("ledger.db-wal")).unwrap_or_default();
        assert!(![ledger, log].iter().any(|bytes| bytes.windows(4).any(|window| window == b"hush")), "a value is kept");
        let refused = resume(world, &id).expect_status(125);
        assert!(refused.err().contains("--env SECRET=VALUE"), "{refused}");
        let finished = world.tollgate(["resume", &id, "--env", "SECRET=hush"]).finish();
        assert_eq!(finished.status, 7, "{finished}");

        prepare(world);
        let id = interrupted(world, &[], "echo more > more; echo first > one; sleep 30");
        world.tollgate(["apply", &id, "one"]).finish().expect_status(0);
        let refused = resume(world, &id).expect_status(125);
        assert!(refused.err().contains("applied or discarded already"), "{refused}");
        fs::remove_file(&policy).expect("ours");
    });
}

#[test]
fn what_may_or_may_not_have_happened_is_asked_about_and_never_silently_repeated() {
    const ASKS: &str = "/run/tollgate/bin/tollgate effect run/start command=true; echo $? > status";
    every_identity(|world| {
        for (decision, decided_by) in [("--skip", "resume"), ("--redo", "world")] {
            prepare(world);
            // The first intent of a run is that it is started; the second is what its program asks for.
            let finished = switches::tollgate(world, &["run", "--", "sh", "-c", ASKS])
                .env("TOLLGATE_CRASH_AT", "intent-written:2")
                .finish();
            assert_eq!(finished.status, 128 + Signal::SIGKILL as i32, "{finished}");
            let id = last(world);
            let asked = resume(world, &id).expect_status(125);
            let doubt = format!("{id}.2");
            assert!(asked.err().contains(&format!("{doubt} run/start")) && asked.err().contains("--skip"), "{asked}");
            assert_eq!(last(world), id, "nothing was started");
            let wrong = world.tollgate(["resume", &id, "--redo", "7"]).finish().expect_status(125);
            assert!(wrong.err().contains("no effect in doubt"), "{wrong}");
            world.tollgate(["resume", &id, decision, &doubt]).finish().expect_status(0);
            assert_eq!(world.read("status") == "0\n", decision == "--skip", "{}", world.read("status"));
            let receipts = world.receipts_of(&last(world), &["--kind", "run/start"]);
            let asked = receipts.iter().find(|receipt| receipt["door"] == "api").expect("it was asked for again");
            assert_eq!(asked["decided_by"], decided_by, "{asked}");
        }
    });
}
