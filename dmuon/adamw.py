"""AdamW for what has no owner: torch's own fused update, on FSDP2's shards."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from dmuon.annotation import annotated
from dmuon.parameter import local

EXP_AVG, EXP_AVG_SQ, STEP = "exp_avg", "exp_avg_sq", "step"


def init_adamw_state(param: nn.Parameter) -> dict[str, Tensor]:
    """State in the shape and sharding of `param`; the fused kernel wants its step count on the device."""
    device = param.device if _fused(param) else torch.device("cpu")
    return {
        STEP: torch.zeros((), dtype=torch.float32, device=device),
        EXP_AVG: torch.zeros_like(param),
        EXP_AVG_SQ: torch.zeros_like(param),
    }


@annotated(lambda *_: "dmuon::adamw")
@torch.no_grad()
def adamw_step(group: dict[str, Any], state: dict[Any, dict[str, Tensor]], found_inf: Tensor | None = None) -> None:
    """torch.optim.AdamW's own update, on local shards; a rank whose shard is empty has nothing to do.

    `found_inf`: on a GPU, float32, one element; if it is not zero nothing changes.
    """
    params = [param for param in group["params"] if is_due(param)]
    filled = [p for p in params if local(p).numel() > 0]
    for param in params:
        if local(param).numel() == 0:
            state[param][STEP] += 1 if found_inf is None else 1 - found_inf
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
        found_inf=found_inf,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )


def _fused(param: Tensor) -> bool:
    return param.device.type == "cuda"


def is_due(param: nn.Parameter) -> bool:
    """Whether this step updates it."""
    # A frozen one may still have zeros, from zero_grad(set_to_none=False): momentum and weight decay would go on.
    return param.grad is not None and param.requires_grad
