//! The program's side: the last layers, then execution.

use super::{
    confine, descriptors,
    step::{step, At, Failure},
    Standard,
};
use crate::{
    channel,
    protocol::{Layer, Plan, StepFailed},
    sys,
};
use nix::{
    errno::Errno,
    sys::signal::{SigSet, SigmaskHow},
};
use serde::{Deserialize, Serialize};
use std::{
    convert::Infallible,
    ffi::{CString, OsStr},
    io,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
        unix::ffi::{OsStrExt, OsStringExt},
    },
};

/// From the program's process to pid 1, before it is executed.
#[derive(Debug, Serialize, Deserialize)]
pub enum FromProgram {
    /// The layers are on; the listener is attached if there is one.
    Confined { degraded: Option<String> },
    /// A layer failed.
    Failed(StepFailed),
    /// It could not be executed.
    NotExecuted { errno: i32, path: crate::protocol::Bytes },
}

/// Confines this process and executes the program. Only failures come back.
pub fn become_program(
    plan: &Plan,
    standard: &Standard,
    terminal: Option<&OwnedFd>,
    to_pid_one: OwnedFd,
) -> Result<Infallible, StepFailed> {
    step("process group", || own_group(terminal))?;
    step("standard streams", || place_streams(plan, standard, terminal))?;
    if !plan.without.contains(&Layer::Rlimits) {
        step("resource limits", || confine::limit_resources(plan))?;
    }
    step("working directory", || {
        let path = plan.cwd.to_path();
        nix::unistd::chdir(&path).at("chdir", path.display())
    })?;
    // Before seccomp, whose filter need not allow it.
    let degraded = match plan.without.contains(&Layer::Landlock) {
        true => None,
        false => step("landlock", || confine::restrict_files(plan))?,
    };
    step("signals", reset_signals)?;
    // Last: only what the program itself may call from here on.
    let listener = match plan.without.contains(&Layer::Seccomp) {
        true => None,
        false => step("seccomp", || confine::filter_system_calls(&plan.filters))?,
    };
    let attached: Vec<BorrowedFd> = listener.iter().map(AsFd::as_fd).collect();
    step("seccomp", || {
        let message = FromProgram::Confined { degraded };
        channel::send(to_pid_one.as_fd(), &message, &attached).at("sendmsg", "pid 1")
    })?;
    drop(listener);
    wait_for_leave(&to_pid_one);
    let (errno, path) = execute(plan);
    let message = FromProgram::NotExecuted { errno: errno as i32, path: path.into() };
    let _ = channel::send(to_pid_one.as_fd(), &message, &[]);
    super::exit(126)
}

/// Waits until pid 1 says that the program may be executed. Whether or not it ever does, nothing else happens.
fn wait_for_leave(to_pid_one: &OwnedFd) {
    loop {
        match nix::unistd::read(to_pid_one, &mut [0]) {
            Err(Errno::EINTR) => {}
            Ok(1) => return,
            Ok(_) | Err(_) => super::exit(126),
        }
    }
}

/// Lets the program's process execute the program, once its layers are on. One that has failed meanwhile says so.
pub fn give_leave(from_program: &OwnedFd) -> io::Result<()> {
    use nix::sys::socket::{send, MsgFlags};
    match send(from_program.as_raw_fd(), &[1], MsgFlags::MSG_NOSIGNAL) {
        Ok(_) | Err(Errno::EPIPE | Errno::ECONNRESET) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}

/// A process group of its own, in the foreground of its terminal. Pid 1 leads the session, so the group is not
/// orphaned and the terminal can stop it (setpgid(2), termios(3)).
fn own_group(terminal: Option<&OwnedFd>) -> Result<(), Failure> {
    let me = nix::unistd::getpid();
    nix::unistd::setpgid(me, me).at("setpgid", me)?;
    if let Some(terminal) = terminal {
        // SIGTTOU is blocked here, as every signal is.
        nix::unistd::tcsetpgrp(terminal, me).at("tcsetpgrp", "the terminal")?;
    }
    Ok(())
}

fn place_streams(plan: &Plan, standard: &Standard, terminal: Option<&OwnedFd>) -> Result<(), Failure> {
    for (number, stream) in standard.streams.iter().enumerate() {
        let from = match (terminal, plan.terminal) {
            (Some(slave), Some(wanted)) if wanted.on[number] => slave.as_raw_fd(),
            _ => stream.as_raw_fd(),
        };
        // Streams never sit on 0 to 2 themselves: those numbers are /dev/null until here.
        descriptors::duplicate_onto(from, number as i32)?;
    }
    Ok(())
}

/// A program expects no signal ignored and none blocked; pid 1 blocks them all.
fn reset_signals() -> Result<(), Failure> {
    sys::default_actions();
    nix::sys::signal::sigprocmask(SigmaskHow::SIG_SETMASK, Some(&SigSet::empty()), None).at("sigprocmask", "no signal")
}

/// execve(2), searching the jail's own PATH as execvp(3) does. Gives the error that says most.
fn execute(plan: &Plan) -> (Errno, std::ffi::OsString) {
    let c_string = |bytes: &[u8]| CString::new(bytes).map_err(|_| Errno::EINVAL);
    let program = plan.command.first().map(|first| first.to_os()).unwrap_or_default();
    let arguments: Result<Vec<_>, _> = plan.command.iter().map(|one| c_string(one.to_os().as_bytes())).collect();
    let environment: Result<Vec<_>, _> = plan
        .env
        .iter()
        .map(|(name, value)| c_string(&[name.to_os().as_bytes(), b"=", value.to_os().as_bytes()].concat()))
        .collect();
    let (Ok(arguments), Ok(environment)) = (arguments, environment) else { return (Errno::EINVAL, program) };
    let path = plan.env.iter().find(|(name, _)| name.to_os() == "PATH").map(|(_, value)| value.to_os());
    let mut result = (Errno::ENOENT, program.clone());
    for candidate in candidates(&program, path.as_deref()) {
        let Ok(c_path) = c_string(candidate.as_bytes()) else { return (Errno::EINVAL, candidate) };
        let Err(errno) = nix::unistd::execve(&c_path, &arguments, &environment);
        match errno {
            // Not here; look on.
            Errno::ENOENT | Errno::ENOTDIR if !exists(&candidate) => {}
            // execvp(3): remember it, another directory may have one that can be executed.
            Errno::EACCES => result = (Errno::EACCES, candidate),
            other => return (other, candidate),
        }
    }
    result
}

fn candidates(program: &OsStr, path: Option<&OsStr>) -> Vec<std::ffi::OsString> {
    if program.as_bytes().contains(&b'/') || program.is_empty() {
        return vec![program.to_owned()];
    }
    let path = path.unwrap_or(OsStr::new("/usr/local/bin:/usr/bin:/bin"));
    let join = |directory: &[u8]| {
        let directory = if directory.is_empty() { b"." } else { directory };
        std::ffi::OsString::from_vec([directory, b"/", program.as_bytes()].concat())
    };
    path.as_bytes().split(|byte| *byte == b':').map(join).collect()
}

fn exists(path: &OsStr) -> bool {
    nix::sys::stat::lstat(path).is_ok()
}

/// What the program's process says before execution; none once it has been executed.
pub fn hear(from_program: &OwnedFd) -> io::Result<Option<(FromProgram, Vec<OwnedFd>)>> {
    channel::receive(from_program.as_fd())
}
