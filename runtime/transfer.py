"""How the bytes of a layer reach their new owners, and the memory that this takes.

```
PeerCopies     every rank pulls its blocks out of the others' mapped arenas
Collective     an all-to-all a layer through scratch, where arenas cannot be mapped
allocate       one segment a rank that all ranks map; ordinary memory, with the reason, where they cannot
measure_link   what either way reaches at best on this machine
```
"""

from __future__ import annotations

import dataclasses
import logging
import time
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from moe_compiler.arena import ArenaPlan
from moe_compiler.errors import PeerError
from moe_compiler.expert_blocks import Move
from moe_compiler.runtime.arena_views import Arena
from moe_compiler.runtime.peers import PeerMemory

log = logging.getLogger(__name__)

LINK_BYTES = 32 << 20
"""How much of the arena `measure_link` copies at most."""

_REPEATS = 3
# As long as the collectives of torch wait; a rank that ended is noticed at once.
_TIMEOUT_S = 1800.0


class Peers(Protocol):
    """The arenas of all ranks, mapped here."""

    def peer(self, rank: int) -> Tensor:
        """The arena of a rank, uint8."""

    def barrier(self) -> None:
        """Wait for all ranks; raises when one does not come."""


class Transfer(Protocol):
    """Moves one layer on every rank; when it returns, nobody reads the layer's source any more.

    Attributes:
        name: what moves the bytes, for reports.
    """

    name: str

    def move(self, layer_moves: tuple[Move, ...], source: int, target: int) -> None:
        """Carry out the moves of a layer whose slots start at these offsets in bytes."""

    def pull(self, num_bytes: int) -> None:
        """Fill the start of this arena with as many bytes of the next rank's, as all ranks do at once.

        Args:
            num_bytes: at most half of the arena; nothing of use may lie in it.
        """

    def barrier(self) -> None:
        """Wait for all ranks."""


class PeerCopies:
    """Each rank copies what it will own straight out of the arenas of the others. Nothing is allocated."""

    name = "peer copies"

    def __init__(self, arena: Arena, rank: int, peers: Peers) -> None:
        self._arena, self._rank, self._peers = arena, rank, peers

    def move(self, layer_moves: tuple[Move, ...], source: int, target: int) -> None:
        """See `Transfer.move`."""
        for move in layer_moves:
            if move.dst_rank == self._rank:
                start = source + move.src_offset
                into = target + move.dst_offset
                self._arena.memory[into : into + move.num_bytes].copy_(
                    self._peers.peer(move.src_rank)[start : start + move.num_bytes]
                )
        # The next layer's target may be this layer's source.
        self._peers.barrier()

    def pull(self, num_bytes: int) -> None:
        """See `Transfer.pull`."""
        source = (self._rank + 1) % self._arena.plan.num_ranks
        self._arena.memory[:num_bytes].copy_(self._peers.peer(source)[num_bytes : 2 * num_bytes])

    def barrier(self) -> None:
        """See `Transfer.barrier`."""
        self._peers.barrier()


class Collective:
    """One all-to-all a layer; what arrives and what leaves lie in buffers that are allocated once.

    Args:
        arena: the rank's arena.
        group: the process group; None for the default one.
    """

    name = "all-to-all"

    def __init__(self, arena: Arena, group: Any = None) -> None:
        self._arena, self._group = arena, group
        self._rank = dist.get_rank(group)
        plan = arena.plan
        size = max(
            (b.num_bytes(layout) for b in plan.experts for layout in plan.layouts), default=0
        )
        self._outgoing = arena.memory.new_empty(size)
        self._incoming = arena.memory.new_empty(size)

    def move(self, layer_moves: tuple[Move, ...], source: int, target: int) -> None:
        """See `Transfer.move`."""
        num_ranks = self._arena.plan.num_ranks
        memory = self._arena.memory
        sent, received = [0] * num_ranks, [0] * num_ranks
        at = 0
        # Both sides walk the moves in the same order, so the bytes need no labels.
        for peer in range(num_ranks):
            for move in layer_moves:
                if move.src_rank == self._rank and move.dst_rank == peer:
                    start = source + move.src_offset
                    self._outgoing[at : at + move.num_bytes].copy_(
                        memory[start : start + move.num_bytes]
                    )
                    at += move.num_bytes
                    sent[peer] += move.num_bytes
                if move.dst_rank == self._rank and move.src_rank == peer:
                    received[peer] += move.num_bytes
        dist.all_to_all_single(
            self._incoming[: sum(received)], self._outgoing[:at], received, sent, group=self._group
        )
        at = 0
        for peer in range(num_ranks):
            for move in layer_moves:
                if move.dst_rank == self._rank and move.src_rank == peer:
                    into = target + move.dst_offset
                    memory[into : into + move.num_bytes].copy_(
                        self._incoming[at : at + move.num_bytes]
                    )
                    at += move.num_bytes

    def pull(self, num_bytes: int) -> None:
        """See `Transfer.pull`."""
        num_ranks = self._arena.plan.num_ranks
        num_bytes = min(num_bytes, len(self._incoming))
        sent, received = [0] * num_ranks, [0] * num_ranks
        sent[(self._rank - 1) % num_ranks] = received[(self._rank + 1) % num_ranks] = num_bytes
        dist.all_to_all_single(
            *(self._incoming[:num_bytes], self._outgoing[:num_bytes], received, sent),
            group=self._group,
        )

    def barrier(self) -> None:
        """See `Transfer.barrier`."""
        dist.barrier(self._group)


@dataclasses.dataclass(frozen=True)
class ArenaMemory:
    """Memory for one rank's arena.

    Attributes:
        local: uint8, zeros.
        peers: the arenas of all ranks; None where they cannot be mapped.
        reason: why not; "".
    """

    local: Tensor
    peers: PeerMemory | None = None
    reason: str = ""

    def transfer(self, arena: Arena, rank: int, group: Any = None) -> Transfer:
        """The way to move bytes between arenas in such memory."""
        if self.peers is None:
            return Collective(arena, group)
        return PeerCopies(arena, rank, self.peers)


def allocate(plan: ArenaPlan, group: Any = None) -> ArenaMemory:
    """One arena a rank, mapped by all ranks where one machine holds them; every rank calls this."""
    try:
        peers = PeerMemory(plan.num_bytes, group, timeout_s=_TIMEOUT_S)
    except PeerError as error:
        log.warning("arenas are not shared, so that switches go by collectives: %s", error)
        return ArenaMemory(torch.zeros(plan.num_bytes, dtype=torch.uint8), reason=str(error))
    return ArenaMemory(peers.local, peers)


def measure_link(transfer: Transfer, plan: ArenaPlan) -> float:
    """GB/s at which every rank receives from another one when all do; before anything lies in the arenas.

    Returns:
        The best of a few rounds; 0.0 for one rank, which has no link.
    """
    num_bytes = min(LINK_BYTES, plan.num_bytes // 2)
    if plan.num_ranks < 2 or not num_bytes:
        return 0.0
    best = float("inf")
    for _ in range(_REPEATS + 1):  # the first round touches the pages
        transfer.barrier()
        start = time.perf_counter()
        transfer.pull(num_bytes)
        best = min(best, time.perf_counter() - start)
    transfer.barrier()
    return num_bytes / best / 1e9
