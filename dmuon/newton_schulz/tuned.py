"""Which tiles are fastest for which product: measured tables, one for each device capability.

`benchmarks/newton_schulz_tune.py` makes them. A product of a size that was not measured takes the tiles of the nearest
one that was; which is nearest depends on sizes alone, so that a plan is the same on every rank and in every run.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple


class Tiles(NamedTuple):
    """How a symmetric product is cut and scheduled.

    Attributes:
        block_m, block_n, block_k: sizes of a tile of the result, and of a slice of the contracted side; powers of two,
            and one side of a tile at most twice the other.
        num_warps, num_stages: of one program; slices in flight.
        group: columns of blocks that are visited together, for the cache.
        parts: along the contracted side, of a tile that is left over when all multiprocessors have had as many as each
            other; at most, and 1 to leave it whole.
    """

    block_m: int = 128
    block_n: int = 128
    block_k: int = 64
    num_warps: int = 8
    num_stages: int = 3
    group: int = 8
    parts: int = 1

    @property
    def name(self) -> str:
        blocks = f"{self.block_m}x{self.block_n}x{self.block_k}"
        parts = f"p{self.parts}" if self.parts > 1 else ""
        return f"{blocks}w{self.num_warps}s{self.num_stages}g{self.group}{parts}"


class Product(NamedTuple):
    """One kind of symmetric product: B results of n x n, each a sum over k.

    Attributes:
        kind: "wide" X X^T of [n, k], "tall" X^T X of [k, n], or "square" alpha A B + beta A + gamma I, where k = n.
    """

    kind: str
    size: int
    depth: int
    num_matrices: int


DEFAULT = Tiles()


@functools.cache
def choose_tiles(capability: tuple[int, int], product: Product) -> Tiles:
    """The tiles measured for the nearest product of its kind; `DEFAULT` where there is none."""
    rows = [row for row in MEASURED.get(capability, {}).items() if row[0].kind == product.kind]
    if not rows:
        return DEFAULT
    return min(rows, key=lambda row: (_distance(row[0], product), row[0]))[1]


def _distance(a: Product, b: Product) -> float:
    """In powers of two; the size of a result says most about which tiles fit it."""
    return (
        4 * abs(math.log2(a.size / b.size))
        + abs(math.log2(a.depth / b.depth))
        + abs(math.log2(a.num_matrices / b.num_matrices))
    )


# Device capability -> what was measured there. The rest of this file is written by the tuner.
MEASURED: dict[tuple[int, int], dict[Product, Tiles]] = {
    (9, 0): {
        Product("square", 512, 512, 1): Tiles(64, 64, 128, 4, 3, 2),
        Product("square", 512, 512, 16): Tiles(64, 128, 64, 4, 3, 2),
        Product("square", 1024, 1024, 1): Tiles(64, 64, 128, 4, 3, 2),
        Product("square", 1024, 1024, 8): Tiles(64, 128, 64, 4, 3, 2),
        Product("square", 1024, 1024, 16): Tiles(64, 128, 64, 4, 3, 2),
        Product("square", 2048, 2048, 1): Tiles(64, 128, 64, 4, 3, 2),
        Product("square", 2048, 2048, 4): Tiles(128, 128, 64, 4, 3, 2, 16),
        Product("square", 2048, 2048, 8): Tiles(128, 128, 64, 4, 3, 2, 16),
        Product("square", 3072, 3072, 1): Tiles(128, 128, 64, 4, 3, 2, 16),
        Product("square", 3072, 3072, 4): Tiles(128, 128, 64, 4, 3, 2),
        Product("square", 4096, 4096, 1): Tiles(128, 128, 64, 4, 3, 2),
        Product("square", 4096, 4096, 4): Tiles(128, 128, 64, 4, 3, 2),
        Product("square", 4096, 4096, 8): Tiles(128, 128, 64, 8, 3, 2),
        Product("square", 8192, 8192, 1): Tiles(128, 128, 128, 4, 3, 4),
        Product("square", 8192, 8192, 2): Tiles(128, 128, 128, 4, 3, 2),
        Product("tall", 512, 2048, 16): Tiles(64, 128, 64, 4, 3, 2),
        Product("tall", 1024, 4096, 16): Tiles(64, 128, 64, 4, 3, 2),
        Product("tall", 2048, 8192, 1): Tiles(128, 128, 128, 4, 3, 8, 16),
        Product("tall", 2048, 8192, 8): Tiles(128, 128, 64, 4, 3, 2, 16),
        Product("tall", 3072, 8192, 4): Tiles(128, 128, 64, 4, 3, 2),
        Product("tall", 4096, 14336, 1): Tiles(128, 128, 64, 4, 3, 2),
        Product("tall", 4096, 14336, 4): Tiles(128, 128, 64, 4, 3, 2),
        Product("tall", 8192, 28672, 1): Tiles(128, 256, 64, 8, 3, 2),
        Product("wide", 512, 2048, 1): Tiles(64, 64, 128, 4, 3, 8),
        Product("wide", 512, 2048, 16): Tiles(64, 128, 64, 4, 3, 2),
        Product("wide", 1024, 4096, 1): Tiles(128, 128, 64, 8, 4, 2, 16),
        Product("wide", 1024, 4096, 8): Tiles(128, 128, 64, 4, 3, 4, 16),
        Product("wide", 1024, 4096, 16): Tiles(128, 128, 64, 4, 3, 4, 16),
        Product("wide", 2048, 2048, 1): Tiles(64, 128, 64, 4, 3, 2),
        Product("wide", 2048, 2048, 8): Tiles(128, 128, 64, 4, 3, 4, 16),
        Product("wide", 2048, 8192, 1): Tiles(128, 128, 64, 8, 4, 8, 16),
        Product("wide", 2048, 8192, 8): Tiles(256, 128, 64, 8, 4, 8, 16),
        Product("wide", 3072, 3072, 1): Tiles(128, 128, 64, 4, 3, 8, 16),
        Product("wide", 3072, 3072, 8): Tiles(128, 128, 64, 4, 3, 2, 16),
        Product("wide", 3072, 8192, 4): Tiles(128, 128, 64, 8, 4, 2, 16),
        Product("wide", 4096, 4096, 1): Tiles(128, 128, 64, 4, 3, 2),
        Product("wide", 4096, 4096, 8): Tiles(128, 256, 64, 8, 3, 8, 16),
        Product("wide", 4096, 14336, 1): Tiles(128, 256, 64, 8, 3, 4, 16),
        Product("wide", 4096, 14336, 4): Tiles(128, 256, 64, 8, 3, 4, 16),
        Product("wide", 8192, 8192, 1): Tiles(256, 128, 64, 8, 4, 16),
        Product("wide", 8192, 28672, 1): Tiles(256, 128, 64, 8, 4, 4),
    },
}
