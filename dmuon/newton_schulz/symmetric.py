"""The two ways to run Newton-Schulz with symmetric products, as `iterations` has them with general ones.

Shapes: X of B matrices, n x k ("wide") or k x n ("tall") with n <= k, contiguous, in half precision. A tall matrix is
multiplied from the right and never transposed. A, R, Z, Q, Y: [B, n, n], polynomials of one symmetric matrix.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dmuon.newton_schulz.coefficients import Triple
from dmuon.newton_schulz.iterations import segments
from dmuon.newton_schulz.planning import BatchPlan

Product = Callable[..., Tensor]
"""`kernels.symmetric_product`, or what has its meaning, less the tiles."""


class Products(NamedTuple):
    """Of one plan: X X^T, and those of n x n matrices."""

    gram: Product
    square: Product


def products(plan: BatchPlan) -> Products:
    if plan.kernel == "quack":
        from dmuon.newton_schulz import quack_kernels

        return Products(quack_kernels.symmetric_product, quack_kernels.symmetric_product)
    from dmuon.newton_schulz.kernels import symmetric_product

    assert plan.gram_tiles is not None
    assert plan.square_tiles is not None
    return Products(
        partial(symmetric_product, tiles=plan.gram_tiles), partial(symmetric_product, tiles=plan.square_tiles)
    )


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
    buffers = _PingPong(X, may_overwrite)
    work = _gram if plan.form == "gram" else _direct
    with full_accumulation():
        return work(buffers, coefficients, products(plan))


class _PingPong:
    """X and the buffer that the next X goes to: the one before last, once that is ours."""

    def __init__(self, X: Tensor, may_overwrite: bool) -> None:
        self.X, self._is_ours = X, may_overwrite
        self._tall = X.shape[1] > X.shape[2]
        self._spare: Tensor | None = None

    def gram(self, product: Product) -> Tensor:
        """X X^T of wide matrices, X^T X of tall ones."""
        size = min(self.X.shape[1:])
        out = self.X.new_empty(len(self.X), size, size)
        return product(self.X, self.X, out, tall=self._tall)

    def apply(self, Q: Tensor) -> None:
        """X <- Q X, or X Q of tall matrices."""
        out = torch.empty_like(self.X) if self._spare is None else self._spare
        torch.bmm(*((self.X, Q) if self._tall else (Q, self.X)), out=out)
        self._spare = self.X if self._is_ours else None
        self.X, self._is_ours = out, True


def _direct(buffers: _PingPong, coefficients: Sequence[Triple], by: Products) -> Tensor:
    for a, b, c in coefficients:
        A = buffers.gram(by.gram)
        # a I within the factor: X needs no second term then, at the price of one rounding more of the diagonal.
        buffers.apply(by.square(A, A, torch.empty_like(A), alpha=c, beta=b, gamma=a))
    return buffers.X


def _gram(buffers: _PingPong, coefficients: Sequence[Triple], by: Products) -> Tensor:
    for segment in segments(coefficients):
        buffers.apply(gram_factor(buffers.gram(by.gram), segment, by.square))
    return buffers.X


def gram_factor(R: Tensor, segment: Sequence[Triple], product: Product) -> Tensor:
    """`iterations.gram_factor` with symmetric products. Overwrites `R`.

    Unlike in `_direct`, a I must stay out of the factors that R is multiplied by, and R must be multiplied from both
    sides, (Z + a I) R (Z + a I): otherwise fp16 leaves its error bound where spectra decay to 1e-3 (5e-2 for 3.5e-2).
    """
    Q, Z, spare = (torch.empty_like(R) for _ in range(3))
    missing = 0.0  # of the identity in Q, until a product adds it
    for step, (a, b, c) in enumerate(segment):
        factor = product(R, R, Z if step else Q, alpha=c, beta=b)
        if step == 0:
            missing = a
        else:
            # Q (Z + a I), and where the identity is missing in Q, (Q + a' I) (Z + a I).
            lacking: dict[str, Any] = {"gamma": a * missing, "delta": missing, "E": Z} if missing else {}
            Q, spare, missing = product(Q, Z, spare, beta=a, **lacking), Q, 0.0
        if step != len(segment) - 1:
            Y = product(R, factor, spare, beta=a)
            # R is not needed any more.
            product(factor, Y, R, beta=a, D=Y)
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
