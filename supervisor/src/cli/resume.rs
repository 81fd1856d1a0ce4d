//! `tollgate resume RUN`: take up an interrupted run.

use super::{
    output::{escape, Failure},
    run, Command,
};
use crate::{
    effect::path,
    jail::outcome,
    ledger::{
        self,
        record::{Recipe, RunRecord},
        Ledger,
    },
    policy::overrides::split_variable,
    service::{
        recovery,
        resume::{Copied, Decisions, Resumption},
        run::{take_signals, Copy},
    },
};
use std::{
    ffi::OsString,
    os::unix::ffi::{OsStrExt as _, OsStringExt as _},
    path::Path,
    process::ExitCode,
};

/// Take up a run whose supervisor was interrupted
///
/// The program starts again from its beginning, with its files as the interruption left them: what it had written in its
/// workspace is there, and nothing of its memory. Use it for programs that can be started again, as build tools and
/// test runners can. It runs under the same command, options, policy and workspace; where the policy changed meanwhile,
/// it is refused. What must not be done twice and was done is answered from the ledger, what may be repeated is done
/// again. An effect that may or may not have happened is asked about: nothing starts until each is named with `--redo`
/// or `--skip`.
///
/// A new run takes over the old one's layer, and names it; a resume that is interrupted can be resumed. Whatever the new
/// run gives as exit status is passed on, as by `tollgate run`.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// The run: its id, a unique beginning of one, or `latest`
    pub run: String,
    /// Do this effect, which is in doubt, when the program asks for it again
    #[arg(long, value_name = "RECEIPT")]
    pub redo: Vec<String>,
    /// Answer this effect, which is in doubt, as if it were done
    #[arg(long, value_name = "RECEIPT")]
    pub skip: Vec<String>,
    /// Set a variable again whose value was given to `tollgate run`: values are not kept
    #[arg(long = "env", short = 'e', value_name = "NAME=VALUE")]
    pub environment: Vec<String>,
    /// Say nothing on standard error
    #[arg(long, short)]
    pub quiet: bool,
}

/// Resumes the run, and gives the program's exit status.
///
/// # Errors
/// When it cannot be resumed, with the status 125.
pub fn run(args: &Args, state: Option<&Path>) -> Result<ExitCode, Failure> {
    // Before any thread exists, so that every thread has them blocked.
    take_signals().map_err(|error| refused(format!("signals: {error}"), ""))?;
    let state = match state {
        Some(path) => path.to_owned(),
        None => ledger::state_dir().map_err(|error| refused(error.to_string(), ""))?,
    };
    let ledger = Ledger::open(&state).map_err(|error| refused(error.to_string(), ""))?;
    for recovered in recovery::recover(&ledger) {
        if !args.quiet {
            eprintln!("tollgate: {}", escape(&recovered.to_string()));
        }
    }
    let record =
        ledger.run(&args.run).map_err(|error| refused(error.to_string(), "`tollgate ps --all` lists the runs"))?;
    let (mut request, streams) = again(args, &record, &ledger)?;
    let decisions = Decisions { redo: args.redo.clone(), skip: args.skip.clone() };
    let resumption = Resumption::prepare(&ledger, &record, &decisions)
        .map_err(|error| refused(error.to_string(), "`tollgate inspect` says how a run stands"))?;
    if resumption.copied == Copied::Yes {
        request.copy = Copy::Mirror;
    }
    request.resumes = Some(resumption);
    run::carry_out(&ledger, request, streams, args.quiet)
}

/// The run as it was asked for, asked for again.
fn again(
    args: &Args,
    record: &RunRecord,
    ledger: &Ledger,
) -> Result<(crate::service::run::RunRequest, crate::service::run::Streams), Failure> {
    let id = &record.id;
    let Some(recipe) = &record.recipe else {
        return Err(refused(
            format!("run {id} does not say how it was asked for; an older version of Tollgate made it"),
            "start it anew with `tollgate run`",
        ));
    };
    let unreadable = |error: path::BadPath| refused(format!("how run {id} was asked for cannot be read: {error}"), "");
    let word = |text: &String| path::unescape(text).map(OsString::from_vec);
    let words = |texts: &[String]| texts.iter().map(word).collect::<Result<Vec<_>, _>>();
    let given: Vec<&str> = args.environment.iter().map(|text| split_variable(text).0).collect();
    if let Some(missing) = recipe.variables.iter().find(|name| !given.contains(&name.as_str())) {
        return Err(refused(
            format!("run {id} was given a value for the variable `{missing}`, and values are not kept"),
            format!("give it again: `--env {missing}=VALUE`"),
        ));
    }
    let directory = word(&recipe.directory).map_err(unreadable)?;
    std::env::set_current_dir(&directory).map_err(|error| {
        refused(format!("the folder {}: {error}", Path::new(&directory).display()), "make it again")
    })?;
    let mut line: Vec<OsString> = vec!["tollgate".into(), "run".into()];
    line.extend(words(&recipe.options).map_err(unreadable)?);
    for text in &args.environment {
        line.extend(["--env".into(), text.into()]);
    }
    line.push("--".into());
    line.extend(words(&recipe.command).map_err(unreadable)?);
    let parsed = super::parse(line).map_err(|error| {
        refused(format!("run {id} was asked for in words that this version does not know: {error}"), "")
    })?;
    let Command::Run(parsed) = parsed.command else {
        return Err(refused(format!("run {id} was not started by `tollgate run`"), ""));
    };
    let source = run::source(&parsed, ledger.state())?;
    let (mut request, streams) = run::prepare(*parsed, source, ledger)?;
    request.recipe = Some(recipe.clone());
    if request.policy.digest.to_string() != record.policy_digest {
        return Err(refused(
            format!(
                "the policy `{}` is not what it was when run {id} started (sha256 {}, now {})",
                record.policy, record.policy_digest, request.policy.digest
            ),
            "put it back as it was, or start the program anew with `tollgate run`",
        ));
    }
    if request.workspace.to_string_lossy() != record.workspace {
        return Err(refused(
            format!(
                "run {id} worked in {}, and its options now mean {}",
                record.workspace,
                request.workspace.display()
            ),
            "move the folder back",
        ));
    }
    if request.caller.uid != record.subject.uid {
        return Err(refused(
            format!("run {id} is user {}'s, and you are user {}", record.subject.uid, request.caller.uid),
            "resume it as that user",
        ));
    }
    Ok((request, streams))
}

/// What the words of a command line say about how a run is asked for; none where they are no `tollgate run`.
pub fn recipe(words: impl Iterator<Item = OsString>) -> Option<Recipe> {
    let spelled = |word: &OsString| path::escape(word.as_bytes());
    let mut words = words.skip(1).peekable();
    loop {
        let word = words.next()?;
        match word.as_bytes() {
            b"run" => break,
            b"--state" => {
                words.next();
            }
            word if word.starts_with(b"--state=") => {}
            _ => return None,
        }
    }
    let mut options = Vec::new();
    let mut variables = Vec::new();
    // A value may be a secret, so only the name is kept, and the option not at all.
    let mut is_value = |text: &str| match split_variable(text) {
        (name, Some(_)) => {
            variables.push(name.to_owned());
            true
        }
        (_, None) => false,
    };
    while let Some(word) = words.next() {
        let text = word.to_string_lossy().into_owned();
        if text == "--" {
            break;
        }
        match text.as_str() {
            "--env" | "-e" => {
                let value = words.next()?;
                if !is_value(&value.to_string_lossy()) {
                    options.extend([spelled(&word), spelled(&value)]);
                }
            }
            "--state" => {
                words.next();
            }
            _ if text.starts_with("--state=") => {}
            _ => {
                let short = text.strip_prefix("-e").filter(|_| !text.starts_with("--"));
                let joined = text.strip_prefix("--env=").or(short.map(|rest| rest.strip_prefix('=').unwrap_or(rest)));
                if !joined.is_some_and(&mut is_value) {
                    options.push(spelled(&word));
                }
            }
        }
    }
    let directory = std::env::current_dir().ok()?;
    Some(Recipe {
        options,
        command: words.map(|word| spelled(&word)).collect(),
        directory: path::escape(directory.as_os_str().as_bytes()),
        variables,
    })
}

fn refused(message: impl Into<String>, hint: impl Into<String>) -> Failure {
    Failure { status: outcome::ExitCode::NotDone.number(), ..Failure::new(message, hint) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(words: &[&str]) -> Option<Recipe> {
        recipe(words.iter().map(OsString::from))
    }

    #[test]
    fn a_recipe_holds_the_options_and_the_command_and_no_value_of_a_variable() {
        let words = ["tollgate", "--state", "run", "run", "--wall", "5s", "-e", "TOKEN=secret", "--env=OTHER=hidden"];
        let rest = ["-eTHIRD=hush", "--env", "LANG", "-q", "--state=x", "--", "sh", "-c", "echo -e A=B -- x"];
        let all: Vec<&str> = words.into_iter().chain(rest).collect();
        let recipe = of(&all).expect("is a run");
        assert_eq!(recipe.options, ["--wall", "5s", "--env", "LANG", "-q"]);
        assert_eq!(recipe.command, ["sh", "-c", "echo -e A=B -- x"]);
        assert_eq!(recipe.variables, ["TOKEN", "OTHER", "THIRD"]);
        assert!(!format!("{recipe:?}").contains("secret"));
        assert_eq!(of(&["tollgate", "ps"]), None);
    }

    #[test]
    fn bytes_that_are_no_text_survive() {
        let odd = OsString::from_vec(b"a\xff\\b".to_vec());
        let words = ["tollgate", "run", "--"].map(OsString::from).into_iter().chain([odd.clone()]);
        let recipe = recipe(words).expect("is a run");
        assert_eq!(path::unescape(&recipe.command[0]).map(OsString::from_vec).expect("reads"), odd);
    }
}
