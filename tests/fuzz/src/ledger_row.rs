//! Rows of a ledger that somebody else wrote: read or refused, and never verified if a single field is another's.
#![no_main]

use libfuzzer_sys::fuzz_target;
use rusqlite::{types::Value, Connection};
use std::{cell::RefCell, fs, os::unix::fs::PermissionsExt, path::Path};
use tollgate::{
    effect::RunId,
    ledger::{Ledger, ReceiptQuery},
};

#[allow(dead_code)]
#[path = "../../../supervisor/examples/common/mod.rs"]
mod common;

/// Columns of a receipt's row, but for its place.
const COLUMNS: [&str; 26] = [
    "room",
    "kind",
    "classes",
    "resource_type",
    "resource",
    "uid",
    "subject_run",
    "agent",
    "door",
    "decision",
    "decided_by",
    "reason",
    "hint",
    "idempotency",
    "injected",
    "started_us",
    "queued_us",
    "decided_us",
    "executed_us",
    "bytes",
    "times",
    "rule",
    "request_digest",
    "result_digest",
    "prev",
    "hash",
];

struct Base {
    folder: tempfile::TempDir,
    run: RunId,
    original: Vec<u8>,
}

thread_local! {
    static BASE: RefCell<Base> = RefCell::new(base());
}

fn base() -> Base {
    let folder = tempfile::tempdir().expect("a temporary folder");
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o700)).expect("our own folder");
    let ledger = Ledger::open(folder.path()).expect("a new ledger");
    let run = ledger.new_run_id();
    ledger.insert_run(&common::record(&run)).expect("a run");
    for number in 0..3 {
        ledger.append(common::draft(&ledger, &run, number, &common::allowed())).expect("a receipt");
    }
    ledger.seal_run(&run).expect("sealed");
    drop(ledger);
    let database = folder.path().join("ledger.db");
    Connection::open(&database).and_then(|db| db.execute_batch("PRAGMA wal_checkpoint(TRUNCATE)")).expect("one file");
    let original = fs::read(&database).expect("the database");
    Base { folder, run, original }
}

fuzz_target!(|data: &[u8]| {
    let [column, kind, value @ ..] = data else { return };
    BASE.with_borrow(|base| {
        let database = base.folder.path().join("ledger.db");
        for extra in ["ledger.db-wal", "ledger.db-shm"] {
            let _ = fs::remove_file(base.folder.path().join(extra));
        }
        if *kind == 255 {
            // The file's own bytes.
            let mut bytes = base.original.clone();
            for piece in value.chunks_exact(3) {
                let place = (usize::from(piece[0]) << 8 | usize::from(piece[1])) % bytes.len();
                bytes[place] ^= piece[2];
            }
            fs::write(&database, bytes).expect("room");
            read(base.folder.path(), &base.run);
            return;
        }
        fs::write(&database, &base.original).expect("room");
        let column = COLUMNS[usize::from(*column) % COLUMNS.len()];
        let value = match kind % 5 {
            0 => Value::Null,
            1 => Value::Integer(value.iter().take(8).fold(0, |sum, byte| sum << 8 | i64::from(*byte))),
            2 => Value::Real(f64::from(u32::from(value.len() as u8))),
            3 => Value::Text(String::from_utf8_lossy(value).into_owned()),
            _ => Value::Blob(value.to_vec()),
        };
        let connection = Connection::open(&database).expect("a database");
        let row = "id = (SELECT id FROM receipts ORDER BY id LIMIT 1 OFFSET 1)";
        let sql = format!("UPDATE receipts SET {column} = ?1 WHERE {row} AND {column} IS NOT ?1");
        // A column's own check may refuse the value, which is as good.
        let changed = connection.execute(&sql, [&value]).unwrap_or_default();
        drop(connection);
        let verified = read(base.folder.path(), &base.run);
        if changed == 1 {
            assert!(!verified, "{column} = {value:?} was not noticed");
        }
    });
});

/// Reads all there is; whether the run's chain holds.
fn read(state: &Path, run: &RunId) -> bool {
    let Ok(ledger) = Ledger::open_read_only(state) else { return false };
    if let Ok(receipts) = ledger.receipts(&ReceiptQuery::default()) {
        for receipt in receipts.take(10).flatten() {
            let _ = serde_json::to_string(&receipt);
        }
    }
    ledger.verify_run(run).is_ok()
}
