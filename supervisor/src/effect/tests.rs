//! The vocabulary holds together, and digests are what the reference says.

use super::http::Scheme;
use super::*;
use proptest::prelude::*;
use std::{collections::BTreeSet, path::Path};

/// One effect of each kind, always the same.
pub(crate) fn one_of_each() -> Vec<Effect> {
    VOCABULARY.iter().map(|row| sample(row.kind)).collect()
}

/// An effect of this kind.
pub(crate) fn sample(kind: Kind) -> Effect {
    let file = || "src/main.rs".to_owned();
    let workspace = || Resource::Workspace { path: file() };
    let run = || Resource::Run { id: "0123456789ab".to_owned() };
    let seen = |syscall: &str, errno: &str| {
        Request::Jail(jail::Request { syscall: syscall.into(), errno: errno.into(), process: "python3".into(), pid: 7 })
    };
    let (resource, request) = match kind {
        Kind::FsRead => (workspace(), Request::Fs(fs::Request::Read { path: file(), offset: 0, limit: 4096 })),
        Kind::FsList => {
            (Resource::Workspace { path: String::new() }, Request::Fs(fs::Request::List { path: "".into() }))
        }
        Kind::FsWrite => {
            let node = fs::Node::File { digest: Digest::of(b"hello"), bytes: 5, mode: 0o644 };
            let expect = Some(fs::Expect::Absent);
            (workspace(), Request::Fs(fs::Request::Write { path: file(), node, expect }))
        }
        Kind::FsDelete => (workspace(), Request::Fs(fs::Request::Delete { path: file(), expect: None })),
        Kind::FsMove => (workspace(), Request::Fs(fs::Request::Move { path: file(), to: "src/lib.rs".into() })),
        Kind::RunStart => (
            run(),
            Request::Run(run::Request::Start {
                command: vec!["python3".into(), "-V".into()],
                policy: "base".into(),
                policy_digest: Digest::of(b"policy").to_string(),
                directory: "/home/agent".into(),
                environment: vec!["LANG".into()],
            }),
        ),
        Kind::RunCancel => (run(), Request::Run(run::Request::Cancel { run: "0123456789ab".into() })),
        Kind::EvalRun => {
            (run(), Request::Run(run::Request::Eval { label: "tests".into(), cpu_us: 1_500, wall_us: 2_000 }))
        }
        Kind::ApiRequest => {
            let request = api::Request { problem: "unknown-kind".into(), route: "/v1/effects".into() };
            (run(), Request::Api(request))
        }
        Kind::NetConnect => (Resource::Address { to: "example.org:443".into() }, seen("connect", "ENETUNREACH")),
        Kind::NetResolve => {
            let request = net::Request::Resolve { name: "example.org".into(), record: "A".into() };
            (request.resource(), Request::Net(request))
        }
        Kind::NetAccept => {
            let (host, from) = ("127.0.0.1".to_owned(), "127.0.0.1".to_owned());
            let request = net::Request::Accept { host, port: 8080, inside: 80, from };
            (request.resource(), Request::Net(request))
        }
        Kind::HttpRequest => {
            let request = request_of("POST", "https://example.org/v1/items?dry=1", b"hello");
            (request.resource(), Request::Http(request))
        }
        Kind::ProcessExec => (Resource::Host { path: "/usr/bin/sudo".into() }, seen("execve", "ENOENT")),
        Kind::ProcessSyscall => (Resource::Syscall { name: "ptrace".into() }, seen("ptrace", "EPERM")),
    };
    let at_api = kind.declaration().at_api_door || kind == Kind::ApiRequest;
    let door = match kind {
        Kind::NetResolve | Kind::NetAccept | Kind::HttpRequest => Door::Network,
        _ if at_api => Door::Api,
        _ => Door::Jail,
    };
    let subject = Subject { uid: 1000, run: Some(RunId("0123456789ab".into())), agent: None };
    Effect { kind, resource, subject, room: None, door, request }
}

/// A request of this method for this URL, with this body.
pub(crate) fn request_of(method: &str, url: &str, body: &[u8]) -> http::Request {
    let (scheme, rest) = url.split_once("://").unwrap();
    let scheme = Scheme::ALL.into_iter().find(|known| known.name() == scheme).unwrap();
    let (authority, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
    let (host, port) = match authority.rsplit_once(':') {
        Some((host, port)) if !port.ends_with(']') => (host, port.parse().unwrap()),
        _ => (authority, scheme.default_port()),
    };
    let body = match body {
        [] => http::Body::Empty,
        bytes => http::Body::Known { digest: Digest::of(bytes), size: bytes.len() as u64 },
    };
    http::Request {
        method: method.to_owned(),
        scheme,
        host: host.trim_matches(['[', ']']).to_owned(),
        port,
        path: if path.is_empty() { "/".to_owned() } else { path.to_owned() },
        body,
        operation: None,
        secrets: Vec::new(),
    }
}

/// An effect of the network door with this request.
pub(crate) fn at_network(kind: Kind, resource: Resource, request: Request) -> Effect {
    Effect { kind, resource, request, door: Door::Network, ..sample(Kind::FsRead) }
}

/// `http/request` of this method for this URL.
pub(crate) fn http(method: &str, url: &str) -> Effect {
    let request = request_of(method, url, b"");
    at_network(Kind::HttpRequest, request.resource(), Request::Http(request))
}

/// `net/connect` to this host and port.
pub(crate) fn connect(host: &str, port: u16) -> Effect {
    let request = net::Request::Connect { host: host.to_owned(), port, transport: net::Transport::Tcp };
    at_network(Kind::NetConnect, request.resource(), Request::Net(request))
}

/// `net/resolve` of this name.
pub(crate) fn resolve(name: &str) -> Effect {
    let request = net::Request::Resolve { name: name.to_owned(), record: "A".to_owned() };
    at_network(Kind::NetResolve, request.resource(), Request::Net(request))
}

/// Effects of every kind, writes of every size up to 64 bytes.
pub(crate) fn any_effect() -> impl Strategy<Value = Effect> {
    (prop::sample::select(VOCABULARY), 0u64..64, "[a-c]{1,2}", 0u32..3).prop_map(|(row, bytes, path, uid)| {
        let mut effect = sample(row.kind);
        effect.subject.uid = uid;
        if let Request::Fs(fs::Request::Write { path: written, node, .. }) = &mut effect.request {
            *node = fs::Node::File { digest: Digest::of(path.as_bytes()), bytes, mode: 0o644 };
            *written = path.clone();
            effect.resource = Resource::Workspace { path };
        }
        effect
    })
}

#[test]
fn names_are_unique_namespaced_and_read_back() {
    let names: BTreeSet<&str> = VOCABULARY.iter().map(|row| row.name).collect();
    assert_eq!(names.len(), VOCABULARY.len());
    for row in VOCABULARY {
        assert_eq!(row.kind.name(), row.name);
        assert_eq!(row.name.parse::<Kind>().unwrap(), row.kind);
        let (family, verb) = row.name.split_once('/').expect(row.name);
        for part in [family, verb] {
            assert!(!part.is_empty() && part.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'-'), "{part}");
        }
        let json = serde_json::to_string(&row.kind).unwrap();
        assert_eq!(json, format!("\"{}\"", row.name));
        assert_eq!(serde_json::from_str::<Kind>(&json).unwrap(), row.kind);
    }
}

#[test]
fn every_kind_has_a_class_and_is_explained() {
    for row in VOCABULARY {
        assert!(!row.classes.is_empty(), "{}", row.name);
        let distinct: BTreeSet<Class> = row.classes.iter().copied().collect();
        assert_eq!(distinct.len(), row.classes.len(), "{}", row.name);
        assert!(row.summary.ends_with('.') && !row.resource.is_empty(), "{}", row.name);
    }
}

/// The reference and the schema are made from these, so a kind without one would be a hole in both.
#[test]
fn every_kind_says_what_stands_in_for_it_what_counts_and_how_it_fails() {
    for row in VOCABULARY {
        let outward = row.classes.iter().any(|class| !matches!(class, Class::Read | Class::Process));
        if row.stand_in == StandIn::World {
            // A question about a name is answered within the run.
            let within = matches!(row.kind, Kind::RunCancel | Kind::NetResolve);
            assert!(!outward || within, "{} reaches out of the run in a preflight", row.name);
        }
        let effect = sample(row.kind);
        assert_eq!(row.size == Size::Content, effect.bytes() > 0, "{}", row.name);
        let never_done = matches!(row.kind, Kind::ProcessSyscall | Kind::ApiRequest);
        assert_eq!(row.faults.is_empty(), never_done, "{} has no fault to show, or one too many", row.name);
        let kinds: BTreeSet<FaultKind> = row.faults.iter().map(|shape| shape.kind).collect();
        assert_eq!(kinds.len(), row.faults.len(), "{} shows one fault in two ways", row.name);
        for shape in row.faults {
            assert!(!shape.doors.is_empty() && !shape.arrives.is_empty(), "{} {:?}", row.name, shape.kind);
            assert!(row.at_api_door || !shape.doors.contains(&Door::Api), "{} is never asked for there", row.name);
        }
        assert!(row.faults.is_empty() || row.faults[0].kind == FaultKind::Error, "{}", row.name);
    }
}

#[test]
fn faults_arrive_as_errors_and_statuses_that_exist() {
    for shape in VOCABULARY.iter().flat_map(|row| row.faults) {
        for name in shape.arrives {
            match shape.kind {
                FaultKind::Error | FaultKind::Timeout => assert!(errno(name).is_some(), "{name}"),
                FaultKind::RateLimit => assert!(["429", "503"].contains(name), "{name}"),
                FaultKind::Truncated | FaultKind::Corrupted => assert!(name.contains("body")),
                FaultKind::Cut => assert!(name.ends_with("breaks off"), "{name}"),
            }
        }
    }
}

#[test]
fn a_request_may_be_repeated_as_its_method_says() {
    for (method, expected) in [
        ("GET", Idempotency::Idempotent),
        ("HEAD", Idempotency::Idempotent),
        ("OPTIONS", Idempotency::Idempotent),
        ("TRACE", Idempotency::Idempotent),
        ("PUT", Idempotency::Idempotent),
        ("DELETE", Idempotency::Idempotent),
        ("POST", Idempotency::Once),
        ("PATCH", Idempotency::Once),
        ("CONNECT", Idempotency::Once),
        ("QUERY", Idempotency::Once),
        ("get", Idempotency::Once),
        ("", Idempotency::Once),
    ] {
        assert_eq!(http(method, "https://example.org/").idempotency(), expected, "{method}");
    }
    assert_eq!(connect("example.org", 22).idempotency(), Idempotency::Once);
    assert_eq!(resolve("example.org").idempotency(), Idempotency::Idempotent);
    for row in VOCABULARY.iter().filter(|row| row.kind != Kind::HttpRequest) {
        assert_eq!(sample(row.kind).idempotency(), row.idempotency, "{}", row.name);
    }
}

#[test]
fn a_url_has_one_spelling_and_names_a_port_only_where_it_is_another() {
    for url in [
        "https://example.org/",
        "http://example.org/a//b?c=%2f",
        "https://example.org:80/x",
        "http://example.org:443/x",
        "https://[2001:db8::1]:8443/x",
    ] {
        assert_eq!(http("GET", url).resource, Resource::Url { url: url.to_owned() });
    }
    assert_eq!(http("GET", "https://example.org:443/x").resource.to_string(), "https://example.org/x");
    let every = http::Request { path: "*".into(), ..request_of("OPTIONS", "http://example.org/", b"") };
    assert_eq!((every.url(), every.path_alone()), ("http://example.org".to_owned(), "*"));
    assert_eq!(request_of("GET", "http://example.org/a?b?c", b"").path_alone(), "/a");
    assert_eq!(connect("2001:db8::1", 22).resource.to_string(), "[2001:db8::1]:22");
    assert_eq!(resolve("example.org").resource.to_string(), "example.org");
}

/// What the jail refused, what waits in a system call and what comes by the network differ in their digests.
#[test]
fn a_connection_by_the_network_has_a_digest_of_its_own() {
    assert_ne!(connect("example.org", 443).digest(), sample(Kind::NetConnect).digest());
    let mut other = http("POST", "https://example.org/v1/items?dry=1");
    assert_ne!(other.digest(), sample(Kind::HttpRequest).digest());
    let Request::Http(request) = &mut other.request else { unreachable!() };
    request.body = http::Body::Known { digest: Digest::of(b"hello"), size: 5 };
    assert_eq!(other.digest(), sample(Kind::HttpRequest).digest());
    request_with_operation(&mut other);
    assert_ne!(other.digest(), sample(Kind::HttpRequest).digest());
}

fn request_with_operation(effect: &mut Effect) {
    if let Request::Http(request) = &mut effect.request {
        request.operation = Some("graphql/mutation".to_owned());
    }
}

#[test]
fn a_url_is_read_as_the_request_that_it_names() {
    for (url, form) in [
        ("https://API.Example.org./a?b#c", "https://api.example.org/a?b"),
        ("HTTP://example.org:80", "http://example.org/"),
        ("http://example.org?x", "http://example.org/?x"),
        ("https://[::1]:8443/x", "https://[::1]:8443/x"),
        ("https://[::1]/", "https://[::1]/"),
    ] {
        assert_eq!(http::Request::parse("GET", url).unwrap().url(), form);
    }
    for url in ["", "example.org", "ftp://example.org/", "https://", "https:///x", "https://a:b/", "https://a:99999/"] {
        assert!(http::Request::parse("GET", url).is_err(), "{url}");
    }
}

#[test]
fn an_unknown_kind_is_a_typed_error_that_names_it() {
    for name in ["fs/chmod", "", "FS/READ", "fs/read ", "fs"] {
        let error = name.parse::<Kind>().unwrap_err();
        assert_eq!(error.0, name);
        assert!(serde_json::from_value::<Kind>(name.into()).is_err());
    }
}

#[test]
fn a_kind_that_only_reads_may_be_repeated() {
    for row in VOCABULARY {
        if row.classes == [Class::Read] {
            assert_eq!(row.idempotency, Idempotency::Idempotent, "{}", row.name);
        }
    }
}

/// Whoever changes one of these breaks every recording that exists.
#[test]
fn digests_of_one_effect_of_each_kind_are_these() {
    let digests: Vec<String> =
        one_of_each().iter().map(|effect| format!("{} {}", effect.kind, effect.digest())).collect();
    assert_eq!(digests, GOLDEN_DIGESTS);
}

const GOLDEN_DIGESTS: &[&str] = &[
    "fs/read 9a0282d46d5bd3df455f8a14bd134660aa632503bfbe6c39a2105c6cfdbb8a9d",
    "fs/list 465f34963199926ebf5df91935855eb468b4bf8b515d11e19b29740a9b0d6d57",
    "fs/write f33b5a5e8051b035f4fc66d6e9671af157ba8a988c2295960ced3c4357f024b3",
    "fs/delete 5db463e9a42bc6129062b98a561bba664f6d3845e29fd295c689c6dd5d83fca8",
    "fs/move 377af16beae5d9c6e5ca7ac7aed832316a1601400df8dbca862a10968f82bc85",
    "run/start d272739d65c3f81f353e0539c9a863a94946786db28fff25fa26da5195e539fc",
    "run/cancel 491f0e8bc6fe0e60bf9d76f4930f1afee9b761d003df56957e7fda5710e8f4f4",
    "eval/run 8bc0cb066779530d3eee32d3c08fe7b85a0e603a63268b4485d2ba87f90a131b",
    "net/connect 5a568207133115e9f6fbf7d4732b7a10a8cefc45e2dbbf7046d954cd0b7856be",
    "process/exec 709c8ab5037dd35733ae68a92b5267ef5b1f4af733bc88d7cadb0f1801b17381",
    "process/syscall c9c4f5f3a23a90b305ce15cc29e3bbbaf19349509779342a8f22a34388ff16ca",
    "api/request ce2477887a8f7cd8133c897fe1c2983313d85e039826e7366e35ce5e6cfa0e3e",
    "net/resolve 502d5c46eb46d30abbdf74b37f56dd0a3a653b46b1dd4c8c4409e46e825ac689",
    "http/request e9f5f56a3ac497ce0b4760aa564ce005174daa3b02d6521507d3aec2cb52d6f0",
    "net/accept d0e7ed7a8f9d4a9b7dbaa558fbd1f139f2ea441641e2c87500938c48e83f6c18",
];

#[test]
fn a_digest_is_over_the_bytes_that_the_reference_names() {
    let effect = sample(Kind::FsRead);
    let bytes = b"tollgate.effect.v1\0fs/read\0{\"path\":\"src/main.rs\",\"type\":\"workspace\"}\0\
        {\"args\":{\"limit\":4096,\"offset\":0,\"path\":\"src/main.rs\",\"verb\":\"read\"},\"family\":\"fs\"}";
    assert_eq!(effect.digest(), Digest::of(bytes));
}

#[test]
fn the_order_of_keys_does_not_change_a_digest() {
    let one = r#"{"family":"fs","args":{"verb":"read","path":"a","offset":1,"limit":2}}"#;
    let other = r#"{"args":{"limit":2,"offset":1,"path":"a","verb":"read"},"family":"fs"}"#;
    let of = |text: &str| {
        let request = serde_json::from_str(text).unwrap();
        Effect { request, ..sample(Kind::FsRead) }.digest()
    };
    assert_eq!(of(one), of(other));
    assert_ne!(of(one), sample(Kind::FsRead).digest());
    // This holds only while no crate of the build turns on `serde_json/preserve_order`.
    assert_eq!(
        canonical_json(&serde_json::from_str::<serde_json::Value>(r#"{"b":1,"a":2}"#).unwrap()),
        br#"{"a":2,"b":1}"#
    );
}

#[test]
fn who_asks_and_where_is_not_part_of_the_digest() {
    let effect = sample(Kind::FsWrite);
    let elsewhere = Effect {
        subject: Subject { uid: 0, run: None, agent: Some("other".into()) },
        room: Some(RoomId("room".into())),
        door: Door::Control,
        ..effect.clone()
    };
    assert_eq!(effect.digest(), elsewhere.digest());
}

proptest! {
    #[test]
    fn effects_are_read_back_from_their_json(effect in any_effect()) {
        let json = serde_json::to_vec(&effect).unwrap();
        let read: Effect = serde_json::from_slice(&json).unwrap();
        prop_assert_eq!(read.digest(), effect.digest());
        prop_assert_eq!(read, effect);
    }

    #[test]
    fn different_requests_have_different_digests(one in any_effect(), other in any_effect()) {
        let same = one.kind == other.kind && one.resource == other.resource && one.request == other.request;
        prop_assert_eq!(one.digest() == other.digest(), same);
    }
}

#[test]
fn the_schema_lists_the_vocabulary() {
    let schema = schema();
    let kinds: Vec<&str> =
        schema["$defs"]["kind"]["oneOf"].as_array().unwrap().iter().filter_map(|kind| kind["const"].as_str()).collect();
    assert_eq!(kinds, VOCABULARY.iter().map(|row| row.name).collect::<Vec<_>>());
    assert_eq!(schema["x-kinds"][2]["kind"], "fs/write");
    assert_eq!(schema["x-kinds"][2]["classes"], serde_json::json!(["write"]));
    assert_eq!(schema["$defs"]["class"]["oneOf"].as_array().unwrap().len(), 9);
}

#[test]
fn the_page_of_the_reference_is_the_vocabulary() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/effects.md");
    let made = reference_markdown();
    if std::env::var_os("TOLLGATE_WRITE_DOCS").is_some() {
        std::fs::write(&page, &made).unwrap();
    }
    let stored = std::fs::read_to_string(&page).expect("docs/effects.md");
    assert_eq!(stored, made, "run this test with TOLLGATE_WRITE_DOCS=1 to write docs/effects.md");
}
