"""Checks that try what ranks do."""

from __future__ import annotations

from bascule.cli._doctor.finding import Finding, Level, Wanted
from bascule.cli._doctor.probe import Probe

__all__ = ["other_transports", "shared_memory", "sockets", "update"]


def sockets(probe: Probe, wanted: Wanted) -> Finding:
    """Try the sockets by which peers hand memory to each other."""
    directory = wanted.socket_directory
    error = probe.listen(directory)
    kind = f"Unix sockets in {directory}" if directory else "abstract Unix sockets"
    if not error:
        return Finding("sockets", Level.OK, f"{kind} work")
    return Finding(
        "sockets",
        Level.PROBLEM,
        f"{kind}: {error}",
        "ranks of one host cannot find each other",
        "choose a short path to a directory that ranks may write to, on a file system of this host"
        if directory
        else "set Job.socket_directory to a directory that all ranks of the host share",
    )


def shared_memory(probe: Probe, wanted: Wanted) -> Finding:
    """Try the way of the shm transport: memory through a socket to another process."""
    error = probe.share(wanted.socket_directory)
    if not error:
        return Finding(
            "transport shm", Level.OK, "another process read sealed memory that it got by a socket"
        )
    return Finding(
        "transport shm",
        Level.PROBLEM,
        error,
        "it is the only transport of this version",
        "see sealed memory, sockets and open files; allow SCM_RIGHTS in the seccomp profile",
    )


def other_transports(probe: Probe, wanted: Wanted) -> Finding:
    """Tell what else could carry weights here."""
    gpus = probe.text("/proc/driver/nvidia/version")
    finding = Finding(
        "other transports",
        Level.OK,
        "cuda_ipc and ucx: not in this version",
        values={"gpu": gpus is not None},
    )
    if gpus is not None:
        finding.level = Level.NOTE
        finding.why = "there are GPUs here; layouts must lie in CPU memory"
        finding.remedy = "copy weights to and from CPU tensors around publish and commit"
    return finding


def update(probe: Probe, wanted: Wanted) -> Finding:
    """Run a whole update."""
    error = probe.update()
    if not error:
        return Finding("update", Level.OK, "a trainer published and a rollout committed")
    return Finding(
        "update",
        Level.PROBLEM,
        error,
        "a job of two ranks on this machine did not work",
        "see what else is wrong here; 127.0.0.1 must take connections",
    )
