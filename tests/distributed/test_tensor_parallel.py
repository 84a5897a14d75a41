"""Orthogonalised slices on tp ranks against whole matrices in one process."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.tp_plan import counted_collectives
from dmuon.collectives import Axis
from dmuon.newton_schulz import normalize, orthogonalize
from dmuon.newton_schulz.coefficients import resolve
from dmuon.newton_schulz.iterations import gram
from dmuon.reference import orthogonalize_reference
from dmuon.tensor_parallel import (
    EXCHANGE,
    GRAM,
    LOCAL,
    STRATEGIES,
    Layout,
    OrthogonalizationPlan,
    TensorParallelOrthogonalizer,
    plan_orthogonalization,
)
from dmuon.tensor_parallel.updates import HeldUpdates

BLOCK = (
    Layout((48, 48), 0),  # q
    Layout((16, 48), 0),  # k: no sum form
    Layout((16, 48), 0),
    Layout((48, 48), 1),  # o
    Layout((160, 48), 0),  # gate
    Layout((160, 48), 0),
    Layout((48, 160), 1),  # down
    Layout((8, 48)),  # the same on every rank
    Layout((3, 96, 40), 1),  # stacks: cut along rows, along columns, between matrices
    Layout((3, 32, 96), 2),
    Layout((6, 24, 40), 0),
)
UNEVEN = (
    Layout((37, 23), 0),
    Layout((23, 37), 1),
    Layout((5, 64), 0),  # a last rank of four has nothing
    Layout((3, 40), 0),
    Layout((3, 3), 1),
    Layout((50, 30), 0, (50, 0)),
    Layout((30, 50), 1, (7, 43)),
    Layout((1, 24, 48), 2),
    Layout((3, 8, 8), 0),
)


def tp_axis() -> Axis:
    return axes.setdefault(dist.get_world_size(), Axis(init_device_mesh("cpu", (dist.get_world_size(),))))


axes: dict[int, Axis] = {}


def wholes(layouts: Sequence[Layout], seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(layout.shape, generator=generator) for layout in layouts]


def local(layout: Layout, whole: Tensor) -> Tensor:
    """This rank's slice."""
    if layout.sharded_dim is None:
        return whole
    axis = tp_axis()
    return whole.split(layout.local_sizes(axis.size), layout.sharded_dim)[axis.index]


def run(plan: OrthogonalizationPlan, updates: Sequence[Tensor], **options: Any) -> list[Tensor]:
    slices = [local(entry.layout, update) for entry, update in zip(plan.entries, updates, strict=True)]
    return TensorParallelOrthogonalizer(plan, tp_axis())(slices, **options)


def reference(matrix: Tensor) -> Tensor:
    """Float64, of a matrix or of each of a stack."""
    if matrix.ndim == 3:
        return torch.stack([reference(m) for m in matrix])
    wide = matrix.shape[0] <= matrix.shape[1]
    result = orthogonalize_reference((matrix if wide else matrix.T).double(), 5, "polar_express")
    return result if wide else result.T


def against_reference(layouts: Sequence[Layout], strategy: str, **planned: Any) -> tuple[float, set[str], int]:
    """The largest relative error of a slice, the ways taken, and the number of rounds."""
    updates = wholes(layouts)
    plan = plan_orthogonalization(layouts, dist.get_world_size(), strategy, **planned)
    errors = []
    for layout, update, got in zip(layouts, updates, run(plan, updates), strict=True):
        expected = local(layout, reference(update))
        assert got.shape == expected.shape
        assert got.dtype == plan.dtype
        if got.numel():
            errors.append(((got.double() - expected).norm() / expected.norm()).item())
    return max(errors), {entry.way for entry in plan.entries}, len(plan.rounds)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_slices_equal_the_float64_iteration_on_whole_matrices(
    ranks: Callable[..., Any], num_ranks: int, strategy: str
) -> None:
    uneven = [layout for layout in UNEVEN if len(layout.sizes) in (0, num_ranks)]
    for layouts in (BLOCK, uneven):
        for error, ways, _ in ranks(num_ranks).run(against_reference, layouts, strategy):
            assert error < 1e-3
            assert LOCAL in ways
            assert (GRAM in ways) >= (strategy == GRAM)
            assert EXCHANGE in ways, "k and v have no sum form"


def test_rounds_change_nothing(ranks: Callable[..., Any]) -> None:
    """A limit of one gate matrix: many rounds, and a stack whose matrices are in several of them."""
    for error, _, num_rounds in ranks(2).run(against_reference, BLOCK, EXCHANGE, memory_limit=4 * 160 * 48):
        assert num_rounds > 3
        assert error < 1e-3


def error_alone(layout: Layout, matrix: Tensor, dtype: torch.dtype, iteration: str) -> float:
    """Of one device that has the whole matrix; the Gram iteration loses more of a square one than the direct one."""
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    if iteration == GRAM and layout.has_sum_form:
        X_BMN = normalize(wide[None], torch.linalg.vector_norm(wide, dtype=torch.float64), dtype)
        got = gram(X_BMN, resolve("polar_express", 5))[0]
    else:
        got = orthogonalize(wide[None], dtype=dtype)[0]
    return ((got.double() - reference(wide)).norm() / reference(wide).norm()).item()


@pytest.mark.parametrize("strategy", [EXCHANGE, GRAM])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_as_near_as_on_one_device(
    ranks: Callable[..., Any], dtype: torch.dtype, strategy: str
) -> None:
    layouts = BLOCK[:8]
    alone = max(error_alone(layout, m, dtype, strategy) for layout, m in zip(layouts, wholes(layouts), strict=True))
    for wire_dtype in (torch.float32, dtype):
        for error, _, _ in ranks(2).run(against_reference, layouts, strategy, dtype=dtype, wire_dtype=wire_dtype):
            assert error < 1.3 * alone


def exchanged_bits(dtype: torch.dtype, wire_dtype: torch.dtype) -> list[tuple[bool, bool]]:
    """Whether this rank's slice has the bits of `orthogonalize` on its batch, and those of the Gram way."""
    layouts = BLOCK[:7]
    updates = wholes(layouts)
    plan = plan_orthogonalization(layouts, 2, EXCHANGE, dtype=dtype, wire_dtype=wire_dtype)
    by_gram = run(plan_orthogonalization(layouts, 2, GRAM, dtype=dtype), updates)
    batches: dict[tuple[int, ...], list[int]] = {}
    for index, entry in enumerate(plan.entries):
        batches.setdefault((*entry.layout.shape, *entry.ranks), []).append(index)
    expected: dict[int, Tensor] = {}
    for batch in batches.values():
        expected |= zip(batch, orthogonalize(torch.stack([updates[i] for i in batch]), dtype=dtype), strict=True)
    got = run(plan, updates)
    return [
        (torch.equal(got[i], local(layout, expected[i])), torch.equal(got[i], by_gram[i]))
        for i, layout in enumerate(layouts)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_exchange_has_the_bits_of_whole_matrices(ranks: Callable[..., Any], dtype: torch.dtype) -> None:
    for wire_dtype in {torch.float32, dtype}:
        for found in ranks(2).run(exchanged_bits, dtype, wire_dtype):
            assert all(same for same, _ in found)
            assert not all(as_by_gram for _, as_by_gram in found)


def singular_values(strategy: str) -> list[Tensor]:
    layouts = BLOCK[:7]
    plan = plan_orthogonalization(layouts, dist.get_world_size(), strategy)
    values = []
    for layout, got in zip(layouts, run(plan, wholes(layouts)), strict=True):
        assert layout.sharded_dim is not None
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, got)
        values.append(torch.linalg.svdvals(torch.cat(parts, dim=layout.sharded_dim)))
    return values


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_singular_values_end_in_the_band(ranks: Callable[..., Any], strategy: str) -> None:
    """Of the whole update: slices that were orthogonalised by themselves would reach sqrt(2)."""
    for values in ranks(2).run(singular_values, strategy):
        square, *rest = (values[i] for i in (0, 1, 2, 4, 5, 6))
        assert square.max() < 1.13  # its smallest one is smaller than what five steps can lift
        for value in rest:
            assert value.min() > 0.84
            assert value.max() < 1.13


def repeated(strategy: str, seed: int, fixed_tree: bool = False) -> list[Tensor]:
    axis = tp_axis()
    axis.fixed_tree = fixed_tree
    got = run(plan_orthogonalization(BLOCK, axis.size, strategy), wholes(BLOCK, seed))
    axis.fixed_tree = False
    return got


@pytest.mark.parametrize("fixed_tree", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_equal_inputs_give_equal_bits(ranks: Callable[..., Any], strategy: str, fixed_tree: bool) -> None:
    first, second = (ranks(4).run(repeated, strategy, 0, fixed_tree) for _ in range(2))
    others = ranks(4).run(repeated, strategy, 1, fixed_tree)
    for a, b, other in zip(first, second, others, strict=True):
        for x, y, z in zip(a, b, other, strict=True):
            assert torch.equal(x, y)
            assert not x.numel() or not torch.equal(x, z)
    replicas = [rank[7] for rank in first]
    assert all(torch.equal(replicas[0], replica) for replica in replicas)


def broken(strategy: str, wire_dtype: torch.dtype) -> list[Tensor]:
    """Gate is zero, up has one infinity, in the last rank's slice."""
    layouts = BLOCK[:7]
    updates = wholes(layouts)
    updates[4].zero_()
    updates[5][-1, -1] = torch.inf
    plan = plan_orthogonalization(layouts, dist.get_world_size(), strategy, dtype=torch.bfloat16, wire_dtype=wire_dtype)
    return run(plan, updates)


@pytest.mark.parametrize("wire_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("strategy", [GRAM, EXCHANGE])
def test_zero_stays_zero_and_non_finite_shows_on_every_rank(
    ranks: Callable[..., Any], strategy: str, wire_dtype: torch.dtype
) -> None:
    for results in ranks(2).run(broken, strategy, wire_dtype):
        assert not results[4].any()
        assert not results[5].isfinite().any()
        for index in (0, 1, 2, 3, 6):
            assert results[index].isfinite().all()
            assert results[index].any()


class Allocations(TorchDispatchMode):
    """Shapes of all tensors that operations return."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, Tensor):
                self.shapes.add(tuple(tensor.shape))
        return result


def largest_allocation(strategy: str) -> int:
    layouts = [Layout((32, 1024), 1), Layout((512, 16), 0)]
    plan = plan_orthogonalization(layouts, dist.get_world_size(), strategy)
    slices = [local(layout, whole).clone() for layout, whole in zip(layouts, wholes(layouts), strict=True)]
    with Allocations() as allocations:
        TensorParallelOrthogonalizer(plan, tp_axis())(slices)
    return max(torch.Size(shape).numel() for shape in allocations.shapes)


def test_gram_never_allocates_a_whole_matrix(ranks: Callable[..., Any]) -> None:
    assert all(largest == 32 * 1024 // 4 for largest in ranks(4).run(largest_allocation, GRAM))
    assert max(ranks(4).run(largest_allocation, EXCHANGE)) >= 32 * 1024


def traffic(strategy: str, planned: Mapping[str, Any]) -> tuple[dict[str, int], dict[str, int]]:
    axis = tp_axis()
    plan = plan_orthogonalization(BLOCK, axis.size, strategy, **planned)
    with counted_collectives(axis) as count:
        run(plan, wholes(BLOCK))
    load = plan.loads[axis.index]
    return count, {"exchange": load.exchange_bytes, "sum": load.sum_bytes, "calls": plan.num_collectives}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_bytes_on_the_wire_are_the_planned_ones(ranks: Callable[..., Any], strategy: str) -> None:
    half = {"dtype": torch.bfloat16, "wire_dtype": torch.bfloat16}
    for planned in ({}, half, {"memory_limit": 4 * 160 * 48}):
        found = ranks(4).run(traffic, strategy, planned)
        assert all(count == expected for count, expected in found)
        assert len({count["calls"] for count, _ in found}) == 1
        assert all(count["exchange"] for count, _ in found)


def streamed() -> list[tuple[str, int]]:
    """What is asked for and what is handed over, in order."""
    layouts = BLOCK[:7]
    plan = plan_orthogonalization(layouts, 2, EXCHANGE, memory_limit=4 * 160 * 48)
    updates, events = wholes(layouts), []

    def update_of(index: int) -> Tensor:
        events.append(("asked", index))
        return local(layouts[index], updates[index])

    held = HeldUpdates(plan, dist.get_rank(), torch.device("cpu"), update_of)
    for index, result in TensorParallelOrthogonalizer(plan, tp_axis()).stream(held):
        assert result.shape == layouts[index].local_shape(2, dist.get_rank())
        events.append(("given", index))
    return events


def test_a_stream_holds_two_rounds_at_most(ranks: Callable[..., Any]) -> None:
    first, second = ranks(2).run(streamed)
    assert first == second
    assert sorted(first) == sorted(itertools.product(("asked", "given"), range(7)))
    num_held = list(itertools.accumulate(1 if event == "asked" else -1 for event, _ in first))
    assert max(num_held) < 7
