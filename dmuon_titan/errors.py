"""The errors a person can cause or meet, and the exit status each one ends the job with."""

from enum import IntEnum


class ExitStatus(IntEnum):
    """Exit statuses of a training job, the launcher's too. Part of the product's contract."""

    FINISHED = 0
    FAILURE = 1
    CONFIG = 2
    DATA = 3
    CHECKPOINT = 4
    NON_FINITE = 5
    PREEMPTED = 75


class TitanError(Exception):
    """One line for a person: what was found, what is legal, what to do. Printed without a traceback."""

    status = ExitStatus.FAILURE


class ConfigError(TitanError):
    """The configuration is wrong. The message holds one line for each mistake."""

    status = ExitStatus.CONFIG


class DataError(TitanError):
    """Training data or a tokenizer is missing, corrupt or exhausted."""

    status = ExitStatus.DATA


class CheckpointError(TitanError):
    """A checkpoint can't be saved, found or loaded."""

    status = ExitStatus.CHECKPOINT


class NonFiniteError(TitanError):
    """A loss or gradient norm is infinite or not a number; no update was applied."""

    status = ExitStatus.NON_FINITE


class Preempted(TitanError):
    """A signal asked the job to stop, and a complete checkpoint of the step was saved."""

    status = ExitStatus.PREEMPTED
