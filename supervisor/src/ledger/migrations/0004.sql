-- What people decided for good, and what runs share a budget of.

-- Rules that approve a kind of effect on a path. A revoked one stays, for the record. `moved_to` is empty but for a
-- move.
CREATE TABLE approval_rules (
    n          INTEGER PRIMARY KEY AUTOINCREMENT,
    kind       TEXT NOT NULL,
    path       TEXT NOT NULL,
    moved_to   TEXT NOT NULL,
    uid        INTEGER NOT NULL,
    workspace  TEXT NOT NULL,
    question   TEXT NOT NULL,
    made_by    INTEGER NOT NULL,
    made_us    INTEGER NOT NULL,
    revoked_us INTEGER
) STRICT;
CREATE UNIQUE INDEX approval_rules_held ON approval_rules (kind, path, moved_to, uid, workspace)
    WHERE revoked_us IS NULL;

-- Quotas that runs share by id: one row a unit. What is used is `settled` and what is reserved.
CREATE TABLE quotas (
    id      TEXT NOT NULL,
    unit    TEXT NOT NULL,
    most    INTEGER NOT NULL,
    settled INTEGER NOT NULL,
    PRIMARY KEY (id, unit)
) STRICT, WITHOUT ROWID;

-- Which runs are charged to which quota.
CREATE TABLE run_quotas (
    run   INTEGER NOT NULL REFERENCES runs (n) ON DELETE CASCADE,
    quota TEXT NOT NULL,
    PRIMARY KEY (run, quota)
) STRICT, WITHOUT ROWID;

-- What effects under way have reserved. A row is settled when its effect is answered; what a run that is gone left
-- here is settled when the run is closed.
CREATE TABLE reservations (
    n      INTEGER PRIMARY KEY AUTOINCREMENT,
    run    INTEGER NOT NULL REFERENCES runs (n) ON DELETE CASCADE,
    quota  TEXT NOT NULL,
    unit   TEXT NOT NULL,
    amount INTEGER NOT NULL,
    door   TEXT NOT NULL,
    digest BLOB NOT NULL
) STRICT;
CREATE INDEX reservations_quota ON reservations (quota, unit);
CREATE INDEX reservations_run ON reservations (run);
