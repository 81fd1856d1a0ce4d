//! The program's own terminal, out of the jail's own devpts.

use super::step::{At, Failure};
use crate::{protocol::Plan, sys};
use nix::{
    fcntl::{open, OFlag},
    sys::stat::Mode,
};
use std::os::fd::{AsFd, OwnedFd};

/// Both ends of a terminal.
pub struct Pair {
    /// The end that goes to the supervisor.
    pub master: OwnedFd,
    /// The end that the program gets.
    pub slave: OwnedFd,
}

/// Opens a terminal if the plan wants one. No byte of the caller's terminal is reachable through it.
pub fn open_pair(plan: &Plan) -> Result<Option<Pair>, Failure> {
    let Some(terminal) = plan.terminal else { return Ok(None) };
    let flags = OFlag::O_RDWR | OFlag::O_NOCTTY | OFlag::O_CLOEXEC;
    let master = open("/dev/ptmx", flags, Mode::empty()).at("open", "/dev/ptmx")?;
    let slave = sys::terminal_peer(&master).at("ioctl(TIOCGPTPEER)", "/dev/ptmx")?;
    sys::terminal_resize(slave.as_fd(), terminal.rows, terminal.columns).at("ioctl(TIOCSWINSZ)", "the terminal")?;
    Ok(Some(Pair { master, slave }))
}
