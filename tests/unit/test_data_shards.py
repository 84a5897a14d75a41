"""Token shards and their manifest: nothing wraps on write, nothing damaged is read as if it were whole."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dmuon_titan.data.dataset import TokenDataset
from dmuon_titan.data.manifest import check_sizes, read_manifest, verify
from dmuon_titan.data.shards import SplitWriter, TokenStream
from dmuon_titan.errors import DataError
from tests.debruijn import write_debruijn, write_tokens


@pytest.mark.parametrize(
    ("ids", "vocab_size", "token_bytes"),
    [
        ([0, 65535, 65536, 70000], 70001, 4),
        ([0, 65535, 65536], 65537, 4),
        ([0, 1, 65535], 65536, 2),
        ([2**31, 2**32 - 1], 2**32, 4),
    ],
)
def test_b10_ids_are_stored_as_wide_as_the_vocabulary(
    tmp_path: Path, ids: list[int], vocab_size: int, token_bytes: int
) -> None:
    folder = write_tokens(tmp_path / "d", np.array(ids), vocab_size)
    manifest = read_manifest(folder)
    assert manifest.token_bytes == token_bytes
    stream = TokenStream(folder, manifest, manifest.splits["train"])
    assert stream.read([0], len(ids)).tolist() == [ids]


@pytest.mark.parametrize(("bad", "vocab_size"), [(65536, 65536), (70000, 256), (-1, 256), (-1, 70001), (2**40, 70001)])
def test_b10_id_outside_the_vocabulary_is_refused_on_write(tmp_path: Path, bad: int, vocab_size: int) -> None:
    writer = SplitWriter(tmp_path, "train", vocab_size, shard_tokens=100)
    writer.append(np.array([0, 1, 2]))
    with pytest.raises(DataError, match=f"token id {bad} after 3 tokens .* 0 to {vocab_size - 1} "):
        writer.append(np.array([5, bad]))


@pytest.mark.parametrize(("keep", "add"), [(-1, b""), (-2, b""), (0, b""), (None, b"\0"), (None, b"\0\0")])
def test_b10_shard_of_another_length_is_refused_with_byte_counts(tmp_path: Path, keep: int | None, add: bytes) -> None:
    folder = write_debruijn(tmp_path / "d", 3)
    shard = folder / "tokens-00001.bin"
    content = shard.read_bytes()
    shard.write_bytes(content[:keep] + add)
    found = len(content[:keep] + add)
    with pytest.raises(DataError, match=rf"tokens-00001\.bin: {found} bytes found, manifest.json says {len(content)}"):
        TokenDataset(folder, 32)


def test_b10_missing_shard_is_refused_with_its_byte_count(tmp_path: Path) -> None:
    folder = write_debruijn(tmp_path / "d", 3)
    (folder / "tokens-00002.bin").unlink()
    with pytest.raises(DataError, match=r"tokens-00002\.bin: No such file.* 43688 bytes"):
        TokenDataset(folder, 32)


def test_changed_content_of_equal_size_is_found_by_verify(tmp_path: Path) -> None:
    folder = write_debruijn(tmp_path / "d", 3)
    assert verify(folder).splits["train"].num_tokens == 65536
    shard = folder / "tokens-00001.bin"
    content = bytearray(shard.read_bytes())
    content[1000] ^= 1
    shard.write_bytes(content)
    check_sizes(folder, read_manifest(folder))
    with pytest.raises(DataError, match=r"tokens-00001\.bin: sha256 .* manifest.json says"):
        verify(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format_version": 99}, "format_version is 99, this program reads 1"),
        ({"splits": {"train": {}}}, "not a manifest"),
        ({"splits": 3}, "not a manifest"),
        ({"surprise": 1}, "not a manifest"),
        ({"token_bytes": 3}, "token_bytes is 3, legal are 2 and 4"),
        ({"token_bytes": 4}, "has 131072 bytes for 65536 tokens of 4 bytes"),
    ],
)
def test_manifest_that_cannot_be_right_is_refused(tmp_path: Path, change: dict[str, object], message: str) -> None:
    folder = write_debruijn(tmp_path / "d")
    path = folder / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(DataError, match=message) as caught:
        TokenDataset(folder, 32)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_folder_without_manifest_is_refused_with_the_command_to_make_one(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "absent"):
        with pytest.raises(DataError, match=r"not a prepared folder.*dmuon_titan\.tools\.prepare"):
            TokenDataset(folder, 32)
    (tmp_path / "manifest.json").write_text('{"format_version": 1, "vocab')
    with pytest.raises(DataError, match="not JSON"):
        TokenDataset(tmp_path, 32)


def test_split_that_is_not_there_is_refused(tmp_path: Path) -> None:
    folder = write_debruijn(tmp_path / "d")
    with pytest.raises(DataError, match="split 'validation' has 0 tokens, one window needs 33 "):
        TokenDataset(folder, 32, split="validation")


def test_validation_split_shares_no_token_with_training(tmp_path: Path) -> None:
    tokens = np.arange(1000)
    folder = write_tokens(tmp_path / "d", tokens, 1000, num_shards=2, validation_tokens=200)
    train, held_out = TokenDataset(folder, 10), TokenDataset(folder, 10, split="validation")
    assert (train.num_tokens, held_out.num_tokens) == (800, 200)
    assert max(int(train[w].label_BS.max()) for w in range(len(train))) == 790
    assert min(int(held_out[w].input_BS.min()) for w in range(len(held_out))) == 800


def test_data_set_can_be_sent_to_a_spawned_worker(tmp_path: Path) -> None:
    dataset = TokenDataset(write_debruijn(tmp_path / "d", 4), 32)
    window = dataset[5]
    message = pickle.dumps(dataset)
    assert len(message) < 10_000  # the maps stay here
    assert pickle.loads(message)[5].input_BS.tolist() == window.input_BS.tolist()


def test_more_shards_than_open_files_are_read(tmp_path: Path) -> None:
    folder = write_debruijn(tmp_path / "d", 600)
    program = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256));"
        "from dmuon_titan.data.dataset import TokenDataset; d = TokenDataset(sys.argv[1], 32);"
        "print(sum(int(d[w].label_BS.sum()) for w in range(len(d))))"
    )
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", program, folder], capture_output=True, text=True, env=environ)
    assert done.returncode == 0, done.stderr
    dataset = TokenDataset(folder, 32)
    assert int(done.stdout) == sum(int(dataset[w].label_BS.sum()) for w in range(len(dataset)))
