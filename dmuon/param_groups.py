"""Parameter groups of the optimizer: the options each kind has, their legal values, and who goes into which group.

Everything here is decided by names, shapes and what the caller wrote, so that all ranks come to the same groups.
"""

from __future__ import annotations

import difflib
import math
import numbers
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from dmuon.hooks import reshard
from dmuon.newton_schulz import BACKENDS, DTYPES
from dmuon.newton_schulz.coefficients import BY_NAME, resolve
from dmuon.selection import clean_name

MUON, ADAMW = "muon", "adamw"
ADJUST_LR_FNS = ("match_rms_adamw", "original")
MOMENTUM_DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True, eq=False)
class NamedParameter:
    """A parameter to be put into a group. names: clean ones, several when tied. kind: who updates it."""

    names: tuple[str, ...]
    param: nn.Parameter
    kind: str

    def matches(self, pattern: str) -> bool:
        return any(fnmatchcase(name, pattern) for name in self.names)


def named_parameters(model: nn.Module, dedicated: Container[nn.Parameter]) -> list[NamedParameter]:
    """What the optimizer updates, in the model's order: dedicated parameters, and all others that are not frozen."""
    reshard(model)  # or the modules may still show what forward and backward use
    names: dict[nn.Parameter, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        if param in dedicated or param.requires_grad:
            names.setdefault(param, []).append(clean_name(name))
    return [NamedParameter(tuple(held), p, MUON if p in dedicated else ADAMW) for p, held in names.items()]


def build_groups(
    named: Sequence[NamedParameter],
    defaults: Mapping[str, Mapping[str, Any]],
    overrides: Sequence[Mapping[str, Any]] | None,
) -> list[dict[str, Any]]:
    """Groups as torch.optim keeps them, with a key "kind" that says who updates their parameters.

    Args:
        named: in the model's order, which is the order inside each group too.
        defaults: options of each kind.
        overrides: what the caller passed as `param_groups`: {"params": pattern or patterns, option: value, ...} each.

    Returns:
        First the Muon group of what no pattern took, there even if empty; then AdamW's, if it has any; then for each
        entry of `overrides` its Muon group and its AdamW group, those that have any.

    Raises:
        ValueError: an entry is malformed, takes nothing, or has an option that nothing it takes can use.
    """
    left = list(named)
    own_groups = []
    for patterns, options, shown in _read(overrides):
        matching = _matching(named, patterns, shown)
        taken = [member for member in left if member in matching]
        if not taken:
            raise ValueError(f"{shown}: all that {', '.join(patterns)} matches was taken by earlier groups: move it up")
        _check_options(options, [defaults[kind] for kind in defaults if _of(kind, taken)], patterns, shown, defaults)
        left = [member for member in left if member not in matching]
        for kind, default in defaults.items():
            if _of(kind, taken):
                own = {key: value for key, value in options.items() if key in default}
                own_groups.append({"params": _of(kind, taken), "kind": kind, **default, **own})
    default_groups = [{"params": _of(kind, left), "kind": kind, **default} for kind, default in defaults.items()]
    return [group for group in default_groups if group["params"] or group["kind"] == MUON] + own_groups


def _of(kind: str, members: Sequence[NamedParameter]) -> list[nn.Parameter]:
    return [member.param for member in members if member.kind == kind]


def check_option(key: str, value: Any, name: str) -> None:
    """Raises ValueError, with `name`, the value and the legal range, if an option can't have this value."""
    is_legal, legal = _LEGAL[key]
    if not is_legal(value):
        raise ValueError(f"{name} = {value!r}: must be {legal}")


def check_momentum_dtype(value: Any) -> None:
    """Raises ValueError unless it is None or one of MOMENTUM_DTYPES. Small gradients vanish in float16."""
    if value is not None and (not isinstance(value, torch.dtype) or value not in MOMENTUM_DTYPES):
        raise ValueError(f"momentum_dtype = {value!r}: must be None, {' or '.join(map(str, MOMENTUM_DTYPES))}")


def _read(overrides: Any) -> list[tuple[list[str], dict[str, Any], str]]:
    """(patterns, options, what to call it in an error) of each entry."""
    if overrides is None:
        return []
    if not isinstance(overrides, (list, tuple)):
        raise ValueError(f"param_groups = {overrides!r}: must be a list of dicts")
    entries = []
    for index, entry in enumerate(overrides):
        shown = f"param_groups[{index}]"
        if not isinstance(entry, Mapping) or "params" not in entry:
            raise ValueError(
                f'{shown} = {entry!r}: must be a dict with the name patterns of its parameters as "params"'
            )
        params = entry["params"]
        patterns = [params] if isinstance(params, str) else params
        if not isinstance(patterns, (list, tuple)) or not patterns or not all(isinstance(p, str) for p in patterns):
            raise ValueError(
                f'{shown}["params"] must be a name pattern or a list of some, such as "layers.*.weight", '
                f"not {type(params).__name__}: dmuon finds the parameters in the model"
            )
        options = {key: value for key, value in entry.items() if key != "params"}
        entries.append((list(patterns), options, shown))
    return entries


def _matching(named: Sequence[NamedParameter], patterns: list[str], shown: str) -> set[NamedParameter]:
    trainable = [member for member in named if member.param.requires_grad]
    for pattern in patterns:
        if not any(member.matches(pattern) for member in trainable):
            names = [name for member in trainable for name in member.names]
            nearest = difflib.get_close_matches(pattern, names, n=3, cutoff=0)
            raise ValueError(
                f"{shown}: {pattern!r} matches no trainable parameter; the nearest names are {', '.join(nearest)}"
            )
    return {member for member in named if any(member.matches(pattern) for pattern in patterns)}


def _check_options(
    options: Mapping[str, Any],
    usable: Sequence[Mapping[str, Any]],
    patterns: list[str],
    shown: str,
    defaults: Mapping[str, Mapping[str, Any]],
) -> None:
    """`usable`: the options of each kind that the entry has parameters of; `defaults`: of each kind there is."""
    legal = list(dict.fromkeys(key for keys in usable for key in keys))
    for key, value in options.items():
        if key not in legal:
            known = any(key in default for default in defaults.values())
            what = f"an option of what {', '.join(patterns)} matches" if known else "an option"
            raise ValueError(f"{shown}: {key!r} is not {what}; those are {', '.join(legal)}")
        check_option(key, value, f"{shown}[{key!r}]")


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)


def _is_rate(value: Any) -> bool:
    return _is_number(value) and value >= 0


def _is_share(value: Any) -> bool:
    return _is_number(value) and 0 <= value < 1


def _are_coefficients(value: Any) -> bool:
    try:
        return all(math.isfinite(number) for triple in resolve(value, 99) for number in triple)
    except (TypeError, ValueError):
        return False


_Check = tuple[Callable[[Any], bool], str]
_RATE: _Check = (_is_rate, "a finite number of at least 0")

# Each option of a group: whether a value is legal, and which are.
_LEGAL: dict[str, _Check] = {
    "lr": _RATE,
    "weight_decay": _RATE,
    "momentum": (_is_share, "a number in [0, 1)"),
    "nesterov": (lambda value: isinstance(value, bool), "True or False"),
    "adjust_lr_fn": (lambda value: value in ADJUST_LR_FNS, " or ".join(ADJUST_LR_FNS)),
    "ns_steps": (
        lambda value: isinstance(value, numbers.Integral) and _is_number(value) and 1 <= int(value) <= 99,
        "a whole number in 1 .. 99",
    ),
    "ns_backend": (lambda value: value in BACKENDS, " or ".join(BACKENDS)),
    "ns_coefficients": (
        _are_coefficients,
        f"one of {', '.join(BY_NAME)}, or a sequence of one (a, b, c) for each step",
    ),
    "ns_dtype": (lambda value: value in ("auto", *DTYPES), f"one of auto, {', '.join(DTYPES)}"),
    "betas": (
        lambda value: isinstance(value, (tuple, list)) and len(value) == 2 and all(_is_share(beta) for beta in value),
        "two numbers in [0, 1)",
    ),
    "eps": _RATE,
}
