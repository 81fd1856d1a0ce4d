-- Signed heads, cuts and the rule behind a decision.

-- Null in receipts without a rule, which are hashed as before.
ALTER TABLE receipts ADD COLUMN rule TEXT;

-- Null in heads of before. `record` is the digest of the run's record when it was sealed.
ALTER TABLE heads ADD COLUMN record BLOB;
ALTER TABLE heads ADD COLUMN key BLOB;
ALTER TABLE heads ADD COLUMN signature BLOB;

-- What was pruned of a run: its first `count` receipts, of which the last one's hash was `head`.
CREATE TABLE cuts (
    run       INTEGER PRIMARY KEY REFERENCES runs (n),
    count     INTEGER NOT NULL,
    refused   INTEGER NOT NULL,
    once      INTEGER NOT NULL,
    head      BLOB NOT NULL,
    cut_us    INTEGER NOT NULL,
    key       BLOB NOT NULL,
    signature BLOB NOT NULL
) STRICT;

-- Seldom written, often asked for.
CREATE INDEX receipts_failed ON receipts (id) WHERE decision = 'failed';
CREATE INDEX receipts_in_doubt ON receipts (id) WHERE decision = 'in-doubt';
