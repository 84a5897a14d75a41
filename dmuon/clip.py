"""One gradient norm over the whole model, whatever holds each gradient, and clipping by it."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from dmuon.hooks import find_runtime, reshard
from dmuon.muon import local
from dmuon.torch_internals import foreach_mul_, foreach_norm, is_dedicated


@torch.no_grad()
def clip_grad_norm_(model: nn.Module, max_norm: float | None) -> Tensor:
    """Scales all gradients so that their joint 2-norm is at most `max_norm`.

    Dedicated gradients count once, at their owner; shards once each; a replicated gradient once. One all-reduce.
    Works on plain FSDP2 models as well.

    Args:
        model: after backward.
        max_norm: None leaves the gradients as they are.

    Returns:
        The norm before scaling: 0-dim float32, equal on all ranks. If it is not finite nothing was scaled.
    """
    reshard(model)
    params = [param for param in model.parameters() if param.grad is not None and param.device.type != "meta"]
    grads = [local(param.grad) for param in params if param.grad is not None]
    grads = [grad for grad in grads if grad.numel() > 0]
    counted = [local(p.grad) for p in params if p.grad is not None and _counts_here(p, p.grad)]
    counted = [grad for grad in counted if grad.numel() > 0]
    device = next((param.device for param in model.parameters() if param.device.type != "meta"), torch.device("cpu"))
    total = torch.zeros((), dtype=torch.float64, device=device)
    if counted:
        total += torch.stack(foreach_norm(counted)).square().sum()
    if _world_size(model) > 1:
        dist.all_reduce(total)
    norm = total.sqrt()
    if max_norm is not None and grads:
        scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        # Selected on the device: reading the norm here would make the host wait.
        foreach_mul_(grads, torch.where(norm.isfinite(), scale, 1.0).float())
    return norm.float()


def _counts_here(param: nn.Parameter, grad: Tensor) -> bool:
    """Of the ranks that hold the same values, the first along each replicated axis counts them."""
    if not isinstance(grad, DTensor):
        return is_dedicated(param) or not dist.is_initialized() or dist.get_rank() == 0
    coordinate = grad.device_mesh.get_coordinate()
    assert coordinate is not None
    return all(index == 0 for index, place in zip(coordinate, grad.placements, strict=True) if place == Replicate())


def _world_size(model: nn.Module) -> int:
    """Ranks that hold parts of this model; they must be the default group, as the meshes of one job are."""
    runtime = find_runtime(model)
    if runtime is not None:
        return runtime.axes.world_size
    sharded = next((param for param in model.parameters() if isinstance(param, DTensor)), None)
    return 1 if sharded is None else sharded.device_mesh.size()
