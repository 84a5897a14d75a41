"""How much of each transfer of weights and gradients runs beside computation, from a profiler's trace of two steps.

torchrun --nproc-per-node 2 -m benchmarks.overlap --config llama3_1b.toml --parallelism.data_parallel_shard_degree 2

Flags are the job's own. Tokens are random: only shapes matter here. Prints one JSON line; `--events FILE` keeps the
intervals of the two steps, and `--plot FILE.png EVENTS...` draws them.

A transfer counts as hidden while a kernel that is not NCCL's runs on the same GPU. On the CPU, where gloo moves bytes
in threads of its own, an interval runs from the issue of a collective to its completion, and it counts as hidden
while a block computes.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.parallel_model import end_ranks, parallel_model
from benchmarks.record import record
from dmuon.collectives import Axis, Wait
from dmuon.hooks import find_runtime
from dmuon_titan.loss import build_loss
from dmuon_titan.optimizer import build_optimizer
from dmuon_titan.profiling.intervals import Interval, intersection, length, union

NUM_STEPS, WARMUP_STEPS = 2, 4  # one step more is recorded: what is measured ends with a forward
Intervals = dict[str, list[Interval]]  # microseconds


def main() -> None:
    """Print one JSON line, or draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=Path, help="write the intervals to this file")
    parser.add_argument("--plot", nargs="+", type=Path, metavar=("PNG", "EVENTS"), help="draw events of earlier runs")
    arguments, overrides = parser.parse_known_args()
    if arguments.plot:
        plot(arguments.plot[0], arguments.plot[1:])
        return
    model, step, degrees = _set_up(overrides)
    for _ in range(WARMUP_STEPS):
        step()
    trace = _trace_cuda if torch.cuda.is_available() else _trace_cpu
    intervals = trace(model, step)
    if dist.get_rank() == 0:
        intervals = _whole_steps(intervals)
        share = {kind: _summary(intervals[kind], intervals) for kind in intervals if kind in TRANSFERS}
        line = record("overlap", mesh={"replicate": degrees[0], "shard": degrees[1]}, hidden=share)
        print(json.dumps(line))
        if arguments.events:
            arguments.events.write_text(json.dumps({**line, "intervals": intervals}))
    end_ranks()


TRANSFERS = ("unshard", "reduce", "column reduce", "publish", "fsdp")


def _set_up(overrides: list[str]) -> tuple[nn.Module, Callable[[], None], tuple[int, int, int]]:
    job = parallel_model(overrides)
    config, model = job.config, job.model
    optimizer, loss = build_optimizer(config.optimizer, model), build_loss(config)
    shape = (config.training.local_batch_size, config.training.seq_len)
    tokens_BS = torch.randint(job.size.vocab_size, shape, device=job.mesh.device)

    scale = torch.tensor(1 / tokens_BS.numel(), device=job.mesh.device)

    def step() -> None:
        with record_function("forward"):
            scaled, _ = loss(model, tokens_BS, tokens_BS, scale)
        scaled.backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, step, job.degrees


def _trace_cuda(model: nn.Module, step: Callable[[], None]) -> Intervals:
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(NUM_STEPS + 1):
            step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    runtime = find_runtime(model)
    assert runtime is not None
    replicated = runtime.axes.replicate.size > 1
    intervals: Intervals = {}
    for event in events:
        if event.get("cat") == "kernel":
            kind = _kind(event["name"], replicated)
        elif event.get("cat") == "gpu_user_annotation" and event["name"] == "forward":
            kind = "forward"
        else:
            continue
        intervals.setdefault(kind, []).append((event["ts"], event["ts"] + event["dur"]))
    return _merged(intervals)


def _kind(kernel: str, replicated: bool) -> str:
    """Of one axis above 1 alone, so that a broadcast is either an unshard or a publish."""
    if "nccl" not in kernel.lower():
        return "compute"
    if "Broadcast" in kernel:
        return "publish" if replicated else "unshard"
    if "_Reduce_" in kernel:
        return "column reduce" if replicated else "reduce"
    return "fsdp"


def _trace_cpu(model: nn.Module, step: Callable[[], None]) -> Intervals:
    runtime = find_runtime(model)
    assert runtime is not None
    intervals: Intervals = {}

    def add(kind: str, begin: float) -> None:
        intervals.setdefault(kind, []).append((begin * 1e6, time.perf_counter() * 1e6))

    def record_axis(axis: Axis, method: str, kind: str) -> None:
        issue = getattr(axis, method)

        def recording(tensor: torch.Tensor, root: int) -> Wait:
            begin = time.perf_counter()
            wait = issue(tensor, root)
            work = getattr(wait, "__self__", None)
            if work is not None:
                work.get_future().add_done_callback(lambda _: add(kind, begin))
            return wait

        setattr(axis, method, recording)

    record_axis(runtime.axes.shard, "broadcast", "unshard")
    record_axis(runtime.axes.shard, "reduce", "reduce")
    record_axis(runtime.axes.replicate, "broadcast", "publish")
    record_axis(runtime.axes.replicate, "reduce", "column reduce")
    for unit in runtime.units:
        _record_compute("compute", unit.boundaries[0], add)
    _record_compute("forward", model, add)
    for _ in range(NUM_STEPS + 1):
        step()
    dist.barrier()
    return _merged(intervals)


def _record_compute(kind: str, module: nn.Module, add: Callable[[str, float], None]) -> None:
    """Records a module's forwards as `kind`; and of "compute" backwards too."""
    began = {"forward": 0.0, "backward": 0.0}

    def begin(phase: str) -> Callable[..., None]:
        return lambda *_: began.update({phase: time.perf_counter()})

    def end(phase: str) -> Callable[..., None]:
        return lambda *_: add(kind, began[phase])

    module.register_forward_pre_hook(begin("forward"))
    module.register_forward_hook(end("forward"), prepend=True)
    if kind == "compute":
        module.register_full_backward_pre_hook(begin("backward"))
        module.register_full_backward_hook(end("backward"))


def _whole_steps(intervals: Intervals) -> Intervals:
    """From the end of the first forward to the end of the last: each publish with the forward that it hides behind."""
    first, *_, last = intervals["forward"]
    return {
        kind: [(begin - first[1], end - first[1]) for begin, end in spans if first[1] <= begin < last[1]]
        for kind, spans in intervals.items()
    }


def _merged(intervals: Intervals) -> Intervals:
    """Each kind's intervals sorted and without overlap, from zero on."""
    start = min(begin for spans in intervals.values() for begin, _ in spans)
    return {
        kind: union((round(begin - start, 1), round(end - start, 1)) for begin, end in spans)
        for kind, spans in intervals.items()
    }


def _summary(spans: list[Interval], intervals: Intervals) -> dict[str, float]:
    """Milliseconds a step, the share beside computation, and the share within forward where a trace says so."""
    total = length(spans)
    summary = {
        "ms_a_step": total / NUM_STEPS / 1e3,
        "hidden": length(intersection(spans, intervals["compute"])) / total,
    }
    if "forward" in intervals:
        summary["in_forward"] = length(intersection(spans, intervals["forward"])) / total
    return {key: round(value, 4) for key, value in summary.items()}


def plot(target: Path, sources: list[Path]) -> None:
    """One panel a run: a row a kind, its intervals as bars."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    runs: list[dict[str, Any]] = [json.loads(source.read_text()) for source in sources]
    figure, axes = pyplot.subplots(len(runs), 1, figsize=(12, 2.2 * len(runs)), squeeze=False)
    for panel, run in zip(axes[:, 0], runs, strict=True):
        kinds = [kind for kind in ("forward", "compute", *TRANSFERS) if kind in run["intervals"]]
        for row, kind in enumerate(kinds):
            bars = [(begin / 1e3, (end - begin) / 1e3) for begin, end in run["intervals"][kind]]
            panel.broken_barh(bars, (-row - 0.4, 0.8), color=f"C{row}")
        panel.set_yticks([-row for row in range(len(kinds))], kinds)
        mesh = run["mesh"]
        hidden = ", ".join(f"{kind} {share['hidden']:.0%}" for kind, share in run["hidden"].items())
        panel.set_title(
            f"replicate {mesh['replicate']}, shard {mesh['shard']}, {run['device']}; hidden: {hidden}", fontsize=9
        )
        panel.set_xlabel("ms")
    figure.tight_layout()
    figure.savefig(target, dpi=110)


if __name__ == "__main__":
    main()
