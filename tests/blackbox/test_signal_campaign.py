"""The signal campaign in its short form: three rounds, each with another process that is asked to stop."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.blackbox.job import REPOSITORY


def test_b25_a_job_that_is_asked_to_stop_saves_and_goes_on() -> None:
    command = [sys.executable, "-m", "benchmarks.signal_campaign", "--rounds", "3", "--steps", "20", "--seed", "5"]
    ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    result = json.loads(ended.stdout)
    assert (result["failures"], result["signals"]) == (0, 3)
    assert result["by_target"].keys() <= {"whole job", "one worker", "launcher"}
    assert result["statuses"].keys() <= {"0", "1", "75"}
