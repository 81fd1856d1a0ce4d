//! What a person decides, and budgets that runs share: from another terminal, as a person would.

use nix::sys::signal::Signal;
use serde_json::Value;
use std::{
    fs,
    time::{Duration, Instant},
};
use tollgate_tests::{every_identity, observe, World};

/// How long an answer, a notice or an end may take.
const SOON: Duration = Duration::from_secs(20);

/// Writes an environment file through the API door and says what came of it.
const ASK: &str = "import tollgate\ntry:\n    tollgate.write('.envrc', 'x')\n    print('written', flush=True)\nexcept tollgate.Refused as refused:\n    print('refused', refused, flush=True)\n";

fn asking(world: &World, wait: &str) -> tollgate_tests::Invocation {
    world.run(["--ask", wait, "--", "/usr/bin/python3", "-c", ASK])
}

/// The one question that waits.
fn question(world: &World) -> Value {
    let deadline = Instant::now() + SOON;
    loop {
        let waiting = world.tollgate(["approvals", "--json"]).finish().expect_status(0).json_lines();
        if let Some(parked) = waiting.into_iter().find(|one| one["state"] == "parked") {
            return parked;
        }
        assert!(Instant::now() < deadline, "no question ever waited");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn id(of: &Value) -> String {
    of["id"].as_str().expect("an id").to_owned()
}

#[test]
fn with_nobody_there_it_is_refused_at_once_and_recorded_so() {
    every_identity(|world| {
        let output = asking(world, "refuse").finish().expect_status(0);
        assert!(output.out().starts_with("refused"), "{output}");
        assert!(!world.workspace.join(".envrc").exists());
        let refused = world.receipts(&["--denied"]);
        assert_eq!(refused[0]["decided_by"], "approval", "{refused:?}");
        assert!(refused[0]["reason"].as_str().expect("text").contains("nobody is there"), "{refused:?}");
        assert!(refused[0]["rule"].as_str().expect("text").contains("base.toml"), "{refused:?}");
    });
}

#[test]
fn only_the_asking_call_waits_and_what_is_approved_lands() {
    every_identity(|world| {
        let program = format!(
            "import threading\ndef ask():\n    exec({ASK:?})\nthread = threading.Thread(target=ask)\nthread.start()\n\
             import tollgate\nfor n in range(20):\n    tollgate.write('other%d' % n, 'x')\nprint('others', flush=True)\n\
             open('marker', 'w').write('x')\nthread.join()\n"
        );
        let run = world.run(["--ask", "wait", "--", "/usr/bin/python3", "-c", &program]).start();
        let parked = question(world);
        assert_eq!((&parked["kind"], &parked["resource"]["path"]), (&"fs/write".into(), &".envrc".into()), "{parked}");
        // Its siblings go on meanwhile, each with its receipt.
        observe::wait_until("the other writes are answered", SOON, || {
            world.receipts(&["--kind", "fs/write"]).iter().filter(|one| one["decision"] == "allowed").count() == 20
        });
        world.tollgate(["approve", &id(&parked)]).finish().expect_status(0);
        let output = run.wait().expect_status(0);
        assert!(output.out().contains("others") && output.out().contains("written"), "{output}");
        assert!(output.err().contains(&format!("tollgate approve {}", id(&parked))), "{output}");
        assert_eq!(world.read(".envrc"), "x", "{output}");
        let receipts = world.receipts(&["--resource", ".envrc"]);
        assert!(receipts.iter().all(|one| one["decision"] == "allowed"), "{receipts:?}");
        assert!(receipts[0]["queued_us"].as_u64() > Some(0), "{receipts:?}");
        // A word is used up.
        world.tollgate(["approve", &id(&parked)]).finish().expect_status(1);
    });
}

#[test]
fn what_is_denied_or_not_answered_in_time_is_refused_and_says_so() {
    every_identity(|world| {
        let run = asking(world, "wait").start();
        world.tollgate(["deny", &id(&question(world))]).finish().expect_status(0);
        let output = run.wait().expect_status(0);
        assert!(output.out().contains("said no"), "{output}");

        fs::write(world.home.join("short.toml"), "extends = [\"default\"]\n[approval]\ntimeout = \"1s\"\n")
            .expect("ours");
        world.own(&world.home.join("short.toml"));
        let policy = world.home.join("short.toml").display().to_string();
        let output = world
            .run(["--ask", "wait", "--policy", &policy, "--", "/usr/bin/python3", "-c", ASK])
            .finish()
            .expect_status(0);
        assert!(output.out().contains("timed out"), "{output}");
        assert!(!world.workspace.join(".envrc").exists());
    });
}

#[test]
fn a_run_that_waits_for_a_person_can_be_killed_and_leaves_its_refusal() {
    every_identity(|world| {
        let mut run = asking(world, "wait").start();
        let parked = question(world);
        let began = Instant::now();
        world.tollgate(["kill", parked["run"].as_str().expect("an id")]).finish().expect_status(0);
        while run.is_running() {
            assert!(began.elapsed() < SOON, "the run does not end");
            std::thread::sleep(Duration::from_millis(10));
        }
        run.wait();
        let receipts = world.receipts(&["--resource", ".envrc"]);
        assert_eq!(receipts.len(), 1, "{receipts:?}");
        assert_eq!((&receipts[0]["decision"], &receipts[0]["decided_by"]), (&"refused".into(), &"approval".into()));
        world.tollgate(["approve", &id(&parked)]).finish().expect_status(1);
        assert!(!world.workspace.join(".envrc").exists());
    });
}

#[test]
fn a_saved_rule_answers_until_it_is_revoked_and_never_against_a_deny() {
    every_identity(|world| {
        let run = asking(world, "wait").start();
        world.tollgate(["approve", &id(&question(world)), "--always"]).finish().expect_status(0);
        run.wait().expect_status(0);
        assert_eq!(world.read(".envrc"), "x");
        fs::remove_file(world.workspace.join(".envrc")).expect("ours");

        let output = asking(world, "refuse").finish().expect_status(0);
        assert!(output.out().starts_with("written"), "{output}");
        assert_eq!(world.read(".envrc"), "x");
        fs::remove_file(world.workspace.join(".envrc")).expect("ours");

        let strict = world.home.join("strict.toml");
        let text = "extends = [\"default\"]\n[[deny]]\neffect = [\"fs/write\"]\npath = [\".envrc\"]\n";
        fs::write(&strict, text).expect("ours");
        world.own(&strict);
        let policy = strict.display().to_string();
        let output = world.run(["--policy", &policy, "--", "/usr/bin/python3", "-c", ASK]).finish().expect_status(0);
        assert!(output.out().contains("admission"), "{output}");

        let rules = world.tollgate(["approvals", "rules", "--json"]).finish().expect_status(0).json_lines();
        assert_eq!(rules.len(), 1, "{rules:?}");
        world.tollgate(["approvals", "revoke", &rules[0]["id"].to_string()]).finish().expect_status(0);
        let output = asking(world, "refuse").finish().expect_status(0);
        assert!(output.out().starts_with("refused"), "{output}");
    });
}

#[test]
fn a_name_cannot_speak_to_the_terminal_of_whoever_decides() {
    every_identity(|world| {
        let name = "a\u{1b}[2Jb\u{202e}c\u{200b}/.envrc";
        let program = format!(
            "import tollgate, os\nos.makedirs({:?})\ntry:\n    tollgate.write({name:?}, 'x')\nexcept tollgate.Refused:\n    pass\n",
            "a\u{1b}[2Jb\u{202e}c\u{200b}"
        )
        .replace("\\u{1b}", "\\x1b")
        .replace("\\u{202e}", "\\u202e")
        .replace("\\u{200b}", "\\u200b");
        let run = world.run(["--ask", "wait", "--", "/usr/bin/python3", "-c", &program]).start();
        let parked = question(world);
        let shown = world.tollgate(["approvals"]).finish().expect_status(0);
        world.tollgate(["deny", &id(&parked)]).finish().expect_status(0);
        let output = run.wait().expect_status(0);
        for text in [shown.out(), output.err()] {
            assert!(text.contains(".envrc"), "{text:?}");
            for odd in ['\u{1b}', '\u{202e}', '\u{200b}'] {
                assert!(!text.contains(odd), "{text:?}");
            }
        }
    });
}

#[test]
fn the_jail_cannot_answer_for_a_person() {
    every_identity(|world| {
        let program = "import glob, http.client, os, socket, sys\n\
             found = [p for r in ('/run', '/tmp', '/var', os.environ['HOME']) for p in glob.glob(r + '/**/*control*', recursive=True)]\n\
             print('found', found)\n\
             for method, path in [('GET','/v1/approvals'),('POST','/v1/approvals'),('POST','/v1/approve'),('GET','/v1/questions'),('POST','/v1/questions')]:\n    \
                 s = socket.socket(socket.AF_UNIX); s.connect(os.environ['TOLLGATE_SOCKET'])\n    \
                 s.sendall(('%s %s HTTP/1.1\\r\\nHost: t\\r\\nContent-Length: 0\\r\\n\\r\\n' % (method, path)).encode())\n    \
                 print(path, s.recv(100).split()[1].decode())\n";
        let output = world.run(["--", "/usr/bin/python3", "-c", program]).finish().expect_status(0);
        assert!(output.out().contains("found []"), "{output}");
        let statuses: Vec<String> = output
            .out()
            .lines()
            .skip(1)
            .map(|line| line.split(' ').next_back().expect("a status").to_owned())
            .collect();
        assert_eq!(statuses.len(), 5, "{output}");
        assert!(statuses.iter().all(|status| status == "404" || status == "405"), "{output}");
    });
}

#[test]
fn runs_on_one_quota_stay_within_it_together_whatever_happens_to_them() {
    every_identity(|world| {
        let write = "import tollgate, sys\ndone = 0\nfor n in range(10):\n    try:\n        tollgate.write(sys.argv[1] + str(n), 'x' * 1000)\n        done += 1\n    except tollgate.Refused:\n        pass\nprint(done)\n";
        world.tollgate(["quota", "set", "team", "--effects", "12"]).finish().expect_status(0);
        let start = |name: &str| {
            world.run(["--quota", "team", "--no-apply", "--", "/usr/bin/python3", "-c", write, name]).start()
        };
        let (one, two) = (start("a"), start("b"));
        let done: usize =
            [one.wait(), two.wait()].iter().map(|output| output.out().trim().parse::<usize>().expect("a number")).sum();
        // Each of the two also has its own evaluation recorded, which is not the program's and not charged.
        assert_eq!(done, 12);
        let shown = world.tollgate(["quota", "list", "--json"]).finish().expect_status(0).json_lines();
        let used = shown.iter().find(|line| line["unit"] == "effects").expect("the unit");
        assert_eq!((&used["used"], &used["left"]), (&12.into(), &0.into()), "{shown:?}");

        // A supervisor that dies neither gives back what was used nor charges it twice.
        world.tollgate(["quota", "set", "team", "--effects", "30"]).finish().expect_status(0);
        let slow = "import tollgate, time\nfor n in range(5):\n    tollgate.write('c%d' % n, 'x')\nprint('five', flush=True)\ntime.sleep(60)\n";
        let run = world.run(["--quota", "team", "--no-apply", "--", "/usr/bin/python3", "-c", slow]).start();
        observe::wait_until("five writes", SOON, || world.receipts(&["--kind", "fs/write"]).len() == 5);
        run.signal(Signal::SIGKILL);
        run.wait();
        let shown = world.tollgate(["quota", "list", "--json"]).finish().expect_status(0).json_lines();
        let used = shown.iter().find(|line| line["unit"] == "effects").expect("the unit");
        assert_eq!((&used["used"], &used["reserved"]), (&17.into(), &0.into()), "{shown:?}");
    });
}

/// What the program writes at its socket is charged there, and applying its layer charges only what came on top.
#[test]
fn a_byte_written_at_the_socket_and_then_applied_is_charged_once() {
    every_identity(|world| {
        let used = || {
            let shown = world.tollgate(["quota", "list", "--json"]).finish().expect_status(0).json_lines();
            shown.iter().find(|line| line["unit"] == "write_bytes").expect("the unit")["used"].as_u64()
        };
        let run = |flags: &[&str], program: &str| {
            let command = ["--write-bytes", "1MiB", "--quota", "team"];
            let program = format!("import tollgate, os\n{program}");
            let all = command.iter().chain(flags).copied().chain(["--", "/usr/bin/python3", "-c", &program]);
            world.run(all).finish()
        };
        world.tollgate(["quota", "set", "team", "--write-bytes", "10000000B"]).finish().expect_status(0);

        // More than half of the run's own limit, which twice as much would exceed.
        run(&[], "tollgate.write('whole', 'x' * 600000)").expect_status(0);
        assert_eq!((world.read("whole").len(), used()), (600_000, Some(600_000)));

        // What the program adds to it is charged, and no more.
        run(&[], "tollgate.write('grown', 'x' * 1000)\nopen('grown', 'a').write('y' * 200000)").expect_status(0);
        assert_eq!((world.read("grown").len(), used()), (201_000, Some(801_000)));
        run(
            &[],
            "tollgate.write('early', 'x' * 1000)\nos.rename('early', 'late')\nopen('early', 'w').write('z' * 500)",
        )
        .expect_status(0);
        assert_eq!((world.read("late").len(), used()), (1_000, Some(802_500)));

        // Also where another process applies it, part by part.
        run(&["--no-apply"], "tollgate.write('one', 'x' * 1000)\ntollgate.write('two', 'x' * 1000)").expect_status(0);
        assert_eq!(used(), Some(804_500));
        for path in ["one", "two"] {
            world.tollgate(["apply", "latest", path]).finish().expect_status(0);
        }
        assert_eq!((world.read("two").len(), used()), (1_000, Some(804_500)));

        // A file that was written small at the socket does not carry a large one past the limit.
        world.tollgate(["quota", "set", "team", "--write-bytes", "805500B"]).finish().expect_status(0);
        let output = run(&[], "tollgate.write('small', 'x' * 10)\nopen('small', 'w').write('y' * 1010)");
        let output = output.expect_status(0);
        assert_eq!((output.out().as_str(), used()), ("", Some(804_510)), "{output}");
        assert!(!world.workspace.join("small").exists(), "{output}");
        run(&[], "tollgate.write('small', 'x' * 10)\nopen('small', 'w').write('y' * 980)").expect_status(0);
        assert_eq!((world.read("small").len(), used()), (980, Some(805_490)));
    });
}
