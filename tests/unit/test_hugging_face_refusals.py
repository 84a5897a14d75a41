"""A folder that isn't the configured model, whole, is refused in one line that names both sides."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from dmuon_titan.errors import CheckpointError
from dmuon_titan.hugging_face import HuggingFaceWeights, export
from dmuon_titan.hugging_face.files import INDEX, SINGLE
from tests.unit.hugging_face import (
    NUM_BYTES,
    SIZE,
    TIED,
    read_folder,
    save_checkpoint,
)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`SIZE` in four files."""
    base = tmp_path_factory.mktemp("exported")
    export(save_checkpoint(base / "step-7", SIZE), base / "hf", SIZE, max_file_bytes=NUM_BYTES // 3)
    return base / "hf"


@pytest.fixture
def folder(exported: Path, tmp_path: Path) -> Path:
    """A copy of `exported`, to be changed."""
    return Path(shutil.copytree(exported, tmp_path / "hf"))


def change_config(**fields: Any) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return change


def change_tensors(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], object]:
    """Puts all tensors, changed, into one file."""

    def rewrite(folder: Path) -> None:
        tensors = read_folder(folder)
        change(tensors)
        for path in (*folder.glob("*.safetensors"), folder / INDEX):
            path.unlink()
        save_file(tensors, folder / SINGLE)

    return rewrite


def cut(folder: Path) -> None:
    path = folder / "model-00002-of-00004.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


NORM, HEAD = "model.norm.weight", "lm_head.weight"
REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "no folder": (shutil.rmtree, "hf: no such folder"),
    "no config": (lambda f: (f / "config.json").unlink(), r"hf has no config\.json"),
    "broken config": (lambda f: (f / "config.json").write_text("{"), r"config\.json can't be read"),
    "no object": (lambda f: (f / "config.json").write_text("[]"), "isn't a JSON object"),
    "no weights": (lambda f: (f / INDEX).unlink(), r"hf has neither model\.safetensors nor model\.safetensors\.index"),
    "file missing": (
        lambda f: (f / "model-00002-of-00004.safetensors").unlink(),
        r"model-00002-of-00004\.safetensors is missing",
    ),
    "file cut off": (cut, r"model-00002-of-00004\.safetensors is no complete safetensors file"),
    "other widths": (
        change_config(hidden_size=128, num_attention_heads=8),
        r"config\.json describes another model: hidden_size is 128 there, 64 in the model; num_attention_heads is 8 ",
    ),
    "other angles": (change_config(rope_theta=5e5), r"rope_theta is 500000\.0 there, 10000\.0 in the model"),
    "stretched": (
        change_config(
            rope_scaling={
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        ),
        r'rope_scaling is \{"rope_type": "llama3", "factor": 8\.0.* there, null in the model',
    ),
    "other stretching": (
        change_config(rope_scaling={"type": "linear", "factor": 2}),
        "rope_scaling is of the type 'linear'",
    ),
    "tied": (change_config(tie_word_embeddings=True), "tie_word_embeddings is true there, false in the model"),
    "no Llama": (change_config(model_type="mistral"), "model_type is 'mistral', legal is 'llama'"),
    "biases": (change_config(attention_bias=True), "attention_bias is True, legal is False"),
    "other heads": (change_config(head_dim=32), "head_dim is 32, legal is .* = 16"),
    "nonsense": (change_config(num_hidden_layers="3"), "num_hidden_layers is '3', legal is a positive integer"),
    "tensor missing": (change_tensors(lambda t: t.pop(NORM)), r"hf holds another model: it lacks model\.norm\.weight"),
    "tensor left over": (
        change_tensors(lambda t: t.update({"model.norm.bias": torch.ones(64)})),
        r"the model has no model\.norm\.bias",
    ),
    "other shape": (
        change_tensors(lambda t: t.update({HEAD: torch.ones(101, 64)})),
        r"lm_head\.weight is 101 x 64 there, 100 x 64 in the model",
    ),
    "other type": (
        change_tensors(lambda t: t.update({NORM: torch.ones(64, dtype=torch.int8)})),
        r"model\.norm\.weight is of the type I8, legal is F32, BF16, F16",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_folder_of_another_model_or_a_broken_one_is_refused(case: str, folder: Path) -> None:
    change, reason = REFUSED[case]
    HuggingFaceWeights(folder, SIZE)
    change(folder)
    with pytest.raises(CheckpointError, match=reason) as refusal:
        HuggingFaceWeights(folder, SIZE)
    assert "\n" not in str(refusal.value)


def test_a_tied_model_may_list_its_matrix_twice_if_it_is_one(tmp_path: Path) -> None:
    checkpoint = save_checkpoint(tmp_path / "step-7", TIED)
    export(checkpoint, tmp_path / "hf", TIED)
    path, embedding = tmp_path / "hf" / SINGLE, "model.embed_tokens.weight"
    tensors = read_folder(tmp_path / "hf")
    assert HEAD not in tensors
    with pytest.raises(CheckpointError, match="tie_word_embeddings is true there, false in the model"):
        HuggingFaceWeights(tmp_path / "hf", replace(TIED, tie_embeddings=False))
    head = tensors[embedding].clone()
    save_file(tensors | {HEAD: head}, path)
    shape = (TIED.vocab_size, TIED.dim)
    assert torch.equal(HuggingFaceWeights(tmp_path / "hf", TIED)("tok_embeddings.weight", shape, 0, 100), head)
    head[40, 3] += 1
    save_file(tensors | {HEAD: head}, path)
    different = HuggingFaceWeights(tmp_path / "hf", TIED)
    different("tok_embeddings.weight", shape, 0, 40)
    with pytest.raises(
        CheckpointError, match=r"lm_head\.weight and model\.embed_tokens\.weight differ in rows 40 to 49"
    ):
        different("tok_embeddings.weight", shape, 40, 50)


def test_rotary_tables_of_old_files_are_left_out(folder: Path) -> None:
    change_tensors(lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))(folder)
    HuggingFaceWeights(folder, SIZE)
