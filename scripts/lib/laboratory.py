"""What scripts/clients needs to try the network door: servers on loopback, and runs with their receipts."""

import base64
import hashlib
import io
import json
import os
import pathlib
import pwd
import re
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile

LIB = pathlib.Path(__file__).resolve().parent
# The system's own: a jail sees /usr, and nothing of a version manager's.
PYTHON = "/usr/bin/python3"
GREETING = "hello from the origin"
# All of the origin's hosts; only one label stands below .test, for which no wildcard is valid.
NAMES = ["api.test", "other.test", "git.test", "gql.test", "registry.test", "db.test"]


def say(text):
    print(f"== {text}", file=sys.stderr, flush=True)


def make(*command, **options):
    """Runs a command of the preparation, which has to work."""
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options
    )
    if done.returncode != 0:
        sys.exit(
            f"error: {' '.join(map(str, command))}: status {done.returncode}\n{done.stdout.decode(errors='replace')}"
        )
    return done.stdout.decode(errors="replace")


class Run:
    """A run that has ended: what it printed, how, and its receipts."""

    def __init__(self, done, receipts, run):
        self.status = done.returncode
        self.stdout = done.stdout
        self.stderr = done.stderr.decode(errors="replace")
        self.text = done.stdout.decode(errors="replace") + self.stderr
        self.receipts = receipts
        self.id = run

    def of(self, kind, decision=None):
        return [
            receipt for receipt in self.receipts if receipt["kind"] == kind and decision in (None, receipt["decision"])
        ]


class Laboratory:
    """The servers, and a state directory of its own."""

    def __init__(self, scratch, tools, h2spec=None):
        self.h2spec = h2spec
        self.scratch = pathlib.Path(scratch)
        self.tools = pathlib.Path(tools)
        self.origin = self.scratch / "origin"
        self.servers = []
        self.ports = {}
        self.count = 0
        (self.origin / "www").mkdir(parents=True)
        (self.origin / "git").mkdir()
        self.environment = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "TERM") if name in os.environ}
        self.environment |= {
            "TOLLGATE_STATE": str(self.scratch / "state"),
            "SSL_CERT_FILE": str(self.origin / "authority.pem"),
            "LC_ALL": "C.UTF-8",
        }

    # What the servers serve.

    def certificates(self):
        """A test authority, and a certificate of its for every name."""
        where = {"cwd": self.origin}
        key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
        make(
            "openssl",
            "req",
            "-x509",
            *key,
            "-days",
            "2",
            "-subj",
            "/CN=Test Authority",
            "-keyout",
            "authority.key",
            "-out",
            "authority.pem",
            "-addext",
            "basicConstraints=critical,CA:TRUE",
            "-addext",
            "keyUsage=critical,keyCertSign,cRLSign",
            **where,
        )
        make("openssl", "req", *key, "-subj", "/CN=origin", "-keyout", "key.pem", "-out", "request.pem", **where)
        names = ",".join(f"DNS:{name}" for name in NAMES)
        (self.origin / "extensions").write_text(
            f"subjectAltName={names}\nbasicConstraints=CA:FALSE\nextendedKeyUsage=serverAuth\n"
            "authorityKeyIdentifier=keyid\nsubjectKeyIdentifier=hash\n"
        )
        make(
            "openssl",
            "x509",
            "-req",
            "-in",
            "request.pem",
            "-CA",
            "authority.pem",
            "-CAkey",
            "authority.key",
            "-CAcreateserial",
            "-days",
            "2",
            "-extfile",
            "extensions",
            "-out",
            "certificate.pem",
            **where,
        )

    def registries(self):
        """A package index of each kind, with one package `greeting`."""
        www = self.origin / "www"
        wheel = io.BytesIO()
        with zipfile.ZipFile(wheel, "w") as file:
            info = "greeting-1.0.dist-info"
            file.writestr("greeting.py", f"print({GREETING!r})\n")
            file.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: greeting\nVersion: 1.0\n")
            file.writestr(
                f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: hand\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            )
            file.writestr(f"{info}/RECORD", f"greeting.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")
        (www / "simple/greeting").mkdir(parents=True)
        (www / "simple/greeting/index.html").write_text(
            '<!DOCTYPE html><a href="/files/greeting-1.0-py3-none-any.whl">greeting-1.0-py3-none-any.whl</a>\n'
        )
        (www / "files").mkdir()
        (www / "files/greeting-1.0-py3-none-any.whl").write_bytes(wheel.getvalue())

        package = self.archive(
            "package",
            {
                "package.json": json.dumps({"name": "greeting", "version": "1.0.0", "main": "index.js"}),
                "index.js": f"console.log({GREETING!r})\n",
            },
        )
        (www / "files/greeting-1.0.0.tgz").write_bytes(package)
        integrity = "sha512-" + base64.b64encode(hashlib.sha512(package).digest()).decode()
        (www / "npm/greeting").mkdir(parents=True)
        (www / "npm/greeting/index.json").write_text(
            json.dumps(
                {
                    "name": "greeting",
                    "dist-tags": {"latest": "1.0.0"},
                    "versions": {
                        "1.0.0": {
                            "name": "greeting",
                            "version": "1.0.0",
                            "dist": {"tarball": "@BASE@/files/greeting-1.0.0.tgz", "integrity": integrity},
                        }
                    },
                }
            )
        )

        crate = self.archive(
            "greeting-1.0.0",
            {
                "Cargo.toml": '[package]\nname = "greeting"\nversion = "1.0.0"\nedition = "2021"\n',
                "src/lib.rs": f"pub const GREETING: &str = {json.dumps(GREETING)};\n",
            },
        )
        (www / "files/greeting-1.0.0.crate").write_bytes(crate)
        (www / "cargo/gr/ee").mkdir(parents=True)
        (www / "cargo/config.json").write_text('{"dl": "@BASE@/files/{crate}-{version}.crate"}\n')
        (www / "cargo/gr/ee/greeting").write_text(
            json.dumps(
                {
                    "name": "greeting",
                    "vers": "1.0.0",
                    "deps": [],
                    "cksum": hashlib.sha256(crate).hexdigest(),
                    "features": {},
                    "yanked": False,
                }
            )
            + "\n"
        )

    @staticmethod
    def archive(folder, files):
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w:gz") as tar:
            for name, text in files.items():
                entry = tarfile.TarInfo(f"{folder}/{name}")
                entry.size = len(text)
                entry.mtime = 1
                tar.addfile(entry, io.BytesIO(text.encode()))
        return packed.getvalue()

    def repository(self):
        """A bare repository with one commit, for git over https and ssh."""
        source = self.scratch / "source"
        source.mkdir()
        (source / "greeting").write_text(GREETING + "\n")
        identity = ["-c", "user.name=a", "-c", "user.email=a@localhost"]
        git = ["git", "-C", str(source)]
        make(*git, "init", "-q", "-b", "main")
        make(*git, "add", ".")
        make(*git, *identity, "commit", "-qm", "greeting")
        make("git", "clone", "-q", "--bare", str(source), str(self.origin / "git/greeting.git"))

    # The servers themselves.

    def server(self, command, ready, **options):
        log = open(self.scratch / f"server-{len(self.servers)}.log", "wb")
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, **options)
        self.servers.append(process)
        for _ in range(600):
            if ready():
                return process
            if process.poll() is not None:
                break
            time.sleep(0.05)
        sys.exit(f"error: the server {command} does not start\n{pathlib.Path(log.name).read_text(errors='replace')}")

    def start_origin(self):
        ports = self.origin / "ports.json"
        ports.unlink(missing_ok=True)
        wish = json.dumps(self.ports)
        self.server([PYTHON, str(LIB / "origin.py"), str(self.origin), wish], ports.exists)
        self.ports |= json.loads(ports.read_text())

    def start_http2(self):
        """An origin that speaks HTTP/2 alone can be told from the other: its greeting names its protocol."""
        port = self.ports.get("http2") or free_port()
        folder = self.origin
        self.server(
            [
                str(self.tools / "venv/bin/hypercorn"),
                "--bind",
                f"127.0.0.1:{port}",
                "--certfile",
                str(folder / "certificate.pem"),
                "--keyfile",
                str(folder / "key.pem"),
                "--access-logfile",
                "-",
                "origin_http2:application",
            ],
            lambda: listens(port),
            cwd=LIB,
            env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},
        )
        self.ports["http2"] = port

    def start_sshd(self):
        sshd = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
        if not sshd:
            return False
        folder = self.scratch / "ssh"
        if not folder.exists():
            folder.mkdir()
            for key in ("host", "user"):
                make("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", key, "-f", str(folder / key))
            shutil.copy(folder / "user.pub", folder / "authorized_keys")
        port = self.ports.get("ssh") or free_port()
        (folder / "config").write_text(
            f"ListenAddress 127.0.0.1:{port}\nHostKey {folder}/host\nAuthorizedKeysFile {folder}/authorized_keys\n"
            "StrictModes no\nUsePAM no\nPidFile none\nPermitRootLogin prohibit-password\nPasswordAuthentication no\n"
            "LogLevel VERBOSE\n"
        )
        if os.getuid() == 0:
            os.makedirs("/run/sshd", exist_ok=True)
        self.server([sshd, "-D", "-e", "-f", str(folder / "config")], lambda: listens(port))
        self.ports["ssh"] = port
        return True

    def start_postgres(self):
        programs = sorted(pathlib.Path("/usr/lib/postgresql").glob("*/bin"))
        if not programs:
            return False
        owner, data = [], self.scratch / "postgres"
        if os.getuid() == 0:
            account = pwd.getpwnam("postgres")
            owner = ["setpriv", "--reuid", str(account.pw_uid), "--regid", str(account.pw_gid), "--clear-groups"]
        if not data.exists():
            data.mkdir()
            if owner:
                shutil.chown(data, "postgres", "postgres")
            make(
                *owner,
                str(programs[-1] / "initdb"),
                "-A",
                "trust",
                "-U",
                "tester",
                "--no-sync",
                "-D",
                str(data),
                cwd="/",
            )
        port = self.ports.get("postgres") or free_port()
        self.server(
            [
                *owner,
                str(programs[-1] / "postgres"),
                "-D",
                str(data),
                "-p",
                str(port),
                "-h",
                "127.0.0.1",
                "-k",
                "",
                "-F",
            ],
            lambda: listens(port),
            cwd="/",
        )
        self.ports["postgres"] = port
        return True

    def stop(self):
        for process in self.servers:
            process.terminate()
        for process in self.servers:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.servers = []

    def seen(self):
        """What the origin and the resolver saw, since they began."""
        return [json.loads(line) for line in (self.origin / "seen.jsonl").read_text().splitlines()]

    def asked(self):
        return {entry["asked"].lower() for entry in self.seen() if "asked" in entry}

    # Runs.

    def policy(self, name, text):
        """A policy that knows where the test names are, and shows the tools; `text` adds its rules."""
        path = self.scratch / "policies" / f"{name}.toml"
        path.parent.mkdir(exist_ok=True)
        private = "".join(f'"{host}" = ["127.0.0.1"]\n' for host in NAMES)
        path.write_text(
            f'extends = ["default"]\n\n[jail]\nviews = {json.dumps(self.views())}\n\n'
            f'[network]\nresolver = "127.0.0.1:{self.ports["resolver"]}"\n\n'
            f"[network.private]\n{private}\n{text}"
        )
        return str(path)

    def views(self):
        views = [str(self.tools)]
        sysroot = self.sysroot()
        if sysroot:
            views.append(sysroot)
        return views

    def sysroot(self):
        """The folder of the Rust toolchain, which holds the real cargo."""
        if not hasattr(self, "found_sysroot"):
            try:
                done = subprocess.run(["rustc", "--print", "sysroot"], capture_output=True, text=True)
                self.found_sysroot = done.stdout.strip() if done.returncode == 0 else ""
            except OSError:
                self.found_sysroot = ""
        return self.found_sysroot

    def folder(self, name):
        self.count += 1
        path = self.scratch / "work" / f"{self.count:03}-{re.sub(r'[^a-z0-9]+', '-', name.lower())}"
        path.mkdir(parents=True)
        return path

    def tollgate(self, *arguments, **options):
        return subprocess.run(["tollgate", *map(str, arguments)], env=self.environment, **options)

    def run(self, workspace, options, command=None, timeout=120):
        """A run to its end; a run that takes longer is ended, and said to have hung."""
        words = ["run", "--ask", "refuse", "--wall", f"{timeout}s", "--workspace", workspace, *options]
        if command:
            words += ["--", *command]
        try:
            done = self.tollgate(*words, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout + 30)
        except subprocess.TimeoutExpired as late:
            done = subprocess.CompletedProcess(words, 124, late.stdout or b"", (late.stderr or b"") + b"\nhangs")
        latest = self.tollgate("ps", "--all", "--json", capture_output=True, text=True).stdout
        runs = [json.loads(line) for line in latest.splitlines()]
        said = re.search(r"tollgate: run ([0-9a-z]{12})", done.stderr.decode(errors="replace"))
        run = said[1] if said else max(runs, key=lambda run: run["started_at"])["id"] if runs else None
        receipts = []
        if run:
            listed = self.tollgate("receipts", run, "--json", capture_output=True, text=True).stdout
            receipts = [json.loads(line) for line in listed.splitlines()]
        return Run(done, receipts, run)


def listens(port):
    wanted = f":{port:04X}"
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in pathlib.Path(table).read_text().splitlines()[1:]:
            words = line.split()
            if words[1].endswith(wanted) and words[3] == "0A":
                return True
    return False


def free_port():
    import socket

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]
