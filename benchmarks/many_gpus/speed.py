"""Llama 8B as a job trains it, beside TorchTitan's published figures.

python -m benchmarks.many_gpus.speed --gpus 8 --optimizer Muon --out FILE.jsonl

Sequence 8192, local batch 2, selective checkpointing "op", compiled, on one shard axis. On fewer than four GPUs with as
many layers as fit; then MFU is what compares. TorchTitan's figures are from eight H100 limited to 500 W, with AdamW.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.many_gpus.lines import append
from benchmarks.record import record
from benchmarks.training_speed import SIZES, UNTIED, Job, run

TORCHTITAN_TOKENS_PER_S, TORCHTITAN_MFU = 6667, 39.0
NUM_STEPS = 12
# GPUs -> flavor.
FEWER_LAYERS = {1: "8B-8-layers", 2: "8B-16-layers"}


def main() -> None:
    """Print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, required=True)
    parser.add_argument("--optimizer", choices=("Muon", "AdamW"), required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    flavor = FEWER_LAYERS.get(arguments.gpus, "8B")
    size = (SIZES | UNTIED)[flavor]
    job = Job(flavor, flavor, arguments.gpus, 2, compile=True, optimizer=arguments.optimizer, checkpointing="op")
    figures = run(job, NUM_STEPS, list(range(arguments.gpus)))
    line = record(
        "many_gpus.speed",
        num_ranks=arguments.gpus,
        flavor="8B",
        num_layers=size.num_layers,
        optimizer=arguments.optimizer,
        steps=NUM_STEPS,
        tokens_per_s_and_gpu=figures["tokens_per_s"],
        mfu=figures["measured_mfu"],
        reserved_gib=figures["measured_gib"],
        torchtitan={"tokens_per_s_and_gpu": TORCHTITAN_TOKENS_PER_S, "mfu": TORCHTITAN_MFU, "num_layers": 32},
    )
    append(arguments.out, line)


if __name__ == "__main__":
    main()
