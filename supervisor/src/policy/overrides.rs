//! What the command line changes about a policy.

use super::{
    compose::settle_view,
    fault::PolicyError,
    file::check_view,
    limits::{Asked, Bound, Limit},
    network::{cidr, private_host, Network},
    published::Published,
    Launcher, Policy, Presence, ProfileName, View, WorkspaceAccess,
};
use crate::{
    chain::admission::{
        port_number, HostPattern, Kinds, Listed, Origin, Paths, Rule, Target, UrlPattern, Verdict, COMMAND_LINE,
        NETWORK_KINDS,
    },
    effect::{net::bracketed, path::shell_word, Kind},
};
use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
    path::Path,
    time::Duration,
};
use tollgate_shim::protocol::Enforcement;

/// What was typed, checked for itself. Empty changes nothing.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Overrides {
    /// `--wall`.
    pub wall: Option<Bound<Duration>>,
    /// `--cpu`.
    pub cpu: Option<Bound<Duration>>,
    /// `--memory`.
    pub memory: Option<Bound<u64>>,
    /// `--pids`.
    pub pids: Option<Bound<u64>>,
    /// `--cpus`.
    pub cpus: Option<Bound<f64>>,
    /// `--write-bytes`.
    pub write_bytes: Option<Bound<u64>>,
    /// `--effects`.
    pub effects: Option<Bound<u64>>,
    /// `--approval-timeout`.
    pub approval_timeout: Option<Duration>,
    /// `--output-bytes`.
    pub output_bytes: Option<Bound<u64>>,
    /// `--egress-bytes`.
    pub egress_bytes: Option<Bound<u64>>,
    /// `--allow`: hosts, hosts with a port, or URLs with a method before them.
    pub allow: Vec<String>,
    /// `--publish`: ports of the jail, where the host may connect to them.
    pub published: Vec<Published>,
    /// `--deny`: the same, refused whatever else allows it.
    pub deny: Vec<String>,
    /// `--host-port`.
    pub host_ports: Vec<u16>,
    /// `--private HOST=CIDR`.
    pub private: Vec<String>,
    /// `--resolver`.
    pub resolver: Option<SocketAddr>,
    /// `--read-only`: narrows, and never shows a workspace that the policy hides.
    pub read_only: bool,
    /// `--env NAME`: variables to pass through, also by prefix.
    pub allow_env: Vec<String>,
    /// `--env NAME=VALUE`.
    pub set_env: Vec<(String, String)>,
    /// `--view PATH`: each must exist.
    pub views: Vec<String>,
    /// `--profile`.
    pub profile: Option<String>,
    /// `--launcher`.
    pub launcher: Option<Launcher>,
    /// `--best-effort`: a layer that the machine lacks is left out, and every receipt says so.
    pub best_effort: bool,
}

impl Policy {
    /// The policy with what the command line changes about it, and the digest that goes with it.
    ///
    /// # Errors
    ///
    /// [`PolicyError::Option`] for the first value that is none. The policy is given up then, not used as it was.
    pub fn with(mut self, overrides: &Overrides, home: Option<&Path>) -> Result<Policy, PolicyError> {
        // Nothing is to be settled anew, which takes a good part of the time that a small policy takes to load.
        if *overrides == Overrides::default() {
            return Ok(self);
        }
        let limits = &mut self.limits;
        set(&mut limits.wall, overrides.wall);
        set(&mut limits.cpu, overrides.cpu);
        set(&mut limits.memory, overrides.memory);
        set(&mut limits.pids, overrides.pids);
        set(&mut limits.cpus, overrides.cpus);
        set(&mut limits.write_bytes, overrides.write_bytes);
        set(&mut limits.effects, overrides.effects);
        set(&mut limits.output_bytes, overrides.output_bytes);
        set(&mut limits.egress_bytes, overrides.egress_bytes);

        self.open_network(overrides)?;
        self.approval_timeout = overrides.approval_timeout.or(self.approval_timeout);
        if overrides.read_only && self.jail.workspace == WorkspaceAccess::ReadWrite {
            self.jail.workspace = WorkspaceAccess::ReadOnly;
        }
        for name in &overrides.allow_env {
            check_variable_name(name).map_err(|message| option("--env", format!("{name} {message}")))?;
            self.jail.environment.pass.push(name.clone());
        }
        for (name, value) in &overrides.set_env {
            check_variable_name(name).map_err(|message| option("--env", format!("{name} {message}")))?;
            if name.ends_with('*') || value.contains('\0') {
                return Err(option("--env", format!("{name} cannot have this value")));
            }
            self.jail.environment.fixed.insert(name.clone(), value.clone());
        }
        for text in &overrides.views {
            let path = check_view(text).map_err(|message| option("--view", format!("{text} {message}")))?;
            let path = settle_view(&path, home).map_err(|error| option("--view", format!("{text}: {error}")))?;
            // Asked for by name, so its absence is an error also where the policy would have let it be missing.
            self.jail.views.retain(|view| view.path != path);
            self.jail.views.push(View { path, presence: Presence::Required });
        }
        if let Some(name) = &overrides.profile {
            let profile = ProfileName::new(name);
            self.jail.profile = profile.ok_or_else(|| option("--profile", format!("{name} is no profile's name")))?;
        }
        if let Some(launcher) = overrides.launcher {
            self.jail.launcher = launcher;
        }
        if overrides.best_effort {
            self.jail.enforcement = Enforcement::BestEffort;
        }
        Ok(self.settled())
    }
}

impl Policy {
    /// Adds what the command line says about the network.
    fn open_network(&mut self, overrides: &Overrides) -> Result<(), PolicyError> {
        let mut rules = Vec::new();
        for (flag, verdict, texts) in
            [("--allow", Verdict::Allow, &overrides.allow), ("--deny", Verdict::Deny, &overrides.deny)]
        {
            for text in texts {
                rules.push(rule_of_flag(flag, verdict, text).map_err(|message| option(flag, message))?);
            }
        }
        rules.extend(overrides.published.iter().map(rule_of_published));
        if !rules.is_empty() {
            self.admission = self.admission.with_rules(&self.name, rules);
        }
        let mut network = Network {
            resolver: overrides.resolver,
            host_ports: overrides.host_ports.clone(),
            private: BTreeMap::new(),
            ..Network::default()
        };
        for text in &overrides.private {
            let wrong = |message: String| option("--private", format!("`{text}` {message}"));
            let (host, addresses) =
                text.split_once('=').ok_or_else(|| wrong("has no `=`; write it as HOST=CIDR".to_owned()))?;
            let host = private_host(host).map_err(wrong)?;
            network.private.entry(host).or_default().push(cidr(addresses).map_err(wrong)?);
        }
        self.network.join(network);
        Ok(())
    }
}

/// The rule that `--publish` writes.
fn rule_of_published(port: &Published) -> Rule {
    let hosts = HostPattern::parse(&port.at.ip().to_string()).ok().map(|host| Listed::new(vec![host]));
    let text = format!("--publish {}:{}", port.at, port.inside);
    Rule {
        verdict: Verdict::Allow,
        kinds: Kinds::Only(vec![Kind::NetAccept]),
        paths: Paths::Any,
        target: Target { hosts, ports: Some(vec![port.at.port()]), ..Target::default() },
        origin: Origin { file: COMMAND_LINE.to_owned(), line: 0, text },
    }
}

/// The rule that `--allow` or `--deny` writes: `HOST`, `HOST:PORT` or `[METHOD[,METHOD…] ]URL`.
///
/// # Errors
/// What is wrong with it.
pub fn rule_of_flag(flag: &str, verdict: Verdict, text: &str) -> Result<Rule, String> {
    let mut target = Target::default();
    let kinds = match text.contains("://") {
        true => {
            let (methods, url) = match text.trim().rsplit_once(char::is_whitespace) {
                Some((methods, url)) => (Some(methods), url),
                None => (None, text.trim()),
            };
            target.methods = methods.map(|methods| methods.split(',').map(|name| name.trim().to_owned()).collect());
            let is_method = |name: &String| {
                !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_".contains(&byte))
            };
            if let Some(wrong) = target.methods.iter().flatten().find(|name| !is_method(name)) {
                return Err(format!("`{text}`: `{wrong}` is no method; write it as 'GET {url}'"));
            }
            let url = UrlPattern::parse(url).map_err(|error| format!("`{text}`: {error}"))?;
            target.urls = Some(Listed::new(vec![url]));
            vec![Kind::HttpRequest]
        }
        false => {
            let wrong = |error: &dyn std::fmt::Display| {
                format!("`{text}` is no host: {error}; write HOST, HOST:PORT or 'METHOD https://HOST/PATH'")
            };
            let (host, port) = split_port(text).ok_or_else(|| wrong(&"its port is no number from 1 to 65535"))?;
            let pattern = match host {
                "any" => None,
                host => Some(HostPattern::parse(host).map_err(|error| wrong(&error))?),
            };
            match (port, verdict) {
                (Some(port), _) => {
                    target.hosts = pattern.map(|pattern| Listed::new(vec![pattern]));
                    target.ports = Some(vec![port]);
                    vec![Kind::NetConnect, Kind::HttpRequest]
                }
                // All that goes to the host, and the question about its name.
                (None, Verdict::Deny) => {
                    target.hosts = pattern.map(|pattern| Listed::new(vec![pattern]));
                    NETWORK_KINDS.to_vec()
                }
                (None, Verdict::Allow | Verdict::Ask) => {
                    let host = pattern.map_or_else(
                        || "*".to_owned(),
                        |pattern| match &pattern {
                            HostPattern::Exactly(host) => bracketed(&host.to_string()),
                            HostPattern::Below(_) => pattern.to_string(),
                        },
                    );
                    let url = UrlPattern::parse(&format!("*://{host}/**")).map_err(|error| wrong(&error))?;
                    target.urls = Some(Listed::new(vec![url]));
                    vec![Kind::HttpRequest]
                }
            }
        }
    };
    let origin = Origin { file: COMMAND_LINE.to_owned(), line: 0, text: format!("{flag} {}", shell_word(text)) };
    Ok(Rule { verdict, kinds: Kinds::Only(kinds), paths: Paths::Any, target, origin })
}

/// A host and, where one is named, a port. None where what follows the host is no port.
fn split_port(text: &str) -> Option<(&str, Option<u16>)> {
    match text.rsplit_once(':') {
        _ if text.parse::<IpAddr>().is_ok() || text.ends_with(']') => Some((text, None)),
        Some((host, port)) => Some((host, Some(port_number(port)?))),
        None => Some((text, None)),
    }
}

fn set<T: Copy>(limit: &mut Limit<T>, typed: Option<Bound<T>>) {
    if let Some(bound) = typed {
        *limit = Limit { bound, asked: Asked::User };
    }
}

fn option(option: &'static str, message: String) -> PolicyError {
    PolicyError::Option { option, message }
}

/// Splits `NAME=value`; without an equals sign there is only a name.
pub fn split_variable(text: &str) -> (&str, Option<&str>) {
    match text.split_once('=') {
        Some((name, value)) => (name, Some(value)),
        None => (text, None),
    }
}

/// Checks a variable's name, which may end in `*`.
///
/// # Errors
///
/// What is wrong with it, as the end of a sentence about it.
pub fn check_variable_name(name: &str) -> Result<(), &'static str> {
    let stem = name.strip_suffix('*').unwrap_or(name);
    if name.is_empty() {
        return Err("has no name");
    }
    if stem.bytes().any(|byte| !(byte.is_ascii_alphanumeric() || byte == b'_')) {
        return Err("has a name of other than letters, digits and `_`, with `*` only at its end");
    }
    if is_reserved(name) {
        return Err("is set by the jail itself");
    }
    Ok(())
}

/// Variables that the jail computes: what they say must be true inside.
pub(super) fn is_reserved(name: &str) -> bool {
    matches!(name, "PATH" | "HOME") || name.starts_with("TOLLGATE_")
}
