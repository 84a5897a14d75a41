"""Who owns what: matrices to (replicate, shard) slots, by exact Newton-Schulz cost under a memory cap.

Pure Python over names and shapes. The same input gives the same owners on every rank and every run.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# How far a slot's number of elements may exceed the larger of the mean and the largest matrix.
MEMORY_SLACK = 1.15


@dataclass(frozen=True, order=True)
class Owner:
    """Coordinates on the data-parallel axes where a parameter's master weights and momentum live."""

    replicate: int
    shard: int


@dataclass(frozen=True)
class Assignment:
    """The owner of every parameter, and what each slot carries. Slots count shard-major: see `slot_owner`."""

    owners: dict[str, Owner]
    flops: dict[Owner, int]
    numel: dict[Owner, int]

    @property
    def imbalance(self) -> float:
        """The longest load over the larger of the mean load and the largest matrix; 1.0 is perfect."""
        return max(self.flops.values()) / self._floor if self.flops and self._floor else 1.0

    _floor: float = 0.0


def newton_schulz_flops(shape: Sequence[int]) -> int:
    """FLOPs of five Newton-Schulz steps with symmetric kernels: min(6 a + 14, 15 a + 5) n^3, per matrix of a stack.

    n is the smaller side, a the ratio of the sides. The order among shapes is what matters here: another number of
    steps scales all of them nearly alike.
    """
    *stack, rows, cols = shape
    small, big = sorted((rows, cols))
    return math.prod(stack) * min(6 * big + 14 * small, 15 * big + 5 * small) * small * small


def slot_owner(slot: int, num_replicate: int) -> Owner:
    """Consecutive slots lie in different rows, so that consecutive owners lie on different nodes."""
    shard, replicate = divmod(slot, num_replicate)
    return Owner(replicate, shard)


def assign(shapes: Mapping[str, Sequence[int]], num_replicate: int, num_shard: int) -> Assignment:
    """Longest processing time first: the costliest matrix goes to the least loaded slot that has room for it.

    Args:
        shapes: logical shape of each dedicated parameter, by name.
        num_replicate, num_shard: sizes of the data-parallel axes.
    """
    num_slots = num_replicate * num_shard
    costs = {name: newton_schulz_flops(shape) for name, shape in shapes.items()}
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    cap = MEMORY_SLACK * max(sum(sizes.values()) / num_slots, max(sizes.values(), default=0))
    flops, numel = [0] * num_slots, [0] * num_slots
    owners: dict[str, Owner] = {}
    heap = [(0, 0, slot) for slot in range(num_slots)]
    for name in sorted(shapes, key=lambda name: (-costs[name], -sizes[name], name)):
        passed_over = []
        while heap[0][1] + sizes[name] > cap and len(heap) > 1:
            passed_over.append(heapq.heappop(heap))
        _, _, slot = heapq.heappop(heap)
        flops[slot] += costs[name]
        numel[slot] += sizes[name]
        owners[name] = slot_owner(slot, num_replicate)
        heapq.heappush(heap, (flops[slot], numel[slot], slot))
        for entry in passed_over:
            heapq.heappush(heap, entry)
    by_slot = [slot_owner(slot, num_replicate) for slot in range(num_slots)]
    return Assignment(
        owners={name: owners[name] for name in shapes},
        flops=dict(zip(by_slot, flops, strict=True)),
        numel=dict(zip(by_slot, numel, strict=True)),
        _floor=max(sum(flops) / num_slots, max(costs.values(), default=0)),
    )
