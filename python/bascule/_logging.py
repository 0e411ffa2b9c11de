"""What sessions tell Python's ``logging``: quiet until the application sets it up.

The logger is ``bascule``. One line at INFO for each publication of a trainer rank and for each
committed update of a rollout rank; steps at DEBUG. docs/cli.md has the fields.
"""

from __future__ import annotations

import contextlib
import logging
import re
import threading
from typing import Any, Protocol

from bascule import _bascule
from bascule.report import Report, VersionId

__all__ = ["SessionLog", "flush", "logger", "pass_on"]

logger = logging.getLogger("bascule")
logger.addHandler(logging.NullHandler())


# By the core's levels.
_LEVELS = (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR)


# How the core begins a line.
_TRAINER = re.compile(r"trainer (\d+): ")
_ROLLOUT = re.compile(r"engine (.+?) rank (\d+): ")

_thread: threading.Thread | None = None
_thread_lock = threading.Lock()


def pass_on() -> None:
    """Start to pass lines of the core on to the logger, where no thread does so yet.

    The core's own threads never enter Python. At exit the thread is left to itself: it waits in the
    core, out of which no thread comes back then.
    """
    global _thread
    with _thread_lock:
        if _thread is None or not _thread.is_alive():  # it does not live on in a forked child
            _thread = threading.Thread(target=_pass_on_for_ever, name="bascule-log", daemon=True)
            _thread.start()


def _pass_on_for_ever() -> None:
    while True:
        flush(timeout=3600.0)


def flush(timeout: float = 0.0) -> None:
    """Pass on the lines that the core has.

    Parameters
    ----------
    timeout
        Seconds to wait for one.
    """
    for level, text in _bascule.take_logs(timeout):
        fields: dict[str, Any] = {"rank": None, "engine": None}
        if match := _TRAINER.match(text):
            fields["rank"] = int(match[1])
        elif match := _ROLLOUT.match(text):
            fields = {"rank": int(match[2]), "engine": match[1]}
        with contextlib.suppress(Exception):
            logger.log(_LEVELS[level], "%s", text, extra=fields)


class _Version(Protocol):
    @property
    def id(self) -> VersionId: ...
    def report(self) -> Report: ...


class SessionLog:
    """Logs for one rank. Every record has ``rank`` and ``engine`` (None for a trainer).

    Parameters
    ----------
    rank
        In the trainer world, or in the engine.
    engine
        Of a rollout rank.
    """

    def __init__(self, rank: int, engine: str | None = None) -> None:
        self._fields = {"rank": rank, "engine": engine}
        self.who = f"trainer {rank}" if engine is None else f"engine {engine} rank {rank}"

    def step(self, what: str, of: _Version | None = None) -> None:
        """Tell of a step at DEBUG.

        Parameters
        ----------
        what
            Was done.
        of
            It was done to this publication or update.
        """
        if not logger.isEnabledFor(logging.DEBUG):
            return
        if of is None:
            self._log(logging.DEBUG, "%s: %s", self.who, what)
        else:
            version = of.id
            self._log(
                logging.DEBUG, "%s: version %d: %s", self.who, version.version, what, **_id(version)
            )

    def published(self, done: _Version) -> None:
        """Tell of a publication at INFO.

        Parameters
        ----------
        done
            The publication.
        """
        if not logger.isEnabledFor(logging.INFO):
            return
        report = done.report()
        self._log(
            logging.INFO,
            "%s: published version %d in %.1f ms, %.3f GB",
            self.who,
            report.id.version,
            report.phases.publish * 1e3,
            report.bytes / 1e9,
            **_id(report.id),
            publish=report.phases.publish,
            bytes=report.bytes,
        )

    def committed(self, done: _Version) -> None:
        """Tell of a committed update at INFO.

        Parameters
        ----------
        done
            The update.
        """
        if not logger.isEnabledFor(logging.INFO):
            return
        report = done.report()
        self._log(
            logging.INFO,
            "%s: committed version %d: EWTT %.3f s, stall %.1f ms, %.3f GB",
            self.who,
            report.id.version,
            report.ewtt,
            report.phases.stall * 1e3,
            report.bytes / 1e9,
            **_id(report.id),
            ewtt=report.ewtt,
            stall=report.phases.stall,
            bytes=report.bytes,
        )

    def _log(self, level: int, message: str, *values: Any, **fields: Any) -> None:
        # A filter of the application that raises must not make a committed update look failed.
        with contextlib.suppress(Exception):
            logger.log(level, message, *values, extra=self._fields | fields, stacklevel=4)


def _id(version: VersionId) -> dict[str, int]:
    return {"term": version.term, "version": version.version}
