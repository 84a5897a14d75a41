"""Whole matrices on one tp rank each: slices travel to it, it orthogonalises, slices travel back.

Shape legend: B matrices of M x N.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from dmuon.collectives import Axis, Wait, nothing
from dmuon.tensor_parallel.plan import Item, OrthogonalizationPlan
from dmuon.tensor_parallel.updates import Updates
from dmuon.torch_internals import foreach_copy_

Part = tuple[Item, int]
"""A tp rank's slice of a matrix."""


class Exchange:
    """The matrices of one round as this rank sees them; one all-to-all each way, with uneven runs.

    Every rank's run holds slices in the order of the plan. Those that a rank keeps go the same way as the others, so
    that all are rounded alike.
    """

    def __init__(self, plan: OrthogonalizationPlan, items: Sequence[Item], axis: Axis) -> None:
        self._plan, self._axis = plan, axis
        self._mine = [item for item in items if plan.rank(item) == axis.index]
        ranks = range(plan.tp_degree)
        self._away: list[list[Part]] = [[(i, axis.index) for i in items if plan.rank(i) == rank] for rank in ranks]
        self._home: list[list[Part]] = [[(i, rank) for i in self._mine] for rank in ranks]
        self._received = torch.empty(0)
        self._wait: Wait = nothing

    def send(self, updates: Updates) -> None:
        """Starts sending this rank's slices, in the wire dtype, to the ranks that work on them."""
        flat = torch.empty(sum(map(self._numel, self._away)), dtype=self._plan.wire_dtype, device=updates.device)
        for (item, _), view in self._views(flat, self._away):
            updates.write(item, view)
        self._start(flat, self._away, self._home)

    def work(self, orthogonalize: Callable[[Tensor], Tensor]) -> None:
        """Puts this rank's matrices together, batched by shape, and starts sending what becomes of them."""
        self._wait()
        slices = dict(self._views(self._received, self._home))
        flat = torch.empty(self._received.numel(), dtype=self._plan.dtype, device=self._received.device)
        targets = dict(self._views(flat, self._home))
        for batch in self._batches():
            shape = (len(batch), *self._plan.layout(batch[0]).matrix_shape)
            whole_BMN = torch.empty(shape, dtype=self._plan.wire_dtype, device=flat.device)
            parts, views = zip(*self._cut(whole_BMN, batch), strict=True)
            foreach_copy_(list(views), [slices[part] for part in parts])
            orthogonal_BMN = orthogonalize(whole_BMN)
            del whole_BMN, views
            parts, views = zip(*self._cut(orthogonal_BMN, batch), strict=True)
            foreach_copy_([targets[part] for part in parts], list(views))
        self._start(flat, self._home, self._away)

    def receive(self) -> Iterator[tuple[Item, Tensor]]:
        """This rank's slices of all matrices, once they are back."""
        self._wait()
        for (item, _), view in self._views(self._received, self._away):
            yield item, view

    def _start(self, flat: Tensor, sent: list[list[Part]], received: list[list[Part]]) -> None:
        self._received, self._wait = self._axis.all_to_all(
            flat, list(map(self._numel, sent)), list(map(self._numel, received))
        )

    def _shape(self, part: Part) -> tuple[int, ...]:
        item, rank = part
        return self._plan.layout(item).local_shape(self._plan.tp_degree, rank)[-2:]

    def _numel(self, parts: Sequence[Part]) -> int:
        return sum(torch.Size(self._shape(part)).numel() for part in parts)

    def _views(self, flat: Tensor, runs: list[list[Part]]) -> Iterator[tuple[Part, Tensor]]:
        parts = [part for run in runs for part in run]
        pieces = flat.split([self._numel([part]) for part in parts]) if parts else ()
        for part, piece in zip(parts, pieces, strict=True):
            yield part, piece.view(self._shape(part))

    def _batches(self) -> list[list[Item]]:
        by_shape: dict[tuple[int, int], list[Item]] = {}
        for item in self._mine:
            by_shape.setdefault(self._plan.layout(item).matrix_shape, []).append(item)
        return list(by_shape.values())

    def _cut(self, whole_BMN: Tensor, batch: Sequence[Item]) -> Iterator[tuple[Part, Tensor]]:
        """Each rank's slice of each matrix of a batch."""
        for item, whole_MN in zip(batch, whole_BMN, strict=True):
            layout = self._plan.layout(item)
            assert layout.matrix_dim is not None
            sizes = layout.local_sizes(self._plan.tp_degree)
            for rank, view in enumerate(whole_MN.split(sizes, dim=layout.matrix_dim)):
                yield (item, rank), view
