"""Sums by one pairwise tree over the data-parallel index: the same bits on every (replicate, shard) mesh.

The index is d = replicate index x shard degree + shard index. FSDP2 reduce-scatters over shard and all-reduces over
replicate, each in an order of the back-end's own. Here both are replaced: over shard the parts are exchanged as they
are and summed locally by the tree, and the tree goes on over the replicate rows in FSDP2's all-reduce hook.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from dmuon.collectives import Axis, tree_sum
from dmuon.hooks import find_runtime
from dmuon.torch_internals import GradientReduction, gradient_reductions, group_timeout, new_group_of_members

_ATTRIBUTE = "_dmuon_fixed_tree"
_enabled = False


@dataclass
class ReplicateRows:
    """The replicate axis as this rank sees it.

    Attributes:
        ranks: one in each row, this rank among them, at `index`.
        group: they form it; None until it is needed.
    """

    ranks: Sequence[int]
    index: int
    group: dist.ProcessGroup | None = None


@dataclass
class _FixedTree:
    """What a model carries once it was asked for.

    Attributes:
        enabled: False once it was switched off again.
        sums_rows: some module is sharded over the shard axis alone, and only its hook sums the replicate rows.
        undo: what puts back FSDP2's own reduction, by `GradientReduction.key`.
    """

    rows: ReplicateRows
    enabled: bool = True
    sums_rows: bool = False
    undo: dict[int, Callable[[], None]] = field(default_factory=dict)


def set_deterministic(
    enabled: bool = True, model: nn.Module | None = None, *, replicate_mesh: DeviceMesh | None = None
) -> None:
    """Makes every sum over ranks, of gradients and in `clip_grad_norm_`, follow one tree over the data-parallel index.

    Training on (2, 2), (4) and (4, 1) ranks then gives the same bits, as does every run on one mesh, provided that
    each rank's own arithmetic does (on CUDA: `torch.use_deterministic_algorithms`). Meshes whose shard degree is not
    a power of two are reproducible, but equal to others only with one replicate row: the tree does not decompose. Runs
    with joint owners (see `dedicate_params`) are reproducible too: who shares a matrix depends on the mesh.

    Costs memory and time: a buffer for each rank of an axis, and gathers in place of reductions.

    Args:
        enabled: on or off.
        model: switch it for this model, at once; after `fully_shard`. It may be one without dedicated parameters.
            None: switch it for every model with dedicated parameters whose first forward is yet to come.
        replicate_mesh: the replicate axis of a model without dedicated parameters that was sharded over
            `mesh["shard"]` alone; its rows are summed by the tree. With dedicated parameters it is known.

    Raises:
        ValueError: the model is sharded on a native (replicate > 2, shard) mesh, where FSDP2 itself sums over
            replicate; has a reduction of its own; isn't sharded yet; or can't be switched off, since nothing but the
            tree sums the rows of a model sharded over the shard axis alone.
    """
    global _enabled
    if model is None:
        if replicate_mesh is not None:
            raise ValueError("replicate_mesh belongs to a model: pass that too")
        _enabled = enabled
    elif enabled:
        if not any(isinstance(module, FSDPModule) for module in model.modules()):
            raise ValueError("set_deterministic: this model is not sharded yet; call it after fully_shard")
        apply_fixed_tree(model, _replicate_axis(model, replicate_mesh))
        runtime = find_runtime(model)
        if runtime is not None:
            runtime.axes.use_fixed_tree()
    else:
        _switch_off(model)


def is_deterministic(model: nn.Module | None = None) -> bool:
    """Whether sums of this model follow the tree; without a model, what models to come will do."""
    tree = None if model is None else _find(model)
    return _enabled if tree is None else tree.enabled


def replicate_rows(model: nn.Module) -> ReplicateRows | None:
    """The replicate axis of a model that `set_deterministic` was told it has, or that has dedicated parameters."""
    runtime, tree = find_runtime(model), _find(model)
    if runtime is not None:
        return ReplicateRows(runtime.axes.replicate.ranks, runtime.axes.replicate.index)
    return None if tree is None else tree.rows


def apply_fixed_tree(model: nn.Module, replicate: Axis | ReplicateRows) -> None:
    """Makes FSDP2 reduce by the tree in every module of `model`.

    Args:
        model: after `fully_shard`.
        replicate: this rank's replicate axis, of size 1 where there is none. Modules sharded on a native
            (replicate, shard) mesh have it from that.

    Raises:
        ValueError: as `set_deterministic`.
    """
    rows = replicate if isinstance(replicate, ReplicateRows) else ReplicateRows(replicate.ranks, replicate.index)
    tree = _find(model)
    if tree is None or not tree.undo:
        tree = _FixedTree(rows)
    elif list(tree.rows.ranks) != list(rows.ranks):
        raise ValueError("set_deterministic was called on this model before, with another replicate_mesh")
    found: dict[int, tuple[FSDPModule, GradientReduction]] = {}
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            reductions = gradient_reductions(module)
            if reductions and reductions[0].key not in tree.undo:
                _check(name or "the model", reductions, len(rows.ranks))
                found.setdefault(reductions[0].key, (module, reductions[0]))
    for key, (module, reduction) in found.items():
        if reduction.replicate_degree == 1 and len(rows.ranks) > 1:
            tree.sums_rows = True
            if tree.rows.group is None:
                assert isinstance(replicate, Axis)
                tree.rows.group = _new_group(replicate, reduction.device_type)
        tree.undo[key] = _replace_reduction(module, reduction, tree.rows)
    tree.enabled = True
    model.__dict__[_ATTRIBUTE] = tree


def _find(model: nn.Module) -> _FixedTree | None:
    return model.__dict__.get(_ATTRIBUTE)


def _replicate_axis(model: nn.Module, mesh: DeviceMesh | None) -> Axis | ReplicateRows:
    if mesh is not None and mesh.ndim != 1:
        raise ValueError(f"replicate_mesh has {mesh.ndim} axes: pass one, such as mesh['replicate']")
    ranks = [dist.get_rank()] if mesh is None else mesh.mesh.flatten().tolist()
    runtime = find_runtime(model)
    if runtime is not None:
        if mesh is not None and ranks != runtime.axes.replicate.ranks:
            raise ValueError("replicate_mesh is not the one that dedicate_params was called with: leave it out")
        return runtime.axes.replicate
    # FSDP2 on the shard axis alone leaves the mesh's own group unused.
    return ReplicateRows(ranks, ranks.index(dist.get_rank()), mesh.get_group() if mesh is not None else None)


def _new_group(axis: Axis, device_type: str) -> dist.ProcessGroup:
    """A group of its own: dmuon's reductions over the axis go their own way, beside the caller."""
    group = new_group_of_members(axis.ranks, group_timeout(axis.groups[0], device_type))
    axis.groups.append(group)  # so that process_groups() knows it
    return group


def _check(name: str, reductions: Sequence[GradientReduction], num_rows: int) -> None:
    remedy = (
        'call fully_shard with mesh=mesh["shard"] instead, and dedicate_params, or for a model without dedicated '
        'parameters set_deterministic, with replicate_mesh=mesh["replicate"]'
    )
    degree = reductions[0].replicate_degree
    if len(reductions) > 1:
        raise ValueError(f"{name} is sharded over several meshes by shard_placement_fn: set_deterministic knows one")
    if degree > 2:
        raise ValueError(
            f"{name} is sharded on a (replicate {degree}, shard {reductions[0].shard_degree}) mesh, where FSDP2 sums "
            f"over replicate in an order of its own: {remedy}"
        )
    if degree > 1 and num_rows not in (1, degree):
        raise ValueError(f"{name} is sharded over {degree} replicate rows, the model has {num_rows}: {remedy}")
    if reductions[0].all_reduce_hook is not None:
        raise ValueError(f"{name} has an all-reduce hook of its own already: remove it, or leave out set_deterministic")


def _replace_reduction(module: FSDPModule, before: GradientReduction, rows: ReplicateRows) -> Callable[[], None]:
    """Returns what puts back the reduction that was there before.

    All division is the hook's: with one shard FSDP2 would apply a factor of its own twice. Sums are forced, for any
    factor without that selects an operation that gloo does not have.
    """
    native = before.replicate_degree > 1  # two rows, whose sum has one order only; FSDP2 makes it before the hook
    num_rows = before.replicate_degree if native else len(rows.ranks)
    divisor = before.divide_factor or before.shard_degree * num_rows
    reduce_scatter: Any = _TreeReduceScatter()
    module.set_custom_reduce_scatter(reduce_scatter)
    module.set_all_reduce_hook(_sum_rows_and_divide(None if native or num_rows == 1 else rows, divisor))
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)

    def undo() -> None:
        nothing: Any = None
        factor: Any = before.divide_factor
        module.set_custom_reduce_scatter(before.reduce_scatter)
        module.set_all_reduce_hook(nothing)
        module.set_gradient_divide_factor(factor)
        module.set_force_sum_reduction_for_comms(before.force_sum)

    return undo


class _TreeReduceScatter:
    """FSDP2's interface ReduceScatter. Moves the bytes of a ring, into one more buffer of the input's size."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        assert op == dist.ReduceOp.SUM
        assert not async_op
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        output_tensor.copy_(tree_sum(received.view(group.size(), -1).unbind()))


def _sum_rows_and_divide(rows: ReplicateRows | None, divisor: float) -> Callable[[Tensor], None]:
    def hook(reduced: Tensor) -> None:
        if rows is not None:
            parts = [torch.empty_like(reduced) for _ in rows.ranks]
            dist.all_gather(parts, reduced, group=rows.group)
            reduced.copy_(tree_sum(parts))
        reduced.div_(divisor)
        if reduced.device.type != "cpu":
            # FSDP2 frees the buffer on the reduce-scatter's stream, where the next layer could take it over while
            # the all-reduce stream, on which this runs, is still at work. The allocator waits for that now.
            reduced.record_stream(torch.accelerator.current_stream())

    return hook


def _switch_off(model: nn.Module) -> None:
    tree = _find(model)
    if tree is None:
        tree = model.__dict__[_ATTRIBUTE] = _FixedTree(ReplicateRows([dist.get_rank()], 0))
    if tree.sums_rows:
        raise ValueError(
            f"set_deterministic(False): nothing else would sum the {len(tree.rows.ranks)} replicate rows of this "
            "model: FSDP2 all-reduces on a (replicate, shard) mesh only, and it is sharded over the shard axis alone"
        )
    for key in list(tree.undo):
        tree.undo[key]()
        del tree.undo[key]
    tree.enabled = False
    runtime = find_runtime(model)
    if runtime is not None:
        runtime.axes.shard.fixed_tree = runtime.axes.replicate.fixed_tree = False
