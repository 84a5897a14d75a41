"""Cross entropy summed over valid tokens. Whoever divides knows how many of them all ranks have together.

Shape legend: B sequences, S tokens, V vocabulary, N tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dmuon_titan.config.schema import Compile

IGNORE_INDEX = -100
"""Label of a token that is no target."""

# Logits that are worked on at once, 256 MiB of them in float32.
_CHUNK_ELEMENTS = 2**26


def cross_entropy_sum(logits_BSV: Tensor, label_BS: Tensor) -> Tensor:
    """Sum over valid tokens of -log softmax(logits)[label], computed in float32; 0 if no token is valid.

    Args:
        logits_BSV: any floating dtype.
        label_BS: int64, in 0 .. V - 1, or IGNORE_INDEX.

    Returns:
        0-dim, float32.
    """
    logits, label = logits_BSV.flatten(0, -2), label_BS.flatten()
    # A compiler fuses the passes over the logits and keeps no float32 copy.
    if logits.numel() <= _CHUNK_ELEMENTS or torch.compiler.is_compiling():
        return _chunk_sum(logits, label)
    # 8192 x 128256 logits would take three float32 copies of 4 GiB. A chunk's are made again in backward instead.
    num_tokens = max(1, _CHUNK_ELEMENTS // logits.shape[-1])
    chunks = zip(logits.split(num_tokens), label.split(num_tokens), strict=True)
    sums = [checkpoint(_chunk_sum, *chunk, use_reentrant=False, preserve_rng_state=False) for chunk in chunks]
    return torch.stack(sums).sum()


def _chunk_sum(logits_NV: Tensor, label_N: Tensor) -> Tensor:
    return F.cross_entropy(logits_NV.float(), label_N, ignore_index=IGNORE_INDEX, reduction="sum")


def build_loss(options: Compile) -> Callable[[Tensor, Tensor], Tensor]:
    """`cross_entropy_sum`, compiled if `[compile]` asks for it."""
    if options.enable and "loss" in options.components:
        return torch.compile(cross_entropy_sum, backend=options.backend, fullgraph=True)
    return cross_entropy_sum
