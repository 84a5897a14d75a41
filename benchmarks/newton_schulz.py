"""How far Newton-Schulz is from the floor, and the optimizer step from Newton-Schulz; on a GPU.

python -m benchmarks.newton_schulz --out benchmarks/results/newton_schulz_h200.json

The floor of a matrix n x a n is min(6 a + 14, 15 a + 5) n^3 over the rate of an 8192^3 product of random matrices in
the same number format. Rivals take turns, and so does that product, for the clock falls as the chip warms up: between
small cases it runs at a higher clock than large ones ever see. "ms" is
the iteration as training runs it, from normalised matrices to orthogonalised ones; "from_float32_ms" has the norm and
the division with it, as `torch.optim.Muon`'s has. Prints a table and one JSON line.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.optim import _muon as torch_muon

from benchmarks.record import record
from dmuon.assignment import assign, newton_schulz_flops
from dmuon.muon import Batch, Muon, batches, lr_scale
from dmuon.newton_schulz import iterate, orthogonalize
from dmuon.newton_schulz.coefficients import KELLER_JORDAN, resolve
from dmuon.newton_schulz.planning import BatchPlan
from dmuon.newton_schulz.updates import FusedUpdates, Piece
from dmuon.reference import orthogonalize_reference
from models.llama.sizes import FLAVORS

Shape = tuple[int, int, int]

# Shape, and the least fraction of the floor that is wanted.
CASES: dict[Shape, float | None] = {
    (1, 4096, 4096): 0.82,
    (8, 4096, 4096): 0.85,
    (1, 4096, 14336): 0.76,
    (1, 14336, 4096): 0.76,
    (4, 4096, 14336): 0.80,
    (4, 14336, 4096): 0.80,
    (1, 2048, 8192): 0.72,
    (16, 1024, 4096): 0.50,
    (16, 512, 2048): 0.35,
    (1, 1024, 4096): None,
    (8, 1024, 4096): None,
    (1, 3072, 8192): None,
    (4, 8192, 3072): None,
    (7, 2048, 2048): None,
    (16, 128, 512): None,
    (16, 250, 1000): None,
    (1, 5000, 5000): None,
}

GROUP: dict[str, Any] = {
    "lr": 3e-4,
    "weight_decay": 0.1,
    "momentum": 0.95,
    "nesterov": True,
    "adjust_lr_fn": "match_rms_adamw",
    "ns_steps": 5,
    "ns_backend": "gram",
    "ns_coefficients": "polar_express",
}
TRIPLES = resolve("polar_express", 5)
PEAK_SIZE = 8192
HEAD_START_CYCLES = 4_000_000  # 2 ms
HAS_QUACK = importlib.util.find_spec("quack") is not None
SECTIONS = ("cases", "share", "accuracy", "first-use")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=("float16", "bfloat16"), default="float16")
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--out", type=Path, help="write all figures to this file")
    parser.add_argument("--only", nargs="+", default=SECTIONS, choices=SECTIONS)
    parser.add_argument(
        "--in-this-process", action="store_true", help="how long the first use takes here; nothing else"
    )
    arguments = parser.parse_args()
    if arguments.in_this_process:
        first_use()
        return
    measured: dict[str, Any] = {}
    cases = []
    if "cases" in arguments.only:
        for shape, wanted in CASES.items():
            cases.append({**measure_case(shape, arguments.dtype, arguments.rounds), "wanted": wanted})
    if "share" in arguments.only:
        measured["share"] = measure_share(arguments.dtype, arguments.rounds)
    for case in [*cases, *([measured["share"]] if "share" in measured else [])]:
        case["floor_ms"] = case["flops"] * case["peak_ms"] / (2 * PEAK_SIZE**3)
        case["fraction"] = case["floor_ms"] / case["ms"]
        print(_row(case), flush=True)
    if "share" in measured:
        print(f"step {measured['share']['step_ms']:.2f} ms, {measured['share']['step_over_newton_schulz']:.3f} of it")
    if "accuracy" in arguments.only:
        measured["accuracy"] = [measure_accuracy(n, a, kind) for n in (1024, 4096) for a in (1, 2) for kind in SPECTRA]
    if "first-use" in arguments.only:
        measured["first_use"] = measure_first_use()
    line = record("newton_schulz", dtype=arguments.dtype, cases=cases, **measured)
    print(json.dumps({key: value for key, value in line.items() if key not in ("cases", "accuracy")}))
    if arguments.out:
        arguments.out.write_text(json.dumps(line) + "\n")


def measure_case(shape: Shape, dtype: str, rounds: int) -> dict[str, Any]:
    """One batch, as planned, beside torch.optim.Muon's iteration and our own torch kernel."""
    format_ = getattr(torch, dtype)
    fused = FusedUpdates("auto")
    plan = fused.plan([shape], torch.device("cuda"), {**GROUP, "ns_dtype": dtype})
    update = torch.randn(shape, device="cuda")
    normalized = (update / torch.linalg.matrix_norm(update, keepdim=True)).to(format_)
    works: dict[str, Callable[[], object]] = {
        "ms": _planned(fused, plan, normalized),
        "from_float32_ms": lambda: orthogonalize(update, dtype=format_),
        "torch_kernel_ms": lambda: iterate(normalized, kernel="torch"),
        "torch_optim_ms": lambda: [torch_optim(matrix) for matrix in update],
        "peak_ms": peak(format_),
    }
    before = {"ms": _filling(fused, plan, normalized)}
    if HAS_QUACK:
        quack = FusedUpdates("quack")
        by_quack = quack.plan([shape], torch.device("cuda"), {**GROUP, "ns_dtype": dtype})
        works["quack_ms"] = _planned(quack, by_quack, normalized)
        before["quack_ms"] = _filling(quack, by_quack, normalized)
    times = take_turns(works, rounds, before)
    return {"shape": shape, "flops": plan.flops, "plan": str(plan), **_summary(times)}


def measure_share(dtype: str, rounds: int) -> dict[str, Any]:
    """What the most loaded of 8 ranks owns of Llama 8B's 32 blocks: Newton-Schulz, and the whole step."""
    format_ = getattr(torch, dtype)
    fused, plain = FusedUpdates("auto"), FusedUpdates("torch")
    work = share(fused, dtype)
    by_torch = [batch._replace(plan=_plan(plain, batch.group, batch.pieces)) for batch in work]
    pieces = [piece for batch in work for piece in batch.pieces]
    plans = [batch.plan for batch in work]
    # A buffer for each batch, so that all can be filled before the clock starts; graphs have their own.
    own = FusedUpdates("auto")
    sources = [(torch.randn(plan.shape, device="cuda") / plan.shape[1] ** 0.5 / 100).to(format_) for plan in plans]

    def newton_schulz() -> None:
        for plan, source in zip(plans, sources, strict=True):
            own.execution.run(plan, TRIPLES, own.execution.input(plan, TRIPLES, source.device).copy_(source))

    def copying() -> None:
        for plan, source in zip(plans, sources, strict=True):
            own.execution.input(plan, TRIPLES, source.device).copy_(source)

    def torch_kernel_step() -> None:
        update(plain, by_torch)
        for piece in pieces:
            assert piece.compute is not None
            piece.compute.copy_(piece.master)

    works: dict[str, Callable[[], object]] = {
        "with_copies_ms": newton_schulz,
        "copies_ms": copying,
        "step_ms": lambda: update(fused, work),
        "torch_kernel_step_ms": torch_kernel_step,
        "torch_optim_ms": lambda: [torch_optim(piece.grad[0]) for piece in pieces],
        "peak_ms": peak(format_),
    }
    times = take_turns(works, rounds, {})
    summary = _summary(times)
    # The input of an iteration is made by the pass before it: what copying it cost here is not its own.
    summary["ms"] = summary["with_copies_ms"] - summary["copies_ms"]
    return {
        "shape": "share of Llama 8B, 32 blocks over 8 ranks",
        "flops": sum(plan.flops for plan in plans),
        "plan": [str(plan) for plan in plans],
        "scale": lr_scale("match_rms_adamw", (4096, 4096)),
        "wanted": 0.72,
        "step_over_newton_schulz": summary["step_ms"] / summary["ms"],
        **summary,
    }


def share(updates: FusedUpdates, dtype: str) -> list[Batch]:
    """What that rank updates in a step, with random gradients."""
    shapes = share_shapes()
    group = {**GROUP, "ns_dtype": dtype}
    found = []
    for indices in batches([torch.Size((1, *shape)) for shape in shapes]):
        pieces = [_random_piece(shapes[index]) for index in indices]
        found.append(Batch(group, _plan(updates, group, pieces), [], pieces))
    return found


def _random_piece(shape: Sequence[int]) -> Piece:
    master, grad, momentum = (torch.randn(1, *shape, device="cuda") for _ in range(3))
    return Piece(master, grad, momentum, torch.empty_like(master, dtype=torch.bfloat16))


def _plan(updates: FusedUpdates, group: dict[str, Any], pieces: Sequence[Piece]) -> BatchPlan:
    return updates.plan([piece.master.shape for piece in pieces], pieces[0].master.device, group)


def update(updates: FusedUpdates, work: Sequence[Batch]) -> None:
    """As `dmuon.Muon.step` does."""
    optimizer: Any = SimpleNamespace(_fused=updates)
    for batch in work:
        Muon._update(optimizer, batch, None)


def share_shapes() -> list[tuple[int, ...]]:
    shapes = FLAVORS["llama3"]["8B"].parameter_shapes()
    shapes = {name: shape for name, shape in shapes.items() if name.startswith("layers.") and len(shape) == 2}
    owners = assign(shapes, 1, 8).owners
    loads: dict[Any, int] = {}
    for name, owner in owners.items():
        loads[owner] = loads.get(owner, 0) + newton_schulz_flops(shapes[name])
    longest = max(loads, key=loads.__getitem__)
    return [tuple(shapes[name]) for name, owner in owners.items() if owner == longest]


def peak(dtype: torch.dtype) -> Callable[[], object]:
    A, B = (torch.randn(PEAK_SIZE, PEAK_SIZE, device="cuda").to(dtype) for _ in range(2))
    return lambda: A @ B


def torch_optim(matrix: Tensor) -> Tensor:
    return torch_muon._zeropower_via_newtonschulz(matrix, KELLER_JORDAN[0], 5, 1e-7)


def _planned(fused: FusedUpdates, plan: BatchPlan, normalized: Tensor) -> Callable[[], object]:
    if plan.kernel == "torch":
        return lambda: iterate(normalized, kernel="torch")
    return lambda: fused.execution.run(plan, TRIPLES, filled[plan])


filled: dict[BatchPlan, Tensor] = {}


def _filling(fused: FusedUpdates, plan: BatchPlan, normalized: Tensor) -> Callable[[], object]:
    """What the pass before the iteration does, outside of the time taken."""

    def fill() -> None:
        if plan.kernel != "torch":
            X = fused.execution.input(plan, TRIPLES, normalized.device)
            X[:, : plan.shape[1], : plan.shape[2]].copy_(normalized)
            filled[plan] = X

    return fill


def take_turns(
    works: Mapping[str, Callable[[], object]], rounds: int, before: Mapping[str, Callable[[], object]]
) -> dict[str, list[float]]:
    """Milliseconds of each, in `rounds` rounds after two to warm up.

    In an order that changes from round to round: what comes after something that heated the chip finds a lower clock.
    The host is ahead when the clock starts, as after a backward: what it takes to launch the first kernel is not
    counted. What it takes beyond that is, wherever kernels wait for the host.
    """
    times: dict[str, list[float]] = {name: [] for name in works}
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    chance, names = random.Random(0), list(works)
    for turn in range(rounds + 2):
        chance.shuffle(names)
        for name in names:
            if name in before:
                before[name]()
            torch.cuda.synchronize()
            torch.cuda._sleep(HEAD_START_CYCLES)
            start.record()
            works[name]()
            stop.record()
            torch.cuda.synchronize()
            if turn >= 2:
                times[name].append(start.elapsed_time(stop))
    return times


SPECTRA = ("gaussian", "1e-2", "1e-3")


def measure_accuracy(n: int, ratio: int, kind: str) -> dict[str, Any]:
    """Against a float64 iteration of the same polynomial: relative error and largest singular value."""
    generator = torch.Generator("cuda").manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, device="cuda", generator=generator)

    matrix = random(n, n * ratio)
    if kind != "gaussian":
        u, v = torch.linalg.qr(random(n, n))[0], torch.linalg.qr(random(n * ratio, n))[0]
        exponent = float(kind.split("e")[1])
        matrix = (u * torch.logspace(0, exponent, n, dtype=torch.float64, device="cuda")) @ v.T
    expected = orthogonalize_reference(matrix, 5, "polar_express")
    found: dict[str, Any] = {"n": n, "ratio": ratio, "input": kind, "float64": {"largest": _largest(expected)}}
    for dtype in ("float16", "bfloat16"):
        for kernel in ("triton", "torch"):
            for backend in ("gram", "direct"):
                got = orthogonalize(matrix.float()[None], dtype=getattr(torch, dtype), backend=backend, kernel=kernel)[
                    0
                ].double()
                error = ((got - expected).norm() / expected.norm()).item()
                found[f"{kernel} {dtype} {backend}"] = {"error": error, "largest": _largest(got)}
    short = {key: f"{value['error']:.1e}/{value['largest']:.3f}" for key, value in found.items() if " " in key}
    print(n, ratio, kind, f"float64 {found['float64']['largest']:.3f}", short, flush=True)
    return found


def _largest(matrix: Tensor) -> float:
    """The largest singular value, by iterating on a subspace."""
    basis = torch.linalg.qr(torch.randn(matrix.shape[0], 32, dtype=torch.float64, device=matrix.device))[0]
    for _ in range(40):
        basis = torch.linalg.qr(matrix @ (matrix.T @ basis))[0]
    return torch.linalg.svdvals(matrix.T @ basis)[0].item()


def measure_first_use() -> dict[str, float]:
    """Seconds from the first launch to the end of the share's second step, without and with Triton's cache."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in ("cold_s", "warm_s"):
            command = [sys.executable, "-m", "benchmarks.newton_schulz", "--in-this-process"]
            environment = {**os.environ, "TRITON_CACHE_DIR": folder}
            output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
            found[name] = float(output.split()[-1])
    print(found, flush=True)
    return found


def first_use() -> None:
    """Prints how long the share's first two steps take in this process."""
    updates = FusedUpdates("auto")
    work = share(updates, "float16")
    torch.randn(64, 64, device="cuda") @ torch.randn(64, 64, device="cuda")
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(2):
        update(updates, work)
        torch.cuda.synchronize()
    print(time.perf_counter() - started)


def _summary(times: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    figures: dict[str, Any] = {name: statistics.median(each) for name, each in times.items()}
    figures["spread"] = {name: [min(each), max(each)] for name, each in times.items()}
    return figures


def _row(case: Mapping[str, Any]) -> str:
    shape = case["shape"]
    name = shape if isinstance(shape, str) else "{} x {} x {}".format(*shape)
    wanted = "" if case["wanted"] is None else f" (wanted {case['wanted']})"
    rivals = {key: f"{case[key]:.3f}" for key in case if key.endswith("_ms")}
    return f"{name}: {case['ms']:.3f} ms, {case['fraction']:.3f}{wanted} {rivals} {case['plan']}"


if __name__ == "__main__":
    main()
