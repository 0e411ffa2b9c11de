"""``bascule status``: what it asks, and how it shows what it got."""

from __future__ import annotations

import copy
import io
import json
import os
import signal
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

import bascule
from bascule.cli import app
from bascule.cli.status import render

COMMAND = [sys.executable, "-c", "from bascule.cli import main; main()"]

# Recorded: a job of two trainers and an engine of two, one of whose ranks had an error.
TERM = 1839251216542314
RECORDED: dict[str, Any] = {
    "blob_bytes": 2_700_000,
    "blobs": 2,
    "complete": True,
    "coordinator": 11704582859968289349,
    "epoch": 1839251216534531,
    "heartbeat_ms": 500,
    "job": "run1",
    "members": [
        {
            "build": "0.1.0",
            "done": 12,
            "error": None,
            "incarnation": 6421998418769653217,
            "last": {
                "bytes": 4_100_000_000,
                "stall_ms": 210.5,
                "term": TERM,
                "took_ms": 205.25,
                "version": 12,
            },
            "layout": 0,
            "node": "2e858e1530875052216abe6c3e0b81a7",
            "rank": rank,
            "role": "trainer",
            "silent_ms": 23,
            "stale_term": False,
            "template": "767e14c13b315714a676cc3fc061c4a1",
            "term": TERM,
            "world_size": 2,
        }
        for rank in (1, 0)
    ]
    + [
        {
            "build": "0.1.0",
            "done": 11,
            "engine": "e0",
            "error": None,
            "incarnation": 8223243558934177550 + rank,
            "last": {
                "bytes": 8_200_000_000,
                "stall_ms": 31.4,
                "term": TERM,
                "took_ms": 1600.0,
                "version": 11,
            },
            "layout": 0,
            "node": "2e858e1530875052216abe6c3e0b81a7",
            "rank": rank,
            "role": "rollout",
            "servable": True,
            "serving": {"term": TERM, "version": 11},
            "silent_ms": 3,
            "template": "261d51b1f2b0bd62e6cdd5137def2938",
            "world_size": 2,
        }
        for rank in range(2)
    ],
    "settled": True,
    "term": TERM,
    "trainer_world_size": 2,
    "uptime_ms": 3_723_000,
    "versions": [
        {
            "age_ms": 60_000,
            "holders": 2,
            "reason": "",
            "state": "available",
            "term": TERM,
            "version": 11,
        },
        {
            "age_ms": 900,
            "holders": 0,
            "reason": "trainer 1 was lost",
            "state": "aborted",
            "term": TERM,
            "version": 12,
        },
    ],
}


def shown(status: dict[str, Any], width: int = 160) -> str:
    out = io.StringIO()
    Console(file=out, width=width, markup=False, highlight=False).print(render(status))
    return out.getvalue()


def line_with(text: str, word: str) -> str:
    return next(line for line in text.splitlines() if word in line)


def test_a_job_in_order() -> None:
    text = shown(RECORDED)
    assert line_with(text, "job run1").endswith("up 62 min 3 s")
    assert f"term {TERM}: 2 of 2 trainers" in text
    assert "not complete" not in text
    trainer = line_with(text, "trainer 1/2").split()
    assert trainer[2:] == [
        *("in", "the", "term", "version", "12", "12", "205", "ms"),
        *("210", "ms", "4.1", "GB", "23", "ms", "2e858e153087"),
    ]
    rollout = line_with(text, "engine e0 rank 0/2").split()
    assert rollout[4:7] == ["serves", "version", "11"]
    assert rollout[10:18] == ["1.6", "s", "31.4", "ms", "8.2", "GB", "3", "ms"]
    names = [line for line in text.splitlines() if line.startswith(("trainer ", "engine "))]
    assert names == sorted(names, key=lambda name: (name[0] == "e", name))
    versions = text.partition("versions")[2].splitlines()
    assert versions[2].split()[:2] == ["12", "aborted"]
    assert versions[2].endswith("trainer 1 was lost")
    assert versions[3].split()[:5] == ["11", "available", "2", "60", "s"]
    assert "last errors" not in text


def test_what_is_wrong_is_told() -> None:
    status = copy.deepcopy(RECORDED)
    status["settled"] = status["complete"] = False
    status["members"][1]["stale_term"] = True
    status["members"][2]["servable"] = False
    status["members"][3]["serving"] = None
    status["members"][3]["error"] = {"message": "chunk 3 [of] trainer 1 differs", "age_ms": 7_300}
    text = shown(status)
    assert "not settled" in text
    assert "1 of 2 trainers, not complete" in text
    assert "of an older term" in line_with(text, "trainer 0/2")
    assert "serves version 11, not servable" in line_with(text, "engine e0 rank 0/2")
    assert "serves nothing" in line_with(text, "engine e0 rank 1/2")
    # The brackets are text, not markup.
    assert "engine e0 rank 1/2, 7.3 s ago: chunk 3 [of] trainer 1 differs" in text


def test_a_coordinator_that_sends_less() -> None:
    assert "no trainers yet" in shown({"job": "run1"})
    status = copy.deepcopy(RECORDED)
    for member in status["members"]:
        for key in ("last", "done", "error", "node", "silent_ms"):
            del member[key]
    assert "serves version 11" in shown(status)


def test_it_fits_a_narrow_terminal() -> None:
    assert max(map(len, shown(RECORDED, width=80).splitlines())) <= 80


def test_of_a_real_coordinator() -> None:
    job = bascule.Job(name="real", token="secret")
    with bascule.CoordinatorServer.start(job) as server:
        arguments = ["status", server.address, "--token", "secret"]
        assert "no trainers yet" in CliRunner().invoke(app, arguments).stdout
        job = bascule.Job(name="real", token="secret", coordinator=server.address)
        layout = bascule.Layout.from_arrays({"w": np.zeros(8, np.float32)})
        with bascule.WeightSender.connect(job, layout=layout) as sender:
            sender.publish(3).wait()
            with pytest.raises(bascule.InvalidArgument):
                sender.publish(2)
            time.sleep(0.7)  # a heartbeat carries both
            done = CliRunner().invoke(app, arguments)
            assert done.exit_code == 0
            assert "trainer 0/1  in the term  version 3" in done.stdout
            assert done.stdout.splitlines()[-1].startswith("trainer 0/1, ")
            assert "ago: " in done.stdout
            as_json = CliRunner().invoke(app, [*arguments, "--json"])
            same = {"job", "term", "versions", "heartbeat_ms"}
            told = server.status()
            told["versions"][0]["age_ms"] = json.loads(as_json.stdout)["versions"][0]["age_ms"]
            assert {key: json.loads(as_json.stdout)[key] for key in same} == {
                key: told[key] for key in same
            }
        wrong = CliRunner().invoke(app, ["status", server.address, "--token", "wrong"])
        assert (wrong.exit_code, wrong.stdout) == (1, "")
        assert wrong.stderr.startswith("bascule status: ")
        assert wrong.stderr.count("\n") == 1


def test_nobody_there() -> None:
    done = CliRunner().invoke(app, ["status", "127.0.0.1:1", "--timeout", "0.5"])
    assert done.exit_code == 1
    assert done.stderr.startswith("bascule status: ")


def test_watch_outlives_the_coordinator() -> None:
    job = bascule.Job(name="watched", token="secret")
    server = bascule.CoordinatorServer.start(job)
    command = [*COMMAND, "status", server.address, "--token", "secret", "--watch", "0.1"]
    watching = subprocess.Popen(
        [*command, "--json", "--timeout", "1"], stdout=subprocess.PIPE, text=True
    )
    assert watching.stdout is not None
    try:
        assert json.loads(watching.stdout.readline())["job"] == "watched"
        server.stop()
        answers = (json.loads(line) for line in watching.stdout)
        assert "error" in next(answer for answer in answers if "job" not in answer)
        watching.send_signal(signal.SIGINT)
        assert watching.wait(timeout=10) == 0
    finally:
        watching.kill()
        watching.wait()
        watching.stdout.close()


def test_watch_on_a_terminal() -> None:
    job = bascule.Job(name="watched", token="secret")
    with bascule.CoordinatorServer.start(job) as server:
        master, slave = os.openpty()
        watching = subprocess.Popen(
            [*COMMAND, "status", server.address, "--token", "secret", "--watch", "0.1"],
            stdout=slave,
            env=os.environ | {"TERM": "xterm", "COLUMNS": "100", "LINES": "30"},
        )
        os.close(slave)
        try:
            seen = b""
            while seen.count(b"job watched") < 3:
                seen += os.read(master, 1 << 16)
            watching.send_signal(signal.SIGINT)
            assert watching.wait(timeout=10) == 0
        finally:
            watching.kill()
            watching.wait()
            os.close(master)
