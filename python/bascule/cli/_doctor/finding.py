"""What a check of ``bascule doctor`` finds, and how it reads what the kernel says."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from bascule.cli._doctor.probe import Probe

__all__ = ["Finding", "Level", "Wanted", "cgroups", "fields_of", "number_in"]


class Level(StrEnum):
    """How a check went."""

    OK = "ok"
    NOTE = "note"  # works; costs something, or matters in a case that is named
    PROBLEM = "problem"


@dataclass
class Finding:
    """What one check found.

    Attributes
    ----------
    check
        Its name.
    level
        How it went.
    found
        What there is.
    why
        What follows from it, unless it is in order.
    remedy
        What to do about it.
    values
        The same for programs.
    """

    check: str
    level: Level
    found: str
    why: str = ""
    remedy: str = ""
    values: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Wanted:
    """What the ranks of this host will want.

    Attributes
    ----------
    memory
        Bytes of arenas and shadows; 0: not known.
    threads
        Copy threads of all ranks; 0: not known.
    socket_directory
        ``Job.socket_directory``.
    """

    memory: int = 0
    threads: int = 0
    socket_directory: str = ""


def number_in(text: str | None) -> int | None:
    """Return the number that a file has; None for ``max`` too."""
    word = (text or "").split()[:1]
    return int(word[0]) if word and word[0].lstrip("-").isdigit() else None


def fields_of(text: str | None) -> dict[str, int]:
    """Return the numbers of lines such as ``name: 12 kB`` and ``name 12``."""
    pairs = (line.replace(":", " ").split() for line in (text or "").splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) > 1 and pair[1].isdigit()}


def cgroups(probe: Probe, controller: str) -> Iterable[tuple[str, int]]:
    """Return the folders of this process's groups and of those above them, and their version."""
    for line in (probe.text("/proc/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        root = f"/sys/fs/cgroup/{controllers}" if controllers else "/sys/fs/cgroup"
        parts = [part for part in path.split("/") if part]
        for length in range(len(parts), -1, -1):
            yield "/".join([root, *parts[:length]]), 1 if controllers else 2
