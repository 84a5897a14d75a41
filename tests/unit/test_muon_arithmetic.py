"""What surrounds Newton-Schulz equals torch.optim.Muon, and AdamW equals torch.optim.AdamW; arguments and groups."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import dmuon
from dmuon.hooks import find_runtime
from dmuon.newton_schulz import orthogonalize, planning, updates
from dmuon.reference import ReferenceMuon
from dmuon.unit import Unit
from tests.distributed import models


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path_factory.mktemp('store')}/store", rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


def dedicated_model(stacks: bool = False, **kwargs: Any) -> models.SmallModel:
    """`stacks`: dedicate the 3-D parameters as well; torch.optim.Muon takes 2-D ones only."""
    model = models.SmallModel()
    models.initialize(model)
    dmuon.dedicate_params(
        model,
        init_device_mesh("cpu", (1,), mesh_dim_names=("shard",)),
        lambda name, p: models.is_dedicated(name) and (stacks or p.ndim == 2),
        **kwargs,
    )
    return model


def one_backward(model: nn.Module, step: int) -> None:
    model.zero_grad()
    models.loss_of(model, *models.batch(step)).backward()


def torch_muon_iteration(monkeypatch: pytest.MonkeyPatch, iterate: Callable[[Tensor], Tensor]) -> None:
    """Gives torch.optim.Muon and ours the same orthogonalised matrix."""
    import torch.optim._muon as torch_muon

    monkeypatch.setattr(torch_muon, "_zeropower_via_newtonschulz", lambda grad, *_: iterate(grad))
    monkeypatch.setattr(updates, "orthogonalize", lambda batch, **_: torch.stack([iterate(matrix) for matrix in batch]))


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("adjust_lr_fn", ["original", "match_rms_adamw"])
def test_wrapper_around_newton_schulz_equals_torch_muon(
    monkeypatch: pytest.MonkeyPatch, nesterov: bool, adjust_lr_fn: str
) -> None:
    torch_muon_iteration(monkeypatch, lambda matrix: matrix / matrix.norm() + 0.01)
    model, plain = dedicated_model(), models.SmallModel()
    models.initialize(plain)
    named = dict(plain.named_parameters())
    matrices = [p for n, p in named.items() if models.is_dedicated(n) and p.ndim == 2]
    kwargs = {"lr": 0.03, "weight_decay": 0.2, "momentum": 0.9, "nesterov": nesterov, "adjust_lr_fn": adjust_lr_fn}
    ours = dmuon.Muon(model, adamw_lr=0.01, **kwargs)
    rest = [p for p in named.values() if all(p is not matrix for matrix in matrices)]
    theirs = [torch.optim.Muon(matrices, **kwargs), torch.optim.AdamW(rest, 0.01, (0.9, 0.95), 1e-8, 0.2)]
    for step in range(4):
        one_backward(model, step)
        one_backward(plain, step)
        for name, param in model.named_parameters():
            torch.testing.assert_close(param.grad, named[name].grad, rtol=1e-4, atol=1e-6)
            # The same gradient on both sides: what is judged here is the optimizer alone.
            named[name].grad.copy_(param.grad)
        ours.step()
        for optimizer in theirs:
            optimizer.step()
        for name, param in model.named_parameters():
            # A person logs or accumulates gradients after the step: it must not have used them as workspace.
            assert torch.equal(param.grad, named[name].grad), name
    for name, param in model.named_parameters():
        torch.testing.assert_close(param, named[name], rtol=1e-6, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}")
        for slot, value in (theirs[0].state | theirs[1].state)[named[name]].items():
            torch.testing.assert_close(ours.state[param][slot], value, rtol=1e-6, atol=1e-7)


def test_direct_keller_jordan_bfloat16_is_torch_muons_iteration() -> None:
    from torch.optim._muon import _zeropower_via_newtonschulz

    for shape in [(64, 64), (32, 128), (128, 32)]:
        matrix = torch.randn(shape, generator=torch.Generator().manual_seed(5))
        expected = _zeropower_via_newtonschulz(matrix, (3.4445, -4.7750, 2.0315), 5, 1e-7).float()
        got = orthogonalize(matrix[None], backend="direct", coefficients="keller_jordan", dtype=torch.bfloat16)[
            0
        ].float()
        assert (got - expected).norm() / expected.norm() < 5e-2


LR = 1e-2


def updates_of_both(
    split: dict[str, tuple[int, ...]] | None = None, split_reference: bool = True, **kwargs: Any
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """How far three steps on the same gradients moved each weight: ours, and ReferenceMuon's."""
    model, plain = dedicated_model(stacks=True, split=split), models.SmallModel()
    models.initialize(plain)
    ours = dmuon.Muon(model, lr=LR, **kwargs)
    sizes = {
        n: rows for n, _ in plain.named_parameters() for pattern, rows in (split or {}).items() if pattern[1:] in n
    }
    theirs = ReferenceMuon(
        plain.named_parameters(),
        models.is_dedicated,
        lr=LR,
        split=sizes if split_reference else None,
        momentum_dtype=kwargs.get("momentum_dtype") or torch.float32,
    )
    for step in range(3):
        one_backward(model, step)
        for (_, param), (_, other) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
            other.grad = param.grad.clone()
        ours.step()
        theirs.step()
    start = models.SmallModel()
    models.initialize(start)
    initial = dict(start.named_parameters())
    return tuple(
        {name: (param - initial[name]).detach() for name, param in trained.named_parameters()}
        for trained in (model, plain)
    )  # type: ignore[return-value]


def relative(actual: Tensor, expected: Tensor) -> float:
    assert expected.norm() > 0
    return float((actual - expected).norm() / expected.norm())


def test_fused_matrices_are_orthogonalised_and_scaled_one_by_one() -> None:
    """Taken as one, they would share their singular values: a quarter of the update would be another."""
    split = {"*.up.weight": (24, 30, 10)}
    ours, reference = updates_of_both(split)
    for name, update in ours.items():
        assert relative(update, reference[name]) < 1e-4, name
    ours, whole = updates_of_both(split, split_reference=False)
    for name, update in ours.items():
        assert (relative(update, whole[name]) > 0.1) == name.endswith("up.weight"), name


def test_bfloat16_momentum_is_rounded_between_steps_and_nowhere_else() -> None:
    ours, reference = updates_of_both(momentum_dtype=torch.bfloat16)
    _, exact = updates_of_both()
    for name, update in ours.items():
        # The oracle rounds at the same places; an entry here and there lies between two bfloat16 numbers.
        assert relative(update, reference[name]) < 3e-3, name
        assert relative(update, exact[name]) < 5e-2, name
    assert any(relative(update, exact[name]) > 3e-3 for name, update in ours.items())


def test_batches_never_exceed_the_bound_and_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stack larger than the bound goes through in parts; otherwise one of many experts decides the peak of memory."""
    shapes = []

    def recording(batch: Tensor, **kwargs: Any) -> Tensor:
        shapes.append(batch.shape)
        return orthogonalize(batch, **kwargs)

    monkeypatch.setattr(updates, "orthogonalize", recording)
    expected, _ = updates_of_both()
    assert max(shape.numel() for shape in shapes) > 2000
    shapes.clear()
    monkeypatch.setattr(planning, "_MAX_BATCH_NUMEL", 250)
    got, _ = updates_of_both()
    assert all(shape.numel() <= 250 or len(shape) == 1 or shape[0] == 1 for shape in shapes)
    assert torch.Size([2, 5, models.DIM]) in shapes
    for name, update in got.items():
        assert relative(update, expected[name]) < 1e-4, name


def test_equal_shapes_are_batched_and_the_batch_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = [torch.Size(s) for s in [(4, 8), (8, 4), (4, 8), (3, 4, 8), (2, 2)]]
    assert planning.batches(shapes) == [[0, 2, 3], [1], [4]]
    monkeypatch.setattr(planning, "_MAX_BATCH_NUMEL", 64)
    assert planning.batches(shapes) == [[0, 2], [3], [1], [4]]


def test_nothing_changes_where_found_inf_says_so() -> None:
    model = dedicated_model()
    optimizer = dmuon.Muon(model, lr=0.1)

    def snapshot() -> list[Tensor]:
        held = [param.detach().clone() for param in model.parameters()]
        return held + [tensor.clone() for slots in optimizer.state.values() for tensor in slots.values()]

    def step(found_inf: float) -> None:
        models.loss_of(model, *models.batch(0)).backward()
        optimizer.found_inf = torch.tensor(found_inf)
        optimizer.step()
        optimizer.zero_grad()

    step(0.0)
    before = snapshot()
    step(1.0)
    assert all(map(torch.equal, before, snapshot()))
    step(0.0)
    assert not any(torch.equal(a, b) for a, b in zip(before, snapshot(), strict=True) if a.ndim)


def test_units_are_published_in_forward_order_as_soon_as_they_are_updated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches go by shape across units: a unit waits for its last matrix, and later units for earlier ones."""
    monkeypatch.setattr(planning, "_MAX_BATCH_NUMEL", 250)
    model = dedicated_model()
    optimizer = dmuon.Muon(model, lr=0.1)
    events: list[str] = []
    update, publish = dmuon.Muon._update, Unit.publish

    def updating(self: dmuon.Muon, batch: Any, found_inf: Any) -> bool:
        events.extend(f"update {param.name}" for param in batch.params)
        return update(self, batch, found_inf)

    def publishing(self: Unit, **kwargs: Any) -> None:
        events.extend(f"publish {param.name}" for param in self.params)
        publish(self, **kwargs)

    models.loss_of(model, *models.batch(0)).backward()
    monkeypatch.setattr(dmuon.Muon, "_update", updating)
    monkeypatch.setattr(Unit, "publish", publishing)
    optimizer.step()
    published = [event.removeprefix("publish ") for event in events if event.startswith("publish")]
    dedicated = [param.name for unit in find_runtime(model).units for param in unit.params]
    assert published == dedicated
    for name in dedicated:
        last = max(index for index, event in enumerate(events) if event == f"update {name}")
        assert last < events.index(f"publish {name}")
    assert events.index(f"publish {dedicated[0]}") < max(i for i, e in enumerate(events) if e.startswith("update"))


def test_state_exists_from_construction_and_groups_have_their_rates() -> None:
    model = dedicated_model()
    optimizer = dmuon.Muon(model, lr=0.1, adamw_lr=0.2)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2]
    for name, param in model.named_parameters():
        slots = set(optimizer.state[param])
        dedicated = models.is_dedicated(name) and param.ndim == 2
        assert slots == ({"momentum_buffer"} if dedicated else {"step", "exp_avg", "exp_avg_sq"}), name


def one_cycle(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=6, base_momentum=0.5, max_momentum=0.9)


def halving(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)


@pytest.mark.parametrize("schedule_of", [one_cycle, halving])
def test_schedules_change_rate_and_momentum_as_they_do_torch_muons(
    monkeypatch: pytest.MonkeyPatch, schedule_of: Callable[[Any], Any]
) -> None:
    torch_muon_iteration(monkeypatch, lambda matrix: matrix / matrix.norm() + 0.01)
    model = dedicated_model()
    ours = dmuon.Muon(model, lr=0.1, param_groups=[{"params": "*.mix.weight", "lr": 0.1}])
    dedicated = [p for group in ours.param_groups if group["kind"] == "muon" for p in group["params"]]
    copies = [nn.Parameter(p.detach().clone()) for p in dedicated]
    theirs = torch.optim.Muon(copies, lr=0.1, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    schedules = [schedule_of(ours), schedule_of(theirs)]
    seen = set()
    for step in range(5):
        one_backward(model, step)
        for param, copy in zip(dedicated, copies, strict=True):
            copy.grad = param.grad.clone()
        ours.step()
        theirs.step()
        for schedule in schedules:
            schedule.step()
        expected = theirs.param_groups[0]
        for group in ours.param_groups:
            assert group["lr"] == expected["lr"]
            assert group["kind"] == "adamw" or group["momentum"] == expected["momentum"]
        seen.add((expected["lr"], expected["momentum"]))
    assert len(seen) == 5
    for param, copy in zip(dedicated, copies, strict=True):
        torch.testing.assert_close(param, copy, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("kwargs", "legal"),
    [
        ({"lr": -1.0}, "at least 0"),
        ({"lr": math.nan}, "finite"),
        ({"lr": math.inf}, "finite"),
        ({"lr": "0.1"}, "number"),
        ({"lr": torch.tensor(0.1)}, "number"),
        ({"weight_decay": True}, "number"),
        ({"adamw_lr": -1.0}, "at least 0"),
        ({"adamw_weight_decay": math.nan}, "finite"),
        ({"momentum": 1.0}, r"\[0, 1\)"),
        ({"momentum": -0.1}, r"\[0, 1\)"),
        ({"nesterov": 1}, "True or False"),
        ({"adjust_lr_fn": "rms"}, "match_rms_adamw or original"),
        ({"ns_backend": "svd"}, "gram or direct"),
        ({"ns_coefficients": "jordan"}, "polar_express"),
        ({"ns_coefficients": (3.4445, -4.775, 2.0315)}, "sequence"),
        ({"ns_coefficients": []}, "sequence"),
        ({"ns_steps": 0}, "1 .. 99"),
        ({"ns_steps": 2.5}, "whole number"),
        ({"ns_dtype": "int8"}, "bfloat16"),
        ({"ns_dtype": torch.float16}, "one of auto"),
        ({"momentum_dtype": torch.int32}, "torch.float32 or torch.bfloat16"),
        ({"momentum_dtype": "bfloat16"}, "torch.float32 or torch.bfloat16"),
        ({"adamw_betas": (0.9, 1.0)}, r"two numbers in \[0, 1\)"),
        ({"adamw_betas": 0.9}, "two numbers"),
        ({"adamw_betas": (0.9,)}, "two numbers"),
        ({"adamw_eps": -1e-8}, "at least 0"),
    ],
    ids=str,
)
def test_arguments_out_of_range_are_named(kwargs: dict[str, object], legal: str) -> None:
    ((name, value),) = kwargs.items()
    with pytest.raises(ValueError, match=f"^{name} = .*must be .*{legal}") as error:
        dmuon.Muon(dedicated_model(), **kwargs)  # type: ignore[arg-type]
    assert repr(value) in str(error.value)


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ([{"params": "*.mux.weight"}], ["'*.mux.weight' matches no trainable", "layers.2.mix.weight"]),
        ([{"params": ["*.mix.weight", "head"], "lr": 0.1}], ["'head' matches no"]),
        ([{"params": "*.mix.weight", "lrr": 0.1}], ["'lrr' is not an option;", "lr, momentum, nesterov", "ns_dtype"]),
        ([{"params": "embedding.weight", "momentum": 0.9}], ["'momentum' is not", "those are lr, betas, eps"]),
        ([{"params": "*.mix.weight", "eps": 1e-6}], ["'eps' is not an option of what *.mix.weight matches"]),
        ([{"params": "*.mix.weight", "lr": -1.0}], ["param_groups[0]['lr'] = -1.0: must be"]),
        ([{"params": "*", "betas": (0.9, 2)}], ["param_groups[0]['betas'] = (0.9, 2): must be"]),
        ([{"params": "*.mix.*"}, {"params": "*.0.mix.weight"}], ["param_groups[1]", "earlier groups"]),
        ([{"lr": 0.1}], ["param_groups[0]", "name patterns"]),
        ([{"params": [torch.zeros(1)]}], ["param_groups[0]", "name pattern"]),
        ([{"params": []}], ["param_groups[0]", "name pattern"]),
        ({"params": "*"}, ["must be a list of dicts"]),
    ],
    ids=str,
)
def test_mistakes_in_groups_are_named(groups: Any, words: list[str]) -> None:
    with pytest.raises(ValueError, match=r"^param_groups") as error:
        dmuon.Muon(dedicated_model(), param_groups=groups)
    for word in words:
        assert word in str(error.value)


def names_of_groups(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[tuple[str, set[str]]]:
    names = {param: name for name, param in model.named_parameters()}
    return [(group["kind"], {names[param] for param in group["params"]}) for group in optimizer.param_groups]


def test_the_first_pattern_that_matches_takes_a_parameter() -> None:
    model = dedicated_model()
    optimizer = dmuon.Muon(
        model,
        lr=0.1,
        adamw_lr=0.2,
        param_groups=[
            {"params": ["layers.0.[mu]*", "embedding.*"], "lr": 0.5},
            {"params": "layers.*.weight", "weight_decay": 0.0},
        ],
    )
    all_names = {name for name, _ in model.named_parameters()}
    first = {"layers.0.mix.weight", "layers.0.up.weight", "layers.0.up.bias", "embedding.weight"}
    second = {name for name in all_names if name.startswith("layers.") and name.endswith(".weight")} - first
    matrices = {name for name, p in model.named_parameters() if models.is_dedicated(name) and p.ndim == 2}
    assert names_of_groups(model, optimizer) == [
        ("muon", set()),
        ("adamw", all_names - first - second),
        ("muon", first & matrices),
        ("adamw", first - matrices),
        ("muon", second & matrices),
        ("adamw", second - matrices),
    ]
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2, 0.5, 0.5, 0.1, 0.2]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1] * 4 + [0.0] * 2


def test_groups_are_complete_while_modules_still_hold_their_compute_copies() -> None:
    """A forward without backward, under Z2: an optimizer made then must not miss all matrices."""
    model = dedicated_model(reshard_after_forward=False)
    models.loss_of(model, *models.batch(0))
    optimizer = dmuon.Muon(model)
    matrices = {name for name, p in model.named_parameters() if models.is_dedicated(name) and p.ndim == 2}
    assert names_of_groups(model, optimizer)[0] == ("muon", matrices)


def test_a_tied_parameter_is_found_by_each_of_its_names() -> None:
    model = models.SmallModel()
    model.output.weight = model.embedding.weight
    dmuon.dedicate_params(model, init_device_mesh("cpu", (1,), mesh_dim_names=("shard",)))
    optimizer = dmuon.Muon(model, param_groups=[{"params": "output.weight", "weight_decay": 0.0}])
    assert names_of_groups(model, optimizer)[-1] == ("adamw", {"embedding.weight"})


def test_muon_without_dedicated_parameters_says_what_to_call() -> None:
    with pytest.raises(ValueError, match="dedicate_params"):
        dmuon.Muon(models.SmallModel())
