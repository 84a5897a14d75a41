"""dedicate_params(): select the matrices, assign owners, replace the parameters, attach the hooks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dmuon.assignment import Assignment, Owner, assign, newton_schulz_flops
from dmuon.collectives import DataParallelAxes
from dmuon.hooks import Runtime, attach_runtime, find_runtime
from dmuon.parameter import DedicatedParameter
from dmuon.torch_internals import exclude_dedicated_from_fully_shard
from dmuon.unit import Unit

Predicate = Callable[[str, nn.Parameter], bool]
BoundaryPredicate = Callable[[nn.Module], bool]

_BLOCK = re.compile(r"(?:^|\.)(?:layers|blocks)\.\d+(?=\.|$)")
_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:_checkpoint_wrapped_module|_orig_mod)\.")


@dataclass(frozen=True)
class PlanEntry:
    """One dedicated parameter in a plan. `flops`: of its Newton-Schulz iteration, once a step."""

    name: str
    shape: tuple[int, ...]
    unit: str
    owner: Owner
    flops: int


@dataclass(frozen=True)
class Plan:
    """Who owns what. `str(plan)` is a table for people.

    Attributes:
        entries: the dedicated parameters, in the model's order.
        symmetric: names and shapes of all others, updated by AdamW.
    """

    entries: tuple[PlanEntry, ...]
    symmetric: dict[str, tuple[int, ...]]
    assignment: Assignment

    def __str__(self) -> str:
        rows = [f"{'parameter':<48} {'shape':<20} {'owner (replicate, shard)':<25} GFLOP"]
        for entry in self.entries:
            owner = f"({entry.owner.replicate}, {entry.owner.shard})"
            rows.append(f"{entry.name:<48} {entry.shape!s:<20} {owner:<25} {entry.flops / 1e9:.1f}")
        for slot, flops in self.assignment.flops.items():
            numel = self.assignment.numel[slot]
            rows.append(f"owner ({slot.replicate}, {slot.shard}): {flops / 1e9:.1f} GFLOP, {numel:,} elements")
        rows.append(f"longest load / floor: {self.assignment.imbalance:.3f}; AdamW: {len(self.symmetric)} parameters")
        return "\n".join(rows)


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
) -> Plan:
    """Gives every chosen matrix one owner that keeps it whole; the others receive it around each use.

    Call it before `fully_shard`, which leaves these parameters alone afterwards, and on every rank alike.

    Args:
        model: may lie on the meta device; then call `dmuon.materialize` after `fully_shard`.
        mesh: the shard axis, one-dimensional.
        predicate: (name, parameter) -> whether it is dedicated. Only trainable parameters of 2 or 3 dims whose last
            two are above 1 are asked. Default: the 2-D weights inside hook boundaries, embeddings left out.
        replicate_mesh: the replicate axis under HSDP, one-dimensional.
        reshard_after_forward: free the broadcast buffers after forward and fill them again for backward (Z3), or
            keep them in between (Z2).
        hook_boundary_predicate: the lowest ancestor module for which it holds is the boundary at which a parameter
            is filled and freed. Default: the `layers.N` or `blocks.N` that the parameter lies in.
        hook_boundary_strict: refuse dedicated parameters without a boundary; if False their own module is one.
        param_dtype: dtype of forward and backward. Default: the parameter's own. Masters are always float32.
        reduce_dtype: dtype of gradient reduction. Default: `param_dtype`.

    Returns:
        The plan, equal on all ranks.

    Raises:
        ValueError: called twice, after `fully_shard`, with a mesh of several axes, or with a predicate that chooses
            nothing or something without a boundary.
    """
    _check_call(model, mesh, replicate_mesh)
    boundary_of = _boundaries(model, hook_boundary_predicate)
    chosen, symmetric = _select(model, predicate, boundary_of)
    if hook_boundary_strict:
        _check_boundaries(chosen, boundary_of)
    axes = DataParallelAxes(mesh, replicate_mesh)
    shapes = {name: tuple(param.shape) for name, (param, _) in chosen.items()}
    assignment = assign(shapes, axes.replicate.size, axes.shard.size)
    device = torch.device(mesh.device_type)
    if device.type != "cpu":
        device = torch.device(device.type, torch.get_device_module(device).current_device())

    grouped: dict[str, list[DedicatedParameter]] = {}
    for name, (param, places) in chosen.items():
        shape = param.shape
        dedicated = DedicatedParameter(name, places, shape, shape, assignment.owners[name])
        grouped.setdefault(boundary_of.get(name, name.rpartition(".")[0]), []).append(dedicated)
    modules: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        # A wrapper and what it wraps share a clean name; hooks belong on the outer one, outside recomputation.
        modules.setdefault(clean_name(name), module)
    units = []
    for unit_name, params in grouped.items():
        dtype = param_dtype or chosen[params[0].name][0].dtype
        unit = Unit(unit_name, modules[unit_name], params, axes, device, dtype, reduce_dtype or dtype)
        _fill_masters(unit, {param.name: chosen[param.name][0] for param in params})
        units.append(unit)
    exclude_dedicated_from_fully_shard()
    attach_runtime(model, Runtime(units, axes, reshard_after_forward))
    entries = {
        p.name: PlanEntry(p.name, tuple(p.logical_shape), unit.name, p.owner, newton_schulz_flops(p.logical_shape))
        for unit in units
        for p in unit.params
    }
    return Plan(tuple(entries[name] for name in chosen), symmetric, assignment)


def dedicated_params(model: nn.Module) -> set[nn.Parameter]:
    """The parameters that `fully_shard(..., ignored_params=...)` must leave alone. Empty before `dedicate_params`."""
    runtime = find_runtime(model)
    return {param.master for unit in runtime.units for param in unit.params} if runtime else set()


def process_groups(model: nn.Module) -> list[dist.ProcessGroup]:
    """The groups that dmuon made for this model. Their time-outs are those that the mesh's groups had."""
    runtime = find_runtime(model)
    return [*runtime.axes.shard.groups, *runtime.axes.replicate.groups] if runtime else []


def clean_name(name: str) -> str:
    """A module's or parameter's name without what activation checkpointing and torch.compile wrap around modules."""
    return _WRAPPERS.sub("", name + ".")[:-1]


Chosen = dict[str, tuple[nn.Parameter, list[tuple[nn.Module, str]]]]


def _check_call(model: nn.Module, mesh: DeviceMesh, replicate_mesh: DeviceMesh | None) -> None:
    if find_runtime(model) is not None:
        raise ValueError("dedicate_params was called on this model before: call it once")
    for name, axis in (("mesh", mesh), ("replicate_mesh", replicate_mesh)):
        if axis is not None and axis.ndim != 1:
            raise ValueError(
                f"{name} has {axis.ndim} axes {axis.mesh_dim_names}: pass one axis, such as mesh['shard'], and the "
                "replicate axis as replicate_mesh=mesh['replicate']"
            )
    for name, param in model.named_parameters():
        if isinstance(param, DTensor):
            raise ValueError(f"{name} is sharded already: call dedicate_params before fully_shard")


def _boundaries(model: nn.Module, predicate: BoundaryPredicate | None) -> dict[str, str]:
    """Parameter name -> name of its boundary module, for those that have one."""
    if predicate is None:
        matches = {name: list(_BLOCK.finditer(name)) for name in _parameter_places(model)}
        # The last match: in `vision.blocks.3.layers.0` the innermost block is the unit.
        return {name: name[: found[-1].end()] for name, found in matches.items() if found}
    holds = {clean_name(name) for name, module in model.named_modules() if predicate(module)}
    boundaries = {}
    for name in _parameter_places(model):
        ancestor = name
        while ancestor:
            ancestor = ancestor.rpartition(".")[0]
            if ancestor in holds:
                boundaries[name] = ancestor
                break
    return boundaries


def _parameter_places(model: nn.Module) -> Chosen:
    """Every distinct parameter by its first name, with all places that hold it (several when tied)."""
    places: dict[nn.Parameter, tuple[str, list[tuple[nn.Module, str]]]] = {}
    for module_name, module in model.named_modules():
        for attribute, param in module.named_parameters(recurse=False):
            name = clean_name(f"{module_name}.{attribute}" if module_name else attribute)
            places.setdefault(param, (name, []))[1].append((module, attribute))
    return {name: (param, held) for param, (name, held) in places.items()}


def _select(
    model: nn.Module, predicate: Predicate | None, boundary_of: dict[str, str]
) -> tuple[Chosen, dict[str, tuple[int, ...]]]:
    chosen: Chosen = {}
    symmetric: dict[str, tuple[int, ...]] = {}
    for name, (param, places) in _parameter_places(model).items():
        matrix = param.requires_grad and param.ndim in (2, 3) and min(param.shape[-2:]) > 1
        if predicate is not None:
            wanted = matrix and predicate(name, param)
        else:
            embedding = any(isinstance(module, nn.Embedding) for module, _ in places)
            wanted = matrix and param.ndim == 2 and not embedding and name in boundary_of
        if wanted:
            if not param.is_floating_point():
                raise ValueError(f"{name} has dtype {param.dtype}: only floating-point parameters can be dedicated")
            chosen[name] = (param, places)
        else:
            symmetric[name] = tuple(param.shape)
    if not chosen:
        raise ValueError(
            "no parameter was chosen: the predicate must hold for at least one trainable 2-D or 3-D parameter"
            if predicate is not None
            else "no 2-D weight lies inside layers.N or blocks.N: pass predicate= and hook_boundary_predicate="
        )
    return chosen, symmetric


def _check_boundaries(chosen: Iterable[str], boundary_of: dict[str, str]) -> None:
    without = [name for name in chosen if name not in boundary_of]
    if without:
        raise ValueError(
            f"no hook boundary for {', '.join(without)}: pass hook_boundary_predicate=, or hook_boundary_strict=False "
            "to fill and free each of them at its own module"
        )


@torch.no_grad()
def _fill_masters(unit: Unit, values: dict[str, nn.Parameter]) -> None:
    for section in unit.sections:
        if section.masters is None:
            continue
        for param in section.params:
            if values[param.name].device.type != "meta":
                param.master.copy_(values[param.name])
        section.refresh_compute()
