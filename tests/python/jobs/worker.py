"""One process of a job: a coordinator, a trainer rank or a rollout rank, told what to do by lines.

A request on stdin is a JSON object: ``id``, ``call`` and its arguments. Each runs on a thread of
its own, and its answer on stdout has the ``id``, how many seconds it ``took``, and ``ok`` (what it
returned), ``error`` (an error of bascule, field by field) or ``failed`` (the traceback of any
other). ``stall`` runs on the thread that reads. SIGTERM ends the process as ``sys.exit`` does.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import functools
import gc
import json
import os
import resource
import selectors
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import bascule
from jobs import model

Answer = dict[str, Any]


def error_fields(error: bascule.Error) -> dict[str, Any]:
    """Return an error as it travels."""
    return {
        "type": type(error).__name__,
        "message": error.message,
        "rank": error.rank,
        "peer": error.peer,
        "tensor": error.tensor,
        "cause": repr(error.__cause__) if error.__cause__ else None,
    }


def _mappings(label: str) -> list[tuple[int, int]]:
    """Return address and size of the writable shared mappings that are named so."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if label in line and "rw-s" in line:
            begin, end = (int(part, 16) for part in line.split()[0].split("-"))
            found.append((begin, end - begin))
    return found


def _pss() -> int:
    rollup = Path("/proc/self/smaps_rollup").read_text()
    return next(int(x.split()[1]) for x in rollup.splitlines() if x.startswith("Pss:")) * 1024


@contextlib.contextmanager
def _room(room: int | None) -> Iterator[None]:
    """Leave only so many bytes of address space for what is done."""
    if room is None:
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + room, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _enter_full_folder(folder: str) -> None:
    """Let this thread, and those that it starts, see a folder in which nothing can be made."""
    new_mounts, recursive_private = 0x00020000, 0x44000
    libc = ctypes.CDLL(None, use_errno=True)
    none, path = b"none", folder.encode()
    if (
        libc.unshare(new_mounts) != 0
        or libc.mount(none, b"/", None, recursive_private, None) != 0
        or libc.mount(none, path, b"tmpfs", 0, b"nr_inodes=1") != 0
    ):
        raise OSError(ctypes.get_errno(), "no file system can be mounted here")


class Process:
    """What every kind of process can do."""

    _connect: Callable[..., object]  # as before, but for the timeout

    def stats(self) -> dict[str, int]:
        """Return memory in bytes, and how many descriptors, shared mappings and threads exist."""
        statm = Path("/proc/self/statm").read_text().split()
        maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
        return {
            "rss": int(statm[1]) * resource.getpagesize(),
            "pss": _pss(),
            "descriptors": len(os.listdir("/proc/self/fd")),
            "mappings": sum(line[1].endswith("s") for line in maps),
            "threads": len(os.listdir("/proc/self/task")),
        }

    def limit(self, what: str, value: int) -> int:
        """Set a soft limit, e.g. ``RLIMIT_NOFILE``; -1: as many descriptors as are open now."""
        which = getattr(resource, what)
        if what == "RLIMIT_NOFILE" and value < 0:
            value = max(int(fd) for fd in os.listdir("/proc/self/fd")) + 1
        resource.setrlimit(which, (value, resource.getrlimit(which)[1]))
        return value

    def connect_in_full_folder(self, folder: str, *, timeout: float) -> str | None:
        """Connect as before, with no room for sockets; None where that cannot be had."""
        try:
            _enter_full_folder(folder)
        except OSError as error:
            return str(error)
        self._connect(timeout=timeout)
        return None

    def use_up_descriptors(self, left: int) -> int:
        """Open files until only some descriptors are left; how many were opened."""
        self._held: list[int] = []
        with contextlib.suppress(OSError):
            while True:
                self._held.append(os.open("/dev/null", os.O_RDONLY))
        for _ in range(min(left, len(self._held))):
            os.close(self._held.pop())
        return len(self._held)

    def give_back_descriptors(self) -> None:
        """Close what `use_up_descriptors` opened."""
        while self._held:
            os.close(self._held.pop())

    def damage_region(self, label: str, offset: int = 64, size: int = 1) -> int:
        """Flip bits of this process's own shared memory of that name; how many regions."""
        regions = [(begin, length) for begin, length in _mappings(label) if offset < length]
        for begin, length in regions:
            memory = (ctypes.c_ubyte * length).from_address(begin)
            for i in range(offset, min(offset + size, length)):
                memory[i] ^= 1
        return len(regions)

    def reconnect(self, *, timeout: float, shape: dict[str, Any] | None = None) -> object:
        """Close, and connect anew as before, but perhaps in another shape."""
        self.close(timeout=1.0)
        changes = {} if shape is None else {"shape": shape}
        return self._connect(timeout=timeout, **changes)

    def connect_again(self, *, timeout: float) -> object:
        """Connect as before, after that failed."""
        return self._connect(timeout=timeout)

    def close(self, *, timeout: float = 1.0) -> None:
        """Close what is open."""


class Coordinator(Process):
    """A coordinator alone."""

    def start(self, **job: Any) -> str:
        """Start to serve; the address."""
        self._server = bascule.CoordinatorServer.start(bascule.Job(**job))
        return self._server.address

    def status(self) -> dict[str, Any]:
        """Return members, term and versions."""
        return self._server.status()

    def close(self, *, timeout: float = 1.0) -> None:
        """Stop serving."""
        self._server.close(timeout=timeout)


class Trainer(Process):
    """A trainer rank."""

    def connect(
        self, *, rank: int, world: int, timeout: float, shape: dict[str, Any], **options: Any
    ) -> str:
        """Join; the coordinator's address."""
        options = copy.deepcopy(options)
        self._connect = functools.partial(
            self.connect, rank=rank, world=world, shape=shape, **copy.deepcopy(options)
        )
        job = bascule.Job(**options.pop("job"))
        self._rank, self._world = rank, world
        self._memory = model.trainer_memory(rank, world, **shape)
        self._publications: dict[int, bascule.Publication] = {}
        with _room(options.pop("room", None)):
            self._sender = bascule.WeightSender.connect(
                job,
                layout=self._memory.layout,
                rank=rank,
                world_size=world,
                timeout=timeout,
                **options,
            )
        return self._sender.coordinator

    def fill(self, value: int) -> None:
        """Train: the weights are another version now."""
        self._memory.fill(value)

    def publish(
        self, version: int, *, timeout: float, value: int | None = None, filled: bool = False
    ) -> int:
        """Train and publish; the term."""
        if not filled:
            self._memory.fill(version if value is None else value)
        publication = self._sender.publish(version, timeout=timeout)
        self._publications[version] = publication
        for old in sorted(self._publications)[:-8]:
            del self._publications[old]
        return publication.id.term

    def wait(self, version: int, *, timeout: float) -> None:
        """Wait until the version is available."""
        self._publications[version].wait(timeout=timeout)

    def state(self, version: int, *, timeout: float = 10.0) -> str:
        """Return what became of a version."""
        return self._publications[version].state(timeout=timeout).name

    def release(self, version: int, *, timeout: float) -> None:
        """End serving a version."""
        self._publications[version].release(timeout=timeout)

    def report(self, version: int) -> dict[str, Any]:
        """Return the report of a publication."""
        return self._publications[version].report().as_dict()

    def term(self) -> int:
        """Return the term."""
        return self._sender.term

    def update_layout(
        self, *, timeout: float, shape: dict[str, Any], value: int | None = None
    ) -> None:
        """Put everything into new memory, cut otherwise; the old memory is let go."""
        memory = model.trainer_memory(self._rank, self._world, **shape)
        if value is not None:
            memory.fill(value)
        self._sender.update_layout(memory.layout, timeout=timeout)
        self._memory = memory

    def close(self, *, timeout: float = 1.0) -> None:
        """Leave."""
        self._sender.close(timeout=timeout)

    def drop(self, *, timeout: float = 1.0) -> None:
        """Leave, and let go of everything."""
        self._sender.close(timeout=timeout)
        self._publications.clear()
        del self._sender
        gc.collect()


class Rollout(Process):
    """A rollout rank."""

    def connect(
        self,
        *,
        engine: str,
        rank: int,
        world: int,
        timeout: float,
        shape: dict[str, Any],
        **options: Any,
    ) -> None:
        """Join."""
        options = copy.deepcopy(options)
        again = {"rank": rank, "world": world, "shape": shape, **copy.deepcopy(options)}
        self._connect = functools.partial(self.connect, engine=engine, **again)
        job = bascule.Job(**options.pop("job"))
        self._rank, self._world = rank, world
        self._memory = model.engine_memory(rank, world, **shape)
        self._update: bascule.Update | None = None
        self._hook_calls: list[int] = []
        with _room(options.pop("room", None)):
            self._receiver = bascule.WeightReceiver.connect(
                job,
                engine=engine,
                layout=self._memory.layout,
                rank=rank,
                world_size=world,
                timeout=timeout,
                **options,
            )

    @property
    def _current(self) -> bascule.Update:
        if self._update is None:
            raise RuntimeError("poll or open first")
        return self._update

    def poll(self, *, timeout: float) -> list[int] | None:
        """Poll; term and version, or None."""
        self._update = self._receiver.poll(timeout=timeout)
        return None if self._update is None else list(self._update.id)

    def open(self, term: int, version: int) -> None:
        """Take an explicit version."""
        self._update = self._receiver.open(term, version)

    def stage(self, *, timeout: float) -> None:
        """Start staging."""
        self._current.stage(timeout=timeout)

    def wait_staged(self, *, timeout: float) -> None:
        """Wait until staged."""
        self._current.wait_staged(timeout=timeout)

    def ready(self, *, timeout: float) -> bool:
        """Ask once."""
        return self._current.ready(timeout=timeout)

    def decide(self, *, timeout: float) -> None:
        """Learn the decision."""
        self._current.decide(timeout=timeout)

    def commit(self, *, timeout: float) -> None:
        """Decide and switch."""
        self._current.commit(timeout=timeout)

    def abort(self, *, timeout: float) -> None:
        """Give the update up."""
        self._current.abort(timeout=timeout)

    def report(self) -> dict[str, Any]:
        """Return the report of the update."""
        return self._current.report().as_dict()

    def audit(self, *, timeout: float) -> None:
        """Audit the live weights."""
        self._receiver.audit(timeout=timeout)

    def servable(self) -> None:
        """Raise why this rank may not generate."""
        self._receiver.check_servable()

    def engine_servable(self, *, timeout: float) -> None:
        """Raise why the engine may not generate."""
        self._receiver.check_engine_servable(timeout=timeout)

    def look(self) -> dict[str, Any]:
        """Return state, version served, whether it may generate, and what the bytes are."""
        before = self._receiver.serving
        servable: dict[str, Any] | None = None
        try:
            self._receiver.check_servable()
        except bascule.Error as error:
            servable = error_fields(error)
        return {
            "state": self._receiver.state.name,
            "serving": None if before is None else list(before),
            "why_not": servable,
            "holds": self._memory.holds(),
        }

    def state(self) -> str:
        """Return where this rank is in an update."""
        return self._receiver.state.name

    def holds(self) -> int:
        """Return which version the bytes are, or -1."""
        return self._memory.holds()

    def check(self, value: int) -> dict[str, int]:
        """Return which tensors are not those of a version, with how many elements are wrong."""
        return self._memory.wrong(value)

    def addresses(self) -> list[int]:
        """Return where the live weights lie."""
        return self._memory.addresses()

    def flip(self, tensor: str) -> None:
        """Damage one bit of the live weights, or mend it."""
        self._memory.flip(tensor)

    def hook(self, what: str | None, seconds: float = 0.0) -> list[int]:
        """Set the hook: None, ``"count"``, ``"raise"`` or ``"sleep"``; versions it saw so far."""

        def run(done: bascule.VersionId) -> None:
            self._hook_calls.append(done.version)
            if what == "raise":
                raise RuntimeError(f"no cache for version {done.version}")
            time.sleep(seconds)

        self._receiver.set_post_commit_hook(None if what is None else run)
        return self._hook_calls

    def update(self, *, timeout: float) -> int | None:
        """Poll, stage, wait, ask whether all are ready, and commit; the version or None.

        As a framework does it on every rank at once: an error ends this attempt.
        """
        end = time.monotonic() + timeout
        try:
            update = self._receiver.poll(timeout=timeout)
        except bascule.Aborted:  # rank 0 is another one now: poll again, as the error says
            update = self._receiver.poll(timeout=max(0.05, end - time.monotonic()))
        if update is None:
            return None
        self._update = update
        return self.finish(timeout=max(0.05, end - time.monotonic()))

    def finish(self, *, timeout: float) -> int:
        """Go on with an update that was polled; the version."""
        end = time.monotonic() + timeout

        def left() -> float:
            return max(0.05, end - time.monotonic())

        update = self._current
        update.stage(timeout=left())
        update.wait_staged(timeout=left())
        for _ in range(20):  # then it is left to the decision
            if update.ready(timeout=left()):
                break
            time.sleep(0.01)
        update.commit(timeout=left())
        return update.id.version

    def update_layout(self, *, timeout: float, shape: dict[str, Any]) -> None:
        """Put everything into new memory, cut otherwise; the old memory is let go."""
        memory = model.engine_memory(self._rank, self._world, **shape)
        self._receiver.update_layout(memory.layout, timeout=timeout)
        self._memory = memory

    def close(self, *, timeout: float = 1.0) -> None:
        """Leave."""
        self._receiver.close(timeout=timeout)


ROLES: Mapping[str, Callable[[], Process]] = {
    "coordinator": Coordinator,
    "trainer": Trainer,
    "rollout": Rollout,
}


def _stall(how: str, seconds: float) -> None:
    """Stop this thread, or all threads of Python."""
    if how == "gil":  # PyDLL keeps the interpreter's lock
        ctypes.PyDLL(None).usleep(int(seconds * 1e6))
    elif how == "spin":
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            pass
    else:
        time.sleep(seconds)


class _Answers:
    """Lines to stdout, one at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def send(self, answer: Answer) -> None:
        with self._lock:
            sys.stdout.write(json.dumps(answer) + "\n")
            sys.stdout.flush()


def _run(process: Process, request: dict[str, Any], answers: _Answers) -> None:
    answer: Answer = {"id": request.pop("id")}
    call = request.pop("call")
    begin = time.monotonic()
    try:
        answer["ok"] = getattr(process, call)(**request)
    except bascule.Error as error:
        answer["error"] = error_fields(error)
    except Exception:
        answer["failed"] = traceback.format_exc()
    answer["took"] = time.monotonic() - begin
    answers.send(answer)


def _lines() -> Iterator[str]:
    """Yield the lines of stdin; signals are handled at once, whenever they come."""
    wake, wakeup = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(wakeup, False)
    signal.set_wakeup_fd(wakeup)
    stdin = sys.stdin.fileno()
    held = b""
    with selectors.DefaultSelector() as selector:
        selector.register(stdin, selectors.EVENT_READ)
        selector.register(wake, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                data = os.read(key.fd, 1 << 16)
                if key.fd == wake:
                    continue
                if not data:
                    return
                *lines, held = (held + data).split(b"\n")
                yield from (line.decode() for line in lines)


def serve(role: str) -> None:
    """Do what the lines say until they end.

    Parameters
    ----------
    role
        One of `ROLES`.
    """

    def terminate(number: int, frame: object) -> None:
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, terminate)
    process = ROLES[role]()
    answers = _Answers()
    for line in _lines():
        request: dict[str, Any] = json.loads(line)
        if request["call"] == "stall":
            answers.send({"id": request["id"], "ok": None, "took": 0.0})
            _stall(request["how"], request["seconds"])
            continue
        threading.Thread(target=_run, args=(process, request, answers), daemon=True).start()
