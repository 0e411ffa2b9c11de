"""Processes that are killed, stopped, closed, restarted or late, in every state of an update.

The cells of the matrices run a few at a time: most of their time they wait for heartbeats.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
from jobs.harness import Call, DiedError, Job, Process, Zygote

VICTIMS = {
    "trainer": "trainer 1",
    "leader": "e0 rank 0",
    "follower": "e0 rank 2",
    "coordinator": "coordinator",
}
STATES = ("idle", "publishing", "holding", "staging", "verified", "deciding", "committing")

#: Cells that run at once.
_AT_ONCE = 8


class Cell(NamedTuple):
    """A fault: ``how`` the process of a kind fails in a state."""

    victim: str
    state: str
    how: str

    def __str__(self) -> str:
        return "-".join(self)


CELLS = [
    Cell(victim, state, how)
    for victim in VICTIMS
    for state in STATES
    for how in ("killed", "paused", "hung")
]
TERMINATED = [Cell(victim, state, "terminated") for victim in VICTIMS for state in STATES]


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, zygote: Zygote, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[Cell, Future[None]]]:
    """The cells of this run, begun."""
    wanted = {
        item.callspec.params["cell"]
        for item in request.session.items
        if isinstance(item, pytest.Function) and hasattr(item, "callspec")
        if "cell" in item.callspec.params
    }
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        yield {
            cell: pool.submit(run_cell, zygote, tmp_path_factory.mktemp(str(cell)), cell)
            for cell in (*CELLS, *TERMINATED)
            if cell in wanted
        }
        pool.shutdown(cancel_futures=True)


# ---- getting into a state ---------------------------------------------------------------------


class Scene:
    """A job in a state, and the calls that wait in it.

    Two trainers that share the model, an engine of three ranks, and another one of one rank.
    """

    def __init__(self, job: Job, cell: Cell) -> None:
        self.job = job
        self.cell = cell
        self.victim = job[VICTIMS[cell.victim]]
        self.calls: list[Call] = []
        job.publish(1)
        job.update(1, "e0")
        job.update(1, "e1")
        getattr(self, cell.state)()

    def idle(self) -> None:
        """Everybody serves version 1."""

    def publishing(self) -> None:
        """One of two trainers has published version 2 and waits for the other."""
        self.job.trainer(0).ask("publish", version=2, timeout=4)
        self.calls = [self.job.trainer(0).begin("wait", version=2, timeout=3)]

    def holding(self) -> None:
        """Version 2 is available; nobody has asked for it."""
        self.job.publish(2)

    def staging(self) -> None:
        """All ranks are landing version 2, held up by a trainer that is stopped."""
        self._poll()
        self.job.trainer(0).stop()
        self.job.on_all(self.job.engine(), "stage", timeout=8)
        assert self.job.on_all(self.job.engine(), "state") == ["STAGING"] * 3
        self.calls = self.job.begin_all(self.job.engine(), "wait_staged", timeout=8)

    def verified(self) -> None:
        """All ranks have staged version 2."""
        self._poll()
        self._stage(self.job.engine())

    def deciding(self) -> None:
        """The followers wait for the leader's decision, or it for the vote of the last of them."""
        self._poll()
        ranks = self.job.engine()
        if self.cell.victim == "leader":
            self._stage(ranks)
            self.calls = self.job.begin_all(ranks[1:], "commit", timeout=4)
        else:
            self._stage(ranks[:2])
            self.calls = self.job.begin_all(ranks[:2], "commit", timeout=4)

    def committing(self) -> None:
        """All ranks are in their hook after the switch."""
        self._poll()
        ranks = self.job.engine()
        self._stage(ranks)
        self.job.on_all(ranks, "hook", what="sleep", seconds=1.0)
        self.calls = self.job.begin_all(ranks, "commit", timeout=6)
        self.job.until(
            lambda: self.job.on_all(ranks, "state") == ["COMMITTING"] * 3,
            "all ranks are committing",
        )

    def _poll(self) -> None:
        self.job.publish(2)
        ids = self.job.on_all(self.job.engine(), "poll", timeout=8)
        assert [found[1] for found in ids] == [2] * 3

    def _stage(self, ranks: list[Process]) -> None:
        self.job.on_all(ranks, "stage", timeout=8)
        self.job.on_all(ranks, "wait_staged", timeout=8)

    # ---- what the others do after the fault -----------------------------------------------------

    def go_on(self) -> None:
        """Do what the others would do next, whether or not they know of the fault."""
        paused = self.cell.how == "paused"
        others = [p for p in self.job.engine() if paused or p is not self.victim]
        state = self.cell.state
        if state == "publishing" and (paused or self.cell.victim != "trainer"):
            self.calls.append(self.job.trainer(1).begin("publish", version=2, timeout=3))
        elif state == "holding":
            self.calls += self.job.begin_all(others, "poll", timeout=1.5)
        elif state == "verified":
            self.calls += self.job.begin_all(others, "commit", timeout=4)
        elif state == "deciding" and paused and self.cell.victim == "leader":
            self.calls.append(self.victim.begin("commit", timeout=4))
        elif state == "deciding" and (paused or self.cell.victim in ("trainer", "coordinator")):
            late = self.job.rank(2)
            late.ask("stage", timeout=4)
            self.calls.append(late.begin("commit", timeout=4))


# ---- what the calls of the others may return --------------------------------------------------

_AWAY = {"Unavailable", "DeadlineExceeded"}
_NO = {"NotDecided"}
_OK = {"OK"}

#: By state and victim: what killed or hung (first), and what merely paused (second).
EXPECTED: dict[tuple[str, str], tuple[set[str], set[str]]] = {
    ("publishing", "trainer"): ({"Aborted"}, _OK),
    ("publishing", "coordinator"): (_OK | _AWAY, _OK),
    ("publishing", "leader"): (_OK, _OK),
    ("publishing", "follower"): (_OK, _OK),
    ("holding", "trainer"): (_OK, _OK),
    ("holding", "leader"): (_AWAY | {"Aborted"}, _OK),
    ("holding", "follower"): (_OK, _OK),
    ("holding", "coordinator"): (_OK | _AWAY, _OK),
    # A trainer that hung and woke may have let the landing end.
    ("staging", "trainer"): (_OK | _AWAY | {"NotFound", "Retired"}, _OK),
    ("staging", "leader"): (_OK | _AWAY, _OK),
    ("staging", "follower"): (_OK, _OK),
    ("staging", "coordinator"): (_OK, _OK),
    ("verified", "trainer"): (_OK, _OK),
    ("verified", "leader"): (_NO | {"InDoubt"}, _OK),
    ("verified", "follower"): (_OK, _OK),
    ("verified", "coordinator"): (_OK, _OK),
    ("deciding", "trainer"): (_NO | _OK, _OK),
    ("deciding", "leader"): (_NO | {"InDoubt"}, _OK),
    ("deciding", "follower"): (_NO, _OK),
    ("deciding", "coordinator"): (_OK, _OK),
    ("committing", "trainer"): (_OK, _OK),
    ("committing", "leader"): (_OK, _OK),
    ("committing", "follower"): (_OK, _OK),
    ("committing", "coordinator"): (_OK, _OK),
}


def run_cell(zygote: Zygote, folder: Path, cell: Cell) -> None:
    """Get into the state, fail, look at what the others do, and go on with a new version."""
    # A coordinator that comes back waits for six heartbeats; members need two seconds to find it.
    heartbeat = 0.5 if cell.victim == "coordinator" and cell.how != "paused" else 0.2
    with Job(zygote, folder, engines={"e0": 3, "e1": 1}, heartbeat=heartbeat) as job:
        scene = Scene(job, cell)
        ended = _fail(scene)
        _check_calls(scene, ended)
        for process in job.engine():
            if process.alive:
                process.ask("hook", what=None)
        job.check_engine("e0", values=[1, 2])
        job.check_engine("e1", values=[1])
        job.heal()
        job.publish(10)
        for engine in ("e0", "e1"):
            job.serve(10, engine, timeout=15)
            job.check_engine(engine, values=[10])


def _fail(scene: Scene) -> Callable[[], None]:
    """Let the victim fail; what to do once the calls of the others have ended."""
    job, victim, cell = scene.job, scene.victim, scene.cell

    def resume_trainer() -> None:
        if cell.state == "staging" and cell.victim != "trainer 0":
            job.trainer(0).resume()

    if cell.how == "killed":
        victim.kill()
        resume_trainer()
        scene.go_on()
        return lambda: None
    if cell.how == "terminated":
        victim.terminate()
        resume_trainer()
        assert victim.exit_code(30) is not None, f"{cell}: it does not end"
        scene.go_on()
        return lambda: None
    victim.stop()
    resume_trainer()
    if cell.how == "paused":
        time.sleep(2 * job.heartbeat)
        victim.resume()
        scene.go_on()
        return lambda: None
    scene.go_on()
    if cell.victim == "coordinator":
        time.sleep(7 * job.heartbeat)
    else:
        job.wait_gone(VICTIMS[cell.victim])
    victim.resume()
    return lambda: _expect_out(scene)


def _expect_out(scene: Scene) -> None:
    """A rank that was declared gone and wakes serves and publishes no more."""
    victim = scene.victim
    if scene.cell.victim == "coordinator":
        return
    if scene.cell.victim == "trainer":
        error = victim.error("publish", version=9, timeout=5)
        assert error is not None
        assert error.type in ("StaleTerm", "Unavailable")
        assert "connect anew" in error.message
        return
    scene.job.until(lambda: victim.error("servable") is not None, "the rank is out")
    error = victim.error("poll", timeout=5)
    assert error is not None
    assert error.message


def _check_calls(scene: Scene, after: Callable[[], None]) -> None:
    cell = scene.cell
    for call in scene.calls:
        if call.process is scene.victim and cell.how != "paused":
            with contextlib.suppress(DiedError):
                call.error()
            continue
        error = call.error()
        outcome = "OK" if error is None else error.type
        allowed = EXPECTED[cell.state, cell.victim][1 if cell.how == "paused" else 0]
        assert outcome in allowed, (call.process.name, call.name, str(error))
        if error is not None:
            assert error.message
    after()


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_a_process_fails(outcomes: dict[Cell, Future[None]], cell: Cell) -> None:
    """8, 11, 12: Killed, stopped for a moment, and stopped until it is gone, in each state.

    The calls of the others end by their deadlines with what EXPECTED says; every rank that says it
    may serve has exactly the bytes of the version that it names, the same on all ranks of the
    engine; the other engine notices nothing; the job goes on.
    """
    outcomes[cell].result()


@pytest.mark.parametrize("cell", TERMINATED, ids=str)
def test_a_process_is_told_to_end(outcomes: dict[Cell, Future[None]], cell: Cell) -> None:
    """10: SIGTERM in each state: the process leaves its job and ends, whoever waits for it."""
    outcomes[cell].result()
