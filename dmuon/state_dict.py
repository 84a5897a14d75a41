"""State dicts shaped for torch.distributed.checkpoint: logical tensors under the model's own parameter names.

Each rank contributes what it holds: masters and momentum it owns, whole or, cut by tensor parallelism, as DTensors;
its shards as DTensors. No key says who owned what, so any mesh, or one process, can load them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from dmuon.hooks import find_runtime, reshard
from dmuon.parameter import local
from dmuon.selection import clean_name

MODEL, OPTIMIZER, STATE, PARAM_GROUPS = "model", "optimizer", "state", "param_groups"


def get_state_dict(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """What this rank holds of the model and its optimizer.

    Returns:
        {"model": {name: tensor}, "optimizer": {"state": {name: {slot: tensor}}, "param_groups": {index: {...}}}}.
        Tensors are the live ones: `torch.distributed.checkpoint.load` fills them in place. Take a fresh dict at every
        save.
    """
    reshard(model)
    runtime = find_runtime(model)
    if runtime is not None:
        runtime.wait_publish()
    named = _named_held(model)
    tensors = {name: param.detach() for name, param in named.items()}
    persistent = model.state_dict(keep_vars=True)
    for name, buffer in model.named_buffers():
        if name in persistent:
            tensors[clean_name(name)] = buffer
    result: dict[str, Any] = {MODEL: tensors}
    if optimizer is not None:
        state = {name: dict(optimizer.state[param]) for name, param in named.items() if param in optimizer.state}
        groups = {
            str(index): {key: value for key, value in group.items() if key != "params"}
            for index, group in enumerate(optimizer.param_groups)
        }
        result[OPTIMIZER] = {STATE: state, PARAM_GROUPS: groups}
    return result


@torch.no_grad()
def set_state_dict(model: nn.Module, optimizer: torch.optim.Optimizer | None, state_dict: dict[str, Any]) -> None:
    """Takes over what `get_state_dict` gave and `torch.distributed.checkpoint.load` filled; renews all compute copies.

    Raises:
        ValueError: a tensor that this rank holds is missing from `state_dict`.
    """
    held = get_state_dict(model, optimizer)
    _copy(held[MODEL], state_dict[MODEL], MODEL)
    if optimizer is not None:
        loaded = state_dict[OPTIMIZER]
        for name, slots in held[OPTIMIZER][STATE].items():
            _copy(slots, loaded[STATE].get(name, {}), f"{OPTIMIZER}.{STATE}.{name}")
        for index, group in enumerate(optimizer.param_groups):
            group.update(loaded[PARAM_GROUPS].get(str(index), {}))
    runtime = find_runtime(model)
    if runtime is not None:
        runtime.publish()


def _named_held(model: nn.Module) -> dict[str, nn.Parameter]:
    return {clean_name(name): p for name, p in model.named_parameters() if p.device.type != "meta"}


def _copy(targets: dict[str, Any], sources: dict[str, Any], where: str) -> None:
    missing = sorted(targets.keys() - sources.keys())
    if missing:
        raise ValueError(f"{where} lacks {', '.join(missing)}")
    for name, target in targets.items():
        source = sources[name]
        # What was loaded in place is there already. A DTensor's own data_ptr is always 0.
        if local(source).data_ptr() != local(target).data_ptr():
            target.copy_(source)
