//! HTTP/1.1 on Unix sockets: what the API door and the control door share.
//!
//! hyper parses; this module bounds. Every limit is applied before memory is allocated for what it limits: the number
//! of connections, the size of a head, the size of a body, the time a client may take for either. It knows nothing of
//! effects.

use http_body_util::{BodyExt as _, LengthLimitError, Limited};
use hyper::{
    body::{Body, Bytes, Frame, Incoming, SizeHint},
    header, Request, Response, StatusCode,
};
use hyper_util::rt::{TokioIo, TokioTimer};
use nix::poll::{poll, PollFd, PollFlags, PollTimeout};
use std::{
    convert::Infallible,
    fs,
    future::Future,
    io,
    os::{
        fd::{AsFd as _, AsRawFd as _, OwnedFd},
        unix::fs::{FileTypeExt as _, PermissionsExt as _},
    },
    path::{Path, PathBuf},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{UnixListener, UnixStream},
    sync::{watch, OwnedSemaphorePermit, Semaphore},
};

use crate::chain::BoxFuture;

/// Connections that one socket serves at once. Further ones wait in the kernel's backlog, unanswered, until one closes.
pub const MAX_CONNECTIONS: usize = 64;

/// How long a client may take to send a request's head, and how long an idle connection is kept.
pub const HEAD_TIMEOUT: Duration = Duration::from_secs(30);

/// How long a client may pause within a body.
pub const BODY_PAUSE: Duration = Duration::from_secs(15);

/// How long a body may take altogether.
pub const BODY_TIMEOUT: Duration = Duration::from_secs(300);

/// How long a shutdown waits for requests that are under way. A run's program is gone by then; only what it left
/// behind half done is waited for.
pub const SHUTDOWN_GRACE: Duration = Duration::from_secs(2);

/// The longest head in bytes, request line and headers together. hyper refuses less than 8 KiB; a percent-encoded
/// path of `PATH_MAX` (4096) bytes needs 12 KiB.
const MAX_HEAD: usize = 16 * 1024;

/// The most headers a request may have.
const MAX_HEADERS: usize = 48;

/// A body is handed to the connection in pieces of this size, so that what it holds is released only as it is read.
const PIECE: usize = 64 * 1024;

/// A response of ours.
pub type Reply = Response<Content>;

/// What answers requests. The door behind the socket.
pub trait Service: Send + Sync + 'static {
    /// Answers one request. Whatever goes wrong is an answer too.
    fn answer(self: Arc<Self>, request: Request<Incoming>, peer: Peer) -> BoxFuture<'static, Reply>;
}

/// What the kernel vouches for about the other end of a connection (unix(7), `SO_PEERCRED`).
#[derive(Clone, Debug, Default)]
pub struct Peer {
    /// The user id of the process that connected; none where the transport has no credentials.
    pub uid: Option<u32>,
    /// The connection itself.
    pub line: Line,
}

/// A look at a connection from beside its traffic.
#[derive(Clone, Debug, Default)]
pub struct Line(Option<Arc<OwnedFd>>);

impl Line {
    /// Of this stream. Without a descriptor to spare the other end counts as there.
    fn of(stream: &UnixStream) -> Line {
        Line(stream.as_fd().try_clone_to_owned().ok().map(Arc::new))
    }

    /// Whether the other end is closed whole, which a client that only said all it has to say is not (poll(2),
    /// `POLLHUP`).
    pub fn is_hung_up(&self) -> bool {
        let Some(descriptor) = &self.0 else { return false };
        let mut look = [PollFd::new(descriptor.as_fd(), PollFlags::empty())];
        let hung_up = |look: &PollFd<'_>| look.revents().is_some_and(|found| found.contains(PollFlags::POLLHUP));
        poll(&mut look, PollTimeout::ZERO).is_ok() && hung_up(&look[0])
    }
}

/// The bytes of a response, and the share of the read budget that they occupy until they are sent.
#[derive(Debug, Default)]
pub struct Content {
    bytes: Bytes,
    held: Option<OwnedSemaphorePermit>,
    /// How many of the bytes are never sent.
    kept_back: usize,
}

/// A body that ends before its announced length, on purpose.
#[derive(Debug, thiserror::Error)]
#[error("the answer breaks off here, by a fault rule")]
pub struct BreaksOff;

impl Content {
    /// A body of these bytes.
    pub fn new(bytes: impl Into<Bytes>) -> Content {
        Content { bytes: bytes.into(), held: None, kept_back: 0 }
    }

    /// A body that gives its permit back once it is sent or dropped.
    pub fn holding(bytes: impl Into<Bytes>, permit: OwnedSemaphorePermit) -> Content {
        Content { bytes: bytes.into(), held: Some(permit), kept_back: 0 }
    }

    /// The same body, of which the second half is announced and never sent: the connection ends in its place.
    #[must_use]
    pub fn breaking_off(self) -> Content {
        Content { kept_back: self.bytes.len().div_ceil(2), ..self }
    }

    /// The bytes not yet sent.
    pub fn bytes(&self) -> &Bytes {
        &self.bytes
    }
}

impl Body for Content {
    type Data = Bytes;
    type Error = BreaksOff;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BreaksOff>>> {
        if self.bytes.is_empty() {
            self.held = None;
            return Poll::Ready(None);
        }
        let length = self.bytes.len().saturating_sub(self.kept_back).min(PIECE);
        if length == 0 {
            return Poll::Ready(Some(Err(BreaksOff)));
        }
        Poll::Ready(Some(Ok(Frame::data(self.bytes.split_to(length)))))
    }

    fn is_end_stream(&self) -> bool {
        self.bytes.is_empty()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.bytes.len() as u64)
    }
}

/// A JSON response.
pub fn json(status: StatusCode, value: &impl serde::Serialize) -> Reply {
    let (status, bytes) = match serde_json::to_vec(value) {
        Ok(bytes) => (status, bytes),
        Err(cause) => {
            tracing::error!(%cause, "an answer cannot be written as JSON");
            (StatusCode::INTERNAL_SERVER_ERROR, br#"{"error":{"type":"internal"}}"#.to_vec())
        }
    };
    let mut reply = Response::new(Content::new(bytes));
    *reply.status_mut() = status;
    reply.headers_mut().insert(header::CONTENT_TYPE, header::HeaderValue::from_static("application/json"));
    reply
}

/// Accepts connections until `shutdown` is ready, then lets what is under way finish, for [`SHUTDOWN_GRACE`] at most.
pub async fn serve(listener: UnixListener, service: Arc<impl Service>, shutdown: impl Future<Output = ()>) {
    let slots = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    let (stop, stopped) = watch::channel(());
    let mut connections = tokio::task::JoinSet::new();
    tokio::pin!(shutdown);
    loop {
        let accepted = tokio::select! {
            biased;
            () = &mut shutdown => break,
            Some(_) = connections.join_next() => continue,
            accepted = accept(&listener, &slots) => accepted,
        };
        let Some((stream, slot)) = accepted else { continue };
        let uid = stream.peer_cred().ok().map(|credentials| credentials.uid());
        let peer = Peer { uid, line: Line::of(&stream) };
        let (service, mut stopped) = (Arc::clone(&service), stopped.clone());
        connections.spawn(async move {
            connection(stream, service, peer, async move {
                let _ = stopped.changed().await;
            })
            .await;
            drop(slot);
        });
    }
    drop(stop);
    let finish = async { while connections.join_next().await.is_some() {} };
    if tokio::time::timeout(SHUTDOWN_GRACE, finish).await.is_err() {
        connections.abort_all();
    }
}

/// The next connection and its slot. An error of accept(2) (a descriptor limit, say) is waited out, not fatal.
async fn accept(listener: &UnixListener, slots: &Arc<Semaphore>) -> Option<(UnixStream, OwnedSemaphorePermit)> {
    let slot = Arc::clone(slots).acquire_owned().await.ok()?;
    match listener.accept().await {
        Ok((stream, _)) => Some((stream, slot)),
        Err(cause) => {
            tracing::warn!(%cause, "cannot accept a connection; trying again");
            tokio::time::sleep(Duration::from_millis(100)).await;
            None
        }
    }
}

/// Serves one connection until it closes, breaks a limit, or `stop` is ready and its request is answered.
pub async fn connection<S: Service>(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send,
    service: Arc<S>,
    peer: Peer,
    stop: impl Future<Output = ()>,
) {
    let answer = move |request| {
        let (service, peer) = (Arc::clone(&service), peer.clone());
        async move { Ok::<_, Infallible>(service.answer(request, peer).await) }
    };
    let serving = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIMEOUT)
        // A client that has said all may say so, and still wants its answer.
        .half_close(true)
        .max_buf_size(MAX_HEAD)
        .max_headers(MAX_HEADERS)
        .serve_connection(TokioIo::new(stream), hyper::service::service_fn(answer));
    tokio::pin!(serving);
    tokio::pin!(stop);
    let ended = tokio::select! {
        ended = serving.as_mut() => ended,
        () = stop => {
            serving.as_mut().graceful_shutdown();
            serving.await
        }
    };
    if let Err(cause) = ended {
        tracing::debug!(%cause, "a connection ended early");
    }
}

/// Why a body could not be read.
#[derive(Debug, thiserror::Error)]
pub enum BodyError {
    /// Longer than allowed.
    #[error("the body is longer than {limit} bytes")]
    TooLarge {
        /// The most that is allowed, in bytes.
        limit: usize,
    },
    /// The client paused or took too long.
    #[error("the body did not arrive in time ({} s for a pause, {} s in all)", BODY_PAUSE.as_secs(), BODY_TIMEOUT.as_secs())]
    TooSlow,
    /// The connection broke, or the framing is wrong.
    #[error("the body could not be read")]
    Broken(#[source] Box<dyn std::error::Error + Send + Sync>),
}

/// Reads a whole body of at most `limit` bytes.
///
/// # Errors
/// A longer one is refused by its declared length before anything is read, and by count otherwise.
pub async fn whole_body(body: Incoming, limit: usize) -> Result<Vec<u8>, BodyError> {
    if body.size_hint().lower() > limit as u64 {
        return Err(BodyError::TooLarge { limit });
    }
    let mut body = Limited::new(body, limit);
    let read = async {
        let mut whole = Vec::new();
        while let Some(piece) = next_piece(&mut body, limit).await? {
            whole.extend_from_slice(&piece);
        }
        Ok(whole)
    };
    tokio::time::timeout(BODY_TIMEOUT, read).await.unwrap_or(Err(BodyError::TooSlow))
}

/// The next bytes of a body, or none at its end.
///
/// # Errors
/// As [`BodyError`].
pub async fn next_piece(body: &mut Limited<Incoming>, limit: usize) -> Result<Option<Bytes>, BodyError> {
    loop {
        let frame = match tokio::time::timeout(BODY_PAUSE, body.frame()).await {
            Err(_elapsed) => return Err(BodyError::TooSlow),
            Ok(None) => return Ok(None),
            Ok(Some(Err(cause))) if cause.is::<LengthLimitError>() => return Err(BodyError::TooLarge { limit }),
            Ok(Some(Err(cause))) => return Err(BodyError::Broken(cause)),
            Ok(Some(Ok(frame))) => frame,
        };
        // Trailers carry nothing that we use.
        if let Ok(piece) = frame.into_data() {
            return Ok(Some(piece));
        }
    }
}

/// Decodes `%NN`, strictly: any other `%` is an error. A plus sign is a plus sign.
pub fn percent_decode(text: &str) -> Option<Vec<u8>> {
    let mut decoded = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&first, after)) = rest.split_first() {
        if first != b'%' {
            decoded.push(first);
            rest = after;
            continue;
        }
        let mut byte = [0];
        hex::decode_to_slice(after.get(..2)?, &mut byte).ok()?;
        decoded.push(byte[0]);
        rest = &after[2..];
    }
    Some(decoded)
}

/// Splits a query into decoded names and values. None where an escape is wrong or the text is not UTF-8.
pub fn query(text: &str) -> Option<Vec<(String, String)>> {
    let decode = |part: &str| String::from_utf8(percent_decode(part)?).ok();
    text.split('&')
        .filter(|pair| !pair.is_empty())
        .map(|pair| {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            Some((decode(name)?, decode(value)?))
        })
        .collect()
}

/// Binds a listening socket `name` in `directory` with these permission bits, replacing a socket left there.
///
/// The address is given by way of the directory's descriptor, since `sun_path` holds 108 bytes (unix(7)) and state
/// directories may be deeper. Must be called within a runtime.
///
/// # Errors
/// As open(2), unlink(2), bind(2) and chmod(2). Something else than a socket in its place is not removed.
pub fn bind(directory: &Path, name: &str, mode: u32) -> io::Result<UnixListener> {
    UnixListener::from_std(listen_at(directory, name, mode)?)
}

/// As [`bind`], for a runtime that is not there yet: whoever connects waits for it.
///
/// # Errors
/// As [`bind`].
pub fn listen_at(directory: &Path, name: &str, mode: u32) -> io::Result<std::os::unix::net::UnixListener> {
    let (_held, path) = address(directory, name)?;
    match fs::symlink_metadata(&path) {
        Ok(metadata) if metadata.file_type().is_socket() => fs::remove_file(&path)?,
        Ok(_) => return Err(io::Error::new(io::ErrorKind::AlreadyExists, format!("{name} exists and is no socket"))),
        Err(absent) if absent.kind() == io::ErrorKind::NotFound => {}
        Err(cause) => return Err(cause),
    }
    let listener = std::os::unix::net::UnixListener::bind(&path)?;
    fs::set_permissions(&path, fs::Permissions::from_mode(mode))?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// Connects to the socket `name` in `directory`, as [`bind`] made it.
///
/// # Errors
/// As open(2) and connect(2).
pub async fn connect(directory: &Path, name: &str) -> io::Result<UnixStream> {
    let (_held, path) = address(directory, name)?;
    UnixStream::connect(path).await
}

/// A short path to `name` in `directory`, valid while the descriptor is open.
fn address(directory: &Path, name: &str) -> io::Result<(OwnedFd, PathBuf)> {
    use nix::{
        fcntl::{open, OFlag},
        sys::stat::Mode,
    };
    let held = open(directory, OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC, Mode::empty())?;
    let path = PathBuf::from(format!("/proc/self/fd/{}/{name}", held.as_raw_fd()));
    Ok((held, path))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_wrong_escape_is_an_error_and_not_a_literal() {
        for text in ["%", "%2", "%zz", "a%2", "%+1"] {
            assert_eq!(percent_decode(text), None, "{text}");
        }
        assert_eq!(percent_decode("a%20b+c%FF").as_deref(), Some(b"a b+c\xff".as_slice()));
    }

    #[test]
    fn a_query_keeps_repeated_names_in_order() {
        let pairs = query("command=a&command=b%26c&flag").expect("is well-formed");
        let expected = [("command", "a"), ("command", "b&c"), ("flag", "")];
        assert_eq!(pairs, expected.map(|(name, value)| (name.to_owned(), value.to_owned())));
        assert_eq!(query("a=%ff"), None);
    }

    #[tokio::test]
    async fn a_socket_deeper_than_108_bytes_is_bound_and_reached() {
        let root = tempfile::tempdir().expect("a temporary directory");
        let deep = root.path().join("d".repeat(100)).join("e".repeat(100));
        fs::create_dir_all(&deep).expect("directories");
        let listener = bind(&deep, "control.sock", 0o600).expect("binds");
        let (client, server) = tokio::join!(connect(&deep, "control.sock"), listener.accept());
        client.expect("connects");
        server.expect("accepts");
        let mode = fs::metadata(deep.join("control.sock")).expect("is there").permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        drop(listener);
        bind(&deep, "control.sock", 0o600).expect("replaces a socket left behind");
    }

    #[tokio::test]
    async fn a_file_in_the_sockets_place_is_left_alone() {
        let root = tempfile::tempdir().expect("a temporary directory");
        fs::write(root.path().join("control.sock"), "mine").expect("writes");
        assert!(bind(root.path(), "control.sock", 0o600).is_err());
        assert_eq!(fs::read(root.path().join("control.sock")).expect("is there"), b"mine");
    }

    proptest! {
        #[test]
        fn decoding_undoes_encoding(bytes: Vec<u8>) {
            let encoded: String = bytes.iter().map(|byte| format!("%{byte:02x}")).collect();
            prop_assert_eq!(percent_decode(&encoded), Some(bytes));
        }
    }
}
