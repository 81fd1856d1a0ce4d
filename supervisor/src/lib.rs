//! Tollgate's supervisor: doors turn what a jailed program does into effects, one chain decides each, the world
//! does what was allowed, and the ledger keeps a receipt of all of it.
//!
//! One way: `doors` → `effect` → `chain` → `world`, with receipts outermost. `effect` names nothing of ours,
//! `chain` names effect and ledger, `world` names effect; the command line and the doors may name everything.

pub mod chain;
pub mod cli;
pub mod crash;
pub mod doors;
pub mod effect;
pub mod jail;
pub mod ledger;
pub mod policy;
pub mod room;
pub mod service;
pub mod world;
