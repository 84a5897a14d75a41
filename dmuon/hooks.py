"""When a unit is told to do what: around forward, around backward, in recomputation, after an update.

Units are prefetched in the order in which the model defines them. At any time at most two units' weights and two
units' gradients are in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from dmuon.collectives import DataParallelAxes
from dmuon.torch_internals import in_backward, queue_backward_callback
from dmuon.unit import Reduction, Unit

_ATTRIBUTE = "_dmuon_runtime"


class Runtime:
    """What a model with dedicated parameters carries: its units and the state of the pass under way."""

    def __init__(self, units: Sequence[Unit], axes: DataParallelAxes, reshard_after_forward: bool) -> None:
        self.units = list(units)
        self.axes = axes
        self.reshard_after_forward = reshard_after_forward
        self._position = {unit: index for index, unit in enumerate(self.units)}
        self._in_backward = False
        self._awaiting_gradients: set[Unit] = set()
        self._reduced: set[Unit] = set()
        self._reductions: list[Reduction] = []
        for unit in self.units:
            self._attach(unit)

    def _attach(self, unit: Unit) -> None:
        unit.on_gradient(self._reduce)
        before_backward = _untraced(lambda _grad: self._before_backward(unit))
        unit.boundary.register_forward_pre_hook(_untraced(lambda *_: self._before_forward(unit)))
        unit.boundary.register_forward_hook(
            _untraced(lambda _module, _args, output: self._after_forward(unit, output, before_backward))
        )

    def _before_forward(self, unit: Unit) -> None:
        if not in_backward() and self._in_backward:
            self._reset_after_failure()
        unit.wait_unshard()
        if not self._in_backward:
            self._prefetch(self._position[unit] + 1)

    def _after_forward(self, unit: Unit, output: Any, before_backward: Callable[[Tensor], None]) -> None:
        if self._in_backward:
            return  # recomputation: the unit's backward follows at once
        needs_backward = False
        if torch.is_grad_enabled():
            for tensor in _tensors(output):
                if tensor.requires_grad:
                    needs_backward = True
                    tensor.register_hook(before_backward)
        if self.reshard_after_forward or not needs_backward:
            unit.reshard()

    def _before_backward(self, unit: Unit) -> None:
        self._enter_backward()
        if unit not in self._reduced:
            self._awaiting_gradients.add(unit)
            unit.wait_unshard()
            self._prefetch(self._position[unit] - 1)

    def _enter_backward(self) -> None:
        if not self._in_backward:
            self._in_backward = True
            queue_backward_callback(self._after_backward)

    def _prefetch(self, position: int) -> None:
        # A unit whose backward is over must not be filled again: nobody would free it.
        if 0 <= position < len(self.units) and self.units[position] not in self._reduced:
            self.units[position].unshard()

    def _reduce(self, unit: Unit) -> None:
        self._enter_backward()
        for reduction in self._reductions:
            reduction.reduce_between_rows()
        while len(self._reductions) > 1:
            self._reductions.pop(0).finish()
        self._reductions.append(unit.reduce())
        self._reduced.add(unit)
        unit.reshard()

    def _after_backward(self) -> None:
        for unit in reversed(self.units):
            used = unit in self._awaiting_gradients or unit.has_gradients
            if unit not in self._reduced and used and unit.trainable:
                self._reduce(unit)
        for reduction in self._reductions:
            reduction.finish()
        self._end_pass()

    def _reset_after_failure(self) -> None:
        """An exception inside backward leaves autograd's callbacks uncalled: drop what that pass left behind."""
        for reduction in self._reductions:
            reduction.wait()
        for unit in self.units:
            unit.discard_gradients()
        self._end_pass()

    def _end_pass(self) -> None:
        self._in_backward = False
        self._reductions = []
        self._awaiting_gradients.clear()
        self._reduced.clear()
        self.reshard()

    def reshard(self) -> None:
        """Brings every unit back to its masters."""
        for unit in self.units:
            unit.reshard()

    def publish(self, *, wait: bool) -> None:
        """After masters changed: renews the compute copies and sends them along the owner columns, in forward order."""
        self.reshard()
        for unit in self.units:
            for section in unit.sections:
                section.refresh_compute()
                section.publish()
        if wait:
            self.wait_publish()

    def wait_publish(self) -> None:
        for unit in self.units:
            for section in unit.sections:
                section.wait_publish()


def attach_runtime(model: nn.Module, runtime: Runtime) -> None:
    # Past nn.Module.__setattr__, which would register the boundaries' modules a second time.
    model.__dict__[_ATTRIBUTE] = runtime


def find_runtime(model: nn.Module) -> Runtime | None:
    """The runtime of a model that `dedicate_params` was called on, or None."""
    return model.__dict__.get(_ATTRIBUTE)


def reshard(model: nn.Module) -> None:
    """Registers masters and shards everywhere. FSDP2 leaves some modules' weights gathered after a forward without
    gradients, and a script that looks then would take them for parameters without a shard."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    runtime = find_runtime(model)
    if runtime is not None:
        runtime.reshard()


def _untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Hooks stay outside a compiled region: a person may compile the whole block, hooks included."""
    return torch.compiler.disable(function)


def _tensors(value: Any) -> Iterator[Tensor]:
    """Every tensor of a nested output."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
