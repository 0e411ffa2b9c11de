"""``bascule status``: what a coordinator knows of its job."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

import bascule
from bascule.cli._common import (
    AsJson,
    Token,
    TokenEnv,
    TokenFile,
    console,
    print_json,
    read_token,
    shown_bytes,
    shown_seconds,
)

__all__ = ["render", "status"]

# A member that missed as many heartbeats is shown in another colour; six of them end it.
_LATE_BEATS = 3

_STATE_STYLES = {"open": "yellow", "available": "green", "aborted": "red", "retired": "dim"}


def status(
    address: Annotated[str, typer.Argument(help="host:port of the coordinator.")],
    token: Token = None,
    token_file: TokenFile = None,
    token_env: TokenEnv = None,
    watch: Annotated[
        float | None,
        typer.Option(
            min=0.1, metavar="SECONDS", help="Ask again as often, until Ctrl-C or SIGTERM."
        ),
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds that an answer may take.")] = 5.0,
    as_json: AsJson = False,
) -> None:
    """Show members, terms, versions and errors of a job.

    With --watch and --json it prints one line of JSON for each answer.
    """
    secret = read_token(token, token_file, token_env)

    def ask() -> dict[str, Any]:
        return bascule.coordinator_status(address, secret, timeout=timeout)

    if watch is not None:
        try:
            _watch(ask, watch, as_json)
        except KeyboardInterrupt:
            return
    elif as_json:
        print_json(ask())
    else:
        console().print(render(ask()))


def _watch(ask: Any, seconds: float, as_json: bool) -> None:
    """Ask for ever. A coordinator that does not answer may be one that restarts."""
    if as_json:
        while True:
            print_json(_answer_or_error(ask), indent=None)
            time.sleep(seconds)
    out = console()
    with Live(console=out, screen=out.is_terminal, auto_refresh=False) as live:
        shown: RenderableType = ""
        while True:
            answer = _answer_or_error(ask)
            if "error" in answer:
                note = Text(f"{time.strftime('%H:%M:%S')} {answer['error']}", style="red")
                live.update(Group(note, shown), refresh=True)
            else:
                shown = render(answer)
                live.update(shown, refresh=True)
            time.sleep(seconds)


def _answer_or_error(ask: Any) -> dict[str, Any]:
    try:
        answer: dict[str, Any] = ask()
    except bascule.PermissionDenied:
        raise  # it will not go away
    except bascule.Error as error:
        return {"error": str(error)}
    return answer


def render(status: dict[str, Any]) -> RenderableType:
    """Return the status as text and tables. Fields that a coordinator does not send are left out.

    Parameters
    ----------
    status
        As docs/protocol.md describes it.
    """
    members = sorted(
        status.get("members", []),
        key=lambda member: (str(member.get("engine", "")), member.get("rank", 0)),
    )
    trainers = [member for member in members if member.get("role") == "trainer"]
    rollouts = [member for member in members if member.get("role") == "rollout"]
    beat = status.get("heartbeat_ms", 500)
    parts: list[RenderableType] = [_summary(status, trainers)]
    if trainers:
        parts.append(_members("trainers", trainers, beat))
    if rollouts:
        parts.append(_members("rollouts", rollouts, beat))
    if versions := status.get("versions"):
        parts.append(_versions(versions))
    parts += _errors(members)
    return Group(*parts)


def _summary(status: dict[str, Any], trainers: list[dict[str, Any]]) -> Text:
    text = Text()
    text.append(f"job {status.get('job', '?')}", style="bold")
    text.append(f"  up {shown_seconds(status.get('uptime_ms', 0) / 1e3)}")
    if not status.get("settled", True):
        text.append("  not settled: it started lately and judges nothing yet", style="yellow")
    term = status.get("term", 0)
    if not term:
        text.append("\nno trainers yet")
        return text
    size = status.get("trainer_world_size", 0)
    here = sum(not member.get("stale_term") for member in trainers)
    text.append(f"\nterm {term}: {here} of {size} trainers")
    if not status.get("complete", True):
        text.append(", not complete: nothing can be published", style="yellow")
    text.append(
        f"\nepoch {status.get('epoch', 0)}, {status.get('blobs', 0)} layout templates "
        f"({shown_bytes(status.get('blob_bytes', 0))})"
    )
    return text


def _table(title: str, columns: Iterable[str]) -> Table:
    table = Table(
        title=f"\n{title}", title_justify="left", title_style="bold", box=None, pad_edge=False
    )
    for column in columns:
        name, _, right = column.partition(">")
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    return table


def _members(title: str, members: list[dict[str, Any]], beat_ms: float) -> Table:
    table = _table(
        title,
        ["member", "state", "last", "done>.", "took>.", "stall>.", "bytes>.", "silent>.", "node"],
    )
    for member in members:
        last = member.get("last") or {}
        silent = member.get("silent_ms", 0)
        table.add_row(
            _name(member),
            _state(member),
            f"version {last['version']}" if "version" in last else "",
            str(member.get("done", "")),
            _milliseconds(last.get("took_ms")),
            _milliseconds(last.get("stall_ms")),
            shown_bytes(last["bytes"]) if "bytes" in last else "",
            Text(
                shown_seconds(silent / 1e3),
                style="yellow" if silent > _LATE_BEATS * beat_ms else "",
            ),
            str(member.get("node", ""))[:12],
        )
    return table


def _milliseconds(value: float | None) -> str:
    return "" if value is None else shown_seconds(value / 1e3)


def _name(member: dict[str, Any]) -> str:
    rank = f"{member.get('rank', '?')}/{member.get('world_size', '?')}"
    return (
        f"trainer {rank}"
        if member.get("role") == "trainer"
        else (f"engine {member.get('engine', '?')} rank {rank}")
    )


def _state(member: dict[str, Any]) -> Text:
    if member.get("role") == "trainer":
        if member.get("stale_term"):
            return Text("of an older term", style="yellow")
        return Text("in the term", style="green")
    serving = member.get("serving")
    if not serving:
        return Text("serves nothing", style="yellow")
    text = f"serves version {serving.get('version', '?')}"
    if member.get("servable"):
        return Text(text, style="green")
    return Text(f"{text}, not servable", style="red")


def _versions(versions: list[dict[str, Any]]) -> Table:
    table = _table("versions", ["version>.", "state", "holders>.", "age>.", "term>.", "reason"])
    newest_first = sorted(
        versions, key=lambda version: (version.get("term", 0), version.get("version", 0))
    )[::-1]
    for version in newest_first:
        state = version.get("state", "?")
        holders = version.get("holders", "")
        table.add_row(
            str(version.get("version", "?")),
            Text(state, style=_STATE_STYLES.get(state, "")),
            str(len(holders) if isinstance(holders, list) else holders),
            shown_seconds(version.get("age_ms", 0) / 1e3),
            str(version.get("term", "?")),
            version.get("reason", ""),
        )
    return table


def _errors(members: list[dict[str, Any]]) -> list[RenderableType]:
    lines: list[RenderableType] = []
    for member in members:
        error = member.get("error")
        if not error:
            continue
        age = shown_seconds(error.get("age_ms", 0) / 1e3)
        lines.append(Text(f"{_name(member)}, {age} ago: {error.get('message', '')}", style="red"))
    return [Text("\nlast errors", style="bold"), *lines] if lines else []
