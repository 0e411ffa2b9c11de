"""A network between a process and its coordinator that can be cut, held up and counted."""

from __future__ import annotations

import contextlib
import socket
import threading
from types import TracebackType
from typing import Self

__all__ = ["Proxy"]

_CHUNK = 1 << 16


class Proxy:
    """Passes TCP connections on to an address. A context manager.

    Parameters
    ----------
    target
        ``"host:port"``.
    port
        Where it listens; 0: any.

    Attributes
    ----------
    address : str
        Where it listens.
    to_target, to_client : int
        Bytes that were passed on.
    """

    def __init__(self, target: str, port: int = 0) -> None:
        host, number = target.rsplit(":", 1)
        self._target = (host, int(number))
        self._listener = socket.create_server(("127.0.0.1", port))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.to_target = 0
        self.to_client = 0
        self._open = threading.Condition()
        self._requests_pass = True
        self._answers_pass = True
        self._hold_after: bytes | None = None
        self._sockets: set[socket.socket] = set()
        self._over = False
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(self._target, timeout=5)
            except OSError:
                client.close()
                continue
            server.settimeout(None)
            with self._open:
                self._sockets |= {client, server}
            threading.Thread(target=self._pump, args=(client, server, True), daemon=True).start()
            threading.Thread(target=self._pump, args=(server, client, False), daemon=True).start()

    def _passes(self, request: bool) -> bool:
        return self._over or (self._requests_pass if request else self._answers_pass)

    def _pump(self, source: socket.socket, sink: socket.socket, request: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(_CHUNK):
                with self._open:
                    self._open.wait_for(lambda: self._passes(request))
                    if request:
                        self.to_target += len(data)
                        if self._hold_after is not None and self._hold_after in data:
                            self._answers_pass = False
                            self._hold_after = None
                            self._open.notify_all()
                    else:
                        self.to_client += len(data)
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            with self._open:
                self._sockets.discard(end)
            end.close()

    def hold(self) -> None:
        """Let nothing pass from now on, as a network that loses every packet."""
        with self._open:
            self._requests_pass = self._answers_pass = False

    def hold_answers_after(self, text: str) -> None:
        """Let no answers pass once a request with this text has passed.

        Parameters
        ----------
        text
            E.g. the name of a method.
        """
        with self._open:
            self._hold_after = text.encode()

    @property
    def holds_answers(self) -> bool:
        """True once that has happened."""
        with self._open:
            return not self._answers_pass

    def let_pass(self) -> None:
        """Let all pass again, what was held first."""
        with self._open:
            self._requests_pass = self._answers_pass = True
            self._hold_after = None
            self._open.notify_all()

    def close(self) -> None:
        """Cut all connections and listen no more."""
        with self._open:
            self._over = True
            self._open.notify_all()
            sockets = list(self._sockets)
        self._listener.close()
        for end in sockets:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
