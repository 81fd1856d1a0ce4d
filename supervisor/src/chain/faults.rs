//! Faults: effects that go wrong on purpose, so that a program's own handling of errors can be tried.
//!
//! A rule names kinds, a fault, and how often. Whether an effect is hit is a pure function of the rule's seed, the
//! effect's key and the occurrence: the same seed hits the same effects on any machine, whatever order its threads
//! run in. The key is the kind and the resource; the occurrence counts, from 0, the effects of one key, of the kinds
//! that any rule names. The drawn number is the first eight bytes, big-endian, of SHA-256 over `tollgate.fault.v1`, a
//! zero byte, the seed as eight bytes, the kind, a zero byte, the resource as canonical JSON, a zero byte and the
//! occurrence as eight bytes; its upper 53 bits are held against the rate. Rules of one seed share one draw and
//! divide it between them in their order, so that 10 % of one fault and 20 % of another are 30 % together.
//!
//! What it refuses, before a run starts: a fault that a kind cannot show at a door it comes by. A fault before the
//! effect keeps it from happening; one after lets it happen and then lies about it, and the receipt says so.

use super::{admission::Patterns, Answer, BoxFuture, Decision, Handler, Next};
use crate::{
    effect::{canonical_json, Digest, Door, Effect, FaultKind, FaultShape, Kind, Resource, VOCABULARY},
    policy::{
        fault::{closest, suggest},
        limits::Bound,
        quantity,
    },
};
use serde_json::json;
use sha2::Digest as _;
use std::{
    collections::{BTreeMap, HashMap},
    fmt,
    sync::{
        atomic::{AtomicU64, Ordering},
        Mutex, PoisonError,
    },
    time::Duration,
};

const NAME: &str = "faults";
/// How long a time-out lasts where the rule does not say.
const TIMEOUT: Duration = Duration::from_secs(30);
/// What `Retry-After` says where the rule does not.
const RETRY_AFTER_S: u64 = 1;
/// A draw has this many bits: as many as a binary64 number holds exactly, so that a rate means the same everywhere.
const DRAW_BITS: u32 = 53;
/// A rate of 1.
const ALWAYS: u64 = 1 << DRAW_BITS;

/// One rule.
#[derive(Clone, Debug, PartialEq)]
pub struct FaultRule {
    kinds: Vec<Kind>,
    fault: Fault,
    paths: Option<Patterns>,
    doors: Vec<Door>,
    when: When,
    /// In units of 2^-53.
    rate: u64,
    first: Option<u64>,
    seed: u64,
    text: String,
}

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    /// With this error number, or the natural one.
    Error(Option<&'static str>),
    Timeout(Duration),
    RateLimit {
        status: u16,
        retry_after_s: u64,
    },
    Truncated,
    Corrupted,
    Cut,
}

impl Fault {
    fn kind(self) -> FaultKind {
        match self {
            Fault::Error(_) => FaultKind::Error,
            Fault::Timeout(_) => FaultKind::Timeout,
            Fault::RateLimit { .. } => FaultKind::RateLimit,
            Fault::Truncated => FaultKind::Truncated,
            Fault::Corrupted => FaultKind::Corrupted,
            Fault::Cut => FaultKind::Cut,
        }
    }
}

/// Whether the effect happens all the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum When {
    /// It does not.
    Before,
    /// It does, and then fails.
    After,
}

/// A rule as it is written: on the command line, or in a policy file. Every part is text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RuleText {
    /// The kinds, `any` for all that can show the fault.
    pub effects: Vec<String>,
    /// The fault.
    pub kind: String,
    /// What it arrives as: an error number's name, a status, or a time limit.
    pub arrives: Option<String>,
    /// How often, from 0 to 1.
    pub rate: Option<String>,
    /// Only the first so many of each key.
    pub first: Option<String>,
    /// What the draws depend on.
    pub seed: Option<String>,
    /// Workspace paths; empty for any.
    pub paths: Vec<String>,
    /// `before` or `after`.
    pub when: Option<String>,
    /// The doors; empty for all that somebody waits at.
    pub doors: Vec<String>,
    /// Seconds for `Retry-After`.
    pub retry_after: Option<String>,
}

/// What is wrong with a rule.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct RuleError {
    /// The part: a field of [`RuleText`].
    pub part: &'static str,
    /// What is wrong, with the offending text.
    pub message: String,
    /// What is allowed.
    pub help: String,
}

fn wrong(part: &'static str, message: impl Into<String>, help: impl Into<String>) -> RuleError {
    RuleError { part, message: message.into(), help: help.into() }
}

/// The form of a rule on the command line.
pub const SPEC_FORM: &str = "KIND[+KIND…]:FAULT[=WHAT][,rate=R][,seed=N][,path=GLOB][,first=N][,when=before|after]\
                             [,door=api|program|network|workspace][,retry-after=SECONDS]";

impl std::str::FromStr for FaultRule {
    type Err = RuleError;

    /// Reads `fs/write:error=ENOSPC,rate=0.1,seed=7,path=**/*.log`.
    fn from_str(spec: &str) -> Result<FaultRule, RuleError> {
        let form = || format!("write {SPEC_FORM}");
        let (effects, rest) =
            spec.split_once(':').ok_or_else(|| wrong("effects", format!("`{spec}` has no `:`"), form()))?;
        let mut rule = RuleText {
            effects: effects.split('+').map(|kind| kind.trim().to_owned()).collect(),
            ..RuleText::default()
        };
        for (place, part) in split_outside_braces(rest).into_iter().enumerate() {
            let (name, value) = match part.split_once('=') {
                Some((name, value)) => (name.trim(), Some(value.trim().to_owned())),
                None => (part.trim(), None),
            };
            if place == 0 {
                (rule.kind, rule.arrives) = (name.to_owned(), value);
                continue;
            }
            let Some(value) = value else {
                return Err(wrong("kind", format!("`{name}` has no value"), form()));
            };
            let known = ["rate", "seed", "path", "first", "when", "door", "retry-after"];
            let once = |slot: &mut Option<String>| match slot.replace(value.clone()) {
                None => Ok(()),
                Some(_) => Err(wrong("kind", format!("`{name}` is given twice"), form())),
            };
            match name {
                "rate" => once(&mut rule.rate)?,
                "seed" => once(&mut rule.seed)?,
                "first" => once(&mut rule.first)?,
                "when" => once(&mut rule.when)?,
                "retry-after" => once(&mut rule.retry_after)?,
                "path" => rule.paths.push(value),
                "door" => rule.doors.extend(value.split('+').map(str::to_owned)),
                _ => {
                    let meant = suggest(closest(name, known));
                    return Err(wrong("kind", format!("`{name}` is no part of a fault rule{meant}"), form()));
                }
            }
        }
        FaultRule::new(rule)
    }
}

fn split_outside_braces(text: &str) -> Vec<&str> {
    let (mut depth, mut start, mut parts) = (0_usize, 0, Vec::new());
    for (place, letter) in text.char_indices() {
        match letter {
            '{' => depth += 1,
            '}' => depth = depth.saturating_sub(1),
            ',' if depth == 0 => {
                parts.push(&text[start..place]);
                start = place + 1;
            }
            _ => {}
        }
    }
    parts.push(&text[start..]);
    parts
}

impl FaultRule {
    /// Checks a rule, and that each of its kinds can show its fault at each of its doors.
    ///
    /// # Errors
    ///
    /// The first part that is wrong.
    pub fn new(text: RuleText) -> Result<FaultRule, RuleError> {
        let written = text.to_string();
        let fault_kind = FaultKind::ALL.into_iter().find(|kind| kind.name() == text.kind).ok_or_else(|| {
            let names = FaultKind::ALL.map(FaultKind::name);
            let meant = suggest(closest(&text.kind, names));
            wrong(
                "kind",
                format!("`{}` is no fault{meant}", text.kind),
                format!("the faults are: {}", names.join(", ")),
            )
        })?;
        let kinds = kinds(&text.effects, fault_kind, &text.doors)?;
        let when = match text.when.as_deref() {
            None if is_about_a_body(fault_kind) => When::After,
            None | Some("before") => When::Before,
            Some("after") => When::After,
            Some(other) => {
                let help = "write `before`, for an effect that does not happen, or `after`, for one that does";
                return Err(wrong("when", format!("`when` cannot be `{other}`"), help));
            }
        };
        if is_about_a_body(fault_kind) && when == When::Before {
            let message = format!("`{}` is about a result, so the effect happens first", text.kind);
            return Err(wrong("when", message, "leave `when` out"));
        }
        let doors = doors(&text.doors, &kinds, fault_kind, when)?;
        let fault = fault(fault_kind, &text, &kinds)?;
        let paths = paths(&text.paths, &kinds)?;
        let first = number(text.first.as_deref(), "first", "first")?;
        let seed = number(text.seed.as_deref(), "seed", "seed")?.unwrap_or(0);
        let rate = rate(text.rate.as_deref())?;
        Ok(FaultRule { kinds, fault, paths, doors, when, rate, first, seed, text: written })
    }

    /// The rule in one line, as the command line takes it.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// The kinds of the program's own calls that it is about, which then have to wait for the chain.
    pub fn waiting_kinds(&self) -> Vec<Kind> {
        let at_program = self.doors.contains(&Door::Program);
        let comes_by =
            |kind: &Kind| shape(*kind, self.fault.kind()).is_some_and(|it| it.doors.contains(&Door::Program));
        self.kinds.iter().copied().filter(|kind| at_program && comes_by(kind)).collect()
    }

    /// Whether effects of this kind can fail by it.
    pub fn is_about(&self, kind: Kind) -> bool {
        self.kinds.contains(&kind)
    }

    fn concerns(&self, effect: &Effect) -> bool {
        let on_path = match (&self.paths, &effect.resource) {
            (None, _) => true,
            (Some(patterns), Resource::Workspace { path }) => patterns.admits(path),
            (Some(_), _) => false,
        };
        let shown = || shape(effect.kind, self.fault.kind()).is_some_and(|shape| shape.doors.contains(&effect.door));
        self.kinds.contains(&effect.kind) && self.doors.contains(&effect.door) && on_path && shown()
    }
}

/// The spelling of the command line.
impl fmt::Display for RuleText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.effects.join("+"), self.kind)?;
        if let Some(arrives) = &self.arrives {
            write!(f, "={arrives}")?;
        }
        let parts = [
            ("rate", &self.rate),
            ("seed", &self.seed),
            ("first", &self.first),
            ("when", &self.when),
            ("retry-after", &self.retry_after),
        ];
        for (name, value) in parts {
            if let Some(value) = value {
                write!(f, ",{name}={value}")?;
            }
        }
        for path in &self.paths {
            write!(f, ",path={path}")?;
        }
        match self.doors.is_empty() {
            true => Ok(()),
            false => write!(f, ",door={}", self.doors.join("+")),
        }
    }
}

fn is_about_a_body(kind: FaultKind) -> bool {
    match kind {
        FaultKind::Truncated | FaultKind::Corrupted | FaultKind::Cut => true,
        FaultKind::Error | FaultKind::Timeout | FaultKind::RateLimit => false,
    }
}

fn shape(kind: Kind, fault: FaultKind) -> Option<&'static FaultShape> {
    kind.declaration().faults.iter().find(|shape| shape.kind == fault)
}

fn kinds(effects: &[String], fault: FaultKind, doors: &[String]) -> Result<Vec<Kind>, RuleError> {
    let can = || VOCABULARY.iter().filter(|row| shape(row.kind, fault).is_some()).map(|row| row.kind);
    let names = || can().map(Kind::name).collect::<Vec<_>>().join(", ");
    if effects.iter().any(|effect| effect == "any") {
        // Of the doors that are named, for a kind that comes by others alone cannot be meant.
        let named = |door: &Door| doors.is_empty() || doors.iter().any(|name| name == door.name());
        let meant = |kind: &Kind| shape(*kind, fault).is_some_and(|shape| shape.doors.iter().any(named));
        return Ok(can().filter(meant).collect());
    }
    let mut kinds = Vec::new();
    for effect in effects {
        let kind: Kind = effect.parse().map_err(|_unknown| {
            let meant = suggest(closest(effect, VOCABULARY.iter().map(|row| row.name)));
            wrong("effects", format!("unknown effect kind `{effect}`{meant}"), format!("the kinds are: {}", names()))
        })?;
        if shape(kind, fault).is_none() {
            let message = format!("{kind} cannot show the fault `{}`", fault.name());
            return Err(wrong("effects", message, format!("kinds that can: {}", names())));
        }
        kinds.push(kind);
    }
    match kinds.is_empty() {
        true => Err(wrong("effects", "a rule about no kind is none", format!("the kinds are: {}", names()))),
        false => Ok(kinds),
    }
}

/// The doors of a rule. Without a word, all at which somebody waits for the answer; each must be able to show it.
fn doors(named: &[String], kinds: &[Kind], fault: FaultKind, when: When) -> Result<Vec<Door>, RuleError> {
    let shows = |kind: Kind, door: Door| {
        // What the kernel does afterwards is out of reach: the answer comes before the call.
        let late = when == When::After && door == Door::Program;
        !late && shape(kind, fault).is_some_and(|shape| shape.doors.contains(&door))
    };
    let comes_by = |kind: Kind, door: Door| kind.declaration().faults.iter().any(|shape| shape.doors.contains(&door));
    let mut doors = Vec::new();
    for name in named {
        let door = match name.as_str() {
            "api" => Door::Api,
            "program" => Door::Program,
            "workspace" => Door::Workspace,
            "network" => Door::Network,
            _ => {
                let help = "write `api` (the run's socket), `program` (its own system calls), `network` (what leaves \
                            the jail) or `workspace` (what it changed, when it ends)";
                return Err(wrong("doors", format!("`{name}` is no door of faults"), help));
            }
        };
        doors.push(door);
    }
    let asked = if named.is_empty() { vec![Door::Api, Door::Program, Door::Network] } else { doors };
    for kind in kinds {
        let unable = asked.iter().find(|door| comes_by(*kind, **door) && !shows(*kind, **door));
        if let Some(door) = unable {
            let able: Vec<&str> = Door::ALL.into_iter().filter(|door| shows(*kind, *door)).map(Door::name).collect();
            let after = if when == When::After { " after it happened" } else { "" };
            return Err(wrong(
                "doors",
                format!("{kind} cannot show the fault `{}`{after} at the {} door", fault.name(), door.name()),
                match able.is_empty() {
                    true => "no door can".to_owned(),
                    false => format!("add door={}", able.join("+")),
                },
            ));
        }
        if !asked.iter().any(|door| shows(*kind, *door)) {
            let message = format!("{kind} does not come by a door that the rule names");
            return Err(wrong("doors", message, "leave `door` out"));
        }
    }
    Ok(asked)
}

fn fault(kind: FaultKind, text: &RuleText, kinds: &[Kind]) -> Result<Fault, RuleError> {
    let given = text.arrives.as_deref();
    if kind != FaultKind::RateLimit && text.retry_after.is_some() {
        return Err(wrong("retry_after", "only `rate-limit` has a `retry-after`", "leave it out"));
    }
    match kind {
        FaultKind::Error => match given {
            None => Ok(Fault::Error(None)),
            Some(name) => {
                let mut found = None;
                for kind in kinds {
                    let arrives = shape(*kind, FaultKind::Error).map_or(&[][..], |shape| shape.arrives);
                    found = arrives.iter().copied().find(|known| *known == name);
                    if found.is_none() {
                        let meant = suggest(closest(name, arrives.iter().copied()));
                        let message = format!("{kind} does not fail with `{name}`{meant}");
                        return Err(wrong("arrives", message, format!("{kind} fails with: {}", arrives.join(", "))));
                    }
                }
                Ok(Fault::Error(found))
            }
        },
        FaultKind::Timeout => match given.map(quantity::duration) {
            None => Ok(Fault::Timeout(TIMEOUT)),
            Some(Ok(Bound::At(limit))) => Ok(Fault::Timeout(limit)),
            Some(Ok(Bound::Unlimited)) => {
                Err(wrong("arrives", "a time-out has an end", "write a duration such as 500ms or 30s"))
            }
            Some(Err(error)) => {
                let message = format!("`{}` {error}", given.unwrap_or_default());
                Err(wrong("arrives", message, "write a duration such as 500ms or 30s"))
            }
        },
        FaultKind::RateLimit => {
            let status = match given {
                None | Some("429") => 429,
                Some("503") => 503,
                Some(other) => {
                    let message = format!("`{other}` is no status of a rate limit");
                    return Err(wrong("arrives", message, "write 429 or 503"));
                }
            };
            let retry_after_s = number(text.retry_after.as_deref(), "retry_after", "retry-after")?;
            Ok(Fault::RateLimit { status, retry_after_s: retry_after_s.unwrap_or(RETRY_AFTER_S) })
        }
        FaultKind::Truncated | FaultKind::Corrupted | FaultKind::Cut if given.is_some() => {
            Err(wrong("arrives", format!("`{}` has no value", kind.name()), "leave it out"))
        }
        FaultKind::Truncated => Ok(Fault::Truncated),
        FaultKind::Corrupted => Ok(Fault::Corrupted),
        FaultKind::Cut => Ok(Fault::Cut),
    }
}

fn paths(texts: &[String], kinds: &[Kind]) -> Result<Option<Patterns>, RuleError> {
    if texts.is_empty() {
        return Ok(None);
    }
    if let Some(kind) = kinds.iter().find(|kind| !kind.name().starts_with("fs/")) {
        return Err(wrong("paths", format!("{kind} acts on no path of the workspace"), "leave `path` out"));
    }
    let patterns = Patterns::new(texts.to_vec()).map_err(|errors| {
        let all: Vec<String> = errors.iter().map(|(_, text, error)| format!("`{text}`: {error}")).collect();
        wrong("paths", all.join("; "), "write a pattern such as **/*.log")
    })?;
    Ok(Some(patterns))
}

fn number(text: Option<&str>, part: &'static str, name: &str) -> Result<Option<u64>, RuleError> {
    text.map(|text| text.parse::<u64>())
        .transpose()
        .map_err(|_not_a_number| wrong(part, format!("`{name}` is no whole number"), "write decimal digits"))
}

fn rate(text: Option<&str>) -> Result<u64, RuleError> {
    let Some(text) = text else { return Ok(ALWAYS) };
    match text.parse::<f64>() {
        // Exact: a power of two changes only the exponent, and 2^53 is a number that binary64 holds.
        Ok(rate) if (0.0..=1.0).contains(&rate) => Ok((rate * ALWAYS as f64).round() as u64),
        _ => Err(wrong("rate", format!("`{text}` is no rate"), "write a number from 0 to 1, such as 0.1")),
    }
}

/// The number that decides about an effect of this key, at this occurrence.
pub fn draw(seed: u64, kind: Kind, resource: &Resource, occurrence: u64) -> u64 {
    let mut hash = sha2::Sha256::new();
    hash.update(b"tollgate.fault.v1\0");
    hash.update(seed.to_be_bytes());
    hash.update(kind.name());
    hash.update([0]);
    hash.update(canonical_json(resource));
    hash.update([0]);
    hash.update(occurrence.to_be_bytes());
    let bytes: [u8; 32] = hash.finalize().into();
    let first = u64::from_be_bytes(bytes[..8].try_into().expect("eight of 32 bytes"));
    first >> (u64::BITS - DRAW_BITS)
}

/// The handler.
pub struct Faults {
    rules: Vec<FaultRule>,
    /// How often each key occurred, by the first half of its digest.
    seen: Mutex<HashMap<[u8; 16], u64>>,
    injected: AtomicU64,
}

impl Faults {
    /// With these rules, and nothing seen yet.
    pub fn new(rules: Vec<FaultRule>) -> Faults {
        Faults { rules, seen: Mutex::default(), injected: AtomicU64::new(0) }
    }

    /// How many effects were made to fail, or their results changed.
    pub fn injected(&self) -> u64 {
        self.injected.load(Ordering::Relaxed)
    }

    /// The rule that hits this effect, and the draw.
    fn choose(&self, effect: &Effect) -> Option<(&FaultRule, u64)> {
        if !self.rules.iter().any(|rule| rule.kinds.contains(&effect.kind)) {
            return None;
        }
        let occurrence = self.occurrence(effect);
        let mut taken: BTreeMap<u64, u64> = BTreeMap::new();
        for rule in self.rules.iter().filter(|rule| rule.concerns(effect)) {
            if rule.first.is_some_and(|first| occurrence >= first) {
                continue;
            }
            let drawn = draw(rule.seed, effect.kind, &effect.resource, occurrence);
            let from = taken.entry(rule.seed).or_default();
            let until = from.saturating_add(rule.rate);
            if (*from..until).contains(&drawn) {
                return Some((rule, drawn));
            }
            *from = until;
        }
        None
    }

    fn occurrence(&self, effect: &Effect) -> u64 {
        let mut key = effect.kind.name().as_bytes().to_vec();
        key.push(0);
        key.extend(canonical_json(&effect.resource));
        let mut short = [0; 16];
        short.copy_from_slice(&Digest::of(&key).0[..16]);
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let count = seen.entry(short).or_default();
        *count += 1;
        *count - 1
    }

    fn note(&self) {
        self.injected.fetch_add(1, Ordering::Relaxed);
    }

    /// The failure that the asker sees.
    fn failure(&self, effect: &Effect, rule: &FaultRule, done: Option<Answer>) -> Answer {
        self.note();
        let (errno, what) = match rule.fault {
            Fault::Error(Some(errno)) => (errno, errno.to_owned()),
            Fault::Error(None) => {
                let natural = shape(effect.kind, FaultKind::Error).and_then(|shape| shape.arrives.first());
                let errno = natural.copied().unwrap_or("EIO");
                (errno, errno.to_owned())
            }
            Fault::Timeout(limit) => ("ETIMEDOUT", format!("no answer within {} ms", limit.as_millis())),
            Fault::RateLimit { status, retry_after_s } => {
                ("EAGAIN", format!("status {status}, to be tried again after {retry_after_s} s"))
            }
            Fault::Truncated | Fault::Corrupted | Fault::Cut => ("EIO", "no result".to_owned()),
        };
        let happened = match done {
            Some(_) => "; the effect did happen",
            None => "",
        };
        let mut error = json!({ "kind": effect.kind, "object": effect.resource.to_string(), "errno": errno });
        if let Fault::RateLimit { status, retry_after_s } = rule.fault {
            error["status"] = status.into();
            error["retry_after_s"] = retry_after_s.into();
        }
        let mut value = json!({ "error": error });
        let body = match (effect.door, rule.fault) {
            // By the network the program sees what a server would send, or what becomes of its connection.
            (Door::Network, Fault::RateLimit { status, retry_after_s }) => {
                value["status"] = status.into();
                value["headers"] =
                    json!([["content-type", "text/plain; charset=utf-8"], ["retry-after", retry_after_s.to_string()]]);
                Some(
                    format!("status {status}, injected by a fault rule; try again after {retry_after_s} s\n")
                        .into_bytes(),
                )
            }
            (Door::Network, Fault::Timeout(_)) => {
                value["timeout"] = true.into();
                None
            }
            (Door::Network, Fault::Error(_)) => {
                value["reset"] = true.into();
                None
            }
            _ => None,
        };
        Answer {
            decided_by: NAME,
            injected: true,
            value,
            body,
            bytes: done.as_ref().map_or(0, |answer| answer.bytes),
            digest: done.and_then(|answer| answer.digest),
            ..Answer::failed(
                format!("{} {}: {what}, injected by the rule `{}`{happened}", effect.kind, effect.resource, rule.text),
                "nothing is wrong with the object; leave the rule out for the effect to be as without it",
            )
        }
    }

    /// The result with something wrong about it; as it is where there is nothing to be wrong about.
    fn spoil(&self, effect: &Effect, rule: &FaultRule, drawn: u64, answer: Answer) -> Answer {
        if (rule.fault, effect.door) == (Fault::Cut, Door::Network) && answer.body.is_none() {
            // What streamed past is not held here; its end is.
            self.note();
            return Answer {
                decided_by: NAME,
                injected: true,
                cut: true,
                reason: format!("it broke off, injected by the rule `{}`; the effect did happen", rule.text),
                ..answer
            };
        }
        let Some(mut body) = answer.body.clone().filter(|body| !body.is_empty()) else { return answer };
        let whole = body.len();
        let place = usize::try_from(drawn % whole as u64).unwrap_or(0);
        let what = match rule.fault {
            Fault::Truncated => {
                body.truncate(place);
                format!("{place} of {whole} bytes were given")
            }
            Fault::Corrupted => {
                body[place] ^= 1 << (drawn % 7);
                format!("byte {place} of {whole} was changed")
            }
            Fault::Cut => format!("the answer broke off within {whole} bytes"),
            Fault::Error(_) | Fault::Timeout(_) | Fault::RateLimit { .. } => return answer,
        };
        self.note();
        let mut value = answer.value.clone();
        if let Some(bytes) = value.get_mut("bytes") {
            *bytes = body.len().into();
        }
        if rule.fault == Fault::Truncated {
            say_length(&mut value, body.len());
        }
        Answer {
            decided_by: NAME,
            injected: true,
            cut: rule.fault == Fault::Cut,
            reason: format!("{what}, injected by the rule `{}`; the effect did happen", rule.text),
            digest: Some(Digest::of(&body)),
            bytes: body.len() as u64,
            body: Some(body),
            value,
            ..answer
        }
    }
}

/// Lets the headers of an answer say this length, where they say one.
fn say_length(value: &mut serde_json::Value, length: usize) {
    let headers = value.get_mut("headers").and_then(serde_json::Value::as_array_mut);
    for header in headers.into_iter().flatten() {
        let named = header.get(0).and_then(serde_json::Value::as_str);
        if named.is_some_and(|name| name.eq_ignore_ascii_case("content-length")) {
            header[1] = length.to_string().into();
        }
    }
}

impl Handler for Faults {
    fn name(&self) -> &'static str {
        NAME
    }

    fn handle<'a>(&'a self, effect: &'a Effect, next: Next<'a>) -> BoxFuture<'a, Answer> {
        let Some((rule, drawn)) = self.choose(effect) else { return next.run(effect) };
        Box::pin(async move {
            if rule.when == When::Before {
                if let Fault::Timeout(limit) = rule.fault {
                    next.note_waiting(limit);
                    tokio::time::sleep(limit).await;
                }
                return self.failure(effect, rule, None);
            }
            let limit = match rule.fault {
                Fault::Timeout(limit) => Some(limit),
                _ => None,
            };
            if let Some(limit) = limit {
                next.note_waiting(limit);
            }
            let answer = next.run(effect).await;
            if let Some(limit) = limit {
                tokio::time::sleep(limit).await;
            }
            match answer.decision {
                Decision::Allowed | Decision::Answered | Decision::Planned if is_about_a_body(rule.fault.kind()) => {
                    self.spoil(effect, rule, drawn, answer)
                }
                Decision::Allowed | Decision::Answered | Decision::Planned => self.failure(effect, rule, Some(answer)),
                // It went wrong by itself.
                Decision::Refused | Decision::Failed | Decision::InDoubt => answer,
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        chain::testing::{ask, wait, FakeWorld, WorldOf},
        effect::tests::{any_effect, connect, http, resolve, sample},
    };
    use proptest::prelude::*;
    use std::sync::Arc;

    fn rule(spec: &str) -> FaultRule {
        spec.parse().unwrap_or_else(|error: RuleError| panic!("{spec}: {error} ({})", error.help))
    }

    fn error(spec: &str) -> RuleError {
        spec.parse::<FaultRule>().expect_err(spec)
    }

    fn on(path: &str, kind: Kind) -> Effect {
        let mut effect = sample(kind);
        effect.resource = Resource::Workspace { path: path.to_owned() };
        effect
    }

    fn through(faults: &Arc<Faults>, effect: &Effect) -> Answer {
        wait(ask(vec![faults.clone()], effect, &FakeWorld::default()))
    }

    #[test]
    fn by_the_network_a_fault_is_what_a_server_or_a_connection_would_show() {
        let world = WorldOf(|_: &Effect| {
            let value = json!({"status": 200, "headers": [["Content-Length", "5"]]});
            Answer { body: Some(b"hello".to_vec()), ..Answer::done(value, 5) }
        });
        let show =
            |spec: &str, effect: &Effect| wait(ask(vec![Arc::new(Faults::new(vec![rule(spec)]))], effect, &world));
        let get = http("GET", "https://api.test/x");
        let answer = show("http/request:error", &get);
        assert_eq!((answer.decision, answer.injected), (Decision::Failed, true));
        assert_eq!((&answer.value["reset"], &answer.value["error"]["errno"]), (&true.into(), &"ECONNRESET".into()));
        let answer = show("http/request:timeout=1ms", &get);
        assert_eq!((answer.decision, &answer.value["timeout"]), (Decision::Failed, &true.into()));
        let answer = show("http/request:rate-limit=503,retry-after=7", &get);
        assert_eq!((answer.decision, &answer.value["status"]), (Decision::Failed, &503.into()));
        assert_eq!(answer.value["headers"][1], json!(["retry-after", "7"]));
        assert!(answer.body.is_some_and(|body| body.starts_with(b"status 503")));
        let answer = show("http/request:truncated,seed=3", &get);
        let length = answer.body.unwrap().len();
        assert!(length < 5 && answer.injected && !answer.cut);
        assert_eq!(answer.value["headers"][0][1], length.to_string());
        let answer = show("http/request:cut", &get);
        assert_eq!((answer.cut, answer.body.as_deref()), (true, Some(&b"hello"[..])));
        assert_eq!(answer.value["headers"][0][1], "5");
        assert_ne!(show("http/request:corrupted", &get).body.as_deref(), Some(&b"hello"[..]));

        let answer = show("net/connect:error=ECONNREFUSED", &connect("db.test", 5432));
        assert_eq!((&answer.value["reset"], &answer.value["error"]["errno"]), (&true.into(), &"ECONNREFUSED".into()));
        let streamed = WorldOf(|_: &Effect| Answer::done(json!({"sent": 1, "received": 2}), 3));
        let faults = Arc::new(Faults::new(vec![rule("net/connect:cut,door=network")]));
        let answer = wait(ask(vec![faults], &connect("db.test", 5432), &streamed));
        assert_eq!((answer.decision, answer.cut, &answer.value["sent"]), (Decision::Allowed, true, &1.into()));
        assert_eq!(show("net/resolve:error", &resolve("api.test")).value["reset"], true);
        assert_eq!(rule("any:cut,door=api").kinds, [Kind::FsRead]);
        assert_eq!(rule("any:cut,door=network").kinds, [Kind::NetConnect, Kind::HttpRequest]);
        assert!(rule("any:error").kinds.contains(&Kind::HttpRequest));
        assert!(rule("net/connect:error").waiting_kinds() == [Kind::NetConnect]);
        assert!(rule("http/request:error").waiting_kinds().is_empty());
    }

    /// Which of these effects are made to fail, in their order.
    fn hits(spec: &[&str], effects: &[Effect]) -> Vec<bool> {
        let faults = Arc::new(Faults::new(spec.iter().map(|spec| rule(spec)).collect()));
        effects.iter().map(|effect| through(&faults, effect).injected).collect()
    }

    #[test]
    fn a_rule_is_read_and_written_back() {
        for spec in [
            "fs/write:error=ENOSPC,rate=0.1,seed=7,first=3,path=**/*.log",
            "fs/write+fs/delete:error",
            "fs/read:rate-limit=503,retry-after=5,door=api",
            "fs/read:truncated,door=api",
            "process/exec:timeout=2s",
            "fs/read:error,path={a,b}/**",
            "fs/write:error,when=after,door=api+workspace",
        ] {
            assert_eq!(rule(spec).text(), spec);
            assert_eq!(rule(rule(spec).text()), rule(spec));
        }
    }

    #[test]
    fn what_a_kind_cannot_show_is_refused_with_the_door_to_name() {
        for (spec, message, help) in [
            ("fs/read:truncated", "at the program door", "door=api"),
            ("fs/write:error,when=after", "after it happened at the program door", "door=api"),
            ("process/exec:rate-limit", "process/exec cannot show", "fs/read"),
            ("fs/write:error=ECONNRESET", "does not fail with `ECONNRESET`", "ENOSPC"),
            ("fs/write:eror", "did you mean `error`", "rate-limit"),
            ("fs/wirte:error", "did you mean `fs/write`", "fs/write"),
            ("fs/write:error,rate=1.5", "no rate", "0 to 1"),
            ("fs/write:error,rate=NaN", "no rate", "0 to 1"),
            ("fs/write:error,first=-1", "no whole number", "digits"),
            ("fs/write:error,pat=x", "did you mean `path`", "KIND"),
            ("fs/write:error,path=/abs", "relative", "pattern"),
            ("process/exec:error,path=a", "no path", "leave"),
            ("fs/read:cut,when=before,door=api", "happens first", "leave"),
            ("fs/write:timeout=unlimited", "has an end", "30s"),
            ("api/request:error", "cannot show", "fs/read"),
            ("fs/write", "no `:`", "KIND"),
            ("fs/read:rate-limit=404,door=api", "no status", "429"),
            ("fs/write:error,rate=0.1,rate=0.2", "given twice", "KIND"),
        ] {
            let error = error(spec);
            assert!(error.message.contains(message), "{spec}: {}", error.message);
            assert!(error.help.contains(help), "{spec}: {}", error.help);
        }
    }

    #[test]
    fn an_error_is_the_one_named_or_the_natural_one_and_nothing_happens() {
        for (spec, errno) in [("fs/write:error=ENOSPC", "ENOSPC"), ("fs/write:error", "EIO")] {
            let (faults, world) = (Arc::new(Faults::new(vec![rule(spec)])), FakeWorld::default());
            let answer = wait(ask(vec![faults.clone()], &sample(Kind::FsWrite), &world));
            assert_eq!((answer.decision, answer.decided_by, answer.injected), (Decision::Failed, "faults", true));
            assert_eq!(answer.value["error"]["errno"], errno);
            assert!(answer.reason.contains(spec), "{}", answer.reason);
            assert!(world.done.lock().unwrap().is_empty());
            assert_eq!(faults.injected(), 1);
        }
    }

    #[test]
    fn after_the_effect_it_did_happen_and_the_answer_says_so() {
        let faults = Arc::new(Faults::new(vec![rule("fs/write:error,when=after,door=api")]));
        let world = FakeWorld::default();
        let answer = wait(ask(vec![faults], &sample(Kind::FsWrite), &world));
        assert_eq!((answer.decision, answer.bytes), (Decision::Failed, 5));
        assert!(answer.reason.ends_with("the effect did happen"), "{}", answer.reason);
        assert_eq!(world.done.lock().unwrap().len(), 1);
    }

    #[test]
    fn results_are_cut_short_changed_and_broken_off() {
        let world = WorldOf(|_: &Effect| {
            let value = json!({ "bytes": 10 });
            Answer { body: Some(b"0123456789".to_vec()), ..Answer::done(value, 10) }
        });
        let ask_for = |spec: &str| {
            let faults = Arc::new(Faults::new(vec![rule(spec)]));
            wait(ask(vec![faults], &sample(Kind::FsRead), &world))
        };
        let short = ask_for("fs/read:truncated,door=api");
        let body = short.body.unwrap();
        assert!(body.len() < 10 && b"0123456789".starts_with(&body));
        assert_eq!((short.value["bytes"].as_u64(), short.digest), (Some(body.len() as u64), Some(Digest::of(&body))));
        let changed = ask_for("fs/read:corrupted,door=api").body.unwrap();
        assert_eq!(changed.iter().zip(b"0123456789").filter(|(one, other)| one != other).count(), 1);
        let cut = ask_for("fs/read:cut,door=api");
        assert!(cut.cut && cut.injected && cut.is_success());
        let none = Arc::new(Faults::new(vec![rule("fs/read:cut,door=api")]));
        assert!(!through(&none, &sample(Kind::FsRead)).injected, "there is no body to break off");
    }

    #[test]
    fn a_timeout_takes_its_time_and_fails_as_one() {
        let faults = Arc::new(Faults::new(vec![rule("fs/read:timeout=40ms")]));
        let began = std::time::Instant::now();
        let answer = through(&faults, &sample(Kind::FsRead));
        assert!(began.elapsed() >= Duration::from_millis(40));
        assert_eq!(answer.value["error"]["errno"], "ETIMEDOUT");
    }

    #[test]
    fn the_first_of_each_key_fail_and_the_next_works() {
        let (a, b) = (on("a", Kind::FsRead), on("b", Kind::FsRead));
        let effects = [a.clone(), a.clone(), b.clone(), a.clone(), b, a];
        assert_eq!(hits(&["fs/read:error,first=2"], &effects), [true, true, true, false, true, false]);
    }

    #[test]
    fn the_observed_rate_is_the_rate_and_rules_of_one_seed_add_up() {
        let effects: Vec<Effect> = (0..10_000).map(|number| on(&format!("f{number}"), Kind::FsWrite)).collect();
        // Six standard deviations of a binomial of 10,000 at 0.1 are 180.
        let count = hits(&["fs/write:error,rate=0.1,seed=7"], &effects).into_iter().filter(|hit| *hit).count();
        assert!((820..=1180).contains(&count), "{count}");
        let both = ["fs/write:error,rate=0.1,seed=7", "fs/write:timeout=1ms,rate=0.2,seed=7"];
        let count = hits(&both, &effects).into_iter().filter(|hit| *hit).count();
        assert!((2725..=3275).contains(&count), "{count}");
        let same: Vec<Effect> = (0..10_000).map(|_| on("f", Kind::FsWrite)).collect();
        let count = hits(&["fs/write:error,rate=0.1,seed=8"], &same).into_iter().filter(|hit| *hit).count();
        assert!((820..=1180).contains(&count), "{count}");
    }

    #[test]
    fn a_draw_is_these_bytes() {
        let resource = Resource::Workspace { path: "a".to_owned() };
        let bytes = b"tollgate.fault.v1\0\0\0\0\0\0\0\0\x07fs/write\0{\"path\":\"a\",\"type\":\"workspace\"}\0\0\0\0\0\0\0\0\x02";
        let expected = u64::from_be_bytes(Digest::of(bytes).0[..8].try_into().unwrap()) >> 11;
        assert_eq!(draw(7, Kind::FsWrite, &resource, 2), expected);
    }

    #[test]
    fn the_order_of_threads_changes_no_fault() {
        let paths: Vec<String> = (0..8).map(|number| format!("f{number}")).collect();
        let count_by_path = |threads: usize| {
            let faults = Arc::new(Faults::new(vec![rule("fs/write:error,rate=0.3,seed=3")]));
            std::thread::scope(|scope| {
                for thread in 0..threads {
                    let (faults, paths) = (faults.clone(), &paths);
                    scope.spawn(move || {
                        // Each thread has its own paths, in an order that the scheduler decides.
                        for _ in 0..50 {
                            for path in paths.iter().skip(thread).step_by(threads) {
                                through(&faults, &on(path, Kind::FsWrite));
                            }
                        }
                    });
                }
            });
            faults.injected()
        };
        assert_eq!(count_by_path(1), count_by_path(4));
    }

    proptest! {
        #[test]
        fn a_rate_of_nothing_is_the_identity(effects in prop::collection::vec(any_effect(), 1..20), seed: u64) {
            let spec = format!("any:error,rate=0,seed={seed}");
            let faults = Arc::new(Faults::new(vec![rule(&spec)]));
            let world = FakeWorld::default();
            for effect in &effects {
                let with = wait(ask(vec![faults.clone()], effect, &world));
                prop_assert_eq!(with, wait(ask(Vec::new(), effect, &FakeWorld::default())));
            }
            prop_assert_eq!(world.done.into_inner().unwrap(), effects);
            prop_assert_eq!(faults.injected(), 0);
        }

        #[test]
        fn the_same_seed_gives_the_same_faults(effects in prop::collection::vec(any_effect(), 1..20), seed: u64) {
            let spec = format!("any:error,rate=0.5,seed={seed}");
            prop_assert_eq!(hits(&[&spec], &effects), hits(&[&spec], &effects));
        }

        #[test]
        fn what_is_out_of_scope_never_fails(effects in prop::collection::vec(any_effect(), 1..20)) {
            let hits = hits(&["fs/write:error,path=a/**", "fs/read:error,path=none"], &effects);
            for (effect, hit) in effects.iter().zip(hits) {
                let inside = matches!(&effect.resource, Resource::Workspace { path } if path.starts_with("a/"));
                prop_assert!(!hit || (inside && effect.kind == Kind::FsWrite));
            }
        }

        #[test]
        fn no_text_makes_reading_a_rule_panic(text in ".{0,60}") {
            let _ = text.parse::<FaultRule>();
            let _ = format!("fs/write:{text}").parse::<FaultRule>();
        }
    }
}
