"""A job's mesh and model, for benchmarks that drive it themselves."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dmuon_titan.config import JobConfig, load_config, resolved_degrees
from dmuon_titan.environment import WorkerEnvironment
from dmuon_titan.mesh import ParallelMesh, build_mesh, init_process_group, local_device, rendezvous_store
from dmuon_titan.parallelize import build_model
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


def parallel_job(flags: Sequence[str], num_layers: int | None = None, *, untied: bool = False) -> ParallelJob:
    """Starts the process group. `flags` are the job's own; `num_layers` replaces the flavor's; `untied` gives the head
    a matrix of its own, as TorchTitan's flavors have it."""
    config = load_config(list(flags)).config
    environment = WorkerEnvironment.read()
    device = local_device(environment)
    store = rendezvous_store(environment, config.comm.init_timeout_seconds)
    init_process_group(config.comm, tempfile.gettempdir(), environment, store, device)
    degrees = resolved_degrees(config, environment.num_ranks)
    size = FLAVORS[config.model.name][config.model.flavor]
    size = replace(
        size,
        num_layers=num_layers or size.num_layers,
        tie_embeddings=size.tie_embeddings and not untied,
    )
    return ParallelJob(config, size, degrees, build_mesh(device, degrees))


def parallel_model(flags: Sequence[str], num_layers: int | None = None) -> ParallelModel:
    """Starts the process group and builds the model."""
    job = parallel_job(flags, num_layers)
    model, _ = build_model(job.config, job.size, job.mesh)
    return ParallelModel(job.config, job.size, job.degrees, job.mesh, model)
