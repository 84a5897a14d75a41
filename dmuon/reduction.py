"""The gradients of one unit on their way to their owners."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from dmuon.annotation import annotate
from dmuon.collectives import Axis, DataParallelAxes, Transfer, Wait, nothing
from dmuon.parameter import Member
from dmuon.section import ALIGNMENT, Section, aligned
from dmuon.torch_internals import foreach_copy_


class GradientLayout:
    """Where the gradients of some sections lie in one flat buffer: each section's parameters, gaps, then its flags.

    Attributes:
        section_sizes: elements of each section, flags included.
    """

    def __init__(self, sections: Sequence[Section]) -> None:
        self.sections = list(sections)
        self.section_sizes = [section.numel + section.num_flags for section in sections]
        # What lies behind one another: gradients, and None for what is no parameter's.
        self._spans: list[tuple[Member | None, int]] = []
        for section in sections:
            for param in section.params:
                gap = aligned(param.numel) - param.numel
                self._spans += [(param, param.numel), (None, gap)] if gap else [(param, param.numel)]
            self._spans += [(None, section.num_flags)] if section.num_flags else []
        self._constants: dict[tuple[float, ...], Tensor] = {}

    def fill(self, grads: dict[Member, Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer with the gradients there are, and a flag for each; what is missing is zero."""
        flat = torch.empty(sum(self.section_sizes), dtype=dtype, device=device)
        parts = flat.split([size for _, size in self._spans])
        filled = [(part, param) for part, (param, _) in zip(parts, self._spans, strict=True) if param in grads]
        # One pass over all gradients, which casts them too.
        if filled:
            foreach_copy_([part for part, _ in filled], [grads[param].reshape(-1) for _, param in filled])
        values = self._constants_of(grads)
        for part, (param, _) in zip(parts, self._spans, strict=True):
            if param is None:
                part.copy_(self._constant(next(values), dtype, device))
            elif param not in grads:
                part.zero_()
        return flat

    def _constants_of(self, grads: dict[Member, Tensor]) -> Iterator[tuple[float, ...]]:
        """Zeros for each gap, and each section's flags: whether this rank used a parameter."""
        for section in self.sections:
            yield from ((0.0,) * (aligned(p.numel) - p.numel) for p in section.params if p.numel % ALIGNMENT)
            if section.num_flags:
                used = tuple(float(param in grads) for param in section.params)
                yield used + (0.0,) * (section.num_flags - len(used))

    def _constant(self, values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A small tensor that stays on the device: which parameters are used changes rarely."""
        if values not in self._constants:
            self._constants[values] = torch.tensor(values, dtype=dtype, device=device)
        return self._constants[values]


class Reduction:
    """A reduction under way: first over shard, then along each owner's column.

    Behind the gradients travels one element a parameter that says whether any rank used it.
    """

    def __init__(
        self,
        name: str,
        sections: Sequence[Section],
        axes: DataParallelAxes,
        sent: GradientLayout,
        owned: GradientLayout,
        grads: dict[Member, Tensor],
        dtype: torch.dtype,
    ) -> None:
        """`name`, `sections`, `axes`: the unit's; `sent` and `owned`: the layouts of those owned elsewhere and here."""
        self._name, self._used = name, grads.keys()
        self._reduced_factor = axes.reduced_factor
        # Kept until the end: what the first stage gathers is read on another stream or thread.
        self._buffers: list[Tensor] = []
        parts: dict[Section, Tensor] = {}
        for layout in (sent, owned):
            if layout.sections:
                # The owned part lies by itself: its gradients stay, and must not keep the rest in memory.
                buffer = layout.fill(grads, dtype, layout.sections[0].device)
                parts.update(zip(layout.sections, buffer.split(layout.section_sizes), strict=True))
                self._buffers.append(buffer)
        self._owned = {section: parts[section] for section in owned.sections}
        with annotate(f"dmuon::reduce {name}"):
            wait = self._over_shard = axes.shard.reduce([(parts[s], s.owner.shard) for s in sections])
            if axes.replicate.size > 1:
                columns = [(parts[section], section.owner.replicate) for section in sections if section.in_column]
                along_columns = partial(_reduce_after, wait, axes.replicate, columns)
                wait = along_columns() if axes.reduce_lane is None else axes.reduce_lane.run(along_columns)
        self._wait: Wait | None = wait

    def wait(self) -> None:
        """Both stages are over and the buffers are nobody else's; an owner's hold `reduced_factor` times the mean."""
        if self._wait is not None:
            with annotate(f"dmuon::wait reduce {self._name}"):
                self._wait()
            self._wait = None

    @torch.no_grad()
    def finish(self) -> None:
        """Adds the mean over the data-parallel ranks to `master.grad` on each owner."""
        self.wait()
        for section, buffer in self._owned.items():
            params = section.params
            if not all(param in self._used for param in params):
                # Others may have used what this rank did not. Only then the flags are read, for the host waits.
                flags = _used_by_any(section, buffer)
                params = [p for p, used in zip(params, flags, strict=True) if used or p in self._used]
            mean = buffer.float()
            if self._reduced_factor != 1:
                mean.div_(self._reduced_factor)
            for param in params:
                if not param.master.requires_grad:
                    continue
                param.add_gradient(param.view(mean))
        self._buffers, self._owned = [], {}
        self._over_shard = nothing


def _used_by_any(section: Section, buffer: Tensor) -> list[bool]:
    """Of each parameter, after the reduction. Reads the device."""
    flags = buffer[section.numel :].tolist()
    return [flag > 0 for flag in flags[: len(section.params)]] if flags else [False] * len(section.params)


def _reduce_after(over_shard: Wait, axis: Axis, transfers: Sequence[Transfer]) -> Wait:
    over_shard()
    return axis.reduce(transfers)
