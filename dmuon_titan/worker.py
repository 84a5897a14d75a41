"""How the launcher starts a worker: tied to the launcher's life, known to it by process id, then the training job."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import NoReturn

from dmuon_titan.environment import WorkerEnvironment
from dmuon_titan.errors import ExitStatus

_PR_SET_PDEATHSIG = 1
_PARENT_CHECK_INTERVAL_S = 1.0


def main(argv: list[str]) -> NoReturn:
    """Runs this rank's part of the job and ends the process with its status."""
    _die_with(int(os.environ["DMUON_TITAN_LAUNCHER_PID"]))
    environment = WorkerEnvironment.read()
    assert environment.status_dir is not None
    pid_file(environment.status_dir, environment.local_rank).write_text(str(os.getpid()))
    # The launcher notes a stop there before it looks for process ids: a worker that it can't see yet sees the note.
    if stop_file(environment.status_dir).exists():
        sys.exit(ExitStatus.PREEMPTED)
    from dmuon_titan import train

    train.end_process(train.main(argv))


def pid_file(folder: Path, local_rank: int) -> Path:
    """Where a worker leaves its process id."""
    return folder / f"pid-{local_rank}"


def stop_file(folder: Path) -> Path:
    """Exists once the launcher was asked to stop."""
    return folder / "stop"


def _die_with(launcher_pid: int) -> None:
    """Has this process killed when the launcher ends in any way, also by a signal that it can't pass on."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_watch_parent, args=(launcher_pid,), name="parent-watcher", daemon=True).start()
    if os.getppid() != launcher_pid:
        os._exit(ExitStatus.FAILURE)


def _watch_parent(launcher_pid: int) -> None:
    while os.getppid() == launcher_pid:
        time.sleep(_PARENT_CHECK_INTERVAL_S)
    os._exit(ExitStatus.FAILURE)
