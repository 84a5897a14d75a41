"""Llama sizes as a table. Imports no torch: the configuration is checked against it before anything is started."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True)
class RopeScaling:
    """Stretched rotary frequencies of Llama 3.1 (arXiv 2407.21783, section 3.4.2).

    Wavelengths beyond original_max_position / low_freq_factor are stretched by `factor`, those below
    original_max_position / high_freq_factor stay, and what lies between is interpolated.
    """

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True)
class LlamaSize:
    """Everything that fixes the shape and the function of a Llama.

    ffn_dim_multiplier, multiple_of: as in Meta's params.json; feed-forward width is 8/3 dim x multiplier, rounded up.
    max_seq_len: the most tokens the positions are meant for; a model's own table may be shorter.
    rope_scaling: None for plain rotary frequencies.
    """

    dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    ffn_dim_multiplier: float | None
    multiple_of: int
    rope_theta: float
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    max_seq_len: int = 131072
    rope_scaling: RopeScaling | None = None

    def __post_init__(self) -> None:
        if self.dim % self.num_heads or self.head_dim % 2:
            raise ValueError(
                f"dim {self.dim}: must give each of {self.num_heads} heads the same even number of features"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads}: must be a multiple of num_kv_heads {self.num_kv_heads}")

    @property
    def head_dim(self) -> int:
        return self.dim // self.num_heads

    @property
    def ffn_hidden_dim(self) -> int:
        hidden_dim = int(8 * self.dim / 3)
        if self.ffn_dim_multiplier is not None:
            hidden_dim = int(self.ffn_dim_multiplier * hidden_dim)
        return -(-hidden_dim // self.multiple_of) * self.multiple_of

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of each parameter in the model's order. A tied head is no parameter of its own."""
        kv_dim = self.num_kv_heads * self.head_dim
        block: dict[str, tuple[int, ...]] = {
            "attention.wq.weight": (self.dim, self.dim),
            "attention.wk.weight": (kv_dim, self.dim),
            "attention.wv.weight": (kv_dim, self.dim),
            "attention.wo.weight": (self.dim, self.dim),
            "feed_forward.w1.weight": (self.ffn_hidden_dim, self.dim),
            "feed_forward.w2.weight": (self.dim, self.ffn_hidden_dim),
            "feed_forward.w3.weight": (self.ffn_hidden_dim, self.dim),
            "attention_norm.weight": (self.dim,),
            "ffn_norm.weight": (self.dim,),
        }
        shapes: dict[str, tuple[int, ...]] = {"tok_embeddings.weight": (self.vocab_size, self.dim)}
        for index in range(self.num_layers):
            shapes |= {f"layers.{index}.{name}": shape for name, shape in block.items()}
        shapes["norm.weight"] = (self.dim,)
        if not self.tie_embeddings:
            shapes["output.weight"] = (self.vocab_size, self.dim)
        return shapes

    def num_parameters(self) -> int:
        """Elements of all parameters, a tied matrix once."""
        return sum(math.prod(shape) for shape in self.parameter_shapes().values())

    def num_embedding_parameters(self) -> int:
        """Elements of the token embedding."""
        return self.vocab_size * self.dim

    def flops_per_token(self, seq_len: int) -> int:
        """FLOPs of forward and backward for one token of a sequence: 6 for each weight that is multiplied with, and
        attention as if it weren't causal (PaLM, arXiv 2204.02311, appendix B).

        A look-up costs nothing; the head's product counts, tied or not.
        """
        num_multiplied = self.num_parameters() - self.num_embedding_parameters()
        if self.tie_embeddings:
            num_multiplied += self.num_embedding_parameters()
        return 6 * num_multiplied + 12 * self.num_layers * self.num_heads * self.head_dim * seq_len


def size_to_dict(size: LlamaSize) -> dict[str, Any]:
    """Its fields, as JSON can hold them; rope_scaling is a dict of its own or None."""
    return asdict(size)


def size_from_dict(values: Mapping[str, Any]) -> LlamaSize:
    """The inverse of `size_to_dict`. Entries that aren't fields, such as a name, are left out.

    Raises:
        ValueError: a field is missing.
    """
    names = [field.name for field in fields(LlamaSize)]
    missing = [name for name in names if name not in values]
    if missing:
        raise ValueError(f"a size lacks {', '.join(missing)}")
    scaling = values["rope_scaling"]
    return LlamaSize(
        **{name: values[name] for name in names} | {"rope_scaling": None if scaling is None else RopeScaling(**scaling)}
    )


# 8B, 70B and 405B are Llama 3.1's, 1B and 3B are Llama 3.2's. Llama 3 itself is the 8B and 70B without rotary scaling.
_LLAMA3_1 = RopeScaling(factor=8.0)
_LLAMA3_2 = RopeScaling(factor=32.0)

# dim, layers, heads, kv heads, vocabulary, ffn multiplier, multiple of, rope theta
_LLAMA3 = {
    # For a laptop; the tokenizer of the embedded corpus has 2048 pieces.
    "debugmodel": LlamaSize(128, 6, 4, 2, 2048, None, 64, 10000.0, max_seq_len=2048),
    "1B": LlamaSize(2048, 16, 32, 8, 128256, 1.5, 256, 5e5, tie_embeddings=True, rope_scaling=_LLAMA3_2),
    "3B": LlamaSize(3072, 28, 24, 8, 128256, 1.0, 256, 5e5, tie_embeddings=True, rope_scaling=_LLAMA3_2),
    "8B": LlamaSize(4096, 32, 32, 8, 128256, 1.3, 1024, 5e5, rope_scaling=_LLAMA3_1),
    "70B": LlamaSize(8192, 80, 64, 8, 128256, 1.3, 4096, 5e5, rope_scaling=_LLAMA3_1),
    "405B": LlamaSize(16384, 126, 128, 8, 128256, 1.2, 4096, 5e5, rope_scaling=_LLAMA3_1),
}
_LLAMA2 = {
    "7B": LlamaSize(4096, 32, 32, 32, 32000, None, 256, 10000.0, max_seq_len=4096),
    "13B": LlamaSize(5120, 40, 40, 40, 32000, None, 256, 10000.0, max_seq_len=4096),
    "70B": LlamaSize(8192, 80, 64, 8, 32000, 1.3, 4096, 10000.0, max_seq_len=4096),
}

FLAVORS: dict[str, dict[str, LlamaSize]] = {"llama3": _LLAMA3, "llama2": _LLAMA2}
"""model.name -> model.flavor -> size."""
