"""One step's orthogonalisation over the tp ranks of an owner, as planned.

Every rank issues the same collectives in the same order, whatever its slices hold, an empty one too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dmuon.collectives import Axis
from dmuon.newton_schulz import Coefficients, iterate, normalize, orthogonalize
from dmuon.newton_schulz.coefficients import resolve
from dmuon.tensor_parallel.exchange import Exchange
from dmuon.tensor_parallel.gram import orthogonalize_slices
from dmuon.tensor_parallel.plan import Item, OrthogonalizationPlan, Round
from dmuon.torch_internals import foreach_norm


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
        results = dict(self.stream(updates.__getitem__, **options))
        return [results[index] for index in range(len(updates))]

    def stream(
        self,
        update_of: Callable[[int], Tensor],
        *,
        num_steps: int = 5,
        backend: str = "gram",
        coefficients: Coefficients = "polar_express",
        kernel: str = "auto",
    ) -> Iterator[tuple[int, Tensor]]:
        """The same a round at a time: asks for each update once, and yields (index, result) as soon as it is there.

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
        updates = _Updates(plan, axis.index, update_of)
        results = _Results(plan)
        returning: Exchange | None = None
        for members in plan.rounds:
            slices = {item: updates.slice(item) for item in members.exchange + members.gram}
            normalized = partial(_normalized, slices, self._norms(members, slices), plan.dtype)
            exchange = Exchange(plan, members.exchange, axis) if members.exchange else None
            if exchange is not None:
                exchange.send(normalized if normalizes else slices.__getitem__, slices[members.exchange[0]].device)
            # What is ready or needs no exchange comes while slices travel.
            if returning is not None:
                yield from results.completed(returning.receive())
            if members.gram:
                yield from results.completed(
                    orthogonalize_slices(plan, members.gram, axis, normalized, triples, kernel)
                )
            yield from _local(plan, members.local, updates, whole)
            del slices, normalized
            if exchange is not None:
                exchange.work(work)
            returning = exchange
        if returning is not None:
            yield from results.completed(returning.receive())

    def _norms(self, members: Round, slices: Mapping[Item, Tensor]) -> dict[Item, Tensor]:
        """Frobenius norms of the whole matrices, float64, where the plan needs them of slices."""
        items = self.plan.normed(members)
        if not items:
            return {}
        squares = torch.stack(foreach_norm([slices[item] for item in items])).square()
        self._axis.all_reduce(squares)()
        return dict(zip(items, squares.sqrt(), strict=True))


class _Updates:
    """This rank's slices of matrices; an update is asked for at its first slice and let go after its last one."""

    def __init__(self, plan: OrthogonalizationPlan, rank: int, update_of: Callable[[int], Tensor]) -> None:
        self._plan, self._rank, self._update_of = plan, rank, update_of
        self._held: dict[int, Tensor] = {}
        self._num_left: dict[int, int] = {}

    def whole(self, index: int) -> Tensor:
        update = self._update_of(index)
        expected = self._plan.entries[index].layout.local_shape(self._plan.tp_degree, self._rank)
        assert tuple(update.shape) == expected, f"update {index} is {tuple(update.shape)}, planned as {expected}"
        assert update.dtype == torch.float32
        return update

    def slice(self, item: Item) -> Tensor:
        if item.entry not in self._held:
            self._held[item.entry] = self.whole(item.entry)
            self._num_left[item.entry] = self._plan.layout(item).num_matrices
        update = self._held[item.entry]
        self._num_left[item.entry] -= 1
        if self._num_left[item.entry] == 0:
            del self._held[item.entry]
        return update[item.matrix] if update.ndim == 3 else update


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


def _normalized(slices: Mapping[Item, Tensor], norms: Mapping[Item, Tensor], dtype: torch.dtype, item: Item) -> Tensor:
    return normalize(slices[item], norms[item], dtype)


def _local(
    plan: OrthogonalizationPlan, members: Sequence[int], updates: _Updates, work: Callable[[Tensor], Tensor]
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
