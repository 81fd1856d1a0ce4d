//! Helpers shared by the end-to-end tests: build outputs, scratch folders, a second user, observers outside the jail.
//!
//! Nothing here believes the jailed program. A test asks it to try something and then looks, from outside, at what
//! came of it: sentinel files, the host's /proc, a listener's accept count, the receipts.

pub mod judge;
pub mod observe;
pub mod origin;
pub mod switches;
pub mod terminal;
pub mod world;

pub use judge::{attempts, Attempts};
pub use observe::{Listener, Snapshot};
pub use world::{every_identity, every_way, Finished, Identity, Invocation, Launcher, Started, Way, World};
