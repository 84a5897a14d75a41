"""Triton's passes on slices of cut matrices against torch operations: in Triton's interpreter, on two gloo ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from dmuon.collectives import Axis
from dmuon.newton_schulz.planning import has_triton
from dmuon.slices import FusedSlices, Part, SliceUpdates
from dmuon.tensor_parallel import EXCHANGE, GRAM, Layout
from dmuon.tensor_parallel.plan import Item

INTERPRETS = os.environ.get("TRITON_INTERPRET") == "1"
LAYOUTS = [
    *2 * [Layout((48, 32), 0)],
    Layout((32, 48), 1),
    Layout((24, 40), 0),
    Layout((3, 24, 40), 1),  # a stack
    Layout((5, 40), 0, (5, 0)),  # nothing on the last rank
    Layout((16, 24)),  # the same on every rank
    Layout((4, 16, 24), 0),  # each rank has matrices of its own
]
GROUP: dict[str, Any] = {
    "lr": 0.1,
    "weight_decay": 0.2,
    "momentum": 0.9,
    "nesterov": True,
    "adjust_lr_fn": "original",
    "ns_steps": 5,
    "ns_backend": "gram",
    "ns_coefficients": "polar_express",
    "ns_dtype": "float16",
}


@pytest.mark.skipif(INTERPRETS, reason="the tests below run themselves")
@pytest.mark.skipif(not has_triton(), reason="Triton is not installed")
def test_in_the_interpreter() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    result = subprocess.run(command, env=environment, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert " passed" in result.stdout


class Known(SliceUpdates):
    """Of parts that a test has made, without parameters."""

    parts: list[Part]

    def _parts(self, *_: Any) -> list[Part]:
        return self.parts


def updated(kernel: str, strategy: str, nesterov: bool, momentum_dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """Masters and momenta after two updates."""
    axis = Axis(init_device_mesh("cpu", (dist.get_world_size(),)))
    updates = Known(axis, strategy, kernel)
    generator = torch.Generator().manual_seed(0)
    updates.parts = []
    for layout in LAYOUTS:
        whole = torch.randn(3, *layout.shape, generator=generator)
        if layout.sharded_dim is not None:
            whole = whole.split(layout.local_sizes(axis.size), layout.sharded_dim + 1)[axis.index]
        master, grad, momentum = (part.clone() for part in whole)
        updates.parts.append(Part(layout, master, grad, momentum.to(momentum_dtype)))
    assert updates._fuses(updates.parts, torch.float16) == (kernel == "triton")
    for _ in range(2):
        updates([(None, None)], {**GROUP, "nesterov": nesterov}, lambda *_: 1.0)  # type: ignore[list-item]
    return [(part.master, part.momentum) for part in updates.parts]


@pytest.mark.skipif(not INTERPRETS, reason="runs in a process of its own")
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("momentum_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("strategy", [EXCHANGE, GRAM])
def test_passes_equal_torch_operations(
    ranks: Callable[..., Any], strategy: str, momentum_dtype: torch.dtype, nesterov: bool
) -> None:
    for fused, plain in zip(
        ranks(2).run(updated, "triton", strategy, nesterov, momentum_dtype),
        ranks(2).run(updated, "torch", strategy, nesterov, momentum_dtype),
        strict=True,
    ):
        for (master, momentum), (expected, expected_momentum) in zip(fused, plain, strict=True):
            # Triton's interpreter cuts off where a GPU rounds.
            tolerance = 1e-6 if momentum_dtype == torch.float32 else 2**-6
            torch.testing.assert_close(momentum, expected_momentum, rtol=tolerance, atol=tolerance)
            assert (master - expected).norm() <= 5e-3 * expected.norm()


@pytest.mark.skipif(not INTERPRETS, reason="runs in a process of its own")
def test_norms_at_the_ends_of_float32() -> None:
    """Squares of 1e-20 and 1e20 are there, and nothing stays nothing."""
    grads = [scale * torch.ones(8, 16) for scale in (1e-20, 1e20, 0.0)]
    parts = [Part(Layout((16, 16), 0), torch.zeros(8, 16), grad, torch.zeros(8, 16)) for grad in grads]
    updates = FusedSlices(parts, {"momentum": 0.5, "nesterov": False})
    items = [Item(index, 0) for index in range(3)]
    squares = updates.squares(items)
    torch.testing.assert_close(squares, torch.tensor([32e-40, 32e40, 0.0], dtype=torch.float64), rtol=1e-5, atol=0)
    updates.set_norms(items, (2 * squares).sqrt())
    out = torch.empty(3, 8, 16, dtype=torch.float16)
    for item, part in zip(items, out, strict=True):
        updates.write(item, part)
    torch.testing.assert_close(out[:2], torch.full((2, 8, 16), 1 / 16, dtype=torch.float16))
    assert not out[2].any()
