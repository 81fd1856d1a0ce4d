//! From a plan to a running program.
//!
//! Three processes: the *outer* one makes the namespaces and then only waits; *pid 1* of the jail builds the view,
//! gives up every privilege and looks after the rest ([`init`]); the *program* takes the last layers on itself and is
//! executed. Each step has a name, and its place has a reason.

mod bwrap;
mod confine;
mod descriptors;
mod exec;
mod ids;
mod init;
mod network;
mod observe;
pub mod rename;
mod resolve;
mod sources;
mod step;
mod terminal;
mod view;

use crate::{
    channel,
    protocol::{FromShim, Launcher, Layer, Network, Plan, StepFailed, ToShim, Way},
    sys,
};
use std::{
    convert::Infallible,
    ffi::OsString,
    io,
    os::fd::{AsFd, OwnedFd},
    process,
};
use step::{step, At, Failure};

/// The exit status of a shim that could not build the jail; the reason went over the control socket.
const COULD_NOT_START: i32 = 125;

/// The plan's descriptors as the shim got them.
pub struct Standard {
    /// The program's standard input, output and error.
    pub streams: [OwnedFd; 3],
}

/// Builds the jail on the host's side of it: called by the supervisor's spawn with the control socket.
pub fn outer_main(control: OwnedFd) -> ! {
    let failed = outer(&control).unwrap_err_infallible();
    report(&control, failed)
}

/// Sets up in this process's own network namespace what a jail with a network has, for `tollgate doctor`: how
/// connections would be taken, and whether dropped datagrams would be told.
///
/// # Errors
/// The call that failed, on what, and its error number.
pub fn try_network() -> Result<(Way, bool), (String, i32)> {
    let tried = || {
        ids::raise_loopback()?;
        network::Sockets::open(&Network { host_ports: Vec::new(), ports: vec![443] }, network::Tables::Used)
    };
    match tried() {
        Ok(sockets) => Ok((sockets.way, sockets.refused.is_some())),
        Err(failure) => Err((failure.call_and_object(), failure.errno().unwrap_or(libc::EIO))),
    }
}

/// Goes on inside a view that bubblewrap has built, as pid 1.
pub fn inside_main(control: OwnedFd, words: &[OsString]) -> ! {
    let begin = descriptors::receive_plan_again(&control, words);
    let failed = match begin {
        Ok((plan, standard, network)) => inside(&control, &plan, standard, network).unwrap_err_infallible(),
        Err(failed) => failed,
    };
    report(&control, failed)
}

fn outer(control: &OwnedFd) -> Result<Infallible, StepFailed> {
    // While the supervisor makes the plan; the process sees what the caller forgot open, and runs nothing.
    let holder = step("views", sources::Holder::start_early)?;
    let (plan, plan_file, standard) = step("plan", || descriptors::receive_plan(control))?;
    step("plan", || confine::check_switches(&plan))?;
    // First: no later step may see, or leave to the jail, what the caller forgot open.
    if !plan.without.contains(&Layer::Descriptors) {
        step("descriptors", || descriptors::close_all_but(control, &standard, &plan_file, &holder))?;
    }
    // While still the caller: a privileged caller's views are opened and mapped before its privilege is given up.
    let sources = step("views", || sources::open_as_caller(&plan, holder))?;
    step("host user", || ids::become_host_user(&plan.ids))?;
    // From here on the jail ends with the control socket, not with the thread that happened to start the shim:
    // prctl(2) ties PR_SET_PDEATHSIG to that thread.
    match &plan.launcher {
        Launcher::Native => native(control, &plan, sources, standard),
        Launcher::Bwrap { program } => bwrap::launch(control, &plan, program, sources, standard, &plan_file),
    }
}

fn native(
    control: &OwnedFd,
    plan: &Plan,
    sources: sources::Sources,
    standard: Standard,
) -> Result<Infallible, StepFailed> {
    // First: it owns the others, and everything below needs its capabilities.
    step("user namespace", ids::unshare_user)?;
    step("namespaces", || ids::unshare_others(&plan.without))?;
    step("id maps", || ids::map_self(plan.ids.host_uid, plan.ids.host_gid, plan.ids.jail_uid, plan.ids.jail_gid))?;
    // A second lock on what the system-call list refuses already; a read-only /proc/sys costs only this one.
    if let Err(failure) = ids::forbid_nested_namespaces() {
        let degraded = FromShim::Degraded { layer: "nested namespaces".to_owned(), reason: failure.summary() };
        step("control socket", || channel::send(control.as_fd(), &degraded, &[]).at("sendmsg", "the supervisor"))?;
    }
    // An ordinary caller may copy mounts only now, as owner of the new namespace.
    let sources = step("views", || sources.open_the_rest(plan))?;
    if let Some(pid_one) = step("pid 1", || sys::fork().at("fork", "the jail's first process"))? {
        drop((sources, standard));
        wait_for(control, pid_one)
    }
    // The outer process has one thread, so this means what it says.
    step("parent death", ids::die_with_parent)?;
    step("host name", || nix::unistd::sethostname(&plan.run).at("sethostname", &plan.run))?;
    if !plan.without.contains(&Layer::Network) {
        step("loopback", ids::raise_loopback)?;
    }
    // While the namespace's owner still has its capabilities; nobody can change it later.
    let network = step("network", || network::raise(control, plan))?;
    if !plan.without.contains(&Layer::Mounts) {
        step("view", || view::build(&plan.mounts, sources, &|failure| ask_for_copy(control, failure)))?;
    }
    inside(control, plan, standard, network)
}

/// From a finished view to the running program, whoever built the view.
fn inside(
    control: &OwnedFd,
    plan: &Plan,
    standard: Standard,
    network: Option<network::Standing>,
) -> Result<Infallible, StepFailed> {
    let workspace = step("workspace", || view::open_workspace(&plan.workspace))?;
    // Inside the view, so that the terminal is one of the jail's own and has a name there.
    let terminal = step("terminal", || terminal::open_pair(plan))?;
    // After the last privileged call; pid 1 itself needs none any more.
    if !plan.without.contains(&Layer::Capabilities) {
        step("capabilities", confine::drop_capabilities)?;
    }
    // Landlock and seccomp require it; it also makes set-user-id files do nothing.
    step("no new privileges", confine::no_new_privileges)?;
    // Pid 1 holds the control socket: nobody in the jail may trace it or read its memory.
    step("pid 1", confine::not_dumpable)?;
    let mut attached = vec![workspace.as_fd()];
    attached.extend(terminal.as_ref().map(|terminal| terminal.master.as_fd()));
    let built = FromShim::Built { workspace: true, terminal: terminal.is_some() };
    step("control socket", || channel::send(control.as_fd(), &built, &attached).at("sendmsg", "the supervisor"))?;
    init::run(control, plan, standard, terminal.map(|terminal| terminal.slave), network)
}

/// Has the supervisor copy the workspace, and waits until it has.
fn ask_for_copy(control: &OwnedFd, refused: Failure) -> Result<(), Failure> {
    let asked = FromShim::OverlayRefused { reason: refused.summary() };
    channel::send(control.as_fd(), &asked, &[]).at("sendmsg", "the supervisor")?;
    wait_for_word(control, &ToShim::Copied);
    Ok(())
}

/// Waits until the supervisor says this. Whatever else it says comes too early: there is no program yet that it could be
/// for. A supervisor that goes has said why to whoever asked for the run.
fn wait_for_word(control: &OwnedFd, word: &ToShim) {
    loop {
        match channel::receive::<ToShim>(control.as_fd()) {
            Ok(Some((said, _))) if said == *word => return,
            Ok(Some(_)) => {}
            Ok(None) | Err(_) => exit(COULD_NOT_START),
        }
    }
}

/// The outer process's whole later life: to be the one that the supervisor waits for.
fn wait_for(control: &OwnedFd, child: nix::unistd::Pid) -> ! {
    // The control socket must close when pid 1 dies, so no copy of it may stay here.
    let _ = control;
    let _ = sys::close_range(0, u32::MAX);
    loop {
        // Any child: the one that held the id map is no more either, and a process that nobody reaps counts as one.
        match nix::sys::wait::waitpid(None, None) {
            Err(nix::errno::Errno::EINTR) => continue,
            Ok(status) if status.pid().is_some_and(|pid| pid != child) => continue,
            Ok(nix::sys::wait::WaitStatus::Exited(_, code)) => exit(code),
            _ => exit(COULD_NOT_START),
        }
    }
}

fn report(control: &OwnedFd, failed: StepFailed) -> ! {
    let _ = channel::send(control.as_fd(), &FromShim::StepFailed(failed), &[]);
    exit(COULD_NOT_START)
}

/// Ends this process at once: no destructor may close what [`wait_for`] has closed behind Rust's back.
#[allow(unsafe_code)]
fn exit(code: i32) -> ! {
    // SAFETY: `_exit` runs no handler and does not return.
    unsafe { libc::_exit(code) }
}

/// The one useful half of a result that cannot be `Ok`.
trait Failed {
    fn unwrap_err_infallible(self) -> StepFailed;
}

impl Failed for Result<Infallible, StepFailed> {
    fn unwrap_err_infallible(self) -> StepFailed {
        match self {
            Err(failed) => failed,
            Ok(never) => match never {},
        }
    }
}

/// Waits for the supervisor's first word.
fn first_word(control: &OwnedFd) -> io::Result<Vec<OwnedFd>> {
    match channel::receive::<ToShim>(control.as_fd())? {
        Some((ToShim::Begin, attached)) => Ok(attached),
        Some(_) => Err(io::Error::new(io::ErrorKind::InvalidData, "the supervisor's first message must be `begin`")),
        // The supervisor went away before it said anything; there is nobody to report to.
        None => process::exit(COULD_NOT_START),
    }
}

/// Takes over a descriptor that this program was started with.
pub fn adopt(fd: i32) -> OwnedFd {
    sys::adopt(fd)
}

/// Takes the control socket from standard input, where the supervisor's spawn left it, and makes standard input and
/// output lead nowhere. Standard error stays: it is the supervisor's, for what bubblewrap has to say.
pub fn adopt_standard_input() -> OwnedFd {
    use nix::fcntl::{fcntl, open, FcntlArg, OFlag};
    use std::os::fd::{AsRawFd, FromRawFd};
    let moved = fcntl(io::stdin().as_fd(), FcntlArg::F_DUPFD_CLOEXEC(10)).unwrap_or_else(|_| exit(COULD_NOT_START));
    let nowhere = open("/dev/null", OFlag::O_RDWR | OFlag::O_CLOEXEC, nix::sys::stat::Mode::empty());
    let Ok(nowhere) = nowhere else { exit(COULD_NOT_START) };
    for number in 0..2 {
        if descriptors::duplicate_onto(nowhere.as_raw_fd(), number).is_err() {
            exit(COULD_NOT_START)
        }
    }
    #[allow(unsafe_code)]
    // SAFETY: F_DUPFD has just made this descriptor for us.
    unsafe {
        OwnedFd::from_raw_fd(moved)
    }
}
