"""What has to work in the jail with no network: local sockets, shared memory, semaphores, terminals, processes."""

import os
import socket
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from probe import attempt, attempt_in_child, end


def echo(family, address):
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.bind(address)
        listener.listen(1)
        if os.fork() == 0:
            with socket.socket(family, socket.SOCK_STREAM) as plug:
                plug.connect(listener.getsockname())
                plug.sendall(b"hi")
            os._exit(0)
        connection, _ = listener.accept()
        with connection:
            assert connection.recv(2) == b"hi"
        os.wait()


def pair():
    a, b = socket.socketpair()
    a.sendall(b"x")
    assert b.recv(1) == b"x"


def descriptor_passing():
    a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    read, write = os.pipe()
    socket.send_fds(a, [b"x"], [write])
    _, descriptors, _, _ = socket.recv_fds(b, 1, 1)
    os.write(descriptors[0], b"y")
    assert os.read(read, 1) == b"y"


def pools():
    from concurrent.futures import ProcessPoolExecutor
    with ProcessPoolExecutor(2) as pool:
        assert sum(pool.map(abs, range(-3, 4))) == 12


def shared_memory():
    from multiprocessing import shared_memory
    block = shared_memory.SharedMemory(create=True, size=4096)
    block.buf[0] = 7
    block.close()
    block.unlink()


def semaphores():
    import multiprocessing
    lock = multiprocessing.Semaphore(1)
    assert lock.acquire(timeout=1)


def terminal():
    import pty
    master, slave = pty.openpty()
    os.write(slave, b"x")
    assert os.read(master, 1) == b"x"


def signals():
    import signal
    child = os.fork()
    if child == 0:
        signal.pause()
    os.kill(child, signal.SIGTERM)
    assert os.waitpid(child, 0)[1] == signal.SIGTERM


def debugging_own_child():
    """A debugger of one's own child is ordinary work."""
    open("/proc/self/maps").read()


def executable_files():
    with open("run-me", "w") as file:
        file.write("#!/bin/sh\nexit 7\n")
    os.chmod("run-me", 0o755)
    import subprocess
    assert subprocess.call(["./run-me"]) == 7


attempt("stream-at-path", lambda: echo(socket.AF_UNIX, "l.sock"))
attempt("stream-at-abstract-name", lambda: echo(socket.AF_UNIX, "\0inside"))
attempt("stream-at-tmp-path", lambda: echo(socket.AF_UNIX, "/tmp/l.sock"))
attempt("stream-at-loopback", lambda: echo(socket.AF_INET, ("127.0.0.1", 0)))
attempt("stream-at-loopback-6", lambda: echo(socket.AF_INET6, ("::1", 0)))
attempt("socket-pair", pair)
attempt("descriptor-passing", descriptor_passing)
attempt("process-pool", pools)
attempt("shared-memory", shared_memory)
attempt("semaphores", semaphores)
attempt("terminal", terminal)
attempt_in_child("signals", signals)
attempt("own-maps", debugging_own_child)
attempt("executable-in-workspace", executable_files)
attempt("random", lambda: os.getrandom(16))
attempt("route-netlink", lambda: socket.if_nameindex())
attempt("memory-file", lambda: os.memfd_create("x"))
end()
