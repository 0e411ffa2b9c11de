"""One grid of ranks for the device meshes of a model.

A model's DTensors may live on several device meshes: slices and flattened dimensions of one root.
Seen as global ranks, a dimension is a few digits of the rank number in a mixed radix, each with a
stride. The axes of the common grid are the coarsest digits of which all dimensions are made, so a
flattened dimension that is never used in parts stays one axis.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh

from bascule.errors import InvalidArgument, Unimplemented
from bascule.layout import Mesh

__all__ = ["Grid", "grid_of"]


@dataclass(frozen=True)
class Grid:
    """The common grid.

    Attributes
    ----------
    mesh
        Its axes.
    coordinates
        This rank's place in it.
    axes_of
        For each device mesh, by ``id``, the names of the axes that make each dimension, the most
        significant first.
    """

    mesh: Mesh
    coordinates: tuple[int, ...]
    axes_of: dict[int, list[tuple[str, ...]]]


@dataclass(frozen=True)
class _Digit:
    stride: int  # in global ranks
    size: int


def grid_of(meshes: Iterable[DeviceMesh]) -> Grid:
    """Return the common grid of device meshes that this rank belongs to.

    Parameters
    ----------
    meshes
        Equal ones may repeat.
    """
    unique: list[DeviceMesh] = []
    place: dict[int, int] = {}
    for mesh in meshes:
        found = next((i for i, other in enumerate(unique) if other is mesh or other == mesh), None)
        place[id(mesh)] = len(unique) if found is None else found
        if found is None:
            unique.append(mesh)
    grid, axes = _single(unique[0]) if len(unique) == 1 else _common(unique)
    return Grid(grid[0], grid[1], {key: axes[i] for key, i in place.items()})


_Axes = list[list[tuple[str, ...]]]


def _single(mesh: DeviceMesh) -> tuple[tuple[Mesh, tuple[int, ...]], _Axes]:
    names = [f"dim{i}" for i in range(mesh.ndim)]
    if mesh.mesh_dim_names is not None:
        names = list(mesh.mesh_dim_names)
    grid = Mesh(names, list(mesh.mesh.shape))
    return (grid, _coordinate(mesh)), [[(name,) for name in names]]


def _common(meshes: Sequence[DeviceMesh]) -> tuple[tuple[Mesh, tuple[int, ...]], _Axes]:
    digits_of = [[_digits(mesh, dim) for dim in range(mesh.ndim)] for mesh in meshes]
    digits = {digit for mesh in digits_of for dim in mesh for digit in dim}
    axes = _refine(digits)
    split_of = [[_split(dim, axes) for dim in mesh] for mesh in digits_of]
    order = _in_mesh_order(axes, [list(itertools.chain(*mesh)) for mesh in split_of])
    name_of = {axis: f"stride{axis.stride}" for axis in axes}
    coordinates: dict[_Digit, int] = {}
    for mesh, split in zip(meshes, split_of, strict=True):
        for coordinate, parts in zip(_coordinate(mesh), split, strict=True):
            for axis in reversed(parts):
                coordinates[axis] = coordinate % axis.size
                coordinate //= axis.size
    grid = Mesh([name_of[axis] for axis in order], [axis.size for axis in order])
    names = [[tuple(name_of[axis] for axis in dim) for dim in mesh] for mesh in split_of]
    return (grid, tuple(coordinates[axis] for axis in order)), names


def _coordinate(mesh: DeviceMesh) -> tuple[int, ...]:
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise InvalidArgument(f"this rank is not in {mesh}")
    return tuple(coordinate)


def _digits(mesh: DeviceMesh, dim: int) -> list[_Digit]:
    """Write the ranks along a dimension as digits of the rank number, most significant first."""
    ranks = mesh.mesh.movedim(dim, 0).reshape(mesh.size(dim), -1)[:, 0].tolist()
    offsets = [rank - ranks[0] for rank in ranks]
    digits: list[_Digit] = []
    done = 1
    while done < len(offsets):
        stride = offsets[done]
        size = 1
        while done * size < len(offsets) and offsets[done * size] == size * stride:
            size += 1
        while len(offsets) % (done * size) != 0:
            size -= 1
        digits.insert(0, _Digit(stride, size))
        done *= size
    for index, offset in enumerate(offsets):
        total = 0
        for digit in reversed(digits):
            total += index % digit.size * digit.stride
            index //= digit.size
        if total != offset or any(digit.size < 2 or digit.stride < 1 for digit in digits):
            raise Unimplemented(
                f"the ranks {ranks} of a mesh dimension have no regular distance, and the model "
                "has more than one mesh; give mesh= and placements="
            )
    return digits


def _refine(digits: set[_Digit]) -> list[_Digit]:
    """Return the coarsest digits of which all of these are made."""
    cuts = sorted({end for digit in digits for end in (digit.stride, digit.stride * digit.size)})
    axes = []
    for low, high in itertools.pairwise(cuts):
        if any(digit.stride <= low and high <= digit.stride * digit.size for digit in digits):
            if high % low != 0:
                raise Unimplemented(
                    "the device meshes of the model have no common grid; give mesh= and placements="
                )
            axes.append(_Digit(low, high // low))
    return axes


def _split(digits: list[_Digit], axes: list[_Digit]) -> list[_Digit]:
    """Return the axes that make a dimension, most significant first."""
    parts: list[_Digit] = []
    for digit in digits:
        end = digit.stride * digit.size
        inside = [axis for axis in axes if digit.stride <= axis.stride < end]
        parts.extend(sorted(inside, key=lambda axis: -axis.stride))
    return parts


def _in_mesh_order(axes: list[_Digit], meshes: list[list[_Digit]]) -> list[_Digit]:
    """Sort axes so that those of each mesh stay in its order, which is that of its placements."""
    order: list[_Digit] = []
    left = sorted(axes, key=lambda axis: -axis.stride)
    while left:
        for axis in left:
            before = {
                other for mesh in meshes if axis in mesh for other in mesh[: mesh.index(axis)]
            }
            if before <= set(order):
                order.append(axis)
                left.remove(axis)
                break
        else:
            raise Unimplemented(
                "the device meshes of the model order their dimensions differently; give mesh= "
                "and placements="
            )
    return order
