"""What surrounds Newton-Schulz equals torch.optim.Muon, and AdamW equals torch.optim.AdamW."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import dmuon
import dmuon.muon as muon_module
from dmuon.newton_schulz import orthogonalize
from tests.distributed import models


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path_factory.mktemp('store')}/store", rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


def dedicated_model() -> models.SmallModel:
    model = models.SmallModel()
    models.initialize(model)
    # torch.optim.Muon takes 2-D parameters only.
    dmuon.dedicate_params(
        model,
        init_device_mesh("cpu", (1,), mesh_dim_names=("shard",)),
        lambda name, p: models.is_dedicated(name) and p.ndim == 2,
    )
    return model


def one_backward(model: nn.Module, step: int) -> None:
    model.zero_grad()
    models.loss_of(model, *models.batch(step)).backward()


def torch_muon_iteration(monkeypatch: pytest.MonkeyPatch, iterate: Callable[[Tensor], Tensor]) -> None:
    """Gives torch.optim.Muon and ours the same orthogonalised matrix."""
    import torch.optim._muon as torch_muon

    monkeypatch.setattr(torch_muon, "_zeropower_via_newtonschulz", lambda grad, *_: iterate(grad))
    monkeypatch.setattr(
        muon_module, "orthogonalize", lambda batch, **_: torch.stack([iterate(matrix) for matrix in batch])
    )


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
        torch.testing.assert_close(param, named[name], rtol=1e-6, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}")


def test_direct_keller_jordan_bfloat16_is_torch_muons_iteration() -> None:
    from torch.optim._muon import _zeropower_via_newtonschulz

    for shape in [(64, 64), (32, 128), (128, 32)]:
        matrix = torch.randn(shape, generator=torch.Generator().manual_seed(5))
        expected = _zeropower_via_newtonschulz(matrix, (3.4445, -4.7750, 2.0315), 5, 1e-7).float()
        got = orthogonalize(matrix[None], backend="direct", coefficients="keller_jordan", dtype=torch.bfloat16)[
            0
        ].float()
        assert (got - expected).norm() / expected.norm() < 5e-2


def test_equal_shapes_are_batched_and_the_batch_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = [torch.Size(s) for s in [(4, 8), (8, 4), (4, 8), (3, 4, 8), (2, 2)]]
    assert muon_module.batches(shapes) == [[0, 2, 3], [1], [4]]
    monkeypatch.setattr(muon_module, "_MAX_BATCH_NUMEL", 64)
    assert muon_module.batches(shapes) == [[0, 2], [3], [1], [4]]


def test_state_exists_from_construction_and_groups_have_their_rates() -> None:
    model = dedicated_model()
    optimizer = dmuon.Muon(model, lr=0.1, adamw_lr=0.2)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2]
    for name, param in model.named_parameters():
        slots = set(optimizer.state[param])
        dedicated = models.is_dedicated(name) and param.ndim == 2
        assert slots == ({"momentum_buffer"} if dedicated else {"step", "exp_avg", "exp_avg_sq"}), name


def test_a_schedule_and_zero_grad_work_as_on_any_optimizer() -> None:
    model = dedicated_model()
    optimizer = dmuon.Muon(model, lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    one_backward(model, 0)
    optimizer.step()
    schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.05]
    optimizer.zero_grad()
    assert all(param.grad is None for param in model.parameters())


@pytest.mark.parametrize(
    ("kwargs", "word"),
    [
        ({"lr": -1.0}, "lr"),
        ({"momentum": 1.0}, "momentum"),
        ({"adjust_lr_fn": "rms"}, "adjust_lr_fn"),
        ({"ns_backend": "svd"}, "ns_backend"),
        ({"ns_coefficients": "jordan"}, "ns_coefficients"),
        ({"ns_steps": 0}, "ns_steps"),
        ({"ns_dtype": "int8"}, "ns_dtype"),
    ],
)
def test_arguments_out_of_range_are_named(kwargs: dict[str, object], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        dmuon.Muon(dedicated_model(), **kwargs)  # type: ignore[arg-type]


def test_muon_without_dedicated_parameters_says_what_to_call() -> None:
    with pytest.raises(ValueError, match="dedicate_params"):
        dmuon.Muon(models.SmallModel())
