"""One worker of a training job: parse, check, run, exit status.

The launcher starts it on every rank; `torchrun ... -m dmuon_titan.train --config X` is the same program, and
`python -m dmuon_titan.train` a job of one rank. torch is imported only once the configuration is known to be right.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from dmuon_titan.config import LoadedConfig, World, help_text, load_config, validate, wants_help
from dmuon_titan.console import logger, set_up_logging
from dmuon_titan.devices import visible_gpus
from dmuon_titan.environment import WorkerEnvironment
from dmuon_titan.errors import ExitStatus, Preempted
from dmuon_titan.failures import FailureReporter
from dmuon_titan.signals import StopWatcher


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the job that a command line describes, to its end, and returns this rank's exit status.

    Errors are printed, never raised: a person's mistake in one line by one rank, anything else with its traceback.
    After an error no collective is called, for the other ranks may not answer: end the process soon.
    """
    gc.disable()  # what a start makes stays: looking for garbage in it costs a quarter of the time that imports take
    environment = WorkerEnvironment.read()
    reporter = FailureReporter(environment)
    watcher = StopWatcher(reporter.leave)
    try:
        status = _run(list(sys.argv[1:] if argv is None else argv), environment, reporter, watcher)
        _tear_down()
    except BaseException as error:
        watcher.close()
        status = reporter.report(error)
    watcher.close()
    environment.leave_status(status)
    return status


def end_process(status: int) -> NoReturn:
    """Ends the process with exactly this status.

    Python's own way out can abort after good work: a thread of gloo may still run when its owner is taken apart.
    """
    for child in multiprocessing.active_children():
        child.kill()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _run(
    argv: list[str], environment: WorkerEnvironment, reporter: FailureReporter, watcher: StopWatcher
) -> ExitStatus:
    if wants_help(argv):
        if environment.rank == 0:
            sys.stdout.write(help_text())
        return ExitStatus.FINISHED
    loaded = _checked_config(argv, environment)
    status_line = set_up_logging(environment.rank, all_ranks=loaded.config.metrics.log_all_ranks)
    from dmuon_titan.job import run

    try:
        run(loaded, environment, reporter, watcher, status_line)
    except Preempted as stop:
        watcher.close()  # a repeated signal must not spoil the status of a job that has saved and stopped
        logger.info(str(stop))
        return stop.status
    return ExitStatus.FINISHED


def _checked_config(argv: list[str], environment: WorkerEnvironment) -> LoadedConfig:
    """Raises ConfigError with all mistakes. The launcher checked the same before, and the memory of devices too."""
    world = World(environment.num_ranks, "cuda" if visible_gpus(os.environ) else "cpu")
    return load_config(argv, check=lambda config: validate(config, world))


def _tear_down() -> None:
    """Ends torch.distributed in the order that keeps every rank's exit clean: the model and its meshes go first."""
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_initialized():
        gc.collect()
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    end_process(main())
