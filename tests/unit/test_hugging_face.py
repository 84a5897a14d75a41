"""Folders for transformers: what it loads of ours computes the same, and what we load of it is the same bit for bit."""

from __future__ import annotations

import json
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from dmuon_titan.errors import CheckpointError
from dmuon_titan.hugging_face import HuggingFaceWeights, export, read_size, weights
from dmuon_titan.hugging_face.files import INDEX, SINGLE, PlannedFile, plan_files
from dmuon_titan.hugging_face.stored import StoredWeights
from models.llama.hf import hf_config, to_hf
from models.llama.sizes import LlamaSize
from tests.unit.hugging_face import (
    NUM_BYTES,
    SIZE,
    assert_equal,
    read_checkpoint,
    read_folder,
    save_checkpoint,
)
from tests.unit.test_llama_hf import SIZES, build_uneven


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("checkpoint") / "step-7", SIZE)


@pytest.fixture(scope="module")
def exported(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`SIZE` in four files."""
    folder = tmp_path_factory.mktemp("exported") / "hf"
    export(checkpoint, folder, SIZE, max_file_bytes=NUM_BYTES // 3)
    return folder


@pytest.mark.hf
@pytest.mark.parametrize("case", SIZES)
def test_transformers_computes_the_same_logits(case: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    size = SIZES[case]
    model = build_uneven(size)
    checkpoint = save_checkpoint(tmp_path / "step-7", size, model)
    export(checkpoint, tmp_path / "hf", size, max_file_bytes=NUM_BYTES // 3, eos_id=2)
    theirs, report = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(report.values()), report
    assert (theirs.dtype, theirs.config.eos_token_id, theirs.config.bos_token_id) == (torch.float32, 2, None)
    tied = theirs.lm_head.weight.data_ptr() == theirs.model.embed_tokens.weight.data_ptr()
    assert tied == size.tie_embeddings
    ids = torch.randint(size.vocab_size, (2, 64), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert (theirs(ids).logits - model(ids)).abs().max() <= 1e-5

    # What it saves is read back as it was, whatever it calls its fields.
    theirs.save_pretrained(tmp_path / "saved")
    assert hf_config(read_size(tmp_path / "saved")) == hf_config(size)
    returned = HuggingFaceWeights(tmp_path / "saved", size)
    for name, param in model.named_parameters():
        assert torch.equal(returned(name, param.shape, 0, len(param)), param), name


def test_files_are_cut_between_tensors() -> None:
    """Wrong if a file exceeds its limit, or a tensor larger than the limit is lost."""
    shapes = {"a": (2, 3), "b": (6,), "c": (100,), "d": (1,), "e": (11,), "f": (1,)}
    assert plan_files(shapes, torch.float32, 1000) == [PlannedFile(SINGLE, shapes)]
    cut = plan_files(shapes, torch.float32, 48)
    assert [list(file.shapes) for file in cut] == [["a", "b"], ["c"], ["d", "e"], ["f"]]
    assert [file.name for file in cut][::3] == ["model-00001-of-00004.safetensors", "model-00004-of-00004.safetensors"]
    assert [list(file.shapes) for file in plan_files(shapes, torch.bfloat16, 48)] == [
        ["a", "b"],
        ["c"],
        ["d", "e", "f"],
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_b06_every_tensor_has_the_dtype_that_was_asked_for(
    dtype: torch.dtype, checkpoint: Path, tmp_path: Path
) -> None:
    export(checkpoint, tmp_path, SIZE, dtype=dtype)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["torch_dtype"] == str(dtype).removeprefix("torch.")
    state = read_checkpoint(checkpoint, SIZE)
    assert_equal(read_folder(tmp_path), {name: tensor.to(dtype) for name, tensor in to_hf(state, SIZE).items()})
    # A rounded folder is read as float32 again.
    returned = HuggingFaceWeights(tmp_path, SIZE)
    assert_equal(
        {name: returned(name, tensor.shape, 0, len(tensor)) for name, tensor in state.items()},
        {name: tensor.to(dtype).float() for name, tensor in state.items()},
    )


def test_several_files_and_their_index(checkpoint: Path, exported: Path) -> None:
    state = read_checkpoint(checkpoint, SIZE)
    assert_equal(read_folder(exported), to_hf(state, SIZE))
    index = json.loads((exported / INDEX).read_text())
    assert index["metadata"]["total_size"] == NUM_BYTES
    files = sorted(path.name for path in exported.glob("*.safetensors"))
    assert len(files) > 2
    assert sorted(set(index["weight_map"].values())) == files
    for name, file in index["weight_map"].items():
        with safe_open(exported / file, "pt") as opened:
            assert name in opened.keys()  # noqa: SIM118


def test_ranks_write_together_what_one_writes(checkpoint: Path, exported: Path, tmp_path: Path) -> None:
    for rank in (2, 0, 1):
        export(checkpoint, tmp_path, SIZE, max_file_bytes=NUM_BYTES // 3, rank=rank, world=3)
    contents = [{path.name: path.read_bytes() for path in folder.iterdir()} for folder in (tmp_path, exported)]
    assert contents[0] == contents[1]


def test_a_value_beyond_float16_is_refused(tmp_path: Path) -> None:
    model = build_uneven(SIZE)
    model.layers[1].feed_forward.w2.weight.data[3, 4] = 7e4
    checkpoint = save_checkpoint(tmp_path / "step-7", SIZE, model)
    with pytest.raises(CheckpointError, match=r"layers\.1\.feed_forward\.w2\.weight has values that torch\.float16"):
        export(checkpoint, tmp_path / "hf", SIZE, dtype=torch.float16)
    assert not (tmp_path / "hf" / "config.json").exists()


@pytest.mark.parametrize(
    ("size", "reason"),
    [
        (replace(SIZE, num_layers=4), r"it lacks layers\.3\.attention\.wq\.weight, .* and 6 more"),
        (replace(SIZE, tie_embeddings=True, num_layers=2), r"the model has no layers\.2\.attention"),
        (replace(SIZE, num_kv_heads=1), r"layers\.0\.attention\.wk\.weight is 32 x 64 there, 16 x 64 in the model"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(
    size: LlamaSize, reason: str, checkpoint: Path, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=f"step-7 holds another model: .*{reason}") as refusal:
        export(checkpoint, tmp_path / "hf", size)
    assert "\n" not in str(refusal.value)
    assert not (tmp_path / "hf").exists()


def test_export_holds_one_tensor(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if a file, or the whole model, is gathered before it is written."""
    alive: list[weakref.ref[Tensor]] = []

    read = StoredWeights.read

    def counted(self: StoredWeights, name: str) -> Tensor:
        assert not any(tensor() is not None for tensor in alive)
        tensor = read(self, name)
        alive.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(StoredWeights, "read", counted)
    export(checkpoint, tmp_path, SIZE)
    assert len(alive) == len(SIZE.parameter_shapes())


@pytest.mark.parametrize("case", ["grouped", "one kv head", "tied"])
def test_any_rows_are_those_of_the_whole(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing else is read, but the rest of the heads that q and k rows lie in."""
    size = SIZES[case]
    state = read_checkpoint(save_checkpoint(tmp_path / "step-7", size), size)
    export(tmp_path / "step-7", tmp_path / "hf", size)
    read = []

    class Counted:
        """A file's tensor that notes which rows are read of it."""

        def __init__(self, rows: Any) -> None:
            self.get_shape, self.get_dtype, self.rows = rows.get_shape, rows.get_dtype, rows

        def __getitem__(self, rows: slice) -> Tensor:
            read.append(rows)
            return self.rows[rows]

    opened = weights._open(tmp_path / "hf")
    monkeypatch.setattr(weights, "_open", lambda folder: {name: Counted(rows) for name, rows in opened.items()})
    init = HuggingFaceWeights(tmp_path / "hf", size)
    assert not read
    generator = torch.Generator().manual_seed(0)
    for name, tensor in state.items():
        for _ in range(6):
            start, stop = sorted(torch.randint(len(tensor) + 1, (2,), generator=generator).tolist())
            rows = init(name, tensor.shape, start, stop)
            assert rows.dtype == torch.float32
            assert torch.equal(rows, tensor[start:stop]), (name, start, stop)
            group = size.head_dim if name.endswith(("wq.weight", "wk.weight")) else 1
            assert read.pop() == slice(start - start % group, stop + -stop % group)
            assert not read
