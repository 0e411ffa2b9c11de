"""``bascule demo``."""

from __future__ import annotations

import importlib

import typer

__all__ = ["CONTEXT", "demo"]

# What follows is for the demo, which has a help of its own.
CONTEXT = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "help_option_names": [],
}


def demo(context: typer.Context) -> None:
    """Move a real model's weights on this machine, and watch it."""
    try:
        run = importlib.import_module("bascule.demo").main
    except ImportError as error:
        typer.echo(f"The demo needs more packages: pip install 'bascule[demo]' ({error})", err=True)
        raise typer.Exit(code=1) from error
    raise typer.Exit(code=run(context.args))
