//! `tollgate prune`: old runs' receipts go, and what is left still verifies.

use super::{
    output::{bytes, escape, json_line, Failure, Table},
    receipts::moment,
    standing,
};
use crate::{
    ledger::Ledger,
    policy::{limits::Bound, quantity},
    service::prune::{self, PruneError, Request, Undo},
};
use serde_json::json;
use std::{
    error::Error as _,
    io::Write,
    path::Path,
    process::ExitCode,
    time::{Duration, Instant},
};

/// Remove receipts, contents and logs of runs that are over, by age or by size, the oldest first.
///
/// A signed statement of what went stays in their place, so that `tollgate verify` holds and says it; the runs' records
/// and their heads in the host's chain stay too. A run that is live, has something in doubt, or whose changes are
/// pending is never pruned. What `tollgate undo` needs is neither counted nor removed without `--undo-data`.
#[derive(Clone, Debug, Default, clap::Args)]
#[command(group = clap::ArgGroup::new("which").required(true).multiple(true).args(["older_than", "keep_bytes"]))]
pub struct Args {
    /// Runs that ended longer ago than this, as in `30d`, or before this time, as in 2026-11-30T22:08:31Z
    #[arg(long, value_name = "AGE")]
    pub older_than: Option<String>,
    /// The oldest runs, until receipts, contents and run folders together take no more than this, as in `500MiB`
    #[arg(long, value_name = "SIZE", value_parser = quantity::size)]
    pub keep_bytes: Option<Bound<u64>>,
    /// Also remove what undoing these runs needs
    #[arg(long)]
    pub undo_data: bool,
    /// Say what would go, and remove nothing
    #[arg(long, short = 'n')]
    pub dry_run: bool,
    /// Print one JSON object a line: each run, then the whole
    #[arg(long)]
    pub json: bool,
}

/// How long the work may be silent.
const SILENT: Duration = Duration::from_secs(1);

/// Prunes.
///
/// # Errors
/// Those of the ledger, of removing files and of writing to `out`.
pub fn run(args: &Args, state: &Path, out: &mut dyn Write, talk: &mut dyn Write) -> Result<ExitCode, Failure> {
    let Some(ledger) = standing::ledger(state)? else {
        return Ok(ExitCode::SUCCESS);
    };
    let now = ledger.clock().now();
    let request = Request {
        ended_before: args.older_than.as_deref().map(|text| moment(text, now)).transpose()?,
        keep_bytes: args.keep_bytes.and_then(|keep| match keep {
            Bound::At(keep) => Some(keep),
            Bound::Unlimited => None,
        }),
        undo: if args.undo_data { Undo::Removed } else { Undo::Kept },
    };
    let ledger = match args.dry_run {
        true => ledger,
        false => {
            // Of a run whose supervisor died nothing is certain before it is closed.
            let ledger = Ledger::open(state)?;
            ledger.writable()?;
            crate::service::recovery::recover(&ledger);
            ledger
        }
    };
    let plan = prune::plan(&ledger, &request).map_err(failure)?;
    let action = if args.dry_run { "would-prune" } else { "pruned" };
    let done = match args.dry_run {
        true => None,
        false => {
            let mut told = Instant::now();
            let mut progress = |index: usize, receipts: u64| {
                if told.elapsed() >= SILENT {
                    told = Instant::now();
                    // With standard error closed there is nobody to tell.
                    let _ =
                        writeln!(talk, "pruning run {} of {}, {receipts} receipts gone", index + 1, plan.prune.len());
                }
            };
            Some(prune::prune(&ledger, &plan, request.undo, &mut progress).map_err(failure)?)
        }
    };
    let notes = done.as_ref().map(|done| done.notes.clone()).unwrap_or_default();
    let receipts = plan.prune.iter().map(|run| run.receipts).sum::<u64>();
    if args.json {
        for one in &plan.prune {
            let value = json!({
                "run": one.run, "action": action, "ended_at": one.ended_at, "receipts": one.receipts, "bytes": one.bytes,
            });
            json_line(out, &value)?;
        }
        for (run, why) in &plan.kept {
            json_line(out, &json!({ "run": run, "action": "kept", "why": why }))?;
        }
        let value = json!({
            "action": action, "runs": plan.prune.len(), "receipts": receipts, "bytes": plan.bytes,
            "left_bytes": plan.left_bytes, "blobs": done.as_ref().map(|done| done.blobs), "notes": notes,
        });
        json_line(out, &value)?;
    } else {
        let mut table = Table::new(out, ["RUN", "ENDED", "RECEIPTS", "SIZE"]);
        for one in &plan.prune {
            let ended = one.ended_at.get(..19).unwrap_or(&one.ended_at);
            table.row([escape(&one.run.0), escape(ended), one.receipts.to_string(), bytes(one.bytes)])?;
        }
        table.finish()?;
        for (run, why) in &plan.kept {
            writeln!(out, "kept {}: {why}", escape(&run.0))?;
        }
        for note in &notes {
            writeln!(out, "note: {}", escape(note))?;
        }
        let verb = if args.dry_run { "would go" } else { "went" };
        writeln!(
            out,
            "{} runs with {receipts} receipts {verb}; about {} of {} stay",
            plan.prune.len(),
            bytes(plan.left_bytes),
            bytes(plan.bytes)
        )?;
    }
    out.flush()?;
    Ok(ExitCode::SUCCESS)
}

fn failure(error: PruneError) -> Failure {
    match error {
        PruneError::Ledger(error) => error.into(),
        error @ PruneError::Io { .. } => {
            let failure = Failure::new(error.to_string(), "what went until then is said in the ledger; prune again");
            match error.source() {
                Some(source) => failure.because(source),
                None => failure,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::ps::tests::ledger_with_two_runs;

    #[test]
    fn a_dry_run_changes_nothing_and_a_live_run_is_named() {
        let (_root, ledger) = ledger_with_two_runs();
        let folder = ledger.run_dir(&crate::effect::RunId("bbbbbbbbbbb1".to_owned()));
        std::fs::create_dir_all(&folder).expect("makes");
        std::fs::write(folder.join("stdout.log"), "x").expect("writes");
        let args = Args { keep_bytes: Some(Bound::At(1)), dry_run: true, json: true, ..Args::default() };
        let mut out = Vec::new();
        run(&args, ledger.state(), &mut out, &mut Vec::new()).expect("plans");
        let lines: Vec<serde_json::Value> = String::from_utf8(out)
            .expect("text")
            .lines()
            .map(|line| serde_json::from_str(line).expect("JSON"))
            .collect();
        assert_eq!((lines[0]["run"].as_str(), lines[0]["action"].as_str()), (Some("bbbbbbbbbbb1"), Some("kept")));
        assert_eq!((lines[1]["action"].as_str(), lines[1]["runs"].as_u64()), (Some("would-prune"), Some(0)));
        run(&Args { dry_run: false, ..args }, ledger.state(), &mut Vec::new(), &mut Vec::new()).expect("prunes");
        assert!(folder.join("stdout.log").exists());
    }
}
