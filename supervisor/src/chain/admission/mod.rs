//! Admission: is this effect within what the run's policies allow?
//!
//! A pure decision over values. An [`Admission`] is a set of layers, each a policy's rules, and every layer must
//! admit an effect; so composing two of them can only narrow. Within a layer a deny wins over an ask and an ask over
//! an allow, in whatever order they are written, and what no rule matches is refused. What the jail itself refused
//! and paths of the host outside the workspace are never admitted, whatever a rule says.

use super::{Answer, BoxFuture, Handler, Next, Question};
use crate::effect::{fs, net, program, run, Door, Effect, Kind, Request, Resource};
use std::fmt;

mod hosts;
mod paths;
mod refusal;
mod target;
mod urls;

pub use hosts::{Host, HostError, HostPattern};
pub use paths::{PatternError, Patterns};
use target::Object;
pub use target::{Listed, Target};
pub use urls::{port_number, UrlError, UrlPattern};

/// What every policy of a run admits together.
///
/// Layers are kept sorted and without duplicates, so that [`Admission::narrow`] commutes and is idempotent as a value
/// and not only in what it decides.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Admission {
    layers: Vec<Layer>,
}

/// One policy's rules.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Layer {
    /// The policy's name or path, as hints call it.
    pub policy: String,
    /// Whether the file that the policy was read from is one that the user can edit.
    pub home: Home,
    rules: Vec<Rule>,
}

/// Where a policy lives, which decides what a hint tells the reader to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Home {
    /// Inside the program: a user extends it, and cannot edit it.
    Builtin,
    /// A file.
    File,
}

/// One rule of a policy.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Rule {
    /// What it says about the effects that it matches.
    pub verdict: Verdict,
    /// The kinds that it matches.
    pub kinds: Kinds,
    /// The paths that it matches.
    pub paths: Paths,
    /// What of the network it matches.
    pub target: Target,
    /// Where it is written.
    pub origin: Origin,
}

/// What a rule says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Verdict {
    /// The effect goes on.
    Allow,
    /// A person decides.
    Ask,
    /// The effect is refused.
    Deny,
}

/// Which kinds a rule matches.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kinds {
    /// Every kind; a file writes it out as `any`. What leaves the jail is never allowed by it, only restricted: a policy
    /// from before there was a network, or one that thinks of files, does not open it by a word.
    Any,
    /// Every kind, also those that leave the jail. No file can write it: it is for layers that only take away.
    All,
    /// These.
    Only(Vec<Kind>),
}

/// Which paths a rule matches.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Paths {
    /// Every workspace path, and also effects that have no path.
    Any,
    /// Workspace paths that one of these patterns matches. Effects without a path never match.
    Only(Patterns),
}

/// Where a rule is written.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Origin {
    /// The file, as the user would name it; a built-in policy's is `policies/NAME.toml (built in)`.
    pub file: String,
    /// Its line there, from 1; 0 for what is not written in any file.
    pub line: usize,
    /// The rule in one line, as it would be written.
    pub text: String,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            0 => write!(f, "{} ({})", self.text, self.file),
            line => write!(f, "{} ({}:{line})", self.text, self.file),
        }
    }
}

impl Origin {
    /// The rule as a receipt names it: place first, as in `python.toml:12 deny fs/write on "**/.env"`.
    pub fn cited(&self) -> String {
        match self.line {
            0 => format!("{}: {}", self.file, self.text),
            line => format!("{}:{line} {}", self.file, self.text),
        }
    }
}

/// What an admission says about one effect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ruling {
    /// Every layer allows it; the origin is the rule of the first.
    Allow {
        /// The rule.
        origin: Origin,
    },
    /// No layer refuses it, and one wants a person to decide.
    Ask {
        /// The rule.
        origin: Origin,
    },
    /// A rule refuses it.
    Deny {
        /// The rule.
        origin: Origin,
    },
    /// Some layer has no rule that matches it, which refuses it as well.
    Unmatched,
}

impl Admission {
    /// Admits every effect that a rule could admit: the identity of [`Admission::narrow`].
    pub fn everything() -> Admission {
        Admission { layers: Vec::new() }
    }

    /// Admits no effect.
    pub fn nothing() -> Admission {
        Admission::of(Layer::new("nothing", Home::Builtin, Vec::new()))
    }

    /// Admits everything but changes to these workspace paths, about which a person is asked: the policies that a
    /// run in this workspace is under.
    ///
    /// # Panics
    ///
    /// Never: every path is escaped, and an escaped path is a pattern.
    pub fn asking_about(paths: &[String]) -> Admission {
        let escaped: Vec<String> = paths.iter().map(|path| globset::escape(path)).collect();
        let patterns = Patterns::new(escaped).expect("an escaped path is a pattern");
        let rule = |verdict, kinds, paths, text: &str| Rule {
            verdict,
            kinds,
            paths,
            target: Target::default(),
            origin: Origin { file: "built in".to_owned(), line: 0, text: text.to_owned() },
        };
        let changes = Kinds::Only(vec![Kind::FsWrite, Kind::FsDelete, Kind::FsMove]);
        Admission::of(Layer::new(
            "policies in the workspace",
            Home::Builtin,
            vec![
                rule(Verdict::Allow, Kinds::All, Paths::Any, "allow any"),
                rule(Verdict::Ask, changes, Paths::Only(patterns), "ask about the policy that the run itself is under"),
            ],
        ))
    }

    /// The same with a person's word given: what it asks about is allowed, what it denies stays denied.
    #[must_use]
    pub fn approved(&self) -> Admission {
        let mut layers = self.layers.clone();
        for rule in layers.iter_mut().flat_map(|layer| &mut layer.rules) {
            if rule.verdict == Verdict::Ask {
                rule.verdict = Verdict::Allow;
            }
        }
        Admission { layers }
    }

    /// Admits what this one layer does.
    pub fn of(layer: Layer) -> Admission {
        Admission { layers: vec![layer] }
    }

    /// Admits what both admit. Commutes, is idempotent, and never admits more than either.
    pub fn narrow(&self, other: &Admission) -> Admission {
        let mut layers: Vec<Layer> = self.layers.iter().chain(&other.layers).cloned().collect();
        layers.sort();
        layers.dedup();
        Admission { layers }
    }

    /// The same with these rules in the layer of this name besides: what whoever starts the run adds to its policy.
    ///
    /// This may widen, and is for the making of a policy; what runs is narrowed.
    #[must_use]
    pub fn with_rules(&self, policy: &str, rules: Vec<Rule>) -> Admission {
        let with = |layer: &Layer| match layer.policy == policy {
            true => Layer::new(layer.policy.clone(), layer.home, [layer.rules.clone(), rules.clone()].concat()),
            false => layer.clone(),
        };
        let mut layers: Vec<Layer> = self.layers.iter().map(with).collect();
        layers.sort();
        layers.dedup();
        Admission { layers }
    }

    /// The layers, in a fixed order that carries no meaning.
    pub fn layers(&self) -> &[Layer] {
        &self.layers
    }

    /// Decides about one effect. Pure: the same effect gets the same ruling, whenever asked.
    pub fn rule_on(&self, effect: &Effect) -> Ruling {
        match self.examine(effect) {
            Finding::Allow(origin) => Ruling::Allow { origin },
            Finding::Ask(origin) => Ruling::Ask { origin },
            Finding::Deny(origin) => Ruling::Deny { origin },
            Finding::Unmatched { .. } => Ruling::Unmatched,
        }
    }

    fn examine(&self, effect: &Effect) -> Finding<'_> {
        if let (Request::Program(request), Door::Program) = (&effect.request, effect.door) {
            return self.examine_call(effect, request);
        }
        let objects = match Objects::of(effect) {
            Ok(objects) => objects,
            Err(never) => return Finding::Deny(built_in(never)),
        };
        let object = match Object::of(effect) {
            Ok(object) => object,
            Err(never) => return Finding::Deny(built_in(never)),
        };
        let everything = Finding::Allow(built_in("no policy restricts the run"));
        // `min_by` keeps the first of equals, and layers are sorted, so the origin does not depend on the order in
        // which layers were added. A rule that somebody wrote says more than one of ours.
        self.layers
            .iter()
            .flat_map(|layer| {
                let object = object.as_ref();
                objects.paths.iter().map(move |path| layer.examine(effect, *path, object))
            })
            .min_by_key(|finding| (finding.strictness(), finding.is_written()))
            .unwrap_or(everything)
    }
}

impl Admission {
    /// Decides about a system call of the program, which waits.
    ///
    /// Such a call acts on the run's own layer and processes, which its view admitted as a whole when it was built. So
    /// it is admitted where the view shows its object, which is where every layer allows `fs/read`, and the program is
    /// told no earlier than without this door what a rule asks about or nothing allows: that is decided at the
    /// workspace door, when the change leaves the layer. A rule that denies is obeyed at once.
    fn examine_call(&self, effect: &Effect, request: &program::Request) -> Finding<'_> {
        let shown = || Finding::Allow(built_in("the run's view shows it"));
        let to = request.to.as_deref().filter(|to| !to.starts_with('/'));
        let paths: Vec<Option<&str>> = match &effect.resource {
            Resource::Workspace { path } => [Some(path.as_str()), to].into_iter().flatten().map(Some).collect(),
            Resource::Host { .. } | Resource::Address { .. } => vec![None],
            Resource::Run { .. } | Resource::Syscall { .. } | Resource::Url { .. } => {
                return Finding::Deny(built_in("the request does not belong to its kind"))
            }
        };
        let in_workspace = matches!(effect.resource, Resource::Workspace { .. });
        let read = Effect { kind: Kind::FsRead, ..effect.clone() };
        let mut strictest = shown();
        for (layer, path) in self.layers.iter().flat_map(|layer| paths.iter().map(move |path| (layer, *path))) {
            let finding = match layer.examine(effect, path, None) {
                denied @ Finding::Deny(_) => denied,
                Finding::Allow(_) | Finding::Ask(_) | Finding::Unmatched { .. } if !in_workspace => shown(),
                Finding::Allow(_) | Finding::Ask(_) | Finding::Unmatched { .. } => {
                    match layer.examine(&read, path, None) {
                        Finding::Allow(_) => shown(),
                        hidden => hidden,
                    }
                }
            };
            if finding.strictness() < strictest.strictness() {
                strictest = finding;
            }
        }
        strictest
    }
}

impl Layer {
    /// A policy's rules under its name. The order of the rules carries no meaning.
    pub fn new(policy: impl Into<String>, home: Home, mut rules: Vec<Rule>) -> Layer {
        rules.sort();
        rules.dedup();
        Layer { policy: policy.into(), home, rules }
    }

    /// The rules, sorted.
    pub fn rules(&self) -> &[Rule] {
        &self.rules
    }

    fn examine(&self, effect: &Effect, path: Option<&str>, object: Option<&Object<'_>>) -> Finding<'_> {
        let matching = self.rules.iter().filter_map(|rule| Some((rule, rule.matches(effect, path, object)?)));
        match matching.max_by_key(|(rule, _)| rule.verdict) {
            Some((rule, place)) => match rule.verdict {
                // Nobody is asked about a question: what is asked about is what comes after it.
                Verdict::Ask if effect.kind == Kind::NetResolve => Finding::Allow(rule.origin_at(place)),
                Verdict::Allow => Finding::Allow(rule.origin_at(place)),
                Verdict::Ask => Finding::Ask(rule.origin_at(place)),
                Verdict::Deny => Finding::Deny(rule.origin_at(place)),
            },
            None => Finding::Unmatched { layer: self, path: path.map(str::to_owned) },
        }
    }
}

/// Which part of a rule matched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// The rule as a whole.
    Whole,
    /// The path at this place of its list.
    Pattern(usize),
    /// The host at this place of its list.
    Host(usize),
    /// The URL at this place of its list.
    Url(usize),
}

impl Rule {
    fn matches(&self, effect: &Effect, path: Option<&str>, object: Option<&Object<'_>>) -> Option<Place> {
        let kind = match &self.kinds {
            Kinds::Any => self.verdict != Verdict::Allow || !is_network(effect.kind),
            Kinds::All => true,
            // A name may be asked for by whoever may use it.
            Kinds::Only(kinds) if effect.kind == Kind::NetResolve && self.verdict != Verdict::Deny => {
                kinds.iter().any(|kind| is_network(*kind))
            }
            Kinds::Only(kinds) => kinds.contains(&effect.kind),
        };
        match (&self.paths, path) {
            _ if !kind => None,
            (Paths::Any, _) if self.target.is_any() => Some(Place::Whole),
            // A rule about the network is about nothing else.
            (Paths::Any, _) => self.target.matches(object?, self.verdict),
            _ if !self.target.is_any() => None,
            (Paths::Only(_), None) => None,
            (Paths::Only(patterns), Some(path)) => match self.verdict {
                Verdict::Allow => patterns.admit(path),
                Verdict::Ask | Verdict::Deny => patterns.restrict(path, Reach::of(effect)),
            }
            .map(Place::Pattern),
        }
    }

    /// Where the part that matched is written.
    fn origin_at(&self, place: Place) -> Origin {
        let Origin { file, line, text } = self.origin.clone();
        let found = match (place, &self.paths, &self.target) {
            (Place::Pattern(place), Paths::Only(patterns), _) => {
                patterns.texts().get(place).map(|text| (text.clone(), patterns.line(place)))
            }
            (Place::Host(place), _, Target { hosts: Some(hosts), .. }) => {
                hosts.patterns.get(place).map(|host| (host.to_string(), hosts.lines.get(place).copied()))
            }
            (Place::Url(place), _, Target { urls: Some(urls), .. }) => {
                urls.patterns.get(place).map(|url| (url.text().to_owned(), urls.lines.get(place).copied()))
            }
            (Place::Whole | Place::Pattern(_) | Place::Host(_) | Place::Url(_), _, _) => None,
        };
        match found {
            Some((pattern, own)) => {
                Origin { file, line: own.unwrap_or(line), text: format!("{text} on \"{pattern}\"") }
            }
            None => Origin { file, line, text },
        }
    }
}

/// The kinds that leave the jail. No rule of `any` kind allows one: each is allowed by its name, and then also where a
/// policy allows `any`.
pub const NETWORK_KINDS: [Kind; 4] = [Kind::NetConnect, Kind::NetResolve, Kind::NetAccept, Kind::HttpRequest];

/// Whether effects of this kind leave the jail.
pub fn is_network(kind: Kind) -> bool {
    NETWORK_KINDS.contains(&kind)
}

/// Whether an effect on a path also touches what lies below it.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Reach {
    /// Only the path.
    Itself,
    /// The path and all below it: it is removed, moved, or replaced by something that is no directory.
    Below,
}

impl Reach {
    fn of(effect: &Effect) -> Reach {
        match &effect.request {
            Request::Fs(fs::Request::Delete { .. } | fs::Request::Move { .. }) => Reach::Below,
            Request::Fs(fs::Request::Write { node, .. }) => match node {
                fs::Node::File { .. } | fs::Node::Link { .. } => Reach::Below,
                fs::Node::Directory { .. } | fs::Node::Attributes { .. } => Reach::Itself,
            },
            Request::Fs(fs::Request::Read { .. } | fs::Request::List { .. })
            | Request::Run(_)
            | Request::Jail(_)
            | Request::Net(_)
            | Request::Http(_)
            | Request::Api(_) => Reach::Itself,
            Request::Program(_) if matches!(effect.kind, Kind::FsDelete | Kind::FsMove) => Reach::Below,
            Request::Program(_) => Reach::Itself,
        }
    }
}

/// What one layer says about one path of an effect.
enum Finding<'a> {
    Allow(Origin),
    Ask(Origin),
    Deny(Origin),
    Unmatched { layer: &'a Layer, path: Option<String> },
}

/// Whether a rule stands in a file.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Written {
    Yes,
    No,
}

impl Finding<'_> {
    /// The strictest finding decides. A deny comes before an unmatched effect because it has a rule to show.
    fn strictness(&self) -> u8 {
        match self {
            Finding::Deny(_) => 0,
            Finding::Unmatched { .. } => 1,
            Finding::Ask(_) => 2,
            Finding::Allow(_) => 3,
        }
    }

    /// Whether the rule stands in a file: [`Written::No`] sorts last.
    fn is_written(&self) -> Written {
        match self {
            Finding::Allow(origin) | Finding::Ask(origin) | Finding::Deny(origin) if origin.line == 0 => Written::No,
            Finding::Allow(_) | Finding::Ask(_) | Finding::Deny(_) | Finding::Unmatched { .. } => Written::Yes,
        }
    }
}

/// The paths that an effect acts on; one `None` for an effect without any.
struct Objects<'a> {
    paths: Vec<Option<&'a str>>,
}

impl<'a> Objects<'a> {
    /// # Errors
    ///
    /// The reason for which no rule can ever admit the effect.
    fn of(effect: &'a Effect) -> Result<Objects<'a>, &'static str> {
        let mut paths = match &effect.resource {
            Resource::Workspace { path } => vec![Some(path.as_str())],
            Resource::Run { .. } => vec![None],
            Resource::Host { .. } => return Err("paths outside the workspace are never admitted"),
            Resource::Syscall { .. } => return Err(JAIL_REFUSED),
            Resource::Address { .. } | Resource::Url { .. } => vec![None],
        };
        // A request that does not belong to its kind is a bug of a door. Refusing it keeps the bug from being a hole.
        match (effect.kind, &effect.request) {
            (Kind::ProcessExec | Kind::ProcessSyscall, _) | (_, Request::Jail(_)) => return Err(JAIL_REFUSED),
            (_, Request::Program(_)) => return Err("a system call is asked about at the program's door only"),
            (Kind::ApiRequest, _) | (_, Request::Api(_)) => {
                return Err("a request that is no effect is never admitted")
            }
            (Kind::FsRead, Request::Fs(fs::Request::Read { path, .. }))
            | (Kind::FsList, Request::Fs(fs::Request::List { path }))
            | (Kind::FsWrite, Request::Fs(fs::Request::Write { path, .. }))
            | (Kind::FsDelete, Request::Fs(fs::Request::Delete { path, .. })) => paths.push(Some(path)),
            (Kind::FsMove, Request::Fs(fs::Request::Move { path, to })) => {
                paths.extend([Some(path.as_str()), Some(to.as_str())])
            }
            (Kind::RunStart, Request::Run(run::Request::Start { .. }))
            | (Kind::RunCancel, Request::Run(run::Request::Cancel { .. }))
            | (Kind::EvalRun, Request::Run(run::Request::Eval { .. })) => paths.push(None),
            (Kind::NetConnect, Request::Net(request @ net::Request::Connect { .. }))
            | (Kind::NetResolve, Request::Net(request @ net::Request::Resolve { .. }))
            | (Kind::NetAccept, Request::Net(request @ net::Request::Accept { .. }))
                if request.resource() == effect.resource => {}
            (Kind::HttpRequest, Request::Http(request)) if request.resource() == effect.resource => {}
            (
                Kind::FsRead
                | Kind::FsList
                | Kind::FsWrite
                | Kind::FsDelete
                | Kind::FsMove
                | Kind::RunStart
                | Kind::RunCancel
                | Kind::EvalRun
                | Kind::NetConnect
                | Kind::NetResolve
                | Kind::NetAccept
                | Kind::HttpRequest,
                Request::Fs(_) | Request::Run(_) | Request::Net(_) | Request::Http(_),
            ) => return Err("the request does not belong to its kind"),
        }
        // A file effect on a run, or the reverse, would leave a mix of both.
        if paths.iter().any(Option::is_some) && paths.iter().any(Option::is_none) {
            return Err("the resource does not belong to the request");
        }
        paths.dedup();
        Ok(Objects { paths })
    }
}

const JAIL_REFUSED: &str = "what the jail itself refused is never admitted";

fn built_in(text: &str) -> Origin {
    Origin { file: "built in".to_owned(), line: 0, text: text.to_owned() }
}

const NAME: &str = "admission";

/// The file of rules that were typed as options.
pub const COMMAND_LINE: &str = "the command line";

impl Handler for Admission {
    fn name(&self) -> &'static str {
        NAME
    }

    fn handle<'a>(&'a self, effect: &'a Effect, next: Next<'a>) -> BoxFuture<'a, Answer> {
        let refusal = match self.examine(effect) {
            Finding::Allow(origin) => {
                return Box::pin(async move { next.run(effect).await.by_rule(origin.cited()) });
            }
            // Whoever answers it comes innermost, so that a person is asked only for what would really happen.
            Finding::Ask(origin) => {
                let rule = origin.cited();
                return Box::pin(async move { next.asking(Question { origin }).run(effect).await.by_rule(rule) });
            }
            Finding::Deny(origin) if origin.line == 0 && origin.file != COMMAND_LINE => {
                refusal::never(effect, &origin).by_rule(origin.cited())
            }
            Finding::Deny(origin) => refusal::denied(effect, &origin).by_rule(origin.cited()),
            Finding::Unmatched { layer, path } => refusal::unmatched(effect, layer, path.as_deref()),
        };
        Box::pin(std::future::ready(refusal))
    }
}

#[cfg(test)]
mod tests;
