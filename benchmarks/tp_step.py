"""Milliseconds of an optimizer step under tensor parallelism, by strategy.

torchrun --nproc-per-node 2 -m benchmarks.tp_step --parallelism.tensor_parallel_degree 2 --config llama3_1b.toml
(8B: --config llama3_8b.toml --layers 4)

Flags are the job's own. Gradients are random; forward and backward do not run. Strategies take turns, so that whatever
slows the machine slows all of them. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn

import dmuon
from benchmarks.record import record
from dmuon.hooks import find_runtime
from dmuon.parameter import local
from dmuon.tensor_parallel import STRATEGIES
from dmuon_titan.config import load_config, resolved_degrees
from dmuon_titan.environment import WorkerEnvironment
from dmuon_titan.mesh import build_mesh, init_process_group, local_device, rendezvous_store
from dmuon_titan.optimizer import build_optimizer
from dmuon_titan.parallelize import build_model
from models.llama.sizes import FLAVORS


def main() -> None:
    """Print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, help="blocks of the model; default: all")
    parser.add_argument("--rounds", type=int, default=10)
    arguments, overrides = parser.parse_known_args()
    config = load_config(overrides).config
    environment = WorkerEnvironment.read()
    device = local_device(environment)
    store = rendezvous_store(environment, config.comm.init_timeout_seconds)
    init_process_group(config.comm, tempfile.gettempdir(), environment, store, device)
    degrees = resolved_degrees(config, environment.num_ranks)
    size = FLAVORS[config.model.name][config.model.flavor]
    size = replace(size, num_layers=arguments.layers or size.num_layers)
    model, _ = build_model(config, size, build_mesh(device, degrees))
    optimizers = {
        strategy: build_optimizer(replace(config.optimizer, tp_strategy=strategy), model) for strategy in STRATEGIES
    }
    milliseconds: dict[str, list[float]] = {strategy: [] for strategy in STRATEGIES}
    for _ in range(arguments.rounds + 2):
        for strategy, optimizer in optimizers.items():
            milliseconds[strategy].append(_step_ms(model, optimizer, device))
    if dist.get_rank() == 0:
        figures = {strategy: _summary(times[2:]) for strategy, times in milliseconds.items()}
        line = record("tp_step", flavor=config.model.flavor, num_layers=size.num_layers, degrees=degrees, ms=figures)
        print(json.dumps(line))
    dist.barrier()
    dist.destroy_process_group()


@torch.no_grad()
def _step_ms(model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> float:
    """Of the matrices' update alone: only they have gradients."""
    for param in dmuon.dedicated_params(model):
        if param.device.type != "meta":
            param.grad = torch.zeros_like(param)
            local(param.grad).normal_(std=1e-3)
    _synchronize(device)
    dist.barrier()
    begin = time.perf_counter()
    optimizer.step()
    runtime = find_runtime(model)
    assert runtime is not None
    runtime.wait_publish()
    _synchronize(device)
    return (time.perf_counter() - begin) * 1e3


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _summary(times: list[float]) -> dict[str, float]:
    low, median, high = statistics.quantiles(times, n=4)
    return {"median": round(median, 2), "low": round(low, 2), "high": round(high, 2)}


if __name__ == "__main__":
    main()
