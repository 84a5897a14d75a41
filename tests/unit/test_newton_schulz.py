"""Newton-Schulz against a float64 iteration of the same polynomial, and on the inputs that break careless code."""

import logging
import sys
from types import ModuleType

import pytest
import torch

from dmuon.newton_schulz import BACKENDS, COEFFICIENTS, iterate, orthogonalize, planning, resolve_dtype
from dmuon.newton_schulz.coefficients import POLAR_EXPRESS, resolve
from dmuon.newton_schulz.iterations import direct, gram
from dmuon.reference import orthogonalize_reference

# Singular values after five steps, for inputs whose singular values are at least 1e-2 of the norm.
BANDS = {"keller_jordan": (0.67, 1.14), "you": (0.97, 1.04), "polar_express": (0.84, 1.13)}


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def with_spectrum(rows: int, cols: int, smallest: float) -> torch.Tensor:
    """A matrix whose singular values fall geometrically from 1 to `smallest`."""
    n = min(rows, cols)
    u, _ = torch.linalg.qr(gaussian(rows, n, seed=1).double())
    v, _ = torch.linalg.qr(gaussian(cols, n, seed=2).double())
    return ((u * torch.logspace(0, torch.tensor(smallest).log10().item(), n).double()) @ v.T).float()


@pytest.mark.parametrize("coefficients", COEFFICIENTS)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(64, 64), (48, 160), (160, 48), (3, 64), (1, 8)], ids=str)
def test_equals_float64_iteration(shape: tuple[int, int], backend: str, coefficients: str) -> None:
    matrices = gaussian(3, *shape)
    got = orthogonalize(matrices, backend=backend, coefficients=coefficients)
    assert got.shape == matrices.shape
    for matrix, orthogonal in zip(matrices, got, strict=True):
        wide = matrix.double() if shape[0] <= shape[1] else matrix.double().T
        expected = orthogonalize_reference(wide, 5, coefficients)
        expected = expected if shape[0] <= shape[1] else expected.T
        assert (orthogonal - expected).norm() / expected.norm() < 1e-4


@pytest.mark.parametrize("coefficients", COEFFICIENTS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_singular_values_end_in_the_band(backend: str, coefficients: str) -> None:
    matrix = with_spectrum(32, 96, smallest=0.1)
    values = torch.linalg.svdvals(orthogonalize(matrix[None], backend=backend, coefficients=coefficients)[0])
    low, high = BANDS[coefficients]
    assert low < values.min()
    assert values.max() < high


@pytest.mark.parametrize("smallest", [1e-2, 1e-3])
def test_half_precision_stays_close_to_float64(smallest: float) -> None:
    matrix = with_spectrum(128, 384, smallest)
    expected = orthogonalize_reference(matrix.double(), 5, "polar_express")
    for backend in BACKENDS:
        got = orthogonalize(matrix[None], backend=backend, dtype=torch.float16)[0].double()
        error = (got - expected).norm() / expected.norm()
        assert error < 4e-2, f"{backend}: {error:.1e}"


def test_gram_and_direct_are_the_same_polynomial() -> None:
    X_BMN = gaussian(2, 24, 72)
    X_BMN = X_BMN / torch.linalg.matrix_norm(X_BMN, keepdim=True)
    for num_steps in (1, 2, 3, 4, 7):
        triples = resolve("polar_express", num_steps)
        torch.testing.assert_close(gram(X_BMN, triples), direct(X_BMN, triples), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("num", "size"), [(30, 96), (2, 600), (0, 8), (3, 0)], ids=str)
def test_what_a_core_works_on_at_a_time_changes_nothing(num: int, size: int) -> None:
    matrices = gaussian(num, size, size) / max(1, size)
    expected = direct(matrices, resolve("polar_express", 5))
    torch.testing.assert_close(iterate(matrices, kernel="torch"), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("scale", [1e-20, 1e-10, 1.0, 1e20])
def test_scale_of_the_input_does_not_matter(scale: float) -> None:
    matrix = gaussian(1, 16, 48)
    torch.testing.assert_close(orthogonalize(matrix * scale), orthogonalize(matrix), rtol=1e-3, atol=1e-4)


def test_zero_stays_zero_and_leaves_its_batch_alone() -> None:
    matrices = gaussian(3, 8, 24)
    alone = orthogonalize(matrices[2:])
    matrices[1] = 0
    got = orthogonalize(matrices)
    assert not got[1].any()
    torch.testing.assert_close(got[2:], alone)


def test_non_finite_is_not_hidden() -> None:
    matrix = gaussian(1, 8, 24)
    matrix[0, 0, 0] = torch.inf
    assert not orthogonalize(matrix).isfinite().all()


def test_rank_one_keeps_its_direction() -> None:
    u, v = gaussian(12, 1), gaussian(1, 30, seed=3)
    got = orthogonalize((u @ v)[None], coefficients="you")[0]
    values = torch.linalg.svdvals(got)
    assert abs(values[0] - 1) < 0.04
    assert values[1] < 0.05
    assert (got * (u @ v)).sum() > 0


def test_tables_repeat_their_last_triple_and_are_checked() -> None:
    assert resolve("polar_express", 7)[4:] == (POLAR_EXPRESS[4],) * 3
    for coefficients, num_steps, word in [("newton", 5, "newton"), ("you", 0, "0"), ([(1.0, 2.0)], 5, "a, b, c")]:
        with pytest.raises(ValueError, match=word):
            resolve(coefficients, num_steps)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="qr"):
        orthogonalize(gaussian(1, 4, 4), backend="qr")


def test_auto_dtype_follows_the_device() -> None:
    assert resolve_dtype("auto", torch.device("cpu")) == torch.float32
    assert resolve_dtype("auto", torch.device("cuda")) == torch.float16
    with pytest.raises(ValueError, match="float8"):
        resolve_dtype("float8", torch.device("cpu"))


def test_without_a_gpu_the_torch_kernel_runs_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    matrices = gaussian(2, 72, 144)
    expected = orthogonalize(matrices, dtype=torch.float16, kernel="torch")
    planning._say_once.cache_clear()
    with caplog.at_level(logging.INFO, "dmuon"):
        for kernel in ("auto", "triton", "auto", "triton"):
            assert torch.equal(orthogonalize(matrices, dtype=torch.float16, kernel=kernel), expected)
    said = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert said == [
        ("INFO", "ns_kernel = 'auto': Newton-Schulz runs in plain torch, for there is no GPU"),
        ("WARNING", "ns_kernel = 'triton': Newton-Schulz runs in plain torch, for there is no GPU"),
    ]


def test_other_ranks_leave_it_to_the_first_to_warn(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(planning.dist, "is_initialized", lambda: True)
    levels = []
    for rank in (0, 1):
        monkeypatch.setattr(planning.dist, "get_rank", lambda rank=rank: rank)
        planning._say_once.cache_clear()
        with caplog.at_level(logging.INFO, "dmuon"):
            assert planning.choose_kernel("triton", torch.device("cpu"), torch.float16) == "torch"
        levels.append([record.levelname for record in caplog.records])
        caplog.clear()
    assert levels == [["WARNING"], ["INFO"]]


def test_a_gpu_takes_triton_only_where_it_can_and_was_measured(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gpu, half = torch.device("cuda"), torch.float16
    capability = (9, 0)
    monkeypatch.setattr(planning, "has_triton", lambda: True)
    monkeypatch.setattr(planning, "_capability", lambda _: capability)
    planning._say_once.cache_clear()
    assert planning.choose_kernel("auto", gpu, half) == "triton"
    assert planning.choose_kernel("torch", gpu, half) == "torch"
    assert not caplog.records
    assert planning.choose_kernel("triton", gpu, torch.float32) == "torch"
    capability = (10, 0)
    assert planning.choose_kernel("auto", gpu, half) == "torch"
    assert planning.choose_kernel("triton", gpu, half) == "triton"
    capability = (8, 0)
    assert planning.choose_kernel("triton", gpu, half) == "torch"
    monkeypatch.setattr(planning, "has_triton", lambda: False)
    assert planning.choose_kernel("auto", gpu, half) == "torch"
    words = ["float32", "nothing was measured on compute capability 10.0", "no tensor descriptors", "not installed"]
    assert len(caplog.records) == len(words)
    assert all(word in record.getMessage() for word, record in zip(words, caplog.records, strict=True))


def test_quack_is_taken_where_it_is_asked_for_and_installed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gpu, half = torch.device("cuda"), torch.float16
    monkeypatch.setattr(planning, "has_triton", lambda: True)
    capability = (9, 0)
    monkeypatch.setattr(planning, "_capability", lambda _: capability)
    planning._say_once.cache_clear()
    planning._obstacle_to_quack.cache_clear()
    with monkeypatch.context() as installed:
        installed.setitem(sys.modules, "dmuon.newton_schulz.quack_kernels", ModuleType("quack_kernels"))
        assert planning.choose_kernel("quack", gpu, half) == "quack"
        plan = planning.plan_batch((2, 250, 1000), gpu, dtype=half, kernel="quack")
        assert (plan.kernel, plan.form, plan.padded, plan.gram_tiles) == ("quack", "gram", (2, 256, 1000), None)
        assert "quack" in str(plan)
        assert not caplog.records
        assert planning.choose_kernel("quack", torch.device("cpu"), half) == "torch"
        assert planning.choose_kernel("quack", gpu, torch.float32) == "torch"
        capability = (7, 5)
        assert planning.choose_kernel("quack", gpu, half) == "torch"
    capability = (9, 0)
    monkeypatch.setitem(sys.modules, "quack", None)  # importing it fails
    planning._obstacle_to_quack.cache_clear()
    assert planning.choose_kernel("quack", gpu, half) == "torch"
    planning._obstacle_to_quack.cache_clear()
    words = ["no GPU", "float32", "compute capability 7.5", "pip install quack-kernels"]
    assert len(caplog.records) == len(words)
    assert all(word in record.getMessage() for word, record in zip(words, caplog.records, strict=True))


def test_a_plan_is_a_function_of_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "has_triton", lambda: True)
    monkeypatch.setattr(planning, "_capability", lambda _: (9, 0))
    gpu = torch.device("cuda")
    for shape, form, replays in [
        ((1, 4096, 4096), "direct", True),
        ((2, 4096, 4096), "direct", False),
        ((4, 4096, 14336), "gram", False),
        ((4, 14336, 4096), "gram", False),
        ((16, 1024, 4096), "gram", True),
        ((1, 250, 1001), "gram", True),
    ]:
        plan = planning.plan_batch(shape, gpu, dtype=torch.float16)
        assert plan == planning.plan_batch(shape, gpu, dtype=torch.float16)
        assert (plan.kernel, plan.form, plan.replays) == ("triton", form, replays)
        assert all(
            size % 8 == 0 and 0 <= size - logical < 8 for size, logical in zip(plan.padded[1:], shape[1:], strict=True)
        )
        assert "triton" in str(plan)
    assert planning.plan_batch((1, 40, 4096), gpu, dtype=torch.float16).kernel == "torch"
    assert planning.plan_batch((1, 4096, 14336), gpu, dtype=torch.float16, backend="direct").form == "direct"
    # On CPU nothing but the shape and the backend ever counted.
    assert planning.plan_batch((1, 64, 64), torch.device("cpu")).form == "direct"
    assert planning.plan_batch((1, 64, 128), torch.device("cpu")).form == "gram"
