"""The embedded default corpus: the Python sources of the running interpreter's own standard library."""

import hashlib
import logging
import os
import platform
import sysconfig
from pathlib import Path

import sentencepiece

from dmuon_titan.data.cache import exclusive, remove_partial_folders
from dmuon_titan.data.documents import DocumentReader
from dmuon_titan.data.manifest import FORMAT_VERSION, MANIFEST_NAME, PREPARE_COMMAND
from dmuon_titan.data.preparation import PreparationSettings, prepare
from dmuon_titan.errors import DataError

logger = logging.getLogger(__name__)

DEFAULT_DATASET = "python_stdlib"
SETTINGS = PreparationSettings(vocab_size=2048, validation_fraction=0.05)

# Tests, what is installed beside the library, and tools that are not the library.
_LEFT_OUT = {
    *("test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"),
    *("idlelib", "lib2to3", "turtledemo", "ensurepip"),
}
_MIN_BYTES = 1 << 20


def ensure_default_corpus(*cache_dirs: Path, library: Path | None = None) -> Path:
    """The prepared folder of the default corpus, made at the first call: about 4 million tokens of 2048 pieces.

    cache_dirs: looked into for a finished folder; it is made in the first that can be written. Any number of processes
    may call this at once: one makes it, the others wait. library: where the sources are, if not where Python's are.
    Raises DataError if the interpreter has no sources or no folder can be written.
    """
    library = library or Path(sysconfig.get_path("stdlib"))
    files = standard_library_files(library)
    key = _content_hash(files, library)
    finals = [cache_dir / key for cache_dir in cache_dirs]
    for final in finals:
        if _is_prepared(final):
            return final
    reasons = []
    for final in finals:
        lock_path = final.with_suffix(".lock")
        try:
            final.parent.mkdir(parents=True, exist_ok=True)
            lock_path.touch()
        except OSError as error:
            reasons.append(f"{error.filename}: {error.strerror}")
            continue
        with exclusive(lock_path) as held:
            if held:
                remove_partial_folders(final)
            if not _is_prepared(final):
                _prepare_unless_overtaken(files, final)
        return final
    raise DataError(f"no folder for the prepared corpus can be written ({'; '.join(reasons)}); set XDG_CACHE_HOME")


def standard_library_files(library: Path) -> list[Path]:
    """The sources of the standard library in sorted order, without tests and what is installed beside it.

    Raises DataError if there are none to speak of, as in interpreters that ship byte code only.
    """
    files = []
    for parent, folders, names in os.walk(library):
        folders[:] = [name for name in folders if name not in _LEFT_OUT]
        # _sysconfigdata was written when the interpreter was built, with the paths of that machine in it.
        sources = [name for name in names if name.endswith(".py") and not name.startswith("_sysconfigdata")]
        files += [path for name in sources if (path := Path(parent, name)).is_file()]  # not a link to nowhere
    files.sort()
    num_bytes = sum(path.stat().st_size for path in files)
    if num_bytes < _MIN_BYTES:
        raise DataError(
            f"{library}: this interpreter has no sources of its standard library ({len(files)} files, "
            f"{num_bytes} bytes of Python) to train on; prepare text of your own with "
            f"`{PREPARE_COMMAND} FILE_OR_FOLDER... --output FOLDER` and set training.dataset_path = FOLDER"
        )
    return files


def _content_hash(files: list[Path], library: Path) -> str:
    digest = hashlib.sha256()
    versions = (FORMAT_VERSION, platform.python_implementation(), platform.python_version())
    digest.update(repr((versions, sentencepiece.__version__, SETTINGS)).encode())
    for path in files:
        digest.update(path.relative_to(library).as_posix().encode() + b"\0")
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return f"{DEFAULT_DATASET}-{digest.hexdigest()[:16]}"


def _is_prepared(folder: Path) -> bool:
    return (folder / MANIFEST_NAME).is_file()


def _prepare_unless_overtaken(files: list[Path], final: Path) -> None:
    logger.info("preparing the default corpus, once: %s", final)
    try:
        # A few old modules are not in UTF-8. They lose the lines with such characters.
        prepare(DocumentReader(files, skip_invalid=True), final, SETTINGS)
    except DataError:
        if not _is_prepared(final):
            raise
