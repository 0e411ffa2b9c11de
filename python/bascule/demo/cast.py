"""Who plays: the coordinator, the trainer world and the two engines, each in its processes."""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import bascule
from bascule.demo.model import Prepared
from bascule.demo.process import Child

__all__ = ["E0_RANKS", "TRAINERS", "Cast"]

TRAINERS = 2
E0_RANKS = 3
# The vocabulary of e0 is padded to a multiple of this, as engines do, and beyond the model's by it.
_PADDING = 64 * E0_RANKS
_JOIN_SECONDS = 180.0
# What the processes are, in this package.
_COORDINATOR = "coordinator:Coordinator"
_TRAINER = "trainer:Trainer"
_E0_RANK = "rollout_e0:TensorParallelRank"
_E1 = "rollout_e1:PlainRank"


class Cast:
    """All processes of the demo; none outlives it.

    Parameters
    ----------
    folder
        For their files.

    Attributes
    ----------
    trainers, e0 : list of Child
        By rank.
    e1 : Child
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._job = bascule.Job(name=f"demo-{secrets.token_hex(4)}", token=secrets.token_hex(16))
        self._address = "127.0.0.1:0"
        self._all: list[Child] = []
        self._lives = 0  # of the trainer world
        self.start_coordinator()
        self.trainers = [self._start(_TRAINER, f"trainer {r}") for r in range(TRAINERS)]
        self.e1 = self._start(_E1, "e1")
        self.e0 = [self._start(_E0_RANK, f"e0 rank {r}") for r in range(E0_RANKS)]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.end(seconds=5.0 if kind is None else 0.0)

    @property
    def rollouts(self) -> list[Child]:
        """All ranks of both engines."""
        return [*self.e0, self.e1]

    # ---- the first life of everyone

    def join(self, model: Prepared, seed: int) -> None:
        """Let all ranks meet at the coordinator.

        Parameters
        ----------
        model
            What is trained.
        seed
            Of e1's random weights.
        """
        self._model = model
        self._join_trainers(resume=None)
        for rank in range(E0_RANKS):
            self._tell_e0(rank)
        self._tell(self.e1, model=model.folder, prompt=model.prompt, seed=seed)
        self.gather(self.rollouts, _JOIN_SECONDS)

    def start_coordinator(self) -> None:
        """Start the coordinator, the second time at the address of the first."""
        self.coordinator = self._start(_COORDINATOR, "coordinator")
        self.coordinator.ask("begin", job=dataclasses.replace(self._job, listen=self._address))
        self._address = self.coordinator.ask("address")
        self._job = dataclasses.replace(self._job, coordinator=self._address)

    # ---- further lives

    def restart_e0_rank(self, rank: int) -> None:
        """Start a rank of e0 again, after its process was killed; it joins with nothing."""
        self.e0[rank] = self._start(_E0_RANK, f"e0 rank {rank}")
        self._tell_e0(rank)
        self.e0[rank].answer(_JOIN_SECONDS)

    def restart_trainers(self, checkpoint: Path) -> None:
        """End what is left of the trainer world and start all of it from a checkpoint.

        Parameters
        ----------
        checkpoint
            Written by the trainers.
        """
        for child in self.trainers:
            child.end()
        self.trainers = [self._start(_TRAINER, f"trainer {r}") for r in range(TRAINERS)]
        self._join_trainers(resume=checkpoint)

    # ---- all at once

    def gather(self, children: Sequence[Child], seconds: float = 120.0) -> list[Any]:
        """Return the answers of several processes.

        Parameters
        ----------
        children
            Each was told something.
        seconds
            For all together.
        """
        end = time.monotonic() + seconds
        return [child.answer(max(1.0, end - time.monotonic())) for child in children]

    def ask_all(self, children: Sequence[Child], method: str, **arguments: Any) -> list[Any]:
        """Call a method on several processes at once and return their answers."""
        for child in children:
            child.tell(method, **arguments)
        return self.gather(children)

    def last_lines(self) -> str:
        """Return what each process printed last."""
        return "\n".join(child.last_lines() for child in self._all)

    def end(self, seconds: float) -> None:
        """End all processes: politely for some seconds, then by SIGKILL."""
        members = [child for child in self._all if child is not self.coordinator]
        for child in members:
            child.hang_up()
        end = time.monotonic() + seconds
        for child in [*members, self.coordinator]:
            child.end(max(0.0, end - time.monotonic()))

    # ---- in short

    def _start(self, role: str, name: str) -> Child:
        child = Child(name, role, self._folder)
        self._all.append(child)
        return child

    def _tell(self, child: Child, **options: Any) -> None:
        """Send the options that a process begins with."""
        child.tell("begin", job=self._job, **options)

    def _tell_e0(self, rank: int) -> None:
        vocabulary = self._model.config["vocab_size"]
        self._tell(
            self.e0[rank],
            rank=rank,
            world_size=E0_RANKS,
            config=self._model.config,
            padded_vocabulary=(vocabulary // _PADDING + 2) * _PADDING,
        )

    def _join_trainers(self, resume: Path | None) -> None:
        self._lives += 1
        for rank, child in enumerate(self.trainers):
            self._tell(
                child,
                rank=rank,
                world_size=TRAINERS,
                model=self._model.folder,
                tokens=self._model.texts[rank],
                learning_rate=self._model.learning_rate,
                rendezvous=self._folder / f"rendezvous-{self._lives}",
                resume=resume,
            )
        self.gather(self.trainers, _JOIN_SECONDS)
