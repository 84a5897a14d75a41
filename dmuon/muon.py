"""The optimizer: Muon for dedicated parameters on their owners, AdamW for FSDP2's shards of all others."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from dmuon.hooks import find_runtime
from dmuon.newton_schulz import BACKENDS, Coefficients, orthogonalize, resolve_dtype
from dmuon.newton_schulz.coefficients import resolve
from dmuon.torch_internals import foreach_lerp_

MOMENTUM = "momentum_buffer"
EXP_AVG, EXP_AVG_SQ, STEP = "exp_avg", "exp_avg_sq", "step"

# Bounds the float32 workspace of one batched Newton-Schulz call: 2^28 elements are 1 GiB.
_MAX_BATCH_NUMEL = 1 << 28


class Muon(torch.optim.Optimizer):
    """Muon on dedicated parameters, AdamW on the rest. Arithmetic around Newton-Schulz is `torch.optim.Muon`'s.

    `param_groups[0]` holds the dedicated parameters, `param_groups[1]` the symmetric ones, the same on every rank;
    state tensors exist from construction on, and for dedicated parameters on their owners alone.

    Args:
        model: after `dmuon.dedicate_params` and `fully_shard`, and after `dmuon.materialize` if it was on meta.
        lr: learning rate of Muon, and of AdamW unless `adamw_lr` is given.
        momentum, nesterov: exponential moving average of gradients, and whether to look ahead by it.
        weight_decay: decoupled; AdamW's unless `adamw_weight_decay` is given.
        adjust_lr_fn: "match_rms_adamw" scales an m x n update by 0.2 sqrt(max(m, n)), so that one learning rate
            serves both kinds; "original" by sqrt(max(1, m / n)).
        ns_steps, ns_backend, ns_coefficients, ns_dtype: see `dmuon.newton_schulz`.
        adamw_betas, adamw_eps: AdamW's.
        replicate_async: under HSDP, let updated weights travel to the other rows while the next forward runs.

    Raises:
        ValueError: `dedicate_params` was not called on the model, or an argument is out of range.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = 3e-4,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.1,
        adjust_lr_fn: str = "match_rms_adamw",
        ns_steps: int = 5,
        ns_backend: str = "gram",
        ns_coefficients: Coefficients = "polar_express",
        ns_dtype: str = "auto",
        adamw_lr: float | None = None,
        adamw_weight_decay: float | None = None,
        adamw_betas: tuple[float, float] = (0.9, 0.95),
        adamw_eps: float = 1e-8,
        replicate_async: bool = True,
    ) -> None:
        runtime = find_runtime(model)
        if runtime is None:
            raise ValueError("this model has no dedicated parameters: call dmuon.dedicate_params(model, mesh) first")
        self._runtime = runtime
        self._replicate_async = replicate_async
        _check(lr=lr, adamw_lr=adamw_lr, weight_decay=weight_decay, adamw_weight_decay=adamw_weight_decay)
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum = {momentum}: must be in [0, 1)")
        if adjust_lr_fn not in ("match_rms_adamw", "original"):
            raise ValueError(f"adjust_lr_fn = {adjust_lr_fn!r}: must be match_rms_adamw or original")
        if ns_backend not in BACKENDS:
            raise ValueError(f"ns_backend = {ns_backend!r}: must be one of {', '.join(BACKENDS)}")
        resolve(ns_coefficients, ns_steps)
        resolve_dtype(ns_dtype, torch.device("cpu"))

        by_master = {param.master: param for unit in runtime.units for param in unit.params}
        dedicated = [param for param in model.parameters() if param in by_master]
        symmetric = [param for param in model.parameters() if param.requires_grad and param not in by_master]
        muon_group = {
            "params": dedicated,
            "kind": "muon",
            "lr": lr,
            "momentum": momentum,
            "nesterov": nesterov,
            "weight_decay": weight_decay,
            "adjust_lr_fn": adjust_lr_fn,
            "ns_steps": ns_steps,
            "ns_backend": ns_backend,
            "ns_coefficients": ns_coefficients,
            "ns_dtype": ns_dtype,
        }
        adamw_group = {
            "params": symmetric,
            "kind": "adamw",
            "lr": lr if adamw_lr is None else adamw_lr,
            "betas": adamw_betas,
            "eps": adamw_eps,
            "weight_decay": weight_decay if adamw_weight_decay is None else adamw_weight_decay,
        }
        super().__init__([muon_group, adamw_group] if symmetric else [muon_group], {})
        for param in dedicated:
            if param.device.type != "meta":
                self.state[param][MOMENTUM] = torch.zeros_like(param)
        for param in symmetric:
            if param.device.type == "meta":
                raise ValueError("the model is still on the meta device: call dmuon.materialize before dmuon.Muon")
            self.state[param] = init_adamw_state(param)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Updates owned matrices and local shards, then starts publishing the new weights."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._runtime.wait_publish()
        for group in self.param_groups:
            if group["kind"] == "muon":
                self._muon_step(group)
            else:
                adamw_step(group, self.state)
        self._runtime.publish(wait=not self._replicate_async)
        return loss

    def _muon_step(self, group: dict[str, Any]) -> None:
        params = [param for param in group["params"] if param.grad is not None]
        grads = [param.grad for param in params]
        buffers = [self.state[param][MOMENTUM] for param in params]
        if not params:
            return
        foreach_lerp_(buffers, grads, 1 - group["momentum"])
        # The gradient is consumed here: with Nesterov it becomes the update in place.
        updates = buffers
        if group["nesterov"]:
            foreach_lerp_(grads, buffers, group["momentum"])
            updates = grads
        dtype = resolve_dtype(group["ns_dtype"], params[0].device)
        for batch in batches([update.shape for update in updates]):
            # A stack of matrices is a batch already; its update is one row of matrices in the batch.
            flat_BMN = torch.cat([_matrices(updates[i]) for i in batch])
            orthogonal_BMN = orthogonalize(
                flat_BMN,
                num_steps=group["ns_steps"],
                backend=group["ns_backend"],
                coefficients=group["ns_coefficients"],
                dtype=dtype,
            )
            sizes = [_matrices(updates[i]).shape[0] for i in batch]
            for index, update in zip(batch, orthogonal_BMN.split(sizes), strict=True):
                scale = lr_scale(group["adjust_lr_fn"], params[index].shape)
                params[index].mul_(1 - group["lr"] * group["weight_decay"])
                params[index].add_(update.view(params[index].shape), alpha=-group["lr"] * scale)


def lr_scale(adjust_lr_fn: str, shape: Sequence[int]) -> float:
    """Factor on the learning rate of a matrix of this logical shape; of each matrix where it is a stack."""
    rows, cols = shape[-2:]
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, cols))
    return math.sqrt(max(1, rows / cols))


def batches(shapes: Sequence[torch.Size]) -> list[list[int]]:
    """Indices of equal matrix shapes together, in order, each batch within the workspace bound."""
    by_shape: dict[tuple[int, ...], list[list[int]]] = {}
    for index, shape in enumerate(shapes):
        open_batches = by_shape.setdefault(tuple(shape[-2:]), [[]])
        held = sum(shapes[i].numel() for i in open_batches[-1])
        if open_batches[-1] and held + shape.numel() > _MAX_BATCH_NUMEL:
            open_batches.append([])
        open_batches[-1].append(index)
    return [batch for group in by_shape.values() for batch in group]


def init_adamw_state(param: nn.Parameter) -> dict[str, Tensor]:
    """State in the shape and sharding of `param`; the fused kernel wants its step count on the device."""
    device = param.device if _fused(param) else torch.device("cpu")
    return {
        STEP: torch.zeros((), dtype=torch.float32, device=device),
        EXP_AVG: torch.zeros_like(param),
        EXP_AVG_SQ: torch.zeros_like(param),
    }


@torch.no_grad()
def adamw_step(group: dict[str, Any], state: dict[Any, dict[str, Tensor]]) -> None:
    """torch.optim.AdamW's own update, on local shards; a rank whose shard is empty has nothing to do."""
    params = [p for p in group["params"] if p.grad is not None]
    filled = [p for p in params if local(p).numel() > 0]
    for param in params:
        if local(param).numel() == 0:
            state[param][STEP] += 1
    if not filled:
        return
    beta1, beta2 = group["betas"]
    adamw(
        [local(p) for p in filled],
        [local(p.grad) for p in filled],
        [local(state[p][EXP_AVG]) for p in filled],
        [local(state[p][EXP_AVG_SQ]) for p in filled],
        [],
        [state[p][STEP] for p in filled],
        fused=True if _fused(filled[0]) else None,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor; a plain tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _fused(param: Tensor) -> bool:
    return param.device.type == "cuda"


def _matrices(tensor: Tensor) -> Tensor:
    """[M, N] or [B, M, N] as [B, M, N]."""
    return tensor.unsqueeze(0) if tensor.ndim == 2 else tensor


def _check(**rates: float | None) -> None:
    for name, value in rates.items():
        if value is not None and not value >= 0:
            raise ValueError(f"{name} = {value}: must not be negative")
