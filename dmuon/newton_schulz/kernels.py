"""Triton kernels for products that are symmetric: half the tiles are computed, the others are their mirror images.

One kernel serves the iteration. With A and B of B matrices each, it makes C = alpha A B^T + beta A + gamma I:

    X X^T           A = B = X [B, n, k]; X^T X where X is tall [B, k, n], read as it lies
    c R R + b R     and every other product of polynomials of one symmetric matrix: A B = A B^T is symmetric, [B, n, n]

Inputs and output have one half-precision dtype; each element is accumulated in float32 and rounded once. The order of
its sum depends on the tiles alone, so that equal tiles give equal bits. Tiles are moved by tensor descriptors: every
matrix must begin at, and every row must have, a multiple of 16 bytes. Rows and columns that no tile fills are masked.

Triton comes with torch's CUDA builds and not with its CPU builds: this module, and it alone with `passes`, needs it.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
from torch import Tensor

from dmuon.newton_schulz.tuned import Tiles

# By name: torch is this library's only dependency, and what imports this module has asked `has_triton` before.
triton: Any = importlib.import_module("triton")
tl: Any = importlib.import_module("triton.language")
TensorDescriptor: Any = importlib.import_module("triton.tools.tensor_descriptor").TensorDescriptor

# Elements of a row that fill the 16 bytes a tensor descriptor wants.
ALIGNMENT = 8


# Launches since the process began, for tests that prove which kernel ran.
launches = {"symmetric_product": 0}


@triton.jit
def _tile(
    a_desc,
    b_desc,
    addend_desc,
    out_desc,
    mirror_desc,
    batch,
    row,
    col,
    size,
    depth,
    alpha,
    beta,
    gamma,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TALL: tl.constexpr,
    ADDS: tl.constexpr,
):
    """Makes the tile at (row, col) and stores it there and, above the diagonal, at (col, row)."""
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, depth, BLOCK_K):
        if TALL:
            a = a_desc.load([batch, k, row]).reshape(BLOCK_K, BLOCK_M).T
            b = b_desc.load([batch, k, col]).reshape(BLOCK_K, BLOCK_N)
        else:
            a = a_desc.load([batch, row, k]).reshape(BLOCK_M, BLOCK_K)
            b = b_desc.load([batch, col, k]).reshape(BLOCK_N, BLOCK_K).T
        acc = tl.dot(a, b, acc)
    if ADDS:
        addend = addend_desc.load([batch, row, col]).reshape(BLOCK_M, BLOCK_N)
        acc = alpha * acc + beta * addend.to(tl.float32)
        is_diagonal = (row + tl.arange(0, BLOCK_M))[:, None] == (col + tl.arange(0, BLOCK_N))[None, :]
        acc = tl.where(is_diagonal, acc + gamma, acc)
    out = acc.to(out_desc.dtype)
    out_desc.store([batch, row, col], out.reshape(1, BLOCK_M, BLOCK_N))
    # Square blocks on the diagonal are computed whole. Their tiles have no mirror image to store: it goes past the end
    # of the matrix, where nothing is written, for that needs no branch.
    LARGER: tl.constexpr = BLOCK_M if BLOCK_M > BLOCK_N else BLOCK_N
    mirror_row = tl.where(row // LARGER == col // LARGER, size + LARGER, col)
    mirror_desc.store([batch, mirror_row, row], out.T.reshape(1, BLOCK_N, BLOCK_M))


# Integers are plain arguments: one compiled kernel serves every size.
@triton.jit(do_not_specialize=["num_tiles", "num_tiles_in_all", "size", "depth"])
def _symmetric_product(
    a_desc,
    b_desc,
    addend_desc,
    out_desc,
    mirror_desc,
    order_ptr,
    num_tiles,
    num_tiles_in_all,
    size,
    depth,
    alpha,
    beta,
    gamma,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TALL: tl.constexpr,
    ADDS: tl.constexpr,
    PERSISTENT: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr,
):
    """Tiles of all matrices, one after the other in the order of `order_ptr`: row index, and column index << 16."""
    if PERSISTENT:
        for index in tl.range(tl.program_id(0), num_tiles_in_all, NUM_PROGRAMS, flatten=True):
            place = tl.load(order_ptr + index % num_tiles)
            _tile(
                a_desc,
                b_desc,
                addend_desc,
                out_desc,
                mirror_desc,
                index // num_tiles,
                (place & 0xFFFF) * BLOCK_M,
                (place >> 16) * BLOCK_N,
                size,
                depth,
                alpha,
                beta,
                gamma,
                BLOCK_M,
                BLOCK_N,
                BLOCK_K,
                TALL,
                ADDS,
            )
    else:
        index = tl.program_id(0)
        place = tl.load(order_ptr + index % num_tiles)
        _tile(
            a_desc,
            b_desc,
            addend_desc,
            out_desc,
            mirror_desc,
            index // num_tiles,
            (place & 0xFFFF) * BLOCK_M,
            (place >> 16) * BLOCK_N,
            size,
            depth,
            alpha,
            beta,
            gamma,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
            TALL,
            ADDS,
        )


# Whether Triton runs kernels in its interpreter, on any device, as tests have it do.
INTERPRETED = type(_symmetric_product).__name__ == "InterpretedFunction"


def symmetric_product(
    A: Tensor,
    B: Tensor,
    out_Bnn: Tensor,
    tiles: Tiles,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    gamma: float = 0.0,
    tall: bool = False,
) -> Tensor:
    """alpha A B^T + beta A + gamma I, which the caller knows to be symmetric, into `out_Bnn`.

    Args:
        A, B: [B, n, k] of one dtype, float16 or bfloat16, contiguous, k a multiple of `ALIGNMENT`. With `tall` they are
            [B, k, n], the product is A^T B, and n must be the multiple.
        out_Bnn: contiguous, of their dtype; neither A nor B.
        beta, gamma: not zero only if n = k.

    Returns:
        `out_Bnn`. Off its diagonal blocks of max(block_m, block_n) it is symmetric to the last bit.
    """
    num_matrices, size, depth = A.shape if not tall else (A.shape[0], A.shape[2], A.shape[1])
    adds = not (alpha == 1.0 and beta == 0.0 and gamma == 0.0)
    assert A.shape == B.shape
    assert tuple(out_Bnn.shape) == (num_matrices, size, size)
    assert not adds or size == depth
    block_m, block_n, block_k = tiles.block_m, tiles.block_n, tiles.block_k
    order = tile_order(size, block_m, block_n, tiles.group, out_Bnn.device)
    num_tiles = len(order)
    num_programs = num_tiles * num_matrices
    if tiles.persistent:
        num_programs = min(num_programs, _num_processors(out_Bnn.device))
    launches["symmetric_product"] += 1
    _symmetric_product[(num_programs,)](
        TensorDescriptor.from_tensor(A, [1, block_k, block_m] if tall else [1, block_m, block_k]),
        TensorDescriptor.from_tensor(B, [1, block_k, block_n] if tall else [1, block_n, block_k]),
        TensorDescriptor.from_tensor(A, [1, block_m, block_n]) if adds else None,
        TensorDescriptor.from_tensor(out_Bnn, [1, block_m, block_n]),
        TensorDescriptor.from_tensor(out_Bnn, [1, block_n, block_m]),
        order,
        num_tiles,
        num_tiles * num_matrices,
        size,
        depth,
        float(alpha),
        float(beta),
        float(gamma),
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        TALL=tall,
        ADDS=adds,
        PERSISTENT=tiles.persistent,
        NUM_PROGRAMS=_num_processors(out_Bnn.device) if tiles.persistent else 1,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    return out_Bnn


@functools.cache
def tile_order(size: int, block_m: int, block_n: int, group: int, device: torch.device) -> Tensor:
    """Tiles on and above the diagonal, each as row index + column index << 16, int32.

    Columns are taken `group` at a time and walked through row by row, so that programs that run side by side share
    rows and columns of the operands in the cache.
    """
    larger = max(block_m, block_n)
    rows_each, cols_each = larger // block_m, larger // block_n
    num_blocks = -(-size // larger)
    num_rows, num_cols = -(-size // block_m), -(-size // block_n)
    places = []
    for first in range(0, num_blocks, group):
        last = min(first + group, num_blocks)
        for row in range(min(last * rows_each, num_rows)):
            # No column left of the diagonal block that this row is in.
            start = max(first, row // rows_each) * cols_each
            places += [row + (col << 16) for col in range(start, min(last * cols_each, num_cols))]
    return torch.tensor(places, dtype=torch.int32, device=device)


@functools.cache
def _num_processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; a few on CPU, where Triton interprets, so that programs take several tiles."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3
