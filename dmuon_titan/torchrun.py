"""Runs the workers of this node under torchrun, in this process, and finds out how the job ended.

Three things are done otherwise than by the command torchrun. A signal is passed on as often as it comes and the workers
take the time they need, where torchrun kills them after 30 seconds. The exit status is the job's, where
torchrun's is 1. And what went wrong is said once, by the worker, or here if it was killed.
"""

from __future__ import annotations

import gc
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from dmuon_titan.errors import ExitStatus
from dmuon_titan.worker import stop_file

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

# The same program on every rank, with imports from the repository first, as in run_train.sh. A request to stop waits
# until the worker can hear it.
WORKER_CODE = """\
import sys
sys.path[:] = [sys.argv.pop(1), *filter(None, sys.path)]
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1})
from dmuon_titan.worker import main
main(sys.argv[1:])
"""
_REPOSITORY = Path(__file__).resolve().parents[1]
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
# Which status the job has when ranks end with different ones: the most telling of those that occur.
_BY_IMPORTANCE = (
    ExitStatus.CONFIG,
    ExitStatus.DATA,
    ExitStatus.CHECKPOINT,
    ExitStatus.NON_FINITE,
    ExitStatus.FAILURE,
    ExitStatus.PREEMPTED,
)


@dataclass(frozen=True)
class Nodes:
    """How many processes this node starts, and where the other nodes are.

    master_addr, master_port: where node 0 listens; without meaning on a single node, which finds a free port.
    """

    num_local_ranks: int
    num_nodes: int = 1
    node_rank: int = 0
    master_addr: str = ""
    master_port: int = 29500

    @property
    def num_ranks(self) -> int:
        return self.num_local_ranks * self.num_nodes


class StopSignals:
    """Passes SIGTERM, SIGINT, SIGHUP and SIGUSR1 on to the workers, as SIGTERM, each time one comes.

    run_train.sh blocks them until this object is made. Where there is no worker yet, the launcher ends with status 75.
    A signal that was ignored when the launcher started, as SIGHUP is under nohup, stays ignored.

    A thread does this, from a pipe into which the interpreter writes the number of each signal: Python's handlers don't
    run while the main thread waits in C++ for other nodes.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self.folder: Path | None = None
        self._closed = False
        self._read_fd, write_fd = os.pipe()
        os.set_blocking(write_fd, False)
        signal.set_wakeup_fd(write_fd)
        for number in _STOP_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, _leave_to_thread)
        threading.Thread(target=self._watch, name="stop-signals", daemon=True).start()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP_SIGNALS)

    def close(self) -> None:
        """Ignores signals from now on: the job is over, and its status is known."""
        self._closed = True

    def _watch(self) -> None:
        while True:
            for number in os.read(self._read_fd, 64):
                if number in _STOP_SIGNALS and not self._closed:
                    self._pass_on(signal.Signals(number))

    def _pass_on(self, number: signal.Signals) -> None:
        self.received = number
        if self.folder is not None:
            stop_file(self.folder).touch()
        pids = worker_pids(self.folder)
        if not pids:
            self.say_not_started()
            if self.folder is not None:
                shutil.rmtree(self.folder, ignore_errors=True)
            os._exit(ExitStatus.PREEMPTED)  # a worker that is just being started dies with the launcher
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

    def say_not_started(self) -> None:
        """Of a job that was stopped while none of its ranks could say so."""
        assert self.received is not None
        sys.stderr.write(f"stopped by {self.received.name} before the job started\n")
        sys.stderr.flush()


def _leave_to_thread(number: int, frame: FrameType | None) -> None:
    """The pipe gets the numbers of those signals only that have a handler."""


def run_workers(argv: Sequence[str], nodes: Nodes, signals: StopSignals) -> ExitStatus:
    """Starts the workers with the command line `argv`, waits for all of them, and returns the job's exit status.

    No process of the job is left on this node afterwards. `os.environ` is the workers' environment too.
    """
    with _status_folder() as folder:
        signals.folder = folder
        os.environ["DMUON_TITAN_STATUS_DIR"] = str(folder)
        os.environ["DMUON_TITAN_LAUNCHER_PID"] = str(os.getpid())
        try:
            exit_codes = _torchrun(_torchrun_arguments(argv, nodes, folder))
        finally:
            signals.close()
            _end_leftovers(folder)
        statuses = read_statuses(folder)
        status = job_status(statuses, exit_codes, stopped=signals.received is not None)
        if signals.received and status is ExitStatus.PREEMPTED and not statuses:
            signals.say_not_started()
        if not signals.received:
            _report_killed(exit_codes, statuses)
        return status


def _torchrun_arguments(argv: Sequence[str], nodes: Nodes, folder: Path) -> list[str]:
    if nodes.num_nodes == 1:
        meeting = ["--standalone", "--local-addr", "localhost"]
    else:
        meeting = ["--rdzv-backend", "static", "--node-rank", str(nodes.node_rank)]
        meeting += ["--master-addr", nodes.master_addr, "--master-port", str(nodes.master_port)]
    return [
        *("--nnodes", str(nodes.num_nodes), "--nproc-per-node", str(nodes.num_local_ranks), *meeting),
        *("--max-restarts", "0", "--log-dir", str(folder / "torchrun")),
        *("--signals-to-handle", "SIGQUIT"),  # the others are passed on here; it needs one
        *("--no-python", sys.executable, "-u", "-c", WORKER_CODE, str(_REPOSITORY), *argv),
    ]


def _torchrun(arguments: list[str]) -> dict[int, int]:
    """Runs torchrun to its end. Returns the exit code of each rank that failed, the first first."""
    gc.disable()  # a quarter of the time that importing torch takes is spent looking for garbage where there is none
    from torch import distributed as dist
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError

    gc.freeze()
    gc.enable()
    for name in ("elastic", "launcher", "run"):
        torchs = logging.getLogger(f"torch.distributed.{name}")
        torchs.addHandler(logging.NullHandler())
        torchs.propagate = False
    try:
        run.run(run.parse_args(arguments))
    except ChildFailedError as error:
        return _in_order(error.failures)
    except SignalException as stop:
        return {-1: -stop.sigval}
    except (RendezvousError, dist.DistError) as error:
        first_line = str(error).partition("\n")[0]
        sys.stderr.write(f"error: the nodes of this job did not meet ({type(error).__name__}: {first_line})\n")
        return {-1: ExitStatus.FAILURE}
    return {}


def _in_order(failures: Mapping[int, ProcessFailure]) -> dict[int, int]:
    """Exit codes, the first failure first. Within a second a rank that was killed comes before those that missed it."""

    def when(item: tuple[int, ProcessFailure]) -> tuple[int, bool]:
        failure = item[1]
        return failure.timestamp, failure.exitcode >= 0 or failure.exitcode == -signal.SIGTERM

    return {rank: failure.exitcode for rank, failure in sorted(failures.items(), key=when)}


@contextmanager
def _status_folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="dmuon-titan-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def worker_pids(folder: Path | None) -> list[int]:
    """Process ids of the workers that have come up."""
    texts = [path.read_text() for path in folder.glob("pid-*")] if folder is not None else []
    return [int(text) for text in texts if text]


def _end_leftovers(folder: Path) -> None:
    """A worker that was killed may leave readers and compilers of its own; they share its process group."""
    for pid in worker_pids(folder):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)


def read_statuses(folder: Path) -> dict[int, int]:
    """The exit status that each local rank has left."""
    texts = {int(path.name.removeprefix("rank-")): path.read_text().strip() for path in folder.glob("rank-*")}
    return {rank: int(text) for rank, text in texts.items() if text}


def job_status(statuses: Mapping[int, int], exit_codes: Mapping[int, int], *, stopped: bool) -> ExitStatus:
    """The status of a job from the statuses that its ranks have left, and exit codes where one has left none.

    Args:
        statuses: by rank, see `read_statuses`.
        exit_codes: by rank that failed, negative for a signal.
        stopped: whether the launcher was asked to stop; a rank may then have ended before it could leave a status.
    """
    found = set(statuses.values())
    for rank, code in exit_codes.items():
        if rank not in statuses and code == -signal.SIGTERM:
            # Sent by the launcher, or by torchrun to the peers of a rank that failed.
            found.add(ExitStatus.PREEMPTED if stopped else ExitStatus.FAILURE)
        elif rank not in statuses:
            found.add(code)
    known = {status for status in found if status in set(ExitStatus)}
    if found - known:
        known.add(ExitStatus.FAILURE)
    return next((status for status in _BY_IMPORTANCE if status in known), ExitStatus.FINISHED)


def _report_killed(exit_codes: Mapping[int, int], statuses: Mapping[int, int]) -> None:
    """Says of the rank that failed first by which signal it ended, if by one: it could not say so itself."""
    rank, code = next(iter(exit_codes.items()), (0, 0))
    if code >= 0 or rank < 0 or rank in statuses:
        return
    name = signal.Signals(-code).name
    hint = ": the system does that where memory runs out" if name == "SIGKILL" else ""
    sys.stderr.write(f"error: rank {rank} was ended by {name}{hint}\n")
