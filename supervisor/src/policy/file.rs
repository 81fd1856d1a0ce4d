//! A policy file as it is written: every key at its place, every fault found, nothing joined yet.
//!
//! The TOML is walked by hand and not through serde, because serde stops at the first fault and `tollgate policy
//! check` is to show them all. Everything unknown is a fault, and so is everything that a later version will enforce
//! and this one does not: a key that is accepted and ignored would be a wall that somebody relies on and nobody built.

mod network;
mod secret;

use super::{
    fault::{closest, suggest, Fault, Source},
    limits::Bound,
    network::Network,
    overrides::{check_variable_name, split_variable},
    quantity::{self, QuantityError},
    search::{seccomp_list, seccomp_names},
    Commands, EnvironmentRule, Handlers, Launcher, Presence, ProfileName, View, WorkspaceAccess,
};
use crate::{
    chain::{
        admission::{Kinds, Origin, Paths, Patterns, Rule, Verdict},
        faults::{FaultRule, RuleText},
        quota::Unit,
    },
    effect::{Kind, VOCABULARY},
};
use std::{
    collections::BTreeMap,
    ops::Range,
    path::{Component, Path, PathBuf},
    time::Duration,
};
use tollgate_shim::protocol::Enforcement;
use toml::de::{DeTable, DeValue};
use toml::Spanned;

/// A value and the byte offset at which it is written.
#[derive(Clone, Debug, PartialEq)]
pub struct At<T> {
    /// The value.
    pub value: T,
    /// The offset of its first byte.
    pub offset: usize,
}

/// What one file says. `None` and an empty list mean that the file does not say it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PolicyFile {
    /// One sentence for people.
    pub description: Option<String>,
    /// The policies that this one builds upon.
    pub extends: Vec<At<String>>,
    /// `[jail]`.
    pub jail: JailSection,
    /// `[limits]`.
    pub limits: LimitsSection,
    /// `[approval] timeout`.
    pub approval_timeout: Option<Duration>,
    /// `[network]`.
    pub network: Network,
    /// `[[allow]]`, `[[ask]]` and `[[deny]]`.
    pub rules: Vec<Rule>,
    /// `[handlers]`.
    pub handlers: Handlers,
}

/// `[jail]`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct JailSection {
    /// `profile`.
    pub profile: Option<ProfileName>,
    /// `launcher`.
    pub launcher: Option<Launcher>,
    /// `seccomp`.
    pub seccomp: Option<String>,
    /// `enforce`.
    pub enforce: Option<Enforcement>,
    /// `commands`.
    pub commands: Option<Commands>,
    /// `views`, where a path may still start with `~/`.
    pub views: Option<Vec<At<View>>>,
    /// `env`, where a fixed value may still start with `~/`.
    pub env: Option<EnvironmentRule>,
    /// `workspace`.
    pub workspace: Option<At<WorkspaceAccess>>,
}

/// `[limits]`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LimitsSection {
    /// `wall`.
    pub wall: Option<Bound<Duration>>,
    /// `cpu`.
    pub cpu: Option<Bound<Duration>>,
    /// `memory`.
    pub memory: Option<Bound<u64>>,
    /// `pids`.
    pub pids: Option<Bound<u64>>,
    /// `cpus`.
    pub cpus: Option<Bound<f64>>,
    /// `write_bytes`.
    pub write_bytes: Option<Bound<u64>>,
    /// `effects`.
    pub effects: Option<Bound<u64>>,
    /// `output_bytes`.
    pub output_bytes: Option<Bound<u64>>,
    /// `egress_bytes`.
    pub egress_bytes: Option<Bound<u64>>,
}

impl PolicyFile {
    /// Reads a file's text.
    ///
    /// # Errors
    ///
    /// Every fault that was found, in the order of the file.
    pub fn parse(source: &Source) -> Result<PolicyFile, Vec<Fault>> {
        let (document, broken) = DeTable::parse_recoverable(&source.text);
        let mut reader = Reader { source, faults: Vec::new() };
        if !broken.is_empty() {
            // Where the TOML itself is broken, what the recovery made of the rest would only mislead.
            for error in broken {
                let offset = error.span().map_or(0, |span| span.start);
                reader.fault(offset, format!("not TOML: {}", error.message()), "");
            }
            return Err(reader.sorted());
        }
        let file = reader.file(document.get_ref());
        match reader.faults.is_empty() {
            true => Ok(file),
            false => Err(reader.sorted()),
        }
    }
}

const TOP_KEYS: &[&str] =
    &["description", "extends", "jail", "limits", "network", "approval", "allow", "ask", "deny", "handlers", "secret"];
const TOP_LATER: &[&str] = &["upstream"];
const HANDLER_KEYS: &[&str] = &["record", "faults"];
const FAULTS_KEYS: &[&str] = &["seed", "rules"];
const FAULT_KEYS: &[&str] =
    &["effect", "kind", "errno", "status", "after", "rate", "first", "seed", "path", "when", "door", "retry_after"];
const JAIL_KEYS: &[&str] = &["profile", "launcher", "seccomp", "enforce", "commands", "views", "env", "workspace"];
const LIMIT_KEYS: &[&str] =
    &["wall", "cpu", "memory", "pids", "cpus", "write_bytes", "effects", "output_bytes", "egress_bytes"];
const APPROVAL_KEYS: &[&str] = &["timeout"];
/// Handlers that are built into every chain. A policy that names one, to change it or to take it out, is refused.
const BUILT_IN_HANDLERS: &[&str] = &["receipts", "authority"];
const RULE_KEYS: &[&str] = &["effect", "path", "host", "port", "method", "url", "operation"];
const VIEW_KEYS: &[&str] = &["path", "optional"];

/// Every key that a policy file can have or will have, for the test of the reference.
#[cfg(test)]
pub(super) fn every_key() -> impl Iterator<Item = &'static str> {
    let tables = [
        TOP_KEYS,
        TOP_LATER,
        JAIL_KEYS,
        LIMIT_KEYS,
        APPROVAL_KEYS,
        RULE_KEYS,
        network::NETWORK_KEYS,
        secret::SECRET_KEYS,
        secret::SOURCE_KEYS,
        HANDLER_KEYS,
        FAULTS_KEYS,
        FAULT_KEYS,
    ];
    tables.into_iter().flatten().copied()
}

/// The word for every kind.
const ANY: &str = "any";

/// The pattern for every path.
const EVERY_PATH: &str = "**";

struct Reader<'s> {
    source: &'s Source,
    faults: Vec<Fault>,
}

type Value<'i> = Spanned<DeValue<'i>>;

impl Reader<'_> {
    fn fault(&mut self, offset: usize, message: impl Into<String>, help: impl Into<String>) {
        self.faults.push(self.source.fault(offset, message, help));
    }

    fn sorted(mut self) -> Vec<Fault> {
        self.faults.sort_by_key(|fault| (fault.line, fault.column));
        self.faults
    }

    fn file(&mut self, table: &DeTable<'_>) -> PolicyFile {
        self.keys(table, "at the top of a policy", TOP_KEYS, TOP_LATER);
        let mut file = PolicyFile::default();
        if let Some(value) = table.get("description") {
            file.description = self.string(value, "description", "one sentence").map(|text| text.value);
        }
        if let Some(value) = table.get("extends") {
            file.extends = self.strings(value, "extends", "a list of policies, such as [\"base\"]").unwrap_or_default();
        }
        if let Some(section) = table.get("jail").and_then(|value| self.table(value, "[jail]")) {
            file.jail = self.jail(section);
        }
        if let Some(section) = table.get("limits").and_then(|value| self.table(value, "[limits]")) {
            file.limits = self.limits(section);
        }
        if let Some(section) = table.get("network").and_then(|value| self.table(value, "[network]")) {
            file.network = self.network(section);
        }
        if let Some(value) = table.get("secret") {
            file.network.secrets = self.secrets(value);
        }
        if let Some(section) = table.get("handlers").and_then(|value| self.table(value, "[handlers]")) {
            file.handlers = self.handlers(section);
        }
        if let Some(section) = table.get("approval").and_then(|value| self.table(value, "[approval]")) {
            file.approval_timeout = self.approval(section);
        }
        for (key, verdict) in [("allow", Verdict::Allow), ("ask", Verdict::Ask), ("deny", Verdict::Deny)] {
            if let Some(value) = table.get(key) {
                self.rules(key, verdict, value, &mut file.rules);
            }
        }
        file
    }

    /// Reports every key that is not one of these.
    fn keys(&mut self, table: &DeTable<'_>, place: &str, known: &[&str], later: &[&str]) {
        for key in table.keys() {
            let (name, offset) = (key.get_ref().as_ref(), key.span().start);
            if BUILT_IN_HANDLERS.contains(&name) {
                self.fault(
                    offset,
                    format!("`{name}` is built into every chain; no policy can change it or take it out"),
                    "take the key out",
                );
            } else if later.contains(&name) {
                self.fault(
                    offset,
                    format!("`{name}` is not enforced by this version of Tollgate, so it is not accepted {place}"),
                    "take it out; a policy must not promise what is not kept",
                );
            } else if !known.contains(&name) {
                let meant = closest(name, known.iter().chain(later).copied());
                self.fault(
                    offset,
                    format!("unknown key `{name}` {place}{}", suggest(meant)),
                    format!("allowed here: {}", known.join(", ")),
                );
            }
        }
    }

    fn jail(&mut self, table: &DeTable<'_>) -> JailSection {
        self.keys(table, "in [jail]", JAIL_KEYS, &[]);
        JailSection {
            profile: table.get("profile").and_then(|value| self.profile(value)),
            launcher: self
                .word(table, "launcher", &[("native", Launcher::Native), ("bwrap", Launcher::Bwrap)])
                .map(|at| at.value),
            seccomp: table.get("seccomp").and_then(|value| self.seccomp(value)),
            enforce: self
                .word(table, "enforce", &[("strict", Enforcement::Strict), ("best-effort", Enforcement::BestEffort)])
                .map(|at| at.value),
            commands: table.get("commands").and_then(|value| self.commands(value)),
            views: table.get("views").and_then(|value| self.views(value)),
            env: table.get("env").and_then(|value| self.environment(value)),
            workspace: self.word(
                table,
                "workspace",
                &[
                    ("read-write", WorkspaceAccess::ReadWrite),
                    ("read-only", WorkspaceAccess::ReadOnly),
                    ("hidden", WorkspaceAccess::Hidden),
                ],
            ),
        }
    }

    /// A key whose value is one of a few words.
    fn word<T: Copy>(&mut self, table: &DeTable<'_>, key: &str, words: &[(&str, T)]) -> Option<At<T>> {
        let names = words.iter().map(|(name, _)| *name);
        let form = names.clone().map(|name| format!("\"{name}\"")).collect::<Vec<_>>().join(" or ");
        let text = table.get(key).and_then(|value| self.string(value, key, &form))?;
        let named = words.iter().find(|(name, _)| *name == text.value);
        let found = named.map(|(_, value)| At { value: *value, offset: text.offset });
        if found.is_none() {
            let meant = suggest(closest(&text.value, names));
            self.fault(
                text.offset,
                format!("`{key}` cannot be {}{meant}", quoted(&text.value)),
                format!("write {form}"),
            );
        }
        found
    }

    fn profile(&mut self, value: &Value<'_>) -> Option<ProfileName> {
        let form = "the name of a file in bwrap-profiles/: lower-case letters, digits and hyphens";
        let text = self.string(value, "profile", form)?;
        let name = ProfileName::new(&text.value);
        if name.is_none() {
            self.fault(
                text.offset,
                format!("{} is no name of a profile", quoted(&text.value)),
                format!("write {form}"),
            );
        }
        name
    }

    fn seccomp(&mut self, value: &Value<'_>) -> Option<String> {
        let names = seccomp_names().collect::<Vec<_>>().join(", ");
        let text = self.string(value, "seccomp", &format!("the name of a list of system calls: {names}"))?;
        if seccomp_list(&text.value).is_none() {
            let meant = suggest(closest(&text.value, seccomp_names()));
            let message = format!("no list of system calls is called {}{meant}", quoted(&text.value));
            self.fault(text.offset, message, format!("the lists are: {names}"));
            return None;
        }
        Some(text.value)
    }

    fn commands(&mut self, value: &Value<'_>) -> Option<Commands> {
        let form = "a list of program names such as [\"python3\", \"pytest\"], or \"any\"";
        match value.get_ref() {
            DeValue::String(text) if text == ANY => return Some(Commands::Any),
            DeValue::String(text) => {
                let message = format!("`commands` cannot be {}", quoted(text));
                self.fault(value.span().start, message, format!("write {form}"));
                return None;
            }
            _ => {}
        }
        let names = self.strings(value, "commands", form)?;
        if names.is_empty() {
            self.fault(value.span().start, "`commands` is empty, so nothing could be run", format!("write {form}"));
        }
        for name in names.iter().filter(|name| name.value.contains('/') || name.value == ANY) {
            let (message, help) = match name.value == ANY {
                true => ("`any` within a list is the name of a program", "write commands = \"any\" for every program"),
                false => ("a command is compared by its last component, so it has no `/`", "write the program's name"),
            };
            self.fault(name.offset, message, help);
        }
        Some(Commands::List(names.into_iter().map(|name| name.value).collect()))
    }

    fn views(&mut self, value: &Value<'_>) -> Option<Vec<At<View>>> {
        let form = "a list of absolute paths, each a string or { path = \"…\", optional = true }";
        let items = self.array(value, "views", form)?;
        Some(items.iter().filter_map(|item| self.view(item, form)).collect())
    }

    fn view(&mut self, item: &Value<'_>, form: &str) -> Option<At<View>> {
        let (text, presence) = match item.get_ref() {
            DeValue::Table(table) => {
                self.keys(table, "in a view", VIEW_KEYS, &[]);
                let presence = match table.get("optional").map(|value| (value, value.get_ref().as_bool())) {
                    None | Some((_, Some(false))) => Presence::Required,
                    Some((_, Some(true))) => Presence::Optional,
                    Some((value, None)) => return self.wrong_type(value, "optional", "true or false"),
                };
                let Some(path) = table.get("path") else {
                    self.fault(item.span().start, "a view has no `path`", format!("write {form}"));
                    return None;
                };
                (self.string(path, "path", "an absolute path")?, presence)
            }
            _ => (self.string(item, "a view", form)?, Presence::Required),
        };
        match check_view(&text.value) {
            Ok(path) => Some(At { value: View { path, presence }, offset: text.offset }),
            Err(message) => {
                self.fault(text.offset, format!("the view {} {message}", quoted(&text.value)), VIEW_FORM);
                None
            }
        }
    }

    fn environment(&mut self, value: &Value<'_>) -> Option<EnvironmentRule> {
        let form = "a list of variables, each \"NAME\", \"PREFIX_*\" or \"NAME=value\"";
        let mut rule = EnvironmentRule::default();
        for item in self.strings(value, "env", form)? {
            match split_variable(&item.value) {
                (name, Some(fixed)) => match check_variable_name(name) {
                    Ok(()) if name.ends_with('*') => {
                        let help = "write the whole name, or leave out the value";
                        self.fault(item.offset, "a `*` cannot have a value", help);
                    }
                    Ok(()) => {
                        rule.fixed.insert(name.to_owned(), fixed.to_owned());
                    }
                    Err(message) => self.fault(item.offset, format!("variable {} {message}", quoted(name)), ""),
                },
                (name, None) => match check_variable_name(name) {
                    Ok(()) => rule.pass.push(name.to_owned()),
                    Err(message) => self.fault(item.offset, format!("variable {} {message}", quoted(name)), ""),
                },
            }
        }
        Some(rule)
    }

    fn limits(&mut self, table: &DeTable<'_>) -> LimitsSection {
        // Nothing in this version spends, so a limit on it would be a promise that nobody keeps.
        let unmeasured: Vec<&str> =
            Unit::ALL.into_iter().filter(|unit| !unit.is_measured()).map(|unit| unit.name()).collect();
        self.keys(table, "in [limits]", LIMIT_KEYS, &unmeasured);
        use quantity::{COUNT_FORM, CPUS_FORM, DURATION_FORM, SIZE_FORM};
        LimitsSection {
            wall: self.limit(table, "wall", DURATION_FORM, quantity::duration),
            cpu: self.limit(table, "cpu", DURATION_FORM, quantity::duration),
            memory: self.limit(table, "memory", SIZE_FORM, quantity::size),
            pids: self.limit(table, "pids", COUNT_FORM, quantity::count),
            cpus: self.limit(table, "cpus", CPUS_FORM, quantity::cpus),
            write_bytes: self.limit(table, "write_bytes", SIZE_FORM, quantity::size),
            effects: self.limit(table, "effects", COUNT_FORM, quantity::count),
            output_bytes: self.limit(table, "output_bytes", SIZE_FORM, quantity::size),
            egress_bytes: self.limit(table, "egress_bytes", SIZE_FORM, quantity::size),
        }
    }

    fn approval(&mut self, table: &DeTable<'_>) -> Option<Duration> {
        self.keys(table, "in [approval]", APPROVAL_KEYS, &[]);
        match self.limit(table, "timeout", quantity::DURATION_FORM, quantity::duration)? {
            Bound::At(timeout) => Some(timeout),
            Bound::Unlimited => {
                let offset = table.get("timeout").map_or(0, |value| value.span().start);
                self.fault(offset, "a question cannot wait for ever", "write a duration such as \"5min\"");
                None
            }
        }
    }

    fn limit<T>(
        &mut self,
        table: &DeTable<'_>,
        key: &str,
        form: &str,
        read: impl Fn(&str) -> Result<Bound<T>, QuantityError>,
    ) -> Option<Bound<T>> {
        let value = table.get(key)?;
        let text = match value.get_ref() {
            DeValue::String(text) => text.to_string(),
            // An integer is given to the same reader, so that `memory = 2` is told about its unit and `pids = 0x10`
            // about its form.
            DeValue::Integer(number) => number.to_string(),
            DeValue::Float(number) => number.as_str().to_owned(),
            _ => return self.wrong_type(value, key, form),
        };
        match read(&text) {
            Ok(bound) => Some(bound),
            Err(error) => {
                let message = format!("`{key}` = {} {error}", self.written(value));
                self.fault(value.span().start, message, format!("write {form}"));
                None
            }
        }
    }

    fn handlers(&mut self, table: &DeTable<'_>) -> Handlers {
        self.keys(table, "in [handlers]", HANDLER_KEYS, &[]);
        let record = match table.get("record").map(|value| (value, value.get_ref().as_bool())) {
            None => false,
            Some((_, Some(record))) => record,
            Some((value, None)) => self.wrong_type(value, "record", "true or false").unwrap_or_default(),
        };
        let faults = table.get("faults").and_then(|value| self.table(value, "faults"));
        Handlers { record, faults: faults.map(|table| self.faults(table)).unwrap_or_default() }
    }

    fn faults(&mut self, table: &DeTable<'_>) -> Vec<FaultRule> {
        self.keys(table, "in faults", FAULTS_KEYS, &[]);
        let seed = self.scalar(table, "seed", "a whole number");
        let Some(value) = table.get("rules") else { return Vec::new() };
        let form = "a list of tables such as { effect = \"fs/write\", kind = \"error\", rate = 0.1 }";
        let Some(items) = self.array(value, "rules", form) else { return Vec::new() };
        let tables = items.iter().filter_map(|item| Some((self.table(item, form)?, item.span().start)));
        let tables: Vec<_> = tables.collect();
        tables.into_iter().filter_map(|(table, start)| self.fault_rule(table, start, seed.as_ref())).collect()
    }

    fn fault_rule(&mut self, table: &DeTable<'_>, start: usize, seed: Option<&At<String>>) -> Option<FaultRule> {
        self.keys(table, "in a fault rule", FAULT_KEYS, &[]);
        let before = self.faults.len();
        let mut places: BTreeMap<&'static str, usize> = BTreeMap::new();
        let mut text = RuleText::default();
        for (key, part, slot) in [
            ("effect", "effects", &mut text.effects),
            ("path", "paths", &mut text.paths),
            ("door", "doors", &mut text.doors),
        ] {
            let Some(value) = table.get(key) else { continue };
            places.insert(part, value.span().start);
            let words = match value.get_ref() {
                DeValue::String(word) => Some(vec![At { value: word.to_string(), offset: value.span().start }]),
                _ => self.strings(value, key, "a word, or a list of words"),
            };
            slot.extend(words.into_iter().flatten().map(|word| word.value));
        }
        for (key, part) in [
            ("errno", "arrives"),
            ("status", "arrives"),
            ("after", "arrives"),
            ("rate", "rate"),
            ("first", "first"),
            ("seed", "seed"),
            ("when", "when"),
            ("retry_after", "retry_after"),
        ] {
            let Some(found) = self.scalar(table, key, "a word or a number") else { continue };
            places.insert(part, found.offset);
            let slot = match part {
                "rate" => &mut text.rate,
                "first" => &mut text.first,
                "seed" => &mut text.seed,
                "when" => &mut text.when,
                "retry_after" => &mut text.retry_after,
                _ => &mut text.arrives,
            };
            if slot.replace(found.value).is_some() {
                let message = format!("`{key}` is one too many: a fault arrives as one thing");
                let help = "write `errno` with error, `after` with timeout, `status` with rate-limit";
                self.fault(found.offset, message, help);
            }
        }
        match self.scalar(table, "kind", "the name of a fault") {
            Some(kind) => {
                places.insert("kind", kind.offset);
                for (key, fault) in [("errno", "error"), ("status", "rate-limit"), ("after", "timeout")] {
                    if let Some(value) = table.get(key).filter(|_| kind.value != fault) {
                        let message = format!("`{key}` belongs to the fault `{fault}`");
                        self.fault(value.span().start, message, "take it out");
                    }
                }
                text.kind = kind.value;
            }
            None if !table.contains_key("kind") => {
                self.fault(start, "a fault rule has no `kind`", "write kind = \"error\"")
            }
            None => {}
        }
        if text.seed.is_none() {
            text.seed = seed.map(|seed| seed.value.clone());
        }
        if self.faults.len() > before {
            return None;
        }
        match FaultRule::new(text) {
            Ok(rule) => Some(rule),
            Err(error) => {
                let offset = places.get(error.part).copied().unwrap_or(start);
                self.fault(offset, error.message, error.help);
                None
            }
        }
    }

    /// A word or a number, as text.
    fn scalar(&mut self, table: &DeTable<'_>, key: &str, form: &str) -> Option<At<String>> {
        let value = table.get(key)?;
        let text = match value.get_ref() {
            DeValue::String(text) => text.to_string(),
            DeValue::Integer(number) => number.to_string(),
            DeValue::Float(number) => number.as_str().to_owned(),
            _ => return self.wrong_type(value, key, form),
        };
        Some(At { value: text, offset: value.span().start })
    }

    fn rules(&mut self, key: &str, verdict: Verdict, value: &Value<'_>, rules: &mut Vec<Rule>) {
        let form = format!("a table headed [[{key}]]");
        let Some(items) = self.array(value, key, &form) else { return };
        for item in items {
            if let Some(table) = self.table(item, &form) {
                rules.extend(self.rule(key, verdict, table, item.span()));
            }
        }
    }

    fn rule(&mut self, key: &str, verdict: Verdict, table: &DeTable<'_>, span: Range<usize>) -> Option<Rule> {
        self.keys(table, &format!("in [[{key}]]"), RULE_KEYS, &[]);
        let kinds = self.kinds(key, table, span.start);
        let paths = match table.get("path") {
            Some(value) => Some(self.paths(value)?),
            None => None,
        };
        let written = self.target(table);
        let ((kinds, effects), written) = (kinds?, written?);
        let rule = Checked { key, verdict, kinds: &kinds, effects: &effects, paths: paths.as_ref(), start: span.start };
        let complaint = rule.complaint().or_else(|| written.complaint(&kinds));
        if let Some((offset, message, help)) = complaint {
            self.fault(offset, message, help);
            return None;
        }
        let names = match &kinds {
            Kinds::Any | Kinds::All => ANY.to_owned(),
            Kinds::Only(kinds) => kinds.iter().map(|kind| kind.name()).collect::<Vec<_>>().join(", "),
        };
        let origin = Origin {
            file: self.source.name.clone(),
            line: self.source.line(span.start),
            text: format!("{key} {names}"),
        };
        let paths = paths.map_or(Paths::Any, |(_, patterns)| Paths::Only(patterns));
        Some(Rule { verdict, kinds, paths, target: written.target, origin })
    }

    /// The kinds of a rule, and where each is written.
    fn kinds(&mut self, key: &str, table: &DeTable<'_>, start: usize) -> Option<(Kinds, Vec<At<String>>)> {
        let form = "a list of effect kinds such as [\"fs/write\"], or [\"any\"]";
        let Some(value) = table.get("effect") else {
            self.fault(start, format!("[[{key}]] has no `effect`"), format!("write {form}"));
            return None;
        };
        let effects = self.strings(value, "effect", form)?;
        if effects.is_empty() {
            self.fault(value.span().start, "`effect` is empty, and a rule about nothing is none", form);
            return None;
        }
        if effects.iter().any(|effect| effect.value == ANY) {
            return Some((Kinds::Any, effects));
        }
        let mut kinds = Vec::new();
        for effect in &effects {
            match effect.value.parse::<Kind>() {
                Ok(kind) => kinds.push(kind),
                Err(_unknown) => {
                    let names = || VOCABULARY.iter().map(|row| row.name);
                    let meant = suggest(closest(&effect.value, names().chain([ANY])));
                    let known = names().collect::<Vec<_>>().join(", ");
                    let message = format!("unknown effect kind {}{meant}", quoted(&effect.value));
                    self.fault(effect.offset, message, format!("the kinds are: {known}; or any"));
                }
            }
        }
        let complete = kinds.len() == effects.len();
        kinds.sort();
        kinds.dedup();
        complete.then_some((Kinds::Only(kinds), effects))
    }

    fn paths(&mut self, value: &Value<'_>) -> Option<(usize, Patterns)> {
        let form = "a list of workspace paths such as [\"src/**\"]; [\"**\"] is every path";
        let texts = self.strings(value, "path", form)?;
        if texts.is_empty() {
            self.fault(value.span().start, "`path` is empty, and matches nothing", format!("write {form}"));
            return None;
        }
        let lines = self.source.lines(texts.iter().map(|text| text.offset)).collect();
        let offsets: Vec<usize> = texts.iter().map(|text| text.offset).collect();
        match Patterns::at_lines(texts.into_iter().map(|text| text.value).collect(), lines) {
            Ok(patterns) => Some((value.span().start, patterns)),
            Err(errors) => {
                for (place, text, error) in errors {
                    self.fault(offsets[place], format!("{}: {error}", quoted(&text)), "");
                }
                None
            }
        }
    }

    fn table<'v, 'i>(&mut self, value: &'v Value<'i>, form: &str) -> Option<&'v DeTable<'i>> {
        match value.get_ref() {
            DeValue::Table(table) => Some(table),
            _ => self.wrong_type(value, form.trim_matches(['[', ']']), form),
        }
    }

    fn array<'v, 'i>(&mut self, value: &'v Value<'i>, key: &str, form: &str) -> Option<&'v [Value<'i>]> {
        match value.get_ref() {
            DeValue::Array(array) => Some(array),
            _ => self.wrong_type(value, key, form),
        }
    }

    fn string(&mut self, value: &Value<'_>, key: &str, form: &str) -> Option<At<String>> {
        match value.get_ref() {
            DeValue::String(text) => Some(At { value: text.to_string(), offset: value.span().start }),
            _ => self.wrong_type(value, key, form),
        }
    }

    fn strings(&mut self, value: &Value<'_>, key: &str, form: &str) -> Option<Vec<At<String>>> {
        let items = self.array(value, key, form)?;
        let texts: Vec<_> = items.iter().filter_map(|item| self.string(item, key, form)).collect();
        (texts.len() == items.len()).then_some(texts)
    }

    fn wrong_type<T>(&mut self, value: &Value<'_>, key: &str, form: &str) -> Option<T> {
        let article = if matches!(value.get_ref(), DeValue::Integer(_) | DeValue::Array(_)) { "an" } else { "a" };
        let message = format!("`{key}` cannot be {article} {}", value.get_ref().type_str());
        self.fault(value.span().start, message, format!("write {form}"));
        None
    }

    /// A scalar as it stands in the file.
    fn written(&self, value: &Value<'_>) -> String {
        self.source.text.get(value.span()).unwrap_or_default().chars().take(40).filter(|c| !c.is_control()).collect()
    }
}

/// A rule whose parts are right and whose meaning is to be checked.
struct Checked<'a> {
    key: &'a str,
    verdict: Verdict,
    kinds: &'a Kinds,
    effects: &'a [At<String>],
    paths: Option<&'a (usize, Patterns)>,
    start: usize,
}

impl Checked<'_> {
    /// What is wrong with the rule as a whole: offset, message, help.
    fn complaint(&self) -> Option<(usize, String, String)> {
        let key = self.key;
        let Kinds::Only(kinds) = self.kinds else { return self.complaint_about_any() };
        if let Some(kind) = kinds.iter().find(|kind| is_jail(**kind)) {
            if self.verdict != Verdict::Deny {
                let message = format!("no rule can {key} {kind}: it is what the jail itself refused");
                return Some((self.offset_of(*kind), message, "take it out".to_owned()));
            }
        }
        if self.verdict == Verdict::Ask && kinds.contains(&Kind::NetResolve) {
            let message = "nobody can be asked about net/resolve: a program waits a few seconds for a name".to_owned();
            let help = "ask about net/connect or http/request, which come after it".to_owned();
            return Some((self.offset_of(Kind::NetResolve), message, help));
        }
        let file = kinds.iter().find(|kind| is_file(**kind));
        let other = kinds.iter().find(|kind| !is_file(**kind));
        if let (Some(file), Some(other)) = (file, other) {
            let message = format!("{file} acts on a path and {other} does not, so one rule cannot be about both");
            return Some((self.offset_of(*other), message, "write two rules".to_owned()));
        }
        match (file, self.paths) {
            (Some(kind), None) => {
                let message = format!("[[{key}]] on {kind} has no `path`");
                return Some((self.start, message, "write path = [\"**\"] for every path of the workspace".to_owned()));
            }
            (None, Some((offset, _))) => {
                let message = format!("{} acts on no path", kinds.first().map_or("", |kind| kind.name()));
                return Some((*offset, message, "take `path` out".to_owned()));
            }
            (Some(_), Some(_)) | (None, None) => {}
        }
        self.complaint_about_reads(kinds)
    }

    fn complaint_about_any(&self) -> Option<(usize, String, String)> {
        if let Some((offset, _)) = self.paths {
            let message = "`any` includes kinds that act on no path".to_owned();
            return Some((*offset, message, "take `path` out, or name the kinds".to_owned()));
        }
        (self.verdict == Verdict::Ask).then(|| {
            let message = "`any` includes fs/read, which nobody can be asked about".to_owned();
            (self.start, message, "name the kinds that a person is to decide about".to_owned())
        })
    }

    /// The workspace is read through a view and not effect by effect, so a rule on reads has to be one that a view
    /// can keep: all of it, nothing of it, or some of it hidden.
    fn complaint_about_reads(&self, kinds: &[Kind]) -> Option<(usize, String, String)> {
        let reads = |kind: &&Kind| matches!(kind, Kind::FsRead | Kind::FsList);
        let kind = *kinds.iter().find(reads)?;
        let offset = self.offset_of(kind);
        let (paths_offset, patterns) = self.paths?;
        let everywhere = patterns.texts().iter().any(|text| text == EVERY_PATH);
        match self.verdict {
            Verdict::Allow if !everywhere => Some((
                *paths_offset,
                format!("{kind} can only be allowed for the whole workspace, which the jail sees as one view"),
                "write path = [\"**\"], and hide what must not be read with [[deny]] on fs/read".to_owned(),
            )),
            Verdict::Ask => Some((
                offset,
                format!("nobody can be asked about {kind}: the workspace is read through a view"),
                "hide it with [[deny]] on fs/read, or allow it".to_owned(),
            )),
            Verdict::Deny if everywhere => Some((
                *paths_offset,
                format!("{kind} cannot be denied everywhere while the workspace is shown"),
                "write workspace = \"hidden\" in [jail]".to_owned(),
            )),
            Verdict::Deny if !kinds.contains(&Kind::FsRead) => Some((
                offset,
                "fs/list cannot be denied where fs/read is allowed: the workspace is read through a view".to_owned(),
                "deny fs/read as well, which hides the path".to_owned(),
            )),
            Verdict::Allow | Verdict::Deny => None,
        }
    }

    fn offset_of(&self, kind: Kind) -> usize {
        self.effects.iter().find(|effect| effect.value == kind.name()).map_or(self.start, |effect| effect.offset)
    }
}

fn is_file(kind: Kind) -> bool {
    match kind {
        Kind::FsRead | Kind::FsList | Kind::FsWrite | Kind::FsDelete | Kind::FsMove => true,
        Kind::RunStart | Kind::RunCancel | Kind::EvalRun | Kind::ApiRequest => false,
        Kind::NetConnect | Kind::NetResolve | Kind::NetAccept | Kind::HttpRequest => false,
        Kind::ProcessExec | Kind::ProcessSyscall => false,
    }
}

fn is_jail(kind: Kind) -> bool {
    match kind {
        Kind::ProcessExec | Kind::ProcessSyscall | Kind::ApiRequest => true,
        Kind::FsRead | Kind::FsList | Kind::FsWrite | Kind::FsDelete | Kind::FsMove => false,
        Kind::RunStart | Kind::RunCancel | Kind::EvalRun => false,
        Kind::NetConnect | Kind::NetResolve | Kind::NetAccept | Kind::HttpRequest => false,
    }
}

/// What a view may be, for messages.
pub(super) const VIEW_FORM: &str =
    "write an absolute path such as \"/opt/sdk\", or one below your home, \"~/.cargo/bin\"";

/// Checks the path of a view, which may start with `~/`.
pub(super) fn check_view(text: &str) -> Result<PathBuf, &'static str> {
    let path = Path::new(text);
    let below = match text.strip_prefix("~/") {
        Some(below) => Path::new(below),
        None if path.is_absolute() => path,
        None => return Err("is not absolute"),
    };
    if text.contains('\0') {
        return Err("holds a zero byte");
    }
    let mut parts = 0;
    for component in below.components() {
        match component {
            Component::Normal(_) => parts += 1,
            Component::RootDir => {}
            Component::ParentDir | Component::CurDir | Component::Prefix(_) => return Err("has a `.` or `..` in it"),
        }
    }
    // The jail makes these itself; the host's own would show its processes and devices.
    if ["/proc", "/sys", "/dev"].iter().any(|made| path.starts_with(made)) {
        return Err("is below /proc, /sys or /dev, which the jail makes itself");
    }
    // The whole file system or the whole home as a view would undo the jail in one line.
    match parts {
        0 => Err("is everything; name what the run needs"),
        _ => Ok(path.to_owned()),
    }
}

fn quoted(text: &str) -> String {
    format!("\"{}\"", text.chars().take(80).filter(|letter| !letter.is_control()).collect::<String>())
}
