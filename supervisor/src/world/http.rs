//! HTTP requests to the world outside.
//!
//! An [`Exchange`] is the world of one `http/request`. It makes the request and hands the answer to whoever waits at
//! the door as it comes, in pieces, so that a body of any size takes no more memory than a piece; the effect is over
//! when the last piece has gone through. Where a handler may still change the answer, it is held instead, up to a size.

use super::{
    net::Outside,
    secrets::{Scrub, Scrubbed, Vault},
    unpack::{Coding, Unpacked},
};
use crate::{
    chain::{Answer, BoxFuture, World},
    effect::{self, Digest, Effect},
};
use http_body_util::{combinators::UnsyncBoxBody, BodyExt as _, Full};
use hyper::{
    body::{Body, Bytes, Frame, Incoming, SizeHint},
    header::{self, HeaderMap, HeaderName, HeaderValue},
    upgrade::OnUpgrade,
    Request, Response, StatusCode, Uri, Version,
};
use hyper_util::{
    client::legacy::{
        connect::{Connected, Connection},
        Client,
    },
    rt::{TokioExecutor, TokioIo, TokioTimer},
};
use rustls::{pki_types::ServerName, ClientConfig, RootCertStore};
use sha2::Digest as _;
use std::{
    error::Error as _,
    future::Future,
    io,
    pin::Pin,
    sync::{Arc, Mutex, PoisonError},
    task::{Context, Poll},
    time::Duration,
};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
    sync::oneshot,
};
use tokio_rustls::{client::TlsStream, TlsConnector};

/// What goes wrong in a body.
pub type BodyError = Box<dyn std::error::Error + Send + Sync>;

/// An answer's body on its way in.
type Coming = UnsyncBoxBody<Bytes, BodyError>;

/// A request's body on its way out.
pub type Outgoing = UnsyncBoxBody<Bytes, BodyError>;

/// The longest body that is held or kept, in bytes.
pub const MOST_HELD: usize = 64 * 1024 * 1024;

/// How long an idle connection to a server is kept for the next request.
const IDLE: Duration = Duration::from_secs(30);

/// How long a TLS handshake with a server may take.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(20);

/// Headers that are about one connection and not about the message (RFC 9110, section 7.6.1).
const HOP_BY_HOP: [&str; 6] =
    ["connection", "keep-alive", "proxy-connection", "proxy-authenticate", "proxy-authorization", "te"];

/// The HTTP clients of one run: connections to servers are kept and used again, within the run only.
pub struct Clients {
    /// For a program that speaks HTTP/1.1.
    one: Client<Dialer, Outgoing>,
    /// For one that speaks HTTP/2; a server that does not is spoken to in HTTP/1.1.
    two: Client<Dialer, Outgoing>,
}

impl Clients {
    /// Clients that reach servers by this way.
    ///
    /// # Panics
    ///
    /// Never: the provider supports the protocol versions that are asked of it.
    pub fn new(outside: &Arc<Outside>) -> Clients {
        let found = rustls_native_certs::load_native_certs();
        let mut roots = RootCertStore::empty();
        let (added, _unusable) = roots.add_parsable_certificates(found.certs);
        if added == 0 {
            // Plain HTTP works without; every server within TLS is then refused by its handshake.
            tracing::warn!(errors = ?found.errors, "the host has no trusted certificates");
        }
        let roots = Arc::new(roots);
        let client = |protocols: &[&[u8]]| {
            let provider = Arc::new(rustls::crypto::ring::default_provider());
            let builder = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
            let mut tls = builder
                .expect("ring supports every safe version")
                .with_root_certificates(Arc::clone(&roots))
                .with_no_client_auth();
            tls.alpn_protocols = protocols.iter().map(|name| name.to_vec()).collect();
            let dialer = Dialer { outside: Arc::clone(outside), tls: Arc::new(tls) };
            Client::builder(TokioExecutor::new())
                .pool_timer(TokioTimer::new())
                .pool_idle_timeout(IDLE)
                .http1_preserve_header_case(true)
                .build(dialer)
        };
        Clients { one: client(&[b"http/1.1"]), two: client(&[b"h2", b"http/1.1"]) }
    }
}

/// Makes connections for the clients.
#[derive(Clone)]
struct Dialer {
    outside: Arc<Outside>,
    tls: Arc<ClientConfig>,
}

/// A connection that was not made, with the answer that says why.
#[derive(Debug, thiserror::Error)]
#[error("{}", .0.reason)]
struct NotConnected(Box<Answer>);

impl tower_service::Service<Uri> for Dialer {
    type Response = TokioIo<Line>;
    type Error = NotConnected;
    type Future = Pin<Box<dyn Future<Output = Result<TokioIo<Line>, NotConnected>> + Send>>;

    fn poll_ready(&mut self, _context: &mut Context<'_>) -> Poll<Result<(), NotConnected>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, to: Uri) -> Self::Future {
        let Dialer { outside, tls } = self.clone();
        Box::pin(async move {
            let secure = to.scheme_str() == Some("https");
            let host = to.host().unwrap_or_default();
            let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host).to_owned();
            let port = to.port_u16().unwrap_or(if secure { 443 } else { 80 });
            let refused = |answer| NotConnected(Box::new(answer));
            let stream = outside.dial(&host, port).await.map_err(refused)?;
            if !secure {
                return Ok(TokioIo::new(Line::Plain(stream)));
            }
            let distrusted = |cause: String| {
                refused(Answer::failed(
                    format!("the server at `{host}:{port}` cannot be trusted: {cause}"),
                    "check the server's certificate; an authority of your own belongs into the host's trusted \
                     certificates, or into the file that SSL_CERT_FILE names",
                ))
            };
            let name = ServerName::try_from(host.clone()).map_err(|error| distrusted(error.to_string()))?;
            let handshake = TlsConnector::from(tls).connect(name, stream);
            match tokio::time::timeout(HANDSHAKE_TIMEOUT, handshake).await {
                Ok(Ok(stream)) => Ok(TokioIo::new(Line::Tls(Box::new(stream)))),
                Ok(Err(error)) => Err(distrusted(error.to_string())),
                Err(_elapsed) => Err(distrusted("its handshake does not end".to_owned())),
            }
        })
    }
}

/// A connection to a server.
enum Line {
    Plain(TcpStream),
    Tls(Box<TlsStream<TcpStream>>),
}

impl Connection for Line {
    fn connected(&self) -> Connected {
        match self {
            Line::Tls(stream) if stream.get_ref().1.alpn_protocol() == Some(b"h2") => Connected::new().negotiated_h2(),
            Line::Plain(_) | Line::Tls(_) => Connected::new(),
        }
    }
}

impl AsyncRead for Line {
    fn poll_read(self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Line::Plain(stream) => Pin::new(stream).poll_read(context, buffer),
            Line::Tls(stream) => Pin::new(&mut **stream).poll_read(context, buffer),
        }
    }
}

impl AsyncWrite for Line {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Line::Plain(stream) => Pin::new(stream).poll_write(context, bytes),
            Line::Tls(stream) => Pin::new(&mut **stream).poll_write(context, bytes),
        }
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Line::Plain(stream) => Pin::new(stream).poll_write_vectored(context, pieces),
            Line::Tls(stream) => Pin::new(&mut **stream).poll_write_vectored(context, pieces),
        }
    }

    fn is_write_vectored(&self) -> bool {
        match self {
            Line::Plain(stream) => stream.is_write_vectored(),
            Line::Tls(stream) => stream.is_write_vectored(),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Line::Plain(stream) => Pin::new(stream).poll_flush(context),
            Line::Tls(stream) => Pin::new(&mut **stream).poll_flush(context),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Line::Plain(stream) => Pin::new(stream).poll_shutdown(context),
            Line::Tls(stream) => Pin::new(&mut **stream).poll_shutdown(context),
        }
    }
}

/// How an answer reaches the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Delivery {
    /// As it comes.
    Live,
    /// As it comes, and a copy of it is in the chain's answer.
    Copied,
    /// Whole, from the chain's answer: a handler may change it.
    Held,
}

/// A request that was made, as its door hands it over.
pub struct Asking {
    /// The request, with its whole URI and the headers for the server.
    pub request: Request<Outgoing>,
    /// The program's side of the connection, where it asks to speak another protocol on it.
    pub upgrade: Option<OnUpgrade>,
    /// The content, where it is there as a whole: what a secret may be put into.
    pub content: Option<Bytes>,
    /// How many bytes of the body have gone out.
    pub sent: Arc<Counter>,
}

/// The world of one `http/request`.
pub struct Exchange {
    clients: Arc<Clients>,
    asking: Mutex<Option<Asking>>,
    /// Where the answer goes as it comes.
    front: Mutex<Option<oneshot::Sender<Response<Relayed>>>>,
    delivery: Delivery,
    vault: Arc<Vault>,
    /// What is wrong with the request itself: it is refused when the policies have admitted it.
    objection: Option<Answer>,
}

impl Exchange {
    /// An exchange that hands its answer to `front`.
    pub fn new(
        clients: Arc<Clients>,
        asking: Asking,
        front: oneshot::Sender<Response<Relayed>>,
        delivery: Delivery,
        vault: Arc<Vault>,
        objection: Option<Answer>,
    ) -> Exchange {
        Exchange {
            clients,
            asking: Mutex::new(Some(asking)),
            front: Mutex::new(Some(front)),
            delivery,
            vault,
            objection,
        }
    }

    async fn perform(&self, effect: &effect::http::Request) -> Answer {
        let asking = self.asking.lock().unwrap_or_else(PoisonError::into_inner).take();
        let front = self.front.lock().unwrap_or_else(PoisonError::into_inner).take();
        let (Some(Asking { request, upgrade, content, sent }), Some(mut front)) = (asking, front) else {
            return Answer::failed("the request was made already", "report this: it is a bug of Tollgate's");
        };
        let client = if request.version() == Version::HTTP_2 { &self.clients.two } else { &self.clients.one };
        let (mut parts, mut body) = request.into_parts();
        parts.version = Version::HTTP_11;
        if let Some(filled) = self.vault.fill(effect, &mut parts, content.as_ref()) {
            parts.headers.insert(header::CONTENT_LENGTH, HeaderValue::from(filled.len() as u64));
            body = counted(Full::new(filled).map_err(|never| match never {}), &sent);
        }
        let scrub = self.vault.scrub(effect);
        if scrub.is_some() {
            // What is compressed cannot be looked through.
            parts.headers.insert(header::ACCEPT_ENCODING, HeaderValue::from_static("identity"));
            // Nor what comes a few bytes a request. A server may answer whole to whoever asks for a part (RFC 9110,
            // section 14.2), so a request without is one that the program must be ready for.
            parts.headers.remove(header::RANGE);
            parts.headers.remove(header::IF_RANGE);
            if upgrade.is_some() {
                return Answer::refused(
                    "secrets",
                    format!(
                        "`{}` may answer with {}, and another protocol cannot be looked through",
                        effect.origin(),
                        scrub.as_ref().map(Scrub::names).unwrap_or_default()
                    ),
                    "speak HTTP with it",
                );
            }
        }
        let request = Request::from_parts(parts, body);
        let asked = tokio::select! {
            asked = client.request(request) => asked,
            () = front.closed() => return gone(sent.count()),
        };
        let response = match asked {
            Ok(response) => response,
            Err(error) => return not_answered(&error),
        };
        match self.delivery {
            _ if scrub.is_some() && codings(response.headers()).is_none() => Answer::refused(
                "secrets",
                format!(
                    "`{}` answered in an encoding that was not asked for and cannot be looked through for {}",
                    effect.origin(),
                    scrub.as_ref().map(Scrub::names).unwrap_or_default()
                ),
                "let the server answer without Content-Encoding",
            ),
            Delivery::Held => hold(&effect.method, response, &sent, scrub).await,
            Delivery::Live | Delivery::Copied if response.status() == StatusCode::SWITCHING_PROTOCOLS => {
                switch(response, upgrade, front, &sent).await
            }
            Delivery::Live | Delivery::Copied => self.pass_on(&effect.method, response, front, &sent, scrub).await,
        }
    }

    async fn pass_on(
        &self,
        method: &str,
        response: Response<Incoming>,
        front: oneshot::Sender<Response<Relayed>>,
        sent: &Counter,
        scrub: Option<Scrub>,
    ) -> Answer {
        let (parts, body) = cleaned(response, scrub);
        let (done, ended) = oneshot::channel();
        let copy = (self.delivery == Delivery::Copied).then(Vec::new);
        let head = head_of(parts.status, &parts.headers);
        let status = parts.status;
        let body = Relayed { body: Some(body), passed: Passed::new(copy), done: Some(done) };
        if front.send(Response::from_parts(parts, body)).is_err() {
            return gone(sent.count());
        }
        let Ok(passed) = ended.await else { return gone(sent.count()) };
        answer(method, status, head, passed, sent.count(), self.delivery)
    }
}

impl World for Exchange {
    fn execute<'a>(&'a self, effect: &'a Effect) -> BoxFuture<'a, Answer> {
        Box::pin(async move {
            match (&self.objection, &effect.request) {
                (Some(objection), _) => objection.clone(),
                (None, effect::Request::Http(request)) => self.perform(request).await,
                (None, _) => Answer::failed("this is no request", "report this: it is a bug of Tollgate's"),
            }
        })
    }
}

/// Takes the headers out that are about one connection, those that `Connection` names among them.
pub fn strip_hop_by_hop(headers: &mut HeaderMap) {
    let upgrades = headers.contains_key(header::UPGRADE);
    // Whether trailers are understood is true of the whole way, since they are passed on (section 10.1.4).
    let trailers = headers.get_all(header::TE).iter().any(|value| {
        value.to_str().is_ok_and(|value| value.split(',').any(|one| one.trim().eq_ignore_ascii_case("trailers")))
    });
    let named: Vec<HeaderName> = headers
        .get_all(header::CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .filter_map(|name| name.trim().parse().ok())
        .collect();
    for name in named.into_iter().filter(|name| *name != header::UPGRADE) {
        headers.remove(name);
    }
    for name in HOP_BY_HOP {
        headers.remove(name);
    }
    headers.remove(header::TRANSFER_ENCODING);
    if trailers {
        headers.insert(header::TE, HeaderValue::from_static("trailers"));
    }
    if upgrades {
        headers.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
    }
}

fn head_of(status: StatusCode, headers: &HeaderMap) -> serde_json::Value {
    serde_json::json!({ "status": status.as_u16(), "headers": fields(headers) })
}

/// Header fields as data, in order. Bytes outside Latin text are kept as the characters of the same numbers.
fn fields(headers: &HeaderMap) -> Vec<[String; 2]> {
    let text = |value: &HeaderValue| value.as_bytes().iter().map(|byte| char::from(*byte)).collect();
    headers.iter().map(|(name, value)| [name.as_str().to_owned(), text(value)]).collect()
}

fn answer(
    method: &str,
    status: StatusCode,
    mut head: serde_json::Value,
    passed: Passed,
    sent: u64,
    delivery: Delivery,
) -> Answer {
    let Passed { received, hash, copy, end, trailers, .. } = passed;
    let how = match &end {
        End::Whole => String::new(),
        End::Broken(cause) => format!("; broken off: {cause}"),
        End::Dropped => "; the program did not wait for the rest".to_owned(),
    };
    if let Some(trailers) = trailers {
        head["trailers"] = serde_json::json!(fields(&trailers));
    }
    let body = match (delivery, copy) {
        (Delivery::Copied, None) => {
            head["body"] = serde_json::json!("not recorded");
            None
        }
        (_, copy) => copy,
    };
    Answer {
        reason: format!("{method} {}; {sent} bytes sent, {received} received{how}", status.as_u16()),
        digest: Some(Digest(hash.finalize().into())),
        body,
        ..Answer::done(head, received)
    }
}

/// The codings that the content has (RFC 9110, section 8.4), or none where there is one that cannot be undone.
fn codings(headers: &HeaderMap) -> Option<Vec<Coding>> {
    let mut codings = Vec::new();
    for value in headers.get_all(header::CONTENT_ENCODING) {
        for name in value.to_str().ok()?.split(',').filter(|name| !name.trim().eq_ignore_ascii_case("identity")) {
            codings.push(Coding::named(name)?);
        }
    }
    // Nobody packs twice but to hide something.
    (codings.len() <= 1).then_some(codings)
}

/// An answer without what is about its connection, and without the values of secrets.
fn cleaned(response: Response<Incoming>, scrub: Option<Scrub>) -> (hyper::http::response::Parts, Coming) {
    let (mut parts, body) = response.into_parts();
    strip_hop_by_hop(&mut parts.headers);
    let Some(scrub) = scrub else { return (parts, body.map_err(BodyError::from).boxed_unsync()) };
    scrub.headers(&mut parts.headers);
    // A placeholder is not as long as what it stands for.
    if !body.is_end_stream() {
        parts.headers.remove(header::CONTENT_LENGTH);
    }
    let body = body.map_err(BodyError::from);
    let coding = codings(&parts.headers).and_then(|codings| codings.first().copied());
    if let Some(coding) = coding {
        parts.headers.remove(header::CONTENT_ENCODING);
        return (parts, Scrubbed::new(Unpacked::new(body, coding), scrub).boxed_unsync());
    }
    (parts, Scrubbed::new(body, scrub).boxed_unsync())
}

async fn hold(method: &str, response: Response<Incoming>, sent: &Counter, scrub: Option<Scrub>) -> Answer {
    let (parts, body) = cleaned(response, scrub);
    let head = head_of(parts.status, &parts.headers);
    let mut held = Relayed { body: Some(body), passed: Passed::new(Some(Vec::new())), done: None };
    while let Some(frame) = held.frame().await {
        if frame.is_err() {
            break;
        }
        if held.passed.copy.is_none() {
            return Answer::failed(
                format!("the answer is longer than {MOST_HELD} bytes, the most that is held for a fault rule"),
                "take this request out of the fault rules",
            );
        }
    }
    let passed = held.take();
    answer(method, parts.status, head, passed, sent.count(), Delivery::Held)
}

/// Both sides speak another protocol from here on.
async fn switch(
    mut response: Response<Incoming>,
    inside: Option<OnUpgrade>,
    front: oneshot::Sender<Response<Relayed>>,
    sent: &Counter,
) -> Answer {
    let outside = hyper::upgrade::on(&mut response);
    let (mut parts, _none) = response.into_parts();
    strip_hop_by_hop(&mut parts.headers);
    let head = head_of(parts.status, &parts.headers);
    let Some(inside) = inside else {
        return Answer::failed("the server changed the protocol without being asked", "use another server");
    };
    let empty = Relayed { body: None, passed: Passed::new(None), done: None };
    if front.send(Response::from_parts(parts, empty)).is_err() {
        return gone(sent.count());
    }
    let (inside, outside) = match tokio::try_join!(inside, outside) {
        Ok(both) => both,
        Err(error) => return Answer::failed(format!("the protocol could not be changed: {error}"), "try again"),
    };
    let (mut inside, mut outside) = (TokioIo::new(inside), TokioIo::new(outside));
    let copied = tokio::io::copy_bidirectional(&mut inside, &mut outside).await;
    let (up, down, how) = match copied {
        Ok((up, down)) => (up, down, String::new()),
        Err(error) => (0, 0, format!("; broken off: {error}")),
    };
    Answer {
        reason: format!("status 101; {up} bytes sent, {down} received in the other protocol{how}"),
        ..Answer::done(head, up + down)
    }
}

fn gone(sent: u64) -> Answer {
    Answer::failed(
        format!("the program went away before there was an answer; {sent} bytes sent"),
        "wait for the answer",
    )
}

fn not_answered(error: &hyper_util::client::legacy::Error) -> Answer {
    let mut cause = error.source();
    let mut text = error.to_string();
    while let Some(next) = cause {
        if let Some(NotConnected(answer)) = next.downcast_ref() {
            return Answer::clone(answer);
        }
        if let Some(Objection(answer)) = next.downcast_ref() {
            return Answer::clone(answer);
        }
        text = next.to_string();
        cause = next.source();
    }
    Answer::failed(format!("the server gave no answer: {text}"), "check the server; the request may have arrived")
}

/// A body that must not go on, with the answer that says why.
#[derive(Debug, thiserror::Error)]
#[error("{}", .0.reason)]
pub struct Objection(pub Box<Answer>);

/// A number that several hold.
#[derive(Debug, Default)]
pub struct Counter(std::sync::atomic::AtomicU64);

impl Counter {
    /// Adds.
    pub fn add(&self, amount: u64) {
        self.0.fetch_add(amount, std::sync::atomic::Ordering::Relaxed);
    }

    /// What it is now.
    pub fn count(&self) -> u64 {
        self.0.load(std::sync::atomic::Ordering::Relaxed)
    }
}

/// How a body ended.
enum End {
    Whole,
    Broken(String),
    Dropped,
}

/// What has gone through.
struct Passed {
    received: u64,
    hash: sha2::Sha256,
    /// A copy, until it would be longer than [`MOST_HELD`].
    copy: Option<Vec<u8>>,
    trailers: Option<HeaderMap>,
    end: End,
}

impl Passed {
    fn new(copy: Option<Vec<u8>>) -> Passed {
        Passed { received: 0, hash: sha2::Sha256::new(), copy, trailers: None, end: End::Dropped }
    }

    fn note(&mut self, bytes: &Bytes) {
        self.received += bytes.len() as u64;
        self.hash.update(bytes);
        match &mut self.copy {
            Some(copy) if copy.len() + bytes.len() <= MOST_HELD => copy.extend_from_slice(bytes),
            copy => *copy = None,
        }
    }
}

/// An answer's body on its way to the program, counted as it goes.
pub struct Relayed {
    body: Option<Coming>,
    passed: Passed,
    done: Option<oneshot::Sender<Passed>>,
}

impl Relayed {
    fn take(&mut self) -> Passed {
        std::mem::replace(&mut self.passed, Passed::new(None))
    }

    fn finish(&mut self, end: End) {
        self.body = None;
        self.passed.end = end;
        if let Some(done) = self.done.take() {
            let passed = self.take();
            let _ = done.send(passed);
        }
    }
}

impl Drop for Relayed {
    fn drop(&mut self) {
        let end = match self.body.as_ref().map(Body::is_end_stream) {
            Some(false) => End::Dropped,
            Some(true) | None => End::Whole,
        };
        self.finish(end);
    }
}

impl Body for Relayed {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let Some(body) = &mut self.body else { return Poll::Ready(None) };
        match std::task::ready!(Pin::new(body).poll_frame(context)) {
            None => {
                self.finish(End::Whole);
                Poll::Ready(None)
            }
            Some(Err(error)) => {
                self.finish(End::Broken(error.to_string()));
                Poll::Ready(Some(Err(error)))
            }
            Some(Ok(frame)) => {
                if let Some(bytes) = frame.data_ref() {
                    self.passed.note(bytes);
                } else if let Some(trailers) = frame.trailers_ref() {
                    self.passed.trailers = Some(trailers.clone());
                }
                Poll::Ready(Some(Ok(frame)))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.body.as_ref().is_none_or(Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.body.as_ref().map_or_else(|| SizeHint::with_exact(0), Body::size_hint)
    }
}

/// A request's body that is counted on its way out.
pub fn counted(body: impl Body<Data = Bytes, Error = BodyError> + Send + 'static, sent: &Arc<Counter>) -> Outgoing {
    let sent = Arc::clone(sent);
    body.map_frame(move |frame| {
        if let Some(bytes) = frame.data_ref() {
            sent.add(bytes.len() as u64);
        }
        frame
    })
    .boxed_unsync()
}
