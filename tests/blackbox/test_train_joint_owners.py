"""Joint owners, from outside: the same training as with one owner each, and the same bits after a restart."""

from __future__ import annotations

import math

import pytest
import torch

from models.llama.sizes import LlamaSize
from tests.blackbox.runs import Run, Runs, copy_with_sizes
from tests.blackbox.test_train_resume import tensors_of

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

NUM_STEPS, SAVED = 4, 2
# Three matrices that cost twenty times what the others do: four ranks share each.
LONG = LlamaSize(32, 1, 4, 1, 257, 24.0, 64, 10000.0)
CONFIG = f"""
[model]
flavor = "long"
[training]
dataset_path = "data"
seq_len = 64
steps = {NUM_STEPS}
local_batch_size = 1
mixed_precision_param = "float32"
[optimizer]
lr = 1e-2
eps = 1e-5
[lr_scheduler]
warmup_steps = 1
[checkpoint]
enable = true
interval = {SAVED}
[metrics]
log_freq = 1
"""
JOINT = ("--optimizer.max_joint_owners", "4")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """In a copy where sums cost nothing: for matrices this small they would outweigh what is shared."""
    program = copy_with_sizes(tmp_path_factory.mktemp("copy"), {"long": LONG})
    with (program.parent / "dmuon" / "joint_assignment.py").open("a") as module:
        module.write("\nSUM_FLOPS = LATENCY_FLOPS = 0\n")
    return Runs(tmp_path_factory.mktemp("joint"), CONFIG, program)


def assert_same_tensors(run: Run, expected: Run, tolerance: float) -> None:
    saved = tensors_of(expected.checkpoint(NUM_STEPS))
    got = tensors_of(run.checkpoint(NUM_STEPS))
    assert got.keys() == saved.keys()
    for name, tensor in saved.items():
        if tolerance and tensor.is_floating_point():
            assert (got[name] - tensor).norm() <= tolerance * tensor.norm(), name
        else:
            assert torch.equal(got[name], tensor), name


def test_joint_owners_train_as_one_owner_each_does(runs: Runs) -> None:
    joint, single = runs.run("joint", (1, 4), *JOINT), runs.run("single", (1, 4))
    assert "7 matrices by Muon (3 with joint owners)" in joint.ended.stdout
    assert "7 matrices by Muon, " in single.ended.stdout
    assert joint.steps.keys() == single.steps.keys() == set(range(1, NUM_STEPS + 1))
    for step, figures in single.steps.items():
        assert joint.steps[step] == pytest.approx(figures, rel=1e-5), f"step {step}"
    assert all(math.isfinite(loss) for loss, _ in joint.steps.values())
    assert_same_tensors(joint, single, 5e-5)


@pytest.mark.parametrize("flags", [JOINT, ()], ids=["joint owners", "one owner each"])
def test_a_restart_takes_up_what_joint_owners_saved(runs: Runs, flags: tuple[str, ...]) -> None:
    whole = runs.run("joint", (1, 4), *JOINT)
    name = "continued with joint owners" if flags else "continued with one owner each"
    runs.copied(whole, name, SAVED)
    run = runs.run(name, (1, 4), *flags)
    assert run.steps.keys() == {3, 4}
    if flags:
        assert run.steps == {step: whole.steps[step] for step in run.steps}
    assert_same_tensors(run, whole, 0 if flags else 5e-5)


def test_tensor_parallelism_excludes_them(runs: Runs) -> None:
    run = runs.run("refused", (1, 1, 2), *JOINT, status=2)
    assert "optimizer.max_joint_owners = 4: must be 1 with tensor parallelism" in run.ended.stderr
