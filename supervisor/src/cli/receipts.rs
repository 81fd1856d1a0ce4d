//! `tollgate receipts`: what was asked of the world, and what was decided.

use super::{
    output::{escape, json_line, Failure},
    standing,
};
use crate::{
    chain::Decision,
    effect::{Class, Kind},
    ledger::{query::Denied, record::Receipt, ReceiptQuery, Timestamp},
};
use serde::{
    de::{value::Error as WordError, DeserializeOwned, IntoDeserializer as _},
    Serialize,
};
use std::{io::Write, path::Path, process::ExitCode};

/// List receipts, oldest first: of one run, or of all.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct Args {
    /// The run: its id, a unique beginning of one, or `latest`
    pub run: Option<String>,
    /// Only this kind, as in `fs/write`
    #[arg(long, value_parser = kind)]
    pub kind: Option<Kind>,
    /// Only what was refused
    #[arg(long)]
    pub denied: bool,
    /// Only since then: a time as in 2026-11-30T22:08:31Z, or an age as in 90s, 10m, 2h, 7d
    #[arg(long, value_name = "TIME")]
    pub since: Option<String>,
    /// Only what touches this class
    #[arg(long, value_parser = word::<Class>)]
    pub class: Option<Class>,
    /// Only objects that begin so
    #[arg(long, value_name = "PREFIX")]
    pub resource: Option<String>,
    /// Only this decision
    #[arg(long, value_parser = word::<Decision>)]
    pub decision: Option<Decision>,
    /// Only what this handler decided
    #[arg(long, value_name = "NAME")]
    pub handler: Option<String>,
    /// At most this many
    #[arg(long, value_name = "N")]
    pub limit: Option<u64>,
    /// Print one JSON object a line
    #[arg(long)]
    pub json: bool,
}

fn kind(text: &str) -> Result<Kind, String> {
    text.parse().map_err(|unknown: crate::effect::UnknownKind| unknown.to_string())
}

/// A word of a closed list, as the wire writes it.
fn word<T: DeserializeOwned>(text: &str) -> Result<T, String> {
    T::deserialize(text.into_deserializer()).map_err(|cause: WordError| cause.to_string())
}

/// Prints the receipts that are asked for, as they are read.
///
/// # Errors
/// When there is no such run, and those of the ledger and of writing to `out`.
pub fn run(args: &Args, state: &Path, out: &mut dyn Write) -> Result<ExitCode, Failure> {
    let ledger = match (standing::ledger(state)?, &args.run) {
        (Some(ledger), _) => ledger,
        (None, None) => return Ok(ExitCode::SUCCESS),
        (None, Some(run)) => {
            return Err(Failure::new(format!("there is no run `{run}`"), "`tollgate ps --all` lists the runs"))
        }
    };
    let query = ReceiptQuery {
        run: args.run.as_deref().map(|run| ledger.run(run)).transpose()?.map(|record| record.id),
        kind: args.kind,
        class: args.class,
        resource_prefix: args.resource.clone(),
        decision: args.decision,
        decided_by: args.handler.clone(),
        since: args.since.as_deref().map(|since| moment(since, ledger.clock().now())).transpose()?,
        denied_only: if args.denied { Denied::Only } else { Denied::All },
        limit: args.limit,
        ..ReceiptQuery::default()
    };
    for receipt in ledger.receipts(&query)? {
        let receipt = receipt?;
        match args.json {
            true => json_line(out, &receipt)?,
            false => human(out, &receipt)?,
        }
    }
    out.flush()?;
    Ok(ExitCode::SUCCESS)
}

/// A time, or an age before now.
fn moment(text: &str, now: Timestamp) -> Result<Timestamp, Failure> {
    let age = || {
        let (number, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
        let seconds: i64 = match unit {
            "s" => 1,
            "m" => 60,
            "h" => 3600,
            "d" => 86_400,
            _ => return None,
        };
        let number = number.parse::<u32>().ok()?;
        Some(Timestamp(now.0.saturating_sub(i64::from(number).checked_mul(seconds * 1_000_000)?)))
    };
    match age() {
        Some(moment) => Ok(moment),
        None => text.parse().map_err(|cause: crate::ledger::time::BadTimestamp| Failure {
            status: 2,
            ..Failure::new(cause.to_string(), "an age is a number with s, m, h or d, as in `--since 10m`")
        }),
    }
}

/// Columns of fixed width, since receipts are printed as they are read and there may be millions.
fn human(out: &mut dyn Write, receipt: &Receipt) -> std::io::Result<()> {
    // The time of day up to the millisecond: RFC 3339 has fixed places.
    let time = receipt.started_at.get(11..23).unwrap_or(&receipt.started_at);
    let times = if receipt.times > 1 { format!(" ({} times)", receipt.times) } else { String::new() };
    writeln!(
        out,
        "{:<16} {:<12} {:<9} {:<15} {}{times}",
        escape(&receipt.id.0),
        escape(time),
        plain(&receipt.decision),
        receipt.kind.name(),
        escape(&receipt.resource.to_string()),
    )?;
    match (receipt.reason.as_str(), receipt.hint.as_str()) {
        ("", _) => Ok(()),
        (reason, "") => writeln!(out, "    {}: {}", escape(&receipt.decided_by), escape(reason)),
        (reason, hint) => {
            writeln!(out, "    {}: {}; {}", escape(&receipt.decided_by), escape(reason), escape(hint))
        }
    }
}

/// A word of a closed list as it is written on the wire.
fn plain(word: &impl Serialize) -> String {
    serde_json::to_value(word).ok().and_then(|word| word.as_str().map(str::to_owned)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        chain::Answer,
        cli::ps::tests::ledger_with_two_runs,
        effect::{fs, Door, Effect, Request, Resource, RunId, Subject},
        ledger::{Draft, Ledger},
    };

    fn effect(path: &str) -> Effect {
        Effect {
            kind: Kind::FsRead,
            resource: Resource::Workspace { path: path.to_owned() },
            subject: Subject { uid: 0, run: None, agent: None },
            room: None,
            door: Door::Api,
            request: Request::Fs(fs::Request::Read { path: path.to_owned(), offset: 0, limit: 1 }),
        }
    }

    fn with_receipts() -> (tempfile::TempDir, Ledger) {
        let (root, ledger) = ledger_with_two_runs();
        let run = RunId("bbbbbbbbbbb1".to_owned());
        let allowed = Answer::done(serde_json::Value::Null, 1);
        let refused = Answer::refused("admission", "secret: a rule denies it", "ask for it");
        for (path, answer) in [("a", allowed), ("secret\x1b[2J", refused)] {
            ledger.append(Draft::now(&run, &effect(path), &answer, &**ledger.clock())).expect("appends");
        }
        (root, ledger)
    }

    fn printed(args: &Args, ledger: &Ledger) -> String {
        let mut out = Vec::new();
        run(args, ledger.state(), &mut out).expect("lists");
        String::from_utf8(out).expect("is text")
    }

    #[test]
    fn refusals_say_by_whom_why_and_what_to_do() {
        let (_root, ledger) = with_receipts();
        let text = printed(&Args { denied: true, ..Args::default() }, &ledger);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 2, "{text}");
        assert!(lines[0].starts_with("bbbbbbbbbbb1.2 ") && lines[0].contains(" refused "), "{text}");
        assert!(lines[0].ends_with("secret\\u{1b}[2J"), "{text}");
        assert_eq!(lines[1], "    admission: secret: a rule denies it; ask for it");
    }

    #[test]
    fn each_filter_narrows() {
        let (_root, ledger) = with_receipts();
        let count = |args: Args| printed(&Args { json: true, ..args }, &ledger).lines().count();
        assert_eq!(count(Args::default()), 2);
        assert_eq!(count(Args { run: Some("bbb".to_owned()), ..Args::default() }), 2);
        assert_eq!(count(Args { run: Some("aaa".to_owned()), ..Args::default() }), 0);
        assert_eq!(count(Args { kind: Some(Kind::FsWrite), ..Args::default() }), 0);
        assert_eq!(count(Args { class: Some(Class::Read), ..Args::default() }), 2);
        assert_eq!(count(Args { resource: Some("sec".to_owned()), ..Args::default() }), 1);
        assert_eq!(count(Args { decision: Some(Decision::Allowed), ..Args::default() }), 1);
        assert_eq!(count(Args { handler: Some("admission".to_owned()), ..Args::default() }), 1);
        assert_eq!(count(Args { since: Some("1h".to_owned()), ..Args::default() }), 2);
        assert_eq!(count(Args { since: Some("9999-01-01T00:00:00Z".to_owned()), ..Args::default() }), 0);
        assert_eq!(count(Args { limit: Some(1), ..Args::default() }), 1);
    }

    #[test]
    fn json_is_one_receipt_a_line() {
        let (_root, ledger) = with_receipts();
        let text = printed(&Args { json: true, limit: Some(1), ..Args::default() }, &ledger);
        let receipt: Receipt = serde_json::from_str(&text).expect("is one receipt");
        assert_eq!(receipt.id.0, "bbbbbbbbbbb1.1");
    }

    #[test]
    fn an_age_counts_back_from_now_and_nonsense_is_a_usage_error() {
        let now = Timestamp(10_000_000_000);
        assert_eq!(moment("90s", now).expect("is an age"), Timestamp(9_910_000_000));
        assert_eq!(moment("2h", now).expect("is an age"), Timestamp(2_800_000_000));
        for text in ["", "s", "-1h", "10", "1y", "é"] {
            assert_eq!(moment(text, now).expect_err(text).status, 2);
        }
        assert!(word::<Class>("egress").is_ok() && word::<Class>("Egress").is_err());
    }
}
