//! Recordings: what a run's effects were answered, as one portable file.
//!
//! The file is UTF-8 text, one JSON object a line, each in canonical JSON (sorted keys, no white space, integers only).
//! In this order: one `head`; a `base` for each file of the workspace as the run found it, sorted by path; then each
//! effect's `entry`, after the `content` of its body if that was not there before; the `content` of what was given on
//! standard input; one `end`; one `seal`, whose value is SHA-256 over all bytes before its line. Bytes are base64
//! (RFC 4648) in a `content`, and their digest everywhere else.
//!
//! No value of an environment variable is in it. What the program was given on standard input is.

use super::{Answer, Decision};
use crate::effect::{base64, canonical_json, fs, http, run, Digest, Door, Effect, Kind, Request, Resource, RunId};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use sha2::Digest as _;
use std::{
    collections::{BTreeMap, BTreeSet},
    io::{self, Write},
    path::Path,
};

/// The first word of a recording, and its version.
pub const FORMAT: &str = "tollgate.recording.v1";
/// The longest file that is read as a recording. Its contents are held in memory while it is replayed.
pub const MAX_BYTES: u64 = 512 << 20;
/// The longest body that is recorded; a longer one is left out and its entry says so.
pub const MAX_BODY: usize = 64 << 20;
/// What stands in an entry's value, under `body`, where its bytes are not recorded.
pub const NOT_RECORDED: &str = crate::ledger::once::NOT_KEPT;
/// How many bytes of a content are encoded at a time: whole groups of base64.
const ENCODED_AT_ONCE: usize = 48 << 10;
/// The most files of a workspace that a recording lists.
const MAX_BASE: usize = 1_000_000;
/// How a run is called in a recording of itself, so that another run's effects match.
const OWN: &str = "self";

/// What a recording says of its run before it begins.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Head {
    /// [`FORMAT`].
    pub format: String,
    /// The run that was recorded.
    pub run: RunId,
    /// When, in RFC 3339.
    pub recorded_at: String,
    /// The argument vector, bytes that are not UTF-8 written as in a path.
    pub command: Vec<String>,
    /// The policy's name or path.
    pub policy: String,
    /// SHA-256 of the composed policy.
    pub policy_digest: String,
    /// The workspace's path.
    pub workspace: String,
    /// The working directory.
    pub directory: String,
    /// Names of the variables that passed into the jail, never a value.
    pub environment: Vec<String>,
    /// The kinds of the program's own calls that were asked about.
    pub waiting: Vec<Kind>,
    /// Whether its changes passed the chain when it ended.
    pub apply: Applied,
}

/// What became of the changes of a recorded run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Applied {
    /// They passed the chain when it ended.
    WhenItEnds,
    /// They were kept for later.
    OnRequest,
}

/// A file of the workspace as a run found it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Base {
    /// Its path.
    pub path: String,
    /// What it is.
    pub is: NodeKind,
    /// Permission bits; 0 for a link.
    pub mode: u32,
    /// SHA-256 of a file's content, or of a link's text.
    pub digest: Option<Digest>,
}

/// What a file of the workspace is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum NodeKind {
    /// A regular file.
    File,
    /// A directory.
    Directory,
    /// A symbolic link.
    Link,
    /// A file or directory that could not be read.
    Unreadable,
}

/// One effect and its answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Entry {
    /// Its place in the recording, from 1: in the order in which effects were answered.
    pub seq: u64,
    /// The kind.
    pub kind: Kind,
    /// The object, as [`Asked`] has it.
    pub resource: Resource,
    /// The door.
    pub door: Door,
    /// The arguments, as [`Asked`] has them.
    pub request: Request,
    /// What it was answered.
    pub answer: RecordedAnswer,
}

/// An answer as it is recorded.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RecordedAnswer {
    /// The decision.
    pub decision: Decision,
    /// By which handler, or `world`.
    pub decided_by: String,
    /// Why.
    pub reason: String,
    /// What to change.
    pub hint: String,
    /// Whether a fault rule made it up.
    pub injected: bool,
    /// Whether it broke off.
    pub cut: bool,
    /// The result as data.
    pub value: Value,
    /// The digest of the result's bytes, where it has any.
    pub body: Option<Digest>,
    /// The receipt's digest of the result.
    pub digest: Option<Digest>,
    /// How many bytes were read or written.
    pub bytes: u64,
}

impl RecordedAnswer {
    /// This answer, without the bytes of its body.
    pub fn of(answer: &Answer) -> RecordedAnswer {
        RecordedAnswer {
            decision: answer.decision,
            decided_by: answer.decided_by.to_owned(),
            reason: answer.reason.clone(),
            hint: answer.hint.clone(),
            injected: answer.injected,
            cut: answer.cut,
            value: answer.value.clone(),
            body: answer.body.as_deref().map(Digest::of),
            digest: answer.digest,
            bytes: answer.bytes,
        }
    }
}

/// How a recorded run ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct End {
    /// The exit status that the run gave on.
    pub exit_status: u8,
    /// What the program was given; its bytes are a `content`.
    pub stdin: Option<Stream>,
    /// What it printed on standard output.
    pub stdout: Option<Stream>,
    /// What it printed on standard error.
    pub stderr: Option<Stream>,
    /// How many entries there are.
    pub entries: u64,
}

/// A stream, without its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Stream {
    /// SHA-256 of its bytes.
    pub digest: Digest,
    /// How many there are.
    pub bytes: u64,
}

/// A line of the file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Line {
    Head(Head),
    Base(Base),
    Entry(Entry),
    Content(Content),
    End(End),
    Seal(Digest),
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Content {
    digest: Digest,
    base64: String,
}

/// What makes two effects of two runs the same: the declared rules of matching.
///
/// Kind, resource and request are compared, but for what differs from run to run by itself: a run's own id is `self`,
/// the time since which a file must be unchanged is 0, and so are the times that an evaluation took. Contents are
/// compared by the digests that are in the request; of a request whose content streams, only method and URL are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Asked {
    /// The kind.
    pub kind: Kind,
    /// The door.
    pub door: Door,
    /// The object.
    pub resource: Resource,
    /// The arguments.
    pub request: Request,
}

impl Asked {
    /// What this effect asks.
    pub fn of(effect: &Effect) -> Asked {
        let own = effect.subject.run.as_ref().map(|run| run.0.as_str());
        let name = |id: &mut String| {
            if Some(id.as_str()) == own {
                OWN.clone_into(id);
            }
        };
        let (mut resource, mut request) = (effect.resource.clone(), effect.request.clone());
        if let Resource::Run { id } = &mut resource {
            name(id);
        }
        match &mut request {
            Request::Fs(fs::Request::Write { expect, .. } | fs::Request::Delete { expect, .. }) => {
                if let Some(fs::Expect::Unchanged { since_ns }) = expect {
                    *since_ns = 0;
                }
            }
            Request::Run(run::Request::Cancel { run }) => name(run),
            Request::Run(run::Request::Eval { cpu_us, wall_us, .. }) => (*cpu_us, *wall_us) = (0, 0),
            Request::Fs(fs::Request::Read { .. } | fs::Request::List { .. } | fs::Request::Move { .. })
            | Request::Run(run::Request::Start { .. })
            | Request::Jail(_)
            | Request::Api(_)
            | Request::Program(_)
            | Request::Net(_) => {}
            Request::Http(request) => {
                if let http::Body::Streamed { announced } = &mut request.body {
                    *announced = None;
                }
            }
        }
        Asked { kind: effect.kind, door: effect.door, resource, request }
    }

    /// Whether an entry with this request answers it.
    pub fn is_answered_by(&self, recorded: &Request) -> bool {
        match (&self.request, recorded) {
            (Request::Http(asked), Request::Http(recorded)) => {
                let streams = |request: &http::Request| matches!(request.body, http::Body::Streamed { .. });
                match streams(asked) || streams(recorded) {
                    true => {
                        let without =
                            |request: &http::Request| http::Request { body: http::Body::Empty, ..request.clone() };
                        without(asked) == without(recorded)
                    }
                    false => asked == recorded,
                }
            }
            (asked, recorded) => asked == recorded,
        }
    }

    /// By what entries are looked up; those of one key are answered in their order.
    pub fn key(&self) -> Key {
        (self.door.name(), self.kind, canonical_json(&self.resource))
    }
}

impl Entry {
    /// What it asked.
    pub fn asked(&self) -> Asked {
        Asked { kind: self.kind, door: self.door, resource: self.resource.clone(), request: self.request.clone() }
    }
}

/// Door, kind and resource.
pub type Key = (&'static str, Kind, Vec<u8>);

/// Writes a recording while its run goes on.
pub struct Writer {
    sink: Box<dyn Write + Send>,
    hash: sha2::Sha256,
    contents: BTreeSet<Digest>,
    entries: u64,
    written: u64,
}

impl Writer {
    /// Begins with the head and the base.
    ///
    /// # Errors
    /// Those of the sink.
    pub fn begin(sink: Box<dyn Write + Send>, head: Head, base: Vec<Base>) -> io::Result<Writer> {
        let mut writer = Writer { sink, hash: sha2::Sha256::new(), contents: BTreeSet::new(), entries: 0, written: 0 };
        writer.line(&Line::Head(head))?;
        for file in base {
            writer.line(&Line::Base(file))?;
        }
        Ok(writer)
    }

    /// Adds an effect with its answer.
    ///
    /// # Errors
    /// Those of the sink.
    pub fn entry(&mut self, asked: Asked, answer: &Answer) -> io::Result<()> {
        let left_out = answer.body.as_ref().is_some_and(|body| body.len() > MAX_BODY);
        if let Some(body) = answer.body.as_ref().filter(|_| !left_out) {
            self.content(body)?;
        }
        self.entries += 1;
        let Asked { kind, door, resource, request } = asked;
        let mut answer = RecordedAnswer::of(answer);
        if left_out {
            answer.body = None;
            match answer.value.as_object_mut() {
                Some(value) => drop(value.insert("body".to_owned(), NOT_RECORDED.into())),
                None => answer.value = serde_json::json!({ "body": NOT_RECORDED }),
            }
        }
        self.line(&Line::Entry(Entry { seq: self.entries, kind, resource, door, request, answer }))
    }

    /// Ends with this, and gives the seal.
    ///
    /// # Errors
    /// Those of the sink.
    pub fn end(mut self, stdin: Option<&[u8]>, end: End) -> io::Result<Digest> {
        if let Some(stdin) = stdin {
            self.content(stdin)?;
        }
        let entries = self.entries;
        self.line(&Line::End(End { entries, ..end }))?;
        let seal = Digest(std::mem::take(&mut self.hash).finalize().into());
        self.line(&Line::Seal(seal))?;
        self.sink.flush()?;
        Ok(seal)
    }

    fn content(&mut self, bytes: &[u8]) -> io::Result<()> {
        let digest = Digest::of(bytes);
        if !self.contents.insert(digest) {
            return Ok(());
        }
        // As `line` writes it, but piece by piece: a long body is in memory once already.
        self.write(b"{\"content\":{\"base64\":\"")?;
        for piece in bytes.chunks(ENCODED_AT_ONCE) {
            self.write(base64::encode(piece).as_bytes())?;
        }
        self.write(format!("\",\"digest\":\"{digest}\"}}}}\n").as_bytes())
    }

    fn line(&mut self, line: &Line) -> io::Result<()> {
        let mut bytes = canonical_json(line);
        bytes.push(b'\n');
        self.write(&bytes)
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.written = self.written.saturating_add(bytes.len() as u64);
        if self.written > MAX_BYTES {
            let message = format!("a recording has at most {MAX_BYTES} bytes; a longer one could not be replayed");
            return Err(io::Error::new(io::ErrorKind::FileTooLarge, message));
        }
        self.hash.update(bytes);
        self.sink.write_all(bytes)
    }
}

/// A whole recording, checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recording {
    /// What it says of its run.
    pub head: Head,
    /// The workspace as the run found it, sorted by path.
    pub base: Vec<Base>,
    /// Its effects, in order.
    pub entries: Vec<Entry>,
    /// Bodies and standard input, by digest.
    pub contents: BTreeMap<Digest, Vec<u8>>,
    /// How it ended.
    pub end: End,
    /// The seal: what names this recording.
    pub digest: Digest,
}

/// Why a file is no recording.
#[derive(Debug, thiserror::Error)]
pub enum RecordingError {
    /// open(2) or read(2) failed.
    #[error("{path}: {source}")]
    Unreadable {
        /// The file.
        path: String,
        /// The system's reason.
        #[source]
        source: io::Error,
    },
    /// Longer than any that is read.
    #[error("{path} has more than {} bytes, which is more than a recording may have", MAX_BYTES)]
    TooLong {
        /// The file.
        path: String,
    },
    /// No seal at its end: the run was cut off, or the file.
    #[error("the recording has no seal at its end: it was cut off, or its run was")]
    NoSeal,
    /// The seal is of other bytes.
    #[error("the recording was changed after it was sealed: its bytes have the digest {found}, its seal is {sealed}")]
    Changed {
        /// The digest of its bytes.
        found: Digest,
        /// What its seal says.
        sealed: Digest,
    },
    /// A line that is none of a recording's.
    #[error("line {line} of the recording: {problem}")]
    Line {
        /// Which, from 1.
        line: usize,
        /// What is wrong.
        problem: String,
    },
}

impl Recording {
    /// Reads and checks a file.
    ///
    /// # Errors
    /// As [`RecordingError`] has them.
    pub fn load(path: &Path) -> Result<Recording, RecordingError> {
        use io::Read as _;
        let shown = || crate::effect::path::escape(std::os::unix::ffi::OsStrExt::as_bytes(path.as_os_str()));
        let unreadable = |source| RecordingError::Unreadable { path: shown(), source };
        let mut bytes = Vec::new();
        let file = std::fs::File::open(path).map_err(unreadable)?;
        file.take(MAX_BYTES + 1).read_to_end(&mut bytes).map_err(unreadable)?;
        if bytes.len() as u64 > MAX_BYTES {
            return Err(RecordingError::TooLong { path: shown() });
        }
        Recording::parse(&bytes)
    }

    /// Reads and checks the bytes of a recording.
    ///
    /// # Errors
    /// As [`RecordingError`] has them.
    pub fn parse(bytes: &[u8]) -> Result<Recording, RecordingError> {
        let body = bytes.strip_suffix(b"\n").ok_or(RecordingError::NoSeal)?;
        let start = body.iter().rposition(|byte| *byte == b'\n').map_or(0, |place| place + 1);
        let Ok(Line::Seal(sealed)) = serde_json::from_slice(&body[start..]) else { return Err(RecordingError::NoSeal) };
        let found = Digest::of(&bytes[..start]);
        if found != sealed {
            return Err(RecordingError::Changed { found, sealed });
        }
        let mut read = Reading::default();
        for (place, line) in bytes[..start].split_inclusive(|byte| *byte == b'\n').enumerate() {
            let wrong = |problem: String| RecordingError::Line { line: place + 1, problem };
            let line = serde_json::from_slice(line).map_err(|error| wrong(error.to_string()))?;
            read.take(line).map_err(|problem| wrong(problem.to_owned()))?;
        }
        let lines = read.lines;
        let missing = |problem: &str| RecordingError::Line { line: lines, problem: problem.to_owned() };
        let head = read.head.ok_or_else(|| missing("there is no head"))?;
        let end = read.end.ok_or_else(|| missing("there is no end"))?;
        if end.entries != read.entries.len() as u64 {
            return Err(missing("the number of entries is not what the end says"));
        }
        let needed = read.entries.iter().filter_map(|entry| entry.answer.body).chain(end.stdin.map(|it| it.digest));
        if let Some(lost) = needed.into_iter().find(|digest| !read.contents.contains_key(digest)) {
            return Err(missing(&format!("the content {lost} is missing")));
        }
        Ok(Recording { head, base: read.base, entries: read.entries, contents: read.contents, end, digest: sealed })
    }
}

#[derive(Default)]
struct Reading {
    lines: usize,
    head: Option<Head>,
    base: Vec<Base>,
    entries: Vec<Entry>,
    contents: BTreeMap<Digest, Vec<u8>>,
    end: Option<End>,
}

impl Reading {
    fn take(&mut self, line: Line) -> Result<(), &'static str> {
        self.lines += 1;
        if self.head.is_some() == matches!(line, Line::Head(_)) {
            return Err("a recording begins with its one head");
        }
        if self.end.is_some() {
            return Err("nothing but the seal comes after the end");
        }
        match line {
            Line::Head(head) if head.format != FORMAT => {
                return Err("it is of a version that this program cannot read")
            }
            Line::Head(head) => self.head = Some(head),
            Line::Base(base) => self.base.push(base),
            Line::Entry(entry) if entry.seq != self.entries.len() as u64 + 1 => {
                return Err("an entry is not at its place")
            }
            Line::Entry(entry) => self.entries.push(entry),
            Line::Content(Content { digest, base64 }) => {
                let bytes = base64::decode(&base64).ok_or("a content is not base64")?;
                if Digest::of(&bytes) != digest {
                    return Err("a content has another digest than it says");
                }
                self.contents.insert(digest, bytes);
            }
            Line::End(end) => self.end = Some(end),
            Line::Seal(_) => return Err("the seal is the last line"),
        }
        Ok(())
    }
}

/// The files of a workspace, sorted by path. Sockets, pipes and devices are left out, and so is this directory.
///
/// # Errors
/// When the workspace itself cannot be read, or has more files than a recording lists.
pub fn base_of(workspace: &Path, without: &Path) -> io::Result<Vec<Base>> {
    use std::os::unix::{ffi::OsStrExt as _, fs::PermissionsExt as _};
    let mut found = Vec::new();
    let mut pending = vec![workspace.to_owned()];
    while let Some(directory) = pending.pop() {
        let entries = match std::fs::read_dir(&directory) {
            Ok(entries) => entries,
            Err(error) if directory == workspace => return Err(error),
            // Listed as unreadable by its own parent.
            Err(_) => continue,
        };
        for entry in entries {
            let path = entry?.path();
            if path == without {
                continue;
            }
            // Gone meanwhile: as if looked at a moment later.
            let Ok(metadata) = path.symlink_metadata() else { continue };
            let inside = path.strip_prefix(workspace).unwrap_or(&path);
            let Ok(name) = crate::effect::path::workspace_path(inside) else { continue };
            let mode = metadata.permissions().mode() & 0o7777;
            let kind = metadata.file_type();
            let (is, mode, digest) = if kind.is_symlink() {
                let target = std::fs::read_link(&path)?;
                (NodeKind::Link, 0, Some(Digest::of(target.as_os_str().as_bytes())))
            } else if kind.is_dir() {
                let readable = std::fs::read_dir(&path).is_ok();
                pending.push(path);
                (if readable { NodeKind::Directory } else { NodeKind::Unreadable }, mode, None)
            } else if kind.is_file() {
                match digest_of(&path) {
                    Ok(stream) => (NodeKind::File, mode, Some(stream.digest)),
                    Err(_) => (NodeKind::Unreadable, mode, None),
                }
            } else {
                continue;
            };
            if found.len() == MAX_BASE {
                return Err(io::Error::other(format!("the workspace has more than {MAX_BASE} files")));
            }
            found.push(Base { path: name, is, mode, digest });
        }
    }
    found.sort();
    Ok(found)
}

/// The digest and length of a file, read in pieces.
///
/// # Errors
/// As open(2) and read(2).
pub fn digest_of(path: &Path) -> io::Result<Stream> {
    use io::Read as _;
    let mut file = std::fs::File::open(path)?;
    let mut hash = sha2::Sha256::new();
    let (mut piece, mut bytes) = (vec![0; 64 * 1024], 0);
    loop {
        match file.read(&mut piece) {
            Ok(0) => return Ok(Stream { digest: Digest(hash.finalize().into()), bytes }),
            Ok(length) => {
                hash.update(&piece[..length]);
                bytes += length as u64;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::effect::tests::{any_effect, sample};
    use proptest::prelude::*;
    use std::sync::{Arc, Mutex};

    /// A sink whose bytes can be looked at.
    #[derive(Clone, Default)]
    pub(in crate::chain) struct Bytes(pub(in crate::chain) Arc<Mutex<Vec<u8>>>);

    impl Write for Bytes {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    pub(in crate::chain) fn head() -> Head {
        Head {
            format: FORMAT.to_owned(),
            run: RunId("0123456789ab".into()),
            recorded_at: "2026-12-01T00:00:00.000000Z".into(),
            command: vec!["python3".into(), "t.py".into()],
            policy: "default".into(),
            policy_digest: Digest::of(b"policy").to_string(),
            workspace: "/w".into(),
            directory: "/w".into(),
            environment: vec!["LANG".into()],
            waiting: Vec::new(),
            apply: Applied::WhenItEnds,
        }
    }

    pub(in crate::chain) fn end() -> End {
        End { exit_status: 0, stdin: None, stdout: None, stderr: None, entries: 0 }
    }

    fn recorded(effects: &[(Effect, Answer)]) -> Vec<u8> {
        let sink = Bytes::default();
        let base = Base { path: "a".into(), is: NodeKind::File, mode: 0o644, digest: Some(Digest::of(b"a")) };
        let mut writer = Writer::begin(Box::new(sink.clone()), head(), vec![base]).unwrap();
        for (effect, answer) in effects {
            writer.entry(Asked::of(effect), answer).unwrap();
        }
        let stdin = Stream { digest: Digest::of(b"in\xff"), bytes: 3 };
        writer.end(Some(b"in\xff"), End { stdin: Some(stdin), ..end() }).unwrap();
        let bytes = sink.0.lock().unwrap().clone();
        bytes
    }

    fn read() -> (Effect, Answer) {
        let answer = Answer { body: Some(vec![0, 159, 146, 150]), ..Answer::done(serde_json::json!({"size": 4}), 4) };
        (sample(Kind::FsRead), answer)
    }

    #[test]
    fn a_recording_is_read_back_with_its_binary_bodies() {
        let bytes = recorded(&[read(), read(), (sample(Kind::FsDelete), Answer::failed("no such file", "look"))]);
        let recording = Recording::parse(&bytes).unwrap();
        assert_eq!(recording.entries.len(), 3);
        let body = recording.entries[0].answer.body.unwrap();
        assert_eq!(recording.contents[&body], [0, 159, 146, 150]);
        assert_eq!(recording.contents.len(), 2, "one body twice, and the input");
        assert_eq!(recording.entries[2].answer.decision, Decision::Failed);
    }

    /// Whoever changes this breaks every recording that exists.
    #[test]
    fn the_bytes_of_a_recording_are_these() {
        let bytes = recorded(&[(sample(Kind::FsRead), Answer::done(Value::Null, 0))]);
        let text = String::from_utf8(bytes.clone()).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 6);
        assert!(
            lines[0].starts_with(r#"{"head":{"apply":"when-it-ends","command":["python3","t.py"],"directory":"/w""#)
        );
        assert_eq!(
            lines[2],
            r#"{"entry":{"answer":{"body":null,"bytes":0,"cut":false,"decided_by":"world","decision":"allowed","digest":null,"hint":"","injected":false,"reason":"","value":null},"door":"api","kind":"fs/read","request":{"args":{"limit":4096,"offset":0,"path":"src/main.rs","verb":"read"},"family":"fs"},"resource":{"path":"src/main.rs","type":"workspace"},"seq":1}}"#
        );
        assert!(lines[3].starts_with(r#"{"content":{"base64":"aW7/","digest":""#));
        let before_seal = text.len() - lines[5].len() - 1;
        assert_eq!(lines[5], format!(r#"{{"seal":"{}"}}"#, Digest::of(&bytes[..before_seal])));
    }

    #[test]
    fn a_changed_or_cut_recording_is_refused() {
        let bytes = recorded(&[read()]);
        let mut changed = bytes.clone();
        let place = changed.windows(7).position(|window| window == b"python3").unwrap();
        changed[place] = b'P';
        assert!(matches!(Recording::parse(&changed), Err(RecordingError::Changed { .. })));
        for length in [0, 1, bytes.len() / 2, bytes.len() - 1] {
            assert!(matches!(Recording::parse(&bytes[..length]), Err(RecordingError::NoSeal)), "{length}");
        }
        let mut twice = bytes.clone();
        twice.extend_from_slice(&bytes);
        assert!(Recording::parse(&twice).is_err());
    }

    #[test]
    fn what_differs_by_itself_from_run_to_run_is_no_difference() {
        let one = sample(Kind::RunCancel);
        let mut other = one.clone();
        other.subject.run = Some(RunId("zzzzzzzzzzzz".into()));
        other.resource = Resource::Run { id: "zzzzzzzzzzzz".into() };
        other.request = Request::Run(run::Request::Cancel { run: "zzzzzzzzzzzz".into() });
        assert_eq!(Asked::of(&one), Asked::of(&other));
        let delete = |since_ns| Effect {
            request: Request::Fs(fs::Request::Delete {
                path: "a".into(),
                expect: Some(fs::Expect::Unchanged { since_ns }),
            }),
            ..sample(Kind::FsDelete)
        };
        assert_eq!(Asked::of(&delete(1)), Asked::of(&delete(2)));
    }

    #[test]
    fn a_base_lists_files_directories_and_links_by_their_content() {
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir(root.path().join("d")).unwrap();
        std::fs::write(root.path().join("d/f"), "x").unwrap();
        std::os::unix::fs::symlink("d/f", root.path().join("l")).unwrap();
        std::fs::create_dir(root.path().join("state")).unwrap();
        let base = base_of(root.path(), &root.path().join("state")).unwrap();
        let paths: Vec<(&str, NodeKind)> = base.iter().map(|file| (file.path.as_str(), file.is)).collect();
        assert_eq!(paths, [("d", NodeKind::Directory), ("d/f", NodeKind::File), ("l", NodeKind::Link)]);
        assert_eq!(base[1].digest, Some(Digest::of(b"x")));
    }

    proptest! {
        #[test]
        fn every_effect_is_read_back(effects in prop::collection::vec(any_effect(), 0..8)) {
            let pairs: Vec<(Effect, Answer)> =
                effects.iter().map(|effect| (effect.clone(), Answer::done(Value::Null, effect.bytes()))).collect();
            let recording = Recording::parse(&recorded(&pairs)).unwrap();
            let asked: Vec<Asked> = recording.entries.iter().map(Entry::asked).collect();
            prop_assert_eq!(asked, effects.iter().map(Asked::of).collect::<Vec<_>>());
        }

        #[test]
        fn no_bytes_make_reading_panic(bytes: Vec<u8>, flip in 0usize..2000, with: u8) {
            let _ = Recording::parse(&bytes);
            let mut good = recorded(&[read()]);
            let place = flip % good.len();
            good[place] ^= with;
            let _ = Recording::parse(&good);
        }
    }
}
