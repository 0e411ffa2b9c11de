"""A job of real processes: a coordinator, trainers and engines; faults, and what must hold after.

::

    with Job(zygote, folder, trainers=2, engines={"e0": 2}) as job:
        job.publish(1)
        job.update(1)
        job.trainer(1).kill()
        ...

Leaving the job kills all its processes and fails where a call had outlived its deadline.
"""

from __future__ import annotations

import random
import socket
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from jobs.process import Call, CallError, DiedError, OverdueError, Process, Zygote

__all__ = ["Call", "CallError", "DiedError", "Job", "OverdueError", "Process", "StartJob", "Zygote"]

#: Seconds between heartbeats, unless a test says otherwise. A rank that is silent for six is gone.
HEARTBEAT = 0.2

# Seconds that a call may end after its deadline: the machine may do much else.
_GRACE = 8.0

# For calls that must succeed. Nothing waits that long unless something is wrong.
_SOON = 30.0


@dataclass
class Shape:
    """What a job is made of, so that any part of it can be made again."""

    trainers: int = 2
    engines: dict[str, int] = field(default_factory=lambda: {"e0": 2})
    replicas: bool = False
    bulk: int = 0
    shared: bool = False


#: What the fixture ``start`` is: makes a job with the arguments of `Job`.
StartJob = Callable[..., "Job"]


def _free_port() -> int:
    """Return a port that nothing uses, below those that the kernel gives to clients."""
    while True:
        port = random.SystemRandom().randrange(20000, 32000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


class Job:
    """The processes of a job. A context manager.

    Parameters
    ----------
    zygote
        Makes the processes.
    folder
        For their logs.
    trainers, engines, replicas, bulk, shared
        What to start: trainer ranks, engines with their numbers of ranks, whether all trainers
        hold everything, mebibytes of a large tensor, whether trainers have shared memory.
    heartbeat
        Seconds.
    trainer_options, rollout_options
        For the ``connect`` of all.
    start
        False: the test starts what it wants.
    """

    def __init__(
        self,
        zygote: Zygote,
        folder: Path,
        *,
        trainers: int = 2,
        engines: dict[str, int] | None = None,
        replicas: bool = False,
        bulk: int = 0,
        shared: bool = False,
        heartbeat: float = HEARTBEAT,
        trainer_options: dict[str, Any] | None = None,
        rollout_options: dict[str, Any] | None = None,
        job_options: dict[str, Any] | None = None,
        start: bool = True,
    ) -> None:
        self.zygote = zygote
        self.folder = folder
        engines = {"e0": 2} if engines is None else engines
        self.shape = Shape(trainers, engines, replicas, bulk, shared)
        self.name = f"job-{uuid.uuid4().hex[:8]}"
        self.heartbeat = heartbeat
        self.address = f"127.0.0.1:{_free_port()}"
        self.trainer_options = trainer_options or {}
        self.rollout_options = rollout_options or {}
        self.job_options = job_options or {}
        self.members: dict[str, Process] = {}
        self.everyone: list[Process] = []
        #: Where the experts of "trainers" and of engines are now, if not where they were at first.
        self.experts: dict[str, dict[str, int]] = {}
        self.term = 0  # of what was published last
        self.values: dict[tuple[int, int], int] = {}
        if start:
            self.start()

    # ---- starting -----------------------------------------------------------------------------

    def options(self, **changes: Any) -> dict[str, Any]:
        """Return the arguments of `bascule.Job` for a member."""
        return {
            "name": self.name,
            "token": "secret",
            "heartbeat": self.heartbeat,
            "coordinator": self.address,
            **self.job_options,
            **changes,
        }

    def spawn(self, name: str, role: str) -> Process:
        """Make a process in place of the one with that name, which is let alone.

        Parameters
        ----------
        name
            ``"coordinator"``, ``"trainer 0"`` or ``"e0 rank 1"``; others are for the test.
        role
            See `jobs.worker.ROLES`.
        """
        process = Process(self.zygote, name, role, self.folder)
        self.members[name] = process
        self.everyone.append(process)
        return process

    def start(self) -> None:
        """Start everything and wait until all are connected."""
        self.start_coordinator()
        self.connect_all(self.names())

    def start_coordinator(self) -> Process:
        """Start the coordinator, the first or another one at the same address."""
        process = self.spawn("coordinator", "coordinator")
        process.ask("start", deadline=_SOON, **self.options(listen=self.address))
        return process

    def names(self) -> list[str]:
        """Return the names of all members: trainers first, engines by name and rank."""
        found = [f"trainer {rank}" for rank in range(self.shape.trainers)]
        for engine, world in sorted(self.shape.engines.items()):
            found += [f"{engine} rank {rank}" for rank in range(world)]
        return found

    def connect(self, name: str, *, timeout: float = _SOON, **changes: Any) -> Call:
        """Start a member and begin its ``connect``.

        Parameters
        ----------
        name
            As in `names`.
        timeout
            Seconds.
        changes
            Of the arguments; ``job`` holds those of `bascule.Job`.
        """
        role = "trainer" if name.startswith("trainer") else "rollout"
        rank = int(name.split()[-1])
        process = self.spawn(name, role)
        job = self.options(**changes.pop("job", {}))
        if role == "trainer":
            arguments = {"world": self.shape.trainers, **self.trainer_options}
        else:
            engine = name.split()[0]
            arguments = {
                "engine": engine,
                "world": self.shape.engines[engine],
                **self.rollout_options,
            }
        arguments |= {"rank": rank, "timeout": timeout, "job": job, "shape": self.shape_of(name)}
        arguments |= changes
        return process.begin("connect", **arguments)

    def shape_of(self, name: str) -> dict[str, Any]:
        """Return how the weights of a member are cut.

        Parameters
        ----------
        name
            As in `names`.
        """
        shape: dict[str, Any] = {"bulk": self.shape.bulk}
        trainer = name.startswith("trainer")
        if trainer:
            shape |= {"replicas": self.shape.replicas, "shared": self.shape.shared}
        experts = self.experts.get("trainers" if trainer else name.split()[0])
        return shape if experts is None else {**shape, "experts": experts}

    def connect_all(self, names: Iterable[str], *, timeout: float = _SOON) -> None:
        """Start members, all at once, and wait until they are connected."""
        trainers = [name for name in names if name.startswith("trainer")]
        others = [name for name in names if not name.startswith("trainer")]
        for group in (trainers, others):
            for call in [self.connect(name, timeout=timeout) for name in group]:
                call.result()

    # ---- who ----------------------------------------------------------------------------------

    def __getitem__(self, name: str) -> Process:
        return self.members[name]

    @property
    def coordinator(self) -> Process:
        """The coordinator."""
        return self.members["coordinator"]

    def trainer(self, rank: int) -> Process:
        """Return a trainer rank."""
        return self.members[f"trainer {rank}"]

    def rank(self, rank: int, engine: str = "e0") -> Process:
        """Return a rank of an engine."""
        return self.members[f"{engine} rank {rank}"]

    def trainers(self) -> list[Process]:
        """Return all trainer ranks."""
        return [self.trainer(rank) for rank in range(self.shape.trainers)]

    def engine(self, engine: str = "e0") -> list[Process]:
        """Return the ranks of an engine."""
        return [self.rank(rank, engine) for rank in range(self.shape.engines[engine])]

    # ---- the way of a version -----------------------------------------------------------------

    @staticmethod
    def on_all(processes: Iterable[Process], call: str, **arguments: Any) -> list[Any]:
        """Call on all at once; what they returned."""
        return [begun.result() for begun in Job.begin_all(processes, call, **arguments)]

    @staticmethod
    def begin_all(processes: Iterable[Process], call: str, **arguments: Any) -> list[Call]:
        """Begin a call on all at once."""
        return [process.begin(call, **arguments) for process in processes]

    @staticmethod
    def errors(calls: Iterable[Call]) -> list[CallError | None]:
        """Wait for calls; what bascule raised in each."""
        return [call.error() for call in calls]

    def publish(self, version: int, *, timeout: float = _SOON, value: int | None = None) -> int:
        """Train and publish on every trainer rank, and wait until it is available; the term."""
        terms = self.on_all(
            self.trainers(), "publish", version=version, value=value, timeout=timeout
        )
        self.term = int(terms[0])
        if value is not None:
            self.values[self.term, version] = value
        self.on_all(self.trainers(), "wait", version=version, timeout=timeout)
        return self.term

    def value_of(self, serving: Sequence[int]) -> int:
        """Return what the bytes of a version are: its number, unless it was published otherwise."""
        term, version = serving
        return self.values.get((term, version), version)

    def stage(self, engine: str = "e0", *, timeout: float = _SOON) -> list[Any]:
        """Poll and stage on all ranks of an engine until all are verified; the ids."""
        ranks = self.engine(engine)
        ids = self.on_all(ranks, "poll", timeout=timeout)
        self.on_all(ranks, "stage", timeout=timeout)
        self.on_all(ranks, "wait_staged", timeout=timeout)
        return ids

    def update(self, version: int, engine: str = "e0", *, timeout: float = _SOON) -> None:
        """Update an engine to a version in one attempt, and check its bytes."""
        done = self.on_all(self.engine(engine), "update", timeout=timeout)
        assert done == [version] * len(done)
        self.expect(version, engine)

    def serve(
        self, version: int, engine: str = "e0", *, timeout: float = 60.0, attempt: float = 3.0
    ) -> list[CallError]:
        """Update an engine to a version, over errors, and check its bytes; the errors.

        As a framework's controller does it: one attempt on all ranks at once. When that failed, the
        others poll after rank 0 has, so that all are in step again.

        Parameters
        ----------
        version
            Of the term in which was published last; or a later one.
        engine
            Which.
        timeout, attempt
            Seconds for all and for each attempt.
        """
        end = time.monotonic() + timeout
        met: list[CallError] = []
        ranks = self.engine(engine)
        while True:
            if met:
                errors, _ = self.update_in_turn(ranks, attempt)
            else:
                errors = self.errors(self.begin_all(ranks, "update", timeout=attempt))
            met += [error for error in errors if error is not None]
            seen = self.look(ranks)
            wanted = [self.term, version]
            if all(f["why_not"] is None and f["serving"] >= wanted for f in seen):
                break
            assert time.monotonic() < end, f"not served in {timeout} s: {seen} {met[-4:]}"
        self.expect(self.value_of(seen[0]["serving"]), engine)
        for process in ranks:
            # A rank may first ask others where they were in an earlier life.
            if process.error("engine_servable", timeout=1.0) is not None:
                process.ask("engine_servable", timeout=attempt)
        return met

    def update_in_turn(
        self, ranks: Sequence[Process], timeout: float
    ) -> tuple[list[CallError | None], list[int | None]]:
        """Update once, each rank polling after the one before; errors, and what was committed.

        Parameters
        ----------
        ranks
            Of an engine, rank 0 first.
        timeout
            Seconds for each step.
        """
        polls: list[Call] = []
        for process in ranks:
            polls.append(process.begin("poll", timeout=timeout))
            polls[-1].error()
        errors = self.errors(polls)
        if any(errors):
            return errors, []
        if any(poll.result() is None for poll in polls):
            return errors, [None]
        calls = self.begin_all(ranks, "finish", timeout=timeout)
        errors = self.errors(calls)
        return errors, [] if any(errors) else [call.result() for call in calls]

    def expect(self, value: int, engine: str = "e0", *, servable: bool = True) -> None:
        """Check that the bytes of every rank of an engine are those of a version, and it serves.

        Parameters
        ----------
        value
            The version.
        engine
            Which.
        servable
            False: only the bytes count.
        """
        for process in self.engine(engine):
            assert process.ask("check", value=value) == {}, process.name
            if servable:
                assert process.error("servable") is None, process.name

    def heal(self, *, timeout: float = 60.0) -> None:
        """Bring every member back, as a launcher does: start dead ones, let others connect anew.

        Again and again, since a rank that comes back may end the term of the others.

        Parameters
        ----------
        timeout
            Seconds.
        """
        for process in self.members.values():
            process.resume()
        if not self.coordinator.alive:
            self.start_coordinator()
        end = time.monotonic() + timeout
        while True:
            self.until(self._settled, "the coordinator is settled")
            known = self.known()
            out = [name for name in self.names() if name not in known or not self[name].alive]
            if not out:
                return
            assert time.monotonic() < end, f"after {timeout} s these are out still: {out}"
            calls = [
                self[name].begin("reconnect", timeout=_SOON, shape=self.shape_of(name))
                if self[name].alive
                else self.connect(name)
                for name in out
            ]
            for call in calls:
                call.result()

    def _settled(self) -> bool:
        return bool(self.coordinator.ask("status")["settled"])

    # ---- what must always hold ----------------------------------------------------------------

    def look(self, processes: Sequence[Process]) -> list[dict[str, Any]]:
        """Check each rank by itself; what `jobs.worker.Rollout.look` says of it.

        A rank that says it may generate has exactly the bytes of the version that it names. One
        that is poisoned, in doubt or in the middle of a switch says that it may not.
        """
        seen = self.on_all(processes, "look")
        for process, found in zip(processes, seen, strict=True):
            if found["why_not"] is None:
                assert found["serving"] is not None, (process.name, found)
                assert found["holds"] == self.value_of(found["serving"]), (process.name, found)
                assert found["state"] in ("IDLE", "STAGING", "READY", "VERIFIED"), found
            if found["state"] in ("POISONED", "IN_DOUBT", "COMMITTING", "DECIDED"):
                assert found["why_not"] is not None, (process.name, found)
        return seen

    def check_engine(self, engine: str = "e0", *, values: Iterable[int]) -> None:
        """Check what must hold of an engine at rest, whatever happened to it.

        Each live rank by itself; bytes of one of the versions ``values`` on all that are not
        poisoned; ranks that may generate serve one version; and the engine is servable only then.
        """
        ranks = [process for process in self.engine(engine) if process.alive]
        seen = self.look(ranks)
        served = {tuple(found["serving"]) for found in seen if found["why_not"] is None}
        assert len(served) <= 1, seen
        for process, found in zip(ranks, seen, strict=True):
            if found["state"] != "POISONED":
                assert found["holds"] in values, (process.name, found)
        whole = len(ranks) == self.shape.engines[engine] and all(
            found["why_not"] is None for found in seen
        )
        for process in ranks:
            error = process.error("engine_servable", timeout=1.0)
            if error is not None and whole:
                # A rank may first ask others where they were in an earlier life.
                error = process.error("engine_servable", timeout=1.0)
            # Where ranks have not spoken yet it needs the coordinator to find them.
            if error is None or self.coordinator.alive:
                assert (error is None) == whole, (error and error.message, seen)

    def wait_gone(self, *names: str, timeout: float = 60.0) -> None:
        """Wait until the coordinator knows that members are gone.

        Parameters
        ----------
        names
            As in `names`.
        timeout
            Seconds.
        """
        self.until(lambda: not set(names) & self.known(), f"{names} are gone", timeout=timeout)

    def known(self) -> set[str]:
        """Return the names of the members that are not gone and may publish or be updated."""
        found = set()
        for member in self.coordinator.ask("status")["members"]:
            who = "trainer" if member["role"] == "trainer" else f"{member['engine']} rank"
            if not member.get("stale_term", False):
                found.add(f"{who} {member['rank']}")
        return found

    @staticmethod
    def until(holds: Callable[[], bool], what: str, *, timeout: float = 60.0) -> None:
        """Wait until something holds."""
        end = time.monotonic() + timeout
        while not holds():
            assert time.monotonic() < end, f"after {timeout} s it does not hold that {what}"
            time.sleep(0.02)

    def until_state(self, process: Process, state: str) -> None:
        """Wait until a rollout rank is in a state."""
        self.until(lambda: process.ask("state") == state, f"{process.name} is {state}")

    # ---- the end ------------------------------------------------------------------------------

    def overdue(self) -> list[tuple[str, str, float]]:
        """Return the calls that ended long after their deadline: who, what, seconds late."""
        return [
            (process.name, call, late)
            for process in self.everyone
            for call, late in process.late
            if late > _GRACE
        ]

    def close(self) -> None:
        """Kill everything."""
        for process in self.everyone:
            process.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
        if error is None:
            late = self.overdue()
            assert not late, f"calls outlived their deadlines: {late}"
