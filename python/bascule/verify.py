"""Compare what live ranks hold: with each other, or with a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Self

import numpy as np

from bascule import _bascule
from bascule.job import Job
from bascule.layout import DType
from bascule.report import VersionId

__all__ = ["Comparison", "Progress", "compare_ranks", "compare_with_checkpoint"]

#: Bytes compared so far (``done``) and in all (``total``); may be read by any thread.
Progress = _bascule.Progress


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What was compared, and what differs.

    Parameters
    ----------
    version
        Of the weights that were compared.
    tensors, elements, bytes
        Compared, in whole or in part.
    different
        Names of tensors with other values.
    only_left, only_right
        Names that the other side has nothing of.
    unreadable
        Names that cannot be compared: a landing function changed them, or the dtypes do not meet.
    """

    version: VersionId
    tensors: int
    elements: int
    bytes: int
    different: list[str]
    only_left: list[str]
    only_right: list[str]
    unreadable: list[str]

    @property
    def equal(self) -> bool:
        """Something was compared, and nothing of it differs."""
        return self.elements > 0 and not self.different

    @classmethod
    def _of(cls, native: _bascule.Comparison) -> Self:
        return cls(
            version=VersionId(native.term, native.version),
            tensors=native.tensors,
            elements=native.elements,
            bytes=native.bytes,
            different=list(native.different),
            only_left=list(native.only_left),
            only_right=list(native.only_right),
            unreadable=list(native.unreadable),
        )


def compare_ranks(
    job: Job,
    left: str,
    right: str,
    *,
    dtype: DType | None = None,
    progress: Progress | None = None,
    timeout: float = 600.0,
) -> Comparison:
    """Compare the boxes that two live ranks both hold of one version.

    The caller is no member of the job, and must be on the host of both ranks. Each rank sums its
    own memory; the sums are compared.

    Parameters
    ----------
    job
        ``coordinator``, ``token`` and ``socket_directory`` are used.
    left, right
        ``"trainer:3"`` or ``"e0:1"`` (rank 1 of engine e0).
    dtype
        Compare values rounded to it; else the dtype that crosses, the narrower one.
    progress
        Is told how far it is.
    timeout
        Seconds.
    """
    return Comparison._of(
        _bascule.compare_ranks(job._native(), left, right, dtype, progress, timeout)
    )


def compare_with_checkpoint(
    job: Job,
    left: str,
    files: Sequence[str | PathLike[str]],
    *,
    dtype: DType | None = None,
    progress: Progress | None = None,
    timeout: float = 600.0,
) -> Comparison:
    """Compare what a live rank serves or holds with safetensors files.

    Parameters
    ----------
    job, left, dtype, progress, timeout
        As in `compare_ranks`.
    files
        The checkpoint's files; they are mapped, not read at once.
    """
    maps = [np.memmap(path, np.uint8, "r") for path in files]
    described = [
        (str(path), int(memory.ctypes.data), int(memory.size))
        for path, memory in zip(files, maps, strict=True)
    ]
    return Comparison._of(
        _bascule.compare_with_files(job._native(), left, described, maps, dtype, progress, timeout)
    )
