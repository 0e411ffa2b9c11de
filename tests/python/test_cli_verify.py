"""``bascule verify`` against a live job."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import bascule
from bascule.cli import app


@pytest.fixture
def served() -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    weights = {"a": np.arange(24, dtype=np.float32).reshape(4, 6), "b": np.ones(5, np.float32)}
    live = {name: np.zeros_like(array) for name, array in weights.items()}
    with ExitStack() as stack:
        job = bascule.Job(name="cli-verify", token="t")
        sender = stack.enter_context(
            bascule.WeightSender.connect(job, layout=bascule.Layout.from_arrays(weights))
        )
        job = bascule.Job(name="cli-verify", token="t", coordinator=sender.coordinator)
        receiver = stack.enter_context(
            bascule.WeightReceiver.connect(
                job, engine="e0", layout=bascule.Layout.from_arrays(live)
            )
        )
        sender.publish(1).wait()
        update = receiver.poll()
        assert update is not None
        update.stage()
        update.wait_staged()
        update.commit()
        yield sender.coordinator, weights, live


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["verify", *arguments])


def test_two_ranks(served: tuple[str, Any, Any]) -> None:
    address, _, live = served
    done = run(address, "e0:0", "trainer:0", "--token", "t")
    assert done.exit_code == 0, done.output
    assert "version 1 of term" in done.output
    assert "2 tensors, 116 B compared" in done.output
    assert "equal" in done.output
    live["a"][2, 3] += 1
    done = run(address, "e0:0", "trainer:0", "--token", "t")
    assert done.exit_code == 1
    assert "different: 1\n  a\nNOT equal" in done.output
    done = run(address, "e0:0", "trainer:0", "--token", "t", "--json")
    assert done.exit_code == 1
    told = json.loads(done.stdout)
    assert told["different"] == ["a"]
    assert told["equal"] is False
    assert told["elements"] == 29


def test_a_checkpoint_folder(served: tuple[str, Any, Any], tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.numpy")
    address, weights, _ = served
    done = run(address, "e0:0", "--checkpoint", str(tmp_path), "--token", "t")
    assert done.exit_code == 2
    assert "no *.safetensors" in done.output
    for name, array in weights.items():
        safetensors.save_file({name: array}, tmp_path / f"{name}.safetensors")
    done = run(address, "e0:0", "--checkpoint", str(tmp_path), "--token", "t")
    assert done.exit_code == 0, done.output
    safetensors.save_file({"b": weights["b"] * 2, "c": weights["b"]}, tmp_path / "b.safetensors")
    done = run(address, "trainer:0", "--checkpoint", str(tmp_path), "--token", "t")
    assert done.exit_code == 1
    assert "different: 1\n  b\nonly in the checkpoint: 1\n  c\n" in done.output


def test_what_is_wrong_is_one_line(served: tuple[str, Any, Any]) -> None:
    address, _, _ = served
    assert run(address, "e0:0", "--token", "t").exit_code == 2
    assert run(address, "e0:0", "trainer:0", "--dtype", "F12", "--token", "t").exit_code == 2
    done = run(address, "e0:0", "e5:0", "--token", "t")
    assert done.exit_code == 1
    assert "the job has no engine e5 rank 0; it has:" in done.output
    done = run(address, "e0:0", "trainer:0", "--token", "guess")
    assert done.exit_code == 1
    assert "token" in done.output
