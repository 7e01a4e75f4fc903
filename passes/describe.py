"""What a report says about a block besides its spec.

How the graph spells it, its shared expert, and what of its router is read elsewhere.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import fx

from moe_compiler.passes.candidates import Candidate
from moe_compiler.passes.dataflow import DataFlow
from moe_compiler.passes.nodes import (
    CASTS,
    CONTRACTIONS,
    VIEWS,
    is_float,
    op_name,
    shape_hint,
    tensor,
)
from moe_compiler.passes.subgraph import LOW_FLOATS, Slice

_GROUPED = frozenset({"_grouped_mm", "grouped_mm", "grouped_mm_fallback"})


def expert_form(part: Slice) -> str:
    """How the graph spells the experts: "grouped", "gathered", "loop" or "dense"."""
    names = {op_name(n) for n in part.body}
    if names & _GROUPED:
        return "grouped"
    gathers = False
    matrices = 0
    for node in part.body:
        if op_name(node) not in CONTRACTIONS:
            continue
        for operand in part.flow.inputs[node]:
            found = part.weight_leaf(operand)
            if found is not None:
                gathers |= found[1]
                matrices += 1
    if gathers:
        return "gathered"
    if names & {
        "where",
        "nonzero",
        "index_add",
        "index_add_",
        "setitem",
        "index_put",
        "index_put_",
    }:
        return "loop"
    return "loop" if matrices > 3 and any(_routed_rows(part, n) for n in part.body) else "dense"


def _routed_rows(part: Slice, node: fx.Node) -> bool:
    """Whether a node selects rows by a data-dependent index."""
    return op_name(node) in ("index", "getitem", "split", "index_select") and any(
        (t := tensor(a)) is not None and not t.is_floating_point()
        for a in part.flow.data_inputs[node]
    )


def cast_dtypes(part: Slice) -> list[torch.dtype]:
    """Floating dtypes that the slice casts to."""
    found = {t.dtype for n in part.body if (t := tensor(n)) is not None and t.dtype in LOW_FLOATS}
    return sorted(found, key=str)


def escaping(candidate: Candidate) -> tuple[str, ...]:
    """What of the router is read outside of the block."""
    flow = candidate.flow
    inside = flow.ancestors(
        [candidate.output], stop=[candidate.x], first=flow.position[candidate.x]
    )
    named = (("logits", candidate.logits), ("ids", candidate.ids), ("weights", candidate.weights))
    found = []
    for name, node in named:
        if node is not None and any(u not in inside and not _is_dead(u) for u in flow.users[node]):
            found.append(name)
    return tuple(found)


def _is_dead(node: fx.Node) -> bool:
    return node.op != "output" and not node.users and not node.is_impure()


@dataclasses.dataclass(frozen=True)
class SharedExpert:
    """A dense expert beside the routed ones; kind is "", "plain" or "gated"."""

    kind: str = ""
    intermediate: int = 0


def shared_expert(flow: DataFlow, x: fx.Node, output: fx.Node) -> SharedExpert:
    """Look for a dense expert of the same hidden states that is added to the routed result."""
    node = output
    for _ in range(6):
        users = [u for u in flow.data_users[node] if is_float(u)]
        added = next((u for u in users if op_name(u) in ("add", "add_", "iadd")), None)
        if added is not None:
            others = [a for a in flow.data_inputs[added] if a is not node]
            return _dense_expert(flow, x, others[0]) if others else SharedExpert()
        follow = [u for u in users if op_name(u) in VIEWS | CASTS | {"mul", "mul_", "imul"}]
        if len(follow) != 1:
            return SharedExpert()
        node = follow[0]
    return SharedExpert()


def _dense_expert(flow: DataFlow, x: fx.Node, other: fx.Node) -> SharedExpert:
    source = flow.storage(x)
    first = min(flow.position[x], flow.position[source])
    above = flow.ancestors([other], stop=[x, source], first=first)
    if x not in above and source not in above:
        return SharedExpert()
    gemms = [
        n
        for n in above
        if op_name(n) in CONTRACTIONS and any(flow.weight_leaf(a) for a in flow.inputs[n])
    ]
    if len(gemms) < 2:
        return SharedExpert()
    widths = [w for n in gemms if (w := shape_hint(n)[-1]) is not None]
    hidden = shape_hint(x)[-1]
    gated = 1 in widths and any(op_name(n) == "sigmoid" for n in above)
    inner = [w for w in widths if w not in (1, hidden)]
    return SharedExpert("gated" if gated else "plain", max(inner, default=hidden or 0))
