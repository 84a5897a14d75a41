"""Checkpoints: written aside, published complete or not at all, found, loaded and retained.

<folder>/step-N is written by torch.distributed.checkpoint as step-N.tmp and renamed once every rank has finished. It
holds logical tensors under the model's own parameter names and no owner, so that any mesh can read it:
`model.<name>`, `optimizer.state.<name>.<slot>`, `optimizer.param_groups`, `train_state.<name>`, and the random state
of each rank.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.tensor import DTensor

import dmuon
from dmuon_titan.config.schema import Checkpoint
from dmuon_titan.console import logger
from dmuon_titan.continuation import check_model, check_optimizer, check_run, note_inexact, saved_names
from dmuon_titan.errors import CheckpointError, NonFiniteError
from dmuon_titan.seeding import random_state, restore_random_state

_STEP = re.compile(r"step-(\d+)")


@dataclass
class TrainState:
    """Where a run stands, and what its data order and its exact repetition depend on.

    step: optimizer steps made. consumed_samples: the data's one cursor. tokens_seen: tokens trained on.
    """

    seed: int
    seq_len: int
    data: str  # hash of the prepared data's manifest
    tokenizer: str  # hash of the tokenizer the data were prepared with
    global_batch_size: int  # sequences
    num_ranks: int
    num_threads: int
    tp_degree: int = 1
    step: int = 0
    consumed_samples: int = 0
    tokens_seen: int = 0


class Checkpointer:
    """Saves and loads the state of one run; every method is called by all ranks together.

    A saved step stays step-N.tmp until `publish`: the trainer calls it once the next step's loss and gradients have
    proved finite, so that a broken update never replaces a sound checkpoint, nor ages one out of `keep_latest_k`.
    """

    def __init__(
        self,
        options: Checkpoint,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        train_state: TrainState,
        device: torch.device,
    ) -> None:
        self.folder = Path(options.folder)
        self.keep_latest_k = options.keep_latest_k
        self.model, self.optimizer, self.train_state, self.device = model, optimizer, train_state, device
        self._written: int | None = None

    def write(self) -> None:
        """Writes the state of this step aside, unpublished.

        Raises:
            CheckpointError: a rank could not write; the same on all ranks.
            NonFiniteError: a value to be saved is not finite.
        """
        step = self.train_state.step
        path = self.folder / f"step-{step}.tmp"
        state = dmuon.get_state_dict(self.model, self.optimizer)
        self._check_finite(state)
        state["train_state"] = asdict(self.train_state)
        state[_random_key(dist.get_rank())] = random_state(self.device)
        if dist.get_rank() == 0:
            _clear(path)
        dist.barrier()
        try:
            dcp.save(state, checkpoint_id=path)
        except CheckpointException as error:
            raise CheckpointError(f"step {step} could not be saved in {path}: {failed_ranks(error)}") from error
        self._written = step

    def publish(self) -> None:
        """Makes the step that was written last count as a checkpoint. Does nothing if there is none."""
        if self._written is None:
            return
        path = self.folder / f"step-{self._written}"
        if dist.get_rank() == 0:
            _replace(path.with_name(path.name + ".tmp"), path)
            self._retain()
        dist.barrier()
        logger.info(f"saved step {self._written} in {path}")
        self._written = None

    def load(self, path: Path) -> None:
        """Fills model, optimizer, train state and random state from a complete checkpoint.

        Raises:
            CheckpointError: it belongs to another model, optimizer, tokenizer, data order, or can't be read.
        """
        metadata, run = _read_metadata(path), asdict(self.train_state)
        train_state = saved_names(path, metadata, run)
        self._load(path, {"train_state": train_state})
        check_run(path, train_state, run)
        state = dmuon.get_state_dict(self.model, self.optimizer)
        # The configuration says what the groups' options are, also where it changed since the save.
        groups = state["optimizer"].pop("param_groups")
        check_model(path, self.model, metadata)
        check_optimizer(path, self.model, self.optimizer, metadata)
        same_ranks = train_state["num_ranks"] == self.train_state.num_ranks
        key = _random_key(dist.get_rank())
        if same_ranks:
            state[key] = random_state(self.device)
        self._load(path, state)
        state["optimizer"]["param_groups"] = {index: {} for index in groups}
        dmuon.set_state_dict(self.model, self.optimizer, state)
        if same_ranks:
            restore_random_state(state[key], self.device)
        if dist.get_rank() == 0:
            note_inexact(path, train_state, run)
        for name in ("step", "consumed_samples", "tokens_seen"):
            setattr(self.train_state, name, train_state[name])

    def _load(self, path: Path, state: dict[str, Any]) -> None:
        try:
            dcp.load(state, checkpoint_id=path)
        except CheckpointException as error:
            raise CheckpointError(f"{path} can't be loaded: {failed_ranks(error)}") from error

    def _check_finite(self, state: dict[str, Any]) -> None:
        finite = torch.stack([tensor.isfinite().all().to(self.device) for _, tensor in _tensors(state)])
        num_bad_ranks = (~finite.all()).to(torch.int32)
        dist.all_reduce(num_bad_ranks)
        if num_bad_ranks.item():
            here = next((name for name, tensor in _tensors(state) if not tensor.isfinite().all()), None)
            firsts: list[str | None] = [None] * dist.get_world_size()
            dist.all_gather_object(firsts, here)  # all ranks raise the same: it is printed once
            raise NonFiniteError(
                f"step {self.train_state.step} made a weight or optimizer state infinite or NaN, first "
                f"{next(filter(None, firsts))}: it is not saved"
            )

    def _retain(self) -> None:
        if self.keep_latest_k == 0:
            return
        for old in _complete(self.folder)[self.keep_latest_k :]:
            # Renamed first: a checkpoint half deleted must not look complete.
            removing = old.with_name(old.name + ".removing")
            old.rename(removing)
            shutil.rmtree(removing)


def find_checkpoint(options: Checkpoint) -> Path | None:
    """The checkpoint to continue from: `load_step`, or the newest complete one; None where there is none.

    Rank 0 looks, all ranks get its answer. What looks like a checkpoint but isn't complete is named in one warning.

    Raises:
        CheckpointError: `load_step` is not there.
    """
    folder = Path(options.folder)
    found: list[Any] = [None, None]
    if dist.get_rank() == 0 and folder.is_dir():
        complete = _complete(folder)
        skipped = sorted(p.name for p in folder.iterdir() if p.name.startswith("step-") and p not in complete)
        if skipped:
            logger.warning(f"not taken for checkpoints, left alone in {folder}: {', '.join(skipped)}")
        found = [complete[0] if complete else None, [path.name for path in complete]]
        if options.load_step >= 0:
            wanted = folder / f"step-{options.load_step}"
            found[0] = wanted if wanted in complete else None
    dist.broadcast_object_list(found)
    path, names = found
    if path is None and options.load_step >= 0:
        raise CheckpointError(
            f"checkpoint.load_step = {options.load_step}: {folder} has "
            f"{', '.join(names) if names else 'no complete checkpoint'}"
        )
    return path


def step_of(path: Path) -> int:
    """The step that a checkpoint's folder is named after."""
    match = _STEP.fullmatch(path.name)
    assert match is not None
    return int(match.group(1))


def _complete(folder: Path) -> list[Path]:
    """Complete checkpoints, the newest first."""
    named = [path for path in folder.iterdir() if _STEP.fullmatch(path.name)]
    return sorted((path for path in named if _is_complete(path)), key=step_of, reverse=True)


def _is_complete(path: Path) -> bool:
    """Whether the metadata, which is written last, is there, and every file is as long as it says."""
    try:
        stored = _read_metadata(path).storage_data
    except CheckpointError:
        return False
    ends: dict[str, int] = {}
    for info in stored.values():
        ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
    files = {name: path / name for name in ends}
    return all(file.is_file() and file.stat().st_size >= ends[name] for name, file in files.items())


def _read_metadata(path: Path) -> Metadata:
    try:
        return dcp.FileSystemReader(path).read_metadata()
    except Exception as error:  # unpickling what a crash left behind can raise anything
        raise CheckpointError(f"{path} has no readable .metadata: {error}") from error


def _clear(path: Path) -> None:
    """A save needs a fresh folder: files of an earlier try would count as part of it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            logger.info(f"replacing {path}, which was never completed")
            shutil.rmtree(path)
    except OSError as error:
        raise CheckpointError(f"checkpoint.folder = {path.parent} can't be written: {error}") from error


def _replace(new: Path, path: Path) -> None:
    if path.exists():
        # From an earlier run, or never complete: put aside rather than lost while `new` takes its name.
        aside = path.with_name(path.name + ".replaced")
        if aside.exists():
            shutil.rmtree(aside)
        path.rename(aside)
        logger.warning(f"{path} was there already and is now {aside.name}")
    new.rename(path)


def _random_key(rank: int) -> str:
    return f"random_state_rank_{rank}"


def _tensors(tree: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """(dotted name, this rank's part) of every tensor in a nested dict."""
    if isinstance(tree, dict):
        for name, value in tree.items():
            yield from _tensors(value, f"{prefix}.{name}" if prefix else str(name))
    elif isinstance(tree, DTensor):
        yield prefix, tree.to_local()
    elif isinstance(tree, Tensor):
        yield prefix, tree


def failed_ranks(error: CheckpointException) -> str:
    """Each text once, with the ranks that met it."""
    ranks: dict[str, list[str]] = {}
    for rank, (failure, _) in sorted(error.failures.items()):
        ranks.setdefault(f"{type(failure).__name__}: {failure}", []).append(str(rank))
    return "; ".join(f"rank{'s' * (len(met) > 1)} {', '.join(met)}: {text}" for text, met in ranks.items())
