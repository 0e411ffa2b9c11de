"""The checks of ``bascule doctor``: functions of a `Probe`, none of which raises."""

from __future__ import annotations

from collections.abc import Callable

from bascule.cli._doctor import host, limits, memory, transports
from bascule.cli._doctor.finding import Finding, Level, Wanted
from bascule.cli._doctor.host import compare_identities, identity_of
from bascule.cli._doctor.probe import Machine, Probe

__all__ = [
    "CHECKS",
    "Finding",
    "Level",
    "Machine",
    "Probe",
    "Wanted",
    "compare_identities",
    "identity_of",
]

CHECKS: tuple[Callable[[Probe, Wanted], Finding], ...] = (
    host.versions,
    host.environment,
    memory.memory,
    memory.overcommit,
    memory.sealed_memory,
    memory.dev_shm,
    memory.huge_shared_pages,
    memory.huge_own_pages,
    limits.file_size,
    limits.address_space,
    limits.locked_memory,
    limits.open_files,
    limits.tasks,
    host.cores,
    host.identity,
    host.start_method,
    host.clocks,
    transports.sockets,
    transports.shared_memory,
    transports.other_transports,
    transports.update,
)
