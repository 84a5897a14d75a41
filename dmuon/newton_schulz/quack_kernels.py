"""Symmetric products by quack-kernels (Dao-AILab), written in CuTe DSL: the extra "quack".

Its kernel makes alpha A B^T + beta D. What `kernels.symmetric_product` adds besides is added after rounding.
"""

from __future__ import annotations

import importlib
from typing import Any

from torch import Tensor

# By name: torch is this library's only dependency.
_gemm_symmetric: Any = importlib.import_module("quack.gemm_interface").gemm_symmetric


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
    if E is not None:
        out_Bnn.add_(E, alpha=delta)
    if gamma:
        out_Bnn.diagonal(dim1=-2, dim2=-1).add_(gamma)
    return out_Bnn
