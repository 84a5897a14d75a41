"""A job that is killed and started again equals one that never was, whatever lies around in its folder."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.blackbox.conftest import StartJob, losses
from tests.debruijn import debruijn_tokens, write_tokens

CONFIG = """
[training]
dataset_path = "data"
local_batch_size = 2
global_batch_size = 8
seq_len = 32
mixed_precision_param = "float32"
[optimizer]
lr = 3e-3
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
RECORDS = ("metrics.jsonl", "config.toml", "trace/rank-0.jsonl")
RECORDS_ASIDE = ("metrics.jsonl.before-1", "config.toml.before-1", "trace.before-1/rank-0.jsonl")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """On 2 ranks with 2 micro-batches; outputs in `outputs` of the working directory unless told otherwise."""
    write_tokens(tmp_path / "data", debruijn_tokens(), vocab_size=256, num_shards=3)
    path = tmp_path / "job.toml"
    path.write_text(CONFIG)
    return path


def trace(run: Path) -> list[dict[str, Any]]:
    """What all ranks consumed, in the order of steps, micro-batches and ranks."""
    lines = [line for path in run.glob("trace/*.jsonl") for line in path.read_text().splitlines()]
    return sorted(map(json.loads, lines), key=lambda batch: (batch["step"], batch["micro"], batch["dp_rank"]))


def plant_what_is_no_checkpoint(folder: Path) -> list[str]:
    """Leaves everything in a checkpoint folder that only looks like a newer checkpoint; returns the names."""
    complete = next(folder.glob("step-[0-9]*"))
    (folder / "step-90").mkdir()
    shutil.copytree(complete, folder / "step-91")
    (folder / "step-91" / ".metadata").unlink()
    shutil.copytree(complete, folder / "step-92")
    shard = max((folder / "step-92").glob("*.distcp"), key=lambda path: path.stat().st_size)
    shard.write_bytes(shard.read_bytes()[:-100])
    shutil.copytree(complete, folder / "step-93.tmp")
    (folder / "step-foo").mkdir()
    (folder / "step-94").touch()
    return ["step-90", "step-91", "step-92", "step-93.tmp", "step-94", "step-foo"]


def test_a_killed_run_goes_on_as_if_it_never_was(config: Path, start: StartJob) -> None:
    """SIGKILL in the middle, no checkpoint but one complete (B05): bit for bit the same steps, each batch once."""
    arguments = ("--config", str(config), "--training.steps", "11")
    unbroken, broken = config.parent / "unbroken", config.parent / "broken"
    assert start(*arguments, "--job.dump_folder", str(unbroken), "--metrics.enable_tensorboard").end().status == 0
    assert len(list((unbroken / "tb").iterdir())) == 1  # B27: one rank writes it

    job = start(*arguments, "--job.dump_folder", str(broken))
    job.wait_for(r"step: +8 ")
    job.send(signal.SIGKILL)
    job.end()
    assert sorted(losses(broken)) != sorted(losses(unbroken))
    planted = plant_what_is_no_checkpoint(broken / "checkpoint")
    again = start(*arguments, "--job.dump_folder", str(broken)).end()
    assert again.status == 0, again.stderr
    assert "continuing after step 6" in again.stdout
    (warning,) = again.stderr.splitlines()
    assert all(name in warning for name in planted)
    assert all((broken / "checkpoint" / name).exists() for name in planted)

    assert losses(broken) == losses(unbroken)
    assert trace(broken) == trace(unbroken)
    assert [batch["step"] for batch in trace(broken)] == [step for step in range(1, 12) for _ in range(4)]
    samples = [sample for batch in trace(broken) for sample in batch["sample_ids"]]
    assert sorted(samples) == list(range(11 * 8))

    finished = start(*arguments, "--job.dump_folder", str(broken)).end()
    assert finished.status == 0, finished.stderr
    assert "is finished" in finished.stdout
    assert "--training.steps" in finished.stdout
    assert losses(broken) == losses(unbroken)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_b21_a_step_that_is_not_finite_is_not_applied_and_spoils_no_checkpoint(config: Path, start: StartJob) -> None:
    run = config.parent / "run"
    arguments = ("--config", str(config), "--job.dump_folder", str(run))
    arguments += ("--checkpoint.interval", "1", "--checkpoint.keep_latest_k", "2")
    assert start(*arguments, "--training.steps", "3").end().status == 0
    ended = start(*arguments, "--training.steps", "8", "--optimizer.lr", "1e30").end()
    assert ended.status == 5, ended.stderr
    (error,) = [line for line in ended.stderr.splitlines() if "error:" in line]
    assert error.startswith("error: step 5: ")
    assert "norm" in error
    # Step 4 was finite but ruined the weights. It must neither count nor push out one that was sound.
    assert sorted(path.name for path in (run / "checkpoint").iterdir()) == ["step-2", "step-3", "step-4.not-finite"]
    kept = [run / "checkpoint" / name for name in ("step-2", "step-3")]
    for path in kept:
        assert all(tensor.isfinite().all() for tensor in tensors_of(path).values())
    sane = start(*arguments, "--training.steps", "5").end()
    assert sane.status == 0, sane.stderr
    assert "continuing after step 3" in sane.stdout


def test_a_checkpoint_of_other_data_order_is_refused(config: Path, start: StartJob) -> None:
    """One line says both sides, the status is the checkpoint's, and nothing is trained."""
    run = config.parent / "run"
    arguments = ("--config", str(config), "--job.dump_folder", str(run))
    assert start(*arguments, "--training.steps", "1").end().status == 0
    before = [(run / name).read_text() for name in RECORDS]
    ended = start(*arguments, "--training.steps", "2", "--training.seq_len", "16").end()
    assert ended.status == 4, ended.stderr
    (line,) = ended.stderr.splitlines()
    assert line.startswith("error: ")
    assert "training.seq_len 32, this run has 16" in line
    assert [(run / name).read_text() for name in RECORDS] == before


def test_a_quick_try_in_the_folder_of_a_run_loses_none_of_its_records(config: Path, start: StartJob) -> None:
    run = config.parent / "run"
    arguments = ("--config", str(config), "--job.dump_folder", str(run), "--checkpoint.enable", "false")
    assert start(*arguments, "--training.steps", "2").end().status == 0
    before = [(run / name).read_text() for name in RECORDS]
    ended = start(*arguments, "--training.steps", "1").end()
    assert (ended.status, ended.stderr) == (0, "")
    assert [line for line in ended.stdout.splitlines() if "metrics.jsonl.before-1" in line]
    assert [(run / aside).read_text() for aside in RECORDS_ASIDE] == before
    assert sorted(losses(run)) == [1]
    assert {batch["step"] for batch in trace(run)} == {1}


def test_a_second_job_in_the_same_folder_is_refused(config: Path, start: StartJob) -> None:
    run = config.parent / "run"
    arguments = ("--config", str(config), "--job.dump_folder", str(run), "--training.steps", "100000")
    first = start(*arguments)
    first.wait_for(r"step: +2 ")
    second = start(*arguments).end()
    assert second.status == 2, second.stderr
    (line,) = second.stderr.splitlines()
    assert line.startswith(f'error: job.dump_folder = "{run}": another job is running there')
    first.send(signal.SIGTERM)
    ended = first.end()
    assert (ended.status, ended.stderr) == (75, "")
    assert sorted(losses(run)) == list(range(1, max(losses(run)) + 1))


def tensors_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, read by plain torch.distributed.checkpoint in one process."""
    metadata = dcp.FileSystemReader(checkpoint).read_metadata()
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in metadata.state_dict_metadata.items()
        if hasattr(entry, "size")
    }
    dcp.load(state, checkpoint_id=checkpoint, no_dist=True)
    return state
