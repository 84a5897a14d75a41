"""Gradient accumulation without a reduction in each micro-batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.distributed.fsdp import FSDPModule

from dmuon import torch_internals
from dmuon.hooks import find_runtime


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Backward inside keeps gradients on each rank, in the reduce dtype; the next one outside reduces the sum.

    Covers dedicated parameters and FSDP2's alike. Saves all reductions but one of a step, and costs each rank the
    gradients of the whole model, unsharded, in memory.

    Args:
        model: what `dedicate_params` was called on, or a plain FSDP2 model.
    """
    runtime = find_runtime(model)
    _set_sync(model, False)
    if runtime is not None:
        runtime.sync_gradients = False
    try:
        yield
    finally:
        _set_sync(model, True)
        if runtime is not None:
            runtime.sync_gradients = True


def has_unreduced_gradients(model: nn.Module) -> bool:
    """Whether gradients that `no_sync` has kept on this rank were not reduced since."""
    runtime = find_runtime(model)
    return (runtime is not None and runtime.has_unreduced_gradients) or any(
        isinstance(module, FSDPModule) and torch_internals.has_accumulated(module) for module in model.modules()
    )


def discard_accumulated(model: nn.Module) -> None:
    """Drops what `no_sync` has kept on this rank."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            torch_internals.discard_accumulated(module)
    runtime = find_runtime(model)
    if runtime is not None:
        for unit in runtime.units:
            unit.discard_accumulated()


def _set_sync(model: nn.Module, sync: bool) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_requires_gradient_sync(sync, recurse=False)
