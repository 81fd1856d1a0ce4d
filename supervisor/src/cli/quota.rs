//! `tollgate quota`: budgets that runs share.

use super::{
    output::{escape, json_line, Failure, Table},
    standing,
};
use crate::{
    chain::quota::{Amounts, Unit},
    ledger::{quota::QuotaLine, Ledger},
    policy::{limits::Bound, quantity},
};
use serde::Serialize;
use std::{io::Write, path::Path, process::ExitCode};

/// Show and set budgets that runs share.
///
/// A run is charged to a quota by `tollgate run --quota ID`; all runs that name one id, in whatever process, together
/// stay within its limits.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// What to do.
    #[command(subcommand)]
    pub what: What,
}

/// What to do with quotas.
#[derive(Clone, Debug, clap::Subcommand)]
pub enum What {
    /// List the quotas, a line for each unit
    List {
        /// Print one JSON object a line
        #[arg(long)]
        json: bool,
    },
    /// Show one quota and the runs that are charged to it
    Show {
        /// The quota
        id: String,
        /// Print one JSON object
        #[arg(long)]
        json: bool,
    },
    /// Make a quota, or change its limits; runs that are under way feel it with their next effect
    Set {
        /// The quota: letters, digits, `.`, `_` and `-`
        id: String,
        /// At most so many bytes written
        #[arg(long, value_name = "SIZE", value_parser = size)]
        write_bytes: Option<u64>,
        /// At most so many effects, whatever they are
        #[arg(long, value_name = "COUNT", value_parser = count)]
        effects: Option<u64>,
        /// At most so many bytes sent to hosts outside
        #[arg(long, value_name = "SIZE", value_parser = size)]
        egress_bytes: Option<u64>,
        /// Forget what was used until now
        #[arg(long)]
        reset: bool,
    },
}

/// One quota, as `show --json` prints it.
#[derive(Serialize)]
struct Whole<'a> {
    id: &'a str,
    limits: &'a [QuotaLine],
    runs: &'a [String],
}

/// Whether a text can be a quota's id.
///
/// # Errors
/// What is wrong with it.
pub fn check_id(id: &str) -> Result<(), String> {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    match !id.is_empty() && id.len() <= 64 && !id.starts_with('-') && id.bytes().all(plain) {
        true => Ok(()),
        false => {
            Err("a quota's id has 1 to 64 letters, digits, `.`, `_` and `-`, and does not start with `-`".to_owned())
        }
    }
}

fn size(text: &str) -> Result<u64, String> {
    match quantity::size(text) {
        Ok(Bound::At(bytes)) => Ok(bytes),
        Ok(Bound::Unlimited) => Err("a quota without a limit is none; leave the option out".to_owned()),
        Err(error) => Err(format!("it {error}; write {}", quantity::SIZE_FORM)),
    }
}

fn count(text: &str) -> Result<u64, String> {
    match quantity::count(text) {
        Ok(Bound::At(count)) => Ok(count),
        Ok(Bound::Unlimited) => Err("a quota without a limit is none; leave the option out".to_owned()),
        Err(error) => Err(format!("it {error}; write {}", quantity::COUNT_FORM)),
    }
}

/// Does it.
///
/// # Errors
/// When there is no such quota, and those of the ledger and of writing.
pub fn run(args: &Args, state: &Path, out: &mut dyn Write, talk: &mut dyn Write) -> Result<ExitCode, Failure> {
    match &args.what {
        What::List { json } => {
            let lines = match standing::ledger(state)? {
                Some(ledger) => ledger.quotas()?,
                None => Vec::new(),
            };
            match json {
                true => lines.iter().try_for_each(|line| json_line(out, line))?,
                false => show_lines(out, &lines)?,
            }
        }
        What::Show { id, json } => {
            let ledger = standing::ledger(state)?.ok_or_else(|| Failure::new(format!("no quota `{id}`"), HOW))?;
            let (lines, runs) = (ledger.quota(id)?, ledger.quota_runs(id)?);
            match json {
                true => json_line(out, &Whole { id, limits: &lines, runs: &runs })?,
                false => {
                    show_lines(out, &lines)?;
                    writeln!(out, "runs {}", if runs.is_empty() { "none".to_owned() } else { runs.join(" ") })?;
                }
            }
        }
        What::Set { id, write_bytes, effects, egress_bytes, reset } => {
            let usage = |message: String| Failure { status: 2, ..Failure::new(message, HOW) };
            check_id(id).map_err(usage)?;
            let limits: Amounts =
                [(Unit::WriteBytes, *write_bytes), (Unit::Effects, *effects), (Unit::EgressBytes, *egress_bytes)]
                    .into_iter()
                    .filter_map(|(unit, limit)| Some((unit, limit?)))
                    .collect();
            if limits.is_empty() && !reset {
                return Err(usage("nothing to set".to_owned()));
            }
            let ledger = Ledger::open(state)?;
            ledger.set_quota(id, &limits)?;
            if *reset {
                ledger.reset_quota(id)?;
            }
            for line in ledger.quota(id)? {
                writeln!(talk, "quota {id}: {} of {} {} used", line.used, line.limit, line.unit)?;
            }
        }
    }
    out.flush()?;
    Ok(ExitCode::SUCCESS)
}

const HOW: &str =
    "`tollgate quota set ID --write-bytes SIZE`, `--effects COUNT` or `--egress-bytes SIZE` makes one; `tollgate quota list` lists them";

/// Prints how quotas stand.
///
/// # Errors
/// As write(2).
pub fn show_lines(out: &mut dyn Write, lines: &[QuotaLine]) -> std::io::Result<()> {
    let rows = lines.iter().map(|line| {
        [
            escape(&line.id),
            line.unit.to_owned(),
            line.used.to_string(),
            line.reserved.to_string(),
            line.left.to_string(),
            line.limit.to_string(),
        ]
    });
    Table::print_all(out, ["QUOTA", "UNIT", "USED", "RESERVED", "LEFT", "LIMIT"], rows)
}
