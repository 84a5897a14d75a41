"""State dicts hold logical tensors: saved on one mesh with torch.distributed.checkpoint, loaded on any other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import dmuon
from dmuon.state_dict import _named_held
from tests.distributed import models
from tests.distributed.pool import RankPool
from tests.distributed.test_reference_equality import build, whole

Held = dict[str, torch.Tensor]


def flat(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Held:
    """Every tensor that this rank holds or shares in, whole."""
    result = {name: whole(param) for name, param in _named_held(model).items()}
    for name, param in _named_held(model).items():
        for slot, value in optimizer.state[param].items():
            result[f"{name}/{slot}"] = whole(value)
    return result


def train_and_save(mesh_shape: tuple[int, int], folder: str) -> tuple[Held, torch.Tensor]:
    model = build(mesh_shape, "ignored", reshard=True)
    optimizer = dmuon.Muon(model, lr=1e-2)
    for step in range(3):
        one_step(model, optimizer, step)
    dcp.save(dmuon.get_state_dict(model, optimizer), checkpoint_id=folder)
    held = flat(model, optimizer)
    return held, one_step(model, optimizer, 3)


def one_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> torch.Tensor:
    tokens, targets = (t.chunk(dist.get_world_size())[dist.get_rank()] for t in models.batch(step))
    loss = models.loss_of(model, tokens, targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    total = loss.detach().clone()
    dist.all_reduce(total, dist.ReduceOp.AVG)
    return total


def load(mesh_shape: tuple[int, int], folder: str) -> tuple[Held, torch.Tensor, list[Any]]:
    model = build(mesh_shape, "plain", reshard=False)
    with torch.no_grad():
        for param in _named_held(model).values():
            param.zero_()
    optimizer = dmuon.Muon(model, lr=5.0)
    state = dmuon.get_state_dict(model, optimizer)
    dcp.load(state, checkpoint_id=folder)
    dmuon.set_state_dict(model, optimizer, state)
    held = flat(model, optimizer)
    return held, one_step(model, optimizer, 3), [group["lr"] for group in optimizer.param_groups]


@pytest.mark.parametrize("saved_on", [(1, 2), (2, 2)], ids=str)
@pytest.mark.parametrize("loaded_on", [(1, 1), (1, 2), (2, 1), (1, 4)], ids=str)
def test_any_mesh_loads_what_any_mesh_saved(
    ranks: Callable[[int], RankPool], tmp_path: Path, saved_on: tuple[int, int], loaded_on: tuple[int, int]
) -> None:
    pool = ranks(saved_on[0] * saved_on[1])
    saved = pool.run(train_and_save, saved_on, str(tmp_path))
    expected: Held = {}
    for held, _ in saved:
        expected |= held
    for held, loss, rates in ranks(loaded_on[0] * loaded_on[1]).run(load, loaded_on, str(tmp_path)):
        assert rates == [1e-2, 1e-2]
        torch.testing.assert_close(loss, saved[0][1], rtol=1e-5, atol=0)
        for name, tensor in held.items():
            assert torch.equal(tensor, expected[name]), name
            assert tensor.any(), name


def missing_key() -> str:
    model = build((1, 2), "ignored", reshard=True)
    optimizer = dmuon.Muon(model)
    state = dmuon.get_state_dict(model, optimizer)
    name = next(iter(state["optimizer"]["state"]))
    state["optimizer"]["state"].pop(name)
    try:
        dmuon.set_state_dict(model, optimizer, state)
    except ValueError as error:
        return str(error)
    return ""


def test_missing_state_is_named(ranks: Callable[[int], RankPool]) -> None:
    for message in ranks(2).run(missing_key):
        assert "optimizer.state." in message


def after_a_forward_without_gradients() -> tuple[set[str], set[str], torch.Tensor, torch.Tensor]:
    """FSDP2 leaves its root's weights gathered after such a forward: nothing of them may be missing or stale."""
    model = build((1, 2), "ignored", reshard=True)
    optimizer = dmuon.Muon(model, lr=1e-2)
    one_step(model, optimizer, 0)
    before = dmuon.get_state_dict(model, optimizer)
    weight = whole(before["model"]["output.weight"])
    with torch.no_grad():
        model(models.batch(1)[0])
    after = dmuon.get_state_dict(model, optimizer)
    assert before["model"].keys() == after["model"].keys()
    return (
        set(before["optimizer"]["state"]),
        set(after["optimizer"]["state"]),
        weight,
        whole(after["model"]["output.weight"]),
    )


def test_state_is_complete_after_an_evaluation(ranks: Callable[[int], RankPool]) -> None:
    for before, after, weight, weight_after in ranks(2).run(after_a_forward_without_gradients):
        assert before == after
        assert torch.equal(weight, weight_after)


def from_tensors_of_its_own() -> dict[str, float]:
    """How much each weight and state changed when a dict of changed copies was set."""
    model = build((1, 2), "ignored", reshard=True)
    optimizer = dmuon.Muon(model, lr=1e-2)
    one_step(model, optimizer, 0)
    state = dmuon.get_state_dict(model, optimizer)
    before = flat(model, optimizer)
    copies = {
        "model": {name: tensor.clone() + 1 for name, tensor in state["model"].items()},
        "optimizer": {
            "state": {
                name: {slot: tensor.clone() + 1 for slot, tensor in slots.items()}
                for name, slots in state["optimizer"]["state"].items()
            },
            "param_groups": {},
        },
    }
    dmuon.set_state_dict(model, optimizer, copies)
    after = flat(model, optimizer)
    return {name: (after[name] - before[name]).mean().item() for name in before}


def test_every_tensor_is_taken_over_from_a_dict_of_other_tensors(ranks: Callable[[int], RankPool]) -> None:
    for changes in ranks(2).run(from_tensors_of_its_own):
        for name, change in changes.items():
            assert change == pytest.approx(1, abs=1e-5), name
