"""Initial weights as a function of a seed and the parameter's name alone: the same bits on every mesh and device.

A parameter is drawn in blocks of rows, each from a generator of its own, so that a rank draws only what it keeps.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from models.llama.sizes import LlamaSize

# What a seed means depends on these: changing one changes every model.
_BLOCK_ELEMENTS = 2**18
_PIECE_ELEMENTS = 2**14
_CUTOFF = 3.0


class Initializer:
    """Draws any rows of any parameter of a Llama, on the CPU whatever the default device is.

    Scales are TorchTitan's for Llama 3: embedding 1, matrices 0.02, those that write into the residual stream and w3
    divided by sqrt(2 depth), head dim**-0.5 (the tied matrix too, for it makes the logits). All are normal, cut off at
    three standard deviations; norms are ones.
    """

    def __init__(self, size: LlamaSize, seed: int) -> None:
        self.size = size
        self.seed = seed

    def __call__(self, name: str, shape: Sequence[int], start: int, stop: int) -> Tensor:
        """Rows start .. stop - 1 of dim 0 of the parameter `name`, whose whole shape is `shape`; float32.

        Raises:
            ValueError: the name is no parameter of a Llama.
        """
        std = self._standard_deviation(name)
        rows = torch.empty(stop - start, *shape[1:], device="cpu", dtype=torch.float32)
        if std is None:
            return rows.fill_(1.0)
        num_block_rows = max(1, _BLOCK_ELEMENTS // math.prod(shape[1:]))

        def draw(block: int) -> None:
            first, end = block * num_block_rows, min((block + 1) * num_block_rows, shape[0])
            kept = slice(max(first, start), min(end, stop))
            out = rows[kept.start - start : kept.stop - start]
            whole = out if len(out) == end - first else out.new_empty(end - first, *shape[1:])
            _fill_truncated_normal(whole.view(-1), std, _generator(self.seed, name, block))
            if whole is not out:
                out.copy_(whole[kept.start - first : kept.stop - first])

        blocks = range(start // num_block_rows, -(-stop // num_block_rows))
        num_threads = min(torch.get_num_threads(), len(blocks))
        if num_threads > 1:
            with ThreadPoolExecutor(num_threads) as pool:
                list(pool.map(draw, blocks))
        else:
            for block in blocks:
                draw(block)
        return rows

    def _standard_deviation(self, name: str) -> float | None:
        """None for a norm."""
        match name.split("."):
            case ["norm", "weight"] | ["layers", _, "attention_norm" | "ffn_norm", "weight"]:
                return None
            case ["tok_embeddings", "weight"]:
                return self.size.dim**-0.5 if self.size.tie_embeddings else 1.0
            case ["output", "weight"]:
                return self.size.dim**-0.5
            case ["layers", _, "attention", "wq" | "wk" | "wv", "weight"] | [
                "layers",
                _,
                "feed_forward",
                "w1",
                "weight",
            ]:
                return 0.02
            case ["layers", index, "attention", "wo", "weight"] | [
                "layers",
                index,
                "feed_forward",
                "w2" | "w3",
                "weight",
            ]:
                return 0.02 / math.sqrt(2 * (int(index) + 1))
        raise ValueError(f"{name}: no parameter of a Llama")


def _generator(seed: int, name: str, block: int) -> torch.Generator:
    # torch's CPU generator uses 32 bits of a seed. Two of an 8B model's 30,000 blocks share theirs with a chance of
    # one in ten, and then the same numbers stand in two unrelated places.
    digest = hashlib.sha256(f"{seed}/{name}/{block}".encode()).digest()
    return torch.Generator(device="cpu").manual_seed(int.from_bytes(digest[:4], "little"))


def _fill_truncated_normal(values_N: Tensor, std: float, generator: torch.Generator) -> None:
    # By rejection, twice as fast as by the inverse error function. Pieces fit into a core's cache, and torch starts no
    # threads of its own on so few elements: several blocks are drawn at once already.
    for piece in values_N.split(_PIECE_ELEMENTS):
        piece.normal_(generator=generator)
        while len(outside := (piece.abs() > _CUTOFF).nonzero().view(-1)):
            piece[outside] = torch.randn(len(outside), generator=generator, device="cpu", dtype=torch.float32)
        piece.mul_(std)
