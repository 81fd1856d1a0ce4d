#!/usr/bin/python3
"""What scripts/test-vm checks inside a machine that it booted. Standard library only, as root.

Phases follow each other over reboots; /var/lib/check/phase says which is next. Each check is one function: what it
returns is a note for the table, what it raises is its failure. Results are JSON lines on the second serial line.
"""

import json
import os
import pathlib
import pwd
import re
import shutil
import signal
import subprocess
import sys
import time
import traceback

HERE = pathlib.Path(__file__).resolve().parent
PHASE = pathlib.Path("/var/lib/check/phase")
RESULTS = open("/dev/ttyS1", "w", buffering=1)
# Under emulation everything takes its time.
PATIENCE = 300


class Output:
    def __init__(self, status, out, err):
        self.status, self.out, self.err = status, out, err

    def __str__(self):
        return f"status {self.status}\nstdout: {self.out[-1500:]}\nstderr: {self.err[-1500:]}"


def as_user(user, command, session=True):
    """A command as a user, and the variables of a session of theirs if they have one."""
    account = pwd.getpwnam(user)
    variables = {"HOME": account.pw_dir, "USER": user, "LOGNAME": user, "PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
                 "LANG": "C.UTF-8"}
    if session and user != "root":
        variables["XDG_RUNTIME_DIR"] = f"/run/user/{account.pw_uid}"
        variables["DBUS_SESSION_BUS_ADDRESS"] = f"unix:path=/run/user/{account.pw_uid}/bus"
    words = list(map(str, command))
    if user != "root":
        words = ["setpriv", f"--reuid={account.pw_uid}", f"--regid={account.pw_gid}", "--init-groups", *words]
    return words, variables


def run(*command, user="root", cwd=None, session=True, timeout=PATIENCE, stdin=None, env=None):
    """Runs a command as a user to its end."""
    words, variables = as_user(user, command, session)
    done = subprocess.run(words, cwd=cwd or variables["HOME"], env=variables | (env or {}), capture_output=True, timeout=timeout,
                          input=stdin, stdin=None if stdin is not None else subprocess.DEVNULL)
    return Output(done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace"))


def begin(user, work, script):
    """A run of a user's that goes on, of this shell script."""
    words, variables = as_user(user, ["tollgate", "run", "-q", "--", "sh", "-c", script])
    return subprocess.Popen(words, cwd=work, env=variables, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                            start_new_session=True)


def tollgate(*words, **named):
    return run("tollgate", *words, **named)


def ok(output, status=0):
    assert output.status == status, f"expected status {status}: {output}"
    return output


def runs(user, *more):
    return [json.loads(line) for line in ok(tollgate("ps", "--all", "--json", *more, user=user)).out.splitlines()]


def folder(user, name):
    account = pwd.getpwnam(user)
    path = pathlib.Path(account.pw_dir) / name
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    os.chown(path, account.pw_uid, account.pw_gid)
    return path


def everybody():
    return ["ann", "root"]


# First boot.


def install():
    """The package is installed, with manual pages and completions."""
    ok(run("dpkg", "-i", HERE / "tollgate.deb"))
    for file in ("/usr/bin/tollgate", "/usr/bin/tollgate-shim", "/usr/share/man/man1/tollgate-run.1.gz",
                 "/usr/share/bash-completion/completions/tollgate"):
        assert os.path.exists(file), f"{file} is missing"
    assert "tollgate" in ok(tollgate("--version")).out
    return ok(run("dpkg-query", "-W", "-f", "${Version}", "tollgate")).out


def doctor():
    """`tollgate doctor` says what this kernel has, and a run can start."""
    notes = []
    for user in everybody():
        told = tollgate("doctor", "--json", user=user)
        report = json.loads(told.out)
        assert report["works"], f"{user}: {told}"
        for finding in report["findings"]:
            assert finding["status"] == "ok" or (finding["detail"] and finding["remedy"]), f"{user}: {finding}"
        by_name = {finding["name"]: finding for finding in report["findings"]}
        notes.append(f"{user}: Landlock {by_name['landlock']['detail']}; {by_name['control groups']['detail'].split(';')[0]}")
        missing = [finding["name"] for finding in report["findings"] if finding["status"] != "ok"]
        if missing:
            notes.append(f"not: {', '.join(missing)}")
    return "; ".join(notes)


def first_run():
    """An ordinary user's first run: a file is made, and the effect has a receipt that verifies."""
    for user in everybody():
        work = folder(user, "first")
        output = ok(tollgate("run", "--", "sh", "-c", "echo made >made; id -u", user=user, cwd=work))
        assert (work / "made").read_text() == "made\n", output
        receipts = ok(tollgate("receipts", "--kind", "fs/write", "--json", user=user)).out
        assert '"made"' in receipts, receipts
        ok(tollgate("verify", "--all", user=user))
    degraded = runs("ann")[0]["degraded"]
    return f"degraded: {'; '.join(degraded)}" if degraded else "all layers"


def python():
    """python3 and pytest of the distribution, unmodified, with the same result as bare."""
    work = folder("ann", "project")
    (work / "test_it.py").write_text("import os\n\ndef test_one():\n    open('made', 'w').write('x')\n\ndef test_two(tmp_path):\n"
                                     "    (tmp_path / 'a').write_text('b')\n\ndef test_three():\n    assert not os.path.exists('/root/.profile')\n")
    output = ok(tollgate("run", "--policy", "pytest", "--", "python3", "-m", "pytest", "-q", "-p", "no:cacheprovider", user="ann", cwd=work))
    assert "3 passed" in output.out and (work / "made").exists(), output
    return output.out.strip().splitlines()[-1]


def limits():
    """Memory, processes and processor time are bound by a control group of version 2, for a user with a session and root."""
    for user in everybody():
        work = folder(user, "limits")
        output = ok(tollgate("run", "--memory", "100MiB", "--", "python3", "-c", "x = bytearray(400 << 20); print(len(x))",
                             user=user, cwd=work), 137)
        assert runs(user)[0]["outcome"]["type"] == "memory-exceeded", output
        assert not any("memory" in one for one in runs(user)[0]["degraded"]), runs(user)[0]
        fork = "import os, time\nn = 0\ntry:\n    while n < 200:\n        if os.fork() == 0:\n            time.sleep(30)\n            os._exit(0)\n        n += 1\nexcept OSError:\n    pass\nprint(n)\n"
        output = tollgate("run", "--pids", "30", "--", "python3", "-c", fork, user=user, cwd=work)
        assert output.out.strip().isdigit() and int(output.out) < 30 or output.status == 155, f"{user}: {output}"
        busy = "import time\nend = time.monotonic() + 6\nwhile time.monotonic() < end: pass\n"
        ok(tollgate("run", "--cpus", "0.25", "--", "python3", "-c", busy, user=user, cwd=work))
        used, wall = runs(user)[0]["usage"]["cpu_us"] / 1e6, runs(user)[0]["usage"]["wall_us"] / 1e6
        assert used < 0.5 * wall, f"{user}: a quarter of a processor, and {used:.1f} s of {wall:.1f} s"
    return f"a quarter of a processor: {used:.1f} s in {wall:.1f} s"


def no_group():
    """Without a session there is no group: a limit that was asked for is refused, and best effort says what is left out."""
    work = folder("bob", "limits")
    ok(run("loginctl", "disable-linger", "bob"))
    run("loginctl", "terminate-user", "bob")
    time.sleep(3)
    output = tollgate("run", "--memory", "100MiB", "--", "true", user="bob", cwd=work, session=False)
    ok(output, 125)
    assert "memory" in output.err and "--best-effort" in output.err, output
    ok(tollgate("run", "--memory", "100MiB", "--best-effort", "--", "true", user="bob", cwd=work, session=False))
    degraded = runs("bob")[0]["degraded"]
    assert any("memory" in one for one in degraded), degraded
    return degraded[0][:100]


def two_users():
    """Two users at once: neither sees, reads nor ends the other's run."""
    ok(run("loginctl", "enable-linger", "bob"))
    time.sleep(2)
    live = {}
    for user in ("ann", "bob"):
        work = folder(user, "together")
        live[user] = begin(user, work, f"echo secret-of-{user} >mine; sleep 120")
    deadline = time.time() + 60
    while time.time() < deadline and not all(any(one["state"] == "running" for one in runs(user)) for user in live):
        time.sleep(1)
    ids = {user: next(one["id"] for one in runs(user) if one["state"] == "running") for user in live}
    assert ids["ann"] not in str(runs("bob")) and ids["bob"] not in str(runs("ann"))
    state = pathlib.Path(pwd.getpwnam("ann").pw_dir) / ".local/state/tollgate"
    for words in (["kill", ids["ann"]], ["logs", ids["ann"]], ["kill", "--state", state, ids["ann"]], ["receipts", "--state", state]):
        assert tollgate(*words, user="bob").status != 0, words
    inside = tollgate("run", "--", "sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '; ls /home", user="bob", cwd=folder("bob", "look"))
    assert "secret-of-ann" not in inside.out and "ann" not in inside.out.split(), inside
    assert live["ann"].poll() is None
    for user in live:
        ok(tollgate("kill", ids[user], user=user))
        live[user].wait(60)
    assert all(one["state"] != "running" for user in live for one in runs(user))
    return ""


def crash():
    """kill -9 of the supervisor at random instants: nothing of the jail is left, the workspace is before or after."""
    told = {"before": 0, "after": 0}
    for number in range(12):
        work = folder("ann", f"crash-{number}")
        process = begin("ann", work, "i=0; while [ $i -lt 200 ]; do echo $i >file-$i; i=$((i+1)); done; exec true crash-mark")
        time.sleep(0.3 + 0.45 * number)
        process.send_signal(signal.SIGKILL)
        process.wait()
        time.sleep(1)
        left = run("pgrep", "-f", "crash-mark").out.split()
        assert not left, f"processes are left: {left}"
        runs("ann")
        count = len(list(work.iterdir()))
        assert count in (0, 200), f"{count} of 200 files"
        told["after" if count else "before"] += 1
    ok(tollgate("verify", "--all", user="ann"))
    open_runs = [one for one in runs("ann") if one["state"] in ("running", "starting", "applying")]
    assert not open_runs, open_runs
    return f"{told['before']} times before, {told['after']} times after"


def suite(name):
    def check():
        bins = HERE / "tests"
        env = {"TOLLGATE_BIN": "/usr/bin/tollgate", "TOLLGATE_BWRAP_MUST_WORK": "1", "RUST_BACKTRACE": "0", "TOLLGATE_TEST_SLOWNESS": "10",
               "TOLLGATE_TEST_SWITCHES": str(bins / "switches"), "TMPDIR": "/var/tmp"}
        done = run(bins / name, "--test-threads=2", env=env, timeout=3000)
        (pathlib.Path("/var/lib/check") / f"{name}.log").write_text(done.out + done.err)
        found = re.findall(r"test result: .*?(\d+) passed; (\d+) failed", done.out)
        if done.status != 0:
            failed = re.findall(r"^test (\S+) \.\.\. FAILED", done.out, re.M)
            raise AssertionError(f"failed: {', '.join(failed) or done}\n{done.out[-6000:]}")
        return f"{found[0][0]} passed" if found else ""
    check.__doc__ = f"tests/tests/{name}.rs, as root and as an ordinary user."
    check.__name__ = name
    return check


def apparmor():
    """Where user namespaces are restricted, the package's profile lets the shim make them."""
    knob = pathlib.Path("/proc/sys/kernel/apparmor_restrict_unprivileged_userns")
    parses = run("apparmor_parser", "-QK", "/usr/share/tollgate/apparmor/tollgate-shim").status == 0
    assert os.path.exists("/etc/apparmor.d/tollgate-shim") == parses
    if not knob.exists():
        return f"this kernel has no such restriction; the profile {'parses and is installed' if parses else 'needs a newer AppArmor'}"
    knob.write_text("1")
    try:
        ok(tollgate("run", "--", "true", user="ann", cwd=folder("ann", "apparmor")))
    finally:
        knob.write_text("0")
    return "works with the restriction on"


def leave_running():
    """A run is live while the machine reboots."""
    work = folder("ann", "reboot")
    begin("ann", work, "echo half >half; sleep 1000")
    deadline = time.time() + 60
    while time.time() < deadline and not any(one["state"] == "running" for one in runs("ann")):
        time.sleep(1)
    assert any(one["state"] == "running" for one in runs("ann")), runs("ann")
    os.sync()
    return ""


# After the power was cut.


def after_reboot():
    """The run that was live is closed as interrupted, its changes are not applied, and the ledger verifies."""
    listed = runs("ann")
    assert not any(one["state"] in ("running", "starting") for one in listed), listed[0]
    last = listed[0]
    assert last["outcome"]["type"] == "interrupted", last
    assert not (pathlib.Path(pwd.getpwnam("ann").pw_dir) / "reboot/half").exists()
    ok(tollgate("verify", "--all", user="ann"))
    ok(tollgate("run", "--", "true", user="ann", cwd=folder("ann", "again")))
    return ""


def purge():
    """Purging the package removes what it installed, and leaves the users' own ledgers."""
    ok(run("dpkg", "--purge", "tollgate"))
    left = [path for path in ("/usr/bin/tollgate", "/usr/bin/tollgate-shim", "/etc/tollgate", "/etc/apparmor.d/tollgate-shim",
                              "/usr/share/tollgate", "/usr/share/doc/tollgate") if os.path.exists(path)]
    assert not left, left
    assert (pathlib.Path(pwd.getpwnam("ann").pw_dir) / ".local/state/tollgate").is_dir()
    return ""


PHASES = [
    [install, doctor, first_run, python, limits, no_group, two_users, crash, apparmor,
     suite("attacks"), suite("layers"), suite("manners"), leave_running],
    [after_reboot, purge],
]


def tell(**result):
    RESULTS.write(json.dumps(result) + "\n")


def main():
    phase = int(PHASE.read_text()) if PHASE.exists() else 0
    PHASE.parent.mkdir(parents=True, exist_ok=True)
    PHASE.write_text(str(phase + 1))
    os.sync()
    wanted = set((HERE / "wanted").read_text().split()) if (HERE / "wanted").exists() else None
    if phase == 0:
        tell(kernel=os.uname().release)
        for user in ("ann", "bob", "tester"):
            run("useradd", "--create-home", "--shell", "/bin/sh", user)
            run("loginctl", "enable-linger", user)
        time.sleep(5)
    for check in PHASES[phase] if phase < len(PHASES) else []:
        if wanted and check.__name__ not in wanted:
            continue
        began = time.monotonic()
        try:
            note = check()
            tell(check=check.__name__, what=check.__doc__, ok=True, note=note, seconds=round(time.monotonic() - began, 1))
        except Exception as error:
            if not isinstance(error, AssertionError):
                error = traceback.format_exc()
            tell(check=check.__name__, what=check.__doc__, ok=False, note=str(error)[-8000:], seconds=round(time.monotonic() - began, 1))
    if phase + 1 < len(PHASES):
        # As if the power went: no service is stopped, nothing is told.
        os.sync()
        pathlib.Path("/proc/sys/kernel/sysrq").write_text("1")
        pathlib.Path("/proc/sysrq-trigger").write_text("b")
        time.sleep(60)
    tell(done=True)
    RESULTS.flush()
    subprocess.run(["systemctl", "poweroff", "--force", "--force"])


if __name__ == "__main__":
    main()
