"""The plan is made here, from shapes alone: every rank of a tp group makes the same one, in every run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import TypeVar

import torch

from dmuon.assignment import assign, newton_schulz_flops
from dmuon.tensor_parallel.layout import Layout
from dmuon.tensor_parallel.plan import EXCHANGE, GRAM, LOCAL, Entry, Item, OrthogonalizationPlan, Rates, Round

STRATEGIES = ("auto", GRAM, EXCHANGE)

ROUND_BYTES = 1 << 30
"""What a round may hold, as float32 bytes: whole matrices on a rank, or Gram matrices. One matrix may be larger."""

Member = TypeVar("Member")


def plan_orthogonalization(
    layouts: Sequence[Layout],
    tp_degree: int,
    strategy: str = "auto",
    *,
    memory_limit: int | None = None,
    dtype: torch.dtype = torch.float32,
    wire_dtype: torch.dtype = torch.float32,
    rates: Rates | None = None,
) -> OrthogonalizationPlan:
    """A way for each parameter, the tp ranks of those that are exchanged, and rounds that bound memory.

    "exchange" deals whole matrices to the ranks, balanced in cost. "distributed_gram" leaves every slice where it is
    if its matrix has the sum form; matrices cut along their smaller side have none and are exchanged. "auto" takes the
    least predicted time: exchange, but for what is left over when the matrices of a shape are dealt evenly, or for all
    of them where that is cheaper.

    Args:
        layouts: of parameters that are orthogonalised with the same options; the same list on all ranks.
        memory_limit: bytes of whole matrices, in float32, that a rank may hold at once: its own copies of them, beside
            which the iteration has its workspace. "auto" takes the Gram form for matrices that are larger by
            themselves. None: as many as a round may hold, and one of any size.
        dtype, wire_dtype, rates: see `OrthogonalizationPlan` and `Rates`.

    Raises:
        ValueError: an unknown strategy; a wire dtype other than float32 and `dtype`; a matrix that must be exchanged
            exceeds the memory limit.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"tp_strategy = {strategy!r}: must be one of {', '.join(STRATEGIES)}")
    if wire_dtype not in (torch.float32, dtype):
        raise ValueError(f"wire_dtype = {wire_dtype}: must be torch.float32 or the iteration's {dtype}")

    def plan(ways: Sequence[str]) -> OrthogonalizationPlan:
        entries = deal(layouts, ways, tp_degree)
        return OrthogonalizationPlan(entries, tp_degree, rounds(entries, tp_degree, memory_limit), dtype, wire_dtype)

    ways = [_first_way(layout, tp_degree, strategy, memory_limit) for layout in layouts]
    return plan(ways) if strategy != "auto" else _cheapest(layouts, ways, tp_degree, plan, rates or Rates())


def _first_way(layout: Layout, tp_degree: int, strategy: str, memory_limit: int | None) -> str:
    """The way a parameter must go, or exchange."""
    if tp_degree == 1 or layout.matrix_dim is None:
        return LOCAL
    too_large = memory_limit is not None and layout.matrix_bytes > memory_limit
    if layout.has_sum_form and (strategy == GRAM or (strategy == "auto" and too_large)):
        return GRAM
    if too_large:
        raise ValueError(
            f"memory_limit = {memory_limit}: tp_strategy = {strategy!r} puts the matrix {layout} on one rank, which "
            f"then holds its {layout.matrix_bytes} bytes"
        )
    return EXCHANGE


def _cheapest(
    layouts: Sequence[Layout],
    ways: Sequence[str],
    tp_degree: int,
    plan_ways: Callable[[Sequence[str]], OrthogonalizationPlan],
    rates: Rates,
) -> OrthogonalizationPlan:
    """How many of each shape go by Gram, the last ones of each: descent from the best of three starts."""
    movable: dict[tuple[int, ...], list[int]] = {}
    for index, layout in enumerate(layouts):
        if ways[index] == EXCHANGE and layout.has_sum_form:
            movable.setdefault((*sorted(layout.matrix_shape), layout.num_matrices), []).append(index)
    groups = [movable[key] for key in sorted(movable, reverse=True)]
    seen: dict[tuple[int, ...], tuple[float, OrthogonalizationPlan]] = {}

    def time_s(counts: tuple[int, ...]) -> float:
        if counts not in seen:
            by_gram = {i for group, count in zip(groups, counts, strict=True) for i in group[len(group) - count :]}
            plan = plan_ways([GRAM if i in by_gram else way for i, way in enumerate(ways)])
            seen[counts] = plan.predicted_s(rates), plan
        return seen[counts][0]

    none, all_of_them = tuple(0 for _ in groups), tuple(map(len, groups))
    remainders = tuple(len(group) % tp_degree for group in groups)
    best, before = min((none, remainders, all_of_them), key=time_s), None
    while best != before:
        before = best
        for position, group in enumerate(groups):
            options = {*range(min(len(group), tp_degree)), len(group)}
            trials = [(*best[:position], count, *best[position + 1 :]) for count in sorted(options)]
            best = min((best, *trials), key=time_s)
    return seen[best][1]


def deal(layouts: Sequence[Layout], ways: Sequence[str], tp_degree: int) -> tuple[Entry, ...]:
    """Whole matrices are dealt to tp ranks as parameters are to owners: balanced in cost, then in elements."""
    names = [
        [f"{index:06}.{matrix:06}" for matrix in range(layout.num_matrices if way == EXCHANGE else 0)]
        for index, (layout, way) in enumerate(zip(layouts, ways, strict=True))
    ]
    shapes = {name: layout.matrix_shape for layout, of_layout in zip(layouts, names, strict=True) for name in of_layout}
    owners = assign(shapes, 1, tp_degree).owners
    return tuple(
        Entry(layout, way, tuple(owners[name].shard for name in of_layout))
        for layout, way, of_layout in zip(layouts, ways, names, strict=True)
    )


def rounds(entries: Sequence[Entry], tp_degree: int, memory_limit: int | None) -> tuple[Round, ...]:
    """Costliest matrices first, equal shapes together; each way fills rounds of its own, which run side by side."""
    limit = ROUND_BYTES if memory_limit is None else min(memory_limit, ROUND_BYTES)
    order = sorted(range(len(entries)), key=lambda i: (-newton_schulz_flops(entries[i].layout.matrix_shape), i))

    def items(way: str) -> list[Item]:
        return [Item(i, m) for i in order if entries[i].way == way for m in range(entries[i].layout.num_matrices)]

    def whole(item: Item) -> tuple[int, int]:
        return entries[item.entry].ranks[item.matrix], entries[item.entry].layout.matrix_bytes

    def square(item: Item) -> tuple[int, int]:
        return 0, 4 * min(entries[item.entry].layout.matrix_shape) ** 2

    def own(index: int) -> tuple[int, int]:
        return 0, 4 * math.prod(entries[index].layout.local_shape(tp_degree, 0))

    exchange = _filled(items(EXCHANGE), whole, limit)
    gram = _filled(items(GRAM), square, limit)
    local = _filled([i for i in order if entries[i].way == LOCAL], own, limit)
    return tuple(Round(*parts) for parts in zip_longest(exchange, gram, local, fillvalue=()))


def _filled(
    members: Sequence[Member], held_by: Callable[[Member], tuple[int, int]], limit: int
) -> list[tuple[Member, ...]]:
    """Runs of members, each as long as no rank holds more than `limit`. `held_by`: which rank holds how many bytes."""
    runs: list[list[Member]] = []
    held: dict[int, int] = {}
    for member in members:
        rank, num_bytes = held_by(member)
        if not runs or (held.get(rank, 0) and held[rank] + num_bytes > limit):
            runs.append([])
            held = {}
        runs[-1].append(member)
        held[rank] = held.get(rank, 0) + num_bytes
    return [tuple(run) for run in runs]
