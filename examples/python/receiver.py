"""A rank of a tensor-parallel engine: follows the sender until it leaves, and checks it all."""

from __future__ import annotations

import argparse
import os
import time

import numpy as np
import numpy.typing as npt
from model import KV_HEADS, SHAPES, values

import bascule
from bascule.layout import Block, DType, LayoutBuilder, LogicalTensor, Mesh, fused_qkv, shard

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--coordinator", default="127.0.0.1:7070")
parser.add_argument("--rank", type=int, default=0)
parser.add_argument("--ranks", type=int, default=2)
options = parser.parse_args()

# How the engine holds the model: rows or columns of a tensor, q, k and v in one array.
tensors = {name: LogicalTensor(name, list(shape), DType.F32) for name, shape in SHAPES.items()}
blocks = {
    "embed": Block.of(tensors["embed"], {"tp": shard(0)}),
    "qkv": fused_qkv(tensors["q"], tensors["k"], tensors["v"], KV_HEADS, "tp"),
    "o": Block.of(tensors["o"], {"tp": shard(1)}),
    "norm": Block.of(tensors["norm"]),
}
builder = LayoutBuilder(Mesh(["tp"], [options.ranks]), [options.rank])
weights = {}
for name, block in blocks.items():
    weights[name] = np.zeros(builder.local_shape(block) or (), np.float32)
    builder.add(block, weights[name], name=name)


def check(version: int) -> None:
    """Compare the live weights with what was sent, cut by numpy."""

    def part(name: str, axis: int = 0) -> npt.NDArray[np.float32]:
        return np.split(values(name, version), options.ranks, axis)[int(options.rank)]

    qkv = np.concatenate([part("q"), part("k"), part("v")])
    sent = {"embed": part("embed"), "qkv": qkv, "o": part("o", 1), "norm": values("norm", version)}
    for name, array in weights.items():
        np.testing.assert_array_equal(array, sent[name], name)


def update(receiver: bascule.WeightReceiver) -> None:
    """Move to the newest version, if there is one and every rank of the engine can."""
    newest = receiver.poll(timeout=5)
    if newest is None:
        return
    newest.stage()  # in the background, beside the live weights
    newest.wait_staged()
    # Waits for the other ranks. An engine that generates meanwhile asks ready() before it pauses.
    newest.commit(timeout=2)


token = os.environ.get("JOB_TOKEN", "")
job = bascule.Job(name="example", coordinator=options.coordinator, token=token)
layout = builder.build()
shown, patience = 0, time.monotonic() + 60
with bascule.WeightReceiver.connect(
    job, engine="e0", rank=options.rank, world_size=options.ranks, layout=layout
) as receiver:
    while True:
        try:
            update(receiver)
        except (bascule.Retired, bascule.NotDecided, bascule.Aborted):
            continue  # the version is gone, or another rank is not there yet: poll again
        except (bascule.Unavailable, bascule.DeadlineExceeded):
            if shown:
                break  # the sender has left, and the coordinator with it
            if time.monotonic() > patience:
                raise
        serving = receiver.serving
        if serving is None or serving.version == shown:
            time.sleep(0.05)  # an engine would generate
            continue
        shown = serving.version
        check(shown)
        print(f"rank {options.rank}: version {shown} as sent", flush=True)
print(f"rank {options.rank}: the sender has left")
