"""How fast the harness trains, beside what TorchTitan v0.2.2 reaches on the same kind of machine (one and two H200).

python -m benchmarks.training_speed --out benchmarks/results/training_speed.json

Every case is a job as `run_train.sh` runs it, but for the sizes: 30 steps of AdamW at sequence 8192 in bf16 with
selective activation checkpointing; tokens, MFU and memory are those that the job logs for steps 21 to 30.
TorchTitan's flavors have a head of their own where ours share the embedding's matrix, so these do too. Cases of one
GPU run side by side on the GPUs there are. Prints a table and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

from benchmarks.record import record
from dmuon_titan import train
from models.llama.sizes import FLAVORS

SIZES = FLAVORS["llama3"]
UNTIED = {
    "1B-untied": replace(SIZES["1B"], tie_embeddings=False),
    "3B-untied": replace(SIZES["3B"], tie_embeddings=False),
    "8B-8-layers": replace(SIZES["8B"], num_layers=8),
    "8B-16-layers": replace(SIZES["8B"], num_layers=16),
}


@dataclass(frozen=True)
class Job:
    name: str
    flavor: str
    num_gpus: int
    local_batch_size: int
    compile: bool
    optimizer: str
    checkpointing: str


@dataclass(frozen=True)
class Case(Job):
    """A job, and what TorchTitan reaches in it: MFU in percent, and reserved memory."""

    mfu: float
    reserved_gib: float


# Name, flavor, GPUs, local batch, compile, TorchTitan's MFU and memory.
COMPARED = [
    ("1B, one GPU", "1B-untied", 1, 4, True, 54.7, 50.4),
    ("8B with 8 layers, one GPU", "8B-8-layers", 1, 2, True, 56.2, 49.6),
    ("1B eager, one GPU", "1B-untied", 1, 4, False, 45.8, 93.2),
    ("1B, two GPUs", "1B-untied", 2, 4, True, 53.1, 43.4),
    ("3B, two GPUs", "3B-untied", 2, 2, True, 54.5, 53.3),
]
CASES = [
    Case(f"{name}, {optimizer}, {option}", flavor, num_gpus, batch, compiled, optimizer, option, mfu, reserved_gib)
    for optimizer, option in (("AdamW", "op_all"), ("AdamW", "op"), ("Muon", "op_all"))
    for name, flavor, num_gpus, batch, compiled, mfu, reserved_gib in COMPARED
]


def main() -> None:
    """Run the cases; in a worker, the job."""
    if os.environ.get("DMUON_TITAN_BENCHMARK_WORKER"):
        SIZES.update(UNTIED)
        train.end_process(train.main())
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[case.name for case in CASES], choices=[c.name for c in CASES])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    cases = [case for case in CASES if case.name in arguments.only]
    found: dict[str, dict[str, Any]] = {}
    gpus: SimpleQueue[int] = SimpleQueue()
    for index in range(torch.cuda.device_count()):
        gpus.put(index)

    def run_alone(case: Case) -> None:
        gpu = gpus.get()
        found[case.name] = run(case, arguments.steps, [gpu])
        gpus.put(gpu)

    with ThreadPoolExecutor(torch.cuda.device_count()) as pool:
        list(pool.map(run_alone, (case for case in cases if case.num_gpus == 1)))
    for case in cases:
        if 1 < case.num_gpus <= torch.cuda.device_count():
            found[case.name] = run(case, arguments.steps, list(range(case.num_gpus)))
    rows = [{**asdict(case), **found[case.name]} for case in cases if case.name in found]
    for row in rows:
        print(
            f"{row['name']:40} {row['tokens_per_s']:8,.0f} tokens/s/GPU, MFU {row['measured_mfu']:.1f} % against "
            f"{row['mfu']} ({row['measured_mfu'] / row['mfu']:.3f}), {row['measured_gib']:.1f} GiB of "
            f"{row['reserved_gib']}, {row['allocated_gib']:.1f} allocated"
        )
    line = record("training_speed", steps=arguments.steps, cases=rows)
    print(json.dumps(line))
    if arguments.out:
        arguments.out.write_text(json.dumps(line) + "\n")


def run(job: Job, num_steps: int, gpus: list[int]) -> dict[str, Any]:
    """The figures of the last third of a job's steps."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            **os.environ,
            "DMUON_TITAN_BENCHMARK_WORKER": "1",
            "CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus)),
            "PYTORCH_ALLOC_CONF": "expandable_segments:True",  # as run_train.sh
        }
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(job.num_gpus)]
        command += ["--standalone", "-m", "benchmarks.training_speed", "--config", "llama3_1b.toml"]
        flags = {
            "job.dump_folder": folder,
            "model.flavor": job.flavor,
            "optimizer.name": job.optimizer,
            "training.steps": num_steps,
            "metrics.log_freq": num_steps // 3,
            "training.local_batch_size": job.local_batch_size,
            "compile.enable": str(job.compile).lower(),
            "activation_checkpoint.selective_ac_option": job.checkpointing,
            "checkpoint.enable": "false",
            "metrics.enable_tensorboard": "false",
        }
        command += [word for key, value in flags.items() for word in (f"--{key}", str(value))]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if result.returncode:
            raise RuntimeError(
                f"{job.name}: status {result.returncode}\n{result.stdout[-4000:]}{result.stderr[-4000:]}"
            )
        metrics = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    last = metrics[-1]
    return {
        "tokens_per_s": last["throughput(tps)"],
        "measured_mfu": last["mfu(%)"],
        "measured_gib": last["memory/max_reserved(GiB)"],
        "allocated_gib": last["memory/max_allocated(GiB)"],
    }


if __name__ == "__main__":
    main()
