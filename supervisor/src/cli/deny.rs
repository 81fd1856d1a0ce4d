//! `tollgate deny`: a person's no.

use super::{
    approvals::{self, Named},
    output::{json_line, Failure},
};
use crate::{chain::approval::Word, ledger::Ledger};
use std::{io::Write, path::Path, process::ExitCode};

/// Refuse what waits for a person.
///
/// The program's call fails at once, with a receipt that says who said no. Asked again, it is asked about again; what
/// must never pass belongs into a `[[deny]]` of the policy.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// The id, as `tollgate approvals` shows it
    pub id: String,
    /// Print what was decided as JSON
    #[arg(long)]
    pub json: bool,
}

/// Gives the word.
///
/// # Errors
/// When nothing of that name waits, or it is a held change, which is not applied unless somebody says so.
pub fn run(args: &Args, state: &Path, out: &mut dyn Write, talk: &mut dyn Write) -> Result<ExitCode, Failure> {
    let ledger = Ledger::open(state)?;
    match approvals::find(&ledger, &args.id)? {
        Named::Question { run, id } => {
            let decided = approvals::decide(&ledger, &run, &id, Word::Deny)?;
            writeln!(talk, "denied {id}: {}", decided.covers)?;
            if args.json {
                json_line(out, &decided)?;
            }
            Ok(ExitCode::SUCCESS)
        }
        Named::Held(record, held) => Err(Failure::new(
            format!("{} is refused already, and held in case somebody wants it", held.id),
            format!("`tollgate discard {}` throws the run's pending changes away", record.id),
        )),
    }
}
