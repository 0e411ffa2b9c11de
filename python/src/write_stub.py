"""Writes python/bascule/_bascule.pyi from the installed extension.

Run it with an interpreter that has bascule and nanobind, after changing the sources here.
"""

from __future__ import annotations

import pathlib

from nanobind.stubgen import StubGen

from bascule import _bascule

STUB = pathlib.Path(__file__).resolve().parent.parent / "bascule" / "_bascule.pyi"
HEADER = """\
# Written by python/src/write_stub.py; do not edit.
# ruff: noqa
# fmt: off
"""


def stub_text() -> str:
    """Return what the stub should be."""
    generator = StubGen(_bascule, recursive=False, include_docstrings=True)
    generator.put(_bascule)
    return HEADER + generator.get()


if __name__ == "__main__":
    STUB.write_text(stub_text())
