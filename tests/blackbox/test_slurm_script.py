"""scripts/slurm.sh: signalled before its time is over, a job saves and is queued again; anything else ends it for good.

SLURM itself is not here: two stand-ins do what its commands do on one node.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.blackbox.conftest import StartJob, losses
from tests.blackbox.job import REPOSITORY, Job

STAND_INS = {"srun": 'SLURM_NODEID=0 exec "$@"', "scontrol": 'echo "$@" >> "$CALLS"'}


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """The environment of a batch script; what scontrol was asked is in the file `calls`."""
    (tmp_path / "bin").mkdir()
    for name, line in STAND_INS.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{line}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    return {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "CALLS": str(tmp_path / "calls"),
        "SLURM_SUBMIT_DIR": str(REPOSITORY),
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NUM_NODES": "1",
    }


def submit(start: StartJob, slurm: dict[str, str], *arguments: str) -> Job:
    return start(*arguments, command=("bash", str(REPOSITORY / "scripts" / "slurm.sh")), **slurm)


def test_b25_a_job_whose_time_is_over_saves_and_is_queued_again(
    small_config: Path, tmp_path: Path, start: StartJob, slurm: dict[str, str]
) -> None:
    arguments = ("--config", str(small_config), "--checkpoint.enable", "--training.dataloader.num_workers=1")
    job = submit(start, slurm, *arguments, "--training.steps=100000")
    job.wait_for(r"step: +3 ")
    for pid in job.freeze().keys() - {job.launcher.pid}:  # srun signals every process of its tasks
        os.kill(pid, signal.SIGUSR1)
    job.thaw()
    ended = job.end(timeout_s=30)
    assert (ended.status, ended.stderr) == (75, "")
    assert (tmp_path / "calls").read_text() == "requeue 7\n"
    run = tmp_path / "run"
    newest = max(losses(run))
    assert (run / "checkpoint" / f"step-{newest}" / "manifest.json").is_file()

    last = submit(start, slurm, *arguments, f"--training.steps={newest + 1}").end()
    assert last.status == 0, last.stderr
    assert f"continuing after step {newest}" in last.stdout
    refused = submit(start, slurm, *arguments, "--training.steps=0").end()
    assert refused.status == 2
    assert (tmp_path / "calls").read_text() == "requeue 7\n"
