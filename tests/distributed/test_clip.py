"""One norm over everything, however it is held: measured right, with bits of its own choosing, and whose it scales."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

import dmuon
from dmuon import clip
from dmuon.torch_internals import local_shard
from tests.distributed import models
from tests.distributed.pool import RankPool

Ranks = Callable[[int], RankPool]


def whole_gradient(name: str, shape: torch.Size) -> Tensor:
    """Any values, of sizes far apart, as a function of the name."""
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    return torch.randn(shape, generator=generator) * torch.randn(shape, generator=generator).exp()


def exact_norm(model: nn.Module) -> float:
    squares = (whole_gradient(name, p.shape).double().square().flatten() for name, p in model.named_parameters())
    return math.sqrt(math.fsum(torch.cat(list(squares)).tolist()))


def build(shape: tuple[int, int], *, native: bool, dedicate: bool) -> nn.Module:
    """A sharded model with the same gradients on every mesh."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    model = models.SmallModel(num_blocks=1)
    if dedicate:
        dmuon.dedicate_params(
            model,
            mesh["shard"],
            lambda name, _: models.is_dedicated(name),
            replicate_mesh=mesh["replicate"] if shape[0] > 1 else None,
        )
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh if native else mesh["shard"])
    set_gradients(model)
    return model


def set_gradients(model: nn.Module) -> None:
    for name, param in model.named_parameters():
        if param.device.type == "meta":
            continue
        grad = whole_gradient(name, param.shape)
        if isinstance(param, DTensor):
            shape, offset = local_shard(param)
            for dim in range(grad.ndim):
                grad = grad.narrow(dim, offset[dim] if shape[dim] else 0, shape[dim])
            grad = DTensor.from_local(
                grad, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
            )
        param.grad = grad


def squared_norms(shape: tuple[int, int], native: bool, dedicate: bool, tell_rows: bool = False) -> list[float]:
    """Without determinism, and with it."""
    model = build(shape, native=native, dedicate=dedicate)
    found = []
    if not tell_rows:
        found.append(clip._squared_norm(model).item())
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    dmuon.set_deterministic(True, model, replicate_mesh=mesh["replicate"] if tell_rows else None)
    found.append(clip._squared_norm(model).item())
    assert dmuon.clip_grad_norm_(model, None).item() == torch.tensor(found[-1], dtype=torch.float64).sqrt().float()
    return found


@pytest.mark.parametrize("dedicate", [True, False], ids=["dedicated", "plain"])
def test_the_norm_is_exact_and_its_bits_are_one_tree_s_on_every_mesh(ranks: Ranks, dedicate: bool) -> None:
    expected = exact_norm(models.SmallModel(num_blocks=1))
    natural, fixed = set(), set()
    for shape, native in [((1, 1), False), ((1, 2), False), ((2, 1), True), ((1, 4), False), ((2, 2), True)]:
        for own, tree in ranks(shape[0] * shape[1]).run(squared_norms, shape, native, dedicate):
            assert math.sqrt(own) == pytest.approx(expected, rel=1e-12)
            assert math.sqrt(tree) == pytest.approx(expected, rel=1e-12)
            natural.add(own)
            fixed.add(tree)
    # FSDP2 over the shard axis alone: its mesh doesn't show that other rows hold the same.
    for shape in [(2, 1), (2, 2), (4, 1)]:
        for found in ranks(shape[0] * shape[1]).run(squared_norms, shape, False, dedicate, not dedicate):
            assert math.sqrt(found[0]) == pytest.approx(expected, rel=1e-12)
            fixed.add(found[-1])
    assert len(fixed) == 1
    assert len(natural) > 1


def held(model: nn.Module) -> dict[str, Tensor]:
    return {name: clip.local(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}


def scaled(policy: str, max_norm: float | None, deterministic: bool) -> tuple[float, dict[str, tuple[Tensor, Tensor]]]:
    """The norm returned; and each gradient that this rank holds, before and after."""
    model = build((2, 2), native=True, dedicate=True)
    if deterministic:
        dmuon.set_deterministic(True, model)
    before = held(model)
    norm = dmuon.clip_grad_norm_(model, max_norm, policy)
    assert norm.dtype == torch.float32
    assert norm.ndim == 0
    after = held(model)
    return norm.item(), {name: (before[name], after[name]) for name in before}


@pytest.mark.parametrize("deterministic", [False, True], ids=["native", "deterministic"])
@pytest.mark.parametrize("policy", ["all", "symmetric", "none"])
def test_a_policy_says_whose_gradients_are_scaled(ranks: Ranks, policy: str, deterministic: bool) -> None:
    expected = exact_norm(models.SmallModel(num_blocks=1))
    seen = set()
    for norm, gradients in ranks(4).run(scaled, policy, expected / 3, deterministic):
        assert norm == pytest.approx(expected, rel=1e-6)
        for name, (before, after) in gradients.items():
            is_scaled = policy == "all" or (policy == "symmetric" and not models.is_dedicated(name))
            torch.testing.assert_close(after, before / 3 if is_scaled else before, rtol=1e-5 * is_scaled, atol=0)
            seen.add(name)
    assert seen == dict(models.SmallModel(num_blocks=1).named_parameters()).keys()


def test_a_small_norm_and_none_leave_gradients_as_they_are(ranks: Ranks) -> None:
    for limit in (None, 1e9):
        for _, gradients in ranks(4).run(scaled, "all", limit, False):
            assert all(torch.equal(before, after) for before, after in gradients.values())


def with_infinity(deterministic: bool) -> tuple[float, bool]:
    """One infinite element on one rank: the norm, and whether this rank's gradients stayed."""
    model = build((1, 4), native=False, dedicate=True)
    if deterministic:
        dmuon.set_deterministic(True, model)
    if dist.get_rank() == 2:
        clip.local(model.embedding.weight.grad)[0, 0] = math.inf
    before = held(model)
    norm = dmuon.clip_grad_norm_(model, 1.0)
    return norm.item(), all(torch.equal(before[name], grad) for name, grad in held(model).items())


@pytest.mark.parametrize("deterministic", [False, True], ids=["native", "deterministic"])
def test_nothing_is_scaled_by_a_norm_that_is_not_finite(ranks: Ranks, deterministic: bool) -> None:
    assert ranks(4).run(with_infinity, deterministic) == [(math.inf, True)] * 4


def norm_of_a_model_on_half_of_the_ranks() -> str:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "shard"))
    model = models.SmallModel()
    dmuon.dedicate_params(model, mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    model(models.batch(0)[0]).sum().backward()
    try:
        dmuon.clip_grad_norm_(model, 1.0)
    except ValueError as refusal:
        return str(refusal)
    return ""


def test_a_model_on_fewer_ranks_than_the_job_has_is_refused(ranks: Ranks) -> None:
    """Each half would be counted, and the norm too large by the square root of two."""
    assert all(
        "on meshes of 2 ranks, and the job has 4" in said for said in ranks(4).run(norm_of_a_model_on_half_of_the_ranks)
    )


def test_a_policy_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="policy = 'dedicated': must be one of all, symmetric, none"):
        dmuon.clip_grad_norm_(nn.Linear(2, 2), 1.0, "dedicated")


def along_columns() -> tuple[float, str]:
    """A parameter cut along dim 1: its norm, and what determinism says to it."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("shard",))
    model = nn.Sequential(nn.Linear(8, 6, bias=False), nn.Linear(6, 8))
    fully_shard(model, mesh=mesh, shard_placement_fn=lambda param: Shard(1) if param.shape == (6, 8) else None)
    set_gradients(model)
    norm = dmuon.clip_grad_norm_(model, None).item()
    dmuon.set_deterministic(True, model)
    with pytest.raises(ValueError, match="dim 0 only") as error:
        dmuon.clip_grad_norm_(model, None)
    return norm, str(error.value)


def test_columns_are_counted_right_but_not_in_a_fixed_tree(ranks: Ranks) -> None:
    expected = exact_norm(nn.Sequential(nn.Linear(8, 6, bias=False), nn.Linear(6, 8)))
    for norm, told in ranks(4).run(along_columns):
        assert norm == pytest.approx(expected, rel=1e-6)
        assert told.startswith("0.weight is placed as ")


SHAPES = [(), (5,), (7, 1), (3, 64), (64, 3), (9, 37), (3, 5, 7), (2, 70_001)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_s_sum_depends_on_its_elements_alone(
    shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = whole_gradient("x", torch.Size(shape)).to(dtype)
    rows = clip.squares_of_rows(tensor)
    assert rows.dtype == torch.float64
    for row, values in zip(rows, tensor if shape else [tensor], strict=True):
        exact = math.fsum(value * value for value in values.double().flatten().tolist())
        assert row.item() == pytest.approx(exact, rel=1e-13)
    for num_rows in (1, 2) if shape else ():
        parts = [clip.squares_of_rows(part) for part in tensor.split(num_rows)]
        assert torch.equal(torch.cat(parts), rows)
    monkeypatch.setattr(clip, "_MAX_CHUNK_NUMEL", 100)
    assert torch.equal(clip.squares_of_rows(tensor), rows)


def test_blocks_of_columns_are_what_decides_the_bits_of_a_long_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control for the test above: another order of the same sum can be told from it."""
    tensor = whole_gradient("x", torch.Size((20, 999)))
    rows = clip.squares_of_rows(tensor)
    assert not torch.equal(tensor.double().square().sum(1), rows)
    monkeypatch.setattr(clip, "_BLOCK_COLUMNS", 100)
    assert not torch.equal(clip.squares_of_rows(tensor), rows)
