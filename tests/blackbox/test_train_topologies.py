"""A training is the same on every mesh: micro-batches and ranks (B20), matrices of any size (B24), every start (B28).

Labels that are ignored and matrices that are frozen or fused can't be asked for by a flag: they are in
tests/distributed, test_step.py and test_reference_equality.py.
"""

from __future__ import annotations

import json
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models.llama.model import Llama
from models.llama.sizes import FLAVORS, LlamaSize
from tests.blackbox.runs import Run, Runs, copy_with_sizes
from tests.blackbox.test_train_resume import tensors_of
from tests.debruijn import debruijn_offset, debruijn_tokens

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

NUM_STEPS, SEQ_LEN = 3, 128
# eps: AdamW makes whole steps of gradients that are all rounding, unless they are small beside it.
CONFIG = f"""
[training]
dataset_path = "data"
seq_len = {SEQ_LEN}
steps = {NUM_STEPS}
mixed_precision_param = "float32"
[optimizer]
lr = 1e-2
eps = 1e-5
[lr_scheduler]
warmup_steps = 1
[checkpoint]
enable = true
interval = 1
[metrics]
log_freq = 1
[debug]
trace_batches = true
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"), CONFIG)


# Global batch and flags of a training.
TRAININGS: dict[str, tuple[int, tuple[str, ...]]] = {
    "muon": (2, ("--optimizer.name", "Muon")),
    "adamw-clipped": (4, ("--optimizer.name", "AdamW", "--training.max_norm", "0.3")),
    "muon-z2": (2, ("--optimizer.name", "Muon", "--parallelism.fsdp_reshard_after_forward", "never")),
}
# Mesh and local batch of each way to make its steps; a global batch that is larger is accumulated.
WAYS: dict[str, dict[str, tuple[tuple[int, int], int]]] = {
    "muon": {"whole": ((1, 1), 2), "accumulated": ((1, 1), 1), "shard": ((1, 2), 1), "replicate": ((2, 1), 1)},
    "adamw-clipped": {"whole": ((1, 1), 4), "accumulated": ((1, 1), 1), "shard": ((1, 2), 1), "replicate": ((2, 1), 2)},
    "muon-z2": {"shard": ((1, 2), 1), "replicate": ((2, 1), 1)},
}
REFERENCES = {"muon": "muon", "adamw-clipped": "adamw-clipped", "muon-z2": "muon"}
ALL = [(training, way) for training, ways in WAYS.items() for way in ways]
OTHERS = [(training, way) for training, way in ALL if way != "whole"]


def made(runs: Runs, training: str, way: str) -> Run:
    (mesh, local_batch), (global_batch, flags) = WAYS[training][way], TRAININGS[training]
    batch = ("--training.local_batch_size", str(local_batch), "--training.global_batch_size", str(global_batch))
    return runs.run(f"{training}-{way}", mesh, *batch, *flags)


def weights(run: Run, step: int) -> dict[str, Tensor]:
    saved = tensors_of(run.checkpoint(step))
    return {key.removeprefix("model."): tensor for key, tensor in saved.items() if key.startswith("model.")}


def sequences(run: Run, step: int) -> dict[int, Tensor]:
    """The sequences of a step by data-parallel rank, each with one id more: [N, SEQ_LEN + 1], int64.

    The first two ids of each name its place in the corpus.
    """
    corpus = torch.from_numpy(debruijn_tokens())
    found = {}
    for path in sorted(run.folder.glob("trace/*.jsonl")):
        batches = [json.loads(line) for line in path.read_text().splitlines()]
        mine = [batch for batch in batches if batch["step"] == step]
        offsets = [debruijn_offset(*ids[:2]) for batch in mine for ids in batch["first8"]]
        found[mine[0]["dp_rank"]] = torch.stack([corpus[begin : begin + SEQ_LEN + 1] for begin in offsets])
    return found


@pytest.mark.parametrize(("training", "way"), ALL)
def test_b20_what_is_logged_is_the_mean_over_all_ranks_and_micro_batches(training: str, way: str, runs: Runs) -> None:
    """Against the model by itself, with the weights that were saved, on all that the step consumed in one batch."""
    run = made(runs, training, way)
    model = Llama(FLAVORS["llama3"]["debugmodel"], SEQ_LEN)
    maxima = {}
    for line in map(json.loads, (run.folder / "metrics.jsonl").read_text().splitlines()):
        maxima[line["step"]] = line["loss_metrics/global_max_loss"]
    for step in range(2, NUM_STEPS + 1):
        model.load_state_dict(weights(run, step - 1))
        model.zero_grad()
        of_rank = sequences(run, step)
        assert sum(map(len, of_rank.values())) == TRAININGS[training][0]
        token_losses = {rank: losses_of_tokens(model, ids) for rank, ids in of_rank.items()}
        loss = torch.cat(list(token_losses.values())).mean()
        loss.backward()
        norm = torch.stack(
            [param.grad.double().norm() for param in model.parameters() if param.grad is not None]
        ).norm()
        assert run.steps[step] == pytest.approx((loss.item(), norm.item()), rel=1e-6), f"step {step}"
        assert maxima[step] == pytest.approx(max(mean.mean().item() for mean in token_losses.values()), rel=1e-6)


def losses_of_tokens(model: Llama, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten(), reduction="none")


@pytest.mark.parametrize(("training", "way"), OTHERS)
def test_b20_b28_micro_batches_and_ranks_do_not_change_a_step(training: str, way: str, runs: Runs) -> None:
    run, whole = made(runs, training, way), made(runs, REFERENCES[training], "whole")
    assert_same_training(run, whole)
    assert run.ended.stderr == whole.ended.stderr == ""


def assert_same_training(run: Run, expected: Run) -> None:
    """Every loss and norm, and by the norm of each the weights after the last step."""
    assert sorted(expected.steps) == list(range(1, NUM_STEPS + 1))
    assert run.steps.keys() == expected.steps.keys()
    for step, figures in expected.steps.items():
        assert run.steps[step] == pytest.approx(figures, rel=1e-6), f"step {step}"
    before, after, got = weights(expected, 1), weights(expected, NUM_STEPS), weights(run, NUM_STEPS)
    assert got.keys() == after.keys()
    for name, weight in after.items():
        # An update by the Gram form in float32 is 1.3e-4 of its norm from float64's, and a quarter of the weights here.
        allowed = (1e-4 if name.startswith("layers.") and weight.ndim == 2 else 1e-6) * weight.norm()
        assert (got[name] - weight).norm() <= allowed, name
        assert (before[name] - weight).norm() > 100 * allowed, f"{name} stood still"


# B24. 257 rows fit no mesh of 2, 3 or 4 ranks, and 22, 66 and 177 not each ("odd"); of 6 elements on 4 ranks the last
# shard is empty ("narrow"); the feed-forward matrices are single rows and columns ("thin").
SIZES = {
    "odd": LlamaSize(66, 2, 3, 1, 257, None, 177, 10000.0),
    "narrow": LlamaSize(6, 2, 3, 1, 257, None, 17, 10000.0),
    "thin": LlamaSize(66, 2, 3, 1, 257, 0.006, 1, 10000.0),
}
MESHES = {
    "odd": [(1, 2), (2, 1), (1, 3), (2, 2), (1, 4)],
    "narrow": [(2, 2), (1, 4)],
    "thin": [(1, 4)],
}


@pytest.fixture(scope="module")
def other_sizes(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    program = copy_with_sizes(tmp_path_factory.mktemp("copy"), SIZES)
    return Runs(tmp_path_factory.mktemp("other-sizes"), CONFIG, program)


def made_on(runs: Runs, flavor: str, mesh: tuple[int, int]) -> Run:
    """3 steps of 12 sequences."""
    local_batch = str(12 // (mesh[0] * mesh[1]))
    flags = ("--model.flavor", flavor, "--training.local_batch_size", local_batch)
    return runs.run(f"{flavor}-{mesh[0]}-{mesh[1]}", mesh, *flags)


@pytest.mark.parametrize(
    ("flavor", "mesh"), [(flavor, mesh) for flavor, meshes in MESHES.items() for mesh in meshes], ids=str
)
def test_b24_sizes_that_no_mesh_divides_train_alike_on_all(
    flavor: str, mesh: tuple[int, int], other_sizes: Runs
) -> None:
    expected = made_on(other_sizes, flavor, (1, 1))
    run = made_on(other_sizes, flavor, mesh)
    saved = weights(run, NUM_STEPS)
    assert {name: tuple(weight.shape) for name, weight in saved.items()} == SIZES[flavor].parameter_shapes()
    assert_same_training(run, expected)


@pytest.mark.parametrize("flavor", SIZES)
def test_b24_who_updates_what_is_said_once(flavor: str, other_sizes: Runs) -> None:
    """Matrices of the blocks go to Muon; embedding, head, vectors, rows and columns to AdamW."""
    shapes = SIZES[flavor].parameter_shapes()
    by_muon = [shape for name, shape in shapes.items() if name.startswith("layers.") and min((1, *shape)[-2:]) > 1]
    by_adamw = [shape for shape in shapes.values() if shape not in by_muon]
    assert len(by_muon) + len(by_adamw) == len(shapes)
    for mesh in [(1, 1), *MESHES[flavor]]:
        printed = made_on(other_sizes, flavor, mesh).ended.stdout
        (line,) = [line for line in printed.splitlines() if "by Muon" in line]
        assert printed.count("by AdamW") == 1
        assert f"{sum(map(math.prod, by_muon)):,} in {len(by_muon)} matrices by Muon" in line
        assert f"{sum(map(math.prod, by_adamw)):,} in {len(by_adamw)} others by AdamW" in line


def test_b28_saves_beside_training_hold_the_same(runs: Runs) -> None:
    """On gloo alone, every step is saved while the next one is made, in both asynchronous modes."""
    global_batch, flags = TRAININGS["muon"]
    expected = made(runs, "muon", "shard")
    for mode in ("async", "async_with_pinned_mem"):
        batch = ("--training.local_batch_size=1", f"--training.global_batch_size={global_batch}")
        run = runs.run(f"muon-shard-{mode}", (1, 2), *batch, *flags, "--checkpoint.async_mode", mode)
        assert run.ended.stderr == ""
        assert run.steps == expected.steps
        for step in range(1, NUM_STEPS + 1):
            assert f"saved step {step} in" in run.ended.stdout
            saved = tensors_of(run.checkpoint(step))
            for name, tensor in tensors_of(expected.checkpoint(step)).items():
                assert torch.equal(saved[name], tensor), name
