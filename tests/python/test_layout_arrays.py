"""Layouts of whole arrays: memory, strides, types, ties, padding, owners."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest

import bascule
from bascule.layout import DType, MemoryKind


def test_round_trip_of_numpy_arrays(read_layout: Any) -> None:
    rng = np.random.default_rng(0)
    arrays = {
        "a": rng.normal(size=(3, 5)).astype(np.float32),
        "b": rng.integers(0, 100, (2, 3, 4)).astype(np.int64),
        "scalar": np.array(3.5, np.float16),
        "empty": np.zeros((0, 4), np.float32),
    }
    layout = bascule.Layout.from_arrays(arrays)
    layout.validate()
    layout.check_destination_coverage()
    for name, values in read_layout(layout).items():
        np.testing.assert_array_equal(values, arrays[name])
    assert "empty" not in layout.boxes() or layout.boxes()["empty"] == []


def views(rng: np.random.Generator) -> dict[str, np.ndarray[Any, Any]]:
    base = rng.normal(size=(6, 8, 4)).astype(np.float32)
    return {
        "transposed": rng.normal(size=(4, 6)).astype(np.float32).T,
        "columns": base[:, 2:5, :],
        "steps": base[::2, 6, ::2],
        "fortran": np.asfortranarray(rng.normal(size=(3, 4))),
        "ones": base[5:6, 0:1, 1:2],
    }


def test_strided_views_are_used_in_place(read_layout: Any) -> None:
    arrays = views(np.random.default_rng(1))
    layout = bascule.Layout.from_arrays(arrays)
    layout.validate()
    layout.check_destination_coverage()
    for name, values in read_layout(layout).items():
        np.testing.assert_array_equal(values, arrays[name])
    arrays["columns"][0, 0, 0] = 42
    assert read_layout(layout)["columns"][0, 0, 0] == 42


def test_bytes_between_the_elements_are_padding() -> None:
    base = np.zeros((8, 8), np.float32)
    # Interleaved columns share rows: one buffer; columns 6 and 7 of rows 0-6 belong to nobody.
    layout = bascule.Layout.from_arrays({"left": base[:, :4], "middle": base[:, 4:6]})
    layout.check_destination_coverage()
    (buffer,) = layout.native.buffers
    assert buffer.bytes == 7 * 32 + 24
    padding = [(p.offset, p.bytes, p.count, p.stride) for p in layout.native.padding]
    assert padding == [(24, 8, 7, 32)]


@pytest.mark.parametrize("seed", range(50))
def test_random_views_cover_their_buffers(seed: int, read_layout: Any) -> None:
    rng = np.random.default_rng(seed)
    base = rng.normal(size=tuple(rng.integers(1, 7, 3))).astype(np.float32)
    cut = int(rng.integers(0, base.shape[1] + 1))
    order = rng.permutation(3)
    step = int(rng.integers(1, 4))
    arrays = {
        "low": base[:, :cut].transpose(order),
        "high": base[::step, cut:].transpose(order),
        "other": rng.normal(size=(2, 3)).astype(np.float64)[:, :2],
    }
    layout = bascule.Layout.from_arrays(arrays)
    layout.validate()
    layout.check_destination_coverage()
    for name, values in read_layout(layout).items():
        np.testing.assert_array_equal(values, arrays[name])


def test_publish_dtype() -> None:
    arrays = {
        "w": np.zeros(4, np.float32),
        "n": np.zeros(4, np.float32),
        "i": np.zeros(4, np.int32),
    }
    both = bascule.Layout.from_arrays(arrays, publish_dtype="bf16")
    assert {name: t.dtype for name, t in both.tensors.items()} == {
        "w": DType.BF16,
        "n": DType.BF16,
        "i": DType.I32,
    }
    assert {binding.dtype for binding in both.native.bindings} == {DType.F32, DType.I32}
    both.validate()
    one = bascule.Layout.from_arrays(arrays, publish_dtype={"w": np.float16})
    assert one.tensors["w"].dtype is DType.F16
    assert one.tensors["n"].dtype is DType.F32
    with pytest.raises(bascule.InvalidArgument, match="float99"):
        bascule.Layout.from_arrays(arrays, publish_dtype="float99")
    with pytest.raises(bascule.InvalidArgument, match="float99") as caught:
        bascule.Layout.from_arrays(arrays, publish_dtype={"w": "float99"})
    assert caught.value.tensor == "w"


@pytest.mark.parametrize("option", ["dtypes", "publish_dtype"])
def test_options_by_name_need_the_name(option: str) -> None:
    arrays = {"layer.weight": np.zeros(4, np.uint16), "n": np.zeros(4, np.uint16)}
    for key, hint in (("layer.wieght", "did you mean 'layer.weight'"), ("other", "leave it out")):
        with pytest.raises(bascule.InvalidArgument, match=hint) as caught:
            bascule.Layout.from_arrays(arrays, **{option: {key: "i16"}})
        assert option in caught.value.message
        assert caught.value.tensor == key


def test_one_memory_under_two_names_is_an_alias() -> None:
    array = np.zeros((4, 4), np.float32)
    arrays = {"embed": array, "head": array, "view": array[:], "part": array[:2]}
    layout = bascule.Layout.from_arrays({k: arrays[k] for k in ("embed", "head", "view")})
    assert layout.aliases == {"head": "embed", "view": "embed"}
    assert list(layout.tensors) == ["embed"]
    # A part is no alias: two tensors in one place are an error where they are received.
    with pytest.raises(bascule.InvalidArgument):
        bascule.Layout.from_arrays(arrays).check_destination_coverage()


def test_names_aliases_and_unused() -> None:
    array = np.zeros(2, np.float32)
    layout = bascule.Layout.from_arrays(
        {"a": array, "b": array.copy()},
        names={"a": "model.a"},
        aliases={"lm_head": "model.a"},
        unused=["mtp.*"],
    )
    assert set(layout.tensors) == {"model.a", "b"}
    assert layout.aliases == {"lm_head": "model.a"}
    assert layout.native.unused == ["mtp.*"]
    upper = bascule.Layout.from_arrays({"a": array}, names=str.upper)
    assert set(upper.tensors) == {"A"}


def test_arrays_live_as_long_as_the_layout() -> None:
    array = np.zeros(1000, np.float32)
    gone = weakref.ref(array)
    layout = bascule.Layout.from_arrays({"w": array})
    del array
    gc.collect()
    assert gone() is not None
    del layout
    gc.collect()
    assert gone() is None


def test_read_only_arrays_are_refused_only_where_they_are_written() -> None:
    array = np.zeros(4, np.float32)
    array.flags.writeable = False
    layout = bascule.Layout.from_arrays({"ok": np.zeros(4, np.float32), "w": array})
    with pytest.raises(bascule.InvalidArgument, match="read-only") as caught:
        layout.require_writable()
    assert caught.value.tensor == "w"


@pytest.mark.parametrize(
    ("array", "reason"),
    [
        (np.zeros(4, np.float32)[::-1], "negative"),
        (np.broadcast_to(np.zeros(1, np.float32), (4,)), "zero strides"),
        (np.zeros(4, ">f4"), "byte order"),
        (np.zeros(4, np.complex64), "complex64"),
        ([1.0, 2.0], "list is no array"),
    ],
)
def test_what_is_no_memory_is_refused(array: Any, reason: str) -> None:
    with pytest.raises(bascule.InvalidArgument, match=reason) as caught:
        bascule.Layout.from_arrays({"w": array})
    assert caught.value.tensor == "w"


def test_torch_tensors_and_dlpack(read_layout: Any) -> None:
    torch = pytest.importorskip("torch")
    dense = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    arrays = {"dense": dense, "transposed": dense.clone().T, "bf16": dense.to(torch.bfloat16)}
    layout = bascule.Layout.from_arrays(arrays)
    layout.check_destination_coverage()
    read = read_layout(layout)
    np.testing.assert_array_equal(read["dense"], dense)
    np.testing.assert_array_equal(read["transposed"], dense.T)
    np.testing.assert_array_equal(read["bf16"], arrays["bf16"].view(torch.uint16))
    assert layout.tensors["bf16"].dtype is DType.BF16

    class OnlyDlpack:
        def __dlpack__(self, **options: Any) -> Any:
            return dense.__dlpack__(**options)

        def __dlpack_device__(self) -> Any:
            return dense.__dlpack_device__()

    exported = bascule.Layout.from_arrays({"w": OnlyDlpack()})
    assert exported.native.buffers[0].address == dense.data_ptr()


def test_torch_storage_that_a_parameter_leaves_stays_alive() -> None:
    torch = pytest.importorskip("torch")
    parameter = torch.nn.Parameter(torch.ones(4))
    layout = bascule.Layout.from_arrays({"w": parameter})
    address = parameter.data_ptr()
    parameter.data = torch.zeros(4)
    assert layout.native.buffers[0].address == address
    assert parameter.data_ptr() != address
    assert layout._owners[0].data_ptr() == address


def test_shared_torch_storage_is_described_with_its_descriptor() -> None:
    torch = pytest.importorskip("torch")
    import mmap

    base = torch.arange(64, dtype=torch.float32).share_memory_()
    layout = bascule.Layout.from_arrays({"w": base[16:32], "plain": torch.zeros(4)})
    shared, plain = layout.native.buffers
    assert (shared.kind, shared.fd_offset) == (MemoryKind.SHARED, 64)
    assert (plain.kind, plain.fd) == (MemoryKind.HOST, -1)
    with mmap.mmap(shared.fd, 256) as pages:
        begin = shared.fd_offset
        copy = np.frombuffer(pages[begin : begin + shared.bytes], np.float32)
        np.testing.assert_array_equal(copy, base[16:32])
        pages[begin : begin + 4] = np.float32(99).tobytes()
    assert base[16] == 99


def test_meta_tensors_are_refused() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(bascule.InvalidArgument, match="meta"):
        bascule.Layout.from_arrays({"w": torch.zeros(4, device="meta")})


def test_torch_views_with_pending_bits_are_refused() -> None:
    torch = pytest.importorskip("torch")
    from bascule.integrations.torch import layout_of

    whole = torch.complex(torch.ones(4), torch.arange(4.0))
    negated = torch.conj(whole).imag
    assert negated.is_neg()
    for make in (bascule.Layout.from_arrays, layout_of):
        # With the address of another tensor: no tie.
        with pytest.raises(bascule.InvalidArgument, match=r"resolve_neg\(\)") as caught:
            make({"plain": whole.imag, "w": negated})
        assert caught.value.tensor == "w"
        with pytest.raises(bascule.InvalidArgument, match=r"resolve_conj\(\)") as caught:
            make({"w": torch.conj(whole)})
        assert caught.value.tensor == "w"
        make({"w": negated.resolve_neg()}).validate()


@pytest.mark.parametrize("dtype", ["complex64", "uint64", "float8_e4m3fnuz"])
def test_torch_types_without_a_name_here_are_refused_by_tensor(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    from bascule.integrations.torch import layout_of

    for make in (bascule.Layout.from_arrays, layout_of):
        with pytest.raises(bascule.InvalidArgument, match=dtype) as caught:
            make({"w": torch.zeros(4).to(getattr(torch, dtype))})
        assert caught.value.tensor == "w"


def test_bits_in_arrays_of_another_type(read_layout: Any) -> None:
    words = np.arange(4, dtype=np.uint16)
    layout = bascule.Layout.from_arrays({"w": words}, dtypes={"w": "bf16"})
    layout.check_destination_coverage()
    assert layout.tensors["w"].dtype is DType.BF16
    np.testing.assert_array_equal(read_layout(layout)["w"], words)
    with pytest.raises(bascule.InvalidArgument, match="sizes differ"):
        bascule.Layout.from_arrays({"w": words}, dtypes={"w": "f32"})
    with pytest.raises(bascule.InvalidArgument, match="bf17") as caught:
        bascule.Layout.from_arrays({"w": words}, dtypes={"w": "bf17"})
    assert caught.value.tensor == "w"


def test_json_there_and_back(read_layout: Any) -> None:
    arrays = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(2, np.float16)}
    layout = bascule.Layout.from_arrays(arrays, aliases={"tied": "a"})
    text = layout.to_json(indent=2)
    again = bascule.Layout.from_json(text, arrays)
    assert again.to_json(indent=2) == text
    assert again.aliases == {"tied": "a"}
    for name, values in read_layout(again).items():
        np.testing.assert_array_equal(values, arrays[name])
    with pytest.raises(bascule.InvalidArgument, match="lacks"):
        bascule.Layout.from_json(text, {"a": arrays["a"]})
    with pytest.raises(bascule.InvalidArgument, match="24 bytes, its array 48"):
        bascule.Layout.from_json(text, {**arrays, "a": np.zeros(6)})
    with pytest.raises(bascule.InvalidArgument, match="JSON"):
        bascule.Layout.from_json("{", arrays)


def test_json_gives_two_destination_buffers_no_common_memory() -> None:
    array = np.zeros(8, np.float32)
    text = bascule.Layout.from_arrays({"a": array[:4].copy(), "b": array[4:].copy()}).to_json()
    bascule.Layout.from_json(text, {"a": array[:4], "b": array[4:]}).check_destination_coverage()
    shared = bascule.Layout.from_json(text, {"a": array[:4], "b": array[3:7]})
    with pytest.raises(bascule.InvalidArgument, match="buffers 'a' and 'b' share 4 bytes"):
        shared.check_destination_coverage()


def test_json_takes_arrays_whose_bytes_are_all_their_own() -> None:
    def text(size: int) -> str:
        array = np.zeros(size, np.float32)
        return bascule.Layout.from_arrays({"a": array}).to_json()

    # Seven elements long, but every other one belongs to somebody else.
    with pytest.raises(bascule.InvalidArgument, match="strided") as caught:
        bascule.Layout.from_json(text(7), {"a": np.zeros(8, np.float32)[::2]})
    assert caught.value.tensor == "a"
    whole = np.zeros((4, 6), np.float32)
    with pytest.raises(bascule.InvalidArgument, match="strided"):
        bascule.Layout.from_json(text(21), {"a": whole[:, :3]})
    for array in (whole, whole.T, whole[:1], whole[1:3]):
        bascule.Layout.from_json(text(array.size), {"a": array})
