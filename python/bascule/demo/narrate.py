"""What the demo prints."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.markup import escape

import bascule
from bascule.demo.measure import MemcpyRate

__all__ = ["Narrator", "Row"]

_WIDTH = 100

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
        gigabytes = rate.bytes_per_second / 1e9
        self.say(
            f"[bold]Two trainers, two engines, one model: {title}[/]\n"
            "  trainers  2 processes: FSDP2 on the CPU, fp32 masters, AdamW; they publish in bf16\n"
            "  e0        3 processes: tensor parallel, fused QKV and gate/up, padded, in bf16\n"
            "  e1        1 process:   a float32 module, which writes text all the time\n"
            "\n"
            "Each update is compared, bit for bit, with what the trainers had. Times are in ms,\n"
            "the slowest rank's:\n"
            "  publish  the snapshot; then training goes on\n"
            "  stage    landing beside the live weights, while e1 goes on writing\n"
            "  verify   checks that are no part of those copies; most at an engine's first update\n"
            "  commit   the switch to the new weights\n"
            "  stall    how long an engine was paused: decision, switch, first audit\n"
            "  EWTT     from the first publish to the last commit\n"
            f"  bound    the same bytes by plain memcpy, {gigabytes:.1f} GB/s here just now "
            f"({rate.threads} threads)\n"
            f"Training, writing and checking compete for {rate.cores} cores with all of that.\n"
            "\n"
            "[dim]Starting the processes and reading the model ...[/]\n"
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
        for line in textwrap.wrap(text, _WIDTH - 9):
            self.say(f"         [dim]{escape(line)}[/]")

    def headline(self, text: str) -> None:
        """Begin a kill."""
        self.say(f"\n[bold]{escape(text)}[/]")

    def told(self, who: str, code: str, message: str) -> None:
        """Print what the library answered."""
        text = textwrap.fill(
            f"{who} is told {code}: {message}",
            _WIDTH,
            initial_indent="  ",
            subsequent_indent="    ",
        )
        self.say(escape(text).replace(code, f"[yellow]{code}[/]", 1))

    def then(self, text: str) -> None:
        """Print what happened next."""
        self.say(escape(textwrap.indent(textwrap.fill(text, _WIDTH - 2), "  ")))

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
