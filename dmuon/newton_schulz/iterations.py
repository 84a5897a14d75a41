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
    last = len(coefficients) - 1
    R_BMM = X_BMN @ X_BMN.mT
    Q_BMM: Tensor | None = None
    for step, (a, b, c) in enumerate(coefficients):
        if step in GRAM_RESTARTS and Q_BMM is not None:
            X_BMN = Q_BMM @ X_BMN
            R_BMM = X_BMN @ X_BMN.mT
            Q_BMM = None
        Z_BMM = torch.baddbmm(R_BMM, R_BMM, R_BMM, beta=b, alpha=c)
        if Q_BMM is None:
            Q_BMM = Z_BMM.clone()
            Q_BMM.diagonal(dim1=-2, dim2=-1).add_(a)
        else:
            Q_BMM = torch.baddbmm(Q_BMM, Q_BMM, Z_BMM, beta=a)
        if step != last and step + 1 not in GRAM_RESTARTS:
            Y_BMM = torch.baddbmm(R_BMM, R_BMM, Z_BMM, beta=a)
            R_BMM = torch.baddbmm(Y_BMM, Z_BMM, Y_BMM, beta=a)
    assert Q_BMM is not None
    return Q_BMM @ X_BMN
