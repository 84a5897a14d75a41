"""Dedicated ownership of tensor-parallel weights: gradients, norm and weights equal one process on every mesh."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import dmuon
from dmuon.collectives import Axis, Transfer, Wait
from dmuon.hooks import find_runtime
from dmuon.parameter import local
from dmuon.reference import ReferenceMuon
from tests.distributed.pool import RankPool

DIM, HIDDEN, NUM_STEPS, MAX_NORM, LR = 16, 24, 10, 0.5, 3e-3
PLAN = {
    "query": ColwiseParallel(),
    "key": ColwiseParallel(),
    "out": RowwiseParallel(),
    "up": ColwiseParallel(),
    "down": RowwiseParallel(),
}


class Block(nn.Module):
    """Cut over rows: square, narrow and tall; over columns: square and wide; and one that stays whole."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(DIM)
        self.query = nn.Linear(DIM, DIM, bias=False)
        self.key = nn.Linear(DIM, 4, bias=False)
        self.out = nn.Linear(DIM, DIM, bias=False)
        self.up = nn.Linear(DIM, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, DIM, bias=False)
        self.whole = nn.Linear(DIM, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q, k = self.query(h), self.key(h)
        x = x + self.out(q * k.repeat_interleave(4, -1).tanh())
        return x + self.down(torch.nn.functional.silu(self.up(self.whole(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(DIM, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def initialized() -> Model:
    torch.manual_seed(0)
    return Model()


def batch(step: int) -> Tensor:
    return torch.randn(8, 4, DIM, generator=torch.Generator().manual_seed(100 + step))


def is_dedicated(name: str) -> bool:
    return name.startswith("layers.") and "norm" not in name


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def reference() -> list[dict[str, Any]]:
    model, history = initialized(), []
    optimizer = ReferenceMuon(model.named_parameters(), is_dedicated, lr=LR)
    for step in range(NUM_STEPS):
        model.zero_grad()
        model(batch(step)).square().mean().backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        grads = {name: whole(param.grad) for name, param in model.named_parameters()}
        optimizer.step()
        weights = {name: whole(param) for name, param in model.named_parameters()}
        momenta = {name: buffer.clone() for name, buffer in optimizer.momentum_buffers.items()}
        history.append({"norm": norm, "grads": grads, "weights": weights, "momenta": momenta})
    return history


def train(
    degrees: tuple[int, int, int], asynchronous: bool, delayed_rank: int | None = None, **options: Any
) -> list[dict[str, Any]]:
    """`delayed_rank` comes late to every publish that it takes part in."""
    mesh = init_device_mesh("cpu", degrees, mesh_dim_names=("replicate", "shard", "tp"))
    model = initialized()
    for layer in model.layers:
        parallelize_module(layer, mesh["tp"], PLAN)
    dmuon.dedicate_params(model, mesh["shard"], replicate_mesh=mesh["replicate"])
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["replicate", "shard"])
    fully_shard(model, mesh=mesh["replicate", "shard"])
    optimizer = dmuon.Muon(model, lr=LR, ns_dtype="float32", replicate_async=asynchronous, **options)
    if dist.get_rank() == delayed_rank:
        delay_broadcasts(find_runtime(model).axes.replicate)
    dp_world, dp_rank = degrees[0] * degrees[1], dist.get_rank() // degrees[2]
    history = []
    for step in range(NUM_STEPS):
        model(batch(step).chunk(dp_world)[dp_rank]).square().mean().backward()
        norm = dmuon.clip_grad_norm_(model, MAX_NORM)
        grads = {name: whole(param.grad) for name, param in model.named_parameters() if param.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
        weights = {name: whole(param) for name, param in model.named_parameters() if param.device.type != "meta"}
        momenta = {
            name: whole(optimizer.state[param]["momentum_buffer"])
            for name, param in model.named_parameters()
            if "momentum_buffer" in optimizer.state[param]
        }
        find_runtime(model).wait_publish()
        computed = {
            f"{param.name} of {section.owner}": param.view(section.compute).clone()
            for unit in find_runtime(model).units
            for section in unit.sections
            for param in section.params
            if section.in_column
        }
        history.append({"norm": norm, "grads": grads, "weights": weights, "momenta": momenta, "computed": computed})
    return history


def delay_broadcasts(axis: Axis) -> None:
    broadcast = axis.broadcast

    def late(transfers: Sequence[Transfer]) -> Wait:
        time.sleep(0.005)
        return broadcast(transfers)

    axis.broadcast = late  # type: ignore[method-assign]


def assert_close(actual: Tensor, expected: Tensor, what: str, tolerance: float) -> None:
    error = (actual - expected).norm() / expected.norm().clamp(min=1e-12)
    assert error < tolerance, f"{what}: relative error {error:.2e}"


MESHES = [(1, 1, 2), (1, 2, 2), (2, 1, 2), (1, 1, 4), (2, 2, 2)]


@pytest.mark.parametrize("degrees", MESHES, ids=str)
def test_a_step_equals_one_process(ranks: Callable[[int], RankPool], degrees: tuple[int, int, int]) -> None:
    pool = ranks(degrees[0] * degrees[1] * degrees[2])
    expected = reference()
    for history in pool.run(train, degrees, True):
        for step, (seen, right) in enumerate(zip(history, expected, strict=True)):
            assert_close(seen["norm"], right["norm"], f"norm of step {step}", 1e-5)
            assert seen["grads"]
            for name, grad in seen["grads"].items():
                assert_close(grad, right["grads"][name], f"gradient of {name}, step {step}", 1e-5)
            for name, weight in seen["weights"].items():
                assert_close(weight, right["weights"][name], f"weight {name}, step {step}", 1e-5)
            for name, momentum in seen["momenta"].items():
                assert_close(momentum, right["momenta"][name], f"momentum of {name}, step {step}", 1e-5)


@pytest.mark.parametrize("strategy", ["exchange", "distributed_gram", "auto"])
def test_async_is_sync_and_strategies_agree(ranks: Callable[[int], RankPool], strategy: str) -> None:
    """Late publishes, one rank later still, may change no bit; the ways to orthogonalise differ by rounding only."""
    pool = ranks(8)
    asynchronous, synchronous = (
        pool.run(train, (2, 2, 2), later, delayed_rank, tp_strategy=strategy)
        for later, delayed_rank in ((True, 3), (False, None))
    )
    exchanged = pool.run(train, (2, 2, 2), True, tp_strategy="exchange")
    moved = 0
    for rank in range(8):
        for step in range(NUM_STEPS):
            a, b, c = (history[rank][step] for history in (asynchronous, synchronous, exchanged))
            assert torch.equal(a["norm"], b["norm"])
            for name, weight in a["weights"].items():
                assert torch.equal(weight, b["weights"][name]), name
                assert_close(weight, c["weights"][name], f"{name} by {strategy} and by exchange", 1e-3)
                moved += step > 0 and not torch.equal(weight, asynchronous[rank][0]["weights"][name])
    assert moved


def kept() -> tuple[int, int]:
    """Bytes of momentum on this rank by `inspect`, and by its slices of what it owns."""
    mesh = init_device_mesh("cpu", (1, 1, 2), mesh_dim_names=("replicate", "shard", "tp"))
    model = initialized()
    for layer in model.layers:
        parallelize_module(layer, mesh["tp"], PLAN)
    dmuon.dedicate_params(model, mesh["shard"])
    optimizer = dmuon.Muon(model)
    elements = sum(local(param).numel() for param in dmuon.dedicated_params(model))
    return dmuon.inspect(model, optimizer).memory.momentum_bytes, 4 * elements


def test_momentum_is_kept_in_slices(ranks: Callable[[int], RankPool]) -> None:
    for inspected, expected in ranks(2).run(kept):
        assert inspected == expected > 0


def test_replicas_hold_the_same_bits(ranks: Callable[[int], RankPool]) -> None:
    """Rank r and rank r + 4 differ in the replicate coordinate alone."""
    histories = ranks(8).run(train, (2, 2, 2), True)
    for one, other in zip(histories[:4], histories[4:], strict=True):
        for a, b in zip(one, other, strict=True):
            assert a["computed"].keys() == b["computed"].keys()
            assert a["computed"]
            for name, copy in a["computed"].items():
                assert torch.equal(copy, b["computed"][name]), name
