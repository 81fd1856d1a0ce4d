//! `tollgate apply RUN [PATH|GLOB…]`: apply what is pending, at an operator's explicit word.

use super::paths::{Selection, SelectionError};
use crate::{
    chain::Chain,
    doors::workspace::{self, Commit, CommitReport, Word},
    effect::{RoomId, Subject},
    ledger::record::ChangesState,
    room::{
        batch::Recovered,
        changes::ChangeSet,
        path::{escape_controls, printable},
        place::{OpenPlace, PlaceError},
    },
};
use std::{
    io::{self, Write},
    path::PathBuf,
};

/// Apply what a run changed and what is still pending
///
/// All of it, or only the paths that are named, with the new directories above them. Everything lands together or
/// nothing does; a file that somebody else changed meanwhile is named and left as it is.
#[derive(Clone, Debug, clap::Args)]
pub struct Apply {
    /// The run's id
    pub run: String,
    /// Only these paths of the workspace and what lies below them, or patterns such as `src/**/*.rs`
    #[arg(value_name = "PATH|GLOB")]
    pub paths: Vec<String>,
    /// Print the report as JSON
    #[arg(long)]
    pub json: bool,
}

/// Why nothing was applied.
#[derive(Debug, thiserror::Error)]
pub enum ApplyCommandError {
    /// The run's changes cannot be read.
    #[error("cannot apply the changes of run {run}")]
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
    #[error("run {run} has no pending change at `{path}`; `tollgate diff {run}` lists them")]
    NoSuchChange {
        /// The run.
        run: String,
        /// The path as given.
        path: String,
    },
    /// The output cannot be written.
    #[error("cannot write the report: {0}")]
    Write(#[source] io::Error),
}

/// Passes the pending changes through the operator's chain and applies what it allows.
///
/// Finishes or undoes first what a crash left of an earlier batch, and says which. The caller records the report's
/// state; [`CommitReport::failure`] or anything held means exit status 125.
///
/// # Errors
/// [`ApplyCommandError`]; a batch that failed is in the report.
pub async fn apply(
    args: &Apply,
    place: &OpenPlace,
    chain: &Chain,
    subject: Subject,
    room: Option<RoomId>,
    out: &mut dyn Write,
    talk: &mut dyn Write,
) -> Result<CommitReport, ApplyCommandError> {
    let failed = |source| ApplyCommandError::Place { run: args.run.clone(), source };
    let said = ApplyCommandError::Write;
    say_recovered(place.recover().map_err(failed)?, talk).map_err(said)?;
    let set = place.changes().map_err(failed)?;
    let root = place.place.workspace_path().unwrap_or_default();
    let selection = Selection::parse(&args.paths, &root)?;
    let select = match &selection {
        Some(selection) => Some(selected(&args.run, selection, &set)?),
        None => None,
    };
    let source = place.source.clone().unwrap_or_else(|| place.workspace.clone());
    let commit = Commit {
        subject,
        room,
        run: place.place.run.clone(),
        run_dir: place.run_dir.clone(),
        workspace: place.workspace.clone(),
        source,
        since_ns: place.place.since_ns,
        shift: place.place.shift,
        word: Word::Operator,
        select,
    };
    let report = workspace::commit(chain, commit, set).await;
    if report.state == ChangesState::Applied {
        if let Err(error) = place.remove_layer() {
            // The changes are applied; what is left over only takes space.
            tracing::warn!(run = args.run, %error, "cannot remove the run's layer");
        }
    }
    if args.json {
        serde_json::to_writer(&mut *out, &report).map_err(|error| said(error.into()))?;
        writeln!(out).map_err(said)?;
    } else {
        write_report(&report, talk).map_err(said)?;
    }
    Ok(report)
}

/// The paths of the changes that were named.
///
/// # Errors
/// [`ApplyCommandError::NoSuchChange`] for the first name that names none.
pub(super) fn selected(run: &str, selection: &Selection, set: &ChangeSet) -> Result<Vec<PathBuf>, ApplyCommandError> {
    let paths: Vec<PathBuf> = set.changes.iter().flat_map(workspace::paths_of).collect();
    match selection.idle(paths.iter().map(PathBuf::as_path)) {
        Some(path) => Err(ApplyCommandError::NoSuchChange { run: run.to_owned(), path }),
        None => Ok(paths.into_iter().filter(|path| selection.holds(path)).collect()),
    }
}

/// Says what was done about a batch that a crash cut short.
///
/// # Errors
/// What writing gives.
pub(super) fn say_recovered(recovered: Recovered, talk: &mut dyn Write) -> io::Result<()> {
    match super::undo::recovered_in_words(recovered) {
        Some(words) => writeln!(talk, "{words}"),
        None => Ok(()),
    }
}

/// Says what became of the changes, one line a path that did not land. `tollgate run` prints it too.
///
/// # Errors
/// What writing gives.
pub fn write_report(report: &CommitReport, talk: &mut dyn Write) -> io::Result<()> {
    if let Some(failure) = &report.failure {
        writeln!(talk, "error: {}", escape_controls(failure))?;
    }
    for held in &report.held {
        writeln!(talk, "held: {}: {}", printable(&held.path), escape_controls(&held.reason))?;
    }
    for skipped in &report.skipped {
        writeln!(talk, "not shipped: {}: {}", printable(&skipped.path), escape_controls(&skipped.reason))?;
    }
    if report.failure.is_none() {
        writeln!(talk, "applied {}, {} held", report.applied, report.held.len())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::room::{
        place::{Place, View},
        testing::Fixture,
    };

    fn run(fixture: &Fixture, paths: &[&str]) -> Result<CommitReport, ApplyCommandError> {
        let place = Place::open(&fixture.run_path()).unwrap();
        let args = Apply {
            run: fixture.run.0.clone(),
            paths: paths.iter().map(|path| (*path).to_owned()).collect(),
            json: false,
        };
        let subject = Subject { uid: 1000, run: None, agent: None };
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let chain = Chain::new(Vec::new());
        runtime.block_on(apply(&args, &place, &chain, subject, None, &mut Vec::new(), &mut Vec::new()))
    }

    #[test]
    fn a_named_path_lands_and_a_wrong_one_is_an_error() {
        let fixture = Fixture::new().started();
        Place::create(&fixture.run_dir, &fixture.run, &fixture.workspace_path(), fixture.since_ns, None, View::Overlay)
            .unwrap();
        std::fs::write(fixture.upper_path().join("a"), "a").unwrap();
        std::fs::write(fixture.upper_path().join("b"), "b").unwrap();
        assert!(matches!(run(&fixture, &["c"]), Err(ApplyCommandError::NoSuchChange { .. })));
        assert!(matches!(run(&fixture, &["../a"]), Err(ApplyCommandError::Select(_))));
        assert_eq!(run(&fixture, &["./a"]).unwrap().applied, 1);
        let absolute = fixture.workspace_path().join("b").display().to_string();
        assert_eq!(run(&fixture, &[&absolute]).unwrap().applied, 1);
        assert_eq!(run(&fixture, &[]).unwrap().applied, 0);
    }
}
