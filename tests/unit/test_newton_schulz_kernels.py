"""The kernels against float64: on a GPU (marked `gpu`), and Triton's on any machine with Triton in its interpreter.

The interpreter must be chosen before Triton is imported. So without a GPU one test runs this file again in a process
of its own.
"""

import importlib.util
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dmuon.newton_schulz import COEFFICIENTS, orthogonalize
from dmuon.newton_schulz.coefficients import resolve
from dmuon.newton_schulz.execution import Execution, iterate_as_planned
from dmuon.newton_schulz.planning import BatchPlan, plan_batch
from dmuon.newton_schulz.tuned import Tiles
from dmuon.reference import orthogonalize_reference

INTERPRETS = os.environ.get("TRITON_INTERPRET") == "1"
HAS_TRITON = importlib.util.find_spec("triton") is not None

# Largest singular value of a float64 iteration over all inputs, and what half precision may add to it.
BANDS = {"keller_jordan": 1.21, "you": 1.15, "polar_express": 1.13}
# Small ones with corners, unless they are squares; large ones have none.
SMALL_TILES = [Tiles(32, 32, 32, 4, 2), Tiles(32, 64, 32, 4, 2, group=1), Tiles(64, 32, 32, 4, 2)]
LARGE_TILES = [Tiles(128, 256, 32, 8, 2), Tiles(256, 128, 32, 8, 2, group=1)]
TILES = [*SMALL_TILES, *LARGE_TILES]


@pytest.mark.skipif(INTERPRETS or torch.cuda.is_available(), reason="the tests below run themselves")
@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
def test_in_the_interpreter() -> None:
    triton_version, numpy_version = (tuple(map(int, version(name).split(".")[:2])) for name in ("triton", "numpy"))
    if triton_version <= (3, 6) and numpy_version >= (2, 4):
        pytest.skip("the interpreter of Triton 3.6 makes numbers of arrays in a way that numpy 2.4 refuses")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not gpu", "-p", "no:cacheprovider", __file__]
    result = subprocess.run(command, env=environment, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert " passed" in result.stdout


@pytest.mark.skipif(INTERPRETS or not HAS_TRITON, reason="needs Triton's compiler")
@pytest.mark.parametrize(("splits", "adds"), [(True, ()), (False, ()), (False, ("D",)), (True, ("D", "E"))], ids=str)
@pytest.mark.parametrize(
    ("tall", "block_m", "block_n"),
    [(False, 64, 128), (True, 64, 128), (True, 128, 64), (True, 128, 128), (False, 128, 256), (True, 256, 128)],
)
def test_compiles_for_hopper_without_a_gpu(
    tall: bool, block_m: int, block_n: int, splits: bool, adds: tuple[str, ...]
) -> None:
    """The interpreter passes by branches that the compiler must understand."""
    from dmuon.newton_schulz import kernels

    fixed = {"ADDS": bool(adds), "ADDS_E": "E" in adds, "BLOCK_M": block_m, "BLOCK_N": block_n}
    has_corners = min(block_m, block_n) == 64
    has_d, has_e = "D" in adds, "E" in adds
    is_there = {
        "d_desc": has_d,
        "d_ptr": has_d,
        "e_desc": has_e,
        "e_ptr": has_e,
        "parts_ptr": splits,
        "corner_desc": has_corners,
        "corner_d_desc": has_corners and has_d,
        "corner_e_desc": has_corners and has_e,
    }
    absent = {name: None for name, there in is_there.items() if not there}
    compile_for_hopper(
        kernels._symmetric_product,
        {**fixed, "BLOCK_K": 64, "TALL": tall, "SPLITS": splits, "HAS_CORNERS": has_corners, **absent},
        {
            "a_desc": tiled(64, block_m) if tall else tiled(block_m, 64),
            "b_desc": tiled(64, block_n) if tall else tiled(block_n, 64),
            **dict.fromkeys(("d_desc", "e_desc", "out_desc"), tiled(block_m, block_n)),
            "mirror_desc": tiled(block_n, block_m),
            "square_desc": tiled(min(block_m, block_n), min(block_m, block_n)),
            **dict.fromkeys(("corner_desc", "corner_d_desc", "corner_e_desc"), tiled(64, 64)),
        },
        num_warps=max(4, block_m * block_n // 4096),  # as in the table; with two there are no tensor cores
    )
    if splits and not tall:
        compile_for_hopper(kernels._add_parts, {**fixed, "ADDED": 32, "NUM_PARTS": 3, **absent}, {})


def tiled(rows: int, cols: int) -> str:
    return f"tensordesc<fp16[1,{rows},{cols}]>"


def compile_for_hopper(kernel: Any, constants: dict[str, Any], descriptors: dict[str, str], num_warps: int = 4) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import get_ptxas
    from triton.compiler import ASTSource

    pointers = {"out_ptr": "*fp16", "d_ptr": "*fp16", "e_ptr": "*fp16", "parts_ptr": "*fp32", "order_ptr": "*i32"}
    types = {**pointers, **descriptors, **dict.fromkeys(("alpha", "beta", "gamma", "delta"), "fp32")}
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    values = {(names.index(name),): value for name, value in constants.items() if name in names}
    source = ASTSource(kernel, signature, constexprs=values)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps})
    # ptxas says so where it makes tensor cores wait for the end of each product.
    with tempfile.TemporaryDirectory() as folder:
        ptx = Path(folder, "kernel.ptx")
        ptx.write_text(compiled.asm["ptx"])
        command = [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", str(ptx), "-o", os.devnull]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert "registers" in said
    assert "serialized" not in said


@pytest.fixture(
    params=[
        pytest.param("cpu", marks=pytest.mark.skipif(not INTERPRETS, reason="runs in a process of its own")),
        pytest.param(
            "cuda",
            marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
        ),
    ]
)
def device(request: pytest.FixtureRequest) -> torch.device:
    pytest.importorskip("triton")
    return torch.device(request.param)


@pytest.fixture(
    params=[
        "triton",
        pytest.param(
            "quack",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(importlib.util.find_spec("quack") is None, reason="needs the extra 'quack'"),
            ],
        ),
    ]
)
def kernel(request: pytest.FixtureRequest) -> str:
    return request.param


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def with_spectrum(rows: int, cols: int, smallest: float) -> Tensor:
    """A matrix whose singular values fall geometrically from 1 to `smallest`."""
    n = min(rows, cols)
    u, _ = torch.linalg.qr(gaussian(rows, n, seed=1).double())
    v, _ = torch.linalg.qr(gaussian(cols, n, seed=2).double())
    return ((u * torch.logspace(0, torch.tensor(smallest).log10().item(), n).double()) @ v.T).float()


def reference(matrices: Tensor, coefficients: str = "polar_express") -> Tensor:
    wide = matrices if matrices.shape[1] <= matrices.shape[2] else matrices.mT
    expected = torch.stack([orthogonalize_reference(matrix.double(), 5, coefficients) for matrix in wide])
    return expected if wide is matrices else expected.mT


def error(got: Tensor, expected: Tensor) -> float:
    expected = expected.double().cpu()
    return ((got.double().cpu() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tiles", TILES, ids=lambda tiles: tiles.name)
@pytest.mark.parametrize("shape", [(2, 64, 128), (3, 72, 40), (1, 104, 200)], ids=str)
def test_gram_matrix_equals_float64(
    shape: tuple[int, int, int], tiles: Tiles, dtype: torch.dtype, device: torch.device
) -> None:
    from dmuon.newton_schulz.kernels import symmetric_product

    if device.type == "cpu" and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter has no products of bfloat16")
    num, size, depth = shape
    for tall in (False, True):
        X = gaussian(num, *((depth, size) if tall else (size, depth))).to(device, dtype)
        out = torch.full((num, size, size), torch.nan, dtype=dtype, device=device)
        symmetric_product(X, X, out, tiles, tall=tall)
        exact = X.double().mT @ X.double() if tall else X.double() @ X.double().mT
        assert error(out, exact) < (4e-4 if dtype == torch.float16 else 3e-3)
        assert torch.equal(out, out.mT)
        # Accumulated in float32 and rounded once: no element is off by more than half a unit in the last place,
        # and a little for the order of the sum.
        unit = torch.finfo(dtype).eps
        assert ((out.double() - exact).abs() <= 0.51 * unit * exact.abs() + 1e-4).all()


@pytest.mark.parametrize(
    ("num", "size", "depth", "tiles"),
    [
        *((*shape, tiles) for shape in [(1, 136, 128), (3, 72, 200), (1, 168, 40)] for tiles in SMALL_TILES),
        *((2, 264, 40, tiles) for tiles in LARGE_TILES),
    ],
    ids=str,
)
def test_tiles_that_are_left_over_are_split(
    num: int, size: int, depth: int, tiles: Tiles, device: torch.device
) -> None:
    from dmuon.newton_schulz.kernels import split, symmetric_product, tile_order

    num_tiles = num * len(tile_order(size, tiles, device))
    for num_processors in (num_tiles - 1, num_tiles - 2):
        assert split(num_tiles, 4, num_processors)[0] == num_tiles - num_processors
        for tall in (False, True):
            X = gaussian(num, *((depth, size) if tall else (size, depth))).to(device, torch.float16)
            whole, halves = (torch.full((num, size, size), torch.nan, dtype=X.dtype, device=device) for _ in range(2))
            symmetric_product(X, X, whole, tiles, tall=tall)
            options = {"tall": tall, "num_processors": num_processors}
            symmetric_product(X, X, halves, tiles._replace(parts=4), **options)
            assert error(halves, X.double().mT @ X.double() if tall else X.double() @ X.double().mT) < 4e-4
            assert torch.equal(halves, halves.mT)
            again = symmetric_product(X, X, torch.empty_like(halves), tiles._replace(parts=4), **options)
            assert torch.equal(again, halves)
            assert error(halves, whole) < 4e-4


def test_parts_never_give_a_processor_two() -> None:
    if not HAS_TRITON:
        pytest.skip("Triton is not installed")
    from dmuon.newton_schulz.kernels import split

    assert split(136, 16, 132) == (4, 16)
    assert split(171, 16, 132) == (39, 3)
    assert split(132 + 67, 16, 132) == split(264, 16, 132) == (0, 1)
    for num_tiles in range(1, 300):
        num_split, num_parts = split(num_tiles, 16, 132)
        assert num_split * num_parts <= 132
        assert num_parts <= 16


@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("tiles", TILES, ids=lambda tiles: tiles.name)
@pytest.mark.parametrize("size", [24, 64, 72, 136])
def test_polynomial_of_commuting_factors_equals_float64(
    size: int, tiles: Tiles, parts: int, device: torch.device
) -> None:
    from dmuon.newton_schulz.kernels import symmetric_product, tile_order

    R = gaussian(2, size, size).double()
    R = (R + R.mT) / 2 / size**0.5
    A, B = (matrix.to(device, torch.float16) for matrix in (R, R @ R - 0.3 * R))
    out = torch.full_like(A, torch.nan)
    identity = torch.eye(size, dtype=torch.float64, device=device)
    one_is_left = max(1, 2 * len(tile_order(size, tiles, device)) - 1)
    for D, E in [(None, None), (B, None), (None, B)]:
        symmetric_product(
            A,
            B,
            out,
            tiles._replace(parts=parts),
            alpha=-1.5,
            beta=0.75,
            D=D,
            gamma=2.0,
            delta=3.0,
            E=E,
            num_processors=one_is_left,
        )
        exact = -1.5 * A.double() @ B.double() + 0.75 * (A if D is None else D).double() + 2 * identity
        exact += 0 if E is None else 3 * E.double()
        assert error(out, exact) < 4e-4
    assert torch.equal(out, out.mT)


def test_every_tile_on_and_above_the_diagonal_is_visited_once() -> None:
    if not HAS_TRITON:
        pytest.skip("Triton is not installed")
    from dmuon.newton_schulz.kernels import corners, tile_order

    for size, block_m, block_n, group in [
        *((512, 128, 128, 3), (500, 64, 128, 8), (448, 64, 128, 1), (1024, 256, 128, 1)),
        *((100, 128, 64, 2), (448, 128, 64, 3), (64, 128, 64, 8), (1024, 128, 256, 2), (900, 256, 128, 1)),
    ]:
        tiles = Tiles(block_m, block_n, group=group)
        places = tile_order(size, tiles, torch.device("cpu")).tolist()
        covered = torch.zeros(size, size, dtype=torch.int)
        larger, side = max(block_m, block_n), min(block_m, block_n)
        for place in places:
            rows = slice((place & 0xFFFF) * block_m, (place & 0xFFFF) * block_m + block_m)
            cols = slice((place >> 16) * block_n, (place >> 16) * block_n + block_n)
            covered[rows, cols] += 1
            if rows.start // larger != cols.start // larger:
                covered[cols, rows] += 1
        for corner in range(corners(size, tiles)):
            at = (2 * corner + (block_m < block_n)) * side
            below = at + side if block_m > block_n else at - side
            # The half that is not made lies below the diagonal.
            covered[at : at + side, at : at + side] += 1
            covered[max(at, below) : max(at, below) + side, min(at, below) : max(at, below)] += 1
        assert (covered == 1).all()


@pytest.mark.parametrize("coefficients", COEFFICIENTS)
@pytest.mark.parametrize("kind", ["gaussian", "1e-2", "1e-3"])
@pytest.mark.parametrize("shape", [(128, 128), (128, 384), (384, 128), (100, 206)], ids=str)
def test_fp16_stays_close_to_float64(
    shape: tuple[int, int], kind: str, coefficients: str, device: torch.device, kernel: str
) -> None:
    matrices = gaussian(1, *shape) if kind == "gaussian" else with_spectrum(*shape, float(kind))[None]
    for backend in ("gram", "direct"):
        got = orthogonalize(
            matrices.to(device),
            backend=backend,
            coefficients=coefficients,
            dtype=torch.float16,
            kernel=kernel,
        )
        assert error(got, reference(matrices, coefficients)) <= 4e-2
        assert torch.linalg.matrix_norm(got.double(), ord=2).item() <= BANDS[coefficients] + 0.04


@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e20])
def test_scale_of_the_input_does_not_matter(scale: float, device: torch.device, kernel: str) -> None:
    matrices = gaussian(1, 72, 144)
    got = orthogonalize((matrices * scale).to(device), dtype=torch.float16, kernel=kernel)
    assert error(got, reference(matrices)) < 2e-2


def test_zero_rank_one_and_non_finite(device: torch.device, kernel: str) -> None:
    matrices = gaussian(4, 72, 144)
    alone = orthogonalize(matrices[3:].to(device), dtype=torch.float16, kernel=kernel)
    matrices[0] = 0
    matrices[1] = gaussian(72, 1) @ gaussian(1, 144, seed=5)
    matrices[2, 5, 7] = torch.inf
    got = orthogonalize(matrices.to(device), dtype=torch.float16, kernel=kernel).cpu()
    assert not got[0].any()
    values = torch.linalg.svdvals(got[1].float())
    assert 0.8 < values[0] < 1.2
    assert values[1] < 0.1
    assert not got[2].isfinite().all()
    assert torch.equal(got[3:], alone.cpu())


@pytest.mark.parametrize("shape", [(1, 8), (1, 300), (300, 1), (3, 64)], ids=str)
def test_narrow_matrices(shape: tuple[int, int], device: torch.device, kernel: str) -> None:
    matrices = gaussian(2, *shape)
    got = orthogonalize(matrices.to(device), dtype=torch.float16, kernel=kernel)
    assert got.shape == matrices.shape
    assert error(got, reference(matrices)) < 2e-2


@pytest.mark.parametrize("shape", [(128, 128), (72, 150), (150, 72)], ids=str)
def test_batches_equal_single_matrices_and_themselves(
    shape: tuple[int, int], device: torch.device, kernel: str
) -> None:
    matrices = gaussian(5, *shape).to(device)
    got = orthogonalize(matrices, dtype=torch.float16, kernel=kernel)
    assert torch.equal(got, orthogonalize(matrices, dtype=torch.float16, kernel=kernel))
    for index in range(5):
        single = orthogonalize(matrices[index : index + 1], dtype=torch.float16, kernel=kernel)
        assert error(got[index : index + 1], single) < 5e-3


def test_planned_batches_launch_the_kernels_that_the_plan_names(device: torch.device) -> None:
    from dmuon.newton_schulz.kernels import launches

    triples = resolve("polar_express", 5)
    for shape, form, num_products in [((2, 72, 72), "direct", 10), ((2, 72, 216), "gram", 16)]:
        plan = plan_batch(shape, device, dtype=torch.float16, kernel="triton", replays=False)
        assert (plan.kernel, plan.form) == ("triton", form)
        assert "triton" in str(plan)
        X = (gaussian(*plan.padded) / 100).to(device, torch.float16)
        before, kept = launches["symmetric_product"], X.clone()
        iterate_as_planned(plan, triples, X)
        assert launches["symmetric_product"] == before + num_products
        assert torch.equal(X, kept)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_replayed_batches_have_the_bits_of_launched_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    device, triples = torch.device("cuda"), resolve("polar_express", 5)
    execution = Execution()
    shapes = [(4, 256, 512), (2, 512, 256), (3, 250, 250), (4, 256, 512)]
    for turn in range(4):
        for index, shape in enumerate(shapes):
            plan = plan_batch(shape, device, dtype=torch.float16)
            assert (plan.kernel, plan.replays) == ("triton", True)
            X, source = filled(execution, plan, seed=10 * turn + index)
            expected = iterate_as_planned(plan, triples, source)
            assert torch.equal(execution.run(plan, triples, X), expected)
    assert execution.num_runs == {"triton": 16, "replayed": 13}  # each of three shapes is launched once

    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("out of memory")

    # What can't be captured is launched, now and later.
    monkeypatch.setattr(torch.cuda, "graph", fails)
    execution = Execution()
    for turn in range(3):
        X, source = filled(execution, plan, seed=turn)
        assert torch.equal(execution.run(plan, triples, X), iterate_as_planned(plan, triples, source))
    assert execution.num_runs == {"triton": 3}


def filled(execution: Execution, plan: BatchPlan, seed: int) -> tuple[Tensor, Tensor]:
    X = execution.input(plan, resolve("polar_express", 5), torch.device("cuda"))
    num, rows, cols = plan.shape
    X[:, :rows, :cols] = (gaussian(num, rows, cols, seed=seed) / (rows * cols) ** 0.5).to(X)
    return X, X.clone()


@pytest.mark.parametrize("momentum_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("shape", [(2, 72, 144), (1, 150, 75)], ids=str)
def test_fused_update_equals_torch_operations(
    shape: tuple[int, int, int], nesterov: bool, momentum_dtype: torch.dtype, device: torch.device, kernel: str
) -> None:
    from dmuon.newton_schulz.updates import FusedUpdates, Piece

    group = {
        "lr": 0.1,
        "weight_decay": 0.2,
        "momentum": 0.9,
        "nesterov": nesterov,
        "ns_steps": 5,
        "ns_backend": "gram",
        "ns_coefficients": "polar_express",
        "ns_dtype": "float16",
    }
    pieces = [Piece(*(gaussian(*shape, seed=10 * k + i).to(device) for i in range(3))) for k in range(2)]
    copies = [torch.zeros(shape, dtype=torch.bfloat16, device=device), None]
    pieces = [
        piece._replace(momentum=piece.momentum.to(momentum_dtype), compute=copy)
        for piece, copy in zip(pieces, copies, strict=True)
    ]
    before = [piece._replace(master=piece.master.clone(), momentum=piece.momentum.clone()) for piece in pieces]
    before = [piece._replace(grad=piece.grad.clone()) for piece in before]
    fused = FusedUpdates(kernel)
    plan = fused.plan([shape, shape], device, group)
    assert fused.can_take(plan, pieces)
    fused(plan, pieces, group, 3.0, torch.ones((), device=device))
    for piece, (master, _, buffer, _) in zip(pieces, before, strict=True):
        assert torch.equal(piece.master, master)
        assert torch.equal(piece.momentum, buffer)
        assert piece.compute is None or not piece.compute.any()
    fused(plan, pieces, group, 3.0, torch.zeros((), device=device))
    for piece, (master, grad, buffer, _) in zip(pieces, before, strict=True):
        if piece.compute is not None:  # Triton's interpreter cuts off where a GPU rounds
            tolerance = 0 if device.type == "cuda" else 2**-7
            torch.testing.assert_close(piece.compute, piece.master.bfloat16(), rtol=tolerance, atol=0)
        momentum = torch.lerp(buffer.float(), grad, 0.1)
        update = torch.lerp(grad, momentum, 0.9) if nesterov else momentum
        assert error(piece.momentum, momentum) < (1e-6 if momentum_dtype == torch.float32 else 4e-3)
        assert torch.equal(piece.grad, grad)
        orthogonal = orthogonalize(update, dtype=torch.float16, kernel="torch").double()
        moved = piece.master.double() - master.double() * (1 - 0.1 * 0.2)
        assert error(moved, -0.1 * 3.0 * orthogonal) < 3e-2
    assert fused.execution.num_runs[kernel] == 2
