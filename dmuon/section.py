"""The parameters of one unit that share one owner, or a part of one parameter: the grain of every collective."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from dmuon.assignment import Owner
from dmuon.collectives import DataParallelAxes
from dmuon.parameter import Member

# Starts of parameters in a buffer, in elements: 16 bytes in half precision, what matrix kernels and TMA ask for.
ALIGNMENT = 8


def aligned(numel: int) -> int:
    return math.ceil(numel / ALIGNMENT) * ALIGNMENT


class Section:
    """The parameters of one unit that share one owner.

    Attributes:
        name: the unit's.
        is_owner: this rank holds the masters. in_column: this rank is the owner or the owner's counterpart in another
            replicate row; it keeps a compute copy between steps and is the root of its row's broadcasts.
        masters: flat float32 storage of the masters, on the owner alone.
        num_flags: elements behind the gradients in a reduction: whether any rank used each parameter.
        compute: flat buffer in `param_dtype`, from `set_compute` on.
    """

    def __init__(
        self, name: str, owner: Owner, params: Sequence[Member], axes: DataParallelAxes, device: torch.device
    ) -> None:
        self.name = name
        self.owner, self.params, self.device = owner, list(params), device
        self.in_column = axes.shard.index == owner.shard
        self.is_owner = self.in_column and axes.replicate.index == owner.replicate
        self.numel = 0
        for param in self.params:
            param.offset = self.numel
            self.numel += aligned(param.numel)
        self.num_flags = aligned(len(self.params)) if axes.world_size > 1 else 0
        self.compute: Tensor | None = None
        self.masters: Tensor | None = None
        if self.is_owner:
            self.masters = torch.zeros(self.numel, dtype=torch.float32, device=device)
        for param in self.params:
            param.set_master(None if self.masters is None else param.view(self.masters))

    def set_compute(self, flat: Tensor) -> None:
        """Makes [numel] elements in `param_dtype` the compute copy, and its parts the leaves that autograd sees."""
        # .data: version counters of their own, so that a refill before backward passes autograd's check.
        self.compute = flat.data
        for param in self.params:
            param.set_compute(param.view(flat.data))

    @property
    def is_gathered(self) -> bool:
        """Whether what is broadcast arrives in memory that is freed after use."""
        return not self.in_column

    def set_gathered(self, flat: Tensor) -> None:
        """`flat`: [numel] elements of such memory, in `param_dtype`."""
        self.set_compute(flat)

    def outgoing(self) -> Tensor:
        """What travels along a row: all of it at its root, elsewhere where it arrives."""
        assert self.compute is not None
        return self.compute

    @torch.no_grad()
    def refresh_compute(self) -> None:
        """Master -> compute copy, on the owner: the only direction there is."""
        if self.masters is not None and self.compute is not None and not self.compute_is_master:
            self.compute.copy_(self.masters)

    @property
    def compute_is_master(self) -> bool:
        """Owner and float32: one storage serves as both."""
        return self.is_owner and self.compute is not None and self.compute.dtype == torch.float32
