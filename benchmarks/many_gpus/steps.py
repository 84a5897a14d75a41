"""What Muon costs a training step on every mesh, where that time goes, and whether it is what the plan predicts.

torchrun --nproc-per-node 4 -m benchmarks.many_gpus.steps --flavor 1B --meshes 1x4x1 2x2x1 --out FILE.jsonl

Contenders and figures are those of `benchmarks.step_time`: random tokens at sequence 8192, 32k of them on each GPU, or
16k of 8B; bf16, compiled, selective checkpointing "op", heads with matrices of their own. The naive way is measured on
one shard axis. Where not all contenders fit into memory side by side, layers are left out, on all meshes alike.

A profile of Muon's step says how much of each transfer runs while nothing computes. Predicted are Newton-Schulz, from
the longest owner's FLOPs and the rate of a product; and unshard, reduce and publish, from the bytes of `dmuon.inspect`
and the rate of broadcasts and reductions of one block between the same ranks.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import dmuon
from benchmarks.many_gpus.collectives import broadcast, median_ms, one_by_one, reduce, shares
from benchmarks.many_gpus.lines import append
from benchmarks.parallel_model import ParallelJob, end_ranks, free_memory, job_size, start_ranks
from benchmarks.record import record
from benchmarks.step_time import OPTIMIZERS, Contender, build_contenders, summary, take_turns
from dmuon.collectives import Axis
from dmuon.hooks import find_runtime
from dmuon_titan.config import JobConfig
from dmuon_titan.config.schema import build
from dmuon_titan.memory import activation_bytes, memory_need
from dmuon_titan.mesh import build_mesh
from dmuon_titan.profiling.summary import Summary
from models.llama.sizes import LlamaSize

Degrees = tuple[int, int, int]
SEQ_LEN, MEMORY_SHARE, PROFILED_STEPS = 8192, 0.8, 2
# Flavor -> local batch, micro-batches.
BATCHES = {"1B": (4, 1), "3B": (2, 2), "8B": (2, 1)}
NEWTON_SCHULZ = "Newton-Schulz"


def main() -> None:
    """A JSON line for each mesh."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flavor", required=True)
    parser.add_argument("--meshes", nargs="+", required=True, metavar="REPLICATExSHARDxTP")
    parser.add_argument("--contenders", nargs="+", default=["muon", "adamw", "naive"], choices=OPTIMIZERS)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2, help="of each contender in a round; the first starts idle")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rehearse", action="store_true", help="the debug model")
    arguments = parser.parse_args()
    device = start_ranks(build({}))
    meshes = [degrees_of(mesh) for mesh in arguments.meshes]
    configs = {degrees: config_of(arguments.flavor, degrees, rehearse=arguments.rehearse) for degrees in meshes}
    names = {
        degrees: [name for name in arguments.contenders if name != "naive" or degrees[0] == degrees[2] == 1]
        for degrees in meshes
    }
    size = job_size(configs[meshes[0]], untied=True)
    if device.type == "cuda":
        memory = int(MEMORY_SHARE * torch.cuda.get_device_properties(device).total_memory)
        fits = [fitting(config, size, degrees, names[degrees], memory) for degrees, config in configs.items()]
        size = min(fits, key=lambda fit: fit.num_layers)
    for degrees, config in configs.items():
        job = ParallelJob(config, size, degrees, build_mesh(device, degrees))
        line = measure(job, names[degrees], arguments.rounds, arguments.steps)
        if dist.get_rank() == 0:
            append(arguments.out, line)
        torch.compiler.reset()  # a function is compiled a few times only, and what is compiled refers to the model
        free_memory(device)
    end_ranks()


def degrees_of(mesh: str) -> Degrees:
    replicate, shard, tp = map(int, mesh.split("x"))
    return replicate, shard, tp


def config_of(flavor: str, degrees: Degrees, *, rehearse: bool) -> JobConfig:
    local_batch, num_micro_batches = (2, 1) if rehearse else BATCHES[flavor]
    replicate, shard, tp = degrees
    values = {
        "model.flavor": flavor,
        "training.seq_len": 64 if rehearse else SEQ_LEN,
        "training.local_batch_size": local_batch,
        "training.global_batch_size": local_batch * num_micro_batches * replicate * shard,
        "training.mixed_precision_param": "bfloat16",
        "parallelism.data_parallel_replicate_degree": replicate,
        "parallelism.data_parallel_shard_degree": shard,
        "parallelism.tensor_parallel_degree": tp,
        "activation_checkpoint.mode": "selective",
        "activation_checkpoint.selective_ac_option": "op",
        "compile.enable": not rehearse,
        "checkpoint.enable": False,
    }
    return build(values)


def fitting(
    config: JobConfig, size: LlamaSize, degrees: Degrees, contenders: Sequence[str], memory_bytes: int
) -> LlamaSize:
    """The size with as many layers, all or a half or a quarter of them, as all contenders have memory for.

    They keep their weights and optimizer state, and take turns with activations.
    """
    for num_layers in (size.num_layers, size.num_layers // 2):
        fit = replace(size, num_layers=num_layers)
        optimizers = (replace(config.optimizer, name=OPTIMIZERS[name][0]) for name in contenders)
        needs = [memory_need(replace(config, optimizer=optimizer), fit, degrees) for optimizer in optimizers]
        shared = (len(needs) - 1) * activation_bytes(config, fit, degrees[2])
        if sum(need.total_bytes for need in needs) - shared <= memory_bytes:
            return fit
    return replace(size, num_layers=size.num_layers // 4)


def measure(job: ParallelJob, names: Sequence[str], num_rounds: int, num_steps: int) -> dict[str, Any]:
    contenders, failures = build_contenders(job, names)
    product_ms = take_turns(contenders, num_rounds, num_steps, job.mesh.device)
    line = summary(job, contenders, product_ms)
    if "muon" in contenders:
        muon = contenders["muon"]
        predicted = predict(muon, job.config) | {NEWTON_SCHULZ: line["floor_ms"]}
        line["parts"] = parts_of(muon.profile(PROFILED_STEPS), predicted)
    return record(
        "many_gpus.steps",
        num_ranks=dist.get_world_size(),
        **line,
        failures=failures,
        rounds=num_rounds,
        steps=num_steps,
    )


def predict(muon: Contender, config: JobConfig) -> dict[str, float]:
    """Milliseconds a step of each transfer, were nothing else on the links."""
    runtime = find_runtime(muon.trainer.model)
    assert runtime is not None
    traffic = dmuon.inspect(muon.trainer.model).traffic
    unit = runtime.units[len(runtime.units) // 2]
    numel = sum(section.numel for section in unit.sections)
    shard, replicate, device = runtime.axes.shard, runtime.axes.replicate, muon.device
    param_dtype, reduce_dtype = runtime.dtypes_of(unit)
    unshard = traffic.unshard_bytes * ms_a_byte(shard, "broadcast", numel, param_dtype, device)
    reduces = traffic.reduce_bytes * ms_a_byte(shard, "reduce", numel, reduce_dtype, device)
    column_numel = numel // shard.size
    reduces += traffic.column_reduce_bytes * ms_a_byte(replicate, "reduce", column_numel, reduce_dtype, device)
    publish = traffic.publish_bytes * ms_a_byte(replicate, "broadcast", column_numel, param_dtype, device)
    num_micro_batches = muon.trainer.num_micro_batches
    return {"unshard": num_micro_batches * unshard, "reduce": num_micro_batches * reduces, "publish": publish}


def ms_a_byte(axis: Axis, operation: str, numel: int, dtype: torch.dtype, device: torch.device) -> float:
    """Of broadcasts or reductions of `numel` elements together, an equal part from or to each rank of the axis."""
    if axis.size == 1:
        return 0.0
    buffers = [torch.zeros(size, dtype=dtype, device=device) for size in shares(numel, axis.size, is_even=True)]
    collective, group = {"broadcast": (broadcast, axis.groups[0]), "reduce": (reduce, axis.groups[1])}[operation]
    num_bytes = sum(buffer.nbytes for buffer in buffers)
    return median_ms(one_by_one(collective, buffers, group), device) / num_bytes


def parts_of(profile: Summary, predicted: dict[str, float]) -> dict[str, dict[str, float]]:
    """Milliseconds a step by part: of transfers the ranks' mean; of Newton-Schulz the longest, all of it exposed."""
    profiles: list[Summary] = [profile] * dist.get_world_size()
    dist.all_gather_object(profiles, profile)
    num_steps = len(profile.steps)
    step_ms = max(found.total for found in profiles) / num_steps / 1e6
    parts = {}
    for name in sorted({name for found in profiles for name in found.communication}):
        times = [found.communication.get(name, (0.0, 0.0)) for found in profiles]
        total, exposed = (statistics.mean(column) / num_steps / 1e6 for column in zip(*times, strict=True))
        parts[name] = {"ms": total, "exposed_ms": exposed}
    longest = max(sum(found.newton_schulz.values()) for found in profiles) / num_steps / 1e6
    parts[NEWTON_SCHULZ] = {"ms": longest, "exposed_ms": longest}
    for name, part in parts.items():
        part["exposed_share_of_step"] = part["exposed_ms"] / step_ms
        if predicted.get(name):
            part["predicted_ms"] = predicted[name]
    return parts


if __name__ == "__main__":
    main()
