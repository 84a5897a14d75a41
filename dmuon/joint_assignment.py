"""Joint ownership: with more slots than matrices, the costliest ones are cut and owned by several ranks of a node.

There the longest load is that of one matrix, whatever the number of ranks. A matrix of sides L >= n in the hands of g
ranks, L / g of its long side each, costs each of them (6 L / g + 14 n) n^2 FLOPs: they share the products of the long
side, sum two n x n Gram matrices, and repeat what is left. That is more in all, and less for each.

Pure Python over names and shapes, in integers, like `dmuon.assignment`:

1. A limit on what a single matrix may cost a rank says how many own each: as few as keep it. The loads there can be
   are tried as limits.
2. The owners of one matrix are 2, 4 or 8 consecutive shard coordinates of one replicate row, from a multiple of that
   number on. So groups of two sizes are nested or have nothing in common, and all lie within nodes.
3. Longest first: what most ranks own goes first, to the group whose fullest rank has least; whole ones go last.

The assignment changes only where its longest load gets shorter, the sums counted, and nobody holds more elements than
the cap allows.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from dmuon.assignment import MEMORY_SLACKS, Assignment, Owner, newton_schulz_flops

NUM_OWNERS = (2, 4, 8)

STRIP_ROWS = 8
"""A strip of the long side is a multiple of this: 16 bytes in half precision, in either layout."""

MAX_LIMITS = 32
"""Step 1 tries as many; a model of few shapes has fewer."""

SUM_FLOPS, LATENCY_FLOPS = 15_000, 45 * 10**9
"""What an H200 computes while an element of a Gram matrix travels through NVLink, in two sums over a ring, 9/16 of the
elements in float32; and while three collectives start."""


class Kind(NamedTuple):
    """What parameters of one shape cost. `long`, `small`: sides of a matrix that can be cut; 0 of what can't."""

    flops: int
    numel: int
    long: int
    small: int

    def flops_of(self, num_owners: int) -> int:
        """FLOPs of each owner."""
        return self.flops if num_owners == 1 else joint_flops((self.long, self.small), num_owners)

    def load_of(self, num_owners: int) -> int:
        """FLOPs of each owner, and what it could compute while the Gram matrices are summed."""
        if num_owners == 1:
            return self.flops
        sums = SUM_FLOPS * self.small**2 * (num_owners - 1) // num_owners
        return self.flops_of(num_owners) + sums + LATENCY_FLOPS

    def can_have(self, num_owners: int) -> bool:
        return num_owners == 1 or (self.long > 0 and self.long % (num_owners * STRIP_ROWS) == 0)


def joint_flops(shape: Sequence[int], num_owners: int) -> int:
    """FLOPs of each of several owners of a matrix: (6 L / g + 14 n) n^2."""
    small, long = sorted(shape)
    return (6 * long // num_owners + 14 * small) * small**2


def kind_of(shape: Sequence[int], split: Sequence[int] = ()) -> Kind:
    """Of a parameter; `split` as in `newton_schulz_flops`."""
    small, long = sorted(shape) if len(shape) == 2 and not split else (0, 0)
    return Kind(newton_schulz_flops(shape, split), math.prod(shape), long, small)


def share_largest(
    assignment: Assignment,
    shapes: Mapping[str, Sequence[int]],
    num_replicate: int,
    num_shard: int,
    max_owners: int,
    splits: Mapping[str, Sequence[int]] | None = None,
) -> Assignment:
    """The assignment, or another one with joint owners whose longest load is shorter. See the top of the module.

    Args:
        assignment: what `assign` made of the other arguments.
        max_owners: ranks of a node, of which 2, 4 or 8 may own a matrix if they divide this number and `num_shard`.
    """
    sizes = [size for size in NUM_OWNERS if max_owners % size == 0 and num_shard % size == 0]
    names: dict[Kind, list[str]] = {}
    for name, shape in sorted(shapes.items()):
        names.setdefault(kind_of(shape, (splits or {}).get(name, ())), []).append(name)
    num_slots = num_replicate * num_shard
    largest = max(assignment.total.numel // num_slots, assignment.largest.numel)
    cap = max(math.floor(MEMORY_SLACKS[0] * largest), max(assignment.numel.values()))

    longest, best = max(assignment.flops.values()), assignment
    for num_owners in _choices(names, sizes, longest):
        loads = sum(len(names[kind]) * num * kind.load_of(num) for kind, num in num_owners.items())
        if loads >= longest * num_slots:
            continue
        owners, most = _deal(names, num_owners, num_replicate, num_shard)
        found = _assignment(assignment, names, num_owners, owners)
        if most < longest and max(found.numel.values()) <= cap:
            longest, best = most, found
    return best


def _choices(names: Mapping[Kind, list[str]], sizes: Sequence[int], longest: int) -> Iterator[dict[Kind, int]]:
    """How many own each kind under every limit on a single load that cuts something; the lowest limits last."""
    loads = {kind: {num: kind.load_of(num) for num in (1, *sizes) if kind.can_have(num)} for kind in names}
    lowest = max((min(of_kind.values()) for of_kind in loads.values()), default=0)
    end = min(longest, max((kind.flops for kind in names), default=0))
    limits = sorted({load for of_kind in loads.values() for load in of_kind.values() if lowest <= load < end})
    for limit in reversed(limits[:: -(-len(limits) // MAX_LIMITS) or 1]):
        yield {kind: next(num for num, load in of_kind.items() if load <= limit) for kind, of_kind in loads.items()}


def _deal(
    names: Mapping[Kind, list[str]], num_owners: Mapping[Kind, int], num_replicate: int, num_shard: int
) -> tuple[dict[str, Owner], int]:
    """The first owner of each parameter, and the longest load, sums included."""
    loads = {Owner(replicate, shard): 0 for shard in range(num_shard) for replicate in range(num_replicate)}
    owners: dict[str, Owner] = {}
    for size in sorted(set(num_owners.values()), reverse=True):
        groups = [owner for owner in loads if owner.shard % size == 0]
        fullest = [(max(loads[member] for member in members(owner, size)), index) for index, owner in enumerate(groups)]
        heapq.heapify(fullest)
        kinds = [kind for kind, num in num_owners.items() if num == size]
        for kind in sorted(kinds, key=lambda kind: (-kind.load_of(size), kind)):
            for name in names[kind]:
                load, index = fullest[0]
                owners[name] = groups[index]
                heapq.heapreplace(fullest, (load + kind.load_of(size), index))
                for member in members(groups[index], size):
                    loads[member] += kind.load_of(size)
    return owners, max(loads.values())


def _assignment(
    before: Assignment, names: Mapping[Kind, list[str]], num_owners: Mapping[Kind, int], owners: Mapping[str, Owner]
) -> Assignment:
    flops, numel = dict.fromkeys(before.flops, 0), dict.fromkeys(before.numel, 0)
    for kind, num in num_owners.items():
        for name in names[kind]:
            for member in members(owners[name], num):
                flops[member] += kind.flops_of(num)
                numel[member] += kind.numel // num
    joint = {name: num for kind, num in num_owners.items() if num > 1 for name in names[kind]}
    return replace(
        before,
        owners={name: owners[name] for name in before.owners},
        flops=flops,
        numel=numel,
        num_owners={name: joint[name] for name in before.owners if name in joint},
    )


def members(first: Owner, num_owners: int) -> list[Owner]:
    """The slots that own a parameter jointly, each a strip of it, in the order of the strips."""
    return [Owner(first.replicate, first.shard + index) for index in range(num_owners)]
