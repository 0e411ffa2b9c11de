"""``bascule doctor``: what this machine gives to ranks."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from bascule.cli._common import AsJson, console, parse_amount, print_json
from bascule.cli._doctor import (
    CHECKS,
    Finding,
    Level,
    Machine,
    Wanted,
    compare_identities,
    identity_of,
)

__all__ = ["doctor"]

_STYLES = {Level.OK: "green", Level.NOTE: "yellow", Level.PROBLEM: "red"}


def doctor(
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="BYTES",
            help="What arenas and shadows of this host's ranks will take, such as 64GB; "
            "`bascule plan` tells it.",
        ),
    ] = None,
    threads: Annotated[
        int, typer.Option(min=0, help="Copy threads of all ranks of this host together.")
    ] = 0,
    socket_directory: Annotated[
        str, typer.Option(help="As in bascule.Job; empty: abstract sockets.")
    ] = "",
    compare: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="A report of --json from another container: can the two share memory?",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check what this machine, or container, gives to ranks; what to do where it is not enough.

    Run it where ranks will run: in their containers, as their user. Shared memory and a whole
    update are tried for real. The exit code is 1 where there is a problem.
    """
    wanted = Wanted(parse_amount(memory) if memory else 0, threads, socket_directory)
    probe = Machine()
    findings: list[Finding] = []
    out, err = console(), console(stderr=True)
    for check in CHECKS:
        with err.status(check.__name__.replace("_", " ")):
            findings.append(check(probe, wanted))
        if not as_json:
            _print(out, findings[-1])
    if compare is not None:
        findings.append(compare_identities(identity_of(probe), _identity_in(compare), wanted))
        if not as_json:
            _print(out, findings[-1])
    problems = sum(finding.level is Level.PROBLEM for finding in findings)
    if as_json:
        print_json(
            {"problems": problems, "checks": [dataclasses.asdict(finding) for finding in findings]}
        )
    else:
        notes = sum(finding.level is Level.NOTE for finding in findings)
        out.print(f"\n{_count(problems, 'problem')}, {_count(notes, 'note')}")
    if problems:
        raise typer.Exit(code=1)


def _identity_in(report: Path) -> dict[str, str]:
    try:
        checks: list[dict[str, Any]] = json.loads(report.read_text())["checks"]
        found = next(check["values"] for check in checks if check["check"] == "identity")
    except (ValueError, KeyError, TypeError, StopIteration) as error:
        raise typer.BadParameter(f"{report} is no report of bascule doctor --json") from error
    return {str(name): str(value) for name, value in found.items()}


def _count(number: int, what: str) -> str:
    return f"{number or 'no'} {what}{'' if number == 1 else 's'}"


def _print(out: Console, finding: Finding) -> None:
    line = Text(f"{finding.level:<8}", style=_STYLES[finding.level])
    line.append(f"{finding.check:<20}{finding.found}", style="default")
    out.print(line, soft_wrap=True)
    for label, text in (("", finding.why), ("remedy: ", finding.remedy)):
        if text:
            out.print(Text(f"{'':28}{label}{text}"), soft_wrap=True)
