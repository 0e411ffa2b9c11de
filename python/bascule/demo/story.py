"""What happens: training steps, updates, and what is printed of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import bascule
from bascule.demo.cast import Cast
from bascule.demo.measure import MemcpyRate, update_bound
from bascule.demo.model import Prepared
from bascule.demo.narrate import Narrator, Row
from bascule.demo.process import Child, DemoError, RefusedError
from bascule.demo.proof import Proof
from bascule.demo.rollout import Followed

__all__ = ["Story"]

_TOKENS = 16  # of the line that e1 writes after an update


class Story:
    """The play so far.

    Parameters
    ----------
    cast
        The processes; they have joined.
    model
        What is trained.
    narrator
        Prints.
    folder
        For files.
    rate
        Of memcpy on this machine.

    Attributes
    ----------
    published : bascule.VersionId
        The newest version that became available.
    checkpoint : Path
        Where trainers write one.
    """

    def __init__(
        self, cast: Cast, model: Prepared, narrator: Narrator, folder: Path, rate: MemcpyRate
    ) -> None:
        self.cast = cast
        self.narrator = narrator
        self.published = bascule.VersionId(0, 0)
        self.checkpoint = folder / "checkpoint"
        self.failures: list[str] = []
        self._model = model
        self._proof = Proof(cast, model, folder)
        self._rate = rate
        self._losses: list[float] = []

    # ---- what trainers do

    def begin_step(self) -> None:
        """Let the trainers train a step, in the background."""
        for trainer in self.cast.trainers:
            trainer.tell("step")

    def end_step(self) -> float:
        """Wait for the step; return its loss."""
        loss: float = self.cast.gather(self.cast.trainers)[0]
        self._losses.append(loss)
        return loss

    def publish(self) -> list[bascule.Report]:
        """Publish the weights as the next version, and wait until it is available."""
        trainers = self.cast.trainers
        self._proof.keep_reference()
        reports = self.cast.ask_all(trainers, "publish", version=self.published.version + 1)
        self.published = self.cast.ask_all(trainers, "wait_available", timeout=60.0)[0]
        return reports

    # ---- what engines do

    def begin_e1(self) -> None:
        """Let e1 move to the newest version, in the background."""
        self.cast.e1.tell("follow")

    def end_e1(self) -> Followed:
        """Wait until e1 has moved."""
        followed = self.cast.e1.answer()
        if not isinstance(followed, Followed):
            raise DemoError("e1 was offered nothing, though a version was published")
        return followed

    def move_e0(self) -> list[bascule.Report]:
        """Let e0 move to the newest version."""
        reports = self.cast.ask_all(self.cast.e0, "update")
        if None in reports:
            raise DemoError("e0 was offered nothing, though a version was published")
        return reports

    # ---- all together

    def update(self) -> None:
        """Publish what was trained; engines follow while training goes on; prove the result."""
        loss = self.end_step()
        published = self.publish()
        self.begin_step()
        self.begin_e1()
        reports = self.move_e0()
        followed = self.end_e1()
        self.show(published, [*reports, followed.report])
        self.narrator.note(f"loss {loss:.3f}. {self._written(followed)}")

    def show(self, published: Sequence[bascule.Report], followed: Sequence[bascule.Report]) -> None:
        """Prove that both engines serve the newest version, and print what that took."""
        wrong = self.prove()
        bounds = [report.bound for report in followed if report.bound is not None]
        wire = self._proof.published_bytes
        bound = (
            max(bounds) if bounds else update_bound(self._rate, 2 * wire, wire, [wire, 2 * wire])
        )
        self.narrator.row(Row(self.published.version, published, followed, bound, wrong))

    def prove(self) -> list[str]:
        """Compare both engines with the newest version; return what is wrong and keep it."""
        wrong = self._proof.wrong(self.published.version)
        self.failures += [f"version {self.published.version}: {name}" for name in wrong]
        return wrong

    def require(self, truth: bool, what: str) -> None:
        """Keep as a failure what is not true."""
        if not truth:
            self.failures.append(f"not so: {what}")

    def require_e0_unchanged(self, ranks: Sequence[int]) -> None:
        """Require that ranks of e0 hold what they held when it was verified last."""
        for rank in ranks:
            self.require(self._proof.unchanged(rank), f"e0 rank {rank} kept its weights")

    def require_refusal(self, child: Child, code: str) -> None:
        """Wait for a process's answer, which must be this error of the library, and print it."""
        try:
            answer = child.answer()
        except RefusedError as error:
            self.narrator.told(child.name, error.code, str(error))
            self.require(error.code == code, f"{child.name} is told {code}")
        else:
            raise DemoError(f"{child.name} was to be told {code}, but went on: {answer}")

    def finish(self) -> None:
        """Look back at the training."""
        self.end_step()
        self.require(self._losses[-1] < self._losses[0], f"the loss fell: {self._losses}")

    def _written(self, followed: Followed) -> str:
        tokens = self.cast.e1.ask("write", tokens=_TOKENS)
        line = " ".join(self._model.decode(tokens).split()) or "(blanks)"
        if followed.tokens is None:
            return f"e1 writes now: ... {line}"
        more = f"{followed.tokens} more token{'' if followed.tokens == 1 else 's'}"
        return f"e1 wrote {more} while it landed; now: ... {line}"
