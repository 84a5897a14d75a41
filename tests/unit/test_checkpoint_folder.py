"""A job killed at any change that a save makes to its folder loses nothing and leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from dmuon_titan.checkpoint.folder import begin, give_up, next_sequence, publish, recover, retain, scan
from dmuon_titan.checkpoint.manifest import DCP, FULL, Manifest, store
from tests.unit.killing import DONE, KILLED, status_of_one_killed

_FILES = ("__0_0.distcp", "__1_0.distcp", "__2_0.distcp", ".metadata")


def save(folder: Path, step: int, run: str) -> None:
    """What rank 0 does to the folder in one save and after the step that follows it."""
    path = begin(folder, step)
    write(path, f"{run}, step {step}")
    files = {name: store(path / name) for name in _FILES}
    publish(path, Manifest(FULL, DCP, step, next_sequence(folder), files, {}, {}, {}, {}))
    retain(folder, 2, ())


def save_that_fails(folder: Path, step: int, run: str) -> None:
    path = begin(folder, step)
    write(path, f"{run}, half of st")
    give_up(path)


def write(path: Path, text: str) -> None:
    for name in _FILES:
        (path / name).write_text(text)


def held(folder: Path) -> dict[str, str]:
    """Name -> what lies there."""
    return {path.name: read(path) for path in folder.iterdir()}


def read(path: Path) -> str:
    file = path / _FILES[0]
    return file.read_text() if file.exists() else ""


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
        newest = read(scan(folder)[0][0].path)
        if newest == "earlier, step 3":  # that's what the job continues from
            save(folder, step, "this")
        else:
            assert newest == f"this, step {step}"
            retain(folder, 2, ())
        assert held(folder) == held(undisturbed), f"killed before change {number}"
        number += 1
    assert number > 6
