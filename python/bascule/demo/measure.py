"""The least time in which this machine can do an update: memory bandwidth, measured."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

__all__ = ["MemcpyRate", "measure_memcpy", "update_bound"]

_BYTES = 64 << 20
_ROUNDS = 4


@dataclass(frozen=True)
class MemcpyRate:
    """How fast plain copies are.

    Attributes
    ----------
    bytes_per_second : float
        Bytes copied, each of which is read and written.
    threads : int
    cores : int
    """

    bytes_per_second: float
    threads: int
    cores: int


def measure_memcpy() -> MemcpyRate:
    """Copy large arrays, with as many threads as there are cores, up to four."""
    cores = len(os.sched_getaffinity(0))
    threads = min(cores, 4)
    pairs = [(np.zeros(_BYTES, np.uint8), np.ones(_BYTES, np.uint8)) for _ in range(threads)]

    def copy(pair: tuple[np.ndarray, np.ndarray]) -> None:  # numpy lets go of the GIL
        for _ in range(_ROUNDS):
            np.copyto(*pair)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(copy, pairs))  # touches the pages
        start = time.monotonic()
        list(pool.map(copy, pairs))
        seconds = time.monotonic() - start
    return MemcpyRate(threads * _ROUNDS * _BYTES / seconds, threads, cores)


def update_bound(rate: MemcpyRate, source: int, wire: int, live: Sequence[int]) -> float:
    """Return the least seconds from publish to commit.

    Parameters
    ----------
    rate
        By `measure_memcpy`.
    source
        Bytes of the trainers' masters.
    wire
        Bytes of the same as published.
    live
        Bytes of each engine's live weights.
    """
    snapshot = source + wire  # read the masters, write the snapshot
    stage = sum(wire + engine for engine in live)  # read the snapshot, write beside the live ones
    switch = sum(2 * engine for engine in live)
    return (snapshot + stage + switch) / 2 / rate.bytes_per_second
