"""What is sent, what is kept and what is waited for, counted where it happens."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import dmuon
from dmuon.adamw import init_adamw_state
from dmuon.collectives import Axis, Transfer, Wait, nothing
from dmuon.hooks import find_runtime
from dmuon.unit import Unit, UnitState
from tests.distributed import models
from tests.distributed.pool import RankPool
from tests.distributed.test_reference_equality import build, whole

BF16 = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


def step(model: nn.Module, optimizer: torch.optim.Optimizer, index: int) -> None:
    tokens, targets = (t.chunk(dist.get_world_size())[dist.get_rank()] for t in models.batch(index))
    models.loss_of(model, tokens, targets).backward()
    optimizer.step()
    optimizer.zero_grad()


@contextmanager
def counted(groups: list[dist.ProcessGroup]) -> Iterator[dict[str, int]]:
    """Bytes of the collectives issued on each of these groups, by (operation, group)."""
    count: dict[str, int] = {}
    originals = {name: getattr(dist, name) for name in ("broadcast", "reduce", "gather")}

    def recording(name: str) -> Callable[..., Any]:
        def issue(tensor: torch.Tensor, *args: Any, group: dist.ProcessGroup, **kwargs: Any) -> Any:
            if group in groups:
                key = f"{name} {groups.index(group)}"
                count[key] = count.get(key, 0) + tensor.nbytes
            return originals[name](tensor, *args, group=group, **kwargs)

        return issue

    for name in originals:
        setattr(dist, name, recording(name))
    try:
        yield count
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def traffic(mesh_shape: tuple[int, int], reshard: bool) -> tuple[dict[str, int], dict[str, int], Any]:
    """Bytes counted in the second step; bytes by the plan's shapes and owners; and what `inspect` says."""
    model = build(mesh_shape, "ignored", reshard, **BF16)
    optimizer = dmuon.Muon(model, lr=1e-3)
    step(model, optimizer, 0)
    axes = find_runtime(model).axes
    groups = [*axes.shard.groups, *axes.replicate.groups]
    with counted(groups) as seen:
        step(model, optimizer, 1)
        find_runtime(model).wait_publish()
    names = [f"{what} over {axis}" for axis in ("shard", "replicate") for what in ("unshard", "reduce")]
    if mesh_shape[1] == 1:
        names = names[2:]
    measured = {names[int(key.split()[1])]: count for key, count in seen.items()}

    inspection = dmuon.inspect(model, optimizer)
    expected: dict[str, int] = {}
    sections: dict[tuple[str, Any], int] = {}
    last = inspection.plan.entries[-1].unit
    for entry in inspection.plan.entries:
        numel = -(-torch.Size(entry.shape).numel() // 8) * 8
        column = entry.owner.shard == axes.shard.index
        num_unshards = 2 if reshard and entry.unit != last else 1
        if mesh_shape[1] > 1:
            expected["unshard over shard"] = expected.get("unshard over shard", 0) + 2 * numel * num_unshards
            expected["reduce over shard"] = expected.get("reduce over shard", 0) + 4 * numel
        if mesh_shape[0] > 1 and column:
            expected["unshard over replicate"] = expected.get("unshard over replicate", 0) + 2 * numel
            expected["reduce over replicate"] = expected.get("reduce over replicate", 0) + 4 * numel
        sections[entry.unit, entry.owner] = sections.get((entry.unit, entry.owner), 0) + 1
    for (_, owner), num_params in sections.items():
        flags = 4 * -(-num_params // 8) * 8
        if mesh_shape[1] > 1:
            expected["reduce over shard"] += flags
        if mesh_shape[0] > 1 and owner.shard == axes.shard.index:
            expected["reduce over replicate"] += flags
    return measured, expected, inspection.traffic


@pytest.mark.parametrize("reshard", [True, False], ids=["Z3", "Z2"])
@pytest.mark.parametrize("mesh_shape", [(1, 2), (2, 1), (2, 2)], ids=str)
def test_bytes_of_a_step_are_the_least_there_are(
    ranks: Callable[[int], RankPool], mesh_shape: tuple[int, int], reshard: bool
) -> None:
    """Each weight once a forward (in Z3 once a backward too, but for the last one), each gradient once, and along its
    owner column each gradient and each updated weight once more: anything above is sent for nothing."""
    for measured, expected, traffic_of in ranks(mesh_shape[0] * mesh_shape[1]).run(traffic, mesh_shape, reshard):
        assert measured == expected
        assert measured.get("unshard over shard", 0) == traffic_of.unshard_bytes
        assert measured.get("reduce over shard", 0) == traffic_of.reduce_bytes
        assert measured.get("unshard over replicate", 0) == traffic_of.publish_bytes
        assert measured.get("reduce over replicate", 0) == traffic_of.column_reduce_bytes


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third, self.fourth = (nn.Linear(64, 64, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.fourth(torch.tanh(self.third(self.second(self.first(x)))))


class Stack(nn.Module):
    """Sixteen equal matrices in four blocks, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def live_bytes() -> int:
    gc.collect()
    tensors = [t for t in gc.get_objects() if type(t) in (torch.Tensor, nn.Parameter) and t.device.type == "cpu"]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def kept(optimizer_name: str, mesh_shape: tuple[int, int]) -> tuple[int, int, int, int]:
    """Bytes this rank keeps between steps; elements it owns; elements of its owner column; what `inspect` says."""
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replicate", "shard"))
    before = live_bytes()
    torch.manual_seed(0)
    model = Stack()
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    if optimizer_name == "Muon":
        dmuon.dedicate_params(model, mesh)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    if optimizer_name == "Muon":
        optimizer: torch.optim.Optimizer = dmuon.Muon(model, lr=1e-3)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for param in model.parameters():
            optimizer.state[param].update(init_adamw_state(param))
    for _ in range(2):
        model(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    dmuon.get_state_dict(model)  # reshards and waits for what was published
    # FSDP2 keeps DTensors; their shards are plain tensors that gc does not list.
    shards = sum(whole_local(p).untyped_storage().nbytes() for p in model.parameters() if hasattr(p, "to_local"))
    shards += sum(
        whole_local(t).untyped_storage().nbytes()
        for state in optimizer.state.values()
        for t in state.values()
        if hasattr(t, "to_local")
    )
    total = live_bytes() - before + shards
    if optimizer_name == "AdamW":
        return total, 0, 0, 0
    runtime = find_runtime(model)
    owned = sum(s.numel for u in runtime.units for s in u.sections if s.is_owner)
    column = sum(s.numel for u in runtime.units for s in u.sections if s.in_column)
    return total, owned, column, dmuon.inspect(model, optimizer).memory.total_bytes


def whole_local(tensor: Any) -> torch.Tensor:
    return tensor.to_local()


@pytest.mark.parametrize("mesh_shape", [(1, 2), (2, 2)], ids=str)
def test_what_a_rank_keeps_is_below_adamw(ranks: Callable[[int], RankPool], mesh_shape: tuple[int, int]) -> None:
    """Masters and momentum of what it owns, a compute copy of its column; a second copy anywhere would show here."""
    pool = ranks(mesh_shape[0] * mesh_shape[1])
    with_adamw = pool.run(kept, "AdamW", mesh_shape)
    for (total, owned, column, inspected), (adamw, *_) in zip(
        pool.run(kept, "Muon", mesh_shape), with_adamw, strict=True
    ):
        assert owned * mesh_shape[0] * mesh_shape[1] == 16 * 64 * 64
        assert inspected == 8 * owned + 2 * column
        assert abs(total - inspected) < 4096, f"{total} bytes live, {inspected} by inspect"
        assert total <= adamw


def units_in_flight(reshard: bool, recompute: bool) -> tuple[int, int, int]:
    """The most units with weights, the most with gradients in reduction, and units left with weights, in two steps."""
    model = build((1, 2), "ignored", reshard, **BF16)
    runtime = find_runtime(model)
    most = [0, 0]

    def look(*_: Any) -> None:
        held = [u for u in runtime.units if any(s.compute.untyped_storage().nbytes() for s in away(u))]
        most[0] = max(most[0], len(held))
        most[1] = max(most[1], len(runtime._reductions))

    def away(unit: Unit) -> list[Any]:
        return [section for section in unit.sections if not section.in_column]

    for layer in model.layers:
        if recompute:
            forward = layer.forward
            layer.forward = lambda x, f=forward: torch.utils.checkpoint.checkpoint(f, x, use_reentrant=False)
        for module in (layer.norm, layer.mix, layer.down, layer.gate):
            module.register_forward_hook(look)
            module.register_full_backward_hook(look)
    optimizer = dmuon.Muon(model, lr=1e-3)
    for index in range(2):
        step(model, optimizer, index)
    left = sum(unit.state is not UnitState.SHARDED for unit in runtime.units)
    return most[0], most[1], left


@pytest.mark.parametrize("recompute", [False, True], ids=["plain", "recomputed"])
def test_at_most_two_units_are_in_flight(ranks: Callable[[int], RankPool], recompute: bool) -> None:
    """SmallModel has three blocks: a third one's weights in memory would be a prefetch too early or a free too late."""
    for weights, grads, left in ranks(2).run(units_in_flight, True, recompute):
        assert (weights, left) == (2, 0)
        assert 1 <= grads <= 2
    for weights, grads, left in ranks(2).run(units_in_flight, False, recompute):
        assert (weights, left) == (3, 0)
        assert 1 <= grads <= 2


class Recorder:
    """What happened in which order: (event, unit or step, whether in the training thread)."""

    def __init__(self, model: nn.Module) -> None:
        self.events: list[tuple[str, Any, bool]] = []
        self._main = threading.current_thread()
        runtime = find_runtime(model)
        self._unit_of = {
            section.compute.data_ptr(): index
            for index, unit in enumerate(runtime.units)
            for section in unit.sections
            if section.in_column
        }
        self._record_publishes(runtime.axes.replicate)
        for index, layer in enumerate(model.layers):
            layer.norm.register_forward_pre_hook(lambda *_, index=index: self("compute", index))

    def __call__(self, event: str, what: Any) -> None:
        self.events.append((event, what, threading.current_thread() is self._main))

    def _record_publishes(self, axis: Axis) -> None:
        broadcast = axis.broadcast

        def recording(transfers: Sequence[Transfer]) -> Wait:
            (unit,) = {self._unit_of[tensor.data_ptr()] for tensor, _ in transfers}
            self("publish", unit)
            wait = broadcast(transfers)

            def recorded() -> None:
                self("wait", unit)
                wait()

            return recorded

        axis.broadcast = recording  # type: ignore[method-assign]


def publish_events(mesh_shape: tuple[int, int]) -> list[tuple[str, Any, bool]]:
    model = build(mesh_shape, "ignored", True)
    optimizer = dmuon.Muon(model, lr=1e-3)
    step(model, optimizer, 0)
    find_runtime(model).wait_publish()
    record = Recorder(model)
    for index in (1, 2):
        tokens, targets = (t.chunk(dist.get_world_size())[dist.get_rank()] for t in models.batch(index))
        record("forward", index)
        models.loss_of(model, tokens, targets).backward()
        record("step", index)
        optimizer.step()
        record("stepped", index)
        optimizer.zero_grad()
    return record.events


@pytest.mark.parametrize("mesh_shape", [(2, 1), (2, 2)], ids=str)
def test_a_publish_is_waited_for_in_the_next_forward_alone(
    ranks: Callable[[int], RankPool], mesh_shape: tuple[int, int]
) -> None:
    """A wait inside step(), or before the block ahead has begun to compute, would put the transfer on the clock."""
    for events in ranks(mesh_shape[0] * mesh_shape[1]).run(publish_events, mesh_shape):
        kinds = [(event, what) for event, what, _ in events]
        inside = kinds[kinds.index(("step", 1)) : kinds.index(("stepped", 1))]
        assert {what for event, what in inside if event == "publish"} == {0, 1, 2}
        assert not [what for event, what in inside if event == "wait"]
        after = events[kinds.index(("forward", 2)) : kinds.index(("step", 2))]
        waits = [(position, what, main) for position, (event, what, main) in enumerate(after) if event == "wait"]
        assert {what for _, what, _ in waits} == {0, 1, 2}
        for position, unit, in_training_thread in waits:
            computing = ("compute", unit - 1) in [(event, what) for event, what, _ in after[:position]]
            # Beside the training thread it holds nothing up, however early it begins.
            assert unit == 0 or computing or not in_training_thread


def late(
    mesh_shape: tuple[int, int], delayed_rank: int | None, asynchronous: bool, wait: bool = True
) -> list[torch.Tensor]:
    """Losses and weights of three steps; the delayed rank comes late to every publish it takes part in.

    Without `wait` the other ranks don't wait for publishes at all.
    """
    model = build(mesh_shape, "ignored", True)
    optimizer = dmuon.Muon(model, lr=1e-3, replicate_async=asynchronous)
    axis = find_runtime(model).axes.replicate
    if dist.get_rank() == delayed_rank:
        broadcast = axis.broadcast

        def delayed(transfers: Sequence[Transfer]) -> Wait:
            time.sleep(0.01)
            return broadcast(transfers)

        axis.broadcast = delayed  # type: ignore[method-assign]
    elif not wait:
        publish = axis.broadcast
        axis.broadcast = lambda transfers: (publish(transfers), nothing)[1]  # type: ignore[method-assign]
    seen = []
    for index in range(3):
        tokens, targets = (t.chunk(dist.get_world_size())[dist.get_rank()] for t in models.batch(index))
        loss = models.loss_of(model, tokens, targets)
        loss.backward()
        seen.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return seen + [whole(p) for p in model.parameters() if p.device.type != "meta"]


@pytest.mark.parametrize("mesh_shape", [(2, 1), (2, 2)], ids=str)
def test_a_late_publish_changes_nothing_but_time(ranks: Callable[[int], RankPool], mesh_shape: tuple[int, int]) -> None:
    """A forward that did not wait would compute with the weights of the step before."""
    pool = ranks(mesh_shape[0] * mesh_shape[1])
    punctual, synchronous = pool.run(late, mesh_shape, None, True), pool.run(late, mesh_shape, None, False)
    delayed = pool.run(late, mesh_shape, 1, True)
    for rank in range(pool.world_size):
        for a, b, c in zip(punctual[rank], delayed[rank], synchronous[rank], strict=True):
            assert torch.equal(a, b)
            assert torch.equal(a, c)


def test_without_the_wait_a_late_publish_would_show(ranks: Callable[[int], RankPool]) -> None:
    pool = ranks(2)
    punctual, heedless = pool.run(late, (2, 1), None, True), pool.run(late, (2, 1), 1, True, wait=False)
    assert not torch.equal(punctual[0][2], heedless[0][2]), "the loss of the third step"
