"""Whether a checkpoint belongs to the run that is to continue from it, told in one line where it doesn't.

Everything compared is the same on all ranks, so that they come to the same verdict. All checks raise CheckpointError.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

import dmuon
from dmuon.muon import EXP_AVG, MOMENTUM
from dmuon_titan.console import logger
from dmuon_titan.errors import CheckpointError


def saved_names(path: Path, metadata: Metadata, train_state: dict[str, Any]) -> dict[str, Any]:
    """What a checkpoint's train state can be asked for. Early ones lack the global batch size and the tp degree."""
    found = {name: None for name in train_state if f"train_state.{name}" in metadata.state_dict_metadata}
    missing = train_state.keys() - found.keys() - {"global_batch_size", "tp_degree"}
    if missing:
        raise CheckpointError(f"{path} was not saved by this program: it has no {', '.join(sorted(missing))}")
    return found


def check_run(path: Path, saved: dict[str, Any], run: dict[str, Any]) -> None:
    """Compares train states by what the order of samples depends on."""
    names = {"seed": "debug.seed", "seq_len": "training.seq_len", "tokenizer": "tokenizer", "data": "training data"}
    for name, shown in names.items():
        now = run[name]
        if saved[name] != now:
            raise CheckpointError(
                f"{path} was made with {shown} {saved[name]}, this run has {now}: the order of samples would not "
                f"continue; put back the former, or choose another job.dump_folder to start over"
            )


def note_inexact(path: Path, saved: dict[str, Any], run: dict[str, Any]) -> None:
    """Says what keeps the continued run from being the same bit for bit."""
    batch_size, now = saved.get("global_batch_size"), run["global_batch_size"]
    if batch_size not in (None, now):
        logger.warning(
            f"{path.name} was saved with a global batch of {batch_size} sequences, this run has {now}: it continues "
            "with the same samples, but in other steps"
        )
    shown = {"num_ranks": "ranks", "tp_degree": "tensor-parallel ranks", "num_threads": "threads a rank"}
    for name, what in shown.items():
        before, now = saved.get(name, 1), run[name]  # without a tp degree there was none
        if before != now:
            logger.warning(
                f"{path.name} was saved with {before} {what}, this run has {now}: it continues with the same samples, "
                "but not bit for bit"
            )


def check_model(path: Path, model: nn.Module, metadata: Metadata) -> None:
    """Compares logical shapes, which are the same on every rank, so that all ranks come to the same verdict."""
    prefix = "model."
    saved = {
        name[len(prefix) :]: tuple(entry.size)
        for name, entry in metadata.state_dict_metadata.items()
        if name.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
    }
    for name, tensor in model.named_parameters():
        if saved.get(name) != tuple(tensor.shape):
            here = "no such parameter" if name not in saved else list(saved[name])
            raise CheckpointError(
                f"{path} belongs to another model: {name} is {list(tensor.shape)} in the configured model and {here} "
                "in the checkpoint; put back model.name and model.flavor, or choose another job.dump_folder"
            )


def check_optimizer(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, metadata: Metadata) -> None:
    """Looks for the state of every parameter, owned by this rank or not, so that all ranks come to the same verdict."""
    saved = {name for name in metadata.state_dict_metadata if name.startswith("optimizer.state.")}
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
            if f"optimizer.state.{names[param]}.{slot}" not in saved:
                raise CheckpointError(
                    f"{path} has no {slot} of {names[param]}: it was made with other parameters on Muon and AdamW; "
                    "choose another job.dump_folder to start over"
                )
