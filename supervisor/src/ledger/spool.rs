//! The spool: where the receipt of an answer is before the database has it.
//!
//! Whoever asked for an effect that may be repeated is not kept waiting for a transaction. The receipt goes into a file
//! of the run's own folder, which is the kernel's from then on and outlives this process, and into the queue of the
//! ledger's writer; then the answer is given. The writer takes what has come in, some milliseconds at a time. After a
//! crash, whoever closes the run takes over what the database does not have: so an answer that was given has its
//! receipt. A loss of power may take either, as it may the newest transactions.
//!
//! Records lie behind one another, each with its number; the database holds the number of the last one that it took
//! over, in the same transaction as the receipt. When it has them all, the file is written from its beginning again,
//! so it does not grow. Where there is no room or no file, the caller waits for the transaction instead.
//!
//! A record is its body's length and its number, as 4 and 8 bytes little-endian, the first 8 bytes of the SHA-256 of
//! the number and the body, and the body, a draft as JSON. Reading ends at the first that is not whole, or whose number
//! does not follow: that is where writing ended, and behind it lies what was written in an earlier turn.
//!
//! What it refuses: when the writer could not take one over, nothing more goes into the file, and the next effect of
//! the run is refused unless the database takes over all of it first.

use super::{
    draft::Draft,
    store::io,
    writer::{Batch, Durability, Writer},
    Error, Ledger, Result,
};
use crate::effect::{Door, RunId};
use std::{
    collections::HashMap,
    fs::{self, File},
    io::Read as _,
    os::{
        fd::AsFd as _,
        unix::fs::{FileExt as _, OpenOptionsExt as _},
    },
    path::{Path, PathBuf},
    sync::{
        atomic::{AtomicU64, Ordering},
        Arc, Mutex, MutexGuard, PoisonError,
    },
};

/// The file's length in bytes: some five hundred receipts, more than come while the writer waits for company.
const LENGTH: u64 = 512 * 1024;
/// The bytes before a record's body.
const HEAD: usize = 20;

/// The spools of the runs that this process has open.
#[derive(Default)]
pub(super) struct Spools {
    open: Mutex<HashMap<String, Arc<Spool>>>,
}

impl Spools {
    fn open(&self) -> MutexGuard<'_, HashMap<String, Arc<Spool>>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One run's spool.
struct Spool {
    place: Mutex<Place>,
    /// Receipts that the writer has and the database does not.
    outstanding: AtomicU64,
    /// Why the writer could not take one over; then those after it wait in the file too.
    behind: Mutex<Option<Error>>,
}

struct Place {
    /// None where there is no folder for it, or no room.
    file: Option<File>,
    offset: u64,
    /// The number of the next record.
    next: u64,
}

impl Spool {
    /// Makes the file, with all the space that it will need: a full disk must not cost a receipt.
    fn make(path: &Path) -> Spool {
        let file = File::options().write(true).create_new(true).mode(0o600).open(path);
        let file = match file {
            Ok(file) => match nix::fcntl::posix_fallocate(file.as_fd(), 0, LENGTH as i64) {
                Ok(()) => Some(file),
                Err(error) => {
                    tracing::debug!(%error, path = %path.display(), "no spool: receipts are waited for");
                    let _ = fs::remove_file(path);
                    None
                }
            },
            Err(error) => {
                tracing::debug!(%error, path = %path.display(), "no spool: receipts are waited for");
                None
            }
        };
        let place = Mutex::new(Place { file, offset: 0, next: 1 });
        Spool { place, outstanding: AtomicU64::new(0), behind: Mutex::default() }
    }

    fn place(&self) -> MutexGuard<'_, Place> {
        self.place.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn behind(&self) -> MutexGuard<'_, Option<Error>> {
        self.behind.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts a receipt into the file and the writer's queue, in this order; gives it back where that cannot be.
    fn keep(self: &Arc<Self>, writer: &Writer, draft: Draft) -> std::result::Result<(), Box<Draft>> {
        let mut place = self.place();
        if self.behind().is_some() {
            return Err(Box::new(draft));
        }
        if self.outstanding.load(Ordering::Acquire) == 0 {
            place.offset = 0;
        }
        let Place { file: Some(file), offset, next } = &*place else { return Err(Box::new(draft)) };
        let (offset, number) = (*offset, *next);
        let record = record(number, &draft);
        let end = offset + record.len() as u64;
        if end > LENGTH {
            return Err(Box::new(draft));
        }
        if let Err(error) = file.write_all_at(&record, offset) {
            tracing::warn!(%error, "a receipt is waited for: the spool cannot be written");
            return Err(Box::new(draft));
        }
        place.offset = end;
        place.next = number + 1;
        self.outstanding.fetch_add(1, Ordering::AcqRel);
        let spool = Arc::clone(self);
        let drafts = [draft];
        let take_over = move |batch: &mut Batch<'_>| take_over(batch, number, &drafts);
        // Under the lock, so that the queue has the order of the file.
        writer.submit_soon(Box::new(take_over), move |taken| {
            if let Err(error) = taken {
                tracing::error!(%error, "a receipt waits in its run's spool");
                spool.behind().get_or_insert(error);
            }
            spool.outstanding.fetch_sub(1, Ordering::AcqRel);
        });
        Ok(())
    }
}

/// Appends a receipt of the spool, if it is the next one.
fn take_over(batch: &mut Batch<'_>, number: u64, drafts: &[Draft; 1]) -> Result<()> {
    let run = &drafts[0].run;
    if batch.chain(run)?.spooled + 1 != number {
        return Err(Error::SpoolBehind(run.0.clone()));
    }
    batch.append(drafts)?;
    batch.chain(run)?.spooled = number;
    Ok(())
}

/// Appends what of a run's spool is not in the database.
pub(super) fn fold(batch: &mut Batch<'_>, run: &RunId, records: &[(u64, Draft)]) -> Result<()> {
    if records.is_empty() {
        return Ok(());
    }
    let spooled = batch.chain(run)?.spooled;
    let missing: Vec<&(u64, Draft)> = records.iter().filter(|(number, _)| *number > spooled).collect();
    let drafts: Vec<Draft> = missing.iter().map(|(_, draft)| draft.clone()).collect();
    batch.append(&drafts)?;
    if let Some((last, _)) = missing.last() {
        batch.chain(run)?.spooled = *last;
    }
    Ok(())
}

fn record(number: u64, draft: &Draft) -> Vec<u8> {
    let mut record = vec![0; HEAD];
    serde_json::to_writer(&mut record, draft).expect("a draft holds strings, integers and lists of them");
    let length = u32::try_from(record.len() - HEAD).unwrap_or(u32::MAX);
    record[..4].copy_from_slice(&length.to_le_bytes());
    record[4..12].copy_from_slice(&number.to_le_bytes());
    let check = check(number, &record[HEAD..]);
    record[12..HEAD].copy_from_slice(&check);
    record
}

fn check(number: u64, body: &[u8]) -> [u8; 8] {
    use sha2::Digest as _;
    let whole = sha2::Sha256::new().chain_update(number.to_le_bytes()).chain_update(body).finalize();
    let mut first = [0; 8];
    first.copy_from_slice(&whole[..8]);
    first
}

/// The records of a spool's bytes, up to where writing ended. Only those of this run.
fn records(bytes: &[u8], run: &RunId) -> Vec<(u64, Draft)> {
    let mut found: Vec<(u64, Draft)> = Vec::new();
    let mut rest = bytes;
    while let Some((head, after)) = rest.split_first_chunk::<HEAD>() {
        let number = u64::from_le_bytes(head[4..12].try_into().unwrap_or_default());
        let length = u32::from_le_bytes(head[..4].try_into().unwrap_or_default()) as usize;
        let Some((body, after)) = after.split_at_checked(length) else { break };
        let follows = found.last().is_none_or(|(last, _)| last.checked_add(1) == Some(number));
        if number == 0 || !follows || check(number, body) != head[12..] {
            break;
        }
        match serde_json::from_slice::<Draft>(body) {
            Ok(draft) if draft.run == *run => found.push((number, draft)),
            Ok(_) | Err(_) => break,
        }
        rest = after;
    }
    found
}

impl Draft {
    /// Whether whoever asked is told, and could say so.
    fn is_told(&self) -> bool {
        match self.door {
            Door::Api | Door::Program | Door::Network => true,
            // Nobody waits for these but Tollgate itself.
            Door::Workspace | Door::Jail | Door::Control => false,
        }
    }
}

impl Ledger {
    fn spool_path(&self, run: &RunId) -> PathBuf {
        self.run_dir(run).join("receipts.spool")
    }

    fn spool(&self, run: &RunId) -> Arc<Spool> {
        let mut open = self.shared.spools.open();
        match open.get(&run.0) {
            Some(spool) => Arc::clone(spool),
            None => Arc::clone(open.entry(run.0.clone()).or_insert(Arc::new(Spool::make(&self.spool_path(run))))),
        }
    }

    /// Appends a receipt, and returns once it outlives this process: in its run's spool, if somebody waits for the
    /// answer, or else in the database.
    ///
    /// # Errors
    ///
    /// When it could not be written; then the caller must not call the effect done.
    pub async fn append_soon(&self, draft: Draft) -> Result<()> {
        let draft = match draft.is_told() {
            false => draft,
            true => match self.spool(&draft.run).keep(self.writer()?, draft) {
                Ok(()) => return Ok(()),
                Err(draft) => *draft,
            },
        };
        self.append_async(draft).await.map(|_| ())
    }

    /// As [`Ledger::append_soon`], for nobody who could wait. Gives back what has to be waited for.
    pub(super) fn spool_unattended(&self, draft: Draft) -> std::result::Result<(), Box<Draft>> {
        match (draft.is_told(), self.writer()) {
            (true, Ok(writer)) => self.spool(&draft.run).keep(writer, draft),
            (true, Err(_)) | (false, _) => Err(Box::new(draft)),
        }
    }

    /// As [`Ledger::writable`], and whether every receipt of this run is where it belongs. One that the database could
    /// not take is taken over first.
    ///
    /// # Errors
    ///
    /// As [`Ledger::writable`], and what still keeps a receipt of the run from the database.
    pub async fn writable_for(&self, run: &RunId) -> Result<()> {
        self.writable()?;
        let spool = self.shared.spools.open().get(&run.0).map(Arc::clone);
        match spool {
            Some(spool) if spool.behind().is_some() => {
                let records = self.spooled_in(&spool, run)?;
                let run = run.clone();
                let work = Box::new(move |batch: &mut Batch<'_>| fold(batch, &run, &records));
                self.writer()?.call_async(Durability::Process, work).await?;
                *spool.behind() = None;
                Ok(())
            }
            Some(_) | None => Ok(()),
        }
    }

    /// Takes over what a run's supervisor left in its spool. For a run whose supervisor died; [`Ledger::end_run`] does it
    /// too.
    ///
    /// # Errors
    ///
    /// The database's, and when the spool cannot be read.
    pub fn take_over_spool(&self, run: &RunId) -> Result<()> {
        let records = self.spooled(run)?;
        let run = run.clone();
        self.call(Durability::Process, move |batch| fold(batch, &run, &records))
    }

    /// What a run's spool holds, taken over or not; nothing where it has none.
    pub(super) fn spooled(&self, run: &RunId) -> Result<Vec<(u64, Draft)>> {
        let spool = self.shared.spools.open().get(&run.0).map(Arc::clone);
        match spool {
            Some(spool) => self.spooled_in(&spool, run),
            None => self.read_spool(run),
        }
    }

    fn spooled_in(&self, spool: &Spool, run: &RunId) -> Result<Vec<(u64, Draft)>> {
        let place = spool.place();
        match place.file {
            Some(_) => self.read_spool(run),
            None => Ok(Vec::new()),
        }
    }

    fn read_spool(&self, run: &RunId) -> Result<Vec<(u64, Draft)>> {
        let path = self.spool_path(run);
        let failed = |source| io("read", &path, source);
        let file = match File::options().read(true).custom_flags(libc::O_NOFOLLOW).open(&path) {
            Ok(file) => file,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(failed(error)),
        };
        let mut bytes = Vec::new();
        file.take(LENGTH).read_to_end(&mut bytes).map_err(failed)?;
        Ok(records(&bytes, run))
    }

    /// Forgets a run's spool, once the database has all of it.
    pub(super) fn remove_spool(&self, run: &RunId) {
        let spool = self.shared.spools.open().get(&run.0).map(Arc::clone);
        if let Some(spool) = spool {
            // Whatever still comes waits for its transaction: the numbers of a new file would begin anew.
            spool.place().file = None;
        }
        let path = self.spool_path(run);
        match fs::remove_file(&path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                tracing::warn!(%error, path = %path.display(), "an empty spool is left");
            }
            Ok(()) | Err(_) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        chain::Answer,
        effect::{tests::sample, Effect, Kind},
        ledger::{
            record::{RunRecord, RunState},
            tests::{record as run_record, Fixture},
            ReceiptQuery,
        },
    };
    use proptest::prelude::*;
    use std::os::unix::fs::DirBuilderExt as _;

    /// A run with a folder of its own.
    fn with_folder() -> Fixture {
        let fixture = Fixture::new();
        fs::DirBuilder::new().recursive(true).mode(0o700).create(fixture.ledger.run_dir(&fixture.run)).unwrap();
        fixture
    }

    fn told(fixture: &Fixture, number: u64) -> Draft {
        let effect = Effect { door: Door::Api, ..sample(Kind::FsRead) };
        Draft::now(&fixture.run, &effect, &Answer::done(number.into(), number), &**fixture.ledger.clock())
    }

    fn append(fixture: &Fixture, number: u64) {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(fixture.ledger.append_soon(told(fixture, number))).unwrap();
    }

    /// The bytes of each receipt, in the chain's order, which must verify.
    fn chain(fixture: &Fixture) -> Vec<u64> {
        fixture.ledger.verify_run(&fixture.run).unwrap();
        let query = ReceiptQuery { run: Some(fixture.run.clone()), ..ReceiptQuery::default() };
        fixture.ledger.receipts(&query).unwrap().map(|receipt| receipt.unwrap().bytes).collect()
    }

    fn path(fixture: &Fixture) -> PathBuf {
        fixture.ledger.spool_path(&fixture.run)
    }

    /// What a supervisor leaves that wrote these records and died.
    fn left(fixture: &Fixture, numbers: impl IntoIterator<Item = u64>) {
        let bytes: Vec<u8> = numbers.into_iter().flat_map(|number| record(number, &told(fixture, number))).collect();
        fs::write(path(fixture), bytes).unwrap();
    }

    #[test]
    fn a_receipt_is_in_the_file_before_it_is_in_the_database() {
        let fixture = with_folder();
        // Nothing else may be committed meanwhile: the writer is held up by work of ours.
        let (go, wait) = std::sync::mpsc::channel::<()>();
        let hold = move |_: &mut Batch<'_>| {
            let _ = wait.recv();
            Ok(())
        };
        fixture.ledger.writer().unwrap().submit(Durability::Process, Box::new(hold), |_: Result<()>| {});
        (1..=3).for_each(|number| append(&fixture, number));
        assert_eq!(chain(&fixture), [0_u64; 0]);
        let kept = records(&fs::read(path(&fixture)).unwrap(), &fixture.run);
        assert_eq!(
            kept.iter().map(|(number, draft)| (*number, draft.bytes)).collect::<Vec<_>>(),
            [(1, 1), (2, 2), (3, 3)]
        );
        go.send(()).unwrap();
        fixture.ledger.take_over_spool(&fixture.run).unwrap();
        assert_eq!(chain(&fixture), [1, 2, 3], "once each");
    }

    #[test]
    fn what_a_dead_supervisor_left_is_taken_over_once() {
        let fixture = with_folder();
        left(&fixture, 1..=3);
        for _ in 0..2 {
            fixture.ledger.take_over_spool(&fixture.run).unwrap();
            assert_eq!(chain(&fixture), [1, 2, 3]);
        }
        left(&fixture, 2..=5);
        assert_eq!(end(&fixture).effects.count, 5);
        assert_eq!(chain(&fixture), [1, 2, 3, 4, 5]);
        assert!(!path(&fixture).exists());
    }

    fn end(fixture: &Fixture) -> RunRecord {
        let run = RunRecord { state: RunState::Ended, ..run_record(&fixture.run) };
        fixture.ledger.end_run(&run, Vec::new()).unwrap()
    }

    #[test]
    fn the_file_is_used_again_and_a_later_turn_hides_an_earlier_one() {
        let fixture = with_folder();
        let count = 3 * LENGTH / record(1, &told(&fixture, 1)).len() as u64;
        (1..=count).for_each(|number| append(&fixture, number));
        assert_eq!(fs::metadata(path(&fixture)).unwrap().len(), LENGTH);
        fixture.ledger.take_over_spool(&fixture.run).unwrap();
        let found = chain(&fixture);
        // One that found the file full waited in the queue itself, behind those that were in it.
        assert_eq!(found, (1..=count).collect::<Vec<_>>());
        end(&fixture);
        append(&fixture, count + 1);
        assert_eq!(chain(&fixture).last(), Some(&(count + 1)), "what comes late is waited for");
        assert!(!path(&fixture).exists());
    }

    #[test]
    fn a_receipt_that_cannot_be_taken_over_stops_the_run_until_all_are() {
        let fixture = with_folder();
        append(&fixture, 1);
        let spool = fixture.ledger.spool(&fixture.run);
        // As if the transaction of the second had failed.
        left(&fixture, 1..=2);
        spool.place().next = 3;
        append(&fixture, 3);
        fixture.ledger.call(Durability::Process, |_| Ok(())).unwrap();
        assert!(matches!(&*spool.behind(), Some(Error::SpoolBehind(run)) if *run == fixture.run.0));
        left(&fixture, 1..=3);
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(fixture.ledger.writable_for(&fixture.run)).unwrap();
        assert_eq!(chain(&fixture), [1, 2, 3]);
        append(&fixture, 4);
        fixture.ledger.call(Durability::Process, |_| Ok(())).unwrap();
        assert_eq!(chain(&fixture), [1, 2, 3, 4]);
    }

    #[test]
    fn without_a_folder_a_receipt_is_waited_for() {
        let fixture = Fixture::new();
        append(&fixture, 1);
        assert_eq!(chain(&fixture), [1]);
        assert!(!path(&fixture).exists() && !path(&fixture).parent().unwrap().exists());
    }

    #[test]
    fn a_record_of_another_run_and_what_lies_behind_a_hole_are_not_read() {
        let fixture = with_folder();
        let other = RunId("zzzzzzzzzzzz".into());
        let two = [record(1, &told(&fixture, 1)), record(3, &told(&fixture, 3))].concat();
        assert_eq!(records(&two, &fixture.run).len(), 1);
        assert_eq!(records(&two, &other), []);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn what_was_cut_or_changed_is_not_read(cut in 0usize..4000, flipped in 0usize..4000) {
            let fixture = Fixture::new();
            let whole: Vec<Vec<u8>> = (1..=3).map(|number| record(number, &told(&fixture, number))).collect();
            let bytes = whole.concat();
            let ends: Vec<usize> = whole.iter().scan(0, |end, record| { *end += record.len(); Some(*end) }).collect();
            let before = |place: usize| ends.iter().filter(|end| **end <= place).count();
            let cut = cut.min(bytes.len());
            prop_assert_eq!(records(&bytes[..cut], &fixture.run).len(), before(cut));
            let flipped = flipped % bytes.len();
            let mut changed = bytes.clone();
            changed[flipped] ^= 1;
            prop_assert_eq!(records(&changed, &fixture.run).len(), before(flipped));
        }

        #[test]
        fn no_bytes_make_it_panic(bytes: Vec<u8>) {
            let _ = records(&bytes, &RunId("0123456789ab".into()));
        }
    }
}
