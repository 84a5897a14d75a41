"""Process group, device and device mesh. The one place that knows CUDA with NCCL from the CPU with gloo."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import rendezvous
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dmuon.torch_internals import group_timeout, set_group_timeout
from dmuon_titan.config.schema import Comm
from dmuon_titan.environment import WorkerEnvironment

AXES = ("replicate", "shard", "tp")


@dataclass(frozen=True)
class ParallelMesh:
    """The job's device mesh over (replicate, shard, tp) and this rank's place in it.

    Data-parallel rank and group run over (replicate, shard): all ranks of one tp group read the same batches.
    """

    device: torch.device
    mesh: DeviceMesh
    dp_group: dist.ProcessGroup
    dp_rank: int

    @property
    def dp_world(self) -> int:
        return self.degree("replicate") * self.degree("shard")

    @property
    def shard(self) -> DeviceMesh:
        return self.mesh["shard"]

    @property
    def replicate(self) -> DeviceMesh | None:
        """The replicate axis, or None where its degree is 1."""
        return self.mesh["replicate"] if self.degree("replicate") > 1 else None

    @property
    def tp(self) -> DeviceMesh:
        return self.mesh["tp"]

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """Every group beside the default one that the mesh has made, each of which has a time-out of its own."""
        made = [self.dp_group, *self.mesh.get_all_groups()]
        return [group for group in dict.fromkeys(made) if group is not dist.group.WORLD]

    @property
    def fully_shard(self) -> DeviceMesh:
        """What `fully_shard` takes: one axis, or (replicate, shard) for hybrid sharding."""
        return self.shard if self.replicate is None else self.mesh["replicate", "shard"]

    def degree(self, axis: str) -> int:
        return self.mesh.size(AXES.index(axis))


def local_device(environment: WorkerEnvironment) -> torch.device:
    """The GPU of this local rank if there are any, else the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", environment.local_rank)
    torch.cuda.set_device(device)
    return device


def rendezvous_store(environment: WorkerEnvironment, timeout_s: float) -> dist.Store:
    """The store that torchrun's environment names; a process started alone has one of its own."""
    if environment.num_ranks == 1:
        return dist.HashStore()
    store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=timeout_s)))
    return store


def init_process_group(
    options: Comm, dump_folder: str, environment: WorkerEnvironment, store: dist.Store, device: torch.device
) -> None:
    """Starts torch.distributed: gloo for tensors on the CPU always, NCCL for those on a GPU."""
    if options.trace_buf_size > 0 and device.type == "cuda":
        # NCCL's flight recorder: what each rank was doing when a collective gets stuck.
        traces = Path(dump_folder) / "comm_traces"
        traces.mkdir(parents=True, exist_ok=True)
        os.environ["TORCH_FR_BUFFER_SIZE"] = str(options.trace_buf_size)
        os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] = "1"
        os.environ["TORCH_FR_DUMP_TEMP_FILE"] = str(traces / "rank_")
    dist.init_process_group(
        backend="cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=environment.rank,
        world_size=environment.num_ranks,
        timeout=timedelta(seconds=options.init_timeout_seconds),
    )


def build_mesh(device: torch.device, degrees: tuple[int, int, int]) -> ParallelMesh:
    """The mesh of (replicate, shard, tp) degrees over all ranks, tp innermost."""
    mesh = init_device_mesh(device.type, degrees, mesh_dim_names=AXES)
    tp_degree = degrees[2]
    world = dp_group = dist.group.WORLD
    assert world is not None
    if tp_degree > 1:
        columns = [list(range(tp_rank, dist.get_world_size(), tp_degree)) for tp_rank in range(tp_degree)]
        dp_group, _ = dist.new_subgroups_by_enumeration(columns)
    assert dp_group is not None
    parallel = ParallelMesh(device, mesh, dp_group, dist.get_rank() // tp_degree)
    # torch gives new groups half an hour whatever the default group has.
    limit_s = group_timeout(world, "cpu").total_seconds()
    for group in parallel.groups:
        set_group_timeout(group, limit_s)
    return parallel


def copy_to(device: torch.device, tensor: Tensor) -> Tensor:
    """The tensor on the device; to a GPU from pinned memory, so that the host doesn't wait."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def to_host(tensor: Tensor) -> Callable[[], list[float]]:
    """Starts copying a 1-D tensor to the host; the function returned waits for that, and for nothing launched later."""
    if tensor.device.type != "cuda":
        return tensor.tolist
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    copied = torch.Event("cuda")
    copied.record()

    def values() -> list[float]:
        copied.synchronize()
        return host.tolist()

    return values
