"""A small model whose every element tells its tensor, its place and its version."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

import bascule
from bascule.layout import Block, DType, LayoutBuilder, LogicalTensor, Mesh, at, shard

EXPERTS = 4
MARKER = "marker"

_NUMPY: dict[DType, type[np.generic]] = {
    DType.F32: np.uint32,
    DType.I32: np.uint32,
    DType.BF16: np.uint16,
    DType.U8: np.uint8,
}

Array = npt.NDArray[Any]


def tensors(bulk: int = 0) -> dict[str, tuple[tuple[int, ...], DType]]:
    """Return names, shapes and dtypes of the model.

    Parameters
    ----------
    bulk
        Mebibytes of one large tensor more.
    """
    found = {
        "model.embed.weight": ((37, 16), DType.BF16),
        "model.layers.0.q.weight": ((24, 16), DType.BF16),
        "model.layers.0.k.weight": ((8, 16), DType.BF16),
        "model.layers.0.norm.weight": ((16,), DType.F32),
        "model.mtp.bias": ((5,), DType.U8),
        MARKER: ((3,), DType.I32),
    }
    for expert in range(EXPERTS):
        found[f"model.layers.1.experts.{expert}.weight"] = ((6, 16), DType.BF16)
    if bulk:
        found["model.bulk.weight"] = ((bulk * 1024, 256), DType.I32)
    return found


def codes(tensor: str, element: npt.NDArray[np.int64], value: int, dtype: DType) -> Array:
    """Return what the elements of a tensor are in a version.

    Parameters
    ----------
    tensor
        Its name.
    element
        Row-major numbers in the whole tensor.
    value
        Which set of weights.
    dtype
        What the elements are; the carriers of their bits are returned.
    """
    if tensor == MARKER:
        return np.full(element.shape, value, np.uint32)
    key = sum((i + 1) * ord(letter) for i, letter in enumerate(tensor))
    mixed = element.astype(np.uint32) * np.uint32(0x9E3779B1) + np.uint32(
        (key * 0x85EBCA77 + value * 0xC2B2AE3D) & 0xFFFFFFFF
    )
    mixed ^= mixed >> np.uint32(15)
    if dtype is DType.BF16:
        # Its exponent is never all ones: no NaN, so that casts give every bit back.
        return (mixed & np.uint32(0xBFFF)).astype(np.uint16)
    if dtype is DType.U8:
        return (mixed & np.uint32(0xFF)).astype(np.uint8)
    if dtype is DType.F32:
        return mixed & np.uint32(0xBFFFFFFF)
    return mixed


@dataclass(frozen=True)
class _Place:
    """One binding: the memory of some elements, as the carriers of their bits."""

    tensor: str
    shape: tuple[int, ...]
    box: tuple[tuple[int, int], ...]
    memory: Array
    dtype: DType
    published: DType

    def elements(self) -> npt.NDArray[np.int64]:
        """Return the row-major number in the whole tensor of each element."""
        found = np.zeros([end - begin for begin, end in self.box], np.int64)
        scale = 1
        for dim in reversed(range(len(self.box))):
            column = [-1] + [1] * (len(self.box) - dim - 1)
            found += (np.arange(*self.box[dim]) * scale).reshape(column)
            scale *= self.shape[dim]
        return found


class Memory:
    """The weights of one rank, filled and checked through the bindings of its layout.

    Parameters
    ----------
    layout
        The rank's.
    arrays
        What it binds; kept alive.
    """

    def __init__(self, layout: bascule.Layout, arrays: Sequence[Any]) -> None:
        self.layout = layout
        self.arrays = list(arrays)
        native = layout.native
        buffers = [
            np.ctypeslib.as_array((ctypes.c_ubyte * b.bytes).from_address(b.address))
            for b in native.buffers
        ]
        self._places = []
        for binding in native.bindings:
            tensor = native.tensors[binding.tensor]
            extents = [end - begin for begin, end in binding.box]
            carrier = _NUMPY[binding.dtype]
            whole = buffers[binding.buffer][binding.byte_offset :]
            strides = tuple(binding.byte_strides)
            memory: Array = np.ndarray(extents, carrier, whole.data, 0, strides)
            self._places.append(
                _Place(
                    tensor.name,
                    tuple(tensor.shape),
                    tuple(binding.box),
                    memory,
                    binding.dtype,
                    tensor.dtype,
                )
            )

    def fill(self, value: int) -> None:
        """Write a version.

        Parameters
        ----------
        value
            Which.
        """
        for place in self._places:
            place.memory[...] = _stored(place, value)

    def wrong(self, value: int) -> dict[str, int]:
        """Return the tensors that are not those of a version, with how many elements are wrong.

        Parameters
        ----------
        value
            Which version.
        """
        found: dict[str, int] = {}
        for place in self._places:
            count = int(np.count_nonzero(place.memory != _stored(place, value)))
            if count:
                found[place.tensor] = found.get(place.tensor, 0) + count
        return found

    def holds(self) -> int:
        """Return the version that the whole memory is, or -1 where it is none or a mix."""
        marker = next(place.memory for place in self._places if place.tensor == MARKER)
        value = int(marker.flat[0])
        return -1 if self.wrong(value) else value

    def flip(self, tensor: str) -> None:
        """Damage one bit of a tensor, or mend it.

        Parameters
        ----------
        tensor
            Its name.
        """
        place = next(place for place in self._places if place.tensor == tensor)
        place.memory.flat[0] ^= 1

    def addresses(self) -> list[int]:
        """Return where the buffers lie."""
        return [buffer.address for buffer in self.layout.native.buffers]


def _stored(place: _Place, value: int) -> Array:
    """Return a version as this memory has it: masters in fp32 of bf16 tensors are wider."""
    published = codes(place.tensor, place.elements(), value, place.published)
    if place.dtype is DType.F32 and place.published is DType.BF16:
        return published.astype(np.uint32) << np.uint32(16)
    return published


def trainer_memory(
    rank: int,
    world: int,
    *,
    replicas: bool = False,
    experts: Mapping[str, int] | None = None,
    bulk: int = 0,
    shared: bool = False,
) -> Memory:
    """Make the weights of a trainer rank: bf16 tensors have masters in fp32, rows are cut.

    Parameters
    ----------
    rank, world
        Which of how many.
    replicas
        Every rank holds everything.
    experts
        The rank that holds each expert; none: cut as everything else.
    bulk
        See `tensors`.
    shared
        In shared memory of torch, for ``arena="direct"``.
    """
    make = _shared_zeros if shared else np.zeros
    builder = LayoutBuilder(Mesh(["dp"], [world]), [rank])
    arrays = []
    for name, (shape, dtype) in tensors(bulk).items():
        tensor = LogicalTensor(name, list(shape), dtype)
        cut: dict[str, Any] = {} if replicas else {"dp": shard(0)}
        number = name.split(".")[4] if ".experts." in name else None
        if experts is not None and number is not None:
            cut = {"dp": at(experts[number])}
        stored = DType.F32 if dtype is DType.BF16 else dtype
        arrays += _add(builder, Block.of(tensor, cut), name, stored, make)
    return Memory(builder.build(), arrays)


def engine_memory(
    rank: int, world: int, *, experts: Mapping[str, int] | None = None, bulk: int = 0
) -> Memory:
    """Make the weights of a rollout rank: fused, cut by columns or heads, experts stacked.

    Parameters
    ----------
    rank, world
        In the engine, and of it.
    experts
        The rank that holds each expert; none: dealt out in turn.
    bulk
        See `tensors`.
    """
    places = experts or {str(e): e % world for e in range(EXPERTS)}
    logical = {
        name: LogicalTensor(name, list(shape), dtype)
        for name, (shape, dtype) in tensors(bulk).items()
    }
    layer = "model.layers.0."
    qk = Block.concat(0, [Block.of(logical[f"{layer}{x}.weight"], {"tp": shard(0)}) for x in "qk"])
    # Where `at` leaves a part on other ranks it takes no room in the array.
    stack = Block.stack(
        [
            Block.of(logical[f"model.layers.1.experts.{e}.weight"], {"tp": at(places[str(e)])})
            for e in range(EXPERTS)
        ]
    )
    blocks = {
        "embed": (Block.of(logical["model.embed.weight"], {"tp": shard(1)}), DType.BF16),
        "qk": (qk, DType.BF16),
        "norm": (Block.of(logical[f"{layer}norm.weight"]), DType.F32),
        "mtp": (Block.of(logical["model.mtp.bias"]), DType.U8),
        "marker": (Block.of(logical[MARKER]), DType.I32),
        "experts": (stack, DType.BF16),
    }
    if bulk:
        blocks["bulk"] = (Block.of(logical["model.bulk.weight"], {"tp": shard(0)}), DType.I32)
    builder = LayoutBuilder(Mesh(["tp"], [world]), [rank])
    arrays = []
    for name, (block, dtype) in blocks.items():
        arrays += _add(builder, block, name, dtype)
    return Memory(builder.build(), arrays)


def _shared_zeros(shape: tuple[int, ...], carrier: Any) -> Any:
    import torch

    carriers = {np.uint32: torch.int32, np.uint16: torch.int16, np.uint8: torch.uint8}
    tensor: Any = torch.zeros(shape, dtype=carriers[carrier])
    return tensor.share_memory_()


def _add(
    builder: LayoutBuilder, block: Block, name: str, dtype: DType, make: Any = np.zeros
) -> list[Any]:
    shape = builder.local_shape(block)
    if shape is None or 0 in shape:
        builder.add(block, name=name)
        return []
    array = make(shape, _NUMPY[dtype])
    builder.add(block, array, name=name, dtype=dtype)
    return [array]
