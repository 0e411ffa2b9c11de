"""Engine e1: one rank, the plain names of the checkpoint, a float32 module that writes text."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
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
        self._model = _random_module(model).eval()
        self._prompt = torch.tensor([prompt])
        self._text = self._continue_prompt()
        super().__init__(self.connect(job, "e1", 0, 1, layout_of(self._model)))

    def follow(self) -> Followed | None:
        """Move to the newest version; while it lands, go on with the text of the old one."""
        written = 0

        def write() -> None:
            nonlocal written
            next(self._text)
            written += 1

        serves = self._receiver.servable
        report = self.update(meanwhile=write if serves else None)
        return None if report is None else Followed(report, written if serves else None)

    def write(self, tokens: int) -> list[int]:
        """Begin a text and return its first tokens after the prompt."""
        self._receiver.check_servable()
        self._text = self._continue_prompt()
        return list(itertools.islice(self._text, tokens))

    def _continue_prompt(self) -> Iterator[int]:
        """Write on and on, always the likeliest token."""
        tokens, cache = self._prompt, None
        while True:
            with torch.inference_mode():
                output = self._model(tokens, past_key_values=cache, use_cache=True)
            tokens, cache = output.logits[:, -1:].argmax(-1), output.past_key_values
            yield int(tokens)

    def wrong_parameters(self, reference: Path) -> list[str]:
        """Compare the live parameters with the trainers' state dict, in place."""
        state = torch.load(reference, mmap=True)
        return check.wrong_in_module(dict(self._model.state_dict()), state)

    def logits(self) -> npt.NDArray[np.float32]:
        """Return the logits of the live module for the prompt."""
        with torch.inference_mode():
            logits: npt.NDArray[np.float32] = self._model(self._prompt).logits.numpy()
            return logits


def _random_module(model: Path) -> Any:
    return LlamaForCausalLM(LlamaConfig.from_pretrained(model))
