"""The private names of torch that the harness uses do what it thinks they do."""

from __future__ import annotations

import logging
import time

import pytest
import torch
import torch.distributed as dist

from dmuon_titan.torch_internals import set_group_timeout, silence_recomputation_warning
from tests.distributed.pool import RankPool


def wait_for_nobody(timeout_s: float) -> float:
    """Seconds until a collective that the other rank stays away from fails."""
    group = dist.new_group()
    set_group_timeout(group, timeout_s)
    begin_s = time.monotonic()
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError):
            dist.all_reduce(torch.zeros(1), group=group)
    return time.monotonic() - begin_s


def test_a_stuck_collective_ends_after_the_timeout_that_was_set():
    pool = RankPool(2)
    try:
        waited_s, _ = pool.run(wait_for_nobody, 0.5)
    finally:
        pool.stop()
    assert waited_s < 60  # the group's own limit is 30 minutes


def test_compiling_a_selective_recomputation_warns_of_nothing(caplog):
    silence_recomputation_warning()
    logger = logging.getLogger("torch._higher_order_ops.wrap")
    logger.warning("\nDetected that context_fn is passed to torch.utils.checkpoint under torch.compile.\n")
    logger.warning("something else")
    assert [record.getMessage() for record in caplog.records] == ["something else"]
