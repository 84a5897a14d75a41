"""Work beside other work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Aside:
    """A stream of its own on a GPU. On a CPU nothing runs beside anything: work is done where it is given."""

    def __init__(self, device_type: str) -> None:
        self._stream = torch.Stream(device_type) if device_type != "cpu" else None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """What is launched inside comes after what the current stream has so far, and beside what it is given next."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.accelerator.current_stream())
        with self._stream:
            yield

    def join(self) -> None:
        """Lets the current stream wait. What was read and written aside must be kept until then."""
        if self._stream is not None:
            torch.accelerator.current_stream().wait_stream(self._stream)
