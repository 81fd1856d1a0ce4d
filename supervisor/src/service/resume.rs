//! Taking over what an interrupted run left.

use crate::effect::RunId;

/// The interrupted run that a new one takes over.
pub struct Resumption {
    /// The run.
    pub run: RunId,
}
