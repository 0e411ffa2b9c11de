"""``bascule plan``: what a transfer takes, before anything runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bascule import _bascule
from bascule.cli._common import (
    AsJson,
    console,
    parse_amount,
    print_json,
    shown_bytes,
    shown_seconds,
)
from bascule.cli._models import known_models, load_model
from bascule.cli._transfer import Rates, Transfer, nodes_of, plan_transfer
from bascule.cli._worlds import Rollout, Trainer

__all__ = ["plan"]

_TERMS = {
    "sole_source": "bytes that one set of nodes alone holds, over its egress",
    "trainer_egress": "each byte once, over the egress of all trainer nodes",
    "all_egress": "what all nodes need, over the egress of all nodes",
    "node_ingress": "what the worst node needs from others, over its ingress",
    "memory": "what the worst node copies to publish and stage, over its memory rate",
}


def plan(
    trainer_file: Annotated[
        Path | None,
        typer.Argument(exists=True, dir_okay=False, help="World or layout of the trainers (JSON)."),
    ] = None,
    rollout_file: Annotated[
        Path | None,
        typer.Argument(exists=True, dir_okay=False, help="World or layout of one engine (JSON)."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="NAME|PATH", help="One of --list-models, or a config.json."),
    ] = None,
    trainer: Annotated[
        str | None,
        typer.Option(
            metavar="SPEC",
            help="fsdp:N, hsdp:RxS or flat:N (a flat buffer a layer); with tp:N, ep:N, pp:N.",
        ),
    ] = None,
    rollout: Annotated[
        str | None,
        typer.Option(metavar="SPEC", help="tp:N, ep:N, pp:N of an engine; engines:N."),
    ] = None,
    engines: Annotated[
        int | None, typer.Option(min=1, help="How many engines; for ROLLOUT_FILE.")
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="Of published and received weights; for --model.")
    ] = "BF16",
    ranks_per_node: Annotated[
        int, typer.Option(min=0, help="Ranks that share memory; 0: all of them.")
    ] = 8,
    colocated: Annotated[
        bool, typer.Option("--colocated", help="Engines are on the trainers' nodes.")
    ] = False,
    versions_held: Annotated[int, typer.Option(min=1, help="Arenas of a trainer.")] = 2,
    memory_rate: Annotated[
        str | None, typer.Option(metavar="RATE", help="Bytes a second that a node can copy.")
    ] = None,
    egress: Annotated[
        str | None, typer.Option(metavar="RATE", help="... that a node can send.")
    ] = None,
    ingress: Annotated[
        str | None, typer.Option(metavar="RATE", help="... that a rollout node can receive.")
    ] = None,
    rows: Annotated[
        int, typer.Option(min=0, help="Longer tables are told in three rows; 0: never.")
    ] = 24,
    list_models: Annotated[
        bool, typer.Option("--list-models", help="List the models that are known, and end.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Tell what a transfer takes: bytes a link and a rank, memory, and the least time.

    Of two files (docs/layout-json.md), or of descriptions:

        bascule plan --model qwen3-8b --trainer fsdp:64 --rollout tp:8,engines:4

    Rates are such as 20GB, 16GiB or 400Gbit/s.
    """
    if list_models:
        _list_models(as_json)
        return
    rates = Rates(
        *(None if rate is None else parse_amount(rate) for rate in (memory_rate, egress, ingress))
    )
    if trainer_file and rollout_file and not (model or trainer or rollout):
        title = f"{trainer_file.name} to {rollout_file.name}"
        sources, targets = (
            _bascule.World.from_json(file.read_text()) for file in (trainer_file, rollout_file)
        )
        count = engines or 1
    elif model and trainer and rollout and not (trainer_file or engines):
        shape = load_model(model)
        held, needed = Trainer.parse(trainer), Rollout.parse(rollout)
        title = f"{shape.name} ({shape.elements / 1e9:.1f} B parameters), {trainer} to {rollout}"
        sources = _bascule.World.from_json(held.world(shape, dtype))
        targets = _bascule.World.from_json(needed.world(shape, dtype))
        count = needed.engines
    else:
        raise typer.BadParameter(
            "give two files and --engines, or --model, --trainer and --rollout"
        )
    nodes = nodes_of(
        sources.mesh.ranks, count, targets.mesh.ranks, ranks_per_node, colocated=colocated
    )
    with _progress() as progress:
        transfer = plan_transfer(
            sources, targets, nodes, versions_held=versions_held, rates=rates, progress=progress
        )
    if as_json:
        print_json(_as_dict(title, transfer))
    else:
        _Printer(console(), transfer, rows).print(title)


def _list_models(as_json: bool) -> None:
    models = {name: load_model(name) for name in known_models()}
    if as_json:
        fields = ("layers", "experts", "elements")
        print_json({name: {f: getattr(m, f) for f in fields} for name, m in models.items()})
        return
    table = _table("model", "parameters>", "layers>", "experts>", "tensors>")
    for name, model in models.items():
        table.add_row(
            name,
            f"{model.elements / 1e9:.1f} B",
            str(model.layers),
            str(model.experts or ""),
            str(len(model.tensors)),
        )
    console().print(table)


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    err = console(stderr=True)
    with Progress(console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task("planning", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _as_dict(title: str, transfer: Transfer) -> dict[str, Any]:
    ranks = transfer.ranks
    bound = transfer.bound
    return {
        "title": title,
        "nodes": transfer.nodes,
        "ranks": [dataclasses.asdict(rank) for rank in ranks],
        "links": [
            dataclasses.asdict(link)
            | {"source": ranks[link.source].name, "target": ranks[link.target].name}
            for link in transfer.links
        ],
        "planner": {
            "prepare": transfer.prepare,
            "part": transfer.part,
            "slowest_part": transfer.slowest_part,
        },
        "bound": {
            "seconds": max(bound.values(), default=None),
            "binding": max(bound, key=lambda name: bound[name], default=None),
            "terms": bound,
            "missing": transfer.missing,
        },
    }


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(
            column.rstrip(">"), justify="right" if column.endswith(">") else "left", no_wrap=True
        )
    return table


class _Printer:
    """Prints a transfer.

    Parameters
    ----------
    out
        Where to.
    transfer
        What.
    rows
        Longer tables are told by their least, median and greatest row.
    """

    def __init__(self, out: Console, transfer: Transfer, rows: int) -> None:
        self._out = out
        self._transfer = transfer
        self._rows = rows
        self._trainers = [rank for rank in transfer.ranks if rank.engine is None]
        self._rollouts = [rank for rank in transfer.ranks if rank.engine is not None]

    def print(self, title: str) -> None:
        transfer = self._transfer
        engines = {rank.engine for rank in self._rollouts}
        per_engine = len(self._rollouts) // len(engines)
        self._out.print(title, style="bold")
        self._out.print(
            f"{len(self._trainers)} trainers, {len(engines)} "
            f"{'engine' if len(engines) == 1 else 'engines'} of {per_engine}, on {transfer.nodes} "
            f"{'node' if transfer.nodes == 1 else 'nodes'}; "
            f"{shown_bytes(sum(link.bytes for link in transfer.links))} cross "
            f"{len(transfer.links)} links"
        )
        self._print_trainers()
        self._print_rollouts()
        self._print_links()
        self._out.print(
            f"\nplanner   {shown_seconds(transfer.prepare)} a membership, then "
            f"{shown_seconds(transfer.part)} a rank "
            f"(slowest {shown_seconds(transfer.slowest_part)})"
        )
        self._print_bound()
        if any(not link.same_node for link in transfer.links):
            self._out.print(
                "\nThis version moves weights on one node only; this is what the plan would be.",
                style="yellow",
            )

    def _some(self, items: Sequence[Any], key: Callable[[Any], int]) -> list[tuple[str, Any]]:
        """Return all items with empty labels, or three of them."""
        if not self._rows or len(items) <= self._rows:
            return [("", item) for item in items]
        by_key = sorted(items, key=key)
        return [
            ("least", by_key[0]),
            ("median", by_key[len(by_key) // 2]),
            ("most", by_key[-1]),
        ]

    def _print_trainers(self) -> None:
        self._out.print()
        some = self._some(self._trainers, lambda rank: rank.serves)
        table = _table("trainer", "", "node>", "holds>", "arenas>", "serves>")
        for label, rank in some:
            table.add_row(
                rank.name,
                label,
                str(rank.node),
                *map(shown_bytes, (rank.weights, rank.extra, rank.serves)),
            )
        self._out.print(table)

    def _print_rollouts(self) -> None:
        self._out.print()
        some = self._some(self._rollouts, lambda rank: rank.fetches)
        # Ranks of one node have nobody outside, and read nothing from each other.
        several = ("outside>", "serves>") if self._transfer.nodes > 1 else ()
        columns = ("node>", "needs>", "shadow>", "fetches>", *several)
        table = _table("rollout", "", *columns, "sources>", "chunks>", "pieces>")
        for label, rank in some:
            sizes = [rank.weights, rank.extra, rank.fetches]
            if several:
                sizes += [rank.from_outside, rank.serves]
            table.add_row(
                rank.name,
                label,
                str(rank.node),
                *map(shown_bytes, sizes),
                *map(str, (rank.sources, rank.chunks, rank.pieces)),
            )
        self._out.print(table)

    def _print_links(self) -> None:
        self._out.print()
        links = self._transfer.links
        table = _table("from", "to", "", "bytes>", "chunks>", "path")
        for label, link in self._some(links, lambda link: link.bytes):
            table.add_row(
                self._name(link.source),
                self._name(link.target),
                label,
                shown_bytes(link.bytes),
                str(link.chunks),
                "memory" if link.same_node else "network",
            )
        self._out.print(table)

    def _name(self, index: int) -> str:
        return self._transfer.ranks[index].name

    def _print_bound(self) -> None:
        bound, missing = self._transfer.bound, self._transfer.missing
        if not bound:
            self._out.print(f"bound     unknown: give {', '.join(missing)}")
            return
        worst = max(bound, key=lambda name: bound[name])
        self._out.print(f"bound     {shown_seconds(bound[worst])} at least, from {worst}:")
        for name, seconds in bound.items():
            self._out.print(f"          {shown_seconds(seconds):>8}  {_TERMS[name]}")
        if missing:
            self._out.print(f"          not counted: give {', '.join(missing)}")
