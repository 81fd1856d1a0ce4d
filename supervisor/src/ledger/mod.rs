//! The ledger: the durable, hash-chained store of receipts.

pub mod record;
