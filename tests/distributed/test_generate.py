"""A sharded model continues a text as the whole model does, with the same text on every rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dmuon
from dmuon_titan.data.tokenizer import Tokenizer, train_tokenizer
from dmuon_titan.tools.generate import generate
from models.llama.initialization import Initializer
from models.llama.model import Llama
from models.llama.sizes import LlamaSize
from tests.distributed.pool import RankPool

SIZE = LlamaSize(32, 2, 2, 1, 320, None, 32, 10000.0)


def sample(tokenizer_path: str, num_shards: int) -> str:
    with torch.device("meta"):
        model = Llama(SIZE, 32)
    if num_shards > 1:
        mesh = init_device_mesh("cpu", (num_shards,), mesh_dim_names=("shard",))
        dmuon.dedicate_params(model, mesh)
        for layer in model.layers:
            fully_shard(layer, mesh=mesh, ignored_params=dmuon.dedicated_params(model))
        fully_shard(model, mesh=mesh, ignored_params=dmuon.dedicated_params(model))
    dmuon.materialize(model, Initializer(SIZE, 0), "cpu")
    return generate(model, Tokenizer(Path(tokenizer_path)), "def ", 20, seed=0, max_context=16, device="cpu")


def test_sharded_model_says_the_same(ranks: Callable[[int], RankPool], tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    train_tokenizer([f"def function_{n}(argument): return argument\n" for n in range(50)], 300, path)
    whole = sample(str(path), num_shards=1)
    assert ranks(2).run(sample, str(path), num_shards=2) == [whole, whole]
