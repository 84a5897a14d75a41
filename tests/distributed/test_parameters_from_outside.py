"""What a training script sees of dedicated parameters outside forward and backward, and the errors it can make."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import dmuon
from dmuon import torch_internals
from dmuon.hooks import find_runtime
from tests.distributed import models
from tests.distributed.pool import RankPool
from tests.distributed.test_reference_equality import build


def error_of(function: Callable[[], Any]) -> str:
    try:
        function()
    except (ValueError, RuntimeError) as error:
        return str(error)
    return ""


def backward(model: torch.nn.Module, step: int = 0) -> None:
    tokens, targets = (t.chunk(dist.get_world_size())[dist.get_rank()] for t in models.batch(step))
    models.loss_of(model, tokens, targets).backward()


def look() -> dict[str, Any]:
    model = build((1, 2), "ignored", reshard=True)
    optimizer = dmuon.Muon(model, lr=1e-2)
    before = {n: (tuple(p.shape), p.device.type) for n, p in model.named_parameters()}
    backward(model)
    with torch.no_grad():
        model.eval()
        evaluated = model(models.batch(1)[0])
        model.train()
    after = {n: (tuple(p.shape), p.device.type) for n, p in model.named_parameters()}
    runtime = find_runtime(model)
    assert runtime is not None
    kept = sum(s.compute.untyped_storage().nbytes() for u in runtime.units for s in u.sections if not s.is_owner)
    meta = next(p for p in model.parameters() if p.device.type == "meta")
    return {
        "before": before,
        "same_after": before == after,
        "kept_bytes": kept,
        "reading": error_of(lambda: meta.sum().item()),
        "groups": [len(group["params"]) for group in optimizer.param_groups],
        "grads": {n: p.grad is not None for n, p in model.named_parameters() if models.is_dedicated(n)},
        "evaluated": evaluated,
    }


def test_names_shapes_and_groups_are_the_same_on_every_rank(ranks: Callable[[int], RankPool]) -> None:
    first, second = ranks(2).run(look)
    assert first["before"].keys() == second["before"].keys()
    for name, (shape, device) in first["before"].items():
        other_shape, other_device = second["before"][name]
        assert shape == other_shape
        if models.is_dedicated(name):
            assert {device, other_device} == {"cpu", "meta"}
            owner = first if device == "cpu" else second
            assert owner["grads"][name]
            assert not (second if owner is first else first)["grads"][name]
    for seen in (first, second):
        assert seen["same_after"]
        assert seen["kept_bytes"] == 0
        assert "meta" in seen["reading"]
        assert seen["groups"] == first["groups"]
    assert torch.equal(first["evaluated"], second["evaluated"])


def test_evaluation_between_steps_sees_the_newest_weights(ranks: Callable[[int], RankPool]) -> None:
    for mesh_shape in [(1, 2), (2, 1)]:
        for before, after, again in ranks(2).run(evaluate_around_a_step, mesh_shape):
            assert not torch.equal(before, after)
            assert torch.equal(after, again)


def evaluate_around_a_step(mesh_shape: tuple[int, int]) -> list[torch.Tensor]:
    model = build(mesh_shape, "plain", reshard=False)
    optimizer = dmuon.Muon(model, lr=1e-2)
    tokens = models.batch(7)[0]

    def evaluate() -> torch.Tensor:
        with torch.no_grad():
            return model(tokens)

    before = evaluate()
    backward(model)
    optimizer.step()
    return [before, evaluate(), evaluate()]


def block_called_twice(reshard: bool) -> dict[str, torch.Tensor]:
    """The first block's output goes through it again; returns the gradients that this rank holds."""
    model = build((1, 2), "ignored", reshard)
    block = model.layers[0]
    x = torch.randn(4, 3, models.DIM, generator=torch.Generator().manual_seed(dist.get_rank()))
    block(block(x)).square().mean().backward()
    return {n: p.grad for n, p in model.named_parameters() if models.is_dedicated(n) and p.grad is not None}


def test_block_called_twice_sums_both_uses(ranks: Callable[[int], RankPool]) -> None:
    plain = models.SmallModel()
    models.initialize(plain)
    for rank in range(2):
        x = torch.randn(4, 3, models.DIM, generator=torch.Generator().manual_seed(rank))
        (plain.layers[0](plain.layers[0](x)).square().mean() / 2).backward()
    expected = dict(plain.named_parameters())
    for reshard in (True, False):
        held = [item for grads in ranks(2).run(block_called_twice, reshard) for item in grads.items()]
        assert len(held) == 10
        for name, grad in held:
            torch.testing.assert_close(grad, expected[name].grad, rtol=1e-5, atol=1e-7)


def gradients_of_dedicated(fail_first: bool) -> dict[str, torch.Tensor]:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    model = build((1, 2), "ignored", reshard=True)
    if fail_first:
        handle = model.layers[1].mix.register_full_backward_hook(fail)
        try:
            backward(model)
            raise AssertionError("the hook did not fail")
        except ZeroDivisionError:
            handle.remove()
        model.zero_grad()
    backward(model)
    return {n: p.grad for n, p in model.named_parameters() if models.is_dedicated(n) and p.grad is not None}


def test_an_exception_in_backward_leaves_nothing_behind(ranks: Callable[[int], RankPool]) -> None:
    # Dedicated parameters only: FSDP2 itself does not finish its gradients after an aborted pass.
    after_failure, undisturbed = (ranks(2).run(gradients_of_dedicated, fail) for fail in (True, False))
    for got, expected in zip(after_failure, undisturbed, strict=True):
        assert got.keys() == expected.keys()
        for name, grad in got.items():
            torch.testing.assert_close(grad, expected[name], msg=lambda text, n=name: f"{n}: {text}")


def freeze_then_step(which: str) -> dict[str, torch.Tensor]:
    """How far one step moved each dedicated weight that this rank owns, after those matching `which` were frozen."""
    model = build((1, 2), "ignored", reshard=True)
    for name, param in model.named_parameters():
        if models.is_dedicated(name) and which in name:
            param.requires_grad_(False)
    optimizer = dmuon.Muon(model, lr=1e-2)
    held = {n: p for n, p in model.named_parameters() if models.is_dedicated(n) and p.device.type != "meta"}
    before = {name: param.detach().clone() for name, param in held.items()}
    backward(model)
    optimizer.step()
    return {name: (param.detach() - before[name]).norm() for name, param in held.items()}


def test_a_matrix_frozen_after_dedication_stays_as_it_is(ranks: Callable[[int], RankPool]) -> None:
    for which in ("up.weight", "layers.1."):  # some of a unit, and all of one
        moved = {name: norm for found in ranks(2).run(freeze_then_step, which) for name, norm in found.items()}
        assert len(moved) == 30
        for name, norm in moved.items():
            assert (norm == 0) == (which in name), f"{name} moved by {norm}"


def time_outs() -> list[float]:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    torch_internals.set_group_timeout(mesh["shard"].get_group(), 77)
    model = models.SmallModel()
    dmuon.dedicate_params(model, mesh["shard"])
    return [torch_internals.group_timeout(group, "cpu").total_seconds() for group in dmuon.process_groups(model)]


def test_own_groups_have_the_time_out_of_the_meshs(ranks: Callable[[int], RankPool]) -> None:
    assert ranks(2).run(time_outs) == [[77, 77]] * 2
    assert dmuon.process_groups(models.SmallModel()) == []


def norm_with_a_plain_parameter() -> tuple[torch.Tensor, torch.Tensor]:
    """Two ranks, a parameter that neither FSDP2 nor dmuon manages, its gradient equal on both."""
    model = build((1, 2), "ignored", reshard=True)
    backward(model)
    before = dmuon.clip_grad_norm_(model, None)
    model.register_parameter("scale", torch.nn.Parameter(torch.ones(2)))
    model.scale.grad = torch.tensor([3.0, 4.0])
    return before, dmuon.clip_grad_norm_(model, None)


def test_a_replicated_gradient_counts_once(ranks: Callable[[int], RankPool]) -> None:
    for before, after in ranks(2).run(norm_with_a_plain_parameter):
        torch.testing.assert_close(after, (before.square() + 25).sqrt())


def plan_and_default_choice() -> tuple[str, list[str]]:
    model = models.SmallModel()
    plan = dmuon.dedicate_params(model, init_device_mesh("cpu", (2,), mesh_dim_names=("shard",)))
    return str(plan), [entry.name for entry in plan.entries]


def test_plan_is_the_same_everywhere_and_default_takes_the_blocks_matrices(ranks: Callable[[int], RankPool]) -> None:
    (text, names), (other_text, _) = ranks(2).run(plan_and_default_choice)
    assert text == other_text
    assert names == [f"layers.{i}.{linear}.weight" for i in range(3) for linear in models.LINEARS]
    assert "(0, 1)" in text
    assert "longest load" in text
    rows = [" ".join(row.split()) for row in text.splitlines()]
    assert [row for row in rows if row.startswith("layers.0.mix.weight dedicated 24 x 24 (0,")]
    assert "embedding.weight symmetric 37 x 24" in rows
