"""Who owns what: matrices to (replicate, shard) slots, by exact Newton-Schulz cost under a memory cap.

Pure Python over names and shapes. The same input gives the same owners on every rank and every run.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# How far a slot's number of elements may exceed the larger of the mean and the largest matrix. A tight bound can force
# costly matrices together: each is tried, and the one whose worse ratio, of cost or of elements, is best wins.
MEMORY_SLACKS = (1.15, 1.25, 1.35, math.inf)


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
    fewest_flops = max(sum(costs.values()) / num_slots, max(costs.values(), default=0))
    fewest_numel = max(sum(sizes.values()) / num_slots, max(sizes.values(), default=0))

    def totals(slots: dict[str, int], of: dict[str, int]) -> list[int]:
        sums = [0] * num_slots
        for name, slot in slots.items():
            sums[slot] += of[name]
        return sums

    def worse_ratio(slots: dict[str, int]) -> float:
        if not slots:
            return 0.0
        return max(max(totals(slots, costs)) / fewest_flops, max(totals(slots, sizes)) / fewest_numel)

    tried = [_longest_first(costs, sizes, num_slots, slack * fewest_numel) for slack in MEMORY_SLACKS]
    slots = min(tried, key=worse_ratio)
    by_slot = [slot_owner(slot, num_replicate) for slot in range(num_slots)]
    return Assignment(
        owners={name: by_slot[slots[name]] for name in shapes},
        flops=dict(zip(by_slot, totals(slots, costs), strict=True)),
        numel=dict(zip(by_slot, totals(slots, sizes), strict=True)),
        _floor=fewest_flops,
    )


def _longest_first(costs: dict[str, int], sizes: dict[str, int], num_slots: int, cap: float) -> dict[str, int]:
    """The slot of each name; `cap` bounds the elements of a slot as long as any slot has room."""
    slots: dict[str, int] = {}
    heap = [(0, 0, slot) for slot in range(num_slots)]  # flops, elements, slot
    for name in sorted(costs, key=lambda name: (-costs[name], -sizes[name], name)):
        full = []
        while heap and heap[0][1] + sizes[name] > cap:
            full.append(heapq.heappop(heap))
        if not heap:
            # No slot has room: the emptiest one, or the cap itself would pile matrices up.
            heapq.heappush(heap, full.pop(min(range(len(full)), key=lambda i: (full[i][1], full[i][0]))))
        flops, numel, slot = heapq.heappop(heap)
        slots[name] = slot
        for entry in (*full, (flops + costs[name], numel + sizes[name], slot)):
            heapq.heappush(heap, entry)
    return slots
