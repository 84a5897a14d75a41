"""Cross entropy summed over valid tokens. Whoever divides knows how many of them all ranks have together.

The head's logits are the largest tensor of a training step: 8 GiB for 32k tokens and a vocabulary of 128k, and their
gradient as much again. `linear_cross_entropy_sum` makes both for a chunk of tokens at a time, and forward multiplies
the gradient of a chunk's logits by weight and hidden states at once, so that nothing is computed twice.

Shape legend: B sequences, S tokens, D model dim, V vocabulary, N tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import loss_parallel
from torch.utils.checkpoint import checkpoint

from dmuon.torch_internals import foreach_mul_
from dmuon_titan.config.schema import JobConfig, Parallelism
from dmuon_titan.memory import LOGITS_AT_ONCE

IGNORE_INDEX = -100
"""Label of a token that is no target."""

Losses = tuple[Tensor, Tensor]
"""The loss times a scale, to be differentiated, and the loss itself; both 0-dim and float32."""

ToGradient = Callable[[Tensor, Tensor, Tensor], Tensor]


def build_loss(config: JobConfig) -> Callable[..., Losses]:
    """(model, tokens [B, S], labels [B, S], scale, 0-dim) -> `Losses`, compiled if `[compile]` asks for it."""
    options = config.compile
    compiled = options.enable and "loss" in options.components
    compile_: Callable[[Any], Any] = partial(torch.compile, backend=options.backend, fullgraph=True)
    if config.parallelism.tensor_parallel_degree > 1:
        return partial(_of_logits, compile_(cross_entropy_sum) if compiled else cross_entropy_sum)
    return partial(_of_hidden_states, compile_(_to_gradient) if compiled else _to_gradient)


def _of_logits(
    loss_sum: Callable[[Tensor, Tensor], Tensor], model: nn.Module, input_BS: Tensor, label_BS: Tensor, scale: Tensor
) -> Losses:
    loss = loss_sum(model(input_BS), label_BS)
    return loss * scale, loss.detach()


def _of_hidden_states(
    to_gradient: ToGradient, model: nn.Module, input_BS: Tensor, label_BS: Tensor, scale: Tensor
) -> Losses:
    return model(input_BS, partial(linear_cross_entropy_sum, label_BS=label_BS, scale=scale, to_gradient=to_gradient))


def linear_cross_entropy_sum(
    hidden_BSD: Tensor,
    weight_VD: Tensor,
    label_BS: Tensor,
    scale: Tensor,
    to_gradient: ToGradient | None = None,
) -> Losses:
    """`cross_entropy_sum` of hidden W^T without ever having all of these logits.

    Args:
        hidden_BSD, weight_VD: of one floating dtype, in which logits and their gradient are rounded; sums are float32.
        label_BS: int64, in 0 .. V - 1, or IGNORE_INDEX.
        scale: 0-dim. Known beforehand, so that gradients are rounded once.
        to_gradient: `_to_gradient`, maybe compiled.
    """
    to_gradient = to_gradient or _to_gradient
    hidden_ND, label_N = hidden_BSD.flatten(0, -2), label_BS.flatten()
    if torch.is_grad_enabled():
        scaled, loss = _LinearCrossEntropy.apply(hidden_ND, weight_VD, label_N, scale.float(), to_gradient)
        return scaled, loss
    chunks = _chunks(hidden_ND, weight_VD, label_N)
    loss = torch.stack([to_gradient(hidden @ weight_VD.T, label, scale.float()) for hidden, label in chunks]).sum()
    return loss * scale, loss


class _LinearCrossEntropy(torch.autograd.Function):
    """Forward makes both gradients, and backward can only be had once. What comes in there is rounded to their dtype:
    it is 1 unless the scaled loss is scaled again."""

    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, label_N: Tensor, scale: Tensor, to_gradient: ToGradient
    ) -> Losses:
        hidden_grads, losses = [], []
        weight_grad: Tensor | None = None
        chunks = _chunks(hidden_ND, weight_VD, label_N)
        for hidden, label in chunks:
            logits = hidden @ weight_VD.T
            losses.append(to_gradient(logits, label, scale))
            hidden_grads.append(logits @ weight_VD)
            weight_grad = _plus_product(weight_grad, logits.T, hidden) if len(chunks) > 1 else logits.T @ hidden
            del logits
        loss = torch.stack(losses).sum()
        assert weight_grad is not None
        ctx.save_for_backward(torch.cat(hidden_grads), weight_grad.to(weight_VD.dtype))
        ctx.mark_non_differentiable(loss)
        return loss * scale, loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        # In place, for nobody else has them; and foreach, for a plain product with a 0-dim tensor is far slower.
        gradients = list(ctx.saved_tensors)
        foreach_mul_(gradients, grad.to(gradients[0].dtype))
        return *gradients, None, None, None


def _chunks(hidden_ND: Tensor, weight_VD: Tensor, label_N: Tensor) -> list[tuple[Tensor, Tensor]]:
    num_chunks = -(-len(label_N) * len(weight_VD) // LOGITS_AT_ONCE[hidden_ND.device.type])
    return list(zip(hidden_ND.chunk(num_chunks), label_N.chunk(num_chunks), strict=True))


def _plus_product(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """total + a b in float32, in the memory of `total`."""
    if not a.is_cuda or a.dtype == torch.float32:
        return (a @ b).float() if total is None else total.add_(a @ b)
    if total is None:
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.addmm(total, a, b, out_dtype=torch.float32, out=total)


def _to_gradient(logits_NV: Tensor, label_N: Tensor, scale: Tensor) -> Tensor:
    """The summed loss, 0-dim and float32. Turns logits into the gradient of `scale` times it, in place."""
    valid_N = label_N != IGNORE_INDEX
    target_N1 = label_N.where(valid_N, 0)[:, None]
    log_probability_NV = F.log_softmax(logits_NV, dim=-1, dtype=torch.float32)
    loss = log_probability_NV.gather(1, target_N1)[:, 0].where(valid_N, 0).sum().neg()
    scale_N1 = torch.where(valid_N, scale, 0)[:, None]
    if torch.compiler.is_compiling():  # one pass; in plain torch this would be three
        is_target_NV = torch.arange(logits_NV.shape[1], device=logits_NV.device) == target_N1
        logits_NV.copy_((log_probability_NV.exp() - is_target_NV.float()) * scale_N1)
    else:
        gradient_NV = log_probability_NV.exp_()
        gradient_NV[torch.arange(len(label_N), device=label_N.device), target_N1[:, 0]] -= 1
        torch.mul(gradient_NV, scale_N1, out=logits_NV)
    return loss


def cross_entropy_sum(logits_BSV: Tensor, label_BS: Tensor) -> Tensor:
    """Sum over valid tokens of -log softmax(logits)[label], computed in float32; 0 if no token is valid.

    Args:
        logits_BSV: any floating dtype. A DTensor is replicated, or sharded along V inside `loss_context`.
        label_BS: int64, in 0 .. V - 1, or IGNORE_INDEX. A plain tensor, the same on all ranks that share the logits.

    Returns:
        0-dim, float32, a plain tensor, the same on those ranks.
    """
    if isinstance(logits_BSV, DTensor) and logits_BSV.placements == (Replicate(),):
        logits_BSV = logits_BSV.to_local()
    logits, label = logits_BSV.flatten(0, -2), label_BS.flatten()
    # A compiler fuses the passes over the logits and keeps no float32 copy.
    if torch.compiler.is_compiling() or _num_here(logits) <= LOGITS_AT_ONCE["cpu"]:
        return _chunk_sum(logits, label)
    # 8192 x 128256 logits would take three float32 copies of 4 GiB. A chunk's are made again in backward instead.
    num_tokens = max(1, LOGITS_AT_ONCE["cpu"] * len(logits) // _num_here(logits))
    chunks = zip(logits.split(num_tokens), label.split(num_tokens), strict=True)
    sums = [checkpoint(_chunk_sum, *chunk, use_reentrant=False, preserve_rng_state=False) for chunk in chunks]
    return torch.stack(sums).sum()


def _chunk_sum(logits_NV: Tensor, label_N: Tensor) -> Tensor:
    total = F.cross_entropy(logits_NV.float(), label_N, ignore_index=IGNORE_INDEX, reduction="sum")
    return total.to_local() if isinstance(total, DTensor) else total


def _num_here(logits: Tensor) -> int:
    """Elements that this rank has."""
    return (logits.to_local() if isinstance(logits, DTensor) else logits).numel()


def loss_context(options: Parallelism) -> AbstractContextManager[None]:
    """What the loss must be computed in, and its backward too, where the vocabulary is spread over ranks."""
    is_parallel = options.tensor_parallel_degree > 1 and not options.disable_loss_parallel
    return loss_parallel() if is_parallel else nullcontext()
