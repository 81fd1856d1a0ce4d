//! Writes a policy that allows what was planned and nothing else.
//!
//! The jail and the limits are the run's own, so that what worked in the preflight works again; its rules are exact:
//! one path a pattern. The text is a file that [`super::file`] reads.

use super::{
    limits::{Asked, Bound, Limit},
    network::Network,
    Commands, Launcher, Policy, Presence, WorkspaceAccess,
};
use crate::effect::{path::is_hostile, Kind};
use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
    path::{Path, PathBuf},
    time::Duration,
};
use tollgate_shim::protocol::Enforcement;

/// What a policy is to allow.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Needs {
    /// Paths of the workspace, in their spelling, by kind. A kind that acts on no path has none.
    pub effects: BTreeMap<Kind, BTreeSet<String>>,
    /// Requests: patterns of URLs by method.
    pub requests: BTreeMap<String, BTreeSet<String>>,
    /// Connections: hosts by port.
    pub connections: BTreeMap<u16, BTreeSet<String>>,
    /// Names that were asked for, and that nothing else is about.
    pub names: BTreeSet<String>,
    /// Host paths that are to be shown, read-only.
    pub views: BTreeSet<PathBuf>,
    /// What cannot be had by any rule of this version, in words.
    pub beyond: BTreeSet<String>,
}

/// The pattern that matches this path alone; none for the root, which no pattern can name.
pub fn exact_pattern(path: &str) -> Option<String> {
    // A backslash begins an escape of the spelling, and would begin one of the pattern.
    let escaped = globset::escape(path).replace('\\', "\\\\");
    match escaped.strip_prefix('~') {
        _ if path.is_empty() => None,
        Some(rest) => Some(format!("[~]{rest}")),
        None => Some(escaped),
    }
}

/// A policy file's text: the jail and the limits of this policy, and rules for exactly these needs.
pub fn propose(policy: &Policy, title: &str, needs: &Needs) -> String {
    let mut text = String::new();
    let mut line = |content: &str| {
        text.push_str(content);
        text.push('\n');
    };
    line(&format!("# {}", title.replace(is_hostile, " ")));
    for beyond in &needs.beyond {
        line(&format!("# No rule can allow: {}", beyond.replace(is_hostile, " ")));
    }
    line(&format!("description = {}", quoted(title)));
    line("");
    line("[jail]");
    let jail = &policy.jail;
    line(&format!("profile = {}", quoted(jail.profile.as_str())));
    line(&format!("launcher = {}", quoted(if jail.launcher == Launcher::Native { "native" } else { "bwrap" })));
    line(&format!("seccomp = {}", quoted(&jail.seccomp)));
    line(&format!(
        "enforce = {}",
        quoted(if jail.enforcement == Enforcement::Strict { "strict" } else { "best-effort" })
    ));
    match &jail.commands {
        Commands::Any => line("commands = \"any\""),
        Commands::List(names) => line(&format!("commands = {}", list(names.iter()))),
    }
    let access = match jail.workspace {
        WorkspaceAccess::ReadWrite => "read-write",
        WorkspaceAccess::ReadOnly => "read-only",
        WorkspaceAccess::Hidden => "hidden",
    };
    line(&format!("workspace = {}", quoted(access)));
    let known = jail.views.iter().map(|view| (view.path.as_path(), view.presence));
    let views: BTreeMap<&Path, Presence> =
        needs.views.iter().map(|path| (path.as_path(), Presence::Optional)).chain(known).collect();
    let views: Vec<String> = views
        .into_iter()
        .filter_map(|(path, presence)| {
            // A path that is not UTF-8 cannot be written in a policy file.
            let path = quoted(path.to_str()?);
            Some(match presence {
                Presence::Required => format!("{{ path = {path} }}"),
                Presence::Optional => format!("{{ path = {path}, optional = true }}"),
            })
        })
        .collect();
    if !views.is_empty() {
        line(&format!("views = [{}]", views.join(", ")));
    }
    let fixed = jail.environment.fixed.iter().map(|(name, value)| format!("{name}={value}"));
    let variables: Vec<String> = jail.environment.pass.iter().cloned().chain(fixed).collect();
    line(&format!("env = {}", list(variables.iter())));
    line("\n[limits]");
    let limits = &policy.limits;
    line(&limit("wall", &limits.wall, duration));
    line(&limit("cpu", &limits.cpu, duration));
    line(&limit("memory", &limits.memory, bytes));
    line(&limit("pids", &limits.pids, |count| count.to_string()));
    line(&limit("cpus", &limits.cpus, |cpus| cpus.to_string()));
    line(&limit("write_bytes", &limits.write_bytes, bytes));
    line(&limit("effects", &limits.effects, |count| count.to_string()));
    line(&limit("output_bytes", &limits.output_bytes, bytes));
    line(&limit("egress_bytes", &limits.egress_bytes, bytes));
    for content in network(&policy.network) {
        line(&content);
    }
    if jail.workspace != WorkspaceAccess::Hidden {
        // Reads go through the view and not one by one; the view is what the run had.
        line("\n[[allow]]\neffect = [\"fs/read\", \"fs/list\"]\npath = [\"**\"]");
    }
    if !jail.hide.is_empty() {
        line(&format!("\n[[deny]]\neffect = [\"fs/read\"]\npath = {}", list(jail.hide.iter())));
    }
    for (kind, paths) in &needs.effects {
        let of_paths = matches!(kind, Kind::FsWrite | Kind::FsDelete | Kind::FsMove);
        if matches!(kind, Kind::FsRead | Kind::FsList) || (of_paths && paths.is_empty()) {
            continue;
        }
        let patterns: Vec<String> = paths.iter().filter_map(|path| exact_pattern(path)).collect();
        match (paths.is_empty(), patterns.is_empty()) {
            (true, _) => line(&format!("\n[[allow]]\neffect = [{}]", quoted(kind.name()))),
            (false, true) => {}
            (false, false) => {
                line(&format!("\n[[allow]]\neffect = [{}]\npath = [", quoted(kind.name())));
                for pattern in &patterns {
                    line(&format!("    {},", quoted(pattern)));
                }
                line("]");
            }
        }
    }
    for (method, urls) in &needs.requests {
        line(&format!("\n[[allow]]\neffect = [\"http/request\"]\nmethod = [{}]\nurl = [", quoted(method)));
        for url in urls {
            line(&format!("    {},", quoted(url)));
        }
        line("]");
    }
    for (port, hosts) in &needs.connections {
        let hosts = list(hosts.iter());
        line(&format!("\n[[allow]]\neffect = [\"net/connect\"]\nhost = {hosts}\nport = [{port}]"));
    }
    if !needs.names.is_empty() {
        line(&format!("\n[[allow]]\neffect = [\"net/resolve\"]\nhost = {}", list(needs.names.iter())));
    }
    text
}

/// The table of the network, where a policy says anything there.
fn network(network: &Network) -> Vec<String> {
    let mut lines = Vec::new();
    if *network == Network::default() {
        return lines;
    }
    lines.push("\n[network]".to_owned());
    lines.extend(network.resolver.map(|address| format!("resolver = {}", quoted(&address.to_string()))));
    if !network.host_ports.is_empty() {
        let ports: Vec<String> = network.host_ports.iter().map(u16::to_string).collect();
        lines.push(format!("host_ports = [{}]", ports.join(", ")));
    }
    if !network.private.is_empty() {
        lines.push("\n[network.private]".to_owned());
        lines.extend(network.private.iter().map(|(host, networks)| {
            let networks: Vec<String> = networks.iter().map(ToString::to_string).collect();
            format!("{} = {}", quoted(host), list(networks.iter()))
        }));
    }
    lines
}

fn list<'a>(texts: impl Iterator<Item = &'a String>) -> String {
    format!("[{}]", texts.map(|text| quoted(text)).collect::<Vec<_>>().join(", "))
}

/// A TOML basic string (toml.io, v1.0.0, "String"). What a program called its files is in it, and a person reads it
/// before using it.
fn quoted(text: &str) -> String {
    let mut quoted = String::from("\"");
    for character in text.chars() {
        match character {
            '"' => quoted.push_str("\\\""),
            '\\' => quoted.push_str("\\\\"),
            character if is_hostile(character) => {
                let _ = match character as u32 {
                    code @ 0..=0xFFFF => write!(quoted, "\\u{code:04X}"),
                    code => write!(quoted, "\\U{code:08X}"),
                };
            }
            character => quoted.push(character),
        }
    }
    quoted.push('"');
    quoted
}

/// A limit that somebody asked for must be enforced wherever the policy is used. One that only came along with a built-in
/// policy may be more than the machine can give, so it is written as a remark.
fn limit<T: Copy>(name: &str, limit: &Limit<T>, show: impl Fn(T) -> String) -> String {
    let remark = match limit.asked {
        Asked::User => "",
        Asked::Builtin => "# ",
    };
    let value = match limit.bound {
        Bound::At(value) => quoted(&show(value)),
        Bound::Unlimited => quoted("unlimited"),
    };
    format!("{remark}{name} = {value}")
}

fn duration(time: Duration) -> String {
    let micros = time.as_micros();
    match micros % 1_000 {
        0 => format!("{}ms", micros / 1_000),
        rest => format!("{}.{rest:03}ms", micros / 1_000),
    }
}

fn bytes(bytes: u64) -> String {
    format!("{bytes}B")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        chain::admission::{Ruling, UrlPattern},
        effect::{
            fs,
            tests::{connect, http, request_of, resolve, sample},
            Effect, Request, Resource,
        },
        policy::search::{PolicyRef, SearchPath},
    };
    use proptest::prelude::*;

    fn read_back(text: &str) -> Policy {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("proposed.toml");
        std::fs::write(&path, text).unwrap();
        let reference = PolicyRef::parse(path.to_str().unwrap()).unwrap();
        Policy::load(&reference, &SearchPath::default()).unwrap_or_else(|error| panic!("{error}\n{text}"))
    }

    fn write_of(path: &str) -> Effect {
        Effect {
            resource: Resource::Workspace { path: path.to_owned() },
            request: Request::Fs(fs::Request::Write {
                path: path.to_owned(),
                node: fs::Node::Directory { mode: 0o755 },
                expect: None,
            }),
            ..sample(Kind::FsWrite)
        }
    }

    fn needs(paths: &[String]) -> Needs {
        Needs {
            effects: BTreeMap::from([
                (Kind::FsWrite, paths.iter().cloned().collect()),
                (Kind::RunCancel, BTreeSet::new()),
            ]),
            ..Needs::default()
        }
    }

    #[test]
    fn the_jail_and_the_limits_that_were_asked_for_survive() {
        for name in ["default", "python", "node", "git", "empty"] {
            let Ok(policy) = Policy::load(&PolicyRef::parse(name).unwrap(), &SearchPath::default()) else { continue };
            let again = read_back(&propose(&policy, "a \"title\"\nof two lines", &needs(&[])));
            assert_eq!(again.jail, policy.jail, "{name}");
        }
    }

    #[test]
    fn exactly_the_planned_requests_and_connections_are_allowed() {
        let url = |url: &str| UrlPattern::exactly(&request_of("GET", url, b"")).unwrap();
        let needs = Needs {
            requests: BTreeMap::from([(
                "GET".to_owned(),
                BTreeSet::from([url("https://api.test/a*b?x=1"), url("http://api.test:8080/")]),
            )]),
            connections: BTreeMap::from([(22, BTreeSet::from(["git.test".to_owned(), "::1".to_owned()]))]),
            names: BTreeSet::from(["other.test".to_owned()]),
            ..needs(&[])
        };
        let overrides = crate::policy::overrides::Overrides {
            host_ports: vec![5432],
            private: vec!["api.test=10.0.0.0/8".to_owned(), "api.test=::1".to_owned()],
            resolver: Some("127.0.0.1:5353".parse().unwrap()),
            ..Default::default()
        };
        let policy = Policy::load(&PolicyRef::default(), &SearchPath::default()).unwrap();
        let policy = policy.with(&overrides, None).unwrap();
        let again = read_back(&propose(&policy, "t", &needs));
        assert_eq!(again.network, policy.network);
        for (effect, allowed) in [
            (http("GET", "https://api.test/a*b"), true),
            (http("GET", "https://api.test/a*b?y=2"), true),
            (http("GET", "https://api.test/aXb"), false),
            (http("HEAD", "https://api.test/a*b"), false),
            (http("GET", "http://api.test:8080/"), true),
            (http("GET", "http://api.test/"), false),
            (connect("git.test", 22), true),
            (connect("::1", 22), true),
            (connect("git.test", 23), false),
            (connect("127.0.0.1", 5432), true),
            (resolve("other.test"), true),
            (resolve("git.test"), true),
            (resolve("third.test"), false),
        ] {
            let ruling = again.admission.rule_on(&effect);
            assert_eq!(matches!(ruling, Ruling::Allow { .. }), allowed, "{effect:?}: {ruling:?}");
        }
    }

    #[test]
    fn a_limit_that_was_asked_for_is_asked_for_again() {
        let overrides = crate::policy::overrides::Overrides {
            wall: Some(Bound::At(Duration::from_micros(1_500_250))),
            memory: Some(Bound::At(300_000_001)),
            cpus: Some(Bound::At(1.5)),
            pids: Some(Bound::Unlimited),
            ..Default::default()
        };
        let policy = Policy::load(&PolicyRef::default(), &SearchPath::default()).unwrap();
        let policy = policy.with(&overrides, None).unwrap();
        assert_eq!(read_back(&propose(&policy, "t", &needs(&[]))).limits, policy.limits);
    }

    proptest! {
        #[test]
        fn a_proposal_shows_no_hostile_name_and_means_it_all_the_same(
            names in proptest::collection::vec("[\u{1}-\u{20}\u{7f}-\u{9f}\u{ad}\u{61c}\u{200b}-\u{202e}\u{2066}-\u{2069}\u{feff}\u{e0041}a\"]{1,5}", 1..4),
        ) {
            let paths: Vec<String> = names.iter().map(|name| crate::effect::path::escape(name.as_bytes())).collect();
            let mut needs = needs(&paths);
            needs.views.insert(Path::new("/srv").join(&names[0]));
            needs.beyond.insert(format!("to reach {}", names[0]));
            let policy = Policy::load(&PolicyRef::default(), &SearchPath::default()).unwrap();
            let text = propose(&policy, &format!("what {} did", names[0]), &needs);
            let hostile: Vec<char> = text.chars().filter(|found| is_hostile(*found) && *found != '\n').collect();
            prop_assert_eq!(hostile, Vec::<char>::new(), "{}", text);
            let again = read_back(&text);
            for path in &paths {
                let ruling = again.admission.rule_on(&write_of(path));
                prop_assert!(matches!(ruling, Ruling::Allow { .. }), "{path:?}: {ruling:?}");
            }
            prop_assert_eq!(again.description, format!("what {} did", names[0]));
            prop_assert!(again.jail.views.iter().any(|view| needs.views.contains(&view.path)));
        }

        #[test]
        fn exactly_the_planned_paths_are_allowed(
            names in proptest::collection::vec("[~a-c*?\\[\\]{}!,\" '\\\\-]{1,4}", 1..4),
            other in "[a-d*]{1,4}",
        ) {
            // As paths are spelled, a backslash is doubled.
            let paths: Vec<String> = names.iter().map(|name| crate::effect::path::escape(name.as_bytes())).collect();
            let policy = Policy::load(&PolicyRef::default(), &SearchPath::default()).unwrap();
            let again = read_back(&propose(&policy, "t", &needs(&paths)));
            for path in &paths {
                let ruling = again.admission.rule_on(&write_of(path));
                prop_assert!(matches!(ruling, Ruling::Allow { .. }), "{path}: {ruling:?}");
            }
            if !paths.contains(&other) {
                prop_assert_eq!(again.admission.rule_on(&write_of(&other)), Ruling::Unmatched);
            }
        }
    }
}
