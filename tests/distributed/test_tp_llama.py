"""A Llama cut over tensor-parallel ranks, as the harness builds it, is the model of one process: its weights bit for
bit, its loss and every gradient to rounding, and what it saves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import dmuon
from dmuon.torch_internals import group_timeout, set_group_timeout
from dmuon_titan.checkpoint import Checkpointer, Start, TrainState
from dmuon_titan.checkpoint.folder import examine
from dmuon_titan.config.schema import JobConfig, Optimizer, Parallelism, build
from dmuon_titan.loss import IGNORE_INDEX, build_loss, cross_entropy_sum, loss_context
from dmuon_titan.memory import LOGITS_AT_ONCE
from dmuon_titan.mesh import ParallelMesh, build_mesh
from dmuon_titan.optimizer import build_optimizer
from dmuon_titan.parallelize import build_model
from models.llama import tp_plan
from models.llama.initialization import Initializer
from models.llama.model import Llama
from models.llama.sizes import LlamaSize
from tests.distributed.pool import RankPool

Ranks = Callable[[int], RankPool]
Degrees = tuple[int, int, int]

CPU = torch.device("cpu")
SEQ_LEN, NUM_SEQUENCES = 16, 4
# 260 rows, or 65 on each of four ranks: FSDP2's shards of what tensor parallelism has cut are uneven.
SIZE = LlamaSize(32, 2, 4, 4, 260, None, 16, 10000.0)
TIED = replace(SIZE, tie_embeddings=True)


def config_of(degrees: Degrees, **options: Any) -> JobConfig:
    names = ("data_parallel_replicate_degree", "data_parallel_shard_degree", "tensor_parallel_degree")
    plain = {
        "training.seq_len": SEQ_LEN,
        "training.mixed_precision_param": "float32",
        "activation_checkpoint.mode": "none",
        "optimizer.name": "AdamW",
    }
    return build(plain | {f"parallelism.{name}": d for name, d in zip(names, degrees, strict=True)} | options)


def batch(step: int = 0) -> tuple[Tensor, Tensor]:
    """Tokens and labels of all sequences, some of which are no targets."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(SIZE.vocab_size, (NUM_SEQUENCES, SEQ_LEN + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[0, :5] = labels[2, 7:] = IGNORE_INDEX
    return tokens[:, :-1], labels


def whole_model(size: LlamaSize) -> Llama:
    with torch.device("meta"):
        model = Llama(size, SEQ_LEN)
    dmuon.materialize(model, Initializer(size, 1), "cpu")
    return model


def built(config: JobConfig, size: LlamaSize, degrees: Degrees) -> tuple[Llama, ParallelMesh]:
    torch.compiler.reset()  # a pool lives long, and torch compiles a function a few times only
    mesh = build_mesh(CPU, degrees)
    return build_model(replace(config, debug=replace(config.debug, seed=1)), size, mesh)[0], mesh


def backward(model: Llama, mesh: ParallelMesh, config: JobConfig, step: int = 0) -> Tensor:
    """Leaves the gradient of the mean loss of all sequences, as the trainer does; returns that loss, over all ranks."""
    tokens, labels = batch(step)
    mine = slice(mesh.dp_rank, None, mesh.dp_world)
    num_valid = (labels != IGNORE_INDEX).sum()
    with loss_context(config.parallelism):
        scaled, loss = build_loss(config)(model, tokens[mine], labels[mine], mesh.dp_world / num_valid)
        scaled.backward()
    mean = loss / num_valid
    dist.all_reduce(mean, group=mesh.dp_group)
    return mean


def whole_backward(model: Llama, step: int = 0) -> Tensor:
    tokens, labels = batch(step)
    loss = cross_entropy_sum(model(tokens), labels) / (labels != IGNORE_INDEX).sum()
    loss.backward()
    return loss.detach()


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def differences(degrees: Degrees, size: LlamaSize, options: dict[str, Any], patch: bool = False) -> dict[str, float]:
    """Of the loss, the norm and each gradient, relative to the whole model's. Asserts that the weights are equal."""
    config = config_of(degrees, **options)
    with pytest.MonkeyPatch.context() as changes:
        if patch:
            changes.setattr(tp_plan, "_wait_for_output", lambda module, args, output: output)
        model, mesh = built(config, size, degrees)
    expected = whole_model(size)
    params, expected_params = dict(model.named_parameters()), dict(expected.named_parameters())
    assert params.keys() == expected_params.keys()
    for name, param in params.items():
        assert torch.equal(whole(param.detach()), expected_params[name]), name
    loss, expected_loss = backward(model, mesh, config), whole_backward(expected)
    found = {"loss": abs(loss / expected_loss - 1).item()}
    expected_norm = nn.utils.clip_grad_norm_(expected.parameters(), float("inf"))
    found["norm"] = abs(dmuon.clip_grad_norm_(model, None) / expected_norm - 1).item()
    for name, param in expected_params.items():
        assert param.grad is not None
        grad = params[name].grad
        error = param.grad if grad is None else whole(grad) - param.grad
        found[name] = (error.norm() / param.grad.norm()).item()
    return found


def named(value: object) -> str:
    """Of a parameter, in the name of a test."""
    return ("tied" if value.tie_embeddings else "untied") if isinstance(value, LlamaSize) else str(value)


COMPILED = {"compile.enable": True, "compile.backend": "aot_eager"}
WHOLE_LOSS = {"parallelism.disable_loss_parallel": True}
OWNED = {"optimizer.name": "Muon"}
BY_OPERATOR = {"activation_checkpoint.mode": "selective", "activation_checkpoint.selective_ac_option": "op"}


@pytest.mark.parametrize(
    ("degrees", "size", "options"),
    [
        ((1, 1, 2), SIZE, {}),
        ((1, 1, 2), SIZE, WHOLE_LOSS),
        ((1, 1, 2), TIED, {}),
        ((1, 1, 2), SIZE, {"activation_checkpoint.mode": "full"}),
        ((1, 1, 2), SIZE, BY_OPERATOR),
        ((1, 1, 2), SIZE, COMPILED),
        ((1, 1, 2), TIED, COMPILED | WHOLE_LOSS),
        ((1, 1, 2), TIED, COMPILED | BY_OPERATOR),
        ((1, 1, 2), SIZE, OWNED),
        ((1, 1, 2), TIED, OWNED | COMPILED | BY_OPERATOR),
        ((1, 2, 2), SIZE, {}),
        ((2, 1, 2), TIED, COMPILED),
        ((1, 1, 4), SIZE, {}),
        ((1, 2, 2), TIED, WHOLE_LOSS | {"debug.deterministic": True}),
    ],
    ids=named,
)
def test_every_gradient_is_that_of_the_whole_model(
    degrees: Degrees, size: LlamaSize, options: dict[str, Any], ranks: Ranks
) -> None:
    for found in ranks(degrees[0] * degrees[1] * degrees[2]).run(differences, degrees, size, options):
        assert {name: error for name, error in found.items() if error > 1e-5} == {}


def test_bfloat16_is_as_close_as_its_rounding(ranks: Ranks) -> None:
    options = {"training.mixed_precision_param": "bfloat16"}
    for found in ranks(4).run(differences, (1, 2, 2), SIZE, options):
        assert {name: error for name, error in found.items() if error > 5e-2} == {}


@pytest.mark.skipif(torch.__version__ < "2.12", reason="torch 2.11 loses no gradient")
def test_a_compiled_block_takes_the_embeddings_gradient_if_nobody_waits(ranks: Ranks) -> None:
    """Why the plan waits: torch 2.13 loses the gradient of a collective's result that a compiled block is given."""
    for found in ranks(2).run(differences, (1, 1, 2), SIZE, COMPILED, patch=True):
        wrong = {name for name, error in found.items() if error > 1e-5}
        assert wrong == {"norm", "tok_embeddings.weight"}
        assert found["tok_embeddings.weight"] == 1.0


def train(degrees: Degrees, size: LlamaSize, num_steps: int, deterministic: bool) -> dict[str, Tensor]:
    """Losses, norms and weights after some steps of AdamW."""
    config = config_of(degrees, **{"debug.deterministic": deterministic})
    model, mesh = built(config, size, degrees)
    assert (model.output.weight is model.tok_embeddings.weight) == size.tie_embeddings
    optimizer = build_optimizer(Optimizer(name="AdamW", lr=1e-2), model)
    losses, norms = [], []
    for step in range(num_steps):
        optimizer.zero_grad()
        losses.append(backward(model, mesh, config, step))
        norms.append(dmuon.clip_grad_norm_(model, 1.0))
        optimizer.step()
    found = {name: whole(param.detach()) for name, param in model.named_parameters()}
    return found | {"losses": torch.stack(losses), "norms": torch.stack(norms)}


def train_whole(size: LlamaSize, num_steps: int) -> dict[str, Tensor]:
    model = whole_model(size)
    optimizer = build_optimizer(Optimizer(name="AdamW", lr=1e-2), model)
    losses, norms = [], []
    for step in range(num_steps):
        optimizer.zero_grad()
        losses.append(whole_backward(model, step))
        norms.append(dmuon.clip_grad_norm_(model, 1.0))
        optimizer.step()
    found = {name: param.detach() for name, param in model.named_parameters()}
    return found | {"losses": torch.stack(losses), "norms": torch.stack(norms)}


@pytest.mark.parametrize(("degrees", "size"), [((1, 2, 2), SIZE), ((2, 1, 2), TIED), ((1, 1, 2), TIED)], ids=named)
def test_b07_training_is_that_of_one_process_tied_or_not(degrees: Degrees, size: LlamaSize, ranks: Ranks) -> None:
    expected = train_whole(size, 5)
    start = dict(whole_model(size).named_parameters())
    for found in ranks(degrees[0] * degrees[1] * degrees[2]).run(train, degrees, size, 5, False):
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            # By the norm, for AdamW divides by the gradient's size: where that is rounding, so is the update's sign.
            assert (found[name] - tensor).norm() <= 1e-4 * tensor.norm(), name
        assert not any(torch.equal(found[name], start[name]) for name in start)


def test_the_same_bits_on_every_data_parallel_mesh_beside_tp(ranks: Ranks) -> None:
    runs = [ranks(8).run(train, degrees, SIZE, 3, True)[0] for degrees in ((2, 2, 2), (1, 4, 2), (4, 1, 2))]
    for other in runs[1:]:
        assert [name for name, tensor in runs[0].items() if not torch.equal(tensor, other[name])] == []
    native = [ranks(8).run(train, degrees, SIZE, 3, False)[0] for degrees in ((2, 2, 2), (1, 4, 2))]
    assert any(not torch.equal(tensor, native[1][name]) for name, tensor in native[0].items())


def saver_on(degrees: Degrees, folder: Path, size: LlamaSize) -> tuple[Checkpointer, ParallelMesh, JobConfig]:
    folder.mkdir(parents=True, exist_ok=True)
    config = config_of(degrees, **{"checkpoint.folder": str(folder)})
    model, mesh = built(config, size, degrees)
    optimizer = build_optimizer(Optimizer(name="AdamW", lr=1e-2), model)
    state = TrainState(0, SEQ_LEN, "d", "t", NUM_SEQUENCES, dist.get_world_size(), 1)
    return Checkpointer(config, size, model, optimizer, state, CPU), mesh, config


def logical_state(saver: Checkpointer) -> dict[str, Tensor]:
    state = dmuon.get_state_dict(saver.model, saver.optimizer)
    found = {name: whole(tensor).clone() for name, tensor in state["model"].items()}
    for name, slots in state["optimizer"]["state"].items():
        found |= {f"{name}.{slot}": whole(tensor).clone() for slot, tensor in slots.items()}
    return found


def save_on(degrees: Degrees, folder: Path, size: LlamaSize) -> dict[str, Tensor]:
    saver, mesh, config = saver_on(degrees, folder, size)
    for step in range(2):
        saver.optimizer.zero_grad()
        backward(saver.model, mesh, config, step)
        saver.optimizer.step()
    saver.save(wait=True)
    return logical_state(saver)


def load_on(degrees: Degrees, folder: Path, size: LlamaSize) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    saver, _, _ = saver_on(degrees, folder, size)
    before = logical_state(saver)
    saver.load(Start(examine(folder / "step-0"), own=True))
    return before, logical_state(saver)


@pytest.mark.parametrize("size", [SIZE, TIED], ids=["untied", "tied"])
def test_a_checkpoint_is_read_on_any_mesh(size: LlamaSize, tmp_path: Path, ranks: Ranks) -> None:
    saved = ranks(4).run(save_on, (1, 2, 2), tmp_path / "cut", size)[0]
    for degrees in ((1, 1, 4), (2, 2, 1), (1, 2, 2), (2, 1, 1), (1, 1, 1)):
        for before, after in ranks(degrees[0] * degrees[1] * degrees[2]).run(load_on, degrees, tmp_path / "cut", size):
            assert after.keys() == saved.keys()
            assert [name for name, tensor in saved.items() if not torch.equal(after[name], tensor)] == []
            assert not torch.equal(before["norm.weight"], after["norm.weight"])
    saved = ranks(2).run(save_on, (1, 2, 1), tmp_path / "whole", size)[0]
    for _, after in ranks(4).run(load_on, (2, 1, 2), tmp_path / "whole", size):
        assert [name for name, tensor in saved.items() if not torch.equal(after[name], tensor)] == []


def vocabulary_parallel_loss(chunk_elements: int, all_ignored: bool) -> list[tuple[Tensor, Tensor]]:
    """Loss and gradient of logits cut over the vocabulary, and gathered; and of whole ones."""
    mesh = build_mesh(CPU, (1, 1, dist.get_world_size())).tp
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 5, 12, generator=generator) * 4
    labels = torch.tensor([[0, 11, 5, 6, IGNORE_INDEX], [3, IGNORE_INDEX, 7, 2, 9]])
    labels = torch.full_like(labels, IGNORE_INDEX) if all_ignored else labels
    found = []
    for placement in (Shard(-1), Replicate(), None):
        held = logits.clone() if placement is None else distribute_tensor(logits, mesh, [placement])
        held.requires_grad_()
        with pytest.MonkeyPatch.context() as changes:
            changes.setitem(LOGITS_AT_ONCE, "cpu", chunk_elements)
            with loss_context(Parallelism(tensor_parallel_degree=2)):
                loss = cross_entropy_sum(held, labels)
                assert not isinstance(loss, DTensor)
                (grad,) = torch.autograd.grad(loss * 3, held)
        found.append((loss.detach(), whole(grad)))
    return found


@pytest.mark.parametrize("chunk_elements", [1 << 20, 20], ids=["at once", "in chunks"])
@pytest.mark.parametrize("all_ignored", [False, True])
def test_loss_on_a_part_of_the_vocabulary(chunk_elements: int, all_ignored: bool, ranks: Ranks) -> None:
    for *others, expected in ranks(2).run(vocabulary_parallel_loss, chunk_elements, all_ignored):
        assert (expected[0] == 0) == all_ignored
        for other in others:
            torch.testing.assert_close(other, expected)


def group_limits() -> tuple[int, set[float]]:
    """Number of the mesh's own groups, and their time-outs after the default group was given 77 seconds."""
    before_s = group_timeout(dist.group.WORLD, "cpu").total_seconds()
    set_group_timeout(None, 77)
    try:
        mesh = build_mesh(CPU, (1, 2, 2))
    finally:
        set_group_timeout(None, before_s)
    assert sorted(dist.get_process_group_ranks(mesh.dp_group)) == [dist.get_rank() % 2, dist.get_rank() % 2 + 2]
    assert mesh.dp_group in mesh.groups
    return len(mesh.groups), {group_timeout(group, "cpu").total_seconds() for group in mesh.groups}


def test_every_group_of_a_mesh_has_the_time_out_of_the_default_one(ranks: Ranks) -> None:
    assert ranks(4).run(group_limits) == [(4, {77.0})] * 4
