//! The control door: how the command line reaches a run that another process supervises.
//!
//! Each run has a socket `control.sock` in its own directory, mode 0600, never shown to a jail. Only the user who
//! started the run and root are answered, by what the kernel says about the connection (unix(7), `SO_PEERCRED`).

use super::http::{self, json, whole_body, Content, Peer, Reply, Service};
use crate::{
    chain::{
        approval::{DecideError, Desk, Word},
        BoxFuture,
    },
    ledger::record::{Receipt, RunRecord},
};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::{
    body::{Bytes, Incoming},
    header::{self, HeaderValue},
    Method, Request, Response, StatusCode,
};
use hyper_util::rt::TokioIo;
use nix::sys::signal::Signal;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::{future::Future, io, path::Path, sync::Arc, time::Duration};
use tokio::net::UnixListener;

/// The socket's name in the run's directory.
pub const SOCKET: &str = "control.sock";

/// The longest request body in bytes: a signal's name.
const MAX_BODY: usize = 1024;

/// The most that one answer holds of a log, in bytes, and of receipts, in number.
const MAX_LOG: u64 = 1024 * 1024;
/// See [`MAX_LOG`].
const MAX_RECEIPTS: u64 = 1000;

/// The longest answer that a client takes, in bytes.
const MAX_ANSWER: usize = 16 * 1024 * 1024;

/// How long a client waits for an answer. Nothing at this door waits for the program.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// A run that can be asked and ended from outside.
pub trait Controlled: Send + Sync + 'static {
    /// The run as it is now.
    fn record(&self) -> RunRecord;

    /// Sends a signal: SIGKILL ends the whole jail, any other goes to the program's process group. Returns at once.
    ///
    /// # Errors
    /// When the run is over or cannot be reached.
    fn kill(&self, signal: Signal) -> io::Result<()>;

    /// Receipts after this place in the run's chain, at most so many.
    ///
    /// # Errors
    /// When the ledger cannot be read.
    fn receipts(&self, after: u64, limit: u64) -> io::Result<Vec<Receipt>>;

    /// What the program printed, from this offset, at most so many bytes.
    ///
    /// # Errors
    /// When the log cannot be read; `NotFound` where the run has no such stream.
    fn log(&self, stream: Stream, offset: u64, limit: u64) -> io::Result<Vec<u8>>;

    /// Where its questions wait, of a run that asks any.
    fn desk(&self) -> Option<Arc<Desk>> {
        None
    }
}

/// A person's word on a question.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Decision {
    /// The question's name, whole.
    pub id: String,
    /// The word.
    pub word: Word,
}

/// Something that the program prints to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Stream {
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
    /// The terminal, of a run that has one.
    Terminal,
}

impl Stream {
    /// The log's name in the run's directory.
    pub const fn file(self) -> &'static str {
        match self {
            Stream::Stdout => "stdout.log",
            Stream::Stderr => "stderr.log",
            Stream::Terminal => "terminal.log",
        }
    }
}

/// Binds the control socket of a run in the run's directory.
///
/// # Errors
/// As [`http::bind`].
pub fn bind(run_dir: &Path) -> io::Result<UnixListener> {
    http::bind(run_dir, SOCKET, 0o600)
}

/// Serves a run's control socket until `shutdown` is ready.
pub async fn serve(listener: UnixListener, run: Arc<dyn Controlled>, shutdown: impl Future<Output = ()>) {
    http::serve(listener, Arc::new(Control { run }), shutdown).await;
}

struct Control {
    run: Arc<dyn Controlled>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Kill {
    #[serde(default)]
    signal: Option<String>,
}

#[derive(Serialize)]
struct Problem<'a> {
    #[serde(rename = "type")]
    problem: &'a str,
    reason: String,
}

fn problem(status: StatusCode, problem: &str, reason: impl Into<String>) -> Reply {
    json(status, &serde_json::json!({"error": Problem { problem, reason: reason.into() }}))
}

fn failed(cause: &io::Error) -> Reply {
    let status = match cause.kind() {
        io::ErrorKind::NotFound => StatusCode::NOT_FOUND,
        _ => StatusCode::CONFLICT,
    };
    problem(status, "failed", cause.to_string())
}

impl Service for Control {
    fn answer(self: Arc<Self>, request: Request<Incoming>, peer: Peer) -> BoxFuture<'static, Reply> {
        Box::pin(async move {
            let owner = self.run.record().subject.uid;
            let ours = nix::unistd::geteuid().as_raw();
            match peer.uid {
                Some(uid) if uid == 0 || uid == owner || uid == ours => self.dispatch(request, uid).await,
                Some(_) | None => {
                    problem(StatusCode::FORBIDDEN, "refused", "only the user who started the run, and root, may ask")
                }
            }
        })
    }
}

impl Control {
    async fn dispatch(&self, request: Request<Incoming>, uid: u32) -> Reply {
        let pairs = match http::query(request.uri().query().unwrap_or_default()) {
            Some(pairs) => pairs,
            None => return problem(StatusCode::BAD_REQUEST, "malformed", "the query has a wrong escape"),
        };
        match (request.method(), request.uri().path()) {
            (&Method::GET, "/v1/run") => json(StatusCode::OK, &self.run.record()),
            (&Method::POST, "/v1/kill") => self.kill(request.into_body()).await,
            (&Method::GET, "/v1/receipts") => match numbers(&pairs, ["after", "limit"], &[]) {
                Some([after, limit]) => {
                    let (run, limit) = (Arc::clone(&self.run), limit.unwrap_or(MAX_RECEIPTS).min(MAX_RECEIPTS));
                    let asked = blocking(move || run.receipts(after.unwrap_or(0), limit)).await;
                    asked.map_or_else(|cause| failed(&cause), |receipts| json(StatusCode::OK, &receipts))
                }
                None => problem(StatusCode::BAD_REQUEST, "malformed", "takes `after` and `limit`, numbers"),
            },
            (&Method::GET, "/v1/logs") => self.logs(&pairs).await,
            (&Method::GET, "/v1/approvals") => {
                json(StatusCode::OK, &self.run.desk().map(|desk| desk.parked()).unwrap_or_default())
            }
            (&Method::POST, "/v1/approvals") => self.decide(request.into_body(), uid).await,
            (_, "/v1/run" | "/v1/kill" | "/v1/receipts" | "/v1/logs" | "/v1/approvals") => {
                problem(StatusCode::METHOD_NOT_ALLOWED, "method-not-allowed", "this route does not take that method")
            }
            _ => problem(StatusCode::NOT_FOUND, "no-such-route", "there is no such route"),
        }
    }

    async fn kill(&self, body: Incoming) -> Reply {
        let body = match whole_body(body, MAX_BODY).await {
            Ok(body) => body,
            Err(cause) => return problem(StatusCode::BAD_REQUEST, "malformed", cause.to_string()),
        };
        let asked = if body.is_empty() { Ok(Kill { signal: None }) } else { serde_json::from_slice::<Kill>(&body) };
        let signal = match asked {
            Ok(Kill { signal }) => parse_signal(signal.as_deref().unwrap_or("SIGKILL")),
            Err(cause) => return problem(StatusCode::BAD_REQUEST, "malformed", cause.to_string()),
        };
        let Some(signal) = signal else {
            return problem(StatusCode::BAD_REQUEST, "malformed", "`signal` is no signal's name or number");
        };
        match self.run.kill(signal) {
            Ok(()) => json(StatusCode::ACCEPTED, &serde_json::json!({"signal": signal.as_str()})),
            Err(cause) => failed(&cause),
        }
    }

    /// A word is whose the kernel says that it is: nothing in the request says who decides.
    async fn decide(&self, body: Incoming, uid: u32) -> Reply {
        let body = match whole_body(body, MAX_BODY).await {
            Ok(body) => body,
            Err(cause) => return problem(StatusCode::BAD_REQUEST, "malformed", cause.to_string()),
        };
        let Decision { id, word } = match serde_json::from_slice(&body) {
            Ok(decision) => decision,
            Err(cause) => return problem(StatusCode::BAD_REQUEST, "malformed", cause.to_string()),
        };
        let Some(desk) = self.run.desk() else {
            return problem(StatusCode::CONFLICT, "failed", "the run asks nobody");
        };
        let decided = blocking(move || Ok(desk.decide(&id, word, uid))).await;
        match decided {
            Ok(Ok(decided)) => json(StatusCode::OK, &decided),
            Ok(Err(cause @ DecideError::NotWaiting(_))) => {
                problem(StatusCode::NOT_FOUND, "not-waiting", cause.to_string())
            }
            Ok(Err(cause @ (DecideError::NoRule { .. } | DecideError::Ledger(_)))) => {
                problem(StatusCode::CONFLICT, "failed", cause.to_string())
            }
            Err(cause) => failed(&cause),
        }
    }

    async fn logs(&self, pairs: &[(String, String)]) -> Reply {
        let stream = pairs.iter().find(|(name, _)| name == "stream").map_or("stdout", |(_, value)| value.as_str());
        let stream = Stream::deserialize(Value::from(stream));
        let (Ok(stream), Some([offset, limit])) = (stream, numbers(pairs, ["offset", "limit"], &["stream"])) else {
            let reason = "takes `stream` (stdout, stderr or terminal), `offset` and `limit`";
            return problem(StatusCode::BAD_REQUEST, "malformed", reason);
        };
        let (run, limit) = (Arc::clone(&self.run), limit.unwrap_or(MAX_LOG).min(MAX_LOG));
        match blocking(move || run.log(stream, offset.unwrap_or(0), limit)).await {
            Ok(bytes) => {
                let mut reply = Response::new(Content::new(bytes));
                let octets = HeaderValue::from_static("application/octet-stream");
                reply.headers_mut().insert(header::CONTENT_TYPE, octets);
                reply
            }
            Err(cause) => failed(&cause),
        }
    }
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> io::Result<T> + Send + 'static) -> io::Result<T> {
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|cause| Err(io::Error::other(cause)))
}

/// The values of these numeric parameters; none where another than they and `others` is given, or one is no number.
fn numbers<const N: usize>(pairs: &[(String, String)], names: [&str; N], others: &[&str]) -> Option<[Option<u64>; N]> {
    let mut values = [None; N];
    for (name, value) in pairs {
        match names.iter().position(|known| known == name) {
            Some(at) => values[at] = Some(value.parse().ok()?),
            None if others.contains(&name.as_str()) => {}
            None => return None,
        }
    }
    Some(values)
}

/// A signal by its name, with or without `SIG`, in any case, or by its number.
pub fn parse_signal(text: &str) -> Option<Signal> {
    if let Ok(number) = text.parse::<i32>() {
        return Signal::try_from(number).ok();
    }
    let name = text.to_ascii_uppercase();
    let name = if name.starts_with("SIG") { name } else { format!("SIG{name}") };
    name.parse().ok()
}

/// Why a run could not be asked.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// Nobody listens: the supervisor is gone, or the run is over.
    #[error("nobody answers at the run's control socket")]
    Unreachable(#[source] io::Error),
    /// The connection broke, or the answer is not what a supervisor says.
    #[error("the run's supervisor did not answer as it should: {0}")]
    Broken(String),
    /// No answer in ten seconds.
    #[error("the run's supervisor did not answer within {} s", ANSWER_TIMEOUT.as_secs())]
    Silent,
    /// The supervisor said no.
    #[error("{reason}")]
    Refused {
        /// The HTTP status.
        status: u16,
        /// Why.
        reason: String,
    },
}

/// Asks a run's control door one thing. `body` makes it a POST.
///
/// # Errors
/// As [`ClientError`].
pub async fn ask(run_dir: &Path, path: &str, body: Option<&Value>) -> Result<Vec<u8>, ClientError> {
    tokio::time::timeout(ANSWER_TIMEOUT, exchange(run_dir, path, body)).await.unwrap_or(Err(ClientError::Silent))
}

async fn exchange(run_dir: &Path, path: &str, body: Option<&Value>) -> Result<Vec<u8>, ClientError> {
    let broken = |cause: &dyn std::fmt::Display| ClientError::Broken(cause.to_string());
    let stream = http::connect(run_dir, SOCKET).await.map_err(ClientError::Unreachable)?;
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(|cause| broken(&cause))?;
    let asking = async {
        let request = Request::builder()
            .method(if body.is_some() { Method::POST } else { Method::GET })
            .uri(path)
            .header(header::HOST, "localhost")
            .body(Full::new(body.map_or_else(Bytes::new, |body| body.to_string().into())))
            .map_err(|cause| broken(&cause))?;
        let response = sender.send_request(request).await.map_err(|cause| broken(&cause))?;
        let status = response.status();
        let bytes = Limited::new(response.into_body(), MAX_ANSWER).collect().await.map_err(|cause| broken(&cause))?;
        let bytes = bytes.to_bytes().to_vec();
        if status.is_success() {
            return Ok(bytes);
        }
        let told: Value = serde_json::from_slice(&bytes).unwrap_or_default();
        let reason = told["error"]["reason"].as_str().unwrap_or("no reason was given").to_owned();
        Err(ClientError::Refused { status: status.as_u16(), reason })
    };
    tokio::pin!(asking);
    let mut connection = std::pin::pin!(connection);
    let mut open = true;
    loop {
        tokio::select! {
            answer = &mut asking => return answer,
            _ = connection.as_mut(), if open => open = false,
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::{
        effect::{RunId, Subject},
        ledger::record::{ChangesState, EffectCounts, RunState, Usage},
    };
    use std::sync::Mutex;

    /// A record with nothing special about it.
    pub(crate) fn record(id: &str, uid: u32) -> RunRecord {
        RunRecord {
            id: RunId(id.to_owned()),
            room: None,
            policy: "base".to_owned(),
            policy_digest: "0".repeat(64),
            command: vec!["true".to_owned()],
            workspace: "/home/agent/proj".to_owned(),
            subject: Subject { uid, run: None, agent: None },
            state: RunState::Running,
            outcome: None,
            started_at: "2026-01-02T03:04:05.000006Z".to_owned(),
            ended_at: None,
            usage: Usage::default(),
            effects: EffectCounts::default(),
            degraded: Vec::new(),
            environment: Vec::new(),
            supervisor_pid: std::process::id(),
            supervisor_started: 0,
            changes: ChangesState::None,
            chain: Vec::new(),
            mode: Default::default(),
            resumes: None,
            recipe: None,
            answered: Default::default(),
        }
    }

    struct Fake {
        uid: u32,
        killed: Mutex<Vec<Signal>>,
    }

    impl Controlled for Fake {
        fn record(&self) -> RunRecord {
            record("abcdefghijk1", self.uid)
        }

        fn kill(&self, signal: Signal) -> io::Result<()> {
            self.killed.lock().expect("is not poisoned").push(signal);
            Ok(())
        }

        fn receipts(&self, after: u64, limit: u64) -> io::Result<Vec<Receipt>> {
            assert_eq!((after, limit), (7, MAX_RECEIPTS));
            Ok(Vec::new())
        }

        fn log(&self, stream: Stream, offset: u64, limit: u64) -> io::Result<Vec<u8>> {
            match stream {
                Stream::Stdout => Ok(b"hello"[offset as usize..].iter().copied().take(limit as usize).collect()),
                Stream::Stderr | Stream::Terminal => Err(io::ErrorKind::NotFound.into()),
            }
        }
    }

    async fn with_door<F: Future<Output = ()>>(uid: u32, body: impl FnOnce(std::path::PathBuf, Arc<Fake>) -> F) {
        let root = tempfile::tempdir().expect("a temporary directory");
        let fake = Arc::new(Fake { uid, killed: Mutex::default() });
        let listener = bind(root.path()).expect("binds");
        let run: Arc<dyn Controlled> = Arc::clone(&fake) as _;
        tokio::select! {
            () = serve(listener, run, std::future::pending()) => unreachable!("serves until it is told to stop"),
            () = body(root.path().to_owned(), fake) => {}
        }
    }

    #[tokio::test]
    async fn the_owner_is_answered() {
        let uid = nix::unistd::getuid().as_raw();
        with_door(uid, |run_dir, fake| async move {
            let told = ask(&run_dir, "/v1/run", None).await.expect("answers");
            assert_eq!(serde_json::from_slice::<RunRecord>(&told).expect("is a run"), fake.record());
            ask(&run_dir, "/v1/kill", Some(&serde_json::json!({"signal": "term"}))).await.expect("kills");
            ask(&run_dir, "/v1/kill", Some(&serde_json::json!({}))).await.expect("kills");
            assert_eq!(*fake.killed.lock().expect("is not poisoned"), [Signal::SIGTERM, Signal::SIGKILL]);
            assert_eq!(ask(&run_dir, "/v1/logs?offset=1&limit=3", None).await.expect("answers"), b"ell");
            assert_eq!(ask(&run_dir, "/v1/receipts?after=7", None).await.expect("answers"), b"[]");
        })
        .await;
    }

    #[tokio::test]
    async fn what_the_door_does_not_know_is_refused() {
        let uid = nix::unistd::getuid().as_raw();
        with_door(uid, |run_dir, fake| async move {
            let posts = ["/v1/run", "/v1/kill"];
            let rows = [
                ("/v1/nothing", 404),
                ("/v1/kill", 405),
                ("/v1/logs?stream=stderr", 404),
                ("/v1/logs?stream=other", 400),
                ("/v1/receipts?run=x", 400),
            ];
            let status = |answer: Result<Vec<u8>, ClientError>| match answer {
                Err(ClientError::Refused { status, .. }) => status,
                other => panic!("{other:?}"),
            };
            for (path, expected) in rows {
                assert_eq!(status(ask(&run_dir, path, None).await), expected, "{path}");
            }
            for (path, expected) in posts.into_iter().zip([405, 400]) {
                let body = serde_json::json!({"signal": "SIGNOTHING"});
                assert_eq!(status(ask(&run_dir, path, Some(&body)).await), expected, "{path}");
            }
            assert!(fake.killed.lock().expect("is not poisoned").is_empty());
        })
        .await;
    }

    #[tokio::test]
    async fn a_peer_who_is_neither_owner_nor_root_is_refused() {
        let fake = Arc::new(Fake { uid: 4_000_000, killed: Mutex::default() });
        let (client, server) = tokio::io::duplex(4096);
        let stranger = Peer { uid: Some(4_000_001), ..Peer::default() };
        let control = Arc::new(Control { run: Arc::clone(&fake) as _ });
        let serving = http::connection(server, control, stranger, std::future::pending());
        let asking = async move {
            use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
            let mut client = client;
            client.write_all(b"POST /v1/kill HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n").await.expect("sends");
            let mut answer = String::new();
            client.read_to_string(&mut answer).await.expect("reads");
            answer
        };
        let ((), answer) = tokio::join!(serving, asking);
        assert!(answer.starts_with("HTTP/1.1 403 "), "{answer}");
        assert!(fake.killed.lock().expect("is not poisoned").is_empty());
    }

    #[tokio::test]
    async fn a_socket_that_nobody_serves_is_unreachable() {
        let root = tempfile::tempdir().expect("a temporary directory");
        drop(bind(root.path()).expect("binds"));
        assert!(matches!(ask(root.path(), "/v1/run", None).await, Err(ClientError::Unreachable(_))));
    }

    #[test]
    fn a_signal_has_names_and_a_number() {
        for text in ["TERM", "term", "SIGTERM", "15"] {
            assert_eq!(parse_signal(text), Some(Signal::SIGTERM), "{text}");
        }
        for text in ["", "0", "-9", "999", "SIG", "KILL9"] {
            assert_eq!(parse_signal(text), None, "{text}");
        }
    }
}
