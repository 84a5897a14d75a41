"""A full disk under what a run can do without: one line says which file and what to do, and training goes on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.blackbox.conftest import StartJob, losses
from tests.blackbox.job import REPOSITORY

PROFILING = ("--profiling.enable_profiling", "--profiling.profile_freq=3", "--profiling.profiler_warmup=1")


def fill(disk: Path) -> Path:
    """Leaves no byte. Returns the file that has them all."""
    file = disk / "everything"
    with file.open("wb") as stream:
        free = os.statvfs(disk)
        os.posix_fallocate(stream.fileno(), 0, free.f_bavail * free.f_bsize)
    return file


@pytest.mark.parametrize("what", ["traces", "tensorboard"])
def test_a_run_goes_on_without_what_the_disk_has_no_room_for(
    what: str, small_config: Path, disk: Path, start: StartJob
) -> None:
    fill(disk)
    flags = {
        "traces": (*PROFILING, f"--profiling.save_traces_folder={disk}/traces"),
        "tensorboard": ("--metrics.enable_tensorboard", f"--metrics.save_tb_folder={disk}/tb"),
    }
    ended = start("--config", str(small_config), *flags[what]).end()
    assert ended.status == 0, ended.stderr
    assert "Traceback" not in ended.stderr
    assert sorted(losses(small_config.parent / "run")) == [1, 2, 3, 4, 5, 6]
    said = [line for line in ended.stderr.splitlines() if "training goes on without" in line]
    assert all("No space left" in line and "make room" in line for line in said)
    if what == "tensorboard":
        assert len(said) == 1  # and not one a step
        assert f"{disk}/tb" in said[0]
        return
    kinds = ("trace.json", "summary.txt")
    files = [f"step-{step}/rank-{rank}_{kind}" for step in (3, 6) for rank in (0, 1) for kind in kinds]
    assert len(said) == len(files)
    assert all(any(f": {disk}/traces/{file} (" in line for line in said) for file in files)
    assert not list(disk.glob("traces/*/*"))  # no part of a file takes up room that a checkpoint may need


def test_a_disk_that_fills_up_ends_tensorboard_and_not_the_run(small_config: Path, disk: Path, start: StartJob) -> None:
    flags = ("--metrics.enable_tensorboard", f"--metrics.save_tb_folder={disk}/tb", "--training.steps=15")
    job = start("--config", str(small_config), *flags)
    job.wait_for(r"step: +3 ")
    fill(disk)
    ended = job.end()
    assert ended.status == 0, ended.stderr
    (warning,) = ended.stderr.splitlines()
    assert "training goes on without TensorBoard" in warning
    assert len(losses(small_config.parent / "run")) == 15


def converted(*arguments: str | Path) -> tuple[int, str]:
    tool = [sys.executable, "-m", "dmuon_titan.tools.convert", *map(str, arguments)]
    ended = subprocess.run(tool, cwd=REPOSITORY, capture_output=True, text=True)
    return ended.returncode, ended.stderr


def test_a_conversion_says_which_disk_is_full_and_which_folder_was_meant(
    small_config: Path, disk: Path, start: StartJob
) -> None:
    flags = ("--training.steps=2", "--checkpoint.enable", "--checkpoint.interval=1")
    assert start("--config", str(small_config), *flags).end().status == 0
    run, hf = small_config.parent / "run", small_config.parent / "hf"
    for parent in (run, run / "checkpoint"):
        status, (line,) = (found := converted("to-hf", parent, hf))[0], found[1].splitlines()
        assert status == 4
        assert f"has step-2, step-1; the newest is {run}/checkpoint/step-2" in line
    assert converted("to-hf", run / "checkpoint" / "step-2", hf) == (0, "")
    fill(disk)
    for arguments in (("from-hf", hf), ("to-hf", run / "checkpoint" / "step-2")):
        status, said = converted(*arguments, disk / "converted")
        (line,) = said.splitlines()
        assert status == 4
        assert line.startswith(f"error: {disk}/converted can't be written: No space left on device")
        assert "make room, or name another folder" in line
        assert [path.name for path in disk.iterdir()] == ["everything"]
