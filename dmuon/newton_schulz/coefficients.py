"""Coefficients (a, b, c) of the quintic p(x) = a x + b x^3 + c x^5, one triple for each Newton-Schulz step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

Triple = tuple[float, float, float]
Coefficients: TypeAlias = str | Sequence[Triple]

# Jordan et al., "Muon: an optimizer for hidden layers in neural networks": one triple for every step.
KELLER_JORDAN: tuple[Triple, ...] = ((3.4445, -4.7750, 2.0315),) * 5

# You Jiacheng, five steps tuned one by one; singular values end in 0.98 - 1.03 for inputs >= 1e-2.
YOU: tuple[Triple, ...] = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)

# Amsel et al., "The Polar Express", arXiv 2505.16932, before the safety factor.
_POLAR_EXPRESS_RAW: tuple[Triple, ...] = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
)


def with_safety(coefficients: Sequence[Triple], factor: float) -> tuple[Triple, ...]:
    """p(x / factor) for each step: keeps rounding from pushing a singular value out of the converging interval."""
    return tuple((a / factor, b / factor**3, c / factor**5) for a, b, c in coefficients)


POLAR_EXPRESS = with_safety(_POLAR_EXPRESS_RAW, 1.05)

BY_NAME: dict[str, tuple[Triple, ...]] = {
    "polar_express": POLAR_EXPRESS,
    "keller_jordan": KELLER_JORDAN,
    "you": YOU,
}


def resolve(coefficients: Coefficients, num_steps: int) -> tuple[Triple, ...]:
    """The triples of `num_steps` steps; past the end of a table its last triple repeats.

    Raises:
        ValueError: an unknown name, no triples, or a number of steps outside 1 .. 99.
    """
    if not 1 <= num_steps <= 99:
        raise ValueError(f"ns_steps = {num_steps}: must be in 1 .. 99")
    if isinstance(coefficients, str):
        if coefficients not in BY_NAME:
            raise ValueError(f"ns_coefficients = {coefficients!r}: must be one of {', '.join(BY_NAME)}, or triples")
        coefficients = BY_NAME[coefficients]
    triples = [tuple(float(v) for v in triple) for triple in coefficients]
    if not triples or any(len(triple) != 3 for triple in triples):
        raise ValueError(f"ns_coefficients = {coefficients!r}: must be a sequence of (a, b, c)")
    steps = [triples[min(i, len(triples) - 1)] for i in range(num_steps)]
    return tuple((a, b, c) for a, b, c in steps)
