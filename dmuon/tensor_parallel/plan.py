"""Which matrix is orthogonalised in which way, on which tp rank, in which round, and what that costs each rank.

A matrix that every rank holds whole (replicated over tp, or of a stack that is cut between matrices) is "local": each
rank orthogonalises what it has, nothing is sent, and equal replicas stay equal. The others go by "exchange" or by
"distributed_gram".

FLOPs are those of five Newton-Schulz steps with symmetric kernels, per matrix (n the smaller side, a the ratio):
exchange min(6 a + 14, 15 a + 5) n^3 on the rank that has the matrix, Gram (6 a / T + 14) n^3 on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise
from typing import NamedTuple

import torch

from dmuon.assignment import newton_schulz_flops
from dmuon.newton_schulz.iterations import GRAM_RESTARTS
from dmuon.tensor_parallel.layout import Layout

LOCAL, EXCHANGE, GRAM = "local", "exchange", "distributed_gram"

NUM_GRAMS = 1 + len(GRAM_RESTARTS)
NORM_BYTES = 8


@dataclass(frozen=True)
class Rates:
    """Of one device and its link, for predictions. The defaults are about what an H200 reaches on NVLink.

    Attributes:
        bytes_per_s: through the link in one direction. latency_s: of starting a collective.
    """

    flops_per_s: float = 5e14
    bytes_per_s: float = 3e11
    latency_s: float = 3e-5


@dataclass(frozen=True)
class Entry:
    """What happens to one parameter. `ranks`: by exchange, the tp rank that orthogonalises each of its matrices."""

    layout: Layout
    way: str
    ranks: tuple[int, ...] = ()


class Item(NamedTuple):
    """One matrix: the index of its entry, and its place in the stack; 0 if it is none."""

    entry: int
    matrix: int


class Round(NamedTuple):
    """What is worked on together. `local` are indices of entries."""

    exchange: tuple[Item, ...] = ()
    gram: tuple[Item, ...] = ()
    local: tuple[int, ...] = ()


class Load(NamedTuple):
    """What a step costs one rank.

    Attributes:
        exchange_bytes, sum_bytes: of exchanges and of sums, through the busier direction of its link. A sum of S bytes
            moves 2 S (T - 1) / T in each.
        whole_bytes: of the whole matrices that it holds at once in the fullest round, counted in float32.
    """

    flops: int
    exchange_bytes: int
    sum_bytes: int
    whole_bytes: int


@dataclass(frozen=True)
class OrthogonalizationPlan:
    """`str(plan)` is a table for people.

    Attributes:
        dtype: format of the iteration. Results travel back in it, for that loses nothing.
        wire_dtype: format in which slices travel to the rank that orthogonalises them: float32, or `dtype`, to which
            they are rounded after they were normalised, as the iteration does.
    """

    entries: tuple[Entry, ...]
    tp_degree: int
    rounds: tuple[Round, ...]
    dtype: torch.dtype = torch.float32
    wire_dtype: torch.dtype = torch.float32

    def layout(self, item: Item) -> Layout:
        return self.entries[item.entry].layout

    def rank(self, item: Item) -> int:
        """The tp rank that orthogonalises a matrix which is exchanged."""
        return self.entries[item.entry].ranks[item.matrix]

    def normed(self, members: Round) -> tuple[Item, ...]:
        """The matrices of a round whose norms are summed over tp before anything else is."""
        return members.gram if self.wire_dtype == torch.float32 else members.exchange + members.gram

    @cached_property
    def loads(self) -> tuple[Load, ...]:
        """What each tp rank has to do and to carry in one step."""
        return tuple(self._load(rank) for rank in range(self.tp_degree))

    @property
    def num_collectives(self) -> int:
        return sum(
            2 * bool(members.exchange) + NUM_GRAMS * bool(members.gram) + bool(self.normed(members))
            for members in self.rounds
        )

    def predicted_s(self, rates: Rates) -> float:
        """Seconds of a step: the most FLOPs and the most bytes of a rank, one after the other."""
        flops = max(load.flops for load in self.loads)
        num_bytes = max(load.exchange_bytes + load.sum_bytes for load in self.loads)
        return flops / rates.flops_per_s + num_bytes / rates.bytes_per_s + self.num_collectives * rates.latency_s

    def _load(self, rank: int) -> Load:
        exchanged = summed = whole = 0
        for members in self.rounds:
            moved = max(self._exchanged_numel(members.exchange, rank))
            exchanged += moved * (self.wire_dtype.itemsize + self.dtype.itemsize)
            mine = (self.layout(item) for item in members.exchange if self.rank(item) == rank)
            whole = max(whole, sum(layout.matrix_bytes for layout in mine))
            grams = 4 * sum(packed_numel(min(self.layout(item).matrix_shape)) for item in members.gram)
            for num_bytes in (NORM_BYTES * len(self.normed(members)), *(NUM_GRAMS * [grams])):
                summed += 2 * (self.tp_degree - 1) * num_bytes // self.tp_degree
        return Load(sum(self._flops(entry, rank) for entry in self.entries), exchanged, summed, whole)

    def _flops(self, entry: Entry, rank: int) -> int:
        layout = entry.layout
        if entry.way == LOCAL:
            return newton_schulz_flops(layout.local_shape(self.tp_degree, rank))
        if entry.way == EXCHANGE:
            return newton_schulz_flops(layout.matrix_shape) * entry.ranks.count(rank)
        small = min(layout.matrix_shape)
        products = 6 * layout.local_matrix_numel(self.tp_degree, rank) * small
        return layout.num_matrices * (products + 14 * small**3)

    def _exchanged_numel(self, items: Sequence[Item], rank: int) -> tuple[int, int]:
        """Elements of this rank's slices that others work on, and of others' slices that it works on."""
        away = home = 0
        for item in items:
            layout = self.layout(item)
            own = layout.local_matrix_numel(self.tp_degree, rank)
            if self.rank(item) == rank:
                home += layout.matrix_bytes // 4 - own
            else:
                away += own
        return away, home

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [("matrix", "count", "way", "on tp rank", "GFLOP each")]
        for (layout, way), group in groupby(self.entries, lambda entry: (entry.layout, entry.way)):
            alike = list(group)
            ranks = " ".join(str(rank) for entry in alike for rank in entry.ranks) or "all"
            count = sum(entry.layout.num_matrices for entry in alike)
            cost = newton_schulz_flops(layout.matrix_shape) / 1e9
            rows.append((str(layout), str(count), way, ranks, f"{cost:.4g}"))
        loads: list[tuple[str, ...]] = [("tp rank", "GFLOP a step", "exchanged", "summed", "whole matrices at once")]
        for rank, load in enumerate(self.loads):
            sizes = (f"{size / 1e6:.4g} MB" for size in load[1:])
            loads.append((str(rank), f"{load.flops / 1e9:.4g}", *sizes))
        summary = f"{len(self.rounds)} rounds, {self.num_collectives} collectives"
        return "\n".join([*_aligned(rows), "", *_aligned(loads), summary])


def block_rows(num_rows: int) -> list[tuple[int, int]]:
    """(start, stop) of up to eight runs of at least 128 rows: by eight, 9/16 of a symmetric matrix is computed."""
    num_blocks = max(1, min(8, num_rows // 128))
    starts = [num_rows * block // num_blocks for block in range(num_blocks + 1)]
    return list(pairwise(starts))


def packed_numel(num_rows: int) -> int:
    """Elements on the wire of one Gram matrix: each block row from the diagonal on."""
    return sum((stop - start) * (num_rows - start) for start, stop in block_rows(num_rows))


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
