//! Replay: answers effects from a recording, and never reaches the world.
//!
//! An effect's key is its door, kind and resource; the entries of one key are answered in their order, each once. An
//! effect matches the next entry of its key when their requests are equal, by the rules of
//! [`Asked`]. Anything else is a divergence: the effect is refused, and the first one is reported with the nearest
//! entry and the field that differs. At the end, so is what was recorded and never asked for.
//!
//! A write that was asked for at the run's socket is answered from the recording too, and then done again in the run's
//! own layer, which is thrown away afterwards: the program reads that layer as files.
//!
//! With one answer substituted, the run goes on from there by the recording as far as it fits.

use super::{
    recording::{Asked, Base, Entry, Key, RecordedAnswer, Recording, Stream, NOT_RECORDED},
    Answer, BoxFuture, Decision, Handler, Next, World,
};
use crate::effect::{base64, canonical_json, errno, fs, net, Digest, Door, Effect, Kind, Request};
use serde::{Deserialize, Serialize};
use serde_json::{json, Value};
use std::{
    collections::{HashMap, VecDeque},
    fmt,
    sync::{Arc, Mutex, PoisonError},
};

const NAME: &str = "replay";
/// So many divergences and entries never asked for are listed; the rest is counted.
const LISTED: usize = 20;

/// The handler.
pub struct Replay {
    recording: Recording,
    /// The run's own layer.
    layer: Option<Arc<dyn World>>,
    state: Mutex<State>,
    substituted: Option<u64>,
}

struct State {
    waiting: HashMap<Key, VecDeque<usize>>,
    answered: u64,
    asked: u64,
    divergences: Vec<Divergence>,
    more: u64,
}

/// Where a replay differs from its recording.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Divergence {
    /// The place of the effect in the replay, from 1; 0 for what is no effect.
    pub at: u64,
    /// What was asked: kind and resource, or what else differs.
    pub asked: String,
    /// Why it is a divergence, in one sentence.
    pub reason: String,
    /// The nearest entry, if there is one.
    pub nearest: Option<Nearest>,
}

/// The entry that comes nearest to what was asked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Nearest {
    /// Its place in the recording.
    pub seq: u64,
    /// Its kind and resource.
    pub entry: String,
    /// The first field that differs, as a JSON pointer; empty where none does.
    pub field: String,
    /// What the recording has there.
    pub recorded: Value,
    /// What was asked.
    pub got: Value,
}

impl fmt::Display for Divergence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.at > 0 {
            write!(f, "effect {}: ", self.at)?;
        }
        write!(f, "{}: {}", self.asked, self.reason)?;
        match &self.nearest {
            Some(near) if near.field.is_empty() => write!(f, "; nearest is entry {}, {}", near.seq, near.entry),
            Some(Nearest { seq, entry, field, recorded, got }) => {
                write!(f, "; nearest is entry {seq}, {entry}, which differs in {field}: recorded {recorded}, got {got}")
            }
            None => Ok(()),
        }
    }
}

/// What a replay found.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReplayReport {
    /// The recording's digest.
    pub recording: String,
    /// How many effects were answered from it.
    pub answered: u64,
    /// The differences, first first; the first so many.
    pub divergences: Vec<Divergence>,
    /// How many differences there are.
    pub diverged: u64,
    /// Entries that were never asked for: place, kind and resource; the first so many.
    pub unasked: Vec<String>,
    /// How many entries were never asked for.
    pub unasked_count: u64,
    /// The entry whose answer was substituted, for a counterfactual run.
    pub substituted: Option<u64>,
}

impl ReplayReport {
    /// Whether the run was as the recording has it.
    pub fn is_same(&self) -> bool {
        self.diverged == 0 && self.unasked_count == 0
    }
}

/// An answer to give in the place of a recorded one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Substitute {
    /// The entry.
    pub seq: u64,
    /// What is answered.
    pub answer: Substituted,
}

/// What is answered in the place of a recorded answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Substituted {
    /// These bytes as the result.
    Body(Vec<u8>),
    /// This result as data.
    Value(Value),
    /// This error number.
    Errno(String),
}

/// The fields of a substitute given as JSON.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SubstituteJson {
    body: Option<String>,
    base64: Option<String>,
    value: Option<Value>,
    errno: Option<String>,
}

/// Why a substitute is none.
#[derive(Debug, thiserror::Error)]
pub enum SubstituteError {
    /// Not `SEQ=…`.
    #[error("`{0}` is not SEQ=FILE or SEQ=JSON")]
    Form(String),
    /// Not the JSON of a substitute.
    #[error("the substitute for entry {seq}: {problem}; write one of {{\"body\": TEXT}}, {{\"base64\": BYTES}}, {{\"value\": RESULT}}, {{\"errno\": \"ENOENT\"}}")]
    Json {
        /// The entry.
        seq: u64,
        /// What is wrong.
        problem: String,
    },
    /// The file cannot be read.
    #[error("the substitute for entry {seq}: {path}: {source}")]
    Unreadable {
        /// The entry.
        seq: u64,
        /// The file.
        path: String,
        /// The system's reason.
        #[source]
        source: std::io::Error,
    },
    /// The recording has no such entry.
    #[error("the recording has no entry {seq}: it has {count}; `tollgate recording show` lists them")]
    NoEntry {
        /// The entry asked for.
        seq: u64,
        /// How many there are.
        count: usize,
    },
    /// The program makes this call itself, and only an error can be told in its place.
    #[error("entry {seq} is a call of the program itself, of which only the error can be substituted; write {{\"errno\": \"ENOENT\"}}")]
    OnlyErrno {
        /// The entry.
        seq: u64,
    },
}

impl Substitute {
    /// Reads `SEQ=FILE`, whose bytes become the result, or `SEQ=JSON`.
    ///
    /// # Errors
    /// As [`SubstituteError`] has them.
    pub fn parse(text: &str) -> Result<Substitute, SubstituteError> {
        let form = || SubstituteError::Form(text.to_owned());
        let (seq, what) = text.split_once('=').ok_or_else(form)?;
        let seq: u64 = seq.parse().map_err(|_not_a_number| form())?;
        if !what.trim_start().starts_with('{') {
            let bytes = std::fs::read(what).map_err(|source| SubstituteError::Unreadable {
                seq,
                path: what.to_owned(),
                source,
            })?;
            return Ok(Substitute { seq, answer: Substituted::Body(bytes) });
        }
        let wrong = |problem: String| SubstituteError::Json { seq, problem };
        let json: SubstituteJson = serde_json::from_str(what).map_err(|error| wrong(error.to_string()))?;
        let answer = match json {
            SubstituteJson { body: Some(text), base64: None, value: None, errno: None } => {
                Substituted::Body(text.into_bytes())
            }
            SubstituteJson { body: None, base64: Some(text), value: None, errno: None } => {
                Substituted::Body(base64::decode(&text).ok_or_else(|| wrong("it is not base64".to_owned()))?)
            }
            SubstituteJson { body: None, base64: None, value: Some(value), errno: None } => Substituted::Value(value),
            SubstituteJson { body: None, base64: None, value: None, errno: Some(name) } => {
                errno(&name).ok_or_else(|| wrong(format!("`{name}` is no error number that an effect fails with")))?;
                Substituted::Errno(name)
            }
            _ => return Err(wrong("it is not exactly one thing".to_owned())),
        };
        Ok(Substitute { seq, answer })
    }

    fn put(self, recording: &mut Recording) -> Result<(), SubstituteError> {
        let Substitute { seq, answer } = self;
        let count = recording.entries.len();
        let entry = recording.entries.iter_mut().find(|entry| entry.seq == seq);
        let entry = entry.ok_or(SubstituteError::NoEntry { seq, count })?;
        let answered = entry.door == Door::Api || entry.kind == Kind::HttpRequest;
        if !answered && !matches!(answer, Substituted::Errno(_)) {
            return Err(SubstituteError::OnlyErrno { seq });
        }
        let (kind, resource) = (entry.kind, entry.resource.to_string());
        let answer_now = &mut entry.answer;
        answer_now.reason.clear();
        answer_now.cut = false;
        match answer {
            Substituted::Body(bytes) => {
                let digest = Digest::of(&bytes);
                answer_now.decision = Decision::Allowed;
                answer_now.bytes = bytes.len() as u64;
                answer_now.value = match kind {
                    Kind::HttpRequest => response_with(&answer_now.value, bytes.len()),
                    _ => json!({ "size": bytes.len(), "offset": 0, "bytes": bytes.len(), "end": true }),
                };
                (answer_now.body, answer_now.digest) = (Some(digest), Some(digest));
                recording.contents.insert(digest, bytes);
            }
            Substituted::Value(value) => {
                answer_now.decision = Decision::Allowed;
                answer_now.value = value;
                (answer_now.body, answer_now.digest) = (None, None);
            }
            Substituted::Errno(name) => {
                answer_now.decision = Decision::Failed;
                answer_now.reason = format!("{kind} {resource}: {name}, substituted");
                answer_now.value = json!({ "error": { "kind": kind, "object": resource, "errno": name } });
                if entry.door == Door::Network {
                    answer_now.value["reset"] = true.into();
                }
                (answer_now.body, answer_now.digest, answer_now.bytes) = (None, None, 0);
            }
        }
        Ok(())
    }
}

/// A recorded response with a body of this length, in no coding, in the place of its own.
fn response_with(recorded: &Value, length: usize) -> Value {
    const OF_THE_BODY: [&str; 5] = ["content-length", "content-encoding", "transfer-encoding", "etag", "digest"];
    let headers = recorded["headers"].as_array().cloned().unwrap_or_default();
    let kept = headers.into_iter().filter(|header| {
        header[0].as_str().is_some_and(|name| !OF_THE_BODY.contains(&name.to_ascii_lowercase().as_str()))
    });
    let mut headers: Vec<Value> = kept.collect();
    headers.push(json!(["content-length", length.to_string()]));
    json!({ "status": recorded["status"].as_u64().unwrap_or(200), "headers": headers })
}

impl Replay {
    /// Answers from this recording.
    ///
    /// # Errors
    /// When the substitute does not fit the recording.
    pub fn new(
        mut recording: Recording,
        substitute: Option<Substitute>,
        layer: Option<Arc<dyn World>>,
    ) -> Result<Replay, SubstituteError> {
        let substituted = substitute.as_ref().map(|substitute| substitute.seq);
        if let Some(substitute) = substitute {
            substitute.put(&mut recording)?;
        }
        let mut waiting: HashMap<Key, VecDeque<usize>> = HashMap::new();
        for (place, entry) in recording.entries.iter().enumerate() {
            waiting.entry(entry.asked().key()).or_default().push_back(place);
        }
        let state = State { waiting, answered: 0, asked: 0, divergences: Vec::new(), more: 0 };
        Ok(Replay { recording, layer, state: Mutex::new(state), substituted })
    }

    /// The recording.
    pub fn recording(&self) -> &Recording {
        &self.recording
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The entry that answers this, or why none does.
    fn find(&self, asked: &Asked) -> Result<&Entry, Box<Divergence>> {
        let mut state = self.state();
        state.asked += 1;
        let at = state.asked;
        let key = asked.key();
        let places = state.waiting.get(&key);
        let next = places.and_then(|places| places.front().copied());
        let entry = next.map(|place| &self.recording.entries[place]);
        // Requests to one URL are made side by side, in an order of their own: each takes the first that is its like.
        let reach = if asked.door == Door::Network { usize::MAX } else { 1 };
        let fits = |place: &usize| asked.is_answered_by(&self.recording.entries[*place].request);
        let found = places.and_then(|places| places.iter().take(reach).position(fits));
        if let Some(index) = found {
            let taken = state.waiting.get_mut(&key).and_then(|places| places.remove(index));
            if let Some(entry) = taken.map(|place| &self.recording.entries[place]) {
                let whole = self.whole(entry, asked, &mut state);
                state.answered += u64::from(whole.is_ok());
                return whole;
            }
        }
        let of_key = self.recording.entries.iter().filter(|entry| entry.asked().key() == key).count();
        let reason = match (entry, of_key) {
            (Some(_), _) => "the recording has another request next for it".to_owned(),
            (None, 0) => "the recording has no such effect".to_owned(),
            (None, times) => format!("the recording is exhausted for it: it was asked {times} times when recorded"),
        };
        let nearest = entry.or_else(|| self.nearest(asked, &state));
        let divergence = Divergence {
            at,
            asked: format!("{} {}", asked.kind, asked.resource),
            reason,
            nearest: nearest.map(|entry| compare(entry, asked)),
        };
        state.diverge(divergence.clone());
        Err(Box::new(divergence))
    }

    /// The entry, if all of its answer is there to be given again.
    fn whole<'e>(&self, entry: &'e Entry, asked: &Asked, state: &mut State) -> Result<&'e Entry, Box<Divergence>> {
        let passed = matches!(entry.answer.decision, Decision::Allowed | Decision::Answered);
        let reason = match &entry.request {
            Request::Net(net::Request::Connect { .. })
                if passed && entry.door == Door::Network && entry.answer.body.is_none() =>
            {
                "what passed over the connection is not in the recording, only how much"
            }
            _ if passed && entry.answer.body.is_none() && entry.answer.value["body"] == NOT_RECORDED => {
                "its answer was too long to be recorded"
            }
            _ => return Ok(entry),
        };
        let divergence = Divergence {
            at: state.asked,
            asked: format!("{} {}", asked.kind, asked.resource),
            reason: reason.to_owned(),
            nearest: Some(compare(entry, asked)),
        };
        state.diverge(divergence.clone());
        Err(Box::new(divergence))
    }

    /// The entry of the same kind whose resource is spelled most alike; one that still waits comes first.
    fn nearest(&self, asked: &Asked, state: &State) -> Option<&Entry> {
        let short = |text: String| text.chars().take(200).collect::<String>();
        let wanted = short(asked.resource.to_string());
        let still = |place: usize, entry: &Entry| {
            state.waiting.get(&entry.asked().key()).is_some_and(|places| places.contains(&place))
        };
        let alike = self.recording.entries.iter().enumerate().filter(|(_, entry)| entry.kind == asked.kind);
        let ranked = alike.take(10_000).map(|(place, entry)| {
            let distance = strsim::levenshtein(&wanted, &short(entry.resource.to_string()));
            (distance, !still(place, entry), place, entry)
        });
        ranked.min_by_key(|(distance, over, place, _)| (*distance, *over, *place)).map(|(_, _, _, entry)| entry)
    }

    /// The answer of an entry.
    fn answer(&self, entry: &Entry) -> Answer {
        let RecordedAnswer { decision, decided_by, reason, hint, injected, cut, value, body, digest, bytes } =
            entry.answer.clone();
        let recorded = match reason.is_empty() {
            true => format!("entry {} of the recording", entry.seq),
            false => format!("entry {} of the recording: {reason}", entry.seq),
        };
        let decision = match decision {
            Decision::Allowed | Decision::Answered | Decision::Planned => Decision::Answered,
            Decision::Refused => Decision::Refused,
            Decision::Failed | Decision::InDoubt => Decision::Failed,
        };
        let reason = if decided_by == "world" { recorded } else { format!("{recorded} (by {decided_by})") };
        Answer {
            decision,
            decided_by: NAME,
            reason,
            hint,
            injected,
            value,
            body: body.and_then(|digest| self.recording.contents.get(&digest).cloned()),
            digest,
            bytes,
            cut,
            rule: None,
        }
    }

    /// Notes a difference that is not an effect's.
    pub fn differs(&self, what: impl Into<String>, reason: impl Into<String>) {
        let divergence = Divergence { at: 0, asked: what.into(), reason: reason.into(), nearest: None };
        self.state().diverge(divergence);
    }

    /// Compares the workspace with the one that was recorded.
    pub fn compare_base(&self, base: &[Base]) {
        let recorded = &self.recording.base;
        let differs = |one: Option<&Base>, other: Option<&Base>| one != other;
        let place = (0..recorded.len().max(base.len())).find(|at| differs(recorded.get(*at), base.get(*at)));
        let Some(place) = place else { return };
        let (path, reason) = match (recorded.get(place), base.get(place)) {
            (Some(old), Some(new)) if old.path == new.path => {
                let what = match (old.digest == new.digest, old.is == new.is) {
                    (_, false) => "is something else than when it was recorded",
                    (false, true) => "has another content than when it was recorded",
                    (true, true) => "has other permission bits than when it was recorded",
                };
                (&new.path, what)
            }
            (Some(old), Some(new)) if old.path < new.path => (&old.path, "is missing, and was there when recorded"),
            (Some(old), None) => (&old.path, "is missing, and was there when recorded"),
            (_, Some(new)) => (&new.path, "was not there when recorded"),
            (None, None) => return,
        };
        self.differs(format!("the workspace's `{path}`"), reason);
    }

    /// Compares what the program printed and how the run ended, and gives the report.
    pub fn finish(&self, stdout: Option<Stream>, stderr: Option<Stream>, exit_status: u8) -> ReplayReport {
        let end = &self.recording.end;
        for (name, recorded, got) in [("standard output", end.stdout, stdout), ("standard error", end.stderr, stderr)] {
            if let (Some(recorded), Some(got)) = (recorded, got) {
                if recorded != got {
                    let reason = format!(
                        "{} bytes with the digest {}, recorded were {} with {}",
                        got.bytes, got.digest, recorded.bytes, recorded.digest
                    );
                    self.differs(name, reason);
                }
            }
        }
        if exit_status != end.exit_status {
            self.differs("the exit status", format!("{exit_status}, recorded was {}", end.exit_status));
        }
        let state = self.state();
        let mut left: Vec<usize> = state.waiting.values().flatten().copied().collect();
        left.sort_unstable();
        let name = |place: &usize| {
            let entry = &self.recording.entries[*place];
            format!("{} {} {}", entry.seq, entry.kind, entry.resource)
        };
        ReplayReport {
            recording: self.recording.digest.to_string(),
            answered: state.answered,
            divergences: state.divergences.clone(),
            diverged: state.divergences.len() as u64 + state.more,
            unasked: left.iter().take(LISTED).map(name).collect(),
            unasked_count: left.len() as u64,
            substituted: self.substituted,
        }
    }

    /// Does again, in the run's own layer, what was asked for at its socket.
    async fn mirror(&self, effect: &Effect, answer: &Answer) {
        let changes = match &effect.request {
            Request::Fs(fs::Request::Write { .. } | fs::Request::Delete { .. } | fs::Request::Move { .. }) => true,
            Request::Fs(fs::Request::Read { .. } | fs::Request::List { .. }) => false,
            Request::Run(_)
            | Request::Jail(_)
            | Request::Api(_)
            | Request::Program(_)
            | Request::Net(_)
            | Request::Http(_) => false,
        };
        let (Some(layer), true, Door::Api) = (&self.layer, changes && answer.is_success(), effect.door) else { return };
        let done = layer.execute(effect).await;
        if !done.is_success() {
            let what = format!("{} {}", effect.kind, effect.resource);
            self.differs(what, format!("it went well when recorded, and fails in the run's layer: {}", done.reason));
        }
    }
}

impl State {
    fn diverge(&mut self, divergence: Divergence) {
        match self.divergences.len() < LISTED {
            true => self.divergences.push(divergence),
            false => self.more += 1,
        }
    }
}

/// The first field in which an entry and what was asked differ.
fn compare(entry: &Entry, asked: &Asked) -> Nearest {
    let whole = |door: Door, resource: &crate::effect::Resource, request: &Request| {
        let bytes = canonical_json(&json!({ "door": door, "resource": resource, "request": request }));
        serde_json::from_slice(&bytes).unwrap_or(Value::Null)
    };
    let recorded: Value = whole(entry.door, &entry.resource, &entry.request);
    let got: Value = whole(asked.door, &asked.resource, &asked.request);
    let (field, recorded, got) = first_difference(&recorded, &got, String::new()).unwrap_or_default();
    Nearest { seq: entry.seq, entry: format!("{} {}", entry.kind, entry.resource), field, recorded, got }
}

fn first_difference(one: &Value, other: &Value, at: String) -> Option<(String, Value, Value)> {
    match (one, other) {
        (Value::Object(left), Value::Object(right)) => {
            let keys = left.keys().chain(right.keys().filter(|key| !left.contains_key(*key)));
            keys.into_iter().find_map(|key| {
                let (one, other) = (left.get(key).unwrap_or(&Value::Null), right.get(key).unwrap_or(&Value::Null));
                first_difference(one, other, format!("{at}/{}", key.replace('~', "~0").replace('/', "~1")))
            })
        }
        (one, other) if one == other => None,
        (one, other) => Some((at, one.clone(), other.clone())),
    }
}

impl Handler for Replay {
    fn name(&self) -> &'static str {
        NAME
    }

    /// Never forwards.
    fn handle<'a>(&'a self, effect: &'a Effect, next: Next<'a>) -> BoxFuture<'a, Answer> {
        Box::pin(async move {
            // A name's addresses are made within the run, and only what went wrong with one is recorded.
            let is_of_name = |entry: &Entry| entry.kind == Kind::NetResolve && entry.resource == effect.resource;
            if effect.kind == Kind::NetResolve && !self.recording.entries.iter().any(is_of_name) {
                let done = Answer::done(serde_json::Value::Null, 0);
                return Answer { decision: Decision::Answered, decided_by: NAME, ..done };
            }
            match self.find(&Asked::of(effect)) {
                Ok(entry) => {
                    let answer = self.answer(entry);
                    self.mirror(effect, &answer).await;
                    let succeeds = answer.is_success();
                    let given = next.give(effect, answer).await;
                    if succeeds && !given.is_success() {
                        self.differs(format!("{} {}", effect.kind, effect.resource), given.reason.clone());
                    }
                    given
                }
                Err(divergence) => Answer::refused(
                    NAME,
                    divergence.to_string(),
                    "record the run anew, or leave `--replay` out: a replay never reaches the world",
                ),
            }
        })
    }
}

/// The kinds whose calls of the program a recording has answers for.
pub fn waiting_kinds(recording: &Recording) -> Vec<Kind> {
    recording.head.waiting.clone()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        chain::{
            record::Record,
            recording::{
                tests::{end, head, Bytes},
                NodeKind, Writer,
            },
            testing::{ask, wait, FakeWorld, WorldOf},
        },
        effect::{
            http,
            tests::{any_effect, at_network, connect, request_of, sample},
            Resource,
        },
    };
    use proptest::prelude::*;
    use std::sync::atomic::{AtomicU64, Ordering};

    /// A world that nothing may reach.
    struct Bomb;

    impl World for Bomb {
        fn execute<'a>(&'a self, effect: &'a Effect) -> BoxFuture<'a, Answer> {
            panic!("{} {} reached the world in a replay", effect.kind, effect.resource)
        }
    }

    /// Records these effects, answered by a world that never says the same twice.
    fn record(effects: &[Effect]) -> (Recording, Vec<Answer>) {
        let sink = Bytes::default();
        let record = Arc::new(Record::new(Writer::begin(Box::new(sink.clone()), head(), Vec::new()).unwrap()));
        let count = AtomicU64::new(0);
        let world = WorldOf(move |effect: &Effect| {
            let number = count.fetch_add(1, Ordering::Relaxed);
            let value = json!({ "number": number });
            match number % 3 {
                0 => Answer { body: Some(vec![number as u8, 0xff]), ..Answer::done(value, 2) },
                1 => Answer { value, ..Answer::failed(format!("{} failed", effect.kind), "") },
                _ => Answer::done(value, effect.bytes()),
            }
        });
        let answers = effects.iter().map(|effect| wait(ask(vec![record.clone()], effect, &world))).collect();
        record.finish(None, end()).unwrap();
        let recording = Recording::parse(&sink.0.lock().unwrap()).unwrap();
        (recording, answers)
    }

    fn replay(recording: Recording, substitute: Option<&str>) -> Arc<Replay> {
        let substitute = substitute.map(|text| Substitute::parse(text).unwrap());
        Arc::new(Replay::new(recording, substitute, None).unwrap())
    }

    fn again(replay: &Arc<Replay>, effect: &Effect) -> Answer {
        wait(ask(vec![replay.clone()], effect, &Bomb))
    }

    fn on(kind: Kind, path: &str) -> Effect {
        let mut effect = sample(kind);
        effect.resource = Resource::Workspace { path: path.to_owned() };
        if let Request::Fs(fs::Request::Read { path: own, .. }) = &mut effect.request {
            path.clone_into(own);
        }
        effect
    }

    fn response(status: u16, body: &[u8]) -> Answer {
        let value = json!({"status": status, "headers": [["content-type", "text/plain"]]});
        Answer { body: Some(body.to_vec()), ..Answer::done(value, body.len() as u64) }
    }

    fn replaying(entries: &[(Effect, Answer)]) -> Arc<Replay> {
        let sink = Bytes::default();
        let mut writer = Writer::begin(Box::new(sink.clone()), head(), Vec::new()).unwrap();
        for (effect, answer) in entries {
            writer.entry(Asked::of(effect), answer).unwrap();
        }
        writer.end(None, end()).unwrap();
        let recording = Recording::parse(&sink.0.lock().unwrap()).unwrap();
        Arc::new(Replay::new(recording, None, None).unwrap())
    }

    fn with_body(method: &str, url: &str, body: http::Body) -> Effect {
        let request = http::Request { body, ..request_of(method, url, b"") };
        at_network(Kind::HttpRequest, request.resource(), Request::Http(request))
    }

    #[test]
    fn requests_are_answered_by_method_url_and_body_in_whatever_order_they_are_made() {
        let known = |text: &[u8]| http::Body::Known { digest: Digest::of(text), size: text.len() as u64 };
        let url = "https://api.test/items";
        let get = || with_body("GET", url, http::Body::Empty);
        let post = |text: &[u8]| with_body("POST", url, known(text));
        let put = |announced| with_body("PUT", url, http::Body::Streamed { announced });
        let replay = replaying(&[
            (get(), response(200, b"first")),
            (post(b"a"), response(201, b"a")),
            (post(b"b"), response(201, b"b")),
            (get(), response(200, b"second")),
            (put(Some(5)), response(200, b"put")),
        ]);
        let told = |effect: &Effect| wait(ask(vec![replay.clone() as _], effect, &FakeWorld::default()));
        for (effect, body) in
            [(post(b"b"), "b"), (get(), "first"), (put(None), "put"), (get(), "second"), (post(b"a"), "a")]
        {
            let answer = told(&effect);
            assert_eq!((answer.decision, answer.body.as_deref()), (Decision::Answered, Some(body.as_bytes())));
            assert_eq!(answer.value["headers"][0][0], "content-type");
        }
        assert_eq!(told(&get()).decision, Decision::Refused);
        assert_eq!(told(&with_body("DELETE", url, http::Body::Empty)).decision, Decision::Refused);
        assert_eq!(replay.finish(None, None, 0).diverged, 2);
    }

    #[test]
    fn what_was_not_recorded_whole_is_a_divergence_that_says_so() {
        let long = vec![b'x'; super::super::recording::MAX_BODY + 1];
        let get = |url: &str| with_body("GET", url, http::Body::Empty);
        let streamed = Answer { body: None, ..response(200, b"") };
        let streamed = Answer { value: json!({"status": 200, "headers": [], "body": NOT_RECORDED}), ..streamed };
        let replay = replaying(&[
            (connect("db.test", 22), Answer::done(json!({"sent": 1, "received": 2}), 3)),
            (connect("no.test", 22), Answer::failed("no.test:22: refused", "")),
            (get("https://api.test/long"), response(200, &long)),
            (get("https://api.test/streamed"), streamed),
        ]);
        let told = |effect: &Effect| wait(ask(vec![replay.clone() as _], effect, &FakeWorld::default()));
        let answer = told(&connect("db.test", 22));
        assert_eq!((answer.decision, answer.decided_by), (Decision::Refused, NAME));
        assert!(answer.reason.contains("what passed over the connection is not in the recording"), "{answer:?}");
        assert_eq!(told(&connect("no.test", 22)).decision, Decision::Failed);
        for url in ["https://api.test/long", "https://api.test/streamed"] {
            let answer = told(&get(url));
            assert!(answer.reason.contains("too long to be recorded"), "{answer:?}");
        }
        let report = replay.finish(None, None, 0);
        assert_eq!((report.answered, report.diverged, report.unasked_count), (1, 3, 0));
    }

    #[test]
    fn a_conversation_that_comes_out_otherwise_is_a_divergence() {
        /// Somebody who says something else.
        struct Other;

        impl World for Other {
            fn execute<'a>(&'a self, effect: &'a Effect) -> BoxFuture<'a, Answer> {
                panic!("{} reached the world in a replay", effect.kind)
            }

            fn give<'a>(&'a self, _effect: &'a Effect, answer: Answer) -> BoxFuture<'a, Answer> {
                assert_eq!(answer.body.as_deref(), Some(&b"talk"[..]));
                Box::pin(async { Answer::refused(NAME, "the program said something else", "") })
            }
        }

        let talk = || Answer { body: Some(b"talk".to_vec()), ..Answer::done(json!({"sent": 1, "received": 2}), 3) };
        let replay = replaying(&[(connect("db.test", 22), talk()), (connect("db.test", 22), talk())]);
        let same = wait(ask(vec![replay.clone() as _], &connect("db.test", 22), &Bomb));
        assert_eq!((same.decision, same.body.as_deref()), (Decision::Answered, Some(&b"talk"[..])));
        let other = wait(ask(vec![replay.clone() as _], &connect("db.test", 22), &Other));
        assert_eq!(other.decision, Decision::Refused);
        let report = replay.finish(None, None, 0);
        assert_eq!((report.diverged, report.unasked_count), (1, 0));
        assert!(report.divergences[0].reason.contains("something else"), "{report:?}");
    }

    #[test]
    fn answers_of_one_key_come_in_their_order_and_then_run_out() {
        let read = on(Kind::FsRead, "a");
        let (recording, answers) = record(&[read.clone(), read.clone()]);
        let replay = replay(recording, None);
        assert_eq!(again(&replay, &read).body, answers[0].body);
        assert_eq!(again(&replay, &read).value, answers[1].value);
        let third = again(&replay, &read);
        assert_eq!((third.decision, third.decided_by), (Decision::Refused, "replay"));
        assert!(third.reason.contains("exhausted for it: it was asked 2 times"), "{}", third.reason);
        assert_eq!(replay.finish(None, None, 0).diverged, 1);
    }

    #[test]
    fn a_divergence_names_its_place_the_nearest_entry_and_the_field() {
        let (recording, _) = record(&[on(Kind::FsRead, "src/main.rs"), on(Kind::FsDelete, "x")]);
        let replay = replay(recording, None);
        again(&replay, &on(Kind::FsRead, "src/main.rt"));
        let mut longer = on(Kind::FsRead, "src/main.rs");
        longer.request = Request::Fs(fs::Request::Read { path: "src/main.rs".into(), offset: 0, limit: 9 });
        again(&replay, &longer);
        let report = replay.finish(None, None, 0);
        let first = &report.divergences[0];
        assert_eq!((first.at, first.asked.as_str()), (1, "fs/read src/main.rt"));
        let near = first.nearest.as_ref().unwrap();
        assert_eq!((near.seq, near.field.as_str()), (1, "/request/args/path"));
        let near = report.divergences[1].nearest.as_ref().unwrap();
        assert_eq!((near.field.as_str(), &near.recorded, &near.got), ("/request/args/limit", &json!(4096), &json!(9)));
        assert_eq!(report.unasked, ["1 fs/read src/main.rs", "2 fs/delete x"]);
        assert!(!report.is_same());
    }

    #[test]
    fn streams_status_and_base_are_compared() {
        let base = |digest: &[u8]| Base {
            path: "a".into(),
            is: NodeKind::File,
            mode: 0o644,
            digest: Some(Digest::of(digest)),
        };
        let (mut recording, _) = record(&[]);
        recording.base = vec![base(b"1")];
        recording.end.stdout = Some(Stream { digest: Digest::of(b"x"), bytes: 1 });
        let replay = replay(recording, None);
        replay.compare_base(&[base(b"1")]);
        assert!(replay.finish(Some(Stream { digest: Digest::of(b"x"), bytes: 1 }), None, 0).is_same());
        replay.compare_base(&[base(b"2")]);
        replay.compare_base(&[]);
        let report = replay.finish(Some(Stream { digest: Digest::of(b"y"), bytes: 1 }), None, 3);
        let asked: Vec<&str> = report.divergences.iter().map(|one| one.asked.as_str()).collect();
        assert_eq!(asked, ["the workspace's `a`", "the workspace's `a`", "standard output", "the exit status"]);
    }

    #[test]
    fn a_substituted_answer_is_given_and_the_rest_is_as_recorded() {
        let effects = [on(Kind::FsRead, "a"), on(Kind::FsRead, "b")];
        let (recording, answers) = record(&effects);
        let counterfactual = replay(recording.clone(), Some(r#"1={"body":"other"}"#));
        assert_eq!(again(&counterfactual, &effects[0]).body.as_deref(), Some(b"other".as_slice()));
        assert_eq!(again(&counterfactual, &effects[1]).value, answers[1].value);
        assert_eq!(counterfactual.finish(None, None, 0).substituted, Some(1));
        let failing = replay(recording.clone(), Some(r#"1={"errno":"ENOENT"}"#));
        assert_eq!(again(&failing, &effects[0]).value["error"]["errno"], "ENOENT");
        for wrong in [r#"1={"errno":"EWHAT"}"#, r#"1={}"#, "x=y", "1", r#"1={"body":"a","errno":"EIO"}"#, "1=/no/such"]
        {
            assert!(Substitute::parse(wrong).is_err(), "{wrong}");
        }
        let missing = Substitute::parse(r#"9={"errno":"EIO"}"#).unwrap();
        assert!(matches!(Replay::new(recording, Some(missing), None), Err(SubstituteError::NoEntry { seq: 9, .. })));
    }

    #[test]
    fn a_write_at_the_socket_is_done_again_in_the_layer_alone() {
        let write = sample(Kind::FsWrite);
        let (recording, _) = record(std::slice::from_ref(&write));
        let layer = Arc::new(crate::chain::testing::FakeWorld::default());
        let replay = Arc::new(Replay::new(recording, None, Some(layer.clone())).unwrap());
        assert!(again(&replay, &write).is_success());
        assert_eq!(layer.done.lock().unwrap().len(), 1);
    }

    /// All that a recording holds; names that were found are the run's own.
    fn recorded_effects() -> impl Strategy<Value = Vec<Effect>> {
        prop::collection::vec(
            any_effect().prop_filter("recorded", |effect| !matches!(effect.kind, Kind::NetResolve | Kind::NetAccept)),
            0..24,
        )
    }

    proptest! {
        /// A replay of a recording is the recording, without the world.
        #[test]
        fn replaying_a_program_gives_what_recording_it_gave(effects in recorded_effects()) {
            let (recording, answers) = record(&effects);
            let replay = replay(recording, None);
            for (effect, recorded) in effects.iter().zip(&answers) {
                let answer = again(&replay, effect);
                prop_assert_eq!(answer.is_success(), recorded.is_success());
                prop_assert_eq!(&answer.value, &recorded.value);
                prop_assert_eq!(&answer.body, &recorded.body);
                prop_assert_eq!(answer.bytes, recorded.bytes);
            }
            let report = replay.finish(None, None, 0);
            prop_assert!(report.is_same());
            prop_assert_eq!(report.answered, effects.len() as u64);
        }

        /// Threads may come in another order, as long as each key's own order is kept.
        #[test]
        fn the_order_between_keys_does_not_matter(effects in recorded_effects()) {
            let (recording, answers) = record(&effects);
            let replay = replay(recording, None);
            let mut order: Vec<usize> = (0..effects.len()).collect();
            order.sort_by_key(|place| Asked::of(&effects[*place]).key());
            for place in order {
                // Equal keys may hold different requests, which then wait for their turn.
                let answer = again(&replay, &effects[place]);
                prop_assert_eq!(&answer.value, &answers[place].value);
            }
            prop_assert!(replay.finish(None, None, 0).is_same());
        }
    }
}
