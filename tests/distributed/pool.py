"""Pools of gloo ranks that stay alive for the whole test run: a distributed test is an ordinary function call."""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

CALL_TIMEOUT_S = 300
# Groups that something still refers to keep their threads, which poll: idle ranks with hundreds of them cost a core.
_MOST_THREADS = 100


def _serve(rank: int, world_size: int, store: str, pipe: Connection) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    gc.disable()
    import torch
    import torch.distributed as dist
    import torch.distributed.fsdp
    import torch.distributed.tensor.debug

    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # what is there now stays, and need not be looked at after every call
    gc.enable()
    for call in itertools.count():
        dist.init_process_group("gloo", init_method=f"file://{store}-{call}", rank=rank, world_size=world_size)
        try:
            function, args, kwargs = pickle.loads(pipe.recv_bytes())
        except EOFError:
            os._exit(0)  # the test run has ended; nothing is owed to the other ranks
        try:
            answer = (True, function(*args, **kwargs))
        except BaseException:
            answer = (False, f"rank {rank} of {world_size}:\n{traceback.format_exc()}")
        succeeded = answer[0]
        pipe.send_bytes(pickle.dumps(answer))
        del answer
        if not succeeded:
            return  # the pool is being stopped
        dist.barrier()  # nobody waits for anything any more
        gc.collect()
        # Every gloo group has threads and sockets of its own, and hundreds of groups stall a machine.
        dist.destroy_process_group()
        # DTensor remembers results on a mesh equal to one of the next call, but with groups that are gone.
        torch.distributed.tensor.debug._clear_sharding_prop_cache()


class RankPool:
    """`world_size` processes in one gloo group."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Calls a module-level function on every rank and returns what each rank returned, in rank order.

        Raises:
            AssertionError: with the traceback of every rank that failed. The pool starts afresh at the next call.
        """
        if not self._processes:
            self._start()
        message = pickle.dumps((function, args, kwargs))
        for pipe in self._pipes:
            pipe.send_bytes(message)
        answers: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + CALL_TIMEOUT_S
        while len(answers) < self.world_size and all(ok for ok, _ in answers.values()):
            ready = multiprocessing.connection.wait(self._waiting(answers), timeout=deadline - time.monotonic())
            for pipe in ready:
                rank = self._pipes.index(pipe)  # type: ignore[arg-type]
                answers[rank] = self._receive(rank)
            if not ready:
                answers[-1] = (False, f"ranks {sorted(set(range(self.world_size)) - answers.keys())} never answered")
        failures = [text for ok, text in answers.values() if not ok]
        if failures:
            self.stop()
            raise AssertionError("\n".join(failures))
        if self._num_threads() > _MOST_THREADS:
            self.stop()
        return [answers[rank][1] for rank in range(self.world_size)]

    def _num_threads(self) -> int:
        """Of the first rank; 0 where the system doesn't tell."""
        tasks = Path(f"/proc/{self._processes[0].pid}/task")
        return len(list(tasks.iterdir())) if tasks.is_dir() else 0

    def _waiting(self, answers: dict[int, Any]) -> list[Connection]:
        return [pipe for rank, pipe in enumerate(self._pipes) if rank not in answers]

    def _receive(self, rank: int) -> tuple[bool, Any]:
        try:
            return pickle.loads(self._pipes[rank].recv_bytes())
        except EOFError:
            self._processes[rank].join(5)
            return False, f"rank {rank} died with exit code {self._processes[rank].exitcode}"

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory(prefix="gloo-stores-")
        store = os.path.join(self._folder.name, "store")
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.world_size, store, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._pipes, self._processes = [], []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None
