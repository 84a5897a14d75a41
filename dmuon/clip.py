"""One gradient norm over the whole model, whatever holds each gradient, and clipping by it.

Shape legend: R rows of a parameter's dim 0, K elements of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from dmuon.collectives import Axis
from dmuon.determinism import ReplicateRows, is_deterministic, replicate_rows
from dmuon.hooks import find_runtime, reshard
from dmuon.joint import JointParameter
from dmuon.parameter import local
from dmuon.torch_internals import foreach_mul_, foreach_norm, is_dedicated, local_shard

POLICIES = ("all", "symmetric", "none")

# Bounds the float64 workspace of the sum by rows: elements at a time, 32 MiB of them.
_MAX_CHUNK_NUMEL = 1 << 22
# Longer rows are summed in blocks of this many columns. A constant, for it decides the bits.
_BLOCK_COLUMNS = 1 << 16


@torch.no_grad()
def clip_grad_norm_(model: nn.Module, max_norm: float | None, policy: str = "all") -> Tensor:
    """Measures the joint 2-norm of all gradients and scales them so that it is at most `max_norm`.

    Dedicated gradients count once, at their owner; shards once each; a replicated gradient once. One all-reduce.
    Works on plain FSDP2 models as well. After `set_deterministic` the norm's bits are the same on every mesh.

    Args:
        model: after backward.
        max_norm: None leaves the gradients as they are.
        policy: whose gradients are scaled; the norm is that of all in any case. "all"; "symmetric": only what AdamW
            updates, for Muon's update depends on the scale of a gradient only in how its momentum weighs one step
            against others; "none": measure only.

    Returns:
        The norm before scaling: 0-dim float32, equal on all ranks. If it is not finite nothing was scaled.

    Raises:
        ValueError: no such policy; the model is on fewer ranks than the job has; or, after `set_deterministic`, a
            parameter sharded along another dim than 0.
    """
    if policy not in POLICIES:
        raise ValueError(f"policy = {policy!r}: must be one of {', '.join(POLICIES)}")
    reshard(model)
    norm = _squared_norm(model).sqrt()
    scaled = [param for param in _with_gradients(model) if policy == "all" or not is_dedicated(param)]
    grads = [grad for param in scaled if (grad := local(_grad(param))).numel() > 0]
    if max_norm is not None and policy != "none" and grads:
        scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        # Selected on the device: reading the norm here would make the host wait.
        foreach_mul_(grads, torch.where(norm.isfinite(), scale, 1.0).float())
    return norm.float()


def _squared_norm(model: nn.Module) -> Tensor:
    """0-dim float64, equal on all ranks."""
    device = next((param.device for param in model.parameters() if param.device.type != "meta"), torch.device("cpu"))
    counted = _Counted(model)
    squares = _squares_of_rows(model, counted, device) if is_deterministic(model) else _square(model, counted, device)
    num_ranks = _world_size(model)
    if num_ranks > 1:
        if num_ranks != dist.get_world_size():
            raise ValueError(
                f"this model is on meshes of {num_ranks} ranks, and the job has {dist.get_world_size()}: the norm is "
                "summed over all of them. Make the meshes of the job as large as the model's, tp included"
            )
        dist.all_reduce(squares)
    return _sum_by_tree(squares)


class _Counted:
    """Which of the ranks that hold the same values counts them: the first along each axis that repeats them."""

    def __init__(self, model: nn.Module) -> None:
        runtime = find_runtime(model)
        self.tp = None if runtime is None else runtime.axes.tp
        self._rows = replicate_rows(model)
        self._is_first: dict[tuple[object, ...], bool] = {}

    def here(self, param: nn.Parameter) -> bool:
        dedicated = is_dedicated(param)
        if not isinstance(param, DTensor):
            if dedicated:
                return self.tp is None or self.tp.index == 0
            return not dist.is_initialized() or dist.get_rank() == 0
        key = (id(param.device_mesh), param.placements, dedicated)
        if key not in self._is_first:
            # A dedicated parameter has its gradient in one replicate row, its owner's.
            self._is_first[key] = _is_first(param, [self.tp] if dedicated else [self.tp, self._rows])
        return self._is_first[key]


def _is_first(param: DTensor, axes: Sequence[Axis | ReplicateRows | None]) -> bool:
    """`axes`: those that the parameter's mesh may not know, such as the rows of FSDP2 on the shard axis alone."""
    coordinate = param.device_mesh.get_coordinate()
    assert coordinate is not None
    first = all(index == 0 for index, place in zip(coordinate, param.placements, strict=True) if place == Replicate())
    known = set(param.device_mesh.mesh.flatten().tolist())
    unknown = [axis for axis in axes if axis is not None and not set(axis.ranks) <= known]
    return first and all(axis.index == 0 for axis in unknown)


def _square(model: nn.Module, counted: _Counted, device: torch.device) -> Tensor:
    """This rank's part of the squared norm: [1] float64, summed in the device's own order."""
    grads = [local(_grad(param)) for param in _with_gradients(model) if counted.here(param)]
    grads = [grad for grad in grads if grad.numel() > 0]
    if not grads:  # more ranks than parameters
        return torch.zeros(1, dtype=torch.float64, device=device)
    return torch.stack(foreach_norm(grads)).square().sum(0, keepdim=True)


def _squares_of_rows(model: nn.Module, counted: _Counted, device: torch.device) -> Tensor:
    """This rank's part of the squared norm of each row of each parameter, one float64 each, zeros elsewhere.

    FSDP2 cuts dim 0 only, so that the part of a row that a tensor-parallel rank has is whole somewhere on every mesh;
    a dedicated parameter takes one place for each such rank. Adding zeros is exact in any order: after an all-reduce
    all ranks hold the same vector on every data-parallel mesh.
    """
    names = {param: name for name, param in model.named_parameters()}
    slices = _slices(model)
    places = [_Place(param, names[param], *slices.get(param, (1, 0))) for param in names]
    squares = torch.zeros(max(1, sum(place.num for place in places)), dtype=torch.float64, device=device)
    begin = 0
    for param, place in zip(names, places, strict=True):
        mine = squares[begin + place.first : begin + place.num]
        begin += place.num
        if param.grad is None or param.device.type == "meta" or not counted.here(param):
            continue
        grad = local(param.grad)
        if grad.numel() == 0:
            continue
        rows = squares_of_rows(grad)
        if place.is_single:
            mine[0] = _sum_by_tree(rows)
        else:
            mine[: len(rows)] = rows
    return squares


class _Place:
    """Where a parameter's squares go: `num` places, this rank's from `first` on, or in that one alone if `is_single`.

    Ranks that share a row, or a dedicated parameter, have places of their own: what they are summed in is the tree's
    order, and not that of an all-reduce. `num_slices`, `index`: of a dedicated one, see `_slices`.
    """

    def __init__(self, param: nn.Parameter, name: str, num_slices: int, index: int) -> None:
        self.is_single = is_dedicated(param) or param.ndim == 0
        num_rows = 1 if self.is_single else param.shape[0]
        self.num, self.first = num_rows, 0
        if is_dedicated(param):
            self.num, self.first = num_slices, index
        elif isinstance(param, DTensor):
            if not self.is_single:
                _check_rows_are_whole(name, param)
                self.first = local_shard(param)[1][0]
            part, num_parts = _tensor_parallel_part(param, 0 if self.is_single else 1)
            self.num, self.first = num_rows * num_parts, num_rows * part + self.first


def _slices(model: nn.Module) -> dict[nn.Parameter, tuple[int, int]]:
    """Of dedicated parameters: among how many ranks they may be cut, known on all ranks alike, and this one's place."""
    runtime = find_runtime(model)
    if runtime is None:
        return {}
    tp = runtime.axes.tp
    found = {}
    for param in (param for unit in runtime.units for param in unit.params):
        num_owners = param.num_owners if isinstance(param, JointParameter) else 1
        index = 0 if param.axis is None else param.axis.index
        found[param.master] = (num_owners if tp is None else tp.size, index)
    return found


def _tensor_parallel_part(param: DTensor, first_dim: int) -> tuple[int, int]:
    """(index, number) of the parts that the dims from `first_dim` on are cut into."""
    part, num_parts = 0, 1
    coordinate = param.device_mesh.get_coordinate()
    assert coordinate is not None
    for axis, place in enumerate(param.placements):
        if place != Replicate() and _cut_dim(place) >= first_dim:
            size = param.device_mesh.size(axis)
            part, num_parts = part * size + coordinate[axis], num_parts * size
    return part, num_parts


def squares_of_rows(tensor: Tensor) -> Tensor:
    """Sum of squares of each row of dim 0: [R] float64.

    The bits of a row depend on its elements alone: neither on how many rows there are nor on the device, since every
    operation is elementwise.
    """
    values_RK = tensor.reshape(1, 1) if tensor.ndim == 0 else tensor.flatten(1) if tensor.ndim > 1 else tensor[:, None]
    num_rows = max(1, _MAX_CHUNK_NUMEL // min(values_RK.shape[1], _BLOCK_COLUMNS))
    return torch.cat([_squares_of_chunk(chunk_RK) for chunk_RK in values_RK.split(num_rows)])


def _squares_of_chunk(values_RK: Tensor) -> Tensor:
    blocks = [_sum_by_tree(block_RK.double().square_()) for block_RK in values_RK.split(_BLOCK_COLUMNS, dim=1)]
    return _sum_by_tree(torch.stack(blocks, dim=1))


def _sum_by_tree(values: Tensor) -> Tensor:
    """Sums the last dim by halves, an odd last element carried on; the order depends on the dim's size alone."""
    while values.shape[-1] > 1:
        half = values.shape[-1] // 2
        folded = values[..., :half] + values[..., half : 2 * half]
        values = torch.cat([folded, values[..., 2 * half :]], dim=-1) if values.shape[-1] % 2 else folded
    return values[..., 0]


def _cut_dim(place: Any) -> int:
    """Of a shard, or of what FSDP2 makes of one that tensor parallelism has cut already, which is no Shard."""
    return int(place.dim)


def _check_rows_are_whole(name: str, param: DTensor) -> None:
    """FSDP2's axis is the first that cuts; behind it there can be tensor parallelism's."""
    first = next((place for place in param.placements if place != Replicate()), None)
    if first is not None and _cut_dim(first) != 0:
        raise ValueError(
            f"{name} is placed as {first}: a norm with the same bits on every mesh needs parameters that are cut "
            "along dim 0 only; leave out shard_placement_fn, or set_deterministic"
        )


def _with_gradients(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.grad is not None and param.device.type != "meta"]


def _grad(param: nn.Parameter) -> Tensor:
    assert param.grad is not None
    return param.grad


def _world_size(model: nn.Module) -> int:
    """Ranks that hold parts of this model; they must be the default group, as the meshes of one job are."""
    runtime = find_runtime(model)
    if runtime is not None:
        return runtime.axes.world_size * (1 if runtime.axes.tp is None else runtime.axes.tp.size)
    meshes = [param.device_mesh for param in model.parameters() if isinstance(param, DTensor)]
    if not meshes:
        return 1
    largest = max(meshes, key=lambda mesh: mesh.size())  # what tensor parallelism leaves whole is on a smaller one
    rows = replicate_rows(model)
    if rows is None or set(rows.ranks) <= set(largest.mesh.flatten().tolist()):
        return largest.size()
    return largest.size() * len(rows.ranks)
