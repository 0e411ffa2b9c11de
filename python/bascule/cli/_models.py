"""Tensors of published checkpoints, from what their ``config.json`` says.

models.json has the fields that fix shapes, by the names of Hugging Face's configurations. Layers
for multi-token prediction beyond ``num_hidden_layers`` are left out, and a quantized checkpoint
counts as the bf16 one that it was made of.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

import typer

__all__ = ["Model", "Tensor", "known_models", "load_model"]


@dataclass(frozen=True)
class Tensor:
    """One tensor of a checkpoint.

    Attributes
    ----------
    name, shape
        Its own.
    cut
        The dimension that tensor parallelism cuts; None: on every rank.
    heads
        The cut is by as many heads, which ranks may share.
    layer
        Its number; -1 before the first layer, None behind the last.
    expert
        Of routed experts: its number.
    stacked
        Dimension 0 is the routed experts.
    """

    name: str
    shape: tuple[int, ...]
    cut: int | None = None
    heads: int | None = None
    layer: int | None = None
    expert: int | None = None
    stacked: bool = False


@dataclass(frozen=True)
class Model:
    """A checkpoint.

    Attributes
    ----------
    name
        Of the model.
    layers, experts
        How many there are; the routed ones.
    tensors
        All of them.
    """

    name: str
    layers: int
    experts: int
    tensors: tuple[Tensor, ...]

    @property
    def elements(self) -> int:
        """How many numbers it has."""
        total = 0
        for tensor in self.tensors:
            elements = 1
            for extent in tensor.shape:
                elements *= extent
            total += elements
        return total


def known_models() -> dict[str, dict[str, Any]]:
    """Return the configurations that come with the package, by name."""
    text = resources.files(__package__).joinpath("models.json").read_text()
    models: dict[str, dict[str, Any]] = json.loads(text)
    return models


def load_model(name: str) -> Model:
    """Return a model that comes with the package, or that of a ``config.json``.

    Parameters
    ----------
    name
        Of a known model, or a path.
    """
    known = known_models()
    if name in known:
        return make_model(name, known[name])
    path = Path(name)
    if path.is_dir():
        path /= "config.json"
    if not path.is_file():
        raise typer.BadParameter(
            f"there is no model {name} here and no such file; known: {', '.join(known)}"
        )
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise typer.BadParameter(f"{path} is no JSON: {error}") from error
    if not isinstance(config, dict):
        raise typer.BadParameter(f"{path} is no configuration")
    # Models that also see or hear keep what the text part needs apart.
    return make_model(str(path), config.get("text_config", config))


def make_model(name: str, config: Mapping[str, Any]) -> Model:
    """Return the tensors that a configuration describes.

    Parameters
    ----------
    name
        For messages.
    config
        As in ``config.json``.
    """
    family = config.get("model_type")
    if family not in _FAMILIES:
        raise typer.BadParameter(
            f"{name}: no shapes of model_type {family} here; known: {', '.join(sorted(_FAMILIES))}."
            " Any other model can be planned from two files of worlds: see docs/layout-json.md"
        )
    try:
        return _FAMILIES[family](name, dict(config)).make()
    except KeyError as error:
        raise typer.BadParameter(f"{name}: the configuration lacks {error}") from error


class _Family:
    """A decoder with grouped-query attention and gated MLPs: Llama and what followed it."""

    attention_bias = False  # of q, k and v where the configuration does not say
    head_norms = False

    def __init__(self, name: str, config: dict[str, Any]) -> None:
        self.name = name
        self.config = config
        self.hidden: int = config["hidden_size"]
        self.layers: int = config["num_hidden_layers"]
        self.vocabulary: int = config["vocab_size"]
        self.experts = 0

    def make(self) -> Model:
        first = Tensor("model.embed_tokens.weight", (self.vocabulary, self.hidden), 0, layer=-1)
        tensors = [first]
        for layer in range(self.layers):
            for tensor in self.layer(layer):
                name = f"model.layers.{layer}.{tensor.name}"
                tensors.append(replace(tensor, name=name, layer=layer))
        tensors.append(Tensor("model.norm.weight", (self.hidden,)))
        if not self.config.get("tie_word_embeddings", False):
            tensors.append(Tensor("lm_head.weight", (self.vocabulary, self.hidden), 0))
        return Model(self.name, self.layers, self.experts, tuple(tensors))

    def layer(self, number: int) -> Iterator[Tensor]:
        yield from self.attention(number)
        yield Tensor("input_layernorm.weight", (self.hidden,))
        yield Tensor("post_attention_layernorm.weight", (self.hidden,))
        yield from self.mlp(number)

    def attention(self, number: int) -> Iterator[Tensor]:
        del number
        heads: int = self.config["num_attention_heads"]
        kv_heads: int = self.config.get("num_key_value_heads") or heads
        size: int = self.config.get("head_dim") or self.hidden // heads
        biased = self.config.get("attention_bias", self.attention_bias)
        for name, rows, by in (
            ("q", heads * size * self.query_parts, None),
            ("k", kv_heads * size, kv_heads),
            ("v", kv_heads * size, kv_heads),
        ):
            yield Tensor(f"self_attn.{name}_proj.weight", (rows, self.hidden), 0, by)
            if biased:
                yield Tensor(f"self_attn.{name}_proj.bias", (rows,), 0, by)
        yield Tensor("self_attn.o_proj.weight", (self.hidden, heads * size), 1)
        if self.output_bias:
            yield Tensor("self_attn.o_proj.bias", (self.hidden,))
        if self.config.get("use_qk_norm", self.head_norms):
            yield Tensor("self_attn.q_norm.weight", (size,))
            yield Tensor("self_attn.k_norm.weight", (size,))

    query_parts = 1  # 2: a gate beside each query

    @property
    def output_bias(self) -> bool:
        return bool(self.config.get("attention_bias", False))

    def mlp(self, number: int) -> Iterator[Tensor]:
        del number
        yield from self.gated("mlp.", self.config["intermediate_size"])

    def gated(self, prefix: str, inner: int, expert: int | None = None) -> Iterator[Tensor]:
        for name in ("gate", "up"):
            shape = (inner, self.hidden)
            yield Tensor(f"{prefix}{name}_proj.weight", shape, 0, expert=expert)
        shape = (self.hidden, inner)
        yield Tensor(f"{prefix}down_proj.weight", shape, 1, expert=expert)


class _Qwen2(_Family):
    attention_bias = True
    output_bias = False


class _Qwen3(_Family):
    head_norms = True


class _Mixtral(_Family):
    def mlp(self, number: int) -> Iterator[Tensor]:
        del number
        self.experts = self.config["num_local_experts"]
        inner: int = self.config["intermediate_size"]
        prefix = "block_sparse_moe."
        yield Tensor(f"{prefix}gate.weight", (self.experts, self.hidden))
        for expert in range(self.experts):
            for name, shape, cut in (
                ("w1", (inner, self.hidden), 0),
                ("w2", (self.hidden, inner), 1),
                ("w3", (inner, self.hidden), 0),
            ):
                yield Tensor(f"{prefix}experts.{expert}.{name}.weight", shape, cut, expert=expert)


class _Qwen3Moe(_Qwen3):
    def mlp(self, number: int) -> Iterator[Tensor]:
        step: int = self.config.get("decoder_sparse_step", 1)
        if number in self.config.get("mlp_only_layers", ()) or (number + 1) % step:
            yield from self.gated("mlp.", self.config["intermediate_size"])
            return
        # Newer configurations have the second name.
        self.experts = self.config.get("num_experts") or self.config["num_local_experts"]
        yield Tensor("mlp.gate.weight", (self.experts, self.hidden))
        for expert in range(self.experts):
            inner = self.config["moe_intermediate_size"]
            yield from self.gated(f"mlp.experts.{expert}.", inner, expert)


class _Qwen3Next(_Qwen3Moe):
    """Three of four layers are linear attention.

    Its projections are cut by groups of heads; the convolution, a thousandth of a layer, counts
    as whole on every rank.
    """

    query_parts = 2

    def attention(self, number: int) -> Iterator[Tensor]:
        kinds = self.config.get("layer_types")
        interval = self.config.get("full_attention_interval", 4)
        full = kinds[number] == "full_attention" if kinds else (number + 1) % interval == 0
        if full:
            yield from super().attention(number)
            return
        keys: int = self.config["linear_num_key_heads"]
        values: int = self.config["linear_num_value_heads"]
        value_size: int = self.config["linear_value_head_dim"]
        key_rows = keys * self.config["linear_key_head_dim"]
        value_rows = values * value_size
        prefix = "linear_attn."
        channels = 2 * key_rows + value_rows
        yield Tensor(f"{prefix}A_log", (values,), 0)
        yield Tensor(f"{prefix}conv1d.weight", (channels, 1, self.config["linear_conv_kernel_dim"]))
        yield Tensor(f"{prefix}dt_bias", (values,), 0)
        yield Tensor(f"{prefix}in_proj_ba.weight", (2 * values, self.hidden), 0)
        rows = 2 * key_rows + 2 * value_rows
        yield Tensor(f"{prefix}in_proj_qkvz.weight", (rows, self.hidden), 0)
        yield Tensor(f"{prefix}norm.weight", (value_size,))
        yield Tensor(f"{prefix}out_proj.weight", (self.hidden, value_rows), 1)

    def mlp(self, number: int) -> Iterator[Tensor]:
        yield from super().mlp(number)
        yield from self.gated("mlp.shared_expert.", self.config["shared_expert_intermediate_size"])
        yield Tensor("mlp.shared_expert_gate.weight", (1, self.hidden))


class _SharedExperts(_Family):
    """Dense layers first, then routed experts beside shared ones."""

    def mlp(self, number: int) -> Iterator[Tensor]:
        if number < self.config["first_k_dense_replace"]:
            yield from self.gated("mlp.", self.config["intermediate_size"])
            return
        self.experts = self.config["n_routed_experts"]
        inner: int = self.config["moe_intermediate_size"]
        yield Tensor("mlp.gate.weight", (self.experts, self.hidden))
        yield Tensor("mlp.gate.e_score_correction_bias", (self.experts,))
        yield from self.gated("mlp.shared_experts.", inner * self.config["n_shared_experts"])
        for expert in range(self.experts):
            yield from self.gated(f"mlp.experts.{expert}.", inner, expert)


class _Glm4Moe(_SharedExperts):
    output_bias = False


class _Latent(_SharedExperts):
    """Multi-head latent attention of DeepSeek-V3."""

    def attention(self, number: int) -> Iterator[Tensor]:
        del number
        config = self.config
        heads: int = config["num_attention_heads"]
        rope: int = config["qk_rope_head_dim"]
        nope: int = config["qk_nope_head_dim"]
        value: int = config["v_head_dim"]
        kv_rank: int = config["kv_lora_rank"]
        q_rank: int = config["q_lora_rank"]
        prefix = "self_attn."
        yield Tensor(f"{prefix}q_a_proj.weight", (q_rank, self.hidden))
        yield Tensor(f"{prefix}q_a_layernorm.weight", (q_rank,))
        yield Tensor(f"{prefix}q_b_proj.weight", (heads * (nope + rope), q_rank), 0)
        yield Tensor(f"{prefix}kv_a_proj_with_mqa.weight", (kv_rank + rope, self.hidden))
        yield Tensor(f"{prefix}kv_a_layernorm.weight", (kv_rank,))
        yield Tensor(f"{prefix}kv_b_proj.weight", (heads * (nope + value), kv_rank), 0)
        yield Tensor(f"{prefix}o_proj.weight", (self.hidden, heads * value), 1)


class _SparseLatent(_Latent):
    """With the indexer that picks what is attended to; every rank has all of it."""

    def attention(self, number: int) -> Iterator[Tensor]:
        yield from super().attention(number)
        heads: int = self.config["index_n_heads"]
        size: int = self.config["index_head_dim"]
        prefix = "self_attn.indexer."
        yield Tensor(f"{prefix}wq_b.weight", (heads * size, self.config["q_lora_rank"]))
        yield Tensor(f"{prefix}wk.weight", (size, self.hidden))
        yield Tensor(f"{prefix}k_norm.weight", (size,))
        yield Tensor(f"{prefix}k_norm.bias", (size,))
        yield Tensor(f"{prefix}weights_proj.weight", (heads, self.hidden))


class _GptOss(_Family):
    """Stacked experts with biases, and attention sinks."""

    attention_bias = True
    output_bias = True

    def attention(self, number: int) -> Iterator[Tensor]:
        yield from super().attention(number)
        yield Tensor("self_attn.sinks", (self.config["num_attention_heads"],), 0)

    def mlp(self, number: int) -> Iterator[Tensor]:
        del number
        self.experts = self.config["num_local_experts"]
        count, hidden = self.experts, self.hidden
        inner: int = self.config["intermediate_size"]
        yield Tensor("mlp.router.weight", (count, hidden))
        yield Tensor("mlp.router.bias", (count,))
        for name, shape, cut in (
            ("gate_up_proj", (count, hidden, 2 * inner), 2),
            ("gate_up_proj_bias", (count, 2 * inner), 1),
            ("down_proj", (count, inner, hidden), 1),
            ("down_proj_bias", (count, hidden), None),
        ):
            yield Tensor(f"mlp.experts.{name}", shape, cut, stacked=True)


_FAMILIES: dict[str, Callable[[str, dict[str, Any]], _Family]] = {
    "deepseek_v3": _Latent,
    "glm4_moe": _Glm4Moe,
    "glm_moe_dsa": _SparseLatent,
    "gpt_oss": _GptOss,
    "kimi_k2": _Latent,
    "llama": _Family,
    "mistral": _Family,
    "mixtral": _Mixtral,
    "qwen2": _Qwen2,
    "qwen3": _Qwen3,
    "qwen3_moe": _Qwen3Moe,
    "qwen3_next": _Qwen3Next,
}
