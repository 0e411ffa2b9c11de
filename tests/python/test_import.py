"""Importing costs little and starts nothing."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import bascule


def run(code: str, *flags: str) -> str:
    done = subprocess.run(
        [sys.executable, *flags, "-c", code], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_leaves_frameworks_alone() -> None:
    heavy = [
        "torch",
        "transformers",
        "vllm",
        "typer",
        "rich",
        "numpy.testing",
        "numpy.f2py",
        "scipy",
    ]
    assert run(f"import bascule, sys; print([m for m in {heavy} if m in sys.modules])") == "[]"


def test_import_starts_no_thread_and_opens_nothing() -> None:
    code = """
import os, numpy
def state():
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))
before = state()
import bascule, bascule.layout, bascule.errors
assert state() == before, (before, state())
"""
    run(code)


def test_it_runs_beside_torch_whichever_comes_first() -> None:
    pytest.importorskip("torch")
    use = "x = torch.ones(3); bascule.Layout.from_arrays({'x': x}).check_destination_coverage()"
    run(f"import bascule, torch; {use}", "-W", "error::ImportWarning")
    run(f"import torch, bascule; {use}", "-W", "error::ImportWarning")


def test_public_names_exist() -> None:
    for module in (bascule, bascule.layout, bascule.errors):
        for name in module.__all__:
            value = getattr(module, name)
            assert value.__doc__ or not inspect.isroutine(value) | inspect.isclass(value), name
