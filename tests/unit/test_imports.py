"""The direction of dependency: models and dmuon on torch only, the harness on both; configuration on neither."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("dmuon", "dmuon_titan", "models")


def imports_of(package: str) -> Iterator[tuple[Path, str]]:
    """(file, top-level module) of every import statement in a package."""
    for path in sorted((ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                yield from ((path, alias.name.partition(".")[0]) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path}: relative import"
                yield path, (node.module or "").partition(".")[0]


@pytest.mark.parametrize("package", ["dmuon", "models"])
def test_library_and_models_depend_on_torch_only(package: str) -> None:
    allowed = {*sys.stdlib_module_names, "torch", package}
    strangers = {
        f"{path.relative_to(ROOT)} imports {name}" for path, name in imports_of(package) if name not in allowed
    }
    assert not strangers


def test_harness_imports_what_pyproject_declares() -> None:
    declared = {"torch", "torchdata", "tomli", "tensorboard", "sentencepiece", "numpy", "safetensors"}
    assert all(name in (ROOT / "pyproject.toml").read_text() for name in declared)
    allowed = {*sys.stdlib_module_names, *PACKAGES, *declared}
    strangers = {f"{path.relative_to(ROOT)}: {name}" for path, name in imports_of("dmuon_titan") if name not in allowed}
    assert not strangers


TORCH_FREE = ["dmuon_titan.config", "dmuon_titan.launch", "dmuon_titan.devices", "models.llama.sizes"]


@pytest.mark.parametrize("module", TORCH_FREE)
def test_what_runs_before_any_process_is_spawned_imports_no_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_importing_dmuon_changes_nothing_in_torch() -> None:
    code = (
        "import torch, torch.distributed.fsdp._fully_shard._fsdp_init as init\n"
        "names = ('_get_managed_states', '_get_managed_modules')\n"
        "before = [getattr(init, name) for name in names]\n"
        "import dmuon\n"
        "assert before == [getattr(init, name) for name in names]\n"
        "assert not torch.distributed.is_initialized()\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


PRIVATE = re.compile(r"\btorch(?:\.\w+)*\.(_(?!_)\w+)")


def test_private_names_of_torch_sit_in_one_file() -> None:
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    (internals,) = (path for path in paths if path.name == "torch_internals.py")
    found = [
        f"{path.relative_to(ROOT)}: {match.group()}"
        for path in paths
        if path != internals
        for match in PRIVATE.finditer(path.read_text())
    ]
    assert not found
