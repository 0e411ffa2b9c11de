"""The ``bascule`` command."""

from __future__ import annotations

import importlib
import signal
import threading
from pathlib import Path
from typing import Annotated

import typer

import bascule

app = typer.Typer(
    name="bascule",
    help="Move policy weights from trainers to rollout engines.",
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"bascule {bascule.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print it."),
    ] = False,
) -> None:
    del version


@app.command(
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "help_option_names": [],  # the demo has a help of its own
    }
)
def demo(context: typer.Context) -> None:
    """Move a real model's weights on this machine, and watch it."""
    try:
        run = importlib.import_module("bascule.demo").main
    except ImportError as error:
        typer.echo(f"The demo needs more packages: pip install 'bascule[demo]' ({error})", err=True)
        raise typer.Exit(code=1) from error
    raise typer.Exit(code=run(context.args))


@app.command()
def serve(
    name: Annotated[str, typer.Option(help="Of the job; ranks of another job are refused.")],
    listen: Annotated[
        str, typer.Option(help="Address to bind; port 0 takes any.")
    ] = "0.0.0.0:7070",
    token_file: Annotated[
        Path | None,
        typer.Option(help="File that holds the shared secret of the job.", dir_okay=False),
    ] = None,
    heartbeat: Annotated[
        float, typer.Option(help="Seconds; a rank that is silent for six of them is gone.")
    ] = 0.5,
) -> None:
    """Run the coordinator alone, so that it outlives the trainers."""
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    token = token_file.read_text().strip() if token_file else ""
    job = bascule.Job(name=name, listen=listen, token=token, heartbeat=heartbeat)
    try:
        server = bascule.CoordinatorServer.start(job)
    except bascule.Error as error:
        typer.echo(f"bascule serve: {error}", err=True)
        raise typer.Exit(code=1) from error
    with server:
        typer.echo(f"coordinator of job {name} at {server.address}")
        stop.wait()
        typer.echo("stopped")


def main() -> None:
    """Run the command line."""
    app()
