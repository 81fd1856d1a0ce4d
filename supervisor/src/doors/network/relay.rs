//! HTTP requests of the program, one by one: each becomes an effect, and its answer a response.
//!
//! hyper parses. What a request is to be is decided by the chain; here it is only made into data, and its answer into
//! what a client understands: a refusal is a 403 that says what was refused, by whom and what to change.

use super::{names::canonical_host, operation, Door, Line, Target};
use crate::{
    chain::{Answer, Asker, BoxFuture, Decision},
    effect::{self, http::Scheme, Digest, Effect, Kind},
    world::{
        http::{counted, strip_hop_by_hop, Asking, BodyError, Counter, Exchange, Objection, Outgoing, Relayed},
        secrets::Watch,
    },
};
use futures_util::StreamExt as _;
use http_body_util::{combinators::UnsyncBoxBody, BodyExt as _, Empty, Full, StreamBody};
use hyper::{
    body::{Body, Bytes, Frame, Incoming, SizeHint},
    ext::ReasonPhrase,
    header::{self, HeaderName, HeaderValue},
    Method, Request, Response, StatusCode, Uri, Version,
};
use std::{
    collections::VecDeque,
    pin::Pin,
    sync::Arc,
    task::{ready, Context, Poll},
    time::Duration,
};
use tokio::{
    runtime::Handle,
    sync::{oneshot, watch},
    time::timeout,
};

/// The longest body that is held until the effect is decided, so that its digest is part of the effect. A longer one
/// streams.
const MOST_HELD: usize = 64 * 1024;

/// How long content that nobody wants is read.
const UNWANTED: Duration = Duration::from_secs(30);

/// The body of a response to the program.
pub type Reply = UnsyncBoxBody<Bytes, BodyError>;

/// A connection that is to be reset: nothing else is said.
#[derive(Debug, thiserror::Error)]
#[error("the connection is reset")]
pub struct Reset;

/// Serves one request on a connection to this target.
///
/// # Errors
///
/// [`Reset`], where the program is to see a connection that breaks.
pub(super) async fn serve(
    door: Arc<Door>,
    target: Arc<Target>,
    scheme: Scheme,
    line: Arc<Line>,
    request: Request<Incoming>,
) -> Result<Response<Reply>, Reset> {
    let version = request.version();
    let prepared = prepare(&door, &target, scheme, request).await;
    let Prepared { effect, asking, objection, body_of_head } = prepared;
    let (front, head) = oneshot::channel();
    let (_here, gone) = watch::channel(());
    let vault = Arc::clone(&door.vault);
    let exchange = Exchange::new(Arc::clone(door.clients()), asking, front, door.delivery, vault, objection);
    let (chain, done) = (Arc::clone(&door.chain), oneshot::channel());
    let (tell, told) = done;
    door.spawn(async move {
        let answer = chain.perform_for(&effect, &exchange, &Waiting(gone)).await;
        let _ = tell.send(answer);
    });
    // Where the answer went to the program as it came, this is how; else the chain's answer is all there is.
    if let Ok(response) = head.await {
        return Ok(response.map(Relayed::boxed_unsync));
    }
    let Ok(answer) = told.await else { return Err(Reset) };
    let response = respond(&answer, version, body_of_head);
    // One stream of several is reset by itself.
    if response.is_err() && version < Version::HTTP_2 {
        line.reset();
    }
    response
}

/// The program at the other end of a connection.
struct Waiting(watch::Receiver<()>);

impl Asker for Waiting {
    fn gone<'a>(&'a self) -> BoxFuture<'a, ()> {
        let mut gone = self.0.clone();
        Box::pin(async move { while gone.changed().await.is_ok() {} })
    }
}

/// A request as data, and as it goes on.
struct Prepared {
    effect: Effect,
    asking: Asking,
    objection: Option<Answer>,
    /// Whether the answer's body is only announced.
    body_of_head: bool,
}

/// The rest of a request's content. An answer can come before all of it was read, and then the program is still sending:
/// to close on it would lose the answer, by a reset of the stream or the connection. So what nobody wants is read and
/// thrown away for a while.
struct Rest {
    content: Option<Incoming>,
    /// Whether the program is sending: not one that waits for the word to do so.
    sending: bool,
}

impl Body for Rest {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        self.sending = true;
        let Some(content) = &mut self.content else { return Poll::Ready(None) };
        let frame = ready!(Pin::new(content).poll_frame(cx));
        if !matches!(frame, Some(Ok(_))) {
            self.content = None;
        }
        Poll::Ready(frame.map(|frame| frame.map_err(BodyError::from)))
    }

    fn is_end_stream(&self) -> bool {
        self.content.as_ref().is_none_or(Incoming::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.content.as_ref().map_or_else(|| SizeHint::with_exact(0), Incoming::size_hint)
    }
}

impl Drop for Rest {
    fn drop(&mut self) {
        let unwanted = self.content.take().filter(|content| self.sending && !content.is_end_stream());
        if let (Some(mut content), Ok(runtime)) = (unwanted, Handle::try_current()) {
            let read = async move { while let Some(Ok(_)) = content.frame().await {} };
            runtime.spawn(timeout(UNWANTED, read));
        }
    }
}

async fn prepare(door: &Door, target: &Target, scheme: Scheme, mut request: Request<Incoming>) -> Prepared {
    let objection = objection(target, scheme, &request);
    let upgrade = request.headers().contains_key(header::UPGRADE).then(|| hyper::upgrade::on(&mut request));
    let (mut parts, body) = request.into_parts();
    let path = match parts.uri.path_and_query() {
        Some(path) => path.as_str().to_owned(),
        None => "/".to_owned(),
    };
    let content_type =
        parts.headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default().to_owned();
    let mut operation = operation::of_target(parts.method.as_str(), parts.uri.path(), parts.uri.query());
    let readable = operation.is_none()
        && operation::may_be_graphql(&content_type)
        && !parts.headers.contains_key(header::CONTENT_ENCODING);
    // A program that asks before it sends is told to send only when the request is admitted.
    let waits = parts.headers.remove(header::EXPECT).is_some();
    let (held, rest) = match waits || objection.is_some() {
        true => (Held::default(), Some(body)),
        false => hold(body, if readable { operation::MOST_READ } else { MOST_HELD }).await,
    };
    let rest = rest.map(|content| Rest { content: Some(content), sending: !waits });
    let announced = parts.headers.get(header::CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse().ok());
    let carried = match (&rest, held.bytes) {
        (None, 0) => effect::http::Body::Empty,
        (None, size) => effect::http::Body::Known { digest: held.digest(), size: size as u64 },
        (Some(body), _) if body.is_end_stream() && held.bytes == 0 => effect::http::Body::Empty,
        (Some(_), _) => effect::http::Body::Streamed { announced },
    };
    if operation.is_none() {
        let body = (readable && rest.is_none()).then(|| held.joined());
        operation = operation::of_graphql(parts.uri.query(), &content_type, body.as_deref());
    }
    let content = rest.is_none().then(|| Bytes::from(held.joined()));
    let secrets = door.vault.uses(&parts, content.as_deref());
    let asked = effect::http::Request {
        method: parts.method.as_str().to_owned(),
        scheme,
        host: target.host.clone(),
        port: target.port,
        path: path.clone(),
        body: carried,
        operation: operation.map(str::to_owned),
        secrets,
    };
    let uri = Uri::builder()
        .scheme(scheme.name())
        .authority(authority(target, scheme))
        .path_and_query(if path == "*" { "/" } else { &path })
        .build();
    let objection = objection.or_else(|| {
        uri.is_err().then(|| {
            Answer::refused(
                "containment",
                format!("`{path}` is no target of a request"),
                "write the URL as RFC 3986 has it",
            )
        })
    });
    parts.uri = uri.unwrap_or_default();
    let sent = Arc::new(Counter::default());
    let body = held.followed_by(rest, &sent, door.vault.watch());
    strip_hop_by_hop(&mut parts.headers);
    if parts.headers.contains_key(header::UPGRADE) && upgrade.is_none() {
        parts.headers.remove(header::UPGRADE);
    }
    let body_of_head = parts.method == Method::HEAD;
    let effect = Effect {
        kind: Kind::HttpRequest,
        resource: asked.resource(),
        subject: door.subject.clone(),
        room: door.room.clone(),
        door: effect::Door::Network,
        request: effect::Request::Http(asked),
    };
    let asking = Asking { request: Request::from_parts(parts, body), upgrade, content, sent };
    Prepared { effect, asking, objection, body_of_head }
}

fn authority(target: &Target, scheme: Scheme) -> String {
    let host = effect::net::bracketed(&target.host);
    match target.port == scheme.default_port() {
        true => host,
        false => format!("{host}:{}", target.port),
    }
}

/// What is wrong with the request whatever the policies say: it is not addressed to where its connection leads.
fn objection(target: &Target, scheme: Scheme, request: &Request<Incoming>) -> Option<Answer> {
    let refused = |reason: String, hint: &str| Some(Answer::refused("containment", reason, hint));
    if request.method() == Method::CONNECT {
        let wanted = request.uri().to_string();
        return refused(
            format!(
                "CONNECT asks `{}` to be a proxy to `{}`, and a run's requests go through none",
                target.host,
                wanted.escape_debug()
            ),
            "connect to the server itself; no proxy setting is needed in a run",
        );
    }
    let said = target.tls_name.as_deref();
    if let Some(name) = said.filter(|name| canonical_host(name).as_deref() != Some(&*target.host)) {
        let shown = name.escape_debug();
        return refused(
            format!("the connection is to `{}`, and its TLS handshake names `{shown}`", target.host),
            "connect to the host that the request is for",
        );
    }
    let mut named: Vec<String> = Vec::new();
    for value in request.headers().get_all(header::HOST) {
        named.push(String::from_utf8_lossy(value.as_bytes()).into_owned());
    }
    if named.len() > 1 {
        return refused("the request has more than one Host header".to_owned(), "send one");
    }
    named.extend(request.uri().authority().map(|authority| authority.to_string()));
    if let Some(other) = request.uri().scheme_str().filter(|other| *other != scheme.name()) {
        return refused(format!("the request's scheme is `{other}` on a connection of `{scheme}`"), "use one of them");
    }
    if named.is_empty() && request.version() != Version::HTTP_10 {
        return refused("the request names no host".to_owned(), "send a Host header (RFC 9110, section 7.2)");
    }
    for authority in named {
        if !target.is_named_by(&authority, scheme) {
            let shown = authority.escape_debug();
            return refused(
                format!(
                    "the connection is to `{}:{}`, and the request is addressed to `{shown}`",
                    target.host, target.port
                ),
                "connect to the host that the request is for",
            );
        }
    }
    None
}

impl Target {
    /// Whether an authority, as a Host header or a target has it, is this target.
    fn is_named_by(&self, authority: &str, scheme: Scheme) -> bool {
        // No user information: what stands before an `@` would be taken for the host by others.
        let Ok(authority) = authority.parse::<hyper::http::uri::Authority>() else { return false };
        if authority.as_str().contains('@') || authority.port_u16().unwrap_or(scheme.default_port()) != self.port {
            return false;
        }
        let host = authority.host();
        let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        if let Ok(address) = bare.parse::<std::net::IpAddr>() {
            return self.host.parse() == Ok(address);
        }
        let named = canonical_host(host);
        named.as_deref() == Some(&*self.host) || (self.loopback && named.as_deref() == Some("localhost"))
    }
}

/// The pieces of a body that are there before the effect is decided.
#[derive(Default)]
struct Held {
    frames: VecDeque<Frame<Bytes>>,
    bytes: usize,
}

/// Reads a body up to a size: what was read, and the rest if there is one.
async fn hold(mut body: Incoming, most: usize) -> (Held, Option<Incoming>) {
    let mut held = Held::default();
    // Known to be too long: nothing need be held, and what streams streams at once.
    if body.size_hint().lower() > most as u64 {
        return (held, Some(body));
    }
    loop {
        match body.frame().await {
            None => return (held, None),
            Some(Ok(frame)) => {
                held.bytes += frame.data_ref().map_or(0, Bytes::len);
                held.frames.push_back(frame);
                if held.bytes > most {
                    return (held, Some(body));
                }
            }
            // The same error comes again where the body is read on, and ends the request there.
            Some(Err(_broken)) => return (held, Some(body)),
        }
    }
}

impl Held {
    fn joined(&self) -> Vec<u8> {
        self.frames.iter().filter_map(Frame::data_ref).flatten().copied().collect()
    }

    fn digest(&self) -> Digest {
        Digest::of(&self.joined())
    }

    fn followed_by(self, rest: Option<Rest>, sent: &Arc<Counter>, watch: Option<Watch>) -> Outgoing {
        match rest {
            Some(body) if self.frames.is_empty() && watch.is_none() => counted(body, sent),
            None if self.frames.is_empty() => Empty::new().map_err(|never| match never {}).boxed_unsync(),
            // One piece, so that its length is known and announced again.
            None if self.frames.iter().all(Frame::is_data) => {
                let whole = Bytes::from(self.joined());
                counted(Full::new(whole).map_err(|never| match never {}), sent)
            }
            rest => {
                let first = futures_util::stream::iter(self.frames.into_iter().map(Ok));
                let then = futures_util::stream::unfold(rest, |rest| async move {
                    let mut body = rest?;
                    let frame = body.frame().await?;
                    Some((frame, Some(body)))
                });
                let all = first.chain(then).map(watched(watch));
                counted(StreamBody::new(Box::pin(all)), sent)
            }
        }
    }
}

/// Ends a body at a placeholder: it streams, so nobody could say beforehand that the request carries one.
fn watched(mut watch: Option<Watch>) -> impl FnMut(Result<Frame<Bytes>, BodyError>) -> Result<Frame<Bytes>, BodyError> {
    move |frame| {
        let frame = frame?;
        let found = watch.as_mut().zip(frame.data_ref()).and_then(|(watch, bytes)| watch.finds(bytes));
        match found {
            None => Ok(frame),
            Some(name) => Err(Box::new(Objection(Box::new(Answer::refused(
                "secrets",
                format!("the content of the request, which streams, holds the placeholder of the secret {name}"),
                "send it in a header or parameter that the policy binds it to, or in a short content",
            ))))),
        }
    }
}

/// What the program is told.
fn respond(answer: &Answer, version: Version, body_of_head: bool) -> Result<Response<Reply>, Reset> {
    let flag = |name: &str| answer.value.get(name).and_then(serde_json::Value::as_bool) == Some(true);
    // What breaks off without a body to break off in is a fault on bytes that are not here.
    if flag("reset") || flag("timeout") || (answer.cut && answer.body.is_none()) {
        return Err(Reset);
    }
    let status = answer.value.get("status").and_then(serde_json::Value::as_u64);
    let status = status.and_then(|status| StatusCode::from_u16(u16::try_from(status).ok()?).ok());
    match status {
        Some(status) => from_data(answer, status, body_of_head),
        None => Ok(refusal(answer, version)),
    }
}

/// A response that a handler made or kept: status, headers, body, trailers.
fn from_data(answer: &Answer, status: StatusCode, body_of_head: bool) -> Result<Response<Reply>, Reset> {
    let bytes = Bytes::from(answer.body.clone().unwrap_or_default());
    let whole = bytes.len();
    let mut trailers = hyper::HeaderMap::new();
    add_fields(&mut trailers, answer.value.get("trailers"));
    let frames = match answer.cut {
        true => vec![
            Ok(Frame::data(bytes.slice(..whole / 2))),
            Err(BodyError::from("the answer breaks off here, by a fault rule")),
        ],
        false if trailers.is_empty() => vec![Ok(Frame::data(bytes))],
        false => vec![Ok(Frame::data(bytes)), Ok(Frame::trailers(trailers.clone()))],
    };
    // An answer that came without its length goes without it.
    let without_length =
        answer.value.get("headers").is_some_and(|fields| !names(fields, "content-length")) && !answer.injected;
    let body: Reply = match (body_of_head, whole, answer.cut || without_length || !trailers.is_empty()) {
        (true, ..) | (false, 0, false) => Empty::new().map_err(|never| match never {}).boxed_unsync(),
        (false, _, true) => StreamBody::new(futures_util::stream::iter(frames)).boxed_unsync(),
        (false, _, false) => Full::new(Bytes::from(answer.body.clone().unwrap_or_default()))
            .map_err(|never| match never {})
            .boxed_unsync(),
    };
    let mut response = Response::new(body);
    *response.status_mut() = status;
    add_fields(response.headers_mut(), answer.value.get("headers"));
    response.headers_mut().remove(header::TRANSFER_ENCODING);
    response.headers_mut().remove(header::CONNECTION);
    // A fault may have made the body shorter; a body that breaks off announces what never comes.
    if !body_of_head && trailers.is_empty() && !without_length && answer.body.is_some() {
        response.headers_mut().insert(header::CONTENT_LENGTH, HeaderValue::from(whole as u64));
    }
    Ok(response)
}

/// Whether a field of this name is among them.
fn names(fields: &serde_json::Value, name: &str) -> bool {
    let fields = fields.as_array().into_iter().flatten();
    fields.filter_map(|field| field.get(0)?.as_str()).any(|known| known.eq_ignore_ascii_case(name))
}

fn add_fields(headers: &mut hyper::HeaderMap, fields: Option<&serde_json::Value>) {
    for field in fields.and_then(serde_json::Value::as_array).into_iter().flatten() {
        let name = field.get(0).and_then(|name| name.as_str()?.parse::<HeaderName>().ok());
        // Characters up to U+00FF stand for the bytes of the same number.
        let bytes = |text: &str| text.chars().map(|one| u8::try_from(u32::from(one)).ok()).collect::<Option<Vec<u8>>>();
        let value = field.get(1).and_then(|value| HeaderValue::from_bytes(&bytes(value.as_str()?)?).ok());
        if let (Some(name), Some(value)) = (name, value) {
            headers.append(name, value);
        }
    }
}

/// A refusal or failure as a response that a person can act on.
fn refusal(answer: &Answer, version: Version) -> Response<Reply> {
    let (status, phrase) = match answer.decision {
        Decision::Refused => (StatusCode::FORBIDDEN, "Refused by Tollgate"),
        Decision::Failed | Decision::InDoubt | Decision::Allowed | Decision::Answered | Decision::Planned => {
            (StatusCode::BAD_GATEWAY, "No Answer from Server")
        }
    };
    let word = match answer.decision {
        Decision::Refused => "refused by",
        _ => "failed in",
    };
    let mut text = format!("tollgate: {word} {}: {}\n", answer.decided_by, answer.reason);
    if !answer.hint.is_empty() {
        text.push_str(&format!("what to change: {}\n", answer.hint));
    }
    if let Some(rule) = &answer.rule {
        text.push_str(&format!("by the rule {rule}\n"));
    }
    let mut response = Response::new(Full::new(Bytes::from(text)).map_err(|never| match never {}).boxed_unsync());
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/plain; charset=utf-8"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    if let Ok(decider) = HeaderValue::from_str(answer.decided_by) {
        headers.insert("tollgate-decided-by", decider);
    }
    if version < Version::HTTP_2 {
        // Many tools show this phrase and nothing else.
        response.extensions_mut().insert(ReasonPhrase::from_static(phrase.as_bytes()));
    }
    response
}
