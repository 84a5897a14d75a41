"""Files of a Hugging Face folder: which tensor goes into which, and how one is written tensor by tensor.

safetensors' own writer wants all tensors of a file at once. The format (github.com/huggingface/safetensors, "Format")
is the length of a JSON header as eight bytes, the header, and the tensors' bytes behind one another.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""What safetensors calls the dtypes that weights may have."""
# Of a tokenizer and of generation; nothing in them depends on how weights are stored.
COMPANIONS = (
    "tokenizer.model",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
)


@dataclass(frozen=True)
class PlannedFile:
    """A file and the shapes of the tensors in it, in their order."""

    name: str
    shapes: Mapping[str, tuple[int, ...]]


def plan_files(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, max_file_bytes: int) -> list[PlannedFile]:
    """Distributes tensors over files in their order: a file ends before the tensor that would make it too large.

    Args:
        shapes: of all tensors, at least one.
        max_file_bytes: of tensors in a file; a tensor that is larger has a file of its own.
    """
    groups: list[dict[str, tuple[int, ...]]] = []
    num_bytes = 0
    for name, shape in shapes.items():
        tensor_bytes = math.prod(shape) * dtype.itemsize
        if not groups or num_bytes + tensor_bytes > max_file_bytes:
            groups.append({})
            num_bytes = 0
        groups[-1][name] = shape
        num_bytes += tensor_bytes
    if len(groups) == 1:
        return [PlannedFile(SINGLE, groups[0])]
    return [
        PlannedFile(f"model-{number:05}-of-{len(groups):05}.safetensors", group)
        for number, group in enumerate(groups, start=1)
    ]


def index_of(files: list[PlannedFile], dtype: torch.dtype) -> dict[str, Any]:
    """What model.safetensors.index.json says."""
    shapes = {name: shape for file in files for name, shape in file.shapes.items()}
    return {
        "metadata": {"total_size": sum(math.prod(shape) for shape in shapes.values()) * dtype.itemsize},
        "weight_map": {name: file.name for file in files for name in file.shapes},
    }


def write_safetensors(path: Path, file: PlannedFile, dtype: torch.dtype, tensor_of: Callable[[str], Tensor]) -> None:
    """Writes a file so that it is on the disk when this returns; one tensor is held at a time.

    Args:
        tensor_of: name -> tensor on the CPU, of the planned shape and `dtype`.

    Raises:
        OSError: it can't be written.
    """
    code = next(code for code, known in DTYPES.items() if known == dtype)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in file.shapes.items():
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": code, "shape": shape, "data_offsets": (start, end)}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)  # tensors begin at a multiple of eight bytes
    with path.open("wb") as stream:
        stream.write(len(encoded).to_bytes(8, "little"))
        stream.write(encoded)
        for name, shape in file.shapes.items():
            tensor = tensor_of(name)
            assert (tensor.shape, tensor.dtype) == (shape, dtype), name
            stream.write(tensor.contiguous().view(torch.uint8).numpy().data)
            del tensor
        stream.flush()
        os.fsync(stream.fileno())


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes an object so that it is on the disk when this returns. Raises OSError."""
    with path.open("w", encoding="utf-8") as stream:
        json.dump(content, stream, indent=2)
        stream.write("\n")
        stream.flush()
        os.fsync(stream.fileno())
