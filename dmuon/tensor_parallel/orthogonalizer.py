"""One step's orthogonalisation over the tp ranks of an owner, as planned.

Every rank issues the same collectives in the same order, whatever its slices hold, an empty one too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dmuon.collectives import Axis
from dmuon.newton_schulz import Coefficients, iterate, orthogonalize
from dmuon.newton_schulz.coefficients import resolve
from dmuon.tensor_parallel.exchange import Exchange
from dmuon.tensor_parallel.gram import orthogonalize_slices
from dmuon.tensor_parallel.plan import Item, OrthogonalizationPlan, Round
from dmuon.tensor_parallel.updates import HeldUpdates, Updates


class TensorParallelOrthogonalizer:
    """`orthogonalize` for matrices of which each tp rank holds a slice.

    By exchange a whole matrix is orthogonalised in a batch with those of its shape that its rank has in the round. With
    float32 on the wire the result has the bits that `orthogonalize` of such a batch has. With half precision the norm
    is summed over ranks in float64, whose last bit may differ. By Gram the order of sums is another one: 1e-3 at most
    in float32. In half precision it is as near to float64 as the Gram form on one device.

    Args:
        axis: the tp axis, of the plan's degree.
    """

    def __init__(self, plan: OrthogonalizationPlan, axis: Axis) -> None:
        assert plan.tp_degree == axis.size
        self.plan, self._axis = plan, axis

    def __call__(
        self,
        updates: Sequence[Tensor],
        *,
        num_steps: int = 5,
        backend: str = "gram",
        coefficients: Coefficients = "polar_express",
        kernel: str = "auto",
    ) -> list[Tensor]:
        """This rank's slices of the orthogonalised matrices.

        Args:
            updates: float32, in the local shapes and the order of the plan's layouts. Left as they are.
            num_steps, coefficients: see `orthogonalize`; the same on all ranks.
            backend: of whole matrices; what has no rank of its own is iterated in Gram form.
            kernel: see `orthogonalize`.

        Returns:
            The shapes of `updates`, in the plan's dtype.
        """
        options: dict[str, Any] = {
            "num_steps": num_steps,
            "backend": backend,
            "coefficients": coefficients,
            "kernel": kernel,
        }
        if not updates:
            return []
        held = HeldUpdates(self.plan, self._axis.index, updates[0].device, updates.__getitem__)
        results = dict(self.stream(held, **options))
        return [results[index] for index in range(len(updates))]

    def stream(
        self,
        updates: Updates,
        *,
        num_steps: int = 5,
        backend: str = "gram",
        coefficients: Coefficients = "polar_express",
        kernel: str = "auto",
    ) -> Iterator[tuple[int, Tensor]]:
        """The same a round at a time: takes each update once, and yields (index, result) as soon as it is there.

        So neither all updates nor all results are held at once. The ranks must take all of it.
        """
        options: dict[str, Any] = {
            "num_steps": num_steps,
            "backend": backend,
            "coefficients": coefficients,
            "kernel": kernel,
        }
        triples = resolve(coefficients, num_steps)
        plan, axis = self.plan, self._axis
        whole = partial(orthogonalize, dtype=plan.dtype, **options)
        normalizes = plan.wire_dtype != torch.float32
        work: Callable[[Tensor], Tensor] = partial(iterate, **options) if normalizes else whole
        results = _Results(plan)
        returning: Exchange | None = None
        for members in plan.rounds:
            self._sum_norms(members, updates)
            exchange = Exchange(plan, members.exchange, axis) if members.exchange else None
            if exchange is not None:
                exchange.send(updates)
            # What is ready or needs no exchange comes while slices travel.
            if returning is not None:
                yield from results.completed(returning.receive())
            if members.gram:
                yield from results.completed(orthogonalize_slices(plan, members.gram, axis, updates, triples, kernel))
            yield from _local(plan, members.local, updates, whole)
            if exchange is not None:
                exchange.work(work)
            returning = exchange
        if returning is not None:
            yield from results.completed(returning.receive())

    def _sum_norms(self, members: Round, updates: Updates) -> None:
        """Of the whole matrices, where the plan needs them of slices."""
        items = self.plan.normed(members)
        if items:
            squares = updates.squares(items)
            self._axis.all_reduce(squares)()
            updates.set_norms(items, squares.sqrt())


class _Results:
    """Puts the slices of a stack together again, which may come from several rounds."""

    def __init__(self, plan: OrthogonalizationPlan) -> None:
        self._plan = plan
        self._parts: dict[int, dict[int, Tensor]] = {}

    def completed(self, found: Iterable[tuple[Item, Tensor]]) -> Iterator[tuple[int, Tensor]]:
        for item, slice_ in found:
            layout = self._plan.layout(item)
            if layout.num_matrices == 1:
                yield item.entry, slice_ if len(layout.shape) == 2 else slice_.unsqueeze(0)
                continue
            parts = self._parts.setdefault(item.entry, {})
            parts[item.matrix] = slice_
            if len(parts) == layout.num_matrices:
                del self._parts[item.entry]
                yield item.entry, torch.stack([parts[matrix] for matrix in range(layout.num_matrices)])


def _local(
    plan: OrthogonalizationPlan, members: Sequence[int], updates: Updates, work: Callable[[Tensor], Tensor]
) -> Iterator[tuple[int, Tensor]]:
    """Whole matrices that every rank has of its own, batched by shape."""
    by_shape: dict[tuple[int, int], list[int]] = {}
    for index in members:
        by_shape.setdefault(plan.entries[index].layout.matrix_shape, []).append(index)
    for batch in by_shape.values():
        wholes = [updates.whole(index) for index in batch]
        stacks = [whole if whole.ndim == 3 else whole.unsqueeze(0) for whole in wholes]
        orthogonal_BMN = work(torch.cat(stacks))
        for index, whole, part in zip(batch, wholes, orthogonal_BMN.split(list(map(len, stacks))), strict=True):
            yield index, part.view_as(whole)
