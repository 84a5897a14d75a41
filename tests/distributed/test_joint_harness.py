"""Joint owners in the harness: a Llama trains as in one process, and checkpoints come back with and without them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import dmuon
from dmuon import joint_assignment
from dmuon.hooks import find_runtime
from dmuon_titan.checkpoint import Checkpointer
from models.llama.sizes import LlamaSize
from tests.distributed.pool import RankPool
from tests.distributed.test_checkpointer import checkpointer, found
from tests.distributed.test_reference_equality import assert_close, whole
from tests.distributed.test_tp_training import reference, train

# One block whose feed-forward matrices cost three times what its square ones do.
WIDE = LlamaSize(32, 1, 4, 1, 64, 3.0, 16, 10000.0)
JOINT = {f"layers.0.feed_forward.{name}.weight" for name in ("w1", "w2", "w3")}
# On matrices this small, sums would cost more than products.
free_sums = mock.patch.multiple(joint_assignment, SUM_FLOPS=0, LATENCY_FLOPS=0)


def train_with_joint_owners(degrees: tuple[int, int, int], **options: Any) -> list[dict[str, Any]]:
    with free_sums:
        return train(degrees, size=WIDE, **{"optimizer.max_joint_owners": 8, **options})


@pytest.mark.parametrize("degrees", [(1, 8, 1), (2, 4, 1)], ids=str)
def test_ten_steps_equal_one_process(ranks: Callable[[int], RankPool], degrees: tuple[int, int, int]) -> None:
    histories = ranks(8).run(train_with_joint_owners, degrees)
    expected = reference(WIDE)
    for step, right in enumerate(expected):
        holders = dict.fromkeys(right["weights"], 0)
        for history in histories:
            seen = history[step]
            assert seen["loss"] == pytest.approx(right["loss"], rel=1e-5), step
            assert seen["norm"] == pytest.approx(right["norm"], rel=1e-5), step
            for kind in ("weights", "momenta"):
                for name, tensor in seen[kind].items():
                    assert_close(tensor, right[kind][name], f"{kind}: {name}, step {step}")
            for name in seen["weights"]:
                holders[name] += 1
        assert all(holders[name] == 2 for name in JOINT)


def wide_checkpointer(folder: Path, max_joint_owners: int, **options: Any) -> Checkpointer:
    with free_sums:
        made = checkpointer(folder, size=WIDE, optimizer__max_joint_owners=max_joint_owners, **options)
    runtime = find_runtime(made.model)
    assert runtime is not None
    assert runtime.plan.assignment.num_owners.keys() == (JOINT if max_joint_owners > 1 else set())
    return made


def make_step(saver: Checkpointer) -> None:
    generator = torch.Generator().manual_seed(100 * saver.state.step + dist.get_rank())
    tokens = torch.randint(WIDE.vocab_size, (1, 32), generator=generator)
    saver.model(tokens).float().square().mean().backward()
    saver.optimizer.step()
    saver.optimizer.zero_grad()
    saver.state.step += 1


def held(saver: Checkpointer) -> dict[str, torch.Tensor]:
    """What this rank holds or has a part of, whole."""
    state = dmuon.get_state_dict(saver.model, saver.optimizer)
    tensors = {f"model.{name}": tensor for name, tensor in state["model"].items()}
    for name, slots in state["optimizer"]["state"].items():
        tensors |= {f"{name}.{slot}": tensor for slot, tensor in slots.items()}
    return {name: whole(tensor) for name, tensor in tensors.items()}


def save(folder: Path, max_joint_owners: int, async_mode: str) -> tuple[dict[str, torch.Tensor], Any]:
    """What was saved; and what the next step made of it."""
    saver = wide_checkpointer(folder, max_joint_owners, checkpoint__async_mode=async_mode)
    make_step(saver)
    saved = held(saver)
    saver.save()
    make_step(saver)
    saver.finish()
    return saved, held(saver)


def load(folder: Path, max_joint_owners: int) -> tuple[dict[str, torch.Tensor], Any]:
    loader = wide_checkpointer(folder, max_joint_owners)
    start = found(folder)
    assert start is not None
    loader.load(start)
    loaded = held(loader)
    make_step(loader)
    return loaded, held(loader)


@pytest.mark.parametrize("async_mode", ["disabled", "async_with_pinned_mem"])
@pytest.mark.parametrize(("saved_with", "loaded_with"), [(8, 8), (8, 1), (1, 8)])
def test_checkpoints_come_back(
    ranks: Callable[[int], RankPool], tmp_path: Path, saved_with: int, loaded_with: int, async_mode: str
) -> None:
    saved = ranks(8).run(save, tmp_path, saved_with, async_mode)
    loaded = ranks(8).run(load, tmp_path, loaded_with)
    for index in (0, 1):
        expected = {name: tensor for parts in saved for name, tensor in parts[index].items()}
        for parts in loaded:
            for name, tensor in parts[index].items():
                if index == 0 or saved_with == loaded_with:
                    assert torch.equal(tensor, expected[name]), name
                else:
                    torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=1e-5)
