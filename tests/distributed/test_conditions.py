"""Every way in which scripts use a model: each trains as in one process, whatever a rank's own graph is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import dmuon
from dmuon import torch_internals
from tests.distributed import foreign_models as fm
from tests.distributed.foreign_models import DIM, Case
from tests.distributed.pool import RankPool
from tests.distributed.test_foreign_models import Side, one_backward, train_beside_plain

Ranks = Callable[[int], RankPool]
Route = Callable[[Sequence[Any], Tensor, int, int], Tensor]
"""(blocks, x, step, rank) -> x: which blocks are called, and how."""

both_modes = pytest.mark.parametrize("reshard", [True, False], ids=["Z3", "Z2"])


class Bare(nn.Module):
    """A block of dedicated parameters alone: those of FSDP2 must be used on every rank alike, dedicated ones need not.

    use: which of the two matrices are used; the others' places are taken by none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, 2 * DIM, bias=False)
        self.down = nn.Linear(2 * DIM, DIM, bias=False)

    def forward(self, x: Tensor, use: str = "up, down", cut: bool = False) -> Tensor:
        h = F.rms_norm(x, (DIM,))
        wide = self.up(h) if "up" in use else torch.cat([h, -h], dim=-1)
        narrow = self.down(torch.tanh(wide)) if "down" in use else wide[..., :DIM]
        return (x + narrow).detach() if cut else x + narrow


class Chain(nn.Module):
    """Four blocks on a route. `is_alone`: only the blocks are trained, and FSDP2 takes no part."""

    def __init__(self, route: Route, trains_embedding: bool, is_alone: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(fm.VOCAB, DIM).requires_grad_(trains_embedding and not is_alone)
        self.layers = nn.ModuleList(Bare() for _ in range(4))
        self.output = nn.Linear(DIM, fm.VOCAB, bias=False).requires_grad_(not is_alone)
        self.route = route

    def forward(self, tokens_BS: Tensor, step: int, rank: int) -> Tensor:
        return self.output(self.route(self.layers, self.embedding(tokens_BS), step, rank))


def chain_loss(model: nn.Module, step: int, rank: int) -> Tensor:
    tokens_BS = fm.tokens(step, rank)
    return fm.next_token_loss(model(tokens_BS, step, rank), tokens_BS)


def chain(route: Route, trains_embedding: bool = True, is_alone: bool = False) -> Case:
    units = {f"layers.{i}": fm.weights(f"layers.{i}", "up", "down") for i in range(4)}
    sharded = None if is_alone else lambda _: []
    return Case(partial(Chain, route, trains_embedding, is_alone), chain_loss, units, {}, sharded)


# Which blocks are called, and how.


def straight(blocks: Sequence[Any], x: Tensor, step: int, rank: int) -> Tensor:
    for block in blocks:
        x = block(x)
    return x


def repeated(blocks: Sequence[Any], x: Tensor, step: int, rank: int) -> Tensor:
    for index in (0, 1, 0, 2, 1, 1, 3):
        x = blocks[index](x)
    return x


def in_changing_order(blocks: Sequence[Any], x: Tensor, step: int, rank: int) -> Tensor:
    for index in torch.randperm(4, generator=torch.Generator().manual_seed(step)).tolist():
        x = blocks[index](x)
    return x


def skipping(blocks: Sequence[Any], x: Tensor, step: int, rank: int) -> Tensor:
    """Each step leaves out another block, the second step the first one, which has never run by then."""
    for index, block in enumerate(blocks):
        if index != (1, 0, 3)[step % 3]:
            x = block(x)
    return x


def using(use: Callable[[int, int], str], blocks: Sequence[Any], x: Tensor, step: int, rank: int) -> Tensor:
    for index, block in enumerate(blocks):
        x = block(x, use(index, rank))
    return x


def cutting(where: str, index: int, blocks: Sequence[Any], x: Tensor, step: int, rank: int) -> Tensor:
    """On rank 0 no gradient flows through block `index`."""
    for block in blocks:
        is_cut = rank == 0 and block is blocks[index]
        y = block(x, cut=is_cut and where == "inside")
        if is_cut:
            y = x + (y - x).detach() if where == "beside" else y.detach()
        x = y
    return x


ROUTES: dict[str, Route] = {
    "repeated": repeated,
    "changing order": in_changing_order,
    "one block left out": skipping,
    "a matrix unused on one rank": partial(using, lambda i, rank: "up" if rank == 0 and i in (0, 2) else "up, down"),
    "a matrix unused everywhere": partial(using, lambda i, rank: "down" if i in (1, 3) else "up, down"),
    "other matrices on each rank": partial(using, lambda i, rank: ("up", "down")[(i + rank) % 2]),
    "a block unused on one rank": partial(using, lambda i, rank: "" if (i, rank) in ((0, 1), (3, 0)) else "up, down"),
    "a block unused everywhere": partial(using, lambda i, rank: "" if i == 2 else "up, down"),
}
CUT_ROUTES = {
    f"block {index} cut {where} on one rank": partial(cutting, where, index)
    for where, index in [("behind", 0), ("behind", 2), ("behind", 3), ("beside", 1), ("inside", 0), ("inside", 3)]
}


FROZEN = {
    "a block frozen behind a cut on one rank": (1,),
    "two blocks frozen behind a cut on one rank": (1, 3),
}


def train_on_route(name: str, **options: Any) -> None:
    if name in FROZEN:
        case = chain(partial(cutting, "behind", 0), trains_embedding=False)
        options["schedule"] = partial(one_backward_with_frozen, FROZEN[name])
    else:
        case = chain(ROUTES[name]) if name in ROUTES else chain(CUT_ROUTES[name], trains_embedding=False)
    train_beside_plain(case, num_steps=3, **options)


def one_backward_with_frozen(blocks: Sequence[int], side: Side, step: int) -> list[Tensor]:
    for index in blocks:
        side.model.layers[index].requires_grad_(False)
    return one_backward(side, step)


@both_modes
@pytest.mark.parametrize("name", [*ROUTES, *CUT_ROUTES, *FROZEN])
def test_blocks_are_used_in_any_way(ranks: Ranks, name: str, reshard: bool) -> None:
    """Were it wrong: ranks whose graphs differ would wait for each other, or take one block's weights or gradients for
    another's; what no rank uses would get a gradient, or decay."""
    ranks(2).run(train_on_route, name, reshard=reshard)


@pytest.mark.parametrize("name", [*ROUTES, *CUT_ROUTES, *FROZEN])
def test_blocks_are_used_in_any_way_under_hsdp(ranks: Ranks, name: str) -> None:
    ranks(4).run(train_on_route, name, shape=(2, 2))


# What the first block is given, and what blocks return.


class TokenBlock(nn.Module):
    """The embedding lies inside the first block, whose input is integers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(fm.VOCAB, DIM)
        self.mix = nn.Linear(DIM, DIM, bias=False)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        return self.mix(self.table(tokens_BS))


class NoEmbedding(nn.Module):
    """Nothing before the first block: its input is data, integers or floats."""

    def __init__(self, first: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([first(), fm.Mlp(), fm.Mlp()])
        self.output = nn.Linear(DIM, fm.VOCAB, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.output(x)


def loss_of_features(model: nn.Module, step: int, rank: int) -> Tensor:
    tokens_BS = fm.tokens(step, rank)
    return fm.next_token_loss(model(F.one_hot(tokens_BS % DIM, DIM).float() + tokens_BS[..., None] / 50), tokens_BS)


MLP_UNITS = {f"layers.{i}": fm.weights(f"layers.{i}", "up", "down") for i in range(3)}
FIRST_BLOCKS = {
    "integers": Case(
        partial(NoEmbedding, TokenBlock), fm.language_loss, MLP_UNITS | {"layers.0": ["layers.0.mix.weight"]}
    ),
    "floats": Case(partial(NoEmbedding, fm.Mlp), loss_of_features, MLP_UNITS),
}


def train_first_block(name: str, reshard: bool) -> None:
    train_beside_plain(FIRST_BLOCKS[name], reshard=reshard)


@both_modes
@pytest.mark.parametrize("name", FIRST_BLOCKS)
def test_inputs_need_no_gradient(ranks: Ranks, name: str, reshard: bool) -> None:
    """Were it wrong: hooks that wait for a gradient of the input would leave the first block's gradients unreduced."""
    ranks(2).run(train_first_block, name, reshard)


@dataclass
class Both:
    main: Tensor
    aside: Tensor


class Pair(NamedTuple):
    main: Tensor
    aside: Tensor


class Opaque:
    def __init__(self, main: Tensor, aside: Tensor) -> None:
        self.main, self.aside = main, aside


# How a block returns (main, aside), and how its caller takes both.
CONTAINERS: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], tuple[Tensor, Tensor]]]] = {
    "dataclass": (Both, lambda out: (out.main, out.aside)),
    "dict": (
        lambda main, aside: {"main": main, "rest": {"aside": aside}},
        lambda out: (out["main"], out["rest"]["aside"]),
    ),
    "named tuple": (Pair, lambda out: (out.main, out.aside)),
    "nested tuple": (lambda main, aside: (1, [(aside,), main]), lambda out: (out[1][1], out[1][0][0])),
    "tensor and None": (lambda main, aside: (main, None), lambda out: (out[0], out[0])),
    "dataclass in a list": (lambda main, aside: [None, Both(main, aside)], lambda out: (out[1].main, out[1].aside)),
}


class Returning(fm.Mlp):
    def __init__(self, pack: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.pack = pack

    def forward(self, x: Tensor) -> Any:
        aside = torch.tanh(self.up(self.norm(x)))
        return self.pack(x + self.down(aside), aside)


class WithAside(fm.Transformer):
    def __init__(self, container: str) -> None:
        pack, self.unpack = CONTAINERS[container]
        super().__init__(partial(Returning, pack))

    def forward(self, tokens_BS: Tensor) -> tuple[Tensor, Tensor]:
        x_BSD, asides = self.embedding(tokens_BS), torch.zeros(())
        for layer in self.layers:
            x_BSD, aside = self.unpack(layer(x_BSD))
            asides = asides + aside.square().mean()
        return self.output(x_BSD), asides


def loss_with_aside(model: nn.Module, step: int, rank: int) -> Tensor:
    logits_BSV, asides = model(fm.tokens(step, rank))
    # Before the second step no gradient comes through the last block's main output.
    return asides + fm.next_token_loss(logits_BSV, fm.tokens(step, rank)) if step > 0 else asides


def train_returning(container: str, reshard: bool) -> None:
    train_beside_plain(Case(partial(WithAside, container), loss_with_aside, MLP_UNITS), reshard=reshard)


@both_modes
@pytest.mark.parametrize("container", CONTAINERS)
def test_blocks_return_containers(ranks: Ranks, container: str, reshard: bool) -> None:
    """Were it wrong: weights would not be filled again for a backward that begins at a tensor inside."""
    if "dataclass" in container and reshard and torch.__version__ < "2.12":
        pytest.skip("FSDP2 of torch 2.11 itself does not look for tensors in dataclasses")
    ranks(2).run(train_returning, container, reshard)


class Keeping(fm.Mlp):
    """Leaves part of the loss on itself, as routers of experts do."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.up(self.norm(x)))
        self.aside = hidden.square().mean()
        return x + self.down(hidden)


def loss_with_kept(model: nn.Module, step: int, rank: int) -> Tensor:
    return fm.language_loss(model, step, rank) + sum(layer.aside for layer in model.layers)  # type: ignore[union-attr]


def train_keeping(reshard: bool) -> None:
    train_beside_plain(Case(partial(fm.Transformer, Keeping), loss_with_kept, MLP_UNITS), reshard=reshard)


@both_modes
def test_blocks_leave_a_loss_behind(ranks: Ranks, reshard: bool) -> None:
    """Were it wrong: a gradient that comes past the output would be reduced too early, or find no weights."""
    ranks(2).run(train_keeping, reshard)


def train_beside_other_groups() -> None:
    for members in ([0], [0, 1], [1, 2, 3]):
        dist.new_group(members)
    if dist.get_rank() != 3:
        torch_internals.new_group_of_members([0, 1, 2], timedelta(seconds=60))
    train_beside_plain(Case(fm.Transformer, fm.language_loss, MLP_UNITS), shape=(2, 2))
    dist.barrier(dist.new_group())


def test_scripts_have_groups_of_some_ranks(ranks: Ranks) -> None:
    """torch names dmuon's groups by those that a rank is in or has made: ranks would wait for each other."""
    ranks(4).run(train_beside_other_groups)


def error_of_unknown_container() -> tuple[str, bool]:
    torch.manual_seed(0)
    model = fm.Transformer(partial(Returning, Opaque), num_blocks=1)
    dmuon.dedicate_params(model, init_device_mesh("cpu", (2,), mesh_dim_names=("shard",)))
    x = torch.ones(3, DIM)
    with torch.no_grad():
        main = model.layers[0](x).main
    with pytest.raises(TypeError) as error:
        model.layers[0](x)
    return str(error.value), main.isfinite().all().item()


def test_an_unknown_container_is_refused(ranks: Ranks) -> None:
    """Were it not: backward would read weights that were freed."""
    for text, is_finite in ranks(2).run(error_of_unknown_container):
        assert "layers.0" in text
        assert "Opaque" in text
        assert is_finite
