"""What must be on the disk before the next thing happens."""

from __future__ import annotations

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Returns when a file's contents, or the names in a folder, are on the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
