"""Where an orthogonaliser takes this rank's slices of the updates from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from dmuon.newton_schulz import normalize
from dmuon.tensor_parallel.plan import Item, OrthogonalizationPlan
from dmuon.torch_internals import foreach_norm


class Updates(Protocol):
    """Of one step. Each item is written once, or each whole entry taken once."""

    device: torch.device

    def squares(self, items: Sequence[Item]) -> Tensor:
        """Squares of the Frobenius norms of this rank's slices, float64."""
        ...

    def set_norms(self, items: Sequence[Item], norms: Tensor) -> None:
        """Says which norms the whole matrices have, float64."""
        ...

    def write(self, item: Item, out: Tensor) -> None:
        """Puts this rank's slice there, normalised if its norm was said."""
        ...

    def whole(self, entry: int) -> Tensor:
        """All that this rank has of a parameter, float32."""
        ...


class HeldUpdates:
    """Updates in float32, each asked for at its first slice and let go after its last one."""

    def __init__(
        self, plan: OrthogonalizationPlan, rank: int, device: torch.device, update_of: Callable[[int], Tensor]
    ) -> None:
        self.device = device
        self._plan, self._rank, self._update_of = plan, rank, update_of
        self._held: dict[int, Tensor] = {}
        self._num_left: dict[int, int] = {}
        self._norms: dict[Item, Tensor] = {}

    def whole(self, entry: int) -> Tensor:
        update = self._update_of(entry)
        expected = self._plan.entries[entry].layout.local_shape(self._plan.tp_degree, self._rank)
        assert tuple(update.shape) == expected, f"update {entry} is {tuple(update.shape)}, planned as {expected}"
        assert update.dtype == torch.float32
        return update

    def squares(self, items: Sequence[Item]) -> Tensor:
        return torch.stack(foreach_norm([self._slice(item) for item in items])).square()

    def set_norms(self, items: Sequence[Item], norms: Tensor) -> None:
        self._norms.update(zip(items, norms, strict=True))

    def write(self, item: Item, out: Tensor) -> None:
        norm, slice_ = self._norms.pop(item, None), self._slice(item)
        out.copy_(slice_ if norm is None else normalize(slice_, norm, out.dtype))
        self._num_left[item.entry] -= 1
        if self._num_left[item.entry] == 0:
            del self._held[item.entry]

    def _slice(self, item: Item) -> Tensor:
        if item.entry not in self._held:
            self._held[item.entry] = self.whole(item.entry)
            self._num_left[item.entry] = self._plan.layout(item).num_matrices
        update = self._held[item.entry]
        return update[item.matrix] if update.ndim == 3 else update
