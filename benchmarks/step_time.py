"""What an optimizer costs a training step: time and memory, optimizers in turn in one run.

torchrun --nproc-per-node 2 -m benchmarks.step_time --untied --out FILE.json --config llama3_1b.toml

Flags that are not this program's are the job's own. Each contender is the harness's trainer with a model of its own,
on the same mesh: forward, backward, clipping and update of random tokens. They take turns, a few steps at a time, and
so does an 8192^3 product in the format of Newton-Schulz, which gives the rate that floors are computed with.

    muon        dmuon: owners, Triton kernels
    adamw       torch's fused AdamW on FSDP2's shards
    naive       Muon on FSDP2's shards: every rank gathers each whole gradient and orthogonalises it
    torch_muon  torch.optim.Muon on FSDP2's shards, torch.optim.AdamW for the rest

Memory is what torch had allocated at most during a contender's steps, less what the others hold. Prints a table and
one JSON line.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.parallel_model import ParallelJob, build_trainer, end_ranks, parallel_job, synchronize, timing_event
from benchmarks.record import record
from benchmarks.rivals import NaiveMuon, TorchMuon
from dmuon.torch_internals import RecordedEvent, recorded_events
from dmuon_titan.data.loader import Batch
from dmuon_titan.memory import GIB
from dmuon_titan.profiling.profiler import recording_begins_or_ends, settle
from dmuon_titan.profiling.summary import Summary, summarize
from dmuon_titan.profiling.work import is_step
from dmuon_titan.trainer import Trainer

WARMUP_STEPS = 3


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contenders", nargs="+", default=["muon", "adamw", "naive"], choices=OPTIMIZERS)
    parser.add_argument("--layers", type=int, help="in place of the flavor's")
    parser.add_argument("--untied", action="store_true", help="a head with a matrix of its own")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument(
        "--steps",
        type=int,
        default=5,
        choices=range(2, 100),
        metavar="N",
        help="of each contender in a round; the first starts idle",
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--trace", type=Path, help="a folder for a profiler's trace of each contender's step")
    arguments, flags = parser.parse_known_args()
    job = parallel_job(["--checkpoint.enable", "false", *flags], arguments.layers, untied=arguments.untied)
    contenders, failures = build_contenders(job, arguments.contenders)
    peak_ms = take_turns(contenders, arguments.rounds, arguments.steps, job.mesh.device)
    if arguments.trace:
        for name, contender in contenders.items():
            contender.trace(arguments.trace / f"{name}-{dist.get_rank()}.json")
    if dist.get_rank() == 0:
        line = summary(job, contenders, peak_ms)
        line = record("step_time", **line, failures=failures, rounds=arguments.rounds, steps=arguments.steps)
        _print_table(line)
        print(json.dumps(line))
        if arguments.out:
            arguments.out.write_text(json.dumps(line) + "\n")
    end_ranks()


def build_contenders(job: ParallelJob, names: Sequence[str]) -> tuple[dict[str, Contender], dict[str, str]]:
    """Those that run here, and why the others don't."""
    contenders: dict[str, Contender] = {}
    failures: dict[str, str] = {}
    for name in names:
        try:
            contenders[name] = Contender(name, job)
        except RuntimeError as error:  # a rival that does not run here is told, and left out
            failures[name] = str(error).splitlines()[0][:200]
    return contenders, failures


def take_turns(contenders: dict[str, Contender], num_rounds: int, num_steps: int, device: torch.device) -> float:
    """Has each contender measure `num_steps` in every round. Returns the median time of a product between rounds."""
    peak = product_ms(device)
    peaks = []
    for _ in range(num_rounds):
        for contender in contenders.values():
            contender.measure(num_steps)
        peaks.append(peak())
    return statistics.median(peaks)


class Contender:
    """A trainer with its optimizer, warmed up; figures of its steps. On a CPU memory counts as nothing."""

    def __init__(self, name: str, job: ParallelJob) -> None:
        self.name, self.device = name, job.mesh.device
        before = torch.cuda.memory_allocated()
        config = replace(job.config, optimizer=replace(job.config.optimizer, name=OPTIMIZERS[name][0]))
        self.trainer = build_trainer(replace(job, config=config))
        build = OPTIMIZERS[name][1]
        if build is not None:
            self.trainer.optimizer = build(self.trainer)
        shape = (config.training.local_batch_size, config.training.seq_len)
        generator = torch.Generator().manual_seed(job.mesh.dp_rank)  # ranks of a tp group share their batches
        num_batches = self.trainer.num_micro_batches
        tokens = [torch.randint(job.size.vocab_size, shape, generator=generator) for _ in range(num_batches)]
        self.batches = [Batch(batch, batch, [0], 0) for batch in tokens]
        self.tokens = sum(batch.numel() for batch in tokens) * job.mesh.dp_world
        self.ms: list[float] = []
        self.forward_backward_ms: list[float] = []
        self._events: list[tuple[Any, Any]] = []
        self._forward_backward = self.trainer.forward_backward
        self.trainer.forward_backward = self._timed  # type: ignore[method-assign]
        for _ in range(WARMUP_STEPS):
            self.step()
        self.trainer.optimizer.zero_grad()
        synchronize(self.device)
        self.held = torch.cuda.memory_allocated() - before
        self.peak = 0

    def step(self) -> None:
        self.trainer.update(1, self.batches)

    def _timed(self, micro_batches: list[Batch]) -> tuple[Tensor, Tensor]:
        begin, end = (timing_event(self.device) for _ in range(2))
        begin.record()
        found = self._forward_backward(micro_batches)
        end.record()
        self._events.append((begin, end))
        return found

    def measure(self, num_steps: int) -> None:
        """A few steps; the slowest rank's time counts."""
        dist.barrier()
        synchronize(self.device)
        others = torch.cuda.memory_allocated() - self.held
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        self._events.clear()
        began = time.perf_counter()
        for _ in range(num_steps):
            self.step()
        synchronize(self.device)
        elapsed = torch.tensor((time.perf_counter() - began) / num_steps * 1e3)
        dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)
        self.ms.append(elapsed.item())
        # Without the first, before which the GPU was idle.
        self.forward_backward_ms += [begin.elapsed_time(end) for begin, end in self._events[1:]]
        self.peak = max(self.peak, torch.cuda.max_memory_allocated() - others)
        self.trainer.optimizer.zero_grad()

    def trace(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.step()
        with torch.profiler.profile(activities=self._activities()) as profiler:
            self.step()
            synchronize(self.device)
        profiler.export_chrome_trace(str(path))

    def profile(self, num_steps: int) -> Summary:
        """What this rank's time goes to, over steps that are timed by nobody.

        One step more is recorded: what the last one publishes has no forward to hide behind.
        """
        found: list[Summary] = []
        settle(self.trainer.model, self.device)
        with torch.profiler.profile(
            activities=self._activities(),
            schedule=torch.profiler.schedule(wait=0, warmup=1, active=num_steps + 1, repeat=1),
            on_trace_ready=lambda profiler: found.append(summarize(but_the_last_step(recorded_events(profiler)))),
        ) as profiler:
            for _ in range(num_steps + 2):
                self.step()
                if recording_begins_or_ends(profiler):
                    settle(self.trainer.model, self.device)
                profiler.step()
        self.trainer.optimizer.zero_grad()
        return found[0]

    def _activities(self) -> list[torch.profiler.ProfilerActivity]:
        on_gpu = [torch.profiler.ProfilerActivity.CUDA] if self.device.type == "cuda" else []
        return [torch.profiler.ProfilerActivity.CPU, *on_gpu]


def but_the_last_step(events: Sequence[RecordedEvent]) -> list[RecordedEvent]:
    """Without the last step. On a GPU, which the host runs ahead of, a step lasts from the first kernel that it
    launches to the first one of the next step."""
    steps = sorted(filter(is_step, events), key=lambda step: step.begin)
    others = list(itertools.filterfalse(is_step, events))
    kernels = {event.correlation: event.begin for event in events if event.activity == "kernel"}
    if not kernels:
        return [*others, *steps[:-1]]
    launches = [event for event in events if event.activity == "launch" and event.correlation in kernels]
    begins = [
        min(kernels[launch.correlation] for launch in launches if step.begin <= launch.begin < step.end)
        for step in steps
    ]
    return [
        *others,
        *(step._replace(begin=a, end=b) for step, (a, b) in zip(steps, itertools.pairwise(begins), strict=False)),
    ]


# Name -> optimizer.name of the job, and what replaces the job's optimizer.
OPTIMIZERS: dict[str, tuple[str, Callable[[Trainer], torch.optim.Optimizer] | None]] = {
    "muon": ("Muon", None),
    "adamw": ("AdamW", None),
    "naive": ("AdamW", NaiveMuon),
    "torch_muon": ("AdamW", TorchMuon),
}


def product_ms(device: torch.device) -> Callable[[], float]:
    """Times a product of random matrices: 8192^3 in float16 on a GPU, 512^3 in float32 on a CPU."""
    size = peak_size(device)
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out: Tensor = torch.empty_like(a)

    def run() -> float:
        torch.mm(a, b, out=out)
        synchronize(device)
        begin = time.perf_counter()
        for _ in range(8):
            torch.mm(a, b, out=out)
        synchronize(device)
        return (time.perf_counter() - begin) / 8 * 1e3

    return run


def peak_size(device: torch.device) -> int:
    """Rows and columns of the product that floors are computed with."""
    return 8192 if device.type == "cuda" else 512


def summary(job: ParallelJob, contenders: dict[str, Contender], peak_ms: float) -> dict[str, Any]:
    """Figures of all contenders, and Muon's against the others."""
    rate = 2 * peak_size(job.mesh.device) ** 3 / peak_ms / 1e9  # TFLOP/s
    figures: dict[str, Any] = {}
    for name, contender in contenders.items():
        tokens_per_s = contender.tokens / statistics.median(contender.ms) * 1e3 / dist.get_world_size()
        figures[name] = {
            "ms": statistics.median(contender.ms),
            "ms_min": min(contender.ms),
            "ms_max": max(contender.ms),
            "forward_backward_ms": statistics.median(contender.forward_backward_ms),
            "tokens_per_s_and_gpu": tokens_per_s,
            "mfu": tokens_per_s * job.size.flops_per_token(job.config.training.seq_len) / 989e12,
            "peak_gib": contender.peak / GIB,
        }
    line: dict[str, Any] = {
        "flavor": job.config.model.flavor,
        "untied": not job.size.tie_embeddings,
        "num_layers": job.size.num_layers,
        "degrees": job.degrees,
        "tokens_a_step": next(iter(contenders.values())).tokens,
        "activation_checkpoint": job.config.activation_checkpoint.selective_ac_option,
        "product_tflops": rate,
        "contenders": figures,
    }
    if "muon" in contenders:
        plan = contenders["muon"].trainer.plan
        assert plan is not None
        longest = max(plan.assignment.flops.values()) / job.degrees[2]  # the tp ranks of an owner share its work
        line["longest_load_tflop"] = longest / 1e12
        line["floor_ms"] = longest / 1e9 / rate
        if "adamw" in contenders:
            pairs = list(zip(contenders["muon"].ms, contenders["adamw"].ms, strict=True))
            line["muon_over_adamw"] = statistics.median(muon / adamw for muon, adamw in pairs)
            line["difference_over_floor"] = statistics.median(m - a for m, a in pairs) / line["floor_ms"]
            if figures["adamw"]["peak_gib"]:
                line["memory_over_adamw"] = figures["muon"]["peak_gib"] / figures["adamw"]["peak_gib"]
    return line


def _print_table(line: dict[str, Any]) -> None:
    for name, figures in line["contenders"].items():
        print(
            f"{name:10} {figures['ms']:8.1f} ms ({figures['ms_min']:.1f} - {figures['ms_max']:.1f}), of which "
            f"forward and backward {figures['forward_backward_ms']:.1f}, "
            f"{figures['tokens_per_s_and_gpu']:,.0f} tokens/s/GPU, "
            f"MFU {figures['mfu']:.1%}, {figures['peak_gib']:.1f} GiB"
        )
    for key in ("muon_over_adamw", "difference_over_floor", "memory_over_adamw", "floor_ms"):
        if key in line:
            print(f"{key} {line[key]:.4f}")
    if line["failures"]:
        print(line["failures"])


if __name__ == "__main__":
    main()
