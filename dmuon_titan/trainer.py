"""The training loop: a step reads from top to bottom.

Shape legend: B sequences of a micro-batch, S tokens of a sequence.
"""

from __future__ import annotations

import gc
import math
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

import dmuon
from dmuon.annotation import annotate
from dmuon.materialize import RowInit
from dmuon.torch_internals import set_group_timeout
from dmuon_titan.checkpoint import Checkpointer, TrainState, find_newest
from dmuon_titan.config import JobConfig, global_batch_size, num_microbatches
from dmuon_titan.console import StatusLine, logger
from dmuon_titan.data.batches import StepBatches
from dmuon_titan.data.dataset import TokenDataset
from dmuon_titan.data.loader import Batch
from dmuon_titan.errors import DataError, NonFiniteError, Preempted, TitanError
from dmuon_titan.evaluation import Evaluation, any_rank
from dmuon_titan.loss import IGNORE_INDEX, build_loss, loss_context
from dmuon_titan.lr_scheduler import build_schedule
from dmuon_titan.mesh import ParallelMesh, copy_to, to_host
from dmuon_titan.metrics import Metrics, StepFigures
from dmuon_titan.optimizer import build_optimizer, step_unless
from dmuon_titan.parallelize import build_model
from dmuon_titan.phases import Phases
from dmuon_titan.profiling import Profiler, settle
from dmuon_titan.signals import StopWatcher
from models.llama.sizes import LlamaSize

# A first step can compile for minutes; a scheduler gives half a minute after SIGTERM. Nothing is lost by leaving then.
_FIRST_STEP_PATIENCE_S = 15.0


@dataclass(frozen=True)
class Gradients:
    """What forward and backward of a step found, equal on all ranks.

    stop: some rank was asked to stop. save_failed: some rank's part of a save under way has. save_due: by the clock.
    """

    loss: float
    norm: float
    num_valid_tokens: int
    stop: bool
    save_failed: bool = False
    save_due: bool = False


class Trainer:
    """One run on one mesh. Every method is called by all ranks together.

    Attributes:
        model, optimizer, plan: as built; plan is None without dedicated parameters.
        state: steps made, samples consumed, tokens seen.
    """

    def __init__(
        self,
        config: JobConfig,
        mesh: ParallelMesh,
        size: LlamaSize,
        state: TrainState,
        watcher: StopWatcher,
        weights: RowInit | None = None,
    ) -> None:
        """`weights`: those to begin with; None for fresh ones."""
        self.config, self.mesh, self.size, self.state, self.watcher = config, mesh, size, state, watcher
        self.model, self.plan = build_model(config, size, mesh, weights)
        self.optimizer = build_optimizer(config.optimizer, self.model)
        self.loss = build_loss(config)
        self.peak_learning_rates = [group["lr"] for group in self.optimizer.param_groups]
        self.checkpointer: Checkpointer | None = None
        if config.checkpoint.enable:
            self.checkpointer = Checkpointer(config, size, self.model, self.optimizer, state, mesh.device)
        self.global_batch_size = global_batch_size(config, dist.get_world_size())
        self.num_micro_batches = num_microbatches(config, dist.get_world_size())

    def start(self, dataset: TokenDataset, evaluation: Evaluation | None, status_line: StatusLine) -> None:
        """Opens data and metrics at the step that `state` is at."""
        config, start_step, rank = self.config, self.state.step, dist.get_rank()
        self.schedule = build_schedule(config.lr_scheduler, config.training.steps - self.state.schedule_start)
        self.evaluation = evaluation
        if self.checkpointer is not None:
            self.checkpointer.tokenizer_path = dataset.tokenizer_path
        self.metrics = Metrics(
            config,
            self.mesh.device,
            rank=rank,
            flops_per_token=self.size.flops_per_token(config.training.seq_len),
            ranks_per_batch=self.mesh.degree("tp"),
            start_step=start_step,
            status_line=status_line,
        )
        device = self.mesh.device
        self.profiler = Profiler(config.profiling, device, rank, start_step, partial(settle, self.model, device))
        self.batches = StepBatches(dataset, config, self.mesh, self.state.consumed_samples, self.num_micro_batches)

    def train(self, phases: Phases) -> None:
        """Makes the steps that are left, after `start`. `phases` of the start-up are told after the first.

        Raises:
            NonFiniteError: a loss or gradient norm is not finite; nothing of that step was applied.
            Preempted: a signal asked to stop; the step made last is saved.
            DataError, CheckpointError: data can't be read, a checkpoint can't be written.
        """
        # Left alone, Python collects garbage at a moment of its own on every rank, and all ranks wait each time.
        gc.collect()
        gc.disable()
        try:
            with self.profiler.running():
                self._begin()
                self.step()
                logger.info(phases.summary())
                self._end_patience()
                while self.state.step < self.config.training.steps:
                    self.step()
        finally:
            gc.enable()
            self.metrics.close()

    def step(self) -> None:
        """One optimizer step, and what is due after it. Raises what `train` does."""
        gradients = self._update()
        # A stop comes first. What it leaves out, the next start makes up for; there is none after the last step.
        stop = gradients.stop or not self._validate_if_due()
        self._save_if_due(stop, gradients.save_due)
        if stop:
            self._validate_if_due(interruptible=False)
        if self.state.step % self.config.training.gc_freq == 0:
            gc.collect(1)
        self.profiler.step()

    def _update(self) -> Gradients:
        """From batches to updated weights."""
        step = self.state.step + 1
        with self.metrics.data_loading(), annotate("titan::data loading"):
            micro_batches = self.batches.next(step)
        self._set_rates(step)
        gradients, local_mean = self.update(step, micro_batches)
        self.state.step = step
        self.state.consumed_samples += self.global_batch_size
        self.state.tokens_seen += self.global_batch_size * self.config.training.seq_len
        self.metrics.count(sum(batch.input_BS.numel() for batch in micro_batches))
        if self.metrics.should_log(step):
            self._log(step, gradients, local_mean)
        self.metrics.progress(step, gradients.loss)
        return gradients

    def update(self, step: int, micro_batches: list[Batch]) -> tuple[Gradients, Tensor]:
        """Forward, backward and the optimizer's step, by the rates that are set.

        Returns:
            What all ranks found together, and this rank's mean loss, 0-dim.
        """
        found, local_mean = self.forward_backward(micro_batches)
        read = to_host(found)
        # Harm is seen on the device, and the host reads what was found while the update runs: the step's one wait.
        with annotate("titan::optimizer"):
            step_unless(self.optimizer, ~found[:2].isfinite().all() | (found[2] == 0))
        with annotate("titan::wait for the device"):
            loss, norm, num_valid, *wishes = read()
        gradients = Gradients(loss, norm, int(num_valid), *(count > 0 for count in wishes))
        if self.checkpointer is not None and gradients.save_failed:
            self.checkpointer.give_up()
        self.check(step, gradients)
        if self.checkpointer is not None:
            self.checkpointer.proved()
        return gradients, local_mean

    def _set_rates(self, step: int) -> None:
        factor = self.schedule(step - self.state.schedule_start)
        for group, peak in zip(self.optimizer.param_groups, self.peak_learning_rates, strict=True):
            group["lr"] = peak * factor

    def forward_backward(self, micro_batches: list[Batch]) -> tuple[Tensor, Tensor]:
        """Leaves in `.grad` the gradient of the mean loss over all valid tokens of all ranks, clipped.

        Returns:
            What all ranks found together, the fields of `Gradients` as float64; and this rank's mean loss, 0-dim.
        """
        mesh, device = self.mesh, self.mesh.device
        inputs = [copy_to(device, batch.input_BS) for batch in micro_batches]
        labels = [copy_to(device, batch.label_BS) for batch in micro_batches]
        num_valid = torch.stack([(label_BS != IGNORE_INDEX).sum() for label_BS in labels]).sum()
        global_valid = num_valid.clone()
        dist.all_reduce(global_valid, group=mesh.dp_group)
        # FSDP2 and dmuon average over data-parallel ranks; every token shall weigh the same, whichever rank has it.
        scale = mesh.dp_world / global_valid.clamp(min=1).double()
        local_loss = torch.zeros((), dtype=torch.float64, device=device)
        self.optimizer.zero_grad()
        for input_BS, label_BS in zip(inputs, labels, strict=True):
            with loss_context(self.config.parallelism):
                with annotate("titan::forward"):
                    scaled, loss = self.loss(self.model, input_BS, label_BS, scale)
                with annotate("titan::backward"):
                    scaled.backward()
            local_loss += loss
        max_norm = self.config.training.max_norm
        with annotate("titan::clip"):
            norm = dmuon.clip_grad_norm_(self.model, None if math.isinf(max_norm) else max_norm)
        # All ranks learn the loss and any rank's wishes.
        shared = torch.cat([local_loss.view(1), copy_to(device, torch.tensor(self._wishes(), dtype=torch.float64))])
        with annotate("titan::agreement"):
            dist.all_reduce(shared)
        loss_sum = shared[0] / mesh.degree("tp")  # the ranks of a tp group have the same loss
        found = torch.stack([loss_sum / global_valid.clamp(min=1), norm.double(), global_valid.double()])
        return torch.cat([found, shared[1:]]), local_loss / num_valid.clamp(min=1)

    def _wishes(self) -> tuple[bool, bool, bool]:
        """What this rank has to tell the others of: to stop, a save that failed, a save that is due by the clock."""
        checkpointer = self.checkpointer
        if checkpointer is None:
            return self.watcher.requested, False, False
        return self.watcher.requested, checkpointer.failed(), checkpointer.due()

    def check(self, step: int, gradients: Gradients) -> None:
        """Raises NonFiniteError or DataError, on all ranks alike, if an update by these gradients would do harm."""
        if gradients.num_valid_tokens == 0:
            raise DataError(f"step {step}: no token of the global batch is a valid target")
        if not (math.isfinite(gradients.loss) and math.isfinite(gradients.norm)):
            if self.checkpointer is not None:
                self.checkpointer.broke()
            raise NonFiniteError(
                f"step {step}: loss {gradients.loss}, gradient norm {gradients.norm}; nothing of this step was "
                f"applied. Lower optimizer.lr or lengthen lr_scheduler.warmup_steps and run again: {self._way_on()}"
            )

    def _way_on(self) -> str:
        """What the same command does next, the same on all ranks."""
        if self.checkpointer is None:
            return "it starts from the beginning, for checkpoint.enable = false"
        newest = find_newest(self.config.checkpoint, self.checkpointer.group)
        if not newest:
            return "it starts from the beginning, for there is no checkpoint yet"
        if newest[0].step == self.state.step and len(newest) > 1:
            return (
                f"step {self.state.step} is saved, but where the same step fails again, continue from an older one "
                f"by --checkpoint.load_step {newest[1].step}"
            )
        return f"it continues from step {newest[0].step}, the checkpoint in {newest[0].path}"

    def _log(self, step: int, gradients: Gradients, local_mean: Tensor) -> None:
        dist.all_reduce(local_mean, op=dist.ReduceOp.MAX)
        rates = tuple(group["lr"] for group in self.optimizer.param_groups)
        figures = StepFigures(gradients.loss, local_mean.item(), gradients.norm, rates, self.batches.epoch)
        self.metrics.log(step, figures, self.state.tokens_seen)

    def _validate_if_due(self, *, interruptible: bool = True) -> bool:
        """Returns False if it was interrupted by a request to stop."""
        step, freq = self.state.step, self.config.validation.freq
        due = step % freq == 0 or step == self.config.training.steps
        if self.evaluation is None or not due:
            return True
        with self.metrics.paused(), annotate("titan::validation"):
            loss = self.evaluation.loss(self.model, interruptible=interruptible)
        if loss is not None:
            self.metrics.log_validation(step, loss)
        return loss is not None

    def _save_if_due(self, stop: bool, due_by_clock: bool) -> None:
        step, last, options = self.state.step, self.state.step == self.config.training.steps, self.config.checkpoint
        stop = stop and not last
        if self.checkpointer is None or options.load_only:
            if stop:
                key = "load_only = true" if self.checkpointer else "enable = false"
                raise TitanError(f"stopped by a signal after step {step}; nothing was saved, for checkpoint.{key}")
            return
        due = due_by_clock or step % options.interval == 0 or (step == 1 and options.enable_first_step_checkpoint)
        with self.metrics.paused(), annotate("titan::checkpoint"):
            if stop and not options.save_on_signal:
                self.checkpointer.finish()
                raise Preempted(
                    f"stopped by a signal after step {step}, not saved for checkpoint.save_on_signal = false; "
                    f"{self._way_on()}"
                )
            if stop or last or due:
                self.checkpointer.save(last=last, wait=stop)
        if stop:
            raise Preempted(
                f"stopped by a signal after step {step}, which is saved; the same command continues from it"
            )

    def _begin(self) -> None:
        """From here on ranks stop together, at the end of a step. Until then each leaves at once: nothing is lost."""
        self.watcher.patience_s = _FIRST_STEP_PATIENCE_S
        owed = any_rank(self.metrics.owes_validation)
        if any_rank(self.watcher.requested) or (owed and not self._validate_if_due()):
            raise Preempted("stopped by a signal before the first step; there is nothing to save")

    def _end_patience(self) -> None:
        """After the first step what may take long is over: compilation, and the start of communicators."""
        self.watcher.patience_s = math.inf
        for group in (None, *self.mesh.groups, *dmuon.process_groups(self.model)):
            set_group_timeout(group, self.config.comm.train_timeout_seconds)
