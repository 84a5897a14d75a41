"""The converter: there and back without a bit changed, and either everything or nothing."""

from __future__ import annotations

import json
import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file
from torch import Tensor

from dmuon_titan.checkpoint.manifest import DCP, HUGGING_FACE, WEIGHTS_ONLY, read_manifest, store
from dmuon_titan.errors import ExitStatus
from dmuon_titan.hugging_face import HuggingFaceWeights, export, read_size
from dmuon_titan.hugging_face.files import SINGLE
from dmuon_titan.tools.convert import main
from models.llama.hf import hf_config, to_hf
from models.llama.sizes import size_from_dict
from tests.unit.hugging_face import (
    NUM_BYTES,
    SIZE,
    TIED,
    assert_equal,
    read_checkpoint,
    read_folder,
    save_checkpoint,
    write_manifest,
)
from tests.unit.test_llama_hf import build_uneven


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("checkpoint") / "step-7", SIZE)


@pytest.fixture(scope="module")
def exported(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`SIZE` in four files."""
    folder = tmp_path_factory.mktemp("exported") / "hf"
    export(checkpoint, folder, SIZE, max_file_bytes=NUM_BYTES // 3)
    return folder


def test_a_folder_of_transformers_returns_bit_for_bit(tmp_path: Path) -> None:
    """HF -> ours -> HF, in several files, tied and not, tokenizer and all: only names and places change on the way."""
    for name, size in {"untied": SIZE, "tied": TIED}.items():
        base = tmp_path / name
        theirs = to_hf(dict(build_uneven(size).named_parameters()), size)
        base.mkdir()
        source = base / "source"
        source.mkdir()
        save_file({name: tensor.detach().contiguous() for name, tensor in theirs.items()}, source / SINGLE)
        (source / "config.json").write_text(json.dumps(hf_config(size)))
        (source / "tokenizer.json").write_text("{}")
        assert main(["from-hf", str(source), str(base / "start")]) == ExitStatus.FINISHED
        assert main(["to-hf", str(base / "start"), str(base / "returned"), "--max-file-size", "64KB"]) == 0
        assert_equal(read_folder(base / "returned"), {name: tensor.detach() for name, tensor in theirs.items()})
        assert read_size(base / "returned") == read_size(source)
        assert len(list((base / "returned").glob("model-*"))) > 2
        assert (base / "returned" / "tokenizer.json").read_text() == "{}"


def test_a_checkpoint_returns_bit_for_bit(checkpoint: Path, exported: Path, tmp_path: Path) -> None:
    """Ours -> HF -> ours: what training starts from is what was saved, complete, and of the same model."""
    assert main(["from-hf", str(exported), str(tmp_path / "start")]) == 0
    assert_equal(read_checkpoint(tmp_path / "start", SIZE), read_checkpoint(checkpoint, SIZE))
    manifest = read_manifest(tmp_path / "start")
    assert (manifest.kind, manifest.layout, manifest.step) == (WEIGHTS_ONLY, DCP, 0)
    assert manifest.files == {p.name: store(p) for p in (tmp_path / "start").iterdir() if p.name != "manifest.json"}
    assert size_from_dict(manifest.model).parameter_shapes() == SIZE.parameter_shapes()


def test_import_holds_two_tensors_at_most(exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[weakref.ref[Tensor]] = []
    most = 0
    draw = HuggingFaceWeights.__call__

    def counted(self: HuggingFaceWeights, *args: Any) -> Tensor:
        nonlocal most
        tensor = draw(self, *args)
        alive.append(weakref.ref(tensor))
        most = max(most, sum(tensor() is not None for tensor in alive))
        return tensor

    monkeypatch.setattr(HuggingFaceWeights, "__call__", counted)
    assert main(["from-hf", str(exported), str(tmp_path / "start")]) == 0
    assert len(alive) == len(SIZE.parameter_shapes())
    assert most <= 2


@pytest.mark.parametrize(
    ("arguments", "status", "reason"),
    [
        (["to-hf", "CHECKPOINT", "HERE"], 2, "here: exists already; name another folder or delete this one"),
        (["from-hf", "HF", "HERE"], 2, "here: exists already"),
        (["to-hf", "CHECKPOINT", "CUT_OFF"], 2, "cut.tmp: a conversion is writing it or was cut off there"),
        (["to-hf", "CHECKPOINT", "OUT", "--max-file-size", "5 G"], 2, "--max-file-size is 5 G, legal is"),
        (["to-hf", "HERE", "OUT"], 4, "has no manifest.json"),
        (["from-hf", "HERE", "OUT"], 4, "has no config.json: it is no Hugging Face folder"),
        (["to-hf", "SHORT", "OUT"], 4, "has 3 bytes instead of"),
        (["to-hf", "FLIPPED", "OUT"], 4, "has other contents than were saved"),
        (["to-hf", "NAMELESS", "OUT"], 4, "has no legal model: a size lacks dim"),
        (["to-hf", "EXPORTED", "OUT"], 4, "is of the layout 'hugging-face', legal is 'torch.distributed.checkpoint'"),
        (["to-hf", "CHECKPOINT", "OUT", "--tokenizer", "HERE/none"], 3, "a sentencepiece model is needed"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_are_one_line_and_leave_nothing(
    arguments: list[str],
    status: int,
    reason: str,
    checkpoint: Path,
    exported: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folders = {"CHECKPOINT": checkpoint, "HF": exported, "OUT": tmp_path / "out", "CUT_OFF": tmp_path / "cut"}
    folders["HERE"] = tmp_path / "here"
    folders["HERE"].mkdir()
    (tmp_path / "cut.tmp").mkdir()
    for name in ("SHORT", "FLIPPED", "NAMELESS", "EXPORTED"):
        folders[name] = Path(shutil.copytree(checkpoint, tmp_path / name.lower()))
    data = "__0_0.distcp"
    (folders["SHORT"] / data).write_text("abc")
    contents = bytearray((checkpoint / data).read_bytes())
    contents[len(contents) // 2] ^= 1
    (folders["FLIPPED"] / data).write_bytes(contents)
    write_manifest(folders["NAMELESS"], SIZE, model={"name": "llama3"})
    write_manifest(folders["EXPORTED"], SIZE, layout=HUGGING_FACE)
    before = sorted(tmp_path.iterdir())

    assert main([str(folders.get(word, word)) for word in arguments]) == status
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert reason in error
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("command", ["to-hf", "from-hf"])
def test_a_conversion_that_breaks_off_leaves_nothing(
    command: str, checkpoint: Path, exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also before it breaks off, nothing looks complete: the folder has its name only once everything is in it."""

    def interrupted(*args: Any) -> None:
        assert not (tmp_path / "out").exists()
        assert not (tmp_path / "out.tmp" / "config.json").exists()
        assert not (tmp_path / "out.tmp" / "manifest.json").exists()
        assert any((tmp_path / "out.tmp").iterdir())
        raise KeyboardInterrupt

    last = "exporting.hf_config" if command == "to-hf" else "importing.versions"
    monkeypatch.setattr(f"dmuon_titan.hugging_face.{last}", interrupted)
    with pytest.raises(KeyboardInterrupt):
        main([command, str(checkpoint if command == "to-hf" else exported), str(tmp_path / "out")])
    assert not list(tmp_path.iterdir())
