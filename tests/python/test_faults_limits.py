"""What a process may use is used up: memory, descriptors, places for sockets."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jobs.harness import Job, StartJob

# ---- descriptors ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["e0 rank 1", "trainer 1"])
def test_descriptors_used_up(start: StartJob, name: str) -> None:
    """20: The error names who is out of them and the limit; once some are back the job goes on."""
    with start(start=False) as job:
        job.start_coordinator()
        job.connect_all(job.names())
        job.publish(1)
        poor = job[name]
        poor.ask("limit", what="RLIMIT_NOFILE", value=64)
        assert poor.ask("use_up_descriptors", left=0) > 0
        met: list[str] = []
        for _ in range(2):  # the first one may find that ranks must connect to each other
            errors = job.errors(job.begin_all(job.engine(), "update", timeout=2))
            assert any(error is not None for error in errors)
            met += [f"{error.type}: {error.message}" for error in errors if error is not None]
        assert any("ulimit -n" in text or "open files" in text for text in met), met
        job.check_engine(values=[-1])
        poor.ask("give_back_descriptors")
        job.serve(1)
        job.publish(2)
        job.serve(2)


_DEAF = pytest.mark.xfail(
    reason="a gRPC server that once had no descriptor for a connection never accepts another one"
)


@_DEAF
@pytest.mark.parametrize("name", ["coordinator", "e0 rank 0"])
def test_descriptors_used_up_where_others_connect(start: StartJob, name: str) -> None:
    """20: Who could not connect for want of descriptors on the other side can when it has some."""
    with start(start=False) as job:
        job.start_coordinator()
        job.connect_all(["trainer 0", "trainer 1", "e0 rank 0"])
        job.publish(1)
        poor = job[name]
        poor.ask("limit", what="RLIMIT_NOFILE", value=64)
        poor.ask("use_up_descriptors", left=0)
        first = job.connect("e0 rank 1", timeout=2)
        if name == "coordinator":
            error = first.error()
            assert error is not None
            assert error.type in ("Unavailable", "DeadlineExceeded")
        else:
            first.result()
            assert job.rank(1).error("poll", timeout=1) is not None
        poor.ask("give_back_descriptors")
        if name == "coordinator":
            job.rank(1).ask("connect_again", timeout=5)
        job.serve(1, timeout=5)


# ---- memory -----------------------------------------------------------------------------------


@pytest.fixture
def memory_group() -> Iterator[Path]:
    """A memory control group below this process's own, where one may be made."""
    found = None
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "memory":
            found = Path("/sys/fs/cgroup/memory") / path.lstrip("/")
            break
        if controllers == "" and found is None:
            found = Path("/sys/fs/cgroup") / path.lstrip("/")
    if found is None or not (found / "cgroup.procs").exists():
        pytest.skip("no memory control group is mounted here")
    made = found / f"bascule-test-{os.getpid()}"
    try:
        made.mkdir()
    except OSError as error:
        pytest.skip(f"no memory control group may be made here: {error}")
    try:
        limits = [made / name for name in ("memory.max", "memory.limit_in_bytes")]
        if not any(limit.exists() for limit in limits):
            pytest.skip("the memory controller is not enabled for groups below this one")
        yield made
    finally:
        made.rmdir()


def _confine(job: Job, name: str, role: str, group: Path, mebibytes: int) -> None:
    """Start the process of a member in the group, with so much memory."""
    process = job.spawn(name, role)
    for limit in ("memory.max", "memory.limit_in_bytes"):
        if (group / limit).exists():
            (group / limit).write_text(str(mebibytes << 20))
    (group / "cgroup.procs").write_text(str(process.pid))


@pytest.mark.parametrize("name", ["trainer 0", "e0 rank 0"])
def test_a_memory_limit_is_an_error_and_kills_nobody(
    start: StartJob, memory_group: Path, name: str
) -> None:
    """20: All memory is taken at connect, and asked for before it is touched.

    The rank fits into its control group, its arenas or its shadow do not.
    """
    with start(trainers=1, engines={"e0": 1}, bulk=24, start=False) as job:
        job.start_coordinator()
        role = "trainer" if name.startswith("trainer") else "rollout"
        if role == "rollout":
            job.connect_all(["trainer 0"])
        _confine(job, name, role, memory_group, 40 if role == "trainer" else 20)
        process = job[name]
        shape = {"bulk": 24}
        arguments: dict[str, Any] = {"rank": 0, "world": 1, "timeout": 10, "shape": shape}
        arguments["job"] = job.options()
        if role == "rollout":
            arguments |= {"engine": "e0", "shadow": "host"}
        error = process.error("connect", **arguments)
        assert error is not None
        assert error.type == "ResourceExhausted"
        assert "memory limit" in error.message
        assert "MiB" in error.message
        assert process.alive
        for limit in ("memory.max", "memory.limit_in_bytes"):
            if (memory_group / limit).exists():
                (memory_group / limit).write_text(str(1 << 30))
        process.ask("connect_again", timeout=10)
        if role == "trainer":
            job.connect_all(["e0 rank 0"])
        job.publish(1)
        job.serve(1)
        process.end()


def test_address_space_used_up(start: StartJob) -> None:
    """20: A mapping that fails is an error that names the limit (RLIMIT_AS)."""
    with start(trainers=1, engines={"e0": 1}, bulk=16, start=False) as job:
        job.start_coordinator()
        error = job.connect("trainer 0", room=1 << 20).error()
        assert error is not None
        assert error.type == "ResourceExhausted"
        assert "ulimit -v" in error.message
        job.trainer(0).ask("connect", **_again(job))
        job.connect_all(["e0 rank 0"])
        job.publish(1)
        job.serve(1)


def test_a_file_size_limit_on_shared_memory(start: StartJob) -> None:
    """20: A limit on memory files (RLIMIT_FSIZE) is an error; its signal ends no process."""
    with start(trainers=1, engines={"e0": 1}, bulk=16, start=False) as job:
        job.start_coordinator()
        process = job.spawn("trainer 0", "trainer")
        process.ask("limit", what="RLIMIT_FSIZE", value=1 << 20)
        error = process.error("connect", **_again(job))
        assert error is not None
        assert error.type == "ResourceExhausted"
        assert "ulimit -f" in error.message
        assert process.alive
        process.ask("limit", what="RLIMIT_FSIZE", value=1 << 40)
        process.ask("connect_again", timeout=10)
        job.connect_all(["e0 rank 0"])
        job.publish(1)
        job.serve(1)


def _again(job: Job) -> dict[str, Any]:
    return {
        "rank": 0,
        "world": 1,
        "timeout": 10.0,
        "job": job.options(),
        "shape": {"bulk": job.shape.bulk},
    }


def test_nothing_lies_in_dev_shm(start: StartJob) -> None:
    """20: Shared memory has no name: a small or full /dev/shm is no limit, and nothing is left."""
    with start() as job:
        job.publish(1)
        job.update(1)
        for process in (*job.trainers(), *job.engine()):
            files = Path(f"/proc/{process.pid}/map_files")
            if not os.access(files, os.R_OK | os.X_OK):
                pytest.skip("mappings of other processes cannot be looked at here")
            maps = Path(f"/proc/{process.pid}/maps").read_text()
            assert "memfd:" in maps
            assert "/dev/shm/" not in maps


# ---- places for sockets -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("folder", "says"),
    [
        pytest.param("/missing", "must exist and be writable", id="missing"),
        # Not even root can make a file there.
        pytest.param("/proc/self", "must exist and be writable", id="read-only"),
        pytest.param("/dev/null", "must exist and be writable", id="no-folder"),
        pytest.param("/" + "x" * 110, "choose a shorter directory", id="too-long"),
        pytest.param("here", "must be an absolute path", id="relative"),
    ],
)
def test_no_place_for_sockets(start: StartJob, folder: str, says: str) -> None:
    """7: A socket that cannot be made is an error at connect that names the path."""
    with start(trainers=1, engines={"e0": 1}, start=False) as job:
        job.start_coordinator()
        for name in job.names():
            error = job.connect(name, job={"socket_directory": folder}, timeout=5).error()
            assert error is not None
            assert error.type == "InvalidArgument"
            assert folder in error.message
            assert says in error.message


def test_a_full_disk(start: StartJob, short_folder: Path) -> None:
    """7: The same where the folder is there and has no room for a socket."""
    options = {"socket_directory": str(short_folder)}
    with start(engines={"e0": 1}, start=False, job_options=options) as job:
        job.start_coordinator()
        job.connect_all(["trainer 0", "trainer 1"])
        trainer = job.trainer(0)
        trainer.ask("close")
        call = trainer.begin("connect_in_full_folder", folder=str(short_folder), timeout=5.0)
        error = call.error()
        if error is None and call.result() is not None:
            pytest.skip(call.result())
        assert error is not None
        assert error.type in ("InvalidArgument", "ResourceExhausted")
        assert "No space left" in error.message
        assert str(short_folder) in error.message


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder whose path leaves room for the names of sockets."""
    with tempfile.TemporaryDirectory(prefix="b") as folder:
        yield Path(folder)


def test_the_place_of_the_sockets_vanishes(start: StartJob, short_folder: Path) -> None:
    """8: Who is connected goes on; who comes later is told which path it cannot reach."""
    folder = short_folder
    options = {"socket_directory": str(folder)}
    with start(engines={"e0": 1, "e1": 1}, start=False, job_options=options) as job:
        job.start_coordinator()
        job.connect_all(["trainer 0", "trainer 1", "e0 rank 0"])
        job.publish(1)
        job.update(1)
        assert len(list(folder.iterdir())) == 3
        for socket in folder.iterdir():
            socket.unlink()
        job.publish(2)
        job.update(2)
        job.connect("e1 rank 0").result()
        error = job.rank(0, "e1").error("update", timeout=2)
        assert error is not None
        assert str(folder) in error.message or "trainer" in (error.peer or "")
        job.publish(3)
        job.update(3)
