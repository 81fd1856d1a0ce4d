//! `tollgate recording`: look at a run's recording, or take it elsewhere.

use super::{
    output::{command_line, escape, json_line, Failure},
    standing,
};
use crate::{
    chain::{recording::Recording, replay::ReplayReport},
    service::run::RECORDING,
};
use std::{
    io::{Read as _, Write},
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
    process::ExitCode,
};

/// Look at a run's recording, or take it elsewhere.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// What to do with it
    #[command(subcommand)]
    pub command: Command,
}

/// The subcommands.
#[derive(Clone, Debug, clap::Subcommand)]
pub enum Command {
    /// List what a recording holds, once its seal is checked
    Show(Show),
    /// Write a recording as one file, which `tollgate run --replay FILE` takes on any machine
    Export(Export),
}

/// List what a recording holds, once its seal is checked.
#[derive(Clone, Debug, clap::Args)]
pub struct Show {
    /// A run, or a file of `tollgate recording export`
    pub recording: String,
    /// Print one JSON object a line: the head, each entry, the end
    #[arg(long)]
    pub json: bool,
}

/// Write a recording as one file, which `tollgate run --replay FILE` takes on any machine.
#[derive(Clone, Debug, clap::Args)]
pub struct Export {
    /// The run: its id, a unique beginning of one, or `latest`
    pub run: String,
    /// The file to make [default: standard output]
    #[arg(long, short, value_name = "FILE")]
    pub output: Option<PathBuf>,
}

/// Shows or exports.
///
/// # Errors
/// When there is no such recording, or it was changed, and those of writing.
pub fn run(args: &Args, state: &Path, out: &mut dyn Write) -> Result<ExitCode, Failure> {
    match &args.command {
        Command::Show(show) => self::show(&load(&show.recording, state)?, show.json, out)?,
        Command::Export(export) => self::export(export, state, out)?,
    }
    out.flush()?;
    Ok(ExitCode::SUCCESS)
}

/// The recording that the user means: a file where there is one of this name, else a run's.
///
/// # Errors
/// When there is none, or it is not whole.
pub fn load(reference: &str, state: &Path) -> Result<Recording, Failure> {
    let path = match reference.contains('/') || Path::new(reference).is_file() {
        true => PathBuf::from(reference),
        false => path_of(reference, state)?,
    };
    Recording::load(&path)
        .map_err(|error| Failure::new(error.to_string(), "record the run anew, with `tollgate run --record`"))
}

fn path_of(run: &str, state: &Path) -> Result<PathBuf, Failure> {
    let (ledger, record) = standing::find(state, run)?;
    let path = ledger.run_dir(&record.id).join(RECORDING);
    match path.exists() {
        true => Ok(path),
        false => Err(Failure::new(
            format!("the run {} was not recorded", escape(&record.id.0)),
            "record a run with `tollgate run --record -- COMMAND`",
        )),
    }
}

fn export(export: &Export, state: &Path, out: &mut dyn Write) -> Result<(), Failure> {
    let path = path_of(&export.run, state)?;
    // Checked first: a file that is handed on should be one that can be replayed.
    load(&path.to_string_lossy(), state)?;
    let mut from = std::fs::File::open(&path)?;
    match &export.output {
        Some(to) => {
            let made = std::fs::File::options().create_new(true).write(true).mode(0o600).open(to);
            let mut made = made.map_err(|error| {
                Failure::new(format!("{}: {error}", to.display()), "name a file that is not there yet with --output")
            })?;
            std::io::copy(&mut from, &mut made)?;
            made.sync_all()?;
        }
        None => {
            let mut piece = vec![0; 64 * 1024];
            loop {
                let length = from.read(&mut piece)?;
                if length == 0 {
                    break;
                }
                out.write_all(&piece[..length])?;
            }
        }
    }
    Ok(())
}

fn show(recording: &Recording, json: bool, out: &mut dyn Write) -> Result<(), Failure> {
    let Recording { head, base, entries, contents, end, digest } = recording;
    if json {
        json_line(out, &serde_json::json!({ "head": head, "digest": digest, "base": base.len() }))?;
        for entry in entries {
            json_line(out, &serde_json::json!({ "entry": entry }))?;
        }
        json_line(out, &serde_json::json!({ "end": end }))?;
        return Ok(());
    }
    writeln!(out, "recording    {digest}")?;
    writeln!(out, "of run       {}, {}", escape(&head.run.0), escape(&head.recorded_at))?;
    writeln!(out, "command      {}", command_line(&head.command))?;
    writeln!(out, "policy       {} (sha256 {})", escape(&head.policy), escape(&head.policy_digest))?;
    writeln!(out, "workspace    {} ({} files and folders)", escape(&head.workspace), base.len())?;
    let given = end.stdin.map_or(0, |stdin| stdin.bytes);
    writeln!(out, "input        {given} bytes; {} contents in all", contents.len())?;
    writeln!(out, "exit status  {}", end.exit_status)?;
    for entry in entries {
        let answer = &entry.answer;
        let injected = if answer.injected { ", injected" } else { "" };
        let decision = serde_json::to_value(answer.decision).unwrap_or_default();
        writeln!(
            out,
            "{:>5} {:<9} {:<12} {} ({} bytes{injected})",
            entry.seq,
            entry.door.name(),
            entry.kind.name(),
            escape(&entry.resource.to_string()),
            answer.bytes,
        )?;
        if !answer.reason.is_empty() {
            writeln!(out, "      {}: {}", decision.as_str().unwrap_or_default(), escape(&answer.reason))?;
        }
    }
    Ok(())
}

/// What a replay found, in lines.
pub fn report_lines(report: &ReplayReport) -> Vec<String> {
    let mut lines = Vec::new();
    let what = match report.substituted {
        Some(seq) => format!("counterfactual replay, with another answer for entry {seq}"),
        None => "replay".to_owned(),
    };
    let answered = match report.answered {
        1 => "1 effect".to_owned(),
        more => format!("{more} effects"),
    };
    lines.push(match report.is_same() {
        true => format!("{what}: as recorded; {answered} answered, none done"),
        false => format!("{what}: not as recorded; {answered} answered, none done"),
    });
    lines.extend(report.divergences.iter().take(3).map(|divergence| format!("differs: {divergence}")));
    let more = report.diverged.saturating_sub(3);
    if more > 0 {
        lines.push(format!("and {more} more differences"));
    }
    lines.extend(report.unasked.iter().take(3).map(|entry| format!("never asked for: entry {entry}")));
    let more = report.unasked_count.saturating_sub(3);
    if more > 0 {
        lines.push(format!("and {more} more never asked for"));
    }
    lines
}
