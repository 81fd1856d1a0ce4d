//! How a run behaves towards its caller: statuses, streams, terminals, signals, lifetime.

use nix::sys::signal::{kill, Signal};
use nix::unistd::Pid;
use std::{
    collections::hash_map::RandomState,
    fs,
    hash::{BuildHasher, Hasher},
    process::Stdio,
    time::{Duration, Instant},
};
use tollgate_tests::{every_identity, every_way, observe::wait_until, terminal::Terminal, World};

#[test]
fn a_programs_status_passes_through() {
    every_way(|world| {
        for code in [0, 1, 2, 3, 77, 125, 126, 127, 130, 255] {
            world.run_script(&format!("exit {code}")).finish().expect_status(code);
        }
        // The side channel tells a program that exits with 125 from a run that could not start.
        let coded = |code: i64| {
            world
                .runs()
                .into_iter()
                .find(|run| run["outcome"]["code"] == code)
                .unwrap_or_else(|| panic!("no run with {code}"))
        };
        for code in [0, 125, 126, 127] {
            assert_eq!(coded(code)["outcome"]["type"], "exited");
        }
        for (signal, number) in [("HUP", 1), ("INT", 2), ("KILL", 9), ("SEGV", 11), ("TERM", 15), ("ABRT", 6)] {
            world.run_script(&format!("kill -{signal} $$")).finish().expect_status(128 + number);
            let run = world.last_run();
            assert_eq!(
                (&run["outcome"]["type"], &run["outcome"]["signal"]),
                (&"signaled".into(), &number.into()),
                "{run}"
            );
        }
    });
}

#[test]
fn a_program_that_cannot_start_has_its_own_statuses() {
    every_way(|world| {
        world.write("noexec", "");
        let missing = world.run(["--", "./missing"]).finish().expect_status(127);
        assert!(missing.out().is_empty() && missing.err().contains("./missing"), "{missing}");
        let noexec = world.run(["--", "./noexec"]).finish().expect_status(126);
        assert!(noexec.out().is_empty() && noexec.err().contains("noexec"), "{noexec}");
        assert_eq!(world.last_run()["outcome"]["type"], "could-not-start");
        world.run(["--", "no-such-program-anywhere"]).finish().expect_status(127);
        world.run(["--", "/etc"]).finish().expect_status(126);
        let refused = world.run(["--policy", "no-such-policy", "--", "true"]).finish().expect_status(125);
        assert!(refused.err().contains("no-such-policy"), "{refused}");
        assert!(refused.out().is_empty());
    });
}

#[test]
fn our_own_words_go_to_standard_error_and_can_be_silenced() {
    every_way(|world| {
        let spoken = world.run_script("echo out").finish().expect_status(0);
        assert_eq!(spoken.out(), "out\n");
        assert_eq!(spoken.err().lines().count(), 1, "{spoken}");
        let quiet = world.run(["--quiet", "--", "sh", "-c", "echo out; echo err >&2"]).finish().expect_status(0);
        assert_eq!((quiet.out().as_str(), quiet.err().as_str()), ("out\n", "err\n"));
    });
}

#[test]
fn large_output_passes_whole_on_both_streams() {
    every_way(|world| {
        world.write("p.py", "import sys; d=b'A'*1023+b'\\n'\nfor i in range(4096): sys.stdout.buffer.write(d); sys.stderr.buffer.write(d)\n");
        let output = world.run(["--quiet", "--", "/usr/bin/python3", "p.py"]).finish().expect_status(0);
        assert_eq!((output.stdout.len(), output.stderr.len()), (4_194_304, 4_194_304));
        let line = [vec![b'A'; 1023], b"\n".to_vec()].concat();
        assert!(output.stdout.chunks(1024).all(|chunk| chunk == line), "standard output is not what was written");
        assert!(output.stderr.chunks(1024).all(|chunk| chunk == line), "standard error is not what was written");
        // A slow reader loses nothing.
        let slow = world.shell("$TG --quiet -- /usr/bin/python3 p.py 2>/dev/null | (sleep 1; wc -c)").finish();
        assert_eq!(slow.out().trim(), "4194304");
    });
}

#[test]
fn standard_input_neither_hangs_nor_leaks() {
    every_way(|world| {
        let mut open = world.run(["--", "echo", "hi"]).into_command();
        let started = Instant::now();
        // An input that stays open for as long as the test holds it.
        let mut child =
            open.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().expect("it starts");
        let held = child.stdin.take();
        let output = child.wait_with_output().expect("it ends");
        drop(held);
        assert_eq!((output.status.code(), output.stdout.as_slice()), (Some(0), &b"hi\n"[..]));
        assert!(started.elapsed() < Duration::from_secs(5), "{:?}", started.elapsed());

        let closed = world
            .shell("$TG -- cat <&-; echo $?; $TG -- cat </dev/null; echo $?")
            .timeout(Duration::from_secs(15))
            .finish();
        let codes = closed.out();
        assert!(codes.lines().count() == 2 && codes.ends_with("0\n"), "{closed}");
        let endless = world
            .shell("yes | timeout 10 $TG -- head -1; echo ${PIPESTATUS[1]}")
            .timeout(Duration::from_secs(15))
            .finish();
        assert_eq!(endless.out(), "y\n0\n", "{endless}");
        let through = world.run(["--", "sha256sum"]).input(vec![7; 3 << 20]).finish().expect_status(0);
        let native = world.command("sha256sum").input(vec![7; 3 << 20]).finish();
        assert_eq!(through.out(), native.out());
        // Closed output descriptors are not replaced by something of ours.
        let no_output = world.shell("$TG -- sh -c 'echo x' >&-; echo $?").finish();
        assert!(!no_output.out().contains("panicked") && !no_output.err().contains("panicked"), "{no_output}");
    });
}

#[test]
fn output_is_streamed_and_a_reader_that_leaves_ends_the_program() {
    every_way(|world| {
        let script = "$TG -- sh -c 'echo a; sleep 2; echo b' | while read l; do date +%s%N; done";
        let output = world.shell(script).finish();
        let times: Vec<i64> = output.out().lines().map(|line| line.parse().expect("a time")).collect();
        assert_eq!(times.len(), 2, "{output}");
        assert!((1_500_000_000..4_000_000_000).contains(&(times[1] - times[0])), "not streamed: {times:?}");
        let left = world.shell("timeout 20 $TG -- yes | head -1; echo ${PIPESTATUS[0]}").finish();
        let lines: Vec<String> = left.out().lines().map(str::to_owned).collect();
        assert_eq!(lines[0], "y", "{left}");
        // As a native pipe: SIGPIPE, or the EPIPE that the program sees. Never a time-out.
        assert!(lines[1] == "141" || lines[1] == "1", "{left}");
        world.assert_nothing_left(Duration::from_secs(2));
    });
}

#[test]
fn signals_to_the_supervisor_reach_the_program() {
    every_way(|world| {
        for (signal, name) in
            [(Signal::SIGTERM, "TERM"), (Signal::SIGINT, "INT"), (Signal::SIGHUP, "HUP"), (Signal::SIGUSR1, "USR1")]
        {
            let script = format!("trap 'echo got {name}; exit 3' {name}; echo ready > r; while :; do sleep 0.05; done");
            let running = world.run(["--wall", "20s", "--", "sh", "-c", &script, "tg-signalled"]).start();
            wait_until("the program runs", Duration::from_secs(10), || {
                world.processes().iter().any(|process| process.command.starts_with("sleep 0.05"))
            });
            running.signal(signal);
            let output = running.wait();
            assert_eq!((output.out().trim(), output.status), (format!("got {name}").as_str(), 3), "{output}");
        }
        // Without a handler the program dies of it, and the status says so.
        let running = world.run(["--", "sleep", "30.25"]).start();
        wait_until("the program runs", Duration::from_secs(10), || {
            world.processes().iter().any(|process| process.command.starts_with("sleep 30.25"))
        });
        running.signal(Signal::SIGTERM);
        running.wait().expect_status(143);
        world.assert_nothing_left(Duration::from_secs(2));
    });
}

#[test]
fn an_ignored_signal_and_a_mask_do_not_pass_in() {
    every_way(|world| {
        // The caller ignores SIGTERM and SIGPIPE (nohup-like); the program still starts with the defaults.
        let output = world
            .shell("trap '' TERM PIPE; exec $TG -- grep -E '^Sig(Ign|Blk)' /proc/self/status")
            .finish()
            .expect_status(0);
        assert!(output.out().lines().all(|line| line.ends_with("0000000000000000")), "{output}");
    });
}

#[test]
fn a_terminal_has_its_size_and_its_interrupt() {
    every_way(|world| {
        let script = "trap 'stty size' WINCH; stty size; while :; do sleep .1; done";
        let mut terminal = Terminal::start(world, world.run(["--", "sh", "-c", script]), 40, 100);
        terminal.expect("40 100");
        terminal.resize(50, 120);
        terminal.expect("50 120");
        terminal.keys("\x03");
        assert_eq!(terminal.wait(), 130);
        let run = world.last_run();
        assert_eq!(run["outcome"]["signal"], 2, "{run}");
        world.assert_nothing_left(Duration::from_secs(2));
    });
}

#[test]
fn job_control_works_and_the_terminal_is_left_as_it_was() {
    every_way(|world| {
        let shell = world.command("bash").arg("--norc").arg("--noprofile").arg("-i").env("PS1", "prompt> ");
        let mut terminal = Terminal::start(world, shell, 24, 80);
        terminal.expect("prompt> ");
        let before = terminal.modes();
        let launcher = match world.way.launcher {
            tollgate_tests::Launcher::Native => "native",
            tollgate_tests::Launcher::Bwrap => "bwrap",
        };
        terminal.keys(&format!("tollgate run --quiet --launcher {launcher} -- cat\r"));
        std::thread::sleep(Duration::from_millis(800));
        terminal.keys("first line\r");
        terminal.expect("first line\r\nfirst line");
        terminal.keys("\x1a");
        terminal.expect("Stopped");
        terminal.keys("fg\r");
        std::thread::sleep(Duration::from_millis(400));
        terminal.keys("second line\r");
        terminal.expect("second line\r\nsecond line");
        terminal.keys("\x04");
        std::thread::sleep(Duration::from_millis(800));
        terminal.keys("read x; echo got:$x:\r");
        std::thread::sleep(Duration::from_millis(200));
        terminal.keys("typed\r");
        terminal.expect("got:typed:");
        let after = terminal.modes();
        terminal.keys("exit 0\r");
        assert_eq!(terminal.wait(), 0);
        assert_eq!(
            (before.local_flags, before.input_flags, before.output_flags),
            (after.local_flags, after.input_flags, after.output_flags),
            "the terminal's modes changed"
        );
    });
}

#[test]
fn keystrokes_cannot_be_injected_into_the_callers_terminal() {
    every_way(|world| {
        world.write(
            "inject.py",
            "import fcntl, os, termios\n\
             for path in (0, 1, 2, '/dev/tty', '/proc/self/fd/0', '/dev/console', '/dev/pts/0'):\n    \
             for request in (termios.TIOCSTI, 0x541C):\n        \
             for byte in b'touch injected\\n':\n            \
             try:\n                \
             fd = os.open(path, os.O_RDWR | os.O_NOCTTY) if isinstance(path, str) else path\n                \
             fcntl.ioctl(fd, request, bytes([byte]))\n            \
             except OSError: pass\n",
        );
        let launcher = match world.way.launcher {
            tollgate_tests::Launcher::Native => "native",
            tollgate_tests::Launcher::Bwrap => "bwrap",
        };
        let shell = world.command("bash").arg("--norc").arg("--noprofile").arg("-i").env("PS1", "prompt> ");
        let mut terminal = Terminal::start(world, shell, 24, 80);
        terminal.expect("prompt> ");
        terminal
            .keys(&format!("tollgate run --quiet --launcher {launcher} -- /usr/bin/python3 inject.py; echo don''e\r"));
        terminal.expect("done");
        std::thread::sleep(Duration::from_millis(300));
        terminal.keys("exit 0\r");
        terminal.wait();
        assert!(!world.workspace.join("injected").exists(), "the injected command ran in the caller's shell");
    });
}

#[test]
fn programs_can_make_terminals_of_their_own() {
    every_way(|world| {
        world.run(["--", "/usr/bin/python3", "-c", "import pty; pty.openpty()"]).finish().expect_status(0);
        let output = world.run(["--", "script", "-qec", "echo ok", "/dev/null"]).finish().expect_status(0);
        assert!(output.out().contains("ok"), "{output}");
    });
}

#[test]
fn a_run_outlives_the_thread_that_started_it() {
    every_identity(|world| {
        let running = std::thread::scope(|scope| {
            scope
                .spawn(|| world.run(["--", "sh", "-c", "sleep 6; echo whole"]).start())
                .join()
                .expect("the thread does not panic")
        });
        let output = running.wait().expect_status(0);
        assert_eq!(output.out(), "whole\n");
    });
}

#[test]
fn nothing_survives_a_killed_supervisor() {
    every_way(|world| {
        let script = "setsid sh -c 'while :; do date >> /tmp/beat; sleep .1; done' & (trap '' TERM HUP INT; sleep 100) & sleep 100";
        let running = world.run(["--", "sh", "-c", script]).start();
        wait_until("the program runs", Duration::from_secs(10), || {
            world.processes().iter().filter(|process| process.command.starts_with("sleep")).count() >= 2
        });
        running.signal(Signal::SIGKILL);
        // Its output ends at once too: `wait` fails when something holds it open.
        running.wait().expect_status(137);
        world.assert_nothing_left(Duration::from_secs(1));
        let run = world.last_run();
        assert_eq!(run["outcome"]["type"], "interrupted", "{run}");
    });
}

#[test]
fn nothing_survives_a_supervisor_killed_at_any_moment() {
    // Twenty moments in an ordinary run; TOLLGATE_TEST_KILLS sets another number.
    let rounds: u32 = std::env::var("TOLLGATE_TEST_KILLS").ok().and_then(|text| text.parse().ok()).unwrap_or(20);
    every_way(|world| {
        for round in 0..rounds {
            // Spread over the start: 0 to 50 ms in a release build, which is several times that in a development build.
            let delay = Duration::from_micros(random() % 150_000);
            let running = world.run(["--", "sh", "-c", "sleep 77 & sleep 100; :"]).start();
            std::thread::sleep(delay);
            running.signal(Signal::SIGKILL);
            running.wait();
            let deadline = Instant::now() + Duration::from_secs(1);
            while !world.processes().is_empty() {
                assert!(Instant::now() < deadline, "round {round}, killed after {delay:?}: {:#?}", world.processes());
                std::thread::sleep(Duration::from_millis(10));
            }
        }
        world.assert_nothing_left(Duration::from_secs(1));
        let unended: Vec<_> = world.runs().into_iter().filter(|run| run["state"] != "ended").collect();
        assert!(unended.is_empty(), "{unended:#?}");
    });
}

#[test]
fn nothing_is_left_after_an_ordinary_end() {
    every_way(|world| {
        // Children that detached themselves end with the program.
        let output = world
            .run_script("setsid sh -c 'trap \"\" TERM HUP; sleep 88' & sleep 0.1; echo done")
            .finish()
            .expect_status(0);
        assert_eq!(output.out(), "done\n");
        world.assert_nothing_left(Duration::from_millis(500));
    });
}

#[test]
fn the_shim_dies_alone_and_is_noticed() {
    every_way(|world| {
        let running = world.run(["--", "sleep", "41.5"]).start();
        wait_until("the program runs", Duration::from_secs(10), || {
            world.processes().iter().any(|process| process.command.starts_with("sleep 41.5"))
        });
        let supervisor = running.pid();
        for process in world.processes() {
            if process.pid != supervisor && !process.command.starts_with("sleep") {
                let _ = kill(Pid::from_raw(process.pid), Signal::SIGKILL);
            }
        }
        let output = running.wait();
        assert_ne!(output.status, 0, "{output}");
        world.assert_nothing_left(Duration::from_secs(2));
    });
}

#[test]
fn kill_ends_a_run_from_another_terminal() {
    every_way(|world| {
        let running = world.run(["--", "sh", "-c", "trap '' TERM INT; sleep 42.5; sleep 42.5"]).start();
        wait_until("the program runs", Duration::from_secs(10), || {
            world.processes().iter().any(|process| process.command.starts_with("sleep 42.5"))
        });
        let id = running_id(world);
        world.tollgate(["kill", &id]).finish().expect_status(0);
        let output = running.wait();
        assert_ne!(output.status, 0, "{output}");
        let run = world.last_run();
        assert_eq!(run["outcome"]["type"], "killed", "{run}");
        world.assert_nothing_left(Duration::from_secs(2));
        assert!(fs::read_dir(&world.temp).expect("our own folder").next().is_none());
    });
}

fn running_id(world: &World) -> String {
    let listed = world.tollgate(["ps", "--json"]).finish().expect_status(0);
    let runs = listed.json_lines();
    assert_eq!(runs.len(), 1, "{listed}");
    runs[0]["id"].as_str().expect("an id").to_owned()
}

/// A number that differs each time; which one does not matter.
fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}

#[test]
fn a_live_run_shows_what_it_has_used_outside_and_inside() {
    every_identity(|world| {
        let script = "head -c 3000000 /dev/zero > file; echo printed; \
            python3 -c 'import time\nend = time.process_time() + 0.3\nwhile time.process_time() < end: pass'; \
            sleep 1.2; /run/tollgate/bin/tollgate budget --json; echo told; sleep 60";
        let run = world.run(["--quiet", "--", "sh", "-c", script]).start();
        wait_until("the budget was told", Duration::from_secs(30), || {
            world.tollgate(["logs", "latest"]).finish().out().contains("told")
        });
        let shown = world.tollgate(["inspect", "latest", "--json"]).finish().json_lines().remove(0);
        let used = |name: &str| shown["usage"][name].as_u64().expect("a number");
        assert_eq!(shown["state"], "running", "{shown}");
        assert!(used("wall_us") > 1_200_000 && used("cpu_us") >= 200_000, "{shown}");
        assert!(used("memory_peak") > 0 && used("pids_peak") >= 2 && used("output_bytes") >= 8, "{shown}");
        assert!(used("write_bytes") >= 3_000_000, "{shown}");
        let listed = world.tollgate(["ps", "--json"]).finish().json_lines().remove(0);
        assert!(listed["usage"]["write_bytes"].as_u64() >= Some(3_000_000), "{listed}");
        world.tollgate(["kill", "latest"]).finish().expect_status(0);
        let output = run.wait().out();
        let budget: serde_json::Value = {
            let start = output.find('{').expect("the budget is an object");
            let mut values = serde_json::Deserializer::from_str(&output[start..]).into_iter();
            values.next().expect("one").expect("JSON")
        };
        for name in ["wall_us", "cpu_us", "memory_bytes", "write_bytes", "output_bytes"] {
            assert!(budget[name]["used"].as_u64() > Some(0), "{name}: {budget}");
        }
    });
}

/// Many small changes, so that there is time to interrupt them.
const CHANGES: usize = 2_000;

/// Waits until the newest run applies; none if that was over before it was seen.
fn applying(world: &World) -> Option<String> {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        let run = world.tollgate(["ps", "--all", "--limit", "1", "--json"]).finish().json_lines().pop();
        match run.as_ref().and_then(|run| Some((run["state"].as_str()?, run["id"].as_str()?))) {
            Some(("applying", id)) => return Some(id.to_owned()),
            Some(("ended", _)) => return None,
            _ => assert!(Instant::now() < deadline, "the run never began to apply"),
        }
    }
}

#[test]
fn a_signal_while_changes_are_applied_waits_for_the_batch_and_decides_the_status() {
    every_identity(|world| {
        let script = format!("mkdir made; for n in $(seq {CHANGES}); do echo x > made/$n; done");
        let mut run = world.run_script(&script).start();
        let id = applying(world).expect("so many changes take time");
        run.signal(Signal::SIGINT);
        std::thread::sleep(Duration::from_millis(50));
        if run.is_running() {
            run.signal(Signal::SIGTERM);
        }
        let run = run.wait().expect_status(130);
        assert!(run.err().contains("all or none") && run.err().contains("SIGINT came"), "{run}");
        assert_eq!(fs::read_dir(world.workspace.join("made")).expect("applied").count(), CHANGES);
        let record = world.last_run();
        assert_eq!((&record["changes"], &record["outcome"]["type"]), (&"applied".into(), &"exited".into()), "{id}");
    });
}

#[test]
fn a_signal_to_an_apply_waits_for_its_batch() {
    every_identity(|world| {
        let script = format!("mkdir made; for n in $(seq {CHANGES}); do echo x > made/$n; done");
        world.run(["--no-apply", "--", "sh", "-c", &script]).finish().expect_status(0);
        let id = world.last_run()["id"].as_str().expect("an id").to_owned();
        let apply = world.tollgate(["apply", &id]).start();
        wait_until("the apply has taken the run", Duration::from_secs(60), || {
            world.tollgate(["inspect", &id, "--json"]).finish().json_lines()[0]["state"] == "applying"
        });
        apply.signal(Signal::SIGTERM);
        let apply = apply.wait().expect_status(143);
        assert!(apply.err().contains(&format!("applied {}", CHANGES + 1)), "{apply}");
        assert_eq!(fs::read_dir(world.workspace.join("made")).expect("applied").count(), CHANGES);
        assert_eq!(world.last_run()["changes"], "applied");
    });
}
