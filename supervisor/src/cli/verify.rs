//! `tollgate verify`: whether a run's receipts are the ones that were written.

use super::{
    output::{escape, json_line, Failure},
    standing,
};
use crate::ledger::verify::{Broken, Verification};
use std::{io::Write, path::Path, process::ExitCode};

/// Check that no receipt of a run was changed, removed or added since it was written.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// The run: its id, a unique beginning of one, or `latest`
    pub run: String,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// Recomputes a run's chain and the host's, and says what holds.
///
/// # Errors
/// When there is no such run, and when a chain is broken, with the first place that does not hold.
pub fn run(args: &Args, state: &Path, out: &mut dyn Write) -> Result<ExitCode, Failure> {
    let (ledger, record) = standing::find(state, &args.run)?;
    let Verification { run, count, head, sealed } = ledger.verify_run(&record.id).map_err(broken)?;
    let heads = ledger.verify_heads().map_err(broken)?;
    let place = sealed.map(|sealed| sealed.n);
    if args.json {
        let value = serde_json::json!({
            "run": run.0, "receipts": count, "head": head.to_string(), "sealed_as": place, "heads": heads,
        });
        json_line(out, &value)?;
    } else {
        let receipts = if count == 1 { "receipt" } else { "receipts" };
        let sealed = match place {
            Some(n) => format!("sealed as head {n} of {heads}"),
            None => "not sealed while the run goes on".to_owned(),
        };
        writeln!(out, "run {}: {count} {receipts} hold, {sealed}\nhead {head}", escape(&run.0))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn broken(cause: Broken) -> Failure {
    match cause {
        Broken::Ledger(error) => error.into(),
        Broken::Receipt { .. } | Broken::Head { .. } | Broken::Counts { .. } => {
            Failure::new(cause.to_string(), "do not rely on this ledger from there on; keep a copy of it as evidence")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::ps::tests::ledger_with_two_runs;

    fn verify(state: &Path, run: &str) -> Result<String, Failure> {
        let mut out = Vec::new();
        super::run(&Args { run: run.to_owned(), json: false }, state, &mut out)?;
        Ok(String::from_utf8(out).expect("text"))
    }

    #[test]
    fn an_untouched_chain_holds() {
        let (_root, ledger) = ledger_with_two_runs();
        let said = verify(ledger.state(), "latest").expect("holds");
        assert!(said.contains(" hold, ") && said.contains("\nhead "), "{said}");
    }

    #[test]
    fn a_count_that_was_changed_in_the_file_is_a_failure() {
        let (_root, ledger) = ledger_with_two_runs();
        let id = ledger.run("latest").expect("there").id;
        let state = ledger.state().to_owned();
        drop(ledger);
        let file = rusqlite::Connection::open(state.join("ledger.db")).expect("opens");
        let changed =
            file.execute("UPDATE chains SET count = count + 1 WHERE run = (SELECT n FROM runs WHERE id = ?1)", [&id.0]);
        assert_eq!(changed.expect("changes"), 1);
        drop(file);
        assert!(verify(&state, &id.0).is_err());
    }
}
