"""Weights in a folder of torch.distributed.checkpoint, read and written by one process, one tensor at a time.

A folder holds them as `model.<name>`, logical and whole whatever wrote them. No collective is issued, also where
torch.distributed is running.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from dmuon.materialize import RowInit
from dmuon.state_dict import MODEL
from dmuon_titan.errors import CheckpointError

_PREFIX = f"{MODEL}."


class StoredWeights:
    """The weights that a folder holds."""

    def __init__(self, checkpoint: Path) -> None:
        """Reads what the folder says of itself.

        Raises:
            CheckpointError: it has no metadata that can be read.
        """
        self.checkpoint = checkpoint
        self._reader = _Reader(checkpoint)
        try:
            entries = self._reader.read_metadata().state_dict_metadata
        except Exception as error:  # unpickling what a crash left behind can raise anything
            raise CheckpointError(f"{checkpoint} has no readable .metadata: {error}") from None
        self.shapes: dict[str, tuple[int, ...]] = {
            key.removeprefix(_PREFIX): tuple(entry.size)
            for key, entry in entries.items()
            if key.startswith(_PREFIX) and isinstance(entry, TensorStorageMetadata)
        }

    def read(self, name: str) -> Tensor:
        """A whole weight, float32, on the CPU.

        Raises:
            CheckpointError: it can't be read.
        """
        key = f"{_PREFIX}{name}"
        state = {key: torch.empty(self.shapes[name], dtype=torch.float32, device="cpu")}
        with _one_process(f"{self.checkpoint} can't be read"):
            dcp.load(state, storage_reader=self._reader, no_dist=True)
        return state[key]


class _Reader(dcp.FileSystemReader):
    """Reads the metadata once: those of a large run list a million pieces, and are asked for at every tensor."""

    _metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._metadata is None:
            self._metadata = super().read_metadata(*args, **kwargs)
        return self._metadata


def write_weights(folder: Path, shapes: Mapping[str, tuple[int, ...]], init: RowInit) -> None:
    """Writes what `init` says of each weight, float32, a file each, so that they are on the disk when this returns.

    Raises:
        CheckpointError: the folder can't be written; or what `init` raises.
    """
    # One file for all would keep all of them in memory until it is written.
    writer = dcp.FileSystemWriter(folder, single_file_per_rank=False, sync_files=True)
    state = {MODEL: {name: torch.empty(shape, dtype=torch.float32, device="meta") for name, shape in shapes.items()}}
    with _one_process(f"{folder} can't be written"):
        dcp.save(state, storage_writer=writer, planner=_Drawn(init), no_dist=True)


class _Drawn(dcp.DefaultSavePlanner):
    """Plans by tensors without values, and draws the values of each when it is written."""

    def __init__(self, init: RowInit) -> None:
        super().__init__()
        self._init = init

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        planned = super().lookup_object(index)
        return self._init(index.fqn.removeprefix(_PREFIX), planned.shape, 0, planned.shape[0])


@contextmanager
def _one_process(mistake: str) -> Iterator[None]:
    """Around a call of torch.distributed.checkpoint for this process alone: its failure is one line."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        try:
            yield
        except CheckpointException as error:
            failure = next(iter(error.failures.values()))[0]
            if isinstance(failure, CheckpointError):
                raise failure from None
            raise CheckpointError(f"{mistake}: {type(failure).__name__}: {failure}".splitlines()[0]) from error
