//! `tollgate approvals`: what waits for a person, and the rules that they saved.

use super::{
    output::{escape, json_line, shorten, Failure, Table},
    standing,
};
use crate::{
    chain::{
        approval::{Decided, Parked, Word},
        Decision,
    },
    doors::control::{self, ClientError},
    effect::{path::shell_word, Digest, Door, Kind, Resource, RunId},
    ledger::{
        consent::WhichRules,
        record::{ChangesState, RunRecord, RunState},
        Ledger, ReceiptQuery, RunQuery, Which,
    },
};
use serde::Serialize;
use std::{collections::BTreeMap, io::Write, path::Path, process::ExitCode};

/// List what waits for a person's word, in every run of this state directory.
///
/// A `parked` effect is one that a running program waits for; `tollgate approve ID` lets it go on, `tollgate deny ID`
/// refuses it, and after the time shown it is refused as timed out. A `held` one is a change that an ended run made
/// and a rule asks about; `tollgate approve ID` applies it, `tollgate discard RUN` throws it away.
///
/// Names come from programs that nobody trusts: characters that steer a terminal, reorder a line or cannot be seen
/// are shown escaped.
#[derive(Clone, Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct Args {
    /// What to do with the saved rules.
    #[command(subcommand)]
    pub what: Option<What>,
    /// Print one JSON object a line
    #[arg(long)]
    pub json: bool,
}

/// What to do with the saved rules.
#[derive(Clone, Debug, clap::Subcommand)]
pub enum What {
    /// List the rules that `tollgate approve --always` saved
    Rules {
        /// Also those that were revoked
        #[arg(long)]
        all: bool,
        /// Print one JSON object a line
        #[arg(long)]
        json: bool,
    },
    /// Revoke saved rules: what they are about is asked about again, from the next effect on
    Revoke {
        /// The rules' numbers
        #[arg(required = true, value_name = "RULE")]
        rules: Vec<i64>,
    },
}

/// A change that an ended run made and that waits for a person.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct HeldChange {
    /// The receipt that says so.
    pub id: String,
    /// The run.
    pub run: RunId,
    /// The kind.
    pub kind: Kind,
    /// The object.
    pub resource: Resource,
    /// The digest that the word is bound to.
    pub digest: Digest,
    /// Why it is held.
    pub reason: String,
    /// The run's workspace.
    pub workspace: String,
}

/// Something that waits.
#[derive(Serialize)]
#[serde(rename_all = "kebab-case", tag = "state")]
enum Waiting<'a> {
    Parked(&'a Parked),
    Held(&'a HeldChange),
}

/// Lists what waits, or does what is asked with the saved rules.
///
/// # Errors
/// Those of the ledger and of writing; a rule that is not there.
pub fn run(args: &Args, state: &Path, out: &mut dyn Write, talk: &mut dyn Write) -> Result<ExitCode, Failure> {
    match &args.what {
        None => list(args.json, state, out, talk)?,
        Some(What::Rules { all, json }) => rules(*all, *json, state, out)?,
        Some(What::Revoke { rules }) => {
            let ledger = Ledger::open(state)?;
            for rule in rules {
                ledger.revoke_approval_rule(*rule)?;
                writeln!(talk, "rule {rule} is revoked: what it is about is asked about again")?;
            }
        }
    }
    out.flush()?;
    Ok(ExitCode::SUCCESS)
}

fn list(json: bool, state: &Path, out: &mut dyn Write, talk: &mut dyn Write) -> Result<(), Failure> {
    let mut rows = Vec::new();
    if let Some(ledger) = standing::ledger(state)? {
        for record in ledger.runs(RunQuery { all: Which::Live, limit: None, since: None })? {
            let record = standing::settle(&ledger, record)?;
            if record.state == RunState::Ended {
                continue;
            }
            match parked(&ledger, &record.id) {
                Ok(parked) => {
                    for one in &parked {
                        show(json, Waiting::Parked(one), out, &mut rows)?;
                    }
                }
                // It ended meanwhile, or is only just starting: then nothing of it waits.
                Err(ClientError::Unreachable(_)) => {}
                Err(cause) => writeln!(talk, "run {}: {}", record.id, escape(&cause.to_string()))?,
            }
        }
        for record in ledger.runs(RunQuery { all: Which::All, limit: None, since: None })? {
            for one in &held(&ledger, &record)? {
                show(json, Waiting::Held(one), out, &mut rows)?;
            }
        }
    }
    if !json {
        Table::print_all(out, ["ID", "STATE", "UNTIL", "EFFECT", "OBJECT", "WHAT"], rows)?;
    }
    Ok(())
}

fn show(json: bool, waiting: Waiting<'_>, out: &mut dyn Write, rows: &mut Vec<[String; 6]>) -> Result<(), Failure> {
    if json {
        return Ok(json_line(out, &waiting)?);
    }
    let object = |resource: &Resource| escape(&shell_word(&resource.to_string()));
    rows.push(match waiting {
        Waiting::Parked(one) => {
            let calls = if one.waiting > 1 { format!("{} calls, ", one.waiting) } else { String::new() };
            [
                escape(&one.id),
                "parked".to_owned(),
                escape(&one.expires_at),
                one.kind.to_string(),
                object(&one.resource),
                shorten(&escape(&format!("{calls}{}; {}", one.detail, one.rule)), 160),
            ]
        }
        Waiting::Held(one) => [
            escape(&one.id),
            "held".to_owned(),
            "-".to_owned(),
            one.kind.to_string(),
            object(&one.resource),
            shorten(&escape(&one.reason), 160),
        ],
    });
    Ok(())
}

fn rules(all: bool, json: bool, state: &Path, out: &mut dyn Write) -> Result<(), Failure> {
    let mut rows = Vec::new();
    if let Some(ledger) = standing::ledger(state)? {
        for rule in ledger.approval_rules(if all { WhichRules::All } else { WhichRules::Held })? {
            if json {
                json_line(out, &rule)?;
                continue;
            }
            let to = rule.scope.to.as_deref().map(|to| format!(" to {}", shell_word(to))).unwrap_or_default();
            rows.push([
                rule.id.to_string(),
                rule.scope.kind.to_string(),
                escape(&format!("{}{to}", shell_word(&rule.scope.path))),
                rule.scope.uid.to_string(),
                escape(&rule.scope.workspace),
                rule.made_at,
                if rule.revoked_at.is_some() { "revoked" } else { "held" }.to_owned(),
            ]);
        }
    }
    if !json {
        Table::print_all(out, ["RULE", "EFFECT", "OBJECT", "USER", "WORKSPACE", "SAVED", "STATE"], rows)?;
    }
    Ok(())
}

/// What waits in a run that goes on.
///
/// # Errors
/// As [`control::ask`].
pub fn parked(ledger: &Ledger, run: &RunId) -> Result<Vec<Parked>, ClientError> {
    let asked = standing::block_on(control::ask(&ledger.run_dir(run), "/v1/approvals", None));
    let bytes = asked.map_err(|failure| ClientError::Broken(failure.message))??;
    serde_json::from_slice(&bytes).map_err(|cause| ClientError::Broken(cause.to_string()))
}

/// Gives a word to a run that goes on.
///
/// # Errors
/// As [`control::ask`].
pub fn decide(ledger: &Ledger, run: &RunId, id: &str, word: Word) -> Result<Decided, Failure> {
    let body = serde_json::json!(control::Decision { id: id.to_owned(), word });
    match standing::block_on(control::ask(&ledger.run_dir(run), "/v1/approvals", Some(&body)))? {
        Ok(bytes) => serde_json::from_slice(&bytes)
            .map_err(|cause| Failure::control(&run.0, &ClientError::Broken(cause.to_string()))),
        Err(ClientError::Refused { reason, .. }) => Err(Failure::new(reason, "`tollgate approvals` lists what waits")),
        Err(cause) => Err(Failure::control(&run.0, &cause)),
    }
}

/// The changes of a run that a rule asks about and nobody has decided.
///
/// # Errors
/// The ledger's.
pub fn held(ledger: &Ledger, record: &RunRecord) -> Result<Vec<HeldChange>, Failure> {
    let over = record.state == RunState::Ended;
    if !over || !matches!(record.changes, ChangesState::Pending | ChangesState::Partial) {
        return Ok(Vec::new());
    }
    let query = ReceiptQuery { run: Some(record.id.clone()), ..ReceiptQuery::default() };
    // The last receipt of a change says where it stands: what was applied since has one that allows it.
    let mut last: BTreeMap<(Kind, String), HeldChange> = BTreeMap::new();
    for receipt in ledger.receipts(&query)? {
        let receipt = receipt?;
        if receipt.door != Door::Workspace {
            continue;
        }
        let key = (receipt.kind, receipt.resource.to_string());
        if receipt.decision != Decision::Refused || receipt.decided_by != "approval" {
            last.remove(&key);
            continue;
        }
        let held = HeldChange {
            id: receipt.id.0,
            run: record.id.clone(),
            kind: receipt.kind,
            resource: receipt.resource,
            digest: receipt.request_digest,
            reason: receipt.reason,
            workspace: record.workspace.clone(),
        };
        last.insert(key, held);
    }
    Ok(last.into_values().collect())
}

/// What an id names.
pub enum Named {
    /// A question of a run that goes on.
    Question {
        /// Its run.
        run: RunId,
        /// Its name, whole.
        id: String,
    },
    /// A held change of a run that is over.
    Held(Box<RunRecord>, HeldChange),
}

/// Finds what an id of `tollgate approvals` names. The run's part may be the only beginning of one.
///
/// # Errors
/// When nothing that waits has this name.
pub fn find(ledger: &Ledger, id: &str) -> Result<Named, Failure> {
    let nothing = || {
        let message = format!("nothing that waits is called `{id}`: it was answered, timed out, withdrawn or applied");
        Failure::new(message, "`tollgate approvals` lists what waits")
    };
    let (run, rest) = id.rsplit_once('.').ok_or_else(nothing)?;
    let record = standing::settle(ledger, ledger.run(run)?)?;
    if let Some(number) = rest.strip_prefix('q') {
        if record.state == RunState::Ended || number.parse::<u64>().is_err() {
            return Err(nothing());
        }
        return Ok(Named::Question { id: format!("{}.q{number}", record.id), run: record.id });
    }
    let whole = format!("{}.{rest}", record.id);
    let held = held(ledger, &record)?.into_iter().find(|held| held.id == whole).ok_or_else(nothing)?;
    Ok(Named::Held(Box::new(record), held))
}
