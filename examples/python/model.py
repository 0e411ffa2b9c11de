"""What the sender and the receiver share: the model and its values."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

KV_HEADS = 4
SHAPES = {
    "embed": (512, 256),
    "q": (256, 256),
    "k": (64, 256),
    "v": (64, 256),
    "o": (256, 256),
    "norm": (256,),
}


def values(name: str, version: int) -> npt.NDArray[np.float32]:
    """A tensor in a version: numbers below 256, so that bf16 holds them."""
    shape = SHAPES[name]
    start = version * 31 + 59 * list(SHAPES).index(name)
    return ((start + np.arange(np.prod(shape))) % 251).reshape(shape).astype(np.float32)
