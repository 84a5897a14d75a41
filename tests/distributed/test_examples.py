"""The examples run as a person runs them: torchrun, two gloo ranks; what they save loads without any of it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn

ROOT = Path(__file__).parents[2]
LOSS = re.compile(r"^step (\d+)  loss (\S+)  grad_norm (\S+)$", re.MULTILINE)


def run(example: str, num_steps: int, checkpoint: Path) -> list[float]:
    """The losses that two ranks of an example printed; its exit status must be 0."""
    command = ["-m", "torch.distributed.run", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    script = [f"examples/{example}.py", "--steps", str(num_steps), "--checkpoint", str(checkpoint)]
    done = subprocess.run(
        [sys.executable, *command, "--nproc-per-node", "2", *script],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [float(loss) for _, loss, _ in LOSS.findall(done.stdout)]
    assert losses, done.stdout
    assert "(0, 1)" in done.stdout, "the plan was not printed"
    return losses


def load(model: nn.Module, checkpoint: Path) -> None:
    """Plain torch, one process: the names in the file are the model's own, each tensor is whole."""
    saved = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    assert {name for name in saved if name.startswith("model.")} == {f"model.{name}" for name in model.state_dict()}
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    dcp.load({"model": model.state_dict()}, checkpoint_id=checkpoint)
    for name, tensor in model.state_dict().items():
        assert not torch.equal(tensor, before[name]), name


@torch.no_grad()
def test_plain_module(tmp_path: Path) -> None:
    losses = run("plain_module", 40, tmp_path)
    assert losses[-1] < 0.7 * losses[0]

    from examples.plain_module import Classifier, batch

    model, (points, labels) = Classifier(), batch(step=999, rank=0, size=512)
    load(model, tmp_path)
    assert F.cross_entropy(model(points), labels) < 0.7 * losses[0]


@pytest.mark.hf
@torch.no_grad()
def test_hf_llama(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    losses = run("hf_llama", 30, tmp_path)
    assert losses[-1] < 0.1 * losses[0]

    from examples.hf_llama import batch, build_model

    model, tokens = build_model(), batch(step=999, rank=0)
    load(model, tmp_path)
    loss: Tensor = model(input_ids=tokens, labels=tokens).loss
    assert loss < 0.1 * losses[0]
