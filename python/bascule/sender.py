"""Trainer ranks: they publish versions of their weights."""

from __future__ import annotations

from types import TracebackType
from typing import Literal, Self

from bascule import _bascule, _lifetime
from bascule._bascule import PublicationState
from bascule._checks import U64_MAX, choice, whole
from bascule._logging import SessionLog
from bascule.job import Job
from bascule.layout import Layout
from bascule.report import Report, VersionId

__all__ = ["ArenaMode", "Publication", "PublicationState", "WeightSender"]

#: Where published weights lie while peers read them.
ArenaMode = Literal["auto", "device", "host", "direct"]


class Publication:
    """A published version as its source sees it. Made by `WeightSender.publish`.

    Calls after the sender was closed raise `bascule.Closed`.
    """

    def __init__(self, native: _bascule.Publication, sender: WeightSender) -> None:
        self._native = native
        self._sender = sender

    def __repr__(self) -> str:
        return f"Publication(term={self.id.term}, version={self.id.version})"

    @property
    def id(self) -> VersionId:
        """The term and version."""
        return VersionId(*self._native.id)

    def wait(self, *, timeout: float = 60.0) -> None:
        """Wait until the version is available to receivers.

        Parameters
        ----------
        timeout
            Seconds.

        Raises
        ------
        Aborted, Retired
            It will not become available; the message says why.
        DeadlineExceeded
            It is still open.
        """
        self._native.wait(timeout)
        self._sender._log.step("available", self)

    def state(self, *, timeout: float = 10.0) -> PublicationState:
        """Ask what became of the version.

        Parameters
        ----------
        timeout
            Seconds.
        """
        return self._native.state(timeout)

    def release(self, *, timeout: float = 1.0) -> None:
        """End serving this version, once readers have drained or the timeout passed.

        With ``arena="direct"`` the weights may change only after this returned or raised. Ctrl-C
        is therefore not seen before it ends.

        Parameters
        ----------
        timeout
            Seconds that readers get.
        """
        self._native.release(timeout)
        self._sender._log.step("released", self)

    def report(self) -> Report:
        """Return what this rank's part of the publication cost so far."""
        return Report._from_native(self._native.report())


class WeightSender:
    """One trainer rank. Use `connect`; a context manager that closes at its end.

    It may be used from any thread; calls that exclude each other raise `bascule.Busy`. Ctrl-C on
    the main thread raises ``KeyboardInterrupt`` at once from every call that waits, unless the
    call says otherwise; the call itself then goes on in the background until its timeout, and
    the memory of the layout stays alive until then.
    """

    def __init__(
        self, native: _bascule.WeightSender, layout: Layout, arena: ArenaMode, log: SessionLog
    ) -> None:
        self._native = native
        self._layout = layout
        self._arena = arena
        self._log = log
        _lifetime.register(self)

    @classmethod
    def connect(
        cls,
        job: Job,
        *,
        layout: Layout,
        rank: int = 0,
        world_size: int = 1,
        arena: ArenaMode = "auto",
        threads: int = 1,
        versions_held: int = 2,
        digest: bool = True,
        timeout: float = 60.0,
    ) -> Self:
        """Join the job and register this rank's layout.

        Returns once joined, not once all ranks have.

        Parameters
        ----------
        job
            The job; equal on all ranks but for ``coordinator``.
        layout
            Where this rank's weights lie. Its arrays stay alive as long as the sender.
        rank, world_size
            Of this trainer rank, and how many there are.
        arena
            Where published weights lie while peers read them: ``"direct"`` is the framework's own
            memory (see `Publication.release`), the others are snapshots.
        threads
            Copy threads of this rank.
        versions_held
            Snapshots kept; one or more.
        digest
            False only to measure its cost: nothing is proved then.
        timeout
            Seconds.
        """
        native = _bascule.WeightSender.connect(
            job=job._native(),
            rank=whole("rank", rank, 0),
            world_size=whole("world_size", world_size, 1),
            arena=choice("arena", arena, _bascule.ArenaMode),
            threads=whole("threads", threads, 1, 2**31 - 1),
            versions_held=whole("versions_held", versions_held, 1),
            digest=digest,
            layout=layout.native,
            owners=layout,
            timeout=timeout,
        )
        log = SessionLog(rank)
        log.step(f"connected to {native.coordinator}, one of {world_size}")
        return cls(native, layout, arena, log)

    def publish(self, version: int, *, timeout: float = 60.0) -> Publication:
        """Make a version of the live weights available.

        Waits for all ranks of the term to have joined, then takes a snapshot. The weights may
        change when it returns (with ``arena="direct"``: after `Publication.release`). After
        Ctrl-C they may not before the timeout has passed or the sender is closed.

        Parameters
        ----------
        version
            Greater than every earlier one of the term; 1 to 2**64 - 1.
        timeout
            Seconds.

        Raises
        ------
        StaleTerm
            The trainer world restarted; connect anew.
        InvalidArgument
            torch has freed, resized or moved the storage of a tensor; `update_layout` first.
        """
        self._layout.require_memory()
        whole("version", version, 1, U64_MAX)
        publication = Publication(self._native.publish(version, timeout), self)
        self._log.published(publication)
        return publication

    def update_layout(self, layout: Layout, *, timeout: float = 60.0) -> None:
        """Replace the layout, because parameters were rebound or experts moved.

        Parameters
        ----------
        layout
            The new layout. With ``arena="direct"`` the arrays of the old one stay alive as long
            as the sender, since versions that are held lie in them.
        timeout
            Seconds.

        Raises
        ------
        Busy
            A publish is in progress.
        """
        owners = (self._layout, layout) if self._arena == "direct" else layout
        self._native.update_layout(layout.native, owners, timeout)
        self._layout = layout
        self._log.step("replaced the layout")

    @property
    def term(self) -> int:
        """The life of the trainer world that this rank belongs to."""
        return self._native.term

    @property
    def coordinator(self) -> str:
        """The coordinator's ``host:port``, for the other ranks when it is hosted here."""
        return self._native.coordinator

    @property
    def layout(self) -> Layout:
        """The layout in use."""
        return self._layout

    def close(self, *, timeout: float = 1.0) -> None:
        """Leave the job. Calls in progress raise `bascule.Closed`.

        Parameters
        ----------
        timeout
            Seconds; no peer is waited for beyond them.
        """
        self._native.close(timeout)
        self._log.step("closed")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
