//! `tollgate explain`: why something was decided as it was, and what to change.

use super::{
    output::{bytes, duration, escape, json_line, plain, Failure},
    standing, verify,
};
use crate::{
    chain::{containment::Containment, Decision},
    doors::{
        api::{Opinion, Verdict},
        request::{self, Place},
    },
    effect::{Door, Effect, Idempotency, Kind, ReceiptId, RunId, Subject},
    ledger::{
        record::{Receipt, RunRecord},
        Ledger, ReceiptQuery,
    },
    policy::{search::PolicyRef, Policy},
};
use serde::Serialize;
use std::{io::Write, path::Path, process::ExitCode, sync::Arc};

/// Explain one receipt: every handler that its effect passed, who decided, by which rule, and what to change. Or
/// explain a run: what it was under, how it ended, and everything that was refused, failed or is in doubt. Or, with
/// `--policy`, say what a policy would decide about a request, a connection or a name, without a run.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// A run (its id, a unique beginning of one, or `latest`), or a receipt of one, as in `latest.3`; with `--policy`, a
    /// kind: `http/request`, `net/connect` or `net/resolve`
    #[arg(value_name = "RUN|RECEIPT|KIND")]
    pub what: String,
    /// What an effect of that kind would be on: `GET https://HOST/PATH`, `HOST:PORT`, or a name
    #[arg(value_name = "OBJECT", requires = "policy")]
    pub object: Option<String>,
    /// Ask this policy, a name or a file
    #[arg(long, value_name = "POLICY", requires = "object")]
    pub policy: Option<String>,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// So many receipts are verified before anything is said of them; more would take longer than a person waits.
const VERIFIED: u64 = 10_000;
/// So many groups of a run are shown to a reader; JSON has all.
const SHOWN: usize = 50;

/// One step of the way of an effect.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Step {
    /// The handler, the jail's layer, or `world`.
    pub name: String,
    /// What it did.
    pub did: Did,
}

/// What a handler did with an effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Did {
    /// Let it go on to the next.
    Forwarded,
    /// Decided.
    Decided,
}

/// Refusals, failures or doubts that are alike.
#[derive(Clone, Debug, Serialize)]
struct Group {
    decision: Decision,
    kind: Kind,
    object: String,
    decided_by: String,
    rule: Option<String>,
    reason: String,
    hint: String,
    /// How often it happened.
    times: u64,
    /// The first receipt.
    first: ReceiptId,
}

/// Explains a run or a receipt.
///
/// # Errors
/// When there is no such run or receipt, and those of the ledger and of writing to `out`.
pub fn run(args: &Args, state: &Path, out: &mut dyn Write) -> Result<ExitCode, Failure> {
    if let (Some(policy), Some(object)) = (&args.policy, &args.object) {
        return explain_policy(policy, &args.what, object, args.json, out);
    }
    let (run, seq) = match args.what.split_once('.') {
        Some((run, seq)) => (run, Some(seq)),
        None => (&*args.what, None),
    };
    let (ledger, record) = standing::find(state, run)?;
    if record.effects.count <= VERIFIED {
        verify::warn(&ledger, Some(&record.id));
    }
    match seq {
        Some(seq) => {
            let receipt = receipt(&ledger, &record, seq)?;
            explain_receipt(&record, &receipt, args.json, out)?;
        }
        None => explain_run(&ledger, &record, args.json, out)?,
    }
    out.flush()?;
    Ok(ExitCode::SUCCESS)
}

/// What a policy would say of an effect of the network, in the words of the handlers that would.
fn explain_policy(
    policy: &str,
    kind: &str,
    object: &str,
    json: bool,
    out: &mut dyn Write,
) -> Result<ExitCode, Failure> {
    let usage = |message: String| Failure { status: 2, ..Failure::new(message, "see `tollgate explain --help`") };
    let policy = PolicyRef::parse(policy).and_then(|reference| Policy::load(&reference, &super::search_path()));
    let policy = policy.map_err(|error| Failure::from(&error))?;
    let kind: Kind = kind.parse().map_err(|error: crate::effect::UnknownKind| usage(error.to_string()))?;
    let mut pairs = vec![("kind".to_owned(), kind.name().to_owned())];
    match (kind, object.trim().rsplit_once(char::is_whitespace)) {
        (Kind::HttpRequest, Some((method, url))) => {
            pairs.extend([("method".to_owned(), method.trim().to_owned()), ("url".to_owned(), url.to_owned())]);
        }
        (Kind::HttpRequest, None) => pairs.push(("url".to_owned(), object.trim().to_owned())),
        (Kind::NetConnect | Kind::NetAccept, _) => pairs.push(("to".to_owned(), object.to_owned())),
        (Kind::NetResolve, _) => pairs.push(("name".to_owned(), object.to_owned())),
        _ => return Err(usage(format!("{kind} is asked about within a run, with `tollgate why`"))),
    }
    let nowhere = Place { run: RunId(String::new()), workspace: Vec::new() };
    let ask = request::why(pairs, &nowhere).map_err(|error| usage(error.to_string()))?;
    let effect = Effect {
        kind: ask.kind,
        resource: ask.resource,
        subject: Subject { uid: nix::unistd::getuid().as_raw(), run: None, agent: None },
        room: None,
        door: Door::Network,
        request: ask.request,
    };
    let containment = Containment::new(&policy.network);
    let opinion = Opinion::of(&Arc::new(policy.admission), &effect).contained(&containment, &effect);
    let status = if opinion.verdict == Verdict::Deny { ExitCode::from(1) } else { ExitCode::SUCCESS };
    if json {
        json_line(out, &opinion)?;
        return Ok(status);
    }
    let mut lines = vec![
        ("effect", kind.name().to_owned()),
        ("object", escape(&effect.resource.to_string())),
        ("verdict", format!("{} by {}", plain(&opinion.verdict), escape(&opinion.handler))),
        ("rule", if opinion.rule.is_empty() { "none matches".to_owned() } else { escape(&opinion.rule) }),
        ("policy", format!("{} (sha256 {})", escape(&policy.name), policy.digest)),
    ];
    if !opinion.reason.is_empty() {
        lines.push(("why", escape(&opinion.reason)));
    }
    if !opinion.hint.is_empty() {
        lines.push(("change", escape(&opinion.hint)));
    }
    print(out, &lines)?;
    out.flush()?;
    Ok(status)
}

fn receipt(ledger: &Ledger, record: &RunRecord, seq: &str) -> Result<Receipt, Failure> {
    let none = |why: String| Failure::new(why, format!("`tollgate receipts {}` lists them", record.id));
    let wanted: u64 = seq.parse().ok().filter(|seq| *seq > 0).ok_or_else(|| Failure {
        status: 2,
        ..none(format!("`{seq}` is no place in a run's receipts; they are counted from 1"))
    })?;
    let after_seq = Some(wanted - 1);
    let query = ReceiptQuery { run: Some(record.id.clone()), after_seq, limit: Some(1), ..ReceiptQuery::default() };
    let found = ledger.receipts(&query)?.next().transpose()?.filter(|receipt| receipt.seq == wanted);
    found.ok_or_else(|| match ledger.cut_of(&record.id) {
        Ok(Some(cut)) if wanted <= cut.count => {
            let gone = format!("receipt {}.{wanted} was pruned on {}", record.id, cut.cut_at);
            Failure::new(gone, format!("the first {} of this run are gone; an export made before has them", cut.count))
        }
        _ => none(format!("run {} has no receipt {wanted}; it has {}", record.id, record.effects.count)),
    })
}

/// The way of an effect: every handler that it passed, in order, and who decided.
pub fn trail(record: &RunRecord, receipt: &Receipt) -> Vec<Step> {
    let step = |name: &str, did| Step { name: name.to_owned(), did };
    let alone = vec![step(&receipt.decided_by, Did::Decided)];
    let chain: Vec<&str> = match (receipt.door, receipt.kind) {
        // The jail's layers refuse inside the kernel: what they refused came to no door.
        (Door::Jail, _) => return alone,
        // The caller starts a run, not the program: of the run's chain it passes what every chain has.
        (Door::Control, Kind::RunStart) => {
            const EVERY: [&str; 4] = ["receipts", "admission", "authority", "world"];
            record.chain.iter().map(String::as_str).filter(|name| EVERY.contains(name)).collect()
        }
        // Written down by the supervisor itself: the end of a run and its being killed are never refused.
        (Door::Control, _) => return alone,
        (Door::Api | Door::Program | Door::Network | Door::Workspace, _) => {
            record.chain.iter().map(String::as_str).collect()
        }
    };
    let place = |name: &str| chain.iter().position(|known| *known == name);
    // That nobody knows what came of it is said by `receipts`; it reached the world.
    let decided_at = match (receipt.decision, receipt.decided_by.as_str()) {
        (Decision::InDoubt, "receipts") => place("world"),
        (_, by) => place(by),
    };
    match decided_at {
        Some(last) => {
            let mut steps: Vec<Step> = chain[..last].iter().map(|name| step(name, Did::Forwarded)).collect();
            steps.push(step(chain[last], Did::Decided));
            steps
        }
        // Admission answers for a person where nobody can be asked.
        None if receipt.decided_by == "approval" && place("admission").is_some() => {
            let before = chain.iter().take_while(|name| **name != "admission");
            before.map(|name| step(name, Did::Forwarded)).chain(alone).collect()
        }
        None => alone,
    }
}

fn explain_receipt(record: &RunRecord, receipt: &Receipt, json: bool, out: &mut dyn Write) -> Result<(), Failure> {
    let trail = trail(record, receipt);
    if json {
        let value = serde_json::json!({
            "receipt": receipt,
            "trail": trail,
            "decided_by": receipt.decided_by,
            "rule": receipt.rule,
            "reason": receipt.reason,
            "change": receipt.hint,
            "policy": record.policy,
            "policy_digest": record.policy_digest,
            "repeats": repeats(receipt.idempotency),
        });
        json_line(out, &value)?;
        return Ok(());
    }
    let subject = &receipt.subject;
    let run = subject.run.as_ref().map_or_else(|| "the operator".to_owned(), |run| format!("run {run}"));
    let agent = subject.agent.as_deref().map(|agent| format!(", agent {}", escape(agent))).unwrap_or_default();
    let classes: Vec<String> = receipt.classes.iter().map(plain).collect();
    let times = if receipt.times > 1 { format!(", {} times", receipt.times) } else { String::new() };
    let path: Vec<String> = trail.iter().map(|step| escape(&step.name)).collect();
    let shown = |digest: &Option<crate::effect::Digest>| digest.map_or_else(|| "none".to_owned(), |d| d.to_string());
    let injected = if receipt.injected { ", made up by a fault handler" } else { "" };
    let mut lines = vec![
        ("receipt", escape(&receipt.id.0)),
        ("effect", format!("{} ({}){times}", receipt.kind, classes.join(", "))),
        ("object", escape(&receipt.resource.to_string())),
        ("asked by", format!("user {}, {}{agent}, {}", subject.uid, escape(&run), door(receipt.door))),
        ("at", escape(&receipt.started_at)),
        ("passed", path.join(" → ")),
        ("decided", format!("{} by {}{injected}", plain(&receipt.decision), escape(&receipt.decided_by))),
    ];
    lines.push((
        "rule",
        match &receipt.rule {
            Some(rule) => escape(rule),
            None if receipt.door == Door::Jail => "none: it is how the jail is built".to_owned(),
            None => "none had a part in it".to_owned(),
        },
    ));
    lines.push(("policy", format!("{} (sha256 {})", escape(&record.policy), escape(&record.policy_digest))));
    if !receipt.reason.is_empty() {
        lines.push(("why", escape(&receipt.reason)));
    }
    if !receipt.hint.is_empty() {
        lines.push(("change", escape(&receipt.hint)));
    }
    lines.extend([
        (
            "time",
            format!(
                "{} queued, {} deciding, {} executing",
                duration(receipt.queued_us),
                duration(receipt.decided_us),
                duration(receipt.executed_us)
            ),
        ),
        ("bytes", bytes(receipt.bytes)),
        ("repeats", repeats(receipt.idempotency).to_owned()),
        ("request", receipt.request_digest.to_string()),
        ("result", shown(&receipt.result_digest)),
        ("hash", format!("{} after {}", receipt.hash, receipt.prev)),
    ]);
    Ok(print(out, &lines)?)
}

fn explain_run(ledger: &Ledger, record: &RunRecord, json: bool, out: &mut dyn Write) -> Result<(), Failure> {
    let groups = groups(ledger, record)?;
    let cut = ledger.cut_of(&record.id)?;
    let doubts = ledger.in_doubt(Some(&record.id))?;
    if json {
        let doubts: Vec<_> = doubts
            .iter()
            .map(|doubt| serde_json::json!({ "n": doubt.n, "kind": doubt.draft.kind, "object": doubt.draft.resource.to_string(), "receipt": doubt.receipt }))
            .collect();
        let value = serde_json::json!({
            "run": record, "word": standing::word(record), "chain": record.chain, "groups": groups,
            "open_intents": doubts, "cut": cut,
        });
        json_line(out, &value)?;
        return Ok(());
    }
    let effects = &record.effects;
    let mut lines = vec![
        ("run", escape(&record.id.0)),
        ("command", super::output::command_line(&record.command)),
        ("policy", format!("{} (sha256 {})", escape(&record.policy), escape(&record.policy_digest))),
        (
            "chain",
            match record.chain.is_empty() {
                true => "not known: it had none yet, or an older version wrote this".to_owned(),
                false => escape(&record.chain.join(" → ")),
            },
        ),
        ("ended", standing::word(record)),
    ];
    if let Some(detail) = record.outcome.as_ref().and_then(|outcome| outcome.detail.as_deref()) {
        lines.push(("because", escape(detail)));
    }
    lines.push((
        "effects",
        format!("{} ({} refused, {} not to be repeated)", effects.count, effects.refused, effects.once),
    ));
    if let Some(cut) = &cut {
        lines.push(("pruned", format!("the first {} receipts, on {}", cut.count, cut.cut_at)));
    }
    match record.degraded.is_empty() {
        true => lines.push(("went without", "nothing: every layer and limit of the policy held".to_owned())),
        false => lines.extend(record.degraded.iter().map(|degraded| ("went without", escape(degraded)))),
    }
    print(out, &lines)?;
    if groups.is_empty() {
        writeln!(out, "\nnothing was refused, nothing failed, nothing is in doubt")?;
    }
    for group in groups.iter().take(SHOWN) {
        let times = if group.times > 1 { format!(" ({} times)", group.times) } else { String::new() };
        writeln!(
            out,
            "\n{} by {}: {} {}{times}, receipt {}",
            plain(&group.decision),
            escape(&group.decided_by),
            group.kind,
            escape(&group.object),
            escape(&group.first.0)
        )?;
        if let Some(rule) = &group.rule {
            writeln!(out, "    rule    {}", escape(rule))?;
        }
        if !group.reason.is_empty() {
            writeln!(out, "    why     {}", escape(&group.reason))?;
        }
        if !group.hint.is_empty() {
            writeln!(out, "    change  {}", escape(&group.hint))?;
        }
    }
    if groups.len() > SHOWN {
        writeln!(out, "\nand {} more; `--json` has all", groups.len() - SHOWN)?;
    }
    for doubt in doubts.iter().filter(|doubt| doubt.receipt.is_none()) {
        let object = escape(&doubt.draft.resource.to_string());
        writeln!(
            out,
            "\nunder way, or in doubt: {} {object}; its receipt comes when the run is closed",
            doubt.draft.kind
        )?;
    }
    Ok(())
}

/// What was refused, failed or is in doubt, equal things together, in the order of the first of each.
fn groups(ledger: &Ledger, record: &RunRecord) -> Result<Vec<Group>, Failure> {
    let mut groups: Vec<Group> = Vec::new();
    let mut known = std::collections::HashMap::new();
    for decision in [Decision::Refused, Decision::Failed, Decision::InDoubt] {
        let query = ReceiptQuery { run: Some(record.id.clone()), decision: Some(decision), ..ReceiptQuery::default() };
        for receipt in ledger.receipts(&query)? {
            let receipt = receipt?;
            let object = receipt.resource.to_string();
            let key = (decision, receipt.kind, object.clone(), receipt.decided_by.clone(), receipt.hint.clone());
            let place = *known.entry(key).or_insert(groups.len());
            match groups.get_mut(place) {
                Some(group) => group.times = group.times.saturating_add(receipt.times),
                None => groups.push(Group {
                    decision,
                    kind: receipt.kind,
                    object,
                    decided_by: receipt.decided_by,
                    rule: receipt.rule,
                    reason: receipt.reason,
                    hint: receipt.hint,
                    times: receipt.times,
                    first: receipt.id,
                }),
            }
        }
    }
    Ok(groups)
}

fn print(out: &mut dyn Write, lines: &[(&str, String)]) -> std::io::Result<()> {
    lines.iter().try_for_each(|(name, value)| writeln!(out, "{name:<12} {value}"))
}

fn door(door: Door) -> &'static str {
    match door {
        Door::Api => "at the run's own socket",
        Door::Workspace => "by changing its workspace",
        Door::Jail => "by a system call that the jail looked at",
        Door::Program => "by a system call that waited for the answer",
        Door::Network => "by the network",
        Door::Control => "from outside the jail",
    }
}

fn repeats(idempotency: Idempotency) -> &'static str {
    match idempotency {
        Idempotency::Idempotent => "idempotent: done twice it leaves the world as done once",
        Idempotency::Compensable => "compensable: it has a known inverse",
        Idempotency::Once => "once: never again without confirmation; its intent was on disk before it happened",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        chain::Answer,
        cli::ps::tests::ledger_with_two_runs,
        effect::{fs, Effect, Request, Resource, RunId, Subject},
        ledger::Draft,
    };

    fn effect(door: Door) -> Effect {
        Effect {
            kind: Kind::FsRead,
            resource: Resource::Workspace { path: ".env\x1b".to_owned() },
            subject: Subject { uid: 7, run: Some(RunId("bbbbbbbbbbb1".to_owned())), agent: None },
            room: None,
            door,
            request: Request::Fs(fs::Request::Read { path: ".env".to_owned(), offset: 0, limit: 1 }),
        }
    }

    /// The run `bbbbbbbbbbb1` with these answers, in order.
    fn with(answers: Vec<(Door, Answer)>) -> (tempfile::TempDir, Ledger) {
        let (root, ledger) = ledger_with_two_runs();
        let mut record = ledger.run("bbb").expect("there");
        record.chain = ["receipts", "admission", "quota", "world"].map(str::to_owned).to_vec();
        ledger.update_run(&record).expect("updates");
        for (door, answer) in answers {
            ledger.append(Draft::now(&record.id, &effect(door), &answer, &**ledger.clock())).expect("appends");
        }
        (root, ledger)
    }

    fn denied() -> Answer {
        Answer::refused("admission", "a rule denies it", "take it out")
            .by_rule("python.toml:12 deny fs/read on \"**/.env\"")
    }

    fn explain(ledger: &Ledger, what: &str, json: bool) -> Result<String, Failure> {
        let mut out = Vec::new();
        run(&Args { what: what.to_owned(), object: None, policy: None, json }, ledger.state(), &mut out)?;
        Ok(String::from_utf8(out).expect("text"))
    }

    #[test]
    fn a_refusal_says_what_it_passed_who_decided_by_which_rule_and_what_to_change() {
        let (_root, ledger) = with(vec![(Door::Api, denied())]);
        let text = explain(&ledger, "latest.1", false).expect("explains");
        for line in [
            "passed       receipts → admission\n",
            "decided      refused by admission\n",
            "rule         python.toml:12 deny fs/read on \"**/.env\"\n",
            "why          a rule denies it\n",
            "change       take it out\n",
            "asked by     user 7, run bbbbbbbbbbb1, at the run's own socket\n",
            "repeats      idempotent",
        ] {
            assert!(text.contains(line), "{line}\n{text}");
        }
        assert!(!text.contains('\x1b'), "{text}");
        let value: serde_json::Value =
            serde_json::from_str(&explain(&ledger, "bbb.1", true).expect("explains")).expect("JSON");
        assert_eq!(value["rule"], "python.toml:12 deny fs/read on \"**/.env\"");
        assert_eq!(value["trail"][1], serde_json::json!({ "name": "admission", "did": "decided" }));
    }

    #[test]
    fn the_way_of_each_kind_of_answer_is_told() {
        let doubt = Answer { decision: Decision::InDoubt, ..Answer::refused("receipts", "lost", "look") };
        let answers = vec![
            (Door::Api, Answer::done(serde_json::Value::Null, 0), "receipts admission quota world"),
            (Door::Workspace, Answer::refused("quota", "full", "raise it"), "receipts admission quota"),
            (Door::Api, Answer::refused("approval", "a person must", "ask"), "receipts approval"),
            (Door::Api, Answer::refused("receipts", "gone", "wait"), "receipts"),
            (Door::Api, doubt, "receipts admission quota world"),
            (Door::Jail, Answer::refused("seccomp", "not in the list", "no"), "seccomp"),
            (Door::Jail, Answer::refused("landlock", "hidden", "view"), "landlock"),
            (Door::Control, Answer::done(serde_json::Value::Null, 0), "world"),
            (Door::Api, Answer::refused("api", "no such effect", ""), "api"),
        ];
        let (_root, ledger) = with(answers.iter().map(|(door, answer, _)| (*door, answer.clone())).collect());
        let record = ledger.run("bbb").expect("there");
        for (index, (_, _, way)) in answers.iter().enumerate() {
            let receipt = receipt(&ledger, &record, &(index + 1).to_string()).expect("there");
            let trail = trail(&record, &receipt);
            let names: Vec<&str> = trail.iter().map(|step| &*step.name).collect();
            assert_eq!(names.join(" "), *way, "{receipt:?}");
            let decided: Vec<_> = trail.iter().filter(|step| step.did == Did::Decided).collect();
            assert_eq!(decided.len(), 1);
        }
        let start =
            Receipt { kind: Kind::RunStart, door: Door::Control, ..receipt(&ledger, &record, "1").expect("there") };
        assert_eq!(trail(&record, &start).len(), 3);
        let old = RunRecord { chain: Vec::new(), ..record.clone() };
        assert_eq!(trail(&old, &receipt(&ledger, &record, "2").expect("there")).len(), 1);
    }

    #[test]
    fn a_run_groups_what_went_wrong() {
        let failed = Answer::failed("the disk is full", "free some");
        let jail = Answer::refused("seccomp", "not in the list", "another list");
        let (_root, ledger) = with(vec![
            (Door::Api, denied()),
            (Door::Api, failed),
            (Door::Api, denied()),
            (Door::Api, Answer::done(serde_json::Value::Null, 0)),
            (Door::Jail, jail),
        ]);
        let text = explain(&ledger, "bbb", false).expect("explains");
        assert!(
            text.contains("refused by admission: fs/read .env\\u{1b} (2 times), receipt bbbbbbbbbbb1.1\n"),
            "{text}"
        );
        assert!(text.contains("    rule    python.toml:12"), "{text}");
        assert!(text.contains("failed by world") && text.contains("    change  free some"), "{text}");
        assert!(text.contains("refused by seccomp"), "{text}");
        assert!(text.contains("chain        receipts → admission → quota → world\n"), "{text}");
        let value: serde_json::Value =
            serde_json::from_str(&explain(&ledger, "bbb", true).expect("explains")).expect("JSON");
        assert_eq!(value["groups"].as_array().map(Vec::len), Some(3));
        let quiet = explain(&ledger, "aaa", false).expect("explains");
        assert!(quiet.contains("nothing was refused"), "{quiet}");
    }

    #[test]
    fn what_is_not_there_is_said_to_be_so() {
        let (_root, ledger) = with(vec![(Door::Api, denied())]);
        assert!(explain(&ledger, "latest.2", false).expect_err("none").message.contains("has no receipt 2; it has 1"));
        for bad in ["latest.0", "latest.x", "latest.", "latest.-1"] {
            assert_eq!(explain(&ledger, bad, false).expect_err(bad).status, 2, "{bad}");
        }
        assert!(explain(&ledger, "zzz", false).is_err());
    }

    fn asked(policy: &str, kind: &str, object: &str) -> (serde_json::Value, ExitCode) {
        let args = Args { what: kind.into(), object: Some(object.into()), policy: Some(policy.into()), json: true };
        let mut out = Vec::new();
        let status = run(&args, Path::new("/nonexistent"), &mut out).unwrap();
        (serde_json::from_slice(&out).unwrap(), status)
    }

    #[test]
    fn a_policy_is_asked_about_a_request_without_a_run_and_answers_as_the_handlers_would() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("p.toml");
        let text = "[[allow]]\neffect = ['http/request', 'net/connect']\nhost = ['api.test', '10.1.2.3']\n\
                    [[deny]]\neffect = ['http/request']\nurl = ['https://api.test/admin/**']\n";
        std::fs::write(&file, text).unwrap();
        let policy = file.to_str().unwrap();
        for (kind, object, verdict, handler, part) in [
            ("http/request", "GET https://api.test/x", "allow", "admission", ""),
            ("http/request", "https://api.test/x", "allow", "admission", ""),
            ("http/request", "GET https://api.test/x/../admin/y", "deny", "admission", "refused by the rule deny"),
            ("http/request", "GET https://other.test/", "deny", "admission", "no rule of the policy"),
            ("http/request", "GET http://10.1.2.3/", "deny", "containment", "private network"),
            ("net/connect", "api.test:22", "allow", "admission", ""),
            ("net/connect", "api.test:22", "allow", "admission", ""),
            ("net/resolve", "Api.Test", "allow", "admission", ""),
            ("net/resolve", "other.test", "deny", "admission", "no rule of the policy"),
        ] {
            let (told, status) = asked(policy, kind, object);
            assert_eq!(
                (told["verdict"].as_str(), told["handler"].as_str()),
                (Some(verdict), Some(handler)),
                "{object}"
            );
            assert!(told["reason"].as_str().unwrap().contains(part), "{told}");
            assert_eq!(status == ExitCode::SUCCESS, verdict == "allow", "{object}");
        }
        let (told, _) = asked("default", "http/request", "POST https://api.test/x");
        assert!(told["hint"].as_str().unwrap().contains("--allow 'POST https://api.test/x'"), "{told}");
        for (kind, object) in [("fs/read", "a"), ("http/request", "nonsense"), ("net/connect", "x"), ("a/b", "x")] {
            let args =
                Args { what: kind.into(), object: Some(object.into()), policy: Some("default".into()), json: false };
            assert_eq!(run(&args, Path::new("/nonexistent"), &mut Vec::new()).unwrap_err().status, 2, "{kind}");
        }
    }
}
