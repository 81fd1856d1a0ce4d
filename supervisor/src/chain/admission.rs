//! Admission: is this effect within what the run's policies allow?
//!
//! A pure decision over values. An [`Admission`] is a set of layers, each a policy's rules, and every layer must
//! admit an effect; so composing two of them can only narrow. Within a layer a deny wins over an ask and an ask over
//! an allow, in whatever order they are written, and what no rule matches is refused. What the jail itself refused
//! and paths of the host outside the workspace are never admitted, whatever a rule says.

use super::{Answer, BoxFuture, Handler, Next, Question};
use crate::effect::{fs, net, program, run, Door, Effect, Kind, Request, Resource};
use globset::{GlobBuilder, GlobSet, GlobSetBuilder};
use std::{
    cmp::Ordering,
    fmt,
    sync::{Arc, OnceLock},
};

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
    /// Every kind; a file writes it out as `any`.
    Any,
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
            origin: Origin { file: "built in".to_owned(), line: 0, text: text.to_owned() },
        };
        let changes = Kinds::Only(vec![Kind::FsWrite, Kind::FsDelete, Kind::FsMove]);
        Admission::of(Layer::new(
            "policies in the workspace",
            Home::Builtin,
            vec![
                rule(Verdict::Allow, Kinds::Any, Paths::Any, "allow any"),
                rule(Verdict::Allow, Kinds::Only(NETWORK_KINDS.to_vec()), Paths::Any, "allow any"),
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
        let everything = Finding::Allow(built_in("no policy restricts the run"));
        // `min_by` keeps the first of equals, and layers are sorted, so the origin does not depend on the order in
        // which layers were added. A rule that somebody wrote says more than one of ours.
        self.layers
            .iter()
            .flat_map(|layer| objects.paths.iter().map(move |path| layer.examine(effect, *path)))
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
            let finding = match layer.examine(effect, path) {
                denied @ Finding::Deny(_) => denied,
                Finding::Allow(_) | Finding::Ask(_) | Finding::Unmatched { .. } if !in_workspace => shown(),
                Finding::Allow(_) | Finding::Ask(_) | Finding::Unmatched { .. } => match layer.examine(&read, path) {
                    Finding::Allow(_) => shown(),
                    hidden => hidden,
                },
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

    fn examine(&self, effect: &Effect, path: Option<&str>) -> Finding<'_> {
        let matching = self.rules.iter().filter_map(|rule| Some((rule, rule.matches(effect, path)?)));
        match matching.max_by_key(|(rule, _)| rule.verdict) {
            Some((rule, place)) => match rule.verdict {
                Verdict::Allow => Finding::Allow(rule.origin_at(place)),
                Verdict::Ask => Finding::Ask(rule.origin_at(place)),
                Verdict::Deny => Finding::Deny(rule.origin_at(place)),
            },
            None => Finding::Unmatched { layer: self, path: path.map(str::to_owned) },
        }
    }
}

/// Which part of a rule matched.
#[derive(Clone, Copy)]
enum Place {
    /// The rule is about every path.
    Whole,
    /// The pattern at this place of its list.
    Pattern(usize),
}

impl Rule {
    fn matches(&self, effect: &Effect, path: Option<&str>) -> Option<Place> {
        let kind = match &self.kinds {
            // A policy from before there was a network, or one that thinks of files, must not open it by a word.
            Kinds::Any => self.verdict != Verdict::Allow || !is_network(effect.kind),
            Kinds::Only(kinds) => kinds.contains(&effect.kind),
        };
        match (&self.paths, path) {
            _ if !kind => None,
            (Paths::Any, _) => Some(Place::Whole),
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
        let (Place::Pattern(place), Paths::Only(patterns)) = (place, &self.paths) else {
            return Origin { file, line, text };
        };
        match patterns.texts.get(place) {
            Some(pattern) => Origin {
                file,
                line: patterns.lines.get(place).copied().unwrap_or(line),
                text: format!("{text} on \"{pattern}\""),
            },
            None => Origin { file, line, text },
        }
    }
}

/// The kinds that leave the jail. No rule of `any` kind allows one: each is allowed by its name, and then also where a
/// policy allows `any`.
pub const NETWORK_KINDS: [Kind; 3] = [Kind::NetConnect, Kind::NetResolve, Kind::HttpRequest];

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

/// Globs of workspace paths, checked when made and compiled when first asked.
///
/// `*` and `?` do not match a slash, `**` matches any number of components, letters match their own case only. They
/// are compiled late because a run that changes nothing never asks, and its start should not pay for it.
#[derive(Clone)]
pub struct Patterns {
    texts: Vec<String>,
    /// The line of each, or nothing where they are from no file.
    lines: Vec<usize>,
    compiled: Arc<OnceLock<Compiled>>,
}

struct Compiled {
    /// None where the globs could not be compiled together; see [`Patterns::admit`] for what that means.
    itself: Option<GlobSet>,
    /// Matches directories that hold what a pattern protects, `.git` for `.git/hooks/**`; with the place of the
    /// pattern that each is for.
    above: Option<(GlobSet, Vec<usize>)>,
}

/// Why a text is no pattern of workspace paths.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PatternError {
    /// Nothing between the quotes.
    #[error("an empty pattern matches nothing; write `**` for every path")]
    Empty,
    /// Starts with a slash or `~`.
    #[error("a pattern is relative to the workspace; it cannot start with `/` or `~`")]
    NotRelative,
    /// Has a component that no resource has.
    #[error("a pattern has no `.`, `..` or empty components; paths are compared in their shortest form")]
    NotNormal,
    /// A slash inside braces or brackets.
    #[error("a pattern has no `/` within braces or brackets; write two patterns")]
    SlashInGroup,
    /// The glob library's own complaint.
    #[error("not a glob: {0}")]
    Syntax(String),
}

impl Patterns {
    /// Patterns that are from no file.
    ///
    /// # Errors
    ///
    /// As [`Patterns::at_lines`].
    pub fn new(texts: Vec<String>) -> Result<Patterns, Vec<(usize, String, PatternError)>> {
        Patterns::at_lines(texts, Vec::new())
    }

    /// Patterns and the line on which each is written, so that a refusal can show the very one that matched.
    ///
    /// # Errors
    ///
    /// Every text that is no pattern, with its place in the list.
    pub fn at_lines(texts: Vec<String>, lines: Vec<usize>) -> Result<Patterns, Vec<(usize, String, PatternError)>> {
        let errors: Vec<_> = texts
            .iter()
            .enumerate()
            .filter_map(|(place, text)| Some((place, text.clone(), check_pattern(text).err()?)))
            .collect();
        match errors.is_empty() {
            true => Ok(Patterns { texts, lines, compiled: Arc::default() }),
            false => Err(errors),
        }
    }

    /// The patterns as they were written.
    pub fn texts(&self) -> &[String] {
        &self.texts
    }

    /// Whether one of the patterns matches this path. Globs that do not compile match nothing.
    pub fn admits(&self, path: &str) -> bool {
        self.admit(path).is_some()
    }

    /// Whether a rule that allows matches this path, and the place of the pattern that does. Globs that do not
    /// compile allow nothing.
    fn admit(&self, path: &str) -> Option<usize> {
        self.compiled().itself.as_ref()?.matches(path).first().copied()
    }

    /// Whether a rule that restricts matches this path, or, for an effect that reaches below it, anything that might
    /// lie there; and the place of the pattern that does. Globs that do not compile restrict everything.
    fn restrict(&self, path: &str, reach: Reach) -> Option<usize> {
        let compiled = self.compiled();
        let (Some(itself), Some((above, places))) = (&compiled.itself, &compiled.above) else { return Some(0) };
        let below = || match reach {
            Reach::Itself => None,
            // The workspace's root is above everything.
            Reach::Below if path.is_empty() => Some(0),
            Reach::Below => above.matches(path).first().and_then(|place| places.get(*place).copied()),
        };
        itself.matches(path).first().copied().or_else(below)
    }

    fn compiled(&self) -> &Compiled {
        self.compiled.get_or_init(|| {
            let above = self.texts.iter().enumerate();
            let above = above.flat_map(|(place, text)| directories_above(text).map(move |prefix| (place, prefix)));
            let (places, prefixes): (Vec<usize>, Vec<&str>) = above.unzip();
            Compiled {
                itself: glob_set(self.texts.iter().map(String::as_str)),
                above: glob_set(prefixes.into_iter()).map(|set| (set, places)),
            }
        })
    }
}

impl PartialEq for Patterns {
    fn eq(&self, other: &Patterns) -> bool {
        (&self.texts, &self.lines) == (&other.texts, &other.lines)
    }
}

impl Eq for Patterns {}

impl PartialOrd for Patterns {
    fn partial_cmp(&self, other: &Patterns) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Patterns {
    fn cmp(&self, other: &Patterns) -> Ordering {
        (&self.texts, &self.lines).cmp(&(&other.texts, &other.lines))
    }
}

impl fmt::Debug for Patterns {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(&self.texts).finish()
    }
}

fn check_pattern(text: &str) -> Result<(), PatternError> {
    if text.is_empty() {
        return Err(PatternError::Empty);
    }
    if text.starts_with(['/', '~']) {
        return Err(PatternError::NotRelative);
    }
    if text.split('/').any(|component| matches!(component, "" | "." | "..")) {
        return Err(PatternError::NotNormal);
    }
    if is_plain(text) {
        return Ok(());
    }
    glob(text).map_err(|error| PatternError::Syntax(error.kind().to_string()))?;
    // Each component must be a glob by itself, or what lies above a pattern could not be told.
    if text.split('/').any(|component| glob(component).is_err()) {
        return Err(PatternError::SlashInGroup);
    }
    Ok(())
}

/// Whether a pattern has nothing that has to be closed or completed, so that it compiles whatever it says. Most are
/// so, and compiling each only to see that it can be takes longer than all else that reads a policy.
fn is_plain(text: &str) -> bool {
    !text.contains(['[', ']', '{', '}', '\\'])
}

fn glob(text: &str) -> Result<globset::Glob, globset::Error> {
    GlobBuilder::new(text).literal_separator(true).backslash_escape(true).build()
}

fn glob_set<'a>(texts: impl Iterator<Item = &'a str>) -> Option<GlobSet> {
    let mut set = GlobSetBuilder::new();
    for text in texts {
        set.add(glob(text).ok()?);
    }
    set.build().ok()
}

/// The prefixes of a pattern that name a directory: `**/.git` and `**/.git/hooks` for `**/.git/hooks/**`.
///
/// A prefix that ends in a component without a letter of its own (`**`, `*`) is left out. It would match every
/// directory, and a rule for `**/.env` would then restrict the removal of any of them.
fn directories_above(pattern: &str) -> impl Iterator<Item = &str> {
    pattern.match_indices('/').map(|(end, _)| &pattern[..end]).filter(|prefix| {
        let last = prefix.rsplit('/').next().unwrap_or(prefix);
        !last.chars().all(|letter| matches!(letter, '*' | '?'))
    })
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
            Finding::Deny(origin) if origin.line == 0 => deny_always(effect, &origin).by_rule(origin.cited()),
            Finding::Deny(origin) => deny(effect, &origin).by_rule(origin.cited()),
            Finding::Unmatched { layer, path } => unmatched(effect, layer, path.as_deref()),
        };
        Box::pin(std::future::ready(refusal))
    }
}

/// A rule says `deny`.
fn deny(effect: &Effect, origin: &Origin) -> Answer {
    Answer::refused(
        NAME,
        format!("{} {}: refused by the rule {origin}", effect.kind, effect.resource),
        format!("no other rule can allow it: take it out of the rule at {}:{}", origin.file, origin.line),
    )
}

/// No rule can ever admit it.
fn deny_always(effect: &Effect, origin: &Origin) -> Answer {
    let hint = match &effect.resource {
        Resource::Host { .. } => "start the run in a folder that holds what it needs, or show the path with `--view`",
        Resource::Workspace { .. } | Resource::Run { .. } | Resource::Url { .. } => {
            "report this as a bug of Tollgate's"
        }
        Resource::Address { .. } if effect.door == Door::Network => "report this as a bug of Tollgate's",
        Resource::Address { .. } => "the jail has no network; fetch what the run needs before it starts",
        Resource::Syscall { .. } => "the list of system calls is in docs/policy.md, with a reason for each",
    };
    Answer::refused(NAME, format!("{} {}: {}", effect.kind, effect.resource, origin.text), hint)
}

/// No rule of a layer matches it.
fn unmatched(effect: &Effect, layer: &Layer, path: Option<&str>) -> Answer {
    let object = path.map_or_else(|| effect.resource.to_string(), str::to_owned);
    let rule = match path {
        // The root is matched by `**` alone; no narrower pattern exists.
        Some("") => format!("[[allow]] effect = [\"{}\"], path = [\"**\"]", effect.kind),
        Some(path) => {
            format!("[[allow]] effect = [\"{}\"], path = [\"{}\"]", effect.kind, toml_escape(&exact_pattern(path)))
        }
        None => format!("[[allow]] effect = [\"{}\"]", effect.kind),
    };
    let hint = match layer.home {
        Home::File => format!("add to {}: {rule}", layer.policy),
        Home::Builtin => {
            format!("write a policy with extends = [\"{}\"] and {rule}, and name it with --policy", layer.policy)
        }
    };
    Answer::refused(NAME, format!("{} {object}: no rule of the policy {} allows it", effect.kind, layer.policy), hint)
}

/// A pattern that matches this path and no other. `globset::escape` leaves backslashes, which patterns read as escapes.
fn exact_pattern(path: &str) -> String {
    globset::escape(&path.replace('\\', "\\\\"))
}

/// The inside of a TOML string.
fn toml_escape(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::effect::{jail, Digest, Door, RunId, Subject};
    use proptest::prelude::*;

    fn subject() -> Subject {
        Subject { uid: 1000, run: Some(RunId("0123456789ab".into())), agent: None }
    }

    fn effect(kind: Kind, resource: Resource, request: Request) -> Effect {
        Effect { kind, resource, subject: subject(), room: None, door: Door::Workspace, request }
    }

    fn on_path(kind: Kind, path: &str) -> Effect {
        let owned = path.to_owned();
        let file = fs::Node::File { digest: Digest([0; 32]), bytes: 1, mode: 0o644 };
        let request = match kind {
            Kind::FsRead => fs::Request::Read { path: owned, offset: 0, limit: 1 },
            Kind::FsList => fs::Request::List { path: owned },
            Kind::FsDelete => fs::Request::Delete { path: owned, expect: None },
            _ => fs::Request::Write { path: owned, node: file, expect: None },
        };
        effect(kind, Resource::Workspace { path: path.to_owned() }, Request::Fs(request))
    }

    fn write(path: &str) -> Effect {
        on_path(Kind::FsWrite, path)
    }

    fn make_directory(path: &str) -> Effect {
        let request = fs::Request::Write { path: path.into(), node: fs::Node::Directory { mode: 0o755 }, expect: None };
        Effect { request: Request::Fs(request), ..write(path) }
    }

    fn rename(from: &str, to: &str) -> Effect {
        let request = Request::Fs(fs::Request::Move { path: from.into(), to: to.into() });
        effect(Kind::FsMove, Resource::Workspace { path: from.into() }, request)
    }

    fn start() -> Effect {
        let request = run::Request::Start {
            command: vec!["true".into()],
            policy: "default".into(),
            policy_digest: String::new(),
            directory: String::new(),
            environment: Vec::new(),
        };
        effect(Kind::RunStart, Resource::Run { id: "x".into() }, Request::Run(request))
    }

    fn rule(verdict: Verdict, kinds: &[Kind], paths: &[&str]) -> Rule {
        let origin = Origin { file: "p.toml".into(), line: 7, text: format!("{verdict:?}") };
        let paths = match paths {
            [] => Paths::Any,
            paths => Paths::Only(Patterns::new(paths.iter().map(|path| path.to_string()).collect()).unwrap()),
        };
        Rule { verdict, kinds: Kinds::Only(kinds.to_vec()), paths, origin }
    }

    fn admission(rules: Vec<Rule>) -> Admission {
        Admission::of(Layer::new("p.toml", Home::File, rules))
    }

    #[derive(Debug, PartialEq, Eq, Clone, Copy)]
    enum Said {
        Allow,
        Ask,
        Deny,
        Unmatched,
    }

    fn said(admission: &Admission, effect: &Effect) -> Said {
        match admission.rule_on(effect) {
            Ruling::Allow { .. } => Said::Allow,
            Ruling::Ask { .. } => Said::Ask,
            Ruling::Deny { .. } => Said::Deny,
            Ruling::Unmatched => Said::Unmatched,
        }
    }

    #[test]
    fn patterns_match_by_component_and_case() {
        let table = [
            ("src/**", "src/a.rs", Said::Allow),
            ("src/**", "src/a/b.rs", Said::Allow),
            ("src/**", "srcs/a.rs", Said::Unmatched),
            ("src/**", "Src/a.rs", Said::Unmatched),
            ("src/**", "x/src/a.rs", Said::Unmatched),
            ("a/b", "a/bc", Said::Unmatched),
            ("a/b", "a/b/c", Said::Unmatched),
            ("*", "a", Said::Allow),
            ("*", "a/b", Said::Unmatched),
            ("?", "/", Said::Unmatched),
            ("**", "", Said::Allow),
            ("**", "a", Said::Allow),
            ("**", "a/.b/c", Said::Allow),
            ("**/x", "x", Said::Allow),
            ("**/x", "a/x", Said::Allow),
            ("**/x", "a/yx", Said::Unmatched),
            ("[ab]/c", "a/c", Said::Allow),
            ("{a,b}/c", "b/c", Said::Allow),
            ("\\*", "*", Said::Allow),
            ("\\*", "a", Said::Unmatched),
        ];
        for (pattern, path, expected) in table {
            let admission = admission(vec![rule(Verdict::Allow, &[Kind::FsWrite], &[pattern])]);
            assert_eq!(said(&admission, &write(path)), expected, "{pattern} on {path:?}");
        }
    }

    #[test]
    fn texts_that_no_path_can_match_are_no_patterns() {
        for text in ["", "/etc", "~/x", "a//b", "./a", "a/../b", "a/", "[a", "{a/b,c}", "[a/b]", "a/{b"] {
            assert!(Patterns::new(vec![text.into()]).is_err(), "{text}");
        }
    }

    #[test]
    fn deny_wins_over_ask_and_ask_over_allow_in_any_order() {
        let rules = [
            rule(Verdict::Allow, &[Kind::FsWrite], &["**"]),
            rule(Verdict::Ask, &[Kind::FsWrite], &["a/**"]),
            rule(Verdict::Deny, &[Kind::FsWrite], &["a/b"]),
        ];
        for order in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
            let admission = admission(order.map(|place: usize| rules[place].clone()).to_vec());
            assert_eq!(said(&admission, &write("c")), Said::Allow);
            assert_eq!(said(&admission, &write("a/c")), Said::Ask);
            assert_eq!(said(&admission, &write("a/b")), Said::Deny);
        }
    }

    #[test]
    fn a_move_needs_both_of_its_paths() {
        let admission = admission(vec![
            rule(Verdict::Allow, &[Kind::FsMove], &["a/**"]),
            rule(Verdict::Ask, &[Kind::FsMove], &["a/asked"]),
        ]);
        assert_eq!(said(&admission, &rename("a/x", "a/y")), Said::Allow);
        assert_eq!(said(&admission, &rename("a/x", "b/y")), Said::Unmatched);
        assert_eq!(said(&admission, &rename("b/x", "a/y")), Said::Unmatched);
        assert_eq!(said(&admission, &rename("a/x", "a/asked")), Said::Ask);
        assert_eq!(said(&admission, &rename("a/asked", "a/x")), Said::Ask);
    }

    #[test]
    fn what_lies_below_a_moved_removed_or_replaced_directory_is_protected_too() {
        let kinds = [Kind::FsWrite, Kind::FsDelete, Kind::FsMove];
        let admission = admission(vec![
            rule(Verdict::Allow, &kinds, &["**"]),
            rule(Verdict::Ask, &kinds, &["**/.git/hooks/**", "**/.env"]),
        ]);
        for protected in [
            on_path(Kind::FsDelete, ".git/hooks"),
            on_path(Kind::FsDelete, "sub/.git"),
            rename(".git", "x"),
            rename("x", ".git"),
            write(".git"),
            write(".git/hooks/pre-commit"),
            on_path(Kind::FsDelete, ""),
        ] {
            assert_eq!(said(&admission, &protected), Said::Ask, "{protected:?}");
        }
        // Making the directory, and removing others, stays free.
        for free in [make_directory(".git"), on_path(Kind::FsDelete, "target"), rename("src", "lib"), write("src")] {
            assert_eq!(said(&admission, &free), Said::Allow, "{free:?}");
        }
    }

    #[test]
    fn what_the_jail_refused_and_host_paths_are_never_admitted() {
        let any = Rule { kinds: Kinds::Any, ..rule(Verdict::Allow, &[], &[]) };
        let seen = jail::Request { syscall: "x".into(), errno: "EPERM".into(), process: "p".into(), pid: 2 };
        for admission in [Admission::everything(), admission(vec![any])] {
            assert_eq!(said(&admission, &write("a")), Said::Allow);
            for (kind, resource) in [
                (Kind::NetConnect, Resource::Address { to: "1.2.3.4:5".into() }),
                (Kind::ProcessExec, Resource::Host { path: "/x".into() }),
                (Kind::ProcessSyscall, Resource::Syscall { name: "mount".into() }),
                (Kind::ProcessExec, Resource::Workspace { path: "a".into() }),
            ] {
                assert_eq!(said(&admission, &effect(kind, resource, Request::Jail(seen.clone()))), Said::Deny);
            }
            let outside = Effect { resource: Resource::Host { path: "/etc/passwd".into() }, ..write("a") };
            assert_eq!(said(&admission, &outside), Said::Deny);
        }
    }

    #[test]
    fn a_request_that_does_not_belong_to_its_kind_or_resource_is_refused() {
        let everything = Admission::everything();
        assert_eq!(said(&everything, &Effect { kind: Kind::FsRead, ..write("a") }), Said::Deny);
        assert_eq!(said(&everything, &Effect { resource: Resource::Run { id: "x".into() }, ..write("a") }), Said::Deny);
        let two_paths = Effect { resource: Resource::Workspace { path: "a".into() }, ..write("b") };
        let only_a = admission(vec![rule(Verdict::Allow, &[Kind::FsWrite], &["a"])]);
        assert_eq!(said(&only_a, &two_paths), Said::Unmatched);
    }

    #[test]
    fn rules_with_paths_do_not_match_effects_without() {
        assert_eq!(said(&admission(vec![rule(Verdict::Allow, &[Kind::RunStart], &["**"])]), &start()), Said::Unmatched);
        assert_eq!(said(&admission(vec![rule(Verdict::Allow, &[Kind::RunStart], &[])]), &start()), Said::Allow);
    }

    struct Done;

    impl crate::chain::World for Done {
        fn execute<'a>(&'a self, _: &'a Effect) -> BoxFuture<'a, Answer> {
            Box::pin(std::future::ready(Answer::done(serde_json::Value::Null, 0)))
        }
    }

    fn perform(admission: Admission, effect: &Effect) -> Answer {
        let chain = super::super::Chain::new(vec![Arc::new(admission)]);
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(chain.perform(effect, &Done))
    }

    #[test]
    fn a_refusal_names_kind_object_rule_and_remedy() {
        let patterns = Patterns::at_lines(vec!["x".into(), "secret/**".into()], vec![8, 9]).unwrap();
        let denied = Rule { paths: Paths::Only(patterns), ..rule(Verdict::Deny, &[Kind::FsWrite], &[]) };
        let asked = rule(Verdict::Ask, &[Kind::FsWrite], &["hook"]);
        let rules = || vec![denied.clone(), asked.clone()];

        let answer = perform(admission(rules()), &write("secret/a"));
        assert_eq!((answer.decided_by, answer.is_success()), ("admission", false));
        assert_eq!(answer.reason, "fs/write secret/a: refused by the rule Deny on \"secret/**\" (p.toml:9)");
        assert!(answer.hint.contains("p.toml:9"), "{}", answer.hint);

        let answer = perform(admission(rules()), &write("hook"));
        assert_eq!(answer.decided_by, "approval");
        assert!(answer.reason.contains("a person must approve it"), "{}", answer.reason);
        assert!(answer.hint.contains("tollgate apply 0123456789ab hook"), "{}", answer.hint);

        let answer = perform(admission(rules()), &write("a[1].txt"));
        assert_eq!(answer.decided_by, "admission");
        assert_eq!(answer.reason, "fs/write a[1].txt: no rule of the policy p.toml allows it");
        assert_eq!(answer.hint, "add to p.toml: [[allow]] effect = [\"fs/write\"], path = [\"a[[]1[]].txt\"]");

        let answer = perform(Admission::nothing(), &start());
        assert_eq!((answer.decided_by, answer.is_success()), ("admission", false));
        assert!(perform(Admission::everything(), &write("a")).is_success());
    }

    #[test]
    fn the_rule_that_a_hint_names_admits_the_effect_and_no_other() {
        for path in ["a[1].txt", "we*ird", "{x,y}", "q?", "back\\\\slash", "plain/name"] {
            let pattern = exact_pattern(path);
            let admission = admission(vec![rule(Verdict::Allow, &[Kind::FsWrite], &[pattern.as_str()])]);
            assert_eq!(said(&admission, &write(path)), Said::Allow, "{path}");
            assert_eq!(said(&admission, &write(&format!("{path}x"))), Said::Unmatched, "{path}");
        }
    }

    fn any_rule() -> impl Strategy<Value = Rule> {
        let verdict = prop_oneof![Just(Verdict::Allow), Just(Verdict::Ask), Just(Verdict::Deny)];
        let kinds = prop::collection::vec(
            prop::sample::select(vec![Kind::FsRead, Kind::FsWrite, Kind::FsDelete, Kind::FsMove, Kind::RunStart]),
            1..3,
        );
        let texts = vec!["**", "a/**", "a/b", "**/b", "*", "a/*/c", "b"];
        let paths = prop::collection::vec(prop::sample::select(texts), 0..3);
        (verdict, kinds, paths).prop_map(|(verdict, kinds, paths)| rule(verdict, &kinds, &paths))
    }

    fn any_admission() -> impl Strategy<Value = Admission> {
        let layer = prop::collection::vec(any_rule(), 0..5).prop_map(admission);
        prop_oneof![
            1 => Just(Admission::everything()),
            1 => Just(Admission::nothing()),
            8 => prop::collection::vec(layer, 1..3).prop_map(|layers| {
                layers.iter().fold(Admission::everything(), |all, layer| all.narrow(layer))
            }),
        ]
    }

    fn any_effect() -> impl Strategy<Value = Effect> {
        let path = prop::sample::select(vec!["", "a", "b", "a/b", "a/b/c", "c/b", "a/x/c"]);
        let kind = prop::sample::select(vec![Kind::FsRead, Kind::FsWrite, Kind::FsDelete]);
        prop_oneof![
            (kind, path.clone()).prop_map(|(kind, path)| on_path(kind, path)),
            (path.clone(), path).prop_map(|(from, to)| rename(from, to)),
            Just(start()),
        ]
    }

    /// Stricter is larger.
    fn strictness(said: Said) -> u8 {
        match said {
            Said::Allow => 0,
            Said::Ask => 1,
            Said::Unmatched | Said::Deny => 2,
        }
    }

    proptest! {
        #[test]
        fn narrowing_commutes(a in any_admission(), b in any_admission(), effect in any_effect()) {
            prop_assert_eq!(a.narrow(&b), b.narrow(&a));
            prop_assert_eq!(a.narrow(&b).rule_on(&effect), b.narrow(&a).rule_on(&effect));
        }

        #[test]
        fn narrowing_is_associative(a in any_admission(), b in any_admission(), c in any_admission()) {
            prop_assert_eq!(a.narrow(&b).narrow(&c), a.narrow(&b.narrow(&c)));
        }

        #[test]
        fn what_is_accepted_without_compiling_compiles(text in "[a-c*?./ !^,~-]{1,12}") {
            let components_compile = text.split('/').all(|component| glob(component).is_ok());
            prop_assert!(is_plain(&text) && glob(&text).is_ok() && components_compile);
        }

        #[test]
        fn narrowing_is_idempotent(a in any_admission()) {
            prop_assert_eq!(a.narrow(&a), a);
        }

        #[test]
        fn everything_is_the_identity_and_nothing_refuses_all(a in any_admission(), effect in any_effect()) {
            prop_assert_eq!(a.narrow(&Admission::everything()), a.clone());
            let none = said(&a.narrow(&Admission::nothing()), &effect);
            prop_assert_eq!(strictness(none), 2);
        }

        #[test]
        fn narrowing_is_as_strict_as_the_stricter(
            a in any_admission(), b in any_admission(), effect in any_effect()
        ) {
            let both = strictness(said(&a.narrow(&b), &effect));
            prop_assert_eq!(both, strictness(said(&a, &effect)).max(strictness(said(&b, &effect))));
        }
    }

    fn call(kind: Kind, resource: Resource) -> Effect {
        let request = Request::Program(program::Request { syscall: "openat".into(), to: None });
        Effect { kind, resource, subject: subject(), room: None, door: Door::Program, request }
    }

    fn file(path: &str) -> Resource {
        Resource::Workspace { path: path.to_owned() }
    }

    #[test]
    fn a_call_of_the_program_passes_where_its_view_shows_the_file_and_no_rule_denies_it() {
        let rules = vec![
            rule(Verdict::Allow, &[Kind::FsRead, Kind::FsList], &["**"]),
            rule(Verdict::Allow, &[Kind::FsWrite], &["out/**"]),
            rule(Verdict::Ask, &[Kind::FsWrite], &[".git/**"]),
            rule(Verdict::Deny, &[Kind::FsWrite], &["locked/**"]),
            rule(Verdict::Deny, &[Kind::FsRead], &["**/.env"]),
        ];
        let admission = admission(rules);
        for path in ["out/a", "elsewhere", ".git/config"] {
            let ruling = admission.rule_on(&call(Kind::FsWrite, file(path)));
            assert!(matches!(ruling, Ruling::Allow { .. }), "{path}: {ruling:?}");
        }
        for (kind, path) in [(Kind::FsWrite, "locked/a"), (Kind::FsRead, "a/.env"), (Kind::FsWrite, "a/.env")] {
            let ruling = admission.rule_on(&call(kind, file(path)));
            assert!(matches!(ruling, Ruling::Deny { .. }), "{kind} {path}: {ruling:?}");
        }
        let exec = call(Kind::ProcessExec, Resource::Host { path: "/usr/bin/true".into() });
        assert!(matches!(admission.rule_on(&exec), Ruling::Allow { .. }));
    }

    #[test]
    fn a_call_on_the_workspace_is_refused_where_no_view_shows_it_and_by_any_other_door() {
        let read = call(Kind::FsRead, file("a"));
        assert_eq!(Admission::nothing().rule_on(&read), Ruling::Unmatched);
        let elsewhere = Effect { door: Door::Api, ..read };
        assert!(matches!(Admission::everything().rule_on(&elsewhere), Ruling::Deny { .. }));
    }
}
