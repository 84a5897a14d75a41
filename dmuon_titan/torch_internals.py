"""Every private name of torch that the harness uses; dmuon has a file of its own.

tests/unit/test_titan_torch_internals.py checks them.
"""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


def set_group_timeout(group: dist.ProcessGroup | None, timeout_s: float) -> None:
    """Changes after how long a collective of this group (None: the default one) counts as stuck."""
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), group)


def record_memory_history(max_entries: int) -> None:
    torch.cuda.memory._record_memory_history(max_entries=max_entries)


def memory_snapshot() -> Any:
    return torch.cuda.memory._snapshot()


def silence_recomputation_warning() -> None:
    """torch.compile warns of recomputed in-place operations whenever some results are kept; our models have none."""
    logging.getLogger("torch._higher_order_ops.wrap").addFilter(
        lambda record: "context_fn is passed to torch.utils.checkpoint" not in record.getMessage()
    )
