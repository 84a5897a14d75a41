"""Asks jobs to stop at random moments of their lives, starts them again, and compares them with one that ran through.

Each round runs `run_train.sh` on two gloo ranks with a save at every second step and sends SIGTERM, SIGINT or SIGUSR1
to the launcher, to one worker or to all processes, at a moment uniform over the life of the job; one round in four
sends a second one shortly after. A round fails unless

- the job ends with status 75 within seconds, or with 0 where its last step was saved already, or, after a second
  signal, with 1;
- with status 75, all ranks have made the same steps, and the last of them is saved; before the first step nothing is;
- the same command then goes on to the end, with the losses, gradient norms, batches and tensors of the undisturbed run.

Needs the extra "test".
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.crash_campaign import (
    EXIT,
    JOB,
    LAUNCHER,
    NUM_RANKS,
    WORKER,
    Broken,
    Campaign,
    Kill,
    complete_steps,
    folders_in,
    lost_checkpoint,
    newest_complete,
    phase_of,
)
from benchmarks.record import record
from dmuon_titan.errors import ExitStatus
from tests.blackbox.job import Ended, Job

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_PATIENCE_S = 20.0
_SHARE_SENT_AGAIN = 0.25
# Signals within a second count as one: a terminal and a launcher may both deliver it.
_AGAIN_AFTER_S = (1.1, 2.0)
_POLL_S = 0.002


def main() -> int:
    """Prints one JSON line; what happens in each round goes to standard error. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--output", type=Path, help="file to which the JSON line is written too")
    arguments = parser.parse_args()
    # A shell has its background jobs ignore SIGINT, and theirs would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    folder = Path(tempfile.mkdtemp(prefix="signal-campaign-"))
    begin_s = time.monotonic()
    campaign = SignalCampaign(folder, arguments.steps, arguments.seed)
    failures = campaign.run(arguments.rounds, 0).failures
    figures: dict[str, Any] = {name: getattr(arguments, name) for name in ("rounds", "seed", "steps")}
    figures |= {"failures": len(failures), **campaign.summary(), "duration_s": round(time.monotonic() - begin_s)}
    line = json.dumps(record("signal_campaign", **figures))
    print(line)
    if arguments.output:
        arguments.output.write_text(line + "\n")
    if failures:
        sys.stderr.write("\n".join(["", *failures, f"error: {len(failures)} failures, see {folder}", ""]))
        return 1
    shutil.rmtree(folder)
    return 0


class SignalCampaign(Campaign):
    """A campaign whose jobs are asked to stop instead of killed."""

    def __init__(self, folder: Path, num_steps: int, seed: int) -> None:
        super().__init__(folder, num_steps, seed)
        self.statuses: Counter[int] = Counter()
        self.signals: Counter[str] = Counter()
        self.num_sent_again = 0

    def summary(self) -> dict[str, Any]:
        kills = self.found.kills
        stopped_s = [kill.gone_s for kill in kills]
        return {
            "signals": len(kills),
            "statuses": {str(status): count for status, count in sorted(self.statuses.items())},
            "by_phase": dict(Counter(kill.phase for kill in kills)),
            "by_target": dict(Counter(kill.kind for kill in kills)),
            "by_signal": dict(self.signals),
            "sent_again": self.num_sent_again,
            "ended_after_s": {"median": round(statistics.median(stopped_s), 2), "max": round(max(stopped_s), 2)},
        }

    def _attempt(self, run: Path, mode: str, kind: str, chance: random.Random, *, aimed: bool = False) -> Kill | None:
        """Starts the job, asks it to stop, and looks at what is left. None if it was over before."""
        number = chance.choice(SIGNALS)
        moment_s = chance.uniform(0, self.found.lives_s[mode][-1])
        again_after_s = chance.uniform(*_AGAIN_AFTER_S) if chance.random() < _SHARE_SENT_AGAIN else None
        before, complete = folders_in(run / "checkpoint"), complete_steps(run / "checkpoint")
        begin_s = time.monotonic()
        job = self._start(run, mode)
        try:
            while time.monotonic() < begin_s + moment_s and job.launcher.poll() is None:
                time.sleep(_POLL_S)
            ranks = job.freeze()
            if job.launcher.pid not in ranks:
                ended = job.end(timeout_s=_PATIENCE_S)
                if ended.status:
                    raise Broken(f"{run}: status {ended.status} before the signal:\n{ended.stderr}")
                return None
            phase = phase_of(run / "checkpoint", job.output(), before, self.num_steps)
            sent_s = time.monotonic()
            kind = _send(job, ranks, kind, number, chance)
            sent_again = again_after_s is not None and self._send_again(job, again_after_s)
            try:
                ended = job.end(timeout_s=_PATIENCE_S)
            except subprocess.TimeoutExpired:
                raise Broken(f"{run}: {number.name} to {kind}, {phase}: goes on:\n{job.output()}") from None
            kill = Kill(mode, kind, phase, sent_s - begin_s, time.monotonic() - sent_s)
        finally:
            job.kill()
        self.found.kills.append(kill)
        self.statuses[ended.status] += 1
        self.signals[number.name] += 1
        mistake = self._mistake(run, ended, phase, complete, sent_again=sent_again)
        if mistake:
            raise Broken(f"{run}: {number.name} to {kind}, {phase}, {sent_again=}: {mistake}\n{ended.stderr}")
        return kill

    def _send_again(self, job: Job, after_s: float) -> bool:
        deadline_s = time.monotonic() + after_s
        while time.monotonic() < deadline_s and job.launcher.poll() is None:
            time.sleep(_POLL_S)
        if job.launcher.poll() is not None:
            return False
        job.send(signal.SIGTERM)
        self.num_sent_again += 1
        return True

    def _mistake(self, run: Path, ended: Ended, phase: str, before: list[int], *, sent_again: bool) -> str | None:
        """What is wrong with how a job ended and with what it left; None if nothing is."""
        checkpoints = run / "checkpoint"
        newest, steps = newest_complete(checkpoints), _steps_made(run)
        legal = {ExitStatus.PREEMPTED} | ({ExitStatus.FAILURE} if sent_again else set())
        if newest == self.num_steps or phase == EXIT:
            legal |= {ExitStatus.FINISHED}
        if ended.status not in legal:
            return f"status {ended.status}, legal are {sorted(map(int, legal))}"
        lost = lost_checkpoint(checkpoints, "".join(path.read_text() for path in run.parent.glob("*.out")))
        if lost or ended.status != ExitStatus.PREEMPTED:
            return lost
        if not re.search(r"step: +\d+ +loss", ended.stdout):
            written = sorted(set(complete_steps(checkpoints)) ^ set(before))
            return f"no step was made, but checkpoints are others: {written}" if written else None
        if set(steps.values()) != {newest}:
            return f"saved last is step {newest}, made were {steps} by rank"
        return None


def _send(job: Job, ranks: Mapping[int, int | None], kind: str, number: signal.Signals, chance: random.Random) -> str:
    """A signal to a frozen job, which goes on. Returns whom it met: before there are workers, the launcher."""
    workers = sorted(pid for pid, rank in ranks.items() if rank is not None)
    if kind == WORKER and not workers:
        kind = LAUNCHER
    targets = {JOB: list(ranks), WORKER: workers and [chance.choice(workers)], LAUNCHER: [job.launcher.pid]}[kind]
    for pid in targets:
        os.kill(pid, number)
    job.thaw()
    return kind


def _steps_made(run: Path) -> dict[int, int]:
    """Rank -> the last step that it consumed a batch of."""
    last = {}
    for rank in range(NUM_RANKS):
        path = run / "trace" / f"rank-{rank}.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        last[rank] = max((json.loads(line)["step"] for line in lines), default=0)
    return last


if __name__ == "__main__":
    sys.exit(main())
