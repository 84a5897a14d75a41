"""Triton kernels around the iteration: momentum, look-ahead, normalisation and the update of masters and their
compute copies, each tensor read as few times as the norm of the whole matrix allows.

Shapes: a stack of B matrices M x N, contiguous: master, gradient, momentum. X [B, M', N'] with M' >= M and N' >= N is
the part of a batch's half-precision buffer that belongs to it. All arithmetic is float32; squares are summed in
float64, where those of 1e-20 and 1e20 neither vanish nor overflow, in an order that depends on the shape alone.

Between products that draw all the power there is the clock is low, and instructions count as much as bytes.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dmuon.newton_schulz.kernels import triton

tl: Any = triton.language

# Elements and warps of a program.
_BLOCK, _NUM_WARPS = 2048, 4


@triton.jit
def _load(ptr, offset, numel, EVEN: tl.constexpr):
    """float32; zero past the end."""
    if EVEN:
        return tl.load(ptr + offset).to(tl.float32)
    else:
        return tl.load(ptr + offset, mask=offset < numel, other=0.0).to(tl.float32)


@triton.jit
def _store(ptr, offset, value, target, numel, EVEN: tl.constexpr):
    if EVEN:
        tl.store(ptr + target, value.to(ptr.dtype.element_ty))
    else:
        tl.store(ptr + target, value.to(ptr.dtype.element_ty), mask=offset < numel)


@triton.jit
def _advanced(grad, buffer, momentum, IS_LONG: tl.constexpr):
    """torch.lerp(buffer, grad, 1 - momentum), which goes from the nearer end."""
    if IS_LONG:
        return buffer + (1 - momentum) * (grad - buffer)
    else:
        return grad - (grad - buffer) * momentum


@triton.jit
def _looked_ahead(grad, buffer, momentum, IS_LONG: tl.constexpr):
    """torch.lerp(grad, buffer, momentum)."""
    if IS_LONG:
        return buffer - (buffer - grad) * (1 - momentum)
    else:
        return grad + momentum * (buffer - grad)


@triton.jit
def _is_sound(found_inf_ptr, GUARDED: tl.constexpr):
    """Whether masters and momentum may change: read on the device, for the host does not wait for it."""
    if GUARDED:
        return tl.load(found_inf_ptr) == 0
    else:
        return True


@triton.jit
def _place(offset, num_cols, row_stride, IS_PADDED: tl.constexpr):
    """Where an element of a matrix lies in X."""
    if IS_PADDED:
        return (offset // num_cols) * row_stride + offset % num_cols
    else:
        return offset


@triton.jit
def _squares_kernel(
    grad_ptr,
    momentum_ptr,
    sums_ptr,
    numel,
    momentum,
    NESTEROV: tl.constexpr,
    IS_LONG: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    matrix = tl.program_id(1).to(tl.int64)
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    grad = _load(grad_ptr + matrix * numel, offset, numel, EVEN)
    buffer = _load(momentum_ptr + matrix * numel, offset, numel, EVEN)
    update = _advanced(grad, buffer, momentum, IS_LONG)
    if NESTEROV:
        update = _looked_ahead(grad, update, momentum, IS_LONG)
    update = update.to(tl.float64)
    tl.store(sums_ptr + matrix * tl.num_programs(0) + tl.program_id(0), tl.sum(update * update, axis=0))


@triton.jit
def _advance_kernel(
    grad_ptr,
    momentum_ptr,
    inverse_norm_ptr,
    X_ptr,
    numel,
    num_cols,
    X_matrix,
    X_row,
    momentum,
    found_inf_ptr,
    NESTEROV: tl.constexpr,
    IS_LONG: tl.constexpr,
    IS_PADDED: tl.constexpr,
    GUARDED: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    matrix = tl.program_id(1).to(tl.int64)
    inverse_norm = tl.load(inverse_norm_ptr + matrix)
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    grad = _load(grad_ptr + matrix * numel, offset, numel, EVEN)
    buffer = _load(momentum_ptr + matrix * numel, offset, numel, EVEN)
    buffer = _advanced(grad, buffer, momentum, IS_LONG)
    if _is_sound(found_inf_ptr, GUARDED):
        _store(momentum_ptr + matrix * numel, offset, buffer, offset, numel, EVEN)
    update = buffer
    if NESTEROV:
        update = _looked_ahead(grad, buffer, momentum, IS_LONG)
    target = _place(offset, num_cols, X_row, IS_PADDED)
    _store(X_ptr + matrix * X_matrix, offset, update * inverse_norm, target, numel, EVEN)


@triton.jit
def _update_kernel(
    master_ptr,
    X_ptr,
    compute_ptr,
    numel,
    num_cols,
    X_matrix,
    X_row,
    keep,
    step,
    found_inf_ptr,
    IS_PADDED: tl.constexpr,
    COPIES: tl.constexpr,
    GUARDED: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    matrix = tl.program_id(1).to(tl.int64)
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    source = _place(offset, num_cols, X_row, IS_PADDED)
    if EVEN:
        update = tl.load(X_ptr + matrix * X_matrix + source).to(tl.float32)
    else:
        update = tl.load(X_ptr + matrix * X_matrix + source, mask=offset < numel, other=0.0).to(tl.float32)
    master = _load(master_ptr + matrix * numel, offset, numel, EVEN)
    master = master * keep + update * step
    if _is_sound(found_inf_ptr, GUARDED):
        _store(master_ptr + matrix * numel, offset, master, offset, numel, EVEN)
        if COPIES:
            _store(compute_ptr + matrix * numel, offset, master, offset, numel, EVEN)


def squared_norms(grads: Sequence[Tensor], buffers: Sequence[Tensor], momentum: float, *, nesterov: bool) -> Tensor:
    """Squares of the Frobenius norms, float64, of what the updates of these stacks will be; nothing is changed."""
    numel = grads[0][0].numel()
    sizes = [len(grad) for grad in grads]
    sums = torch.empty(sum(sizes), _programs(numel), dtype=torch.float64, device=grads[0].device)
    for grad, buffer, part in zip(grads, buffers, sums.split(sizes), strict=True):
        _squares_kernel[(_programs(numel), len(grad))](
            grad, buffer, part, numel, momentum, NESTEROV=nesterov, IS_LONG=momentum > 0.5, **_launch(numel)
        )
    return sums.sum(-1)


def advance(
    grad: Tensor,
    buffer: Tensor,
    inverse_norm: Tensor,
    X: Tensor,
    momentum: float,
    *,
    nesterov: bool,
    found_inf: Tensor | None = None,
) -> None:
    """Moves momentum `buffer` on, and puts the update times `inverse_norm` [B] (float32) into the corner of `X`.

    `found_inf`: float32, one element; if it is not zero, momentum stays.
    """
    numel = grad[0].numel()
    _advance_kernel[(_programs(numel), len(grad))](
        grad,
        buffer,
        inverse_norm,
        X,
        numel,
        grad.shape[-1],
        X.stride(0),
        X.stride(1),
        momentum,
        inverse_norm if found_inf is None else found_inf,
        GUARDED=found_inf is not None,
        NESTEROV=nesterov,
        IS_LONG=momentum > 0.5,
        IS_PADDED=X.shape[-1] != grad.shape[-1],
        **_launch(numel),
    )


def update_master(
    master: Tensor,
    X: Tensor,
    compute: Tensor | None = None,
    *,
    keep: float,
    step: float,
    found_inf: Tensor | None = None,
) -> None:
    """master <- keep master + step X, and `compute`, if given, the same in its own dtype. `found_inf`: as above."""
    numel = master[0].numel()
    _update_kernel[(_programs(numel), len(master))](
        master,
        X,
        master if compute is None else compute,
        numel,
        master.shape[-1],
        X.stride(0),
        X.stride(1),
        keep,
        step,
        master if found_inf is None else found_inf,
        GUARDED=found_inf is not None,
        IS_PADDED=X.shape[-1] != master.shape[-1],
        COPIES=compute is not None,
        **_launch(numel),
    )


def _programs(numel: int) -> int:
    assert numel < 2**31 - _BLOCK, "one matrix has more elements than 32-bit offsets reach"
    return -(-numel // _BLOCK)


def _launch(numel: int) -> dict[str, Any]:
    return {"EVEN": numel % _BLOCK == 0, "BLOCK": _BLOCK, "num_warps": _NUM_WARPS}
