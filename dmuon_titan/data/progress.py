"""Progress of work measured in bytes: the status line on a terminal, plain lines elsewhere."""

import logging
import time

from dmuon_titan.console import StatusLine

logger = logging.getLogger(__name__)

_BAR_WIDTH = 24
_LINE_INTERVAL_S = 20.0


class Progress:
    """Shows how far a task has come. `with Progress("encoding", total_bytes) as progress: progress.advance(n)`."""

    def __init__(self, label: str, total_bytes: int) -> None:
        self._label = label
        self._total_bytes = total_bytes
        self._done_bytes = 0
        self._line = StatusLine()
        self._start_s = self._logged_s = time.monotonic()

    def __enter__(self) -> "Progress":
        if not self._line.enabled:
            logger.info("%s: %.1f MB", self._label, self._total_bytes / 1e6)
        return self

    def __exit__(self, *_: object) -> None:
        self._line.close()

    def advance(self, num_bytes: int) -> None:
        """Count num_bytes as done."""
        self._done_bytes += num_bytes
        if self._line.enabled:
            self._line.show(self._text())
        elif time.monotonic() - self._logged_s >= _LINE_INTERVAL_S:
            logger.info(self._text())
            self._logged_s = time.monotonic()

    def _text(self) -> str:
        fraction = min(1.0, self._done_bytes / max(1, self._total_bytes))
        filled = round(_BAR_WIDTH * fraction)
        bar = "#" * filled + "-" * (_BAR_WIDTH - filled)
        left_s = (time.monotonic() - self._start_s) * (1 - fraction) / fraction if fraction else 0.0
        return f"{self._label} [{bar}] {fraction:4.0%} of {self._total_bytes / 1e6:.1f} MB, {left_s:.0f} s left"
