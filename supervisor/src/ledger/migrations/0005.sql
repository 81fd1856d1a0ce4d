-- Results of effects that must not be repeated, for a run that is taken up again after an interruption: they are
-- answered from here. The number is the intent's.
CREATE TABLE once_results (
    n              INTEGER PRIMARY KEY,
    run            INTEGER NOT NULL REFERENCES runs (n) ON DELETE CASCADE,
    request_digest BLOB NOT NULL,
    result         TEXT NOT NULL
) STRICT;
CREATE INDEX once_results_run ON once_results (run, n);
