//! `tollgate undo RUN [PATH…]`: take back what a run applied, or bring it again.

use super::{
    output::{escape, json_line},
    paths::{Selection, SelectionError},
};
use crate::{
    chain::Chain,
    doors::revert::{self, Revert},
    effect::{RoomId, Subject},
    ledger::record::ChangesState,
    room::{
        batch::{BatchKind, Conflict, Recovered},
        changes::{Change, ChangeKind},
        path::{printable, spell},
        place::{OpenPlace, PlaceError},
        undo::{self, OnChange, Plan, Wanted},
    },
};
use serde::Serialize;
use std::io::{self, Write};

/// Take back what a run changed in its workspace
///
/// Puts back exactly what the run's applied batches replaced, moved and deleted, and removes what they made: contents,
/// modes, times, extended attributes, links, directories. Nothing that the run did not touch is looked at. A path that
/// somebody changed since stays as it is and is named, and the exit status is then 1; `--all-or-nothing` leaves
/// everything instead, and `--overwrite` puts it back all the same. What an undo replaces is kept: `--redo` takes the
/// undo back. A crash in the middle leaves the workspace as before it or as after it.
///
/// It works for as long as the run's before-images are kept; `tollgate inspect RUN` says how much they take, and
/// `tollgate discard RUN --before-images` removes them.
#[derive(Clone, Debug, clap::Args)]
pub struct Undo {
    /// The run's id
    pub run: String,
    /// Only these paths of the workspace and what lies below them, or patterns such as `src/**/*.rs`
    #[arg(value_name = "PATH|GLOB")]
    pub paths: Vec<String>,
    /// Bring again what was undone
    #[arg(long)]
    pub redo: bool,
    /// Say what would be done, and do nothing
    #[arg(long)]
    pub dry_run: bool,
    /// Do nothing at all if anything was changed since
    #[arg(long, conflicts_with = "overwrite")]
    pub all_or_nothing: bool,
    /// Put back also what was changed since; a redo brings the present content again
    #[arg(long)]
    pub overwrite: bool,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// Why nothing was undone.
#[derive(Debug, thiserror::Error)]
pub enum UndoError {
    /// The run's before-images or its workspace cannot be read.
    #[error("cannot undo what run {run} changed")]
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
    /// There is nothing to take back.
    #[error("run {run} has nothing to {verb}{which}; `tollgate diff {run}` shows what it changed")]
    Nothing {
        /// The run.
        run: String,
        /// `undo` or `redo`.
        verb: &'static str,
        /// At which path, in words.
        which: String,
    },
    /// The output cannot be written.
    #[error("cannot write the report: {0}")]
    Write(#[source] io::Error),
}

/// What came of it, as `--json` shows it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct UndoReport {
    /// The run.
    pub run: String,
    /// `undo` or `redo`.
    pub direction: &'static str,
    /// Whether it was only tried.
    pub dry_run: bool,
    /// Each change, in the order of the paths.
    pub changes: Vec<Deed>,
    /// Paths that are already as they would become.
    pub already: Vec<String>,
    /// Paths that stay as they are, and why.
    pub conflicts: Vec<Conflict>,
    /// How many changes were done.
    pub done: usize,
    /// Why none was.
    pub failure: Option<String>,
    /// Where the run's changes stand now.
    pub state: ChangesState,
}

/// One change of an undo.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Deed {
    /// `remove`, `restore`, `rewrite`, `attributes` or `move`.
    #[serde(rename = "do")]
    pub verb: &'static str,
    /// The path.
    pub path: String,
    /// For a move: where it goes.
    pub to: Option<String>,
}

impl Deed {
    fn of(change: &Change) -> Deed {
        let path = spell(&change.path);
        let (verb, path, to) = match &change.kind {
            ChangeKind::Created => ("restore", path, None),
            ChangeKind::Modified => ("rewrite", path, None),
            ChangeKind::Deleted => ("remove", path, None),
            ChangeKind::Attributes => ("attributes", path, None),
            ChangeKind::Moved { from } => ("move", spell(from), Some(path)),
        };
        Deed { verb, path, to }
    }
}

/// Plans, passes the operator's chain and does it, or only says what it would do.
///
/// Finishes or undoes first what a crash left of an earlier batch, and says which.
///
/// # Errors
/// [`UndoError`]; a batch that failed is in the report.
#[allow(clippy::too_many_arguments, reason = "what `apply` takes, and how many receipts there are")]
pub async fn undo(
    args: &Undo,
    place: &OpenPlace,
    chain: &Chain,
    subject: Subject,
    room: Option<RoomId>,
    after_seq: u64,
    out: &mut dyn Write,
    talk: &mut dyn Write,
) -> Result<UndoReport, UndoError> {
    let failed = |source| UndoError::Place { run: args.run.clone(), source };
    let said = UndoError::Write;
    if !args.dry_run {
        super::apply::say_recovered(place.recover().map_err(failed)?, talk).map_err(said)?;
    }
    let root = place.place.workspace_path().unwrap_or_default();
    let selection = Selection::parse(&args.paths, &root)?;
    let holds = selection.as_ref().map(|selection| |path: &std::path::Path| selection.holds(path));
    let since_ns = undo::now_ns();
    let wanted = Wanted {
        kind: if args.redo { BatchKind::Undo } else { BatchKind::Apply },
        select: holds.as_ref().map(|holds| holds as &dyn Fn(&std::path::Path) -> bool),
        on_change: if args.overwrite { OnChange::Overwrite } else { OnChange::Leave },
        after_seq,
    };
    let plan = undo::plan(&place.run_dir, &place.workspace, &wanted).map_err(|error| failed(error.into()))?;
    let verb = if args.redo { "redo" } else { "undo" };
    if plan.considered == 0 {
        let which = match args.paths.is_empty() {
            true => String::new(),
            false => format!(" at `{}`", escape(&args.paths.join("`, `"))),
        };
        return Err(UndoError::Nothing { run: args.run.clone(), verb, which });
    }
    let mut report = UndoReport {
        run: args.run.clone(),
        direction: verb,
        dry_run: args.dry_run,
        changes: plan.reversal.changes.iter().map(Deed::of).collect(),
        already: plan.already.iter().map(|path| spell(path)).collect(),
        conflicts: plan.conflicts.clone(),
        done: 0,
        failure: None,
        state: ChangesState::None,
    };
    if !args.dry_run {
        carry_out(args, place, chain, (subject, room, since_ns), &plan, &mut report).await;
    }
    report.state = place.standing().map_err(failed)?;
    if args.json {
        json_line(out, &report).map_err(said)?;
    } else if args.dry_run {
        write_plan(&report, out).map_err(said)?;
    } else {
        write_report(&report, talk).map_err(said)?;
    }
    Ok(report)
}

async fn carry_out(
    args: &Undo,
    place: &OpenPlace,
    chain: &Chain,
    (subject, room, since_ns): (Subject, Option<RoomId>, i64),
    plan: &Plan,
    report: &mut UndoReport,
) {
    if args.all_or_nothing && !plan.conflicts.is_empty() {
        report.failure = Some("some paths were changed since, so nothing was done".to_owned());
        return;
    }
    let it = Revert {
        subject,
        room,
        run: place.place.run.clone(),
        run_dir: place.run_dir.clone(),
        workspace: place.workspace.clone(),
        since_ns,
    };
    let done = revert::revert(chain, &it, plan).await;
    report.done = done.done;
    report.failure = done.failure;
    report.conflicts.extend(done.conflicts);
}

/// One line a path, as data.
fn write_plan(report: &UndoReport, out: &mut dyn Write) -> io::Result<()> {
    for deed in &report.changes {
        write!(out, "{:<10} {}", deed.verb, shown(&deed.path))?;
        match &deed.to {
            Some(to) => writeln!(out, " -> {}", shown(to))?,
            None => writeln!(out)?,
        }
    }
    for path in &report.already {
        writeln!(out, "{:<10} {}", "already", shown(path))?;
    }
    for conflict in &report.conflicts {
        writeln!(out, "{:<10} {}: {}", "conflict", printable(&conflict.path), escape(&conflict.reason))?;
    }
    Ok(())
}

fn write_report(report: &UndoReport, talk: &mut dyn Write) -> io::Result<()> {
    if let Some(failure) = &report.failure {
        writeln!(talk, "error: {}", escape(failure))?;
    }
    for conflict in &report.conflicts {
        writeln!(talk, "left: {}: {}", printable(&conflict.path), escape(&conflict.reason))?;
    }
    if report.failure.is_none() {
        let past = if report.direction == "redo" { "redone" } else { "undone" };
        writeln!(talk, "{} {past}, {} left", report.done, report.conflicts.len())?;
    }
    Ok(())
}

fn shown(spelled: &str) -> String {
    crate::room::path::escape_controls(spelled)
}

/// What a crash left of an earlier batch, in words.
pub(super) fn recovered_in_words(recovered: Recovered) -> Option<&'static str> {
    match recovered {
        Recovered::Nothing => None,
        Recovered::RolledBack => Some("an interrupted batch was rolled back: the workspace was as before it"),
        Recovered::RolledForward => Some("an interrupted batch was rolled forward: its changes are in the workspace"),
    }
}
