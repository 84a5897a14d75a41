"""Switching the fixed tree on and off, what it refuses, and when trees over different meshes are one tree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.tensor import Shard

import dmuon
from dmuon.collectives import tree_sum
from tests.distributed import models
from tests.distributed.pool import RankPool
from tests.distributed.test_reference_equality import whole

Ranks = Callable[[int], RankPool]


def random_parts(num_ranks: int) -> list[Tensor]:
    return list(torch.randn(num_ranks, 10_000, generator=torch.Generator().manual_seed(0)))


def in_rows(parts: list[Tensor], shard_degree: int) -> Tensor:
    """The tree over shard in every replicate row, then over the rows."""
    return tree_sum([tree_sum(parts[i : i + shard_degree]) for i in range(0, len(parts), shard_degree)])


@pytest.mark.parametrize(("num_ranks", "shard_degree"), [(4, 2), (6, 2), (8, 4), (12, 4), (14, 2), (6, 6), (6, 1)])
def test_trees_over_rows_of_powers_of_two_are_the_tree_over_all(num_ranks: int, shard_degree: int) -> None:
    parts = random_parts(num_ranks)
    assert torch.equal(in_rows(parts, shard_degree), tree_sum(parts))


@pytest.mark.parametrize(("num_ranks", "shard_degree"), [(6, 3), (9, 3), (12, 6)])
def test_trees_over_other_rows_are_not(num_ranks: int, shard_degree: int) -> None:
    parts = random_parts(num_ranks)
    assert not torch.equal(in_rows(parts, shard_degree), tree_sum(parts))
    torch.testing.assert_close(in_rows(parts, shard_degree), tree_sum(parts))


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Of one step on data of each rank's own."""
    tokens, targets = (t.chunk(dist.get_world_size())[dist.get_rank()] for t in models.batch(0))
    models.loss_of(model, tokens, targets).backward()
    found = {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    for param in model.parameters():
        param.grad = None
    return found


def sharded(shape: tuple[int, int], native: bool, dedicate: bool) -> tuple[nn.Module, Any]:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    model = models.SmallModel(num_blocks=1)
    models.initialize(model)
    if dedicate:
        replicate_mesh = mesh["replicate"] if shape[0] > 1 else None
        dmuon.dedicate_params(
            model, mesh["shard"], lambda name, _: models.is_dedicated(name), replicate_mesh=replicate_mesh
        )
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh if native else mesh["shard"])
    return model, mesh


def switched(shape: tuple[int, int], dedicate: bool) -> list[dict[str, Tensor]]:
    """Gradients before, while and after the tree is on."""
    model, _ = sharded(shape, shape[0] > 1, dedicate)
    before = gradients(model)
    dmuon.set_deterministic(True, model)
    dmuon.set_deterministic(True, model)
    assert dmuon.is_deterministic(model)
    assert not dmuon.is_deterministic()
    during = gradients(model)
    dmuon.set_deterministic(False, model)
    assert not dmuon.is_deterministic(model)
    after = gradients(model)
    dmuon.set_deterministic(True, model)
    return [before, during, after, gradients(model)]


def is_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    assert one.keys() == other.keys()
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("dedicate", [True, False], ids=["dedicated", "plain"])
def test_a_model_is_switched_on_and_off(ranks: Ranks, dedicate: bool) -> None:
    for before, during, after, again in ranks(4).run(switched, (1, 4), dedicate):
        assert is_equal(before, after)
        assert is_equal(during, again)
        assert not is_equal(before, during)
        for name, grad in before.items():
            torch.testing.assert_close(during[name], grad, rtol=1e-4, atol=1e-7, msg=name)


def factors(shape: tuple[int, int]) -> list[dict[str, Tensor]]:
    """With a divide factor of the script's own, before and after."""
    model, mesh = sharded(shape, False, False)
    for module in (*model.layers, model):
        module.set_gradient_divide_factor(8.0)
        module.set_force_sum_reduction_for_comms(True)
    dmuon.set_deterministic(True, model, replicate_mesh=mesh["replicate"])
    return [gradients(model)]


@pytest.mark.parametrize("shape", [(1, 4), (2, 2), (4, 1)], ids=str)
def test_a_divide_factor_set_before_is_kept(ranks: Ranks, shape: tuple[int, int]) -> None:
    for (halved,), (_, during, _, _) in zip(
        ranks(4).run(factors, shape), ranks(4).run(switched, (1, 4), False), strict=True
    ):
        assert is_equal({name: grad * 2 for name, grad in halved.items()}, during)


def refusals() -> list[str]:
    """What each mistake is told, in order."""
    told = []

    def refused(act: Callable[[], object]) -> None:
        with pytest.raises(ValueError, match=r"\w") as error:
            act()
        told.append(str(error.value))

    refused(lambda: dmuon.set_deterministic(True, nn.Linear(2, 2)))
    native, mesh = sharded((4, 1), native=True, dedicate=False)
    refused(lambda: dmuon.set_deterministic(True, native))
    assert not dmuon.is_deterministic(native)

    rows, mesh = sharded((2, 2), native=False, dedicate=False)
    refused(lambda: dmuon.set_deterministic(True, replicate_mesh=mesh["replicate"]))
    refused(lambda: dmuon.set_deterministic(True, rows, replicate_mesh=mesh))
    dmuon.set_deterministic(True, rows, replicate_mesh=mesh["replicate"])
    refused(lambda: dmuon.set_deterministic(False, rows))
    refused(lambda: dmuon.set_deterministic(True, rows))
    assert dmuon.is_deterministic(rows)

    hooked, _ = sharded((1, 4), native=False, dedicate=False)
    hooked.layers[0].set_all_reduce_hook(lambda _: None)
    refused(lambda: dmuon.set_deterministic(True, hooked))

    if not hasattr(_fsdp_common, "ShardPlacementResult"):
        return told  # a torch in which one fully_shard has one mesh
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("expert", "shard"))
    meshes = [_fsdp_common.FSDPMeshInfo(mesh[axis], shard_mesh_dim=0) for axis in ("shard", "expert")]
    experts = nn.Linear(4, 4)
    fully_shard(
        experts,
        mesh=mesh["shard"],
        shard_placement_fn=lambda param: _fsdp_common.ShardPlacementResult(Shard(0), meshes[param.ndim - 1]),
    )
    refused(lambda: dmuon.set_deterministic(True, experts))
    return told


def test_what_cannot_be_done_is_said(ranks: Ranks) -> None:
    expected = [
        "call it after fully_shard",
        "(replicate 4, shard 1) mesh, where FSDP2 sums over replicate in an order of its own: call fully_shard with "
        'mesh=mesh["shard"]',
        "pass that too",
        "replicate_mesh has 2 axes",
        "nothing else would sum the 2 replicate rows",
        "with another replicate_mesh",
        "layers.0 has an all-reduce hook of its own",
        "several meshes",
    ]
    for told in ranks(4).run(refusals):
        assert len(told) >= len(expected) - 1
        for text, part in zip(told, expected, strict=False):
            assert part in text


def forward_on_four_native_rows() -> str:
    """The process-wide switch is heard at the first forward."""
    model, _ = sharded((4, 1), native=True, dedicate=True)
    dmuon.set_deterministic()
    try:
        with pytest.raises(ValueError, match="replicate_mesh") as error:
            gradients(model)
    finally:
        dmuon.set_deterministic(False)
    return str(error.value)


def test_a_native_mesh_is_refused_at_the_first_forward(ranks: Ranks) -> None:
    for told in ranks(4).run(forward_on_four_native_rows):
        assert 'fully_shard with mesh=mesh["shard"]' in told
