"""The same bits on every mesh of equally many ranks, published late or at once, with Z2 or Z3, and after a restart.

Every rank has data of its own. What is compared is the loss, the gradient norm and every parameter, after every step.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import dmuon
from dmuon.determinism import is_deterministic, set_deterministic
from tests.distributed import models
from tests.distributed.pool import RankPool
from tests.distributed.test_reference_equality import whole

LR, NUM_STEPS, MAX_NORM = 1e-2, 10, 0.5
History = list[dict[str, Tensor]]
Ranks = Callable[[int], RankPool]

PRECISIONS: dict[str, tuple[torch.dtype | None, torch.dtype | None]] = {
    "fp32": (None, None),
    "bf16": (torch.bfloat16, torch.float32),
    "bf16 reduced too": (torch.bfloat16, torch.bfloat16),
}


def build(
    shape: tuple[int, int], optimizer: str, *, native: bool = False, precision: str = "fp32", reshard: bool = True
) -> nn.Module:
    """SmallModel on a (replicate, shard) mesh. native: FSDP2 gets both axes, not shard alone."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    replicate_mesh = mesh["replicate"] if shape[0] > 1 else None
    with torch.device("meta"):
        model = models.SmallModel(num_blocks=2)
    if optimizer == "Muon":
        dmuon.dedicate_params(
            model,
            mesh["shard"],
            lambda name, _: models.is_dedicated(name),
            replicate_mesh=replicate_mesh,
            reshard_after_forward=reshard,
        )
    options: dict[str, Any] = {
        "mesh": mesh if native else mesh["shard"],
        "mp_policy": MixedPrecisionPolicy(*PRECISIONS[precision]),
        "reshard_after_forward": reshard,
    }
    for module in (model.embedding, *model.layers, [model.norm, model.output], model):
        fully_shard(module, **options)
    dmuon.materialize(model, models.initial_rows, "cpu")
    if is_deterministic() and optimizer == "AdamW":
        set_deterministic(True, model, replicate_mesh=None if native else replicate_mesh)
    return model


def build_optimizer(model: nn.Module, name: str, *, replicate_async: bool = True) -> torch.optim.Optimizer:
    if name == "Muon":
        return dmuon.Muon(model, lr=LR, ns_dtype="float32", replicate_async=replicate_async)
    return torch.optim.AdamW(model.parameters(), lr=LR)


def steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, numbers: range, *, same_data: bool = False, num_micro: int = 1
) -> History:
    """What this rank holds after each step. num_micro: backward passes a step, of which the first is not reduced."""
    rank, world = (0 if same_data else dist.get_rank()), dist.get_world_size()
    history = []
    for number in numbers:
        parts = []
        for micro in range(num_micro):
            tokens, targets = (t.chunk(num_micro)[micro].chunk(world)[rank] for t in models.batch(number))
            if num_micro > 1:
                for module in model.modules():
                    if hasattr(module, "set_requires_gradient_sync"):
                        module.set_requires_gradient_sync(micro > 0)
            loss = models.loss_of(model, tokens, targets)
            loss.backward()
            parts.append(loss.detach().double())
        total = torch.stack(parts).sum()
        dist.all_reduce(total)
        norm = dmuon.clip_grad_norm_(model, MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        held = {name: whole(p) for name, p in dmuon.get_state_dict(model)["model"].items()}
        history.append({"loss": total, "norm": norm, **held})
    return history


def train(
    shape: tuple[int, int],
    optimizer: str = "Muon",
    *,
    deterministic: bool = True,
    replicate_async: bool = True,
    num_steps: int = NUM_STEPS,
    same_data: bool = False,
    num_micro: int = 1,
    **options: Any,
) -> History:
    set_deterministic(deterministic)
    try:
        model = build(shape, optimizer, **options)
        chosen = build_optimizer(model, optimizer, replicate_async=replicate_async)
        return steps(model, chosen, range(num_steps), same_data=same_data, num_micro=num_micro)
    finally:
        set_deterministic(False)


def joined(per_rank: list[History]) -> History:
    """Of all ranks together; ranks that hold the same tensor must hold the same bits, rows of the mesh included."""
    whole_history = []
    for at_step in zip(*per_rank, strict=True):
        joint: dict[str, Tensor] = {}
        for held in at_step:
            for name, tensor in held.items():
                assert torch.equal(joint.setdefault(name, tensor), tensor), f"ranks differ in {name}"
        whole_history.append(joint)
    return whole_history


def differences(one: History, other: History) -> list[str]:
    """Names and steps of what is not equal bit for bit."""
    found = []
    for step, (a, b) in enumerate(zip(one, other, strict=True)):
        assert a.keys() == b.keys()
        found += [f"{name}, step {step}" for name in a if not torch.equal(a[name], b[name])]
    return found


def assert_weights_moved(history: History) -> None:
    """At every step, and from the values they began with."""
    initial = {name: models.initial_rows(name, t.shape, 0, len(t)) for name, t in history[0].items() if t.ndim}
    assert initial.keys() == dict(models.SmallModel(2).named_parameters()).keys()
    for before, after in zip([initial, *history], history, strict=False):
        for name in initial:
            assert not torch.equal(before[name], after[name]), name


@pytest.fixture(scope="module")
def shard_only(ranks: Ranks) -> Callable[..., History]:
    """`shard_only("bf16")`: training on four ranks of one shard axis, under determinism."""
    made: dict[tuple[str, str], History] = {}

    def history(precision: str, optimizer: str = "Muon") -> History:
        key = (precision, optimizer)
        if key not in made:
            made[key] = joined(ranks(4).run(train, (1, 4), optimizer, precision=precision))
            assert_weights_moved(made[key])
        return made[key]

    return history


@pytest.mark.parametrize(
    ("shape", "native"), [((2, 2), True), ((2, 2), False), ((4, 1), False)], ids=["2x2 native", "2x2", "4x1"]
)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_meshes_agree_bit_for_bit(
    ranks: Ranks, shard_only: Callable[..., History], precision: str, shape: tuple[int, int], native: bool
) -> None:
    history = joined(ranks(4).run(train, shape, precision=precision, native=native))
    assert differences(history, shard_only(precision)) == []


@pytest.mark.parametrize(
    ("shape", "native"), [((2, 2), True), ((2, 2), False), ((4, 1), False)], ids=["2x2 native", "2x2", "4x1"]
)
def test_meshes_agree_where_adamw_updates_everything(
    ranks: Ranks, shard_only: Callable[..., History], shape: tuple[int, int], native: bool
) -> None:
    history = joined(ranks(4).run(train, shape, "AdamW", native=native))
    assert differences(history, shard_only("fp32", "AdamW")) == []
