"""Models of other people train as they do in one process: gradients, norms, weights; and which unit holds what."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import dmuon
from dmuon.reference import ReferenceMuon
from dmuon.selection import clean_name
from tests.distributed import foreign_models as fm
from tests.distributed.foreign_models import Case
from tests.distributed.pool import RankPool

LR, MAX_NORM, TOLERANCE = 1e-2, 0.5, 1e-5


@dataclass
class Side:
    """What a schedule sees: the distributed model on this rank, or the plain one, which takes every rank's part."""

    model: Any
    case: Case
    rank: int
    optimizer: Any = None  # of the distributed model
    dtype_of: Callable[[str], torch.dtype] | None = None  # of the plain model, whose parameters are float32

    @property
    def is_plain(self) -> bool:
        return self.optimizer is None

    def loss(self, step: int) -> Tensor:
        return self.case.loss(self.model if self.dtype_of is None else self._cast, step, self.rank)

    def _cast(self, *args: Any) -> Any:
        """The plain model's forward in lower precision; gradients are rounded to that before they are summed."""
        assert self.dtype_of is not None
        params = {name: param.to(self.dtype_of(name)) for name, param in self.model.named_parameters()}
        return torch.func.functional_call(self.model, params, args)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.is_plain else dmuon.no_sync(self.model)


Schedule = Callable[[Side, int], list[Tensor]]
"""Forward and backward of one step; returns what must be equal on both sides."""


def one_backward(side: Side, step: int) -> list[Tensor]:
    loss = side.loss(step)
    loss.backward()
    return [loss]


def distribute(
    model: Any,
    case: Case,
    shape: tuple[int, int],
    reshard: bool,
    policy_of: Callable[[nn.Module], MixedPrecisionPolicy] = lambda _: MixedPrecisionPolicy(),
    pass_one_mesh: bool = False,
) -> dmuon.Plan:
    """dmuon, then FSDP2, as a person would call them.

    Args:
        policy_of: FSDP2's, of each sharded module.
        pass_one_mesh: give dmuon both axes in one mesh.
    """
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    fsdp_mesh = mesh if shape[0] > 1 else mesh["shard"]
    options = dict(case.dedicate, reshard_after_forward=reshard)
    if shape[0] > 1 and not pass_one_mesh:
        options["replicate_mesh"] = mesh["replicate"]
    plan = dmuon.dedicate_params(model, mesh if pass_one_mesh else mesh["shard"], **options)
    if case.sharded is not None:
        for module in case.sharded(model):
            fully_shard(module, mesh=fsdp_mesh, mp_policy=policy_of(module), reshard_after_forward=reshard)
        fully_shard(model, mesh=fsdp_mesh, mp_policy=policy_of(model))
    return plan


def train_beside_plain(
    case: Case,
    schedule: Schedule = one_backward,
    shape: tuple[int, int] = (1, 2),
    reshard: bool = True,
    num_steps: int = 2,
    wrap: Callable[[Any], None] | None = None,
    dtype_of: Callable[[str], torch.dtype] | None = None,
    later_tolerance: float = TOLERANCE,
    **options: Any,
) -> None:
    """Runs on each rank: some steps of both sides, compared after each.

    Args:
        wrap: applied to the distributed model before it is dedicated.
        dtype_of: parameter name -> what the plain model uses it in, if not float32.
        later_tolerance: from the second step on.
        options: of `distribute`.
    """
    torch.manual_seed(0)
    plain = case.model()
    torch.manual_seed(0)
    model = case.model()
    if wrap is not None:
        wrap(model)
    plan = distribute(model, case, shape, reshard, **options)
    assert {u: {e.name for e in plan.entries if e.unit == u} for u in {e.unit for e in plan.entries}} == {
        unit: set(names) for unit, names in case.units.items()
    }
    here = divmod(dist.get_rank(), shape[1])
    owned = {e.name: (e.owner.replicate, e.owner.shard) == here for e in plan.entries}
    optimizer = dmuon.Muon(model, lr=LR, ns_dtype="float32")
    reference = ReferenceMuon(
        plain.named_parameters(), owned.__contains__, lr=LR, split={e.name: e.split for e in plan.entries if e.split}
    )
    world = dist.get_world_size()
    for step in range(num_steps):
        tolerance = later_tolerance if step else TOLERANCE
        outputs = schedule(Side(model, case, dist.get_rank(), optimizer), step)
        plain.zero_grad()
        every_output = [schedule(Side(plain, case, r, dtype_of=dtype_of), step) for r in range(world)]
        for got, expected in zip(outputs, every_output[dist.get_rank()], strict=True):
            assert_close(got, expected, f"step {step}: output", tolerance)
        for param in plain.parameters():
            if param.grad is not None:
                param.grad.div_(world)
        norm = dmuon.clip_grad_norm_(model, MAX_NORM)
        expected_norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), MAX_NORM)
        compare_gradients(model, plain, owned, f"step {step}", tolerance)
        assert_close(norm, expected_norm, f"step {step}: norm", tolerance)
        before = {name: param.detach().clone() for name, param in plain.named_parameters()}
        optimizer.step()
        reference.step()
        compare_weights(model, plain, owned, before, f"step {step}", tolerance)
        optimizer.zero_grad()


def compare_gradients(model: nn.Module, plain: nn.Module, owned: dict[str, bool], step: str, tolerance: float) -> None:
    held = {clean_name(name): param for name, param in model.named_parameters()}
    assert list(held) == [name for name, _ in plain.named_parameters()]
    for name, expected in plain.named_parameters():
        grad, what = held[name].grad, f"{step}: gradient of {name}"
        if not owned.get(name, True):
            assert held[name].device.type == "meta", name
            assert grad is None, f"{what}: on a rank that is not its owner"
        elif expected.grad is None:
            assert grad is None, f"{what}: no rank has used it"
        else:
            assert grad is not None, f"{what}: missing"
            assert_close(whole(grad), expected.grad, what, tolerance)


def compare_weights(
    model: nn.Module, plain: nn.Module, owned: dict[str, bool], before: dict[str, Tensor], step: str, tolerance: float
) -> None:
    held = {clean_name(name): param for name, param in model.named_parameters()}
    for name, expected in plain.named_parameters():
        if not owned.get(name, True):
            continue
        weight, what = whole(held[name]), f"{step}: weight {name}"
        moves = expected.grad is not None and expected.requires_grad
        assert torch.equal(before[name], expected) != moves, what
        assert_close(weight, expected, what, tolerance)
        if not moves:
            continue
        # Small singular values of a gradient are rounding errors on both sides, and amplified: see
        # test_reference_equality.
        error = (weight - expected).norm() / (expected - before[name]).norm()
        assert error < 100 * tolerance, f"{what}: update wrong by {error:.2e}"


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def assert_close(got: Tensor, expected: Tensor, what: str, tolerance: float) -> None:
    error = (got.detach() - expected.detach()).norm() / expected.detach().norm().clamp(min=1e-12)
    assert error < tolerance, f"{what}: relative error {error:.2e}"


def mixture_units(expert_units: bool) -> dict[str, list[str]]:
    units: dict[str, list[str]] = {}
    for layer in ("layers.0", "layers.1"):
        units[layer] = fm.weights(layer, "router")
        for expert in (f"{layer}.experts.{i}" for i in range(fm.NUM_EXPERTS)):
            units.setdefault(expert if expert_units else layer, []).extend(fm.weights(expert, "up", "down"))
    return units


def is_stack_or_router(name: str, param: nn.Parameter) -> bool:
    return param.ndim == 3 or "router" in name


CASES = {
    # The call of the FAQ to the letter: nothing in the towers is named "proj".
    "action head": Case(
        lambda: fm.VisionLanguageAction("up", "down"),
        fm.action_loss,
        fm.HEAD_UNITS,
        {
            "predicate": lambda n, p: "proj" in n,
            "hook_boundary_predicate": lambda m: hasattr(m, "_is_action_layer"),
            "hook_boundary_strict": True,
        },
        fm.towers_and_head,
    ),
    # vision.blocks.3 and language.layers.3 apart; what is defined first runs last.
    "multimodal": Case(
        lambda: fm.VisionLanguageAction("up", "down"), fm.action_loss, fm.TOWER_UNITS, {}, fm.towers_and_head
    ),
    "vision language action": Case(
        lambda: fm.VisionLanguageAction("up", "down"),
        fm.action_loss,
        fm.TOWER_UNITS | fm.HEAD_UNITS,
        {
            "predicate": lambda n, p: p.ndim == 2 and "embedding" not in n and n != "action.weight",
            "hook_boundary_predicate": lambda m: isinstance(m, fm.Mlp),
        },
        fm.towers_and_head,
    ),
    "experts in their layer": Case(
        lambda: fm.MixtureTransformer(call_all=False), fm.mixture_loss, mixture_units(expert_units=False)
    ),
    "experts as units": Case(
        lambda: fm.MixtureTransformer(call_all=True),
        fm.mixture_loss,
        mixture_units(expert_units=True),
        {"hook_boundary_predicate": lambda m: isinstance(m, (fm.Expert, fm.Mixture))},
    ),
    "expert stacks": Case(
        lambda: fm.Transformer(fm.Stacks),
        fm.language_loss,
        {f"layers.{i}": [f"layers.{i}.{n}" for n in ("up", "down", "router.weight")] for i in range(3)},
        {"predicate": is_stack_or_router},
    ),
    "stages": Case(lambda: fm.Transformer(fm.Stage, 2), fm.language_loss, fm.STAGE_UNITS),
    "adapters in place": Case(
        fm.adapters_in_place,
        fm.language_loss,
        {f"layers.{i}": fm.weights(f"layers.{i}.up", "lora_a", "lora_b") for i in range(3)},
    ),
    "adapters beside": Case(
        fm.AdaptersBeside,
        fm.language_loss,
        {f"adapters.layer_{i}.{j}": [f"adapters.layer_{i}.{j}.weight"] for i in range(3) for j in range(2)},
        {"predicate": lambda n, p: "adapters" in n, "hook_boundary_strict": False},
        lambda model: model.base.layers,
    ),
    "tied in a block": Case(
        lambda: fm.Transformer(fm.TiedMlp),
        fm.language_loss,
        {f"layers.{i}": fm.weights(f"layers.{i}", "up") for i in range(3)},
    ),
    "tied across blocks": Case(
        fm.tied_across_blocks,
        fm.language_loss,
        {
            "layers.0 + layers.2": ["layers.0.up.weight"],
            "layers.0": ["layers.0.down.weight"],
            "layers.1": fm.weights("layers.1", "up", "down"),
            "layers.2": ["layers.2.down.weight"],
        },
    ),
    "GPT-2": Case(
        fm.Gpt2,
        fm.language_loss,
        {h: fm.weights(h, "c_attn", "c_proj", "mlp.0", "mlp.2") for h in ("transformer.h.0", "transformer.h.1")},
        {
            "hook_boundary_predicate": lambda m: isinstance(m, fm.Gpt2Block),
            "split": {"*.c_attn.weight": (fm.DIM, fm.DIM, fm.DIM)},
        },
        lambda model: model.transformer["h"],
    ),
}


def train_case(name: str, **options: Any) -> None:
    train_beside_plain(CASES[name], num_steps=3, **options)


@pytest.mark.parametrize("reshard", [True, False], ids=["Z3", "Z2"])
@pytest.mark.parametrize("name", CASES)
def test_trains_as_in_one_process(ranks: Callable[[int], RankPool], name: str, reshard: bool) -> None:
    """Were it wrong: a matrix in a unit whose forward does not surround its use, a gradient summed over the wrong
    uses or ranks, an expert without tokens updated, or a collective that only some ranks issue."""
    ranks(2).run(train_case, name, reshard=reshard)


def error_of_an_action_head_among_projections() -> str:
    case = CASES["action head"]
    model = fm.VisionLanguageAction("q_proj", "o_proj")
    with pytest.raises(ValueError, match="no hook boundary") as error:
        dmuon.dedicate_params(model, init_device_mesh("cpu", (2,), mesh_dim_names=("shard",)), **case.dedicate)
    return str(error.value)


def test_projections_outside_of_the_head_are_all_named(ranks: Callable[[int], RankPool]) -> None:
    """Were it wrong: matrices of the towers, which the same predicate chooses, would be used without being filled."""
    without = [f"{block}.{name}.weight" for block in fm.TOWER_UNITS for name in ("q_proj", "o_proj")]
    for text in ranks(2).run(error_of_an_action_head_among_projections):
        assert all(name in text for name in without)
        assert "action_head" not in text


@pytest.mark.parametrize("name", CASES)
def test_trains_as_in_one_process_under_hsdp(ranks: Callable[[int], RankPool], name: str) -> None:
    ranks(4).run(train_case, name, shape=(2, 2))


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=fm.VOCAB,
        hidden_size=2 * fm.DIM,
        intermediate_size=3 * fm.DIM,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    return LlamaForCausalLM(config).train()


def llama_loss(model: Any, step: int, rank: int) -> Tensor:
    """From the model's own output, a dictionary that is also a dataclass."""
    tokens_BS = fm.tokens(step, rank)
    return model(input_ids=tokens_BS, labels=tokens_BS, use_cache=False).loss


LLAMA_LINEARS = [f"self_attn.{p}_proj" for p in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
LLAMA_UNITS = {f"model.layers.{i}": fm.weights(f"model.layers.{i}", *LLAMA_LINEARS) for i in range(3)}


def train_llama(use_reentrant: bool | None, reshard: bool) -> None:
    forwards: list[None] = []

    def wrap(model: Any) -> None:
        model.model.layers[0].self_attn.register_forward_pre_hook(lambda *_: forwards.append(None))
        if use_reentrant is not None:
            model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})

    case = Case(llama, llama_loss, LLAMA_UNITS, {}, lambda model: model.model.layers)
    train_beside_plain(case, num_steps=3, reshard=reshard, wrap=wrap)
    assert len(forwards) == (3 if use_reentrant is None else 6)


@pytest.mark.hf
@pytest.mark.parametrize("reshard", [True, False], ids=["Z3", "Z2"])
@pytest.mark.parametrize("use_reentrant", [None, False, True], ids=["stored", "recomputed", "reentrant"])
def test_llama_of_hugging_face(ranks: Callable[[int], RankPool], use_reentrant: bool | None, reshard: bool) -> None:
    """Its checkpoints lie around the layers' hooks. Were it wrong: a layer computed again on freed weights, or one
    whose gradients, which come in a backward of their own, are lost."""
    pytest.importorskip("transformers")
    ranks(2).run(train_llama, use_reentrant, reshard)
