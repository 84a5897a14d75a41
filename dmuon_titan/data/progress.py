"""Progress of work measured in bytes: a bar on a terminal, plain lines elsewhere."""

import logging
import sys
import time

logger = logging.getLogger(__name__)

_BAR_WIDTH = 30
_REDRAW_S = 0.1
_LINE_S = 20.0


class Progress:
    """Shows how far a task has come. `with Progress("encoding", total_bytes) as progress: progress.advance(n)`."""

    def __init__(self, label: str, total_bytes: int) -> None:
        self._label = label
        self._total = total_bytes
        self._done = 0
        self._is_terminal = sys.stderr.isatty()
        self._start = time.monotonic()
        self._shown = self._start

    def __enter__(self) -> "Progress":
        if not self._is_terminal:
            logger.info("%s: %.1f MB", self._label, self._total / 1e6)
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_terminal:
            self._draw(end="\n")

    def advance(self, num_bytes: int) -> None:
        """Count num_bytes as done."""
        self._done += num_bytes
        now = time.monotonic()
        if self._is_terminal and now - self._shown >= _REDRAW_S:
            self._draw(end="")
        elif not self._is_terminal and now - self._shown >= _LINE_S:
            logger.info("%s: %s", self._label, self._summary())
        else:
            return
        self._shown = now

    def _summary(self) -> str:
        fraction = min(1.0, self._done / self._total) if self._total else 1.0
        left_s = (time.monotonic() - self._start) * (1 - fraction) / fraction if fraction else 0.0
        return f"{fraction:4.0%} of {self._total / 1e6:.1f} MB, {left_s:.0f} s left"

    def _draw(self, end: str) -> None:
        full = round(_BAR_WIDTH * min(1.0, self._done / self._total)) if self._total else _BAR_WIDTH
        bar = "#" * full + "-" * (_BAR_WIDTH - full)
        # The escape clears what a longer line before left behind.
        sys.stderr.write(f"\r{self._label} [{bar}] {self._summary()}\x1b[K{end}")
        sys.stderr.flush()
