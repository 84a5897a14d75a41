"""A checkpoint becomes a folder that transformers reads."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from dmuon_titan.errors import CheckpointError
from dmuon_titan.hugging_face.comparison import check_tensors
from dmuon_titan.hugging_face.files import CONFIG, INDEX, index_of, plan_files, write_json, write_safetensors
from dmuon_titan.hugging_face.stored import StoredWeights
from models.llama.hf import hf_config, hf_names, rows_to_hf
from models.llama.sizes import LlamaSize

MAX_FILE_BYTES = 5 * 10**9


def export(
    checkpoint: Path,
    output: Path,
    size: LlamaSize,
    *,
    dtype: torch.dtype = torch.float32,
    max_file_bytes: int = MAX_FILE_BYTES,
    bos_id: int | None = None,
    eos_id: int | None = None,
    rank: int = 0,
    world: int = 1,
) -> None:
    """Writes a checkpoint's weights as safetensors under transformers' names, and config.json.

    No collective is issued, and one tensor is held at a time, twice while it is read. The folder is complete when all
    ranks have returned: contents are on the disk then, names once the folder is flushed.

    Args:
        checkpoint: a folder of torch.distributed.checkpoint with logical tensors `model.<name>`.
        output: made if it isn't there; files of the same names are replaced.
        dtype: float32, bfloat16 or float16, of all tensors.
        max_file_bytes: more than this makes several files and model.safetensors.index.json.
        bos_id, eos_id: the tokenizer's, for config.json. None: generation has no such token.
        rank, world: this process writes every `world`-th file from the `rank`-th on, and rank 0 the JSON files.

    Raises:
        CheckpointError: the checkpoint can't be read or holds another model, or a weight is too large for `dtype`.
        OSError: `output` can't be written.
    """
    shapes, stored = size.parameter_shapes(), StoredWeights(checkpoint)
    found = dict(stored.shapes)
    if size.tie_embeddings:
        found.pop("output.weight", None)
    check_tensors(str(checkpoint), found, shapes)
    ours = {theirs: name for name, theirs in hf_names(size).items()}

    def tensor_of(theirs: str) -> Tensor:
        name = ours[theirs]
        values = rows_to_hf(name, stored.read(name), size).to(dtype)
        if dtype == torch.float16 and not values.isfinite().all():  # what is saved is finite
            raise CheckpointError(f"{checkpoint}: {name} has values that {dtype} can't hold; bfloat16 has more range")
        return values

    files = plan_files({theirs: shapes[name] for theirs, name in ours.items()}, dtype, max_file_bytes)
    output.mkdir(parents=True, exist_ok=True)
    for file in files[rank::world]:
        write_safetensors(output / file.name, file, dtype, tensor_of)
    if rank == 0:
        if len(files) > 1:
            write_json(output / INDEX, index_of(files, dtype))
        ids = {"bos_token_id": bos_id, "eos_token_id": eos_id}
        # Last: without it the folder is no model.
        write_json(output / CONFIG, hf_config(size) | ids | {"torch_dtype": str(dtype).removeprefix("torch.")})
