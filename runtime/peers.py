"""Memory that all ranks of one machine map: a segment a rank, with a barrier and signals that never hang.

```
PeerMemory       segments in shared memory
CudaPeerMemory   segments in symmetric device memory; barrier and signals as above
```

The first page of a segment holds control words, each of which one rank alone writes and only ever
raises. The owner of a segment keeps a lock on it, which the kernel drops when the process ends,
however it ends: whoever waits looks at that lock, so a lost rank is an error and not a hang.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import fcntl
import mmap
import os
import secrets
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_compiler.errors import PeerError

SHARED_MEMORY = Path("/dev/shm")
"""Where Linux has its shared memory."""

NUM_SIGNALS = 16
"""Signal slots for each pair of ranks."""

_WORD = 8
_STATE, _EPOCH, _SIGNALS = 0, 8, 16  # word indices; state and epoch on cache lines of their own
_OPEN, _CLOSED = 1, 2
_SPINS = 200
_PAUSE_S = 100e-6
_CHECK_S = 0.02

_fence_lock = threading.Lock()


def _fence() -> None:
    """Reads and writes before it come before those after it: a release, then an acquire."""
    for _ in range(2):
        with _fence_lock:
            pass


@dataclasses.dataclass(frozen=True, slots=True)
class _Offer:
    """What a rank tells the others about its segment, or why it has none."""

    path: str = ""
    num_bytes: int = 0
    problem: str = ""


class _Segment:
    """One mapped file: a control part, then the payload."""

    def __init__(self, descriptor: int, num_bytes: int, num_ranks: int) -> None:
        control = _control_bytes(num_ranks)
        self.descriptor = descriptor
        self.map = mmap.mmap(descriptor, control + num_bytes)
        self.words = (ctypes.c_int64 * (control // _WORD)).from_buffer(self.map)
        payload = memoryview(self.map)[control:]
        self.bytes = (
            torch.frombuffer(payload, dtype=torch.uint8)
            if num_bytes
            else torch.empty(0, dtype=torch.uint8)
        )


def _control_bytes(num_ranks: int) -> int:
    return -(-_WORD * (_SIGNALS + num_ranks * NUM_SIGNALS) // mmap.PAGESIZE) * mmap.PAGESIZE


class PeerMemory:
    """One segment of shared memory a rank of `group`, mapped by every rank.

    Every rank of the group has to make one, in the same order. The files have no name any more once
    this returns, so that nothing stays behind whatever happens to the processes.

    Args:
        num_bytes: payload of this rank's segment; ranks may differ. It is zeroed and page aligned.
        group: the process group; None for the default one. All its ranks run on one machine.
        timeout_s: how long `barrier` and `wait` wait when they are not told otherwise.

    Attributes:
        rank: this rank, in the group.
        num_ranks: R.
        local: this rank's payload, uint8 [num_bytes].

    Raises:
        PeerError: a rank could not make or map a segment; every rank raises it.
    """

    def __init__(self, num_bytes: int, group: Any = None, *, timeout_s: float = 60.0) -> None:
        if num_bytes < 0:
            raise PeerError(f"a segment has 0 bytes or more; got {num_bytes}")
        self.rank = dist.get_rank(group)
        self.num_ranks = dist.get_world_size(group)
        self._group, self._timeout_s, self._pid = group, timeout_s, os.getpid()
        self._epoch = 0
        self._broken = ""
        self._segments: list[_Segment] = []
        own, mine = self._create(num_bytes)
        try:
            offers = self._exchange(mine)
            problem = self._map(own, offers)
            problems = [o.problem for o in self._exchange(_Offer(problem=problem)) if o.problem]
            if problems:
                raise PeerError(problems[0])
        except BaseException:
            self._segments = []
            raise
        finally:
            if mine.path:
                with contextlib.suppress(OSError):
                    os.unlink(mine.path)
        self.local = self._segments[self.rank].bytes

    # ---- setting up

    def _create(self, num_bytes: int) -> tuple[_Segment | None, _Offer]:
        path = segment_folder() / f"moeflex-{os.getpid()}-{secrets.token_hex(8)}"
        total = _control_bytes(self.num_ranks) + num_bytes
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                # Reserved now: memory that is missing later would end the process at its first touch.
                os.posix_fallocate(descriptor, 0, total)
                segment = _Segment(descriptor, num_bytes, self.num_ranks)
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BaseException:
                os.close(descriptor)
                os.unlink(path)
                raise
        except OSError as error:
            return None, _Offer(
                problem=f"rank {self.rank} cannot make a segment of {total} bytes in {path.parent}: {error}. "
                "Give that file system more room (containers: --shm-size), or ask for less."
            )
        segment.words[_STATE] = _OPEN
        return segment, _Offer(path=str(path), num_bytes=num_bytes)

    def _exchange(self, mine: _Offer) -> list[_Offer]:
        offers: list[Any] = [None] * self.num_ranks
        try:
            dist.all_gather_object(offers, mine, group=self._group)
        except RuntimeError as error:
            raise PeerError(
                f"a rank was lost while segments were set up: {error}. Start all ranks again."
            ) from error
        return offers

    def _map(self, own: _Segment | None, offers: list[_Offer]) -> str:
        """Map all segments; why that is not possible, or ""."""
        for offer in offers:
            if offer.problem:
                return offer.problem
        for rank, offer in enumerate(offers):
            if rank == self.rank:
                assert own is not None
                self._segments.append(own)
                continue
            try:
                descriptor = os.open(offer.path, os.O_RDWR | os.O_CLOEXEC)
                self._segments.append(_Segment(descriptor, offer.num_bytes, self.num_ranks))
            except OSError as error:
                return (
                    f"rank {self.rank} cannot map the segment of rank {rank} ({offer.path}): {error}. "
                    "The ranks must run on one machine and see one shared-memory folder."
                )
        return ""

    # ---- memory

    def peer(self, rank: int) -> Tensor:
        """The payload of a rank, uint8, as mapped here.

        Raises:
            PeerError: closed, or there is no such rank.
        """
        return self._segment(rank).bytes

    @property
    def addresses(self) -> tuple[int, ...]:
        """Where each rank's payload lies in this process."""
        return tuple(self.peer(rank).data_ptr() for rank in range(self.num_ranks))

    # ---- order

    def barrier(self, timeout_s: float | None = None) -> None:
        """Wait until every rank is here; what a rank wrote before is then seen by all.

        Raises:
            PeerError: a rank ended, closed its memory or did not come in time. This object is of no use then.
        """
        self._usable()
        self._epoch += 1
        _fence()
        self._segments[self.rank].words[_EPOCH] = self._epoch
        for rank, segment in enumerate(self._segments):
            self._wait(rank, _reaches(segment, _EPOCH, self._epoch), "barrier", timeout_s)

    def signal(self, rank: int, slot: int, value: int) -> None:
        """Raise a signal of this rank at `rank` to `value`; what was written before is seen by who waits for it.

        Args:
            rank: whom to tell.
            slot: 0 <= slot < NUM_SIGNALS.
            value: at least what was signalled before.

        Raises:
            PeerError: closed, no such rank, no such slot, or a value below the last one.
        """
        words, at = self._segment(rank).words, _signal_word(self.rank, slot)
        if value < words[at]:
            raise PeerError(f"signals only grow: slot {slot} is at {words[at]}; got {value}")
        _fence()
        words[at] = value

    def wait(self, rank: int, slot: int, value: int, timeout_s: float | None = None) -> None:
        """Wait until `rank` has signalled this rank at least `value`.

        Raises:
            PeerError: see `barrier`.
        """
        self._segment(rank)
        arrived = _reaches(self._segments[self.rank], _signal_word(rank, slot), value)
        self._wait(rank, arrived, f"signal {slot} of rank {rank}", timeout_s)

    def check(self) -> None:
        """Look once whether all ranks are there.

        Raises:
            PeerError: a rank has ended or closed its memory.
        """
        self._usable()
        for rank in range(self.num_ranks):
            self._check(rank, "check")

    def _wait(
        self, rank: int, arrived: Callable[[], bool], what: str, timeout_s: float | None
    ) -> None:
        limit = self._timeout_s if timeout_s is None else timeout_s
        start = time.monotonic()
        next_check = start + _CHECK_S
        spins = 0
        while not arrived():
            spins += 1
            time.sleep(0 if spins < _SPINS else _PAUSE_S)
            now = time.monotonic()
            if now < next_check:
                continue
            next_check = now + _CHECK_S
            self._check(rank, what, arrived)
            if now - start > limit:
                self._fail(f"{what}: rank {rank} did not come within {limit:g} s")
        _fence()

    def _check(self, rank: int, what: str, arrived: Callable[[], bool] = lambda: False) -> None:
        if rank == self.rank:
            return
        segment = self._segments[rank]
        gone = ""
        if segment.words[_STATE] == _CLOSED:
            gone = "has closed its memory"
        elif not _is_locked(segment.descriptor):
            gone = "has ended"
        # It may have arrived first and gone then.
        if gone and not arrived():
            self._fail(f"{what}: rank {rank} {gone}")

    def _fail(self, what: str) -> None:
        self._broken = (
            f"{what} (seen by rank {self.rank} of {self.num_ranks}). "
            "Start the ranks again; the log of that rank says why."
        )
        raise PeerError(self._broken)

    def _usable(self) -> None:
        if self._broken:
            raise PeerError(self._broken)
        if not self._segments:
            raise PeerError("this peer memory is closed; make a new one on every rank")

    def _segment(self, rank: int) -> _Segment:
        self._usable()
        if not 0 <= rank < self.num_ranks:
            raise PeerError(f"the group has ranks 0 to {self.num_ranks - 1}; got {rank}")
        return self._segments[rank]

    # ---- end

    def close(self) -> None:
        """Tell the others and let go; a mapping lasts while a tensor of it does. Waits for nobody."""
        if not self._segments or self._pid != os.getpid():  # a forked child does not speak for us
            return
        _fence()
        self._segments[self.rank].words[_STATE] = _CLOSED
        segments, self._segments = self._segments, []
        self.local = torch.empty(0, dtype=torch.uint8)
        for segment in segments:
            os.close(segment.descriptor)

    def __enter__(self) -> PeerMemory:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class CudaPeerMemory(PeerMemory):
    """The same in device memory: torch symmetric memory, multicast off.

    `barrier` and `signal` first wait for this rank's current stream.

    Raises:
        PeerError: this torch or this machine has no symmetric memory, or see `PeerMemory`.
    """

    def __init__(self, num_bytes: int, group: Any = None, *, timeout_s: float = 60.0) -> None:
        super().__init__(0, group, timeout_s=timeout_s)
        try:
            self._handle, self.local = _symmetric(num_bytes, group)
        except (ImportError, AttributeError, RuntimeError) as error:
            self.close()
            raise PeerError(
                f"no symmetric memory of {num_bytes} bytes between the GPUs of this group: {error}. It takes "
                "CUDA GPUs of one machine with peer access, one a rank (torch.cuda.set_device)."
            ) from error

    def peer(self, rank: int) -> Tensor:
        """See `PeerMemory.peer`."""
        self._segment(rank)
        buffer: Tensor = self._handle.get_buffer(rank, self.local.shape, torch.uint8)
        return buffer

    def barrier(self, timeout_s: float | None = None) -> None:
        """See `PeerMemory.barrier`."""
        torch.cuda.current_stream().synchronize()
        super().barrier(timeout_s)

    def signal(self, rank: int, slot: int, value: int) -> None:
        """See `PeerMemory.signal`."""
        torch.cuda.current_stream().synchronize()
        super().signal(rank, slot, value)


def _symmetric(num_bytes: int, group: Any) -> tuple[Any, Tensor]:
    if not torch.cuda.is_available():
        raise RuntimeError("torch sees no CUDA device")
    # Read when the memory is mapped; multicast objects hang on machines that forbid them.
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    import torch.distributed._symmetric_memory as symmetric

    group = dist.group.WORLD if group is None else group
    local = symmetric.empty((num_bytes,), dtype=torch.uint8, device=torch.device("cuda"))
    local.zero_()
    return symmetric.rendezvous(local, group), local


def _reaches(segment: _Segment, word: int, value: int) -> Callable[[], bool]:
    words = segment.words
    return lambda: words[word] >= value


def _signal_word(source: int, slot: int) -> int:
    if not 0 <= slot < NUM_SIGNALS:
        raise PeerError(f"signal slots are 0 to {NUM_SIGNALS - 1}; got {slot}")
    return _SIGNALS + source * NUM_SIGNALS + slot


def _is_locked(descriptor: int) -> bool:
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    fcntl.lockf(descriptor, fcntl.LOCK_UN)
    return False


def segment_folder() -> Path:
    """Where segments lie: in memory, if this machine has shared memory that can be written."""
    return SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else Path(tempfile.gettempdir())
