"""The servers that scripts/clients and scripts/network run against, on loopback only. Standard library only.

`origin.py FOLDER [PORTS]` reads FOLDER/certificate.pem and key.pem, serves FOLDER/www, and writes what it listens on
to FOLDER/ports.json; PORTS is such an object, to have the same ones again. What it ever sees is in FOLDER/seen.jsonl,
one JSON object a line: each connection, each request as it was understood, and each name that was asked. What is not
there did not arrive.

It reads HTTP itself, and leniently: a request that the door let through in a doubtful shape is to be seen here, not
refused by a library.
"""

import base64
import gzip
import hashlib
import html
import json
import os
import pathlib
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
import urllib.parse
import zlib

FOLDER = pathlib.Path(sys.argv[1])
WWW = FOLDER / "www"
LOOPBACK = "127.0.0.1"
# RFC 6455, 1.3.
WEBSOCKET_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
LOG = open(FOLDER / "seen.jsonl", "a", buffering=1, encoding="utf-8")
LOCK = threading.Lock()
PATTERN = bytes(range(256)) * 256


def seen(**what):
    with LOCK:
        LOG.write(json.dumps(what) + "\n")


class Ended(Exception):
    """The peer closed its side."""


class Connection:
    """A buffered reader over a socket that says everything it reads."""

    def __init__(self, sock, scheme):
        self.sock = sock
        self.scheme = scheme
        self.buffer = b""
        self.name = None

    def fill(self):
        data = self.sock.recv(1 << 16)
        if not data:
            raise Ended
        self.buffer += data

    def line(self):
        while b"\n" not in self.buffer:
            if len(self.buffer) > 1 << 20:
                raise Ended
            self.fill()
        line, self.buffer = self.buffer.split(b"\n", 1)
        return line.rstrip(b"\r")

    def pieces(self, count):
        while count:
            if not self.buffer:
                self.fill()
            piece, self.buffer = self.buffer[:count], self.buffer[count:]
            count -= len(piece)
            yield piece

    def exactly(self, count):
        return b"".join(self.pieces(count))

    def send(self, data):
        self.sock.sendall(data)


class Request:
    def __init__(self, connection):
        self.connection = connection
        words = connection.line().decode("latin-1")
        while not words:
            words = connection.line().decode("latin-1")
        self.line = words
        parts = words.split(" ")
        self.method = parts[0]
        self.target = parts[1] if len(parts) > 1 else ""
        self.headers = []
        while line := connection.line():
            name, _, value = line.decode("latin-1").partition(":")
            self.headers.append([name, value.strip()])
        self.url = urllib.parse.urlsplit(self.target if self.target.startswith("/") else "/")
        self.query = dict(urllib.parse.parse_qsl(self.url.query))
        self.trailers = []

    def header(self, name):
        for its_name, value in self.headers:
            if its_name.strip().lower() == name:
                return value
        return None

    def body(self):
        """The body, piece by piece."""
        if "100-continue" in (self.header("expect") or "").lower():
            self.connection.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        if "chunked" in (self.header("transfer-encoding") or "").lower():
            while size := int(self.connection.line().split(b";")[0], 16):
                yield from self.connection.pieces(size)
                self.connection.line()
            while line := self.connection.line():
                self.trailers.append(line.decode("latin-1"))
        else:
            yield from self.connection.pieces(int(self.header("content-length") or 0))


def answer(connection, status, body=b"", headers=(), kind="text/plain"):
    if isinstance(body, str):
        body = body.encode()
    head = [f"HTTP/1.1 {status}", f"Content-Type: {kind}", f"Content-Length: {len(body)}"]
    head += [f"{name}: {value}" for name, value in headers]
    connection.send("\r\n".join(head).encode() + b"\r\n\r\n" + body)


def chunk(data):
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def reflect(connection, request, how):
    """Gives back the value of Authorization in a way that is asked for."""
    value = (request.header("authorization") or "").removeprefix("Bearer ")
    data = f"before {value} after\n".encode()
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n"
    if how == "header":
        answer(connection, "200 OK", "see above\n", [("X-Value", value), ("Set-Cookie", f"a={value}; Path=/")])
    elif how == "reason":
        answer(connection, f"200 {value}", "see above\n")
    elif how == "location":
        answer(connection, "302 Found", "", [("Location", f"/hello?value={urllib.parse.quote(value, safe='')}")])
    elif how == "hints":
        connection.send(f"HTTP/1.1 103 Early Hints\r\nLink: <{value}>\r\n\r\n".encode())
        answer(connection, "200 OK", "see above\n")
    elif how == "error":
        answer(connection, "500 Sorry", data)
    elif how == "pieces":
        connection.send(head + b"\r\n")
        for byte in data:
            connection.send(chunk(bytes([byte])))
            time.sleep(0.002)
        connection.send(b"0\r\n\r\n")
    elif how == "trailer":
        connection.send(head + f"Trailer: X-Value\r\n\r\n5\r\nbody\n\r\n0\r\nX-Value: {value}\r\n\r\n".encode())
    elif how in ("gzip", "deflate", "gzip, gzip", "unknown"):
        packed = {
            "gzip": gzip.compress,
            "deflate": zlib.compress,
            "unknown": bytes,
            "gzip, gzip": lambda data: gzip.compress(gzip.compress(data)),
        }[how](data * 3)
        answer(connection, "200 OK", packed, [("Content-Encoding", how)])
    elif how == "range":
        # As a server does that knows ranges: the program asks for the value in two halves.
        first, last = (int(number) for number in request.header("range").removeprefix("bytes=").split("-"))
        answer(connection, "206 Part", data[first : last + 1], [("Content-Range", f"bytes {first}-{last}/{len(data)}")])
    else:
        encoded = {
            "plain": value,
            "json": json.dumps({"value": value}),
            "percent": urllib.parse.quote(value, safe=""),
            "form": urllib.parse.urlencode({"value": value}),
            "hex": value.encode().hex(),
            "HEX": value.encode().hex().upper(),
            "base64": base64.b64encode(value.encode()).decode(),
            "base64 after one": base64.b64encode(b"a" + value.encode()).decode(),
            "base64 after two": base64.b64encode(b"ab" + value.encode()).decode(),
            "base64url": base64.urlsafe_b64encode(value.encode()).decode().rstrip("="),
            "html": html.escape(value),
            "unicode": "".join(f"\\u{ord(letter):04x}" for letter in value),
            "small json": json.dumps(value).replace("/", "\\/"),
        }[how]
        answer(connection, "200 OK", f"before {encoded} after\n")


def websocket(connection, request):
    key = (request.header("sec-websocket-key") or "").encode()
    accept = base64.b64encode(hashlib.sha1(key + WEBSOCKET_GUID).digest()).decode()
    connection.send(
        (
            "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Accept: {accept}\r\n\r\n"
        ).encode()
    )
    if "greet" in request.query:
        data = (request.header("authorization") or "").encode()
        connection.send(bytes([0x81, len(data)]) + data)
    while True:
        first, second = connection.exactly(2)
        size = second & 127
        if size == 126:
            size = struct.unpack(">H", connection.exactly(2))[0]
        elif size == 127:
            size = struct.unpack(">Q", connection.exactly(8))[0]
        mask = connection.exactly(4) if second & 128 else bytes(4)
        data = bytes(byte ^ mask[index % 4] for index, byte in enumerate(connection.exactly(size)))
        head = bytes([first, size]) if size < 126 else bytes([first, 126]) + struct.pack(">H", size)
        connection.send(head + data)
        if first & 15 == 8:
            raise Ended


def git(connection, request):
    """git-http-backend, as CGI."""
    body = b"".join(request.body())
    seen(git=request.target, method=request.method, size=len(body))
    environment = {
        "PATH": os.environ["PATH"],
        "GIT_PROJECT_ROOT": str(FOLDER / "git"),
        "GIT_HTTP_EXPORT_ALL": "1",
        "REQUEST_METHOD": request.method,
        "PATH_INFO": request.url.path.removeprefix("/git"),
        "QUERY_STRING": request.url.query,
        "CONTENT_TYPE": request.header("content-type") or "",
        "CONTENT_LENGTH": str(len(body)),
        "HTTP_CONTENT_ENCODING": request.header("content-encoding") or "",
        "GIT_PROTOCOL": request.header("git-protocol") or "",
        "REMOTE_USER": "nobody",
        "REMOTE_ADDR": LOOPBACK,
        "GIT_CONFIG_NOSYSTEM": "1",
        "HOME": str(FOLDER),
        "SAFE_DIRECTORY": "*",
        "GIT_CONFIG_COUNT": "2",
        "GIT_CONFIG_KEY_0": "safe.directory",
        "GIT_CONFIG_VALUE_0": "*",
        "GIT_CONFIG_KEY_1": "http.receivepack",
        "GIT_CONFIG_VALUE_1": "true",
    }
    done = subprocess.run(["git", "http-backend"], input=body, capture_output=True, env=environment)
    head, _, content = done.stdout.partition(b"\r\n\r\n")
    status, headers, kind = "200 OK", [], "text/plain"
    for line in head.decode().split("\r\n"):
        name, _, value = line.partition(": ")
        if name == "Status":
            status = value
        elif name == "Content-Type":
            kind = value
        elif name:
            headers.append((name, value))
    answer(connection, status, content, headers, kind)


def static(connection, request):
    path = urllib.parse.unquote(request.url.path).strip("/")
    for found in (WWW / path, WWW / path / "index.html", WWW / path / "index.json"):
        if found.is_file() and found.resolve().is_relative_to(WWW.resolve()):
            text = found.read_bytes().replace(b"@BASE@", f"{connection.scheme}://{request.header('host')}".encode())
            kind = {".html": "text/html", ".json": "application/json"}.get(found.suffix, "application/octet-stream")
            return answer(connection, "200 OK", text, (), kind)
    return answer(connection, "404 Not Found", "not here\n")


def serve(connection):
    while True:
        request = Request(connection)
        seen(request=request.line, scheme=connection.scheme, headers=request.headers, sni=connection.name)
        path = request.url.path
        if path == "/ws" and (request.header("upgrade") or "").lower() == "websocket":
            return websocket(connection, request)
        if path.startswith("/git/"):
            git(connection, request)
        elif path == "/early":
            # The answer before the body was read.
            answer(connection, "413 Too Large", "too large\n", [("Connection", "close")])
            connection.sock.shutdown(socket.SHUT_WR)
            for _ in range(1000):
                connection.fill()
                connection.buffer = b""
            return None
        else:
            digest, size = hashlib.sha256(), 0
            for piece in request.body():
                digest.update(piece)
                size += len(piece)
            respond(connection, request, path, digest.hexdigest(), size)
        if (request.header("connection") or "").lower() == "close":
            return None


def respond(connection, request, path, digest, size):
    said = "" if request.method == "HEAD" else "hello from the origin\n"
    if path == "/hello":
        answer(connection, "200 OK", said)
    elif path == "/echo":
        told = {
            "method": request.method,
            "target": request.target,
            "headers": request.headers,
            "size": size,
            "sha256": digest,
            "trailers": request.trailers,
            "scheme": connection.scheme,
        }
        answer(connection, "200 OK", json.dumps(told) + "\n", (), "application/json")
    elif path in ("/chunked", "/trailers"):
        head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTrailer: X-Sum\r\n\r\n"
        connection.send(head + b"".join(chunk(f"piece {number}\n".encode()) for number in range(5)))
        connection.send(b"0\r\nX-Sum: 5\r\n\r\n" if path == "/trailers" else b"0\r\n\r\n")
    elif path == "/events":
        connection.send(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        for number in range(4):
            connection.send(chunk(f"data: {number}\n\n".encode()))
            time.sleep(0.4)
        connection.send(b"0\r\n\r\n")
    elif path == "/big":
        left = int(request.query["size"])
        connection.send(f"HTTP/1.1 200 OK\r\nContent-Length: {left}\r\n\r\n".encode())
        while left:
            piece = PATTERN[:left]
            connection.send(piece)
            left -= len(piece)
    elif path == "/cut":
        connection.send(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nonly this")
        raise Ended
    elif path.startswith("/redirect"):
        answer(connection, "302 Found", "", [("Location", request.query["to"])])
    elif path == "/slow":
        time.sleep(float(request.query.get("seconds", "1")))
        answer(connection, "200 OK", said)
    elif path.startswith("/status/"):
        answer(connection, f"{path.removeprefix('/status/')} As Asked", said)
    elif path == "/reflect":
        reflect(connection, request, request.query["how"])
    elif path == "/bye":
        # A server may end a connection that it had said nothing of ending.
        answer(connection, "200 OK", said)
        raise Ended
    elif path == "/unannounced":
        connection.send(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\nup to the end")
        raise Ended
    elif path == "/old":
        connection.send(b"HTTP/1.0 200 OK\r\n\r\nold")
        raise Ended
    elif path == "/hints":
        connection.send(b"HTTP/1.1 103 Early Hints\r\nLink: </a>; rel=preload\r\n\r\n")
        answer(connection, "200 OK", said)
    elif path in ("/204", "/304"):
        connection.send(f'HTTP/1.1 {path[1:]} Nothing\r\nETag: "a"\r\n\r\n'.encode())
    elif path == "/cookies":
        answer(connection, "200 OK", said, [("Set-Cookie", "a=1"), ("Set-Cookie", "b=2"), ("X-Long", "x" * 30000)])
    elif path == "/packed":
        answer(connection, "200 OK", gzip.compress(b"packed " * 1000, mtime=0), [("Content-Encoding", "gzip")])
    elif path == "/nonsense":
        connection.send(b"SMTP ready\r\n\r\n")
        raise Ended
    elif path == "/split":
        connection.send(
            b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 50\r\n\r\nhelloHTTP/1.1 200 OK\r\n\r\n"
        )
        raise Ended
    elif path == "/graphql":
        answer(connection, "200 OK", '{"data":{"ok":true}}\n', (), "application/json")
    else:
        static(connection, request)


def http(sock, scheme, context=None):
    try:
        with sock:
            name = []
            if context:
                # The name that the door sent, which must be the one that it connected for.
                context = server_context(name)
                sock = context.wrap_socket(sock, server_side=True)
            connection = Connection(sock, scheme)
            connection.name = name[0] if name else None
            serve(connection)
    except (Ended, OSError, ValueError, KeyError) as error:
        seen(ended=scheme, why=repr(error))


def server_context(name):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(FOLDER / "certificate.pem", FOLDER / "key.pem")
    context.set_alpn_protocols(["http/1.1"])
    context.sni_callback = lambda _sock, asked, _context: name.append(asked)
    return context


def echo(sock, _scheme):
    """A server of lines that is no HTTP: what it gets it sends back."""
    received = 0
    with sock:
        try:
            while data := sock.recv(1 << 16):
                received += len(data)
                sock.sendall(data)
        except OSError:
            pass
    seen(echo=received)


def listen(what, *rest, port=0):
    listener = socket.create_server((LOOPBACK, port), backlog=512)
    port = listener.getsockname()[1]

    def accept(listener):
        while True:
            sock, _ = listener.accept()
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            seen(connected=rest[0])
            threading.Thread(target=what, args=(sock, *rest), daemon=True).start()

    threading.Thread(target=accept, args=(listener,), daemon=True).start()
    return port


# Names that lead where no name may: the stub's answer for each.
TRAPS = {
    "loopback.trap.test": ["127.0.0.1"],
    "metadata.trap.test": ["169.254.169.254"],
    "private.trap.test": ["10.0.0.1"],
    "mapped.trap.test": ["::ffff:127.0.0.1"],
    "nat64.trap.test": ["64:ff9b::7f00:1"],
    "sixtofour.trap.test": ["2002:7f00:1::1"],
    "six.trap.test": ["::1"],
    "unspecified.trap.test": ["0.0.0.0"],
    "mixed.trap.test": ["127.0.0.1", "10.0.0.1"],
}


def resolver(port):
    """Answers every name below .test with 127.0.0.1 (A), the traps with theirs, and logs each."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.bind((LOOPBACK, port))

    def answer_all():
        while True:
            data, peer = sock.recvfrom(4096)
            labels, at = [], 12
            while at < len(data) and data[at]:
                labels.append(data[at + 1 : at + 1 + data[at]].decode("latin-1"))
                at += 1 + data[at]
            at += 1
            kind = struct.unpack(">H", data[at : at + 2])[0]
            name = ".".join(labels)
            seen(asked=name, kind=kind)
            folded = name.lower()
            addresses = TRAPS.get(folded, [LOOPBACK] if folded.endswith(".test") else [])
            records = []
            for address in addresses:
                family = socket.AF_INET6 if ":" in address else socket.AF_INET
                if kind == (28 if family == socket.AF_INET6 else 1):
                    packed = socket.inet_pton(family, address)
                    records.append(struct.pack(">HHHIH", 0xC00C, kind, 1, 1, len(packed)) + packed)
            code = 0 if addresses else 3
            head = data[:2] + struct.pack(">HHHHH", 0x8180 | code, 1, len(records), 0, 0)
            sock.sendto(head + data[12 : at + 4] + b"".join(records), peer)

    threading.Thread(target=answer_all, daemon=True).start()
    return sock.getsockname()[1]


def main():
    wish = json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}
    ports = {
        "http": listen(http, "http", port=wish.get("http", 0)),
        "https": listen(http, "https", True, port=wish.get("https", 0)),
        "echo": listen(echo, "echo", port=wish.get("echo", 0)),
        "other": listen(echo, "other", port=wish.get("other", 0)),
        "resolver": resolver(wish.get("resolver", 0)),
    }
    partial = FOLDER / "ports.partial"
    partial.write_text(json.dumps(ports))
    partial.rename(FOLDER / "ports.json")
    threading.Event().wait()


main()
