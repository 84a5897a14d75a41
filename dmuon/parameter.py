"""One dedicated parameter: its shapes, its owner, and the two nn.Parameters that stand for it.

Outside forward and backward the module holds `master`: float32 on the owner, a meta tensor of the logical shape
elsewhere. Inside, it holds `compute`: a view into the unit's buffer, in `param_dtype`, the leaf that autograd sees.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from dmuon.assignment import Owner
from dmuon.collectives import Axis
from dmuon.torch_internals import mark_dedicated, waited


@dataclass(frozen=True)
class Slice:
    """How a parameter is cut over several ranks: what makes a DTensor of this rank's part.

    Attributes:
        mesh: these ranks, one-dimensional. placement: on it, `Shard(dim)` or `Replicate()`.
        shape, stride: of the whole parameter.
    """

    mesh: DeviceMesh
    placement: Placement
    shape: torch.Size
    stride: tuple[int, ...]

    def wrap(self, part: Tensor) -> DTensor:
        return DTensor.from_local(
            part, self.mesh, (self.placement,), run_check=False, shape=self.shape, stride=self.stride
        )

    @property
    def dim(self) -> int | None:
        """The dim that is cut, or None if every rank has the whole."""
        return self.placement.dim if isinstance(self.placement, Shard) else None


class Member(Protocol):
    """What a section is made of: a whole parameter, or one owner's part of it."""

    offset: int

    @property
    def name(self) -> str: ...

    @property
    def numel(self) -> int: ...

    @property
    def master(self) -> nn.Parameter: ...

    def set_master(self, part: Tensor | None) -> None: ...

    def set_compute(self, part: Tensor) -> None: ...

    def add_gradient(self, part: Tensor) -> None: ...

    def view(self, buffer: Tensor) -> Tensor: ...


@dataclass(eq=False)
class DedicatedParameter:
    """A matrix, a stack of matrices over dim 0, or several matrices fused along dim 0, with one owner.

    Attributes:
        name: the parameter's name in the model, clean of wrappers.
        places: every (module, attribute) that holds it; several when tied.
        logical_shape: shape of the whole parameter. `local_shape`: what this rank's modules compute with; the two
            differ under tensor parallelism only.
        dtype: what the parameter had before it was dedicated.
        split: rows of each fused matrix, summing to dim 0; empty if it is not fused.
        slice: how it is cut: by tensor parallelism, or among joint owners; None if it is not.
        axis: the ranks that have the other slices.
        offset: first element in its section's buffer.
    """

    name: str
    places: list[tuple[nn.Module, str]]
    logical_shape: torch.Size
    local_shape: torch.Size
    owner: Owner
    dtype: torch.dtype = torch.float32
    split: tuple[int, ...] = ()
    slice: Slice | None = None
    axis: Axis | None = None
    offset: int = 0
    master: nn.Parameter = field(init=False)
    compute: nn.Parameter = field(init=False)

    @property
    def numel(self) -> int:
        return self.local_shape.numel()

    @property
    def is_cut(self) -> bool:
        """Whether this rank has a part of it only, and others the rest."""
        return self.slice is not None and self.slice.dim is not None

    def set_master(self, part: Tensor | None) -> None:
        """`part`: float32 storage of the local shape on the owner, None elsewhere."""
        if part is None:
            self.master = nn.Parameter(torch.empty(self.logical_shape, dtype=torch.float32, device="meta"))
        else:
            self.master = nn.Parameter(self._wrapped(part))
        mark_dedicated(self.master)

    def set_compute(self, part: Tensor) -> None:
        """`part`: a view of the local shape into the section's compute copy."""
        self.compute = nn.Parameter(self._wrapped(part))

    def _wrapped(self, part: Tensor) -> Tensor:
        return part if self.slice is None else self.slice.wrap(part)

    def local_gradient(self, grad: Tensor) -> Tensor:
        """This rank's part of what autograd left in `compute.grad`, in the local shape."""
        if not isinstance(grad, DTensor):
            return grad
        assert self.slice is not None
        if tuple(grad.placements) != (self.slice.placement,):
            grad = grad.redistribute(placements=(self.slice.placement,))
        return waited(grad.to_local())

    def part_of(self, whole: Tensor) -> Tensor:
        """What this rank, an owner, keeps of a parameter as the model had it."""
        return local(whole)

    def by_owner(self, grad: Tensor) -> Iterator[tuple[Member, Tensor]]:
        """What is reduced to each owner, of a gradient as `local_gradient` gives it."""
        yield self, grad

    def add_gradient(self, part: Tensor) -> None:
        """Adds to `master.grad`, or makes it; `part` is kept."""
        if self.master.grad is None:
            self.master.grad = self._wrapped(part)
        else:
            local(self.master.grad).add_(part)

    def view(self, buffer: Tensor) -> Tensor:
        """This parameter's part of a flat buffer of its section."""
        return buffer[self.offset : self.offset + self.numel].view(self.local_shape)

    def matrices(self, tensor: Tensor) -> list[Tensor]:
        """Batches of the matrices to orthogonalise, or this rank's parts of them, each a [B, M, N] view."""
        tensor = local(tensor)
        if tensor.ndim == 3:
            return [tensor]
        return [piece.unsqueeze(0) for piece in tensor.split(self.split)] if self.split else [tensor.unsqueeze(0)]

    def register(self, param: nn.Parameter) -> None:
        """Makes `param` what the modules hold under this name."""
        for module, attribute in self.places:
            # Not setattr: registration checks cost more than the swap, and this runs for each unit and step.
            module._parameters[attribute] = param

    @property
    def is_registered(self) -> bool:
        """Whether every place still holds the master."""
        return all(module._parameters.get(attribute) is self.master for module, attribute in self.places)


def tensor_parallel_slice(name: str, param: nn.Parameter) -> Slice | None:
    """How `parallelize_module` has cut a parameter over the tp axis; None of a plain tensor.

    Raises:
        ValueError: it is cut in a way that ownership can't follow.
    """
    if not isinstance(param, DTensor):
        return None
    (placement,) = param.placements
    if not (placement.is_replicate() or type(placement) is Shard):
        raise ValueError(f"{name} is placed as {placement} on the tp axis: it must be Shard or Replicate there")
    return Slice(param.device_mesh, placement, param.shape, param.stride())


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor; a plain tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
