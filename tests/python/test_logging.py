"""What sessions tell Python's logging."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import bascule


def update(version: int = 1) -> tuple[bascule.Report, bascule.Report]:
    """One publication and one committed update, in this process; their reports."""
    source = {"w": np.arange(32, dtype=np.float32)}
    target = {"w": np.zeros(32, np.float32)}
    job = bascule.Job(name="logs", token="secret")
    layout = bascule.Layout.from_arrays(source)
    with bascule.WeightSender.connect(job, layout=layout) as sender:
        published = sender.publish(version)
        published.wait()
        job = bascule.Job(name="logs", token="secret", coordinator=sender.coordinator)
        layout = bascule.Layout.from_arrays(target)
        with bascule.WeightReceiver.connect(job, engine="e0", layout=layout) as receiver:
            got = receiver.poll()
            assert got is not None
            got.stage()
            got.wait_staged()
            assert got.ready()
            got.commit()
            assert receiver.poll() is None
            return published.report(), got.report()


def test_one_line_at_info_for_a_publication_and_for_a_commit(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "bascule"):
        published, committed = update(version=7)
    # Not those of a coordinator: lines about an update have fields.
    lines = [record for record in caplog.records if hasattr(record, "version")]
    assert [record.name for record in lines] == ["bascule"] * 2
    first, second = (vars(record) for record in lines)
    assert (first["rank"], first["engine"]) == (0, None)
    assert (first["term"], first["version"]) == (published.id.term, 7)
    assert (first["publish"], first["bytes"]) == (published.phases.publish, published.bytes)
    assert (second["rank"], second["engine"]) == (0, "e0")
    assert (second["term"], second["version"]) == (committed.id.term, 7)
    assert (second["ewtt"], second["stall"]) == (committed.ewtt, committed.phases.stall)
    assert second["bytes"] == committed.bytes == 128
    assert "trainer 0: published version 7" in lines[0].message
    assert "engine e0 rank 0: committed version 7: EWTT" in lines[1].message
    assert {record.filename for record in lines} == {"test_logging.py"}


def test_steps_at_debug(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "bascule"):
        update()
    steps = [message.rpartition(": ")[2] for message in caplog.messages]
    trainer = [s for s, m in zip(steps, caplog.messages, strict=True) if m.startswith("trainer")]
    engine = [s for s, m in zip(steps, caplog.messages, strict=True) if m.startswith("engine")]
    assert trainer[2:] == ["available", "closed"]
    assert engine[1:6] == ["polled", "staging", "staged", "ready", "decided"]
    assert engine[7:] == ["nothing newer", "closed"]


def test_a_filter_that_raises_does_not_fail_a_commit() -> None:
    def broken(record: logging.LogRecord) -> bool:
        raise RuntimeError("a filter of the application")

    logger = logging.getLogger("bascule")
    logger.addFilter(broken)
    level = logger.level
    logger.setLevel(logging.DEBUG)
    try:
        update()
    finally:
        logger.removeFilter(broken)
        logger.setLevel(level)


def test_quiet_by_default() -> None:
    code = "import test_logging; test_logging.update()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
