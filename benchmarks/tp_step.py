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
import time
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn

import dmuon
from benchmarks.parallel_model import end_ranks, parallel_model, synchronize
from benchmarks.record import record
from dmuon.hooks import find_runtime
from dmuon.parameter import local
from dmuon.tensor_parallel import STRATEGIES
from dmuon_titan.optimizer import build_optimizer


def main() -> None:
    """Print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, help="blocks of the model; default: all")
    parser.add_argument("--rounds", type=int, default=10)
    arguments, overrides = parser.parse_known_args()
    job = parallel_model(overrides, arguments.layers)
    model, device = job.model, job.mesh.device
    optimizers = {
        strategy: build_optimizer(replace(job.config.optimizer, tp_strategy=strategy), model) for strategy in STRATEGIES
    }
    milliseconds: dict[str, list[float]] = {strategy: [] for strategy in STRATEGIES}
    for _ in range(arguments.rounds + 2):
        for strategy, optimizer in optimizers.items():
            milliseconds[strategy].append(_step_ms(model, optimizer, device))
    if dist.get_rank() == 0:
        figures = {strategy: _summary(times[2:]) for strategy, times in milliseconds.items()}
        model_figures = {"flavor": job.config.model.flavor, "num_layers": job.size.num_layers, "degrees": job.degrees}
        print(json.dumps(record("tp_step", **model_figures, ms=figures)))
    end_ranks()


@torch.no_grad()
def _step_ms(model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> float:
    """Of the matrices' update alone: only they have gradients."""
    for param in dmuon.dedicated_params(model):
        if param.device.type != "meta":
            param.grad = torch.zeros_like(param)
            local(param.grad).normal_(std=1e-3)
    synchronize(device)
    dist.barrier()
    begin = time.perf_counter()
    optimizer.step()
    runtime = find_runtime(model)
    assert runtime is not None
    runtime.wait_publish()
    synchronize(device)
    return (time.perf_counter() - begin) * 1e3


def _summary(times: list[float]) -> dict[str, float]:
    low, median, high = statistics.quantiles(times, n=4)
    return {"median": round(median, 2), "low": round(low, 2), "high": round(high, 2)}


if __name__ == "__main__":
    main()
