"""How one parameter lies on the tp axis: its logical shape, which dim is sharded, and what each rank holds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise


@dataclass(frozen=True)
class Layout:
    """A matrix [M, N], or a stack [B, M, N] of them, on the T ranks of one tp group.

    Attributes:
        shape: the logical shape.
        sharded_dim: the dim of `shape` that is cut over tp, as in DTensor's Shard(dim); None if every rank holds all.
        sizes: length of the sharded dim on each rank. Empty: DTensor's rule, pieces of ceil(length / T), the last ones
            smaller or empty.

    Raises:
        ValueError: not a matrix or a stack, or sizes that don't fit.
    """

    shape: tuple[int, ...]
    sharded_dim: int | None = None
    sizes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
        if len(self.shape) not in (2, 3) or min(self.shape) < 1:
            raise ValueError(f"shape {self.shape}: must be that of a matrix or of a stack of matrices")
        if self.sharded_dim is not None and not 0 <= self.sharded_dim < len(self.shape):
            raise ValueError(f"sharded_dim = {self.sharded_dim}: must be a dim of {self.shape}, or None")
        if self.sizes and (self.sharded_dim is None or sum(self.sizes) != self.shape[self.sharded_dim]):
            raise ValueError(f"sizes {self.sizes}: must sum to dim {self.sharded_dim} of {self.shape}")

    @property
    def num_matrices(self) -> int:
        return math.prod(self.shape[:-2])

    @property
    def matrix_shape(self) -> tuple[int, int]:
        return self.shape[-2], self.shape[-1]

    @property
    def matrix_bytes(self) -> int:
        """Of one whole matrix, in float32."""
        return 4 * self.shape[-2] * self.shape[-1]

    @property
    def matrix_dim(self) -> int | None:
        """The sharded dim of each matrix, 0 or 1; None where a rank holds its matrices whole."""
        dim = None if self.sharded_dim is None else self.sharded_dim - len(self.shape) + 2
        return dim if dim in (0, 1) else None

    @property
    def has_sum_form(self) -> bool:
        """Whether the Gram matrix of the smaller side is a sum over ranks of what each has by its own slice.

        That is so where the longer side is cut, which the Gram product contracts; of a square matrix, any side.
        """
        if self.matrix_dim is None:
            return False
        return self.matrix_shape[self.matrix_dim] >= self.matrix_shape[1 - self.matrix_dim]

    def local_sizes(self, tp_degree: int) -> tuple[int, ...]:
        """Length of the sharded dim on each rank.

        Raises:
            ValueError: `sizes` are of another number of ranks.
        """
        assert self.sharded_dim is not None
        if self.sizes:
            if len(self.sizes) != tp_degree:
                raise ValueError(f"sizes {self.sizes}: there must be one for each of {tp_degree} ranks")
            return self.sizes
        length = self.shape[self.sharded_dim]
        piece = -(-length // tp_degree)
        return tuple(min(piece, max(0, length - rank * piece)) for rank in range(tp_degree))

    def local_shape(self, tp_degree: int, rank: int) -> tuple[int, ...]:
        if self.sharded_dim is None:
            return self.shape
        shape = list(self.shape)
        shape[self.sharded_dim] = self.local_sizes(tp_degree)[rank]
        return tuple(shape)

    def local_matrix_numel(self, tp_degree: int, rank: int) -> int:
        """Elements that a rank holds of one of the matrices, where these are cut."""
        return math.prod(self.local_shape(tp_degree, rank)[-2:])

    def split(self, row_sizes: Sequence[int], tp_degree: int) -> tuple[Layout, ...]:
        """The matrices that are fused along dim 0 of this one, each with what is left of it on every rank.

        Where dim 0 is cut, a rank's rows are a run of all rows, which may begin in one matrix and end in another one.
        Rows of the local tensor follow in the same order: `local.split([piece.local_shape(T, rank)[0] for ...])`.

        Raises:
            ValueError: a stack, or rows that don't sum to dim 0.
        """
        if len(self.shape) != 2 or sum(row_sizes) != self.shape[0]:
            raise ValueError(f"split {tuple(row_sizes)}: must sum to dim 0 of a matrix, here of shape {self.shape}")
        shapes = [(rows, self.shape[1]) for rows in row_sizes]
        if self.sharded_dim != 0:
            return tuple(Layout(shape, self.sharded_dim, self.sizes) for shape in shapes)
        runs = list(pairwise(accumulate(self.local_sizes(tp_degree), initial=0)))
        starts = accumulate(row_sizes[:-1], initial=0)
        pieces = []
        for start, shape in zip(starts, shapes, strict=True):
            stop = start + shape[0]
            sizes = tuple(max(0, min(stop, high) - max(start, low)) for low, high in runs)
            pieces.append(Layout(shape, 0, sizes))
        return tuple(pieces)

    def __str__(self) -> str:
        shape = " x ".join(map(str, self.shape))
        return shape if self.sharded_dim is None else f"{shape} by dim {self.sharded_dim}"
