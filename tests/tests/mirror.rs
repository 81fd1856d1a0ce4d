//! Where the kernel refuses an overlay, a run works on a copy of its workspace by itself, and says so.

use nix::mount::{mount, umount2, MntFlags, MsFlags};
use serde_json::Value;
use std::{
    fs,
    path::{Path, PathBuf},
};
use tollgate_tests::{every_identity, every_way, Identity, World};

/// An overlay over a folder, as a container has it. An overlay takes none for its upper layer, and maps no ids.
struct Overlaid(PathBuf);

impl Overlaid {
    /// None where the suite may not mount, which is said aloud.
    fn over(world: &World, folder: &Path) -> Option<Overlaid> {
        if !nix::unistd::geteuid().is_root() {
            eprintln!("skipped: only root can mount an overlay over the test's own folder");
            return None;
        }
        let name = folder.file_name().expect("a folder of the world").to_string_lossy();
        let part = |suffix: &str| {
            let part = world.base().join(format!("{name}-{suffix}"));
            fs::create_dir(&part).expect("our own folder");
            part
        };
        let (upper, work) = (part("upper"), part("work"));
        let options = format!("lowerdir={},upperdir={},workdir={}", folder.display(), upper.display(), work.display());
        let found = fs::metadata(folder).expect("the folder is there");
        fs::set_permissions(&upper, found.permissions()).expect("our own folder");
        world.own(&upper);
        mount(Some("overlay"), folder, Some("overlay"), MsFlags::empty(), Some(options.as_str())).expect("mounts");
        Some(Overlaid(folder.to_owned()))
    }
}

impl Drop for Overlaid {
    fn drop(&mut self) {
        umount2(&self.0, MntFlags::MNT_DETACH).expect("we mounted it");
    }
}

fn prepare(world: &World) {
    world.write("kept", "kept");
    world.write("edited", "before");
    world.write("deleted", "x");
    world.write("folder/inner", "inner");
}

const SCRIPT: &str = "cat kept && echo after > edited && rm deleted && mv folder moved && echo new > made";

#[track_caller]
fn worked_on_a_copy(world: &World, stderr: &str) {
    assert_eq!(world.read("edited"), "after\n");
    assert_eq!(world.read("made"), "new\n");
    assert_eq!(world.read("moved/inner"), "inner");
    assert_eq!(world.read("kept"), "kept");
    assert!(!world.workspace.join("deleted").exists() && !world.workspace.join("folder").exists());
    assert!(stderr.contains("copy of the workspace"), "{stderr}");
    let run = world.last_run();
    let degraded: Vec<&str> = run["degraded"].as_array().expect("a list").iter().filter_map(Value::as_str).collect();
    assert!(degraded.iter().any(|text| text.starts_with("overlay: ")), "{run}");
    assert_eq!(run["changes"], "applied", "{run}");
    world.assert_outside_intact();
}

#[test]
fn a_state_folder_that_takes_no_layer_makes_the_run_work_on_a_copy() {
    every_way(|world| {
        let Some(_mounted) = Overlaid::over(world, &world.state) else { return };
        prepare(world);
        let run = world.run_script(SCRIPT).finish().expect_status(0);
        assert_eq!(run.out(), "kept");
        worked_on_a_copy(world, &run.err());
        let folder = world.state.join("runs").join(world.last_run()["id"].as_str().expect("an id"));
        assert!(!folder.join("layer").exists(), "the copy is left over");
    });
}

#[test]
fn a_workspace_that_cannot_be_mapped_for_roots_run_is_copied() {
    every_identity(|world| {
        if world.way.identity != Identity::Root {
            return;
        }
        prepare(world);
        let Some(_mounted) = Overlaid::over(world, &world.workspace) else { return };
        let run = world.run_script("cat kept && echo after > edited && rm deleted && echo new > made").finish();
        let run = run.expect_status(0);
        assert_eq!((world.read("edited"), world.read("made")), ("after\n".to_owned(), "new\n".to_owned()));
        assert!(!world.workspace.join("deleted").exists());
        assert!(run.err().contains("copy of the workspace"), "{run}");
        // What the kernel refuses of an overlay below fails the batch, and nothing else happens.
        let run = world.run_script("rm -r folder; echo x > made").finish().expect_status(125);
        assert!(run.err().contains("put the workspace on a volume"), "{run}");
        assert_eq!((world.read("folder/inner"), world.read("made")), ("inner".to_owned(), "new\n".to_owned()));
    });
}

#[test]
fn a_copy_is_held_to_the_limit_of_what_a_run_may_write() {
    every_identity(|world| {
        world.write("large", vec![1; 8 << 20]);
        let script = "cat large > /dev/null; head -c 100000 /dev/zero > some; sleep 0.5";
        world.run(["--mirror", "--write-bytes", "4MiB", "--", "sh", "-c", script]).finish().expect_status(0);
        let script = "for n in 1 2 3 4 5 6; do head -c 1000000 /dev/zero > f$n; done; sleep 5";
        let run = world.run(["--mirror", "--write-bytes", "4MiB", "--", "sh", "-c", script]).finish();
        run.expect_status(153);
    });
}

#[test]
fn a_workspace_too_large_for_a_copy_is_refused_with_both_ways_out() {
    every_identity(|world| {
        let Some(_mounted) = Overlaid::over(world, &world.state) else { return };
        let file = fs::File::create(world.workspace.join("huge")).expect("made");
        let allocate = nix::fcntl::FallocateFlags::empty();
        if let Err(error) = nix::fcntl::fallocate(&file, allocate, 0, (4 << 30) + 1) {
            eprintln!("skipped: no space for a workspace of more than 4 GiB: {error}");
            return;
        }
        let run = world.run_script("true").finish().expect_status(125);
        for remedy in ["--workspace", "TOLLGATE_STATE"] {
            assert!(run.err().contains(remedy), "{run}");
        }
        assert_eq!(world.last_run()["outcome"]["type"], "could-not-start");
    });
}
