//! What a person meets who does something for the first time, or by mistake.

use serde_json::Value;
use std::{
    ffi::OsStr,
    fs,
    os::unix::{
        ffi::OsStrExt,
        fs::{symlink, PermissionsExt},
    },
    path::Path,
};
use tollgate_tests::{every_identity, Identity};

#[test]
fn quiet_does_not_keep_back_that_a_run_could_not_start() {
    every_identity(|world| {
        let run = world.run(["--quiet", "--", "no-such-program"]).finish().expect_status(127);
        assert!(run.err().contains("could not start") && run.err().contains("no-such-program"), "{run}");
        let run = world.run(["--quiet", "--", "sh", "-c", "exit 3"]).finish().expect_status(3);
        assert_eq!(run.err(), "");
    });
}

#[test]
fn discarding_the_latest_names_the_run() {
    every_identity(|world| {
        for json in [false, true] {
            world.run(["--no-apply", "--", "sh", "-c", "echo x > f"]).finish().expect_status(0);
            let id = world.last_run()["id"].as_str().expect("an id").to_owned();
            if json {
                let output = world.tollgate(["discard", "latest", "--json"]).finish().expect_status(0);
                let said = output.json_lines().remove(0);
                assert_eq!((&said["run"], &said["changes"]), (&Value::from(id), &Value::from("discarded")));
            } else {
                let output = world.tollgate(["discard", "latest"]).finish().expect_status(0);
                assert!(output.err().contains(&id), "{output}");
            }
        }
    });
}

#[test]
fn a_broken_policy_is_shown_line_by_line_and_as_json() {
    every_identity(|world| {
        world.write("bad.toml", "description = \"x\"\nnonsense = 1\n[limits]\nwall = \"0s\"\n");
        let run = world.run(["--policy", "./bad.toml", "--", "true"]).finish().expect_status(125);
        assert!(!run.err().contains("\\n") && run.err().lines().count() >= 3, "{run}");
        assert!(run.err().contains("./bad.toml:2:1"), "{run}");
        let check = world.tollgate(["policy", "check", "--json", "./bad.toml", "default"]).finish();
        let objects = check.json_lines();
        assert_eq!(check.status, 1, "{check}");
        assert_eq!(
            (&objects[0]["usable"], &objects[1]["usable"]),
            (&Value::Bool(false), &Value::Bool(true)),
            "{check}"
        );
        assert_eq!(objects[0]["faults"][0]["line"], 2, "{check}");
    });
}

#[test]
fn what_was_printed_and_who_was_killed_come_as_json_too() {
    every_identity(|world| {
        let run = world.run(["--", "sh", "-c", "echo out; sleep 60"]).start();
        let live = || world.tollgate(["ps", "--json"]).finish().json_lines();
        tollgate_tests::observe::wait_until("it printed", std::time::Duration::from_secs(20), || {
            world.tollgate(["logs", "latest", "--json"]).finish().out().contains("out")
        });
        let id = live()[0]["id"].clone();
        let logs = world.tollgate(["logs", "latest", "--json"]).finish().json_lines();
        assert_eq!(logs, [serde_json::json!({ "stream": "stdout", "text": "out\n" })]);
        let killed = world.tollgate(["kill", "latest", "--json"]).finish().expect_status(0).json_lines();
        assert_eq!((&killed[0]["run"], &killed[0]["result"]), (&id, &Value::from("gone")));
        run.wait();
    });
}

#[test]
fn a_program_of_a_version_manager_is_found_by_pasting_the_hint() {
    every_identity(|world| {
        let program = |path: &str| {
            let path = world.home.join(path);
            fs::create_dir_all(path.parent().expect("below the home")).expect("made");
            fs::write(&path, "#!/bin/sh\necho started\n").expect("written");
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("our own");
            path
        };
        program(".cargo/bin/cargo");
        program(".pyenv/versions/3.12.1/bin/python3.9");
        program(".pyenv/shims/python3.9");
        fs::write(world.home.join(".pyenv/version"), "3.12.1\n").expect("written");
        let tool = program(".local/share/tools/x/bin/tool");
        fs::create_dir_all(world.home.join(".local/bin")).expect("made");
        symlink(&tool, world.home.join(".local/bin/tool")).expect("linked");
        let path = |folder: &str| format!("{}:/usr/bin:/bin", world.home.join(folder).display());

        let cargo = |flags: &[&str]| {
            let arguments = flags.iter().chain(&["--", "cargo", "--version"]).copied();
            world.run(arguments).env("PATH", path(".cargo/bin")).finish()
        };
        let refused = cargo(&[]).expect_status(127);
        assert!(refused.err().contains("`--policy rust`"), "{refused}");
        assert_eq!(cargo(&["--policy", "rust"]).expect_status(0).out(), "started\n");

        let real = world.home.join(".pyenv/versions/3.12.1/bin/python3.9").display().to_string();
        // A version that no system has any more, so that only the version manager's is there.
        let refused = world.run(["--", "python3.9"]).env("PATH", path(".pyenv/shims")).finish().expect_status(127);
        assert!(refused.err().contains(&format!("`--policy python`, and start {real}")), "{refused}");
        assert_eq!(world.run(["--policy", "python", "--", &real]).finish().expect_status(0).out(), "started\n");

        let refused = world.run(["--", "tool"]).env("PATH", path(".local/bin")).finish().expect_status(127);
        let home = world.home.display();
        let hint = format!("--view {home}/.local/bin --view {home}/.local/share/tools/x");
        assert!(refused.err().contains(&hint), "{refused}");
        let flags: Vec<&str> = hint.split(' ').chain(["--", "tool"]).collect();
        let run = world.run(flags).env("PATH", path(".local/bin")).finish().expect_status(0);
        assert_eq!(run.out(), "started\n");
    });
}

#[test]
fn a_look_at_the_machine_is_no_refusal() {
    every_identity(|world| {
        let run = world.run_script("cat /sys/devices/system/cpu/online 2>/dev/null; exit 1").finish().expect_status(1);
        assert!(!run.err().contains("refused"), "{run}");
        assert_eq!(world.last_run()["effects"]["refused"], 0);
    });
}

#[test]
fn a_held_change_names_who_held_it() {
    every_identity(|world| {
        let run =
            world.run_script("ln -s /tmp .vscode; mkdir -p .git/hooks; echo x > .git/hooks/post-checkout").finish();
        let denied = world.receipts(&["--denied"]);
        assert!(denied.len() >= 2, "{run}");
        for receipt in denied {
            let (by, path) = (&receipt["decided_by"], &receipt["resource"]["path"]);
            let line = format!("refused by {}: ", by.as_str().expect("a name"));
            assert!(run.err().contains(&line), "{path}: no `{line}` in {run}");
        }
    });
}

#[test]
fn a_workspace_whose_name_is_not_utf8_works() {
    every_identity(|world| {
        let folder = world.workspace.join(OsStr::from_bytes(b"caf\xe9"));
        fs::create_dir(&folder).expect("made");
        world.own(&folder);
        let mut command = world.run(["--", "sh", "-c", "pwd; echo x > file"]).into_command();
        let output = command.current_dir(&folder).output().expect("runs");
        assert!(output.status.success(), "{output:?}");
        assert!(output.stdout.ends_with(b"caf\xe9\n"), "{output:?}");
        assert_eq!(fs::read(folder.join("file")).expect("applied"), b"x\n");
    });
}

#[test]
fn a_tree_three_hundred_deep_is_applied() {
    every_identity(|world| {
        let deep = "d/".repeat(300);
        let script = format!("mkdir -p {deep}; echo x > {deep}leaf; sleep 0.4");
        world.run_script(&script).finish().expect_status(0);
        assert_eq!(world.read(&format!("{deep}leaf")), "x\n");
    });
}

#[test]
fn a_home_folder_as_the_workspace_is_said_aloud_and_the_root_is_refused() {
    every_identity(|world| {
        let home = world.home.display().to_string();
        let run = world.run(["--workspace", &home, "--read-only", "--", "true"]).finish().expect_status(0);
        assert!(run.err().contains("is your home folder"), "{run}");
        let run = world.run(["--workspace", "/", "--", "true"]).finish().expect_status(125);
        assert!(run.err().contains("cannot be a workspace"), "{run}");
    });
}

#[test]
fn a_file_of_a_group_that_the_run_does_not_have_says_why_it_cannot_change() {
    every_identity(|world| {
        if world.way.identity != Identity::Ordinary || !nix::unistd::geteuid().is_root() {
            return;
        }
        world.write("file", "x");
        fs::create_dir(world.workspace.join("shared")).expect("made");
        for name in ["file", "shared"] {
            let (path, group) = (world.workspace.join(name), nix::unistd::Gid::from_raw(33));
            world.own(&path);
            nix::unistd::chown(&path, None, Some(group)).expect("root may");
        }
        for script in ["echo y > file", "echo y > shared/new"] {
            let run = world.run_script(script).finish();
            assert_ne!(run.status, 0, "{run}");
            assert!(run.err().contains("EOVERFLOW") && run.err().contains("--mirror"), "{run}");
        }
        world.run(["--mirror", "--", "sh", "-c", "echo y > file; echo y > shared/new"]).finish().expect_status(0);
        assert_eq!(world.read("shared/new"), "y\n");
        let here: &Path = &world.workspace;
        assert_eq!(fs::read_to_string(here.join("file")).expect("there"), "y\n");
    });
}

#[test]
fn what_a_program_made_unreadable_to_itself_is_applied_as_it_is() {
    every_identity(|world| {
        let script = "mkdir -p shut/in; echo x > shut/in/f; ln -s f shut/in/l; chmod 000 shut/in shut; : > private; chmod 000 private";
        world.run_script(script).finish().expect_status(0);
        let mode = |name: &str| fs::symlink_metadata(world.workspace.join(name)).expect("applied").permissions().mode();
        assert_eq!((mode("shut") & 0o7777, mode("private") & 0o7777), (0, 0));
        world.mode("shut", 0o700);
        world.mode("shut/in", 0o700);
        assert_eq!(world.read("shut/in/f"), "x\n");
    });
}
