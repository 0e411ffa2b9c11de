"""Blocks over meshes, against numpy: fused, stacked, interleaved, transposed, padded, flat."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import bascule
from bascule.layout import (
    Block,
    DType,
    FlatBuffer,
    FlatTensor,
    LayoutBuilder,
    LogicalTensor,
    Mesh,
    at,
    fused_gate_up,
    fused_qkv,
    replicate,
    shard,
    shard_padded,
    shard_parts,
)


def whole(*shape: int, first: int = 1) -> Any:
    return np.arange(first, first + np.prod(shape), dtype=np.float32).reshape(shape)


def tensor(name: str, array: Any) -> LogicalTensor:
    return LogicalTensor(name, list(array.shape), DType.F32)


def expect(read: dict[str, Any], name: str, array: Any) -> None:
    values = read[name]
    held = ~np.isnan(values)
    assert held.any()
    np.testing.assert_array_equal(values[held], array[held])


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_fused_qkv(tp: int, read_layout: Any) -> None:
    """Four heads of two rows, two kv heads: with four ranks, neighbours share a kv head."""
    q, k, v = whole(8, 3), whole(4, 3, first=100), whole(4, 3, first=200)
    block = fused_qkv(tensor("q", q), tensor("k", k), tensor("v", v), 2, "tp")
    for rank in range(tp):
        kv = rank * 2 // tp if tp > 2 else rank
        kv_rows = slice(kv * (4 // min(tp, 2)), (kv + 1) * (4 // min(tp, 2)))
        array = np.concatenate([q[rank * 8 // tp : (rank + 1) * 8 // tp], k[kv_rows], v[kv_rows]])
        builder = LayoutBuilder(Mesh(["tp"], [tp]), [rank])
        assert builder.local_shape(block) == array.shape
        layout = builder.add(block, array, name="qkv_proj.weight").build()
        layout.validate()
        layout.check_destination_coverage()
        read = read_layout(layout)
        for name, array in (("q", q), ("k", k), ("v", v)):
            expect(read, name, array)


@pytest.mark.parametrize("interleaved", [False, True])
def test_fused_gate_up(interleaved: bool, read_layout: Any) -> None:
    gate, up = whole(6, 2), whole(6, 2, first=100)
    block = fused_gate_up(tensor("gate", gate), tensor("up", up), {"tp": shard(0)}, interleaved)
    for rank in range(2):
        rows = slice(rank * 3, rank * 3 + 3)
        array = np.concatenate([gate[rows], up[rows]])
        if interleaved:
            array = np.stack([gate[rows], up[rows]], axis=1).reshape(6, 2)
        layout = LayoutBuilder(Mesh(["tp"], [2]), [rank]).add(block, array).build()
        layout.check_destination_coverage()
        read = read_layout(layout)
        expect(read, "gate", gate)
        expect(read, "up", up)


def test_stacked_experts_over_expert_parallel(read_layout: Any) -> None:
    experts = [whole(4, 3, first=100 * e) for e in range(4)]
    block = Block.stack(
        [
            Block.of(tensor(f"experts.{e}.w", experts[e]), {"ep": at(e // 2), "tp": shard(0)})
            for e in range(4)
        ]
    ).transpose([0, 2, 1])
    for rank in range(4):
        ep, tp = divmod(rank, 2)
        mine = [experts[2 * ep], experts[2 * ep + 1]]
        array = np.stack([e[2 * tp : 2 * tp + 2].T for e in mine])
        layout = LayoutBuilder(Mesh(["ep", "tp"], [2, 2]), [ep, tp]).add(block, array).build()
        layout.check_destination_coverage()
        read = read_layout(layout)
        assert set(read) == {f"experts.{2 * ep}.w", f"experts.{2 * ep + 1}.w"}
        for name, values in read.items():
            expect({name: values}, name, experts[int(name.split(".")[1])])


def test_padded_vocabulary_and_parts(read_layout: Any) -> None:
    embed = whole(5, 2)
    mesh = Mesh(["tp"], [2])
    for rank in range(2):
        array = np.zeros((4, 2), np.float32)
        rows = embed[rank * 4 : rank * 4 + 4]
        array[: len(rows)] = rows
        block = Block.of(tensor("embed", embed), {"tp": shard_padded(0, 8)})
        layout = LayoutBuilder(mesh, [rank]).add(block, array).build()
        layout.check_destination_coverage()
        assert len(layout.native.padding) == (1 if rank == 1 else 0)
        expect(read_layout(layout), "embed", embed)
    assert "shard_padded(0, 8)" in repr(shard_padded(0, 8))
    assert "shard_parts(1, 2)" in repr(shard_parts(1, 2))


def test_flat_buffer_cut_at_any_element(read_layout: Any) -> None:
    a, b = whole(3, 3), whole(2, 4, first=100)
    flat = np.concatenate([a.ravel(), b.ravel()])
    description = FlatBuffer(
        [FlatTensor(tensor("a", a)), FlatTensor(tensor("b", b))], ["dp"], [0, 5, 5, 17]
    )
    for rank, (begin, end) in enumerate(((0, 5), (5, 5), (5, 17))):
        builder = LayoutBuilder(Mesh(["dp"], [3]), [rank])
        layout = builder.add_flat(description, flat[begin:end]).build()
        layout.check_destination_coverage()
        for name, values in read_layout(layout).items():
            expect({name: values}, name, {"a": a, "b": b}[name])
    with pytest.raises(bascule.InvalidArgument, match="12 elements"):
        LayoutBuilder(Mesh(["dp"], [3]), [2]).add_flat(description, flat)


def test_blocks_in_strided_columns_of_one_array(read_layout: Any) -> None:
    """Memory that is cut both by the mesh and by views: one buffer, no padding between."""
    q, k = whole(4, 6), whole(4, 6, first=100)
    for rank in range(2):
        memory = np.concatenate([q[:, rank * 3 : rank * 3 + 3], k[:, rank * 3 : rank * 3 + 3]], 1)
        builder = LayoutBuilder(Mesh(["tp"], [2]), [rank])
        builder.add(Block.of(tensor("q", q), {"tp": shard(1)}), memory[:, :3], name="q")
        builder.add(Block.of(tensor("k", k), {"tp": shard(1)}), memory[:, 3:], name="k")
        layout = builder.build()
        layout.check_destination_coverage()
        assert len(layout.native.buffers) == 1
        assert not layout.native.padding
        expect(read_layout(layout), "q", q)
        expect(read_layout(layout), "k", k)


def test_errors_name_the_array() -> None:
    block = Block.of(LogicalTensor("w", [4, 4], DType.F32), {"tp": shard(0)})
    mesh = Mesh(["tp"], [2])
    with pytest.raises(bascule.InvalidArgument, match=r"\[2, 4\].*\[4, 4\]") as caught:
        LayoutBuilder(mesh, [0]).add(block, whole(4, 4), name="proj.weight")
    assert caught.value.tensor == "proj.weight"
    with pytest.raises(bascule.InvalidArgument, match="give its array"):
        LayoutBuilder(mesh, [0]).add(block)
    away = Block.of(LogicalTensor("w", [4, 4], DType.F32), {"tp": at(1)})
    assert LayoutBuilder(mesh, [0]).local_shape(away) is None
    LayoutBuilder(mesh, [0]).add(away).build()
    with pytest.raises(bascule.InvalidArgument, match="holds nothing"):
        LayoutBuilder(mesh, [0]).add(away, whole(4, 4))
    with pytest.raises(bascule.InvalidArgument):
        LayoutBuilder(mesh, [2])
    with pytest.raises(bascule.InvalidArgument):
        Mesh(["a", "a"], [2, 2])
    with pytest.raises(bascule.InvalidArgument):
        mesh.coordinates_of(2)


def test_mesh() -> None:
    mesh = Mesh(["dp", "tp"], [4, 2])
    assert (mesh.ranks, mesh.coordinates_of(5)) == (8, [2, 1])
    assert repr(mesh) == "Mesh(dp=4, tp=2)"
    assert Mesh().ranks == 1
    assert repr(replicate()) == "replicate()"
