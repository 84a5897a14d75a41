"""How many of N starts of a short gloo job end with status 0: a process can also fail after good work, at its exit."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from benchmarks.record import record
from dmuon_titan.config.paths import REPOSITORY


def main() -> None:
    """Print one JSON line; what failed starts said goes to standard error."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--starts", type=int, default=100)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2)
    arguments = parser.parse_args()
    statuses: Counter[int] = Counter()
    durations_s = []
    with tempfile.TemporaryDirectory() as folder:
        corpus = _prepare(Path(folder))
        for number in range(arguments.starts):
            begin_s = time.perf_counter()
            statuses[_start(corpus, Path(folder) / f"run-{number}", arguments)] += 1
            durations_s.append(time.perf_counter() - begin_s)
    names = ("starts", "ranks", "steps")
    duration = {"median": statistics.median(durations_s), "min": min(durations_s), "max": max(durations_s)}
    figures = {
        "statuses": {str(status): count for status, count in sorted(statuses.items())},
        "start_to_end_s": {name: round(value, 2) for name, value in duration.items()},
    }
    print(json.dumps(record("starts", **{name: getattr(arguments, name) for name in names}, **figures)))


def _prepare(folder: Path) -> Path:
    """Some 30,000 tokens of Python's json package."""
    corpus = folder / "corpus"
    prepare = [sys.executable, "-m", "dmuon_titan.tools.prepare", str(Path(json.__file__).parent), "--include", "*.py"]
    command = [*prepare, "--output", str(corpus), "--vocab-size", "400"]
    subprocess.run(command, cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return corpus


def _start(corpus: Path, dump_folder: Path, arguments: argparse.Namespace) -> int:
    """Runs one job to its end, checkpoint included, and returns its exit status."""
    flags = {
        "training.dataset_path": corpus,
        "job.dump_folder": dump_folder,
        "training.steps": arguments.steps,
        "training.seq_len": 64,
        "training.local_batch_size": 2,
        "training.global_batch_size": -1,
        "training.sample_tokens": 8,
    }
    environ = {"CUDA_VISIBLE_DEVICES": "", "PYTHON": sys.executable, "NPROC_PER_NODE": str(arguments.ranks)}
    ended = subprocess.run(
        [REPOSITORY / "run_train.sh", *(f"--{name}={value}" for name, value in flags.items())],
        env=os.environ | environ,
        capture_output=True,
        text=True,
        check=False,
    )
    if ended.returncode:
        sys.stderr.write(f"status {ended.returncode}:\n{ended.stdout}{ended.stderr}\n")
    return ended.returncode


if __name__ == "__main__":
    main()
