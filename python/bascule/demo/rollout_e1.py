"""Engine e1: one rank, the plain names of the checkpoint, a float32 module that writes text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import bascule
from bascule.demo import check
from bascule.demo.rollout import Followed, Rollout
from bascule.integrations.torch import layout_of

__all__ = ["PlainRank"]


class PlainRank(Rollout):
    """The rank of e1.

    Parameters
    ----------
    job
        Where the library meets the other ranks.
    model
        Folder of the checkpoint, of which only the configuration is read.
    prompt
        Tokens that its texts begin with.
    seed
        Of the random weights that it starts with.
    """

    def __init__(self, job: bascule.Job, model: Path, prompt: list[int], seed: int) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(seed)
        self._model: Any = LlamaForCausalLM(LlamaConfig.from_pretrained(model)).eval()
        self._prompt = torch.tensor([prompt])
        super().__init__(self.connect(job, "e1", 0, 1, layout_of(self._model)))

    def follow(self, new_tokens: int) -> Followed | None:
        """Move to the newest version, writing on with the old one while it lands."""
        writer: bascule.VersionId | str = ""
        tokens: list[int] = []

        def write() -> None:
            nonlocal writer, tokens
            serving = self.serving()
            if serving is None:
                writer = self.why_not_servable() or ""
            else:
                writer, tokens = serving, self.generate(new_tokens)

        report = self.update(meanwhile=write)
        return None if report is None else Followed(report, writer, tokens)

    def generate(self, new_tokens: int) -> list[int]:
        """Continue the prompt, always with the likeliest token."""
        with torch.inference_mode():
            tokens = self._model.generate(
                self._prompt,
                attention_mask=torch.ones_like(self._prompt),
                max_new_tokens=new_tokens,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        return [int(token) for token in tokens[0, self._prompt.shape[1] :]]

    def wrong_parameters(self, reference: Path) -> list[str]:
        """Compare the live parameters with the trainers' state dict, in place."""
        state = torch.load(reference, mmap=True)
        return check.wrong_in_module(dict(self._model.state_dict()), state)

    def logits(self) -> npt.NDArray[np.float32]:
        """Return the logits of the live module for the prompt."""
        with torch.inference_mode():
            logits: npt.NDArray[np.float32] = self._model(self._prompt).logits.numpy()
            return logits
