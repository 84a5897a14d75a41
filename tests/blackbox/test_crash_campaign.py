"""The crash campaign in its short form: three rounds, of which one waits for a save with its kill."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.blackbox.job import REPOSITORY


def test_a_killed_job_started_again_is_the_same_run(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.crash_campaign"]
    flags = ["--rounds", "3", "--seed", "106", "--steps", "20", "--aim", "1", "--output", str(tmp_path / "result.json")]
    ended = subprocess.run([*command, *flags], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    result = json.loads(ended.stdout)
    assert result == json.loads((tmp_path / "result.json").read_text())
    assert result["failures"] == 0
    assert result["kills"] >= 3
    assert result["inside_a_save"] >= 1
    assert sum(result["by_phase"].values()) == sum(result["by_kind"].values()) == result["kills"]
    assert result["by_mode"].keys() == {"disabled", "async"}
