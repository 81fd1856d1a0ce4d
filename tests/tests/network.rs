//! A jail's network from the inside: what reaches the supervisor's two sockets, what stays in the jail, and that the
//! program can change none of it.

use nix::{
    sys::socket::{getsockopt, sockopt},
    unistd::geteuid,
};
use serde_json::Value;
use std::{
    collections::{BTreeMap, BTreeSet},
    env, fs,
    io::{Read, Write},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream},
    os::{
        fd::{AsFd, OwnedFd},
        unix::{fs::PermissionsExt, net::UnixListener, process::CommandExt},
    },
    path::{Path, PathBuf},
    process::Command,
    thread,
};
use tollgate::{
    effect::RunId,
    jail::{
        certificates,
        launch::{self, NetworkSockets},
        profile,
        seccomp::{self, WatchLevel},
        spec::{self, Caller, Inputs, Network, Privilege, Store},
    },
    policy::search,
};
use tollgate_shim::protocol::{Denied, Enforcement, FromShim, Launcher, Layer, Plan, ToShim, Way};
use tollgate_tests::{
    switches,
    world::{binaries, launchers, on_path, ORDINARY_UID},
};

/// What the program does, each attempt one line of JSON: its name and what came of it.
const PROGRAM: &str = include_str!("../probes/network.py");
/// A certificate of an authority whose key nobody has.
const AUTHORITY: &[u8] = include_bytes!("../probes/authority.pem");
/// Asks each of the clients that are here whether it trusts the authority, once with the run's variables and once
/// without any: those are for clients that bring a list of their own.
const TRUST: &str = r#"
set -u
say() { printf '["%s", "%s"]\n' "$1" "$2"; }
for env in "" "env -i PATH=$PATH"; do
    $env openssl verify /run/tollgate/authority.pem >&2 && say "openssl $env" trusts
    $env python3 -c 'import ssl
names = [dict(part[0] for part in ca["subject"]).get("commonName") for ca in ssl.create_default_context().get_ca_certs()]
assert "Tollgate test authority" in names and len(names) > 1' && say "python $env" trusts
done
for name in SSL_CERT_FILE REQUESTS_CA_BUNDLE CURL_CA_BUNDLE GIT_SSL_CAINFO CARGO_HTTP_CAINFO PIP_CERT AWS_CA_BUNDLE \
    NIX_SSL_CERT_FILE NODE_EXTRA_CA_CERTS DENO_CERT; do
    eval "file=\$$name"
    grep -q "$(sed -n 2p /run/tollgate/authority.pem)" "$file" && say "$name" trusts
done
for file in /etc/ssl/certs/ca-certificates.crt /etc/ssl/cert.pem /etc/pki/tls/certs/ca-bundle.crt; do
    grep -q "$(sed -n 2p /run/tollgate/authority.pem)" "$file" && say "$file" trusts
done
if command -v keytool >/dev/null; then
    keytool -printcert -file /run/tollgate/authority.pem | sed -n 's/.*SHA256: //p' | head -n 1 >/tmp/print
    keytool -list -cacerts -storepass changeit 2>/dev/null | tr -d '\n' | grep -q "$(cat /tmp/print)" && say java trusts
fi
say proxy "${https_proxy-}${HTTP_PROXY-}"
test ! -w /etc/ssl/certs/ca-certificates.crt && say bundle read-only
"#;
/// Says that this process is the second of a test, as an ordinary user.
const ORDINARY: &str = "TOLLGATE_TEST_AS_ORDINARY";

/// What came of one jail.
struct Seen {
    way: Way,
    /// Where the connections that arrived were going, in their order.
    taken: Vec<SocketAddr>,
    /// The name lookups that arrived.
    asked: Vec<Vec<u8>>,
    denied: Vec<Denied>,
    /// The program's own account.
    told: BTreeMap<String, Value>,
}

impl Seen {
    fn told(&self, name: &str) -> &str {
        self.told
            .get(name)
            .and_then(Value::as_str)
            .unwrap_or_else(|| panic!("nothing was told of {name}: {:#?}", self.told))
    }
}

/// Runs the test as whoever runs the suite, and under root as an ordinary user too.
fn as_everybody(name: &str, test: impl Fn()) {
    test();
    if !geteuid().is_root() || env::var_os(ORDINARY).is_some() {
        return;
    }
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).expect("our own folder");
    let copy = folder.path().join("test");
    fs::copy(env::current_exe().expect("/proc/self/exe is readable"), &copy).expect("a program can be copied");
    let output = Command::new(&copy)
        .args(["--exact", name, "--nocapture"])
        .env(ORDINARY, "1")
        .env("TOLLGATE_BIN", binaries().join("tollgate"))
        .uid(ORDINARY_UID)
        .gid(ORDINARY_UID)
        .current_dir("/")
        .output()
        .expect("a copy of this program starts");
    let said = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && said.contains("1 passed"), "as an ordinary user:\n{said}");
}

fn inputs(base: &Path, launcher: Launcher) -> Inputs {
    let list = search::seccomp_list("default").expect("built in");
    let compiled = seccomp::compile(list, WatchLevel::Everything).expect("the built-in list compiles");
    let (run_dir, workspace) = (base.join("run"), base.join("w"));
    for folder in [&workspace, &run_dir.join("door")] {
        fs::create_dir_all(folder).expect("a folder can be made");
    }
    let door = run_dir.join("door/broker.sock");
    drop(UnixListener::bind(&door).expect("a socket can be made"));
    fs::set_permissions(&door, fs::Permissions::from_mode(0o666)).expect("our own socket");
    fs::write(workspace.join("probe.py"), PROGRAM).expect("a file can be made");
    let (uid, gid) = (geteuid().as_raw(), nix::unistd::getegid().as_raw());
    let privilege = if uid == 0 { Privilege::Root } else { Privilege::Ordinary };
    Inputs {
        run: RunId("networktest".to_owned()),
        profile: profile::text("default").expect("built in"),
        views: Vec::new(),
        workspace: workspace.clone(),
        store: Store::ReadOnly,
        hidden: Vec::new(),
        directory: workspace,
        command: ["python3", "probe.py"].map(Into::into).to_vec(),
        environment: Vec::new(),
        path: "/usr/bin:/bin".into(),
        run_dir,
        state_dir: base.join("state"),
        shim: binaries().join("tollgate-shim"),
        caller: Caller { uid, gid, name: "tester".to_owned(), privilege },
        rlimits: Vec::new(),
        terminal: None,
        filters: compiled.filters,
        observed: compiled.observed,
        enforcement: Enforcement::Strict,
        launcher,
        without: Vec::new(),
        network: Some(Network {
            host_ports: vec![5432],
            ports: vec![80, 443, 8080],
            authority_pem: AUTHORITY.to_vec(),
            java_truststore: certificates::java_truststore(AUTHORITY),
        }),
    }
}

/// Builds a jail, lets the program do its worst, and answers what arrives.
fn run(inputs: Inputs) -> Seen {
    let file = inputs.shim.clone();
    let plan = spec::plan(inputs).expect("a plan");
    let shim = launch::spawn(&file).expect("the shim starts");
    let (output, written) = nix::unistd::pipe().expect("a pipe");
    let nowhere: OwnedFd = fs::File::open("/dev/null").expect("it is there").into();
    let said: OwnedFd = fs::File::create(base_of(&plan).join("stderr")).expect("a file can be made").into();
    shim.begin(&plan, [nowhere.as_fd(), written.as_fd(), said.as_fd()]).expect("the shim listens");
    drop(written);
    let account = thread::spawn(move || {
        let mut text = String::new();
        fs::File::from(output).read_to_string(&mut text).expect("text");
        text
    });
    let (mut sockets, mut denied, mut threads) = (None, Vec::new(), None);
    loop {
        match shim.hear().expect("the shim speaks") {
            Some((FromShim::Network { way, told }, attached)) => {
                assert_eq!(told, way == Way::Redirect);
                sockets = Some(NetworkSockets::adopt(way, told, attached).expect("as promised"));
            }
            Some((FromShim::Built { .. }, _)) => {
                let sockets = sockets.take().expect("the network stands before the view");
                threads = Some((sockets.way, serve(sockets)));
                shim.tell(&ToShim::Execute).expect("the shim listens");
            }
            Some((FromShim::Denied(one), _)) => denied.push(one),
            Some((FromShim::StepFailed(failed), _)) => panic!("{failed}: {}", failed.remedy),
            Some((FromShim::Exited { code, signal }, _)) => assert_eq!((code, signal), (Some(0), None)),
            Some(_) => {}
            None => break,
        }
    }
    let account = account.join().expect("read");
    let said = fs::read_to_string(base_of(&plan).join("stderr")).expect("text");
    eprintln!("{said}");
    let (way, (taken, asked)) = threads.expect("the jail was built");
    let told = account
        .lines()
        .map(|line| serde_json::from_str::<(String, Value)>(line).unwrap_or_else(|_| panic!("not JSON:\n{account}")))
        .collect();
    Seen { way, taken: taken.take(), asked: asked.take(), denied, told }
}

/// The folder that everything of a test is in.
fn base_of(plan: &Plan) -> PathBuf {
    plan.workspace.to_path().parent().expect("below the base").to_owned()
}

/// What threads have gathered so far.
struct Gathered<T>(std::sync::Arc<std::sync::Mutex<Vec<T>>>);

impl<T> Gathered<T> {
    fn new() -> (Gathered<T>, impl Fn(T) + Clone) {
        let list = std::sync::Arc::new(std::sync::Mutex::new(Vec::new()));
        let to = list.clone();
        (Gathered(list), move |one| to.lock().expect("no panic").push(one))
    }

    fn take(&self) -> Vec<T> {
        std::mem::take(&mut self.0.lock().expect("no panic"))
    }
}

/// Answers each connection with where it was going, and each lookup with itself.
fn serve(sockets: NetworkSockets) -> (Gathered<SocketAddr>, Gathered<Vec<u8>>) {
    let (taken, take) = Gathered::new();
    let (asked, ask) = Gathered::new();
    for listener in sockets.listeners {
        let (way, take) = (sockets.way, take.clone());
        thread::spawn(move || {
            for stream in listener.incoming() {
                let Ok(mut stream) = stream else { return };
                let to = destination(&stream, way);
                take(to);
                let _ = stream.write_all(to.to_string().as_bytes());
            }
        });
    }
    let names = sockets.names;
    thread::spawn(move || {
        let mut buffer = [0; 512];
        while let Ok((length, from)) = names.recv_from(&mut buffer) {
            ask(buffer[..length].to_vec());
            let _ = names.send_to(&buffer[..length], from);
        }
    });
    (taken, asked)
}

/// Where a connection was going before it was redirected.
fn destination(stream: &TcpStream, way: Way) -> SocketAddr {
    let local = stream.local_addr().expect("a connection has ends");
    let mapped = match local.ip() {
        IpAddr::V6(address) => address.to_ipv4_mapped(),
        IpAddr::V4(address) => Some(address),
    };
    match (way, mapped) {
        (Way::Ports, Some(address)) => SocketAddr::new(address.into(), local.port()),
        (Way::Ports, None) => local,
        (Way::Redirect, Some(_)) => {
            let found = getsockopt(stream, sockopt::OriginalDst).expect("SO_ORIGINAL_DST");
            let address = Ipv4Addr::from(u32::from_be(found.sin_addr.s_addr));
            SocketAddr::new(address.into(), u16::from_be(found.sin_port))
        }
        (Way::Redirect, None) => {
            let found = getsockopt(stream, sockopt::Ip6tOriginalDst).expect("IP6T_SO_ORIGINAL_DST");
            SocketAddr::new(Ipv6Addr::from(found.sin6_addr.s6_addr).into(), u16::from_be(found.sin6_port))
        }
    }
}

/// A folder that every user can reach.
fn base() -> tempfile::TempDir {
    let base = tempfile::Builder::new().prefix("tgn-").tempdir().expect("a temporary folder can be made");
    fs::set_permissions(base.path(), fs::Permissions::from_mode(0o755)).expect("our own folder");
    base
}

/// Every launcher that is here.
fn ways() -> Vec<Launcher> {
    let bwrap = || Launcher::Bwrap { program: which("bwrap").into() };
    let found = launchers().into_iter();
    found
        .map(|launcher| match launcher {
            tollgate_tests::world::Launcher::Native => Launcher::Native,
            tollgate_tests::world::Launcher::Bwrap => bwrap(),
        })
        .collect()
}

fn which(program: &str) -> PathBuf {
    assert!(on_path(program));
    env::split_paths(tollgate_tests::world::PATH)
        .map(|at| at.join(program))
        .find(|path| path.exists())
        .expect("on PATH")
}

fn addresses(texts: &[&str]) -> Vec<SocketAddr> {
    texts.iter().map(|text| text.parse().expect("an address")).collect()
}

#[test]
fn every_connection_and_lookup_reaches_the_supervisor_and_nothing_else_leaves() {
    as_everybody("every_connection_and_lookup_reaches_the_supervisor_and_nothing_else_leaves", || {
        for launcher in ways() {
            let base = base();
            let seen = run(inputs(base.path(), launcher));
            assert_eq!(seen.way, Way::Redirect);
            let outside = [
                "93.184.216.34:8080",
                "[2001:db8::1]:443",
                "198.18.0.7:9999",
                "8.8.8.8:53",
                "10.1.2.3:22",
                "169.254.169.254:80",
                "127.0.0.1:5432",
                "[::1]:5432",
            ];
            for to in outside {
                assert_eq!(seen.told(&format!("tcp {to}")), to);
            }
            assert_eq!(seen.taken, addresses(&outside));
            own_servers_work(&seen);
            assert_eq!(seen.told("dns resolv.conf"), "answered by 198.18.0.1");
            assert_eq!(seen.told("dns 8.8.8.8"), "answered by 8.8.8.8");
            assert_eq!(seen.asked, [b"198.18.0.1".to_vec(), b"8.8.8.8".to_vec()]);
            // Told at once, and told to somebody, however it was sent.
            let dropped = ["192.0.2.1:443", "192.0.2.2:443", "192.0.2.3:443", "[2001:db8::3]:443"];
            for (name, to) in ["sendto", "sendmsg", "connected send", "sendto6"].iter().zip(dropped) {
                assert_eq!(seen.told(&format!("udp {name}")), "EPERM", "{name}");
                let told = seen.denied.iter().find(|denied| denied.object.to_os() == *to);
                assert_eq!(told.map(|denied| denied.errno), Some(libc::EPERM), "{to}: {:#?}", seen.denied);
            }
            // To connect a socket for datagrams is how programs learn their own address, and sends nothing.
            assert_eq!(seen.told("udp own address"), "127.0.0.1");
            assert_eq!(
                seen.denied.iter().filter(|denied| denied.errno == libc::ENETUNREACH).count(),
                0,
                "{:#?}",
                seen.denied
            );
            nothing_can_be_changed(&seen);
        }
    });
}

/// Sends to as many places as there are ports, without a pause.
const FLOOD: &str = r#"
import socket
sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for port in range(1, 20001):
    try: sender.sendto(b"x", ("192.0.2.1", port))
    except PermissionError: pass
"#;

#[test]
fn a_flood_of_datagrams_hides_none_without_saying_so() {
    let base = base();
    let command = ["python3", "-c", FLOOD].map(Into::into).to_vec();
    let seen = run(Inputs { command, ..inputs(base.path(), Launcher::Native) });
    let mut told: BTreeSet<String> =
        seen.denied.iter().map(|denied| denied.object.to_os().to_string_lossy().into_owned()).collect();
    let lost = told.remove("udp");
    let told = told.iter().filter(|object| object.starts_with("192.0.2.1:")).count();
    assert!(told > 100, "{told}");
    assert!(lost || told >= 20_000, "{told} of 20000 told, and not that some were lost");
}

#[test]
fn the_runs_own_authority_is_trusted_wherever_clients_look() {
    for launcher in ways() {
        let base = base();
        let environment = [("https_proxy", "http://127.0.0.1:3128"), ("HTTP_PROXY", "http://p"), ("PIP_CERT", "/mine")];
        let environment = environment.map(|(name, value)| (name.into(), value.into())).to_vec();
        let command = ["sh", "-c", TRUST].map(Into::into).to_vec();
        let seen = run(Inputs { environment, command, ..inputs(base.path(), launcher) });
        let clean = format!("env -i PATH={}", seen_path(&seen));
        let mut trusting: Vec<String> = ["openssl", "python"].map(|client| format!("{client} ")).to_vec();
        trusting.extend(["openssl", "python"].map(|client| format!("{client} {clean}")));
        let variables = certificates::variables().into_iter().map(|(name, _)| name.into_string().expect("ASCII"));
        trusting.extend(variables);
        let files = ["/etc/ssl/certs/ca-certificates.crt", "/etc/ssl/cert.pem", "/etc/pki/tls/certs/ca-bundle.crt"];
        trusting.extend(files.map(str::to_owned));
        trusting.extend(on_path("keytool").then(|| "java".to_owned()));
        for client in trusting {
            assert_eq!(seen.told(&client), "trusts", "{client}");
        }
        assert_eq!(seen.told("proxy"), "");
        assert_eq!(seen.told("bundle"), "read-only");
    }
}

/// The PATH that the program had.
fn seen_path(seen: &Seen) -> String {
    let name = seen.told.keys().find_map(|name| name.strip_prefix("openssl env -i PATH="));
    name.unwrap_or_else(|| panic!("openssl trusts nothing without variables: {:#?}", seen.told)).to_owned()
}

#[test]
fn without_nf_tables_the_named_ports_are_taken_and_others_are_refused() {
    let base = base();
    let shim = switches::programs().join("tollgate-shim");
    let seen = run(Inputs { shim, without: vec![Layer::Redirect], ..inputs(base.path(), Launcher::Native) });
    assert_eq!(seen.way, Way::Ports);
    let taken = ["93.184.216.34:8080", "[2001:db8::1]:443", "169.254.169.254:80", "127.0.0.1:5432", "[::1]:5432"];
    for to in taken {
        assert_eq!(seen.told(&format!("tcp {to}")), to);
    }
    assert_eq!(seen.taken, addresses(&taken));
    for to in ["198.18.0.7:9999", "8.8.8.8:53", "10.1.2.3:22"] {
        assert_eq!(seen.told(&format!("tcp {to}")), "ECONNREFUSED");
        let told = seen.denied.iter().find(|denied| denied.object.to_os() == to);
        assert_eq!(told.map(|denied| denied.errno), Some(libc::ECONNREFUSED), "{to}: {:#?}", seen.denied);
    }
    own_servers_work(&seen);
    assert_eq!(seen.told("dns resolv.conf"), "answered by 198.18.0.1");
    nothing_can_be_changed(&seen);
}

/// The program's own servers, at each of the names that the loopback has.
fn own_servers_work(seen: &Seen) {
    for at in
        ["127.0.0.1", "127.0.0.2", "::1", "::ffff:127.0.0.1", "networktest", "localhost", "0.0.0.0", "udp 127.0.0.1"]
    {
        assert_eq!(seen.told(&format!("own {at}")), "own", "{at}");
    }
    for nobody in ["own nobody", "the listener", "the listener6"] {
        assert_eq!(seen.told(nobody), "ECONNREFUSED", "{nobody}");
    }
}

/// Neither the routes nor the table, and no other sort of socket.
fn nothing_can_be_changed(seen: &Seen) {
    let refused = [
        ("netlink add route", "EPERM"),
        ("netlink delete route", "EPERM"),
        ("netlink loopback down", "EPERM"),
        ("netlink netfilter", "EAFNOSUPPORT"),
        ("raw", "EPERM"),
        ("raw6", "EPERM"),
        ("packet", "EAFNOSUPPORT"),
        ("vsock", "EAFNOSUPPORT"),
        ("sctp", "EPROTONOSUPPORT"),
        ("ping", "EACCES"),
        ("listener's port", "EACCES"),
        ("name server's port", "EACCES"),
        ("setsockopt mark", "EPERM"),
        ("transparent", "EPERM"),
        ("iptables", "EPERM"),
    ];
    for (name, errno) in refused {
        assert_eq!(seen.told(name), errno, "{name}");
    }
}
