//! `tollgate plan RUN`: what a preflighted run would have done.

use super::{
    output::{bytes, escape, json_line, Failure, Table},
    standing,
};
use crate::{
    chain::preflight::{Answered, Planned, Would},
    effect::{fs, Request},
    service::plan::Plan,
};
use std::{io::Write, path::Path, process::ExitCode};

/// Show what a run with `--preflight` planned
///
/// One line an effect, in order: its kind, object and size, and what the policy would say of it, with the rule. Effects
/// after the first answer that a live run might not get are marked as uncertain: from there the program may take
/// another way. `--propose` prints the narrowest policy that would allow exactly these effects instead.
///
/// What to do with a plan: `tollgate apply RUN` puts its files into the workspace and does nothing else; `tollgate run
/// --plan RUN -- COMMAND` runs live and allows only what was planned.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// The run: its id, a unique beginning of one, or `latest`
    pub run: String,
    /// Print a policy that allows exactly this, for `tollgate run --policy FILE`
    #[arg(long, conflicts_with = "json")]
    pub propose: bool,
    /// Print one JSON object a line
    #[arg(long)]
    pub json: bool,
}

/// Shows the plan.
///
/// # Errors
/// When the run has none, and those of the ledger and of writing to `out`.
pub fn run(args: &Args, state: &Path, out: &mut dyn Write, talk: &mut dyn Write) -> Result<ExitCode, Failure> {
    let (ledger, record) = standing::find(state, &args.run)?;
    let plan = Plan::of(&ledger, &record.id).map_err(|error| Failure::new(error.to_string(), ""))?;
    if args.propose {
        out.write_all(plan.proposal.as_bytes())?;
    } else if args.json {
        plan.effects.iter().try_for_each(|effect| json_line(out, effect))?;
    } else {
        let mut table = Table::new(out, ["N", "EFFECT", "OBJECT", "SIZE", "POLICY", "ANSWER", "BY"]);
        plan.effects.iter().try_for_each(|effect| table.row(row(effect)))?;
        table.finish()?;
    }
    out.flush()?;
    // With standard error closed there is nobody to tell.
    if plan.unlisted > 0 {
        let _ = writeln!(talk, "the program asked for {} more effects than a plan lists", plan.unlisted);
    }
    Ok(ExitCode::SUCCESS)
}

fn row(effect: &Planned) -> [String; 7] {
    let object = match &effect.request {
        Request::Fs(fs::Request::Move { path, to }) => format!("{} -> {}", escape(path), escape(to)),
        _ => escape(&effect.resource.to_string()),
    };
    let would = match effect.would {
        Would::Allowed => "allowed",
        Would::Asked => "asked",
        Would::Refused => "refused",
    };
    let answered = match effect.answered {
        Answered::InTheRun => "in the run",
        Answered::StandIn => "stand-in",
        Answered::Refused => "refused",
        Answered::NotAsked => "-",
    };
    let uncertain = if effect.uncertain { " (uncertain)" } else { "" };
    let by = if effect.rule.is_empty() { &effect.reason } else { &effect.rule };
    [
        effect.n.to_string(),
        effect.kind.name().to_owned(),
        object,
        if effect.bytes > 0 { bytes(effect.bytes) } else { "-".to_owned() },
        would.to_owned(),
        format!("{answered}{uncertain}"),
        escape(by),
    ]
}
