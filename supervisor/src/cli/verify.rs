//! `tollgate verify`: whether the receipts are the ones that were written.

use super::{
    output::{escape, json_line, Failure},
    standing,
};
use crate::{
    effect::{Digest, RunId},
    ledger::{
        export::{self, Sealed},
        record::RunState,
        verify::{Broken, Expected, Signatures, Trust, Verification},
        Checkpoint, Ledger, PublicKey, RunQuery, Which,
    },
};
use serde_json::json;
use std::{
    io::Write,
    ops::ControlFlow,
    path::{Path, PathBuf},
    process::ExitCode,
};

/// Check that no receipt was changed, removed, moved or added since it was written.
///
/// With RUN, one run's chain, and that the host's chain of heads has it. With `--all`, everything: every run, the whole
/// host's chain, its signatures, the mark beside the database, every stored content; each fault is said with its place.
///
/// Elsewhere, `--ledger FILE --key KEY` checks a copy of `ledger.db` with the public key alone. That nothing is gone
/// from the end of a copy shows only against something newer or from elsewhere: keep what `--checkpoint` prints, and
/// give it as `--expect`.
///
/// The exit status is 0 when all holds, 1 when something does not.
#[derive(Clone, Debug, Default, clap::Args)]
#[command(group = clap::ArgGroup::new("what").required(true).multiple(true)
    .args(["run", "all", "ledger", "export", "checkpoint", "public_key"]))]
pub struct Args {
    /// The run: its id, a unique beginning of one, or `latest`
    pub run: Option<String>,
    /// Everything in the ledger
    #[arg(long, conflicts_with = "run")]
    pub all: bool,
    /// A copy of a ledger's database, in place of this user's ledger
    #[arg(long, value_name = "FILE")]
    pub ledger: Option<PathBuf>,
    /// A file that `tollgate export` wrote
    #[arg(long, value_name = "FILE", conflicts_with_all = ["run", "all", "ledger", "expect"])]
    pub export: Option<PathBuf>,
    /// The host's public key, 64 hexadecimal digits or a file that holds them; may be given again for a key that was
    /// replaced [default for this user's own ledger: its own key]
    #[arg(long, value_name = "KEY")]
    pub key: Vec<String>,
    /// A head that the ledger must have: a file with what `--checkpoint` printed, or the head's hash
    #[arg(long, value_name = "HEAD")]
    pub expect: Vec<String>,
    /// Print the newest head with its signature, to be kept elsewhere and given as `--expect` later
    #[arg(long, conflicts_with_all = ["run", "all", "export", "public_key", "key", "expect"])]
    pub checkpoint: bool,
    /// Print this host's public key
    #[arg(long, conflicts_with_all = ["run", "all", "export", "ledger", "key", "expect"])]
    pub public_key: bool,
    /// Print JSON, one object a line
    #[arg(long)]
    pub json: bool,
}

/// What to do with a ledger that does not hold.
const DISTRUST: &str = "do not rely on it from there on; keep a copy of the whole state directory as evidence";

/// Recomputes what is asked for, and says what holds.
///
/// # Errors
/// When there is no such run or file; what does not hold is printed, and is the exit status 1.
pub fn run(args: &Args, state: &Path, out: &mut dyn Write) -> Result<ExitCode, Failure> {
    let given: Vec<PublicKey> = args.key.iter().map(|text| key(text)).collect::<Result<_, _>>()?;
    let expect = args.expect.iter().map(|text| expected(text)).collect::<Result<_, _>>()?;
    if args.public_key {
        let Some(key) = PublicKey::of_host(state)? else {
            return Err(Failure::new("this host has no key yet", "the first `tollgate run` makes it"));
        };
        match args.json {
            true => json_line(out, &json!({ "key": key }))?,
            false => writeln!(out, "{key}")?,
        }
        return Ok(ExitCode::SUCCESS);
    }
    if let Some(file) = &args.export {
        return exported(file, &Trust { keys: given, signatures: Signatures::WherePresent, expect }, args.json, out);
    }
    let ledger = match &args.ledger {
        Some(file) => Ledger::open_copy(file)?,
        None => Ledger::open_read_only(state)?,
    };
    if args.checkpoint {
        let Some(head) = ledger.newest_head()? else {
            return Err(Failure::new("no run was sealed yet", "a checkpoint is there once a run is over"));
        };
        json_line(out, &Checkpoint::of(&head))?;
        return Ok(ExitCode::SUCCESS);
    }
    let own = if args.ledger.is_none() { Trust::of_host(state)?.keys } else { Vec::new() };
    let (keys, signatures) = match given.is_empty() {
        true => (own, Signatures::WherePresent),
        false => (given, Signatures::Required),
    };
    let trust = Trust { keys, signatures, expect };
    let mut report = Report { out, json: args.json, broken: 0, failed: None };
    match &args.run {
        Some(run) => one(&ledger, run, &trust, args.ledger.is_none(), &mut report)?,
        None => everything(&ledger, &trust, &mut report)?,
    }
    match report.failed {
        Some(error) => Err(error.into()),
        None if report.broken == 0 => Ok(ExitCode::SUCCESS),
        None => Ok(ExitCode::from(1)),
    }
}

/// Where findings go.
struct Report<'a> {
    out: &'a mut dyn Write,
    json: bool,
    broken: u64,
    failed: Option<std::io::Error>,
}

impl Report<'_> {
    fn broken(&mut self, broken: &Broken) -> ControlFlow<()> {
        self.broken += 1;
        let said = match self.json {
            true => json_line(self.out, &shown(broken)),
            false => writeln!(self.out, "BROKEN {}: {}", broken.part(), escape(&broken.to_string())),
        };
        match said {
            Ok(()) => ControlFlow::Continue(()),
            Err(error) => {
                self.failed = Some(error);
                ControlFlow::Break(())
            }
        }
    }
}

fn shown(broken: &Broken) -> serde_json::Value {
    json!({
        "ok": false,
        "part": broken.part(),
        "run": broken.run().map(|run| &run.0),
        "place": broken.place(),
        "message": broken.to_string(),
        "hint": DISTRUST,
    })
}

fn one(ledger: &Ledger, run: &str, trust: &Trust, own: bool, report: &mut Report<'_>) -> Result<(), Failure> {
    let record = match own {
        true => standing::settle(ledger, ledger.run(run)?)?,
        false => ledger.run(run)?,
    };
    let host = ledger.verify_host(trust, &mut |broken| report.broken(&broken))?;
    match ledger.verify_run_with(&record.id, trust) {
        Ok(found) => {
            let line = line(&found);
            match report.json {
                true => {
                    let mut value = line_json(&found, ledger.run(&record.id.0)?.state);
                    value["heads"] = json!(host.heads);
                    json_line(report.out, &value)?;
                }
                false => writeln!(report.out, "{line} of {}\nhead {}", host.heads, found.head)?,
            }
        }
        Err(Broken::Ledger(error)) => return Err(error.into()),
        // The host's chain told it already, in the same words.
        Err(Broken::Head { .. }) if report.broken > 0 => {}
        Err(broken) => {
            let _ = report.broken(&broken);
        }
    }
    notes(&host.notes, report)
}

fn everything(ledger: &Ledger, trust: &Trust, report: &mut Report<'_>) -> Result<(), Failure> {
    let host = ledger.verify_host(trust, &mut |broken| report.broken(&broken))?;
    let (mut runs, mut receipts, mut unsealed, mut cut) = (0_u64, 0, 0_u64, 0);
    let all = ledger.runs(RunQuery { all: Which::All, limit: None, since: None })?;
    for record in all.iter().rev() {
        runs += 1;
        match ledger.verify_run_with(&record.id, trust) {
            Ok(found) => {
                receipts += found.count;
                cut += found.cut.as_ref().map_or(0, |cut| cut.count);
                unsealed += u64::from(found.sealed.is_none());
                match report.json {
                    true => json_line(report.out, &line_json(&found, record.state))?,
                    // All is well in as many words as there are runs is too much to read.
                    false if found.sealed.is_none() || found.cut.is_some() => {
                        writeln!(report.out, "{}", line(&found))?;
                    }
                    false => {}
                }
            }
            Err(Broken::Ledger(error)) => return Err(error.into()),
            Err(Broken::Head { .. }) => {}
            Err(broken) => {
                if report.broken(&broken).is_break() {
                    return Ok(());
                }
            }
        }
    }
    let blobs = ledger.verify_blobs(&mut |broken| report.broken(&broken))?;
    let key = host.newest.as_ref().and_then(|head| head.key);
    if report.json {
        let value = json!({
            "ok": report.broken == 0, "runs": runs, "receipts": receipts, "cut": cut, "unsealed": unsealed,
            "heads": host.heads, "signed": host.signed, "key": key, "blobs": blobs, "broken": report.broken,
            "notes": host.notes,
        });
        json_line(report.out, &value)?;
        return Ok(());
    }
    notes(&host.notes, report)?;
    let signed = match (host.heads, host.signed, key) {
        (0, ..) => String::new(),
        (_, _, Some(key)) if trust.keys.is_empty() => format!(", signed with {key}, which nothing here vouches for"),
        (heads, signed, Some(key)) if heads == signed => format!(", signed with {key}"),
        (heads, signed, Some(key)) => {
            format!(", the newest {signed} of {heads} signed with {key}, which covers those before")
        }
        (_, _, None) => ", none of them signed: an older version wrote them".to_owned(),
    };
    let verdict = match report.broken {
        0 => "all holds".to_owned(),
        1 => "1 thing does not hold".to_owned(),
        many => format!("{many} things do not hold"),
    };
    writeln!(
        report.out,
        "{verdict}: {runs} runs ({unsealed} not sealed), {receipts} receipts ({cut} of them cut), {} heads{signed}, \
         {blobs} blobs",
        host.heads
    )?;
    if report.broken > 0 {
        writeln!(report.out, "hint: {DISTRUST}")?;
    }
    Ok(())
}

fn notes(notes: &[String], report: &mut Report<'_>) -> Result<(), Failure> {
    for note in notes.iter().filter(|_| !report.json) {
        writeln!(report.out, "note: {}", escape(note))?;
    }
    Ok(())
}

fn line(found: &Verification) -> String {
    let receipts = if found.count == 1 { "receipt" } else { "receipts" };
    let cut = match &found.cut {
        Some(cut) if cut.count == found.count => {
            format!(" (all cut on {}, signed; their head is known)", cut.cut_at)
        }
        Some(cut) => format!(" (the first {} cut on {}, signed)", cut.count, cut.cut_at),
        None => String::new(),
    };
    let sealed = match &found.sealed {
        Some(sealed) if sealed.count < found.count => {
            format!("the first {} sealed as head {}, the rest not yet", sealed.count, sealed.n)
        }
        Some(sealed) => format!("sealed as head {}", sealed.n),
        None => "not sealed while the run goes on: nothing vouches for its end yet; the host's chain is".to_owned(),
    };
    format!("run {}: {} {receipts}{cut} hold, {sealed}", escape(&found.run.0), found.count)
}

fn line_json(found: &Verification, state: RunState) -> serde_json::Value {
    json!({
        "ok": true,
        "run": found.run.0,
        "state": state,
        "receipts": found.count,
        "head": found.head,
        "sealed_as": found.sealed.as_ref().map(|sealed| sealed.n),
        "sealed_receipts": found.sealed.as_ref().map(|sealed| sealed.count),
        "signed_by": found.sealed.as_ref().and_then(|sealed| sealed.key),
        "cut": found.cut,
    })
}

fn exported(file: &Path, trust: &Trust, json: bool, out: &mut dyn Write) -> Result<ExitCode, Failure> {
    let reader = std::fs::File::open(file).map_err(|cause| {
        Failure::new(format!("cannot read {}", file.display()), "give the file that `tollgate export` wrote")
            .because(&cause)
    })?;
    match export::verify(std::io::BufReader::new(reader), trust) {
        Ok(found) => {
            let (sealed, key) = match &found.sealed {
                Sealed::By(head) => (Some(head.n), head.key),
                Sealed::NotYet => (None, None),
            };
            if json {
                let value = json!({
                    "ok": true, "run": found.run, "receipts": found.count, "head": found.head, "sealed_as": sealed,
                    "signed_by": key, "cut": found.cut,
                });
                json_line(out, &value)?;
            } else {
                let sealed = match (sealed, key) {
                    (Some(n), Some(key)) if trust.keys.is_empty() => {
                        format!("sealed as head {n} with {key}, which nothing here vouches for; give `--key`")
                    }
                    (Some(n), Some(key)) => format!("sealed as head {n} with {key}"),
                    (Some(n), None) => format!("sealed as head {n} by an older version, without a signature"),
                    (None, _) => "not sealed: the run was going on, and nothing vouches for its end".to_owned(),
                };
                let run = escape(&found.run.0);
                writeln!(out, "run {run}: {} receipts hold, {sealed}\nhead {}", found.count, found.head)?;
            }
            Ok(ExitCode::SUCCESS)
        }
        Err(broken) => {
            let line = broken.line;
            match json {
                true => json_line(out, &json!({ "ok": false, "line": line, "message": broken.to_string() }))?,
                false => writeln!(out, "BROKEN export: {}", escape(&broken.to_string()))?,
            }
            Ok(ExitCode::from(1))
        }
    }
}

/// A public key, written out or in a file.
fn key(text: &str) -> Result<PublicKey, Failure> {
    word_or_file(text, "a public key is 64 hexadecimal digits; `tollgate verify --public-key` prints it on its host")
}

fn word_or_file<T: std::str::FromStr>(text: &str, hint: &str) -> Result<T, Failure> {
    if let Ok(value) = text.parse() {
        return Ok(value);
    }
    let usage = |message: String| Failure { status: 2, ..Failure::new(message, hint) };
    let read = std::fs::read_to_string(text).map_err(|cause| usage(format!("cannot read `{text}`: {cause}")))?;
    read.trim().parse().map_err(|_| usage(format!("`{text}` holds no such thing")))
}

/// A head's hash, or a file that holds one or a checkpoint.
fn expected(text: &str) -> Result<Expected, Failure> {
    let hint = "give the file that `tollgate verify --checkpoint` was written to, or the 64 digits of a head's hash";
    if let Ok(read) = std::fs::read_to_string(text) {
        if let Ok(checkpoint) = serde_json::from_str::<Checkpoint>(&read) {
            return Ok(Expected::At(checkpoint));
        }
    }
    word_or_file::<Digest>(text, hint).map(Expected::Hash)
}

/// Says on standard error that the ledger may not be relied on, where a cheap look shows it. What only reads goes on.
pub fn warn(ledger: &Ledger, run: Option<&RunId>) {
    let look = || -> crate::ledger::Result<Option<String>> {
        let trust = Trust::of_host(ledger.state())?;
        if let Some(broken) = ledger.glance(&trust)? {
            return Ok(Some(broken.to_string()));
        }
        // A run of ordinary length is checked whole before it is explained.
        let Some(run) = run else { return Ok(None) };
        match ledger.verify_run_with(run, &trust) {
            Ok(_) => Ok(None),
            Err(Broken::Ledger(error)) => Err(error),
            Err(broken) => Ok(Some(broken.to_string())),
        }
    };
    let said = match look() {
        Ok(None) => return,
        Ok(Some(broken)) => broken,
        Err(error) => error.to_string(),
    };
    // With standard error closed there is nobody to tell.
    let _ = writeln!(
        std::io::stderr(),
        "warning: the ledger does not verify: {}\nhint: `tollgate verify --all` finds every fault",
        escape(&said)
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::ps::tests::ledger_with_two_runs;

    fn verify(state: &Path, args: Args) -> (String, ExitCode) {
        let mut out = Vec::new();
        let status = super::run(&args, state, &mut out).expect("looks");
        (String::from_utf8(out).expect("text"), status)
    }

    fn of(run: &str) -> Args {
        Args { run: Some(run.to_owned()), ..Args::default() }
    }

    #[test]
    fn an_untouched_chain_holds() {
        let (_root, ledger) = ledger_with_two_runs();
        let (said, status) = verify(ledger.state(), of("latest"));
        assert!(said.contains(" hold, not sealed") && said.contains("\nhead "), "{said}");
        assert_eq!(status, ExitCode::SUCCESS);
        let (said, status) = verify(ledger.state(), Args { all: true, ..Args::default() });
        assert!(
            said.ends_with("all holds: 2 runs (2 not sealed), 0 receipts (0 of them cut), 0 heads, 0 blobs\n"),
            "{said}"
        );
        assert_eq!(status, ExitCode::SUCCESS);
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
        let (said, status) = verify(&state, of(&id.0));
        assert!(said.starts_with("BROKEN receipts: ") && said.contains("receipt 1: it is missing"), "{said}");
        assert_eq!(status, ExitCode::from(1));
        let (said, _) = verify(&state, Args { json: true, ..of(&id.0) });
        let value: serde_json::Value = serde_json::from_str(said.lines().next().expect("a line")).expect("JSON");
        assert_eq!(
            (value["ok"].as_bool(), value["run"].as_str(), value["place"].as_u64()),
            (Some(false), Some(&*id.0), Some(1))
        );
    }

    #[test]
    fn a_key_or_a_head_that_is_none_is_a_usage_error() {
        let (root, ledger) = ledger_with_two_runs();
        let empty = root.path().join("empty");
        std::fs::write(&empty, "").expect("writes");
        for text in ["", "12", "/no/such/file", empty.to_str().expect("text")] {
            let args = [
                Args { key: vec![text.to_owned()], ..of("latest") },
                Args { expect: vec![text.to_owned()], ..of("latest") },
            ];
            for args in args {
                assert_eq!(super::run(&args, ledger.state(), &mut Vec::new()).expect_err(text).status, 2);
            }
        }
    }
}
