"""Activation checkpointing around a block's forward, so that parameter names stay as they are.

The operators that mode "selective" with option "op" keeps are those of TorchTitan v0.2.2.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from dmuon.torch_internals import costly_operators, silence_recomputation_warning

# Dear to compute again, or a collective: their results are kept. Of the matrix products "op" keeps every second one,
# which halves their memory for a quarter of their time.
_SAVED = costly_operators()
BY_OPERATOR = ("op", "op_all")


def _policy(keep_every_product: bool) -> Callable[..., CheckpointPolicy]:
    num_products: dict[bool, int] = defaultdict(int)

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operator is torch.ops.aten.mm.default and not keep_every_product:
            num_products[context.is_recompute] += 1
            if num_products[context.is_recompute] % 2 == 0:
                return CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE if operator in _SAVED else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


def _op_contexts(keep_every_product: bool) -> Any:
    return create_selective_checkpoint_contexts(_policy(keep_every_product))


def checkpoint_activations(layers: nn.ModuleList, mode: str, selective_option: str) -> None:
    """Wraps the forward of each layer in place.

    Args:
        mode: "none", "full" (a layer keeps its input only) or "selective".
        selective_option: "op" keeps the results of costly operators, but of every second matrix product only;
            "op_all" of all of them; an integer N as text checkpoints every N-th layer in full.
    """
    if mode == "none":
        return
    every = 1 if mode == "full" or selective_option in BY_OPERATOR else int(selective_option)
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if mode == "selective" and selective_option in BY_OPERATOR:
        options["context_fn"] = partial(_op_contexts, selective_option == "op_all")
        silence_recomputation_warning()
    for number, layer in enumerate(layers, start=1):
        if number % every == 0:
            layer.forward = _checkpointed(layer.forward, options)


def _checkpointed(forward: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    def checkpointed_forward(*args: Any) -> Any:
        return checkpoint(forward, *args, **options)

    return checkpointed_forward
