"""Puts results into docs/performance.md. Needs no GPU.

python -m benchmarks.performance_page
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from benchmarks.many_gpus.tables import TABLES as MANY_GPUS
from benchmarks.page import DOCS, markdown_table, replace_marked

RESULTS = DOCS.parent / "benchmarks" / "results"
NEWTON_SCHULZ = "newton_schulz_h200.json"


def main() -> None:
    """Replace every table of the page."""
    for name, table in TABLES.items():
        replace_marked(DOCS / "performance.md", name, table())


def newton_schulz() -> str:
    """Fractions of the floor."""
    (line,) = _lines(NEWTON_SCHULZ)
    timed = [*line["cases"], line["share"]]
    peak_ms = statistics.median(case["peak_ms"] for case in timed)
    rows = []
    for case in timed:
        if case["wanted"] is None and case is not line["share"]:
            continue
        shape = case["shape"]
        rows.append(
            (
                shape if isinstance(shape, str) else f"{shape[0]} of {shape[1]} x {shape[2]}",
                f"{case['ms']:.2f}",
                f"{case['fraction']:.2f}",
                f"{case['fraction'] * peak_ms / case['peak_ms']:.2f}",
                f"{case['wanted']:.2f}",
                f"{case['torch_optim_ms'] / case['ms']:.2f}",
            )
        )
    header = ("matrices", "ms", "of the floor", "of the run's", "wanted", "times as fast as torch.optim.Muon's")
    return _table(header, rows, [(NEWTON_SCHULZ, line)])


def optimizer_step() -> str:
    """Whole steps over their Newton-Schulz."""
    (line,) = _lines(NEWTON_SCHULZ)
    share = line["share"]
    rows = [
        (
            share["shape"],
            f"{share['ms']:.1f}",
            f"{share['step_ms']:.1f}",
            f"{share['step_over_newton_schulz']:.2f}",
            "1.15",
            f"{share['torch_kernel_step_ms']:.1f}",
        )
    ]
    header = ("matrices", "Newton-Schulz, ms", "step, ms", "ratio", "wanted", "step by the torch kernel, ms")
    return _table(header, rows, [(NEWTON_SCHULZ, line)])


def step_time() -> str:
    """Muon beside AdamW, one row a contender."""
    name = "step_time_h200.jsonl"
    lines = _lines(name)
    rows = []
    for line in lines:
        for contender, figures in line["contenders"].items():
            adamw = line["contenders"]["adamw"]
            ours = contender == "muon"
            rows.append(
                (
                    f"{line['flavor']}, {line['activation_checkpoint']}, {line['commit'][:7]}",
                    contender,
                    f"{figures['ms']:.1f} ({figures['ms_min']:.1f} - {figures['ms_max']:.1f})",
                    f"{line['muon_over_adamw'] if ours else figures['ms'] / adamw['ms']:.3f}",
                    f"{line['difference_over_floor']:.2f} of {line['floor_ms']:.1f}" if ours else "",
                    f"{figures['peak_gib']:.1f}",
                    f"{figures['mfu']:.1%}",
                )
            )
    header = ("model, checkpointing, commit", "optimizer", "ms a step", "over AdamW", "floors, ms", "peak GiB", "MFU")
    return _table(header, rows, [(name, line) for line in lines])


def training_speed() -> str:
    """The harness beside TorchTitan."""
    name = "training_speed_h200.jsonl"
    lines = _lines(name)
    rows = [
        (
            f"{case['name']}, {line['commit'][:7]}",
            f"{case['tokens_per_s']:,.0f}",
            f"{case['measured_mfu']:.1f} %",
            f"{case['mfu']:.1f} %",
            f"{case['measured_mfu'] / case['mfu']:.3f}",
            f"{case['measured_gib']:.1f}",
            f"{case['reserved_gib']:.1f}",
        )
        for line in lines
        for case in line["cases"]
    ]
    header = ("job, commit", "tokens/s/GPU", "MFU", "TorchTitan", "ratio", "reserved GiB", "TorchTitan")
    return _table(header, rows, [(name, line) for line in lines])


def publish() -> str:
    """Transfers beside computation."""
    names = ["overlap_h200_replicate.json", "overlap_h200_shard.json"]
    lines = [line for name in names for line in _lines(name)]
    rows = [
        (
            f"replicate {line['mesh']['replicate']}, shard {line['mesh']['shard']}",
            transfer,
            f"{share['ms_a_step']:.1f}",
            f"{share['hidden']:.1%}",
        )
        for line in lines
        for transfer, share in line["hidden"].items()
        if transfer != "fsdp"
    ]
    return _table(("mesh", "transfer", "ms a step", "hidden"), rows, list(zip(names, lines, strict=True)))


def cpu() -> str:
    """The torch kernel on CPUs, with instructions that multiply bfloat16 and without."""
    name = "newton_schulz_cpu.jsonl"
    lines = _lines(name)
    rows = [
        (
            line["cpu"] + (", AMX" if line["amx_bf16"] else ""),
            f"{case['count']} of {case['shape'][0]} x {case['shape'][1]}",
            f"{case['ms']['float32']:.2f}",
            f"{case['ms']['bfloat16']:.2f}",
            f"{case['ms']['torch_bfloat16']:.2f}",
            f"{case['bfloat16_ratio']:.2f}",
            f"{case['float32_ratio']:.2f}",
            f"{case['default_ratio']:.2f}",
        )
        for line in lines
        for case in line["cases"]
    ]
    header = (
        "CPU",
        "matrices",
        "ours, float32, ms",
        "ours, bfloat16, ms",
        "torch.optim.Muon's, ms",
        "ratio, both bfloat16",
        "both float32",
        "float32 over bfloat16",
    )
    return _table(header, rows, [(name, line) for line in lines])


def many_gpus() -> str:
    """Every table of each result there is, or how to get one."""
    files = sorted(RESULTS.glob("many_gpus_*.jsonl"))
    if not files:
        return "Not measured yet."
    return "\n\n".join(text for file in files for text in _tables_of_many_gpus(file.name))


def _tables_of_many_gpus(name: str) -> Iterator[str]:
    lines = _lines(name)
    (machine, *_) = (line for line in lines if "device" in line)
    yield f"### {machine['num_devices']} {machine['device']}"
    for title, table in MANY_GPUS.items():
        header, rows = table(lines)
        if rows:
            yield f"{title[0].upper()}{title[1:]}:"
            yield markdown_table(header, rows)
    # What a part measured comes before the line that tells of the part.
    commit, sources = "", dict[tuple[str, str], None]()
    for line in lines:
        commit = line.get("commit", commit)
        if line["benchmark"] == "many_gpus" and commit:
            sources[commit, line["command"]] = None
    for commit, command in sources:
        yield _source(name, machine | {"commit": commit, "command": command})


TABLES: dict[str, Callable[[], str]] = {
    "newton schulz": newton_schulz,
    "optimizer step": optimizer_step,
    "step time": step_time,
    "training speed": training_speed,
    "publish": publish,
    "cpu": cpu,
    "many gpus": many_gpus,
}


def _lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RESULTS / name).read_text().splitlines()]


def _table(header: Sequence[str], rows: Iterable[Sequence[str]], sources: Sequence[tuple[str, dict[str, Any]]]) -> str:
    return "\n\n".join([markdown_table(header, rows), *(_source(name, source) for name, source in sources)])


def _source(name: str, line: dict[str, Any]) -> str:
    device = line.get("cpu", line["device"])
    return (
        f"benchmarks/results/{name}: {device}, torch {line['torch']}, commit {line['commit'][:7]}\n\n"
        f"    {line['command']}"
    )


if __name__ == "__main__":
    main()
