"""Checks of memory."""

from __future__ import annotations

import re

from bascule.cli._common import shown_bytes
from bascule.cli._doctor.finding import Finding, Level, Wanted, cgroups, fields_of, number_in
from bascule.cli._doctor.probe import Probe

__all__ = [
    "dev_shm",
    "huge_own_pages",
    "huge_shared_pages",
    "memory",
    "overcommit",
    "sealed_memory",
]


_LITTLE_MEMORY = 256 << 20


_SOME_MEMORY = 2 << 30


def memory(probe: Probe, wanted: Wanted) -> Finding:
    """Check that what ranks will want fits what is free."""
    room, by = _memory_room(probe)
    if room is None:
        return Finding(
            "memory", Level.NOTE, "not known", "there is no /proc/meminfo to tell", "mount /proc"
        )
    found = f"{shown_bytes(room)} free under {by}"
    if wanted.memory:
        found += f", {shown_bytes(wanted.memory)} wanted"
    finding = Finding("memory", Level.OK, found, values={"free": room, "limit": by})
    finding.remedy = (
        "raise the limit of the container or job (shared memory counts against it), or publish "
        "fewer bytes: `bascule plan` tells what a rank takes"
    )
    if room < max(wanted.memory, _LITTLE_MEMORY):
        finding.level = Level.PROBLEM
        finding.why = "arenas and shadows are refused (ResourceExhausted) beyond it"
    elif room < _SOME_MEMORY and not wanted.memory:
        finding.level = Level.NOTE
        finding.why = "enough for small models only"
    else:
        finding.remedy = ""
    return finding


def _memory_room(probe: Probe) -> tuple[int | None, str]:
    """Return what may be taken yet, and what bounds it: as the core finds it."""
    room, by = None, "the memory of this host"
    information = fields_of(probe.text("/proc/meminfo"))
    if "MemAvailable" in information:
        room = (information["MemAvailable"] + information.get("SwapFree", 0)) << 10
    for folder, version in cgroups(probe, "memory"):
        names = (
            ("memory.max", "memory.current", "inactive_file")
            if version == 2
            else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        )
        limit, used = (number_in(probe.text(f"{folder}/{name}")) for name in names[:2])
        if limit is None or used is None:
            continue
        cache = fields_of(probe.text(f"{folder}/memory.stat")).get(names[2], 0)
        left = max(0, limit - max(0, used - cache))
        if room is None or left < room:
            room, by = left, f"the limit of {shown_bytes(limit)} in {folder}/{names[0]}"
    return room, by


def overcommit(probe: Probe, wanted: Wanted) -> Finding:
    """Check whether the kernel counts promises of memory."""
    mode = number_in(probe.text("/proc/sys/vm/overcommit_memory"))
    if mode != 2:
        return Finding("overcommit", Level.OK, f"vm.overcommit_memory = {mode}")
    information = fields_of(probe.text("/proc/meminfo"))
    limit, promised = (information.get(name, 0) << 10 for name in ("CommitLimit", "Committed_AS"))
    room = max(0, limit - promised)
    finding = Finding(
        "overcommit",
        Level.NOTE,
        f"vm.overcommit_memory = 2, {shown_bytes(room)} may yet be promised",
        "each mapping of shared memory counts there, on both sides",
        "sysctl vm.overcommit_memory=0",
        {"room": room},
    )
    if room < max(2 * wanted.memory, _LITTLE_MEMORY):
        finding.level = Level.PROBLEM
    return finding


def sealed_memory(probe: Probe, wanted: Wanted) -> Finding:
    """Make shared memory that nobody can shrink."""
    error = probe.seal()
    if not error:
        return Finding("sealed memory", Level.OK, "memfd works, with seals")
    return Finding(
        "sealed memory",
        Level.PROBLEM,
        error,
        "arenas and shadows are sealed memory files",
        "allow memfd_create in the container's seccomp profile; Linux 3.17 or newer",
    )


def dev_shm(probe: Probe, wanted: Wanted) -> Finding:
    """Check that there is room for tensors that torch shares."""
    space = probe.space("/dev/shm")
    if space is None:
        size, free, found = 0, 0, "not there"
    else:
        size, free = space
        found = f"{shown_bytes(size)}, {shown_bytes(free)} free"
    finding = Finding("/dev/shm", Level.OK, found, values={"size": size, "free": free})
    if free < _SOME_MEMORY:
        finding.level = Level.NOTE
        finding.why = (
            "arenas do not need it; tensors in torch's shared memory do (arena = direct, data "
            "loaders)"
        )
        finding.remedy = "mount it larger (docker: --shm-size; Kubernetes: emptyDir of Memory)"
    return finding


_HUGE_PAGES = "/sys/kernel/mm/transparent_hugepage"


def _chosen(text: str | None) -> str | None:
    """Return the word in brackets."""
    match = re.search(r"\[(\w+)\]", text or "")
    return match[1] if match else None


def huge_shared_pages(probe: Probe, wanted: Wanted) -> Finding:
    """Check that arenas and shadows get huge pages."""
    mode = _chosen(probe.text(f"{_HUGE_PAGES}/shmem_enabled"))
    finding = Finding(
        "huge pages, shared", Level.OK, f"shmem_enabled = {mode}", values={"mode": mode}
    )
    if mode not in ("always", "within_size", "advise", "force"):
        finding.level = Level.NOTE
        finding.why = "arenas and shadows have pages of 4 KiB: slower to make, map and copy"
        finding.remedy = f"as root of the host: echo advise > {_HUGE_PAGES}/shmem_enabled"
    return finding


def huge_own_pages(probe: Probe, wanted: Wanted) -> Finding:
    """Check that ordinary memory, such as live weights, gets huge pages."""
    mode = _chosen(probe.text(f"{_HUGE_PAGES}/enabled"))
    reserved = fields_of(probe.text("/proc/meminfo")).get("HugePages_Total", 0)
    found = f"enabled = {mode}, {reserved} reserved ones"
    finding = Finding(
        "huge pages, own", Level.OK, found, values={"mode": mode, "reserved": reserved}
    )
    if mode not in ("always", "madvise"):
        finding.level = Level.NOTE
        finding.why = "live weights have pages of 4 KiB: a commit copies more slowly"
        finding.remedy = f"as root of the host: echo madvise > {_HUGE_PAGES}/enabled"
    return finding
