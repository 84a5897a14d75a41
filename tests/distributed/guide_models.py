"""What the guides take as given: small models of the shapes that they write about, meshes, data.

Each model takes one argument and returns one tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import dmuon

VOCAB, DIM, NUM_HEADS, NUM_KV_HEADS, NUM_ACTIONS = 37, 32, 4, 2, 5
QKV = (DIM, DIM * NUM_KV_HEADS // NUM_HEADS, DIM * NUM_KV_HEADS // NUM_HEADS)
"""Rows of the queries, keys and values in a fused weight."""


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(DIM, sum(QKV), bias=False)
        self.out_proj = nn.Linear(DIM, DIM, bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (-1, DIM // NUM_HEADS)).transpose(1, 2) for part in self.qkv(x_BSD).split(QKV, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out_proj(mixed.transpose(1, 2).flatten(-2))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up_proj = nn.Linear(DIM, 3 * DIM)
        self.down_proj = nn.Linear(3 * DIM, DIM)

    def forward(self, x_BSD: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.up_proj(x_BSD)))


class Experts(nn.Module):
    """Three experts as two stacks of matrices; each token goes to the one that the router prefers."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(DIM, 3, bias=False)
        self.up_proj = nn.Parameter(torch.randn(3, DIM, 2 * DIM) * 0.2)
        self.down_proj = nn.Parameter(torch.randn(3, 2 * DIM, DIM) * 0.2)

    def forward(self, x_BSD: Tensor) -> Tensor:
        weight, chosen = self.router(x_BSD).softmax(-1).max(-1)
        y_BSD = torch.zeros_like(x_BSD)
        for expert, (up, down) in enumerate(zip(self.up_proj, self.down_proj, strict=True)):
            y_BSD = torch.where((chosen == expert)[..., None], F.silu(x_BSD @ up) @ down, y_BSD)
        return weight[..., None] * y_BSD


class Block(nn.Module):
    def __init__(self, mlp: type[nn.Module] = Mlp) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(DIM)
        self.attention = Attention()
        self.mlp_norm = nn.RMSNorm(DIM)
        self.mlp = mlp()

    def forward(self, x_BSD: Tensor) -> Tensor:
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD))
        return x_BSD + self.mlp(self.mlp_norm(x_BSD))


class Transformer(nn.Module):
    """tokens [B, S] -> logits [B, S, VOCAB]."""

    def __init__(self, mlp: type[nn.Module] = Mlp) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Block(mlp) for _ in range(3))
        self.norm = nn.RMSNorm(DIM)
        self.output: nn.Module = nn.Linear(DIM, VOCAB, bias=False)

    def hidden(self, x_BSD: Tensor) -> Tensor:
        for layer in self.layers:
            x_BSD = layer(x_BSD)
        return self.norm(x_BSD)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        return self.output(self.hidden(self.embedding(tokens_BS)))


class MixtureTransformer(Transformer):
    """The same with experts, and under names that say nothing to dmuon: `stages` in place of `layers`."""

    def __init__(self) -> None:
        super().__init__(Experts)
        self.stages = self.layers
        del self.layers

    def hidden(self, x_BSD: Tensor) -> Tensor:
        for stage in self.stages:
            x_BSD = stage(x_BSD)
        return self.norm(x_BSD)


class Vision(nn.Module):
    """patches [B, P, 12] -> [B, P, DIM]."""

    def __init__(self) -> None:
        super().__init__()
        self.patch_embedding = nn.Linear(12, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, patches_BPC: Tensor) -> Tensor:
        x_BPD = self.patch_embedding(patches_BPC)
        for block in self.blocks:
            x_BPD = block(x_BPD)
        return x_BPD


class VisionLanguageModel(nn.Module):
    """(patches, tokens) -> logits of the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.vision = Vision()
        self.connector = nn.Linear(DIM, DIM)
        self.language = Transformer()

    def hidden(self, patches_BPC: Tensor, tokens_BS: Tensor) -> Tensor:
        seen_BPD = self.connector(self.vision(patches_BPC))
        return self.language.hidden(torch.cat([seen_BPD, self.language.embedding(tokens_BS)], dim=1))

    def forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
        return self.language.output(self.hidden(*inputs)[:, inputs[0].shape[1] :])


class ActionLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self._is_action_layer = True
        self.in_proj = nn.Linear(DIM, 2 * DIM)
        self.out_proj = nn.Linear(2 * DIM, DIM)

    def forward(self, x_BD: Tensor) -> Tensor:
        return x_BD + self.out_proj(F.gelu(self.in_proj(x_BD)))


class ActionModel(nn.Module):
    """Vision, language, action: (patches, tokens) -> actions [B, NUM_ACTIONS]. The head lies outside all layers."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = VisionLanguageModel()
        self.backbone.language.output = nn.Identity()
        self.action_head = nn.Sequential(ActionLayer(), ActionLayer())
        self.action = nn.Linear(DIM, NUM_ACTIONS)

    def forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
        return self.action(self.action_head(self.backbone(inputs)[:, -1]))


def frozen_action_model() -> ActionModel:
    """Only the head and the action itself are trained."""
    model = ActionModel()
    model.backbone.requires_grad_(False)
    return model


class LoraLinear(nn.Module):
    """A frozen weight and a trained product of two thin ones."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_a = nn.Linear(base.in_features, rank, bias=False)
        self.lora_b = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.lora_b(self.lora_a(x))


def with_lora(model: Transformer) -> Transformer:
    """Freezes all but new adapters on the projections of every layer."""
    model.requires_grad_(False)
    for layer in model.layers:
        for module, attribute in ((layer.attention, "qkv"), (layer.mlp, "up_proj")):
            setattr(module, attribute, LoraLinear(getattr(module, attribute)))
    return model


def tokens_and_targets(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(VOCAB, (4, 6), generator=generator)
    return tokens, (3 * tokens + 1) % VOCAB


def images_and_text(generator: torch.Generator) -> tuple[Any, Tensor]:
    tokens, targets = tokens_and_targets(generator)
    return (torch.randn(4, 3, 12, generator=generator), tokens), targets


def images_and_actions(generator: torch.Generator) -> tuple[Any, Tensor]:
    inputs, _ = images_and_text(generator)
    return inputs, torch.tanh(inputs[0].mean(dim=(1, 2)))[:, None].expand(4, NUM_ACTIONS)


def cross_entropy(logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
    return F.cross_entropy(logits_BSV.flatten(0, 1).float(), targets_BS.flatten())


@dataclass
class Setup:
    """What a page takes as given: a model and, by the names of its axes, a mesh over all ranks."""

    model: Callable[[], nn.Module]
    data: Callable[[torch.Generator], tuple[Any, Tensor]] = tokens_and_targets
    loss_fn: Callable[[Tensor, Tensor], Tensor] = cross_entropy
    axes: dict[str, int] = field(default_factory=lambda: {"shard": -1})

    def names(self) -> dict[str, Any]:
        """The names that its snippets may use."""
        sizes = [dist.get_world_size() if size == -1 else size for size in self.axes.values()]
        mesh = init_device_mesh("cpu", tuple(sizes), mesh_dim_names=tuple(self.axes))
        torch.manual_seed(0)
        names = {"torch": torch, "dmuon": dmuon, "fully_shard": fully_shard, "loss_fn": self.loss_fn, "device": "cpu"}
        names |= {kind.__name__: kind for kind in (Transformer, Block, Attention, Experts, ActionLayer)}
        names |= {"model": self.model(), "loader": [self.batch(step, self.data_parallel_index) for step in range(4)]}
        if self.tp_degree > 1:
            mlp_plan = {"up_proj": ColwiseParallel(), "down_proj": RowwiseParallel()}
            return names | {"mesh": mesh, "dp_mesh": mesh["shard"], "tp_mesh": mesh["tp"], "mlp_plan": mlp_plan}
        if "replicate" in self.axes:
            return names | {"hsdp": mesh, "mesh": mesh["shard"], "fsdp_mesh": mesh}
        return names | {"mesh": mesh, "fsdp_mesh": mesh}

    @property
    def tp_degree(self) -> int:
        return self.axes.get("tp", 1)

    @property
    def data_parallel_index(self) -> int:
        """Of this rank's batches, which are those of its tensor-parallel neighbours too."""
        return dist.get_rank() // self.tp_degree

    def batch(self, step: int, index: int) -> tuple[Any, Tensor]:
        return self.data(torch.Generator().manual_seed(1000 * step + index))


SETUPS = {
    "transformer": Setup(Transformer),
    "hsdp": Setup(Transformer, axes={"replicate": 2, "shard": 2}),
    "mixture": Setup(MixtureTransformer),
    "multimodal": Setup(VisionLanguageModel, images_and_text),
    "action": Setup(frozen_action_model, images_and_actions, F.mse_loss),
    "lora": Setup(lambda: with_lora(Transformer())),
    "tensor_parallel": Setup(Transformer, axes={"shard": 2, "tp": 2}),
    "three_axes": Setup(Transformer, axes={"replicate": 2, "shard": 2, "tp": 2}),
}
