"""The other end of a child's pipe: ``python -m bascule.demo.child MODULE:CLASS FD``.

The child builds an object of the class from the options that it is sent first. Then each message
is a call of one of its methods, and each answer what that returned.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import signal
import sys
import traceback
from multiprocessing.connection import Connection

import bascule

__all__ = ["serve"]


def serve(role: str, pipe: Connection) -> None:
    """Answer calls until the pipe is closed.

    Parameters
    ----------
    role
        ``"module:class"``.
    pipe
        From the parent.
    """
    module, name = role.split(":")
    make = getattr(importlib.import_module(module), name)  # may take seconds: before any message
    target: object | None = None
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:
            return
        try:
            if target is None:
                target, value = make(**arguments), None
            else:
                value = getattr(target, method)(**arguments)
        except bascule.Error as error:
            pipe.send(("refused", (error.code, str(error))))
        except Exception:
            pipe.send(("failed", traceback.format_exc()))
        else:
            pipe.send(("done", value))


def _die_with_parent() -> None:
    """Be sent SIGKILL when the parent is gone, however it went."""
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


if __name__ == "__main__":
    _die_with_parent()
    with Connection(int(sys.argv[2])) as parent, contextlib.suppress(KeyboardInterrupt, OSError):
        serve(sys.argv[1], parent)
