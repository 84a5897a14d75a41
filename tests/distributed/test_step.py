"""A step weighs every token the same, whichever rank and micro-batch it falls into (B20)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dmuon_titan.checkpoint import TrainState
from dmuon_titan.config.schema import build
from dmuon_titan.data.loader import Batch
from dmuon_titan.errors import DataError
from dmuon_titan.loss import IGNORE_INDEX
from dmuon_titan.mesh import build_mesh
from dmuon_titan.signals import StopWatcher
from dmuon_titan.trainer import Gradients, Trainer
from models.llama.sizes import LlamaSize
from tests.distributed.pool import RankPool
from tests.distributed.test_reference_equality import whole

SIZE = LlamaSize(64, 2, 4, 2, 256, None, 16, 10000.0)
SEQ_LEN = 32


def sequences(num_valid: list[int], step: int) -> list[tuple[Tensor, Tensor]]:
    """One sequence of ids and labels for each number of valid labels; the same on every rank."""
    generator = torch.Generator().manual_seed(step)
    made = []
    for valid in num_valid:
        tokens = torch.randint(SIZE.vocab_size, (SEQ_LEN + 1,), generator=generator)
        labels = tokens[1:].clone()
        labels[valid:] = IGNORE_INDEX
        made.append((tokens[:-1], labels))
    return made


def train(
    num_valid: list[int], local_batch_size: int, optimizer: str, num_steps: int = 3
) -> tuple[list[Gradients], dict[str, Tensor]]:
    """What each step found, and the weights after the last one."""
    dp_world, dp_rank = dist.get_world_size(), dist.get_rank()
    config = build(
        {
            "optimizer.name": optimizer,
            "optimizer.lr": 1e-2,
            # AdamW makes whole steps of gradients that are all rounding, unless they are small beside eps.
            "optimizer.eps": 1e-5,
            "training.seq_len": SEQ_LEN,
            "training.local_batch_size": local_batch_size,
            "training.global_batch_size": len(num_valid),
            "training.mixed_precision_param": "float32",
            "activation_checkpoint.mode": "none",
        }
    )
    mesh = build_mesh(torch.device("cpu"), (1, dp_world, 1))
    watcher = StopWatcher(lambda status, reason: None)
    state = TrainState(
        seed=0,
        seq_len=SEQ_LEN,
        data="",
        tokenizer="",
        global_batch_size=len(num_valid),
        num_ranks=dp_world,
        num_threads=1,
    )
    trainer = Trainer(config, mesh, SIZE, state, watcher)
    watcher.close()
    found = []
    for step in range(num_steps):
        rows = sequences(num_valid, step)
        mine = [
            rows[(micro * dp_world + dp_rank) * local_batch_size :][:local_batch_size]
            for micro in range(trainer.num_micro_batches)
        ]
        batches = [
            Batch(torch.stack([i for i, _ in micro]), torch.stack([o for _, o in micro]), [], 0) for micro in mine
        ]
        _, _, gradients = trainer.forward_backward(batches)
        trainer.check(step + 1, gradients)
        trainer.optimizer.step()
        found.append(gradients)
    with torch.no_grad():
        weights = {name: whole(p) for name, p in trainer.model.named_parameters() if p.device.type != "meta"}
    return found, weights


@pytest.mark.parametrize("optimizer", ["Muon", "AdamW"])
def test_b20_micro_batches_and_ranks_do_not_change_a_step(optimizer: str, ranks: Callable[[int], RankPool]) -> None:
    ((steps, weights),) = ranks(1).run(train, [5, 31], 2, optimizer)
    assert steps[0].num_valid_tokens == 36
    for num_ranks in (1, 2):
        outcomes = ranks(num_ranks).run(train, [5, 31], 1, optimizer)
        for found, _ in outcomes:
            for step, other in zip(steps, found, strict=True):
                assert other.loss == pytest.approx(step.loss, rel=1e-6)
                assert other.norm == pytest.approx(step.norm, rel=1e-5)
                assert other.num_valid_tokens == 36
        held = {name: weight for _, part in outcomes for name, weight in part.items()}
        assert held.keys() == weights.keys()
        for name, weight in weights.items():
            # Newton-Schulz lifts what is only rounding in a gradient of 36 tokens, of rank 36 at most.
            assert (held[name] - weight).norm() <= 1e-4 * weight.norm(), name


def test_a_rank_without_a_valid_token_takes_part(ranks: Callable[[int], RankPool]) -> None:
    ((steps, _),) = ranks(1).run(train, [0, 31], 2, "Muon")
    for found, _ in ranks(2).run(train, [0, 31], 1, "Muon"):
        assert [step.loss for step in found] == pytest.approx([step.loss for step in steps], rel=1e-6)


def refusal(num_valid: list[int]) -> str:
    with pytest.raises(DataError) as error:
        train(num_valid, 1, "Muon")
    return str(error.value)


def test_a_step_without_any_valid_token_is_an_error(ranks: Callable[[int], RankPool]) -> None:
    for message in ranks(2).run(refusal, [0, 0]):
        assert "step 1" in message
