"""Cross entropy summed over valid tokens. Whoever divides knows how many of them all ranks have together.

Shape legend: B sequences, S tokens, V vocabulary, N tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import loss_parallel
from torch.utils.checkpoint import checkpoint

from dmuon_titan.config.schema import Compile, Parallelism

IGNORE_INDEX = -100
"""Label of a token that is no target."""

# A rank's logits that are worked on at once, 256 MiB of them in float32.
_CHUNK_ELEMENTS = 2**26


def cross_entropy_sum(logits_BSV: Tensor, label_BS: Tensor) -> Tensor:
    """Sum over valid tokens of -log softmax(logits)[label], computed in float32; 0 if no token is valid.

    Args:
        logits_BSV: any floating dtype. A DTensor is replicated, or sharded along V inside `loss_context`.
        label_BS: int64, in 0 .. V - 1, or IGNORE_INDEX. A plain tensor, the same on all ranks that share the logits.

    Returns:
        0-dim, float32, a plain tensor, the same on those ranks.
    """
    if isinstance(logits_BSV, DTensor) and logits_BSV.placements == (Replicate(),):
        logits_BSV = logits_BSV.to_local()
    logits, label = logits_BSV.flatten(0, -2), label_BS.flatten()
    # A compiler fuses the passes over the logits and keeps no float32 copy.
    if torch.compiler.is_compiling() or _num_here(logits) <= _CHUNK_ELEMENTS:
        return _chunk_sum(logits, label)
    # 8192 x 128256 logits would take three float32 copies of 4 GiB. A chunk's are made again in backward instead.
    num_tokens = max(1, _CHUNK_ELEMENTS * len(logits) // _num_here(logits))
    chunks = zip(logits.split(num_tokens), label.split(num_tokens), strict=True)
    sums = [checkpoint(_chunk_sum, *chunk, use_reentrant=False, preserve_rng_state=False) for chunk in chunks]
    return torch.stack(sums).sum()


def _chunk_sum(logits_NV: Tensor, label_N: Tensor) -> Tensor:
    total = F.cross_entropy(logits_NV.float(), label_N, ignore_index=IGNORE_INDEX, reduction="sum")
    return total.to_local() if isinstance(total, DTensor) else total


def _num_here(logits: Tensor) -> int:
    """Elements that this rank has."""
    return (logits.to_local() if isinstance(logits, DTensor) else logits).numel()


def loss_context(options: Parallelism) -> AbstractContextManager[None]:
    """What the loss must be computed in, and its backward too, where the vocabulary is spread over ranks."""
    is_parallel = options.tensor_parallel_degree > 1 and not options.disable_loss_parallel
    return loss_parallel() if is_parallel else nullcontext()


def build_loss(options: Compile) -> Callable[[Tensor, Tensor], Tensor]:
    """`cross_entropy_sum`, compiled if `[compile]` asks for it."""
    if options.enable and "loss" in options.components:
        return torch.compile(cross_entropy_sum, backend=options.backend, fullgraph=True)
    return cross_entropy_sum
