"""Host time that a dedicated unit adds to a forward and backward: hooks, buffers and bookkeeping, no communication.

One process. Collectives are replaced by nothing, and the axis pretends to have several ranks, so that a block's
matrices have several owners as they would in a real run. Plain and dedicated model run in turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import dmuon
from benchmarks.record import record
from dmuon.collectives import Axis, Transfer, Wait, nothing
from dmuon.hooks import find_runtime


class SilentAxis(Axis):
    """An axis of `size` ranks whose collectives are nothing; this process is the first rank."""

    def __init__(self, size: int) -> None:
        super().__init__(None)
        self.size, self.ranks = size, list(range(size))

    def broadcast(self, transfers: Sequence[Transfer]) -> Wait:
        return nothing

    def reduce(self, transfers: Sequence[Transfer]) -> Wait:
        return nothing


class SilentAxes:
    """Stands for `DataParallelAxes`: a shard axis that pretends to have several ranks."""

    def __init__(self, size: int) -> None:
        self.shard, self.replicate = SilentAxis(size), SilentAxis(1)
        self.world_size, self.index = size, 0
        self.unshard_lane = self.reduce_lane = None


class Block(nn.Module):
    """Seven matrices as in a Llama block, small enough for their products to cost nothing beside the hooks."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(dim, dim, bias=False) for _ in range(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for linear in self.linears:
            x = x + linear(x)
        return x


class Model(nn.Module):
    def __init__(self, num_blocks: int, dim: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(dim) for _ in range(num_blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def main() -> None:
    """Print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=32)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--ranks", type=int, default=8, help="ranks that the shard axis pretends to have")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.set_num_threads(1)
    plain, dedicated = (Model(arguments.blocks, arguments.dim).to(arguments.device) for _ in range(2))
    _dedicate(dedicated, arguments.device, arguments.ranks)
    x = torch.randn(2, arguments.dim, device=arguments.device)
    added_us = []
    for _ in range(arguments.rounds + 5):
        seconds = [_pass_s(model, x) for model in (plain, dedicated)]
        added_us.append((seconds[1] - seconds[0]) / arguments.blocks * 1e6)
    low, median, high = statistics.quantiles(added_us[5:], n=4)
    figures = {"median": round(median, 1), "quartiles": [round(low, 1), round(high, 1)]}
    print(json.dumps(record("unit_overhead", on=arguments.device, num_owners=arguments.ranks, added_us_a_unit=figures)))
    dist.destroy_process_group()


def _dedicate(model: nn.Module, device: str, num_ranks: int) -> None:
    from dmuon import dedicate

    real = dedicate.DataParallelAxes
    dedicate.DataParallelAxes = lambda *_: SilentAxes(num_ranks)  # type: ignore[assignment, misc]
    try:
        dmuon.dedicate_params(model, init_device_mesh(torch.device(device).type, (1,), mesh_dim_names=("shard",)))
    finally:
        dedicate.DataParallelAxes = real  # type: ignore[misc]
    runtime = find_runtime(model)
    assert runtime is not None
    assert num_ranks == 1 or any(len(unit.sections) > 1 for unit in runtime.units)


def _pass_s(model: nn.Module, x: torch.Tensor) -> float:
    """Host seconds of a forward and backward; on a GPU it starts idle and its work is not waited for."""
    model.zero_grad()
    if x.device.type != "cpu":
        torch.accelerator.synchronize()
    begin = time.perf_counter()
    model(x).sum().backward()
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
