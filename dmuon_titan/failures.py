"""Errors across ranks: told to the others, printed once, the first one first, and never by way of a collective.

Imports no torch: mistakes in the configuration are reported here before it is loaded.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
import traceback
from typing import TYPE_CHECKING, NoReturn

from dmuon_titan.environment import WorkerEnvironment
from dmuon_titan.errors import ExitStatus, TitanError

if TYPE_CHECKING:
    import torch.distributed as dist

_FIRST = "dmuon_titan/first_failure"
# A rank that leaves with one of these has said in a line what a person must know.
_EXPLAINED = (ExitStatus.CONFIG, ExitStatus.DATA, ExitStatus.CHECKPOINT, ExitStatus.NON_FINITE)
# In what gloo, NCCL and the store say when a peer doesn't answer.
_COMMUNICATION = ("gloo", "nccl", "tcpstore", "socket", "connection", "broken pipe")


class FailureBoard:
    """The rendezvous store as a place where a rank that leaves tells the others.

    Collectives can't carry the news: the ranks that are well may sit in one that will never complete. The store raises
    RuntimeError when the rank that hosts it is gone; that rank has had its say by then.
    """

    def __init__(self, store: dist.Store, rank: int) -> None:
        # Its waits don't block those of the process group.
        self._store: dist.Store = store.clone()  # type: ignore[attr-defined]
        self._rank = rank

    def announce(self, status: ExitStatus) -> None:
        """Tells the others that this rank leaves with `status`, unless another rank was first."""
        try:
            self._store.compare_set(_FIRST, "", f"{self._rank} {int(status)}")
        except RuntimeError:
            return

    def first(self) -> tuple[int, ExitStatus] | None:
        """(rank, status) of the first rank that left, or None."""
        try:
            if not self._store.check([_FIRST]):
                return None
            rank, status = self._store.get(_FIRST).decode().split()
        except RuntimeError:
            return None
        return int(rank), ExitStatus(int(status))

    def prints(self, message: str, *, wait_s: float = 1.0) -> bool:
        """Whether this rank prints an error that others may raise too: rank 0 if it does, else the first to ask."""
        key = "dmuon_titan/error/" + hashlib.sha256(message.encode()).hexdigest()
        try:
            if self._rank == 0:
                self._store.set(f"{key}/rank-0", "")
                return True
            if self._store.compare_set(f"{key}/first", "", str(self._rank)).decode() != str(self._rank):
                return False
            deadline_s = time.monotonic() + wait_s
            while time.monotonic() < deadline_s:
                if self._store.check([f"{key}/rank-0"]):
                    return False
                time.sleep(0.05)
        except RuntimeError:
            return False
        return True


class FailureReporter:
    """Says on standard error why this rank leaves, as soon as it does."""

    def __init__(self, environment: WorkerEnvironment) -> None:
        self.environment = environment
        self.board: FailureBoard | None = None

    def connect(self, store: dist.Store) -> None:
        """From now on ranks know of each other."""
        self.board = FailureBoard(store, self.environment.rank)

    def peer_left(self) -> ExitStatus | None:
        """The status of the first rank that left in the middle of work."""
        first = self.board.first() if self.board is not None else None
        return None if first is None else first[1]

    def report(self, error: BaseException) -> ExitStatus:
        """Prints an error that ends this rank and returns the exit status.

        A TitanError is printed without a traceback by one rank, with `[rank N] ` in front where rank 0 doesn't raise
        it. Of other errors the first comes with its traceback; ranks that fail after it say so in a line, or nothing
        where all they lost is the rank whose error has been explained.
        """
        rank = self.environment.rank
        status = error.status if isinstance(error, TitanError) else ExitStatus.FAILURE
        if self.board is not None:
            self.board.announce(status)
        if isinstance(error, TitanError):
            # Without the store all ranks see the same mistake; one a node is enough.
            speaks = self.board.prints(str(error)) if self.board is not None else self.environment.local_rank == 0
            if speaks:
                say(f"error: {error}", rank)
            return status
        first = self.board.first() if self.board is not None else None
        if first is None or first[0] == rank:
            if _lost_a_peer(error):
                say(f"stopped, for another rank is gone: {_first_line(error)}", rank)
            else:
                say("".join(traceback.format_exception(error)).rstrip(), rank)
        elif first[1] == ExitStatus.PREEMPTED:
            return ExitStatus.PREEMPTED
        elif not (first[1] in _EXPLAINED and _is_of_communication(error)):
            say(f"stopped after rank {first[0]} failed: {_first_line(error)}", rank)
        return status

    def leave(self, status: ExitStatus, reason: str) -> NoReturn:
        """Ends the process at once, whatever the main thread is doing."""
        rank = self.environment.rank
        if self.board is not None:
            self.board.announce(status)
        first = self.board.first() if self.board is not None else None
        explained = first is not None and first[0] != rank and first[1] in _EXPLAINED
        if not explained and (status != ExitStatus.PREEMPTED or rank == 0):
            say(reason, rank)
        self.environment.leave_status(status)
        sys.stdout.flush()
        os._exit(status)


def say(text: str, rank: int) -> None:
    """Writes text to standard error, each line with `[rank N] ` in front on ranks other than the first."""
    front = f"[rank {rank}] " if rank else ""
    sys.stderr.write("".join(f"{front}{line}\n" for line in text.splitlines()))
    sys.stderr.flush()


def _is_of_communication(error: BaseException) -> bool:
    """Whether the error may come from a peer that is gone."""
    text = str(error).lower()
    return isinstance(error, (RuntimeError, OSError)) and any(word in text for word in _COMMUNICATION)


def _lost_a_peer(error: BaseException) -> bool:
    """Whether gloo found a connection closed: the peer was killed, and a traceback of this rank would tell nothing."""
    text = str(error)
    return "gloo" in text and any(words in text for words in ("Connection reset by peer", "Connection closed by peer"))


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
