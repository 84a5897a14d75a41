"""The gradients of one unit on their way to their owners."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from dmuon.annotation import annotate
from dmuon.collectives import Wait, nothing
from dmuon.parameter import DedicatedParameter
from dmuon.section import Section, aligned
from dmuon.torch_internals import flatten_dense_tensors


class GradientLayout:
    """Where the gradients of some sections lie in one flat buffer: each section's parameters, gaps, then its flags.

    Attributes:
        section_sizes: elements of each section, flags included.
    """

    def __init__(self, sections: Sequence[Section]) -> None:
        self.sections = list(sections)
        self.section_sizes = [section.numel + section.num_flags for section in sections]
        self._params = [param for section in sections for param in section.params]
        self._constants: dict[tuple[float, ...], Tensor] = {}
        # What a buffer is made of where every parameter has a gradient: parameters, and constants between them.
        self._complete: list[DedicatedParameter | Tensor] = []

    def fill(self, grads: dict[DedicatedParameter, Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer with the gradients there are, and a flag for each; what is missing is zero."""
        if all(param in grads for param in self._params):
            self._complete = self._complete or self._pieces(grads, dtype, device)
            pieces = self._complete
        else:
            pieces = self._pieces(grads, dtype, device)
        # One pass over all of them, in the wider of the dtypes.
        flat = flatten_dense_tensors([piece if isinstance(piece, Tensor) else grads[piece] for piece in pieces])
        return flat.to(dtype)

    def _pieces(
        self, grads: dict[DedicatedParameter, Tensor], dtype: torch.dtype, device: torch.device
    ) -> list[DedicatedParameter | Tensor]:
        pieces: list[DedicatedParameter | Tensor] = []
        for section in self.sections:
            for param in section.params:
                gap = aligned(param.numel) - param.numel
                pieces.append(param if param in grads else torch.zeros(param.numel, dtype=dtype, device=device))
                pieces += [self._constant((0.0,) * gap, dtype, device)] if gap else []
            if section.num_flags:
                used = tuple(float(param in grads) for param in section.params)
                padding = (0.0,) * (section.num_flags - len(used))
                pieces.append(self._constant(used + padding, dtype, device))
        return pieces

    def _constant(self, values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A small tensor that stays on the device: which parameters are used changes rarely."""
        if values not in self._constants:
            self._constants[values] = torch.tensor(values, dtype=dtype, device=device)
        return self._constants[values]

    def used_by_any(self, buffer: Tensor) -> list[bool]:
        """Of the only section of a layout, after the reduction. Reads the device."""
        (section,) = self.sections
        flags = buffer[section.numel :].tolist()
        return [flag > 0 for flag in flags[: len(section.params)]] if flags else [False] * len(section.params)


class Reduction:
    """A reduction under way: first over shard, then along each owner's column.

    Behind the gradients travels one element a parameter that says whether any rank used it.
    """

    def __init__(
        self,
        name: str,
        sections: Sequence[Section],
        sent: GradientLayout,
        owned: GradientLayout,
        grads: dict[DedicatedParameter, Tensor],
        dtype: torch.dtype,
    ) -> None:
        """`name`, `sections`: the unit's; `sent` and `owned`: the layouts of those owned elsewhere and here."""
        self._name, self._used, self._owned = name, grads.keys(), owned
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
        with annotate(f"dmuon::reduce {name}"):
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
        if self._waits:
            with annotate(f"dmuon::wait reduce {self._name}"):
                for wait in self._waits:
                    wait()
            self._waits = []

    @torch.no_grad()
    def finish(self) -> None:
        """Adds the mean over the data-parallel ranks to `master.grad` on each owner."""
        self.wait()
        if self._owned.sections:
            (section,) = self._owned.sections
            params = section.params
            if not all(param in self._used for param in params):
                # Others may have used what this rank did not. Only then the flags are read, for the host waits.
                flags = self._owned.used_by_any(self._buffers[-1])
                params = [p for p, used in zip(params, flags, strict=True) if used or p in self._used]
            mean = self._buffers[-1].div_(section.axes.world_size).float()
            for param in params:
                if not param.master.requires_grad:
                    continue
                param.add_gradient(param.view(mean))
        self._buffers, self._first_stages = [], []


def _reduce_along_column(over_shard: Wait, section: Section, buffer: Tensor) -> Wait:
    over_shard()
    return section.axes.replicate.reduce(buffer, section.owner.replicate) if section.in_column else nothing
