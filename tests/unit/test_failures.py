"""Which rank speaks about an error, and what the others learn of it."""

from __future__ import annotations

import torch.distributed as dist

from dmuon_titan.environment import WorkerEnvironment
from dmuon_titan.errors import DataError, ExitStatus
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
