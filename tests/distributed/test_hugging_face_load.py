"""A folder for transformers fills a model on any mesh, and the mesh's checkpoint becomes the same folder again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.tensor import DTensor

import dmuon
from dmuon_titan.config.schema import build
from dmuon_titan.hugging_face import HuggingFaceWeights, export
from dmuon_titan.mesh import build_mesh
from dmuon_titan.parallelize import parallelize
from models.llama.initialization import Initializer
from models.llama.model import Llama
from models.llama.sizes import LlamaSize
from tests.distributed.pool import RankPool

# Where AdamW updates everything, FSDP2 cuts the 12 rows of wk that tensor parallelism leaves a rank, one head, in two.
SIZE = LlamaSize(48, 2, 4, 2, 100, None, 16, 10000.0)
TIED = replace(SIZE, tie_embeddings=True)
DEGREES = ("data_parallel_replicate_degree", "data_parallel_shard_degree", "tensor_parallel_degree")
SEQ_LEN = 16
MAX_FILE_BYTES = 50_000


def whole_model(size: LlamaSize) -> Llama:
    with torch.device("meta"):
        model = Llama(size, SEQ_LEN)
    dmuon.materialize(model, Initializer(size, 1), "cpu")
    return model


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def return_trip(base: Path, size: LlamaSize, degrees: tuple[int, int, int], optimizer: str) -> None:
    """Fills a model from base/hf, compares it with the one that was exported, and exports it to base/returned."""
    config = build(
        {f"parallelism.{name}": degree for name, degree in zip(DEGREES, degrees, strict=True)}
        | {"optimizer.name": optimizer, "training.mixed_precision_param": "float32", "training.seq_len": SEQ_LEN}
    )
    with torch.device("meta"):
        model = Llama(size, SEQ_LEN)
    parallelize(model, config, build_mesh(torch.device("cpu"), degrees))
    dmuon.materialize(model, HuggingFaceWeights(base / "hf", size), "cpu")

    expected = whole_model(size)
    params = dict(expected.named_parameters())
    state = dmuon.get_state_dict(model)
    for name, held in state["model"].items():
        assert torch.equal(whole(held), params[name]), name
    held_names: list[set[str]] = [set()] * dist.get_world_size()
    dist.all_gather_object(held_names, set(state["model"]))
    assert set().union(*held_names) == set(params)
    tokens = torch.randint(size.vocab_size, (1, SEQ_LEN), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():  # compute copies, too, are of these weights
        torch.testing.assert_close(whole(model(tokens)), expected(tokens), rtol=1e-5, atol=1e-5)

    dcp.save(dmuon.get_state_dict(model), checkpoint_id=base / "saved")
    export(
        base / "saved",
        base / "returned",
        size,
        max_file_bytes=MAX_FILE_BYTES,
        rank=dist.get_rank(),
        world=dist.get_world_size(),
    )


@pytest.mark.parametrize(
    ("size", "degrees", "optimizer"),
    [
        (SIZE, (1, 2, 1), "Muon"),
        (TIED, (2, 2, 1), "Muon"),
        (SIZE, (1, 2, 2), "Muon"),
        (TIED, (1, 2, 2), "AdamW"),
    ],
    ids=lambda value: ("tied" if value.tie_embeddings else "untied") if isinstance(value, LlamaSize) else str(value),
)
def test_any_mesh_has_the_weights_of_the_folder_and_returns_them(
    size: LlamaSize, degrees: tuple[int, int, int], optimizer: str, ranks: Callable[[int], RankPool], tmp_path: Path
) -> None:
    dcp.save({"model": dict(whole_model(size).named_parameters())}, checkpoint_id=tmp_path / "made", no_dist=True)
    export(tmp_path / "made", tmp_path / "hf", size, max_file_bytes=MAX_FILE_BYTES)
    ranks(degrees[0] * degrees[1] * degrees[2]).run(return_trip, tmp_path, size, degrees, optimizer)
    folders = [{path.name: path.read_bytes() for path in (tmp_path / f).iterdir()} for f in ("hf", "returned")]
    assert len(folders[0]) > 4
    assert folders[0] == folders[1]
