"""What a person drops is gone: models and optimizers hold no cycle that Python's collector can't see through."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import torch.distributed as dist

import dmuon
from tests.distributed import models
from tests.distributed.pool import RankPool
from tests.distributed.test_reference_equality import build


def survivors() -> int:
    """How many models, optimizers and masters of three trained models outlive them."""
    seen = []
    for step in range(3):
        model = build((1, 2), "ignored", reshard=True)
        optimizer = dmuon.Muon(model)
        tokens, targets = (t.chunk(dist.get_world_size())[dist.get_rank()] for t in models.batch(step))
        loss = models.loss_of(model, tokens, targets)
        with dmuon.no_sync(model):
            loss.backward()
        models.loss_of(model, tokens, targets).backward()
        optimizer.step()
        seen += [weakref.ref(model), weakref.ref(optimizer), weakref.ref(next(iter(dmuon.dedicated_params(model))))]
        del model, optimizer, loss
    gc.collect()
    return sum(ref() is not None for ref in seen)


def test_a_dropped_model_is_freed(ranks: Callable[[int], RankPool]) -> None:
    """Else a script that builds a second model, or a notebook, keeps the first one's weights for ever."""
    assert ranks(2).run(survivors) == [0, 0]
