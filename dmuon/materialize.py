"""Gives a model from the meta device its values, each rank drawing only what it keeps."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dmuon.hooks import find_runtime
from dmuon.parameter import local
from dmuon.selection import clean_name
from dmuon.torch_internals import local_shard

RowInit = Callable[[str, torch.Size, int, int], Tensor]
"""(name, logical shape, start, stop) -> rows start .. stop - 1 of dim 0. Must not depend on the rank."""


@torch.no_grad()
def materialize(model: nn.Module, init: RowInit, device: torch.device | str) -> None:
    """Fills masters, FSDP2 shards and plain parameters with what `init` says. Call it after `fully_shard`.

    Args:
        model: its parameters may lie on the meta device; buffers are the model's own business.
        init: the value of any rows of any parameter, as a function of its arguments alone.
        device: where the parameters shall live.
    """
    runtime = find_runtime(model)
    dedicated = {}
    if runtime is not None:
        for unit in runtime.units:
            for param in unit.params:
                dedicated[param.master] = param
                if param.master.device.type != "meta":
                    local(param.master).copy_(_local_values(param.master, param.name, init))
    replaced: dict[nn.Parameter, nn.Parameter] = {}
    for module_name, module in model.named_modules():
        for attribute, held in list(module.named_parameters(recurse=False)):
            if held in dedicated:
                continue
            if held not in replaced:
                name = clean_name(f"{module_name}.{attribute}" if module_name else attribute)
                replaced[held] = _filled(held, name, init, torch.device(device))
            module.register_parameter(attribute, replaced[held])
    if runtime is not None:
        runtime.publish()


def _filled(param: nn.Parameter, name: str, init: RowInit, device: torch.device) -> nn.Parameter:
    values = _local_values(param, name, init).to(device, param.dtype, copy=True)
    if isinstance(param, DTensor):
        values = DTensor.from_local(
            values.contiguous(),
            param.device_mesh,
            param.placements,
            run_check=False,
            shape=param.shape,
            stride=param.stride(),
        )
    return nn.Parameter(values, requires_grad=param.requires_grad)


def _local_values(param: Tensor, name: str, init: RowInit) -> Tensor:
    """What `init` says of this rank's part of a parameter, or of all of it."""
    if not isinstance(param, DTensor):
        return init(name, param.shape, 0, param.shape[0])
    shape, offset = local_shard(param)
    rows = init(name, param.shape, offset[0], offset[0] + shape[0]) if shape[0] else torch.empty(shape)
    for dim in range(1, rows.ndim):
        rows = rows.narrow(dim, offset[dim], shape[dim])
    return rows
