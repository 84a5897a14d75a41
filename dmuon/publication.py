"""New weights on their way: each unit is published as soon as its matrices are updated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from dmuon.hooks import Runtime
from dmuon.parameter import DedicatedParameter, Member
from dmuon.unit import Unit


class Publication:
    """One step's: renews compute copies and sends them along the owner columns, in the order of the next forward.

    A rank may be done with a later unit first. Then that waits for the earlier ones, so that every rank of a column
    issues the same transfers in the same order.

    Args:
        runtime: after `wait_publish`.
        due: the parameters that this rank is about to update, each as often as it has parts.
    """

    def __init__(self, runtime: Runtime, due: Iterable[DedicatedParameter]) -> None:
        self._units = list(reversed(runtime.forward_order)) if runtime.has_copies else []
        self._unit_of: dict[Member, Unit] = {param: unit for unit in self._units for param in unit.params}
        self._parts: Counter[Member] = Counter(due)
        self._missing = Counter(self._unit_of[param] for param in self._parts.elements() if param in self._unit_of)
        self._copied: Counter[Member] = Counter()

    def updated(self, param: DedicatedParameter, *, copied: bool) -> None:
        """A part of `param` is up to date; `copied`: its compute copy too."""
        if param in self._unit_of:
            self._missing[self._unit_of[param]] -= 1
            self._copied[param] += copied

    def advance(self) -> None:
        """Publishes what can go."""
        while self._units and self._missing[self._units[-1]] <= 0:
            self._publish_next()

    def finish(self) -> None:
        """Publishes the rest."""
        while self._units:
            self._publish_next()

    def _publish_next(self) -> None:
        unit = self._units.pop()
        # Of a strip no part is counted, so that it is renewed with the rest.
        unit.publish(renewed={s for s in unit.sections if all(0 < self._parts[p] == self._copied[p] for p in s.params)})
