"""The launcher behind run_train.sh: decides how many processes run where, checks all there is to check, starts them.

A mistake costs a fraction of a second: torch is imported only once nothing stands against starting.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from dmuon_titan.devices import Gpu, host_memory_bytes, num_cpu_cores, visible_gpus
from dmuon_titan.errors import ConfigError, ExitStatus, TitanError
from dmuon_titan.torchrun import Nodes, StopSignals, run_workers

if TYPE_CHECKING:
    from dmuon_titan.config import JobConfig, World

_NUM_CPU_RANKS = 2
_DEFAULT_MASTER_PORT = 29500
_ENVIRONMENT_HELP = """\
Environment, as torchrun's users know it:
  NPROC_PER_NODE or NGPU  processes on this machine; default: one for each GPU, or 2 on the CPU without any
  NNODES, NODE_RANK       machines of the job, and which of them this is, from 0; default: 1 and 0
  MASTER_ADDR             host name or address of node 0; only with several nodes
  MASTER_PORT             free port of node 0; default: 29500, only with several nodes
  OMP_NUM_THREADS         CPU threads of one process; default: the cores shared out
  CUDA_VISIBLE_DEVICES    which GPUs are used; empty for none
  CONFIG_FILE             configuration where the command line names none
  PYTHON                  interpreter that run_train.sh starts; default: the first python3 of PATH

Exit status: 0 finished, 2 configuration, 3 data, 4 checkpoint, 5 loss or gradient not finite, 75 stopped by a signal
after saving what there was, 1 anything else.
"""


def main(argv: list[str]) -> int:
    """Runs the job that a command line describes and returns its exit status."""
    signals = StopSignals()
    os.environ["DMUON_TITAN_STARTED_S"] = str(time.time())
    try:
        from dmuon_titan.config import help_text, wants_help

        if wants_help(argv):
            sys.stdout.write(f"{help_text()}\n{_ENVIRONMENT_HELP}")
            return ExitStatus.FINISHED
        gpus = visible_gpus(os.environ)
        nodes = _checked_nodes(argv, gpus)
        _prepare_environment(nodes, gpus)
        return run_workers(argv, nodes, signals)
    except TitanError as mistake:
        return _refuse(mistake)
    except ModuleNotFoundError as missing:
        return _refuse(
            ConfigError(
                f"{missing} in {sys.executable}: activate the environment that README.md sets up, or name its "
                "interpreter in the variable PYTHON"
            )
        )


def _refuse(mistake: TitanError) -> ExitStatus:
    sys.stderr.write(f"error: {mistake}\n")
    return mistake.status


def read_nodes(environ: Mapping[str, str], *, num_gpus: int) -> Nodes:
    """Processes of this node and where the others are, from torchrun's variables.

    Raises:
        ConfigError: one line for each variable that is missing or out of range.
    """
    mistakes: list[str] = []

    def number(name: str, default: int, low: int, high: int | None, legal: str) -> int:
        text = environ.get(name, "").strip() or str(default)
        if text.isascii() and text.isdigit() and low <= int(text) and (high is None or int(text) <= high):
            return int(text)
        mistakes.append(f"{name} = {environ[name]}: {legal}")
        return default

    processes = "NPROC_PER_NODE" if environ.get("NPROC_PER_NODE") else "NGPU"
    legal = "a whole number from 1"
    if num_gpus:
        legal += f" to {num_gpus}, the GPUs seen here; with CUDA_VISIBLE_DEVICES= (empty) ranks run on the CPU"
    num_local_ranks = number(processes, num_gpus or _NUM_CPU_RANKS, 1, num_gpus or None, legal)
    num_nodes = number("NNODES", 1, 1, None, "a whole number from 1")
    node_rank = number("NODE_RANK", 0, 0, num_nodes - 1, f"a whole number from 0 to NNODES - 1 = {num_nodes - 1}")
    port = number("MASTER_PORT", _DEFAULT_MASTER_PORT, 1, 65535, "a port, 1 to 65535")
    if num_nodes > 1:
        if not environ.get("NODE_RANK"):
            mistakes.append(f"NODE_RANK is not set: which of the NNODES = {num_nodes} nodes is this, from 0?")
        if not environ.get("MASTER_ADDR"):
            mistakes.append(f"MASTER_ADDR is not set: NNODES = {num_nodes} needs the host name or address of node 0")
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    return Nodes(num_local_ranks, num_nodes, node_rank, environ.get("MASTER_ADDR", ""), port)


def job_world(nodes: Nodes, gpus: list[Gpu]) -> World:
    """What the configuration is checked against: on a CPU the ranks share the machine's memory."""
    from dmuon_titan.config import World

    if gpus:
        return World(nodes.num_ranks, "cuda", min(gpu.memory_bytes for gpu in gpus[: nodes.num_local_ranks]))
    memory = host_memory_bytes()
    return World(nodes.num_ranks, "cpu", None if memory is None else memory // nodes.num_local_ranks)


def _checked_nodes(argv: list[str], gpus: list[Gpu]) -> Nodes:
    """Reads the variables, checks the configuration against them and makes the run's folders.

    Raises:
        ConfigError: all mistakes of both.
        DataError: that alone: prepared data can't be read.
    """
    from dmuon_titan.run_folder import make_folders

    try:
        nodes = read_nodes(os.environ, num_gpus=len(gpus))
    except ConfigError as mistakes:
        try:
            _load(argv, None)
        except TitanError as others:
            raise ConfigError(f"{mistakes}\n{others}") from None
        raise
    make_folders(_load(argv, job_world(nodes, gpus)))
    return nodes


def _load(argv: list[str], world: World | None) -> JobConfig:
    from dmuon_titan.config import load_config, validate

    return load_config(argv, check=lambda config: validate(config, world)).config


def _prepare_environment(nodes: Nodes, gpus: list[Gpu]) -> None:
    """Sets what the workers read, where the user has not."""
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, num_cpu_cores() // nodes.num_local_ranks)))
    if not gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # ranks that share a GPU unknown to NVML would not work
    elif _torch_has_no_cuda():
        raise ConfigError(
            f"{len(gpus)} GPUs ({gpus[0].name}), but the torch of {sys.executable} is built without CUDA: install one "
            "that has it, or set CUDA_VISIBLE_DEVICES= (empty) to train on the CPU"
        )
    elif "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        # Segments that grow: what one size has left serves any other, and reserved memory stays near allocated.
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    if nodes.num_nodes == 1 and not gpus:
        # gloo would ask the name service for this machine's address, which a laptop often doesn't have or changes.
        loopback = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
        if loopback:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback[0])


def _torch_has_no_cuda() -> bool:
    import torch

    return torch.version.cuda is None
