from __future__ import annotations

import pickle

import numpy as np
import pytest

import bascule
from bascule import errors


def test_every_code_has_a_class_of_its_own() -> None:
    classes = [getattr(errors, name) for name in errors.__all__ if name != "Error"]
    assert len({cls.code for cls in classes}) == len(classes) == 20
    for cls in classes:
        assert issubclass(cls, bascule.Error)
        assert getattr(bascule, cls.__name__) is cls
        assert type(errors.from_fields(cls.code, "m", -1, "", "")) is cls


def test_errors_are_the_builtin_ones_that_callers_catch() -> None:
    assert issubclass(bascule.DeadlineExceeded, TimeoutError)
    assert issubclass(bascule.Unavailable, ConnectionError)
    assert issubclass(bascule.InvalidArgument, ValueError)
    assert issubclass(bascule.PermissionDenied, PermissionError)


def test_fields_and_message() -> None:
    error = errors.from_fields("DATA_LOSS", "sum differs", 3, "trainer 1", "model.norm.weight")
    assert isinstance(error, bascule.DataLoss)
    assert (error.message, error.rank, error.peer) == ("sum differs", 3, "trainer 1")
    assert (error.tensor, error.code) == ("model.norm.weight", "DATA_LOSS")
    assert str(error) == "sum differs [rank 3, peer trainer 1, tensor model.norm.weight]"
    bare = errors.from_fields("BUSY", "in use", -1, "", "")
    assert (bare.rank, bare.peer, bare.tensor, str(bare)) == (None, None, None, "in use")
    assert type(errors.from_fields("LATER_CODE", "m", -1, "", "")) is bascule.Internal


@pytest.mark.parametrize("cls", [bascule.DataLoss, bascule.DeadlineExceeded, bascule.Unavailable])
def test_errors_survive_pickling(cls: type[bascule.Error]) -> None:
    again = pickle.loads(pickle.dumps(cls("m", rank=0, peer="p", tensor="t")))
    assert type(again) is cls
    assert (again.message, again.rank, again.peer, again.tensor) == ("m", 0, "p", "t")


def test_the_core_raises_them_with_the_tensor() -> None:
    array = np.zeros(4, np.float32)
    layout = bascule.Layout.from_arrays({"w": array}, publish_dtype="bf16")
    with pytest.raises(bascule.InvalidArgument, match="BF16") as caught:
        layout.check_destination_coverage()
    assert caught.value.tensor == "w"
