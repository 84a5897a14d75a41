"""What a person sees while the job runs: each log line once, and one status line on a terminal."""

from __future__ import annotations

import logging
import sys
import time
from typing import TextIO

logger = logging.getLogger("dmuon_titan")


class _RankFilter(logging.Filter):
    """Puts `[rank N]` in front of what other ranks than the first have to say."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.front = f"[rank {rank}] " if rank else ""

    def filter(self, record: logging.LogRecord) -> bool:
        record.front = self.front
        return True


class _ConsoleHandler(logging.Handler):
    """Writes records up to INFO to standard output, warnings and errors to standard error, around the status line."""

    def __init__(self, status_line: StatusLine) -> None:
        super().__init__()
        self.status_line = status_line

    def emit(self, record: logging.LogRecord) -> None:
        try:
            stream = sys.stderr if record.levelno >= logging.WARNING else sys.stdout
            with self.status_line.hidden():
                stream.write(self.format(record) + "\n")
                stream.flush()
        except Exception:
            self.handleError(record)


class _Hidden:
    def __init__(self, line: StatusLine) -> None:
        self.line = line

    def __enter__(self) -> None:
        self.line.erase()

    def __exit__(self, *_: object) -> None:
        self.line.draw()


class StatusLine:
    """The last line of a terminal, overwritten in place. Writes nothing where the stream isn't a terminal."""

    def __init__(self, stream: TextIO | None = None, *, min_interval_s: float = 0.1) -> None:
        self.stream = stream if stream is not None else sys.stderr
        self.enabled = self.stream.isatty()
        self.min_interval_s = min_interval_s
        self._text = ""
        self._drawn_s = float("-inf")

    def show(self, text: str) -> None:
        """Replaces the line, at most ten times a second."""
        self._text = text
        if time.monotonic() - self._drawn_s >= self.min_interval_s:
            self.draw()

    def draw(self) -> None:
        if self.enabled and self._text:
            self._drawn_s = time.monotonic()
            self.stream.write("\r\x1b[2K" + self._text)
            self.stream.flush()

    def erase(self) -> None:
        if self.enabled and self._text:
            self.stream.write("\r\x1b[2K")
            self.stream.flush()

    def hidden(self) -> _Hidden:
        """Context in which other lines may be written."""
        return _Hidden(self)

    def close(self) -> None:
        self.erase()
        self._text = ""


def progress_text(done: int, total: int, elapsed_s: float, num_done_here: int, extra: str = "") -> str:
    """`step 12/300 [###-----]  4 %  extra  2:31 left`.

    The time left counts from the steps made in this process (`num_done_here` in `elapsed_s` seconds), so that it is
    right after a restart too.
    """
    width = 24
    filled = width * done // max(total, 1)
    bar = "#" * filled + "-" * (width - filled)
    left = ""
    if num_done_here:
        left = f"  {_clock(elapsed_s / num_done_here * (total - done))} left"
    return f"step {done}/{total} [{bar}] {100 * done // max(total, 1):3d} %{extra}{left}"


def _clock(duration_s: float) -> str:
    minutes, seconds = divmod(round(duration_s), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def set_up_logging(rank: int, *, all_ranks: bool = False) -> StatusLine:
    """Rank 0 logs everything, other ranks warnings and errors with their rank in front; `all_ranks` logs all of it.

    Python's own warnings take the same way. Returns the terminal's status line, which log lines leave intact.
    """
    status_line = StatusLine()
    status_line.enabled = status_line.enabled and rank == 0
    handler = _ConsoleHandler(status_line)
    handler.setFormatter(
        logging.Formatter("%(front)s[titan] %(asctime)s - %(levelname)s - %(message)s", "%Y-%m-%d %H:%M:%S")
    )
    handler.addFilter(_RankFilter(rank))
    logging.captureWarnings(True)
    for name in ("dmuon_titan", "dmuon", "py.warnings"):
        target = logging.getLogger(name)
        target.handlers[:] = [handler]
        target.propagate = False
        target.setLevel(logging.INFO if rank == 0 or all_ranks else logging.WARNING)
    return status_line
