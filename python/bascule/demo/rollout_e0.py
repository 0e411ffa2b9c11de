"""A rank of engine e0: tensor parallel, fused projections, bf16, a padded vocabulary.

It stands for an inference engine's worker: it has the memory of one, and does not compute. bf16 is
held in arrays of ``np.uint16``.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import bascule
from bascule.demo.rollout import Rollout
from bascule.layout import (
    Block,
    DType,
    LayoutBuilder,
    LogicalTensor,
    Mesh,
    fused_gate_up,
    fused_qkv,
    shard,
    shard_padded,
)

__all__ = ["TensorParallelRank"]


class TensorParallelRank(Rollout):
    """One rank of e0.

    Parameters
    ----------
    job
        Where the library meets the other ranks.
    rank, world_size
        Of this rank, and how many e0 has.
    config
        The model's ``config.json``.
    padded_vocabulary
        Rows of the embedding that the ranks share, the model's and padding.
    """

    def __init__(
        self,
        job: bascule.Job,
        rank: int,
        world_size: int,
        config: dict[str, Any],
        padded_vocabulary: int,
    ) -> None:
        blocks = _blocks(config, padded_vocabulary)
        builder = LayoutBuilder(Mesh(["tp"], [world_size]), [rank])
        self._arrays: dict[str, npt.NDArray[np.uint16]] = {}
        for name, block in blocks.items():
            shape = builder.local_shape(block)
            assert shape is not None
            self._arrays[name] = np.zeros(shape, np.uint16)
            builder.add(block, self._arrays[name], name=name, dtype="bf16")
        builder.add_alias("lm_head.weight", "model.embed_tokens.weight")
        super().__init__(self.connect(job, "e0", rank, world_size, builder.build()))

    def dump(self, path: Path) -> None:
        """Write the live weights as they lie, for the checker."""
        with path.open("wb") as file:
            pickle.dump(self._arrays, file, protocol=5)


def _blocks(config: dict[str, Any], padded_vocabulary: int) -> dict[str, Block]:
    """Say what e0's arrays are made of, in the names and shapes of the checkpoint."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head = config.get("head_dim") or hidden // heads

    def tensor(name: str, *shape: int) -> LogicalTensor:
        return LogicalTensor(name, list(shape), DType.BF16)

    vocabulary = tensor("model.embed_tokens.weight", config["vocab_size"], hidden)
    blocks = {"embed": Block.of(vocabulary, {"tp": shard_padded(0, padded_vocabulary)})}
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        attention, mlp = layer + "self_attn.", layer + "mlp."
        blocks |= {
            f"{i}.qkv": fused_qkv(
                tensor(attention + "q_proj.weight", heads * head, hidden),
                tensor(attention + "k_proj.weight", kv_heads * head, hidden),
                tensor(attention + "v_proj.weight", kv_heads * head, hidden),
                kv_heads,
                "tp",
            ),
            f"{i}.o": Block.of(
                tensor(attention + "o_proj.weight", hidden, heads * head), {"tp": shard(1)}
            ),
            f"{i}.gate_up": fused_gate_up(
                tensor(mlp + "gate_proj.weight", inner, hidden),
                tensor(mlp + "up_proj.weight", inner, hidden),
                {"tp": shard(0)},
            ),
            f"{i}.down": Block.of(
                tensor(mlp + "down_proj.weight", hidden, inner), {"tp": shard(1)}
            ),
        }
        for norm in ("input_layernorm", "post_attention_layernorm"):
            blocks[f"{i}.{norm}"] = Block.of(tensor(f"{layer}{norm}.weight", hidden))
    return blocks | {"norm": Block.of(tensor("model.norm.weight", hidden))}
