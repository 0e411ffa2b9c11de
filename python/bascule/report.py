"""What an update cost and how it went."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple

__all__ = ["LinkReport", "Phases", "Report", "VersionId"]


class VersionId(NamedTuple):
    """Identifies a published set of weights; a later one is greater.

    Attributes
    ----------
    term : int
        One life of the trainer world.
    version : int
        Strictly increasing within the term.
    """

    term: int
    version: int


@dataclass(frozen=True)
class Phases:
    """Times of one update on one rank, in seconds; 0 where it did not happen.

    Attributes
    ----------
    publish
        The snapshot.
    stage
        Landing.
    verify
        Checks outside of the landing pass.
    decide
        From the call to the recorded decision.
    commit
        The switch.
    audit
        Comparing live storages with the trainers' layouts.
    stall
        The time in which this rank could neither train nor generate.
    """

    publish: float = 0.0
    stage: float = 0.0
    verify: float = 0.0
    decide: float = 0.0
    commit: float = 0.0
    audit: float = 0.0
    stall: float = 0.0

    def as_dict(self) -> dict[str, float]:
        """Return the fields as a dictionary for JSON."""
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class LinkReport:
    """Bytes that one peer sent.

    Attributes
    ----------
    peer
        E.g. ``"trainer 3"``.
    transport
        E.g. ``"shm"``.
    reason
        Why no better transport was used; empty when it is the best.
    bytes
        As they crossed, in wire dtypes.
    """

    peer: str
    transport: str
    reason: str
    bytes: int

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as a dictionary for JSON."""
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class Report:
    """One update on one rank.

    Attributes
    ----------
    id
        The version.
    phases
        Times.
    bytes
        Moved by this rank, in wire dtypes.
    publish_start_ns, commit_end_ns
        Wall clock, in nanoseconds since 1970, of the earliest publish and of this rank's commit
        end; 0 where it did not happen.
    ewtt
        End-to-end weight transfer time in seconds: commit end less the earliest publish start.
    bound
        Lower bound of ``ewtt`` in seconds; None where rates are unknown.
    links
        Bytes by peer.
    audited
        True when the whole rank was audited against the trainers' layouts.
    peak_extra_bytes
        The most memory used beyond the framework's own.
    control_messages
        Requests that this rank sent for the update to the coordinator and to ranks of its engine;
        heartbeats apart.
    peer_messages
        Requests that this rank sent to trainers for the update.
    """

    id: VersionId
    phases: Phases
    bytes: int
    publish_start_ns: int
    commit_end_ns: int
    ewtt: float
    bound: float | None
    links: tuple[LinkReport, ...]
    audited: bool
    peak_extra_bytes: int
    control_messages: int
    peer_messages: int

    def as_dict(self) -> dict[str, Any]:
        """Return all fields, nested ones too, as dictionaries and lists for JSON."""
        fields = dataclasses.asdict(self)
        fields["id"] = self.id._asdict()
        fields["links"] = list(fields["links"])
        return fields

    @classmethod
    def _from_native(cls, fields: dict[str, Any]) -> Report:
        phases = {name: nanoseconds / 1e9 for name, nanoseconds in fields["phases"].items()}
        return cls(
            id=VersionId(*fields["id"]),
            phases=Phases(**phases),
            bytes=fields["bytes"],
            publish_start_ns=fields["publish_start_ns"],
            commit_end_ns=fields["commit_end_ns"],
            ewtt=fields["ewtt_ns"] / 1e9,
            bound=fields["bound_ns"] / 1e9 if fields["bound_ns"] else None,
            links=tuple(LinkReport(**link) for link in fields["links"]),
            audited=fields["audited"],
            peak_extra_bytes=fields["peak_extra_bytes"],
            control_messages=fields["control_messages"],
            peer_messages=fields["peer_messages"],
        )
