"""The short form of benchmarks/starts.py."""

import json
import subprocess
import sys

from tests.blackbox.job import REPOSITORY


def test_b28_every_start_ends_with_status_0() -> None:
    command = [sys.executable, "-m", "benchmarks.starts", "--starts", "5", "--steps", "1"]
    ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert json.loads(ended.stdout)["statuses"] == {"0": 5}, ended.stderr
