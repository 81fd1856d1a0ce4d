//! The network door: every connection of a jailed program, with the name that it was meant for.
//!
//! The jail's network leads here and nowhere else: its pid 1 hands over one listener, to which the jail's own kernel
//! sends every connection, and one socket for questions about names. So any program of any language arrives, without a
//! setting, and nothing of ours runs beside it. A connection becomes `http/request` effects where it speaks HTTP, with
//! or without TLS, and one `net/connect` effect where it speaks anything else.

pub mod authority;
mod courteous;
pub mod dns;
pub mod names;
pub mod operation;
mod relay;

use crate::{
    chain::{Answer, BoxFuture, Chain, Decision, World},
    effect::{self, http::Scheme, net, Effect, Kind, RoomId, Subject},
    world::{
        http::{Clients, Delivery},
        net::{reset, Outside, Requests, Tunnel},
        secrets::Vault,
        words::{first_words, Speaks},
    },
};
use authority::{Authority, OneHost};
use courteous::Courteous;
use dns::{Verdict, Wanted};
use hyper::service::service_fn;
use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    server::conn::auto,
};
use names::{Names, NAME_SERVER};
use rustls::{server::Acceptor, ServerConfig};
use std::{
    collections::HashMap,
    future::Future,
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6},
    os::fd::{AsFd as _, OwnedFd},
    sync::{
        atomic::{AtomicBool, Ordering},
        Arc, Mutex, OnceLock, PoisonError,
    },
    time::Duration,
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream, UdpSocket},
    sync::{watch, OnceCell, Semaphore},
    task::JoinSet,
    time::timeout,
};
use tokio_rustls::LazyConfigAcceptor;

/// Connections of one run that are served at once. Further ones wait in the kernel's backlog.
pub const MAX_CONNECTIONS: usize = 2048;

/// How a handshake names HTTP/2 (RFC 9113, section 3.1).
const HTTP_2: &[u8] = b"h2";

/// Questions about names that wait for an answer at once; further ones are dropped, and asked again by their resolver.
const MAX_QUESTIONS: usize = 256;

/// How long a program may take to say the first thing on a connection that could be anything, before it counts as one
/// on which the server speaks first.
const FIRST_WORDS: Duration = Duration::from_millis(300);

/// The same where only requests may pass: somebody who opens a connection early has this long to use it.
const SILENCE: Duration = Duration::from_secs(10);

/// How long a program may take for its part of a TLS handshake, or for the head of a request.
const HEAD_TIMEOUT: Duration = Duration::from_secs(60);

/// How long what is under way may take to end when the program is gone.
const GRACE: Duration = Duration::from_secs(2);

/// The longest question about a name.
const MOST_QUESTION: usize = 4096;

/// The port of name servers.
const NAME_PORT: u16 = 53;

/// Where a connection is meant to go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// The name, in its canonical form, or the address that the program gave.
    pub host: String,
    /// The port.
    pub port: u16,
    /// Whether it is a port of the host's own loopback that the run was granted.
    pub loopback: bool,
    /// The name that the program's TLS handshake asks for, if there is one.
    pub tls_name: Option<String>,
}

/// What a connection to a target may be, by the run's policies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Route {
    /// Requests, if it speaks HTTP; else it is refused as a connection.
    Requests,
    /// A connection whose bytes pass.
    Bytes,
    /// Requests where it speaks HTTP, and bytes where it does not.
    Either,
}

/// Says by which of them a target can be reached. It only chooses what kind of effect a connection becomes: whether it
/// is admitted is the chain's to say.
pub trait Routes: Send + Sync {
    /// The route to this target.
    fn route(&self, host: &str, port: u16) -> Route;
}

/// What a run's network door is made of.
pub struct Parts {
    /// The run's chain.
    pub chain: Arc<Chain>,
    /// Whose effects they are.
    pub subject: Subject,
    /// The room they happen in.
    pub room: Option<RoomId>,
    /// The world outside.
    pub outside: Arc<Outside>,
    /// The run's authority.
    pub authority: Arc<Authority>,
    /// Which kind of effect a connection becomes.
    pub routes: Arc<dyn Routes>,
    /// How answers reach the program.
    pub delivery: Delivery,
    /// What requests may carry without the program's knowing it.
    pub vault: Arc<Vault>,
}

/// The door of one run.
pub struct Door {
    chain: Arc<Chain>,
    subject: Subject,
    room: Option<RoomId>,
    outside: Arc<Outside>,
    authority: Arc<Authority>,
    routes: Arc<dyn Routes>,
    delivery: Delivery,
    vault: Arc<Vault>,
    clients: OnceLock<Arc<Clients>>,
    names: Mutex<Names>,
    /// Names whose first question is being decided. Resolvers ask for both kinds of addresses at once.
    deciding: Mutex<HashMap<String, Arc<OnceCell<Told>>>>,
    /// The TLS settings of each host's server.
    servers: Mutex<HashMap<String, Arc<ServerConfig>>>,
    tasks: Mutex<JoinSet<()>>,
    /// Says when the run is over.
    over: watch::Receiver<bool>,
}

/// Serves a jail's sockets until `shutdown` is ready; then what is under way has [`GRACE`] to end.
///
/// # Errors
///
/// Where a socket cannot be used by the runtime.
pub async fn serve(
    listeners: Vec<std::net::TcpListener>,
    questions: std::net::UdpSocket,
    parts: Parts,
    shutdown: impl Future<Output = ()>,
) -> io::Result<()> {
    let Parts { chain, subject, room, outside, authority, routes, delivery, vault } = parts;
    let (end, over) = watch::channel(false);
    let door = Arc::new(Door {
        chain,
        subject,
        room,
        outside,
        authority,
        routes,
        delivery,
        vault,
        clients: OnceLock::new(),
        names: Mutex::default(),
        deciding: Mutex::default(),
        servers: Mutex::default(),
        tasks: Mutex::default(),
        over,
    });
    questions.set_nonblocking(true)?;
    let questions = Arc::new(UdpSocket::from_std(questions)?);
    let slots = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    let mut accepting = JoinSet::new();
    for listener in listeners {
        listener.set_nonblocking(true)?;
        let listener = TcpListener::from_std(listener)?;
        accepting.spawn(accept(Arc::clone(&door), listener, Arc::clone(&slots)));
    }
    accepting.spawn(answer_questions(Arc::clone(&door), questions));
    shutdown.await;
    accepting.shutdown().await;
    let _ = end.send(true);
    // The program is gone, so its side of each connection is closed and what is under way ends by itself; what does not
    // is ended here, and its receipts say so.
    let mut tasks = std::mem::take(&mut *door.tasks.lock().unwrap_or_else(PoisonError::into_inner));
    let _ = timeout(GRACE, async { while tasks.join_next().await.is_some() {} }).await;
    tasks.shutdown().await;
    Ok(())
}

async fn accept(door: Arc<Door>, listener: TcpListener, slots: Arc<Semaphore>) {
    loop {
        let Ok(slot) = Arc::clone(&slots).acquire_owned().await else { return };
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::debug!(%error, "a connection was lost before it was accepted");
                // Out of descriptors, it would fail again at once.
                tokio::time::sleep(Duration::from_millis(10)).await;
                continue;
            }
        };
        let serving = Arc::clone(&door);
        door.spawn(async move {
            let _slot = slot;
            serving.connection(stream).await;
        });
    }
}

impl Door {
    fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let mut tasks = self.tasks.lock().unwrap_or_else(PoisonError::into_inner);
        while tasks.try_join_next().is_some() {}
        tasks.spawn(task);
    }

    fn clients(&self) -> &Arc<Clients> {
        self.clients.get_or_init(|| Arc::new(Clients::new(&self.outside)))
    }

    async fn connection(self: Arc<Self>, stream: TcpStream) {
        let Some(to) = original_destination(&stream) else { return };
        let _ = stream.set_nodelay(true);
        if to.port() == NAME_PORT && to.ip() == IpAddr::V4(NAME_SERVER) {
            return self.questions_by_tcp(stream).await;
        }
        let target = self.target(to);
        let route = self.routes.route(&target.host, target.port);
        let speaks = match route {
            Route::Bytes => Speaks::Other,
            Route::Requests => first_words(&stream, SILENCE, HEAD_TIMEOUT).await,
            Route::Either => first_words(&stream, FIRST_WORDS, HEAD_TIMEOUT).await,
        };
        match speaks {
            // It waits for the server to speak, or for nothing: nobody said what it is for.
            Speaks::Nothing if route == Route::Requests => self.bytes(stream, target, Requests::ByThemselves).await,
            Speaks::Other | Speaks::Nothing => {
                let requests = if route == Route::Either { Requests::ByThemselves } else { Requests::Pass };
                self.bytes(stream, target, requests).await;
            }
            Speaks::Http => {
                let line = Line::of(&stream);
                self.requests(TokioIo::new(stream), target, Scheme::Http, line, None).await;
            }
            Speaks::Tls(name) => self.within_tls(stream, Target { tls_name: name, ..target }).await,
        }
    }

    fn target(&self, to: SocketAddr) -> Target {
        let address = to.ip().to_canonical();
        let names = self.names.lock().unwrap_or_else(PoisonError::into_inner);
        let host = names.name_of(address).map_or_else(|| address.to_string(), str::to_owned);
        Target { host, port: to.port(), loopback: address.is_loopback(), tls_name: None }
    }

    fn effect(&self, request: net::Request, kind: Kind) -> Effect {
        Effect {
            kind,
            resource: request.resource(),
            subject: self.subject.clone(),
            room: self.room.clone(),
            door: effect::Door::Network,
            request: effect::Request::Net(request),
        }
    }

    /// A connection that passes as bytes, if it may.
    async fn bytes(&self, stream: TcpStream, target: Target, requests: Requests) {
        let request = net::Request::Connect { host: target.host, port: target.port, transport: net::Transport::Tcp };
        let effect = self.effect(request, Kind::NetConnect);
        let tunnel = Tunnel::new(Arc::clone(&self.outside), stream, requests, self.over.clone());
        let tunnel = if self.delivery == Delivery::Live { tunnel } else { tunnel.keeping() };
        self.chain.perform(&effect, &tunnel).await;
        // Whoever said no: the connect itself has succeeded, so a reset is how a program is told.
        if let Some(stream) = tunnel.into_inside() {
            reset(&stream);
        }
    }

    /// Serves the requests of a connection, in the protocol that its handshake agreed on, or in what they come in.
    async fn requests<S>(
        self: &Arc<Self>,
        stream: TokioIo<S>,
        target: Target,
        scheme: Scheme,
        line: Arc<Line>,
        agreed: Option<&[u8]>,
    ) where
        S: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin + Send + 'static,
    {
        let target = Arc::new(target);
        let service = service_fn(|request| {
            relay::serve(Arc::clone(self), Arc::clone(&target), scheme, Arc::clone(&line), request)
        });
        let mut server = auto::Builder::new(TokioExecutor::new());
        server
            .http1()
            .timer(TokioTimer::new())
            .header_read_timeout(HEAD_TIMEOUT)
            .preserve_header_case(true)
            // What did not come over HTTP/1.1 itself, as an answer from a recording, is written as most servers do.
            .title_case_headers(true)
            .auto_date_header(false)
            .max_headers(200)
            .half_close(true);
        server
            .http2()
            .auto_date_header(false)
            .timer(TokioTimer::new())
            .max_concurrent_streams(256)
            .enable_connect_protocol();
        let served = match agreed {
            Some(HTTP_2) => server.http2_only().serve_connection(stream, service).await,
            Some(_) | None => server.serve_connection_with_upgrades(stream, service).await,
        };
        if let Err(error) = served {
            tracing::debug!(%error, host = target.host, "a connection ended early");
        }
    }

    async fn within_tls(self: &Arc<Self>, stream: TcpStream, target: Target) {
        let line = Line::of(&stream);
        let config = match self.server_of(&target.host) {
            Ok(config) => config,
            Err(cause) => {
                tracing::warn!(%cause, host = target.host, "no certificate for a host");
                return line.reset();
            }
        };
        let accept = async {
            let start = LazyConfigAcceptor::new(Acceptor::default(), stream).await?;
            start.into_stream(config).await
        };
        match timeout(HEAD_TIMEOUT, accept).await {
            Ok(Ok(stream)) => {
                let stream = Courteous::new(stream, Arc::clone(&line));
                let agreed = stream.agreed().map(<[u8]>::to_vec);
                self.requests(TokioIo::new(stream), target, Scheme::Https, line, agreed.as_deref()).await;
            }
            Ok(Err(cause)) => self.distrusted(target, &cause.to_string()).await,
            Err(_elapsed) => {}
        }
    }

    /// A program that breaks off the handshake does not trust the run's authority, which deserves a receipt: to the
    /// program it looks like a broken network.
    async fn distrusted(&self, target: Target, cause: &str) {
        let flag = format!("--allow {}:{}", net::bracketed(&target.host), target.port);
        let request =
            net::Request::Connect { host: target.host.clone(), port: target.port, transport: net::Transport::Tcp };
        let effect = self.effect(request, Kind::NetConnect);
        let answer = Answer::failed(
            format!("the program broke off the TLS handshake with `{}`: {cause}", target.host),
            format!(
                "if it trusts only certificates of its own, let the connection pass without looking into it: `{flag}`"
            ),
        );
        self.chain.perform(&effect, &Always(answer)).await;
    }

    fn server_of(&self, host: &str) -> Result<Arc<ServerConfig>, String> {
        if let Some(known) = self.servers.lock().unwrap_or_else(PoisonError::into_inner).get(host) {
            return Ok(Arc::clone(known));
        }
        let certificate = self.authority.certificate_for(host).map_err(|error| error.to_string())?;
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
        let mut config = builder
            .map_err(|error| error.to_string())?
            .with_no_client_auth()
            .with_cert_resolver(Arc::new(OneHost(certificate)));
        config.alpn_protocols = vec![HTTP_2.to_vec(), b"http/1.1".to_vec()];
        let config = Arc::new(config);
        let mut servers = self.servers.lock().unwrap_or_else(PoisonError::into_inner);
        if servers.len() < names::MAX_NAMES {
            servers.insert(host.to_owned(), Arc::clone(&config));
        }
        Ok(config)
    }

    /// The addresses of a name. The first question about it is an effect; the answers to all others are what that one
    /// was answered with.
    async fn resolve(&self, name: String, record: String) -> Option<Verdict> {
        if name == "localhost" || name.ends_with(".localhost") {
            // RFC 6761, section 6.3.
            let addresses = names::Addresses { v4: Ipv4Addr::LOCALHOST, v6: Ipv6Addr::LOCALHOST };
            return Some(Verdict::Addresses(addresses));
        }
        let known = self.names.lock().unwrap_or_else(PoisonError::into_inner).knows(&name);
        if !known {
            let cell = {
                let mut deciding = self.deciding.lock().unwrap_or_else(PoisonError::into_inner);
                Arc::clone(deciding.entry(name.clone()).or_default())
            };
            let told = *cell.get_or_init(|| self.decide_name(name.clone(), record)).await;
            self.deciding.lock().unwrap_or_else(PoisonError::into_inner).remove(&name);
            match told {
                Told::Addresses => {}
                Told::Failure => return Some(Verdict::Failure),
                Told::Nothing => return None,
            }
        }
        let mut names = self.names.lock().unwrap_or_else(PoisonError::into_inner);
        Some(names.addresses_of(&name).map_or(Verdict::Failure, Verdict::Addresses))
    }

    async fn decide_name(&self, name: String, record: String) -> Told {
        let effect = self.effect(net::Request::Resolve { name, record }, Kind::NetResolve);
        let answer = self.chain.perform(&effect, &Always(Answer::done(serde_json::Value::Null, 0))).await;
        if answer.value.get("timeout").is_some() {
            return Told::Nothing;
        }
        // A refusal of the policy's is a receipt, and the name gets an address all the same: the connection to it is
        // refused in words that a program shows, which no answer about a name could be.
        let refused = answer.decision == Decision::Refused && answer.decided_by == "admission";
        if answer.is_success() || refused {
            Told::Addresses
        } else {
            Told::Failure
        }
    }

    /// The answer to one question, or none where none is sent.
    async fn answer_question(&self, packet: &[u8], most: impl Fn(&dns::Question) -> usize) -> Option<Vec<u8>> {
        let question = dns::read(packet)?;
        let room = most(&question);
        match question.wanted.clone() {
            Wanted::Nothing(verdict) => question.answer(verdict, room),
            Wanted::Address(address) => {
                let names = self.names.lock().unwrap_or_else(PoisonError::into_inner);
                question.answer_name(names.name_of(address), room)
            }
            Wanted::Name { name, record } => {
                let verdict = self.resolve(name, record).await?;
                question.answer(verdict, room)
            }
        }
    }

    /// Questions that come by TCP, each with its length before it (RFC 1035, section 4.2.2).
    async fn questions_by_tcp(&self, mut stream: TcpStream) {
        loop {
            let Ok(Ok(length)) = timeout(HEAD_TIMEOUT, stream.read_u16()).await else { return };
            let mut packet = vec![0; usize::from(length)];
            let Ok(Ok(_)) = timeout(HEAD_TIMEOUT, stream.read_exact(&mut packet)).await else { return };
            let Some(answer) = self.answer_question(&packet, |_| usize::from(u16::MAX)).await else { return };
            let Ok(length) = u16::try_from(answer.len()) else { return };
            if stream.write_u16(length).await.is_err() || stream.write_all(&answer).await.is_err() {
                return;
            }
        }
    }
}

async fn answer_questions(door: Arc<Door>, socket: Arc<UdpSocket>) {
    let slots = Arc::new(Semaphore::new(MAX_QUESTIONS));
    let mut packet = vec![0; MOST_QUESTION];
    loop {
        let Ok((length, from)) = socket.recv_from(&mut packet).await else {
            tokio::time::sleep(Duration::from_millis(10)).await;
            continue;
        };
        let Ok(slot) = Arc::clone(&slots).try_acquire_owned() else { continue };
        let (packet, socket, answering) = (packet[..length].to_vec(), Arc::clone(&socket), Arc::clone(&door));
        door.spawn(async move {
            let _slot = slot;
            if let Some(answer) = answering.answer_question(&packet, dns::Question::room).await {
                let _ = socket.send_to(&answer, from).await;
            }
        });
    }
}

/// A connection of the program's, beside its traffic.
pub(super) struct Line {
    own: Option<OwnedFd>,
    reset: AtomicBool,
}

impl Line {
    fn of(stream: &TcpStream) -> Arc<Line> {
        // Without a descriptor to spare, the program sees an orderly end in the place of a reset.
        Arc::new(Line { own: stream.as_fd().try_clone_to_owned().ok(), reset: AtomicBool::new(false) })
    }

    /// Makes it end with a reset once it is closed.
    fn reset(&self) {
        self.reset.store(true, Ordering::Relaxed);
        if let Some(own) = &self.own {
            reset(own);
        }
    }

    fn is_reset(&self) -> bool {
        self.reset.load(Ordering::Relaxed)
    }
}

/// What a program is told about a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Told {
    Addresses,
    Failure,
    Nothing,
}

/// A world that has one answer.
struct Always(Answer);

impl World for Always {
    fn execute<'a>(&'a self, _effect: &'a Effect) -> BoxFuture<'a, Answer> {
        Box::pin(std::future::ready(self.0.clone()))
    }
}

/// Where the program connected to, before the jail's kernel sent the connection to its listener: what connection
/// tracking remembers (`SO_ORIGINAL_DST`, linux/netfilter_ipv4.h), or where no redirect was in between, the address
/// that was connected to.
fn original_destination(stream: &TcpStream) -> Option<SocketAddr> {
    use nix::sys::socket::{getsockopt, sockopt};
    let local = stream.local_addr().ok()?;
    let peer = stream.peer_addr().ok()?;
    let four = || {
        let found = getsockopt(&stream.as_fd(), sockopt::OriginalDst).ok()?;
        let address = Ipv4Addr::from(u32::from_be(found.sin_addr.s_addr));
        Some(SocketAddr::V4(SocketAddrV4::new(address, u16::from_be(found.sin_port))))
    };
    let six = || {
        let found = getsockopt(&stream.as_fd(), sockopt::Ip6tOriginalDst).ok()?;
        let address = Ipv6Addr::from(found.sin6_addr.s6_addr);
        Some(SocketAddr::V6(SocketAddrV6::new(address, u16::from_be(found.sin6_port), 0, 0)))
    };
    let remembered = match peer.ip().to_canonical() {
        IpAddr::V4(_) => four(),
        IpAddr::V6(_) => six(),
    };
    Some(remembered.unwrap_or(local))
}
