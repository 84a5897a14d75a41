"""The Gram iteration on matrices whose contracted side is cut over tp: no rank ever has a whole one.

With X = [X_0 .. X_T-1], R = X X^T is the sum of X_i X_i^T. So R is summed over tp before each segment of the iteration,
every rank computes the same Q from it, and applies it to its own slice. Partial sums are float32 whatever the dtype of
the iteration, so that R is rounded once, as on one device.

Shape legend: B matrices of M x N with M <= N, K of their N columns on this rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from dmuon.collectives import Axis
from dmuon.newton_schulz import gram_factor
from dmuon.newton_schulz.coefficients import Triple
from dmuon.newton_schulz.iterations import segments
from dmuon.tensor_parallel.plan import Item, OrthogonalizationPlan, block_rows, packed_numel
from dmuon.tensor_parallel.updates import Updates


def orthogonalize_slices(
    plan: OrthogonalizationPlan,
    items: Sequence[Item],
    axis: Axis,
    updates: Updates,
    coefficients: Sequence[Triple],
    kernel: str = "torch",
) -> Iterator[tuple[Item, Tensor]]:
    """This rank's slices of the matrices of one round; one all-reduce for all of them before each segment."""
    by_shape: dict[tuple[int, ...], list[Item]] = {}
    for item in items:
        layout = plan.layout(item)
        key = (min(layout.matrix_shape), *layout.local_sizes(plan.tp_degree))
        by_shape.setdefault(key, []).append(item)
    batches = list(by_shape.values())

    def wide(item: Item, slice_: Tensor) -> Tensor:
        return slice_ if plan.layout(item).matrix_dim == 1 else slice_.mT

    def normalized(item: Item) -> Tensor:
        shape = plan.layout(item).local_shape(plan.tp_degree, axis.index)[-2:]
        slice_ = torch.empty(shape, dtype=plan.dtype, device=updates.device)
        updates.write(item, slice_)
        return slice_

    Xs = [torch.stack([wide(item, normalized(item)) for item in batch]) for batch in batches]
    for segment in segments(coefficients):
        Rs = summed_grams(Xs, axis)
        for index in range(len(Xs)):
            Xs[index] = gram_factor(Rs.pop(0), segment, kernel) @ Xs[index]
    for batch, X_BMK in zip(batches, Xs, strict=True):
        for item, X_MK in zip(batch, X_BMK, strict=True):
            yield item, wide(item, X_MK)


def summed_grams(Xs: Sequence[Tensor], axis: Axis) -> list[Tensor]:
    """R of each batch in the dtype of its X_BMK: block rows of all of them in one flat float32 sum over tp."""
    sizes = [len(X_BMK) * packed_numel(X_BMK.shape[1]) for X_BMK in Xs]
    flat = torch.empty(sum(sizes), dtype=torch.float32, device=Xs[0].device)
    packed = flat.split(sizes)
    for X_BMK, blocks in zip(Xs, packed, strict=True):
        factor_BMK = X_BMK.float() if X_BMK.device.type == "cpu" else X_BMK
        for start, stop, block in _block_views(blocks, *X_BMK.shape[:2]):
            block.copy_(_float32_product(factor_BMK[:, start:stop], factor_BMK[:, start:].mT))
    axis.all_reduce(flat)()
    Rs = []
    for X_BMK, blocks in zip(Xs, packed, strict=True):
        num_matrices, num_rows, _ = X_BMK.shape
        R_BMM = torch.empty(num_matrices, num_rows, num_rows, dtype=X_BMK.dtype, device=X_BMK.device)
        for start, stop, block in _block_views(blocks, num_matrices, num_rows):
            R_BMM[:, start:stop, start:] = block
            R_BMM[:, stop:, start:stop] = block[:, :, stop - start :].mT
        Rs.append(R_BMM)
    return Rs


def _block_views(flat: Tensor, num_matrices: int, num_rows: int) -> Iterator[tuple[int, int, Tensor]]:
    """(start, stop, [B, stop - start, M - start]): each block row from the diagonal on."""
    offset = 0
    for start, stop in block_rows(num_rows):
        shape = (num_matrices, stop - start, num_rows - start)
        numel = torch.Size(shape).numel()
        yield start, stop, flat[offset : offset + numel].view(shape)
        offset += numel


def _float32_product(A_BMK: Tensor, B_BKN: Tensor) -> Tensor:
    """Half precision in, float32 out. The CPU has no such product, and there both are float32 already."""
    if A_BMK.dtype == torch.float32:
        return torch.bmm(A_BMK, B_BKN)
    return torch.bmm(A_BMK, B_BKN, out_dtype=torch.float32)
