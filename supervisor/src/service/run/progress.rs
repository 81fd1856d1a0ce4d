//! What the main thread of a run keeps while its program runs: the streams and how it ended.

use super::{folder::Folder, live::Event};
use crate::jail::{
    launch::Shim,
    outcome::{Ended, NotStarted},
    streams::{self, OutputMeter, RawTerminal},
};
use nix::sys::signal::Signal;
use std::{
    io,
    os::fd::{AsFd, OwnedFd},
    sync::mpsc,
    thread,
    time::Duration,
};
use tollgate_shim::protocol::ToShim;

/// How long the pumps may take to deliver what a killed program printed.
const KILLED_OUTPUT_GRACE: Duration = Duration::from_secs(1);

/// What the run's main thread keeps while the program runs.
pub(super) struct Progress {
    pub(super) meter: OutputMeter,
    pub(super) events: mpsc::Sender<Event>,
    pub(super) pumps: Vec<thread::JoinHandle<()>>,
    pub(super) caller: [Option<OwnedFd>; 3],
    pub(super) on_terminal: [bool; 3],
    pub(super) raw: Option<RawTerminal>,
    pub(super) master: Option<OwnedFd>,
    pub(super) ended: Ended,
    pub(super) failed: Option<NotStarted>,
    pub(super) killed: Option<Signal>,
    /// The last signal that somebody sent with `tollgate kill`. What the program makes of it is its own affair, unless
    /// it ends by it.
    pub(super) asked: Option<Signal>,
    pub(super) output_exceeded: bool,
    /// The jail stands.
    pub(super) built: bool,
    pub(super) executed: bool,
    /// The jail is gone.
    pub(super) gone: bool,
    /// Where standard input is copied to, for a recording.
    pub(super) input_copy: Option<std::fs::File>,
}

impl Progress {
    pub(super) fn over(&self) -> impl FnOnce() + Send + 'static {
        let events = self.events.clone();
        move || {
            let _ = events.send(Event::TooMuchOutput);
        }
    }

    pub(super) fn start_pipes(&mut self, input: Option<OwnedFd>, outputs: [Option<OwnedFd>; 2], folder: &Folder) {
        if let (Some(to), Some(from)) = (input, self.caller[0].take_if(|_| !self.on_terminal[0])) {
            // An input that has nothing is at its end at once, which needs nobody to see.
            if !streams::is_nothing(from.as_fd()) {
                streams::pump_input(from, to, self.input_copy.take());
            }
        }
        for (index, (from, log)) in outputs.into_iter().zip(["stdout.log", "stderr.log"]).enumerate() {
            let Some(from) = from else { continue };
            let to = self.caller[index + 1].take();
            let pump = streams::pump_output(from, to, folder.log(log), self.meter.clone(), self.over());
            self.pumps.push(pump);
        }
    }

    /// Couples the caller's terminal to the program's.
    pub(super) fn start_terminal(&mut self, master: OwnedFd, folder: &Folder) -> io::Result<()> {
        if let (true, Some(terminal)) = (self.on_terminal[0], &self.caller[0]) {
            let raw = RawTerminal::take(terminal.as_fd())?;
            nix::sys::termios::tcsetattr(&master, nix::sys::termios::SetArg::TCSANOW, raw.before())?;
            self.raw = Some(raw);
            let from = terminal.try_clone()?;
            streams::pump_input(from, master.try_clone()?, None);
        }
        let shown = (1..3).find(|index| self.on_terminal[*index]);
        let to = match shown {
            Some(index) => self.caller[index].take(),
            // Only input is the terminal: what it echoes goes where its keys come from.
            None => self.caller[0].as_ref().map(OwnedFd::try_clone).transpose()?,
        };
        let log = folder.log("terminal.log");
        self.pumps.push(streams::pump_output(master.try_clone()?, to, log, self.meter.clone(), self.over()));
        self.master = Some(master);
        self.resize();
        Ok(())
    }

    pub(super) fn resize(&self) {
        let Some(master) = &self.master else { return };
        if let Some((rows, columns)) =
            streams::size_of_any(&[io::stdin().as_fd(), io::stdout().as_fd(), io::stderr().as_fd()])
        {
            streams::resize(master.as_fd(), rows, columns);
        }
    }

    /// The program stopped itself: so do we, with the terminal as it was, until somebody continues us.
    pub(super) fn stop_with_the_program(&self, shim: &Shim) {
        let Some(raw) = &self.raw else { return };
        raw.suspend();
        // The whole group, as the terminal would: a shell waits for all of its job.
        let _ = nix::sys::signal::killpg(nix::unistd::getpgrp(), Signal::SIGSTOP);
        if let Err(error) = raw.resume() {
            tracing::warn!(%error, "the terminal could not be taken again");
        }
        self.resize();
        let _ = shim.tell(&ToShim::Continue);
    }

    /// Delivers what is still in the pipes.
    pub(super) fn finish(&mut self, cut_short: bool) {
        let deadline = std::time::Instant::now() + KILLED_OUTPUT_GRACE;
        for pump in self.pumps.drain(..) {
            while cut_short && !pump.is_finished() && std::time::Instant::now() < deadline {
                thread::sleep(Duration::from_millis(2));
            }
            if !cut_short || pump.is_finished() {
                let _ = pump.join();
            }
        }
        self.raw = None;
    }
}
