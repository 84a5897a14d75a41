"""Jobs that are stopped or killed: the status says which, nothing of them lives on, and the next start continues."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.blackbox.conftest import StartJob, losses

ENDLESS = ("--training.steps", "100000", "--checkpoint.enable", "--checkpoint.interval", "100000")


def test_b25_stopped_jobs_save_and_continue(small_config: Path, start: StartJob) -> None:
    """SIGTERM, then Ctrl-C, both to the launcher alone; each stop is one step on all ranks, and complete."""
    run = small_config.parent / "run"
    stopped_at = 0
    for number in (signal.SIGTERM, signal.SIGINT):
        job = start("--config", str(small_config), *ENDLESS)
        job.wait_for(rf"step: +{stopped_at + 3} ")
        job.send(number)
        ended = job.end(timeout_s=30)
        assert ended.status == 75, ended.stderr
        assert "Traceback" not in ended.stderr
        newest = max(losses(run))
        assert newest >= stopped_at + 3
        assert (run / "checkpoint" / f"step-{newest}").is_dir()
        assert sorted(losses(run)) == list(range(1, newest + 1))
        stopped_at = newest
    assert len(list((run / "checkpoint").iterdir())) == 2


def test_b25_all_processes_are_stopped(small_config: Path, start: StartJob) -> None:
    """SIGTERM to launcher, workers and readers of data, as a scheduler sends it that knows of processes only."""
    job = start("--config", str(small_config), *ENDLESS, "--training.dataloader.num_workers=1")
    job.wait_for(r"step: +3 ")
    for pid in job.freeze():
        os.kill(pid, signal.SIGTERM)
    job.thaw()
    ended = job.end(timeout_s=30)
    assert (ended.status, ended.stderr) == (75, "")
    run = small_config.parent / "run"
    assert (run / "checkpoint" / f"step-{max(losses(run))}").is_dir()


def test_b25_one_worker_is_stopped(small_config: Path, start: StartJob) -> None:
    """SIGTERM to rank 1 alone stops all ranks at the same step."""
    job = start("--config", str(small_config), *ENDLESS)
    job.wait_for(r"step: +3 ")
    os.kill(job.worker(1), signal.SIGTERM)
    ended = job.end(timeout_s=30)
    assert ended.status == 75, ended.stderr
    run = small_config.parent / "run"
    assert (run / "checkpoint" / f"step-{max(losses(run))}").is_dir()


def test_b25_stopped_while_starting(small_config: Path, start: StartJob) -> None:
    """A worker that has just come up loads torch for seconds, before it can do anything about a signal."""
    job = start("--config", str(small_config), *ENDLESS)
    job.worker(0)
    job.send(signal.SIGTERM)
    ended = job.end(timeout_s=30)
    assert ended.status == 75, ended.stderr
    assert not list((small_config.parent / "run" / "checkpoint").iterdir())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT], ids=["b26-sigkill", "b26-sigabrt"])
def test_a_killed_worker_ends_the_job_and_is_named(number: signal.Signals, small_config: Path, start: StartJob) -> None:
    job = start("--config", str(small_config), *ENDLESS)
    job.wait_for(r"step: +2 ")
    os.kill(job.worker(1), number)
    ended = job.end(timeout_s=30)
    assert ended.status == 1, ended.stderr
    assert [line for line in ended.stderr.splitlines() if f"rank 1 was ended by {number.name}" in line]


def test_a_killed_launcher_takes_its_workers_along(small_config: Path, start: StartJob) -> None:
    """Started again at once, the job runs: no port and no file is held by the dead."""
    job = start("--config", str(small_config), *ENDLESS)
    job.wait_for(r"step: +2 ")
    job.send(signal.SIGKILL)
    assert job.end(timeout_s=10).status == -signal.SIGKILL
    ended = start("--config", str(small_config), "--training.steps", "2").end()
    assert ended.status == 0, ended.stderr
