//! Workspaces: what a run changed, and how that reaches the folder it ran in.
//!
//! A run sees its workspace through an overlay (or a [`mirror`]) whose upper layer is its own. [`changes`] reads that
//! layer as a list of changes, [`batch`] applies a list whole or not at all, [`diff`] shows it. Nothing here decides
//! whether a change is allowed: that is the chain's, asked by [`crate::doors::workspace`]. Nothing here starts a
//! program, git least of all: a workspace's own settings must not run on the host.

pub mod batch;
pub mod changes;
pub mod diff;
pub mod durable;
pub mod layer;
pub mod mirror;
pub mod path;
pub mod place;
pub mod tree;
pub mod undo;

#[cfg(test)]
pub(crate) mod testing;
