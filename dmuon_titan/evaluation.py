"""Loss on held-out text."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from dmuon_titan.config.schema import JobConfig
from dmuon_titan.data.dataset import TokenDataset
from dmuon_titan.data.loader import build_loader
from dmuon_titan.errors import DataError
from dmuon_titan.loss import IGNORE_INDEX, Losses, loss_context
from dmuon_titan.mesh import ParallelMesh, copy_to
from dmuon_titan.signals import StopWatcher


class Evaluation:
    """The validation split, read in order by all data-parallel ranks, the same batches each time.

    What doesn't fill a batch on every rank is left out: fewer than local batch x data-parallel ranks windows.
    """

    def __init__(
        self,
        dataset: TokenDataset,
        config: JobConfig,
        mesh: ParallelMesh,
        loss: Callable[..., Losses],
        watcher: StopWatcher,
    ) -> None:
        """Raises DataError if the split doesn't fill a single batch."""
        self.dataset, self.config, self.mesh, self.watcher = dataset, config, mesh, watcher
        self._loss = loss
        options = config.validation
        self.local_batch_size = options.local_batch_size or config.training.local_batch_size
        self.seq_len = options.seq_len or config.training.seq_len
        batch_size = self.local_batch_size * mesh.dp_world
        available = dataset.num_windows // batch_size
        if available == 0:
            raise DataError(
                f"the validation split holds {dataset.num_tokens} tokens, {dataset.num_windows} windows of "
                f"{self.seq_len}: one batch needs {batch_size} windows; set validation.local_batch_size lower or "
                "validation.enable = false"
            )
        self.num_batches = available if options.steps == -1 else min(options.steps, available)

    @torch.no_grad()
    def loss(self, model: nn.Module, *, interruptible: bool = True) -> float | None:
        """Mean loss over all valid tokens; None if it is interruptible and a rank was asked to stop, on all alike."""
        device = self.mesh.device
        sums = torch.zeros(2, dtype=torch.float64, device=device)
        batches = build_loader(
            self.dataset,
            seed=0,
            seq_len=self.seq_len,
            local_batch_size=self.local_batch_size,
            dp_rank=self.mesh.dp_rank,
            dp_world=self.mesh.dp_world,
            num_consumed=0,
            num_microbatches=1,
            shuffle=False,
        )
        model.eval()
        try:
            for batch in itertools.islice(batches, self.num_batches):
                if interruptible and any_rank(self.watcher.requested):
                    return None
                label_BS = copy_to(device, batch.label_BS)
                with loss_context(self.config.parallelism):
                    _, loss = self._loss(model, copy_to(device, batch.input_BS), label_BS, sums.new_ones(()))
                sums += torch.stack([loss.double(), (label_BS != IGNORE_INDEX).sum().double()])
        finally:
            model.train()
        dist.all_reduce(sums, group=self.mesh.dp_group)
        loss_sum, num_valid = sums.tolist()
        return loss_sum / num_valid if num_valid else 0.0


def any_rank(condition: bool) -> bool:
    """Whether it holds on some rank. A collective on the CPU: the GPU isn't waited for."""
    num_ranks = torch.tensor(int(condition))
    dist.all_reduce(num_ranks)
    return bool(num_ranks.item())
