//! `tollgate approve`: a person's yes.

use super::{
    apply,
    approvals::{self, HeldChange, Named},
    changes,
    output::{escape, json_line, Failure},
};
use crate::{
    chain::approval::{covers, scope_of, Word},
    doors::workspace::effect_of,
    effect::Effect,
    ledger::{record::RunRecord, Ledger},
    room::place::Place,
};
use std::{io::Write, path::Path, process::ExitCode};

/// Let what waits for a person go on.
///
/// Without an option, or with `--once`, it is this effect, this one time. Every yes is about exactly the effect that
/// `tollgate approvals` shows, by its digest; the same with another content is asked about again. A rule saved with
/// `--always` is about the kind and the path, with any content, of this user's runs in this workspace; `tollgate
/// approvals rules` lists it and `tollgate approvals revoke` takes it back. Nothing that is approved overrides a
/// `[[deny]]`.
#[derive(Clone, Debug, clap::Args)]
#[command(group = clap::ArgGroup::new("scope").args(["once", "run_long", "always"]))]
pub struct Args {
    /// The id, as `tollgate approvals` shows it
    pub id: String,
    /// This effect, this one time (the default)
    #[arg(long)]
    pub once: bool,
    /// Exactly this effect, as often as the run asks
    #[arg(long = "run")]
    pub run_long: bool,
    /// This kind on this path, in this run and later ones, until the rule is revoked
    #[arg(long)]
    pub always: bool,
    /// Print what was decided as JSON
    #[arg(long)]
    pub json: bool,
}

/// Gives the word.
///
/// # Errors
/// When nothing of that name waits, or the word could not be carried out.
pub fn run(args: &Args, state: &Path, out: &mut dyn Write, talk: &mut dyn Write) -> Result<ExitCode, Failure> {
    let word = match (args.run_long, args.always) {
        (true, _) => Word::Run,
        (_, true) => Word::Always,
        (false, false) => Word::Once,
    };
    let ledger = Ledger::open(state)?;
    match approvals::find(&ledger, &args.id)? {
        Named::Question { run, id } => {
            let decided = approvals::decide(&ledger, &run, &id, word)?;
            let rule = decided.rule.map(|rule| format!(" (rule {rule})")).unwrap_or_default();
            writeln!(talk, "approved {id}: {}{rule}", decided.covers)?;
            if args.json {
                json_line(out, &decided)?;
            }
            Ok(ExitCode::SUCCESS)
        }
        Named::Held(record, held) => approve_held(args, word, &ledger, &record, &held, (out, talk)),
    }
}

/// Applies a held change at the operator's word, if it still is the one that was shown.
fn approve_held(
    args: &Args,
    word: Word,
    ledger: &Ledger,
    record: &RunRecord,
    held: &HeldChange,
    (out, talk): (&mut dyn Write, &mut dyn Write),
) -> Result<ExitCode, Failure> {
    if word == Word::Run {
        return Err(Failure {
            status: 2,
            ..Failure::new(
                format!("run {} is over, so nothing of it can be approved for the run", record.id),
                "leave `--run` out",
            )
        });
    }
    let effect = pending_effect(ledger, record, held)?;
    if word == Word::Always {
        let uid = record.subject.uid;
        let scope = scope_of(&effect, uid, &record.workspace)
            .ok_or_else(|| Failure::new("no rule can be saved about this", "leave `--always` out"))?;
        let rule = ledger.save_approval_rule(&scope, &held.id, nix::unistd::geteuid().as_raw())?;
        writeln!(talk, "saved rule {rule}: {}", covers(word))?;
    }
    let path = held.resource.to_string();
    let args = apply::Apply { run: record.id.0.clone(), paths: vec![path], json: args.json };
    changes::apply(&args, ledger.state(), out, talk)
}

/// The effect that the pending change is now; an error where it is no longer the one that was asked about.
fn pending_effect(ledger: &Ledger, record: &RunRecord, held: &HeldChange) -> Result<Effect, Failure> {
    let failed = |error: &(dyn std::error::Error + 'static)| {
        Failure::new(format!("the changes of run {} cannot be read", record.id), "").because(error)
    };
    let place = Place::open(&ledger.run_dir(&record.id)).map_err(|error| failed(&error))?;
    let set = place.changes().map_err(|error| failed(&error))?;
    set.changes
        .iter()
        .map(|change| effect_of(change, &record.subject, record.room.as_ref(), place.place.since_ns))
        .find(|effect| effect.digest() == held.digest)
        .ok_or_else(|| {
            let object = escape(&held.resource.to_string());
            Failure::new(
                format!("{} `{object}` is no longer what was asked about as {}", held.kind, held.id),
                format!(
                    "look at it with `tollgate diff {0}`; `tollgate apply {0} PATH` applies what is there now",
                    record.id
                ),
            )
        })
}
