"""How matrices are cut over tp, and which goes which way at what cost: pure functions of shapes."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence

import pytest
import torch

from benchmarks.tp_plan import GATHER, block, cost, plans
from dmuon.assignment import newton_schulz_flops
from dmuon.tensor_parallel import EXCHANGE, GRAM, LOCAL, STRATEGIES, Layout, Rates, plan_orthogonalization
from dmuon.tensor_parallel.plan import OrthogonalizationPlan, block_rows, packed_numel
from dmuon.tensor_parallel.strategy import ROUND_BYTES, deal, rounds

HALF = {"dtype": torch.float16, "wire_dtype": torch.float16}
SLOW_LINK, FAST_LINK = Rates(bytes_per_s=2e10), Rates(bytes_per_s=9e11)
WIDE = Layout((4096, 14336), 1)


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 10, 37])
@pytest.mark.parametrize("tp_degree", [1, 2, 4, 8])
def test_pieces_are_those_of_a_dtensor(length: int, tp_degree: int) -> None:
    pieces = [len(piece) for piece in torch.arange(length).chunk(tp_degree)]
    expected = tuple(pieces + [0] * (tp_degree - len(pieces)))
    assert Layout((length, 7), 0).local_sizes(tp_degree) == expected
    for rank, size in enumerate(expected):
        assert Layout((7, length), 1).local_shape(tp_degree, rank) == (7, size)
        assert Layout((2, 7, length), 2).local_shape(tp_degree, rank) == (2, 7, size)


def test_sum_form_is_there_where_the_longer_side_is_cut() -> None:
    with_sum_form = [((4096, 4096), 0), ((14336, 4096), 0), ((4096, 4096), 1), ((4096, 14336), 1), ((2, 64, 96), 2)]
    without = [((1024, 4096), 0), ((4096, 1024), 1), ((4096, 4096), None), ((2, 64, 96), 0), ((2, 64, 96), 1)]
    assert all(Layout(*case).has_sum_form for case in with_sum_form)
    assert not any(Layout(*case).has_sum_form for case in without)


def test_fused_rows_are_found_where_the_cut_leaves_them() -> None:
    """Twelve rows as 6, 4 and 2 on four ranks of three rows each."""
    q, k, v = Layout((12, 5), 0).split((6, 4, 2), 4)
    assert [piece.local_sizes(4) for piece in (q, k, v)] == [(3, 3, 0, 0), (0, 0, 3, 1), (0, 0, 0, 2)]
    assert [piece.shape for piece in (q, k, v)] == [(6, 5), (4, 5), (2, 5)]
    assert Layout((12, 5), 1).split((6, 6), 4) == (Layout((6, 5), 1),) * 2
    with pytest.raises(ValueError, match="must sum to dim 0"):
        Layout((12, 5), 0).split((6, 4), 4)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [(((4,), 0), "a matrix"), (((4, 4), 2), "a dim of"), (((4, 4), 0, (1, 2)), "must sum"), (((0, 4), 0), "a matrix")],
)
def test_a_layout_is_checked(arguments: tuple, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        Layout(*arguments)


@pytest.mark.parametrize("num_rows", [1, 8, 127, 256, 300, 1000, 4096])
def test_block_rows_cover_the_upper_triangle_once(num_rows: int) -> None:
    blocks = block_rows(num_rows)
    assert [row for start, stop in blocks for row in range(start, stop)] == list(range(num_rows))
    assert num_rows * (num_rows + 1) / 2 <= packed_numel(num_rows) <= num_rows**2
    assert packed_numel(4096) == 4096**2 * 9 // 16


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("tp_degree", [2, 8])
def test_every_matrix_is_in_one_round(strategy: str, tp_degree: int) -> None:
    layouts = [*block() * 3, Layout((8, 512, 512), 1), Layout((64, 4096)), Layout((8, 64, 64), 0)]
    plan = plan_orthogonalization(layouts, tp_degree, strategy, memory_limit=1 << 28)
    items = Counter(item for members in plan.rounds for item in members.exchange + members.gram)
    whole = Counter(index for members in plan.rounds for index in members.local)
    assert set(items.values()) == set(whole.values()) == {1}
    for index, entry in enumerate(plan.entries):
        assert entry.way == LOCAL if entry.layout.matrix_dim is None else entry.way in (EXCHANGE, GRAM)
        assert entry.way != GRAM or entry.layout.has_sum_form
        assert len(entry.ranks) == (entry.layout.num_matrices if entry.way == EXCHANGE else 0)
        found = whole[index] if entry.way == LOCAL else sum(items[i] for i in items if i.entry == index)
        assert found == (1 if entry.way == LOCAL else entry.layout.num_matrices)
    assert plan == plan_orthogonalization(layouts, tp_degree, strategy, memory_limit=1 << 28)
    assert all(load.whole_bytes <= 1 << 28 for load in plan.loads)


def test_costs_are_those_of_the_formulas() -> None:
    """n = 4096, a = 3.5 or 1: FLOPs of five steps, and bytes each way."""
    n3 = 4096**3
    by_gram = plan_orthogonalization([WIDE, Layout((4096, 4096), 0)], 8, GRAM)
    assert {load.flops for load in by_gram.loads} == {int((6 * 3.5 / 8 + 14) * n3) + int((6 / 8 + 14) * n3)}
    grams = 2 * (2 * 7 / 8 * 4 * 2 * 4096**2 * 9 / 16)
    assert {load.sum_bytes for load in by_gram.loads} == {int(grams) + 2 * 7 * 16 // 8}
    assert {load.exchange_bytes for load in by_gram.loads} == {0}

    exchanged = plan_orthogonalization([WIDE] * 8, 8, EXCHANGE, **HALF)
    each_way = 2 * 8 * 4096 * 14336 * 7 / 64
    for rank, load in enumerate(exchanged.loads):
        assert [entry.ranks for entry in exchanged.entries].count((rank,)) == 1
        assert load.flops == 35 * n3 == newton_schulz_flops(WIDE.shape)
        assert load.exchange_bytes == 2 * each_way
        assert load.whole_bytes == 4 * 4096 * 14336
    rates = Rates(1e14, 1e11, 1e-5)
    norms = 2 * 7 * 8 * 8 // 8
    expected = 35 * n3 / 1e14 + (2 * each_way + norms) / 1e11 + 3e-5
    assert math.isclose(exchanged.predicted_s(rates), expected)


@pytest.mark.parametrize(("num_matrices", "tp_degree"), [(9, 8), (3, 2), (17, 4), (8, 8)])
def test_auto_takes_the_remainder_by_gram(num_matrices: int, tp_degree: int) -> None:
    plan = plan_orthogonalization([WIDE] * num_matrices, tp_degree)
    ways = [entry.way for entry in plan.entries]
    assert ways == [EXCHANGE] * (num_matrices - num_matrices % tp_degree) + [GRAM] * (num_matrices % tp_degree)


def every_choice(layouts: Sequence[Layout], tp_degree: int) -> list[OrthogonalizationPlan]:
    """Every number of each shape by Gram."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, layout in enumerate(layouts):
        if layout.has_sum_form:
            groups.setdefault(tuple(sorted(layout.shape)), []).append(index)
    found = []
    for counts in itertools.product(*(range(len(group) + 1) for group in groups.values())):
        by_gram = {i for group, count in zip(groups.values(), counts, strict=True) for i in group[:count]}
        entries = deal(layouts, [GRAM if i in by_gram else EXCHANGE for i in range(len(layouts))], tp_degree)
        found.append(OrthogonalizationPlan(entries, tp_degree, rounds(entries, tp_degree, None), **HALF))
    return found


@pytest.mark.parametrize("rates", [SLOW_LINK, Rates(), FAST_LINK], ids=["slow", "NVLink", "fast"])
@pytest.mark.parametrize("tp_degree", [2, 4, 8])
def test_auto_is_near_the_best_and_never_the_worst(tp_degree: int, rates: Rates) -> None:
    for layouts in (block(), block()[-3:], block() * 2, [*block()[-3:], *block()[:1] * 4], [WIDE]):
        found = plans(layouts, tp_degree, rates=rates, **HALF)
        best_s = min(plan.predicted_s(rates) for plan in (*every_choice(layouts, tp_degree), *found.values()))
        assert found["auto"].predicted_s(rates) <= 1.1 * best_s
        others = [cost(found[name]) for name in (GRAM, EXCHANGE, GATHER)]
        auto = cost(found["auto"])
        assert auto.flops < max(other.flops for other in others)
        assert auto.num_bytes < max(other.num_bytes for other in others)


def test_exchange_is_as_balanced_as_ownership() -> None:
    loads = plan_orthogonalization(block() * 4, 8, EXCHANGE).loads
    mean = sum(load.flops for load in loads) / 8
    assert max(load.flops for load in loads) < 1.05 * mean
    stack = plan_orthogonalization([Layout((8, 512, 2048), 1)], 4, EXCHANGE)
    assert Counter(stack.entries[0].ranks) == {0: 2, 1: 2, 2: 2, 3: 2}


def test_memory_limit_moves_matrices_to_gram_or_says_which_does_not_fit() -> None:
    limit = 4 * 4096 * 4096
    plan = plan_orthogonalization(block(), 2, memory_limit=limit)
    assert [entry.way for entry in plan.entries if 14336 in entry.layout.shape] == [GRAM] * 3
    assert all(load.whole_bytes <= limit for load in plan.loads)
    with pytest.raises(ValueError, match=r"14336 x 4096 by dim 0 .* 234881024 bytes"):
        plan_orthogonalization(block(), 2, EXCHANGE, memory_limit=limit)
    with pytest.raises(ValueError, match="1024 x 4096"):
        plan_orthogonalization(block(), 2, GRAM, memory_limit=1 << 20)
    unlimited = plan_orthogonalization(block() * 16, 2, EXCHANGE)
    assert len(unlimited.rounds) > 1
    assert all(ROUND_BYTES / 2 < load.whole_bytes <= ROUND_BYTES for load in unlimited.loads)


def test_one_rank_sends_nothing() -> None:
    plan = plan_orthogonalization(block(), 1)
    assert {entry.way for entry in plan.entries} == {LOCAL}
    assert plan.num_collectives == plan.loads[0].exchange_bytes == plan.loads[0].sum_bytes == 0


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="tp_strategy = 'gather': must be one of auto, distributed_gram, exchange"):
        plan_orthogonalization(block(), 2, "gather")
    with pytest.raises(ValueError, match="wire_dtype"):
        plan_orthogonalization(block(), 2, wire_dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="one for each of 4 ranks"):
        plan_orthogonalization([Layout((4, 8), 1, (4, 4))], 4)


def test_a_plan_is_printed() -> None:
    text = str(plan_orthogonalization(block(), 2, GRAM))
    assert "1024 x 4096 by dim 0" in text
    assert "4096 x 14336 by dim 1" in text
    assert "5 collectives" in text
