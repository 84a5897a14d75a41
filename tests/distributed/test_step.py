"""A step weighs every token the same, whichever rank and micro-batch it falls into (B20)."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import dmuon
from dmuon.torch_internals import group_timeout, set_group_timeout
from dmuon_titan.checkpoint import TrainState
from dmuon_titan.config.schema import build
from dmuon_titan.data.batches import StepBatches
from dmuon_titan.data.dataset import TokenDataset
from dmuon_titan.data.loader import Batch
from dmuon_titan.errors import DataError, NonFiniteError
from dmuon_titan.loss import IGNORE_INDEX
from dmuon_titan.mesh import build_mesh
from dmuon_titan.signals import StopWatcher
from dmuon_titan.trainer import Gradients, Trainer
from models.llama.sizes import LlamaSize
from tests.debruijn import write_debruijn
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
        gradients, _ = trainer.update(step + 1, batches)
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


def small_trainer(values: dict[str, Any]) -> Trainer:
    """A trainer on the pool's ranks that has made no step yet."""
    num_ranks = dist.get_world_size()
    config = build({"training.seq_len": SEQ_LEN, "training.local_batch_size": 1, "debug.trace_batches": True, **values})
    state = TrainState(
        seed=0, seq_len=SEQ_LEN, data="", tokenizer="", global_batch_size=num_ranks, num_ranks=num_ranks, num_threads=1
    )
    watcher = StopWatcher(lambda status, reason: None)
    watcher.close()
    return Trainer(config, build_mesh(torch.device("cpu"), (1, num_ranks, 1)), SIZE, state, watcher)


def advice_for_a_loss_that_is_not_finite(folder: Path, enable: bool) -> list[str]:
    """Without a checkpoint, with one that proved sound, with a newer one that didn't, and with two sound ones."""
    trainer = small_trainer({"checkpoint.enable": enable, "checkpoint.folder": str(folder)})
    said = []
    for saved_step in (None, 0, 3, 4):
        if trainer.checkpointer is not None and saved_step is not None:
            trainer.state.step = saved_step
            trainer.checkpointer.save()
            if saved_step != 3:  # the step after it is sound
                trainer.checkpointer.proved()
        with pytest.raises(NonFiniteError) as error:
            trainer.check(5, Gradients(math.nan, 1.0, 5, False))
        said.append(str(error.value))
    return said


def test_advice_after_a_broken_step_is_true(tmp_path: Path, ranks: Callable[[int], RankPool]) -> None:
    first, second = ranks(2).run(advice_for_a_loss_that_is_not_finite, tmp_path, True)
    assert first == second
    assert "starts from the beginning, for there is no checkpoint yet" in first[0]
    assert f"continues from step 0, the checkpoint in {tmp_path}/step-0" in first[1]
    assert f"continues from step 0, the checkpoint in {tmp_path}/step-0" in first[2]
    assert "continue from an older one by --checkpoint.load_step 0" in first[3]
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-0", "step-3.not-finite", "step-4"]
    for said in ranks(2).run(advice_for_a_loss_that_is_not_finite, tmp_path, False):
        assert all("starts from the beginning, for checkpoint.enable = false" in line for line in said)


def time_outs_after_the_first_step() -> list[float]:
    trainer = small_trainer({"comm.train_timeout_seconds": 77})
    default = group_timeout(trainer.mesh.dp_group, "cpu").total_seconds()
    trainer.watcher.patience_s = 15
    try:
        trainer._end_patience()
        groups = [trainer.mesh.dp_group, trainer.mesh.shard.get_group(), *dmuon.process_groups(trainer.model)]
        assert len(groups) > 2
        return [group_timeout(group, "cpu").total_seconds() for group in groups]
    finally:
        set_group_timeout(None, default)  # the pool's


def test_all_groups_have_the_time_out_of_the_training_after_the_first_step(ranks: Callable[[int], RankPool]) -> None:
    for seconds in ranks(2).run(time_outs_after_the_first_step):
        assert set(seconds) == {77}


def epochs_of_steps(corpus: Path, dump_folder: Path) -> list[int]:
    """The epoch after each of 4 steps of 2 micro-batches."""
    trainer = small_trainer({"job.dump_folder": str(dump_folder)})
    dataset = TokenDataset(corpus, SEQ_LEN)
    batches = StepBatches(dataset, trainer.config, trainer.mesh, num_consumed=0, num_micro_batches=2)
    epochs = []
    for step in range(1, 5):
        batches.next(step)
        epochs.append(batches.epoch)
    return epochs


def test_b11_epochs_are_those_of_the_global_batch_on_every_rank(
    tmp_path: Path, ranks: Callable[[int], RankPool]
) -> None:
    """3 windows, 4 samples a step: epochs begin at samples 3, 6, 9, 12 and 15, two of them in step 4."""
    corpus = write_debruijn(tmp_path / "corpus", num_tokens=3 * SEQ_LEN + 1)
    assert ranks(2).run(epochs_of_steps, corpus, tmp_path) == [[1, 2, 3, 5]] * 2


def refusal(num_valid: list[int]) -> str:
    with pytest.raises(DataError) as error:
        train(num_valid, 1, "Muon")
    return str(error.value)


def test_a_step_without_any_valid_token_is_an_error(ranks: Callable[[int], RankPool]) -> None:
    for message in ranks(2).run(refusal, [0, 0]):
        assert "step 1" in message
