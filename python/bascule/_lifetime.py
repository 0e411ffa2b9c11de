"""The end of the process: sessions are closed, and threads in the core do not come back."""

from __future__ import annotations

import atexit
import contextlib
import os
import time
import weakref
from typing import Protocol

from bascule import _bascule, _logging

# Seconds that the sessions of a process together get to leave their jobs at exit.
_EXIT_SECONDS = 2.0


class _Closable(Protocol):
    def close(self, *, timeout: float) -> None: ...


_sessions: weakref.WeakSet[_Closable] = weakref.WeakSet()
_registered = False


def register(session: _Closable) -> None:
    """Close ``session`` at exit unless it is gone by then. Call it before connecting others."""
    global _registered
    if not _registered:
        _registered = True
        atexit.register(_close_all)
        os.register_at_fork(after_in_child=_forget_all)
    _logging.pass_on()
    _sessions.add(session)


def _close_all() -> None:
    end = time.monotonic() + _EXIT_SECONDS
    for session in list(_sessions):
        with contextlib.suppress(Exception):
            session.close(timeout=max(0.1, end - time.monotonic()))
    _logging.flush()
    _bascule.wait_abandoned(timeout=max(0.1, end - time.monotonic()))
    _bascule.park_threads()


def _forget_all() -> None:
    _sessions.clear()
    _bascule.forget_abandoned()
