"""Shared segments of several ranks: what is written arrives, nothing is left behind, a lost rank is an error."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_compiler.errors import PeerError
from moe_compiler.runtime import peers
from moe_compiler.runtime.peers import CudaPeerMemory, PeerMemory
from tests.runtime.ranks import run_ranks


def leftovers() -> set[str]:
    return {path.name for path in peers.segment_folder().glob("moeflex-*-*")}


def exchange(rank: int, num_ranks: int, folder: Path) -> Any:
    """Sizes differ, one is zero; every rank writes its number into every other segment."""
    with PeerMemory(64 * ((rank + 1) % num_ranks)) as memory:
        assert memory.local.sum() == 0
        memory.barrier()
        sizes = [memory.peer(r).numel() for r in range(num_ranks)]
        for step in range(1, 21):
            for other in range(num_ranks):
                if memory.peer(other).numel():
                    memory.peer(other)[rank] = step + rank
            memory.barrier()
            if memory.local.numel():
                assert memory.local[:num_ranks].tolist() == [step + r for r in range(num_ranks)]
            memory.barrier()
        assert memory.addresses[rank] == memory.peer(rank).data_ptr()
        assert all(a % 4096 == 0 for a, n in zip(memory.addresses, sizes, strict=True) if n)
        memory.barrier()
    return sizes


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_what_is_written_is_seen_after_the_barrier(tmp_path: Path, num_ranks: int) -> None:
    before = leftovers()
    sizes = [64 * ((r + 1) % num_ranks) for r in range(num_ranks)]
    assert run_ranks(exchange, num_ranks, tmp_path) == [sizes] * num_ranks
    assert leftovers() <= before


def pass_on(rank: int, num_ranks: int, folder: Path) -> int:
    """A token goes round; each rank adds its number before it signals the next one."""
    memory = PeerMemory(8)
    for turn in range(1, 11):
        if rank or turn > 1:
            memory.wait((rank - 1) % num_ranks, 3, turn - (rank == 0))
        memory.peer((rank + 1) % num_ranks).view(torch.int64)[0] = (
            memory.local.view(torch.int64)[0] + rank
        )
        memory.signal((rank + 1) % num_ranks, 3, turn)
    memory.wait((rank - 1) % num_ranks, 3, 10)
    return int(memory.local.view(torch.int64)[0])


def test_a_signal_brings_what_was_written_before_it(tmp_path: Path) -> None:
    assert run_ranks(pass_on, 4, tmp_path)[0] == 10 * (0 + 1 + 2 + 3)


def die(rank: int, num_ranks: int, folder: Path, how: str) -> Any:
    before = leftovers()
    memory = PeerMemory(4096, timeout_s=1.0 if how == "sleep" else 30.0)
    memory.barrier()
    assert leftovers() <= before, "a mapped segment has no name"
    if rank == 1:
        if how == "kill":
            # A forked child must not keep the lost rank alive.
            if os.fork() == 0:
                time.sleep(3)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "close":
            memory.close()
        time.sleep(0 if how == "close" else 3)
        return None
    start = time.monotonic()
    messages = []
    for _ in range(2):  # the second time at once: the object stays broken
        with pytest.raises(PeerError) as caught:
            memory.barrier()
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    return messages[0], time.monotonic() - start


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("kill", "rank 1 has ended"),
        ("close", "rank 1 has closed its memory"),
        ("sleep", "rank 1 did not come within 1 s"),
    ],
)
def test_a_lost_rank_is_an_error_within_the_limit(tmp_path: Path, how: str, reason: str) -> None:
    found = run_ranks(die, 4, tmp_path, how, lost=(1,))
    for rank in (0, 2, 3):
        message, seconds = found[rank]
        # Whoever waits may hear it from a rank that has given up already.
        assert reason in message or "has ended" in message or "has closed" in message
        assert seconds < 2.5
    assert any(reason in found[rank][0] for rank in (0, 2, 3))


def refuse(rank: int, num_ranks: int, folder: Path) -> str:
    with pytest.raises(PeerError) as caught:
        PeerMemory(2**60 if rank == 1 else 64)
    dist.barrier()
    return str(caught.value)


def test_a_segment_that_one_rank_cannot_have_is_an_error_on_every_rank(tmp_path: Path) -> None:
    before = leftovers()
    for message in run_ranks(refuse, 3, tmp_path):
        assert "rank 1 cannot make a segment" in message
    assert leftovers() <= before


def misuse(rank: int, num_ranks: int, folder: Path) -> list[str]:
    memory = PeerMemory(64)
    memory.signal(0, 0, 5)
    memory.check()
    wrong = [
        lambda: memory.peer(2),
        lambda: memory.peer(-1),
        lambda: memory.signal(0, peers.NUM_SIGNALS, 1),
        lambda: memory.signal(0, 0, 4),
        lambda: PeerMemory(-1),
    ]
    messages = []
    for call in wrong:
        with pytest.raises(PeerError) as caught:
            call()
        messages.append(str(caught.value))
    memory.barrier()
    kept = memory.local
    memory.close()
    memory.close()
    kept += 1  # a tensor keeps its mapping
    with pytest.raises(PeerError, match="is closed"):
        memory.barrier()
    if not torch.cuda.is_available():
        with pytest.raises(PeerError, match="no CUDA device"):
            CudaPeerMemory(64)
    return messages


def test_misuse_is_named(tmp_path: Path) -> None:
    for messages in run_ranks(misuse, 2, tmp_path):
        assert ["ranks 0 to 1" in m for m in messages] == [True, True, False, False, False]
        assert "slots are 0 to 15" in messages[2] and "only grow" in messages[3]


def in_device_memory(rank: int, num_ranks: int, folder: Path) -> list[int]:
    torch.cuda.set_device(rank)
    memory = CudaPeerMemory(4096)
    for other in range(num_ranks):
        memory.peer(other)[rank] = 1 + rank
    memory.barrier()
    return memory.local[:num_ranks].tolist()


@pytest.mark.multigpu
def test_device_memory_of_two_gpus(tmp_path: Path) -> None:
    assert run_ranks(in_device_memory, 2, tmp_path) == [[1, 2]] * 2
