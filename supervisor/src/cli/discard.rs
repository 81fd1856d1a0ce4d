//! `tollgate discard RUN`: throw a run's unapplied changes away.

use super::paths::{Selection, SelectionError};
use crate::{
    doors::workspace,
    ledger::record::ChangesState,
    room::{
        batch,
        place::{OpenPlace, PlaceError},
    },
};
use std::{
    io::{self, Write},
    path::PathBuf,
};

/// Throw away what a run changed and nobody applied
///
/// All of it, or only the paths that are named. The workspace is not touched. What was applied before stays applied, and
/// can be undone for as long as its before-images are kept: `--before-images` removes those instead.
#[derive(Clone, Debug, clap::Args)]
pub struct Discard {
    /// The run: its id, a unique beginning of one, or `latest`
    pub run: String,
    /// Only these paths of the workspace and what lies below them, or patterns such as `src/**/*.rs`
    #[arg(value_name = "PATH|GLOB")]
    pub paths: Vec<String>,
    /// Remove the before-images of what was applied, and leave what is pending: nothing of the run can be undone then
    #[arg(long, conflicts_with = "paths")]
    pub before_images: bool,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
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
    /// A path argument cannot be used.
    #[error(transparent)]
    Select(#[from] SelectionError),
    /// A path argument names nothing that is pending.
    #[error(transparent)]
    Chosen(#[from] super::apply::ApplyCommandError),
    /// The output cannot be written.
    #[error("cannot say that it is done: {0}")]
    Write(#[source] io::Error),
}

/// Discards what is pending, after finishing what a crash left of an earlier batch.
///
/// Gives what was done in one sentence. The caller records where the run's changes stand after it, and then says both
/// with [`say`].
///
/// # Errors
/// [`DiscardError`].
pub fn discard(args: &Discard, place: &OpenPlace) -> Result<String, DiscardError> {
    let failed = |source| DiscardError::Place { run: args.run.clone(), source };
    place.recover().map_err(failed)?;
    if args.before_images {
        let bytes = batch::images_bytes(&place.run_dir).map_err(|error| failed(error.into()))?;
        batch::forget_images(&place.run_dir).map_err(|error| failed(error.into()))?;
        let freed = super::output::bytes(bytes);
        return Ok(format!("removed the before-images of run {} ({freed}); it can no longer be undone", args.run));
    }
    let root = place.place.workspace_path().unwrap_or_default();
    if let Some(selection) = Selection::parse(&args.paths, &root)? {
        let set = place.changes().map_err(failed)?;
        let chosen = super::apply::selected(&args.run, &selection, &set)?;
        let all = set.changes.len();
        let rest = workspace::without(set.changes, &chosen);
        if !rest.is_empty() {
            let paths: Vec<PathBuf> = rest.iter().flat_map(workspace::paths_of).collect();
            batch::discard_paths(&place.run_dir, &paths).map_err(|error| failed(error.into()))?;
            let gone = all - rest.len();
            return Ok(format!("discarded {gone} of {all} pending changes of run {}", args.run));
        }
    }
    place.discard().map_err(failed)?;
    Ok(everything(args))
}

/// What is said when nothing is left pending.
pub fn everything(args: &Discard) -> String {
    format!("discarded the pending changes of run {}", args.run)
}

/// Says what was done, or where the changes stand now as JSON.
///
/// # Errors
/// [`DiscardError::Write`].
pub fn say(
    args: &Discard,
    standing: ChangesState,
    said: &str,
    out: &mut dyn Write,
    talk: &mut dyn Write,
) -> Result<(), DiscardError> {
    let written = match args.json {
        true => {
            let object = serde_json::json!({ "run": args.run, "changes": standing, "detail": said });
            writeln!(out, "{object}")
        }
        false => writeln!(talk, "{said}"),
    };
    written.map_err(DiscardError::Write)
}
