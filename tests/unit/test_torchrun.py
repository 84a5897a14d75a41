"""The exit status of a job, from what its ranks have left."""

import signal

import pytest

from dmuon_titan.errors import ExitStatus
from dmuon_titan.torchrun import job_status

TERM, KILL = -signal.SIGTERM, -signal.SIGKILL


@pytest.mark.parametrize(
    ("statuses", "exit_codes", "stopped", "status"),
    [
        ({0: 0, 1: 0}, {}, False, 0),
        ({0: 3, 1: 1}, {0: 3, 1: 1}, False, 3),
        ({0: 1, 1: 2}, {0: 1, 1: 2}, False, 2),
        ({0: 1, 1: 5, 2: 4}, {0: 1}, False, 4),
        ({0: 75, 1: 75}, {0: 75, 1: 75}, True, 75),
        ({0: 75, 1: 1}, {0: 75, 1: 1}, True, 1),
        ({0: 75, 1: 5}, {0: 75, 1: 5}, True, 5),
        ({0: 0, 1: 0}, {1: -signal.SIGABRT}, False, 0),  # it had left its status: the work was done
        ({0: 1}, {1: KILL, 0: 1}, False, 1),
        ({}, {0: KILL, 1: TERM}, False, 1),
        ({}, {0: TERM, 1: TERM}, True, 75),  # stopped while the workers were still coming up
        ({}, {0: 75, 1: TERM}, True, 75),
        ({0: 3}, {0: 3, 1: TERM}, False, 3),
        ({}, {0: TERM}, False, 1),
        ({}, {0: 2}, False, 2),
        ({}, {0: 17}, False, 1),
        ({0: 17}, {0: 17}, False, 1),
    ],
)
def test_status_of_a_job(statuses: dict[int, int], exit_codes: dict[int, int], stopped: bool, status: int) -> None:
    assert job_status(statuses, exit_codes, stopped=stopped) is ExitStatus(status)
