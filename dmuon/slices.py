"""The update of parameters of which several ranks have a slice each, the tp ranks of an owner or joint owners: they
orthogonalise together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dmuon.annotation import annotated
from dmuon.collectives import Axis, DataParallelAxes
from dmuon.newton_schulz import SMALLEST_NORM, resolve_dtype
from dmuon.newton_schulz.planning import choose_kernel
from dmuon.parameter import DedicatedParameter, local
from dmuon.tensor_parallel import (
    GRAM,
    STRATEGIES,
    Layout,
    OrthogonalizationPlan,
    TensorParallelOrthogonalizer,
    plan_orthogonalization,
)
from dmuon.tensor_parallel.plan import Item
from dmuon.tensor_parallel.updates import HeldUpdates


class Part(NamedTuple):
    """This rank's slice of one matrix or stack: views of master, gradient and momentum in the local shape."""

    layout: Layout
    master: Tensor
    grad: Tensor
    momentum: Tensor


class SliceUpdates:
    """Momentum -> orthogonalise -> masters. Masters and momentum stay where they are.

    Args:
        axis: the ranks that have the slices.
        strategy: see `dmuon.tensor_parallel.plan_orthogonalization`.
        kernel: see `dmuon.newton_schulz.planning.choose_kernel`.
    """

    def __init__(self, axis: Axis, strategy: str, kernel: str = "auto") -> None:
        self.axis, self._strategy, self._kernel = axis, strategy, kernel
        self._planned: dict[tuple[object, ...], TensorParallelOrthogonalizer] = {}

    @annotated(lambda _, params, *__: f"dmuon::newton_schulz {len(params)} slices")
    def __call__(
        self,
        params: Sequence[tuple[DedicatedParameter, Tensor]],
        group: dict[str, Any],
        scale_of: Callable[[str, Sequence[int]], float],
    ) -> None:
        """All ranks of the axis together.

        Args:
            params: each with its momentum; the same ones in the same order on all of them.
            group: the options of `dmuon.Muon`.
            scale_of: (adjust_lr_fn, logical shape) -> factor on the learning rate.
        """
        parts = [part for param, momentum in params for part in self._parts(param, momentum)]
        if not parts:
            return
        device = parts[0].master.device
        orthogonalizer = self._orthogonalizer(parts, resolve_dtype(group["ns_dtype"], device))
        fused = self._fuses(parts, orthogonalizer.plan.dtype)
        results = orthogonalizer.stream(
            FusedSlices(parts, group) if fused else self._held_updates(parts, group, orthogonalizer.plan),
            num_steps=group["ns_steps"],
            backend=group["ns_backend"],
            coefficients=group["ns_coefficients"],
            kernel=self._kernel,
        )
        for index, orthogonal in results:
            part = parts[index]
            scale = scale_of(group["adjust_lr_fn"], part.layout.shape)
            _update_master(
                part.master,
                orthogonal,
                keep=1 - group["lr"] * group["weight_decay"],
                step=-group["lr"] * scale,
                fused=fused and orthogonal.is_contiguous() and orthogonal.numel() > 0,
            )

    def _fuses(self, parts: Sequence[Part], dtype: torch.dtype) -> bool:
        """Whether Triton's passes can take all of them."""
        return choose_kernel(self._kernel, parts[0].master.device, dtype) != "torch" and all(
            tensor.is_contiguous() for part in parts for tensor in (part.master, part.grad, part.momentum)
        )

    def _held_updates(self, parts: Sequence[Part], group: dict[str, Any], plan: OrthogonalizationPlan) -> HeldUpdates:
        def update_of(entry: int) -> Tensor:
            return _look_ahead(parts[entry], group["momentum"], group["nesterov"])

        return HeldUpdates(plan, self.axis.index, parts[0].master.device, update_of)

    def _parts(self, param: DedicatedParameter, momentum: Tensor) -> list[Part]:
        assert param.slice is not None
        assert param.master.grad is not None
        layout = Layout(tuple(param.logical_shape), param.slice.dim)
        tensors = [local(tensor) for tensor in (param.master, param.master.grad, momentum)]
        if not param.split:
            return [Part(layout, *tensors)]
        layouts = layout.split(param.split, self.axis.size)
        rows = [piece.local_shape(self.axis.size, self.axis.index)[0] for piece in layouts]
        views = zip(*(tensor.split(rows) for tensor in tensors), strict=True)
        return [Part(piece, *view) for piece, view in zip(layouts, views, strict=True)]

    def _orthogonalizer(self, parts: Sequence[Part], dtype: torch.dtype) -> TensorParallelOrthogonalizer:
        """Planned once for the matrices that have gradients, which are nearly always the same."""
        layouts = tuple(part.layout for part in parts)
        if (layouts, dtype) not in self._planned:
            # What travels in the iteration's dtype was normalised in float32 before: nothing is lost by it.
            plan = plan_orthogonalization(layouts, self.axis.size, self._strategy, dtype=dtype, wire_dtype=dtype)
            self._planned[layouts, dtype] = TensorParallelOrthogonalizer(plan, self.axis)
        return self._planned[layouts, dtype]


def slice_updates(axes: DataParallelAxes, tp_strategy: str, kernel: str) -> list[SliceUpdates]:
    """Those that this rank takes part in, in the order in which it does.

    Raises:
        ValueError: an unknown strategy.
    """
    if tp_strategy not in STRATEGIES:
        raise ValueError(f"tp_strategy = {tp_strategy!r}: must be one of {', '.join(STRATEGIES)}")
    over_tp = [] if axes.tp is None else [SliceUpdates(axes.tp, tp_strategy, kernel)]
    return over_tp + [SliceUpdates(axis, GRAM, kernel) for axis in axes.joint.values()]


class FusedSlices:
    """Updates of which none exists in float32: momentum moves on where a slice is written, by Triton's passes."""

    def __init__(self, parts: Sequence[Part], group: dict[str, Any]) -> None:
        self.device = parts[0].master.device
        self._parts = parts
        self._momentum, self._nesterov = group["momentum"], group["nesterov"]
        self._inverse_norms: dict[Item, Tensor] = {}

    def squares(self, items: Sequence[Item]) -> Tensor:
        from dmuon.newton_schulz import passes

        by_shape: dict[torch.Size, list[Item]] = {}
        for item in items:
            by_shape.setdefault(self._views(item)[0].shape, []).append(item)
        found: dict[Item, Tensor] = {}
        for shape, alike in by_shape.items():
            if shape.numel() == 0:
                sums = torch.zeros(len(alike), dtype=torch.float64, device=self.device)
            else:
                grads, momenta = zip(*map(self._views, alike), strict=True)
                sums = passes.squared_norms(grads, momenta, self._momentum, nesterov=self._nesterov)
            found.update(zip(alike, sums, strict=True))
        return torch.stack([found[item] for item in items])

    def set_norms(self, items: Sequence[Item], norms: Tensor) -> None:
        inverse_norms = norms.clamp(min=SMALLEST_NORM).reciprocal().float()
        self._inverse_norms.update(zip(items, inverse_norms.split(1), strict=True))

    def write(self, item: Item, out: Tensor) -> None:
        from dmuon.newton_schulz import passes

        grad, momentum = self._views(item)
        inverse_norm = self._inverse_norms.pop(item)
        if out.numel() > 0:
            passes.advance(grad, momentum, inverse_norm, out.unsqueeze(0), self._momentum, nesterov=self._nesterov)

    def whole(self, entry: int) -> Tensor:
        return _look_ahead(self._parts[entry], self._momentum, self._nesterov)

    def _views(self, item: Item) -> tuple[Tensor, Tensor]:
        """Gradient and momentum [1, M, N] of this rank's slice."""
        part = self._parts[item.entry]
        place = slice(item.matrix, item.matrix + 1)
        return _stacked(part.grad)[place], _stacked(part.momentum)[place]


def _stacked(tensor: Tensor) -> Tensor:
    return tensor if tensor.ndim == 3 else tensor.unsqueeze(0)


def _update_master(master: Tensor, orthogonal: Tensor, *, keep: float, step: float, fused: bool) -> None:
    if not fused:
        master.mul_(keep)
        master.add_(orthogonal, alpha=step)
        return
    from dmuon.newton_schulz import passes

    passes.update_master(_stacked(master), _stacked(orthogonal), keep=keep, step=step)


def _look_ahead(part: Part, momentum: float, nesterov: bool) -> Tensor:
    """Advances the momentum and returns the update in float32, the gradient left as it is."""
    advanced = part.momentum.float().lerp_(part.grad, 1 - momentum)
    if advanced is not part.momentum:
        part.momentum.copy_(advanced)
    return part.grad.lerp(advanced, momentum) if nesterov else advanced
