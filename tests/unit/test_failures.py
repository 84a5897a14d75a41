"""Which rank speaks about an error, and what the others learn of it."""

from __future__ import annotations

import os

import pytest
import torch.distributed as dist

from dmuon_titan.environment import WorkerEnvironment
from dmuon_titan.errors import CheckpointError, ConfigError, DataError, ExitStatus, NonFiniteError, TitanError
from dmuon_titan.failures import FailureBoard, FailureReporter


def reporters(num_ranks: int) -> list[FailureReporter]:
    store = dist.HashStore()
    made = []
    for rank in range(num_ranks):
        reporter = FailureReporter(WorkerEnvironment(rank, rank, num_ranks, 0, None))
        reporter.connect(store)
        made.append(reporter)
    return made


def test_an_error_of_all_ranks_is_printed_once_without_a_rank(capsys):
    statuses = [reporter.report(DataError("shard 3 is short")) for reporter in reporters(3)]
    assert statuses == [ExitStatus.DATA] * 3
    assert capsys.readouterr().err == "error: shard 3 is short\n"


def test_an_error_of_one_rank_names_it(capsys):
    assert reporters(3)[2].report(DataError("shard 3 is short")) == ExitStatus.DATA
    assert capsys.readouterr().err == "[rank 2] error: shard 3 is short\n"


def test_the_traceback_is_that_of_the_rank_that_failed_first(capsys):
    first, second = reporters(2)[::-1]
    assert first.report(ZeroDivisionError("division by zero")) == ExitStatus.FAILURE
    assert second.report(RuntimeError("connection closed by peer\nmore")) == ExitStatus.FAILURE
    assert capsys.readouterr().err.splitlines() == [
        "[rank 1] ZeroDivisionError: division by zero",
        "stopped after rank 1 failed: connection closed by peer",
    ]


def test_a_killed_peer_costs_its_survivors_a_line_each(capsys):
    [first, _] = reporters(2)
    error = RuntimeError("[gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer. This is typical\nmore")
    assert first.report(error) == ExitStatus.FAILURE
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("stopped, for another rank is gone: [gloo")


LOST = [
    RuntimeError("[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer"),
    dist.DistBackendError(
        "NCCL error in: ProcessGroupNCCL.cpp:3690, remote process exited or there was a network error"
    ),
    dist.DistNetworkError("failed to recv, got 0 bytes. Connection was likely closed"),
]


@pytest.mark.parametrize("lost", LOST, ids=["gloo", "nccl", "store"])
@pytest.mark.parametrize("explained", [ConfigError, DataError, CheckpointError, NonFiniteError])
def test_who_only_lost_a_peer_that_explained_itself_is_silent(
    explained: type[TitanError], lost: RuntimeError, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = reporters(2)
    first.report(explained("what was found"))
    assert second.report(lost) == ExitStatus.FAILURE
    assert capsys.readouterr().err == "error: what was found\n"


def test_who_waits_in_vain_for_a_peer_that_explained_itself_is_silent(capfd: pytest.CaptureFixture[str]) -> None:
    first, second = reporters(2)
    first.report(DataError("shard 3 is short"))
    child = os.fork()
    if child == 0:
        second.leave(ExitStatus.FAILURE, "stopped since another rank left")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == ExitStatus.FAILURE
    assert capfd.readouterr().err == "error: shard 3 is short\n"


def test_an_error_of_its_own_is_said_after_an_explained_one_too(capsys):
    first, second = reporters(2)
    first.report(DataError("shard 3 is short"))
    second.report(ZeroDivisionError("division by zero"))
    assert capsys.readouterr().err.splitlines()[1:] == ["[rank 1] stopped after rank 0 failed: division by zero"]


def test_a_rank_that_follows_one_that_was_preempted_is_preempted_too(capsys):
    first, second = reporters(2)
    assert first.board is not None
    first.board.announce(ExitStatus.PREEMPTED)
    assert second.peer_left() == ExitStatus.PREEMPTED
    assert second.report(RuntimeError("connection closed by peer")) == ExitStatus.PREEMPTED
    assert capsys.readouterr().err == ""


def test_before_ranks_know_each_other_one_rank_a_node_prints(capsys):
    for rank in range(2):
        FailureReporter(WorkerEnvironment(rank, rank, 2, 0, None)).report(DataError("no such folder"))
    assert capsys.readouterr().err == "error: no such folder\n"


def test_only_the_first_to_leave_is_remembered():
    store = dist.HashStore()
    boards = [FailureBoard(store, rank) for rank in range(2)]
    assert boards[0].first() is None
    boards[1].announce(ExitStatus.DATA)
    boards[0].announce(ExitStatus.FAILURE)
    assert boards[0].first() == (1, ExitStatus.DATA)
