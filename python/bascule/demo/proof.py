"""Brings what the engines hold before the checker."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from bascule.demo import check
from bascule.demo.cast import E0_RANKS, Cast
from bascule.demo.model import Prepared
from bascule.demo.process import Child

__all__ = ["Proof"]


class Proof:
    """The trainers' state dict of the newest version, and what is compared with it.

    Parameters
    ----------
    cast
        The processes.
    model
        What is trained.
    folder
        For files.
    """

    def __init__(self, cast: Cast, model: Prepared, folder: Path) -> None:
        self._cast = cast
        self._model = model
        self._folder = folder
        self._reference = folder / "reference.pt"
        self._e0: list[check.Arrays] = []  # what its ranks held when it was verified last

    def keep_reference(self) -> None:
        """Let the trainers write down their whole state dict, which they publish next."""
        self._reference.unlink(missing_ok=True)  # a new file: the old one may be mapped
        self._cast.ask_all(self._cast.trainers, "dump", path=self._reference)

    def wrong(self, version: int) -> list[str]:
        """Compare both engines with the reference and name all that differs.

        Parameters
        ----------
        version
            What they are to serve.
        """
        wrong = [f"{name} on e0" for name in self._wrong_on_e0()]
        wrong += [f"{name} on e1" for name in self._wrong_on_e1()]
        for rank in self._cast.rollouts:
            serving = rank.ask("serving")
            if serving is None or serving.version != version:
                wrong.append(f"{rank.name}, which serves {serving}")
        return wrong

    def unchanged(self, rank: int) -> bool:
        """Tell whether a rank of e0 holds the bits that it held when e0 was verified last.

        Parameters
        ----------
        rank
            Of e0.
        """
        now, before = self._read(self._cast.e0[rank], rank), self._e0[rank]
        return now.keys() == before.keys() and all(
            np.array_equal(now[name], before[name]) for name in now
        )

    @property
    def published_bytes(self) -> int:
        """How much a version is in bf16, tied tensors once."""
        state = self._state()
        return sum(state[name].nbytes for name in state if name != "lm_head.weight")

    def _state(self) -> check.State:
        state: check.State = torch.load(self._reference, mmap=True)
        return state

    def _read(self, child: Child, rank: int) -> check.Arrays:
        path = self._folder / f"e0-{rank}"
        child.ask("dump", path=path)
        arrays = check.read_rank(path)
        path.unlink()
        return arrays

    def _wrong_on_e0(self) -> list[str]:
        self._e0 = [self._read(self._cast.e0[rank], rank) for rank in range(E0_RANKS)]
        return check.wrong_in_rebuilt(check.rebuild(self._model.config, self._e0), self._state())

    def _wrong_on_e1(self) -> list[str]:
        e1 = self._cast.e1
        e1.tell("wrong_parameters", reference=self._reference)
        fresh = check.logits_of_fresh_model(self._model.folder, self._state(), self._model.prompt)
        wrong: list[str] = e1.answer()
        if not torch.equal(fresh, torch.from_numpy(e1.ask("logits"))):
            wrong.append("the logits")
        return wrong
