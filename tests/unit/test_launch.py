"""What the launcher decides before it starts anything."""

import os

import pytest

from dmuon_titan import launch
from dmuon_titan.devices import Gpu
from dmuon_titan.errors import ConfigError
from dmuon_titan.launch import job_world, read_nodes
from dmuon_titan.torchrun import Nodes

SEVERAL = {"NNODES": "4", "NODE_RANK": "2", "MASTER_ADDR": "node-0"}


@pytest.mark.parametrize(
    ("environ", "num_gpus", "nodes"),
    [
        ({}, 0, Nodes(2)),
        ({}, 8, Nodes(8)),
        ({"NGPU": "4"}, 8, Nodes(4)),
        ({"NGPU": "4", "NPROC_PER_NODE": "2"}, 8, Nodes(2)),
        ({"NPROC_PER_NODE": "5"}, 0, Nodes(5)),
        ({"NPROC_PER_NODE": ""}, 0, Nodes(2)),
        ({"NNODES": "1", "NODE_RANK": "0", "MASTER_ADDR": "here"}, 0, Nodes(2, 1, 0, "here")),
        (SEVERAL, 8, Nodes(8, 4, 2, "node-0", 29500)),
        (SEVERAL | {"MASTER_PORT": "1234"}, 8, Nodes(8, 4, 2, "node-0", 1234)),
    ],
)
def test_processes_and_nodes(environ: dict[str, str], num_gpus: int, nodes: Nodes) -> None:
    assert read_nodes(environ, num_gpus=num_gpus) == nodes


@pytest.mark.parametrize(
    ("environ", "num_gpus", "wrong"),
    [
        ({"NPROC_PER_NODE": "0"}, 0, ["NPROC_PER_NODE"]),
        ({"NPROC_PER_NODE": "two"}, 0, ["NPROC_PER_NODE"]),
        ({"NGPU": "-1"}, 0, ["NGPU"]),
        ({"NPROC_PER_NODE": "3"}, 2, ["NPROC_PER_NODE"]),
        ({"NODE_RANK": "1"}, 0, ["NODE_RANK"]),
        ({"NNODES": "2"}, 0, ["NODE_RANK", "MASTER_ADDR"]),
        ({"NNODES": "1:2"}, 0, ["NNODES"]),
        (SEVERAL | {"NODE_RANK": "4"}, 0, ["NODE_RANK"]),
        (SEVERAL | {"MASTER_PORT": "65536"}, 0, ["MASTER_PORT"]),
        ({"NNODES": "0", "NGPU": "x", "MASTER_PORT": "0"}, 0, ["NGPU", "NNODES", "MASTER_PORT"]),
    ],
)
def test_mistakes_in_variables_are_all_named(environ: dict[str, str], num_gpus: int, wrong: list[str]) -> None:
    with pytest.raises(ConfigError) as mistakes:
        read_nodes(environ, num_gpus=num_gpus)
    assert [line.split()[0] for line in str(mistakes.value).splitlines()] == wrong


def test_a_job_is_checked_against_the_smallest_gpu_it_uses() -> None:
    gpus = [Gpu("A", 80), Gpu("A", 70), Gpu("A", 40)]
    world = job_world(Nodes(2, num_nodes=2), gpus)
    assert (world.num_ranks, world.device_type, world.device_memory_bytes) == (4, "cuda", 70)


def test_ranks_on_the_cpu_share_the_memory_of_the_machine() -> None:
    one, four = job_world(Nodes(1), []), job_world(Nodes(4), [])
    assert one.device_type == "cpu"
    assert one.device_memory_bytes is not None
    assert four.device_memory_bytes == one.device_memory_bytes // 4


@pytest.mark.parametrize(
    ("set_before", "expected"),
    [
        ({}, "expandable_segments:True"),
        ({"PYTORCH_ALLOC_CONF": "backend:native"}, "backend:native"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, None),
    ],
)
def test_segments_grow_on_gpus_unless_the_user_says_otherwise(
    set_before: dict[str, str], expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "_torch_has_no_cuda", lambda: False)
    monkeypatch.setattr(os, "environ", dict(set_before))
    launch._prepare_environment(Nodes(1), [Gpu("NVIDIA H200", 1 << 40)])
    assert os.environ.get("PYTORCH_ALLOC_CONF") == expected
    launch._prepare_environment(Nodes(1), [])
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
