"""Plays the demo from beginning to end, and cleans up however it ends."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

import bascule
from bascule.demo.cast import TRAINERS, Cast
from bascule.demo.kills import kill_a_rollout_rank, kill_a_trainer_rank, kill_the_coordinator
from bascule.demo.measure import measure_memcpy
from bascule.demo.model import TITLES, prepare
from bascule.demo.narrate import Narrator
from bascule.demo.process import DemoError, RefusedError
from bascule.demo.story import Story

__all__ = ["Options", "run"]

_LIMIT_SECONDS = 900.0


@dataclass(frozen=True)
class Options:
    """What the command line says.

    Attributes
    ----------
    model : str
        ``"smollm2"`` or ``"tiny"``.
    updates : int
        Before the kills.
    kills : bool
    seed : int
    """

    model: str = "smollm2"
    updates: int = 6
    kills: bool = True
    seed: int = 0


def run(options: Options) -> int:
    """Play the demo and return its exit code.

    Parameters
    ----------
    options
        What the command line says.
    """
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that it cleans up then, too
    narrator = Narrator()
    try:
        with tempfile.TemporaryDirectory(prefix="bascule-demo-") as folder:
            failures = _play(options, narrator, Path(folder))
    except (DemoError, RefusedError, bascule.Error) as error:
        failures = [str(error)]
    narrator.closing(failures)
    return 1 if failures else 0


def _play(options: Options, narrator: Narrator, folder: Path) -> list[str]:
    """Return what went wrong."""
    rate = measure_memcpy()
    narrator.opening(TITLES[options.model], rate)
    with Cast(folder) as cast, _watchdog(cast, folder):
        model = prepare(options.model, folder / "model", trainers=TRAINERS, seed=options.seed)
        cast.join(model, options.seed)
        story = Story(cast, model, narrator, folder, rate)
        story.begin_step()
        for _ in range(options.updates):
            story.update()
        if options.kills:
            kill_a_rollout_rank(story)
            kill_a_trainer_rank(story)
            kill_the_coordinator(story)
        story.finish()
    return story.failures


@contextlib.contextmanager
def _watchdog(cast: Cast, folder: Path) -> Iterator[None]:
    """End the process, whatever it waits for, when the demo takes far too long.

    Every wait has a deadline of its own, so this is for what nobody thought of.
    """

    def bark() -> None:
        print(
            f"\nThe demo did not end within {_LIMIT_SECONDS:.0f} s. What its processes said last:\n"
            + cast.last_lines(),
            file=sys.stderr,
            flush=True,
        )
        cast.end(seconds=0.0)
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    timer = threading.Timer(_LIMIT_SECONDS, bark)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
