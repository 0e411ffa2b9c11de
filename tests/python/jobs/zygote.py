"""Makes the processes of jobs: it has imported everything and forks one for each request.

``python zygote.py FD``. A request on the socket FD is a JSON object with ``role``, and three
descriptors: stdin, stdout and stderr of the new process. Messages back are ``{"pid": ...}`` for
each request in order, and ``{"exited": pid, "status": ...}``. It ends with the socket, and what it
made dies with it.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import selectors
import signal
import socket
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from jobs import worker

_SET_PARENT_DEATH_SIGNAL = 1
_MOST = 1 << 16


def _die_with_parent(parent: int) -> None:
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:  # it died before this was set
        os._exit(1)


def _reap(channel: socket.socket) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        code = os.waitstatus_to_exitcode(status)
        channel.send(json.dumps({"exited": pid, "status": code}).encode())


def _fork(role: str, streams: list[int], channel: socket.socket) -> str | None:
    """In the child: the role. In the parent: None."""
    parent = os.getpid()
    pid = os.fork()
    if pid != 0:
        for stream in streams:
            os.close(stream)
        channel.send(json.dumps({"pid": pid}).encode())
        return None
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _die_with_parent(parent)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.setpgid(0, 0)  # Ctrl-C is for the tests
    return role


def main() -> str | None:
    """Serve requests; returns the role in each process that it makes."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    wake, wakeup = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(wakeup, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.set_wakeup_fd(wakeup)
    gc.freeze()
    with selectors.DefaultSelector() as selector:
        selector.register(channel, selectors.EVENT_READ)
        selector.register(wake, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fd == wake:
                    os.read(wake, _MOST)
                    _reap(channel)
                    continue
                message, streams, _, _ = socket.recv_fds(channel, _MOST, 3)
                if not message:
                    return None
                role = _fork(json.loads(message)["role"], streams, channel)
                if role is not None:
                    channel.close()
                    os.close(wake)
                    os.close(wakeup)
                    return role


if __name__ == "__main__":
    _die_with_parent(os.getppid())
    found = main()
    if found is not None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        worker.serve(found)
