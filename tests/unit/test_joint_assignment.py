"""Joint owners: shorter longest loads where ranks outnumber matrices, never longer ones, and none across nodes."""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from typing import Any

import pytest

from benchmarks.assignment import MANY, QWEN_FUSED, Shapes, llama_shapes, longest_with_sums
from dmuon import joint_assignment
from dmuon.assignment import Assignment, Owner, assign, newton_schulz_flops
from dmuon.joint_assignment import joint_flops, kind_of, members, share_largest

SIZES = ("1B", "3B", "8B", "70B", "405B")


def shared(shapes: Shapes, num_replicate: int, num_shard: int, max_owners: int = 8) -> tuple[Assignment, Assignment]:
    single = assign(shapes, num_replicate, num_shard)
    return single, share_largest(single, shapes, num_replicate, num_shard, max_owners)


def assert_adds_up(assignment: Assignment, shapes: Shapes) -> None:
    assert list(assignment.owners) == list(shapes)
    flops: Counter[Owner] = Counter()
    numel: Counter[Owner] = Counter()
    for name, shape in shapes.items():
        num_owners = assignment.num_owners.get(name, 1)
        each = joint_flops(shape, num_owners) if num_owners > 1 else newton_schulz_flops(shape)
        for member in members(assignment.owners[name], num_owners):
            flops[member] += each
            numel[member] += math.prod(shape) // num_owners
    assert flops.keys() <= assignment.flops.keys()
    assert all(assignment.flops[owner] == flops[owner] for owner in assignment.flops)
    assert all(assignment.numel[owner] == numel[owner] for owner in assignment.numel)
    assert sum(assignment.numel.values()) == assignment.total.numel


def test_cost_of_each_owner() -> None:
    """Products of the long side are shared, two of them a segment; those of the Gram matrix are not."""
    for shape in ((4096, 14336), (14336, 4096)):
        assert joint_flops(shape, 4) == (6 * 14336 // 4 + 14 * 4096) * 4096**2
        assert kind_of(shape).flops_of(1) == newton_schulz_flops(shape) == joint_flops(shape, 1)
        assert kind_of(shape).load_of(4) > kind_of(shape).flops_of(4)


@pytest.mark.parametrize(("num_ranks", "at_most"), [(256, 0.71), (1024, 0.58)])
@pytest.mark.parametrize("num_shard", [4, 8, 64])
def test_llama_8b_waits_less(num_ranks: int, at_most: float, num_shard: int) -> None:
    shapes = llama_shapes("llama3", "8B")
    single, joint = shared(shapes, num_ranks // num_shard, num_shard)
    assert max(joint.flops.values()) <= at_most * max(single.flops.values())
    assert joint.imbalance < single.imbalance == 1.0
    assert max(joint.numel.values()) <= max(single.numel.values())
    assert set(joint.num_owners) == {name for name in shapes if "feed_forward" in name}
    assert_adds_up(joint, shapes)


def test_never_longer_and_unchanged_where_it_does_not_help() -> None:
    num_helped: Counter[bool] = Counter()
    for size in SIZES:
        shapes = llama_shapes("llama3", size)
        for num_ranks in [*range(8, 200, 24), 256, 320, 384, 512, 768, 1024]:
            single, joint = shared(shapes, num_ranks // 8, 8)
            helped = longest_with_sums(joint, shapes) < max(single.flops.values())
            assert helped or joint == single
            assert bool(joint.num_owners) == helped
            num_helped[helped] += 1
    assert min(num_helped[True], num_helped[False]) > 10


def test_any_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever there is to assign, sums free or not: every load adds up, and none is longer."""
    draw = random.Random(0)
    num_joint = 0
    for case in range(200):
        for name, value in (("SUM_FLOPS", 15_000), ("LATENCY_FLOPS", 10**9)):
            monkeypatch.setattr(joint_assignment, name, value * (case % 2))
        sides = [draw.choice([8, 16, 60, 64, 100, 128, 512, 4096]) for _ in range(6)]
        shapes: Shapes = {f"w{i}": (draw.choice(sides), draw.choice(sides)) for i in range(draw.randint(1, 12))}
        if draw.random() < 0.3:
            shapes["stack"] = (3, 64, 128)
        single, joint = shared(shapes, draw.choice([1, 2, 3]), draw.choice([1, 2, 4, 6, 8, 16]), draw.choice([2, 6, 8]))
        assert max(joint.flops.values()) <= max(single.flops.values()), f"case {case}"
        assert "stack" not in joint.num_owners
        for name, num_owners in joint.num_owners.items():
            assert max(shapes[name]) % (8 * num_owners) == 0
        assert_adds_up(joint, shapes)
        num_joint += bool(joint.num_owners)
    assert 20 < num_joint < 180


@pytest.mark.parametrize(("num_shard", "ranks_of_a_node"), [(4, 8), (8, 8), (16, 8), (64, 8), (12, 4), (8, 6), (6, 6)])
def test_owners_lie_in_one_node_and_groups_are_nested(num_shard: int, ranks_of_a_node: int) -> None:
    shapes = llama_shapes("llama3", "8B")
    num_replicate = 1024 // num_shard
    _, joint = shared(shapes, num_replicate, num_shard, ranks_of_a_node)
    assert joint.num_owners
    groups = []
    for name, num_owners in joint.num_owners.items():
        owners = members(joint.owners[name], num_owners)
        assert owners[-1].shard < num_shard
        ranks = [owner.replicate * num_shard + owner.shard for owner in owners]
        assert len({rank // ranks_of_a_node for rank in ranks}) == 1
        groups.append(set(ranks))
    for one in groups:
        for other in groups:
            assert one <= other or other <= one or not one & other


def test_one_owner_each_unless_asked_for() -> None:
    shapes = llama_shapes("llama3", "8B")
    single, off = shared(shapes, 32, 8, max_owners=1)
    assert off is single
    assert off.num_owners == {}
    # Nor where no node divides the shard axis.
    assert shared(shapes, 256, 1)[1].num_owners == {}
    assert shared({}, 1, 8)[1].owners == {}


def test_fused_matrices_have_one_owner() -> None:
    splits = {name: (3584, 512, 512) for name in QWEN_FUSED if name.endswith("qkv")}
    single = assign(QWEN_FUSED, 64, 8, splits)
    joint = share_largest(single, QWEN_FUSED, 64, 8, 8, splits)
    assert joint.num_owners
    assert not any(name.endswith("qkv") for name in joint.num_owners)


def test_order_of_the_model_does_not_matter() -> None:
    shapes = llama_shapes("llama3", "3B")
    names = list(shapes)
    random.Random(0).shuffle(names)
    _, joint = shared(shapes, 32, 8)
    _, other = shared({name: shapes[name] for name in names}, 32, 8)
    assert joint.owners == other.owners
    assert joint.num_owners == other.num_owners
    assert list(other.owners) == names
    assert Counter(owner.replicate for owner in joint.owners.values()).keys() == set(range(32)), "all nodes take part"


def test_work_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many shapes there are; the bound on time is one that only another order of growth breaks."""
    num_deals = 0
    deal = joint_assignment._deal

    def counted(*arguments: Any) -> Any:
        nonlocal num_deals
        num_deals += 1
        return deal(*arguments)

    monkeypatch.setattr(joint_assignment, "_deal", counted)
    draw = random.Random(0)
    different: Shapes = {f"w{i}": (draw.randint(8, 1024) * 64, draw.randint(8, 1024) * 64) for i in range(3000)}
    for shapes, num_ranks in ((MANY, 8192), (different, 4096)):
        num_deals = 0
        single = assign(shapes, num_ranks // 8, 8)
        started = time.process_time()
        joint = share_largest(single, shapes, num_ranks // 8, 8, 8)
        assert time.process_time() - started < 10
        assert num_deals <= joint_assignment.MAX_LIMITS
        assert max(joint.flops.values()) < max(single.flops.values())
