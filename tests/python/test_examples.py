"""examples/python run, as their README says. (tests/install runs examples/cpp.)"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples/python"


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that were started; none outlives the test."""
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        process.kill()
        process.communicate()


def run(script: str, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(EXAMPLES / script), *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def lines_until(process: subprocess.Popen[str], end: str) -> str:
    assert process.stdout is not None
    printed = ""
    while not printed.endswith(end + "\n"):
        line = process.stdout.readline()
        printed += line
        assert line, printed
    return printed


def test_an_engine_of_two_ranks_follows_the_sender(started: list[subprocess.Popen[str]]) -> None:
    sender = run("sender.py", "--listen", "127.0.0.1:0", "--step", "0", "--hold", "120")
    started.append(sender)
    address = lines_until(sender, "published version 3").split()[2]
    ranks = [run("receiver.py", "--coordinator", address, "--rank", str(r)) for r in range(2)]
    started.extend(ranks)
    for rank, receiver in enumerate(ranks):
        lines_until(receiver, f"rank {rank}: version 3 as sent")
    sender.kill()
    for rank, receiver in enumerate(ranks):
        assert receiver.communicate(timeout=60)[0] == f"rank {rank}: the sender has left\n"
        assert receiver.returncode == 0
