"""Fixtures: one pool of ranks for each world size, shared by all tests of a run."""

from collections.abc import Callable, Iterator

import pytest

from tests.distributed.pool import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    """`ranks(4)`: the pool of four gloo ranks."""
    pools: dict[int, RankPool] = {}

    def pool(world_size: int) -> RankPool:
        return pools.setdefault(world_size, RankPool(world_size))

    yield pool
    for started in pools.values():
        started.stop()
