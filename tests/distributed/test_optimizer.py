"""dmuon.Muon is an optimizer like torch's own, on every rank: groups, state dicts, closures, what is left alone."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dmuon
from dmuon.parameter import local
from dmuon.reference import ReferenceMuon
from tests.distributed import models
from tests.distributed.pool import RankPool
from tests.distributed.test_reference_equality import build, whole

LR, NUM_STEPS = 1e-2, 3
QKV_BY_NAME: dict[str, tuple[int, ...]] = {f"layers.{i}.qkv.weight": models.QKV_ROWS for i in range(3)}
Snapshot = dict[str, Tensor]


def backward(model: nn.Module, step: int) -> Tensor:
    tokens, targets = (t.chunk(dist.get_world_size())[dist.get_rank()] for t in models.batch(step))
    loss = models.loss_of(model, tokens, targets)
    loss.backward()
    return loss.detach()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterable[int] = range(NUM_STEPS)) -> None:
    for step in steps:
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()


def weights_of(model: nn.Module) -> Snapshot:
    """What this rank holds or shares in, whole."""
    return {name: whole(p) for name, p in model.named_parameters() if p.device.type != "meta"}


def held_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Snapshot:
    """This rank's part of every weight and of its state, unless it is empty."""
    held = {}
    for name, param in model.named_parameters():
        if param.device.type != "meta" and local(param).numel() > 0:
            held[name] = local(param).detach().clone()
            held |= {f"{name}/{slot}": local(value).clone() for slot, value in optimizer.state[param].items()}
    return held


def merged(per_rank: list[Snapshot]) -> Snapshot:
    return {name: tensor for held in per_rank for name, tensor in held.items()}


def assert_updates_close(got: Snapshot, expected: Snapshot, tolerance: float) -> None:
    initial = models.SmallModel()
    models.initialize(initial)
    for name, start in initial.named_parameters():
        update = expected[name] - start
        assert update.norm() > 0, f"{name} was to move"
        error = (got[name] - expected[name]).norm() / update.norm()
        assert error < tolerance, f"update of {name}: {error:.2e} of its norm"


def whole_batch(model: nn.Module, step: int) -> None:
    model.zero_grad()
    models.loss_of(model, *models.batch(step)).backward()


# Options by name

GROUPS = [
    {"params": ["*.mix.weight", "embedding.weight"], "lr": 3e-2, "weight_decay": 0.0},
    {"params": "*.experts", "momentum": 0.5, "ns_steps": 3, "adjust_lr_fn": "original"},
]


def train_in_groups() -> tuple[Snapshot, list[Any]]:
    model = build((1, 2), "ignored", reshard=True)
    optimizer = dmuon.Muon(model, lr=LR, ns_dtype="float32", param_groups=GROUPS)
    train(model, optimizer)
    names = {param: name for name, param in model.named_parameters()}
    seen = [[names[p] for p in group["params"]] for group in optimizer.param_groups]
    options = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    return weights_of(model), [seen, [list(group) for group in optimizer.param_groups], options]


def train_two_references() -> Snapshot:
    """Each group by an optimizer of its own."""
    model = models.SmallModel()
    models.initialize(model)
    named = dict(model.named_parameters())
    first = {n: p for n, p in named.items() if n.endswith("mix.weight") or n == "embedding.weight"}
    experts = {n: p for n, p in named.items() if n.endswith("experts")}
    rest = {n: p for n, p in named.items() if n not in first and n not in experts}
    experts["unused"] = nn.Parameter(torch.zeros(1))  # torch.optim.AdamW takes no empty list
    optimizers = [
        ReferenceMuon(first.items(), models.is_dedicated, lr=3e-2, weight_decay=0.0),
        ReferenceMuon(experts.items(), models.is_dedicated, lr=LR, momentum=0.5, ns_steps=3, adjust_lr_fn="original"),
        ReferenceMuon(rest.items(), models.is_dedicated, lr=LR, split=QKV_BY_NAME),
    ]
    for step in range(NUM_STEPS):
        whole_batch(model, step)
        for optimizer in optimizers:
            optimizer.step()
    return {name: param.detach() for name, param in model.named_parameters()}


def test_groups_by_name_are_the_same_on_every_rank_and_equal_optimizers_of_their_own(
    ranks: Callable[[int], RankPool],
) -> None:
    (weights, groups), (other_weights, other_groups) = ranks(2).run(train_in_groups)
    assert groups == other_groups
    names, _, options = groups
    assert [group["kind"] for group in options] == ["muon", "adamw", "muon", "adamw", "muon"]
    assert names[3] == ["embedding.weight"]
    assert [group["lr"] for group in options] == [LR, LR, 3e-2, 3e-2, LR]
    assert_updates_close(merged([weights, other_weights]), train_two_references(), 1e-3)


def empty_default_group(folder: str) -> list[Any]:
    """Patterns take every matrix: what walks over groups, or counts them, must not trip over the one left empty."""
    model = build((1, 2), "ignored", reshard=True)
    optimizer = dmuon.Muon(model, lr=LR, param_groups=[{"params": "*", "lr": 2 * LR}])
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    train(model, optimizer)
    schedule.step()
    kinds = [(group["kind"], len(group["params"]) > 0, group["lr"]) for group in optimizer.param_groups]
    dcp.save(dmuon.get_state_dict(model, optimizer), checkpoint_id=folder)
    again = build((1, 2), "ignored", reshard=True)
    other = dmuon.Muon(again, lr=5.0, param_groups=[{"params": "*", "lr": 5.0}])
    state = dmuon.get_state_dict(again, other)
    dcp.load(state, checkpoint_id=folder)
    dmuon.set_state_dict(again, other, state)
    assert [group["lr"] for group in other.param_groups] == [group["lr"] for group in optimizer.param_groups]
    before, after = held_of(model, optimizer), held_of(again, other)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    return kinds


def test_an_empty_default_group_breaks_nothing(ranks: Callable[[int], RankPool], tmp_path: Path) -> None:
    expected = [("muon", False, LR / 2), ("muon", True, LR), ("adamw", True, LR)]
    assert ranks(2).run(empty_default_group, str(tmp_path)) == [expected] * 2


# Fused matrices

SPLIT = {**models.SPLIT, "*.up.weight": (24, 30, 10), "layers.1.mix.weight": (20, 4)}


def train_fused() -> Snapshot:
    model = build((1, 2), "ignored", reshard=True, split=SPLIT)
    train(model, dmuon.Muon(model, lr=LR, ns_dtype="float32"))
    return weights_of(model)


def train_fused_reference(split: Mapping[str, Sequence[int]]) -> Snapshot:
    model = models.SmallModel()
    models.initialize(model)
    optimizer = ReferenceMuon(model.named_parameters(), models.is_dedicated, lr=LR, split=split)
    for step in range(NUM_STEPS):
        whole_batch(model, step)
        optimizer.step()
    return {name: param.detach() for name, param in model.named_parameters()}


def test_fused_matrices_equal_the_reference_that_takes_them_apart(ranks: Callable[[int], RankPool]) -> None:
    by_name = QKV_BY_NAME | {f"layers.{i}.up.weight": SPLIT["*.up.weight"] for i in range(3)}
    by_name["layers.1.mix.weight"] = SPLIT["layers.1.mix.weight"]
    weights = merged(ranks(2).run(train_fused))
    assert_updates_close(weights, train_fused_reference(by_name), 1e-3)
    together = train_fused_reference({})
    for name in by_name:
        error = (weights[name] - together[name]).norm() / together[name].norm()
        assert error > 1e-2, f"{name} was orthogonalised as one matrix"


# State dicts

MOMENTUM_DTYPES = [None, torch.bfloat16]


def torch_round_trip(dtype: torch.dtype | None) -> tuple[Snapshot, Snapshot, Snapshot, set[torch.dtype]]:
    """Held after four steps: uninterrupted, after torch's own state dict was loaded in between, and after it wasn't."""
    model = build((1, 2), "ignored", reshard=True)
    optimizer = dmuon.Muon(model, lr=LR, momentum_dtype=dtype)
    train(model, optimizer, range(2))
    saved = pickle.dumps(optimizer.state_dict())
    weights = dmuon.get_state_dict(model)["model"]
    copies = {name: tensor.clone() for name, tensor in weights.items()}
    train(model, optimizer, range(2, 4))
    outcomes = [held_of(model, optimizer)]
    dtypes: set[torch.dtype] = set()
    for is_loaded in (True, False):
        again = build((1, 2), "ignored", reshard=True)
        dmuon.set_state_dict(again, None, {"model": copies})
        other = dmuon.Muon(again, lr=LR, momentum_dtype=dtype)
        if is_loaded:
            other.load_state_dict(pickle.loads(saved))
            slots = [slot for slots in other.state.values() for slot in slots.items()]
            dtypes = {value.dtype for slot, value in slots if slot == "momentum_buffer"}
        train(again, other, range(2, 4))
        outcomes.append(held_of(again, other))
    return outcomes[0], outcomes[1], outcomes[2], dtypes


@pytest.mark.parametrize("dtype", MOMENTUM_DTYPES, ids=str)
def test_torchs_own_state_dict_restores_momentum_in_its_dtype(
    ranks: Callable[[int], RankPool], dtype: torch.dtype | None
) -> None:
    """torch.optim casts state to the dtype of the parameter when it loads: the next step would be another, or crash."""
    for uninterrupted, resumed, forgotten, dtypes in ranks(2).run(torch_round_trip, dtype):
        assert dtypes == {dtype or torch.float32}
        for name, tensor in uninterrupted.items():
            assert torch.equal(resumed[name], tensor), name
        assert any(not torch.equal(forgotten[name], tensor) for name, tensor in uninterrupted.items())


def b04_save(folder: str) -> Snapshot:
    model = build((1, 2), "ignored", reshard=True)
    model.layers[1].mix.weight.requires_grad_(False)
    optimizer = dmuon.Muon(model, lr=LR, momentum_dtype=torch.bfloat16)
    train(model, optimizer, range(5))
    dcp.save(dmuon.get_state_dict(model, optimizer), checkpoint_id=folder)
    train(model, optimizer, range(5, 10))
    return held_of(model, optimizer)


def b04_resume(folder: str) -> tuple[Snapshot, set[torch.dtype]]:
    model = build((1, 2), "ignored", reshard=True)
    model.layers[1].mix.weight.requires_grad_(False)
    optimizer = dmuon.Muon(model, lr=5.0, momentum_dtype=torch.bfloat16)
    state = dmuon.get_state_dict(model, optimizer)
    dcp.load(state, checkpoint_id=folder)
    dmuon.set_state_dict(model, optimizer, state)
    train(model, optimizer, range(5, 10))
    held = held_of(model, optimizer)
    return held, {tensor.dtype for name, tensor in held.items() if name.endswith("momentum_buffer")}


def test_b04_state_is_complete_in_a_checkpoint_and_continues_bit_for_bit(
    ranks: Callable[[int], RankPool], tmp_path: Path
) -> None:
    uninterrupted = ranks(2).run(b04_save, str(tmp_path))
    saved = dcp.FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    for name, _ in models.SmallModel().named_parameters():
        slots = ["momentum_buffer"] if models.is_dedicated(name) else ["exp_avg", "exp_avg_sq", "step"]
        for slot in slots:
            entry = saved[f"optimizer.state.{name}.{slot}"]
            assert isinstance(entry, TensorStorageMetadata)
            assert entry.properties.dtype == (torch.bfloat16 if models.is_dedicated(name) else torch.float32)
    for before, (after, dtypes) in zip(uninterrupted, ranks(2).run(b04_resume, str(tmp_path)), strict=True):
        assert dtypes == {torch.bfloat16}
        for name, tensor in before.items():
            assert torch.equal(after[name], tensor), name
            frozen = "layers.1.mix.weight" in name and name.endswith("momentum_buffer")
            assert tensor.any() != frozen, name


def only_one_matrix() -> tuple[int, int]:
    """One of the ranks owns nothing. Returns the numbers of its momentum buffers and of groups."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    model = models.SmallModel()
    models.initialize(model)
    dmuon.dedicate_params(model, mesh, lambda name, _: name == "layers.0.mix.weight")
    fully_shard(model, mesh=mesh, ignored_params=dmuon.dedicated_params(model))
    optimizer = dmuon.Muon(model, lr=LR)
    train(model, optimizer)
    stream = io.BytesIO()
    torch.save(optimizer.state_dict(), stream)
    stream.seek(0)
    state = torch.load(stream, weights_only=False)
    before = held_of(model, optimizer)
    train(model, optimizer, [7])
    optimizer.load_state_dict(state)
    after = held_of(model, optimizer)
    for name, tensor in before.items():
        # The state is back, weights are none of an optimizer's state dict.
        assert torch.equal(after[name], tensor) == ("/" in name), name
    for number, slots in state["state"].items():
        if "exp_avg" in slots:
            del state["state"][number]
            break
    state["param_groups"][0]["lr"] = 5.0
    with pytest.raises(ValueError, match=r"lacks state of 1 param.*dmuon\.get_state_dict"):
        optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == LR
    for name, tensor in held_of(model, optimizer).items():
        assert torch.equal(after[name], tensor), name
    return sum(name.endswith("momentum_buffer") for name in after), len(optimizer.param_groups)


def test_a_rank_that_owns_nothing_has_state_dicts_too(ranks: Callable[[int], RankPool]) -> None:
    assert sorted(ranks(2).run(only_one_matrix)) == [(0, 2), (1, 2)]


# What a step leaves alone

LEFT_ALONE = ("layers.1.mix.weight", "layers.1.up.bias", "layers.2.experts", "embedding.weight")


def without_gradients() -> tuple[Snapshot, Snapshot]:
    model = build((1, 2), "ignored", reshard=True)
    optimizer = dmuon.Muon(model, lr=LR)
    train(model, optimizer)
    optimizer.zero_grad()
    backward(model, NUM_STEPS)
    for name, param in model.named_parameters():
        if name in LEFT_ALONE:
            param.grad = None
    before = held_of(model, optimizer)
    optimizer.step()
    return before, held_of(model, optimizer)


def frozen_in_between() -> tuple[Snapshot, Snapshot]:
    model = build((1, 2), "ignored", reshard=True)
    optimizer = dmuon.Muon(model, lr=LR)
    train(model, optimizer)
    # Zeros as gradients would let momentum and weight decay go on.
    optimizer.zero_grad(set_to_none=False)
    for name, param in model.named_parameters():
        if name in LEFT_ALONE:
            param.requires_grad_(False)
    before = held_of(model, optimizer)
    backward(model, NUM_STEPS)
    optimizer.step()
    after = held_of(model, optimizer)
    for param in model.parameters():
        param.requires_grad_(True)
    train(model, optimizer, [NUM_STEPS + 1])
    for name, tensor in held_of(model, optimizer).items():
        assert not torch.equal(tensor, after[name]), f"{name} stayed frozen"
    return before, after


@pytest.mark.parametrize("case", [without_gradients, frozen_in_between])
def test_without_a_gradient_or_frozen_a_parameter_and_its_state_are_left_alone(
    ranks: Callable[[int], RankPool], case: Callable[[], Any]
) -> None:
    """As in torch: no weight decay, no decay of momentum, no count of steps."""
    for before, after in ranks(2).run(case):
        for name, tensor in before.items():
            assert torch.equal(after[name], tensor) == name.startswith(LEFT_ALONE), name


def frozen_before() -> Snapshot:
    """A matrix and the embedding are frozen before anything is built; how far each weight moved."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    model = models.SmallModel()
    models.initialize(model)
    frozen = ("layers.0.mix.weight", "embedding.weight")
    for name, param in model.named_parameters():
        param.requires_grad_(name not in frozen)
    dmuon.dedicate_params(model, mesh, lambda name, _: models.is_dedicated(name))
    fully_shard(model, mesh=mesh, ignored_params=dmuon.dedicated_params(model))
    optimizer = dmuon.Muon(model, lr=LR)
    in_groups = {p for group in optimizer.param_groups for p in group["params"]}
    with pytest.raises(ValueError, match=r"'embedding\.weight' matches no trainable parameter"):
        dmuon.Muon(model, param_groups=[{"params": "embedding.weight"}])
    before = weights_of(model)
    train(model, optimizer)
    assert {name for name, p in model.named_parameters() if p not in in_groups} == set(frozen)
    return {name: (tensor - before[name]).norm() for name, tensor in weights_of(model).items()}


def test_what_was_frozen_before_is_in_no_group(ranks: Callable[[int], RankPool]) -> None:
    for moved in ranks(2).run(frozen_before):
        for name, norm in moved.items():
            assert (norm == 0) == (name in ("layers.0.mix.weight", "embedding.weight")), name


# What scripts call


def step_twice(use_closure: bool) -> tuple[nn.Module, dmuon.Muon]:
    model = build((1, 2), "ignored", reshard=True)
    optimizer = dmuon.Muon(model, lr=LR)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))

    def closure() -> Tensor:
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        loss = backward(model, step=calls.count("closure"))
        calls.append("closure")
        return loss

    for _ in range(2):
        if use_closure:
            loss = optimizer.step(closure)  # type: ignore[arg-type]
            assert isinstance(loss, Tensor)
        else:
            closure()
            assert optimizer.step() is None
    each = ["before", "closure", "after"] if use_closure else ["closure", "before", "after"]
    assert calls == each * 2
    return model, optimizer


def with_and_without_closure() -> tuple[Snapshot, Snapshot]:
    def fail() -> float:
        raise ZeroDivisionError

    outcomes = []
    for use_closure in (True, False):
        model, optimizer = step_twice(use_closure)
        outcomes.append(held_of(model, optimizer))
        with pytest.raises(ZeroDivisionError):
            optimizer.step(fail)
        for name, tensor in held_of(model, optimizer).items():
            assert torch.equal(tensor, outcomes[-1][name]), f"a failed closure changed {name}"
    return outcomes[0], outcomes[1]


def test_a_closure_is_called_once_with_gradients_and_hooks_around_it(ranks: Callable[[int], RankPool]) -> None:
    for closure, explicit in ranks(2).run(with_and_without_closure):
        for name, tensor in explicit.items():
            assert torch.equal(closure[name], tensor), name


def cleared() -> Snapshot:
    model = build((1, 2), "ignored", reshard=True)
    optimizer = dmuon.Muon(model, lr=LR)
    backward(model, 0)
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert all(local(grad).any() for grad in grads.values() if local(grad).numel())
    optimizer.zero_grad(set_to_none=False)
    for name, param in model.named_parameters():
        assert param.grad is grads.get(name), name
    zeros = {name: local(grad).clone() for name, grad in grads.items()}
    optimizer.zero_grad()
    assert all(param.grad is None for param in model.parameters())
    return zeros


def test_zero_grad_clears_or_drops(ranks: Callable[[int], RankPool]) -> None:
    for zeros in ranks(2).run(cleared):
        assert zeros
        for name, grad in zeros.items():
            assert not grad.any(), name


def looked_at() -> str:
    model = build((1, 2), "ignored", reshard=True)
    optimizer = dmuon.Muon(model, lr=LR, momentum=0.9)
    with pytest.raises(RuntimeError, match=r"param_groups="):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2, 2))]})
    assert len(optimizer.param_groups) == 2
    # What torch's schedules ask for before they change it.
    assert (optimizer.defaults["lr"], optimizer.defaults["momentum"]) == (LR, 0.9)
    return repr(optimizer)


def test_a_person_sees_the_groups_and_is_told_how_to_add_one(ranks: Callable[[int], RankPool]) -> None:
    text, other_text = ranks(2).run(looked_at)
    assert text == other_text
    for word in ("Parameter Group 1", "kind: muon", "kind: adamw", "betas: (0.9, 0.95)", "ns_backend: gram"):
        assert word in text


def accumulated_then_dropped() -> tuple[Snapshot, Snapshot, str]:
    """Held after a step on batch 1: with a backward on batch 0 that zero_grad dropped before it, and without."""
    outcomes, message = [], ""
    for is_dropped in (True, False):
        model = build((1, 2), "ignored", reshard=True)
        optimizer = dmuon.Muon(model, lr=LR)
        if is_dropped:
            before = held_of(model, optimizer)
            with dmuon.no_sync(model):
                backward(model, 0)
            with pytest.raises(RuntimeError, match=r"dmuon\.no_sync were never reduced") as error:
                optimizer.step()
            message = str(error.value)
            for name, tensor in held_of(model, optimizer).items():
                assert torch.equal(tensor, before[name]), f"{name} was updated"
        optimizer.zero_grad()
        backward(model, 1)
        optimizer.step()
        outcomes.append(held_of(model, optimizer))
    return outcomes[0], outcomes[1], message


def test_gradients_of_no_sync_are_reduced_before_a_step_or_dropped(ranks: Callable[[int], RankPool]) -> None:
    for dropped, never_there, message in ranks(2).run(accumulated_then_dropped):
        assert "run the last micro-batch's backward outside" in message
        for name, tensor in never_there.items():
            assert torch.equal(dropped[name], tensor), name
