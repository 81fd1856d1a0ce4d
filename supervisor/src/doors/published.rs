//! Ports that a run publishes: connections from the host into the jail, each one effect.
//!
//! The sockets on the host are bound before anything is built, so that a port that is taken refuses the run. A connection
//! into the jail is begun by its pid 1, within its namespace, and handed over as a socket; bytes pass here.

use crate::{
    chain::{Answer, BoxFuture, Chain, World},
    effect::{self, net, Effect, Kind, RoomId, Subject},
    policy::published::Published,
    world::net::{relay, reset},
};
use std::{
    collections::HashMap,
    future::Future,
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    os::fd::OwnedFd,
    sync::{
        atomic::{AtomicU64, Ordering},
        Arc, Mutex, PoisonError,
    },
    time::Duration,
};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::{oneshot, watch, Semaphore},
    time::timeout,
};

/// So many connections at once; further ones wait to be accepted.
const MAX_CONNECTIONS: usize = 512;

/// How long the jail may take to begin a connection, and its program to take it.
const PATIENCE: Duration = Duration::from_secs(10);

/// Begins connections within a jail, and hands them over.
#[derive(Default)]
pub struct Dialler {
    next: AtomicU64,
    waiting: Mutex<HashMap<u64, oneshot::Sender<io::Result<OwnedFd>>>>,
}

/// How the jail is asked for a connection: its number, and where to.
pub type Ask = Arc<dyn Fn(u64, SocketAddr) -> io::Result<()> + Send + Sync>;

impl Dialler {
    /// What the jail answered. Nobody may wait for it any more.
    pub fn dialled(&self, id: u64, errno: Option<i32>, socket: Option<OwnedFd>) {
        let waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner).remove(&id);
        let came = match (socket, errno) {
            (Some(socket), None) => Ok(socket),
            (_, errno) => Err(io::Error::from_raw_os_error(errno.unwrap_or(libc::ECONNREFUSED))),
        };
        if let Some(waiting) = waiting {
            let _ = waiting.send(came);
        }
    }

    /// A connection to a port of the jail, at whichever of its loopback addresses somebody listens.
    async fn dial(&self, ask: &Ask, port: u16) -> io::Result<TcpStream> {
        let mut last = io::Error::from_raw_os_error(libc::ECONNREFUSED);
        for address in [IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V6(Ipv6Addr::LOCALHOST)] {
            match self.dial_at(ask, SocketAddr::new(address, port)).await {
                Ok(stream) => return Ok(stream),
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    async fn dial_at(&self, ask: &Ask, to: SocketAddr) -> io::Result<TcpStream> {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let (send, came) = oneshot::channel();
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner).insert(id, send);
        let stands = async {
            ask(id, to)?;
            let socket = came.await.unwrap_or_else(|_gone| Err(io::Error::from_raw_os_error(libc::ECONNRESET)))?;
            let stream = TcpStream::from_std(std::net::TcpStream::from(socket))?;
            stream.writable().await?;
            match stream.take_error()? {
                None => Ok(stream),
                Some(error) => Err(error),
            }
        };
        let stands = timeout(PATIENCE, stands).await;
        // Also where the jail never answered.
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner).remove(&id);
        stands.unwrap_or_else(|_elapsed| Err(io::Error::from_raw_os_error(libc::ETIMEDOUT)))
    }
}

/// The sockets of a run's published ports, bound and not yet served.
pub struct Bound(Vec<(Published, std::net::TcpListener)>);

/// Binds the ports on the host.
///
/// # Errors
/// The first that cannot be had, in one sentence.
pub fn bind(ports: &[Published]) -> Result<Bound, String> {
    let bound = ports.iter().map(|port| {
        let listener = std::net::TcpListener::bind(port.at).and_then(|listener| {
            listener.set_nonblocking(true)?;
            Ok(listener)
        });
        let failed = |error| {
            format!(
                "port {} cannot be published at {}: {error}; name another with `--publish ADDRESS:PORT:{}`",
                port.inside, port.at, port.inside
            )
        };
        listener.map(|listener| (*port, listener)).map_err(failed)
    });
    bound.collect::<Result<_, _>>().map(Bound)
}

/// What serves published ports.
pub struct Parts {
    /// The run's chain.
    pub chain: Arc<Chain>,
    /// Whose effects they are.
    pub subject: Subject,
    /// The room they happen in.
    pub room: Option<RoomId>,
    /// Connects within the jail.
    pub dialler: Arc<Dialler>,
    /// Asks the jail.
    pub ask: Ask,
}

/// Serves the ports until `shutdown` is ready, and then ends what is under way.
///
/// # Errors
/// Where a socket cannot be used by the runtime.
pub async fn serve(bound: Bound, parts: Parts, shutdown: impl Future<Output = ()>) -> io::Result<()> {
    let parts = Arc::new(parts);
    let slots = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    let (end, over) = watch::channel(false);
    let mut accepting = tokio::task::JoinSet::new();
    for (port, listener) in bound.0 {
        let listener = TcpListener::from_std(listener)?;
        let (parts, slots, over) = (Arc::clone(&parts), Arc::clone(&slots), over.clone());
        accepting.spawn(async move {
            let mut connections = tokio::task::JoinSet::new();
            let mut ended = over.clone();
            loop {
                let Ok(slot) = Arc::clone(&slots).acquire_owned().await else { break };
                let accepted = tokio::select! {
                    accepted = listener.accept() => accepted,
                    _ = ended.wait_for(|ended| *ended) => break,
                };
                while connections.try_join_next().is_some() {}
                match accepted {
                    Ok((stream, from)) => {
                        let (parts, over) = (Arc::clone(&parts), over.clone());
                        connections.spawn(async move {
                            let _slot = slot;
                            parts.accept(port, stream, from, over).await;
                        });
                    }
                    // Out of descriptors, it would fail again at once.
                    Err(_lost) => tokio::time::sleep(Duration::from_millis(10)).await,
                }
            }
            while connections.join_next().await.is_some() {}
        });
    }
    shutdown.await;
    let _ = end.send(true);
    while accepting.join_next().await.is_some() {}
    Ok(())
}

impl Parts {
    async fn accept(&self, port: Published, stream: TcpStream, from: SocketAddr, over: watch::Receiver<bool>) {
        let request = net::Request::Accept {
            host: port.at.ip().to_string(),
            port: port.at.port(),
            inside: port.inside,
            from: from.ip().to_canonical().to_string(),
        };
        let effect = Effect {
            kind: Kind::NetAccept,
            resource: request.resource(),
            subject: self.subject.clone(),
            room: self.room.clone(),
            door: effect::Door::Network,
            request: effect::Request::Net(request),
        };
        let inward = Inward { parts: self, outside: Mutex::new(Some(stream)), over };
        self.chain.perform(&effect, &inward).await;
        let left = inward.outside.into_inner().unwrap_or_else(PoisonError::into_inner);
        // Whoever said no: the connection stands already, so a reset is how the other side is told.
        if let Some(stream) = left {
            reset(&stream);
        }
    }
}

/// The world of one `net/accept`.
struct Inward<'a> {
    parts: &'a Parts,
    outside: Mutex<Option<TcpStream>>,
    over: watch::Receiver<bool>,
}

impl World for Inward<'_> {
    fn execute<'a>(&'a self, effect: &'a Effect) -> BoxFuture<'a, Answer> {
        Box::pin(async move {
            let outside = self.outside.lock().unwrap_or_else(PoisonError::into_inner).take();
            let (effect::Request::Net(net::Request::Accept { inside, .. }), Some(outside)) = (&effect.request, outside)
            else {
                return Answer::failed("this is no connection from the host", "report this: it is a bug of Tollgate's");
            };
            match self.parts.dialler.dial(&self.parts.ask, *inside).await {
                Ok(stream) => relay(stream, outside, self.over.clone()).await,
                Err(error) => {
                    reset(&outside);
                    Answer {
                        value: serde_json::json!({ "error": { "errno": "ECONNREFUSED" } }),
                        ..Answer::failed(
                            format!("nobody in the jail takes connections on port {inside}: {error}"),
                            "have the program listen on that port, at 127.0.0.1, ::1 or every address",
                        )
                    }
                }
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn what_the_jail_says_too_late_or_to_nobody_is_dropped() {
        let dialler = Dialler::default();
        dialler.dialled(7, None, None);
        let ask: Ask = Arc::new(|_, _| Err(io::Error::from_raw_os_error(libc::EPIPE)));
        let failed = dialler.dial(&ask, 80).await.expect_err("the jail is gone");
        assert_eq!(failed.raw_os_error(), Some(libc::EPIPE));
        assert!(dialler.waiting.lock().unwrap().is_empty());
    }
}
