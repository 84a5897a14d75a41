"""The two ways to run Newton-Schulz with symmetric products, as `iterations` has them with general ones.

Shapes: X of B matrices, n x k ("wide") or k x n ("tall") with n <= k, contiguous, in half precision. A tall matrix is
multiplied from the right and never transposed. A, R, Z, Q, Y: [B, n, n], polynomials of one symmetric matrix.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from dmuon.newton_schulz.coefficients import Triple
from dmuon.newton_schulz.iterations import segments
from dmuon.newton_schulz.kernels import symmetric_product
from dmuon.newton_schulz.planning import BatchPlan
from dmuon.newton_schulz.tuned import Tiles


def run(plan: BatchPlan, X: Tensor, coefficients: Sequence[Triple], *, may_overwrite: bool = False) -> Tensor:
    """Iterates as planned.

    Args:
        X: the plan's padded shape and dtype.
        may_overwrite: whether `X` may serve as workspace.

    Returns:
        The shape of `X`, and its memory only if that may be overwritten.
    """
    assert tuple(X.shape) == plan.padded
    assert X.is_contiguous()
    assert plan.gram_tiles is not None
    assert plan.square_tiles is not None
    buffers = _PingPong(X, may_overwrite)
    work = _gram if plan.form == "gram" else _direct
    with full_accumulation():
        return work(buffers, coefficients, plan.gram_tiles, plan.square_tiles)


class _PingPong:
    """X and the buffer that the next X goes to: the one before last, once that is ours."""

    def __init__(self, X: Tensor, may_overwrite: bool) -> None:
        self.X, self._is_ours = X, may_overwrite
        self._tall = X.shape[1] > X.shape[2]
        self._spare: Tensor | None = None

    def gram(self, tiles: Tiles) -> Tensor:
        """X X^T of wide matrices, X^T X of tall ones."""
        size = min(self.X.shape[1:])
        out = self.X.new_empty(len(self.X), size, size)
        return symmetric_product(self.X, self.X, out, tiles, tall=self._tall)

    def apply(self, Q: Tensor) -> None:
        """X <- Q X, or X Q of tall matrices."""
        out = torch.empty_like(self.X) if self._spare is None else self._spare
        torch.bmm(*((self.X, Q) if self._tall else (Q, self.X)), out=out)
        self._spare = self.X if self._is_ours else None
        self.X, self._is_ours = out, True


def _direct(buffers: _PingPong, coefficients: Sequence[Triple], gram: Tiles, square: Tiles) -> Tensor:
    for a, b, c in coefficients:
        A = buffers.gram(gram)
        # a I within the factor: X needs no second term then, at the price of one rounding more of the diagonal.
        buffers.apply(symmetric_product(A, A, torch.empty_like(A), square, alpha=c, beta=b, gamma=a))
    return buffers.X


def _gram(buffers: _PingPong, coefficients: Sequence[Triple], gram: Tiles, square: Tiles) -> Tensor:
    for segment in segments(coefficients):
        buffers.apply(gram_factor(buffers.gram(gram), segment, square))
    return buffers.X


def gram_factor(R: Tensor, segment: Sequence[Triple], tiles: Tiles) -> Tensor:
    """`iterations.gram_factor` with symmetric products. Overwrites `R`.

    Unlike in `_direct`, a I must stay out of the factors that R is multiplied by, and R must be multiplied from both
    sides, (Z + a I) R (Z + a I): otherwise fp16 leaves its error bound where spectra decay to 1e-3 (5e-2 for 3.5e-2).
    """
    Q, Z, spare = (torch.empty_like(R) for _ in range(3))
    missing = 0.0  # of the identity in Q, until a product adds it
    for step, (a, b, c) in enumerate(segment):
        factor = symmetric_product(R, R, Z if step else Q, tiles, alpha=c, beta=b)
        if step == 0:
            missing = a
        else:
            # Q (Z + a I), and where the identity is missing in Q, (Q + a' I) (Z + a I).
            lacking: dict[str, Any] = {"gamma": a * missing, "delta": missing, "E": Z} if missing else {}
            Q, spare, missing = symmetric_product(Q, Z, spare, tiles, beta=a, **lacking), Q, 0.0
        if step != len(segment) - 1:
            Y = symmetric_product(R, factor, spare, tiles, beta=a)
            # R is not needed any more.
            symmetric_product(factor, Y, R, tiles, beta=a, D=Y)
    if missing:
        Q.diagonal(dim1=-2, dim2=-1).add_(missing)
    return Q


@contextlib.contextmanager
def full_accumulation() -> Iterator[None]:
    """cuBLAS sums in float32 to the end: by default torch lets it round partial sums of half-precision products."""
    flags = torch.backends.cuda.matmul
    before = flags.allow_fp16_reduced_precision_reduction, flags.allow_bf16_reduced_precision_reduction
    flags.allow_fp16_reduced_precision_reduction = flags.allow_bf16_reduced_precision_reduction = False
    try:
        yield
    finally:
        flags.allow_fp16_reduced_precision_reduction, flags.allow_bf16_reduced_precision_reduction = before
