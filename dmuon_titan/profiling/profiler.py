"""torch.profiler traces with a summary of each, and GPU memory snapshots, at an interval of steps.

Nothing here is worth a run: what can't be written is warned of, and training goes on.
"""

from __future__ import annotations

import errno
import os
import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch import nn
from torch.profiler import ProfilerAction

from dmuon.hooks import find_runtime
from dmuon.torch_internals import memory_snapshot, record_memory_history, recorded_events
from dmuon_titan.config.schema import Profiling
from dmuon_titan.console import logger
from dmuon_titan.disk import why_not_writable
from dmuon_titan.profiling.summary import headline, page, summarize
from dmuon_titan.profiling.work import is_step

_MAX_SNAPSHOT_ENTRIES = 100_000
_RECORDING = (ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE)


class Profiler:
    """Called once a step; does nothing unless `[profiling]` asks for something."""

    def __init__(
        self, options: Profiling, device: torch.device, rank: int, start_step: int, settle: Callable[[], None]
    ) -> None:
        """`settle`: waits for all that was launched, called where a recording begins or ends."""
        self.options, self.device, self.rank, self._settle = options, device, rank, settle
        self.first_step, self.step_number = start_step + 1, start_step
        self.snapshots = options.enable_memory_snapshot and device.type == "cuda"
        if options.enable_memory_snapshot and not self.snapshots and rank == 0:
            logger.warning("profiling.enable_memory_snapshot = true: there is no GPU memory to take a snapshot of")
        self._is_over = False
        self._profiler = self._torch_profiler() if options.enable_profiling else None

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
            self._settle()
            self._is_over = True

    def step(self) -> None:
        """A training step is over."""
        self.step_number += 1
        if self._profiler is not None:
            if recording_begins_or_ends(self._profiler):
                # What a recorded step launches then runs within the recording, and nothing else does.
                self._settle()
            self._profiler.step()
        if self.snapshots and self.step_number % self.options.profile_freq == 0:
            path = self._path(self.options.save_memory_snapshot_folder, "memory_snapshot.pickle")
            with _dispensable(path):
                with path.open("wb") as file:
                    pickle.dump(memory_snapshot(), file)
                logger.info(f"wrote a snapshot of GPU memory to {path}")

    def _torch_profiler(self) -> torch.profiler.profile:
        options = self.options
        # Each trace is of its own steps, as intended.
        warnings.filterwarnings("ignore", "Warning: Profiler clears events at the end of each cycle")
        wait = options.profile_freq - options.profiler_warmup - options.profiler_active
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self.device.type == "cuda":
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
        events = recorded_events(profiler)
        if self._is_over:  # one step more has begun
            last = max((e for e in events if is_step(e)), key=lambda step: step.begin, default=None)
            events = [event for event in events if event is not last]
        summary = summarize(events)
        if not summary.steps:
            return
        trace = self._path(self.options.save_traces_folder, "trace.json")
        with _dispensable(trace):
            profiler.export_chrome_trace(str(trace))
            _check_whole(trace)
            logger.info(f"wrote a profiler trace to {trace}")
        path = trace.with_name(f"rank-{self.rank}_summary.txt")
        with _dispensable(path):
            path.write_text(f"rank {self.rank}, {page(summary, first_step=self.first_step)}")
            logger.info(f"wrote its summary to {path}: {headline(summary)}")

    def _path(self, folder: str, kind: str) -> Path:
        return Path(folder) / f"step-{self.step_number}" / f"rank-{self.rank}_{kind}"


def settle(model: nn.Module, device: torch.device) -> None:
    """Waits for all that was launched, and for weights on their way to other ranks: gloo's threads note the end of a
    transfer in a recording that they saw it begin in, and crash if that is over."""
    runtime = find_runtime(model)
    if runtime is not None:
        runtime.wait_publish()
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def recording_begins_or_ends(profiler: torch.profiler.profile) -> bool:
    """Whether it does with the profiler's next `step()`."""
    now, then = profiler.current_action, profiler.schedule(profiler.step_num + 1)
    return now == ProfilerAction.RECORD_AND_SAVE or (now in _RECORDING) != (then in _RECORDING)


@contextmanager
def _dispensable(path: Path) -> Iterator[None]:
    """Makes the folder of a file that is about to be written; warns if it can't be, and leaves no part of it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        why = why_not_writable(path) or f"{error.strerror}: {path}"
        for torn in (path, Path(f"{path}.tmp")):  # the profiler's own name for what is not complete
            with suppress(OSError):
                torn.unlink()
        logger.warning(f"training goes on without {path.name}: {why}; make room, or name another folder in [profiling]")


def _check_whole(trace: Path) -> None:
    """The profiler raises nothing where it can't write. Raises OSError if the end of a trace is missing."""
    with trace.open("rb") as file:
        file.seek(max(0, trace.stat().st_size - 16))
        if not file.read().rstrip().endswith(b"}"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
