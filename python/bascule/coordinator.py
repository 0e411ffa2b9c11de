"""The coordinator alone, where it outlives the trainers."""

from __future__ import annotations

import json
from types import TracebackType
from typing import Any, Self

from bascule import _bascule, _lifetime
from bascule.job import Job

__all__ = ["CoordinatorServer", "coordinator_status"]


def coordinator_status(address: str, token: str = "", *, timeout: float = 5.0) -> dict[str, Any]:
    """Ask a coordinator for members, term and versions, from a process that is no member.

    Parameters
    ----------
    address
        The ``host:port`` of the coordinator.
    token
        The job's token.
    timeout
        Seconds; after them ``Unavailable`` is raised.
    """
    status: dict[str, Any] = json.loads(_bascule.coordinator_status_json(address, token, timeout))
    return status


class CoordinatorServer:
    """Keeps members, terms and versions of a job. Use `start`; a context manager.

    It is never in the data path. ``bascule serve`` runs one.
    """

    def __init__(self, native: _bascule.CoordinatorServer) -> None:
        self._native = native
        _lifetime.register(self)

    @classmethod
    def start(cls, job: Job) -> Self:
        """Start to serve at ``job.listen``.

        Parameters
        ----------
        job
            The job; ``coordinator`` is not used.
        """
        return cls(_bascule.CoordinatorServer.start(job._native()))

    @property
    def address(self) -> str:
        """The ``host:port`` as bound."""
        return self._native.address

    def status(self) -> dict[str, Any]:
        """Return members, term and versions, as docs/protocol.md describes them."""
        status: dict[str, Any] = json.loads(self._native.status_json())
        return status

    def stop(self) -> None:
        """Stop serving. The state is rebuilt from the members when another one starts."""
        self._native.stop()

    def close(self, *, timeout: float = 1.0) -> None:
        """Stop serving; like `stop`.

        Parameters
        ----------
        timeout
            Not used: it waits for nobody.
        """
        del timeout
        self.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()
