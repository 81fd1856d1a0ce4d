//! The other launcher: bubblewrap makes the namespaces and mounts, from the same plan.
//!
//! Overlays and mapped views are made first, in a namespace of their own, and handed to bubblewrap as paths; then
//! bubblewrap executes the shim once more, as pid 1, for everything after the view ([`super::inside_main`]).

use super::{
    descriptors, ids, network, sources,
    step::{step, At, Failure},
    view, Standard,
};
use crate::protocol::{Access, Bytes, Masked, Mount, Plan, StepFailed};
use std::{
    convert::Infallible,
    ffi::{CString, OsString},
    fs::File,
    io,
    os::{fd::OwnedFd, unix::ffi::OsStrExt},
    path::PathBuf,
};

/// Stages what bubblewrap cannot make, and becomes bubblewrap.
pub fn launch(
    control: &OwnedFd,
    plan: &Plan,
    program: &Bytes,
    sources: sources::Sources,
    standard: Standard,
    plan_file: &File,
) -> Result<Infallible, StepFailed> {
    // Bubblewrap would be its parent, and expects no child but its own.
    step("views", sources::reap_holder)?;
    step("user namespace", ids::unshare_user)?;
    step("namespaces", ids::unshare_for_staging)?;
    // As user 0 of a namespace of its own, bubblewrap may mount; outside, that user is the run's unprivileged one.
    step("id maps", || ids::map_self(plan.ids.host_uid, plan.ids.host_gid, 0, 0))?;
    // Here, as bubblewrap would make it the property of a namespace below, over which the shim has no power later.
    if plan.network.is_some() {
        step("namespaces", ids::unshare_network)?;
        step("loopback", ids::raise_loopback)?;
    }
    let network = step("network", || network::raise(control, plan))?;
    let sources = step("views", || sources.open_the_rest(plan))?;
    let staged =
        step("views", || view::stage(&plan.mounts, sources, &|failure| super::ask_for_copy(control, failure)))?;
    let arguments = step("bubblewrap", || arguments(plan, program, &staged, network.as_ref()))?;
    step("descriptors", || descriptors::leave_for_inside(control, plan_file, &standard, network.as_ref()))?;
    step("bubblewrap", || {
        let path = c_string(program.to_path().into_os_string())?;
        let environment: [CString; 0] = [];
        let Err(errno) = nix::unistd::execve(&path, &arguments, &environment);
        Err(errno).at("execve", program.to_path().display())
    })
}

/// The plan in bubblewrap's own argument language (bwrap(1)).
fn arguments(
    plan: &Plan,
    program: &Bytes,
    staged: &[Option<PathBuf>],
    network: Option<&network::Standing>,
) -> Result<Vec<CString>, Failure> {
    let mut all: Vec<OsString> = vec![program.to_os()];
    let mut push =
        |words: &[&dyn AsRef<std::ffi::OsStr>]| all.extend(words.iter().map(|word| word.as_ref().to_owned()));
    // The capability that emptying the bounding set takes; the shim gives it up right after.
    push(&[&"--cap-add", &"CAP_SETPCAP"]);
    push(&[&"--unshare-user", &"--unshare-all", &"--as-pid-1", &"--clearenv", &"--hostname", &plan.run]);
    if network.is_some() {
        // The one that is set up already.
        push(&[&"--share-net"]);
    }
    push(&[&"--uid", &plan.ids.jail_uid.to_string(), &"--gid", &plan.ids.jail_gid.to_string()]);
    for (mount, staged) in plan.mounts.iter().zip(staged) {
        match (mount, staged) {
            (Mount::Bind { target, access, .. }, Some(path)) => {
                let word = match access {
                    Access::ReadOnly => "--ro-bind",
                    Access::ReadWrite => "--bind",
                };
                push(&[&word, path, &target.to_path()]);
            }
            (Mount::View { target, .. }, Some(path)) => push(&[&"--ro-bind", path, &target.to_path()]),
            (Mount::Overlay { target, .. }, Some(path)) => push(&[&"--bind", path, &target.to_path()]),
            // Optional, and missing on the host.
            (Mount::Bind { .. } | Mount::View { .. } | Mount::Overlay { .. }, None) => {}
            (Mount::Proc { target }, _) => {
                push(&[&"--proc", &target.to_path()]);
                // As in the native view: some settings belong to the namespaces of the jail and could be written.
                push(&[&"--ro-bind", &"/proc/sys", &target.to_path().join("sys")]);
            }
            (Mount::Dev { target, shm_bytes }, _) => {
                let target = target.to_path();
                push(&[&"--dev", &target, &"--perms", &"1777", &"--size", &shm_bytes.to_string()]);
                push(&[&"--tmpfs", &target.join("shm"), &"--mqueue", &target.join("mqueue")]);
                push(&[&"--remount-ro", &target]);
            }
            (Mount::Tmpfs { target, bytes, mode }, _) => {
                push(&[&"--perms", &format!("{mode:o}"), &"--size", &bytes.to_string(), &"--tmpfs", &target.to_path()]);
            }
            (Mount::Dir { target, mode }, _) => push(&[&"--perms", &format!("{mode:o}"), &"--dir", &target.to_path()]),
            (Mount::File { target, content, mode }, _) => {
                let descriptor = memory_file(content)?;
                push(&[&"--perms", &format!("{mode:o}"), &"--file", &descriptor.to_string(), &target.to_path()]);
            }
            (Mount::Symlink { target, to }, _) => push(&[&"--symlink", &to.to_path(), &target.to_path()]),
            (Mount::Mask { target, over: Masked::Directory }, _) => {
                push(&[&"--perms", &"0000", &"--tmpfs", &target.to_path(), &"--remount-ro", &target.to_path()]);
            }
            (Mount::Mask { target, over: Masked::File }, _) => {
                let descriptor = memory_file(&Bytes::Text(String::new()))?;
                push(&[&"--perms", &"0000", &"--ro-bind-data", &descriptor.to_string(), &target.to_path()]);
            }
        }
    }
    push(&[&"--remount-ro", &"/", &"--chdir", &"/", &"--", &"/run/tollgate/bin/tollgate", &"--inside"]);
    if let Some(network) = network {
        push(&[&descriptors::word_for(network)]);
    }
    all.into_iter().map(c_string).collect()
}

/// A file that exists in memory only, at its start, inherited by bubblewrap.
fn memory_file(content: &Bytes) -> Result<i32, Failure> {
    use nix::sys::memfd::{memfd_create, MFdFlags};
    use std::io::{Seek, Write};
    let memory = memfd_create(c"file", MFdFlags::empty()).at("memfd_create", "a file of the view")?;
    let mut file = File::from(memory);
    file.write_all(content.to_os().as_bytes()).at("write", "a file of the view")?;
    file.rewind().at("lseek", "a file of the view")?;
    // Away from the numbers that the plan and the streams are about to take.
    let high = nix::fcntl::fcntl(&file, nix::fcntl::FcntlArg::F_DUPFD(128)).at("fcntl", "a file of the view")?;
    Ok(high)
}

fn c_string(word: OsString) -> Result<CString, Failure> {
    CString::new(word.as_bytes()).map_err(io::Error::from).at("execve", word.to_string_lossy())
}
