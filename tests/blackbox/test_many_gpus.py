"""The rehearsal of `benchmarks.many_gpus` on two CPU ranks: what is to run on borrowed GPUs runs at all."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.blackbox.job import REPOSITORY

COMPARISONS = {
    "replicate rows = shard axis",
    "published late = at once",
    "Z2 = Z3",
    "restarted = uninterrupted",
    "control: other data",
}


def test_exactness_and_collectives_on_two_ranks(tmp_path: Path) -> None:
    out = tmp_path / "many_gpus.jsonl"
    command = [sys.executable, "-m", "benchmarks.many_gpus", "--rehearse", "2", "--only", "exactness", "collectives"]
    ended = subprocess.run([*command, "--out", str(out)], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    parts = [line for line in lines if line["benchmark"] == "many_gpus"]
    assert [(part["part"], part["status"]) for part in parts] == [
        ("exactness, one rank", "done"),
        ("exactness, 2", "done"),
        ("collectives, 2", "done"),
    ]

    compared = [line for line in lines if line["benchmark"] == "many_gpus.exactness"]
    expected = {(name, dtype) for name in COMPARISONS for dtype in ("float32", "bfloat16")}
    assert {(line["comparison"], line["dtype"]) for line in compared} == {
        *expected,
        ("tensor parallelism = one rank", "float32"),
    }
    for line in compared:
        assert line["passed"], line
        assert line["every_parameter_moved"]
        assert (line["largest_difference"] == 0) == (line["wanted"] == "same bits"), line

    measured = [line for line in lines if line["benchmark"] == "many_gpus.collectives"]
    assert {(line["megabytes"], line["shares"]) for line in measured} == {
        (size, shares) for size in (0.25, 1) for shares in ("even", "1.0 : 1.5")
    }
    for line in measured:
        assert line["figures"].keys() == {
            "broadcasts",
            "all-gather, padded",
            "all-to-all",
            "reduces",
            "reduce-scatter, padded",
        }
        assert all(figures["ms"] > 0 for figures in line["figures"].values())
    for title in ("exactness", "collectives", "parts"):
        assert f"\n{title}\n\n| " in ended.stdout
