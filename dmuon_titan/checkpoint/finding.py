"""Which checkpoint a run starts from. All ranks look together and come to the same answer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from dmuon_titan.checkpoint.agreement import first_rank_does, gathered
from dmuon_titan.checkpoint.folder import Saved, examine, is_used, recover, scan
from dmuon_titan.checkpoint.manifest import HUGGING_FACE, store
from dmuon_titan.checkpoint.manifest import NAME as MANIFEST
from dmuon_titan.checkpoint.saving import dealt
from dmuon_titan.config.schema import Checkpoint
from dmuon_titan.console import logger
from dmuon_titan.errors import CheckpointError

_LOAD_STEP = "checkpoint.load_step"
_IS_HUGGING_FACE = "a Hugging Face folder: set checkpoint.initial_load_in_hf = true"


@dataclass(frozen=True)
class Start:
    """own: whether it lies in the run's own folder, not in `initial_load_path`."""

    saved: Saved
    own: bool

    @property
    def path(self) -> Path:
        return self.saved.path


def find_start(options: Checkpoint, num_steps: int, group: dist.ProcessGroup) -> Start | None:
    """The checkpoint to start from: `load_step`, or the newest complete one, or `initial_load_path`; None if none.

    Checksums are compared, and a broken checkpoint is named and passed over for the next older one. One of weights
    only is the answer only where it is the run's last step, which it says is made. `load_step` counts until the job has
    saved something since.

    Raises:
        CheckpointError: what was asked for isn't there, isn't complete, or is broken, or nothing that is there can be
            used; the same on all ranks.
    """
    folder = Path(options.folder)

    def look() -> tuple[list[Saved], dict[str, str]]:
        recover(folder)
        return scan(folder)

    complete, others = first_rank_does(look, group, f"checkpoint.folder = {folder}")
    if dist.get_rank() == 0 and others:
        listed = "; ".join(f"{name} ({reason})" for name, reason in others.items())
        logger.warning(f"not taken for checkpoints, left alone in {folder}: {listed}")
    if options.load_step >= 0:
        went_on = _since(options.load_step, complete)
        if not went_on or went_on[0].step >= num_steps:
            return Start(_asked_for(options.load_step, folder, complete, group), own=True)
        logger.info(f"this job went back to step {options.load_step} before: it goes on from what it saved since then")
        complete = [*went_on, *(saved for saved in complete if saved.step == options.load_step)]
    for saved in complete:
        if not saved.full and saved.step < num_steps:
            logger.info(f"{saved.path} holds weights only: a run can't be continued from it")
            continue
        broken = broken_file(saved, group)
        if broken is None:
            return Start(saved, own=True)
        others[saved.path.name] = broken
        if dist.get_rank() == 0:
            logger.warning(f"{saved.path} is broken and passed over: {broken}")
    lost = [name for name in others if is_used(folder / name)]
    if lost:
        raise CheckpointError(
            f"none of the checkpoints in {folder} can be used ({', '.join(lost)}): repair one, or move them away to "
            "start over"
        )
    if options.initial_load_path is not None and not options.initial_load_in_hf:
        return Start(_initial(Path(options.initial_load_path), group), own=False)
    return None


def _since(load_step: int, complete: list[Saved]) -> list[Saved]:
    """What was saved under the same `load_step`, the newest first: a job that starts again must not go back again."""
    return [saved for saved in complete if saved.full and saved.manifest.config.get(_LOAD_STEP) == load_step]


def find_newest(options: Checkpoint, group: dist.ProcessGroup) -> list[Saved]:
    """Complete checkpoints that a run can be continued from, the newest first. Contents are not looked at."""
    folder = Path(options.folder)
    complete, _ = first_rank_does(lambda: scan(folder), group, f"checkpoint.folder = {folder}")
    return [saved for saved in complete if saved.full]


def broken_file(saved: Saved, group: dist.ProcessGroup) -> str | None:
    """The first file whose checksum is not the manifest's, and how so; each file is read by one rank."""
    names = dealt(list(saved.manifest.files), dist.get_rank(), dist.get_world_size())
    broken = None
    for name in names:
        try:
            found, stored = store(saved.path / name), saved.manifest.files[name]
            if found != stored:
                broken = f"{name} has the checksum {found.crc32:08x} instead of {stored.crc32:08x}"
                break
        except OSError as error:
            broken = f"{name}: {error.strerror}"
            break
    return next((found for found in gathered(broken, group) if found is not None), None)


def _asked_for(step: int, folder: Path, complete: list[Saved], group: dist.ProcessGroup) -> Saved:
    full = [saved for saved in complete if saved.full]
    for saved in full:
        if saved.step == step:
            return _sound(saved, f"checkpoint.load_step = {step}", group)
    if any(saved.step == step for saved in complete):
        raise CheckpointError(f"checkpoint.load_step = {step}: {folder / f'step-{step}'} holds weights only")
    there = ", ".join(saved.path.name for saved in full) or "no complete checkpoint"
    raise CheckpointError(f"checkpoint.load_step = {step}: {folder} has {there}")


def _initial(path: Path, group: dist.ProcessGroup) -> Saved:
    what = f"checkpoint.initial_load_path = {path}"

    def look() -> Saved:
        if not path.is_dir():
            raise CheckpointError("no such folder")
        inside = [saved.path.name for saved in scan(path)[0]]
        if inside:
            raise CheckpointError(f"name one of the checkpoints in it: {', '.join(inside)}")
        if (path / "config.json").exists() and not (path / MANIFEST).exists():
            raise CheckpointError(_IS_HUGGING_FACE)
        found = examine(path)
        if found.manifest.layout == HUGGING_FACE:
            raise CheckpointError(_IS_HUGGING_FACE)
        return found

    return _sound(first_rank_does(look, group, what), what, group)


def _sound(saved: Saved, what: str, group: dist.ProcessGroup) -> Saved:
    broken = broken_file(saved, group)
    if broken is not None:
        raise CheckpointError(f"{what}: {saved.path} is broken: {broken}")
    return saved
