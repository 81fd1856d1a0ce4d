//! `tollgate apply RUN [PATH…]`: apply what is pending, at an operator's explicit word.

use crate::{
    chain::Chain,
    doors::workspace::{self, Commit, CommitReport, Word},
    effect::{RoomId, Subject},
    ledger::record::ChangesState,
    room::{
        batch::Recovered,
        path::{printable, unspell, BadPath},
        place::{OpenPlace, PlaceError},
    },
};
use std::{
    io::{self, Write},
    path::{Path, PathBuf},
};

/// Apply what a run changed and what is still pending
///
/// All of it, or only the paths that are named, with the new directories above them. Everything lands together or
/// nothing does; a file that somebody else changed meanwhile is named and left as it is.
#[derive(Clone, Debug, clap::Args)]
pub struct Apply {
    /// The run's id
    pub run: String,
    /// Only these paths of the workspace and what lies below them
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
    /// A path argument is no path of the workspace.
    #[error(transparent)]
    Path(#[from] BadPath),
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
    match place.recover().map_err(failed)? {
        Recovered::Nothing => {}
        Recovered::RolledBack => {
            writeln!(talk, "an interrupted batch was rolled back: the workspace was as before it").map_err(said)?;
        }
        Recovered::RolledForward => {
            writeln!(talk, "an interrupted batch was rolled forward: its changes are in the workspace")
                .map_err(said)?;
        }
    }
    let set = place.changes().map_err(failed)?;
    let root = place.place.workspace_path().unwrap_or_default();
    let mut select = Vec::new();
    for text in &args.paths {
        let path = chosen(text, &root)?;
        let named = |change: &crate::room::changes::Change| change.path.starts_with(&path);
        if !set.changes.iter().any(named) {
            return Err(ApplyCommandError::NoSuchChange { run: args.run.clone(), path: printable(&path) });
        }
        select.push(path);
    }
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
        select: (!args.paths.is_empty()).then_some(select),
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

/// A path argument: of the workspace, or absolute and in it.
fn chosen(text: &str, root: &Path) -> Result<PathBuf, BadPath> {
    let text = text.strip_prefix("./").unwrap_or(text);
    let trimmed = if text.len() > 1 { text.trim_end_matches('/') } else { text };
    match Path::new(trimmed).strip_prefix(root) {
        Ok(inside) => unspell(&inside.to_string_lossy()),
        Err(_) if trimmed == "." => Ok(PathBuf::new()),
        Err(_) => unspell(trimmed),
    }
}

/// Says what became of the changes, one line a path that did not land. `tollgate run` prints it too.
///
/// # Errors
/// What writing gives.
pub fn write_report(report: &CommitReport, talk: &mut dyn Write) -> io::Result<()> {
    if let Some(failure) = &report.failure {
        writeln!(talk, "error: {failure}")?;
    }
    for held in &report.held {
        writeln!(talk, "held: {}: {}", printable(&held.path), crate::room::path::escape_controls(&held.reason))?;
    }
    for skipped in &report.skipped {
        writeln!(talk, "not shipped: {}: {}", printable(&skipped.path), skipped.reason)?;
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
        assert!(matches!(run(&fixture, &["../a"]), Err(ApplyCommandError::Path(_))));
        assert_eq!(run(&fixture, &["./a"]).unwrap().applied, 1);
        let absolute = fixture.workspace_path().join("b").display().to_string();
        assert_eq!(run(&fixture, &[&absolute]).unwrap().applied, 1);
        assert_eq!(run(&fixture, &[]).unwrap().applied, 0);
    }
}
