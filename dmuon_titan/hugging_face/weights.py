"""The weights of a Hugging Face folder, any rows of any of them at a time."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dmuon_titan.errors import CheckpointError
from dmuon_titan.hugging_face.comparison import check_size, check_tensors
from dmuon_titan.hugging_face.files import CONFIG, DTYPES, INDEX, SINGLE
from models.llama.hf import hf_names, is_rotary_table, num_reordered_rows, rows_from_hf, size_from_hf_config
from models.llama.sizes import LlamaSize

_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


class HuggingFaceWeights:
    """An initializer for `dmuon.materialize`: what a rank doesn't keep, it doesn't read."""

    def __init__(self, folder: Path, size: LlamaSize) -> None:
        """Opens the files and compares what they say of themselves with the model; no weight is read.

        Args:
            folder: holds config.json, and model.safetensors or the files of model.safetensors.index.json, in float32,
                bfloat16 or float16.
            size: of the model that the weights are for.

        Raises:
            CheckpointError: a file is missing, broken, or describes another model.
        """
        check_size(str(folder / CONFIG), read_size(folder), size)
        self.folder, self.size = folder, size
        self._names = hf_names(size)
        self._stored = _open(folder)
        shapes = size.parameter_shapes()
        wanted = {theirs: shapes[ours] for ours, theirs in self._names.items()}
        # transformers writes the matrix of a tied model once, others write it twice.
        self._twice = size.tie_embeddings and _HEAD in self._stored
        if self._twice:
            wanted[_HEAD] = wanted[_EMBEDDING]
        check_tensors(str(folder), {name: rows.get_shape() for name, rows in self._stored.items()}, wanted)
        for name, rows in self._stored.items():
            if rows.get_dtype() not in DTYPES:
                raise CheckpointError(
                    f"{folder}: {name} is of the type {rows.get_dtype()}, legal is {', '.join(DTYPES)}"
                )

    def __call__(self, name: str, shape: Sequence[int], start: int, stop: int) -> Tensor:
        """Rows start .. stop - 1 of dim 0 of our parameter `name`, whose whole shape is `shape`; float32, on the CPU.

        Of wq and wk the heads that cover the rows are read.

        Raises:
            CheckpointError: they can't be read, or a tied model's matrix is there twice with different values.
        """
        theirs = self._names[name]
        assert tuple(shape) == tuple(self._stored[theirs].get_shape()), name
        group = num_reordered_rows(name, self.size)
        first, end = start // group * group, -(-stop // group) * group
        rows = self._read(theirs, first, end)
        if self._twice and theirs == _EMBEDDING and not torch.equal(rows, self._read(_HEAD, first, end)):
            raise CheckpointError(
                f"{self.folder} is of a tied model, but {_HEAD} and {_EMBEDDING} differ in rows {first} to {end - 1}"
            )
        return rows_from_hf(name, rows, self.size)[start - first : stop - first]

    def _read(self, theirs: str, start: int, stop: int) -> Tensor:
        rows = self._stored[theirs]
        # A copy: what safetensors gives is a view of the file.
        values = torch.empty(stop - start, *rows.get_shape()[1:], dtype=torch.float32, device="cpu")
        try:
            return values.copy_(rows[start:stop])
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self.folder}: {theirs} can't be read: {error}") from None


def read_size(folder: Path) -> LlamaSize:
    """The size that the folder's config.json describes.

    Raises:
        CheckpointError: there is none, or it isn't of a Llama that this program knows.
    """
    config = _read_object(folder, CONFIG)
    try:
        return size_from_hf_config(config)
    except ValueError as mistake:
        raise CheckpointError(f"{folder / CONFIG}: {mistake}") from None


def _open(folder: Path) -> dict[str, Any]:
    """Their name -> rows of every tensor, rotary tables aside. As in transformers, the single file goes first."""
    if (folder / SINGLE).exists():
        file = _open_file(folder / SINGLE)
        stored = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118, for it is no dict
    elif (folder / INDEX).exists():
        stored = {}
        files: dict[str, Any] = {}
        for name, file_name in _read_object(folder, INDEX).get("weight_map", {}).items():
            if file_name not in files:
                files[file_name] = _open_file(folder / file_name)
            try:
                stored[name] = files[file_name].get_slice(name)
            except SafetensorError:
                raise CheckpointError(f"{folder / file_name} lacks {name}, which {INDEX} says it has") from None
    else:
        raise CheckpointError(f"{folder} has neither {SINGLE} nor {INDEX}: only safetensors are read")
    return {name: rows for name, rows in stored.items() if not is_rotary_table(name)}


def _open_file(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is no complete safetensors file: {error}") from None


def _read_object(folder: Path, name: str) -> dict[str, Any]:
    path = folder / name
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{folder} has no {name}: it is no Hugging Face folder") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} can't be read: {error}") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} can't be read: it isn't a JSON object")
    return found
