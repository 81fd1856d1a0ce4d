//! A terminal driver: a program on a pseudo-terminal of its own, as a person's shell would have it.
//!
//! `setsid --ctty` (util-linux) makes the terminal the program's controlling one, and `stty -F` changes its size from
//! outside, so that the harness needs no code between fork and exec.

use crate::{world::shell_status, Invocation, World};
use nix::{
    pty::{openpty, Winsize},
    sys::termios::{tcgetattr, Termios},
    unistd::ttyname,
};
use std::{
    fs::File,
    io::{Read, Write},
    os::fd::{AsFd, OwnedFd},
    path::PathBuf,
    process::{Child, Command, Stdio},
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

/// A program on a terminal.
pub struct Terminal {
    child: Child,
    master: File,
    slave: OwnedFd,
    device: PathBuf,
    screen: Arc<Mutex<Vec<u8>>>,
}

impl Terminal {
    /// Starts a program of the world's user on a new terminal of this size.
    pub fn start(world: &World, invocation: Invocation, rows: u16, columns: u16) -> Terminal {
        let size = Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
        let pair = openpty(&size, None).expect("the host has pseudo-terminals");
        let device = ttyname(&pair.slave).expect("a terminal has a name");
        world.own(&device);
        let inner = invocation.into_command();
        let mut command: Command = world.command("setsid").into_command();
        command.args(["--ctty", "--wait"]).arg(inner.get_program()).args(inner.get_args());
        for (name, value) in inner.get_envs() {
            if let Some(value) = value {
                command.env(name, value);
            }
        }
        command.env("TERM", "xterm");
        let end = || Stdio::from(pair.slave.try_clone().expect("a descriptor can be copied"));
        let child = command.stdin(end()).stdout(end()).stderr(end()).spawn().expect("util-linux has `setsid`");
        let master = File::from(pair.master);
        let screen = Arc::new(Mutex::new(Vec::new()));
        let (mut reader, shown) = (master.try_clone().expect("a descriptor can be copied"), Arc::clone(&screen));
        std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(count) = reader.read(&mut buffer) {
                if count == 0 {
                    break;
                }
                shown.lock().expect("no holder panics").extend_from_slice(&buffer[..count]);
            }
        });
        Terminal { child, master, slave: pair.slave, device, screen }
    }

    /// What was shown so far.
    pub fn screen(&self) -> String {
        String::from_utf8_lossy(&self.screen.lock().expect("no holder panics")).into_owned()
    }

    /// Waits for a text to be shown.
    #[track_caller]
    pub fn expect(&self, text: &str) {
        let deadline = Instant::now() + Duration::from_secs(15);
        while !self.screen().contains(text) {
            assert!(Instant::now() < deadline, "`{text}` was never shown; the screen:\n{}", self.screen());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Types keys.
    pub fn keys(&mut self, keys: &str) {
        self.master.write_all(keys.as_bytes()).expect("the terminal takes keys");
    }

    /// Changes its size.
    pub fn resize(&self, rows: u16, columns: u16) {
        let status = Command::new("stty")
            .arg("-F")
            .arg(&self.device)
            .args(["rows", &rows.to_string(), "cols", &columns.to_string()])
            .status()
            .expect("coreutils has `stty`");
        assert!(status.success(), "stty -F {}", self.device.display());
    }

    /// Its size, as `stty size` gives it.
    pub fn size(&self) -> String {
        let output =
            Command::new("stty").arg("-F").arg(&self.device).arg("size").output().expect("coreutils has `stty`");
        String::from_utf8_lossy(&output.stdout).trim().to_owned()
    }

    /// Its modes, which a run must leave as they were.
    pub fn modes(&self) -> Termios {
        tcgetattr(self.slave.as_fd()).expect("the terminal is open")
    }

    /// The id of the program that was started.
    pub fn pid(&self) -> i32 {
        self.child.id().try_into().expect("process ids fit")
    }

    /// Waits for the program's end and returns its status as a shell shows it.
    #[track_caller]
    pub fn wait(self) -> i32 {
        self.ended().1
    }

    /// Waits for the program's end, and gives the terminal with the program's status as a shell shows it.
    #[track_caller]
    pub fn ended(mut self) -> (Terminal, i32) {
        let deadline = Instant::now() + Duration::from_secs(20);
        loop {
            if let Some(status) = self.child.try_wait().expect("the child is ours") {
                return (self, shell_status(status));
            }
            if Instant::now() > deadline {
                let _ = self.child.kill();
                let _ = self.child.wait();
                panic!("the program on the terminal does not end; the screen:\n{}", self.screen());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}
