"""The processes of the demo: how one is started, spoken to, killed and reaped."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import Any

__all__ = ["Child", "DemoError", "RefusedError"]

_ROLES = "bascule.demo."


class DemoError(Exception):
    """Something that the demo does not survive."""


class RefusedError(Exception):
    """An error that the library answered with.

    Attributes
    ----------
    code : str
        That of the error, e.g. ``"NOT_DECIDED"``.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Child:
    """A child process and the pipe to it.

    Parameters
    ----------
    name
        For messages.
    role
        ``"module:class"`` in this package; see `bascule.demo.child`.
    folder
        Where its output goes.
    """

    def __init__(self, name: str, role: str, folder: Path) -> None:
        self.name = name
        self._log = folder / f"{name.replace(' ', '-')}-{time.monotonic_ns()}.log"
        self._pipe, theirs = Pipe()
        with theirs, self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "bascule.demo.child", _ROLES + role, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                env=_environment(folder),
            )

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self._process.pid

    @property
    def output(self) -> str:
        """What it has printed so far."""
        return self._log.read_text(errors="replace")

    def tell(self, method: str, **arguments: Any) -> None:
        """Call a method without waiting for its answer."""
        try:
            self._pipe.send((method, arguments))
        except OSError as error:
            raise self.failure(f"is gone; it was to do: {method}") from error

    def answer(self, timeout: float = 120.0) -> Any:
        """Wait for the answer to the earliest call that has none yet.

        Parameters
        ----------
        timeout
            Seconds.

        Raises
        ------
        RefusedError
            The library raised an error.
        DemoError
            No answer came in time, or the process ended.
        """
        try:
            if not self._pipe.poll(timeout):
                raise self.failure(f"did not answer within {timeout:.0f} s")
            kind, value = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise self.failure(f"ended unexpectedly ({self._how_it_ended()})") from error
        if kind == "refused":
            raise RefusedError(*value)
        if kind == "failed":
            raise DemoError(f"{self.name} failed:\n{value}")
        return value

    def ask(self, method: str, *, patience: float = 120.0, **arguments: Any) -> Any:
        """Call a method and wait for its answer, at most ``patience`` seconds."""
        self.tell(method, **arguments)
        return self.answer(patience)

    def failure(self, what: str) -> DemoError:
        """Return an error that says ``what`` and shows the last lines of this process."""
        return DemoError(f"{self.name} (process {self.pid}) {what}.\n{self.last_lines()}")

    def last_lines(self, count: int = 12) -> str:
        """Return the end of what it printed."""
        lines = self.output.splitlines()[-count:] or ["(it printed nothing)"]
        return "\n".join(f"  {self.name} | {line}" for line in lines)

    def _how_it_ended(self) -> str:
        try:
            code = self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            return "it still runs, but closed its pipe"
        return f"by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def kill(self) -> None:
        """Send SIGKILL and reap it."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        self.reap()

    def reap(self, timeout: float = 20.0) -> None:
        """Wait for its end, however that came."""
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise self.failure("does not end") from None
        self.hang_up()

    def hang_up(self) -> None:
        """Close the pipe, upon which the process ends by itself."""
        self._pipe.close()

    def end(self, timeout: float = 5.0) -> None:
        """End it: politely for ``timeout`` seconds, then by SIGKILL."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.hang_up()
            self._process.wait(timeout)
        self.kill()


def _environment(folder: Path) -> dict[str, str]:
    return {
        **os.environ,
        "TMPDIR": str(folder),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",  # eight processes share a few cores
        "GLOO_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_VERBOSITY": "error",
    }
