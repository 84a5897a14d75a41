"""Saves and loads the state of one run: what is due when, and what happens beside the training.

A save that has been published counts at once. Only when the next step's loss and gradients have proved finite may it
push an older one out of `keep_latest_k`; where they are not, it is taken out of the count instead.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import dmuon
from dmuon.parameter import local
from dmuon_titan.checkpoint import folder as folders
from dmuon_titan.checkpoint.agreement import first_rank_does, gathered
from dmuon_titan.checkpoint.continuation import (
    check_data_order,
    check_model,
    check_optimizer,
    check_tokenizer,
    describe_changes,
)
from dmuon_titan.checkpoint.copies import StateCopies
from dmuon_titan.checkpoint.finding import Start
from dmuon_titan.checkpoint.keys import DATA, MODEL, OPTIMIZER, PARAM_GROUPS, RANDOM, SCHEDULE, TRAIN_STATE
from dmuon_titan.checkpoint.manifest import DCP, FULL, HUGGING_FACE, WEIGHTS_ONLY, Manifest
from dmuon_titan.checkpoint.saving import SaveReport, failed_ranks, save
from dmuon_titan.checkpoint.state import TrainState, own_random_state, stacked_random_state
from dmuon_titan.config import JobConfig, flat, versions
from dmuon_titan.console import logger
from dmuon_titan.data.tokenizer import Tokenizer
from dmuon_titan.errors import CheckpointError, NonFiniteError
from dmuon_titan.hugging_face import export
from dmuon_titan.seeding import restore_random_state
from models.llama.sizes import LlamaSize

# Ranks that have written wait for those that still do. That a rank is gone is noticed elsewhere, within seconds.
_PATIENCE = timedelta(hours=6)
_GRACE_S = 30.0  # for what failed on one rank to be known on the others
_GIB = 1 << 30


@dataclass
class _UnderWay:
    """A save that has begun.

    proved: whether the step after it was finite. retained: whether older checkpoints have made room for it.
    mistake: why this rank's part failed. thread: None once all ranks know how it ended.
    """

    step: int
    proved: bool = False
    retained: bool = False
    report: SaveReport | None = None
    mistake: str | None = None
    thread: threading.Thread | None = field(default=None, repr=False)

    @property
    def over(self) -> bool:
        return self.thread is None or not self.thread.is_alive()


class Checkpointer:
    """Every method is called by all ranks together, and raises the same on all of them.

    tokenizer_path: the sentencepiece model of the training data, for Hugging Face's folders; None where there is none.
    """

    tokenizer_path: Path | None = None

    def __init__(
        self,
        config: JobConfig,
        size: LlamaSize,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        state: TrainState,
        device: torch.device,
    ) -> None:
        self.config, self.options, self.size = config, config.checkpoint, size
        self.model, self.optimizer, self.state, self.device = model, optimizer, state, device
        self.folder = Path(config.checkpoint.folder)
        self.group = checkpoint_group()
        self._ranks = init_device_mesh("cpu", (dist.get_world_size(),))
        self._under_way: _UnderWay | None = None
        self._protected: list[Path] = []
        self._resumed = False
        self._saved_s = time.monotonic()
        self._exported_dtype = torch.float32
        self._copies = StateCopies(kept=self.options.async_mode == "async_with_pinned_mem")

    def due(self) -> bool:
        """Whether `interval_minutes` have passed since the last save, or the start, by this rank's clock."""
        minutes = self.options.interval_minutes
        return minutes is not None and time.monotonic() - self._saved_s >= 60 * minutes

    def failed(self) -> bool:
        """Whether this rank knows of a save under way that has failed."""
        return self._under_way is not None and self._under_way.over and self._under_way.mistake is not None

    def save(self, *, last: bool = False, wait: bool = False) -> None:
        """Saves this step. With `async_mode`, returns when the state has been copied, unless it is to `wait`.

        Args:
            last: whether it is the run's last step, of which weights alone may be asked for.
            wait: for the complete checkpoint.

        Raises:
            CheckpointError: this save, or one that was under way, could not be completed.
            NonFiniteError: a value to be saved is not finite.
        """
        self.finish()
        self._saved_s = begin_s = time.monotonic()
        weights_only = last and self.options.last_save_model_only
        state = self._state(weights_only)
        under_way = _UnderWay(self.state.step)
        draft = self._draft(weights_only)
        self._under_way = under_way
        if last or wait or self.options.async_mode == "disabled":
            self._save(under_way, state, draft, begin_s)
            self._end(under_way)
        else:
            copy = self._copies.copy(state)
            logger.info(f"saving step {under_way.step}: training waited {time.monotonic() - begin_s:.2f} s")
            under_way.thread = threading.Thread(
                target=self._save, args=(under_way, copy, draft, begin_s), name="checkpoint", daemon=True
            )
            under_way.thread.start()
        if last:  # there is no next step
            self.proved()

    def give_up(self) -> None:
        """The save that is under way has failed on some rank. No rank waits for the others: they may wait for it.

        Raises:
            CheckpointError: always.
        """
        assert self._under_way is not None
        if self._under_way.thread is not None:
            self._under_way.thread.join(_GRACE_S)
        step, mistake = self._under_way.step, self._under_way.mistake
        raise CheckpointError(mistake or f"step {step} could not be saved in {self.folder}: another rank failed")

    def finish(self) -> None:
        """Waits for the save that is under way, if one is.

        Raises:
            CheckpointError: it failed.
        """
        if self._under_way is not None and self._under_way.thread is not None:
            self._under_way.thread.join()
            self._end(self._under_way)

    def proved(self) -> None:
        """The step after the one saved last is finite: older checkpoints may go."""
        if self._under_way is not None:
            self._under_way.proved = True
            self._make_room(self._under_way)
        elif self._resumed:  # from what a signal had saved, perhaps, which no step had proved then
            self._resumed = False
            self._remove_old()

    def broke(self) -> None:
        """A loss or gradient is not finite: if that is the first step after a save, the save doesn't count."""
        try:
            self.finish()
        except CheckpointError as mistake:
            logger.warning(str(mistake))
        under_way = self._under_way
        if under_way is not None and not under_way.proved:
            first_rank_does(
                lambda: folders.condemn(self.folder, under_way.step),
                self.group,
                f"step {under_way.step} can't be taken out of {self.folder}",
            )

    def _make_room(self, under_way: _UnderWay) -> None:
        """Removes what `keep_latest_k` lets go once a save is complete and proved sound."""
        if not under_way.proved or under_way.report is None or not under_way.over or under_way.retained:
            return
        under_way.retained = True
        self._remove_old()

    def _remove_old(self) -> None:
        if dist.get_rank() == 0:
            try:
                folders.retain(self.folder, self.options.keep_latest_k, self._protected)
            except OSError as error:
                logger.warning(f"an old checkpoint can't be removed: {error}")

    def load(self, start: Start) -> None:
        """Fills model, optimizer, train state and random state, as far as the configuration asks for.

        Raises:
            CheckpointError: it belongs to another model, optimizer, tokenizer or data order, or can't be read.
        """
        path, manifest = start.path, start.saved.manifest
        excluded = self._excluded(start)
        metadata = dcp.FileSystemReader(path).read_metadata()
        parts = self.state.parts(excluded)
        self._read(path, dict(parts))
        check_tokenizer(path, manifest, self.state)
        if DATA not in excluded:
            check_data_order(path, parts[DATA], manifest, self.state, self.config)
        state = dmuon.get_state_dict(self.model, self.optimizer)
        asked: dict[str, Any] = {}
        if MODEL not in excluded:
            check_model(path, self.model, metadata)
            asked[MODEL] = state[MODEL]
        if OPTIMIZER not in excluded:
            check_optimizer(path, self.model, self.optimizer, metadata)
            # The configuration says what the groups' options are, also where it changed since the save.
            asked[OPTIMIZER] = {name: part for name, part in state[OPTIMIZER].items() if name != PARAM_GROUPS}
        random = self._random_state()
        same = manifest.run.get("num_ranks") == self.state.num_ranks and TRAIN_STATE not in excluded
        same = same and all(f"{RANDOM}.{name}" in metadata.state_dict_metadata for name in random)
        if same:
            asked[RANDOM] = random
        self._read(path, asked)
        state[OPTIMIZER][PARAM_GROUPS] = {index: {} for index in state[OPTIMIZER][PARAM_GROUPS]}
        dmuon.set_state_dict(self.model, self.optimizer, state)
        if same:
            restore_random_state(own_random_state(random), self.device)
        self.state.take(parts)
        begun = self.state.step if SCHEDULE in excluded else self.state.schedule_start
        self.state.schedule_start = min(begun, self.state.step)
        if start.own:
            self._protected.append(path)
            self._resumed = True
        if dist.get_rank() == 0:
            describe_changes(start.saved, self.config, self.state, excluded)

    def _excluded(self, start: Start) -> frozenset[str]:
        options = self.options
        asked = frozenset(options.exclude_from_loading)
        if not start.own and options.initial_load_model_only:
            return asked | {OPTIMIZER, TRAIN_STATE, SCHEDULE, DATA}
        if not start.saved.full:
            raise CheckpointError(
                f"{start.path} holds weights only: set checkpoint.initial_load_model_only = true, or name a full one"
            )
        made_under = start.saved.manifest.config.get("checkpoint.exclude_from_loading", [])
        if start.own and asked == set(made_under):
            # Saved by this very run, which has left those parts out when it began.
            return frozenset({DATA}) if DATA in asked and self._has_other_data(start.path) else frozenset()
        return asked

    def _has_other_data(self, path: Path) -> bool:
        data = {DATA: {"data": ""}}
        self._read(path, data)
        return data[DATA]["data"] != self.state.data

    def _state(self, weights_only: bool) -> dict[str, Any]:
        if weights_only:
            weights = dmuon.get_state_dict(self.model)[MODEL]
            self._check_finite({MODEL: weights})
            self._exported_dtype = dtype = self._export_dtype(weights)
            return {MODEL: {name: t.to(dtype) if t.is_floating_point() else t for name, t in weights.items()}}
        state = dmuon.get_state_dict(self.model, self.optimizer)
        self._check_finite(state)
        return {**state, **self.state.parts(), RANDOM: self._random_state()}

    def _export_dtype(self, weights: dict[str, Tensor]) -> torch.dtype:
        """The format that is asked for; float32 if a weight is too large for it: better than no weights at all."""
        dtype: torch.dtype = getattr(torch, self.options.export_dtype)
        largest = [local(weight).abs().amax() for weight in weights.values() if local(weight).numel()]
        fits = all(weight.to(dtype).isfinite().item() for weight in largest)
        if all(gathered(fits, self.group)):
            return dtype
        if dist.get_rank() == 0:
            logger.warning(
                f"checkpoint.export_dtype = {self.options.export_dtype}: a weight of step {self.state.step} is too "
                "large for it; saved in float32"
            )
        return torch.float32

    def _random_state(self) -> dict[str, Tensor]:
        return stacked_random_state(self.device, self._ranks)

    def _draft(self, weights_only: bool) -> Manifest:
        return Manifest(
            kind=WEIGHTS_ONLY if weights_only else FULL,
            layout=HUGGING_FACE if weights_only and self.options.last_save_in_hf else DCP,
            step=self.state.step,
            sequence=0,
            files={},
            model={"name": self.config.model.name, "flavor": self.config.model.flavor, **asdict(self.size)},
            config=flat(self.config),
            run={**self.state.run(), "tokenizer": self.state.tokenizer},
            versions=versions(),
        )

    def _save(self, under_way: _UnderWay, state: dict[str, Any], draft: Manifest, begin_s: float) -> None:
        try:
            export = self._export if draft.layout == HUGGING_FACE else None
            report = save(self.folder, state, draft, self.group, export)
        except CheckpointError as error:
            under_way.mistake = str(error)
        except Exception as error:
            if under_way.thread is None:
                raise
            under_way.mistake = (
                f"step {draft.step} could not be saved in {self.folder}: {type(error).__name__}: {error}"
            )
        else:
            under_way.report = report
            logger.info(
                f"saved step {draft.step} in {report.path}: {report.num_bytes / _GIB:.3f} GiB, "
                f"{time.monotonic() - begin_s:.2f} s"
            )

    def _export(self, written: Path, output: Path) -> None:
        """Weights as Hugging Face has them, and the tokenizer that they were trained with."""
        tokenizer = Tokenizer(self.tokenizer_path) if self.tokenizer_path is not None else None
        if self.tokenizer_path is not None and dist.get_rank() == 0:
            shutil.copyfile(self.tokenizer_path, output / "tokenizer.model")
        export(
            written,
            output,
            self.size,
            dtype=self._exported_dtype,
            bos_id=tokenizer.bos_id if tokenizer else None,
            eos_id=tokenizer.eos_id if tokenizer else None,
            rank=dist.get_rank(),
            world=dist.get_world_size(),
        )

    def _end(self, under_way: _UnderWay) -> None:
        """Raises on all ranks what a save that is over has met on any."""
        under_way.thread = None
        mistakes = [mistake for mistake in gathered(under_way.mistake, self.group) if mistake is not None]
        if mistakes:
            self._under_way = None
            raise CheckpointError(mistakes[0])
        self._make_room(under_way)

    def _read(self, path: Path, state: dict[str, Any]) -> None:
        try:
            dcp.load(state, checkpoint_id=path, process_group=self.group)
        except CheckpointException as error:
            raise CheckpointError(f"{path} can't be loaded: {failed_ranks(error)}") from error

    def _check_finite(self, state: dict[str, Any]) -> None:
        names_and_tensors = list(_tensors(state))
        finite = torch.stack([_is_finite(tensor).to(self.device) for _, tensor in names_and_tensors])
        num_bad_ranks = (~finite.all()).to(torch.int32)
        dist.all_reduce(num_bad_ranks)
        if num_bad_ranks.item():
            here = next((name for name, tensor in names_and_tensors if not _is_finite(tensor)), None)
            first = next(name for name in gathered(here, self.group) if name is not None)
            raise NonFiniteError(
                f"step {self.state.step} made a weight or optimizer state infinite or NaN, first {first}: it is not "
                "saved"
            )


def checkpoint_group() -> dist.ProcessGroup:
    """A group of all ranks on the CPU that nothing but checkpoints uses: a save may run beside the training."""
    group = dist.new_group(backend="gloo", timeout=_PATIENCE)
    assert group is not None
    return group


def _is_finite(tensor: Tensor) -> Tensor:
    """Whether all values are, 0-dim. NaN becomes both extremes: they tell in one pass, without a copy as of `abs`."""
    if tensor.numel() == 0:
        return torch.ones((), dtype=torch.bool, device=tensor.device)
    return torch.stack(tensor.aminmax()).isfinite().all()


def _tensors(tree: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """(dotted name, this rank's part) of every tensor in a nested dict."""
    if isinstance(tree, dict):
        for name, value in tree.items():
            yield from _tensors(value, f"{prefix}.{name}" if prefix else str(name))
    elif isinstance(tree, DTensor):
        yield prefix, tree.to_local()
    elif isinstance(tree, Tensor):
        yield prefix, tree
