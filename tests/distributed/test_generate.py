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
from models.llama import tp_plan
from models.llama.initialization import Initializer
from models.llama.model import Llama
from models.llama.sizes import LlamaSize
from tests.distributed.pool import RankPool

SIZE = LlamaSize(32, 2, 2, 2, 320, None, 32, 10000.0)


def sample(tokenizer_path: str, num_shards: int, tp_degree: int = 1, max_context: int = 16) -> str:
    with torch.device("meta"):
        model = Llama(SIZE, 32)
    if num_shards * tp_degree > 1:
        mesh = init_device_mesh("cpu", (num_shards, tp_degree), mesh_dim_names=("shard", "tp"))
        if tp_degree > 1:
            tp_plan.parallelize(model, mesh["tp"], loss_parallel=True)
        dmuon.dedicate_params(model, mesh["shard"])
        for layer in model.layers:
            fully_shard(layer, mesh=mesh["shard"], ignored_params=dmuon.dedicated_params(model))
        fully_shard(model, mesh=mesh["shard"], ignored_params=dmuon.dedicated_params(model))
    dmuon.materialize(model, Initializer(SIZE, 0), "cpu")
    return generate(
        model,
        Tokenizer(Path(tokenizer_path)),
        "def ",
        20,
        seed=0,
        max_context=max_context,
        device="cpu",
        multiple_of=tp_degree,
    )


def test_sharded_model_says_the_same(ranks: Callable[[int], RankPool], tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    train_tokenizer([f"def function_{n}(argument): return argument\n" for n in range(50)], 300, path)
    whole = sample(str(path), num_shards=1)
    assert ranks(2).run(sample, str(path), num_shards=2) == [whole, whole]
    assert ranks(2).run(sample, str(path), num_shards=1, tp_degree=2) == [whole, whole]


def test_a_cut_model_is_given_a_context_that_divides(ranks: Callable[[int], RankPool], tmp_path: Path) -> None:
    """21 tokens and more room than that: 22 are given to two ranks, and the text is that of 21."""
    path = tmp_path / "tokenizer.model"
    train_tokenizer([f"def function_{n}(argument): return argument\n" for n in range(50)], 300, path)
    assert (len(Tokenizer(path).encode("def ")) + 20) % 2 == 1
    whole = sample(str(path), num_shards=1, max_context=32)
    assert ranks(2).run(sample, str(path), num_shards=1, tp_degree=2, max_context=32) == [whole, whole]
