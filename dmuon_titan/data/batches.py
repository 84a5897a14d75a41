"""The batches of a training run, a step at a time."""

from __future__ import annotations

import itertools
from pathlib import Path

from dmuon_titan.config import JobConfig
from dmuon_titan.console import logger
from dmuon_titan.data.dataset import TokenDataset
from dmuon_titan.data.loader import Batch, build_loader, epochs_begun
from dmuon_titan.data.trace import BatchTrace
from dmuon_titan.mesh import ParallelMesh


class StepBatches:
    """The micro-batches of one step after the other, traced if asked for."""

    def __init__(
        self, dataset: TokenDataset, config: JobConfig, mesh: ParallelMesh, num_consumed: int, num_micro_batches: int
    ) -> None:
        self.num_micro_batches = num_micro_batches
        self._batches = build_loader(
            dataset,
            seed=config.debug.seed,
            seq_len=config.training.seq_len,
            local_batch_size=config.training.local_batch_size,
            dp_rank=mesh.dp_rank,
            dp_world=mesh.dp_world,
            num_consumed=num_consumed,
            num_microbatches=num_micro_batches,
            num_workers=config.training.dataloader.num_workers,
        )
        self._trace: BatchTrace | None = None
        if config.debug.trace_batches:
            self._trace = BatchTrace(Path(config.job.dump_folder), mesh.dp_rank, mesh.mesh.get_local_rank("tp"))
        self._num_windows = dataset.num_windows
        self._num_consumed = num_consumed
        self._global_batch_size = config.training.local_batch_size * mesh.dp_world * num_micro_batches

    @property
    def epoch(self) -> int:
        """The epoch of the last sample of the global batch that `next` returned part of; the same on all ranks."""
        return (self._num_consumed - 1) // self._num_windows

    def next(self, step: int) -> list[Batch]:
        micro_batches = list(itertools.islice(self._batches, self.num_micro_batches))
        for epoch in epochs_begun(self._num_consumed, self._global_batch_size, self._num_windows):
            logger.info(f"epoch {epoch} begins at step {step}")
        self._num_consumed += self._global_batch_size
        if self._trace is not None:
            for micro, batch in enumerate(micro_batches):
                self._trace.append(step, micro, batch)
        return micro_batches
