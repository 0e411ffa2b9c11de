"""Layouts of DTensors and FSDP2 modules against torch's own cuts, rank by rank in one process."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import bascule
from bascule.layout import DType, Mesh

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor import (  # noqa: E402
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor._utils import (  # noqa: E402
    compute_local_shape_and_global_offset,
)
from torch.distributed.tensor.parallel import (  # noqa: E402
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import _StridedShard  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

from bascule.integrations.torch import layout_of, placement_of  # noqa: E402


@contextmanager
def rank_of(rank: int, world_size: int) -> Iterator[None]:
    """Be one rank of a world whose collectives do nothing."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def mesh_of(rank: int, **sizes: int) -> DeviceMesh:
    """A mesh with names of its own: FSDP2 keeps equal ones, and their rank, over groups."""
    names = tuple(f"{name}{rank}" for name in sizes)
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=names)


def pattern(*shape: int) -> Any:
    return torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape) + 1


def cut_by_torch(whole: Any, placements: Any, sizes: list[int], coordinate: list[int]) -> Any:
    """The local part, each placement applied with torch's own split, left to right."""
    for placement, size, index in zip(placements, sizes, coordinate, strict=True):
        if not placement.is_replicate():
            parts, _ = placement._split_tensor(whole, size, with_padding=False, contiguous=False)
            whole = parts[index]
    return whole.contiguous()


def expect_part(read: dict[str, Any], name: str, whole: Any, local: Any) -> None:
    """What was read is the whole's values at their places, and they are those of ``local``."""
    if local.numel() == 0:
        assert name not in read or np.isnan(read[name]).all()
        return
    values = read[name]
    held = ~np.isnan(values)
    np.testing.assert_array_equal(values[held], whole.numpy()[held])
    np.testing.assert_array_equal(np.sort(values[held]), np.sort(local.detach().numpy().ravel()))


def world_of(layout: bascule.Layout) -> str:
    """The description of the world that all ranks must share."""
    return json.dumps(json.loads(layout.to_json())["world"], sort_keys=True)


@pytest.mark.parametrize("seed", range(40))
def test_random_placements_without_a_process_group(seed: int, read_layout: Any) -> None:
    rng = np.random.default_rng(seed)
    sizes = [int(n) for n in rng.integers(1, 5, rng.integers(1, 4))]
    mesh = Mesh([f"axis{i}" for i in range(len(sizes))], sizes)
    ndim = int(rng.integers(1, 4))
    whole = pattern(*(int(n) for n in rng.integers(1, 12, ndim)))
    placements = [
        Replicate() if rng.random() < 0.3 else Shard(int(rng.integers(0, ndim))) for _ in sizes
    ]
    worlds = set()
    for rank in range(mesh.ranks):
        coordinate = mesh.coordinates_of(rank)
        local = cut_by_torch(whole, placements, sizes, coordinate)
        layout = layout_of(
            {"w": local, "norm": pattern(3)},
            mesh=mesh,
            coordinates=coordinate,
            shapes={"w": whole.shape},
            placements={"w": placements},
        )
        layout.validate()
        layout.check_destination_coverage()
        worlds.add(world_of(layout))
        read = read_layout(layout)
        expect_part(read, "w", whole, local)
        np.testing.assert_array_equal(read["norm"], pattern(3))
        if local.numel() > 0:
            shape, offset = compute_local_shape_and_global_offset_of(
                whole.shape, sizes, coordinate, placements
            )
            (box,) = layout.boxes()["w"]
            assert box == tuple((o, o + n) for o, n in zip(offset, shape, strict=True))
    assert len(worlds) == 1


def compute_local_shape_and_global_offset_of(
    shape: Any, sizes: list[int], coordinate: list[int], placements: Any
) -> tuple[Any, Any]:
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

    return _compute_local_shape_and_global_offset(shape, sizes, coordinate, placements)


@pytest.mark.parametrize("rows", [24, 16, 10, 11, 7, 5, 1])
@pytest.mark.parametrize(("dp", "tp"), [(2, 2), (2, 3), (4, 2), (3, 3)])
def test_fsdp_over_tensor_parallel_of_one_dimension(
    rows: int, dp: int, tp: int, read_layout: Any
) -> None:
    """The memory is that of the tensor-parallel part cut by FSDP, even where it is uneven."""
    whole = pattern(rows, 2)
    by_tp = cut_by_torch_parts(whole, tp)
    mesh = Mesh(["dp", "tp"], [dp, tp])
    seen = np.zeros((rows, 2))
    for rank in range(mesh.ranks):
        d, t = mesh.coordinates_of(rank)
        local = cut_by_torch_parts(by_tp[t], dp)[d].contiguous()
        layout = layout_of(
            {"w": local},
            mesh=mesh,
            coordinates=[d, t],
            shapes={"w": whole.shape},
            placements={"w": {"dp": _StridedShard(0, split_factor=tp), "tp": Shard(0)}},
        )
        read = read_layout(layout)
        expect_part(read, "w", whole, local)
        if "w" in read:
            seen += ~np.isnan(read["w"])
    assert (seen == 1).all()


def cut_by_torch_parts(whole: Any, ranks: int) -> list[Any]:
    parts, _ = Shard(0)._split_tensor(whole, ranks, with_padding=False, contiguous=False)
    return list(parts)


@pytest.mark.parametrize("rows", [16, 12, 13, 6, 3])
@pytest.mark.parametrize("split_factor", [2, 3])
def test_a_strided_shard_alone(rows: int, split_factor: int, read_layout: Any) -> None:
    whole = pattern(rows, 3)
    placements = [_StridedShard(0, split_factor=split_factor)]
    for rank in range(2):
        local = cut_by_torch(whole, placements, [2], [rank])
        layout = layout_of(
            {"w": local},
            mesh=Mesh(["x"], [2]),
            coordinates=[rank],
            shapes={"w": whole.shape},
            placements={"w": placements},
        )
        expect_part(read_layout(layout), "w", whole, local)


@pytest.mark.parametrize("seed", range(10))
def test_dtensors_on_one_mesh(seed: int, read_layout: Any) -> None:
    rng = np.random.default_rng(seed)
    sizes = [int(n) for n in rng.integers(2, 4, rng.integers(1, 3))]
    whole = pattern(7, 5)
    placements = [
        Replicate() if rng.random() < 0.3 else Shard(int(rng.integers(0, 2))) for _ in sizes
    ]
    for rank in range(math.prod(sizes)):
        with rank_of(rank, math.prod(sizes)):
            mesh = init_device_mesh("cpu", tuple(sizes))
            tensor = distribute_tensor(whole, mesh, placements, src_data_rank=None)
            layout = layout_of({"w": tensor, "b": pattern(2)})
            expect_part(read_layout(layout), "w", whole, tensor.to_local())
            shape, offset = compute_local_shape_and_global_offset(whole.shape, mesh, placements)
            if tensor.to_local().numel() > 0:
                (box,) = layout.boxes()["w"]
                assert box == tuple((o, o + n) for o, n in zip(offset, shape, strict=True))
            assert layout.native.coordinates == list(mesh.get_coordinate())


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 6)
        self.up = nn.Linear(6, 11, bias=True)
        self.down = nn.Linear(11, 6, bias=False)
        self.head = nn.Linear(6, 10, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(3))
        with torch.no_grad():
            for index, parameter in enumerate(self.parameters()):
                parameter.copy_(pattern(*parameter.shape) + 1000 * index)


def whole_state() -> dict[str, Any]:
    return {name: tensor.clone() for name, tensor in Network().state_dict().items()}


def expect_module(layout: bascule.Layout, model: nn.Module, read_layout: Any) -> None:
    layout.validate()
    layout.check_destination_coverage()
    assert layout.aliases == {"head.weight": "embed.weight"}
    wholes = whole_state()
    read = read_layout(layout)
    for name, tensor in model.state_dict().items():
        if name not in ("head.weight", "scale"):
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            expect_part(read, name, wholes[name], local)
            address = local.data_ptr()
            assert local.numel() == 0 or address in {b.address for b in layout.native.buffers}


def test_plain_module(read_layout: Any) -> None:
    model = Network()
    layout = layout_of(model, publish_dtype="bf16")
    assert {t.dtype.name for t in layout.tensors.values()} == {"BF16"}
    assert set(layout.tensors) == {"embed.weight", "up.weight", "up.bias", "down.weight"}
    expect_module(layout_of(model), model, read_layout)
    assert "scale" in layout_of(model, buffers=True).tensors


def test_wrappers_leave_no_prefix() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = Network()
    model.up = checkpoint_wrapper(model.up)
    layout = layout_of(torch.compile(model))
    assert set(layout.tensors) == {"embed.weight", "up.weight", "up.bias", "down.weight"}
    assert layout.aliases == {"head.weight": "embed.weight"}


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_fsdp2_module(world_size: int, read_layout: Any) -> None:
    for rank in range(world_size):
        with rank_of(rank, world_size):
            mesh = mesh_of(rank, shard=world_size)
            model = Network()
            fully_shard(model.up, mesh=mesh)
            fully_shard(model, mesh=mesh)
            expect_module(layout_of(model), model, read_layout)


def test_fsdp2_module_that_is_gathered_gives_its_shards(read_layout: Any) -> None:
    with rank_of(1, 2):
        model = Network()
        mesh = mesh_of(1, shard=2)
        fully_shard(model, mesh=mesh, reshard_after_forward=False)
        model.unshard()
        assert not isinstance(model.up.weight, DTensor)
        layout = layout_of(model)
        model.reshard()
        expect_module(layout, model, read_layout)


@pytest.mark.parametrize(("dp", "tp"), [(2, 2), (2, 3), (3, 2)])
def test_fsdp2_over_tensor_parallel(dp: int, tp: int, read_layout: Any) -> None:
    worlds = set()
    for rank in range(dp * tp):
        with rank_of(rank, dp * tp):
            mesh = mesh_of(rank, dp=dp, tp=tp)
            model = Network()
            parallelize_module(
                model,
                mesh[f"tp{rank}"],
                {"up": ColwiseParallel(), "down": RowwiseParallel()},
                src_data_rank=None,
            )
            fully_shard(model, mesh=mesh[f"dp{rank}"])
            layout = layout_of(model)
            expect_module(layout, model, read_layout)
            worlds.add(world_of(layout))
    assert len(worlds) == 1


def test_hybrid_fsdp2(read_layout: Any) -> None:
    for rank in range(4):
        with rank_of(rank, 4):
            mesh = mesh_of(rank, replicate=2, shard=2)
            model = Network()
            fully_shard(model, mesh=mesh)
            layout = layout_of(model)
            assert layout.native.coordinates == [rank // 2, rank % 2]
            expect_module(layout, model, read_layout)


@pytest.mark.parametrize("apart", [False, True])
def test_slices_and_flattened_dimensions_of_one_mesh(apart: bool, read_layout: Any) -> None:
    """Dense weights over all ranks, experts over parts of them: one grid for both."""
    dense, experts, both = pattern(16, 2), pattern(4, 6), pattern(3, 8)
    worlds = set()
    for rank in range(16):
        with rank_of(rank, 16):
            root = init_device_mesh("cpu", (2, 2, 4), mesh_dim_names=("pp", "dp", "ep"))
            flat = root["dp", "ep"]._flatten("flat")
            tensors = {
                "dense": distribute_tensor(dense, flat, [Shard(0)], src_data_rank=None),
                "experts": distribute_tensor(experts, root["ep"], [Shard(0)], src_data_rank=None),
                "both": distribute_tensor(
                    both, root["dp", "ep"], [Replicate(), Shard(1)], src_data_rank=None
                ),
                "plain": pattern(2),
            }
            if apart:  # then only the flattened dimension tells the coordinate along dp
                del tensors["both"]
            layout = layout_of(tensors)
            assert layout.native.coordinates == [rank // 4 % 2, rank % 4]
            worlds.add(world_of(layout))
            read = read_layout(layout)
            expect_part(read, "dense", dense, tensors["dense"].to_local())
            expect_part(read, "experts", experts, tensors["experts"].to_local())
            if not apart:
                expect_part(read, "both", both, tensors["both"].to_local())
    assert len(worlds) == 1


def test_a_flattened_dimension_alone_may_be_uneven(read_layout: Any) -> None:
    whole = pattern(7, 2)
    for rank in range(6):
        with rank_of(rank, 6):
            root = init_device_mesh("cpu", (2, 3), mesh_dim_names=("a", "b"))
            flat = root["a", "b"]._flatten("flat")
            tensor = distribute_tensor(whole, flat, [Shard(0)], src_data_rank=None)
            again = distribute_tensor(whole, root["a", "b"], [Replicate()] * 2, src_data_rank=None)
            expect_part(read_layout(layout_of({"w": tensor})), "w", whole, tensor.to_local())
            # Beside a tensor that uses the parts, the cut has to be even.
            with pytest.raises(bascule.Unimplemented) as caught:
                layout_of({"w": tensor, "again": again})
            assert caught.value.tensor == "w"


def test_meshes_in_other_rank_orders(read_layout: Any) -> None:
    whole = pattern(6, 8)
    grid = torch.tensor([[0, 2], [1, 3]])  # the last dimension is the far one
    for rank in range(4):
        with rank_of(rank, 4):
            mesh = DeviceMesh("cpu", grid, mesh_dim_names=("near", "far"))
            two = distribute_tensor(whole, mesh, [Shard(0), Shard(0)], src_data_rank=None)
            one = distribute_tensor(whole, mesh["far"], [Shard(1)], src_data_rank=None)
            read = read_layout(layout_of({"two": two, "one": one}))
            expect_part(read, "two", whole, two.to_local())
            expect_part(read, "one", whole, one.to_local())


def test_partial_tensors_are_refused() -> None:
    with rank_of(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        tensor = DTensor.from_local(pattern(2), mesh, [Partial()], run_check=False)
        with pytest.raises(bascule.InvalidArgument, match="redistribute") as caught:
            layout_of({"w": tensor})
        assert caught.value.tensor == "w"
        with pytest.raises(bascule.InvalidArgument, match="layout_of"):
            bascule.Layout.from_arrays({"w": tensor})


def test_a_given_device_mesh_and_dtensors_meet_by_name(read_layout: Any) -> None:
    whole = pattern(4, 6)
    with rank_of(3, 4):
        root = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        tensor = distribute_tensor(whole, root["tp"], [Shard(1)], src_data_rank=None)
        layout = layout_of(
            {"w": tensor, "v": whole[2:4]},
            mesh=root,
            shapes={"v": whole.shape},
            placements={"v": {"dp": Shard(0)}},
        )
        assert layout.native.coordinates == [1, 1]
        read = read_layout(layout)
        expect_part(read, "w", whole, tensor.to_local())
        expect_part(read, "v", whole, whole[2:4])


def test_what_does_not_fit_is_named() -> None:
    mesh = Mesh(["x"], [2])
    state = {"w": pattern(4)}
    with pytest.raises(bascule.InvalidArgument, match=r"\[3\]"):
        layout_of(
            state, mesh=mesh, coordinates=[0], shapes={"w": [5]}, placements={"w": [Shard(0)]}
        )
    with pytest.raises(bascule.InvalidArgument, match="coordinates"):
        layout_of(state, mesh=mesh)
    with pytest.raises(bascule.InvalidArgument, match="mesh="):
        layout_of(state, placements={"w": [Shard(0)]})
    with pytest.raises(bascule.InvalidArgument, match="2 placements"):
        layout_of(state, mesh=mesh, coordinates=[0], placements={"w": [Replicate(), Replicate()]})
    for option, value in (
        ("placements", [Shard(0)]),
        ("shapes", [5]),
    ):
        with pytest.raises(bascule.InvalidArgument, match=f"{option}= names 'v'") as caught:
            layout_of(state, mesh=mesh, coordinates=[0], **{option: {"v": value}})
        assert caught.value.tensor == "v"


def test_a_publish_dtype_by_name_needs_the_name() -> None:
    model = nn.ModuleDict({"_orig_mod": nn.Linear(2, 2)})
    for prefix in ("", "_orig_mod."):
        layout = layout_of(model, publish_dtype={f"{prefix}weight": "bf16"})
        assert layout.tensors["weight"].dtype is DType.BF16
        assert layout.tensors["bias"].dtype is DType.F32
    with pytest.raises(bascule.InvalidArgument, match="did you mean 'weight'") as caught:
        layout_of(model, publish_dtype={"weigth": "bf16"})
    assert caught.value.tensor == "weigth"


def test_placements_are_taken_over() -> None:
    assert repr(placement_of(Shard(1))) == "shard(1)"
    assert repr(placement_of(Replicate())) == "replicate()"
    assert repr(placement_of(_StridedShard(0, split_factor=3))) == "strided_shard(0, 3)"
    own = bascule.layout.at(2, 3)
    assert placement_of(own) is own
