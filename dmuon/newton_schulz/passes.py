"""Triton kernels around the iteration: momentum, look-ahead, normalisation and the update of masters, each tensor read
as few times as the norm of the whole matrix allows.

Shapes: a stack of B matrices M x N, contiguous: master, gradient, momentum. X [B, M', N'] with M' >= M and N' >= N is
the part of a batch's half-precision buffer that belongs to it. All arithmetic is float32; squares are summed in
float64, where those of 1e-20 and 1e20 neither vanish nor overflow, in an order that depends on the shape alone.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dmuon.newton_schulz.kernels import triton

tl: Any = triton.language

_BLOCK = 2048
_BLOCKS_EACH = 4


@triton.jit
def _lerp(start, end, weight):
    """torch.lerp, its case distinction included."""
    return tl.where(weight < 0.5, start + weight * (end - start), end - (end - start) * (1 - weight))


@triton.jit
def _squares_kernel(
    grad_ptr, momentum_ptr, sums_ptr, numel, momentum, NESTEROV: tl.constexpr, BLOCK: tl.constexpr, COUNT: tl.constexpr
):
    matrix = tl.program_id(1).to(tl.int64)
    total = tl.zeros((BLOCK,), dtype=tl.float64)
    for index in range(COUNT):
        offset = (tl.program_id(0).to(tl.int64) * COUNT + index) * BLOCK + tl.arange(0, BLOCK)
        mask = offset < numel
        grad = tl.load(grad_ptr + matrix * numel + offset, mask=mask, other=0.0).to(tl.float32)
        buffer = tl.load(momentum_ptr + matrix * numel + offset, mask=mask, other=0.0).to(tl.float32)
        update = _lerp(buffer, grad, 1 - momentum)
        if NESTEROV:
            update = _lerp(grad, update, momentum)
        update = update.to(tl.float64)
        total += update * update
    tl.store(sums_ptr + matrix * tl.num_programs(0) + tl.program_id(0), tl.sum(total, axis=0))


@triton.jit
def _advance_kernel(
    grad_ptr,
    momentum_ptr,
    norm_ptr,
    X_ptr,
    numel,
    num_cols,
    X_matrix,
    X_row,
    momentum,
    NESTEROV: tl.constexpr,
    IS_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    COUNT: tl.constexpr,
):
    matrix = tl.program_id(1).to(tl.int64)
    norm = tl.load(norm_ptr + matrix)
    for index in range(COUNT):
        offset = (tl.program_id(0).to(tl.int64) * COUNT + index) * BLOCK + tl.arange(0, BLOCK)
        mask = offset < numel
        grad = tl.load(grad_ptr + matrix * numel + offset, mask=mask).to(tl.float32)
        buffer = tl.load(momentum_ptr + matrix * numel + offset, mask=mask).to(tl.float32)
        buffer = _lerp(buffer, grad, 1 - momentum)
        tl.store(momentum_ptr + matrix * numel + offset, buffer.to(momentum_ptr.dtype.element_ty), mask=mask)
        update = buffer
        if NESTEROV:
            update = _lerp(grad, buffer, momentum)
        target = offset
        if IS_PADDED:
            target = (offset // num_cols) * X_row + offset % num_cols
        tl.store(X_ptr + matrix * X_matrix + target, (update / norm).to(X_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _update_kernel(
    master_ptr,
    X_ptr,
    numel,
    num_cols,
    X_matrix,
    X_row,
    keep,
    step,
    IS_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    COUNT: tl.constexpr,
):
    matrix = tl.program_id(1).to(tl.int64)
    for index in range(COUNT):
        offset = (tl.program_id(0).to(tl.int64) * COUNT + index) * BLOCK + tl.arange(0, BLOCK)
        mask = offset < numel
        source = offset
        if IS_PADDED:
            source = (offset // num_cols) * X_row + offset % num_cols
        update = tl.load(X_ptr + matrix * X_matrix + source, mask=mask).to(tl.float32)
        master = tl.load(master_ptr + matrix * numel + offset, mask=mask)
        tl.store(master_ptr + matrix * numel + offset, master * keep + update * step, mask=mask)


def squared_norms(grad: Tensor, buffer: Tensor, momentum: float, *, nesterov: bool) -> Tensor:
    """[B] squares of the Frobenius norms, float64, of what the update will be; nothing is changed."""
    num, numel = grad.shape[0], grad[0].numel()
    programs = _programs(numel)
    sums = torch.empty(num, programs, dtype=torch.float64, device=grad.device)
    _squares_kernel[(programs, num)](
        grad, buffer, sums, numel, momentum, NESTEROV=nesterov, BLOCK=_BLOCK, COUNT=_BLOCKS_EACH
    )
    return sums.sum(-1)


def advance(grad: Tensor, buffer: Tensor, norm: Tensor, X: Tensor, momentum: float, *, nesterov: bool) -> None:
    """Moves momentum `buffer` on, and puts the update over its norm [B] (float32) into the corner of `X`."""
    numel = grad[0].numel()
    _advance_kernel[(_programs(numel), len(grad))](
        grad,
        buffer,
        norm,
        X,
        numel,
        grad.shape[-1],
        X.stride(0),
        X.stride(1),
        momentum,
        NESTEROV=nesterov,
        IS_PADDED=X.shape[-1] != grad.shape[-1],
        BLOCK=_BLOCK,
        COUNT=_BLOCKS_EACH,
    )


def update_master(master: Tensor, X: Tensor, *, keep: float, step: float) -> None:
    """master <- keep master + step X."""
    numel = master[0].numel()
    _update_kernel[(_programs(numel), len(master))](
        master,
        X,
        numel,
        master.shape[-1],
        X.stride(0),
        X.stride(1),
        keep,
        step,
        IS_PADDED=X.shape[-1] != master.shape[-1],
        BLOCK=_BLOCK,
        COUNT=_BLOCKS_EACH,
    )


def _programs(numel: int) -> int:
    return -(-numel // (_BLOCK * _BLOCKS_EACH))
