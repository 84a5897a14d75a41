"""Optimizers that `benchmarks.step_time` compares with: Muon as one has it without owners."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import _muon as torch_muon

from dmuon.muon import lr_scale
from dmuon_titan.trainer import Trainer


class NaiveMuon(torch.optim.Optimizer):
    """Gathers and orthogonalises each gradient on every rank, by torch.optim.Muon's iteration; AdamW for the rest."""

    def __init__(self, trainer: Trainer) -> None:
        self.matrices, others = matrices_and_others(trainer.model)
        super().__init__(self.matrices, {"lr": 3e-4, "momentum": 0.95, "weight_decay": 0.1})
        self.adamw = torch.optim.AdamW(others, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
        for param in self.matrices:
            self.state[param]["momentum_buffer"] = torch.zeros_like(param)

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self.adamw.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        options = self.param_groups[0]
        for param in self.matrices:
            assert param.grad is not None
            momentum = self.state[param]["momentum_buffer"]
            momentum.lerp_(param.grad, 1 - options["momentum"])
            update = param.grad.lerp(momentum, options["momentum"])
            whole = update.full_tensor() if isinstance(update, DTensor) else update
            coefficients = (torch_muon.DEFAULT_A, torch_muon.DEFAULT_B, torch_muon.DEFAULT_C)
            orthogonal = torch_muon._zeropower_via_newtonschulz(whole, coefficients, 5, 1e-7).to(param.dtype)
            if isinstance(param, DTensor):
                orthogonal = distribute_tensor(orthogonal, param.device_mesh, param.placements, src_data_rank=None)
            param.mul_(1 - options["lr"] * options["weight_decay"])
            param.add_(orthogonal, alpha=-options["lr"] * lr_scale("match_rms_adamw", param.shape))
        self.adamw.step()


class TorchMuon(torch.optim.Optimizer):
    """torch.optim.Muon on the matrices, torch.optim.AdamW on the rest."""

    def __init__(self, trainer: Trainer) -> None:
        matrices, others = matrices_and_others(trainer.model)
        super().__init__(matrices, {"lr": 3e-4})
        self.muon = torch.optim.Muon(matrices, lr=3e-4, adjust_lr_fn="match_rms_adamw")
        self.adamw = torch.optim.AdamW(others, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.muon.zero_grad(set_to_none)
        self.adamw.zero_grad(set_to_none)

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.muon.step()
        self.adamw.step()


def matrices_and_others(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """What dmuon would dedicate, and the rest."""
    named = list(model.named_parameters())
    matrices = [param for name, param in named if name.startswith("layers.") and param.ndim == 2]
    return matrices, [param for name, param in named if not (name.startswith("layers.") and param.ndim == 2)]
