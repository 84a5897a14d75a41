"""Fixtures: jobs, small data for them, and one finished run that several tests look at."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pytest

from tests.blackbox.job import REPOSITORY, Ended, Job


class StartJob(Protocol):
    def __call__(self, *arguments: str, cwd: Path | None = None, command: tuple[str, ...] = ..., **env: str) -> Job: ...


@pytest.fixture
def start(tmp_path: Path) -> Iterator[StartJob]:
    """`start("--a.b", "c", NGPU="1")`: a job in an empty folder, or in `cwd`."""
    jobs: list[Job] = []

    def start_job(*arguments: str, cwd: Path | None = None, command: tuple[str, ...] | None = None, **env: str) -> Job:
        options = {} if command is None else {"command": command}
        jobs.append(Job(arguments, logs=tmp_path, cwd=cwd or tmp_path, environ=env, **options))
        return jobs[-1]

    yield start_job
    for job in jobs:
        job.kill()


@pytest.fixture
def refused(start: StartJob) -> Callable[..., list[str]]:
    """`refused("--a.b", "c")`: the lines that a configuration is refused with, before torch is imported anywhere."""

    def refusal(*arguments: str, **options: Any) -> list[str]:
        ended = start(*arguments, PYTHONPROFILEIMPORTTIME="1", **options).end(timeout_s=30)
        lines = ended.stderr.splitlines()
        imported = {line.rpartition("|")[2].strip() for line in lines if line.startswith("import time:")}
        said = [line for line in lines if not line.startswith("import time:")]
        assert ended.status == 2, ended.stderr
        assert "tomli" in imported
        assert "torch" not in imported, "torch was loaded, or a worker was started"
        assert ended.stdout == ""
        assert not any("Traceback" in line for line in said)
        said[0] = said[0].removeprefix("error: ")
        return said

    return refusal


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared folder of about 30,000 tokens."""
    folder = tmp_path_factory.mktemp("corpus") / "json"
    source = Path(json.__file__).parent
    prepare = [sys.executable, "-m", "dmuon_titan.tools.prepare", str(source), "--include", "*.py"]
    subprocess.run([*prepare, "--output", str(folder), "--vocab-size", "400"], cwd=REPOSITORY, check=True)
    return folder


SMALL = """
[job]
dump_folder = "run"
[model]
flavor = "debugmodel"
[optimizer]
lr = 1e-2
[lr_scheduler]
warmup_steps = 2
[training]
dataset_path = "{corpus}"
local_batch_size = 2
global_batch_size = 8
seq_len = 64
steps = {steps}
mixed_precision_param = "float32"
[metrics]
log_freq = 1
[debug]
trace_batches = true
"""


@pytest.fixture
def small_config(tmp_path: Path, corpus: Path) -> Path:
    """Configuration of a job of seconds; its run is the folder `run` of the working directory."""
    path = tmp_path / "small.toml"
    path.write_text(SMALL.format(corpus=corpus, steps=6))
    return path


def losses(run: Path) -> dict[int, tuple[float, float]]:
    """Loss and gradient norm of each logged step of a run."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "grad_norm" in record]  # and not those of a validation
    return {record["step"]: (record["loss_metrics/global_avg_loss"], record["grad_norm"]) for record in steps}


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """An empty disk of 100 MiB: six or seven checkpoints of the debug model."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=100m", "tmpfs", str(folder)], capture_output=True)
    if mount.returncode:
        pytest.skip("this system lets only root have a disk of its own")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@dataclass(frozen=True)
class FinishedRun:
    """A run of 6 steps on 2 ranks, started under hard conditions: see `finished_run`."""

    ended: Ended
    cwd: Path
    config: Path

    @property
    def folder(self) -> Path:
        return self.cwd / "run"


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> FinishedRun:
    """Started through two relative symbolic links, from a folder of packages named like ours that can't be imported.

    Such a folder is in PYTHONPATH too. The configuration lies elsewhere, beside a link to its data, which it names by
    a relative path.
    """
    base = tmp_path_factory.mktemp("finished")
    cwd, configs, others = base / "cwd", base / "configs", base / "others"
    ours = ("models", "tests", "dmuon", "dmuon_titan")
    for package in [cwd / name for name in (*ours, "torch", "tomli", "signal")] + [others / name for name in ours]:
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("raise ImportError('not the package that was meant')\n")
    configs.mkdir()
    (configs / "data").symlink_to(corpus)
    config = configs / "small.toml"
    config.write_text(SMALL.format(corpus="data", steps=6))
    (base / "bin").mkdir()
    (base / "bin" / "run_train.sh").symlink_to(REPOSITORY / "run_train.sh")
    (cwd / "train").symlink_to("../bin/run_train.sh")
    job = Job(["--config", str(config)], logs=base, cwd=cwd, environ={"PYTHONPATH": str(others)}, command=("./train",))
    return FinishedRun(job.end(), cwd, config)
