"""The coordinator in a process of its own, as ``bascule serve`` runs it."""

from __future__ import annotations

import bascule

__all__ = ["Coordinator"]


class Coordinator:
    """Serves until its process ends.

    Parameters
    ----------
    job
        Its ``listen`` is the address.
    """

    def __init__(self, job: bascule.Job) -> None:
        self._server = bascule.CoordinatorServer.start(job)

    def address(self) -> str:
        """Return the ``host:port`` as bound."""
        return self._server.address
