//! The network door, as unmodified programs and the servers behind it see it.

use serde_json::Value;
use std::{
    fs,
    io::{Read as _, Write as _},
    net::{TcpListener, TcpStream},
    path::Path,
    sync::Arc,
    thread,
};
use tollgate::doors::network::authority::{Authority, OneHost};
use tollgate_tests::{
    every_identity,
    origin::{Both, NameServer, Origin},
    World,
};

const VALUE: &str = "zq9-value-of-a-secret";

/// Asks for each URL, and prints the status and the body.
const GET: &str = r#"
import sys, urllib.request, urllib.error
for url in sys.argv[1:]:
    try:
        with urllib.request.urlopen(url, timeout=20) as answer:
            print(answer.status, answer.read().decode())
    except urllib.error.HTTPError as refused:
        print(refused.code, refused.read().decode())
    except OSError as error:
        print("error", error)
"#;

/// Sends a secret's placeholder in each place.
const CARRY: &str = r#"
import os, sys, urllib.request, urllib.error
api, other, token = sys.argv[1], sys.argv[2], os.environ["TOK"]
assert token.startswith("tollgate-secret-"), token
def ask(name, url, headers={}, body=None):
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=20) as answer:
            text = answer.read().decode()
            print(name, answer.status, token in text)
    except urllib.error.HTTPError as refused:
        print(name, refused.code, "secrets" in refused.read().decode())
ask("bound", api, {"Authorization": "Bearer " + token})
ask("header", api, {"X-Other": token})
ask("query", api + "?key=" + token)
ask("body", api, {}, b"x" + token.encode())
ask("long", api, {}, b"x" * 200000 + token.encode())
ask("host", other, {"Authorization": "Bearer " + token})
"#;

struct Net {
    names: NameServer,
    origin: Origin,
}

impl Net {
    fn new(origin: Origin) -> Net {
        Net { names: NameServer::new(), origin }
    }

    fn flags(&self) -> Vec<String> {
        ["--resolver", &self.names.address(), "--private", "api.test=127.0.0.1"].map(str::to_owned).to_vec()
    }

    fn url(&self, scheme: &str, host: &str) -> String {
        format!("{scheme}://{host}:{}/x", self.origin.port())
    }
}

fn of_network(receipts: &[Value]) -> Vec<(String, String, String, String)> {
    let text = |receipt: &Value, key: &str| receipt[key].as_str().unwrap_or_default().to_owned();
    let mine = receipts
        .iter()
        .filter(|receipt| ["http/request", "net/connect"].contains(&receipt["kind"].as_str().unwrap_or_default()));
    let object = |one: &Value| {
        let resource = &one["resource"];
        resource["url"].as_str().or(resource["to"].as_str()).unwrap_or_default().to_owned()
    };
    mine.map(|one| (text(one, "kind"), object(one), text(one, "decision"), text(one, "decided_by"))).collect()
}

fn quad(kind: &str, resource: &str, decision: &str, by: &str) -> (String, String, String, String) {
    (kind.to_owned(), resource.to_owned(), decision.to_owned(), by.to_owned())
}

/// A server within TLS, whose authority's certificate is in this file.
fn secure(world: &World) -> (Origin, String) {
    let authority = Authority::new("tests").expect("an authority can be made");
    let file = world.base().join("authority.pem");
    fs::write(&file, authority.pem()).expect("the world's folder is writable");
    fs::set_permissions(&file, std::os::unix::fs::PermissionsExt::from_mode(0o644)).expect("it is ours");
    let certificate = authority.certificate_for("api.test").expect("a certificate can be made");
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let settings = rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("ring has them")
        .with_no_client_auth()
        .with_cert_resolver(Arc::new(OneHost(certificate)));
    let settings = Arc::new(settings);
    let origin = Origin::behind(Arc::new(move |stream| {
        let connection = rustls::ServerConnection::new(Arc::clone(&settings)).expect("the settings are whole");
        Box::new(rustls::StreamOwned::new(connection, stream)) as Box<dyn Both>
    }));
    (origin, file.display().to_string())
}

#[test]
fn a_program_reaches_what_is_named_and_nothing_else_and_each_request_has_one_receipt() {
    every_identity(|world| {
        let net = Net::new(Origin::plain());
        world.write("get.py", GET);
        let (api, other) = (net.url("http", "api.test"), net.url("http", "secret-data.evil.test"));
        let mut arguments = net.flags();
        arguments.extend(["--allow".to_owned(), format!("GET {api}")]);
        arguments.extend(["--", "python3", "get.py", &api, &format!("{api}y"), &other].map(str::to_owned));
        let output = world.run(&arguments).finish().expect_status(0);
        let told = output.out();
        assert!(told.contains("200 GET /x HTTP/1.1"), "{output}");
        assert!(told.contains(&format!("403 tollgate: refused by admission: http/request GET {api}y")), "{output}");
        assert!(told.contains("--allow"), "{output}");
        assert_eq!(net.origin.seen().len(), 1, "the server saw what has a receipt, and no more");
        assert!(!net.names.asked().iter().any(|name| name.contains("evil")), "{:?}", net.names.asked());
        assert_eq!(
            of_network(&world.receipts(&[])),
            [
                quad("http/request", &api, "allowed", "world"),
                quad("http/request", &format!("{api}y"), "refused", "admission"),
                quad("http/request", &other, "refused", "admission"),
            ]
        );
        assert!(output.err().contains("evil.test"), "the summary names the host: {output}");
    });
}

#[test]
fn a_name_that_leads_inside_is_refused_unless_the_policy_says_so() {
    every_identity(|world| {
        let net = Net::new(Origin::plain());
        world.write("get.py", GET);
        let url = net.url("http", "inside.test");
        let mut arguments = net.flags();
        arguments.extend(["--allow".to_owned(), format!("inside.test:{}", net.origin.port())]);
        arguments.extend(["--", "python3", "get.py", &url].map(str::to_owned));
        let output = world.run(&arguments).finish().expect_status(0);
        assert!(output.out().contains("403 tollgate: refused by containment"), "{output}");
        assert!(net.origin.seen().is_empty());
        assert_eq!(of_network(&world.receipts(&[])), [quad("http/request", &url, "refused", "containment")]);
    });
}

#[test]
fn a_request_must_be_addressed_to_where_its_connection_leads() {
    const FORGED: &str = r#"
import socket, sys
port = int(sys.argv[1])
for head in ("GET / HTTP/1.1\r\nHost: other.test", "GET http://other.test/ HTTP/1.1\r\nHost: api.test:%d" % port,
             "GET / HTTP/1.1\r\nHost: api.test:%d\r\nHost: other.test" % port, "GET / HTTP/1.1\r\nX: y",
             "CONNECT other.test:443 HTTP/1.1\r\nHost: other.test:443", "GET / HTTP/1.1\r\nHost: a@api.test:%d" % port):
    s = socket.create_connection(("api.test", port), 20)
    s.sendall(head.encode() + b"\r\n\r\n")
    print(s.recv(4096).split(b"\r\n")[0].decode())
"#;
    every_identity(|world| {
        let net = Net::new(Origin::plain());
        world.write("forged.py", FORGED);
        let port = net.origin.port().to_string();
        let mut arguments = net.flags();
        arguments.extend(["--allow".to_owned(), format!("http://api.test:{port}/**")]);
        arguments.extend(["--", "python3", "forged.py", &port].map(str::to_owned));
        let output = world.run(&arguments).finish().expect_status(0);
        assert!(output.out().lines().all(|line| line.contains(" 403 ") || line.contains(" 400 ")), "{output}");
        assert!(net.origin.seen().is_empty(), "{:?}", net.origin.seen());
    });
}

#[test]
fn other_protocols_pass_where_their_port_is_named_and_the_receipt_counts_their_bytes() {
    const LINES: &str = r#"
import socket, sys
for port in sys.argv[1:]:
    try:
        s = socket.create_connection(("api.test", int(port)), 20)
        s.sendall(b"hi\n")
        print(s.recv(9).decode().strip() or "closed")
    except OSError as error:
        print(type(error).__name__)
"#;
    every_identity(|world| {
        let net = Net::new(Origin::plain());
        let echo = TcpListener::bind("127.0.0.1:0").expect("the loopback has a port");
        let port = echo.local_addr().expect("it has an address").port();
        thread::spawn(move || {
            for mut stream in echo.incoming().flatten() {
                let mut bytes = [0; 3];
                let _ = stream.read_exact(&mut bytes).and_then(|()| stream.write_all(b"HI\n"));
            }
        });
        world.write("lines.py", LINES);
        let mut arguments = net.flags();
        arguments.extend(["--allow".to_owned(), format!("api.test:{port}")]);
        let refused = net.origin.port().to_string();
        arguments.extend(["--", "python3", "lines.py", &port.to_string(), &refused].map(str::to_owned));
        let output = world.run(&arguments).finish().expect_status(0);
        assert_eq!(output.out(), "HI\nConnectionResetError\n", "{output}");
        let mut receipts = world.receipts(&["--kind", "net/connect"]);
        // A receipt is written when its connection is over, and these end at the same time.
        receipts.sort_by_key(|one| one["decision"].as_str().unwrap_or_default().to_owned());
        assert_eq!(
            of_network(&receipts),
            [
                quad("net/connect", &format!("api.test:{port}"), "allowed", "world"),
                quad("net/connect", &format!("api.test:{refused}"), "refused", "admission"),
            ]
        );
        assert!(
            receipts[0]["reason"].as_str().unwrap_or_default().contains("3 bytes sent, 3 received"),
            "{receipts:?}"
        );
    });
}

#[test]
fn within_tls_a_secret_goes_to_its_host_and_place_and_is_seen_by_nobody_else() {
    every_identity(|world| {
        let (origin, authority) = secure(world);
        let net = Net::new(origin);
        let port = net.origin.port();
        let (api, other) = (format!("https://api.test:{port}"), format!("https://other.test:{port}"));
        let policy = format!(
            "extends = [\"default\"]\n[[allow]]\neffect = [\"http/request\"]\nurl = [\"{api}/**\", \"{other}/**\"]\n\
             [[secret]]\nname = \"TOK\"\nfrom = {{ env = \"HOST_TOK\" }}\nto = [\"{api}\"]\n\
             place = [\"header:Authorization\"]\n"
        );
        let file = world.base().join("secret.toml");
        fs::write(&file, policy).expect("the world's folder is writable");
        fs::set_permissions(&file, std::os::unix::fs::PermissionsExt::from_mode(0o644)).expect("it is ours");
        world.write("carry.py", CARRY);
        let mut arguments = vec!["--policy".to_owned(), file.display().to_string(), "--record".to_owned()];
        arguments.extend(net.flags());
        arguments.extend(["--private", "other.test=127.0.0.1", "--", "python3", "carry.py"].map(str::to_owned));
        arguments.extend([format!("{api}/x"), format!("{other}/x")]);
        let run = world.run(&arguments).env("HOST_TOK", VALUE).env("SSL_CERT_FILE", &authority);
        let output = run.finish().expect_status(0);
        let told: Vec<String> = output.out().lines().map(str::to_owned).collect();
        let refused = ["header 403 True", "query 403 True", "body 403 True", "long 403 True", "host 403 True"];
        assert_eq!(told[0], "bound 200 True", "the echo holds the placeholder: {output}");
        assert_eq!(told[1..], refused, "{output}");
        let seen = net.origin.seen();
        let bound: Vec<_> = seen.iter().filter(|head| head.contains(VALUE)).collect();
        assert_eq!(bound.len(), 1, "{seen:?}");
        assert!(bound[0].contains(&format!("Authorization: Bearer {VALUE}")), "{bound:?}");
        assert!(!seen.iter().any(|head| head.contains("tollgate-secret-")), "{seen:?}");
        assert!(!holds(&world.base().join("state"), VALUE), "the value is in the state folder");
        assert!(!format!("{output}").contains(VALUE), "{output}");
    });
}

/// Whether any file below holds the text.
fn holds(folder: &Path, text: &str) -> bool {
    fs::read_dir(folder).expect("the state folder is there").flatten().any(|entry| {
        let path = entry.path();
        match entry.file_type() {
            Ok(kind) if kind.is_dir() => holds(&path, text),
            Ok(kind) if kind.is_file() => {
                fs::read(&path).is_ok_and(|bytes| bytes.windows(text.len()).any(|window| window == text.as_bytes()))
            }
            _ => false,
        }
    })
}

#[test]
fn a_recorded_run_is_replayed_byte_for_byte_without_its_servers() {
    every_identity(|world| {
        let net = Net::new(Origin::plain());
        world.write("get.py", GET);
        let api = net.url("http", "api.test");
        let mut arguments = net.flags();
        arguments.extend([
            "--allow".to_owned(),
            format!("{api}/**"),
            "--allow".to_owned(),
            api.clone(),
            "--record".to_owned(),
        ]);
        arguments.extend(["--", "python3", "get.py", &api, &format!("{api}/2"), &api].map(str::to_owned));
        let recorded = world.run(&arguments).finish().expect_status(0);
        let (seen, asked) = (net.origin.seen().len(), net.names.asked().len());
        assert_eq!(seen, 3, "{recorded}");
        let run = world.last_run()["id"].as_str().expect("a run has an id").to_owned();
        let replayed = world.run(["--replay", &run]).finish().expect_status(0);
        assert_eq!(replayed.out(), recorded.out(), "{replayed}");
        assert_eq!((net.origin.seen().len(), net.names.asked().len()), (seen, asked), "a replay reaches nobody");
    });
}

#[test]
fn a_recorded_connection_is_held_again_and_a_program_that_says_something_else_is_told_apart() {
    /// Sends what stands in a file, and prints what comes back.
    const TALK: &str = r#"
import socket, sys
s = socket.create_connection(("api.test", int(sys.argv[1])), 20)
for word in open("words", "rb"):
    s.sendall(word)
    print(s.recv(100).decode().strip(), flush=True)
s.shutdown(socket.SHUT_WR)
print(s.recv(100).decode().strip())
"#;
    every_identity(|world| {
        let net = Net::new(Origin::plain());
        let server = TcpListener::bind("127.0.0.1:0").expect("the loopback has a port");
        let port = server.local_addr().expect("it has an address").port();
        let talk = thread::spawn(move || {
            let (mut stream, _) = server.accept().expect("somebody comes");
            let mut piece = [0; 100];
            // No two answers are alike, and after this conversation there is no server.
            for number in 1.. {
                let length = stream.read(&mut piece).expect("the program talks");
                let last = length == 0;
                stream.write_all(format!("{number}: {length}\n").as_bytes()).expect("the program listens");
                if last {
                    return;
                }
            }
        });
        world.write("talk.py", TALK);
        world.write("words", "one\nthree\n");
        let mut arguments = net.flags();
        arguments.extend(["--allow".to_owned(), format!("api.test:{port}"), "--record".to_owned()]);
        arguments.extend(["--", "python3", "talk.py", &port.to_string()].map(str::to_owned));
        let recorded = world.run(&arguments).finish().expect_status(0);
        assert_eq!(recorded.out(), "1: 4\n2: 6\n3: 0\n", "{recorded}");
        talk.join().expect("the server is done");
        let run = world.last_run()["id"].as_str().expect("a run has an id").to_owned();
        let replayed = world.run(["--replay", &run]).finish().expect_status(0);
        assert_eq!(replayed.out(), recorded.out(), "{replayed}");

        world.write("words", "one\nother\n");
        let differs = world.run(["--replay", &run]).finish().expect_status(125);
        assert!(differs.err().contains("said something else from byte 4 on"), "{differs}");
        assert_eq!(differs.out().lines().next(), Some("1: 4"), "up to there it is as recorded: {differs}");
    });
}

#[test]
fn faults_arrive_as_a_server_or_a_network_would_show_them() {
    every_identity(|world| {
        let net = Net::new(Origin::plain());
        world.write("get.py", GET);
        let api = net.url("http", "api.test");
        for (rule, wanted) in
            [("http/request:rate-limit=429", "429 "), ("http/request:error=ECONNRESET", "error [Errno 104]")]
        {
            let mut arguments = net.flags();
            arguments.extend([
                "--allow".to_owned(),
                format!("{api}/**"),
                "--allow".to_owned(),
                api.clone(),
                "--faults".to_owned(),
                rule.to_owned(),
            ]);
            arguments.extend(["--", "python3", "get.py", &api].map(str::to_owned));
            let output = world.run(&arguments).finish().expect_status(0);
            assert!(output.out().starts_with(wanted), "{rule}: {output}");
        }
        assert!(net.origin.seen().is_empty());
    });
}

#[test]
fn a_published_port_answers_the_host_and_no_other_does() {
    /// Serves one port at each loopback, prints that it does, and ends after the third connection.
    const SERVE: &str = r#"
import socket, sys
servers = [socket.create_server(("127.0.0.1", 4001)), socket.create_server(("::1", 4002), family=socket.AF_INET6),
           socket.create_server(("127.0.0.1", 4003))]
print("ready", flush=True)
for server in (servers[0], servers[1], servers[0]):
    stream, peer = server.accept()
    stream.sendall(stream.recv(100).upper())
    stream.close()
"#;
    fn free() -> u16 {
        let listener = TcpListener::bind("127.0.0.1:0").expect("the loopback has a port");
        listener.local_addr().expect("it has an address").port()
    }
    fn ask(port: u16) -> std::io::Result<String> {
        let mut stream = TcpStream::connect(("127.0.0.1", port))?;
        stream.write_all(b"hello")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer)
    }
    /// Waits until the newest run has printed this.
    fn printed(world: &World, text: &str) {
        let until = std::time::Instant::now() + std::time::Duration::from_secs(30);
        while std::time::Instant::now() < until {
            let run = world.runs().last().and_then(|run| run["id"].as_str().map(str::to_owned));
            if run.is_some_and(|run| world.tollgate(["logs", &run]).finish().out().contains(text)) {
                return;
            }
            thread::sleep(std::time::Duration::from_millis(20));
        }
        panic!("the run did not print {text:?}");
    }
    every_identity(|world| {
        world.write("serve.py", SERVE);
        let (one, two, three) = (free(), free(), free());
        let flags = [format!("{one}:4001"), format!("{two}:4002"), format!("{three}:9")];
        let mut arguments: Vec<String> = flags.iter().flat_map(|flag| ["--publish".to_owned(), flag.clone()]).collect();
        arguments.extend(["--", "python3", "serve.py"].map(str::to_owned));
        let running = world.run(&arguments).start();
        printed(world, "ready");
        assert!(TcpStream::connect(("127.0.0.1", 4003)).is_err(), "only what was asked for is published");
        assert_eq!(ask(one).expect("it is published"), "HELLO");
        assert_eq!(ask(two).expect("so is one at the other loopback"), "HELLO");
        assert!(ask(three).is_err(), "nobody listens there");
        assert_eq!(ask(one).expect("again"), "HELLO");
        running.wait().expect_status(0);
        let receipts = world.receipts(&["--kind", "net/accept"]);
        let mut seen: Vec<(String, String)> = receipts
            .iter()
            .map(|one| {
                let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
                (text(&one["resource"]["to"]), text(&one["decision"]))
            })
            .collect();
        seen.sort();
        let mut wanted = [(one, "allowed"), (one, "allowed"), (two, "allowed"), (three, "failed")]
            .map(|(port, decision)| (format!("127.0.0.1:{port}"), decision.to_owned()));
        wanted.sort();
        assert_eq!(seen, wanted, "{receipts:?}");

        let taken = TcpListener::bind("127.0.0.1:0").expect("the loopback has a port");
        let port = taken.local_addr().expect("it has an address").port().to_string();
        let refused = world.run(["--publish", &port, "--", "touch", "ran"]).finish().expect_status(125);
        assert!(
            refused.err().contains(&format!("127.0.0.1:{port}")) && !world.workspace.join("ran").exists(),
            "{refused}"
        );
        world.write("deny.toml", "extends = [\"default\"]\n[[deny]]\neffect = [\"net/accept\"]\n");
        world.write("one.py", "import socket\ns = socket.create_server((\"127.0.0.1\", 4001))\ns.settimeout(3)\nprint(\"up\", flush=True)\ntry:\n    s.accept()\n    print(\"reached\")\nexcept TimeoutError:\n    print(\"alone\")\n");
        let one = free();
        let denied = world
            .run(["--policy", "./deny.toml", "--publish", &format!("{one}:4001"), "--", "python3", "one.py"])
            .start();
        printed(world, "up");
        assert!(ask(one).is_err(), "a rule that denies holds");
        assert_eq!(denied.wait().expect_status(0).out(), "up\nalone\n");
    });
}

#[test]
fn a_granted_port_of_the_host_is_reached_and_no_other() {
    const LOCAL: &str = r#"
import sys, urllib.request
for port in sys.argv[1:]:
    for host in ("127.0.0.1", "[::1]", "localhost"):
        try:
            print(host, urllib.request.urlopen(f"http://{host}:{port}/", timeout=20).status)
        except OSError as error:
            print(host, "refused")
"#;
    every_identity(|world| {
        let (granted, other) = (Origin::plain(), Origin::plain());
        world.write("local.py", LOCAL);
        let ports = [granted.port().to_string(), other.port().to_string()];
        let output = world.run(["--host-port", &ports[0], "--", "python3", "local.py", &ports[0], &ports[1]]).finish();
        let wanted = "127.0.0.1 200\n[::1] 200\nlocalhost 200\n127.0.0.1 refused\n[::1] refused\nlocalhost refused\n";
        assert_eq!(output.out(), wanted, "{output}");
        assert!(other.seen().is_empty());
    });
}
