"""Layouts of torch modules and state dicts, with plain, DTensor and FSDP2 parameters.

With DTensors nothing more is needed::

    layout = layout_of(model, publish_dtype="bf16")

Without a process group the mesh is given::

    layout = layout_of(
        {"w": local_tensor},
        mesh=Mesh(["dp", "tp"], [4, 2]),
        coordinates=[3, 1],
        shapes={"w": [4096, 1024]},
        placements={"w": [Shard(0), Replicate()]},
    )
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement as TorchPlacement

from bascule._arrays import refuse_pending_bits, view_of
from bascule.errors import InvalidArgument, Unimplemented
from bascule.integrations._device_mesh import grid_of
from bascule.layout import (
    Block,
    Layout,
    LayoutBuilder,
    LogicalTensor,
    Mesh,
    Placement,
    publish_dtypes,
    renames,
    replicate,
    require_known,
    shard,
    strided_shard,
)

__all__ = ["layout_of", "placement_of"]

# What wrappers put into the names of parameters; checkpoints do not have it.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")

_AnyPlacement = TorchPlacement | Placement
_PlacementsOption = Sequence[_AnyPlacement] | Mapping[str, _AnyPlacement]


@dataclass
class _Entry:
    """A tensor of the state: `name` as the caller knows it, `tie` equal for tied tensors."""

    name: str
    tensor: torch.Tensor
    tie: object


def layout_of(
    state: torch.nn.Module | Mapping[str, torch.Tensor],
    *,
    publish_dtype: Any = None,
    mesh: Mesh | DeviceMesh | None = None,
    coordinates: Sequence[int] | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
    placements: Mapping[str, _PlacementsOption] | None = None,
    names: Mapping[str, str] | Callable[[str], str] | None = None,
    aliases: Mapping[str, str] | None = None,
    unused: Iterable[str] = (),
    buffers: bool = False,
) -> Layout:
    """Lay out the parameters of a module or the tensors of a state dict, in place.

    All ranks of one model get one description of their world, whichever rank makes it. Tied
    parameters become aliases. The prefixes of ``torch.compile`` and activation checkpointing are
    taken out of the names. CPU tensors in shared memory are described as such, so that peers can
    map them (``arena="direct"``).

    Parameters
    ----------
    state
        The module, or name to tensor. FSDP2 modules give their sharded parameters.
    publish_dtype
        Senders: what crosses where it is not the tensor's own type. One for all tensors of
        floating point, or a mapping by name as in ``state``, which must have the name.
    mesh
        The grid of ranks, where it is not to be taken from DTensors.
    coordinates
        This rank's place in ``mesh``; a `DeviceMesh` knows it.
    shapes
        With ``mesh``: the whole shapes of the tensors that are cut, of which ``state`` has the
        local parts.
    placements
        With ``mesh``: how each tensor is cut, torch's or bascule's placements, one for each axis
        or by the axis's name. Others are replicated, DTensors as they say by axis names.
    names
        From the names in ``state`` to those of the checkpoint.
    aliases
        Further tied tensors: name to target, checkpoint names. Ties in a plain state dict are
        found by address, which ranks that hold nothing of a tensor cannot see: name those here.
    unused
        Receivers: tensors of the sender that are not wanted; a trailing ``*`` matches any end.
    buffers
        Also take a module's persistent buffers.

    Returns
    -------
    Layout
        It keeps the storages alive, not the module.
    """
    entries = _entries_of(state, buffers)
    cutter = _Cutter(entries, mesh, coordinates, shapes or {}, placements or {})
    builder = LayoutBuilder(cutter.mesh, cutter.coordinates)
    if isinstance(publish_dtype, Mapping):
        publish_dtype = {_plain_name(name): dtype for name, dtype in publish_dtype.items()}
    published = publish_dtypes(publish_dtype, [entry.name for entry in entries])
    rename = renames(names)
    targets: dict[object, str] = {}
    for entry in entries:
        name = rename(entry.name)
        # Before ties are looked for: such views have the address of another tensor.
        refuse_pending_bits(entry.name, _local(entry.tensor))
        target = targets.setdefault(entry.tie, name)
        if target != name:
            builder.add_alias(name, target)
            continue
        shape, cuts, local = cutter.cut(entry)
        view = view_of(entry.name, local)
        tensor = LogicalTensor(name, shape, published(entry.name, view.dtype))
        builder.add_view(Block.of(tensor, cuts), view, name=entry.name)
    for name, target in (aliases or {}).items():
        builder.add_alias(name, target)
    for pattern in unused:
        builder.add_unused(pattern)
    return builder.build()


def placement_of(placement: _AnyPlacement, *, name: str = "") -> Placement:
    """Return bascule's placement for one of torch's.

    Parameters
    ----------
    placement
        ``Shard``, ``Replicate`` or ``_StridedShard``; bascule's own are returned as they are.
    name
        Of the tensor, for messages.
    """
    if isinstance(placement, Placement):
        return placement
    if placement.is_replicate():
        return replicate()
    split_factor = getattr(placement, "split_factor", 1)
    dim = getattr(placement, "dim", None)
    if dim is None or placement.is_partial():
        raise InvalidArgument(
            f"{placement} holds no part of the tensor itself; redistribute it to Shard or "
            "Replicate first",
            tensor=name or None,
        )
    return shard(int(dim)) if split_factor == 1 else strided_shard(int(dim), int(split_factor))


def _plain_name(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _entries_of(state: torch.nn.Module | Mapping[str, torch.Tensor], buffers: bool) -> list[_Entry]:
    if not isinstance(state, torch.nn.Module):
        return [_Entry(_plain_name(name), tensor, _tie(tensor)) for name, tensor in state.items()]
    identity: dict[str, object] = {}
    for name, parameter in state.named_parameters(remove_duplicate=False):
        identity[_plain_name(name)] = id(parameter)
    wanted = set(identity)
    for name, buffer in state.named_buffers(remove_duplicate=False):
        identity[_plain_name(name)] = id(buffer)
    if buffers:
        wanted = set(identity)
    # The state dict, unlike the parameters, is the sharded one in every state of FSDP2.
    entries = []
    for raw_name, tensor in state.state_dict().items():
        name = _plain_name(raw_name)
        if name in wanted:
            entries.append(_Entry(name, tensor, identity[name]))
    return entries


def _tie(tensor: torch.Tensor) -> object:
    """Return what two tensors have in common when they are one; ``object()`` where unknown."""
    local = _local(tensor)
    if local.numel() == 0:
        return object()
    spec: tuple[object, ...] = ()
    if isinstance(tensor, DTensor):
        spec = (tuple(tensor.shape), tuple(tensor.placements))
    place = (local.device, local.data_ptr(), tuple(local.shape), local.stride(), local.dtype)
    return (*place, *spec)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, DTensor):
        local: torch.Tensor = tensor._local_tensor
        return local.detach()
    return tensor.detach()


class _Cutter:
    """Knows the grid of ranks, and how each tensor is cut over it."""

    mesh: Mesh
    coordinates: Sequence[int]

    def __init__(
        self,
        entries: Sequence[_Entry],
        mesh: Mesh | DeviceMesh | None,
        coordinates: Sequence[int] | None,
        shapes: Mapping[str, Sequence[int]],
        placements: Mapping[str, _PlacementsOption],
    ) -> None:
        self._shapes = {_plain_name(name): list(shape) for name, shape in shapes.items()}
        self._placements = {_plain_name(name): option for name, option in placements.items()}
        self._axes_of: dict[int, list[tuple[str, ...]]] = {}
        known = [entry.name for entry in entries]
        require_known("shapes=", self._shapes, known)
        require_known("placements=", self._placements, known)
        if mesh is None:
            if self._placements or coordinates is not None:
                raise InvalidArgument("placements and coordinates need mesh=")
            self._take_grid(entries)
        elif isinstance(mesh, DeviceMesh):
            grid = grid_of([mesh])
            self.mesh, self.coordinates = grid.mesh, grid.coordinates
        elif coordinates is None:
            raise InvalidArgument("mesh= needs this rank's coordinates=")
        else:
            self.mesh, self.coordinates = mesh, list(coordinates)
        self._size_of = dict(zip(self.mesh.axis_names, self.mesh.axis_sizes, strict=True))

    def _take_grid(self, entries: Sequence[_Entry]) -> None:
        tensors = [entry.tensor for entry in entries if isinstance(entry.tensor, DTensor)]
        self.mesh, self.coordinates = Mesh(), []
        if tensors:
            grid = grid_of([tensor.device_mesh for tensor in tensors])
            self.mesh, self.coordinates = grid.mesh, grid.coordinates
            self._axes_of = grid.axes_of

    def cut(self, entry: _Entry) -> tuple[list[int], dict[str, Placement], torch.Tensor]:
        """Return the whole shape, the placements by axis, and the local part."""
        name, tensor = entry.name, entry.tensor
        local = _local(tensor)
        shape = self._shapes.get(name, list(tensor.shape))
        if name in self._placements:
            cuts = self._declared(name, self._placements[name])
        elif isinstance(tensor, DTensor):
            cuts = self._of_dtensor(name, tensor)
        else:
            cuts = {}
        return shape, cuts, local

    def _declared(self, name: str, option: _PlacementsOption) -> dict[str, Placement]:
        if isinstance(option, Mapping):
            return {axis: placement_of(placement, name=name) for axis, placement in option.items()}
        if len(option) != len(self.mesh.axis_names):
            raise InvalidArgument(
                f"{len(option)} placements for the {len(self.mesh.axis_names)} axes of {self.mesh}",
                tensor=name,
            )
        return {
            axis: placement_of(placement, name=name)
            for axis, placement in zip(self.mesh.axis_names, option, strict=True)
        }

    def _of_dtensor(self, name: str, tensor: DTensor) -> dict[str, Placement]:
        axes = self._axes_of.get(id(tensor.device_mesh))
        if axes is None:  # the mesh was given: they meet by name
            dims = tensor.device_mesh.mesh_dim_names or ()
            if len(dims) != tensor.device_mesh.ndim or not set(dims) <= set(self._size_of):
                raise InvalidArgument(
                    f"the dimensions {list(dims)} of its device mesh are no axes of {self.mesh}; "
                    "give its placements=",
                    tensor=name,
                )
            axes = [(dim,) for dim in dims]
        cuts: dict[str, Placement] = {}
        for names, placement in zip(axes, tensor.placements, strict=True):
            own = placement_of(placement, name=name)
            if len(names) > 1 and not placement.is_replicate():
                self._check_flattened(name, tensor, names, placement)
            cuts.update(dict.fromkeys(names, own))
        return cuts

    def _check_flattened(
        self, name: str, tensor: DTensor, names: tuple[str, ...], placement: TorchPlacement
    ) -> None:
        """Cutting by one axis after another must be what cutting by the whole dimension is."""
        ranks = 1
        for axis in names:
            ranks *= self._size_of[axis]
        dim = int(getattr(placement, "dim", 0))
        others = sum(int(getattr(other, "dim", -1)) == dim for other in tensor.placements)
        if others > 1 or tensor.shape[dim] % ranks != 0:
            raise Unimplemented(
                f"{placement} over a flattened mesh dimension of {ranks} ranks, which other "
                "tensors use in parts, needs an even cut that is the only one of its dimension",
                tensor=name,
            )
