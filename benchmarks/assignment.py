"""How evenly owners are loaded: longest load and most elements of a slot over their floors, and what is possible.

python -m benchmarks.assignment                                                    # the table, a minute
python -m benchmarks.assignment --output benchmarks/results/assignment.json --page docs/assignment.md
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import re
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.record import record
from dmuon.assignment import Assignment, Cost, Owner, assign, lower_bound, newton_schulz_flops
from dmuon.joint_assignment import kind_of, members, share_largest
from models.llama.sizes import FLAVORS

Shapes = dict[str, tuple[int, ...]]
Stock = tuple[tuple[Cost, int], ...]
"""Each distinct cost, costliest first, and how many parameters have it."""

MAX_LOAD, MAX_NUMEL = Fraction(103, 100), Fraction(115, 100)
"""The aims, in floors."""

MARKED = re.compile(r"(<!-- benchmarks\.assignment -->)\n\n(.*?)\n\n(<!-- end -->)", re.DOTALL)
"""Where the tables stand in docs/assignment.md: those of one owner each, then those of joint owners."""

RANKS_OF_A_NODE = 8

MAX_KINDS = 400
"""Kinds of shares beyond which no exhaustive search is tried."""


@dataclass(frozen=True)
class Case:
    """A model on a number of slots. `splits` as in `assign`."""

    model: str
    num_slots: int
    shapes: Shapes
    splits: Mapping[str, Sequence[int]] | None = None


def llama_shapes(name: str, flavor: str) -> Shapes:
    """The dedicated parameters of one of our own sizes: the matrices of the blocks."""
    shapes = FLAVORS[name][flavor].parameter_shapes()
    return {name: shape for name, shape in shapes.items() if name.startswith("layers.") and len(shape) == 2}


def blocks(num_layers: int, **shapes: tuple[int, ...]) -> Shapes:
    """The same parameters in each of a number of blocks."""
    return {f"layers.{layer}.{name}": shape for layer in range(num_layers) for name, shape in shapes.items()}


QWEN_MLP = {"gate": (18944, 3584), "up": (18944, 3584), "down": (3584, 18944)}
QWEN = blocks(28, q=(3584, 3584), k=(512, 3584), v=(512, 3584), o=(3584, 3584), **QWEN_MLP)
QWEN_FUSED = blocks(28, qkv=(4608, 3584), o=(3584, 3584), **QWEN_MLP)
MIXTRAL_EXPERTS = {"w1": (8, 14336, 4096), "w2": (8, 4096, 14336), "w3": (8, 14336, 4096)}
MIXTRAL = blocks(32, q=(4096, 4096), k=(1024, 4096), v=(1024, 4096), o=(4096, 4096), **MIXTRAL_EXPERTS)
LARGE_MLP = {"gate": (28672, 8192), "up": (28672, 8192), "down": (8192, 28672)}
MANY = blocks(714, q=(8192, 8192), k=(1024, 8192), v=(1024, 8192), o=(8192, 8192), **LARGE_MLP)

AIMED_AT = (
    Case("Llama 3 8B", 64, llama_shapes("llama3", "8B")),
    Case("Llama 3 70B", 512, llama_shapes("llama3", "70B")),
    Case("Qwen2.5 7B", 32, QWEN),
)
CASES = (
    *AIMED_AT,
    *(Case("Llama 3 1B", num_slots, llama_shapes("llama3", "1B")) for num_slots in (2, 8)),
    *(Case("Llama 3 3B", num_slots, llama_shapes("llama3", "3B")) for num_slots in (16, 66)),
    *(Case("Llama 3 8B", num_slots, llama_shapes("llama3", "8B")) for num_slots in (8, 16, 45, 128)),
    *(Case("Llama 3 70B", num_slots, llama_shapes("llama3", "70B")) for num_slots in (64, 256)),
    *(Case("Llama 3 405B", num_slots, llama_shapes("llama3", "405B")) for num_slots in (128, 512, 1024)),
    Case("Llama 2 13B", 64, llama_shapes("llama2", "13B")),
    Case("Qwen2.5 7B, q, k, v as one", 32, QWEN_FUSED),
    Case("the same, split", 32, QWEN_FUSED, {name: (3584, 512, 512) for name in QWEN_FUSED if name.endswith("qkv")}),
    Case("Mixtral 8x7B, experts stacked", 32, MIXTRAL),
    Case(f"{len(MANY):,} parameters", 1000, MANY),
    Case(f"{len(MANY):,} parameters", 4096, MANY),
)


def stock_of(case: Case) -> Stock:
    """What has to be assigned, without names."""
    costs = (
        Cost(newton_schulz_flops(shape, (case.splits or {}).get(name, ())), math.prod(shape))
        for name, shape in case.shapes.items()
    )
    return tuple(sorted(Counter(costs).items(), reverse=True))


def floor_of(stock: Stock, num_slots: int, field: int) -> Fraction:
    """The larger of the mean and the largest parameter, in FLOPs (field 0) or in elements (1)."""
    total = sum(cost[field] * count for cost, count in stock)
    return max(Fraction(total, num_slots), Fraction(max(cost[field] for cost, _ in stock)))


def longest_first(stock: Stock, num_slots: int) -> tuple[float, float]:
    """Load and elements over their floors if nothing is exchanged: the best of four caps on the elements."""
    floors = [floor_of(stock, num_slots, field) for field in (0, 1)]
    ratios: list[tuple[float, float]] = []
    for slack in (1.15, 1.25, 1.35, math.inf):
        heap = [(0, 0, slot) for slot in range(num_slots)]  # FLOPs, elements, slot
        for cost, count in stock:
            full = []
            for _ in range(count):
                while heap and heap[0][1] + cost.numel > slack * floors[1]:
                    full.append(heapq.heappop(heap))
                if not heap:
                    heap = [full.pop(min(range(len(full)), key=lambda i: (full[i][1], full[i][0])))]
                flops, numel, slot = heap[0]
                heapq.heapreplace(heap, (flops + cost.flops, numel + cost.numel, slot))
            for entry in full:
                heapq.heappush(heap, entry)
        most = [max(entry[field] for entry in heap) for field in (0, 1)]
        ratios.append((float(most[0] / floors[0]), float(most[1] / floors[1])))
    return min(ratios, key=max)


def fits(stock: Stock, num_slots: int, most: Cost, max_looks: int = 1_000_000) -> bool | None:
    """Whether any assignment at all has at most `most` FLOPs and elements in every slot, by exhaustive search.

    Slots may hold more than there is, so only the kinds of shares to which nothing can be added count. The search
    chooses how many slots hold the first kind, the second one, and so on; it turns back where what is left can't fit,
    cost by cost or in sum.

    Returns:
        None if it's too much to search.
    """
    kinds = _full_kinds(stock, most)
    if len(kinds) > MAX_KINDS:
        return None
    best = [[max(kind[i] for kind in kinds[start:]) for i in range(len(stock))] for start in range(len(kinds))]
    looks = 0

    @cache
    def search(start: int, num_left: int, needs: tuple[int, ...]) -> bool:
        nonlocal looks
        looks += 1
        if not any(needs):
            return True
        if start == len(kinds) or looks > max_looks:
            return False
        if any(need > num_left * most_of_it for need, most_of_it in zip(needs, best[start], strict=True)):
            return False
        for field in (0, 1):
            total = sum(need * cost[field] for need, (cost, _) in zip(needs, stock, strict=True))
            if total > num_left * most[field]:
                return False
        kind = kinds[start]
        useful = max(-(-need // each) for need, each in zip(needs, kind, strict=True) if each)
        for times in range(min(useful, num_left), -1, -1):
            left = tuple(max(0, need - times * each) for need, each in zip(needs, kind, strict=True))
            if search(start + 1, num_left - times, left):
                return True
        return False

    found = search(0, num_slots, tuple(count for _, count in stock))
    return True if found else None if looks > max_looks else False


def _full_kinds(stock: Stock, most: Cost) -> list[tuple[int, ...]]:
    """How many of each cost a slot holds if nothing can be added to it, for every such slot; best ones first."""
    kinds: list[tuple[tuple[int, ...], Cost]] = [((), most)]
    for i, (cost, count) in enumerate(stock):
        longer = []
        for kind, room in kinds:
            up_to = min(count, *(room[field] // cost[field] for field in (0, 1)))
            for number in range(up_to if i == len(stock) - 1 else 0, up_to + 1):
                longer.append(((*kind, number), Cost(*(room[f] - number * cost[f] for f in (0, 1)))))
        kinds = longer
    full = [
        kind
        for kind, room in kinds
        if all(
            number == count or cost.flops > room.flops or cost.numel > room.numel
            for number, (cost, count) in zip(kind, stock, strict=True)
        )
    ]
    return sorted(full, reverse=True) or [(0,) * len(stock)]


def least(stock: Stock, num_slots: int, field: int, limit: Fraction) -> Fraction:
    """The smallest possible largest sum of one field, in floors, with the other one at most `limit` floors."""
    floor = floor_of(stock, num_slots, field)
    caps = [0, 0]
    caps[1 - field] = math.floor(limit * floor_of(stock, num_slots, 1 - field))
    counts = (range(min(count, 2 * floor // cost[field]) + 1) for cost, count in stock)
    sums = {sum(n * w[field] for n, (w, _) in zip(numbers, stock, strict=True)) for numbers in product(*counts)}
    candidates = sorted(total for total in sums if floor <= total <= 2 * floor)
    low, high = 0, len(candidates) - 1
    while low < high:
        middle = (low + high) // 2
        caps[field] = candidates[middle]
        if fits(stock, num_slots, Cost(*caps)):
            high = middle
        else:
            low = middle + 1
    return candidates[low] / floor


def bound_of(stock: Stock, num_slots: int, assignment: Assignment) -> int:
    """FLOPs below which no longest load can be proved to lie, elements at most those of 1.15 floors or as assigned."""
    longest, numel = max(assignment.flops.values()), max(assignment.numel.values())
    bound = lower_bound([cost.flops for cost, count in stock for _ in range(count)], num_slots)
    cap = max(numel, math.floor(MAX_NUMEL * floor_of(stock, num_slots, 1)))
    return longest if fits(stock, num_slots, Cost(longest - 1, cap)) is False else bound


def measure(case: Case, num_repeats: int = 5) -> dict[str, Any]:
    """One row of the table; all but the time of the processor in floors."""
    durations_s = []
    for _ in range(num_repeats):
        start_s = time.process_time()
        assignment = assign(case.shapes, 1, case.num_slots, case.splits)
        durations_s.append(time.process_time() - start_s)
    stock = stock_of(case)
    floor = floor_of(stock, case.num_slots, 0)
    first_load, first_numel = longest_first(stock, case.num_slots)
    return {
        "model": case.model,
        "num_parameters": len(case.shapes),
        "num_slots": case.num_slots,
        "load": round(assignment.imbalance, 4),
        "bound": round(float(bound_of(stock, case.num_slots, assignment) / floor), 4),
        "numel": round(assignment.numel_imbalance, 4),
        "longest_first_load": round(first_load, 4),
        "longest_first_numel": round(first_numel, 4),
        "assign_s": round(statistics.median(durations_s), 4),
    }


def possible(case: Case) -> dict[str, Any]:
    """What no assignment can be better than, in one measure while the other keeps to its aim."""
    stock = stock_of(case)
    return {
        "model": case.model,
        "num_slots": case.num_slots,
        "least_load": round(float(least(stock, case.num_slots, 0, MAX_NUMEL)), 4),
        "least_numel": round(float(least(stock, case.num_slots, 1, MAX_LOAD)), 4),
    }


def compare(max_slots: int) -> dict[str, dict[str, float]]:
    """Each of our sizes on 1, 2, ... slots: how many counts have a shorter, an equal and a longer longest load than
    longest first, or more elements where these are above 1.15 floors; and the mean of the longest load."""
    found = {}
    for name, sizes in FLAVORS.items():
        for flavor in sizes:
            shapes = llama_shapes(name, flavor)
            results: Counter[str] = Counter()
            loads, first_loads = [], []
            for num_slots in range(1, max_slots + 1):
                assignment = assign(shapes, 1, num_slots)
                first_load, first_numel = longest_first(stock_of(Case(flavor, num_slots, shapes)), num_slots)
                results[verdict(assignment, first_load, first_numel)] += 1
                loads.append(assignment.imbalance)
                first_loads.append(first_load)
            means = {"mean_load": round(statistics.mean(loads), 4)}
            means["longest_first_mean_load"] = round(statistics.mean(first_loads), 4)
            found[f"{name} {flavor}"] = {**{key: results[key] for key in ("better", "equal", "worse")}, **means}
    return found


def longest_with_sums(assignment: Assignment, shapes: Shapes) -> int:
    """The longest load if joint owners also wait for the sums between them, in FLOPs."""
    loads: Counter[Owner] = Counter()
    for name, owner in assignment.owners.items():
        num_owners = assignment.num_owners.get(name, 1)
        for member in members(owner, num_owners):
            loads[member] += kind_of(shapes[name]).load_of(num_owners)
    return max(loads.values())


def on_nodes(shapes: Shapes, num_ranks: int) -> tuple[Assignment, Assignment]:
    """With one owner each, and with joint owners where that helps: a replicate row in each node."""
    degrees = num_ranks // RANKS_OF_A_NODE, RANKS_OF_A_NODE
    single = assign(shapes, *degrees)
    return single, share_largest(single, shapes, *degrees, RANKS_OF_A_NODE)


def measure_joint(flavor: str, num_ranks: int) -> dict[str, Any]:
    """One size with and without joint owners. Loads in TFLOP, and over their mean with one owner each."""
    shapes = llama_shapes("llama3", flavor)
    start_s = time.process_time()
    single, joint = on_nodes(shapes, num_ranks)
    assign_s = time.process_time() - start_s
    mean = Fraction(single.total.flops, num_ranks)
    found: dict[str, Any] = {"model": f"Llama 3 {flavor}", "num_ranks": num_ranks, "num_parameters": len(shapes)}
    for key, longest in (
        ("single", max(single.flops.values())),
        ("joint", max(joint.flops.values())),
        ("joint_with_sums", longest_with_sums(joint, shapes)),
    ):
        found |= {f"{key}_tflop": round(longest / 1e12, 3), f"{key}_over_mean": round(float(longest / mean), 3)}
    owners = Counter(joint.num_owners.values())
    found["num_joint"] = {str(num_owners): owners[num_owners] for num_owners in sorted(owners)}
    return {**found, "assign_s": round(assign_s, 4)}


def compare_joint(max_ranks: int) -> dict[str, dict[str, float]]:
    """Each size on 1, 2, ... nodes: how many counts have a shorter, an equal and a longer longest load by joint owners,
    sums counted; and the mean of the ratio."""
    found = {}
    for flavor in FLAVORS["llama3"]:
        shapes = llama_shapes("llama3", flavor)
        results: Counter[str] = Counter()
        ratios = []
        for num_ranks in range(RANKS_OF_A_NODE, max_ranks + 1, RANKS_OF_A_NODE):
            single, joint = on_nodes(shapes, num_ranks)
            ratios.append(longest_with_sums(joint, shapes) / max(single.flops.values()))
            results["shorter" if ratios[-1] < 1 else "equal" if ratios[-1] == 1 else "longer"] += 1
        counts = {key: results[key] for key in ("shorter", "equal", "longer")}
        found[f"llama3 {flavor}"] = {**counts, "mean_ratio": round(statistics.mean(ratios), 4)}
    return found


def verdict(assignment: Assignment, first_load: float, first_numel: float) -> str:
    """Against longest first. Elements count where they are above 1.15 floors."""
    if assignment.imbalance > first_load or assignment.numel_imbalance > max(float(MAX_NUMEL), first_numel):
        return "worse"
    return "better" if assignment.imbalance < first_load else "equal"


def render_joint(result: Mapping[str, Any]) -> str:
    """The tables of joint owners."""
    lines = [
        "| model | matrices | ranks | one owner each | joint owners | with sums | owned jointly | ms |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in result["joint"]:
        loads = [f"{row[f'{key}_tflop']:.3f} ({row[f'{key}_over_mean']:.2f})" for key in ("single", "joint")]
        loads.append(f"{row['joint_with_sums_tflop']:.3f}")
        owned = ", ".join(f"{count} by {num_owners}" for num_owners, count in row["num_joint"].items()) or "none"
        cells = [row["model"], f"{row['num_parameters']:,}", f"{row['num_ranks']:,}", *loads, owned]
        lines.append(f"| {' | '.join(cells)} | {row['assign_s'] * 1e3:.1f} |")
    lines += [
        "",
        f"The same on 1 to {result['max_slots'] // RANKS_OF_A_NODE} nodes, sums counted, against one owner each:",
        "",
        "| size | shorter | equal | longer | mean ratio |",
        "|---|---|---|---|---|",
    ]
    for size, row in result["joint_comparison"].items():
        lines.append(f"| {size} | {row['shorter']} | {row['equal']} | {row['longer']} | {row['mean_ratio']:.4f} |")
    return "\n".join(lines)


def render(result: Mapping[str, Any]) -> str:
    """The tables of docs/assignment.md."""
    lines = [
        "| model | parameters | slots | longest load | possible | elements | longest first: load, elements | ms |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        ratios = [f"{row[key]:.4f}" for key in ("load", "bound", "numel")]
        first = f"{row['longest_first_load']:.4f}, {row['longest_first_numel']:.4f}"
        cells = [row["model"], f"{row['num_parameters']:,}", f"{row['num_slots']:,}", *ratios, first]
        lines.append(f"| {' | '.join(cells)} | {row['assign_s'] * 1e3:.1f} |")
    lines += [
        "",
        "| model | slots | least load, elements at most 1.15 | least elements, load at most 1.03 |",
        "|---|---|---|---|",
    ]
    lines += (
        f"| {row['model']} | {row['num_slots']:,} | {row['least_load']:.4f} | {row['least_numel']:.4f} |"
        for row in result["possible"]
    )
    lines += [
        "",
        f"Longest load on 1 to {result['max_slots']:,} slots, against longest first alone:",
        "",
        "| size | shorter | equal | longer | mean | mean of longest first |",
        "|---|---|---|---|---|---|",
    ]
    for size, row in result["comparison"].items():
        counts = f"{row['better']} | {row['equal']} | {row['worse']}"
        lines.append(f"| {size} | {counts} | {row['mean_load']:.4f} | {row['longest_first_mean_load']:.4f} |")
    return "\n".join(lines)


def main() -> None:
    """Print the table, and write the record and the page where asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-slots", type=int, default=1024, help="of the comparison with longest first")
    parser.add_argument("--output", type=Path, help="JSON")
    parser.add_argument("--page", type=Path, help="the text between its two marks is replaced by the tables")
    arguments = parser.parse_args()
    rows = [measure(case) for case in CASES]
    result = record(
        "assignment",
        rows=rows,
        possible=[possible(case) for case in AIMED_AT],
        max_slots=arguments.max_slots,
        comparison=compare(arguments.max_slots),
        joint=[measure_joint(flavor, ranks) for ranks in (256, 1024) for flavor in ("1B", "3B", "8B", "70B", "405B")],
        joint_comparison=compare_joint(arguments.max_slots),
    )
    print(f"{render(result)}\n\n{render_joint(result)}")
    if arguments.output:
        arguments.output.write_text(json.dumps(result) + "\n")
    if arguments.page:
        tables = iter((render(result), render_joint(result)))
        page = arguments.page.read_text()
        arguments.page.write_text(MARKED.sub(lambda marks: f"{marks[1]}\n\n{next(tables)}\n\n{marks[3]}", page))


if __name__ == "__main__":
    main()
