"""Updates for long, while processes are killed, stopped, stalled and restarted at random.

Trainers publish and engines update, each as the controller of a framework would drive them; a third
thread makes faults. After every commit the bytes of every rank are compared with the version that
it says it serves.
"""

from __future__ import annotations

import random
import signal
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jobs.harness import CallError, DiedError, Job, OverdueError, Process, Zygote
from jobs.model import EXPERTS

__all__ = ["Figures", "Options", "Soak"]

#: Seconds between two looks at memory, descriptors and mappings.
_SAMPLE = 2.0

#: An engine that has committed nothing for so long, while it was offered versions, is stuck.
_STUCK = 60.0


@dataclass(frozen=True)
class Options:
    """What to run.

    Attributes
    ----------
    seconds
        How long.
    seed
        Of all choices. Which of them meet in time differs from run to run.
    trainers, engines
        Ranks of the trainer world; engines with their numbers of ranks.
    heartbeat
        Seconds.
    """

    seconds: float
    seed: int = 0
    trainers: int = 2
    engines: dict[str, int] = field(default_factory=lambda: {"e0": 2, "e1": 3, "e2": 1})
    heartbeat: float = 0.2


@dataclass
class Figures:
    """What happened.

    Attributes
    ----------
    seed, seconds
        Of the run.
    published, aborted
        Versions that became available, and that did not.
    commits
        Of each engine.
    kills, restarts, stops, stalls, terms, moves
        Faults and what came of them: processes killed, started or connected anew, stopped, stalled
        in Python; restarts of the trainer world; changes of layout.
    in_turn
        Updates that needed ranks to poll one after the other.
    errors, examples
        How many of each class; the last one of each.
    worst_late
        Seconds that a call ended after its deadline at the most, and which.
    worst_stall
        Seconds of the longest pause of a rank in an update.
    longest_gap
        Seconds between two commits of an engine at the most.
    growth
        For each process that lived from the first to the last: how much more it had of each in the
        last third than in the first.
    wrong
        What must never happen: wrong bytes, a mix, a crash, memory that grows.
    """

    seed: int
    seconds: float = 0.0
    published: int = 0
    aborted: int = 0
    commits: Counter[str] = field(default_factory=Counter)
    kills: int = 0
    restarts: int = 0
    stops: int = 0
    stalls: int = 0
    terms: int = 0
    moves: int = 0
    in_turn: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    worst_late: tuple[float, str] = (0.0, "")
    worst_stall: float = 0.0
    longest_gap: dict[str, float] = field(default_factory=dict)
    growth: dict[str, dict[str, float]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Return them for JSON."""
        return {**vars(self), "commits": dict(self.commits), "errors": dict(self.errors)}


class Soak:
    """A run.

    Parameters
    ----------
    zygote
        Makes the processes.
    folder
        For their logs.
    options
        What to run.
    """

    def __init__(self, zygote: Zygote, folder: Path, options: Options) -> None:
        self.options = options
        self.figures = Figures(options.seed)
        self._job = Job(
            zygote,
            folder,
            trainers=options.trainers,
            engines=dict(options.engines),
            heartbeat=options.heartbeat,
            start=False,
        )
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._down: set[str] = set()
        self._version = 0
        self._available = 0
        self._moving: set[str] = set()  # whose experts were moved, but not yet on all ranks
        self._samples: dict[str, list[dict[str, int]]] = {}
        rng = self._random("spared")
        engine = rng.choice(sorted(options.engines))
        # These are never killed, so that their memory can be watched.
        self._spared = {
            f"trainer {rng.randrange(options.trainers)}",
            f"{engine} rank {rng.randrange(options.engines[engine])}",
        } | ({"coordinator"} if rng.random() < 0.5 else set())

    def _random(self, purpose: str) -> random.Random:
        return random.Random(f"{self.options.seed} {purpose}")

    # ---- running ------------------------------------------------------------------------------

    def run(self, tell: Callable[[Figures, float], None] | None = None) -> Figures:
        """Run, and return the figures.

        Parameters
        ----------
        tell
            Is called every few seconds with the figures so far and the seconds that passed.
        """
        begin = time.monotonic()
        with self._job:
            self._job.start()
            threads = [threading.Thread(target=self._train), threading.Thread(target=self._fail)]
            for engine in self.options.engines:
                threads.append(threading.Thread(target=self._update, args=(engine,)))
            for thread in threads:
                thread.start()
            try:
                while time.monotonic() - begin < self.options.seconds:
                    time.sleep(_SAMPLE)
                    self._sample()
                    if tell is not None:
                        tell(self.figures, time.monotonic() - begin)
            finally:
                self._over.set()
                for thread in threads:
                    thread.join()
            self.figures.seconds = time.monotonic() - begin
            self._finish()
        return self.figures

    def _wrong(self, what: str) -> None:
        with self._lock:
            self.figures.wrong.append(what)

    def _note(self, errors: Sequence[CallError | None]) -> None:
        with self._lock:
            for error in errors:
                if error is not None:
                    self.figures.errors[error.type] += 1
                    self.figures.examples[error.type] = str(error)

    def _all_up(self, names: Sequence[str]) -> bool:
        with self._lock:
            return not self._down.intersection(names)

    def _finish(self) -> None:
        """Bring everybody back; one more version must reach all."""
        try:
            for process in list(self._job.members.values()):
                process.resume()
            self._job.heal()
            self._move_on("trainers", self._job.trainers())
            for engine in self.options.engines:
                self._move_on(engine, self._job.engine(engine))
            self._job.publish(self._version + 1)
            for engine in self.options.engines:
                self._job.serve(self._version + 1, engine)
                self._job.check_engine(engine, values=[self._version + 1])
        except (AssertionError, CallError, DiedError, OverdueError) as error:
            self._wrong(f"the job does not go on: {error}")
        self._look_back()

    def _look_back(self) -> None:
        for process in self._job.everyone:
            for call, late in process.late:
                if late > self.figures.worst_late[0]:
                    self.figures.worst_late = (late, f"{process.name}: {call}")
            code = process.exit_code(0)
            if code is not None and not process.ended_by_us:
                self._wrong(f"{process.name} ended by itself ({code}): {process.log()}")
        for name, samples in self._samples.items():
            growth = self._growth(samples)
            if growth:
                self.figures.growth[name] = growth

    # ---- memory -------------------------------------------------------------------------------

    def _sample(self) -> None:
        for name in sorted(self._spared):
            try:
                stats = self._job[name].ask("stats")
            except (DiedError, OverdueError) as error:
                self._wrong(f"{name}: {error}")
                continue
            self._samples.setdefault(name, []).append(stats)

    def _growth(self, samples: list[dict[str, int]]) -> dict[str, float]:
        """How much more there is in the last third than in the first, by the medians."""
        third = len(samples) // 3
        if third == 0:
            return {}
        return {
            key: statistics.median(s[key] for s in samples[-third:])
            - statistics.median(s[key] for s in samples[:third])
            for key in samples[0]
        }

    # ---- trainers -----------------------------------------------------------------------------

    def _train(self) -> None:
        rng = self._random("train")
        names = [f"trainer {rank}" for rank in range(self.options.trainers)]
        while not self._over.is_set():
            if not self._all_up(names):
                time.sleep(0.02)
                continue
            self._version += 1
            trainers = self._job.trainers()
            try:
                self._move_on("trainers", trainers)
                errors = self._publish(trainers)
                out = [p for p, e in zip(trainers, errors, strict=True) if e and _is_out(e)]
                if out:
                    self._reconnect(out)
                    with self._lock:
                        self.figures.terms += 1
                elif rng.random() < 0.03:
                    self._move("trainers", names, rng)
            except (DiedError, OverdueError, CallError):
                pass  # it was killed meanwhile; whoever did that starts it again
            self._over.wait(rng.random() * 0.1)

    def _publish(self, trainers: Sequence[Process]) -> list[CallError | None]:
        version = self._version
        errors = self._job.errors(
            self._job.begin_all(trainers, "publish", version=version, timeout=5)
        )
        self._note(errors)
        if any(errors):
            return errors
        waits = self._job.errors(self._job.begin_all(trainers, "wait", version=version, timeout=4))
        self._note(waits)
        with self._lock:
            if not any(waits):
                self.figures.published += 1
                self._available = version
            elif any(error is not None and error.type == "Aborted" for error in waits):
                self.figures.aborted += 1
        return waits

    def _reconnect(self, processes: Sequence[Process]) -> None:
        calls = [
            process.begin("reconnect", timeout=10, shape=self._job.shape_of(process.name))
            for process in processes
        ]
        self._note(self._job.errors(calls))
        with self._lock:
            self.figures.restarts += len(calls)

    def _move(self, who: str, names: Sequence[str], rng: random.Random) -> None:
        """Move experts; what connects from now on has them there. Nobody is killed until all have.

        A rank cannot connect to an engine whose ranks disagree.
        """
        with self._lock:
            if self._down.intersection(names):
                return
            self._moving.add(who)
        self._job.experts[who] = {str(e): rng.randrange(len(names)) for e in range(EXPERTS)}

    def _move_on(self, who: str, processes: Sequence[Process]) -> None:
        """Move them on all ranks, if they are not."""
        if who not in self._moving:
            return
        calls = [
            process.begin("update_layout", timeout=5, shape=self._job.shape_of(process.name))
            for process in processes
        ]
        errors = self._job.errors(calls)
        self._note(errors)
        out = [p for p, e in zip(processes, errors, strict=True) if e and _is_out(e)]
        if out:
            self._reconnect(out)
        if not any(errors):
            with self._lock:
                self._moving.discard(who)
                self.figures.moves += 1

    # ---- engines ------------------------------------------------------------------------------

    def _update(self, engine: str) -> None:
        rng = self._random(f"update {engine}")
        names = [f"{engine} rank {rank}" for rank in range(self.options.engines[engine])]
        last, failed = time.monotonic(), 0
        while not self._over.is_set():
            if not self._all_up(names):
                time.sleep(0.02)
                continue
            ranks = self._job.engine(engine)
            offered = self._available
            try:
                self._move_on(engine, ranks)
                done = self._attempt(engine, ranks, in_turn=failed > 1)
                failed = failed + 1 if done is None else 0
                self._job.look(ranks)
                if done:
                    self._committed(engine, ranks, done)
                    self.figures.longest_gap[engine] = max(
                        self.figures.longest_gap.get(engine, 0.0), time.monotonic() - last
                    )
                if done is not None and (done or offered == self._available):
                    last = time.monotonic()
                if done and rng.random() < 0.02:
                    self._move(engine, names, rng)
            except DiedError:
                pass
            except (AssertionError, OverdueError, CallError) as error:
                self._wrong(f"{engine}: {error}")
            if time.monotonic() - last > _STUCK:
                self._wrong(f"{engine} committed nothing for {_STUCK} s")
                last = time.monotonic()
            self._over.wait(rng.random() * rng.choice([0.01, 0.3]))

    def _attempt(self, engine: str, ranks: Sequence[Process], in_turn: bool) -> int | None:
        """Update once: the version, 0 where there is none, None where it failed."""
        if in_turn:
            with self._lock:
                self.figures.in_turn += 1
            errors, done = self._job.update_in_turn(ranks, 3)
            versions = set(done)
        else:
            calls = self._job.begin_all(ranks, "update", timeout=3)
            errors = self._job.errors(calls)
            versions = set() if any(errors) else {call.result() for call in calls}
        self._note(errors)
        for error in errors:
            if error is not None and error.type in ("Poisoned", "DataLoss"):
                self._wrong(f"{engine}: {error}")
        if any(errors):
            out = [p for p, e in zip(ranks, errors, strict=True) if e and _is_out(e)]
            if out:
                self._reconnect(out)
            return None
        return versions.pop() or 0 if len(versions) == 1 else None

    def _committed(self, engine: str, ranks: Sequence[Process], version: int) -> None:
        stalls = []
        for process in ranks:
            wrong = process.ask("check", value=version)
            if wrong:
                self._wrong(f"{process.name}: version {version}: {wrong}")
            stalls.append(process.ask("report")["phases"]["stall"])
        with self._lock:
            self.figures.commits[engine] += 1
            self.figures.worst_stall = max(self.figures.worst_stall, *stalls)

    # ---- faults -------------------------------------------------------------------------------

    def _fail(self) -> None:
        rng = self._random("fail")
        starters: list[threading.Thread] = []
        while not self._over.wait(rng.uniform(0.1, 1.5)):
            name = rng.choice(["coordinator", *self._job.names()])
            with self._lock:
                if name in self._down:
                    continue
            fault = rng.choice(["kill", "kill", "end", "pause", "pause", "hang", "stall"])
            if fault in ("kill", "end"):
                wait = rng.uniform(0.0, 2.0)
                if self._may_kill(name):
                    starters.append(self._kill(name, fault, wait))
            elif fault == "pause":
                self._stop(name, rng.uniform(0.02, 4 * self.options.heartbeat))
            elif fault == "hang":
                self._stop(name, rng.uniform(4, 10) * self.options.heartbeat)
            elif fault == "stall" and name != "coordinator":
                how = rng.choice(["gil", "spin", "sleep"])
                self._job[name].begin("stall", how=how, seconds=rng.uniform(0.05, 1.5))
                with self._lock:
                    self.figures.stalls += 1
        for thread in starters:
            thread.join()

    def _stop(self, name: str, seconds: float) -> None:
        process = self._job[name]
        process.stop()
        time.sleep(seconds)
        process.resume()
        with self._lock:
            self.figures.stops += 1

    def _may_kill(self, name: str) -> bool:
        who = "trainers" if name.startswith("trainer") else name.split()[0]
        with self._lock:
            if name in self._spared or who in self._moving:
                return False
            self._down.add(name)
            self.figures.kills += 1
            return True

    def _kill(self, name: str, fault: str, wait: float) -> threading.Thread:
        process = self._job[name]
        if fault == "end":
            process.terminate()
            code = process.exit_code(20)
            if code not in (128 + signal.SIGTERM, 0):
                self._wrong(f"{name} was told to end and has not, or crashed ({code})")
        process.kill()
        thread = threading.Thread(target=self._start_again, args=(name, wait))
        thread.start()
        return thread

    def _start_again(self, name: str, wait: float) -> None:
        time.sleep(wait)
        end = time.monotonic() + 60
        while True:
            if name == "coordinator":
                self._job.start_coordinator()
                break
            call = self._job.connect(name, timeout=5)
            try:
                error = call.error()
            except DiedError as died:
                self._wrong(f"{name}: {died}")
                break
            self._note([error])
            if error is None:
                break
            self._job[name].end()
            time.sleep(0.2)
            if time.monotonic() > end:
                self._wrong(f"{name} could not connect for a minute: {error}")
                break
        with self._lock:
            self._down.discard(name)
            self.figures.restarts += 1


def _is_out(error: CallError) -> bool:
    """Return whether the error says that this rank is no member, or of a term that is over."""
    says = error.message
    return error.type == "StaleTerm" or "connect anew" in says or "connect a new" in says
