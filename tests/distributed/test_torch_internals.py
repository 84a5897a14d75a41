"""Each private name of torch that the project uses does what it is used for, on the torch that is installed."""

from __future__ import annotations

import json
import logging
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from dmuon import torch_internals
from tests.distributed.pool import RankPool


def test_in_backward_is_true_inside_backward_only() -> None:
    seen = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda _: seen.append(torch_internals.in_backward()))
    assert not torch_internals.in_backward()
    y.sum().backward()
    assert seen == [True]


def test_backward_callback_runs_once_after_all_gradients() -> None:
    order = []
    x = torch.ones(2, requires_grad=True)
    x.register_post_accumulate_grad_hook(lambda _: order.append("gradient"))
    y = x * 2

    def queue(_: torch.Tensor) -> None:
        torch_internals.queue_backward_callback(lambda: order.append("callback"))

    y.register_hook(queue)
    y.sum().backward()
    assert order == ["gradient", "callback"]


def test_foreach_operations() -> None:
    tensors, ends = [torch.ones(2), torch.zeros(3)], [torch.zeros(2), torch.ones(3)]
    torch_internals.foreach_lerp_(tensors, ends, 0.25)
    assert torch.equal(tensors[0], torch.full((2,), 0.75))
    torch_internals.foreach_mul_(tensors, torch.tensor(2.0))
    assert torch.equal(tensors[1], torch.full((3,), 0.5))
    assert [norm.item() for norm in torch_internals.foreach_norm([torch.tensor([3.0, 4.0])])] == [5.0]


def shards_match() -> bool:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
    full = torch.arange(35).view(5, 7)
    sharded = distribute_tensor(full, mesh, [Shard(0)])
    shape, offset = torch_internals.local_shard(sharded)
    return torch.equal(full[offset[0] : offset[0] + shape[0]], sharded.to_local())


def test_local_shard_is_what_dtensor_holds_uneven_and_empty_ones_too(ranks: Callable[[int], RankPool]) -> None:
    assert all(ranks(2).run(shards_match))
    assert all(ranks(4).run(shards_match))


def marked_after_plain_fully_shard() -> tuple[bool, bool, bool]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    torch_internals.mark_dedicated(model[0].weight)
    torch_internals.exclude_dedicated_from_fully_shard()
    torch_internals.exclude_dedicated_from_fully_shard()
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh, ignored_params={model[1].bias})
    return (
        isinstance(model[0].weight, DTensor),
        isinstance(model[0].bias, DTensor) and isinstance(model[1].weight, DTensor),
        isinstance(model[1].bias, DTensor),
    )


def test_plain_fully_shard_leaves_marked_parameters_alone(ranks: Callable[[int], RankPool]) -> None:
    assert ranks(2).run(marked_after_plain_fully_shard) == [(False, True, False)] * 2


def reductions_as_set() -> list[Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    a, b, c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    empty = nn.Sequential(fully_shard(nn.Linear(4, 4), mesh=mesh))
    fully_shard([a, b], mesh=mesh)
    fully_shard(c, mesh=mesh["shard"])
    fully_shard(empty, mesh=mesh)
    c.set_all_reduce_hook(print)
    c.set_gradient_divide_factor(3.0)
    c.set_force_sum_reduction_for_comms(True)
    c.set_custom_reduce_scatter("a reduce-scatter of ours")
    first, second, third = (torch_internals.gradient_reductions(module) for module in (a, b, c))
    return [
        first == second and first[0].key != third[0].key,
        (first[0].shard_degree, first[0].replicate_degree, first[0].all_reduce_hook, first[0].divide_factor),
        (third[0].shard_degree, third[0].replicate_degree, third[0].all_reduce_hook is print, third[0].divide_factor),
        (first[0].force_sum, third[0].force_sum, third[0].reduce_scatter, third[0].device_type),
        torch_internals.gradient_reductions(empty),
    ]


def test_gradient_reductions_are_those_that_the_setters_set(ranks: Callable[[int], RankPool]) -> None:
    for seen in ranks(4).run(reductions_as_set):
        assert seen == [
            True,
            (2, 2, None, None),
            (2, 1, True, 3.0),
            (False, True, "a reduce-scatter of ours", "cpu"),
            [],
        ]


def meet() -> list[float]:
    """Sums of ones over groups of members, of which ranks have made different numbers, and over groups of all."""
    timeout, sums = timedelta(seconds=60), []

    def meet_in(group: dist.ProcessGroup | None) -> None:
        seen = torch.ones(1)
        dist.all_reduce(seen, group=group)
        sums.append(seen.item())

    dist.new_group([0, 1], timeout=timeout)  # of which ranks 2 and 3 are no part, as in many a script
    for members in ([0, 1, 2, 3], [0, 1], [0, 1], [1, 2], [0, 1, 2, 3]):
        if dist.get_rank() in members:
            meet_in(torch_internals.new_group_of_members(members, timeout))
        meet_in(dist.new_group(timeout=timeout))
    return sums


def test_groups_of_members_form_whatever_groups_there_are(ranks: Callable[[int], RankPool]) -> None:
    """Ranks would wait for each other: to torch 2.13 in those of members, from 2.14 on in those of all as well."""
    assert ranks(4).run(meet) == [
        [4, 4, 2, 4, 2, 4, 4, 4, 4],
        [4, 4, 2, 4, 2, 4, 2, 4, 4, 4],
        [4, 4, 4, 4, 2, 4, 4, 4],
        [4, 4, 4, 4, 4, 4, 4],
    ]


def wait_for_nobody(timeout_s: float) -> float:
    """Seconds until a collective that the other rank stays away from fails."""
    group = dist.new_group()
    torch_internals.set_group_timeout(group, timeout_s)
    begin_s = time.monotonic()
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError):
            dist.all_reduce(torch.zeros(1), group=group)
    return time.monotonic() - begin_s


def test_a_stuck_collective_ends_after_the_timeout_that_was_set() -> None:
    pool = RankPool(2)
    try:
        waited_s, _ = pool.run(wait_for_nobody, 0.5)
    finally:
        pool.stop()
    assert waited_s < 60  # the group's own limit is 30 minutes


def test_compiling_a_selective_recomputation_warns_of_nothing(caplog: pytest.LogCaptureFixture) -> None:
    torch_internals.silence_recomputation_warning()
    logger = logging.getLogger("torch._higher_order_ops.wrap")
    logger.warning("\nDetected that context_fn is passed to torch.utils.checkpoint under torch.compile.\n")
    logger.warning("something else")
    assert [record.getMessage() for record in caplog.records] == ["something else"]


def test_costly_operators_exist_and_the_products_are_among_them() -> None:
    assert torch.ops.aten.mm.default in torch_internals.costly_operators()


def asynchronous_products() -> tuple[bool, bool, bool]:
    from torch.distributed._symmetric_memory import is_symm_mem_enabled_for_group

    group = dist.new_group()
    before = is_symm_mem_enabled_for_group(group.group_name)
    with pytest.MonkeyPatch.context() as changes, warnings.catch_warnings():
        warnings.simplefilter("error")
        changes.setattr(torch._inductor.config, "_micro_pipeline_tp", False)
        torch_internals.overlap_tensor_parallel_products(group)
        after = is_symm_mem_enabled_for_group(group.group_name)
        return before, after, torch._inductor.config._micro_pipeline_tp


def test_the_compilers_pass_is_on_and_takes_the_group(ranks: Callable[[int], RankPool]) -> None:
    """Without the second it leaves every product as it is, and says nothing."""
    assert ranks(2).run(asynchronous_products) == [(False, True, True)] * 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_coalesced_collectives_are_over_after_one_wait() -> None:
    device = torch.device("cuda", 0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)
    try:
        group = dist.group.WORLD
        assert group is not None
        tensors = [torch.full((4,), value, device=device) for value in (1.0, 2.0)]
        with torch_internals.coalesced(group, device) as manager:
            for tensor in tensors:
                dist.broadcast(tensor, 0, group=group, async_op=True)
        manager.wait()
        assert [tensor.tolist() for tensor in tensors] == [[1.0] * 4, [2.0] * 4]
    finally:
        dist.destroy_process_group()


def coalesced_on_gloo() -> str:
    group = dist.group.WORLD
    assert group is not None
    with (
        pytest.raises(RuntimeError, match="does not implement") as refused,
        torch_internals.coalesced(group, torch.device("cpu")),
    ):
        pass
    return str(refused.value)


def test_gloo_refuses_to_coalesce(ranks: Callable[[int], RankPool]) -> None:
    """On the day it does not, benchmarks.many_gpus can measure it there too."""
    assert all("gloo" in told for told in ranks(2).run(coalesced_on_gloo))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_memory_history_is_recorded() -> None:
    torch_internals.record_memory_history(100)
    tensor = torch.ones(1024, device="cuda")
    assert torch_internals.memory_snapshot()["segments"]
    del tensor


def test_copies_are_cast() -> None:
    flat = torch.empty(7)
    torch_internals.foreach_copy_(
        list(flat.split([4, 3])), [torch.ones(4, dtype=torch.bfloat16), torch.full((3,), 2.0, dtype=torch.bfloat16)]
    )
    assert flat.tolist() == [1, 1, 1, 1, 2, 2, 2]


def test_a_profilers_events_are_those_of_its_trace(tmp_path: Path) -> None:
    assert not torch_internals.profiler_is_running()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        assert torch_internals.profiler_is_running()
        with torch.profiler.record_function("titan::forward"):
            torch.ones(8, 8).mm(torch.ones(8, 8))
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    written = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = {event["name"]: event for event in written if event["ph"] == "X"}
    recorded = {event.name: event for event in torch_internals.recorded_events(profiler)}
    for name, activity in {"titan::forward": "annotation", "aten::mm": "operator"}.items():
        event, span = recorded[name], spans[name]
        assert (event.activity, event.thread) == (activity, span["tid"])
        assert event.end - event.begin == pytest.approx(span["dur"] * 1e3, abs=2)
    outer, inner = recorded["titan::forward"], recorded["aten::mm"]
    assert outer.begin <= inner.begin < inner.end <= outer.end


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_kernel_has_the_number_of_its_launch() -> None:
    matrix = torch.ones(64, 64, device="cuda")
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        with torch.profiler.record_function("titan::forward"):
            matrix.mm(matrix)
        matrix.cpu()
        torch.cuda.synchronize()
    events = torch_internals.recorded_events(profiler)
    (annotation,) = [event for event in events if event.activity == "annotation"]
    (kernel,) = [event for event in events if event.activity == "kernel"]
    (launch,) = [e for e in events if e.activity == "launch" and e.correlation == kernel.correlation]
    assert launch.thread == annotation.thread
    assert annotation.begin <= launch.begin < annotation.end
    assert launch.begin < kernel.begin
    assert [event.activity for event in events if event.name.startswith("Memcpy")] == ["copy"]
