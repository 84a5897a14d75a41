"""Blocks that are computed again in backward, and blocks that are compiled, train as in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from tests.distributed import foreign_models as fm
from tests.distributed.foreign_models import Case
from tests.distributed.test_conditions import MLP_UNITS, Ranks, both_modes, chain
from tests.distributed.test_foreign_models import train_beside_plain
from tests.distributed.test_passes import reduced_once, two_forwards_then_two_backwards

FULL: dict[str, Any] = {"use_reentrant": False}
REENTRANT: dict[str, Any] = {"use_reentrant": True}
SELECTIVE: dict[str, Any] = {
    "use_reentrant": False,
    "context_fn": partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default]),
}
HOW = {"full": FULL, "reentrant": REENTRANT, "selective": SELECTIVE}


def wrap_modules(how: str, model: Any) -> None:
    """The hooks lie around the recomputation."""
    options = dict(HOW[how])
    kind = CheckpointImpl.REENTRANT if options.pop("use_reentrant") else CheckpointImpl.NO_REENTRANT
    for index, layer in enumerate(model.layers):
        model.layers[index] = checkpoint_wrapper(layer, kind, **options)


def wrap_forwards(how: str, model: Any) -> None:
    for layer in model.layers:
        layer.forward = partial(checkpoint, layer.forward, **HOW[how])


def around_calls(how: str, blocks: Sequence[Any], x: Tensor, step: int, rank: int) -> Tensor:
    """The hooks lie inside of the recomputation, some blocks run twice, one is not recomputed, and on each rank some
    matrices are unused."""
    for index in (0, 1, 0, 2, 3, 2):
        use = "up" if (index + rank) % 3 == 0 else "up, down"
        x = blocks[index](x, use) if index == 3 else checkpoint(blocks[index], x, use, **HOW[how])
    return x


def counted(forwards: list[None], wrap: Callable[[Any], None] | None, model: Any) -> None:
    model.layers[0].up.register_forward_pre_hook(lambda *_: forwards.append(None))
    if wrap is not None:
        wrap(model)


def train_recomputed(how: str, where: str, reshard: bool) -> None:
    forwards: list[None] = []
    if where == "around":
        case, wrap = chain(partial(around_calls, how)), None
    else:
        case = Case(fm.Transformer, fm.language_loss, MLP_UNITS)
        wrap = partial(wrap_modules if where == "wrapper" else wrap_forwards, how)
    train_beside_plain(case, reshard=reshard, wrap=partial(counted, forwards, wrap))
    assert len(forwards) == 2 * 2 * (2 if where == "around" else 1), "forward was not run again"


@both_modes
@pytest.mark.parametrize("where", ["wrapper", "forward", "around"])
@pytest.mark.parametrize("how", HOW)
def test_blocks_are_computed_again(ranks: Ranks, how: str, where: str, reshard: bool) -> None:
    """Were it wrong: recomputation would read freed weights, or gradients of a second use, which a reentrant
    checkpoint brings in a backward of its own, would be lost."""
    ranks(2).run(train_recomputed, how, where, reshard)


def train_recomputed_passes(how: str) -> None:
    for schedule in (reduced_once, two_forwards_then_two_backwards):
        train_beside_plain(chain(partial(around_calls, how)), schedule)


@pytest.mark.parametrize("how", HOW)
def test_several_passes_are_computed_again(ranks: Ranks, how: str) -> None:
    ranks(2).run(train_recomputed_passes, how)


# torch.compile. The back-end traces forward and backward as any other does, and runs them as they are.

compiled = partial(torch.compile, backend="aot_eager")


def compile_modules(model: Any) -> None:
    for layer in model.layers:
        layer.compile(backend="aot_eager")


def replace_modules(model: Any) -> None:
    for index, layer in enumerate(model.layers):
        model.layers[index] = compiled(layer)


def compile_forwards(model: Any, fullgraph: bool = True) -> None:
    for layer in model.layers:
        layer.forward = compiled(layer.forward, fullgraph=fullgraph)


def compile_and_recompute(model: Any) -> None:
    compile_forwards(model, fullgraph=False)
    wrap_modules("selective", model)


def train_compiled(wrap: Callable[[Any], None], reshard: bool) -> int:
    """Returns how many graphs were compiled."""
    torch._dynamo.reset()
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    case = Case(partial(fm.Transformer, num_blocks=2), fm.language_loss, {k: MLP_UNITS[k] for k in list(MLP_UNITS)[:2]})
    train_beside_plain(case, reshard=reshard, num_steps=3, wrap=wrap)
    return torch._dynamo.utils.counters["stats"]["unique_graphs"] - before


@both_modes
@pytest.mark.parametrize("wrap", [compile_modules, replace_modules, compile_forwards, compile_and_recompute])
def test_blocks_are_compiled(ranks: Ranks, wrap: Callable[[Any], None], reshard: bool) -> None:
    """Were it wrong: a compiled block would keep the weights that it was traced with, or trace the hooks."""
    for num_graphs in ranks(2).run(train_compiled, wrap, reshard):
        assert num_graphs == 1, "compiled anew for other blocks or steps"
