"""The measurements of scripts/bench, which prepares what they need. Standard library only."""

import json
import os
import pathlib
import re
import shutil
import statistics
import subprocess
import sys
import tarfile
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


PARTS = {part.__name__: part for part in (start, suite, large, alive, receipts, files, opens, door)}


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
