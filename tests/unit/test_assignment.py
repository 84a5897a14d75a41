"""Owners: as even as can be in FLOPs under the cap on elements, the same everywhere, consecutive ones in other rows."""

from __future__ import annotations

import itertools
import json
import math
import pickle
import random
import subprocess
import sys
import time
from collections import Counter
from fractions import Fraction
from pathlib import Path

import pytest

from benchmarks.assignment import (
    AIMED_AT,
    MANY,
    MARKED,
    QWEN,
    QWEN_FUSED,
    Case,
    Shapes,
    bound_of,
    fits,
    floor_of,
    least,
    llama_shapes,
    longest_first,
    measure_joint,
    render,
    render_joint,
    stock_of,
    verdict,
)
from dmuon import assignment
from dmuon.assignment import Cost, Owner, assign, lower_bound, newton_schulz_flops, slot_owner
from models.llama.sizes import FLAVORS

ROOT = Path(__file__).parents[2]


def every_choice(shapes: Shapes, num_slots: int) -> set[tuple[int, int]]:
    """(longest load, most elements) of every assignment there is."""
    costs = [(newton_schulz_flops(shape), math.prod(shape)) for shape in shapes.values()]
    found = set()
    for slots in itertools.product(range(num_slots), repeat=len(costs)):
        sums = [[0, 0] for _ in range(num_slots)]
        for slot, (flops, numel) in zip(slots, costs, strict=True):
            sums[slot][0] += flops
            sums[slot][1] += numel
        found.add((max(flops for flops, _ in sums), max(numel for _, numel in sums)))
    return found


def small_cases() -> list[tuple[Shapes, int]]:
    """Few matrices of few shapes, wide and square ones, on two to four slots: small enough to try everything."""
    draw = random.Random(0)
    cases: list[tuple[Shapes, int]] = []
    for _ in range(60):
        pool = [(draw.randint(1, 9), draw.choice([draw.randint(1, 9), 60])) for _ in range(draw.randint(1, 4))]
        num_slots, num_matrices = draw.choice([(2, 8), (2, 6), (3, 6), (3, 7), (4, 6)])
        cases.append(({f"w{i}": draw.choice(pool) for i in range(num_matrices)}, num_slots))
    return cases


def test_cost_is_of_newton_schulz_with_symmetric_kernels() -> None:
    assert newton_schulz_flops((4096, 4096)) == 20 * 4096**3
    assert newton_schulz_flops((1024, 4096)) == (6 * 4 + 14) * 1024**3
    assert newton_schulz_flops((4096, 1024)) == newton_schulz_flops((1024, 4096))
    assert newton_schulz_flops((7, 1024, 4096)) == 7 * newton_schulz_flops((1024, 4096))


def test_split_rows_cost_what_their_pieces_cost() -> None:
    pieces = [newton_schulz_flops((rows, 3584)) for rows in (3584, 512, 512)]
    assert newton_schulz_flops((4608, 3584), (3584, 512, 512)) == sum(pieces)
    assert newton_schulz_flops((4608, 3584)) != sum(pieces)
    for shape, split in [((4608, 3584), (3584, 512)), ((2, 4608, 3584), (1, 1))]:
        with pytest.raises(ValueError, match="must sum to dim 0"):
            newton_schulz_flops(shape, split)


def test_split_counts_in_the_loads_and_in_the_choice() -> None:
    splits = {name: (3584, 512, 512) for name in QWEN_FUSED if name.endswith("qkv")}
    whole, split = assign(QWEN_FUSED, 1, 27), assign(QWEN_FUSED, 1, 27, splits)
    assert sum(split.numel.values()) == sum(whole.numel.values())
    as_split: Counter[Owner] = Counter()
    for name, shape in QWEN_FUSED.items():
        as_split[whole.owners[name]] += newton_schulz_flops(shape, splits.get(name, ()))
    assert sum(split.flops.values()) == as_split.total() != sum(whole.flops.values())
    # Who plans with the cost of whole matrices waits longer.
    assert max(split.flops.values()) < 0.98 * max(as_split.values())


def test_every_parameter_has_one_owner_and_loads_add_up() -> None:
    shapes = llama_shapes("llama3", "debugmodel")
    result = assign(shapes, num_replicate=2, num_shard=3)
    assert result.owners.keys() == shapes.keys()
    assert len(result.flops) == len(result.numel) == 6
    for owner in result.flops:
        mine = [shapes[name] for name, chosen in result.owners.items() if chosen == owner]
        assert result.flops[owner] == sum(map(newton_schulz_flops, mine))
        assert result.numel[owner] == sum(map(math.prod, mine))
    assert pickle.loads(pickle.dumps(result)) == result


def test_ratios_are_over_the_larger_of_mean_and_largest() -> None:
    result = assign({"a": (8, 8), "b": (8, 8), "c": (8, 8)}, 1, 2)
    assert result.imbalance == result.numel_imbalance == pytest.approx(4 / 3)
    result = assign({"costly": (9, 9), "wide": (1, 200)}, 1, 1)
    assert result.largest == Cost(newton_schulz_flops((9, 9)), 200)
    result = assign({"costly": (9, 9), "wide": (1, 200)}, 1, 4)
    assert result.imbalance == result.numel_imbalance == 1.0


def test_order_of_the_model_does_not_matter() -> None:
    shapes = llama_shapes("llama3", "3B")
    names = list(shapes)
    for num_slots in (4, 66):
        owners = assign(shapes, 1, num_slots).owners
        random.Random(num_slots).shuffle(names)
        other = assign({name: shapes[name] for name in names}, 1, num_slots)
        assert other.owners == owners
        assert list(other.owners) == names


def test_another_process_with_another_hash_seed_makes_the_same_plan() -> None:
    code = (
        "import sys, json, importlib.util as util\n"
        "spec = util.spec_from_file_location('assignment', sys.argv[1])\n"
        "module = sys.modules['assignment'] = util.module_from_spec(spec)\n"
        "spec.loader.exec_module(module)\n"
        "assert 'torch' not in sys.modules\n"
        "owners = module.assign(json.loads(sys.stdin.read()), 6, 11).owners\n"
        "print(json.dumps([[name, owner.replicate, owner.shard] for name, owner in owners.items()]), hash('a'))"
    )
    shapes = llama_shapes("llama3", "3B")
    results = [
        subprocess.run(
            [sys.executable, "-c", code, assignment.__file__],
            input=json.dumps(shapes),
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.rpartition(" ")
        for seed in ("1", "2")
    ]
    assert results[0][2] != results[1][2], "the seeds made no difference to hashes"
    assert results[0][0] == results[1][0]
    owners = {name: Owner(replicate, shard) for name, replicate, shard in json.loads(results[0][0])}
    assert owners == assign(shapes, 6, 11).owners


@pytest.mark.parametrize("num_replicate", [2, 3, 6, 66])
def test_a_slot_holds_the_same_for_every_mesh_of_a_size(num_replicate: int) -> None:
    shapes = llama_shapes("llama3", "3B")
    flat, folded = assign(shapes, 1, 66), assign(shapes, num_replicate, 66 // num_replicate)
    for name, owner in folded.owners.items():
        assert owner.shard * num_replicate + owner.replicate == flat.owners[name].shard
    assert list(folded.flops.values()) == list(flat.flops.values())
    assert list(folded.numel.values()) == list(flat.numel.values())


def test_consecutive_slots_and_names_lie_in_different_rows() -> None:
    assert [slot_owner(slot, 2) for slot in range(4)] == [Owner(0, 0), Owner(1, 0), Owner(0, 1), Owner(1, 1)]
    owners = assign({f"w{i}": (8, 8) for i in range(8)}, 2, 4).owners
    assert [owner.replicate for owner in owners.values()] == [0, 1] * 4


@pytest.mark.parametrize("case", AIMED_AT, ids=lambda case: f"{case.model}, {case.num_slots}")
def test_aims_are_met_where_that_is_possible(case: Case) -> None:
    result = assign(case.shapes, 1, case.num_slots)
    stock = stock_of(case)
    longest, floor = max(result.flops.values()), floor_of(stock, case.num_slots, 0)
    cap = math.floor(Fraction(115, 100) * floor_of(stock, case.num_slots, 1))
    assert max(result.numel.values()) <= cap
    if longest > Fraction(103, 100) * floor:
        assert (case.model, case.num_slots) == ("Llama 3 8B", 64)
        assert fits(stock, case.num_slots, Cost(math.floor(Fraction(103, 100) * floor), cap)) is False
    # The longest load is the shortest possible in any case.
    assert bound_of(stock, case.num_slots, result) == longest


def test_llama_8b_on_64_slots_can_have_either_aim() -> None:
    """The control of the proof above: with a little more elements the search does find the load."""
    stock = stock_of(AIMED_AT[0])
    load, numel = (floor_of(stock, 64, field) for field in (0, 1))
    most_flops = math.floor(Fraction(103, 100) * load)
    assert fits(stock, 64, Cost(most_flops, math.ceil(Fraction(1154, 1000) * numel)))
    assert not fits(stock, 64, Cost(most_flops, math.floor(Fraction(1153, 1000) * numel)))
    assert float(least(stock, 64, 0, Fraction(115, 100))) == pytest.approx(1.0342, abs=5e-5)


@pytest.mark.parametrize(
    ("shapes", "num_slots"),
    [
        *((llama_shapes("llama3", "8B"), num_slots) for num_slots in (26, 45, 60, 73)),
        *((llama_shapes("llama3", "3B"), num_slots) for num_slots in (41, 62, 66)),
        *((llama_shapes("llama2", "7B"), num_slots) for num_slots in (44, 68, 95)),
        *((QWEN, num_slots) for num_slots in (36, 37)),
    ],
)
def test_longest_load_is_the_shortest_possible(shapes: Shapes, num_slots: int) -> None:
    """Here exchanges gain up to 17 % over longest first, and then nothing is left to gain."""
    case = Case("", num_slots, shapes)
    result = assign(shapes, 1, num_slots)
    assert bound_of(stock_of(case), num_slots, result) == max(result.flops.values())


def test_no_worse_than_longest_first() -> None:
    verdicts: Counter[str] = Counter()
    for number, (name, flavor) in enumerate((name, flavor) for name, sizes in FLAVORS.items() for flavor in sizes):
        shapes = llama_shapes(name, flavor)
        for num_slots in {1, 2, 3, 8, 64, 1024, *range(5 + number, 300, 23), *range(300 + number, 1024, 229)}:
            first = longest_first(stock_of(Case(flavor, num_slots, shapes)), num_slots)
            verdicts[verdict(assign(shapes, 1, num_slots), *first)] += 1
    assert not verdicts["worse"]
    assert verdicts["better"] > 20


def test_small_cases_against_every_choice() -> None:
    """Longest load and elements: at least their lower bounds, in the set of all choices, nearly always the best."""
    best = 0
    for shapes, num_slots in small_cases():
        choices = every_choice(shapes, num_slots)
        stock = stock_of(Case("", num_slots, shapes))
        costs = [cost for cost, count in stock for _ in range(count)]
        for field in (0, 1):
            bound = lower_bound((cost[field] for cost in costs), num_slots)
            assert bound <= min(choice[field] for choice in choices)
        result = assign(shapes, 1, num_slots)
        longest, numel = max(result.flops.values()), max(result.numel.values())
        assert (longest, numel) in choices
        first_load, first_numel = longest_first(stock, num_slots)
        assert verdict(result, first_load, first_numel) != "worse"
        cap = max(Fraction(115, 100), Fraction(first_numel).limit_denominator(10**9)) * floor_of(stock, num_slots, 1)
        shortest = min(flops for flops, elements in choices if elements <= cap)
        assert longest <= 1.2 * shortest
        best += longest <= 1.001 * shortest
    assert best >= 57


def test_exhaustive_search_against_every_choice() -> None:
    answers: Counter[bool | None] = Counter()
    for shapes, num_slots in small_cases():
        stock = stock_of(Case("", num_slots, shapes))
        choices = every_choice(shapes, num_slots)
        for flops, numel in sorted(choices):
            for limits in (Cost(flops, numel), Cost(flops - 1, numel), Cost(flops, numel - 1)):
                possible = any(f <= limits.flops and n <= limits.numel for f, n in choices)
                answer = fits(stock, num_slots, limits)
                assert answer is possible
                answers[answer] += 1
    assert min(answers[True], answers[False]) > 100


def test_lower_bound_counts_what_must_lie_together() -> None:
    assert lower_bound([5, 5, 5], 2) == 10
    assert lower_bound([9, 5, 5, 2], 3) == 9
    assert lower_bound([4, 4, 4, 4, 4, 1], 2) == 12
    assert lower_bound([1] * 7, 7) == 1
    assert lower_bound([], 3) == 0


def test_wide_matrices_of_little_cost_do_not_pile_up() -> None:
    """By FLOPs alone all that is wide belongs into the one slot without a square."""
    shapes = {f"square{i}": (256, 256) for i in range(8)} | {f"wide{i}": (2, 16384) for i in range(24)}
    assert 24 * newton_schulz_flops((2, 16384)) < newton_schulz_flops((256, 256))
    result = assign(shapes, 1, 9)
    assert result.imbalance < 1.01
    assert result.numel_imbalance <= 1.15


def test_equal_matrices_are_spread_evenly() -> None:
    for num_matrices, num_slots in [(14, 9), (5, 3), (7, 7), (3, 8)]:
        shapes = {f"w{i}": (16, 16) for i in range(num_matrices)}
        counts = Counter(assign(shapes, 1, num_slots).owners.values())
        assert max(counts.values()) == -(-num_matrices // num_slots)


def test_fewer_matrices_than_slots_one_slot_and_none() -> None:
    result = assign({"a": (8, 8), "b": (4, 8)}, 1, 16)
    assert result.owners["a"] != result.owners["b"]
    assert sum(flops > 0 for flops in result.flops.values()) == 2
    assert len(result.flops) == 16
    alone = assign(llama_shapes("llama3", "1B"), 1, 1)
    assert set(alone.owners.values()) == {Owner(0, 0)}
    assert alone.imbalance == alone.numel_imbalance == 1.0
    empty = assign({}, 1, 2)
    assert empty.owners == {}
    assert empty.imbalance == empty.numel_imbalance == 1.0


def thousands_of_parameters() -> dict[str, Shapes]:
    draw = random.Random(0)
    sizes = {
        "all different": [(draw.randint(64, 8192), draw.randint(64, 8192)) for _ in range(5000)],
        "all equal": [(64, 64)] * 5000,
        "wide and square": [(2, 10**6 + i) if i % 2 else (1024 + i % 50, 1024 + i % 53) for i in range(5000)],
        "full again and again": [(3000 - i // 2, 3000) if i % 2 else (3000 - i // 2, 300) for i in range(5000)],
    }
    return {"blocks": MANY} | {key: {f"w{i}": shape for i, shape in enumerate(of)} for key, of in sizes.items()}


@pytest.mark.parametrize("kind", ["blocks", "all different", "all equal", "wide and square", "full again and again"])
def test_work_is_bounded(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some tenths of a second at most; the bound on time is one that only another order of growth breaks."""
    searches = []

    class Counted(assignment._Search):
        def __init__(self) -> None:
            super().__init__()
            searches.append(self)

    monkeypatch.setattr(assignment, "_Search", Counted)
    shapes = thousands_of_parameters()[kind]
    for num_slots in (2, 64, 1000, 4096):
        started = time.process_time()
        assign(shapes, 2, num_slots // 2)
        assert time.process_time() - started < 5
        # What one pair of shares has to offer can come on top.
        assert searches[-1].num_looks <= assignment.MAX_LOOKS + 2 * len(shapes)
        if kind == "blocks":
            assert searches[-1].num_looks < 20_000
    assert len(searches) == 4


def test_table_in_the_docs_is_what_was_measured() -> None:
    result = json.loads((ROOT / "benchmarks/results/assignment.json").read_text())
    tables = [marks[2] for marks in MARKED.finditer((ROOT / "docs/assignment.md").read_text())]
    assert tables == [render(result), render_joint(result)]
    for row, case in zip(result["rows"], AIMED_AT, strict=False):
        found = assign(case.shapes, 1, case.num_slots)
        assert (row["load"], row["numel"]) == (round(found.imbalance, 4), round(found.numel_imbalance, 4))
    assert not any(row["worse"] for row in result["comparison"].values())
    for row in result["joint"]:
        again = measure_joint(row["model"].split()[-1], row["num_ranks"])
        assert {**again, "assign_s": row["assign_s"]} == row
    assert not any(row["longer"] for row in result["joint_comparison"].values())
