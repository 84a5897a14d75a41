"""The gradients of one unit on their way to their owners."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from dmuon.collectives import Wait, nothing
from dmuon.parameter import DedicatedParameter
from dmuon.section import Section, aligned
from dmuon.torch_internals import foreach_copy_


class GradientLayout:
    """Where the gradients of some sections lie in one flat buffer: each section's parameters, gaps, then its flags.

    Attributes:
        numel: elements of the buffer. section_sizes: elements of each section, flags included.
    """

    def __init__(self, sections: Sequence[Section]) -> None:
        self.sections = list(sections)
        self.section_sizes = [section.numel + section.num_flags for section in sections]
        self.numel = sum(self.section_sizes)
        self._sizes: list[int] = []
        self._pieces: dict[DedicatedParameter, int] = {}
        self._flags: list[int] = []
        self._has_gaps = False
        for section in sections:
            for param in section.params:
                gap = aligned(param.numel) - param.numel
                self._pieces[param] = len(self._sizes)
                self._sizes += [param.numel, gap] if gap else [param.numel]
                self._has_gaps |= gap > 0
            if section.num_flags:
                self._flags.append(len(self._sizes))
                self._sizes.append(section.num_flags)
        self._ones: list[Tensor] = []

    def fill(self, grads: dict[DedicatedParameter, Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer with the gradients there are, and a flag for each; what is missing is zero."""
        present = [param for param in self._pieces if param in grads]
        complete = len(present) == len(self._pieces)
        buffer = (torch.empty if complete and not self._has_gaps else torch.zeros)(
            self.numel, dtype=dtype, device=device
        )
        pieces = buffer.split(self._sizes)
        targets = [pieces[self._pieces[param]] for param in present]
        sources = [grads[param].reshape(-1) for param in present]
        if self._flags and complete:
            self._ones = self._ones or [torch.ones_like(pieces[index]) for index in self._flags]
            targets += [pieces[index] for index in self._flags]
            sources += self._ones
        elif self._flags:
            for index, section in zip(self._flags, self.sections, strict=True):
                used = torch.tensor([float(param in grads) for param in section.params])
                pieces[index][: len(used)].copy_(used)
        if targets:
            foreach_copy_(targets, sources)
        return buffer

    def flags(self, buffer: Tensor) -> Tensor:
        """Those of the only section of a layout."""
        return buffer[self.numel - self.sections[0].num_flags :]

    def views(self, buffer: Tensor) -> list[Tensor]:
        """The gradient of each parameter, in order, in its shape."""
        pieces = buffer.split(self._sizes)
        return [pieces[index].view(param.local_shape) for param, index in self._pieces.items()]


class Reduction:
    """A reduction under way: first over shard, then along each owner's column.

    Behind the gradients travels one element a parameter that says whether any rank used it.
    """

    def __init__(
        self,
        sections: Sequence[Section],
        sent: GradientLayout,
        owned: GradientLayout,
        grads: dict[DedicatedParameter, Tensor],
        dtype: torch.dtype,
    ) -> None:
        """`sections`: all of the unit; `sent` and `owned`: the layouts of those owned elsewhere and here."""
        self._used, self._owned = grads.keys(), owned
        self._waits: list[Wait] = []
        # Kept until the end: what the first stage gathers is read on another stream or thread.
        self._buffers: list[Tensor] = []
        self._first_stages: list[Wait] = []
        parts: dict[Section, Tensor] = {}
        for layout in (sent, owned):
            if layout.sections:
                # The owned part lies by itself: its gradients stay, and must not keep the rest in memory.
                buffer = layout.fill(grads, dtype, layout.sections[0].device)
                parts.update(zip(layout.sections, buffer.split(layout.section_sizes), strict=True))
                self._buffers.append(buffer)
        for section in sections:  # in one order on all ranks
            self._start(section, parts[section])

    def _start(self, section: Section, buffer: Tensor) -> None:
        axes = section.axes
        wait = axes.shard.reduce(buffer, section.owner.shard)
        if axes.replicate.size > 1:
            self._first_stages.append(wait)
            along_column = partial(_reduce_along_column, wait, section, buffer)
            wait = along_column() if axes.reduce_lane is None else axes.reduce_lane.run(along_column)
        self._waits.append(wait)

    def wait(self) -> None:
        """Both stages are over and the buffers are nobody else's; on an owner they hold the sum."""
        for wait in self._waits:
            wait()
        self._waits = []

    @torch.no_grad()
    def finish(self) -> None:
        """Adds the mean over the data-parallel ranks to `master.grad` on each owner."""
        self.wait()
        if self._owned.sections:
            (section,) = self._owned.sections
            # An owner that has used a parameter itself need not read the flag, which would make the host wait.
            flags = self._owned.flags(self._buffers[-1])
            used = [p in self._used or (flags.numel() and flags[i].item() > 0) for i, p in enumerate(section.params)]
            mean = self._buffers[-1].div_(section.axes.world_size).float()
            for param, grad, is_used in zip(section.params, self._owned.views(mean), used, strict=True):
                if not (is_used and param.master.requires_grad):
                    continue
                if param.master.grad is None:
                    param.master.grad = grad
                else:
                    param.master.grad.add_(grad)
        self._buffers, self._first_stages = [], []


def _reduce_along_column(over_shard: Wait, section: Section, buffer: Tensor) -> Wait:
    over_shard()
    return section.axes.replicate.reduce(buffer, section.owner.replicate) if section.in_column else nothing
