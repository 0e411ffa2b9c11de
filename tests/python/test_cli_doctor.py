"""``bascule doctor``: its checks on machines that are made up, and with real limits lowered."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import bascule
from bascule.cli import app
from bascule.cli._doctor import (
    CHECKS,
    Finding,
    Level,
    Machine,
    Wanted,
    compare_identities,
    identity_of,
    probe,
)

COMMAND = [sys.executable, "-c", "from bascule.cli import main; main()"]
GIB = 1 << 30


@dataclass
class MadeUp:
    """A machine where all is in order, until a test changes it."""

    files: dict[str, str] = field(
        default_factory=lambda: {
            "/proc/meminfo": "MemAvailable: 67108864 kB\nSwapFree: 0 kB\nHugePages_Total: 0\n",
            "/proc/self/cgroup": "0::/pods/one\n",
            "/proc/sys/vm/overcommit_memory": "0\n",
            "/proc/sys/kernel/random/boot_id": "1234-5678\n",
            "/sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
            "/sys/kernel/mm/transparent_hugepage/shmem_enabled": (
                "always within_size [advise] never deny force\n"
            ),
            "/sys/devices/system/clocksource/clocksource0/current_clocksource": "tsc\n",
        }
    )
    links: dict[str, str] = field(
        default_factory=lambda: {
            f"/proc/self/ns/{kind}": f"{kind}:[40265{i}]"
            for i, kind in enumerate(("net", "pid", "user"))
        }
    )
    shm: tuple[int, int] | None = (64 * GIB, 64 * GIB)
    limits: dict[str, tuple[int | None, int | None]] = field(default_factory=dict)
    files_open: int = 10
    core_counts: tuple[int, int] = (16, 16)
    variables: dict[str, str] = field(default_factory=dict)
    packages: dict[str, str] = field(
        default_factory=lambda: {"bascule": "1.2", "numpy": "2.4", "torch": "2.9"}
    )
    release: str = "6.8.0-generic"
    method: str = "spawn"
    clock: tuple[float, float] = (1.8e9, 0.0)
    errors: dict[str, str] = field(default_factory=dict)

    def text(self, path: str) -> str | None:
        return self.files.get(path)

    def link(self, path: str) -> str | None:
        return self.links.get(path)

    def space(self, path: str) -> tuple[int, int] | None:
        return self.shm if path == "/dev/shm" else None

    def limit(self, name: str) -> tuple[int | None, int | None]:
        return self.limits.get(name, (None, None))

    def open_files(self) -> int:
        return self.files_open

    def cores(self) -> tuple[int, int]:
        return self.core_counts

    def environment(self) -> Mapping[str, str]:
        return self.variables

    def package(self, name: str) -> str | None:
        return self.packages.get(name)

    def built(self) -> str:
        return "1.2"

    def python(self) -> str:
        return "3.12.1"

    def kernel(self) -> str:
        return self.release

    def start_method(self) -> str:
        return self.method

    def clocks(self) -> tuple[float, float]:
        return self.clock

    def seal(self) -> str:
        return self.errors.get("seal", "")

    def listen(self, directory: str) -> str:
        return self.errors.get(f"listen {directory}".strip(), "")

    def share(self, directory: str) -> str:
        return self.errors.get(f"share {directory}".strip(), "")

    def update(self) -> str:
        return self.errors.get("update", "")


def findings(machine: Any, wanted: Wanted = Wanted()) -> dict[str, Finding]:  # noqa: B008
    found = [check(machine, wanted) for check in CHECKS]
    assert len({finding.check for finding in found}) == len(found)
    return {finding.check: finding for finding in found}


def levels(machine: Any, wanted: Wanted = Wanted()) -> dict[str, Level]:  # noqa: B008
    """The levels of the findings that are not in order, each with a reason and a remedy."""
    bad = {n: f for n, f in findings(machine, wanted).items() if f.level is not Level.OK}
    assert all(finding.why and finding.remedy for finding in bad.values())
    return {name: finding.level for name, finding in bad.items()}


def test_all_in_order() -> None:
    assert levels(MadeUp()) == {}
    assert all(finding.found for finding in findings(MadeUp()).values())
    wanted = Wanted(memory=32 * GIB, threads=16, socket_directory="/sockets")
    assert levels(MadeUp(), wanted) == {}


# What is changed, what is wanted, and what is found then: nothing else.
Change = Callable[[MadeUp], object]
BAD: list[tuple[str, Change, Wanted, Level]] = [
    ("versions", lambda m: m.packages.update(bascule="1.1"), Wanted(), Level.PROBLEM),
    ("versions", lambda m: setattr(m, "release", "5.10.0"), Wanted(), Level.NOTE),
    ("environment", lambda m: m.variables.update(BASCULE_X="1"), Wanted(), Level.PROBLEM),
    (
        "memory",
        lambda m: m.files.update({"/proc/meminfo": "MemAvailable: 1048576 kB\n"}),
        Wanted(),
        Level.NOTE,
    ),
    (
        "memory",
        lambda m: m.files.update({"/proc/meminfo": "MemAvailable: 65536 kB\n"}),
        Wanted(),
        Level.PROBLEM,
    ),
    ("memory", lambda m: None, Wanted(memory=65 * GIB), Level.PROBLEM),
    (
        "memory",
        lambda m: m.files.update(
            {
                "/sys/fs/cgroup/pods/memory.max": f"{8 * GIB}\n",
                "/sys/fs/cgroup/pods/memory.current": f"{7 * GIB}\n",
                "/sys/fs/cgroup/pods/memory.stat": f"anon 1\ninactive_file {GIB // 2}\n",
                "/sys/fs/cgroup/pods/one/memory.max": "max\n",
                "/sys/fs/cgroup/pods/one/memory.current": "7\n",
            }
        ),
        Wanted(),
        Level.NOTE,
    ),
    (
        "memory",
        lambda m: m.files.update(
            {
                "/proc/self/cgroup": "5:cpu,cpuacct:/x\n4:memory:/docker/a\n",
                "/sys/fs/cgroup/memory/memory.limit_in_bytes": f"{4 * GIB}\n",
                "/sys/fs/cgroup/memory/memory.usage_in_bytes": f"{3 * GIB}\n",
            }
        ),
        Wanted(memory=2 * GIB),
        Level.PROBLEM,
    ),
    ("memory", lambda m: m.files.pop("/proc/meminfo"), Wanted(), Level.NOTE),
    (
        "overcommit",
        lambda m: m.files.update(
            {
                "/proc/sys/vm/overcommit_memory": "2",
                "/proc/meminfo": "MemAvailable: 67108864 kB\nCommitLimit: 67108864 kB\n"
                "Committed_AS: 1048576 kB\n",
            }
        ),
        Wanted(),
        Level.NOTE,
    ),
    (
        "overcommit",
        lambda m: m.files.update(
            {
                "/proc/sys/vm/overcommit_memory": "2",
                "/proc/meminfo": "MemAvailable: 67108864 kB\nCommitLimit: 8388608 kB\n"
                "Committed_AS: 4194304 kB\n",
            }
        ),
        Wanted(memory=3 * GIB),
        Level.PROBLEM,
    ),
    ("file size", lambda m: m.limits.update(FSIZE=(GIB, None)), Wanted(), Level.PROBLEM),
    ("file size", lambda m: m.limits.update(FSIZE=(GIB, None)), Wanted(memory=GIB), Level.NOTE),
    ("file size", lambda m: m.limits.update(FSIZE=(0, None)), Wanted(), Level.PROBLEM),
    ("address space", lambda m: m.limits.update(AS=(64 * GIB, None)), Wanted(), Level.NOTE),
    ("address space", lambda m: m.limits.update(AS=(4 * GIB, None)), Wanted(), Level.PROBLEM),
    ("locked memory", lambda m: m.limits.update(MEMLOCK=(65536, 65536)), Wanted(), Level.NOTE),
    ("open files", lambda m: m.limits.update(NOFILE=(512, 4096)), Wanted(), Level.NOTE),
    ("open files", lambda m: m.limits.update(NOFILE=(128, 128)), Wanted(), Level.PROBLEM),
    ("threads", lambda m: m.limits.update(NPROC=(256, 256)), Wanted(), Level.NOTE),
    (
        "threads",
        lambda m: m.files.update(
            {
                "/sys/fs/cgroup/pods/one/pids.max": "100",
                "/sys/fs/cgroup/pods/one/pids.current": "90",
            }
        ),
        Wanted(),
        Level.PROBLEM,
    ),
    ("sealed memory", lambda m: m.errors.update(seal="[Errno 1]"), Wanted(), Level.PROBLEM),
    ("/dev/shm", lambda m: setattr(m, "shm", (64 << 20, 64 << 20)), Wanted(), Level.NOTE),
    ("/dev/shm", lambda m: setattr(m, "shm", None), Wanted(), Level.NOTE),
    (
        "huge pages, shared",
        lambda m: m.files.update(
            {"/sys/kernel/mm/transparent_hugepage/shmem_enabled": "always advise [never]"}
        ),
        Wanted(),
        Level.NOTE,
    ),
    (
        "huge pages, shared",
        lambda m: m.files.pop("/sys/kernel/mm/transparent_hugepage/shmem_enabled"),
        Wanted(),
        Level.NOTE,
    ),
    (
        "huge pages, own",
        lambda m: m.files.update(
            {"/sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]"}
        ),
        Wanted(),
        Level.NOTE,
    ),
    ("cores", lambda m: setattr(m, "core_counts", (16, 4)), Wanted(), Level.NOTE),
    (
        "cores",
        lambda m: m.files.update({"/sys/fs/cgroup/pods/one/cpu.max": "250000 100000\n"}),
        Wanted(),
        Level.NOTE,
    ),
    (
        "cores",
        lambda m: m.files.update({"/sys/fs/cgroup/cpu.max": "400000 100000\n"}),
        Wanted(threads=5),
        Level.PROBLEM,
    ),
    (
        "cores",
        lambda m: m.files.update(
            {
                "/proc/self/cgroup": "3:cpu,cpuacct:/a\n",
                "/sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us": "50000",
                "/sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_period_us": "100000",
                "/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1",
                "/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
            }
        ),
        Wanted(threads=1),
        Level.PROBLEM,
    ),
    ("sockets", lambda m: m.errors.update(listen="refused"), Wanted(), Level.PROBLEM),
    (
        "sockets",
        lambda m: m.errors.update({"listen /s": "AF_UNIX path too long"}),
        Wanted(socket_directory="/s"),
        Level.PROBLEM,
    ),
    ("identity", lambda m: m.links.clear(), Wanted(), Level.NOTE),
    ("transport shm", lambda m: m.errors.update(share="other bytes"), Wanted(), Level.PROBLEM),
    (
        "other transports",
        lambda m: m.files.update({"/proc/driver/nvidia/version": "NVRM 550"}),
        Wanted(),
        Level.NOTE,
    ),
    ("update", lambda m: m.errors.update(update="DataLoss"), Wanted(), Level.PROBLEM),
    ("start method", lambda m: setattr(m, "method", "fork"), Wanted(), Level.NOTE),
    ("clocks", lambda m: setattr(m, "clock", (1e6, 0.0)), Wanted(), Level.PROBLEM),
    ("clocks", lambda m: setattr(m, "clock", (1.8e9, -0.02)), Wanted(), Level.NOTE),
]


@pytest.mark.parametrize(("check", "change", "wanted", "level"), BAD)
def test_each_fault_alone_is_found(
    check: str, change: Change, wanted: Wanted, level: Level
) -> None:
    machine = MadeUp()
    change(machine)
    assert levels(machine, wanted) == {check: level}


def test_every_check_has_a_fault_that_it_finds() -> None:
    assert {check for check, *_ in BAD} == set(findings(MadeUp()))


def test_what_was_found_is_told() -> None:
    machine = MadeUp(limits={"NOFILE": (512, 4096)}, variables={"BASCULE_B": "", "BASCULE_A": ""})
    machine.files["/sys/fs/cgroup/pods/one/cpu.max"] = "250000 100000"
    found = findings(machine, Wanted(memory=GIB, threads=2))
    assert found["open files"].remedy == "ulimit -n 4096"
    assert found["environment"].remedy == "unset BASCULE_A BASCULE_B"
    assert found["cores"].values == {"online": 16, "allowed": 16, "quota": 2.5, "usable": 2.5}
    assert "/sys/fs/cgroup/pods/one/cpu.max" in found["cores"].found
    assert found["memory"].values["free"] == 64 * GIB
    assert found["memory"].found.endswith("1.07 GB wanted")
    variables = {"BASCULE_SERVICE_HOST": "1", "BASCULE_PORT_7070_TCP": "1", "OTHER": "1"}
    assert findings(MadeUp(variables=variables))["environment"].level is Level.OK


def test_page_cache_of_a_cgroup_counts_as_free() -> None:
    machine = MadeUp()
    machine.files |= {
        "/sys/fs/cgroup/pods/memory.max": f"{8 * GIB}\n",
        "/sys/fs/cgroup/pods/memory.current": f"{7 * GIB}\n",
        "/sys/fs/cgroup/pods/memory.stat": f"anon 1\ninactive_file {2 * GIB}\n",
    }
    memory = findings(machine)["memory"]
    assert memory.values == {
        "free": 3 * GIB,
        "limit": "the limit of 8.59 GB in /sys/fs/cgroup/pods/memory.max",
    }


def test_a_machine_that_tells_nothing() -> None:
    machine = MadeUp(files={}, links={}, shm=None, packages={})
    found = findings(machine)
    assert not [f for f in found.values() if f.level is Level.PROBLEM]


def test_two_containers() -> None:
    here = identity_of(MadeUp())
    assert here == {
        "boot_id": "1234-5678",
        "network": "402650",
        "processes": "402651",
        "user": "402652",
    }
    sockets = Wanted(socket_directory="/shared")
    assert compare_identities(here, here, Wanted()).level is Level.OK
    # The namespaces of processes and users may differ.
    assert compare_identities(here, here | {"processes": "7"}, Wanted()).level is Level.OK
    network = here | {"network": "7"}
    assert compare_identities(here, network, Wanted()).level is Level.PROBLEM
    assert compare_identities(here, network, sockets).level is Level.OK
    host = here | {"boot_id": "7"}
    assert compare_identities(here, host, sockets).level is Level.PROBLEM


# --- this machine ---


def doctor(
    *arguments: str,
    lower: Callable[[], object] | None = None,
    environment: Mapping[str, str] | None = None,
    command: list[str] | None = None,
) -> tuple[int, dict[str, dict[str, Any]]]:
    done = subprocess.run(
        [*(command or COMMAND), "doctor", "--json", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        preexec_fn=lower,
        env=environment,
    )
    assert "Traceback" not in done.stderr, done.stderr
    report = json.loads(done.stdout)
    checks = {check["check"]: check for check in report["checks"]}
    problems = sum(check["level"] == "problem" for check in checks.values())
    assert report["problems"] == problems
    assert done.returncode == (1 if problems else 0)
    return done.returncode, checks


def soft(name: int, value: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(name, (value, resource.getrlimit(name)[1]))


def test_this_machine_can_move_weights() -> None:
    _, checks = doctor()
    assert set(checks) == set(findings(MadeUp()))
    for name in ("sealed memory", "sockets", "transport shm", "update", "versions"):
        assert checks[name]["level"] == "ok", checks[name]
    assert checks["versions"]["values"]["bascule"] == bascule.__version__


def test_few_descriptors() -> None:
    code, checks = doctor(lower=soft(resource.RLIMIT_NOFILE, 64))
    assert (code, checks["open files"]["level"]) == (1, "problem")
    assert checks["open files"]["values"]["limit"] == 64


def test_so_few_descriptors_that_nothing_works() -> None:
    """Few enough that its own tries fail: it still tells."""
    code, checks = doctor(lower=soft(resource.RLIMIT_NOFILE, 9))
    assert (code, checks["open files"]["level"]) == (1, "problem")
    assert checks["transport shm"]["level"] == checks["update"]["level"] == "problem"


def test_little_locked_memory() -> None:
    _, checks = doctor(lower=soft(resource.RLIMIT_MEMLOCK, 4096))
    assert checks["locked memory"]["level"] == "note"
    assert checks["locked memory"]["values"] == {"limit": 4096}


def test_small_files() -> None:
    code, checks = doctor(lower=soft(resource.RLIMIT_FSIZE, 1 << 20))
    assert (code, checks["file size"]["level"]) == (1, "problem")
    assert checks["file size"]["values"] == {"limit": 1 << 20}


def test_no_files_at_all() -> None:
    """Sealed memory is a file too; the tries see what the limit does."""
    code, checks = doctor(lower=soft(resource.RLIMIT_FSIZE, 0))
    assert (code, checks["sealed memory"]["level"]) == (1, "problem")
    assert checks["update"]["level"] == "problem"
    assert "file size limit" in checks["update"]["found"]


def test_little_address_space() -> None:
    _, checks = doctor(lower=soft(resource.RLIMIT_AS, 7 << 30))
    assert checks["address space"]["level"] == "problem"


def test_bound_to_one_core() -> None:
    if (os.cpu_count() or 1) < 2:
        pytest.skip("there is only one core")
    one = min(os.sched_getaffinity(0))
    _, checks = doctor(lower=lambda: os.sched_setaffinity(0, {one}))
    assert checks["cores"]["level"] == "note"
    assert checks["cores"]["values"]["allowed"] == 1
    code, checks = doctor("--threads", "2", lower=lambda: os.sched_setaffinity(0, {one}))
    assert (code, checks["cores"]["level"]) == (1, "problem")


def test_a_variable_that_connect_refuses() -> None:
    code, checks = doctor(environment=os.environ | {"BASCULE_THREADS": "4"})
    assert (code, checks["environment"]["level"]) == (1, "problem")
    assert checks["update"]["level"] == "problem"
    assert "BASCULE_THREADS" in checks["update"]["found"]


def test_more_memory_than_there_is() -> None:
    code, checks = doctor("--memory", "900TB")
    assert (code, checks["memory"]["level"]) == (1, "problem")


def test_in_a_network_namespace_of_its_own() -> None:
    unshare = ["unshare", "--net", "--map-root-user"]
    if subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no namespaces here")
    _, checks = doctor(command=[*unshare, *COMMAND])
    # The loopback device is down in there.
    assert checks["update"]["level"] == "problem"
    assert checks["identity"]["values"] != identity_of(Machine())


@pytest.fixture
def group() -> Any:
    """Make groups of a cgroup controller below that of this process."""
    made: list[Path] = []

    def make(controller: str) -> Path:
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            parent = Path("/sys/fs/cgroup", controllers, path.lstrip("/"))
            folder = parent / f"bascule-doctor-{os.getpid()}"
            try:
                folder.mkdir()
            except OSError:
                continue
            made.append(folder)
            names = ("memory.max", "memory.limit_in_bytes", "cpu.max", "cpu.cfs_quota_us")
            if any((folder / n).exists() for n in names if n.startswith(f"{controller}.")):
                return folder
        pytest.skip(f"no {controller} cgroup can be made here")

    yield make
    for folder in made:
        folder.rmdir()


def into(folder: Path) -> Callable[[], None]:
    return lambda: (folder / "cgroup.procs").write_text(f"{os.getpid()}") and None


def test_in_a_small_cgroup(group: Callable[[str], Path]) -> None:
    folder = group("memory")
    names = ("memory.max", "memory.limit_in_bytes")
    file = next(folder / name for name in names if (folder / name).exists())
    file.write_text(str(512 << 20))
    _, checks = doctor(lower=into(folder))
    assert checks["memory"]["level"] == "note"
    assert checks["memory"]["values"]["limit"] == f"the limit of 537 MB in {file}"
    assert 300 << 20 < checks["memory"]["values"]["free"] < 512 << 20
    code, checks = doctor("--memory", "1GB", lower=into(folder))
    assert (code, checks["memory"]["level"]) == (1, "problem")


def test_in_a_cgroup_with_a_quota(group: Callable[[str], Path]) -> None:
    folder = group("cpu")
    if (folder / "cpu.max").exists():
        (folder / "cpu.max").write_text("50000 100000")
    else:
        (folder / "cpu.cfs_period_us").write_text("100000")
        (folder / "cpu.cfs_quota_us").write_text("50000")
    _, checks = doctor(lower=into(folder))
    assert checks["cores"]["level"] == "note"
    assert checks["cores"]["values"]["quota"] == 0.5


def test_sockets_in_a_directory(tmp_path: Path) -> None:
    _, checks = doctor("--socket-directory", str(tmp_path))
    assert checks["sockets"]["level"] == checks["transport shm"]["level"] == "ok"
    assert list(tmp_path.iterdir()) == []
    long = tmp_path / ("long" * 30)
    long.mkdir()
    for wrong in (long, tmp_path / "missing"):
        code, checks = doctor("--socket-directory", str(wrong))
        assert (code, checks["sockets"]["level"]) == (1, "problem")
        assert checks["transport shm"]["level"] == "problem"


def test_what_arrives_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Machine().share("") == ""
    monkeypatch.setattr(probe, "_READER", probe._READER.replace("view[:]", "view[1:]"))
    assert "other bytes" in Machine().share("")
    monkeypatch.setattr(probe, "_READER", "raise OSError('it does not start')")
    assert Machine().share("") == "OSError: it does not start"


def test_a_folder_with_modules_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "numpy.py").write_text("raise RuntimeError")
    (tmp_path / "socket.py").write_text("raise RuntimeError")
    monkeypatch.chdir(tmp_path)
    assert Machine().update() == Machine().share("") == ""


def test_memory_is_really_sealed() -> None:
    memory = probe._sealed(b"x" * 4096)
    try:
        with pytest.raises(OSError, match="not permitted"):
            os.ftruncate(memory, 0)
        # No new writable mapping.
        mmap = ctypes.CDLL(None, use_errno=True).mmap
        mmap.restype = ctypes.c_ssize_t
        assert mmap(None, ctypes.c_size_t(4096), 3, 1, memory, ctypes.c_long(0)) == -1
    finally:
        os.close(memory)


def test_as_text_and_compared(tmp_path: Path) -> None:
    report = tmp_path / "other.json"
    done = CliRunner().invoke(app, ["doctor", "--json"])
    report.write_text(done.stdout)
    done = CliRunner().invoke(app, ["doctor", "--compare", str(report)])
    lines = done.stdout.splitlines()
    assert any(line.startswith("ok      compared") for line in lines)
    assert lines[-1].startswith("no problems, ")
    other = json.loads(report.read_text())
    identity = next(check for check in other["checks"] if check["check"] == "identity")
    identity["values"]["boot_id"] = "another"
    report.write_text(json.dumps(other))
    done = CliRunner().invoke(app, ["doctor", "--compare", str(report)])
    assert done.exit_code == 1
    assert any(line.startswith("problem compared") for line in done.stdout.splitlines())
    report.write_text("{}")
    assert CliRunner().invoke(app, ["doctor", "--compare", str(report)]).exit_code == 2
    assert CliRunner().invoke(app, ["doctor", "--memory", "much"]).exit_code == 2
