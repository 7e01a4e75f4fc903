"""Weights as safetensors: written from tensors, mapped back without a copy.

The format is read and written here because a loader has to map a part of a larger file, and needs nothing else of a
package for it: 8 bytes with the length of a JSON header, the header, then the tensors without gaps. Tensors whose size
is a multiple of 64 bytes come first, so that they, in practice all large ones, begin at one too.

Source: the safetensors format, "Format" in its README.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
import mmap
from collections.abc import Callable, Iterator, Mapping
from typing import Any, BinaryIO

import torch

from moe_compiler.errors import ArtifactError

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_ALIGNMENT = 64
_PIECE_BYTES = 16 << 20
MAX_HEADER_BYTES = 100_000_000


def chunks_of(
    tensors: Mapping[str, torch.Tensor],
) -> Callable[[], Iterator[bytes | memoryview]]:
    """What writes `tensors` as a safetensors file, one tensor at a time.

    Raises:
        ArtifactError: a dtype has no place in the format.
    """
    order = sorted(tensors, key=lambda name: (_num_bytes(tensors[name]) % _ALIGNMENT != 0, name))
    header: dict[str, Any] = {}
    at = 0
    for name in order:
        tensor = tensors[name]
        if tensor.dtype not in _NAMES:
            raise ArtifactError(
                f"the weight {name} is {tensor.dtype}, which an artifact cannot hold; it can hold "
                f"{', '.join(str(dtype) for dtype in _NAMES)}"
            )
        end = at + _num_bytes(tensor)
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, end],
        }
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)

    def chunks() -> Iterator[bytes | memoryview]:
        yield len(text).to_bytes(8, "little") + text
        for name in order:
            yield from _pieces(tensors[name])

    return chunks


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _pieces(tensor: torch.Tensor) -> Iterator[memoryview]:
    dense = tensor.detach().cpu().contiguous()
    size = _num_bytes(dense)
    content = memoryview((ctypes.c_ubyte * size).from_address(dense.data_ptr()) if size else b"")
    for at in range(0, size, _PIECE_BYTES):
        yield content[at : at + _PIECE_BYTES]


def map_tensors(handle: int, offset: int, num_bytes: int, where: str) -> dict[str, torch.Tensor]:
    """Map the tensors of a safetensors file that is a part of an open file.

    A page is read when it is first used and copied when it is first written: the file never changes.

    Args:
        handle: descriptor of the open file.
        offset: where the part begins; a multiple of the page size.
        num_bytes: its length.
        where: the file's name for messages.

    Returns:
        The tensors by name; each keeps the map alive.

    Raises:
        ArtifactError: what is there is no safetensors file, or its entries are not within it.
    """
    try:
        mapped = mmap.mmap(handle, num_bytes, access=mmap.ACCESS_COPY, offset=offset)
    except (OSError, ValueError) as error:
        raise ArtifactError(f"the weights of {where} cannot be mapped: {error}") from error
    header, base = _read_header(mapped, where)
    tensors = {}
    for name, entry in header.items():
        if name != "__metadata__":
            tensors[name] = _tensor(mapped, base, name, entry, where)
    return tensors


def digest(file: BinaryIO) -> str:
    """SHA-256 of a file from its beginning, as hex digits."""
    file.seek(0)
    found = hashlib.sha256()
    while chunk := file.read(_PIECE_BYTES):
        found.update(chunk)
    return found.hexdigest()


def _read_header(mapped: mmap.mmap, where: str) -> tuple[dict[str, Any], int]:
    size = int.from_bytes(mapped[:8], "little")
    if len(mapped) < 8 or size > min(MAX_HEADER_BYTES, len(mapped) - 8):
        raise ArtifactError(f"the weights of {where} are no safetensors file: its header is cut")
    try:
        header = json.loads(mapped[8 : 8 + size])
    except ValueError as error:
        raise ArtifactError(f"the weights of {where} have an unreadable header: {error}") from error
    if not isinstance(header, dict):
        raise ArtifactError(f"the weights of {where} have a header that is no table")
    return header, 8 + size


def _tensor(mapped: mmap.mmap, base: int, name: str, entry: Any, where: str) -> torch.Tensor:
    try:
        dtype = _DTYPES[entry["dtype"]]
        shape = [int(size) for size in entry["shape"]]
        begin, end = (int(offset) for offset in entry["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise ArtifactError(
            f"the weight {name} of {where} is not described as safetensors does, or has a dtype that moeflex does "
            f"not know: {entry!r}"
        ) from error
    count = math.prod(shape)
    whole = min([0, *shape]) == 0 and 0 <= begin <= end <= len(mapped) - base
    if not whole or end - begin != count * dtype.itemsize:
        raise ArtifactError(
            f"the weight {name} of {where} is said to lie at bytes {begin} to {end} of {len(mapped) - base}, which "
            f"does not fit its shape {shape} in {dtype}"
        )
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    if (base + begin) % dtype.itemsize:
        content = bytearray(mapped[base + begin : base + end])
        return torch.frombuffer(content, dtype=dtype).view(shape)
    return torch.frombuffer(mapped, dtype=dtype, count=count, offset=base + begin).view(shape)
