"""A lower bound of the device memory that one rank of a job needs, from shapes alone. Pure, and without torch.

Within five percent of the most that torch allocates in the runs of tests/unit/test_memory.py, and it reserves more:
what a job surely lacks is refused before it starts, and a close fit is left to the allocator.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the configuration's checks import this module
    from dmuon_titan.config.schema import JobConfig
    from models.llama.sizes import LlamaSize

GIB = 2**30
_FP32 = 4
# Newton-Schulz keeps a batch of matrices in half precision, and what they become next; large matrices come singly.
_ORTHOGONALIZED_AT_ONCE = 2**26
_ORTHOGONALIZATION_BYTES = 4
_MOST_OWNERS = 8  # of one matrix
LOGITS_AT_ONCE = {"cuda": 2**29, "cpu": 2**26}
"""Logits that the loss works on at once: 1 GiB of them in half precision on a GPU, 256 MiB in float32 on a CPU. Of
vocabularies that are cut over ranks the CPU's number everywhere."""


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes that one rank needs at least, at the fullest moment of a step.

    state_bytes: masters, optimizer state, gradients, compute copies and gathered weights.
    activation_bytes: what forward keeps for backward of one micro-batch, logits included.
    """

    state_bytes: int
    activation_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.state_bytes + self.activation_bytes


@dataclass(frozen=True)
class _Shapes:
    """Numbers of elements, whole model: matrices with owners, all else; one block and the embedding, or the head.

    largest_matrix: what an owner of the largest one has at least.
    """

    dedicated: int
    symmetric: int
    largest_matrix: int
    block: int
    head: int


def memory_need(
    config: JobConfig, size: LlamaSize, degrees: tuple[int, int, int], device_type: str = "cuda"
) -> MemoryNeed:
    """What the fullest rank of a (replicate, shard, tp) mesh needs, if owners' shares are as equal as they can be.

    Two moments compete. At the loss there are the activations of a micro-batch, its logits and, if batches are
    accumulated, gradients. At the end of backward there are gradients and what reduces or orthogonalises them.
    """
    shapes, num_ranks = _count(config, size), math.prod(degrees)
    persistent = _persistent_bytes(config, shapes, degrees)
    gathered = _gathered_bytes(config, shapes, size.num_layers, degrees)
    gradients = _gradient_bytes(shapes, degrees)
    activations = activation_bytes(config, size, degrees[2], device_type)
    at_loss = gathered + (gradients if _accumulates(config, num_ranks // degrees[2]) else 0)
    after_backward = gradients + max(
        gathered + _reduction_bytes(config, shapes, degrees),
        _ORTHOGONALIZATION_BYTES * min(_ORTHOGONALIZED_AT_ONCE, _owned(shapes, degrees)),
    )
    if at_loss + activations >= after_backward:
        return MemoryNeed(persistent + at_loss, activations)
    return MemoryNeed(persistent + after_backward, 0)


def activation_bytes(config: JobConfig, size: LlamaSize, tp: int = 1, device_type: str = "cuda") -> int:
    """Kept by forward for backward: each block as activation checkpointing has it, and what else there is at the loss,
    or when backward has made one block whole: that, the gradients of the head's weight and of the hidden states.

    A block keeps, in elements a token: input, both norms' results, q, k, v, attention's result twice (before and
    after its heads are joined), the second residual, and four of the feed-forward's width; compiled, two of those
    are computed again. "op" keeps the input and the results of every second product and of attention, "op_all" of
    every product.

    Each of `tp` ranks has its part of these, but all of what is gathered for products, the norms' results, and of
    w2's result, which is kept before it is summed over the ranks; "op" keeps the two sums too.
    """
    options = config.activation_checkpoint
    compiled = config.compile.components if config.compile.enable else []
    dim, kv_dim, ffn_dim = size.dim, size.num_kv_heads * size.head_dim, size.ffn_hidden_dim
    whole = 2 * dim + (5 * dim + 2 * kv_dim + (2 if "model" in compiled else 4) * ffn_dim) // tp
    by_operator = dim + ((3 if tp == 1 else 5) * dim + kv_dim + ffn_dim) // tp
    by_operator -= dim // tp if "model" in compiled else 0  # w2's result, which backward does not need
    kept = {"none": whole, "full": dim // tp, "selective": by_operator}[options.mode]
    if options.mode == "selective" and options.selective_ac_option == "op_all":
        kept += (dim + kv_dim + ffn_dim) // tp
    elif options.mode == "selective" and options.selective_ac_option != "op":
        every = int(options.selective_ac_option)
        kept = (dim // tp + (every - 1) * whole) // every
    copy = _copy_bytes(config)
    num_tokens = config.training.local_batch_size * config.training.seq_len
    one_whole = copy * (num_tokens * (whole - kept + size.dim // tp) + size.vocab_size * size.dim // tp)
    return copy * num_tokens * kept * size.num_layers + max(_loss_bytes(config, size, tp, device_type), one_whole)


def _loss_bytes(config: JobConfig, size: LlamaSize, tp: int, device_type: str) -> int:
    """Logits, and what the loss makes of them while it is computed.

    On one tp rank: a chunk of logits, which turn into their gradient; and the gradients of weight and hidden states. On
    several: all logits and their gradient. Not compiled also a chunk's log-softmax in float32, or the chunk, that and
    their gradient.
    """
    copy, num_tokens = _copy_bytes(config), config.training.local_batch_size * config.training.seq_len
    num_logits = num_tokens * size.vocab_size
    compiled = config.compile.enable and "loss" in config.compile.components
    if tp > 1:
        num_logits //= 1 if config.parallelism.disable_loss_parallel else tp
        return 2 * copy * num_logits + (0 if compiled else 3 * _FP32 * min(num_logits, LOGITS_AT_ONCE["cpu"]))
    chunk = min(num_logits, LOGITS_AT_ONCE[device_type])
    weight_gradient = (copy if chunk == num_logits else _FP32) * size.vocab_size * size.dim
    return (copy + (0 if compiled else _FP32)) * chunk + weight_gradient + copy * num_tokens * size.dim


def _count(config: JobConfig, size: LlamaSize) -> _Shapes:
    shapes = size.parameter_shapes()
    numels = {name: math.prod(shape) for name, shape in shapes.items()}
    in_blocks = {name: numel for name, numel in numels.items() if name.startswith("layers.")}
    matrices = {name: numel for name, numel in in_blocks.items() if len(shapes[name]) > 1}
    if config.optimizer.name != "Muon":
        matrices = {}
    dedicated, total = sum(matrices.values()), sum(numels.values())
    return _Shapes(
        dedicated=dedicated,
        symmetric=total - dedicated,
        largest_matrix=max(matrices.values(), default=0) // min(config.optimizer.max_joint_owners, _MOST_OWNERS),
        block=sum(in_blocks.values()) // size.num_layers,
        head=size.vocab_size * size.dim,
    )


def _copy_bytes(config: JobConfig) -> int:
    return 2 if config.training.mixed_precision_param == "bfloat16" else _FP32


def _owned(shapes: _Shapes, degrees: Sequence[int]) -> int:
    """Elements of the fullest owner."""
    replicate, shard, tp = degrees
    return max(math.ceil(shapes.dedicated / (replicate * shard)), shapes.largest_matrix) // tp


def _persistent_bytes(config: JobConfig, shapes: _Shapes, degrees: Sequence[int]) -> int:
    """Masters with momentum on owners, compute copies in the owners' columns, masters with two moments on shards."""
    _, shard, tp = degrees
    owned = _owned(shapes, degrees)
    column = max(shapes.dedicated // shard // tp, owned)
    copies = column if _copy_bytes(config) < _FP32 else column - owned  # a float32 master serves as its own copy
    return 2 * _FP32 * owned + _copy_bytes(config) * copies + 3 * _FP32 * shapes.symmetric // shard // tp


def _gathered_bytes(config: JobConfig, shapes: _Shapes, num_layers: int, degrees: Sequence[int]) -> int:
    """Weights that the ends of forward and backward compute with, beyond those that stay: a block, and embedding or
    head."""
    _, shard, tp = degrees
    if shard == 1 and _copy_bytes(config) == _FP32:
        return 0
    blocks = (num_layers if config.parallelism.fsdp_reshard_after_forward == "never" else 1) * shapes.block
    own_share = 1 / shard if shapes.dedicated else 0
    return int(_copy_bytes(config) * (blocks * (1 - own_share) + shapes.head) / tp)


def _gradient_bytes(shapes: _Shapes, degrees: Sequence[int]) -> int:
    return _FP32 * (_owned(shapes, degrees) + shapes.symmetric // degrees[1] // degrees[2])


def _reduction_bytes(config: JobConfig, shapes: _Shapes, degrees: Sequence[int]) -> int:
    """Gradients on their way, one block or the head: as computed, and as sent."""
    replicate, shard, tp = degrees
    if replicate * shard == 1:
        return 0
    reduce = 2 if config.training.mixed_precision_reduce == "bfloat16" else _FP32
    return (_copy_bytes(config) + reduce) * max(shapes.block, shapes.head) // tp


def _accumulates(config: JobConfig, num_data_parallel_ranks: int) -> bool:
    training = config.training
    return training.global_batch_size > training.local_batch_size * num_data_parallel_ranks
