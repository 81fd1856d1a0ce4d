//! The command line: one file a subcommand.

pub mod apply;
pub mod approvals;
pub mod approve;
pub mod changes;
pub mod completions;
pub mod deny;
pub mod diff;
pub mod discard;
pub mod doctor;
pub mod explain;
pub mod export;
pub mod inspect;
pub mod kill;
pub mod logs;
pub mod man;
pub mod output;
pub mod paths;
pub mod plan;
pub mod policy;
pub mod prune;
pub mod ps;
pub mod quota;
pub mod receipts;
pub mod recording;
pub mod reference;
pub mod resume;
pub mod run;
pub mod standing;
pub mod undo;
pub mod verify;

use crate::policy::search::SearchPath;
use clap::{CommandFactory as _, FromArgMatches as _, Parser, Subcommand};
use output::Failure;
use std::{ffi::OsString, io, path::PathBuf, process::ExitCode};

/// Run programs you do not trust: every effect passes one gate and gets a receipt.
#[derive(Parser, Debug)]
#[command(name = "tollgate", version, max_term_width = 100)]
pub struct Cli {
    /// The state directory [default: $TOLLGATE_STATE, else $XDG_STATE_HOME/tollgate, else ~/.local/state/tollgate]
    #[arg(long, global = true, value_name = "DIR", hide_short_help = true)]
    pub state: Option<PathBuf>,
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The subcommands. A comment on a variant would replace the help that its arguments have, so there is none.
#[allow(missing_docs)]
#[derive(Subcommand, Debug)]
pub enum Command {
    Run(Box<run::Args>),
    Ps(ps::Args),
    Inspect(inspect::Args),
    Logs(logs::Args),
    Kill(kill::Args),
    Receipts(receipts::Args),
    Explain(explain::Args),
    Recording(recording::Args),
    Verify(verify::Args),
    Export(export::Args),
    Prune(prune::Args),
    Diff(diff::Diff),
    Apply(apply::Apply),
    Discard(discard::Discard),
    Undo(undo::Undo),
    Plan(plan::Args),
    Resume(resume::Args),
    Approvals(approvals::Args),
    Approve(approve::Args),
    Deny(deny::Args),
    Quota(quota::Args),
    Doctor(doctor::DoctorArgs),
    Policy(policy::PolicyArgs),
    Completions(completions::Args),
    Man(man::Args),
}

/// Runs the command line and gives its exit status.
pub fn main() -> ExitCode {
    tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::try_from_env("TOLLGATE_LOG").unwrap_or_else(|_| "error".into()))
        .with_writer(io::stderr)
        .init();
    let cli = parse(std::env::args_os()).unwrap_or_else(|error| error.exit());
    match dispatch(cli) {
        Ok(status) => status,
        Err(failure) => failure.report(),
    }
}

/// Reads a command line, and what derived arguments do not keep: the order of the answering handlers.
fn parse(words: impl IntoIterator<Item = OsString>) -> Result<Cli, clap::Error> {
    let matches = Cli::command().try_get_matches_from(words)?;
    let mut cli = Cli::from_arg_matches(&matches)?;
    if let (Command::Run(args), Some(("run", matches))) = (&mut cli.command, matches.subcommand()) {
        args.note_order(matches);
    }
    Ok(cli)
}

fn dispatch(cli: Cli) -> Result<ExitCode, Failure> {
    let Cli { state, command } = cli;
    if let Command::Run(args) = command {
        return run::run(*args, state.as_deref());
    }
    if let Command::Resume(args) = command {
        return resume::run(&args, state.as_deref());
    }
    if let Command::Doctor(args) = command {
        return Ok(doctor::run(&args));
    }
    let mut out = io::BufWriter::new(io::stdout().lock());
    // These need no state directory, and so no home.
    match &command {
        Command::Completions(args) => return completions::run(args, &mut out),
        Command::Man(args) => return man::run(args, &mut out),
        _ => {}
    }
    let state = match state {
        Some(path) => path,
        None => crate::ledger::state_dir().map_err(|error| Failure::new(error.to_string(), ""))?,
    };
    let status = match command {
        Command::Run(_) | Command::Resume(_) | Command::Doctor(_) | Command::Completions(_) | Command::Man(_) => {
            unreachable!("handled above")
        }
        Command::Ps(args) => ps::run(&args, &state, &mut out),
        Command::Inspect(args) => inspect::run(&args, &state, &mut out),
        Command::Logs(args) => logs::run(&args, &state, &mut out, &mut io::stderr()),
        Command::Kill(args) => kill::run(&args, &state, &mut out, &mut io::stderr()),
        Command::Receipts(args) => receipts::run(&args, &state, &mut out),
        Command::Explain(args) => explain::run(&args, &state, &mut out),
        Command::Recording(args) => recording::run(&args, &state, &mut out),
        Command::Verify(args) => verify::run(&args, &state, &mut out),
        Command::Export(args) => export::run(&args, &state, &mut out),
        Command::Prune(args) => prune::run(&args, &state, &mut out, &mut io::stderr()),
        Command::Diff(args) => changes::diff(&args, &state, &mut out),
        Command::Apply(args) => changes::apply(&args, &state, &mut out, &mut io::stderr()),
        Command::Discard(args) => changes::discard(&args, &state, &mut out, &mut io::stderr()),
        Command::Plan(args) => plan::run(&args, &state, &mut out, &mut io::stderr()),
        Command::Undo(args) => changes::undo(&args, &state, &mut out, &mut io::stderr()),
        Command::Approvals(args) => approvals::run(&args, &state, &mut out, &mut io::stderr()),
        Command::Approve(args) => approve::run(&args, &state, &mut out, &mut io::stderr()),
        Command::Deny(args) => deny::run(&args, &state, &mut out, &mut io::stderr()),
        Command::Quota(args) => quota::run(&args, &state, &mut out, &mut io::stderr()),
        Command::Policy(args) => {
            let answer = policy::run(&args, &search_path(), &mut out, &mut io::stderr());
            answer.map(|()| ExitCode::SUCCESS).map_err(policy_failure)
        }
    }?;
    io::Write::flush(&mut out)?;
    Ok(status)
}

/// Where this user's policies are looked for.
pub fn search_path() -> SearchPath {
    let variable = |name| std::env::var_os(name).map(PathBuf::from);
    SearchPath::of_user(variable("XDG_CONFIG_HOME"), variable("HOME"))
}

fn policy_failure(error: policy::PolicyCommandError) -> Failure {
    match error {
        policy::PolicyCommandError::Policy(error) => Failure::from(&error),
        policy::PolicyCommandError::Write(error) => Failure::from(error),
        faulty @ policy::PolicyCommandError::Faulty { .. } => Failure::new(faulty.to_string(), ""),
    }
}
