"""B07: an embedding that is the output head as well stays one matrix, on any mesh and through a checkpoint."""

from __future__ import annotations

import math

import pytest
from torch.distributed.checkpoint import FileSystemReader

from models.llama.sizes import LlamaSize
from tests.blackbox.runs import Run, Runs, copy_with_sizes

NUM_STEPS, SEQ_LEN = 5, 32
SIZE = LlamaSize(64, 2, 4, 2, 256, None, 16, 10000.0, tie_embeddings=True)
CONFIG = f"""
[model]
flavor = "tied"
[training]
dataset_path = "data"
local_batch_size = 2
global_batch_size = 4
seq_len = {SEQ_LEN}
steps = {NUM_STEPS}
mixed_precision_param = "float32"
[optimizer]
lr = 1e-3
[lr_scheduler]
warmup_steps = 2
[checkpoint]
enable = true
interval = 3
[metrics]
log_freq = 1
"""
MESHES = {"shard": (1, 2), "replicate": (2, 1), "tp": (1, 1, 2)}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    program = copy_with_sizes(tmp_path_factory.mktemp("copy"), {"tied": SIZE})
    return Runs(tmp_path_factory.mktemp("runs"), CONFIG, program)


def names_in(run: Run, step: int) -> list[str]:
    return sorted(FileSystemReader(run.checkpoint(step)).read_metadata().state_dict_metadata)


@pytest.mark.parametrize("mesh", MESHES)
def test_b07_one_matrix_is_counted_saved_and_trained_once(mesh: str, runs: Runs) -> None:
    """Trained apart, the two would give another loss from the second step on than one process has."""
    run, alone = runs.run(mesh, MESHES[mesh]), runs.run("alone", (1, 1))
    assert f"{sum(map(math.prod, SIZE.parameter_shapes().values())):,} parameters" in run.ended.stdout
    weights = [name for name in names_in(run, NUM_STEPS) if "tok_embeddings" in name or "output.weight" in name]
    assert [name for name in weights if name.startswith("model.")] == ["model.tok_embeddings.weight"]
    for step, figures in alone.steps.items():
        assert run.steps[step] == pytest.approx(figures, rel=1e-5), step


@pytest.mark.parametrize("mesh", ["shard", "tp"])
def test_b07_a_resumed_loss_is_the_same_bit_for_bit(mesh: str, runs: Runs) -> None:
    run = runs.run(mesh, MESHES[mesh])
    runs.copied(run, f"{mesh}-resumed", 3)
    resumed = runs.run(f"{mesh}-resumed", MESHES[mesh])
    assert resumed.steps == {step: figures for step, figures in run.steps.items() if step > 3}
    assert len(resumed.steps) == 2
