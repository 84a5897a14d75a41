"""Who owns what: matrices to (replicate, shard) slots, balanced in Newton-Schulz cost and in elements.

Pure Python over names and shapes, compared as integers and fractions: the same names and shapes give the same owners
on every rank and in every run, whatever their order, and slot k holds the same for every (replicate, shard) of a size.

The longest load comes first: everybody waits for it in each step. The elements of a slot, which are memory, may reach
1.15 of their floor, the larger of the mean and the largest parameter; within that they only break ties.

1. A model has few distinct costs, (FLOPs, elements) of a parameter, each many times. So the search knows no names:
   what a slot holds is a share, a tuple of costs, and equal shares are counted, not listed.
2. Longest first: the costliest parameter goes to the least loaded slot that has room. Several caps on the elements
   are tried, since a tight one can force costly matrices together; the one whose worse ratio is best is kept.
3. Exchanges: the slot with the longest load gives up to four parameters to a less loaded one for up to four of its,
   so that the longer load of both falls and neither exceeds the cap: 1.15, or what step 2 needed if that is more.
   All slots with equal shares do it at once. When nothing is left to gain, the same with the roles of the two
   measures swapped lowers the elements under the longest load that was reached, and so on until neither falls.
4. Names are dealt to the shares, consecutive names to consecutive slots.

Step 3 never makes the longest load longer, nor the elements more than the cap. It stops at a lower bound, within a
thousandth of the floor, or after a fixed number of looks. docs/assignment.md has figures.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import accumulate, combinations_with_replacement
from typing import NamedTuple

MEMORY_SLACKS = (Fraction(115, 100), Fraction(125, 100), Fraction(135, 100))
"""How far the elements of a slot may exceed their floor. Longest first tries all of them, and no cap."""

ENOUGH = Fraction(1001, 1000)
"""A largest sum this near to its floor isn't searched any lower."""

MAX_EXCHANGED, MAX_PARTS, MAX_LOOKS = 4, 400, 200_000
"""Bounds on the search: costs that go one way in an exchange, ways to choose them, looks in all."""


@dataclass(frozen=True, order=True)
class Owner:
    """Coordinates on the data-parallel axes where a parameter's master weights and momentum live."""

    replicate: int
    shard: int


class Cost(NamedTuple):
    """What a parameter costs its owner: FLOPs of Newton-Schulz in a step, and elements to keep."""

    flops: int
    numel: int


FIELDS = FLOPS, NUMEL = 0, 1
"""The fields of a cost, for what treats both alike."""


class Share(NamedTuple):
    """What one slot holds, or a part of that: the sum of its costs, then these, costliest first."""

    total: Cost
    costs: tuple[Cost, ...]


@dataclass(frozen=True)
class Assignment:
    """The owner of every parameter, and what each slot carries. Slots count shard-major: see `slot_owner`.

    Attributes:
        owners: by name, in the order in which the names were given.
        flops, numel: sums over the parameters of each slot; of all slots, idle ones too.
        largest: FLOPs of the costliest parameter and elements of the largest one. They need not be the same.
        total: of all parameters, each whole.
        num_owners: of what several slots own jointly, the one in `owners` and those after it on the shard axis.
    """

    owners: dict[str, Owner]
    flops: dict[Owner, int]
    numel: dict[Owner, int]
    largest: Cost
    total: Cost
    num_owners: dict[str, int] = field(default_factory=dict)

    @property
    def imbalance(self) -> float:
        """The longest load over the larger of the mean and the costliest parameter; below 1.0 only by joint owners."""
        return self._ratio(self.flops, FLOPS)

    @property
    def numel_imbalance(self) -> float:
        """The same of elements: the most of a slot over the larger of their mean and the largest parameter."""
        return self._ratio(self.numel, NUMEL)

    def _ratio(self, sums: dict[Owner, int], measure: int) -> float:
        floor = max(Fraction(self.total[measure], len(sums)), Fraction(self.largest[measure]))
        return float(max(sums.values()) / floor) if floor else 1.0


def newton_schulz_flops(shape: Sequence[int], split: Sequence[int] = ()) -> int:
    """FLOPs of five Newton-Schulz steps with symmetric kernels: min(6 a + 14, 15 a + 5) n^3, per matrix.

    n is the smaller side, a the ratio of the sides. The order among shapes is what matters here: another number of
    steps scales all of them nearly alike.

    Args:
        shape: of a matrix, or of a stack of them over the leading dims.
        split: row sizes of the pieces of dim 0 that are matrices of their own. Empty: none are.

    Raises:
        ValueError: the row sizes don't sum to dim 0 of a matrix.
    """
    *stack, rows, cols = shape
    if split:
        if stack or sum(split) != rows:
            raise ValueError(f"split {tuple(split)}: must sum to dim 0 of a matrix, here of shape {tuple(shape)}")
        return sum(newton_schulz_flops((piece, cols)) for piece in split)
    small, big = sorted((rows, cols))
    return math.prod(stack) * min(6 * big + 14 * small, 15 * big + 5 * small) * small * small


def slot_owner(slot: int, num_replicate: int) -> Owner:
    """Consecutive slots lie in different rows, so that consecutive owners lie on different nodes."""
    shard, replicate = divmod(slot, num_replicate)
    return Owner(replicate, shard)


def assign(
    shapes: Mapping[str, Sequence[int]],
    num_replicate: int,
    num_shard: int,
    splits: Mapping[str, Sequence[int]] | None = None,
) -> Assignment:
    """Gives each parameter one owner. See the top of the module.

    Args:
        shapes: logical shape of each dedicated parameter, by name.
        num_replicate, num_shard: sizes of the data-parallel axes.
        splits: row sizes of those parameters whose rows are several matrices; see `newton_schulz_flops`.
    """
    splits = splits or {}
    names: dict[Cost, list[str]] = {}
    for name, shape in sorted(shapes.items()):
        cost = Cost(newton_schulz_flops(shape, splits.get(name, ())), math.prod(shape))
        names.setdefault(cost, []).append(name)
    shares = _balance([cost for cost in sorted(names, reverse=True) for _ in names[cost]], num_replicate * num_shard)
    by_slot = [slot_owner(slot, num_replicate) for slot in range(len(shares))]
    slots = _deal(names, shares)
    return Assignment(
        owners={name: by_slot[slots[name]] for name in shapes},
        flops={owner: share.total.flops for owner, share in zip(by_slot, shares, strict=True)},
        numel={owner: share.total.numel for owner, share in zip(by_slot, shares, strict=True)},
        largest=Cost(*(max((cost[field] for cost in names), default=0) for field in FIELDS)),
        total=Cost(*(sum(share.total[field] for share in shares) for field in FIELDS)),
    )


def lower_bound(amounts: Iterable[int], num_slots: int) -> int:
    """No assignment has a largest sum below this: mean, largest amount, and what must lie together.

    Among the k * num_slots + 1 largest amounts some k + 1 share a slot, and these are at least the smallest k + 1.
    """
    ordered = sorted(amounts, reverse=True)
    sums = [0, *accumulate(ordered)]
    together = (sums[i + 1] - sums[i - i // num_slots] for i in range(0, len(ordered), num_slots))
    return max(-(-sums[-1] // num_slots), max(together, default=0))


def _balance(costs: list[Cost], num_slots: int) -> list[Share]:
    """The share of each slot, heaviest first. `costs` are those of all parameters, costliest first."""
    if not costs:
        return [_share(())] * num_slots
    amounts = [[cost[field] for cost in costs] for field in FIELDS]
    floors = [max(Fraction(sum(amount), num_slots), Fraction(max(amount))) for amount in amounts]
    enough = [max(math.floor(ENOUGH * floors[field]), lower_bound(amounts[field], num_slots)) for field in FIELDS]
    caps = [*(math.floor(slack * floors[NUMEL]) for slack in MEMORY_SLACKS), sum(amounts[NUMEL])]
    tried = [_longest_first(costs, num_slots, cap) for cap in caps]
    shares = min(tried, key=lambda shares: max(_most(shares, field) / floors[field] for field in FIELDS))

    cap = max(caps[0], _most(shares, NUMEL))
    search = _Search()
    while True:
        before = shares
        shares = search.lower(shares, FLOPS, enough[FLOPS], cap)
        shares = search.lower(shares, NUMEL, enough[NUMEL], _most(shares, FLOPS))
        if shares is before:
            return sorted(shares.elements(), reverse=True)


def _longest_first(costs: list[Cost], num_slots: int, cap: int) -> Counter[Share]:
    """`cap` bounds the elements of a slot as long as any slot has room for the next parameter."""
    held: list[list[Cost]] = [[] for _ in range(num_slots)]
    roomy = [(0, 0, slot) for slot in range(num_slots)]  # FLOPs, elements, slot
    full: list[tuple[int, int, int]] = []  # elements, FLOPs, slot
    num_looks = 0
    for cost in costs:
        # What had no room for a parameter can have some for a smaller one.
        while full and full[0][0] + cost.numel <= cap:
            numel, flops, slot = heapq.heappop(full)
            heapq.heappush(roomy, (flops, numel, slot))
        while roomy and roomy[0][1] + cost.numel > cap and num_looks < MAX_LOOKS:
            flops, numel, slot = heapq.heappop(roomy)
            heapq.heappush(full, (numel, flops, slot))
            num_looks += 1
        if roomy:
            flops, numel, slot = roomy[0]
            heapq.heapreplace(roomy, (flops + cost.flops, numel + cost.numel, slot))
        else:
            # No slot has room: the emptiest one, or the cap itself would pile matrices up.
            numel, flops, slot = full[0]
            heapq.heapreplace(full, (numel + cost.numel, flops + cost.flops, slot))
        held[slot].append(cost)
    return Counter(map(_share, held))


class _Search:
    """Exchanges between shares, until there is nothing to gain or MAX_LOOKS are taken: one a share, part or swap."""

    def __init__(self) -> None:
        self.num_looks = 0
        self._parts: dict[Share, list[Share]] = {}

    def lower(self, shares: Counter[Share], field: int, enough: int, cap: int) -> Counter[Share]:
        """Shares whose largest sum of `field` is lower, with sums of the other at most `cap`; or the very same ones."""
        changed = Counter(shares)
        while True:
            lows = sorted(changed, key=lambda share: (share.total[field], share))
            self.num_looks += len(lows)
            high = lows.pop()
            swaps = (self._best_swap(high, low, field, cap) for low in lows if self.num_looks < MAX_LOOKS)
            swap = next(filter(None, swaps), None) if high.total[field] > enough else None
            if swap is None:
                return changed if _most(changed, field) < _most(shares, field) else shares
            low, given, taken = swap
            count = min(changed[high], changed[low])
            for share, loses, gains in ((high, given, taken), (low, taken, given)):
                changed[share] -= count
                kept = Counter(share.costs) - Counter(loses.costs)
                changed[_share((*kept.elements(), *gains.costs))] += count
            changed = +changed  # without shares that no slot holds any more

    def _best_swap(self, high: Share, low: Share, field: int, cap: int) -> tuple[Share, Share, Share] | None:
        """`low`, what `high` gives and what it takes, so that the larger sum of both falls as far as it can."""
        other = 1 - field
        gap = high.total[field] - low.total[field]
        takeable = sorted(self._parts_of(low), key=lambda part: part.total[field])
        sums = [part.total[field] for part in takeable]
        best = None
        for given in self._parts_of(high):
            if self.num_looks >= MAX_LOOKS:
                break
            start = bisect_right(sums, given.total[field] - gap)
            end = bisect_left(sums, given.total[field])
            for taken in takeable[start:end]:
                moved = given.total[field] - taken.total[field]
                moved_other = given.total[other] - taken.total[other]
                most_other = max(high.total[other] - moved_other, low.total[other] + moved_other)
                if most_other <= cap:
                    swap = (max(high.total[field] - moved, low.total[field] + moved), most_other, given, taken)
                    best = min(best or swap, swap)
            self.num_looks += 1 + max(0, end - start)
        return best and (low, best[2], best[3])

    def _parts_of(self, share: Share) -> list[Share]:
        """All choices of up to MAX_EXCHANGED costs of a share, none included; of fewer if more than MAX_PARTS."""
        if share not in self._parts:
            counts = Counter(share.costs)
            size = MAX_EXCHANGED
            while size > 1 and math.comb(len(counts) + size, size) > MAX_PARTS:
                size -= 1
            choices = (part for num in range(size + 1) for part in combinations_with_replacement(counts, num))
            parts = (part for part in choices if all(part.count(cost) <= counts[cost] for cost in part))
            self._parts[share] = sorted(map(_share, parts))
            self.num_looks += len(self._parts[share])
        return self._parts[share]


def _deal(names: Mapping[Cost, list[str]], shares: list[Share]) -> dict[str, int]:
    """The slot of each name: consecutive names of a cost to consecutive slots that hold it."""
    places: dict[Cost, list[tuple[int, int]]] = {cost: [] for cost in names}
    for slot, share in enumerate(shares):
        for cost, count in Counter(share.costs).items():
            places[cost] += ((turn, slot) for turn in range(count))
    return {
        name: slot
        for cost, of_cost in names.items()
        for name, (_, slot) in zip(of_cost, sorted(places[cost]), strict=True)
    }


def _share(costs: Iterable[Cost]) -> Share:
    held = tuple(sorted(costs, reverse=True))
    return Share(Cost(sum(cost.flops for cost in held), sum(cost.numel for cost in held)), held)


def _most(shares: Iterable[Share], field: int) -> int:
    return max(share.total[field] for share in shares)
