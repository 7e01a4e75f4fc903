"""How a cut along one axis travels through one operator of a graph.

A tensor is whole on every rank, or cut along one axis into `parts` equal pieces in rank order: rank
r holds piece r * parts // R. With `parts` below R several ranks hold the same piece (KV heads fewer
than ranks). A rule gives the cut of a node's result, or raises `ShardError`: nothing is guessed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from moe_compiler.errors import MoeflexError
from moe_compiler.passes.nodes import op_name, static_size, tensor


class ShardError(MoeflexError):
    """A graph cannot be cut over ranks; the text is the reason for the user."""


@dataclasses.dataclass(frozen=True, slots=True)
class Cut:
    """One axis of a tensor, counted from the front, in `parts` equal pieces."""

    axis: int
    parts: int


Cuts = Mapping[fx.Node, Cut]

POINTWISE = frozenset(
    """add sub mul truediv div neg pow rsqrt sqrt to float half bfloat16 double type_as type silu gelu relu
    sigmoid tanh exp cos sin abs square clamp where masked_fill dropout contiguous clone detach alias iadd isub
    imul itruediv add_ sub_ mul_ div_ _to_copy""".split()
)
ALONG_DIM = frozenset(("mean", "sum", "softmax", "log_softmax", "amax", "amin", "cumsum"))
NORMS = frozenset(("rms_norm", "layer_norm"))


def result_cut(node: fx.Node, cuts: Cuts) -> Cut:
    """The cut of a node that reads at least one cut tensor.

    Raises:
        ShardError: the operator has no rule, or would mix pieces.
    """
    name = op_name(node)
    rule = _RULES.get(name)
    if name in POINTWISE:
        return pointwise(node, cuts)
    if name in ALONG_DIM or name in NORMS:
        return _along_dim(node, cuts, name)
    if rule is None:
        raise ShardError(f"'{name}' ({node.name}) has no rule for a tensor that is cut over ranks")
    return rule(node, cuts)


def pointwise(node: fx.Node, cuts: Cuts) -> Cut:
    """Operands are aligned at their last axis; a whole operand may only be broadcast along the cut."""
    ndim = _ndim(node)
    found = {
        (cuts[a].axis - _ndim(a) + ndim, cuts[a].parts) for a in node.all_input_nodes if a in cuts
    }
    if len(found) != 1:
        raise ShardError(f"'{node.name}' combines tensors that are cut in different ways")
    axis, parts = found.pop()
    for operand in node.all_input_nodes:
        shape = _shape(operand)
        at = axis - ndim + len(shape)
        if operand not in cuts and at >= 0 and static_size(shape[at]) != 1:
            raise ShardError(
                f"'{node.name}' combines a cut tensor with the whole '{operand.name}' along the cut"
            )
    return Cut(axis, parts)


def _along_dim(node: fx.Node, cuts: Cuts, name: str) -> Cut:
    source, cut = _first(node, cuts)
    ndim = _ndim(source)
    if name in NORMS:
        shape = node.args[1] if len(node.args) > 1 else node.kwargs["normalized_shape"]
        dims = list(range(ndim - len(list(shape)), ndim))  # type: ignore[arg-type]
    else:
        given: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
        if given is None:
            raise ShardError(f"'{node.name}' reduces a cut tensor over all of its axes")
        dims = [d % ndim for d in (given if isinstance(given, (tuple, list)) else [given])]
    if cut.axis in dims:
        raise ShardError(f"'{node.name}' works along the axis that is cut over ranks")
    dropped = _ndim(node) < ndim
    return Cut(cut.axis - (sum(d < cut.axis for d in dims) if dropped else 0), cut.parts)


def _reshape(node: fx.Node, cuts: Cuts) -> Cut:
    """The cut stays on the leading factor of its axis, whether the axis is split or merged."""
    source, cut = _first(node, cuts)
    before, after = _shape(source), _shape(node)
    lead = math.prod(before[: cut.axis])
    axes = [
        axis
        for axis, size in enumerate(after)
        if equal(math.prod(after[:axis]), lead) and _divides(cut.parts, static_size(size))
    ]
    if axes:
        # Axes of size 1 (one sequence, one head) leave a choice: the cut stays where it was.
        return Cut(cut.axis if cut.axis in axes else axes[0], cut.parts)
    raise ShardError(f"'{node.name}' reshapes {tuple(before)} to {tuple(after)} across the cut")


def _transpose(node: fx.Node, cuts: Cuts) -> Cut:
    source, cut = _first(node, cuts)
    order = list(range(_ndim(source)))
    if op_name(node) == "permute":
        dims = list(node.args[1]) if isinstance(node.args[1], (tuple, list)) else node.args[1:]
        order = [int(d) % len(order) for d in dims]  # type: ignore[arg-type]
    else:
        a, b = (int(d) % len(order) for d in node.args[1:3])  # type: ignore[arg-type]
        order[a], order[b] = order[b], order[a]
    return Cut(order.index(cut.axis), cut.parts)


def _unsqueeze(node: fx.Node, cuts: Cuts) -> Cut:
    source, cut = _first(node, cuts)
    at = int(node.args[1] if len(node.args) > 1 else node.kwargs["dim"])  # type: ignore[arg-type]
    return Cut(cut.axis + (at % (_ndim(source) + 1) <= cut.axis), cut.parts)


def _expand(node: fx.Node, cuts: Cuts) -> Cut:
    source, cut = _first(node, cuts)
    return Cut(cut.axis + _ndim(node) - _ndim(source), cut.parts)


def _getitem(node: fx.Node, cuts: Cuts) -> Cut:
    source, cut = _first(node, cuts)
    index = node.args[1]
    if isinstance(index, int) and tensor(source) is None:
        return cut  # one of several results
    index = index if isinstance(index, tuple) else (index,)
    given = sum(i is not None and i is not Ellipsis for i in index)
    axis, out = 0, 0
    for entry in index:
        if entry is Ellipsis:
            skipped = _ndim(source) - given
            if axis <= cut.axis < axis + skipped:
                return Cut(out + cut.axis - axis, cut.parts)
            axis, out = axis + skipped, out + skipped
        elif entry is None:
            out += 1
        elif isinstance(entry, slice) and (axis != cut.axis or entry == slice(None)):
            if axis == cut.axis:
                return Cut(out, cut.parts)
            axis, out = axis + 1, out + 1
        elif isinstance(entry, int) and axis != cut.axis:
            axis += 1
        else:
            raise ShardError(f"'{node.name}' picks elements along the axis that is cut over ranks")
    return Cut(out + cut.axis - axis, cut.parts)


def _pieces(node: fx.Node, cuts: Cuts) -> Cut:
    """chunk, split, cat: along another axis than the cut."""
    found = {cuts.get(a) for a in node.all_input_nodes}
    cut = found.pop()
    if found or cut is None:
        raise ShardError(f"'{node.name}' joins tensors that are cut in different ways")
    position = 1 if op_name(node) == "cat" else 2
    dim: Any = node.args[position] if len(node.args) > position else node.kwargs.get("dim", 0)
    if int(dim) % _ndim(node.all_input_nodes[0]) == cut.axis:
        raise ShardError(f"'{node.name}' works along the axis that is cut over ranks")
    return cut


def _attention(node: fx.Node, cuts: Cuts) -> Cut:
    query, key, value = (_operand(node, i, n) for i, n in enumerate(("query", "key", "value")))
    heads = _ndim(query) - 3
    if any(a not in cuts or cuts[a].axis != heads for a in (query, key, value)):
        raise ShardError(f"'{node.name}' needs query, key and value cut by heads")
    mask = node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")
    if isinstance(mask, fx.Node):
        shape = _shape(mask)
        at = len(shape) - 3
        if mask in cuts or (at >= 0 and static_size(shape[at]) != 1):
            raise ShardError(f"'{node.name}' has a mask of its own for every head")
    return cuts[query]


def _matmul(node: fx.Node, cuts: Cuts) -> Cut:
    first, second = (_operand(node, i, n) for i, n in enumerate(("input", "other")))
    a, b = cuts.get(first), cuts.get(second)
    if a is None or a != b or a.axis >= _ndim(first) - 2:
        raise ShardError(f"'{node.name}' multiplies tensors that are not cut by heads alike")
    return a


_RULES: Mapping[str, Callable[[fx.Node, Cuts], Cut]] = {
    **dict.fromkeys(("view", "reshape", "flatten", "unflatten", "_unsafe_view"), _reshape),
    **dict.fromkeys(("transpose", "permute", "swapaxes"), _transpose),
    "unsqueeze": _unsqueeze,
    "expand": _expand,
    "getitem": _getitem,
    **dict.fromkeys(("chunk", "split", "cat"), _pieces),
    "scaled_dot_product_attention": _attention,
    **dict.fromkeys(("matmul", "bmm"), _matmul),
}


def local_shape(shape: Sequence[Any], cut: Cut) -> list[Any]:
    """The shape of one piece."""
    local = list(shape)
    local[cut.axis] = local[cut.axis] // cut.parts
    return local


def _divides(parts: int, size: int | None) -> bool:
    return size is not None and size % parts == 0 and (size >= parts)


def _operand(node: fx.Node, index: int, name: str) -> fx.Node:
    found = node.args[index] if len(node.args) > index else node.kwargs.get(name)
    if not isinstance(found, fx.Node):
        raise ShardError(f"'{node.name}' has no tensor as its {name}")
    return found


def _first(node: fx.Node, cuts: Cuts) -> tuple[fx.Node, Cut]:
    source = node.args[0]
    if not isinstance(source, fx.Node) or source not in cuts:
        raise ShardError(
            f"'{node.name}' reads a cut tensor as something else than its first argument"
        )
    return source, cuts[source]


def _shape(node: fx.Node) -> Sequence[Any]:
    found = tensor(node)
    if found is None:
        raise ShardError(f"'{node.name}' is no tensor whose shape is known")
    return found.shape


def _ndim(node: fx.Node) -> int:
    return len(_shape(node))


def equal(a: Any, b: Any) -> bool:
    """Equality that adds no guard for symbolic sizes."""
    if isinstance(a, torch.SymInt) or isinstance(b, torch.SymInt):
        from torch.fx.experimental.symbolic_shapes import statically_known_true

        return bool(statically_known_true(a == b))
    return bool(a == b)
