//! From files to one policy.
//!
//! A file is read with all that it extends, parents first. Then, key by key: a scalar of a child replaces its
//! parent's, and so does `commands`; rules, views and variables add up. Keys that no file has are those of the
//! built-in `base`. This is reuse while writing and may widen; policies of a running run are joined by
//! [`crate::chain::admission::Admission::narrow`], which cannot.
//!
//! The digest is SHA-256 over `tollgate.policy.v1`, a zero byte, and the canonical JSON (sorted keys, no white space,
//! integers only) of what the policy means: the jail, the limits, and the layers of rules, each layer's rules sorted.
//! What answers in the world's place joins them where a policy has any.
//! Names, descriptions and places are not part of it, so that two files that mean the same hash the same; the text of
//! the list of system calls is, by its own digest.

use super::{
    fault::{Fault, PolicyError},
    file::{At, JailSection, LimitsSection, PolicyFile},
    limits::{Asked, Bound, Limit, Limits},
    network::Network,
    overrides::is_reserved,
    search::{find, seccomp_list, Found, PolicyRef, SearchPath},
    secret::Secret,
    Commands, EnvironmentRule, Handlers, JailPolicy, Launcher, Policy, Presence, View, WorkspaceAccess,
};
use crate::{
    chain::admission::{Admission, Home, Kinds, Layer, Origin, Paths, Rule, Target, Verdict},
    effect::{canonical_json, Digest, Kind},
};
use serde::Serialize;
use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    time::Duration,
};
use tollgate_shim::protocol::Enforcement;

pub(super) fn compose(reference: &PolicyRef, search: &SearchPath) -> Result<Policy, PolicyError> {
    let found = find(reference, search)?;
    let home = found.home;
    let mut draft = Draft::default();
    Reading { search, draft: &mut draft, open: Vec::new(), count: 0 }.read(found)?;
    draft.fill_from_base();
    draft.finish(reference, home)
}

/// The files being read.
struct Reading<'a> {
    search: &'a SearchPath,
    draft: &'a mut Draft,
    /// The chain of files that extend each other, outermost first, for finding a cycle.
    open: Vec<PathBuf>,
    count: usize,
}

/// The most files of one policy. Real ones have three; the bound is against files that extend each other twice.
const MOST_FILES: usize = 64;

impl Reading<'_> {
    fn read(&mut self, found: Found) -> Result<(), PolicyError> {
        let file = PolicyFile::parse(&found.source).map_err(PolicyError::Faults)?;
        self.count += 1;
        self.open.push(found.path.clone());
        let mut faults = Vec::new();
        for parent in &file.extends {
            match self.parent(parent, &found) {
                Ok(()) => {}
                // What is wrong in a parent is shown there, and what is wrong with the reference is shown here.
                Err(PolicyError::Faults(more)) => faults.extend(more),
                Err(error) => {
                    faults.push(found.source.fault(parent.offset, format!("cannot extend: {error}"), error.hint()));
                }
            }
        }
        self.open.pop();
        if !faults.is_empty() {
            return Err(PolicyError::Faults(faults));
        }
        self.draft.add(file, &found, self.search).map_err(PolicyError::Faults)
    }

    fn parent(&mut self, parent: &At<String>, child: &Found) -> Result<(), PolicyError> {
        let reference = match (PolicyRef::parse(&parent.value)?, child.home) {
            // What is built in must not change because a folder holds a file of the same name.
            (PolicyRef::Name(name), Home::Builtin) => PolicyRef::Builtin(name),
            (PolicyRef::Path(path), Home::File) => {
                PolicyRef::Path(child.path.parent().unwrap_or(Path::new("")).join(path))
            }
            (reference, _) => reference,
        };
        let found = find(&reference, self.search)?;
        let fault =
            |message: String, help: &str| PolicyError::Faults(vec![child.source.fault(parent.offset, message, help)]);
        if self.open.iter().any(|open| is_same(open, &found.path)) {
            let chain: Vec<_> = self.open.iter().chain([&found.path]).map(|path| path.display().to_string()).collect();
            return Err(fault(
                format!("a policy cannot extend itself: {}", chain.join(" → ")),
                "take one of them out; `builtin:NAME` names the built-in policy that a file of the same name hides",
            ));
        }
        if self.count >= MOST_FILES {
            return Err(fault(format!("a policy has at most {MOST_FILES} files"), "extend fewer"));
        }
        self.read(found)
    }
}

fn is_same(one: &Path, other: &Path) -> bool {
    match (one.canonicalize(), other.canonicalize()) {
        (Ok(one), Ok(other)) => one == other,
        // Built-in policies are no files.
        _ => one == other,
    }
}

/// A policy that is being put together.
#[derive(Default)]
struct Draft {
    description: Option<String>,
    jail: JailSection,
    views: Option<Vec<View>>,
    env: Option<EnvironmentRule>,
    /// What was written, and the fault that it is if reads turn out not to be allowed.
    workspace: Option<(WorkspaceAccess, Fault)>,
    limits: LimitsDraft,
    approval_timeout: Option<Duration>,
    rules: Vec<Rule>,
    network: Network,
    handlers: Handlers,
    sources: Vec<PathBuf>,
}

#[derive(Default)]
struct LimitsDraft {
    wall: Option<Limit<Duration>>,
    cpu: Option<Limit<Duration>>,
    memory: Option<Limit<u64>>,
    pids: Option<Limit<u64>>,
    cpus: Option<Limit<f64>>,
    write_bytes: Option<Limit<u64>>,
    effects: Option<Limit<u64>>,
    output_bytes: Option<Limit<u64>>,
    egress_bytes: Option<Limit<u64>>,
}

impl LimitsDraft {
    /// Takes what a file says over what was said before.
    fn replace(&mut self, section: LimitsSection, asked: Asked) {
        fn put<T>(limit: &mut Option<Limit<T>>, bound: Option<Bound<T>>, asked: Asked) {
            if let Some(bound) = bound {
                *limit = Some(Limit { bound, asked });
            }
        }
        put(&mut self.wall, section.wall, asked);
        put(&mut self.cpu, section.cpu, asked);
        put(&mut self.memory, section.memory, asked);
        put(&mut self.pids, section.pids, asked);
        put(&mut self.cpus, section.cpus, asked);
        put(&mut self.write_bytes, section.write_bytes, asked);
        put(&mut self.effects, section.effects, asked);
        put(&mut self.output_bytes, section.output_bytes, asked);
        put(&mut self.egress_bytes, section.egress_bytes, asked);
    }
}

impl Draft {
    fn add(&mut self, file: PolicyFile, found: &Found, search: &SearchPath) -> Result<(), Vec<Fault>> {
        let asked = match found.home {
            Home::Builtin => Asked::Builtin,
            Home::File => Asked::User,
        };
        if file.description.is_some() {
            self.description = file.description;
        }
        let JailSection { profile, launcher, seccomp, enforce, commands, views, env, workspace } = file.jail;
        self.jail.profile = profile.or(self.jail.profile.take());
        self.jail.launcher = launcher.or(self.jail.launcher);
        self.jail.seccomp = seccomp.or(self.jail.seccomp.take());
        self.jail.enforce = enforce.or(self.jail.enforce);
        self.jail.commands = commands.or(self.jail.commands.take());
        if let Some(At { value, offset }) = workspace {
            let message = "the workspace cannot be shown: no rule allows fs/read";
            let help = "add [[allow]] effect = [\"fs/read\", \"fs/list\"] path = [\"**\"], or write \"hidden\"";
            self.workspace = Some((value, found.source.fault(offset, message, help)));
        }
        if let Some(views) = views {
            let known = self.views.get_or_insert_with(Vec::new);
            for At { value: View { path, presence }, offset } in views {
                match settle_view(&path, search.home.as_deref()) {
                    Ok(path) => {
                        known.retain(|view| view.path != path);
                        known.push(View { path, presence });
                    }
                    Err(ViewError::NoHome) if presence == Presence::Optional => {}
                    Err(error) => {
                        let message = format!("the view {}: {error}", path.display());
                        return Err(vec![found.source.fault(offset, message, "")]);
                    }
                }
            }
        }
        if let Some(env) = env {
            let known = self.env.get_or_insert_with(EnvironmentRule::default);
            known.pass.extend(env.pass);
            // A value of `~/…` without a home is left out: a variable that leads nowhere is worse than none.
            known.fixed.extend(env.fixed.into_iter().filter_map(|(name, value)| match value.starts_with("~/") {
                true => Some((name, expand_home(Path::new(&value), search.home.as_deref())?.to_str()?.to_owned())),
                false => Some((name, value)),
            }));
        }
        self.limits.replace(file.limits, asked);
        self.approval_timeout = file.approval_timeout.or(self.approval_timeout);
        self.rules.extend(file.rules);
        self.network.join(file.network);
        // Added to, never taken away: who builds on a policy cannot undo its recording.
        self.handlers.record |= file.handlers.record;
        self.handlers.faults.extend(file.handlers.faults);
        self.sources.push(found.path.clone());
        Ok(())
    }

    /// Takes from `base` what no file says, but none of its rules.
    fn fill_from_base(&mut self) {
        if self.says_everything() {
            return;
        }
        let found = find(&PolicyRef::Builtin("base".to_owned()), &SearchPath::default());
        let base = found.ok().and_then(|found| PolicyFile::parse(&found.source).ok()).unwrap_or_default();
        let jail = base.jail;
        let mine = &mut self.jail;
        mine.profile = mine.profile.take().or(jail.profile);
        mine.launcher = mine.launcher.or(jail.launcher);
        mine.seccomp = mine.seccomp.take().or(jail.seccomp);
        mine.enforce = mine.enforce.or(jail.enforce);
        mine.commands = mine.commands.take().or(jail.commands);
        self.env = self.env.take().or(jail.env);
        let mut limits = LimitsDraft::default();
        limits.replace(base.limits, Asked::Builtin);
        let LimitsDraft { wall, cpu, memory, pids, cpus, write_bytes, effects, output_bytes, egress_bytes } = limits;
        let mine = &mut self.limits;
        mine.wall = mine.wall.or(wall);
        mine.cpu = mine.cpu.or(cpu);
        mine.memory = mine.memory.or(memory);
        mine.pids = mine.pids.or(pids);
        mine.cpus = mine.cpus.or(cpus);
        mine.write_bytes = mine.write_bytes.or(write_bytes);
        mine.effects = mine.effects.or(effects);
        mine.output_bytes = mine.output_bytes.or(output_bytes);
        mine.egress_bytes = mine.egress_bytes.or(egress_bytes);
    }

    /// Whether nothing is left for `base` to say, as in every policy that extends it.
    fn says_everything(&self) -> bool {
        let JailSection { profile, launcher, seccomp, enforce, commands, views: _, env: _, workspace: _ } = &self.jail;
        let LimitsDraft { wall, cpu, memory, pids, cpus, write_bytes, effects, output_bytes, egress_bytes } =
            &self.limits;
        let jail = profile.is_some() && launcher.is_some() && seccomp.is_some() && enforce.is_some();
        let times = wall.is_some() && cpu.is_some() && cpus.is_some();
        let amounts = memory.is_some() && pids.is_some() && write_bytes.is_some();
        let counts = effects.is_some() && output_bytes.is_some() && egress_bytes.is_some();
        jail && commands.is_some() && self.env.is_some() && times && amounts && counts
    }

    /// How the workspace is shown: as it is written, and else as far as the rules allow. A policy without rules shows
    /// nothing, so an empty file is a policy under which a program computes and prints.
    fn workspace(&self) -> Result<WorkspaceAccess, PolicyError> {
        let allows = |kind: Kind| {
            self.rules.iter().any(|rule| {
                rule.verdict == Verdict::Allow
                    && match &rule.kinds {
                        Kinds::Any | Kinds::All => true,
                        Kinds::Only(kinds) => kinds.contains(&kind),
                    }
            })
        };
        let denies_any = |rule: &Rule| rule.verdict == Verdict::Deny && rule.kinds == Kinds::Any;
        let readable = allows(Kind::FsRead) && !self.rules.iter().any(denies_any);
        match &self.workspace {
            Some((WorkspaceAccess::Hidden, _)) => Ok(WorkspaceAccess::Hidden),
            Some((_, fault)) if !readable => Err(PolicyError::Faults(vec![fault.clone()])),
            Some((access, _)) => Ok(*access),
            None if !readable => Ok(WorkspaceAccess::Hidden),
            None if [Kind::FsWrite, Kind::FsDelete, Kind::FsMove].into_iter().any(allows) => {
                Ok(WorkspaceAccess::ReadWrite)
            }
            None => Ok(WorkspaceAccess::ReadOnly),
        }
    }

    fn finish(self, reference: &PolicyRef, home: Home) -> Result<Policy, PolicyError> {
        let workspace = self.workspace()?;
        let (Some(profile), Some(launcher), Some(seccomp), Some(enforcement), Some(commands)) =
            (self.jail.profile, self.jail.launcher, self.jail.seccomp, self.jail.enforce, self.jail.commands)
        else {
            return Err(base_is_broken());
        };
        let LimitsDraft {
            wall: Some(wall),
            cpu: Some(cpu),
            memory: Some(memory),
            pids: Some(pids),
            cpus: Some(cpus),
            write_bytes: Some(write_bytes),
            effects: Some(effects),
            output_bytes: Some(output_bytes),
            egress_bytes: Some(egress_bytes),
        } = self.limits
        else {
            return Err(base_is_broken());
        };
        let mut environment = self.env.unwrap_or_default();
        environment.pass.sort();
        environment.pass.dedup();
        let hide = hidden(&self.rules);
        let name = reference.to_string();
        let admission = Admission::of(Layer::new(name.clone(), home, self.rules));
        let policy = Policy {
            name,
            digest: Digest([0; 32]),
            description: self.description.unwrap_or_default(),
            jail: JailPolicy {
                profile,
                launcher,
                seccomp,
                enforcement,
                commands,
                views: self.views.unwrap_or_default(),
                environment,
                workspace,
                hide,
            },
            limits: Limits { wall, cpu, memory, pids, cpus, write_bytes, effects, output_bytes, egress_bytes },
            approval_timeout: self.approval_timeout,
            admission,
            network: self.network,
            handlers: self.handlers,
            sources: self.sources,
        };
        Ok(policy.settled())
    }
}

/// A bug of ours: `base` must say everything. A test reads it, so no release has it.
fn base_is_broken() -> PolicyError {
    PolicyError::Option { option: "base", message: "the built-in policy lacks a key; please report it".to_owned() }
}

/// The patterns of `[[deny]]` rules on `fs/read`.
fn hidden(rules: &[Rule]) -> Vec<String> {
    let denies_reads = |rule: &&Rule| {
        rule.verdict == Verdict::Deny && matches!(&rule.kinds, Kinds::Only(kinds) if kinds.contains(&Kind::FsRead))
    };
    let mut hide: Vec<String> = rules
        .iter()
        .filter(denies_reads)
        .flat_map(|rule| match &rule.paths {
            Paths::Only(patterns) => patterns.texts().to_vec(),
            Paths::Any => Vec::new(),
        })
        .collect();
    hide.sort();
    hide.dedup();
    hide
}

/// `~/x` below this home; other paths as they are; none where the home is not known.
fn expand_home(path: &Path, home: Option<&Path>) -> Option<PathBuf> {
    match path.strip_prefix("~") {
        Ok(below) => Some(home?.join(below)),
        Err(_not_below_home) => Some(path.to_owned()),
    }
}

/// Why a path that is written well is no view on this machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum ViewError {
    /// It is below `~`.
    #[error("it is below your home, and no home is known; set $HOME or write the whole path")]
    NoHome,
    /// It is the home, or above it.
    #[error("it shows your whole home, with every key and token in it; name what the run needs")]
    WholeHome,
}

/// The absolute path of a view.
pub(super) fn settle_view(path: &Path, home: Option<&Path>) -> Result<PathBuf, ViewError> {
    let path = expand_home(path, home).ok_or(ViewError::NoHome)?;
    match home.is_some_and(|home| home.starts_with(&path)) {
        true => Err(ViewError::WholeHome),
        false => Ok(path),
    }
}

impl Policy {
    /// The policy with its admission narrowed to what its view can keep, and the digest that goes with it.
    pub(super) fn settled(mut self) -> Policy {
        self.jail.environment.pass.sort();
        self.jail.environment.pass.dedup();
        if let Some(rule) = self.network.rule_of_host_ports() {
            self.admission = self.admission.with_rules(&self.name, vec![rule]);
        }
        if let Some(layer) = layer_of(self.jail.workspace) {
            self.admission = self.admission.narrow(&Admission::of(layer));
        }
        self.digest = self.digest_of_meaning();
        self
    }

    fn digest_of_meaning(&self) -> Digest {
        let mut bytes = b"tollgate.policy.v1\0".to_vec();
        bytes.extend(canonical_json(&Meaning::of(self)));
        Digest::of(&bytes)
    }
}

/// The layer that a view which cannot be written, or not even be read, adds to the rules.
fn layer_of(workspace: WorkspaceAccess) -> Option<Layer> {
    let writes = vec![Kind::FsWrite, Kind::FsDelete, Kind::FsMove];
    let (name, denied) = match workspace {
        WorkspaceAccess::ReadWrite => return None,
        WorkspaceAccess::ReadOnly => ("workspace = \"read-only\"", writes),
        WorkspaceAccess::Hidden => {
            ("workspace = \"hidden\"", writes.into_iter().chain([Kind::FsRead, Kind::FsList]).collect())
        }
    };
    let rule = |verdict, kinds| Rule {
        verdict,
        kinds,
        paths: Paths::Any,
        target: Target::default(),
        origin: Origin { file: "[jail] or the command line".to_owned(), line: 0, text: name.to_owned() },
    };
    let rules = vec![rule(Verdict::Allow, Kinds::All), rule(Verdict::Deny, Kinds::Only(denied))];
    Some(Layer::new(name, Home::Builtin, rules))
}

/// What a policy means, for its digest. Field names are part of a stored format: they do not change.
#[derive(Serialize)]
struct Meaning<'a> {
    profile: &'a str,
    launcher: &'static str,
    seccomp: String,
    enforce: &'static str,
    commands: Option<&'a [String]>,
    views: Vec<(String, bool)>,
    environment_passed: &'a [String],
    environment_fixed: &'a BTreeMap<String, String>,
    workspace: &'static str,
    hide: &'a [String],
    wall_us: Option<u64>,
    cpu_us: Option<u64>,
    memory: Option<u64>,
    pids: Option<u64>,
    cpus_thousandths: Option<u64>,
    write_bytes: Option<u64>,
    // Left out where nobody limits them, so that a policy from before there were such limits keeps its digest.
    #[serde(skip_serializing_if = "Option::is_none")]
    effects: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    approval_timeout_us: Option<u64>,
    output_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    egress_bytes: Option<u64>,
    layers: Vec<Vec<RuleMeaning<'a>>>,
    /// Left out where it says nothing, as above.
    #[serde(skip_serializing_if = "Option::is_none")]
    network: Option<NetworkMeaning<'a>>,
    /// Left out where there are none, so that a policy without keeps the digest that it had before there were any.
    #[serde(skip_serializing_if = "Option::is_none")]
    handlers: Option<HandlersMeaning<'a>>,
}

#[derive(Serialize)]
struct NetworkMeaning<'a> {
    resolver: Option<String>,
    host_ports: &'a [u16],
    private: BTreeMap<&'a str, Vec<String>>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    secrets: Vec<String>,
}

#[derive(Serialize)]
struct HandlersMeaning<'a> {
    record: bool,
    faults: Vec<&'a str>,
}

impl<'a> Meaning<'a> {
    fn of(policy: &'a Policy) -> Meaning<'a> {
        let microseconds = |limit: &Limit<Duration>| limit.value().map(|time| time.as_micros() as u64);
        let jail = &policy.jail;
        let list = seccomp_list(&jail.seccomp).unwrap_or_default();
        let mut views: Vec<_> = jail
            .views
            .iter()
            .map(|view| (view.path.to_string_lossy().into_owned(), view.presence == Presence::Optional))
            .collect();
        views.sort();
        Meaning {
            profile: jail.profile.as_str(),
            launcher: match jail.launcher {
                Launcher::Native => "native",
                Launcher::Bwrap => "bwrap",
            },
            seccomp: Digest::of(list.as_bytes()).to_string(),
            enforce: match jail.enforcement {
                Enforcement::Strict => "strict",
                Enforcement::BestEffort => "best-effort",
            },
            commands: match &jail.commands {
                Commands::Any => None,
                Commands::List(names) => Some(names),
            },
            views,
            environment_passed: &jail.environment.pass,
            environment_fixed: &jail.environment.fixed,
            workspace: match jail.workspace {
                WorkspaceAccess::ReadWrite => "read-write",
                WorkspaceAccess::ReadOnly => "read-only",
                WorkspaceAccess::Hidden => "hidden",
            },
            hide: &jail.hide,
            wall_us: microseconds(&policy.limits.wall),
            cpu_us: microseconds(&policy.limits.cpu),
            memory: policy.limits.memory.value(),
            pids: policy.limits.pids.value(),
            cpus_thousandths: policy.limits.cpus.value().map(|cpus| (cpus * 1_000.0).round() as u64),
            write_bytes: policy.limits.write_bytes.value(),
            effects: policy.limits.effects.value(),
            approval_timeout_us: policy.approval_timeout.map(|time| time.as_micros() as u64),
            output_bytes: policy.limits.output_bytes.value(),
            egress_bytes: policy.limits.egress_bytes.value(),
            layers: policy.admission.layers().iter().map(rules_of).collect(),
            network: (policy.network != Network::default()).then(|| NetworkMeaning {
                resolver: policy.network.resolver.map(|address| address.to_string()),
                host_ports: &policy.network.host_ports,
                private: policy
                    .network
                    .private
                    .iter()
                    .map(|(host, networks)| (host.as_str(), networks.iter().map(ToString::to_string).collect()))
                    .collect(),
                secrets: policy.network.secrets.iter().map(Secret::text).collect(),
            }),
            handlers: (policy.handlers != Handlers::default()).then(|| HandlersMeaning {
                record: policy.handlers.record,
                faults: policy.handlers.faults.iter().map(|rule| rule.text()).collect(),
            }),
        }
    }
}

/// Verdict, kinds and paths; none for every kind and every path.
type OnPaths<'a> = (&'static str, Option<Vec<&'static str>>, Option<&'a [String]>);

/// A rule's meaning. One without a target is written as it was before there were any.
#[derive(PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(untagged)]
enum RuleMeaning<'a> {
    Anything(OnPaths<'a>),
    Target(&'static str, Option<Vec<&'static str>>, TargetMeaning<'a>),
}

#[derive(PartialEq, Eq, PartialOrd, Ord, Serialize)]
struct TargetMeaning<'a> {
    host: Option<Vec<String>>,
    port: Option<&'a [u16]>,
    method: Option<&'a [String]>,
    url: Option<Vec<&'a str>>,
    operation: Option<&'a [String]>,
}

impl<'a> TargetMeaning<'a> {
    fn of(target: &'a Target) -> TargetMeaning<'a> {
        TargetMeaning {
            host: target.hosts.as_ref().map(|hosts| hosts.patterns.iter().map(ToString::to_string).collect()),
            port: target.ports.as_deref(),
            method: target.methods.as_deref(),
            url: target.urls.as_ref().map(|urls| urls.patterns.iter().map(|url| url.text()).collect()),
            operation: target.operations.as_deref(),
        }
    }
}

fn rules_of(layer: &Layer) -> Vec<RuleMeaning<'_>> {
    let mut rules: Vec<_> = layer
        .rules()
        .iter()
        .map(|rule| {
            let verdict = match rule.verdict {
                Verdict::Allow => "allow",
                Verdict::Ask => "ask",
                Verdict::Deny => "deny",
            };
            let kinds = match &rule.kinds {
                Kinds::Any | Kinds::All => None,
                Kinds::Only(kinds) => Some(kinds.iter().map(|kind| kind.name()).collect()),
            };
            let paths = match &rule.paths {
                Paths::Any => None,
                Paths::Only(patterns) => Some(patterns.texts()),
            };
            match rule.target.is_any() {
                true => RuleMeaning::Anything((verdict, kinds, paths)),
                false => RuleMeaning::Target(verdict, kinds, TargetMeaning::of(&rule.target)),
            }
        })
        .collect();
    rules.sort();
    rules.dedup();
    rules
}

impl EnvironmentRule {
    /// Whether a variable is one that the jail computes and no policy can pass.
    pub fn is_reserved(name: &str) -> bool {
        is_reserved(name)
    }
}
