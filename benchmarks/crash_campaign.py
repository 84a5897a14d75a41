"""Kills a job at random moments of its life, starts it again, and compares it with one that was never killed.

Each round runs `run_train.sh` on two gloo ranks with a save at every second step, sends SIGKILL to the whole job, to
one worker or to the launcher at a moment uniform over the life of the job, and repeats the command until it ends with
status 0; one round in four is killed once more unless it is over by then. A round fails unless

- every start after a kill ends with status 0 and continues from the newest complete checkpoint;
- there is a complete checkpoint, by its checksums, no older than the last that the job said it had saved;
- nothing of the job lives on seconds after the kill;
- losses, gradient norms and consumed batches are those of the undisturbed run bit for bit, each step once, and so are
  the tensors saved last;
- in the end there are the two newest checkpoints, the one continued from, and nothing else.

The job is frozen for a moment before the kill, so that what it was doing can be seen from outside. Needs the extra
"test".
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
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.record import record
from dmuon_titan.checkpoint.manifest import missing_or_short, read_manifest, store
from dmuon_titan.errors import CheckpointError
from models.llama.sizes import LlamaSize
from tests.blackbox.job import Job
from tests.blackbox.runs import copy_with_sizes
from tests.debruijn import write_debruijn

SIZE = LlamaSize(64, 1, 4, 2, 1024, None, 16, 10000.0)
INTERVAL, NUM_KEPT, NUM_RANKS = 2, 2, 2
CONFIG = f"""
[model]
flavor = "small"
[training]
dataset_path = "data"
local_batch_size = 1
seq_len = 8
mixed_precision_param = "float32"
[lr_scheduler]
warmup_steps = 2
[activation_checkpoint]
mode = "none"
[checkpoint]
enable = true
interval = {INTERVAL}
keep_latest_k = {NUM_KEPT}
[metrics]
log_freq = 1
[debug]
trace_batches = true
"""
MODES = ("disabled", "async")
JOB, WORKER, LAUNCHER = "whole job", "one worker", "launcher"
KINDS = (JOB, WORKER, LAUNCHER)

START_UP, STEP, EXIT = "start-up", "step", "exit"
WRITING, VERIFYING, PUBLISHING, REMOVING = (
    "writing a save",
    "verifying a save",
    "publishing a save",
    "removing an old one",
)
PHASES = (START_UP, STEP, WRITING, VERIFYING, PUBLISHING, REMOVING, EXIT)
INSIDE_A_SAVE = (WRITING, VERIFYING)

_FIGURES = ("step", "loss_metrics/global_avg_loss", "loss_metrics/global_max_loss", "grad_norm", "lr", "n_tokens_seen")
_PATIENCE_S = 300.0
_GONE_S = 10.0  # a peer's death is noticed within seconds, and a job that ended is gone 5 s later
_POLL_S = 0.002
_SHARE_KILLED_AGAIN = 0.25
_ROUNDS_BETWEEN_MEASURES = 10


@dataclass(frozen=True)
class Kill:
    """moment_s: since the start of the process. gone_s: from the kill until nothing of the job was left."""

    mode: str
    kind: str
    phase: str
    moment_s: float
    gone_s: float


@dataclass
class Found:
    """What all rounds came to."""

    kills: list[Kill] = field(default_factory=list)
    lives_s: dict[str, list[float]] = field(default_factory=lambda: {mode: [] for mode in MODES})
    save_shares: dict[str, list[float]] = field(default_factory=lambda: {mode: [] for mode in MODES})
    num_killed_again: int = 0
    num_over_before: int = 0
    failures: list[str] = field(default_factory=list)


class Broken(Exception):
    """What a job must not do."""


def main() -> int:
    """Prints one JSON line; what happens in each round goes to standard error. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=200, help="saves are a third of a job's life with 200")
    parser.add_argument("--aim", type=int, default=0, help="rounds, the first, that wait with the kill for a save")
    parser.add_argument("--output", type=Path, help="file to which the JSON line is written too")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="crash-campaign-"))
    begin_s = time.monotonic()
    found = Campaign(folder, arguments.steps, arguments.seed).run(arguments.rounds, arguments.aim)
    figures = {name: getattr(arguments, name) for name in ("rounds", "seed", "steps", "aim")}
    line = json.dumps(
        record("crash_campaign", **figures, **summary(found), duration_s=round(time.monotonic() - begin_s))
    )
    print(line)
    if arguments.output:
        arguments.output.write_text(line + "\n")
    if found.failures:
        sys.stderr.write("\n".join(["", *found.failures, f"error: {len(found.failures)} failures, see {folder}", ""]))
        return 1
    shutil.rmtree(folder)
    return 0


class Campaign:
    """Jobs of one configuration in one folder, and the run that all are compared with."""

    def __init__(self, folder: Path, num_steps: int, seed: int) -> None:
        self.folder, self.num_steps, self.seed = folder, num_steps, seed
        self.found = Found()
        self.reference: Path | None = None
        self._program = copy_with_sizes(folder / "program", {"small": SIZE})
        write_debruijn(folder / "data", num_shards=3)
        (folder / "job.toml").write_text(CONFIG)

    def run(self, num_rounds: int, num_aimed: int) -> Found:
        for number in range(num_rounds):
            try:
                if number % _ROUNDS_BETWEEN_MEASURES == 0:
                    for mode in MODES:
                        self.undisturbed(number, mode)
                self.round(number, aimed=number < num_aimed)
            except (Broken, AssertionError, subprocess.TimeoutExpired) as error:
                self.found.failures.append(f"round {number}: {error}")
                _say(f"round {number}: FAILED: {error}")
                if self.reference is None:
                    break
        return self.found

    def undisturbed(self, number: int, mode: str) -> None:
        """Measures how long a job lives that nobody kills. The first is what all others are compared with."""
        run = self.folder / f"undisturbed-{number}-{mode}" / "run"
        begin_s = time.monotonic()
        ended = self._start(run, mode).end(timeout_s=_PATIENCE_S)
        if ended.status:
            raise Broken(f"{run}: status {ended.status} without a kill:\n{ended.stderr}")
        self._note_life(mode, time.monotonic() - begin_s, ended.stdout)
        if self.reference is None:
            self.reference = run
        else:
            self._compare(run, last_start=None)
            shutil.rmtree(run.parent)

    def _note_life(self, mode: str, life_s: float, output: str) -> None:
        saving_s = sum(map(float, re.findall(r"saved step .* GiB, (\S+) s", output)))
        self.found.lives_s[mode].append(life_s)
        self.found.save_shares[mode].append(saving_s / life_s)
        _say(f"undisturbed, {mode}: {life_s:.1f} s, saving {saving_s / life_s:.0%} of them")

    def round(self, number: int, *, aimed: bool) -> None:
        """One job, from its first start to its end. A kill that comes too late is tried again with another job."""
        chance = random.Random(f"{self.seed}/{number}")
        mode, kind = MODES[number % len(MODES)], KINDS[number % len(KINDS)]
        run = self.folder / f"round-{number}" / "run"
        while (kill := self._attempt(run, mode, kind, chance, aimed=aimed)) is None:
            self.found.num_over_before += 1
            self._compare(run, last_start=None)
            shutil.rmtree(run.parent)
        _say(f"round {number}: {_told(kill)}")
        if chance.random() < _SHARE_KILLED_AGAIN:
            newest = newest_complete(run / "checkpoint")
            again = self._attempt(run, mode, chance.choice(KINDS), chance)
            if again is None:
                self._compare(run, last_start=newest)
            else:
                self.found.num_killed_again += 1
                _say(f"round {number}: again: {_told(again)}")
        self._finish(run, mode)
        shutil.rmtree(run.parent)

    def _attempt(self, run: Path, mode: str, kind: str, chance: random.Random, *, aimed: bool = False) -> Kill | None:
        """Starts the job, kills it, and looks at what is left. None if it was over before."""
        moment_s = chance.uniform(0, self.found.lives_s[mode][-1])
        before = folders_in(run / "checkpoint")
        newest = newest_complete(run / "checkpoint")
        begin_s = time.monotonic()
        job = self._start(run, mode)
        try:
            while job.launcher.poll() is None:
                if time.monotonic() < begin_s + moment_s:
                    time.sleep(_POLL_S)
                    continue
                ranks = job.freeze()
                if job.launcher.pid not in ranks:  # over at this very moment
                    continue
                phase = phase_of(run / "checkpoint", job.output(), before, self.num_steps)
                if aimed and phase not in (*INSIDE_A_SAVE, EXIT):
                    job.thaw()
                    time.sleep(_POLL_S)
                    continue
                killed_s = time.monotonic()
                kind = self._kill(job, ranks, kind, chance)
                ended = job.end(timeout_s=_GONE_S)
                gone_s = time.monotonic() - killed_s
                break
            else:
                life_s = time.monotonic() - begin_s
                ended = job.end(timeout_s=_GONE_S)
                if newest is None:
                    self._note_life(mode, life_s, ended.stdout)
                if ended.status:
                    raise Broken(f"{run}: status {ended.status} before the kill:\n{ended.stderr}")
                self._check_start(run, ended.stdout, newest)
                return None
        finally:
            job.kill()
        kill = Kill(mode, kind, phase, killed_s - begin_s, gone_s)
        self.found.kills.append(kill)
        self._check_start(run, ended.stdout, newest)
        self._check_left(run, kill, ended.status)
        return kill

    def _kill(self, job: Job, ranks: Mapping[int, int | None], kind: str, chance: random.Random) -> str:
        """SIGKILL to a frozen job; the rest goes on. Returns whom it met: before there are workers, the launcher."""
        workers = sorted(pid for pid, rank in ranks.items() if rank is not None)
        if kind == WORKER and not workers:
            kind = LAUNCHER
        victims = {JOB: list(ranks), WORKER: workers and [chance.choice(workers)], LAUNCHER: [job.launcher.pid]}[kind]
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        job.thaw()
        return kind

    def _check_start(self, run: Path, output: str, newest: int | None) -> None:
        """A job continues from the checkpoint that was the newest complete one, if it has come so far."""
        continued = continued_from(output)
        if continued is not None and continued != newest:
            raise Broken(f"{run}: continued after step {continued}, the newest complete checkpoint was {newest}")
        if continued is None and newest is not None and re.search(r"step: +\d", output):
            raise Broken(f"{run}: began anew though step {newest} was complete")

    def _check_left(self, run: Path, kill: Kill, status: int) -> None:
        outputs = "".join(path.read_text() for path in run.parent.glob("*.out"))
        mistake = lost_checkpoint(run / "checkpoint", outputs)
        if mistake is not None:
            raise Broken(f"{run}: {_told(kill)}: {mistake}")
        if status == 0 and newest_complete(run / "checkpoint") != self.num_steps:
            raise Broken(f"{run}: {_told(kill)}: status 0, though step {self.num_steps} is not saved")

    def _finish(self, run: Path, mode: str) -> None:
        """The same command once more, to the end."""
        newest = newest_complete(run / "checkpoint")
        job = self._start(run, mode)
        ended = job.end(timeout_s=_PATIENCE_S)
        if ended.status:
            raise Broken(f"{run}: status {ended.status} when it was started again:\n{ended.stderr}")
        self._check_start(run, ended.stdout, newest)
        self._compare(run, last_start=newest)

    def _compare(self, run: Path, last_start: int | None) -> None:
        """last_start: the step that the last start continued from."""
        assert self.reference is not None
        mistakes = differences(run, self.reference)
        if last_start != self.num_steps:  # a job that finds itself finished removes nothing
            mistakes += misplaced(run / "checkpoint", self.num_steps, last_start)
        if mistakes:
            raise Broken("\n  ".join([f"{run} is not what it would have been:", *mistakes]))

    def _start(self, run: Path, mode: str) -> Job:
        run.mkdir(parents=True, exist_ok=True)
        flags = {"job.dump_folder": run, "training.steps": self.num_steps, "checkpoint.async_mode": mode}
        return Job(
            ["--config", str(self.folder / "job.toml"), *(f"--{name}={value}" for name, value in flags.items())],
            logs=run.parent,
            cwd=self.folder,
            environ={"NPROC_PER_NODE": str(NUM_RANKS)},
            command=(str(self._program),),
        )


def phase_of(checkpoints: Path, output: str, before: Mapping[str, object], num_steps: int) -> str:
    """What a job that stands still is doing, by its folder of checkpoints and what it has printed.

    before: `folders_in` when it was started; what an earlier start has left there is none of its doing.
    """
    if not re.search(r"step: +\d+ +loss", output):
        return START_UP
    new = {name for name, identity in folders_in(checkpoints).items() if before.get(name) != identity}
    if f"step-{num_steps}" in new:
        return EXIT
    for name in new:
        if name.endswith(".tmp"):
            inside = {path.name for path in (checkpoints / name).iterdir()}
            if inside & {"manifest.json", "manifest.json.tmp"}:
                return PUBLISHING
            return VERIFYING if ".metadata" in inside else WRITING
    return REMOVING if any(name.endswith(".removing") for name in new) else STEP


def folders_in(checkpoints: Path) -> dict[str, tuple[int, int]]:
    """Name -> what tells a folder from another one, or later one, of the same name."""
    stats = {path.name: path.stat() for path in checkpoints.glob("step-*")}
    return {name: (stat.st_ino, stat.st_mtime_ns) for name, stat in stats.items()}


def complete_steps(checkpoints: Path) -> list[int]:
    """Steps of which every file is there with the size and the checksum that the manifest says."""
    steps = []
    for path in checkpoints.glob("step-*"):
        with suppress(CheckpointError, OSError):
            manifest = read_manifest(path)
            sound = missing_or_short(path, manifest) is None
            sound = sound and all(store(path / name) == stored for name, stored in manifest.files.items())
            if sound and path.name == f"step-{manifest.step}":
                steps.append(manifest.step)
    return sorted(steps)


def newest_complete(checkpoints: Path) -> int | None:
    return max(complete_steps(checkpoints), default=None)


def lost_checkpoint(checkpoints: Path, output: str) -> str | None:
    """What is wrong if the newest complete checkpoint is older than the last that the job said it had saved."""
    said = max(map(int, re.findall(r"saved step (\d+) in", output)), default=0)
    complete = complete_steps(checkpoints)
    if said > max(complete, default=0):
        return f"step {said} was said to be saved, complete are {complete or 'none'}"
    return None


def differences(run: Path, reference: Path) -> list[str]:
    """In what a run is not the reference: figures and batches of each step, and what was saved last."""
    found = []
    for name in ("metrics.jsonl", *sorted(str(path.relative_to(reference)) for path in reference.glob("trace/*"))):
        here, there = (_records(folder / name) for folder in (run, reference))
        steps = [Counter(record["step"] for record in records) for records in (here, there)]
        if steps[0] != steps[1]:
            wrong = {step: steps[0][step] for step in sorted(steps[0] | steps[1]) if steps[0][step] != steps[1][step]}
            found.append(f"{name}: how often a step is there, where it is not as it should be: {wrong}")
        elif here != there:
            first = next(pair for pair in zip(here, there, strict=True) if pair[0] != pair[1])
            found.append(f"{name}: {first[0]} instead of {first[1]}")
    tensors = [_tensor_files(folder / "checkpoint") for folder in (run, reference)]
    if tensors[0] != tensors[1]:
        found.append(f"checkpoint: saved last were {tensors[0]} instead of {tensors[1]}")
    return found


def misplaced(checkpoints: Path, num_steps: int, last_start: int | None) -> list[str]:
    """What should not be in a finished run's folder of checkpoints, or should be."""
    # A job that was asked to stop saved between intervals, and that one counts among the newest.
    started_from = {last_start} if last_start else set()
    saved = sorted({*range(num_steps, 0, -INTERVAL), *started_from})
    kept = {*saved[-NUM_KEPT:], *started_from}
    complete, there = set(complete_steps(checkpoints)), {path.name for path in checkpoints.iterdir()}
    expected = {f"step-{step}" for step in kept}
    found = [f"checkpoint: {sorted(there)} instead of {sorted(expected)}"] if there != expected else []
    return found + ([f"checkpoint: complete are {sorted(complete)}"] if complete != kept else [])


def continued_from(output: str) -> int | None:
    match = re.search(r"continuing after step (\d+)", output) or re.search(
        r"this run is finished: \S+step-(\d+)", output
    )
    return int(match[1]) if match else None


def _records(path: Path) -> list[dict[str, Any]]:
    """Lines of a file, of metrics.jsonl without what depends on the clock."""
    records = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    if path.name == "metrics.jsonl":
        return [{name: record[name] for name in _FIGURES} for record in records]
    return records


def _tensor_files(checkpoints: Path) -> tuple[int | None, dict[str, str]]:
    """The newest complete step, and the checksums of the files that hold its tensors."""
    step = newest_complete(checkpoints)
    files = {} if step is None else read_manifest(checkpoints / f"step-{step}").files
    return step, {name: f"{file.crc32:08x}" for name, file in files.items() if name.endswith(".distcp")}


def summary(found: Found) -> dict[str, Any]:
    """The figures of the JSON line."""
    kills = found.kills
    gone_s = [kill.gone_s for kill in kills]
    table = {
        mode: {
            kind: _counts([kill.phase for kill in kills if (kill.mode, kill.kind) == (mode, kind)], PHASES)
            for kind in KINDS
        }
        for mode in MODES
    }
    return {
        "failures": len(found.failures),
        "kills": len(kills),
        "inside_a_save": sum(kill.phase in INSIDE_A_SAVE for kill in kills),
        "by_phase": _counts([kill.phase for kill in kills], PHASES),
        "by_kind": _counts([kill.kind for kill in kills], KINDS),
        "by_mode": _counts([kill.mode for kill in kills], MODES),
        "by_mode_kind_and_phase": table,
        "killed_again": found.num_killed_again,
        "over_before_the_kill": found.num_over_before,
        "life_s": {mode: round(statistics.median(lives), 1) for mode, lives in found.lives_s.items() if lives},
        "share_saving": {mode: round(statistics.median(of), 2) for mode, of in found.save_shares.items() if of},
        "gone_after_kill_s": {"median": round(statistics.median(gone_s), 2), "max": round(max(gone_s), 2)}
        if kills
        else {},
    }


def _counts(values: list[str], names: tuple[str, ...]) -> dict[str, int]:
    return {name: values.count(name) for name in names if name in values}


def _told(kill: Kill) -> str:
    return f"{kill.mode}, {kill.kind} met at {kill.moment_s:.2f} s, {kill.phase}, gone after {kill.gone_s:.2f} s"


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")


if __name__ == "__main__":
    sys.exit(main())
