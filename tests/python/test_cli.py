from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import bascule

COMMAND = [sys.executable, "-c", "from bascule.cli import main; main()"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=120)


def test_version_and_help() -> None:
    assert run("--version").stdout.strip() == f"bascule {bascule.__version__}"
    helped = run("--help")
    assert helped.returncode == 0
    assert "demo" in helped.stdout
    assert "serve" in helped.stdout
    assert run().returncode != 1  # no arguments: the help
    assert run("nonsense").returncode != 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_serve_until_told_to_stop(tmp_path: Path, number: signal.Signals) -> None:
    token = tmp_path / "token"
    token.write_text("secret\n")
    server = subprocess.Popen(
        [*COMMAND, "serve", "--name", "job", "--listen", "127.0.0.1:0", "--token-file", str(token)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdout is not None
    try:
        first = server.stdout.readline()
        assert re.fullmatch(r"coordinator of job job at 127\.0\.0\.1:\d+\n", first), first
        time.sleep(0.2)
        server.send_signal(number)
        assert server.wait(timeout=10) == 0
    finally:
        server.kill()
        server.stdout.close()


def test_serve_says_why_it_cannot() -> None:
    done = run("serve", "--name", "job", "--listen", "no such host:1")
    assert done.returncode == 1
    assert "bascule serve:" in done.stderr
