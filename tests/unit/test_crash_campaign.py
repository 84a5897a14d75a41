"""The crash campaign's verifier notices what it is there for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.crash_campaign import (
    EXIT,
    PUBLISHING,
    REMOVING,
    START_UP,
    STEP,
    VERIFYING,
    WRITING,
    complete_steps,
    continued_from,
    differences,
    folders_in,
    lost_checkpoint,
    misplaced,
    phase_of,
)
from dmuon_titan.checkpoint.manifest import DCP, FULL, Manifest, store

NUM_STEPS = 6
LOGGED = "[titan] 2026-11-29 22:03:09 - INFO - step:  1  loss:  8.0701  grad_norm:  1.3538\n"


def make_checkpoint(checkpoints: Path, step: int, content: bytes = b"tensors") -> Path:
    folder = checkpoints / f"step-{step}"
    folder.mkdir(parents=True)
    (folder / "__0_0.distcp").write_bytes(content)
    files = {"__0_0.distcp": store(folder / "__0_0.distcp")}
    Manifest(FULL, DCP, step, step, files, model={}, config={}, run={}, versions={}).write(folder)
    return folder


def make_run(folder: Path) -> Path:
    """What a run of 6 steps on 2 ranks leaves."""
    (folder / "trace").mkdir(parents=True)
    metrics = [
        {
            "step": step,
            "loss_metrics/global_avg_loss": 8 - step / 7,
            "loss_metrics/global_max_loss": 8 - step / 9,
            "grad_norm": 1 + step / 3,
            "lr": 0.01,
            "n_tokens_seen": 16 * step,
            "throughput(tps)": len(folder.name),
        }
        for step in range(1, NUM_STEPS + 1)
    ]
    write(folder / "metrics.jsonl", metrics)
    for rank in range(2):
        trace = [{"step": step, "micro": 0, "dp_rank": rank, "sha1": f"{step}{rank}"} for step in range(1, 7)]
        write(folder / "trace" / f"rank-{rank}.jsonl", trace)
    for step in (4, 6):
        make_checkpoint(folder / "checkpoint", step)
    return folder


def write(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def edit(path: Path, change: Callable[[list[dict[str, Any]]], object]) -> None:
    records = [json.loads(line) for line in path.read_text().splitlines()]
    change(records)
    write(path, records)


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    """A run and the reference, which differ in nothing but what depends on the clock."""
    run, reference = make_run(tmp_path / "run"), make_run(tmp_path / "reference")
    assert differences(run, reference) == []
    return run, reference


def other_loss(records: list[dict[str, Any]]) -> None:
    records[3]["loss_metrics/global_avg_loss"] += 1e-15


def other_norm(records: list[dict[str, Any]]) -> None:
    records[3]["grad_norm"] += 1e-15


def repeated_step(records: list[dict[str, Any]]) -> None:
    records.insert(4, records[3])


@pytest.mark.parametrize("change", [other_loss, other_norm, repeated_step, list.reverse, list.pop])
def test_other_figures_are_noticed(change: Callable[[list[dict[str, Any]]], object], runs: tuple[Path, Path]) -> None:
    edit(runs[0] / "metrics.jsonl", change)
    (found,) = differences(*runs)
    assert found.startswith("metrics.jsonl: ")


def repeated_batch(records: list[dict[str, Any]]) -> None:
    records[4]["sha1"] = records[3]["sha1"]


@pytest.mark.parametrize("change", [repeated_batch, repeated_step, list.pop])
def test_other_batches_are_noticed_on_any_rank(
    change: Callable[[list[dict[str, Any]]], object], runs: tuple[Path, Path]
) -> None:
    edit(runs[0] / "trace" / "rank-1.jsonl", change)
    (found,) = differences(*runs)
    assert found.startswith("trace/rank-1.jsonl: ")


def test_missing_records_and_other_tensors_are_noticed(runs: tuple[Path, Path]) -> None:
    run, reference = runs
    (run / "trace" / "rank-0.jsonl").unlink()
    (run / "checkpoint" / "step-6").rename(run / "aside")
    make_checkpoint(run / "checkpoint", 6, b"Tensors")
    first, second = differences(run, reference)
    assert first.startswith("trace/rank-0.jsonl: ")
    assert second.startswith("checkpoint: saved last")


def test_a_checkpoint_counts_with_all_its_bytes_only(tmp_path: Path) -> None:
    for step in (2, 4, 6, 8):
        make_checkpoint(tmp_path, step)
    (tmp_path / "step-2" / "manifest.json").unlink()
    (tmp_path / "step-4" / "__0_0.distcp").write_bytes(b"tensor")
    (tmp_path / "step-6" / "__0_0.distcp").write_bytes(b"tensorz")
    make_checkpoint(tmp_path / "elsewhere", 10).rename(tmp_path / "step-10.tmp")
    assert complete_steps(tmp_path) == [8]
    assert lost_checkpoint(tmp_path, "saved step 6 in x\nsaved step 8 in x\n") is None
    (tmp_path / "step-8" / "__0_0.distcp").unlink()
    assert lost_checkpoint(tmp_path, "no such line") is None
    assert lost_checkpoint(tmp_path, "saved step 6 in x\nsaved step 8 in x\n") == (
        "step 8 was said to be saved, complete are none"
    )


def test_what_should_not_be_there_in_the_end_is_noticed(runs: tuple[Path, Path]) -> None:
    checkpoints = runs[0] / "checkpoint"
    assert misplaced(checkpoints, NUM_STEPS, None) == []
    assert misplaced(checkpoints, NUM_STEPS, 4) == []
    make_checkpoint(checkpoints, 2)
    assert misplaced(checkpoints, NUM_STEPS, 2) == []  # that a run continued from is kept as well
    assert len(misplaced(checkpoints, NUM_STEPS, 4)) == 2
    (checkpoints / "step-2").rename(checkpoints / "step-2.tmp")
    assert len(misplaced(checkpoints, NUM_STEPS, None)) == 1


def test_a_checkpoint_of_a_job_that_was_stopped_between_intervals_is_one_of_the_newest(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, NUM_STEPS)
    make_checkpoint(tmp_path, NUM_STEPS - 1)
    assert misplaced(tmp_path, NUM_STEPS, NUM_STEPS - 1) == []
    make_checkpoint(tmp_path, NUM_STEPS - 2)
    assert len(misplaced(tmp_path, NUM_STEPS, NUM_STEPS - 1)) == 2


def test_the_phase_is_that_of_this_start(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, 2)
    (tmp_path / "step-4.tmp").mkdir()
    before = folders_in(tmp_path)

    def phase(output: str = LOGGED) -> str:
        return phase_of(tmp_path, output, before, NUM_STEPS)

    assert phase("nothing yet") == START_UP
    assert phase() == STEP
    (tmp_path / "step-4.tmp").rmdir()
    (tmp_path / "step-4.tmp").mkdir()
    (tmp_path / "step-4.tmp" / ".unfinished").touch()
    assert phase() == WRITING
    (tmp_path / "step-4.tmp" / ".metadata").touch()
    assert phase() == VERIFYING
    (tmp_path / "step-4.tmp" / "manifest.json.tmp").touch()
    assert phase() == PUBLISHING
    (tmp_path / "step-4.tmp").rename(tmp_path / "step-4")
    assert phase() == STEP
    (tmp_path / "step-2.removing").mkdir()
    assert phase() == REMOVING
    make_checkpoint(tmp_path, NUM_STEPS)
    assert phase() == EXIT


def test_where_a_start_continued() -> None:
    assert continued_from("INFO - continuing after step 14, from /x/step-14\n") == 14
    assert continued_from("INFO - this run is finished: /x/step-60 is step 60 of training.steps = 60") == 60
    assert continued_from(LOGGED) is None
