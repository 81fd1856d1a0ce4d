//! What users of tools like this one reported, as tests.

use nix::sys::signal::Signal;
use serde_json::Value;
use std::{
    collections::BTreeSet,
    fs,
    os::unix::fs::{symlink, MetadataExt, PermissionsExt},
    path::Path,
    process::Command,
    time::{Duration, Instant},
};
use tollgate_tests::{
    every_identity, every_way,
    observe::{self, wait_until},
    world::{on_path, SENTINEL},
    Finished, Identity, Listener, Snapshot, World,
};

#[test]
fn blocked_user_namespaces_are_named_with_their_remedy() {
    every_way(|world| {
        // The limit is set inside a user namespace of the test's own, so the host keeps its setting.
        let output = world
            .shell(
                "exec unshare -Ur sh -c 'echo 0 > /proc/sys/user/max_user_namespaces || exit 99; \
                 '\"$TG\"' -- sh -c \"touch ran\"; echo status $?; tollgate doctor'",
            )
            .finish();
        assert!(output.out().contains("status 125"), "{output}");
        assert!(!world.workspace.join("ran").exists());
        let talk = output.err();
        assert!(talk.contains("user namespace"), "the failed step is not named: {output}");
        let doctor = output.out();
        assert!(doctor.contains("user namespace   missing"), "doctor does not name the cause: {output}");
        if world.way.identity == Identity::Root {
            // `unshare -Ur` maps nobody but the host's root, as whom no jail runs: that comes first.
            assert!(talk.contains("host user 0 never runs a jail"), "{output}");
            return;
        }
        for knob in ["max_user_namespaces", "apparmor_restrict_unprivileged_userns", "seccomp"] {
            assert!(talk.contains(knob), "`{knob}` is not named: {output}");
        }
    });
}

#[test]
fn a_masked_proc_gives_a_named_fallback_or_a_named_refusal() {
    every_way(|world| {
        let marker = "outside-sentinel";
        let output = world
            .shell(&format!(
                "(exec -a {marker} sleep 20) & sleeper=$!; \
                 unshare -Urpfm --mount-proc sh -c 'mount --bind /dev/null /proc/cmdline && \
                 '\"$TG\"' -- sh -c \"cat /proc/self/comm; grep -l {marker} /proc/[0-9]*/cmdline | grep -v self\"; echo status $?'; kill $sleeper"
            ))
            .finish();
        let out = output.out();
        if world.way.identity == Identity::Root {
            // `unshare -Ur` maps nobody but the host's root, as whom no jail runs.
            assert!(out.contains("status 125") && output.err().contains("host user 0 never runs a jail"), "{output}");
        } else if out.contains("status 125") {
            assert!(output.err().contains("/proc"), "masked /proc is not named: {output}");
        } else {
            assert!(out.contains("cat"), "{output}");
            // The grep's own command line holds the marker; no other process's may.
            assert!(out.matches("/cmdline").count() <= 2, "processes outside are visible: {output}");
            let run = world.last_run();
            assert!(run["degraded"].to_string().contains("proc"), "the fallback is not named in the record: {run}");
        }
    });
}

#[test]
fn concurrency_primitives_work_without_a_network() {
    every_way(|world| {
        world.write(
            "cc.py",
            r#"import asyncio, multiprocessing as m, socket, threading
from concurrent.futures import ProcessPoolExecutor as P
def w(q): q.put(42)
async def wake():
    l = asyncio.get_running_loop(); f = l.create_future()
    threading.Thread(target=lambda: l.call_soon_threadsafe(f.set_result, 1)).start()
    return await asyncio.wait_for(f, 3)
if __name__ == "__main__":
    with P(2) as p: assert sum(p.map(abs, range(-3, 4))) == 12
    a, b = socket.socketpair(); a.send(b"x"); assert b.recv(1) == b"x"
    assert asyncio.run(wake()) == 1
    s = socket.socket(socket.AF_UNIX); s.bind("l.sock"); s.listen(1)
    for c in ("fork", "spawn", "forkserver"):
        x = m.get_context(c); q = x.Queue(); p = x.Process(target=w, args=(q,)); p.start()
        print(c, q.get(timeout=10)); p.join()
"#,
        );
        let output = world.run(["--", "/usr/bin/python3", "cc.py"]).finish().expect_status(0);
        assert_eq!(output.out(), "fork 42\nspawn 42\nforkserver 42\n");
        assert!(!world.workspace.join("l.sock").exists(), "a socket was shipped");
        if Path::new("/usr/bin/node").exists() {
            let script = "process.stdout.write(require('child_process').spawnSync('cat',{input:'hi'}).stdout)";
            let output = world.run(["--", "node", "-e", script]).finish().expect_status(0);
            assert_eq!(output.out(), "hi");
        }
    });
}

#[test]
fn toolchains_find_a_writable_cache_and_leave_the_callers_alone() {
    every_identity(|world| {
        fs::create_dir_all(world.home.join(".cache/pip")).expect("our own folder");
        fs::write(world.home.join(".cache/pip/entry"), "cached").expect("our own folder");
        world.own(&world.home.join(".cache"));
        let home = Snapshot::of(&world.home);
        world.write("a.c", "#include <stdio.h>\nint main(void){puts(\"built\");return 0;}\n");
        let mut script = String::from("set -e; cc -o a a.c; ./a; mkdir -p ~/.cache/x; echo y > ~/.cache/x/y; ");
        if Path::new("/usr/bin/npm").exists() {
            script.push_str("npm init -y >/dev/null; npm pack >/dev/null 2>&1; ls *.tgz >/dev/null; ");
        }
        if Path::new("/usr/bin/pip3").exists() {
            script.push_str("python3 -m pip --version >/dev/null; ");
        }
        if Path::new("/usr/bin/make").exists() {
            script.push_str("printf 'all:\\n\\techo made\\n' > Makefile; make -s; ");
        }
        world.run_script(&script).finish().expect_status(0);
        home.assert_same(&Snapshot::of(&world.home));
        assert!(world.workspace.join("a").exists());
        assert_eq!(fs::metadata(world.workspace.join("a")).expect("built").mode() & 0o111, 0o111);
        let output = world.command(world.workspace.join("a")).finish();
        assert_eq!(output.out(), "built\n");
    });
}

/// Git with an identity of its own and no file of the machine's.
const GIT: &str = "export GIT_AUTHOR_NAME=a GIT_AUTHOR_EMAIL=a@b GIT_COMMITTER_NAME=a GIT_COMMITTER_EMAIL=a@b; ";

fn git(world: &World, script: &str) -> Finished {
    world.shell(&format!("set -e; {GIT}{script}")).finish().expect_status(0)
}

#[test]
fn no_ghost_files_appear_in_the_project_or_at_home() {
    every_way(|world| {
        git(world, "git init -q -b main . && echo a > a && git add a && git commit -qm 0");
        let (project, home) = (Snapshot::of(&world.workspace), Snapshot::of(&world.home));
        let running = world.run(["--", "sleep", "2.5"]).start();
        wait_until("the program runs", Duration::from_secs(10), || {
            world.processes().iter().any(|process| process.command.starts_with("sleep 2.5"))
        });
        project.assert_same(&world.snapshot());
        home.assert_same(&Snapshot::of(&world.home));
        running.wait().expect_status(0);
        project.assert_same(&world.snapshot());
        let killed = world.run(["--", "sleep", "44.5"]).start();
        wait_until("the program runs", Duration::from_secs(10), || {
            world.processes().iter().any(|process| process.command.starts_with("sleep 44.5"))
        });
        killed.signal(Signal::SIGKILL);
        killed.wait();
        project.assert_same(&world.snapshot());
        home.assert_same(&Snapshot::of(&world.home));
        let status = world.run(["--", "git", "status", "--porcelain", "-uall"]).finish().expect_status(0);
        assert_eq!(status.out(), "", "{status}");
        world.run_script("git switch -q -c n; git config user.name z; git branch --show-current").finish();
        assert!(!world.workspace.join(".git/config.lock").exists(), "a lock was left");
        assert!(!world.workspace.join(".git/HEAD.lock").exists(), "a lock was left");
    });
}

#[test]
fn diff_apply_and_discard_touch_what_the_run_changed_and_nothing_else() {
    every_identity(|world| {
        git(world, "git init -q -b main . && echo build > .gitignore && echo 1 > a && echo c > c && echo k > k && git add . && git commit -qm 0");
        world.write("big.dat", vec![7; 100_000]);
        world.write("build/x", "ignored");
        world.write(".gitignore", "build\nedited\n");
        world.write("excluded/e", "e");
        let before = world.snapshot();
        let script = "echo 2 > a; echo n > b; rm c; chmod 600 k; cat big.dat > /dev/null";
        let change = || {
            world.run(["--no-apply", "--", "sh", "-c", script]).finish().expect_status(0);
            world.last_run()["id"].as_str().expect("an id").to_owned()
        };
        let id = change();
        before.assert_same(&world.snapshot());
        let planned = world.tollgate(["diff", &id]).finish();
        for name in ["a", "b", "c", "k"] {
            assert!(
                planned.out().lines().any(|line| line.split([' ', ',']).any(|word| word == name)),
                "{name}: {planned}"
            );
        }
        assert!(!planned.out().contains("big.dat") && !planned.out().contains("build"), "{planned}");
        world.tollgate(["discard", &id]).finish().expect_status(0);
        before.assert_same(&world.snapshot());
        assert_eq!(world.last_run()["changes"], "discarded");

        // The user's own edit meanwhile is the user's: the whole batch waits, and the file is named.
        let id = change();
        world.write("a", "mine\n");
        let refused = world.tollgate(["apply", &id]).finish();
        assert_ne!(refused.status, 0, "the conflict is not in the status: {refused}");
        assert!(
            refused.err().lines().any(|line| line.split(['`', ' ', ':', '"']).any(|word| word == "a")),
            "{refused}"
        );
        assert_eq!(world.read("a"), "mine\n", "{refused}");
        assert!(!world.workspace.join("b").exists() && world.workspace.join("c").exists(), "{refused}");
        // The others can be had by name.
        world.tollgate(["apply", &id, "b", "c", "k"]).finish().expect_status(0);
        assert_eq!((world.read("a").as_str(), world.read("b").as_str()), ("mine\n", "n\n"));
        assert!(!world.workspace.join("c").exists());
        assert_eq!(fs::metadata(world.workspace.join("k")).expect("there").mode() & 0o777, 0o600);
        // All others keep bytes, inode and modification time.
        let changed = before.changed_paths(&world.snapshot());
        let allowed: BTreeSet<&str> = [".", "a", "b", "c", "k"].into();
        assert!(changed.iter().all(|path| allowed.contains(path.as_str())), "{changed:?}");
    });
}

#[test]
fn modes_times_links_and_holes_are_kept() {
    every_identity(|world| {
        world.write("run.sh", "#!/bin/sh\necho a\n");
        for (name, mode) in [("x755", 0o755), ("x600", 0o600), ("x444", 0o444)] {
            world.write(name, name);
            world.mode(name, mode);
        }
        world.mode("run.sh", 0o755);
        for (name, mode) in [("closed", 0o555), ("setgid", 0o2755), ("empty", 0o755), ("e", 0o755)] {
            fs::create_dir(world.workspace.join(name)).expect("a new name");
            world.own(&world.workspace.join(name));
            world.mode(name, mode);
        }
        symlink("nowhere", world.workspace.join("dangling")).expect("a new name");
        world.own(&world.workspace.join("dangling"));
        let sparse = fs::File::create(world.workspace.join("sparse")).expect("a new name");
        sparse.set_len(5 << 30).expect("the file system has holes");
        drop(sparse);
        world.own(&world.workspace.join("sparse"));
        world.shell("setfattr -n user.note -v kept x755 2>/dev/null || python3 -c 'import os; os.setxattr(\"x755\",\"user.note\",b\"kept\")'; find . -exec touch -h -d 2001-02-03 {} +").finish().expect_status(0);
        let before = world.snapshot();
        let started = Instant::now();
        world
            .run_script("sed -i s/a/b/ run.sh; mkdir -p e/empty; cat sparse | head -c 100 > /dev/null")
            .finish()
            .expect_status(0);
        assert!(started.elapsed() < Duration::from_secs(20), "the sparse file was copied: {:?}", started.elapsed());
        let changed = before.changed_paths(&world.snapshot());
        let allowed: BTreeSet<&str> = [".", "run.sh", "e", "e/empty"].into();
        assert!(
            changed.iter().all(|path| allowed.contains(path.as_str())),
            "{:#?}",
            before.differences(&world.snapshot())
        );
        assert_eq!(world.read("run.sh"), "#!/bin/sh\necho b\n");
        assert_eq!(fs::metadata(world.workspace.join("run.sh")).expect("there").mode() & 0o7777, 0o755);
        assert!(world.workspace.join("e/empty").is_dir());
        let note = world
            .command("python3")
            .arg("-c")
            .arg("import os; print(os.getxattr('x755','user.note').decode())")
            .finish();
        assert_eq!(note.out(), "kept\n");
    });
}

#[test]
fn a_full_disk_fails_the_batch_and_leaves_the_tree_as_it_was() {
    every_identity(|world| {
        if !nix::unistd::geteuid().is_root() {
            eprintln!("skipped: a small file system needs the superuser");
            return;
        }
        let small = world.workspace.join("small");
        fs::create_dir(&small).expect("a new name");
        let mounted =
            Command::new("mount").args(["-t", "tmpfs", "-o", "size=1m,mode=777", "tmpfs"]).arg(&small).status();
        assert!(mounted.expect("util-linux has `mount`").success());
        struct Unmount<'a>(&'a Path);
        impl Drop for Unmount<'_> {
            fn drop(&mut self) {
                let _ = Command::new("umount").arg("-l").arg(self.0).status();
            }
        }
        let _guard = Unmount(&small);
        world.own(&small);
        fs::write(small.join("old"), "old").expect("our own file system");
        world.own(&small.join("old"));
        let before = Snapshot::of(&small);
        let script = "rm old; head -c 1024 /dev/zero > ok; head -c 4194304 /dev/zero > big";
        let output = world.run_script(script).within(&small).finish().expect_status(125);
        assert!(output.err().contains("big"), "{output}");
        assert!(output.err().to_lowercase().contains("no space") || output.err().contains("ENOSPC"), "{output}");
        assert_eq!(
            before.changed_paths(&Snapshot::of(&small)).iter().filter(|path| *path != ".").count(),
            0,
            "{output}"
        );
        let run = world.last_run();
        assert_eq!(run["outcome"]["type"], "could-not-apply", "{run}");
        assert_eq!(run["changes"], "pending", "{run}");
    });
}

#[test]
fn what_the_user_changed_meanwhile_is_not_overwritten() {
    every_way(|world| {
        world.write("x", "old");
        world.write("y", "old");
        let running = world.run_script("echo program > x; echo program > y; echo n > z; sleep 1.5").start();
        wait_until("the program runs", Duration::from_secs(10), || {
            world.processes().iter().any(|process| process.command.starts_with("sleep 1.5"))
        });
        world.write("x", "the user's");
        let output = running.wait();
        assert_ne!(output.status, 0, "{output}");
        assert!(output.err().contains('x'), "{output}");
        assert_eq!(world.read("x"), "the user's");
        // Nothing half done.
        assert_eq!(world.read("y"), "old");
        assert!(!world.workspace.join("z").exists());
        let run = world.last_run();
        assert_eq!((&run["outcome"]["type"], &run["changes"]), (&"could-not-apply".into(), &"pending".into()), "{run}");
    });
}

#[test]
fn one_of_several_changes_can_be_applied() {
    every_identity(|world| {
        for name in ["a", "b", "c"] {
            world.write(name, "old");
        }
        // What the run changes is held, so that a person can choose.
        let output = world.run(["--no-apply", "--", "sh", "-c", "for n in a b c; do echo new > $n; done"]).finish();
        assert_eq!(output.status, 0, "{output}");
        assert_eq!((world.read("a"), world.read("b"), world.read("c")), ("old".into(), "old".into(), "old".into()));
        let id = world.last_run()["id"].as_str().expect("an id").to_owned();
        world.tollgate(["apply", &id, "b"]).finish().expect_status(0);
        assert_eq!(
            (world.read("a").as_str(), world.read("b").as_str(), world.read("c").as_str()),
            ("old", "new\n", "old")
        );
        let diff = world.tollgate(["diff", &id]).finish();
        assert!(diff.out().contains("a") && diff.out().contains("c"), "{diff}");
        world.tollgate(["apply", &id]).finish().expect_status(0);
        assert_eq!((world.read("a").as_str(), world.read("c").as_str()), ("new\n", "new\n"));
    });
}

#[test]
fn a_supervisor_killed_while_applying_leaves_a_whole_state() {
    every_identity(|world| {
        const FILES: usize = 2000;
        for round in 0..3u64 {
            let folder = world.workspace.join(format!("round{round}"));
            fs::create_dir(&folder).expect("a new name");
            world.own(&folder);
            let script = format!("i=0; while [ $i -lt {FILES} ]; do echo new > f$i; i=$((i+1)); done; touch /tmp/x");
            let running =
                world.run(["--", "sh", "-c", &script]).within(&folder).timeout(Duration::from_secs(90)).start();
            let count = || {
                fs::read_dir(&folder)
                    .map(|found| {
                        found
                            .filter(|entry| {
                                entry.as_ref().is_ok_and(|entry| entry.file_name().to_string_lossy().starts_with('f'))
                            })
                            .count()
                    })
                    .unwrap_or(0)
            };
            wait_until("applying starts", Duration::from_secs(60), || {
                count() > 100 + 300 * round as usize
                    || world.runs().iter().any(|run| {
                        run["state"] == "ended"
                            && run["workspace"].as_str().is_some_and(|path| path.ends_with(&format!("round{round}")))
                    })
            });
            running.signal(Signal::SIGKILL);
            running.wait();
            // The next command settles what was left half done, either way.
            let settled = world.tollgate(["ps", "--all"]).finish().expect_status(0);
            let landed = count();
            assert!(landed == 0 || landed == FILES, "{landed} of {FILES} files: {settled}");
            let strangers: Vec<String> = fs::read_dir(&folder)
                .expect("there")
                .flatten()
                .map(|entry| entry.file_name().to_string_lossy().into_owned())
                .filter(|name| !name.starts_with('f'))
                .collect();
            assert!(strangers.is_empty(), "left beside: {strangers:?}");
            let id = world.last_run()["id"].as_str().expect("an id").to_owned();
            world.tollgate(["verify", &id]).finish().expect_status(0);
        }
    });
}

#[test]
fn host_sockets_refuse_and_each_attempt_is_recorded() {
    every_way(|world| {
        let paths = [world.runtime.join("bus"), world.workspace.join("service.sock")];
        let listeners: Vec<Listener> = paths.iter().map(|path| Listener::at_path(path)).collect();
        let name = format!("tg-case-{}", world.base().file_name().expect("named").to_string_lossy());
        let abstract_listener = Listener::at_name(&name);
        let connect = format!(
            "import socket,sys\nfor p in sys.argv[1:]+['\\0{name}']:\n  s=socket.socket(socket.AF_UNIX)\n  try: s.connect(p); print('CONNECTED',p)\n  except OSError as e: print(e.errno)\n"
        );
        world.write("connect.py", connect);
        let mut arguments = vec!["--".to_owned(), "/usr/bin/python3".to_owned(), "connect.py".to_owned()];
        arguments.extend(paths.iter().map(|path| path.to_string_lossy().into_owned()));
        let output = world.run(arguments).finish().expect_status(0);
        assert!(!output.out().contains("CONNECTED"), "{output}");
        for listener in listeners.iter().chain([&abstract_listener]) {
            assert_eq!(listener.accepted(), 0);
        }
        let denied = world.receipts(&["--denied", "--kind", "net/connect"]);
        for wanted in [paths[0].to_string_lossy().into_owned(), paths[1].to_string_lossy().into_owned(), name] {
            assert!(
                denied.iter().any(|receipt| receipt["resource"].to_string().contains(&wanted)),
                "no receipt of the attempt at {wanted}: {denied:#?}"
            );
        }
        let ran = world.out.join("ran").to_string_lossy().into_owned();
        world
            .run_script(&format!(
                "systemd-run --user touch {ran}; docker ps; ssh-add -l; dbus-send --session /x x.y; true"
            ))
            .finish();
        assert!(!Path::new(&ran).exists());
    });
}

#[test]
fn settings_that_run_code_later_are_held_apart() {
    every_way(|world| {
        git(world, "git init -q -b main . && echo a > a && git add a && git commit -qm 0");
        let config = world.read(".git/config");
        let script = "git config core.fsmonitor \"sh -c \\\"touch $PWD/pwn\\\"\"; git config diff.external ./evil; \
            git config filter.z.clean ./evil; echo '* filter=z' > .gitattributes; printf '#!/bin/sh\\ntouch pwn\\n' | tee evil > .git/hooks/post-commit; \
            chmod +x evil .git/hooks/post-commit; mkdir .vscode; echo {} > .vscode/tasks.json; echo 'touch pwn' > .envrc; echo plain > plain";
        let output = world.run_script(script).finish();
        let run = world.last_run();
        let id = run["id"].as_str().expect("an id").to_owned();
        // What is harmless landed; what runs code later did not.
        assert_eq!(world.read("plain"), "plain\n", "{output}");
        assert_eq!(world.read(".git/config"), config);
        for held in [".gitattributes", ".git/hooks/post-commit", ".vscode/tasks.json", ".envrc"] {
            assert!(fs::symlink_metadata(world.workspace.join(held)).is_err(), "{held} landed: {output}");
        }
        assert_eq!(run["changes"], "partial", "{run}");
        let diff = world.tollgate(["diff", &id]).finish();
        for held in [".git/config", ".gitattributes", ".git/hooks/post-commit", ".vscode/tasks.json", ".envrc"] {
            assert!(diff.out().contains(held), "`diff` does not list {held}: {diff}");
            assert!(output.err().contains(held) || output.err().contains("held"), "{output}");
        }
        let status = git(world, "git status --porcelain");
        assert!(!world.workspace.join("pwn").exists(), "{status}");
        // By name, one lands; the others stay.
        world.tollgate(["apply", &id, ".envrc"]).finish().expect_status(0);
        assert_eq!(world.read(".envrc"), "touch pwn\n");
        assert_eq!(world.read(".git/config"), config);
        world.tollgate(["discard", &id]).finish();
        git(world, "git status --porcelain; git commit -q --allow-empty -m 1");
        assert!(!world.workspace.join("pwn").exists());
    });
}

#[test]
fn a_program_cannot_rewrite_the_policy_of_its_next_run() {
    every_identity(|world| {
        let policy = world.write("policy.toml", "description = \"Mine.\"\nextends = [\"default\"]\n");
        let policy = policy.to_str().expect("UTF-8").to_owned();
        let with = |script: &str| world.run(["--policy", &policy, "--", "sh", "-c", script]).finish();
        let secret = world.out.join("s").display().to_string();
        let output = with(&format!(
            "printf '\\n[[allow]]\\neffect = [\"fs/read\"]\\npath = [\"**\"]\\n' >> policy.toml; cat {secret}"
        ));
        assert!(!output.out().contains(SENTINEL), "{output}");
        // The changed policy was held, or the next run says that it is not the one that a person knows.
        let text = world.read("policy.toml");
        let next = with("true");
        assert!(!text.contains("allow") || next.status == 125, "the program's policy is in force: {next}\n{text}");

        world.write("policy.toml", "{{{");
        let broken = with("echo ran").expect_status(125);
        assert!(broken.out().is_empty() && broken.err().contains("policy.toml"), "{broken}");

        world.write("policy.toml", "description = \"Mine.\"\nextends = [\"default\"]\n");
        let state = world.state.display().to_string();
        let inner = with(&format!(
            "export TOLLGATE_STATE={state} TOLLGATE_POLICY=x TOLLGATE_SHIM=/bin/true; tollgate run -- cat {secret}; \
             /run/tollgate/bin/tollgate run -- cat {secret}; ls {state}; rm -rf {state}; true"
        ));
        assert!(!inner.out().contains(SENTINEL), "{inner}");
        assert!(world.state.join(".").exists() && world.runs().len() >= 3, "the state folder was reached");
    });
}

#[test]
fn exactly_what_was_denied_is_listed() {
    every_way(|world| {
        world.write("needs-missing-interpreter", "#!/no/such/interpreter\n");
        world.mode("needs-missing-interpreter", 0o755);
        world.write("allowed", "fine");
        let out = world.out.display();
        let script = format!(
            "cat {out}/s; echo x > {out}/w; /usr/bin/python3 -c 'import socket; socket.create_connection((\"192.0.2.7\",80))'; \
             (sh -c 'cat {out}/s2'); cat allowed; ls . >/dev/null; ./needs-missing-interpreter; grep q /dev/null; exit 9"
        );
        let output = world.run_script(&script).finish().expect_status(9);
        assert!(output.out().contains("fine"));
        let denied = world.receipts(&["--denied"]);
        let text =
            |receipt: &Value| format!("{} {}", receipt["kind"].as_str().unwrap_or_default(), receipt["resource"]);
        let all: Vec<String> = denied.iter().map(text).collect();
        for (kind, object) in [
            ("fs/read", format!("{out}/s\"")),
            ("fs/write", format!("{out}/w\"")),
            ("fs/read", format!("{out}/s2\"")),
            ("net/connect", "192.0.2.7".to_owned()),
        ] {
            let found = denied
                .iter()
                .find(|receipt| receipt["kind"] == kind && receipt["resource"].to_string().contains(&object));
            let found = found.unwrap_or_else(|| panic!("no denied {kind} of {object}: {all:#?}\n{output}"));
            assert!(!found["reason"].as_str().unwrap_or_default().is_empty(), "{found}");
            assert!(!found["hint"].as_str().unwrap_or_default().is_empty(), "no hint at the grant: {found}");
            assert!(!found["decided_by"].as_str().unwrap_or_default().is_empty(), "{found}");
        }
        for receipt in &all {
            assert!(
                receipt.contains(&format!("{out}/"))
                    || receipt.contains("192.0.2.7")
                    || receipt.contains("/no/such/interpreter"),
                "not something that was denied: {receipt}"
            );
        }
    });
}

#[test]
fn receipts_verify_and_are_the_same_twice() {
    every_way(|world| {
        world.run_script("echo a > a; echo b > b; rm a").finish().expect_status(0);
        let id = world.last_run()["id"].as_str().expect("an id").to_owned();
        let verified = world.tollgate(["verify", &id]).finish().expect_status(0);
        assert!(!verified.err().contains("panicked"));
        let receipts = world.receipts(&[]);
        assert!(
            receipts.iter().any(|receipt| receipt["kind"] == "run/start" && receipt["decision"] == "allowed"),
            "{receipts:#?}"
        );
        assert!(
            receipts.iter().any(|receipt| receipt["kind"] == "fs/write" && receipt["resource"]["path"] == "b"),
            "{receipts:#?}"
        );
        let numbers: Vec<u64> = receipts.iter().map(|receipt| receipt["seq"].as_u64().expect("a number")).collect();
        assert_eq!(numbers, (1..=receipts.len() as u64).collect::<Vec<_>>());
        assert_eq!(receipts, world.receipts(&[]));
        assert_eq!(world.last_run()["effects"]["count"], receipts.len());
    });
}

#[test]
fn start_does_not_grow_with_the_tree() {
    every_identity(|world| {
        if world.way.identity == Identity::Root
            && nix::unistd::geteuid().is_root()
            && std::env::var_os("TOLLGATE_TEST_SLOW").is_none()
        {
            // Once is enough in the ordinary suite, and the ordinary user is the harder case.
            return;
        }
        let big = world.workspace.join("big");
        let empty = world.workspace.join("empty");
        for folder in [&big, &empty] {
            fs::create_dir(folder).expect("a new name");
        }
        // A tenth of the report's tree.
        for folder in 0..2000 {
            let path = big.join(format!("d{}/e{folder}", folder % 50));
            fs::create_dir_all(&path).expect("our own folder");
            for file in 0..10 {
                fs::write(path.join(format!("f{file}")), "").expect("our own folder");
            }
        }
        let owned =
            Command::new("chown").arg("-R").arg(format!("{0}:{0}", world.ids().0)).arg(&world.workspace).status();
        assert!(owned.expect("coreutils has `chown`").success());
        // The fastest of some: whatever else the machine does only adds.
        let fastest = |arguments: &[&str], folder: &Path| {
            let times = (0..9).map(|_| world.run(arguments).within(folder).finish().expect_status(0).elapsed);
            times.min().expect("some")
        };
        let plain = ["--", "true"];
        fastest(&plain, &empty);
        let (small, large) = (fastest(&plain, &empty), fastest(&plain, &big));
        // Twofold, and a few milliseconds more.
        assert!(large < small * 2 + Duration::from_millis(20), "empty {small:?}, big {large:?}");
        let policy = world.base().join("many.toml");
        let mut text = String::from(
            "description = \"Many.\"\nextends = [\"default\"]\n[[deny]]\neffect = [\"fs/write\"]\npath = [\n",
        );
        for n in 0..40 {
            text.push_str(&format!("  \"**/f{n}/**/x{n}\",\n"));
        }
        text.push_str("]\n");
        fs::write(&policy, text).expect("our own folder");
        let with_rules = fastest(&["--policy", policy.to_str().expect("UTF-8"), "--", "true"], &big);
        assert!(with_rules < large * 3 + Duration::from_millis(100), "{with_rules:?}, without the rules {large:?}");
    });
}

#[test]
fn many_small_files_and_open_calls_do_not_exhaust_the_supervisor() {
    every_identity(|world| {
        world.write(
            "many.py",
            "import os\nfor n in range(20000):\n    os.close(os.open('many.py', os.O_RDONLY))\nfor n in range(2000):\n    open('f%d' % n, 'w').close(); os.unlink('f%d' % n)\nprint('held', flush=True)\nimport time; time.sleep(1.5)\n",
        );
        let running = world.run(["--", "/usr/bin/python3", "many.py"]).timeout(Duration::from_secs(60)).start();
        let pid = running.pid();
        let count = || fs::read_dir(format!("/proc/{pid}/fd")).map(Iterator::count).unwrap_or(0);
        let mut most = 0;
        let mut watched = running;
        while watched.is_running() {
            most = most.max(count());
            std::thread::sleep(Duration::from_millis(10));
        }
        watched.wait().expect_status(0);
        assert!(most > 3 && most < 100, "the supervisor held {most} descriptors");
    });
}

#[test]
fn an_absent_tool_is_reported_and_not_replaced() {
    every_way(|world| {
        // A tool outside /usr: the message names the view that it needs.
        let tools = world.base().join("tools");
        fs::create_dir(&tools).expect("a new name");
        fs::write(tools.join("mytool"), "#!/bin/sh\necho tool\n").expect("our own folder");
        fs::set_permissions(tools.join("mytool"), fs::Permissions::from_mode(0o755)).expect("our own file");
        let path = format!("{}:/usr/bin:/bin", tools.display());
        let bin = tollgate_tests::world::binaries().display().to_string();
        let output = world.run(["--", "mytool"]).env("PATH", format!("{bin}:{path}")).finish().expect_status(127);
        assert!(output.err().contains(&*tools.to_string_lossy()), "the needed view is not named: {output}");
    });
}

#[test]
fn doctor_says_what_this_machine_gives() {
    every_identity(|world| {
        let output = world.tollgate(["doctor"]).finish();
        for word in ["namespace", "Landlock", "seccomp", "overlay", "cgroup"] {
            assert!(output.out().to_lowercase().contains(&word.to_lowercase()), "{word}: {output}");
        }
        assert!(on_path("bwrap") || output.out().contains("bwrap"), "{output}");
        assert!(observe::mounts().iter().all(|mount| !mount.contains(&*world.base().to_string_lossy())));
    });
}
