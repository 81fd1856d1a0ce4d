//! `tollgate discard RUN`: throw a run's unapplied changes away.

use crate::room::place::{OpenPlace, PlaceError};
use std::io::{self, Write};

/// Throw away what a run changed and nobody applied
///
/// The workspace is not touched. What was applied before stays applied.
#[derive(Clone, Debug, clap::Args)]
pub struct Discard {
    /// The run's id
    pub run: String,
}

/// Why nothing was discarded.
#[derive(Debug, thiserror::Error)]
pub enum DiscardError {
    /// The run's files cannot be read or removed.
    #[error("cannot discard the changes of run {run}")]
    Place {
        /// The run.
        run: String,
        /// Why.
        #[source]
        source: PlaceError,
    },
    /// Standard error cannot be written.
    #[error("cannot write: {0}")]
    Write(#[source] io::Error),
}

/// Discards what is pending, after finishing what a crash left of an earlier batch.
///
/// The caller records the run's changes as [`crate::ledger::record::ChangesState::Discarded`].
///
/// # Errors
/// [`DiscardError`].
pub fn discard(args: &Discard, place: &OpenPlace, talk: &mut dyn Write) -> Result<(), DiscardError> {
    let failed = |source| DiscardError::Place { run: args.run.clone(), source };
    place.recover().map_err(failed)?;
    place.discard().map_err(failed)?;
    writeln!(talk, "discarded the pending changes of run {}", args.run).map_err(DiscardError::Write)
}
