"""What the commands share: the job's token, output, and how errors are told."""

from __future__ import annotations

import ctypes
import json
import os
import re
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console

__all__ = [
    "AsJson",
    "Token",
    "TokenEnv",
    "TokenFile",
    "console",
    "fail",
    "parse_amount",
    "print_json",
    "read_token",
    "shown_bytes",
    "shown_seconds",
]

Token = Annotated[
    str | None,
    typer.Option(
        "--token",
        metavar="SECRET",
        help="Shared secret of the job. It is wiped from the process list, but shells remember "
        "what was typed: prefer the other two.",
    ),
]
TokenFile = Annotated[
    Path | None,
    typer.Option("--token-file", dir_okay=False, exists=True, help="File that holds it."),
]
TokenEnv = Annotated[
    str | None,
    typer.Option("--token-env", metavar="NAME", help="Environment variable that holds it."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]

# How wide tables are where nobody says how wide the output is.
_PLAIN_WIDTH = 160


def read_token(token: str | None, token_file: Path | None, token_env: str | None) -> str:
    """Return the job's token from the one option that names it; empty without any.

    Parameters
    ----------
    token, token_file, token_env
        The options.
    """
    if sum(option is not None for option in (token, token_file, token_env)) > 1:
        raise typer.BadParameter("--token, --token-file and --token-env exclude each other")
    if token is not None:
        _hide_argument(token)
        return token
    if token_file is not None:
        found = token_file.read_text().strip()
        if not found:
            raise typer.BadParameter(f"{token_file} is empty")
        return found
    if token_env is not None:
        found = os.environ.get(token_env, "").strip()
        if not found:
            raise typer.BadParameter(f"the environment variable {token_env} is not set")
        return found
    return ""


def _hide_argument(secret: str) -> None:
    """Overwrite a command line argument, so that the process list no longer shows it."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start, end = int(fields[45]), int(fields[46])  # arg_start, arg_end
    except (OSError, ValueError, IndexError):
        return
    if not start < end:
        return
    shown = ctypes.string_at(start, end - start)
    for match in re.finditer(re.escape(secret.encode()), shown):
        ctypes.memset(start + match.start(), ord("*"), len(match.group()))


def console(*, stderr: bool = False) -> Console:
    """Return the console to print to; one as wide as tables need where it is no terminal.

    Parameters
    ----------
    stderr
        For progress and errors.
    """
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() or "COLUMNS" in os.environ else _PLAIN_WIDTH
    return Console(file=stream, width=width, highlight=False, markup=False, emoji=False)


def print_json(value: Any, *, indent: int | None = 2) -> None:
    """Print a value as JSON.

    Parameters
    ----------
    value
        Of dictionaries, lists, strings and numbers.
    indent
        Spaces a level; None for one line.
    """
    typer.echo(json.dumps(value, indent=indent))


def fail(error: Exception | str, command: str | None = None) -> NoReturn:
    """Print what went wrong as one line and end with exit code 1.

    Parameters
    ----------
    error
        An error of bascule tells its rank, peer and tensor in brackets.
    command
        That failed.
    """
    text = " ".join(str(error).split())
    typer.echo(f"bascule {command}: {text}" if command else f"bascule: {text}", err=True)
    raise typer.Exit(code=1)


def shown_bytes(count: float) -> str:
    """Return a number of bytes with a decimal unit and three digits.

    Parameters
    ----------
    count
        Bytes.
    """
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(count) < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.4g} PB"


def shown_seconds(seconds: float) -> str:
    """Return a time with the unit that suits it.

    Parameters
    ----------
    seconds
        Of the time.
    """
    if abs(seconds) < 1:
        return f"{seconds * 1e3:.3g} ms"
    if abs(seconds) < 120:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 120:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


_AMOUNT = re.compile(r"([0-9]*\.?[0-9]+(?:[eE][0-9]+)?)\s*([kKMGTP]?)(i?)(B|bit|b)?(?:/s|ps)?")


def parse_amount(text: str) -> int:
    """Return bytes of a text such as ``20GB``, ``16GiB``, ``400Gbit/s`` or ``2e10``.

    Parameters
    ----------
    text
        A number with an optional unit.
    """
    match = _AMOUNT.fullmatch(text.strip())
    if match is None:
        raise typer.BadParameter(f"{text!r} is no amount such as 20GB, 16GiB or 400Gbit/s")
    number, scale, binary, unit = match.groups()
    factor = float(1024 if binary else 1000) ** " KMGTP".index(scale.upper() or " ")
    return round(float(number) * factor / (8 if unit in ("bit", "b") else 1))
