"""How fast weights reach all ranks from N owners, and gradients the owners, in each way that there is.

torchrun --nproc-per-node 4 -m benchmarks.many_gpus.collectives --out FILE.jsonl

Of bf16 weights, N owners have equal shares or, by turns, ones of 1 and 1.5; their gradients are float32. Every rank
must receive at least all shares but the smallest, and send as much of gradients: these bytes over the median time are
the rate. What a way needs beyond the collective counts too: all_to_all_single sends a copy of the share to each rank.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.many_gpus.lines import append
from benchmarks.parallel_model import end_ranks, start_ranks, synchronize, timing_event
from benchmarks.record import record
from dmuon.section import aligned
from dmuon.torch_internals import coalesced
from dmuon_titan.config.schema import build

NUM_REPEATS, NUM_WARMUPS = 20, 3
MEGABYTES = [8, 25, 50, 100, 200, 400]
Operation = Callable[[], object]
Collective = Callable[[Tensor, int, dist.ProcessGroup], Any]


def main() -> None:
    """Print a JSON line for each size and each kind of shares."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rehearse", action="store_true", help="small buffers")
    arguments = parser.parse_args()
    device = start_ranks(build({}))
    group = dist.group.WORLD
    assert group is not None
    for megabytes in [0.25, 1] if arguments.rehearse else MEGABYTES:
        for is_even in (True, False):
            sizes = shares(int(megabytes * 1e6 / torch.bfloat16.itemsize), dist.get_world_size(), is_even)
            figures = measure(sizes, group, device)
            if dist.get_rank() == 0:
                line = record(
                    "many_gpus.collectives",
                    num_ranks=dist.get_world_size(),
                    megabytes=megabytes,
                    shares="even" if is_even else "1.0 : 1.5",
                    figures=figures,
                )
                append(arguments.out, line)
    end_ranks()


def shares(numel: int, num_owners: int, is_even: bool) -> list[int]:
    """Elements of each owner, of `numel` together."""
    weights = [1.0 if is_even or index % 2 == 0 else 1.5 for index in range(num_owners)]
    return [aligned(int(numel * weight / sum(weights))) for weight in weights]


def measure(sizes: Sequence[int], group: dist.ProcessGroup, device: torch.device) -> dict[str, dict[str, float]]:
    """Milliseconds and GB/s of each way, by its name."""
    figures = {}
    least = sum(sizes) - min(sizes)
    for ways, dtype in ((weights_to_all, torch.bfloat16), (gradients_to_owners, torch.float32)):
        for name, operation in ways(sizes, dtype, group, device).items():
            ms = median_ms(operation, device)
            figures[name] = {"ms": ms, "gb_per_s": least * dtype.itemsize / ms / 1e6}
    return figures


def weights_to_all(
    sizes: Sequence[int], dtype: torch.dtype, group: dist.ProcessGroup, device: torch.device
) -> dict[str, Operation]:
    buffers = [torch.zeros(size, dtype=dtype, device=device) for size in sizes]
    own = buffers[group.rank()]
    padded = torch.zeros(max(sizes), dtype=dtype, device=device)
    gathered = torch.empty(max(sizes) * len(sizes), dtype=dtype, device=device)
    received = torch.empty(sum(sizes), dtype=dtype, device=device)

    def exchange() -> None:
        dist.all_to_all_single(received, own.repeat(len(sizes)), list(sizes), [own.numel()] * len(sizes), group=group)

    ways: dict[str, Operation] = {
        "broadcasts": one_by_one(broadcast, buffers, group),
        "broadcasts, coalesced": together(broadcast, buffers, group, device),
        "all-gather, padded": lambda: dist.all_gather_into_tensor(gathered, padded, group=group),
        "all-to-all": exchange,
    }
    return _that_run(ways, device)


def gradients_to_owners(
    sizes: Sequence[int], dtype: torch.dtype, group: dist.ProcessGroup, device: torch.device
) -> dict[str, Operation]:
    buffers = [torch.zeros(size, dtype=dtype, device=device) for size in sizes]
    padded = torch.zeros(max(sizes) * len(sizes), dtype=dtype, device=device)
    scattered = torch.empty(max(sizes), dtype=dtype, device=device)
    ways: dict[str, Operation] = {
        "reduces": one_by_one(reduce, buffers, group),
        "reduces, coalesced": together(reduce, buffers, group, device),
        "reduce-scatter, padded": lambda: dist.reduce_scatter_tensor(scattered, padded, group=group),
    }
    return _that_run(ways, device)


def _that_run(ways: dict[str, Operation], device: torch.device) -> dict[str, Operation]:
    """Gloo coalesces nothing."""
    return {name: way for name, way in ways.items() if device.type == "cuda" or "coalesced" not in name}


def broadcast(buffer: Tensor, owner: int, group: dist.ProcessGroup) -> Any:
    return dist.broadcast(buffer, group=group, group_src=owner, async_op=True)


def reduce(buffer: Tensor, owner: int, group: dist.ProcessGroup) -> Any:
    return dist.reduce(buffer, group=group, group_dst=owner, async_op=True)


def one_by_one(collective: Collective, buffers: Sequence[Tensor], group: dist.ProcessGroup) -> Operation:
    """Each buffer from or to its owner."""

    def run() -> None:
        for work in [collective(buffer, owner, group) for owner, buffer in enumerate(buffers)]:
            work.wait()

    return run


def together(
    collective: Collective, buffers: Sequence[Tensor], group: dist.ProcessGroup, device: torch.device
) -> Operation:
    """The same in one kernel."""

    def run() -> None:
        with coalesced(group, device) as manager:
            for owner, buffer in enumerate(buffers):
                collective(buffer, owner, group)
        manager.wait()

    return run


def median_ms(operation: Operation, device: torch.device) -> float:
    """Of the slowest rank. Called by all ranks together."""
    times = []
    ready = torch.zeros(1, device=device)
    for _ in range(NUM_WARMUPS + NUM_REPEATS):
        dist.all_reduce(ready)  # on a GPU it is the devices that begin together
        begin, end = (timing_event(device) for _ in range(2))
        begin.record()
        operation()
        end.record()
        synchronize(device)
        times.append(begin.elapsed_time(end))
    slowest = torch.tensor(statistics.median(times[NUM_WARMUPS:]))
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.item()


if __name__ == "__main__":
    main()
