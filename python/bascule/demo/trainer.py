"""A trainer rank: FSDP2 on the CPU, fp32 masters, AdamW; it publishes in bf16."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import LlamaForCausalLM

import bascule
from bascule.integrations.torch import layout_of

__all__ = ["Trainer"]


class Trainer:
    """One rank of the trainer world.

    Parameters
    ----------
    job
        Where the library meets the other ranks.
    rank, world_size
        Of this rank, and how many there are.
    model
        Folder of the checkpoint to start from.
    tokens
        The text of this rank.
    rendezvous
        A file, new for each life of the trainer world.
    resume
        Folder written by `save`, if this is not the first life.
    """

    def __init__(
        self,
        job: bascule.Job,
        rank: int,
        world_size: int,
        model: Path,
        tokens: list[int],
        learning_rate: float,
        rendezvous: Path,
        resume: Path | None,
    ) -> None:
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{rendezvous}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=120),
        )
        self._rank = rank
        self._tokens = torch.tensor([tokens])
        self._model = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32)
        mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("fsdp",))
        for layer in self._model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self._model, mesh=mesh)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=learning_rate)
        if resume is not None:
            self._load(resume)
        self._publication: bascule.Publication | None = None
        self._sender = bascule.WeightSender.connect(
            job,
            rank=rank,
            world_size=world_size,
            layout=layout_of(self._model, publish_dtype="bf16"),
        )

    def step(self) -> float:
        """Train one step on the rank's text and return the loss, the mean of all ranks."""
        self._optimizer.zero_grad()
        loss = self._model(input_ids=self._tokens, labels=self._tokens, use_cache=False).loss
        loss.backward()
        self._optimizer.step()
        mean = loss.detach()
        dist.all_reduce(mean)
        return float(mean) / dist.get_world_size()

    def publish(self, version: int) -> bascule.Report:
        """Publish the weights as they are now. They may change when it returns."""
        self._publication = self._sender.publish(version)
        return self._publication.report()

    def wait_available(self, timeout: float) -> bascule.VersionId:
        """Wait until all ranks have published, so that engines are offered the version."""
        assert self._publication is not None
        self._publication.wait(timeout=timeout)
        return self._publication.id

    def dump(self, path: Path) -> None:
        """Write the whole model, rounded to bf16, for the checker: torch alone does it."""
        whole: dict[str, torch.Tensor] = {}
        for name, tensor in self._model.state_dict().items():
            full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if self._rank == 0:
                whole[name] = full.to(torch.bfloat16)
        if self._rank == 0:
            torch.save(whole, path)

    def save(self, path: Path) -> None:
        """Write a checkpoint: weights and optimizer, each rank its shards."""
        model, optimizer = get_state_dict(self._model, self._optimizer)
        save({"model": model, "optimizer": optimizer}, checkpoint_id=path)

    def _load(self, path: Path) -> None:
        model, optimizer = get_state_dict(self._model, self._optimizer)
        load({"model": model, "optimizer": optimizer}, checkpoint_id=path)
        set_state_dict(
            self._model, self._optimizer, model_state_dict=model, optim_state_dict=optimizer
        )
