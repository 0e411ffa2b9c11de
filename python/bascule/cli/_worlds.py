"""Worlds of models from short descriptions such as ``fsdp:64`` and ``tp:8,engines:4``.

They are written in the declared form of docs/layout-json.md.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import typer

from bascule.cli._models import Model, Tensor

__all__ = ["Rollout", "Trainer"]

_PAIR = re.compile(r"([a-z]+):([0-9]+)(?:x([0-9]+))?")

Placements = dict[str, Any]


def _parse(option: str, text: str, known: str) -> dict[str, tuple[int, ...]]:
    """Return the sizes of a description, by the words before the colons."""
    found: dict[str, tuple[int, ...]] = {}
    for part in text.split(","):
        match = _PAIR.fullmatch(part.strip())
        word = match[1] if match else ""
        if match is None or word not in known.split() or (word == "hsdp") != bool(match[3]):
            raise typer.BadParameter(
                f"{option} {text!r}: {part.strip()!r} is none of "
                + ", ".join(f"{word}:{'RxS' if word == 'hsdp' else 'N'}" for word in known.split())
            )
        if word in found:
            raise typer.BadParameter(f"{option} {text!r} has {word} twice")
        sizes = tuple(int(size) for size in match.groups()[1:] if size)
        if min(sizes) < 1:
            raise typer.BadParameter(f"{option} {text!r}: {word} must be at least 1")
        found[word] = sizes
    return found


def _stage(model: Model, tensor: Tensor, stages: int) -> int:
    """Layers are spread evenly; what comes before and behind them is with the first and last."""
    if tensor.layer is None:
        return stages - 1
    return max(0, tensor.layer) * stages // model.layers


def _check_stages(option: str, text: str, model: Model, stages: int) -> None:
    if stages > model.layers:
        raise typer.BadParameter(
            f"{option} {text!r}: {model.name} has {model.layers} layers, fewer than pp"
        )


def _check_experts(option: str, text: str, model: Model, ranks: int) -> None:
    if ranks > 1 and not model.experts:
        raise typer.BadParameter(f"{option} {text!r}: {model.name} has no routed experts for ep")
    if ranks > 1 and model.experts % ranks:
        raise typer.BadParameter(
            f"{option} {text!r}: {model.name} has {model.experts} routed experts, which ep does "
            "not divide"
        )


def _entry(tensor: Tensor, dtype: str, placements: Placements) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": tensor.name, "shape": tensor.shape, "dtype": dtype}
    if placements:
        entry["placements"] = placements
    return entry


def _document(axes: Mapping[str, int], **rest: Any) -> str:
    mesh = [{"axis": axis, "size": size} for axis, size in axes.items()]
    return json.dumps({"bascule_world": 1, "mesh": mesh, **rest}, separators=(",", ":"))


@dataclass(frozen=True)
class Trainer:
    """How trainers hold a model.

    Parameters
    ----------
    text
        The description.
    replicas, shards
        FSDP: every parameter is cut in dimension 0 over the shards of each replica.
    flat
        FSDP1: a layer is one buffer, cut at any element.
    tp, ep, pp
        Tensor parallel, expert parallel and pipeline parallel ranks inside of them.
    """

    text: str
    replicas: int = 1
    shards: int = 1
    flat: bool = False
    tp: int = 1
    ep: int = 1
    pp: int = 1

    @classmethod
    def parse(cls, text: str) -> Trainer:
        """Read ``fsdp:N``, ``hsdp:RxS`` or ``flat:N``, with ``tp``, ``ep`` and ``pp``.

        Parameters
        ----------
        text
            The description.
        """
        found = _parse("--trainer", text, "fsdp hsdp flat tp ep pp")
        if sum(word in found for word in ("fsdp", "hsdp", "flat")) > 1:
            raise typer.BadParameter(f"--trainer {text!r}: fsdp, hsdp and flat exclude each other")
        if "flat" in found and len(found) > 1:
            raise typer.BadParameter(f"--trainer {text!r}: flat goes with nothing else")
        replicas, shards = found.get("hsdp", (1, 1))
        shards = found.get("fsdp", found.get("flat", (shards,)))[0]
        tp, ep, pp = (found.get(word, (1,))[0] for word in ("tp", "ep", "pp"))
        if tp > 1 and ep > 1:
            raise typer.BadParameter(f"--trainer {text!r}: tp and ep exclude each other")
        if shards % ep:
            raise typer.BadParameter(f"--trainer {text!r}: ep must divide the shards")
        return cls(text, replicas, shards, "flat" in found, tp, ep, pp)

    @property
    def axes(self) -> dict[str, int]:
        """The mesh; the last axis is the fastest."""
        return {
            "pp": self.pp,
            "replica": self.replicas,
            "shard": self.shards // self.ep,
            "ep": self.ep,
            "tp": self.tp,
        }

    @property
    def ranks(self) -> int:
        """How many trainers there are."""
        return math.prod(self.axes.values())

    def world(self, model: Model, dtype: str) -> str:
        """Return the world as JSON.

        Parameters
        ----------
        model
            What they hold.
        dtype
            What they publish.
        """
        _check_stages("--trainer", self.text, model, self.pp)
        _check_experts("--trainer", self.text, model, self.ep)
        if self.flat:
            layers = itertools.groupby(model.tensors, key=lambda tensor: tensor.layer)
            flat = [
                {"axes": ["shard"], "tensors": [_entry(tensor, dtype, {}) for tensor in tensors]}
                for _, tensors in layers
            ]
            return _document({"shard": self.shards}, flat=flat)
        tensors = [_entry(tensor, dtype, self._places(model, tensor)) for tensor in model.tensors]
        return _document(self.axes, tensors=tensors)

    def _places(self, model: Model, tensor: Tensor) -> Placements:
        places: Placements = {"shard": {"shard": 0}}
        if tensor.expert is not None and self.ep > 1:
            places["ep"] = {"at": [tensor.expert * self.ep // model.experts]}
        elif tensor.stacked and self.ep > 1:
            # Whole experts to each rank; those of the same experts cut what is inside.
            places = {"ep": {"shard": 0}, "shard": {"shard": 1}}
        elif self.ep > 1:
            places["ep"] = {"shard": 0}
        if tensor.cut is not None and self.tp > 1:
            places["tp"] = {"shard": tensor.cut}
            if tensor.cut == 0:
                # FSDP cuts what tensor parallelism has left: DTensor's _StridedShard.
                places["shard"] = {"strided_shard": 0, "split_factor": self.tp}
        if self.pp > 1:
            places["pp"] = {"at": [_stage(model, tensor, self.pp)]}
        return places


@dataclass(frozen=True)
class Rollout:
    """How engines hold a model.

    Parameters
    ----------
    text
        The description.
    engines
        How many there are.
    tp
        Ranks that cut the dense parts, and the routed experts where there is no ep.
    ep
        Ranks with whole routed experts; dense parts are replicated ep / tp times.
    pp
        Pipeline stages of an engine.
    """

    text: str
    engines: int = 1
    tp: int = 1
    ep: int = 1
    pp: int = 1

    @classmethod
    def parse(cls, text: str) -> Rollout:
        """Read ``tp:N``, ``ep:N``, ``pp:N`` and ``engines:N``.

        Parameters
        ----------
        text
            The description.
        """
        found = _parse("--rollout", text, "tp ep pp engines")
        sizes = {word: sizes[0] for word, sizes in found.items()}
        rollout = cls(text, **sizes)
        if rollout.ep > 1 and rollout.ep % rollout.tp:
            raise typer.BadParameter(f"--rollout {text!r}: tp must divide ep")
        return rollout

    @property
    def axes(self) -> dict[str, int]:
        """The mesh of one engine; the last axis is the fastest."""
        return {"pp": self.pp, "dp": max(1, self.ep // self.tp), "tp": self.tp}

    @property
    def ranks(self) -> int:
        """How many ranks an engine has."""
        return math.prod(self.axes.values())

    def world(self, model: Model, dtype: str) -> str:
        """Return the world of one engine as JSON.

        Parameters
        ----------
        model
            What it holds.
        dtype
            Of its weights.
        """
        _check_stages("--rollout", self.text, model, self.pp)
        _check_experts("--rollout", self.text, model, self.ep)
        tensors = [_entry(tensor, dtype, self._places(model, tensor)) for tensor in model.tensors]
        return _document(self.axes, tensors=tensors)

    def _places(self, model: Model, tensor: Tensor) -> Placements:
        places: Placements = {}
        if tensor.expert is not None and self.ep > 1:
            rank = tensor.expert * self.ep // model.experts
            places = {"dp": {"at": [rank // self.tp]}, "tp": {"at": [rank % self.tp]}}
        elif tensor.stacked and self.ep > 1:
            places = {"dp": {"shard": 0}, "tp": {"shard": 0}}
        elif tensor.heads is not None:
            places = {"tp": {"shard": 0, "parts": tensor.heads}}
        elif tensor.cut is not None:
            places = {"tp": {"shard": tensor.cut}}
        if self.pp > 1:
            places["pp"] = {"at": [_stage(model, tensor, self.pp)]}
        return places
