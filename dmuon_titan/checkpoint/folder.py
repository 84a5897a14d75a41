"""A folder of checkpoints: which are complete, which is the newest, and what may go. One rank looks for all.

`step-N` counts if its manifest.json is there and every file has the size that it says. Next to it may lie
`step-N.tmp`, a save under way or cut off, `step-N.replaced`, which an earlier run had saved under the same name,
`step-N.not-finite`, whose weights proved broken, and `step-N.removing`. Everything else is somebody else's.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dmuon_titan.checkpoint.manifest import FULL, Manifest, missing_or_short, read_manifest
from dmuon_titan.checkpoint.manifest import NAME as MANIFEST
from dmuon_titan.console import logger
from dmuon_titan.disk import sync
from dmuon_titan.errors import CheckpointError

_STEP = re.compile(r"step-(\d+)")
# Tells a save of ours that was cut off from a folder that merely has such a name.
_UNFINISHED = ".unfinished"
_WRITING, _REMOVING, _REPLACED, _NOT_FINITE = ".tmp", ".removing", ".replaced", ".not-finite"


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint."""

    path: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def full(self) -> bool:
        """Whether a run can be continued from it."""
        return self.manifest.kind == FULL


def scan(folder: Path) -> tuple[list[Saved], dict[str, str]]:
    """What is in a folder of checkpoints, there or not.

    Returns:
        Complete checkpoints, the one saved last first; and name -> reason of what looks like one and isn't.
    """
    complete: list[Saved] = []
    others: dict[str, str] = {}
    for path in sorted(folder.glob("step-*")):
        named = _STEP.fullmatch(path.name)
        try:
            if named is None or not path.is_dir():
                raise CheckpointError("no name of a complete checkpoint")
            saved = examine(path)
            if saved.step != int(named[1]):
                raise CheckpointError(f"holds step {saved.step}")
            complete.append(saved)
        except CheckpointError as mistake:
            others[path.name] = str(mistake).removeprefix(f"{path} ")
    complete.sort(key=lambda saved: (saved.manifest.sequence, saved.step), reverse=True)
    return complete, others


def examine(path: Path) -> Saved:
    """The complete checkpoint that lies in a folder; contents of its files are not looked at.

    Raises:
        CheckpointError: it isn't one, and why.
    """
    manifest = read_manifest(path)
    broken = missing_or_short(path, manifest)
    if broken is not None:
        raise CheckpointError(f"{path} is not complete: {broken}")
    return Saved(path, manifest)


def is_used(path: Path) -> bool:
    """Whether a folder has the name of a checkpoint, and something in it: not what a run without any would find."""
    return _STEP.fullmatch(path.name) is not None and path.is_dir() and any(path.iterdir())


def begin(folder: Path, step: int) -> Path:
    """An empty folder to write a checkpoint into: files of an earlier try would count as part of it. Raises OSError."""
    path = folder / f"step-{step}{_WRITING}"
    # The folder was there when the job began: if it is gone, so may be the disk that it was on.
    if _was_cut_off(path):
        logger.info(f"replacing {path}, a save that was cut off")
        _discard(path)
    elif os.path.lexists(path):
        _put_aside(path, _REPLACED)
    path.mkdir()
    (path / _UNFINISHED).touch()
    return path


def publish(path: Path, manifest: Manifest) -> Path:
    """Completes what lies in step-N.tmp, a save that `begin` has begun: from now on it counts. Raises OSError."""
    final = path.with_name(path.name.removesuffix(_WRITING))
    manifest.write(path)
    if os.path.lexists(final):
        _put_aside(final, _REPLACED)  # an earlier run's, or never complete
    path.rename(final)
    sync(final.parent)
    (final / _UNFINISHED).unlink(missing_ok=True)
    return final


def recover(folder: Path) -> None:
    """Gives a checkpoint its name back where a kill came between its being put aside and its successor's taking over.

    Raises OSError.
    """
    for aside in folder.glob(f"step-*{_REPLACED}"):
        final = aside.with_name(aside.name.removesuffix(_REPLACED))
        successor = final.with_name(final.name + _WRITING)
        if not final.exists() and (successor / MANIFEST).exists():
            logger.info(f"{aside} is {final.name} again: what was to replace it was cut off")
            aside.rename(final)


def give_up(path: Path) -> None:
    """Removes what `begin` has begun, for what it takes up may be what is missing."""
    with suppress(OSError):
        _discard(path)


def condemn(folder: Path, step: int) -> None:
    """Takes a checkpoint whose weights proved broken out of the count, without losing it. Raises OSError."""
    path = folder / f"step-{step}"
    if path.exists():
        aside = _put_aside(path, _NOT_FINITE)
        logger.warning(f"{aside}: the loss or gradient of the next step is not finite, so it doesn't count")


def _put_aside(path: Path, suffix: str) -> Path:
    """Rather than lost; what was put there before goes. Raises OSError."""
    aside = path.with_name(path.name + suffix)
    _rename(path, aside)
    logger.warning(f"{path} is now {aside.name}")
    return aside


def _was_cut_off(path: Path) -> bool:
    """Whether a save of ours has left step-N.tmp. One without a mark is somebody's, unless nothing is in it."""
    return path.is_dir() and ((path / _UNFINISHED).exists() or not any(path.iterdir()))


def _discard(path: Path) -> None:
    """Renamed first: what is half removed must neither look complete nor like somebody else's. Raises OSError."""
    removing = path.with_name(path.name.removesuffix(_WRITING) + _REMOVING)
    _rename(path, removing)
    _remove(removing)


def _rename(path: Path, new: Path) -> None:
    """What has the new name already goes. Raises OSError."""
    if os.path.lexists(new):
        _remove(new)
    path.rename(new)


def _remove(path: Path) -> None:
    """A folder with all that is in it, or a file or link by itself. Raises OSError."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def next_sequence(folder: Path) -> int:
    """The number of the save that comes after all that are there."""
    return max((saved.manifest.sequence for saved in scan(folder)[0]), default=0) + 1


def retain(folder: Path, num_kept: int, protected: Collection[Path]) -> None:
    """Removes all but the newest `num_kept` full checkpoints (0: none goes), and what cut-off saves left behind.

    The newest and `protected` ones stay in any case, and so does what this program didn't write.
    """
    if num_kept > 0:
        full = [saved.path for saved in scan(folder)[0] if saved.full]
        for path in full[num_kept:]:
            if path not in protected:
                _discard(path)
    # Last: a leftover that can't be removed must not keep the disk filling up.
    for path in folder.glob(f"step-*{_REMOVING}"):
        if _STEP.fullmatch(path.name.removesuffix(_REMOVING)):
            _remove(path)
    for path in folder.glob(f"step-*{_WRITING}"):
        if _STEP.fullmatch(path.name.removesuffix(_WRITING)) and _was_cut_off(path):
            logger.info(f"removing {path}, a save that was cut off")
            _discard(path)
