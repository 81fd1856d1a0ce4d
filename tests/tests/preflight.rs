//! A preflight executes the program and not its effects; its plan is shown, applied, proposed as a policy and obeyed.

use serde_json::Value;
use std::fs;
use tollgate_tests::{every_identity, Finished, World};

fn preflight(world: &World, script: &str) -> (Finished, String) {
    let finished = world.run(["--preflight", "--", "sh", "-c", script]).finish();
    (finished, world.last_run()["id"].as_str().expect("a run has an id").to_owned())
}

fn plan(world: &World, run: &str) -> Vec<Value> {
    world.tollgate(["plan", run, "--json"]).finish().expect_status(0).json_lines()
}

fn objects<'p>(plan: &'p [Value], kind: &str) -> Vec<&'p str> {
    plan.iter()
        .filter(|effect| effect["kind"] == kind)
        .filter_map(|effect| effect["resource"]["path"].as_str().or(effect["resource"]["to"].as_str()))
        .collect()
}

/// A protected path, so that the policy asks about it; a read of the host and a connection, so that the jail refuses.
const SCRIPT: &str = "echo 1 > a; mkdir -p d/e; echo 2 > d/e/f; rm gone; mv old new; mkdir -p .git/hooks; \
    echo x > .git/hooks/pre-commit; cat $OUT/s; (exec 3<>/dev/tcp/203.0.113.9/80); tollgate effect run/start \
    command=true; \
    tollgate effect fs/write path=asked content=eA==; cp asked copied; echo end > last; exit 3";

fn script(world: &World) -> String {
    let bash = format!("OUT={}; {SCRIPT}", world.out.display());
    format!("exec bash -c {}", quoted(&bash.replace("tollgate effect", "/run/tollgate/bin/tollgate effect")))
}

fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', "'\\''"))
}

#[test]
fn a_preflight_goes_to_the_end_and_nothing_happens() {
    every_identity(|world| {
        world.write("gone", "g");
        world.write("old", "o");
        let before = world.snapshot();
        let (finished, id) = preflight(world, &script(world));
        assert_eq!(finished.status, 3, "{finished}");
        assert_eq!(world.snapshot(), before, "the host's tree is as it was");
        world.assert_outside_intact();
        let plan = plan(world, &id);
        let written = objects(&plan, "fs/write");
        for path in ["a", "d", "d/e", "d/e/f", ".git/hooks/pre-commit", "asked", "copied", "last"] {
            assert!(written.contains(&path), "{path}: {plan:#?}");
        }
        assert_eq!(objects(&plan, "fs/delete"), ["gone"]);
        assert_eq!(objects(&plan, "fs/move"), ["old"]);
        let hook = plan.iter().find(|effect| effect["resource"]["path"] == ".git/hooks/pre-commit").expect("is there");
        assert_eq!((&hook["would"], &hook["answered"]), (&"asked".into(), &"not-asked".into()), "{hook}");
        assert!(hook["rule"].as_str().is_some_and(|rule| rule.contains("base.toml")), "{hook}");
        let sentinel = world.out.join("s").display().to_string();
        assert!(objects(&plan, "fs/read").contains(&sentinel.as_str()), "{plan:#?}");
        assert!(objects(&plan, "net/connect").iter().any(|to| to.contains("203.0.113.9")), "{plan:#?}");
        assert!(plan.iter().filter(|effect| effect["door"] == "workspace").all(|effect| effect["uncertain"] == true));
        let receipts = world.receipts_of(&id, &["--decision", "planned"]);
        assert!(
            receipts.len() >= 8 && receipts.iter().all(|receipt| receipt["decided_by"] == "preflight"),
            "{receipts:?}"
        );
        let asked = receipts.iter().find(|receipt| receipt["door"] == "api").expect("the layer took it");
        assert_eq!((&asked["kind"], &asked["resource"]["path"]), (&"fs/write".into(), &"asked".into()));
        let changed = world.receipts_of(&id, &["--decision", "allowed"]);
        assert!(changed.iter().all(|receipt| receipt["door"] != "workspace"), "{changed:?}");
        let inspected = world.tollgate(["inspect", &id, "--json"]).finish().json_lines().remove(0);
        assert_eq!((&inspected["mode"]["type"], &inspected["changes"]), (&"preflight".into(), &"pending".into()));
        world.tollgate(["verify", &id]).finish().expect_status(0);
        world.assert_nothing_left(std::time::Duration::from_secs(5));
    });
}

#[test]
fn applying_does_what_was_planned_and_nothing_else() {
    every_identity(|world| {
        world.write("x", "old");
        let (_, id) = preflight(world, "echo new > x; echo y > y");
        let upper = world.state.join("runs").join(&id).join("layer/upper");
        // Somebody changes the layer behind Tollgate's back.
        fs::write(upper.join("y"), "forged").expect("writable");
        let refused = world.tollgate(["apply", &id]).finish().expect_status(125);
        assert!(refused.err().contains("planned something else: `y`"), "{refused}");
        assert_eq!((world.read("x"), world.workspace.join("y").exists()), ("old".into(), false));

        let (_, id) = preflight(world, "echo new > x; echo y > y");
        world.write("x", "the user's");
        let conflict = world.tollgate(["apply", &id]).finish().expect_status(125);
        assert!(conflict.err().contains("`x`"), "{conflict}");

        let (_, id) = preflight(world, "echo new > x; echo y > y");
        world.tollgate(["apply", &id, "y"]).finish().expect_status(0);
        assert_eq!((world.read("x"), world.read("y")), ("the user's".into(), "y\n".into()));
        world.tollgate(["apply", &id]).finish().expect_status(0);
        assert_eq!(world.read("x"), "new\n");
        world.tollgate(["undo", &id]).finish().expect_status(0);
        assert_eq!((world.read("x"), world.workspace.join("y").exists()), ("the user's".into(), false));
    });
}

#[test]
fn a_plan_that_was_tampered_with_is_refused() {
    every_identity(|world| {
        let (_, id) = preflight(world, "echo y > y");
        let path = world.state.join("runs").join(&id).join("plan.json");
        let text = fs::read_to_string(&path).expect("is kept");
        let mut plan: Value = serde_json::from_str(&text).expect("JSON");
        plan["effects"][0]["digest"] = "0".repeat(64).into();
        fs::write(&path, plan.to_string()).expect("writable");
        let refused = world.tollgate(["plan", &id]).finish().expect_status(1);
        assert!(refused.err().contains("is not what its receipts say"), "{refused}");
        world.run(["--plan", &id, "--", "true"]).finish().expect_status(125);
    });
}

#[test]
fn the_proposed_policy_is_valid_and_the_real_run_under_it_meets_no_refusal() {
    every_identity(|world| {
        world.write("old", "o");
        let script = format!("mkdir out; echo 1 > 'out/odd [name]'; mv old new; cat {}", world.out.join("s").display());
        let (_, id) = preflight(world, &script);
        let proposal = world.tollgate(["plan", &id, "--propose"]).finish().expect_status(0).out();
        let file = world.home.join("proposed.toml");
        fs::write(&file, &proposal).expect("writable");
        world.own(&file);
        let name = file.display().to_string();
        let checked = world.tollgate(["policy", "check", &name]).finish().expect_status(0);
        assert_eq!(checked.err(), "", "{proposal}");
        world.run(["--policy", &name, "--", "sh", "-c", &script]).finish().expect_status(0);
        let record = world.last_run();
        assert_eq!((&record["effects"]["refused"], &record["changes"]), (&0.into(), &"applied".into()), "{proposal}");
        assert_eq!(world.read("out/odd [name]"), "1\n");
        // And what was not planned is refused.
        world.run(["--policy", &name, "--", "sh", "-c", "echo 2 > other"]).finish();
        assert!(!world.workspace.join("other").exists());
        assert_eq!(world.last_run()["changes"], "pending");
        fs::remove_file(&file).expect("our own");
    });
}

#[test]
fn a_run_within_a_plan_may_do_what_was_planned_and_nothing_else() {
    every_identity(|world| {
        let (_, id) = preflight(world, "echo 1 > a; mkdir -p .vscode; echo 1 > .vscode/tasks.json");
        let run = |script: &str| world.run(["--plan", &id, "--", "sh", "-c", script]).finish();
        run("echo 2 > a; echo 2 > b; mkdir -p .vscode; echo 2 > .vscode/tasks.json");
        assert_eq!((world.read("a"), world.read(".vscode/tasks.json")), ("2\n".into(), "2\n".into()));
        assert!(!world.workspace.join("b").exists());
        let record = world.last_run();
        assert_eq!((&record["mode"]["type"], &record["mode"]["plan"]), (&"planned".into(), &id.as_str().into()));
        let refused = world.receipts(&["--denied"]);
        assert_eq!(refused.len(), 1, "{refused:?}");
        assert!(refused[0]["reason"].as_str().is_some_and(|reason| reason.contains("plan of run")), "{refused:?}");
        let none = world.run(["--plan", "nosuchrun", "--", "true"]).finish();
        assert_eq!(none.status, 125, "{none}");
    });
}
