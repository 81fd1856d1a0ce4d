"""What every Python probe shares: it tries something and reports, one JSON object a line.

A line is {"name", "result": "ok" | "error", "errno": name or null, "detail"}. The last line is {"name": "end"}, so that
a probe that was killed half way is not taken for one that found nothing.
"""

import ctypes
import errno
import json
import os
import signal
import sys

libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long


class Refused(Exception):
    """An attempt that did not get what it wanted, though no call failed."""


def report(name, result, number=None, detail=""):
    line = {
        "name": name,
        "result": result,
        "errno": errno.errorcode.get(number, str(number)) if number is not None else None,
        "detail": str(detail)[:300],
    }
    os.write(1, (json.dumps(line) + "\n").encode())


def out_of_time(number, frame):
    raise OSError(errno.ETIMEDOUT, "no answer")


def attempt(name, function):
    """Runs one attempt in this process; one that gets no answer is ETIMEDOUT, so that the others have their turn."""
    signal.signal(signal.SIGALRM, out_of_time)
    signal.alarm(5)
    try:
        try:
            detail = function()
        finally:
            signal.alarm(0)
    except OSError as failure:
        if failure.errno is None:
            # Name look-ups and time-outs carry no kernel error number of their own.
            report(name, "error", errno.ETIMEDOUT if isinstance(failure, TimeoutError) else errno.EIO, failure)
        else:
            report(name, "error", failure.errno, failure)
    except Refused as failure:
        report(name, "error", errno.EPERM, failure)
    else:
        report(name, "ok", None, detail if detail is not None else "")


def attempt_in_child(name, function):
    """Runs one attempt in a child, for what could hang, kill or change the process that tries it."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        attempt(name, function)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        report(name, "killed", None, "signal %d" % os.WTERMSIG(status))


def syscall(number, *arguments):
    """A raw system call; raises OSError with its error number."""
    ctypes.set_errno(0)
    wide = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    result = libc.syscall(ctypes.c_long(number), *wide)
    if result == -1:
        number_of_error = ctypes.get_errno()
        raise OSError(number_of_error, os.strerror(number_of_error))
    return result


def end():
    report("end", "ok")
