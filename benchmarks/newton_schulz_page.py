"""Puts a result of benchmarks/newton_schulz.py into docs/kernels.md. Needs no GPU.

python -m benchmarks.newton_schulz_page benchmarks/results/newton_schulz_h200.json
python -m benchmarks.newton_schulz_page benchmarks/results/newton_schulz_quack_h200.jsonl

Times of quack's fill a table of their own, two columns a line of the file; all the rest needs every section.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.page import DOCS, markdown_table, replace_marked

KERNELS = [f"{k} {d} {f}" for d in ("float16", "bfloat16") for k in ("triton", "torch") for f in ("gram", "direct")]


def main() -> None:
    """Replace the marked part of the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path)
    result = parser.parse_args().result
    lines = [json.loads(line) for line in result.read_text().splitlines()]
    if "quack_ms" in lines[0]["cases"][0]:
        replace_marked(DOCS / "kernels.md", "quack", beside_quack(lines, result))
    if "accuracy" in lines[0]:
        replace_marked(DOCS / "kernels.md", "benchmarks.newton_schulz", tables(lines[0], result))


def beside_quack(lines: Sequence[Mapping[str, Any]], result: Path) -> str:
    """Markdown: what each line has for a case."""
    header = ["matrices", *(f"{column}, {line['commit']}" for line in lines for column in ("Triton, ms", "quack, ms"))]
    rows = []
    for cases in zip(*(line["cases"] for line in lines), strict=True):
        cells = [
            cell
            for case in cases
            for cell in (f"{case['ms']:.3f}", f"{case['quack_ms']:.3f} ({case['quack_ms'] / case['ms']:.2f})")
        ]
        num, *shape = cases[0]["shape"]
        rows.append([f"{num} of {shape[0]} x {shape[1]}", *cells])
    made = lines[0]
    source = f"{result}: {made['device']}, torch {made['torch']}, {made['dtype']}, made by\n\n    {made['command']}"
    return f"{markdown_table(header, rows)}\n\n{source}"


def tables(line: Mapping[str, Any], result: Path) -> str:
    """Markdown."""
    share, first = line["share"], line["first_use"]
    timed = [*line["cases"], share]
    peak_ms = statistics.median(case["peak_ms"] for case in timed)
    times = [_times(case, peak_ms) for case in timed]
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
            "| matrices | ms | of the floor | of the run's | wanted | torch kernel, ms | torch.optim.Muon, ms |",
            "|---|---|---|---|---|---|---|",
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


def _times(case: Mapping[str, Any], peak_ms: float) -> str:
    shape = case["shape"]
    shortest, longest = case["spread"]["with_copies_ms" if "with_copies_ms" in case else "ms"]
    cells = [
        shape if isinstance(shape, str) else f"{shape[0]} of {shape[1]} x {shape[2]}",
        f"{case['ms']:.3f} ({shortest:.3f} - {longest:.3f})",
        f"{case['fraction']:.2f}",
        f"{case['fraction'] * peak_ms / case['peak_ms']:.2f}",
        "" if case["wanted"] is None else f"{case['wanted']:.2f}",
        f"{case['torch_kernel_ms']:.3f}" if "torch_kernel_ms" in case else "",
        f"{case['torch_optim_ms']:.3f}",
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
