"""One hook boundary: the dedicated parameters of, usually, one transformer block, and their buffers.

A unit's parameters are grouped by owner into sections. A section is the grain of every collective: one flat buffer,
broadcast from its owner before use, and one flat gradient, reduced to its owner after use.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from dmuon.assignment import Owner
from dmuon.collectives import DataParallelAxes, Wait
from dmuon.parameter import DedicatedParameter

# Starts of parameters in a buffer, in elements: 16 bytes in half precision, what matrix kernels and TMA ask for.
ALIGNMENT = 8


class UnitState(enum.Enum):
    SHARDED = enum.auto()
    UNSHARDING = enum.auto()
    UNSHARDED = enum.auto()


class Section:
    """The parameters of one unit that share one owner.

    Attributes:
        is_owner: this rank holds the masters. in_column: this rank is the owner or the owner's counterpart in another
            replicate row; it keeps a compute copy between steps and is the root of its row's broadcasts.
        masters: flat float32 storage of the masters, on the owner alone.
        compute: flat buffer in `param_dtype`. Persistent in the column, without storage elsewhere unless unsharded.
    """

    def __init__(
        self,
        owner: Owner,
        params: Sequence[DedicatedParameter],
        axes: DataParallelAxes,
        device: torch.device,
        param_dtype: torch.dtype,
    ) -> None:
        self.owner, self.params, self.axes = owner, list(params), axes
        self.in_column = axes.shard.index == owner.shard
        self.is_owner = self.in_column and axes.replicate.index == owner.replicate
        self.numel = 0
        for param in self.params:
            param.offset = self.numel
            self.numel += math.ceil(param.numel / ALIGNMENT) * ALIGNMENT
        self.masters: Tensor | None = None
        if self.is_owner:
            self.masters = torch.zeros(self.numel, dtype=torch.float32, device=device)
        if self.masters is not None and param_dtype == torch.float32:
            self.compute = self.masters
        else:
            self.compute = torch.zeros(self.numel, dtype=param_dtype, device=device)
        for param in self.params:
            param.set_master(None if self.masters is None else param.view(self.masters))
            # .data: a version counter of its own, so that a refill before backward passes autograd's check.
            param.compute = nn.Parameter(param.view(self.compute.data))
        self._storage_bytes = self.compute.untyped_storage().nbytes()
        self._publish: Wait | None = None
        self.free()

    def allocate(self) -> None:
        if not self.in_column:
            self.compute.untyped_storage().resize_(self._storage_bytes)

    def free(self) -> None:
        if not self.in_column:
            self.compute.untyped_storage().resize_(0)

    def unshard(self) -> Wait:
        self.wait_publish()
        self.allocate()
        return self.axes.shard.broadcast(self.compute.data, self.owner.shard)

    @torch.no_grad()
    def refresh_compute(self) -> None:
        """Master -> compute copy, on the owner: the only direction there is."""
        if self.masters is not None and self.masters is not self.compute:
            self.compute.copy_(self.masters)

    def publish(self) -> None:
        """Starts sending the owner's compute copy along the owner column."""
        if self.in_column:
            self._publish = self.axes.replicate.broadcast(self.compute.data, self.owner.replicate)

    def wait_publish(self) -> None:
        if self._publish is not None:
            self._publish()
            self._publish = None


class Reduction:
    """The gradients of one unit on their way to the owners: first over shard, then along each owner's column."""

    def __init__(self, unit: Unit, grads: dict[DedicatedParameter, Tensor]) -> None:
        self._unit = unit
        self._buffers: list[Tensor] = []
        self._waits: list[Wait] = []
        for section in unit.sections:
            buffer = torch.zeros(section.numel, dtype=unit.reduce_dtype, device=section.compute.device)
            for param in section.params:
                if param in grads:
                    param.view(buffer).copy_(grads[param])
            self._buffers.append(buffer)
            self._waits.append(section.axes.shard.reduce(buffer, section.owner.shard))
        self._between_rows = False

    def reduce_between_rows(self) -> None:
        """Second stage; its input is the result of the first, so the first is waited for here."""
        if self._between_rows:
            return
        self._between_rows = True
        for wait in self._waits:
            wait()
        self._waits = []
        for index, section in enumerate(self._unit.sections):
            if section.in_column:
                self._waits.append(section.axes.replicate.reduce(self._buffers[index], section.owner.replicate))
            else:
                self._buffers[index] = self._buffers[index].new_empty(0)

    def wait(self) -> None:
        """Both stages are over and the buffers are nobody else's; on an owner they hold the sum."""
        self.reduce_between_rows()
        for wait in self._waits:
            wait()
        self._waits = []

    @torch.no_grad()
    def finish(self) -> None:
        """Adds the mean over the data-parallel ranks to `master.grad` on each owner."""
        self.wait()
        for section, buffer in zip(self._unit.sections, self._buffers, strict=True):
            if not section.is_owner:
                continue
            mean = buffer.div_(section.axes.world_size).float()
            for param in section.params:
                if not param.master.requires_grad:
                    continue
                grad = param.view(mean)
                if param.master.grad is None:
                    param.master.grad = grad
                else:
                    param.master.grad.add_(grad)
        self._buffers = []


class Unit:
    """Moves between SHARDED (masters registered) and UNSHARDED (compute parameters registered)."""

    def __init__(
        self,
        name: str,
        boundary: nn.Module,
        params: Sequence[DedicatedParameter],
        axes: DataParallelAxes,
        device: torch.device,
        param_dtype: torch.dtype,
        reduce_dtype: torch.dtype,
    ) -> None:
        self.name, self.boundary, self.params = name, boundary, list(params)
        self.param_dtype, self.reduce_dtype = param_dtype, reduce_dtype
        owners = sorted({param.owner for param in params})
        self.sections = [
            Section(owner, [p for p in params if p.owner == owner], axes, device, param_dtype) for owner in owners
        ]
        self.state = UnitState.SHARDED
        self._waits: list[Wait] = []
        self._grads: dict[DedicatedParameter, Tensor] = {}
        for param in self.params:
            param.register(param.master)

    def on_gradient(self, complete: Callable[[Unit], None]) -> None:
        """Calls `complete(self)` when every parameter of the unit has its gradient of this backward pass."""

        def hook_of(param: DedicatedParameter) -> Callable[[Tensor], None]:
            def take(compute: Tensor) -> None:
                assert compute.grad is not None
                self._grads[param] = compute.grad
                # Taken here, before anything can clear it: the reduction is the gradient's only reader.
                compute.grad = None
                if len(self._grads) == len(self.trainable):
                    complete(self)

            return take

        for param in self.params:
            param.compute.register_post_accumulate_grad_hook(hook_of(param))

    def unshard(self) -> None:
        """Starts filling the compute buffers."""
        if self.state is UnitState.SHARDED:
            self._waits = [section.unshard() for section in self.sections]
            self.state = UnitState.UNSHARDING

    def wait_unshard(self) -> None:
        """Makes the compute parameters usable and registers them."""
        self.unshard()
        if self.state is UnitState.UNSHARDING:
            self._finish_broadcasts()
            for param in self.params:
                # A person freezes what the module shows outside of forward.
                param.compute.requires_grad_(param.master.requires_grad)
                param.register(param.compute)
            self.state = UnitState.UNSHARDED

    def reshard(self) -> None:
        """Registers the masters and frees every buffer that is not a persistent copy."""
        if self.state is UnitState.SHARDED:
            return
        # A storage must not be freed while a prefetched broadcast still writes to it.
        self._finish_broadcasts()
        for param in self.params:
            param.register(param.master)
        for section in self.sections:
            section.free()
        self.state = UnitState.SHARDED

    def _finish_broadcasts(self) -> None:
        for wait in self._waits:
            wait()
        self._waits = []

    @property
    def trainable(self) -> list[DedicatedParameter]:
        return [param for param in self.params if param.master.requires_grad]

    @property
    def has_gradients(self) -> bool:
        return bool(self._grads)

    def reduce(self) -> Reduction:
        """Hands the gradients over to their reduction; those that this backward pass did not produce count as zero."""
        grads, self._grads = self._grads, {}
        return Reduction(self, grads)

    def discard_gradients(self) -> None:
        self._grads = {}
