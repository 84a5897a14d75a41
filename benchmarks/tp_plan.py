"""Orthogonalising one Llama 3 8B block over the tp ranks of its owner: what each strategy costs a rank.

python -m benchmarks.tp_plan                                             # the table, from shapes
torchrun --nproc-per-node 2 -m benchmarks.tp_plan --count --scale 16     # the same, run on gloo and counted

FLOPs and bytes are of the rank that has most of them; bytes go through the busier direction of its link; times are
for the FLOP/s and the bandwidth given. "gather" is what no strategy does: all matrices whole on one rank.

`--count` runs the block with its sides divided by `--scale`, at tp = the number of ranks. There plain matrix products
are counted, which do not make use of symmetry, so FLOPs are about twice those of the formulas.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.record import record
from dmuon.collectives import Axis
from dmuon.tensor_parallel import (
    EXCHANGE,
    STRATEGIES,
    Layout,
    OrthogonalizationPlan,
    Rates,
    TensorParallelOrthogonalizer,
    plan_orthogonalization,
)
from models.llama.sizes import FLAVORS

GATHER = "gather"
ROW_PARALLEL = ("wo", "w2")


@dataclass(frozen=True)
class Cost:
    """Of the rank that has most."""

    flops: int
    num_bytes: int
    whole_bytes: int


def main() -> None:
    """Print the table or, from rank 0, the counts; and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-blocks", type=int, default=1)
    parser.add_argument("--flops-per-s", type=float, default=Rates.flops_per_s)
    parser.add_argument("--bytes-per-s", type=float, default=Rates.bytes_per_s)
    parser.add_argument("--dtype", default="float16", choices=["float32", "float16", "bfloat16"], help="ns_dtype")
    parser.add_argument("--count", action="store_true", help="run it on the ranks of torchrun, and count")
    parser.add_argument("--scale", type=int, default=16, help="what --count divides the sides of matrices by")
    arguments = parser.parse_args()
    dtype = getattr(torch, arguments.dtype)
    if arguments.count:
        _count(arguments, dtype)
        return
    rates = Rates(arguments.flops_per_s, arguments.bytes_per_s)
    cases = {f"{arguments.num_blocks} block(s)": block() * arguments.num_blocks}
    cases |= {"w2 alone": block()[-2:-1], "w1, w2, w3": block()[-3:]}
    rows = [row for name, layouts in cases.items() for row in table(name, layouts, dtype, rates)]
    print("| matrices | tp | strategy | by Gram | TFLOP a rank | MB a rank | whole matrices at once, MB | ms |")
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['matrices']} | {row['tp']} | {row['strategy']} | {row['num_gram']} | {row['flops'] / 1e12:.2f} "
            f"| {row['num_bytes'] / 1e6:.0f} | {row['whole_bytes'] / 1e6:.0f} | {row['predicted_s'] * 1e3:.2f} |"
        )
    print(json.dumps(record("tp_plan", dtype=arguments.dtype, rates=asdict(rates), rows=rows)))


def block(scale: int = 1) -> list[Layout]:
    """The matrices of one Llama 3 8B block as ColwiseParallel and RowwiseParallel cut them."""
    shapes = FLAVORS["llama3"]["8B"].parameter_shapes()
    return [
        Layout((shape[0] // scale, shape[1] // scale), 1 if any(part in name for part in ROW_PARALLEL) else 0)
        for name, shape in shapes.items()
        if name.startswith("layers.0.") and len(shape) == 2
    ]


def plans(layouts: Sequence[Layout], tp_degree: int, **options: Any) -> dict[str, OrthogonalizationPlan]:
    """By strategy, and gather."""
    found = {name: plan_orthogonalization(layouts, tp_degree, name, **options) for name in STRATEGIES}
    entries = (replace(entry, ranks=(0,) * len(entry.ranks)) for entry in found[EXCHANGE].entries)
    return {**found, GATHER: replace(found[EXCHANGE], entries=tuple(entries))}


def cost(plan: OrthogonalizationPlan) -> Cost:
    return Cost(
        max(load.flops for load in plan.loads),
        max(load.exchange_bytes + load.sum_bytes for load in plan.loads),
        max(load.whole_bytes for load in plan.loads),
    )


def table(name: str, layouts: Sequence[Layout], dtype: torch.dtype, rates: Rates) -> Iterator[dict[str, Any]]:
    for tp_degree in (2, 4, 8):
        for strategy, plan in plans(layouts, tp_degree, dtype=dtype, wire_dtype=dtype, rates=rates).items():
            num_gram = sum(len(members.gram) for members in plan.rounds)
            yield {
                "matrices": name,
                "tp": tp_degree,
                "strategy": strategy,
                "num_gram": num_gram,
                **asdict(cost(plan)),
                "predicted_s": plan.predicted_s(rates),
            }


@contextmanager
def counted_collectives(axis: Axis) -> Iterator[dict[str, int]]:
    """Bytes of exchanges and of sums through the busier direction of this rank's link, and the number of calls."""
    count = {"exchange": 0, "sum": 0, "calls": 0}
    all_to_all_single, all_reduce = dist.all_to_all_single, dist.all_reduce

    def counted_all_to_all(received: Tensor, sent: Tensor, receives: list[int], sends: list[int], **kwargs: Any) -> Any:
        own = sends[axis.index] * sent.element_size()
        count["exchange"] += max(sent.nbytes, received.nbytes) - own
        count["calls"] += 1
        return all_to_all_single(received, sent, receives, sends, **kwargs)

    def counted_all_reduce(tensor: Tensor, **kwargs: Any) -> Any:
        count["sum"] += 2 * (axis.size - 1) * tensor.nbytes // axis.size
        count["calls"] += 1
        return all_reduce(tensor, **kwargs)

    dist.all_to_all_single = counted_all_to_all  # type: ignore[assignment]
    dist.all_reduce = counted_all_reduce  # type: ignore[assignment]
    try:
        yield count
    finally:
        dist.all_to_all_single, dist.all_reduce = all_to_all_single, all_reduce


def _count(arguments: argparse.Namespace, dtype: torch.dtype) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    axis = Axis(init_device_mesh("cpu", (dist.get_world_size(),)))
    layouts = block(arguments.scale) * arguments.num_blocks
    updates = [torch.randn(layout.local_shape(axis.size, axis.index)) for layout in layouts]
    rows = []
    for strategy, plan in plans(layouts, axis.size, dtype=dtype, wire_dtype=dtype).items():
        with counted_collectives(axis) as count, FlopCounterMode(display=False) as flops:
            TensorParallelOrthogonalizer(plan, axis)(updates)
        mine = (flops.get_total_flops(), count["exchange"] + count["sum"], count["calls"])
        of_ranks: list[Any] = [None] * axis.size
        dist.all_gather_object(of_ranks, mine)
        most_flops, num_bytes, num_calls = (max(column) for column in zip(*of_ranks, strict=True))
        computed = cost(plan)
        rows.append(
            {
                "tp": axis.size,
                "strategy": strategy,
                "flops": computed.flops,
                "counted_flops": most_flops,
                "num_bytes": computed.num_bytes,
                "counted_bytes": num_bytes,
                "collectives": plan.num_collectives,
                "counted_collectives": num_calls,
            }
        )
    if axis.index == 0:
        print("| tp | strategy | MFLOP a rank | counted | bytes a rank | counted | collectives | counted |")
        print("|---|---|---|---|---|---|---|---|")
        for row in rows:
            mflop = (f"{row[key] / 1e6:.1f}" for key in ("flops", "counted_flops"))
            rest = (str(row[key]) for key in list(row)[4:])
            print(f"| {row['tp']} | {row['strategy']} | {' | '.join([*mflop, *rest])} |")
        print(json.dumps(record("tp_plan", dtype=arguments.dtype, scale=arguments.scale, rows=rows)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
