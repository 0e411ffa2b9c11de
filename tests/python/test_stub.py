from __future__ import annotations

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_stub_is_that_of_the_extension() -> None:
    pytest.importorskip("nanobind")
    script = runpy.run_path(str(ROOT / "python/src/write_stub.py"), run_name="write_stub")
    stub = ROOT / "python/bascule/_bascule.pyi"
    assert stub.read_text() == script["stub_text"](), "run python/src/write_stub.py"


def test_the_package_is_typed() -> None:
    assert (ROOT / "python/bascule/py.typed").exists()
