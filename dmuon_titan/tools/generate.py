"""Continues a text with a model, token by token, whether the model is whole or sharded over ranks.

Shape legend: C tokens of the context, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from dmuon_titan.data.tokenizer import Tokenizer


@torch.no_grad()
def generate(
    model_forward: Callable[[Tensor], Tensor],
    tokenizer: Tokenizer,
    prompt: str,
    num_tokens: int,
    *,
    seed: int,
    max_context: int,
    device: torch.device | str,
    temperature: float = 1.0,
    top_k: int | None = None,
    multiple_of: int = 1,
) -> str:
    """The prompt and its continuation by at most `num_tokens` tokens, less if the document ends before.

    Every rank of the default process group calls it with the same arguments and returns the same text. Nothing is
    cached between tokens: a sharded model is run as in training.

    Args:
        model_forward: token ids [1, C] int64 -> logits [1, C, V], which may be a DTensor. V may exceed the tokenizer's
            vocabulary.
        seed: of the draws, on the CPU.
        max_context: the most tokens that the model is given; earlier ones are forgotten.
        device: where the model takes its ids.
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: draw among this many likeliest tokens. None: among all.
        multiple_of: what C must be a multiple of, for a model that cuts sequences; it divides `max_context`.

    Raises:
        ValueError: temperature is negative, or top_k or max_context is not positive.
    """
    if temperature < 0 or max_context < 1 or (top_k is not None and top_k < 1):
        raise ValueError(f"temperature {temperature}, top_k {top_k}, max_context {max_context}: out of range")
    ends = [token for token in (tokenizer.eos_id, tokenizer.bos_id) if token is not None]
    # Without a prompt, what stands between two documents lets a new one begin.
    tokens = tokenizer.encode(prompt) or ends[:1] or [0]
    generator = torch.Generator(device="cpu").manual_seed(seed)
    # One shape for all tokens, for some attention kernels are planned anew for each. What pads it on the right is
    # invisible to the positions before it.
    length = -(-(len(tokens) + num_tokens) // multiple_of) * multiple_of
    context_1C = torch.zeros(1, min(max_context, length), dtype=torch.int64, device=device)
    # A compiled model would be compiled once more for this shape, which takes longer than the sample.
    with torch.compiler.set_stance("force_eager"):
        for _ in range(num_tokens):
            recent = tokens[-context_1C.shape[1] :]
            context_1C[0, : len(recent)] = torch.tensor(recent)
            logits_V = _whole(model_forward(context_1C)[0, len(recent) - 1])[: tokenizer.vocab_size]
            token = _agreed(_draw(logits_V.float().cpu(), temperature, top_k, generator), device)
            if token in ends:
                break
            tokens.append(token)
    return tokenizer.decode(tokens)


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _draw(logits_V: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits_V.argmax())
    if top_k is not None and top_k < len(logits_V):
        logits_V[logits_V < logits_V.topk(top_k).values[-1]] = -torch.inf
    probabilities_V = torch.softmax(logits_V / temperature, dim=-1)
    return int(torch.multinomial(probabilities_V, 1, generator=generator))


def _agreed(token: int, device: torch.device | str) -> int:
    """Rank 0's token: logits that differ in a last bit must not let the ranks' texts part."""
    if not dist.is_initialized():
        return token
    agreed = torch.tensor([token], device=device)
    dist.broadcast(agreed, src=0)
    return int(agreed.item())
