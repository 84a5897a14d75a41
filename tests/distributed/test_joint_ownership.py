"""Matrices that several ranks own jointly: gradients, norm, weights and momentum equal one process on every mesh."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import dmuon
from dmuon import joint_assignment
from dmuon.assignment import Assignment, Owner
from dmuon.hooks import find_runtime
from dmuon.joint import JointParameter
from dmuon.parameter import local
from dmuon.reference import ReferenceMuon
from tests.distributed.pool import RankPool
from tests.distributed.test_traffic import counted

DIM, HIDDEN, NUM_STEPS, MAX_NORM, LR = 16, 64, 10, 0.5, 3e-3
JOINT = {"layers.0.up.weight", "layers.0.down.weight"}
Snapshot = dict[str, Any]


class Block(nn.Module):
    """Two matrices that cost far more than the others: one with its long side as rows, one as columns."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(DIM)
        self.narrow = nn.Linear(DIM, 4, bias=False)
        self.widen = nn.Linear(4, DIM, bias=False)
        self.up = nn.Linear(DIM, hidden, bias=False)
        self.down = nn.Linear(hidden, DIM, bias=False)

    def forward(self, x: Tensor, uses_large: bool) -> Tensor:
        h = self.norm(x) + self.widen(self.narrow(x)).tanh()
        return x + (self.down(F.silu(self.up(h))) if uses_large else h)


class Model(nn.Module):
    """Also a block that is small, and an AdamW head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(HIDDEN), Block(8)])
        self.head = nn.Linear(DIM, 8, bias=False)

    def forward(self, x: Tensor, uses_large: bool = True) -> Tensor:
        return self.head(self.layers[1](self.layers[0](x, uses_large), True))


def initial_rows(name: str, shape: torch.Size, start: int, stop: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(ord(c) * (i + 1) for i, c in enumerate(name)))
    values = torch.randn(shape, generator=generator) * 0.2
    return (values + 1 if name.endswith("norm.weight") else values)[start:stop]


def batch(step: int) -> Tensor:
    return torch.randn(16, 4, DIM, generator=torch.Generator().manual_seed(100 + step))


def is_dedicated(name: str) -> bool:
    return name.startswith("layers.") and "norm" not in name


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def build(
    degrees: tuple[int, int],
    max_joint_owners: int,
    *,
    reshard: bool = True,
    on_meta: bool = True,
    deterministic: bool = False,
    param_dtype: torch.dtype | None = None,
    variant: str = "plain",
) -> nn.Module:
    """`variant`: also "ignored", by `ignored_params`; and "recomputed" or "compiled", the blocks' forwards."""
    mesh = init_device_mesh("cpu", degrees, mesh_dim_names=("replicate", "shard"))
    with torch.device("meta" if on_meta else "cpu"):
        model = Model()
    if not on_meta:
        for name, param in model.named_parameters():
            param.data.copy_(initial_rows(name, param.shape, 0, param.shape[0]))
    # On matrices this small, sums would cost more than products.
    with mock.patch.multiple(joint_assignment, SUM_FLOPS=0, LATENCY_FLOPS=0):
        plan = dmuon.dedicate_params(
            model,
            mesh["shard"],
            replicate_mesh=mesh["replicate"],
            reshard_after_forward=reshard,
            max_joint_owners=max_joint_owners,
            param_dtype=param_dtype,
            reduce_dtype=torch.float32,
        )
    joint = {entry.name for entry in plan.entries if entry.num_owners > 1}
    assert joint == (JOINT if min(max_joint_owners, degrees[1]) > 1 else set())
    # The fixed tree goes on over the rows in FSDP2's hook.
    fsdp_mesh = mesh["shard"] if deterministic or degrees[0] == 1 else mesh
    policy = MixedPrecisionPolicy(param_dtype, torch.float32)
    composition = {"ignored_params": dmuon.dedicated_params(model)} if variant == "ignored" else {}
    for module in [*model.layers, model]:
        fully_shard(module, mesh=fsdp_mesh, mp_policy=policy, reshard_after_forward=reshard, **composition)
    for layer in model.layers:
        if variant == "compiled":
            layer.forward = torch.compile(layer.forward, backend="aot_eager", fullgraph=True)
        elif variant == "recomputed":
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    if deterministic:
        dmuon.set_deterministic(True, model, replicate_mesh=mesh["replicate"])
    if on_meta:
        dmuon.materialize(model, initial_rows, "cpu")
    return model


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer, norm: Tensor, grads: dict[str, Tensor]) -> Snapshot:
    held = {name: param for name, param in model.named_parameters() if param.device.type != "meta"}
    momenta = {
        name: whole(optimizer.state[param]["momentum_buffer"])
        for name, param in held.items()
        if "momentum_buffer" in optimizer.state[param]
    }
    weights = {name: whole(param) for name, param in held.items()}
    return {"norm": norm, "grads": grads, "weights": weights, "momenta": momenta}


def step_once(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    step: int,
    num_microbatches: int = 1,
    no_sync: bool = False,
    skipping: int = 0,
) -> Snapshot:
    """`skipping`: this many of the ranks don't use the large matrices, and in every third step none does."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for micro in range(num_microbatches):
        inputs = batch(step).chunk(num_microbatches)[micro].chunk(world)[rank]
        with dmuon.no_sync(model) if no_sync and micro < num_microbatches - 1 else nullcontext():
            outputs = model(inputs, uses_large=rank >= num_skipping(skipping, step, world))
            (outputs.float().square().mean() / num_microbatches).backward()
    norm = dmuon.clip_grad_norm_(model, MAX_NORM)
    grads = {name: whole(param.grad) for name, param in model.named_parameters() if param.grad is not None}
    optimizer.step()
    optimizer.zero_grad()
    return snapshot(model, optimizer, norm, grads)


def num_skipping(skipping: int, step: int, world: int) -> int:
    return world if skipping and step % 3 == 1 else skipping


def train(degrees: tuple[int, int], max_joint_owners: int = 8, **options: Any) -> list[Snapshot]:
    stepping = {key: options.pop(key) for key in ("num_microbatches", "no_sync", "skipping") if key in options}
    asynchronous = options.pop("asynchronous", True)
    model = build(degrees, max_joint_owners, **options)
    optimizer = dmuon.Muon(model, lr=LR, ns_dtype="float32", replicate_async=asynchronous)
    return [step_once(model, optimizer, step, **stepping) for step in range(NUM_STEPS)]


def reference(skipping: int = 0) -> list[Snapshot]:
    """`skipping`: as in `step_once`, of four ranks."""
    model = Model()
    for name, param in model.named_parameters():
        param.data.copy_(initial_rows(name, param.shape, 0, param.shape[0]))
    optimizer, history = ReferenceMuon(model.named_parameters(), is_dedicated, lr=LR), []
    for step in range(NUM_STEPS):
        model.zero_grad()
        inputs = batch(step)
        used = [rank >= num_skipping(skipping, step, 4) for rank in range(4)]
        torch.cat(
            [model(part, uses) for part, uses in zip(inputs.chunk(4), used, strict=True)]
        ).square().mean().backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        grads = {name: whole(param.grad) for name, param in model.named_parameters() if param.grad is not None}
        optimizer.step()
        weights = {name: whole(param) for name, param in model.named_parameters()}
        momenta = {name: buffer.clone() for name, buffer in optimizer.momentum_buffers.items()}
        history.append({"norm": norm, "grads": grads, "weights": weights, "momenta": momenta})
    return history


def assert_close(actual: Tensor, expected: Tensor, what: str, tolerance: float = 1e-5) -> None:
    error = (actual - expected).norm() / expected.norm().clamp(min=1e-12)
    assert error < tolerance, f"{what}: relative error {error:.2e}"


def assert_equal_reference(histories: list[list[Snapshot]], expected: list[Snapshot]) -> None:
    for step, right in enumerate(expected):
        num_seen = dict.fromkeys(right["grads"], 0)
        for history in histories:
            seen = history[step]
            assert_close(seen["norm"], right["norm"], f"norm of step {step}")
            for kind in ("grads", "weights", "momenta"):
                for name, tensor in seen[kind].items():
                    assert_close(tensor, right[kind][name], f"{kind}: {name}, step {step}")
            assert seen["momenta"].keys() == seen["weights"].keys() & set(right["momenta"])
            for name in seen["grads"]:
                num_seen[name] += 1
        assert all(num_seen.values())
        assert all(num_seen[name] > 1 for name in JOINT & num_seen.keys()), "these should have several owners"


def assert_equal_bits(one: list[list[Snapshot]], other: list[list[Snapshot]]) -> None:
    for history, history_other in zip(one, other, strict=True):
        assert not torch.equal(history[0]["weights"]["head.weight"], history[-1]["weights"]["head.weight"])
        for a, b in zip(history, history_other, strict=True):
            assert torch.equal(a["norm"], b["norm"])
            for kind in ("grads", "weights", "momenta"):
                assert a[kind].keys() == b[kind].keys()
                for name in a[kind]:
                    assert torch.equal(a[kind][name], b[kind][name]), f"{kind}: {name}"


MESHES = [(1, 4), (2, 2), (1, 8), (2, 4), (4, 2)]


@pytest.mark.parametrize("reshard", [True, False], ids=["Z3", "Z2"])
@pytest.mark.parametrize("degrees", MESHES, ids=str)
def test_steps_equal_one_process(ranks: Callable[[int], RankPool], degrees: tuple[int, int], reshard: bool) -> None:
    assert_equal_reference(ranks(degrees[0] * degrees[1]).run(train, degrees, reshard=reshard), reference())


@pytest.mark.parametrize("variant", ["ignored", "recomputed", "compiled"])
def test_compositions_equal_one_process(ranks: Callable[[int], RankPool], variant: str) -> None:
    assert_equal_reference(ranks(4).run(train, (2, 2), variant=variant), reference())


@pytest.mark.parametrize("no_sync", [False, True], ids=["reduced each time", "no_sync"])
@pytest.mark.parametrize("degrees", [(1, 4), (2, 2)], ids=str)
def test_accumulation_equals_one_process(
    ranks: Callable[[int], RankPool], degrees: tuple[int, int], no_sync: bool
) -> None:
    histories = ranks(4).run(train, degrees, num_microbatches=2, no_sync=no_sync, on_meta=False)
    assert_equal_reference(histories, reference())


def test_owners_learn_of_gradients_that_only_others_have(ranks: Callable[[int], RankPool]) -> None:
    """Two of four ranks never use the large matrices. What nobody uses stays without a gradient, and as it was."""
    expected = reference(skipping=2)
    assert [step for step in range(NUM_STEPS) if not JOINT & expected[step]["grads"].keys()] == [1, 4, 7]
    assert_equal_reference(ranks(4).run(train, (1, 4), skipping=2), expected)


def test_bits_do_not_depend_on_when_weights_travel(ranks: Callable[[int], RankPool]) -> None:
    """Z2 and Z3, published beside the next forward or before it, and a second run: all the same."""
    first = ranks(4).run(train, (2, 2))
    for options in ({}, {"reshard": False}, {"asynchronous": False}):
        assert_equal_bits(first, ranks(4).run(train, (2, 2), **options))


def test_fixed_tree(ranks: Callable[[int], RankPool]) -> None:
    histories = [ranks(4).run(train, (2, 2), deterministic=True) for _ in range(2)]
    assert_equal_bits(*histories)
    assert_equal_reference(histories[0], reference())


def everything_joint(assignment: Assignment, *_: Any) -> Assignment:
    """Pairs and fours, so that a rank shares matrices with several groups, and some units have strips alone."""
    num_owners = {name: 2 if index % 3 else 4 for index, name in enumerate(sorted(JOINT | {"layers.1.up.weight"}))}
    owners = {name: Owner(0, 2 * (index % 2) if num_owners[name] == 2 else 0) for index, name in enumerate(num_owners)}
    return Assignment(
        assignment.owners | owners,
        assignment.flops,
        assignment.numel,
        assignment.largest,
        assignment.total,
        num_owners,
    )


def train_with_groups_of_two_sizes() -> list[Snapshot]:
    model = Model()
    for name, param in model.named_parameters():
        param.data.copy_(initial_rows(name, param.shape, 0, param.shape[0]))
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("shard",))
    with mock.patch("dmuon.dedicate.share_largest", everything_joint):
        dmuon.dedicate_params(model, mesh, max_joint_owners=4)
    for module in [*model.layers, model]:
        fully_shard(module, mesh=mesh)
    optimizer = dmuon.Muon(model, lr=LR, ns_dtype="float32")
    assert len(find_runtime(model).axes.joint) == 2
    return [step_once(model, optimizer, step) for step in range(NUM_STEPS)]


def test_a_rank_in_groups_of_two_sizes(ranks: Callable[[int], RankPool]) -> None:
    assert_equal_reference(ranks(4).run(train_with_groups_of_two_sizes), reference())


def look_at_copies() -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, int], int]:
    """In bfloat16 on (2, 2), after two steps: what forward computes with, masters, bytes kept, strip bytes expected."""
    model = build((2, 2), 8, param_dtype=torch.bfloat16)
    optimizer = dmuon.Muon(model, lr=LR, ns_dtype="float32")
    for step in range(2):
        step_once(model, optimizer, step)
    computed: dict[str, Tensor] = {}
    layer = model.layers[0]
    layer.norm.register_forward_pre_hook(
        lambda *_: computed.update({f"layers.0.{n}": p.detach().clone() for n, p in layer.named_parameters()})
    )
    model(batch(0)[:2])
    masters = {name: whole(p) for name, p in model.named_parameters() if name in JOINT and p.device.type != "meta"}
    memory = dmuon.inspect(model, optimizer).memory
    mine = [p for unit in find_runtime(model).units for p in unit.params if isinstance(p, JointParameter)]
    assert all(param.compute.untyped_storage().nbytes() == 0 for param in mine), "whole matrices are freed after use"
    kept = {"masters": memory.master_bytes, "momentum": memory.momentum_bytes, "copies": memory.compute_bytes}
    return computed, masters, kept, sum(local(p.master).numel() for p in mine if p.axis is not None)


def test_every_rank_computes_with_the_rounded_masters(ranks: Callable[[int], RankPool]) -> None:
    results = ranks(4).run(look_at_copies)
    masters = {name: value for _, held, _, _ in results for name, value in held.items()}
    assert masters.keys() == JOINT
    for computed, _, kept, num_strip_elements in results:
        for name in JOINT:
            assert computed[name].shape == masters[name].shape
            assert torch.equal(computed[name], masters[name].bfloat16()), name
        assert num_strip_elements == DIM * HIDDEN // 2, "half of one of the two matrices"
        # Beside the strip there are at most all small matrices; a whole large one would not fit.
        for key, itemsize, num_strips in (("masters", 4, 1), ("momentum", 4, 1), ("copies", 2, 2)):
            assert kept[key] < itemsize * (num_strips * num_strip_elements + DIM * HIDDEN // 2), key


def traffic(reshard: bool) -> tuple[dict[str, int], Any, int]:
    """In bfloat16 on (2, 2): bytes of the collectives of a step, what `inspect` says, and elements in sections."""
    model = build((2, 2), 8, reshard=reshard, param_dtype=torch.bfloat16)
    optimizer = dmuon.Muon(model, lr=LR)
    step_once(model, optimizer, 0)
    runtime = find_runtime(model)
    with counted([*runtime.axes.shard.groups, *runtime.axes.replicate.groups]) as seen:
        step_once(model, optimizer, 1)
        runtime.wait_publish()
    return seen, dmuon.inspect(model).traffic, sum(s.numel for unit in runtime.units for s in unit.sections)


@pytest.mark.parametrize("reshard", [True, False], ids=["Z3", "Z2"])
def test_strips_send_what_whole_matrices_would(ranks: Callable[[int], RankPool], reshard: bool) -> None:
    numels = {name: param.numel() for name, param in Model().named_parameters() if is_dedicated(name)}
    num_elements = sum(numels.values())
    # What forward used last is still there when backward begins.
    num_again = sum(numel for name, numel in numels.items() if name.startswith("layers.0.")) if reshard else 0
    for seen, said, num_in_sections in ranks(4).run(traffic, reshard):
        assert num_in_sections == num_elements
        assert seen["broadcast 0"] == said.unshard_bytes == 2 * (num_elements + num_again)
        assert seen["reduce 1"] == said.reduce_bytes
        assert seen["broadcast 2"] == said.publish_bytes
        assert seen["reduce 3"] == said.column_reduce_bytes


def flat(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    state = dmuon.get_state_dict(model, optimizer)
    tensors = dict(state["model"])
    tensors |= {f"{n}/{k}": v for n, slots in state["optimizer"]["state"].items() for k, v in slots.items()}
    return {name: whole(tensor) for name, tensor in tensors.items()}


def train_and_save(degrees: tuple[int, int], max_joint_owners: int, folder: str) -> tuple[dict[str, Tensor], Any]:
    model = build(degrees, max_joint_owners)
    optimizer = dmuon.Muon(model, lr=LR)
    for step in range(3):
        step_once(model, optimizer, step)
    dcp.save(dmuon.get_state_dict(model, optimizer), checkpoint_id=folder)
    return flat(model, optimizer), [step_once(model, optimizer, step) for step in (3, 4)]


def load_and_train(degrees: tuple[int, int], max_joint_owners: int, folder: str) -> tuple[dict[str, Tensor], Any]:
    model = build(degrees, max_joint_owners, reshard=False)
    with torch.no_grad():
        for param in model.parameters():
            if param.device.type != "meta":
                local(param).zero_()
    optimizer = dmuon.Muon(model, lr=LR)
    state = dmuon.get_state_dict(model, optimizer)
    dcp.load(state, checkpoint_id=folder)
    dmuon.set_state_dict(model, optimizer, state)
    return flat(model, optimizer), [step_once(model, optimizer, step) for step in (3, 4)]


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        (((1, 4), 8), ((1, 4), 8)),
        (((1, 4), 8), ((1, 4), 1)),
        (((1, 4), 1), ((1, 4), 8)),
        (((2, 4), 8), ((2, 2), 2)),
        (((2, 2), 8), ((1, 2), 1)),
    ],
    ids=str,
)
def test_checkpoints_do_not_know_of_owners(
    ranks: Callable[[int], RankPool], tmp_path: Path, saved: tuple[Any, int], loaded: tuple[Any, int]
) -> None:
    before = ranks(saved[0][0] * saved[0][1]).run(train_and_save, *saved, str(tmp_path))
    after = ranks(loaded[0][0] * loaded[0][1]).run(load_and_train, *loaded, str(tmp_path))
    expected: dict[str, Tensor] = {}
    for held, _ in before:
        expected |= held
    for held, _ in after:
        for name, tensor in held.items():
            assert torch.equal(tensor, expected[name]), name
            assert tensor.any(), name
    if saved == loaded:
        assert_equal_bits([history for _, history in before], [history for _, history in after])


def refused() -> list[str]:
    messages = []
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tp"))
    model = Model()
    torch.distributed.tensor.parallel.parallelize_module(
        model.layers[0], mesh["tp"], {"up": torch.distributed.tensor.parallel.ColwiseParallel()}
    )
    across = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "replicate"))
    for shard, max_joint_owners, refused_model in ((mesh, 8, model), (mesh, 0, model), (across, 8, Model())):
        with pytest.raises(ValueError, match="max_joint_owners") as caught:
            dmuon.dedicate_params(refused_model, shard["shard"], max_joint_owners=max_joint_owners)
        messages.append(str(caught.value))
    return messages


def test_what_cannot_be_is_refused(ranks: Callable[[int], RankPool]) -> None:
    for messages in ranks(4).run(refused):
        assert "leave it at 1 with tensor parallelism" in messages[0]
        assert "must be 1, or the number of ranks of a node" in messages[1]
        assert "make it the last axis of the mesh" in messages[2]
