"""What the ranks of both engines do: follow the trainers, one update at a time."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

import bascule

__all__ = ["Followed", "Rollout"]

# Calls of Update.ready before a rank tries to commit anyway; as many on every rank of an engine.
_READY_CALLS = 100


@dataclass(frozen=True)
class Followed:
    """What an update of e1 was like.

    Attributes
    ----------
    report
        Of the library.
    tokens
        How many tokens it wrote while the version landed; None when it served nothing then.
    """

    report: bascule.Report
    tokens: int | None


class Rollout:
    """One rollout rank.

    Parameters
    ----------
    receiver
        Joined to the job.
    """

    def __init__(self, receiver: bascule.WeightReceiver) -> None:
        self._receiver = receiver

    @classmethod
    def connect(
        cls, job: bascule.Job, engine: str, rank: int, world_size: int, layout: bascule.Layout
    ) -> bascule.WeightReceiver:
        """Join. The number of a rank that died is free once its silence has become its end."""
        end = time.monotonic() + 30
        while True:
            try:
                return bascule.WeightReceiver.connect(
                    job, engine=engine, rank=rank, world_size=world_size, layout=layout
                )
            except bascule.AlreadyExists:
                if time.monotonic() > end:
                    raise
                time.sleep(0.2)

    def serving(self) -> bascule.VersionId | None:
        """Return what the live weights are."""
        return self._receiver.serving

    def check_engine_servable(self) -> None:
        """Raise why the engine may not generate, if it may not."""
        self._receiver.check_engine_servable()

    def poll(self, timeout: float = 30.0) -> bascule.VersionId | None:
        """Ask for something newer, and leave it alone."""
        update = self._receiver.poll(timeout=timeout)
        return None if update is None else update.id

    def update(
        self, commit_timeout: float = 60.0, meanwhile: Callable[[], object] | None = None
    ) -> bascule.Report | None:
        """Move to the newest version.

        Parameters
        ----------
        commit_timeout
            Seconds that the ranks which are ready wait for the others at the end.
        meanwhile
            What the rank goes on doing, again and again, while the version lands.

        Returns
        -------
        bascule.Report or None
            None when there was nothing newer.
        """
        update = self._receiver.poll()
        if update is None:
            return None
        update.stage()
        while meanwhile is not None and self._receiver.state is bascule.ReceiverState.STAGING:
            meanwhile()
        update.wait_staged()
        for _ in range(_READY_CALLS):
            if update.ready():
                break
            time.sleep(0.02)
        update.commit(timeout=commit_timeout)  # the only part that pauses the engine
        return update.report()

    def die_while_staging(self) -> None:
        """Begin an update and be killed in the middle of it."""
        update = self._receiver.poll()
        assert update is not None
        update.stage()
        if self._receiver.state is bascule.ReceiverState.STAGING:
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError("the version had landed already")
