"""What this machine lends a job: GPUs and their memory, CPU cores, host memory. Imports no torch, starts no CUDA."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Gpu:
    """An NVIDIA GPU, or the instance of one that MIG makes."""

    name: str
    memory_bytes: int


def visible_gpus(environ: Mapping[str, str]) -> list[Gpu]:
    """The GPUs that CUDA will show a process with this environment; none where there is no NVIDIA driver.

    Asks the driver's management library (NVML), which takes milliseconds and leaves the GPUs alone.
    """
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return []
    if nvml.nvmlInit_v2() != 0:
        return []
    try:
        handles = _handles(nvml)
        uuids = [_text(nvml.nvmlDeviceGetUUID, handle) for handle in handles]
        chosen = select_visible(environ.get("CUDA_VISIBLE_DEVICES"), uuids)
        asked = [handles[entry] if isinstance(entry, int) else _mig_handle(nvml, entry) for entry in chosen]
        return [_describe(nvml, handle) for handle in asked if handle is not None]
    finally:
        nvml.nvmlShutdown()


def select_visible(visible: str | None, uuids: Sequence[str]) -> list[int | str]:
    """What CUDA makes of CUDA_VISIBLE_DEVICES: indices into the machine's GPUs, and names of MIG instances as they are.

    CUDA reads indices or beginnings of UUIDs up to the first entry that names no GPU, and shows none at all where one
    is named twice.

    Args:
        visible: the variable's text; None where it is not set, which shows every GPU.
        uuids: UUID of each GPU of the machine.
    """
    if visible is None:
        return list(range(len(uuids)))
    chosen: list[int | str] = []
    for entry in visible.split(","):
        named = _named(entry.strip(), uuids)
        if named is None:
            break
        chosen.append(named)
    return chosen if len(set(chosen)) == len(chosen) else []


def _named(entry: str, uuids: Sequence[str]) -> int | str | None:
    if entry.startswith("MIG-"):
        return entry
    if entry.startswith("GPU-"):
        matches = [index for index, uuid in enumerate(uuids) if uuid.startswith(entry)]
        return matches[0] if len(matches) == 1 else None
    return int(entry) if entry.isascii() and entry.isdigit() and int(entry) < len(uuids) else None


class _MemoryInfo(ctypes.Structure):
    """nvmlMemory_t."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def _handles(nvml: ctypes.CDLL) -> list[ctypes.c_void_p]:
    count = ctypes.c_uint()
    nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
    handles = []
    for index in range(count.value):
        handle = ctypes.c_void_p()
        if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) == 0:
            handles.append(handle)
    return handles


def _mig_handle(nvml: ctypes.CDLL, uuid: str) -> ctypes.c_void_p | None:
    handle = ctypes.c_void_p()
    found = nvml.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle)) == 0
    return handle if found else None


def _describe(nvml: ctypes.CDLL, handle: ctypes.c_void_p) -> Gpu:
    memory = _MemoryInfo()
    nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
    return Gpu(_text(nvml.nvmlDeviceGetName, handle), memory.total)


def _text(function: Callable[..., int], handle: ctypes.c_void_p) -> str:
    buffer = ctypes.create_string_buffer(96)
    function(handle, buffer, len(buffer))
    return buffer.value.decode()


def num_cpu_cores() -> int:
    """Cores that this process may use: those of its affinity mask, and no more than its container's quota."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux alone has it
    cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    for limit in cgroup_limits("cpu.max", _own_cgroups()):
        quota, _, period = limit.partition(" ")
        if quota.isdigit() and period.isdigit():
            cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def host_memory_bytes() -> int | None:
    """Memory of this machine, or of the container where that has less; None if the system doesn't say."""
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None
    limits = cgroup_limits("memory.max", _own_cgroups())
    return min([total, *(int(limit) for limit in limits if limit.isdigit())])


def cgroup_limits(name: str, groups: str, root: Path = Path("/sys/fs/cgroup")) -> Iterator[str]:
    """The text of a limit in each control group around a process (Linux, version 2); all of them hold.

    Args:
        name: the limit's file, such as memory.max.
        groups: the process's /proc/<pid>/cgroup.
    """
    for line in groups.splitlines():
        hierarchy, _, path = line.partition("::")
        if hierarchy != "0":
            continue
        group = Path(path.lstrip("/"))
        for level in (group, *group.parents):
            with suppress(OSError):
                yield (root / level / name).read_text().strip()


def _own_cgroups() -> str:
    try:
        return Path("/proc/self/cgroup").read_text()
    except OSError:
        return ""
