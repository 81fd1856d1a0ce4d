//! The program's standard streams: pumped byte for byte, counted, logged, and never the caller's own descriptors.
//!
//! No descriptor of the caller's enters the jail: a program could reopen a pipe or a file of the caller's for
//! writing, or type into the caller's terminal. Each stream is a pipe of the run's own, or one end of a terminal of
//! the run's own.

use nix::{
    fcntl::OFlag,
    poll::{poll, PollFd, PollFlags, PollTimeout},
    sys::termios::{self, SetArg, Termios},
};
use std::{
    fs::File,
    io::{self, Read, Write},
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{
        atomic::{AtomicU64, Ordering},
        Arc,
    },
    thread::{self, JoinHandle},
};

/// How much is moved at a time, where there is so much.
const CHUNK: usize = 64 * 1024;

/// How much is moved at first. Most streams carry little, and memory that was asked for zeroed is memory that is used.
const FIRST_CHUNK: usize = 4 * 1024;

/// The far ends that the shim gets and the near ends that the pumps keep.
pub struct Pipes {
    /// For the shim: input, output, error.
    pub far: [OwnedFd; 3],
    /// Writing end of standard input; none if that is the terminal.
    pub input: Option<OwnedFd>,
    /// Reading ends of standard output and error; none where that is the terminal.
    pub outputs: [Option<OwnedFd>; 2],
}

/// Makes the pipes for the streams that are not the terminal, /dev/null for those that are.
pub fn pipes(on_terminal: [bool; 3]) -> io::Result<Pipes> {
    let nowhere = || File::options().read(true).write(true).open("/dev/null").map(OwnedFd::from);
    let (mut input, mut outputs) = (None, [None, None]);
    let far_input = match on_terminal[0] {
        true => nowhere()?,
        false => {
            let (read, write) = nix::unistd::pipe2(OFlag::O_CLOEXEC)?;
            input = Some(write);
            read
        }
    };
    let mut far_output = |index: usize| -> io::Result<OwnedFd> {
        if on_terminal[index + 1] {
            return nowhere();
        }
        let (read, write) = nix::unistd::pipe2(OFlag::O_CLOEXEC)?;
        outputs[index] = Some(read);
        Ok(write)
    };
    let far = [far_input, far_output(0)?, far_output(1)?];
    Ok(Pipes { far, input, outputs })
}

impl Pipes {
    /// Puts the caller's own terminal where the run's own would be: for tests that leave that layer out.
    pub fn lead_to_the_caller(&mut self, streams: &[OwnedFd; 3], on_terminal: [bool; 3]) -> io::Result<()> {
        for ((far, stream), _) in self.far.iter_mut().zip(streams).zip(on_terminal).filter(|(_, is)| *is) {
            *far = stream.try_clone()?;
        }
        Ok(())
    }
}

/// Counts what the program printed, over all its streams, against the run's limit.
#[derive(Clone)]
pub struct OutputMeter {
    printed: Arc<AtomicU64>,
    limit: u64,
}

impl OutputMeter {
    /// A meter that allows so many bytes; none is no limit.
    pub fn new(limit: Option<u64>) -> OutputMeter {
        OutputMeter { printed: Arc::new(AtomicU64::new(0)), limit: limit.unwrap_or(u64::MAX) }
    }

    /// How many bytes were printed.
    pub fn printed(&self) -> u64 {
        self.printed.load(Ordering::Relaxed)
    }

    /// Whether more was printed than allowed.
    pub fn exceeded(&self) -> bool {
        self.printed() > self.limit
    }

    /// How many of these bytes may still pass.
    fn admit(&self, bytes: usize) -> usize {
        let before = self.printed.fetch_add(bytes as u64, Ordering::Relaxed);
        self.limit.saturating_sub(before).min(bytes as u64) as usize
    }
}

/// Moves one of the program's outputs to the caller's stream and to the run's log, until the program's end closes.
///
/// A reader of ours that has gone away closes the pipe, so that the program is told as a native pipe would tell it.
/// Past the limit, bytes are dropped and `over` is called once; the pump never holds more than one chunk.
pub fn pump_output(
    from: OwnedFd,
    to: Option<OwnedFd>,
    log: Option<File>,
    meter: OutputMeter,
    over: impl FnOnce() + Send + 'static,
) -> JoinHandle<()> {
    thread::spawn(move || {
        let mut from = File::from(from);
        let mut to = to.map(File::from);
        let mut log = log;
        let mut over = Some(over);
        let mut chunk = vec![0; FIRST_CHUNK];
        loop {
            let length = match from.read(&mut chunk) {
                Ok(0) => return,
                Ok(length) => length,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                // A terminal whose last holder has gone says EIO.
                Err(_) => return,
            };
            let admitted = &chunk[..meter.admit(length)];
            if let Some(open) = &mut log {
                if open.write_all(admitted).is_err() {
                    // A full disk costs the log, not the program's output.
                    log = None;
                }
            }
            if let Some(open) = &mut to {
                if write_all(open, admitted).is_err() {
                    return;
                }
            }
            if admitted.len() < length {
                if let Some(over) = over.take() {
                    over();
                }
            }
            grow(&mut chunk, length);
        }
    })
}

/// Makes room for more at a time, once there was as much as fitted.
fn grow(chunk: &mut Vec<u8>, read: usize) {
    if read == chunk.len() && read < CHUNK {
        *chunk = vec![0; CHUNK];
    }
}

/// Writes all, waiting where the caller made the descriptor non-blocking.
fn write_all(to: &mut File, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match to.write(bytes) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(written) => bytes = &bytes[written..],
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                poll(&mut [PollFd::new(to.as_fd(), PollFlags::POLLOUT)], PollTimeout::NONE)?;
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Moves the caller's standard input to the program until either ends. Nobody waits for this thread: a caller's
/// input that stays open must not hold up the end of the run.
///
/// What is given goes into `copy` first, so that all that the program can have read is there.
pub fn pump_input(from: OwnedFd, to: OwnedFd, copy: Option<File>) -> JoinHandle<()> {
    thread::spawn(move || {
        let mut copy = copy;
        let mut from = File::from(from);
        let mut to = File::from(to);
        let mut chunk = vec![0; FIRST_CHUNK];
        loop {
            // Both ends: the program may close its input while we wait for the caller's.
            let mut ends = [PollFd::new(from.as_fd(), PollFlags::POLLIN), PollFd::new(to.as_fd(), PollFlags::empty())];
            match poll(&mut ends, PollTimeout::NONE) {
                Err(nix::errno::Errno::EINTR) => continue,
                Err(_) => return,
                Ok(_) => {}
            }
            if ends[1].revents().is_some_and(|events| events.contains(PollFlags::POLLERR)) {
                return;
            }
            match from.read(&mut chunk) {
                Ok(0) => return,
                Ok(length) => {
                    if let Some(open) = &mut copy {
                        if open.write_all(&chunk[..length]).is_err() {
                            // Input that cannot be recorded is not given: what follows would not be a recording.
                            return;
                        }
                    }
                    if write_all(&mut to, &chunk[..length]).is_err() {
                        return;
                    }
                    grow(&mut chunk, length);
                }
                Err(error) if matches!(error.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock) => {}
                Err(_) => return,
            }
        }
    })
}

/// The caller's terminal in raw mode: every key goes to the program's own terminal, which gives it its meaning.
/// Dropping it gives the terminal back as it was.
pub struct RawTerminal {
    terminal: OwnedFd,
    before: Termios,
}

impl RawTerminal {
    /// Takes the terminal.
    pub fn take(terminal: BorrowedFd) -> io::Result<RawTerminal> {
        let terminal = terminal.try_clone_to_owned()?;
        let before = termios::tcgetattr(&terminal)?;
        let raw = RawTerminal { terminal, before };
        raw.resume()?;
        Ok(raw)
    }

    /// The settings from before, which the program's own terminal starts with.
    pub fn before(&self) -> &Termios {
        &self.before
    }

    /// Back to raw, after [`RawTerminal::suspend`].
    pub fn resume(&self) -> io::Result<()> {
        let mut raw = self.before.clone();
        termios::cfmakeraw(&mut raw);
        termios::tcsetattr(&self.terminal, SetArg::TCSADRAIN, &raw)?;
        Ok(())
    }

    /// Gives the terminal back for a while.
    pub fn suspend(&self) {
        // A terminal that is gone needs nothing back.
        let _ = termios::tcsetattr(&self.terminal, SetArg::TCSADRAIN, &self.before);
    }
}

impl Drop for RawTerminal {
    fn drop(&mut self) {
        self.suspend();
    }
}

/// Whether a stream is /dev/null (null(4): character device 1, 3).
pub fn is_nothing(stream: BorrowedFd) -> bool {
    use nix::sys::stat::{fstat, major, minor, SFlag};
    fstat(stream).is_ok_and(|found| {
        let kind = SFlag::from_bits_truncate(found.st_mode) & SFlag::S_IFMT;
        kind == SFlag::S_IFCHR && (major(found.st_rdev), minor(found.st_rdev)) == (1, 3)
    })
}

/// Rows and columns of the first of these that is a terminal (ioctl_tty(2), `TIOCGWINSZ`).
pub fn size_of_any(streams: &[BorrowedFd]) -> Option<(u16, u16)> {
    streams.iter().find_map(|stream| sys::size(*stream))
}

/// Gives a terminal this size; who runs in it is told by the kernel.
pub fn resize(terminal: BorrowedFd, rows: u16, columns: u16) {
    sys::resize(terminal, rows, columns);
}

/// The two terminal calls that no crate of ours wraps.
mod sys {
    #![allow(unsafe_code)]
    use std::os::fd::{AsRawFd, BorrowedFd};

    pub fn size(terminal: BorrowedFd) -> Option<(u16, u16)> {
        let mut size = libc::winsize { ws_row: 0, ws_col: 0, ws_xpixel: 0, ws_ypixel: 0 };
        // SAFETY: the structure lives through the call and is exclusively ours.
        let result = unsafe { libc::ioctl(terminal.as_raw_fd(), libc::TIOCGWINSZ, &mut size) };
        (result == 0).then_some((size.ws_row, size.ws_col))
    }

    pub fn resize(terminal: BorrowedFd, rows: u16, columns: u16) {
        let size = libc::winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
        // SAFETY: the structure lives through the call, which only reads it. A terminal that is gone needs no size.
        let _ = unsafe { libc::ioctl(terminal.as_raw_fd(), libc::TIOCSWINSZ, &size) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pump(input: &[u8], limit: Option<u64>) -> (Vec<u8>, u64, bool) {
        let (read, write) = nix::unistd::pipe().unwrap();
        let (near, far) = nix::unistd::pipe().unwrap();
        let meter = OutputMeter::new(limit);
        let (sender, over) = std::sync::mpsc::channel();
        let pump = pump_output(read, Some(far), None, meter.clone(), move || sender.send(()).unwrap());
        let bytes = input.to_vec();
        let writer = thread::spawn(move || File::from(write).write_all(&bytes));
        let mut seen = Vec::new();
        File::from(near).read_to_end(&mut seen).unwrap();
        writer.join().unwrap().unwrap();
        pump.join().unwrap();
        (seen, meter.printed(), over.try_recv().is_ok())
    }

    #[test]
    fn nothing_is_told_from_what_only_looks_like_it() {
        let open = |path: &str| File::open(path).unwrap();
        assert!(is_nothing(open("/dev/null").as_fd()));
        assert!(!is_nothing(open("/dev/zero").as_fd()));
        assert!(!is_nothing(tempfile::tempfile().unwrap().as_fd()));
    }

    #[test]
    fn output_arrives_byte_for_byte() {
        let bytes: Vec<u8> = (0..300_000_u32).map(|number| number as u8).collect();
        assert_eq!(pump(&bytes, None), (bytes, 300_000, false));
    }

    #[test]
    fn output_past_the_limit_is_counted_and_dropped() {
        let (seen, printed, over) = pump(&[b'x'; 1000], Some(999));
        assert_eq!((seen.len(), printed, over), (999, 1000, true));
    }

    #[test]
    fn output_at_the_limit_is_not_past_it() {
        assert_eq!(pump(&[b'x'; 1000], Some(1000)), (vec![b'x'; 1000], 1000, false));
    }

    #[test]
    fn a_reader_that_goes_away_closes_the_programs_pipe() {
        let (read, write) = nix::unistd::pipe().unwrap();
        let (near, far) = nix::unistd::pipe().unwrap();
        drop(near);
        let pump = pump_output(read, Some(far), None, OutputMeter::new(None), || {});
        let mut write = File::from(write);
        write.write_all(b"x").unwrap();
        pump.join().unwrap();
        assert_eq!(write.write(b"x").unwrap_err().kind(), io::ErrorKind::BrokenPipe);
    }
}
