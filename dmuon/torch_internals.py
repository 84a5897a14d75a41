"""Every private name of torch that this repository uses, dmuon and the harness; a test checks each."""

from __future__ import annotations

import functools
import hashlib
import importlib
import logging
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

_DEDICATED = "_dmuon_dedicated"

# Groups that `new_group_of_members` made, by ranks.
_num_made: Counter[tuple[int, ...]] = Counter()


def in_backward() -> bool:
    """True while the calling thread runs an autograd graph."""
    return torch._C._current_graph_task_id() != -1


def queue_backward_callback(callback: Callable[[], None]) -> None:
    """Calls `callback` once when the backward pass that is running has finished."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def local_shard(param: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """This rank's (shape, offset of each dim) of a sharded tensor, uneven and empty shards included."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(param.shape, param.device_mesh, param.placements)
    return tuple(shape), tuple(offset)


def waited(tensor: Tensor) -> Tensor:
    """The tensor itself where it is the result of a functional collective still under way."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


def foreach_norm(tensors: list[Tensor]) -> list[Tensor]:
    """2-norms, each a 0-dim float64 tensor, accumulated in float64: a float32 sum over a large matrix loses 1e-5."""
    return list(torch._foreach_norm(tensors, dtype=torch.float64))


def foreach_copy_(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Each source to its target, cast to its dtype, in one pass where shapes are equal."""
    torch._foreach_copy_(targets, sources)


def foreach_lerp_(tensors: list[Tensor], ends: list[Tensor], weight: float) -> None:
    torch._foreach_lerp_(tensors, ends, weight)


def foreach_mul_(tensors: list[Tensor], factor: Tensor) -> None:
    torch._foreach_mul_(tensors, factor)


def mark_dedicated(param: nn.Parameter) -> None:
    """`fully_shard` leaves a marked parameter alone once `exclude_dedicated_from_fully_shard` has run."""
    setattr(param, _DEDICATED, True)


def is_dedicated(param: Tensor) -> bool:
    return getattr(param, _DEDICATED, False)


def exclude_dedicated_from_fully_shard() -> None:
    """Makes a plain `fully_shard(module, mesh=...)` treat marked parameters as if named in `ignored_params`.

    FSDP2 collects a module's parameters in one function; it is wrapped, once, wherever this torch keeps it.

    Raises:
        RuntimeError: this torch has no such function.
    """
    found = False
    for name in ("_fsdp_init", "_fully_shard"):
        module = importlib.import_module(f"torch.distributed.fsdp._fully_shard.{name}")
        collect = getattr(module, "_get_managed_states", None)
        if collect is not None:
            found = True
            if not hasattr(collect, _DEDICATED):
                module._get_managed_states = _without_dedicated(collect)  # type: ignore[attr-defined]
    if not found:
        raise RuntimeError(
            f"torch {torch.__version__} collects parameters for fully_shard in a way dmuon does not know: pass "
            "ignored_params=dmuon.dedicated_params(model) to fully_shard and report this version"
        )


def _without_dedicated(collect: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(collect)
    def wrapped(modules: list[nn.Module], ignored_params: set[nn.Parameter] | None = None) -> Any:
        dedicated = {p for m in modules for p in m.parameters(recurse=False) if is_dedicated(p)}
        return collect(modules, (ignored_params or set()) | dedicated)

    setattr(wrapped, _DEDICATED, True)
    return wrapped


def mixed_precision_of(module: FSDPModule) -> MixedPrecisionPolicy:
    """What was passed to `fully_shard` as `mp_policy`."""
    return module._get_fsdp_state()._mp_policy


def discard_accumulated(module: FSDPModule) -> None:
    """Drops the gradients that backward passes without synchronisation have left in this module's own group."""
    for group in _param_groups(module):
        for param in group.fsdp_params:
            param.unsharded_accumulated_grad = None
            if hasattr(param, "_unsharded_param"):
                param._unsharded_param.grad = None


def has_accumulated(module: FSDPModule) -> bool:
    """Whether backward passes without synchronisation have left gradients in this module's own group."""
    return any(
        param.unsharded_accumulated_grad is not None
        or (hasattr(param, "_unsharded_param") and param._unsharded_param.grad is not None)
        for group in _param_groups(module)
        for param in group.fsdp_params
    )


def _param_groups(module: FSDPModule) -> list[Any]:
    """None if the module manages no parameters, several if `shard_placement_fn` chose meshes of its own."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # an older torch: one at most
        return [state._fsdp_param_group] if state._fsdp_param_group else []
    return groups


def group_timeout(group: dist.ProcessGroup, device_type: str) -> timedelta:
    """After how long a collective of this group counts as stuck."""
    return group._get_backend(torch.device(device_type)).options._timeout


def new_group_of_members(ranks: Sequence[int], timeout: timedelta) -> dist.ProcessGroup:
    """A group that these ranks make and no others, whatever groups any rank has made before.

    torch names such a group by the groups that this rank is in (to 2.13) or has made (from 2.14 on, where it counts in
    the names of later ones too). Ranks that differ in these would wait for each other's name for ever.
    """
    c10d: Any = dist.distributed_c10d
    num_made, name_by_ranks = c10d._world.group_count, c10d._hash_ranks_to_str
    members = tuple(ranks)
    _num_made[members] += 1
    name = hashlib.sha1(f"dmuon {members} {_num_made[members]}".encode(), usedforsecurity=False).hexdigest()
    c10d._hash_ranks_to_str = lambda _: name
    try:
        return dist.new_group(ranks, timeout=timeout, use_local_synchronization=True)
    finally:
        c10d._hash_ranks_to_str = name_by_ranks
        c10d._world.group_count = num_made


@contextmanager
def coalesced(group: dist.ProcessGroup, device: torch.device) -> Iterator[Any]:
    """Collectives that are issued inside go out as one, which `wait` of what is yielded waits for. NCCL only."""
    with dist.distributed_c10d._coalescing_manager(group=group, device=device, async_ops=True) as manager:
        yield manager


def set_group_timeout(group: dist.ProcessGroup | None, timeout_s: float) -> None:
    """Changes after how long a collective of this group (None: the default one) counts as stuck."""
    # Public from torch 2.14 on, where the older name warns.
    set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    set_timeout(timedelta(seconds=timeout_s), group)


def overlap_tensor_parallel_products(group: dist.ProcessGroup) -> None:
    """Lets inductor split products next to collectives of this group and overlap the parts: "async TP"."""
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    torch._inductor.config._micro_pipeline_tp = True
    with warnings.catch_warnings():
        # Deprecated as needless, but without it the compiler's pass leaves the group alone (pytorch/pytorch#193027).
        warnings.simplefilter("ignore", FutureWarning)
        enable_symm_mem_for_group(group.group_name)


def record_memory_history(max_entries: int) -> None:
    torch.cuda.memory._record_memory_history(max_entries=max_entries)


def memory_snapshot() -> Any:
    return torch.cuda.memory._snapshot()


def profiler_is_running() -> bool:
    """Whether a profiler records what the calling thread does."""
    return torch.autograd._profiler_enabled()


class RecordedEvent(NamedTuple):
    """What a profiler recorded. Begin and end in nanoseconds.

    Attributes:
        activity: "annotation", "operator" or "launch" of the host; "kernel", "copy" or "annotation on the GPU".
        thread: of the system, or a GPU's stream.
        correlation: of a kernel or copy and of its launch, the same number.
    """

    activity: str
    name: str
    begin: int
    end: int
    thread: int
    correlation: int


# Calls of the CUDA runtime and driver. Names of operators have a namespace.
_LAUNCH = re.compile(r"(cuda|cu|hip)[A-Z]\w*")


def recorded_events(profiler: torch.profiler.profile) -> list[RecordedEvent]:
    """Read where the profiler keeps them: `profiler.events()` takes 50 us for each, this 5."""
    assert profiler.profiler is not None
    results = profiler.profiler.kineto_results
    assert results is not None
    return [
        RecordedEvent(
            _activity(event),
            event.name(),
            event.start_ns(),
            event.start_ns() + event.duration_ns(),
            event.device_resource_id(),
            event.correlation_id(),
        )
        for event in results.events()
    ]


def _activity(event: Any) -> str:
    """torch 2.11 does not say."""
    on_host, name = event.device_type() == torch.autograd.DeviceType.CPU, event.name()
    if event.is_user_annotation():
        return "annotation" if on_host else "annotation on the GPU"
    if on_host:
        return "operator" if "::" in name or not _LAUNCH.fullmatch(name) else "launch"
    return "copy" if name.startswith(("Memcpy", "Memset")) else "kernel"


def silence_recomputation_warning() -> None:
    """torch.compile warns of recomputed in-place operations whenever some results are kept; our models have none."""
    logging.getLogger("torch._higher_order_ops.wrap").addFilter(
        lambda record: "context_fn is passed to torch.utils.checkpoint" not in record.getMessage()
    )


def costly_operators() -> set[Any]:
    """Operators whose results selective activation checkpointing keeps: TorchTitan v0.2.2's list."""
    aten = torch.ops.aten
    return {
        aten.mm.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_cudnn_attention.default,
        aten._scaled_dot_product_attention_math.default,
        aten._scaled_dot_product_fused_attention_overrideable.default,
        aten.max.default,
        torch.ops._c10d_functional.reduce_scatter_tensor.default,
    }


@dataclass(frozen=True)
class GradientReduction:
    """How FSDP2 reduces the gradients that one `fully_shard` call manages.

    Attributes:
        key: equal for the modules of one `fully_shard([a, b])` call, which share it.
        shard_degree, replicate_degree: ranks of its own mesh axes; FSDP2 itself sums over both.
        reduce_scatter, all_reduce_hook, divide_factor, force_sum: what the public setters of FSDPModule set.
    """

    key: int
    device_type: str
    shard_degree: int
    replicate_degree: int
    reduce_scatter: Any
    all_reduce_hook: Callable[[Tensor], None] | None
    divide_factor: float | None
    force_sum: bool


def gradient_reductions(module: FSDPModule) -> list[GradientReduction]:
    """Of each group of parameters that the module manages."""
    return [
        GradientReduction(
            id(group),
            group.device.type,
            getattr(group.mesh_info, "shard_mesh_size", 1),
            getattr(group.mesh_info, "replicate_mesh_size", 1),
            group._reduce_scatter_comm,
            group._all_reduce_hook,
            group.gradient_divide_factor,
            group.force_sum_reduction_for_comms,
        )
        for group in _param_groups(module)
    ]
