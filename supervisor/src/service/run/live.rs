//! What others may see of a run, and do to it, while it goes on.

use crate::{
    chain::{
        approval::Desk,
        quota::{Meters, Unit},
    },
    doors::control,
    ledger::{
        record::{RunRecord, Usage},
        Ledger,
    },
};
use nix::sys::signal::Signal;
use std::{
    fs::File,
    io,
    os::fd::OwnedFd,
    path::PathBuf,
    sync::{mpsc, Arc, Mutex, PoisonError},
};
use tollgate_shim::protocol::FromShim;

/// What others may see of a run, and do to it, while it goes on.
pub struct Live {
    pub(super) record: Mutex<RunRecord>,
    pub(super) ledger: Ledger,
    pub(super) folder: PathBuf,
    pub(super) events: Mutex<Option<mpsc::Sender<Event>>>,
    pub(super) desk: Arc<Desk>,
    pub(super) meters: Meters,
    pub(super) meter: Mutex<Option<Box<dyn Fn() -> Usage + Send>>>,
}

impl Live {
    pub(super) fn new(record: RunRecord, ledger: Ledger, folder: PathBuf, desk: Arc<Desk>) -> Live {
        Live {
            record: Mutex::new(record),
            ledger,
            folder,
            events: Mutex::new(None),
            desk,
            meters: Meters::default(),
            meter: Mutex::default(),
        }
    }

    /// How many effects were counted until now, where they are limited.
    pub fn effects_counted(&self) -> u64 {
        let counted = self.meters.used().into_iter().filter(|(_, unit, _)| *unit == Unit::Effects);
        counted.map(|(.., used)| used).sum()
    }

    /// What the run has used until now. While its program runs it is measured, at most a second ago.
    pub fn usage(&self) -> Usage {
        let meter = self.meter.lock().unwrap_or_else(PoisonError::into_inner);
        match &*meter {
            Some(meter) => meter(),
            None => self.change(|_| {}).usage,
        }
    }

    /// Has this asked for what the run uses.
    pub(super) fn measure_with(&self, meter: impl Fn() -> Usage + Send + 'static) {
        *self.meter.lock().unwrap_or_else(PoisonError::into_inner) = Some(Box::new(meter));
    }

    /// The program is over, and this is what was used in the end.
    pub(super) fn stop_measuring(&self, usage: Usage) {
        *self.meter.lock().unwrap_or_else(PoisonError::into_inner) = None;
        self.change(|record| record.usage = usage);
    }

    pub(super) fn change(&self, change: impl FnOnce(&mut RunRecord)) -> RunRecord {
        let mut record = self.record.lock().unwrap_or_else(PoisonError::into_inner);
        change(&mut record);
        record.clone()
    }

    pub(super) fn send(&self, event: Event) -> io::Result<()> {
        let events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        let sent = events.as_ref().map(|events| events.send(event).is_ok());
        match sent {
            Some(true) => Ok(()),
            _ => Err(io::Error::new(io::ErrorKind::NotConnected, "the run is over")),
        }
    }
}

impl control::Controlled for Live {
    fn record(&self) -> RunRecord {
        RunRecord { usage: self.usage(), ..self.change(|_| {}) }
    }

    fn kill(&self, signal: Signal) -> io::Result<()> {
        self.send(Event::Kill(signal))
    }

    fn receipts(&self, after: u64, limit: u64) -> io::Result<Vec<crate::ledger::record::Receipt>> {
        let query = crate::ledger::ReceiptQuery {
            run: Some(self.record().id),
            after_seq: Some(after),
            limit: Some(limit),
            ..Default::default()
        };
        let found = self.ledger.receipts(&query).map_err(io::Error::other)?;
        found.collect::<Result<_, _>>().map_err(io::Error::other)
    }

    fn desk(&self) -> Option<Arc<Desk>> {
        Some(self.desk.clone())
    }

    fn log(&self, stream: control::Stream, offset: u64, limit: u64) -> io::Result<Vec<u8>> {
        use std::os::unix::fs::FileExt;
        let file = File::open(self.folder.join(stream.file()))?;
        let mut bytes = vec![0; usize::try_from(limit).unwrap_or(usize::MAX).min(1 << 20)];
        let read = file.read_at(&mut bytes, offset)?;
        bytes.truncate(read);
        Ok(bytes)
    }
}

/// What the main thread of a run waits for.
pub(super) enum Event {
    /// The shim said something.
    Shim(FromShim, Vec<OwnedFd>),
    /// The jail's pid 1 is gone.
    JailGone,
    /// A signal to this process.
    Signal(Signal),
    /// Somebody ends the run.
    Kill(Signal),
    /// More was printed than allowed.
    TooMuchOutput,
}
