"""Whether what must be equal is equal, with the back-end that this machine has.

torchrun --nproc-per-node 4 -m benchmarks.many_gpus.exactness --work FOLDER --out FILE.jsonl

On 2 or 4 ranks, bit for bit under determinism, float32 and bf16: replicate rows against one shard axis, publishing
late against at once, Z2 against Z3, a restart against an uninterrupted run; and as a control other data, which must
show. On 2, 4 and 8 ranks in float32: a mesh with tensor parallelism against one rank, within 1e-5. What one rank does,
it leaves in FOLDER in a run of its own. Losses and norms of ten steps are compared, a hash of every parameter after
each, and the parameters after the last.
"""

from __future__ import annotations

import argparse
import math
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from benchmarks.many_gpus.histories import Differences, Recording
from benchmarks.many_gpus.lines import append
from benchmarks.parallel_model import (
    ParallelJob,
    build_trainer,
    end_ranks,
    free_memory,
    job_size,
    start_ranks,
)
from benchmarks.record import record
from dmuon.state_dict import get_state_dict, set_state_dict
from dmuon_titan.config.schema import JobConfig, build
from dmuon_titan.data.loader import Batch
from dmuon_titan.mesh import ParallelMesh, build_mesh
from dmuon_titan.seeding import use_deterministic_algorithms

NUM_STEPS, SAVED_STEP, TOLERANCE = 10, 5, 1e-5
SAME, OTHER, WITHIN = "same bits", "other bits", f"within {TOLERANCE}"
CHECKPOINT = "checkpoint"
Degrees = tuple[int, int, int]


@dataclass(frozen=True)
class Scale:
    """What is trained. More tokens than a matrix has rows, or rounding of singular gradients is all that one sees."""

    flavor: str
    num_layers: int
    seq_len: int
    global_batch_size: int = 8


DEBUG, LARGE, TINY = Scale("debugmodel", 6, 256), Scale("1B", 2, 512), Scale("debugmodel", 2, 64)


@dataclass(frozen=True)
class Run:
    """How it is trained.

    Attributes:
        exact: same bits wherever they are promised, by sums in a fixed order; else near to one rank, by Newton-Schulz
            in float32.
        first_batch: where the data begins.
    """

    scale: Scale
    degrees: Degrees
    dtype: str
    replicate_async: bool = True
    reshard: str = "always"
    exact: bool = True
    first_batch: int = 0

    @property
    def num_ranks(self) -> int:
        return math.prod(self.degrees)

    @property
    def folder(self) -> str:
        """Named by all that it is."""
        return "-".join(re.findall(r"='?([\w.]+|\([^)]+\))", repr(self))).replace(", ", "x")

    @property
    def config(self) -> JobConfig:
        replicate, shard, tp = self.degrees
        return build(
            {
                "model.flavor": self.scale.flavor,
                "optimizer.lr": 3e-4,
                "optimizer.replicate_async": self.replicate_async,
                "optimizer.ns_dtype": "auto" if self.exact else "float32",
                "training.seq_len": self.scale.seq_len,
                "training.local_batch_size": self.scale.global_batch_size // (replicate * shard),
                "training.mixed_precision_param": self.dtype,
                "parallelism.data_parallel_replicate_degree": replicate,
                "parallelism.data_parallel_shard_degree": shard,
                "parallelism.tensor_parallel_degree": tp,
                "parallelism.fsdp_reshard_after_forward": self.reshard,
                "activation_checkpoint.mode": "none",
                "checkpoint.enable": False,
                "debug.deterministic": self.exact,
            }
        )


class Training:
    """A run under way."""

    def __init__(self, run: Run, device: torch.device) -> None:
        torch.use_deterministic_algorithms(run.exact)
        self.run, self.device = run, device
        self.mesh = _mesh(device, run.degrees)
        self.size = job_size(run.config, run.scale.num_layers)
        self.trainer = build_trainer(ParallelJob(run.config, self.size, run.degrees, self.mesh))
        self.recording = Recording(self.trainer.model)

    def steps(self, numbers: range) -> None:
        for number in numbers:
            gradients, _ = self.trainer.update(number + 1, [self._batch(self.run.first_batch + number)])
            self.recording.add(gradients.loss, gradients.norm)

    def _batch(self, number: int) -> Batch:
        """This rank's part of a global batch."""
        shape = (self.run.scale.global_batch_size, self.run.scale.seq_len + 1)
        tokens = torch.randint(self.size.vocab_size, shape, generator=torch.Generator().manual_seed(number))
        mine = tokens.chunk(self.mesh.dp_world)[self.mesh.dp_rank]
        return Batch(mine[:, :-1], mine[:, 1:], [], 0)

    def save(self, folder: Path) -> None:
        dcp.save(get_state_dict(self.trainer.model, self.trainer.optimizer), checkpoint_id=folder)

    def load(self, folder: Path) -> None:
        state = get_state_dict(self.trainer.model, self.trainer.optimizer)
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(self.trainer.model, self.trainer.optimizer, state)
        self.recording = Recording(self.trainer.model, SAVED_STEP)

    def close(self) -> None:
        del self.trainer, self.recording
        free_memory(self.device)


@cache
def _mesh(device: torch.device, degrees: Degrees) -> ParallelMesh:
    """One for all runs: every communicator of NCCL's takes time and memory."""
    return build_mesh(device, degrees)


@dataclass(frozen=True)
class Comparison:
    """Of a run with what another one has left behind.

    Attributes:
        wanted: SAME, OTHER or WITHIN.
        restarted: from a checkpoint that `against` has written, and compared from there on.
    """

    name: str
    run: Run
    against: Run
    wanted: str = SAME
    restarted: bool = False


def comparisons_of_bits(scale: Scale, dtype: str, num_ranks: int) -> list[Comparison]:
    """Replicate rows of one rank leave nothing to gather again: on two ranks what is about that has one shard axis."""
    flat = Run(scale, (1, num_ranks, 1), dtype)
    rows = Run(scale, (2, num_ranks // 2, 1), dtype)
    both_axes = rows if num_ranks > 2 else flat
    found = [
        Comparison("replicate rows = shard axis", rows, flat),
        Comparison("published late = at once", replace(rows, replicate_async=False), rows),
        Comparison("Z2 = Z3", replace(both_axes, reshard="never"), both_axes),
        Comparison("restarted = uninterrupted", both_axes, both_axes, restarted=True),
    ]
    if scale != LARGE:
        found.append(Comparison("control: other data", replace(flat, first_batch=NUM_STEPS), flat, OTHER))
    return found


def comparison_with_one_rank(scale: Scale, num_ranks: int) -> Comparison:
    degrees = {2: (1, 1, 2), 4: (1, 2, 2), 8: (2, 2, 2)}[num_ranks]
    return Comparison("tensor parallelism = one rank", on_one_rank(scale, degrees), on_one_rank(scale), WITHIN)


def on_one_rank(scale: Scale, degrees: Degrees = (1, 1, 1)) -> Run:
    """Or on several, with the arithmetic that compares to one."""
    return Run(scale, degrees, "float32", exact=False)


def trained(run: Run, work: Path, device: torch.device, *, restarted: bool = False, saves: bool = False) -> Training:
    """After its last step. It `saves` a checkpoint in the middle, or is `restarted` from the one it saved before."""
    training = Training(run, device)
    if restarted:
        training.load(work / run.folder / CHECKPOINT)
    else:
        training.steps(range(SAVED_STEP))
    if saves:
        training.save(work / run.folder / CHECKPOINT)
    training.steps(range(SAVED_STEP, NUM_STEPS))
    return training


def leave(run: Run, work: Path, device: torch.device, *, saves: bool = False) -> None:
    """Makes a run and leaves its history for others to be compared with."""
    training = trained(run, work, device, saves=saves)
    training.recording.keep(work / run.folder)
    training.close()


def compare_all(comparisons: Sequence[Comparison], work: Path, device: torch.device) -> Iterator[dict[str, Any]]:
    """A line for each. What others are compared with is made once, unless a run of one rank has left it."""
    left = {comparison.against for comparison in comparisons if comparison.against.num_ranks < dist.get_world_size()}
    against = {comparison.against for comparison in comparisons}
    saving = {comparison.run for comparison in comparisons if comparison.restarted}
    for comparison in comparisons:
        began, run = time.perf_counter(), comparison.run
        if comparison.against not in left:
            leave(comparison.against, work, device, saves=comparison.against in saving)
            left.add(comparison.against)
        saves = run in saving and not comparison.restarted
        training = trained(run, work, device, restarted=comparison.restarted, saves=saves)
        differences = training.recording.differences(work / comparison.against.folder)
        if run in against and run not in left:
            training.recording.keep(work / run.folder)
            left.add(run)
        training.close()
        yield line_of(comparison, differences) | {"seconds": round(time.perf_counter() - began, 1)}


def line_of(comparison: Comparison, differences: Differences) -> dict[str, Any]:
    run, largest = comparison.run, max(differences.largest.values())
    fulfilled = {
        SAME: not differences.found,
        OTHER: differences.all_differ,
        WITHIN: largest < TOLERANCE,
    }
    return record(
        "many_gpus.exactness",
        num_ranks=dist.get_world_size(),
        comparison=comparison.name,
        flavor=run.scale.flavor,
        num_layers=run.scale.num_layers,
        dtype=run.dtype,
        degrees=run.degrees,
        against=comparison.against.degrees,
        wanted=comparison.wanted,
        passed=fulfilled[comparison.wanted] and differences.moved,
        every_parameter_moved=differences.moved,
        first_difference=differences.first,
        largest_difference=largest,
        largest=differences.largest,
    )


def main() -> None:
    """A line for each comparison; on one rank nothing but what others compare with."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="a folder for histories and checkpoints")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rehearse", action="store_true", help="a tiny model")
    parser.add_argument("--no-bits", action="store_true", help="only tensor parallelism against one rank")
    arguments = parser.parse_args()
    use_deterministic_algorithms()
    torch.backends.cuda.matmul.allow_tf32 = False
    device = start_ranks(build({}))
    num_ranks = dist.get_world_size()
    scales = [TINY] if arguments.rehearse else [DEBUG, LARGE]
    for scale in scales:
        if num_ranks == 1:
            leave(on_one_rank(scale), arguments.work, device)
            continue
        dtypes = () if arguments.no_bits else ("float32", "bfloat16")
        groups = [comparisons_of_bits(scale, dtype, num_ranks) for dtype in dtypes]
        for group in (*groups, [comparison_with_one_rank(scale, num_ranks)]):
            for line in compare_all(group, arguments.work, device):
                if dist.get_rank() == 0:
                    append(arguments.out, line)
    end_ranks()


if __name__ == "__main__":
    main()
