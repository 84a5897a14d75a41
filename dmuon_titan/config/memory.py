"""A lower bound of the device memory that one rank of a job needs, from shapes alone. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dmuon_titan.config.schema import JobConfig
from models.llama.sizes import LlamaSize

GIB = 2**30


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes that one rank needs at least.

    state_bytes: masters, optimizer state, gradients and the compute copies that stay.
    activation_bytes: what forward keeps for backward of one micro-batch, logits included.
    """

    state_bytes: int
    activation_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.state_bytes + self.activation_bytes


def memory_need(config: JobConfig, size: LlamaSize, degrees: tuple[int, int, int]) -> MemoryNeed:
    """What one rank of a (replicate, shard, tp) mesh needs, if the owners' shares are equal.

    A matrix under Muon costs its owner a float32 master, momentum and gradient, and each rank of the owner's column
    a share of the compute copies; every other element costs its FSDP2 shard master, two moments and gradient.
    """
    return MemoryNeed(_state_bytes(config, size, degrees), _activation_bytes(config, size, degrees[2]))


def _state_bytes(config: JobConfig, size: LlamaSize, degrees: tuple[int, int, int]) -> int:
    replicate, shard, tp = degrees
    copy_bytes = _copy_bytes(config)
    numels = {name: math.prod(shape) for name, shape in size.parameter_shapes().items()}
    num_dedicated = sum(numel for name, numel in numels.items() if name.startswith("layers.") and "norm" not in name)
    if config.optimizer.name != "Muon":
        num_dedicated = 0
    num_symmetric = sum(numels.values()) - num_dedicated
    keeps_copies = config.parallelism.fsdp_reshard_after_forward == "never"
    copies = num_dedicated * copy_bytes / (1 if keeps_copies else shard)
    if copy_bytes == 4 and not keeps_copies:
        copies = 0  # the master itself can serve
    return int((12 * num_dedicated / (replicate * shard) + copies + 16 * num_symmetric / shard) / tp)


def _activation_bytes(config: JobConfig, size: LlamaSize, tp: int) -> int:
    copy_bytes = _copy_bytes(config)
    options = config.activation_checkpoint
    kv_dim = size.num_kv_heads * size.head_dim
    block_input = size.dim
    everything = 5 * size.dim + 2 * kv_dim + 2 * size.ffn_hidden_dim
    costly_operators = 4 * size.dim + kv_dim + size.ffn_hidden_dim
    if options.mode == "full":
        per_block = float(block_input)
    elif options.mode == "none":
        per_block = float(everything)
    elif options.selective_ac_option == "op":
        per_block = float(costly_operators)
    else:
        every = int(options.selective_ac_option)
        per_block = (block_input + (every - 1) * everything) / every
    num_tokens = config.training.local_batch_size * config.training.seq_len
    logits_and_gradient = 2 * size.vocab_size
    return int(num_tokens * copy_bytes * (size.num_layers * per_block + logits_and_gradient) / tp)


def _copy_bytes(config: JobConfig) -> int:
    return 2 if config.training.mixed_precision_param == "bfloat16" else 4
