"""Makes the table of tiles for this GPU: the fastest of a list of candidates for each product of a list of sizes.

python -m benchmarks.newton_schulz_tune --write --out benchmarks/results/newton_schulz_tune_h200.jsonl

Every candidate is compiled and compared with float64 on a small product first, in as many processes as there are
cores; one that fails to compile or is wrong is reported and left out. `--write` puts the winners into
dmuon/newton_schulz/tuned.py, from where every run on such a GPU takes them. Training never measures anything.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.record import record
from dmuon.newton_schulz import tuned
from dmuon.newton_schulz.tuned import Product, Tiles

KINDS = ("wide", "tall", "square")
MOST_PARTS = 16

# n x k of Llama's projections, and as many at once as a rank's share has of them.
PRODUCTS = [
    *(Product("square", n, n, b) for n, b in [(512, 1), (512, 16), (1024, 1), (1024, 8), (1024, 16), (2048, 1)]),
    *(Product("square", n, n, b) for n, b in [(2048, 4), (2048, 8), (3072, 1), (3072, 4), (4096, 1), (4096, 4)]),
    *(Product("square", n, n, b) for n, b in [(4096, 8), (8192, 1), (8192, 2)]),
    *(Product("wide", 512, 2048, b) for b in (1, 16)),
    *(Product("wide", 1024, 4096, b) for b in (1, 8, 16)),
    *(Product("wide", 2048, k, b) for k, b in [(2048, 1), (2048, 8), (8192, 1), (8192, 8)]),
    *(Product("wide", 3072, k, b) for k, b in [(3072, 1), (3072, 8), (8192, 4)]),
    *(Product("wide", 4096, k, b) for k, b in [(4096, 1), (4096, 8), (14336, 1), (14336, 4)]),
    *(Product("wide", 8192, k, b) for k, b in [(8192, 1), (28672, 1)]),
    *(Product("tall", n, k, b) for n, k, b in [(512, 2048, 16), (1024, 4096, 16), (2048, 8192, 1), (2048, 8192, 8)]),
    *(Product("tall", n, k, b) for n, k, b in [(3072, 8192, 4), (4096, 14336, 1), (4096, 14336, 4), (8192, 28672, 1)]),
]


def candidates() -> list[Tiles]:
    """What fits a Hopper multiprocessor: its shared memory, and accumulators in its registers."""
    sizes = {
        (128, 128, 64): [(4, 3), (8, 3), (8, 4)],
        (128, 128, 128): [(4, 3), (8, 3)],
        (128, 256, 64): [(8, 3), (8, 4)],
        (256, 128, 64): [(8, 3), (8, 4)],
        (64, 128, 64): [(4, 2), (4, 3), (4, 4)],
        (128, 64, 64): [(4, 3), (4, 4)],
        (64, 64, 64): [(4, 4)],
        (64, 64, 128): [(4, 3)],
        (64, 128, 128): [(4, 2), (4, 3)],
    }
    whole = [Tiles(*blocks, *each) for blocks, choices in sizes.items() for each in choices]
    large = [tiles for tiles in whole if tiles.block_n >= 128 and tiles.block_m * tiles.block_k <= 128 * 128]
    return [*whole, *(tiles._replace(parts=MOST_PARTS) for tiles in large)]


def main() -> None:
    """Measure, print a table and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=("float16", "bfloat16"), default="float16")
    parser.add_argument("--seconds", type=float, default=240, help="stop measuring after this long")
    for name, type_, what in (("kind", str, "kinds"), ("size", int, "sizes"), ("depth", int, "depths")):
        parser.add_argument(f"--{name}", type=type_, nargs="+", help=f"measure products of these {what} alone")
    parser.add_argument("--write", action="store_true", help="put the table into dmuon/newton_schulz/tuned.py")
    parser.add_argument("--out", type=Path, help="write all figures to this file")
    arguments = parser.parse_args()
    started = time.perf_counter()
    dtype = getattr(torch, arguments.dtype)
    peak = peak_tflops(dtype)
    usable, failures = _compile(candidates(), arguments.dtype)
    compile_s = time.perf_counter() - started
    print(f"peak {peak:.0f} TFLOP/s, {len(usable)} kernels in {compile_s:.0f} s", *failures, sep="\n", flush=True)
    rows = []
    asked = {name: getattr(arguments, name) for name in ("kind", "size", "depth")}
    for product in PRODUCTS:
        if any(wanted and getattr(product, name) not in wanted for name, wanted in asked.items()):
            continue
        if time.perf_counter() - started > arguments.seconds:
            print(f"out of time before {product}")
            break
        choices = [
            tiles for kind, tiles in usable if kind == product.kind and (tiles.parts == 1 or splits(product, tiles))
        ]
        times = _measure(product, choices, dtype)
        flops = product.num_matrices * product.size**2 * product.depth
        rows.append((product, times, flops))
        best = sorted(times, key=times.__getitem__)[:3]
        print(
            f"{product.kind:6} {product.num_matrices:2} x {product.size:5} x {product.depth:5} ",
            *(f"{times[t]:.4f} ms {flops / times[t] / peak / 1e9:.3f} {t.name}  |" for t in best),
            flush=True,
        )
    capability = torch.cuda.get_device_capability()
    figures = [
        {
            "product": product._asdict(),
            "floor_ms": flops / peak / 1e9,
            "ms": {tiles.name: ms for tiles, ms in sorted(times.items(), key=lambda item: item[1])},
        }
        for product, times, flops in rows
    ]
    line = record(
        "newton_schulz_tune",
        capability=list(capability),
        dtype=arguments.dtype,
        peak_tflops=peak,
        compile_s=compile_s,
        failures=failures,
        products=figures,
    )
    if arguments.out:
        arguments.out.write_text(json.dumps(line) + "\n")
    if arguments.write:
        write_table(capability, {product: min(times, key=times.__getitem__) for product, times, _ in rows})


def peak_tflops(dtype: torch.dtype, size: int = 8192) -> float:
    """Rate of the library's general product of random matrices."""
    A, B = (torch.randn(size, size, device="cuda").to(dtype) for _ in range(2))
    return 2 * size**3 / median_ms(lambda: A @ B, 300) / 1e9


def median_ms(work: Callable[[], object], budget_ms: float = 30, most: int = 30) -> float:
    """Median of single runs, as many as the budget allows but 5 at least, after as many to warm up."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]

    def once() -> float:
        events[0].record()
        work()
        events[1].record()
        torch.cuda.synchronize()
        return events[0].elapsed_time(events[1])

    once()
    count = max(5, min(most, int(budget_ms / 2 / max(once(), 1e-3))))
    return statistics.median([once() for _ in range(2 * count)][count:])


def splits(product: Product, tiles: Tiles) -> bool:
    """Whether tiles are left over that parts could share among all multiprocessors."""
    from dmuon.newton_schulz import kernels

    num_processors = torch.cuda.get_device_properties(0).multi_processor_count
    return kernels.split(num_tiles(product, tiles), tiles.parts, num_processors)[0] > 0


def num_tiles(product: Product, tiles: Tiles) -> int:
    from dmuon.newton_schulz import kernels

    return product.num_matrices * len(kernels.tile_order(product.size, tiles, torch.device("cpu")))


def _measure(product: Product, choices: Sequence[Tiles], dtype: torch.dtype) -> dict[Tiles, float]:
    from dmuon.newton_schulz import kernels

    _, size, depth, num = product
    shape = (num, depth, size) if product.kind == "tall" else (num, size, depth)
    A = (torch.randn(shape, device="cuda") / depth**0.5).to(dtype)
    if product.kind == "square":
        A = kernels.symmetric_product(A, A, torch.empty_like(A), choices[0])
    out = torch.empty(num, size, size, dtype=dtype, device="cuda")
    times = {tiles: _time(product.kind, A, out, tiles) for tiles in choices}
    # The clock falls as the chip warms up: the best ones, and ways to walk through their tiles, take turns.
    best = sorted(times, key=times.__getitem__)
    finalists = [tiles._replace(group=group) for tiles in best[:2] for group in (2, 4, 8, 16)] + best[2:4]
    turns = [[_time(product.kind, A, out, tiles) for tiles in finalists] for _ in range(3)]
    return {tiles: statistics.median(each) for tiles, *each in zip(finalists, *turns, strict=True)}


def _time(kind: str, A: Tensor, out: Tensor, tiles: Tiles) -> float:
    from dmuon.newton_schulz import kernels

    options: dict[str, Any] = {"alpha": 0.5, "beta": 0.25} if kind == "square" else {"tall": kind == "tall"}
    # Several launches to a measurement where one is short: what the host adds must not decide.
    repeats = max(1, min(20, int(2e11 / (out.numel() * A.shape[-2 if kind == "tall" else -1]))))
    graph = torch.cuda.CUDAGraph()
    kernels.symmetric_product(A, A, out, tiles, **options)
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            kernels.symmetric_product(A, A, out, tiles, **options)
    return median_ms(graph.replay) / repeats


def _compile(tiles: Sequence[Tiles], dtype: str) -> tuple[list[tuple[str, Tiles]], list[str]]:
    """Those that compile and are right, and a line about each that is not."""
    jobs = list(itertools.product(KINDS, tiles))
    num_processes = min(16, os.cpu_count() or 1)
    with ProcessPoolExecutor(num_processes, mp_context=get_context("spawn")) as pool:
        faults = list(pool.map(_check, jobs, [dtype] * len(jobs)))
    good = [job for job, fault in zip(jobs, faults, strict=True) if not fault]
    bad = [f"{kind} {t.name}: {fault}" for (kind, t), fault in zip(jobs, faults, strict=True) if fault]
    return good, bad


def _check(job: tuple[str, Tiles], dtype: str) -> str:
    """Compiles; what is wrong with it, or nothing."""
    from dmuon.newton_schulz import kernels

    kind, tiles = job
    num, size, depth = 3, 520, 520 if kind == "square" else 328
    A = torch.randn(num, *((depth, size) if kind == "tall" else (size, depth)), device="cuda")
    A = (A / depth**0.5).to(getattr(torch, dtype))
    if kind == "square":
        A = (A + A.mT) / 2
    out = torch.full((num, size, size), torch.nan, dtype=A.dtype, device="cuda")
    one_is_left = num_tiles(Product(kind, size, depth, num), tiles) - 1
    options: dict[str, Any] = {"tall": kind == "tall"}
    expected = A.double().mT @ A.double() if kind == "tall" else A.double() @ A.double().mT
    if kind == "square":
        options = {"alpha": 0.75, "beta": -0.5, "gamma": 1.5}
        eye = torch.eye(size, dtype=torch.float64, device="cuda")
        expected = 0.75 * expected - 0.5 * A.double() + 1.5 * eye
    try:
        kernels.symmetric_product(A, A, out, tiles, num_processors=one_is_left, **options)
        torch.cuda.synchronize()
    except Exception as failure:  # whatever the compiler or the driver says is the finding
        return f"{type(failure).__name__}: {str(failure).splitlines()[0] if str(failure) else ''}"[:200]
    error = ((out.double() - expected).norm() / expected.norm()).item()
    return "" if error < (1e-3 if dtype == "float16" else 8e-3) else f"off by {error:.1e}"


def write_table(capability: tuple[int, int], winners: dict[Product, Tiles]) -> None:
    """Puts these rows into this capability's part of the table in tuned.py."""
    path = Path(tuned.__file__)
    table = {**tuned.MEASURED, capability: {**tuned.MEASURED.get(capability, {}), **winners}}
    lines = ["MEASURED: dict[tuple[int, int], dict[Product, Tiles]] = {"]
    for key in sorted(table):
        lines.append(f"    {key}: {{")
        for product, tiles in sorted(table[key].items()):
            values = (repr(value).replace("'", '"') for value in (*product,))
            numbers = tiles if tiles.parts > 1 else tiles[:-1]
            lines.append(f"        Product({', '.join(values)}): Tiles({', '.join(map(repr, numbers))}),")
        lines.append("    },")
    text = path.read_text()
    path.write_text("\n".join([text[: text.index("MEASURED: ")] + lines[0], *lines[1:], "}", ""]))


if __name__ == "__main__":
    main()
