"""Ask Tollgate for effects, from a Python program inside a jail.

Needs Python 3.8 and nothing but its standard library::

    import tollgate

    text = tollgate.read("notes.txt")
    tollgate.write("out/result.bin", b"...")
    try:
        tollgate.read("/etc/shadow")
    except tollgate.Refused as refused:
        print(refused.kind, refused.resource, refused.handler, refused.hint)

Paths are ``str``, ``bytes`` or ``os.PathLike``, relative to the workspace or absolute. A refusal is a
``PermissionError`` and a failure an ``OSError`` of the fitting kind, so that code which knows nothing of Tollgate
handles both. Every call opens a connection of its own, so threads and forked processes may call at will.
"""

import contextlib
import errno as _errno
import http.client
import json
import os
import socket
import time
import urllib.parse

__all__ = [
    "Failed", "Malformed", "Refused", "budget", "cancel", "delete", "effect", "list", "meter", "move", "read",
    "self_", "why", "write",
]

_SOCKET = "/run/tollgate/broker.sock"
_PIECE = 8 * 1024 * 1024
_MAX_ANSWER = 64 * 1024 * 1024


class Refused(PermissionError):
    """A handler of the run's chain said no, and nothing happened.

    ``kind`` and ``resource`` say what was asked for, ``handler`` who refused it, ``reason`` why, and ``hint`` what
    to change. ``errno`` is ``EACCES``, or ``EDQUOT`` where a quota is used up.
    """

    def __init__(self, kind, resource, handler, reason, hint, errno=_errno.EACCES):
        super().__init__(errno, reason, resource)
        self.kind, self.resource, self.handler = kind, resource, handler
        self.reason, self.hint = reason, hint

    def __str__(self):
        hint = "; " + self.hint if self.hint else ""
        return "%s %s: refused by %s: %s%s" % (self.kind, self.resource, self.handler, self.reason, hint)


class Failed(OSError):
    """The effect was allowed, and the world failed; ``errno`` says how.

    Where the error number has an exception of its own, that is a base class too: a missing file raises a ``Failed``
    that is a ``FileNotFoundError``. ``type`` is ``failed``, ``in-doubt`` (it may or may not have happened), or what
    kept the door from answering.
    """

    type = kind = resource = handler = reason = hint = None


class Malformed(ValueError):
    """What was asked for is no effect: an unknown kind, an impossible path, a wrong field."""


def _failed(error):
    number = getattr(_errno, error.get("errno") or "EIO", _errno.EIO)
    # OSError picks the subclass of an error number only for itself, not for its subclasses.
    fitting = type(OSError(number, ""))
    made = Failed if fitting is OSError else type("Failed", (Failed, fitting), {"__module__": __name__})
    failed = made(number, error.get("reason"), error.get("resource"))
    for name in ("type", "kind", "resource", "handler", "reason", "hint"):
        setattr(failed, name, error.get(name))
    return failed


class _Connection(http.client.HTTPConnection):
    def __init__(self):
        super().__init__("localhost")

    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.connect(os.environ.get("TOLLGATE_SOCKET") or _SOCKET)


def _ask(method, target, body=None):
    """Ask one thing; the body of the answer as bytes."""
    connection = _Connection()
    try:
        # The door may say no without having read everything, and what it said is there to be read.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.request(method, target, body=body)
        response = connection.getresponse()
        told = response.read(_MAX_ANSWER + 1)
    except http.client.HTTPException as cause:
        raise _failed({"type": "broken", "reason": "the supervisor gave no answer: %r" % cause}) from cause
    finally:
        connection.close()
    if len(told) > _MAX_ANSWER:
        raise _failed({"type": "broken", "reason": "the supervisor's answer is too long"})
    if response.status == 200:
        return told
    try:
        error = json.loads(told.decode())["error"]
        problem = error["type"]
    except (ValueError, KeyError, TypeError) as cause:
        reason = "the supervisor's answer makes no sense: status %d" % response.status
        raise _failed({"type": "broken", "reason": reason}) from cause
    if problem == "refused":
        number = getattr(_errno, error.get("errno") or "EACCES", _errno.EACCES)
        raise Refused(error["kind"], error["resource"], error["handler"], error["reason"], error["hint"], number)
    if response.status == 400:
        raise Malformed("%s; %s" % (error["reason"], error["hint"]))
    raise _failed(error)


def _bytes(path):
    return os.fsencode(path)


def _escape(path):
    """A path as the API writes it: a backslash doubled, a byte that is not UTF-8 as ``\\xNN``."""
    text = _bytes(path).replace(b"\\", b"\\\\")
    return text.decode("utf-8", "backslashreplace")


def _file(path, **parameters):
    query = urllib.parse.urlencode({name: value for name, value in parameters.items() if value is not None})
    return "/v1/files/" + urllib.parse.quote(_bytes(path), safe="/") + ("?" + query if query else "")


def _mode(mode):
    return None if mode is None else "%o" % mode


def effect(kind, **fields):
    """Ask for any effect by its kind and fields; the answer as a ``dict`` with ``decision`` and ``value``.

    Paths must be written as the API writes them; the functions below do that by themselves.
    """
    body = dict(fields, kind=kind)
    return json.loads(_ask("POST", "/v1/effects", json.dumps(body).encode()).decode())


def read(path, offset=0, limit=None):
    """The bytes of a file, from ``offset``, at most ``limit``. Longer files are read in pieces of 8 MiB."""
    pieces, left = [], limit
    while True:
        wanted = _PIECE if left is None else min(left, _PIECE)
        piece = _ask("GET", _file(path, offset=offset, limit=wanted))
        pieces.append(piece)
        offset += len(piece)
        left = None if left is None else left - len(piece)
        if len(piece) < wanted or left == 0:
            return b"".join(pieces)


def write(path, content, mode=None, expect=None):
    """Create or replace a file with ``content``: bytes, or a string, which is written as UTF-8.

    ``mode`` holds the permission bits, as in ``0o644``, the default. ``expect`` says what must be there for it to
    happen: ``"absent"``, ``"sha256:<hex>"`` or ``"unchanged:<nanoseconds>"``.
    """
    if isinstance(content, str):
        content = content.encode()
    _ask("PUT", _file(path, mode=_mode(mode), expect=expect), body=bytes(content))


def list(path=""):
    """The entries of a directory: a list of ``dict`` with at least ``name``."""
    return effect("fs/list", path=_escape(path))["value"]["entries"]


def delete(path, expect=None):
    """Delete a file, or a directory with all below it."""
    fields = {"path": _escape(path)}
    if expect is not None:
        fields["expect"] = expect
    effect("fs/delete", **fields)


def move(path, to):
    """Move a file or directory within the workspace."""
    effect("fs/move", path=_escape(path), to=_escape(to))


def why(kind, path=None, to=None, bytes=None, command=None, url=None, method=None, name=None):
    """Whether an effect would pass, without doing it: a ``dict`` with ``verdict`` (``allow``, ``ask`` or ``deny``),
    ``handler``, ``rule``, ``reason`` and ``hint``.

    Of ``http/request`` it takes ``method`` and ``url``, of ``net/connect`` ``to`` as ``HOST:PORT``, of ``net/resolve``
    ``name``."""
    query = [("kind", kind)]
    for key, value in (("path", path), ("to", to)):
        if value is not None:
            query.append((key, _escape(value)))
    if bytes is not None:
        query.append(("bytes", bytes))
    of_network = (("url", url), ("method", method), ("name", name))
    query.extend((key, value) for key, value in of_network if value is not None)
    query.extend(("command", word) for word in command or ())
    target = "/v1/why?" + urllib.parse.urlencode(query, quote_via=urllib.parse.quote)
    return json.loads(_ask("GET", target).decode())


def budget():
    """What is used and left: by the limit's name, a ``dict`` with ``limit``, ``used`` and ``left``."""
    return json.loads(_ask("GET", "/v1/budget").decode())


def self_():
    """What this run is, what is allowed, mounted and limited, and how to ask for more."""
    return json.loads(_ask("GET", "/v1/self").decode())


def cancel():
    """End this run."""
    effect("run/cancel")


@contextlib.contextmanager
def meter(label):
    """Write down the processor and wall time of a ``with`` block, as one receipt of kind ``eval/run``.

    The receipt is written also when the block raises. Processor time is this process's, without its children's.
    """
    cpu, wall = time.process_time(), time.monotonic()
    try:
        yield
    finally:
        cpu_us, wall_us = (int(1e6 * (now - then)) for now, then in
                           ((time.process_time(), cpu), (time.monotonic(), wall)))
        effect("eval/run", label=label, cpu_us=max(cpu_us, 0), wall_us=max(wall_us, 0))
