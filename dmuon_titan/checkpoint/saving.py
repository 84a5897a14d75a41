"""One save, from state in memory to a complete checkpoint: write aside, flush, verify on all ranks, publish.

Everything here is called by all ranks together, over a process group of its own: in the training thread, or in
another one, beside the training, with a copy of the state.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from dmuon_titan.checkpoint.agreement import agree, first_rank_does, gathered, reason, told
from dmuon_titan.checkpoint.folder import begin, give_up, next_sequence, publish
from dmuon_titan.checkpoint.manifest import Manifest, StoredFile, store
from dmuon_titan.disk import why_not_writable
from dmuon_titan.errors import CheckpointError

_METADATA, _BESIDE = ".metadata", ".beside"


@dataclass(frozen=True)
class SaveReport:
    """path: the complete checkpoint. num_bytes: of all its files."""

    path: Path
    num_bytes: int


Export = Callable[[Path, Path], None]
"""Called by all ranks with a folder that torch.distributed.checkpoint has written and one to fill with other files."""


def save(
    folder: Path, state: dict[str, Any], draft: Manifest, group: dist.ProcessGroup, export: Export | None = None
) -> SaveReport:
    """Writes `state` as the checkpoint step-N of a folder.

    Args:
        state: this rank's part, logical tensors as `torch.distributed.checkpoint` takes them.
        draft: the manifest, whose files and sequence are filled in here.
        group: of all ranks, for CPU tensors.
        export: makes the files that are kept of those that are written first. None: they are the same.

    Raises:
        CheckpointError: a rank could not write, or what lies on the disk is not what was written; the same on all
            ranks. What was there before is untouched, and nothing of this save is left.
    """
    what = f"step {draft.step} could not be saved in {folder / f'step-{draft.step}'}"
    temporary = first_rank_does(lambda: begin(folder, draft.step), group, what)
    try:
        if export is None:
            _write(temporary, state, group, what)
        else:
            _write_exported(temporary, state, group, what, export)
        files = _verify(temporary, group, what)

        def complete() -> Path:
            return publish(temporary, replace(draft, files=files, sequence=next_sequence(folder)))

        path = first_rank_does(complete, group, what)
    except CheckpointError:
        if dist.get_rank() == 0:
            give_up(temporary)
        raise
    return SaveReport(path, sum(file.size for file in files.values()))


def _write(path: Path, state: dict[str, Any], group: dist.ProcessGroup, what: str) -> None:
    mistake = None
    try:
        dcp.save(state, storage_writer=dcp.FileSystemWriter(path, sync_files=True), process_group=group)
    except CheckpointException as error:
        mistake = failed_ranks(error)
    if mistake is not None:
        # torch's writer says "unexpected pos": the system is asked again for what it has against this rank's file.
        agree(_why_not_writable(path), group, what)
        raise CheckpointError(f"{what}: {mistake}")


def _write_exported(path: Path, state: dict[str, Any], group: dist.ProcessGroup, what: str, export: Export) -> None:
    """Through files beside: tensors travel between ranks over the file system, as whole as each needs them."""
    beside = path / _BESIDE
    _write(beside, state, group, what)
    mistake = None
    try:
        export(beside, path)
    except (OSError, CheckpointError) as error:
        mistake = reason(error)
    agree(mistake, group, what)
    first_rank_does(lambda: shutil.rmtree(beside), group, what)


def _why_not_writable(path: Path) -> str | None:
    """What the system says to this rank when its file, or a new one, is to become longer; None if nothing."""
    own = sorted(path.glob(f"__{dist.get_rank()}_*.distcp"))
    return why_not_writable(own[-1] if own else path / f"probe-{dist.get_rank()}")


def _verify(path: Path, group: dist.ProcessGroup, what: str) -> dict[str, StoredFile]:
    """Size and checksum of every file, each read back by one rank; and that these are all that the metadata names."""
    names = first_rank_does(lambda: sorted(file.name for file in path.iterdir() if file.is_file()), group, what)
    names = [name for name in names if not name.startswith(".") or name == _METADATA]
    mine = dealt(names, dist.get_rank(), dist.get_world_size())
    found: dict[str, StoredFile] = {}
    mistake = None
    try:
        found = {name: store(path / name) for name in mine}
    except OSError as error:
        mistake = reason(error)
    agree(mistake, group, what)
    files = {name: file for part in gathered(found, group) for name, file in part.items()}
    if _METADATA in files:
        first_rank_does(lambda: _check_lengths(path, files), group, what)
    return dict(sorted(files.items()))


def dealt(names: list[str], rank: int, num_ranks: int) -> list[str]:
    """The files that a rank reads of those that all ranks share: those it wrote, and every n-th of the others."""
    own = [name for name in names if name.startswith(f"__{rank}_")]
    writers = {f"__{other}_" for other in range(num_ranks)}
    others = [name for name in names if not any(name.startswith(writer) for writer in writers)]
    return own + others[rank::num_ranks]


def _check_lengths(path: Path, files: Mapping[str, StoredFile]) -> None:
    """Raises CheckpointError where a file is missing or shorter than the metadata, written last, says."""
    ends: dict[str, int] = {}
    for info in dcp.FileSystemReader(path).read_metadata().storage_data.values():
        ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
    for name, end in ends.items():
        size = files[name].size if name in files else 0
        if size < end:
            raise CheckpointError(f"{path / name} has {size} bytes on the disk, {end} were written")


def failed_ranks(error: CheckpointException) -> str:
    """Each text once, with the ranks that met it."""
    ranks: dict[str, list[str]] = {}
    for rank, (failure, _) in sorted(error.failures.items()):
        ranks.setdefault(f"{type(failure).__name__}: {failure}", []).append(str(rank))
    return told(ranks)
