//! The API door: a run's own socket, HTTP/1.1 and JSON.
//!
//! Each run has one socket, bound into its jail; the socket that a request arrives on is the proof of its subject,
//! and nothing in a request can change it. The door turns a request into an effect, passes it through the run's
//! chain, and tells the answer. It decides nothing: what it refuses by itself is only what is no effect at all, and
//! that too has a receipt.

use super::{
    base64,
    content::{Contents, Held},
    http::{self, json, next_piece, whole_body, BodyError, Content, Line, Peer, Reply, Service},
    openapi,
    request::{self, Ask, Malformed, Place, MAX_JSON},
};
use crate::{
    chain::{
        admission::{Admission, Ruling},
        containment::Containment,
        Answer, Asker, BoxFuture, Chain, Decision, World,
    },
    effect::{api, fs, Digest, Door, Effect, Kind, Request as Arguments, Resource, RoomId, RunId, Subject},
    ledger::{Draft, Ledger},
};
use futures_util::FutureExt as _;
use http_body_util::Limited;
use hyper::{
    body::{Body as _, Incoming},
    header::{self, HeaderValue},
    HeaderMap, Method, Request, Response, StatusCode,
};
use serde::Serialize;
use std::{
    collections::{BTreeMap, HashMap},
    future::Future,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};
use tokio::{
    net::UnixListener,
    sync::{OwnedSemaphorePermit, Semaphore},
};

/// The handler's name in the receipts and errors of requests that are no effect.
const DOOR: &str = "api-door";

/// The longest file that one request may write, in bytes. Longer ones are written in the workspace itself.
pub const MAX_FILE: usize = 64 * 1024 * 1024;

/// Effects of one run that may be under way at once; further ones wait.
const MAX_EFFECTS: usize = 64;

/// How long the closed door waits for effects whose askers are gone. One that a person would have to approve is never
/// done; its receipt is written when its task is dropped.
const EFFECT_GRACE: Duration = Duration::from_millis(500);

/// How often a door looks whether an asker whose question waits for a person is still there.
const LOOK: Duration = Duration::from_millis(100);

/// Bytes that reads of one run may occupy in the supervisor at once, from the world's answer until they are sent.
const READ_BUDGET: usize = 64 * 1024 * 1024;

/// What one list counts in the read budget: its length is known only once it is there.
const LIST_SHARE: usize = 16 * 1024 * 1024;

/// Bytes of contents that may wait for the world at once, nearly all of them on the disk.
const WRITE_BUDGET: usize = 256 * 1024 * 1024;

/// The unit of both budgets: semaphores count in 32 bits.
const BUDGET_UNIT: usize = 1024;

/// Refused requests with the same problem on the same route within this time are one receipt with a count.
const COALESCE: Duration = Duration::from_secs(1);

/// Headers that other servers take as who asks. Any `x-tollgate-` header is refused like them.
const IDENTITY_HEADERS: &[&str] = &["from", "x-forwarded-user", "x-remote-user", "remote-user"];

/// Everything that the door of one run needs.
pub struct ApiContext {
    /// The run's chain.
    pub chain: Arc<Chain>,
    /// The world behind it.
    pub world: Arc<dyn World>,
    /// Whose socket it is.
    pub subject: Subject,
    /// The room it acts in.
    pub room: Option<RoomId>,
    /// The run, and the workspace's path in its jail.
    pub place: Place,
    /// Where the contents of writes wait for the world.
    pub contents: Arc<Contents>,
    /// What the run may know about itself.
    pub insight: Arc<dyn Insight>,
    /// Where refused requests are written down.
    pub refusals: Arc<dyn Refusals>,
}

/// What a run may know about itself. Answers are cheap, pure with respect to the run, and name no host path.
pub trait Insight: Send + Sync {
    /// What is allowed, mounted and limited, and how to ask for more.
    fn myself(&self) -> Myself;

    /// What is used and left.
    fn budget(&self) -> Budget;

    /// Whether the effect would pass and which rule says so. Asks nobody, charges nothing, does nothing.
    fn opinion(&self, effect: &Effect) -> Opinion;
}

/// Takes the receipts of requests that are no effect.
pub trait Refusals: Send + Sync {
    /// Appends one receipt that stands for this many equal requests.
    fn record(&self, effect: &Effect, answer: &Answer, times: u64);
}

/// Writes refused requests into the chain of one run, without waiting for it.
pub struct LedgerRefusals {
    ledger: Ledger,
    run: RunId,
}

impl LedgerRefusals {
    /// Into this run's chain.
    pub fn new(ledger: Ledger, run: RunId) -> LedgerRefusals {
        LedgerRefusals { ledger, run }
    }
}

impl Refusals for LedgerRefusals {
    fn record(&self, effect: &Effect, answer: &Answer, times: u64) {
        let draft = Draft::now(&self.run, effect, answer, &**self.ledger.clock());
        self.ledger.append_unattended(draft.repeated(times));
    }
}

/// The answer to `GET /v1/self`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Myself {
    /// The run's id.
    pub run: String,
    /// Its room, if any.
    pub room: Option<String>,
    /// Its policy's name.
    pub policy: String,
    /// The workspace's path in the jail.
    pub workspace: String,
    /// The handlers that its effects pass, outermost first.
    pub chain: String,
    /// The rules, in the order in which they count.
    pub rules: Vec<RuleView>,
    /// What is mounted.
    pub mounts: Vec<MountView>,
    /// The limits, by name; none is unlimited. Units are in the names.
    pub limits: BTreeMap<String, Option<u64>>,
    /// Layers and limits that the run goes without, in words.
    pub degraded: Vec<String>,
    /// How to get more: one sentence.
    pub ask: String,
}

/// A rule, as the run may see it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RuleView {
    /// What it says.
    pub verdict: Verdict,
    /// The kinds, or `any`.
    pub kinds: Vec<String>,
    /// The path patterns, or none for any.
    pub paths: Vec<String>,
    /// What of the network it is about, each as a key and its words: `host api.test`; none for any.
    pub network: Vec<String>,
}

/// A mount, as the run may see it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct MountView {
    /// Where it is in the jail.
    pub path: String,
    /// `read-only`, `read-write` or `private`.
    pub access: String,
}

/// The answer to `GET /v1/budget`: each limit by name, with its unit in the name.
pub type Budget = BTreeMap<String, Allowance>;

/// One limit, and how much of it is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Allowance {
    /// How much may be used; none is unlimited.
    pub limit: Option<u64>,
    /// How much is.
    pub used: u64,
    /// How much is left; none is unlimited.
    pub left: Option<u64>,
}

impl Allowance {
    /// What is left of this limit after this use.
    pub fn new(limit: Option<u64>, used: u64) -> Allowance {
        Allowance { limit, used, left: limit.map(|limit| limit.saturating_sub(used)) }
    }
}

/// What a rule says about an effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// It would pass.
    Allow,
    /// A person would be asked.
    Ask,
    /// It would be refused.
    Deny,
}

/// The answer to `GET /v1/why`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Opinion {
    /// What would be decided.
    pub verdict: Verdict,
    /// By which handler.
    pub handler: String,
    /// The rule, as the policy writes it; empty where none matches.
    pub rule: String,
    /// Why, in one sentence.
    pub reason: String,
    /// What to change for it to pass; empty when it would.
    pub hint: String,
}

impl Opinion {
    /// What this admission says about an effect. Pure: nothing is asked, charged or done.
    pub fn of(admission: &Arc<Admission>, effect: &Effect) -> Opinion {
        let (verdict, rule) = match admission.rule_on(effect) {
            Ruling::Allow { origin } => (Verdict::Allow, origin.to_string()),
            Ruling::Ask { origin } => (Verdict::Ask, origin.to_string()),
            Ruling::Deny { origin } => (Verdict::Deny, origin.to_string()),
            Ruling::Unmatched => (Verdict::Deny, String::new()),
        };
        // The reason and the hint are those of the refusal itself: the handler is asked, with nothing behind it.
        let alone = Chain::new(vec![Arc::clone(admission) as _]);
        let answer = alone.perform(effect, &Nowhere).now_or_never();
        let answer = answer.unwrap_or_else(|| Answer::refused("admission", "", ""));
        let handler = if verdict == Verdict::Allow { "admission" } else { answer.decided_by };
        Opinion { verdict, handler: handler.to_owned(), rule, reason: answer.reason, hint: answer.hint }
    }

    /// The same with what the guard of addresses says of it, which comes after the rules.
    #[must_use]
    pub fn contained(self, containment: &Containment, effect: &Effect) -> Opinion {
        match containment.refusal(effect).filter(|_| self.verdict != Verdict::Deny) {
            Some(refused) => Opinion {
                verdict: Verdict::Deny,
                handler: refused.decided_by.to_owned(),
                reason: refused.reason,
                hint: refused.hint,
                ..self
            },
            None => self,
        }
    }
}

/// A world in which nothing happens.
struct Nowhere;

impl World for Nowhere {
    fn execute<'a>(&'a self, _effect: &'a Effect) -> BoxFuture<'a, Answer> {
        Box::pin(std::future::ready(Answer::done(serde_json::Value::Null, 0)))
    }
}

/// Serves a run's socket until `shutdown` is ready and what is under way has finished.
///
/// Runs on a current-thread runtime; every request is a task of its own, and an effect goes on when the one who asked
/// hangs up, so that it has its receipt.
pub async fn serve(listener: UnixListener, context: Arc<ApiContext>, shutdown: impl Future<Output = ()>) {
    let api = Arc::new(Api::new(context));
    http::serve(listener, Arc::clone(&api), shutdown).await;
    let all = u32::try_from(MAX_EFFECTS).unwrap_or(u32::MAX);
    if tokio::time::timeout(EFFECT_GRACE, api.effects.acquire_many(all)).await.is_err() {
        tracing::warn!(run = %api.context.place.run, "effects are still under way after the door closed");
    }
    api.flush_refusals();
}

/// What a route does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Performs an effect.
    Effect,
    /// Reads a file, raw.
    ReadFile,
    /// Writes a file, raw.
    WriteFile,
    /// Tells the run about itself.
    Myself,
    /// Tells what is left.
    Budget,
    /// Tells whether an effect would pass.
    Why,
    /// Gives the API's description.
    Describe,
}

/// One route.
#[derive(Clone, Copy, Debug)]
pub struct Route {
    /// Its method, in capitals.
    pub method: &'static str,
    /// Its path, as OpenAPI writes it.
    pub path: &'static str,
    /// What it does.
    pub operation: Operation,
    /// One sentence for the description.
    pub summary: &'static str,
}

/// The prefix of the routes that carry a file's path.
const FILES: &str = "/v1/files/";

/// Every route. The router and the OpenAPI document are made from it.
pub const ROUTES: &[Route] = &[
    Route {
        method: "POST",
        path: "/v1/effects",
        operation: Operation::Effect,
        summary: "Ask for an effect; it passes the run's chain and has a receipt.",
    },
    Route {
        method: "GET",
        path: "/v1/files/{path}",
        operation: Operation::ReadFile,
        summary: "Read a file's bytes: the effect fs/read, with the bytes as the body.",
    },
    Route {
        method: "PUT",
        path: "/v1/files/{path}",
        operation: Operation::WriteFile,
        summary: "Create or replace a file with the body's bytes: the effect fs/write.",
    },
    Route {
        method: "GET",
        path: "/v1/self",
        operation: Operation::Myself,
        summary: "What this run is, what is allowed, mounted and limited, and how to ask for more.",
    },
    Route {
        method: "GET",
        path: "/v1/budget",
        operation: Operation::Budget,
        summary: "What this run has used and has left of each limit.",
    },
    Route {
        method: "GET",
        path: "/v1/why",
        operation: Operation::Why,
        summary: "Whether an effect would pass and which rule says so, without doing it.",
    },
    Route { method: "GET", path: "/v1/openapi.json", operation: Operation::Describe, summary: "This description." },
];

impl Route {
    fn matches(&self, path: &str) -> bool {
        match self.path.strip_suffix("{path}") {
            Some(prefix) => path.starts_with(prefix),
            None => path == self.path,
        }
    }
}

/// An error, as every route tells it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
struct Problem {
    /// `refused`, `failed`, `in-doubt`, or what was wrong with the request.
    #[serde(rename = "type")]
    problem: &'static str,
    kind: Option<String>,
    resource: Option<String>,
    handler: String,
    reason: String,
    hint: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    errno: Option<String>,
}

/// A request that is no effect: its status and what is wrong.
struct NoEffect {
    status: StatusCode,
    problem: &'static str,
    kind: Option<String>,
    reason: String,
    hint: String,
    allow: Option<String>,
}

impl NoEffect {
    fn new(status: StatusCode, problem: &'static str, reason: impl Into<String>, hint: impl Into<String>) -> NoEffect {
        NoEffect { status, problem, kind: None, reason: reason.into(), hint: hint.into(), allow: None }
    }

    fn internal(reason: impl Into<String>) -> NoEffect {
        let hint = "this is a fault of Tollgate or of the machine; the supervisor's log says more";
        NoEffect::new(StatusCode::INTERNAL_SERVER_ERROR, "internal", reason, hint)
    }
}

impl From<Malformed> for NoEffect {
    fn from(malformed: Malformed) -> NoEffect {
        let kind = match &malformed {
            Malformed::UnknownKind(name) => Some(name.clone()),
            Malformed::NotAtThisDoor(kind) | Malformed::Fields { kind, .. } => Some(kind.name().to_owned()),
            Malformed::Json(_)
            | Malformed::NoKind
            | Malformed::Identity(_)
            | Malformed::Path { .. }
            | Malformed::Value { .. } => None,
        };
        let reason = malformed.to_string();
        NoEffect { kind, ..NoEffect::new(StatusCode::BAD_REQUEST, malformed.problem(), reason, malformed.hint()) }
    }
}

impl From<BodyError> for NoEffect {
    fn from(cause: BodyError) -> NoEffect {
        let reason = cause.to_string();
        match cause {
            BodyError::TooLarge { .. } => NoEffect::new(
                StatusCode::PAYLOAD_TOO_LARGE,
                "too-large",
                reason,
                "send contents by PUT /v1/files/, or write the file in the workspace itself",
            ),
            BodyError::TooSlow => {
                NoEffect::new(StatusCode::REQUEST_TIMEOUT, "timeout", reason, "send the body without pauses")
            }
            BodyError::Broken(_) => NoEffect::new(
                StatusCode::BAD_REQUEST,
                "malformed",
                reason,
                "send a body of exactly the announced length",
            ),
        }
    }
}

struct Tally {
    since: Instant,
    pending: u64,
}

struct Api {
    context: Arc<ApiContext>,
    effects: Arc<Semaphore>,
    reading: Arc<Semaphore>,
    writing: Arc<Semaphore>,
    refused: Mutex<HashMap<(&'static str, &'static str), Tally>>,
}

impl Service for Api {
    fn answer(self: Arc<Self>, request: Request<Incoming>, peer: Peer) -> BoxFuture<'static, Reply> {
        Box::pin(async move {
            let path = request.uri().path();
            let route = ROUTES.iter().find(|route| route.method == request.method().as_str() && route.matches(path));
            match self.dispatch(route, request, peer.line).await {
                Ok(reply) => reply,
                Err(refused) => self.refuse(route, refused),
            }
        })
    }
}

impl Api {
    fn new(context: Arc<ApiContext>) -> Api {
        Api {
            context,
            effects: Arc::new(Semaphore::new(MAX_EFFECTS)),
            reading: Arc::new(Semaphore::new(READ_BUDGET / BUDGET_UNIT)),
            writing: Arc::new(Semaphore::new(WRITE_BUDGET / BUDGET_UNIT)),
            refused: Mutex::default(),
        }
    }

    async fn dispatch(
        &self,
        route: Option<&'static Route>,
        request: Request<Incoming>,
        line: Line,
    ) -> Result<Reply, NoEffect> {
        refuse_identity(request.headers())?;
        let Some(route) = route else { return Err(no_route(request.method(), request.uri().path())) };
        let pairs = http::query(request.uri().query().unwrap_or_default()).ok_or_else(|| {
            let reason = "the query has a wrong escape, or is not UTF-8";
            NoEffect::new(StatusCode::BAD_REQUEST, "malformed", reason, "percent-encode names and values as UTF-8")
        })?;
        match route.operation {
            Operation::Effect => {
                parameters(pairs, &[])?;
                let body = whole_body(request.into_body(), MAX_JSON).await?;
                self.effect(request::parse(&body, &self.context.place)?, line).await
            }
            Operation::ReadFile => self.read_file(request.uri().path(), pairs, line).await,
            Operation::WriteFile => self.write_file(request, pairs, line).await,
            Operation::Why => {
                let ask = request::why(pairs, &self.context.place)?;
                let effect = self.claim(&ask);
                let opinion = self.context.insight.opinion(&effect);
                Ok(json(
                    StatusCode::OK,
                    &Asked { kind: ask.kind, resource: ask.resource.to_string(), opinion: &opinion },
                ))
            }
            Operation::Myself => {
                parameters(pairs, &[])?;
                Ok(json(StatusCode::OK, &self.context.insight.myself()))
            }
            Operation::Budget => {
                parameters(pairs, &[])?;
                Ok(json(StatusCode::OK, &self.context.insight.budget()))
            }
            Operation::Describe => {
                parameters(pairs, &[])?;
                Ok(json(StatusCode::OK, openapi::document()))
            }
        }
    }

    /// `POST /v1/effects`.
    async fn effect(&self, ask: Ask, line: Line) -> Result<Reply, NoEffect> {
        let share = self.read_share(&ask).await;
        let (held, waiting) = match &ask.content {
            Some(content) => {
                let waiting = share_of(&self.writing, content.len()).await;
                let held = self.context.contents.keep(content).await.map_err(|cause| cannot_keep(&cause))?;
                (Some(held), Some(waiting))
            }
            None => (None, None),
        };
        let (effect, answer) = self.perform(&ask, held, waiting, line).await?;
        if !answer.is_success() {
            return Ok(problem(&effect, &answer));
        }
        // Base64 makes four bytes of three; the share is of the read's limit, so it is the right order of size.
        let mut reply = json(
            StatusCode::OK,
            &Done {
                decision: answer.decision,
                decided_by: answer.decided_by,
                value: &answer.value,
                bytes: answer.bytes,
                digest: answer.digest.map(|digest| digest.to_string()),
                content: answer.body.as_deref().map(base64::encode),
            },
        );
        if let Some(share) = share {
            reply = reply.map(|content| Content::holding(content.bytes().clone(), share));
        }
        if answer.cut {
            reply = reply.map(Content::breaking_off);
        }
        Ok(reply)
    }

    /// `GET /v1/files/{path}`.
    async fn read_file(&self, path: &str, pairs: Vec<(String, String)>, line: Line) -> Result<Reply, NoEffect> {
        let [offset, limit] = parameters(pairs, &["offset", "limit"])?.try_into().unwrap_or_default();
        let number = |text: Option<String>| text.map(|text| text.parse::<u64>()).transpose();
        let (Ok(offset), Ok(limit)) = (number(offset), number(limit)) else {
            let reason = "`offset` and `limit` are numbers of bytes";
            return Err(NoEffect::new(StatusCode::BAD_REQUEST, "malformed", reason, "give decimal digits"));
        };
        let ask = request::read(&file_path(path)?, offset.unwrap_or(0), limit, &self.context.place)?;
        let share = self.read_share(&ask).await;
        let (effect, answer) = self.perform(&ask, None, None, line).await?;
        if !answer.is_success() {
            return Ok(problem(&effect, &answer));
        }
        let bytes = answer.body.unwrap_or_default();
        let content = match share {
            Some(mut share) => {
                // What the file did not need of the limit is others' again.
                let unused = share.num_permits().saturating_sub(bytes.len().div_ceil(BUDGET_UNIT).max(1));
                drop(share.split(unused));
                Content::holding(bytes, share)
            }
            None => Content::new(bytes),
        };
        let content = if answer.cut { content.breaking_off() } else { content };
        let mut reply = Response::new(content);
        let headers = reply.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/octet-stream"));
        headers.insert("tollgate-decision", HeaderValue::from_static(word(answer.decision)));
        Ok(reply)
    }

    /// `PUT /v1/files/{path}`.
    async fn write_file(
        &self,
        request: Request<Incoming>,
        pairs: Vec<(String, String)>,
        line: Line,
    ) -> Result<Reply, NoEffect> {
        let [mode, expect] = parameters(pairs, &["mode", "expect"])?.try_into().unwrap_or_default();
        let (mode, expect) = (mode.as_deref(), expect.as_deref());
        let path = file_path(request.uri().path())?;
        // Everything but the content is checked before a byte of it is taken.
        let nothing = (Digest([0; 32]), 0);
        request::write_file(&path, nothing, mode, expect, &self.context.place)?;
        let body = request.into_body();
        let length = body.size_hint().exact().ok_or_else(|| {
            let hint = "send Content-Length; chunked bodies are not taken";
            NoEffect::new(StatusCode::LENGTH_REQUIRED, "length-required", "the body's length is not announced", hint)
        })?;
        let length = usize::try_from(length).ok().filter(|length| *length <= MAX_FILE);
        let length = length.ok_or(BodyError::TooLarge { limit: MAX_FILE })?;
        let waiting = share_of(&self.writing, length).await;
        let held = self.take(body, length).await?;
        let ask = request::write_file(&path, (held.digest(), held.bytes()), mode, expect, &self.context.place)?;
        let (effect, answer) = self.perform(&ask, Some(held), Some(waiting), line).await?;
        if !answer.is_success() {
            return Ok(problem(&effect, &answer));
        }
        let done = Done {
            decision: answer.decision,
            decided_by: answer.decided_by,
            value: &answer.value,
            bytes: answer.bytes,
            digest: answer.digest.map(|digest| digest.to_string()),
            content: None,
        };
        Ok(json(StatusCode::OK, &done))
    }

    /// Streams a body to where the world will find it.
    async fn take(&self, body: Incoming, length: usize) -> Result<Held, NoEffect> {
        let mut arriving = self.context.contents.begin();
        let mut body = Limited::new(body, length);
        let all = async {
            while let Some(piece) = next_piece(&mut body, length).await? {
                arriving.write(&piece).await.map_err(|cause| cannot_keep(&cause))?;
            }
            arriving.finish().await.map_err(|cause| cannot_keep(&cause))
        };
        tokio::time::timeout(http::BODY_TIMEOUT, all).await.unwrap_or_else(|_| Err(BodyError::TooSlow.into()))
    }

    /// The share of the read budget for what this may read, waiting for it if it must.
    async fn read_share(&self, ask: &Ask) -> Option<OwnedSemaphorePermit> {
        let bytes = match &ask.request {
            Arguments::Fs(fs::Request::Read { limit, .. }) => usize::try_from(*limit).unwrap_or(usize::MAX),
            Arguments::Fs(fs::Request::List { .. }) => LIST_SHARE,
            Arguments::Fs(_)
            | Arguments::Run(_)
            | Arguments::Jail(_)
            | Arguments::Api(_)
            | Arguments::Program(_)
            | Arguments::Net(_)
            | Arguments::Http(_) => return None,
        };
        Some(share_of(&self.reading, bytes).await)
    }

    /// The effect that this run asks for.
    fn claim(&self, ask: &Ask) -> Effect {
        Effect {
            kind: ask.kind,
            resource: ask.resource.clone(),
            subject: self.context.subject.clone(),
            room: self.context.room.clone(),
            door: Door::Api,
            request: ask.request.clone(),
        }
    }

    /// Passes an effect through the chain, in a task of its own: it ends, and has its receipt, whether or not the one
    /// who asked still listens. Only a question to a person is withdrawn with the one who asked.
    async fn perform(
        &self,
        ask: &Ask,
        held: Option<Held>,
        waiting: Option<OwnedSemaphorePermit>,
        line: Line,
    ) -> Result<(Effect, Answer), NoEffect> {
        let slot = slot(&self.effects, 1).await;
        let effect = self.claim(ask);
        let context = Arc::clone(&self.context);
        let performing = tokio::spawn(async move {
            let answer = context.chain.perform_for(&effect, &*context.world, &OnLine(line)).await;
            drop((held, waiting, slot));
            (effect, answer)
        });
        performing.await.map_err(|cause| {
            tracing::error!(%cause, "an effect's task ended without an answer");
            NoEffect::internal("the effect ended without an answer; it may or may not have happened")
        })
    }

    /// Tells what was wrong, and writes it down.
    fn refuse(&self, route: Option<&'static Route>, refused: NoEffect) -> Reply {
        let route = route.map_or("other", |route| route.path);
        let times = {
            let mut tallies = self.refused.lock().unwrap_or_else(PoisonError::into_inner);
            match tallies.get_mut(&(refused.problem, route)) {
                Some(tally) if tally.since.elapsed() < COALESCE => {
                    tally.pending += 1;
                    0
                }
                Some(tally) => {
                    tally.since = Instant::now();
                    std::mem::take(&mut tally.pending) + 1
                }
                None => {
                    tallies.insert((refused.problem, route), Tally { since: Instant::now(), pending: 0 });
                    1
                }
            }
        };
        if times > 0 {
            self.record(refused.problem, route, &refused.reason, &refused.hint, times);
        }
        let problem = Problem {
            problem: refused.problem,
            kind: refused.kind,
            resource: None,
            handler: DOOR.to_owned(),
            reason: refused.reason,
            hint: refused.hint,
            errno: None,
        };
        let mut reply = json(refused.status, &BTreeMap::from([("error", problem)]));
        if let Some(allow) = refused.allow.and_then(|allow| HeaderValue::try_from(allow).ok()) {
            reply.headers_mut().insert(header::ALLOW, allow);
        }
        reply
    }

    fn record(&self, problem: &str, route: &str, reason: &str, hint: &str, times: u64) {
        let effect = Effect {
            kind: Kind::ApiRequest,
            resource: Resource::Run { id: self.context.place.run.0.clone() },
            subject: self.context.subject.clone(),
            room: self.context.room.clone(),
            door: Door::Api,
            request: Arguments::Api(api::Request { problem: problem.to_owned(), route: route.to_owned() }),
        };
        self.context.refusals.record(&effect, &Answer::refused(DOOR, format!("{route}: {reason}"), hint), times);
    }

    /// Writes down the repetitions that are still only counted.
    fn flush_refusals(&self) {
        let tallies = std::mem::take(&mut *self.refused.lock().unwrap_or_else(PoisonError::into_inner));
        for ((problem, route), tally) in tallies {
            if tally.pending > 0 {
                self.record(problem, route, &format!("repeated: {problem}"), "correct the request", tally.pending);
            }
        }
    }
}

/// Whoever holds the other end of a connection.
struct OnLine(Line);

impl Asker for OnLine {
    fn gone<'a>(&'a self) -> BoxFuture<'a, ()> {
        Box::pin(async move {
            while !self.0.is_hung_up() {
                tokio::time::sleep(LOOK).await;
            }
        })
    }
}

/// The body of a success.
#[derive(Serialize)]
struct Done<'a> {
    decision: Decision,
    decided_by: &'static str,
    value: &'a serde_json::Value,
    bytes: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    digest: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<String>,
}

/// The body of an answer to a question.
#[derive(Serialize)]
struct Asked<'a> {
    kind: Kind,
    resource: String,
    #[serde(flatten)]
    opinion: &'a Opinion,
}

fn refuse_identity(headers: &HeaderMap) -> Result<(), NoEffect> {
    let claims = |name: &&header::HeaderName| {
        name.as_str().starts_with("x-tollgate-") || IDENTITY_HEADERS.contains(&name.as_str())
    };
    match headers.keys().find(claims) {
        Some(name) => Err(Malformed::Identity(name.as_str().to_owned()).into()),
        None => Ok(()),
    }
}

fn no_route(method: &Method, path: &str) -> NoEffect {
    let methods: Vec<&str> = ROUTES.iter().filter(|route| route.matches(path)).map(|route| route.method).collect();
    let hint = "GET /v1/openapi.json lists the routes";
    if methods.is_empty() {
        return NoEffect::new(StatusCode::NOT_FOUND, "no-such-route", "there is no such route", hint);
    }
    let reason = format!("this route does not take {method}");
    NoEffect {
        allow: Some(methods.join(", ")),
        ..NoEffect::new(StatusCode::METHOD_NOT_ALLOWED, "method-not-allowed", reason, hint)
    }
}

/// The values of these parameters, in this order; any other parameter, or one twice, is an error.
fn parameters(pairs: Vec<(String, String)>, known: &[&'static str]) -> Result<Vec<Option<String>>, NoEffect> {
    let mut values = vec![None; known.len()];
    for (name, value) in pairs {
        if request::is_identity(&name) {
            return Err(Malformed::Identity(name).into());
        }
        let place = known.iter().position(|known| *known == name).and_then(|at| values.get_mut(at));
        match place {
            Some(place @ None) => *place = Some(value),
            Some(Some(_)) | None => {
                let reason = format!("the parameter {name:?} is unknown here, or given twice");
                let hint = "GET /v1/openapi.json lists the parameters of each route";
                return Err(NoEffect::new(StatusCode::BAD_REQUEST, "malformed", reason, hint));
            }
        }
    }
    Ok(values)
}

/// The bytes of the path in a `/v1/files/` route.
fn file_path(path: &str) -> Result<Vec<u8>, NoEffect> {
    path.strip_prefix(FILES)
        .and_then(http::percent_decode)
        .ok_or_else(|| Malformed::Path { field: "path", why: "has a `%` that begins no escape" }.into())
}

async fn share_of(budget: &Arc<Semaphore>, bytes: usize) -> OwnedSemaphorePermit {
    let units = bytes.div_ceil(BUDGET_UNIT).clamp(1, READ_BUDGET / BUDGET_UNIT);
    slot(budget, u32::try_from(units).unwrap_or(u32::MAX)).await
}

async fn slot(semaphore: &Arc<Semaphore>, permits: u32) -> OwnedSemaphorePermit {
    Arc::clone(semaphore).acquire_many_owned(permits).await.expect("the door's semaphores are never closed")
}

fn cannot_keep(cause: &std::io::Error) -> NoEffect {
    tracing::error!(%cause, "a content cannot be kept for the world");
    NoEffect::internal(format!("the content cannot be kept: {cause}"))
}

/// A decision's name on the wire.
fn word(decision: Decision) -> &'static str {
    match decision {
        Decision::Allowed => "allowed",
        Decision::Refused => "refused",
        Decision::Answered => "answered",
        Decision::Planned => "planned",
        Decision::Failed => "failed",
        Decision::InDoubt => "in-doubt",
    }
}

/// An effect that did not succeed, as the one who asked is told it.
fn problem(effect: &Effect, answer: &Answer) -> Reply {
    let errno = errno(answer);
    let status = match answer.decision {
        Decision::Refused if answer.decided_by == "quota" => StatusCode::INSUFFICIENT_STORAGE,
        Decision::Refused => StatusCode::FORBIDDEN,
        Decision::Failed => named_status(answer).unwrap_or_else(|| failed_status(errno.as_deref().unwrap_or_default())),
        Decision::InDoubt | Decision::Allowed | Decision::Answered | Decision::Planned => {
            StatusCode::INTERNAL_SERVER_ERROR
        }
    };
    let problem = Problem {
        problem: word(answer.decision),
        kind: Some(effect.kind.name().to_owned()),
        resource: Some(effect.resource.to_string()),
        handler: answer.decided_by.to_owned(),
        reason: answer.reason.clone(),
        hint: answer.hint.clone(),
        errno,
    };
    let mut reply = json(status, &BTreeMap::from([("error", problem)]));
    let seconds = answer.value.pointer("/error/retry_after_s").and_then(serde_json::Value::as_u64);
    if let Some(seconds) = seconds {
        reply.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
    }
    reply
}

/// The status that a failure names itself: that of a rate limit.
fn named_status(answer: &Answer) -> Option<StatusCode> {
    let code = answer.value.pointer("/error/status")?.as_u64()?;
    StatusCode::from_u16(u16::try_from(code).ok()?).ok()
}

/// The error number's name: the world's for a failure, EACCES for every refusal, so that a program sees one thing.
fn errno(answer: &Answer) -> Option<String> {
    match (answer.decision, answer.value.pointer("/error/errno")) {
        (Decision::Refused, _) if answer.decided_by == "quota" => Some("EDQUOT".to_owned()),
        (Decision::Refused, _) => Some("EACCES".to_owned()),
        (_, Some(name)) => name.as_str().map(str::to_owned),
        (_, None) => None,
    }
}

fn failed_status(errno: &str) -> StatusCode {
    match errno {
        "ENOENT" => StatusCode::NOT_FOUND,
        "EEXIST" | "ENOTEMPTY" | "ESTALE" | "EBUSY" => StatusCode::CONFLICT,
        "EACCES" | "EPERM" | "EROFS" | "EXDEV" => StatusCode::FORBIDDEN,
        "EFBIG" => StatusCode::PAYLOAD_TOO_LARGE,
        "ENOSPC" | "EDQUOT" => StatusCode::INSUFFICIENT_STORAGE,
        "ETIMEDOUT" => StatusCode::GATEWAY_TIMEOUT,
        "ENOTDIR" | "EISDIR" | "ELOOP" | "EINVAL" | "ENAMETOOLONG" => StatusCode::UNPROCESSABLE_ENTITY,
        _ => StatusCode::INTERNAL_SERVER_ERROR,
    }
}

#[cfg(test)]
mod tests;
