"""Checks of resource limits."""

from __future__ import annotations

from bascule.cli._common import shown_bytes
from bascule.cli._doctor.finding import Finding, Level, Wanted, cgroups, number_in
from bascule.cli._doctor.probe import Probe

__all__ = ["address_space", "file_size", "locked_memory", "open_files", "tasks"]


# What is far too little for a rank, and what may be for one of many.
_FEW_FILES, _SOME_FILES = 256, 1024


_FEW_TASKS = 512
_LITTLE_SPACE = 8 << 30


def file_size(probe: Probe, wanted: Wanted) -> Finding:
    """Check that files, and with them arenas, may be large."""
    soft, _ = probe.limit("FSIZE")
    if soft is None:
        return Finding("file size", Level.OK, "no limit")
    finding = Finding(
        "file size",
        Level.PROBLEM,
        f"at most {shown_bytes(soft)}",
        "arenas and shadows count as files: larger ones are refused (ResourceExhausted)",
        "ulimit -f unlimited",
        {"limit": soft},
    )
    if wanted.memory and soft >= wanted.memory:
        finding.level = Level.NOTE
    return finding


def address_space(probe: Probe, wanted: Wanted) -> Finding:
    """Check that a process may map what others hold."""
    soft, _ = probe.limit("AS")
    if soft is None:
        return Finding("address space", Level.OK, "no limit")
    finding = Finding(
        "address space",
        Level.NOTE,
        f"at most {shown_bytes(soft)}",
        "a rollout maps the arenas of all trainers that it reads from",
        "ulimit -v unlimited",
        {"limit": soft},
    )
    if soft < max(_LITTLE_SPACE, 2 * wanted.memory):
        finding.level = Level.PROBLEM
    return finding


def locked_memory(probe: Probe, wanted: Wanted) -> Finding:
    """Check that memory may be locked."""
    soft, hard = probe.limit("MEMLOCK")
    if soft is None:
        return Finding("locked memory", Level.OK, "no limit")
    return Finding(
        "locked memory",
        Level.NOTE,
        f"at most {shown_bytes(soft)}",
        "this version locks none; what pins memory for GPUs and network cards needs more",
        "ulimit -l unlimited"
        if hard is None
        else "let the container have it (docker: --ulimit memlock=-1)",
        {"limit": soft},
    )


def open_files(probe: Probe, wanted: Wanted) -> Finding:
    """Check that there are descriptors enough."""
    soft, hard = probe.limit("NOFILE")
    if soft is None:
        return Finding("open files", Level.OK, "no limit")
    used = probe.open_files()
    finding = Finding(
        "open files", Level.OK, f"at most {soft}, {used} open", values={"limit": soft, "open": used}
    )
    if soft - used >= _SOME_FILES - 64:
        return finding
    finding.level = Level.NOTE if soft - used >= _FEW_FILES - 64 else Level.PROBLEM
    finding.why = (
        "a rank keeps sockets to its peers and to the coordinator, and memory by descriptor"
    )
    more = hard is None or hard >= _SOME_FILES
    finding.remedy = (
        f"ulimit -n {'65536' if hard is None else hard}"
        if more
        else f"raise the hard limit, which is {hard} (docker: --ulimit nofile=65536)"
    )
    return finding


def tasks(probe: Probe, wanted: Wanted) -> Finding:
    """Check that threads may be started."""
    room, by = None, ""
    for folder, _ in cgroups(probe, "pids"):
        limit, used = (number_in(probe.text(f"{folder}/pids.{x}")) for x in ("max", "current"))
        if limit is None or used is None:
            continue
        if room is None or limit - used < room:
            room, by = limit - used, f"{folder}/pids.max"
    soft, _ = probe.limit("NPROC")
    if soft is not None and (room is None or soft < room):
        room, by = soft, "ulimit -u"
    if room is None:
        return Finding("threads", Level.OK, "no limit")
    finding = Finding("threads", Level.OK, f"{room} by {by}", values={"room": room})
    if room < _FEW_TASKS:
        finding.level = Level.PROBLEM if room < _FEW_TASKS // 8 else Level.NOTE
        finding.why = "a rank starts threads for copying, for its peers and for gRPC"
        finding.remedy = "raise it (docker: --pids-limit; ulimit -u)"
    return finding
