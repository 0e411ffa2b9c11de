"""Live ranks compared with each other and with safetensors files."""

from __future__ import annotations

import json
import struct
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bascule
from bascule import verify

SHAPES = {"embed": (13, 8), "layers.0.w": (8, 24), "norm": (8,)}


def save(path: Path, arrays: dict[str, Any]) -> None:
    """Write a safetensors file of fp32 arrays."""
    header: dict[str, Any] = {}
    offset = 0
    for name, array in arrays.items():
        header[name] = {
            "dtype": "F32",
            "shape": list(array.shape),
            "data_offsets": [offset, offset + array.nbytes],
        }
        offset += array.nbytes
    text = json.dumps(header).encode()
    path.write_bytes(
        struct.pack("<Q", len(text)) + text + b"".join(a.tobytes() for a in arrays.values())
    )


@pytest.fixture
def served() -> Iterator[tuple[bascule.Job, dict[str, Any], dict[str, Any]]]:
    """A trainer that publishes fp32 as bf16, and an engine that serves it in fp32."""
    rng = np.random.default_rng(3)
    weights = {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}
    live = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    job = bascule.Job(name=f"verify-{uuid.uuid4().hex[:8]}", token="t")
    with ExitStack() as stack:
        layout = bascule.Layout.from_arrays(weights, publish_dtype="bf16")
        sender = stack.enter_context(bascule.WeightSender.connect(job, layout=layout))
        job = bascule.Job(name=job.name, token="t", coordinator=sender.coordinator)
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
        yield job, weights, live


def test_a_rollout_against_its_trainer(served: tuple[bascule.Job, Any, Any]) -> None:
    job, _, live = served
    progress = verify.Progress()
    found = verify.compare_ranks(job, "e0:0", "trainer:0", progress=progress)
    assert found.equal
    assert found.tensors == len(SHAPES)
    assert found.elements == sum(array.size for array in live.values())
    assert progress.done == progress.total == found.bytes == 2 * found.elements
    live["layers.0.w"][3, 5] += 1e-6  # no value of bf16 any more
    assert verify.compare_ranks(job, "e0:0", "trainer:0").different == ["layers.0.w"]


def test_against_a_checkpoint(served: tuple[bascule.Job, Any, Any], tmp_path: Path) -> None:
    job, weights, _ = served
    first, second = tmp_path / "1.safetensors", tmp_path / "2.safetensors"
    save(first, {"embed": weights["embed"]})
    save(second, {name: weights[name] for name in ("layers.0.w", "norm")})
    # The checkpoint is in fp32 and was rounded on its way: equal as bf16, not as fp32.
    files = [first, second]
    assert verify.compare_with_checkpoint(job, "e0:0", files, dtype=bascule.layout.DType.BF16).equal
    found = verify.compare_with_checkpoint(job, "e0:0", files)
    assert found.different == sorted(SHAPES)
    assert verify.compare_with_checkpoint(job, "trainer:0", [first]).only_left == [
        "layers.0.w",
        "norm",
    ]
    save(first, {"embed": weights["embed"] * 2, "extra": weights["norm"]})
    found = verify.compare_with_checkpoint(job, "trainer:0", files)
    assert found.different == ["embed"]
    assert found.only_right == ["extra"]


def test_what_cannot_be_compared_is_said(served: tuple[bascule.Job, Any, Any]) -> None:
    job, _, _ = served
    with pytest.raises(bascule.InvalidArgument, match="trainer:3"):
        verify.compare_ranks(job, "zero", "trainer:0")
    with pytest.raises(bascule.NotFound, match="engine e0 rank 0"):
        verify.compare_ranks(job, "e7:0", "trainer:0")
    with pytest.raises(FileNotFoundError):
        verify.compare_with_checkpoint(job, "e0:0", ["nowhere.safetensors"])
