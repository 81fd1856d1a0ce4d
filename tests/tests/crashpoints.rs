//! A supervisor that is killed at any instant: the ledger verifies, nothing jailed lives on, the workspace is before or
//! after, and what the program was told agrees with the receipts.
//!
//! The observer is this test: it reads the program's own output as it comes, the host's processes and mounts, the
//! workspace's bytes. `scripts/crash` does some hundreds of rounds.

use nix::sys::signal::Signal;
use serde_json::Value;
use std::{
    collections::{hash_map::RandomState, BTreeMap, BTreeSet},
    fs,
    hash::{BuildHasher, Hasher},
    time::{Duration, Instant},
};
use tollgate::{crash::Point, effect::RunId, ledger::Ledger};
use tollgate_tests::{every_identity, switches, Finished, Invocation, World};

/// Files that each run writes through the workspace.
const FILES: usize = 12;
/// Files that each run writes and reads through the API door.
const ASKED: usize = 4;
/// Each occurrence of a point that the ordinary suite kills at; the named run goes through all of them.
const OCCURRENCES: [usize; 2] = [1, 4];
/// How many times `scripts/crash` looks for a further occurrence of a point.
const MOST_OCCURRENCES: usize = 40;
/// How many random instants the ordinary suite kills at, for each identity.
const ROUNDS: usize = 5;
/// How long what a killed supervisor leaves may take to be gone.
const GONE: Duration = Duration::from_secs(5);

#[test]
fn killed_at_a_named_point_everything_is_before_or_after() {
    let all = rounds_wanted().is_some();
    every_identity(|world| {
        let mut version = first(world);
        let mut killed: BTreeMap<&str, usize> = BTreeMap::new();
        for point in Point::ALL {
            let occurrences: Vec<usize> = match all {
                true => (1..=MOST_OCCURRENCES).collect(),
                false => OCCURRENCES.to_vec(),
            };
            for occurrence in occurrences {
                let at = format!("{}:{occurrence}", point.name());
                let finished = run(world, version + 1, &at).env("TOLLGATE_CRASH_AT", &at).finish();
                let died = finished.status == 128 + Signal::SIGKILL as i32;
                version = settled(world, version, &finished, &at);
                *killed.entry(point.name()).or_default() += usize::from(died);
                if !died {
                    // The point is not reached so often.
                    finished.expect_status(0);
                    break;
                }
            }
            assert!(killed[point.name()] > 0, "{} is never reached", point.name());
        }
        eprintln!("{:?}: killed at {killed:?}", world.way.identity);
    });
}

#[test]
fn killed_at_a_random_instant_everything_is_before_or_after() {
    let rounds = rounds_wanted().unwrap_or(ROUNDS);
    every_identity(|world| {
        // The first one may have to build its program.
        first(world);
        let began = Instant::now();
        let mut version = first(world);
        let whole = began.elapsed();
        let (mut killed, mut before, mut after) = (0, 0, 0);
        for round in 0..rounds {
            let at = format!("round {round}");
            let started = run(world, version + 1, &at).start();
            std::thread::sleep(whole.mul_f64(random()));
            started.signal(Signal::SIGKILL);
            let finished = started.wait();
            killed += usize::from(finished.status == 128 + Signal::SIGKILL as i32);
            let found = settled(world, version, &finished, &at);
            before += usize::from(found == version);
            after += usize::from(found != version);
            version = found;
        }
        eprintln!("{:?}: {killed} of {rounds} killed; {before} before, {after} after", world.way.identity);
        assert!(killed > 0, "no supervisor was killed in time");
        run(world, version + 1, "last").finish().expect_status(0);
    });
}

fn rounds_wanted() -> Option<usize> {
    std::env::var("TOLLGATE_CRASH_ROUNDS").ok().map(|text| text.parse().expect("a number of rounds"))
}

/// The workspace at version 1, by a whole run.
fn first(world: &World) -> usize {
    run(world, 1, "first").finish().expect_status(0);
    assert_eq!(version_of(world), Ok(1));
    1
}

/// A run that writes its version everywhere, and says what it was told. Its mark tells it from every other run.
fn run(world: &World, version: usize, mark: &str) -> Invocation {
    let program = format!(
        "# {mark}\n\
         import tollgate\n\
         print('begun', flush=True)\n\
         for number in range({ASKED}):\n    \
             tollgate.write('asked%d' % number, '{version}')\n    \
             print('told', number, flush=True)\n    \
             tollgate.read('asked%d' % number)\n    \
             print('read', number, flush=True)\n\
         with tollgate.meter('work'):\n    \
             for number in range({FILES}):\n        \
                 open('file%d' % number, 'w').write('{version}')\n\
         print('metered', flush=True)\n"
    );
    switches::tollgate(world, &["run", "--", "/usr/bin/python3", "-c", &program])
}

/// Looks at everything, discards what is pending, and says at which version the workspace is.
fn settled(world: &World, before: usize, finished: &Finished, at: &str) -> usize {
    let out = finished.out();
    let begun = out.lines().filter(|line| *line == "begun").count();
    let said = |word: &str| out.lines().filter(|line| line.starts_with(word)).count();
    // The next command of any kind settles what was interrupted.
    let listed = world.tollgate(["ps", "--all", "--json"]).finish().expect_status(0).json_lines();
    world.assert_nothing_left(GONE);
    let found = version_of(world).unwrap_or_else(|mixed| panic!("{at}: {mixed}"));
    assert!([before, before + 1].contains(&found), "{at}: version {found} of {before}");

    let latest = listed.iter().max_by_key(|run| run["started_at"].as_str().unwrap_or_default().to_owned());
    let latest = latest.expect("there was a first run");
    let id = latest["id"].as_str().expect("an id").to_owned();
    for run in &listed {
        assert_eq!(run["state"], "ended", "{at}: {run}");
    }
    if !latest["command"].to_string().contains(&format!("# {at}\\n")) {
        // Killed before it was in the ledger: then nothing has begun, and nothing of it is left.
        assert_eq!((begun, found), (0, before), "{at}: {finished}");
        let known: BTreeSet<&str> = listed.iter().filter_map(|run| run["id"].as_str()).collect();
        for entry in fs::read_dir(world.state.join("runs")).expect("runs have folders").flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            assert!(known.contains(&*name), "{at}: the folder of a run that nobody knows: {name}");
        }
        return found;
    }
    let receipts = world.receipts_of(&id, &[]);
    let of = |kind: &str, door: &str| {
        receipts.iter().filter(|receipt| receipt["kind"] == kind && receipt["door"] == door).collect::<Vec<&Value>>()
    };
    let starts = of("run/start", "control");
    assert!(starts.len() <= 1, "{at}: {starts:?}");
    if begun > 0 {
        let decision = starts.first().map(|receipt| &receipt["decision"]);
        assert!(decision.is_some_and(|word| word == "allowed" || word == "in-doubt"), "{at}: it ran: {starts:?}");
    }
    for (kind, told) in [("fs/write", said("told")), ("fs/read", said("read"))] {
        let answered = of(kind, "api").into_iter().filter(|receipt| receipt["decision"] == "allowed").count();
        // The one that was under way may have its receipt; no other has one, and none has two.
        let possible = told..=ASKED.min(told + 1);
        assert!(possible.contains(&answered), "{at}: told of {told} {kind}, receipts of {answered}");
    }
    match latest["changes"].as_str().expect("a word") {
        "applied" => assert_eq!(found, before + 1, "{at}: {latest}"),
        "pending" => {
            assert_eq!(found, before, "{at}: {latest}");
            world.tollgate(["discard", &id]).finish().expect_status(0);
            assert_eq!(version_of(world), Ok(before), "{at}");
        }
        "none" => assert_eq!(found, before, "{at}: {latest}"),
        other => panic!("{at}: {other}: {latest}"),
    }
    verify(world, &id, at);
    found
}

/// The version that the whole workspace is of, or what does not fit.
fn version_of(world: &World) -> Result<usize, String> {
    let names = (0..FILES).map(|number| format!("file{number}")).chain((0..ASKED).map(|n| format!("asked{n}")));
    let mut versions = BTreeSet::new();
    for name in names {
        let text = fs::read_to_string(world.workspace.join(&name)).map_err(|error| format!("{name}: {error}"))?;
        versions.insert(text.parse::<usize>().map_err(|error| format!("{name}: {text:?}: {error}"))?);
    }
    let count = fs::read_dir(&world.workspace).map_err(|error| error.to_string())?.count();
    match versions.into_iter().collect::<Vec<_>>()[..] {
        [version] if count == FILES + ASKED => Ok(version),
        ref versions => Err(format!("versions {versions:?} in {count} entries")),
    }
}

/// The run's chain and the host's hold, in a copy: a reader of another user would leave files beside the ledger.
fn verify(world: &World, run: &str, at: &str) {
    let copy = tempfile::tempdir().expect("a temporary folder");
    for entry in fs::read_dir(&world.state).expect("the state is there").flatten() {
        if entry.file_name().to_string_lossy().starts_with("ledger.db") {
            fs::copy(entry.path(), copy.path().join(entry.file_name())).expect("copies");
        }
    }
    fs::set_permissions(copy.path(), std::os::unix::fs::PermissionsExt::from_mode(0o700)).expect("our own folder");
    let ledger = Ledger::open_read_only(copy.path()).expect("opens");
    ledger.verify_run(&RunId(run.to_owned())).unwrap_or_else(|broken| panic!("{at}: {broken:?}"));
    ledger.verify_heads().unwrap_or_else(|broken| panic!("{at}: {broken:?}"));
}

/// A number between 0 and 1.
fn random() -> f64 {
    RandomState::new().build_hasher().finish() as f64 / u64::MAX as f64
}
