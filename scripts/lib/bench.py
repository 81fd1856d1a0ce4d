"""The measurements of scripts/bench, which prepares what they need. Standard library only."""

import json
import os
import pathlib
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tarfile
import threading
import time

ROOT, TARGET, SCRATCH = (pathlib.Path(path) for path in sys.argv[1:4])
PYTHON = "/usr/bin/python3"
JAILS = 200
ROWS = []


def say(text):
    print(f"== {text}", file=sys.stderr, flush=True)


def quiet(command, folder, **options):
    """Runs a command to its end; a status other than 0 ends the whole measurement."""
    done = subprocess.run(command, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, **options)
    if done.returncode != 0:
        sys.exit(f"error: {command}: status {done.returncode}\n{done.stdout.decode()}{done.stderr.decode()}")
    return done.stdout.decode()


def jailed(*command, flags=()):
    return ["tollgate", "run", "-q", *flags, "--", *command]


def timed(command, folder):
    began = time.perf_counter()
    quiet(command, folder)
    return (time.perf_counter() - began) * 1000


def in_turns(count, warm, *sides):
    """Times each side in turn, `count` times; a side is a function that gives milliseconds."""
    for _ in range(warm):
        for side in sides:
            side()
    times = [[] for _ in sides]
    for _ in range(count):
        for side, its_times in zip(sides, times):
            its_times.append(side())
    return times


def milliseconds(times):
    times = sorted(times)
    slow = times[min(len(times) - 1, int(len(times) * 0.95))]
    return f"{statistics.median(times):.1f} ms (p95 {slow:.1f})"


def row(work, ours, theirs, ratio, target, count):
    ROWS.append((work, ours, theirs, ratio, target, count))
    print(f"   {work}: {ours} against {theirs}: {ratio}", file=sys.stderr, flush=True)


def compare(work, ours, theirs, target, names=("", "")):
    ratio = statistics.median(ours) / statistics.median(theirs)
    row(work, milliseconds(ours) + names[0], milliseconds(theirs) + names[1], f"{ratio:.2f}", target, len(ours))


def bubblewrap(workspace):
    """The same view in bubblewrap's own words: the shipped profile with its variables filled in."""
    values = {"workspace": str(workspace), "home": "/home/agent"}
    arguments = ["bwrap"]
    for line in (ROOT / "bwrap-profiles/default.bwrap").read_text().splitlines():
        if line.startswith("#"):
            continue
        for word in line.split():
            word = re.sub(r"\$\{size:[a-z]+\}", str(1 << 29), word)
            arguments.append(re.sub(r"\$\{([a-z]+)\}", lambda match: values[match[1]], word))
    return [*arguments, "--chdir", str(workspace), "--die-with-parent", "--"]


def folder(name):
    path = SCRATCH / name
    path.mkdir()
    return path


def start():
    """A run of nothing, all layers and receipts on, against bubblewrap with the same mounts and nothing else."""
    work = folder("start")
    ours, theirs, bare = in_turns(
        60, 5,
        lambda: timed(jailed("/bin/true"), work),
        lambda: timed([*bubblewrap(work), "/bin/true"], work),
        lambda: timed(["/bin/true"], work),
    )
    compare("`tollgate run -q -- /bin/true`, against `bwrap --unshare-all` with the same mounts", ours, theirs, "≤ 1.0")
    row("`/bin/true` alone, for scale", milliseconds(bare), "", "", "", len(bare))


def suite():
    """A real project's test suite."""
    project = TARGET / "projects/click"
    tests = [".venv/bin/python", "-B", "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    ours, theirs = in_turns(
        7, 1,
        lambda: timed(jailed(*tests), project),
        lambda: timed(tests, project),
    )
    compare("the test suite of click 8.1.8, jailed against bare", ours, theirs, "≤ 1.05")


def large():
    """A start in a workspace of 200,000 files."""
    empty, full = folder("empty"), folder("full")
    for outer in range(200):
        inner = full / f"d{outer:03}"
        inner.mkdir()
        for number in range(1000):
            (inner / f"f{number:03}").touch()
    ours, theirs = in_turns(
        30, 3,
        lambda: timed(jailed("/bin/true"), full),
        lambda: timed(jailed("/bin/true"), empty),
    )
    compare("a start in a workspace of 200,000 files, against an empty one", ours, theirs, "≤ 1.1")
    shutil.rmtree(full)


def processes_below(ancestors):
    """All processes that descend from these, by /proc."""
    parent = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                stat = pathlib.Path(f"/proc/{entry}/stat").read_text()
            except OSError:
                continue
            parent[int(entry)] = int(stat.rsplit(")", 1)[1].split()[1])
    found = set(ancestors)
    grown = True
    while grown:
        more = {pid for pid, its_parent in parent.items() if its_parent in found} - found
        found |= more
        grown = bool(more)
    return found


def proportional_kib(pid):
    for line in pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1])
    return 0


def alive():
    """Jails alive at once, and the memory that is ours in each."""
    work = folder("alive")
    began = time.perf_counter()
    ready = []
    running = []
    for number in range(JAILS):
        # Each says that it runs by making a pipe's end close: no file, so no effect.
        read, write = os.pipe()
        running.append(subprocess.Popen(jailed("/bin/sh", "-c", "echo up; exec sleep 600"), cwd=work,
                                        stdin=subprocess.DEVNULL, stdout=write, stderr=subprocess.DEVNULL))
        os.close(write)
        ready.append(read)
    up = sum(os.read(read, 3) == b"up\n" for read in ready)
    took = time.perf_counter() - began
    try:
        kib = 0
        for pid in processes_below(process.pid for process in running):
            name = pathlib.Path(f"/proc/{pid}/comm").read_text().strip()
            if name.startswith("tollgate"):
                kib += proportional_kib(pid)
        each = f"{kib / 1024 / JAILS:.2f} MiB"
    except PermissionError:
        each = "not measured: only root may read it of processes that forbid being traced"
    row(f"{JAILS} runs alive at once: memory of ours in each (PSS)", each, f"{up} of {JAILS} up after {took:.1f} s", "",
        "≤ 2 MiB", 1)
    for process in running:
        process.terminate()
    for process, read in zip(running, ready):
        process.wait()
        os.close(read)


def receipts():
    """Receipts written durably by one thread that waits for none, and by many that each wait."""
    for line in quiet([str(TARGET / "release/examples/receipts"), str(folder("ledger"))], SCRATCH).splitlines():
        result = json.loads(line)
        row(result["work"], f"{result['per_second']:,.0f} a second", "", "", result["target"], result["count"])


def files():
    """Many small files: made, then looked through."""
    source = folder("source")
    for outer in range(200):
        (source / f"d{outer:03}").mkdir()
        for number in range(100):
            (source / f"d{outer:03}" / f"f{number:03}").write_text(f"{outer} {number}\n" * 40)
    archive = SCRATCH / "files.tar"
    with tarfile.open(archive, "w") as tar:
        tar.add(source, "files")

    def unpack(command):
        def once():
            work = pathlib.Path(SCRATCH / "unpack")
            work.mkdir()
            shutil.copy(archive, work / "files.tar")
            took = timed(command, work)
            if not (work / "files/d199/f099").exists():
                sys.exit("error: what was unpacked is not there")
            shutil.rmtree(work)
            return took
        return once

    tar = ["tar", "-xf", "files.tar"]
    ours, theirs = in_turns(5, 1, unpack(jailed(*tar)), unpack(tar))
    compare("unpacking 20,000 files of 400 bytes, jailed and applied with a receipt each, against bare", ours, theirs, "")
    ours, theirs = in_turns(5, 0, unpack_held(archive), unpack(tar))
    compare("the same, until the program has ended and its changes are held, against bare", ours, theirs, "")
    for command in (["init", "-q"], ["add", "-A"],
                    ["-c", "user.name=b", "-c", "user.email=b@localhost", "commit", "-qm", "b"]):
        quiet(["git", *command], source)
    status = ["git", "status", "--porcelain"]
    ours, theirs = in_turns(
        15, 2,
        lambda: timed(jailed(*status), source),
        lambda: timed(status, source),
    )
    compare("`git status` over 20,000 files, jailed against bare", ours, theirs, "")


def unpack_held(archive):
    def once():
        work = pathlib.Path(SCRATCH / "held")
        work.mkdir()
        shutil.copy(archive, work / "files.tar")
        took = timed(jailed("tar", "-xf", "files.tar", flags=("--no-apply",)), work)
        quiet(["tollgate", "discard", "latest"], work)
        shutil.rmtree(work)
        return took
    return once


def opens():
    """Opening and closing one file 100,000 times, timed by the program itself."""
    work = folder("opens")
    (work / "file").touch()
    loop = ("import os, time\nbegan = time.perf_counter()\n"
            "for _ in range(100000): os.close(os.open('file', os.O_RDONLY))\n"
            "print((time.perf_counter() - began) * 1000)")
    command = [PYTHON, "-c", loop]
    ours, theirs = in_turns(
        9, 1, lambda: float(quiet(jailed(*command), work)), lambda: float(quiet(command, work)))
    compare("100,000 times open and close of one file, jailed against bare", ours, theirs, "")


def door():
    """One small effect at the API door, asked for in the jail, against as many bytes over a bare socket."""
    work = folder("door")
    (work / "small").write_text("small")
    program = work / "door"
    shutil.copy(TARGET / "release/examples/door", program)
    count = 3000
    times = {work: ([], []) for work in ("read", "write")}
    for _ in range(9):
        for line in quiet(jailed("./door", "effects", str(count)), work).splitlines():
            told = json.loads(line)
            sizes = [str(told["request"]), str(told["answer"])]
            bare = json.loads(quiet([str(program), "bare", *sizes, str(count)], work))
            ours, theirs = times[told["work"]]
            ours.append(told["median_us"])
            theirs.append(bare["median_us"])
    for name, (ours, theirs) in times.items():
        cells = [f"{statistics.median(side):.1f} µs ({min(side):.1f} to {max(side):.1f})" for side in (ours, theirs)]
        ratio = statistics.median(ours) / statistics.median(theirs)
        row(f"a {name} of five bytes at the API door, against as many bytes over a bare Unix socket", *cells,
            f"{ratio:.2f}", "≤ 2.0", len(ours))


def network():
    """Requests and downloads through the network door, against the same client without it, and against mitmproxy."""
    work = folder("network")
    program = work / "network"
    shutil.copy(TARGET / "release/examples/network", program)
    port, tls_port, proxy_port = 18180, 18543, 18181
    server = subprocess.Popen([str(program), "serve", str(port), str(tls_port), str(work)])
    authority = work / "authority.pem"
    proxy = mitmproxy(port, proxy_port)
    try:
        while not authority.exists():
            time.sleep(0.05)
        trusting = {**os.environ, "SSL_CERT_FILE": str(authority)}
        hosts = "api.test"
        resolver = stub_resolver()
        flags = ["--allow", f"{hosts}:{port}", "--allow", f"{hosts}:{tls_port}", "--private", f"{hosts}=127.0.0.1",
                 "--resolver", f"127.0.0.1:{resolver}", "--egress-bytes", "unlimited", "--record"]

        def ask(how, scheme, at, path, count, through):
            if through:
                command = jailed("./network", "ask", how, f"{scheme}://{hosts}:{at}{path}", str(count), flags=flags)
            else:
                command = [str(program), "ask", how, f"{scheme}://127.0.0.1:{at}{path}", str(count)]
            return json.loads(quiet(command, work, env=trusting).splitlines()[-1])

        def side(how, scheme, at, path, count, through, key):
            return lambda: ask(how, scheme, at, path, count, through)[key] / 1000

        for what, how, scheme, at, path, count, key, target in (
            ("one request after the other, recorded", "requests", "http", port, "/small", 2000, "median_us", "≤ 1.5"),
            ("2,000 requests, eight at a time, recorded", "together", "http", port, "/small", 2000, "whole_us", "≤ 1.5"),
            ("a connection and a request on it, recorded", "connections", "http", port, "/small", 300, "median_us", ""),
            ("a download of 1 GiB, hashed and counted", "download", "http", port, "/large/1024", 1,
             "whole_us", "≤ 1.3"),
        ):
            ours, theirs = in_turns(5, 1, side(how, scheme, at, path, count, True, key),
                                    side(how, scheme, at, path, count, False, key))
            compare(f"{what}, against direct", ours, theirs, target)
            if proxy and how in ("requests", "together"):
                ours, theirs = in_turns(3, 1, side(how, scheme, at, path, count, True, key),
                                        side(how, scheme, proxy_port, path, count, False, key))
                compare(f"{what}, against mitmproxy writing its flows", ours, theirs, "≤ 0.1")
    finally:
        for process in (server, proxy):
            if process:
                process.kill()
                process.wait()


def stub_resolver():
    """A name server on the loopback that answers every question for an IPv4 address with the loopback's."""
    socket_ = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    socket_.bind(("127.0.0.1", 0))

    def serve():
        while True:
            packet, whom = socket_.recvfrom(4096)
            end = packet.index(0, 12) + 5
            kind = packet[end - 4:end - 2]
            answers = b"\xc0\x0c\0\1\0\1\0\0\0\x3c\0\4\x7f\0\0\1" if kind == b"\0\1" else b""
            head = packet[:2] + b"\x81\x80\0\1" + (b"\0\1" if answers else b"\0\0") + b"\0\0\0\0"
            socket_.sendto(head + packet[12:end] + answers, whom)

    threading.Thread(target=serve, daemon=True).start()
    return socket_.getsockname()[1]


def mitmproxy(port, proxy_port):
    """mitmproxy before the server, writing what passes to a file; none where it cannot be had."""
    tool = shutil.which("mitmdump") or str(TARGET / "mitmproxy/bin/mitmdump")
    if not pathlib.Path(tool).exists():
        venv = TARGET / "mitmproxy"
        made = subprocess.run([PYTHON, "-m", "venv", str(venv)], capture_output=True)
        got = made.returncode == 0 and subprocess.run([str(venv / "bin/pip"), "install", "-q", "mitmproxy"],
                                                      capture_output=True).returncode == 0
        if not got:
            say("mitmproxy cannot be installed; left out")
            return None
    flows = SCRATCH / "flows"
    process = subprocess.Popen([tool, "--mode", f"reverse:http://127.0.0.1:{port}", "-p", str(proxy_port), "-q", "-w",
                                str(flows)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    for _ in range(200):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", proxy_port)) == 0:
                return process
        time.sleep(0.1)
    process.kill()
    say("mitmproxy does not start; left out")
    return None


def machine():
    def first(path, pattern):
        match = re.search(pattern, pathlib.Path(path).read_text(), re.MULTILINE)
        return match[1].strip() if match else "unknown"

    memory = int(first("/proc/meminfo", r"^MemTotal:\s+(\d+)")) / 1024 / 1024
    kind = quiet(["stat", "-f", "-c", "%T", str(SCRATCH)], "/").strip()
    model = first("/proc/cpuinfo", r"^model name\s*:(.*)$")
    commit = subprocess.run(["git", "-C", str(ROOT), "describe", "--always", "--dirty"], capture_output=True, text=True)
    print(f"Machine: {os.cpu_count()} × {model}, {memory:.0f} GiB, "
          f"Linux {os.uname().release}, files on {kind}, {'root' if os.getuid() == 0 else 'an ordinary user'}, "
          f"{quiet(['bwrap', '--version'], '/').strip()}, Tollgate {commit.stdout.strip() or 'of no repository'}.")


PARTS = {part.__name__: part for part in (start, suite, large, alive, receipts, files, opens, door, network)}


def main():
    asked = sys.argv[4:] or list(PARTS)
    unknown = set(asked) - set(PARTS)
    if unknown:
        sys.exit(f"error: no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    machine()
    for name in asked:
        say(f"{name}: {PARTS[name].__doc__.splitlines()[0]}")
        PARTS[name]()
    print("\n| work | Tollgate | against | ratio | target | times |\n|---|---|---|---|---|---|")
    for cells in ROWS:
        print("| " + " | ".join(str(cell) for cell in cells) + " |")


main()
