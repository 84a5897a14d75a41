"""torch.profiler traces and GPU memory snapshots, at an interval of steps."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from dmuon.torch_internals import memory_snapshot, record_memory_history
from dmuon_titan.config.schema import Profiling
from dmuon_titan.console import logger

_MAX_SNAPSHOT_ENTRIES = 100_000


class Profiler:
    """Called once a step; does nothing unless `[profiling]` asks for something."""

    def __init__(self, options: Profiling, device: torch.device, rank: int, start_step: int) -> None:
        self.options, self.rank, self.step_number = options, rank, start_step
        self.snapshots = options.enable_memory_snapshot and device.type == "cuda"
        if options.enable_memory_snapshot and not self.snapshots and rank == 0:
            logger.warning("profiling.enable_memory_snapshot = true: there is no GPU memory to take a snapshot of")
        self._profiler = self._torch_profiler(device) if options.enable_profiling else None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Records what happens inside, according to the schedule that `step` advances."""
        if self.snapshots:
            record_memory_history(_MAX_SNAPSHOT_ENTRIES)
        if self._profiler is None:
            yield
            return
        with self._profiler:
            yield

    def step(self) -> None:
        """A training step is over."""
        self.step_number += 1
        if self._profiler is not None:
            self._profiler.step()
        if self.snapshots and self.step_number % self.options.profile_freq == 0:
            path = self._path(self.options.save_memory_snapshot_folder, "memory_snapshot.pickle")
            with path.open("wb") as file:
                pickle.dump(memory_snapshot(), file)
            logger.info(f"wrote a snapshot of GPU memory to {path}")

    def _torch_profiler(self, device: torch.device) -> torch.profiler.profile:
        options = self.options
        wait = options.profile_freq - options.profiler_warmup - options.profiler_active
        activities = [torch.profiler.ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        return torch.profiler.profile(
            activities=activities,
            schedule=torch.profiler.schedule(
                wait=max(wait, 0), warmup=options.profiler_warmup, active=options.profiler_active
            ),
            on_trace_ready=self._write_trace,
            record_shapes=True,
        )

    def _write_trace(self, profiler: torch.profiler.profile) -> None:
        path = self._path(self.options.save_traces_folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        logger.info(f"wrote a profiler trace to {path}")

    def _path(self, folder: str, kind: str) -> Path:
        path = Path(folder) / f"step-{self.step_number}" / f"rank-{self.rank}_{kind}"
        path.parent.mkdir(parents=True, exist_ok=True)
        return path
