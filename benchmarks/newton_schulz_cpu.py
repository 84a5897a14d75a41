"""Newton-Schulz in plain torch on a CPU, at the debug model's shapes, beside torch.optim.Muon's iteration.

OMP_NUM_THREADS=1 python -m benchmarks.newton_schulz_cpu --out newton_schulz_cpu.json

Ours takes the matrices of one shape together, as training does, in float32, its default on a CPU, and in bfloat16,
which torch.optim.Muon iterates in; that takes one matrix after the other, in bfloat16 and, for comparison, in float32.
Contenders take turns. Which format is faster depends on the CPU: those with AMX multiply bfloat16 many times faster.
Prints a table and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import _muon as torch_muon

from benchmarks.record import record
from dmuon.newton_schulz import orthogonalize
from models.llama.sizes import FLAVORS

COEFFICIENTS = (torch_muon.DEFAULT_A, torch_muon.DEFAULT_B, torch_muon.DEFAULT_C)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    shapes = FLAVORS["llama3"]["debugmodel"].parameter_shapes()
    counts = Counter(shape for name, shape in shapes.items() if name.startswith("layers.") and len(shape) == 2)
    cases = [measure(count, shape, arguments.rounds) for shape, count in sorted(counts.items())]
    for case in cases:
        print(
            f"{case['count']:2} of {case['shape'][0]:3} x {case['shape'][1]:3}: "
            + ", ".join(f"{name} {case['ms'][name]:.2f} ms" for name in CONTENDERS)
            + f"; ours over torch.optim.Muon's: default {case['default_ratio']:.2f}, bfloat16 "
            f"{case['bfloat16_ratio']:.2f}, float32 {case['float32_ratio']:.2f}"
        )
    cpu = next((line.split(":")[1].strip() for line in _cpuinfo() if line.startswith("model name")), "unknown")
    amx = any("amx_bf16" in line for line in _cpuinfo())
    line = record("newton_schulz_cpu", cpu=cpu, amx_bf16=amx, num_threads=torch.get_num_threads(), cases=cases)
    print(json.dumps(line))
    if arguments.out:
        arguments.out.write_text(json.dumps(line) + "\n")


def measure(count: int, shape: tuple[int, ...], rounds: int) -> dict[str, Any]:
    """Medians of a batch, and ratios of rounds."""
    matrices = torch.randn(count, *shape)
    times: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for round_ in range(rounds + 3):
        for name, run in CONTENDERS.items():
            began = time.perf_counter()
            run(matrices)
            if round_ >= 3:
                times[name].append((time.perf_counter() - began) * 1e3)

    def ratio(ours: str, theirs: str) -> float:
        return statistics.median(a / b for a, b in zip(times[ours], times[theirs], strict=True))

    return {
        "count": count,
        "shape": shape,
        "ms": {name: statistics.median(values) for name, values in times.items()},
        "default_ratio": ratio("float32", "torch_bfloat16"),
        "bfloat16_ratio": ratio("bfloat16", "torch_bfloat16"),
        "float32_ratio": ratio("float32", "torch_float32"),
    }


def _torch_muon(matrices: Tensor) -> list[Tensor]:
    return [torch_muon._zeropower_via_newtonschulz(matrix, COEFFICIENTS, 5, torch_muon.EPS) for matrix in matrices]


def _torch_muon_in_float32(matrices: Tensor) -> list[Tensor]:
    """The same operations as torch.optim.Muon's, without its cast to bfloat16."""
    results = []
    a, b, c = COEFFICIENTS
    for matrix in matrices:
        X = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
        X = X / X.norm().clamp(min=torch_muon.EPS)
        for _ in range(5):
            A = X @ X.T
            X = torch.addmm(X, torch.addmm(A, A, A, beta=b, alpha=c), X, beta=a)
        results.append(X if matrix.shape[0] <= matrix.shape[1] else X.T)
    return results


CONTENDERS: dict[str, Callable[[Tensor], Any]] = {
    "float32": lambda matrices: orthogonalize(matrices, kernel="torch"),
    "bfloat16": lambda matrices: orthogonalize(matrices, dtype=torch.bfloat16, kernel="torch"),
    "torch_bfloat16": _torch_muon,
    "torch_float32": _torch_muon_in_float32,
}


def _cpuinfo() -> list[str]:
    file = Path("/proc/cpuinfo")
    return file.read_text().splitlines() if file.exists() else []


if __name__ == "__main__":
    main()
