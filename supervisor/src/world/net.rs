//! Connections to the world outside: names are looked up here, and nowhere else.
//!
//! Only for an effect that the chain let through. Every address that a name leads to is looked at before it is dialled,
//! and the one that was looked at is the one that is dialled, so a name server cannot change its mind in between.

use super::{
    conversation::{pieces, Conversation, Side},
    words::{first_words, Speaks},
};
use crate::{
    chain::{Answer, BoxFuture, World},
    effect::{net, Digest, Effect, Request},
};
use hickory_resolver::{
    config::{ConnectionConfig, NameServerConfig, ResolveHosts, ResolverConfig},
    net::runtime::TokioRuntimeProvider,
    TokioResolver,
};
use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    os::fd::AsFd,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{
        tcp::{OwnedReadHalf, OwnedWriteHalf},
        TcpStream,
    },
    sync::{watch, OnceCell},
    time::timeout,
};

/// How long one address may take to answer a connection attempt.
const DIAL_TIMEOUT: Duration = Duration::from_secs(10);

/// How long a name may take to be looked up.
const LOOKUP_TIMEOUT: Duration = Duration::from_secs(10);

/// How long a server may take to close its side of a connection whose run is over.
const LAST_WORDS: Duration = Duration::from_millis(300);

/// Longer than any run.
const FOREVER: Duration = Duration::from_secs(365 * 24 * 3600);

/// At most so many addresses of a name are tried.
const MOST_ADDRESSES: usize = 8;

/// The pieces in which a relayed connection is read.
const PIECE: usize = 64 * 1024;

/// Looks at every address before it is dialled.
pub trait AddressGuard: Send + Sync {
    /// Whether this address may be dialled for this host.
    ///
    /// # Errors
    ///
    /// The refusal, in the guard's own name.
    fn check(&self, host: &str, port: u16, address: IpAddr) -> Result<(), Box<Answer>>;
}

/// The world outside, for one run.
pub struct Outside {
    resolver: OnceCell<TokioResolver>,
    /// The name server that the run's policy names instead of the host's.
    server: Option<SocketAddr>,
    guard: Arc<dyn AddressGuard>,
}

impl Outside {
    /// The outside behind this guard, its names looked up at `server`, or as the host does.
    pub fn new(server: Option<SocketAddr>, guard: Arc<dyn AddressGuard>) -> Outside {
        Outside { resolver: OnceCell::new(), server, guard }
    }

    /// A connection to this host, a name or an address.
    ///
    /// # Errors
    ///
    /// The guard's refusal, or that nothing answered.
    pub async fn dial(&self, host: &str, port: u16) -> Result<TcpStream, Answer> {
        let addresses = match host.parse::<IpAddr>() {
            // A granted port of the host's own loopback is the same port over either family, as it is for a program
            // that tries both.
            Ok(IpAddr::V4(Ipv4Addr::LOCALHOST)) => vec![Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()],
            Ok(IpAddr::V6(Ipv6Addr::LOCALHOST)) => vec![Ipv6Addr::LOCALHOST.into(), Ipv4Addr::LOCALHOST.into()],
            Ok(address) => vec![address],
            Err(_name) => self.look_up(host).await?,
        };
        // All of them, before any is tried: a name that leads inside as well as outside is not to be trusted.
        for address in &addresses {
            self.guard.check(host, port, *address).map_err(|refusal| *refusal)?;
        }
        let mut last = None;
        for address in addresses.into_iter().take(MOST_ADDRESSES) {
            let error = match timeout(DIAL_TIMEOUT, TcpStream::connect((address, port))).await {
                Ok(Ok(stream)) => {
                    // A relay only passes on what somebody else already waited to send.
                    let _ = stream.set_nodelay(true);
                    return Ok(stream);
                }
                Ok(Err(error)) => error,
                Err(_elapsed) => io::Error::from_raw_os_error(libc::ETIMEDOUT),
            };
            last = Some((address, error));
        }
        Err(match last {
            Some((address, error)) => unreachable_host(host, port, &format!("{address}: {error}"), errno_of(&error)),
            None => unreachable_host(host, port, "the name has no address", "EHOSTUNREACH"),
        })
    }

    async fn look_up(&self, host: &str) -> Result<Vec<IpAddr>, Answer> {
        let failed = |cause: String| Answer {
            value: serde_json::json!({ "error": { "errno": "EHOSTUNREACH" } }),
            ..Answer::failed(
                format!("`{host}` cannot be looked up: {cause}"),
                "check the name, and that the host itself can look it up",
            )
        };
        let resolver = self.resolver.get_or_try_init(|| async { resolver(self.server) }).await.map_err(failed)?;
        // With a dot at its end a name is whole: the host's search list is not tried with what the program asked for.
        match timeout(LOOKUP_TIMEOUT, resolver.lookup_ip(format!("{host}."))).await {
            Ok(Ok(found)) => Ok(found.iter().collect()),
            Ok(Err(error)) => Err(failed(error.to_string())),
            Err(_elapsed) => Err(failed(format!("no answer within {} s", LOOKUP_TIMEOUT.as_secs()))),
        }
    }
}

fn resolver(server: Option<SocketAddr>) -> Result<TokioResolver, String> {
    let built = match server {
        None => TokioResolver::builder_tokio().map_err(|error| error.to_string())?.build(),
        Some(address) => {
            let (mut udp, mut tcp) = (ConnectionConfig::udp(), ConnectionConfig::tcp());
            (udp.port, tcp.port) = (address.port(), address.port());
            let server = NameServerConfig::new(address.ip(), true, vec![udp, tcp]);
            let config = ResolverConfig::from_parts(None, Vec::new(), vec![server]);
            let mut builder = TokioResolver::builder_with_config(config, TokioRuntimeProvider::default());
            // Whoever names a server means that one, and not the host's own list beside it.
            builder.options_mut().use_hosts_file = ResolveHosts::Never;
            builder.build()
        }
    };
    built.map_err(|error| error.to_string())
}

fn unreachable_host(host: &str, port: u16, cause: &str, errno: &str) -> Answer {
    Answer {
        value: serde_json::json!({ "error": { "errno": errno } }),
        ..Answer::failed(
            format!("{}:{port} cannot be reached: {cause}", net::bracketed(host)),
            "check that the server runs and that the host itself can reach it",
        )
    }
}

/// The error's name, as the program would know it.
pub(super) fn errno_of(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::ConnectionRefused => "ECONNREFUSED",
        io::ErrorKind::TimedOut => "ETIMEDOUT",
        io::ErrorKind::HostUnreachable => "EHOSTUNREACH",
        io::ErrorKind::NetworkUnreachable => "ENETUNREACH",
        _ => "ECONNRESET",
    }
}

/// What a connection that passes as bytes may carry of HTTP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Requests {
    /// Whatever comes: the policy says of the target that its bytes pass.
    Pass,
    /// None: the policy has rules for requests to the same target, and those must not be got round.
    ByThemselves,
}

/// The world of one `net/connect`: the connection that waits, and what it leads to.
pub struct Tunnel {
    outside: Arc<Outside>,
    requests: Requests,
    /// Says when the run is over.
    over: watch::Receiver<bool>,
    /// Whether what passes is kept, for a recording.
    keeps: bool,
    inside: Mutex<Option<TcpStream>>,
}

impl Tunnel {
    /// For this connection of the program's.
    pub fn new(outside: Arc<Outside>, inside: TcpStream, requests: Requests, over: watch::Receiver<bool>) -> Tunnel {
        Tunnel { outside, requests, over, keeps: false, inside: Mutex::new(Some(inside)) }
    }

    /// The same, with what passes in its answer.
    #[must_use]
    pub fn keeping(self) -> Tunnel {
        Tunnel { keeps: true, ..self }
    }

    /// The program's connection, if the world was not reached.
    pub fn into_inside(self) -> Option<TcpStream> {
        self.inside.into_inner().unwrap_or_else(PoisonError::into_inner)
    }

    async fn relay(&self, host: &str, port: u16) -> Answer {
        let Some(inside) = self.inside.lock().unwrap_or_else(PoisonError::into_inner).take() else {
            return Answer::failed("the connection was used already", "report this: it is a bug of Tollgate's");
        };
        let outside = match self.outside.dial(host, port).await {
            Ok(outside) => outside,
            Err(answer) => {
                reset(&inside);
                return answer;
            }
        };
        let (from_program, to_program) = inside.into_split();
        let (from_server, to_server) = outside.into_split();
        let (mut sent, mut received) = (0, 0);
        let kept = self.keeps.then(Mutex::<Conversation>::default);
        let mut named = None;
        let ended = {
            let up = async {
                // However late it comes: by then the connection is one whose bytes pass.
                match first_words(from_program.as_ref(), FOREVER, FOREVER).await {
                    Speaks::Tls(Some(name)) if !name.trim_end_matches('.').eq_ignore_ascii_case(host) => {
                        return Err(Ended::OtherName(name))
                    }
                    Speaks::Http | Speaks::Tls(_) if self.requests == Requests::ByThemselves => {
                        return Err(Ended::LateRequest)
                    }
                    Speaks::Tls(name) => named = Some(name),
                    Speaks::Http | Speaks::Other | Speaks::Nothing => {}
                }
                let way = Way { side: Side::Program, kept: kept.as_ref() };
                copy(from_program, to_server, &mut sent, way).await.map_err(|error| Ended::Broken(error.to_string()))
            };
            let down = async {
                let way = Way { side: Side::Server, kept: kept.as_ref() };
                copy(from_server, to_program, &mut received, way).await.map_err(|e| Ended::Broken(e.to_string()))
            };
            tokio::select! {
                ended = async { tokio::try_join!(up, down).map(|_| ()) } => ended,
                () = run_over(self.over.clone()) => Err(Ended::RunOver),
            }
        };
        let tls = match &named {
            Some(Some(name)) => format!("; TLS to `{name}`, not looked into"),
            Some(None) => "; TLS without a server name, not looked into".to_owned(),
            None => String::new(),
        };
        let passed = |how: &str| passed(how, sent, received, &tls);
        let body = kept.and_then(|kept| kept.into_inner().unwrap_or_else(PoisonError::into_inner).finish());
        let answer = match ended {
            Ok(()) => passed(BY_BOTH),
            Err(Ended::RunOver) => passed(AS_THE_RUN_ENDED),
            Err(Ended::Broken(cause)) => passed(&broken_off(&cause)),
            Err(Ended::LateRequest) => Answer::refused(
                "containment",
                format!("a request came on the connection to `{host}` after it was taken for another protocol"),
                "send the request as soon as the connection stands",
            ),
            Err(Ended::OtherName(name)) => Answer::refused(
                "containment",
                format!("the connection is to `{host}`, and its TLS handshake names `{name}`"),
                format!("connect to `{name}` by that name, and admit it: `--allow {name}`"),
            ),
        };
        match answer.is_success() {
            true => Answer { digest: body.as_deref().map(Digest::of), body, ..answer },
            false => answer,
        }
    }

    /// Holds a conversation again with the program, which has to say what it said then.
    async fn play(&self, host: &str, port: u16, answer: Answer) -> Answer {
        let inside = self.inside.lock().unwrap_or_else(PoisonError::into_inner).take();
        let said = answer.body.as_deref().and_then(pieces);
        let (Some(mut inside), Some(said)) = (inside, said) else { return answer };
        let held = async {
            let mut of_program = 0;
            for piece in said {
                match (piece.side, piece.bytes) {
                    (Side::Server, []) => inside.shutdown().await.map_err(|error| error.to_string())?,
                    (Side::Server, bytes) => inside.write_all(bytes).await.map_err(|error| error.to_string())?,
                    (Side::Program, []) => {
                        if inside.read(&mut [0]).await.map_err(|error| error.to_string())? > 0 {
                            return Err(format!("said more than {of_program} bytes"));
                        }
                    }
                    (Side::Program, bytes) => {
                        let mut got = vec![0; PIECE.min(bytes.len())];
                        for expected in bytes.chunks(PIECE) {
                            let got = &mut got[..expected.len()];
                            if inside.read_exact(got).await.is_err() {
                                return Err(format!("said less than the recorded bytes after byte {of_program}"));
                            }
                            if let Some(at) = got.iter().zip(expected).position(|(one, other)| one != other) {
                                return Err(format!("said something else from byte {} on", of_program + at));
                            }
                            of_program += expected.len();
                        }
                    }
                }
            }
            Ok(())
        };
        let mut over = self.over.clone();
        let ended = tokio::select! {
            ended = held => ended,
            _ = async { over.wait_for(|over| *over).await.map(|_| ()) } => Err("ended before all of it was said".to_owned()),
        };
        match ended {
            Ok(()) => answer,
            Err(how) => {
                reset(&inside);
                Answer::refused(
                    "replay",
                    format!("on the connection to `{}:{port}` the program {how}", net::bracketed(host)),
                    "what is encrypted by the program itself, or holds the time, cannot be replayed; record the run anew \
                     where the program has changed",
                )
            }
        }
    }
}

/// Passes bytes between the program and somebody outside until both are done, or a moment after the run is over.
pub async fn relay(program: TcpStream, outside: TcpStream, over: watch::Receiver<bool>) -> Answer {
    let _ = (program.set_nodelay(true), outside.set_nodelay(true));
    let (from_program, to_program) = program.into_split();
    let (from_outside, to_outside) = outside.into_split();
    let (mut sent, mut received) = (0, 0);
    let ended = {
        let up = copy(from_program, to_outside, &mut sent, Way { side: Side::Program, kept: None });
        let down = copy(from_outside, to_program, &mut received, Way { side: Side::Server, kept: None });
        tokio::select! {
            ended = async { tokio::try_join!(up, down) } => match ended {
                Ok(_) => BY_BOTH.to_owned(),
                Err(error) => broken_off(&error),
            },
            () = run_over(over) => AS_THE_RUN_ENDED.to_owned(),
        }
    };
    passed(&ended, sent, received, "")
}

/// Is ready a moment after the run is over, in which the other side may close its own.
async fn run_over(mut over: watch::Receiver<bool>) {
    // The sender going away means the same.
    let _ = over.wait_for(|over| *over).await;
    tokio::time::sleep(LAST_WORDS).await;
}

const BY_BOTH: &str = "closed by both sides";
const AS_THE_RUN_ENDED: &str = "closed as the run ended";

fn broken_off(cause: &dyn std::fmt::Display) -> String {
    format!("broken off ({cause})")
}

/// The answer about a connection whose bytes passed: how it ended, how many there were, and what else is known of it.
fn passed(how: &str, sent: u64, received: u64, more: &str) -> Answer {
    let value = serde_json::json!({ "sent": sent, "received": received });
    Answer {
        reason: format!("{how}; {sent} bytes sent, {received} received{more}"),
        ..Answer::done(value, sent + received)
    }
}

/// How a relayed connection ended, other than by both sides.
enum Ended {
    Broken(String),
    OtherName(String),
    LateRequest,
    RunOver,
}

impl World for Tunnel {
    fn execute<'a>(&'a self, effect: &'a Effect) -> BoxFuture<'a, Answer> {
        Box::pin(async move {
            match &effect.request {
                Request::Net(net::Request::Connect { host, port, .. }) => self.relay(host, *port).await,
                _ => Answer::failed("this is no connection", "report this: it is a bug of Tollgate's"),
            }
        })
    }

    fn give<'a>(&'a self, effect: &'a Effect, answer: Answer) -> BoxFuture<'a, Answer> {
        Box::pin(async move {
            match &effect.request {
                Request::Net(net::Request::Connect { host, port, .. }) if answer.is_success() => {
                    self.play(host, *port, answer).await
                }
                _ => answer,
            }
        })
    }
}

/// One direction of a connection, and where what passes is kept.
struct Way<'a> {
    side: Side,
    kept: Option<&'a Mutex<Conversation>>,
}

impl Way<'_> {
    fn keep(&self, keep: impl FnOnce(&mut Conversation)) {
        if let Some(kept) = self.kept {
            keep(&mut kept.lock().unwrap_or_else(PoisonError::into_inner));
        }
    }
}

async fn copy(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, count: &mut u64, way: Way<'_>) -> io::Result<()> {
    let mut piece = vec![0; PIECE];
    loop {
        let length = from.read(&mut piece).await?;
        if length == 0 {
            way.keep(|kept| kept.ended(way.side));
            return to.shutdown().await;
        }
        way.keep(|kept| kept.said(way.side, &piece[..length]));
        to.write_all(&piece[..length]).await?;
        *count += length as u64;
    }
}

/// Makes the connection end with a reset when it is closed, which is what a program sees of a refusal after its connect
/// has succeeded (socket(7), `SO_LINGER` with no time).
pub fn reset(stream: &impl AsFd) {
    let linger = libc::linger { l_onoff: 1, l_linger: 0 };
    // Where this fails the program sees an orderly end instead.
    let _ = nix::sys::socket::setsockopt(stream, nix::sys::socket::sockopt::Linger, &linger);
}
