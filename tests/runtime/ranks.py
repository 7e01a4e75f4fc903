"""Several ranks on this machine: forked processes with gloo, and arenas that all of them map."""

from __future__ import annotations

import io
import multiprocessing
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

SECONDS = 60


def run_ranks(
    worker: Callable[..., Any], num_ranks: int, folder: Path, *args: Any, lost: tuple[int, ...] = ()
) -> list[Any]:
    """Call `worker(rank, num_ranks, folder, *args)` on every rank; what each returned.

    A rank that raises or hangs fails the test; those in `lost` are expected to die.
    """
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in range(num_ranks)]
    processes = [
        context.Process(target=_rank, args=(worker, rank, num_ranks, folder, pipe[1], args))
        for rank, pipe in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    for _, sender in pipes:
        sender.close()
    try:
        found: list[Any] = []
        for rank, (receiver, _) in enumerate(pipes):
            assert receiver.poll(SECONDS), f"rank {rank} gave nothing within {SECONDS} s"
            try:
                ok, value = torch.load(io.BytesIO(receiver.recv_bytes()), weights_only=False)
            except EOFError:
                ok, value = rank in lost, None
            assert ok, f"rank {rank}: {value}"
            found.append(value)
    finally:
        for process in processes:
            process.kill()
            process.join()
    return found


def _rank(
    worker: Callable[..., Any], rank: int, num_ranks: int, folder: Path, pipe: Any, args: Any
) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=num_ranks
        )
        _send(pipe, True, worker(rank, num_ranks, folder, *args))
    except BaseException:
        _send(pipe, False, traceback.format_exc())
        raise
    pipe.close()


def _send(pipe: Any, ok: bool, value: Any) -> None:
    """As bytes: a tensor sent as such would live in the memory of a process that ends."""
    buffer = io.BytesIO()
    torch.save((ok, value), buffer)
    pipe.send_bytes(buffer.getvalue())


class MappedFiles:
    """One file a rank, mapped by all; a stand-in for device memory that peers can read."""

    def __init__(self, rank: int, num_ranks: int, folder: Path, num_bytes: int) -> None:
        path = folder / f"arena-{rank}"
        with path.open("wb") as file:
            file.truncate(num_bytes)
        dist.barrier()
        self._peers = [
            torch.from_file(
                str(folder / f"arena-{r}"), shared=True, size=num_bytes, dtype=torch.uint8
            )
            for r in range(num_ranks)
        ]
        self.local = self._peers[rank]

    def peer(self, rank: int) -> Tensor:
        return self._peers[rank]

    def barrier(self) -> None:
        dist.barrier()
