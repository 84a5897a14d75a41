"""One hook boundary: the dedicated parameters of, usually, one transformer block, and their buffers.

A unit's parameters are grouped by owner into sections. A section is the grain of every collective: one flat buffer,
broadcast from its owner before use, and one flat gradient, reduced to its owner after use. Those of a unit go out
together.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable, Collection, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from dmuon.annotation import annotate
from dmuon.collectives import DataParallelAxes, Wait, nothing
from dmuon.joint import JointParameter, StripSection
from dmuon.parameter import DedicatedParameter
from dmuon.reduction import GradientLayout, Reduction
from dmuon.section import Section


class UnitState(enum.Enum):
    SHARDED = enum.auto()
    UNSHARDING = enum.auto()
    UNSHARDED = enum.auto()


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
        self.name, self.boundaries, self.params, self.axes = name, list(boundaries), list(params), axes
        self.sections = _sections(name, params, axes, device)
        self._owned = GradientLayout([section for section in self.sections if section.is_owner])
        self._sent = GradientLayout([section for section in self.sections if not section.is_owner])
        self.state = UnitState.SHARDED
        self.owes_reduction = False
        # One storage for all that this rank computes with and does not keep, without memory unless unsharded.
        self._away: torch.UntypedStorage | None = None
        self._away_bytes = 0
        self._wait: Wait | None = None
        self._published: Wait | None = None
        self._grads: dict[DedicatedParameter, Tensor] = {}
        self._accumulated: dict[DedicatedParameter, Tensor] = {}
        for param in self.params:
            param.register(param.master)

    def build_compute(self, param_dtype: torch.dtype, reduce_dtype: torch.dtype) -> None:
        """Makes the compute copies."""
        self.param_dtype, self.reduce_dtype = param_dtype, reduce_dtype
        gathered = [section for section in self.sections if section.is_gathered]
        if gathered:
            flat = torch.empty(sum(section.numel for section in gathered), dtype=param_dtype, device=gathered[0].device)
            begin = 0
            for section in gathered:
                section.set_gathered(flat[begin : begin + section.numel])
                if isinstance(section, StripSection) and section.strip.index == 0:
                    whole = section.strip.whole
                    whole.set_compute(flat[begin : begin + whole.numel].data)  # all strips, one behind the other
                begin += section.numel
            self._away, self._away_bytes = flat.untyped_storage(), flat.untyped_storage().nbytes()
            self._away.resize_(0)
        for section in self.sections:
            if section.masters is not None and param_dtype == torch.float32:
                section.set_compute(section.masters)
            elif section.in_column:
                section.set_compute(torch.zeros(section.numel, dtype=param_dtype, device=section.device))
            section.refresh_compute()

        for param in self.params:
            param.compute.register_post_accumulate_grad_hook(_gradient_hook(self, param))

    def take(self, param: DedicatedParameter, compute: Tensor) -> None:
        """Takes the gradient of one parameter."""
        assert compute.grad is not None
        grad = param.local_gradient(compute.grad)
        # A second time where several graphs meet in one backward: each reentrant recomputation has its own.
        self._grads[param] = self._grads[param] + grad if param in self._grads else grad
        # Taken here, before anything can clear it: the reduction is the gradient's only reader.
        compute.grad = None

    def unshard(self) -> None:
        """Starts filling the compute buffers."""
        if self.state is UnitState.SHARDED:
            if self._away is not None:
                self._away.resize_(self._away_bytes)
            with annotate(f"dmuon::unshard {self.name}"):
                self._wait = self._start_unshard()
            self.state = UnitState.UNSHARDING

    def _start_unshard(self) -> Wait:
        """In the columns it waits for what was published first, without holding up compute."""
        published, self._published = self._published or nothing, None
        if self.axes.unshard_lane is not None:
            return self.axes.unshard_lane.run(partial(self._broadcast_after, published))
        return published if self.axes.shard.size == 1 else self._broadcast_after(published)

    def _broadcast_after(self, wait: Wait) -> Wait:
        wait()
        return self.axes.shard.broadcast([(section.outgoing(), section.owner.shard) for section in self.sections])

    def publish(self, *, renewed: Collection[Section] = ()) -> None:
        """Renews the compute copies of owners, but for those `renewed`, and sends them along their columns."""
        for section in self.sections:
            if section not in renewed:
                section.refresh_compute()
        columns = [(s.compute, s.owner.replicate) for s in self.sections if s.in_column and s.compute is not None]
        if self.axes.replicate.size > 1 and columns:
            with annotate(f"dmuon::publish {self.name}"):
                self._published = self.axes.replicate.broadcast(columns)

    def wait_publish(self) -> None:
        if self._published is not None:
            with annotate(f"dmuon::wait publish {self.name}"):
                self._published()
            self._published = None

    def wait_unshard(self) -> None:
        """Makes the compute parameters usable and registers them."""
        self._follow_freezing()
        self.unshard()
        if self.state is UnitState.UNSHARDING:
            self._finish_unshard()
            for param in self.params:
                # A person freezes what the module shows outside of forward.
                if param.compute.requires_grad != param.master.requires_grad:
                    param.compute.requires_grad_(param.master.requires_grad)
                param.register(param.compute)
            self.state = UnitState.UNSHARDED

    def reshard(self) -> None:
        """Registers the masters and frees every buffer that is not a persistent copy."""
        if self.state is UnitState.SHARDED:
            return
        self._follow_freezing()
        # A storage must not be freed while a prefetched broadcast still writes to it.
        self._finish_unshard()
        for param in self.params:
            param.register(param.master)
        if self._away is not None:
            self._away.resize_(0)
        self.state = UnitState.SHARDED

    def _follow_freezing(self) -> None:
        """A person who freezes between passes changes what the module shows: the compute parameters of a unit that
        stayed unsharded for a backward."""
        if self.state is UnitState.UNSHARDED:
            for param in self.params:
                if param.master.requires_grad != param.compute.requires_grad:
                    param.master.requires_grad_(param.compute.requires_grad)

    def _finish_unshard(self) -> None:
        if self._wait is not None:
            with annotate(f"dmuon::wait unshard {self.name}"):
                self._wait()
            self._wait = None

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
        by_owner = dict(part for param, grad in kept.items() for part in param.by_owner(grad))
        return Reduction(self.name, self.sections, self.axes, self._sent, self._owned, by_owner, self.reduce_dtype)

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


def _sections(
    name: str, params: Sequence[DedicatedParameter], axes: DataParallelAxes, device: torch.device
) -> list[Section]:
    """In the order of their collectives: by owner, then the strips of each matrix that is owned jointly."""
    joint = [param for param in params if isinstance(param, JointParameter)]
    single = [param for param in params if not isinstance(param, JointParameter)]
    owners = sorted({param.owner for param in single})
    sections = [Section(name, owner, [p for p in single if p.owner == owner], axes, device) for owner in owners]
    return sections + [StripSection(name, strip, axes, device) for param in joint for strip in param.strips]


def _gradient_hook(unit: Unit, param: DedicatedParameter) -> Callable[[Tensor], None]:
    """Holds nothing alive: Python's collector does not look into a tensor's hooks, so that a cycle would stay."""
    unit_ref, param_ref = weakref.ref(unit), weakref.ref(param)

    def take(compute: Tensor) -> None:
        unit, param = unit_ref(), param_ref()
        assert unit is not None
        assert param is not None
        unit.take(param, compute)

    return take
