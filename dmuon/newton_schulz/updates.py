"""The whole update of a batch of equal matrices, momentum -> orthogonalise -> masters: in fused passes, or in torch.

In fused passes, which are Triton's, there is no copy of the update in float32: gradient and momentum are read twice
instead, for the norm and for X. And the compute copy is written with the master.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dmuon.newton_schulz import SMALLEST_NORM, orthogonalize, resolve_dtype
from dmuon.newton_schulz.coefficients import resolve
from dmuon.newton_schulz.execution import Execution
from dmuon.newton_schulz.planning import BatchPlan, check_kernel, plan_batch
from dmuon.torch_internals import foreach_lerp_


class Piece(NamedTuple):
    """Views [B, M, N] of part of one parameter, its gradient, its momentum, and its compute copy if it has one."""

    master: Tensor
    grad: Tensor
    momentum: Tensor
    compute: Tensor | None = None


class FusedUpdates:
    """Plans batches, and updates those that fused passes can take.

    Args:
        kernel: one of `planning.KERNELS`.

    Attributes:
        execution: counts what ran.

    Raises:
        ValueError: an unknown kernel.
    """

    def __init__(self, kernel: str = "auto") -> None:
        check_kernel(kernel)
        self.kernel = kernel
        self.execution = Execution()

    def plan(self, shapes: Sequence[Sequence[int]], device: torch.device, group: Mapping[str, Any]) -> BatchPlan:
        """Of pieces of these shapes, all [B, M, N] with the same M and N."""
        return plan_batch(
            (sum(shape[0] for shape in shapes), *shapes[0][1:]),
            device,
            backend=group["ns_backend"],
            dtype=resolve_dtype(group["ns_dtype"], device),
            kernel=self.kernel,
        )

    def can_take(self, plan: BatchPlan, batch: Sequence[Piece]) -> bool:
        return plan.kernel != "torch" and all(
            tensor is None or tensor.is_contiguous() for piece in batch for tensor in piece
        )

    def __call__(
        self,
        plan: BatchPlan,
        batch: Sequence[Piece],
        group: Mapping[str, Any],
        scale: float,
        found_inf: Tensor | None = None,
    ) -> None:
        """Updates masters and momenta, and renews compute copies.

        Args:
            group: the options of `dmuon.Muon`.
            scale: factor on the learning rate for this shape.
            found_inf: float32, one element, on the device; if it is not zero nothing changes.
        """
        from dmuon.newton_schulz import passes

        momentum, nesterov = group["momentum"], group["nesterov"]
        triples = resolve(group["ns_coefficients"], group["ns_steps"])
        grads, buffers = [piece.grad for piece in batch], [piece.momentum for piece in batch]
        squares = passes.squared_norms(grads, buffers, momentum, nesterov=nesterov)
        inverse_norms = squares.sqrt().clamp(min=SMALLEST_NORM).reciprocal().float()
        sizes = [piece.grad.shape[0] for piece in batch]
        X = self.execution.input(plan, triples, batch[0].grad.device)
        for piece, inverse_norm, part in zip(batch, inverse_norms.split(sizes), X.split(sizes), strict=True):
            passes.advance(
                piece.grad, piece.momentum, inverse_norm, part, momentum, nesterov=nesterov, found_inf=found_inf
            )
        result = self.execution.run(plan, triples, X)
        keep, step = 1 - group["lr"] * group["weight_decay"], -group["lr"] * scale
        for piece, part in zip(batch, result.split(sizes), strict=True):
            passes.update_master(piece.master, part, piece.compute, keep=keep, step=step, found_inf=found_inf)


def update_by_torch(
    batch: Sequence[Piece], group: Mapping[str, Any], scale: float, *, dtype: torch.dtype, kernel: str
) -> None:
    """Momentum -> orthogonalise -> masters in torch operations, on any device. `dtype`: of the iteration."""
    grads, buffers = [piece.grad for piece in batch], [piece.momentum for piece in batch]
    momenta = buffers if buffers[0].dtype == torch.float32 else [buffer.float() for buffer in buffers]
    foreach_lerp_(momenta, grads, 1 - group["momentum"])
    if momenta is not buffers:
        for buffer, momentum in zip(buffers, momenta, strict=True):
            buffer.copy_(momentum)
    sizes = [grad.shape[0] for grad in grads]
    update_BMN = torch.cat(grads if group["nesterov"] else momenta)
    if group["nesterov"]:
        foreach_lerp_(list(update_BMN.split(sizes)), momenta, group["momentum"])
    del momenta
    orthogonal_BMN = orthogonalize(
        update_BMN,
        num_steps=group["ns_steps"],
        backend=group["ns_backend"],
        coefficients=group["ns_coefficients"],
        dtype=dtype,
        kernel=kernel,
    )
    for piece, orthogonal in zip(batch, orthogonal_BMN.split(sizes), strict=True):
        piece.master.mul_(1 - group["lr"] * group["weight_decay"])
        piece.master.add_(orthogonal, alpha=-group["lr"] * scale)
