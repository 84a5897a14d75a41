"""A job as a person starts and stops it: run_train.sh in a process of its own, seen from outside only."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
RUN_TRAIN = REPOSITORY / "run_train.sh"

# What a developer's shell may hold would decide what a test sees.
_VARIABLES_OF_A_JOB = re.compile(
    "CONFIG_FILE|NGPU|NPROC_PER_NODE|NNODES|NODE_RANK|MASTER_.*|RANK|LOCAL_RANK|WORLD_SIZE|PYTHON.*|PET_.*|DMUON_.*"
)
_TAG = "DMUON_TEST_JOB"
_POLL_INTERVAL_S = 0.05
_MOURNING_S = 5.0


@dataclass(frozen=True)
class Ended:
    """How a job ended."""

    status: int
    stdout: str
    stderr: str


class Job:
    """A running job. Every process that it starts inherits a variable by which it is found."""

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        logs: Path,
        cwd: Path,
        environ: Mapping[str, str],
        command: Sequence[str] = (str(RUN_TRAIN),),
    ) -> None:
        self._tag = uuid.uuid4().hex
        self._logs = [logs / f"{self._tag}.{stream}" for stream in ("out", "err")]
        environment = {name: value for name, value in os.environ.items() if not _VARIABLES_OF_A_JOB.fullmatch(name)}
        environment |= {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", **environ}
        with self._logs[0].open("w") as out, self._logs[1].open("w") as err:
            self.launcher = subprocess.Popen(
                [*command, *arguments],
                cwd=cwd,
                env=environment | {_TAG: self._tag},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
                preexec_fn=_hear_interrupts,
            )

    def wait_for(self, pattern: str, *, timeout_s: float = 120) -> None:
        """Returns once the output has a match of `pattern`."""
        self._wait(lambda: re.search(pattern, self.output()), repr(pattern), timeout_s)

    def worker(self, rank: int, *, timeout_s: float = 60) -> int:
        """Process id of a rank, once there is one."""
        self._wait(lambda: self._pids_of(rank), f"rank {rank}", timeout_s)
        (pid,) = self._pids_of(rank)
        return pid

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to the process that run_train.sh became, and to no other."""
        self.launcher.send_signal(number)

    def freeze(self) -> dict[int, int | None]:
        """Stops every process of the job where it is, as long as it may be looked at.

        Returns:
            Process id -> rank, or None of a process that has none, once all of them stand still.
        """
        frozen: dict[int, int | None] = {}
        while True:
            found = {pid: _rank(environ) for pid, environ in self._processes()}
            for pid in found.keys() - frozen.keys():
                _signal(pid, signal.SIGSTOP)
            if found == frozen and all(_stands_still(pid) for pid in found):
                return found
            frozen = found

    def thaw(self) -> None:
        """Lets a frozen job go on."""
        for pid, _ in self._processes():
            _signal(pid, signal.SIGCONT)

    def end(self, *, timeout_s: float = 180) -> Ended:
        """Waits for the end of the job, and makes sure that nothing of it lives on."""
        try:
            status = self.launcher.wait(timeout_s)
            deadline_s = time.monotonic() + _MOURNING_S
            while self._processes() and time.monotonic() < deadline_s:
                time.sleep(_POLL_INTERVAL_S)
            assert not self._processes(), f"processes of the job are left:\n{self.output()}"
        finally:
            self.kill()
        return Ended(status, *(log.read_text() for log in self._logs))

    def kill(self) -> None:
        """Ends whatever is left, for a test that failed."""
        for pid, _ in self._processes():
            _signal(pid, signal.SIGKILL)
        self.launcher.kill()
        self.launcher.wait()

    def output(self) -> str:
        return "".join(log.read_text() for log in self._logs)

    def _wait(self, there_is: Callable[[], object], what: str, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not there_is():
            assert self.launcher.poll() is None, f"ended without {what}:\n{self.output()}"
            assert time.monotonic() < deadline_s, f"no {what} within {timeout_s} s:\n{self.output()}"
            time.sleep(_POLL_INTERVAL_S)

    def _pids_of(self, rank: int) -> list[int]:
        return [pid for pid, environ in self._processes() if f"RANK={rank}" in environ]

    def _processes(self) -> list[tuple[int, list[str]]]:
        """Process id and environment of every living process of this job."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                environ = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue
            if f"{_TAG}={self._tag}" in environ:
                found.append((int(folder.name), environ))
        return found


def _rank(environ: list[str]) -> int | None:
    return next((int(entry.removeprefix("RANK=")) for entry in environ if entry.startswith("RANK=")), None)


def _signal(pid: int, number: signal.Signals) -> None:
    """To a process that may be gone by now."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _stands_still(pid: int) -> bool:
    """Whether a process that was told to stop has come to do so, or is gone."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state in "TtZX"


def _hear_interrupts() -> None:
    """A shell has its background jobs ignore SIGINT, and what ignores it when it starts goes on doing so."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
