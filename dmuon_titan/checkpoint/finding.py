"""Which checkpoint a run starts from. All ranks look together and come to the same answer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from dmuon_titan.checkpoint.agreement import first_rank_does, gathered
from dmuon_titan.checkpoint.folder import Saved, examine, recover, scan
from dmuon_titan.checkpoint.manifest import HUGGING_FACE, store
from dmuon_titan.checkpoint.saving import dealt
from dmuon_titan.config.schema import Checkpoint
from dmuon_titan.console import logger
from dmuon_titan.errors import CheckpointError


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
    only is the answer only where it is the newest and the run's last step, which it says is made.

    Raises:
        CheckpointError: what was asked for isn't there, isn't complete, or is broken; the same on all ranks.
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
        return Start(_asked_for(options.load_step, folder, complete, group), own=True)
    if complete and complete[0].step >= num_steps:
        return Start(complete[0], own=True)
    for saved in complete:
        if not saved.full:
            logger.info(f"{saved.path} holds weights only: a run can't be continued from it")
            continue
        broken = broken_file(saved, group)
        if broken is None:
            return Start(saved, own=True)
        logger.warning(f"{saved.path} is broken and passed over: {broken}")
    if options.initial_load_path is not None and not options.initial_load_in_hf:
        return Start(_initial(Path(options.initial_load_path), group), own=False)
    return None


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
        found = examine(path)
        if found.manifest.layout == HUGGING_FACE:
            raise CheckpointError("a Hugging Face folder: set checkpoint.initial_load_in_hf = true")
        return found

    return _sound(first_rank_does(look, group, what), what, group)


def _sound(saved: Saved, what: str, group: dist.ProcessGroup) -> Saved:
    broken = broken_file(saved, group)
    if broken is not None:
        raise CheckpointError(f"{what}: {saved.path} is broken: {broken}")
    return saved
