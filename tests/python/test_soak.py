"""Short runs of the soak with fixed seeds, and what it calls wrong. tools/soak runs it for long."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs.harness import Job, Process, Zygote
from jobs.soak import Figures, Options, Soak


@pytest.fixture(scope="module")
def soak_zygote() -> Iterator[Zygote]:
    """Makes processes whose memory can be compared: few arenas of malloc."""
    zygote = Zygote({"MALLOC_ARENA_MAX": "2"})
    yield zygote
    zygote.close()


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_random_faults(soak_zygote: Zygote, tmp_path: Path, seed: int) -> None:
    """1-3, 8-14, 17, 20: Kills, stops, stalls and moves of experts while several engines update.

    Every committed version is checked byte for byte on every rank, and nothing that lives leaks.
    """
    figures = Soak(soak_zygote, tmp_path, Options(seconds=6, seed=seed)).run()
    assert figures.wrong == []
    assert figures.published > 0
    assert set(figures.commits) == {"e0", "e1", "e2"}
    for name, growth in figures.growth.items():
        assert growth["descriptors"] < 8, name
        assert growth["mappings"] < 8, name


def test_the_soak_sees_wrong_bytes(
    soak_zygote: Zygote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would fail: a bit is flipped in one rank before its bytes are looked at."""
    check = Soak._committed

    def damage(self: Soak, engine: str, ranks: list[Process], version: int) -> None:
        if engine == "e0":
            ranks[0].ask("flip", tensor="model.mtp.bias")
        check(self, engine, ranks, version)

    monkeypatch.setattr(Soak, "_committed", damage)
    monkeypatch.setattr(Soak, "_fail", lambda self: None)
    options = Options(seconds=1, engines={"e0": 1})
    figures = Soak(soak_zygote, tmp_path, options).run()
    assert any("model.mtp.bias" in text for text in figures.wrong)


def test_the_soak_sees_a_process_that_ends_by_itself(
    soak_zygote: Zygote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would fail: one rank aborts."""
    start = Job.start

    def abort(self: Job) -> None:
        start(self)
        self.rank(0).ask("limit", what="RLIMIT_CPU", value=0)

    monkeypatch.setattr(Job, "start", abort)
    monkeypatch.setattr(Soak, "_fail", lambda self: None)
    options = Options(seconds=2, engines={"e0": 1})
    figures = Soak(soak_zygote, tmp_path, options).run()
    assert any("ended by itself" in text for text in figures.wrong)


def test_help_of_the_tool() -> None:
    tool = Path(__file__).parents[2] / "tools" / "soak"
    done = subprocess.run(
        [sys.executable, str(tool), "--help"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0
    for option in ("--minutes", "--seed", "--json"):
        assert option in done.stdout


def test_figures_are_json() -> None:
    figures = Figures(seed=4)
    figures.commits["e0"] += 1
    assert figures.as_dict()["commits"] == {"e0": 1}
