"""metrics.jsonl of a run that was stopped, and of one that others looked into: as if nothing had happened."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.blackbox.conftest import StartJob
from tests.debruijn import debruijn_tokens, write_tokens

CONFIG = """
[training]
dataset_path = "data"
local_batch_size = 4
seq_len = 64
steps = 7
mixed_precision_param = "float32"
[lr_scheduler]
warmup_steps = 2
total_steps = 20
[checkpoint]
enable = true
interval = 100
keep_latest_k = 0
[validation]
enable = true
freq = 1
steps = 2
[metrics]
log_freq = 1
[debug]
trace_batches = true
"""
TIMES = ("throughput(tps)", "tflops", "time_metrics/", "memory/")


@pytest.fixture
def config(tmp_path: Path) -> tuple[str, str]:
    write_tokens(tmp_path / "data", debruijn_tokens(), vocab_size=256, validation_tokens=1000)
    (tmp_path / "job.toml").write_text(CONFIG)
    return "--config", str(tmp_path / "job.toml")


def records(run: Path) -> list[dict[str, Any]]:
    """Of each line what does not depend on the clock."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [{name: value for name, value in line.items() if not name.startswith(TIMES)} for line in lines]


def validated(run: Path) -> list[int]:
    return [record["step"] for record in records(run) if "validation_metrics/loss" in record]


def test_a_stop_loses_no_validation(config: tuple[str, str], tmp_path: Path, start: StartJob) -> None:
    """Due at every step, so that whichever the stop comes at has one: the next start makes it first, and once."""
    unbroken, stopped = tmp_path / "unbroken", tmp_path / "stopped"
    assert start(*config, "--job.dump_folder", str(unbroken)).end().status == 0
    arguments = (*config, "--job.dump_folder", str(stopped))
    job = start(*arguments, "--training.steps=100000")
    job.wait_for(r"step: +2 ")
    job.send(signal.SIGTERM)
    assert job.end().status == 75
    made = records(stopped)[-1]["step"]
    assert validated(stopped) == list(range(1, made))
    for _ in range(2):  # the second finds everything made
        ended = start(*arguments, f"--training.steps={made + 2}").end()
        assert ended.status == 0, ended.stderr
        assert validated(stopped) == list(range(1, made + 3))
    shared = [record for record in records(unbroken) if record["step"] <= made + 2]
    assert records(stopped)[: len(shared)] == shared


def test_a_stop_at_the_last_step_is_no_reason_to_leave_its_validation_out(
    config: tuple[str, str], tmp_path: Path, start: StartJob
) -> None:
    """Saved first: nobody would start the job again to validate, for it is finished."""
    flags = ("--training.steps=4", "--validation.freq=100", "--validation.local_batch_size=4")
    flags += ("--training.local_batch_size=32",)  # a step lasts longer than it takes to send a signal
    job = start(*config, "--job.dump_folder", str(tmp_path / "run"), *flags)
    job.wait_for(r"step: +3 ")
    for pid in job.freeze():
        os.kill(pid, signal.SIGTERM)
    job.thaw()
    ended = job.end()
    assert (ended.status, ended.stderr) == (0, "")
    assert validated(tmp_path / "run") == [4]
    assert ended.stdout.index("saved step 4 ") < ended.stdout.index("validate step:  4")


def test_a_start_that_saves_nothing_leaves_the_records_of_the_run(
    config: tuple[str, str], tmp_path: Path, start: StartJob
) -> None:
    """From an older step of the folder's own run; afterwards the run goes on as if nobody had looked into it."""
    run = tmp_path / "run"
    arguments = (*config, "--job.dump_folder", str(run), "--checkpoint.interval=2")
    assert start(*arguments, "--training.steps=4").end().status == 0
    names = ("metrics.jsonl", "config.toml", "trace/rank-0.jsonl", "trace/rank-1.jsonl")
    before = [(run / name).read_bytes() for name in names]
    look = ("--checkpoint.load_only", "--checkpoint.load_step=2", "--metrics.enable_tensorboard", "--training.steps=3")
    for number in (1, 2):
        ended = start(*arguments, *look).end()
        assert ended.status == 0, ended.stderr
        beside = run / f"load_only-{number}"
        assert f"what is recorded goes to {beside}" in ended.stdout
        assert sorted(path.name for path in beside.iterdir()) == ["config.toml", "metrics.jsonl", "tb", "trace"]
        assert records(beside) == [record for record in records(run) if record["step"] == 3]
        assert [(run / name).read_bytes() for name in names] == before
    assert start(*arguments, "--training.steps=5").end().status == 0
    assert (run / "metrics.jsonl").read_bytes().startswith(before[0])
    assert [record["step"] for record in records(run)] == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
