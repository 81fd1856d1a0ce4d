//! Named instants at which a test ends this process, as a power cut would.
//!
//! Compiled to nothing unless the feature `test-switches` is on, which no release has. There, `TOLLGATE_CRASH_AT` names
//! a point, and after a colon at which time it is reached (`ledger-committed:3`); the process then gets SIGKILL.

/// An instant that a crash test can name. In the order in which a run reaches them first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Point {
    /// The run is in the ledger, and nothing else is there yet.
    RunRecorded,
    /// The run's folder is made, and nothing of its jail.
    FolderMade,
    /// The writer is about to commit a transaction.
    LedgerCommits,
    /// The writer committed a transaction, and has told nobody.
    LedgerCommitted,
    /// The shim is running, and has no plan.
    ShimSpawned,
    /// An effect that must not happen twice is on disk, and has not happened. The first is the program's start, whose
    /// jail is being built.
    IntentWritten,
    /// The jail stands, and its program has not begun.
    JailBuilt,
    /// It has happened, and that is not on disk.
    EffectDone,
    /// An effect's receipt outlives this process, and whoever asked is not told.
    ReceiptWritten,
    /// The program is over and its jail is gone.
    ProgramEnded,
    /// The run is marked as applying, and nothing is applied.
    ApplyingMarked,
    /// Between two steps of a batch, or before its first and after its last.
    BatchStep,
    /// The batch is applied, and the run's record does not say so.
    Applied,
    /// The run's record is closed, and its folder is not tidied.
    RunEnded,
}

impl Point {
    /// Every point.
    pub const ALL: [Point; 14] = [
        Point::RunRecorded,
        Point::FolderMade,
        Point::LedgerCommits,
        Point::LedgerCommitted,
        Point::ShimSpawned,
        Point::IntentWritten,
        Point::JailBuilt,
        Point::EffectDone,
        Point::ReceiptWritten,
        Point::ProgramEnded,
        Point::ApplyingMarked,
        Point::BatchStep,
        Point::Applied,
        Point::RunEnded,
    ];

    /// The name that `TOLLGATE_CRASH_AT` knows.
    pub const fn name(self) -> &'static str {
        match self {
            Point::FolderMade => "folder-made",
            Point::RunRecorded => "run-recorded",
            Point::LedgerCommits => "ledger-commits",
            Point::LedgerCommitted => "ledger-committed",
            Point::ShimSpawned => "shim-spawned",
            Point::JailBuilt => "jail-built",
            Point::IntentWritten => "intent-written",
            Point::EffectDone => "effect-done",
            Point::ReceiptWritten => "receipt-written",
            Point::ProgramEnded => "program-ended",
            Point::ApplyingMarked => "applying-marked",
            Point::BatchStep => "batch-step",
            Point::Applied => "applied",
            Point::RunEnded => "run-ended",
        }
    }
}

/// The process is at this point.
#[inline]
pub fn reach(point: Point) {
    #[cfg(feature = "test-switches")]
    switched::reach(point);
    #[cfg(not(feature = "test-switches"))]
    let _ = point;
}

#[cfg(feature = "test-switches")]
mod switched {
    use super::Point;
    use nix::{
        sys::signal::{kill, Signal},
        unistd::Pid,
    };
    use std::sync::{
        atomic::{AtomicU64, Ordering},
        OnceLock,
    };

    /// Which point, and at which time it is reached.
    fn wanted() -> Option<(Point, u64)> {
        static WANTED: OnceLock<Option<(Point, u64)>> = OnceLock::new();
        *WANTED.get_or_init(|| {
            let text = std::env::var("TOLLGATE_CRASH_AT").ok()?;
            let (name, time) = text.split_once(':').unwrap_or((&text, "1"));
            let point = Point::ALL.into_iter().find(|point| point.name() == name);
            Some((point.expect("a point of the list"), time.parse().expect("a number")))
        })
    }

    pub(super) fn reach(point: Point) {
        static REACHED: AtomicU64 = AtomicU64::new(0);
        let Some((wanted, time)) = wanted() else { return };
        if point == wanted && REACHED.fetch_add(1, Ordering::SeqCst) + 1 == time {
            let _ = kill(Pid::this(), Signal::SIGKILL);
            // The signal is on its way; nothing else may happen.
            loop {
                std::thread::park();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Point;

    #[test]
    fn every_point_has_a_name_of_its_own() {
        let names: std::collections::BTreeSet<_> = Point::ALL.iter().map(|point| point.name()).collect();
        assert_eq!(names.len(), Point::ALL.len());
    }
}
