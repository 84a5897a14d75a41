"""The two ways to run Newton-Schulz on a batch, in plain torch: on the matrix itself, and on its Gram matrix.

Shapes: X_BMN with M <= N, B matrices. Every product of two M x M factors is a product of polynomials of one symmetric
matrix: the factors commute and stay symmetric.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dmuon.newton_schulz.coefficients import Triple

# Rounding makes tiny negative eigenvalues in the Gram matrix, and they grow. Applying what was gathered so far and
# forming the Gram matrix anew before the third step keeps the error small (Zhang et al., "Gram Newton-Schulz", 2026).
GRAM_RESTARTS = frozenset({2})


def direct(X_BMN: Tensor, coefficients: Sequence[Triple]) -> Tensor:
    """X <- a X + (b A + c A^2) X with A = X X^T, step by step. Returns the shape and dtype of `X_BMN`."""
    for a, b, c in coefficients:
        A_BMM = X_BMN @ X_BMN.mT
        B_BMM = torch.baddbmm(A_BMM, A_BMM, A_BMM, beta=b, alpha=c)
        X_BMN = torch.baddbmm(X_BMN, B_BMM, X_BMN, beta=a)
    return X_BMN


def gram(X_BMN: Tensor, coefficients: Sequence[Triple]) -> Tensor:
    """The same polynomial through R = X X^T: only M x M products between restarts, then X <- Q X.

    Returns the shape and dtype of `X_BMN`.
    """
    for segment in segments(coefficients):
        X_BMN = gram_factor(X_BMN @ X_BMN.mT, segment) @ X_BMN
    return X_BMN


def segments(coefficients: Sequence[Triple]) -> list[Sequence[Triple]]:
    """The steps between restarts: a Gram matrix is formed before each segment, and its Q is applied after it."""
    starts = [0, *(step for step in sorted(GRAM_RESTARTS) if 0 < step < len(coefficients))]
    return [coefficients[start:stop] for start, stop in zip(starts, [*starts[1:], len(coefficients)], strict=True)]


def gram_factor(R_BMM: Tensor, segment: Sequence[Triple]) -> Tensor:
    """Q of the steps of one segment, from R = X X^T alone, such that they take X to Q X."""
    Q_BMM: Tensor | None = None
    for step, (a, b, c) in enumerate(segment):
        Z_BMM = torch.baddbmm(R_BMM, R_BMM, R_BMM, beta=b, alpha=c)
        if Q_BMM is None:
            Q_BMM = Z_BMM.clone()
            Q_BMM.diagonal(dim1=-2, dim2=-1).add_(a)
        else:
            Q_BMM = torch.baddbmm(Q_BMM, Q_BMM, Z_BMM, beta=a)
        if step != len(segment) - 1:
            Y_BMM = torch.baddbmm(R_BMM, R_BMM, Z_BMM, beta=a)
            R_BMM = torch.baddbmm(Y_BMM, Z_BMM, Y_BMM, beta=a)
    assert Q_BMM is not None
    return Q_BMM
