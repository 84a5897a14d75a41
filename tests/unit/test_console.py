"""Each line once, with the rank in front where it isn't the first; a status line only on a terminal."""

from __future__ import annotations

import io
import logging
import subprocess
import sys
import textwrap

import pytest

from dmuon_titan.console import StatusLine, progress_text, set_up_logging


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _restored_logging():
    loggers = [logging.getLogger(name) for name in ("dmuon_titan", "dmuon", "py.warnings")]
    before = [(target.handlers[:], target.propagate, target.level) for target in loggers]
    yield
    logging.captureWarnings(False)
    for target, (handlers, propagate, level) in zip(loggers, before, strict=True):
        target.handlers[:], target.propagate = handlers, propagate
        target.setLevel(level)


def test_rank_0_logs_everything_and_others_what_went_wrong(capsys):
    for rank in (0, 1):
        set_up_logging(rank)
        logging.getLogger("dmuon_titan.data").info("a line of everyone")
        logging.getLogger("dmuon_titan.data").warning("a warning of rank %d", rank)
    out, err = capsys.readouterr()
    assert out.count("a line of everyone") == 1
    first, second = err.splitlines()
    assert first.startswith("[titan]")
    assert first.endswith("a warning of rank 0")
    assert second.startswith("[rank 1] ")


def test_all_ranks_log_if_asked_to(capsys):
    set_up_logging(3, all_ranks=True)
    logging.getLogger("dmuon_titan").info("hello")
    assert capsys.readouterr().out.startswith("[rank 3] ")


def test_python_warnings_of_other_ranks_name_the_rank():
    program = """
        import warnings
        from dmuon_titan.console import set_up_logging
        set_up_logging(1)
        warnings.warn("careful")
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True)
    assert done.stderr.startswith("[rank 1] ")
    assert "careful" in done.stderr


def test_the_status_line_stays_below_log_lines_and_vanishes_at_the_end():
    stream = Terminal()
    line = StatusLine(stream)
    line.show("step 1")
    with line.hidden():
        stream.write("a log line\n")
    line.close()
    assert stream.getvalue() == "\r\x1b[2Kstep 1\r\x1b[2Ka log line\n\r\x1b[2Kstep 1\r\x1b[2K"


def test_the_status_line_is_silent_where_there_is_no_terminal():
    stream = io.StringIO()
    line = StatusLine(stream)
    line.show("step 1")
    line.close()
    assert stream.getvalue() == ""


def test_time_left_counts_the_steps_of_this_process_only():
    assert "1:30 left" in progress_text(done=110, total=200, elapsed_s=10.0, num_done_here=10)
    assert "left" not in progress_text(done=100, total=200, elapsed_s=0.0, num_done_here=0)
