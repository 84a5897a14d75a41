"""Steps that are not finite (B21): none is applied, none is saved, and the newest checkpoint is a sound one.

Muon on a sharded mesh at lr = 1e30 is in test_train_resume.py. What starts from nothing has finite weights: only from a
checkpoint that was edited can the first step of a start break.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.blackbox.runs import Run, Runs, edit
from tests.blackbox.test_train_resume import tensors_of

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

CONFIG = """
[training]
dataset_path = "data"
local_batch_size = 2
global_batch_size = 4
seq_len = 32
steps = 6
mixed_precision_param = "float32"
[optimizer]
lr = 1e-3
[lr_scheduler]
warmup_steps = 1
[checkpoint]
enable = true
interval = 1
keep_latest_k = 2
[metrics]
log_freq = 1
"""
State = dict[str, Any]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"), CONFIG)


def sound(runs: Runs, optimizer: str) -> Run:
    """A run of 3 steps, whose last two are kept."""
    return runs.run(f"sound-{optimizer}", (1, 2), "--optimizer.name", optimizer, "--training.steps", "3")


def the_error(run: Run) -> str:
    """All ranks leave together, and one line tells why."""
    (line,) = [line for line in run.ended.stderr.splitlines() if "error:" in line]
    assert not any("Traceback" in line or "stopped after" in line for line in run.ended.stderr.splitlines())
    return line.partition("error: ")[2]


def check_sound(run: Run, source: Run, *steps: int) -> None:
    """The checkpoints of `source`, bit for bit, are those that count, and all that they hold is finite."""
    assert run.published() == [f"step-{step}" for step in steps]
    for step in steps:
        expected = tensors_of(source.checkpoint(step))
        for name, tensor in tensors_of(run.checkpoint(step)).items():
            assert torch.equal(tensor, expected[name]), name
            assert tensor.isfinite().all(), name


def test_b21_a_fresh_run_that_breaks_at_once_leaves_no_checkpoint(runs: Runs) -> None:
    run = runs.run("fresh", (1, 2), "--optimizer.lr", "1e30", status=5)
    error = the_error(run)
    assert error.startswith("step 2: loss ")
    assert "gradient norm nan; nothing of this step was applied" in error
    assert error.endswith("it starts from the beginning, for there is no checkpoint yet")
    assert sorted(run.steps) == [1]
    assert run.published() == []
    sane = runs.again("fresh", (1, 2), "--training.steps", "3")
    assert sane.published() == ["step-2", "step-3"]
    expected = tensors_of(sound(runs, "Muon").checkpoint(3))
    for name, tensor in tensors_of(sane.checkpoint(3)).items():
        assert torch.equal(tensor, expected[name]), f"{name} remembers the run that broke"


@dataclass(frozen=True)
class Breaking:
    """A run that continues from a sound one: `first_step` ruins the weights, the next one's gradient is NaN."""

    mesh: tuple[int, int]
    optimizer: str
    flags: tuple[str, ...]
    first_step: int = 4
    loss_is_finite: bool = True


BREAKING = {
    # Where squares overflow in RMSNorm (1e30) the loss is finite all the same; just below that (1e17) it is NaN.
    "loss-nan-replicate": Breaking((2, 1), "Muon", ("--optimizer.lr", "1e17"), loss_is_finite=False),
    "adamw": Breaking((1, 2), "AdamW", ("--optimizer.lr", "1e30")),
    "bf16-one-rank": Breaking((1, 1), "Muon", ("--optimizer.lr", "1e30", "--training.mixed_precision_param=bfloat16")),
    "not-due": Breaking(
        (1, 2), "Muon", ("--optimizer.lr", "1e30", "--checkpoint.interval=2", "--checkpoint.load_step=2"), first_step=3
    ),
}


@pytest.mark.parametrize("name", BREAKING)
def test_b21_a_run_that_breaks_keeps_its_sound_checkpoints(name: str, runs: Runs) -> None:
    """The first step ruins the weights and the second sees it: neither may count."""
    case = BREAKING[name]
    source = sound(runs, case.optimizer)
    runs.copied(source, name, 2, 3)
    flags = ("--optimizer.name", case.optimizer, *case.flags)
    run = runs.run(name, case.mesh, *flags, status=5)
    found = re.match(r"step (\d+): loss (.+), gradient norm nan; nothing of this step was applied", the_error(run))
    assert found, run.ended.stderr
    assert int(found[1]) == case.first_step + 1
    assert math.isfinite(float(found[2])) == case.loss_is_finite
    assert sorted(run.steps) == [case.first_step]
    check_sound(run, source, 2, 3)

    sane = runs.again(
        name, case.mesh, *flags, "--optimizer.lr", "1e-3", "--checkpoint.load_step=-1", "--training.steps", "4"
    )
    assert "continuing after step 3" in sane.ended.stdout
    assert sane.published() == ["step-3", "step-4"]
    assert all(tensor.isfinite().all() for tensor in tensors_of(sane.checkpoint(4)).values())


def explode_in_backward(state: State) -> None:
    """The last norm's weights are tiny and the head's huge: logits are finite, the gradient of the former is not."""
    model = state["model"]
    for name, weight in model.items():
        if name.endswith(("attention.wo.weight", "feed_forward.w2.weight")):
            weight.zero_()
    model["tok_embeddings.weight"].fill_(1.0)
    model["norm.weight"].fill_(2e-38)
    model["output.weight"].fill_(-3e38)[0] = 3e38


def explode_in_the_update(state: State) -> None:
    """A row of the embedding that no token asks for: weight decay takes it beyond float32, and no loss will tell."""
    state["model"]["tok_embeddings.weight"][2000] = 3e38


@pytest.mark.parametrize(
    ("change", "flags", "said"),
    [
        (explode_in_backward, (), r"step 4: loss \d+\.\d+, gradient norm inf; nothing of this step was applied"),
        (
            explode_in_the_update,
            ("--optimizer.weight_decay=1e6",),
            "step 4 made a .* first model.tok_embeddings.weight",
        ),
    ],
    ids=["backward", "update"],
)
def test_b21_the_first_step_of_a_start_breaks(
    change: Callable[[State], None], flags: tuple[str, ...], said: str, runs: Runs
) -> None:
    """From a checkpoint of finite values, such as a program without these checks leaves behind."""
    name, source = change.__name__, sound(runs, "Muon")
    runs.copied(source, name, 2, 3)
    edit(runs.folder / name / "checkpoint" / "step-3", change)
    before = tensors_of(runs.folder / name / "checkpoint" / "step-3")
    assert all(tensor.isfinite().all() for tensor in before.values())
    run = runs.run(name, (1, 2), *flags, status=5)
    assert re.match(said, the_error(run)), run.ended.stderr
    assert run.published() == ["step-2", "step-3"]
    for key, tensor in tensors_of(run.checkpoint(3)).items():
        assert torch.equal(tensor, before[key]), key
    sane = runs.again(name, (1, 2), "--checkpoint.load_step", "2", "--training.steps", "4")
    assert "continuing after step 2" in sane.ended.stdout
    assert sane.published() == ["step-2", "step-3", "step-4"]  # the one resumed from stays
    assert all(tensor.isfinite().all() for tensor in tensors_of(sane.checkpoint(4)).values())


@pytest.mark.parametrize(
    ("key", "value"),
    [("lr", "1e31"), ("adamw_lr", "1e39"), ("weight_decay", "1e7"), ("adamw_weight_decay", "1e38"), ("eps", "1e38")],
)
def test_b21_what_no_float32_can_hold_is_refused(key: str, value: str, refused: Callable[..., list[str]]) -> None:
    """Beyond these torch fails in the first step, with an error that names no key."""
    (line,) = refused(f"--optimizer.{key}={value}")
    assert line.startswith(f"optimizer.{key} = {value} (on the command line): out of range; legal: number, ")
    assert "at most" in line
