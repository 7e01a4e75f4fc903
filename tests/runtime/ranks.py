"""Several ranks on this machine: forked processes with gloo."""

from __future__ import annotations

import io
import multiprocessing
import traceback
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SECONDS = 180  # compilers of several tests share a small machine


def run_ranks(
    worker: Callable[..., Any], num_ranks: int, folder: Path, *args: Any, lost: tuple[int, ...] = ()
) -> list[Any]:
    """Call `worker(rank, num_ranks, folder, *args)` on every rank; what each returned.

    A rank that raises or hangs fails the test; those in `lost` are expected to die.
    """
    context = multiprocessing.get_context("fork")
    meeting = f"file://{folder}/rendezvous-{uuid.uuid4().hex}"  # a file serves one group
    pipes = [context.Pipe(duplex=False) for _ in range(num_ranks)]
    processes = [
        context.Process(
            target=_rank, args=(worker, rank, num_ranks, folder, meeting, pipe[1], args)
        )
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
    worker: Callable[..., Any],
    rank: int,
    num_ranks: int,
    folder: Path,
    meeting: str,
    pipe: Any,
    args: Any,
) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=num_ranks)
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
