"""Checkpoints of small Llamas, and folders for transformers made of them, as tests write and read them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor

from dmuon_titan.checkpoint.manifest import DCP, FULL, Manifest, store
from models.llama.initialization import Initializer
from models.llama.model import Llama
from models.llama.sizes import LlamaSize, size_to_dict
from tests.unit.test_llama_hf import SIZES

SIZE, TIED = SIZES["grouped"], SIZES["stretched and tied"]
NUM_BYTES = SIZE.num_parameters() * 4


def save_checkpoint(folder: Path, size: LlamaSize, model: Llama | None = None) -> Path:
    """A full checkpoint, other state included, of a model or of initial weights."""
    init = Initializer(size, seed=1)
    state = model.state_dict() if model else {n: init(n, s, 0, s[0]) for n, s in size.parameter_shapes().items()}
    if size.tie_embeddings:
        state.pop("output.weight", None)
    momentum = {"layers.0.attention.wq.weight": {"momentum": torch.ones(2)}}
    dcp.save({"model": state, "optimizer": {"state": momentum}}, checkpoint_id=folder, no_dist=True)
    write_manifest(folder, size)
    return folder


def write_manifest(folder: Path, size: LlamaSize, **changes: Any) -> None:
    files = {path.name: store(path) for path in folder.iterdir()}
    model = {"name": "llama3", "flavor": "test", **size_to_dict(size)}
    plain = Manifest(FULL, DCP, 7, 1, files, model, config={}, run={}, versions={})
    replace(plain, **changes).write(folder)


def read_checkpoint(folder: Path, size: LlamaSize) -> dict[str, Tensor]:
    state = {f"model.{name}": torch.empty(shape) for name, shape in size.parameter_shapes().items()}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    return {name.removeprefix("model."): tensor for name, tensor in state.items()}


def read_folder(folder: Path) -> dict[str, Tensor]:
    # Copies, for files may be overwritten while their tensors are in use.
    return {name: tensor.clone() for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name
