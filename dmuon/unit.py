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
from dmuon.collectives import DataParallelAxes, Wait, nothing
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
        num_flags: elements behind the gradients in a reduction: whether any rank used each parameter.
        compute: flat buffer in `param_dtype`, from `build_compute` on. Persistent in the column, without storage
            elsewhere unless unsharded.
    """

    def __init__(
        self, owner: Owner, params: Sequence[DedicatedParameter], axes: DataParallelAxes, device: torch.device
    ) -> None:
        self.owner, self.params, self.axes, self.device = owner, list(params), axes, device
        self.in_column = axes.shard.index == owner.shard
        self.is_owner = self.in_column and axes.replicate.index == owner.replicate
        self.numel = 0
        for param in self.params:
            param.offset = self.numel
            self.numel += _aligned(param.numel)
        self.has_gaps = self.numel > sum(param.numel for param in self.params)
        self.num_flags = _aligned(len(self.params)) if axes.world_size > 1 else 0
        self.compute: Tensor | None = None
        self.masters: Tensor | None = None
        if self.is_owner:
            self.masters = torch.zeros(self.numel, dtype=torch.float32, device=device)
        for param in self.params:
            param.set_master(None if self.masters is None else param.view(self.masters))
        self._storage_bytes = 0
        self._publish: Wait | None = None

    def build_compute(self, param_dtype: torch.dtype) -> None:
        """Makes the compute copy and its leaves; called once, before the first forward."""
        if self.masters is not None and param_dtype == torch.float32:
            self.compute = self.masters
        else:
            self.compute = torch.zeros(self.numel, dtype=param_dtype, device=self.device)
        for param in self.params:
            # .data: a version counter of its own, so that a refill before backward passes autograd's check.
            param.compute = nn.Parameter(param.view(self.compute.data))
        self._storage_bytes = self.compute.untyped_storage().nbytes()
        self.free()

    def allocate(self) -> None:
        if not self.in_column:
            self.buffer.untyped_storage().resize_(self._storage_bytes)

    def free(self) -> None:
        if not self.in_column:
            self.buffer.untyped_storage().resize_(0)

    @property
    def buffer(self) -> Tensor:
        """`compute`, once it exists, for collectives."""
        assert self.compute is not None
        return self.compute.data

    def unshard(self) -> Wait:
        """Starts filling `compute`. In the column it waits for what was published first, without holding up compute."""
        self.allocate()
        publish, self._publish = self._publish or nothing, None

        def broadcast() -> Wait:
            publish()
            return self.axes.shard.broadcast(self.buffer, self.owner.shard)

        if self.axes.unshard_lane is not None:
            return self.axes.unshard_lane.run(broadcast)
        return publish if self.axes.shard.size == 1 else broadcast()

    @torch.no_grad()
    def refresh_compute(self) -> None:
        """Master -> compute copy, on the owner: the only direction there is."""
        if self.masters is not None and self.masters is not self.compute:
            self.buffer.copy_(self.masters)

    def publish(self) -> None:
        """Starts sending the owner's compute copy along the owner column."""
        if self.in_column and self.axes.replicate.size > 1:
            self._publish = self.axes.replicate.broadcast(self.buffer, self.owner.replicate)

    def wait_publish(self) -> None:
        if self._publish is not None:
            self._publish()
            self._publish = None


class Reduction:
    """The gradients of one unit on their way to the owners: first over shard, then along each owner's column.

    Behind the gradients travels one element a parameter that says whether any rank used it.
    """

    def __init__(self, unit: Unit, grads: dict[DedicatedParameter, Tensor]) -> None:
        self._unit, self._used = unit, grads.keys()
        self._buffers: list[Tensor] = []
        self._waits: list[Wait] = []
        # Kept until the end: what the first stage gathers is read on another stream or thread.
        self._first_stages: list[Wait] = []
        for section in unit.sections:
            buffer = self._filled(section, grads)
            self._buffers.append(buffer)
            self._waits.append(self._start(section, buffer))

    def _filled(self, section: Section, grads: dict[DedicatedParameter, Tensor]) -> Tensor:
        present = [param for param in section.params if param in grads]
        complete = len(present) == len(section.params) and not section.has_gaps
        make = torch.empty if complete else torch.zeros
        flags = section.num_flags
        buffer = make(section.numel + flags, dtype=self._unit.reduce_dtype, device=section.device)
        for param in present:
            param.view(buffer).copy_(grads[param])
        if flags and len(present) == len(section.params):
            buffer[section.numel :].fill_(1)
        elif flags:
            used = [float(param in grads) for param in section.params] + [0.0] * (flags - len(section.params))
            buffer[section.numel :].copy_(torch.tensor(used))
        return buffer

    def _start(self, section: Section, buffer: Tensor) -> Wait:
        over_shard = section.axes.shard.reduce(buffer, section.owner.shard)
        self._first_stages.append(over_shard)

        def along_column() -> Wait:
            over_shard()
            if not section.in_column:
                return nothing
            return section.axes.replicate.reduce(buffer, section.owner.replicate)

        if section.axes.reduce_lane is not None:
            return section.axes.reduce_lane.run(along_column)
        return over_shard if section.axes.replicate.size == 1 else along_column()

    def wait(self) -> None:
        """Both stages are over and the buffers are nobody else's; on an owner they hold the sum."""
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
            # An owner that has used a parameter itself need not read the flag, which would make the host wait.
            flags = buffer[section.numel :]
            used = [p in self._used or (flags.numel() and flags[i].item() > 0) for i, p in enumerate(section.params)]
            mean = buffer.div_(section.axes.world_size).float()
            for param, is_used in zip(section.params, used, strict=True):
                if not (is_used and param.master.requires_grad):
                    continue
                grad = param.view(mean)
                if param.master.grad is None:
                    param.master.grad = grad
                else:
                    param.master.grad.add_(grad)
        self._buffers, self._first_stages = [], []


class Unit:
    """Moves between SHARDED (masters registered) and UNSHARDED (compute parameters registered).

    Attributes:
        boundaries: the modules around whose forward the unit is unsharded; several where a tied matrix has several.
        owes_reduction: a backward pass without synchronisation left gradients to be reduced on some rank.
    """

    param_dtype: torch.dtype
    reduce_dtype: torch.dtype

    def __init__(
        self,
        name: str,
        boundaries: Sequence[nn.Module],
        params: Sequence[DedicatedParameter],
        axes: DataParallelAxes,
        device: torch.device,
    ) -> None:
        self.name, self.boundaries, self.params = name, list(boundaries), list(params)
        owners = sorted({param.owner for param in params})
        self.sections = [Section(owner, [p for p in params if p.owner == owner], axes, device) for owner in owners]
        self.state = UnitState.SHARDED
        self.owes_reduction = False
        self._num_trainable = len(self.params)
        self._waits: list[Wait] = []
        self._grads: dict[DedicatedParameter, Tensor] = {}
        self._accumulated: dict[DedicatedParameter, Tensor] = {}
        for param in self.params:
            param.register(param.master)

    def build_compute(
        self, param_dtype: torch.dtype, reduce_dtype: torch.dtype, complete: Callable[[Unit], None]
    ) -> None:
        """Makes the compute copies. `complete(self)` is called when every parameter has its gradient of a backward."""
        self.param_dtype, self.reduce_dtype = param_dtype, reduce_dtype
        for section in self.sections:
            section.build_compute(param_dtype)
            section.refresh_compute()

        def hook_of(param: DedicatedParameter) -> Callable[[Tensor], None]:
            def take(compute: Tensor) -> None:
                assert compute.grad is not None
                self._grads[param] = compute.grad
                # Taken here, before anything can clear it: the reduction is the gradient's only reader.
                compute.grad = None
                if len(self._grads) == self._num_trainable:
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
            self._num_trainable = 0
            for param in self.params:
                # A person freezes what the module shows outside of forward.
                if param.compute.requires_grad != param.master.requires_grad:
                    param.compute.requires_grad_(param.master.requires_grad)
                self._num_trainable += param.master.requires_grad
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
    def is_trainable(self) -> bool:
        return any(param.master.requires_grad for param in self.params)

    @property
    def has_gradients(self) -> bool:
        return bool(self._grads)

    def reduce(self) -> Reduction:
        """Hands over the gradients of this backward pass and those kept before; what no rank used stays without."""
        grads, self._grads = self._grads, {}
        kept, self._accumulated, self.owes_reduction = self._accumulated, {}, False
        for param, grad in grads.items():
            kept[param] = kept[param].add_(grad) if param in kept else grad
        return Reduction(self, kept)

    @torch.no_grad()
    def keep_gradients(self) -> None:
        """Adds the gradients of this backward pass to those of earlier ones, on this rank alone, in `reduce_dtype`."""
        grads, self._grads, self.owes_reduction = self._grads, {}, True
        for param, grad in grads.items():
            if param in self._accumulated:
                self._accumulated[param].add_(grad)
            else:
                self._accumulated[param] = grad.to(self.reduce_dtype)

    def discard_gradients(self) -> None:
        """Drops what the backward pass under way has brought."""
        self._grads = {}

    def discard_accumulated(self) -> None:
        """Drops what backward passes without synchronisation have left."""
        self._accumulated, self.owes_reduction = {}, False


def _aligned(numel: int) -> int:
    return math.ceil(numel / ALIGNMENT) * ALIGNMENT
