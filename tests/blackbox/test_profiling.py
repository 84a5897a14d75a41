"""What `[profiling]` writes: a trace that names what the job did, and a page of figures that agree with it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.blackbox.runs import Runs

CONFIG = """
[model]
flavor = "debugmodel"
[training]
dataset_path = "data"
local_batch_size = 4
seq_len = 64
steps = 8
mixed_precision_param = "float32"
[validation]
enable = true
freq = 1
steps = 1
[profiling]
enable_profiling = true
profile_freq = 4
profiler_warmup = 1
profiler_active = 2
"""
PHASES = ("data loading", "forward", "backward", "clip", "agreement", "optimizer", "wait for the device", "validation")


def spans(trace: Path) -> list[dict[str, Any]]:
    return [event for event in json.loads(trace.read_text())["traceEvents"] if event.get("ph") == "X"]


def ms_of(events: list[dict[str, Any]], name: str) -> float:
    return sum(event["dur"] for event in events if event["name"] == name) / 1e3


def figures(summary: Path) -> dict[str, list[float]]:
    """By the name in front of them: (total, exposed) of a transfer, [ms] of the rest."""
    rows = re.findall(r"^  (\S.*?) {2,}([ \d.]+)(?:%|$)", summary.read_text(), re.MULTILINE)
    return {name: [float(number) for number in numbers.split()] for name, numbers in rows}


def test_a_trace_names_what_the_job_did_and_its_summary_agrees(tmp_path: Path) -> None:
    """On two ranks; recorded are the steps 3 and 4, a validation in each."""
    run = Runs(tmp_path, CONFIG, validation_tokens=1000).run("run", (1, 2))
    folder = run.folder / "profile_traces" / "step-4"
    assert sorted(path.name for path in folder.iterdir()) == [
        f"rank-{rank}_{kind}" for rank in (0, 1) for kind in ("summary.txt", "trace.json")
    ]
    assert f"{folder}/rank-0_summary.txt" in run.ended.stdout
    assert "Warning" not in run.ended.stderr  # of torch, that the steps 7 and 8 have a trace of their own
    assert (folder.parent / "step-8" / "rank-0_summary.txt").read_text().startswith("rank 0, steps 7 to 8: ")
    for rank in (0, 1):
        events, rows = spans(folder / f"rank-{rank}_trace.json"), figures(folder / f"rank-{rank}_summary.txt")
        names = {event["name"] for event in events}
        units = [f"layers.{layer}" for layer in range(6)]
        kinds = ("unshard", "wait unshard", "reduce", "wait reduce")
        assert {f"dmuon::{kind} {unit}" for kind in kinds for unit in units} <= names
        assert "dmuon::adamw" in names
        batches = {name for name in names if name.startswith("dmuon::newton_schulz ")}
        assert all(re.fullmatch(r"dmuon::newton_schulz \d+x\d+x\d+", name) for name in batches)

        step_ms = rows["together"][0]
        steps = [event for event in events if event["name"].startswith("ProfilerStep#")]
        assert len(steps) == 2
        assert sum(event["dur"] for event in steps) / 2e3 == pytest.approx(step_ms, rel=1e-3)
        assert (folder / f"rank-{rank}_summary.txt").read_text().startswith(f"rank {rank}, steps 3 to 4: ")
        for phase in PHASES:
            assert rows[phase] == [pytest.approx(ms_of(events, f"titan::{phase}") / 2, abs=2e-3)]
        assert 0.5 * step_ms < sum(rows[phase][0] for phase in PHASES) <= step_ms
        newton_schulz = rows["Newton-Schulz, all"][0]
        assert newton_schulz == pytest.approx(sum(ms_of(events, name) for name in batches) / 2, abs=2e-3)
        assert 0 < newton_schulz + rows["AdamW"][0] <= rows["optimizer"][0]
        parts = [rows[name][0] for name in ("computing", "exposed communication", "neither")]
        assert sum(parts) == pytest.approx(step_ms, abs=2e-3)
        for kind in ("unshard", "reduce", "FSDP all-gather", "FSDP reduce-scatter", "all-reduce"):
            total, exposed = rows[kind]
            assert 0 <= exposed <= total <= step_ms
            assert total > 0
