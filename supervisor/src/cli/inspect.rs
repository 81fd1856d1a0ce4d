//! `tollgate inspect`: all about one run.

use super::{
    output::{bytes, command_line, duration, escape, json_line, Failure},
    standing,
};
use crate::{
    ledger::{
        quota::QuotaLine,
        record::{ChangesState, RunMode, RunRecord},
    },
    room::{batch, tree},
};
use serde::Serialize;
use std::{io::Write, path::Path, process::ExitCode};

/// Show one run: its command, policy, limits used, outcome and effects.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// The run: its id, a unique beginning of one, or `latest`
    pub run: String,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// Shows one run.
///
/// # Errors
/// When there is no such run, and those of the ledger and of writing to `out`.
pub fn run(args: &Args, state: &Path, out: &mut dyn Write) -> Result<ExitCode, Failure> {
    let (ledger, record) = standing::find(state, &args.run)?;
    let record = standing::with_live_usage(&ledger, record);
    let mut quotas = Vec::new();
    for id in ledger.run_quotas(&record.id)? {
        quotas.extend(ledger.quota(&id)?);
    }
    match args.json {
        true => json_line(out, &Shown { record: &record, quotas: &quotas })?,
        false => {
            for (name, value) in lines(&record) {
                writeln!(out, "{name:<12} {value}")?;
            }
            let images = tree::open_root(&ledger.run_dir(&record.id)).ok();
            let kept = images.and_then(|folder| batch::images_bytes(&folder).ok()).unwrap_or(0);
            if kept > 0 {
                writeln!(out, "{:<12} {} of before-images, for `tollgate undo`", "kept", bytes(kept))?;
            }
            for line in &quotas {
                let id = escape(&line.id);
                writeln!(out, "{:<12} {id}: {} of {} {} used", "quota", line.used, line.limit, line.unit)?;
            }
        }
    }
    out.flush()?;
    Ok(ExitCode::SUCCESS)
}

/// The record, and how the quotas stand that the run shares with others.
#[derive(Serialize)]
struct Shown<'a> {
    #[serde(flatten)]
    record: &'a RunRecord,
    #[serde(skip_serializing_if = "<[QuotaLine]>::is_empty")]
    quotas: &'a [QuotaLine],
}

fn lines(record: &RunRecord) -> Vec<(&'static str, String)> {
    let usage = &record.usage;
    let agent = record.subject.agent.as_deref().map(|agent| format!(", agent {}", escape(agent))).unwrap_or_default();
    let mut lines = vec![
        ("run", escape(&record.id.0)),
        ("state", standing::word(record)),
        ("command", command_line(&record.command)),
        ("workspace", escape(&record.workspace)),
        ("policy", format!("{} (sha256 {})", escape(&record.policy), escape(&record.policy_digest))),
        ("subject", format!("user {}{agent}", record.subject.uid)),
        ("started", escape(&record.started_at)),
    ];
    if let Some(room) = &record.room {
        lines.push(("room", escape(&room.0)));
    }
    if let Some(ended) = &record.ended_at {
        lines.push(("ended", escape(ended)));
    }
    if let Some(outcome) = &record.outcome {
        if let (Some(limit), Some(used)) = (outcome.limit, outcome.used) {
            lines.push(("limit", format!("{used} used of {limit}")));
        }
        if let Some(detail) = &outcome.detail {
            lines.push(("detail", escape(detail)));
        }
    }
    lines.extend([
        ("wall", duration(usage.wall_us)),
        ("cpu", duration(usage.cpu_us)),
        ("memory", format!("{} at most", bytes(usage.memory_peak))),
        ("processes", format!("{} at most", usage.pids_peak)),
        ("written", bytes(usage.write_bytes)),
        ("printed", bytes(usage.output_bytes)),
        ("effects", effects(record)),
        ("changes", changes(record.changes).to_owned()),
        ("mode", mode(&record.mode)),
        ("environment", escape(&record.environment.join(" "))),
    ]);
    if let Some(resumes) = &record.resumes {
        lines.push(("resumes", escape(&resumes.0)));
    }
    if let Some(injected) = record.answered.faults_injected {
        lines.push(("faults", format!("{injected} injected")));
    }
    if let Some(digest) = &record.answered.recording {
        lines.push(("recording", escape(digest)));
    }
    if let Some(report) = &record.answered.replay {
        lines.extend(super::recording::report_lines(report).into_iter().map(|line| ("replay", escape(&line))));
    }
    lines.extend(record.degraded.iter().map(|degraded| ("went without", escape(degraded))));
    lines
}

fn effects(record: &RunRecord) -> String {
    let effects = &record.effects;
    format!("{} ({} refused, {} not to be repeated)", effects.count, effects.refused, effects.once)
}

fn mode(mode: &RunMode) -> String {
    match mode {
        RunMode::Live => "live".to_owned(),
        RunMode::Preflight => "preflight; `tollgate plan` shows what was planned".to_owned(),
        RunMode::Planned { plan } => format!("live, within the plan of run {}", escape(&plan.0)),
    }
}

fn changes(changes: ChangesState) -> &'static str {
    match changes {
        ChangesState::None => "none",
        ChangesState::Pending => "held; `tollgate apply` or `tollgate discard` decides",
        ChangesState::Partial => "applied in part; the rest is held",
        ChangesState::Applied => "applied",
        ChangesState::Discarded => "discarded",
        ChangesState::Undone => "applied, and undone since; `tollgate undo --redo` brings them again",
        ChangesState::PartlyUndone => "applied, and partly undone since",
        ChangesState::Resumed => "taken over by the run that resumes this one",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::ps::tests::ledger_with_two_runs;

    fn printed(run_id: &str, json: bool) -> Result<String, Failure> {
        let (_root, ledger) = ledger_with_two_runs();
        let mut out = Vec::new();
        run(&Args { run: run_id.to_owned(), json }, ledger.state(), &mut out)?;
        Ok(String::from_utf8(out).expect("is text"))
    }

    #[test]
    fn a_unique_beginning_and_latest_name_a_run() {
        assert!(printed("bbb", false).expect("is there").contains("bbbbbbbbbbb1"));
        assert!(printed("latest", false).expect("is there").contains("bbbbbbbbbbb1"));
        assert!(printed("ccc", false).is_err());
    }

    #[test]
    fn json_is_the_record() {
        let text = printed("aaa", true).expect("is there");
        let record: RunRecord = serde_json::from_str(&text).expect("is a record");
        assert_eq!(record.id.0, "aaaaaaaaaaa1");
        assert_eq!(text.lines().count(), 1);
    }

    #[test]
    fn a_hostile_command_is_shown_escaped() {
        let text = printed("aaa", false).expect("is there");
        assert!(!text.contains('\x1b'), "{text}");
        assert!(text.contains("\\u{1b}[2Jevil"), "{text}");
    }
}
