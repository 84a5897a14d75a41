"""The same bits on every mesh of equally many ranks, published late or at once, with Z2 or Z3, and after a restart.

Every rank has data of its own. What is compared is the loss, the gradient norm and every parameter, after every step.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
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
    if dmuon.is_deterministic() and optimizer == "AdamW":
        dmuon.set_deterministic(True, model, replicate_mesh=None if native else replicate_mesh)
    return model


def build_optimizer(model: nn.Module, name: str, *, replicate_async: bool = True) -> torch.optim.Optimizer:
    if name == "Muon":
        return dmuon.Muon(model, lr=LR, ns_dtype="float32", replicate_async=replicate_async)
    return torch.optim.AdamW(model.parameters(), lr=LR)


def steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, numbers: range, *, same_data: bool = False, passes: str = "r"
) -> History:
    """What this rank holds after each step. passes: each micro-batch's backward, "r" reduced or "k" kept for later."""
    rank, world = (0 if same_data else dist.get_rank()), dist.get_world_size()
    history = []
    for number in numbers:
        total = torch.zeros((), dtype=torch.float64)
        for micro, kind in enumerate(passes):
            tokens, targets = (t.chunk(len(passes))[micro].chunk(world)[rank] for t in models.batch(number))
            loss = models.loss_of(model, tokens, targets)
            with dmuon.no_sync(model) if kind == "k" else nullcontext():
                loss.backward()
            total += loss.detach()
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
    passes: str = "r",
    **options: Any,
) -> History:
    dmuon.set_deterministic(deterministic)
    try:
        model = build(shape, optimizer, **options)
        chosen = build_optimizer(model, optimizer, replicate_async=replicate_async)
        return steps(model, chosen, range(num_steps), same_data=same_data, passes=passes)
    finally:
        dmuon.set_deterministic(False)


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


@pytest.mark.parametrize("optimizer", ["Muon", "AdamW"])
def test_native_reductions_do_not_agree(ranks: Ranks, shard_only: Callable[..., History], optimizer: str) -> None:
    """The control: what the tests above see is the tree's doing. To rounding, the tree gives what FSDP2 gives."""
    run = ranks(4).run
    four, two_by_two = (
        joined(run(train, shape, optimizer, deterministic=False, native=shape[0] > 1)) for shape in ((1, 4), (2, 2))
    )
    expected = shard_only("fp32", optimizer)
    for other in (two_by_two, expected):
        different = differences(four, other)
        assert "embedding.weight, step 0" in different
        assert any(name.startswith("loss, ") for name in different)
        assert any(name.startswith("norm, ") for name in different)
    for history in (four, two_by_two):
        for name in expected[0]:
            torch.testing.assert_close(history[0][name], expected[0][name], rtol=1e-4, atol=1e-6, msg=name)


def test_every_rank_has_data_of_its_own(ranks: Ranks, shard_only: Callable[..., History]) -> None:
    """The control: sums of equal gradients are the same in any order, and would prove nothing."""
    same = joined(ranks(4).run(train, (1, 4), same_data=True, num_steps=1))
    assert {"loss, step 0", "norm, step 0"} <= set(differences(same, shard_only("fp32")[:1]))


@pytest.mark.parametrize("optimizer", ["Muon", "AdamW"])
@pytest.mark.parametrize("passes", ["rr", "kr", "kkr"])
def test_meshes_agree_over_several_backward_passes(ranks: Ranks, optimizer: str, passes: str) -> None:
    histories = [
        joined(ranks(4).run(train, shape, optimizer, passes=passes, num_steps=3, precision="bf16"))
        for shape in ((1, 4), (2, 2), (4, 1))
    ]
    assert_weights_moved(histories[0])
    assert differences(histories[1], histories[0]) == []
    assert differences(histories[2], histories[0]) == []


def test_axes_of_size_one_agree(ranks: Ranks) -> None:
    """On one rank there is nothing to sum; on two there is one sum, which FSDP2 divides by none, one or two axes."""
    options: dict[str, Any] = {"precision": "bf16", "num_steps": 3}
    alone, native = (joined(ranks(1).run(train, (1, 1), deterministic=tree, **options)) for tree in (True, False))
    assert_weights_moved(alone)
    assert differences(alone, native) == []
    expected = joined(ranks(2).run(train, (1, 2), **options))
    assert "embedding.weight, step 0" in differences(expected, alone)
    for is_native in (False, True):
        assert differences(joined(ranks(2).run(train, (2, 1), native=is_native, **options)), expected) == []


def test_meshes_of_eight_ranks_agree(ranks: Ranks) -> None:
    """Four replicate rows of two, and two of four, native."""
    expected = joined(ranks(8).run(train, (1, 8), num_steps=2))
    assert_weights_moved(expected)
    assert differences(joined(ranks(8).run(train, (4, 2), num_steps=2)), expected) == []
    assert differences(joined(ranks(8).run(train, (2, 4), num_steps=2, native=True)), expected) == []


@pytest.mark.parametrize("deterministic", [False, True], ids=["native", "deterministic"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_publishing_late_is_publishing_at_once(ranks: Ranks, precision: str, deterministic: bool) -> None:
    late, at_once = (
        joined(ranks(4).run(train, (2, 2), precision=precision, deterministic=deterministic, native=True, **option))
        for option in ({"replicate_async": True}, {"replicate_async": False})
    )
    assert_weights_moved(late)
    assert differences(late, at_once) == []


@pytest.mark.parametrize("deterministic", [False, True], ids=["native", "deterministic"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_z2_is_z3(ranks: Ranks, precision: str, deterministic: bool) -> None:
    z3, z2 = (
        joined(ranks(4).run(train, (2, 2), precision=precision, deterministic=deterministic, native=True, **option))
        for option in ({"reshard": True}, {"reshard": False})
    )
    assert_weights_moved(z3)
    assert differences(z3, z2) == []


def train_and_save(shape: tuple[int, int], native: bool, precision: str, folder: str) -> History:
    """Saves in the middle and goes on."""
    model = build(shape, "Muon", native=native, precision=precision)
    optimizer = build_optimizer(model, "Muon")
    history = steps(model, optimizer, range(NUM_STEPS // 2))
    dcp.save(dmuon.get_state_dict(model, optimizer), checkpoint_id=folder)
    return history + steps(model, optimizer, range(NUM_STEPS // 2, NUM_STEPS))


def train_from(shape: tuple[int, int], native: bool, precision: str, folder: str) -> History:
    """Starts anew, from other weights, and loads."""
    model = build(shape, "Muon", native=native, precision=precision)
    optimizer = build_optimizer(model, "Muon")
    steps(model, optimizer, range(100, 102))
    state = dmuon.get_state_dict(model, optimizer)
    dcp.load(state, checkpoint_id=folder)
    dmuon.set_state_dict(model, optimizer, state)
    return steps(model, optimizer, range(NUM_STEPS // 2, NUM_STEPS))


def deterministically(function: Callable[..., History], *args: Any) -> History:
    dmuon.set_deterministic()
    try:
        return function(*args)
    finally:
        dmuon.set_deterministic(False)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("native", [True, False], ids=["native", "shard axis"])
def test_a_restart_is_an_uninterrupted_run(ranks: Ranks, tmp_path: Path, native: bool, precision: str) -> None:
    arguments = ((2, 2), native, precision, str(tmp_path))
    calls = (
        [(train_and_save,), (train_from,)]
        if native
        else [(deterministically, train_and_save), (deterministically, train_from)]
    )
    uninterrupted, restarted = (joined(ranks(4).run(*call, *arguments)) for call in calls)
    assert_weights_moved(uninterrupted)
    assert differences(restarted, uninterrupted[NUM_STEPS // 2 :]) == []


def test_a_restart_on_another_mesh_is_an_uninterrupted_run(
    ranks: Ranks, shard_only: Callable[..., History], tmp_path: Path
) -> None:
    ranks(4).run(deterministically, train_and_save, (1, 4), False, "fp32", str(tmp_path))
    restarted = joined(ranks(4).run(deterministically, train_from, (4, 1), False, "fp32", str(tmp_path)))
    assert differences(restarted, shard_only("fp32")[NUM_STEPS // 2 :]) == []
