-- The first form of the ledger.
--
-- A receipt's id holds its run's number in the upper half and its place in the run in the lower, so that one run's
-- receipts lie side by side and a new receipt is almost always the table's last row.

PRAGMA application_id = 0x746f6c6c; -- "toll"

CREATE TABLE runs (
    n          INTEGER PRIMARY KEY AUTOINCREMENT,
    id         TEXT NOT NULL UNIQUE,
    state      TEXT NOT NULL,
    started_us INTEGER NOT NULL,
    record     TEXT NOT NULL
) STRICT;
CREATE INDEX runs_alive ON runs (n) WHERE state <> 'ended';

-- One small row a run that changes with every batch; kept apart from the record, which is large and seldom changes.
CREATE TABLE chains (
    run     INTEGER PRIMARY KEY REFERENCES runs (n),
    count   INTEGER NOT NULL,
    refused INTEGER NOT NULL,
    once    INTEGER NOT NULL,
    last_us INTEGER NOT NULL,
    head    BLOB NOT NULL
) STRICT;

CREATE TABLE receipts (
    id             INTEGER PRIMARY KEY, -- run's n << 32 | place in the run, from 1
    room           TEXT,
    kind           TEXT NOT NULL,
    classes        INTEGER NOT NULL,    -- bit i is the class of that index in effect::Class
    resource_type  TEXT NOT NULL,
    resource       TEXT NOT NULL,
    uid            INTEGER NOT NULL,
    subject_run    TEXT,
    agent          TEXT,
    door           TEXT NOT NULL,
    decision       TEXT NOT NULL,
    decided_by     TEXT NOT NULL,
    reason         TEXT NOT NULL,
    hint           TEXT NOT NULL,
    idempotency    TEXT NOT NULL,
    injected       INTEGER NOT NULL,
    started_us     INTEGER NOT NULL,
    queued_us      INTEGER NOT NULL,
    decided_us     INTEGER NOT NULL,
    executed_us    INTEGER NOT NULL,
    bytes          INTEGER NOT NULL,
    times          INTEGER NOT NULL,
    request_digest BLOB NOT NULL,
    result_digest  BLOB,
    prev           BLOB NOT NULL,
    hash           BLOB NOT NULL
) STRICT;
CREATE INDEX receipts_refused ON receipts (id) WHERE decision = 'refused';

-- Effects that must not be repeated, from before they happen until their receipt is written. A row whose receipt is
-- not null has been recorded as in doubt, and stays until a person settles it.
CREATE TABLE intents (
    n       INTEGER PRIMARY KEY AUTOINCREMENT,
    run     INTEGER NOT NULL REFERENCES runs (n),
    draft   TEXT NOT NULL,
    receipt INTEGER
) STRICT;

-- The host's chain of the runs' heads: what a run's chain was when the run ended.
CREATE TABLE heads (
    n         INTEGER PRIMARY KEY,
    run       TEXT NOT NULL,
    count     INTEGER NOT NULL,
    head      BLOB NOT NULL,
    sealed_us INTEGER NOT NULL,
    prev      BLOB NOT NULL,
    hash      BLOB NOT NULL
) STRICT;
CREATE INDEX heads_run ON heads (run, n);
