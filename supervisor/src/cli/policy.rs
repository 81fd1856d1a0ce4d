//! `tollgate policy`: which policies there are, what one means, and what is wrong with a file.

use super::output::escape;
use crate::{
    chain::admission::{Kinds, Paths, Verdict},
    effect::VOCABULARY,
    policy::{
        fault::{Fault, PolicyError},
        limits::{Asked, Bound, Limit},
        network::Network,
        search::{self, PolicyRef, SearchPath},
        warnings::warnings,
        Commands, Handlers, Launcher, Policy, Presence, WorkspaceAccess,
    },
};
use clap::{Args, Subcommand};
use std::{
    collections::BTreeMap,
    io::{self, Write},
    time::Duration,
};
use tollgate_shim::protocol::Enforcement;

/// List, show and check policies.
#[derive(Debug, Args)]
pub struct PolicyArgs {
    #[command(subcommand)]
    command: PolicyCommand,
}

#[derive(Debug, Subcommand)]
enum PolicyCommand {
    /// List every policy that can be named, and where it comes from
    List(ListArgs),
    /// Show what a policy means once it is composed
    Show(ShowArgs),
    /// Say everything that is wrong with a policy; writes nothing but warnings if nothing is
    Check(CheckArgs),
}

/// What `tollgate policy list` takes.
#[derive(Debug, Args)]
struct ListArgs {
    /// List the kinds of effects that rules can name, instead
    #[arg(long)]
    kinds: bool,
    /// One JSON object a line
    #[arg(long)]
    json: bool,
}

/// What `tollgate policy show` takes.
#[derive(Debug, Args)]
struct ShowArgs {
    /// A name, `builtin:NAME`, or a file
    #[arg(default_value = "default")]
    policy: String,
    /// One JSON object
    #[arg(long)]
    json: bool,
}

/// What `tollgate policy check` takes.
#[derive(Debug, Args)]
struct CheckArgs {
    /// Names or files
    #[arg(required = true)]
    policies: Vec<String>,
    /// One JSON object for each policy
    #[arg(long)]
    json: bool,
}

/// Why `tollgate policy` failed.
#[derive(Debug, thiserror::Error)]
pub enum PolicyCommandError {
    /// The policy itself.
    #[error(transparent)]
    Policy(#[from] PolicyError),
    /// Writing the answer, or talking about it.
    #[error("cannot write: {0}")]
    Write(#[from] io::Error),
    /// `check` found faults, which it has already shown.
    #[error("{faulty} of {checked} policies cannot be used")]
    Faulty {
        /// How many.
        faulty: usize,
        /// Of how many.
        checked: usize,
    },
}

/// Runs `tollgate policy`: data to `out`, talk to `talk`.
///
/// # Errors
///
/// As [`PolicyCommandError`] has them. [`PolicyError::hint`] says what to do.
pub fn run(
    args: &PolicyArgs,
    search: &SearchPath,
    out: &mut dyn Write,
    talk: &mut dyn Write,
) -> Result<(), PolicyCommandError> {
    match &args.command {
        PolicyCommand::List(args) if args.kinds => list_kinds(args, out),
        PolicyCommand::List(args) => list(args, search, out),
        PolicyCommand::Show(args) => show(args, search, out),
        PolicyCommand::Check(args) if args.json => check_as_json(args, search, out),
        PolicyCommand::Check(args) => check(args, search, talk),
    }
}

fn list_kinds(args: &ListArgs, out: &mut dyn Write) -> Result<(), PolicyCommandError> {
    for row in VOCABULARY {
        match args.json {
            true => writeln!(
                out,
                "{}",
                serde_json::json!({ "kind": row.name, "classes": row.classes, "summary": row.summary })
            )?,
            false => writeln!(out, "{:<16} {}", row.name, row.summary)?,
        }
    }
    Ok(())
}

fn list(args: &ListArgs, search: &SearchPath, out: &mut dyn Write) -> Result<(), PolicyCommandError> {
    for entry in search::list(search) {
        let reference = PolicyRef::parse(&entry.name)?;
        let (description, broken) = match Policy::load(&reference, search) {
            Ok(policy) => (policy.description, false),
            Err(_shown_by_check) => (format!("cannot be used: `tollgate policy check {}`", entry.name), true),
        };
        let place = entry.path.as_ref().map_or("built in".to_owned(), |path| path.display().to_string());
        if args.json {
            let object = serde_json::json!({
                "name": entry.name, "source": place, "hides": entry.hides, "description": description,
                "usable": !broken,
            });
            writeln!(out, "{object}")?;
            continue;
        }
        writeln!(out, "{:<12} {:<12} {}", escape(&entry.name), escape(&place), escape(&description))?;
        for hidden in &entry.hides {
            writeln!(out, "{:<12} hides the one that is {hidden}", "")?;
        }
    }
    Ok(())
}

fn check(args: &CheckArgs, search: &SearchPath, talk: &mut dyn Write) -> Result<(), PolicyCommandError> {
    let mut faulty = 0;
    for text in &args.policies {
        match PolicyRef::parse(text).and_then(|reference| Policy::load(&reference, search)) {
            Ok(policy) => {
                for warning in warnings(&policy) {
                    writeln!(talk, "warning: {}: {}", escape(text), escape(&warning))?;
                }
            }
            Err(error) => {
                faulty += 1;
                match &error {
                    PolicyError::Faults(faults) => {
                        for fault in faults {
                            writeln!(talk, "error: {}", escape(&fault.to_string()))?;
                        }
                    }
                    _ => {
                        let hint = error.hint().to_string();
                        writeln!(talk, "error: {}\nhint: {}", escape(&error.to_string()), escape(&hint))?;
                    }
                }
            }
        }
    }
    match faulty {
        0 => Ok(()),
        faulty => Err(PolicyCommandError::Faulty { faulty, checked: args.policies.len() }),
    }
}

fn check_as_json(args: &CheckArgs, search: &SearchPath, out: &mut dyn Write) -> Result<(), PolicyCommandError> {
    let mut faulty = 0;
    for text in &args.policies {
        let loaded = PolicyRef::parse(text).and_then(|reference| Policy::load(&reference, search));
        faulty += usize::from(loaded.is_err());
        let (found, faults) = match &loaded {
            Ok(policy) => (warnings(policy).iter().map(ToString::to_string).collect(), Vec::new()),
            Err(PolicyError::Faults(faults)) => (Vec::new(), faults.iter().map(fault_as_json).collect()),
            Err(other) => (Vec::new(), vec![serde_json::json!({ "message": other.to_string(), "help": other.hint() })]),
        };
        let found: Vec<String> = found;
        let object = serde_json::json!({
            "policy": text, "usable": loaded.is_ok(), "warnings": found, "faults": faults,
        });
        writeln!(out, "{object}")?;
    }
    match faulty {
        0 => Ok(()),
        faulty => Err(PolicyCommandError::Faulty { faulty, checked: args.policies.len() }),
    }
}

fn fault_as_json(fault: &Fault) -> serde_json::Value {
    let Fault { file, line, column, excerpt, message, help } = fault;
    serde_json::json!({
        "file": file, "line": line, "column": column, "excerpt": excerpt, "message": message, "help": help,
    })
}

fn show(args: &ShowArgs, search: &SearchPath, out: &mut dyn Write) -> Result<(), PolicyCommandError> {
    let policy = Policy::load(&PolicyRef::parse(&args.policy)?, search)?;
    match args.json {
        true => writeln!(out, "{}", as_json(&policy))?,
        false => write_text(&policy, out)?,
    }
    Ok(())
}

fn write_text(policy: &Policy, out: &mut dyn Write) -> io::Result<()> {
    let Policy { name, digest, description, jail, limits, approval_timeout, admission, network, handlers, sources } =
        policy;
    writeln!(out, "{}: {}", escape(name), escape(description))?;
    writeln!(out, "digest       {digest}")?;
    let sources: Vec<_> = sources.iter().map(|source| source.display().to_string()).collect();
    writeln!(out, "sources      {}", escape(&sources.join(", ")))?;
    writeln!(out, "\n[jail]")?;
    writeln!(out, "profile      {}", jail.profile.as_str())?;
    writeln!(out, "launcher     {}", launcher(jail.launcher))?;
    writeln!(out, "seccomp      {}", escape(&jail.seccomp))?;
    writeln!(out, "enforce      {}", enforcement(jail.enforcement))?;
    writeln!(out, "commands     {}", escape(&commands(&jail.commands)))?;
    writeln!(out, "workspace    {}", workspace(jail.workspace))?;
    for path in &jail.hide {
        writeln!(out, "hidden       {}", escape(path))?;
    }
    for view in &jail.views {
        let optional = match view.presence {
            Presence::Required => "",
            Presence::Optional => " (where it exists)",
        };
        writeln!(out, "view         {}{optional}", escape(&view.path.to_string_lossy()))?;
    }
    writeln!(out, "environment  {}", escape(&jail.environment.pass.join(" ")))?;
    for (name, value) in &jail.environment.fixed {
        writeln!(out, "             {}={}", escape(name), escape(value))?;
    }
    writeln!(out, "\n[limits]")?;
    writeln!(out, "wall         {}", limit(&limits.wall, duration))?;
    writeln!(out, "cpu          {}", limit(&limits.cpu, duration))?;
    writeln!(out, "memory       {}", limit(&limits.memory, bytes))?;
    writeln!(out, "pids         {}", limit(&limits.pids, |count| count.to_string()))?;
    writeln!(out, "cpus         {}", limit(&limits.cpus, |cpus| cpus.to_string()))?;
    writeln!(out, "write_bytes  {}", limit(&limits.write_bytes, bytes))?;
    writeln!(out, "effects      {}", limit(&limits.effects, |count| count.to_string()))?;
    writeln!(out, "output_bytes {}", limit(&limits.output_bytes, bytes))?;
    writeln!(out, "egress_bytes {}", limit(&limits.egress_bytes, bytes))?;
    if let Some(timeout) = *approval_timeout {
        writeln!(out, "\n[approval]\ntimeout      {}", duration(timeout))?;
    }
    if policy.uses_network() || *network != Network::default() {
        writeln!(out, "\n[network]")?;
        let resolver = network.resolver.map_or("the host's".to_owned(), |address| address.to_string());
        writeln!(out, "resolver     {resolver}")?;
        for port in &network.host_ports {
            writeln!(out, "host port    {port}")?;
        }
        for (host, networks) in &network.private {
            let networks: Vec<String> = networks.iter().map(ToString::to_string).collect();
            writeln!(out, "private      {host} {}", networks.join(" "))?;
        }
    }
    if *handlers != Handlers::default() {
        writeln!(out, "\n[handlers]")?;
        writeln!(out, "record       {}", handlers.record)?;
        for rule in &handlers.faults {
            writeln!(out, "fault        {}", escape(rule.text()))?;
        }
    }
    for layer in admission.layers() {
        writeln!(out, "\nrules of {}", escape(&layer.policy))?;
        if layer.rules().is_empty() {
            writeln!(out, "none: every effect is refused")?;
        }
        for rule in layer.rules() {
            let place = match rule.origin.line {
                0 => rule.origin.file.clone(),
                line => format!("{}:{line}", rule.origin.file),
            };
            writeln!(out, "{:<6} {}  ({place})", verdict(rule.verdict), kinds(&rule.kinds), place = escape(&place))?;
            if let Paths::Only(patterns) = &rule.paths {
                for pattern in patterns.texts() {
                    writeln!(out, "         {}", escape(pattern))?;
                }
            }
            for (key, words) in rule.target.words() {
                writeln!(out, "         {key} {}", words.join(" "))?;
            }
        }
    }
    Ok(())
}

fn as_json(policy: &Policy) -> serde_json::Value {
    let Policy { name, digest, description, jail, limits, approval_timeout, admission, network, handlers, sources } =
        policy;
    let layers: Vec<_> = admission
        .layers()
        .iter()
        .map(|layer| {
            let rules: Vec<_> = layer
                .rules()
                .iter()
                .map(|rule| {
                    serde_json::json!({
                        "verdict": verdict(rule.verdict),
                        "effect": match &rule.kinds {
                            Kinds::Any | Kinds::All => serde_json::json!(["any"]),
                            Kinds::Only(kinds) => serde_json::json!(kinds),
                        },
                        "path": match &rule.paths {
                            Paths::Any => serde_json::Value::Null,
                            Paths::Only(patterns) => serde_json::json!(patterns.texts()),
                        },
                        "target": rule.target.words().into_iter().collect::<BTreeMap<_, _>>(),
                        "file": rule.origin.file,
                        "line": rule.origin.line,
                    })
                })
                .collect();
            serde_json::json!({ "policy": layer.policy, "rules": rules })
        })
        .collect();
    let views: Vec<_> = jail
        .views
        .iter()
        .map(|view| {
            serde_json::json!({
                "path": view.path.to_string_lossy(), "optional": view.presence == Presence::Optional,
            })
        })
        .collect();
    serde_json::json!({
        "name": name,
        "digest": digest,
        "description": description,
        "handlers": {
            "record": handlers.record,
            "faults": handlers.faults.iter().map(|rule| rule.text()).collect::<Vec<_>>(),
        },
        "sources": sources.iter().map(|source| source.to_string_lossy()).collect::<Vec<_>>(),
        "jail": {
            "profile": jail.profile.as_str(),
            "launcher": launcher(jail.launcher),
            "seccomp": jail.seccomp,
            "enforce": enforcement(jail.enforcement),
            "commands": match &jail.commands {
                Commands::Any => serde_json::json!("any"),
                Commands::List(names) => serde_json::json!(names),
            },
            "views": views,
            "env": jail.environment.pass,
            "env_fixed": jail.environment.fixed,
            "workspace": workspace(jail.workspace),
            "hide": jail.hide,
        },
        // In the units of the runs' own `usage`: microseconds, bytes, counts; null is unlimited.
        "limits": {
            "wall_us": limits.wall.value().map(|time| time.as_micros() as u64),
            "cpu_us": limits.cpu.value().map(|time| time.as_micros() as u64),
            "memory": limits.memory.value(),
            "pids": limits.pids.value(),
            "cpus": limits.cpus.value(),
            "write_bytes": limits.write_bytes.value(),
            "effects": limits.effects.value(),
            "output_bytes": limits.output_bytes.value(),
            "egress_bytes": limits.egress_bytes.value(),
        },
        "network": {
            "used": policy.uses_network(),
            "resolver": network.resolver.map(|address| address.to_string()),
            "host_ports": network.host_ports,
            "private": network
                .private
                .iter()
                .map(|(host, networks)| (host, networks.iter().map(ToString::to_string).collect::<Vec<_>>()))
                .collect::<BTreeMap<_, _>>(),
        },
        "approval": { "timeout_us": approval_timeout.map(|time| time.as_micros() as u64) },
        "layers": layers,
    })
}

fn limit<T: Copy>(limit: &Limit<T>, show: impl Fn(T) -> String) -> String {
    let asked = match limit.asked {
        Asked::Builtin => "",
        Asked::User => " (asked for)",
    };
    match limit.bound {
        Bound::At(value) => format!("{}{asked}", show(value)),
        Bound::Unlimited => format!("unlimited{asked}"),
    }
}

fn duration(time: Duration) -> String {
    match (time.as_micros(), time.as_secs()) {
        (micros, _) if micros % 1_000_000 > 0 => format!("{}ms", micros as f64 / 1_000.0),
        (_, seconds) if seconds % 3600 == 0 => format!("{}h", seconds / 3600),
        (_, seconds) if seconds % 60 == 0 => format!("{}min", seconds / 60),
        (_, seconds) => format!("{seconds}s"),
    }
}

fn bytes(bytes: u64) -> String {
    let units = [(1u64 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];
    match units.iter().find(|(size, _)| bytes >= *size && bytes.is_multiple_of(*size)) {
        Some((size, unit)) => format!("{}{unit}", bytes / size),
        None => format!("{bytes}B"),
    }
}

fn launcher(launcher: Launcher) -> &'static str {
    match launcher {
        Launcher::Native => "native",
        Launcher::Bwrap => "bwrap",
    }
}

fn enforcement(enforcement: Enforcement) -> &'static str {
    match enforcement {
        Enforcement::Strict => "strict",
        Enforcement::BestEffort => "best-effort",
    }
}

fn workspace(access: WorkspaceAccess) -> &'static str {
    match access {
        WorkspaceAccess::ReadWrite => "read-write",
        WorkspaceAccess::ReadOnly => "read-only",
        WorkspaceAccess::Hidden => "hidden",
    }
}

fn verdict(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Allow => "allow",
        Verdict::Ask => "ask",
        Verdict::Deny => "deny",
    }
}

fn kinds(kinds: &Kinds) -> String {
    match kinds {
        Kinds::Any | Kinds::All => "any".to_owned(),
        Kinds::Only(kinds) => kinds.iter().map(|kind| kind.name()).collect::<Vec<_>>().join(", "),
    }
}

fn commands(commands: &Commands) -> String {
    match commands {
        Commands::Any => "any".to_owned(),
        Commands::List(names) => names.join(" "),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        policy: PolicyArgs,
    }

    /// Standard output, the talk beside it, and the error.
    fn tollgate_policy(words: &[&str]) -> (String, String, String) {
        let line = Line::try_parse_from(["policy"].iter().chain(words)).unwrap();
        let (mut out, mut talk) = (Vec::new(), Vec::new());
        let result = run(&line.policy, &SearchPath::default(), &mut out, &mut talk);
        let error = result.err().map(|error| error.to_string()).unwrap_or_default();
        (String::from_utf8(out).unwrap(), String::from_utf8(talk).unwrap(), error)
    }

    #[test]
    fn the_list_shows_every_built_in_policy_and_where_it_is_from() {
        let (out, _, error) = tollgate_policy(&["list"]);
        assert_eq!(error, "");
        assert_eq!(out.lines().count(), search::BUILTIN.len());
        assert!(out.lines().all(|line| line.contains("built in")), "{out}");
        let (out, _, _) = tollgate_policy(&["list", "--json"]);
        for line in out.lines() {
            let object: serde_json::Value = serde_json::from_str(line).unwrap();
            assert_eq!(object["usable"], true, "{line}");
        }
    }

    #[test]
    fn the_kinds_are_those_of_the_vocabulary() {
        let (out, _, _) = tollgate_policy(&["list", "--kinds"]);
        assert_eq!(out.lines().count(), VOCABULARY.len());
        assert!(out.starts_with("fs/read "), "{out}");
    }

    #[test]
    fn what_is_shown_says_limits_rules_and_places() {
        let (out, _, error) = tollgate_policy(&["show", "python"]);
        assert_eq!(error, "");
        for part in
            ["wall         30min", "memory       4GiB", "cpus         unlimited", "policies/base.toml (built in):"]
        {
            assert!(out.contains(part), "{part} in {out}");
        }
        let (out, _, _) = tollgate_policy(&["show", "python", "--json"]);
        let object: serde_json::Value = serde_json::from_str(&out).unwrap();
        assert_eq!(object["limits"]["memory"], 4u64 << 30);
        assert_eq!(object["limits"]["cpus"], serde_json::Value::Null);
        assert_eq!(object["jail"]["workspace"], "read-write");
    }

    #[test]
    fn check_shows_every_fault_of_every_file_and_is_silent_otherwise() {
        assert_eq!(tollgate_policy(&["check", "default"]), Default::default());
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("p.toml");
        std::fs::write(&file, "[limits]\nwall = 0\ncpu = 0\n[[allow]]\neffect = ['fs/reed']\n").unwrap();
        let (out, talk, error) = tollgate_policy(&["check", file.to_str().unwrap(), "shel"]);
        assert_eq!(out, "");
        assert_eq!(talk.matches("error: ").count(), 4, "{talk}");
        assert!(talk.contains("did you mean `shell`?"), "{talk}");
        assert_eq!(error, "2 of 2 policies cannot be used");
        std::fs::write(&file, "[[allow]]\neffect = ['any']\n[jail]\nenv = ['*']\n").unwrap();
        let (_, talk, error) = tollgate_policy(&["check", file.to_str().unwrap()]);
        assert_eq!((talk.matches("warning: ").count(), error.as_str()), (2, ""), "{talk}");
    }
}
