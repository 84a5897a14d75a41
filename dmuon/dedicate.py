"""dedicate_params(): select the matrices, assign owners, replace the parameters, attach the hooks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from dmuon.assignment import Assignment, assign, newton_schulz_flops
from dmuon.collectives import Axis, DataParallelAxes
from dmuon.determinism import apply_fixed_tree, is_deterministic
from dmuon.hooks import Runtime, attach_runtime, find_runtime
from dmuon.joint import JointParameter
from dmuon.joint_assignment import joint_flops, share_largest
from dmuon.parameter import DedicatedParameter, local, tensor_parallel_slice
from dmuon.plan import Plan, PlanEntry
from dmuon.precision import policies, unit_dtypes
from dmuon.selection import (
    BoundaryPredicate,
    Candidate,
    Predicate,
    Splits,
    candidates,
    clean_name,
    resolve_splits,
    select,
)
from dmuon.torch_internals import exclude_dedicated_from_fully_shard, gradient_reductions
from dmuon.unit import Unit


def dedicate_params(
    model: nn.Module,
    mesh: DeviceMesh,
    predicate: Predicate | None = None,
    *,
    replicate_mesh: DeviceMesh | None = None,
    reshard_after_forward: bool = True,
    hook_boundary_predicate: BoundaryPredicate | None = None,
    hook_boundary_strict: bool = True,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    split: Splits | None = None,
    max_joint_owners: int = 1,
) -> Plan:
    """Gives every chosen matrix one owner that keeps it whole; the others receive it around each use.

    Call it before `fully_shard`, which leaves these parameters alone afterwards, and on every rank alike.

    Args:
        model: may lie on the meta device; then call `dmuon.materialize` after `fully_shard`.
        mesh: the shard axis, one-dimensional and named; or a (replicate, shard) mesh with these two names.
        predicate: (name, parameter) -> whether it is dedicated. Parameters of 2 or 3 dims whose last two are above 1
            are asked; frozen ones stay as they are. Default: 2-D weights inside hook boundaries, embeddings left out.
        replicate_mesh: the replicate axis under HSDP, one-dimensional and named.
        reshard_after_forward: free the broadcast buffers after forward and fill them again for backward (Z3), or
            keep them in between (Z2).
        hook_boundary_predicate: the lowest ancestor module for which it holds is the boundary at which a parameter
            is filled and freed. Default: the `layers.N` or `blocks.N` that the parameter lies in.
        hook_boundary_strict: refuse dedicated parameters without a boundary; if False their own module is one.
        param_dtype: dtype of forward and backward. Default: that of the enclosing `fully_shard` module's mp_policy,
            looked up at the first forward, or else the parameter's own. Masters are always float32.
        reduce_dtype: dtype of gradient reduction. Default: the policy's, or else `param_dtype`.
        split: rows of the matrices that are fused along dim 0 of a 2-D parameter, by name pattern (`fnmatch`), such
            as {"*.qkv.weight": (4096, 1024, 1024)}. Each is orthogonalised by itself.
        max_joint_owners: with more ranks than matrices, let 2, 4 or 8 ranks, consecutive on the shard axis, own each of
            the costliest matrices jointly where that shortens the longest load: see docs/assignment.md. Pass the
            number of ranks of a node: the numbers that divide it are tried, so that no matrix is shared between nodes.
            Fused and 3-D parameters always have one owner. Default: all have. Not together with tensor parallelism.

    Returns:
        The plan, equal on all ranks.

    Raises:
        ValueError: called twice, after `fully_shard`, with a mesh of other axes, or with a predicate that chooses
            nothing, something without a boundary or something that is not floating-point, or a split that does not
            fit; or joint owners together with tensor parallelism. At the first forward: dtypes that contradict the
            policy, or weights that were never filled.
    """
    shard_mesh, replicate_mesh = _data_parallel_axes(mesh, replicate_mesh)
    _check_model(model)
    chosen, symmetric = select(candidates(model, hook_boundary_predicate), predicate, hook_boundary_strict)
    splits = resolve_splits(chosen, split)
    tp_mesh = _tp_mesh(model, [shard_mesh, replicate_mesh])
    _check_joint_owners(max_joint_owners, shard_mesh, tp_mesh)
    axes = DataParallelAxes(shard_mesh, replicate_mesh, tp_mesh)
    shapes = {candidate.name: tuple(candidate.param.shape) for candidate in chosen}
    degrees = axes.replicate.size, axes.shard.size
    assignment = share_largest(assign(shapes, *degrees, splits), shapes, *degrees, max_joint_owners, splits)
    axes.joint = _joint_axes(assignment, axes, shard_mesh)
    dedicated = {c.name: _dedicated(c, assignment, axes, splits.get(c.name, ()), shard_mesh) for c in chosen}
    units = _units(model, chosen, dedicated, axes, _device(mesh))
    _fill_masters(chosen, dedicated)

    def dtypes_of(unit: Unit) -> tuple[torch.dtype, torch.dtype]:
        return unit_dtypes(unit.params, policies(model), param_dtype, reduce_dtype)

    def prepare(runtime: Runtime) -> None:
        _prepare(model, runtime)

    is_filled = all(candidate.param.device.type != "meta" for candidate in chosen)
    exclude_dedicated_from_fully_shard()
    unit_of = {param.name: unit.name for unit in units for param in unit.params}
    entries = tuple(_plan_entry(param, unit_of[param.name]) for param in dedicated.values())
    plan = Plan(entries, symmetric, assignment)
    attach_runtime(model, Runtime(units, axes, plan, reshard_after_forward, prepare, dtypes_of, is_filled))
    return plan


def dedicated_params(model: nn.Module) -> set[nn.Parameter]:
    """The parameters that `fully_shard(..., ignored_params=...)` must leave alone. Empty before `dedicate_params`."""
    runtime = find_runtime(model)
    return {param.master for unit in runtime.units for param in unit.params} if runtime else set()


def process_groups(model: nn.Module) -> list[dist.ProcessGroup]:
    """The groups that dmuon made for this model. Their time-outs are those that the mesh's groups had."""
    runtime = find_runtime(model)
    if runtime is None:
        return []
    axes = runtime.axes
    return [group for axis in (axes.shard, axes.replicate, *axes.joint.values()) for group in axis.groups]


def _data_parallel_axes(mesh: DeviceMesh, replicate_mesh: DeviceMesh | None) -> tuple[DeviceMesh, DeviceMesh | None]:
    """The shard and the replicate axis of what was passed."""
    for argument, axis in (("mesh", mesh), ("replicate_mesh", replicate_mesh)):
        if axis is not None and axis.mesh_dim_names is None:
            raise ValueError(
                f"{argument} has no axis names: make it with init_device_mesh(..., mesh_dim_names=('shard',)), or "
                "('replicate', 'shard')"
            )
    names = mesh.mesh_dim_names
    assert names is not None
    if mesh.ndim == 2 and replicate_mesh is None and "replicate" in names[0] and "shard" in names[1]:
        return mesh[names[1]], mesh[names[0]]
    for argument, axis in (("mesh", mesh), ("replicate_mesh", replicate_mesh)):
        if axis is not None and axis.ndim != 1:
            raise ValueError(
                f"{argument} has {axis.ndim} axes {axis.mesh_dim_names}: pass one axis, such as mesh['shard'], and the "
                "replicate axis as replicate_mesh=mesh['replicate']"
            )
    return mesh, replicate_mesh


def _check_model(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if find_runtime(module) is not None:
            what = f"its module {name}" if name else "this model"
            raise ValueError(f"dedicate_params was called on {what} before: call it once, on the whole model")
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        sharded = [name for name, param in model.named_parameters() if isinstance(param, DTensor)]
        if sharded:
            raise ValueError(f"{sharded[0]} is sharded already: call dedicate_params before fully_shard")


def _tp_mesh(model: nn.Module, data_parallel: Sequence[DeviceMesh | None]) -> DeviceMesh | None:
    """The axis on which `parallelize_module` has put parameters, if it has."""
    ranks = {rank for mesh in data_parallel if mesh is not None for rank in mesh.mesh.flatten().tolist()}
    found: DeviceMesh | None = None
    for name, param in model.named_parameters():
        if not isinstance(param, DTensor):
            continue
        mesh = param.device_mesh
        if mesh.ndim != 1 or len(ranks & set(mesh.mesh.flatten().tolist())) > 1:
            raise ValueError(
                f"{name} is a DTensor on the axes {mesh.mesh_dim_names}: dedicate_params takes the data-parallel axes, "
                "and parameters may lie on one axis besides these, the tp axis, by parallelize_module"
            )
        if found is not None and mesh != found:
            raise ValueError(f"{name} is a DTensor on another tp axis than the parameters before it")
        found = mesh
    return found


def _check_joint_owners(max_joint_owners: int, shard_mesh: DeviceMesh, tp_mesh: DeviceMesh | None) -> None:
    if max_joint_owners < 1:
        raise ValueError(f"max_joint_owners = {max_joint_owners}: must be 1, or the number of ranks of a node")
    if max_joint_owners > 1 and tp_mesh is not None:
        raise ValueError(
            f"max_joint_owners = {max_joint_owners}: the tp ranks of an owner share its matrices already; leave it at "
            "1 with tensor parallelism"
        )
    ranks = shard_mesh.mesh.flatten().tolist()
    if max_joint_owners > 1 and ranks != list(range(ranks[0], ranks[0] + len(ranks))):
        raise ValueError(
            f"max_joint_owners = {max_joint_owners}: consecutive ranks must be neighbours on the shard axis, which has "
            f"ranks {ranks}; make it the last axis of the mesh"
        )


def _joint_axes(assignment: Assignment, axes: DataParallelAxes, shard_mesh: DeviceMesh) -> dict[tuple[int, int], Axis]:
    """See `DataParallelAxes`."""
    groups = {(num, assignment.owners[name]) for name, num in assignment.num_owners.items()}
    return {
        (owner.shard, num): Axis(shard_mesh, slice(owner.shard, owner.shard + num))
        for num, owner in sorted(groups, reverse=True)
        if owner.replicate == axes.replicate.index and 0 <= axes.shard.index - owner.shard < num
    }


def _dedicated(
    candidate: Candidate, assignment: Assignment, axes: DataParallelAxes, split: tuple[int, ...], shard_mesh: DeviceMesh
) -> DedicatedParameter:
    name, param = candidate.name, candidate.param
    owner, num_owners = assignment.owners[name], assignment.num_owners.get(name, 1)
    shapes = param.shape, local(param).shape
    if num_owners == 1:
        slice_ = tensor_parallel_slice(name, param)
        return DedicatedParameter(name, candidate.places, *shapes, owner, param.dtype, split, slice_, axes.tp)
    is_here = owner.replicate == axes.replicate.index
    axis = axes.joint.get((owner.shard, num_owners)) if is_here else None
    mesh = None if axis is None else DeviceMesh.from_group(axis.groups[0], shard_mesh.device_type)
    return JointParameter(
        name, candidate.places, *shapes, owner, param.dtype, axis=axis, num_owners=num_owners, mesh=mesh
    )


def _plan_entry(param: DedicatedParameter, unit: str) -> PlanEntry:
    shape = tuple(param.logical_shape)
    if isinstance(param, JointParameter):
        flops = joint_flops(shape, param.num_owners)
        return PlanEntry(param.name, shape, (), unit, param.owner, flops, param.num_owners)
    return PlanEntry(param.name, shape, param.split, unit, param.owner, newton_schulz_flops(shape, param.split))


def _device(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())


def _units(
    model: nn.Module,
    chosen: Sequence[Candidate],
    dedicated: dict[str, DedicatedParameter],
    axes: DataParallelAxes,
    device: torch.device,
) -> list[Unit]:
    modules: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        # A wrapper and what it wraps share a clean name; hooks belong on the outer one, outside recomputation.
        modules.setdefault(clean_name(name), module)
    grouped: dict[tuple[str, ...], list[DedicatedParameter]] = {}
    for candidate in chosen:
        grouped.setdefault(candidate.boundaries, []).append(dedicated[candidate.name])
    return [
        Unit(" + ".join(boundaries), [modules[name] for name in boundaries], params, axes, device)
        for boundaries, params in grouped.items()
    ]


@torch.no_grad()
def _fill_masters(chosen: Sequence[Candidate], dedicated: dict[str, DedicatedParameter]) -> None:
    for candidate in chosen:
        master = dedicated[candidate.name].master
        if master.device.type != "meta" and candidate.param.device.type != "meta":
            local(master).copy_(dedicated[candidate.name].part_of(candidate.param))


@torch.inference_mode(False)  # the first forward may be an evaluation; what it makes is trained later
def _prepare(model: nn.Module, runtime: Runtime) -> None:
    """Before the first forward, when `fully_shard` has been called and weights are there."""
    if not runtime.is_filled:
        raise ValueError("the model was on the meta device and has no weights yet: call dmuon.materialize(model, ...)")
    for unit in runtime.units:
        for param in unit.params:
            if not param.is_registered:
                raise ValueError(
                    f"{param.name} was replaced after dedicate_params: load weights with dmuon.set_state_dict or "
                    "dmuon.materialize, and move or cast the model before dedicate_params"
                )
        unit.build_compute(*runtime.dtypes_of(unit))
    if is_deterministic(model):
        runtime.axes.use_fixed_tree()
        apply_fixed_tree(model, runtime.axes.replicate)
    else:
        _check_rows_are_summed(model, runtime.axes)


def _check_rows_are_summed(model: nn.Module, axes: DataParallelAxes) -> None:
    """Raises where FSDP2 knows nothing of the replicate rows: each would train its own embeddings and norms."""
    for name, module in model.named_modules():
        if axes.replicate.size == 1 or not isinstance(module, FSDPModule):
            continue
        for reduction in gradient_reductions(module):
            if reduction.replicate_degree == 1 and reduction.all_reduce_hook is None:
                raise ValueError(
                    f"fully_shard of {clean_name(name) or 'the root module'} was given the shard axis alone, while "
                    f"dedicate_params has {axes.replicate.size} replicate rows: pass it the (replicate, shard) mesh"
                )
