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
        self._fill_uniform(rows, name, shape, start)
        # By the inverse error function rather than rejection: an element's value doesn't depend on its neighbours, and
        # torch spreads the work over its threads.
        cutoff = _CUTOFF * std
        return rows.erfinv_().mul_(math.sqrt(2) * std).clamp_(-cutoff, cutoff)

    def _fill_uniform(self, rows: Tensor, name: str, shape: Sequence[int], start: int) -> None:
        """Fills `rows`, a parameter's from `start` on, with the quantiles of what is inside the cutoff, in -1 .. 1."""
        stop = start + len(rows)
        edge = math.erf(_CUTOFF / math.sqrt(2))
        num_block_rows = max(1, _BLOCK_ELEMENTS // math.prod(shape[1:]))

        def draw(block: int) -> None:
            first, end = block * num_block_rows, min((block + 1) * num_block_rows, shape[0])
            kept_first, kept_end = max(first, start), min(end, stop)
            kept = rows[kept_first - start : kept_end - start]
            whole = kept if len(kept) == end - first else rows.new_empty(end - first, *shape[1:])
            whole.uniform_(-edge, edge, generator=_generator(self.seed, name, block))
            if whole is not kept:
                kept.copy_(whole[kept_first - first : kept_end - first])

        # torch draws on one thread, without holding Python's lock.
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            list(pool.map(draw, range(start // num_block_rows, -(-stop // num_block_rows))))

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
