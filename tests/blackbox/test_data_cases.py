"""Data seen from outside: what the preparation command writes or refuses, and what jobs make of odd folders."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import sentencepiece

from tests.blackbox.conftest import StartJob, losses
from tests.blackbox.job import REPOSITORY, Ended, Job
from tests.debruijn import debruijn_offset, debruijn_tokens, write_debruijn, write_tokens

SEQ_LEN, LOCAL_BATCH = 32, 2
TINY = {
    "training.seq_len": SEQ_LEN,
    "training.local_batch_size": LOCAL_BATCH,
    "training.mixed_precision_param": "float32",
    "training.steps": 5,
    "training.sample_tokens": 0,
    "checkpoint.enable": "false",
    "metrics.enable_tensorboard": "false",
    "metrics.log_freq": 1,
    "debug.trace_batches": "true",
}

Prepare = Callable[..., Ended]
Train = Callable[..., Job]


@pytest.fixture
def prepare(start: StartJob) -> Prepare:
    """`prepare("in.jsonl", "--output", "out")`: the command, run to its end."""
    command = (sys.executable, "-m", "dmuon_titan.tools.prepare")
    return lambda *arguments: start(*map(str, arguments), command=command, PYTHONPATH=str(REPOSITORY)).end(timeout_s=60)


@pytest.fixture
def train(start: StartJob) -> Train:
    """`train(folder, run)`: a started job of 2 ranks and 5 tiny steps."""

    def start_tiny(folder: Path, run: Path, *, num_ranks: int = 2, **overrides: object) -> Job:
        values = {**TINY, "training.dataset_path": folder, "job.dump_folder": run, **overrides}
        return start(*(f"--{name}={value}" for name, value in values.items()), NPROC_PER_NODE=str(num_ranks))

    return start_tiny


def error_of(ended: Ended, status: int) -> str:
    """The one line that says why nothing was done."""
    assert ended.status == status, ended.stderr
    assert "Traceback" not in ended.stderr
    (line,) = [line for line in ended.stderr.splitlines() if "error:" in line]
    assert line.removeprefix("[rank 1] ").startswith("error: ")
    return line


def refusal_of(job: Job, run: Path) -> str:
    """The one line that ends a job with status 3 before its first step."""
    line = error_of(job.end(timeout_s=60), 3)
    assert not (run / "metrics.jsonl").exists() or losses(run) == {}
    return line


def content_of(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def tokens_of(folder: Path, split: str = "train") -> npt.NDArray[np.integer]:
    """The stream of a split, read by its manifest alone."""
    manifest = json.loads((folder / "manifest.json").read_text())
    dtype = f"<u{manifest['token_bytes']}"
    shards = [np.fromfile(folder / shard["file"], dtype) for shard in manifest["splits"][split]["shards"]]
    return np.concatenate([np.empty(0, dtype), *shards])


def documents_of(folder: Path, split: str = "train") -> list[str]:
    """Every document, by the recorded boundaries alone. Each must have exactly its one separator."""
    manifest = json.loads((folder / "manifest.json").read_text())
    ends, tokens = np.fromfile(folder / f"documents-{split}.bin", "<i8").tolist(), tokens_of(folder, split).tolist()
    assert (ends[0], ends[-1]) == (0, len(tokens))
    assert manifest["splits"][split]["num_tokens"] == len(tokens)
    assert manifest["splits"][split]["num_documents"] == len(ends) - 1
    model = sentencepiece.SentencePieceProcessor(str(folder / "tokenizer.model"))
    separator = manifest["boundary"]["id"]
    assert separator == {"eos": model.eos_id(), "bos": model.bos_id()}[manifest["boundary"]["token"]]
    texts = []
    for begin, end in itertools.pairwise(ends):
        ids = tokens[begin:end]
        assert ids.pop(-1 if manifest["boundary"]["token"] == "eos" else 0) == separator
        assert not {model.unk_id(), model.bos_id(), model.eos_id()} & set(ids)
        texts.append(model.decode(ids))
    return texts


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.mark.parametrize("boundary", ["eos", "bos"])
@pytest.mark.parametrize(
    "texts",
    [["", "a", " ", "\n", "b", ""], ["", "", ""], ["a", "", "", "b c  d"], ["</s>", "<s></s>", "", "\r\n"]],
    ids=["b09-empty-ends", "b09-all-empty", "b09-empty-inside", "b09-separators-as-text"],
)
def test_b09_documents_return_by_recorded_boundaries(
    boundary: str, texts: list[str], corpus: Path, tmp_path: Path, prepare: Prepare
) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", texts)
    options = ("--tokenizer", corpus / "tokenizer.model", "--boundary", boundary, "--shard-tokens", "3")
    ended = prepare(source, "--output", "out", *options)
    assert ended.status == 0, ended.stderr
    assert documents_of(tmp_path / "out") == texts


def test_b09_empty_files_and_a_split_of_empty_documents(corpus: Path, tmp_path: Path, prepare: Prepare) -> None:
    (tmp_path / "in").mkdir()
    for name, content in {"a": b"", "b": b"b\n", "c": b"\xef\xbb\xbf", "d": b"d", "e": b"", "f": b""}.items():
        (tmp_path / "in" / f"{name}.txt").write_bytes(content)
    options = ("--tokenizer", corpus / "tokenizer.model", "--validation-fraction", "0.5")
    ended = prepare("in", "--output", "out", *options)
    assert ended.status == 0, ended.stderr
    assert documents_of(tmp_path / "out") == ["", "", ""]
    assert documents_of(tmp_path / "out", "validation") == ["b\n", "d", ""]


@pytest.mark.parametrize(
    ("vocab_size", "token_bytes"),
    [(70001, 4), (65537, 4), (65536, 2), (300, 2)],
    ids=["b10-70001", "b10-65537", "b10-65536", "b10-300"],
)
def test_b10_ids_are_stored_whole(vocab_size: int, token_bytes: int, tmp_path: Path, prepare: Prepare) -> None:
    """A tokenizer of words, so that each id can be asked for by its word; an unknown one is id 0."""
    words = [f"w{i}" for i in range(vocab_size)]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([" ".join(words[i : i + 100]) for i in range(0, vocab_size, 100)]),
        model_prefix=str(tmp_path / "words"),
        model_type="word",
        vocab_size=vocab_size,
        minloglevel=2,
    )
    model = sentencepiece.SentencePieceProcessor(str(tmp_path / "words.model"))
    ids = [0, *sorted({min(wanted, vocab_size - 1) for wanted in (255, 256, 65535, 65536, 70000)})]
    text = " ".join(["unknown", *(model.id_to_piece(i)[1:] for i in ids[1:])])
    ended = prepare(write_jsonl(tmp_path / "in.jsonl", [text]), "--tokenizer", "words.model", "--output", "out")
    assert ended.status == 0, ended.stderr
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert (manifest["vocab_size"], manifest["token_bytes"]) == (vocab_size, token_bytes)
    assert tokens_of(tmp_path / "out").tolist() == [*ids, model.eos_id()]


@pytest.mark.parametrize("vocab_size", [70001, 65537, 2049], ids="b10-{}".format)
def test_b10_vocabulary_larger_than_the_models_is_refused(
    vocab_size: int, tmp_path: Path, refused: Callable[..., list[str]]
) -> None:
    write_tokens(tmp_path / "data", np.arange(100), vocab_size)  # every id would fit
    (line,) = refused("--training.dataset_path", "data")
    assert f'"{tmp_path}/data": its vocabulary of {vocab_size} is larger than the 2048 of ' in line


def change_shard(folder: Path, *, keep: int | None = None, add: bytes = b"") -> Path:
    """The middle one of three shards, cut at `keep` bytes and added to."""
    shard = folder / "tokens-00001.bin"
    shard.write_bytes(shard.read_bytes()[:keep] + add)
    return shard


@pytest.mark.parametrize(
    "change",
    [{"keep": -1}, {"keep": -2}, {"keep": 0}, {"add": b"\0"}, {"add": b"\0\0"}],
    ids=["b10-odd", "b10-a-token-short", "b10-empty", "b10-a-byte-long", "b10-a-token-long"],
)
def test_b10_shard_of_another_length_is_found(change: dict[str, Any], tmp_path: Path, prepare: Prepare) -> None:
    shard = change_shard(write_debruijn(tmp_path / "data", 3, num_symbols=32, num_tokens=999), **change)
    before = content_of(shard.parent)
    line = error_of(prepare("--verify", "data"), 3)
    assert f"data/{shard.name}: {shard.stat().st_size} bytes found, manifest.json says 666" in line
    assert content_of(shard.parent) == before


def test_b10_no_job_starts_on_damaged_shards(tmp_path: Path, train: Train) -> None:
    """Cut inside a token, missing; and 32-bit ids that would be legal if they wrapped to 16 bits."""
    folders = {name: tmp_path / name for name in ("odd", "gone", "wide")}
    for name in ("odd", "gone"):
        write_debruijn(folders[name], 3, num_symbols=32, num_tokens=999)
    change_shard(folders["odd"], keep=-1)
    (folders["gone"] / "tokens-00001.bin").unlink()
    write_wide(folders["wide"], np.where(np.arange(1 + 4 * SEQ_LEN) == 50, 65536 + 5, 5))
    ranks = {"odd": 2, "gone": 1, "wide": 2}
    jobs = {name: train(folders[name], tmp_path / f"run-{name}", num_ranks=ranks[name]) for name in folders}
    lines = {name: refusal_of(job, tmp_path / f"run-{name}") for name, job in jobs.items()}
    shard = "tokens-00001.bin"
    assert f"{folders['odd'] / shard}: 665 bytes found, manifest.json says 666" in lines["odd"]
    assert f"{folders['gone'] / shard}: No such file or directory; manifest.json lists it with 666" in lines["gone"]
    assert f"{folders['wide']}/tokens-00000.bin: token id 65541 at token 50, legal are 0 to 31" in lines["wide"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_tokens": 1025}, "hold 1024 tokens, num_tokens is 1025"),
        ({"num_tokens": 1023}, "hold 1024 tokens, num_tokens is 1023"),
        ({"shards": [{"file": "tokens-00000.bin", "num_tokens": 1024, "sha256": "", "size_bytes": 2047}]}, "2047"),
    ],
    ids=["b10-fewer-than-said", "b10-more-than-said", "b10-odd-bytes"],
)
def test_b10_manifest_that_contradicts_itself(change: dict[str, Any], said: str, tmp_path: Path, train: Train) -> None:
    manifest = write_debruijn(tmp_path / "data", num_symbols=32, num_tokens=1024) / "manifest.json"
    fields = json.loads(manifest.read_text())
    fields["splits"]["train"].update(change)
    manifest.write_text(json.dumps(fields))
    line = refusal_of(train(tmp_path / "data", tmp_path / "run"), tmp_path / "run")
    assert str(manifest) in line
    assert said in line


def write_wide(folder: Path, tokens: npt.NDArray[np.int64]) -> Path:
    """A folder of 32-bit ids whose vocabulary the model has."""
    write_tokens(folder, tokens, vocab_size=70001)
    manifest = folder / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "vocab_size": 32}))
    return folder


@pytest.mark.parametrize(
    ("num_tokens", "seq_len", "split"),
    [
        *((0, 32, "train"), (1, 32, "train"), (31, 32, "train"), (32, 32, "train")),
        *((0, 1, "train"), (1, 1, "train"), (1024, 2048, "train"), (32, 32, "validation"), (0, 32, "validation")),
    ],
    ids=lambda value: f"b11-{value}",
)
def test_b11_less_than_a_window_is_refused(
    num_tokens: int, seq_len: int, split: str, tmp_path: Path, train: Train
) -> None:
    held_out = {"train": 0, "validation": num_tokens}[split]
    length = {"train": num_tokens, "validation": 1024}[split]
    write_tokens(tmp_path / "data", np.arange(length) % 256, 256, num_shards=3, validation_tokens=held_out)
    options = {"training.seq_len": seq_len, "validation.enable": str(split == "validation").lower()}
    job = train(tmp_path / "data", tmp_path / "run", **options)
    line = refusal_of(job, tmp_path / "run")
    assert f"{tmp_path}/data: split '{split}' has {num_tokens} tokens, one window needs {seq_len + 1} " in line
    assert not (tmp_path / "run").exists()


def traces(run: Path) -> list[list[dict[str, Any]]]:
    """What each rank consumed."""
    files = [run / "trace" / f"rank-{rank}.jsonl" for rank in range(len(list((run / "trace").iterdir())))]
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


def offset_of_sample(run: Path, num_symbols: int) -> dict[int, int]:
    """Where in the stream each sample began, over all ranks. No sample may be consumed twice."""
    consumed = [
        (sample, debruijn_offset(first8[0], first8[1], num_symbols))
        for trace in traces(run)
        for record in trace
        for sample, first8 in zip(record["sample_ids"], record["first8"], strict=True)
    ]
    assert len(dict(consumed)) == len(consumed)
    return dict(consumed)


def test_b11_corpora_of_a_few_windows_begin_again(tmp_path: Path, train: Train) -> None:
    """seq_len + 1 and 2 * seq_len + 1 tokens; then 3 windows in shards of one token, whose epochs end inside steps."""
    num_windows_of = {SEQ_LEN + 1: 1, 2 * SEQ_LEN + 1: 2, 3 * SEQ_LEN + 9: 3}
    jobs = {}
    for num_tokens, num_windows in num_windows_of.items():
        folder = write_debruijn(tmp_path / f"data-{num_tokens}", num_tokens if num_windows == 3 else 1, num_tokens)
        jobs[num_tokens] = train(folder, tmp_path / f"run-{num_tokens}")
    for num_tokens, num_windows in num_windows_of.items():
        ended, run = jobs[num_tokens].end(), tmp_path / f"run-{num_tokens}"
        assert (ended.status, ended.stderr) == (0, "")
        assert sorted(losses(run)) == [1, 2, 3, 4, 5]
        step_of_sample = [n // (2 * LOCAL_BATCH) + 1 for n in range(5 * 2 * LOCAL_BATCH)]
        epochs = enumerate(step_of_sample[num_windows::num_windows], start=1)
        notices = [line.partition("INFO - ")[2] for line in ended.stdout.splitlines() if " begins at step " in line]
        assert notices == [f"epoch {epoch} begins at step {step}" for epoch, step in epochs]
        offsets = offset_of_sample(run, num_symbols=256)
        for first in range(0, len(offsets) - num_windows + 1, num_windows):
            epoch = [offsets[first + position] for position in range(num_windows)]
            assert sorted(epoch) == [window * SEQ_LEN for window in range(num_windows)]


def test_b12_any_number_of_shards_on_any_number_of_ranks(tmp_path: Path, train: Train) -> None:
    """31 windows, an epoch and a little more: each is consumed once, and sample n is the same one everywhere.

    The single shard is one of 32-bit ids. The forty of the last job are shorter than a window.
    """
    steps_of = {(1, 2): 8, (3, 2): 8, (2, 4): 4, (40, 1): 16}  # (shards, ranks)
    jobs = {}
    for (num_shards, num_ranks), steps in steps_of.items():
        folder = tmp_path / f"data-{num_shards}"
        if num_shards == 1:
            write_wide(folder, debruijn_tokens(num_symbols=32))
        else:
            write_debruijn(folder, num_shards, num_symbols=32)
        run = tmp_path / f"run-{num_shards}"
        jobs[run] = train(folder, run, num_ranks=num_ranks, **{"training.steps": steps})
    samples: dict[int, int] = {}
    for (run, job), ((_, num_ranks), steps) in zip(jobs.items(), steps_of.items(), strict=True):
        ended = job.end()
        assert (ended.status, ended.stderr) == (0, "")
        assert [[record["step"] for record in trace] for trace in traces(run)] == [[*range(1, steps + 1)]] * num_ranks
        offsets = offset_of_sample(run, num_symbols=32)
        assert sorted(offsets) == list(range(steps * num_ranks * LOCAL_BATCH))
        assert sorted(offsets[sample] for sample in range(31)) == list(range(0, 31 * SEQ_LEN, SEQ_LEN))
        assert ended.stdout.count("epoch 1 begins at step ") == 1
        samples = samples or offsets
        assert all(samples[sample] == offset for sample, offset in offsets.items() if sample in samples)


ODD_TEXTS = [
    *("a\nb", "a\r\nb", "a  b", " a", "\ufeffa", "a\x00b", "\U0001f600", "x</s>y"),
    *("\u2581", "<0x0A><unk>", "a ", "\t\ta", "\ufb01e\u0301", "\r", " \n \n", "\u2028", "\x1a"),
]


def test_b13_odd_text_returns_and_trains(tmp_path: Path, prepare: Prepare, train: Train) -> None:
    """The tokenizer is trained on it, too. A line in the middle is left out and counted; nothing ends there."""
    texts = [*ODD_TEXTS * 10, Path(json.__file__).read_text(), *ODD_TEXTS]
    first, second = write_jsonl(tmp_path / "1.jsonl", texts), write_jsonl(tmp_path / "2.jsonl", texts)
    first.write_bytes(b"\xef\xbb\xbf" + first.read_bytes() + b'{"text": "\xff"}\n')
    inputs = (first, second, "--vocab-size", "400", "--invalid-utf8", "skip")
    ended = prepare(*inputs, "--output", "out")
    assert ended.status == 0, ended.stderr
    assert "out: 1 lines with invalid UTF-8 were left out" in ended.stderr
    assert "does not keep" not in ended.stderr
    assert documents_of(tmp_path / "out") == [*texts, *texts]
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["num_skipped_lines"] == 1
    ended = train(tmp_path / "out", tmp_path / "run", num_ranks=1, **{"training.sample_tokens": 8}).end()
    assert (ended.status, ended.stderr) == (0, "")
    assert sorted(losses(tmp_path / "run")) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("name", "content", "documents"),
    [
        ("a.txt", b"\xef\xbb\xbfa\xef\xbb\xbfb", ["a\ufeffb"]),
        ("a.txt", b"\xef\xbb\xbf\xef\xbb\xbfa", ["\ufeffa"]),
        ("a.jsonl", b'\xef\xbb\xbf{"text": "\xef\xbb\xbfa"}\n{"text": "\\ufeffb"}\r\n', ["\ufeffa", "\ufeffb"]),
        ("a.txt", "a\x00\x1a\r\n \u2028</s>\n\n".encode(), ["a\x00\x1a\r\n \u2028</s>\n\n"]),
    ],
    ids=["b13-bom-inside", "b13-two-boms", "b13-bom-jsonl", "b13-control-characters"],
)
def test_b13_only_a_byte_order_mark_at_the_start_is_dropped(
    name: str, content: bytes, documents: list[str], corpus: Path, tmp_path: Path, prepare: Prepare
) -> None:
    (tmp_path / name).write_bytes(content)
    ended = prepare(name, "--tokenizer", corpus / "tokenizer.model", "--output", "out")
    assert ended.status == 0, ended.stderr
    assert documents_of(tmp_path / "out") == documents


KEEPS = {"model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity"}


@pytest.mark.parametrize(
    "settings",
    [{}, {"model_type": "bpe"}, KEEPS, {"remove_extra_whitespaces": False, "normalization_rule_name": "nfkc"}],
    ids=["b13-defaults", "b13-bpe", "b13-whitespace-removed", "b13-normalised"],
)
def test_b13_a_tokenizer_that_loses_text_warns_once(settings: dict[str, Any], tmp_path: Path, prepare: Prepare) -> None:
    text = Path(json.__file__).read_text()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text.splitlines()),
        model_prefix=str(tmp_path / "lossy"),
        vocab_size=400,
        minloglevel=2,
        **settings,
    )
    ended = prepare(write_jsonl(tmp_path / "in.jsonl", [text]), "--tokenizer", "lossy.model", "--output", "out")
    assert ended.status == 0, ended.stderr
    (warning,) = [line for line in ended.stderr.splitlines() if "does not keep all text" in line]
    assert "returns as" in warning


# Content, what is said, and the documents that are left with --invalid-utf8 skip; None where that changes nothing.
UNREADABLE = {
    "b13-byte.jsonl": (b'{"text":"a"}\n{"text":"\xff"}\n{"text":"b"}', ":2: invalid UTF-8, byte 0xff", ["a", "b"]),
    "b13-byte.txt": (b"one\ntwo\nth\xc3(ree\nfour", ":3: invalid UTF-8, byte 0xc3", ["one\ntwo\nfour"]),
    "b13-cut.txt": (b"ok\nends early \xe2\x82", ":2: invalid UTF-8, byte 0xe2", ["ok\n"]),
    "b13-utf-16.txt": ("ok\n".encode("utf-16"), ":1: invalid UTF-8, byte 0xff", None),
    "b13-surrogate.jsonl": (b'{"text":"a"}\n{"text":"\\ud83d"}', ":2: invalid UTF-8, lone surrogate U+D83D", ["a"]),
    "b13-cut.jsonl": (b'{"text":"a"}\n{"text":"b', ":2: not JSON", None),
    "b13-deep.jsonl": (b'{"text":"a"}\n' + b"[" * 100_000, ":2: not JSON", None),
    "b09-null.jsonl": (b'{"text":null}\n', ":1: 'text' must be a string", None),
    "b09-nothing.jsonl": (b"\n \n", ": no document in 3 bytes", None),
    "b09-nothing.ndjson": (b'{"text":"\xff"}\n', ":1: invalid UTF-8", None),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_unreadable_text_is_refused_or_counted(name: str, corpus: Path, tmp_path: Path, prepare: Prepare) -> None:
    content, said, left = UNREADABLE[name]
    (tmp_path / name).write_bytes(content)
    (tmp_path / "made").mkdir()
    command = (name, "--tokenizer", corpus / "tokenizer.model", "--output", "made/out")
    assert f"{name}{said}" in error_of(prepare(*command), 3)
    assert list((tmp_path / "made").iterdir()) == []
    if left is not None:
        ended = prepare(*command, "--invalid-utf8", "skip")
        assert ended.status == 0, ended.stderr
        assert documents_of(tmp_path / "made" / "out") == left
        assert "1 lines with invalid UTF-8 were left out" in ended.stderr


@pytest.mark.parametrize("special", ["b13-pipe", "/dev/null", "/dev/zero"], ids="b13-{}".format)
def test_b13_what_can_be_read_once_only_is_refused(special: str, tmp_path: Path, prepare: Prepare) -> None:
    """The encoding would find nothing where the tokenizer's training took it all."""
    if not Path(special).is_absolute():
        os.mkfifo(tmp_path / special)
    assert special in error_of(prepare(special, "--output", "out"), 3)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("output", ["earlier", "./in/../earlier/", "in", "in/a.txt"], ids="b13-{}".format)
def test_b13_an_earlier_folder_is_never_written_to(output: str, corpus: Path, tmp_path: Path, prepare: Prepare) -> None:
    shutil.copytree(corpus, tmp_path / "earlier")
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("other text\n")
    before = content_of(tmp_path / "earlier"), content_of(tmp_path / "in")
    line = error_of(prepare("in", "--tokenizer", corpus / "tokenizer.model", "--output", output), 2)
    assert "exists already; name another folder or delete this one" in line
    assert (content_of(tmp_path / "earlier"), content_of(tmp_path / "in")) == before
