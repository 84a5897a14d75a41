"""A checkpoint has the optimizer's whole state, and what continues from it is the run that was never stopped (B04).

What no flag of a job can make, a matrix that is frozen or has no gradient yet when the state is saved, is in
tests/distributed/test_optimizer.py.
"""

from __future__ import annotations

import json
import shutil
from typing import Any

import pytest
import torch

from dmuon_titan.config.schema import LRScheduler
from dmuon_titan.lr_scheduler import build_schedule
from models.llama.sizes import FLAVORS
from tests.blackbox.runs import Run, Runs, edit
from tests.blackbox.test_train_resume import tensors_of

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

CONFIG = """
[training]
dataset_path = "data"
local_batch_size = 2
seq_len = 32
steps = 10
mixed_precision_param = "float32"
[optimizer]
lr = 3e-3
[lr_scheduler]
warmup_steps = 2
[checkpoint]
enable = true
interval = 5
[metrics]
log_freq = 1
"""
SHAPES = FLAVORS["llama3"]["debugmodel"].parameter_shapes()
# Optimizer, mesh, other flags.
INPUTS: dict[str, tuple[str, tuple[int, int], tuple[str, ...]]] = {
    "muon-one-rank": ("Muon", (1, 1), ()),
    "muon-shard": ("Muon", (1, 2), ()),
    "muon-replicate": ("Muon", (2, 1), ()),
    "muon-bf16": ("Muon", (1, 1), ("--training.mixed_precision_param", "bfloat16")),
    "adamw-shard": ("AdamW", (1, 2), ()),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"), CONFIG)


def unbroken(runs: Runs, name: str) -> Run:
    """10 steps, saved at 5 and 10."""
    optimizer, mesh, flags = INPUTS[name]
    return runs.run(name, mesh, "--optimizer.name", optimizer, *flags)


def continued(runs: Runs, name: str, copy: str) -> Run:
    """Steps 6 to 10, from the checkpoint that lies in the folder `copy`."""
    optimizer, mesh, flags = INPUTS[name]
    run = runs.run(copy, mesh, "--optimizer.name", optimizer, *flags)
    assert "continuing after step 5" in run.ended.stdout
    assert run.ended.stderr == ""
    return run


def expected_slots(optimizer: str) -> dict[str, tuple[int, ...]]:
    """Name in a checkpoint and shape of the state of every parameter."""
    slots: dict[str, tuple[int, ...]] = {}
    for name, shape in SHAPES.items():
        if optimizer == "Muon" and name.startswith("layers.") and len(shape) == 2:
            slots[f"optimizer.state.{name}.momentum_buffer"] = shape
        else:
            slots[f"optimizer.state.{name}.exp_avg"] = slots[f"optimizer.state.{name}.exp_avg_sq"] = shape
            slots[f"optimizer.state.{name}.step"] = ()
    return slots


@pytest.mark.parametrize("name", INPUTS)
def test_b04_a_checkpoint_has_the_state_of_every_parameter(name: str, runs: Runs) -> None:
    saved = tensors_of(unbroken(runs, name).checkpoint(5))
    state = {key: tensor for key, tensor in saved.items() if key.startswith("optimizer.state.")}
    assert {key: tuple(tensor.shape) for key, tensor in state.items()} == expected_slots(INPUTS[name][0])
    for key, tensor in state.items():
        assert tensor.dtype == torch.float32, key
        assert tensor == 5 if key.endswith(".step") else tensor.norm() > 0, key


@pytest.mark.parametrize("name", INPUTS)
def test_b04_a_resumed_run_is_the_uninterrupted_one(name: str, runs: Runs) -> None:
    """Losses and norms bit for bit, and so is all that the last checkpoint holds."""
    expected = unbroken(runs, name)
    runs.copied(expected, f"{name}-resumed", 5)
    resumed = continued(runs, name, f"{name}-resumed")
    assert sorted(resumed.steps) == [6, 7, 8, 9, 10]
    assert resumed.steps == {step: figures for step, figures in expected.steps.items() if step > 5}
    before, at_end, after = (
        tensors_of(run.checkpoint(step)) for run, step in ((expected, 5), (expected, 10), (resumed, 10))
    )
    assert at_end.keys() == after.keys()
    for key, tensor in at_end.items():
        assert torch.equal(after[key], tensor), key
        if key.startswith(("model.", "optimizer.state.")):
            assert not torch.equal(before[key], tensor), f"{key} stood still"


@pytest.mark.parametrize(
    ("name", "slot"),
    [("muon-shard", "layers.3.attention.wk.weight.momentum_buffer"), ("adamw-shard", "output.weight.exp_avg_sq")],
)
def test_b04_without_one_slot_the_run_is_another(name: str, slot: str, runs: Runs) -> None:
    """The control: were a slot lost, the comparison above would see it."""
    expected = unbroken(runs, name)
    copy = f"{name}-lost"
    runs.copied(expected, copy, 5)
    parameter, _, kind = slot.rpartition(".")

    def forget(state: dict[str, Any]) -> None:
        state["optimizer"]["state"][parameter][kind].zero_()

    edit(runs.folder / copy / "checkpoint" / "step-5", forget)
    lost = continued(runs, name, copy)
    assert lost.steps[6] == expected.steps[6], "forward and backward of the next step need no state"
    for step in (7, 8, 9, 10):
        assert lost.steps[step] != expected.steps[step]


def rates(run: Run) -> dict[int, float]:
    records = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    return {record["step"]: record["lr"] for record in records}


def test_a_schedule_that_is_begun_anew_is_so_once(runs: Runs) -> None:
    """It counts from the step where the run begins without it and spans what is left; restarts go on with it."""
    optimizer, mesh, _ = INPUTS["muon-one-rank"]
    runs.copied(unbroken(runs, "muon-one-rank"), "anew", 5)
    flags = (
        "--optimizer.name",
        optimizer,
        "--checkpoint.interval=1",
        '--checkpoint.exclude_from_loading=["lr_scheduler"]',
    )
    first = runs.run("anew", mesh, *flags)
    assert "not loaded from step-5: lr_scheduler" in first.ended.stdout
    schedule = build_schedule(LRScheduler(warmup_steps=2), 5)
    expected = {step: 3e-3 * schedule(step - 5) for step in range(6, 11)}
    assert rates(first) == expected
    assert expected[6] < expected[7] > expected[10]
    for step in (9, 10):
        shutil.rmtree(first.checkpoint(step))
    again = runs.again("anew", mesh, *flags)
    assert "continuing after step 8" in again.ended.stdout
    assert rates(again) == expected
    assert again.steps == first.steps
