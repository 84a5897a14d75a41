"""The same global batch on any number of ranks is the same training, and its figures are what their names say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from models.llama.sizes import FLAVORS
from tests.blackbox.conftest import StartJob
from tests.debruijn import debruijn_tokens, write_tokens

NUM_STEPS, SEQ_LEN, GLOBAL_BATCH = 20, 32, 8
CONFIG = f"""
[training]
dataset_path = "data"
local_batch_size = 2
global_batch_size = {GLOBAL_BATCH}
seq_len = {SEQ_LEN}
steps = {NUM_STEPS}
mixed_precision_param = "float32"
[optimizer]
lr = 1e-3
[lr_scheduler]
warmup_steps = 2
[validation]
enable = true
freq = 10
[metrics]
log_freq = 1
"""


def records(run: Path) -> tuple[list[dict[str, Any]], dict[int, float]]:
    """Logged steps, and the loss of each validation."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    validations = {line["step"]: line["validation_metrics/loss"] for line in lines if "validation_metrics/loss" in line}
    return [line for line in lines if "grad_norm" in line], validations


@pytest.mark.parametrize("optimizer", ["Muon", "AdamW"])
def test_one_two_and_four_ranks_agree(optimizer: str, tmp_path: Path, start: StartJob) -> None:
    write_tokens(tmp_path / "data", debruijn_tokens(), vocab_size=256, validation_tokens=1 + 17 * SEQ_LEN)
    (tmp_path / "job.toml").write_text(CONFIG)
    found = {}
    for num_ranks in (1, 2, 4) if optimizer == "Muon" else (1, 2):
        run = tmp_path / f"run-{num_ranks}"
        job = start(
            *("--config", str(tmp_path / "job.toml"), "--job.dump_folder", str(run), "--optimizer.name", optimizer),
            NPROC_PER_NODE=str(num_ranks),
        )
        ended = job.end()
        assert ended.status == 0, ended.stderr
        assert f"{FLAVORS['llama3']['debugmodel'].num_parameters():,} parameters" in ended.stdout
        found[num_ranks] = records(run)
    steps, validations = found.pop(1)
    assert [step["step"] for step in steps] == list(range(1, NUM_STEPS + 1))
    assert sorted(validations) == [10, 20]
    for step in steps:
        assert step["n_tokens_seen"] == step["step"] * GLOBAL_BATCH * SEQ_LEN
        assert not any("mfu" in name for name in step)
    for other_steps, other_validations in found.values():
        assert other_validations == pytest.approx(validations, abs=1e-4)
        for step, other in zip(steps, other_steps, strict=True):
            for name in ("loss_metrics/global_avg_loss", "grad_norm"):
                assert other[name] == pytest.approx(step[name], rel=1e-4), (name, step["step"])
            assert other["n_tokens_seen"] == step["n_tokens_seen"]
