"""Tensors that have a shape and no memory of their own: what is left of a parameter that moved into an arena.

Every element reads as NaN, so that nobody computes with them by accident; one small file in memory
is mapped again and again behind the whole range.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import tempfile

import torch
from torch import Tensor

from moe_compiler.errors import UnsupportedError

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
