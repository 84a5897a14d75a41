"""What a run's checkpoints hold beside weights and optimizer."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from dmuon_titan.checkpoint.keys import FIELDS
from dmuon_titan.seeding import random_state


@dataclass
class TrainState:
    """Where a run stands, what its data order depends on, and what its exact repetition depends on.

    step: optimizer steps made. tokens_seen: tokens trained on.
    schedule_start: the step that the learning-rate schedule counts from.
    consumed_samples: the data's one cursor.
    seed, seq_len, data, tokenizer: what the cursor is a cursor of; the last two are hashes.
    global_batch_size, num_ranks, num_threads, nccl: told in a checkpoint's manifest.
    """

    seed: int
    seq_len: int
    data: str
    tokenizer: str
    global_batch_size: int  # sequences
    num_ranks: int
    num_threads: int
    nccl: str = ""  # NCCL_* variables
    step: int = 0
    consumed_samples: int = 0
    tokens_seen: int = 0
    schedule_start: int = 0

    def parts(self, excluded: Container[str] = ()) -> dict[str, dict[str, Any]]:
        """What goes into a checkpoint, by part."""
        return {
            part: {name: getattr(self, name) for name in names}
            for part, names in FIELDS.items()
            if part not in excluded
        }

    def run(self) -> dict[str, Any]:
        """What exact repetition depends on beside the configuration."""
        names = ("global_batch_size", "num_ranks", "num_threads", "nccl")
        return {name: getattr(self, name) for name in names}

    def take(self, parts: Mapping[str, Mapping[str, Any]]) -> None:
        """Takes over what `parts` gave and a checkpoint filled."""
        for values in parts.values():
            for name, value in values.items():
                setattr(self, name, value)


def stacked_random_state(device: torch.device, ranks: DeviceMesh) -> dict[str, Tensor]:
    """The random state of all processes, one row each, of which this one holds its own: no key names a rank.

    ranks: all processes, on the CPU.
    """
    return {
        name: DTensor.from_local(values.unsqueeze(0).contiguous(), ranks, [Shard(0)], run_check=False)
        for name, values in random_state(device).items()
    }


def own_random_state(stacked: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """This process's row, as `restore_random_state` takes it."""
    return {name: values.to_local().squeeze(0) for name, values in stacked.items() if isinstance(values, DTensor)}
