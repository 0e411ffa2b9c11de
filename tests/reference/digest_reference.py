"""The digest formula of docs/protocol.md in numpy, written apart from the C++ code.

``python tests/reference/digest_reference.py`` prints the golden cases of
``tests/digest/digest_test.cc``, one a line: ``name first count bytes seed -> digest``. Elements are
the output of SplitMix64 seeded with ``seed``, 8 bytes little-endian each, cut to
``count * bytes`` bytes.
"""

from __future__ import annotations

import argparse
import sys

import numpy as np
import numpy.typing as npt

MASK = (1 << 64) - 1
GOLDEN_GAMMA = 0x9E3779B97F4A7C15
LANE_SEED = 0x42617363756C6531
BLOCK_WORDS = 512

CASES: list[tuple[str, int, int, int, int]] = [
    ("model.embed_tokens.weight", 0, 1, 2, 1),
    ("model.embed_tokens.weight", 1, 1, 2, 2),
    ("model.embed_tokens.weight", 0, 1024, 2, 3),
    ("model.embed_tokens.weight", 1023, 3, 2, 4),
    ("model.layers.0.mlp.down_proj.weight", 777, 5000, 2, 5),
    ("model.layers.0.mlp.down_proj.weight", 4294967295, 4099, 2, 6),
    ("lm_head.weight", 0, 512, 4, 7),
    ("lm_head.weight", 511, 1537, 4, 8),
    ("lm_head.weight", 123456789, 10000, 4, 9),
    ("scale", 0, 2048, 1, 10),
    ("scale", 2047, 2, 1, 11),
    ("scale", 3, 6001, 1, 12),
    ("tokens", 255, 3000, 8, 13),
    ("", 1099511627776, 100, 8, 14),
    ("модель", 5, 70000, 2, 15),
]


def mix64(value: int) -> int:
    """Finalize one SplitMix64 state."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def split_mix(seed: int, count: int) -> list[int]:
    """Return the first outputs of SplitMix64."""
    return [mix64((seed + (i + 1) * GOLDEN_GAMMA) & MASK) for i in range(count)]


def lane_keys() -> npt.NDArray[np.uint64]:
    """Return the table P: distinct, odd, 32 bits."""
    keys: dict[int, None] = {}
    index = 0
    while len(keys) < BLOCK_WORDS:
        keys.setdefault((mix64((LANE_SEED + (index + 1) * GOLDEN_GAMMA) & MASK) >> 32) | 1)
        index += 1
    return np.array(list(keys), dtype=np.uint64)


def tensor_key(name: str) -> int:
    """Return FNV-1a 64 of the name."""
    value = 0xCBF29CE484222325
    for byte in name.encode():
        value = ((value ^ byte) * 0x100000001B3) & MASK
    return value


def digest(data: bytes, first: int, element_bytes: int, name: str) -> int:
    """Digest consecutive elements of a tensor.

    Parameters
    ----------
    data
        The elements' codes, little-endian.
    first
        Index of the first of them in the tensor, row-major.
    element_bytes
        Bytes of one element.
    name
        The tensor's name.

    Returns
    -------
    int
        D, modulo 2**64.
    """
    start = first * element_bytes
    first_block = start // (4 * BLOCK_WORDS)
    lead = start - first_block * 4 * BLOCK_WORDS
    padded = bytes(lead) + data
    padded += bytes(-len(padded) % (4 * BLOCK_WORDS))
    words = np.frombuffer(padded, dtype="<u4").astype(np.uint64).reshape(-1, BLOCK_WORDS)
    sums = (words * lane_keys()).sum(axis=1, dtype=np.uint64)
    key = tensor_key(name)
    total = 0
    for index, block_sum in enumerate(sums.tolist()):
        block = first_block + index
        block_key = mix64((key + (block + 1) * GOLDEN_GAMMA) & MASK) | 1
        total = (total + block_key * block_sum) & MASK
    return total


def case_data(count: int, element_bytes: int, seed: int) -> bytes:
    """Return the elements of a golden case."""
    size = count * element_bytes
    return b"".join(v.to_bytes(8, "little") for v in split_mix(seed, (size + 7) // 8))[:size]


def main() -> int:
    """Print the golden cases."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cpp", action="store_true", help="as rows of the C++ test's table")
    options = parser.parse_args()
    for name, first, count, element_bytes, seed in CASES:
        value = digest(case_data(count, element_bytes, seed), first, element_bytes, name)
        if options.cpp:
            print(f'    {{"{name}", {first}, {count}, {element_bytes}, {seed}, 0x{value:016X}}},')
        else:
            print(f"{name} {first} {count} {element_bytes} {seed} -> 0x{value:016X}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
