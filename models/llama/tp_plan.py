"""How a Llama is cut over the ranks of a tensor-parallel axis, after Megatron (arXiv 1909.08053, 2205.05198).

Between blocks each rank has its part of the sequence; inside attention and feed-forward it has the whole sequence and
its part of the heads or features:

    tok_embeddings       rows of the vocabulary; each rank looks up what it has, the sums go to parts of the sequence
    attention_norm, ...  whole weights on parts of the sequence
    wq, wk, wv, w1, w3   rows, after gathering the sequence: outputs are this rank's heads or features
    wo, w2               columns, on those; the sums go to parts of the sequence
    output               rows: logits of this rank's part of the vocabulary, after gathering the sequence
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from models.llama.model import Llama

SEQUENCE = Shard(1)


def parallelize(model: Llama, tp_mesh: DeviceMesh, *, loss_parallel: bool) -> None:
    """Cuts the model in place: its weights become DTensors on `tp_mesh`, and so are its logits.

    Query and key-value heads, feed-forward width, vocabulary and the length of every sequence must be multiples of the
    axis's degree.

    Args:
        model: on the meta device, or with the same weights on every rank.
        tp_mesh: the tensor-parallel axis, one-dimensional.
        loss_parallel: each rank keeps the logits of its part of the vocabulary, for
            `torch.distributed.tensor.parallel.loss_parallel`. Otherwise every rank gets all of them.
    """
    plan: dict[str, ParallelStyle] = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=SEQUENCE),
        "layers.*.attention_norm": SequenceParallel(),
        "layers.*.attention": PrepareModuleInput(input_layouts=SEQUENCE, desired_input_layouts=Replicate()),
        "layers.*.attention.wq": ColwiseParallel(),
        "layers.*.attention.wk": ColwiseParallel(),
        "layers.*.attention.wv": ColwiseParallel(),
        "layers.*.attention.wo": RowwiseParallel(output_layouts=SEQUENCE),
        "layers.*.ffn_norm": SequenceParallel(),
        "layers.*.feed_forward": PrepareModuleInput(input_layouts=SEQUENCE, desired_input_layouts=Replicate()),
        "layers.*.feed_forward.w1": ColwiseParallel(),
        "layers.*.feed_forward.w2": RowwiseParallel(output_layouts=SEQUENCE),
        "layers.*.feed_forward.w3": ColwiseParallel(),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(
            input_layouts=SEQUENCE,
            output_layouts=Shard(-1) if loss_parallel else Replicate(),
            use_local_output=False,
        ),
    }
    tied = model.output.weight is model.tok_embeddings.weight
    parallelize_module(model, tp_mesh, plan)
    model.tok_embeddings.register_forward_hook(_wait_for_output)
    if tied:  # both were cut by rows, each by itself
        model.output.weight = model.tok_embeddings.weight


def _wait_for_output(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
    return _Arrived.apply(output)


class _Arrived(torch.autograd.Function):
    """Waits for the collective that a tensor comes from, and passes on what it brought.

    Such a tensor is of a class of its own, which waits at its first use. Given to a compiled block it loses its
    gradient: torch 2.13 leaves the embedding's at zero and says nothing.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.wait() if hasattr(x, "wait") else x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad
