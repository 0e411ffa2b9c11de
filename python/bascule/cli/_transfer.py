"""What a transfer takes: bytes a rank and a link, memory, the planner's time and the bound."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from bascule import _bascule

__all__ = ["Link", "Rank", "Rates", "Transfer", "nodes_of", "plan_transfer"]

# Told how much of how much is done.
Progress = Callable[[int, int], None]
_Link = tuple[int, int, int, bool]


@dataclass
class Rank:
    """One rank of the transfer; bytes of one version.

    Attributes
    ----------
    name
        ``"trainer 3"`` or ``"engine e0 rank 1"``.
    engine
        None for a trainer.
    rank, node
        Its numbers.
    weights
        What it holds or needs.
    extra
        Memory that the library takes beside: the arenas of a trainer, the shadow of a rollout.
    fetches, from_outside, serves
        What it reads from others, from those on other nodes, and what others read from it.
    chunks, pieces, sources
        Of what it fetches.
    """

    name: str
    engine: str | None
    rank: int
    node: int
    weights: int
    extra: int
    fetches: int = 0
    from_outside: int = 0
    serves: int = 0
    chunks: int = 0
    pieces: int = 0
    sources: int = 0


@dataclass(frozen=True)
class Link:
    """What one rank reads from another; both by their index in `Transfer.ranks`."""

    source: int
    target: int
    bytes: int
    chunks: int
    same_node: bool


@dataclass(frozen=True)
class Rates:
    """Bytes a second of a node; None where unknown.

    Attributes
    ----------
    memory
        What it can copy, in bytes copied.
    egress, ingress
        Of its links to other nodes.
    """

    memory: int | None = None
    egress: int | None = None
    ingress: int | None = None


@dataclass
class Transfer:
    """The transfer of one version.

    Attributes
    ----------
    ranks
        Trainers, then engine by engine.
    links
        By target and source.
    nodes
        How many there are.
    prepare, part, slowest_part
        Seconds of the planner: once a rank and membership, then for the rank's own part (the
        median and the slowest).
    bound
        Terms of the lower bound of EWTT in seconds, by name; without those whose rate is unknown.
    missing
        Rates that would add to the bound.
    """

    ranks: list[Rank]
    links: list[Link] = field(default_factory=list)
    nodes: int = 1
    prepare: float = 0.0
    part: float = 0.0
    slowest_part: float = 0.0
    bound: dict[str, float] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)


def nodes_of(
    trainers: int, engines: int, engine_ranks: int, per_node: int, *, colocated: bool
) -> tuple[list[int], list[list[int]]]:
    """Return the node of each trainer, and of each rank of each engine.

    Parameters
    ----------
    trainers, engines, engine_ranks
        How many there are.
    per_node
        Ranks of a node; 0: all are on one. What fits one node is on one.
    colocated
        Rollouts are on the trainers' nodes, from the first on; else on nodes of their own.
    """
    rollouts = engines * engine_ranks
    if not per_node or trainers + rollouts <= per_node:
        return [0] * trainers, [[0] * engine_ranks for _ in range(engines)]
    trainer_nodes = [rank // per_node for rank in range(trainers)]
    first = 0 if colocated else trainer_nodes[-1] + 1
    flat = [first + rank // per_node for rank in range(rollouts)]
    return trainer_nodes, [flat[i : i + engine_ranks] for i in range(0, rollouts, engine_ranks)]


def plan_transfer(
    trainers: _bascule.World,
    rollouts: _bascule.World,
    nodes: tuple[list[int], list[list[int]]],
    *,
    versions_held: int = 2,
    rates: Rates = Rates(),
    progress: Progress = lambda done, total: None,
    reuse: bool = True,
) -> Transfer:
    """Plan what engines fetch from trainers.

    Parameters
    ----------
    trainers, rollouts
        What the trainers hold, and what each engine needs.
    nodes
        From `nodes_of`.
    versions_held
        Arenas of a trainer.
    rates
        For the bound.
    progress
        Is told how many ranks are planned, of how many.
    reuse
        Plan only once engines that are placed alike.
    """
    trainer_nodes, engine_nodes = nodes
    width = len(str(len(engine_nodes) - 1))
    engines = [(f"e{number:0{width}}", at) for number, at in enumerate(engine_nodes)]
    transfer = Transfer(_ranks(trainers, rollouts, trainer_nodes, engines, versions_held))
    transfer.nodes = len({rank.node for rank in transfer.ranks})
    _plan_engines(transfer, trainers, rollouts, trainer_nodes, engines, progress, reuse)
    _add_bound(transfer, trainers, rollouts, trainer_nodes, engines, rates)
    return transfer


def _ranks(
    trainers: _bascule.World,
    rollouts: _bascule.World,
    trainer_nodes: Sequence[int],
    engines: Sequence[tuple[str, list[int]]],
    versions_held: int,
) -> list[Rank]:
    ranks = []
    for number, node in enumerate(trainer_nodes):
        weights, arena = trainers.memory_of(number)
        name = f"trainer {number}"
        ranks.append(Rank(name, None, number, node, weights, arena * versions_held))
    needs = [rollouts.memory_of(number)[0] for number in range(rollouts.mesh.ranks)]
    for engine, nodes in engines:
        for number, node in enumerate(nodes):
            name = f"engine {engine} rank {number}"
            ranks.append(Rank(name, engine, number, node, needs[number], needs[number]))
    return ranks


def _placed(nodes: Iterable[int], trainer_nodes: set[int]) -> tuple[int, ...]:
    """Equal for engines that are placed alike: on the same trainers' nodes, or on others."""
    others: dict[int, int] = {}
    return tuple(
        node if node in trainer_nodes else ~others.setdefault(node, len(others)) for node in nodes
    )


def _plan_engines(
    transfer: Transfer,
    trainers: _bascule.World,
    rollouts: _bascule.World,
    trainer_nodes: list[int],
    engines: Sequence[tuple[str, list[int]]],
    progress: Progress,
    reuse: bool,
) -> None:
    """Plan each engine by itself, as its ranks do."""
    first, size = len(trainer_nodes), rollouts.mesh.ranks
    with_trainers = set(trainer_nodes)
    placed = [_placed(nodes, with_trainers) if reuse else (i,) for i, (_, nodes) in _enum(engines)]
    total = len(set(placed)) * size
    known: dict[tuple[int, ...], list[tuple[int, list[_Link]]]] = {}
    prepare: list[float] = []
    part: list[float] = []
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for number, (name, nodes) in _enum(engines):
            if placed[number] not in known:
                start = time.perf_counter()
                preview = _bascule.PlanPreview.prepare(
                    trainers, trainer_nodes, rollouts, [(name, nodes)]
                )
                prepare.append(time.perf_counter() - start)
                preview.check_engines()
                parts = []
                for seconds, planned in pool.map(
                    _timed(preview.part_of), range(first, first + size)
                ):
                    part.append(seconds)
                    parts.append(planned)
                    progress(len(part), total)
                known[placed[number]] = parts
            _add_engine(transfer, first, first + number * size, known[placed[number]])
    transfer.prepare = statistics.median(prepare)
    transfer.part, transfer.slowest_part = statistics.median(part), max(part)


def _enum(
    engines: Sequence[tuple[str, list[int]]],
) -> Iterable[tuple[int, tuple[str, list[int]]]]:
    return enumerate(engines)


def _timed(
    part_of: Callable[[int], tuple[int, list[_Link]]],
) -> Callable[[int], tuple[float, tuple[int, list[_Link]]]]:
    def call(index: int) -> tuple[float, tuple[int, list[_Link]]]:
        start = time.perf_counter()
        planned = part_of(index)
        return time.perf_counter() - start, planned

    return call


def _add_engine(
    transfer: Transfer, trainers: int, first: int, parts: Sequence[tuple[int, list[_Link]]]
) -> None:
    """Add the parts of an engine's ranks, which were planned as if it were the only one."""
    for number, (pieces, links) in enumerate(parts):
        target = transfer.ranks[first + number]
        target.pieces, target.sources = pieces, len(links)
        for planned, size, chunks, same_node in links:
            source = planned if planned < trainers else planned - trainers + first
            transfer.links.append(Link(source, first + number, size, chunks, same_node))
            transfer.ranks[source].serves += size
            target.fetches += size
            target.chunks += chunks
            target.from_outside += 0 if same_node else size


def _add_bound(
    transfer: Transfer,
    trainers: _bascule.World,
    rollouts: _bascule.World,
    trainer_nodes: list[int],
    engines: Sequence[tuple[str, list[int]]],
    rates: Rates,
) -> None:
    wanted = {"--memory-rate": rates.memory}
    if transfer.nodes > 1:
        wanted |= {"--egress": rates.egress, "--ingress": rates.ingress}
    transfer.missing = [option for option, rate in wanted.items() if rate is None]
    if len(transfer.missing) == len(wanted):
        return
    everything = _bascule.PlanPreview.prepare(trainers, trainer_nodes, rollouts, engines)
    terms = everything.bound(
        node_memory=rates.memory or 0,
        trainer_egress=rates.egress or 0,
        rollout_egress=rates.egress or 0,
        rollout_ingress=rates.ingress or 0,
    )
    known = {
        "sole_source": rates.egress,
        "trainer_egress": rates.egress,
        "all_egress": rates.egress,
        "node_ingress": rates.ingress,
        "memory": rates.memory,
    }
    several = transfer.nodes > 1
    transfer.bound = {
        name: terms[name] / 1e9
        for name, rate in known.items()
        if rate is not None and (several or name == "memory")
    }
