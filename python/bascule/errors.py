"""What goes wrong, as exceptions: one class for each code of the core's ``Status``."""

# Named for their codes, which are no names of errors alone.
# ruff: noqa: N818

from __future__ import annotations

from typing import Any, ClassVar

__all__ = [
    "Aborted",
    "AlreadyExists",
    "Busy",
    "Closed",
    "DataLoss",
    "DeadlineExceeded",
    "Error",
    "Forked",
    "InDoubt",
    "Internal",
    "InvalidArgument",
    "NotDecided",
    "NotFound",
    "PermissionDenied",
    "Poisoned",
    "ResourceExhausted",
    "Retired",
    "StaleTerm",
    "Unavailable",
    "Unimplemented",
    "VersionMismatch",
]


class Error(Exception):
    """An error of bascule. Every other exception here derives from it.

    An argument of a wrong Python type is a ``TypeError``, as everywhere; one of the right type with
    a value that is not allowed is an `InvalidArgument`.

    Parameters
    ----------
    message
        What happened, to whom, and what to do about it.
    rank
        The global rank that the error speaks of.
    peer
        The other side, e.g. ``"trainer 3"`` or ``"engine e0 rank 1"``.
    tensor
        The logical tensor.

    Attributes
    ----------
    code : str
        The identifier of the code, e.g. ``"DATA_LOSS"``; one for each class.
    message : str
    rank : int or None
    peer : str or None
    tensor : str or None
    """

    code: ClassVar[str] = "INTERNAL"

    def __init__(
        self,
        message: str = "",
        *,
        rank: int | None = None,
        peer: str | None = None,
        tensor: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.rank = rank
        self.peer = peer
        self.tensor = tensor

    def __str__(self) -> str:
        fields = (("rank", self.rank), ("peer", self.peer), ("tensor", self.tensor))
        where = ", ".join(f"{name} {value}" for name, value in fields if value is not None)
        return self.message + (f" [{where}]" if where else "")

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.rank, self.peer, self.tensor)


class InvalidArgument(Error, ValueError):
    """The caller's input is wrong; the message says how."""

    code = "INVALID_ARGUMENT"


class NotFound(Error, LookupError):
    """A name that nobody knows."""

    code = "NOT_FOUND"


class AlreadyExists(Error):
    """Something of that name or number is there, e.g. a second live rank with one number."""

    code = "ALREADY_EXISTS"


class DeadlineExceeded(Error, TimeoutError):
    """The call's timeout passed; the state is as before the call."""

    code = "DEADLINE_EXCEEDED"


class Unavailable(Error, ConnectionError):
    """A peer or the coordinator cannot be reached; try again."""

    code = "UNAVAILABLE"


class StaleTerm(Error):
    """The trainer world restarted; reconnect."""

    code = "STALE_TERM"


class Retired(Error):
    """The version has no live holders any more; poll again."""

    code = "RETIRED"


class Aborted(Error):
    """The version or the update was aborted."""

    code = "ABORTED"


class NotDecided(Error):
    """The engine's update was recorded as aborted."""

    code = "NOT_DECIDED"


class InDoubt(Error):
    """The outcome of a decision cannot be learned yet; the rank is not servable until it is."""

    code = "IN_DOUBT"


class Poisoned(Error):
    """A commit failed half way; only a dense commit heals the rank."""

    code = "POISONED"


class Busy(Error):
    """Another call on this object is in progress."""

    code = "BUSY"


class DataLoss(Error):
    """Bytes failed a digest check."""

    code = "DATA_LOSS"


class ResourceExhausted(Error):
    """Out of memory, descriptors or shared memory."""

    code = "RESOURCE_EXHAUSTED"


class PermissionDenied(Error, PermissionError):
    """The job token does not match."""

    code = "PERMISSION_DENIED"


class VersionMismatch(Error):
    """Protocol or planner versions do not overlap."""

    code = "VERSION_MISMATCH"


class Forked(Error):
    """Forked from a process that had connected: neither its objects nor new ones work here.

    Start such processes with ``spawn``, or connect only in the children.
    """

    code = "FORKED"


class Closed(Error):
    """The object was closed."""

    code = "CLOSED"


class Unimplemented(Error, NotImplementedError):
    """Not built yet."""

    code = "UNIMPLEMENTED"


class Internal(Error):
    """A defect, or an error of code that bascule called."""

    code = "INTERNAL"


_CLASSES: dict[str, type[Error]] = {cls.code: cls for cls in Error.__subclasses__()}


def from_fields(code: str, message: str, rank: int, peer: str, tensor: str) -> Error:
    """Make the exception of a ``Status`` of the core.

    Parameters
    ----------
    code
        The identifier of the code.
    message, rank, peer, tensor
        The fields of the ``Status``; -1 or empty where it has none.
    """
    return _CLASSES.get(code, Internal)(
        message,
        rank=rank if rank >= 0 else None,
        peer=peer or None,
        tensor=tensor or None,
    )


def _rebuild(
    cls: type[Error], message: str, rank: int | None, peer: str | None, tensor: str | None
) -> Error:
    return cls(message, rank=rank, peer=peer, tensor=tensor)
