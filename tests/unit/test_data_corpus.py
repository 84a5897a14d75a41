"""The embedded default corpus: made once, by one of many, whole or not at all, and the same everywhere."""

import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import numpy as np
import pytest

from dmuon_titan.data.cache import cache_dirs
from dmuon_titan.data.corpus import SETTINGS, ensure_default_corpus, standard_library_files
from dmuon_titan.data.dataset import TokenDataset
from dmuon_titan.data.manifest import read_manifest, verify
from dmuon_titan.data.shards import TokenStream, read_documents
from dmuon_titan.data.tokenizer import Tokenizer
from dmuon_titan.errors import DataError

STDLIB = Path(sysconfig.get_path("stdlib"))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The corpus as a job makes it, in a cache of its own."""
    return ensure_default_corpus(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A library that is quickly prepared: a part of the real one."""
    folder = tmp_path / "library"
    folder.mkdir()
    names = ("typing.py", "argparse.py", "turtle.py", "doctest.py", "inspect.py", "tarfile.py", "subprocess.py")
    for name in (*names, "_pydecimal.py", "datetime.py", "pickletools.py", "pickle.py", "zipfile.py", "ast.py"):
        if (STDLIB / name).exists():
            shutil.copy(STDLIB / name, folder)
    for number in range(40):
        if sum(path.stat().st_size for path in folder.iterdir()) > 1 << 20:
            break
        shutil.copy(STDLIB / "argparse.py", folder / f"more{number}.py")
    return folder


def start(cache: Path, library: Path) -> subprocess.Popen[str]:
    program = (
        "import sys; from pathlib import Path; from dmuon_titan.data.corpus import ensure_default_corpus;"
        "print(ensure_default_corpus(Path(sys.argv[1]), library=Path(sys.argv[2])))"
    )
    command = [sys.executable, "-c", program, str(cache), str(library)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_corpus_returns_every_source_file(corpus: Path) -> None:
    files = standard_library_files(STDLIB)
    manifest = verify(corpus)
    tokenizer = Tokenizer(corpus / "tokenizer.model")
    assert manifest.vocab_size == tokenizer.vocab_size == SETTINGS.vocab_size
    texts = set()
    for split in manifest.splits.values():
        tokens = TokenStream(corpus, manifest, split).read([0], split.num_tokens)[0]
        ends = read_documents(corpus, split)[1:]
        # Before each end lies the separator.
        texts |= {tokenizer.decode(part[:-1].tolist()) for part in np.split(tokens, ends)[:-1]}
    assert manifest.num_skipped_lines == 0
    assert texts == {path.read_bytes().decode("utf-8-sig") for path in files}
    folders = {part for path in files for part in path.relative_to(STDLIB).parts}
    assert not folders & {"test", "tests", "site-packages", "idlelib"}


def test_corpus_is_found_again_and_has_both_splits(corpus: Path) -> None:
    made = (corpus / "manifest.json").stat().st_mtime_ns
    assert ensure_default_corpus(corpus.parent) == corpus
    assert (corpus / "manifest.json").stat().st_mtime_ns == made
    assert len(TokenDataset(corpus, 256)) > 10 * len(TokenDataset(corpus, 256, split="validation")) > 100


def test_two_machines_make_the_same_corpus(tmp_path: Path, library: Path) -> None:
    folders = [ensure_default_corpus(tmp_path / name, library=library) for name in ("one", "two")]
    hashes = {TokenDataset(folder, 32).manifest_hash for folder in folders}
    assert len(hashes) == 1
    (library / "typing.py").write_text("# another version\n" * 100)
    assert ensure_default_corpus(tmp_path / "one", library=library).name != folders[0].name


def test_many_processes_at_once_make_it_once(tmp_path: Path, library: Path) -> None:
    jobs = [start(tmp_path / "cache", library) for _ in range(4)]
    outputs = [job.communicate(timeout=120) for job in jobs]
    assert [job.returncode for job in jobs] == [0] * 4, outputs
    (folder,) = {Path(out.strip()) for out, _ in outputs}
    verify(folder)
    assert {path.name for path in folder.parent.iterdir()} == {folder.name, f"{folder.name}.lock"}


def test_killed_preparer_leaves_nothing_that_counts(tmp_path: Path, library: Path) -> None:
    cache = tmp_path / "cache"
    job = start(cache, library)
    while not list(cache.glob("*.partial-*")):
        assert job.poll() is None
        time.sleep(0.001)
    job.send_signal(signal.SIGKILL)
    job.communicate()
    assert list(cache.glob("*.partial-*"))
    assert not list(cache.glob("*/manifest.json"))
    folder = ensure_default_corpus(cache, library=library)
    verify(folder)
    assert not list(cache.glob("*.partial-*"))


def test_first_folder_that_can_be_written_is_used(tmp_path: Path, library: Path) -> None:
    (tmp_path / "file").write_text("")
    blocked = tmp_path / "file" / "cache"
    folder = ensure_default_corpus(blocked, tmp_path / "second", library=library)
    assert folder.parent == tmp_path / "second"
    # A finished one is taken wherever it lies, so that a cache can be shipped read-only.
    assert ensure_default_corpus(tmp_path / "third", tmp_path / "second", library=library) == folder
    with pytest.raises(DataError, match=r"can be written \(.*file.*set XDG_CACHE_HOME"):
        ensure_default_corpus(blocked, library=library)


def test_damaged_corpus_is_refused_by_name(tmp_path: Path, library: Path) -> None:
    folder = ensure_default_corpus(tmp_path, library=library)
    shard = folder / read_manifest(folder).splits["train"].shards[0].file
    os.truncate(shard, shard.stat().st_size - 1)
    with pytest.raises(DataError, match=f"{shard.name}: {shard.stat().st_size} bytes found"):
        TokenDataset(folder, 32)


def test_interpreter_without_sources_is_told_how_to_prepare_text(tmp_path: Path) -> None:
    (tmp_path / "os.pyc").write_bytes(b"\0" * 1000)
    with pytest.raises(DataError, match=r"no sources .*\(0 files, 0 bytes.*dmuon_titan\.tools\.prepare FILE_OR_FOLDER"):
        ensure_default_corpus(tmp_path / "cache", library=tmp_path)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"XDG_CACHE_HOME": "/x", "HOME": "/h"}, ["/x/dmuon_titan", "/dump/cache"]),
        ({"HOME": "/h"}, ["/h/.cache/dmuon_titan", "/dump/cache"]),
        ({"XDG_CACHE_HOME": "", "HOME": "/h"}, ["/h/.cache/dmuon_titan", "/dump/cache"]),
        ({"XDG_CACHE_HOME": "relative", "HOME": "/h"}, ["/h/.cache/dmuon_titan", "/dump/cache"]),
        ({}, ["/dump/cache"]),
    ],
)
def test_places_of_the_cache(environ: dict[str, str], expected: list[str]) -> None:
    assert cache_dirs(environ, Path("/dump")) == [Path(path) for path in expected]


def test_preparing_and_checking_need_no_torch() -> None:
    program = (
        "import sys, dmuon_titan.data.corpus, dmuon_titan.tools.prepare;"
        "sys.exit('torch' in sys.modules or 'torchdata' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
    program = "import sys, dmuon_titan.data.manifest; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
