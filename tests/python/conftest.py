"""What the tests share: an independent reader of layouts, and jobs of real processes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from jobs.harness import Job, StartJob, Zygote

import bascule
from bascule.layout import DType

_NUMPY = {
    DType.F32: np.float32,
    DType.F64: np.float64,
    DType.F16: np.float16,
    DType.BF16: np.uint16,
    DType.I64: np.int64,
    DType.I32: np.int32,
}

ReadLayout = Callable[[bascule.Layout], dict[str, npt.NDArray[np.float64]]]


@pytest.fixture
def read_layout() -> ReadLayout:
    """Read the tensors of a layout out of its memory; NaN where the rank holds nothing.

    It also checks that no element of the memory is bound twice.
    """

    def read(layout: bascule.Layout) -> dict[str, npt.NDArray[np.float64]]:
        native = layout.native
        memories = [
            np.frombuffer((ctypes.c_ubyte * buffer.bytes).from_address(buffer.address), np.uint8)
            for buffer in native.buffers
        ]
        bound = [np.zeros(buffer.bytes, np.int64) for buffer in native.buffers]
        tensors = {t.name: np.full(t.shape, np.nan) for t in native.tensors}
        names = list(tensors)
        for binding in native.bindings:
            box = tuple(slice(begin, end) for begin, end in binding.box)
            shape = [end - begin for begin, end in binding.box]
            index = np.full(shape, binding.byte_offset)
            for dim, stride in enumerate(binding.byte_strides):
                index += (np.arange(shape[dim]) * stride).reshape(
                    [-1] + [1] * (len(shape) - dim - 1)
                )
            itemsize = binding.dtype.itemsize
            element_bytes = index[..., None] + np.arange(itemsize)
            np.add.at(bound[binding.buffer], element_bytes.ravel(), 1)
            raw = memories[binding.buffer][element_bytes]
            values = np.ascontiguousarray(raw).view(_NUMPY[binding.dtype]).reshape(shape)
            tensors[names[binding.tensor]][box] = values
        assert all(counts.max(initial=0) <= 1 for counts in bound)
        return tensors

    return read


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """Makes the processes of jobs."""
    made = Zygote()
    yield made
    made.close()


@pytest.fixture
def start(zygote: Zygote, tmp_path: Path) -> StartJob:
    """Make a job, see `jobs.harness.Job`, that ends with its ``with``."""

    def make(**options: Any) -> Job:
        return Job(zygote, tmp_path, **options)

    return make
