"""Where checkpoints can't be written, or only slowly: a named error, its status, and what was saved before stays.

Seen from outside, on a disk of its own where the system lets tests have one (as root), by a limit on the size of files
everywhere.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.blackbox.conftest import StartJob, losses
from tests.blackbox.job import Ended, Job
from tests.debruijn import debruijn_tokens, write_tokens

CONFIG = """
[job]
dump_folder = "run"
[training]
dataset_path = "data"
local_batch_size = 2
seq_len = 32
steps = 100000
mixed_precision_param = "float32"
[checkpoint]
enable = true
folder = "{folder}"
interval = 2
keep_latest_k = 0
[metrics]
log_freq = 1
"""
# torchrun by itself would kill the workers 30 seconds after it was asked to stop.
SLOW_SAVE_S = float(os.environ.get("SLOW_SAVE_S", 35))


def configured(tmp_path: Path, folder: Path) -> tuple[str, str]:
    write_tokens(tmp_path / "data", debruijn_tokens(), vocab_size=256)
    (tmp_path / "job.toml").write_text(CONFIG.format(folder=folder))
    return "--config", str(tmp_path / "job.toml")


def error_of(ended: Ended) -> str:
    """The one error of a job that could not save; all ranks have the same, and no traceback says it otherwise."""
    assert ended.status == 4, ended.stderr
    (line,) = [line for line in ended.stderr.splitlines() if "error:" in line]
    assert "Traceback" not in ended.stderr
    return line


def continues(start: StartJob, arguments: tuple[str, ...], newest: int) -> None:
    """The same command goes on after the newest checkpoint that was complete."""
    ended = start(*arguments, "--training.steps", str(newest + 1), "--checkpoint.interval", "1000").end()
    assert ended.status == 0, ended.stderr
    assert f"continuing after step {newest}" in ended.stdout


def complete(folder: Path) -> list[int]:
    return sorted(int(path.parent.name[5:]) for path in folder.glob("step-*/manifest.json"))


@pytest.mark.parametrize("async_mode", ["disabled", "async"])
def test_a_full_disk(async_mode: str, tmp_path: Path, disk: Path, start: StartJob) -> None:
    arguments = (*configured(tmp_path, disk / "checkpoint"), "--checkpoint.async_mode", async_mode)
    error = error_of(start(*arguments).end())
    assert "No space left on device" in error
    steps = complete(disk / "checkpoint")
    assert len(steps) > 2
    assert f"step {steps[-1] + 2} could not be saved in {disk}/checkpoint/step-{steps[-1] + 2}" in error
    # What the save had taken up is given back, and once there is room the job goes on.
    assert sorted(int(path.name[5:]) for path in (disk / "checkpoint").iterdir()) == steps
    shutil.rmtree(disk / "checkpoint" / f"step-{steps[0]}")
    continues(start, arguments, steps[-1])


def test_a_disk_that_becomes_read_only(tmp_path: Path, disk: Path, start: StartJob) -> None:
    arguments = configured(tmp_path, disk)
    job = start(*arguments, "--checkpoint.keep_latest_k", "1")
    job.wait_for("saved step 4")
    while subprocess.run(["mount", "-o", "remount,ro", str(disk)], capture_output=True).returncode:
        pass  # a file is being written
    assert "Read-only file system" in error_of(job.end(timeout_s=60))
    steps = complete(disk)
    subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
    continues(start, arguments, steps[-1])


@pytest.mark.parametrize("async_mode", ["disabled", "async"])
def test_b08_a_rank_whose_files_may_not_be_large(async_mode: str, tmp_path: Path, start: StartJob) -> None:
    folder = tmp_path / "checkpoint"
    arguments = (*configured(tmp_path, folder), "--checkpoint.keep_latest_k", "2")
    job = start(*arguments, "--checkpoint.async_mode", async_mode)
    job.wait_for("saved step 4")
    resource.prlimit(job.worker(1), resource.RLIMIT_FSIZE, (64 << 10, 64 << 10))
    error = error_of(job.end(timeout_s=60))
    assert "rank 1: File too large: " in error
    steps = complete(folder)
    assert f"step {steps[-1] + 2} could not be saved in {folder}" in error
    assert sorted(losses(tmp_path / "run"))[-1] <= steps[-1] + 4
    continues(start, arguments, steps[-1])


def in_a_save(job: Job, folder: Path) -> Path:
    """Stops rank 1 in a save of which rank 0 has written its part. Returns the folder that is being written."""
    deadline_s = time.monotonic() + 60
    worker = job.worker(1)
    while time.monotonic() < deadline_s:
        written = next(iter(folder.glob("step-*.tmp/__0_0.distcp")), None)
        if written is not None:
            os.kill(worker, signal.SIGSTOP)
            time.sleep(0.5)  # the other rank goes as far as it can
            if written.exists():
                return written.parent
            os.kill(worker, signal.SIGCONT)
        time.sleep(0.002)
    raise AssertionError("no save was met")


def test_b25_a_slow_save_is_completed_after_a_signal(tmp_path: Path, start: StartJob) -> None:
    """Longer than a launcher waits that doesn't know of saves; the step after it is saved too, as asked for."""
    folder = tmp_path / "checkpoint"
    arguments = configured(tmp_path, folder)
    job = start(*arguments)
    writing = in_a_save(job, folder)
    job.send(signal.SIGTERM)
    time.sleep(SLOW_SAVE_S)
    assert writing.exists()
    os.kill(job.worker(1), signal.SIGCONT)
    ended = job.end(timeout_s=60)
    assert (ended.status, ended.stderr) == (75, "")
    slow = int(writing.stem[5:])
    assert complete(folder)[-2:] == [slow, slow + 1]
    continues(start, arguments, slow + 1)


def vanish(folder: Path) -> None:
    shutil.rmtree(folder)


def become_a_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.touch()


@pytest.mark.parametrize("happens", [vanish, become_a_file])
def test_the_folder_is_lost_in_the_middle_of_a_save(
    happens: Callable[[Path], None], tmp_path: Path, start: StartJob
) -> None:
    folder = tmp_path / "checkpoint"
    job = start(*configured(tmp_path, folder))
    writing = in_a_save(job, folder)
    happens(folder)
    os.kill(job.worker(1), signal.SIGCONT)
    error = error_of(job.end(timeout_s=60))
    assert f"step {writing.stem[5:]} could not be saved in {folder}" in error
