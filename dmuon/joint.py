"""A matrix that several ranks of one replicate row own jointly: each keeps a strip of its long side.

What is stored has the long side first, the matrix itself or its transpose: so strips lie behind one another in the
buffer of a whole matrix, and the Gram matrix of its short side is a sum over owners, whatever its orientation. Of a
matrix with more columns than rows, what the module holds are transposed views.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from dmuon.assignment import Owner
from dmuon.collectives import DataParallelAxes
from dmuon.joint_assignment import members
from dmuon.parameter import DedicatedParameter, Member, Slice
from dmuon.section import Section


@dataclass(eq=False)
class JointParameter(DedicatedParameter):
    """A matrix with several owners. Outside forward its master is a DTensor over them on each; meta elsewhere.

    Attributes:
        owner: the first one; the others follow on the shard axis.
        axis: the owners, on one of them; `mesh` is the same.
    """

    num_owners: int = 1
    mesh: DeviceMesh | None = None
    strips: list[Strip] = field(init=False)

    def __post_init__(self) -> None:
        if self.mesh is not None:
            rows, cols = self.logical_shape
            stride = (cols, 1) if self.dim == 0 else (1, rows)
            self.slice = Slice(self.mesh, Shard(self.dim), self.logical_shape, stride)
        self.set_master(None)
        owners = members(self.owner, self.num_owners)
        self.strips = [Strip(self, owner, index) for index, owner in enumerate(owners)]

    @property
    def dim(self) -> int:
        """The long side, which is cut."""
        return 0 if self.logical_shape[0] >= self.logical_shape[1] else 1

    @property
    def strip_shape(self) -> tuple[int, int]:
        """As stored: long side first."""
        return self.logical_shape[self.dim] // self.num_owners, self.logical_shape[1 - self.dim]

    def set_compute(self, part: Tensor) -> None:
        """`part`: [numel], all strips one behind the other."""
        self.compute = nn.Parameter(self.turned(part.view(-1, self.strip_shape[1])))

    def local_gradient(self, grad: Tensor) -> Tensor:
        """Long side first."""
        return self.turned(grad)

    def by_owner(self, grad: Tensor) -> Iterator[tuple[Member, Tensor]]:
        yield from zip(self.strips, grad.split(self.strip_shape[0]), strict=True)

    def part_of(self, whole: Tensor) -> Tensor:
        assert self.axis is not None
        return whole.chunk(self.num_owners, self.dim)[self.axis.index]

    def turned(self, matrix: Tensor) -> Tensor:
        """From the orientation of the model to that of storage, and back."""
        return matrix if self.dim == 0 else matrix.mT


@dataclass(eq=False)
class Strip:
    """What one owner keeps of a matrix: [L / g, n] of its long side L, the `index`-th of g."""

    whole: JointParameter
    owner: Owner
    index: int
    offset: int = 0

    @property
    def name(self) -> str:
        return f"{self.whole.name}, strip {self.index}"

    @property
    def numel(self) -> int:
        return torch.Size(self.whole.strip_shape).numel()

    @property
    def master(self) -> nn.Parameter:
        """Of the whole matrix."""
        return self.whole.master

    def set_master(self, part: Tensor | None) -> None:
        if part is not None:
            self.whole.set_master(part)

    def set_compute(self, part: Tensor) -> None:
        """What modules compute with is the whole matrix."""

    def add_gradient(self, part: Tensor) -> None:
        self.whole.add_gradient(part)

    def view(self, buffer: Tensor) -> Tensor:
        """As the model has it."""
        return self.whole.turned(buffer[: self.numel].view(self.whole.strip_shape))


class StripSection(Section):
    """One strip. Its owner column keeps it apart from the whole matrix, in which every rank has it while in use."""

    def __init__(self, name: str, strip: Strip, axes: DataParallelAxes, device: torch.device) -> None:
        super().__init__(name, strip.owner, [strip], axes, device)
        self.strip = strip
        assert self.numel == strip.numel, "a strip ends where the next one begins"

    @property
    def is_gathered(self) -> bool:
        return True

    def set_gathered(self, flat: Tensor) -> None:
        self._gathered = flat.data

    def outgoing(self) -> Tensor:
        if self.compute is not None:
            self._gathered.copy_(self.compute)
        return self._gathered
