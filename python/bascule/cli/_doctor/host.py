"""Checks of the host: versions, cores, identity, clocks."""

from __future__ import annotations

import re
from collections.abc import Mapping

from bascule.cli._common import shown_seconds
from bascule.cli._doctor.finding import Finding, Level, Wanted, cgroups, number_in
from bascule.cli._doctor.probe import Probe

__all__ = [
    "clocks",
    "compare_identities",
    "cores",
    "environment",
    "identity",
    "identity_of",
    "start_method",
    "versions",
]


# The wall clock may not lag this version's release, nor jump while it is watched.
_EARLIEST = 1_735_689_600  # 2025


_CLOCK_STEP = 0.005


def versions(probe: Probe, wanted: Wanted) -> Finding:
    """Check that the parts are there, and of one version."""
    built, installed = probe.built(), probe.package("bascule")
    packages = {name: probe.package(name) for name in ("numpy", "torch")}
    found = f"bascule {built}, Python {probe.python()}, "
    found += ", ".join(f"{name} {version or 'not installed'}" for name, version in packages.items())
    found += f", Linux {probe.kernel()}"
    values = {"bascule": built, "python": probe.python(), "kernel": probe.kernel(), **packages}
    finding = Finding("versions", Level.OK, found, values=values)
    if installed is not None and installed != built:
        finding.level = Level.PROBLEM
        finding.why = f"the installed package says {installed}: two installations are mixed"
        finding.remedy = "pip uninstall bascule, until there is none, and install it again"
    elif _numbers(probe.kernel()) < (5, 14):
        finding.level = Level.NOTE
        finding.why = "Linux before 5.14 takes the pages of shared memory more slowly"
        finding.remedy = "use a newer kernel where there is one"
    return finding


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", release)[:2])


def environment(probe: Probe, wanted: Wanted) -> Finding:
    """Look for variables that connecting refuses."""
    unknown = sorted(
        name
        for name in probe.environment()
        if name.startswith("BASCULE_") and not name.startswith(("BASCULE_SERVICE_", "BASCULE_PORT"))
    )
    if not unknown:
        return Finding("environment", Level.OK, "no BASCULE_* variable that is not known")
    return Finding(
        "environment",
        Level.PROBLEM,
        f"{', '.join(unknown)} set",
        "connecting refuses variables that it does not know",
        f"unset {' '.join(unknown)}",
        {"unknown": unknown},
    )


def cores(probe: Probe, wanted: Wanted) -> Finding:
    """Count the cores that may be used all the time."""
    online, allowed = probe.cores()
    quota, by = _quota(probe)
    usable = allowed if quota is None else min(allowed, quota)
    found = f"{usable:g} usable: {online} online, {allowed} allowed"
    if quota is not None:
        found += f", a quota of {quota:g} by {by}"
    if wanted.threads:
        found += f"; {wanted.threads} copy threads wanted"
    values = {"online": online, "allowed": allowed, "quota": quota, "usable": usable}
    finding = Finding("cores", Level.OK, found, values=values)
    if wanted.threads > usable:
        finding.level = Level.PROBLEM
        finding.why = "copy threads would wait for each other, in the pause too"
        finding.remedy = "fewer `threads` in connect, or more cores for this container"
    elif usable < allowed:
        finding.level = Level.NOTE
        finding.why = (
            "programs that start a thread a core are stopped for the rest of each period: pauses"
        )
        finding.remedy = "set OMP_NUM_THREADS and `threads` by the quota, or raise it"
    elif allowed < online:
        finding.level = Level.NOTE
        finding.why = "this process is bound to some cores; copying shares them with what it runs"
        finding.remedy = "bind ranks to different cores (taskset, numactl, cpuset)"
    return finding


def _quota(probe: Probe) -> tuple[float | None, str]:
    """Return the cores that cgroups allow in time, and where it is said."""
    least, by = None, ""
    for folder, version in cgroups(probe, "cpu"):
        if version == 2:
            file = f"{folder}/cpu.max"
            words = (probe.text(file) or "").split()
            quota, period = (number_in(word) for word in [*words, "", ""][:2])
        else:
            file = f"{folder}/cpu.cfs_quota_us"
            quota, period = (
                number_in(probe.text(name)) for name in (file, f"{folder}/cpu.cfs_period_us")
            )
        if quota is None or quota < 0 or not period:
            continue
        if least is None or quota / period < least:
            least, by = quota / period, file
    return least, by


_IDENTITY = {
    "boot_id": "/proc/sys/kernel/random/boot_id",
    "network": "/proc/self/ns/net",
    "processes": "/proc/self/ns/pid",
    "user": "/proc/self/ns/user",
}


def identity_of(probe: Probe) -> dict[str, str]:
    """Return what tells a host, and its namespaces, from others.

    Parameters
    ----------
    probe
        The machine.
    """
    return {
        name: (probe.text(path) or "?").strip()
        if name == "boot_id"
        else (probe.link(path) or "?").partition("[")[2].rstrip("]") or "?"
        for name, path in _IDENTITY.items()
    }


def identity(probe: Probe, wanted: Wanted) -> Finding:
    """Tell what must be equal in two containers that share memory."""
    identity = identity_of(probe)
    found = f"boot id {identity['boot_id']}, namespaces: network {identity['network']}, "
    found += f"processes {identity['processes']}, user {identity['user']}"
    finding = Finding("identity", Level.OK, found, values=identity)
    if "?" in (identity["boot_id"], identity["network"]):
        finding.level = Level.NOTE
        finding.why = "whether two ranks are of one host is told by these"
        finding.remedy = "mount /proc"
    return finding


def compare_identities(
    here: Mapping[str, str], other: Mapping[str, str], wanted: Wanted
) -> Finding:
    """Tell whether ranks here and where another report was made can share memory.

    Parameters
    ----------
    here, other
        From `identity_of`.
    wanted
        Tells whether sockets have a directory.
    """
    finding = Finding("compared", Level.OK, "this and the other share a host and its sockets")
    if here["boot_id"] != other.get("boot_id"):
        finding.level = Level.PROBLEM
        finding.found = f"another boot id: {other.get('boot_id')}"
        finding.why = "the other is another host; this version moves weights on one host only"
        finding.remedy = "put trainers and rollouts on one host"
    elif here["network"] != other.get("network") and not wanted.socket_directory:
        finding.level = Level.PROBLEM
        finding.found = f"another network namespace: {other.get('network')}"
        finding.why = "abstract sockets do not cross it"
        finding.remedy = (
            "set Job.socket_directory to a volume that both mount, or share the network (docker: "
            "--network=host or container:NAME; Kubernetes: one pod, or hostNetwork)"
        )
    return finding


def start_method(probe: Probe, wanted: Wanted) -> Finding:
    """Tell how multiprocessing starts processes."""
    method = probe.start_method()
    finding = Finding("start method", Level.OK, method, values={"method": method})
    if method == "fork":
        finding.level = Level.NOTE
        finding.why = "in a child that is forked after its parent connected, calls raise Forked"
        finding.remedy = "multiprocessing.set_start_method('spawn'), or connect only in children"
    return finding


def clocks(probe: Probe, wanted: Wanted) -> Finding:
    """Check that the clocks make sense."""
    wall, step = probe.clocks()
    source = "/sys/devices/system/clocksource/clocksource0/current_clocksource"
    clock = (probe.text(source) or "unknown").strip()
    found = f"wall and steady clock agree to {shown_seconds(abs(step))}, clock source {clock}"
    finding = Finding("clocks", Level.OK, found, values={"wall": wall, "source": clock})
    if wall < _EARLIEST:
        finding.level = Level.PROBLEM
        finding.found = f"the wall clock says {wall:.0f} seconds after 1970"
        finding.why = "terms of trainer worlds are ordered by it: later lives may look older"
        finding.remedy = "set the clock of the host"
    elif abs(step) > _CLOCK_STEP:
        finding.level = Level.NOTE
        finding.why = "the wall clock is being set: times across processes, such as EWTT, are off"
        finding.remedy = "let chrony or ntpd slew the clock, not step it"
    return finding
