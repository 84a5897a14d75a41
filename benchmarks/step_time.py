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
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import _muon as torch_muon

from benchmarks.parallel_model import ParallelJob, parallel_job
from benchmarks.record import record
from dmuon.muon import lr_scale
from dmuon_titan.checkpoint import TrainState
from dmuon_titan.data.loader import Batch
from dmuon_titan.memory import GIB
from dmuon_titan.trainer import Trainer

PEAK_SIZE = 8192
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
    contenders: dict[str, Contender] = {}
    failures: dict[str, str] = {}
    for name in arguments.contenders:
        try:
            contenders[name] = Contender(name, job)
        except RuntimeError as error:  # a rival that does not run here is told, and left out
            failures[name] = str(error).splitlines()[0][:200]
    peak = product_ms()
    peaks = []
    for _ in range(arguments.rounds):
        for contender in contenders.values():
            contender.measure(arguments.steps)
        peaks.append(peak())
    if arguments.trace:
        for name, contender in contenders.items():
            contender.trace(arguments.trace / f"{name}-{dist.get_rank()}.json")
    if dist.get_rank() == 0:
        line = summary(job, contenders, statistics.median(peaks))
        line = record("step_time", **line, failures=failures, rounds=arguments.rounds, steps=arguments.steps)
        _print_table(line)
        print(json.dumps(line))
        if arguments.out:
            arguments.out.write_text(json.dumps(line) + "\n")
    dist.barrier()
    dist.destroy_process_group()


class Contender:
    """A trainer with its optimizer, warmed up; figures of its steps."""

    def __init__(self, name: str, job: ParallelJob) -> None:
        self.name, self.mesh = name, job.mesh
        before = torch.cuda.memory_allocated()
        config = replace(job.config, optimizer=replace(job.config.optimizer, name=OPTIMIZERS[name][0]))
        state = TrainState(0, config.training.seq_len, "", "none", 0, dist.get_world_size(), 1)
        self.trainer = Trainer(config, job.mesh, job.size, state, SimpleNamespace(requested=False))  # type: ignore[arg-type]
        build = OPTIMIZERS[name][1]
        if build is not None:
            self.trainer.optimizer = build(self.trainer)
        shape = (config.training.local_batch_size, config.training.seq_len)
        tokens = [torch.randint(job.size.vocab_size, shape) for _ in range(self.trainer.num_micro_batches)]
        self.batches = [Batch(batch, batch, [0], 0) for batch in tokens]
        self.tokens = sum(batch.numel() for batch in tokens) * job.mesh.dp_world
        self.ms: list[float] = []
        self.forward_backward_ms: list[float] = []
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._forward_backward = self.trainer.forward_backward
        self.trainer.forward_backward = self._timed  # type: ignore[method-assign]
        for _ in range(WARMUP_STEPS):
            self.step()
        self.trainer.optimizer.zero_grad()
        torch.cuda.synchronize()
        self.held = torch.cuda.memory_allocated() - before
        self.peak = 0

    def step(self) -> None:
        self.trainer.update(1, self.batches)

    def _timed(self, batches: list[Batch]) -> tuple[Tensor, Tensor]:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        found = self._forward_backward(batches)
        end.record()
        self._events.append((begin, end))
        return found

    def measure(self, num_steps: int) -> None:
        """A few steps; the slowest rank's time counts."""
        dist.barrier()
        torch.cuda.synchronize()
        others = torch.cuda.memory_allocated() - self.held
        torch.cuda.reset_peak_memory_stats()
        self._events.clear()
        began = time.perf_counter()
        for _ in range(num_steps):
            self.step()
        torch.cuda.synchronize()
        elapsed = torch.tensor((time.perf_counter() - began) / num_steps * 1e3)
        dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)
        self.ms.append(elapsed.item())
        # Without the first, before which the GPU was idle.
        self.forward_backward_ms += [begin.elapsed_time(end) for begin, end in self._events[1:]]
        self.peak = max(self.peak, torch.cuda.max_memory_allocated() - others)
        self.trainer.optimizer.zero_grad()

    def trace(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        self.step()
        with torch.profiler.profile(activities=activities) as profiler:
            self.step()
            torch.cuda.synchronize()
        profiler.export_chrome_trace(str(path))


class NaiveMuon(torch.optim.Optimizer):
    """Gathers and orthogonalises each gradient on every rank, by torch.optim.Muon's iteration; AdamW for the rest."""

    def __init__(self, trainer: Trainer) -> None:
        self.matrices, others = matrices_and_others(trainer.model)
        super().__init__(self.matrices, {"lr": 3e-4, "momentum": 0.95, "weight_decay": 0.1})
        self.adamw = torch.optim.AdamW(others, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
        for param in self.matrices:
            self.state[param]["momentum_buffer"] = torch.zeros_like(param)

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self.adamw.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        options = self.param_groups[0]
        for param in self.matrices:
            assert param.grad is not None
            momentum = self.state[param]["momentum_buffer"]
            momentum.lerp_(param.grad, 1 - options["momentum"])
            update = param.grad.lerp(momentum, options["momentum"])
            whole = update.full_tensor() if isinstance(update, DTensor) else update
            coefficients = (torch_muon.DEFAULT_A, torch_muon.DEFAULT_B, torch_muon.DEFAULT_C)
            orthogonal = torch_muon._zeropower_via_newtonschulz(whole, coefficients, 5, 1e-7).to(param.dtype)
            if isinstance(param, DTensor):
                orthogonal = distribute_tensor(orthogonal, param.device_mesh, param.placements, src_data_rank=None)
            param.mul_(1 - options["lr"] * options["weight_decay"])
            param.add_(orthogonal, alpha=-options["lr"] * lr_scale("match_rms_adamw", param.shape))
        self.adamw.step()


class TorchMuon(torch.optim.Optimizer):
    """torch.optim.Muon on the matrices, torch.optim.AdamW on the rest."""

    def __init__(self, trainer: Trainer) -> None:
        matrices, others = matrices_and_others(trainer.model)
        super().__init__(matrices, {"lr": 3e-4})
        self.muon = torch.optim.Muon(matrices, lr=3e-4, adjust_lr_fn="match_rms_adamw")
        self.adamw = torch.optim.AdamW(others, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.muon.zero_grad(set_to_none)
        self.adamw.zero_grad(set_to_none)

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.muon.step()
        self.adamw.step()


# Name -> optimizer.name of the job, and what replaces the job's optimizer.
OPTIMIZERS: dict[str, tuple[str, Callable[[Trainer], torch.optim.Optimizer] | None]] = {
    "muon": ("Muon", None),
    "adamw": ("AdamW", None),
    "naive": ("AdamW", NaiveMuon),
    "torch_muon": ("AdamW", TorchMuon),
}


def matrices_and_others(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """What dmuon would dedicate, and the rest."""
    named = list(model.named_parameters())
    matrices = [param for name, param in named if name.startswith("layers.") and param.ndim == 2]
    return matrices, [param for name, param in named if not (name.startswith("layers.") and param.ndim == 2)]


def product_ms() -> Callable[[], float]:
    """Times an 8192^3 product of random matrices in float16."""
    a, b = (torch.randn(PEAK_SIZE, PEAK_SIZE, device="cuda").half() for _ in range(2))
    out: Tensor = torch.empty_like(a)

    def run() -> float:
        torch.mm(a, b, out=out)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(8):
            torch.mm(a, b, out=out)
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / 8

    return run


def summary(job: ParallelJob, contenders: dict[str, Contender], peak_ms: float) -> dict[str, Any]:
    """Figures of all contenders, and Muon's against the others."""
    rate = 2 * PEAK_SIZE**3 / peak_ms / 1e9  # TFLOP/s
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
        longest = max(plan.assignment.flops.values())
        line["longest_load_tflop"] = longest / 1e12
        line["floor_ms"] = longest / 1e9 / rate
        if "adamw" in contenders:
            pairs = list(zip(contenders["muon"].ms, contenders["adamw"].ms, strict=True))
            line["muon_over_adamw"] = statistics.median(muon / adamw for muon, adamw in pairs)
            line["difference_over_floor"] = statistics.median(m - a for m, a in pairs) / line["floor_ms"]
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
