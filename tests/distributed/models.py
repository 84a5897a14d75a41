"""A small model with every kind of parameter that composition has to get right, and its data."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, DIM = 37, 24
QKV_ROWS = (12, 6, 6)

LINEARS = ("mix", "qkv", "odd", "join", "up", "down", "narrow", "widen")
SPLIT = {"*.qkv.weight": QKV_ROWS}


class Block(nn.Module):
    """Square, tall, wide and tiny matrices, some fused, stacks of matrices, a [1, N] matrix and vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(DIM)
        self.mix = nn.Linear(DIM, DIM, bias=False)
        self.qkv = nn.Linear(DIM, sum(QKV_ROWS), bias=False)
        self.odd = nn.Linear(7, 7, bias=False)
        self.join = nn.Linear(64, 18, bias=False)
        self.up = nn.Linear(DIM, 64)
        self.down = nn.Linear(64, DIM, bias=False)
        self.narrow = nn.Linear(64, 3, bias=False)
        self.widen = nn.Linear(3, 64, bias=False)
        self.gate = nn.Linear(DIM, 1, bias=False)
        self.experts = nn.Parameter(torch.empty(3, 5, DIM))
        self.back = nn.Parameter(torch.empty(3, DIM, 5))

    def forward(self, x_BSD: Tensor) -> Tensor:
        h_BSD = self.mix(self.norm(x_BSD))
        wide = F.silu(self.up(h_BSD))
        h_BSD = h_BSD + self.down(wide + self.widen(self.narrow(wide)))
        q, k, v = self.qkv(h_BSD).split(QKV_ROWS, -1)
        joined = F.pad(torch.tanh(self.join(wide)), (0, DIM - 18)) + F.pad(self.odd(h_BSD[..., :7]), (DIM - 7, 0))
        h_BSD = h_BSD + torch.cat([q, k * v, v], -1) + joined
        stack = torch.einsum("bsd,ehd->bseh", h_BSD, self.experts)
        h_BSD = h_BSD + torch.einsum("bseh,edh->bsd", torch.tanh(stack), self.back)
        return x_BSD + torch.sigmoid(self.gate(x_BSD)) * h_BSD


class SmallModel(nn.Module):
    def __init__(self, num_blocks: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Block() for _ in range(num_blocks))
        self.norm = nn.RMSNorm(DIM)
        self.output = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        x_BSD = self.embedding(tokens_BS)
        for layer in self.layers:
            x_BSD = layer(x_BSD)
        return self.output(self.norm(x_BSD))


def initial_rows(name: str, shape: torch.Size, start: int, stop: int) -> Tensor:
    """Rows of a parameter as a function of its name alone."""
    generator = torch.Generator().manual_seed(sum(ord(c) * (i + 1) for i, c in enumerate(name)))
    values = torch.randn(shape, generator=generator) * 0.2
    if name.endswith("norm.weight"):
        values += 1
    return values[start:stop]


@torch.no_grad()
def initialize(model: nn.Module) -> None:
    """The plain model with the values that `dmuon.materialize(model, initial_rows, ...)` gives."""
    for name, param in model.named_parameters():
        param.copy_(initial_rows(name, param.shape, 0, param.shape[0]))


def is_dedicated(name: str) -> bool:
    """What the tests' predicate chooses."""
    return name.startswith("layers.") and any(
        name.endswith(part) for part in (*(f"{linear}.weight" for linear in LINEARS), "experts", "back")
    )


def batch(step: int, num_rows: int = 64) -> tuple[Tensor, Tensor]:
    """Tokens and targets [num_rows, 6] of a global batch."""
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(VOCAB, (num_rows, 6), generator=generator)
    return tokens, (tokens * 3 + 1) % VOCAB


def loss_of(model: nn.Module, tokens_BS: Tensor, targets_BS: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens_BS).flatten(0, 1).float(), targets_BS.flatten())
