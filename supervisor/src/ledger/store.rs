//! The database file: how it is made, opened and brought up to date.

use super::{Error, Result};
use rusqlite::{config::DbConfig, Connection, ErrorCode, OpenFlags, TransactionBehavior};
use std::{
    fs,
    io::ErrorKind,
    os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

/// Each brings the database from the form of its index to the next. A stored one never changes.
const MIGRATIONS: &[&str] = &[
    include_str!("migrations/0001.sql"),
    include_str!("migrations/0002.sql"),
    include_str!("migrations/0004.sql"),
    include_str!("migrations/0005.sql"),
    include_str!("migrations/0006.sql"),
];

/// How long a connection waits for another process's transaction. Batches take milliseconds; a checkpoint's fsync on
/// a busy disk can take seconds.
const BUSY: Duration = Duration::from_secs(10);

/// When the writer at rest finds this many pages of 4 KiB in the write-ahead log, half a MiB, it is copied into the
/// database. Larger means fewer waits for the disk and a slower first open after the last process ended, which reads
/// the log once: about a millisecond for each MiB, at the start of nearly every run on a quiet machine.
const CHECKPOINT_PAGES: i64 = 128;

/// When a commit finds this many, it copies the log itself, and whoever asked for it waits: a writer that never rests,
/// or whose work never waits for the disk, must not let the log grow.
const CHECKPOINT_PAGES_MOST: i64 = 4 * CHECKPOINT_PAGES;

/// How long the log's file stays when it begins anew. Shorter than it usually becomes, its blocks would be given back
/// and found again each time; longer, one huge batch would leave a log behind that every later first open reads.
const LOG_KEPT_PAGES: i64 = 2 * CHECKPOINT_PAGES;

/// The newest form of the database.
pub(super) fn newest_form() -> u32 {
    MIGRATIONS.len() as u32
}

/// Makes the state directory and an empty database file, private to this user, where there is none.
pub(super) fn prepare(state: &Path) -> Result<PathBuf> {
    let database = state.join("ledger.db");
    match fs::metadata(state) {
        Ok(found) => claim(state, &database, &found)?,
        Err(error) if error.kind() == ErrorKind::NotFound => fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(state)
            .map_err(|source| io("make the state directory", state, source))?,
        Err(source) => return Err(io("look at the state directory", state, source)),
    }
    // SQLite would make the file by the umask; its log and index take over the database's own mode.
    match fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&database) {
        Ok(_) => Ok(database),
        Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(database),
        Err(source) => Err(io("make", &database, source)),
    }
}

/// Checks that an existing directory may hold the ledger, and closes it to others.
fn claim(state: &Path, database: &Path, found: &fs::Metadata) -> Result<()> {
    let me = nix::unistd::geteuid().as_raw();
    if found.uid() != me {
        return Err(Error::StateOfAnother { path: state.to_owned(), owner: found.uid() });
    }
    let mode = found.mode() & 0o7777;
    if mode & 0o077 == 0 {
        return Ok(());
    }
    let entries = || fs::read_dir(state).map_err(|source| io("list", state, source));
    // Somebody's home or /tmp, named by mistake, must not lose its mode to us.
    if !is_there(database)? && entries()?.next().is_some() {
        return Err(Error::StateIsOpen { path: state.to_owned(), mode });
    }
    fs::set_permissions(state, fs::Permissions::from_mode(0o700)).map_err(|source| io("close to others", state, source))
}

/// The connection that writes, with the database in its newest form.
pub(super) fn open_writer(database: &Path) -> Result<Connection> {
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let mut connection = open(database, flags)?;
    let configure = |connection: &Connection| -> rusqlite::Result<()> {
        connection.pragma_update(None, "synchronous", "NORMAL")?;
        connection.pragma_update(None, "wal_autocheckpoint", CHECKPOINT_PAGES_MOST)?;
        connection.pragma_update(None, "journal_size_limit", LOG_KEPT_PAGES * 4096)?;
        connection.pragma_update(None, "foreign_keys", true)
    };
    configure(&connection).map_err(|error| storage("configure the connection", database, error))?;
    if form(&connection, database)? < newest_form() {
        migrate(&mut connection, database)?;
    }
    Ok(connection)
}

/// Copies the write-ahead log into the database if it has become long. Waits for the disk, and for nobody else.
pub(super) fn copy_log(connection: &Connection) -> rusqlite::Result<()> {
    let pages = |mode: &str| connection.query_row(mode, [], |row| row.get::<_, i64>(1));
    if pages("PRAGMA wal_checkpoint(NOOP)")? >= CHECKPOINT_PAGES {
        pages("PRAGMA wal_checkpoint(PASSIVE)")?;
    }
    Ok(())
}

/// Whether a run is not over.
pub(super) fn has_live_runs(connection: &Connection) -> rusqlite::Result<bool> {
    connection.query_row("SELECT EXISTS (SELECT 1 FROM runs WHERE state <> 'ended')", [], |row| row.get(0))
}

/// Whether there is a database. One that this user may not look for is an error, and not none.
fn is_there(database: &Path) -> Result<bool> {
    database.try_exists().map_err(|source| io("look for", database, source))
}

/// A connection that only reads.
pub(super) fn open_reader(database: &Path) -> Result<Connection> {
    if !is_there(database)? {
        return Err(Error::Absent { path: database.to_owned() });
    }
    let connection = open(database, OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX)?;
    match form(&connection, database)? {
        0 => Err(Error::Absent { path: database.to_owned() }),
        found if found < newest_form() => Err(Error::Older { path: database.to_owned(), found, known: newest_form() }),
        _ => Ok(connection),
    }
}

/// A connection that reads a copy of a database. Without a log beside it, it is read as it is: SQLite would otherwise
/// make files in the copy's folder.
pub(super) fn open_copy(database: &Path) -> Result<Connection> {
    let mut log = database.as_os_str().to_owned();
    log.push("-wal");
    if fs::metadata(&log).is_ok_and(|found| found.len() > 0) {
        return open_reader(database);
    }
    if !is_there(database)? {
        return Err(Error::Absent { path: database.to_owned() });
    }
    // RFC 3986's unreserved characters and the slash stand for themselves in a URI.
    let mut uri = "file:".to_owned();
    let whole = std::path::absolute(database).map_err(|source| io("find", database, source))?;
    for byte in std::os::unix::ffi::OsStrExt::as_bytes(whole.as_os_str()) {
        match byte {
            b'/' | b'-' | b'.' | b'_' | b'~' | b'0'..=b'9' | b'A'..=b'Z' | b'a'..=b'z' => uri.push(char::from(*byte)),
            other => uri.push_str(&format!("%{other:02X}")),
        }
    }
    uri.push_str("?immutable=1");
    let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX | OpenFlags::SQLITE_OPEN_URI;
    let connection = open(Path::new(&uri), flags)?;
    match form(&connection, database)? {
        found if found < newest_form() => Err(Error::Older { path: database.to_owned(), found, known: newest_form() }),
        _ => Ok(connection),
    }
}

fn open(database: &Path, flags: OpenFlags) -> Result<Connection> {
    let configured = || -> rusqlite::Result<Connection> {
        let connection = Connection::open_with_flags(database, flags)?;
        connection.busy_timeout(BUSY)?;
        // The last one out would otherwise copy the log and wait for the disk, at the end of every run.
        connection.set_db_config(DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, true)?;
        // A stored schema is data from a file: it may not call functions with side effects.
        connection.set_db_config(DbConfig::SQLITE_DBCONFIG_TRUSTED_SCHEMA, false)?;
        connection.set_prepared_statement_cache_capacity(32);
        Ok(connection)
    };
    configured().map_err(|error| storage("open the database", database, error))
}

/// The form that the database has; refuses one that is newer than this program.
fn form(connection: &Connection, database: &Path) -> Result<u32> {
    let found: u32 = connection
        .query_row("PRAGMA user_version", [], |row| row.get(0))
        .map_err(|error| storage("read the form", database, error))?;
    if found > newest_form() {
        return Err(Error::Newer { path: database.to_owned(), found, known: newest_form() });
    }
    Ok(found)
}

fn migrate(connection: &mut Connection, database: &Path) -> Result<()> {
    let failed = |error| storage("bring the database up to date", database, error);
    if form(connection, database)? == 0 {
        set_wal(connection).map_err(failed)?;
    }
    // All of them at once: a reader that looks meanwhile must not find a form that no program has.
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate).map_err(failed)?;
    // Read again under the lock: another process may have done it meanwhile.
    let at = form(&transaction, database)?;
    let missing = MIGRATIONS.get(at as usize..).unwrap_or_default();
    if missing.is_empty() {
        return Ok(());
    }
    for sql in missing {
        transaction.execute_batch(sql).map_err(failed)?;
    }
    transaction.pragma_update(None, "user_version", newest_form()).map_err(failed)?;
    transaction.commit().map_err(failed)
}

/// Turns the write-ahead log on. SQLite does not wait on a lock here, so two first runs at once need these attempts.
fn set_wal(connection: &Connection) -> rusqlite::Result<()> {
    let mut attempts = 0;
    loop {
        match connection.pragma_update_and_check(None, "journal_mode", "WAL", |row| row.get::<_, String>(0)) {
            Ok(_) => return Ok(()),
            Err(error) if attempts < 200 && is_busy(&error) => {
                attempts += 1;
                std::thread::sleep(Duration::from_millis(10));
            }
            Err(error) => return Err(error),
        }
    }
}

fn is_busy(error: &rusqlite::Error) -> bool {
    matches!(error.sqlite_error_code(), Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked))
}

/// SQLite's error with its operation, sorted by what a person can do about it.
pub(super) fn storage(doing: &'static str, database: &Path, error: rusqlite::Error) -> Error {
    let path = database.to_owned();
    let code = error.sqlite_error_code();
    let source = Arc::new(error);
    match code {
        Some(ErrorCode::DiskFull) => Error::DiskFull { path, source },
        Some(ErrorCode::ReadOnly | ErrorCode::CannotOpen | ErrorCode::PermissionDenied) => {
            Error::NotWritable { path, source: Some(source) }
        }
        Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked) => {
            Error::Busy { path, waited_s: BUSY.as_secs(), source }
        }
        Some(ErrorCode::NotADatabase | ErrorCode::DatabaseCorrupt) => Error::Damaged { path, source },
        _ => Error::Storage { doing, path, source },
    }
}

pub(super) fn io(doing: &'static str, path: &Path, source: std::io::Error) -> Error {
    Error::Io { doing, path: path.to_owned(), source: Arc::new(source) }
}
