"""A buffer that is only filled part by part, written as the concatenation that it is.

```
k = x.new_empty(...); k[..., :d].copy_(a); k[..., d:].copy_(b)    ->    k = cat((a, b), -1)
```

Transformers writes the keys of latent attention so. In-place writes hide from what follows a graph's values
where a tensor comes from.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from moe_compiler.passes.nodes import op_name, static_size, tensor

_NEW = frozenset(("new_empty", "empty", "empty_like"))


@dataclasses.dataclass(frozen=True)
class _Part:
    """One write: `value` into [start, stop) of an axis."""

    axis: int
    start: int
    stop: int
    value: fx.Node
    view: fx.Node
    copy: fx.Node


def join_written_parts(graph: fx.Graph) -> int:
    """Write every such buffer of a graph as a concatenation, in place; returns how many."""
    order = {node: index for index, node in enumerate(graph.nodes)}
    count = 0
    for buffer in [n for n in graph.nodes if op_name(n) in _NEW]:
        parts = _parts(buffer, order)
        if not parts:
            continue
        last = max((part.copy for part in parts), key=order.__getitem__)
        with graph.inserting_after(last):
            joined = graph.call_function(
                torch.cat, ([part.value for part in parts],), {"dim": parts[0].axis}
            )
        joined.meta = dict(buffer.meta)
        for part in parts:
            graph.erase_node(part.copy)
            graph.erase_node(part.view)
        buffer.replace_all_uses_with(joined)
        graph.erase_node(buffer)
        count += 1
    return count


def _parts(buffer: fx.Node, order: dict[fx.Node, int]) -> list[_Part]:
    """The writes that fill a buffer, in its order; none if it is filled in another way."""
    whole = tensor(buffer)
    if whole is None:
        return []
    parts, readers = [], []
    for user in buffer.users:
        part = _part(buffer, user)
        if part is None:
            readers.append(user)
        else:
            parts.append(part)
    parts.sort(key=lambda part: part.start)
    if len(parts) < 2 or len({part.axis for part in parts}) != 1:
        return []
    edges = [0, *(part.stop for part in parts)]
    size = static_size(whole.shape[parts[0].axis])
    if [part.start for part in parts] != edges[:-1] or edges[-1] != size:
        return []
    last = max(order[part.copy] for part in parts)
    return parts if all(order[reader] > last for reader in readers) else []


def _part(buffer: fx.Node, view: fx.Node) -> _Part | None:
    copies = list(view.users)
    if op_name(view) != "getitem" or view.args[0] is not buffer or len(copies) != 1:
        return None
    (copy,) = copies
    value = copy.args[1] if len(copy.args) == 2 else None
    if op_name(copy) != "copy_" or copy.args[0] is not view or copy.users or copy.kwargs:
        return None
    whole, part = tensor(buffer), tensor(view)
    found = tensor(value) if isinstance(value, fx.Node) else None
    if whole is None or part is None or found is None:
        return None
    span = _span(view.args[1], whole)
    alike = found.dtype == whole.dtype and tuple(found.shape) == tuple(part.shape)
    if span is None or not alike:
        return None
    assert isinstance(value, fx.Node)
    return _Part(*span, value, view, copy)


def _span(index: Any, whole: torch.Tensor) -> tuple[int, int, int] | None:
    """(axis, start, stop) of an index that takes a range of one axis and all of the others."""
    entries: Sequence[Any] = index if isinstance(index, tuple) else (index,)
    if sum(entry is Ellipsis for entry in entries) > 1:
        return None
    if Ellipsis in entries:
        at = entries.index(Ellipsis)
        missing = whole.ndim - len(entries) + 1
        entries = (*entries[:at], *[slice(None)] * missing, *entries[at + 1 :])
    ranges = [(i, e) for i, e in enumerate(entries) if e != slice(None)]
    if len(ranges) != 1 or not isinstance(ranges[0][1], slice):
        return None
    axis, given = ranges[0]
    size = static_size(whole.shape[axis])
    bounds = (given.start, given.stop, given.step)
    if size is None or any(not (b is None or isinstance(b, int)) for b in bounds):
        return None
    start, stop, step = given.indices(size)
    return (axis, start, stop) if step == 1 else None
