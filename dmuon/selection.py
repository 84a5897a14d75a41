"""Which parameters are dedicated, at which module each is filled and freed, and which hold several fused matrices."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from torch import nn

Predicate = Callable[[str, nn.Parameter], bool]
BoundaryPredicate = Callable[[nn.Module], bool]
Splits = Mapping[str, Sequence[int]]

_BLOCK = re.compile(r"(?:^|\.)(?:layers|blocks)\.\d+(?=\.|$)")
_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:_checkpoint_wrapped_module|_orig_mod)\.")


@dataclass
class Candidate:
    """A distinct parameter, by its first name, and everywhere it is held.

    Attributes:
        places: (module, attribute) of each holder; several when tied.
        names: the parameter's clean name at each place.
        boundaries: name of the boundary module at each place, without repetition; shorter than `names` where some
            place has none.
    """

    param: nn.Parameter
    places: list[tuple[nn.Module, str]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    boundaries: tuple[str, ...] = ()
    has_boundary: bool = True

    @property
    def name(self) -> str:
        return self.names[0]


def clean_name(name: str) -> str:
    """A module's or parameter's name without what activation checkpointing and torch.compile wrap around modules."""
    return _WRAPPERS.sub("", name + ".")[:-1]


def candidates(model: nn.Module, boundary_predicate: BoundaryPredicate | None) -> list[Candidate]:
    """Every distinct parameter of the model, with its hook boundaries."""
    found: dict[nn.Parameter, Candidate] = {}
    for module_name, module in model.named_modules():
        for attribute, param in module.named_parameters(recurse=False):
            candidate = found.setdefault(param, Candidate(param))
            candidate.places.append((module, attribute))
            candidate.names.append(clean_name(f"{module_name}.{attribute}" if module_name else attribute))
    holds = None
    if boundary_predicate is not None:
        holds = {clean_name(name) for name, module in model.named_modules() if boundary_predicate(module)}
    for candidate in found.values():
        boundaries = [_boundary(name, holds) for name in candidate.names]
        candidate.has_boundary = None not in boundaries
        candidate.boundaries = tuple(dict.fromkeys(b for b in boundaries if b is not None))
    return list(found.values())


def _boundary(name: str, holds: set[str] | None) -> str | None:
    """Default: the innermost `layers.N` or `blocks.N`, prefix included. Else the lowest ancestor in `holds`."""
    if holds is None:
        matches = list(_BLOCK.finditer(name))
        return name[: matches[-1].end()] if matches else None
    ancestor = name
    while ancestor:
        ancestor = ancestor.rpartition(".")[0]
        if ancestor in holds:
            return ancestor
    return None


def select(
    candidates: Iterable[Candidate], predicate: Predicate | None, strict: bool
) -> tuple[list[Candidate], dict[str, tuple[int, ...]]]:
    """The parameters to dedicate, and name and shape of all others.

    Raises:
        ValueError: nothing was chosen, or something that is not floating-point, or something without a boundary.
    """
    chosen: list[Candidate] = []
    symmetric: dict[str, tuple[int, ...]] = {}
    for candidate in candidates:
        if _is_matrix(candidate.param) and _is_wanted(candidate, predicate):
            chosen.append(candidate)
        else:
            symmetric[candidate.name] = tuple(candidate.param.shape)
    if not chosen:
        raise ValueError(
            "no parameter was chosen: the predicate must hold for at least one trainable 2-D or 3-D parameter whose "
            "last two dims are above 1"
            if predicate is not None
            else "no trainable 2-D weight lies inside layers.N or blocks.N, or inside what hook_boundary_predicate "
            "accepts: pass predicate= and hook_boundary_predicate="
        )
    without = [candidate.name for candidate in chosen if not candidate.has_boundary]
    if strict and without:
        raise ValueError(
            f"no hook boundary for {', '.join(without)}: pass hook_boundary_predicate=, or hook_boundary_strict=False "
            "to fill and free each of them at its own module"
        )
    for candidate in chosen:
        if not candidate.has_boundary:
            own = [name.rpartition(".")[0] for name in candidate.names]
            candidate.boundaries = tuple(dict.fromkeys(own))
    return chosen, symmetric


def _is_matrix(param: nn.Parameter) -> bool:
    return param.ndim in (2, 3) and min(param.shape[-2:]) > 1


def _is_wanted(candidate: Candidate, predicate: Predicate | None) -> bool:
    param = candidate.param
    if predicate is None:
        embedding = any(isinstance(module, nn.Embedding) for module, _ in candidate.places)
        return param.requires_grad and param.ndim == 2 and bool(candidate.boundaries) and not embedding
    if not predicate(candidate.name, param):
        return False
    if not param.is_floating_point():
        raise ValueError(f"{candidate.name} has dtype {param.dtype}: only floating-point parameters can be dedicated")
    return param.requires_grad


def resolve_splits(chosen: Sequence[Candidate], splits: Splits | None) -> dict[str, tuple[int, ...]]:
    """Row sizes of each fused parameter, by name.

    Raises:
        ValueError: a pattern matches no dedicated matrix, or sizes do not sum to its rows.
    """
    resolved: dict[str, tuple[int, ...]] = {}
    for pattern, sizes in (splits or {}).items():
        matching = [candidate for candidate in chosen if fnmatchcase(candidate.name, pattern)]
        if not matching:
            raise ValueError(f"split {pattern!r} matches no dedicated parameter: names look like {chosen[0].name}")
        for candidate in matching:
            shape = tuple(candidate.param.shape)
            if len(shape) != 2 or sum(sizes) != shape[0] or min(sizes) < 1:
                raise ValueError(
                    f"split {tuple(sizes)} of {candidate.name}, shape {shape}: sizes must be positive and sum to the "
                    "rows, dim 0, of a 2-D parameter"
                )
            resolved[candidate.name] = tuple(sizes)
    return resolved
