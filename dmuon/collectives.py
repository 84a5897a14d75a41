"""The data-parallel axes: process groups of dmuon's own, and asynchronous broadcasts and reductions over them.

Groups of our own keep our collectives in one order of their own, whatever FSDP2 or the training script issue on theirs.
An axis of size 1 issues nothing. Gloo and NCCL differ nowhere else in dmuon than here.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dmuon.torch_internals import group_timeout

Wait = Callable[[], object]
"""Returned by an asynchronous collective. NCCL: the current stream waits. Gloo: the host does."""


def _nothing() -> None:
    return None


class Axis:
    """One mesh axis as this rank sees it.

    Unshard and reduce have a group each: a prefetched broadcast must not queue behind a reduction.
    """

    def __init__(self, mesh: DeviceMesh | None) -> None:
        self.ranks: list[int] = [dist.get_rank()] if mesh is None else mesh.mesh.flatten().tolist()
        self.size = len(self.ranks)
        self.index = self.ranks.index(dist.get_rank())
        self.groups: list[dist.ProcessGroup] = []
        if mesh is not None and self.size > 1:
            timeout = group_timeout(mesh.get_group(), mesh.device_type)
            # Only members take part, so that a slice of a larger mesh can be set up by the ranks that see it.
            self.groups = [
                dist.new_group(self.ranks, timeout=timeout, use_local_synchronization=True) for _ in range(2)
            ]
            self._broadcast_group, self._reduce_group = self.groups

    def broadcast(self, tensor: Tensor, root: int) -> Wait:
        """Fills `tensor` everywhere with what index `root` of the axis holds."""
        if self.size == 1:
            return _nothing
        work = dist.broadcast(tensor, self.ranks[root], group=self._broadcast_group, async_op=True)
        assert work is not None
        return work.wait

    def reduce(self, tensor: Tensor, root: int) -> Wait:
        """Sums `tensor` into index `root`; elsewhere it holds anything afterwards (gloo leaves partial sums)."""
        if self.size == 1:
            return _nothing
        work = dist.reduce(tensor, self.ranks[root], op=dist.ReduceOp.SUM, group=self._reduce_group, async_op=True)
        assert work is not None
        return work.wait


class DataParallelAxes:
    """The (replicate, shard) axes, this rank's place on them, and who owns what from here."""

    def __init__(self, shard_mesh: DeviceMesh, replicate_mesh: DeviceMesh | None) -> None:
        self.shard = Axis(shard_mesh)
        self.replicate = Axis(replicate_mesh)
        self.world_size = self.shard.size * self.replicate.size
