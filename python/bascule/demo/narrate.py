"""What the demo prints."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.markup import escape

import bascule
from bascule.demo.measure import MemcpyRate

__all__ = ["Narrator", "Row"]

_COLUMNS = (
    ("version", 7),
    ("MB", 6),
    ("publish", 8),
    ("stage", 8),
    ("verify", 8),
    ("commit", 8),
    ("stall", 8),
    ("EWTT", 8),
    ("bound", 7),
)


@dataclass(frozen=True)
class Row:
    """One update, over all ranks.

    Attributes
    ----------
    version : int
    published, followed : sequence of bascule.Report
        Of the trainer ranks and of the rollout ranks.
    bound : float
        Seconds.
    wrong : list of str
        What the checker found wrong.
    """

    version: int
    published: Sequence[bascule.Report]
    followed: Sequence[bascule.Report]
    bound: float
    wrong: list[str]

    @property
    def cells(self) -> list[str]:
        """The columns, but for the verdict."""
        phases = [report.phases for report in self.followed]
        seconds = [
            max(report.phases.publish for report in self.published),
            max(phase.stage for phase in phases),
            max(phase.verify + phase.audit for phase in phases),
            max(phase.commit for phase in phases),
            max(phase.stall for phase in phases),
            max(report.ewtt for report in self.followed),
            self.bound,
        ]
        moved = sum(report.bytes for report in self.followed)
        return [str(self.version), _number(moved / 1e6), *(_number(1e3 * s) for s in seconds)]


class Narrator:
    """Prints, and keeps the time."""

    def __init__(self) -> None:
        self._console = Console(highlight=False, soft_wrap=True)
        self._start = time.monotonic()
        self._headed = False

    def say(self, text: str) -> None:
        """Print a paragraph. What is not ours in it must have been escaped."""
        self._console.print(text)

    def opening(self, title: str, rate: MemcpyRate) -> None:
        """Say who takes part and what the columns mean."""
        self.say(
            f"[bold]Two trainers, two engines, one model: {title}[/]\n"
            "  trainers  2 processes, FSDP2 on the CPU, fp32 masters, AdamW; they publish in bf16\n"
            "  e0        3 processes, tensor parallel, fused QKV and gate/up, padded, in bf16\n"
            "  e1        1 process, a float32 module; it writes text while the next version lands\n"
        )
        self.say(
            "Times in ms, the slowest rank's. publish: the snapshot, after which training goes on. "
            "stage: landing\nbeside the live weights. verify: checks beyond those of the copying "
            "passes (update 1 checks all twice).\ncommit: the switch. stall: how long an engine "
            "was paused. EWTT: from the first publish to the last\ncommit. bound: what these bytes "
            "need at the rate of plain memcpy, which is "
            f"{rate.bytes_per_second / 1e9:.1f} GB/s here ({rate.threads} threads, measured "
            "just now).\nTraining, writing and checking compete for the same "
            f"{rate.cores} cores meanwhile, so EWTT is above the bound.\n"
        )

    def row(self, row: Row) -> None:
        """Print one update."""
        if not self._headed:
            self._headed = True
            heads = "".join(f"{name:>{width}}" for name, width in _COLUMNS)
            self.say(f"[bold]{heads}  verdict[/]")
        cells = "".join(
            f"{cell:>{width}}" for cell, (_, width) in zip(row.cells, _COLUMNS, strict=True)
        )
        if row.wrong:
            named = ", ".join(row.wrong[:3]) + (", ..." if len(row.wrong) > 3 else "")
            self.say(f"{cells}  [bold red]WRONG[/]: {escape(named)}")
        else:
            self.say(f"{cells}  [green]every bit equal[/]")

    def note(self, text: str) -> None:
        """Print a line that belongs to the one above."""
        self.say(f"         [dim]{escape(text)}[/]")

    def headline(self, text: str) -> None:
        """Begin a kill."""
        self.say(f"\n[bold]{escape(text)}[/]")

    def told(self, who: str, code: str, message: str) -> None:
        """Print what the library answered."""
        self.say(f"  {escape(who)} is told [yellow]{code}[/]: {escape(message)}")

    def then(self, text: str) -> None:
        """Print what happened next."""
        self.say(f"  {escape(text)}")

    def closing(self, failures: Sequence[str]) -> None:
        """Say how it ended."""
        seconds = time.monotonic() - self._start
        if failures:
            self.say(f"\n[bold red]FAILED[/] after {seconds:.0f} s:")
            for failure in failures:
                self.say(f"  {escape(failure)}")
        else:
            self.say(f"\n[bold green]Everything was verified.[/] {seconds:.0f} s")


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"
