"""Rollout ranks: they stage versions and switch to them."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Literal, Self

from bascule import _bascule, _lifetime
from bascule._bascule import ReceiverState
from bascule._checks import U64_MAX, choice, whole
from bascule._logging import SessionLog
from bascule.errors import Error, Poisoned
from bascule.job import Job
from bascule.layout import Layout
from bascule.report import Report, VersionId

__all__ = ["ReceiverState", "ShadowMode", "Update", "WeightReceiver"]

#: Where staged bytes live until commit.
ShadowMode = Literal["auto", "device", "host", "none"]


class Update:
    """One update of one engine as a rank of it sees it.

    Made by `WeightReceiver.poll` or `WeightReceiver.open`. Its steps may be called apart, by the
    framework's own RPC, on every rank with the same explicit version.
    """

    def __init__(self, native: _bascule.Update, receiver: WeightReceiver) -> None:
        self._native = native
        self._receiver = receiver
        self._log = receiver._log

    def __repr__(self) -> str:
        return f"Update(term={self.id.term}, version={self.id.version})"

    @property
    def id(self) -> VersionId:
        """The term and version."""
        return VersionId(*self._native.id)

    def stage(self, *, timeout: float = 600.0) -> None:
        """Start to land the version away from the live weights, in the background.

        Returns at once.

        Parameters
        ----------
        timeout
            Seconds until landing fails; the rank is then idle again and nothing changed.

        Raises
        ------
        InvalidArgument
            torch has freed, resized or moved the storage of a tensor of the layout;
            `WeightReceiver.update_layout` first.
        """
        self._receiver.layout.require_memory()
        self._native.stage(timeout)
        self._log.step("staging", self)

    def wait_staged(self, *, timeout: float = 600.0) -> None:
        """Wait until this rank's staging ended; raise why it failed.

        Parameters
        ----------
        timeout
            Seconds.
        """
        self._native.wait_staged(timeout)
        self._log.step("staged", self)

    def ready(self, *, timeout: float = 30.0) -> bool:
        """Ask whether every rank of the engine has staged the version.

        For ranks that step together, with as many calls on each: the k-th call of an update gives
        one answer on every rank, so that all may branch on it. A rank that is early waits. Ranks
        that do not step together leave it out and call `commit` after `wait_staged`.

        Parameters
        ----------
        timeout
            Seconds.
        """
        ready = self._native.ready(timeout)
        self._log.step("ready" if ready else "not ready", self)
        return ready

    def decide(self, *, timeout: float = 30.0) -> None:
        """Record or learn the engine's decision: returns when it is to commit.

        Parameters
        ----------
        timeout
            Seconds; rank 0 records an abort when they pass first.

        Raises
        ------
        NotDecided
            An abort was recorded.
        InDoubt
            Neither can be learned; the rank is not servable until it is.
        """
        self._native.decide(timeout)
        self._log.step("decided", self)

    def commit(self, *, timeout: float = 30.0) -> None:
        """Decide, unless decided, and switch this rank's live weights to the version.

        The engine must be paused. The decision waits until every rank of the engine has staged the
        version, so `ready` need not have been asked. Ctrl-C is seen at once while the decision is
        awaited, and not before the end of the switch itself.

        Parameters
        ----------
        timeout
            Seconds for each of the two.

        Raises
        ------
        NotDecided, InDoubt
            See `decide`.
        Poisoned
            The switch failed half way, or the post-commit hook raised (then its exception is the
            cause); only a dense commit heals the rank.
        InvalidArgument
            As for `stage`; nothing was decided or written.
        """
        self._receiver.layout.require_memory()
        self.decide(timeout=timeout)
        try:
            self._native.commit(timeout)
        except Poisoned as error:
            cause = self._receiver._native.take_hook_error()
            if cause is None:
                raise
            raise error from cause
        self._log.committed(self)

    def abort(self, *, timeout: float = 30.0) -> None:
        """Give the update up before it is decided.

        Parameters
        ----------
        timeout
            Seconds.
        """
        self._native.abort(timeout)
        self._log.step("given up", self)

    def report(self) -> Report:
        """Return what this rank's part of the update cost so far."""
        return Report._from_native(self._native.report())


class WeightReceiver:
    """One rollout rank. Use `connect`; a context manager that closes at its end.

    Threads and Ctrl-C are as for `bascule.WeightSender`.
    """

    def __init__(self, native: _bascule.WeightReceiver, layout: Layout, log: SessionLog) -> None:
        self._native = native
        self._layout = layout
        self._log = log
        _lifetime.register(self)

    @classmethod
    def connect(
        cls,
        job: Job,
        *,
        engine: str,
        layout: Layout,
        rank: int = 0,
        world_size: int = 1,
        shadow: ShadowMode = "auto",
        threads: int = 1,
        digest: bool = True,
        timeout: float = 60.0,
    ) -> Self:
        """Join the job and register this rank's layout.

        Parameters
        ----------
        job
            The job.
        engine
            Ranks of one engine switch together.
        layout
            Where this rank's weights lie. Its arrays stay alive as long as the receiver.
        rank, world_size
            In the engine, and of the engine.
        shadow
            Where staged bytes live until commit; ``"none"`` lands in place, inside the pause, and
            cannot roll back.
        threads
            Copy threads of this rank.
        digest
            False only to measure its cost: nothing is proved then.
        timeout
            Seconds.

        Raises
        ------
        InvalidArgument
            An array of the layout is read-only, or the layout does not fill its buffers.
        """
        layout.require_writable()
        native = _bascule.WeightReceiver.connect(
            job=job._native(),
            engine=engine,
            rank=whole("rank", rank, 0),
            world_size=whole("world_size", world_size, 1),
            shadow=choice("shadow", shadow, _bascule.ShadowMode),
            threads=whole("threads", threads, 1, 2**31 - 1),
            digest=digest,
            layout=layout.native,
            owners=layout,
            timeout=timeout,
        )
        log = SessionLog(rank, engine)
        log.step(f"connected to {job.coordinator}, one of {world_size}")
        return cls(native, layout, log)

    def poll(self, *, timeout: float = 30.0) -> Update | None:
        """Return the newest available version that some rank of the engine does not serve.

        Rank 0 asks; the k-th call on each rank gives one answer, so that ranks which step together
        may branch on it. A rank that is early waits; one that fell behind passes over offers that
        were given up. It does not wait for a version to be published.

        Parameters
        ----------
        timeout
            Seconds.

        Returns
        -------
        Update or None
            None when there is nothing newer.
        """
        native = self._native.poll(timeout)
        if native is None:
            self._log.step("polled: nothing newer")
            return None
        update = Update(native, self)
        self._log.step("polled", update)
        return update

    def open(self, term: int, version: int) -> Update:
        """Return the update to an explicit version, where the framework's RPC tells all ranks.

        Parameters
        ----------
        term, version
            Of `Update.id` or `Publication.id`.
        """
        whole("term", term, 1, U64_MAX)
        whole("version", version, 1, U64_MAX)
        return Update(self._native.open(term, version), self)

    @property
    def state(self) -> ReceiverState:
        """Where this rank is in an update."""
        return self._native.state

    @property
    def serving(self) -> VersionId | None:
        """What the live weights are; None before the first commit and when poisoned."""
        pair = self._native.serving
        return None if pair is None else VersionId(*pair)

    @property
    def servable(self) -> bool:
        """True when this rank may generate: it serves a version whole."""
        try:
            self._native.check_servable()
        except Error:
            return False
        return True

    def check_servable(self) -> None:
        """Raise why this rank may not generate, if it may not."""
        self._native.check_servable()

    def engine_servable(self, *, timeout: float = 10.0) -> bool:
        """Ask the engine's ranks: True when all of them serve one version.

        Parameters
        ----------
        timeout
            Seconds.
        """
        try:
            self._native.check_engine_servable(timeout)
        except Error:
            return False
        return True

    def check_engine_servable(self, *, timeout: float = 10.0) -> None:
        """Raise why the engine may not generate, if it may not.

        Parameters
        ----------
        timeout
            Seconds.
        """
        self._native.check_engine_servable(timeout)

    def set_post_commit_hook(self, hook: Callable[[VersionId], object] | None) -> None:
        """Set what runs after each commit, on the committing thread, before `commit` returns.

        Parameters
        ----------
        hook
            Takes the version; its result is ignored. An exception makes the rank poisoned and is
            the cause of the `bascule.Poisoned` that `Update.commit` raises. None removes it.
        """
        if hook is None:
            self._native.set_post_commit_hook(None)
        else:
            call = hook
            self._native.set_post_commit_hook(lambda pair: call(VersionId(*pair)))

    def audit(self, *, timeout: float = 600.0) -> None:
        """Read the live storages and compare them with what was committed.

        Parameters
        ----------
        timeout
            Seconds.

        Raises
        ------
        DataLoss
            They differ; ``tensor`` names where.
        """
        self._layout.require_memory()
        self._native.audit(timeout)
        self._log.step("audited")

    def update_layout(self, layout: Layout, *, timeout: float = 60.0) -> None:
        """Replace the layout on a live rank. Aborts this engine's undecided update.

        Parameters
        ----------
        layout
            The new layout.
        timeout
            Seconds.

        Raises
        ------
        Busy
            An update is decided or being committed.
        """
        layout.require_writable()
        self._native.update_layout(layout.native, layout, timeout)
        self._layout = layout
        self._log.step("replaced the layout")

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
