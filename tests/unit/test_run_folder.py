"""The folder of a run: writable or refused in one line, one job at a time, earlier records never lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from dmuon_titan import run_folder
from dmuon_titan.config import JobConfig, load_config
from dmuon_titan.errors import ConfigError
from dmuon_titan.run_folder import lock_folders, make_folders, put_records_aside
from tests.unit.killing import DONE, KILLED, status_of_one_killed


def load(dump_folder: Path, *flags: str) -> JobConfig:
    arguments = ["--config", "debug_model", f"--job.dump_folder={dump_folder}", *flags]
    return load_config(arguments, environ={}).config


def test_folders_are_made_and_the_trial_leaves_nothing(tmp_path: Path) -> None:
    make_folders(load(tmp_path / "a" / "run", "--checkpoint.enable=true"))
    assert [path.name for path in (tmp_path / "a" / "run").rglob("*")] == ["checkpoint"]


def test_folders_that_cannot_be_written_are_all_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    config = load(tmp_path / "file", "--checkpoint.enable=true", "--checkpoint.folder=/proc/none")
    with pytest.raises(ConfigError) as mistakes:
        make_folders(config)
    dump_folder, checkpoints = str(mistakes.value).splitlines()
    assert dump_folder.startswith(f'job.dump_folder = "{tmp_path}/file": ')
    assert checkpoints.startswith('checkpoint.folder = "/proc/none": ')
    make_folders(load(tmp_path / "run", "--checkpoint.enable=false", "--checkpoint.folder=/proc/none"))


# The holder has a child of its own, forked like a data loader's worker, which outlives it.
HOLD = """
import os, sys, time
from dmuon_titan.config.schema import build
from dmuon_titan.run_folder import lock_folders
locks = lock_folders(build({'job.dump_folder': sys.argv[1]}))
child = os.fork()
if child:
    print(child, flush=True)
time.sleep(60)
"""


def test_another_job_is_refused_until_the_first_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder, "_PATIENCE_S", 0.2)
    config = load(tmp_path, "--checkpoint.enable=false")
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    child = int(holder.stdout.readline())
    try:
        with pytest.raises(ConfigError, match=f'"{tmp_path}": another job is running there'):
            lock_folders(config)
        holder.kill()
        holder.wait()
        for lock in lock_folders(config):
            lock.close()
    finally:
        holder.kill()
        os.kill(child, signal.SIGKILL)
        holder.stdout.close()


def test_checkpoints_of_two_runs_in_one_folder_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder of checkpoints has a lock of its own: another run may have named it."""
    monkeypatch.setattr(run_folder, "_PATIENCE_S", 0.2)
    for name in ("other", "third", "checkpoint"):
        (tmp_path / name).mkdir()
    folder = tmp_path / "checkpoint"
    code = HOLD.replace(
        "'job.dump_folder'", f"'checkpoint.enable': True, 'checkpoint.folder': {str(folder)!r}, 'job.dump_folder'"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        child = int(holder.stdout.readline())
        try:
            with pytest.raises(ConfigError, match=f'checkpoint.folder = "{folder}": another job is running there'):
                lock_folders(load(tmp_path / "other", "--checkpoint.enable=true", f"--checkpoint.folder={folder}"))
            (tmp_path / "link").symlink_to(folder)
            with pytest.raises(ConfigError, match="another job is running there"):
                lock_folders(
                    load(tmp_path / "third", "--checkpoint.enable=true", f"--checkpoint.folder={tmp_path}/link")
                )
        finally:
            holder.kill()
            os.kill(child, signal.SIGKILL)


def record(config: JobConfig, metrics: str = '{"step": 1}\n') -> None:
    folder = Path(config.job.dump_folder)
    (folder / "trace").mkdir(parents=True)
    Path(config.metrics.save_tb_folder).mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text(metrics)
    (folder / "config.toml").write_text("")


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_records_are_put_aside_under_the_next_number(tmp_path: Path) -> None:
    config = load(tmp_path)
    everything = ("metrics.jsonl", "trace", "config.toml", "tb")
    for number in (1, 2):
        record(config, f'{{"step": {number}}}\n')
        put_records_aside(config)
        assert names(tmp_path) == {f"{name}.before-{n}" for name in everything for n in range(1, number + 1)}
        assert (tmp_path / f"metrics.jsonl.before-{number}").read_text() == f'{{"step": {number}}}\n'
    put_records_aside(config)
    assert len(names(tmp_path)) == 8


@pytest.mark.parametrize("earlier", [0, 1])
def test_a_kill_while_records_are_put_aside_leaves_the_rest_to_the_next_start(earlier: int, tmp_path: Path) -> None:
    everything, killed, status = ("metrics.jsonl", "trace", "config.toml", "tb"), 0, KILLED
    while status == KILLED:
        config = load(tmp_path / str(killed))
        for _ in range(earlier):
            record(config)
            put_records_aside(config)
        record(config)
        status = status_of_one_killed(partial(put_records_aside, config), killed)
        put_records_aside(config)
        assert names(tmp_path / str(killed)) == {f"{n}.before-{i}" for n in everything for i in range(1, earlier + 2)}
        killed += 1
    assert (status, killed) == (DONE, len(everything) + 1)


def test_nothing_is_put_aside_before_a_step_was_recorded(tmp_path: Path) -> None:
    config = load(tmp_path)
    record(config, "")
    put_records_aside(config)
    assert names(tmp_path) == {"metrics.jsonl", "trace", "config.toml", "tb"}


def test_a_folder_of_tensorboard_that_others_may_share_stays(tmp_path: Path) -> None:
    for shared in (tmp_path / "run", tmp_path / "all"):
        config = load(tmp_path / "run", f"--metrics.save_tb_folder={shared}")
        record(config)
        put_records_aside(config)
        assert shared.is_dir()
