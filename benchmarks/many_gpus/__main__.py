"""All that can only be said on several GPUs, with those that there are.

python -m benchmarks.many_gpus --out benchmarks/results/many_gpus_NAME.jsonl

    exactness    what must be equal bit for bit, or within 1e-5, on NCCL
    collectives  broadcasts and reductions as dmuon issues them, beside every other way
    steps        Muon, AdamW and the naive way on each mesh, where a step's time goes, and weak scaling
    speed        8B as a job trains it, beside TorchTitan's published figures

Starts torchrun for each part, with a limit of its own. A line is in the file as soon as it is there, and a part whose
estimate exceeds the time that is left is not begun: choose others by --only. What a part prints goes to a file beside
--out. Prints tables at the end. The status is 1 if a part failed or a comparison did not pass.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.many_gpus.lines import append, read
from benchmarks.many_gpus.parts import KINDS, Part, parts, rehearsal
from benchmarks.many_gpus.tables import TABLES
from benchmarks.page import markdown_table
from dmuon_titan.devices import visible_gpus

_PATIENCE_S = 40.0  # after SIGTERM, which torchrun passes on to its ranks; half a minute later it kills them


def main() -> int:
    """Run what there is time for; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="lines are appended")
    parser.add_argument("--only", nargs="+", metavar="KIND OR NAME", help=f"of {', '.join(KINDS)}, or as --plan says")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--plan", action="store_true", help="print what would run, and run nothing")
    parser.add_argument("--gpus", type=int, help="as if there were so many; for --plan")
    parser.add_argument("--rehearse", type=int, metavar="RANKS", help="on CPUs, with a tiny model")
    arguments = parser.parse_args()
    num_gpus = len(visible_gpus(os.environ)) if arguments.gpus is None else arguments.gpus
    found = rehearsal(arguments.rehearse) if arguments.rehearse else parts(num_gpus)
    chosen = [part for part in found if not arguments.only or {part.kind, part.name} & set(arguments.only)]
    if not chosen:
        parser.error(f"--only: nothing of that name; there are {', '.join(repr(part.name) for part in found)}")
    if arguments.plan:
        print(plan(chosen, arguments.minutes * 60))
        return 0
    if arguments.out is None:
        parser.error("--out: name a file")
    if not arguments.rehearse and num_gpus == 0:
        parser.error("there is no GPU here: --rehearse RANKS runs on CPUs")
    num_before = len(read(arguments.out)) if arguments.out.exists() else 0
    run_all(chosen, arguments.out, time.monotonic() + arguments.minutes * 60, on_cpu=bool(arguments.rehearse))
    lines = read(arguments.out)[num_before:]
    for name, table in TABLES.items():
        header, rows = table(lines)
        if rows:
            print(f"\n{name}\n\n{markdown_table(header, rows)}")
    return int(any(line.get("passed") is False or line.get("status") == "failed" for line in lines))


def plan(chosen: Sequence[Part], left_s: float) -> str:
    """What would run if every part took as long as estimated."""
    rows, needed_s = [], 0
    for part in chosen:
        fits = part.estimate_s <= left_s - needed_s
        needed_s += part.estimate_s * fits
        told = f"{needed_s} s" if fits else "no time left"
        rows.append((part.name, f"{part.num_ranks}", f"{part.estimate_s} s", f"{part.limit_s} s", told))
    return markdown_table(("part", "ranks", "estimate", "limit", "together"), rows)


def run_all(chosen: Sequence[Part], out: Path, deadline: float, *, on_cpu: bool) -> None:
    environment = {**os.environ, "PYTORCH_ALLOC_CONF": "expandable_segments:True"}  # as run_train.sh
    if on_cpu:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    command = shlex.join(["python", "-m", "benchmarks.many_gpus", *sys.argv[1:]])
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="many-gpus-") as work:
        for part in chosen:
            began = time.monotonic()
            status = "no time left"
            if part.estimate_s <= deadline - began:
                log = out.with_name(f"{out.stem}.{part.name.replace(', ', '-').replace(' ', '-')}.log")
                limit_s = min(part.limit_s, deadline - began)
                status = run(part.command(str(out), work), environment, log, limit_s)
            seconds = round(time.monotonic() - began, 1)
            line = {"benchmark": "many_gpus", "part": part.name, "status": status, "seconds": seconds}
            append(out, line | {"estimate_s": part.estimate_s, "command": command})


def run(command: Sequence[str], environment: dict[str, str], log: Path, limit_s: float) -> str:
    """Returns "done", "failed" or "stopped at its limit"."""
    with log.open("w") as file:
        process = subprocess.Popen(
            command, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status = "done" if process.wait(limit_s) == 0 else "failed"
        except subprocess.TimeoutExpired:
            status = "stopped at its limit"
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(_PATIENCE_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if status != "done":
        print("\n".join(log.read_text().splitlines()[-20:]), file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
