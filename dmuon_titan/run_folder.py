"""The folder that a run writes to: it can be written, one job at a time has it, and no earlier run's records are lost.

Imports no torch: the launcher checks here before it starts a process.
"""

from __future__ import annotations

import fcntl
import itertools
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from dmuon_titan.config import JobConfig
from dmuon_titan.console import logger
from dmuon_titan.errors import ConfigError

# The processes of a job that was killed a moment ago may still be going.
_PATIENCE_S = 2.0
_POLL_S = 0.1


def make_folders(config: JobConfig) -> None:
    """Makes the folders of the run and of its checkpoints, and tries to write in them; leaves nothing there.

    Raises:
        ConfigError: one line for each folder that can't be written.
    """
    mistakes: dict[str, str] = {}
    for key, folder in _written_folders(config).items():
        if any(Path(refused) in Path(folder).parents for refused in mistakes):
            continue  # one cause, one line
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            mistakes[folder] = f'{key} = "{folder}": can\'t be written ({error.strerror}); name a folder that can'
    if mistakes:
        raise ConfigError("\n".join(mistakes.values()))


def lock_folders(config: JobConfig) -> list[BinaryIO]:
    """Keeps other jobs out of the folders of the run and of its checkpoints until the results are closed.

    Raises:
        ConfigError: a job is running there, or a lock can't be opened.
    """
    locks = []
    for key, folder in _written_folders(config).items():
        path = Path(folder).resolve()  # whatever links lead there
        # Nothing but checkpoints lies in their folder.
        file = path / ".lock" if key == "job.dump_folder" else path.with_name(f".{path.name}.lock")
        locks.append(lock(file, f'{key} = "{folder}"'))
    return locks


def _written_folders(config: JobConfig) -> dict[str, str]:
    """By configuration key."""
    folders = {"job.dump_folder": config.job.dump_folder}
    if config.checkpoint.enable:
        folders["checkpoint.folder"] = config.checkpoint.folder
    return folders


def lock(path: Path, what: str) -> BinaryIO:
    """Locks a file until the result is closed or this process ends, however it does. `what` it stands for.

    Raises:
        ConfigError: another process has it, or it can't be opened.
    """
    try:
        stream = path.open("ab")
    except OSError as error:
        raise ConfigError(f"{what}: {path} can't be written ({error.strerror}); name another folder") from None
    deadline_s = time.monotonic() + _PATIENCE_S
    while True:
        try:
            # Unlike flock's, this lock isn't inherited by a data loader's forked worker, which may live on.
            fcntl.lockf(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            if time.monotonic() < deadline_s:
                time.sleep(_POLL_S)
                continue
            stream.close()
            raise ConfigError(
                f"{what}: another job is running there; wait for its end or stop it, or name another folder"
            ) from None
        except OSError as error:
            logger.warning(f"{path} can't be locked ({error.strerror}): take care that no other job runs there")
        return stream


def put_records_aside(config: JobConfig) -> None:
    """Renames what an earlier run recorded, where this one doesn't continue it: `metrics.jsonl.before-1` and so on."""
    dump_folder, tensorboard = Path(config.job.dump_folder), Path(config.metrics.save_tb_folder)
    if not _has_recorded_steps(dump_folder):
        return
    # What tells that there are records goes last: a start that is killed here leaves the rest to the next one.
    records = [dump_folder / name for name in ("config.toml", "trace", "metrics.jsonl")]
    if dump_folder in tensorboard.parents:
        records.insert(0, tensorboard)
    there = [path for path in records if path.exists()]
    for number in itertools.count(1):
        aside = [path.with_name(f"{path.name}.before-{number}") for path in there]
        if not any(path.exists() for path in aside):
            break
    for path, new in zip(there, aside, strict=True):
        path.rename(new)
    names = ", ".join(str(path.relative_to(dump_folder)) for path in aside)
    logger.info(f"starting from step 0: the records of an earlier run in {dump_folder} are now {names}")


def records_beside(config: JobConfig) -> Path:
    """Where a start records that goes on from a checkpoint but saves none: in a folder of its own, unless it is the
    first to record anything. So a run's records stay those of the steps that its checkpoints have."""
    dump_folder = Path(config.job.dump_folder)
    if not _has_recorded_steps(dump_folder):
        return dump_folder
    folders = (dump_folder / f"load_only-{number}" for number in itertools.count(1))
    folder = next(folder for folder in folders if not folder.exists())
    logger.info(f"checkpoint.load_only = true: nothing is saved, and what is recorded goes to {folder}")
    return folder


def recording_in(folder: Path, config: JobConfig) -> JobConfig:
    """The configuration with metrics.jsonl, trace and TensorBoard in a folder of their own, if it is another one."""
    if folder == Path(config.job.dump_folder):
        return config
    job = replace(config.job, dump_folder=str(folder))
    return replace(config, job=job, metrics=replace(config.metrics, save_tb_folder=str(folder / "tb")))


def _has_recorded_steps(dump_folder: Path) -> bool:
    made_steps = (dump_folder / "metrics.jsonl", *dump_folder.glob("trace/*.jsonl"))
    return any(path.is_file() and path.stat().st_size for path in made_steps)
