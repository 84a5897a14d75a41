"""The optimizer of a job: Muon on dedicated matrices with AdamW beside it, or AdamW alone."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import dmuon
from dmuon.adamw import init_adamw_state
from dmuon_titan.config.schema import Optimizer
from dmuon_titan.console import logger


def build_optimizer(options: Optimizer, model: nn.Module) -> torch.optim.Optimizer:
    """Builds what `[optimizer]` asks for over a parallelized, materialized model. All state exists afterwards."""
    betas = (options.beta1, options.beta2)
    if options.name == "Muon":
        muon = dmuon.Muon(
            model,
            options.lr,
            momentum=options.momentum,
            nesterov=options.nesterov,
            weight_decay=options.weight_decay,
            adjust_lr_fn=options.adjust_lr_fn,
            ns_steps=options.ns_steps,
            ns_backend=options.ns_backend,
            ns_coefficients=options.ns_coefficients,
            ns_dtype=options.ns_dtype,
            ns_kernel=options.ns_kernel,
            tp_strategy=options.tp_strategy,
            adamw_lr=options.adamw_lr,
            adamw_weight_decay=options.adamw_weight_decay,
            adamw_betas=betas,
            adamw_eps=options.eps,
            replicate_async=options.replicate_async,
        )
        if any(param.device.type == "cuda" for param in model.parameters()):
            for line in muon.newton_schulz_plan():
                logger.info("Newton-Schulz of rank 0: %s", line)
        return muon
    params = [param for param in model.parameters() if param.requires_grad]
    fused = all(param.device.type == "cuda" for param in params)
    optimizer = torch.optim.AdamW(
        params,
        lr=options.lr,
        betas=betas,
        eps=options.eps,
        weight_decay=options.weight_decay,
        fused=True if fused else None,
    )
    # torch makes the state at the first step, too late for a checkpoint that is to be loaded before it.
    for param in params:
        optimizer.state[param].update(init_adamw_state(param))
    return optimizer


def step_unless(optimizer: torch.optim.Optimizer, unsound: Tensor) -> None:
    """One step, which changes nothing if `unsound`, 0-dim and the same on all ranks. On a GPU the host doesn't wait."""
    if unsound.is_cuda or isinstance(optimizer, dmuon.Muon):
        optimizer.found_inf = unsound.float()  # type: ignore[attr-defined]  # torch's fused optimizers read it too
        optimizer.step()
    elif not unsound:
        optimizer.step()
