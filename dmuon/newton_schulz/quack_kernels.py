"""Symmetric products by quack-kernels (Dao-AILab), written in CuTe DSL: the extra "quack".

Its kernel makes alpha A B^T + beta D. What `kernels.symmetric_product` adds besides is added after rounding.
"""

from __future__ import annotations

import importlib
from typing import Any

from torch import Tensor

# By name: torch is this library's only dependency.
_gemm_symmetric: Any = importlib.import_module("quack.gemm_interface").gemm_symmetric

# Side of the squares that quack cuts a result into; on GPUs where they are smaller, more than needs it is mirrored.
_TILE = 256


def symmetric_product(
    A: Tensor,
    B: Tensor,
    out_Bnn: Tensor,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    D: Tensor | None = None,
    gamma: float = 0.0,
    delta: float = 0.0,
    E: Tensor | None = None,
    tall: bool = False,
) -> Tensor:
    """`kernels.symmetric_product` on a GPU, tiles left to quack; with `gamma` or `E` elements are rounded again."""
    left, right = (A.mT, B) if tall else (A, B.mT)
    added: dict[str, Any] = {"C": A if D is None else D, "beta": float(beta)} if beta else {}
    _gemm_symmetric(left, right, out=out_Bnn, alpha=float(alpha), **added)
    _mirror_diagonal_tiles(out_Bnn)
    if E is not None:
        out_Bnn.add_(E, alpha=delta)
    if gamma:
        out_Bnn.diagonal(dim1=-2, dim2=-1).add_(gamma)
    return out_Bnn


def _mirror_diagonal_tiles(out_Bnn: Tensor) -> None:
    """quack mirrors what lies off the diagonal; within a tile on it, rounding errors differ."""
    size = out_Bnn.shape[1]
    whole = size // _TILE * _TILE
    parts = [out_Bnn[:, whole:, whole:]] if whole < size else []
    if whole:
        tiles = out_Bnn[:, :whole, :whole].unflatten(2, (-1, _TILE)).unflatten(1, (-1, _TILE))
        parts.append(tiles.diagonal(dim1=1, dim2=3).movedim(-1, 1))
    for part in parts:
        part.copy_(part.triu() + part.triu(1).mT)
