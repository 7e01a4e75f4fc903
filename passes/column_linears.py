"""Which linears of a graph are cut column-wise over ranks, found by structure.

```
attention    the linears in front of query, key and value, by heads
MLP          the linears in front of a pointwise run that ends in another linear, by columns
head         a linear to more columns than it has rows, whose result leaves the graph
```

A fused projection, whose result is split along its columns at once, becomes a linear a part first: a
rank's pieces of the parts lie apart in its weight.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import fx

from moe_compiler.passes.nodes import op_name, static_size, tensor
from moe_compiler.passes.shard_rules import POINTWISE, ShardError

ATTENTION = "scaled_dot_product_attention"
_SPLITS = frozenset(("split", "chunk", "split_with_sizes"))
_BETWEEN_HEAD_AND_RESULT = POINTWISE | {"view", "reshape", "unsqueeze", "getitem"}


@dataclasses.dataclass(frozen=True)
class ColumnLinears:
    """What is cut.

    Attributes:
        parts: the number of pieces of every linear that is cut and followed.
        heads: linears to the vocabulary; their pieces are gathered at once.
        whole: why an MLP or a head stays whole, for the user.
    """

    parts: dict[fx.Node, int]
    heads: tuple[fx.Node, ...]
    whole: tuple[str, ...]


def find_column_linears(graph: fx.Graph, num_ranks: int) -> ColumnLinears:
    """Find the linears that tensor parallelism over `num_ranks` ranks cuts column-wise.

    Raises:
        ShardError: an attention cannot be cut by heads.
    """
    parts = _attention_linears(graph, num_ranks)
    whole: list[str] = []
    downs: set[fx.Node] = set()
    linears = [n for n in graph.nodes if op_name(n) == "linear"]
    for down in linears:
        columns = _mlp_columns(down)
        if not columns or down in parts or any(c in parts or c in downs for c in columns):
            continue
        width = _columns(columns[0])
        if width is None or width % num_ranks:
            whole.append(
                f"the MLP of '{down.name}' stays whole: {width} columns, {num_ranks} ranks"
            )
            continue
        parts.update(dict.fromkeys(columns, num_ranks))
        downs.add(down)
    heads = []
    for linear in linears:
        if linear in parts or linear in downs or not _is_head(linear):
            continue
        columns_of_head = _columns(linear)
        if columns_of_head is None or columns_of_head % num_ranks:
            whole.append(
                f"the head '{linear.name}' stays whole: {columns_of_head} columns, {num_ranks} ranks"
            )
        else:
            heads.append(linear)
    return ColumnLinears(parts, tuple(heads), tuple(whole))


@dataclasses.dataclass(frozen=True)
class FusedPart:
    """One part of a fused linear.

    Attributes:
        results: the nodes that hold it.
        start, length: its columns.
    """

    results: tuple[fx.Node, ...]
    start: int
    length: int


def fused_linears(graph: fx.Graph) -> Iterator[tuple[fx.Node, tuple[FusedPart, ...]]]:
    """The linears in front of an attention or an MLP whose parts are to be cut apart from each other."""
    found: dict[fx.Node, None] = {}
    for node in graph.nodes:
        if op_name(node) == ATTENTION:
            for operand in node.all_input_nodes[:3]:
                found |= dict.fromkeys(_nearest_linears(operand))
        elif op_name(node) == "linear":
            found |= dict.fromkeys(
                _behind_pointwise(node.all_input_nodes[0], through=_SPLITS) or ()
            )
    for linear in found:
        parts = _parts_of(linear)
        if parts:
            yield linear, parts


def _parts_of(linear: fx.Node) -> tuple[FusedPart, ...]:
    """The parts of a linear that only splits along its columns read; none if there is another reader."""
    value = tensor(linear)
    if value is None or not linear.users:
        return ()
    by_range: dict[tuple[int, int], list[fx.Node]] = {}
    for split in linear.users:
        results = [tensor(user) for user in split.users]
        if op_name(split) not in _SPLITS or any(r is None for r in results):
            return ()
        dim = split.args[2] if len(split.args) > 2 else split.kwargs.get("dim", 0)
        sizes = [static_size(part.shape[-1]) for part in _split_values(split)]
        if not isinstance(dim, int) or dim % value.ndim != value.ndim - 1 or None in sizes:
            return ()
        starts = list(itertools.accumulate((int(s or 0) for s in sizes), initial=0))
        for user in split.users:
            index = user.args[1] if op_name(user) == "getitem" else None
            if not isinstance(index, int):
                return ()
            index %= len(sizes)
            by_range.setdefault((starts[index], int(sizes[index] or 0)), []).append(user)
    return tuple(FusedPart(tuple(r), *span) for span, r in sorted(by_range.items()))


def _split_values(split: fx.Node) -> Sequence[Any]:
    found = split.meta.get("val", split.meta.get("example_value"))
    return found if isinstance(found, (tuple, list)) else ()


# ---- attention ----------------------------------------------------------------------------------


def _attention_linears(graph: fx.Graph, num_ranks: int) -> dict[fx.Node, int]:
    found: dict[fx.Node, int] = {}
    for node in graph.nodes:
        if op_name(node) != ATTENTION:
            continue
        for operand in node.all_input_nodes[:3]:
            linears = _nearest_linears(operand)
            if len(linears) != 1:
                raise ShardError(
                    f"{len(linears)} linears lead into '{operand.name}' of an attention; one is needed for each "
                    "of query, key and value (caches as inputs are not cut)"
                )
            found[linears[0]] = _pieces_of_heads(linears[0], num_ranks)
    return found


def _nearest_linears(node: fx.Node) -> list[fx.Node]:
    """The nearest linears that a node is computed from, less those that another of them is computed from.

    The latter are the down projections of latent attention, whose rotary part is the same for every head.
    """
    found = dict.fromkeys(_linears_before([node]))
    if len(found) > 1:
        for linear in list(found):
            for earlier in _ancestors(linear, among=set(found)):
                found.pop(earlier, None)
    return list(found)


def _linears_before(nodes: Iterable[fx.Node]) -> Iterator[fx.Node]:
    seen, waiting = set(), list(nodes)
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if op_name(node) == "linear":
            yield node
        else:
            waiting += node.all_input_nodes


def _ancestors(linear: fx.Node, *, among: set[fx.Node]) -> set[fx.Node]:
    """Those of `among` that a linear is computed from without an attention between."""
    seen, waiting = set(), list(linear.all_input_nodes)
    while waiting:
        node = waiting.pop()
        if node not in seen and op_name(node) != ATTENTION:
            seen.add(node)
            waiting += node.all_input_nodes
    return seen & among


def _pieces_of_heads(linear: fx.Node, num_ranks: int) -> int:
    """R, or the number of heads where it is smaller; never a part of a head."""
    heads = _num_heads(linear)
    if heads % num_ranks == 0:
        return num_ranks
    if num_ranks % heads == 0:
        return heads
    raise ShardError(
        f"{heads} heads of '{linear.name}' cannot be cut over {num_ranks} ranks, nor held whole by equal "
        "groups of ranks"
    )


def _num_heads(linear: fx.Node) -> int:
    """Into how many heads a reshape behind a linear splits its result."""
    columns = _columns(linear)
    for node in linear.users:
        found = tensor(node)
        if found is None or found.ndim < 2 or op_name(node) not in ("view", "reshape", "unflatten"):
            continue
        heads, size = (static_size(s) for s in found.shape[-2:])
        if heads is not None and size is not None and heads * size == columns:
            return heads
    raise ShardError(f"the result of '{linear.name}' is not split into heads by the next operator")


# ---- MLP and head -------------------------------------------------------------------------------


def _mlp_columns(down: fx.Node) -> tuple[fx.Node, ...]:
    """The linears whose results go through pointwise operators into `down` and nowhere else."""
    source = down.all_input_nodes[0]
    if op_name(source) == "linear":
        return ()  # nothing between: a low-rank pair
    linears = _behind_pointwise(source)
    if not linears or len({_columns(linear) for linear in linears}) != 1:
        return ()
    waiting, seen = list(linears), {down}
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if node not in linears and op_name(node) not in POINTWISE:
            return ()
        waiting += node.users
    return linears


def _behind_pointwise(
    node: fx.Node, *, through: frozenset[str] = frozenset()
) -> tuple[fx.Node, ...] | None:
    """The linears that a node is a pointwise function of; None if it is one of something else, too."""
    found: dict[fx.Node, None] = {}
    seen, waiting = set(), [node]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        name = op_name(node)
        if name == "linear":
            found[node] = None
        elif name in POINTWISE or name in through or (through and name == "getitem"):
            waiting += node.all_input_nodes
        else:
            return None
    return tuple(found)


def _is_head(linear: fx.Node) -> bool:
    value, source = tensor(linear), tensor(linear.all_input_nodes[0])
    if value is None or source is None:
        return False
    columns, rows = static_size(value.shape[-1]), static_size(source.shape[-1])
    if columns is None or rows is None or columns <= rows:
        return False
    waiting, seen = list(linear.users), set()
    while waiting:
        node = waiting.pop()
        if node in seen or node.op == "output":
            continue
        seen.add(node)
        if op_name(node) not in _BETWEEN_HEAD_AND_RESULT:
            return False
        waiting += node.users
    return True


def _columns(linear: fx.Node) -> int | None:
    value = tensor(linear)
    return None if value is None else static_size(value.shape[-1])
