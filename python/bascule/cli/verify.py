"""``bascule verify``: compares two live ranks, or a live rank and a checkpoint."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

import bascule
from bascule import verify as live
from bascule.cli._common import (
    AsJson,
    Token,
    TokenEnv,
    TokenFile,
    console,
    print_json,
    read_token,
    shown_bytes,
)
from bascule.layout import DType

__all__ = ["verify"]

# Names that are listed of each kind; --json lists all.
_LISTED = 20


def verify(
    address: Annotated[str, typer.Argument(help="host:port of the coordinator.")],
    rank: Annotated[str, typer.Argument(help="A live rank: trainer:3, or e0:1.")],
    other: Annotated[
        str | None, typer.Argument(help="Another live rank to compare it with.")
    ] = None,
    checkpoint: Annotated[
        list[Path] | None,
        typer.Option(
            exists=True,
            help="Compare with this safetensors file, or those of this folder; may be given again.",
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="Compare values rounded to it, e.g. BF16; else in the narrower dtype."),
    ] = None,
    socket_directory: Annotated[
        str, typer.Option(help="Where the job's sockets are, as in the job's options.")
    ] = "",
    token: Token = None,
    token_file: TokenFile = None,
    token_env: TokenEnv = None,
    timeout: Annotated[float, typer.Option(help="Seconds that all may take.")] = 600.0,
    as_json: AsJson = False,
) -> None:
    """Compare what live ranks hold of a version; run it on their host.

    Each rank sums its own live memory; only sums travel. It ends with 0 where all that both sides
    hold is equal, else with 1.
    """
    if (other is None) == (not checkpoint):
        raise typer.BadParameter("give another rank, or --checkpoint")
    secret = read_token(token, token_file, token_env)
    rounded = _dtype(dtype)
    name = bascule.coordinator_status(address, secret, timeout=min(timeout, 10.0))["job"]
    job = bascule.Job(
        name=name, coordinator=address, token=secret, socket_directory=socket_directory
    )
    progress = live.Progress()

    def compare() -> live.Comparison:
        if other is not None:
            return live.compare_ranks(
                job, rank, other, dtype=rounded, progress=progress, timeout=timeout
            )
        return live.compare_with_checkpoint(
            job, rank, _files(checkpoint or []), dtype=rounded, progress=progress, timeout=timeout
        )

    found = _watched(compare, progress)
    if as_json:
        print_json({**_as_dict(found), "equal": found.equal})
    else:
        _tell(found, rank, other or "the checkpoint")
    raise typer.Exit(code=0 if found.equal else 1)


def _dtype(name: str | None) -> DType | None:
    if name is None:
        return None
    known = {member.name: member for member in DType}
    if name.upper() not in known:
        raise typer.BadParameter(f"{name} is none of {', '.join(known)}")
    return known[name.upper()]


def _files(paths: list[Path]) -> list[Path]:
    """Files as given, and all safetensors files of folders."""
    files: list[Path] = []
    for path in paths:
        if not path.is_dir():
            files.append(path)
            continue
        found = sorted(path.glob("*.safetensors"))
        if not found:
            raise typer.BadParameter(f"{path} has no *.safetensors")
        files += found
    return files


def _watched(compare: Callable[[], live.Comparison], progress: live.Progress) -> live.Comparison:
    """Run it on a thread of its own, with a bar on a terminal, open to Ctrl-C."""
    result: list[live.Comparison] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            result.append(compare())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    out = console(stderr=True)
    with Progress(
        TextColumn("comparing"),
        BarColumn(),
        DownloadColumn(),
        console=out,
        transient=True,
        disable=not out.is_terminal,
    ) as bar:
        task = bar.add_task("comparing", total=None)
        while thread.is_alive():
            bar.update(task, completed=progress.done, total=progress.total or None)
            thread.join(0.1)
            time.sleep(0)
    if errors:
        raise errors[0]
    return result[0]


def _as_dict(found: live.Comparison) -> dict[str, Any]:
    fields = dataclasses.asdict(found)
    fields["version"] = {"term": found.version.term, "version": found.version.version}
    return fields


def _tell(found: live.Comparison, left: str, right: str) -> None:
    out = console()
    out.print(
        f"version {found.version.version} of term {found.version.term}: {found.tensors} tensors, "
        f"{shown_bytes(found.bytes)} compared"
    )
    for what, names in (
        ("different", found.different),
        (f"only in {left}", found.only_left),
        (f"only in {right}", found.only_right),
        ("cannot be compared", found.unreadable),
    ):
        if not names:
            continue
        out.print(f"{what}: {len(names)}")
        for name in names[:_LISTED]:
            out.print(f"  {name}")
        if len(names) > _LISTED:
            out.print(f"  ... and {len(names) - _LISTED} more (--json lists all)")
    if found.elements == 0:
        out.print("nothing was compared: the two have no element in common")
    else:
        out.print("equal" if found.equal else "NOT equal")
