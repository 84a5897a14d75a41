"""What will run for a batch of equal matrices: which form, kernel and tiles, from its shape and the device alone.

A plan is data: the same for the same shapes on every rank and in every run, and it prints itself. Nothing here touches
a GPU or imports Triton, except to see whether it can be imported.
"""

from __future__ import annotations

import functools
import importlib
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from dmuon.assignment import newton_schulz_flops
from dmuon.newton_schulz.tuned import MEASURED, Product, Tiles, choose_tiles

logger = logging.getLogger(__name__)

KERNELS = ("auto", "triton", "torch", "quack")

# Rows of a tensor descriptor are multiples of 16 bytes: sides are padded with zeros, which changes no singular value.
_ALIGNMENT = 8

# A captured graph holds its buffers for good: only batches that launches would slow down get one.
_MOST_REPLAYED_FLOPS = 1.5e12

# A batch is closed once it keeps the GPU busy for milliseconds: larger ones are no faster, take more workspace, and
# hold up what is published behind them.
_BUSY_FLOPS = 4e12
# Bounds the float32 workspace of a batch: 2^28 elements are 1 GiB.
_MAX_BATCH_NUMEL = 1 << 28

# Below, a tile is mostly empty.
_SMALLEST_SIZE = 64


@dataclass(frozen=True)
class BatchPlan:
    """How one batch is orthogonalised.

    Attributes:
        shape: (B, M, N), as the parameters have them.
        kernel: "triton" or "quack" for symmetric products, "torch" for the plain ones of `iterations`.
        form: "gram" or "direct".
        dtype: of the iteration.
        gram_tiles, square_tiles: of Triton, for X X^T and for products of n x n matrices; else None.
        replays: whether it is captured once and replayed as a CUDA graph.
    """

    shape: tuple[int, int, int]
    kernel: str
    form: str
    dtype: torch.dtype
    gram_tiles: Tiles | None = None
    square_tiles: Tiles | None = None
    replays: bool = False

    @property
    def padded(self) -> tuple[int, int, int]:
        """The shape of the buffer that the kernels see."""
        num, rows, cols = self.shape
        return self.shape if self.kernel == "torch" else (num, _aligned(rows), _aligned(cols))

    @property
    def flops(self) -> int:
        """Of five steps with symmetric products, the least that is known."""
        return newton_schulz_flops(self.shape)

    def __str__(self) -> str:
        num, rows, cols = self.shape
        parts = [
            f"{num:3} x {rows} x {cols}",
            f"{self.flops / 1e12:6.2f} TFLOP",
            self.form,
            self.kernel,
            str(self.dtype).removeprefix("torch."),
        ]
        if self.gram_tiles is not None and self.square_tiles is not None:
            parts.append(f"tiles {self.gram_tiles.name} and {self.square_tiles.name}")
        return "  ".join([*parts, "replayed"] if self.replays else parts)


def plan_batch(
    shape: Sequence[int],
    device: torch.device,
    *,
    backend: str = "gram",
    dtype: torch.dtype = torch.float32,
    kernel: str = "auto",
    replays: bool = True,
) -> BatchPlan:
    """The plan of one batch.

    Args:
        shape: (B, M, N).
        backend: "gram" takes the Gram form where it costs less, "direct" never does.
        kernel: one of `KERNELS`; see `choose_kernel`.
        replays: False if results must outlive the next run.
    """
    num, rows, cols = shape
    small, big = sorted((rows, cols))
    chosen = choose_kernel(kernel, device, dtype)
    if chosen == "torch" or small < _SMALLEST_SIZE:
        form = "gram" if backend == "gram" and gram_pays(rows, cols) else "direct"
        return BatchPlan((num, rows, cols), "torch", form, dtype)
    # With symmetric products the two forms cost the same for square matrices, where the direct one rounds less.
    form = "gram" if backend == "gram" and 6 * big + 14 * small < 15 * big + 5 * small else "direct"
    gram_tiles = square_tiles = None
    if chosen == "triton":
        capability = _capability(device)
        gram_tiles = choose_tiles(capability, Product("wide" if rows <= cols else "tall", small, big, num))
        square_tiles = choose_tiles(capability, Product("square", small, small, num))
    return BatchPlan(
        (num, rows, cols),
        chosen,
        form,
        dtype,
        gram_tiles,
        square_tiles,
        replays and device.type == "cuda" and newton_schulz_flops(shape) <= _MOST_REPLAYED_FLOPS,
    )


def stack_sizes(shape: torch.Size) -> list[int]:
    """Into how many matrices each to split a stack [B, M, N], so that no part is larger than a batch may be."""
    size = max(1, _MAX_BATCH_NUMEL // math.prod(shape[1:]))
    return [min(size, shape[0] - start) for start in range(0, shape[0], size)]


def batches(shapes: Sequence[torch.Size]) -> list[list[int]]:
    """Indices of stacks [B, M, N] with equal matrices together, in order."""
    by_shape: dict[tuple[int, ...], list[list[int]]] = {}
    held: dict[tuple[int, ...], tuple[int, int]] = {}  # FLOPs and elements of the last batch of a shape
    for index, shape in enumerate(shapes):
        matrix, numel = tuple(shape[-2:]), shape.numel()
        found = by_shape.setdefault(matrix, [[]])
        held_flops, held_numel = held.get(matrix, (0, 0))
        if found[-1] and (held_flops >= _BUSY_FLOPS or held_numel + numel > _MAX_BATCH_NUMEL):
            found.append([])
            held_flops = held_numel = 0
        found[-1].append(index)
        held[matrix] = held_flops + newton_schulz_flops(shape), held_numel + numel
    return [batch for group in by_shape.values() for batch in group]


def gram_pays(num_rows: int, num_cols: int) -> bool:
    """Whether general products cost fewer FLOPs in Gram form: 8 a + 28 < 20 a + 10 in units of n^3, a = N / M."""
    small, big = sorted((num_rows, num_cols))
    return 8 * big + 28 * small < 20 * big + 10 * small


def check_kernel(name: str) -> None:
    """Raises ValueError if there is no kernel of this name."""
    if name not in KERNELS:
        raise ValueError(f"ns_kernel = {name!r}: must be one of {', '.join(KERNELS)}")


def choose_kernel(name: str, device: torch.device, dtype: torch.dtype) -> str:
    """ "triton", "quack" or "torch". Where what was asked for can't run the torch kernel does, and says why, once for
    each reason.

    "auto" takes Triton on devices that its tiles were measured on; "triton" and "quack" are taken on any that they can
    run on. Ranks are alike: rank 0 says it for all.

    Raises:
        ValueError: an unknown name.
    """
    check_kernel(name)
    if name == "torch":
        return "torch"
    reason = _obstacle(name, device, dtype)
    if reason:
        _say_once(name, reason)
        return "torch"
    return "triton" if name == "auto" else name


def _obstacle(name: str, device: torch.device, dtype: torch.dtype) -> str:
    if device.type != "cuda" and (name != "triton" or not (has_triton() and _interprets())):
        return "there is no GPU"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"symmetric products are for half precision, not {str(dtype).removeprefix('torch.')}"
    if not has_triton():
        return "Triton is not installed"
    if device.type == "cuda" and torch.version.hip is not None:
        return "symmetric products were written for NVIDIA GPUs"
    capability = _capability(device)
    if name == "quack":
        if capability < (8, 0):
            return f"quack has no kernels for compute capability {capability[0]}.{capability[1]}"
        return _obstacle_to_quack()
    if capability < (9, 0):
        return f"compute capability {capability[0]}.{capability[1]} has no tensor descriptors"
    if name == "auto" and capability not in MEASURED:
        return (
            f'nothing was measured on compute capability {capability[0]}.{capability[1]}; ask for it by name, "triton"'
        )
    return ""


@functools.cache
def _obstacle_to_quack() -> str:
    """Asked for every batch of every step, and an import that fails takes seconds each time."""
    try:
        importlib.import_module("dmuon.newton_schulz.quack_kernels")
    except (ImportError, OSError, RuntimeError) as error:  # not installed, or in part, or not for this driver
        return f"quack can't be imported ({error}); pip install quack-kernels"
    return ""


@functools.cache
def _say_once(name: str, reason: str) -> None:
    # On a machine without a GPU nobody expects anything else, unless they asked for it.
    expected = name == "auto" and reason == "there is no GPU"
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    level = logging.WARNING if is_first and not expected else logging.INFO
    logger.log(level, "ns_kernel = %r: Newton-Schulz runs in plain torch, for %s", name, reason)


@functools.cache
def has_triton() -> bool:
    """Whether `dmuon.newton_schulz.kernels` can be imported."""
    try:
        importlib.import_module("dmuon.newton_schulz.kernels")
    except (ImportError, AttributeError):  # not installed, or too old for tensor descriptors
        return False
    return True


def _interprets() -> bool:
    return bool(importlib.import_module("dmuon.newton_schulz.kernels").INTERPRETED)


def _capability(device: torch.device) -> tuple[int, int]:
    """Of the interpreter: the first one with tensor descriptors, so that tests see the table too."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
