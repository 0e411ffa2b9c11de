"""What ``bascule doctor`` can ask of a machine, so that its checks are functions of the answers."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import mmap
import multiprocessing
import os
import platform
import resource
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

import bascule

__all__ = ["Machine", "Probe"]

# The seals of an arena (src/transport/shm/memory_map.cc); Python has no name for the last one.
_SEAL_FUTURE_WRITE = 0x0010
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

# That another process may take for a small task.
_SECONDS = 10

_UPDATE = """
import numpy, bascule
source, target = {"w": numpy.arange(4096, dtype="f4")}, {"w": numpy.zeros(4096, "f4")}
job = bascule.Job(name="doctor", token="doctor")
layout = bascule.Layout.from_arrays(source)
with bascule.WeightSender.connect(job, layout=layout, timeout=10) as sender:
    sender.publish(1, timeout=10).wait(timeout=10)
    job = bascule.Job(name="doctor", token="doctor", coordinator=sender.coordinator)
    layout = bascule.Layout.from_arrays(target)
    with bascule.WeightReceiver.connect(job, engine="e0", layout=layout, timeout=10) as receiver:
        update = receiver.poll()
        update.stage()
        update.wait_staged(timeout=10)
        assert update.ready()
        update.commit()
        assert (source["w"] == target["w"]).all(), "the weights differ"
"""


class Probe(Protocol):
    """A machine as the checks see it. What is not there is None; nothing raises."""

    def text(self, path: str) -> str | None:
        """Return what a file says."""

    def link(self, path: str) -> str | None:
        """Return where a symbolic link points."""

    def space(self, path: str) -> tuple[int, int] | None:
        """Return the size of a file system and what is free of it, in bytes."""

    def limit(self, name: str) -> tuple[int | None, int | None]:
        """Return a resource limit, soft and hard, by its name such as ``NOFILE``; None: no limit.

        It counts in bytes where it is one of sizes.
        """

    def open_files(self) -> int:
        """Return how many descriptors this process has."""

    def cores(self) -> tuple[int, int]:
        """Return how many cores the machine has, and on how many this process may run."""

    def environment(self) -> Mapping[str, str]:
        """Return the environment."""

    def package(self, name: str) -> str | None:
        """Return the version of an installed Python package."""

    def built(self) -> str:
        """Return the version of bascule that was imported."""

    def python(self) -> str:
        """Return the version of Python."""

    def kernel(self) -> str:
        """Return the release of the kernel."""

    def start_method(self) -> str:
        """Return how multiprocessing starts processes."""

    def clocks(self) -> tuple[float, float]:
        """Return the wall clock in seconds, and how far it moved against the steady one."""

    def seal(self) -> str:
        """Make sealed shared memory. Returns why it failed, or nothing."""

    def listen(self, directory: str) -> str:
        """Connect by a Unix socket in a directory, or by an abstract one without. As `seal`."""

    def share(self, directory: str) -> str:
        """Send sealed memory to another process by such a socket and read it there. As `seal`."""

    def update(self) -> str:
        """Run a job of one trainer and one rollout in a process of its own. As `seal`."""


class Machine:
    """The machine that this process runs on."""

    def text(self, path: str) -> str | None:
        try:
            return Path(path).read_text(errors="replace")
        except OSError:
            return None

    def link(self, path: str) -> str | None:
        try:
            return os.readlink(path)
        except OSError:
            return None

    def space(self, path: str) -> tuple[int, int] | None:
        try:
            found = os.statvfs(path)
        except OSError:
            return None
        return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize

    def limit(self, name: str) -> tuple[int | None, int | None]:
        soft, hard = resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))
        unlimited = resource.RLIM_INFINITY
        return None if soft == unlimited else soft, None if hard == unlimited else hard

    def open_files(self) -> int:
        try:
            return len(os.listdir("/proc/self/fd"))
        except OSError:
            return 0

    def cores(self) -> tuple[int, int]:
        return os.cpu_count() or 1, len(os.sched_getaffinity(0))

    def environment(self) -> Mapping[str, str]:
        return os.environ

    def package(self, name: str) -> str | None:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return None

    def built(self) -> str:
        return bascule.__version__

    def python(self) -> str:
        return platform.python_version()

    def kernel(self) -> str:
        return platform.release()

    def start_method(self) -> str:
        return (
            multiprocessing.get_start_method(allow_none=True)
            or (multiprocessing.get_all_start_methods()[0])
        )

    def clocks(self) -> tuple[float, float]:
        wall, steady = time.time(), time.monotonic()
        time.sleep(0.05)
        return wall, (time.time() - wall) - (time.monotonic() - steady)

    def seal(self) -> str:
        try:
            os.close(_sealed(secrets.token_bytes(4096)))
        except OSError as error:
            return str(error)
        return ""

    def listen(self, directory: str) -> str:
        try:
            with _listener(directory) as (server, address), socket.socket(socket.AF_UNIX) as client:
                client.connect(address)
                server.accept()[0].close()
        except OSError as error:
            return str(error)
        return ""

    def share(self, directory: str) -> str:
        secret = secrets.token_bytes(4096)
        try:
            with _listener(directory) as (server, address), _reader(address) as reader:
                if connection := _accept(server, reader):
                    with connection:
                        memory = _sealed(secret)
                        try:
                            socket.send_fds(connection, [b"memory"], [memory])
                        finally:
                            os.close(memory)
                out, err = reader.communicate(timeout=_SECONDS)
        except (OSError, subprocess.SubprocessError) as error:
            return str(error)
        if reader.returncode:
            return _last_line(err)
        return "" if out == secret else "the other process read other bytes"

    def update(self) -> str:
        try:
            done = subprocess.run(
                [sys.executable, "-P", "-c", _UPDATE], capture_output=True, text=True, timeout=60
            )
        except (OSError, subprocess.SubprocessError) as error:
            return str(error)
        if done.returncode < 0:
            return f"it died of signal {-done.returncode}"
        return _last_line(done.stderr.encode()) if done.returncode else ""


# Run with the address of a socket: writes what the memory has that comes through it.
_READER = """
import mmap, socket, sys
address = sys.argv[1]
if address[0] == "@":
    address = "\\0" + address[1:]
with socket.socket(socket.AF_UNIX) as connection:
    connection.connect(address)
    _, descriptors, _, _ = socket.recv_fds(connection, 16, 1)
with mmap.mmap(descriptors[0], 0, mmap.MAP_SHARED, mmap.PROT_READ) as view:
    sys.stdout.buffer.write(view[:])
"""


@contextlib.contextmanager
def _reader(address: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process that runs `_READER`; it is gone at the end."""
    reader = subprocess.Popen(
        [sys.executable, "-S", "-P", "-c", _READER, address.replace("\0", "@")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with reader:
        try:
            yield reader
        finally:
            reader.kill()


def _accept(server: socket.socket, client: subprocess.Popen[bytes]) -> socket.socket | None:
    """Return the connection of a process that may end without having made one."""
    server.settimeout(0.05)
    end = time.monotonic() + _SECONDS
    while time.monotonic() < end:
        with contextlib.suppress(TimeoutError):
            return server.accept()[0]
        if client.poll() is not None:
            break
    return None


def _last_line(err: bytes) -> str:
    lines = err.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it failed without a word"


def _sealed(content: bytes) -> int:
    """Return a descriptor of sealed memory; it raises OSError."""
    memory = os.memfd_create("bascule:doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(memory, len(content))
        with mmap.mmap(memory, len(content)) as view:
            view[:] = content
            try:
                fcntl.fcntl(memory, fcntl.F_ADD_SEALS, _SEALS | _SEAL_FUTURE_WRITE)
            except OSError:  # Linux before 5.1
                fcntl.fcntl(memory, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(memory)
        raise
    return memory


@contextlib.contextmanager
def _listener(directory: str) -> Iterator[tuple[socket.socket, str]]:
    """Listen at a Unix socket; gives it and its address."""
    name = f"bascule-doctor-{secrets.token_hex(8)}"
    folder = tempfile.mkdtemp(dir=directory) if directory else ""
    address = os.path.join(folder, "socket") if directory else "\0" + name
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(address)
            server.listen(1)
            yield server, address
    finally:
        if folder:
            with contextlib.suppress(OSError):
                os.unlink(address)
            os.rmdir(folder)
