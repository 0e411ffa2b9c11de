"""CMakeLists.txt has the version number; everything else takes it from there."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

import numpy as np

import bascule

ROOT = Path(__file__).parents[2]


def version_of_the_project() -> str:
    found = re.search(
        r"^project\(bascule VERSION ([0-9.]+)", (ROOT / "CMakeLists.txt").read_text(), re.MULTILINE
    )
    assert found is not None
    return found[1]


def test_package_and_library_have_the_version_of_the_project() -> None:
    assert bascule.__version__ == version_of_the_project()
    assert importlib.metadata.version("bascule") == version_of_the_project()


def test_ranks_tell_it_to_the_coordinator() -> None:
    layout = bascule.Layout.from_arrays({"w": np.zeros(4, np.float32)})
    with bascule.WeightSender.connect(bascule.Job(name="version"), layout=layout) as sender:
        status = bascule.coordinator_status(sender.coordinator)
    assert [member["build"] for member in status["members"]] == [bascule.__version__]


def test_the_changelog_tells_what_is_in_it() -> None:
    assert f"\n## [{bascule.__version__}]" in (ROOT / "CHANGELOG.md").read_text()
