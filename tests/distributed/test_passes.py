"""Several passes in one step, and passes that are not training: each step ends as in one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy

from dmuon.hooks import find_runtime
from dmuon.parameter import local
from dmuon.selection import clean_name
from tests.distributed import foreign_models as fm
from tests.distributed.foreign_models import Case
from tests.distributed.test_conditions import MLP_UNITS, Ranks, both_modes, chain, skipping, straight, using
from tests.distributed.test_foreign_models import Schedule, Side, one_backward, train_beside_plain

TRANSFORMER = Case(fm.Transformer, fm.language_loss, MLP_UNITS)
ALONE = chain(straight, is_alone=True)  # FSDP2 fails where the first forward is in inference mode, or a pass is aborted
SKIPPING = chain(skipping)
PARTLY_USED = chain(partial(using, lambda i, rank: "up" if (i, rank) in ((0, 0), (2, 1)) else "up, down"))

# Evaluation.


def evaluated(side: Side, step: int, mode: Callable[[], Any] = torch.no_grad) -> Tensor:
    side.model.eval()
    with mode():
        loss = side.loss(step + 50)
    side.model.train()
    return loss.clone()


def evaluation_between_steps(side: Side, step: int) -> list[Tensor]:
    first, loss = evaluated(side, step), side.loss(step)
    loss.backward()
    return [first, loss, evaluated(side, step), evaluated(side, step + 1, torch.inference_mode)]


def evaluation_before_backward(side: Side, step: int) -> list[Tensor]:
    loss = side.loss(step)
    seen = [evaluated(side, step), evaluated(side, step, torch.inference_mode)]
    loss.backward()
    return [loss, *seen]


def inference_first(side: Side, step: int) -> list[Tensor]:
    return [evaluated(side, step, torch.inference_mode), *one_backward(side, step)]


def forward_without_backward(side: Side, step: int) -> list[Tensor]:
    """With gradients enabled, as a script does that forgets no_grad."""
    return [side.loss(step + 50), *one_backward(side, step), side.loss(step + 60)]


# Accumulation. `loss(n)` is that of micro-batch n.


def reduced_each_time(side: Side, step: int) -> list[Tensor]:
    return [loss for micro in range(3) for loss in one_backward(side, 3 * step + micro)]


def reduced_once(side: Side, step: int) -> list[Tensor]:
    with side.no_sync():
        losses = [*one_backward(side, 3 * step), *one_backward(side, 3 * step + 1)]
    return [*losses, *one_backward(side, 3 * step + 2)]


def dropped(side: Side, step: int) -> list[Tensor]:
    """A step is refused while gradients are unreduced, and zero_grad drops them: dmuon's and FSDP2's."""
    if side.is_plain:
        return one_backward(side, step)
    before = {name: param.detach().clone() for name, param in side.model.named_parameters()}
    with side.no_sync():
        side.loss(step + 50).backward()
    with pytest.raises(RuntimeError, match="never reduced"):
        side.optimizer.step()
    for name, param in side.model.named_parameters():
        assert param.device.type == "meta" or torch.equal(local(param), local(before[name])), name
    side.optimizer.zero_grad()
    return one_backward(side, step)


# Several backward calls.


def two_losses(side: Side, step: int) -> list[Tensor]:
    """Two losses of one forward, the first of which leads to some of the blocks alone."""
    seen: list[Tensor] = []
    handle = side.model.layers[1].register_forward_hook(lambda _m, _a, output: seen.append(output))
    loss = side.loss(step)
    handle.remove()
    early = seen[0].square().mean()
    early.backward(retain_graph=True)
    loss.backward()
    return [early, loss]


def one_graph_twice(side: Side, step: int) -> list[Tensor]:
    loss = side.loss(step)
    loss.backward(retain_graph=True)
    loss.backward()
    return [loss]


def two_forwards_then_two_backwards(side: Side, step: int) -> list[Tensor]:
    losses = [side.loss(2 * step), side.loss(2 * step + 1)]
    for loss in losses if step % 2 else reversed(losses):
        loss.backward()
    return losses


def backward_of_the_sum(side: Side, step: int) -> list[Tensor]:
    losses = [side.loss(2 * step), side.loss(2 * step + 1)]
    (losses[0] + losses[1]).backward()
    return losses


def into_an_earlier_graph(side: Side, step: int) -> list[Tensor]:
    """The second backward goes through the second forward and once more through the first."""
    first = side.loss(2 * step)
    first.backward(retain_graph=True)
    second = side.loss(2 * step + 1)
    (second + 2 * first).backward()
    return [first, second]


def gradient_of_a_tensor_alone(side: Side, step: int) -> list[Tensor]:
    """torch.autograd.grad, which brings no parameter a gradient, before the backward that does."""
    seen: list[Tensor] = []
    handle = side.model.layers[0].register_forward_hook(lambda _m, _a, output: seen.append(output))
    loss = side.loss(step)
    handle.remove()
    (grad,) = torch.autograd.grad(loss, seen[0], retain_graph=True)
    loss.backward()
    return [loss, grad]


# What goes wrong, and what is frozen on the way.


def fail(*_: Any) -> None:
    raise ZeroDivisionError


def failing_first(where: str, side: Side, step: int) -> list[Tensor]:
    if not side.is_plain:
        linear = side.model.layers[1].down
        register = linear.register_forward_pre_hook if where == "forward" else linear.register_full_backward_hook
        handle = register(fail)
        with pytest.raises(ZeroDivisionError):
            side.loss(step + 50).backward()
        handle.remove()
        side.optimizer.zero_grad()
    return one_backward(side, step)


def frozen_for_a_step(side: Side, step: int) -> list[Tensor]:
    """A whole block and one matrix of another: frozen before the second step, trained again in the third."""
    for name, param in side.model.named_parameters():
        if clean_name(name).startswith("layers.1") or clean_name(name) == "layers.2.up.weight":
            param.requires_grad_(step != 1)
    return one_backward(side, step)


def frozen_after_a_look(side: Side, step: int) -> list[Tensor]:
    """The last block is unsharded then, for a backward that does not come; without resharding all blocks are."""
    looked = side.loss(step + 50)
    for name, param in side.model.named_parameters():
        if clean_name(name).startswith("layers.3") or clean_name(name) == "layers.2.up.weight":
            param.requires_grad_(step != 1)
    return [looked.detach(), *one_backward(side, step)]


SCHEDULES: dict[str, tuple[Case, Schedule]] = {
    "evaluation between steps": (TRANSFORMER, evaluation_between_steps),
    "evaluation before backward": (TRANSFORMER, evaluation_before_backward),
    "inference mode first": (ALONE, inference_first),
    "forward without backward": (SKIPPING, forward_without_backward),
    "micro-batches reduced each": (TRANSFORMER, reduced_each_time),
    "micro-batches reduced once": (TRANSFORMER, reduced_once),
    "unit unused in the last micro-batch": (SKIPPING, reduced_once),
    "micro-batches partly used": (PARTLY_USED, reduced_once),
    "no_sync dropped": (TRANSFORMER, dropped),
    "two losses": (TRANSFORMER, two_losses),
    "two losses, blocks alone": (ALONE, two_losses),
    "one graph twice": (TRANSFORMER, one_graph_twice),
    "two forwards then two backwards": (TRANSFORMER, two_forwards_then_two_backwards),
    "two forwards then two backwards, partly used": (PARTLY_USED, two_forwards_then_two_backwards),
    "two forwards of other blocks": (SKIPPING, two_forwards_then_two_backwards),
    "backward of the sum": (SKIPPING, backward_of_the_sum),
    "into an earlier graph": (PARTLY_USED, into_an_earlier_graph),
    "gradient of a tensor alone": (ALONE, gradient_of_a_tensor_alone),
    "an exception in forward": (ALONE, partial(failing_first, "forward")),
    "an exception in backward": (ALONE, partial(failing_first, "backward")),
    "frozen for a step": (chain(straight), frozen_for_a_step),
    "frozen after a look": (chain(straight), frozen_after_a_look),
}


def train_in(name: str, **options: Any) -> None:
    case, schedule = SCHEDULES[name]
    train_beside_plain(case, schedule, num_steps=3, **options)


@both_modes
@pytest.mark.parametrize("name", SCHEDULES)
def test_steps_of_any_passes(ranks: Ranks, name: str, reshard: bool) -> None:
    """Were it wrong: gradients of one pass would be lost, counted twice, reduced with another's or left for the next
    step; an evaluation would see old weights or leave some that are freed too late."""
    ranks(2).run(train_in, name, reshard=reshard)


@pytest.mark.parametrize("name", ["evaluation between steps", "micro-batches partly used", "into an earlier graph"])
def test_steps_of_any_passes_under_hsdp(ranks: Ranks, name: str) -> None:
    ranks(4).run(train_in, name, shape=(2, 2))


# Precision that dmuon is not told, but adopts from the `fully_shard` modules around the matrices.

BFLOAT16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


def all_bfloat16(_: Any) -> Any:
    return BFLOAT16


def vision_bfloat16(module: Any) -> Any:
    return BFLOAT16 if isinstance(module, fm.Mlp) and module.first == "see" else MixedPrecisionPolicy()


class MixedTowers(fm.VisionLanguageAction):
    """The vision tower computes in bfloat16, all else in float32."""

    def __init__(self) -> None:
        super().__init__("up", "down")
        self.vision = fm.Tower("blocks", "see", "tell")

    def forward(self, patches_BPC: Tensor, tokens_BS: Tensor) -> Tensor:
        seen_BPD = self.vision(self.patch_embedding(patches_BPC).bfloat16()).float()
        x_BSD = self.language(torch.cat([seen_BPD, self.embedding(tokens_BS)], dim=1))
        return self.action(self.action_head(x_BSD).mean(1))


MIXED_UNITS = {f"language.layers.{i}": fm.TOWER_UNITS[f"language.layers.{i}"] for i in range(4)}
MIXED_UNITS |= {f"vision.blocks.{i}": fm.weights(f"vision.blocks.{i}", "see", "tell") for i in range(4)}


def train_in_bfloat16(schedule: Schedule, reshard: bool, shape: tuple[int, int] = (1, 2)) -> None:
    # In the second step the last bits of masters, which differ, decide how some elements are rounded.
    train_beside_plain(
        TRANSFORMER,
        schedule,
        shape,
        reshard,
        dtype_of=lambda _: torch.bfloat16,
        policy_of=all_bfloat16,
        later_tolerance=1e-2,
    )


def train_mixed_towers(reshard: bool) -> dict[str, torch.dtype]:
    models: list[Any] = []
    train_beside_plain(
        Case(MixedTowers, fm.action_loss, MIXED_UNITS, {}, fm.towers_and_head),
        num_steps=1,
        reshard=reshard,
        wrap=models.append,
        dtype_of=lambda name: torch.bfloat16 if name.startswith("vision.blocks") else torch.float32,
        policy_of=vision_bfloat16,
    )
    runtime = find_runtime(models[0])
    assert runtime is not None
    assert all(p.master.dtype == torch.float32 for unit in runtime.units for p in unit.params)
    return {unit.name: unit.param_dtype for unit in runtime.units}


@both_modes
@pytest.mark.parametrize("schedule", [one_backward, reduced_once])
def test_policy_of_fully_shard_is_adopted(ranks: Ranks, schedule: Schedule, reshard: bool) -> None:
    """Were it wrong: forward in float32, masters or kept gradients rounded to bfloat16, or compute copies that stay
    as they were before the first step."""
    ranks(2).run(train_in_bfloat16, schedule, reshard)


def test_policy_of_fully_shard_is_adopted_under_hsdp(ranks: Ranks) -> None:
    ranks(4).run(train_in_bfloat16, one_backward, True, (2, 2))


@both_modes
def test_each_tower_has_the_policy_of_its_own(ranks: Ranks, reshard: bool) -> None:
    for dtypes in ranks(2).run(train_mixed_towers, reshard):
        assert dtypes == {name: torch.bfloat16 if name.startswith("vision") else torch.float32 for name in MIXED_UNITS}


# Meshes.


def train_on_one_mesh() -> None:
    train_beside_plain(TRANSFORMER, shape=(2, 2), pass_one_mesh=True)


def test_a_mesh_of_both_axes(ranks: Ranks) -> None:
    """Were it wrong: rows would train apart, or a matrix have other owners than with both axes given."""
    ranks(4).run(train_on_one_mesh)


def train_two_matrices(shape: tuple[int, int]) -> None:
    case = Case(partial(fm.Transformer, num_blocks=1), fm.language_loss, {"layers.0": MLP_UNITS["layers.0"]})
    train_beside_plain(case, shape=shape)


def test_more_ranks_than_matrices(ranks: Ranks) -> None:
    """Were it wrong: ranks that own nothing, or whole columns of them, would leave collectives out."""
    ranks(8).run(train_two_matrices, (2, 4))
