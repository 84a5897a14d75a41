"""Slow, single-process and obviously right: the oracle that every mesh is compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterable

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
    """Muon for the parameters whose name `is_dedicated` accepts, torch.optim.AdamW for all others."""

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
    ) -> None:
        named = dict(named_params)
        self.matrices = {name: param for name, param in named.items() if is_dedicated(name)}
        self.momentum_buffers = {name: torch.zeros_like(param) for name, param in self.matrices.items()}
        self.lr, self.momentum, self.nesterov, self.weight_decay = lr, momentum, nesterov, weight_decay
        self.adjust_lr_fn, self.ns_steps, self.ns_coefficients = adjust_lr_fn, ns_steps, ns_coefficients
        rest = [param for name, param in named.items() if name not in self.matrices]
        self.adamw = torch.optim.AdamW(rest, lr if adamw_lr is None else adamw_lr, adamw_betas, adamw_eps, weight_decay)

    @torch.no_grad()
    def step(self) -> None:
        for name, param in self.matrices.items():
            if param.grad is None:
                continue
            buffer = self.momentum_buffers[name]
            buffer.copy_(self.momentum * buffer + (1 - self.momentum) * param.grad)
            update = (1 - self.momentum) * param.grad + self.momentum * buffer if self.nesterov else buffer
            matrices = update.unsqueeze(0) if update.ndim == 2 else update
            orthogonal = [orthogonalize_reference(m, self.ns_steps, self.ns_coefficients) for m in matrices]
            param.mul_(1 - self.lr * self.weight_decay)
            scale = lr_scale(self.adjust_lr_fn, param.shape)
            param.sub_(self.lr * scale * torch.stack(orthogonal).view(param.shape))
        self.adamw.step()
