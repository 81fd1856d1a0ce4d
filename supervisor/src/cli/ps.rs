//! `tollgate ps`: which runs there are.

use super::{
    output::{bytes, command_line, duration, escape, json_line, shorten, Failure, Table},
    standing,
};
use crate::{
    jail::cgroup::{self, CgroupEnvironment},
    ledger::{
        record::{RunMode, RunRecord, RunState},
        RunQuery, Timestamp, Which,
    },
};
use std::{io::Write, path::Path, process::ExitCode};

/// List runs, the newest first.
///
/// A run whose supervisor died is shown as `interrupted`, and the ledger is told.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// Also list runs that are over
    #[arg(long, short)]
    pub all: bool,
    /// At most this many
    #[arg(long, value_name = "N")]
    pub limit: Option<u64>,
    /// Print one JSON object a line
    #[arg(long)]
    pub json: bool,
}

/// Lists the runs of this state directory.
///
/// # Errors
/// Those of the ledger and of writing to `out`.
pub fn run(args: &Args, state: &Path, out: &mut dyn Write) -> Result<ExitCode, Failure> {
    let mut table = Table::new(out, ["RUN", "STATE", "AGE", "POLICY", "EFFECTS", "REFUSED", "WRITTEN", "COMMAND"]);
    if let Some(ledger) = standing::ledger(state)? {
        let which = if args.all { Which::All } else { Which::Live };
        let now = ledger.clock().now();
        for record in ledger.runs(RunQuery { all: which, limit: args.limit, since: None })? {
            // What is found interrupted just now is shown once even to those who asked for live runs only.
            let record = standing::with_live_usage(&ledger, standing::settle(&ledger, record)?);
            match args.json {
                true => json_line(table.out(), &record)?,
                false => table.row(row(&record, now))?,
            }
        }
        // A supervisor killed between a run's last record and the removal of its group leaves a group that no
        // recovery looks for.
        cgroup::sweep(&CgroupEnvironment::detect(), |run| {
            ledger.run(&run.0).is_ok_and(|record| record.id == *run && record.state == RunState::Ended)
        });
    }
    if !args.json {
        table.finish()?;
    }
    out.flush()?;
    Ok(ExitCode::SUCCESS)
}

fn row(record: &RunRecord, now: Timestamp) -> [String; 8] {
    let age = match record.started_at.parse::<Timestamp>() {
        Ok(started) => duration(u64::try_from(now.0.saturating_sub(started.0)).unwrap_or(0)),
        Err(_unreadable) => "?".to_owned(),
    };
    [
        escape(&record.id.0),
        match record.mode {
            RunMode::Live => standing::word(record),
            RunMode::Preflight => format!("{} (preflight)", standing::word(record)),
            RunMode::Planned { .. } => format!("{} (planned)", standing::word(record)),
        },
        age,
        shorten(&escape(&record.policy), 20),
        record.effects.count.to_string(),
        record.effects.refused.to_string(),
        bytes(record.usage.write_bytes),
        shorten(&command_line(&record.command), 80),
    ]
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::{
        doors::control::tests::record,
        ledger::{record::OutcomeType, Ledger},
    };

    /// A run of a supervisor that never was, and one of this very process.
    pub(crate) fn ledger_with_two_runs() -> (tempfile::TempDir, Ledger) {
        let root = tempfile::tempdir().expect("a temporary directory");
        let ledger = Ledger::open(&root.path().join("state")).expect("opens");
        let mut dead = record("aaaaaaaaaaa1", 0);
        dead.supervisor_pid = u32::MAX;
        dead.command = vec!["sh".to_owned(), "-c".to_owned(), "\x1b[2Jevil".to_owned()];
        let mut alive = record("bbbbbbbbbbb1", 0);
        alive.supervisor_started = standing::process_started(std::process::id()).expect("runs");
        ledger.insert_run(&dead).expect("inserts");
        ledger.insert_run(&alive).expect("inserts");
        (root, ledger)
    }

    fn printed(args: &Args, ledger: &Ledger) -> String {
        let mut out = Vec::new();
        run(args, ledger.state(), &mut out).expect("lists");
        String::from_utf8(out).expect("is text")
    }

    #[test]
    fn a_run_without_a_supervisor_is_interrupted_and_the_ledger_is_told() {
        let (_root, ledger) = ledger_with_two_runs();
        let args = Args { all: false, limit: None, json: false };
        let text = printed(&args, &ledger);
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines[1].starts_with("bbbbbbbbbbb1  running"), "{text}");
        assert!(lines[2].starts_with("aaaaaaaaaaa1  interrupted"), "{text}");
        assert!(!text.contains('\x1b'), "control characters are escaped");
        let told = ledger.run("aaaaaaaaaaa1").expect("is there");
        assert_eq!(told.state, RunState::Ended);
        assert_eq!(told.outcome.expect("has one").kind, OutcomeType::Interrupted);
        assert!(!printed(&args, &ledger).contains("aaaaaaaaaaa1"), "it is over now");
        assert!(printed(&Args { all: true, ..args }, &ledger).contains("aaaaaaaaaaa1"));
    }

    #[test]
    fn json_is_one_record_a_line() {
        let (_root, ledger) = ledger_with_two_runs();
        let text = printed(&Args { all: true, limit: Some(1), json: true }, &ledger);
        let record: RunRecord = serde_json::from_str(&text).expect("is one record");
        assert_eq!(record.id.0, "bbbbbbbbbbb1");
    }

    #[test]
    fn without_a_ledger_there_are_no_runs() {
        let root = tempfile::tempdir().expect("a temporary directory");
        let mut out = Vec::new();
        run(&Args { all: true, limit: None, json: true }, root.path(), &mut out).expect("lists");
        assert!(out.is_empty());
    }
}
