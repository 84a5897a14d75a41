"""Triton kernels for products that are symmetric: half the tiles are computed, the others are their mirror images.

One kernel serves the iteration. From stacks of matrices A, B, D and E it makes

    C = alpha A B^T + beta D + gamma I + delta E

    X X^T           A = B = X [B, n, k]; X^T X where X is tall [B, k, n], read as it lies
    c R R + b R     and every other product of polynomials of one symmetric matrix: A B = A B^T is symmetric, [B, n, n]

C is symmetric to the last bit. With rounding errors that are not, the Gram form leaves its error bound: 0.2 in fp16,
where symmetric ones give 0.03.

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

# Launches since the process began, for tests that prove which kernel ran.
launches = {"symmetric_product": 0}
# Side of what one program of `_add_parts` adds.
_ADDED = 32
# Side of a corner; in larger tiles it was measured to make no difference.
_LARGEST_CORNER = 64


# Integers are plain arguments: one compiled kernel serves every size.
@triton.jit(
    do_not_specialize=[
        *("num_tiles", "num_tile_programs", "num_corners", "num_first_corners"),
        *("depth", "num_split", "num_parts", "part_depth"),
    ]
)
def _symmetric_product(
    a_desc,
    b_desc,
    d_desc,
    e_desc,
    out_desc,
    mirror_desc,
    square_desc,
    corner_desc,
    corner_d_desc,
    corner_e_desc,
    parts_ptr,
    order_ptr,
    num_tiles,
    num_tile_programs,
    num_corners,
    num_first_corners,
    depth,
    num_split,
    num_parts,
    part_depth,
    alpha,
    beta,
    gamma,
    delta,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TALL: tl.constexpr,
    ADDS: tl.constexpr,
    ADDS_E: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_CORNERS: tl.constexpr,
):
    """Makes one tile, and stores it at (row, col) and, mirrored, at (col, row); or one corner.

    Programs go through all matrices, one after the other, in the order of `order_ptr`: index of the row of tiles, and
    of the column << 16. If it `SPLITS`, each of the first `num_split` tiles has `num_parts` programs, which leave their
    sums of `part_depth` products at `parts_ptr`. If it `HAS_CORNERS`, `num_first_corners` come before the tiles, and
    the others of `num_corners` a matrix after them.
    """
    program = tl.program_id(0)
    factors = (alpha, beta, gamma, delta)
    if HAS_CORNERS:
        program -= num_first_corners
        if (program < 0) | (program >= num_tile_programs):
            SIDE: tl.constexpr = BLOCK_M if BLOCK_M < BLOCK_N else BLOCK_N
            corner = program + num_first_corners
            if program >= 0:
                corner -= num_tile_programs
            batch = corner // num_corners
            at = (corner % num_corners * 2 + (1 if BLOCK_M < BLOCK_N else 0)) * SIDE
            if BLOCK_M < BLOCK_N:
                acc = _multiply(a_desc, corner_desc, batch, at, at, 0, depth, SIDE, SIDE, BLOCK_K, TALL)
            else:
                acc = _multiply(corner_desc, b_desc, batch, at, at, 0, depth, SIDE, SIDE, BLOCK_K, TALL)
            acc = _add(acc, factors, corner_d_desc, corner_e_desc, batch, at, at, ADDS, ADDS_E)
            _store_square(square_desc, acc.to(square_desc.dtype), batch, at)
            return
    tile, begin, end = program, 0, depth
    if SPLITS:
        is_part = program < num_split * num_parts
        tile = tl.where(is_part, program // num_parts, program - num_split * (num_parts - 1))
        begin = tl.where(is_part, program % num_parts * part_depth, 0)
        end = tl.where(is_part, tl.minimum(begin + part_depth, depth), depth)
    batch = tile // num_tiles
    place = tl.load(order_ptr + tile % num_tiles)
    row = (place & 0xFFFF) * BLOCK_M
    col = (place >> 16) * BLOCK_N
    acc = _multiply(a_desc, b_desc, batch, row, col, begin, end, BLOCK_M, BLOCK_N, BLOCK_K, TALL)
    if SPLITS:  # noqa: SIM102 - this one is the compiler's
        if is_part:
            within = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
            tl.store(parts_ptr + program * BLOCK_M * BLOCK_N + within, acc)
            return
    acc = _add(acc, factors, d_desc, e_desc, batch, row, col, ADDS, ADDS_E)
    out = acc.to(out_desc.dtype)
    LARGER: tl.constexpr = BLOCK_M if BLOCK_M > BLOCK_N else BLOCK_N
    if row // LARGER == col // LARGER:
        _store_on_diagonal(square_desc, out, batch, row, col)
    else:
        out_desc.store([batch, row, col], out.reshape(1, BLOCK_M, BLOCK_N))
        mirror_desc.store([batch, col, row], out.T.reshape(1, BLOCK_N, BLOCK_M))


@triton.jit
def _multiply(
    a_desc,
    b_desc,
    batch,
    row,
    col,
    begin,
    end,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TALL: tl.constexpr,
):
    # Otherwise a path past the loop defines `acc` too, and ptxas has eight warps wait for the end of every product.
    tl.assume(begin < end)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(begin, end, BLOCK_K):
        if TALL:
            a = a_desc.load([batch, k, row]).reshape(BLOCK_K, BLOCK_M).T
            b = b_desc.load([batch, k, col]).reshape(BLOCK_K, BLOCK_N)
        else:
            a = a_desc.load([batch, row, k]).reshape(BLOCK_M, BLOCK_K)
            b = b_desc.load([batch, col, k]).reshape(BLOCK_N, BLOCK_K).T
        acc = tl.dot(a, b, acc)
    return acc


@triton.jit
def _add(acc, factors, d_desc, e_desc, batch, row, col, ADDS: tl.constexpr, ADDS_E: tl.constexpr):
    BLOCK_M: tl.constexpr = acc.shape[0]
    BLOCK_N: tl.constexpr = acc.shape[1]
    alpha, beta, gamma, delta = factors
    if ADDS:
        d = d_desc.load([batch, row, col]).reshape(BLOCK_M, BLOCK_N)
        acc = alpha * acc + beta * d.to(tl.float32)
        if ADDS_E:
            acc += delta * e_desc.load([batch, row, col]).reshape(BLOCK_M, BLOCK_N).to(tl.float32)
        rows = (row + tl.arange(0, BLOCK_M))[:, None]
        cols = (col + tl.arange(0, BLOCK_N))[None, :]
        acc = tl.where(rows == cols, acc + gamma, acc)
    return acc


@triton.jit
def _store_on_diagonal(square_desc, tile, batch, row, col):
    """Stores a tile of a square block on the diagonal.

    A tile that is twice as wide as high, or as high as wide, is two squares. One is on the diagonal; the other is above
    it and stored twice, or below it and not stored.
    """
    BLOCK_M: tl.constexpr = tile.shape[0]
    BLOCK_N: tl.constexpr = tile.shape[1]
    SIDE: tl.constexpr = BLOCK_M if BLOCK_M < BLOCK_N else BLOCK_N
    if BLOCK_M == BLOCK_N:
        _store_square(square_desc, tile, batch, row)
    elif BLOCK_M < BLOCK_N:
        left, right = tile.reshape(SIDE, 2, SIDE).permute(0, 2, 1).split()
        _store_square(square_desc, tl.where(row == col, left, right), batch, row)
        if row == col:
            _store_both(square_desc, right, batch, row, col + SIDE)
    else:
        upper, lower = tile.reshape(2, SIDE, SIDE).permute(1, 2, 0).split()
        _store_square(square_desc, tl.where(row == col, upper, lower), batch, col)
        if row != col:
            _store_both(square_desc, upper, batch, row, col)


@triton.jit
def _store_square(square_desc, square, batch, start):
    """Stores a square on the diagonal: what it has above the diagonal twice, and nothing of what it has below."""
    SIDE: tl.constexpr = square.shape[0]
    at = tl.arange(0, SIDE)
    square = tl.where(at[:, None] <= at[None, :], square, square.T)
    square_desc.store([batch, start, start], square.reshape(1, SIDE, SIDE))


@triton.jit
def _store_both(square_desc, square, batch, row, col):
    SIDE: tl.constexpr = square.shape[0]
    square_desc.store([batch, row, col], square.reshape(1, SIDE, SIDE))
    square_desc.store([batch, col, row], square.T.reshape(1, SIDE, SIDE))


@triton.jit
def _store_upper(matrix_ptr, tile, rows, cols, size):
    """Stores what lies on and above the diagonal twice; what lies below is mirrored from another tile."""
    is_upper = (rows < cols) & (cols < size)
    tl.store(matrix_ptr + rows * size + cols, tile, mask=is_upper | ((rows == cols) & (cols < size)))
    tl.store(matrix_ptr + cols.T * size + rows.T, tile.T, mask=is_upper.T)


@triton.jit(do_not_specialize=["num_tiles", "size"])
def _add_parts(
    parts_ptr,
    d_ptr,
    e_ptr,
    out_ptr,
    order_ptr,
    num_tiles,
    size,
    alpha,
    beta,
    gamma,
    delta,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ADDED: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    ADDS: tl.constexpr,
    ADDS_E: tl.constexpr,
):
    """Adds up an `ADDED` x `ADDED` piece of a tile that was split, adds to it, and stores it twice."""
    pieces_across: tl.constexpr = BLOCK_N // ADDED
    pieces: tl.constexpr = (BLOCK_M // ADDED) * pieces_across
    tile, piece = tl.program_id(0) // pieces, tl.program_id(0) % pieces
    rows = (piece // pieces_across * ADDED + tl.arange(0, ADDED))[:, None]
    cols = (piece % pieces_across * ADDED + tl.arange(0, ADDED))[None, :]
    acc = tl.zeros((ADDED, ADDED), dtype=tl.float32)
    for part in tl.static_range(NUM_PARTS):  # unrolled, for all loads to be under way at once
        acc += tl.load(parts_ptr + (tile * NUM_PARTS + part) * BLOCK_M * BLOCK_N + rows * BLOCK_N + cols)
    place = tl.load(order_ptr + tile % num_tiles)
    rows += (place & 0xFFFF) * BLOCK_M
    cols += (place >> 16) * BLOCK_N
    start = (tile // num_tiles).to(tl.int64) * size * size
    if ADDS:
        at, is_inside = start + rows * size + cols, (rows < size) & (cols < size)
        acc = alpha * acc + beta * tl.load(d_ptr + at, mask=is_inside).to(tl.float32)
        if ADDS_E:
            acc += delta * tl.load(e_ptr + at, mask=is_inside).to(tl.float32)
        acc = tl.where(rows == cols, acc + gamma, acc)
    _store_upper(out_ptr + start, acc.to(out_ptr.dtype.element_ty), rows, cols, size)


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
    D: Tensor | None = None,
    gamma: float = 0.0,
    delta: float = 0.0,
    E: Tensor | None = None,
    tall: bool = False,
    num_processors: int | None = None,
) -> Tensor:
    """alpha A B^T + beta D + gamma I + delta E, which the caller knows to be symmetric, into `out_Bnn`.

    Args:
        A, B: [B, n, k] of one dtype, float16 or bfloat16, contiguous, k a multiple of 8. With `tall` they are
            [B, k, n], the product is A^T B, and n must be the multiple.
        out_Bnn: contiguous, of their dtype; none of the others.
        D, E: symmetric, as `out_Bnn`; None for A, and for nothing. Like factors other than 1 they need n = k.
        num_processors: tiles that run at a time, if not as many as the device has multiprocessors.

    Returns:
        `out_Bnn`, symmetric to the last bit: the half above the diagonal counts, whatever A and B leave below it.
    """
    num_matrices, size, depth = A.shape if not tall else (A.shape[0], A.shape[2], A.shape[1])
    adds = not (alpha == 1.0 and beta == 0.0 and gamma == 0.0 and E is None)
    assert A.shape == B.shape
    assert tuple(out_Bnn.shape) == (num_matrices, size, size)
    assert not adds or size == depth
    block_m, block_n, block_k = tiles.block_m, tiles.block_n, tiles.block_k
    side = min(block_m, block_n)
    assert max(block_m, block_n) <= 2 * side
    order = tile_order(size, tiles, out_Bnn.device)
    num_tiles, num_split, num_parts = len(order) * num_matrices, 0, 1
    if tiles.parts > 1:
        num_split, num_parts = split(num_tiles, tiles.parts, num_processors or _multiprocessors(out_Bnn.device))
    part_depth = -(-depth // (num_parts * block_k)) * block_k
    num_parts = -(-depth // part_depth)  # none of them empty
    num_tile_programs = num_tiles + num_split * (num_parts - 1)
    factors = [float(factor) for factor in (alpha, beta, gamma, delta)]
    options = {"BLOCK_M": block_m, "BLOCK_N": block_n, "ADDS": adds, "ADDS_E": E is not None}
    parts = out_Bnn.new_empty((num_split * num_parts, block_m, block_n), dtype=torch.float32) if num_split else None
    added = (A if D is None else D) if adds else None
    num_corners = corners(size, tiles)
    launches["symmetric_product"] += 1
    _symmetric_product[(num_tile_programs + num_corners * num_matrices,)](
        _tiled(A, block_k, block_m) if tall else _tiled(A, block_m, block_k),
        _tiled(B, block_k, block_n) if tall else _tiled(B, block_n, block_k),
        _tiled(added, block_m, block_n),
        _tiled(E, block_m, block_n),
        _tiled(out_Bnn, block_m, block_n),
        _tiled(out_Bnn, block_n, block_m),
        _tiled(out_Bnn, side, side),
        *_corner_operands(A if block_m > block_n else B, added, E, side, block_k, tall) if num_corners else (None,) * 3,
        parts,
        order,
        len(order),
        num_tile_programs,
        num_corners,
        # Where multiprocessors are not given equally many programs, those that are given one more had a corner first,
        # and have one last.
        num_corners * num_matrices // 2,
        depth,
        num_split,
        num_parts,
        part_depth,
        *factors,
        **options,
        BLOCK_K=block_k,
        TALL=tall,
        SPLITS=parts is not None,
        HAS_CORNERS=num_corners > 0,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    if parts is not None:
        _add_parts[(num_split * (block_m // _ADDED) * (block_n // _ADDED),)](
            parts,
            added,
            E,
            out_Bnn,
            order,
            len(order),
            size,
            *factors,
            **options,
            ADDED=_ADDED,
            NUM_PARTS=num_parts,
        )
    return out_Bnn


def split(num_tiles: int, most: int, num_processors: int) -> tuple[int, int]:
    """How many tiles to split, and in how many parts: all beyond full rounds of the processors, and no more parts than
    those."""
    left = num_tiles % num_processors
    num_parts = min(most, num_processors // left) if left else 1
    return (left, num_parts) if num_parts > 1 else (0, 1)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _tiled(matrices: Tensor | None, rows: int, cols: int) -> Any:
    return None if matrices is None else TensorDescriptor.from_tensor(matrices, [1, rows, cols])


def _corner_operands(operand: Tensor, D: Tensor | None, E: Tensor | None, side: int, block_k: int, tall: bool) -> Any:
    """What corners load in other pieces than tiles do: the `operand` on the longer side of a tile, D and E."""
    return (
        _tiled(operand, block_k, side) if tall else _tiled(operand, side, block_k),
        _tiled(D, side, side),
        _tiled(E, side, side),
    )


def corners(size: int, tiles: Tiles) -> int:
    """How many tiles of a result are corners: half of each lies below the diagonal, and only the other half is made."""
    side = min(tiles.block_m, tiles.block_n)
    if tiles.block_m == tiles.block_n or side > _LARGEST_CORNER:
        return 0
    # In a wide tile, the second of the two squares on the diagonal; in a high one, the first.
    return (-(-size // side) + (tiles.block_m > tiles.block_n)) // 2


@functools.cache
def tile_order(size: int, tiles: Tiles, device: torch.device) -> Tensor:
    """Tiles on and above the diagonal but for corners, each as row index + column index << 16, int32.

    Columns are taken `group` at a time and walked through row by row, so that programs that run side by side share
    rows and columns of the operands in the cache.
    """
    block_m, block_n, group = tiles.block_m, tiles.block_n, tiles.group
    larger = max(block_m, block_n)
    rows_each, cols_each = larger // block_m, larger // block_n
    num_blocks = -(-size // larger)
    num_rows, num_cols = -(-size // block_m), -(-size // block_n)
    num_corners = corners(size, tiles)
    places = []
    for first in range(0, num_blocks, group):
        last = min(first + group, num_blocks)
        for row in range(min(last * rows_each, num_rows)):
            # No column left of the diagonal block that this row is in, nor its corner.
            start = row // rows_each * cols_each
            if num_corners and (block_m > block_n or row % 2):
                start += 1
            cols = range(max(start, first * cols_each), min(last * cols_each, num_cols))
            places += [row + (col << 16) for col in cols]
    return torch.tensor(places, dtype=torch.int32, device=device)
