"""Llama (arXiv 2307.09288, 2407.21783), the whole model. It knows nothing of devices and parallelism.

Shape legend: B sequences, S tokens, D model dim, H query heads, K key and value heads, E features of a head,
F feed-forward dim, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.llama.sizes import LlamaSize, RopeScaling


class RotaryEmbedding(nn.Module):
    """Rotates pairs of neighbouring features by an angle that grows with the position (arXiv 2104.09864, section 3.4).

    The pairs are Meta's interleaved ones, (0, 1), (2, 3) ...; Hugging Face pairs feature i with i + E/2 instead. One
    instance serves all blocks. Its table is a float32 buffer rather than an argument of `forward`, for mixed precision
    casts floating-point arguments, and bfloat16 can't tell position 1000 from 1001.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, size: LlamaSize, max_seq_len: int) -> None:
        super().__init__()
        cos, sin = rotary_table(size.head_dim, max_seq_len, size.rope_theta, size.rope_scaling)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, x_BSHE: Tensor) -> Tensor:
        num_tokens = x_BSHE.shape[1]
        cos, sin = self.cos[:num_tokens, None], self.sin[:num_tokens, None]
        even, odd = x_BSHE.float().unflatten(-1, (-1, 2)).unbind(-1)
        rotated = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
        return rotated.flatten(-2).type_as(x_BSHE)


def rotary_table(
    head_dim: int, max_seq_len: int, theta: float, scaling: RopeScaling | None = None
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of each position's angles, [max_seq_len, head_dim / 2] each, float32.

    They lie on the CPU whatever the default device is, so that a model built on the meta device has them.
    """
    # float32 throughout, as in Meta's code: trained weights expect its rounding.
    exponents = torch.arange(0, head_dim, 2, device="cpu", dtype=torch.float32) / head_dim
    frequencies = 1.0 / theta**exponents
    if scaling is not None:
        frequencies = scale_frequencies(frequencies, scaling)
    positions = torch.arange(max_seq_len, device="cpu", dtype=torch.float32)
    angles = torch.outer(positions, frequencies)
    return angles.cos(), angles.sin()


def scale_frequencies(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3.1's stretching of low frequencies, of any shape; see `RopeScaling`."""
    num_periods = scaling.original_max_position * frequencies / (2 * math.pi)
    kept = (num_periods - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0, 1)
    return kept * frequencies + (1 - kept) * frequencies / scaling.factor


class Attention(nn.Module):
    """Causal grouped-query attention."""

    def __init__(self, size: LlamaSize, rope: RotaryEmbedding) -> None:
        super().__init__()
        self.head_dim = size.head_dim
        kv_dim = size.num_kv_heads * size.head_dim
        self.wq = nn.Linear(size.dim, size.dim, bias=False)
        self.wk = nn.Linear(size.dim, kv_dim, bias=False)
        self.wv = nn.Linear(size.dim, kv_dim, bias=False)
        self.wo = nn.Linear(size.dim, size.dim, bias=False)
        self.rope = rope

    def forward(self, x_BSD: Tensor) -> Tensor:
        # The number of heads is inferred: under tensor parallelism a rank has some of them.
        heads = (-1, self.head_dim)
        q_BSHE = self.rope(self.wq(x_BSD).unflatten(-1, heads))
        k_BSKE = self.rope(self.wk(x_BSD).unflatten(-1, heads))
        v_BSKE = self.wv(x_BSD).unflatten(-1, heads)
        out_BHSE = causal_attention(q_BSHE.transpose(1, 2), k_BSKE.transpose(1, 2), v_BSKE.transpose(1, 2))
        return self.wo(out_BHSE.transpose(1, 2).flatten(-2))


def causal_attention(q_BHSE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor) -> Tensor:
    """Attention of each position to itself and what is before it, [B, H, S, E]. H is a multiple of K."""
    if q_BHSE.is_cuda and q_BHSE.dtype == torch.float32:
        # CUDA's only fused kernel for float32 takes as many key as query heads; grouped ones would fall to one that
        # stores all S x S scores.
        num_groups = q_BHSE.shape[1] // k_BKSE.shape[1]
        k_BKSE, v_BKSE = (x.repeat_interleave(num_groups, dim=1) for x in (k_BKSE, v_BKSE))
    grouped = q_BHSE.shape[1] != k_BKSE.shape[1]
    return F.scaled_dot_product_attention(q_BHSE, k_BKSE, v_BKSE, is_causal=True, enable_gqa=grouped)


class FeedForward(nn.Module):
    """SwiGLU (arXiv 2002.05202)."""

    def __init__(self, size: LlamaSize) -> None:
        super().__init__()
        self.w1 = nn.Linear(size.dim, size.ffn_hidden_dim, bias=False)
        self.w2 = nn.Linear(size.ffn_hidden_dim, size.dim, bias=False)
        self.w3 = nn.Linear(size.dim, size.ffn_hidden_dim, bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x_BSD)) * self.w3(x_BSD))


class TransformerBlock(nn.Module):
    def __init__(self, size: LlamaSize, rope: RotaryEmbedding) -> None:
        super().__init__()
        self.attention = Attention(size, rope)
        self.feed_forward = FeedForward(size)
        self.attention_norm = nn.RMSNorm(size.dim, eps=size.norm_eps)
        self.ffn_norm = nn.RMSNorm(size.dim, eps=size.norm_eps)

    def forward(self, x_BSD: Tensor) -> Tensor:
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD))
        return x_BSD + self.feed_forward(self.ffn_norm(x_BSD))


class OutputHead(nn.Linear):
    """Logits; or what `instead` makes of hidden states [B, S, D] and weight [V, D], such as a loss."""

    def forward(self, x_BSD: Tensor, instead: Callable[[Tensor, Tensor], Any] | None = None) -> Any:
        return super().forward(x_BSD) if instead is None else instead(x_BSD, self.weight)


class Llama(nn.Module):
    """Token ids in, logits out. Weights come from `models.llama.initialization` or a checkpoint.

    Args:
        size: shapes and constants.
        max_seq_len: the most tokens of a sequence; the rotary table is this long.
    """

    def __init__(self, size: LlamaSize, max_seq_len: int) -> None:
        super().__init__()
        self.max_seq_len = max_seq_len
        rope = RotaryEmbedding(size, max_seq_len)
        self.tok_embeddings = nn.Embedding(size.vocab_size, size.dim)
        self.layers = nn.ModuleList(TransformerBlock(size, rope) for _ in range(size.num_layers))
        self.norm = nn.RMSNorm(size.dim, eps=size.norm_eps)
        self.output = OutputHead(size.dim, size.vocab_size, bias=False)
        if size.tie_embeddings:
            self.output.weight = self.tok_embeddings.weight

    def forward(self, tokens_BS: Tensor, instead: Callable[[Tensor, Tensor], Any] | None = None) -> Any:
        """Logits [B, S, V] in the dtype of the weights, for token ids of int64 or int32.

        Args:
            instead: if given, called with the last hidden states [B, S, D] and the head's weight [V, D], inside
                whatever gathers that weight; its result is returned.

        Raises:
            ValueError: the sequence is longer than the rotary table.
        """
        if tokens_BS.shape[1] > self.max_seq_len:
            raise ValueError(
                f"a sequence of {tokens_BS.shape[1]} tokens: this model was built for at most {self.max_seq_len}; "
                "build it with a larger max_seq_len"
            )
        x_BSD = self.tok_embeddings(tokens_BS)
        for layer in self.layers:
            x_BSD = layer(x_BSD)
        return self.output(self.norm(x_BSD), *([] if instead is None else [instead]))
