"""FSDP2 averages gradients on gloo (B28). Some versions of torch summed them there, silently (pytorch/pytorch#162338).

AdamW's update hardly depends on a gradient's scale, so that losses would not tell. The harness leaves the division by
the number of ranks to FSDP2.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tests.distributed.pool import RankPool
from tests.distributed.test_reference_equality import whole


def model() -> nn.Sequential:
    """Rows that 2 and 4 ranks don't divide, fewer rows than ranks among them."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def gradients(of: nn.Module, rank: int) -> list[Tensor]:
    """From the data of a rank, which has more and larger samples than the rank before."""
    x = torch.randn(2 + rank, 5, generator=torch.Generator().manual_seed(rank))
    of(x).square().sum().backward()
    return [whole(param.grad) for param in of.parameters() if param.grad is not None]


def sharded_and_of_each_rank(shape: tuple[int, int], reduce_dtype: torch.dtype | None) -> list[list[Tensor]]:
    """Gradients that FSDP2 leaves, then those of plain models on the data of each rank."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    sharded, policy = model(), MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
    for module in (sharded[0], sharded[2], sharded):
        fully_shard(module, mesh=mesh if shape[0] > 1 else mesh["shard"], mp_policy=policy)
    return [gradients(sharded, dist.get_rank()), *(gradients(model(), rank) for rank in range(dist.get_world_size()))]


@pytest.mark.parametrize("shape", [(1, 2), (2, 1), (1, 4), (2, 2), (4, 1)], ids=str)
@pytest.mark.parametrize(("reduce_dtype", "tolerance"), [(None, 1e-6), (torch.bfloat16, 2e-2)], ids=["fp32", "bf16"])
def test_b28_fsdp2_averages_over_both_axes(
    shape: tuple[int, int], reduce_dtype: torch.dtype | None, tolerance: float, ranks: Callable[[int], RankPool]
) -> None:
    num_ranks = shape[0] * shape[1]
    for sharded, *of_ranks in ranks(num_ranks).run(sharded_and_of_each_rank, shape, reduce_dtype):
        assert len(sharded) == 4
        for grad, *parts in zip(sharded, *of_ranks, strict=True):
            mean = torch.stack(parts).mean(0)
            assert (grad - mean).norm() <= tolerance * mean.norm()
            assert (parts[0] - parts[1]).norm() > 0.1 * mean.norm(), "ranks with the same data would prove nothing"
