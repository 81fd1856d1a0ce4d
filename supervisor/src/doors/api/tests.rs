//! The API door between a fake program and a fake world.

use super::*;
use crate::{
    chain::{Handler, Next},
    effect::run,
};
use proptest::prelude::*;
use serde_json::{json, Value};
use std::{
    io::Read as _,
    path::{Path, PathBuf},
    sync::atomic::{AtomicUsize, Ordering},
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::UnixStream,
    sync::Notify,
};

/// A handler that refuses what lies under `secret/`, every path of the host, and charges a quota for `full/`.
struct Guard;

impl Handler for Guard {
    fn name(&self) -> &'static str {
        "admission"
    }

    fn handle<'a>(&'a self, effect: &'a Effect, next: Next<'a>) -> BoxFuture<'a, Answer> {
        let path = effect.resource.to_string();
        let refused = |by, why: &str| Answer::refused(by, format!("{path}: {why}"), "ask for it");
        let answer = match &effect.resource {
            Resource::Host { .. } => refused("admission", "is outside the workspace"),
            Resource::Workspace { path } if path.starts_with("secret/") => refused("admission", "a rule denies it"),
            Resource::Workspace { path } if path.starts_with("full/") => refused("quota", "write bytes are used up"),
            _ => return next.run(effect),
        };
        Box::pin(std::future::ready(answer))
    }
}

/// A world that holds files in memory.
struct Fake {
    contents: Arc<Contents>,
    seen: Mutex<Vec<Effect>>,
    files: Mutex<HashMap<String, Vec<u8>>>,
    slow: Notify,
}

impl World for Fake {
    fn execute<'a>(&'a self, effect: &'a Effect) -> BoxFuture<'a, Answer> {
        self.seen.lock().expect("is not poisoned").push(effect.clone());
        let failed =
            |errno: &str| Answer { value: json!({ "error": { "errno": errno } }), ..Answer::failed(errno, "look") };
        Box::pin(async move {
            match &effect.request {
                Arguments::Fs(fs::Request::Read { path, offset, limit }) => {
                    if path == "slow" {
                        self.slow.notified().await;
                    }
                    assert_ne!(path, "panic", "the world's bug");
                    let files = self.files.lock().expect("is not poisoned");
                    let Some(whole) = files.get(path) else { return failed("ENOENT") };
                    let from = whole.len().min(*offset as usize);
                    let to = whole.len().min(from + *limit as usize);
                    let body = whole[from..to].to_vec();
                    Answer { body: Some(body), ..Answer::done(json!({"size": whole.len()}), (to - from) as u64) }
                }
                Arguments::Fs(fs::Request::Write { path, node: fs::Node::File { digest, bytes, .. }, expect }) => {
                    let mut content = Vec::new();
                    let mut reader = self.contents.reader(digest).expect("waits for the world");
                    reader.read_to_end(&mut content).expect("is readable");
                    assert_eq!(content.len() as u64, *bytes);
                    let mut files = self.files.lock().expect("is not poisoned");
                    if expect == &Some(fs::Expect::Absent) && files.contains_key(path) {
                        return failed("EEXIST");
                    }
                    files.insert(path.clone(), content);
                    Answer { digest: Some(*digest), ..Answer::done(Value::Null, *bytes) }
                }
                Arguments::Fs(fs::Request::List { .. }) => {
                    let files = self.files.lock().expect("is not poisoned");
                    let mut names: Vec<_> = files.keys().map(|name| json!({ "name": name })).collect();
                    names.sort_by_key(Value::to_string);
                    Answer::done(json!({ "entries": names }), 0)
                }
                _ => Answer::done(json!({"did": effect.kind.name()}), 0),
            }
        })
    }
}

struct Told;

impl Insight for Told {
    fn myself(&self) -> Myself {
        Myself {
            run: "abcdefghijk1".to_owned(),
            room: None,
            policy: "base".to_owned(),
            workspace: "/w".to_owned(),
            chain: "admission → world".to_owned(),
            rules: vec![RuleView {
                verdict: Verdict::Deny,
                kinds: vec!["any".to_owned()],
                paths: vec!["secret/**".to_owned()],
                network: Vec::new(),
            }],
            mounts: vec![MountView { path: "/usr".to_owned(), access: "read-only".to_owned() }],
            limits: BTreeMap::from([("wall_us".to_owned(), Some(60_000_000))]),
            degraded: Vec::new(),
            ask: "Ask the person who started the run.".to_owned(),
        }
    }

    fn budget(&self) -> Budget {
        BTreeMap::from([("write_bytes".to_owned(), Allowance::new(Some(100), 130))])
    }

    fn opinion(&self, effect: &Effect) -> Opinion {
        let verdict = if effect.resource.to_string().starts_with("secret/") { Verdict::Deny } else { Verdict::Allow };
        Opinion {
            verdict,
            handler: "admission".to_owned(),
            rule: "deny secret/**".to_owned(),
            reason: "a rule says so".to_owned(),
            hint: String::new(),
        }
    }
}

#[derive(Default)]
struct Written(Mutex<Vec<(Effect, Answer, u64)>>);

impl Refusals for Written {
    fn record(&self, effect: &Effect, answer: &Answer, times: u64) {
        self.0.lock().expect("is not poisoned").push((effect.clone(), answer.clone(), times));
    }
}

impl Written {
    fn problems(&self) -> Vec<(String, u64)> {
        let problem = |effect: &Effect| match &effect.request {
            Arguments::Api(request) => request.problem.clone(),
            other => panic!("{other:?}"),
        };
        let written = self.0.lock().expect("is not poisoned");
        written.iter().map(|(effect, _, times)| (problem(effect), *times)).collect()
    }
}

struct Stage {
    _root: tempfile::TempDir,
    socket: PathBuf,
    world: Arc<Fake>,
    refusals: Arc<Written>,
    context: Arc<ApiContext>,
}

impl Stage {
    fn new() -> Stage {
        let root = tempfile::tempdir().expect("a temporary directory");
        let contents = Contents::open(root.path().join("contents"));
        let world = Arc::new(Fake {
            contents: Arc::clone(&contents),
            seen: Mutex::default(),
            files: Mutex::default(),
            slow: Notify::new(),
        });
        let refusals = Arc::new(Written::default());
        let run = RunId("abcdefghijk1".to_owned());
        let context = Arc::new(ApiContext {
            chain: Arc::new(Chain::new(vec![Arc::new(Guard)])),
            world: Arc::clone(&world) as _,
            subject: subject(),
            room: None,
            place: Place { run, workspace: b"/w".to_vec() },
            contents,
            insight: Arc::new(Told),
            refusals: Arc::clone(&refusals) as _,
        });
        Stage { socket: root.path().join("broker.sock"), _root: root, world, refusals, context }
    }

    /// Serves while `body` runs.
    async fn play<F: Future<Output = ()>>(&self, body: impl FnOnce(PathBuf) -> F) {
        let directory = self.socket.parent().expect("is in a directory");
        let listener = http::bind(directory, "broker.sock", 0o666).expect("binds");
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let playing = async {
            body(self.socket.clone()).await;
            drop(stop);
        };
        let serving = serve(listener, Arc::clone(&self.context), async move {
            let _ = stopped.await;
        });
        tokio::join!(serving, playing);
    }

    fn seen(&self) -> Vec<Effect> {
        self.world.seen.lock().expect("is not poisoned").clone()
    }

    fn put(&self, path: &str, content: &[u8]) {
        self.world.files.lock().expect("is not poisoned").insert(path.to_owned(), content.to_vec());
    }
}

fn subject() -> Subject {
    Subject { uid: 1000, run: Some(RunId("abcdefghijk1".to_owned())), agent: Some("tester".to_owned()) }
}

/// Sends bytes, and reads what comes until the door closes.
async fn raw(socket: &Path, bytes: &[u8]) -> Vec<u8> {
    let mut stream = UnixStream::connect(socket).await.expect("connects");
    // The door may close before it has read everything.
    let _ = stream.write_all(bytes).await;
    let _ = stream.shutdown().await;
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer).await;
    answer
}

/// One request with `connection: close`; its status and body.
async fn ask(socket: &Path, method: &str, path: &str, headers: &str, body: &[u8]) -> (u16, Vec<u8>) {
    let head = format!(
        "{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {}\r\n{headers}\r\n",
        body.len()
    );
    let mut request = head.into_bytes();
    request.extend_from_slice(body);
    let mut stream = UnixStream::connect(socket).await.expect("connects");
    let _ = stream.write_all(&request).await;
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer).await;
    let end = answer.windows(4).position(|window| window == b"\r\n\r\n").expect("has a head") + 4;
    let status = std::str::from_utf8(&answer[9..12]).expect("is text").parse().expect("is a number");
    (status, answer[end..].to_vec())
}

async fn effect(socket: &Path, body: Value) -> (u16, Value) {
    let (status, body) = ask(socket, "POST", "/v1/effects", "", body.to_string().as_bytes()).await;
    (status, serde_json::from_slice(&body).expect("is JSON"))
}

async fn get(socket: &Path, path: &str) -> (u16, Value) {
    let (status, body) = ask(socket, "GET", path, "", b"").await;
    (status, serde_json::from_slice(&body).expect("is JSON"))
}

#[tokio::test]
async fn an_effect_reaches_the_world_with_the_subject_of_its_socket() {
    let stage = Stage::new();
    stage
        .play(|socket| async move {
            let (status, told) = effect(&socket, json!({"kind": "fs/delete", "path": "./a//b"})).await;
            assert_eq!(status, 200);
            let expected = json!({
                "decision": "allowed", "decided_by": "world", "value": {"did": "fs/delete"}, "bytes": 0,
            });
            assert_eq!(told, expected);
        })
        .await;
    let seen = stage.seen();
    assert_eq!(seen.len(), 1);
    assert_eq!(seen[0].subject, subject());
    assert_eq!(seen[0].door, Door::Api);
    assert_eq!(seen[0].resource, Resource::Workspace { path: "a/b".to_owned() });
    assert!(stage.refusals.problems().is_empty());
}

#[tokio::test]
async fn a_refusal_is_typed_and_leaves_the_world_alone() {
    let stage = Stage::new();
    stage
        .play(|socket| async move {
            let (status, told) = effect(&socket, json!({"kind": "fs/read", "path": "secret/key"})).await;
            assert_eq!(status, 403);
            let expected = json!({"error": {
                "type": "refused", "kind": "fs/read", "resource": "secret/key", "handler": "admission",
                "reason": "secret/key: a rule denies it", "hint": "ask for it", "errno": "EACCES",
            }});
            assert_eq!(told, expected);
            let (status, told) = get(&socket, "/v1/files/secret%2Fkey").await;
            assert_eq!((status, told), (403, expected));
            let (status, told) = effect(&socket, json!({"kind": "fs/write", "path": "full/a", "text": "x"})).await;
            assert_eq!((status, &told["error"]["errno"]), (507, &json!("EDQUOT")));
        })
        .await;
    assert!(stage.seen().is_empty());
}

#[tokio::test]
async fn the_brokers_own_process_is_not_readable_through_it() {
    let stage = Stage::new();
    stage
        .play(|socket| async move {
            let spellings =
                ["/proc/self/environ", "../proc/1/environ", "/w/../proc/self/environ", "//proc/self/environ"];
            for path in spellings {
                let (status, told) = effect(&socket, json!({"kind": "fs/read", "path": path})).await;
                assert_eq!((status, &told["error"]["type"]), (403, &json!("refused")), "{path}");
                let encoded = path.replace('/', "%2f");
                assert_eq!(get(&socket, &format!("/v1/files/{encoded}")).await.0, 403, "{path}");
            }
        })
        .await;
    assert!(stage.seen().is_empty());
}

#[tokio::test]
async fn a_failure_has_the_status_of_its_error_number() {
    let stage = Stage::new();
    stage
        .play(|socket| async move {
            let (status, told) = effect(&socket, json!({"kind": "fs/read", "path": "missing"})).await;
            assert_eq!((status, &told["error"]["type"]), (404, &json!("failed")));
            assert_eq!((&told["error"]["errno"], &told["error"]["handler"]), (&json!("ENOENT"), &json!("world")));
            let write = json!({"kind": "fs/write", "path": "new", "text": "x", "expect": "absent"});
            assert_eq!(effect(&socket, write.clone()).await.0, 200);
            assert_eq!(effect(&socket, write).await.0, 409);
        })
        .await;
}

#[tokio::test]
async fn what_a_request_says_about_its_subject_is_refused_and_written_down() {
    let stage = Stage::new();
    stage
        .play(|socket| async move {
            for field in ["subject", "author", "run", "room", "uid", "from"] {
                let (status, told) = effect(&socket, json!({"kind": "fs/list", "path": "", field: "root"})).await;
                assert_eq!((status, &told["error"]["type"]), (400, &json!("identity-in-request")), "{field}");
            }
            for header in ["From: root", "X-Tollgate-Subject: root", "X-Forwarded-User: root"] {
                let (status, _) = ask(&socket, "GET", "/v1/self", &format!("{header}\r\n"), b"").await;
                assert_eq!(status, 400, "{header}");
            }
            assert_eq!(get(&socket, "/v1/why?kind=fs/list&path=a&subject=root").await.0, 400);
            assert_eq!(get(&socket, "/v1/self?run=other").await.0, 400);
        })
        .await;
    assert!(stage.seen().is_empty());
    let written = stage.refusals.0.lock().expect("is not poisoned");
    assert!(written.iter().all(|(effect, answer, _)| {
        effect.subject == subject()
            && effect.kind == Kind::ApiRequest
            && answer.decision == Decision::Refused
            && answer.decided_by == DOOR
    }));
    let times: u64 = written.iter().map(|(_, _, times)| times).sum();
    assert_eq!(times, 11, "every attempt counts once");
}

#[tokio::test]
async fn a_forged_receipt_and_an_unknown_kind_are_refused_and_written_down() {
    let stage = Stage::new();
    stage
        .play(|socket| async move {
            let (status, body) = ask(&socket, "POST", "/v1/receipts", "", b"{\"decision\":\"allowed\"}").await;
            let told: Value = serde_json::from_slice(&body).expect("is JSON");
            assert_eq!((status, &told["error"]["type"]), (404, &json!("no-such-route")));
            let (status, told) = effect(&socket, json!({"kind": "receipt/write", "path": "a"})).await;
            assert_eq!((status, &told["error"]["type"]), (400, &json!("unknown-kind")));
            assert_eq!(told["error"]["kind"], "receipt/write");
            let (status, told) = effect(&socket, json!({"kind": "process/exec", "path": "/bin/sh"})).await;
            assert_eq!((status, &told["error"]["type"]), (400, &json!("not-at-this-door")));
        })
        .await;
    assert!(stage.seen().is_empty());
    let expected = ["no-such-route", "unknown-kind", "not-at-this-door"].map(|problem| (problem.to_owned(), 1));
    assert_eq!(stage.refusals.problems(), expected);
}

#[tokio::test]
async fn a_refused_request_is_in_the_runs_chain_with_its_count() {
    let root = tempfile::tempdir().expect("a temporary directory");
    let ledger = Ledger::open(&root.path().join("state")).expect("opens");
    let record = super::super::control::tests::record("abcdefghijk1", 1000);
    ledger.insert_run(&record).expect("inserts");
    let stage = Stage::new();
    let refusals = LedgerRefusals::new(ledger.clone(), record.id.clone());
    for (effect, answer, times) in {
        stage.play(|socket| async move { drop(effect(&socket, json!({"kind": "receipt/write"})).await) }).await;
        std::mem::take(&mut *stage.refusals.0.lock().expect("is not poisoned"))
    } {
        refusals.record(&effect, &answer, times + 2);
    }
    // A later append is behind it in the same queue.
    let last = Effect { kind: Kind::ApiRequest, ..stage_effect() };
    let draft = Draft::now(&record.id, &last, &Answer::refused(DOOR, "last", ""), &**ledger.clock());
    assert_eq!(ledger.append(draft).expect("appends").seq, 2);
    let receipts: Vec<_> =
        ledger.receipts(&Default::default()).expect("reads").map(|one| one.expect("reads")).collect();
    assert_eq!((receipts[0].kind, receipts[0].times), (Kind::ApiRequest, 3));
    assert_eq!(receipts[0].subject, subject());
    assert!(receipts[0].reason.contains("receipt/write"), "{}", receipts[0].reason);
}

fn stage_effect() -> Effect {
    Effect {
        kind: Kind::ApiRequest,
        resource: Resource::Run { id: "abcdefghijk1".to_owned() },
        subject: subject(),
        room: None,
        door: Door::Api,
        request: Arguments::Api(api::Request { problem: "malformed".to_owned(), route: "other".to_owned() }),
    }
}

#[tokio::test]
async fn a_flood_of_one_mistake_is_one_receipt_with_its_count() {
    let stage = Stage::new();
    stage
        .play(|socket| async move {
            let one = "POST /v1/effects HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\n[]";
            let many = one.repeat(200);
            let answer = raw(&socket, many.as_bytes()).await;
            assert_eq!(String::from_utf8_lossy(&answer).matches("HTTP/1.1 400").count(), 200);
        })
        .await;
    let problems = stage.refusals.problems();
    assert_eq!(problems.iter().map(|(_, times)| times).sum::<u64>(), 200);
    assert!(problems.len() < 20, "{problems:?}");
}

#[tokio::test]
async fn contents_travel_raw_and_unchanged() {
    let stage = Stage::new();
    let content: Vec<u8> = (0..300_000u32).map(|n| (n % 251) as u8).collect();
    let expected = content.clone();
    stage
        .play(|socket| async move {
            let (status, told) = ask(&socket, "PUT", "/v1/files/d%ffr/f%5c?mode=0755", "", &content).await;
            assert_eq!(status, 200, "{}", String::from_utf8_lossy(&told));
            let (status, read) = ask(&socket, "GET", "/v1/files/d%FFr/f%5C", "", b"").await;
            assert_eq!((status, &read), (200, &content));
            let (_, range) = ask(&socket, "GET", "/v1/files/d%ffr/f%5c?offset=100&limit=50", "", b"").await;
            assert_eq!(range, content[100..150]);
            let (_, told) = effect(&socket, json!({"kind": "fs/read", "path": "d\\xffr/f\\\\", "limit": 3})).await;
            assert_eq!(told["content"], base64::encode(&content[..3]));
        })
        .await;
    assert_eq!(stage.world.files.lock().expect("is not poisoned")["d\\xffr/f\\\\"], expected);
    let Arguments::Fs(fs::Request::Write { node: fs::Node::File { digest, mode, .. }, .. }) = &stage.seen()[0].request
    else {
        panic!("not a write");
    };
    assert_eq!((*digest, *mode), (Digest::of(&expected), 0o755));
    assert!(stage.context.contents.reader(digest).is_err(), "nothing waits after its effect");
}

#[tokio::test]
async fn what_is_too_long_is_refused_before_it_is_taken() {
    let stage = Stage::new();
    stage
        .play(|socket| async move {
            let head = |path: &str, method: &str, length: u64| {
                format!("{method} {path} HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n")
            };
            for request in [head("/v1/effects", "POST", 1 << 40), head("/v1/files/a", "PUT", 1 << 40)] {
                let answer = raw(&socket, request.as_bytes()).await;
                assert!(answer.starts_with(b"HTTP/1.1 413 "), "{}", String::from_utf8_lossy(&answer));
            }
            let mut chunked =
                b"POST /v1/effects HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n"
                    .to_vec();
            for _ in 0..40 {
                chunked.extend_from_slice(b"1000\r\n");
                chunked.extend_from_slice(&[b' '; 0x1000]);
                chunked.extend_from_slice(b"\r\n");
            }
            let answer = raw(&socket, &chunked).await;
            assert!(answer.starts_with(b"HTTP/1.1 413 "), "{}", String::from_utf8_lossy(&answer));
            let unknown =
                b"PUT /v1/files/a HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n0\r\n\r\n";
            let answer = raw(&socket, unknown).await;
            assert!(answer.starts_with(b"HTTP/1.1 411 "), "{}", String::from_utf8_lossy(&answer));
            let long = format!("GET /v1/self?{} HTTP/1.1\r\nhost: a\r\n\r\n", "a".repeat(20_000));
            let answer = raw(&socket, long.as_bytes()).await;
            assert!(answer.starts_with(b"HTTP/1.1 4"), "{}", String::from_utf8_lossy(&answer));
        })
        .await;
    assert!(stage.seen().is_empty());
}

#[tokio::test]
async fn a_body_that_ends_early_is_no_write() {
    let stage = Stage::new();
    stage
        .play(|socket| async move {
            let half = b"PUT /v1/files/a HTTP/1.1\r\nhost: a\r\ncontent-length: 10\r\n\r\nhalf";
            raw(&socket, half).await;
        })
        .await;
    assert!(stage.seen().is_empty());
}

#[tokio::test]
async fn conflicting_lengths_do_not_smuggle_a_second_request() {
    let stage = Stage::new();
    stage
        .play(|socket| async move {
            let smuggled = r#"{"kind":"fs/delete","path":"a"}"#;
            let inner =
                format!("POST /v1/effects HTTP/1.1\r\nhost: a\r\ncontent-length: {}\r\n\r\n{smuggled}", smuggled.len());
            for lengths in [
                format!("content-length: 0\r\ncontent-length: {}", inner.len()),
                format!("content-length: +{}", inner.len()),
                "content-length: 0x10".to_owned(),
            ] {
                let outer = format!("POST /v1/effects HTTP/1.1\r\nhost: a\r\n{lengths}\r\n\r\n{inner}");
                let answer = raw(&socket, outer.as_bytes()).await;
                assert!(answer.starts_with(b"HTTP/1.1 400 "), "{lengths}: {}", String::from_utf8_lossy(&answer));
            }
        })
        .await;
    assert!(stage.seen().is_empty());
}

#[tokio::test]
async fn requests_sent_at_once_are_answered_in_order() {
    let stage = Stage::new();
    stage.put("a", b"first");
    stage.put("b", b"second");
    stage
        .play(|socket| async move {
            let one = |path: &str, last: &str| format!("GET /v1/files/{path} HTTP/1.1\r\nhost: a\r\n{last}\r\n");
            let both = one("a", "") + &one("b", "connection: close\r\n");
            let answer = raw(&socket, both.as_bytes()).await;
            let answer = String::from_utf8(answer).expect("is text");
            let (first, second) = (answer.find("first"), answer.find("second"));
            assert!(first.is_some() && first < second, "{answer}");
        })
        .await;
}

#[tokio::test]
async fn a_slow_effect_keeps_no_other_waiting() {
    let stage = Stage::new();
    stage.put("slow", b"late");
    stage.put("fast", b"early");
    let world = Arc::clone(&stage.world);
    stage
        .play(|socket| async move {
            let slow = {
                let socket = socket.clone();
                tokio::spawn(async move { ask(&socket, "GET", "/v1/files/slow", "", b"").await })
            };
            while world.seen.lock().expect("is not poisoned").is_empty() {
                tokio::task::yield_now().await;
            }
            let (status, body) = ask(&socket, "GET", "/v1/files/fast", "", b"").await;
            assert_eq!((status, body.as_slice()), (200, b"early".as_slice()));
            assert!(!slow.is_finished());
            world.slow.notify_one();
            assert_eq!(slow.await.expect("is answered").1, b"late");
        })
        .await;
}

#[tokio::test]
async fn an_effect_ends_though_its_asker_hung_up() {
    let stage = Stage::new();
    stage.put("slow", b"late");
    let world = Arc::clone(&stage.world);
    let chain_done = Arc::new(AtomicUsize::new(0));
    struct Count(Arc<AtomicUsize>);
    impl Handler for Count {
        fn name(&self) -> &'static str {
            "receipts"
        }
        fn handle<'a>(&'a self, effect: &'a Effect, next: Next<'a>) -> BoxFuture<'a, Answer> {
            Box::pin(async move {
                let answer = next.run(effect).await;
                self.0.fetch_add(1, Ordering::SeqCst);
                answer
            })
        }
    }
    let context = &stage.context;
    let counted = ApiContext {
        chain: Arc::new(Chain::new(vec![Arc::new(Count(Arc::clone(&chain_done)))])),
        world: Arc::clone(&context.world),
        subject: context.subject.clone(),
        room: None,
        place: context.place.clone(),
        contents: Arc::clone(&context.contents),
        insight: Arc::clone(&context.insight),
        refusals: Arc::clone(&context.refusals),
    };
    let stage = Stage { context: Arc::new(counted), ..stage };
    stage
        .play(|socket| async move {
            let mut stream = UnixStream::connect(&socket).await.expect("connects");
            stream.write_all(b"GET /v1/files/slow HTTP/1.1\r\nhost: a\r\n\r\n").await.expect("sends");
            while world.seen.lock().expect("is not poisoned").is_empty() {
                tokio::task::yield_now().await;
            }
            drop(stream);
            tokio::time::sleep(Duration::from_millis(50)).await;
            world.slow.notify_one();
        })
        .await;
    assert_eq!(chain_done.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn a_panic_in_the_world_is_an_answer_and_the_door_goes_on() {
    let stage = Stage::new();
    stage.put("a", b"still here");
    stage
        .play(|socket| async move {
            let (status, told) = get(&socket, "/v1/files/panic").await;
            assert_eq!((status, &told["error"]["type"]), (500, &json!("internal")));
            assert_eq!(ask(&socket, "GET", "/v1/files/a", "", b"").await.0, 200);
        })
        .await;
}

#[tokio::test]
async fn more_connections_than_the_door_serves_wait_for_their_turn() {
    let stage = Stage::new();
    stage.put("a", b"x");
    stage
        .play(|socket| async move {
            let mut idle = Vec::new();
            for _ in 0..http::MAX_CONNECTIONS {
                let mut stream = UnixStream::connect(&socket).await.expect("connects");
                stream.write_all(b"GET /v1/files/a HTTP/1.1\r\nhost: a\r\n\r\n").await.expect("sends");
                let mut byte = [0];
                stream.read_exact(&mut byte).await.expect("is served");
                idle.push(stream);
            }
            let waiting = {
                let socket = socket.clone();
                tokio::spawn(async move { ask(&socket, "GET", "/v1/files/a", "", b"").await.0 })
            };
            tokio::time::sleep(Duration::from_millis(50)).await;
            assert!(!waiting.is_finished());
            drop(idle.pop());
            assert_eq!(waiting.await.expect("is answered"), 200);
        })
        .await;
}

#[tokio::test(start_paused = true)]
async fn a_client_that_dawdles_is_cut_off() {
    let stage = Stage::new();
    stage
        .play(|socket| async move {
            for begun in ["GET /v1/se", "POST /v1/effects HTTP/1.1\r\nhost: a\r\ncontent-length: 9\r\n\r\n{"] {
                let mut stream = UnixStream::connect(&socket).await.expect("connects");
                stream.write_all(begun.as_bytes()).await.expect("sends");
                let mut answer = Vec::new();
                let cut = tokio::time::timeout(http::HEAD_TIMEOUT * 2, stream.read_to_end(&mut answer)).await;
                // The body's timeout is answered and the connection closed; the head's is only closed.
                assert!(cut.is_ok(), "{begun}");
            }
        })
        .await;
    assert!(stage.seen().is_empty());
}

#[tokio::test]
async fn a_run_can_ask_about_itself_and_about_an_effect() {
    let stage = Stage::new();
    stage
        .play(|socket| async move {
            let (status, told) = get(&socket, "/v1/self").await;
            assert_eq!((status, &told["rules"][0]["paths"][0]), (200, &json!("secret/**")));
            let (_, told) = get(&socket, "/v1/budget").await;
            assert_eq!(told["write_bytes"], json!({"limit": 100, "used": 130, "left": 0}));
            let (_, told) = get(&socket, "/v1/why?kind=fs/write&path=secret/key&bytes=5").await;
            assert_eq!((&told["verdict"], &told["resource"]), (&json!("deny"), &json!("secret/key")));
            assert_eq!((&told["handler"], &told["rule"]), (&json!("admission"), &json!("deny secret/**")));
            let (_, told) = get(&socket, "/v1/why?kind=run/start&command=make&command=test").await;
            assert_eq!(told["verdict"], "allow");
            assert_eq!(&get(&socket, "/v1/openapi.json").await.1, openapi::document());
            assert_eq!(ask(&socket, "DELETE", "/v1/self", "", b"").await.0, 405);
        })
        .await;
    assert!(stage.seen().is_empty(), "a question does nothing");
}

#[tokio::test]
async fn effects_on_runs_go_to_the_world_like_any_other() {
    let stage = Stage::new();
    stage
        .play(|socket| async move {
            effect(&socket, json!({"kind": "run/start", "command": ["make"]})).await;
            effect(&socket, json!({"kind": "run/cancel"})).await;
            effect(&socket, json!({"kind": "eval/run", "label": "main", "cpu_us": 5, "wall_us": 7})).await;
        })
        .await;
    let seen = stage.seen();
    let own = Resource::Run { id: "abcdefghijk1".to_owned() };
    assert_eq!(seen.iter().map(|effect| &effect.resource).collect::<Vec<_>>(), [&own, &own, &own]);
    let eval = run::Request::Eval { label: "main".to_owned(), cpu_us: 5, wall_us: 7 };
    assert_eq!(seen[2].request, Arguments::Run(eval));
}

/// The shim's client with these arguments and this input: its status, what it printed and what it said.
async fn shim(socket: &Path, args: &[&str], input: &[u8]) -> (u8, Vec<u8>, String) {
    let (socket, input) = (socket.to_owned(), input.to_owned());
    let args: Vec<std::ffi::OsString> = args.iter().map(Into::into).collect();
    let run = move || {
        let (mut out, mut talk) = (Vec::new(), Vec::new());
        let status = tollgate_shim::client::run(&args, &socket, &mut input.as_slice(), &mut out, &mut talk);
        (status as u8, out, String::from_utf8_lossy(&talk).into_owned())
    };
    tokio::task::spawn_blocking(run).await.expect("does not panic")
}

#[tokio::test]
async fn the_shims_client_does_what_it_says() {
    let stage = Stage::new();
    stage.put("big", &vec![7; 9 * 1024 * 1024]);
    stage
        .play(|socket| async move {
            let socket = socket.as_path();
            let printed = |(status, out, said): (u8, Vec<u8>, String)| {
                assert_eq!((status, said.as_str()), (0, ""));
                out
            };
            printed(shim(socket, &["write", "a b", "--mode", "755"], b"hello\xff").await);
            assert_eq!(printed(shim(socket, &["read", "a b"], b"").await), b"hello\xff");
            assert_eq!(printed(shim(socket, &["read", "a b", "--offset=1", "--limit", "3"], b"").await), b"ell");
            assert_eq!(printed(shim(socket, &["read", "big"], b"").await).len(), 9 * 1024 * 1024);
            assert_eq!(printed(shim(socket, &["ls"], b"").await), b"a b\nbig\n");
            printed(shim(socket, &["mv", "a b", "c"], b"").await);
            printed(shim(socket, &["rm", "c"], b"").await);
            let told = printed(shim(socket, &["effect", "eval/run", "label=x", "cpu_us=1", "wall_us=2"], b"").await);
            assert_eq!(serde_json::from_slice::<Value>(&told).expect("is JSON")["value"]["did"], "eval/run");
            let told = printed(shim(socket, &["self"], b"").await);
            let told = String::from_utf8(told).expect("is text");
            for part in ["deny       any on secret/**", "limit      wall_us 60000000", "more       Ask the person"] {
                assert!(told.contains(part), "{told}");
            }
            let told = printed(shim(socket, &["budget"], b"").await);
            assert_eq!(String::from_utf8_lossy(&told), "write_bytes    130 used of 100, 0 left\n");
            printed(shim(socket, &["why", "fs/write", "public", "bytes=5"], b"").await);
            printed(shim(socket, &["why", "run/start", "--", "make", "test"], b"").await);
        })
        .await;
}

#[tokio::test]
async fn the_shims_client_tells_refusals_failures_and_mistakes_apart() {
    let stage = Stage::new();
    stage
        .play(|socket| async move {
            let rows: [(&[&str], u8, &str); 6] = [
                (
                    &["read", "secret/key"],
                    77,
                    "refused: fs/read secret/key: secret/key: a rule denies it (by admission)",
                ),
                (&["read", "/proc/1/environ"], 77, "refused: fs/read /proc/1/environ"),
                (&["why", "fs/read", "secret/key"], 77, ""),
                (&["read", "missing"], 1, "failed: fs/read missing"),
                (&["effect", "receipt/write"], 2, "unknown-kind"),
                (&["effect", "fs/list", "path=a", "subject=root"], 2, "identity-in-request"),
            ];
            for (args, expected, part) in rows {
                let (status, _, said) = shim(&socket, args, b"").await;
                assert_eq!(status, expected, "{args:?}: {said}");
                assert!(said.contains(part), "{args:?}: {said}");
            }
            let (status, _, said) = shim(&socket, &["write", "secret/x"], &vec![0; 1 << 20]).await;
            assert_eq!(status, 77, "{said}");
        })
        .await;
}

/// Runs a Python program that has `tollgate.py` and this socket.
async fn python(socket: &Path, program: &str) {
    let library = concat!(env!("CARGO_MANIFEST_DIR"), "/../shim/python");
    let mut command = std::process::Command::new("python3");
    command.args(["-B", "-W", "error", "-c", program]);
    command.env("PYTHONPATH", library).env("TOLLGATE_SOCKET", socket);
    let output = tokio::task::spawn_blocking(move || command.output()).await.expect("does not panic");
    let output = output.expect("python3 is installed where these tests run");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[tokio::test]
async fn the_python_client_does_what_it_says() {
    let stage = Stage::new();
    stage.put("big", &vec![7; 9 * 1024 * 1024]);
    stage
        .play(|socket| async move {
            let program = r#"
import os, tollgate
tollgate.write(b"d\xff/f\\", b"hello\xff", mode=0o755, expect="absent")
assert tollgate.read(b"d\xff/f\\") == b"hello\xff"
assert tollgate.read(b"d\xff/f\\", offset=1, limit=3) == b"ell"
assert tollgate.read("big", limit=0) == b""
assert tollgate.read("big") == b"\x07" * (9 << 20)
assert [entry["name"] for entry in tollgate.list()] == ["big", "d\\xff/f\\\\"]
tollgate.write("text", "é")
tollgate.move("text", "other")
tollgate.delete("other", expect="absent")
with tollgate.meter("sum"):
    sum(range(1000))
assert tollgate.budget()["write_bytes"] == {"limit": 100, "used": 130, "left": 0}
assert tollgate.self_()["run"] == "abcdefghijk1"
assert tollgate.why("fs/read", "secret/key")["verdict"] == "deny"
assert tollgate.why("run/start", command=["make", "te st"])["verdict"] == "allow"
assert tollgate.effect("fs/list", path="")["decision"] == "allowed"
tollgate.cancel()
"#;
            python(&socket, program).await;
        })
        .await;
    let kinds: Vec<Kind> = stage.seen().iter().map(|effect| effect.kind).collect();
    assert!(kinds.contains(&Kind::EvalRun) && kinds.contains(&Kind::RunCancel), "{kinds:?}");
    assert!(stage.refusals.problems().is_empty());
}

#[tokio::test]
async fn the_python_client_raises_what_a_program_would_expect() {
    let stage = Stage::new();
    stage
        .play(|socket| async move {
            let program = r#"
import errno, tollgate

def raised(call, *args, **kwargs):
    try:
        call(*args, **kwargs)
    except Exception as caught:
        return caught
    raise AssertionError("nothing was raised")

refused = raised(tollgate.read, "secret/key")
assert isinstance(refused, tollgate.Refused) and isinstance(refused, PermissionError), refused
assert (refused.kind, refused.resource, refused.handler) == ("fs/read", "secret/key", "admission")
assert refused.errno == errno.EACCES and refused.hint == "ask for it", refused
assert raised(tollgate.write, "full/a", b"x" * 1000000).errno == errno.EDQUOT
assert isinstance(raised(tollgate.write, "secret/a", b"x" * 1000000), tollgate.Refused)
missing = raised(tollgate.read, "missing")
assert isinstance(missing, tollgate.Failed) and isinstance(missing, FileNotFoundError), missing
assert missing.type == "failed" and missing.filename == "missing"
tollgate.write("a", b"x")
assert isinstance(raised(tollgate.write, "a", b"x", expect="absent"), FileExistsError)
assert isinstance(raised(tollgate.effect, "receipt/write"), tollgate.Malformed)
assert isinstance(raised(tollgate.effect, "fs/list", path="", subject="root"), tollgate.Malformed)
too_long = raised(tollgate.write, "a", bytes(64 * 1024 * 1024 + 1))
assert isinstance(too_long, tollgate.Failed) and too_long.type == "too-large", too_long
"#;
            python(&socket, program).await;
        })
        .await;
}

#[tokio::test]
async fn the_python_client_without_a_supervisor_says_so() {
    let root = tempfile::tempdir().expect("a temporary directory");
    let program = "import tollgate\ntry: tollgate.budget()\nexcept FileNotFoundError: pass\nelse: raise SystemExit(1)";
    python(&root.path().join("missing.sock"), program).await;
}

#[test]
fn an_opinion_is_the_ruling_with_the_refusals_own_words() {
    let effect = Effect {
        kind: Kind::FsRead,
        resource: Resource::Workspace { path: "a".to_owned() },
        request: Arguments::Fs(fs::Request::Read { path: "a".to_owned(), offset: 0, limit: 1 }),
        ..stage_effect()
    };
    let nothing = Opinion::of(&Arc::new(Admission::nothing()), &effect);
    assert_eq!((nothing.verdict, nothing.handler.as_str()), (Verdict::Deny, "admission"));
    assert!(!nothing.reason.is_empty() && !nothing.hint.is_empty(), "{nothing:?}");
    let everything = Opinion::of(&Arc::new(Admission::everything()), &effect);
    assert_eq!((everything.verdict, everything.reason.as_str()), (Verdict::Allow, ""));
    let outside = Effect { resource: Resource::Host { path: "/etc/shadow".to_owned() }, ..effect };
    assert_eq!(Opinion::of(&Arc::new(Admission::everything()), &outside).verdict, Verdict::Deny);
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime")
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn random_bytes_never_reach_the_world(bytes in proptest::collection::vec(any::<u8>(), 0..2000)) {
        let stage = Stage::new();
        runtime().block_on(stage.play(|socket| async move {
            raw(&socket, &bytes).await;
            assert_eq!(ask(&socket, "GET", "/v1/budget", "", b"").await.0, 200, "the door goes on");
        }));
        prop_assert!(stage.seen().is_empty());
    }

    #[test]
    fn a_mutated_request_is_answered_or_closed_and_never_changes_its_subject(
        edits in proptest::collection::vec((0usize..200, any::<u8>()), 1..6),
    ) {
        let body = r#"{"kind":"fs/write","path":"a/b","text":"hi","mode":"0644"}"#;
        let mut request = format!(
            "POST /v1/effects HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{body}",
            body.len(),
        ).into_bytes();
        for (at, byte) in edits {
            let length = request.len();
            request[at % length] = byte;
        }
        let stage = Stage::new();
        runtime().block_on(stage.play(|socket| async move {
            raw(&socket, &request).await;
            assert_eq!(ask(&socket, "GET", "/v1/budget", "", b"").await.0, 200, "the door goes on");
        }));
        for effect in stage.seen() {
            prop_assert_eq!(effect.subject, subject());
        }
    }
}
