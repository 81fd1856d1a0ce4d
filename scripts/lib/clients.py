"""The clients of scripts/clients, which prepares what they need, and its table. Standard library only."""

import argparse
import dataclasses
import json
import os
import pathlib
import re
import shutil
import sys

import cases
from laboratory import GREETING, LIB, PYTHON, Laboratory, say

REFUSED = "denied.test"
# How a client may tell of a connection that was reset, in whatever words.
RESET = (
    r"reset|ECONNRESET|EOF|[Cc]onnection (was )?(aborted|closed|refused|broken)|disconnected|ended unexpectedly|"
    r"terminated|other side closed|error getting response|[Rr]ecv failure|closed the connection|socket hang up|"
    r"spurious network error|Empty reply|RemoteProtocolError|ReadError|fetch failed|not closed cleanly|[Ss]tream error|"
    r"closed connection without|Read error"
)
# How a client may tell of the status 429; a body that merely speaks of it is none.
LIMITED = r"(?m)^429\b|HTTP\S* 429|[Ee]rror:? 429|429 Client Error|E429|429 Too Many"


@dataclasses.dataclass
class Client:
    """One program, and how it is asked for something."""

    name: str
    # Address to command line; files of the workspace may be written first.
    command: object
    # What its output has when it got what it asked for.
    greeting: str = GREETING
    # "web" for http and https, "https" or "http" for one of both, "stream" for what is no HTTP.
    sort: str = "web"
    # Its way to the address: of the origin, of the repository, of a registry.
    path: str = "/hello"
    host: str = "api.test"
    # Which of the servers it asks by https, or as a stream.
    server: str = "https"
    # Requests of one use; None where the client decides.
    requests: object = 1
    # Whether it asks again after 429, so that one such answer is no failure of it.
    retries: bool = False
    # Why it cannot be tried here, if it cannot.
    missing: str = ""
    # Another command line, for what is to go wrong, where the first keeps the reason to itself.
    aloud: object = None
    # Whether it says the status alone of what went wrong, so that the run's summary has to say the rest.
    terse: bool = False
    # Whether what it says is encrypted with keys of each time, so that no replay can hold its end of the conversation.
    sealed: bool = False
    # Whether it shows the headers of what it got, or Retry-After at least.
    shows_headers: bool = False


def clients(laboratory):
    tools = laboratory.tools
    python = str(tools / "venv/bin/python")
    hello = str(tools / "hello.py")

    def library(name, with_python=python):
        return lambda url, _work: [with_python, "-B", hello, name, url]

    def pip(url, _work, *more):
        base, _, _ = url.partition("/simple")
        host = re.sub(r"^https?://|:\d+$", "", base)
        # pip itself takes an index without TLS only where it is told to trust it.
        trusted = ["--trusted-host", host] if url.startswith("http:") else []
        return [
            python,
            "-B",
            "-m",
            "pip",
            *more,
            "download",
            "--no-cache-dir",
            "--no-deps",
            *trusted,
            "--index-url",
            url,
            "greeting",
        ]

    def pip_aloud(url, work):
        # By itself it does not say why an index was of no use.
        return pip(url, work, "-vv")

    def uv(url, _work):
        # A cache on another file system than its target only costs it a warning.
        return [
            "sh",
            "-c",
            f"{tools}/venv/bin/uv -q pip install --no-cache --no-deps --python {python} --target t --index-url {url} "
            "greeting && PYTHONPATH=t " + python + " -m greeting",
        ]

    def npm(url, _work, more="--silent"):
        return [
            "sh",
            "-c",
            f"npm install {more} --no-audit --no-fund --no-update-notifier --registry {url} greeting "
            "&& node -e 'require(\"greeting\")'",
        ]

    def npm_aloud(url, work):
        # What it says when all went well has the time that it took.
        return npm(url, work, "")

    def cargo(url, work):
        (work / "src").mkdir()
        (work / "src/lib.rs").write_text("")
        (work / "Cargo.toml").write_text(
            '[package]\nname = "a"\nversion = "0.1.0"\nedition = "2021"\n'
            '[dependencies]\ngreeting = { version = "1", registry = "here" }\n'
        )
        (work / ".cargo").mkdir()
        (work / ".cargo/config.toml").write_text(f'[registries.here]\nindex = "sparse+{url}"\n')
        return [
            "sh",
            "-c",
            f"PATH={laboratory.sysroot()}/bin:$PATH; "
            'cargo fetch && grep -rh "hello from" "$HOME/.cargo/registry/src"',
        ]

    def git(url, _work):
        return ["sh", "-c", f"git clone -q {url} copy && cat copy/greeting"]

    def git_ssh(url, work):
        for name in ("user", "user.pub"):
            shutil.copy(laboratory.scratch / "ssh" / name, work / name)
        (work / "user").chmod(0o600)
        host_key = (laboratory.scratch / "ssh/host.pub").read_text().split()[:2]
        (work / "known").write_text(f"[git.test]:{laboratory.ports['ssh']} {' '.join(host_key)}\n")
        account = "root" if os.getuid() == 0 else os.environ.get("USER", "tester")
        path = laboratory.origin / "git/greeting.git"
        port = url.rpartition(":")[2]
        host = url.partition(":")[0]
        return [
            "sh",
            "-c",
            f"export GIT_SSH_COMMAND='ssh -F none -i {work}/user -o UserKnownHostsFile={work}/known'; "
            f"git clone -q ssh://{account}@{host}:{port}{path} copy && cat copy/greeting",
        ]

    def psql(url, _work):
        host, port = url.split(":")
        return ["psql", "-h", host, "-p", port, "-U", "tester", "-d", "postgres", "-Atc", f"select '{GREETING}'"]

    def lines(url, _work):
        host, port = url.split(":")
        return [
            PYTHON,
            "-c",
            "import socket, sys\n"
            "s = socket.create_connection((sys.argv[1], int(sys.argv[2])), 5)\n"
            f"s.sendall(b'{GREETING}\\n'); print(s.makefile().readline())",
            host,
            port,
        ]

    sysroot = laboratory.sysroot()
    have_go = (tools / "hello-go").exists()
    all_of_them = [
        Client("curl", lambda url, _: ["curl", "-sS", "-i", "--fail-with-body", url], shows_headers=True),
        Client(
            "curl, h2 origin",
            lambda url, _: ["curl", "-sS", "-i", "--fail-with-body", "--http2", url],
            sort="https",
            server="http2",
            shows_headers=True,
        ),
        Client(
            "wget",
            lambda url, _: ["wget", "-q", "-S", "--tries=1", "--content-on-error", "-O", "-", url],
            # Without -q it tells the time of day, which is another at each run.
            aloud=lambda url, _: ["wget", "-nv", "-S", "--tries=1", "--content-on-error", "-O", "-", url],
            shows_headers=True,
        ),
        Client("Python urllib", library("urllib", PYTHON), shows_headers=True),
        Client("Python strict", library("strict", PYTHON), sort="https", shows_headers=True),
        Client("Python requests", library("requests"), shows_headers=True),
        Client("Python httpx", library("httpx"), shows_headers=True),
        Client("Python httpx, h2", library("httpx2"), sort="https", server="http2", shows_headers=True),
        Client("Python aiohttp", library("aiohttp"), shows_headers=True),
        Client("Node fetch", lambda url, _: ["node", str(tools / "hello.js"), "fetch", url], shows_headers=True),
        Client("Node http, https", lambda url, _: ["node", str(tools / "hello.js"), "get", url], shows_headers=True),
        Client(
            "Java HttpClient",
            lambda url, _: ["java", "-XX:TieredStopAtLevel=1", str(tools / "Hello.java"), url],
            shows_headers=True,
        ),
        Client(
            "Go, static",
            lambda url, _: [str(tools / "hello-go"), url],
            missing="" if have_go else "not built",
            shows_headers=True,
        ),
        Client("busybox wget, static", lambda url, _: ["busybox", "wget", "-q", "-O", "-", url], sort="http"),
        Client("git, https", git, path="/git/greeting.git", host="git.test", requests=None),
        Client(
            "pip",
            pip,
            greeting="Saved ./greeting-1.0",
            path="/simple/",
            host="registry.test",
            requests=2,
            aloud=pip_aloud,
        ),
        Client("uv", uv, path="/simple/", host="registry.test", requests=None, retries=True, terse=True),
        Client("npm", npm, path="/npm/", host="registry.test", requests=2, retries=True, aloud=npm_aloud),
        Client(
            "cargo",
            cargo,
            path="/cargo/",
            host="registry.test",
            requests=None,
            retries=True,
            missing="" if sysroot else "no Rust toolchain",
        ),
        Client("git, ssh", git_ssh, sort="stream", host="git.test", server="ssh", sealed=True),
        Client("psql", psql, sort="stream", host="db.test", server="postgres"),
        Client("lines over TCP", lines, sort="stream", host="db.test", server="echo"),
    ]
    for client in all_of_them:
        if not client.missing and client.server not in laboratory.ports:
            client.missing = f"no server for it: {client.server}"
    return all_of_them


class Table:
    """The cells of one client, each made by a run."""

    def __init__(self, laboratory, client):
        self.laboratory = laboratory
        self.client = client
        ports = laboratory.ports
        stream = client.sort == "stream"
        served = {ports[client.server]} if stream else {ports["http"], ports[client.server]}
        kinds = ["net/connect"] if stream else ["http/request"]
        self.policy = laboratory.policy(
            re.sub(r"[^a-z0-9]+", "-", client.name.lower()),
            f'[[allow]]\neffect = {json.dumps(kinds)}\nhost = ["{client.host}"]\n' f"port = {sorted(served)}\n",
        )
        self.recorded = None

    def address(self, scheme, host=None):
        client, ports = self.client, self.laboratory.ports
        host = host or client.host
        if client.sort == "stream":
            return f"{host}:{ports[client.server]}"
        return f"{scheme}://{host}:{ports['http' if scheme == 'http' else client.server]}{client.path}"

    def go(self, what, scheme, host=None, options=()):
        laboratory = self.laboratory
        work = laboratory.folder(f"{self.client.name}-{what}")
        goes_wrong = what == "refused" or what.startswith("fault")
        shape = self.client.aloud if goes_wrong and self.client.aloud else self.client.command
        command = shape(self.address(scheme, host), work)
        # What the client itself writes is of no interest, and the next run begins with the same workspace.
        return laboratory.run(work, ["--policy", self.policy, "--no-apply", *options], command), work

    def works(self, run):
        """What is wrong with a run in which all should have gone well."""
        client = self.client
        kind = "net/connect" if client.sort == "stream" else "http/request"
        receipts = run.of(kind)
        if run.status != 0:
            return f"status {run.status}: {last_words(run)}"
        if client.greeting not in client_words(run):
            return f"not what was asked for: {last_words(run)}"
        bad = [receipt for receipt in receipts if receipt["decision"] != "allowed"]
        if bad:
            return f"a receipt says {bad[0]['decision']}: {bad[0]['reason']}"
        if not receipts or (client.requests and len(receipts) != client.requests):
            return f"{len(receipts)} receipts of {kind}, expected {client.requests or 'some'}"
        return ""

    def usual(self):
        return "http" if self.client.sort == "http" else "https"

    def http(self):
        if self.client.sort not in ("web", "http"):
            return "-"
        return self.works(self.go("http", "http")[0])

    def https(self):
        if self.client.sort == "http":
            return "-"
        run, work = self.go("https", "https", options=["--record"])
        wrong = self.works(run)
        if not wrong:
            self.recorded = (run, work)
        return wrong

    def refused(self):
        # By plain HTTP the client has the refusal's own words; with TLS it has to trust the certificate first.
        run, _ = self.go("refused", self.usual(), host=REFUSED)
        if run.status == 0:
            return "the client reports success"
        kinds = ("net/connect", "http/request", "net/resolve")
        if not [receipt for kind in kinds for receipt in run.of(kind, "refused")]:
            return "no refused receipt"
        if REFUSED in self.laboratory.asked():
            return f"{REFUSED} was looked up outside"
        said = re.search(r"(?i)policy|refused by tollgate", client_words(run))
        if said:
            return ""
        # A protocol without words for it gets an error number; then the run's own last words have to say it.
        if self.client.sort == "stream" or self.client.terse:
            if REFUSED in summary(run):
                return ""
            return (
                f"neither the client's error nor the run's summary names {REFUSED}: "
                f"{last_words(run)} / {one_line(summary(run))}"
            )
        return f"the error does not name the policy: {last_words(run)}"

    def replay(self):
        """The recorded run again, the servers stopped."""
        if not self.recorded and self.client.sort == "http":
            run, work = self.go("record", "http", options=["--record"])
            if not self.works(run):
                self.recorded = (run, work)
        if not self.recorded:
            return "nothing recorded"
        recorded, work = self.recorded
        replayed = self.laboratory.run(work, ["--replay", recorded.id])
        if self.client.sealed:
            honest = replayed.status == 125 and "the program said something else from byte" in summary(replayed)
            return "-" if honest else f"not said to differ: status {replayed.status}: {one_line(summary(replayed))}"
        if replayed.status != 0:
            return f"status {replayed.status}: {one_line(summary(replayed))}"
        if replayed.stdout != recorded.stdout:
            return "other bytes than recorded"
        return ""

    def fault(self):
        """429 and a reset arrive as the client would see them."""
        if self.client.sort == "stream":
            run, _ = self.go("fault", "", options=["--faults", "net/connect:error=ECONNREFUSED"])
            if run.status == 0:
                return "ECONNREFUSED: the client reports success"
            return "" if re.search(RESET, client_words(run)) else f"ECONNREFUSED: {last_words(run)}"
        first = ",first=1" if self.client.retries else ""
        limit = f"http/request:rate-limit=429,retry-after=1{first}"
        run, _ = self.go("fault-429", self.usual(), options=["--faults", limit])
        if not any(receipt["injected"] for receipt in run.receipts):
            return f"429: nothing was injected: {last_words(run)}"
        if self.client.retries:
            if run.status != 0 or self.client.greeting not in client_words(run):
                return f"429: the client did not try again: {last_words(run)}"
        elif run.status == 0 or not re.search(LIMITED, client_words(run)):
            return f"429: {last_words(run)}"
        elif self.client.shows_headers and not re.search(r"(?im)retry-after: 1\b|\b429 1$", client_words(run)):
            return f"429: without Retry-After: {last_words(run)}"
        run, _ = self.go("fault-reset", self.usual(), options=["--faults", f"http/request:error=ECONNRESET{first}"])
        if not any(receipt["injected"] for receipt in run.receipts):
            return f"reset: nothing was injected: {last_words(run)}"
        if self.client.retries and run.status == 0:
            return ""
        if run.status == 0 or not re.search(RESET, client_words(run)) or re.search(r"\b502\b", client_words(run)):
            return f"reset: {last_words(run)}"
        return ""


def client_words(run):
    """What the client said, without Tollgate's own summary behind it."""
    return run.stdout.decode(errors="replace") + re.split(r"(?m)^tollgate: run [0-9a-z]{12}: ", run.stderr)[0]


def summary(run):
    """What Tollgate said when the run had ended."""
    parts = re.split(r"(?m)^tollgate: run [0-9a-z]{12}: ", run.stderr, maxsplit=1)
    return parts[1] if len(parts) == 2 else ""


def one_line(words):
    return " / ".join(line.strip() for line in words.splitlines() if line.strip())[-500:]


def last_words(run):
    return one_line(client_words(run)) or one_line(summary(run))


COLUMNS = ("http", "https", "refused", "replay", "fault")


def main():
    parser = argparse.ArgumentParser(prog="scripts/clients")
    parser.add_argument("scratch")
    parser.add_argument("tools")
    parser.add_argument("--json", action="store_true", help="one JSON object a line, in place of the tables")
    parser.add_argument("--client", action="append", default=[], help="only this one; may be given again")
    parser.add_argument("--case", action="append", default=[], help="only this one; may be given again")
    parser.add_argument("--no-clients", action="store_true")
    parser.add_argument("--no-cases", action="store_true")
    parser.add_argument("--h2spec", help="the program h2spec, for the case of its name")
    given = parser.parse_args()
    tools = pathlib.Path(given.tools)
    for file in (LIB / "clients").iterdir():
        shutil.copy(file, tools)
    laboratory = Laboratory(given.scratch, tools, given.h2spec)
    rows = []
    try:
        say("starting the servers")
        laboratory.certificates()
        laboratory.registries()
        laboratory.repository()
        start(laboratory)
        if not given.no_clients and not (given.case and not given.client):
            rows += table(laboratory, given)
        if not given.no_cases and not (given.client and not given.case):
            rows += cases.all_of_them(laboratory, given)
    finally:
        laboratory.stop()
    if given.json:
        for row in rows:
            print(json.dumps(row))
    sys.exit(0 if all(row["as_expected"] for row in rows) else 1)


def start(laboratory):
    laboratory.start_origin()
    laboratory.start_http2()
    laboratory.start_sshd()
    laboratory.start_postgres()


def table(laboratory, given):
    wanted = [client for client in clients(laboratory) if not given.client or client.name in given.client]
    if not wanted:
        sys.exit(f"error: no such client; there are {', '.join(client.name for client in clients(laboratory))}")
    tables, cells = {}, {client.name: {} for client in wanted}

    def cell(client, column):
        if client.missing:
            result = f"not tried: {client.missing}"
        else:
            tables.setdefault(client.name, Table(laboratory, client))
            result = getattr(tables[client.name], column)()
        cells[client.name][column] = result
        if result not in ("", "-"):
            say(f"{client.name}, {column}: {result}")

    for column in ("http", "https", "refused", "fault"):
        for client in wanted:
            say(f"{client.name}, {column}")
            cell(client, column)
    # What needs a recording by http has to make it while there is somebody to answer.
    for client in wanted:
        if client.sort == "http" and not client.missing:
            own = tables[client.name]
            run, work = own.go("record", "http", options=["--record"])
            own.recorded = None if own.works(run) else (run, work)
    say("stopping the servers, replaying")
    laboratory.stop()
    for client in wanted:
        cell(client, "replay")
    start(laboratory)

    def shown(result):
        return "ok" if result == "" else result if result == "-" else "WRONG"

    rows = []
    if not given.json:
        width = max(len(client.name) for client in wanted)
        print(f"{'client':{width}}  " + "  ".join(f"{column:7}" for column in COLUMNS))
    for client in wanted:
        results = cells[client.name]
        if not given.json:
            print(f"{client.name:{width}}  " + "  ".join(f"{shown(results[column]):7}" for column in COLUMNS))
        wrong = {column: result for column, result in results.items() if result not in ("", "-")}
        rows.append(
            {
                "client": client.name,
                "cells": {column: results[column] or "ok" for column in COLUMNS},
                "as_expected": not wrong,
            }
        )
    if not given.json:
        for client in wanted:
            for column, result in cells[client.name].items():
                if result not in ("", "-"):
                    print(f"\n{client.name}, {column}: {result}")
    return rows


main()
