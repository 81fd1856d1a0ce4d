//! The programs of the feature `test-switches`, which can leave a layer out or end at a named instant.

use crate::{Invocation, World};
use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::Command,
    sync::OnceLock,
};

/// Where `tollgate` and the shim with switches are: `$TOLLGATE_TEST_SWITCHES`, else built once into a target folder of
/// their own.
pub fn programs() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        if let Some(path) = std::env::var_os("TOLLGATE_TEST_SWITCHES") {
            return path.into();
        }
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace is above");
        let target = root.join("target/test-switches");
        let output = Command::new(env!("CARGO"))
            .current_dir(root)
            .args(["build", "--quiet", "--offline", "-p", "tollgate", "-p", "tollgate-shim", "--features"])
            .args(["tollgate/test-switches,tollgate-shim/test-switches", "--target-dir"])
            .arg(&target)
            .output()
            .expect("cargo runs these tests");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        target.join("debug")
    })
}

/// `tollgate` with switches and these arguments, where the world's user can reach it.
pub fn tollgate(world: &World, arguments: &[&str]) -> Invocation {
    for name in ["tollgate", "tollgate-shim"] {
        let copy = world.base().join(name);
        if !copy.exists() {
            fs::copy(programs().join(name), &copy).expect("a program can be copied");
            fs::set_permissions(&copy, fs::Permissions::from_mode(0o755)).expect("our own file");
        }
    }
    arguments.iter().fold(world.command(world.base().join("tollgate")), |invocation, argument| invocation.arg(argument))
}
