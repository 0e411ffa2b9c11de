"""The command line as a whole, and the commands that need no test file of their own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import bascule
from bascule.cli import app
from bascule.cli._common import parse_amount, shown_bytes, shown_seconds

COMMAND = [sys.executable, "-c", "from bascule.cli import main; main()"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=120)


@contextmanager
def serving(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server process and the first line that it prints."""
    server = subprocess.Popen(
        [*COMMAND, "serve", "--name", "job", "--listen", "127.0.0.1:0", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"JOB_TOKEN": "from the environment"},
    )
    assert server.stdout is not None
    assert server.stderr is not None
    try:
        yield server, server.stdout.readline()
    finally:
        server.kill()
        server.wait()
        server.stdout.close()
        server.stderr.close()


def test_version_and_help() -> None:
    assert run("--version").stdout.strip() == f"bascule {bascule.__version__}"
    helped = run("--help")
    assert helped.returncode == 0
    for command in ("serve", "status", "demo"):
        assert command in helped.stdout


@pytest.mark.parametrize("arguments", [["nonsense"], ["--nonsense"], ["serve"], ["status"]])
def test_usage_errors_are_2(arguments: list[str]) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_serve_until_told_to_stop(tmp_path: Path, number: signal.Signals) -> None:
    token = tmp_path / "token"
    token.write_text("secret\n")
    with serving("--token-file", str(token)) as (server, first):
        assert re.fullmatch(r"coordinator of job job at 127\.0\.0\.1:\d+\n", first), first
        time.sleep(0.2)
        start = time.monotonic()
        server.send_signal(number)
        assert server.wait(timeout=10) == 0
        assert time.monotonic() - start < 2
        assert server.stdout is not None
        assert server.stdout.read() == "stopped\n"


@pytest.mark.parametrize(
    ("options", "token"),
    [
        (["--token", "typed!"], "typed!"),
        (["--token=typed!"], "typed!"),
        (["--token-env", "JOB_TOKEN"], "from the environment"),
        ([], ""),
    ],
)
def test_serve_takes_the_token_and_hides_it(options: list[str], token: str) -> None:
    with serving(*options, "--json") as (server, first):
        address = json.loads(first)["address"]
        assert bascule.coordinator_status(address, token)["job"] == "job"
        if token:
            with pytest.raises(bascule.PermissionDenied):
                bascule.coordinator_status(address, "another")
        arguments = Path(f"/proc/{server.pid}/cmdline").read_bytes()
        assert b"serve" in arguments
        assert b"typed!" not in arguments


def test_one_token_and_no_empty_one(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.write_text("\n")
    for options in (
        ["--token", "a", "--token-env", "B"],
        ["--token-file", str(empty)],
        ["--token-file", str(tmp_path / "missing")],
        ["--token-env", "NO_SUCH_VARIABLE"],
    ):
        done = CliRunner().invoke(app, ["status", "127.0.0.1:1", *options])
        assert done.exit_code == 2, options


def test_errors_are_one_line_and_tracebacks_on_demand() -> None:
    listen = ["serve", "--name", "job", "--listen", "no such host:1", "--token", "t"]
    done = run(*listen)
    assert done.returncode == 1
    assert done.stdout == ""
    assert re.fullmatch(r"bascule serve: .*no such host.*\n", done.stderr), done.stderr
    done = run("--debug", *listen)
    assert done.returncode == 1
    assert "Traceback" in done.stderr


def test_an_error_tells_rank_peer_and_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(*_: object, **__: object) -> None:
        raise bascule.DataLoss("sums\ndiffer", rank=3, peer="trainer 1", tensor="model.norm.weight")

    monkeypatch.setattr(bascule, "coordinator_status", ask)
    done = CliRunner().invoke(app, ["status", "127.0.0.1:1"])
    assert done.exit_code == 1
    expected = "bascule status: sums differ [rank 3, peer trainer 1, tensor model.norm.weight]\n"
    assert done.stderr == expected


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shell_completion(shell: str) -> None:
    done = subprocess.run(
        [*COMMAND, "--show-completion", shell],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert "_BASCULE_COMPLETE" in done.stdout
    # What the script of bash asks for.
    done = subprocess.run(
        COMMAND,
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ
        | {"_BASCULE_COMPLETE": "complete_bash", "COMP_WORDS": "bascule st", "COMP_CWORD": "1"},
    )
    assert done.stdout.split() == ["status"]


def test_amounts() -> None:
    assert parse_amount("20GB") == 20_000_000_000
    assert parse_amount("16 GiB/s") == 16 << 30
    assert parse_amount("400Gbit/s") == parse_amount("400Gbps") == 50_000_000_000
    assert parse_amount("1.5e9") == 1_500_000_000
    for wrong in ("", "GB", "-1", "20 parsecs", "1..2GB"):
        with pytest.raises(typer.BadParameter):
            parse_amount(wrong)


def test_shown_numbers() -> None:
    shown = [shown_bytes(n) for n in (0, 999, 999_600, 1_234_000_000, 5e17)]
    assert shown == ["0 B", "999 B", "1 MB", "1.23 GB", "500 PB"]
    shown = [shown_seconds(s) for s in (0, 0.0123, 1, 61, 125, 7300, 200_000)]
    assert shown == ["0 ms", "12.3 ms", "1 s", "61 s", "2 min 5 s", "2 h 1 min", "2 d 7 h"]


def test_the_documentation_names_every_command_and_its_own_options() -> None:
    text = (Path(__file__).parents[2] / "docs/cli.md").read_text()
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for name, command in commands.items():
        assert f"`{name}`" in text
        options = {o for parameter in command.params for o in parameter.opts if o[:2] == "--"}
        missing = {option for option in options if option not in text}
        assert missing <= {"--heartbeat", "--timeout", "--help"}, name
