"""A copy of a run's state on the CPU, from which files are written while training changes the original."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dmuon.parameter import local


class StateCopies:
    """Copies nested dicts of tensors, DTensors among them, and plain values.

    Args:
        kept: whether memory is kept and filled again the next time, and pinned where the originals are on a GPU:
            pinning is slow, copying into pinned memory is fast.
    """

    def __init__(self, *, kept: bool) -> None:
        self._kept = kept
        self._buffers: dict[tuple[str, ...], Tensor] = {}

    @torch.no_grad()
    def copy(self, state: dict[str, Any]) -> dict[str, Any]:
        """Returns when all is copied. What an earlier call returned is overwritten where memory is kept."""
        copied: dict[str, Any] = self._copy(state, ())
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        return copied

    def _copy(self, value: Any, path: tuple[str, ...]) -> Any:
        if isinstance(value, dict):
            return {name: self._copy(item, (*path, str(name))) for name, item in value.items()}
        if not isinstance(value, Tensor):
            return value
        buffer = self._buffers.get(path)
        if buffer is None or local(buffer).shape != local(value).shape:
            # A DTensor stays one, on its mesh, as FSDP2's own of parameters that are offloaded to the CPU.
            buffer = torch.empty_like(value, device="cpu", pin_memory=self._kept and value.is_cuda)
        if self._kept:
            self._buffers[path] = buffer
        local(buffer).copy_(local(value), non_blocking=self._kept)
        return buffer
