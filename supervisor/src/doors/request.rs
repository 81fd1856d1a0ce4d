//! From bytes that a jailed program sent to an effect's kind, resource and arguments.
//!
//! Pure: nothing here does, decides or looks anything up. It refuses what is not exactly a request: duplicate or
//! unknown fields, deep nesting, values out of range, and any field that would say who asks, since that comes from
//! the socket alone.

use super::base64;
use crate::effect::{fs, http, net, path::escape, run, Digest, Kind, Request, Resource, RunId};
use serde::{
    de::{DeserializeOwned, DeserializeSeed, Error as _, MapAccess, SeqAccess, Visitor},
    Deserialize, Deserializer,
};
use serde_json::{Map, Value};
use std::fmt;

/// The longest JSON body in bytes.
pub const MAX_JSON: usize = 64 * 1024;

/// How deep objects and lists may nest. The deepest request of the vocabulary has two levels.
const MAX_DEPTH: usize = 8;

/// The most bytes that one read gives. Longer files are read in ranges.
pub const MAX_READ: u64 = 8 * 1024 * 1024;

/// The longest path and the longest name in bytes: `PATH_MAX` with its zero byte and `NAME_MAX` (limits.h(0p)).
const MAX_PATH: usize = 4095;
/// See [`MAX_PATH`].
const MAX_NAME: usize = 255;

/// The longest label of an evaluation in bytes.
const MAX_LABEL: usize = 256;

/// Fields, parameters and headers that would say who asks or where. Refused, not ignored: a program that sends one
/// believes something false.
const IDENTITY: &[&str] =
    &["subject", "author", "from", "run", "room", "uid", "user", "agent", "party", "source-user", "source_user"];

/// What the door knows without being told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// The run whose socket it is.
    pub run: RunId,
    /// The workspace's absolute path as the program sees it.
    pub workspace: Vec<u8>,
}

/// A well-formed request, not yet anybody's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ask {
    /// The effect's kind.
    pub kind: Kind,
    /// Its object.
    pub resource: Resource,
    /// Its arguments.
    pub request: Request,
    /// The content of a file to write, where it came within the request.
    pub content: Option<Vec<u8>>,
}

/// Why bytes are no request.
#[derive(Debug, thiserror::Error)]
pub enum Malformed {
    /// Not JSON, or not an object, or nested too deeply, or a field twice.
    #[error("the body is not a well-formed request: {0}")]
    Json(#[source] serde_json::Error),
    /// Fields that the kind does not have, or lacks, or of the wrong type.
    #[error("{kind}: {cause}")]
    Fields {
        /// The kind asked for.
        kind: Kind,
        /// What is wrong with which field.
        cause: serde_json::Error,
    },
    /// There is no kind.
    #[error("the request has no `kind`")]
    NoKind,
    /// A kind that is not in the vocabulary.
    #[error("unknown effect kind {0:?}")]
    UnknownKind(String),
    /// A kind that only the supervisor's own doors make.
    #[error("{0} cannot be asked for at this door")]
    NotAtThisDoor(Kind),
    /// The request says who asks.
    #[error("the request names its own {0:?}; who asks follows from the socket")]
    Identity(String),
    /// A path that cannot be one.
    #[error("{field}: {why}")]
    Path {
        /// The field that holds it.
        field: &'static str,
        /// What is wrong.
        why: &'static str,
    },
    /// A value that is out of range or not of its form.
    #[error("{field}: {why}")]
    Value {
        /// The field.
        field: &'static str,
        /// What is wrong, and what would be right.
        why: &'static str,
    },
}

impl Malformed {
    /// The error's type on the wire.
    pub fn problem(&self) -> &'static str {
        match self {
            Malformed::UnknownKind(_) => "unknown-kind",
            Malformed::NotAtThisDoor(_) => "not-at-this-door",
            Malformed::Identity(_) => "identity-in-request",
            Malformed::Json(_)
            | Malformed::Fields { .. }
            | Malformed::NoKind
            | Malformed::Path { .. }
            | Malformed::Value { .. } => "malformed",
        }
    }

    /// What the asker can do.
    pub fn hint(&self) -> &'static str {
        match self {
            Malformed::UnknownKind(_) | Malformed::NotAtThisDoor(_) | Malformed::NoKind => {
                "GET /v1/openapi.json lists the kinds and their fields"
            }
            Malformed::Identity(_) => "leave the field out",
            Malformed::Json(_) | Malformed::Fields { .. } => "GET /v1/openapi.json has the schema of each kind",
            Malformed::Path { .. } => {
                "give a path of the workspace; a backslash is written `\\\\`, a byte that is not UTF-8 `\\xNN`"
            }
            Malformed::Value { .. } => "correct the value",
        }
    }
}

/// Whether this is a name that would say who asks.
pub fn is_identity(name: &str) -> bool {
    IDENTITY.iter().any(|identity| name.eq_ignore_ascii_case(identity))
}

/// Parses the body of `POST /v1/effects`.
///
/// # Errors
/// As [`Malformed`].
pub fn parse(body: &[u8], place: &Place) -> Result<Ask, Malformed> {
    let mut fields = object(body)?;
    if let Some(name) = fields.keys().find(|name| is_identity(name)) {
        return Err(Malformed::Identity(name.clone()));
    }
    let kind = match fields.remove("kind") {
        Some(Value::String(name)) => kind_at_door(name)?,
        Some(_) => return Err(Malformed::Value { field: "kind", why: "must be a string" }),
        None => return Err(Malformed::NoKind),
    };
    arguments(kind, fields, place)
}

/// A kind by its name, if a jail may ask for it.
fn kind_at_door(name: String) -> Result<Kind, Malformed> {
    match name.parse::<Kind>() {
        Ok(kind) if kind.declaration().at_api_door => Ok(kind),
        Ok(kind) => Err(Malformed::NotAtThisDoor(kind)),
        Err(_unknown) => Err(Malformed::UnknownKind(name.chars().take(64).collect())),
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Read {
    path: String,
    #[serde(default)]
    offset: u64,
    limit: Option<u64>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct List {
    path: String,
}

#[derive(Clone, Copy, Default, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum NodeType {
    #[default]
    File,
    Directory,
    Link,
    Attributes,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Write {
    path: String,
    #[serde(default, rename = "type")]
    node: NodeType,
    text: Option<String>,
    content: Option<String>,
    target: Option<String>,
    mode: Option<String>,
    expect: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Delete {
    path: String,
    expect: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Move {
    path: String,
    to: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Start {
    command: Vec<String>,
    #[serde(default)]
    policy: String,
    #[serde(default)]
    directory: String,
    #[serde(default)]
    environment: Vec<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Cancel {
    id: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Eval {
    label: String,
    cpu_us: u64,
    wall_us: u64,
}

fn arguments(kind: Kind, fields: Map<String, Value>, place: &Place) -> Result<Ask, Malformed> {
    let plain = |resource, request| Ask { kind, resource, request, content: None };
    match kind {
        Kind::FsRead => {
            let Read { path, offset, limit } = typed(kind, fields)?;
            read(&unescape("path", &path)?, offset, limit, place)
        }
        Kind::FsList => {
            let List { path } = typed(kind, fields)?;
            let (resource, path) = locate("path", &unescape("path", &path)?, place)?;
            Ok(plain(resource, Request::Fs(fs::Request::List { path })))
        }
        Kind::FsWrite => write(typed(kind, fields)?, place),
        Kind::FsDelete => {
            let Delete { path, expect } = typed(kind, fields)?;
            let (resource, path) = locate("path", &unescape("path", &path)?, place)?;
            let expect = expect.as_deref().map(expectation).transpose()?;
            Ok(plain(resource, Request::Fs(fs::Request::Delete { path, expect })))
        }
        Kind::FsMove => {
            let Move { path, to } = typed(kind, fields)?;
            moved(&unescape("path", &path)?, &unescape("to", &to)?, place)
        }
        Kind::RunStart => {
            let Start { command, policy, directory, environment } = typed(kind, fields)?;
            start(command, policy, directory, environment, place)
        }
        Kind::RunCancel => {
            let Cancel { id } = typed(kind, fields)?;
            let run = id.unwrap_or_else(|| place.run.0.clone());
            Ok(plain(Resource::Run { id: run.clone() }, Request::Run(run::Request::Cancel { run })))
        }
        Kind::EvalRun => {
            let Eval { label, cpu_us, wall_us } = typed(kind, fields)?;
            if label.len() > MAX_LABEL {
                return Err(Malformed::Value { field: "label", why: "is longer than 256 bytes" });
            }
            let request = Request::Run(run::Request::Eval { label, cpu_us, wall_us });
            Ok(plain(Resource::Run { id: place.run.0.clone() }, request))
        }
        Kind::NetConnect
        | Kind::NetResolve
        | Kind::NetAccept
        | Kind::HttpRequest
        | Kind::ProcessExec
        | Kind::ProcessSyscall
        | Kind::ApiRequest => Err(Malformed::NotAtThisDoor(kind)),
    }
}

/// A read of this path, given as bytes.
///
/// # Errors
/// A path that cannot be one; a range longer than [`MAX_READ`].
pub fn read(path: &[u8], offset: u64, limit: Option<u64>, place: &Place) -> Result<Ask, Malformed> {
    let limit = limit.unwrap_or(MAX_READ);
    if limit > MAX_READ {
        return Err(Malformed::Value { field: "limit", why: "is more than 8388608; read longer files in ranges" });
    }
    if offset > i64::MAX as u64 {
        return Err(Malformed::Value { field: "offset", why: "is more than a file can hold" });
    }
    let (resource, path) = locate("path", path, place)?;
    let request = Request::Fs(fs::Request::Read { path, offset, limit });
    Ok(Ask { kind: Kind::FsRead, resource, request, content: None })
}

/// A write of a file with this content, which is elsewhere.
///
/// # Errors
/// A path, mode or expectation that cannot be one.
pub fn write_file(
    path: &[u8],
    (digest, bytes): (Digest, u64),
    mode: Option<&str>,
    expect: Option<&str>,
    place: &Place,
) -> Result<Ask, Malformed> {
    let (resource, path) = locate("path", path, place)?;
    let node = fs::Node::File { digest, bytes, mode: permissions(mode, 0o644)? };
    let expect = expect.map(expectation).transpose()?;
    let request = Request::Fs(fs::Request::Write { path, node, expect });
    Ok(Ask { kind: Kind::FsWrite, resource, request, content: None })
}

fn write(fields: Write, place: &Place) -> Result<Ask, Malformed> {
    let Write { path, node, text, content, target, mode, expect } = fields;
    let path = unescape("path", &path)?;
    let content =
        match (node, text, content) {
            (NodeType::File, Some(text), None) => Some(text.into_bytes()),
            (NodeType::File, None, Some(coded)) => Some(base64::decode(&coded).ok_or(Malformed::Value {
                field: "content",
                why: "is not base64 with padding (RFC 4648, section 4)",
            })?),
            (NodeType::File, ..) => {
                return Err(Malformed::Value { field: "content", why: "a file has either `text` or `content`" })
            }
            (_, None, None) => None,
            (..) => return Err(Malformed::Value { field: "content", why: "only a file has a content" }),
        };
    if matches!(node, NodeType::Link) != target.is_some() {
        return Err(Malformed::Value { field: "target", why: "a link has a target, and nothing else has" });
    }
    let node = match (node, &content) {
        (NodeType::File, content) => {
            let content = content.as_deref().unwrap_or_default();
            let located = (Digest::of(content), content.len() as u64);
            let mut ask = write_file(&path, located, mode.as_deref(), expect.as_deref(), place)?;
            ask.content = Some(content.to_vec());
            return Ok(ask);
        }
        (NodeType::Directory, _) => fs::Node::Directory { mode: permissions(mode.as_deref(), 0o755)? },
        (NodeType::Attributes, _) if mode.is_none() => {
            return Err(Malformed::Value { field: "mode", why: "is missing" })
        }
        (NodeType::Attributes, _) => fs::Node::Attributes { mode: permissions(mode.as_deref(), 0)? },
        (NodeType::Link, _) if mode.is_some() => {
            return Err(Malformed::Value { field: "mode", why: "a link has none (symlink(7))" })
        }
        (NodeType::Link, _) => {
            let target = unescape("target", &target.unwrap_or_default())?;
            if target.is_empty() || target.len() > MAX_PATH || target.contains(&0) {
                return Err(Malformed::Path { field: "target", why: "is empty, too long, or holds a zero byte" });
            }
            fs::Node::Link { target: escape(&target) }
        }
    };
    let (resource, path) = locate("path", &path, place)?;
    let expect = expect.as_deref().map(expectation).transpose()?;
    let request = Request::Fs(fs::Request::Write { path, node, expect });
    Ok(Ask { kind: Kind::FsWrite, resource, request, content: None })
}

/// A move. Where either end is outside the workspace, that end is the resource, which is only ever refused.
fn moved(path: &[u8], to: &[u8], place: &Place) -> Result<Ask, Malformed> {
    let (from_resource, path) = locate("path", path, place)?;
    let (to_resource, to) = locate("to", to, place)?;
    let resource = match (from_resource, to_resource) {
        (outside @ Resource::Host { .. }, _) | (_, outside @ Resource::Host { .. }) => outside,
        (inside, _) => inside,
    };
    Ok(Ask { kind: Kind::FsMove, resource, request: Request::Fs(fs::Request::Move { path, to }), content: None })
}

fn start(
    command: Vec<String>,
    policy: String,
    directory: String,
    environment: Vec<String>,
    place: &Place,
) -> Result<Ask, Malformed> {
    if command.is_empty() || command.iter().chain([&policy, &directory]).any(|text| text.contains('\0')) {
        return Err(Malformed::Value { field: "command", why: "is empty, or something holds a zero byte" });
    }
    if environment.iter().any(|name| name.is_empty() || name.contains(['=', '\0'])) {
        return Err(Malformed::Value { field: "environment", why: "lists names of variables, never values" });
    }
    let request = run::Request::Start { command, policy, policy_digest: String::new(), directory, environment };
    let resource = Resource::Run { id: place.run.0.clone() };
    Ok(Ask { kind: Kind::RunStart, resource, request: Request::Run(request), content: None })
}

/// Parses the query of `GET /v1/why`. Contents are not needed; `bytes` stands for the length of one.
///
/// # Errors
/// As [`Malformed`].
pub fn why(pairs: Vec<(String, String)>, place: &Place) -> Result<Ask, Malformed> {
    let mut fields = Map::new();
    let mut bytes = 0;
    let mut kind = None;
    for (name, value) in pairs {
        if is_identity(&name) {
            return Err(Malformed::Identity(name));
        }
        match name.as_str() {
            "kind" if kind.is_none() => {
                kind = Some(value.parse::<Kind>().map_err(|unknown| Malformed::UnknownKind(unknown.0))?);
            }
            "bytes" => {
                let wrong = || Malformed::Value { field: "bytes", why: "is not a number" };
                bytes = value.parse().ok().ok_or_else(wrong)?;
            }
            "command" => match fields.entry("command").or_insert_with(|| Value::Array(Vec::new())) {
                Value::Array(words) => words.push(value.into()),
                _ => return Err(Malformed::Value { field: "command", why: "is given twice" }),
            },
            _ => {
                if fields.insert(name, value.into()).is_some() {
                    return Err(Malformed::Value { field: "query", why: "a parameter is given twice" });
                }
            }
        }
    }
    let kind = kind.ok_or(Malformed::NoKind)?;
    if let Some(ask) = about_the_network(kind, &fields)? {
        return Ok(ask);
    }
    match kind {
        Kind::FsWrite => {
            fields.entry("type").or_insert("file".into());
            if fields.get("type") == Some(&"file".into()) {
                fields.insert("text".to_owned(), "".into());
            }
        }
        Kind::EvalRun => {
            fields.entry("label").or_insert("".into());
            fields.insert("cpu_us".to_owned(), 0.into());
            fields.insert("wall_us".to_owned(), 0.into());
        }
        Kind::FsRead | Kind::FsList | Kind::FsDelete | Kind::FsMove | Kind::RunStart | Kind::RunCancel => {}
        Kind::NetConnect
        | Kind::NetResolve
        | Kind::NetAccept
        | Kind::HttpRequest
        | Kind::ProcessExec
        | Kind::ProcessSyscall
        | Kind::ApiRequest => {
            return Err(Malformed::NotAtThisDoor(kind));
        }
    }
    let mut ask = arguments(kind, fields, place)?;
    if let Request::Fs(fs::Request::Write { node: fs::Node::File { bytes: length, .. }, .. }) = &mut ask.request {
        *length = bytes;
    }
    Ok(ask)
}

/// A question about an effect of the network, which is asked about here and made elsewhere; none for another kind.
fn about_the_network(kind: Kind, fields: &Map<String, Value>) -> Result<Option<Ask>, Malformed> {
    let known: &[&str] = match kind {
        Kind::HttpRequest => &["method", "url"],
        Kind::NetConnect | Kind::NetAccept => &["to"],
        Kind::NetResolve => &["name"],
        _ => return Ok(None),
    };
    if fields.keys().any(|name| !known.contains(&name.as_str())) {
        let why = "an http/request has `method` and `url`, a net/connect and a net/accept `to`, a net/resolve `name`";
        return Err(Malformed::Value { field: "query", why });
    }
    let text = |name: &'static str| {
        let missing = Malformed::Value { field: name, why: "is missing" };
        fields.get(name).and_then(Value::as_str).ok_or(missing)
    };
    let (resource, request) = match kind {
        Kind::HttpRequest => {
            let method = fields.get("method").and_then(Value::as_str).unwrap_or("GET");
            let wrong = Malformed::Value { field: "url", why: "is no URL of http or https" };
            let request = http::Request::parse(method, text("url")?).map_err(|http::NotAUrl| wrong)?;
            (request.resource(), Request::Http(request))
        }
        Kind::NetConnect | Kind::NetAccept => {
            let wrong = || Malformed::Value { field: "to", why: "is not HOST:PORT" };
            let (host, port) = text("to")?.rsplit_once(':').ok_or_else(wrong)?;
            let host = host.trim_matches(['[', ']']).to_ascii_lowercase();
            let port = port.parse().ok().filter(|port| *port > 0).ok_or_else(wrong)?;
            let request = match kind {
                // From whom, and to which port inside, no rule asks.
                Kind::NetAccept => net::Request::Accept { from: host.clone(), host, port, inside: port },
                _ => net::Request::Connect { host, port, transport: net::Transport::Tcp },
            };
            (request.resource(), Request::Net(request))
        }
        _ => {
            let name = text("name")?.to_ascii_lowercase();
            let request = net::Request::Resolve { name, record: "A".to_owned() };
            (request.resource(), Request::Net(request))
        }
    };
    Ok(Some(Ask { kind, resource, request, content: None }))
}

/// Permission bits, written in octal.
fn permissions(text: Option<&str>, default: u32) -> Result<u32, Malformed> {
    let Some(text) = text else { return Ok(default) };
    let wrong = Malformed::Value { field: "mode", why: "is not an octal number from 0 to 0777, as in \"0644\"" };
    let plain = (1..=5).contains(&text.len()) && text.bytes().all(|byte| matches!(byte, b'0'..=b'7'));
    match u32::from_str_radix(text, 8) {
        Ok(mode) if plain && mode <= 0o777 => Ok(mode),
        Ok(_) | Err(_) => Err(wrong),
    }
}

/// `absent`, `sha256:HEX` or `unchanged:NANOSECONDS`.
fn expectation(text: &str) -> Result<fs::Expect, Malformed> {
    let wrong =
        || Malformed::Value { field: "expect", why: "is none of `absent`, `sha256:<hex>`, `unchanged:<nanoseconds>`" };
    match text.split_once(':') {
        None if text == "absent" => Ok(fs::Expect::Absent),
        Some(("sha256", digest)) => digest.parse().map(|digest| fs::Expect::File { digest }).ok().ok_or_else(wrong),
        Some(("unchanged", since)) => {
            since.parse().map(|since_ns| fs::Expect::Unchanged { since_ns }).ok().ok_or_else(wrong)
        }
        None | Some(_) => Err(wrong()),
    }
}

/// Which object a path of the program names, and the path that the effect's arguments hold.
///
/// Dots are taken away by the text alone: the world follows no link out of the workspace, so the name in the receipt
/// is the name that is opened.
fn locate(field: &'static str, path: &[u8], place: &Place) -> Result<(Resource, String), Malformed> {
    if path.len() > MAX_PATH {
        return Err(Malformed::Path { field, why: "is longer than 4095 bytes" });
    }
    if path.contains(&0) {
        return Err(Malformed::Path { field, why: "holds a zero byte" });
    }
    let root: Vec<&[u8]> = components(&place.workspace).collect();
    let mut names = if path.first() == Some(&b'/') { Vec::new() } else { root.clone() };
    for name in components(path) {
        match name {
            b".." => drop(names.pop()),
            name if name.len() > MAX_NAME => {
                return Err(Malformed::Path { field, why: "has a name longer than 255 bytes" })
            }
            name => names.push(name),
        }
    }
    Ok(match names.strip_prefix(root.as_slice()) {
        Some(inside) => {
            let path = escape(&inside.join(&b'/'));
            (Resource::Workspace { path: path.clone() }, path)
        }
        None => {
            let path = format!("/{}", escape(&names.join(&b'/')));
            (Resource::Host { path: path.clone() }, path)
        }
    })
}

fn components(path: &[u8]) -> impl Iterator<Item = &[u8]> {
    path.split(|byte| *byte == b'/').filter(|name| !matches!(*name, b"" | b"."))
}

/// The bytes that a written path stands for. Takes also what need not have been escaped, and dots and slashes as a
/// program gives them: what it locates is written the one way.
fn unescape(field: &'static str, text: &str) -> Result<Vec<u8>, Malformed> {
    let wrong = Malformed::Path { field, why: "has a backslash that is neither `\\\\` nor `\\xNN`" };
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&first, after)) = rest.split_first() {
        match (first, after) {
            (b'\\', [b'\\', after @ ..]) => {
                bytes.push(b'\\');
                rest = after;
            }
            (b'\\', [b'x', high, low, after @ ..]) => {
                let mut byte = [0];
                if hex::decode_to_slice([*high, *low], &mut byte).is_err() {
                    return Err(wrong);
                }
                bytes.push(byte[0]);
                rest = after;
            }
            (b'\\', _) => return Err(wrong),
            (byte, after) => {
                bytes.push(byte);
                rest = after;
            }
        }
    }
    Ok(bytes)
}

fn typed<T: DeserializeOwned>(kind: Kind, fields: Map<String, Value>) -> Result<T, Malformed> {
    T::deserialize(Value::Object(fields)).map_err(|cause| Malformed::Fields { kind, cause })
}

/// Parses a JSON object without duplicates and without deep nesting.
///
/// # Errors
/// As serde_json, and for what it would accept: a name twice, or more than eight levels.
pub fn object(body: &[u8]) -> Result<Map<String, Value>, Malformed> {
    let mut reader = serde_json::Deserializer::from_slice(body);
    let value = Strict { depth: MAX_DEPTH }.deserialize(&mut reader).map_err(Malformed::Json)?;
    reader.end().map_err(Malformed::Json)?;
    match value {
        Value::Object(fields) => Ok(fields),
        _ => Err(Malformed::Json(serde_json::Error::custom("an object was expected"))),
    }
}

/// Reads any JSON value, strictly.
struct Strict {
    depth: usize,
}

impl Strict {
    fn deeper<E: serde::de::Error>(&self) -> Result<Strict, E> {
        match self.depth.checked_sub(1) {
            Some(depth) => Ok(Strict { depth }),
            None => Err(E::custom("nested more than 8 levels deep")),
        }
    }
}

impl<'de> DeserializeSeed<'de> for Strict {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Strict {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E: serde::de::Error>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E: serde::de::Error>(self, value: bool) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E: serde::de::Error>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E: serde::de::Error>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E: serde::de::Error>(self, _value: f64) -> Result<Value, E> {
        Err(E::custom("numbers are integers here"))
    }

    fn visit_str<E: serde::de::Error>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Value, A::Error> {
        let mut values = Vec::new();
        while let Some(value) = list.next_element_seed(self.deeper()?)? {
            values.push(value);
        }
        Ok(Value::Array(values))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Value, A::Error> {
        let mut fields = Map::new();
        while let Some(name) = map.next_key::<String>()? {
            let value = map.next_value_seed(self.deeper()?)?;
            if fields.contains_key(&name) {
                return Err(A::Error::custom(format_args!("{name:?} is given twice")));
            }
            fields.insert(name, value);
        }
        Ok(Value::Object(fields))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn place() -> Place {
        Place { run: RunId("abcdefghijk1".to_owned()), workspace: b"/home/agent/proj".to_vec() }
    }

    fn ask(body: &str) -> Result<Ask, Malformed> {
        parse(body.as_bytes(), &place())
    }

    fn resource(path: &str) -> Resource {
        let body = serde_json::json!({"kind": "fs/list", "path": path}).to_string();
        ask(&body).expect("is well-formed").resource
    }

    #[test]
    fn spellings_of_one_path_are_one_resource() {
        let inside = |path: &str| Resource::Workspace { path: path.to_owned() };
        let host = |path: &str| Resource::Host { path: path.to_owned() };
        let rows = [
            ("", inside("")),
            (".", inside("")),
            ("a/b", inside("a/b")),
            ("./a//b/", inside("a/b")),
            ("a/../b", inside("b")),
            ("/home/agent/proj", inside("")),
            ("/home/agent/proj/a", inside("a")),
            ("/home/agent/../agent/proj/a", inside("a")),
            ("../proj/a", inside("a")),
            ("a\\x62", inside("ab")),
            ("a\\xff", inside("a\\xff")),
            ("a\\\\b", inside("a\\\\b")),
            ("/home/agent/project", host("/home/agent/project")),
            ("..", host("/home/agent")),
            ("../../../../../etc/passwd", host("/etc/passwd")),
            ("/proc/1/environ", host("/proc/1/environ")),
            ("/", host("/")),
        ];
        for (path, expected) in rows {
            assert_eq!(resource(path), expected, "{path:?}");
        }
    }

    #[test]
    fn a_move_out_of_the_workspace_has_the_outside_as_its_resource() {
        let to = ask(r#"{"kind":"fs/move","path":"a","to":"/etc/cron.d/x"}"#).expect("is well-formed");
        assert_eq!(to.resource, Resource::Host { path: "/etc/cron.d/x".to_owned() });
        let from = ask(r#"{"kind":"fs/move","path":"/etc/passwd","to":"a"}"#).expect("is well-formed");
        assert_eq!(from.resource, Resource::Host { path: "/etc/passwd".to_owned() });
    }

    #[test]
    fn what_is_not_exactly_a_request_is_refused_with_its_type() {
        let deep = format!(r#"{{"kind":"fs/list","path":{}1{}}}"#, "[".repeat(9), "]".repeat(9));
        let deeper = format!(r#"{{"kind":"fs/list","path":{}"#, "[".repeat(60_000));
        let long = format!(r#"{{"kind":"fs/list","path":"{}"}}"#, "a/".repeat(3000));
        let name = format!(r#"{{"kind":"fs/list","path":"{}"}}"#, "a".repeat(256));
        let rows = [
            ("", "malformed"),
            ("[]", "malformed"),
            ("null", "malformed"),
            ("{}", "malformed"),
            ("{\"kind\":\"fs/list\",\"path\":\"a\"}x", "malformed"),
            (r#"{"kind":7}"#, "malformed"),
            (r#"{"kind":"fs/list"}"#, "malformed"),
            (r#"{"kind":"fs/list","path":null}"#, "malformed"),
            (r#"{"kind":"fs/list","path":"a","path":"b"}"#, "malformed"),
            (r#"{"kind":"fs/list","path":"a","kind":"fs/read"}"#, "malformed"),
            (r#"{"kind":"fs/list","path":"a","depth":1}"#, "malformed"),
            (r#"{"kind":"fs/list","path":"a\u0000b"}"#, "malformed"),
            (r#"{"kind":"fs/list","path":"a\\b"}"#, "malformed"),
            (r#"{"kind":"fs/list","path":"\ud800"}"#, "malformed"),
            (r#"{"kind":"fs/read","path":"a","offset":-1}"#, "malformed"),
            (r#"{"kind":"fs/read","path":"a","offset":1.5}"#, "malformed"),
            (r#"{"kind":"fs/read","path":"a","offset":18446744073709551615}"#, "malformed"),
            (r#"{"kind":"fs/read","path":"a","limit":8388609}"#, "malformed"),
            (r#"{"kind":"fs/write","path":"a"}"#, "malformed"),
            (r#"{"kind":"fs/write","path":"a","text":"a","content":"YQ=="}"#, "malformed"),
            (r#"{"kind":"fs/write","path":"a","content":"YQ"}"#, "malformed"),
            (r#"{"kind":"fs/write","path":"a","text":"a","mode":"04755"}"#, "malformed"),
            (r#"{"kind":"fs/write","path":"a","text":"a","mode":"+644"}"#, "malformed"),
            (r#"{"kind":"fs/write","path":"a","text":"a","mode":420}"#, "malformed"),
            (r#"{"kind":"fs/write","path":"a","text":"a","target":"b"}"#, "malformed"),
            (r#"{"kind":"fs/write","path":"a","type":"link"}"#, "malformed"),
            (r#"{"kind":"fs/write","path":"a","type":"link","target":""}"#, "malformed"),
            (r#"{"kind":"fs/write","path":"a","type":"attributes"}"#, "malformed"),
            (r#"{"kind":"fs/write","path":"a","type":"device"}"#, "malformed"),
            (r#"{"kind":"fs/write","path":"a","text":"a","expect":"sha256:00"}"#, "malformed"),
            (r#"{"kind":"run/start","command":[]}"#, "malformed"),
            (r#"{"kind":"run/start","command":["a"],"environment":["A=secret"]}"#, "malformed"),
            (&deep, "malformed"),
            (&deeper, "malformed"),
            (&long, "malformed"),
            (&name, "malformed"),
            (r#"{"kind":"receipt/write"}"#, "unknown-kind"),
            (r#"{"kind":"FS/READ","path":"a"}"#, "unknown-kind"),
            (r#"{"kind":"net/connect","to":"a:1"}"#, "not-at-this-door"),
            (r#"{"kind":"process/exec","path":"/bin/sh"}"#, "not-at-this-door"),
            (r#"{"kind":"api/request","problem":"malformed"}"#, "not-at-this-door"),
            (r#"{"kind":"fs/list","path":"a","subject":{"uid":0}}"#, "identity-in-request"),
            (r#"{"kind":"fs/list","path":"a","run":"other"}"#, "identity-in-request"),
            (r#"{"kind":"run/cancel","run":"other"}"#, "identity-in-request"),
            (r#"{"kind":"fs/list","path":"a","Author":"root"}"#, "identity-in-request"),
        ];
        for (body, problem) in rows {
            let refused = ask(body).expect_err(body);
            assert_eq!(refused.problem(), problem, "{body:.100}: {refused}");
            assert!(!refused.hint().is_empty());
        }
    }

    #[test]
    fn each_kind_of_node_is_understood() {
        let node = |body: &str| match ask(body).expect(body).request {
            Request::Fs(fs::Request::Write { node, .. }) => node,
            other => panic!("{other:?}"),
        };
        let digest = Digest::of(b"hi");
        let file = fs::Node::File { digest, bytes: 2, mode: 0o644 };
        assert_eq!(node(r#"{"kind":"fs/write","path":"a","text":"hi"}"#), file);
        assert_eq!(node(r#"{"kind":"fs/write","path":"a","content":"aGk="}"#), file);
        assert_eq!(
            node(r#"{"kind":"fs/write","path":"a","text":"hi","mode":"0755"}"#),
            fs::Node::File { digest, bytes: 2, mode: 0o755 }
        );
        assert_eq!(node(r#"{"kind":"fs/write","path":"a","type":"directory"}"#), fs::Node::Directory { mode: 0o755 });
        assert_eq!(
            node(r#"{"kind":"fs/write","path":"a","type":"link","target":"../b"}"#),
            fs::Node::Link { target: "../b".to_owned() }
        );
        assert_eq!(
            node(r#"{"kind":"fs/write","path":"a","type":"attributes","mode":"600"}"#),
            fs::Node::Attributes { mode: 0o600 }
        );
    }

    #[test]
    fn a_question_needs_no_content() {
        let pairs = |query: &str| super::super::http::query(query).expect("is well-formed");
        let asked = why(pairs("kind=fs/write&path=a&bytes=500"), &place()).expect("is well-formed");
        let Request::Fs(request) = asked.request else { panic!("not a file's request") };
        assert_eq!(request.bytes(), 500);
        let asked = why(pairs("kind=run/start&command=sh&command=-c"), &place()).expect("is well-formed");
        assert!(matches!(asked.request, Request::Run(run::Request::Start { command, .. }) if command == ["sh", "-c"]));
        assert!(why(pairs("kind=fs/list&path=a&path=b"), &place()).is_err());
        assert!(why(pairs("kind=fs/list&path=a&run=x"), &place()).is_err());
        assert!(why(pairs("path=a"), &place()).is_err());
    }

    proptest! {
        #[test]
        fn no_bytes_panic(bytes: Vec<u8>) {
            let _ = parse(&bytes, &place());
        }

        #[test]
        fn a_mutated_request_never_names_another_run(at in 0usize..60, byte: u8) {
            let mut body = br#"{"kind":"fs/write","path":"a/b","text":"hi","mode":"0644"}"#.to_vec();
            let length = body.len();
            body[at % length] = byte;
            if let Ok(ask) = parse(&body, &place()) {
                let is_path = matches!(ask.resource, Resource::Workspace { .. } | Resource::Host { .. });
                prop_assert!(is_path);
            }
        }

        #[test]
        fn a_located_path_is_normal_and_locates_to_itself(path in "[a./\\\\é]{0,24}") {
            let (first, text) = locate("path", path.as_bytes(), &place()).expect("is short and without zero bytes");
            if let Resource::Workspace { .. } = first {
                prop_assert!(text.split('/').all(|name| name != "." && name != ".."));
            }
            let again = locate("path", &unescape("path", &text).expect("is escaped"), &place()).expect("is a path");
            prop_assert_eq!((first, text), again);
        }

        #[test]
        fn unescape_undoes_escape(bytes: Vec<u8>) {
            prop_assert_eq!(unescape("path", &escape(&bytes)).expect("is escaped"), bytes);
        }
    }
}
