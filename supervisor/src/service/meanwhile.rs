//! What may happen while changes are applied: signals, which wait for the end of the batch, and impatience.
//!
//! A batch is all or nothing, so a signal in the middle of it could only undo what is nearly done. It is kept, and
//! decides the exit status afterwards. SIGKILL cannot be kept; recovery is for that.

use nix::sys::{
    signal::Signal,
    signalfd::{SfdFlags, SignalFd},
};
use std::{
    io,
    sync::{mpsc, Arc, Mutex, PoisonError},
    thread,
    time::Duration,
};

/// How a person is told something while work goes on; by no means where nothing is to be said.
pub type Notice = fn(&str);

/// How long applying may take before it is said that it goes on.
pub const PATIENCE: Duration = Duration::from_secs(1);

/// Signals that came while changes were applied.
pub struct Deferred {
    notice: Notice,
    first: Mutex<Option<Signal>>,
}

impl Deferred {
    /// None yet.
    pub fn new(notice: Notice) -> Arc<Deferred> {
        Arc::new(Deferred { notice, first: Mutex::new(None) })
    }

    /// Keeps a signal that would end this process; others have nobody left to be passed on to. From the second on it
    /// is said why nothing happens.
    pub fn keep(&self, signal: Signal) {
        if !matches!(signal, Signal::SIGHUP | Signal::SIGINT | Signal::SIGQUIT | Signal::SIGTERM) {
            return;
        }
        let mut first = self.first.lock().unwrap_or_else(PoisonError::into_inner);
        match &*first {
            None => *first = Some(signal),
            Some(first) => (self.notice)(&format!(
                "the changes are being applied, all or none; {first} is acted on when that is done"
            )),
        }
    }

    /// The first that came.
    pub fn first(&self) -> Option<Signal> {
        *self.first.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Keeps all signals from here on, in a command that only applies. They must be blocked:
/// [`super::run::take_signals`].
///
/// # Errors
/// signalfd(2)'s, or that there is no thread to be had.
pub fn defer_signals(notice: Notice) -> io::Result<Arc<Deferred>> {
    let signals = SignalFd::with_flags(&super::run::handled(), SfdFlags::SFD_CLOEXEC)?;
    let deferred = Deferred::new(notice);
    let keeper = deferred.clone();
    thread::Builder::new().name("signals".to_owned()).stack_size(64 * 1024).spawn(move || {
        while let Ok(Some(info)) = signals.read_signal() {
            if let Ok(signal) = Signal::try_from(info.ssi_signo as i32) {
                keeper.keep(signal);
            }
        }
    })?;
    Ok(deferred)
}

/// Does the work, and says so if it takes longer than this.
pub fn patiently<T>(patience: Duration, notice: Notice, what: &str, work: impl FnOnce() -> T) -> T {
    let (done, wait) = mpsc::channel::<()>();
    thread::scope(|scope| {
        let told =
            thread::Builder::new().name("patience".to_owned()).stack_size(64 * 1024).spawn_scoped(scope, move || {
                if wait.recv_timeout(patience) == Err(mpsc::RecvTimeoutError::Timeout) {
                    notice(what);
                }
            });
        if let Err(error) = told {
            tracing::debug!(%error, "nobody says that the work takes long");
        }
        let result = work();
        drop(done);
        result
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn only_the_second_signal_is_answered_and_the_first_is_kept() {
        static SAID: AtomicUsize = AtomicUsize::new(0);
        let deferred = Deferred::new(|text| {
            assert!(text.contains("SIGTERM"), "{text}");
            SAID.fetch_add(1, Ordering::Relaxed);
        });
        deferred.keep(Signal::SIGUSR1);
        assert_eq!(deferred.first(), None);
        deferred.keep(Signal::SIGTERM);
        assert_eq!(SAID.load(Ordering::Relaxed), 0);
        deferred.keep(Signal::SIGINT);
        assert_eq!((deferred.first(), SAID.load(Ordering::Relaxed)), (Some(Signal::SIGTERM), 1));
    }

    #[test]
    fn only_what_takes_long_is_said() {
        static SAID: AtomicUsize = AtomicUsize::new(0);
        let say: Notice = |_| {
            SAID.fetch_add(1, Ordering::Relaxed);
        };
        assert_eq!(patiently(Duration::from_secs(600), say, "", || 7), 7);
        assert_eq!(SAID.load(Ordering::Relaxed), 0);
        patiently(Duration::from_millis(1), say, "", || {
            while SAID.load(Ordering::Relaxed) == 0 {
                thread::sleep(Duration::from_millis(1));
            }
        });
        assert_eq!(SAID.load(Ordering::Relaxed), 1);
    }
}
