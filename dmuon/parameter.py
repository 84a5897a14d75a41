"""One dedicated parameter: its shapes, its owner, and the two nn.Parameters that stand for it.

Outside forward and backward the module holds `master`: float32 on the owner, a meta tensor of the logical shape
elsewhere. Inside, it holds `compute`: a view into the unit's buffer, in `param_dtype`, the leaf that autograd sees.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from dmuon.assignment import Owner
from dmuon.torch_internals import mark_dedicated


@dataclass(eq=False)
class DedicatedParameter:
    """A matrix, a stack of matrices over dim 0, or several matrices fused along dim 0, with one owner.

    Attributes:
        name: the parameter's name in the model, clean of wrappers.
        places: every (module, attribute) that holds it; several when tied.
        logical_shape: shape of the whole parameter. `local_shape`: what this rank's modules compute with; the two
            differ under tensor parallelism only.
        dtype: what the parameter had before it was dedicated.
        split: rows of each fused matrix, summing to dim 0; empty if it is not fused.
        offset: first element in its section's buffer.
    """

    name: str
    places: list[tuple[nn.Module, str]]
    logical_shape: torch.Size
    local_shape: torch.Size
    owner: Owner
    dtype: torch.dtype = torch.float32
    split: tuple[int, ...] = ()
    offset: int = 0
    master: nn.Parameter = field(init=False)
    compute: nn.Parameter = field(init=False)

    @property
    def numel(self) -> int:
        return self.local_shape.numel()

    def set_master(self, data: Tensor | None) -> None:
        """`data`: float32 storage on the owner, None elsewhere."""
        if data is None:
            data = torch.empty(self.logical_shape, dtype=torch.float32, device="meta")
        self.master = nn.Parameter(data)
        mark_dedicated(self.master)

    def view(self, buffer: Tensor) -> Tensor:
        """This parameter's part of a flat buffer of its section."""
        return buffer[self.offset : self.offset + self.numel].view(self.local_shape)

    def matrices(self, tensor: Tensor) -> list[Tensor]:
        """A tensor of the logical shape as batches of the matrices to orthogonalise, each a [B, M, N] view."""
        if tensor.ndim == 3:
            return [tensor]
        return [piece.unsqueeze(0) for piece in tensor.split(self.split)] if self.split else [tensor.unsqueeze(0)]

    def register(self, param: nn.Parameter) -> None:
        """Makes `param` what the modules hold under this name."""
        for module, attribute in self.places:
            # Not setattr: registration checks cost more than the swap, and this runs for each unit and step.
            module._parameters[attribute] = param

    @property
    def is_registered(self) -> bool:
        """Whether every place still holds the master."""
        return all(module._parameters.get(attribute) is self.master for module, attribute in self.places)
