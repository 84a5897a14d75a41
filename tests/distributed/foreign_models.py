"""Models as other people build them, each with what is dedicated, in which unit, and data that differ on every rank.

All of them call their model on one seeded batch a rank and step. What a model needs to know of the distributed run it
is told by its data alone, so that the plain model in one process does the same.

Shape legend: B batch, S sequence, D model, E experts, T tokens of one expert.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DIM, VOCAB, NUM_EXPERTS, LORA_RANK = 8, 19, 3, 2
NUM_ROWS, LENGTH = 4, 6


@dataclass(frozen=True)
class Case:
    """One person's model.

    Attributes:
        model: makes it; called under a fixed seed.
        loss: (model, step, rank) -> mean loss of this rank's batch.
        units: names of the dedicated parameters, by the unit that they belong to.
        dedicate: arguments of `dedicate_params`.
        sharded: which modules get a `fully_shard` of their own, before the root; None: FSDP2 takes no part.
    """

    model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, int, int], Tensor]
    units: Mapping[str, Sequence[str]]
    dedicate: Mapping[str, Any] = field(default_factory=dict)
    sharded: Callable[[Any], Iterable[nn.Module]] | None = lambda model: model.layers


def generator(step: int, rank: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 + 100 * step + rank)


def tokens(step: int, rank: int) -> Tensor:
    """[B, S] integers."""
    return torch.randint(VOCAB, (NUM_ROWS, LENGTH), generator=generator(step, rank))


def next_token_loss(logits_BSV: Tensor, tokens_BS: Tensor) -> Tensor:
    return F.cross_entropy(logits_BSV.flatten(0, 1).float(), (3 * tokens_BS + 1).flatten() % VOCAB)


def language_loss(model: nn.Module, step: int, rank: int) -> Tensor:
    return next_token_loss(model(tokens(step, rank)), tokens(step, rank))


def weights(module: str, *names: str) -> list[str]:
    return [f"{module}.{name}.weight" for name in names]


class Mlp(nn.Module):
    """x + second(tanh(first(norm(x)))), the two matrices under names of the caller's choice."""

    def __init__(self, first: str = "up", second: str = "down", hidden: int = 2 * DIM) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(DIM)
        self.first, self.second = first, second
        setattr(self, first, nn.Linear(DIM, hidden, bias=False))
        setattr(self, second, nn.Linear(hidden, DIM, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        return x + getattr(self, self.second)(torch.tanh(getattr(self, self.first)(self.norm(x))))


class Transformer(nn.Module):
    """Token embedding, blocks that `make_block` makes, output head."""

    def __init__(self, make_block: Callable[[], nn.Module] = Mlp, num_blocks: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(make_block() for _ in range(num_blocks))
        self.output = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        x_BSD = self.embedding(tokens_BS)
        for layer in self.layers:
            x_BSD = layer(x_BSD)
        return self.output(x_BSD)


# Vision, language, action: two stacks, and a head outside of both.


class Tower(nn.Module):
    def __init__(self, stack: str, *names: str) -> None:
        super().__init__()
        self.stack = stack
        setattr(self, stack, nn.ModuleList(Mlp(*names) for _ in range(4)))

    def forward(self, x_BSD: Tensor) -> Tensor:
        for block in getattr(self, self.stack):
            x_BSD = block(x_BSD)
        return x_BSD


class ActionLayer(Mlp):
    def __init__(self) -> None:
        super().__init__("in_proj", "out_proj")
        self._is_action_layer = True


class VisionLanguageAction(nn.Module):
    """(patches [B, P, 5], tokens [B, S]) -> actions [B, 3]. The language model is defined first and runs last."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.language = Tower("layers", *names)
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.vision = Tower("blocks", *names)
        self.patch_embedding = nn.Linear(5, DIM)
        self.action_head = nn.Sequential(ActionLayer(), ActionLayer())
        self.action = nn.Linear(DIM, 3)

    def forward(self, patches_BPC: Tensor, tokens_BS: Tensor) -> Tensor:
        seen_BPD = self.vision(self.patch_embedding(patches_BPC))
        x_BSD = self.language(torch.cat([seen_BPD, self.embedding(tokens_BS)], dim=1))
        return self.action(self.action_head(x_BSD).mean(1))


def action_loss(model: nn.Module, step: int, rank: int) -> Tensor:
    patches_BPC = torch.randn(NUM_ROWS, 3, 5, generator=generator(step, rank))
    return F.mse_loss(model(patches_BPC, tokens(step, rank)), patches_BPC[:, 0, :3])


def towers_and_head(model: VisionLanguageAction) -> list[nn.Module]:
    return [*model.vision.blocks, *model.language.layers, *model.action_head]


HEAD_UNITS = {f"action_head.{i}": weights(f"action_head.{i}", "in_proj", "out_proj") for i in range(2)}
TOWER_UNITS = {
    f"{stack}.{i}": weights(f"{stack}.{i}", "up", "down")
    for stack in ("language.layers", "vision.blocks")
    for i in range(4)
}


# Mixtures of experts.


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, 2 * DIM, bias=False)
        self.down = nn.Linear(2 * DIM, DIM, bias=False)

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x_TD)))


class Mixture(nn.Module):
    """Each token goes to one expert of its own, weighed by the router.

    call_all: experts without tokens are called too, on no rows, as those with collectives inside must be.
    """

    def __init__(self, call_all: bool) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(DIM)
        self.router = nn.Linear(DIM, NUM_EXPERTS, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(NUM_EXPERTS))
        self.call_all = call_all

    def forward(self, x_BSD: Tensor, chosen_BS: Tensor) -> Tensor:
        h_BSD = self.norm(x_BSD)
        share_BSE = self.router(h_BSD).softmax(-1)
        y_BSD = torch.zeros_like(x_BSD)
        for index, expert in enumerate(self.experts):
            mask_BS = chosen_BS == index
            if mask_BS.any() or (self.call_all and index != NUM_EXPERTS - 1):
                routed_TD = expert(h_BSD[mask_BS]) * share_BSE[mask_BS][:, index, None]
                y_BSD = y_BSD.index_put((mask_BS,), routed_TD, accumulate=True)
        return x_BSD + y_BSD


class MixtureTransformer(nn.Module):
    def __init__(self, call_all: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Mixture(call_all) for _ in range(2))
        self.output = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens_BS: Tensor, chosen_BS: Tensor) -> Tensor:
        x_BSD = self.embedding(tokens_BS)
        for layer in self.layers:
            x_BSD = layer(x_BSD, chosen_BS)
        return self.output(x_BSD)


def mixture_loss(model: nn.Module, step: int, rank: int) -> Tensor:
    """Step 0: rank 0 has tokens for expert 0 alone, the others for the first two. Step 1: no rank has any for the
    first. Later all have all. The last expert is used from step 2 on."""
    tokens_BS = tokens(step, rank)
    chosen_BS = tokens_BS % NUM_EXPERTS
    if step < 2:
        chosen_BS = tokens_BS % 2 * (rank > 0) if step == 0 else torch.ones_like(tokens_BS)
    return next_token_loss(model(tokens_BS, chosen_BS), tokens_BS)


class Stacks(nn.Module):
    """All experts in two 3-D parameters, every token through each of them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(DIM)
        self.router = nn.Linear(DIM, NUM_EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(NUM_EXPERTS, DIM, 2 * DIM) * 0.3)
        self.down = nn.Parameter(torch.randn(NUM_EXPERTS, 2 * DIM, DIM) * 0.3)

    def forward(self, x_BSD: Tensor) -> Tensor:
        h_BSD = self.norm(x_BSD)
        hidden = torch.tanh(torch.einsum("bsd,edh->bseh", h_BSD, self.up))
        share_BSE = self.router(h_BSD).softmax(-1)
        return x_BSD + torch.einsum("bseh,ehd,bse->bsd", hidden, self.down, share_BSE)


# Stages of blocks, as in hierarchical vision models: what follows the blocks of a stage lies in the stage's own unit.


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(DIM, DIM, bias=False)
        self.blocks = nn.ModuleList(Mlp() for _ in range(2))
        self.after = nn.Linear(DIM, DIM, bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        x_BSD = self.before(x_BSD)
        for block in self.blocks:
            x_BSD = block(x_BSD)
        return self.after(torch.tanh(x_BSD))


STAGE_UNITS = {f"layers.{i}": weights(f"layers.{i}", "before", "after") for i in range(2)}
STAGE_UNITS |= {
    f"layers.{i}.blocks.{j}": weights(f"layers.{i}.blocks.{j}", "up", "down") for i in range(2) for j in range(2)
}


# Adapters on frozen weights.


class WithAdapter(nn.Module):
    """A frozen projection, and what a trained product of two thin ones adds to it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.lora_a = nn.Linear(DIM, LORA_RANK, bias=False)
        self.lora_b = nn.Linear(LORA_RANK, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.lora_b(self.lora_a(x))


def adapters_in_place() -> nn.Module:
    model = Transformer().requires_grad_(False)
    for layer in model.layers:
        layer.up = WithAdapter(layer.up)
    return model


class Adapter(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(DIM, LORA_RANK, bias=False), nn.Linear(LORA_RANK, DIM, bias=False))


class AdaptersBeside(nn.Module):
    """Adapters in a dictionary of the model's own, under names in which no `layers.N` occurs."""

    def __init__(self) -> None:
        super().__init__()
        self.base = Transformer().requires_grad_(False)
        self.adapters = nn.ModuleDict({f"layer_{i}": Adapter() for i in range(3)})

    def forward(self, tokens_BS: Tensor) -> Tensor:
        x_BSD = self.base.embedding(tokens_BS)
        for layer, adapter in zip(self.base.layers, self.adapters.values(), strict=True):
            x_BSD = layer(x_BSD) + adapter(x_BSD)
        return self.base.output(x_BSD)


# Tied matrices.


class TiedMlp(Mlp):
    """Both of its matrices are one."""

    def __init__(self) -> None:
        super().__init__(hidden=DIM)
        self.down.weight = self.up.weight


def tied_across_blocks() -> nn.Module:
    """The first and the last block share one matrix; each has another of its own."""
    model = Transformer()
    model.layers[2].up.weight = model.layers[0].up.weight
    return model


# GPT-2: fused queries, keys and values, blocks under `transformer.h`, output head tied to the embedding.


class Gpt2Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        # No bias: that of the keys has no gradient but rounding errors, which AdamW would make large.
        self.c_attn, self.c_proj = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))

    def forward(self, x_BSD: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.c_attn(self.ln_1(x_BSD)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
        x_BSD = x_BSD + self.c_proj(mixed)
        return x_BSD + self.mlp(self.ln_2(x_BSD))


class Gpt2(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCAB, DIM),
                "h": nn.ModuleList(Gpt2Block() for _ in range(2)),
                "ln_f": nn.LayerNorm(DIM),
            }
        )
        self.lm_head = nn.Linear(DIM, VOCAB, bias=False)
        self.lm_head.weight = self.transformer.wte.weight

    def forward(self, tokens_BS: Tensor) -> Tensor:
        x_BSD = self.transformer.wte(tokens_BS)
        for block in self.transformer.h:
            x_BSD = block(x_BSD)
        return self.lm_head(self.transformer.ln_f(x_BSD))
