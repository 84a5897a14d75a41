"""What the lines say, as tables: header and rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

Line = dict[str, Any]
Table = tuple[Sequence[str], Sequence[Sequence[str]]]


def _of(lines: Sequence[Line], kind: str) -> list[Line]:
    return [line for line in lines if line["benchmark"] == f"many_gpus.{kind}"]


def _mesh(degrees: Sequence[int]) -> str:
    return f"({', '.join(map(str, degrees))})"


def exactness(lines: Sequence[Line]) -> Table:
    """A row for each comparison."""
    rows = [
        (
            line["comparison"],
            f"{line['flavor']}, {line['num_layers']} layers, {line['dtype']}",
            _mesh(line["degrees"]),
            _mesh(line["against"]),
            line["wanted"],
            "yes" if line["passed"] else f"**no**: {line['first_difference']}",
            f"{line['largest_difference']:.1e}",
        )
        for line in _of(lines, "exactness")
    ]
    return ("comparison", "model", "mesh", "against", "wanted", "passed", "largest difference"), rows


def collectives(lines: Sequence[Line]) -> Table:
    """A row for each size, a column for each way."""
    found = _of(lines, "collectives")
    ways = list(dict.fromkeys(way for line in found for way in line["figures"]))
    rows = [
        (
            f"{line['num_ranks']}",
            f"{line['megabytes']:g}",
            line["shares"],
            *(
                f"{figures['ms']:.3f} ({figures['gb_per_s']:.0f})" if (figures := line["figures"].get(way)) else ""
                for way in ways
            ),
        )
        for line in found
    ]
    return ("ranks", "MB of bf16", "shares", *(f"{way}, ms (GB/s)" for way in ways)), rows


def step_time(lines: Sequence[Line]) -> Table:
    """A row for each contender; on one shard axis, its tokens against those of one GPU."""
    found = _of(lines, "steps")
    alone = {
        (line["flavor"], line["num_layers"], name): figures["tokens_per_s_and_gpu"]
        for line in found
        if line["num_ranks"] == 1
        for name, figures in line["contenders"].items()
    }
    rows = []
    for line in found:
        for name, figures in line["contenders"].items():
            one_gpu = alone.get((line["flavor"], line["num_layers"], name))
            is_flat = line["degrees"][0] == line["degrees"][2] == 1
            adamw = line["contenders"].get("adamw")
            over_adamw = line.get("muon_over_adamw") if name == "muon" else adamw and figures["ms"] / adamw["ms"]
            has_floors = name == "muon" and adamw
            floors = f"{line['difference_over_floor']:.2f} of {line['floor_ms']:.1f}" if has_floors else ""
            rows.append(
                (
                    f"{line['flavor']}, {line['num_layers']} layers",
                    _mesh(line["degrees"]),
                    name,
                    f"{figures['ms']:.1f} ({figures['ms_min']:.1f} - {figures['ms_max']:.1f})",
                    f"{over_adamw:.3f}" if over_adamw else "",
                    floors,
                    f"{figures['tokens_per_s_and_gpu']:,.0f}",
                    f"{figures['tokens_per_s_and_gpu'] / one_gpu:.1%}" if one_gpu and is_flat else "",
                    f"{figures['mfu']:.1%}",
                    f"{figures['peak_gib']:.1f}",
                )
            )
    cost = ("ms a step", "over AdamW", "floors, ms")
    return ("model", "mesh", "optimizer", *cost, "tokens/s/GPU", "of one GPU's", "MFU", "peak GiB"), rows


def step_parts(lines: Sequence[Line]) -> Table:
    """A row for each part of Muon's step on each mesh."""
    header = ("model", "mesh", "part of Muon's step", "ms", "predicted", "exposed", "exposed, of the step")
    return header, list(_step_parts(_of(lines, "steps")))


def _step_parts(lines: Sequence[Line]) -> Iterator[Sequence[str]]:
    for line in lines:
        for name, part in line.get("parts", {}).items():
            if part["ms"] > 0:
                yield (
                    f"{line['flavor']}, {line['num_layers']} layers",
                    _mesh(line["degrees"]),
                    name,
                    f"{part['ms']:.2f}",
                    f"{part['predicted_ms']:.2f}" if "predicted_ms" in part else "",
                    f"{part['exposed_ms']:.2f}",
                    f"{part['exposed_share_of_step']:.1%}",
                )


def speed(lines: Sequence[Line]) -> Table:
    """A row for each job, and TorchTitan's."""
    found = _of(lines, "speed")
    rows = [
        (
            f"{line['num_layers']} layers, {line['num_ranks']} {line['device']}, {line['optimizer']}",
            f"{line['tokens_per_s_and_gpu']:,.0f}",
            f"{line['mfu']:.1f} %",
            f"{line['reserved_gib']:.1f}",
        )
        for line in found
    ]
    if found:
        published = found[0]["torchtitan"]
        tokens = f"{published['tokens_per_s_and_gpu']:,}"
        rows.append(("TorchTitan: 32 layers, 8 H100 of 500 W, AdamW", tokens, f"{published['mfu']:.1f} %", ""))
    return ("job", "tokens/s/GPU", "MFU", "reserved GiB"), rows


def parts(lines: Sequence[Line]) -> Table:
    """How long each part took."""
    rows = [
        (line["part"], line["status"], f"{line['seconds']:.0f}", f"{line['estimate_s']}")
        for line in lines
        if line["benchmark"] == "many_gpus"
    ]
    return ("part", "status", "seconds", "estimated"), rows


TABLES: dict[str, Callable[[Sequence[Line]], Table]] = {
    "exactness": exactness,
    "collectives": collectives,
    "step time": step_time,
    "where Muon's step goes": step_parts,
    "8B as a job": speed,
    "parts": parts,
}
