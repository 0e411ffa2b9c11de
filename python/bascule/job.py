"""Who meets whom: the options that all ranks of a job share."""

from __future__ import annotations

from dataclasses import dataclass, field

from bascule import _bascule

__all__ = ["HOST_HERE", "Job"]

#: ``Job.coordinator``: this process hosts the coordinator (at ``Job.listen``).
HOST_HERE = "here"


@dataclass(frozen=True, kw_only=True)
class Job:
    """Options that name a job and its coordinator.

    Parameters
    ----------
    name
        Of the job; ranks of another job are refused.
    coordinator
        ``"host:port"``, or ``bascule.HOST_HERE`` on the one rank that hosts it.
    token
        Shared secret of the job; may be empty only on one host.
    listen
        ``"host:port"`` for a coordinator hosted here and for the engine channel, IPv6 in brackets;
        port 0 takes any. Beyond loopback it needs a token.
    heartbeat
        Seconds between heartbeats; a rank that is silent for six of them is gone.
    socket_directory
        Where the sockets of shared memory lie; empty for abstract names. What a killed process left
        there is removed by the next one that connects.
    """

    name: str
    coordinator: str = HOST_HERE
    token: str = field(default="", repr=False)
    listen: str = "127.0.0.1:0"
    heartbeat: float = 0.5
    socket_directory: str = ""

    def _native(self) -> _bascule.JobOptions:
        return _bascule.JobOptions(
            name=self.name,
            coordinator=self.coordinator,
            token=self.token,
            listen=self.listen,
            heartbeat=self.heartbeat,
            socket_directory=self.socket_directory,
        )
