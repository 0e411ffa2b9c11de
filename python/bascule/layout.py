"""Layouts: how the tensors of a checkpoint lie in the memory of one rank.

`Layout.from_arrays` serves whole tensors. `LayoutBuilder` serves tensors that are cut over a mesh
of ranks, fused, stacked, interleaved or padded::

    mesh = Mesh(["dp", "tp"], [4, 2])
    builder = LayoutBuilder(mesh, [3, 1])
    builder.add(fused_qkv(q, k, v, 8, "tp"), qkv_proj.weight)
    layout = builder.build()

For torch modules see `bascule.integrations.torch`.
"""

from __future__ import annotations

import difflib
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from bascule import _bascule
from bascule._arrays import FLOATING, ArrayView, Storages, as_dtype, dtype_of, gaps, view_of
from bascule._bascule import (
    Block,
    DType,
    FlatBuffer,
    FlatTensor,
    LandingFunction,
    LogicalTensor,
    MemoryKind,
    Mesh,
    Placement,
    at,
    fused_gate_up,
    fused_qkv,
    replicate,
    shard,
    shard_padded,
    shard_parts,
    strided_shard,
)
from bascule.errors import InvalidArgument

__all__ = [
    "Block",
    "DType",
    "FlatBuffer",
    "FlatTensor",
    "LandingFunction",
    "Layout",
    "LayoutBuilder",
    "LogicalTensor",
    "MemoryKind",
    "Mesh",
    "Placement",
    "as_dtype",
    "at",
    "fused_gate_up",
    "fused_qkv",
    "replicate",
    "shard",
    "shard_padded",
    "shard_parts",
    "strided_shard",
]


class Layout:
    """All of one rank's tensors and where they lie, with what keeps that memory alive.

    Made by `from_arrays`, `LayoutBuilder.build` or an integration. A sender or receiver that uses
    a layout keeps it, and so the arrays, alive.
    """

    def __init__(
        self, native: _bascule.Layout, views: Iterable[tuple[str, ArrayView]] = ()
    ) -> None:
        views = list(views)
        self._native = native
        self._owners = tuple(view.owner for _, view in views)
        self._readonly = tuple(name for name, view in views if view.readonly)
        self._storages = Storages(views)

    def __repr__(self) -> str:
        held = sum(buffer.bytes for buffer in self._native.buffers)
        return (
            f"Layout({len(self._native.tensors)} tensors, {len(self._native.bindings)} boxes, "
            f"{held} bytes)"
        )

    @classmethod
    def from_arrays(
        cls,
        arrays: Mapping[str, Any],
        *,
        dtypes: Mapping[str, Any] | None = None,
        publish_dtype: Any = None,
        names: Mapping[str, str] | Callable[[str], str] | None = None,
        aliases: Mapping[str, str] | None = None,
        unused: Iterable[str] = (),
    ) -> Self:
        """Lay out whole tensors, each in an array of its own shape.

        Parameters
        ----------
        arrays
            Name to numpy array, torch tensor, or an object with ``__array_interface__`` or
            ``__dlpack__``. Strided views are used in place; the bytes between their elements are
            declared as padding. Arrays that are the same memory become aliases.
        dtypes
            What the elements of an array are, by its name, where its own type only has their size:
            bf16 in an array of ``np.uint16``. A name that ``arrays`` lacks is an error.
        publish_dtype
            Senders: what crosses where it is not the array's own type. One for all tensors of
            floating point, or a mapping by name as in ``arrays``, which must have the name.
        names
            From the names in ``arrays`` to those of the checkpoint.
        aliases
            Tied tensors without an array of their own: name to target, checkpoint names.
        unused
            Receivers: tensors of the sender that are not wanted; a trailing ``*`` matches any end.
        """
        require_known("dtypes=", dtypes or {}, arrays)
        builder = LayoutBuilder()
        published = publish_dtypes(publish_dtype, arrays)
        rename = renames(names)
        first_of: dict[tuple[object, ...], str] = {}
        for key, array in arrays.items():
            view = view_of(key, array, (dtypes or {}).get(key))
            name = rename(key)
            dtype = published(key, view.dtype)
            identity = (view.address, view.shape, view.byte_strides, view.dtype, dtype)
            target = first_of.setdefault(identity, name) if view.size > 0 else name
            if target == name:
                block = Block.of(LogicalTensor(name, list(view.shape), dtype))
                builder.add_view(block, view, name=key)
            else:
                builder.add_alias(name, target)
        for name, target in (aliases or {}).items():
            builder.add_alias(name, target)
        for pattern in unused:
            builder.add_unused(pattern)
        return cls(*builder._build())

    @classmethod
    def from_json(cls, text: str, arrays: Mapping[str, Any]) -> Self:
        """Read a layout (docs/layout-json.md) and give it memory.

        Parameters
        ----------
        text
            Written by `to_json`, or by hand.
        arrays
            For each buffer of the layout, by name, an array that is as many bytes, all of them its
            own.
        """
        native = _bascule.layout_from_json(text)
        views: dict[str, ArrayView] = {}
        for number, buffer in enumerate(native.buffers):
            if buffer.name not in arrays:
                raise InvalidArgument("arrays= lacks this buffer", tensor=buffer.name)
            view = view_of(buffer.name, arrays[buffer.name])
            if view.size * view.dtype.itemsize != view.span:
                raise InvalidArgument(
                    "the array of this buffer is strided: the bytes between its elements are not "
                    "its own; give the whole array that it is a view of, or a contiguous copy",
                    tensor=buffer.name,
                )
            if view.span != buffer.bytes:
                raise InvalidArgument(
                    f"the buffer is {buffer.bytes} bytes, its array {view.span}", tensor=buffer.name
                )
            native.set_memory(number, view.address, view.kind, view.device, view.fd, view.fd_offset)
            views[buffer.name] = view
        layout = cls(native, views.items())
        layout.validate()
        return layout

    def to_json(self, *, indent: int | None = None) -> str:
        """Write the layout without its memory, as docs/layout-json.md describes.

        Parameters
        ----------
        indent
            Spaces a level; none for one line.
        """
        return self._native.to_json(-1 if indent is None else indent)

    @property
    def native(self) -> _bascule.Layout:
        """The layout as the core has it: tensors, buffers, bindings, aliases, padding."""
        return self._native

    @property
    def tensors(self) -> dict[str, LogicalTensor]:
        """The tensors that this rank holds, by name."""
        return {tensor.name: tensor for tensor in self._native.tensors}

    @property
    def aliases(self) -> dict[str, str]:
        """Tied tensors: name to target."""
        return {alias.name: alias.target for alias in self._native.aliases}

    def boxes(self) -> dict[str, list[tuple[tuple[int, int], ...]]]:
        """Return the boxes of each tensor that this rank holds, a (begin, end) a dimension."""
        boxes: dict[str, list[tuple[tuple[int, int], ...]]] = {name: [] for name in self.tensors}
        names = list(boxes)
        for binding in self._native.bindings:
            boxes[names[binding.tensor]].append(tuple(binding.box))
        return {name: sorted(found) for name, found in boxes.items()}

    def validate(self) -> None:
        """Raise what is wrong with this rank's layout by itself."""
        self._native.validate()

    def check_destination_coverage(self) -> None:
        """Raise if a byte of the buffers is filled by nothing or twice, as receivers must not."""
        self._native.check_destination_coverage()

    def require_writable(self) -> None:
        """Raise `bascule.InvalidArgument` if an array is read-only, as receivers' must not be."""
        if self._readonly:
            raise InvalidArgument(
                "the array is read-only, so nothing can be received into it; give a copy",
                tensor=self._readonly[0],
            )

    def require_memory(self) -> None:
        """Raise `bascule.InvalidArgument` if the storage of a torch tensor was freed or moved.

        Sessions do so before they read or write the arrays.
        """
        self._storages.check()


@dataclass
class _Entry:
    block: Block | FlatBuffer
    view: ArrayView
    name: str


class LayoutBuilder:
    """Builds the layout of a rank of a declared mesh.

    Every rank adds the same blocks in the same order, so that all ranks share one description of
    the world; each gives the arrays that it holds.

    Parameters
    ----------
    mesh
        The grid of ranks; none: one rank.
    coordinates
        This rank's place in it.
    """

    def __init__(self, mesh: Mesh | None = None, coordinates: Sequence[int] = ()) -> None:
        self._native = _bascule.LayoutBuilder(mesh or Mesh(), list(coordinates))
        self._entries: list[_Entry] = []
        self._names: Counter[str] = Counter()  # of buffers

    def local_shape(self, block: Block) -> tuple[int, ...] | None:
        """Return the shape of a block's array on this rank.

        Parameters
        ----------
        block
            Need not have been added.

        Returns
        -------
        tuple of int, or None
            None where all of it is at other ranks.
        """
        shape = self._native.local_shape(block)
        return None if shape is None else tuple(shape)

    def add(self, block: Block, array: Any = None, *, name: str = "", dtype: Any = None) -> Self:
        """Add a block and the array that holds this rank's part of it.

        Parameters
        ----------
        block
            How the array is made of parts of tensors.
        array
            As for `Layout.from_arrays`; may be None where the rank holds nothing of it.
        name
            Of the array, for messages.
        dtype
            What its elements are, where its own type only has their size.
        """
        if array is not None:
            return self.add_view(block, view_of(name, array, dtype), name=name)
        shape = self.local_shape(block)
        if shape is not None and 0 not in shape:
            raise InvalidArgument(f"this rank holds {list(shape)} of the block: give its array")
        self._native.add_elsewhere(block)
        return self

    def add_view(self, block: Block, view: ArrayView, *, name: str = "") -> Self:
        """Like `add`, for memory that is described already.

        Parameters
        ----------
        block
            How the array is made of parts of tensors.
        view
            The array's memory.
        name
            Of the array, for messages.
        """
        shape = self.local_shape(block)
        if shape is None or 0 in shape:
            if view.size > 0:
                raise InvalidArgument(
                    f"this rank holds nothing of the block, but the array is {list(view.shape)}",
                    tensor=name or None,
                )
            self._native.add_elsewhere(block)
            return self
        if shape != view.shape:
            raise InvalidArgument(
                f"this rank's part of the block is {list(shape)}, but the array is "
                f"{list(view.shape)}",
                tensor=name or None,
            )
        self._entries.append(_Entry(block, view, name))
        return self

    def add_flat(self, flat: FlatBuffer, array: Any, *, name: str = "", dtype: Any = None) -> Self:
        """Add a flat buffer and the array that holds this rank's elements of it.

        Parameters
        ----------
        flat
            The tensors of the buffer and how ranks cut it.
        array
            Of one dimension, dense.
        name
            Of the array, for messages.
        dtype
            What its elements are, where its own type only has their size.
        """
        view = view_of(name, array, dtype)
        elements = self._native.local_elements(flat)
        if view.shape != (elements,) or not view.dense:
            raise InvalidArgument(
                f"this rank holds {elements} elements of the flat buffer: give a dense array of "
                f"shape [{elements}], not {list(view.shape)}",
                tensor=name or None,
            )
        if elements == 0:
            self._native.add_flat_elsewhere(flat)
        else:
            self._entries.append(_Entry(flat, view, name))
        return self

    def add_alias(self, name: str, target: str) -> Self:
        """Add a tied tensor.

        Parameters
        ----------
        name
            Is stored nowhere of its own ...
        target
            ... but is this one.
        """
        self._native.add_alias(name, target)
        return self

    def add_unused(self, pattern: str) -> Self:
        """Declare tensors of the sender that this receiver does not want.

        Parameters
        ----------
        pattern
            A name; a trailing ``*`` matches any end.
        """
        self._native.add_unused(pattern)
        return self

    def build(self) -> Layout:
        """Return this rank's layout. The builder is used up."""
        return Layout(*self._build())

    def _build(self) -> tuple[_bascule.Layout, list[tuple[str, ArrayView]]]:
        for group in _overlapping(self._entries):
            self._add_group(group)
        self._entries, entries = [], self._entries
        return self._native.build(), [(entry.name, entry.view) for entry in entries]

    def _add_group(self, group: list[_Entry]) -> None:
        """Add views whose ranges of bytes overlap, such as columns of one array, as one buffer."""
        first = group[0].view
        name = group[0].name or "array"
        self._names[name] += 1
        if self._names[name] > 1:
            name += f"#{self._names[name]}"
        begin = first.address
        end = max(entry.view.address + entry.view.span for entry in group)
        buffer = self._native.add_buffer(
            name, begin, end - begin, first.kind, first.device, first.fd, first.fd_offset
        )
        for entry in group:
            offset = entry.view.address - begin
            if isinstance(entry.block, FlatBuffer):
                self._native.add_flat(entry.block, buffer, offset, entry.view.dtype)
            else:
                strides = list(entry.view.byte_strides)
                self._native.add(entry.block, buffer, offset, strides, entry.view.dtype)
        for padding in gaps([entry.view for entry in group], begin, end):
            self._native.add_padding(buffer, *padding)


def _overlapping(entries: list[_Entry]) -> list[list[_Entry]]:
    """Group entries whose ranges of bytes overlap; by address in a group, groups in order."""

    def space(entry: _Entry) -> tuple[object, ...]:
        return (entry.view.kind.value, entry.view.device)

    position = {id(entry): i for i, entry in enumerate(entries)}
    groups: list[list[_Entry]] = []
    by_address = sorted(entries, key=lambda entry: (space(entry), entry.view.address))
    for _, same_space in itertools.groupby(by_address, key=space):
        end = 0
        for entry in same_space:
            if end > entry.view.address:
                groups[-1].append(entry)
            else:
                groups.append([entry])
                end = 0
            end = max(end, entry.view.address + entry.view.span)
    groups.sort(key=lambda group: min(position[id(entry)] for entry in group))
    return groups


def require_known(option: str, names: Iterable[str], known: Iterable[str]) -> None:
    """Raise if an option names a tensor that there is not, e.g. by a misspelt name.

    Parameters
    ----------
    option
        For the message, e.g. ``"dtypes="``.
    names
        That the option names.
    known
        All that there are.
    """
    there = dict.fromkeys(known)
    for name in names:
        if name in there:
            continue
        close = difflib.get_close_matches(str(name), [str(other) for other in there], 1)
        hint = f"; did you mean {close[0]!r}?" if close else "; correct it or leave it out"
        raise InvalidArgument(
            f"{option} names {name!r}, which is none of the tensors{hint}", tensor=str(name)
        )


def publish_dtypes(publish_dtype: Any, known: Iterable[str]) -> Callable[[str, DType], DType]:
    """Return the function (name, own dtype) -> publish dtype that an option stands for.

    Parameters
    ----------
    publish_dtype
        None, a dtype for all tensors of floating point, or a mapping from names to dtypes.
    known
        The names that a mapping may have.
    """
    if publish_dtype is None:
        return lambda name, own: own
    if isinstance(publish_dtype, Mapping):
        require_known("publish_dtype=", publish_dtype, known)
        by_name = {name: dtype_of(name, dtype) for name, dtype in publish_dtype.items()}
        return lambda name, own: by_name.get(name, own)
    dtype = as_dtype(publish_dtype)
    return lambda name, own: dtype if own in FLOATING else own


def renames(names: Mapping[str, str] | Callable[[str], str] | None) -> Callable[[str], str]:
    """Return the function from local to checkpoint names that an option stands for.

    Parameters
    ----------
    names
        None, a mapping (other names stay), or the function.
    """
    if names is None:
        return lambda name: name
    if isinstance(names, Mapping):
        mapping = names
        return lambda name: mapping.get(name, name)
    return names
