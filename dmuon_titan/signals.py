"""Requests to stop, and peers that left: noticed at once, even while the main thread waits inside a collective.

Python runs signal handlers between bytecodes of the main thread, so a rank that waits in C++ for a dead peer would
never run one. The interpreter writes each signal's number into a pipe at once, though, and a thread reads that pipe.
"""

from __future__ import annotations

import math
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

from dmuon_titan.errors import ExitStatus

# SIGUSR1 is what schedulers send some time before they end a job.
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class StopWatcher:
    """Watches for SIGTERM, SIGINT, SIGUSR1 and failed peers; made by the main thread before anything slow.

    Signals that are blocked until then, so that none ends a process that can't listen yet, are let through by it.

    requested: True from the first signal on. All ranks agree on it once a step, save and stop.
    patience_s: how long the process may go on after the first signal. 0 while there is nothing to save (start-up);
        the trainer raises it, to infinity once a step has been made.
    peer_left: asked twice a second once set; the exit status of the first rank that left in the middle of work.

    A second signal ends the process at once, with status 1. Signals within a second of the first count as
    the same one: a terminal and a launcher that both pass on Ctrl-C deliver it twice.
    """

    repeat_window_s = 1.0
    poll_interval_s = 0.5
    peer_grace_s = 3.0  # a peer's error usually reaches the main thread too, which can say more about it

    def __init__(self, leave: Callable[[ExitStatus, str], None]) -> None:
        """`leave(status, reason)` is called by the watching thread and ends the process."""
        self.requested = False
        self.patience_s = 0.0
        self.peer_left: Callable[[], ExitStatus | None] | None = None
        self._leave = leave
        self._stopped = threading.Event()
        self._first_signal_s = math.inf
        self._peer_left_s = math.inf
        self._read_fd, write_fd = os.pipe()
        os.set_blocking(self._read_fd, False)
        os.set_blocking(write_fd, False)
        signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
        for number in _STOP_SIGNALS:
            signal.signal(number, self._noticed)
        os.register_at_fork(after_in_child=_forget)
        threading.Thread(target=self._watch, name="stop-watcher", daemon=True).start()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP_SIGNALS)

    def close(self) -> None:
        """From now on the main thread alone decides how the process ends; signals are ignored."""
        self._stopped.set()

    def _noticed(self, number: int, frame: FrameType | None) -> None:
        """Python writes to the pipe only for signals that have a handler; the thread does the work."""

    def _watch(self) -> None:
        while not self._stopped.is_set():
            readable, _, _ = select.select([self._read_fd], [], [], self.poll_interval_s)
            now_s = time.monotonic()
            if readable and any(number in _STOP_SIGNALS for number in os.read(self._read_fd, 64)):
                if now_s - self._first_signal_s > self.repeat_window_s:
                    self._end(ExitStatus.FAILURE, "a second signal ends the job at once; nothing more is saved")
                self._first_signal_s = min(self._first_signal_s, now_s)
                self.requested = True
            if now_s - self._first_signal_s >= self.patience_s:
                self._end(ExitStatus.PREEMPTED, "stopped by a signal before the first step; there is nothing to save")
            self._watch_peers(now_s)

    def _watch_peers(self, now_s: float) -> None:
        status = self.peer_left() if self.peer_left is not None else None
        if status is not None:
            self._peer_left_s = min(self._peer_left_s, now_s)
            if now_s - self._peer_left_s >= self.peer_grace_s:
                preempted = status == ExitStatus.PREEMPTED
                self._end(status if preempted else ExitStatus.FAILURE, "stopped since another rank left")

    def _end(self, status: ExitStatus, reason: str) -> None:
        if not self._stopped.is_set():
            self._leave(status, reason)


def ignore_stop_signals(_: object = None) -> None:
    """For readers of data, which work until their parent lets them go: torch gives each a handler of its own."""
    for number in _STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _forget() -> None:
    """A forked reader of data shares the pipe, and a signal to all processes of a job is not for it: it works until
    its parent lets it go."""
    signal.set_wakeup_fd(-1)
    ignore_stop_signals()
