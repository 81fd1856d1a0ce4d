//! A supervisor that is killed while it applies a run's changes leaves no half of them.

use nix::sys::signal::Signal;
use serde_json::Value;
use std::{
    collections::{hash_map::RandomState, BTreeSet},
    env, fs,
    hash::{BuildHasher, Hasher},
    path::Path,
    time::{Duration, Instant},
};
use tollgate::{effect::RunId, ledger::Ledger};
use tollgate_tests::{every_identity, World};

/// How many files each run changes in the ordinary suite: more than are synced one by one.
const FEW_FILES: usize = 800;
/// How many where `TOLLGATE_CRASH_ROUNDS` says how many supervisors to kill for each identity.
const MANY_FILES: usize = 5_000;
/// How many of them lie in one folder.
const PER_FOLDER: usize = 100;
/// How many supervisors the ordinary suite kills for each identity, time permitting.
const ROUNDS: usize = 10;
/// How long the ordinary suite goes on for all identities together, once a supervisor was killed in time; slower machines
/// do fewer rounds.
const TIME: Duration = Duration::from_secs(8);

/// Every run writes its number into all files, and in turn makes and deletes a tree: of any two versions the workspace
/// is one.
#[test]
fn a_killed_supervisor_leaves_the_workspace_before_or_after_its_batch() {
    let wanted = rounds_wanted();
    let identities = if nix::unistd::geteuid().is_root() { 2 } else { 1 };
    every_identity(|world| {
        let until = Instant::now() + TIME / identities;
        let rounds = wanted.unwrap_or(ROUNDS);
        prepare(world);
        let mut applying = measure(world);
        let (mut version, mut killed, mut seen) = (1, 0, BTreeSet::new());
        for round in 0..rounds {
            if wanted.is_none() && killed > 0 && Instant::now() > until {
                break;
            }
            let (before, after) = (version, version + 1);
            let Some(run) = killed_while_applying(world, after, applying) else {
                // It was over before the kill: sooner, next time.
                assert_eq!(version_of(world), Ok(after));
                version = after;
                applying = applying * 3 / 4;
                continue;
            };
            killed += 1;
            let record = recovered(world, &run);
            let found = version_of(world).unwrap_or_else(|mixed| panic!("round {round}: {mixed}; {record}"));
            let changes = record["changes"].as_str().expect("a word");
            match changes {
                "pending" => {
                    assert_eq!(found, before, "{record}");
                    world.tollgate(["discard", &run]).finish().expect_status(0);
                }
                "applied" => assert_eq!(found, after, "{record}"),
                other => panic!("round {round}: {other}: {record}"),
            }
            seen.insert(changes.to_owned());
            verify(world, &run, (changes == "applied").then(files));
            version = found;
        }
        eprintln!("{:?}: {killed} supervisors killed while applying; {seen:?}", world.way.identity);
        assert!(killed > 0, "no supervisor was killed in time");
    });
}

/// The same for `tollgate apply`, which has no run of its own around its batch.
#[test]
fn a_killed_apply_leaves_the_workspace_before_or_after_its_batch() {
    let wanted = rounds_wanted();
    let identities = if nix::unistd::geteuid().is_root() { 2 } else { 1 };
    every_identity(|world| {
        let until = Instant::now() + TIME / identities;
        prepare(world);
        let mut whole = None;
        let (mut version, mut within) = (1, 0);
        for round in 0..wanted.unwrap_or(ROUNDS) {
            // One whole apply to measure, and then until a kill came within a batch.
            if wanted.is_none() && within > 0 && Instant::now() > until {
                break;
            }
            let (before, after) = (version, version + 1);
            world.run(["--no-apply", "--", "sh", "-c", &script(after)]).finish().expect_status(0);
            let run = world.last_run()["id"].as_str().expect("an id").to_owned();
            let began = Instant::now();
            let mut apply = world.tollgate(["apply", &run]).start();
            let Some(time) = whole else {
                apply.wait().expect_status(0);
                whole = Some(began.elapsed());
                assert_eq!(version_of(world), Ok(after));
                version = after;
                continue;
            };
            let folder = world.state.join("runs").join(&run);
            let under_way = || folder.join("journal").exists() || folder.join("journal.committed").exists();
            // At any instant, and every other time soon after the workspace begins to change.
            if round % 2 == 1 {
                while apply.is_running() && !under_way() {}
                std::thread::sleep(Duration::mul_f64(time, random() / 40.0));
            } else {
                std::thread::sleep(Duration::mul_f64(time, random()));
            }
            if apply.is_running() {
                apply.signal(Signal::SIGKILL);
            }
            apply.wait();
            within += usize::from(under_way());
            let record = recovered(world, &run);
            assert_eq!(record["state"], "ended", "{record}");
            let found = version_of(world).unwrap_or_else(|mixed| panic!("round {round}: {mixed}; {record}"));
            match record["changes"].as_str().expect("a word") {
                "pending" => assert_eq!(found, before, "{record}"),
                "applied" => assert_eq!(found, after, "{record}"),
                other => panic!("round {round}: {other}: {record}"),
            }
            // How the program ended stays, and what is pending can still be applied.
            assert_eq!(record["outcome"]["type"], "exited", "{record}");
            if found == before {
                world.tollgate(["apply", &run]).finish().expect_status(0);
                assert_eq!(version_of(world), Ok(after));
            }
            verify(world, &run, Some(files()));
            version = after;
        }
        eprintln!("{:?}: {within} applies killed within their batch", world.way.identity);
        assert!(within > 0, "no apply was killed within its batch");
    });
}

fn rounds_wanted() -> Option<usize> {
    env::var("TOLLGATE_CRASH_ROUNDS").ok().map(|text| text.parse().expect("a number of rounds"))
}

fn files() -> usize {
    rounds_wanted().map_or(FEW_FILES, |_| MANY_FILES)
}

fn prepare(world: &World) {
    for number in 0..files() {
        world.write(&path_of(number), "1");
    }
}

fn path_of(number: usize) -> String {
    format!("d{}/f{number}", number / PER_FOLDER)
}

/// Odd versions have no tree, even ones do.
fn script(version: usize) -> String {
    let tree = if version.is_multiple_of(2) { "mkdir -p tree/deep && echo x > tree/deep/leaf" } else { "rm -rf tree" };
    format!("for file in d*/f*; do printf {version} > $file; done; {tree}")
}

fn start(world: &World, version: usize) -> tollgate_tests::Started {
    world.run_script(&script(version)).start()
}

/// How long a whole batch takes here, to kill at any instant of it. Leaves the workspace at version 1.
fn measure(world: &World) -> Duration {
    let run = start(world, 1);
    let id = wait_for_applying(world, run.pid());
    let began = Instant::now();
    run.wait().expect_status(0);
    assert!(id.is_some(), "the first run was never seen applying");
    began.elapsed()
}

/// Starts a run and kills its supervisor while it applies; none if it was over before.
fn killed_while_applying(world: &World, version: usize, applying: Duration) -> Option<String> {
    let mut run = start(world, version);
    let id = wait_for_applying(world, run.pid());
    std::thread::sleep(applying.mul_f64(random()));
    if id.is_none() || !run.is_running() {
        run.wait().expect_status(0);
        return None;
    }
    run.signal(Signal::SIGKILL);
    let finished = run.wait();
    // It may have ended by itself in the last instant.
    (finished.status == 128 + Signal::SIGKILL as i32).then_some(id?)
}

/// The id of the run of this supervisor, once it applies; none if it is over before that was seen.
fn wait_for_applying(world: &World, supervisor: i32) -> Option<String> {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        let runs = world.tollgate(["ps", "--all", "--limit", "1", "--json"]).finish().json_lines();
        let ours = runs.iter().find(|run| run["supervisor_pid"] == supervisor);
        match ours.and_then(|run| run["state"].as_str()) {
            Some("applying") => return ours.and_then(|run| run["id"].as_str()).map(str::to_owned),
            Some("ended") => return None,
            _ => assert!(Instant::now() < deadline, "the run never began to apply"),
        }
    }
}

/// The record after the next command looked.
fn recovered(world: &World, run: &str) -> Value {
    let runs = world.runs();
    let record = runs.into_iter().find(|record| record["id"] == run).expect("the run is in the ledger");
    // The kill can come when all is done but the exit.
    if record["outcome"]["type"] != "exited" {
        assert_eq!(record["outcome"]["type"], "interrupted", "{record}");
    }
    let folder = world.state.join("runs").join(run);
    let mut left: Vec<String> = fs::read_dir(&folder)
        .expect("the run's folder is there")
        .map(|entry| entry.expect("readable").file_name().to_string_lossy().into_owned())
        .filter(|name| name.starts_with("journal") || ["stage", "door", "contents", "control.sock"].contains(&&**name))
        .collect();
    left.sort();
    assert_eq!(left, [""; 0], "left over: {record}");
    record
}

/// The version that the whole workspace is of, or what does not fit.
fn version_of(world: &World) -> Result<usize, String> {
    let mut versions = BTreeSet::new();
    for number in 0..files() {
        let text = fs::read_to_string(world.workspace.join(path_of(number)));
        versions.insert(text.map_err(|error| format!("{}: {error}", path_of(number)))?);
    }
    let entries: usize = fs::read_dir(&world.workspace)
        .and_then(|entries| {
            entries.map(|entry| Ok(fs::read_dir(entry?.path())?.count())).sum::<std::io::Result<usize>>()
        })
        .map_err(|error| error.to_string())?;
    let tree = world.workspace.join("tree/deep/leaf").exists();
    let [version] = versions.iter().collect::<Vec<_>>()[..] else { return Err(format!("versions {versions:?}")) };
    let version: usize = version.parse().map_err(|error| format!("{version}: {error}"))?;
    if tree != version.is_multiple_of(2) || entries != files() + usize::from(tree) {
        return Err(format!("version {version}, and a tree: {tree}, {entries} entries"));
    }
    Ok(version)
}

/// The run's chain holds, and each applied file has one receipt.
fn verify(world: &World, run: &str, applied: Option<usize>) {
    // A copy: a reader of another user would leave its own files beside the ledger.
    let copy = tempfile::tempdir().expect("a temporary folder");
    for entry in fs::read_dir(&world.state).expect("the state is there").flatten() {
        if entry.file_name().to_string_lossy().starts_with("ledger.db") {
            fs::copy(entry.path(), copy.path().join(entry.file_name())).expect("copies");
        }
    }
    fs::set_permissions(copy.path(), std::os::unix::fs::PermissionsExt::from_mode(0o700)).expect("our own folder");
    let ledger = Ledger::open_read_only(copy.path()).expect("opens");
    let id = RunId(run.to_owned());
    ledger.verify_run(&id).unwrap_or_else(|broken| panic!("{broken:?}"));
    ledger.verify_heads().unwrap_or_else(|broken| panic!("{broken:?}"));
    if let Some(applied) = applied {
        let written = world.receipts_of(run, &["--kind", "fs/write"]);
        let files: BTreeSet<&str> = written
            .iter()
            .filter(|receipt| receipt["door"] == "workspace" && receipt["decision"] == "allowed")
            .filter_map(|receipt| receipt["resource"]["path"].as_str())
            .filter(|path| Path::new(path).starts_with("tree").eq(&false))
            .collect();
        assert_eq!(files.len(), applied);
    }
}

/// A number between 0 and 1.
fn random() -> f64 {
    let bits = RandomState::new().build_hasher().finish();
    bits as f64 / u64::MAX as f64
}
