"""Runs planned batches. Small ones, which launches would slow down, are captured as CUDA graphs and replayed."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dmuon.newton_schulz.coefficients import Triple
from dmuon.newton_schulz.iterations import direct, gram
from dmuon.newton_schulz.planning import BatchPlan

logger = logging.getLogger(__name__)

# About half of what a core has for itself, at the second level.
_CACHE_BYTES = 1 << 20

# What all graphs of one `Execution` may hold for good.
_MOST_REPLAYED_BYTES = 1 << 30

Triples = tuple[Triple, ...]


@dataclass(eq=False)
class _Replay:
    """One batch that is or will be replayed: its static input, and the graph once there is one."""

    X: Tensor
    graph: torch.cuda.CUDAGraph | None = None
    result: Tensor | None = None
    has_run: bool = False


class Execution:
    """What a plan says, done, on one device. Results are the same bits whether a batch is launched or replayed.

    Attributes:
        num_runs: of each kernel, and of graphs by "replayed": what ran, for tests.
    """

    def __init__(self) -> None:
        self.num_runs: Counter[str] = Counter()
        self._replays: dict[Any, _Replay | None] = {}  # None: not to be replayed
        self._replayed_bytes = 0
        self._pool: Any = None

    def input(self, plan: BatchPlan, triples: Triples, device: torch.device) -> Tensor:
        """The buffer to fill with normalised matrices before `run`, zero outside of them."""
        key = plan, triples
        if key not in self._replays:
            self._replays[key] = _Replay(_empty(plan, device)) if self._reserve(plan) else None
        replay = self._replays[key]
        X = _empty(plan, device) if replay is None else replay.X
        if plan.padded != plan.shape:
            X.zero_()  # the iteration used it as workspace
        return X

    def run(self, plan: BatchPlan, triples: Triples, X: Tensor) -> Tensor:
        """Iterates on what `input` gave, which is workspace afterwards. The padded shape; valid until the next run."""
        self.num_runs[plan.kernel] += 1
        key = plan, triples
        replay = self._replays.get(key)
        if replay is not None and replay.has_run and replay.graph is None:
            replay = self._replays[key] = self._captured(plan, triples, replay)
        if replay is None or replay.graph is None:
            # The first time compiles kernels, which can't be captured.
            if replay is not None:
                replay.has_run = True
            return iterate_as_planned(plan, triples, X, may_overwrite=True)
        assert replay.X is X
        assert replay.result is not None
        self.num_runs["replayed"] += 1
        replay.graph.replay()
        return replay.result

    def _reserve(self, plan: BatchPlan) -> bool:
        num_bytes = _replayed_bytes(plan)
        if not plan.replays or self._replayed_bytes + num_bytes > _MOST_REPLAYED_BYTES:
            return False
        self._replayed_bytes += num_bytes
        return True

    def _captured(self, plan: BatchPlan, triples: Triples, replay: _Replay) -> _Replay | None:
        """With its graph; None if it can't be captured, for lack of memory above all: then launches do it for good."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads, NCCL's watchdog for one, may go on asking the device what it has done.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                replay.result = iterate_as_planned(plan, triples, replay.X, may_overwrite=True)
        except RuntimeError as error:
            logger.warning("Newton-Schulz of %s is not replayed as a CUDA graph: %s", plan, error)
            self._replayed_bytes -= _replayed_bytes(plan)
            return None
        replay.graph = graph
        return replay


def iterate_as_planned(plan: BatchPlan, triples: Sequence[Triple], X: Tensor, *, may_overwrite: bool = False) -> Tensor:
    """The iteration on normalised matrices in the plan's padded shape; a result of that shape."""
    if plan.kernel != "torch":
        from dmuon.newton_schulz import symmetric

        return symmetric.run(plan, X, triples, may_overwrite=may_overwrite)
    wide = X.shape[1] <= X.shape[2]
    X_BMN = X if wide else X.mT
    if plan.form == "gram":
        result = gram(X_BMN, triples)
    elif X.device.type == "cpu" and X.dtype == torch.float32:
        result = torch.cat([direct(part, triples) for part in X_BMN.split(_num_in_cache(X_BMN))])
    else:
        result = direct(X_BMN, triples)
    return result if wide else result.mT


def _num_in_cache(X_BMN: Tensor) -> int:
    """How many matrices a core keeps near itself while it iterates on them: X and its successor, A and B."""
    matrix_bytes = X_BMN.shape[1] * X_BMN.shape[2] * X_BMN.itemsize
    return max(1, _CACHE_BYTES // max(1, 4 * matrix_bytes))


def _replayed_bytes(plan: BatchPlan) -> int:
    """X twice, and four n x n factors."""
    num, rows, cols = plan.padded
    return plan.dtype.itemsize * num * (2 * rows * cols + 4 * min(rows, cols) ** 2)


def _empty(plan: BatchPlan, device: torch.device) -> Tensor:
    return torch.empty(plan.padded, dtype=plan.dtype, device=device)
