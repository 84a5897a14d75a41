"""What two sides say of a model, compared: a difference is one line that names both."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from dmuon_titan.errors import CheckpointError
from models.llama.hf import hf_config
from models.llama.sizes import LlamaSize

_NUM_NAMED = 3
# Bounds what the positions are meant for, and changes neither a weight nor what the model computes.
_NOT_COMPARED = "max_position_embeddings"


def check_tensors(where: str, found: Mapping[str, Sequence[int]], wanted: Mapping[str, Sequence[int]]) -> None:
    """Whether the tensors that are there are those that the model has, in name and shape.

    Raises:
        CheckpointError: some are missing, left over, or of another shape.
    """
    missing = [name for name in wanted if name not in found]
    extra = [name for name in found if name not in wanted]
    mistakes = []
    if missing:
        mistakes.append(f"it lacks {_some(missing)}")
    if extra:
        mistakes.append(f"the model has no {_some(extra)}")
    if not mistakes:
        others = [name for name in wanted if tuple(found[name]) != tuple(wanted[name])]
        mistakes = [f"{name} is {_shape(found[name])} there, {_shape(wanted[name])} in the model" for name in others]
    if mistakes:
        raise CheckpointError(f"{where} holds another model: {_some(mistakes, '; ')}")


def check_size(where: str, found: LlamaSize, wanted: LlamaSize) -> None:
    """Whether two models are the same function of the same weights, field by field of config.json.

    Raises:
        CheckpointError: with the values of each field that differs.
    """
    theirs, ours = hf_config(found), hf_config(wanted)
    differences = [
        f"{field} is {json.dumps(theirs[field])} there, {json.dumps(ours[field])} in the model"
        for field in ours
        if field != _NOT_COMPARED and theirs[field] != ours[field]
    ]
    if differences:
        raise CheckpointError(f"{where} describes another model: {'; '.join(differences)}")


def _some(texts: Sequence[str], separator: str = ", ") -> str:
    more = len(texts) - _NUM_NAMED
    return separator.join(texts[:_NUM_NAMED]) + (f" and {more} more" if more > 0 else "")


def _shape(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))
