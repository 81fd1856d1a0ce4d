-- How many receipts of a run were taken over from its spool: those after it, in the run's own folder, are not in this
-- database yet.
ALTER TABLE chains ADD COLUMN spooled INTEGER NOT NULL DEFAULT 0;
