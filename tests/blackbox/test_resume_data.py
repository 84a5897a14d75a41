"""A resumed run consumes what the uninterrupted one would: on other ranks (B01), by micro-batch (B02), by epoch (B03).

Windows of the de Bruijn corpus are named by their first two ids, so that what was consumed is seen in the trace alone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.blackbox.runs import Run, Runs
from tests.debruijn import debruijn_offset, write_debruijn

SEQ_LEN, EPOCH_WINDOWS = 32, 32
CONFIG = f"""
[model]
flavor = "debugmodel"
[training]
seq_len = {SEQ_LEN}
mixed_precision_param = "float32"
[optimizer]
lr = 1e-3
eps = 1e-5
[lr_scheduler]
warmup_steps = 2
total_steps = 24
[checkpoint]
enable = true
keep_latest_k = 0
[metrics]
log_freq = 1
[debug]
trace_batches = true
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    made = Runs(tmp_path_factory.mktemp("runs"), CONFIG)
    write_debruijn(made.folder / "epochs", num_shards=4, num_tokens=EPOCH_WINDOWS * SEQ_LEN + 1)
    return made


def trace(run: Run) -> dict[tuple[int, int, int], list[int]]:
    """(step, micro-batch, data-parallel rank) -> places of the windows in the corpus."""
    found: dict[tuple[int, int, int], list[int]] = {}
    for path in run.folder.glob("trace/*.jsonl"):
        for batch in map(json.loads, path.read_text().splitlines()):
            if batch["tp_rank"] == 0:
                key = (batch["step"], batch["micro"], batch["dp_rank"])
                found[key] = [debruijn_offset(*ids[:2]) for ids in batch["first8"]]
    return found


def by_step(run: Run) -> dict[int, list[int]]:
    places: dict[int, list[int]] = {}
    for (step, _, _), windows in trace(run).items():
        places.setdefault(step, []).extend(windows)
    return {step: sorted(windows) for step, windows in places.items()}


def after(step: int, found: dict[Any, Any]) -> dict[Any, Any]:
    """What belongs to later steps, which a key is or begins with."""
    return {key: value for key, value in found.items() if (key[0] if isinstance(key, tuple) else key) > step}


BATCH = ("--training.local_batch_size=1", "--training.global_batch_size=4", "--training.dataset_path=data")
TWELVE = (*BATCH, "--training.steps=12", "--checkpoint.interval=6")
MESHES = {"shard": (1, 2, 1), "one": (1, 1, 1), "replicate": (2, 1, 1), "tensor-parallel": (1, 1, 2)}
MOVES = [("shard", "one"), ("one", "shard"), ("replicate", "shard"), ("shard", "tensor-parallel"), ("one", "replicate")]


@pytest.mark.parametrize(("before", "then"), MOVES)
def test_b01_other_ranks_go_on_with_the_same_samples(before: str, then: str, runs: Runs) -> None:
    reference = runs.run(f"b01-{before}", MESHES[before], *TWELVE)
    name = f"b01-{before}-{then}"
    runs.copied(reference, name, 6)
    moved = runs.run(name, MESHES[then], *TWELVE)
    assert f"continuing after step 6, from {moved.checkpoint(6)}" in moved.ended.stdout
    assert by_step(moved) == after(6, by_step(reference))
    windows = [window for _, places in sorted(by_step(reference).items()) for window in places]
    assert len(set(windows)) == len(windows) == 12 * 4
    for step, (loss, _) in moved.steps.items():
        assert loss == pytest.approx(reference.steps[step][0], abs=1e-5), f"step {step}"


def test_a_branch_of_steps_that_are_made_is_refused(runs: Runs) -> None:
    reference = runs.run("b01-one", MESHES["one"], *TWELVE)
    start = (
        "--checkpoint.initial_load_path",
        str(reference.checkpoint(12)),
        "--checkpoint.initial_load_model_only=false",
    )
    (line,) = runs.run("branch", (1, 1), *TWELVE, *start, status=2).ended.stderr.splitlines()
    assert line.startswith(f"error: training.steps = 12: {reference.checkpoint(12)} is step 12 already; raise ")
    branch = runs.again("branch", (1, 1), *TWELVE, *start, "--training.steps=13")
    assert sorted(branch.steps) == [13]


def test_b01_a_batch_that_only_ranks_determine_is_not_changed_silently(runs: Runs) -> None:
    """Nothing is trained, and the line has both ways on, which work."""
    flags = ("--training.local_batch_size=2", "--training.dataset_path=data", "--training.steps=2")
    runs.run("b01-implied", (1, 2), *flags)
    (line,) = runs.again("b01-implied", (1, 1), *flags, "--training.steps=4", status=4).ended.stderr.splitlines()
    assert "was made with a global batch of 4 sequences, this run's 1 ranks come to 2" in line
    assert "training.global_batch_size = 4 to keep it, or training.global_batch_size = 2 to change it" in line
    for batch, steps in ((4, 3), (2, 4)):
        kept = runs.again(
            "b01-implied", (1, 1), *flags, f"--training.steps={steps}", f"--training.global_batch_size={batch}"
        )
        assert len(by_step(kept)[steps]) == batch


INPUTS = {
    "accumulation": ((1, 2), ("--training.local_batch_size=1", "--training.global_batch_size=6")),
    "one-rank": ((1, 1), ("--training.local_batch_size=2", "--training.global_batch_size=6")),
    "no-accumulation": ((2, 1), ("--training.local_batch_size=3", "--training.global_batch_size=6")),
    "readers": (
        (1, 2),
        ("--training.local_batch_size=1", "--training.global_batch_size=4", "--training.dataloader.num_workers=2"),
    ),
}


@pytest.mark.parametrize("name", INPUTS)
def test_b02_a_resumed_run_reads_the_same_micro_batches(name: str, runs: Runs) -> None:
    """Rank by rank, and so its losses are the same bit for bit."""
    mesh, batch = INPUTS[name]
    flags = (*batch, "--training.dataset_path=data", "--training.steps=8", "--checkpoint.interval=4")
    reference = runs.run(f"b02-{name}", mesh, *flags)
    runs.copied(reference, f"b02-{name}-resumed", 4)
    resumed = runs.run(f"b02-{name}-resumed", mesh, *flags)
    assert trace(resumed) == after(4, trace(reference))
    assert resumed.steps == after(4, reference.steps)


EPOCHS = ("--training.dataset_path=epochs", "--training.local_batch_size=4", "--training.steps=24")


@pytest.mark.parametrize("saved_at", [6, 8, 16, 23])
def test_b03_every_epoch_has_every_window_once_after_a_resume(saved_at: int, runs: Runs) -> None:
    """8 global batches make one: saved within it, at the end of the first and of the second, before the last step."""
    reference = runs.run("b03", (1, 1), *EPOCHS, "--checkpoint.interval=1")
    runs.copied(reference, f"b03-{saved_at}", saved_at)
    resumed = runs.run(f"b03-{saved_at}", (1, 1), *EPOCHS, "--checkpoint.interval=100")
    assert trace(resumed) == after(saved_at, trace(reference))
    assert resumed.steps == after(saved_at, reference.steps)
    assert epochs_of(reference) == {step: (step - 1) // 8 for step in range(1, 25)}
    assert epochs_of(resumed) == after(saved_at, epochs_of(reference))
    for epoch in range(3):
        places = [window for step in range(8 * epoch + 1, 8 * epoch + 9) for window in by_step(reference)[step]]
        assert sorted(places) == [SEQ_LEN * window for window in range(EPOCH_WINDOWS)]


def epochs_of(run: Run) -> dict[int, int]:
    records = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    return {record["step"]: record["epoch"] for record in records}


def test_b19_folders_that_are_not_there_yet(runs: Runs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two levels below a run that nobody has made, named through a variable, and cleared out at every step."""
    monkeypatch.setenv("RESULTS", str(tmp_path / "not" / "there"))
    folder = ("--checkpoint.folder=${RESULTS}/of/run", "--checkpoint.interval=1", "--checkpoint.keep_latest_k=1")
    run = runs.run("b19", (1, 2), *BATCH, "--training.steps=3", *folder)
    assert run.ended.stderr == ""
    assert [path.name for path in (tmp_path / "not" / "there" / "of" / "run").iterdir()] == ["step-3"]
