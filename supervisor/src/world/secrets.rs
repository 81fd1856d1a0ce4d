//! Secrets: values that a program uses and never sees.
//!
//! The program holds a placeholder. When a request that carries one has passed the chain, its value is put in here, at
//! the last moment, and what comes back is looked through for it. Values live in this process's memory only: nothing
//! here prints, serialises or compares one in the open.

use crate::{
    effect::{
        base64,
        http::{Request, SecretUse},
    },
    policy::secret::{Secret, SecretOrigin, SecretPlace, SecretSource},
};
use aho_corasick::{AhoCorasick, MatchKind};
use hyper::{
    body::{Body, Bytes, Frame},
    header::{self, HeaderMap, HeaderValue},
    http::request::Parts,
    Uri,
};
use std::{
    collections::VecDeque,
    ffi::OsString,
    fmt, fs,
    path::{Path, PathBuf},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};
use zeroize::Zeroizing;

/// The shortest value that can be a secret, in bytes: a shorter one stands in every other text by chance, and taking it
/// out of answers would spoil them.
const SHORTEST: usize = 8;

/// The longest value, in bytes: a header holds little more.
const LONGEST: usize = 8 * 1024;

/// The variable by which systemd says where credentials are (systemd.exec(5), `$CREDENTIALS_DIRECTORY`).
const CREDENTIALS: &str = "CREDENTIALS_DIRECTORY";

/// The secrets of one run.
#[derive(Default)]
pub struct Vault {
    held: Vec<Held>,
}

struct Held {
    name: String,
    placeholder: String,
    value: Zeroizing<String>,
    /// Other texts that must not come back: the password within an encoded pair.
    parts: Vec<Zeroizing<String>>,
    to: Vec<SecretOrigin>,
}

impl fmt::Debug for Vault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.held.iter().map(|held| &held.name)).finish()
    }
}

/// A secret that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum SecretError {
    /// Its source cannot be read.
    #[error("the secret {name} comes from {source_text}, which cannot be read: {cause}")]
    Unreadable {
        /// Which.
        name: String,
        /// Where from.
        source_text: String,
        /// Why not.
        cause: std::io::Error,
    },
    /// Its value is none that can be kept a secret or sent.
    #[error("the secret {name} from {source_text} {wrong}")]
    Unusable {
        /// Which.
        name: String,
        /// Where from.
        source_text: String,
        /// What is wrong with it.
        wrong: &'static str,
    },
    /// There is no randomness for its placeholder.
    #[error("no placeholder can be made: {0}")]
    NoRandomness(getrandom::Error),
}

impl Vault {
    /// Reads the values of a policy's secrets. One whose source is not there is absent, and named in the second part.
    ///
    /// # Errors
    ///
    /// [`SecretError`], which never shows a value.
    pub fn open(secrets: &[Secret], environment: &[(OsString, OsString)]) -> Result<(Vault, Vec<String>), SecretError> {
        let mut vault = Vault::default();
        let mut absent = Vec::new();
        for secret in secrets {
            let unusable = |wrong| SecretError::Unusable {
                name: secret.name.clone(),
                source_text: secret.from.to_string(),
                wrong,
            };
            let Some((value, parts)) = read(secret, &secret.from, environment)? else {
                absent.push(format!("the secret {} is absent: there is no value in {}", secret.name, secret.from));
                continue;
            };
            match value.len() {
                0..SHORTEST => return Err(unusable("is shorter than 8 bytes, too short to be told from other text")),
                SHORTEST..=LONGEST => {}
                _ => return Err(unusable("is longer than 8 KiB")),
            }
            if value.bytes().any(|byte| byte.is_ascii_control()) {
                return Err(unusable("holds a line break or another control character, which no header can"));
            }
            let mut random = [0; 12];
            getrandom::fill(&mut random).map_err(SecretError::NoRandomness)?;
            let placeholder = format!("tollgate-secret-{}", hex::encode(random));
            vault.held.push(Held { name: secret.name.clone(), placeholder, value, parts, to: secret.to.clone() });
        }
        Ok((vault, absent))
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.held.is_empty()
    }

    /// What the program is given: names and placeholders.
    pub fn placeholders(&self) -> impl Iterator<Item = (&str, &str)> {
        self.held.iter().map(|held| (&*held.name, &*held.placeholder))
    }

    /// The placeholders in a request, and where each stands. `body` is the content, where it is there as a whole.
    pub fn uses(&self, parts: &Parts, body: Option<&[u8]>) -> Vec<SecretUse> {
        let mut found = Vec::new();
        for held in &self.held {
            let mut note = |place: String| found.push(SecretUse { name: held.name.clone(), place });
            if unescaped(parts.uri.path()).contains(&held.placeholder) {
                note("path".to_owned());
            }
            for (key, value) in parameters(parts.uri.query().unwrap_or_default()) {
                if unescaped(key).contains(&held.placeholder) {
                    note("query".to_owned());
                } else if unescaped(value).contains(&held.placeholder) {
                    note(SecretPlace::Query(key.to_owned()).to_string());
                }
            }
            for (name, value) in &parts.headers {
                // Names of headers are in lower case, as the placeholder is.
                if name.as_str().contains(&held.placeholder) {
                    note("header".to_owned());
                }
                let basic = (name == header::AUTHORIZATION).then(|| basic_pair(value)).flatten();
                if contains(value.as_bytes(), &held.placeholder)
                    || basic.is_some_and(|it| it.contains(&held.placeholder))
                {
                    note(SecretPlace::Header(name.as_str().to_owned()).to_string());
                }
            }
            if body.is_some_and(|body| contains(body, &held.placeholder)) {
                note(SecretPlace::Body.to_string());
            }
        }
        found.sort();
        found.dedup();
        found
    }

    /// Puts the values in where the chain let placeholders through: the new content, if it changed.
    pub fn fill(&self, request: &Request, parts: &mut Parts, body: Option<&Bytes>) -> Option<Bytes> {
        let mut content: Option<Vec<u8>> = None;
        for used in &request.secrets {
            let Some(held) = self.held.iter().find(|held| held.name == used.name) else { continue };
            match SecretPlace::parse(&used.place) {
                Ok(SecretPlace::Header(name)) => held.fill_header(&mut parts.headers, &name),
                Ok(SecretPlace::Query(key)) => held.fill_query(&mut parts.uri, &key),
                Ok(SecretPlace::Body) => {
                    let now = content.take().or_else(|| body.map(|body| body.to_vec())).unwrap_or_default();
                    content = Some(replaced(&now, held.placeholder.as_bytes(), held.value.as_bytes()));
                }
                // The chain admits no other place.
                Err(_no_place) => {}
            }
        }
        content.map(Bytes::from)
    }

    /// What answers of this origin are looked through for; none where no secret goes there.
    pub fn scrub(&self, request: &Request) -> Option<Scrub> {
        let goes =
            |to: &SecretOrigin| to.scheme == request.scheme && to.host == request.host && to.port == request.port;
        let bound: Vec<&Held> = self.held.iter().filter(|held| held.to.iter().any(goes)).collect();
        (!bound.is_empty()).then(|| Scrub::of(&bound))
    }

    /// What request bodies that stream are watched for.
    pub fn watch(&self) -> Option<Watch> {
        (!self.is_empty()).then(|| {
            let texts: Vec<&str> = self.held.iter().map(|held| &*held.placeholder).collect();
            let names = self.held.iter().map(|held| held.name.clone()).collect();
            let longest = texts.iter().map(|text| text.len()).max().unwrap_or(1);
            let search = AhoCorasick::new(&texts).expect("a few short texts make an automaton");
            Watch { search: Arc::new(search), names, longest, tail: Vec::new() }
        })
    }
}

impl Held {
    fn fill_header(&self, headers: &mut HeaderMap, name: &str) {
        for (_, value) in headers.iter_mut().filter(|(known, _)| known.as_str() == name) {
            let filled = match basic_pair(value) {
                Some(pair) if pair.contains(&self.placeholder) => {
                    let pair = Zeroizing::new(pair.replace(&self.placeholder, &self.value));
                    format!("Basic {}", base64::encode(pair.as_bytes())).into_bytes()
                }
                _ => replaced(value.as_bytes(), self.placeholder.as_bytes(), self.value.as_bytes()),
            };
            if let Ok(mut filled) = HeaderValue::from_bytes(&filled) {
                // Not indexed by HTTP/2's compression, and not shown by anybody's debugging.
                filled.set_sensitive(true);
                *value = filled;
            }
        }
    }

    fn fill_query(&self, uri: &mut Uri, key: &str) {
        let query = uri.query().unwrap_or_default();
        let filled: Vec<String> = query
            .split('&')
            .map(|part| match part.split_once('=') {
                Some((name, value)) if name == key => {
                    format!("{name}={}", value.replace(&self.placeholder, &escaped(&self.value)))
                }
                _ => part.to_owned(),
            })
            .collect();
        let target = format!("{}?{}", uri.path(), filled.join("&"));
        let mut parts = uri.clone().into_parts();
        if let Ok(target) = target.parse() {
            parts.path_and_query = Some(target);
        }
        if let Ok(filled) = Uri::from_parts(parts) {
            *uri = filled;
        }
    }
}

type Value = (Zeroizing<String>, Vec<Zeroizing<String>>);

fn read(
    secret: &Secret,
    from: &SecretSource,
    environment: &[(OsString, OsString)],
) -> Result<Option<Value>, SecretError> {
    let unusable = |wrong| SecretError::Unusable { name: secret.name.clone(), source_text: from.to_string(), wrong };
    let variable = |wanted: &str| environment.iter().find(|(name, _)| name == wanted).map(|(_, value)| value);
    let file = |path: &Path| match fs::read(path) {
        Ok(bytes) => {
            let bytes = Zeroizing::new(bytes);
            let text = std::str::from_utf8(&bytes).map_err(|_| unusable("is no text"))?;
            let text = text.strip_suffix('\n').unwrap_or(text);
            Ok(Some((Zeroizing::new(text.strip_suffix('\r').unwrap_or(text).to_owned()), Vec::new())))
        }
        Err(cause) if cause.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(cause) => Err(SecretError::Unreadable { name: secret.name.clone(), source_text: from.to_string(), cause }),
    };
    match from {
        SecretSource::Env(name) => match variable(name) {
            None => Ok(None),
            Some(value) if value.is_empty() => Ok(None),
            Some(value) => {
                let text = value.to_str().ok_or_else(|| unusable("is no text"))?;
                Ok(Some((Zeroizing::new(text.to_owned()), Vec::new())))
            }
        },
        SecretSource::File(path) => file(path),
        SecretSource::Credential(name) => match variable(CREDENTIALS) {
            Some(folder) => file(&PathBuf::from(folder).join(name)),
            None => Ok(None),
        },
        SecretSource::Basic { user, password } => {
            let Some((password, _)) = read(secret, password, environment)? else { return Ok(None) };
            let pair = Zeroizing::new(format!("{user}:{}", *password));
            let parts = if password.len() < SHORTEST { Vec::new() } else { vec![password] };
            Ok(Some((Zeroizing::new(base64::encode(pair.as_bytes())), parts)))
        }
    }
}

/// The name and password of a header of the Basic scheme (RFC 7617).
fn basic_pair(value: &HeaderValue) -> Option<String> {
    let text = value.to_str().ok()?;
    let (scheme, rest) = text.split_once(' ')?;
    let pair = scheme.eq_ignore_ascii_case("basic").then(|| base64::decode(rest.trim()))??;
    String::from_utf8(pair).ok()
}

fn parameters(query: &str) -> impl Iterator<Item = (&str, &str)> {
    query.split('&').map(|part| part.split_once('=').unwrap_or((part, "")))
}

fn contains(bytes: &[u8], text: &str) -> bool {
    bytes.windows(text.len()).any(|window| window == text.as_bytes())
}

fn replaced(bytes: &[u8], from: &[u8], to: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(bytes.len());
    let mut rest = bytes;
    while let Some(at) = rest.windows(from.len()).position(|window| window == from) {
        out.extend_from_slice(&rest[..at]);
        out.extend_from_slice(to);
        rest = &rest[at + from.len()..];
    }
    out.extend_from_slice(rest);
    out
}

/// With percent-encodings resolved; what is not one stays.
fn unescaped(text: &str) -> String {
    percent_encoding::percent_decode_str(text).decode_utf8_lossy().into_owned()
}

fn escaped(text: &str) -> String {
    percent_encoding::utf8_percent_encode(text, UNRESERVED).to_string()
}

/// All but what a URL leaves as it is (RFC 3986, section 2.3).
const UNRESERVED: &percent_encoding::AsciiSet =
    &percent_encoding::NON_ALPHANUMERIC.remove(b'-').remove(b'_').remove(b'.').remove(b'~');

/// With the five characters that HTML writes otherwise, each by this.
fn entities(text: &str, write: impl Fn(char) -> String) -> String {
    text.chars().map(|one| if "<>&\"'".contains(one) { write(one) } else { one.to_string() }).collect()
}

fn named_entity(one: char) -> String {
    let name = match one {
        '<' => "&lt;",
        '>' => "&gt;",
        '&' => "&amp;",
        '"' => "&quot;",
        _ => "&apos;",
    };
    name.to_owned()
}

/// The forms in which a value may come back: as it is, as JSON has it, in percent-encoding, hexadecimal, and Base64 of
/// either alphabet at each of the three places that it can have in a longer text.
fn forms(value: &str) -> Vec<Vec<u8>> {
    let mut forms = vec![value.as_bytes().to_vec()];
    if let Ok(json) = serde_json::to_string(value) {
        let json = &json[1..json.len() - 1];
        forms.push(json.as_bytes().to_vec());
        forms.push(json.replace('/', "\\/").into_bytes());
    }
    let units = || value.encode_utf16();
    forms.push(units().map(|unit| format!("\\u{unit:04x}")).collect::<String>().into_bytes());
    forms.push(units().map(|unit| format!("\\u{unit:04X}")).collect::<String>().into_bytes());
    forms.push(entities(value, named_entity).into_bytes());
    forms.push(entities(value, |one| format!("&#{};", u32::from(one))).into_bytes());
    forms.push(entities(value, |one| format!("&#x{:x};", u32::from(one))).into_bytes());
    forms.push(entities(value, |one| format!("&#x{:X};", u32::from(one))).into_bytes());
    // What most libraries write: names for all but the apostrophe.
    let usual = |one| if one == '\'' { "&#39;".to_owned() } else { named_entity(one) };
    forms.push(entities(value, usual).replace("&quot;", "&#34;").into_bytes());
    forms.push(entities(value, usual).into_bytes());
    forms.push(entities(value, |one| if one == '\'' { "&#x27;".to_owned() } else { named_entity(one) }).into_bytes());
    let percent = |set| percent_encoding::utf8_percent_encode(value, set).to_string();
    for text in [percent(percent_encoding::NON_ALPHANUMERIC), percent(UNRESERVED)] {
        forms.push(text.replace("%20", "+").into_bytes());
        forms.push(text.to_ascii_lowercase().into_bytes());
        forms.push(text.into_bytes());
    }
    let digits = hex::encode(value);
    forms.push(digits.to_ascii_uppercase().into_bytes());
    forms.push(digits.into_bytes());
    for before in 0..3 {
        let mut bytes = vec![0; before];
        bytes.extend_from_slice(value.as_bytes());
        let text = base64::encode(&bytes);
        // Characters that hold bits of what stands before or after are not the value's own.
        let (first, last) = ([0, 2, 3][before], bytes.len() * 8 / 6);
        let own = &text.as_bytes()[first..last];
        forms.push(
            own.iter()
                .map(|byte| {
                    if *byte == b'+' {
                        b'-'
                    } else if *byte == b'/' {
                        b'_'
                    } else {
                        *byte
                    }
                })
                .collect(),
        );
        forms.push(own.to_vec());
    }
    forms.retain(|form| form.len() >= SHORTEST);
    forms.sort();
    forms.dedup();
    forms
}

/// Takes values out of what comes back, wherever a piece of it ends.
#[derive(Clone)]
pub struct Scrub {
    search: Arc<AhoCorasick>,
    /// What stands in the place of each form.
    placeholders: Arc<Vec<String>>,
    names: Arc<str>,
    longest: usize,
    kept: Vec<u8>,
}

impl Scrub {
    fn of(held: &[&Held]) -> Scrub {
        let mut texts = Vec::new();
        let mut placeholders = Vec::new();
        for one in held {
            for value in std::iter::once(&one.value).chain(&one.parts) {
                for form in forms(value) {
                    texts.push(Zeroizing::new(form));
                    placeholders.push(one.placeholder.clone());
                }
            }
        }
        let longest = texts.iter().map(|text| text.len()).max().unwrap_or(1);
        let search = AhoCorasick::builder()
            .match_kind(MatchKind::LeftmostLongest)
            .build(texts.iter().map(|text| &text[..]))
            .expect("a few short texts make an automaton");
        let names: Vec<String> = held.iter().map(|one| format!("the secret {}", one.name)).collect();
        let names = names.join(", ").into();
        Scrub { search: Arc::new(search), placeholders: Arc::new(placeholders), names, longest, kept: Vec::new() }
    }

    /// The secrets that it takes out, for people.
    pub fn names(&self) -> &str {
        &self.names
    }

    /// The headers without values.
    pub fn headers(&self, headers: &mut HeaderMap) {
        for value in headers.values_mut() {
            let mut own = Scrub { kept: Vec::new(), ..self.clone() };
            let mut clean = own.pass(value.as_bytes());
            clean.extend(own.finish());
            if clean != value.as_bytes() {
                *value = HeaderValue::from_bytes(&clean).unwrap_or(HeaderValue::from_static(""));
            }
        }
    }

    /// What of the bytes up to here can go on.
    pub fn pass(&mut self, bytes: &[u8]) -> Vec<u8> {
        self.kept.extend_from_slice(bytes);
        // A form that begins before this place is there whole, or not at all.
        let safe = self.kept.len().saturating_sub(self.longest - 1);
        self.release(safe)
    }

    /// The rest.
    pub fn finish(&mut self) -> Vec<u8> {
        let all = self.kept.len();
        self.release(all)
    }

    fn release(&mut self, safe: usize) -> Vec<u8> {
        let mut out = Vec::with_capacity(safe);
        let mut done = 0;
        for found in self.search.find_iter(&self.kept) {
            if found.start() >= safe {
                break;
            }
            out.extend_from_slice(&self.kept[done..found.start()]);
            out.extend_from_slice(self.placeholders[found.pattern().as_usize()].as_bytes());
            done = found.end();
        }
        if done < safe {
            out.extend_from_slice(&self.kept[done..safe]);
            done = safe;
        }
        self.kept.drain(..done);
        out
    }
}

/// A body that is looked through.
pub struct Scrubbed<B> {
    inner: B,
    scrub: Scrub,
    /// What is still to be sent when the inner body has ended.
    last: VecDeque<Frame<Bytes>>,
    ended: bool,
}

impl<B> Scrubbed<B> {
    /// This body, looked through.
    pub fn new(inner: B, scrub: Scrub) -> Scrubbed<B> {
        Scrubbed { inner, scrub, last: VecDeque::new(), ended: false }
    }
}

impl<B: Body<Data = Bytes> + Unpin> Body for Scrubbed<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        loop {
            if let Some(frame) = self.last.pop_front() {
                return Poll::Ready(Some(Ok(frame)));
            }
            if self.ended {
                return Poll::Ready(None);
            }
            match std::task::ready!(Pin::new(&mut self.inner).poll_frame(context)) {
                Some(Err(error)) => return Poll::Ready(Some(Err(error))),
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(bytes) => {
                        let clean = self.scrub.pass(&bytes);
                        if !clean.is_empty() {
                            return Poll::Ready(Some(Ok(Frame::data(clean.into()))));
                        }
                    }
                    Err(other) => {
                        let rest = self.scrub.finish();
                        if !rest.is_empty() {
                            self.last.push_back(Frame::data(rest.into()));
                        }
                        let frame = match other.into_trailers() {
                            Ok(mut trailers) => {
                                self.scrub.headers(&mut trailers);
                                Frame::trailers(trailers)
                            }
                            Err(other) => other,
                        };
                        self.last.push_back(frame);
                    }
                },
                None => {
                    self.ended = true;
                    let rest = self.scrub.finish();
                    if !rest.is_empty() {
                        self.last.push_back(Frame::data(rest.into()));
                    }
                }
            }
        }
    }
}

/// Finds a placeholder in a body that streams, wherever a piece of it ends.
pub struct Watch {
    search: Arc<AhoCorasick>,
    names: Vec<String>,
    longest: usize,
    tail: Vec<u8>,
}

impl Watch {
    /// The secret whose placeholder ends in this piece.
    pub fn finds(&mut self, bytes: &[u8]) -> Option<&str> {
        self.tail.extend_from_slice(bytes);
        let found = self.search.find(&self.tail).map(|found| found.pattern().as_usize());
        let keep = self.tail.len().saturating_sub(self.longest - 1);
        self.tail.drain(..keep);
        found.and_then(|found| self.names.get(found)).map(String::as_str)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::secret::SecretOrigin;
    use hyper::http::Request as Message;
    use proptest::prelude::*;

    const VALUE: &str = "zq9+secret/V<al\"ue=4&'2";

    fn rule(from: SecretSource) -> Secret {
        Secret {
            name: "TOK".into(),
            from,
            to: vec![SecretOrigin::parse("https://api.test").unwrap()],
            places: vec![SecretPlace::Header("authorization".into())],
            methods: Vec::new(),
            rate: None,
            ask: false,
        }
    }

    fn environment(value: &str) -> Vec<(OsString, OsString)> {
        vec![("HOST_TOK".into(), value.into())]
    }

    fn vault(value: &str) -> Vault {
        let (vault, absent) = Vault::open(&[rule(SecretSource::Env("HOST_TOK".into()))], &environment(value)).unwrap();
        assert!(absent.is_empty());
        vault
    }

    fn asked(uses: Vec<SecretUse>) -> Request {
        let crate::effect::Request::Http(request) =
            crate::effect::tests::sample(crate::effect::Kind::HttpRequest).request
        else {
            unreachable!("a request's sample is one")
        };
        Request {
            scheme: crate::effect::http::Scheme::Https,
            host: "api.test".into(),
            port: 443,
            secrets: uses,
            ..request
        }
    }

    fn placeholder(vault: &Vault) -> String {
        vault.placeholders().next().unwrap().1.to_owned()
    }

    fn scrubbed(vault: &Vault, pieces: &[&[u8]]) -> Vec<u8> {
        let mut scrub = vault.scrub(&asked(Vec::new())).unwrap();
        let mut out: Vec<u8> = pieces.iter().flat_map(|piece| scrub.pass(piece)).collect();
        out.extend(scrub.finish());
        out
    }

    #[test]
    fn each_place_of_a_placeholder_is_found_and_filled() {
        let vault = vault(VALUE);
        let it = placeholder(&vault);
        let basic = format!("Basic {}", base64::encode(format!("user:{it}").as_bytes()));
        let (mut parts, ()) = Message::builder()
            .uri(format!("https://api.test/a/b?x=1&key={it}"))
            .header("Authorization", &basic)
            .header("X-Token", format!("Bearer {it}"))
            .body(())
            .unwrap()
            .into_parts();
        let uses = vault.uses(&parts, Some(format!("k={it}").as_bytes()));
        let places: Vec<&str> = uses.iter().map(|used| &*used.place).collect();
        assert_eq!(places, ["body", "header:authorization", "header:x-token", "query:key"]);
        let body = vault.fill(&asked(uses), &mut parts, Some(&Bytes::from(format!("k={it}")))).unwrap();
        assert_eq!(body, format!("k={VALUE}"));
        assert_eq!(parts.headers["x-token"], format!("Bearer {VALUE}"));
        assert_eq!(
            parts.headers["authorization"],
            format!("Basic {}", base64::encode(format!("user:{VALUE}").as_bytes()))
        );
        assert!(parts.uri.query().unwrap().ends_with("key=zq9%2Bsecret%2FV%3Cal%22ue%3D4%26%272"), "{}", parts.uri);
    }

    #[test]
    fn a_placeholder_in_a_path_or_a_name_has_a_place_that_no_policy_can_allow() {
        let vault = vault(VALUE);
        let it = placeholder(&vault);
        let escaped = it.replace('-', "%2d");
        let uri = format!("https://api.test/{escaped}?{it}=1");
        let (parts, ()) = Message::builder().uri(uri).body(()).unwrap().into_parts();
        let places: Vec<String> = vault.uses(&parts, None).into_iter().map(|used| used.place).collect();
        assert_eq!(places, ["path", "query"]);
        assert!(places.iter().all(|place| SecretPlace::parse(place).is_err()));
    }

    #[test]
    fn every_form_of_a_value_is_taken_out_of_an_answer() {
        let vault = vault(VALUE);
        let it = placeholder(&vault);
        for form in forms(VALUE) {
            let text = [b"<", &form[..], b">"].concat();
            let clean = scrubbed(&vault, &[&text]);
            assert_eq!(String::from_utf8(clean).unwrap(), format!("<{it}>"), "{:?}", String::from_utf8_lossy(&form));
        }
        for before in ["", "u", "us", "usr:"] {
            let text = base64::encode(format!("{before}{VALUE}").as_bytes());
            assert!(String::from_utf8(scrubbed(&vault, &[text.as_bytes()])).unwrap().contains(&it), "{before}");
        }
    }

    #[test]
    fn an_unset_source_is_absent_and_a_bad_value_is_refused_without_being_shown() {
        let rule = rule(SecretSource::Env("HOST_TOK".into()));
        for environment in [Vec::new(), environment("")] {
            let (vault, absent) = Vault::open(std::slice::from_ref(&rule), &environment).unwrap();
            assert!(vault.is_empty() && absent.len() == 1);
        }
        for bad in ["zq9sho", "zq9 with\nbreak"] {
            let error = Vault::open(std::slice::from_ref(&rule), &environment(bad)).unwrap_err();
            assert!(!format!("{error} {error:?}").contains("zq9"), "{error}");
        }
        assert!(!format!("{:?}", vault(VALUE)).contains(VALUE));
    }

    #[test]
    fn a_file_and_a_pair_are_sources() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("token");
        fs::write(&path, "zq9-from-a-file\n").unwrap();
        let pair = SecretSource::Basic { user: "me".into(), password: Box::new(SecretSource::File(path.clone())) };
        let (vault, _) = Vault::open(&[rule(pair)], &[]).unwrap();
        assert_eq!(*vault.held[0].value, base64::encode(b"me:zq9-from-a-file"));
        assert!(!String::from_utf8(scrubbed(&vault, &[b"it is zq9-from-a-file"])).unwrap().contains("zq9"));
        let credential = rule(SecretSource::Credential("token".into()));
        let at = vec![(CREDENTIALS.into(), folder.path().as_os_str().to_owned())];
        let (vault, _) = Vault::open(&[credential], &at).unwrap();
        assert_eq!(*vault.held[0].value, "zq9-from-a-file");
    }

    #[test]
    fn another_origin_is_not_looked_through() {
        let other = Request { host: "other.test".into(), ..asked(Vec::new()) };
        assert!(vault(VALUE).scrub(&other).is_none());
    }

    proptest! {
        #[test]
        fn no_cut_lets_a_value_through(
            before in proptest::collection::vec(any::<u8>(), 0..40),
            cuts in proptest::collection::vec(0usize..120, 0..6),
            form in 0usize..forms(VALUE).len(),
        ) {
            let vault = vault(VALUE);
            let text = [&before[..], &forms(VALUE)[form], b" after"].concat();
            let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.min(text.len())).collect();
            cuts.extend([0, text.len()]);
            cuts.sort_unstable();
            let pieces: Vec<&[u8]> = cuts.windows(2).map(|pair| &text[pair[0]..pair[1]]).collect();
            let clean = scrubbed(&vault, &pieces);
            let seen = forms(VALUE).into_iter().any(|form| clean.windows(form.len()).any(|window| window == form));
            prop_assert!(!seen);
            prop_assert!(clean.ends_with(b" after"));
        }

        #[test]
        fn what_holds_no_value_passes_unchanged(text in proptest::collection::vec(any::<u8>(), 0..200)) {
            prop_assert_eq!(scrubbed(&vault(VALUE), &[&text]), text);
        }

        #[test]
        fn a_placeholder_in_a_stream_is_found_wherever_it_is_cut(cut in 0usize..60) {
            let vault = vault(VALUE);
            let text = format!("before {} after", placeholder(&vault)).into_bytes();
            let mut watch = vault.watch().unwrap();
            let (one, two) = text.split_at(cut.min(text.len()));
            let found = watch.finds(one).is_some() || watch.finds(two).is_some();
            prop_assert!(found);
        }
    }
}
