"""Ctrl-C, other threads, fork, and the end of the interpreter."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import bascule


@pytest.fixture
def job() -> bascule.Job:
    return bascule.Job(name=f"test-{uuid.uuid4().hex[:8]}")


@pytest.fixture
def sender(job: bascule.Job) -> Iterator[bascule.WeightSender]:
    """Rank 0 of two: rank 1 never comes, so that a publish waits."""
    layout = bascule.Layout.from_arrays({"w": np.zeros(4, np.float32)})
    with bascule.WeightSender.connect(job, world_size=2, layout=layout) as sender:
        yield sender


def interrupt_after(seconds: float, call: Callable[[], object]) -> float:
    """Press Ctrl-C while ``call`` waits; how long it took to be seen."""
    pressed = 0.0

    def press() -> None:
        nonlocal pressed
        pressed = time.monotonic()
        os.kill(os.getpid(), signal.SIGINT)

    timer = threading.Timer(seconds, press)
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        call()
    took = time.monotonic() - pressed
    timer.join()
    return took


def test_ctrl_c_while_waiting(sender: bascule.WeightSender) -> None:
    assert interrupt_after(0.3, lambda: sender.publish(1, timeout=60)) < 1


def test_ctrl_c_while_connecting() -> None:
    job = bascule.Job(name="nobody", coordinator="127.0.0.1:1")
    layout = bascule.Layout.from_arrays({"w": np.zeros(4, np.float32)})

    def connect() -> None:
        bascule.WeightSender.connect(job, layout=layout, timeout=3)

    assert interrupt_after(0.3, connect) < 1


def test_other_threads_run_while_one_waits(sender: bascule.WeightSender) -> None:
    ended = threading.Event()

    def wait() -> None:
        with pytest.raises(bascule.DeadlineExceeded):
            sender.publish(1, timeout=1)
        ended.set()

    thread = threading.Thread(target=wait)
    thread.start()
    count = 0
    while not ended.is_set() and count < 200:
        time.sleep(0.001)
        count += 1
    assert count == 200, "the waiting thread kept the interpreter to itself"
    thread.join()


def test_a_closed_session_ends_the_waits_of_other_threads(job: bascule.Job) -> None:
    errors: list[BaseException] = []
    layout = bascule.Layout.from_arrays({"w": np.zeros(4, np.float32)})
    server = bascule.CoordinatorServer.start(job)
    job = dataclasses.replace(job, coordinator=server.address)
    sender = bascule.WeightSender.connect(job, world_size=2, layout=layout)

    def wait() -> None:
        try:
            sender.publish(1, timeout=60)
        except bascule.Error as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.2)
    sender.close()
    thread.join(timeout=5)
    assert not thread.is_alive()
    assert isinstance(errors[0], bascule.Closed)
    server.stop()


def test_calls_in_a_child_after_fork_say_so() -> None:
    # In a process of its own: the threads of other tests and fork do not go together.
    code = """
import os, sys, warnings
import numpy as np
import bascule
warnings.simplefilter("ignore", DeprecationWarning)
layout = bascule.Layout.from_arrays({"w": np.zeros(4, np.float32)})
sender = bascule.WeightSender.connect(bascule.Job(name="fork"), layout=layout)
publication = sender.publish(1)
pid = os.fork()
if pid == 0:
    for call in (lambda: sender.term, lambda: sender.publish(2), publication.wait, sender.close):
        try:
            call()
            os._exit(1)
        except bascule.Forked as error:
            assert "parent" in str(error)
    del sender, publication
    try:
        bascule.WeightSender.connect(bascule.Job(name="fork"), layout=layout)
        os._exit(2)
    except bascule.Forked as error:
        assert "spawn" in str(error)
    sys.exit(0)
_, status = os.waitpid(pid, 0)
assert os.waitstatus_to_exitcode(status) == 0, status
sender.publish(2).wait()
print("parent goes on")
"""
    assert run(code) == "parent goes on"


# Seconds that a process may take to end, on a machine that does much else.
EXIT_SECONDS = 10


def run(code: str, timeout: float = 120) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, (done.returncode, done.stderr)
    assert "Fatal" not in done.stderr
    return done.stdout.strip()


SESSIONS = """
import contextlib, sys, threading, time
import numpy as np
import bascule
size = 4 << 20
source, target = np.ones(size, np.float32), np.zeros(size, np.float32)
job = bascule.Job(name="exit")
sender = bascule.WeightSender.connect(job, layout=bascule.Layout.from_arrays({"w": source}))
job = bascule.Job(name="exit", coordinator=sender.coordinator)
receiver = bascule.WeightReceiver.connect(
    job, engine="e", layout=bascule.Layout.from_arrays({"w": target}))
sender.publish(1).wait()
update = receiver.poll()
"""


@pytest.mark.parametrize(
    "end",
    [
        pytest.param("update.stage()", id="staging"),
        pytest.param("update.stage(); update.wait_staged()", id="staged"),
        pytest.param(
            "update.stage()\n"
            "for call in (update.wait_staged, update.commit):\n"
            "    threading.Thread(target=call, kwargs={'timeout': 1000}, daemon=True).start()\n"
            "time.sleep(0.05)",
            id="daemon-threads-inside",
        ),
        pytest.param(
            "def late():\n"
            "    while True:\n"
            "        with contextlib.suppress(bascule.Error): sender.term, receiver.poll()\n"
            "for _ in range(8): threading.Thread(target=late, daemon=True).start()\n"
            "class Slow:\n"
            "    def __del__(self, sleep=time.sleep): sleep(0.5)  # lets the others come back\n"
            "slow = Slow()\n"
            "time.sleep(0.05)",
            id="daemon-threads-in-and-out",
        ),
        pytest.param("del sender, receiver", id="owner-gone"),
        pytest.param("sys.modules.clear()", id="modules-gone"),
        pytest.param("receiver.cycle = receiver; update.stage(); del receiver, sender", id="cycle"),
    ],
)
def test_exit_with_an_update_in_flight(end: str) -> None:
    ended = float(run(SESSIONS + end + "\nprint(time.monotonic())"))
    assert time.monotonic() - ended < EXIT_SECONDS


def test_a_process_that_ends_leaves_its_job() -> None:
    """Others learn it from the process itself, not from its silence: that takes 30 s here."""
    job = bascule.Job(name="left", heartbeat=5)
    with bascule.CoordinatorServer.start(job) as server:
        run(
            f"""
import numpy as np
import bascule
layout = bascule.Layout.from_arrays({{"w": np.zeros(4, np.float32)}})
job = bascule.Job(name="left", coordinator={server.address!r}, heartbeat=5)
sender = bascule.WeightSender.connect(job, layout=layout)
sender.publish(1).wait()
"""
        )
        status = server.status()
        assert status["members"] == []
        assert [version["state"] for version in status["versions"]] == ["retired"]


def test_children_forked_before_may_connect() -> None:
    code = """
import os, sys, warnings
import numpy as np
import bascule
pid = os.fork()
if pid == 0:
    layout = bascule.Layout.from_arrays({"w": np.zeros(4, np.float32)})
    with bascule.WeightSender.connect(bascule.Job(name="child"), layout=layout) as sender:
        sender.publish(1).wait()
    sys.exit(0)
_, status = os.waitpid(pid, 0)
print(os.waitstatus_to_exitcode(status))
"""
    assert run(code) == "0"


def test_exit_with_a_call_that_cannot_be_ended() -> None:
    """Connecting to nobody for 1000 s: by Ctrl-C on the main thread, and on a daemon thread."""
    code = """
import os, signal, threading, time
import numpy as np
import bascule
layout = bascule.Layout.from_arrays({"w": np.zeros(4, np.float32)})
job = bascule.Job(name="nobody", coordinator="127.0.0.1:1")
connect = lambda: bascule.WeightSender.connect(job, layout=layout, timeout=1000)
threading.Thread(target=connect, daemon=True).start()
sender = bascule.WeightSender.connect(bascule.Job(name="one"), layout=layout)
threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
try:
    connect()
except KeyboardInterrupt:
    print(time.monotonic())
"""
    interrupted = float(run(code))
    assert time.monotonic() - interrupted < EXIT_SECONDS


def test_processes(tmp_path: Any) -> None:
    """Two trainers and an engine of one rank, each a process."""
    common = """
import sys, time
import numpy as np
import bascule
from bascule.layout import Block, DType, LayoutBuilder, LogicalTensor, Mesh, shard
folder, name, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
path = folder + "/address"
tensor = LogicalTensor("w", [5, 3], DType.F32)
"""
    trainer = (
        common
        + """
part = np.zeros((3, 3) if rank == 0 else (2, 3), np.float32)
layout = LayoutBuilder(Mesh(["dp"], [2]), [rank]).add(Block.of(tensor, {"dp": shard(0)}), part)
while rank == 1 and not __import__("os").path.exists(path):
    time.sleep(0.01)
job = bascule.Job(
    name=name, token="t", coordinator="here" if rank == 0 else open(path).read())
with bascule.WeightSender.connect(job, rank=rank, world_size=2, layout=layout.build()) as sender:
    if rank == 0:
        open(path + ".new", "w").write(sender.coordinator)
        __import__("os").rename(path + ".new", path)
    for version in (1, 2, 3):
        part[:] = version * 100 + rank * 9 + np.arange(part.size).reshape(part.shape)
        sender.publish(version).wait()
        while not __import__("os").path.exists(f"{folder}/got{version}"):
            time.sleep(0.01)
"""
    )
    engine = (
        common
        + """
while not __import__("os").path.exists(path):
    time.sleep(0.01)
whole = np.zeros((5, 3), np.float32)
layout = bascule.Layout.from_arrays({"w": whole})
job = bascule.Job(name=name, token="t", coordinator=open(path).read())
with bascule.WeightReceiver.connect(job, engine="e", layout=layout) as receiver:
    for version in (1, 2, 3):
        while (update := receiver.poll()) is None:
            time.sleep(0.01)
        update.stage()
        update.wait_staged()
        assert update.ready()
        update.commit()
        assert update.id.version == version
        np.testing.assert_array_equal(whole.ravel(), version * 100 + np.arange(15))
        open(f"{folder}/got{version}", "w").close()
"""
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path), tmp_path.name, str(rank)])
        for code, rank in ((trainer, 0), (trainer, 1), (engine, 0))
    ]
    try:
        assert [process.wait(timeout=120) for process in processes] == [0, 0, 0]
    finally:
        for process in processes:
            process.kill()
