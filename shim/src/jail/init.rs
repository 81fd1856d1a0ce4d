//! Pid 1 of the jail: starts the program, reaps, forwards signals, looks at what the filter sends it, and ends the
//! jail when the program ends or the supervisor goes away.

use super::{
    exec::{self, FromProgram},
    network::{self, refused},
    observe::{Observer, Served},
    rename,
    step::{step, At, Failure},
    Standard,
};
use crate::{
    channel,
    protocol::{FromShim, Plan, StepFailed, ToShim},
    sys::{self, Reply},
};
use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout},
    sys::{
        signal::{kill, killpg, SigSet, SigmaskHow, Signal},
        signalfd::{SfdFlags, SignalFd},
        socket::{socketpair, AddressFamily, SockFlag, SockType},
        wait::{waitpid, WaitPidFlag, WaitStatus},
    },
    unistd::Pid,
};
use std::{
    convert::Infallible,
    io,
    net::SocketAddr,
    os::fd::{AsFd, OwnedFd},
};

/// So many packets' worth of dropped datagrams are read when the program is over: more than the kernel keeps.
const MOST_AT_THE_END: usize = 65_536;

/// Starts the program and looks after the jail until it ends. Only failures before execution come back.
pub fn run(
    control: &OwnedFd,
    plan: &Plan,
    standard: Standard,
    terminal: Option<OwnedFd>,
    network: Option<network::Standing>,
) -> Result<Infallible, StepFailed> {
    let signals = step("signals", take_signals)?;
    step("session", || lead_session(terminal.as_ref()))?;
    let (to_pid_one, from_program) = step("process", || {
        socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC).at("socketpair", "pid 1")
    })?;
    let Some(program) = step("process", || sys::fork().at("fork", "the program"))? else {
        drop(from_program);
        let failed = match exec::become_program(plan, &standard, terminal.as_ref(), to_pid_one_copy(&to_pid_one)) {
            Err(failed) => failed,
            Ok(never) => match never {},
        };
        let _ = channel::send(to_pid_one.as_fd(), &FromProgram::Failed(failed), &[]);
        super::exit(126)
    };
    // The streams' far ends must close when the program closes them, so no copy may stay here.
    drop((to_pid_one, standard));
    // The program's process takes its layers on meanwhile, and executes nothing before this.
    super::wait_for_word(control, &ToShim::Execute);
    step("process", || exec::give_leave(&from_program).at("write", "the program"))?;
    let from_program = Some(from_program);
    let init = Init { control, plan, program, signals, terminal, from_program, network, observer: None };
    init.serve()
}

/// The program's process uses one owner for the layers' report and keeps one for a failure.
fn to_pid_one_copy(socket: &OwnedFd) -> OwnedFd {
    socket.try_clone().unwrap_or_else(|_| super::exit(126))
}

fn take_signals() -> Result<SignalFd, Failure> {
    nix::sys::signal::sigprocmask(SigmaskHow::SIG_SETMASK, Some(&SigSet::all()), None).at("sigprocmask", "all")?;
    let mut watched = SigSet::empty();
    watched.add(Signal::SIGCHLD);
    SignalFd::with_flags(&watched, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK).at("signalfd", "SIGCHLD")
}

/// A session of the jail's own: no key typed at the caller's terminal reaches it, nor the other way round.
fn lead_session(terminal: Option<&OwnedFd>) -> Result<(), Failure> {
    nix::unistd::setsid().at("setsid", "pid 1")?;
    match terminal {
        Some(terminal) => sys::terminal_take(terminal.as_fd()).at("ioctl(TIOCSCTTY)", "the terminal"),
        None => Ok(()),
    }
}

struct Init<'a> {
    control: &'a OwnedFd,
    plan: &'a Plan,
    program: Pid,
    signals: SignalFd,
    terminal: Option<OwnedFd>,
    /// Open until the program is executed.
    from_program: Option<OwnedFd>,
    network: Option<network::Standing>,
    observer: Option<Observer>,
}

impl Init<'_> {
    fn serve(mut self) -> ! {
        loop {
            let ready = self.wait();
            // Observations first: what the program did before it ended is reported before its end is.
            if ready.observer {
                self.observe();
            }
            if ready.refused {
                self.hear_of_refused();
            }
            if ready.program {
                self.hear_program();
            }
            if ready.control {
                self.hear_supervisor();
            }
            if ready.signal {
                while let Ok(Some(_)) = self.signals.read_signal() {}
                self.reap();
            }
        }
    }

    fn wait(&self) -> Ready {
        let wanted = PollFlags::POLLIN;
        let mut polled = vec![PollFd::new(self.control.as_fd(), wanted), PollFd::new(self.signals.as_fd(), wanted)];
        let program = self.from_program.as_ref().map(|fd| PollFd::new(fd.as_fd(), wanted));
        let observer = self.observer.as_ref().map(|observer| PollFd::new(observer.listener(), wanted));
        let refused = self.network.as_ref().and_then(|network| network.refused.as_ref());
        let refused = refused.map(|socket| PollFd::new(socket.as_fd(), wanted));
        let (has_program, has_observer, has_refused) = (program.is_some(), observer.is_some(), refused.is_some());
        polled.extend(program);
        polled.extend(observer);
        polled.extend(refused);
        match nix::poll::poll(&mut polled, PollTimeout::NONE) {
            Ok(_) => {}
            Err(Errno::EINTR) => return Ready::default(),
            // Blind, pid 1 would neither hear the supervisor nor see it go: the jail ends instead.
            Err(_) => super::exit(125),
        }
        let mut happened = polled.iter().map(|one| one.revents().is_some_and(|events| !events.is_empty()));
        let mut next = |is_there: bool| is_there && happened.next().unwrap_or(false);
        Ready {
            control: next(true),
            signal: next(true),
            program: next(has_program),
            observer: next(has_observer),
            refused: next(has_refused),
        }
    }

    fn observe(&mut self) {
        let Some(observer) = &mut self.observer else { return };
        match observer.serve_one(self.plan) {
            Ok(served) => self.pass_on(served),
            Err(_) => self.end_observing(),
        }
    }

    /// The last process with the filter is gone. What it was refused may still wait to be told.
    fn end_observing(&mut self) {
        self.tell_last_denials();
        self.observer = None;
    }

    /// Datagrams that the network's rules dropped. At most a packet's worth at a time, so that a program that sends
    /// without end holds up nothing else.
    fn hear_of_refused(&mut self) -> bool {
        let Some(network) = &mut self.network else { return false };
        let heard = match network.refused.as_ref().map(refused::read) {
            Some(Ok(heard)) => heard,
            Some(Err(_)) => {
                network.refused = None;
                None
            }
            None => None,
        };
        let Some(refused::Heard { to, lost }) = heard else { return false };
        for address in to.into_iter().map(Some).chain(lost.then_some(None)) {
            self.tell_refused_datagram(address);
        }
        true
    }

    /// Without an address: one that nobody knows of.
    fn tell_refused_datagram(&mut self, to: Option<SocketAddr>) {
        if let Some(denied) = self.observer.as_mut().and_then(|observer| observer.refused_datagram(to)) {
            self.tell(&FromShim::Denied(denied));
        }
    }

    fn pass_on(&mut self, served: Served) {
        for denied in served.denied {
            self.tell(&FromShim::Denied(denied));
        }
        if let Some(request) = served.rename {
            self.start_rename(request);
        }
        let Some(asked) = served.asked else { return };
        let id = asked.id;
        match channel::send(self.control.as_fd(), &FromShim::Asked(asked), &[]) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => super::exit(125),
            // Nobody will answer, and a call that was to have a receipt does not happen without one.
            Err(_) => self.answer(id, Some(libc::EIO)),
        }
    }

    fn answer(&mut self, id: u64, errno: Option<i32>) {
        let Some(observer) = &mut self.observer else { return };
        match observer.answer(id, errno) {
            Ok(served) => self.pass_on(served),
            Err(_) => self.end_observing(),
        }
    }

    /// A directory's rename that the overlay may refuse: tried, and done piece by piece if need be, by a process of
    /// its own, so that a large one holds up nobody else.
    fn start_rename(&mut self, request: rename::Request) {
        let Some(observer) = &self.observer else { return };
        let id = request.id;
        match sys::fork() {
            Ok(Some(_)) => {}
            Ok(None) => {
                let reply = rename::perform(self.plan, &request);
                let _ = sys::notification_reply(observer.listener(), id, reply);
                super::exit(0)
            }
            Err(_) => {
                let _ = sys::notification_reply(observer.listener(), id, Reply::Continue);
            }
        }
    }

    fn hear_program(&mut self) {
        let Some(from_program) = &self.from_program else { return };
        match exec::hear(from_program) {
            Ok(Some((FromProgram::Confined { degraded }, attached))) => {
                if let Some(reason) = degraded {
                    self.tell(&FromShim::Degraded { layer: "landlock".to_owned(), reason });
                }
                let way = self.network.as_ref().map(|network| network.way);
                self.observer = attached.into_iter().next().map(|listener| Observer::new(listener, self.plan, way));
            }
            Ok(Some((FromProgram::Failed(failed), _))) => {
                self.tell(&FromShim::StepFailed(failed));
                super::exit(125)
            }
            Ok(Some((FromProgram::NotExecuted { errno, path }, _))) => {
                self.tell_last_denials();
                self.tell(&FromShim::ExecFailed { errno, path });
                super::exit(126)
            }
            // Closed by execution, or by the death of the process, which `reap` sees.
            Ok(None) | Err(_) => {
                self.from_program = None;
                self.tell(&FromShim::Started { pid: self.program.as_raw().unsigned_abs() });
            }
        }
    }

    fn hear_supervisor(&mut self) {
        match channel::receive::<ToShim>(self.control.as_fd()) {
            Ok(Some((ToShim::Signal { number }, _))) => self.forward(number),
            Ok(Some((ToShim::Continue, _))) => {
                if let Some(terminal) = &self.terminal {
                    let _ = nix::unistd::tcsetpgrp(terminal, self.program);
                }
                let _ = killpg(self.program, Signal::SIGCONT);
            }
            Ok(Some((ToShim::Answer { id, errno }, _))) => self.answer(id, errno),
            Ok(Some((ToShim::Dial { id, address, port }, _))) => self.dial(id, SocketAddr::new(address, port)),
            Ok(Some((ToShim::Begin | ToShim::Copied | ToShim::Execute, _))) => {}
            // The supervisor is gone: the jail ends with it.
            Ok(None) | Err(_) => super::exit(125),
        }
    }

    /// Connects to a port of the program's, for the supervisor, which waits until the connection stands.
    fn dial(&self, id: u64, to: SocketAddr) {
        let (socket, errno) = match network::dial(to) {
            Ok(socket) => (Some(socket), None),
            Err(errno) => (None, Some(errno as i32)),
        };
        let attached: Vec<_> = socket.iter().map(AsFd::as_fd).collect();
        // A supervisor that cannot be told waits no longer than its own patience.
        let _ = channel::send(self.control.as_fd(), &FromShim::Dialled { id, errno }, &attached);
    }

    /// What a terminal would send goes to the whole group, anything else to the program itself.
    fn forward(&self, number: i32) {
        let Ok(signal) = Signal::try_from(number) else { return };
        let result = match signal {
            Signal::SIGINT | Signal::SIGQUIT | Signal::SIGTSTP | Signal::SIGCONT => killpg(self.program, signal),
            _ => kill(self.program, signal),
        };
        // A program that has gone meanwhile is about to be reaped.
        let _ = result;
    }

    fn reap(&mut self) {
        let flags = WaitPidFlag::WNOHANG | WaitPidFlag::WUNTRACED | WaitPidFlag::__WALL;
        loop {
            match waitpid(None::<Pid>, Some(flags)) {
                Ok(WaitStatus::Exited(pid, code)) if pid == self.program => self.finish(Some(code), None),
                Ok(WaitStatus::Signaled(pid, signal, _)) if pid == self.program => {
                    self.finish(None, Some(signal as i32))
                }
                Ok(WaitStatus::Stopped(pid, signal)) if pid == self.program && self.terminal.is_some() => {
                    self.tell(&FromShim::Stopped { signal: signal as i32 })
                }
                Ok(WaitStatus::StillAlive) | Err(Errno::ECHILD) => return,
                Err(Errno::EINTR) | Ok(_) => {}
                Err(_) => return,
            }
        }
    }

    /// Reports the end and ends the jail: when pid 1 exits, the kernel kills every other process of the namespace.
    fn finish(&mut self, code: Option<i32>, signal: Option<i32>) -> ! {
        self.tell_last_denials();
        self.tell(&FromShim::Exited { code, signal });
        super::exit(code.unwrap_or(0))
    }

    fn tell_last_denials(&mut self) {
        let all = (0..MOST_AT_THE_END).any(|_| !self.hear_of_refused());
        if !all {
            self.tell_refused_datagram(None);
        }
        let repeated = self.observer.as_mut().map(Observer::repeated).unwrap_or_default();
        for denied in repeated {
            self.tell(&FromShim::Denied(denied));
        }
    }

    fn tell(&self, message: &FromShim) {
        match channel::send(self.control.as_fd(), message, &[]) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => super::exit(125),
            // Too long a name: the supervisor would rather miss one observation than the program.
            Err(_) => {}
        }
    }
}

/// What can be read without waiting.
#[derive(Default)]
struct Ready {
    control: bool,
    signal: bool,
    program: bool,
    observer: bool,
    refused: bool,
}
