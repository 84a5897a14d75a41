"""Folders that come into being at once or not at all, made by one process while others wait."""

import errno
import fcntl
import logging
import os
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from dmuon_titan.disk import sync
from dmuon_titan.errors import DataError

logger = logging.getLogger(__name__)

_POLL_S = 0.1
_NO_LOCKS_HERE = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)


def cache_dirs(environ: Mapping[str, str], dump_folder: Path) -> list[Path]:
    """Where caches may lie, best first: $XDG_CACHE_HOME/dmuon_titan (~/.cache if unset), else under the dump folder."""
    in_dump_folder = Path(dump_folder) / "cache"
    base = environ.get("XDG_CACHE_HOME", "")
    # The XDG specification has relative values ignored.
    if not Path(base).is_absolute():
        base = os.path.join(environ.get("HOME", ""), ".cache")
    return [Path(base) / "dmuon_titan", in_dump_folder] if Path(base).is_absolute() else [in_dump_folder]


@contextmanager
def exclusive(lock_path: Path) -> Iterator[bool]:
    """Hold a lock between processes. It ends with the process, however that ends.

    Yields False on a file system without locks, where nothing is held: what is done under the lock must be right
    without it, too. Raises OSError if the lock file cannot be opened.
    """
    with lock_path.open("ab") as stream:
        announced = False
        while True:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not announced:
                    logger.info("%s: another process prepares this; waiting for it", lock_path.with_suffix(""))
                    announced = True
                time.sleep(_POLL_S)
                continue
            except OSError as error:
                if error.errno not in _NO_LOCKS_HERE:
                    raise
                held = False
            else:
                held = True
            yield held
            return


@contextmanager
def staged_folder(final: Path) -> Iterator[Path]:
    """A new folder beside `final` that takes its name when the block ends well, and vanishes when it does not.

    Raises DataError if `final` exists by then and is not an empty folder. The process that is killed leaves a folder
    `<final>.partial-*` that counts for nothing.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    partial = final.with_name(f"{final.name}.partial-{uuid.uuid4().hex[:12]}")
    partial.mkdir()
    try:
        yield partial
        for path in partial.iterdir():
            sync(path)
        sync(partial)
        try:
            partial.rename(final)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            raise DataError(f"{final}: exists already; name another folder or delete this one") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def remove_partial_folders(final: Path) -> None:
    """Remove what killed processes left of `final`. Only for the holder of the lock: a living one has such a folder."""
    for partial in final.parent.glob(f"{final.name}.partial-*"):
        shutil.rmtree(partial, ignore_errors=True)
