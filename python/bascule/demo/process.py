"""The processes of the demo: how one is started, spoken to, killed and reaped."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

__all__ = ["Child", "DemoError", "RefusedError"]


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
    command
        Arguments of the Python interpreter.
    folder
        Where its output goes.
    piped
        Whether it takes calls: the number of its end of the pipe is then its last argument.
    """

    def __init__(self, name: str, command: list[str], folder: Path, *, piped: bool = True) -> None:
        self.name = name
        self._log = folder / f"{name.replace(' ', '-')}-{time.monotonic_ns()}.log"
        self._pipe: Connection | None = None
        theirs: Connection | None = None
        descriptors: tuple[int, ...] = ()
        if piped:
            self._pipe, theirs = Pipe()
            descriptors = (theirs.fileno(),)
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-u", *command, *map(str, descriptors)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=descriptors,
                env=_environment(),
            )
        if theirs is not None:
            theirs.close()

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    @property
    def output(self) -> str:
        """What it has printed so far."""
        return self._log.read_text(errors="replace")

    def tell(self, method: str, **arguments: Any) -> None:
        """Call a method without waiting for its answer."""
        assert self._pipe is not None
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
        assert self._pipe is not None
        try:
            if not self._pipe.poll(timeout):
                raise self.failure(f"did not answer within {timeout:.0f} s")
            kind, value = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise self.failure("ended unexpectedly") from error
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
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None
        elif self._process.poll() is None:
            self._process.terminate()

    def end(self, timeout: float = 5.0) -> None:
        """End it: politely for ``timeout`` seconds, then by SIGKILL."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.hang_up()
            self._process.wait(timeout)
        self.kill()


def _environment() -> dict[str, str]:
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",  # eight processes share a few cores
        "GLOO_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_VERBOSITY": "error",
    }
