"""The processes of a job as the tests see them: started, asked, stopped, killed and reaped."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

__all__ = ["Call", "CallError", "DiedError", "OverdueError", "Process", "Zygote"]

# Seconds that an answer may come later than its deadline before a test gives up on it. How much
# later it did come is checked apart: see `Job.finish`.
PATIENCE = 60.0


class CallError(Exception):
    """An error of bascule that a process answered with.

    Attributes
    ----------
    type : str
        The name of its class, e.g. ``"Retired"``.
    message : str
    rank : int or None
    peer : str or None
    tensor : str or None
    """

    def __init__(self, who: str, call: str, fields: dict[str, Any]) -> None:
        super().__init__(f"{who}: {call}: {fields}")
        self.type: str = fields["type"]
        self.message: str = fields["message"]
        self.rank: int | None = fields["rank"]
        self.peer: str | None = fields["peer"]
        self.tensor: str | None = fields["tensor"]
        self.cause: str | None = fields["cause"]


class OverdueError(Exception):
    """A call did not end by its deadline and long after."""


class DiedError(Exception):
    """The process ended before it answered."""


class Zygote:
    """Forks the processes of jobs. Make it on the main thread: what it makes dies with that.

    Parameters
    ----------
    environment
        Variables that they have beyond this process's.
    """

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        path = Path(__file__).with_name("zygote.py")
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, str(path), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": "1",
                    "OPENBLAS_NUM_THREADS": "1",
                    **(environment or {}),
                },
            )
        self._lock = threading.Lock()
        self._changed = threading.Condition(threading.Lock())
        self._pids: list[int] = []
        self._exits: dict[int, int] = {}
        self._over = False
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        while True:
            try:
                message = self._channel.recv(1 << 16)
            except OSError:
                message = b""
            with self._changed:
                if not message:
                    self._over = True
                    self._changed.notify_all()
                    return
                told = json.loads(message)
                if "pid" in told:
                    self._pids.append(told["pid"])
                    self._exits.pop(told["pid"], None)  # numbers are given again
                else:
                    self._exits[told["exited"]] = told["status"]
                self._changed.notify_all()

    def spawn(self, role: str, streams: list[int]) -> int:
        """Make a process; its number.

        Parameters
        ----------
        role
            See `jobs.worker.ROLES`.
        streams
            Its stdin, stdout and stderr.
        """
        with self._lock:
            socket.send_fds(self._channel, [json.dumps({"role": role}).encode()], streams)
            with self._changed:
                made = self._changed.wait_for(lambda: self._pids or self._over, 60)
                if not made or self._over:
                    raise RuntimeError("the zygote makes no process")
                return self._pids.pop()

    def exit_code(self, pid: int, timeout: float) -> int | None:
        """Wait for the end of a process; None when it goes on.

        Parameters
        ----------
        pid
            Its number.
        timeout
            Seconds.
        """
        with self._changed:
            self._changed.wait_for(lambda: pid in self._exits or self._over, timeout)
            return self._exits.get(pid)

    def close(self) -> None:
        """End it and all that it made."""
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._channel.close()


class Call:
    """A call that a process was asked for."""

    def __init__(self, process: Process, name: str, timeout: float) -> None:
        self.name = name
        self.timeout = timeout
        self.took: float | None = None
        self.stopped = False  # the process was stopped meanwhile: its times say nothing
        self.process = process
        self._answer: dict[str, Any] | None = None
        self._done = threading.Event()

    @property
    def done(self) -> bool:
        """True when there is an answer, or none will come."""
        return self._done.is_set()

    def resolve(self, answer: dict[str, Any] | None) -> None:
        """Take the answer; None: the process ended."""
        self._answer = answer
        self.took = None if answer is None else answer["took"]
        self._done.set()

    def result(self, patience: float = PATIENCE) -> Any:
        """Return what the call returned; raise what it raised.

        Parameters
        ----------
        patience
            Seconds beyond the call's deadline.
        """
        if not self._done.wait(self.timeout + patience):
            raise OverdueError(f"{self.process.name}: {self.name}({self.timeout} s) goes on")
        if self._answer is None:
            raise DiedError(f"{self.process.name} ended in {self.name}\n{self.process.log()}")
        if "error" in self._answer:
            raise CallError(self.process.name, self.name, self._answer["error"])
        if "failed" in self._answer:
            raise AssertionError(f"{self.process.name}: {self._answer['failed']}")
        return self._answer["ok"]

    def error(self, patience: float = PATIENCE) -> CallError | None:
        """Return the error of bascule that the call raised; None when it returned.

        Parameters
        ----------
        patience
            As for `result`.
        """
        try:
            self.result(patience)
        except CallError as error:
            return error
        return None


class Process:
    """A process of a job.

    Parameters
    ----------
    zygote
        That makes it.
    name
        For messages, e.g. ``"trainer 0"``.
    role
        See `jobs.worker.ROLES`.
    folder
        Where what it prints to stderr goes.
    """

    def __init__(self, zygote: Zygote, name: str, role: str, folder: Path) -> None:
        self.name = name
        #: Calls that ended later than their deadlines: which, and seconds.
        self.late: list[tuple[str, float]] = []
        self.ended_by_us = False
        self._zygote = zygote
        self._log = folder / f"{name.replace(' ', '-')}-{time.monotonic_ns()}.log"
        stdin, ours_in = os.pipe()
        ours_out, stdout = os.pipe()
        with self._log.open("wb") as log:
            self.pid = zygote.spawn(role, [stdin, stdout, log.fileno()])
        os.close(stdin)
        os.close(stdout)
        self._stdin: TextIO = os.fdopen(ours_in, "w")
        self._stdout: TextIO = os.fdopen(ours_out)
        self._lock = threading.Lock()
        self._pending: dict[int, Call] = {}
        self._next = 0
        self._over = False
        self._is_stopped = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self._stdout:
            answer = json.loads(line)
            with self._lock:
                call = self._pending.pop(answer["id"])
            call.resolve(answer)
            late = answer["took"] - call.timeout
            if late > 0 and not call.stopped:
                self.late.append((call.name, late))
        with self._lock:
            self._over = True
            pending = list(self._pending.values())
            self._pending.clear()
        for call in pending:
            call.resolve(None)

    def begin(self, call: str, *, deadline: float | None = None, **arguments: Any) -> Call:
        """Start a call without waiting for its answer.

        Parameters
        ----------
        call
            A method of the process's role.
        deadline
            Seconds in which it must end where it has no ``timeout`` of its own.
        """
        timeout = float(arguments.get("timeout", 10.0) if deadline is None else deadline)
        begun = Call(self, call, timeout)
        begun.stopped = self._is_stopped
        with self._lock:
            number = self._next
            self._next += 1
            if not self._over:
                self._pending[number] = begun
        if number not in self._pending:
            begun.resolve(None)
            return begun
        # A process that died meanwhile: the reader resolves the call.
        with contextlib.suppress(OSError, ValueError), self._lock:
            self._stdin.write(json.dumps({"id": number, "call": call, **arguments}) + "\n")
            self._stdin.flush()
        return begun

    def ask(self, call: str, *, patience: float = PATIENCE, **arguments: Any) -> Any:
        """Call and wait for the answer."""
        return self.begin(call, **arguments).result(patience)

    def error(self, call: str, *, patience: float = PATIENCE, **arguments: Any) -> CallError | None:
        """Call and return the error of bascule, if there was one."""
        return self.begin(call, **arguments).error(patience)

    @property
    def alive(self) -> bool:
        """True until its end is known."""
        return self._zygote.exit_code(self.pid, 0) is None

    def signal(self, number: int) -> None:
        """Send a signal; nothing happens where it is gone."""
        if number in (signal.SIGKILL, signal.SIGTERM):
            self.ended_by_us = True
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def stop(self) -> None:
        """SIGSTOP, and wait until every thread of it has stopped."""
        self._is_stopped = True
        with self._lock:
            for call in self._pending.values():
                call.stopped = True
        self.signal(signal.SIGSTOP)
        end = time.monotonic() + 30
        while self.alive and not self._all_stopped():
            if time.monotonic() > end:
                raise OverdueError(f"{self.name} does not stop")
            time.sleep(0.001)

    def _all_stopped(self) -> bool:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for task in Path(f"/proc/{self.pid}/task").iterdir():
                state = (task / "stat").read_text().rpartition(")")[2].split()[0]
                if state not in "TtZX":
                    return False
        return True

    def resume(self) -> None:
        """SIGCONT."""
        self.signal(signal.SIGCONT)
        self._is_stopped = False

    def kill(self) -> None:
        """SIGKILL, and wait for its end."""
        self.signal(signal.SIGKILL)
        if self.exit_code(30) is None:
            raise OverdueError(f"{self.name} does not end although it was killed")
        self._reader.join(30)

    def terminate(self) -> None:
        """SIGTERM, as a launcher sends it."""
        self.signal(signal.SIGTERM)

    def exit_code(self, timeout: float) -> int | None:
        """Wait for its end; None when it goes on.

        Parameters
        ----------
        timeout
            Seconds.
        """
        return self._zygote.exit_code(self.pid, timeout)

    def log(self) -> str:
        """Return the end of what it printed to stderr."""
        return self._log.read_text(errors="replace")[-2000:]

    def end(self) -> None:
        """Kill it, if it lives, and let go of it."""
        self.kill()
        for stream in (self._stdin, self._stdout):
            with contextlib.suppress(OSError, ValueError):
                stream.close()
