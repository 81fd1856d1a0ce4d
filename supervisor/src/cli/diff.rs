//! `tollgate diff RUN`: what a run changed, pending or applied. Starts no program.

use crate::room::place::{OpenPlace, PlaceError};
use std::io::{self, Write};

/// Show what a run changed in its workspace
///
/// Works while the run lives, while its changes are pending, and after they were applied. No program of the
/// workspace is started, git least of all; control characters in names and contents are shown escaped.
#[derive(Clone, Debug, clap::Args)]
pub struct Diff {
    /// The run's id
    pub run: String,
    /// Print one JSON object a line
    #[arg(long)]
    pub json: bool,
}

/// Why nothing could be shown.
#[derive(Debug, thiserror::Error)]
pub enum DiffError {
    /// The run's changes cannot be read.
    #[error("cannot show what run {run} changed")]
    Place {
        /// The run.
        run: String,
        /// Why.
        #[source]
        source: PlaceError,
    },
    /// Standard output cannot be written.
    #[error("cannot write the diff: {0}")]
    Write(#[source] io::Error),
}

/// Writes the report; a reader that goes away is no error.
///
/// # Errors
/// [`DiffError`].
pub fn diff(args: &Diff, place: &OpenPlace, out: &mut dyn Write) -> Result<(), DiffError> {
    let report = place.diff().map_err(|source| DiffError::Place { run: args.run.clone(), source })?;
    let written = if args.json { report.write_json(out) } else { report.write_text(out) };
    match written.and_then(|()| out.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(DiffError::Write(error)),
        Ok(()) | Err(_) => Ok(()),
    }
}
