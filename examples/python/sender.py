"""A trainer of one rank: publishes versions of a small fp32 model as bf16.

It hosts the coordinator, trains (sleeps) between versions and holds the last one for a while.
"""

from __future__ import annotations

import argparse
import os
import time

from model import SHAPES, values

import bascule

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--listen", default="127.0.0.1:7070")
parser.add_argument("--versions", type=int, default=3)
parser.add_argument("--step", type=float, default=1.0, help="seconds between versions")
parser.add_argument("--hold", type=float, default=10.0, help="seconds after the last one")
options = parser.parse_args()

weights = {name: values(name, 0) for name in SHAPES}  # torch tensors do as well
layout = bascule.Layout.from_arrays(weights, publish_dtype="bf16")
job = bascule.Job(name="example", token=os.environ.get("JOB_TOKEN", ""), listen=options.listen)
with bascule.WeightSender.connect(job, layout=layout) as sender:
    print(f"coordinator at {sender.coordinator}", flush=True)
    for version in range(1, options.versions + 1):
        for name, array in weights.items():
            array[:] = values(name, version)
        sender.publish(version).wait()
        print(f"published version {version}", flush=True)
        time.sleep(options.step)
    time.sleep(options.hold)  # receivers may still be reading the last one
