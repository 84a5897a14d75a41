"""Kills a process where a kill makes a difference: before any one change of the file system."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable

DONE, FAILED, KILLED = 0, 1, 9

_CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir")
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def status_of_one_killed(action: Callable[[], None], num_changes: int) -> int:
    """Runs an action in a process that ends at once when it is about to change the file system once too often."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    left = num_changes

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal left
        if event in _CHANGES or (event == "open" and int(str(arguments[2])) & _WRITES):
            left -= 1
            if left < 0:
                os._exit(KILLED)

    sys.addaudithook(hook)
    try:
        action()
    except BaseException:
        traceback.print_exc()
        os._exit(FAILED)
    os._exit(DONE)
