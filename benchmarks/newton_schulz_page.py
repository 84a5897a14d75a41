"""Puts a result of benchmarks/newton_schulz.py into docs/kernels.md. Needs no GPU.

python -m benchmarks.newton_schulz_page benchmarks/results/newton_schulz_h200.json
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "docs" / "kernels.md"
MARKED = re.compile(r"(<!-- benchmarks\.newton_schulz -->)\n\n(.*?)\n\n(<!-- end -->)", re.DOTALL)
KERNELS = [f"{k} {d} {f}" for d in ("float16", "bfloat16") for k in ("triton", "torch") for f in ("gram", "direct")]


def main() -> None:
    """Replace the marked part of the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path)
    result = parser.parse_args().result
    text = tables(json.loads(result.read_text()), result)
    PAGE.write_text(MARKED.sub(lambda match: f"{match[1]}\n\n{text}\n\n{match[3]}", PAGE.read_text()))


def tables(line: Mapping[str, Any], result: Path) -> str:
    """Markdown."""
    share, first = line["share"], line["first_use"]
    times = [
        _times(case, case["spread"]["with_copies_ms" if case is share else "ms"]) for case in line["cases"] + [share]
    ]
    errors = [
        f"| {case['n']} x {case['n'] * case['ratio']}, {case['input']} | "
        + " | ".join(f"{case[kernel]['error']:.1e}, {case[kernel]['largest']:.2f}" for kernel in KERNELS)
        for case in line["accuracy"]
    ]
    return "\n".join(
        [
            f"{line['device']}, torch {line['torch']}, {line['dtype']}, commit {line['commit']}: {result}, made by",
            "",
            f"    {line['command']}",
            "",
            "| matrices | ms | fraction of the floor | wanted | torch kernel, ms | torch.optim.Muon, ms |",
            "|---|---|---|---|---|---|",
            *times,
            "",
            f"The whole step of that share, momentum to compute copy, takes {share['step_ms']:.1f} ms, "
            f"{share['step_over_newton_schulz']:.2f} times its Newton-Schulz;",
            f"with the torch kernel {share['torch_kernel_step_ms']:.1f} ms. Its first two steps take "
            f"{first['cold_s']:.1f} s on a new machine, compilation included, and",
            f"{first['warm_s']:.1f} s once Triton's cache is warm.",
            "",
            "Relative error against a float64 iteration of the same polynomial, Polar Express, and largest singular",
            "value, in float64 1.12. Inputs are Gaussian or have singular values that decay to the number given:",
            "",
            f"| input | {' | '.join(KERNELS)} |",
            "|---" * (len(KERNELS) + 1) + "|",
            *(f"{row} |" for row in errors),
        ]
    )


def _times(case: Mapping[str, Any], spread: tuple[float, float]) -> str:
    shape = case["shape"]
    cells = [
        shape if isinstance(shape, str) else f"{shape[0]} of {shape[1]} x {shape[2]}",
        f"{case['ms']:.3f} ({spread[0]:.3f} - {spread[1]:.3f})",
        f"{case['fraction']:.2f}",
        "" if case["wanted"] is None else f"{case['wanted']:.2f}",
        f"{case['torch_kernel_ms']:.3f}" if "torch_kernel_ms" in case else "",
        f"{case['torch_optim_ms']:.3f}",
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
