"""B06 from outside: what a bfloat16 run learned leaves for transformers in full precision, and starts another run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dmuon_titan.tools.convert import main
from models.llama.model import Llama
from models.llama.sizes import LlamaSize, RopeScaling
from tests.blackbox.job import REPOSITORY
from tests.blackbox.runs import Run, Runs, copy_with_sizes
from tests.unit.hugging_face import read_checkpoint, read_folder

SCALING = RopeScaling(factor=8.0, original_max_position=32)
SIZE = LlamaSize(64, 2, 4, 2, 256, None, 16, 10000.0, max_seq_len=64, rope_scaling=SCALING)
NUM_STEPS = 2
CONFIG = f"""
[model]
flavor = "tiny"
[training]
dataset_path = "data"
local_batch_size = 2
global_batch_size = 4
seq_len = 32
steps = {NUM_STEPS}
mixed_precision_param = "bfloat16"
[optimizer]
lr = 1e-2
[lr_scheduler]
warmup_steps = 1
[checkpoint]
enable = true
[metrics]
log_freq = 1
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    program = copy_with_sizes(tmp_path_factory.mktemp("copy"), {"tiny": SIZE})
    return Runs(tmp_path_factory.mktemp("runs"), CONFIG, program)


@pytest.fixture(scope="module")
def trained(runs: Runs) -> Run:
    return runs.run("trained", (1, 2))


@pytest.fixture(scope="module")
def exported(trained: Run) -> Path:
    folder = trained.folder / "hf"
    command = [sys.executable, "-m", "dmuon_titan.tools.convert", "to-hf", trained.checkpoint(NUM_STEPS), folder]
    subprocess.run([*command, "--max-file-size", "100KB"], cwd=REPOSITORY, check=True)
    return folder


def test_b06_masters_leave_in_full_precision(exported: Path) -> None:
    tensors = read_folder(exported)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    assert json.loads((exported / "config.json").read_text())["torch_dtype"] == "float32"
    matrices = [tensor for tensor in tensors.values() if tensor.ndim == 2]
    assert not any(torch.equal(tensor, tensor.bfloat16().float()) for tensor in matrices)


@pytest.mark.hf
def test_b06_transformers_computes_the_same_logits(exported: Path, trained: Run) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.LlamaForCausalLM.from_pretrained(exported)
    ours = Llama(SIZE, 64)
    ours.load_state_dict(read_checkpoint(trained.checkpoint(NUM_STEPS), SIZE))
    ids = torch.randint(256, (1, 64), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert (theirs(ids).logits - ours(ids)).abs().max() <= 1e-5


def test_b06_there_and_back_and_on(exported: Path, trained: Run, runs: Runs) -> None:
    """The same files return bit for bit, and training from them goes as from the checkpoint itself."""
    imported, returned = exported.with_name("step-0"), exported.with_name("returned")
    assert main(["from-hf", str(exported), str(imported)]) == 0
    assert main(["to-hf", str(imported), str(returned), "--max-file-size", "100KB"]) == 0
    contents = [{path.name: path.read_bytes() for path in folder.iterdir()} for folder in (exported, returned)]
    assert len(contents[0]) > 4
    assert contents[0] == contents[1]
    start = "--checkpoint.initial_load_path"
    run = runs.run("from weights", (1, 1), start, str(imported))
    folder = runs.run("from folder", (1, 1), start, str(exported), "--checkpoint.initial_load_in_hf", "true")
    assert folder.steps == run.steps != trained.steps
    assert folder.steps[1][0] < trained.steps[1][0]


def test_the_last_weights_are_saved_as_such_a_folder(trained: Run, runs: Runs) -> None:
    """It is what the tool would have made, and says so; the run's earlier checkpoint stays for going on."""
    dtype = "bfloat16"
    flags = ("--checkpoint.last_save_model_only", "--checkpoint.last_save_in_hf", "--checkpoint.export_dtype", dtype)
    run = runs.run("last", (1, 2), *flags, "--checkpoint.interval", "1")
    assert run.published() == ["step-1", "step-2"]
    folder, expected = run.checkpoint(NUM_STEPS), run.folder / "expected"
    assert main(["to-hf", str(trained.checkpoint(NUM_STEPS)), str(expected), "--dtype", dtype]) == 0
    names = {path.name for path in folder.iterdir()}
    assert (
        names
        == {"manifest.json", "config.json", "model.safetensors"}
        == {*names, *(p.name for p in expected.iterdir())}
    )
    for name in ("config.json", "model.safetensors"):
        assert (folder / name).read_bytes() == (expected / name).read_bytes()
    finished = runs.again("last", (1, 2), *flags)
    assert "holds weights only: the run goes on from an older checkpoint" in finished.ended.stdout
    further = runs.again("last", (1, 2), "--training.steps", "3")
    assert "continuing after step 1" in further.ended.stdout
    start = ("--checkpoint.initial_load_path", str(folder))
    assert "initial_load_in_hf = true" in runs.run("refused", (1, 1), *start, status=4).ended.stderr
