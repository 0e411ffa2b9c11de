"""``bascule serve``: the coordinator alone."""

from __future__ import annotations

import logging
import signal
import sys
import threading
from enum import StrEnum
from typing import Annotated

import typer

import bascule
from bascule.cli._common import AsJson, Token, TokenEnv, TokenFile, print_json, read_token

__all__ = ["serve"]


class _Level(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def serve(
    name: Annotated[str, typer.Option(help="Of the job; ranks of another job are refused.")],
    listen: Annotated[
        str, typer.Option(help="Address to bind; port 0 takes any.")
    ] = "0.0.0.0:7070",
    token: Token = None,
    token_file: TokenFile = None,
    token_env: TokenEnv = None,
    heartbeat: Annotated[
        float, typer.Option(help="Seconds; a rank that is silent for six of them is gone.")
    ] = 0.5,
    log_level: Annotated[_Level, typer.Option(help="What to tell on stderr.")] = _Level.INFO,
    as_json: AsJson = False,
) -> None:
    """Run the coordinator alone, so that it outlives the trainers.

    It prints its address and serves until SIGTERM or SIGINT. What it knows is rebuilt from the
    members when it is started again at the same address.
    """
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    logging.basicConfig(
        stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s", level=logging.WARNING
    )
    logging.getLogger("bascule").setLevel(log_level.upper())
    job = bascule.Job(
        name=name,
        listen=listen,
        token=read_token(token, token_file, token_env),
        heartbeat=heartbeat,
    )
    with bascule.CoordinatorServer.start(job) as server:
        if as_json:
            print_json({"job": name, "address": server.address}, indent=None)
        else:
            typer.echo(f"coordinator of job {name} at {server.address}")
        stop.wait()
    if not as_json:
        typer.echo("stopped")
