//! Links the shim statically on glibc targets, whatever flags the caller of cargo gives.
//!
//! The shim starts before the jail's view exists and is shown inside jails whose C library it must not depend on.
//! `target-feature=+crt-static` cannot be asked for by one package of a workspace (it would break the proc-macros
//! of all the others), so the three shared libraries that `std` names are answered with their static twins.

use std::{env, fs, path::PathBuf, process::Command};

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    let is = |key: &str, value: &str| env::var(key).as_deref() == Ok(value);
    if !is("CARGO_CFG_TARGET_OS", "linux") || !is("CARGO_CFG_TARGET_ENV", "gnu") {
        return;
    }
    if env::var("CARGO_CFG_TARGET_FEATURE").is_ok_and(|all| all.split(',').any(|one| one == "crt-static")) {
        return;
    }
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR for build scripts"));
    let compiler = linker();
    for (shared, archive) in [("libgcc_s.so", "libgcc_eh.a"), ("libc.so", "libc.a"), ("libm.so", "libm.a")] {
        let Some(found) = archive_path(&compiler, archive) else {
            println!("cargo:warning=no {archive}: the shim will be linked dynamically (install libc6-dev)");
            return;
        };
        fs::write(out.join(shared), format!("GROUP({})\n", found.display())).expect("OUT_DIR is writable");
    }
    // As an argument of our binary alone: a `rustc-link-search` would reach every program that links our library.
    println!("cargo:rustc-link-arg-bins=-L{}", out.display());
    println!("cargo:rustc-link-arg-bins=-static-pie");
}

/// The C compiler that will link: cargo's own answer for a cross target, `cc` otherwise.
fn linker() -> String {
    let target = env::var("TARGET").unwrap_or_default();
    if target == env::var("HOST").unwrap_or_default() {
        return "cc".to_owned();
    }
    match env::var("CARGO_CFG_TARGET_ARCH").as_deref() {
        Ok("aarch64") => "aarch64-linux-gnu-gcc".to_owned(),
        _ => "cc".to_owned(),
    }
}

fn archive_path(compiler: &str, archive: &str) -> Option<PathBuf> {
    let answer = Command::new(compiler).arg(format!("-print-file-name={archive}")).output().ok()?;
    let path = PathBuf::from(String::from_utf8(answer.stdout).ok()?.trim());
    path.is_absolute().then_some(path)
}
