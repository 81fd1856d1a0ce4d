//! `tollgate receipts`: what was asked of the world, and what was decided.

use super::{
    output::{escape, json_line, plain, Failure, Table},
    standing,
};
use crate::{
    chain::Decision,
    effect::{Class, Digest, Kind, VOCABULARY},
    ledger::{query::Denied, record::Receipt, Ledger, ReceiptQuery, Timestamp},
    policy::{limits::Bound, quantity},
};
use serde::de::{value::Error as WordError, DeserializeOwned, IntoDeserializer as _};
use std::{io::Write, path::Path, process::ExitCode};

/// List receipts, oldest first: of one run, or of all.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct Args {
    /// The run: its id, a unique beginning of one, or `latest`
    pub run: Option<String>,
    /// Only this kind, as in `fs/write`, or every kind of a family, as in `fs/*`
    #[arg(long, value_parser = kinds)]
    pub kind: Option<Kinds>,
    /// Only what touches this class
    #[arg(long, value_parser = word::<Class>)]
    pub class: Option<Class>,
    /// Only objects there: `src` means the path `src` and all below it, not `src2`; a path of the host begins with a
    /// slash; any other object (a URL, an address, a call, a run) begins so
    #[arg(long, value_name = "PREFIX")]
    pub resource: Option<String>,
    /// Only this decision
    #[arg(long, value_parser = word::<Decision>)]
    pub decision: Option<Decision>,
    /// Only what was refused
    #[arg(long)]
    pub denied: bool,
    /// Only what this handler or layer decided, as in `admission` or `view`
    #[arg(long, value_name = "HANDLER", alias = "handler")]
    pub by: Option<String>,
    /// Only what this user, by number, or this run asked for
    #[arg(long, value_name = "UID|RUN")]
    pub subject: Option<String>,
    /// Only since then: a time as in 2026-11-30T22:08:31Z, or an age as in 90s, 10m, 2h, 7d
    #[arg(long, value_name = "TIME")]
    pub since: Option<String>,
    /// Only before then, written as for `--since`
    #[arg(long, value_name = "TIME")]
    pub until: Option<String>,
    /// Only those whose request or result has this SHA-256
    #[arg(long, value_name = "HEX", value_parser = digest)]
    pub digest: Option<Digest>,
    /// At most this many, the newest
    #[arg(long, value_name = "N")]
    pub limit: Option<u64>,
    /// Print one JSON object a line
    #[arg(long)]
    pub json: bool,
}

/// One kind or a family.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kinds {
    /// One.
    One(Kind),
    /// Every one of this family.
    Family(String),
}

fn kinds(text: &str) -> Result<Kinds, String> {
    let Some(family) = text.strip_suffix("/*") else {
        return text.parse().map(Kinds::One).map_err(|unknown: crate::effect::UnknownKind| unknown.to_string());
    };
    let mut known: Vec<&str> = VOCABULARY.iter().filter_map(|row| row.name.split('/').next()).collect();
    known.sort_unstable();
    known.dedup();
    match known.contains(&family) {
        true => Ok(Kinds::Family(family.to_owned())),
        false => Err(format!("unknown family `{family}`; the families are {}", known.join(", "))),
    }
}

fn digest(text: &str) -> Result<Digest, String> {
    text.parse().map_err(|_| "a digest is 64 hexadecimal digits".to_owned())
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
    let query = query(args, &ledger)?;
    if args.json {
        for receipt in ledger.receipts(&query)? {
            json_line(out, &receipt?)?;
        }
    } else {
        let mut table = Table::new(out, ["RECEIPT", "TIME", "DECISION", "KIND", "OBJECT"]);
        for receipt in ledger.receipts(&query)? {
            let receipt = receipt?;
            table.row_with(cells(&receipt), remark(&receipt))?;
        }
        table.finish()?;
    }
    out.flush()?;
    Ok(ExitCode::SUCCESS)
}

fn query(args: &Args, ledger: &Ledger) -> Result<ReceiptQuery, Failure> {
    let now = ledger.clock().now();
    let moment = |text: &Option<String>| text.as_deref().map(|text| moment(text, now)).transpose();
    let run = |text: &str| ledger.run(text).map(|record| record.id);
    let (kind, family) = match &args.kind {
        Some(Kinds::One(kind)) => (Some(*kind), None),
        Some(Kinds::Family(family)) => (None, Some(family.clone())),
        None => (None, None),
    };
    // A run's id has twelve places, a user's number ten at most.
    let (subject_uid, subject_run) = match args.subject.as_deref() {
        Some(text) if text.len() <= 10 && text.bytes().all(|byte| byte.is_ascii_digit()) => {
            let uid = text
                .parse()
                .map_err(|_| Failure { status: 2, ..Failure::new(format!("`{text}` is no user's number"), "") })?;
            (Some(uid), None)
        }
        Some(text) => (None, Some(run(text)?)),
        None => (None, None),
    };
    Ok(ReceiptQuery {
        run: args.run.as_deref().map(run).transpose()?,
        kind,
        family,
        class: args.class,
        resource_prefix: args.resource.clone(),
        decision: args.decision,
        decided_by: args.by.clone(),
        subject_uid,
        subject_run,
        since: moment(&args.since)?,
        until: moment(&args.until)?,
        digest: args.digest,
        denied_only: if args.denied { Denied::Only } else { Denied::All },
        newest: args.limit,
        ..ReceiptQuery::default()
    })
}

/// A time, or an age before now.
pub fn moment(text: &str, now: Timestamp) -> Result<Timestamp, Failure> {
    if let Ok(Bound::At(age)) = quantity::duration(text) {
        let age = i64::try_from(age.as_micros()).unwrap_or(i64::MAX);
        return Ok(Timestamp(now.0.saturating_sub(age)));
    }
    text.parse().map_err(|cause: crate::ledger::time::BadTimestamp| Failure {
        status: 2,
        ..Failure::new(cause.to_string(), "an age is a number with s, m, h or d, as in `--since 10m`")
    })
}

fn cells(receipt: &Receipt) -> [String; 5] {
    // The time of day up to the millisecond: RFC 3339 has fixed places.
    let time = receipt.started_at.get(11..23).unwrap_or(&receipt.started_at);
    let times = if receipt.times > 1 { format!(" ({} times)", receipt.times) } else { String::new() };
    [
        escape(&receipt.id.0),
        escape(time),
        plain(&receipt.decision),
        receipt.kind.name().to_owned(),
        format!("{}{times}", escape(&receipt.resource.to_string())),
    ]
}

/// Who decided, why and what to change; nothing for what simply happened.
fn remark(receipt: &Receipt) -> String {
    let by = escape(&receipt.decided_by);
    match (receipt.reason.as_str(), receipt.hint.as_str()) {
        ("", _) => String::new(),
        (reason, "") => format!("{by}: {}", escape(reason)),
        (reason, hint) => format!("{by}: {}; {}", escape(reason), escape(hint)),
    }
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
        assert_eq!(lines.len(), 3, "{text}");
        assert!(lines[0].starts_with("RECEIPT"), "{text}");
        assert!(lines[1].starts_with("bbbbbbbbbbb1.2 ") && lines[1].contains(" refused "), "{text}");
        assert!(lines[1].ends_with("secret\\u{1b}[2J"), "{text}");
        assert_eq!(lines[2], "    admission: secret: a rule denies it; ask for it");
    }

    #[test]
    fn each_filter_narrows() {
        let (_root, ledger) = with_receipts();
        let count = |args: Args| printed(&Args { json: true, ..args }, &ledger).lines().count();
        assert_eq!(count(Args::default()), 2);
        assert_eq!(count(Args { run: Some("bbb".to_owned()), ..Args::default() }), 2);
        assert_eq!(count(Args { run: Some("aaa".to_owned()), ..Args::default() }), 0);
        assert_eq!(count(Args { kind: Some(Kinds::One(Kind::FsWrite)), ..Args::default() }), 0);
        assert_eq!(count(Args { class: Some(Class::Read), ..Args::default() }), 2);
        assert_eq!(count(Args { resource: Some("a".to_owned()), ..Args::default() }), 1);
        assert_eq!(count(Args { resource: Some("sec".to_owned()), ..Args::default() }), 0);
        assert_eq!(count(Args { kind: Some(Kinds::Family("fs".to_owned())), ..Args::default() }), 2);
        assert_eq!(count(Args { kind: Some(Kinds::Family("run".to_owned())), ..Args::default() }), 0);
        assert_eq!(count(Args { subject: Some("0".to_owned()), ..Args::default() }), 2);
        assert_eq!(count(Args { subject: Some("1".to_owned()), ..Args::default() }), 0);
        assert_eq!(count(Args { subject: Some("bbb".to_owned()), ..Args::default() }), 0);
        assert_eq!(count(Args { until: Some("1h".to_owned()), ..Args::default() }), 0);
        let known = effect("a").digest();
        assert_eq!(count(Args { digest: Some(known), ..Args::default() }), 1);
        assert_eq!(count(Args { digest: Some(Digest([0; 32])), ..Args::default() }), 0);
        assert_eq!(count(Args { decision: Some(Decision::Allowed), ..Args::default() }), 1);
        assert_eq!(count(Args { by: Some("admission".to_owned()), ..Args::default() }), 1);
        assert_eq!(count(Args { since: Some("1h".to_owned()), ..Args::default() }), 2);
        assert_eq!(count(Args { since: Some("9999-01-01T00:00:00Z".to_owned()), ..Args::default() }), 0);
        assert_eq!(count(Args { limit: Some(1), ..Args::default() }), 1);
    }

    #[test]
    fn json_is_one_receipt_a_line() {
        let (_root, ledger) = with_receipts();
        let text = printed(&Args { json: true, limit: Some(1), ..Args::default() }, &ledger);
        let receipt: Receipt = serde_json::from_str(&text).expect("is one receipt");
        assert_eq!(receipt.id.0, "bbbbbbbbbbb1.2", "the newest one");
    }

    #[test]
    fn an_age_counts_back_from_now_and_nonsense_is_a_usage_error() {
        let now = Timestamp(10_000_000_000);
        assert_eq!(moment("90s", now).expect("is an age"), Timestamp(9_910_000_000));
        assert_eq!(moment("2h", now).expect("is an age"), Timestamp(2_800_000_000));
        for text in ["", "s", "-1h", "10", "1y", "é"] {
            assert_eq!(moment(text, now).expect_err(text).status, 2);
        }
        assert_eq!(kinds("fs/*"), Ok(Kinds::Family("fs".to_owned())));
        assert!(kinds("nothing/*").is_err() && kinds("*").is_err() && kinds("f/*").is_err());
        assert!(word::<Class>("egress").is_ok() && word::<Class>("Egress").is_err());
    }
}
