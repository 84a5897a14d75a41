"""In which dtypes a unit computes and reduces: as asked, or as the `fully_shard` module around it does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from dmuon.parameter import DedicatedParameter
from dmuon.selection import clean_name
from dmuon.torch_internals import mixed_precision_of


def policies(model: nn.Module) -> dict[str, MixedPrecisionPolicy]:
    """The mixed-precision policy of every `fully_shard` module, by the module's clean name; the root's is ""."""
    found: dict[str, MixedPrecisionPolicy] = {}
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            found[clean_name(name)] = mixed_precision_of(module)
    return found


def unit_dtypes(
    params: Iterable[DedicatedParameter],
    by_module: Mapping[str, MixedPrecisionPolicy],
    param_dtype: torch.dtype | None,
    reduce_dtype: torch.dtype | None,
) -> tuple[torch.dtype, torch.dtype]:
    """(param_dtype, reduce_dtype) of the unit that holds `params`.

    Raises:
        ValueError: the arguments and the policy, or two parameters of the unit, ask for different dtypes.
    """
    found: dict[tuple[torch.dtype, torch.dtype], str] = {}
    for param in params:
        where, policy = _enclosing(param.name, by_module)
        compute = _agreed("param_dtype", param_dtype, policy.param_dtype, param.name, where) or param.dtype
        reduce = _agreed("reduce_dtype", reduce_dtype, policy.reduce_dtype, param.name, where) or compute
        found.setdefault((compute, reduce), param.name)
    if len(found) > 1:
        (first, name), (second, other), *_ = found.items()
        raise ValueError(
            f"{name} would compute in {first[0]} and reduce in {first[1]}, {other} in {second[0]} and {second[1]}: "
            "parameters of one hook boundary share their dtypes; give their fully_shard modules one mp_policy, or "
            "pass hook_boundary_predicate= to part them"
        )
    return next(iter(found))


def _enclosing(name: str, by_module: Mapping[str, MixedPrecisionPolicy]) -> tuple[str, MixedPrecisionPolicy]:
    """The lowest `fully_shard` module around a parameter, and its policy; an empty policy if there is none."""
    ancestor = name
    while ancestor:
        ancestor = ancestor.rpartition(".")[0]
        if ancestor in by_module:
            return ancestor or "the root module", by_module[ancestor]
    return "", MixedPrecisionPolicy()


def _agreed(
    what: str, asked: torch.dtype | None, policy: torch.dtype | None, name: str, where: str
) -> torch.dtype | None:
    if asked is not None and policy is not None and asked != policy:
        raise ValueError(
            f"{name}: {what} = {asked} was passed to dedicate_params, but fully_shard of {where} has {what} = {policy}"
            ": pass the same to both, or leave dedicate_params to adopt the policy"
        )
    return policy if asked is None else asked
