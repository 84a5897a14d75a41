"""When a unit is told to do what: around forward, around backward, in recomputation, after an update.

Units are prefetched in the order of the last forward. At any time at most two units' weights and two units' gradients
are in flight.

Every rank fills and reduces the same units in the same order, whatever its own graph is: that of the forward, from
its end. Each call of a unit with gradients enabled is visited in a backward, by its own hook or, where a rank's graph
does not lead there, when backward moves past it; and each unit is reduced once all its calls are behind. So a
parameter, or a whole block, that only some ranks use cannot make collectives differ. Which blocks reentrant checkpoints
compute again must be the same on every rank, and which blocks a second backward through a kept graph comes to: nothing
is known of either until then.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from dmuon.collectives import DataParallelAxes
from dmuon.plan import Plan
from dmuon.torch_internals import in_backward, queue_backward_callback
from dmuon.unit import Reduction, Unit

_ATTRIBUTE = "_dmuon_runtime"


@dataclass(frozen=True, eq=False)
class Call:
    """One forward of a unit with gradients. begin, end: times on the clock of all such calls. index: the place among
    those since the last backward, or among others if it ran inside a backward or before an earlier one."""

    unit: Unit
    begin: int
    end: int
    index: int


class Runtime:
    """What a model with dedicated parameters carries: its units and the state of the pass under way.

    Attributes:
        dtypes_of: (param_dtype, reduce_dtype) of a unit, once `fully_shard` has been called.
        sync_gradients: backward reduces gradients; if not it keeps them on each rank.
        is_filled: masters hold values; not so between `dedicate_params` on the meta device and `materialize`.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        axes: DataParallelAxes,
        plan: Plan,
        reshard_after_forward: bool,
        prepare: Callable[[Runtime], None],
        dtypes_of: Callable[[Unit], tuple[torch.dtype, torch.dtype]],
        is_filled: bool,
    ) -> None:
        self.units, self.axes, self.plan = list(units), axes, plan
        self.reshard_after_forward, self.dtypes_of = reshard_after_forward, dtypes_of
        self.sync_gradients, self.is_filled = True, is_filled
        self._prepare: Callable[[Runtime], None] | None = prepare
        self._trains: Callable[[], bool] = lambda: False
        # Order of forwards: of the last pass, to prefetch by, and of the pass under way.
        self._last_order: list[Unit] = self.units
        self._order: list[Unit] = []
        # Since the last backward: forwards with gradients as they ended, and when each unit's first one began.
        self._calls: list[Call] = []
        self._begun: dict[Unit, int] = {}
        self._clock = 0
        self._backward_over = True
        # During backward: how many calls are yet to be visited, and units yet to be reduced, the next one last.
        self._in_backward = False
        self._num_ahead = 0
        self._to_reduce: list[Unit] = []
        self._late: dict[Unit, int] = {}
        self._passed: set[Unit] = set()
        self._to_free: list[Unit] = []
        self._reductions: list[Reduction] = []
        self._backward_hook, self._root_hook = _untraced(self._before_backward), _untraced(self._before_root_backward)

    def attach(self, model: nn.Module) -> None:
        """Registers the hooks. The root's own tell one forward of the whole model from the next."""
        model_ref = weakref.ref(model)

        def trains() -> bool:
            model = model_ref()
            return model is not None and any(param.requires_grad for param in model.parameters())

        self._trains = trains
        model.register_forward_pre_hook(_untraced(lambda *_: self._begin_order()))
        model.register_forward_hook(_untraced(lambda _module, _args, output: self._after_root_forward(output)))
        for unit in self.units:
            for boundary in unit.boundaries:
                self._attach(unit, boundary)

    def _attach(self, unit: Unit, boundary: nn.Module) -> None:
        began = 0

        def before(*_: Any) -> None:
            nonlocal began
            began = self._before_forward(unit)

        def after(_module: nn.Module, _args: Any, output: Any) -> None:
            self._after_forward(unit, began, output)

        boundary.register_forward_pre_hook(_untraced(before))
        boundary.register_forward_hook(_untraced(after))

    def _begin_order(self) -> None:
        if not in_backward() and self._order:
            self._last_order, self._order = self._order, []

    def _before_forward(self, unit: Unit) -> int:
        """Returns when this forward began."""
        if self._prepare is not None:
            self._prepare(self)
            self._prepare = None
            self.publish()
        recomputing = in_backward()
        if self._in_backward and not recomputing:
            self._reset_after_failure()
        if self._backward_over and not recomputing:
            self._begun, self._calls, self._backward_over = {}, [], False
            self._begin_order()
        unit.wait_unshard()
        if not recomputing:
            self._prefetch_next(unit)
        self._clock += 1
        return self._clock

    def _prefetch_next(self, unit: Unit) -> None:
        position = len(self._order)
        self._order.append(unit)
        expected = self._last_order[position : position + 2]
        if len(expected) == 2 and expected[0] is unit:
            expected[1].unshard()

    def _after_forward(self, unit: Unit, began: int, output: Any) -> None:
        recomputing = in_backward()
        is_recorded = False
        if torch.is_grad_enabled():
            self._clock += 1
            call = Call(unit, began, self._clock, len(self._calls))
            found = self._register(partial(self._backward_hook, call), output)
            if not found:
                _refuse(unit, output)
            # On every rank alike, whatever its own graph is: a frozen unit too, if what it is given can need gradients.
            is_recorded = not recomputing and (
                unit.is_trainable or any(tensor.requires_grad for tensor in found) or self._trains()
            )
        if is_recorded:
            self._begun.setdefault(unit, began)
            self._calls.append(call)
        # What backward recomputes it uses at once, and what forward used last it needs first.
        if not recomputing and not (is_recorded and (not self.reshard_after_forward or self._is_last(unit))):
            unit.reshard()

    def _is_last(self, unit: Unit) -> bool:
        """Whether a forward as the one before ends with this call."""
        return len(self._order) == len(self._last_order) and unit is self._last_order[-1]

    def _after_root_forward(self, output: Any) -> None:
        """Lets backward begin at the end of this forward, wherever this rank's graph meets the first unit."""
        if torch.is_grad_enabled() and not in_backward():
            self._register(partial(self._root_hook, self._calls, len(self._calls)), output)

    @staticmethod
    def _register(hook: Callable[[Tensor], None], output: Any) -> list[Tensor]:
        """Returns every tensor of the output."""
        found = list(_tensors(output))
        for tensor in found:
            if tensor.requires_grad:
                tensor.register_hook(hook)
        return found

    def _before_root_backward(self, calls: list[Call], num_calls: int, _grad: Tensor) -> None:
        # Before FSDP2's own hook on the same tensor, and so dmuon's end of backward comes before FSDP2's: where a
        # wait holds up the host, none of a rank's reductions may be left for after a collective of FSDP2's.
        self._enter_backward(num_calls if calls is self._calls else 0)

    def _before_backward(self, call: Call, _grad: Tensor) -> None:
        if call.index < len(self._calls) and self._calls[call.index] is call:
            self._enter_backward(call.index + 1)
            self._visit(call.index)
        else:
            self._enter_backward(0)
            self._begin_late(call)
        if call.unit not in self._passed:
            call.unit.wait_unshard()

    def _visit(self, index: int) -> None:
        """Fills the units of the calls from where backward is to `index`, each with the one before it."""
        while self._num_ahead > index:
            self._num_ahead -= 1
            call = self._calls[self._num_ahead]
            self._advance(call.end)
            self._free_passed(call.end)
            for unit in (call.unit, self._calls[max(0, self._num_ahead - 1)].unit):
                # A unit whose backward is over must not be filled again: nobody would free it.
                if unit not in self._passed:
                    unit.unshard()

    def _begin_late(self, call: Call) -> None:
        """A call that was not foreseen: of a reentrant recomputation, or of a graph that an earlier backward kept."""
        self._advance(call.end)
        if call.unit not in self._to_reduce:
            self._passed.discard(call.unit)
            self._late[call.unit] = call.begin
            self._to_reduce.append(call.unit)
            # Recomputation is a backward of its own, at whose end nothing more will come.
            queue_backward_callback(partial(self._end_late, call.unit))

    def _end_late(self, unit: Unit) -> None:
        while unit in self._to_reduce:
            self._pass(self._to_reduce.pop())
        if unit in self._to_free:
            self._to_free.remove(unit)
            unit.reshard()

    def _enter_backward(self, num_calls: int) -> None:
        """`num_calls`: of those since the last backward, how many belong to the forward at whose end it begins, or to
        earlier ones."""
        if self._in_backward:
            return
        self._in_backward, self._num_ahead = True, num_calls
        queue_backward_callback(self._after_backward)
        self._to_reduce = sorted(self._begun, key=self._begun.__getitem__)
        # What earlier backward passes kept must not be left behind by a unit that this pass does not use.
        unused = [unit for unit in self.units if unit.owes_reduction and unit not in self._begun]
        if self.sync_gradients:
            self._to_reduce = unused + self._to_reduce

    def _advance(self, now: int) -> None:
        """Reduces, latest first, the units whose first forward began after time `now`: backward, going through the
        graph from its end, has left them behind. What gradients a unit has does not matter, for ranks may differ."""
        while self._to_reduce and self._began(self._to_reduce[-1]) > now:
            self._pass(self._to_reduce.pop())

    def _began(self, unit: Unit) -> int:
        """When the first forward began that the backward under way comes back to."""
        return self._late.get(unit, self._begun.get(unit, -1))

    def _pass(self, unit: Unit) -> None:
        """The unit's gradients are there: reduces or keeps them."""
        if unit in self._passed:
            return
        self._passed.add(unit)
        if unit.is_trainable and self.sync_gradients:
            while len(self._reductions) > 1:
                self._reductions.pop(0).finish()
            self._reductions.append(unit.reduce())
        elif unit.is_trainable:
            unit.keep_gradients()
        # Not yet freed: a branch through a detached weight may read it after its gradient has come.
        self._to_free.append(unit)

    def _free_passed(self, now: int) -> None:
        behind = [unit for unit in self._to_free if self._began(unit) > now]
        for unit in behind:
            unit.reshard()
            self._to_free.remove(unit)

    def _after_backward(self) -> None:
        self._visit(0)
        while self._to_reduce:
            self._pass(self._to_reduce.pop())
        for unit in reversed(self.units):
            if unit.has_gradients:
                self._pass(unit)
        for reduction in self._reductions:
            reduction.finish()
        self._end_backward()

    def _reset_after_failure(self) -> None:
        """An exception inside backward leaves autograd's callbacks uncalled: drop what that pass left behind."""
        for reduction in self._reductions:
            reduction.wait()
        for unit in self.units:
            unit.discard_gradients()
        self._end_backward()

    def _end_backward(self) -> None:
        self._in_backward, self._backward_over, self._num_ahead = False, True, 0
        self._reductions, self._to_reduce, self._to_free = [], [], []
        self._late.clear()
        self._passed.clear()
        self.reshard()

    @property
    def has_unreduced_gradients(self) -> bool:
        """Gradients were kept by `no_sync` and no backward has reduced them since."""
        return any(unit.owes_reduction for unit in self.units)

    def reshard(self) -> None:
        """Brings every unit back to its masters."""
        for unit in self.units:
            unit.reshard()

    @property
    def has_copies(self) -> bool:
        """Compute copies are made at the first forward."""
        return self._prepare is None

    @property
    def forward_order(self) -> list[Unit]:
        """All units, as the last forward used them, those that it did not use at the end."""
        return list(dict.fromkeys([*self._last_order, *self.units]))

    def publish(self) -> None:
        """After masters changed: renews the compute copies and sends them along the owner columns, in forward order."""
        self.is_filled = True
        if self.has_copies:
            self.reshard()
            for unit in self.forward_order:
                unit.publish()

    def wait_publish(self) -> None:
        """Afterwards no collective reads or writes any weights."""
        self.reshard()
        for unit in self.units:
            unit.wait_publish()


def attach_runtime(model: nn.Module, runtime: Runtime) -> None:
    # Past nn.Module.__setattr__, which would register the boundaries' modules a second time.
    model.__dict__[_ATTRIBUTE] = runtime
    runtime.attach(model)


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


def _refuse(unit: Unit, output: Any) -> None:
    if unit.is_trainable:
        raise TypeError(
            f"hook boundary {unit.name} returned {type(output).__name__}, in which no tensor was found, so its weights "
            "could not be filled again for backward: return tensors, or a sequence, mapping or dataclass of them"
        )


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
    elif is_dataclass(value):
        for field in fields(value):
            yield from _tensors(getattr(value, field.name))
