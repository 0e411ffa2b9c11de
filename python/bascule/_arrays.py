"""Arrays of numpy, torch and others as memory: address, shape, strides, type and owner."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from bascule._bascule import DType, MemoryKind
from bascule.errors import InvalidArgument

__all__ = [
    "ArrayView",
    "Storages",
    "as_dtype",
    "dtype_of",
    "gaps",
    "refuse_pending_bits",
    "view_of",
]

_NAMES: dict[str, DType] = {
    **{dtype.name: dtype for dtype in DType},
    "FLOAT32": DType.F32,
    "FLOAT": DType.F32,
    "FP32": DType.F32,
    "BFLOAT16": DType.BF16,
    "FLOAT16": DType.F16,
    "HALF": DType.F16,
    "FP16": DType.F16,
    "FLOAT64": DType.F64,
    "DOUBLE": DType.F64,
    "FLOAT8_E4M3FN": DType.F8_E4M3,
    "FLOAT8_E5M2": DType.F8_E5M2,
    "INT64": DType.I64,
    "INT32": DType.I32,
    "INT16": DType.I16,
    "INT8": DType.I8,
    "UINT8": DType.U8,
    # No types of their own in the core: carriers of bits, for ``dtype=``.
    "UINT16": DType.I16,
    "UINT32": DType.I32,
}

FLOATING = frozenset({DType.F64, DType.F32, DType.BF16, DType.F16, DType.F8_E4M3, DType.F8_E5M2})


def as_dtype(dtype: Any) -> DType:
    """Return the `DType` of a name, a torch dtype or a numpy dtype.

    Parameters
    ----------
    dtype
        E.g. ``"bf16"``, ``"BF16"``, ``"bfloat16"``, ``torch.bfloat16``, ``np.float32``.
    """
    if isinstance(dtype, DType):
        return dtype
    if isinstance(dtype, (np.dtype, type)):
        name = np.dtype(dtype).name
    else:
        name = str(dtype).removeprefix("torch.")
    found = _NAMES.get(name.upper())
    if found is None:
        raise InvalidArgument(f"no element type is named {dtype!r}; e.g. 'bf16', 'float32'")
    return found


def dtype_of(name: str, dtype: Any) -> DType:
    """Return `as_dtype`, with the tensor's name in the error.

    Parameters
    ----------
    name
        Of the tensor.
    dtype
        As for `as_dtype`.
    """
    try:
        return as_dtype(dtype)
    except InvalidArgument as error:
        raise InvalidArgument(error.message, tensor=name) from None


@dataclass(frozen=True)
class ArrayView:
    """Where the elements of an array lie.

    Attributes
    ----------
    address
        Of the first element.
    byte_strides
        One for each dimension, none negative.
    owner
        The object that keeps the memory alive.
    storage
        torch's, which can be freed and moved under a tensor that is alive; None for others.
    """

    address: int
    shape: tuple[int, ...]
    byte_strides: tuple[int, ...]
    dtype: DType
    owner: object
    readonly: bool = False
    kind: MemoryKind = MemoryKind.HOST
    device: int = -1
    fd: int = -1
    fd_offset: int = 0
    storage: Any = None

    @property
    def size(self) -> int:
        """Number of elements."""
        size = 1
        for extent in self.shape:
            size *= extent
        return size

    @property
    def span(self) -> int:
        """Bytes from the first byte to the end of the last element."""
        if self.size == 0:
            return 0
        steps = zip(self.shape, self.byte_strides, strict=True)
        return sum((n - 1) * stride for n, stride in steps) + self.dtype.itemsize

    @property
    def dense(self) -> bool:
        """True when the elements lie one after another, row-major."""
        return self.byte_strides == dense_strides(self.shape, self.dtype.itemsize)


def dense_strides(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Return the byte strides of a row-major array; those of extents of 1 count as well."""
    strides = []
    stride = itemsize
    for extent in reversed(shape):
        strides.append(stride)
        stride *= max(extent, 1)
    return tuple(reversed(strides))


def view_of(name: str, array: Any, dtype: Any = None) -> ArrayView:
    """Return the memory of an array.

    Parameters
    ----------
    name
        For messages.
    array
        A numpy array, a torch tensor, or an object with ``__cuda_array_interface__``,
        ``__array_interface__`` or ``__dlpack__``.
    dtype
        What its elements are, where its own type only has their size: bf16 in ``np.uint16``.
    """
    view = _own_view_of(name, array)
    if dtype is None:
        return view
    element = dtype_of(name, dtype)
    if element.itemsize != view.dtype.itemsize:
        raise InvalidArgument(
            f"elements of {view.dtype.name} are no {element.name}: sizes differ", tensor=name
        )
    return dataclasses.replace(view, dtype=element)


def _own_view_of(name: str, array: Any) -> ArrayView:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        return _view_of_torch(name, array, torch)
    if hasattr(array, "__cuda_array_interface__"):
        return _view_of_interface(name, array, array.__cuda_array_interface__, MemoryKind.DEVICE)
    if isinstance(array, np.ndarray):
        return _view_of_numpy(name, array, array)
    if hasattr(array, "__array_interface__"):
        return _view_of_interface(name, array, array.__array_interface__, MemoryKind.HOST)
    if hasattr(array, "__dlpack__"):
        return _view_of_numpy(name, np.from_dlpack(array), array)
    raise InvalidArgument(
        f"{type(array).__name__} is no array: give a numpy array, a torch tensor, or an object "
        "with __array_interface__ or __dlpack__",
        tensor=name,
    )


def _checked(name: str, view: ArrayView) -> ArrayView:
    if any(
        stride < 0 or (stride == 0 and extent > 1 and view.size > 0)
        for stride, extent in zip(view.byte_strides, view.shape, strict=True)
    ):
        raise InvalidArgument(
            "a view with negative or zero strides (flipped or expanded) has no memory of its own "
            "for each element; give a copy",
            tensor=name,
        )
    return view


def _view_of_numpy(name: str, array: npt.NDArray[Any], owner: object) -> ArrayView:
    dtype = array.dtype
    if dtype.byteorder == (">" if sys.byteorder == "little" else "<"):
        raise InvalidArgument(f"{dtype!r} is not in this machine's byte order", tensor=name)
    element = dtype_of(name, dtype)
    return _checked(
        name,
        ArrayView(
            address=array.ctypes.data,
            shape=array.shape,
            byte_strides=array.strides,
            dtype=element,
            owner=(array, owner),
            readonly=not array.flags.writeable,
        ),
    )


def _view_of_interface(
    name: str, array: Any, interface: dict[str, Any], kind: MemoryKind
) -> ArrayView:
    shape = tuple(interface["shape"])
    element = dtype_of(name, getattr(array, "dtype", interface["typestr"]))
    address, readonly = interface["data"]
    device = int(getattr(getattr(array, "device", None), "id", 0))
    return _checked(
        name,
        ArrayView(
            address=address,
            shape=shape,
            byte_strides=tuple(interface.get("strides") or dense_strides(shape, element.itemsize)),
            dtype=element,
            owner=array,
            readonly=bool(readonly),
            kind=kind,
            device=device if kind is MemoryKind.DEVICE else -1,
        ),
    )


def _view_of_torch(name: str, tensor: Any, torch: Any) -> ArrayView:
    if hasattr(tensor, "to_local"):
        raise InvalidArgument(
            "a DTensor needs its mesh: use bascule.integrations.torch.layout_of", tensor=name
        )
    if tensor.layout is not torch.strided or tensor.device.type not in ("cpu", "cuda"):
        raise InvalidArgument(
            f"a {tensor.layout} tensor on {tensor.device.type!r} has no memory that can be read; "
            "give a dense one on the CPU or a CUDA device",
            tensor=name,
        )
    if tensor.numel() > 0 and tensor.data_ptr() == 0:
        raise InvalidArgument(
            f"a {type(tensor).__name__} has no storage of its own; give what it wraps", tensor=name
        )
    refuse_pending_bits(name, tensor)
    # A parameter can be rebound to other storage; its detached twin cannot.
    owner = tensor.detach()
    element = dtype_of(name, tensor.dtype)
    kind, device, fd, fd_offset = MemoryKind.HOST, -1, -1, 0
    if tensor.device.type == "cuda":
        kind, device = MemoryKind.DEVICE, tensor.get_device()
    else:
        fd = _shared_fd(owner, torch)
        if fd >= 0:
            kind = MemoryKind.SHARED
            fd_offset = owner.data_ptr() - owner.untyped_storage().data_ptr()
    return _checked(
        name,
        ArrayView(
            address=tensor.data_ptr(),
            shape=tuple(tensor.shape),
            byte_strides=tuple(stride * element.itemsize for stride in tensor.stride()),
            dtype=element,
            owner=owner,
            kind=kind,
            device=device,
            fd=fd,
            fd_offset=fd_offset,
            storage=owner.untyped_storage(),
        ),
    )


class Storages:
    """Where torch's storages were when a layout was made.

    Parameters
    ----------
    views
        Of the layout, by the names of their arrays.
    """

    def __init__(self, views: Iterable[tuple[str, ArrayView]] = ()) -> None:
        known: dict[int, tuple[str, Any, int, int]] = {}
        for name, view in views:
            storage = view.storage
            if storage is not None and view.size > 0:
                known[storage._cdata] = (name, storage, storage.data_ptr(), storage.nbytes())
        self._known = list(known.values())

    def check(self) -> None:
        """Raise if one is not there any more: memory that it gave back must not be touched."""
        for name, storage, address, size in self._known:
            if storage.data_ptr() != address or storage.nbytes() != size:
                raise InvalidArgument(
                    f"torch has freed, resized or moved the storage of this tensor: it was {size} "
                    f"bytes when the layout was made and is {storage.nbytes()} now, or lies "
                    "elsewhere; call update_layout with a new layout",
                    tensor=name,
                )


def refuse_pending_bits(name: str, tensor: Any) -> None:
    """Raise if a torch tensor's values are not those in its memory.

    torch negates and conjugates some views lazily, by a bit beside the memory.

    Parameters
    ----------
    name
        Of the tensor.
    tensor
        Of torch.
    """
    for pending, what, remedy in (
        (tensor.is_neg(), "negated", "resolve_neg"),
        (tensor.is_conj(), "conjugated", "resolve_conj"),
    ):
        if pending:
            raise InvalidArgument(
                f"the tensor is a view that torch has {what} without touching its memory; give "
                f"`tensor.{remedy}()`, a copy",
                tensor=name,
            )


def _shared_fd(tensor: Any, torch: Any) -> int:
    """Return the descriptor of a shared CPU storage, which stays the storage's; -1 if none."""
    storage = tensor.untyped_storage()
    if storage.nbytes() == 0 or not storage.is_shared():
        return -1
    # Storages shared by file name have no descriptor, and asking would move them.
    if torch.multiprocessing.get_sharing_strategy() != "file_descriptor":
        return -1
    fd, _ = storage._share_fd_cpu_()
    return int(fd)


def gaps(views: Sequence[ArrayView], begin: int, end: int) -> list[tuple[int, int, int, int]]:
    """Return the bytes of ``[begin, end)`` that no view covers, as (offset, bytes, count, stride).

    Parameters
    ----------
    views
        Whose elements do not overlap.
    begin, end
        Addresses; the offsets count from ``begin``.
    """
    if sum(view.size * view.dtype.itemsize for view in views) == end - begin:
        return []
    starts_of, sizes_of = [], []
    for view in views:
        starts, size = _runs(view)
        starts_of.append(starts)
        sizes_of.append(np.full(len(starts), size, np.int64))
    starts = np.concatenate(starts_of)
    order = np.argsort(starts)
    starts = starts[order]
    ends = starts + np.concatenate(sizes_of)[order]
    gap_begin = np.concatenate(([begin], ends))
    gap_bytes = np.concatenate((starts, [end])) - gap_begin
    empty = gap_bytes > 0
    return _series(gap_begin[empty] - begin, gap_bytes[empty])


def _runs(view: ArrayView) -> tuple[npt.NDArray[np.int64], int]:
    """Return the addresses of a view's contiguous runs and the bytes of each."""
    size = view.dtype.itemsize
    starts = np.array([view.address], np.int64)
    dims = sorted(
        (stride, extent)
        for stride, extent in zip(view.byte_strides, view.shape, strict=True)
        if extent != 1
    )
    for stride, extent in dims:
        if len(starts) == 1 and stride == size:
            size *= extent
        else:
            steps = np.arange(extent, dtype=np.int64) * stride
            starts = (starts[:, None] + steps[None, :]).ravel()
    return starts, size


def _series(
    offsets: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]
) -> list[tuple[int, int, int, int]]:
    """Group runs of one size at equal distances."""
    series: list[tuple[int, int, int, int]] = []
    i = 0
    while i < len(offsets):
        count = 1
        stride = int(offsets[i + 1] - offsets[i]) if i + 1 < len(offsets) else 0
        while (
            i + count < len(offsets)
            and sizes[i + count] == sizes[i]
            and offsets[i + count] - offsets[i + count - 1] == stride
        ):
            count += 1
        series.append((int(offsets[i]), int(sizes[i]), count, stride if count > 1 else 0))
        i += count
    return series
