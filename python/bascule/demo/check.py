"""The proof: what the engines hold is what the trainers had, bit for bit.

Nothing here knows the library: it is torch, numpy, and what one knows of Llama and how e0 cuts it.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import LlamaConfig, LlamaForCausalLM

__all__ = [
    "Arrays",
    "logits_of_fresh_model",
    "read_rank",
    "rebuild",
    "wrong_in_module",
    "wrong_in_rebuilt",
]

Arrays = Mapping[str, npt.NDArray[np.uint16]]  # of a rank of e0: the bits of bf16
State = Mapping[str, torch.Tensor]


def read_rank(path: Path) -> Arrays:
    """Read what a rank of e0 wrote down.

    Parameters
    ----------
    path
        Of the file.
    """
    with path.open("rb") as file:
        arrays: Arrays = pickle.load(file)
    return arrays


def rebuild(config: dict[str, Any], ranks: Sequence[Arrays]) -> dict[str, torch.Tensor]:
    """Take e0's fused arrays apart and join the ranks' parts to the tensors of the checkpoint.

    Parameters
    ----------
    config
        The model's ``config.json``.
    ranks
        The arrays of all ranks, in order.
    """
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head = config.get("head_dim") or config["hidden_size"] // heads
    mine = [heads * head // len(ranks), kv_heads * head // len(ranks)]  # rows of q; of k and of v
    parts = [{name: _bf16(bits) for name, bits in arrays.items()} for arrays in ranks]

    def joined(name: str, dim: int) -> torch.Tensor:
        return torch.cat([part[name] for part in parts], dim)

    def unfused(name: str, rows: Sequence[int], index: int) -> torch.Tensor:
        begin = sum(rows[:index])
        return torch.cat([part[name][begin : begin + rows[index]] for part in parts])

    state = {"model.norm.weight": _same(parts, "norm")}
    vocabulary = joined("embed", 0)
    state["model.embed_tokens.weight"] = vocabulary[: config["vocab_size"]]
    state["padding of the vocabulary"] = vocabulary[config["vocab_size"] :]
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        for index, name in enumerate(("q_proj", "k_proj", "v_proj")):
            rows = [mine[0], mine[1], mine[1]]
            state[f"{layer}self_attn.{name}.weight"] = unfused(f"{i}.qkv", rows, index)
        for index, name in enumerate(("gate_proj", "up_proj")):
            rows = [config["intermediate_size"] // len(ranks)] * 2
            state[f"{layer}mlp.{name}.weight"] = unfused(f"{i}.gate_up", rows, index)
        state[f"{layer}self_attn.o_proj.weight"] = joined(f"{i}.o", 1)
        state[f"{layer}mlp.down_proj.weight"] = joined(f"{i}.down", 1)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            state[f"{layer}{norm}.weight"] = _same(parts, f"{i}.{norm}")
    return state


def wrong_in_rebuilt(rebuilt: State, reference: State) -> list[str]:
    """Name the tensors of e0 that are not the trainers', bit for bit.

    Parameters
    ----------
    rebuilt
        By `rebuild`.
    reference
        The trainers' state dict, in bf16.
    """
    wrong = [name for name, tensor in reference.items() if not _equal_bits(rebuilt[name], tensor)]
    padding = "padding of the vocabulary"  # an engine's own: nothing may have touched it
    if rebuilt[padding].any():
        wrong.append(padding)
    return wrong + sorted(set(rebuilt) - set(reference) - {padding})


def wrong_in_module(state: State, reference: State) -> list[str]:
    """Name the float32 tensors that are not the trainers' bf16, widened.

    Parameters
    ----------
    state
        Of the module.
    reference
        The trainers' state dict, in bf16.
    """
    wrong = [
        name for name, tensor in reference.items() if not _equal_bits(state[name], tensor.float())
    ]
    return wrong + sorted(set(state) - set(reference))


def logits_of_fresh_model(model: Path, reference: State, prompt: Sequence[int]) -> torch.Tensor:
    """Return the logits of a model that is built from the trainers' state dict alone.

    Parameters
    ----------
    model
        Folder of the checkpoint, of which only the configuration is read.
    reference
        The trainers' state dict, in bf16.
    prompt
        Tokens.
    """
    fresh: Any = LlamaForCausalLM.from_pretrained(
        None,
        config=LlamaConfig.from_pretrained(model),
        state_dict={name: tensor.float() for name, tensor in reference.items()},
        dtype=torch.float32,
    )
    with torch.inference_mode():
        return torch.Tensor(fresh.eval()(torch.tensor([list(prompt)])).logits)


def _bf16(bits: npt.NDArray[np.uint16]) -> torch.Tensor:
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)


def _same(parts: Sequence[State], name: str) -> torch.Tensor:
    """Return a tensor that every rank has whole; one that differs anywhere is NaN there."""
    whole = parts[0][name].clone()
    for part in parts[1:]:
        whole[part[name].view(torch.int16) != whole.view(torch.int16)] = torch.nan
    return whole


def _equal_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Unlike ``torch.equal``, this tells -0 from 0 and takes a NaN for itself."""
    integer = {2: torch.int16, 4: torch.int32}[b.element_size()]
    return a.dtype == b.dtype and torch.equal(
        a.contiguous().view(integer), b.contiguous().view(integer)
    )
