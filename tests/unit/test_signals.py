"""A signal ends or marks a process at once, also while its main thread waits in C++, as inside a collective."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap

import pytest

from dmuon_titan.errors import ExitStatus

# The wait is the one a rank would hang in: torch's store asking for a key that nobody sets.
PROGRAM = """
    import os, sys
    from datetime import timedelta
    from dmuon_titan.signals import StopWatcher

    def leave(status, reason):
        print(reason, flush=True)
        os._exit(status)

    watcher = StopWatcher(leave)
    import torch.distributed as dist
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    {setting}
    print("ready", flush=True)
    store.wait(["never"], timedelta(seconds=60))
"""


def start(setting: str) -> subprocess.Popen[str]:
    program = textwrap.dedent(PROGRAM).replace("{setting}", setting)
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_with_nothing_to_save_a_signal_ends_the_process_at_once(number):
    process = start("")
    process.send_signal(number)
    out, _ = process.communicate(timeout=20)
    assert process.returncode == ExitStatus.PREEMPTED
    assert "nothing to save" in out


def test_with_something_to_save_the_second_signal_ends_it():
    process = start("watcher.patience_s, watcher.repeat_window_s = float('inf'), 0.0")
    process.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=1)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=20)
    assert process.returncode == ExitStatus.FAILURE
    assert "second signal" in out


@pytest.mark.parametrize(
    ("peer", "own"), [(ExitStatus.DATA, ExitStatus.FAILURE), (ExitStatus.PREEMPTED, ExitStatus.PREEMPTED)]
)
def test_a_rank_leaves_after_a_peer_has(peer, own):
    process = start(
        f"watcher.peer_grace_s = 0.0; watcher.patience_s = float('inf'); watcher.peer_left = lambda: {int(peer)}"
    )
    process.communicate(timeout=20)
    assert process.returncode == own


def test_a_signal_to_a_forked_reader_of_data_is_not_one_to_the_rank():
    """Nor does it end the reader: a scheduler sends its signals to all processes of a job."""
    program = """
        import os, signal, time
        from dmuon_titan.signals import StopWatcher

        watcher = StopWatcher(lambda status, reason: os._exit(status))
        readable, writable = os.pipe()
        asked, ask = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(ask)
            os.write(writable, b"ready")
            while os.read(asked, 1):
                os.write(writable, b"there")
            os._exit(0)
        os.close(asked)
        os.read(readable, 5)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            os.kill(child, number)
        os.write(ask, b"?")
        assert os.read(readable, 5) == b"there"
        os.close(ask)
        assert os.waitpid(child, 0)[1] == 0
        print(watcher.requested)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "False\n"
