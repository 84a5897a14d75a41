"""The harness on (replicate, shard, tp) meshes trains a Llama as one process does, step by step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from dmuon.hooks import find_runtime
from dmuon.muon import MOMENTUM
from dmuon.reference import ReferenceMuon
from dmuon_titan.checkpoint import TrainState
from dmuon_titan.config.schema import build
from dmuon_titan.data.loader import Batch
from dmuon_titan.mesh import build_mesh
from dmuon_titan.signals import StopWatcher
from dmuon_titan.trainer import Trainer
from models.llama.initialization import Initializer
from models.llama.model import Llama
from models.llama.sizes import LlamaSize
from tests.distributed.pool import RankPool
from tests.distributed.test_reference_equality import assert_close, whole

SIZE = LlamaSize(48, 2, 4, 4, 64, None, 16, 10000.0)
SEQ_LEN, GLOBAL_BATCH, NUM_STEPS, LR, MAX_NORM = 16, 8, 10, 3e-3, 0.5
MESHES = [(1, 1, 2), (1, 2, 2), (2, 1, 2), (1, 1, 4), (2, 2, 1), (2, 2, 2)]


def batch(step: int, size: LlamaSize = SIZE) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(size.vocab_size, (GLOBAL_BATCH, SEQ_LEN + 1), generator=torch.Generator().manual_seed(step))
    return tokens[:, :-1], tokens[:, 1:]


def is_dedicated(name: str) -> bool:
    return name.startswith("layers.") and "norm" not in name


def reference(size: LlamaSize = SIZE) -> list[dict[str, Any]]:
    model, init, history = Llama(size, SEQ_LEN), Initializer(size, 0), []
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(init(name, param.shape, 0, param.shape[0]))
    optimizer = ReferenceMuon(model.named_parameters(), is_dedicated, lr=LR)
    for step in range(NUM_STEPS):
        inputs, labels = batch(step, size)
        model.zero_grad()
        loss = F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        weights = {name: whole(param) for name, param in model.named_parameters()}
        momenta = {name: buffer.clone() for name, buffer in optimizer.momentum_buffers.items()}
        history.append({"loss": loss.item(), "norm": norm.item(), "weights": weights, "momenta": momenta})
    return history


def train(
    degrees: tuple[int, int, int], num_steps: int = NUM_STEPS, size: LlamaSize = SIZE, **options: Any
) -> list[dict[str, Any]]:
    dp_world = degrees[0] * degrees[1]
    config = build(
        {
            "optimizer.lr": LR,
            "optimizer.ns_dtype": "float32",
            "training.max_norm": MAX_NORM,
            "training.seq_len": SEQ_LEN,
            "training.local_batch_size": GLOBAL_BATCH // dp_world,
            "training.global_batch_size": GLOBAL_BATCH,
            "training.mixed_precision_param": "float32",
            "activation_checkpoint.mode": "none",
            "parallelism.data_parallel_replicate_degree": degrees[0],
            "parallelism.data_parallel_shard_degree": degrees[1],
            "parallelism.tensor_parallel_degree": degrees[2],
            **options,
        }
    )
    mesh = build_mesh(torch.device("cpu"), degrees)
    watcher = StopWatcher(lambda status, reason: None)
    state = TrainState(
        seed=0,
        seq_len=SEQ_LEN,
        data="",
        tokenizer="",
        global_batch_size=GLOBAL_BATCH,
        num_ranks=dist.get_world_size(),
        num_threads=1,
    )
    trainer = Trainer(config, mesh, size, state, watcher)
    watcher.close()
    runtime = find_runtime(trainer.model)
    assert runtime is not None
    history = []
    for step in range(num_steps):
        inputs, labels = (tensor.chunk(dp_world)[mesh.dp_rank] for tensor in batch(step, size))
        gradients, _ = trainer.update(step + 1, [Batch(inputs, labels, [], 0)])
        runtime.wait_publish()
        held = {name: param for name, param in trainer.model.named_parameters() if param.device.type != "meta"}
        state_of = trainer.optimizer.state
        momenta = {name: whole(state_of[p][MOMENTUM]) for name, p in held.items() if MOMENTUM in state_of[p]}
        columns = [section for unit in runtime.units for section in unit.sections if section.in_column]
        history.append(
            {
                "loss": gradients.loss,
                "norm": gradients.norm,
                "weights": {name: whole(param) for name, param in held.items()},
                "momenta": momenta,
                "computed": {p.name: p.view(s.compute).clone() for s in columns for p in s.params},
            }
        )
    return history


@pytest.mark.parametrize("degrees", MESHES, ids=str)
def test_ten_steps_equal_one_process(ranks: Callable[[int], RankPool], degrees: tuple[int, int, int]) -> None:
    """A slice orthogonalised by itself, a norm counted twice or a batch read twice would show in the first step."""
    histories = ranks(degrees[0] * degrees[1] * degrees[2]).run(train, degrees)
    expected = reference()
    for history in histories:
        for step, (seen, right) in enumerate(zip(history, expected, strict=True)):
            assert seen["loss"] == pytest.approx(right["loss"], rel=1e-5), step
            assert seen["norm"] == pytest.approx(right["norm"], rel=1e-5), step
            for name, weight in seen["weights"].items():
                assert_close(weight, right["weights"][name], f"weight {name}, step {step}")
            for name, momentum in seen["momenta"].items():
                assert_close(momentum, right["momenta"][name], f"momentum of {name}, step {step}")
    num_in_row = degrees[1] * degrees[2]
    for rank in range(num_in_row, len(histories)):
        for one, other in zip(histories[rank - num_in_row], histories[rank], strict=True):
            assert one["computed"].keys() == other["computed"].keys()
            for name, copy in one["computed"].items():
                assert torch.equal(copy, other["computed"][name]), f"replicas of {name} differ"


def test_data_parallel_meshes_agree_bit_for_bit_when_asked(ranks: Callable[[int], RankPool]) -> None:
    """Two tp ranks share each matrix; how the other four are arranged may not show in any bit."""
    pool = ranks(8)
    meshes = [(2, 2, 2), (1, 4, 2), (4, 1, 2)]
    fixed = [pool.run(train, mesh, 3, **{"debug.deterministic": True}) for mesh in meshes]
    native = pool.run(train, (1, 4, 2), 3)
    first, *others = [bits(histories) for histories in fixed]
    assert all(found.keys() == first.keys() for found in others)
    assert [name for found in others for name in first if not torch.equal(found[name], first[name])] == []
    control = bits(native)
    assert any(not torch.equal(control[name], first[name]) for name in first)


def bits(histories: list[list[dict[str, Any]]]) -> dict[str, Tensor]:
    """Loss, norm and every weight of each step, whichever rank has it."""
    found: dict[str, Tensor] = {}
    for history in histories:
        for step, seen in enumerate(history):
            found[f"loss {step}"] = torch.tensor(seen["loss"], dtype=torch.float64)
            found[f"norm {step}"] = torch.tensor(seen["norm"], dtype=torch.float64)
            found |= {f"{name} {step}": weight for name, weight in seen["weights"].items()}
    return found
