"""What must be on the disk before the next thing happens."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def sync(path: Path) -> None:
    """Returns when a file's contents, or the names in a folder, are on the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def why_not_writable(file: Path) -> str | None:
    """What the system says when a file, there or not, is to become longer; None if nothing."""
    try:
        with file.open("ab") as stream:
            stream.write(bytes(1 << 20))
            stream.flush()
    except OSError as error:
        there = next(folder for folder in file.parents if folder.exists())
        return f"{error.strerror or error}: {file} ({shutil.disk_usage(there).free >> 20} MiB are free on that disk)"
    return None
