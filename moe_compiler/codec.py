"""Frozen dataclasses to strict JSON values and back.

Works on every dataclass whose fields are numbers, strings, booleans, enums, other dataclasses, tuples of these, or one
of these or None. Infinite floats travel as the strings "inf" and "-inf".
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import types
import typing
from collections.abc import Sequence
from typing import Any, TypeVar


def encode(value: Any) -> Any:
    """Dataclasses, enums, tuples and infinite floats to what `json.dumps` takes."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: encode(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, tuple | list):
        return [encode(entry) for entry in value]
    if isinstance(value, float) and math.isinf(value):
        return "inf" if value > 0 else "-inf"
    return value


T = TypeVar("T")


def decode(cls: type[T], fields: dict[str, Any]) -> T:
    """Build the dataclass `cls` from what `encode` made of it.

    Raises:
        TypeError: a field is missing or unknown.
        ValueError: a value is not one of a closed set.
    """
    hints = _hints(typing.cast("Any", cls))
    unknown = sorted(set(fields) - set(hints))
    if unknown:
        raise TypeError(f"{cls.__name__} has no field {unknown[0]!r}")
    return cls(**{name: _decode_value(hints[name], entry) for name, entry in fields.items()})


@functools.cache
def _hints(cls: Any) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _decode_value(hint: Any, entry: Any) -> Any:
    if typing.get_origin(hint) is tuple:
        return _decode_tuple(typing.get_args(hint), entry)
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        inner = next(arg for arg in typing.get_args(hint) if arg is not type(None))
        return None if entry is None else _decode_value(inner, entry)
    if dataclasses.is_dataclass(hint):
        return decode(typing.cast("type[Any]", hint), entry)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return hint(entry)
    return float(entry) if hint is float else entry


def _decode_tuple(args: tuple[Any, ...], entry: Sequence[Any]) -> tuple[Any, ...]:
    if len(args) == 2 and args[1] is Ellipsis:
        return tuple(_decode_value(args[0], item) for item in entry)
    return tuple(_decode_value(arg, item) for arg, item in zip(args, entry, strict=True))
