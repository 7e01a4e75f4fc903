"""Tensors that have a shape and no memory of their own: what is left of a parameter that moved into an arena.

Every element reads as NaN, so that nobody computes with them by accident; one small file in memory
is mapped again and again behind the whole range. A parameter may also stand in for values that a
checkpoint holds and nobody has read yet.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import tempfile
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from moe_compiler.errors import CheckpointError, UnsupportedError
from moe_compiler.runtime.checkpoint import ParameterSource

_SOURCE = "_moeflex_source"
_FILE_BYTES = 16 << 20
_MAP_FIXED = 0x10
# Addresses alone: no memory is set aside for them.
_MAP_NORESERVE = 0x4000


def stand_in(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """A contiguous CPU tensor of NaNs that costs address space only, until somebody writes to it.

    Raises:
        UnsupportedError: this system cannot map one file over a range repeatedly.
    """
    num_bytes = shape.numel() * dtype.itemsize
    if num_bytes == 0:
        return torch.empty(shape, dtype=dtype)
    try:
        pages = mmap.mmap(
            -1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        )
        start = ctypes.addressof(ctypes.c_char.from_buffer(pages))
        for offset in range(0, num_bytes, _FILE_BYTES):
            length = min(_FILE_BYTES, num_bytes - offset)
            found = _libc().mmap(
                start + offset,
                length,
                mmap.PROT_READ | mmap.PROT_WRITE,
                mmap.MAP_PRIVATE | _MAP_FIXED | _MAP_NORESERVE,
                _nan_file(),
                0,
            )
            if found != start + offset:
                raise OSError(ctypes.get_errno(), "mmap")
    except (OSError, AttributeError) as error:
        raise UnsupportedError(
            f"layouts over ranks need POSIX memory maps for {num_bytes} bytes of addresses ({error})"
        ) from error
    return torch.frombuffer(pages, dtype=torch.uint8)[:num_bytes].view(dtype).view(shape)


@functools.cache
def _libc() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = (
        *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int),
        *(ctypes.c_int, ctypes.c_int, ctypes.c_long),
    )
    return library


@functools.cache
def _nan_file() -> int:
    """A file of 0xff bytes: NaN in every floating-point dtype."""
    file = tempfile.TemporaryFile()  # noqa: SIM115  open as long as the process
    _kept.append(file)
    os.write(file.fileno(), b"\xff" * _FILE_BYTES)
    return file.fileno()


_kept: list[object] = []


def mark_source(parameter: nn.Parameter, source: ParameterSource) -> None:
    """Note where the values of a parameter will come from."""
    setattr(parameter, _SOURCE, source)


def pending_source(parameter: nn.Parameter) -> ParameterSource | None:
    """Where the values of a parameter that has none yet come from."""
    found = getattr(parameter, _SOURCE, None)
    return found if isinstance(found, ParameterSource) else None


def forget_source(parameter: nn.Parameter) -> None:
    """The values are there."""
    if hasattr(parameter, _SOURCE):
        delattr(parameter, _SOURCE)


def check_read(parameters: Iterable[object]) -> None:
    """Refuse to compile a model for one process whose values are read over a group.

    Raises:
        CheckpointError: a parameter has no values yet.
    """
    if any(isinstance(p, nn.Parameter) and pending_source(p) is not None for p in parameters):
        raise CheckpointError(
            "load_checkpoint was called with a process group, so the values are read into its arenas: compile with "
            "options={'group': 'world'}. For one process, load before torch.distributed is initialised"
        )
