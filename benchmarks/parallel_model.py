"""A job's mesh, model and trainer, for benchmarks that drive them themselves."""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from dmuon_titan.checkpoint import TrainState
from dmuon_titan.config import JobConfig, global_batch_size, load_config, resolved_degrees
from dmuon_titan.environment import WorkerEnvironment
from dmuon_titan.mesh import ParallelMesh, build_mesh, init_process_group, local_device, rendezvous_store
from dmuon_titan.parallelize import build_model
from dmuon_titan.trainer import Trainer
from models.llama.model import Llama
from models.llama.sizes import FLAVORS, LlamaSize


@dataclass(frozen=True)
class ParallelJob:
    config: JobConfig
    size: LlamaSize
    degrees: tuple[int, int, int]
    mesh: ParallelMesh


@dataclass(frozen=True)
class ParallelModel(ParallelJob):
    model: Llama


def start_ranks(config: JobConfig) -> torch.device:
    """Starts the process group that torchrun's environment names. Returns this rank's device."""
    environment = WorkerEnvironment.read()
    device = local_device(environment)
    store = rendezvous_store(environment, config.comm.init_timeout_seconds)
    init_process_group(config.comm, tempfile.gettempdir(), environment, store, device)
    return device


def end_ranks() -> None:
    dist.barrier()
    dist.destroy_process_group()


def job_size(config: JobConfig, num_layers: int | None = None, *, untied: bool = False) -> LlamaSize:
    """`num_layers` replaces the flavor's; `untied` gives the head a matrix of its own, as TorchTitan's flavors have
    it."""
    size = FLAVORS[config.model.name][config.model.flavor]
    return replace(size, num_layers=num_layers or size.num_layers, tie_embeddings=size.tie_embeddings and not untied)


def parallel_job(flags: Sequence[str], num_layers: int | None = None, *, untied: bool = False) -> ParallelJob:
    """Starts the process group. `flags` are the job's own; for the others see `job_size`."""
    config = load_config(list(flags)).config
    device = start_ranks(config)
    degrees = resolved_degrees(config, dist.get_world_size())
    return ParallelJob(config, job_size(config, num_layers, untied=untied), degrees, build_mesh(device, degrees))


def parallel_model(flags: Sequence[str], num_layers: int | None = None) -> ParallelModel:
    """Starts the process group and builds the model."""
    job = parallel_job(flags, num_layers)
    model, _ = build_model(job.config, job.size, job.mesh)
    return ParallelModel(job.config, job.size, job.degrees, job.mesh, model)


def build_trainer(job: ParallelJob) -> Trainer:
    """A trainer that nobody asks to stop, to be given batches by `update`."""
    num_ranks = dist.get_world_size()
    state = TrainState(
        job.config.debug.seed,
        job.config.training.seq_len,
        data="",
        tokenizer="none",
        global_batch_size=global_batch_size(job.config, num_ranks),
        num_ranks=num_ranks,
        num_threads=torch.get_num_threads(),
    )
    return Trainer(job.config, job.mesh, job.size, state, SimpleNamespace(requested=False))  # type: ignore[arg-type]


def free_memory(device: torch.device) -> None:
    """Of trainers that were dropped: models have cycles. Their process groups stay: torch names a new group of the same
    ranks as it named one that was destroyed, and the two would meet in the store."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def synchronize(device: torch.device) -> None:
    """The host waits for all that the device was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class HostEvent:
    """What is used of torch.cuda.Event, where nothing runs behind the host."""

    def record(self) -> None:
        self._time = time.perf_counter()

    def elapsed_time(self, end: HostEvent) -> float:
        return (end._time - self._time) * 1e3


def timing_event(device: torch.device) -> Any:
    """`begin.elapsed_time(end)` is the milliseconds between what was launched when each was recorded."""
    return torch.cuda.Event(enable_timing=True) if device.type == "cuda" else HostEvent()
