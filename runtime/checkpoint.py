"""Checkpoints of safetensors files, read by position straight into memory that is there already.

```
Checkpoint(folder)    what tensors the folder holds, from the headers alone
StoredTensor          one of them; `read` fills rows of it into a tensor
ParameterSource       the stored tensors that a parameter is made of; `read`, `read_item`
```

Nothing is mapped and nothing is kept: a read takes the bytes that were asked for.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_compiler.errors import CheckpointError

FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_LENGTH_BYTES = 8
_MOST_HEADER_BYTES = 100_000_000  # the limit of the format
_DTYPES: Mapping[str, torch.dtype] = {
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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """One tensor of a file.

    Attributes:
        name: its name there.
        path: the file.
        offset_bytes: where its bytes start in the file.
        shape: its shape.
        dtype: its dtype; None for one that this version cannot read (`format_dtype` names it).
        format_dtype: the dtype as the file spells it.
    """

    name: str
    path: str
    offset_bytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    format_dtype: str

    def read(self, into: Tensor) -> None:
        """Fill a tensor of the same shape; another float dtype is converted on the way.

        Raises:
            CheckpointError: the file ends too early, or holds something else than numbers of this kind.
        """
        assert self.dtype is not None
        if tuple(into.shape) != self.shape:
            raise CheckpointError(
                f"{self.name} in {self.path} has shape {self.shape}; {tuple(into.shape)} is needed"
            )
        if into.dtype is self.dtype and into.is_contiguous():
            self._fill(into)
            return
        straight = torch.empty(self.shape, dtype=self.dtype)
        self._fill(straight)
        into.copy_(straight)

    def item(self, index: int) -> StoredTensor:
        """The part `self[index]`."""
        assert self.dtype is not None
        num_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
        start = self.offset_bytes + index * num_bytes
        return dataclasses.replace(self, offset_bytes=start, shape=self.shape[1:])

    def _fill(self, into: Tensor) -> None:
        if not into.numel():
            return
        num_bytes = into.numel() * into.itemsize
        view = memoryview((ctypes.c_char * num_bytes).from_address(into.data_ptr())).cast("B")
        with open(self.path, "rb", buffering=0) as file:
            file.seek(self.offset_bytes)
            while view:
                count = file.readinto(view)
                if not count:
                    raise CheckpointError(
                        f"{self.path} ends inside of {self.name}; {len(view)} bytes are missing. "
                        "Download or save the checkpoint again"
                    )
                view = view[count:]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSource:
    """What a parameter is read from.

    Attributes:
        parts: the stored tensors, in order: of each part one, or one for every index of the first axis.
        stacked: a part is a list of tensors without the first axis.
        axis: the axis of the parameter along which the parts lie one behind the other.
        shape: the parameter's shape.
        dtype: the parameter's dtype.
    """

    parts: tuple[tuple[StoredTensor, ...], ...]
    stacked: bool
    axis: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def tensors(self) -> tuple[StoredTensor, ...]:
        """All stored tensors."""
        return tuple(tensor for part in self.parts for tensor in part)

    @property
    def num_bytes(self) -> int:
        """Bytes of the parameter."""
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self, into: Tensor) -> None:
        """Fill the whole parameter."""
        if self.stacked:
            for index in range(self.shape[0]):
                self.read_item(index, into[index])
            return
        for piece, (stored,) in zip(self._pieces(into, self.axis), self.parts, strict=True):
            stored.read(piece)

    def read_item(self, index: int, into: Tensor) -> None:
        """Fill `parameter[index]`, where one expert of a stack is all that is needed."""
        if len(self.parts) > 1 and self.axis == 0:
            whole = torch.empty(self.shape, dtype=self.dtype)
            self.read(whole)
            into.copy_(whole[index])
            return
        for piece, part in zip(self._pieces(into, self.axis - 1), self.parts, strict=True):
            (part[index] if self.stacked else part[0].item(index)).read(piece)

    def _pieces(self, into: Tensor, axis: int) -> Sequence[Tensor]:
        if len(self.parts) == 1:
            return (into,)
        lengths = [part[0].shape[self.axis - self.stacked] for part in self.parts]
        return torch.split(into, lengths, axis)

    def fault(self) -> str:
        """Why the parameter cannot be read from these tensors, or ""."""
        if not self.stacked and any(len(part) > 1 for part in self.parts):
            return f"several tensors are stored for it: {[t.name for t in self.tensors][:3]}"
        for stored in self.tensors:
            if (
                stored.dtype is None
                or stored.dtype.is_floating_point != self.dtype.is_floating_point
            ):
                return (
                    f"{stored.name} is stored as {stored.format_dtype}; the model takes {self.dtype} "
                    "(quantised checkpoints are not read)"
                )
        found = self._stored_shape()
        if found != self.shape:
            return f"the checkpoint gives shape {found}; the model has {self.shape}"
        return ""

    def _stored_shape(self) -> tuple[int, ...] | str:
        axis = self.axis - self.stacked
        total: list[int] = []
        for part in self.parts:
            shapes = {stored.shape for stored in part}
            if len(shapes) != 1:
                return f"of several kinds ({sorted(shapes)[:3]})"
            shape = list(shapes.pop())
            if len(self.parts) > 1 and axis >= len(shape):
                return tuple(shape)
            if total:
                total[axis] += shape[axis]
                shape[axis] = total[axis]
                if shape != total:
                    return f"of parts that do not fit together, {tuple(shape)} and {tuple(total)}"
            total = shape
        return (len(self.parts[0]), *total) if self.stacked else tuple(total)


class Checkpoint:
    """The tensors of a folder in Hugging Face's form: one safetensors file, or several with an index.

    Args:
        folder: the folder.

    Raises:
        CheckpointError: there is none, or a file is missing, damaged, or not in this format.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        index = self.folder / INDEX
        if index.is_file():
            where = _json(index).get("weight_map")
            if not isinstance(where, dict) or not all(isinstance(v, str) for v in where.values()):
                raise CheckpointError(f"{index} has no weight_map of names to files")
            files = sorted(set(where.values()))
            if any(Path(name).name != name for name in files):
                raise CheckpointError(f"{index} names files outside of its folder")
        elif (self.folder / FILE).is_file():
            where, files = None, [FILE]
        else:
            raise CheckpointError(
                f"a checkpoint folder holds {FILE}, or {INDEX} and the files that it names; {self.folder} has "
                "neither. (Files of pickled tensors are not read: save the model again as safetensors.)"
            )
        self.tensors: dict[str, StoredTensor] = {}
        for name in files:
            self.tensors |= read_header(self.folder / name)
        lost = sorted(set(where or ()) - set(self.tensors))
        if lost:
            raise CheckpointError(
                f"{index} names {len(lost)} tensors that no file has, as {lost[:3]}"
            )


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file.

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if not 0 < length <= min(_MOST_HEADER_BYTES, size - _LENGTH_BYTES):
                raise CheckpointError(
                    f"{path} is no safetensors file: its header has {length} bytes"
                )
            header = json.loads(file.read(length))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is no safetensors file: {error}") from error
    start = _LENGTH_BYTES + length
    try:
        return {
            name: _stored(name, entry, path, start, size)
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(f"{path} has a header that cannot be read: {error!r}") from error


def _stored(name: str, entry: Mapping[str, Any], path: Path, start: int, size: int) -> StoredTensor:
    first, last = entry["data_offsets"]
    shape = tuple(int(extent) for extent in entry["shape"])
    dtype = _DTYPES.get(entry["dtype"])
    fits = 0 <= first <= last <= size - start
    if dtype is not None:
        fits &= last - first == math.prod(shape) * dtype.itemsize
    if not fits:
        raise CheckpointError(
            f"{path} is damaged or cut short: {name} {shape} should lie at bytes {first} to {last} of {size - start}"
        )
    return StoredTensor(
        name=name,
        path=str(path),
        offset_bytes=start + first,
        shape=shape,
        dtype=dtype,
        format_dtype=str(entry["dtype"]),
    )


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    return found
