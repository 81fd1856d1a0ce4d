//! The plan of a preflight: kept beside the run, shown by `tollgate plan`, and a filter for a later run.

use crate::{
    chain::{
        admission::{
            Admission, Home, HostPattern, Kinds, Layer, Listed, Origin, Paths, Patterns, Rule, Target, UrlPattern,
            Verdict,
        },
        preflight::{Answered, Planned},
    },
    doors::workspace,
    effect::{fs, net, Digest, Door, Kind, Request, Resource, RunId, Subject},
    ledger::{self, Ledger, ReceiptQuery},
    policy::{
        propose::{exact_pattern, propose, Needs},
        Policy,
    },
    room::{changes::Change, path::unspell_any, tree},
};
use serde::{Deserialize, Serialize};
use std::{
    collections::{BTreeSet, HashSet},
    io,
    os::fd::{AsFd, OwnedFd},
    path::Path,
};

const FILE: &str = "plan.json";

/// What a preflight planned.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// 1.
    pub version: u32,
    /// The run.
    pub run: RunId,
    /// Its effects, in order.
    pub effects: Vec<Planned>,
    /// How many more the program asked for than a plan lists.
    pub unlisted: u64,
    /// The narrowest policy that would allow them, as a file's text.
    pub proposal: String,
}

/// Why a plan cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    /// The run has none.
    #[error("run {run} has no plan: {why}")]
    Absent {
        /// The run.
        run: String,
        /// Why it has none.
        why: &'static str,
    },
    /// It cannot be read.
    #[error("cannot read the plan of run {run}: {source}")]
    Unreadable {
        /// The run.
        run: String,
        /// The system's reason.
        #[source]
        source: io::Error,
    },
    /// The receipts cannot be read.
    #[error(transparent)]
    Ledger(#[from] ledger::Error),
    /// An entry is not what a receipt of the run says.
    #[error(
        "the plan of run {run} is not what its receipts say: `{object}` was never planned; run the preflight again"
    )]
    Forged {
        /// The run.
        run: String,
        /// The entry's object.
        object: String,
    },
    /// The run's layer holds a change that was not planned.
    #[error("run {run} planned something else: `{object}` {how} since; nothing was applied, run the preflight again")]
    Changed {
        /// The run.
        run: String,
        /// The path.
        object: String,
        /// What happened to it.
        how: &'static str,
    },
}

impl Plan {
    /// Of a preflight under this policy.
    pub fn new(run: &RunId, policy: &Policy, effects: Vec<Planned>, unlisted: u64) -> Plan {
        let title = format!("What run {run} planned");
        let proposal = propose(policy, &title, &needs(&effects));
        Plan { version: 1, run: run.clone(), effects, unlisted, proposal }
    }

    /// Keeps it in the run's directory.
    ///
    /// # Errors
    /// As write(2) and rename(2).
    pub fn write(&self, run_dir: &OwnedFd) -> io::Result<()> {
        let text = serde_json::to_vec(self).map_err(io::Error::other)?;
        tree::write_durably(run_dir.as_fd(), FILE, &text)
    }

    /// Reads a run's plan, and compares it with the run's receipts, which cannot be changed without showing.
    ///
    /// # Errors
    /// [`PlanError`].
    pub fn of(ledger: &Ledger, run: &RunId) -> Result<Plan, PlanError> {
        let unreadable = |source| PlanError::Unreadable { run: run.0.clone(), source };
        let folder = tree::open_root(&ledger.run_dir(run)).map_err(unreadable)?;
        let Some(text) = tree::read_ours(folder.as_fd(), FILE).map_err(unreadable)? else {
            let why = "it was no preflight, or was interrupted before its plan was complete";
            return Err(PlanError::Absent { run: run.0.clone(), why });
        };
        let plan: Plan = serde_json::from_slice(&text).map_err(|error| unreadable(error.into()))?;
        let mut known = HashSet::new();
        for receipt in ledger.receipts(&ReceiptQuery { run: Some(run.clone()), ..ReceiptQuery::default() })? {
            let receipt = receipt?;
            known.insert((receipt.door, receipt.kind, receipt.request_digest));
        }
        match plan.effects.iter().find(|effect| !known.contains(&(effect.door, effect.kind, effect.digest))) {
            Some(forged) => Err(PlanError::Forged { run: run.0.clone(), object: forged.resource.to_string() }),
            None => Ok(plan),
        }
    }

    /// Admits exactly what was planned, and reads.
    pub fn admission(&self) -> Admission {
        let origin = |text: String| Origin { file: format!("the plan of run {}", self.run), line: 0, text };
        let rule = |kinds: Vec<Kind>, paths| {
            let names: Vec<&str> = kinds.iter().map(|kind| kind.name()).collect();
            let text = format!("allow {}", names.join(", "));
            Rule {
                verdict: Verdict::Allow,
                kinds: Kinds::Only(kinds),
                paths,
                target: Target::default(),
                origin: origin(text),
            }
        };
        let mut rules = vec![rule(vec![Kind::FsRead, Kind::FsList], Paths::Any), rule(vec![Kind::EvalRun], Paths::Any)];
        for (kind, paths) in needs(&self.effects).effects {
            let patterns: Vec<String> = paths.iter().filter_map(|path| exact_pattern(path)).collect();
            match (paths.is_empty(), Patterns::new(patterns)) {
                (true, _) => rules.push(rule(vec![kind], Paths::Any)),
                (false, Ok(patterns)) => rules.push(rule(vec![kind], Paths::Only(patterns))),
                // A path that no pattern can name is not allowed.
                (false, Err(_)) => {}
            }
        }
        let needs = needs(&self.effects);
        let on = |kind: Kind, target| Rule {
            verdict: Verdict::Allow,
            kinds: Kinds::Only(vec![kind]),
            paths: Paths::Any,
            target,
            origin: origin(format!("allow {kind}")),
        };
        let listed = |hosts: &BTreeSet<String>| {
            Listed::new(hosts.iter().filter_map(|host| HostPattern::parse(host).ok()).collect())
        };
        for (method, urls) in &needs.requests {
            let urls = urls.iter().filter_map(|url| UrlPattern::parse(url).ok()).collect();
            let target =
                Target { methods: Some(vec![method.clone()]), urls: Some(Listed::new(urls)), ..Target::default() };
            rules.push(on(Kind::HttpRequest, target));
        }
        for (port, hosts) in &needs.connections {
            let target = Target { hosts: Some(listed(hosts)), ports: Some(vec![*port]), ..Target::default() };
            rules.push(on(Kind::NetConnect, target));
        }
        if !needs.names.is_empty() {
            let target = Target { hosts: Some(listed(&needs.names)), ..Target::default() };
            rules.push(on(Kind::NetResolve, target));
        }
        Admission::of(Layer::new(format!("plan of run {}", self.run), Home::Builtin, rules))
    }

    /// Checks that a run's pending changes are what it planned: each of them, and, while none was applied or thrown
    /// away, all of them.
    ///
    /// # Errors
    /// [`PlanError::Changed`] for the first that is not.
    pub fn check(&self, changes: &[Change], subject: &Subject, since_ns: i64, whole: Whole) -> Result<(), PlanError> {
        let planned: HashSet<Digest> = self.changes().map(|effect| effect.digest).collect();
        let changed = |object: String, how| PlanError::Changed { run: self.run.0.clone(), object, how };
        let mut found = HashSet::new();
        for change in changes {
            let effect = workspace::effect_of(change, subject, None, since_ns);
            if !planned.contains(&effect.digest()) {
                return Err(changed(effect.resource.to_string(), "was changed"));
            }
            found.insert(effect.digest());
        }
        match self.changes().find(|effect| whole == Whole::All && !found.contains(&effect.digest)) {
            Some(missing) => Err(changed(missing.resource.to_string(), "is gone")),
            None => Ok(()),
        }
    }

    fn changes(&self) -> impl Iterator<Item = &Planned> {
        self.effects.iter().filter(|effect| effect.door == Door::Workspace)
    }
}

/// Whether all of a plan must still be there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Whole {
    /// All of it.
    All,
    /// Some of it was applied or thrown away already.
    Rest,
}

/// Whether each run has a folder of its own at this path, so that the host's cannot be shown whole.
fn is_made(path: &Path) -> bool {
    ["/", "/etc", "/run", "/home", "/var", "/tmp"].iter().any(|made| path == Path::new(made))
}

/// What a policy must allow for these effects to pass.
pub fn needs(effects: &[Planned]) -> Needs {
    let mut needs = Needs::default();
    for effect in effects {
        let mut add = |paths: &[&String]| {
            let known = needs.effects.entry(effect.kind).or_default();
            known.extend(paths.iter().map(|path| (*path).clone()));
        };
        match (&effect.resource, &effect.request) {
            (Resource::Workspace { .. }, Request::Fs(fs::Request::Move { path, to })) => add(&[path, to]),
            (Resource::Workspace { path }, Request::Fs(fs::Request::Write { .. } | fs::Request::Delete { .. })) => {
                add(&[path]);
            }
            (Resource::Run { .. }, Request::Run(_)) if effect.door != Door::Jail => add(&[]),
            (_, Request::Http(request)) => {
                // Where no pattern can name the path, all of the host is the narrowest.
                let url = UrlPattern::exactly(request).unwrap_or_else(|| format!("{}/**", request.origin()));
                needs.requests.entry(request.method.clone()).or_default().insert(url);
            }
            (_, Request::Net(net::Request::Connect { host, port, .. })) => {
                needs.connections.entry(*port).or_default().insert(host.clone());
            }
            (_, Request::Net(net::Request::Resolve { name, .. })) => {
                needs.names.insert(name.clone());
            }
            (Resource::Host { path }, _) if matches!(effect.kind, Kind::FsRead | Kind::FsList) => {
                let path = unspell_any(path).ok().filter(|path| !is_made(path));
                match path {
                    Some(path) => {
                        needs.views.insert(path);
                    }
                    None => {
                        needs.beyond.insert(format!("{} of `{}`", effect.kind, effect.resource));
                    }
                }
            }
            (Resource::Host { path }, _) if effect.kind == Kind::ProcessExec => {
                needs.views.extend(unspell_any(path).map(|path| super::denials::view_for(&path).to_path_buf()));
            }
            (resource, _) if effect.answered == Answered::Refused => {
                needs.beyond.insert(format!("{} of `{resource}`", effect.kind));
            }
            _ => {}
        }
    }
    let known: BTreeSet<&str> = effects
        .iter()
        .filter_map(|effect| match &effect.request {
            Request::Http(request) => Some(request.host.as_str()),
            Request::Net(net::Request::Connect { host, .. }) => Some(host.as_str()),
            _ => None,
        })
        .collect();
    needs.names.retain(|name| !known.contains(name.as_str()));
    needs
}
