"""A model cut over two ranks trains as on one, from the same batches, and goes on from its checkpoints on any mesh."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.blackbox.conftest import StartJob, losses
from tests.blackbox.job import REPOSITORY
from tests.blackbox.runs import Run, Runs

GLOBAL_BATCH, SEQ_LEN = 4, 32
CONFIG = f"""
[training]
dataset_path = "data"
local_batch_size = 2
global_batch_size = {GLOBAL_BATCH}
seq_len = {SEQ_LEN}
steps = 6
mixed_precision_param = "float32"
[validation]
enable = true
freq = 3
[optimizer]
lr = 1e-3
[lr_scheduler]
warmup_steps = 2
[checkpoint]
enable = true
interval = 3
[metrics]
log_freq = 1
[debug]
trace_batches = true
"""
TP = (1, 1, 2)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"), CONFIG, validation_tokens=1 + 7 * SEQ_LEN)


def logged(run: Run, name: str) -> list[float]:
    """A figure at every step that has it."""
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    return [line[name] for line in lines if name in line]


def batches(path: Path) -> list[dict[str, Any]]:
    """What a rank consumed, without the rank."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "tp_rank"} for line in lines]


def assert_close(steps: dict[int, tuple[float, float]], expected: dict[int, tuple[float, float]]) -> None:
    assert steps.keys() == expected.keys()
    for step, figures in expected.items():
        assert steps[step] == pytest.approx(figures, rel=1e-4), step


OPTIMIZERS = pytest.mark.parametrize("optimizer", ["Muon", "AdamW"])


def run_cut(runs: Runs, optimizer: str) -> Run:
    return runs.run(f"cut-{optimizer}", TP, "--optimizer.name", optimizer)


@OPTIMIZERS
def test_two_ranks_with_half_of_each_matrix_train_as_one(optimizer: str, runs: Runs) -> None:
    cut = run_cut(runs, optimizer)
    whole = runs.run(f"whole-{optimizer}", (1, 1), "--optimizer.name", optimizer)
    assert cut.ended.stderr == ""
    assert "mesh: replicate 1 x shard 1 x tp 2" in cut.ended.stdout
    assert_close(cut.steps, whole.steps)
    assert logged(cut, "n_tokens_seen") == [step * GLOBAL_BATCH * SEQ_LEN for step in range(1, 7)]
    held_out = [logged(run, "validation_metrics/loss") for run in (cut, whole)]
    assert held_out[0] == pytest.approx(held_out[1], rel=1e-4)
    assert len(held_out[0]) == 2
    trace = cut.folder / "trace"
    assert batches(trace / "rank-0.jsonl") == batches(trace / "rank-0-tp-1.jsonl")
    assert batches(trace / "rank-0.jsonl") == batches(whole.folder / "trace" / "rank-0.jsonl")


@OPTIMIZERS
def test_a_restart_is_the_same_bit_for_bit(optimizer: str, runs: Runs) -> None:
    cut = run_cut(runs, optimizer)
    runs.copied(cut, f"restarted-{optimizer}", 3)
    restarted = runs.run(f"restarted-{optimizer}", TP, "--optimizer.name", optimizer)
    assert "continuing after step 3" in restarted.ended.stdout
    assert restarted.ended.stderr == ""
    assert restarted.steps == {step: figures for step, figures in cut.steps.items() if step > 3}


@OPTIMIZERS
def test_a_checkpoint_goes_on_with_another_degree(optimizer: str, runs: Runs) -> None:
    """From two ranks that share each matrix to two that share the batch."""
    cut = run_cut(runs, optimizer)
    runs.copied(cut, f"uncut-{optimizer}", 3)
    uncut = runs.run(f"uncut-{optimizer}", (1, 2, 1), "--optimizer.name", optimizer)
    (warning,) = uncut.ended.stderr.splitlines()
    assert "but not bit for bit: " in warning
    assert "parallelism.tensor_parallel_degree = 1, was 2" in warning
    assert_close(uncut.steps, {step: figures for step, figures in cut.steps.items() if step > 3})


EIGHT = (2, 2, 2)
# One sequence for each of the four data-parallel ranks.
SMALL = ("--training.local_batch_size", "1")


def run_eight(runs: Runs) -> Run:
    return runs.run("eight", EIGHT, *SMALL)


def test_three_axes_train_as_one_rank_and_restart_bit_for_bit(runs: Runs) -> None:
    eight, whole = run_eight(runs), runs.run("whole-Muon", (1, 1), "--optimizer.name", "Muon")
    assert "mesh: replicate 2 x shard 2 x tp 2" in eight.ended.stdout
    assert_close(eight.steps, whole.steps)
    runs.copied(eight, "eight-restarted", 3)
    restarted = runs.run("eight-restarted", EIGHT, *SMALL)
    assert restarted.steps == {step: figures for step, figures in eight.steps.items() if step > 3}


def test_torchrun_on_two_nodes_trains_the_same(runs: Runs, start: StartJob) -> None:
    """Two agents of four ranks each, as a person starts them by hand; tp pairs lie inside a node."""
    folder = runs.folder / "two-nodes"
    degrees = ("replicate", "shard")
    arguments = [
        *(
            "-m",
            "dmuon_titan.train",
            "--config",
            str(runs.folder / "job.toml"),
            "--job.dump_folder",
            str(folder),
            *SMALL,
        ),
        *(part for axis in degrees for part in (f"--parallelism.data_parallel_{axis}_degree", "2")),
        *("--parallelism.tensor_parallel_degree", "2"),
    ]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    agents = [
        start(
            *arguments,
            cwd=REPOSITORY,
            command=(
                *(sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=4"),
                *(f"--node-rank={node}", "--master-addr=127.0.0.1", f"--master-port={port}"),
            ),
            CUDA_VISIBLE_DEVICES="",
        )
        for node in range(2)
    ]
    for agent in agents:
        ended = agent.end(timeout_s=240)
        assert ended.status == 0, ended.stderr
    assert losses(folder) == run_eight(runs).steps
