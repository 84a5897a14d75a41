"""What dedicated ownership costs: the plan, bytes moved a step, bytes kept on this rank."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dmuon.hooks import Runtime, find_runtime
from dmuon.muon import MOMENTUM
from dmuon.parameter import local
from dmuon.plan import Plan


@dataclass(frozen=True)
class Traffic:
    """Bytes of the collectives that this rank takes part in for dedicated parameters.

    Attributes:
        unshard_bytes: broadcasts over the shard axis, a micro-batch: once in Z2; in Z3 twice, but for the unit
            that forward uses last.
        reduce_bytes: reductions over the shard axis, a micro-batch.
        column_reduce_bytes: reductions along this rank's owner column, a micro-batch.
        publish_bytes: broadcasts of updated weights along this rank's owner column, a step.
    """

    unshard_bytes: int
    reduce_bytes: int
    column_reduce_bytes: int
    publish_bytes: int


@dataclass(frozen=True)
class PersistentMemory:
    """Bytes of the storages that dedicated parameters keep on this rank between steps, gradients not among them."""

    master_bytes: int
    momentum_bytes: int
    compute_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.master_bytes + self.momentum_bytes + self.compute_bytes


@dataclass(frozen=True)
class Inspection:
    """`print(dmuon.inspect(model, optimizer))` shows all of it."""

    plan: Plan
    traffic: Traffic
    memory: PersistentMemory

    def __str__(self) -> str:
        traffic, memory = self.traffic, self.memory
        return "\n".join(
            [
                str(self.plan),
                "",
                "this rank, a micro-batch:"
                f" unshard {_mib(traffic.unshard_bytes)}, reduce {_mib(traffic.reduce_bytes)},"
                f" reduce along the owner column {_mib(traffic.column_reduce_bytes)}",
                f"this rank, a step: publish {_mib(traffic.publish_bytes)}",
                f"this rank keeps: masters {_mib(memory.master_bytes)}, momentum {_mib(memory.momentum_bytes)},"
                f" compute copies {_mib(memory.compute_bytes)}",
            ]
        )


def inspect(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Inspection:
    """Looks at a model after `dedicate_params`, and after `fully_shard` if its mixed-precision policy is adopted.

    Args:
        optimizer: the `dmuon.Muon` of this model; without it momentum counts as nothing.

    Raises:
        ValueError: the model has no dedicated parameters, or their dtypes contradict the policy.
    """
    runtime = find_runtime(model)
    if runtime is None:
        raise ValueError("this model has no dedicated parameters: call dmuon.dedicate_params(model, mesh) first")
    return Inspection(runtime.plan, _traffic(runtime), _memory(runtime, optimizer))


def _traffic(runtime: Runtime) -> Traffic:
    shard, replicate = runtime.axes.shard.size > 1, runtime.axes.replicate.size > 1
    weights = grads = column_weights = column_grads = 0
    last = runtime.forward_order[-1]
    for unit in runtime.units:
        param_dtype, reduce_dtype = runtime.dtypes_of(unit)
        for section in unit.sections:
            weight_bytes = section.numel * param_dtype.itemsize
            grad_bytes = (section.numel + section.num_flags) * reduce_dtype.itemsize
            weights += weight_bytes * (2 if runtime.reshard_after_forward and unit is not last else 1)
            grads += grad_bytes
            column_weights += section.in_column * weight_bytes
            column_grads += section.in_column * grad_bytes
    return Traffic(
        unshard_bytes=shard * weights,
        reduce_bytes=shard * grads,
        column_reduce_bytes=replicate * column_grads,
        publish_bytes=replicate * column_weights,
    )


def _memory(runtime: Runtime, optimizer: torch.optim.Optimizer | None) -> PersistentMemory:
    sections = [section for unit in runtime.units for section in unit.sections]
    masters = [section.masters for section in sections if section.masters is not None]
    state = {} if optimizer is None else optimizer.state
    momenta = [state[p.master][MOMENTUM] for unit in runtime.units for p in unit.params if p.master in state]
    # Elsewhere than in the column copies have no storage; and where both are float32 the masters serve.
    kept = [section for section in sections if section.in_column and not section.compute_is_master]
    computes = [section.compute for section in kept if section.compute is not None]
    return PersistentMemory(_storage_bytes(masters), _storage_bytes(momenta), _storage_bytes(computes))


def _storage_bytes(tensors: Iterable[Tensor]) -> int:
    storages = [local(tensor).untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"
