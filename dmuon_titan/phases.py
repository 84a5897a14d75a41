"""Where the time goes between a command and its first step."""

from __future__ import annotations

import time


class Phases:
    """Names the phase that begins; the one before it is over. Wall-clock seconds, of this process."""

    def __init__(self, name: str, started_s: float | None = None) -> None:
        """`started_s`: when the first phase began, as `time.time()` counts; None for now."""
        self._begins: list[tuple[str, float]] = [(name, time.time() if started_s is None else started_s)]

    def begin(self, name: str) -> None:
        self._begins.append((name, time.time()))

    def summary(self) -> str:
        """`first step after 9.1 s: start of processes 3.9 s (43 %), model 1.2 s (13 %), ...`, up to now."""
        ends = [begin_s for _, begin_s in self._begins[1:]] + [time.time()]
        lengths_s = [(name, end_s - begin_s) for (name, begin_s), end_s in zip(self._begins, ends, strict=True)]
        total_s = max(sum(length_s for _, length_s in lengths_s), 1e-9)
        parts = ", ".join(f"{name} {length_s:.1f} s ({100 * length_s / total_s:.0f} %)" for name, length_s in lengths_s)
        return f"first step after {total_s:.1f} s: {parts}"
