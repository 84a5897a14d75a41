"""A job's model on its mesh, for benchmarks that drive it themselves."""

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
class ParallelModel:
    config: JobConfig
    size: LlamaSize
    degrees: tuple[int, int, int]
    mesh: ParallelMesh
    model: Llama


def parallel_model(flags: Sequence[str], num_layers: int | None = None) -> ParallelModel:
    """Starts the process group and builds the model. `flags` are the job's own; `num_layers` replaces the flavor's."""
    config = load_config(list(flags)).config
    environment = WorkerEnvironment.read()
    device = local_device(environment)
    store = rendezvous_store(environment, config.comm.init_timeout_seconds)
    init_process_group(config.comm, tempfile.gettempdir(), environment, store, device)
    degrees = resolved_degrees(config, environment.num_ranks)
    mesh = build_mesh(device, degrees)
    size = FLAVORS[config.model.name][config.model.flavor]
    size = replace(size, num_layers=num_layers or size.num_layers)
    return ParallelModel(config, size, degrees, mesh, build_model(config, size, mesh)[0])
