"""The data-parallel axes: process groups of dmuon's own, and asynchronous broadcasts and reductions over them.

Groups of our own keep our collectives in one order of their own, whatever FSDP2 or the training script issue on theirs.
An axis of size 1 issues nothing. Gloo and NCCL differ nowhere else in dmuon than here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dmuon.aside import Aside
from dmuon.torch_internals import coalesced, group_timeout, new_group_of_members

Wait = Callable[[], object]
"""Returned by an asynchronous collective. NCCL: the current stream waits. Gloo: the host does."""

Transfer = tuple[Tensor, int]
"""What a broadcast fills or a reduction sums, and the index of its root on the axis."""


def nothing() -> None:
    """The wait of what needs none."""


class Axis:
    """One mesh axis as this rank sees it, or a run of it.

    Unshard and reduce have a group each: a prefetched broadcast must not queue behind a reduction.

    Args:
        run: indices of the mesh axis that make up this one. Default: all.

    Attributes:
        fixed_tree: sum by one pairwise tree over the axis instead of in the back-end's own order. Costs the root a
            buffer for each rank of the axis.
    """

    def __init__(self, mesh: DeviceMesh | None, run: slice = slice(None)) -> None:
        self.ranks: list[int] = [dist.get_rank()] if mesh is None else mesh.mesh.flatten().tolist()[run]
        self.size = len(self.ranks)
        self.index = self.ranks.index(dist.get_rank())
        self.fixed_tree = False
        self._is_nccl = mesh is not None and mesh.device_type == "cuda"
        self.groups: list[dist.ProcessGroup] = []
        if mesh is not None and self.size > 1:
            timeout = group_timeout(mesh.get_group(), mesh.device_type)
            # Only members take part, so that a slice of a larger mesh can be set up by the ranks that see it.
            self.groups = [new_group_of_members(self.ranks, timeout) for _ in range(2)]
            self._broadcast_group, self._reduce_group = self.groups

    def broadcast(self, transfers: Sequence[Transfer]) -> Wait:
        """Fills each tensor everywhere with what its root holds."""
        if self.size == 1:
            return nothing
        group = self._broadcast_group

        def issue(tensor: Tensor, root: int) -> dist.Work | None:
            return dist.broadcast(tensor, self.ranks[root], group=group, async_op=True)

        return self._together(group, transfers, issue)

    @property
    def averages(self) -> bool:
        """Whether `reduce` divides by the size of the axis, as NCCL does on the way."""
        return self._is_nccl and not self.fixed_tree

    def reduce(self, transfers: Sequence[Transfer]) -> Wait:
        """Sums each tensor into its root, or averages it; elsewhere it holds anything afterwards."""
        if self.size == 1:
            return nothing
        if self.fixed_tree:
            return _all_of([self._reduce_by_tree(tensor, root) for tensor, root in transfers])
        group, op = self._reduce_group, dist.ReduceOp.AVG if self.averages else dist.ReduceOp.SUM

        def issue(tensor: Tensor, root: int) -> dist.Work | None:
            return dist.reduce(tensor, self.ranks[root], op=op, group=group, async_op=True)

        return self._together(group, transfers, issue)

    def _together(
        self, group: dist.ProcessGroup, transfers: Sequence[Transfer], issue: Callable[[Tensor, int], dist.Work | None]
    ) -> Wait:
        """By NCCL in one kernel, so that what goes to this rank and what leaves it travel at a time."""
        if self._is_nccl and len(transfers) > 1:
            with coalesced(group, transfers[0][0].device) as manager:
                for tensor, root in transfers:
                    issue(tensor, root)
            return manager.wait
        return _all_of([_wait_of(issue(tensor, root)) for tensor, root in transfers])

    def _reduce_by_tree(self, tensor: Tensor, root: int) -> Wait:
        parts = [torch.empty_like(tensor) for _ in self.ranks] if self.index == root else None
        work = dist.gather(tensor, parts, self.ranks[root], group=self._reduce_group, async_op=True)
        assert work is not None

        def wait() -> None:
            work.wait()
            if parts is not None:
                tensor.copy_(tree_sum(parts))

        return wait

    def all_reduce(self, tensor: Tensor) -> Wait:
        """Sums `tensor` everywhere, to the same bits."""
        if self.size == 1:
            return nothing
        if self.fixed_tree:
            return self._all_reduce_by_tree(tensor)
        work = dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=self._reduce_group, async_op=True)
        return _wait_of(work)

    def _all_reduce_by_tree(self, tensor: Tensor) -> Wait:
        parts = [torch.empty_like(tensor) for _ in self.ranks]
        work = dist.all_gather(parts, tensor, group=self._reduce_group, async_op=True)
        assert work is not None

        def wait() -> None:
            work.wait()
            tensor.copy_(tree_sum(parts))

        return wait

    def all_to_all(
        self, tensor: Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int]
    ) -> tuple[Tensor, Wait]:
        """Sends consecutive runs of a flat tensor to the indices of the axis. Returns the runs received from them."""
        if self.size == 1:
            return tensor, nothing
        received = tensor.new_empty(sum(receive_sizes))
        work = dist.all_to_all_single(
            received, tensor, list(receive_sizes), list(send_sizes), group=self._broadcast_group, async_op=True
        )
        return received, _wait_of(work)


class DataParallelAxes:
    """The (replicate, shard) axes and this rank's place on them; and the tp axis, where parameters are cut over one.

    Attributes:
        joint: runs of the shard axis that own matrices jointly with this rank, by their first index and their size;
            the longest first, which is the order of their collectives. Each lies within the one before.
    """

    def __init__(
        self, shard_mesh: DeviceMesh, replicate_mesh: DeviceMesh | None, tp_mesh: DeviceMesh | None = None
    ) -> None:
        self.shard = Axis(shard_mesh)
        self.replicate = Axis(replicate_mesh)
        self.tp = None if tp_mesh is None else Axis(tp_mesh)
        self.joint: dict[tuple[int, int], Axis] = {}
        self.world_size = self.shard.size * self.replicate.size
        # Only where both axes communicate does one collective have to wait for another one.
        both = self.shard.size > 1 and self.replicate.size > 1
        self.unshard_lane = Lane(shard_mesh.device_type) if both else None
        self.reduce_lane = Lane(shard_mesh.device_type) if both else None

    @property
    def reduced_factor(self) -> int:
        """What a reduction over both axes is, in units of the mean over the data-parallel ranks."""
        return math.prod(axis.size for axis in (self.shard, self.replicate) if not axis.averages)

    def use_fixed_tree(self) -> None:
        self.shard.fixed_tree = self.replicate.fixed_tree = True


def _wait_of(work: dist.Work | None) -> Wait:
    assert work is not None
    return work.wait


def _all_of(waits: Sequence[Wait]) -> Wait:
    """The wait for all of them."""

    def wait() -> None:
        for each in waits:
            each()

    return wait


class Lane:
    """Issues a collective after another one without holding up the caller: beside it, in the order of the calls.

    On a GPU a stream of its own waits, so that the compute stream does not. On the CPU, where a wait holds up the
    thread, a thread of its own does it.
    """

    def __init__(self, device_type: str) -> None:
        self._aside = Aside(device_type)
        self._thread = ThreadPoolExecutor(1, "dmuon") if device_type == "cpu" else None

    def run(self, issue: Callable[[], Wait]) -> Wait:
        """Calls `issue`, which waits for a collective and issues the next one; returns the wait for that.

        What `issue` reads must stay allocated until the returned wait was called.
        """
        if self._thread is not None:
            issued = self._thread.submit(issue)
            return lambda: issued.result()()
        with self._aside():
            return issue()


def tree_sum(parts: Sequence[Tensor]) -> Tensor:
    """The sum of tensors by a pairwise tree: neighbours first, an odd last one carried up.

    A function of the parts' order alone; and where runs of 2^k neighbours were summed by the same rule before, the
    tree over their sums gives the same bits as the tree over all parts.
    """
    level = list(parts)
    while len(level) > 1:
        paired = [level[i] + level[i + 1] for i in range(0, len(level) - 1, 2)]
        level = paired + level[len(paired) * 2 :]
    return level[0]
