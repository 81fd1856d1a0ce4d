//! `tollgate diff RUN`: what a run changed, pending or applied. Starts no program.

use super::paths::{Selection, SelectionError};
use crate::{
    doors::workspace::paths_of,
    room::{
        diff::FileDiff,
        place::{OpenPlace, PlaceError},
    },
};
use std::{
    io::{self, Write},
    path::PathBuf,
};

/// Show what a run changed in its workspace
///
/// Works while the run lives, while its changes are pending, and after they were applied. No program of the
/// workspace is started, git least of all; control characters in names and contents are shown escaped.
#[derive(Clone, Debug, clap::Args)]
pub struct Diff {
    /// The run's id
    pub run: String,
    /// Only these paths of the workspace and what lies below them, or patterns such as `src/**/*.rs`
    #[arg(value_name = "PATH|GLOB")]
    pub paths: Vec<String>,
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
    /// A path argument cannot be used.
    #[error(transparent)]
    Select(#[from] SelectionError),
    /// A path argument names nothing that the run changed.
    #[error("run {run} changed nothing at `{path}`; `tollgate diff {run}` lists what it did")]
    NoSuchChange {
        /// The run.
        run: String,
        /// The path as given.
        path: String,
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
    let mut report = place.diff().map_err(|source| DiffError::Place { run: args.run.clone(), source })?;
    let root = place.place.workspace_path().unwrap_or_default();
    if let Some(selection) = Selection::parse(&args.paths, &root)? {
        let changes = report.applied.iter().chain(&report.pending).flat_map(|file| paths_of(&file.change));
        let all: Vec<PathBuf> = changes.chain(report.skipped.iter().map(|skipped| skipped.path.clone())).collect();
        if let Some(path) = selection.idle(all.iter().map(PathBuf::as_path)) {
            return Err(DiffError::NoSuchChange { run: args.run.clone(), path });
        }
        let wanted = |file: &FileDiff| paths_of(&file.change).iter().any(|path| selection.holds(path));
        report.applied.retain(wanted);
        report.pending.retain(wanted);
        report.skipped.retain(|skipped| selection.holds(&skipped.path));
    }
    let written = if args.json { report.write_json(out) } else { report.write_text(out) };
    match written.and_then(|()| out.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(DiffError::Write(error)),
        Ok(()) | Err(_) => Ok(()),
    }
}
