"""Whether a checkpoint belongs to the run that is to continue from it, told in one line where it doesn't.

Everything compared is the same on all ranks, so that they come to the same verdict. All checks raise CheckpointError.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

import dmuon
from dmuon.adamw import EXP_AVG
from dmuon.muon import MOMENTUM
from dmuon_titan.checkpoint.folder import Saved
from dmuon_titan.checkpoint.keys import MODEL, OPTIMIZER, STATE
from dmuon_titan.checkpoint.manifest import Manifest
from dmuon_titan.checkpoint.state import TrainState
from dmuon_titan.config import JobConfig, flat, num_data_parallel_ranks
from dmuon_titan.config.schema import KEYS, build
from dmuon_titan.config.values import to_toml
from dmuon_titan.console import logger
from dmuon_titan.errors import CheckpointError
from dmuon_titan.lr_scheduler import build_schedule

# What a change of these keys, or of these sections, does to the steps to come.
_NOTHING = (
    *("job", "profiling", "metrics", "checkpoint", "comm", "validation", "training.gc_freq", "training.dataset"),
    *("training.dataloader", "training.sample_tokens", "training.sample_prompt", "debug.trace_batches", "model"),
)
_SCHEDULE = {"training.steps", *(key for key in KEYS if key.startswith("lr_scheduler."))}
_SAME_UP_TO_ROUNDING = ("parallelism", "compile", "activation_checkpoint")
_NUM_COMPARED = 10_000  # steps of a schedule, evenly spread: a change moves all of warm-up or decay
_RUN = {
    "global_batch_size": "sequences in a step",
    "num_ranks": "ranks, whose random state begins anew",
    "num_threads": "threads a rank",
    "nccl": "NCCL settings",
}


def check_tokenizer(path: Path, manifest: Manifest, run: TrainState) -> None:
    """Embeddings mean the tokens of one tokenizer, whatever else is loaded. One that was converted knows of none."""
    saved = manifest.run.get("tokenizer")
    if saved is not None and saved != run.tokenizer:
        raise CheckpointError(
            f"{path} was made with tokenizer {saved}, this run has {run.tokenizer}: prepare the data with the former "
            "(--tokenizer of dmuon_titan.tools.prepare), or choose another job.dump_folder to start over"
        )


def check_data_order(
    path: Path, saved: Mapping[str, Any], manifest: Manifest, run: TrainState, config: JobConfig
) -> None:
    """Compares what the order of samples depends on, and the batch that a step takes from it."""
    shown = {"seed": "debug.seed", "seq_len": "training.seq_len", "data": "training data"}
    for name, what in shown.items():
        if saved[name] != getattr(run, name):
            raise CheckpointError(
                f"{path} was made with {what} {saved[name]}, this run has {getattr(run, name)}: the order of samples "
                'would not continue; put back the former, set checkpoint.exclude_from_loading = ["dataloader"] to '
                "begin with the first sample, or choose another job.dump_folder to start over"
            )
    batch = manifest.run["global_batch_size"]
    if batch != run.global_batch_size and config.training.global_batch_size == -1:
        raise CheckpointError(
            f"{path} was made with a global batch of {batch} sequences, this run's {run.num_ranks} ranks come to "
            f"{run.global_batch_size}: set training.global_batch_size = {batch}{_with_local_batch(config, batch, run)} "
            f"to keep it, or training.global_batch_size = {run.global_batch_size} to change it"
        )


def _with_local_batch(config: JobConfig, batch: int, run: TrainState) -> str:
    """What `training.local_batch_size` must become for ranks to share a global batch; nothing if it fits."""
    dp_world, local = num_data_parallel_ranks(config, run.num_ranks), config.training.local_batch_size
    if batch % (dp_world * local) == 0:
        return ""
    fitting = [size for size in range(1, local) if batch % (dp_world * size) == 0]
    return f" with training.local_batch_size = {fitting[-1]}" if fitting else f" on a divisor of {batch} ranks"


def describe_changes(saved: Saved, config: JobConfig, run: TrainState, excluded: Collection[str]) -> None:
    """Logs what is different from the run that saved, and names what keeps this one from being the same bit for bit."""
    name = saved.path.name
    if excluded:
        logger.info(f"not loaded from {name}: {', '.join(sorted(excluded))}")
    breaking: list[str] = []
    harmless: list[str] = []
    for key, change, effect in _changes(saved, config):
        (breaking if effect else harmless).append(f"{key} = {change}")
        if effect:
            logger.info(f"changed since {name} was saved: {key} = {change}: {effect}")
    if harmless:
        logger.info(f"changed since {name} was saved, without effect on the steps: {'; '.join(harmless)}")
    now = run.run()
    for key, what in _RUN.items():
        before = saved.manifest.run.get(key, now[key])
        if before != now[key]:
            breaking.append(f"{what} = {now[key]}, was {before}")
    if breaking and not excluded:
        logger.warning(f"{name} continues with the same samples, but not bit for bit: {'; '.join(breaking)}")


def _changes(saved: Saved, config: JobConfig) -> Iterator[tuple[str, str, str]]:
    """(key, "new, was old", effect on the steps to come) of keys whose values differ; places of files are left out."""
    before = saved.manifest.config
    exact = config.debug.deterministic and before.get("debug.deterministic")
    for key, value in flat(config).items():
        # The global batch is compared as the number that it comes to.
        if key not in before or before[key] == value or KEYS[key].path or key == "training.global_batch_size":
            continue
        if key.startswith(_NOTHING) or (exact and key.startswith("parallelism.data_parallel")):
            effect = ""
        elif key in _SCHEDULE:
            effect = "other learning rates from here on" if _rates_differ(saved, config) else ""
        elif key.startswith(_SAME_UP_TO_ROUNDING):
            effect = "the same up to rounding"
        else:
            effect = "other updates from here on"
        yield key, f"{_shown(value)}, was {_shown(before[key])}", effect


def _rates_differ(saved: Saved, config: JobConfig) -> bool:
    """Whether the schedule that the run had would have gone on otherwise than this run's."""
    then = build({key: value for key, value in saved.manifest.config.items() if key in _SCHEDULE})
    num_steps = min(then.training.steps, config.training.steps)
    before, now = (build_schedule(each.lr_scheduler, each.training.steps) for each in (then, config))
    stride = max(1, (num_steps - saved.step) // _NUM_COMPARED)
    return any(before(step) != now(step) for step in range(saved.step + 1, num_steps + 1, stride))


def _shown(value: Any) -> str:
    return "none" if value is None else to_toml(tuple(value) if isinstance(value, list) else value)


def check_model(path: Path, model: nn.Module, metadata: Metadata) -> None:
    """Compares logical shapes, which are the same on every rank, so that all ranks come to the same verdict."""
    prefix = f"{MODEL}."
    saved = {
        name[len(prefix) :]: tuple(entry.size)
        for name, entry in metadata.state_dict_metadata.items()
        if name.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
    }
    known = {**dict(model.named_parameters()), **model.state_dict(keep_vars=True)}
    for name, shape in saved.items():
        if name not in known:
            raise CheckpointError(
                f"{path} belongs to another model: it has {name} {list(shape)}, the configured model has no such "
                "parameter; put back model.name and model.flavor, or choose another job.dump_folder"
            )
    for name, tensor in model.named_parameters():
        if saved.get(name) != tuple(tensor.shape):
            here = "no such parameter" if name not in saved else list(saved[name])
            raise CheckpointError(
                f"{path} belongs to another model: {name} is {list(tensor.shape)} in the configured model and {here} "
                "in the checkpoint; put back model.name and model.flavor, or choose another job.dump_folder"
            )


def check_optimizer(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, metadata: Metadata) -> None:
    """Looks for the state of every parameter, owned by this rank or not, so that all ranks come to the same verdict."""
    saved = {name for name in metadata.state_dict_metadata if name.startswith(f"{OPTIMIZER}.{STATE}.")}
    made_by = "Muon" if any(name.endswith(f".{MOMENTUM}") for name in saved) else "AdamW"
    here = "Muon" if isinstance(optimizer, dmuon.Muon) else "AdamW"
    if made_by != here:
        raise CheckpointError(
            f"{path} was made with optimizer.name = {made_by}, this run has {here}: put back the former, or choose "
            "another job.dump_folder to start over"
        )
    names = {param: name for name, param in model.named_parameters()}
    for group in optimizer.param_groups:
        slot = MOMENTUM if group.get("kind") == "muon" else EXP_AVG
        for param in group["params"]:
            if f"{OPTIMIZER}.{STATE}.{names[param]}.{slot}" not in saved:
                raise CheckpointError(
                    f"{path} has no {slot} of {names[param]}: it was made with other parameters on Muon and AdamW; "
                    "choose another job.dump_folder to start over"
                )
