"""Slow, single-process and obviously right: the oracle that every mesh is compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from dmuon.muon import lr_scale
from dmuon.newton_schulz.coefficients import Coefficients, resolve


def orthogonalize_reference(matrix_MN: Tensor, num_steps: int, coefficients: Coefficients) -> Tensor:
    """The polynomial iteration on one matrix, in the dtype of `matrix_MN`, as the papers write it."""
    if not matrix_MN.any():
        return matrix_MN.clone()
    X_MN = matrix_MN / matrix_MN.norm()
    for a, b, c in resolve(coefficients, num_steps):
        A_MM = X_MN @ X_MN.T
        X_MN = a * X_MN + b * A_MM @ X_MN + c * A_MM @ A_MM @ X_MN
    return X_MN


class ReferenceMuon:
    """Muon for the parameters whose name `is_dedicated` accepts, torch.optim.AdamW for all others.

    Args:
        split: rows of each fused matrix, by the name of the parameter that holds them.
        momentum_dtype: what momentum is rounded to between steps.
    """

    def __init__(
        self,
        named_params: Iterable[tuple[str, nn.Parameter]],
        is_dedicated: Callable[[str], bool],
        *,
        lr: float,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.1,
        adjust_lr_fn: str = "match_rms_adamw",
        ns_steps: int = 5,
        ns_coefficients: Coefficients = "polar_express",
        adamw_lr: float | None = None,
        adamw_betas: tuple[float, float] = (0.9, 0.95),
        adamw_eps: float = 1e-8,
        split: Mapping[str, Sequence[int]] | None = None,
        momentum_dtype: torch.dtype = torch.float32,
    ) -> None:
        named = dict(named_params)
        self.matrices = {name: param for name, param in named.items() if is_dedicated(name)}
        self.momentum_buffers = {
            name: torch.zeros_like(param, dtype=momentum_dtype) for name, param in self.matrices.items()
        }
        self.split = split or {}
        self.lr, self.momentum, self.nesterov, self.weight_decay = lr, momentum, nesterov, weight_decay
        self.adjust_lr_fn, self.ns_steps, self.ns_coefficients = adjust_lr_fn, ns_steps, ns_coefficients
        rest = [param for name, param in named.items() if name not in self.matrices]
        self.adamw = torch.optim.AdamW(rest, lr if adamw_lr is None else adamw_lr, adamw_betas, adamw_eps, weight_decay)

    @torch.no_grad()
    def step(self) -> None:
        for name, param in self.matrices.items():
            if param.grad is None:
                continue
            momentum = self.momentum * self.momentum_buffers[name].float() + (1 - self.momentum) * param.grad
            self.momentum_buffers[name].copy_(momentum)
            update = (1 - self.momentum) * param.grad + self.momentum * momentum if self.nesterov else momentum
            param.mul_(1 - self.lr * self.weight_decay)
            for target, matrix in zip(self._pieces(name, param), self._pieces(name, update), strict=True):
                scale = lr_scale(self.adjust_lr_fn, matrix.shape)
                target.sub_(self.lr * scale * orthogonalize_reference(matrix, self.ns_steps, self.ns_coefficients))
        self.adamw.step()

    def _pieces(self, name: str, tensor: Tensor) -> list[Tensor]:
        """Views of the matrices that `tensor`, of the parameter's shape, is made of."""
        if tensor.ndim == 3:
            return list(tensor)
        return list(tensor.split(list(self.split.get(name, [len(tensor)]))))
