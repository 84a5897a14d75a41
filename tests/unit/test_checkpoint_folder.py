"""A job killed at any change that a save makes to its folder loses nothing and leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from dmuon_titan.checkpoint.folder import begin, give_up, next_sequence, publish, recover, retain, scan
from dmuon_titan.checkpoint.manifest import DCP, FULL, Manifest, store
from tests.unit.killing import DONE, KILLED, status_of_one_killed

_FILE = "__0_0.distcp"


def save(folder: Path, step: int, run: str) -> None:
    """What rank 0 does to the folder in one save and after the step that follows it."""
    path = begin(folder, step)
    (path / _FILE).write_text(f"{run}, step {step}")
    publish(path, Manifest(FULL, DCP, step, next_sequence(folder), {_FILE: store(path / _FILE)}, {}, {}, {}, {}))
    retain(folder, 2, ())


def save_that_fails(folder: Path, step: int, run: str) -> None:
    path = begin(folder, step)
    (path / _FILE).write_text(f"{run}, half of st")
    give_up(path)


def held(folder: Path) -> dict[str, str]:
    """Name -> what lies there."""
    return {path.name: (path / _FILE).read_text() if (path / _FILE).exists() else "" for path in folder.iterdir()}


def saved_by_an_earlier_run(folder: Path) -> Path:
    folder.mkdir()
    for step in (1, 2, 3):
        save(folder, step, "earlier")
    return folder


@pytest.mark.parametrize("step", [3, 4], ids=["name-is-taken", "new-name"])
@pytest.mark.parametrize("action", [save, save_that_fails])
def test_b05_a_kill_before_any_change_of_the_folder(
    action: Callable[[Path, int, str], None], step: int, tmp_path: Path
) -> None:
    undisturbed = saved_by_an_earlier_run(tmp_path / "undisturbed")
    save(undisturbed, step, "this")
    number, status = 0, KILLED
    while status == KILLED:
        folder = saved_by_an_earlier_run(tmp_path / f"killed-{number}")
        status = status_of_one_killed(partial(action, folder, step, "this"), number)
        assert status in (KILLED, DONE)
        recover(folder)
        newest = (scan(folder)[0][0].path / _FILE).read_text()
        if newest == "earlier, step 3":  # that's what the job continues from
            save(folder, step, "this")
        else:
            assert newest == f"this, step {step}"
            retain(folder, 2, ())
        assert held(folder) == held(undisturbed), f"killed before change {number}"
        number += 1
    assert number > 6
