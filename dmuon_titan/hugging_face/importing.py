"""A folder that transformers reads becomes a checkpoint that training can start from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dmuon_titan.checkpoint.manifest import DCP, WEIGHTS_ONLY, Manifest, store
from dmuon_titan.config.resolved import versions
from dmuon_titan.hugging_face.stored import write_weights
from dmuon_titan.hugging_face.weights import HuggingFaceWeights, read_size
from models.llama.hf import hf_config
from models.llama.sizes import FLAVORS, LlamaSize, size_to_dict


def import_folder(folder: Path, output: Path) -> None:
    """Writes a folder's weights into the empty folder `output`, as a weights-only checkpoint of step 0.

    float32, logical tensors under our names. One tensor is held at a time, two while one makes room for the next.

    Raises:
        CheckpointError: the folder isn't one of a Llama or is broken, or `output` can't be written.
        OSError: `output` can't be written.
    """
    size = _known(read_size(folder))
    write_weights(output, size.parameter_shapes(), HuggingFaceWeights(folder, size))
    Manifest(
        kind=WEIGHTS_ONLY,
        layout=DCP,
        step=0,
        sequence=0,
        files={path.name: store(path) for path in sorted(output.iterdir())},
        model=_model(size),
        config={},
        run={},
        versions=versions(),
    ).write(output)


def _known(size: LlamaSize) -> LlamaSize:
    """The table's size that has the same config.json, or else the size itself."""
    described = hf_config(size)
    known = (known for flavors in FLAVORS.values() for known in flavors.values())
    return next((candidate for candidate in known if hf_config(candidate) == described), size)


def _model(size: LlamaSize) -> dict[str, Any]:
    names = {known: (name, flavor) for name, flavors in FLAVORS.items() for flavor, known in flavors.items()}
    name, flavor = names.get(size, ("llama", "not in the table"))
    return {"name": name, "flavor": flavor, **size_to_dict(size)}
