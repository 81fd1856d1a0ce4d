//! What answers in the world's place, as an unmodified program and its user see it: faults, recordings and replays.

use serde_json::Value;
use std::{fs, path::Path};
use tollgate_tests::{every_identity, every_way, Finished, Snapshot, World};

const WRITES: &str = r#"
import errno
failed = []
for i in range(40):
    try:
        with open(f"l{i}.log", "w") as f:
            f.write("x")
    except OSError as e:
        failed.append(f"{i}:{errno.errorcode[e.errno]}")
with open("other.txt", "w") as f:
    f.write("always")
print(" ".join(failed))
"#;

fn failing(world: &World, seed: &str) -> Finished {
    world.write("t.py", WRITES);
    let rule = format!("fs/write:error=ENOSPC,rate=0.2,seed={seed},path=**/*.log");
    world.run(["--faults", &rule, "--", "python3", "t.py"]).finish().expect_status(0)
}

#[test]
fn a_program_sees_an_injected_fault_as_the_kernels_own_and_the_seed_decides_which() {
    every_way(|world| {
        let first = failing(world, "7");
        let hits = first.out().split_whitespace().count();
        assert!((1..40).contains(&hits) && first.out().contains(":ENOSPC"), "{first}");
        assert!(first.err().contains(&format!("faults: {hits} injected")), "{first}");
        let injected: Vec<Value> =
            world.receipts(&[]).into_iter().filter(|receipt| receipt["injected"] == true).collect();
        assert_eq!(injected.len(), hits);
        for receipt in &injected {
            assert_eq!((&receipt["decision"], &receipt["decided_by"]), (&"failed".into(), &"faults".into()));
            assert!(receipt["reason"].as_str().unwrap_or_default().contains("seed=7"), "{receipt}");
        }
        assert_eq!(world.last_run()["answered"]["faults_injected"], hits);
        assert_eq!(world.read("other.txt"), "always", "out of scope");
        assert_eq!(failing(world, "7").out(), first.out());
        assert_ne!(failing(world, "8").out(), first.out());
    });
}

#[test]
fn the_first_executions_fail_and_the_next_works() {
    every_identity(|world| {
        let script = "for i in 1 2 3; do /usr/bin/env true; echo $?; done";
        let output = world.run(["--faults", "process/exec:error=EAGAIN,first=1", "--", "sh", "-c", script]).finish();
        // The first of each key: of `env`, then of what `env` executes.
        assert_eq!(output.out(), "126\n126\n0\n", "{output}");
    });
}

#[test]
fn a_fault_that_a_kind_cannot_show_is_refused_before_anything_runs() {
    every_identity(|world| {
        let output = world.run(["--faults", "fs/read:truncated", "--", "touch", "ran"]).finish().expect_status(2);
        assert!(output.err().contains("add door=api"), "{output}");
        assert!(!world.workspace.join("ran").exists());
    });
}

#[test]
fn a_rate_limit_at_the_socket_is_429_with_retry_after_and_then_works() {
    every_identity(|world| {
        world.write("a", "content");
        world.write(
            "t.py",
            r#"
import http.client, os, socket
def get():
    c = http.client.HTTPConnection("run")
    c.sock = socket.socket(socket.AF_UNIX)
    c.sock.connect(os.environ["TOLLGATE_SOCKET"])
    c.request("GET", "/v1/files/a")
    r = c.getresponse()
    r.read()
    return r.status, r.getheader("Retry-After")
print(get(), get())
"#,
        );
        let rule = "fs/read:rate-limit,first=1,retry-after=2,door=api";
        let output = world.run(["--faults", rule, "--", "python3", "t.py"]).finish().expect_status(0);
        assert_eq!(output.out(), "(429, '2') (200, None)\n", "{output}");
    });
}

/// The program counts for itself by strace, outside of any jail; the receipts must come to the same.
#[test]
fn receipts_of_opens_are_as_many_as_strace_counts() {
    if !Path::new("/usr/bin/strace").exists() {
        eprintln!("skipped: no `strace`");
        return;
    }
    every_identity(|world| {
        let script = "set -e; mkdir d; for i in 1 2 3 4 5; do echo $i > d/$i; done; mv d/1 d/6; rm d/2; \
                      cat d/3 > copy; /usr/bin/true; rm -r d";
        let trace = world.temp.join("trace");
        let calls = "trace=open,openat,creat,unlink,unlinkat,rmdir,rename,renameat,renameat2,mkdir,mkdirat,execve";
        let traced = world.command("/usr/bin/strace");
        let traced = traced.arg("-f").arg("-y").arg("-e").arg(calls).arg("-o").arg(&trace);
        traced.arg("sh").arg("-c").arg(script).finish().expect_status(0);
        let text = fs::read_to_string(&trace).expect("strace wrote it");
        let _ = fs::remove_file(&trace);
        let done: Vec<&str> = text.lines().filter(|line| line.contains(" = ") && !line.contains(" = -1 ")).collect();
        let own = |line: &&&str| !line.contains("/dev/") && !line.contains("/etc/") && !line.contains("/usr/");
        let count = |names: &[&str]| {
            done.iter().filter(|line| names.iter().any(|name| line.contains(&format!("{name}(")))).filter(own).count()
        };
        let writes = done
            .iter()
            .filter(|line| line.contains("open") && (line.contains("O_WRONLY") || line.contains("O_RDWR")))
            .filter(own)
            .count()
            + count(&["mkdir", "mkdirat"]);
        let deletes = count(&["unlink", "unlinkat", "rmdir"]);
        let moves = count(&["rename", "renameat", "renameat2"]);
        // The first one is the program itself, whose start has a receipt of its own.
        let execs = done.iter().filter(|line| line.contains("execve(")).count() - 1;
        fs::remove_file(world.workspace.join("copy")).expect("the script made it");

        world.run(["--receipts", "opens", "--", "sh", "-c", script]).finish().expect_status(0);
        let receipts = world.receipts(&[]);
        let by_program =
            |kind: &str| receipts.iter().filter(|one| one["door"] == "program" && one["kind"] == kind).count();
        assert_eq!(by_program("fs/write"), writes, "{text}");
        assert_eq!(by_program("fs/delete"), deletes, "{text}");
        assert_eq!(by_program("fs/move"), moves, "{text}");
        assert_eq!(by_program("process/exec"), execs, "{text}");
    });
}

fn recorded(world: &World) -> (String, Finished) {
    world.write("in.txt", "hello\n");
    let program = "import sys; given = sys.stdin.read(); text = open('in.txt').read(); \
                   open('out.txt', 'w').write(given + text); print('got', given); sys.exit(3)";
    let run = world.run(["--record", "--receipts", "opens", "--", "python3", "-c", program]);
    let output = run.input("input\n").finish().expect_status(3);
    (world.last_run()["id"].as_str().expect("a run has an id").to_owned(), output)
}

#[test]
fn a_replay_gives_the_same_output_and_status_and_changes_nothing() {
    every_way(|world| {
        let (run, first) = recorded(world);
        assert_eq!(world.read("out.txt"), "input\nhello\n");
        fs::remove_file(world.workspace.join("out.txt")).expect("the run made it");
        let before = Snapshot::of(&world.workspace);
        let again = world.run(["--replay", &run]).finish().expect_status(3);
        assert_eq!(again.stdout, first.stdout, "{again}");
        assert!(again.err().contains("replay: as recorded"), "{again}");
        assert!(before == Snapshot::of(&world.workspace), "a replay changed the workspace");
        let receipts = world.receipts(&[]);
        let answered = receipts.iter().filter(|one| one["decided_by"] == "replay").count();
        assert_eq!(world.last_run()["answered"]["replay"]["answered"], answered);

        let file = world.temp.join("recording");
        world.tollgate(["recording", "export", &run, "-o"]).arg(&file).finish().expect_status(0);
        world.run(["--replay"]).arg(&file).finish().expect_status(3);
        let mut bytes = fs::read(&file).expect("it was exported");
        let place = bytes.len() / 2;
        bytes[place] ^= 1;
        fs::write(&file, bytes).expect("our own file");
        let output = world.run(["--replay"]).arg(&file).finish().expect_status(125);
        assert!(output.err().contains("was changed after it was sealed"), "{output}");
        let _ = fs::remove_file(&file);
    });
}

#[test]
fn a_replay_that_differs_says_where_and_ends_with_125() {
    every_identity(|world| {
        let (run, _) = recorded(world);
        fs::remove_file(world.workspace.join("out.txt")).expect("the run made it");
        world.write("in.txt", "changed\n");
        let output = world.run(["--replay", &run]).finish().expect_status(125);
        assert!(output.err().contains("`in.txt`: has another content"), "{output}");
        let report = world.last_run()["answered"]["replay"].clone();
        let differs = report["divergences"].as_array().expect("a list").iter().find(|one| one["at"] != 0);
        let nearest = &differs.unwrap_or_else(|| panic!("{report}"))["nearest"];
        assert_eq!(nearest["field"], "/request/args/node/bytes", "{report}");
        assert_eq!(report["unasked_count"], 1, "{report}");
        assert!(!world.workspace.join("out.txt").exists());

        world.write("in.txt", "hello\n");
        let output = world.run(["--replay", &run, "--", "true"]).finish().expect_status(125);
        assert!(output.err().contains("never asked for: entry 1"), "{output}");
    });
}

#[test]
fn one_substituted_answer_shows_where_the_run_then_differs() {
    every_identity(|world| {
        let (run, _) = recorded(world);
        fs::remove_file(world.workspace.join("out.txt")).expect("the run made it");
        let shown = world.tollgate(["recording", "show", &run, "--json"]).finish().expect_status(0);
        let lines = shown.json_lines();
        let read = lines.iter().map(|line| &line["entry"]).find(|entry| entry["kind"] == "fs/read");
        let seq = read.unwrap_or_else(|| panic!("{shown}"))["seq"].to_string();
        let substitute = format!("{seq}={{\"errno\":\"ENOENT\"}}");
        let output = world.run(["--replay", &run, "--substitute", &substitute]).finish().expect_status(1);
        assert!(output.err().contains("FileNotFoundError"), "{output}");
        assert!(output.err().contains("counterfactual replay"), "{output}");
        assert!(!world.workspace.join("out.txt").exists());
    });
}

#[test]
fn the_order_on_the_command_line_decides_whether_faults_are_recorded() {
    every_identity(|world| {
        let (record, fault) = (vec!["--record"], vec!["--faults", "fs/write:error=ENOSPC"]);
        for (order, recorded) in [([record.clone(), fault.clone()], 1), ([fault, record], 0)] {
            let mut arguments: Vec<&str> = order.concat();
            arguments.extend(["--", "sh", "-c", "echo x > a; true"]);
            world.run(arguments).finish().expect_status(0);
            let shown = world.tollgate(["recording", "show", "latest", "--json"]).finish().expect_status(0);
            let injected = shown.json_lines().iter().filter(|line| line["entry"]["answer"]["injected"] == true).count();
            assert_eq!(injected, recorded, "{shown}");
        }
    });
}
