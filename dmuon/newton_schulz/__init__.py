"""Orthogonalise a batch of matrices by a Newton-Schulz iteration of fixed polynomials."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dmuon.newton_schulz.coefficients import BY_NAME as COEFFICIENTS
from dmuon.newton_schulz.coefficients import Coefficients, Triple, resolve
from dmuon.newton_schulz.execution import iterate_as_planned
from dmuon.newton_schulz.iterations import gram_factor as plain_gram_factor
from dmuon.newton_schulz.planning import KERNELS, gram_pays, plan_batch

BACKENDS = ("gram", "direct")
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

__all__ = [
    "BACKENDS",
    "COEFFICIENTS",
    "DTYPES",
    "KERNELS",
    "Coefficients",
    "gram_factor",
    "gram_pays",
    "iterate",
    "normalize",
    "orthogonalize",
    "resolve_dtype",
]

# Far below the norm of any gradient (a clipped one once fell under 1e-7 and training stalled), and still a zero
# matrix stays zero.
SMALLEST_NORM = 1e-30


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """The number format to iterate in. "auto": float32 on CPU; float16 elsewhere, for its three extra mantissa bits.

    Raises:
        ValueError: an unknown name.
    """
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.float16
    if name not in DTYPES:
        raise ValueError(f"ns_dtype = {name!r}: must be one of auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def orthogonalize(
    matrices_BMN: Tensor,
    *,
    num_steps: int = 5,
    backend: str = "gram",
    coefficients: Coefficients = "polar_express",
    dtype: torch.dtype = torch.float32,
    kernel: str = "auto",
) -> Tensor:
    """Moves every nonzero singular value of each matrix towards 1 and leaves the singular vectors alone.

    Args:
        matrices_BMN: B matrices, float32, any M and N.
        num_steps: steps of the iteration.
        backend: "gram" takes the Gram form where it costs less, "direct" iterates on the matrices themselves.
        coefficients: "polar_express", "keller_jordan", "you", or one (a, b, c) for each step.
        dtype: format of the iteration; each matrix is divided by its Frobenius norm in float32 before the cast.
        kernel: "auto", "triton", "torch" or "quack"; see `planning.choose_kernel`.

    Returns:
        The shape of `matrices_BMN`, in `dtype`. A zero matrix stays zero, a non-finite one becomes non-finite.

    Raises:
        ValueError: an unknown backend, kernel or coefficients.
    """
    # In float64 the square of an entry of 1e-20 or 1e20 neither vanishes nor overflows.
    norm_B11 = torch.linalg.vector_norm(matrices_BMN, dim=(-2, -1), keepdim=True, dtype=torch.float64)
    X_BMN = normalize(matrices_BMN, norm_B11, dtype)
    return iterate(X_BMN, num_steps=num_steps, backend=backend, coefficients=coefficients, kernel=kernel)


def normalize(matrices: Tensor, norm: Tensor, dtype: torch.dtype) -> Tensor:
    """Matrices, or slices of them, over their Frobenius norms (float64): in float32, then rounded to `dtype` once."""
    return (matrices / norm.clamp(min=SMALLEST_NORM).float()).to(dtype)


def iterate(
    X_BMN: Tensor,
    *,
    num_steps: int = 5,
    backend: str = "gram",
    coefficients: Coefficients = "polar_express",
    kernel: str = "auto",
) -> Tensor:
    """`orthogonalize` for matrices that are normalised already; in the dtype of `X_BMN`, which is left as it is."""
    if backend not in BACKENDS:
        raise ValueError(f"ns_backend = {backend!r}: must be one of {', '.join(BACKENDS)}")
    triples = resolve(coefficients, num_steps)
    plan = plan_batch(tuple(X_BMN.shape), X_BMN.device, backend=backend, dtype=X_BMN.dtype, kernel=kernel)
    if plan.kernel == "torch":
        return iterate_as_planned(plan, triples, X_BMN)
    num_rows, num_cols = X_BMN.shape[-2:]
    padding = (0, plan.padded[2] - num_cols, 0, plan.padded[1] - num_rows)
    X_BMN = torch.nn.functional.pad(X_BMN, padding) if any(padding) else X_BMN.contiguous()
    return iterate_as_planned(plan, triples, X_BMN)[:, :num_rows, :num_cols]


def gram_factor(R_BMM: Tensor, segment: Sequence[Triple], kernel: str = "auto") -> Tensor:
    """Q of the steps of one segment, from R = X X^T alone, such that they take X to Q X. `R_BMM` is workspace."""
    plan = plan_batch(tuple(R_BMM.shape), R_BMM.device, dtype=R_BMM.dtype, kernel=kernel)
    if plan.kernel == "torch" or plan.padded != plan.shape:
        return plain_gram_factor(R_BMM, segment)
    from dmuon.newton_schulz import symmetric

    return symmetric.gram_factor(R_BMM.contiguous(), segment, symmetric.products(plan).square)
