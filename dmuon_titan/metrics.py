"""Figures of the training: console lines, metrics.jsonl and TensorBoard, all written by rank 0.

Names are TorchTitan v0.2.2's. Throughput is per device, FLOPs are the model's own (recomputation not counted).
"""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from dmuon_titan.config.schema import JobConfig
from dmuon_titan.console import StatusLine, logger, progress_text
from dmuon_titan.errors import CheckpointError
from dmuon_titan.records import VALIDATION_LOSS, JsonLines, TensorBoard, owes_validation

GIB = 1 << 30
# Dense bf16 FLOP/s. The first name found in the device's name counts; an unknown device has no MFU.
_PEAK_FLOPS = {
    "A100": 312e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200": 989e12,
    "B200": 2.25e15,
}


def peak_flops(device_name: str) -> float | None:
    """Dense bf16 FLOP/s of a GPU by its name, or None if it isn't known."""
    return next((peak for name, peak in _PEAK_FLOPS.items() if name in device_name), None)


@dataclass(frozen=True)
class StepFigures:
    """What a step found out. loss: the mean over all valid tokens of the step; max_loss: the largest mean of a rank."""

    loss: float
    max_loss: float
    grad_norm: float
    learning_rates: tuple[float, ...]
    epoch: int


class Metrics:
    """Counts tokens and time between logged steps and writes what became of them. All ranks have one, rank 0 writes.

    owes_validation: on rank 0, whether the step that the run continues from has no validation in its records.
    """

    def __init__(
        self,
        config: JobConfig,
        device: torch.device,
        *,
        rank: int,
        flops_per_token: int,
        ranks_per_batch: int,
        start_step: int,
        status_line: StatusLine,
    ) -> None:
        """`ranks_per_batch`: ranks that work on the same tokens (the tp degree)."""
        self.device = device
        self.flops_per_token = flops_per_token
        self.ranks_per_batch = ranks_per_batch
        self.log_freq = config.metrics.log_freq
        self.num_steps = config.training.steps
        self.start_step = start_step
        self.status_line = status_line
        self.peak_flops = peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
        self.colour = sys.stdout.isatty() and not config.metrics.disable_color_printing
        self._lines: JsonLines | None = None
        self._tensorboard: TensorBoard | None = None
        self.owes_validation = False
        if rank == 0:
            dump_folder, tb_folder = Path(config.job.dump_folder), Path(config.metrics.save_tb_folder)
            self.owes_validation = start_step > 0 and owes_validation(dump_folder, start_step)
            self._lines = JsonLines(dump_folder / "metrics.jsonl")
            if config.metrics.enable_tensorboard:
                with self._without_tensorboard(tb_folder):
                    self._tensorboard = TensorBoard(tb_folder, start_step)
        self._losses: dict[int, float] = {}
        self._begin_s = time.monotonic()
        self._reset()

    def should_log(self, step: int) -> bool:
        return step == 1 or step % self.log_freq == 0 or step == self.num_steps

    @contextmanager
    def data_loading(self) -> Iterator[None]:
        """Time spent inside counts as waiting for data."""
        begin_s = time.perf_counter()
        yield
        self._data_loading_s += time.perf_counter() - begin_s

    def count(self, num_tokens: int) -> None:
        """Adds tokens that this rank trained on."""
        self._num_tokens += num_tokens

    def progress(self, step: int, loss: float) -> None:
        """Updates the line at the bottom of a terminal."""
        if self.status_line.enabled:
            elapsed_s = time.monotonic() - self._begin_s
            self.status_line.show(
                progress_text(step, self.num_steps, elapsed_s, step - self.start_step, f"  loss {loss:.4f}")
            )

    def log(self, step: int, figures: StepFigures, tokens_seen: int) -> None:
        """Writes a logged step everywhere and starts counting anew."""
        self._losses[step] = figures.loss
        elapsed_s = time.perf_counter() - self._since_s
        num_steps = step - self._since_step
        tps = self._num_tokens / elapsed_s / self.ranks_per_batch
        flops = tps * self.flops_per_token
        memory, memory_share = self._memory()
        values = {
            "loss_metrics/global_avg_loss": figures.loss,
            "loss_metrics/global_max_loss": figures.max_loss,
            "grad_norm": figures.grad_norm,
            "throughput(tps)": tps,
            "tflops": flops / 1e12,
            "time_metrics/end_to_end(s)": elapsed_s / num_steps,
            "time_metrics/data_loading(s)": self._data_loading_s / num_steps,
            "time_metrics/data_loading(%)": 100 * self._data_loading_s / elapsed_s,
            **memory,
            "n_tokens_seen": tokens_seen,
            "epoch": figures.epoch,
            "lr": figures.learning_rates[0],
        }
        if len(set(figures.learning_rates)) > 1:
            values["lr/adamw"] = figures.learning_rates[1]
        if self.peak_flops is not None:
            values["mfu(%)"] = 100 * flops / self.peak_flops
        self._write(step, values)
        fields = [
            ("red", f"step: {step:2}"),
            ("green", f"loss: {figures.loss:7.4f}"),
            ("yellow", f"grad_norm: {figures.grad_norm:7.4f}"),
            ("blue", f"memory: {max(memory.values()):5.2f}GiB{memory_share}"),
            ("cyan", f"tps: {round(tps):,}"),
            ("magenta", f"tflops: {flops / 1e12:,.2f}"),
        ]
        if self.peak_flops is not None:
            fields.append(("white", f"mfu: {values['mfu(%)']:.2f}%"))
        logger.info("  ".join(self._painted(colour, text) for colour, text in fields))
        self._reset(step)

    def log_validation(self, step: int, loss: float) -> None:
        """Writes the loss on held-out text; the time it took doesn't count as the steps'."""
        self._write(step, {VALIDATION_LOSS: loss})
        text = f"validate step: {step:2}  loss: {loss:7.4f}  perplexity: {math.exp(min(loss, 100)):.2f}"
        logger.info(self._painted("green", text))

    def log_summary(self) -> None:
        """What the steps of this start came to; nothing if there were none."""
        if self._losses:
            first, last = min(self._losses), max(self._losses)
            logger.info(
                f"trained in {time.monotonic() - self._begin_s:.0f} s: loss {self._losses[first]:.4f} at step {first}, "
                f"{self._losses[last]:.4f} at step {last}"
            )

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time spent inside is not training time."""
        begin_s = time.perf_counter()
        yield
        self._since_s += time.perf_counter() - begin_s

    def close(self) -> None:
        self.status_line.close()
        for writer in (self._lines, self._tensorboard):
            if writer is not None:
                with suppress(OSError):  # of a record that could not be written
                    writer.close()

    def _reset(self, step: int | None = None) -> None:
        self._num_tokens = 0
        self._data_loading_s = 0.0
        self._since_s = time.perf_counter()
        self._since_step = self.start_step if step is None else step
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def _write(self, step: int, values: dict[str, float]) -> None:
        if self._lines is not None:
            try:
                self._lines.write(step, values)
            except OSError as error:
                raise CheckpointError(
                    f"step {step} can't be recorded in job.dump_folder: {error.strerror}; make room, then the same "
                    "command goes on from the newest checkpoint"
                ) from None
        if self._tensorboard is not None:
            with self._without_tensorboard(self._tensorboard.path):
                self._tensorboard.write(step, values)

    @contextmanager
    def _without_tensorboard(self, path: Path) -> Iterator[None]:
        """Goes on without TensorBoard from where it can't be written: metrics.jsonl has the same."""
        try:
            yield
        except OSError as error:
            self._tensorboard = None
            logger.warning(
                f"{path} can't be written ({error.strerror}): training goes on without TensorBoard, metrics.jsonl has "
                "the same figures; make room, or name another metrics.save_tb_folder, before the next start"
            )

    def _memory(self) -> tuple[dict[str, float], str]:
        """Metrics in GiB of the peak since the last logged step, and the larger one's share of the device as text."""
        if self.device.type == "cuda":
            reserved = torch.cuda.max_memory_reserved(self.device)
            allocated = torch.cuda.max_memory_allocated(self.device)
            total = torch.cuda.get_device_properties(self.device).total_memory
            peaks = {"memory/max_reserved(GiB)": reserved / GIB, "memory/max_allocated(GiB)": allocated / GIB}
            return peaks, f"({100 * reserved / total:.2f}%)"
        # Linux counts in KiB, macOS in bytes; of a process, it is the peak since its start.
        unit = 1 if sys.platform == "darwin" else 1024
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        return {"memory/max_resident(GiB)": resident / GIB}, ""

    def _painted(self, colour: str, text: str) -> str:
        if not self.colour:
            return text
        number = ("red", "green", "yellow", "blue", "magenta", "cyan", "white").index(colour) + 31
        return f"\x1b[{number}m{text}\x1b[39m"
