"""The demo from end to end on a tiny model, and its checker on weights that are wrong."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bascule import demo

COMMAND = [sys.executable, "-c", "from bascule.cli import main; main()", "demo"]
needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None or importlib.util.find_spec("torch") is None,
    reason="transformers or torch is not installed (tools/setup demo)",
)


def test_help_is_that_of_the_demo() -> None:
    done = subprocess.run([*COMMAND, "--help"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    for option in ("--updates", "--model", "--device", "--quick", "--seed"):
        assert option in done.stdout
    assert demo.main(["--updates", "none"]) == 2


def test_says_what_is_not_installed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert demo.main([]) == 1
    said = capsys.readouterr().err
    assert "transformers" in said
    assert "make demo" in said


@needs_transformers
def test_updates_and_kills(tmp_path: Path) -> None:
    done = subprocess.run(
        [*COMMAND, "--model", "tiny", "--updates", "1"],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("every bit equal") == 4  # an update, and one after each kill
    for answer in ("NOT_DECIDED", "ABORTED", "UNAVAILABLE", "Everything was verified"):
        assert answer in done.stdout
    assert list(tmp_path.glob("bascule-demo-*")) == []


CONFIG = {
    "hidden_size": 12,
    "intermediate_size": 6,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "num_hidden_layers": 1,
    "vocab_size": 7,
}


@pytest.fixture
def e0() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A state dict in bf16, and what three ranks of e0 hold of it."""
    torch = pytest.importorskip("torch")
    layer = "model.layers.0."
    shapes = {
        "model.embed_tokens.weight": (7, 12),
        "model.norm.weight": (12,),
        layer + "input_layernorm.weight": (12,),
        layer + "post_attention_layernorm.weight": (12,),
        layer + "mlp.gate_proj.weight": (6, 12),
        layer + "mlp.up_proj.weight": (6, 12),
        layer + "mlp.down_proj.weight": (12, 6),
    }
    shapes |= {layer + f"self_attn.{x}_proj.weight": (12, 12) for x in "qkvo"}
    torch.manual_seed(3)
    state = {name: torch.randn(shape).bfloat16() for name, shape in shapes.items()}
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    attention, mlp = layer + "self_attn.", layer + "mlp."
    padded = torch.cat([state["model.embed_tokens.weight"], torch.zeros(2, 12).bfloat16()])

    def part(name: str, rank: int, dim: int) -> Any:
        return state[name].chunk(3, dim)[rank]

    ranks = []
    for rank in range(3):
        tensors = {
            "embed": padded.chunk(3)[rank],
            "norm": state["model.norm.weight"],
            "0.input_layernorm": state[layer + "input_layernorm.weight"],
            "0.post_attention_layernorm": state[layer + "post_attention_layernorm.weight"],
            "0.qkv": torch.cat([part(f"{attention}{x}_proj.weight", rank, 0) for x in "qkv"]),
            "0.o": part(attention + "o_proj.weight", rank, 1),
            "0.gate_up": torch.cat(
                [part(mlp + "gate_proj.weight", rank, 0), part(mlp + "up_proj.weight", rank, 0)]
            ),
            "0.down": part(mlp + "down_proj.weight", rank, 1),
        }
        ranks.append(
            {
                name: tensor.contiguous().view(torch.int16).numpy().view(np.uint16).copy()
                for name, tensor in tensors.items()
            }
        )
    return state, ranks


@needs_transformers
def test_the_checker_takes_what_is_right(e0: Any) -> None:
    from bascule.demo import check

    state, ranks = e0
    assert check.wrong_in_rebuilt(check.rebuild(CONFIG, ranks), state) == []


@needs_transformers
@pytest.mark.parametrize(
    ("name", "row", "tensor"),
    [
        ("0.qkv", 5, "model.layers.0.self_attn.k_proj.weight"),
        ("0.gate_up", 1, "model.layers.0.mlp.gate_proj.weight"),
        ("0.down", 11, "model.layers.0.mlp.down_proj.weight"),
        ("embed", 2, "padding of the vocabulary"),
        ("norm", 4, "model.norm.weight"),
    ],
)
def test_the_checker_names_what_has_one_bit_wrong(
    e0: Any, name: str, row: int, tensor: str
) -> None:
    from bascule.demo import check

    state, ranks = e0
    ranks[2][name][row, ...].flat[0] ^= 1
    assert check.wrong_in_rebuilt(check.rebuild(CONFIG, ranks), state) == [tensor]


@needs_transformers
def test_the_checker_compares_float32_with_bf16_widened(e0: Any) -> None:
    from bascule.demo import check

    state, _ = e0
    live = {name: tensor.float() for name, tensor in state.items()}
    assert check.wrong_in_module(live, state) == []
    live["model.norm.weight"][3] = -live["model.norm.weight"][3]
    assert check.wrong_in_module(live, state) == ["model.norm.weight"]
    assert check.wrong_in_module({**state}, state) == list(state)
