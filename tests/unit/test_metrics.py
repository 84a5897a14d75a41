"""What metrics.jsonl holds: right names and figures, nothing twice after a restart, no MFU where none is known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dmuon_titan.config.schema import build
from dmuon_titan.console import StatusLine
from dmuon_titan.metrics import Metrics, StepFigures, peak_flops
from dmuon_titan.records import JsonLines, TensorBoard, forget_after, owes_validation


def logged(folder: Path, *, ranks_per_batch: int = 1) -> dict[str, float]:
    """The line of a first step of 1,000 tokens."""
    config = build({"job.dump_folder": str(folder)})
    metrics = Metrics(
        config,
        torch.device("cpu"),
        rank=0,
        flops_per_token=10**9,
        ranks_per_batch=ranks_per_batch,
        start_step=0,
        status_line=StatusLine(),
    )
    metrics.count(1000)
    metrics.log(1, StepFigures(2.0, 2.5, 0.1, (1e-3, 1e-4), epoch=0), tokens_seen=4000)
    metrics.close()
    return json.loads((folder / "metrics.jsonl").read_text())


def test_names_and_figures(tmp_path):
    line = logged(tmp_path)
    assert line["step"] == 1
    assert line["loss_metrics/global_avg_loss"] == 2.0
    assert line["loss_metrics/global_max_loss"] == 2.5
    assert (line["grad_norm"], line["n_tokens_seen"], line["lr"], line["lr/adamw"]) == (0.1, 4000, 1e-3, 1e-4)
    assert line["tflops"] == pytest.approx(line["throughput(tps)"] / 1000)
    assert line["throughput(tps)"] == pytest.approx(1000 / line["time_metrics/end_to_end(s)"])
    assert {"time_metrics/data_loading(s)", "epoch"} <= line.keys()


def test_there_is_no_mfu_on_a_cpu(tmp_path, capsys):
    assert not any("mfu" in name for name in logged(tmp_path))
    assert "mfu" not in capsys.readouterr().out


def test_only_known_devices_have_a_peak():
    assert peak_flops("NVIDIA H200") == 989e12
    assert peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert peak_flops("NVIDIA A100-SXM4-80GB") == 312e12
    assert peak_flops("NVIDIA GeForce RTX 4090") is None


def test_a_run_that_goes_on_drops_what_comes_after_and_half_a_line(tmp_path):
    (tmp_path / "trace").mkdir()
    for path in (tmp_path / "metrics.jsonl", tmp_path / "trace" / "rank-0.jsonl"):
        path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')
    forget_after(tmp_path, 2)
    for path in (tmp_path / "metrics.jsonl", tmp_path / "trace" / "rank-0.jsonl"):
        assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


@pytest.mark.parametrize("torn", [b'{"step": 2, "x\xff\n', b"\0" * 64, b"{}\n", b"[1]\n", b"7\n", b'{"step": null}\n'])
def test_no_torn_line_stands_against_going_on(torn: bytes, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + torn + b'{"step": 2}')
    forget_after(tmp_path, 2)
    kept = path.read_bytes()
    assert kept.startswith(b'{"step": 1}\n')
    assert kept.removeprefix(b'{"step": 1}\n') == (b'{"step": 2}\n' if torn.endswith(b"\n") else b"")


def test_tensorboard_reads_what_is_written_and_forgets_what_a_restart_makes_anew(tmp_path: Path) -> None:
    for start_step, last in ((0, 5), (3, 4)):
        writer = TensorBoard(tmp_path, start_step)
        for step in range(start_step + 1, last + 1):
            writer.write(step, {"grad_norm": 10 * start_step + step, "lr": 0.5})
        writer.close()
        writer.path.rename(tmp_path / f"events.out.tfevents.{start_step}")  # both were made within a second
    events = EventAccumulator(str(tmp_path)).Reload()
    assert sorted(events.Tags()["scalars"]) == ["grad_norm", "lr"]
    assert [(e.step, e.value) for e in events.Scalars("grad_norm")] == [(1, 1), (2, 2), (3, 3), (4, 34)]


def test_a_validation_is_owed_where_the_step_has_none(tmp_path: Path) -> None:
    assert not owes_validation(tmp_path, 2)
    records = JsonLines(tmp_path / "metrics.jsonl")
    for step in (1, 2):
        records.write(step, {"grad_norm": 1.0})
        assert owes_validation(tmp_path, step)
        records.write(step, {"validation_metrics/loss": 1.0})
        assert not owes_validation(tmp_path, step)
    assert owes_validation(tmp_path, 3)  # which was not logged
    records.close()
