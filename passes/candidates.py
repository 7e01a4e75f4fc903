"""Find places in a graph that have the structure of an MoE block.

1. anchor: an integer tensor [T, K] that is computed from data: the routing ids, whatever made them;
2. output: the nearest float post-dominator of the anchor with T rows of size H;
3. input: the nearest float dominator of the output with T rows of size H from which the anchor is
   computed;
4. logits: the last matrix product before the anchor;
5. weights: the latest [T, K] (or [T, E]) float such that the experts can be computed from input,
   ids and weights alone, without looking at the logits.

Every search is bounded by the positions of the block, so that a deep model costs one layer at a time.

Source: dominator-based region finding is standard compiler practice; the cut at (x, ids, weights)
is ours.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from torch import fx

from moe_compiler.passes.dataflow import DataFlow, chain
from moe_compiler.passes.nodes import (
    CONTRACTIONS,
    is_float,
    is_hidden,
    is_integer,
    last_size,
    num_rows,
    op_name,
    shape_hint,
    tensor,
)
from moe_compiler.passes.operands import Operands
from moe_compiler.passes.subgraph import Slice, SliceError, cut

MAX_TOP_K = 64


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A block found by structure, not yet proven; the fields are those of `Match`."""

    flow: DataFlow
    x: fx.Node
    ids: fx.Node
    weights: fx.Node
    dense: bool
    logits: fx.Node | None
    output: fx.Node
    part: Slice
    operands: Operands

    @property
    def top_k(self) -> int:
        """K."""
        found = last_size(self.ids)
        assert found is not None
        return found


def may_hold_moe(gm: fx.GraphModule) -> bool:
    """Cheap test: without a selection of experts there is nothing to find."""
    return any(
        is_integer(node) and node.op in ("call_function", "call_method") and _is_anchor(node)
        for node in gm.graph.nodes
    )


def _is_anchor(node: fx.Node) -> bool:
    found = tensor(node)
    if found is None or found.ndim not in (2, 3):
        return False
    width = last_size(node)
    return width is not None and 1 <= width <= MAX_TOP_K


def anchors(flow: DataFlow) -> Iterator[fx.Node]:
    """Integer tensors [.., K] that are computed from data."""
    for node in flow.nodes:
        called = node.op in ("call_function", "call_method")
        if called and not flow.constant[node] and is_integer(node) and _is_anchor(node):
            yield node


def frames(flow: DataFlow, anchor: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Pairs (x, output) around an anchor, tightest first."""
    rows = num_rows(anchor)
    if rows is None:
        return
    above = [
        n
        for n in itertools.islice(chain(flow.dominators, anchor), 80)
        if is_float(n) and num_rows(n) == rows and last_size(n) is not None
    ]
    tried: set[int] = set()
    count = 0
    for hidden in (last_size(n) for n in above):
        if hidden is None or hidden in tried:
            continue
        tried.add(hidden)
        for output in itertools.islice(chain(flow.post_dominators(hidden, rows), anchor), 40):
            if not is_hidden(output, hidden, rows):
                continue
            x = _nearest_input(flow, output, above, hidden)
            if x is None:
                continue
            count += 1
            yield x, output
            if count >= 12:
                return


def _nearest_input(
    flow: DataFlow, output: fx.Node, above: Sequence[fx.Node], hidden: int
) -> fx.Node | None:
    allowed = {n for n in above if last_size(n) == hidden}
    first = min(flow.position[n] for n in allowed)
    for node in chain(flow.dominators, output):
        if node in allowed:
            return node
        if flow.position[node] < first:
            break
    return None


def has_two_gemms(flow: DataFlow, anchor: fx.Node, x: fx.Node, output: fx.Node) -> bool:
    """Whether one GEMM with a weight lies behind another one, off the way to the anchor."""
    first, last = flow.position[x], flow.position[output]
    router = flow.ancestors([anchor], first=first)
    depth: dict[fx.Node, int] = {}
    for node in flow.nodes[first : last + 1]:
        if flow.constant[node]:
            continue
        before = max((depth.get(a, 0) for a in flow.data_inputs[node]), default=0)
        if node not in router and op_name(node) in CONTRACTIONS:
            before += any(flow.weight_leaf(a) is not None for a in flow.inputs[node])
        depth[node] = before
    return depth.get(output, 0) >= 2


def find_logits(flow: DataFlow, anchor: fx.Node, x: fx.Node) -> fx.Node | None:
    """The router logits: the last matrix product that dominates the anchor, with the bias added to it."""
    previous = anchor
    first = flow.position[x]
    for node in chain(flow.dominators, anchor):
        if flow.position[node] <= first:
            return None
        if op_name(node) in CONTRACTIONS:
            return previous if _adds_bias(flow, previous, node) else node
        previous = node
    return None


def _adds_bias(flow: DataFlow, node: fx.Node, product: fx.Node) -> bool:
    return (
        op_name(node) in ("add", "add_", "iadd")
        and flow.data_inputs[node] == [product]
        and is_float(node)
        and shape_hint(node) == shape_hint(product)
    )


def cuts(
    flow: DataFlow,
    anchor: fx.Node,
    x: fx.Node,
    output: fx.Node,
    logits: fx.Node | None,
    *,
    parts: bool = False,
) -> Iterator[tuple[fx.Node, bool, Slice] | str]:
    """Places for the combine weights, latest first: (node, dense, slice); a reason when none."""
    router = _router_only(flow, anchor, x, output, logits)
    rows, top_k = num_rows(anchor), last_size(anchor)
    width = last_size(logits) if logits is not None else None
    reason, count = "", 0
    for weights in sorted(router, key=flow.position.__getitem__, reverse=True):
        size = last_size(weights)
        if not is_float(weights) or num_rows(weights) != rows or size not in (top_k, width):
            continue
        if weights is logits:
            continue
        try:
            part = cut(flow, [x, anchor, weights], [output], parts=parts)
        except SliceError as error:
            reason = reason or str(error)
            continue
        body = set(part.body)
        if (logits is not None and logits in body) or weights not in _read_by(flow, body):
            continue
        if any(_selects(flow, node) for node in body):
            reason = reason or "it selects among scores again, behind ids and combine weights"
            continue
        count += 1
        yield weights, size != top_k, part
    if count == 0:
        yield reason or "no combine weights [T, K] or [T, E] are computed beside the ids"


def _selects(flow: DataFlow, node: fx.Node) -> bool:
    """Whether a node picks entries by their values: what lies behind the ids only sorts ids."""
    return op_name(node) in ("topk", "argmax", "kthvalue") and any(
        is_float(read) for read in flow.data_inputs[node]
    )


def _read_by(flow: DataFlow, body: set[fx.Node]) -> set[fx.Node]:
    return {read for node in body for read in flow.inputs[node]}


def _router_only(
    flow: DataFlow, anchor: fx.Node, x: fx.Node, output: fx.Node, logits: fx.Node | None
) -> list[fx.Node]:
    """Nodes computed from the logits alone, without another look at the hidden states."""
    start = logits if logits is not None else anchor
    inside = {start}
    for node in flow.nodes[flow.position[start] + 1 : flow.position[output]]:
        reads = flow.data_inputs[node]
        if reads and all(a in inside for a in reads):
            inside.add(node)
    return sorted(inside, key=flow.position.__getitem__)
