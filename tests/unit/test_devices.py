"""Counting GPUs, cores and memory without torch."""

import os
from pathlib import Path

import pytest

from dmuon_titan.devices import cgroup_limits, host_memory_bytes, num_cpu_cores, select_visible, visible_gpus

UUIDS = ["GPU-11aa0000-0000", "GPU-11bb0000-0000", "GPU-22cc0000-0000"]


@pytest.mark.parametrize(
    ("visible", "chosen"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("0", [0]),
        ("2,0", [2, 0]),
        (" 1 , 2 ", [1, 2]),
        ("1,9,2", [1]),  # CUDA stops reading at an entry that names nothing
        ("1,-1,2", [1]),
        ("-1", []),
        ("none", []),
        ("1,1", []),
        ("GPU-22", [2]),
        ("GPU-11bb,0", [1, 0]),
        ("GPU-11", []),  # two begin like this
        ("GPU-11aa,GPU-77", [0]),
        ("MIG-5c89,MIG-7bee", ["MIG-5c89", "MIG-7bee"]),
    ],
)
def test_cuda_visible_devices_means_what_cuda_makes_of_it(visible: str | None, chosen: list[int | str]) -> None:
    assert select_visible(visible, UUIDS) == chosen


def test_no_gpu_is_visible_where_the_variable_is_empty() -> None:
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}) == []


@pytest.mark.gpu
def test_gpus_are_those_that_torch_sees() -> None:
    import torch

    gpus = visible_gpus(os.environ)
    assert [gpu.name for gpu in gpus] == [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    for index, gpu in enumerate(gpus):
        total = torch.cuda.get_device_properties(index).total_memory
        assert total <= gpu.memory_bytes < 1.05 * total


def test_cores_and_memory_are_this_machines_at_most() -> None:
    assert 1 <= num_cpu_cores() <= (os.cpu_count() or 1)
    memory = host_memory_bytes()
    assert memory is not None
    assert 0 < memory <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_limits_of_all_control_groups_around_a_process_count(tmp_path: Path) -> None:
    (tmp_path / "pods" / "job").mkdir(parents=True)
    (tmp_path / "pods" / "memory.max").write_text("8000\n")
    (tmp_path / "pods" / "job" / "memory.max").write_text("max\n")
    groups = "12:cpu:/elsewhere\n0::/pods/job\n"
    assert list(cgroup_limits("memory.max", groups, tmp_path)) == ["max", "8000"]
    assert list(cgroup_limits("memory.max", "0::/\n", tmp_path / "pods")) == ["8000"]
    assert list(cgroup_limits("memory.max", "12:cpu:/pods\n", tmp_path)) == []
